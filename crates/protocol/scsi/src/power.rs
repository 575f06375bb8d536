//! TEST UNIT READY, REQUEST SENSE, START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.47,
//! 6.39, SBC-3 5.25, 5.10).

use crate::command::{AdmittedOp, Outcome, ParsedCommand};
use crate::failure::UNAVAILABLE;
use crate::reply::Refusal;
use crate::sense::{Sense, SenseCode, SenseFormat, SenseKey};
use crate::unit::LogicalUnit;

/// The sense data of a unit that START STOP UNIT has stopped (SBC-3 5.25).
pub(crate) const NOT_STARTED: Sense =
    Sense::new(SenseKey::NotReady, SenseCode::INITIALIZING_COMMAND_REQUIRED);

/// TEST UNIT READY: everything it tests was already checked.
pub(crate) fn test_unit_ready(
    _unit: &mut LogicalUnit,
    _cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(Outcome::GOOD)
}

/// REQUEST SENSE: a pending unit attention, which is thereby reported, or the unit's state.
pub(crate) fn request_sense(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let sense = match unit.nexuses.take_attention(cmd.nexus) {
        Some(attention) => attention.sense(),
        None if unit.is_unavailable() => UNAVAILABLE,
        None if unit.stopped => NOT_STARTED,
        None => Sense::new(SenseKey::NoSense, SenseCode::NONE),
    };
    Ok(sense_data(&sense, cmd))
}

/// The answer to REQUEST SENSE. DESC selects the format, whatever D_SENSE is.
pub(crate) fn sense_data(sense: &Sense, cmd: &ParsedCommand<'_>) -> Outcome {
    let format = if cmd.cdb.has(1, 0x01) { SenseFormat::Descriptor } else { SenseFormat::Fixed };
    Outcome::data(sense.to_bytes(format).to_vec(), u64::from(cmd.cdb.byte(4)))
}

const START: u8 = 0x01;
const NO_FLUSH: u8 = 0x04;

/// START STOP UNIT. The medium cannot be removed and there are no power conditions besides running
/// and stopped: LOEJ and POWER CONDITION are rejected as reserved bits. Stopping flushes first
/// unless NO_FLUSH is set; IMMED is ignored.
pub(crate) fn start_stop(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let start = cmd.cdb.has(4, START);
    if !start && !unit.stopped && !cmd.cdb.has(4, NO_FLUSH) {
        return Ok(unit.accept(AdmittedOp::Stop));
    }
    unit.stopped = !start;
    Ok(Outcome::GOOD)
}

/// PREVENT ALLOW MEDIUM REMOVAL: the medium can never be removed, so there is no state.
pub(crate) fn prevent_allow(
    _unit: &mut LogicalUnit,
    _cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(Outcome::GOOD)
}
