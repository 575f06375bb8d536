//! Bodies that are lists: entries, tags, places, regions. The header's `blocks` is the count.

use block::{Blocks, Lba};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{FUA, Fields, Type};
use super::{Bad, Body};
use crate::{Entry, NodeId, Seq, Tag};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SentEntry {
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
struct SentTag {
    number: U64,
    node: U16,
    reserved: [u8; 6],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SentRegion {
    first: U64,
    bytes: U64,
}

/// Length of an entry in STARTED.
pub(super) const ENTRY_BYTES: usize = size_of::<SentEntry>();
const _: () = assert!(ENTRY_BYTES == 48);
/// Length of a tag in OPEN.
pub(super) const TAG_BYTES: usize = size_of::<SentTag>();
const _: () = assert!(TAG_BYTES == 16);
/// Length of a place in COMMIT.
pub(super) const SEQ_BYTES: usize = size_of::<U64>();
/// Length of a region in CLEAR.
pub(super) const REGION_BYTES: usize = size_of::<SentRegion>();
const _: () = assert!(REGION_BYTES == 16);

/// The body that these make.
pub(super) fn body<T: IntoBytes + Immutable>(items: &[T]) -> Body {
    Body::Bytes(items.as_bytes().to_vec())
}

/// What a body that is nothing else holds.
pub(super) fn items<'a, T>(fields: &Fields, body: &'a [u8]) -> Result<&'a [T], Bad>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    <[T]>::ref_from_bytes(body).map_err(|_| fields.bad("body"))
}

/// The header fields in which an entry says what a write is like; they check it alike.
fn entry_fields(entry: &Entry) -> Fields {
    Fields::of_view(Type::Started, entry.view).with_kind(entry.kind).with_flag(FUA, entry.fua)
}

pub(super) fn entries(entries: &[Entry]) -> Result<Body, Bad> {
    let send = |entry: &Entry| {
        let fields = entry_fields(entry).with_range(entry.range)?;
        Ok(SentEntry {
            epoch: U64::new(fields.epoch),
            seq: U64::new(entry.seq.0),
            number: U64::new(entry.tag.number),
            lba: U64::new(fields.lba),
            round: U32::new(fields.round),
            blocks: U32::new(fields.blocks),
            node: U16::new(entry.tag.node.0),
            flags: fields.flags,
            reserved: [0; 5],
        })
    };
    let sent: Vec<_> = entries.iter().map(send).collect::<Result<_, Bad>>()?;
    Ok(body(&sent))
}

pub(super) fn parse_entries(fields: &Fields, body: &[u8]) -> Result<Vec<Entry>, Bad> {
    let read = |sent: &SentEntry| {
        let has = Fields {
            epoch: sent.epoch.get(),
            round: sent.round.get(),
            lba: sent.lba.get(),
            blocks: sent.blocks.get(),
            flags: sent.flags,
            ..Fields::new(fields.kind)
        };
        let range: Blocks = has.range()?;
        let entry = Entry {
            view: has.view(),
            seq: Seq(sent.seq.get()),
            tag: Tag { node: NodeId(sent.node.get()), number: sent.number.get() },
            range: Blocks::new(Lba(range.at.0), range.count),
            kind: has.change_kind(),
            fua: has.has(FUA),
        };
        let clean = sent.reserved == [0; 5] && entry_fields(&entry).flags == sent.flags;
        clean.then_some(entry).ok_or(Bad::Reserved(fields.kind))
    };
    items::<SentEntry>(fields, body)?.iter().map(read).collect()
}

pub(super) fn tags(tags: &[Tag]) -> Body {
    let send = |tag: &Tag| SentTag {
        number: U64::new(tag.number),
        node: U16::new(tag.node.0),
        reserved: [0; 6],
    };
    body(&tags.iter().map(send).collect::<Vec<_>>())
}

pub(super) fn parse_tags(fields: &Fields, body: &[u8]) -> Result<Vec<Tag>, Bad> {
    let read = |sent: &SentTag| match sent.reserved {
        [0, 0, 0, 0, 0, 0] => Ok(Tag { node: NodeId(sent.node.get()), number: sent.number.get() }),
        _ => Err(Bad::Reserved(fields.kind)),
    };
    items::<SentTag>(fields, body)?.iter().map(read).collect()
}

pub(super) fn seqs(seqs: &[Seq]) -> Body {
    body(&seqs.iter().map(|seq| U64::new(seq.0)).collect::<Vec<_>>())
}

pub(super) fn parse_seqs(fields: &Fields, body: &[u8]) -> Result<Vec<Seq>, Bad> {
    Ok(items::<U64>(fields, body)?.iter().map(|seq| Seq(seq.get())).collect())
}

pub(super) fn regions(regions: &[(u64, u64)]) -> Body {
    let send = |&(first, bytes): &(u64, u64)| SentRegion {
        first: U64::new(first),
        bytes: U64::new(bytes),
    };
    body(&regions.iter().map(send).collect::<Vec<_>>())
}

pub(super) fn parse_regions(fields: &Fields, body: &[u8]) -> Result<Vec<(u64, u64)>, Bad> {
    let read = |sent: &SentRegion| {
        let (first, bytes) = (sent.first.get(), sent.bytes.get());
        let whole = bytes > 0 && first.checked_add(bytes).is_some();
        whole.then_some((first, bytes)).ok_or(fields.bad("region"))
    };
    items::<SentRegion>(fields, body)?.iter().map(read).collect()
}
