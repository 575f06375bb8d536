//! Maps failures of the volume to SCSI status and sense data: the only such table.

use block::{Access, Error, RequestError};

use crate::reply::Refusal;
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::status::Status;

/// Status and sense of a failure. `tas` is the TAS bit of the control mode page (SPC-4 7.5.8),
/// `access` the access state of this node if other nodes serve the unit too.
pub(crate) fn refusal(failure: RequestError, tas: bool, access: Option<Access>) -> Refusal {
    match failure {
        RequestError::Device(Error::Aborted) if tas => Status::TaskAborted.into(),
        RequestError::Device(error) => sense(error, access).into(),
        RequestError::ReservationConflict => Status::ReservationConflict.into(),
        // SAM-5 5.3.1: initiators retry, and lower their queue depth.
        RequestError::NoMemory => Status::TaskSetFull.into(),
        RequestError::Miscompare { offset } => {
            Sense::new(SenseKey::Miscompare, SenseCode::MISCOMPARE_DURING_VERIFY)
                .with_information(offset)
                .into()
        }
    }
}

fn sense(error: Error, access: Option<Access>) -> Sense {
    match error {
        Error::Unreadable { at } => {
            Sense::new(SenseKey::MediumError, SenseCode::UNRECOVERED_READ_ERROR)
                .with_information(at.0)
        }
        // The device reported no error but returned wrong data: closest to a miscorrection, and
        // initiators treat all of 11h alike.
        Error::Corrupt { at } => {
            Sense::new(SenseKey::MediumError, SenseCode::MISCORRECTED_ERROR).with_information(at.0)
        }
        Error::Unwritable { at } => {
            Sense::new(SenseKey::MediumError, SenseCode::WRITE_ERROR).with_information(at.0)
        }
        Error::OutOfRange => Sense::illegal(SenseCode::LBA_OUT_OF_RANGE),
        // SBC-3 4.7: no space to map a block.
        Error::NoSpace => Sense::new(SenseKey::DataProtect, SenseCode::SPACE_ALLOCATION_FAILED),
        Error::ReadOnly => Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED),
        Error::Fenced => match access {
            // Temporary: initiators wait and retry.
            None => Sense::new(SenseKey::NotReady, SenseCode::BECOMING_READY),
            Some(Access::Unavailable) => UNAVAILABLE,
            // Optimized: the fencing has ended, or this node is about to learn of it.
            Some(Access::Transitioning | Access::Optimized) => {
                Sense::new(SenseKey::NotReady, SenseCode::ASYMMETRIC_ACCESS_STATE_TRANSITION)
            }
        },
        Error::Aborted => Sense::new(SenseKey::AbortedCommand, SenseCode::NONE),
        // Other nodes still have the volume: on a hardware error initiators would not try another
        // path.
        Error::Gone if access.is_some() => UNAVAILABLE,
        Error::Gone => Sense::new(SenseKey::HardwareError, SenseCode::LOGICAL_UNIT_FAILURE),
    }
}

/// The sense data of a unit that is unavailable through this node (SPC-4 5.15.2.4.5).
pub(crate) const UNAVAILABLE: Sense =
    Sense::new(SenseKey::NotReady, SenseCode::TARGET_PORT_IN_UNAVAILABLE_STATE);

#[cfg(test)]
mod tests {
    use block::Lba;

    use super::*;

    #[test]
    fn every_failure_has_its_sense() {
        let at = Lba(7);
        for (failure, expect, information) in [
            (Error::Unreadable { at }.into(), "03/11/00", Some(7)),
            (Error::Corrupt { at }.into(), "03/11/0a", Some(7)),
            (Error::Unwritable { at }.into(), "03/0c/00", Some(7)),
            (Error::OutOfRange.into(), "05/21/00", None),
            (Error::NoSpace.into(), "07/27/07", None),
            (Error::ReadOnly.into(), "07/27/00", None),
            (Error::Fenced.into(), "02/04/01", None),
            (Error::Aborted.into(), "0b/00/00", None),
            (Error::Gone.into(), "04/3e/01", None),
            (RequestError::Miscompare { offset: 513 }, "0e/1d/00", Some(513)),
        ] {
            let r = refusal(failure, false, None);
            let sense = r.sense.unwrap();
            assert_eq!((r.status, sense.to_string().as_str()), (Status::CheckCondition, expect));
            assert_eq!(sense.information, information);
        }
    }

    /// SPC-4 5.15.2.4: an unavailable path is never reported as a failure of the unit.
    #[test]
    fn a_unit_of_several_nodes_sends_initiators_to_another() {
        use Access::{Optimized, Transitioning, Unavailable};
        for (error, access, expect) in [
            (Error::Fenced, Optimized, "02/04/0a"),
            (Error::Fenced, Transitioning, "02/04/0a"),
            (Error::Fenced, Unavailable, "02/04/0c"),
            (Error::Gone, Optimized, "02/04/0c"),
            (Error::Gone, Transitioning, "02/04/0c"),
            (Error::Gone, Unavailable, "02/04/0c"),
            (Error::NoSpace, Unavailable, "07/27/07"),
        ] {
            let sense = refusal(error.into(), false, Some(access)).sense.unwrap();
            assert_eq!(sense.to_string(), expect, "{error} {access:?}");
        }
    }

    /// SPC-4 7.5.8: TAS requests TASK ABORTED.
    #[test]
    fn an_aborted_command_follows_tas() {
        let r = refusal(Error::Aborted.into(), true, None);
        assert_eq!((r.status, r.sense), (Status::TaskAborted, None));
    }
}
