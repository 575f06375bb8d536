//! WriteRequest, OpAssigned, PeersApplied, RetryRequest, Write, Applied, Commit, RequestCommit,
//! CompareAndWrite and CompareAndWriteResult: the messages of a write (RFD 0010, 4.2 and 4.5).
//! NoSpace, NoSpaceQuery and NoSpaceReport: a write for which a member has no space (RFD 0040).
//!
//! ```text
//!                  id       second  lba, blocks  node    flags                   body
//! WriteRequest     number   stamp   range                fua, unmap, zero        data, unless zero
//! OpAssigned       number   seq
//! PeersApplied     number
//! RetryRequest     number
//! Write            seq      number  range        origin  fua, unmap, zero, copy  data, unless zero
//! Applied          seq
//! Commit                            0, count                                     seqs (8 each)
//! RequestCommit    seq
//! NoSpace          seq
//! NoSpaceQuery     request  seq
//! NoSpaceReport    request  free    at, count            (error)                 ranges (16 each):
//!                                                                                first block (8),
//!                                                                                blocks (8); none
//!                                                                                if error
//! CompareAndWrite  number   stamp   range                fua                     compare, write
//! CompareAndWriteResult
//!                  number   offset  at, 0                (status; offset of a miscompare)
//! ```

use block::{Bufs, Error};

use super::header::{FLAG_COPY, FLAG_FUA, FrameType, HeaderFields, WireStatus};
use super::{FrameError, list};
use crate::{ClockStamp, CompareAndWriteOutcome, Message, NodeId, Seq, View, WriteId, WriteOp};

/// The header fields of WriteRequest.
pub(super) fn write_request(
    view: View,
    number: u64,
    stamp: ClockStamp,
    op: &WriteOp,
) -> Result<HeaderFields, FrameError> {
    with_op(
        HeaderFields::with_view(FrameType::WriteRequest, view).with_id(number).with_second(stamp.0),
        op,
    )
}

/// The header fields of Write.
pub(super) fn write(
    view: View,
    seq: Seq,
    write_id: WriteId,
    is_copy: bool,
    op: &WriteOp,
) -> Result<HeaderFields, FrameError> {
    let fields =
        HeaderFields::with_view(FrameType::Write, view).with_id(seq.0).with_second(write_id.number);
    with_op(HeaderFields { node: write_id.origin.0, ..fields }.with_flag(FLAG_COPY, is_copy), op)
}

fn with_op(fields: HeaderFields, op: &WriteOp) -> Result<HeaderFields, FrameError> {
    fields.with_kind(op.kind).with_flag(FLAG_FUA, op.fua).with_range(op.range)
}

fn parse_op(fields: &HeaderFields, data: Bufs) -> Result<WriteOp, FrameError> {
    let range = fields.range()?;
    Ok(WriteOp { range, kind: fields.write_kind(), fua: fields.has_flag(FLAG_FUA), data })
}

/// OpAssigned.
pub(super) fn op_assigned(view: View, number: u64, seq: Seq) -> HeaderFields {
    HeaderFields::with_view(FrameType::OpAssigned, view).with_id(number).with_second(seq.0)
}

/// PeersApplied, RetryRequest, Applied, NoSpace and RequestCommit, which carry one number of a
/// view.
pub(super) fn number_message(kind: FrameType, view: View, id: u64) -> HeaderFields {
    HeaderFields::with_view(kind, view).with_id(id)
}

/// The header fields of Commit.
pub(super) fn commit(view: View, seqs: usize) -> HeaderFields {
    HeaderFields::with_view(FrameType::Commit, view).with_count(seqs)
}

/// NoSpaceQuery.
pub(super) fn no_space_query(view: View, request: u64, seq: Seq) -> HeaderFields {
    HeaderFields::with_view(FrameType::NoSpaceQuery, view).with_id(request).with_second(seq.0)
}

/// The header fields of NoSpaceReport.
pub(super) fn no_space_report(
    view: View,
    request: u64,
    free_bytes: u64,
    zero_blocks: &Result<Vec<(u64, u64)>, Error>,
) -> HeaderFields {
    let fields = HeaderFields::with_view(FrameType::NoSpaceReport, view)
        .with_id(request)
        .with_second(free_bytes);
    match zero_blocks {
        Ok(zero_blocks) => fields.with_count(zero_blocks.len()),
        Err(error) => fields.with_error(*error),
    }
}

/// The header fields of CompareAndWrite.
pub(super) fn compare_and_write(
    view: View,
    number: u64,
    stamp: ClockStamp,
    range: block::Blocks,
    fua: bool,
) -> Result<HeaderFields, FrameError> {
    let fields = HeaderFields::with_view(FrameType::CompareAndWrite, view)
        .with_id(number)
        .with_second(stamp.0);
    fields.with_flag(FLAG_FUA, fua).with_range(range)
}

/// CompareAndWriteResult.
pub(super) fn compare_and_write_result(
    view: View,
    number: u64,
    outcome: CompareAndWriteOutcome,
) -> HeaderFields {
    let fields = HeaderFields::with_view(FrameType::CompareAndWriteResult, view).with_id(number);
    match outcome {
        CompareAndWriteOutcome::Done => fields,
        CompareAndWriteOutcome::Miscompare { offset } => {
            HeaderFields { status: WireStatus::Miscompare.0, ..fields }.with_second(offset)
        }
        CompareAndWriteOutcome::Failed(error) => fields.with_error(error),
    }
}

pub(super) fn parse_write_request(
    fields: &HeaderFields,
    data: Bufs,
) -> Result<Message, FrameError> {
    Ok(Message::WriteRequest {
        view: fields.view(),
        number: fields.id,
        stamp: ClockStamp(fields.second),
        op: parse_op(fields, data)?,
    })
}

pub(super) fn parse_write(fields: &HeaderFields, data: Bufs) -> Result<Message, FrameError> {
    Ok(Message::Write {
        view: fields.view(),
        seq: Seq(fields.id),
        write_id: WriteId { origin: NodeId(fields.node), number: fields.second },
        is_copy: fields.has_flag(FLAG_COPY),
        op: parse_op(fields, data)?,
    })
}

pub(super) fn parse_op_assigned(fields: &HeaderFields) -> Message {
    Message::OpAssigned { view: fields.view(), number: fields.id, seq: Seq(fields.second) }
}

pub(super) fn parse_commit(fields: &HeaderFields, body: &[u8]) -> Result<Message, FrameError> {
    let seqs = list::parse_seqs(fields, body)?;
    Ok(Message::Commit { view: fields.view(), seqs })
}

pub(super) fn parse_no_space_query(fields: &HeaderFields) -> Message {
    Message::NoSpaceQuery { view: fields.view(), request: fields.id, seq: Seq(fields.second) }
}

pub(super) fn parse_no_space_report(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let zero_blocks = match fields.error()? {
        Some(error) => Err(error),
        None => Ok(list::parse_regions(fields, body)?),
    };
    let (view, request, free_bytes) = (fields.view(), fields.id, fields.second);
    Ok(Message::NoSpaceReport { view, request, free_bytes, zero_blocks })
}

pub(super) fn parse_compare_and_write(
    fields: &HeaderFields,
    data: Bufs,
) -> Result<Message, FrameError> {
    Ok(Message::CompareAndWrite {
        view: fields.view(),
        number: fields.id,
        stamp: ClockStamp(fields.second),
        range: fields.range()?,
        fua: fields.has_flag(FLAG_FUA),
        data,
    })
}

pub(super) fn parse_compare_and_write_result(fields: &HeaderFields) -> Result<Message, FrameError> {
    let outcome = if fields.status == WireStatus::Miscompare.0 {
        CompareAndWriteOutcome::Miscompare { offset: fields.second }
    } else {
        fields.error()?.map_or(CompareAndWriteOutcome::Done, |error: Error| {
            CompareAndWriteOutcome::Failed(error)
        })
    };
    Ok(Message::CompareAndWriteResult { view: fields.view(), number: fields.id, outcome })
}
