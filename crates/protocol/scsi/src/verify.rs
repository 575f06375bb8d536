//! VERIFY, WRITE AND VERIFY and COMPARE AND WRITE (SBC-3 5.2, 5.29 to 5.31, 5.37 to 5.39).

use block::{Blocks, Bufs, Lba, Request};

use crate::opcodes::FUA;
use crate::reply::{Refusal, Status, Transfer};
use crate::sense::Sense;
use crate::unit::{Command, Incoming, LogicalUnit, Outcome, Todo};

/// VERIFY(10), (12), (16). BYTCHK says what with: 0 nothing, the medium is read; 1 as many blocks
/// as are verified; 3 one block, the same for all.
pub(crate) fn verify(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let bytchk = cmd.cdb.byte(1) >> 1 & 0x3;
    let range = unit.transfer(cmd.cdb.extent())?;
    match bytchk {
        0 if range.count == 0 => Ok(Outcome::GOOD),
        0 => Ok(Outcome::Accept(Command {
            todo: Todo::Verify(range),
            data_out: 0,
            data_in: 0,
            read_back: unit.memory(range.count),
            wanted: Transfer::NONE,
            window_in: 0,
        })),
        1 => compare(unit, cmd, range, range.count),
        3 => compare(unit, cmd, range, 1),
        _ => Err(Sense::field(1, Some(2)).into()),
    }
}

/// A comparison of `range` with `brought` blocks. All of them must come: a comparison with less
/// would be another one, and GOOD a lie.
fn compare(
    unit: &LogicalUnit,
    cmd: &Incoming<'_>,
    range: Blocks,
    brought: u64,
) -> Result<Outcome, Refusal> {
    let wanted = Transfer::from_initiator(unit.bytes(brought));
    if range.count == 0 {
        return Ok(Outcome::GOOD);
    }
    if cmd.window.data_out < wanted.data_out {
        return Err(Refusal::window(wanted));
    }
    Ok(unit.accept_data(Todo::Compare(range), brought, range.count, wanted))
}

/// WRITE AND VERIFY(10), (12), (16). With BYTCHK 0 what was written is read back, with 1 it is
/// compared as well.
pub(crate) fn write_and_verify(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    let range = unit.transfer(cmd.cdb.extent())?;
    unit.check_writable()?;
    let compare = cmd.cdb.has(1, 0x02);
    let wanted = Transfer::from_initiator(unit.bytes(range.count));
    let blocks = unit.blocks_in_window(wanted, cmd)?;
    let todo = Todo::WriteAndVerify { at: range.at, compare };
    Ok(unit.accept_data(todo, blocks, blocks, wanted))
}

/// COMPARE AND WRITE. Brings the blocks to compare with, then those to write, and must bring
/// exactly these.
pub(crate) fn compare_and_write(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    const COUNT_FIELD: u16 = 13;
    let mut extent = cmd.cdb.extent();
    extent.count = u32::from(cmd.cdb.byte(u32::from(COUNT_FIELD)));
    extent.count_field = COUNT_FIELD;
    if extent.count > u32::from(unit.limits.max_compare_and_write) {
        return Err(Sense::field(COUNT_FIELD, None).into());
    }
    let range = unit.range(extent)?;
    unit.check_writable()?;
    let wanted = Transfer::from_initiator(unit.bytes(2 * range.count));
    if cmd.window.data_out != wanted.data_out {
        // The initiator brings data for another number of blocks than it names.
        let sense = Some(Sense::field(COUNT_FIELD, None));
        return Err(Refusal { status: Status::CheckCondition, sense, wanted });
    }
    let todo = Todo::CompareAndWrite { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(todo, 2 * range.count, range.count, wanted))
}

/// What verifies `data` after it was written at `at`.
pub(crate) fn written(at: Lba, data: &Bufs, compare: bool, block_size: u32) -> Request {
    if compare {
        return Request::Compare { at, data: data.clone() };
    }
    Request::Verify { range: Blocks::new(at, data.len() as u64 / u64::from(block_size)) }
}

/// `data` as often as it takes to cover `range`; the memory is shared.
pub(crate) fn repeated(data: Bufs, range: Blocks, block_size: u32) -> Bufs {
    let wanted = range.count.saturating_mul(u64::from(block_size));
    if data.is_empty() || data.len() as u64 >= wanted {
        return data;
    }
    let times = wanted / data.len() as u64;
    (0..times).flat_map(|_| data.iter().cloned()).collect()
}

/// The first half of `data` is what should be there, the second what shall be.
pub(crate) fn compare_then_write(at: Lba, data: &Bufs, fua: bool) -> Request {
    let half = data.len() / 2;
    let (compare, write) = (data.slice(0..half), data.slice(half..2 * half));
    Request::CompareAndWrite { at, compare, write, fua }
}
