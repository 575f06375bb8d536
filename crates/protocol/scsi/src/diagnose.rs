//! SEND DIAGNOSTIC and RECEIVE DIAGNOSTIC RESULTS (SPC-4 6.42, 6.28): the default self-test, and the
//! one page that says that there are no others (SPC-4 7.2).

use block::{Blocks, Error, Failure, Lba, Request};

use crate::reply::{Refusal, Transfer};
use crate::sense::{Code, Key, Sense};
use crate::unit::{Command, Incoming, LogicalUnit, Outcome, Todo};

pub(crate) const PF: u8 = 0x10;
pub(crate) const SELF_TEST: u8 = 0x04;
pub(crate) const PCV: u8 = 0x01;

/// Supported diagnostic pages.
const SUPPORTED: u8 = 0x00;

/// SEND DIAGNOSTIC. Tests in the background (SELF-TEST CODE) are refused as reserved bits; DEVOFFL and
/// UNITOFFL permit what no test here does.
pub(crate) fn send(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let length = cmd.cdb.u16(3);
    match (cmd.cdb.has(1, SELF_TEST), length) {
        (true, 0) if unit.info.blocks == 0 => Ok(Outcome::GOOD),
        (true, 0) => Ok(Outcome::Accept(Command {
            todo: Todo::SelfTest,
            data_out: 0,
            data_in: 0,
            read_back: unit.memory(1),
            wanted: Transfer::NONE,
            window_in: 0,
        })),
        (true, _) => Err(Sense::field(3, None).into()),
        (false, 0) => Ok(Outcome::GOOD),
        (false, _) if !cmd.cdb.has(1, PF) => Err(Sense::field(1, Some(4)).into()),
        (false, _) => unit.accept_list(Todo::Diagnostic, u32::from(length), cmd),
    }
}

/// The default self-test: whether the medium answers.
pub(crate) fn self_test() -> Request {
    Request::Verify { range: Blocks::new(Lba(0), 1) }
}

/// What a self-test has found; `None` if the failure is none of the unit's.
pub(crate) fn found(failure: Failure) -> Option<Sense> {
    let faulty = matches!(
        failure,
        Failure::Device(
            Error::Unreadable { .. } | Error::Corrupt { .. } | Error::Unwritable { .. }
        )
    );
    faulty.then_some(Sense::new(Key::HardwareError, Code::LOGICAL_UNIT_FAILED_SELF_TEST))
}

/// Checks the one page that can be sent: it asks for [`SUPPORTED`] to be received.
pub(crate) fn check(list: &[u8]) -> Result<(), Sense> {
    match *list {
        [SUPPORTED, _, 0, 0] => Ok(()),
        [SUPPORTED, _, _, _, ..] | [] | [SUPPORTED] | [SUPPORTED, _] | [SUPPORTED, _, _] => {
            Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR))
        }
        [_, ..] => Err(Sense::parameter(0, None)),
    }
}

/// RECEIVE DIAGNOSTIC RESULTS: without PCV what was sent last, which can but be the same page.
pub(crate) fn receive(_unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    if cmd.cdb.has(1, PCV) && cmd.cdb.byte(2) != SUPPORTED {
        return Err(Sense::field(2, None).into());
    }
    let page = vec![SUPPORTED, 0, 0, 1, SUPPORTED];
    Ok(Outcome::data(page, u64::from(cmd.cdb.u16(3))))
}
