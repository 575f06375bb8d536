//! What an answer means for a command (SAM-5 5.3.1, SPC-4 4.5.6).

use block::{Error, Lba};
use scsi::SenseCode;

use super::active_session::{ScsiFailure, status};
use super::sense::{Sense, key};

/// What to do after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseAction {
    Done,
    /// Retry, at once or after a pause, until the timeout; `verify`: first verify the unit, which
    /// may be another volume now.
    Retry {
        pause: bool,
        verify: bool,
    },
    /// Verify the unit and retry a few times.
    RetryLimited(Error),
    /// A comparison found a difference.
    Miscompare,
    /// The unit does not support the command, or not in this form.
    Unsupported,
    Failed(Error),
}

/// NOT READY with these codes needs a person (SPC-4 annex F.2): manual intervention, no medium,
/// offline.
const NEEDS_INTERVENTION: [SenseCode; 2] = [SenseCode(0x04, 0x03), SenseCode(0x04, 0x12)];
const NO_MEDIUM_ASC: u8 = 0x3a;

const RETRY_LATER: ResponseAction = ResponseAction::Retry { pause: true, verify: false };

/// Evaluates the answer to a command that begins at block `at`.
pub(super) fn response_action(failure: ScsiFailure, at: Lba, writes: bool) -> ResponseAction {
    let unusable = if writes { Error::Unwritable { at } } else { Error::Unreadable { at } };
    match (failure.status, failure.sense) {
        (status::GOOD | status::CONDITION_MET, _) => ResponseAction::Done,
        (status::BUSY | status::TASK_SET_FULL | status::ACA_ACTIVE | status::TASK_ABORTED, _) => {
            RETRY_LATER
        }
        (status::RESERVATION_CONFLICT, _) => ResponseAction::Failed(unusable),
        (status::CHECK_CONDITION, Some(sense)) => sense_action(sense, at, writes, unusable),
        _ => ResponseAction::RetryLimited(unusable),
    }
}

/// Whether a command refused this way was not executed.
pub(super) fn is_not_started(failure: ScsiFailure) -> bool {
    /// NOT READY: becoming ready, changing its access state, in standby, unavailable through this
    /// port.
    const TRANSIENT_NOT_READY: [SenseCode; 4] =
        [SenseCode(4, 0x01), SenseCode(4, 0x0a), SenseCode(4, 0x0b), SenseCode(4, 0x0c)];
    match (failure.status, failure.sense) {
        (status::BUSY | status::TASK_SET_FULL | status::ACA_ACTIVE, _) => true,
        (status::CHECK_CONDITION, Some(sense)) => {
            sense.key == key::UNIT_ATTENTION
                || sense.key == key::NOT_READY && TRANSIENT_NOT_READY.contains(&sense.code)
        }
        _ => false,
    }
}

fn sense_action(sense: Sense, at: Lba, writes: bool, unusable: Error) -> ResponseAction {
    if sense.deferred && sense.key != key::RECOVERED {
        // Acknowledged data is lost, with unknown extent.
        return ResponseAction::Failed(Error::Gone);
    }
    match (sense.key, sense.code) {
        (key::RECOVERED, _) => ResponseAction::Done,
        (key::MISCOMPARE, _) => ResponseAction::Miscompare,
        (key::UNIT_ATTENTION, code) => {
            // Reset, mode, capacity or definition changed: the volume may be another one.
            ResponseAction::Retry { pause: false, verify: matches!(code.0, 0x29 | 0x2a | 0x3f) }
        }
        (key::NOT_READY, code) if NEEDS_INTERVENTION.contains(&code) || code.0 == NO_MEDIUM_ASC => {
            ResponseAction::RetryLimited(unusable)
        }
        // Becoming ready, changing its access state, in standby, unavailable through this port.
        (key::NOT_READY, _) | (key::ABORTED_COMMAND, _) => RETRY_LATER,
        (key::ILLEGAL_REQUEST, SenseCode::LBA_OUT_OF_RANGE) => {
            ResponseAction::RetryLimited(Error::OutOfRange)
        }
        (key::ILLEGAL_REQUEST, SenseCode::LOGICAL_UNIT_NOT_SUPPORTED) => {
            ResponseAction::RetryLimited(unusable)
        }
        (key::ILLEGAL_REQUEST, _) => ResponseAction::Unsupported,
        (key::DATA_PROTECT, SenseCode::SPACE_ALLOCATION_FAILED) => {
            ResponseAction::Failed(Error::NoSpace)
        }
        (key::DATA_PROTECT, _) => ResponseAction::Failed(Error::ReadOnly),
        (key::HARDWARE_ERROR, SenseCode::LOGICAL_UNIT_FAILURE) => {
            ResponseAction::Failed(Error::Gone)
        }
        (key::MEDIUM_ERROR, code) => {
            let at = sense.information.map_or(at, Lba);
            ResponseAction::Failed(match (code, writes) {
                (_, true) => Error::Unwritable { at },
                (SenseCode::MISCORRECTED_ERROR, false) => Error::Corrupt { at },
                (_, false) => Error::Unreadable { at },
            })
        }
        _ => ResponseAction::Failed(unusable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(key: u8, code: SenseCode) -> ScsiFailure {
        let sense = Sense { key, code, information: Some(9), deferred: false };
        ScsiFailure { status: status::CHECK_CONDITION, sense: Some(sense) }
    }

    #[test]
    fn each_response_maps_to_an_action() {
        let at = Lba(3);
        let of = |said| response_action(said, at, true);
        let bare = |status| of(ScsiFailure { status, sense: None });
        assert_eq!(bare(0), ResponseAction::Done);
        for status in [0x08, 0x28, 0x30, 0x40] {
            assert_eq!(bare(status), RETRY_LATER, "{status:#x}");
        }
        let unwritable = Error::Unwritable { at };
        assert_eq!(bare(0x18), ResponseAction::Failed(unwritable));
        assert_eq!(
            (bare(0x02), bare(0xee)),
            (ResponseAction::RetryLimited(unwritable), ResponseAction::RetryLimited(unwritable))
        );
        let look = |look| ResponseAction::Retry { pause: false, verify: look };
        for (key, code, expected) in [
            (1, SenseCode(0x17, 1), ResponseAction::Done),
            (2, SenseCode(4, 1), RETRY_LATER),
            (2, SenseCode(4, 0xa), RETRY_LATER),
            (2, SenseCode(4, 0xb), RETRY_LATER),
            (2, SenseCode(4, 0xc), RETRY_LATER),
            (2, SenseCode(4, 3), ResponseAction::RetryLimited(unwritable)),
            (2, SenseCode(0x3a, 0), ResponseAction::RetryLimited(unwritable)),
            (3, SenseCode(0x0c, 0), ResponseAction::Failed(Error::Unwritable { at: Lba(9) })),
            (4, SenseCode(0x3e, 1), ResponseAction::Failed(Error::Gone)),
            (4, SenseCode(0x44, 0), ResponseAction::Failed(unwritable)),
            (5, SenseCode(0x21, 0), ResponseAction::RetryLimited(Error::OutOfRange)),
            (5, SenseCode(0x25, 0), ResponseAction::RetryLimited(unwritable)),
            (5, SenseCode(0x20, 0), ResponseAction::Unsupported),
            (6, SenseCode(0x2a, 9), look(true)),
            (6, SenseCode(0x29, 0), look(true)),
            (6, SenseCode(0x3f, 0xe), look(true)),
            (6, SenseCode(0x38, 7), look(false)),
            (7, SenseCode(0x27, 7), ResponseAction::Failed(Error::NoSpace)),
            (7, SenseCode(0x27, 0), ResponseAction::Failed(Error::ReadOnly)),
            (0xb, SenseCode(0, 0), RETRY_LATER),
            (0xe, SenseCode(0x1d, 0), ResponseAction::Miscompare),
        ] {
            assert_eq!(of(check(key, code)), expected, "{key:x} {code:?}");
        }
        let corrupt = response_action(check(3, SenseCode(0x11, 0xa)), at, false);
        assert_eq!(corrupt, ResponseAction::Failed(Error::Corrupt { at: Lba(9) }));
        let mut late = check(3, SenseCode(0x0c, 0));
        late.sense = late.sense.map(|s| Sense { deferred: true, ..s });
        assert_eq!(
            of(late),
            ResponseAction::Failed(Error::Gone),
            "what had been confirmed is lost"
        );
    }
}
