//! START, STARTED, OPEN and REJOIN: how a view begins (RFD 0010, 5.7).
//!
//! ```text
//!           id        blocks    body
//! START                         the record of the epoch, at most 4096 bytes
//! STARTED             count     entries of 48 bytes, at most 4096: epoch, seq, number, lba (8 bytes
//!                               each), round, blocks (4), node (2), flags (1), reserved (5)
//! OPEN      through   count     tags of 16 bytes, at most 16384: number (8), node (2), reserved (6)
//! REJOIN
//! ```

use super::header::{Fields, Type};
use super::{Bad, list};
use crate::{Message, Seq, View};

pub(super) fn start(view: View) -> Fields {
    Fields::of_view(Type::Start, view)
}

pub(super) fn started(view: View, entries: usize) -> Fields {
    Fields::of_view(Type::Started, view).count(entries)
}

pub(super) fn open(view: View, through: Seq, tags: usize) -> Fields {
    Fields::of_view(Type::Open, view).id(through.0).count(tags)
}

pub(super) fn rejoin(view: View) -> Fields {
    Fields::of_view(Type::Rejoin, view)
}

pub(super) fn parse_start(fields: &Fields, record: Vec<u8>) -> Message {
    Message::Start { view: fields.view(), record }
}

pub(super) fn parse_started(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let entries = list::parse_entries(fields, body)?;
    Ok(Message::Started { view: fields.view(), entries })
}

pub(super) fn parse_open(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let settled = list::parse_tags(fields, body)?;
    Ok(Message::Open { view: fields.view(), through: Seq(fields.id), settled })
}

pub(super) fn parse_rejoin(fields: &Fields) -> Message {
    Message::Rejoin { view: fields.view() }
}
