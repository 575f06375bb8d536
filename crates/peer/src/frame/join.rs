//! JOIN, ACCEPT and DETACHED: how a replica comes in sync (RFD 0010, 6.6).
//!
//! ```text
//!            epoch     id             second        blocks         body
//! JOIN       adopted   volume bytes   incarnation   region shift   marks, at most 131072 bytes
//! ACCEPT     of view                  incarnation
//! DETACHED                            incarnation
//! ```

use block::Epoch;

use super::header::{Fields, Type};
use crate::{Incarnation, Message, View};

/// JOIN but for its marks.
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

pub(super) fn parse_join(fields: &Fields, marks: Vec<u8>) -> Message {
    Message::Join {
        incarnation: Incarnation(fields.second),
        epoch: Epoch(fields.epoch),
        volume_bytes: fields.id,
        region_shift: fields.blocks,
        marks,
    }
}

pub(super) fn parse_accept(fields: &Fields) -> Message {
    Message::Accept { view: fields.view(), incarnation: Incarnation(fields.second) }
}

pub(super) fn parse_detached(fields: &Fields) -> Message {
    Message::Detached { incarnation: Incarnation(fields.second) }
}
