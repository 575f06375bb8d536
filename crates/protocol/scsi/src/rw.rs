//! READ, WRITE, ORWRITE, WRITE ATOMIC, PRE-FETCH and SYNCHRONIZE CACHE (SBC-3 5.5, 5.8, 5.9, 5.11
//! to 5.13, 5.26, 5.27, 5.33 to 5.35; SBC-2 5.5, 5.24; SBC-4 WRITE ATOMIC), and code shared by all
//! commands on ranges of blocks.

use block::Blocks;

use crate::cdb::CdbRange;
use crate::cdb::FUA;
use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::reply::{DataIn, Refusal, TransferLengths};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::unit::LogicalUnit;

/// READ(6), (10), (12), (16). Reads no more blocks than the transport will take.
pub(crate) fn read(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let range = unit.check_transfer(cmd.cdb.range())?;
    let full_transfer = TransferLengths::to_initiator(unit.byte_len(range.count));
    let expected_data_in = cmd.expected_transfer.data_in;
    let count =
        full_transfer.data_in.min(expected_data_in).div_ceil(u64::from(unit.info.block_size));
    if count == 0 {
        return Ok(Outcome::Done { data: DataIn::None, full_transfer });
    }
    let op = AdmittedOp::Read(Blocks::new(range.at, count));
    let data_in = unit.buffer_len(count);
    let (data_out, read_back) = (0, 0);
    Ok(Outcome::Accept(AdmittedCommand {
        op,
        data_out,
        data_in,
        read_back,
        full_transfer,
        expected_data_in,
    }))
}

/// WRITE(6), (10), (12), (16).
pub(crate) fn write(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let range = unit.check_transfer(cmd.cdb.range())?;
    unit.check_writable()?;
    // WRITE(6) has bits of the address where the others have FUA.
    let fua = cmd.cdb.opcode() != 0x0a && cmd.cdb.has(1, FUA);
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(range.count));
    let blocks = unit.expected_blocks(full_transfer, cmd)?;
    Ok(unit.accept_data(AdmittedOp::Write { at: range.at, fua }, blocks, 0, full_transfer))
}

/// ORWRITE(16): sets the bits of its data.
pub(crate) fn or_write(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let range = unit.check_transfer(cmd.cdb.range())?;
    unit.check_writable()?;
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(range.count));
    let blocks = unit.expected_blocks(full_transfer, cmd)?;
    let op = AdmittedOp::OrWrite { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(op, blocks, blocks, full_transfer))
}

/// WRITE ATOMIC(16): only lengths and alignments that the medium writes atomically are accepted.
/// ATOMIC BOUNDARY is rejected as a reserved field: several atomic writes in one command are not
/// supported.
pub(crate) fn write_atomic(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const AT_FIELD: u16 = 2;
    const COUNT_FIELD: u16 = 12;
    let count = u32::from(cmd.cdb.u16(u32::from(COUNT_FIELD)));
    let extent = CdbRange { count, count_field: COUNT_FIELD, ..cmd.cdb.range() };
    let range = unit.check_range(extent)?;
    let whole = unit.limits.max_atomic;
    if !range.at.0.is_multiple_of(u64::from(whole)) {
        return Err(Sense::field(AT_FIELD, None).into());
    }
    if count > whole || !count.is_multiple_of(whole) {
        return Err(Sense::field(COUNT_FIELD, None).into());
    }
    unit.check_writable()?;
    let full_transfer = TransferLengths::from_initiator(unit.byte_len(range.count));
    if cmd.expected_transfer.data_out < full_transfer.data_out {
        return Err(Refusal::transfer_mismatch(full_transfer));
    }
    let op = AdmittedOp::Write { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(op, range.count, 0, full_transfer))
}

/// PRE-FETCH(10), (16): the address is checked and nothing is fetched, as GOOD (and not CONDITION
/// MET) says (SBC-3 5.8).
pub(crate) fn pre_fetch(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    unit.check_range(cmd.cdb.range())?;
    Ok(Outcome::GOOD)
}

/// SYNCHRONIZE CACHE(10), (16): flushes the whole unit, which includes the range. IMMED would allow
/// an earlier answer; answering after the flush is always correct.
pub(crate) fn synchronize_cache(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    unit.check_range(cmd.cdb.range())?;
    Ok(unit.accept(AdmittedOp::Flush))
}

impl LogicalUnit {
    /// `extent`, if it lies inside the device. An empty one may lie at its end.
    pub(crate) fn check_range(&self, extent: CdbRange) -> Result<Blocks, Sense> {
        let range = Blocks::new(extent.at, u64::from(extent.count));
        if range.end().is_some_and(|end| end <= self.info.blocks) {
            Ok(range)
        } else {
            Err(Sense::illegal(SenseCode::LBA_OUT_OF_RANGE))
        }
    }

    /// [`Self::check_range`] for commands under the MAXIMUM TRANSFER LENGTH (SBC-3 6.5, block
    /// limits).
    pub(crate) fn check_transfer(&self, extent: CdbRange) -> Result<Blocks, Sense> {
        if extent.count > self.limits.max_transfer {
            return Err(Sense::field(extent.count_field, None));
        }
        self.check_range(extent)
    }

    pub(crate) fn check_writable(&self) -> Result<(), Sense> {
        if self.is_read_only() {
            Err(Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED))
        } else if self.modes.swp {
            Err(Sense::new(SenseKey::DataProtect, SenseCode::SOFTWARE_WRITE_PROTECTED))
        } else {
            Ok(())
        }
    }

    /// Length of `blocks` in bytes. Counts come from fields of 32 bits or less.
    pub(crate) fn byte_len(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(u64::from(self.info.block_size))
    }

    /// [`Self::byte_len`] of buffers.
    pub(crate) fn buffer_len(&self, blocks: u64) -> usize {
        usize::try_from(self.byte_len(blocks)).unwrap_or(usize::MAX)
    }

    /// How many of the blocks to be written the transport will bring. It must be a whole number of
    /// blocks.
    pub(crate) fn expected_blocks(
        &self,
        full_transfer: TransferLengths,
        cmd: &ParsedCommand<'_>,
    ) -> Result<u64, Refusal> {
        let bytes = full_transfer.data_out.min(cmd.expected_transfer.data_out);
        let block = u64::from(self.info.block_size);
        if bytes.is_multiple_of(block) {
            Ok(bytes / block)
        } else {
            Err(Refusal::transfer_mismatch(full_transfer))
        }
    }

    /// Accepts `blocks` of data, of which the volume reads back `read_back`; without data nothing
    /// is done.
    pub(crate) fn accept_data(
        &self,
        op: AdmittedOp,
        blocks: u64,
        read_back: u64,
        full_transfer: TransferLengths,
    ) -> Outcome {
        if blocks == 0 {
            return Outcome::Done { data: DataIn::None, full_transfer };
        }
        let (data_out, read_back) = (self.buffer_len(blocks), self.buffer_len(read_back));
        let (data_in, expected_data_in) = (0, 0);
        Outcome::Accept(AdmittedCommand {
            op,
            data_out,
            data_in,
            read_back,
            full_transfer,
            expected_data_in,
        })
    }

    /// Accepts a command without data.
    pub(crate) fn accept(&self, op: AdmittedOp) -> Outcome {
        let full_transfer = TransferLengths::NONE;
        let (data_out, data_in, read_back, expected_data_in) = (0, 0, 0, 0);
        Outcome::Accept(AdmittedCommand {
            op,
            data_out,
            data_in,
            read_back,
            full_transfer,
            expected_data_in,
        })
    }

    /// Accepts a parameter list of `bytes`, all of which the transport must bring.
    pub(crate) fn accept_list(
        &self,
        op: AdmittedOp,
        bytes: u32,
        cmd: &ParsedCommand<'_>,
    ) -> Result<Outcome, Refusal> {
        let full_transfer = TransferLengths::from_initiator(u64::from(bytes));
        if bytes > crate::limits::MAX_PARAMETER_LIST {
            return Err(Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR).into());
        }
        if cmd.expected_transfer.data_out < full_transfer.data_out {
            return Err(Refusal::transfer_mismatch(full_transfer));
        }
        if bytes == 0 {
            return Ok(Outcome::GOOD);
        }
        let data_out = bytes as usize;
        let (data_in, read_back, expected_data_in) = (0, 0, 0);
        Ok(Outcome::Accept(AdmittedCommand {
            op,
            data_out,
            data_in,
            read_back,
            full_transfer,
            expected_data_in,
        }))
    }
}
