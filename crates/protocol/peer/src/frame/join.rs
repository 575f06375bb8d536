//! JOIN, ACCEPT and DETACHED: how a replica comes in sync (RFD 0010, 6.6).
//!
//! ```text
//!            epoch     id             second        blocks         body
//! JOIN       adopted   volume bytes   incarnation   region shift   lineages (24, as in STANDING), then
//!                                                                  marks, at most 131072 bytes
//! ACCEPT     of view                  incarnation   count          what was reached with other images:
//!                                                                  image (16), epoch (8), count (4),
//!                                                                  reserved (4)
//! DETACHED                            incarnation
//! ```

use block::Epoch;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{Fields, Type};
use super::lease::SentShared;
use super::{Bad, Body, list};
use crate::{Incarnation, Lineage, Message, SharedLineage, View};

/// What the primary has reached together with an image, as it is sent.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SentReached {
    image: [u8; 16],
    epoch: U64,
    count: U32,
    reserved: [u8; 4],
}

/// Length of an image's lineage in ACCEPT.
pub(super) const REACHED_BYTES: usize = size_of::<SentReached>();
const _: () = assert!(REACHED_BYTES == 32);

/// JOIN but for its body.
pub(super) fn join(
    incarnation: Incarnation,
    epoch: Epoch,
    volume_bytes: u64,
    region_shift: u32,
) -> Fields {
    let fields = Fields::of_epoch(Type::Join, epoch).id(volume_bytes).second(incarnation.0);
    Fields { blocks: region_shift, ..fields }
}

/// ACCEPT but for its body.
pub(super) fn accept(view: View, incarnation: Incarnation, reached: usize) -> Fields {
    Fields::of_view(Type::Accept, view).second(incarnation.0).count(reached)
}

/// The body of ACCEPT.
pub(super) fn accept_body(reached: &[(Uuid, Lineage)]) -> Body {
    let send = |(image, lineage): &(Uuid, Lineage)| SentReached {
        image: image.into_bytes(),
        epoch: U64::new(lineage.epoch.0),
        count: U32::new(lineage.count),
        reserved: [0; 4],
    };
    list::body(&reached.iter().map(send).collect::<Vec<_>>())
}

pub(super) fn detached(incarnation: Incarnation) -> Fields {
    Fields::new(Type::Detached).second(incarnation.0)
}

/// The body of JOIN.
pub(super) fn join_body(shared: &SharedLineage, marks: &[u8]) -> Body {
    Body::Bytes([SentShared::from(shared).as_bytes(), marks].concat())
}

pub(super) fn parse_join(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let (shared, marks) = SentShared::read_from_prefix(body).map_err(|_| fields.bad("lineages"))?;
    Ok(Message::Join {
        incarnation: Incarnation(fields.second),
        epoch: Epoch(fields.epoch),
        volume_bytes: fields.id,
        region_shift: fields.blocks,
        shared: shared.into(),
        marks: marks.to_vec(),
    })
}

pub(super) fn parse_accept(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let read = |sent: &SentReached| {
        let lineage = Lineage { epoch: Epoch(sent.epoch.get()), count: sent.count.get() };
        let clean = sent.reserved == [0; 4];
        clean.then_some((Uuid::from_bytes(sent.image), lineage)).ok_or(Bad::Reserved(fields.kind))
    };
    let reached = list::items(fields, body)?.iter().map(read).collect::<Result<_, Bad>>()?;
    let (view, incarnation) = (fields.view(), Incarnation(fields.second));
    Ok(Message::Accept { view, incarnation, reached })
}

pub(super) fn parse_detached(fields: &Fields) -> Message {
    Message::Detached { incarnation: Incarnation(fields.second) }
}
