//! Parameter lists of EXTENDED COPY (SPC-4 6.4, 6.5).

use block::Lba;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::cscd::{CSCD_LEN, Cscd, MAX_CSCDS, parse_cscds};
use super::plan::{CopySegment, Side};
use crate::sense::{Sense, SenseCode};

/// Most segments of one list.
pub(crate) const MAX_SEGMENTS: usize = 128;

/// Most bytes of descriptors in one list.
pub(crate) const MAX_DESCRIPTORS: usize = MAX_CSCDS * CSCD_LEN + MAX_SEGMENTS * SEGMENT_LEN;

const G_SENSE: u8 = 0x02;
const IMMED: u8 = 0x01;

const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);

/// Header of the format with list identifiers of one byte (SPC-4 6.5).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Lid1Header {
    id: u8,
    /// STR, LIST ID USAGE (18h), PRIORITY.
    usage: u8,
    cscds_length: U16,
    _reserved: [u8; 4],
    segments_length: U32,
    inline_length: U32,
}

/// Header of the format with list identifiers of four bytes (SPC-4 6.4).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Lid4Header {
    format: u8,
    usage: u8,
    header_length: U16,
    _reserved: [u8; 11],
    /// G_SENSE (02h), IMMED (01h).
    flags: u8,
    header_type: u8,
    _reserved_too: [u8; 3],
    id: U32,
    _reserved_more: [u8; 18],
    cscds_length: U16,
    segments_length: U16,
    inline_length: U16,
}

/// Block device to block device segment descriptor (SPC-4 6.4).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SegmentDescriptor {
    kind: u8,
    /// DC (02h) and CAT.
    flags: u8,
    length: U16,
    source: U16,
    destination: U16,
    _reserved: U16,
    count: U16,
    from: U64,
    to: U64,
}

const SEGMENT_LEN: usize = size_of::<SegmentDescriptor>();

const _: () = assert!(size_of::<Lid1Header>() == 16 && size_of::<Lid4Header>() == 48);
const _: () = assert!(SEGMENT_LEN == 28);

/// Fields of a segment descriptor, for field pointers.
const SOURCE_FIELD: u16 = 4;
const DESTINATION_FIELD: u16 = 6;
pub(crate) const COUNT_FIELD: u16 = 10;
const FROM_FIELD: u16 = 12;
const TO_FIELD: u16 = 20;

/// The supported descriptor type.
pub(crate) const BLOCK_TO_BLOCK: u8 = 0x02;

impl Side {
    /// The index field of this side in a segment descriptor.
    pub(crate) fn index_field(self) -> u16 {
        match self {
            Self::Source => SOURCE_FIELD,
            Self::Destination => DESTINATION_FIELD,
        }
    }

    /// The field of its first block.
    pub(crate) fn address_field(self) -> u16 {
        match self {
            Self::Source => FROM_FIELD,
            Self::Destination => TO_FIELD,
        }
    }
}

/// A valid parameter list.
#[derive(Debug)]
pub(crate) struct ParameterList {
    /// Its identifier, if it has one.
    pub(crate) id: Option<u32>,
    /// Offset of the identifier in the list.
    pub(crate) id_field: u16,
    /// Whether success is reported in sense data.
    pub(crate) g_sense: bool,
    pub(crate) cscds: Vec<Cscd>,
    /// Offset of the CSCD descriptors in the list.
    pub(crate) cscds_offset: u16,
    pub(crate) segments: Vec<CopySegment>,
}

/// The common content of both headers.
struct CopyListHeader {
    id: u32,
    id_field: u16,
    usage: u8,
    flags: u8,
    /// Length of the header.
    len: usize,
    cscds: usize,
    cscds_field: u16,
    segments: usize,
    inline: usize,
}

/// Parses a parameter list. Nothing has been copied yet, so errors are ILLEGAL REQUEST (SPC-4
/// 5.17.7.3).
pub(crate) fn parse(list: &[u8], long: bool) -> Result<ParameterList, Sense> {
    let header = if long { lid4_header(list)? } else { lid1_header(list)? };
    let id = identifier(&header)?;
    let tells = header.flags & G_SENSE != 0;
    // Accepted, although the status is sent only when the copy is complete.
    if header.flags & IMMED != 0 && (tells || id.is_none()) {
        return Err(Sense::illegal(SenseCode::INVALID_FIELD_IN_CDB));
    }
    let descriptors = header.cscds.saturating_add(header.segments);
    if descriptors > MAX_DESCRIPTORS {
        return Err(TOO_SHORT);
    }
    if header.inline > 0 {
        return Err(Sense::illegal(SenseCode::INLINE_DATA_LENGTH_EXCEEDED));
    }
    let body = list.get(header.len..).and_then(|b| b.get(..descriptors)).ok_or(TOO_SHORT)?;
    let (ends, segments) = body.split_at(header.cscds);
    if !ends.len().is_multiple_of(CSCD_LEN) {
        return Err(Sense::parameter(header.cscds_field, None));
    }
    let ends = parse_cscds(ends, header.len)?;
    let segments = parse_segments(segments, header.len + header.cscds)?;
    let (id_field, ends_at) = (header.id_field, header.len as u16);
    Ok(ParameterList { id, id_field, g_sense: tells, cscds: ends, cscds_offset: ends_at, segments })
}

fn lid1_header(list: &[u8]) -> Result<CopyListHeader, Sense> {
    let (header, _) = Lid1Header::ref_from_prefix(list).map_err(|_| TOO_SHORT)?;
    let bytes = |length: U32| usize::try_from(length.get()).unwrap_or(usize::MAX);
    Ok(CopyListHeader {
        id: u32::from(header.id),
        id_field: 0,
        usage: header.usage,
        flags: 0,
        len: size_of::<Lid1Header>(),
        cscds: usize::from(header.cscds_length.get()),
        cscds_field: 2,
        segments: bytes(header.segments_length),
        inline: bytes(header.inline_length),
    })
}

fn lid4_header(list: &[u8]) -> Result<CopyListHeader, Sense> {
    const FORMAT: u8 = 0x01;
    const HEADER_LENGTH: u16 = 0x20;
    const HEADER_TYPE: u8 = 0xff;
    let (header, _) = Lid4Header::ref_from_prefix(list).map_err(|_| TOO_SHORT)?;
    if header.format != FORMAT {
        return Err(Sense::parameter(0, None));
    }
    if header.header_length.get() != HEADER_LENGTH {
        return Err(Sense::parameter(2, None));
    }
    if header.header_type != HEADER_TYPE {
        return Err(Sense::parameter(16, None));
    }
    Ok(CopyListHeader {
        id: header.id.get(),
        id_field: 20,
        usage: header.usage,
        flags: header.flags,
        len: size_of::<Lid4Header>(),
        cscds: usize::from(header.cscds_length.get()),
        cscds_field: 42,
        segments: usize::from(header.segments_length.get()),
        inline: usize::from(header.inline_length.get()),
    })
}

/// LIST ID USAGE: the identifier, if there is one. Discarding of held data does not matter, as none
/// is held.
fn identifier(header: &CopyListHeader) -> Result<Option<u32>, Sense> {
    const RESERVED: u8 = 1;
    const NONE: u8 = 3;
    match header.usage >> 3 & 3 {
        RESERVED => Err(Sense::parameter(1, Some(4))),
        NONE if header.id != 0 => Err(Sense::parameter(header.id_field, None)),
        NONE => Ok(None),
        _ => Ok(Some(header.id)),
    }
}

fn parse_segments(mut list: &[u8], mut at: usize) -> Result<Vec<CopySegment>, Sense> {
    const DC: u8 = 0x02;
    const LENGTH: u16 = SEGMENT_LEN as u16 - 4;
    let mut segments = Vec::with_capacity(list.len() / SEGMENT_LEN);
    while let Some(&kind) = list.first() {
        if segments.len() == MAX_SEGMENTS {
            return Err(Sense::illegal(SenseCode::TOO_MANY_SEGMENT_DESCRIPTORS));
        }
        if kind != BLOCK_TO_BLOCK {
            return Err(Sense::illegal(SenseCode::UNSUPPORTED_SEGMENT_DESCRIPTOR_TYPE));
        }
        let (segment, rest) = SegmentDescriptor::ref_from_prefix(list).map_err(|_| TOO_SHORT)?;
        if segment.length.get() != LENGTH {
            return Err(Sense::parameter(at as u16 + 2, None));
        }
        segments.push(CopySegment {
            source: segment.source.get(),
            destination: segment.destination.get(),
            count: segment.count.get(),
            counts_destination: segment.flags & DC != 0,
            from: Lba(segment.from.get()),
            to: Lba(segment.to.get()),
        });
        (list, at) = (rest, at + SEGMENT_LEN);
    }
    Ok(segments)
}
