//! READ, WRITE, ORWRITE, WRITE ATOMIC, PRE-FETCH and SYNCHRONIZE CACHE (SBC-3 5.5, 5.8, 5.9, 5.11 to 5.13,
//! 5.26, 5.27, 5.33 to 5.35; SBC-2 5.5, 5.24; SBC-4 WRITE ATOMIC), and what all commands on ranges of blocks have in common.

use block::Blocks;

use crate::cdb::Extent;
use crate::opcodes::FUA;
use crate::reply::{Data, Refusal, Transfer};
use crate::sense::{Code, Key, Sense};
use crate::unit::{Command, Incoming, LogicalUnit, Outcome, Todo};

/// READ(6), (10), (12), (16). Reads no more blocks than the transport will take.
pub(crate) fn read(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let range = unit.transfer(cmd.cdb.extent())?;
    let wanted = Transfer::to_initiator(unit.bytes(range.count));
    let window_in = cmd.window.data_in;
    let count = wanted.data_in.min(window_in).div_ceil(u64::from(unit.info.block_size));
    if count == 0 {
        return Ok(Outcome::Done { data: Data::None, wanted });
    }
    let todo = Todo::Read(Blocks::new(range.at, count));
    let data_in = unit.memory(count);
    let (data_out, read_back) = (0, 0);
    Ok(Outcome::Accept(Command { todo, data_out, data_in, read_back, wanted, window_in }))
}

/// WRITE(6), (10), (12), (16).
pub(crate) fn write(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let range = unit.transfer(cmd.cdb.extent())?;
    unit.check_writable()?;
    // WRITE(6) has bits of the address where the others have FUA.
    let fua = cmd.cdb.opcode() != 0x0a && cmd.cdb.has(1, FUA);
    let wanted = Transfer::from_initiator(unit.bytes(range.count));
    let blocks = unit.blocks_in_window(wanted, cmd)?;
    Ok(unit.accept_data(Todo::Write { at: range.at, fua }, blocks, 0, wanted))
}

/// ORWRITE(16): sets the bits that it brings.
pub(crate) fn or_write(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let range = unit.transfer(cmd.cdb.extent())?;
    unit.check_writable()?;
    let wanted = Transfer::from_initiator(unit.bytes(range.count));
    let blocks = unit.blocks_in_window(wanted, cmd)?;
    let todo = Todo::OrWrite { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(todo, blocks, blocks, wanted))
}

/// WRITE ATOMIC(16): what the medium writes as one is all there or not at all, and so is what is a
/// whole one of these. ATOMIC BOUNDARY is refused as a reserved field: there are no several.
pub(crate) fn write_atomic(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    const AT_FIELD: u16 = 2;
    const COUNT_FIELD: u16 = 12;
    let count = u32::from(cmd.cdb.u16(u32::from(COUNT_FIELD)));
    let extent = Extent { count, count_field: COUNT_FIELD, ..cmd.cdb.extent() };
    let range = unit.range(extent)?;
    let whole = unit.limits.atomic;
    if !range.at.0.is_multiple_of(u64::from(whole)) {
        return Err(Sense::field(AT_FIELD, None).into());
    }
    if count > whole || !count.is_multiple_of(whole) {
        return Err(Sense::field(COUNT_FIELD, None).into());
    }
    unit.check_writable()?;
    let wanted = Transfer::from_initiator(unit.bytes(range.count));
    if cmd.window.data_out < wanted.data_out {
        return Err(Refusal::window(wanted));
    }
    let todo = Todo::Write { at: range.at, fua: cmd.cdb.has(1, FUA) };
    Ok(unit.accept_data(todo, range.count, 0, wanted))
}

/// PRE-FETCH(10), (16): the address is checked and nothing is fetched, as GOOD (and not CONDITION
/// MET) says (SBC-3 5.8).
pub(crate) fn pre_fetch(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    unit.range(cmd.cdb.extent())?;
    Ok(Outcome::GOOD)
}

/// SYNCHRONIZE CACHE(10), (16): flushes the whole unit, which includes the range. IMMED would
/// allow to answer before that; nobody is worse off for an answer that says more.
pub(crate) fn synchronize_cache(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    unit.range(cmd.cdb.extent())?;
    Ok(unit.accept(Todo::Flush))
}

impl LogicalUnit {
    /// `extent`, if it lies inside the device. An empty one may lie at its very end.
    pub(crate) fn range(&self, extent: Extent) -> Result<Blocks, Sense> {
        let range = Blocks::new(extent.at, u64::from(extent.count));
        if range.end().is_some_and(|end| end <= self.info.blocks) {
            Ok(range)
        } else {
            Err(Sense::illegal(Code::LBA_OUT_OF_RANGE))
        }
    }

    /// [`Self::range`] for commands under the MAXIMUM TRANSFER LENGTH (SBC-3 6.5, block limits).
    pub(crate) fn transfer(&self, extent: Extent) -> Result<Blocks, Sense> {
        if extent.count > self.limits.max_transfer {
            return Err(Sense::field(extent.count_field, None));
        }
        self.range(extent)
    }

    pub(crate) fn check_writable(&self) -> Result<(), Sense> {
        if self.is_read_only() {
            Err(Sense::new(Key::DataProtect, Code::WRITE_PROTECTED))
        } else if self.modes.swp {
            Err(Sense::new(Key::DataProtect, Code::SOFTWARE_WRITE_PROTECTED))
        } else {
            Ok(())
        }
    }

    /// Length of `blocks` in bytes. Counts come from fields of 32 bits or less.
    pub(crate) fn bytes(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(u64::from(self.info.block_size))
    }

    /// [`Self::bytes`] of buffers.
    pub(crate) fn memory(&self, blocks: u64) -> usize {
        usize::try_from(self.bytes(blocks)).unwrap_or(usize::MAX)
    }

    /// How many of the blocks that a command wants written the transport will bring. It must be
    /// whole ones: half a block cannot be written.
    pub(crate) fn blocks_in_window(
        &self,
        wanted: Transfer,
        cmd: &Incoming<'_>,
    ) -> Result<u64, Refusal> {
        let bytes = wanted.data_out.min(cmd.window.data_out);
        let block = u64::from(self.info.block_size);
        if bytes.is_multiple_of(block) { Ok(bytes / block) } else { Err(Refusal::window(wanted)) }
    }

    /// Accepts `blocks` of data, of which the volume reads back `read_back`; with no data there
    /// is nothing to do.
    pub(crate) fn accept_data(
        &self,
        todo: Todo,
        blocks: u64,
        read_back: u64,
        wanted: Transfer,
    ) -> Outcome {
        if blocks == 0 {
            return Outcome::Done { data: Data::None, wanted };
        }
        let (data_out, read_back) = (self.memory(blocks), self.memory(read_back));
        let (data_in, window_in) = (0, 0);
        Outcome::Accept(Command { todo, data_out, data_in, read_back, wanted, window_in })
    }

    /// Accepts what needs no data.
    pub(crate) fn accept(&self, todo: Todo) -> Outcome {
        let wanted = Transfer::NONE;
        let (data_out, data_in, read_back, window_in) = (0, 0, 0, 0);
        Outcome::Accept(Command { todo, data_out, data_in, read_back, wanted, window_in })
    }

    /// Accepts a parameter list of `bytes`, all of which the transport must bring.
    pub(crate) fn accept_list(
        &self,
        todo: Todo,
        bytes: u32,
        cmd: &Incoming<'_>,
    ) -> Result<Outcome, Refusal> {
        let wanted = Transfer::from_initiator(u64::from(bytes));
        if bytes > crate::limits::MAX_PARAMETER_LIST {
            return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
        }
        if cmd.window.data_out < wanted.data_out {
            return Err(Refusal::window(wanted));
        }
        if bytes == 0 {
            return Ok(Outcome::GOOD);
        }
        let data_out = bytes as usize;
        let (data_in, read_back, window_in) = (0, 0, 0);
        Ok(Outcome::Accept(Command { todo, data_out, data_in, read_back, wanted, window_in }))
    }
}
