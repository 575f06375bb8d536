//! READ DEFECT DATA (SBC-3 5.17, 5.18). What lies below a volume keeps track of its bad blocks itself:
//! the lists are empty in every format.

use crate::reply::Refusal;
use crate::sense::Sense;
use crate::unit::{Incoming, LogicalUnit, Outcome};

/// REQ_PLIST, REQ_GLIST and DEFECT LIST FORMAT; what is returned stands in the same bits.
pub(crate) const ASKED: u8 = 0x1f;

/// Header of a list of READ DEFECT DATA(10): no generation code, a length of two bytes.
pub(crate) fn ten(_unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let asked = asked(cmd, 2)?;
    Ok(Outcome::data(vec![0, asked, 0, 0], u64::from(cmd.cdb.u16(7))))
}

/// Header of a list of READ DEFECT DATA(12). There is nothing behind any ADDRESS DESCRIPTOR INDEX.
pub(crate) fn twelve(_unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let asked = asked(cmd, 1)?;
    Ok(Outcome::data(vec![0, asked, 0, 0, 0, 0, 0, 0], u64::from(cmd.cdb.u32(6))))
}

/// The byte that says what is asked for. A format must be one that the standard knows.
fn asked(cmd: &Incoming<'_>, at: u16) -> Result<u8, Sense> {
    const FORMAT: u8 = 0x07;
    const PHYSICAL_SECTOR: u8 = 0x05; // vendor specific and reserved ones are behind it
    let asked = cmd.cdb.byte(u32::from(at)) & ASKED;
    if asked & FORMAT > PHYSICAL_SECTOR { Err(Sense::field(at, Some(2))) } else { Ok(asked) }
}
