//! FLUSH, FLUSHED, CLEAR and MARKED: what is durable, and which marks may go (RFD 0010, 4.4, 6.3
//! and 6.6).
//!
//! ```text
//!           id        blocks   body
//! FLUSH     request
//! FLUSHED   request
//! CLEAR     request   count    regions of 16 bytes, at most 8192: first byte (8), bytes (8)
//! MARKED              count    the same
//! ```

use super::header::{Fields, Type};
use super::{Bad, list};
use crate::{Message, View};

/// CLEAR but for its regions.
pub(super) fn clear(view: View, request: u64, regions: usize) -> Fields {
    Fields::of_view(Type::Clear, view).id(request).count(regions)
}

/// MARKED but for its regions.
pub(super) fn marked(view: View, regions: usize) -> Fields {
    Fields::of_view(Type::Marked, view).count(regions)
}

pub(super) fn parse_marked(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    Ok(Message::Marked { view: fields.view(), regions: list::parse_regions(fields, body)? })
}

pub(super) fn parse_clear(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let regions = list::parse_regions(fields, body)?;
    Ok(Message::Clear { view: fields.view(), request: fields.id, regions })
}
