//! Third-party copies, carried out: ordinary reads and writes of volumes, in pieces, each on the core of
//! its volume (RFD 0014).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Account, Blocks, Buf, Bufs, Class, Error, Failure, Info, Lba, Request};
use iscsi::name::Name;
use scsi::{
    CopyEnd, CopyExtent, CopyFault, CopyHandle, CopyOutcome, CopyPlan, CopySegment, CopyTrouble,
    Side, Whose,
};
use tokio::sync::{Notify, oneshot};
use volume::Caller;

use crate::catalog::{Admission, Catalog, Chap, IscsiTarget, VolumeId};
use crate::iscsi::portal_group;
use crate::server::{Served, Server};

/// Most that is read, and then written, at once, in bytes.
pub(crate) const PIECE: u64 = 512 * 1024;

/// What zeroes are looked for in, in bytes: space is saved in no smaller portions.
const GRAIN: usize = 64 * 1024;

/// Copies that run on a core at a time; others wait.
pub(crate) const AT_ONCE: usize = 4;

/// On whose behalf something is copied.
#[derive(Debug)]
pub(crate) struct Principal {
    /// The initiator's name.
    pub(crate) initiator: Name,
    /// What its name and this make the name of its port.
    pub(crate) isid: [u8; 6],
    /// What its session was asked, and has proved.
    pub(crate) admission: Admission<Chap>,
}

impl Principal {
    /// Whether it could log in to `target` with what it has proved already.
    fn may_use(&self, target: &IscsiTarget) -> bool {
        let Some(asks) = target.access.admission(self.initiator.as_str()) else { return false };
        match (asks, &self.admission) {
            (Admission::ByName, _) => true,
            (Admission::Proof(asks), Admission::Proof(has)) => {
                (&asks.user, &asks.secret) == (&has.user, &has.secret)
            }
            (Admission::Proof(_), Admission::ByName) => false,
        }
    }

    /// A volume that it may use.
    pub(crate) fn find(
        &self,
        catalog: &Catalog,
        wanted: impl Fn(VolumeId) -> bool,
    ) -> Option<Place> {
        let usable = catalog.targets.iter().filter(|(_, t)| self.may_use(t));
        let initiator = self.initiator.as_str();
        let mut volumes =
            usable.flat_map(|(name, t)| t.maps(initiator).map(move |(_, id)| (id, name, t)));
        let (id, name, target) = volumes.find(|&(id, ..)| wanted(id))?;
        Some(Place { id, core: target.core, target: name.as_str().into() })
    }

    /// Whether it may use a volume as it did when that was found: no search.
    fn may_still_use(&self, catalog: &Catalog, place: &Place) -> bool {
        catalog.targets.get(&*place.target).is_some_and(|t| {
            let mut maps = t.maps(self.initiator.as_str());
            let has = t.core == place.core && maps.any(|(_, id)| id == place.id);
            has && self.may_use(t)
        })
    }
}

/// Where a volume lives, and the target that makes it usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) id: VolumeId,
    pub(crate) core: usize,
    target: Arc<str>,
}

/// One end of a segment, found.
#[derive(Clone, Debug)]
struct End {
    side: Side,
    place: Place,
    info: Info,
    thin: bool,
}

/// Why a segment is not copied.
enum Stop {
    Aborted,
    Fault { fault: CopyFault, commanded: bool },
}

/// Why a volume has not done what a copy wants.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Refused {
    /// It is not there, or not for this initiator.
    NotThere,
    Aborted,
    Trouble(CopyTrouble),
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Device(Error::Aborted) => Self::Aborted,
            failure => Self::Trouble(CopyTrouble::Failed(failure)),
        }
    }
}

/// Copies what `plan` says for `principal`, who has sent it to the unit of `commanded`. Ends soon after
/// an abort; what it has begun by then is done when this is.
pub(crate) async fn carry_out(
    server: Rc<Server>,
    (principal, session): (Principal, Ended),
    commanded: VolumeId,
    plan: CopyPlan,
) -> CopyOutcome {
    let handle = plan.handle();
    let principal = Arc::new(principal);
    let work = |stopped| async {
        let job = Job { server, principal, commanded, stopped, found: RefCell::default() };
        job.run(&plan).await
    };
    heeding(&handle, session, work).await
}

/// Whether a session has ended, for whoever works for it, on any core. It says so before the initiator can have begun
/// another one in its place: what has not begun by then never does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ended(Arc<AtomicBool>);

impl Ended {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Whether somebody has asked for an end; who waits for that is woken in order.
#[derive(Debug, Default)]
struct Asked {
    is: AtomicBool,
    told: Notify,
}

/// Whether work is to be given up: because somebody asks for that, or its session has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stopped {
    asked: Arc<Asked>,
    session: Ended,
}

impl Stopped {
    fn new(session: Ended) -> Self {
        Self { session, ..Self::default() }
    }

    /// Asks for the work to be given up.
    pub(crate) fn ask(&self) {
        if !self.asked.is.swap(true, Ordering::AcqRel) {
            self.asked.told.notify_waiters();
        }
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is.load(Ordering::Acquire) || self.session.get()
    }

    /// Waits until somebody asks; whose session ends is asked soon after.
    async fn asked(&self) {
        let told = self.asked.told.notified();
        if !self.asked.is.load(Ordering::Acquire) {
            told.await;
        }
    }

    /// What `wait` gives, or nothing once somebody asks.
    pub(crate) async fn or<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.asked() => None,
            given = wait => Some(given),
        }
    }

    /// Does `work` on every one of `pieces`, in order, `abreast` on two at a time, until somebody asks; whether on all. When
    /// one has failed no more begin; what has begun has ended when this does.
    pub(crate) async fn each<T, E, Fut: Future<Output = Result<(), E>>>(
        &self,
        pieces: impl Iterator<Item = T>,
        abreast: bool,
        work: impl Fn(T) -> Fut,
    ) -> Result<bool, E> {
        let (rest, failed) = (RefCell::new(pieces), Cell::new(None));
        let worker = || async {
            while !self.is_asked() {
                let next = rest.borrow_mut().next();
                let Some(piece) = next else { break };
                if let Err(e) = work(piece).await {
                    failed.set(failed.take().or(Some(e)));
                    rest.borrow_mut().by_ref().for_each(drop);
                }
            }
        };
        if abreast {
            tokio::join!(worker(), worker());
        } else {
            worker().await;
        }
        failed.take().map_or_else(|| Ok(!self.is_asked()), Err)
    }
}

/// Does `work`, which is shown when somebody asks for its end.
pub(crate) async fn heeding<Fut: Future>(
    handle: &CopyHandle,
    session: Ended,
    work: impl FnOnce(Stopped) -> Fut,
) -> Fut::Output {
    let stopped = Stopped::new(session);
    let mut work = pin!(work(stopped.clone()));
    poll_fn(|cx| {
        if handle.poll_aborted(cx).is_ready() {
            stopped.ask();
        }
        work.as_mut().poll(cx)
    })
    .await
}

struct Job {
    server: Rc<Server>,
    principal: Arc<Principal>,
    commanded: VolumeId,
    /// Whether it is to be given up.
    stopped: Stopped,
    /// The ends that were found already.
    found: RefCell<Vec<(CopyEnd, Place)>>,
}

impl Job {
    async fn run(&self, plan: &CopyPlan) -> CopyOutcome {
        let copies = self.server.copies();
        let turn = self.stopped.or(copies.acquire()).await;
        let Some(_turn) = turn else { return CopyOutcome::Aborted };
        for (segment, what) in (0..).zip(plan.segments()) {
            plan.segment_begins(what);
            match self.segment(plan, what).await {
                Ok(()) => {}
                Err(Stop::Aborted) => return CopyOutcome::Aborted,
                Err(Stop::Fault { fault, commanded }) => {
                    tracing::debug!(segment, ?fault, "a third-party copy is given up");
                    return CopyOutcome::Failed { segment, fault, commanded };
                }
            }
        }
        CopyOutcome::Done
    }

    async fn segment(&self, plan: &CopyPlan, segment: &CopySegment) -> Result<(), Stop> {
        let source = self.end(plan, segment, Side::Source).await?;
        let destination = self.end(plan, segment, Side::Destination).await?;
        let extent = segment.extent(&source.info, &destination.info).map_err(|fault| {
            let failed = match fault {
                CopyFault::OutOfRange(Side::Destination) => &destination,
                _ => &source,
            };
            self.fault(failed.place.id, fault)
        })?;
        plan.segment_is(extent.bytes, destination.info.block_size);
        let same = source.place.id == destination.place.id;
        let within = same.then_some(source.info.block_size);
        let (first, step) = steps(&source.info, &destination.info, extent.to);
        let pieces = extent.pieces(first, step, within);
        let abreast = !extent.overlaps(within);
        let work = |piece| self.piece(plan, &source, &destination, &extent, piece);
        let is_whole = self.stopped.each(pieces, abreast, work).await?;
        if is_whole { Ok(()) } else { Err(Stop::Aborted) }
    }

    fn fault(&self, id: VolumeId, fault: CopyFault) -> Stop {
        Stop::Fault { fault, commanded: id == self.commanded }
    }

    /// Finds whom a segment means by `side`.
    async fn end(&self, plan: &CopyPlan, segment: &CopySegment, side: Side) -> Result<End, Stop> {
        let nobody = || Stop::Fault { fault: CopyFault::Unreachable(side), commanded: false };
        let whose = plan.end(segment, side).ok_or_else(nobody)?;
        let place = self.place(whose).ok_or_else(nobody)?;
        let there = place.clone();
        let found = self.at(place.core, move |server, principal, _| async move {
            let (served, _) = permitted(&server, &principal, &there)?;
            Ok((served.volume.info(), served.thin))
        });
        let (info, thin) = found.await.map_err(|refused| self.stop(place.id, side, refused))?;
        match whose {
            Whose::Named(end) if !end.is_of(info.block_size) => {
                Err(self.fault(place.id, CopyFault::Mismatch(side)))
            }
            _ => Ok(End { side, place, info, thin }),
        }
    }

    fn place(&self, whose: Whose<'_>) -> Option<Place> {
        let (catalog, principal) = (self.server.catalog(), &self.principal);
        let end = match whose {
            Whose::Commanded => return principal.find(&catalog, |id| id == self.commanded),
            Whose::Named(end) => end,
        };
        let mut found = self.found.borrow_mut();
        found.retain(|(_, place)| principal.may_still_use(&catalog, place));
        if let Some((_, place)) = found.iter().find(|(known, _)| known == end) {
            return Some(place.clone());
        }
        let place = principal.find(&catalog, |id| end.names(&id.0))?;
        found.push((end.clone(), place.clone()));
        Some(place)
    }

    fn stop(&self, id: VolumeId, side: Side, refused: Refused) -> Stop {
        match refused {
            Refused::Aborted => Stop::Aborted,
            Refused::NotThere => self.fault(id, CopyFault::Unreachable(side)),
            Refused::Trouble(trouble) => self.fault(id, CopyFault::Failed(side, trouble)),
        }
    }

    /// Reads a piece, and writes it.
    async fn piece(
        &self,
        plan: &CopyPlan,
        source: &End,
        destination: &End,
        extent: &CopyExtent,
        (at, len): (u64, u64),
    ) -> Result<(), Stop> {
        let range = blocks(source, extent.from, at, len);
        let data = self.request(source, Request::Read { range }, true).await?;
        plan.command_done();
        let own_memory = source.place.core == destination.place.core;
        let begins = extent.to.0 * u64::from(destination.info.block_size) + at;
        for (part, is_zero) in parts(&data, begins) {
            let at = at + part.start as u64;
            let len = part.len() as u64;
            let range = blocks(destination, extent.to, at, len);
            let request = if is_zero {
                Request::Zero { range, unmap: destination.thin, fua: false }
            } else {
                Request::Write { at: range.at, data: data.slice(part), fua: false }
            };
            self.request(destination, request, own_memory).await?;
            plan.command_done();
            plan.wrote(at, len);
        }
        Ok(())
    }

    /// Has the volume of `end` do `request`. `own_memory`: what it writes is in its core's pool.
    async fn request(&self, end: &End, request: Request, own_memory: bool) -> Result<Bufs, Stop> {
        let place = end.place.clone();
        let done = self.at(place.core, move |server, principal, stopped| async move {
            request_here(&server, &principal, &place, request, own_memory, stopped).await
        });
        done.await.map_err(|refused| self.stop(end.place.id, end.side, refused))
    }

    /// Runs `work` on a core, here or behind its door, and gives its answer.
    async fn at<T, F, Fut>(&self, core: usize, work: F) -> Result<T, Refused>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Server>, Arc<Principal>, Stopped) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, Refused>> + 'static,
    {
        let (principal, stopped) = (Arc::clone(&self.principal), self.stopped.clone());
        let work = move |server| work(server, principal, stopped);
        // A core that has stopped has no volumes any more.
        on_core(&self.server, core, work).await.unwrap_or(Err(Refused::NotThere))
    }
}

/// Runs `work` on a core, here or behind its door, and gives its answer; none from a core that has stopped.
pub(crate) async fn on_core<T, F, Fut>(here: &Rc<Server>, core: usize, work: F) -> Option<T>
where
    T: Send + 'static,
    F: FnOnce(Rc<Server>) -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
{
    if core == here.core().id() {
        return Some(work(Rc::clone(here)).await);
    }
    let (answer, answered) = oneshot::channel();
    let parcel = move |server: &Rc<Server>| {
        let work = work(Rc::clone(server));
        tokio::task::spawn_local(async move {
            // Whoever asked may be gone with its core; the work was done all the same.
            let _ = answer.send(work.await);
        });
    };
    here.send(core, Box::new(parcel)).await;
    answered.await.ok()
}

/// The volume of this core, if `principal` may use it now, and the portal group that it would come through.
pub(crate) fn permitted(
    server: &Server,
    principal: &Principal,
    place: &Place,
) -> Result<(Rc<Served>, u16), Refused> {
    let catalog = server.catalog();
    let target = if principal.may_still_use(&catalog, place) {
        Some(Arc::clone(&place.target))
    } else {
        // The target may be another one now.
        let now = principal.find(&catalog, |id| id == place.id);
        now.filter(|now| now.core == place.core).map(|now| now.target)
    };
    let target = target.and_then(|name| catalog.targets.get(&*name)).ok_or(Refused::NotThere)?;
    let served = server.volume(place.id).ok_or(Refused::NotThere)?;
    Ok((served, portal_group(&catalog, target)))
}

/// Does one request of a copy on this core, if it may be done now.
pub(crate) async fn request_here(
    server: &Rc<Server>,
    principal: &Principal,
    place: &Place,
    request: Request,
    own_memory: bool,
    stopped: Stopped,
) -> Result<Bufs, Refused> {
    let account = server.copying();
    let writes = !matches!(request, Request::Read { .. } | Request::Settle { .. });
    let request = match request {
        Request::Write { at, data, .. } if !own_memory => {
            // Further up than the memory that the data is in: no circle of waiting closes.
            let credit = stopped.or(account.credit(data.len(), Class::Arriving)).await;
            let credit =
                credit.ok_or(Refused::Aborted)?.map_err(|_| Failure::Device(Error::OutOfRange))?;
            Request::Write { at, data: copied(&credit, &data), fua: false }
        }
        other => other,
    };
    // Decided last: nothing is waited for between this and the volume.
    let (served, port) = permitted(server, principal, place)?;
    if stopped.is_asked() {
        return Err(Refused::Aborted);
    }
    let admitted = server.iscsi.admits_copy(&served, principal, port, writes);
    let (caller, durable) = admitted.map_err(Refused::Trouble)?;
    let request = match request {
        Request::Write { at, data, .. } => Request::Write { at, data, fua: durable },
        Request::Zero { range, unmap, .. } => Request::Zero { range, unmap, fua: durable },
        other => other,
    };
    Ok(heeded(&served, &caller, request, &account, &stopped).await?)
}

/// What a volume answers to `request`, which is aborted once somebody asks, and does not begin after that.
pub(crate) async fn heeded(
    served: &Served,
    caller: &Rc<Caller>,
    request: Request,
    account: &Account,
    stopped: &Stopped,
) -> Result<Bufs, Failure> {
    if stopped.is_asked() {
        return Err(Failure::Device(Error::Aborted));
    }
    let (answer, answered) = oneshot::channel();
    let done = |result| drop(answer.send(result));
    let command = served.volume.start_for(caller, request, account, done);
    let mut answered = pin!(answered);
    let result = tokio::select! {
        biased;
        result = &mut answered => result,
        () = stopped.asked() => {
            command.abort();
            // What has begun is over when the volume says so.
            answered.await
        }
    };
    result.unwrap_or(Err(Failure::Device(Error::Gone)))
}

/// Bytes of the first piece and of the others: what both volumes take at once, a multiple of both block sizes. Behind the
/// first they begin at multiples of that at the destination, as far as its blocks allow it, so grains lie as its file
/// system's blocks do.
pub(crate) fn steps(source: &Info, destination: &Info, to: Lba) -> (u64, u64) {
    let most = |info: &Info| u64::from(info.max_transfer_blocks) * u64::from(info.block_size);
    let block = u64::from(source.block_size.max(destination.block_size));
    let step = PIECE.min(most(source)).min(most(destination));
    let step = (step - step % block).max(block);
    let first = step - (to.0 * u64::from(destination.block_size)) % step;
    let first = first - first % block;
    (if first == 0 { step } else { first }, step)
}

/// `len` bytes from byte `at` of a segment on that begins at `first`, as blocks of `end`.
fn blocks(end: &End, first: Lba, at: u64, len: u64) -> Blocks {
    let block = u64::from(end.info.block_size);
    Blocks::new(Lba(first.0 + at / block), len / block)
}

/// `data` in parts that are all zeroes, or not. It goes to byte `begins` of a volume: grains are the volume's.
pub(crate) fn parts(data: &Bufs, begins: u64) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    let (mut start, mut grain) = (0, GRAIN - (begins % GRAIN as u64) as usize);
    while start < data.len() {
        let end = data.len().min(start + grain);
        let zero = data.slice(start..end).iter().all(is_zero);
        match parts.last_mut() {
            Some((part, same)) if *same == zero => part.end = end,
            _ => parts.push((start..end, zero)),
        }
        (start, grain) = (end, GRAIN);
    }
    parts
}

fn is_zero(buf: &Buf) -> bool {
    buf.chunks(64).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

/// `data` in memory of `credit`.
fn copied(credit: &block::Credit, data: &Bufs) -> Bufs {
    let mut runs = credit.alloc(data.len());
    let mut at = 0;
    for run in &mut runs {
        let end = at + run.len();
        data.slice(at..end).copy_to(run);
        at = end;
    }
    runs.into()
}

/// Tells how a copy has ended, however that came: a command waits for it.
pub(crate) struct Promise<T, F: FnOnce(T)>(Option<(T, F)>);

impl<T, F: FnOnce(T)> Promise<T, F> {
    /// `lost` is told if nothing else is.
    pub(crate) fn new(lost: T, tell: F) -> Self {
        Self(Some((lost, tell)))
    }

    pub(crate) fn keep(mut self, outcome: T) {
        if let Some((_, tell)) = self.0.take() {
            tell(outcome);
        }
    }
}

impl<T, F: FnOnce(T)> Drop for Promise<T, F> {
    fn drop(&mut self) {
        if let Some((lost, tell)) = self.0.take() {
            tell(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::catalog::Access;

    use super::*;

    fn chap(secret: &str) -> Admission<Chap> {
        Admission::Proof(Chap { user: "u".into(), secret: secret.into(), mutual: None })
    }

    fn target(core: usize, id: u8, admission: Admission<Chap>) -> IscsiTarget {
        let mut access = Access::default();
        access.named.insert("iqn.2026-01.com.example:a".into(), admission);
        let luns = [(0, VolumeId([id; 16]))].into();
        IscsiTarget { core, luns, access, ..IscsiTarget::default() }
    }

    /// RFD 0014, 5: a name proves nothing where a secret is asked for.
    #[test]
    fn a_session_reaches_what_it_has_proved_itself_for() {
        let targets = [
            ("open".to_owned(), target(1, 1, Admission::ByName)),
            ("same".to_owned(), target(2, 2, chap("one"))),
            ("other".to_owned(), target(3, 3, chap("two"))),
        ];
        let catalog = Catalog { targets: targets.into(), ..Catalog::default() };
        let reached = |initiator: &str, admission| {
            let initiator = initiator.parse().unwrap();
            let principal = Principal { initiator, isid: [0; 6], admission };
            let of = |n: u8| principal.find(&catalog, |id| id == VolumeId([n; 16]));
            [1, 2, 3].map(|n| {
                let place = of(n)?;
                assert!(principal.may_still_use(&catalog, &place));
                assert!(!principal.may_still_use(&Catalog::default(), &place));
                Some(place.core)
            })
        };
        assert_eq!(reached("iqn.2026-01.com.example:a", Admission::ByName), [Some(1), None, None]);
        assert_eq!(reached("iqn.2026-01.com.example:a", chap("one")), [Some(1), Some(2), None]);
        assert_eq!(reached("iqn.2026-01.com.example:b", chap("one")), [None; 3]);
    }

    /// RFD 0016, 6: what one initiator has proved is nothing at a target that asks it for a secret of its own.
    #[test]
    fn a_session_reaches_nothing_by_another_secret_than_its_own() {
        let initiator = "iqn.2026-01.com.example:a";
        let mut own = target(1, 1, chap("own"));
        own.access.any = Some(chap("everybody's"));
        let targets = [("own".to_owned(), own)].into();
        let catalog = Catalog { targets, ..Catalog::default() };
        let reaches = |initiator: &str, secret| {
            let (initiator, isid) = (initiator.parse().unwrap(), [0; 6]);
            let principal = Principal { initiator, isid, admission: chap(secret) };
            principal.find(&catalog, |_| true).is_some()
        };
        assert!(reaches(initiator, "own") && !reaches(initiator, "everybody's"));
        let other = "iqn.2026-01.com.example:b";
        assert!(reaches(other, "everybody's") && !reaches(other, "own"));
    }

    /// RFD 0017, 3: nobody copies what is masked from him, though he may log in to its target.
    #[test]
    fn a_session_reaches_no_unit_that_it_does_not_see() {
        let initiator = "iqn.2026-01.com.example:a";
        let mut both = target(1, 1, Admission::ByName);
        both.luns.insert(1, VolumeId([2; 16]));
        both.masks.insert(1, ["iqn.2026-01.com.example:b".to_owned()].into());
        let catalog = |both: &IscsiTarget| Catalog {
            targets: [("both".to_owned(), both.clone())].into(),
            ..Catalog::default()
        };
        let admission = Admission::ByName;
        let principal =
            Principal { initiator: initiator.parse().unwrap(), isid: [0; 6], admission };
        let find = |catalog: &Catalog, n: u8| principal.find(catalog, |id| id == VolumeId([n; 16]));
        assert!(find(&catalog(&both), 1).is_some());
        assert_eq!(find(&catalog(&both), 2), None);
        both.masks.clear();
        let place = find(&catalog(&both), 2).unwrap();
        both.masks.insert(1, BTreeSet::new());
        assert!(!principal.may_still_use(&catalog(&both), &place));
    }

    #[test]
    fn zeroes_are_found_in_grains() {
        let pool = block::Pool::new(1 << 20).unwrap();
        let mut bytes = vec![0; 3 * GRAIN + 512];
        let of = |bytes: &[u8]| {
            let credit = pool.account().try_credit(bytes.len(), Class::Immediate).unwrap();
            parts(&rt::buf::copy_in(&credit, bytes), 3 << 20)
        };
        assert_eq!(of(&bytes), [(0..3 * GRAIN + 512, true)]);
        bytes[GRAIN] = 1;
        assert_eq!(
            of(&bytes),
            [(0..GRAIN, true), (GRAIN..2 * GRAIN, false), (2 * GRAIN..3 * GRAIN + 512, true)]
        );
        bytes[3 * GRAIN] = 1;
        bytes[2 * GRAIN] = 1;
        assert_eq!(of(&bytes), [(0..GRAIN, true), (GRAIN..3 * GRAIN + 512, false)]);
        assert_eq!(of(&[]), []);
        let credit = pool.account().try_credit(GRAIN, Class::Immediate).unwrap();
        let mut bytes = vec![0; GRAIN];
        bytes[511] = 1;
        let data = rt::buf::copy_in(&credit, &bytes);
        let begins = (5 * GRAIN - 512) as u64;
        assert_eq!(parts(&data, begins), [(0..512, false), (512..GRAIN, true)]);
    }

    #[test]
    fn a_piece_is_whole_blocks_of_both() {
        let info = |block_size, max_transfer_blocks| Info {
            block_size,
            blocks: 1,
            physical_block_size: 4096,
            max_transfer_blocks,
            unmap_granularity_blocks: 0,
            unmap_zeroes: true,
            volatile_cache: false,
            native_fua: true,
            read_only: false,
            overhead: 0,
            aside_blocks: 0,
        };
        let small = || info(512, 2048);
        assert_eq!(steps(&small(), &info(4096, 256), Lba(0)), (PIECE, PIECE));
        assert_eq!(steps(&small(), &info(4096, 256), Lba(127)), (4096, PIECE));
        assert_eq!(steps(&info(512, 9), &info(4096, 256), Lba(3)), (4096, 4096));
        assert_eq!(steps(&info(512, 7), &info(512, 64), Lba(8)), (6 * 512, 7 * 512));
        assert_eq!(steps(&small(), &small(), Lba(65_535)), (512, PIECE));
        // The source's blocks are larger than what the destination begins at.
        assert_eq!(steps(&info(4096, 256), &small(), Lba(1)), (PIECE - 4096, PIECE));
        assert_eq!(steps(&info(4096, 256), &small(), Lba(1023)), (PIECE, PIECE));
    }

    #[test]
    fn a_promise_is_kept_even_if_it_is_lost() {
        let told = Rc::new(Cell::new(None));
        let tell = |told: &Rc<Cell<_>>| {
            let told = Rc::clone(told);
            Promise::new(CopyOutcome::Aborted, move |outcome| told.set(Some(outcome)))
        };
        tell(&told).keep(CopyOutcome::Done);
        assert_eq!(told.take(), Some(CopyOutcome::Done));
        drop(tell(&told));
        assert_eq!(told.take(), Some(CopyOutcome::Aborted));
    }
}
