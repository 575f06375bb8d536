//! StartViewChange, DoViewChange, StartView and Rejoin: how a view begins (RFD 0010, 5.7).
//!
//! ```text
//!                  id        blocks  body
//! StartViewChange                    the configuration of the epoch, at most 4096 bytes
//! DoViewChange               count   entries of 48 bytes, at most 4096: epoch, seq, number, lba
//!                                    (8 bytes each), round, blocks (4), node (2), flags (1),
//!                                    reserved (5)
//! StartView        last seq  count   write ids of 16 bytes, at most 16384: number (8), node (2),
//!                                    reserved (6)
//! Rejoin
//! ```

use super::header::{FrameType, HeaderFields};
use super::{FrameError, list};
use crate::{Message, Seq, View};

pub(super) fn start_view_change(view: View) -> HeaderFields {
    HeaderFields::with_view(FrameType::StartViewChange, view)
}

pub(super) fn do_view_change(view: View, entries: usize) -> HeaderFields {
    HeaderFields::with_view(FrameType::DoViewChange, view).with_count(entries)
}

pub(super) fn start_view(view: View, last_seq: Seq, write_ids: usize) -> HeaderFields {
    HeaderFields::with_view(FrameType::StartView, view).with_id(last_seq.0).with_count(write_ids)
}

pub(super) fn rejoin(view: View) -> HeaderFields {
    HeaderFields::with_view(FrameType::Rejoin, view)
}

pub(super) fn parse_start_view_change(fields: &HeaderFields, config: Vec<u8>) -> Message {
    Message::StartViewChange { view: fields.view(), config }
}

pub(super) fn parse_do_view_change(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let entries = list::parse_entries(fields, body)?;
    Ok(Message::DoViewChange { view: fields.view(), entries })
}

pub(super) fn parse_start_view(fields: &HeaderFields, body: &[u8]) -> Result<Message, FrameError> {
    let committed = list::parse_write_ids(fields, body)?;
    Ok(Message::StartView { view: fields.view(), last_seq: Seq(fields.id), committed })
}

pub(super) fn parse_rejoin(fields: &HeaderFields) -> Message {
    Message::Rejoin { view: fields.view() }
}
