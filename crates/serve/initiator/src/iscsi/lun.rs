//! A logical unit of one target, as a layer.
//!
//! Operations wait for a target that is away, and are sent again where that is right: no two of them that
//! overlap are in flight, so doing one twice does no harm. What may not be done twice,
//! [`Lun::compare_and_write`], is not. Once a unit has failed for good every later operation fails as well.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use ::iscsi::initiator::{Completion, Lost, Payload, Residual};
use block::{Bufs, Ctx, Error, Info, Layer, Lba, Op, Run};
use scsi::Lun as Number;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::cdb::{self, Cdb};
use super::identity::{Described, Identity, Told};
use super::live::{Failed, Live, Reply, refusal};
use super::session::Session;
use super::verdict::{Verdict, verdict, was_not_begun};
pub use crate::commands::CompareError;
use crate::commands::{Data, PAUSE, TRIES, pieces};
use crate::kept::Absent;

/// Times that a unit may have something else to say first, before it is given time.
const ATTENTIONS: u32 = 8;

/// Why a session is given up whose target cannot be believed.
const WITHOUT_DATA: &str = "a command succeeded without all of its data";

/// Why a unit cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is none with this number, or it cannot be used: it is no disk, or has blocks of another size.
    #[error("there is no logical unit {0} that can be used")]
    Unusable(u16),
    /// It has no designator by which it could be told from another one.
    #[error("logical unit {0} does not say which volume it is")]
    Nameless(u16),
    /// The target did not tell.
    #[error("{0}")]
    Failed(#[from] Failed),
}

/// A logical unit.
#[derive(Debug)]
pub struct Lun {
    session: Session,
    number: Number,
    identity: Identity,
    /// What whoever uses it was told that it can do, and how large it is now.
    told: Cell<Told>,
    /// What it was like when it was looked at last: it may have come to be able to do less.
    now: Cell<Told>,
    /// The generation of the session at which it was last seen to be the same volume.
    seen: Cell<u64>,
    looking: Mutex<()>,
    /// Whether it may have changed since a look at it began.
    doubted: Cell<bool>,
    /// Where something was sent last that may have changed the unit, and may yet, as its session has ended without an answer.
    in_doubt: Cell<Option<SocketAddr>>,
    gone: Cell<bool>,
    /// Whether it is not known to be without WRITE SAME, and VERIFY.
    writes_same: Cell<bool>,
    verifies: Cell<bool>,
    watcher: RefCell<Option<AbortOnDropHandle<()>>>,
}

/// One command, to be sent as often as it takes.
struct Work<'a> {
    cdb: Cdb,
    data: Data<'a>,
    /// First block, for errors.
    at: Lba,
}

impl Work<'_> {
    /// Whether it changes what is stored. Once that may have happened, or may yet, it cannot be abandoned any more: what
    /// the range holds has to stay.
    fn changes(&self) -> bool {
        let changing = [cdb::WRITE, cdb::WRITE_SAME, cdb::UNMAP];
        changing.contains(&self.cdb[0])
    }
}

fn payload(data: Data<'_>, ctx: &Ctx) -> Payload {
    match data {
        Data::None => Payload::None,
        Data::Out(data) => Payload::ToTarget(data.clone()),
        Data::In(length) => Payload::ToHost(ctx.alloc(length)),
    }
}

/// How a command has ended that has not succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// A comparison has found a difference.
    Differs,
    /// The unit does not know it.
    Unknown,
    With(Error),
}

impl Ended {
    /// Of a command that compares nothing and that every unit knows.
    fn of(self, work: &Work<'_>) -> Error {
        match self {
            Self::With(error) => error,
            Self::Differs | Self::Unknown if matches!(work.data, Data::In(_)) => {
                Error::Unreadable { at: work.at }
            }
            Self::Differs | Self::Unknown => Error::Unwritable { at: work.at },
        }
    }
}

impl Lun {
    /// Opens a unit: what it is now, it has to stay.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(session: &Session, number: u16) -> Result<Rc<Self>, OpenError> {
        let unusable = OpenError::Unusable(number);
        let seen = session.generation();
        let described = session.describe(number).await?.ok_or(unusable)?;
        let unit = Number::new(number).ok_or(unusable)?;
        if !described.identity.is_known() {
            return Err(OpenError::Nameless(number));
        }
        let lun = Rc::new(Self {
            session: session.clone(),
            number: unit,
            identity: described.identity,
            told: Cell::new(described.told),
            now: Cell::new(described.told),
            seen: Cell::new(seen),
            looking: Mutex::new(()),
            doubted: Cell::new(false),
            in_doubt: Cell::new(None),
            gone: Cell::new(false),
            writes_same: Cell::new(true),
            verifies: Cell::new(true),
            watcher: RefCell::new(None),
        });
        let watcher = watch(Rc::downgrade(&lun), session.clone(), unit);
        let watcher = AbortOnDropHandle::new(tokio::task::spawn_local(watcher));
        *lun.watcher.borrow_mut() = Some(watcher);
        Ok(lun)
    }

    /// What it is.
    #[must_use]
    pub fn described(&self) -> Described {
        Described { identity: self.identity.clone(), told: self.told.get() }
    }

    /// Its session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Reads the range at the target and returns nothing (VERIFY (16)). `ctx` has memory for the largest
    /// transfer.
    ///
    /// # Errors
    /// As [`Op::Read`].
    pub async fn verify(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let info = self.info();
        for (at, piece) in pieces(at, blocks, info.max_transfer_blocks) {
            let cdb = cdb::ranged(cdb::VERIFY, 0, at.0, piece);
            let work = Work { cdb, data: Data::None, at };
            if self.verifies.get() {
                match self.carry_out(&work, ctx).await {
                    Ok(_) => continue,
                    Err(Ended::Unknown) => self.verifies.set(false),
                    Err(_) if ctx.is_aborted() => return Err(Error::Aborted),
                    // Nothing is sent, and nothing written.
                    Err(Ended::With(Error::Unwritable { at })) => {
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
        match self.carry_out(&Work { cdb, data: Data::Out(data), at }, ctx).await {
            Ok(_) => Ok(()),
            Err(Ended::Differs) => Err(CompareError::Differs),
            Err(Ended::Unknown) => Err(CompareError::Unsupported),
            Err(Ended::With(Error::Unwritable { at })) => Err(Error::Unreadable { at }.into()),
            Err(Ended::With(error)) => Err(error.into()),
        }
    }

    /// Replaces the contents from `at` on by `write` if they are `compare`, which is as long, in one step
    /// (COMPARE AND WRITE, SBC-3 5.2). It is sent once.
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
        let until = Instant::now() + self.session.options().patience;
        let live = self.ready(until).await?;
        let Told { info, compare_and_write_blocks, .. } = self.now.get();
        let blocks = compare.len() / info.block_size as usize;
        let most = usize::from(compare_and_write_blocks);
        if blocks == 0 || blocks > most || compare.len() != write.len() {
            return Err(CompareError::Unsupported);
        }
        let bits = self.fua(fua);
        let cdb = self.transfer(cdb::COMPARE_AND_WRITE, bits, at, compare.len());
        let mut data = compare.clone();
        data.append(write.clone());
        let data = Data::Out(&data);
        // What a unit has to say first, it says instead of the command.
        for _ in 0..ATTENTIONS {
            let reply = live.scsi(self.number, cdb, payload(data, ctx)).await;
            let completion = match reply.outcome {
                Err(Lost::Unsent) => return Err(Error::Fenced.into()),
                Err(Lost::InDoubt | Lost::Aborted) => {
                    self.in_doubt.set(Some(live.at));
                    return Err(CompareError::InDoubt);
                }
                Ok(completion) if completion.response != 0 => return Err(CompareError::InDoubt),
                Ok(completion) => completion,
            };
            match verdict(refusal(&completion), at, true) {
                Verdict::Done if !is_whole(reply.moved, data, &completion) => {
                    self.session.give_up(&live, WITHOUT_DATA);
                    return Err(CompareError::InDoubt);
                }
                // No device above flushes in place of FUA.
                Verdict::Done if bits & cdb::FUA == 0 && (fua || self.goes_through(false)) => {
                    return Ok(self.flush(ctx).await?);
                }
                Verdict::Done => return Ok(()),
                Verdict::Differs => return Err(CompareError::Differs),
                Verdict::Unknown => return Err(CompareError::Unsupported),
                Verdict::Again { pause: false, look } => {
                    if look {
                        self.doubt();
                        self.look(&live, until).await?;
                    }
                }
                Verdict::Again { .. } => return Err(Error::Fenced.into()),
                Verdict::Few(error) | Verdict::Failed(error) => return Err(error.into()),
            }
        }
        Err(Error::Fenced.into())
    }

    /// Whether what is written has to be durable when it is answered: asked for so, where that was promised (elsewhere the
    /// device above flushes), or of a unit that has come to have a cache of which nobody above knows.
    fn goes_through(&self, fua: bool) -> bool {
        let (told, now) = (self.info(), self.now.get().info);
        fua && told.native_fua || now.volatile_cache && !told.volatile_cache
    }

    /// FUA where it has to be, and is known.
    fn fua(&self, fua: bool) -> u8 {
        if self.goes_through(fua) && self.now.get().info.native_fua { cdb::FUA } else { 0 }
    }

    /// Makes durable what was written with these bits, if it has to be and is not: what the unit is like may have become
    /// known by its answer to that very command.
    async fn keep(&self, fua: bool, bits: u8, ctx: &Ctx) -> Result<(), Error> {
        if self.goes_through(fua) && bits & cdb::FUA == 0 { self.flush(ctx).await } else { Ok(()) }
    }

    /// A command of the range from `at` on that `length` bytes of data are.
    fn transfer(&self, opcode: u8, bits: u8, at: Lba, length: usize) -> Cdb {
        let blocks = length / self.info().block_size as usize;
        cdb::ranged(opcode, bits, at.0, u32::try_from(blocks).unwrap_or(u32::MAX))
    }

    async fn read(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<Bufs, Error> {
        let bytes = blocks as usize * self.info().block_size as usize;
        let cdb = cdb::ranged(cdb::READ, 0, at.0, blocks);
        let work = Work { cdb, data: Data::In(bytes), at };
        self.carry_out(&work, ctx).await.map_err(|ended| ended.of(&work))
    }

    async fn write(&self, at: Lba, data: &Bufs, fua: bool, ctx: &Ctx) -> Result<(), Error> {
        let bits = self.fua(fua);
        let cdb = self.transfer(cdb::WRITE, bits, at, data.len());
        let work = Work { cdb, data: Data::Out(data), at };
        self.carry_out(&work, ctx).await.map_err(|ended| ended.of(&work))?;
        self.keep(fua, bits, ctx).await
    }

    /// WRITE SAME, which knows no FUA; writes, where the unit knows no WRITE SAME.
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
            let Told { write_same_blocks, frees_by_zeroing, .. } = self.now.get();
            let bits = if unmap && frees_by_zeroing { cdb::UNMAP_BIT } else { 0 };
            let same = self.writes_same.get();
            let most = if same { write_same_blocks } else { info.max_transfer_blocks };
            let (at, piece) = (Lba(at.0 + u64::from(done)), (blocks - done).min(most.max(1)));
            if same {
                let cdb = cdb::ranged(cdb::WRITE_SAME, bits, at.0, piece);
                let work = Work { cdb, data: Data::Out(&block), at };
                match self.carry_out(&work, ctx).await {
                    // It may read as anything, as has become known meanwhile.
                    Ok(_) if bits != 0 && !self.now.get().frees_by_zeroing => continue,
                    Ok(_) => {}
                    Err(Ended::Unknown) => {
                        self.writes_same.set(false);
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
        self.keep(fua, 0, ctx).await
    }

    async fn unmap(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        let (told, now) = (self.told.get(), self.now.get());
        let unmap_blocks = told.unmap_blocks.min(now.unmap_blocks);
        if told.frees_by_zeroing {
            return self.zero((at, blocks), true, false, ctx).await;
        }
        if unmap_blocks == 0 {
            return Ok(());
        }
        for (at, piece) in pieces(at, blocks, unmap_blocks) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let list = cdb::unmap_list(at.0, piece);
            let data = rt::buf::copy_in(ctx.credit(), &list);
            let cdb = cdb::unmap(u16::try_from(list.len()).unwrap_or(u16::MAX));
            let work = Work { cdb, data: Data::Out(&data), at };
            self.carry_out(&work, ctx).await.map_err(|ended| ended.of(&work))?;
        }
        Ok(())
    }

    /// SYNCHRONIZE CACHE (16). A flush that fails is the end: it is never tried again and believed.
    async fn flush(&self, ctx: &Ctx) -> Result<(), Error> {
        let cdb = cdb::ranged(cdb::SYNCHRONIZE_CACHE, 0, 0, 0);
        match self.carry_out(&Work { cdb, data: Data::None, at: Lba(0) }, ctx).await {
            Ok(_) => Ok(()),
            Err(Ended::Unknown) if !self.now.get().info.volatile_cache => Ok(()),
            Err(Ended::With(Error::Aborted)) => Err(Error::Aborted),
            Err(_) => Err(self.fail("a flush has failed")),
        }
    }
}

impl Lun {
    /// Sends a command until it has an answer that stays.
    async fn carry_out(&self, work: &Work<'_>, ctx: &Ctx) -> Result<Bufs, Ended> {
        let patience = self.session.options().patience;
        let (mut until, mut tries, mut attentions, mut may_be_done) = (None, 0, 0, false);
        loop {
            let deadline = until.unwrap_or_else(|| Instant::now() + patience);
            let live = self.ready(deadline).await.map_err(Ended::With)?;
            let (to, payload) = ((self.number, work.cdb), || payload(work.data, ctx));
            let Some(reply) = live.scsi_if(|| self.is_still(&live), to, payload).await else {
                until.get_or_insert(deadline);
                continue;
            };
            if work.changes() && reply.outcome.as_ref().is_err_and(|l| *l != Lost::Unsent) {
                may_be_done = true;
                self.in_doubt.set(Some(live.at));
            }
            let pause = match self.judge(work, &reply, &live) {
                Verdict::Done => return Ok(reply.buffers.into()),
                Verdict::Failed(error) => return Err(Ended::With(error)),
                Verdict::Differs => return Err(Ended::Differs),
                Verdict::Unknown => return Err(Ended::Unknown),
                Verdict::Few(error) => {
                    tries += 1;
                    if tries >= TRIES {
                        return Err(Ended::With(error));
                    }
                    self.doubt();
                    true
                }
                Verdict::Again { pause, look } => {
                    if look {
                        self.doubt();
                    }
                    attentions += 1;
                    pause || attentions > ATTENTIONS
                }
            };
            if ctx.is_aborted() && !may_be_done {
                return Err(Ended::With(Error::Aborted));
            }
            let deadline = *until.get_or_insert(deadline);
            if Instant::now() >= deadline {
                return Err(Ended::With(self.fail("the target is of no use for too long")));
            }
            if pause {
                self.session.pause(deadline.min(Instant::now() + PAUSE)).await;
            } else {
                // Those who keep the session have to see what has happened.
                rt::give_way().await;
            }
        }
    }

    /// What an answer means for a command.
    fn judge(&self, work: &Work<'_>, reply: &Reply, live: &Live) -> Verdict {
        let at_once = Verdict::Again { pause: false, look: false };
        let flushes = work.cdb[0] == cdb::SYNCHRONIZE_CACHE;
        let completion = match &reply.outcome {
            Err(Lost::Unsent | Lost::InDoubt | Lost::Aborted) => return at_once,
            // It may have been begun; the next one might succeed all the same.
            Ok(Completion { response: 1.., .. }) if flushes => return Verdict::Failed(Error::Gone),
            Ok(Completion { response: 1.., .. }) => {
                return Verdict::Again { pause: true, look: true };
            }
            Ok(completion) => completion,
        };
        let verdict = verdict(refusal(completion), work.at, matches!(work.data, Data::Out(_)));
        if verdict == Verdict::Done && !is_whole(reply.moved, work.data, completion) {
            // The rest of a read's memory is anybody's old data, and that of a write is not written.
            self.session.give_up(live, WITHOUT_DATA);
            return at_once;
        }
        if flushes && verdict != Verdict::Done && !was_not_begun(refusal(completion)) {
            // The next one might succeed, for what this one has lost is told once.
            return if verdict == Verdict::Unknown {
                verdict
            } else {
                Verdict::Failed(Error::Gone)
            };
        }
        if verdict == Verdict::Failed(Error::Gone) {
            self.fail("the target says that it has failed");
        }
        verdict
    }

    /// Whether it is the volume that it was, by a session in which there was no room for a command for a while: what is
    /// sent next without a pause goes there.
    fn is_still(&self, live: &Rc<Live>) -> bool {
        let same = self.session.live().is_some_and(|now| Rc::ptr_eq(&now, live));
        same && self.seen.get() == self.session.generation()
    }

    /// A session through which this is the volume that it was.
    async fn ready(&self, until: Instant) -> Result<Rc<Live>, Error> {
        loop {
            if self.gone.get() {
                return Err(Error::Gone);
            }
            let live = match self.session.live() {
                Some(live) => live,
                None => self.session.up(until).await.map_err(|absent| match absent {
                    Absent::Away => self.fail("the target has been away for too long"),
                    Absent::Over => self.fail("the target does not come back"),
                })?,
            };
            self.settle(live.at)?;
            if self.seen.get() == self.session.generation() {
                return Ok(live);
            }
            self.look(&live, until).await?;
        }
    }

    /// Makes sure that nothing in doubt happens behind what is sent to the target at `now`. Where it is where it was, this
    /// session has taken the place of the old one, whose commands the target has ended (RFC 7143 6.3.5). Who is elsewhere may
    /// be another node, that knows of no such session: its end of what is in doubt nobody tells, and no time bounds it.
    fn settle(&self, now: SocketAddr) -> Result<(), Error> {
        match self.in_doubt.take() {
            Some(then) if then != now => Err(self.fail(&format!(
                "a change that is in doubt may still be carried out at {then}, and the target is at {now} now"
            ))),
            _ => Ok(()),
        }
    }

    /// It has to be looked at before anything else is sent, and by a look that begins after this.
    fn doubt(&self) {
        self.seen.set(0);
        self.doubted.set(true);
    }

    /// Sees whether this is the volume that it was.
    async fn look(&self, live: &Live, until: Instant) -> Result<(), Error> {
        let _one = self.looking.lock().await;
        let generation = self.session.generation();
        if self.seen.get() == generation || self.gone.get() {
            return Ok(());
        }
        self.doubted.set(false);
        match live.describe(self.number).await {
            Ok(Some(now)) if self.described().continues_as(&now) => {
                self.told.set(grown(self.told.get(), &now.told));
                self.now.set(now.told);
                if !self.doubted.get() {
                    self.seen.set(generation);
                }
                Ok(())
            }
            Ok(Some(_)) => Err(self.fail("it has become another volume")),
            Ok(None) if Instant::now() >= until => Err(self.fail("it has gone")),
            Err(_) if Instant::now() >= until => {
                Err(self.fail("the target does not tell what it is"))
            }
            Err(Failed::Lost(_)) => Ok(()),
            // Targets that start let initiators in before they have all of their units.
            Ok(None) | Err(_) => {
                self.session.pause(until.min(Instant::now() + PAUSE)).await;
                Ok(())
            }
        }
    }

    /// From now on every operation fails.
    fn fail(&self, why: &str) -> Error {
        if !self.gone.replace(true) {
            warn!("unit {} of {:?}: {why}", self.number.get(), self.session);
        }
        Error::Gone
    }
}

/// Whether all data of a command that is said to have succeeded has been moved.
fn is_whole(moved: u32, data: Data<'_>, completion: &Completion) -> bool {
    moved as usize == data.len() && !matches!(completion.residual, Residual::Under(_))
}

/// Looks at a unit whenever it may have changed: one that has grown is used beyond its old end only when that
/// is known. One that nobody uses is asked now and then, as a target tells nothing of itself.
async fn watch(lun: Weak<Lun>, session: Session, unit: Number) {
    let every = session.options().look_every;
    let mut generation = session.generation();
    loop {
        let changed = session.changed(generation);
        let changed =
            if every.is_zero() { Ok(changed.await) } else { timeout(every, changed).await };
        match changed {
            Ok(Some(next)) => generation = next,
            Ok(None) => return,
            Err(_) => match session.live() {
                Some(live) if live.has_changed(unit).await => session.note(),
                _ => continue,
            },
        }
        let Some(lun) = lun.upgrade() else { return };
        let until = Instant::now() + session.options().patience;
        if let Some(live) = session.live()
            && lun.look(&live, until).await.is_err()
        {
            return;
        }
    }
}

/// Only the size changes while a device lives, and only upwards.
fn grown(before: Told, now: &Told) -> Told {
    let info = Info { blocks: now.info.blocks, ..before.info };
    Told { info, ..before }
}

impl Layer for Lun {
    fn name(&self) -> &'static str {
        "iscsi"
    }

    fn info(&self) -> Info {
        self.told.get().info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let ctx = &ctx;
        let done = match op {
            Op::Read { at, blocks } => return self.read(at, blocks, ctx).await,
            // Which blocks have space behind them is not asked.
            Op::Map { blocks, .. } => return Ok(Run { blocks, mapped: true }.into_bufs(ctx)),
            Op::Write { at, data, fua } => self.write(at, &data, fua, ctx).await,
            Op::Zero { at, blocks, unmap, fua } => self.zero((at, blocks), unmap, fua, ctx).await,
            Op::Unmap { at, blocks } => self.unmap(at, blocks, ctx).await,
            Op::Flush => self.flush(ctx).await,
        };
        done.map(|()| Bufs::new())
    }
}
