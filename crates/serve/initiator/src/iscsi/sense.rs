//! Parser of sense data (SPC-4 4.5).

use scsi::SenseCode;

/// Sense keys (SPC-4 4.5.6) that are handled.
pub(super) mod key {
    pub(crate) const RECOVERED: u8 = 0x1;
    pub(crate) const NOT_READY: u8 = 0x2;
    pub(crate) const MEDIUM_ERROR: u8 = 0x3;
    pub(crate) const HARDWARE_ERROR: u8 = 0x4;
    pub(crate) const ILLEGAL_REQUEST: u8 = 0x5;
    pub(crate) const UNIT_ATTENTION: u8 = 0x6;
    pub(crate) const DATA_PROTECT: u8 = 0x7;
    pub(crate) const ABORTED_COMMAND: u8 = 0xb;
    pub(crate) const MISCOMPARE: u8 = 0xe;
}

/// Parsed sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code and qualifier.
    pub code: SenseCode,
    /// INFORMATION field: usually the first block that failed.
    pub information: Option<u64>,
    /// Whether it concerns an earlier command that reported success.
    pub deferred: bool,
}

impl Sense {
    /// Parses either format; `None` if invalid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let format = *bytes.first()? & 0x7f;
        match format {
            0x70 | 0x71 => Self::fixed(bytes, format == 0x71),
            0x72 | 0x73 => Self::descriptors(bytes, format == 0x73),
            _ => None,
        }
    }

    fn fixed(bytes: &[u8], deferred: bool) -> Option<Self> {
        const VALID: u8 = 0x80;
        let key = bytes.get(2)? & 0xf;
        let at = |i: usize| bytes.get(i).copied().unwrap_or(0);
        let information = bytes.get(3..7).and_then(|b| b.first_chunk());
        let information = information.filter(|_| at(0) & VALID != 0);
        let information = information.map(|b| u32::from_be_bytes(*b).into());
        Some(Self { key, code: SenseCode(at(12), at(13)), information, deferred })
    }

    fn descriptors(bytes: &[u8], deferred: bool) -> Option<Self> {
        const INFORMATION: u8 = 0;
        const VALID: u8 = 0x80;
        let (&[_, key, a, b, ..], mut rest) = bytes.split_first_chunk::<8>()?;
        let mut information = None;
        while let Some((&[kind, length], after)) = rest.split_first_chunk()
            && let Some((body, after)) = after.split_at_checked(usize::from(length))
        {
            if kind == INFORMATION
                && let Some((&[flags, _], value)) = body.split_first_chunk()
                && flags & VALID != 0
            {
                information = value.first_chunk().map(|b| u64::from_be_bytes(*b));
            }
            rest = after;
        }
        Some(Self { key: key & 0xf, code: SenseCode(a, b), information, deferred })
    }
}

#[cfg(test)]
mod tests {
    use scsi::{SenseFormat, SenseKey};

    use super::*;

    /// SPC-4 4.5.2, 4.5.3: sense data of our own units is understood.
    #[test]
    fn both_formats_are_read() {
        let said = scsi::Sense::new(SenseKey::MediumError, SenseCode::UNRECOVERED_READ_ERROR);
        for format in [SenseFormat::Fixed, SenseFormat::Descriptor] {
            let read = Sense::parse(&said.with_information(77).to_bytes(format)).unwrap();
            assert_eq!((read.key, read.code), (key::MEDIUM_ERROR, said.code));
            assert_eq!((read.information, read.deferred), (Some(77), false));
            assert_eq!(Sense::parse(&said.to_bytes(format)).unwrap().information, None);
        }
        let deferred = Sense::parse(&[0x71, 0, 3]).unwrap();
        assert!(deferred.deferred && deferred.code == SenseCode::NONE);
    }

    #[test]
    fn invalid_sense_data_is_ignored() {
        for bytes in [&[][..], &[0x70], &[0x70, 0], &[0x72, 3, 0x11], &[0x7f; 18], &[0; 18]] {
            assert_eq!(Sense::parse(bytes), None, "{bytes:?}");
        }
        // Truncated descriptors are ignored.
        let cut = [0x72, 3, 0x11, 0, 0, 0, 0, 12, 0, 10, 0x80, 0, 1];
        assert_eq!(Sense::parse(&cut).unwrap().information, None);
    }
}
