//! RESERVE and RELEASE of the whole unit (SPC-2 7.21, 7.17). Third parties and extents are not
//! supported; their fields are refused as reserved bits.

use crate::reply::Refusal;
use crate::unit::{Incoming, LogicalUnit, Outcome};

/// RESERVE(6), (10). Who does not hold the unit has not come this far if another does.
pub(crate) fn reserve(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    unit.reserved_by = Some(cmd.nexus);
    Ok(Outcome::GOOD)
}

/// RELEASE(6), (10): from anybody but the holder it does nothing, and that is no error.
pub(crate) fn release(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    if unit.reserved_by == Some(cmd.nexus) {
        unit.reserved_by = None;
    }
    Ok(Outcome::GOOD)
}
