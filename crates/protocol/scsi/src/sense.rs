//! Sense data: what went wrong, in both formats (SPC-4 4.5).

use std::fmt;

use arrayvec::ArrayVec;

use crate::status::Status;

/// The category of an error (SPC-4 4.5.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to report.
    NoSense = 0x0,
    /// The unit cannot be accessed now.
    NotReady = 0x2,
    /// The medium failed.
    MediumError = 0x3,
    /// The unit failed.
    HardwareError = 0x4,
    /// The command or its parameters are wrong.
    IllegalRequest = 0x5,
    /// A change that the initiator must know about.
    UnitAttention = 0x6,
    /// The medium may not be written.
    DataProtect = 0x7,
    /// A third-party copy was aborted.
    CopyAborted = 0xa,
    /// The command was aborted; it may be retried.
    AbortedCommand = 0xb,
    /// A comparison found a difference.
    Miscompare = 0xe,
    /// The command has succeeded, with information about it.
    Completed = 0xf,
}

/// Additional sense code and qualifier, under the names of SPC-4 annex F.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenseCode(pub u8, pub u8);

#[allow(missing_docs)] // the names are the standard's own
impl SenseCode {
    pub const NONE: Self = Self(0x00, 0x00);
    pub const OPERATION_IN_PROGRESS: Self = Self(0x00, 0x16);
    pub const EXTENDED_COPY_INFORMATION_AVAILABLE: Self = Self(0x00, 0x20);
    pub const BECOMING_READY: Self = Self(0x04, 0x01);
    pub const INITIALIZING_COMMAND_REQUIRED: Self = Self(0x04, 0x02);
    pub const ASYMMETRIC_ACCESS_STATE_TRANSITION: Self = Self(0x04, 0x0a);
    pub const TARGET_PORT_IN_UNAVAILABLE_STATE: Self = Self(0x04, 0x0c);
    pub const UNREACHABLE_COPY_TARGET: Self = Self(0x08, 0x04);
    pub const WRITE_ERROR: Self = Self(0x0c, 0x00);
    pub const THIRD_PARTY_DEVICE_FAILURE: Self = Self(0x0d, 0x01);
    pub const COPY_TARGET_DEVICE_NOT_REACHABLE: Self = Self(0x0d, 0x02);
    pub const INCORRECT_COPY_TARGET_DEVICE_TYPE: Self = Self(0x0d, 0x03);
    pub const INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT: Self = Self(0x0e, 0x03);
    pub const UNRECOVERED_READ_ERROR: Self = Self(0x11, 0x00);
    pub const MISCORRECTED_ERROR: Self = Self(0x11, 0x0a);
    pub const PARAMETER_LIST_LENGTH_ERROR: Self = Self(0x1a, 0x00);
    pub const MISCOMPARE_DURING_VERIFY: Self = Self(0x1d, 0x00);
    pub const INVALID_OPERATION_CODE: Self = Self(0x20, 0x00);
    pub const LBA_OUT_OF_RANGE: Self = Self(0x21, 0x00);
    pub const INVALID_TOKEN_OPERATION: Self = Self(0x23, 0x00);
    pub const UNSUPPORTED_TOKEN_TYPE: Self = Self(0x23, 0x01);
    pub const TOKEN_UNKNOWN: Self = Self(0x23, 0x04);
    pub const TOKEN_CANCELLED: Self = Self(0x23, 0x08);
    pub const INVALID_TOKEN_LENGTH: Self = Self(0x23, 0x0a);
    pub const INVALID_FIELD_IN_CDB: Self = Self(0x24, 0x00);
    pub const LOGICAL_UNIT_NOT_SUPPORTED: Self = Self(0x25, 0x00);
    pub const INVALID_FIELD_IN_PARAMETER_LIST: Self = Self(0x26, 0x00);
    pub const INVALID_RELEASE_OF_PERSISTENT_RESERVATION: Self = Self(0x26, 0x04);
    pub const TOO_MANY_TARGET_DESCRIPTORS: Self = Self(0x26, 0x06);
    pub const UNSUPPORTED_TARGET_DESCRIPTOR_TYPE: Self = Self(0x26, 0x07);
    pub const TOO_MANY_SEGMENT_DESCRIPTORS: Self = Self(0x26, 0x08);
    pub const UNSUPPORTED_SEGMENT_DESCRIPTOR_TYPE: Self = Self(0x26, 0x09);
    pub const UNEXPECTED_INEXACT_SEGMENT: Self = Self(0x26, 0x0a);
    pub const INLINE_DATA_LENGTH_EXCEEDED: Self = Self(0x26, 0x0b);
    pub const WRITE_PROTECTED: Self = Self(0x27, 0x00);
    pub const SOFTWARE_WRITE_PROTECTED: Self = Self(0x27, 0x02);
    pub const SPACE_ALLOCATION_FAILED: Self = Self(0x27, 0x07);
    pub const POWER_ON_OR_RESET: Self = Self(0x29, 0x00);
    pub const SCSI_BUS_RESET: Self = Self(0x29, 0x02);
    pub const BUS_DEVICE_RESET: Self = Self(0x29, 0x03);
    pub const NEXUS_LOSS: Self = Self(0x29, 0x07);
    pub const MODE_PARAMETERS_CHANGED: Self = Self(0x2a, 0x01);
    pub const RESERVATIONS_PREEMPTED: Self = Self(0x2a, 0x03);
    pub const RESERVATIONS_RELEASED: Self = Self(0x2a, 0x04);
    pub const REGISTRATIONS_PREEMPTED: Self = Self(0x2a, 0x05);
    pub const ASYMMETRIC_ACCESS_STATE_CHANGED: Self = Self(0x2a, 0x06);
    pub const CAPACITY_DATA_CHANGED: Self = Self(0x2a, 0x09);
    pub const COMMANDS_CLEARED: Self = Self(0x2f, 0x00);
    pub const COMMANDS_CLEARED_BY_DEVICE_SERVER: Self = Self(0x2f, 0x02);
    pub const THIN_PROVISIONING_SOFT_THRESHOLD_REACHED: Self = Self(0x38, 0x07);
    pub const SAVING_NOT_SUPPORTED: Self = Self(0x39, 0x00);
    pub const LOGICAL_UNIT_FAILURE: Self = Self(0x3e, 0x01);
    pub const LOGICAL_UNIT_FAILED_SELF_TEST: Self = Self(0x3e, 0x03);
    pub const INQUIRY_DATA_CHANGED: Self = Self(0x3f, 0x03);
    pub const REPORTED_LUNS_CHANGED: Self = Self(0x3f, 0x0e);
    pub const DATA_PHASE_ERROR: Self = Self(0x4b, 0x00);
    pub const INSUFFICIENT_REGISTRATION_RESOURCES: Self = Self(0x55, 0x04);
    pub const INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN: Self = Self(0x55, 0x0d);
}

/// Position of the invalid field (SPC-4 4.5.2.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FieldPointer {
    /// Whether it is in the command descriptor block; else it is in the parameter list.
    pub in_cdb: bool,
    /// Its first byte.
    pub byte: u16,
    /// Its highest bit, if the field is smaller than a byte.
    pub bit: Option<u8>,
}

/// Sense data independent of its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sense {
    /// The category.
    pub key: SenseKey,
    /// The specific error.
    pub code: SenseCode,
    /// The first block that failed, or for a miscompare the offset in bytes of the first
    /// difference (SBC-3 4.18).
    pub information: Option<u64>,
    /// The invalid field.
    pub field: Option<FieldPointer>,
    /// The progress of a third-party copy.
    pub copy_point: Option<CopyFailurePoint>,
}

/// Where a third-party copy stopped (SPC-4 5.17.7.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CopyFailurePoint {
    /// Number of the segment.
    pub segment: u16,
    /// The field that caused it.
    pub field: Option<CopyFieldPointer>,
    /// The answer of its source or destination.
    pub cscd_answer: Option<CscdAnswer>,
}

/// First byte of the field for which a third-party copy stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyFieldPointer {
    /// Of the parameter list.
    List(u16),
    /// Of the segment's descriptor.
    Segment(u16),
}

/// The answer of the source or destination of a third-party copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CscdAnswer {
    /// Whether it is the destination's, else the source's.
    pub is_destination: bool,
    /// Its status.
    pub status: Status,
    /// Key and code of its sense data, if there is any.
    pub sense: Option<(SenseKey, SenseCode)>,
}

/// The format of sense data (SPC-4 4.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenseFormat {
    /// 18 bytes, and the status and sense data of a copy's source or destination; block numbers
    /// beyond 2^32 do not fit.
    Fixed,
    /// A header of 8 bytes, and descriptors as needed.
    Descriptor,
}

/// Length in fixed format.
const FIXED_LEN: usize = 18;

/// Longest sense data: a header, descriptors of information, command-specific information and a
/// field pointer, and forwarded sense data.
pub const SENSE_MAX: usize = 8 + 12 + 12 + 8 + 4 + FIXED_LEN;

/// Encoded sense data; empty if there is none.
pub type SenseBytes = ArrayVec<u8, SENSE_MAX>;

impl Sense {
    /// Sense data with `key` and `code` only.
    #[must_use]
    pub const fn new(key: SenseKey, code: SenseCode) -> Self {
        Self { key, code, information: None, field: None, copy_point: None }
    }

    /// ILLEGAL REQUEST with `code`.
    #[must_use]
    pub const fn illegal(code: SenseCode) -> Self {
        Self::new(SenseKey::IllegalRequest, code)
    }

    /// INVALID FIELD IN CDB at `byte`, from its bit `bit` on if it is not a whole byte.
    #[must_use]
    pub const fn field(byte: u16, bit: Option<u8>) -> Self {
        let mut sense = Self::illegal(SenseCode::INVALID_FIELD_IN_CDB);
        sense.field = Some(FieldPointer { in_cdb: true, byte, bit });
        sense
    }

    /// INVALID FIELD IN PARAMETER LIST at `byte`.
    #[must_use]
    pub const fn parameter(byte: u16, bit: Option<u8>) -> Self {
        let mut sense = Self::illegal(SenseCode::INVALID_FIELD_IN_PARAMETER_LIST);
        sense.field = Some(FieldPointer { in_cdb: false, byte, bit });
        sense
    }

    /// With `information`.
    #[must_use]
    pub const fn with_information(mut self, information: u64) -> Self {
        self.information = Some(information);
        self
    }

    /// COPY ABORTED with `code`, at `point`.
    #[must_use]
    pub const fn copy_aborted(code: SenseCode, point: CopyFailurePoint) -> Self {
        let mut sense = Self::new(SenseKey::CopyAborted, code);
        sense.copy_point = Some(point);
        sense
    }

    /// The sense data of a successful copy of so many segments, if requested (SPC-4 6.4.2).
    #[must_use]
    pub const fn copy_done(segments: u16) -> Self {
        let mut sense =
            Self::new(SenseKey::Completed, SenseCode::EXTENDED_COPY_INFORMATION_AVAILABLE);
        sense.copy_point =
            Some(CopyFailurePoint { segment: segments, field: None, cscd_answer: None });
        sense
    }

    /// The bytes in `format`.
    #[must_use]
    pub fn to_bytes(&self, format: SenseFormat) -> SenseBytes {
        match format {
            SenseFormat::Fixed => self.fixed(),
            SenseFormat::Descriptor => self.descriptors(),
        }
    }

    /// SPC-4 4.5.3. Information of more than four bytes leaves VALID at zero.
    fn fixed(&self) -> SenseBytes {
        const BEFORE_ADDITIONAL: usize = 8;
        let mut out = SenseBytes::new();
        let answer = self.copy_point.and_then(|c| c.cscd_answer);
        let information = self.information.and_then(|i| u32::try_from(i).ok());
        out.push(0x70 | if information.is_some() { 0x80 } else { 0 });
        out.extend([0, self.key as u8]);
        out.extend(information.unwrap_or(0).to_be_bytes());
        out.push(0);
        out.extend(self.command_specific(FIXED_LEN as u8));
        out.extend([self.code.0, self.code.1, 0]);
        out.extend(self.key_specific());
        if let Some(answer) = answer {
            out.push(answer.status as u8);
            out.extend(answer.sense_bytes().into_iter().flatten());
        }
        out[BEFORE_ADDITIONAL - 1] = (out.len() - BEFORE_ADDITIONAL) as u8;
        out
    }

    /// COMMAND-SPECIFIC INFORMATION of a copy: the offset `at` of the source's or the destination's
    /// answer in the sense data, and the number of the segment.
    fn command_specific(&self, at: u8) -> [u8; 4] {
        let Some(CopyFailurePoint { segment, cscd_answer: answer, .. }) = self.copy_point else {
            return [0; 4];
        };
        let [high, low] = segment.to_be_bytes();
        match answer {
            None => [0, 0, high, low],
            Some(CscdAnswer { is_destination: false, .. }) => [at, 0, high, low],
            Some(CscdAnswer { is_destination: true, .. }) => [0, at, high, low],
        }
    }

    /// SPC-4 4.5.2.
    fn descriptors(&self) -> SenseBytes {
        let mut out = SenseBytes::new();
        out.extend([0x72, self.key as u8, self.code.0, self.code.1, 0, 0, 0, 0]);
        if let Some(information) = self.information {
            out.extend([0x00, 0x0a, 0x80, 0]);
            out.extend(information.to_be_bytes());
        }
        if self.copy_point.is_some() {
            out.extend([0x01, 0x0a, 0, 0, 0, 0, 0, 0]);
            out.extend(self.command_specific(0));
        }
        if self.field.is_some() || self.copy_point.is_some_and(|c| c.field.is_some()) {
            out.extend([0x02, 0x06, 0, 0]);
            out.extend(self.key_specific());
            out.push(0);
        }
        if let Some(answer) = self.copy_point.and_then(|c| c.cscd_answer) {
            let (bytes, from) = (answer.sense_bytes(), if answer.is_destination { 2 } else { 1 });
            let len = 2 + bytes.map_or(0, |bytes| bytes.len());
            out.extend([0x0c, len as u8, from, answer.status as u8]);
            out.extend(bytes.into_iter().flatten());
        }
        let additional = out.len() - 8;
        out[7] = u8::try_from(additional).expect("descriptors are few");
        out
    }

    fn key_specific(&self) -> [u8; 3] {
        if let Some(field) = self.copy_point.and_then(|c| c.field) {
            // Segment pointer: SKSV, and SD for a byte of the segment (SPC-4 4.5.2.4.5).
            let (flags, byte) = match field {
                CopyFieldPointer::List(byte) => (0x80, byte),
                CopyFieldPointer::Segment(byte) => (0xa0, byte),
            };
            let [high, low] = byte.to_be_bytes();
            return [flags, high, low];
        }
        let Some(FieldPointer { in_cdb, byte, bit }) = self.field else { return [0; 3] };
        let [high, low] = byte.to_be_bytes();
        let flags = if in_cdb { 0xc0 } else { 0x80 };
        [flags | bit.map_or(0, |b| 0x08 | (b & 7)), high, low]
    }
}

impl CscdAnswer {
    /// Its sense data in fixed format.
    fn sense_bytes(&self) -> Option<[u8; FIXED_LEN]> {
        let (key, code) = self.sense?;
        let mut bytes = [0; FIXED_LEN];
        (bytes[0], bytes[2], bytes[7]) = (0x70, key as u8, 10);
        (bytes[12], bytes[13]) = (code.0, code.1);
        Some(bytes)
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}/{:02x}/{:02x}", self.key as u8, self.code.0, self.code.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPC-4 4.5.3 and 4.5.2.4.2.
    #[test]
    fn fixed_format_places_every_field() {
        let s = Sense::field(0x0102, Some(5));
        let expect = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcd, 0x01, 0x02];
        assert_eq!(s.to_bytes(SenseFormat::Fixed)[..], expect);
        let s = Sense::parameter(4, None);
        assert_eq!(s.to_bytes(SenseFormat::Fixed)[12..], [0x26, 0, 0, 0x80, 0, 4]);
    }

    /// SPC-4 4.5.3: information of more than four bytes is not valid.
    #[test]
    fn fixed_format_tells_only_what_fits() {
        let s = Sense::new(SenseKey::MediumError, SenseCode::UNRECOVERED_READ_ERROR);
        let bytes = s.with_information(0xffff_ffff).to_bytes(SenseFormat::Fixed);
        assert_eq!(bytes[..7], [0xf0, 0, 3, 0xff, 0xff, 0xff, 0xff]);
        let bytes = s.with_information(0x1_0000_0000).to_bytes(SenseFormat::Fixed);
        assert_eq!(bytes[..7], [0x70, 0, 3, 0, 0, 0, 0]);
    }

    /// SPC-4 4.5.2.
    #[test]
    fn descriptor_format_carries_what_there_is() {
        let s = Sense::new(SenseKey::MediumError, SenseCode::UNRECOVERED_READ_ERROR)
            .with_information(0x0102_0304_0506_0708);
        let bytes = s.to_bytes(SenseFormat::Descriptor);
        assert_eq!(bytes[..8], [0x72, 3, 0x11, 0, 0, 0, 0, 12]);
        assert_eq!(bytes[8..], [0, 10, 0x80, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let bytes = Sense::field(7, None).with_information(1).to_bytes(SenseFormat::Descriptor);
        assert_eq!((bytes.len(), bytes[7]), (28, 20));
        assert_eq!(bytes[20..], [2, 6, 0, 0, 0xc0, 0, 7, 0]);
        let bytes =
            Sense::new(SenseKey::NoSense, SenseCode::NONE).to_bytes(SenseFormat::Descriptor);
        assert_eq!(bytes[..], [0x72, 0, 0, 0, 0, 0, 0, 0]);
    }

    fn aborted(answer: Option<CscdAnswer>) -> Sense {
        let point = CopyFailurePoint {
            segment: 0x0102,
            field: Some(CopyFieldPointer::Segment(6)),
            cscd_answer: answer,
        };
        Sense::copy_aborted(SenseCode::THIRD_PARTY_DEVICE_FAILURE, point)
    }

    const PROTECTED: CscdAnswer = CscdAnswer {
        is_destination: true,
        status: Status::CheckCondition,
        sense: Some((SenseKey::DataProtect, SenseCode::WRITE_PROTECTED)),
    };

    /// SPC-4 5.17.7.4, 4.5.2.4.5: the segment, the field in it, and then the answer of the source
    /// or destination.
    #[test]
    fn a_failed_copy_reports_its_position() {
        let bytes = aborted(None).to_bytes(SenseFormat::Fixed);
        assert_eq!(bytes[7..], [10, 0, 0, 1, 2, 0x0d, 1, 0, 0xa0, 0, 6]);
        let bytes = aborted(Some(PROTECTED)).to_bytes(SenseFormat::Fixed);
        assert_eq!((bytes.len(), bytes[7]), (37, 29));
        assert_eq!(bytes[8..12], [0, 18, 1, 2], "the destination's is at 18");
        assert_eq!(
            (&bytes[18..20], bytes[21], bytes[26], bytes[31]),
            (&[2, 0x70][..], 7, 10, 0x27)
        );
        let source = CscdAnswer { is_destination: false, ..PROTECTED };
        assert_eq!(aborted(Some(source)).to_bytes(SenseFormat::Fixed)[8..12], [18, 0, 1, 2]);
        let conflict = CscdAnswer { status: Status::ReservationConflict, sense: None, ..PROTECTED };
        let bytes = aborted(Some(conflict)).to_bytes(SenseFormat::Fixed);
        assert_eq!((bytes.len(), bytes[9], bytes[18]), (19, 18, 0x18));
        let point = CopyFailurePoint {
            field: Some(CopyFieldPointer::List(48)),
            ..CopyFailurePoint::default()
        };
        let sense = Sense::copy_aborted(SenseCode::UNREACHABLE_COPY_TARGET, point);
        assert_eq!(sense.to_bytes(SenseFormat::Fixed)[15..], [0x80, 0, 48], "SD is zero");
    }

    /// SPC-4 4.5.2: command-specific information, segment pointer, forwarded sense data.
    #[test]
    fn descriptors_of_a_copy() {
        let bytes = aborted(Some(PROTECTED)).with_information(1).to_bytes(SenseFormat::Descriptor);
        assert_eq!((bytes.len(), usize::from(bytes[7])), (SENSE_MAX, SENSE_MAX - 8));
        assert_eq!(bytes[20..32], [1, 10, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(bytes[32..40], [2, 6, 0, 0, 0xa0, 0, 6, 0]);
        assert_eq!((&bytes[40..45], bytes[56]), (&[0x0c, 20, 2, 2, 0x70][..], 0x27));
        let conflict = CscdAnswer { status: Status::ReservationConflict, sense: None, ..PROTECTED };
        let bytes = aborted(Some(conflict)).to_bytes(SenseFormat::Descriptor);
        assert_eq!(bytes[8 + 12 + 8..], [0x0c, 2, 2, 0x18]);
    }
}
