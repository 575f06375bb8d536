//! READ CAPACITY and GET LBA STATUS (SBC-3 5.4, 5.15, 5.16).

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, Unaligned};

use crate::reply::Refusal;
use crate::sense::{Code, Sense};
use crate::unit::{Incoming, LogicalUnit, Outcome};

impl LogicalUnit {
    fn last_block(&self) -> u64 {
        self.info.blocks.saturating_sub(1)
    }
}

/// READ CAPACITY(10). A device that is too large says so and is asked by READ CAPACITY(16).
pub(crate) fn ten(unit: &mut LogicalUnit, _cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    const LENGTH: u64 = 8;
    let last = u32::try_from(unit.last_block()).unwrap_or(u32::MAX);
    let mut data = last.to_be_bytes().to_vec();
    data.extend(unit.info.block_size.to_be_bytes());
    Ok(Outcome::data(data, LENGTH))
}

/// READ CAPACITY(16) data (SBC-3 5.16).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct Capacity {
    last_block: U64,
    block_size: U32,
    protection: u8,
    blocks_per_physical_exponent: u8,
    provisioning_and_alignment: U16,
    reserved: [u8; 16],
}

const _: () = assert!(size_of::<Capacity>() == 32);

/// READ CAPACITY(16).
pub(crate) fn sixteen(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
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
    let data = Capacity {
        last_block: U64::new(unit.last_block()),
        block_size: U32::new(info.block_size),
        protection: 0,
        blocks_per_physical_exponent: u8::try_from(exponent.min(0xf)).unwrap_or(0),
        provisioning_and_alignment: U16::new(provisioning),
        reserved: [0; 16],
    };
    Ok(Outcome::data(data.as_bytes().to_vec(), u64::from(cmd.cdb.u32(10))))
}

/// GET LBA STATUS data with one descriptor (SBC-3 5.4).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct LbaStatus {
    length: U32,
    reserved: [u8; 4],
    at: U64,
    count: U32,
    /// 0: mapped, or the state is unknown.
    status: u8,
    reserved_too: [u8; 3],
}

const _: () = assert!(size_of::<LbaStatus>() == 24);

/// GET LBA STATUS: all blocks from the named one on are mapped or of unknown state.
pub(crate) fn lba_status(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let at = cmd.cdb.u64(2);
    let left = unit.info.blocks.saturating_sub(at);
    if left == 0 {
        return Err(Sense::illegal(Code::LBA_OUT_OF_RANGE).into());
    }
    let data = LbaStatus {
        length: U32::new((size_of::<LbaStatus>() - size_of::<U32>()) as u32),
        reserved: [0; 4],
        at: U64::new(at),
        count: U32::new(u32::try_from(left).unwrap_or(u32::MAX)),
        status: 0,
        reserved_too: [0; 3],
    };
    Ok(Outcome::data(data.as_bytes().to_vec(), u64::from(cmd.cdb.u32(10))))
}
