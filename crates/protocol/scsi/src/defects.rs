//! READ DEFECT DATA (SBC-3 5.17, 5.18). The disks below a volume manage their bad blocks
//! themselves: the lists are empty in every format.

use crate::command::{Outcome, ParsedCommand};
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::unit::LogicalUnit;

/// REQ_PLIST, REQ_GLIST and DEFECT LIST FORMAT; the answer has the same bits.
pub(crate) const REQUEST_BITS: u8 = 0x1f;

/// Header of a list of READ DEFECT DATA(10): no generation code, a length of two bytes.
pub(crate) fn read_defect_data_10(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let asked = requested_lists(cmd, 2)?;
    Ok(Outcome::data(vec![0, asked, 0, 0], u64::from(cmd.cdb.u16(7))))
}

/// Header of a list of READ DEFECT DATA(12). No ADDRESS DESCRIPTOR INDEX has any descriptors.
pub(crate) fn read_defect_data_12(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let asked = requested_lists(cmd, 1)?;
    Ok(Outcome::data(vec![0, asked, 0, 0, 0, 0, 0, 0], u64::from(cmd.cdb.u32(6))))
}

/// The byte with the requested lists. The format must be known to the standard.
fn requested_lists(cmd: &ParsedCommand<'_>, at: u16) -> Result<u8, Sense> {
    const FORMAT: u8 = 0x07;
    const PHYSICAL_SECTOR: u8 = 0x05; // vendor specific and reserved ones are behind it
    let asked = cmd.cdb.byte(u32::from(at)) & REQUEST_BITS;
    if asked & FORMAT > PHYSICAL_SECTOR { Err(Sense::field(at, Some(2))) } else { Ok(asked) }
}
