//! Offloaded transfers, carried out: tokens that stand for blocks of a volume as they are when the token is made, and what
//! writes these blocks elsewhere (RFD 0018).

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Blocks, Bufs, Failure, Lba, Request, Watch};
use scsi::{
    CopyTrouble, Presented, RodToken, Side, TOKEN_LIFETIME_S, TokenFault, TokenOutcome, TokenPlan,
    TokenWork,
};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::catalog::VolumeId;
use crate::copying::{
    self, Ended, PIECE, Place, Principal, Refused, Stopped, permitted, request_here,
};
use crate::server::{Served, Server};

/// Most tokens of a core, and of one volume.
const MOST: usize = 256;
const MOST_OF_VOLUME: usize = 64;

/// Most zeroes that one request writes, in bytes: they take no memory.
const ZEROES: u64 = 16 << 20;

/// The tokens of the volumes of one core.
#[derive(Debug, Default)]
pub(crate) struct Tokens(RefCell<Vec<Rc<Known>>>);

/// What a token stands for.
#[derive(Debug)]
struct Known {
    token: RodToken,
    /// The volume as it was opened then: one that comes back may be another one.
    served: Weak<Served>,
    place: Place,
    ranges: Vec<Blocks>,
    block_size: u32,
    /// Who has made it, and by whose right it is read.
    creator: Arc<Principal>,
    watch: Watch,
    inactivity: Duration,
    made: Instant,
    used: Cell<Instant>,
    clock: OnceCell<AbortOnDropHandle<()>>,
}

impl Known {
    /// When nobody knows it any more.
    fn ends(&self) -> Instant {
        let lifetime = Duration::from_secs(u64::from(TOKEN_LIFETIME_S));
        (self.used.get() + self.inactivity).min(self.made + lifetime)
    }
}

impl Tokens {
    /// Makes room for one more of a volume, by what stands for nothing any more.
    fn has_room(&self, id: VolumeId) -> bool {
        let mut all = self.0.borrow_mut();
        let full = |all: &[Rc<Known>]| {
            let of_volume = all.iter().filter(|known| known.place.id == id).count();
            all.len() >= MOST || of_volume >= MOST_OF_VOLUME
        };
        if full(&all) {
            all.retain(|known| known.watch.is_intact() && known.served.strong_count() > 0);
        }
        !full(&all)
    }

    fn insert(&self, server: &Rc<Server>, known: Rc<Known>) {
        let (server, weak) = (Rc::downgrade(server), Rc::downgrade(&known));
        let clock = tokio::task::spawn_local(async move {
            while let Some(ends) = weak.upgrade().map(|known| known.ends()) {
                if ends <= Instant::now() {
                    let (Some(server), Some(known)) = (server.upgrade(), weak.upgrade()) else {
                        return;
                    };
                    return server.tokens().forget(&known.token);
                }
                tokio::time::sleep_until(ends).await;
            }
        });
        known.clock.get_or_init(|| AbortOnDropHandle::new(clock));
        self.0.borrow_mut().push(known);
    }

    fn forget(&self, token: &RodToken) {
        self.0.borrow_mut().retain(|known| known.token != *token);
    }

    /// What `token` stands for, if it does so still; it is used now.
    fn find(&self, server: &Server, token: &RodToken) -> Result<Rc<Known>, TokenFault> {
        let all = self.0.borrow();
        let known = all.iter().find(|known| known.token == *token).ok_or(TokenFault::Unknown)?;
        let (then, now) = (known.served.upgrade(), server.volume(known.place.id));
        if !then.zip(now).is_some_and(|(then, now)| Rc::ptr_eq(&then, &now)) {
            return Err(TokenFault::Unknown);
        }
        if !known.watch.is_intact() {
            return Err(TokenFault::Cancelled);
        }
        known.used.set(Instant::now());
        Ok(Rc::clone(known))
    }
}

/// Why something is not done.
#[derive(Clone, Copy, Debug)]
enum Stop {
    Aborted,
    Fault(TokenFault),
    Failed(Side, CopyTrouble),
}

impl Stop {
    fn of(side: Side, refused: Refused) -> Self {
        match (refused, side) {
            (Refused::Aborted, _) => Self::Aborted,
            (Refused::Trouble(trouble), side) => Self::Failed(side, trouble),
            // Its creator may not read it any more: as if it were not there.
            (Refused::NotThere, Side::Source) => Self::Fault(TokenFault::Unknown),
            (Refused::NotThere, Side::Destination) => {
                Self::Failed(side, CopyTrouble::Failed(Failure::Device(block::Error::Gone)))
            }
        }
    }
}

impl From<Stop> for TokenOutcome {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Aborted => Self::Aborted,
            Stop::Fault(fault) => Self::Invalid(fault),
            Stop::Failed(side, trouble) => Self::Failed(side, trouble),
        }
    }
}

/// Does what `plan` says for `principal`, who has sent it to the unit of `commanded`. Ends soon after an abort; what it has
/// begun by then is done when this is.
pub(crate) async fn carry_out(
    server: Rc<Server>,
    (principal, session): (Principal, Ended),
    commanded: VolumeId,
    plan: TokenPlan,
) -> TokenOutcome {
    let handle = plan.handle();
    let work = |stopped| async {
        let principal = Arc::new(principal);
        let Some(place) = principal.find(&server.catalog(), |id| id == commanded) else {
            return Stop::of(Side::Destination, Refused::NotThere).into();
        };
        let job = Job { server, principal, place, stopped };
        let done = match plan.work() {
            TokenWork::Populate { ranges, inactivity_s } => {
                let inactivity = Duration::from_secs(u64::from(*inactivity_s));
                job.populate(ranges, inactivity).await.map(TokenOutcome::Made)
            }
            TokenWork::Write { token, offset, ranges, forgets } => {
                let wanted = Wanted { token, offset: *offset, ranges };
                job.write(&plan, &wanted, *forgets).await.map(|()| TokenOutcome::Written)
            }
        };
        done.unwrap_or_else(TokenOutcome::from)
    };
    copying::heeding(&handle, session, work).await
}

struct Job {
    server: Rc<Server>,
    principal: Arc<Principal>,
    /// The unit that was commanded.
    place: Place,
    stopped: Stopped,
}

/// What is to be written.
struct Wanted<'a> {
    token: &'a Presented,
    offset: u64,
    ranges: &'a [Blocks],
}

/// Where the data of a token come from.
struct Source {
    token: RodToken,
    core: usize,
    ranges: Vec<Blocks>,
}

/// A part of what is to be written, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// Where it is read, if it is no zeroes.
    from: Option<Lba>,
    to: Lba,
    count: u64,
    /// How many blocks come before it.
    done: u64,
}

impl Job {
    /// Makes a token. It is watched first what it stands for, then waited for changes that had begun before: from then on
    /// every change is seen.
    async fn populate(&self, ranges: &[Blocks], inactivity: Duration) -> Result<RodToken, Stop> {
        let Self { server, principal, place, stopped } = self;
        let destination = |refused| Stop::of(Side::Destination, refused);
        let (served, _) = permitted(server, principal, place).map_err(destination)?;
        let room = || server.tokens().has_room(place.id);
        if !room() {
            return Err(Stop::Fault(TokenFault::NoRoom));
        }
        let watch = served.volume.changes().watch(ranges.to_vec());
        let settle = Request::Settle { ranges: ranges.to_vec() };
        let settled = request_here(server, principal, place, settle, true, stopped.clone());
        settled.await.map_err(destination)?;
        // Others may have taken it meanwhile.
        if !room() {
            return Err(Stop::Fault(TokenFault::NoRoom));
        }
        let block_size = served.volume.info().block_size;
        let bytes = total(ranges) * u64::from(block_size);
        let random = std::array::from_fn(|_| server.core().random_u64());
        let token = RodToken::new(&place.id.0, bytes, block_size, random);
        let now = Instant::now();
        let known = Known {
            token: token.clone(),
            served: Rc::downgrade(&served),
            place: place.clone(),
            ranges: ranges.to_vec(),
            block_size,
            creator: Arc::clone(principal),
            watch,
            inactivity,
            made: now,
            used: Cell::new(now),
            clock: OnceCell::new(),
        };
        server.tokens().insert(server, Rc::new(known));
        Ok(token)
    }

    /// Writes what a token stands for.
    async fn write(
        &self,
        plan: &TokenPlan,
        wanted: &Wanted<'_>,
        forgets: bool,
    ) -> Result<(), Stop> {
        let copies = self.server.copies();
        let turn = self.stopped.or(copies.acquire()).await;
        let _turn = turn.ok_or(Stop::Aborted)?;
        let destination = |refused| Stop::of(Side::Destination, refused);
        let (served, _) =
            permitted(&self.server, &self.principal, &self.place).map_err(destination)?;
        let (block_size, thin) = (served.volume.info().block_size, served.thin);
        let source = match wanted.token {
            Presented::Zeroes => None,
            Presented::Data(token) => Some(self.source(token, block_size, wanted).await?),
        };
        let step = if source.is_some() { PIECE } else { ZEROES } / u64::from(block_size);
        let from = source.as_ref().map(|source| &source.ranges[..]);
        let all = pieces(from, wanted.offset, wanted.ranges, step);
        let work = |piece| self.piece(plan, source.as_ref(), piece, block_size, thin);
        let is_whole = self.stopped.each(all.into_iter(), true, work).await?;
        if !is_whole {
            return Err(Stop::Aborted);
        }
        if let Some(Source { token, core, .. }) = source.filter(|_| forgets) {
            let forget = move |server: Rc<Server>| async move { server.tokens().forget(&token) };
            copying::on_core(&self.server, core, forget).await;
        }
        Ok(())
    }

    /// Finds what a token stands for, and whether it is enough.
    async fn source(
        &self,
        token: &RodToken,
        block_size: u32,
        wanted: &Wanted<'_>,
    ) -> Result<Source, Stop> {
        let unknown = Stop::Fault(TokenFault::Unknown);
        let creator = token.creator().ok_or(unknown)?;
        let catalog = self.server.catalog();
        let mut volumes =
            catalog.targets.values().flat_map(|t| t.luns.values().map(|id| (id, t.core)));
        let (_, core) = volumes.find(|(id, _)| creator.names(&id.0)).ok_or(unknown)?;
        let asked = token.clone();
        let look = move |server: Rc<Server>| async move {
            let known = server.tokens().find(&server, &asked)?;
            Ok((known.ranges.clone(), known.block_size))
        };
        let found = copying::on_core(&self.server, core, look).await;
        let (ranges, its) = found.unwrap_or(Err(TokenFault::Unknown)).map_err(Stop::Fault)?;
        if its != block_size {
            return Err(Stop::Fault(TokenFault::OtherBlocks));
        }
        let end = wanted.offset.checked_add(total(wanted.ranges));
        if end.is_none_or(|end| end > total(&ranges)) {
            return Err(Stop::Fault(TokenFault::TooShort));
        }
        Ok(Source { token: token.clone(), core, ranges })
    }

    async fn piece(
        &self,
        plan: &TokenPlan,
        source: Option<&Source>,
        piece: Piece,
        block_size: u32,
        thin: bool,
    ) -> Result<(), Stop> {
        let block = u64::from(block_size);
        let done = piece.done * block;
        let Some((source, from)) = source.zip(piece.from) else {
            let range = Blocks::new(piece.to, piece.count);
            self.put(Request::Zero { range, unmap: thin, fua: false }, true).await?;
            plan.command_done();
            plan.wrote(done, piece.count * block);
            return Ok(());
        };
        let range = Blocks::new(from, piece.count);
        let (token, stopped) = (source.token.clone(), self.stopped.clone());
        let read = move |server| read(server, token, range, stopped);
        let read = copying::on_core(&self.server, source.core, read).await;
        let data = read.unwrap_or(Err(Stop::Fault(TokenFault::Unknown)))?;
        plan.command_done();
        let own_memory = source.core == self.place.core;
        for (part, is_zero) in copying::parts(&data, piece.to.0 * block) {
            let (at, len) = (part.start as u64, part.len() as u64);
            let range = Blocks::new(Lba(piece.to.0 + at / block), len / block);
            let request = if is_zero {
                Request::Zero { range, unmap: thin, fua: false }
            } else {
                Request::Write { at: range.at, data: data.slice(part), fua: false }
            };
            self.put(request, own_memory).await?;
            plan.command_done();
            plan.wrote(done + at, len);
        }
        Ok(())
    }

    async fn put(&self, request: Request, own_memory: bool) -> Result<Bufs, Stop> {
        let Self { server, principal, place, stopped } = self;
        let done = request_here(server, principal, place, request, own_memory, stopped.clone());
        done.await.map_err(|refused| Stop::of(Side::Destination, refused))
    }
}

/// Reads blocks that a token of this core stands for. What has not been changed by the time that it has been read is what was
/// there when the token was made.
async fn read(
    server: Rc<Server>,
    token: RodToken,
    range: Blocks,
    stopped: Stopped,
) -> Result<Bufs, Stop> {
    let known = server.tokens().find(&server, &token).map_err(Stop::Fault)?;
    let request = Request::Read { range };
    let data = request_here(&server, &known.creator, &known.place, request, true, stopped).await;
    let data = data.map_err(|refused| Stop::of(Side::Source, refused))?;
    if known.watch.is_intact() { Ok(data) } else { Err(Stop::Fault(TokenFault::Cancelled)) }
}

fn total(ranges: &[Blocks]) -> u64 {
    ranges.iter().map(|range| range.count).sum()
}

/// `to`, in pieces of at most `step` blocks, each of which comes from one range of `from`, beginning behind `offset` blocks of
/// that; or from nowhere.
fn pieces(from: Option<&[Blocks]>, offset: u64, to: &[Blocks], step: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for range in to {
        let mut at = 0;
        while at < range.count {
            let (from, most) = match from {
                None => (None, u64::MAX),
                Some(from) => match behind(from, offset + done) {
                    Some(source) => (Some(source.at), source.count),
                    None => return pieces,
                },
            };
            let step = step.max(1);
            // Behind the first of a range they begin at multiples of that, so grains lie as the file system's blocks do.
            let step = step - (range.at.0 + at) % step;
            let count = step.min(range.count - at).min(most);
            pieces.push(Piece { from, to: Lba(range.at.0 + at), count, done });
            at += count;
            done += count;
        }
    }
    pieces
}

/// What is left of the range in which the block lies that `skip` others come before.
fn behind(ranges: &[Blocks], mut skip: u64) -> Option<Blocks> {
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
        let piece = |from: Option<u64>, to, count, done| Piece {
            from: from.map(Lba),
            to: Lba(to),
            count,
            done,
        };
        let (from, to) = ([r(100, 10), r(50, 7)], [r(0, 4), r(1000, 9)]);
        assert_eq!(
            pieces(Some(&from), 3, &to, 5),
            [
                piece(Some(103), 0, 4, 0),
                piece(Some(107), 1000, 3, 4),
                piece(Some(50), 1003, 2, 7),
                piece(Some(52), 1005, 4, 9),
            ]
        );
        assert_eq!(
            pieces(None, 7, &to, 8),
            [piece(None, 0, 4, 0), piece(None, 1000, 8, 4), piece(None, 1008, 1, 12)]
        );
        assert_eq!(pieces(Some(&from), 17, &to, 5), [], "there is no more");
    }
}
