//! Status codes, and the only mapping from volume errors to them (NVMe Base 2.0, 3.3.3.2.1).

use std::fmt;

use block::{Error, RequestError};

use crate::log::AnaState;

/// The status field of a completion, without the phase tag: SC in bits 7:0, SCT in 10:8, CRD in
/// 12:11, More in 13, Do Not Retry in 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

/// Generic command status, status code type 0.
const fn generic(code: u8) -> Status {
    Status(code as u16)
}

/// Command specific status, status code type 1.
const fn specific(code: u8) -> Status {
    Status(0x100 | code as u16)
}

/// Media and data integrity errors, status code type 2.
const fn media(code: u8) -> Status {
    Status(0x200 | code as u16)
}

/// Path related status, status code type 3.
const fn path(code: u8) -> Status {
    Status(0x300 | code as u16)
}

impl Status {
    /// Successful completion.
    pub const SUCCESS: Self = generic(0x00);
    /// Invalid Command Opcode.
    pub const INVALID_OPCODE: Self = generic(0x01);
    /// Invalid Field in Command.
    pub const INVALID_FIELD: Self = generic(0x02);
    /// Command ID Conflict.
    pub const COMMAND_ID_CONFLICT: Self = generic(0x03);
    /// Data Transfer Error.
    pub const DATA_TRANSFER_ERROR: Self = generic(0x04);
    /// Internal Error.
    pub const INTERNAL_ERROR: Self = generic(0x06);
    /// Command Abort Requested.
    pub const ABORT_REQUESTED: Self = generic(0x07);
    /// Command Aborted due to SQ Deletion.
    pub const ABORTED_SQ_DELETED: Self = generic(0x08);
    /// Command Aborted due to Failed Fused Command.
    pub const FAILED_FUSED: Self = generic(0x09);
    /// Command Aborted due to Missing Fused Command.
    pub const MISSING_FUSED: Self = generic(0x0a);
    /// Invalid Namespace or Format.
    pub const INVALID_NAMESPACE: Self = generic(0x0b);
    /// Command Sequence Error.
    pub const COMMAND_SEQUENCE: Self = generic(0x0c);
    /// Data SGL Length Invalid.
    pub const DATA_SGL_LENGTH_INVALID: Self = generic(0x0f);
    /// SGL Descriptor Type Invalid.
    pub const SGL_DESCRIPTOR_TYPE_INVALID: Self = generic(0x11);
    /// Atomic Write Unit Exceeded.
    pub const ATOMIC_WRITE_UNIT: Self = generic(0x14);
    /// SGL Offset Invalid.
    pub const SGL_OFFSET_INVALID: Self = generic(0x16);
    /// Host Identifier Inconsistent Format.
    pub const HOST_ID_FORMAT: Self = generic(0x18);
    /// Keep Alive Timeout Expired.
    pub const KEEP_ALIVE_EXPIRED: Self = generic(0x19);
    /// Command Aborted due to Preempt and Abort.
    pub const PREEMPTED_AND_ABORTED: Self = generic(0x1b);
    /// Namespace is Write Protected.
    pub const WRITE_PROTECTED: Self = generic(0x20);
    /// Command Interrupted: the controller could not process it now.
    pub const INTERRUPTED: Self = generic(0x21);
    /// Transient Transport Error.
    pub const TRANSIENT_TRANSPORT: Self = generic(0x22);
    /// LBA Out of Range.
    pub const LBA_OUT_OF_RANGE: Self = generic(0x80);
    /// Capacity Exceeded.
    pub const CAPACITY_EXCEEDED: Self = generic(0x81);
    /// Namespace Not Ready.
    pub const NAMESPACE_NOT_READY: Self = generic(0x82);

    /// Abort Command Limit Exceeded.
    pub const ABORT_LIMIT: Self = specific(0x03);
    /// Asynchronous Event Request Limit Exceeded.
    pub const EVENT_REQUEST_LIMIT: Self = specific(0x05);
    /// Invalid Log Page.
    pub const INVALID_LOG_PAGE: Self = specific(0x09);
    /// Feature Identifier Not Saveable.
    pub const FEATURE_NOT_SAVEABLE: Self = specific(0x0d);
    /// Feature Not Changeable.
    pub const FEATURE_NOT_CHANGEABLE: Self = specific(0x0e);
    /// Incompatible Format, of Connect and of Disconnect.
    pub const FABRICS_FORMAT: Self = specific(0x80);
    /// Connect Controller Busy.
    pub const CONNECT_BUSY: Self = specific(0x81);
    /// Connect Invalid Parameters.
    pub const CONNECT_INVALID_PARAMETERS: Self = specific(0x82);
    /// Connect Invalid Host.
    pub const CONNECT_INVALID_HOST: Self = specific(0x84);
    /// Invalid Queue Type.
    pub const INVALID_QUEUE_TYPE: Self = specific(0x85);
    /// Authentication Required.
    pub const AUTHENTICATION_REQUIRED: Self = specific(0x91);
    /// Command Size Limit Exceeded, of commands of the NVM command set.
    pub const COMMAND_SIZE_LIMIT: Self = specific(0x83);

    /// Reservation Conflict.
    pub const RESERVATION_CONFLICT: Self = generic(0x83);
    /// Write Fault.
    pub const WRITE_FAULT: Self = media(0x80);
    /// Unrecovered Read Error.
    pub const UNRECOVERED_READ: Self = media(0x81);
    /// Compare Failure.
    pub const COMPARE_FAILURE: Self = media(0x85);

    /// Asymmetric Access Persistent Loss.
    pub const ANA_PERSISTENT_LOSS: Self = path(0x01);
    /// Asymmetric Access Inaccessible.
    pub const ANA_INACCESSIBLE: Self = path(0x02);
    /// Asymmetric Access Transition.
    pub const ANA_TRANSITION: Self = path(0x03);

    /// The status with Do Not Retry set: the same command would fail again.
    #[must_use]
    pub const fn do_not_retry(self) -> Self {
        Self(self.0 | DNR)
    }

    /// The status with More set: the error log has an entry about it.
    #[must_use]
    pub const fn with_log_entry(self) -> Self {
        Self(self.0 | MORE)
    }

    /// Status code type and status code, without the other bits.
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// Whether the command succeeded.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// Whether Do Not Retry is set.
    #[must_use]
    pub const fn is_do_not_retry(self) -> bool {
        self.0 & DNR != 0
    }

    /// The field as it stands in a completion, shifted right by the phase tag.
    #[must_use]
    pub const fn field(self) -> u16 {
        self.0
    }

    /// The status in a field read from a completion.
    #[must_use]
    pub const fn from_field(field: u16) -> Self {
        Self(field & 0x7fff)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({:x}/{:02x}", self.0 >> 8 & 0x7, self.0 & 0xff)?;
        if self.is_do_not_retry() {
            f.write_str(" DNR")?;
        }
        f.write_str(")")
    }
}

/// The status of a failed request.
///
/// Do Not Retry is set where the same command on the same path would fail again. Linux retries a
/// command without it up to `nvme_core.max_retries` times; on a path related status a multipath
/// host uses another path or waits for the ANA state to change.
impl From<RequestError> for Status {
    fn from(failure: RequestError) -> Self {
        match failure {
            // The layers have already tried all redundancy.
            RequestError::Device(Error::Unreadable { .. } | Error::Corrupt { .. }) => {
                Self::UNRECOVERED_READ.do_not_retry()
            }
            RequestError::Device(Error::Unwritable { .. }) => Self::WRITE_FAULT.do_not_retry(),
            RequestError::Device(Error::OutOfRange) => Self::LBA_OUT_OF_RANGE.do_not_retry(),
            RequestError::Device(Error::NoSpace) => Self::CAPACITY_EXCEEDED.do_not_retry(),
            RequestError::Device(Error::ReadOnly) => Self::WRITE_PROTECTED.do_not_retry(),
            // The configuration is changing: another path, or this one a little later.
            RequestError::Device(Error::Fenced) => Self::ANA_TRANSITION,
            RequestError::Device(Error::Aborted) => Self::ABORT_REQUESTED,
            RequestError::Device(Error::Gone) => Self::INTERNAL_ERROR.do_not_retry(),
            RequestError::Miscompare { .. } => Self::COMPARE_FAILURE.do_not_retry(),
            RequestError::ReservationConflict => Self::RESERVATION_CONFLICT.do_not_retry(),
            RequestError::NoMemory => Self::INTERRUPTED,
        }
    }
}

impl Status {
    /// The status of a failed request to a namespace that other controllers serve too; here it is
    /// in state `ana` (NVMe Base 2.0, 8.1).
    ///
    /// If another node could succeed, the status is path related, so that a multipath host retries
    /// there and reports nothing.
    #[must_use]
    pub fn on_path(failure: RequestError, ana: AnaState) -> Self {
        match (failure, ana) {
            (RequestError::Device(Error::Fenced), AnaState::Inaccessible) => Self::ANA_INACCESSIBLE,
            (RequestError::Device(Error::Fenced), AnaState::PersistentLoss) => {
                Self::ANA_PERSISTENT_LOSS
            }
            // Other nodes may still have it.
            (RequestError::Device(Error::Gone), _) => Self::ANA_INACCESSIBLE,
            (failure, _) => failure.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Lba;

    /// NVMe Base 2.0, figures 93 to 98, and which of them a host is to try again.
    #[test]
    fn every_failure_has_its_status() {
        let at = Lba(7);
        for (failure, field) in [
            (RequestError::Device(Error::Unreadable { at }), 0x4281),
            (RequestError::Device(Error::Corrupt { at }), 0x4281),
            (RequestError::Device(Error::Unwritable { at }), 0x4280),
            (RequestError::Device(Error::OutOfRange), 0x4080),
            (RequestError::Device(Error::NoSpace), 0x4081),
            (RequestError::Device(Error::ReadOnly), 0x4020),
            (RequestError::Device(Error::Fenced), 0x0303),
            (RequestError::Device(Error::Aborted), 0x0007),
            (RequestError::Device(Error::Gone), 0x4006),
            (RequestError::Miscompare { offset: 3 }, 0x4285),
            (RequestError::NoMemory, 0x0021),
        ] {
            assert_eq!(Status::from(failure).field(), field, "{failure:?}");
        }
    }

    /// NVMe Base 2.0, 8.1: errors that another controller may avoid are path related.
    #[test]
    fn failures_on_one_of_several_paths() {
        for (error, ana, field) in [
            (Error::Fenced, AnaState::Optimized, 0x0303),
            (Error::Fenced, AnaState::Change, 0x0303),
            (Error::Fenced, AnaState::Inaccessible, 0x0302),
            (Error::Fenced, AnaState::PersistentLoss, 0x0301),
            (Error::Gone, AnaState::Optimized, 0x0302),
            (Error::Gone, AnaState::Change, 0x0302),
            (Error::NoSpace, AnaState::Inaccessible, 0x4081),
        ] {
            let status = Status::on_path(RequestError::Device(error), ana);
            assert_eq!(status.field(), field, "{error} {ana:?}");
        }
    }
}
