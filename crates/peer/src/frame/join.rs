//! JOIN, ACCEPT and DETACHED: how a replica comes in sync (RFD 0010, 6.6).
//!
//! ```text
//!            epoch     id             second        blocks         body
//! JOIN       adopted   volume bytes   incarnation   region shift   lineages (24, as in STANDING), then
//!                                                                  marks, at most 131072 bytes
//! ACCEPT     of view                  incarnation
//! DETACHED                            incarnation
//! ```

use block::Epoch;

use zerocopy::{FromBytes, IntoBytes};

use super::header::{Fields, Type};
use super::lease::SentShared;
use super::{Bad, Body};
use crate::{Incarnation, Message, SharedLineage, View};

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

pub(super) fn accept(view: View, incarnation: Incarnation) -> Fields {
    Fields::of_view(Type::Accept, view).second(incarnation.0)
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

pub(super) fn parse_accept(fields: &Fields) -> Message {
    Message::Accept { view: fields.view(), incarnation: Incarnation(fields.second) }
}

pub(super) fn parse_detached(fields: &Fields) -> Message {
    Message::Detached { incarnation: Incarnation(fields.second) }
}
