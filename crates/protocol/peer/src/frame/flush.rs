//! FLUSH, FLUSHED, CLEAR and MARKED: what is durable, and which marks may go (RFD 0010, 4.4, 6.3
//! and 6.6); and UNREACHABLE: who cannot be asked to flush.
//!
//! ```text
//!               id        blocks   node     body
//! FLUSH         request   lineage
//! FLUSHED       request
//! CLEAR         request   count             regions of 16 bytes, at most 8192: first byte (8), bytes (8)
//! MARKED                  count             the same
//! UNREACHABLE                      member
//! ```

use super::header::{Fields, Type};
use super::{Bad, list};
use crate::{Message, NodeId, View};

pub(super) fn flush(view: View, request: u64, lineage: u32) -> Fields {
    Fields { blocks: lineage, ..Fields::of_view(Type::Flush, view).id(request) }
}

pub(super) fn parse_flush(fields: &Fields) -> Message {
    Message::Flush { view: fields.view(), request: fields.id, lineage: fields.blocks }
}

/// CLEAR but for its regions.
pub(super) fn clear(view: View, request: u64, regions: usize) -> Fields {
    Fields::of_view(Type::Clear, view).id(request).count(regions)
}

/// MARKED but for its regions.
pub(super) fn marked(view: View, regions: usize) -> Fields {
    Fields::of_view(Type::Marked, view).count(regions)
}

pub(super) fn unreachable(view: View, node: NodeId) -> Fields {
    Fields { node: node.0, ..Fields::of_view(Type::Unreachable, view) }
}

pub(super) fn parse_unreachable(fields: &Fields) -> Message {
    Message::Unreachable { view: fields.view(), node: NodeId(fields.node) }
}

pub(super) fn parse_marked(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    Ok(Message::Marked { view: fields.view(), regions: list::parse_regions(fields, body)? })
}

pub(super) fn parse_clear(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let regions = list::parse_regions(fields, body)?;
    Ok(Message::Clear { view: fields.view(), request: fields.id, regions })
}
