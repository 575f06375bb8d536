//! A namespace of one controller, as a layer.
//!
//! Operations wait for a controller that is away, and are sent again where that is right: no two of them
//! that overlap are in flight, so doing one twice does no harm. What may not be done twice,
//! [`Namespace::compare_and_write`], is not. Once a namespace has failed for good every later operation
//! fails as well.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use ::nvme::entry::{NSID_ALL, NvmOpcode};
use ::nvme::host::{Command, Lost, Payload};
use ::nvme::{Completion, Sqe, Status};
use block::{Bufs, Ctx, Error, Info, Layer, Lba, Op, Run};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::admin::{Failed, low};
use super::controller::{Absent, Controller};
use super::identity::Described;
use super::live::Live;
use super::queue::Reply;

/// Pause before a command that was refused for now is sent again.
const PAUSE: Duration = Duration::from_millis(100);

/// Times that a command is sent whose medium has failed, where the controller says that trying again may
/// help, or whose namespace may have become another one.
const TRIES: u32 = 3;

/// Dword 12: force unit access; Write Zeroes: may deallocate.
const FUA: u32 = 1 << 30;
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
    /// The controller did not tell.
    #[error("{0}")]
    Failed(#[from] Failed),
}

/// How a Compare, or a Compare and Write, has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// The contents are others.
    #[error("the contents differ")]
    Differs,
    /// Nobody knows whether it has been done: read, and see.
    #[error("the connection was lost; whether it was done is not known")]
    InDoubt,
    /// The controller does not know the command, or not of this length.
    #[error("the controller cannot do this")]
    Unsupported,
    /// The device failed it.
    #[error(transparent)]
    Device(#[from] Error),
}

/// A namespace.
#[derive(Debug)]
pub struct Namespace {
    controller: Controller,
    nsid: u32,
    described: Cell<Described>,
    /// The generation of the controller at which it was last seen to be the same volume.
    seen: Cell<u64>,
    looking: Mutex<()>,
    gone: Cell<bool>,
    watcher: RefCell<Option<AbortOnDropHandle<()>>>,
}

/// One command, to be sent as often as it takes.
struct Work<'a> {
    sqe: Sqe,
    data: Data<'a>,
    /// First block, for errors.
    at: Lba,
}

#[derive(Clone, Copy)]
enum Data<'a> {
    None,
    Out(&'a Bufs),
    In(usize),
}

impl Data<'_> {
    fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::Out(data) => data.len(),
            Self::In(length) => length,
        }
    }

    fn payload(self, ctx: &Ctx) -> Payload {
        match self {
            Self::None => Payload::None,
            Self::Out(data) => Payload::ToController(data.clone()),
            Self::In(length) => Payload::ToHost(ctx.alloc(length)),
        }
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
    /// A few more times, the namespace being looked at again if it may have become another one.
    Few {
        error: Error,
        look: bool,
    },
    Failed(Error),
}

impl Namespace {
    /// Opens a namespace: what it is now, it has to stay.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(controller: &Controller, nsid: u32) -> Result<Rc<Self>, OpenError> {
        let seen = controller.generation();
        let described = controller.describe(nsid).await?.ok_or(OpenError::Unusable(nsid))?;
        if !described.identity.is_known() {
            return Err(OpenError::Nameless(nsid));
        }
        let namespace = Rc::new(Self {
            controller: controller.clone(),
            nsid,
            described: Cell::new(described),
            seen: Cell::new(seen),
            looking: Mutex::new(()),
            gone: Cell::new(false),
            watcher: RefCell::new(None),
        });
        let watcher = watch(Rc::downgrade(&namespace), controller.clone());
        let watcher = AbortOnDropHandle::new(tokio::task::spawn_local(watcher));
        *namespace.watcher.borrow_mut() = Some(watcher);
        Ok(namespace)
    }

    /// What it is.
    #[must_use]
    pub fn described(&self) -> Described {
        self.described.get()
    }

    /// Its controller.
    #[must_use]
    pub fn controller(&self) -> &Controller {
        &self.controller
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
    /// (NVMe Base 2.0, 3.4.2). It is sent once.
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
        let until = Instant::now() + self.controller.options().patience;
        let live = self.ready(until).await?;
        if !live.abilities.compare_and_write || compare.len() != write.len() {
            return Err(CompareError::Unsupported);
        }
        let timeout = Some(self.controller.options().command_timeout);
        let half = |opcode, fuse, data, bits| {
            let mut sqe = self.transfer(opcode, at, compare.len(), bits);
            sqe.flags |= fuse;
            Command { sqe, payload: Data::Out(data).payload(ctx), timeout }
        };
        let fua = if fua { FUA } else { 0 };
        let first = half(NvmOpcode::Compare, FUSE_FIRST, compare, 0);
        let second = half(NvmOpcode::Write, FUSE_SECOND, write, fua);
        let (first, second) = live.queue().submit_fused(first, second).await;
        match (first.outcome, second.outcome) {
            (Ok(a), Ok(b)) if a.status.is_success() && b.status.is_success() => Ok(()),
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
        let Described { info, zero_blocks, .. } = self.described.get();
        if zero_blocks > 0 {
            let bits = if unmap { DEAC } else { 0 } | if fua { FUA } else { 0 };
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
        let mut range = [0; 16];
        range[4..8].copy_from_slice(&blocks.to_le_bytes());
        range[8..].copy_from_slice(&at.0.to_le_bytes());
        /// Dword 11: deallocate.
        const DEALLOCATE: u32 = 1 << 2;
        let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, self.nsid);
        sqe.cdw10[1] = DEALLOCATE.into();
        let data = rt::buf::copy_in(ctx.credit(), &range);
        self.carry_out(&Work { sqe, data: Data::Out(&data), at }, ctx).await?;
        Ok(())
    }

    async fn write(&self, at: Lba, data: &Bufs, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let bits = if fua { FUA } else { 0 };
        let sqe = self.transfer(NvmOpcode::Write, at, data.len(), bits);
        self.carry_out(&Work { sqe, data: Data::Out(data), at }, ctx).await?;
        Ok(())
    }

    /// A flush that fails is the end: it is never tried again and believed.
    async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let sqe = Sqe::new(NvmOpcode::Flush.0, 0, self.nsid);
        debug_assert_ne!(self.nsid, NSID_ALL);
        let flushed = self.carry_out(&Work { sqe, data: Data::None, at: Lba(0) }, ctx).await;
        match flushed {
            Ok(_) => Ok(()),
            Err(Ended::With(Error::Aborted)) => Err(Error::Aborted),
            Err(_) => Err(self.fail("a flush has failed")),
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
        let options = self.controller.options();
        let (mut until, mut tries) = (None, 0);
        loop {
            let deadline = until.unwrap_or_else(|| Instant::now() + options.patience);
            let live = self.ready(deadline).await.map_err(Ended::With)?;
            let payload = work.data.payload(ctx);
            let command =
                Command { sqe: work.sqe, payload, timeout: Some(options.command_timeout) };
            let reply = live.queue().submit(command).await;
            let pause = match self.judge(work, &reply, &live)? {
                Verdict::Done => return Ok(reply.buffers.into()),
                Verdict::Failed(error) => return Err(Ended::With(error)),
                Verdict::Few { error, look } => {
                    tries += 1;
                    if tries >= TRIES {
                        return Err(Ended::With(error));
                    }
                    if look {
                        self.seen.set(0);
                    }
                    true
                }
                Verdict::Again { pause } => pause,
            };
            if ctx.is_aborted() {
                return Err(Ended::With(Error::Aborted));
            }
            let deadline = *until.get_or_insert(deadline);
            if Instant::now() >= deadline {
                return Err(Ended::With(self.fail("the controller is of no use for too long")));
            }
            if pause {
                self.controller.pause(deadline.min(Instant::now() + PAUSE)).await;
            } else {
                // Those who keep the controller have to see what has happened.
                rt::give_way().await;
            }
        }
    }

    /// What an answer means for a command.
    fn judge(&self, work: &Work<'_>, reply: &Reply, live: &Live) -> Result<Verdict, Ended> {
        let completion = match reply.outcome {
            Err(Lost::Unsent | Lost::InDoubt) => return Ok(Verdict::Again { pause: false }),
            Ok(completion) => completion,
        };
        if completion.status.code() == Status::COMPARE_FAILURE {
            return Err(Ended::Differs);
        }
        let verdict = verdict(completion.status, work.at, matches!(work.data, Data::Out(_)));
        if verdict == Verdict::Done && reply.moved as usize != work.data.len() {
            // The rest of a read's memory is anybody's old data, and that of a write is not written.
            self.controller.give_up(live, "a command succeeded without all of its data");
            return Ok(Verdict::Again { pause: false });
        }
        if verdict == Verdict::Failed(Error::Gone) {
            self.fail("the controller says that it has failed");
        }
        Ok(verdict)
    }

    /// An association through which this is the volume that it was.
    async fn ready(&self, until: Instant) -> Result<Rc<Live>, Error> {
        loop {
            if self.gone.get() {
                return Err(Error::Gone);
            }
            let live = match self.controller.live() {
                Some(live) => live,
                None => self.controller.up(until).await.map_err(|absent| match absent {
                    Absent::Away => self.fail("the controller has been away for too long"),
                    Absent::Over => self.fail("the controller does not come back"),
                })?,
            };
            if self.seen.get() == self.controller.generation() {
                return Ok(live);
            }
            self.look(&live, until).await?;
        }
    }

    /// Sees whether this is the volume that it was.
    async fn look(&self, live: &Live, until: Instant) -> Result<(), Error> {
        let _one = self.looking.lock().await;
        let generation = self.controller.generation();
        if self.seen.get() == generation || self.gone.get() {
            return Ok(());
        }
        match live.describe(self.nsid).await {
            Ok(Some(now)) if self.described.get().continues_as(&now) => {
                self.described.set(grown(self.described.get(), &now));
                self.seen.set(generation);
                Ok(())
            }
            Ok(Some(_)) => Err(self.fail("it has become another volume")),
            Ok(None) => Err(self.fail("it has gone")),
            Err(_) if Instant::now() >= until => {
                Err(self.fail("the controller does not tell what it is"))
            }
            Err(failed) => {
                if !matches!(failed, Failed::Lost(_)) {
                    self.controller.pause(Instant::now() + PAUSE).await;
                }
                Ok(())
            }
        }
    }

    /// From now on every operation fails.
    fn fail(&self, why: &str) -> Error {
        if !self.gone.replace(true) {
            warn!("namespace {} of {:?}: {why}", self.nsid, self.controller);
        }
        Error::Gone
    }
}

/// Looks at a namespace whenever it may have changed: one that has grown is used beyond its old end only
/// when that is known.
async fn watch(namespace: Weak<Namespace>, controller: Controller) {
    let mut generation = controller.generation();
    while let Some(next) = controller.changed(generation).await {
        generation = next;
        let Some(namespace) = namespace.upgrade() else { return };
        let until = Instant::now() + controller.options().patience;
        if let Some(live) = controller.live()
            && namespace.look(&live, until).await.is_err()
        {
            return;
        }
    }
}

/// Only the size changes while a device lives, and only upwards.
fn grown(before: Described, now: &Described) -> Described {
    let info = Info { blocks: now.info.blocks, ..before.info };
    Described { info, ..before }
}

/// A range, in pieces of this many blocks.
fn pieces(at: Lba, blocks: u32, most: u32) -> impl Iterator<Item = (Lba, u32)> {
    let most = most.max(1);
    let starts = (0..blocks).step_by(most as usize);
    starts.map(move |done| (Lba(at.0 + u64::from(done)), (blocks - done).min(most)))
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
            Verdict::Done | Verdict::Again { .. } => Error::Fenced.into(),
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
