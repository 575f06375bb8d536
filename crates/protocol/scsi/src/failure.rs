//! What became of a request on the volume, in SCSI's words: the one table.

use block::{Access, Error, Failure};

use crate::reply::{Refusal, Status};
use crate::sense::{Code, Key, Sense};

/// Status and sense of a failure. `tas` is the TAS bit of the control mode page (SPC-4 7.5.8),
/// `access` how the unit is to be used through this node if others serve it too.
pub(crate) fn refusal(failure: Failure, tas: bool, access: Option<Access>) -> Refusal {
    match failure {
        Failure::Device(Error::Aborted) if tas => Status::TaskAborted.into(),
        Failure::Device(error) => sense(error, access).into(),
        Failure::Conflict => Status::ReservationConflict.into(),
        // SAM-5 5.3.1: initiators try again, and lower their depth of queue.
        Failure::Busy => Status::TaskSetFull.into(),
        Failure::Miscompare { offset } => {
            Sense::new(Key::Miscompare, Code::MISCOMPARE_DURING_VERIFY)
                .with_information(offset)
                .into()
        }
    }
}

fn sense(error: Error, access: Option<Access>) -> Sense {
    match error {
        Error::Unreadable { at } => {
            Sense::new(Key::MediumError, Code::UNRECOVERED_READ_ERROR).with_information(at.0)
        }
        // The device read without complaint and what it gave is wrong: nearer to a miscorrection
        // than anything else, and initiators treat the whole of 11h alike.
        Error::Corrupt { at } => {
            Sense::new(Key::MediumError, Code::MISCORRECTED_ERROR).with_information(at.0)
        }
        Error::Unwritable { at } => {
            Sense::new(Key::MediumError, Code::WRITE_ERROR).with_information(at.0)
        }
        Error::OutOfRange => Sense::illegal(Code::LBA_OUT_OF_RANGE),
        // SBC-3 4.7: no resources left to map a block.
        Error::NoSpace => Sense::new(Key::DataProtect, Code::SPACE_ALLOCATION_FAILED),
        Error::ReadOnly => Sense::new(Key::DataProtect, Code::WRITE_PROTECTED),
        Error::Fenced => match access {
            // Passes by itself: initiators wait and retry.
            None => Sense::new(Key::NotReady, Code::BECOMING_READY),
            Some(Access::Unavailable) => UNAVAILABLE,
            // Optimized: it is over, or this node is about to learn of it.
            Some(Access::Transitioning | Access::Optimized) => {
                Sense::new(Key::NotReady, Code::ASYMMETRIC_ACCESS_STATE_TRANSITION)
            }
        },
        Error::Aborted => Sense::new(Key::AbortedCommand, Code::NONE),
        // The other nodes have it still: initiators that hear of a hardware error ask nobody else.
        Error::Gone if access.is_some() => UNAVAILABLE,
        Error::Gone => Sense::new(Key::HardwareError, Code::LOGICAL_UNIT_FAILURE),
    }
}

/// What a unit says that is not to be used through this node (SPC-4 5.15.2.4.5).
pub(crate) const UNAVAILABLE: Sense =
    Sense::new(Key::NotReady, Code::TARGET_PORT_IN_UNAVAILABLE_STATE);

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
            (Failure::Miscompare { offset: 513 }, "0e/1d/00", Some(513)),
        ] {
            let r = refusal(failure, false, None);
            let sense = r.sense.unwrap();
            assert_eq!((r.status, sense.to_string().as_str()), (Status::CheckCondition, expect));
            assert_eq!(sense.information, information);
        }
    }

    /// SPC-4 5.15.2.4: what is another node's to do is never told as a failure of the unit.
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

    /// SPC-4 7.5.8: TAS asks for TASK ABORTED.
    #[test]
    fn an_aborted_command_follows_tas() {
        let r = refusal(Error::Aborted.into(), true, None);
        assert_eq!((r.status, r.sense), (Status::TaskAborted, None));
    }
}
