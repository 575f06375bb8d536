//! A logical unit of one target, as a layer.
//!
//! Operations wait for an unreachable target and are retried where that is safe: no two overlapping
//! operations are in flight, so executing one twice does no harm. [`Lun::compare_and_write`] is
//! never retried. After a unit has failed permanently, every later operation fails.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use ::iscsi::initiator::{Completion, LostRequest, Payload, Residual};
use block::{BlockStatus, Bufs, Ctx, Error, Info, Layer, Lba, Op};
use scsi::Lun as Number;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::active_session::{ActiveSession, Reply, SessionError, scsi_failure};
use super::cdb::{self, Cdb};
use super::identity::{Identity, UnitAttributes, UnitDescription};
use super::response_action::{ResponseAction, is_not_started, response_action};
use super::session::Session;
pub use crate::commands::CompareError;
use crate::commands::{CommandData, MAX_TRIES, RETRY_PAUSE, split_range};
use crate::reconnect::Unreachable;

/// How many unit attentions are tolerated in a row before a pause.
const MAX_ATTENTIONS: u32 = 8;

/// Why a session is closed whose target violates the protocol.
const MISSING_DATA: &str = "a command succeeded without all of its data";

/// Why a unit cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// No such unit, or it cannot be used: no disk, or an unsupported block size.
    #[error("there is no usable logical unit {0}")]
    Unusable(u16),
    /// It has no designator that identifies its volume.
    #[error("logical unit {0} has no identifier")]
    NoIdentity(u16),
    /// The target did not answer the queries.
    #[error("{0}")]
    Failed(#[from] SessionError),
}

/// A logical unit.
#[derive(Debug)]
pub struct Lun {
    session: Session,
    number: Number,
    identity: Identity,
    /// The attributes that its users know, with the current size.
    attributes: Cell<UnitAttributes>,
    /// The attributes last read: the unit may have lost capabilities since.
    current: Cell<UnitAttributes>,
    /// The session generation at which it was last verified to be the same volume.
    verified_generation: Cell<u64>,
    verify_lock: Mutex<()>,
    /// Whether it may have changed since the last verification began.
    needs_verify: Cell<bool>,
    /// Address to which a change was last sent whose session ended without an answer, so that it
    /// may still take effect.
    in_doubt: Cell<Option<SocketAddr>>,
    gone: Cell<bool>,
    /// Whether it supports WRITE SAME and VERIFY, until it refuses them.
    supports_write_same: Cell<bool>,
    supports_verify: Cell<bool>,
    watcher: RefCell<Option<AbortOnDropHandle<()>>>,
}

/// One command, with its retries.
struct UnitCommand<'a> {
    cdb: Cdb,
    data: CommandData<'a>,
    /// First block, for errors.
    at: Lba,
}

impl UnitCommand<'_> {
    /// Whether it changes stored data. Once it may have taken effect, or still may, it can no
    /// longer be abandoned: the contents of the range must stay stable.
    fn changes(&self) -> bool {
        let changing = [cdb::WRITE, cdb::WRITE_SAME, cdb::UNMAP];
        changing.contains(&self.cdb[0])
    }
}

fn payload(data: CommandData<'_>, ctx: &Ctx) -> Payload {
    match data {
        CommandData::None => Payload::None,
        CommandData::Out(data) => Payload::ToTarget(data.clone()),
        CommandData::In(length) => Payload::ToHost(ctx.alloc(length)),
    }
}

/// How a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandEnd {
    /// A comparison found a difference.
    Miscompare,
    /// The unit does not support it.
    Unsupported,
    With(Error),
}

impl CommandEnd {
    /// For a command that compares nothing and that every unit supports.
    fn of(self, work: &UnitCommand<'_>) -> Error {
        match self {
            Self::With(error) => error,
            Self::Miscompare | Self::Unsupported if matches!(work.data, CommandData::In(_)) => {
                Error::Unreadable { at: work.at }
            }
            Self::Miscompare | Self::Unsupported => Error::Unwritable { at: work.at },
        }
    }
}

impl Lun {
    /// Opens a unit, which has to remain the same volume.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(session: &Session, number: u16) -> Result<Rc<Self>, OpenError> {
        let unusable = OpenError::Unusable(number);
        let seen = session.generation();
        let described = session.describe(number).await?.ok_or(unusable)?;
        let unit = Number::new(number).ok_or(unusable)?;
        if !described.identity.is_known() {
            return Err(OpenError::NoIdentity(number));
        }
        let lun = Rc::new(Self {
            session: session.clone(),
            number: unit,
            identity: described.identity,
            attributes: Cell::new(described.attributes),
            current: Cell::new(described.attributes),
            verified_generation: Cell::new(seen),
            verify_lock: Mutex::new(()),
            needs_verify: Cell::new(false),
            in_doubt: Cell::new(None),
            gone: Cell::new(false),
            supports_write_same: Cell::new(true),
            supports_verify: Cell::new(true),
            watcher: RefCell::new(None),
        });
        let watcher = watch(Rc::downgrade(&lun), session.clone(), unit);
        let watcher = AbortOnDropHandle::new(tokio::task::spawn_local(watcher));
        *lun.watcher.borrow_mut() = Some(watcher);
        Ok(lun)
    }

    /// Its identity and attributes.
    #[must_use]
    pub fn described(&self) -> UnitDescription {
        UnitDescription { identity: self.identity.clone(), attributes: self.attributes.get() }
    }

    /// Its session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Has the target read the range without returning data (VERIFY (16)). `ctx` has memory for the
    /// largest transfer.
    ///
    /// # Errors
    /// As [`Op::Read`].
    pub async fn verify(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let info = self.info();
        for (at, piece) in split_range(at, blocks, info.max_transfer_blocks) {
            let cdb = cdb::ranged(cdb::VERIFY, 0, at.0, piece);
            let work = UnitCommand { cdb, data: CommandData::None, at };
            if self.supports_verify.get() {
                match self.execute(&work, ctx).await {
                    Ok(_) => continue,
                    Err(CommandEnd::Unsupported) => self.supports_verify.set(false),
                    Err(_) if ctx.is_aborted() => return Err(Error::Aborted),
                    // No data is sent or written.
                    Err(CommandEnd::With(Error::Unwritable { at })) => {
                        return Err(Error::Unreadable { at });
                    }
                    Err(ended) => return Err(ended.of(&work)),
                }
            }
            self.read(at, piece, ctx).await?;
        }
        Ok(())
    }

    /// Fails unless the contents from `at` on are `data` (VERIFY (16) with BYTCHK).
    ///
    /// # Errors
    /// [`CompareError`], but not [`CompareError::InDoubt`].
    pub async fn compare(&self, at: Lba, data: &Bufs, ctx: &Ctx) -> Result<(), CompareError> {
        let cdb = self.transfer(cdb::VERIFY, cdb::BYTE_CHECK, at, data.len());
        match self.execute(&UnitCommand { cdb, data: CommandData::Out(data), at }, ctx).await {
            Ok(_) => Ok(()),
            Err(CommandEnd::Miscompare) => Err(CompareError::Miscompare),
            Err(CommandEnd::Unsupported) => Err(CompareError::Unsupported),
            Err(CommandEnd::With(Error::Unwritable { at })) => Err(Error::Unreadable { at }.into()),
            Err(CommandEnd::With(error)) => Err(error.into()),
        }
    }

    /// Atomically replaces the contents from `at` on by `write` if they equal `compare`, which has
    /// the same length (COMPARE AND WRITE, SBC-3 5.2). Never retried.
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
        let until = Instant::now() + self.session.options().retry_timeout;
        let live = self.ready_session(until).await?;
        let UnitAttributes { info, compare_and_write_blocks, .. } = self.current.get();
        let blocks = compare.len() / info.block_size as usize;
        let most = usize::from(compare_and_write_blocks);
        if blocks == 0 || blocks > most || compare.len() != write.len() {
            return Err(CompareError::Unsupported);
        }
        let bits = self.fua(fua);
        let cdb = self.transfer(cdb::COMPARE_AND_WRITE, bits, at, compare.len());
        let mut data = compare.clone();
        data.append(write.clone());
        let data = CommandData::Out(&data);
        // A unit attention is reported instead of executing the command.
        for _ in 0..MAX_ATTENTIONS {
            let reply = live.scsi(self.number, cdb, payload(data, ctx)).await;
            let completion = match reply.outcome {
                Err(LostRequest::Unsent) => return Err(Error::Fenced.into()),
                Err(LostRequest::InDoubt | LostRequest::Aborted) => {
                    self.in_doubt.set(Some(live.address));
                    return Err(CompareError::InDoubt);
                }
                Ok(completion) if completion.response != 0 => return Err(CompareError::InDoubt),
                Ok(completion) => completion,
            };
            match response_action(scsi_failure(&completion), at, true) {
                ResponseAction::Done if !is_whole(reply.transferred, data, &completion) => {
                    self.session.fail_connection(&live, MISSING_DATA);
                    return Err(CompareError::InDoubt);
                }
                // No upper device would flush instead of FUA.
                ResponseAction::Done
                    if bits & cdb::FUA == 0 && (fua || self.must_be_durable(false)) =>
                {
                    return Ok(self.flush(ctx).await?);
                }
                ResponseAction::Done => return Ok(()),
                ResponseAction::Miscompare => return Err(CompareError::Miscompare),
                ResponseAction::Unsupported => return Err(CompareError::Unsupported),
                ResponseAction::Retry { pause: false, verify: look } => {
                    if look {
                        self.mark_unverified();
                        self.verify_identity(&live, until).await?;
                    }
                }
                ResponseAction::Retry { .. } => return Err(Error::Fenced.into()),
                ResponseAction::RetryLimited(error) | ResponseAction::Failed(error) => {
                    return Err(error.into());
                }
            }
        }
        Err(Error::Fenced.into())
    }

    /// Whether a write must be durable when it completes: because the caller asked and FUA was
    /// advertised (otherwise the upper device flushes), or because the unit has since gained a
    /// cache that the upper device does not know of.
    fn must_be_durable(&self, fua: bool) -> bool {
        let (reported, now) = (self.info(), self.current.get().info);
        fua && reported.native_fua || now.volatile_cache && !reported.volatile_cache
    }

    /// The FUA bit if durability is needed and the unit supports it.
    fn fua(&self, fua: bool) -> u8 {
        if self.must_be_durable(fua) && self.current.get().info.native_fua { cdb::FUA } else { 0 }
    }

    /// Flushes after a write with these bits if it must be durable and is not: the answer to the
    /// write itself may have revealed a cache.
    async fn make_durable(&self, fua: bool, bits: u8, ctx: &Ctx) -> Result<(), Error> {
        if self.must_be_durable(fua) && bits & cdb::FUA == 0 {
            self.flush(ctx).await
        } else {
            Ok(())
        }
    }

    /// A CDB for the range from `at` on that `length` bytes of data fill.
    fn transfer(&self, opcode: u8, bits: u8, at: Lba, length: usize) -> Cdb {
        let blocks = length / self.info().block_size as usize;
        cdb::ranged(opcode, bits, at.0, u32::try_from(blocks).unwrap_or(u32::MAX))
    }

    async fn read(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<Bufs, Error> {
        let bytes = blocks as usize * self.info().block_size as usize;
        let cdb = cdb::ranged(cdb::READ, 0, at.0, blocks);
        let work = UnitCommand { cdb, data: CommandData::In(bytes), at };
        self.execute(&work, ctx).await.map_err(|ended| ended.of(&work))
    }

    async fn write(&self, at: Lba, data: &Bufs, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let bits = self.fua(fua);
        let cdb = self.transfer(cdb::WRITE, bits, at, data.len());
        let work = UnitCommand { cdb, data: CommandData::Out(data), at };
        self.execute(&work, ctx).await.map_err(|ended| ended.of(&work))?;
        self.make_durable(fua, bits, ctx).await
    }

    /// WRITE SAME, which has no FUA; plain writes if the unit does not support it.
    async fn zero(
        &self,
        (at, blocks): (Lba, u32),
        unmap: bool,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let info = self.info();
        let block = Bufs::zeroes(info.block_size as usize);
        let mut done = 0;
        while done < blocks {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let UnitAttributes { write_same_blocks, frees_by_zeroing, .. } = self.current.get();
            let bits = if unmap && frees_by_zeroing { cdb::UNMAP_BIT } else { 0 };
            let same = self.supports_write_same.get();
            let most = if same { write_same_blocks } else { info.max_transfer_blocks };
            let (at, piece) = (Lba(at.0 + u64::from(done)), (blocks - done).min(most.max(1)));
            if same {
                let cdb = cdb::ranged(cdb::WRITE_SAME, bits, at.0, piece);
                let work = UnitCommand { cdb, data: CommandData::Out(&block), at };
                match self.execute(&work, ctx).await {
                    // The blocks may now read as anything.
                    Ok(_) if bits != 0 && !self.current.get().frees_by_zeroing => continue,
                    Ok(_) => {}
                    Err(CommandEnd::Unsupported) => {
                        self.supports_write_same.set(false);
                        continue;
                    }
                    Err(ended) => return Err(ended.of(&work)),
                }
            } else {
                let data = Bufs::zeroes(piece as usize * info.block_size as usize);
                self.write(at, &data, false, ctx).await?;
            }
            done += piece;
        }
        self.make_durable(fua, 0, ctx).await
    }

    async fn unmap(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let (reported, now) = (self.attributes.get(), self.current.get());
        let unmap_blocks = reported.unmap_blocks.min(now.unmap_blocks);
        if reported.frees_by_zeroing {
            return self.zero((at, blocks), true, false, ctx).await;
        }
        if unmap_blocks == 0 {
            return Ok(());
        }
        for (at, piece) in split_range(at, blocks, unmap_blocks) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let list = cdb::unmap_list(at.0, piece);
            let data = rt::buf::copy_in(ctx.credit(), &list);
            let cdb = cdb::unmap(u16::try_from(list.len()).unwrap_or(u16::MAX));
            let work = UnitCommand { cdb, data: CommandData::Out(&data), at };
            self.execute(&work, ctx).await.map_err(|ended| ended.of(&work))?;
        }
        Ok(())
    }

    /// SYNCHRONIZE CACHE (16). A failed flush fails the disk: a repeated one could falsely succeed.
    async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let cdb = cdb::ranged(cdb::SYNCHRONIZE_CACHE, 0, 0, 0);
        match self.execute(&UnitCommand { cdb, data: CommandData::None, at: Lba(0) }, ctx).await {
            Ok(_) => Ok(()),
            Err(CommandEnd::Unsupported) if !self.current.get().info.volatile_cache => Ok(()),
            Err(CommandEnd::With(Error::Aborted)) => Err(Error::Aborted),
            Err(_) => Err(self.fail("a flush failed")),
        }
    }
}

impl Lun {
    /// Sends a command until it has a final answer.
    async fn execute(&self, work: &UnitCommand<'_>, ctx: &Ctx) -> Result<Bufs, CommandEnd> {
        let patience = self.session.options().retry_timeout;
        let (mut until, mut tries, mut attentions, mut may_be_done) = (None, 0, 0, false);
        loop {
            let deadline = until.unwrap_or_else(|| Instant::now() + patience);
            let live = self.ready_session(deadline).await.map_err(CommandEnd::With)?;
            let (to, payload) = ((self.number, work.cdb), || payload(work.data, ctx));
            let Some(reply) = live.scsi_checked(|| self.is_verified(&live), to, payload).await
            else {
                until.get_or_insert(deadline);
                continue;
            };
            if work.changes() && reply.outcome.as_ref().is_err_and(|l| *l != LostRequest::Unsent) {
                may_be_done = true;
                self.in_doubt.set(Some(live.address));
            }
            let pause = match self.evaluate(work, &reply, &live) {
                ResponseAction::Done => return Ok(reply.buffers.into()),
                ResponseAction::Failed(error) => return Err(CommandEnd::With(error)),
                ResponseAction::Miscompare => return Err(CommandEnd::Miscompare),
                ResponseAction::Unsupported => return Err(CommandEnd::Unsupported),
                ResponseAction::RetryLimited(error) => {
                    tries += 1;
                    if tries >= MAX_TRIES {
                        return Err(CommandEnd::With(error));
                    }
                    self.mark_unverified();
                    true
                }
                ResponseAction::Retry { pause, verify: look } => {
                    if look {
                        self.mark_unverified();
                    }
                    attentions += 1;
                    pause || attentions > MAX_ATTENTIONS
                }
            };
            if ctx.is_aborted() && !may_be_done {
                return Err(CommandEnd::With(Error::Aborted));
            }
            let deadline = *until.get_or_insert(deadline);
            if Instant::now() >= deadline {
                return Err(CommandEnd::With(
                    self.fail("no usable target within the retry timeout"),
                ));
            }
            if pause {
                self.session.wait_change(deadline.min(Instant::now() + RETRY_PAUSE)).await;
            } else {
                // Let the session's tasks notice what happened.
                rt::yield_to_ready_tasks().await;
            }
        }
    }

    /// What to do after this answer.
    fn evaluate(
        &self,
        work: &UnitCommand<'_>,
        reply: &Reply,
        live: &ActiveSession,
    ) -> ResponseAction {
        let at_once = ResponseAction::Retry { pause: false, verify: false };
        let flushes = work.cdb[0] == cdb::SYNCHRONIZE_CACHE;
        let completion = match &reply.outcome {
            Err(LostRequest::Unsent | LostRequest::InDoubt | LostRequest::Aborted) => {
                return at_once;
            }
            // The flush may have begun; a repeated one could falsely succeed.
            Ok(Completion { response: 1.., .. }) if flushes => {
                return ResponseAction::Failed(Error::Gone);
            }
            Ok(Completion { response: 1.., .. }) => {
                return ResponseAction::Retry { pause: true, verify: true };
            }
            Ok(completion) => completion,
        };
        let verdict = response_action(
            scsi_failure(completion),
            work.at,
            matches!(work.data, CommandData::Out(_)),
        );
        if verdict == ResponseAction::Done && !is_whole(reply.transferred, work.data, completion) {
            // The rest of a read's buffer holds unrelated old data; the rest of a write is not
            // written.
            self.session.fail_connection(live, MISSING_DATA);
            return at_once;
        }
        if flushes && verdict != ResponseAction::Done && !is_not_started(scsi_failure(completion)) {
            // A repeated flush could falsely succeed: a deferred error is reported once.
            return if verdict == ResponseAction::Unsupported {
                verdict
            } else {
                ResponseAction::Failed(Error::Gone)
            };
        }
        if verdict == ResponseAction::Failed(Error::Gone) {
            self.fail("the target reports a hardware failure");
        }
        verdict
    }

    /// Whether this is still the same volume, checked after waiting for a slot; a command sent now
    /// without awaiting goes to it.
    fn is_verified(&self, live: &Rc<ActiveSession>) -> bool {
        let same = self.session.active().is_some_and(|now| Rc::ptr_eq(&now, live));
        same && self.verified_generation.get() == self.session.generation()
    }

    /// A session in which this is verified to be the same volume.
    async fn ready_session(&self, until: Instant) -> Result<Rc<ActiveSession>, Error> {
        loop {
            if self.gone.get() {
                return Err(Error::Gone);
            }
            let live = match self.session.active() {
                Some(live) => live,
                None => self.session.wait_up(until).await.map_err(|absent| match absent {
                    Unreachable::TimedOut => {
                        self.fail("the target was unreachable for longer than the retry timeout")
                    }
                    Unreachable::Closed => self.fail("the target does not reconnect"),
                })?,
            };
            self.check_in_doubt(live.address)?;
            if self.verified_generation.get() == self.session.generation() {
                return Ok(live);
            }
            self.verify_identity(&live, until).await?;
        }
    }

    /// Makes sure that no command in doubt takes effect after what is sent to the target at `now`.
    /// At the same address, this session has replaced the old one, whose commands the target has
    /// ended (RFC 7143 6.3.5). Another address may be another node that does not know the old
    /// session: then nothing says when the commands in doubt end.
    fn check_in_doubt(&self, now: SocketAddr) -> Result<(), Error> {
        match self.in_doubt.take() {
            Some(then) if then != now => Err(self.fail(&format!(
                "a write in doubt may still be executed at {then}, but the target is now at {now}"
            ))),
            _ => Ok(()),
        }
    }

    /// Requires a verification, begun after this call, before anything else is sent.
    fn mark_unverified(&self) {
        self.verified_generation.set(0);
        self.needs_verify.set(true);
    }

    /// Verifies that this is the same volume.
    async fn verify_identity(&self, live: &ActiveSession, until: Instant) -> Result<(), Error> {
        let _one = self.verify_lock.lock().await;
        let generation = self.session.generation();
        if self.verified_generation.get() == generation || self.gone.get() {
            return Ok(());
        }
        self.needs_verify.set(false);
        match live.describe(self.number).await {
            Ok(Some(now)) if self.described().is_same_volume_as(&now) => {
                self.attributes.set(with_grown_size(self.attributes.get(), &now.attributes));
                self.current.set(now.attributes);
                if !self.needs_verify.get() {
                    self.verified_generation.set(generation);
                }
                Ok(())
            }
            Ok(Some(_)) => Err(self.fail("it is another volume now")),
            Ok(None) if Instant::now() >= until => Err(self.fail("it has gone")),
            Err(_) if Instant::now() >= until => {
                Err(self.fail("the target does not identify itself"))
            }
            Err(SessionError::Lost(_)) => Ok(()),
            // Starting targets accept logins before all of their units exist.
            Ok(None) | Err(_) => {
                self.session.wait_change(until.min(Instant::now() + RETRY_PAUSE)).await;
                Ok(())
            }
        }
    }

    /// Fails every operation from now on.
    fn fail(&self, why: &str) -> Error {
        if !self.gone.replace(true) {
            warn!("unit {} of {:?}: {why}", self.number.get(), self.session);
        }
        Error::Gone
    }
}

/// Whether a command that reports success has transferred all of its data.
fn is_whole(transferred: u32, data: CommandData<'_>, completion: &Completion) -> bool {
    transferred as usize == data.len() && !matches!(completion.residual, Residual::Under(_))
}

/// Verifies a unit whenever it may have changed, so that blocks beyond its old end are used only
/// after its growth is known. Idle units are polled, as a target sends no notification by itself.
async fn watch(lun: Weak<Lun>, session: Session, unit: Number) {
    let every = session.options().poll_interval;
    let mut generation = session.generation();
    loop {
        let changed = session.changed(generation);
        let changed =
            if every.is_zero() { Ok(changed.await) } else { timeout(every, changed).await };
        match changed {
            Ok(Some(next)) => generation = next,
            Ok(None) => return,
            Err(_) => match session.active() {
                Some(live) if live.has_changed(unit).await => session.bump_generation(),
                _ => continue,
            },
        }
        let Some(lun) = lun.upgrade() else { return };
        let until = Instant::now() + session.options().retry_timeout;
        if let Some(live) = session.active()
            && lun.verify_identity(&live, until).await.is_err()
        {
            return;
        }
    }
}

/// While a device is open, only its size changes, and only upwards.
fn with_grown_size(before: UnitAttributes, now: &UnitAttributes) -> UnitAttributes {
    let info = Info { blocks: now.info.blocks, ..before.info };
    UnitAttributes { info, ..before }
}

impl Layer for Lun {
    fn name(&self) -> &'static str {
        "iscsi"
    }

    fn info(&self) -> Info {
        self.attributes.get().info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let ctx = &ctx;
        let done = match op {
            Op::Read { at, blocks } => return self.read(at, blocks, ctx).await,
            // Allocation is not queried.
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
