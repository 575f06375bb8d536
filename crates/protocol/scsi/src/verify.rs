//! VERIFY, WRITE AND VERIFY and COMPARE AND WRITE (SBC-3 5.2, 5.29 to 5.31, 5.37 to 5.39).

use block::{Blocks, Bufs, Lba, Request};

use crate::cdb::FUA;
use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::reply::{Refusal, TransferLengths};
use crate::sense::Sense;
use crate::status::Status;
use crate::unit::LogicalUnit;

/// VERIFY(10), (12), (16). BYTCHK selects the comparison: 0 none, the medium is read; 1 as many
/// blocks as are verified; 3 one block for all.
pub(crate) fn verify(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let bytchk = cmd.cdb.byte(1) >> 1 & 0x3;
    let range = unit.check_transfer(cmd.cdb.range())?;
    match bytchk {
        0 if range.count == 0 => Ok(Outcome::GOOD),
        0 => Ok(Outcome::Accept(AdmittedCommand {
            op: AdmittedOp::Verify(range),
            data_out: 0,
            data_in: 0,
            read_back: unit.buffer_len(range.count),
            full_transfer: TransferLengths::NONE,
            expected_data_in: 0,
        })),
        1 => compare(unit, cmd, range, range.count),
        3 => compare(unit, cmd, range, 1),
        _ => Err(Sense::field(1, Some(2)).into()),
    }
}

/// A comparison of `range` with `brought` blocks. All of them must arrive: GOOD for a shorter
/// comparison would be wrong.
fn compare(
    unit: &LogicalUnit,
    cmd: &ParsedCommand<'_>,
    range: Blocks,
    brought: u64,
) -> Result<Outcome, Refusal> {
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(brought));
    if range.count == 0 {
        return Ok(Outcome::GOOD);
    }
    if cmd.expected_transfer.data_out < full_transfer.data_out {
        return Err(Refusal::transfer_mismatch(full_transfer));
    }
    Ok(unit.accept_data(AdmittedOp::Compare(range), brought, range.count, full_transfer))
}

/// WRITE AND VERIFY(10), (12), (16). With BYTCHK 0 the written data is read back, with 1 also
/// compared.
pub(crate) fn write_and_verify(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let range = unit.check_transfer(cmd.cdb.range())?;
    unit.check_writable()?;
    let compare = cmd.cdb.has(1, 0x02);
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(range.count));
    let blocks = unit.expected_blocks(full_transfer, cmd)?;
    let op = AdmittedOp::WriteAndVerify { at: range.at, compare };
    Ok(unit.accept_data(op, blocks, blocks, full_transfer))
}

/// COMPARE AND WRITE. Carries the blocks to compare with, then those to write, and must carry
/// exactly these.
pub(crate) fn compare_and_write(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const COUNT_FIELD: u16 = 13;
    let mut extent = cmd.cdb.range();
    extent.count = u32::from(cmd.cdb.byte(u32::from(COUNT_FIELD)));
    extent.count_field = COUNT_FIELD;
    if extent.count > u32::from(unit.limits.max_compare_and_write) {
        return Err(Sense::field(COUNT_FIELD, None).into());
    }
    let range = unit.check_range(extent)?;
    unit.check_writable()?;
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(2 * range.count));
    if cmd.expected_transfer.data_out != full_transfer.data_out {
        // The initiator sends data for a different number of blocks than it names.
        let sense = Some(Sense::field(COUNT_FIELD, None));
        return Err(Refusal { status: Status::CheckCondition, sense, full_transfer });
    }
    let op = AdmittedOp::CompareAndWrite { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(op, 2 * range.count, range.count, full_transfer))
}

/// The request that verifies `data` after it was written at `at`.
pub(crate) fn verify_written(at: Lba, data: &Bufs, compare: bool, block_size: u32) -> Request {
    if compare {
        return Request::Compare { at, data: data.clone() };
    }
    Request::Verify { range: Blocks::new(at, data.len() as u64 / u64::from(block_size)) }
}

/// `data` repeated to cover `range`; the memory is shared.
pub(crate) fn repeat_to_cover(data: Bufs, range: Blocks, block_size: u32) -> Bufs {
    let range_bytes = range.count.saturating_mul(u64::from(block_size));
    if data.is_empty() || data.len() as u64 >= range_bytes {
        return data;
    }
    let times = range_bytes / data.len() as u64;
    (0..times).flat_map(|_| data.iter().cloned()).collect()
}

/// The first half of `data` is the expected contents, the second the new ones.
pub(crate) fn compare_then_write(at: Lba, data: &Bufs, fua: bool) -> Request {
    let half = data.len() / 2;
    let (compare, write) = (data.slice(0..half), data.slice(half..2 * half));
    Request::CompareAndWrite { at, compare, write, fua }
}
