//! Copy (NVM Command Set 1.0, 3.2.2): copies blocks within a namespace.

use block::{Blocks, Bufs, Info, Lba};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::IoOp;
use super::error_log::{CommandError, field};
use crate::entry::Sqe;
use crate::status::Status;

/// Most source ranges of a command (MSRC + 1).
pub(super) const MAX_RANGES: u8 = 128;

/// Most bytes of a source range (MSSRL).
const MAX_RANGE_BYTES: u32 = 32 << 20;

/// Most bytes of a command (MCL), so that it ends within host timeouts.
const MAX_BYTES: u32 = 64 << 20;

/// A source range, format 0.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SourceRange {
    reserved0: [u8; 8],
    at: U64,
    /// 0's based.
    blocks: U16,
    reserved18: [u8; 6],
    /// Protection information, which no namespace has.
    protection: [U32; 2],
}
const _: () = assert!(size_of::<SourceRange>() == 32);

/// A Copy command: the concatenated sources are written from `to` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// The sources in order; inside the namespace, none empty.
    pub sources: Vec<Blocks>,
    /// First block of the destination, inside the namespace.
    pub to: Lba,
    /// Whether it must be durable on completion.
    pub fua: bool,
}

/// Longest source range in blocks.
pub(super) fn max_range_blocks(info: &Info) -> u16 {
    u16::try_from(MAX_RANGE_BYTES / info.block_size.max(1)).unwrap_or(u16::MAX)
}

/// Most blocks of a command.
pub(super) fn max_copy_blocks(info: &Info) -> u32 {
    MAX_BYTES / info.block_size.max(1)
}

/// Parses the dwords of the command.
pub(super) fn parse(sqe: &Sqe, fua: bool) -> Result<IoOp, CommandError> {
    let [ranges, format, ..] = sqe.cdw(2).to_le_bytes();
    if format & 0xf != 0 {
        return Err(CommandError::field(field::CDW12 + 1));
    }
    if ranges >= MAX_RANGES {
        return Err(CommandError::at(Status::COMMAND_SIZE_LIMIT, field::CDW12));
    }
    let ranges = u16::from(ranges) + 1;
    let bytes = |ranges: u16| u32::from(ranges) * size_of::<SourceRange>() as u32;
    // As with Dataset Management, the list may be longer than its used part.
    if !(bytes(ranges)..=bytes(MAX_RANGES.into())).contains(&sqe.data_bytes()) {
        return Err(CommandError::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH));
    }
    Ok(IoOp::Copy { ranges, to: Lba(sqe.slba()), fua })
}

impl CopyRequest {
    /// Parses the first `ranges` of `data`.
    pub(super) fn parse(
        data: &Bufs,
        ranges: u16,
        to: Lba,
        fua: bool,
        info: &Info,
    ) -> Result<Self, Status> {
        let inside = |range: &Blocks| range.end().is_some_and(|end| end <= info.blocks);
        let wanted = usize::from(ranges) * size_of::<SourceRange>();
        let mut bytes = [0; MAX_RANGES as usize * size_of::<SourceRange>()];
        if wanted > data.len().min(bytes.len()) {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        data.slice(0..wanted).copy_to(&mut bytes[..wanted]);
        let mut sources = Vec::with_capacity(ranges.into());
        for raw in bytes[..wanted].chunks_exact(size_of::<SourceRange>()) {
            let source = SourceRange::read_from_bytes(raw).map_err(|_| Status::INTERNAL_ERROR)?;
            let range = Blocks::new(Lba(source.at.get()), u64::from(source.blocks.get()) + 1);
            if range.count > max_range_blocks(info).into() {
                return Err(Status::COMMAND_SIZE_LIMIT.do_not_retry());
            }
            if !inside(&range) {
                return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
            }
            sources.push(range);
        }
        let count = sources.iter().map(|range| range.count).sum();
        if count > max_copy_blocks(info).into() {
            return Err(Status::COMMAND_SIZE_LIMIT.do_not_retry());
        }
        if !inside(&Blocks::new(to, count)) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        Ok(Self { sources, to, fua })
    }
}
