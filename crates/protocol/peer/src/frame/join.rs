//! Join, JoinAccepted and JoinAborted: how a replica comes in sync (RFD 0010, 6.6).
//!
//! ```text
//!                epoch    id            second       blocks        body
//! Join           adopted  volume bytes  incarnation  region shift  generations (24, as in
//!                                                                  ReplicaReport), then dirty
//!                                                                  bits (at most 131072)
//! JoinAccepted   of view                incarnation  count         generations with other images:
//!                                                                  image (16), epoch (8),
//!                                                                  count (4), reserved (4)
//! JoinAborted                           incarnation
//! ```

use block::Epoch;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{FrameType, HeaderFields};
use super::lease::WirePeerGenerations;
use super::{FrameBody, FrameError, list};
use crate::{DataGeneration, Incarnation, Message, PeerGenerations, View};

/// The last generation recorded with an image, as it is sent.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireImageGeneration {
    image: [u8; 16],
    epoch: U64,
    count: U32,
    reserved: [u8; 4],
}

/// Length of an item in JoinAccepted.
pub(super) const IMAGE_GENERATION_BYTES: usize = size_of::<WireImageGeneration>();
const _: () = assert!(IMAGE_GENERATION_BYTES == 32);

/// The header fields of Join.
pub(super) fn join(
    incarnation: Incarnation,
    epoch: Epoch,
    volume_bytes: u64,
    region_shift: u32,
) -> HeaderFields {
    let fields = HeaderFields::with_epoch(FrameType::Join, epoch)
        .with_id(volume_bytes)
        .with_second(incarnation.0);
    HeaderFields { blocks: region_shift, ..fields }
}

/// The header fields of JoinAccepted.
pub(super) fn join_accepted(
    view: View,
    incarnation: Incarnation,
    generations: usize,
) -> HeaderFields {
    HeaderFields::with_view(FrameType::JoinAccepted, view)
        .with_second(incarnation.0)
        .with_count(generations)
}

/// The body of JoinAccepted.
pub(super) fn join_accepted_body(generations: &[(Uuid, DataGeneration)]) -> FrameBody {
    let to_wire = |(image, generation): &(Uuid, DataGeneration)| WireImageGeneration {
        image: image.into_bytes(),
        epoch: U64::new(generation.epoch.0),
        count: U32::new(generation.count),
        reserved: [0; 4],
    };
    list::body(&generations.iter().map(to_wire).collect::<Vec<_>>())
}

pub(super) fn join_aborted(incarnation: Incarnation) -> HeaderFields {
    HeaderFields::new(FrameType::JoinAborted).with_second(incarnation.0)
}

/// The body of Join.
pub(super) fn join_body(generations: &PeerGenerations, dirty_bits: &[u8]) -> FrameBody {
    FrameBody::Bytes([WirePeerGenerations::from(generations).as_bytes(), dirty_bits].concat())
}

pub(super) fn parse_join(fields: &HeaderFields, body: &[u8]) -> Result<Message, FrameError> {
    let (generations, dirty_bits) =
        WirePeerGenerations::read_from_prefix(body).map_err(|_| fields.invalid("lineages"))?;
    Ok(Message::Join {
        incarnation: Incarnation(fields.second),
        epoch: Epoch(fields.epoch),
        volume_bytes: fields.id,
        region_shift: fields.blocks,
        generations: generations.into(),
        dirty_bits: dirty_bits.to_vec(),
    })
}

pub(super) fn parse_join_accepted(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let from_wire = |wire: &WireImageGeneration| {
        let generation = DataGeneration { epoch: Epoch(wire.epoch.get()), count: wire.count.get() };
        let is_clean = wire.reserved == [0; 4];
        is_clean
            .then_some((Uuid::from_bytes(wire.image), generation))
            .ok_or(FrameError::ReservedNotZero(fields.kind))
    };
    let generations =
        list::items(fields, body)?.iter().map(from_wire).collect::<Result<_, FrameError>>()?;
    let (view, incarnation) = (fields.view(), Incarnation(fields.second));
    Ok(Message::JoinAccepted { view, incarnation, generations })
}

pub(super) fn parse_join_aborted(fields: &HeaderFields) -> Message {
    Message::JoinAborted { incarnation: Incarnation(fields.second) }
}
