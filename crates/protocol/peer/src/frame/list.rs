//! Bodies that are lists: entries, write ids, sequence numbers, regions. `blocks` of the header is
//! the number of items.

use block::{Blocks, Lba};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{FLAG_FUA, FrameType, HeaderFields};
use super::{FrameBody, FrameError};
use crate::{NodeId, PreparedEntry, Seq, WriteId};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireEntry {
    epoch: U64,
    seq: U64,
    number: U64,
    lba: U64,
    round: U32,
    blocks: U32,
    node: U16,
    flags: u8,
    reserved: [u8; 5],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireWriteId {
    number: U64,
    node: U16,
    reserved: [u8; 6],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireExtent {
    first: U64,
    bytes: U64,
}

/// Length of an entry in DoViewChange.
pub(super) const ENTRY_BYTES: usize = size_of::<WireEntry>();
const _: () = assert!(ENTRY_BYTES == 48);
/// Length of a write id in StartView.
pub(super) const WRITE_ID_BYTES: usize = size_of::<WireWriteId>();
const _: () = assert!(WRITE_ID_BYTES == 16);
/// Length of a sequence number in Commit.
pub(super) const SEQ_BYTES: usize = size_of::<U64>();
/// Length of a region in ClearRegions.
pub(super) const REGION_BYTES: usize = size_of::<WireExtent>();
const _: () = assert!(REGION_BYTES == 16);

/// The body of a list.
pub(super) fn body<T: IntoBytes + Immutable>(items: &[T]) -> FrameBody {
    FrameBody::Bytes(items.as_bytes().to_vec())
}

/// The items of a body that is a list.
pub(super) fn items<'a, T>(fields: &HeaderFields, body: &'a [u8]) -> Result<&'a [T], FrameError>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    <[T]>::ref_from_bytes(body).map_err(|_| fields.invalid("body"))
}

/// The header fields that would describe an entry; encoding and decoding use their checks.
fn entry_fields(entry: &PreparedEntry) -> HeaderFields {
    HeaderFields::with_view(FrameType::DoViewChange, entry.view)
        .with_kind(entry.kind)
        .with_flag(FLAG_FUA, entry.fua)
}

pub(super) fn entries(entries: &[PreparedEntry]) -> Result<FrameBody, FrameError> {
    let to_wire = |entry: &PreparedEntry| {
        let fields = entry_fields(entry).with_range(entry.range)?;
        Ok(WireEntry {
            epoch: U64::new(fields.epoch),
            seq: U64::new(entry.seq.0),
            number: U64::new(entry.write_id.number),
            lba: U64::new(fields.lba),
            round: U32::new(fields.round),
            blocks: U32::new(fields.blocks),
            node: U16::new(entry.write_id.origin.0),
            flags: fields.flags,
            reserved: [0; 5],
        })
    };
    let wire: Vec<_> = entries.iter().map(to_wire).collect::<Result<_, FrameError>>()?;
    Ok(body(&wire))
}

pub(super) fn parse_entries(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Vec<PreparedEntry>, FrameError> {
    let from_wire = |wire: &WireEntry| {
        let fields_of_entry = HeaderFields {
            epoch: wire.epoch.get(),
            round: wire.round.get(),
            lba: wire.lba.get(),
            blocks: wire.blocks.get(),
            flags: wire.flags,
            ..HeaderFields::new(fields.kind)
        };
        let range: Blocks = fields_of_entry.range()?;
        let entry = PreparedEntry {
            view: fields_of_entry.view(),
            seq: Seq(wire.seq.get()),
            write_id: WriteId { origin: NodeId(wire.node.get()), number: wire.number.get() },
            range: Blocks::new(Lba(range.at.0), range.count),
            kind: fields_of_entry.write_kind(),
            fua: fields_of_entry.has_flag(FLAG_FUA),
        };
        let is_clean = wire.reserved == [0; 5] && entry_fields(&entry).flags == wire.flags;
        is_clean.then_some(entry).ok_or(FrameError::ReservedNotZero(fields.kind))
    };
    items::<WireEntry>(fields, body)?.iter().map(from_wire).collect()
}

pub(super) fn write_ids(write_ids: &[WriteId]) -> FrameBody {
    let to_wire = |write_id: &WriteId| WireWriteId {
        number: U64::new(write_id.number),
        node: U16::new(write_id.origin.0),
        reserved: [0; 6],
    };
    body(&write_ids.iter().map(to_wire).collect::<Vec<_>>())
}

pub(super) fn parse_write_ids(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Vec<WriteId>, FrameError> {
    let from_wire = |wire: &WireWriteId| match wire.reserved {
        [0, 0, 0, 0, 0, 0] => {
            Ok(WriteId { origin: NodeId(wire.node.get()), number: wire.number.get() })
        }
        _ => Err(FrameError::ReservedNotZero(fields.kind)),
    };
    items::<WireWriteId>(fields, body)?.iter().map(from_wire).collect()
}

pub(super) fn seqs(seqs: &[Seq]) -> FrameBody {
    body(&seqs.iter().map(|seq| U64::new(seq.0)).collect::<Vec<_>>())
}

pub(super) fn parse_seqs(fields: &HeaderFields, body: &[u8]) -> Result<Vec<Seq>, FrameError> {
    Ok(items::<U64>(fields, body)?.iter().map(|seq| Seq(seq.get())).collect())
}

pub(super) fn regions(regions: &[(u64, u64)]) -> FrameBody {
    let to_wire = |&(first, bytes): &(u64, u64)| WireExtent {
        first: U64::new(first),
        bytes: U64::new(bytes),
    };
    body(&regions.iter().map(to_wire).collect::<Vec<_>>())
}

pub(super) fn parse_regions(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Vec<(u64, u64)>, FrameError> {
    let from_wire = |wire: &WireExtent| {
        let (first, bytes) = (wire.first.get(), wire.bytes.get());
        let is_valid = bytes > 0 && first.checked_add(bytes).is_some();
        is_valid.then_some((first, bytes)).ok_or(fields.invalid("region"))
    };
    items::<WireExtent>(fields, body)?.iter().map(from_wire).collect()
}
