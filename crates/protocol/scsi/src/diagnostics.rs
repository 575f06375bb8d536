//! SEND DIAGNOSTIC and RECEIVE DIAGNOSTIC RESULTS (SPC-4 6.42, 6.28): the default self-test, and
//! the page that lists only itself (SPC-4 7.2).

use block::{Blocks, Error, Lba, Request, RequestError};

use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::reply::{Refusal, TransferLengths};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::unit::LogicalUnit;

pub(crate) const PF: u8 = 0x10;
pub(crate) const SELF_TEST: u8 = 0x04;
pub(crate) const PCV: u8 = 0x01;

/// Supported diagnostic pages.
const SUPPORTED: u8 = 0x00;

/// SEND DIAGNOSTIC. Background tests (SELF-TEST CODE) are rejected as reserved bits; DEVOFFL and
/// UNITOFFL permit effects that no test here has.
pub(crate) fn send(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let length = cmd.cdb.u16(3);
    match (cmd.cdb.has(1, SELF_TEST), length) {
        (true, 0) if unit.info.blocks == 0 => Ok(Outcome::GOOD),
        (true, 0) => Ok(Outcome::Accept(AdmittedCommand {
            op: AdmittedOp::SelfTest,
            data_out: 0,
            data_in: 0,
            read_back: unit.buffer_len(1),
            full_transfer: TransferLengths::NONE,
            expected_data_in: 0,
        })),
        (true, _) => Err(Sense::field(3, None).into()),
        (false, 0) => Ok(Outcome::GOOD),
        (false, _) if !cmd.cdb.has(1, PF) => Err(Sense::field(1, Some(4)).into()),
        (false, _) => unit.accept_list(AdmittedOp::SendDiagnostic, u32::from(length), cmd),
    }
}

/// The default self-test: a read of the medium.
pub(crate) fn self_test() -> Request {
    Request::Verify { range: Blocks::new(Lba(0), 1) }
}

/// The result of a self-test; `None` if the failure is not the unit's.
pub(crate) fn self_test_sense(failure: RequestError) -> Option<Sense> {
    let faulty = matches!(
        failure,
        RequestError::Device(
            Error::Unreadable { .. } | Error::Corrupt { .. } | Error::Unwritable { .. }
        )
    );
    faulty.then_some(Sense::new(SenseKey::HardwareError, SenseCode::LOGICAL_UNIT_FAILED_SELF_TEST))
}

/// Checks the one page that can be sent, which requests [`SUPPORTED`].
pub(crate) fn check_page(list: &[u8]) -> Result<(), Sense> {
    match *list {
        [SUPPORTED, _, 0, 0] => Ok(()),
        [SUPPORTED, _, _, _, ..] | [] | [SUPPORTED] | [SUPPORTED, _] | [SUPPORTED, _, _] => {
            Err(Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR))
        }
        [_, ..] => Err(Sense::parameter(0, None)),
    }
}

/// RECEIVE DIAGNOSTIC RESULTS: without PCV the page that was sent last, which can only be the same
/// one.
pub(crate) fn receive(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    if cmd.cdb.has(1, PCV) && cmd.cdb.byte(2) != SUPPORTED {
        return Err(Sense::field(2, None).into());
    }
    let page = vec![SUPPORTED, 0, 0, 1, SUPPORTED];
    Ok(Outcome::data(page, u64::from(cmd.cdb.u16(3))))
}
