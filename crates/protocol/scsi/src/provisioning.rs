//! WRITE SAME and UNMAP (SBC-3 4.7, 5.28, 5.43, 5.44).

use block::{Blocks, Buf, Bufs, Lba, Request};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::cdb::UNMAP_BIT;
use crate::command::{AdmittedOp, Outcome, ParsedCommand};
use crate::limits::Limits;
use crate::reply::{Refusal, TransferLengths};
use crate::sense::{Sense, SenseCode};
use crate::unit::LogicalUnit;

/// No data-out buffer: WRITE SAME(16) writes zeroes without data.
pub(crate) const NDOB: u8 = 0x01;

const WRITE_SAME_16: u8 = 0x93;

/// WRITE SAME(10), (16). ANCHOR is not supported and rejected as a reserved bit. A count of zero
/// would mean "to the end"; WSNZ in VPD page B0h says that it is rejected.
pub(crate) fn write_same(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let extent = cmd.cdb.range();
    if extent.count == 0 || extent.count > unit.limits.max_write_same {
        return Err(Sense::field(extent.count_field, None).into());
    }
    let range = unit.check_range(extent)?;
    unit.check_writable()?;
    let unmap = cmd.cdb.has(1, UNMAP_BIT);
    if cmd.cdb.opcode() == WRITE_SAME_16 && cmd.cdb.has(1, NDOB) {
        return Ok(unit.accept(AdmittedOp::Zero { range, unmap }));
    }
    let wanted = TransferLengths::from_initiator(unit.byte_len(1));
    if cmd.expected_transfer.data_out != wanted.data_out {
        return Err(Refusal::transfer_mismatch(wanted));
    }
    Ok(unit.accept_data(AdmittedOp::WriteSame { range, unmap }, 1, 0, wanted))
}

/// The request that fills `range` with copies of the block `data`. Only zeroes can be made by
/// unmapping (SBC-3 5.43: other data is written although UNMAP is set).
pub(crate) fn fill(range: Blocks, data: Bufs, unmap: bool, fua: bool) -> Request {
    if data.iter().all(is_zero) {
        Request::Zero { range, unmap, fua }
    } else {
        Request::WriteSame { range, pattern: data, fua }
    }
}

fn is_zero(buf: &Buf) -> bool {
    buf.chunks(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

/// Header of UNMAP's parameter list (SBC-3 5.28).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ListHeader {
    /// Length of the rest; redundant with the next field.
    _data_length: U16,
    descriptors_length: U16,
    _reserved: [u8; 4],
}

/// A range to unmap (SBC-3 5.28).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Descriptor {
    at: U64,
    count: U32,
    _reserved: [u8; 4],
}

const _: () = assert!(size_of::<ListHeader>() == 8 && size_of::<Descriptor>() == 16);

/// UNMAP. ANCHOR is not supported and rejected as a reserved bit.
pub(crate) fn unmap(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    unit.check_writable()?;
    let length = cmd.cdb.u16(7);
    if length > 0 && usize::from(length) < size_of::<ListHeader>() {
        return Err(Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    unit.accept_list(AdmittedOp::Unmap, u32::from(length), cmd)
}

/// The ranges of a parameter list, without empty ones. A truncated last descriptor is ignored
/// (SBC-3 5.28).
pub(crate) fn ranges(list: &Bufs, limits: &Limits, blocks: u64) -> Result<Vec<Blocks>, Sense> {
    const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    let list = list.to_vec();
    let (header, rest) = ListHeader::ref_from_prefix(&list).map_err(|_| TOO_SHORT)?;
    let length = usize::from(header.descriptors_length.get());
    let rest = rest.get(..length).ok_or(TOO_SHORT)?;
    let whole = length - length % size_of::<Descriptor>();
    let descriptors = <[Descriptor]>::ref_from_bytes(&rest[..whole]).map_err(|_| TOO_SHORT)?;
    if descriptors.len() > usize::from(limits.max_unmap_descriptors) {
        return Err(Sense::parameter(2, None));
    }
    let mut total = 0;
    let mut ranges = Vec::with_capacity(descriptors.len());
    for (i, d) in descriptors.iter().enumerate() {
        let range = Blocks::new(Lba(d.at.get()), u64::from(d.count.get()));
        if range.end().is_none_or(|end| end > blocks) {
            return Err(Sense::illegal(SenseCode::LBA_OUT_OF_RANGE));
        }
        total += range.count;
        if total > u64::from(limits.max_unmap) {
            let count_field = size_of::<ListHeader>() + i * size_of::<Descriptor>() + 8;
            return Err(Sense::parameter(u16::try_from(count_field).unwrap_or(u16::MAX), None));
        }
        if range.count > 0 {
            ranges.push(range);
        }
    }
    Ok(ranges)
}
