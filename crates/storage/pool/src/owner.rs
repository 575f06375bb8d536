//! A pool on the core that keeps its metadata: what is asked of it, and who is told.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use disk::{Claim, Lost};
use futures_util::future::join_all;
use geometry::{ALL_REGIONS, Level, ROW_BYTES, Shape};
use rt::Core;
use rt::disk::Disk;
use tokio::sync::{Mutex, RwLock, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;
use wire::Text;

use super::allocate::Reserved;
use super::ask::{Ask, ColumnAt, Event, PoolHandle, PoolInfo};
use super::disk::MemberDisk;
use super::error::PoolError;
use super::label::{Label, State};
use super::metadata::{
    Change, MAX_EXTENT_BYTES, MAX_RINGS, MemberId, Metadata, PIECE_BYTES, Piece, STRIP_BYTES,
    VolumeId,
};
use super::multihost::{Ownership, release_all};
use super::opening::{Disks, NewDisk, Returning, Start, open_new};
use super::report::ScrubReport;
use super::writer::{LONG_PATIENCE, PATIENCE, Writer};
use super::{Mistake, recovery};

pub(super) mod counted;
mod membership;
mod scrub;
mod volumes;

use membership::{add_change, made, make};
use volumes::Allocation;

/// How often is looked whether disks may leave, and something may be made whole.
const LOOK: Duration = Duration::from_secs(10);

/// How often errors of disks are written down, if there were any, and how often a version is written while there is something else written, so that a disk which is set back to before is known by the
/// version that it lacks.
const BEAT: Duration = Duration::from_secs(10);

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
    /// Whether what lies in it has checksums, for good.
    pub checksums: bool,
    /// Its disks.
    pub disks: Vec<NewDisk>,
    /// Disks that wait for others to fail.
    pub spares: Vec<NewDisk>,
    /// Go through the page cache where a file system has no direct I/O.
    pub buffered: bool,
    /// Who makes it, where other machines may reach its disks; none if the caller keeps them out.
    pub claim: Option<Claim>,
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
    /// Who opens it, where other machines may reach its disks, and whether a person says that it is to be taken from its last
    /// owner ([`Claim::take_over`]); none if the caller keeps other machines out.
    pub claim: Option<Claim>,
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

/// A member that is being let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Coming {
    id: MemberId,
    stage: Stage,
}

/// How far a member is that is being let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It is brought up, and cores begin to write to it, each when it can.
    Begun,
    /// One of them waits for it no more, and may have written without it: it will not be in.
    GivenUp,
    /// All of them write to it, and it is being written down that it is in.
    Recorded,
}

/// A pool that is open, on the core that keeps its metadata.
#[derive(Debug)]
pub struct Pool {
    pub(super) core: Core,
    buffered: bool,
    /// For disks that come into it.
    ownership: Ownership,
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
    /// Whoever makes a volume.
    creating: Mutex<()>,
    /// Members that are slow, and those that do not answer and are waited for, as far as that has been logged.
    slow: RefCell<BTreeSet<MemberId>>,
    awaited: RefCell<BTreeSet<MemberId>>,
    /// The member that is being let in.
    coming: Cell<Option<Coming>>,
    /// How often members have been let in, or were to be.
    visits: RefCell<BTreeMap<MemberId, u64>>,
    /// Columns that are on their way to another place.
    moving: RefCell<BTreeMap<ColumnAt, Piece>>,
    /// Members that are about to come back: what lies on them stays there.
    returning: RefCell<BTreeSet<MemberId>>,
    /// Where each member was opened last.
    opened: RefCell<BTreeMap<MemberId, PathBuf>>,
    /// Members that are out and were nowhere when that was looked at last.
    away: RefCell<BTreeSet<MemberId>>,
    /// Members that leave the pool when nothing lies on them any more.
    retiring: RefCell<BTreeSet<MemberId>>,
    tasks: RefCell<Vec<JoinHandle<()>>>,
    /// The scrub that is under way, or the last one, and how many cores have not ended it.
    scrub: Cell<Option<(ScrubReport, usize)>>,
    is_closed: Cell<bool>,
    mistake: Mistake,
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
        metadata.checksums = what.checksums;
        let mut disks = Vec::new();
        let all = what.disks.iter().chain(&what.spares);
        // All at once: one that does not answer is named after a minute, and so are several.
        let opened = all.map(|new| open_new(core, new, what.buffered, what.claim));
        for disk in join_all(opened).await {
            let number = MemberId(u16::try_from(disks.len()).unwrap_or(u16::MAX));
            disks.push(made(core, disk?, &metadata, number)?);
        }
        let mut changes = vec![Change::Opened { id: core.random_uuid(), forced: false }];
        let spare = |n: usize| n >= what.disks.len();
        changes.extend(disks.iter().enumerate().map(|(n, d)| add_change(&d.label(), spare(n))));
        metadata.start(0)?;
        changes.iter().try_for_each(|change| metadata.apply(change))?;
        let bytes = metadata.snapshot();
        let claim = what.claim.map(|claim| Claim { take_over: true, ..claim });
        let ownership = Ownership { claim, told: None };
        let made = join_all(
            disks.iter().map(|disk| make(core, disk, &ownership, (&bytes, metadata.stamp()))),
        );
        made.await.into_iter().collect::<Result<Vec<()>, _>>()?;
        for disk in &disks {
            disk.set_state(State::Made).await?;
        }
        // They are opened as they will be from now on.
        join_all(disks.iter().map(MemberDisk::let_go)).await;
        drop(disks);
        let paths = what.disks.iter().chain(&what.spares).map(|new| new.path.clone());
        let (paths, without) = (paths.collect(), Vec::new());
        let (buffered, claim) = (what.buffered, what.claim);
        let open = OpenPool { id: what.id, paths, without, buffered, claim };
        Self::open(core, &open).await
    }

    /// Opens a pool: disks are found by what they say, in whatever place, and what a crash has left is mended.
    ///
    /// # Errors
    /// Why it may not be opened: which disks are missing, or contradict others, and what to do.
    pub async fn open(core: &Core, what: &OpenPool) -> Result<Rc<Self>, PoolError> {
        Self::open_making(core, what, Mistake::None).await
    }

    /// The same with a mistake, which tests have to find.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_making(
        core: &Core,
        what: &OpenPool,
        mistake: Mistake,
    ) -> Result<Rc<Self>, PoolError> {
        let (told, lost) = mpsc::unbounded_channel();
        let ownership = Ownership { claim: what.claim, told: Some(told) };
        let how = (what.buffered, what.without.as_slice());
        let disks = Disks::find(core, what.id, &what.paths, how, &ownership).await?;
        let start = match disks.believe(&what.without, mistake) {
            Ok(start) => start,
            Err(why) => {
                disks.release().await;
                return Err(why);
            }
        };
        drop(disks);
        let start = start.brought_up().await;
        let missing = start.missing();
        let Start { metadata, supporters, returning, excused, forced, .. } = start;
        let (failing, failed) = mpsc::unbounded_channel();
        let writer = Writer::new(metadata, supporters, excused, failing);
        let writing = tokio::task::spawn_local(Rc::clone(&writer).run());
        let opened = Self::begin(core, what, &writer, &missing, forced).await;
        if let Err(why) = opened {
            let disks = writer.disks().into_iter().map(|(_, disk)| disk);
            let disks: Vec<_> = disks.chain(returning.into_iter().map(|r| r.disk)).collect();
            writer.close().await;
            writing.abort();
            release_all(disks).await;
            return Err(why);
        }
        let (handle, asks) = PoolHandle::new();
        let opened = writer.disks().into_iter().map(|(id, disk)| (id, disk.path().to_owned()));
        let opened = opened.collect();
        let found: BTreeSet<MemberId> = returning.iter().map(|found| found.id).collect();
        let away = {
            let metadata = writer.metadata();
            let out = metadata.members().filter(|(_, m)| !m.standing.votes());
            out.map(|(id, _)| id).filter(|id| !found.contains(id)).collect()
        };
        let pool = Rc::new(Self {
            core: core.clone(),
            buffered: what.buffered,
            ownership: ownership.without_statement(),
            writer,
            handle,
            reserved: RefCell::default(),
            seats: RefCell::default(),
            seated: RefCell::default(),
            homes: RefCell::default(),
            beginnings: Cell::new(0),
            membership: RwLock::new(()),
            creating: Mutex::new(()),
            slow: RefCell::default(),
            awaited: RefCell::default(),
            coming: Cell::new(None),
            visits: RefCell::default(),
            moving: RefCell::default(),
            returning: RefCell::new(found),
            opened: RefCell::new(opened),
            away: RefCell::new(away),
            retiring: RefCell::default(),
            tasks: RefCell::new(vec![writing]),
            scrub: Cell::new(None),
            is_closed: Cell::new(false),
            mistake,
        });
        pool.begin_tasks(asks, failed, returning);
        pool.hear_losses(lost);
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
        let mut changes = vec![Change::Opened { id: core.random_uuid(), forced }];
        changes.extend(missing.iter().map(|id| Change::Out(*id)));
        for id in missing {
            let serial = writer.metadata().member(*id).map(|m| m.serial);
            let serial = serial.unwrap_or_else(|| Text::new(""));
            tracing::error!(member = id.0, %serial, pool = %what.id, "a disk of the pool is not there: it is out");
        }
        writer.commit_all(changes).await?;
        // Whose label names a version that it does not have is not believed.
        let (opened, disks) = writer.held_by_all().await?;
        let each = disks.iter().map(|(id, disk)| {
            (*id, disk.relabel(Label { opened, state: State::Made, ..disk.label() }))
        });
        let relabelled = writer.at_each(PATIENCE, each).await.into_iter().zip(&disks);
        for ((id, outcome), (_, disk)) in relabelled {
            if let Err(why) = outcome {
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
        returning: Vec<Returning>,
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
                pool.call_spare(true).await;
            }
        });
        let weak = Rc::downgrade(self);
        let returns = tokio::task::spawn_local(async move {
            for found in returning {
                let Some(pool) = weak.upgrade() else { return };
                pool.begin_return(found).await;
            }
        });
        let weak = Rc::downgrade(self);
        let caring = tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(pool) = weak.upgrade() else { return };
                pool.retire().await;
                pool.tell(|| Event::Look);
            }
        });
        let weak = Rc::downgrade(self);
        let beating = tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(BEAT).await;
                let Some(pool) = weak.upgrade() else { return };
                pool.note_errors().await;
                pool.beat().await;
            }
        });
        self.tasks.borrow_mut().extend([serving, telling, returns, caring, beating]);
    }

    /// Writes a version, and one that says that it was committed, if anything has been written since the last time.
    async fn beat(&self) {
        let disks = self.writer.disks();
        let was_written = |disk: &MemberDisk| disk.errors().written.swap(false, Ordering::Relaxed);
        let was_written = disks.iter().filter(|(_, disk)| was_written(disk)).count() > 0;
        if was_written && self.mistake != Mistake::WritesUnversioned {
            // What fails is said where it is found.
            let _ = self.writer.settle().await;
        }
    }

    fn hear_losses(self: &Rc<Self>, mut losses: mpsc::UnboundedReceiver<Lost>) {
        let weak = Rc::downgrade(self);
        let hearing = tokio::task::spawn_local(async move {
            while let Some(lost) = losses.recv().await {
                let Some(pool) = weak.upgrade() else { return };
                pool.hear_lost(&lost);
            }
        });
        self.tasks.borrow_mut().push(hearing);
    }

    /// Ends it. No volume of it may be open any more.
    ///
    /// # Errors
    /// That the last changes could not be written.
    pub async fn close(&self) -> Result<(), PoolError> {
        release_all(self.end().await).await;
        self.writer.broken().map_or(Ok(()), Err)
    }

    /// Ends all work; the disks that it had, which nothing is written to any more, if it has not ended before.
    async fn end(&self) -> Vec<Rc<MemberDisk>> {
        if self.is_closed.replace(true) {
            return Vec::new();
        }
        // A disk that is set back to a copy which was made while the pool was open lacks this version. What fails is said there.
        if self.mistake != Mistake::ClosesUnversioned {
            let _ = timeout(LONG_PATIENCE, self.note_errors()).await;
            let _ = timeout(LONG_PATIENCE, self.writer.settle()).await;
        }
        let disks = self.writer.disks().into_iter().map(|(_, disk)| disk).collect();
        self.writer.close().await;
        self.tasks.borrow_mut().drain(..).for_each(|task| task.abort());
        disks
    }

    /// Takes the labels off its disks, and ends it. No volume may be left in it.
    ///
    /// # Errors
    /// That there are volumes, or that a disk cannot be written.
    pub async fn destroy(&self) -> Result<(), PoolError> {
        let volumes = self.writer.metadata().volumes().count();
        if volumes > 0 {
            return Err(PoolError::new(format!("the pool has {}", wire::count(volumes, "volume"))));
        }
        let disks = self.end().await;
        self.writer.broken().map_or(Ok(()), Err)?;
        for disk in &disks {
            disk.set_state(State::Removed).await?;
        }
        release_all(disks).await;
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

    fn tell(&self, event: impl Fn() -> Event) {
        self.seats.borrow_mut().retain(|(_, seat)| seat.send(event()).is_ok());
    }

    async fn answer(self: Rc<Self>, ask: Ask) {
        // Who asked may be gone: it is done all the same.
        match ask {
            Ask::Join { ring, events, answer } => drop(answer.send(self.join(ring, events).await)),
            Ask::Rise { ring } => self.risen(ring),
            Ask::Volume { volume, ring, answer } => {
                drop(answer.send(self.volume_info(volume, ring).await));
            }
            Ask::Out { member, visit, answer } => {
                drop(answer.send(self.out(member, visit).await));
            }
            Ask::GiveUp { member, visit, silent, answer } => {
                // Whoever asked waits no more if it has answered.
                let still = || !answer.is_closed();
                let given_up = self.give_up(member, visit, silent, still).await;
                drop(answer.send(given_up));
            }
            Ask::Slow { member, is_slow } => self.slow(member, is_slow),
            Ask::Changed { volume, index, regions, answer } => {
                let mark = Change::Mark { volume, index, regions };
                drop(answer.send(self.writer.commit(mark).await));
            }
            Ask::Extent { volume, index, answer } => {
                let how = Allocation::MayBeDegraded;
                drop(answer.send(self.allocate(volume, index, how).await));
            }
            Ask::FreeBytes { answer } => {
                let metadata = self.writer.metadata();
                let bytes = metadata.extents_free().saturating_mul(metadata.extent_bytes());
                drop(answer.send(Ok(bytes)));
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
            Ask::ScrubEnded => self.scrub_ended().await,
            Ask::Rows { volume, index, rows, are, answer } => {
                drop(answer.send(self.rows_are((volume, index), rows, are).await));
            }
            Ask::Caught { of, answer } => {
                let ColumnAt { volume, index, column } = of;
                let caught = Change::Caught { volume, index, column, regions: ALL_REGIONS };
                drop(answer.send(self.writer.commit(caught).await));
            }
        }
    }

    /// A core has left in order: nothing of its volumes is on its way to another disk any more.
    fn risen(&self, ring: u16) {
        self.seated.borrow_mut().remove(&ring);
        let mut homes = self.homes.borrow_mut();
        let left: BTreeSet<VolumeId> =
            homes.extract_if(.., |_, home| *home == ring).map(|(id, _)| id).collect();
        drop(homes);
        self.stay(|of| left.contains(&of.volume));
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
            let message =
                format!("{what} {}, and this one is number {ring}", wire::count(rings, "core"));
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
            name: metadata.name,
            era: metadata.era(),
            first: self.beginning(),
            buffered: self.buffered,
            members,
            leaving: self.leaving(),
        })
    }

    /// A number beyond those of all batches and entries of this opening, and with as much room behind it as they take.
    fn beginning(&self) -> u64 {
        self.beginnings.set(self.beginnings.get() + 1);
        self.beginnings.get() << 32
    }
}
