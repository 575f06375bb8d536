//! Executes offloaded transfers: tokens that represent blocks of a volume as they are when the
//! token is created, and writes from tokens (RFD 0018).

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Blocks, Bufs, Lba, Request, RequestError};
use scsi::{
    CopyIoError, PresentedToken, RodToken, Side, TokenFault, TokenPlan, TokenRequest, TokenResult,
};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::catalog::VolumeId;
use crate::principal::{Principal, SessionEnded, VolumeLocation};
use crate::server::Server;
use crate::third_party_copy::{
    self, COPY_CHUNK_BYTES, CancelToken, CopyError, check_access, submit_local,
};
use crate::tokens::TokenEntry;

/// Most zeroes written by one request, in bytes: they need no memory.
const MAX_ZEROES_BYTES: u64 = 16 << 20;

/// Why a token operation has stopped.
#[derive(Clone, Copy, Debug)]
enum TokenStop {
    Aborted,
    Fault(TokenFault),
    Failed(Side, CopyIoError),
}

impl TokenStop {
    fn of(side: Side, refused: CopyError) -> Self {
        match (refused, side) {
            (CopyError::Aborted, _) => Self::Aborted,
            (CopyError::Io(error), side) => Self::Failed(side, error),
            // If its creator may no longer read the volume, the token is unknown.
            (CopyError::NotFound, Side::Source) => Self::Fault(TokenFault::Unknown),
            (CopyError::NotFound, Side::Destination) => {
                Self::Failed(side, CopyIoError::Volume(RequestError::Device(block::Error::Gone)))
            }
        }
    }
}

impl From<TokenStop> for TokenResult {
    fn from(stop: TokenStop) -> Self {
        match stop {
            TokenStop::Aborted => Self::Aborted,
            TokenStop::Fault(fault) => Self::Invalid(fault),
            TokenStop::Failed(side, error) => Self::Failed(side, error),
        }
    }
}

/// Executes `plan` for `principal`, who sent it to the unit of `commanded`. Ends soon after an
/// abort; requests started by then have ended when this does.
pub(crate) async fn run_token(
    server: Rc<Server>,
    (principal, session): (Principal, SessionEnded),
    commanded: VolumeId,
    plan: TokenPlan,
) -> TokenResult {
    let handle = plan.handle();
    let work = |cancel| async {
        let principal = Arc::new(principal);
        let Some(location) = principal.find(&server.catalog(), |id| id == commanded) else {
            return TokenStop::of(Side::Destination, CopyError::NotFound).into();
        };
        let job = TokenJob { server, principal, location, cancel };
        let done = match plan.request() {
            TokenRequest::Populate { ranges, inactivity_s } => {
                let inactivity = Duration::from_secs(u64::from(*inactivity_s));
                job.populate(ranges, inactivity).await.map(TokenResult::Created)
            }
            TokenRequest::Write { token, offset, ranges, delete_token } => {
                let write = TokenWrite { token, offset: *offset, ranges };
                job.write(&plan, &write, *delete_token).await.map(|()| TokenResult::Written)
            }
        };
        done.unwrap_or_else(TokenResult::from)
    };
    third_party_copy::with_cancel_token(&handle, session, work).await
}

struct TokenJob {
    server: Rc<Server>,
    principal: Arc<Principal>,
    /// The unit that received the command.
    location: VolumeLocation,
    cancel: CancelToken,
}

/// A write from a token.
struct TokenWrite<'a> {
    token: &'a PresentedToken,
    offset: u64,
    ranges: &'a [Blocks],
}

/// The source of a token's data.
struct TokenSource {
    token: RodToken,
    core: usize,
    ranges: Vec<Blocks>,
}

/// A part of a write, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WriteChunk {
    /// Where it is read; `None` for zeroes.
    from: Option<Lba>,
    to: Lba,
    count: u64,
    /// Number of blocks before it.
    done: u64,
}

impl TokenJob {
    /// Creates a token. First watches its ranges, then waits for changes that had begun before:
    /// from then on every change is seen.
    async fn populate(
        &self,
        ranges: &[Blocks],
        inactivity: Duration,
    ) -> Result<RodToken, TokenStop> {
        let Self { server, principal, location, cancel } = self;
        let destination = |refused| TokenStop::of(Side::Destination, refused);
        let (served, _) = check_access(server, principal, location).map_err(destination)?;
        let room = || server.tokens().has_room(location.id);
        if !room() {
            return Err(TokenStop::Fault(TokenFault::TooManyTokens));
        }
        let watch = served.volume.change_tracker().watch(ranges.to_vec());
        let drain = Request::DrainWrites { ranges: ranges.to_vec() };
        let drained = submit_local(server, principal, location, drain, true, cancel.clone());
        drained.await.map_err(destination)?;
        // Others may have used the room meanwhile.
        if !room() {
            return Err(TokenStop::Fault(TokenFault::TooManyTokens));
        }
        let block_size = served.volume.info().block_size;
        let bytes = total(ranges) * u64::from(block_size);
        let random = std::array::from_fn(|_| server.core().random_u64());
        let token = RodToken::new(&location.id.0, bytes, block_size, random);
        let now = Instant::now();
        let known = TokenEntry {
            token: token.clone(),
            served: Rc::downgrade(&served),
            location: location.clone(),
            ranges: ranges.to_vec(),
            block_size,
            creator: Arc::clone(principal),
            watch,
            inactivity,
            created_at: now,
            last_used: Cell::new(now),
            expiry_timer: OnceCell::new(),
        };
        insert_token(server, Rc::new(known));
        Ok(token)
    }

    /// Writes the data of a token.
    async fn write(
        &self,
        plan: &TokenPlan,
        write: &TokenWrite<'_>,
        delete_token: bool,
    ) -> Result<(), TokenStop> {
        let copies = self.server.copy_permits();
        let turn = self.cancel.run_until_cancelled(copies.acquire()).await;
        let _turn = turn.ok_or(TokenStop::Aborted)?;
        let destination = |refused| TokenStop::of(Side::Destination, refused);
        let (served, _) =
            check_access(&self.server, &self.principal, &self.location).map_err(destination)?;
        let (block_size, thin) = (served.volume.info().block_size, served.thin);
        let source = match write.token {
            PresentedToken::Zeroes => None,
            PresentedToken::Data(token) => Some(self.source(token, block_size, write).await?),
        };
        let step = if source.is_some() { COPY_CHUNK_BYTES } else { MAX_ZEROES_BYTES }
            / u64::from(block_size);
        let from = source.as_ref().map(|source| &source.ranges[..]);
        let all = write_chunks(from, write.offset, write.ranges, step);
        let work = |piece| self.write_chunk(plan, source.as_ref(), piece, block_size, thin);
        let is_whole = self.cancel.for_each(all.into_iter(), true, work).await?;
        if !is_whole {
            return Err(TokenStop::Aborted);
        }
        if let Some(TokenSource { token, core, .. }) = source.filter(|_| delete_token) {
            let forget = move |server: Rc<Server>| async move { server.tokens().remove(&token) };
            third_party_copy::on_core(&self.server, core, forget).await;
        }
        Ok(())
    }

    /// Finds the data of a token, and checks that it is long enough.
    async fn source(
        &self,
        token: &RodToken,
        block_size: u32,
        write: &TokenWrite<'_>,
    ) -> Result<TokenSource, TokenStop> {
        let unknown = TokenStop::Fault(TokenFault::Unknown);
        let creator = token.creator().ok_or(unknown)?;
        let catalog = self.server.catalog();
        let mut volumes =
            catalog.targets.values().flat_map(|t| t.luns.values().map(|id| (id, t.core)));
        let (_, core) = volumes.find(|(id, _)| creator.identifies(&id.0)).ok_or(unknown)?;
        let asked = token.clone();
        let look = move |server: Rc<Server>| async move {
            let known = server.tokens().find(server.served(), &asked)?;
            Ok((known.ranges.clone(), known.block_size))
        };
        let found = third_party_copy::on_core(&self.server, core, look).await;
        let (ranges, its) = found.unwrap_or(Err(TokenFault::Unknown)).map_err(TokenStop::Fault)?;
        if its != block_size {
            return Err(TokenStop::Fault(TokenFault::BlockSizeMismatch));
        }
        let end = write.offset.checked_add(total(write.ranges));
        if end.is_none_or(|end| end > total(&ranges)) {
            return Err(TokenStop::Fault(TokenFault::TooShort));
        }
        Ok(TokenSource { token: token.clone(), core, ranges })
    }

    async fn write_chunk(
        &self,
        plan: &TokenPlan,
        source: Option<&TokenSource>,
        piece: WriteChunk,
        block_size: u32,
        thin: bool,
    ) -> Result<(), TokenStop> {
        let block = u64::from(block_size);
        let done = piece.done * block;
        let Some((source, from)) = source.zip(piece.from) else {
            let range = Blocks::new(piece.to, piece.count);
            self.submit(Request::Zero { range, unmap: thin, fua: false }, true).await?;
            plan.record_command();
            plan.record_written(done, piece.count * block);
            return Ok(());
        };
        let range = Blocks::new(from, piece.count);
        let (token, cancel) = (source.token.clone(), self.cancel.clone());
        let read = move |server| read(server, token, range, cancel);
        let read = third_party_copy::on_core(&self.server, source.core, read).await;
        let data = read.unwrap_or(Err(TokenStop::Fault(TokenFault::Unknown)))?;
        plan.record_command();
        let own_memory = source.core == self.location.core;
        for (part, is_zero) in third_party_copy::split_zeroes(&data, piece.to.0 * block) {
            let (at, len) = (part.start as u64, part.len() as u64);
            let range = Blocks::new(Lba(piece.to.0 + at / block), len / block);
            let request = if is_zero {
                Request::Zero { range, unmap: thin, fua: false }
            } else {
                Request::Write { at: range.at, data: data.slice(part), fua: false }
            };
            self.submit(request, own_memory).await?;
            plan.record_command();
            plan.record_written(done + at, len);
        }
        Ok(())
    }

    async fn submit(&self, request: Request, own_memory: bool) -> Result<Bufs, TokenStop> {
        let Self { server, principal, location, cancel } = self;
        let done = submit_local(server, principal, location, request, own_memory, cancel.clone());
        done.await.map_err(|refused| TokenStop::of(Side::Destination, refused))
    }
}

/// Reads blocks of a token of this core. If they have not changed by the end of the read, the data
/// is that of the token's creation.
async fn read(
    server: Rc<Server>,
    token: RodToken,
    range: Blocks,
    cancel: CancelToken,
) -> Result<Bufs, TokenStop> {
    let known = server.tokens().find(server.served(), &token).map_err(TokenStop::Fault)?;
    let request = Request::Read { range };
    let data = submit_local(&server, &known.creator, &known.location, request, true, cancel).await;
    let data = data.map_err(|refused| TokenStop::of(Side::Source, refused))?;
    if known.watch.is_unchanged() { Ok(data) } else { Err(TokenStop::Fault(TokenFault::Cancelled)) }
}

/// Adds a token, and a timer that removes it when it expires.
fn insert_token(server: &Rc<Server>, known: Rc<TokenEntry>) {
    let (weak_server, weak) = (Rc::downgrade(server), Rc::downgrade(&known));
    let clock = tokio::task::spawn_local(async move {
        while let Some(ends) = weak.upgrade().map(|known| known.expires_at()) {
            if ends <= Instant::now() {
                let (Some(server), Some(known)) = (weak_server.upgrade(), weak.upgrade()) else {
                    return;
                };
                return server.tokens().remove(&known.token);
            }
            tokio::time::sleep_until(ends).await;
        }
    });
    known.expiry_timer.get_or_init(|| AbortOnDropHandle::new(clock));
    server.tokens().insert(known);
}

fn total(ranges: &[Blocks]) -> u64 {
    ranges.iter().map(|range| range.count).sum()
}

/// Splits `to` into pieces of at most `step` blocks, each read from one range of `from`, starting
/// after `offset` blocks of it; or from nowhere, for zeroes.
fn write_chunks(from: Option<&[Blocks]>, offset: u64, to: &[Blocks], step: u64) -> Vec<WriteChunk> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for range in to {
        let mut at = 0;
        while at < range.count {
            let (from, most) = match from {
                None => (None, u64::MAX),
                Some(from) => match remaining_range(from, offset + done) {
                    Some(source) => (Some(source.at), source.count),
                    None => return pieces,
                },
            };
            let step = step.max(1);
            // Pieces after the first of a range start at multiples of `step`, aligned with file
            // system blocks.
            let step = step - (range.at.0 + at) % step;
            let count = step.min(range.count - at).min(most);
            pieces.push(WriteChunk { from, to: Lba(range.at.0 + at), count, done });
            at += count;
            done += count;
        }
    }
    pieces
}

/// The remainder of the range that contains the block after `skip` others.
fn remaining_range(ranges: &[Blocks], mut skip: u64) -> Option<Blocks> {
    for range in ranges {
        if skip < range.count {
            return Some(Blocks::new(Lba(range.at.0 + skip), range.count - skip));
        }
        skip -= range.count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_to_the_ranges_of_both_sides() {
        let r = |at, count| Blocks::new(Lba(at), count);
        let piece = |from: Option<u64>, to, count, done| WriteChunk {
            from: from.map(Lba),
            to: Lba(to),
            count,
            done,
        };
        let (from, to) = ([r(100, 10), r(50, 7)], [r(0, 4), r(1000, 9)]);
        assert_eq!(
            write_chunks(Some(&from), 3, &to, 5),
            [
                piece(Some(103), 0, 4, 0),
                piece(Some(107), 1000, 3, 4),
                piece(Some(50), 1003, 2, 7),
                piece(Some(52), 1005, 4, 9),
            ]
        );
        assert_eq!(
            write_chunks(None, 7, &to, 8),
            [piece(None, 0, 4, 0), piece(None, 1000, 8, 4), piece(None, 1008, 1, 12)]
        );
        assert_eq!(write_chunks(Some(&from), 17, &to, 5), [], "there is no more");
    }
}
