//! A namespace as a layer, through one controller or several.
//!
//! Operations choose a path, wait while there is none, and are retried where that is safe: no two
//! overlapping operations are in flight, so executing one twice does no harm. A change in doubt is
//! sent again once its first copy can no longer take effect (RFD 0027).
//! [`Namespace::compare_and_write`] is never retried. After a namespace has failed permanently,
//! every later operation fails.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use ::nvme::entry::{NSID_ALL, NvmOpcode};
use ::nvme::host::{Command, LostCommand, Payload};
use ::nvme::{Completion, Sqe, Status};
use block::{BlockStatus, Bufs, Ctx, Error, Info, Layer, Lba, Op};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::admin::{AdminError, low};
use super::controller::Controller;
use super::identity::{NamespaceDescription, PathIdentity};
use super::paths::{AcquiredPath, FUA, Path, PathPolicy, select_path};
use super::queue::Reply;
pub use crate::commands::CompareError;
use crate::commands::{CommandData, MAX_TRIES, RETRY_PAUSE, split_range};

/// Dword 12 of Write Zeroes: may deallocate.
const DEAC: u32 = 1 << 25;

/// FUSE, of the first and the second half.
const FUSE_FIRST: u8 = 0b01;
const FUSE_SECOND: u8 = 0b10;

/// Why a namespace cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// No such namespace, or it cannot be used: it has metadata or an unsupported block size.
    #[error("there is no usable namespace {0}")]
    Unusable(u32),
    /// It has no identifier that identifies its volume.
    #[error("namespace {0} has neither UUID nor NGUID nor EUI-64")]
    NoIdentity(u32),
    /// Controllers have different volumes under this namespace identifier.
    #[error("namespace {0} is a different volume at another controller")]
    Different(u32),
    /// The controller did not answer the queries.
    #[error("{0}")]
    Failed(#[from] AdminError),
}

/// Why a namespace fails every operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceGone {
    /// The reason, for humans.
    pub reason: &'static str,
    /// Whether it is merely unreachable: no data is known to be lost, and no path is known to lead
    /// to another volume. Opening it again may succeed.
    pub is_unreachable: bool,
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    paths: RefCell<Vec<Rc<Path>>>,
    policy: PathPolicy,
    /// Index of the path used last.
    last_path: Cell<usize>,
    nsid: u32,
    described: Cell<NamespaceDescription>,
    retry_timeout: Duration,
    gone: Cell<Option<NamespaceGone>>,
    /// Notified when the state of a path may have changed.
    changed: Notify,
    watchers: RefCell<Vec<AbortOnDropHandle<()>>>,
}

/// One command, with its retries.
struct NamespaceCommand<'a> {
    sqe: Sqe,
    data: CommandData<'a>,
    /// First block, for errors.
    at: Lba,
}

impl NamespaceCommand<'_> {
    /// Whether it changes stored data. Once it may have taken effect, or still may, it can no
    /// longer be abandoned: the contents of the range must stay stable.
    fn changes(&self) -> bool {
        let changing = [NvmOpcode::Write, NvmOpcode::WriteZeroes, NvmOpcode::DatasetManagement];
        changing.iter().any(|opcode| opcode.0 == self.sqe.opcode)
    }
}

fn payload(data: CommandData<'_>, ctx: &Ctx) -> Payload {
    match data {
        CommandData::None => Payload::None,
        CommandData::Out(data) => Payload::ToController(data.clone()),
        CommandData::In(length) => Payload::ToHost(ctx.alloc(length)),
    }
}

/// What to do after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatusAction {
    Done,
    /// Retry, at once or after a pause, once more or until the timeout.
    Retry {
        pause: bool,
    },
    /// Retry after this time; until then the first copy may still take effect.
    InDoubt(Duration),
    /// Retry a few times, after verifying the namespace if it may be another one.
    RetryLimited {
        error: Error,
        verify: bool,
    },
    Failed(Error),
}

impl Namespace {
    /// Opens a namespace of one controller, which has to remain the same volume.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(controller: &Controller, nsid: u32) -> Result<Rc<Self>, OpenError> {
        Self::open_multipath(std::slice::from_ref(controller), nsid, PathPolicy::default()).await
    }

    /// Opens a namespace through several controllers of a subsystem, at least one of which must be
    /// reachable. The first one's options set how long a command waits while there is no path.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open_multipath(
        controllers: &[Controller],
        nsid: u32,
        policy: PathPolicy,
    ) -> Result<Rc<Self>, OpenError> {
        let (mut described, mut failed) = (None::<NamespaceDescription>, OpenError::Unusable(nsid));
        for controller in controllers {
            match (controller.describe(nsid).await, described) {
                (Ok(Some(now)), None) => described = Some(now),
                (Ok(Some(now)), Some(known)) if now.identity == known.identity => {
                    described = Some(known.intersection(&now));
                }
                (Ok(Some(_)), Some(_)) => return Err(OpenError::Different(nsid)),
                (Ok(None), _) => {}
                (Err(e), _) => failed = e.into(),
            }
        }
        let described = described.ok_or(failed)?;
        if !described.identity.is_known() {
            return Err(OpenError::NoIdentity(nsid));
        }
        let namespace = Rc::new(Self {
            paths: RefCell::default(),
            policy,
            last_path: Cell::new(0),
            nsid,
            described: Cell::new(described),
            retry_timeout: controllers
                .first()
                .map_or(Duration::ZERO, |c| c.options().retry_timeout),
            gone: Cell::new(None),
            changed: Notify::new(),
            watchers: RefCell::default(),
        });
        controllers.iter().for_each(|controller| namespace.add_path(controller));
        Ok(namespace)
    }

    /// Adds a controller of the subsystem: a path once it is verified to lead to this volume.
    pub fn add_path(self: &Rc<Self>, controller: &Controller) {
        let path = Rc::new(Path::new(controller.clone()));
        let watcher = watch(Rc::downgrade(self), Rc::clone(&path));
        self.paths.borrow_mut().push(path);
        let watcher = AbortOnDropHandle::new(tokio::task::spawn_local(watcher));
        self.watchers.borrow_mut().push(watcher);
    }

    /// Its identity and attributes.
    #[must_use]
    pub fn described(&self) -> NamespaceDescription {
        self.described.get()
    }

    /// Why every operation fails, if so.
    #[must_use]
    pub fn gone(&self) -> Option<NamespaceGone> {
        self.gone.get()
    }

    /// Has the controller read the range without returning data. `ctx` has memory for the largest
    /// transfer.
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
        for (at, piece) in split_range(at, blocks, most) {
            let data = CommandData::In(piece as usize * described.info.block_size as usize);
            let sqe = self.ranged(NvmOpcode::Read, at, piece, 0);
            self.execute(&NamespaceCommand { sqe, data, at }, ctx).await?;
        }
        Ok(())
    }

    /// Fails unless the contents from `at` on are `data`.
    ///
    /// # Errors
    /// [`CompareError`], but not [`CompareError::InDoubt`].
    pub async fn compare(&self, at: Lba, data: &Bufs, ctx: &Ctx) -> Result<(), CompareError> {
        let sqe = self.transfer(NvmOpcode::Compare, at, data.len(), 0);
        match self.execute(&NamespaceCommand { sqe, data: CommandData::Out(data), at }, ctx).await {
            Ok(_) => Ok(()),
            Err(CommandEnd::Miscompare) => Err(CompareError::Miscompare),
            Err(CommandEnd::With(error)) => Err(error.into()),
        }
    }

    /// Atomically replaces the contents from `at` on by `write` if they equal `compare`, which has
    /// the same length (NVMe Base 2.0, 3.4.2). Never retried; when it returns in doubt, the command
    /// can no longer take effect later.
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
        let taken = self.acquire_path(Instant::now() + self.retry_timeout).await?;
        let live = &taken.live;
        if !live.capabilities.compare_and_write || compare.len() != write.len() {
            return Err(CompareError::Unsupported);
        }
        let pair = live.queue().reserve_pair().await;
        let Some(pair) = pair.filter(|_| taken.is_valid()) else {
            return Err(Error::Fenced.into());
        };
        let timeout = Some(taken.path.controller.options().command_timeout);
        let half = |opcode, fuse, data, bits| {
            let mut sqe = taken.path.with_fua(self.transfer(opcode, at, compare.len(), bits));
            sqe.flags |= fuse;
            Command { sqe, payload: payload(CommandData::Out(data), ctx), timeout }
        };
        let fua = if fua { FUA } else { 0 };
        let first = half(NvmOpcode::Compare, FUSE_FIRST, compare, 0);
        let second = half(NvmOpcode::Write, FUSE_SECOND, write, fua);
        let (first, second) = pair.submit(first, second).await;
        if first.outcome == Err(LostCommand::InDoubt) || second.outcome == Err(LostCommand::InDoubt)
        {
            self.wait_in_doubt(live.in_doubt_for()).await;
        }
        match (first.outcome, second.outcome) {
            (Ok(a), Ok(b)) if a.status.is_success() && b.status.is_success() => {
                if [first.transferred, second.transferred]
                    .iter()
                    .all(|n| *n as usize == compare.len())
                {
                    taken.path.record_write();
                    return Ok(());
                }
                let why = "a compare and write succeeded without all of its data";
                taken.path.controller.fail_connection(live, why);
                Err(CompareError::InDoubt)
            }
            (Ok(a), _) if a.status.code() == Status::COMPARE_FAILURE => {
                Err(CompareError::Miscompare)
            }
            (Err(LostCommand::Unsent), Err(LostCommand::Unsent)) => Err(Error::Fenced.into()),
            (Err(_), _) | (_, Err(_)) => Err(CompareError::InDoubt),
            (Ok(a), Ok(b)) => Err(fused_failure(a, b, at)),
        }
    }

    /// A command for the range from `at` on that `length` bytes of data fill.
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

    /// Sends a command without data for a range of any length, in pieces.
    async fn without_data(
        &self,
        (opcode, bits): (NvmOpcode, u32),
        (at, blocks): (Lba, u32),
        most: u32,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        for (at, piece) in split_range(at, blocks, most) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let sqe = self.ranged(opcode, at, piece, bits);
            self.execute(&NamespaceCommand { sqe, data: CommandData::None, at }, ctx).await?;
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
        let NamespaceDescription { info, zero_blocks, frees_by_zeroing, .. } = self.described.get();
        if zero_blocks > 0 {
            let bits = if unmap && frees_by_zeroing { DEAC } else { 0 } | if fua { FUA } else { 0 };
            let command = (NvmOpcode::WriteZeroes, bits);
            return self.without_data(command, (at, blocks), zero_blocks, ctx).await;
        }
        for (at, piece) in split_range(at, blocks, info.max_transfer_blocks) {
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
        for (at, piece) in split_range(at, blocks, described.discard_blocks) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&piece.to_le_bytes());
            range[8..].copy_from_slice(&at.0.to_le_bytes());
            let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, self.nsid);
            sqe.cdw10[1] = DEALLOCATE.into();
            let data = rt::buf::copy_in(ctx.credit(), &range);
            self.execute(&NamespaceCommand { sqe, data: CommandData::Out(&data), at }, ctx).await?;
        }
        Ok(())
    }

    async fn write(&self, at: Lba, data: &Bufs, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let bits = if fua { FUA } else { 0 };
        let sqe = self.transfer(NvmOpcode::Write, at, data.len(), bits);
        self.execute(&NamespaceCommand { sqe, data: CommandData::Out(data), at }, ctx).await?;
        Ok(())
    }

    /// A failed flush fails the namespace: a repeated one could falsely succeed. Each path that was
    /// written through is flushed; for a lost path, a flush through another one, or through the
    /// same controller after it reconnects, covers its writes (RFD 0027, 4).
    async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let sqe = Sqe::new(NvmOpcode::Flush.0, 0, self.nsid);
        debug_assert_ne!(self.nsid, NSID_ALL);
        let work = NamespaceCommand { sqe, data: CommandData::None, at: Lba(0) };
        let paths = self.paths.borrow().clone();
        let written: Vec<_> =
            paths.iter().filter_map(|p| Some((p, p.unflushed_writes()?))).collect();
        let mut is_covered = !written.is_empty();
        for (path, _) in &written {
            is_covered &= self.flush_by(path, &work, ctx).await?;
        }
        if !is_covered {
            match self.execute(&work, ctx).await {
                Ok(_) => {}
                Err(CommandEnd::With(Error::Aborted)) => return Err(Error::Aborted),
                Err(_) => return Err(self.fail("a flush failed")),
            }
        }
        written.iter().for_each(|(path, written)| path.record_flush(*written));
        Ok(())
    }

    /// Flushes through this path. Returns `false` if the path was lost or is unusable.
    async fn flush_by(
        &self,
        path: &Rc<Path>,
        work: &NamespaceCommand<'_>,
        ctx: &Ctx,
    ) -> Result<bool, Error> {
        let Some(taken) = path.acquire() else { return Ok(false) };
        let Some(reply) = send(&taken, work, ctx).await else { return Ok(false) };
        match self.evaluate(work, &reply, &taken) {
            Ok(StatusAction::Done) => Ok(true),
            Ok(
                StatusAction::Retry { .. }
                | StatusAction::InDoubt(_)
                | StatusAction::RetryLimited { .. },
            ) => Ok(false),
            Ok(StatusAction::Failed(_)) | Err(_) => Err(self.fail("a flush failed")),
        }
    }
}

/// How a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandEnd {
    /// A comparison found a difference.
    Miscompare,
    With(Error),
}

impl From<CommandEnd> for Error {
    fn from(ended: CommandEnd) -> Self {
        match ended {
            // For commands that compare nothing: an invalid response.
            CommandEnd::Miscompare => Self::Gone,
            CommandEnd::With(error) => error,
        }
    }
}

impl Namespace {
    /// Sends a command until it has a final answer.
    async fn execute(&self, work: &NamespaceCommand<'_>, ctx: &Ctx) -> Result<Bufs, CommandEnd> {
        let (mut until, mut tries, mut may_be_done) = (None, 0, false);
        let mut last_chance = false;
        loop {
            let deadline = until.unwrap_or_else(|| Instant::now() + self.retry_timeout);
            let taken = self.acquire_path(deadline).await.map_err(CommandEnd::With)?;
            let Some(reply) = send(&taken, work, ctx).await else {
                until.get_or_insert(deadline);
                continue;
            };
            match self.evaluate(work, &reply, &taken)? {
                StatusAction::Done => {
                    if work.changes() {
                        taken.path.record_write();
                    }
                    return Ok(reply.buffers.into());
                }
                StatusAction::Failed(error) => return Err(CommandEnd::With(error)),
                StatusAction::RetryLimited { error, verify: look } => {
                    tries += 1;
                    if tries >= MAX_TRIES {
                        return Err(CommandEnd::With(error));
                    }
                    if look {
                        taken.path.mark_unverified();
                    }
                    taken.path.set_avoid_until(Instant::now() + RETRY_PAUSE);
                }
                StatusAction::Retry { pause: true } => {
                    taken.path.set_avoid_until(Instant::now() + RETRY_PAUSE);
                }
                // Let the controller's tasks notice what happened.
                StatusAction::Retry { pause: false } => rt::yield_to_ready_tasks().await,
                // From now on it cannot be abandoned: the contents of its range would change later.
                StatusAction::InDoubt(time) => {
                    may_be_done = true;
                    self.wait_in_doubt(time).await;
                    // It could not be retried earlier: if the timeout has passed meanwhile, one
                    // more attempt is made. Not while the first copy may still take effect.
                    let next = Instant::now() + RETRY_PAUSE;
                    if next > deadline && time < Duration::MAX && !last_chance {
                        last_chance = true;
                        until = Some(next);
                    }
                }
            }
            drop(taken);
            if ctx.is_aborted() && !may_be_done {
                return Err(CommandEnd::With(Error::Aborted));
            }
            if Instant::now() >= *until.get_or_insert(deadline) {
                return Err(CommandEnd::With(
                    self.fail_unreachable("no usable path within the retry timeout"),
                ));
            }
        }
    }

    /// Waits until commands in doubt can no longer take effect; without a known bound, for the
    /// retry timeout.
    async fn wait_in_doubt(&self, time: Duration) {
        sleep(if time == Duration::MAX { self.retry_timeout } else { time }).await;
    }

    /// What to do after this answer.
    fn evaluate(
        &self,
        work: &NamespaceCommand<'_>,
        reply: &Reply,
        taken: &AcquiredPath,
    ) -> Result<StatusAction, CommandEnd> {
        let completion = match reply.outcome {
            Err(LostCommand::InDoubt) if work.changes() => {
                return Ok(StatusAction::InDoubt(taken.live.in_doubt_for()));
            }
            Err(LostCommand::Unsent | LostCommand::InDoubt) => {
                return Ok(StatusAction::Retry { pause: false });
            }
            Ok(completion) => completion,
        };
        if completion.status.code() == Status::COMPARE_FAILURE {
            return Err(CommandEnd::Miscompare);
        }
        let verdict =
            status_action(completion.status, work.at, matches!(work.data, CommandData::Out(_)));
        if verdict == StatusAction::Done && reply.transferred as usize != work.data.len() {
            // The rest of a read's buffer holds unrelated old data; the rest of a write is not
            // written.
            let controller = &taken.path.controller;
            controller.fail_connection(&taken.live, "a command succeeded without all of its data");
            return Ok(StatusAction::Retry { pause: false });
        }
        let flushes = work.sqe.opcode == NvmOpcode::Flush.0;
        if flushes && verdict != StatusAction::Done && !is_not_executed(completion.status) {
            return Ok(StatusAction::Failed(self.fail("a flush failed")));
        }
        if verdict == StatusAction::Failed(Error::Gone) {
            self.fail("the controller reports a failure");
        }
        Ok(verdict)
    }

    /// A path that is verified to lead to this volume.
    async fn acquire_path(&self, until: Instant) -> Result<AcquiredPath, Error> {
        let mut any = false;
        loop {
            if self.gone.get().is_some() {
                return Err(Error::Gone);
            }
            let changed = self.changed.notified();
            if let Some(taken) =
                select_path(&self.paths.borrow(), self.policy, &self.last_path, any)
            {
                return Ok(taken);
            }
            if self.paths.borrow().iter().all(|path| path.is_unusable()) {
                return Err(self.fail_unreachable("no path to it is left"));
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.fail_unreachable("no path within the retry timeout"));
            }
            // A timeout is as good a reason to check again.
            any = timeout_at(until.min(now + RETRY_PAUSE), changed).await.is_err();
        }
    }

    /// Records the verification result of a path.
    fn record_description(&self, path: &Path, now: Option<&NamespaceDescription>, generation: u64) {
        let described = self.described.get();
        path.record_identity(now, &described, generation);
        if let (Some(now), PathIdentity::Same) = (now, path.identity()) {
            self.described.set(described.with_size_of(now));
        }
        self.changed.notify_waiters();
    }

    /// Fails every operation from now on, because data is lost.
    fn fail(&self, why: &'static str) -> Error {
        self.set_gone(NamespaceGone { reason: why, is_unreachable: false })
    }

    /// Fails every operation from now on, because no path is usable. A path to another volume is no
    /// place to look for this one.
    fn fail_unreachable(&self, why: &'static str) -> Error {
        let away = !self.paths.borrow().iter().any(|path| path.is_different());
        self.set_gone(NamespaceGone { reason: why, is_unreachable: away })
    }

    fn set_gone(&self, gone: NamespaceGone) -> Error {
        if self.gone.get().is_none() {
            self.gone.set(Some(gone));
            let paths = self.paths.borrow();
            let controllers: Vec<_> = paths.iter().map(|p| &p.controller).collect();
            warn!("namespace {} by {controllers:?}: {}", self.nsid, gone.reason);
            self.changed.notify_waiters();
        }
        Error::Gone
    }
}

/// Sends a command through an acquired path. `None` if the path changed while waiting for a slot:
/// nothing was sent.
async fn send(taken: &AcquiredPath, work: &NamespaceCommand<'_>, ctx: &Ctx) -> Option<Reply> {
    let place = taken.live.queue().reserve().await;
    if !taken.is_valid() {
        return None;
    }
    let Some(place) = place else { return Some(Reply::unsent()) };
    let timeout = Some(taken.path.controller.options().command_timeout);
    let (sqe, payload) = (taken.path.with_fua(work.sqe), payload(work.data, ctx));
    Some(place.submit(Command { sqe, payload, timeout }).await)
}

/// Verifies a path whenever its namespace may have changed: nothing is sent before, and blocks
/// beyond the old end are used only after the growth is known.
async fn watch(namespace: Weak<Namespace>, path: Rc<Path>) {
    let controller = &path.controller;
    let Some(nsid) = namespace.upgrade().map(|n| n.nsid) else { return };
    loop {
        let generation = controller.generation();
        if !path.is_verified()
            && let Some(live) = controller.active()
        {
            let found = live.describe(nsid).await;
            let Some(namespace) = namespace.upgrade() else { return };
            match found {
                Ok(now) => namespace.record_description(&path, now.as_ref(), generation),
                // The controller is about to reconnect.
                Err(AdminError::Lost(_)) => {}
                Err(_) => {
                    drop(namespace);
                    controller.wait_change(Instant::now() + RETRY_PAUSE).await;
                    continue;
                }
            }
        }
        let again = async {
            match path.is_unavailable() {
                true => sleep(RETRY_PAUSE).await,
                false => std::future::pending().await,
            }
        };
        let is_over = tokio::select! {
            biased;
            next = controller.changed(generation) => next.is_none(),
            () = path.recheck.notified() => false,
            () = again => {
                path.mark_unverified();
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
fn status_action(status: Status, at: Lba, writes: bool) -> StatusAction {
    /// Status code type: media and data integrity errors; path related.
    const MEDIA: u16 = 2;
    const PATH: u16 = 3;
    if status.is_success() {
        return StatusAction::Done;
    }
    let code = status.code();
    let kind = code.field() >> 8;
    let unusable = if writes { Error::Unwritable { at } } else { Error::Unreadable { at } };
    match code {
        Status::LBA_OUT_OF_RANGE => {
            return StatusAction::RetryLimited { error: Error::OutOfRange, verify: true };
        }
        Status::INVALID_NAMESPACE | Status::INVALID_FIELD => {
            return StatusAction::RetryLimited { error: unusable, verify: true };
        }
        Status::CAPACITY_EXCEEDED => return StatusAction::Failed(Error::NoSpace),
        Status::WRITE_PROTECTED => return StatusAction::Failed(Error::ReadOnly),
        Status::RESERVATION_CONFLICT => return StatusAction::Failed(unusable),
        _ => {}
    }
    match (kind, status.is_do_not_retry()) {
        (MEDIA, false) => StatusAction::RetryLimited { error: unusable, verify: false },
        (PATH, _) | (_, false) => StatusAction::Retry { pause: true },
        (_, true) if code == Status::INTERNAL_ERROR => StatusAction::Failed(Error::Gone),
        (_, true) => StatusAction::Failed(unusable),
    }
}

/// Whether a status says that the command was not executed. A failed Flush may have dropped data
/// that could not be written; a repeated one would find nothing to do and succeed.
fn is_not_executed(status: Status) -> bool {
    /// Status code type: path related.
    const PATH: u16 = 3;
    let not_yet = [
        // The namespace does not exist (any more) at this controller.
        Status::INVALID_NAMESPACE,
        Status::ABORT_REQUESTED,
        Status::ABORTED_SQ_DELETED,
        Status::INTERRUPTED,
        Status::TRANSIENT_TRANSPORT,
        Status::NAMESPACE_NOT_READY,
    ];
    status.code().field() >> 8 == PATH || not_yet.contains(&status.code())
}

/// Why a Compare and Write was refused: the status of the half that failed by itself.
fn fused_failure(first: Completion, second: Completion, at: Lba) -> CompareError {
    let own = |c: &&Completion| !c.status.is_success() && c.status.code() != Status::FAILED_FUSED;
    let Some(failed) = [first, second].iter().find(own).copied() else {
        return CompareError::Unsupported;
    };
    match failed.status.code() {
        Status::INVALID_OPCODE | Status::INVALID_FIELD | Status::ATOMIC_WRITE_UNIT => {
            CompareError::Unsupported
        }
        _ => match status_action(failed.status, at, true) {
            StatusAction::Failed(error) | StatusAction::RetryLimited { error, .. } => error.into(),
            StatusAction::Done | StatusAction::Retry { .. } | StatusAction::InDoubt(_) => {
                Error::Fenced.into()
            }
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
                let work = NamespaceCommand { sqe, data: CommandData::In(bytes), at };
                return Ok(self.execute(&work, ctx).await?);
            }
            // Hosts cannot query allocation.
            Op::BlockStatus { blocks, .. } => {
                return Ok(BlockStatus { blocks, mapped: true }.into_bufs(ctx));
            }
            Op::Write { at, data, fua } => self.write(at, &data, fua, ctx).await,
            Op::Zero { at, blocks, unmap, fua } => self.zero((at, blocks), unmap, fua, ctx).await,
            Op::Unmap { at, blocks } => self.unmap(at, blocks, ctx).await,
            Op::Flush => self.flush(ctx).await,
        };
        done.map(|()| Bufs::new())
    }
}
