//! ORDER, GRANT, DONE, LATE, WRITE, APPLIED, COMMIT, WANT, FORWARD and OUTCOME: the way of a write
//! (RFD 0010, 4.2 and 4.5). NOSPACE, ASSESS and ASSESSED: a write that a member has no space for (RFD 0040).
//!
//! ```text
//!           id       second   lba, blocks   node     flags                    body
//! ORDER     number   stamp    range                  fua, unmap, zero         data, unless zero
//! GRANT     number   seq
//! DONE      number
//! LATE      number
//! WRITE     seq      number   range         of tag   fua, unmap, zero, copy   data, unless zero
//! APPLIED   seq
//! COMMIT                      0, count                                        places, 8 bytes each
//! WANT      seq
//! NOSPACE   seq
//! ASSESS    request  seq
//! ASSESSED  request  free     at, count              (error)                  ranges of 16 bytes: first block (8),
//!                                                                             blocks (8); none if there is an error
//! FORWARD   number   stamp    range                  fua                      compare, then write
//! OUTCOME   number   offset   at, 0                                           (status; offset of a
//!                                                                             miscompare)
//! ```

use block::{Bufs, Error};

use super::header::{COPY, FUA, Fields, Status, Type};
use super::{Bad, list};
use crate::{Change, Message, NodeId, Outcome, Seq, Stamp, Tag, View};

/// ORDER but for its data.
pub(super) fn order(view: View, number: u64, stamp: Stamp, change: &Change) -> Result<Fields, Bad> {
    changed(Fields::of_view(Type::Order, view).id(number).second(stamp.0), change)
}

/// WRITE but for its data.
pub(super) fn write(
    view: View,
    seq: Seq,
    tag: Tag,
    copy: bool,
    change: &Change,
) -> Result<Fields, Bad> {
    let fields = Fields::of_view(Type::Write, view).id(seq.0).second(tag.number);
    changed(Fields { node: tag.node.0, ..fields }.with_flag(COPY, copy), change)
}

fn changed(fields: Fields, change: &Change) -> Result<Fields, Bad> {
    fields.with_kind(change.kind).with_flag(FUA, change.fua).with_range(change.range)
}

fn change(fields: &Fields, data: Bufs) -> Result<Change, Bad> {
    let range = fields.range()?;
    Ok(Change { range, kind: fields.change_kind(), fua: fields.has(FUA), data })
}

/// GRANT.
pub(super) fn grant(view: View, number: u64, seq: Seq) -> Fields {
    Fields::of_view(Type::Grant, view).id(number).second(seq.0)
}

/// DONE, LATE, APPLIED, NOSPACE and WANT, which are a number of a view.
pub(super) fn numbered(kind: Type, view: View, id: u64) -> Fields {
    Fields::of_view(kind, view).id(id)
}

/// COMMIT but for its places.
pub(super) fn commit(view: View, seqs: usize) -> Fields {
    Fields::of_view(Type::Commit, view).count(seqs)
}

/// ASSESS.
pub(super) fn assess(view: View, request: u64, seq: Seq) -> Fields {
    Fields::of_view(Type::Assess, view).id(request).second(seq.0)
}

/// ASSESSED but for its ranges.
pub(super) fn assessed(
    view: View,
    request: u64,
    free_bytes: u64,
    zeroes: &Result<Vec<(u64, u64)>, Error>,
) -> Fields {
    let fields = Fields::of_view(Type::Assessed, view).id(request).second(free_bytes);
    match zeroes {
        Ok(zeroes) => fields.count(zeroes.len()),
        Err(error) => fields.with_error(*error),
    }
}

/// FORWARD but for its data.
pub(super) fn forward(
    view: View,
    number: u64,
    stamp: Stamp,
    range: block::Blocks,
    fua: bool,
) -> Result<Fields, Bad> {
    let fields = Fields::of_view(Type::Forward, view).id(number).second(stamp.0);
    fields.with_flag(FUA, fua).with_range(range)
}

/// OUTCOME.
pub(super) fn outcome(view: View, number: u64, outcome: Outcome) -> Fields {
    let fields = Fields::of_view(Type::Outcome, view).id(number);
    match outcome {
        Outcome::Done => fields,
        Outcome::Miscompare { offset } => {
            Fields { status: Status::Miscompare.0, ..fields }.second(offset)
        }
        Outcome::Failed(error) => fields.with_error(error),
    }
}

pub(super) fn parse_order(fields: &Fields, data: Bufs) -> Result<Message, Bad> {
    Ok(Message::Order {
        view: fields.view(),
        number: fields.id,
        stamp: Stamp(fields.second),
        change: change(fields, data)?,
    })
}

pub(super) fn parse_write(fields: &Fields, data: Bufs) -> Result<Message, Bad> {
    Ok(Message::Write {
        view: fields.view(),
        seq: Seq(fields.id),
        tag: Tag { node: NodeId(fields.node), number: fields.second },
        copy: fields.has(COPY),
        change: change(fields, data)?,
    })
}

pub(super) fn parse_grant(fields: &Fields) -> Message {
    Message::Grant { view: fields.view(), number: fields.id, seq: Seq(fields.second) }
}

pub(super) fn parse_commit(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let seqs = list::parse_seqs(fields, body)?;
    Ok(Message::Commit { view: fields.view(), seqs })
}

pub(super) fn parse_assess(fields: &Fields) -> Message {
    Message::Assess { view: fields.view(), request: fields.id, seq: Seq(fields.second) }
}

pub(super) fn parse_assessed(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let zeroes = match fields.error()? {
        Some(error) => Err(error),
        None => Ok(list::parse_regions(fields, body)?),
    };
    let (view, request, free_bytes) = (fields.view(), fields.id, fields.second);
    Ok(Message::Assessed { view, request, free_bytes, zeroes })
}

pub(super) fn parse_forward(fields: &Fields, data: Bufs) -> Result<Message, Bad> {
    Ok(Message::Forward {
        view: fields.view(),
        number: fields.id,
        stamp: Stamp(fields.second),
        range: fields.range()?,
        fua: fields.has(FUA),
        data,
    })
}

pub(super) fn parse_outcome(fields: &Fields) -> Result<Message, Bad> {
    let outcome = if fields.status == Status::Miscompare.0 {
        Outcome::Miscompare { offset: fields.second }
    } else {
        fields.error()?.map_or(Outcome::Done, |error: Error| Outcome::Failed(error))
    };
    Ok(Message::Outcome { view: fields.view(), number: fields.id, outcome })
}
