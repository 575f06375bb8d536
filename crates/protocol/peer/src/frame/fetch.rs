//! Fetch, FetchResult, RepairRange, Digest and DigestResult: reading from peers (RFD 0010, 4.3).
//!
//! ```text
//!                id        lba, blocks   status   body
//! Fetch          request   range
//! FetchResult    request   at, 0         error    contents, unless there is an error
//! RepairRange              range
//! Digest         request   range
//! DigestResult   request   at, 0         error    SHA-256, unless there is an error
//! ```

use block::{Blocks, Bufs, Error};

use super::header::{FrameType, HeaderFields};
use super::{FrameBody, FrameError};
use crate::{Message, View};

/// Length of a digest in bytes.
pub(super) const DIGEST_BYTES: usize = 32;

/// Fetch and Digest; RepairRange with request 0.
pub(super) fn range_request(
    kind: FrameType,
    view: View,
    request: u64,
    range: Blocks,
) -> Result<HeaderFields, FrameError> {
    HeaderFields::with_view(kind, view).with_id(request).with_range(range)
}

/// The header fields of FetchResult and DigestResult.
pub(super) fn range_result(
    kind: FrameType,
    view: View,
    request: u64,
    error: Option<Error>,
) -> HeaderFields {
    let fields = HeaderFields::with_view(kind, view).with_id(request);
    error.map_or(fields, |error| fields.with_error(error))
}

pub(super) fn parse_fetch(fields: &HeaderFields) -> Result<Message, FrameError> {
    Ok(Message::Fetch { view: fields.view(), request: fields.id, range: fields.range()? })
}

pub(super) fn parse_repair(fields: &HeaderFields) -> Result<Message, FrameError> {
    Ok(Message::RepairRange { view: fields.view(), range: fields.range()? })
}

pub(super) fn parse_digest(fields: &HeaderFields) -> Result<Message, FrameError> {
    Ok(Message::Digest { view: fields.view(), request: fields.id, range: fields.range()? })
}

pub(super) fn parse_fetch_result(fields: &HeaderFields, data: Bufs) -> Result<Message, FrameError> {
    let result = fields.error()?.map_or(Ok(data), Err);
    Ok(Message::FetchResult { view: fields.view(), request: fields.id, result })
}

pub(super) fn parse_digest_result(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let result = match fields.error()? {
        Some(error) => Err(error),
        None => Ok(body.try_into().map_err(|_| fields.invalid("body"))?),
    };
    Ok(Message::DigestResult { view: fields.view(), request: fields.id, result })
}

pub(super) fn digest_body(result: &Result<[u8; DIGEST_BYTES], Error>) -> FrameBody {
    FrameBody::Bytes(result.map_or(Vec::new(), |digest| digest.to_vec()))
}
