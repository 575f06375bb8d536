//! FETCH, DATA, REPAIR, SUM and SUMMED: contents that one asks another for (RFD 0010, 4.3).
//!
//! ```text
//!           id        lba, blocks   status   body
//! FETCH     request   range
//! DATA      request   at, 0         error    contents, unless there is an error
//! REPAIR              range
//! SUM       request   range
//! SUMMED    request   at, 0         error    SHA-256, unless there is an error
//! ```

use block::{Blocks, Bufs, Error};

use super::header::{Fields, Type};
use super::{Bad, Body};
use crate::{Message, View};

/// Length of a digest in bytes.
pub(super) const DIGEST_BYTES: usize = 32;

/// FETCH and SUM; REPAIR with 0 for the request.
pub(super) fn asked(kind: Type, view: View, request: u64, range: Blocks) -> Result<Fields, Bad> {
    Fields::of_view(kind, view).id(request).with_range(range)
}

/// DATA and SUMMED but for their bodies.
pub(super) fn answered(kind: Type, view: View, request: u64, failed: Option<Error>) -> Fields {
    let fields = Fields::of_view(kind, view).id(request);
    failed.map_or(fields, |error| fields.with_error(error))
}

pub(super) fn parse_fetch(fields: &Fields) -> Result<Message, Bad> {
    Ok(Message::Fetch { view: fields.view(), request: fields.id, range: fields.range()? })
}

pub(super) fn parse_repair(fields: &Fields) -> Result<Message, Bad> {
    Ok(Message::Repair { view: fields.view(), range: fields.range()? })
}

pub(super) fn parse_sum(fields: &Fields) -> Result<Message, Bad> {
    Ok(Message::Sum { view: fields.view(), request: fields.id, range: fields.range()? })
}

pub(super) fn parse_data(fields: &Fields, data: Bufs) -> Result<Message, Bad> {
    let result = fields.error()?.map_or(Ok(data), Err);
    Ok(Message::Data { view: fields.view(), request: fields.id, result })
}

pub(super) fn parse_summed(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let result = match fields.error()? {
        Some(error) => Err(error),
        None => Ok(body.try_into().map_err(|_| fields.bad("body"))?),
    };
    Ok(Message::Summed { view: fields.view(), request: fields.id, result })
}

pub(super) fn digest(result: &Result<[u8; DIGEST_BYTES], Error>) -> Body {
    Body::Bytes(result.map_or(Vec::new(), |digest| digest.to_vec()))
}
