//! A pool on the core that keeps its metadata: what is asked of it, and who is told.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use rt::Core;
use rt::disk::Disk;
use tokio::sync::{RwLock, mpsc, oneshot};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::allocate::{Reserved, choose, choose_one};
use super::ask::{
    Ask, ColumnAt, Comes, Event, ExtentInfo, MemberInfo, PoolHandle, PoolInfo, VolumeInfo,
};
use super::disk::MemberDisk;
use super::error::{PoolError, failed};
use super::label::{Label, State};
use super::layout::Layout;
use super::metadata::{
    Change, MAX_EXTENT_BYTES, MAX_RINGS, MemberId, Members, Metadata, PIECE_BYTES, Piece,
    STRIP_BYTES, Stamp, Standing, VolumeId,
};
use super::opening::{Disks, NewDisk, Start, open_new};
use super::recovery;
use super::report::ScrubReport;
use super::writer::{LONG_PATIENCE, Writer};
use super::{TEXT_BYTES, Text};
use crate::identity::random_uuid;
use crate::raid::geometry::{Level, ROW_BYTES, Shape};
use crate::raid::{ALL_REGIONS, Scrubbed};

/// How often is looked whether disks may leave, and something may be made whole.
const LOOK: Duration = Duration::from_secs(10);

/// What a pool is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatePool {
    /// Its identity.
    pub id: Uuid,
    /// What it is called.
    pub name: String,
    /// How volumes bear the loss of disks.
    pub level: Level,
    /// Columns of an extent; as many as there are disks, if that is not said.
    pub columns: Option<u16>,
    /// Bytes of a strip: a power of two from 16 KiB to 128 KiB.
    pub strip_bytes: u32,
    /// How many cores may have volumes of it, for good.
    pub rings: u16,
    /// Its disks.
    pub disks: Vec<NewDisk>,
    /// Disks that wait for others to fail.
    pub spares: Vec<NewDisk>,
    /// Go through the page cache where a file system has no direct I/O.
    pub buffered: bool,
}

/// What pool is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenPool {
    /// Its identity.
    pub id: Uuid,
    /// Where to look for its disks. Those that are not there, or hold something else, are passed over.
    pub paths: Vec<PathBuf>,
    /// Disks that a person says are gone for good: serial numbers, paths, or numbers of members.
    pub without: Vec<String>,
    /// Go through the page cache where a file system has no direct I/O.
    pub buffered: bool,
}

/// What volume a pool is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewPoolVolume {
    /// Its identity.
    pub id: Uuid,
    /// Its size in bytes.
    pub bytes: u64,
    /// Length of its blocks in bytes: 512 or 4096.
    pub block_size: u32,
    /// Whether it has all its room from the beginning, and keeps it.
    pub thick: bool,
}

/// A pool that is open, on the core that keeps its metadata.
#[derive(Debug)]
pub struct Pool {
    pub(super) core: Core,
    buffered: bool,
    pub(super) writer: Rc<Writer>,
    handle: PoolHandle,
    reserved: RefCell<Reserved>,
    seats: RefCell<Vec<(u16, mpsc::UnboundedSender<Event>)>>,
    /// Rings that somebody has, or has left with what is to be mended by.
    seated: RefCell<BTreeSet<u16>>,
    /// The rings that have what was under way of volumes.
    homes: RefCell<BTreeMap<VolumeId, u16>>,
    /// How often numbers of entries have begun in this opening.
    beginnings: Cell<u64>,
    /// Whoever lets a member in, or out; and, together, those who must not see half of that.
    membership: RwLock<()>,
    /// Members that are slow, and those that do not answer and are waited for, as far as that has been logged.
    slow: RefCell<BTreeSet<MemberId>>,
    awaited: RefCell<BTreeSet<MemberId>>,
    /// The member that is being let in.
    coming: Cell<Option<MemberId>>,
    /// Columns that are on their way to another place.
    moving: RefCell<BTreeMap<ColumnAt, Piece>>,
    /// Members that are about to come back: what lies on them stays there.
    returning: RefCell<BTreeSet<MemberId>>,
    /// Members that leave the pool when nothing lies on them any more.
    retiring: RefCell<BTreeSet<MemberId>>,
    tasks: RefCell<Vec<JoinHandle<()>>>,
    /// The scrub that is under way, or the last one, and how many cores have not ended it.
    scrub: Cell<Option<(ScrubReport, usize)>>,
    is_closed: Cell<bool>,
}

/// The longest pieces of which an extent of so many columns of data has at most 64 MiB, and the shape with them.
fn shape_of(what: &CreatePool) -> Result<Shape, PoolError> {
    let count = u16::try_from(what.disks.len()).unwrap_or(u16::MAX);
    let most = match what.level {
        Level::Copies(copies) if copies > 0 => count / copies * copies,
        _ => count,
    };
    // What holds 64 MiB with the shortest pieces.
    let least_piece = PIECE_BYTES[0];
    let data = u16::try_from(MAX_EXTENT_BYTES / least_piece).unwrap_or(u16::MAX);
    let widest = match what.level {
        Level::Copies(copies) => data.saturating_mul(copies),
        level => data + level.parities(),
    };
    let columns = what.columns.unwrap_or_else(|| most.min(widest));
    if columns > count {
        let message = format!("{columns} columns need as many disks, and there are {count}");
        return Err(PoolError::new(message));
    }
    let strip = u64::from(what.strip_bytes);
    if !strip.is_power_of_two() || !STRIP_BYTES.contains(&strip) {
        return Err(PoolError::new("a strip has 16K, 32K, 64K or 128K"));
    }
    let rows = u32::try_from(strip / u64::from(ROW_BYTES)).unwrap_or(0);
    let of = |piece: u64| {
        let stripes = u32::try_from(piece / strip).unwrap_or(0);
        Shape::new(what.level, columns, rows, stripes)
    };
    let shapes = PIECE_BYTES.iter().rev().map(|piece| (*piece, of(*piece)));
    for (piece, shape) in shapes {
        let shape = shape.map_err(|why| PoolError::new(why.to_string()))?;
        if piece * u64::from(shape.data()) <= MAX_EXTENT_BYTES {
            return Ok(shape);
        }
    }
    Err(PoolError::new(format!(
        "an extent cannot have {columns} columns: choose fewer with --columns"
    )))
}

fn add_change(label: &Label, spare: bool) -> Change {
    Change::Add {
        member: label.number,
        uuid: label.member,
        serial: label.serial,
        units: label.layout.units,
        room: label.layout.room,
        units_at: label.layout.units_at,
        spare,
    }
}

impl Pool {
    /// Makes a pool of these disks, and opens it. What fails leaves disks that say that they were never finished.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn create(core: &Core, what: &CreatePool) -> Result<Rc<Self>, PoolError> {
        let shape = shape_of(what)?;
        if !(1..=MAX_RINGS).contains(&what.rings) {
            return Err(PoolError::new(format!("a pool has 1 to {MAX_RINGS} rings")));
        }
        let name = Text::new(&what.name);
        let mut metadata = Metadata::new(what.id, name, shape, what.rings);
        let mut disks = Vec::new();
        for new in what.disks.iter().chain(&what.spares) {
            let disk = open_new(core, new, what.buffered).await?;
            let number = MemberId(u16::try_from(disks.len()).unwrap_or(u16::MAX));
            disks.push(made(core, disk, &metadata, number)?);
        }
        let mut changes = vec![Change::Opened { id: random_uuid(core), forced: false }];
        let spare = |n: usize| n >= what.disks.len();
        changes.extend(disks.iter().enumerate().map(|(n, d)| add_change(&d.label(), spare(n))));
        metadata.start(0)?;
        changes.iter().try_for_each(|change| metadata.apply(change))?;
        let bytes = metadata.snapshot();
        for disk in &disks {
            make(disk, &bytes, metadata.stamp()).await?;
        }
        for disk in &disks {
            disk.set_state(State::Made).await?;
        }
        // They are opened as they will be from now on.
        drop(disks);
        let paths = what.disks.iter().chain(&what.spares).map(|new| new.path.clone());
        let (paths, without) = (paths.collect(), Vec::new());
        let open = OpenPool { id: what.id, paths, without, buffered: what.buffered };
        Self::open(core, &open).await
    }

    /// Opens a pool: disks are found by what they say, in whatever place, and what a crash has left is mended.
    ///
    /// # Errors
    /// Why it may not be opened: which disks are missing, or contradict others, and what to do.
    pub async fn open(core: &Core, what: &OpenPool) -> Result<Rc<Self>, PoolError> {
        let disks = Disks::find(core, what.id, &what.paths, what.buffered).await;
        let start = disks.believe(&what.without)?;
        let start = start.brought_up().await;
        let missing = start.missing();
        let Start { metadata, supporters, returning, excused, forced, .. } = start;
        let (failing, failed) = mpsc::unbounded_channel();
        let writer = Writer::new(metadata, supporters, excused, failing);
        let writing = tokio::task::spawn_local(Rc::clone(&writer).run());
        let opened = Self::begin(core, what, &writer, &missing, forced).await;
        if let Err(why) = opened {
            writer.close().await;
            writing.abort();
            return Err(why);
        }
        let (handle, asks) = PoolHandle::new();
        let pool = Rc::new(Self {
            core: core.clone(),
            buffered: what.buffered,
            writer,
            handle,
            reserved: RefCell::default(),
            seats: RefCell::default(),
            seated: RefCell::default(),
            homes: RefCell::default(),
            beginnings: Cell::new(0),
            membership: RwLock::new(()),
            slow: RefCell::default(),
            awaited: RefCell::default(),
            coming: Cell::new(None),
            moving: RefCell::default(),
            returning: RefCell::new(returning.iter().map(|(id, ..)| *id).collect()),
            retiring: RefCell::default(),
            tasks: RefCell::new(vec![writing]),
            scrub: Cell::new(None),
            is_closed: Cell::new(false),
        });
        pool.begin_tasks(asks, failed, returning);
        Ok(pool)
    }

    /// The first version of an opening, and what follows from it.
    async fn begin(
        core: &Core,
        what: &OpenPool,
        writer: &Rc<Writer>,
        missing: &[MemberId],
        forced: bool,
    ) -> Result<(), PoolError> {
        let mut changes = vec![Change::Opened { id: random_uuid(core), forced }];
        changes.extend(missing.iter().map(|id| Change::Out(*id)));
        for id in missing {
            let serial = writer.metadata().member(*id).map(|m| m.serial);
            let serial = serial.unwrap_or_else(|| Text::new(""));
            tracing::error!(member = id.0, %serial, pool = %what.id, "a disk of the pool is not there: it is out");
        }
        writer.commit_all(changes).await?;
        let opened = writer.metadata().stamp();
        for (id, disk) in writer.disks() {
            let label = Label { opened, state: State::Made, ..disk.label() };
            if let Err(why) = disk.relabel(label).await {
                tracing::error!(path = %disk.path().display(), error = %why, "a disk of the pool is out");
                writer.put_out(id).await?;
            }
        }
        recovery::mend(core, writer).await?;
        writer.commit(Change::Recovered).await
    }

    fn begin_tasks(
        self: &Rc<Self>,
        mut asks: mpsc::Receiver<Ask>,
        mut failing: mpsc::UnboundedReceiver<MemberId>,
        returning: Vec<(MemberId, Rc<MemberDisk>, Option<u64>)>,
    ) {
        let weak = Rc::downgrade(self);
        let serving = tokio::task::spawn_local(async move {
            while let Some(ask) = asks.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                tokio::task::spawn_local(async move { pool.answer(ask).await });
            }
        });
        let weak = Rc::downgrade(self);
        let telling = tokio::task::spawn_local(async move {
            while let Some(member) = failing.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                pool.tell(|| Event::Out(member));
                pool.call_spare().await;
            }
        });
        let weak = Rc::downgrade(self);
        let caring = tokio::task::spawn_local(async move {
            for (id, disk, era) in returning {
                let Some(pool) = weak.upgrade() else { return };
                pool.take_back(id, disk, era).await;
            }
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(pool) = weak.upgrade() else { return };
                pool.retire().await;
                pool.tell(|| Event::Look);
            }
        });
        self.tasks.borrow_mut().extend([serving, telling, caring]);
    }

    /// Ends it. No volume of it may be open any more.
    ///
    /// # Errors
    /// That the last changes could not be written.
    pub async fn close(&self) -> Result<(), PoolError> {
        if self.is_closed.replace(true) {
            return Ok(());
        }
        self.writer.close().await;
        self.tasks.borrow_mut().drain(..).for_each(|task| task.abort());
        self.writer.broken().map_or(Ok(()), Err)
    }

    /// Takes the labels off its disks, and ends it. No volume may be left in it.
    ///
    /// # Errors
    /// That there are volumes, or that a disk cannot be written.
    pub async fn destroy(&self) -> Result<(), PoolError> {
        let volumes = self.writer.metadata().volumes().count();
        if volumes > 0 {
            return Err(PoolError::new(format!("the pool has {volumes} volumes")));
        }
        let disks = self.writer.disks();
        self.close().await?;
        for (_, disk) in disks {
            disk.set_state(State::Removed).await?;
        }
        Ok(())
    }

    /// What other cores reach it by.
    #[must_use]
    pub fn handle(&self) -> PoolHandle {
        self.handle.clone()
    }

    /// A disk of it that is open here.
    pub(super) fn disk(&self, member: MemberId) -> Option<Disk> {
        self.writer.disk(member).map(|disk| disk.disk().clone())
    }

    pub(super) fn reserved(&self) -> std::cell::Ref<'_, Reserved> {
        self.reserved.borrow()
    }

    fn tell(&self, event: impl Fn() -> Event) {
        self.seats.borrow_mut().retain(|(_, seat)| seat.send(event()).is_ok());
    }

    async fn answer(self: Rc<Self>, ask: Ask) {
        // Who asked may be gone: it is done all the same.
        match ask {
            Ask::Join { ring, events, answer } => drop(answer.send(self.join(ring, events).await)),
            Ask::Rise { ring } => {
                self.seated.borrow_mut().remove(&ring);
                self.homes.borrow_mut().retain(|_, home| *home != ring);
            }
            Ask::Volume { volume, ring, answer } => {
                drop(answer.send(self.volume_info(volume, ring).await));
            }
            Ask::Out { member, answer } => drop(answer.send(self.out(member).await)),
            Ask::GiveUp { member, silent, answer } => {
                drop(answer.send(self.give_up(member, silent).await));
            }
            Ask::Slow { member, is_slow } => self.slow(member, is_slow),
            Ask::Changed { volume, index, regions, answer } => {
                let mark = Change::Mark { volume, index, regions };
                drop(answer.send(self.writer.commit(mark).await));
            }
            Ask::Extent { volume, index, answer } => {
                drop(answer.send(self.allocate(volume, index).await));
            }
            Ask::Free { volume, index, answer } => {
                let freed = self.writer.commit(Change::Free { volume, index }).await;
                if freed.is_ok() {
                    self.stay(|of| (of.volume, of.index) == (volume, index));
                }
                drop(answer.send(freed));
            }
            Ask::Place { of, answer } => drop(answer.send(self.place(of).await)),
            Ask::Moved { of, to, answer } => drop(answer.send(self.moved(of, to).await)),
            Ask::NotMoved { of } => {
                self.stay(|other| *other == of);
            }
            Ask::Scrubbed { bytes, found } => self.scrubbed(bytes, found),
            Ask::ScrubEnded => self.scrub_ended(),
            Ask::Caught { of, answer } => {
                let ColumnAt { volume, index, column } = of;
                let caught = Change::Caught { volume, index, column, regions: ALL_REGIONS };
                drop(answer.send(self.writer.commit(caught).await));
            }
        }
    }

    /// What a member is called, and where it is, for messages.
    fn identity(&self, id: MemberId) -> (String, String) {
        let serial = self.writer.metadata().member(id).map(|m| m.serial.to_string());
        let path = self.writer.disk(id).map(|disk| disk.path().display().to_string());
        (serial.unwrap_or_default(), path.unwrap_or_default())
    }

    fn member_info(&self, id: MemberId) -> Option<MemberInfo> {
        let disk = self.writer.disk(id)?;
        let label = disk.label();
        let (uuid, layout, errors) = (label.member, label.layout, disk.errors());
        Some(MemberInfo { id, uuid, path: disk.path().to_owned(), layout, errors })
    }

    fn leaving(&self) -> Members {
        let metadata = self.writer.metadata();
        let leaving = metadata.members().filter(|(_, m)| m.standing == Standing::Leaving);
        leaving.map(|(id, _)| id).collect()
    }

    async fn join(
        &self,
        ring: u16,
        events: mpsc::UnboundedSender<Event>,
    ) -> Result<PoolInfo, PoolError> {
        // Who comes in meanwhile would be written by all others.
        let _together = self.membership.read().await;
        let metadata = self.writer.metadata();
        let rings = metadata.rings;
        if ring >= rings {
            let what = "the pool serves volumes on";
            let message = format!("{what} {rings} cores, and this one is number {ring}");
            return Err(PoolError::new(message));
        }
        if !self.seated.borrow_mut().insert(ring) {
            let message = format!(
                "core {ring} uses the pool already, or has left it in the middle of something"
            );
            return Err(PoolError::new(message).hinting("close the pool, and open it again"));
        }
        self.seats.borrow_mut().push((ring, events));
        let members = metadata.voters().iter().filter_map(|id| self.member_info(id)).collect();
        Ok(PoolInfo {
            pool: metadata.pool,
            era: metadata.era(),
            first: self.beginning(),
            buffered: self.buffered,
            members,
            leaving: self.leaving(),
        })
    }

    fn find(&self, volume: Uuid) -> Result<VolumeId, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volumes().find(|(_, v)| v.uuid == volume).map(|(id, _)| id);
        found.ok_or_else(|| PoolError::new(format!("the pool has no volume {volume}")))
    }

    /// A number beyond those of all batches and entries of this opening, and with as much room behind it as they take.
    fn beginning(&self) -> u64 {
        self.beginnings.set(self.beginnings.get() + 1);
        self.beginnings.get() << 32
    }

    /// What was under way of a volume is not looked for any more in the parity log of the core that had it open, and that core
    /// writes nothing of it. `but` is a ring where it may be looked for.
    async fn leave(&self, id: VolumeId, uuid: Uuid, but: Option<u16>) -> Result<(), PoolError> {
        let home = self.homes.borrow().get(&id).copied();
        let Some(home) = home.filter(|home| Some(*home) != but) else { return Ok(()) };
        let (done, is_done) = oneshot::channel();
        {
            let seats = self.seats.borrow();
            let seat = seats.iter().find(|(ring, seat)| *ring == home && !seat.is_closed());
            if let Some((_, seat)) = seat {
                drop(seat.send(Event::Leave(uuid, done)));
            }
        }
        // Who has left the pool in order meanwhile has left the volume as well.
        if is_done.await.is_err() && self.seated.borrow().contains(&home) {
            let message = format!("core {home} has not let go of volume {uuid}");
            return Err(PoolError::new(message).hinting("close the pool, and open it again"));
        }
        self.homes.borrow_mut().remove(&id);
        Ok(())
    }

    async fn volume_info(&self, uuid: Uuid, ring: u16) -> Result<VolumeInfo, PoolError> {
        let id = self.find(uuid)?;
        self.leave(id, uuid, Some(ring)).await?;
        self.homes.borrow_mut().insert(id, ring);
        // What one lacks that comes in is known when it is in.
        let _together = self.membership.read().await;
        let metadata = self.writer.metadata();
        let gone = || PoolError::new(format!("the pool has no volume {uuid}"));
        let volume = metadata.volume(id).ok_or_else(gone)?;
        let extents = volume
            .extents()
            .map(|(index, extent)| ExtentInfo::of(&metadata, volume, index, extent));
        Ok(VolumeInfo {
            id,
            shape: volume.shape,
            bytes: volume.bytes,
            block_size: volume.block_size,
            thick: volume.thick,
            first: self.beginning(),
            extents: extents.collect(),
        })
    }

    /// A member is out: ends when all others know.
    async fn out(self: &Rc<Self>, member: MemberId) -> Result<(), PoolError> {
        // One that is being let in is out when it is in. Of others nobody may wait for that: whoever hears that one is out lets
        // the other in with what he hears next.
        let is_coming = self.coming.get() == Some(member);
        let waits = if is_coming { Some(self.membership.read().await) } else { None };
        let (serial, path) = self.identity(member);
        let is_news = self.writer.put_out(member).await?;
        drop(waits);
        if !is_news {
            return Ok(());
        }
        tracing::error!(member = member.0, %serial, %path, "a disk of the pool is out: replace it (windrose pool replace)");
        self.tell(|| Event::Out(member));
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move { pool.call_spare().await });
        Ok(())
    }

    /// A member does not answer, as others of these do not: it is out, if all of them may be. Whether it is.
    async fn give_up(
        self: &Rc<Self>,
        member: MemberId,
        silent: Members,
    ) -> Result<bool, PoolError> {
        if self.coming.get() == Some(member) {
            return Ok(false);
        }
        let (serial, path) = self.identity(member);
        let Some(is_news) = self.writer.give_up_on(member, silent).await? else {
            if self.awaited.borrow_mut().insert(member) {
                tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not answer, and without it data would be lost: it is waited for; see to its cable and power");
            }
            return Ok(false);
        };
        if is_news {
            tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not answer and is out: replace it (windrose pool replace)");
            self.tell(|| Event::Out(member));
            let pool = Rc::clone(self);
            tokio::task::spawn_local(async move { pool.call_spare().await });
        }
        Ok(true)
    }

    /// A member lags behind the others for a core, or does not any more.
    fn slow(&self, member: MemberId, is_slow: bool) {
        let (serial, path) = self.identity(member);
        let errors = self.writer.errors(member);
        let still = errors.is_some_and(|errors| errors.slow_now.load(Ordering::Relaxed) > 0);
        let is_slow = is_slow || still;
        let mut slow = self.slow.borrow_mut();
        if is_slow && slow.insert(member) {
            tracing::warn!(member = member.0, %serial, %path, "a disk of the pool is slow, and is read around: replace it if that goes on (windrose pool replace)");
        } else if !is_slow && slow.remove(&member) {
            self.awaited.borrow_mut().remove(&member);
            tracing::info!(member = member.0, %serial, %path, "a disk of the pool answers in time again");
        }
    }

    /// A spare takes its place beside the others, if one is out and pieces lie on it.
    async fn call_spare(&self) {
        let spare = {
            let metadata = self.writer.metadata();
            let mut all = metadata.members();
            let needed = all.any(|(_, m)| !m.standing.votes() && m.taken() > 0);
            let mut spares = metadata.members().filter(|(_, m)| m.standing == Standing::Spare);
            spares.next().map(|(id, _)| id).filter(|_| needed)
        };
        if let Some(member) = spare {
            tracing::warn!(member = member.0, "a spare disk takes the place of one that is out");
            let stand = Change::Stand { member, standing: Standing::In };
            if let Err(why) = self.writer.commit(stand).await {
                tracing::error!(member = member.0, error = %why, "the spare disk cannot be used");
            }
        }
        self.tell(|| Event::Look);
    }

    /// Gives a volume an extent at `index`.
    async fn allocate(
        self: &Rc<Self>,
        volume: VolumeId,
        index: u32,
    ) -> Result<ExtentInfo, PoolError> {
        loop {
            // It may have been given already: to a volume that has grown, or keeps all its room.
            if let Ok(info) = self.extent_info(volume, index) {
                return Ok(info);
            }
            // One that was out is not zeroed, and may not be in when the extent is.
            let together = self.membership.read().await;
            let pieces = {
                let metadata = self.writer.metadata();
                let gone = || PoolError::new("the volume is gone");
                let shape = metadata.volume(volume).ok_or_else(gone)?.shape;
                choose(&metadata, &self.reserved.borrow(), &shape)
            };
            let pieces = pieces.ok_or_else(|| self.full())?;
            self.reserved.borrow_mut().take(&pieces);
            let cleared = self.clear(&pieces).await;
            let allocated = match &cleared {
                Ok(()) => {
                    let pieces = pieces.clone();
                    self.writer.commit(Change::Allocate { volume, index, pieces }).await
                }
                Err(_) => Ok(()),
            };
            self.reserved.borrow_mut().give(&pieces);
            drop(together);
            match cleared {
                // It is out now: there may be others.
                Err(member) => self.out(member).await?,
                Ok(()) => {
                    return match (allocated, self.extent_info(volume, index)) {
                        (Err(why), Err(_)) => Err(why),
                        (_, info) => info,
                    };
                }
            }
        }
    }

    fn full(&self) -> PoolError {
        let name = self.writer.metadata().name;
        PoolError::no_space(format!("pool {name} has no room for another extent"))
            .hinting("add disks to the pool, or delete something")
    }

    fn extent_info(&self, volume: VolumeId, index: u32) -> Result<ExtentInfo, PoolError> {
        let metadata = self.writer.metadata();
        let found = metadata.volume(volume).and_then(|v| Some((v, v.extent(index)?)));
        let (volume, extent) = found.ok_or_else(|| PoolError::new("the extent is gone"))?;
        Ok(ExtentInfo::of(&metadata, volume, index, extent))
    }

    /// Makes pieces zero, those on members that are written. The error is a member that cannot be.
    async fn clear(&self, pieces: &[Piece]) -> Result<(), MemberId> {
        let disks = pieces.iter().filter_map(|p| Some((*p, self.writer.disk(p.member)?)));
        let each =
            disks.map(|(piece, disk)| (piece.member, async move { disk.clear(piece).await }));
        let cleared = self.writer.at_each(LONG_PATIENCE, each).await;
        cleared.into_iter().try_for_each(|(member, cleared)| {
            cleared.map_err(|why| {
                let path = self.identity(member).1;
                tracing::error!(%path, error = %why, "a disk cannot be written");
                member
            })
        })
    }

    /// Another place for a column.
    async fn place(&self, of: ColumnAt) -> Result<Option<(Piece, u64)>, PoolError> {
        let piece = {
            let metadata = self.writer.metadata();
            let extent = metadata.volume(of.volume).and_then(|v| v.extent(of.index));
            let Some(extent) = extent else { return Ok(None) };
            let here = extent.pieces.get(usize::from(of.column)).map(|piece| piece.member);
            let stays = here.is_none_or(|member| self.returning.borrow().contains(&member));
            if stays || self.moving.borrow().contains_key(&of) {
                return Ok(None);
            }
            let others = (0u16..).zip(&extent.pieces).filter(|(n, _)| *n != of.column);
            let others: Members = others.map(|(_, piece)| piece.member).collect();
            choose_one(&metadata, &self.reserved.borrow(), others)
        };
        let Some(piece) = piece else { return Ok(None) };
        self.reserved.borrow_mut().take(&[piece]);
        self.moving.borrow_mut().insert(of, piece);
        let at = self.writer.metadata().row_of(piece);
        Ok(Some((piece, at)))
    }

    /// These columns do not go where they were to go.
    fn stay(&self, which: impl Fn(&ColumnAt) -> bool) {
        let mut moving = self.moving.borrow_mut();
        let staying = moving.extract_if(.., |of, _| which(of));
        let places: Vec<Piece> = staying.map(|(_, to)| to).collect();
        self.reserved.borrow_mut().give(&places);
    }

    async fn moved(self: &Rc<Self>, of: ColumnAt, to: Piece) -> Result<bool, PoolError> {
        let ColumnAt { volume, index, column } = of;
        let moved = self.writer.commit(Change::Move { volume, index, column, to }).await;
        if moved.is_ok() {
            self.moving.borrow_mut().remove(&of);
            self.reserved.borrow_mut().give(&[to]);
            self.retire().await;
        }
        match moved {
            Ok(()) => Ok(true),
            Err(why) if self.writer.broken().is_some() || self.is_closed.get() => Err(why),
            Err(why) => {
                tracing::warn!(volume = volume.0, index, column, error = %why, "a piece is not moved");
                Ok(false)
            }
        }
    }

    /// Adds a disk.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn add(&self, new: &NewDisk, spare: bool) -> Result<(), PoolError> {
        let disk = open_new(&self.core, new, self.buffered).await?;
        let _alone = self.membership.write().await;
        let disk = {
            let metadata = self.writer.metadata();
            let full = || PoolError::new("the pool has as many disks as it may have");
            let number = metadata.next_member().ok_or_else(full)?;
            made(&self.core, disk, &metadata, number)?
        };
        let disk = Rc::new(disk);
        let forgotten = async {
            disk.relabel(disk.label()).await?;
            disk.forget_snapshots().await
        };
        forgotten.await.map_err(|why| failed(disk.path(), why))?;
        let label = disk.label();
        self.let_in(label.number, &disk, Vec::new(), add_change(&label, spare)).await?;
        disk.set_state(State::Made).await?;
        self.tell(|| Event::Look);
        Ok(())
    }

    /// A disk gets every version and all that is written, and a vote by `change`. Whoever asks has the membership.
    async fn let_in(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        behind: Vec<(u64, u16, u32)>,
        change: Change,
    ) -> Result<(), PoolError> {
        self.coming.set(Some(id));
        let is_in = self.try_in(id, disk, behind, change).await;
        self.coming.set(None);
        is_in
    }

    async fn try_in(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        behind: Vec<(u64, u16, u32)>,
        change: Change,
    ) -> Result<(), PoolError> {
        self.writer.bring_up(id, disk).await?;
        let member = self.member_info(id);
        let member = member.ok_or_else(|| PoolError::at(disk.path(), "it failed at once"))?;
        // All write to it before it counts: none of what is written from then on is behind.
        let mut all = Vec::new();
        self.seats.borrow_mut().retain(|(_, seat)| {
            let (done, is_done) = oneshot::channel();
            let told = seat.clone();
            all.push(async move { (told, is_done.await) });
            let (member, behind) = (member.clone(), behind.clone());
            seat.send(Event::In(Box::new(Comes { member, behind, done }))).is_ok()
        });
        let all_do =
            join_all(all).await.into_iter().all(|(seat, done)| done.is_ok() || seat.is_closed());
        let committed = match all_do {
            true => self.writer.commit(change).await,
            false => Err(PoolError::at(disk.path(), "a core cannot open it")),
        };
        self.writer.is_up(id);
        if committed.is_err() {
            self.tell(|| Event::Out(id));
        }
        committed
    }

    /// A member that was out is there again. If it knew an era it lacks what is marked, and what was under way then.
    async fn take_back(&self, id: MemberId, disk: Rc<MemberDisk>, era: Option<u64>) {
        self.let_back(id, disk, era).await;
        self.returning.borrow_mut().remove(&id);
    }

    async fn let_back(&self, id: MemberId, disk: Rc<MemberDisk>, era: Option<u64>) {
        let _alone = self.membership.write().await;
        let is_out = self.writer.metadata().member(id).is_some_and(|m| !m.standing.votes());
        if !is_out {
            return;
        }
        let marked = match era {
            None => false,
            Some(era) => {
                recovery::mark_under_way(&self.core, &self.writer, id, &disk, era).await.is_ok()
            }
        };
        let behind = behind_on(&self.writer.metadata(), id, marked);
        let path = disk.path().display().to_string();
        let change = Change::Back { member: id, marked };
        let let_in = async {
            if !marked {
                // It knows all when it is brought up, and has nothing: that is to be seen if it comes no further.
                disk.set_state(State::Making).await?;
            }
            self.let_in(id, &disk, behind, change).await
        };
        match let_in.await {
            Ok(()) => {
                if let Err(why) = disk.set_state(State::Made).await {
                    tracing::warn!(%path, error = %why, "its label says that it is still being made");
                }
                tracing::info!(%path, marked, "a disk of the pool is back");
                self.tell(|| Event::Look);
            }
            Err(why) => {
                tracing::error!(%path, error = %why, "a disk of the pool cannot come back");
            }
        }
    }

    /// The member that a person means by a serial number, a path, or a number.
    fn named(&self, name: &str) -> Result<MemberId, PoolError> {
        let metadata = self.writer.metadata();
        let is_it = |id: MemberId, serial: &Text| {
            let path = self.writer.disk(id).is_some_and(|d| d.path() == std::path::Path::new(name));
            path || (!serial.is_empty() && serial.as_str() == name) || id.0.to_string() == name
        };
        let found = metadata.members().find(|(id, m)| is_it(*id, &m.serial)).map(|(id, _)| id);
        found.ok_or_else(|| PoolError::new(format!("pool {} has no disk {name}", metadata.name)))
    }

    /// Takes a disk out of the pool, once what lies on it is elsewhere. That begins now, and goes on.
    ///
    /// # Errors
    /// That there is no such disk, or no room for what lies on it.
    pub async fn remove(&self, disk: &str) -> Result<(), PoolError> {
        let id = self.named(disk)?;
        let (standing, taken, room) = {
            let metadata = self.writer.metadata();
            let member = metadata.member(id).ok_or_else(|| PoolError::new("it is gone"))?;
            let others = metadata.members().filter(|(other, m)| {
                *other != id && matches!(m.standing, Standing::In | Standing::Spare)
            });
            let free: u64 = others.map(|(_, m)| u64::from(m.free())).sum();
            (member.standing, member.taken(), free)
        };
        if u64::from(taken) > room {
            let message = format!("{taken} pieces lie on it, and the others have room for {room}");
            return Err(PoolError::no_space(message).hinting("add a disk first"));
        }
        self.retiring.borrow_mut().insert(id);
        if standing.votes() && taken > 0 {
            let leaving = Standing::Leaving;
            self.writer.commit(Change::Stand { member: id, standing: leaving }).await?;
            let all = self.leaving();
            self.tell(|| Event::Leaving(all));
        }
        self.call_spare().await;
        self.retire().await;
        Ok(())
    }

    /// Puts another disk in the place of one.
    ///
    /// # Errors
    /// Those of [`Self::add`] and [`Self::remove`].
    pub async fn replace(&self, disk: &str, with: &NewDisk) -> Result<(), PoolError> {
        let id = self.named(disk)?;
        self.add(with, false).await?;
        self.remove(&id.0.to_string()).await
    }

    /// Members that leave and have nothing any more are none.
    async fn retire(&self) {
        let empty: Vec<_> = {
            let (metadata, retiring) = (self.writer.metadata(), self.retiring.borrow());
            let leaves =
                |id: &MemberId, standing| retiring.contains(id) || standing == Standing::Leaving;
            let members =
                metadata.members().filter(|(id, m)| m.taken() == 0 && leaves(id, m.standing));
            members.map(|(id, m)| (id, m.standing.votes())).collect()
        };
        for (id, votes) in empty {
            let disk = self.writer.disk(id);
            if let Err(why) = self.remove_empty(id, votes).await {
                tracing::warn!(member = id.0, error = %why, "a disk cannot leave the pool yet");
                continue;
            }
            self.retiring.borrow_mut().remove(&id);
            if let Some(disk) = disk
                && let Err(why) = disk.set_state(State::Removed).await
            {
                tracing::warn!(error = %why, "its label says that it is of the pool");
            }
        }
    }

    async fn remove_empty(&self, id: MemberId, votes: bool) -> Result<(), PoolError> {
        let _alone = self.membership.write().await;
        if votes {
            self.writer.commit(Change::Out(id)).await?;
            self.tell(|| Event::Out(id));
        }
        self.writer.commit(Change::Remove(id)).await
    }

    /// Begins to read and compare all of its volumes that are open, and to repair them. That goes on.
    ///
    /// # Errors
    /// That it is under way already, or no volume is open.
    pub fn scrub(&self) -> Result<(), PoolError> {
        if self.scrub.get().is_some_and(|(report, _)| report.running) {
            return Err(PoolError::new("the pool is being scrubbed already"));
        }
        self.tell(|| Event::Scrub);
        let (cores, all_bytes) = (self.seats.borrow().len(), self.report().allocated_bytes);
        if cores == 0 && all_bytes > 0 {
            return Err(PoolError::new("no volume of the pool is open: it cannot be scrubbed"));
        }
        let report = ScrubReport { running: cores > 0, all_bytes, ..ScrubReport::default() };
        self.scrub.set(Some((report, cores)));
        Ok(())
    }

    pub(super) fn scrub_report(&self) -> Option<ScrubReport> {
        self.scrub.get().map(|(report, _)| report)
    }

    fn scrubbed(&self, bytes: u64, found: Scrubbed) {
        if let Some((mut report, cores)) = self.scrub.get() {
            report.done_bytes += bytes;
            report.repaired += found.repaired;
            report.unrepairable += found.unrepairable;
            self.scrub.set(Some((report, cores)));
        }
    }

    fn scrub_ended(&self) {
        if let Some((report, cores)) = self.scrub.get() {
            let left = cores.saturating_sub(1);
            self.scrub.set(Some((ScrubReport { running: left > 0, ..report }, left)));
        }
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// What is in the way; nothing is left of it.
    pub async fn create_volume(self: &Rc<Self>, what: &NewPoolVolume) -> Result<(), PoolError> {
        let NewPoolVolume { id: uuid, bytes, block_size, thick } = *what;
        let (volume, shape) = {
            let metadata = self.writer.metadata();
            (metadata.next_volume(), metadata.shape)
        };
        let change = Change::CreateVolume { volume, uuid, shape, bytes, block_size, thick };
        self.writer.commit(change).await?;
        let filled = if thick { self.fill(volume).await } else { Ok(()) };
        if filled.is_err() {
            self.writer.commit(Change::DeleteVolume(volume)).await?;
        }
        filled
    }

    /// Gives a volume all extents that it does not have.
    async fn fill(self: &Rc<Self>, id: VolumeId) -> Result<(), PoolError> {
        let missing: Vec<u32> = {
            let metadata = self.writer.metadata();
            let Some(volume) = metadata.volume(id) else { return Ok(()) };
            (0..volume.full()).filter(|index| volume.extent(*index).is_none()).collect()
        };
        for index in missing {
            self.allocate(id, index).await?;
        }
        Ok(())
    }

    /// Makes a volume so many bytes large, if it is smaller.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn grow_volume(self: &Rc<Self>, uuid: Uuid, bytes: u64) -> Result<(), PoolError> {
        let id = self.find(uuid)?;
        let (had, thick) = {
            let metadata = self.writer.metadata();
            metadata.volume(id).map_or((u64::MAX, false), |v| (v.bytes, v.thick))
        };
        if bytes > had {
            self.writer.commit(Change::GrowVolume { volume: id, bytes }).await?;
            if thick {
                self.fill(id).await?;
            }
            self.tell(|| Event::Grown(uuid, bytes));
        }
        Ok(())
    }

    /// Deletes a volume that is not open. Nothing happens if there is none.
    ///
    /// # Errors
    /// That nothing more can be written.
    pub async fn delete_volume(&self, uuid: Uuid) -> Result<(), PoolError> {
        match self.find(uuid) {
            Ok(id) => {
                // Maps of its extents would be written where others are by then.
                self.leave(id, uuid, None).await?;
                self.writer.commit(Change::DeleteVolume(id)).await?;
                self.stay(|of| of.volume == id);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }
}

/// What a disk is called when it is not there: its serial number, or where it was.
fn name_of(disk: &Disk) -> Text {
    let path = disk.path().display().to_string();
    let end = path.char_indices().map(|(at, _)| at).find(|at| path.len() - at <= TEXT_BYTES);
    match disk.serial() {
        "" => Text::new(&path[end.unwrap_or(0)..]),
        serial => Text::new(serial),
    }
}

/// A disk that is to be a member, of which nothing is written yet.
fn made(
    core: &Core,
    disk: Disk,
    metadata: &Metadata,
    number: MemberId,
) -> Result<MemberDisk, PoolError> {
    let (shape, rings, size) = (metadata.shape, metadata.rings, disk.info().size);
    let small = || {
        let needed = Layout::least_bytes(&shape, rings);
        let what = format!("is too small: it has {size} bytes and needs {needed}");
        PoolError::at(disk.path(), what)
    };
    let label = Label {
        generation: 0,
        pool: metadata.pool,
        name: metadata.name,
        member: random_uuid(core),
        number,
        serial: name_of(&disk),
        state: State::Making,
        shape,
        rings,
        layout: Layout::of(size, &shape, rings).ok_or_else(small)?,
        opened: Stamp { opening: 0, version: 0, id: Uuid::nil() },
    };
    Ok(MemberDisk::new(disk, core.pool().account(), label))
}

/// Writes what a member of a new pool holds, but for saying that it is finished.
async fn make(disk: &MemberDisk, snapshot: &[u8], stamp: Stamp) -> Result<(), PoolError> {
    let made = async {
        disk.relabel(Label { opened: stamp, ..disk.label() }).await?;
        disk.forget_snapshots().await?;
        disk.forget_changes().await?;
        disk.put_snapshot(snapshot, stamp.version).await
    };
    made.await.map_err(|why| failed(disk.path(), why))
}

/// What columns on a member that comes back lack.
fn behind_on(metadata: &Metadata, id: MemberId, marked: bool) -> Vec<(u64, u16, u32)> {
    let mut all = Vec::new();
    for (_, volume) in metadata.volumes() {
        for (index, extent) in volume.extents() {
            let on_it = (0u16..).zip(&extent.pieces).filter(|(_, piece)| piece.member == id);
            for (column, _) in on_it {
                let regions = if marked { volume.behind(index, column) } else { ALL_REGIONS };
                if regions != 0 {
                    all.push((extent.number, column, regions));
                }
            }
        }
    }
    all
}
