//! READ CAPACITY and GET LBA STATUS (SBC-3 5.4, 5.15, 5.16).

use block::{BlockStatus, Blocks, Lba};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, Unaligned};

use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::reply::{Refusal, TransferLengths};
use crate::sense::{Sense, SenseCode};
use crate::unit::LogicalUnit;

impl LogicalUnit {
    fn last_block(&self) -> u64 {
        self.info.blocks.saturating_sub(1)
    }
}

/// READ CAPACITY(10). For a device that is too large it says so, and initiators use READ
/// CAPACITY(16).
pub(crate) fn read_capacity_10(
    unit: &mut LogicalUnit,
    _cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const LENGTH: u64 = 8;
    let last = u32::try_from(unit.last_block()).unwrap_or(u32::MAX);
    let mut data = last.to_be_bytes().to_vec();
    data.extend(unit.info.block_size.to_be_bytes());
    Ok(Outcome::data(data, LENGTH))
}

/// READ CAPACITY(16) data (SBC-3 5.16).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct ReadCapacity16Data {
    last_block: U64,
    block_size: U32,
    protection: u8,
    blocks_per_physical_exponent: u8,
    provisioning_and_alignment: U16,
    reserved: [u8; 16],
}

const _: () = assert!(size_of::<ReadCapacity16Data>() == 32);

/// READ CAPACITY(16).
pub(crate) fn read_capacity_16(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const LBPME: u16 = 0x8000;
    const LBPRZ: u16 = 0x4000;
    let info = &unit.info;
    let ratio = info.physical_block_size / info.block_size.max(1);
    let exponent = ratio.checked_ilog2().filter(|_| ratio.is_power_of_two()).unwrap_or(0);
    let provisioning = match (unit.can_unmap(), info.unmap_zeroes) {
        (false, _) => 0,
        (true, false) => LBPME,
        (true, true) => LBPME | LBPRZ,
    };
    let data = ReadCapacity16Data {
        last_block: U64::new(unit.last_block()),
        block_size: U32::new(info.block_size),
        protection: 0,
        blocks_per_physical_exponent: u8::try_from(exponent.min(0xf)).unwrap_or(0),
        provisioning_and_alignment: U16::new(provisioning),
        reserved: [0; 16],
    };
    Ok(Outcome::data(data.as_bytes().to_vec(), u64::from(cmd.cdb.u32(10))))
}

/// Header of GET LBA STATUS data (SBC-3 5.4).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct LbaStatusHeader {
    /// Length of the rest.
    length: U32,
    reserved: [u8; 4],
}

/// LBA status descriptor (SBC-3 5.4).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct LbaStatus {
    at: U64,
    count: U32,
    provisioning_status: u8,
    reserved: [u8; 3],
}

const _: () = assert!(size_of::<LbaStatusHeader>() == 8 && size_of::<LbaStatus>() == 16);

/// Mapped, or unknown.
const MAPPED: u8 = 0;
const DEALLOCATED: u8 = 1;

/// Most descriptors of one answer.
const MAX_DESCRIPTORS: u16 = 64;

/// GET LBA STATUS. The volume reports which blocks are mapped; if it cannot unmap, all are.
pub(crate) fn lba_status(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let (at, allocation) = (cmd.cdb.u64(2), cmd.cdb.u32(10));
    let left = unit.info.blocks.saturating_sub(at);
    if left == 0 {
        return Err(Sense::illegal(SenseCode::LBA_OUT_OF_RANGE).into());
    }
    let range = Blocks::new(Lba(at), left.min(u64::from(u32::MAX)));
    if !unit.can_unmap() {
        return Ok(Outcome::data(lba_status_data(range, &[]), u64::from(allocation)));
    }
    let room = (allocation as usize).saturating_sub(size_of::<LbaStatusHeader>());
    let most = u16::try_from(room / size_of::<LbaStatus>()).unwrap_or(u16::MAX);
    let command = AdmittedCommand {
        op: AdmittedOp::GetLbaStatus {
            range,
            max_descriptors: most.clamp(1, MAX_DESCRIPTORS),
            allocation,
        },
        data_out: 0,
        data_in: 0,
        read_back: 0,
        full_transfer: TransferLengths::to_initiator(u64::from(allocation)),
        expected_data_in: cmd.expected_transfer.data_in,
    };
    Ok(Outcome::Accept(command))
}

/// GET LBA STATUS data of a range that begins with `runs`; if that is empty, all of it is mapped.
pub(crate) fn lba_status_data(range: Blocks, runs: &[BlockStatus]) -> Vec<u8> {
    let all = BlockStatus { blocks: u32::try_from(range.count).unwrap_or(u32::MAX), mapped: true };
    let runs = if runs.is_empty() { std::slice::from_ref(&all) } else { runs };
    let length =
        size_of::<LbaStatusHeader>() - size_of::<U32>() + runs.len() * size_of::<LbaStatus>();
    let header = LbaStatusHeader { length: U32::new(length as u32), reserved: [0; 4] };
    let mut data = header.as_bytes().to_vec();
    let mut at = range.at.0;
    for run in runs {
        let status = LbaStatus {
            at: U64::new(at),
            count: U32::new(run.blocks),
            provisioning_status: if run.mapped { MAPPED } else { DEALLOCATED },
            reserved: [0; 3],
        };
        data.extend(status.as_bytes());
        at += u64::from(run.blocks);
    }
    data
}
