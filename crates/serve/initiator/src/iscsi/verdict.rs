//! What an answer means for a command (SAM-5 5.3.1, SPC-4 4.5.6).

use block::{Error, Lba};
use scsi::Code;

use super::live::{Refusal, status};
use super::sense::{Sense, key};

/// What is to be done about an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Done,
    /// The same again, at once or after a pause, until time runs out; the unit is looked at before where it
    /// may have become another one.
    Again {
        pause: bool,
        look: bool,
    },
    /// A few more times, the unit being looked at again.
    Few(Error),
    /// A comparison has found a difference.
    Differs,
    /// The unit does not know the command, or not of this form.
    Unknown,
    Failed(Error),
}

/// NOT READY with these takes a person (SPC-4 annex F.2): manual intervention, no medium, offline.
const NEEDS_SOMEBODY: [Code; 2] = [Code(0x04, 0x03), Code(0x04, 0x12)];
const NO_MEDIUM: u8 = 0x3a;

const LATER: Verdict = Verdict::Again { pause: true, look: false };

/// Judges the answer to a command that begins at block `at`.
pub(super) fn verdict(said: Refusal, at: Lba, writes: bool) -> Verdict {
    let unusable = if writes { Error::Unwritable { at } } else { Error::Unreadable { at } };
    match (said.status, said.sense) {
        (status::GOOD | status::CONDITION_MET, _) => Verdict::Done,
        (status::BUSY | status::TASK_SET_FULL | status::ACA_ACTIVE | status::TASK_ABORTED, _) => {
            LATER
        }
        (status::RESERVATION_CONFLICT, _) => Verdict::Failed(unusable),
        (status::CHECK_CONDITION, Some(sense)) => sensed(sense, at, writes, unusable),
        _ => Verdict::Few(unusable),
    }
}

/// Whether a command that was refused so has not begun.
pub(super) fn was_not_begun(said: Refusal) -> bool {
    /// NOT READY: becoming ready, changing its access state, in standby, unavailable by this way.
    const NOT_NOW: [Code; 4] = [Code(4, 0x01), Code(4, 0x0a), Code(4, 0x0b), Code(4, 0x0c)];
    match (said.status, said.sense) {
        (status::BUSY | status::TASK_SET_FULL | status::ACA_ACTIVE, _) => true,
        (status::CHECK_CONDITION, Some(sense)) => {
            sense.key == key::UNIT_ATTENTION
                || sense.key == key::NOT_READY && NOT_NOW.contains(&sense.code)
        }
        _ => false,
    }
}

fn sensed(sense: Sense, at: Lba, writes: bool, unusable: Error) -> Verdict {
    if sense.deferred && sense.key != key::RECOVERED {
        // What had been confirmed is lost; nobody knows what.
        return Verdict::Failed(Error::Gone);
    }
    match (sense.key, sense.code) {
        (key::RECOVERED, _) => Verdict::Done,
        (key::MISCOMPARE, _) => Verdict::Differs,
        (key::UNIT_ATTENTION, code) => {
            // Reset, modes, capacity, definition: it may have become another one.
            Verdict::Again { pause: false, look: matches!(code.0, 0x29 | 0x2a | 0x3f) }
        }
        (key::NOT_READY, code) if NEEDS_SOMEBODY.contains(&code) || code.0 == NO_MEDIUM => {
            Verdict::Few(unusable)
        }
        // Becoming ready, changing its access state, in standby, unavailable by this way.
        (key::NOT_READY, _) | (key::ABORTED_COMMAND, _) => LATER,
        (key::ILLEGAL_REQUEST, Code::LBA_OUT_OF_RANGE) => Verdict::Few(Error::OutOfRange),
        (key::ILLEGAL_REQUEST, Code::LOGICAL_UNIT_NOT_SUPPORTED) => Verdict::Few(unusable),
        (key::ILLEGAL_REQUEST, _) => Verdict::Unknown,
        (key::DATA_PROTECT, Code::SPACE_ALLOCATION_FAILED) => Verdict::Failed(Error::NoSpace),
        (key::DATA_PROTECT, _) => Verdict::Failed(Error::ReadOnly),
        (key::HARDWARE_ERROR, Code::LOGICAL_UNIT_FAILURE) => Verdict::Failed(Error::Gone),
        (key::MEDIUM_ERROR, code) => {
            let at = sense.information.map_or(at, Lba);
            Verdict::Failed(match (code, writes) {
                (_, true) => Error::Unwritable { at },
                (Code::MISCORRECTED_ERROR, false) => Error::Corrupt { at },
                (_, false) => Error::Unreadable { at },
            })
        }
        _ => Verdict::Failed(unusable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(key: u8, code: Code) -> Refusal {
        let sense = Sense { key, code, information: Some(9), deferred: false };
        Refusal { status: status::CHECK_CONDITION, sense: Some(sense) }
    }

    #[test]
    fn every_answer_has_a_verdict() {
        let at = Lba(3);
        let of = |said| verdict(said, at, true);
        let bare = |status| of(Refusal { status, sense: None });
        assert_eq!(bare(0), Verdict::Done);
        for status in [0x08, 0x28, 0x30, 0x40] {
            assert_eq!(bare(status), LATER, "{status:#x}");
        }
        let unwritable = Error::Unwritable { at };
        assert_eq!(bare(0x18), Verdict::Failed(unwritable));
        assert_eq!((bare(0x02), bare(0xee)), (Verdict::Few(unwritable), Verdict::Few(unwritable)));
        let look = |look| Verdict::Again { pause: false, look };
        for (key, code, expected) in [
            (1, Code(0x17, 1), Verdict::Done),
            (2, Code(4, 1), LATER),
            (2, Code(4, 0xa), LATER),
            (2, Code(4, 0xb), LATER),
            (2, Code(4, 0xc), LATER),
            (2, Code(4, 3), Verdict::Few(unwritable)),
            (2, Code(0x3a, 0), Verdict::Few(unwritable)),
            (3, Code(0x0c, 0), Verdict::Failed(Error::Unwritable { at: Lba(9) })),
            (4, Code(0x3e, 1), Verdict::Failed(Error::Gone)),
            (4, Code(0x44, 0), Verdict::Failed(unwritable)),
            (5, Code(0x21, 0), Verdict::Few(Error::OutOfRange)),
            (5, Code(0x25, 0), Verdict::Few(unwritable)),
            (5, Code(0x20, 0), Verdict::Unknown),
            (6, Code(0x2a, 9), look(true)),
            (6, Code(0x29, 0), look(true)),
            (6, Code(0x3f, 0xe), look(true)),
            (6, Code(0x38, 7), look(false)),
            (7, Code(0x27, 7), Verdict::Failed(Error::NoSpace)),
            (7, Code(0x27, 0), Verdict::Failed(Error::ReadOnly)),
            (0xb, Code(0, 0), LATER),
            (0xe, Code(0x1d, 0), Verdict::Differs),
        ] {
            assert_eq!(of(check(key, code)), expected, "{key:x} {code:?}");
        }
        let corrupt = verdict(check(3, Code(0x11, 0xa)), at, false);
        assert_eq!(corrupt, Verdict::Failed(Error::Corrupt { at: Lba(9) }));
        let mut late = check(3, Code(0x0c, 0));
        late.sense = late.sense.map(|s| Sense { deferred: true, ..s });
        assert_eq!(of(late), Verdict::Failed(Error::Gone), "what had been confirmed is lost");
    }
}
