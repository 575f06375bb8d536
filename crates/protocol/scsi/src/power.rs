//! TEST UNIT READY, REQUEST SENSE, START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.47,
//! 6.39, SBC-3 5.25, 5.10).

use crate::failure::UNAVAILABLE;
use crate::reply::Refusal;
use crate::sense::{Code, Format, Key, Sense};
use crate::unit::{Incoming, LogicalUnit, NOT_STARTED, Outcome, Todo};

/// TEST UNIT READY: who comes here has passed all there is to test.
pub(crate) fn test_unit_ready(
    _unit: &mut LogicalUnit,
    _cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    Ok(Outcome::GOOD)
}

/// REQUEST SENSE: a waiting unit attention, which then counts as told, or the unit's state.
pub(crate) fn request_sense(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    let sense = match unit.nexuses.take_attention(cmd.nexus) {
        Some(attention) => attention.sense(),
        None if unit.is_unavailable() => UNAVAILABLE,
        None if unit.stopped => NOT_STARTED,
        None => Sense::new(Key::NoSense, Code::NONE),
    };
    Ok(sense_data(&sense, cmd))
}

/// The answer of REQUEST SENSE. DESC chooses the format, whatever D_SENSE says.
pub(crate) fn sense_data(sense: &Sense, cmd: &Incoming<'_>) -> Outcome {
    let format = if cmd.cdb.has(1, 0x01) { Format::Descriptor } else { Format::Fixed };
    Outcome::data(sense.to_bytes(format).to_vec(), u64::from(cmd.cdb.byte(4)))
}

const START: u8 = 0x01;
const NO_FLUSH: u8 = 0x04;

/// START STOP UNIT. The medium does not come out and there are no power conditions between
/// running and stopped: LOEJ and POWER CONDITION are refused as reserved bits. Stopping flushes
/// first unless NO_FLUSH is set; IMMED is not needed.
pub(crate) fn start_stop(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let start = cmd.cdb.has(4, START);
    if !start && !unit.stopped && !cmd.cdb.has(4, NO_FLUSH) {
        return Ok(unit.accept(Todo::Stop));
    }
    unit.stopped = !start;
    Ok(Outcome::GOOD)
}

/// PREVENT ALLOW MEDIUM REMOVAL: removal of a medium that cannot be removed is always prevented,
/// so there is nothing to remember.
pub(crate) fn prevent_allow(
    _unit: &mut LogicalUnit,
    _cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    Ok(Outcome::GOOD)
}
