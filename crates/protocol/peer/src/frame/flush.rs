//! Flush, Flushed, ClearRegions and IdleDirtyRegions: what is durable, and which dirty bits may be
//! cleared (RFD 0010, 4.4, 6.3 and 6.6); and PeerUnreachable: which member cannot be asked to
//! flush.
//!
//! ```text
//!                    id       blocks      node    body
//! Flush              request  generation
//! Flushed            request
//! ClearRegions       request  count               regions of 16 bytes, at most 8192: first byte
//!                                                 (8), bytes (8)
//! IdleDirtyRegions            count               the same
//! PeerUnreachable                         member
//! ```

use super::header::{FrameType, HeaderFields};
use super::{FrameError, list};
use crate::{Message, NodeId, View};

pub(super) fn flush(view: View, request: u64, generation: u32) -> HeaderFields {
    HeaderFields {
        blocks: generation,
        ..HeaderFields::with_view(FrameType::Flush, view).with_id(request)
    }
}

pub(super) fn parse_flush(fields: &HeaderFields) -> Message {
    Message::Flush { view: fields.view(), request: fields.id, generation: fields.blocks }
}

/// The header fields of ClearRegions.
pub(super) fn clear_regions(view: View, request: u64, regions: usize) -> HeaderFields {
    HeaderFields::with_view(FrameType::ClearRegions, view).with_id(request).with_count(regions)
}

/// The header fields of IdleDirtyRegions.
pub(super) fn idle_dirty_regions(view: View, regions: usize) -> HeaderFields {
    HeaderFields::with_view(FrameType::IdleDirtyRegions, view).with_count(regions)
}

pub(super) fn peer_unreachable(view: View, node: NodeId) -> HeaderFields {
    HeaderFields { node: node.0, ..HeaderFields::with_view(FrameType::PeerUnreachable, view) }
}

pub(super) fn parse_peer_unreachable(fields: &HeaderFields) -> Message {
    Message::PeerUnreachable { view: fields.view(), node: NodeId(fields.node) }
}

pub(super) fn parse_idle_dirty_regions(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    Ok(Message::IdleDirtyRegions {
        view: fields.view(),
        regions: list::parse_regions(fields, body)?,
    })
}

pub(super) fn parse_clear_regions(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let regions = list::parse_regions(fields, body)?;
    Ok(Message::ClearRegions { view: fields.view(), request: fields.id, regions })
}
