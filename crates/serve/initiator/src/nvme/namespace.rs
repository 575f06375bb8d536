//! A namespace as a layer, by way of one controller or several.
//!
//! Operations take one path or another, wait while there is none, and are sent again where that is right: no
//! two of them that overlap are in flight, so doing one twice does no harm. A change that is in doubt is sent
//! again once its first time cannot happen any more (RFD 0027). What may not be done twice,
//! [`Namespace::compare_and_write`], is not. Once a namespace has failed for good every later operation
//! fails as well.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use ::nvme::entry::{NSID_ALL, NvmOpcode};
use ::nvme::host::{Command, Lost, Payload};
use ::nvme::{Completion, Sqe, Status};
use block::{Bufs, Ctx, Error, Info, Layer, Lba, Op, Run};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::admin::{Failed, low};
use super::controller::Controller;
use super::identity::Described;
use super::paths::{Path, Policy, Seen, Taken, take};
use super::queue::Reply;
pub use crate::commands::CompareError;
use crate::commands::{Data, PAUSE, TRIES, pieces};

/// Dword 12: force unit access; Write Zeroes: may deallocate.
pub(super) const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;

/// FUSE, of the first and the second half.
const FUSE_FIRST: u8 = 0b01;
const FUSE_SECOND: u8 = 0b10;

/// Why a namespace cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is none with this number, or it cannot be used: it has metadata, or blocks of another size.
    #[error("there is no namespace {0} that can be used")]
    Unusable(u32),
    /// It has no identifier by which it could be told from another one.
    #[error("namespace {0} has neither UUID nor NGUID nor EUI-64")]
    Nameless(u32),
    /// Controllers have different volumes under this number.
    #[error("namespace {0} is another volume at another controller")]
    Different(u32),
    /// The controller did not tell.
    #[error("{0}")]
    Failed(#[from] Failed),
}

/// Why a namespace fails every operation from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The reason, for people.
    pub why: &'static str,
    /// Whether it is merely out of reach: nothing is known to be lost, and no path is known to lead to another volume. Who opens
    /// it anew may find it as it was.
    pub away: bool,
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    paths: RefCell<Vec<Rc<Path>>>,
    policy: Policy,
    /// The path that was taken last.
    last: Cell<usize>,
    nsid: u32,
    described: Cell<Described>,
    patience: Duration,
    gone: Cell<Option<Gone>>,
    /// A path may have become another one.
    changed: Notify,
    watchers: RefCell<Vec<AbortOnDropHandle<()>>>,
}

/// One command, to be sent as often as it takes.
struct Work<'a> {
    sqe: Sqe,
    data: Data<'a>,
    /// First block, for errors.
    at: Lba,
}

impl Work<'_> {
    /// Whether it changes what is stored. Once that may have happened, or may yet, it cannot be abandoned any more: what
    /// the range holds has to stay.
    fn changes(&self) -> bool {
        let changing = [NvmOpcode::Write, NvmOpcode::WriteZeroes, NvmOpcode::DatasetManagement];
        changing.iter().any(|opcode| opcode.0 == self.sqe.opcode)
    }
}

fn payload(data: Data<'_>, ctx: &Ctx) -> Payload {
    match data {
        Data::None => Payload::None,
        Data::Out(data) => Payload::ToController(data.clone()),
        Data::In(length) => Payload::ToHost(ctx.alloc(length)),
    }
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Done,
    /// The same again, at once or after a pause, once more or until time runs out.
    Again {
        pause: bool,
    },
    /// Again, after this time: until then it may happen all the same.
    InDoubt(Duration),
    /// A few more times, the namespace being looked at again if it may have become another one.
    Few {
        error: Error,
        look: bool,
    },
    Failed(Error),
}

impl Namespace {
    /// Opens a namespace of one controller: what it is now, it has to stay.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(controller: &Controller, nsid: u32) -> Result<Rc<Self>, OpenError> {
        Self::through(std::slice::from_ref(controller), nsid, Policy::default()).await
    }

    /// Opens a namespace of a subsystem that several controllers belong to, of which one at least has to be
    /// there. The first one's options tell how long a command waits while there is no path.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn through(
        controllers: &[Controller],
        nsid: u32,
        policy: Policy,
    ) -> Result<Rc<Self>, OpenError> {
        let (mut described, mut failed) = (None::<Described>, OpenError::Unusable(nsid));
        for controller in controllers {
            match (controller.describe(nsid).await, described) {
                (Ok(Some(now)), None) => described = Some(now),
                (Ok(Some(now)), Some(known)) if now.identity == known.identity => {
                    described = Some(known.least(&now));
                }
                (Ok(Some(_)), Some(_)) => return Err(OpenError::Different(nsid)),
                (Ok(None), _) => {}
                (Err(e), _) => failed = e.into(),
            }
        }
        let described = described.ok_or(failed)?;
        if !described.identity.is_known() {
            return Err(OpenError::Nameless(nsid));
        }
        let namespace = Rc::new(Self {
            paths: RefCell::default(),
            policy,
            last: Cell::new(0),
            nsid,
            described: Cell::new(described),
            patience: controllers.first().map_or(Duration::ZERO, |c| c.options().patience),
            gone: Cell::new(None),
            changed: Notify::new(),
            watchers: RefCell::default(),
        });
        controllers.iter().for_each(|controller| namespace.add(controller));
        Ok(namespace)
    }

    /// Another controller of the subsystem: a path as soon as it is seen to lead to this volume.
    pub fn add(self: &Rc<Self>, controller: &Controller) {
        let path = Rc::new(Path::new(controller.clone()));
        let watcher = watch(Rc::downgrade(self), Rc::clone(&path));
        self.paths.borrow_mut().push(path);
        let watcher = AbortOnDropHandle::new(tokio::task::spawn_local(watcher));
        self.watchers.borrow_mut().push(watcher);
    }

    /// What it is.
    #[must_use]
    pub fn described(&self) -> Described {
        self.described.get()
    }

    /// Why every operation fails, if it does.
    #[must_use]
    pub fn gone(&self) -> Option<Gone> {
        self.gone.get()
    }

    /// Reads the range at the controller and returns nothing. `ctx` has memory for the largest transfer.
    ///
    /// # Errors
    /// As [`Op::Read`].
    pub async fn verify(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let described = self.described.get();
        if described.verify_blocks > 0 {
            let most = described.verify_blocks;
            return self.without_data((NvmOpcode::Verify, 0), (at, blocks), most, ctx).await;
        }
        let most = described.info.max_transfer_blocks;
        for (at, piece) in pieces(at, blocks, most) {
            let data = Data::In(piece as usize * described.info.block_size as usize);
            let sqe = self.ranged(NvmOpcode::Read, at, piece, 0);
            self.carry_out(&Work { sqe, data, at }, ctx).await?;
        }
        Ok(())
    }

    /// Fails unless the contents from `at` on are `data`.
    ///
    /// # Errors
    /// [`CompareError`], but not [`CompareError::InDoubt`].
    pub async fn compare(&self, at: Lba, data: &Bufs, ctx: &Ctx) -> Result<(), CompareError> {
        let sqe = self.transfer(NvmOpcode::Compare, at, data.len(), 0);
        match self.carry_out(&Work { sqe, data: Data::Out(data), at }, ctx).await {
            Ok(_) => Ok(()),
            Err(Ended::Differs) => Err(CompareError::Differs),
            Err(Ended::With(error)) => Err(error.into()),
        }
    }

    /// Replaces the contents from `at` on by `write` if they are `compare`, which is as long, in one step
    /// (NVMe Base 2.0, 3.4.2). It is sent once; when it is said to be in doubt, whatever was to become of it
    /// has become of it.
    ///
    /// # Errors
    /// [`CompareError`].
    pub async fn compare_and_write(
        &self,
        at: Lba,
        (compare, write): (&Bufs, &Bufs),
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), CompareError> {
        let taken = self.ready(Instant::now() + self.patience).await?;
        let live = &taken.live;
        if !live.abilities.compare_and_write || compare.len() != write.len() {
            return Err(CompareError::Unsupported);
        }
        let pair = live.queue().pair().await;
        let Some(pair) = pair.filter(|_| taken.is_still()) else {
            return Err(Error::Fenced.into());
        };
        let timeout = Some(taken.path.controller.options().command_timeout);
        let half = |opcode, fuse, data, bits| {
            let mut sqe = taken.path.forced(self.transfer(opcode, at, compare.len(), bits));
            sqe.flags |= fuse;
            Command { sqe, payload: payload(Data::Out(data), ctx), timeout }
        };
        let fua = if fua { FUA } else { 0 };
        let first = half(NvmOpcode::Compare, FUSE_FIRST, compare, 0);
        let second = half(NvmOpcode::Write, FUSE_SECOND, write, fua);
        let (first, second) = pair.submit(first, second).await;
        if first.outcome == Err(Lost::InDoubt) || second.outcome == Err(Lost::InDoubt) {
            self.outlast(live.in_doubt_for()).await;
        }
        match (first.outcome, second.outcome) {
            (Ok(a), Ok(b)) if a.status.is_success() && b.status.is_success() => {
                if [first.moved, second.moved].iter().all(|n| *n as usize == compare.len()) {
                    taken.path.has_written();
                    return Ok(());
                }
                let why = "a compare and write succeeded without all of its data";
                taken.path.controller.give_up(live, why);
                Err(CompareError::InDoubt)
            }
            (Ok(a), _) if a.status.code() == Status::COMPARE_FAILURE => Err(CompareError::Differs),
            (Err(Lost::Unsent), Err(Lost::Unsent)) => Err(Error::Fenced.into()),
            (Err(_), _) | (_, Err(_)) => Err(CompareError::InDoubt),
            (Ok(a), Ok(b)) => Err(fused_failure(a, b, at)),
        }
    }

    /// A command of the range from `at` on that `length` bytes of data are.
    fn transfer(&self, opcode: NvmOpcode, at: Lba, length: usize, bits: u32) -> Sqe {
        let block_size = self.described.get().info.block_size as usize;
        let blocks = u32::try_from(length / block_size).unwrap_or(u32::MAX);
        self.ranged(opcode, at, blocks, bits)
    }

    fn ranged(&self, opcode: NvmOpcode, at: Lba, blocks: u32, bits: u32) -> Sqe {
        let mut sqe = Sqe::new(opcode.0, 0, self.nsid);
        sqe.cdw10[0] = low(at.0).into();
        sqe.cdw10[1] = low(at.0 >> 32).into();
        sqe.cdw10[2] = (blocks.saturating_sub(1) & 0xffff | bits).into();
        sqe
    }

    /// A command without data for a range of any length, in pieces.
    async fn without_data(
        &self,
        (opcode, bits): (NvmOpcode, u32),
        (at, blocks): (Lba, u32),
        most: u32,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        for (at, piece) in pieces(at, blocks, most) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let sqe = self.ranged(opcode, at, piece, bits);
            self.carry_out(&Work { sqe, data: Data::None, at }, ctx).await?;
        }
        Ok(())
    }

    async fn zero(
        &self,
        (at, blocks): (Lba, u32),
        unmap: bool,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let Described { info, zero_blocks, frees_by_zeroing, .. } = self.described.get();
        if zero_blocks > 0 {
            let bits = if unmap && frees_by_zeroing { DEAC } else { 0 } | if fua { FUA } else { 0 };
            let command = (NvmOpcode::WriteZeroes, bits);
            return self.without_data(command, (at, blocks), zero_blocks, ctx).await;
        }
        for (at, piece) in pieces(at, blocks, info.max_transfer_blocks) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let data = Bufs::zeroes(piece as usize * info.block_size as usize);
            self.write(at, &data, fua, ctx).await?;
        }
        Ok(())
    }

    async fn unmap(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let described = self.described.get();
        if described.frees_by_zeroing {
            return self.zero((at, blocks), true, false, ctx).await;
        }
        if described.info.unmap_granularity_blocks == 0 {
            return Ok(());
        }
        /// Dword 11: deallocate.
        const DEALLOCATE: u32 = 1 << 2;
        for (at, piece) in pieces(at, blocks, described.discard_blocks) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&piece.to_le_bytes());
            range[8..].copy_from_slice(&at.0.to_le_bytes());
            let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, self.nsid);
            sqe.cdw10[1] = DEALLOCATE.into();
            let data = rt::buf::copy_in(ctx.credit(), &range);
            self.carry_out(&Work { sqe, data: Data::Out(&data), at }, ctx).await?;
        }
        Ok(())
    }

    async fn write(&self, at: Lba, data: &Bufs, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let bits = if fua { FUA } else { 0 };
        let sqe = self.transfer(NvmOpcode::Write, at, data.len(), bits);
        self.carry_out(&Work { sqe, data: Data::Out(data), at }, ctx).await?;
        Ok(())
    }

    /// A flush that fails is the end: it is never tried again and believed. Each path by which something was
    /// written has its own; what was written by one that is lost is covered by that of another, or of the same
    /// controller when it is back (RFD 0027, 4).
    async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let sqe = Sqe::new(NvmOpcode::Flush.0, 0, self.nsid);
        debug_assert_ne!(self.nsid, NSID_ALL);
        let work = Work { sqe, data: Data::None, at: Lba(0) };
        let paths = self.paths.borrow().clone();
        let written: Vec<_> = paths.iter().filter_map(|p| Some((p, p.to_flush()?))).collect();
        let mut is_covered = !written.is_empty();
        for (path, _) in &written {
            is_covered &= self.flush_by(path, &work, ctx).await?;
        }
        if !is_covered {
            match self.carry_out(&work, ctx).await {
                Ok(_) => {}
                Err(Ended::With(Error::Aborted)) => return Err(Error::Aborted),
                Err(_) => return Err(self.fail("a flush has failed")),
            }
        }
        written.iter().for_each(|(path, written)| path.has_flushed(*written));
        Ok(())
    }

    /// Flushes by this path; whether it did. If not, it was lost, or is none now.
    async fn flush_by(&self, path: &Rc<Path>, work: &Work<'_>, ctx: &Ctx) -> Result<bool, Error> {
        let Some(taken) = path.take() else { return Ok(false) };
        let Some(reply) = send(&taken, work, ctx).await else { return Ok(false) };
        match self.judge(work, &reply, &taken) {
            Ok(Verdict::Done) => Ok(true),
            Ok(Verdict::Again { .. } | Verdict::InDoubt(_) | Verdict::Few { .. }) => Ok(false),
            Ok(Verdict::Failed(_)) | Err(_) => Err(self.fail("a flush has failed")),
        }
    }
}

/// How a command has ended that has not succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// A comparison has found a difference.
    Differs,
    With(Error),
}

impl From<Ended> for Error {
    fn from(ended: Ended) -> Self {
        match ended {
            // Of commands that compare nothing: the controller makes no sense.
            Ended::Differs => Self::Gone,
            Ended::With(error) => error,
        }
    }
}

impl Namespace {
    /// Sends a command until it has an answer that stays.
    async fn carry_out(&self, work: &Work<'_>, ctx: &Ctx) -> Result<Bufs, Ended> {
        let (mut until, mut tries, mut may_be_done) = (None, 0, false);
        let mut last_chance = false;
        loop {
            let deadline = until.unwrap_or_else(|| Instant::now() + self.patience);
            let taken = self.ready(deadline).await.map_err(Ended::With)?;
            let Some(reply) = send(&taken, work, ctx).await else {
                until.get_or_insert(deadline);
                continue;
            };
            match self.judge(work, &reply, &taken)? {
                Verdict::Done => {
                    if work.changes() {
                        taken.path.has_written();
                    }
                    return Ok(reply.buffers.into());
                }
                Verdict::Failed(error) => return Err(Ended::With(error)),
                Verdict::Few { error, look } => {
                    tries += 1;
                    if tries >= TRIES {
                        return Err(Ended::With(error));
                    }
                    if look {
                        taken.path.doubt();
                    }
                    taken.path.rest(Instant::now() + PAUSE);
                }
                Verdict::Again { pause: true } => taken.path.rest(Instant::now() + PAUSE),
                // Those who keep the controller have to see what has happened.
                Verdict::Again { pause: false } => rt::give_way().await,
                // From now on it cannot be abandoned: what its range holds would not stay.
                Verdict::InDoubt(time) => {
                    may_be_done = true;
                    self.outlast(time).await;
                    // It could not be sent again before: patience that has run out meanwhile ends with one attempt more. Not
                    // where it may happen yet.
                    let next = Instant::now() + PAUSE;
                    if next > deadline && time < Duration::MAX && !last_chance {
                        last_chance = true;
                        until = Some(next);
                    }
                }
            }
            drop(taken);
            if ctx.is_aborted() && !may_be_done {
                return Err(Ended::With(Error::Aborted));
            }
            if Instant::now() >= *until.get_or_insert(deadline) {
                return Err(Ended::With(self.is_away("no path has been of use for too long")));
            }
        }
    }

    /// Waits until what is in doubt cannot happen any more; where nobody knows when that is, as long as anybody
    /// waits for anything.
    async fn outlast(&self, time: Duration) {
        sleep(if time == Duration::MAX { self.patience } else { time }).await;
    }

    /// What an answer means for a command.
    fn judge(&self, work: &Work<'_>, reply: &Reply, taken: &Taken) -> Result<Verdict, Ended> {
        let completion = match reply.outcome {
            Err(Lost::InDoubt) if work.changes() => {
                return Ok(Verdict::InDoubt(taken.live.in_doubt_for()));
            }
            Err(Lost::Unsent | Lost::InDoubt) => return Ok(Verdict::Again { pause: false }),
            Ok(completion) => completion,
        };
        if completion.status.code() == Status::COMPARE_FAILURE {
            return Err(Ended::Differs);
        }
        let verdict = verdict(completion.status, work.at, matches!(work.data, Data::Out(_)));
        if verdict == Verdict::Done && reply.moved as usize != work.data.len() {
            // The rest of a read's memory is anybody's old data, and that of a write is not written.
            let controller = &taken.path.controller;
            controller.give_up(&taken.live, "a command succeeded without all of its data");
            return Ok(Verdict::Again { pause: false });
        }
        let flushes = work.sqe.opcode == NvmOpcode::Flush.0;
        if flushes && verdict != Verdict::Done && !was_not_done(completion.status) {
            return Ok(Verdict::Failed(self.fail("a flush has failed")));
        }
        if verdict == Verdict::Failed(Error::Gone) {
            self.fail("the controller says that it has failed");
        }
        Ok(verdict)
    }

    /// A path through which this is the volume that it was.
    async fn ready(&self, until: Instant) -> Result<Taken, Error> {
        let mut any = false;
        loop {
            if self.gone.get().is_some() {
                return Err(Error::Gone);
            }
            let changed = self.changed.notified();
            if let Some(taken) = take(&self.paths.borrow(), self.policy, &self.last, any) {
                return Ok(taken);
            }
            if self.paths.borrow().iter().all(|path| path.is_hopeless()) {
                return Err(self.is_away("no path leads to it any more"));
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.is_away("there has been no path for too long"));
            }
            // Time that has run out is as good a reason to look again.
            any = timeout_at(until.min(now + PAUSE), changed).await.is_err();
        }
    }

    /// What has been found at the end of a path.
    fn found(&self, path: &Path, now: Option<&Described>, generation: u64) {
        let described = self.described.get();
        path.found(now, &described, generation);
        if let (Some(now), Seen::Same) = (now, path.seen()) {
            self.described.set(described.grown(now));
        }
        self.changed.notify_waiters();
    }

    /// From now on every operation fails, for what is lost.
    fn fail(&self, why: &'static str) -> Error {
        self.end(Gone { why, away: false })
    }

    /// From now on every operation fails, for no path is of use. One that leads to another volume is no reason to look for
    /// this one there.
    fn is_away(&self, why: &'static str) -> Error {
        let away = !self.paths.borrow().iter().any(|path| path.leads_elsewhere());
        self.end(Gone { why, away })
    }

    fn end(&self, gone: Gone) -> Error {
        if self.gone.get().is_none() {
            self.gone.set(Some(gone));
            let paths = self.paths.borrow();
            let controllers: Vec<_> = paths.iter().map(|p| &p.controller).collect();
            warn!("namespace {} by {controllers:?}: {}", self.nsid, gone.why);
            self.changed.notify_waiters();
        }
        Error::Gone
    }
}

/// Sends a command by a path that has been taken. `None` where the path has become another one while there was no
/// room for it: nothing was sent.
async fn send(taken: &Taken, work: &Work<'_>, ctx: &Ctx) -> Option<Reply> {
    let place = taken.live.queue().place().await;
    if !taken.is_still() {
        return None;
    }
    let Some(place) = place else { return Some(Reply::unsent()) };
    let timeout = Some(taken.path.controller.options().command_timeout);
    let (sqe, payload) = (taken.path.forced(work.sqe), payload(work.data, ctx));
    Some(place.submit(Command { sqe, payload, timeout }).await)
}

/// Looks at what is at the end of a path whenever that may have changed: nothing is sent there before it is
/// known, and a volume that has grown is used beyond its old end only then.
async fn watch(namespace: Weak<Namespace>, path: Rc<Path>) {
    let controller = &path.controller;
    let Some(nsid) = namespace.upgrade().map(|n| n.nsid) else { return };
    loop {
        let generation = controller.generation();
        if !path.is_known()
            && let Some(live) = controller.live()
        {
            let found = live.describe(nsid).await;
            let Some(namespace) = namespace.upgrade() else { return };
            match found {
                Ok(now) => namespace.found(&path, now.as_ref(), generation),
                // The controller is about to be another one.
                Err(Failed::Lost(_)) => {}
                Err(_) => {
                    drop(namespace);
                    controller.pause(Instant::now() + PAUSE).await;
                    continue;
                }
            }
        }
        let again = async {
            match path.is_not_now() {
                true => sleep(PAUSE).await,
                false => std::future::pending().await,
            }
        };
        let is_over = tokio::select! {
            biased;
            next = controller.changed(generation) => next.is_none(),
            () = path.doubted.notified() => false,
            () = again => {
                path.doubt();
                false
            }
        };
        let Some(namespace) = namespace.upgrade() else { return };
        namespace.changed.notify_waiters();
        if is_over {
            return;
        }
    }
}

/// What a status means (NVMe Base 2.0, 3.3.3.2.1).
fn verdict(status: Status, at: Lba, writes: bool) -> Verdict {
    /// Status code type: media and data integrity errors; path related.
    const MEDIA: u16 = 2;
    const PATH: u16 = 3;
    if status.is_success() {
        return Verdict::Done;
    }
    let code = status.code();
    let kind = code.field() >> 8;
    let unusable = if writes { Error::Unwritable { at } } else { Error::Unreadable { at } };
    match code {
        Status::LBA_OUT_OF_RANGE => return Verdict::Few { error: Error::OutOfRange, look: true },
        Status::INVALID_NAMESPACE | Status::INVALID_FIELD => {
            return Verdict::Few { error: unusable, look: true };
        }
        Status::CAPACITY_EXCEEDED => return Verdict::Failed(Error::NoSpace),
        Status::WRITE_PROTECTED => return Verdict::Failed(Error::ReadOnly),
        Status::RESERVATION_CONFLICT => return Verdict::Failed(unusable),
        _ => {}
    }
    match (kind, status.is_final()) {
        (MEDIA, false) => Verdict::Few { error: unusable, look: false },
        (PATH, _) | (_, false) => Verdict::Again { pause: true },
        (_, true) if code == Status::INTERNAL_ERROR => Verdict::Failed(Error::Gone),
        (_, true) => Verdict::Failed(unusable),
    }
}

/// Whether a status says that nothing was done. A Flush that was begun and failed may have left out what could not be
/// written; the next one has nothing to do, and succeeds.
fn was_not_done(status: Status) -> bool {
    /// Status code type: path related.
    const PATH: u16 = 3;
    let not_yet = [
        // It is not there, or not there any more, as far as this controller knows.
        Status::INVALID_NAMESPACE,
        Status::ABORT_REQUESTED,
        Status::ABORTED_SQ_DELETED,
        Status::INTERRUPTED,
        Status::TRANSIENT_TRANSPORT,
        Status::NAMESPACE_NOT_READY,
    ];
    status.code().field() >> 8 == PATH || not_yet.contains(&status.code())
}

/// Why a Compare and Write was refused: by the half that failed by itself.
fn fused_failure(first: Completion, second: Completion, at: Lba) -> CompareError {
    let own = |c: &&Completion| !c.status.is_success() && c.status.code() != Status::FAILED_FUSED;
    let Some(failed) = [first, second].iter().find(own).copied() else {
        return CompareError::Unsupported;
    };
    match failed.status.code() {
        Status::INVALID_OPCODE | Status::INVALID_FIELD | Status::ATOMIC_WRITE_UNIT => {
            CompareError::Unsupported
        }
        _ => match verdict(failed.status, at, true) {
            Verdict::Failed(error) | Verdict::Few { error, .. } => error.into(),
            Verdict::Done | Verdict::Again { .. } | Verdict::InDoubt(_) => Error::Fenced.into(),
        },
    }
}

impl Layer for Namespace {
    fn name(&self) -> &'static str {
        "nvme"
    }

    fn info(&self) -> Info {
        self.described.get().info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let ctx = &ctx;
        let done = match op {
            Op::Read { at, blocks } => {
                let bytes = blocks as usize * self.info().block_size as usize;
                let sqe = self.ranged(NvmOpcode::Read, at, blocks, 0);
                let work = Work { sqe, data: Data::In(bytes), at };
                return Ok(self.carry_out(&work, ctx).await?);
            }
            // Nobody tells a host which blocks have space behind them.
            Op::Map { blocks, .. } => return Ok(Run { blocks, mapped: true }.into_bufs(ctx)),
            Op::Write { at, data, fua } => self.write(at, &data, fua, ctx).await,
            Op::Zero { at, blocks, unmap, fua } => self.zero((at, blocks), unmap, fua, ctx).await,
            Op::Unmap { at, blocks } => self.unmap(at, blocks, ctx).await,
            Op::Flush => self.flush(ctx).await,
        };
        done.map(|()| Bufs::new())
    }
}
