//! A core's place at a pool: its own openings of the disks, its own parity log, and the volumes on it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Account, Dev, Error};
use disk::{Gate, Raw};
use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use geometry::{Column, DamageKind, ROW_BYTES, Shape};
use raid::{
    Answered, Array, Damage, Extent, FAILING, Keeper, Kept, Member, Pace, Raid, Room, Settings,
};
use rt::Core;
use rt::disk::{Disk, OpenOptions};
use rustc_hash::FxHashMap;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;
use wire::Text;

use super::ask::{
    Ask, ColumnAt, Comes, Event, ExtentInfo, MemberInfo, PoolHandle, PoolInfo, RowsAre, VolumeInfo,
};
use super::damage::{DamageLog, Of, TOLD_EVERY, Told};
use super::error::PoolError;
use super::metadata::{MemberId, Members, Piece, VolumeId};
use super::owner::Pool;
use super::recovery::{
    checked, checksums_memory, error_of, holds_checksums, member_of, raw, too_little_memory,
};
use super::silent::Silent;
use super::writer::PATIENCE;

/// Extents of a volume that are looked at at once when it is opened.
const LOADING: usize = 32;

/// A rebuild leaves a third of the time to clients alone.
const PACE: Pace = Pace { rest: 0.5 };

/// How often checksums of what nobody writes any more are written.
const SETTLING: Duration = Duration::from_secs(10);

/// A core's place at a pool. See the [module](self).
#[derive(Debug)]
pub struct PoolSeat {
    core: Core,
    opens: Opens,
    handle: PoolHandle,
    pool: Uuid,
    ring: (u16, u64),
    array: Rc<Array>,
    /// Memory for checksums.
    memory: Account,
    /// The disks of its members, which it lets go of when they are out.
    disks: RefCell<BTreeMap<MemberId, Rc<Raw>>>,
    keeper: Rc<SeatKeeper>,
    volumes: RefCell<BTreeMap<Uuid, Open>>,
    /// What volumes are called in the log.
    called: RefCell<BTreeMap<Uuid, String>>,
    leaving: Cell<Members>,
    /// Columns that are elsewhere, of which others do not know yet.
    moving: RefCell<BTreeMap<ColumnAt, Moving>>,
    /// Whether all is to be read and compared.
    scrubs: Cell<bool>,
    look: Rc<Notify>,
    /// How often a member has come in, or a volume has grown: whoever opens one meanwhile begins anew.
    comings: Cell<u64>,
    /// Whether it is being closed: nothing is made whole or compared any more.
    stops: Cell<bool>,
    stopped: Rc<Notify>,
    tasks: RefCell<Vec<JoinHandle<()>>>,
}

/// Where a column goes, and the number of its extent.
#[derive(Clone, Copy, Debug)]
struct Moving {
    to: Piece,
    at: Column,
    extent: u64,
}

/// A volume that is open, or was.
#[derive(Clone, Debug)]
struct Open {
    id: VolumeId,
    raid: Weak<Raid>,
    /// Held by whoever makes it whole, or compares it.
    tended: Rc<Mutex<()>>,
}

/// How a seat comes by disks.
#[derive(Debug)]
enum Opens {
    /// It opens them beside the one who keeps the metadata, which holds them.
    Beside { core: Core, buffered: bool },
    /// They are the same.
    Shares(Weak<Pool>),
}

impl Opens {
    async fn open(&self, member: &MemberInfo) -> Result<Disk, PoolError> {
        match self {
            Self::Beside { core, buffered } => {
                let how = OpenOptions::new().buffered(*buffered).beside(true);
                Ok(core.open_disk(&member.path, how).await?)
            }
            Self::Shares(pool) => {
                let disk = pool.upgrade().and_then(|pool| pool.disk(member.id));
                disk.ok_or_else(|| PoolError::at(&member.path, "it is not there any more"))
            }
        }
    }
}

/// Asks whoever keeps the metadata.
#[derive(Debug)]
struct SeatKeeper {
    handle: PoolHandle,
    /// Where extents are, by their numbers.
    extents: RefCell<FxHashMap<u64, (VolumeId, u32)>>,
    /// What was told of them, ever.
    changed: RefCell<FxHashMap<u64, u32>>,
    /// How often members that are used have been let in.
    visits: RefCell<FxHashMap<MemberId, u64>>,
    /// What the pool is called,
    pool: Text,
    /// and the disks,
    serials: RefCell<FxHashMap<MemberId, Text>>,
    /// and volumes, with the length of their extents.
    names: RefCell<FxHashMap<VolumeId, (String, u64)>>,
    damage: DamageLog,
}

impl SeatKeeper {
    fn visit_of(&self, member: MemberId) -> u64 {
        self.visits.borrow().get(&member).copied().unwrap_or(0)
    }

    fn tell(&self, told: &Told) {
        let Told { of, times, bytes } = told;
        let pool = &self.pool;
        let serial = of.member.and_then(|member| self.serials.borrow().get(&member).copied());
        let serial = serial.unwrap_or_else(|| Text::new(""));
        let volume = self.names.borrow().get(&of.volume).map(|(name, _)| name.clone());
        let volume = volume.unwrap_or_default();
        let (member, from, to) = (of.member.map(|member| member.0), bytes.start, bytes.end);
        match of.kind {
            DamageKind::Unreadable => {
                tracing::warn!(%pool, member, %serial, %volume, times, from, to, "pool: a disk does not give blocks back");
            }
            DamageKind::Corrupt => {
                tracing::error!(%pool, member, %serial, %volume, times, from, to, "pool: a disk gives back what was not written");
            }
            DamageKind::Inconsistent => {
                tracing::error!(%pool, %volume, times, from, to, "pool: blocks do not fit together, and it is not known which are right");
            }
        }
    }

    /// Tells of damage that was collected.
    fn tell_damage(&self) {
        self.damage.due().iter().for_each(|told| self.tell(told));
    }
}

impl Keeper for SeatKeeper {
    fn out(&self, member: u16) -> Kept<'_> {
        Box::pin(async move {
            let member = MemberId(member);
            let visit = self.visit_of(member);
            let told = self.handle.ask(|answer| Ask::Out { member, visit, answer }).await;
            told.map_err(|why| error_of(&why))
        })
    }

    fn changed(&self, extent: u64, regions: u32) -> Kept<'_> {
        Box::pin(async move {
            *self.changed.borrow_mut().entry(extent).or_default() |= regions;
            let found = self.extents.borrow().get(&extent).copied();
            // One that has been given back has nothing that could be behind.
            let Some((volume, index)) = found else { return Ok(()) };
            let ask = |answer| Ask::Changed { volume, index, regions, answer };
            self.handle.ask(ask).await.map_err(|why| error_of(&why))
        })
    }

    fn gives_up(&self, member: u16, silent: u128) -> Answered<'_> {
        Box::pin(async move {
            let (member, silent) = (MemberId(member), Members(silent));
            let visit = self.visit_of(member);
            let ask = |answer| Ask::GiveUp { member, visit, silent, answer };
            let told = self.handle.ask(ask).await;
            told.map_err(|why| error_of(&why))
        })
    }

    fn slow(&self, member: u16, is_slow: bool) {
        let (handle, member) = (self.handle.clone(), MemberId(member));
        tokio::task::spawn_local(async move { handle.tell(Ask::Slow { member, is_slow }).await });
    }

    fn damaged(&self, damage: Damage) {
        let found = self.extents.borrow().get(&damage.extent).copied();
        let Some((volume, index)) = found else { return };
        let extent_bytes = self.names.borrow().get(&volume).map_or(0, |(_, bytes)| *bytes);
        let at = |row| u64::from(index) * extent_bytes + u64::from(row) * u64::from(ROW_BYTES);
        let of = Of { kind: damage.kind, member: damage.member.map(MemberId), volume };
        let told = self.damage.note(of, at(damage.rows.start)..at(damage.rows.end));
        told.iter().for_each(|told| self.tell(told));
    }
}

/// Gives a volume extents.
#[derive(Debug)]
struct VolumeRoom {
    keeper: Rc<SeatKeeper>,
    volume: VolumeId,
    shape: Shape,
}

impl VolumeRoom {
    /// The extent in use that is meant, known by its number from now on.
    fn extent_of(&self, info: &ExtentInfo) -> Extent {
        let place = (self.volume, info.index);
        self.keeper.extents.borrow_mut().insert(info.number, place);
        info.in_use(self.shape)
    }
}

impl Room for VolumeRoom {
    fn extent(&self, index: u32) -> Pin<Box<dyn Future<Output = Result<Extent, Error>> + '_>> {
        Box::pin(async move {
            let volume = self.volume;
            let ask = |answer| Ask::Extent { volume, index, answer };
            let given = self.keeper.handle.ask(ask).await;
            given.map(|info| self.extent_of(&info)).map_err(|why| {
                tracing::error!(volume = self.volume.0, error = %why, "a volume gets no room");
                error_of(&why)
            })
        })
    }

    fn free(&self, index: u32) -> Kept<'_> {
        Box::pin(async move {
            let volume = self.volume;
            self.keeper.extents.borrow_mut().retain(|_, place| *place != (volume, index));
            let ask = |answer| Ask::Free { volume, index, answer };
            self.keeper.handle.ask(ask).await.map_err(|why| error_of(&why))
        })
    }

    fn lose(&self, index: u32, rows: Range<u32>) -> Kept<'_> {
        Box::pin(self.tell_rows(index, rows, RowsAre::Lost))
    }

    fn regain(&self, index: u32, rows: Range<u32>) -> Kept<'_> {
        Box::pin(self.tell_rows(index, rows, RowsAre::Rewritten))
    }

    fn not_repaired(&self, index: u32, rows: Range<u32>) -> Kept<'_> {
        Box::pin(self.tell_rows(index, rows, RowsAre::Unrepaired))
    }
}

impl VolumeRoom {
    async fn tell_rows(&self, index: u32, rows: Range<u32>, are: RowsAre) -> Result<(), Error> {
        let volume = self.volume;
        let ask = |answer| Ask::Rows { volume, index, rows, are, answer };
        self.keeper.handle.ask(ask).await.map_err(|why| error_of(&why))
    }
}

impl PoolSeat {
    /// Takes a place at a pool that another core may keep. `ring` is the number of this core's parity log, below
    /// [`CreatePool::rings`](super::CreatePool::rings).
    ///
    /// # Errors
    /// That the pool has fewer rings, or a disk cannot be opened here.
    pub async fn take(core: &Core, handle: PoolHandle, ring: u16) -> Result<Rc<Self>, PoolError> {
        Self::begin(core, handle, ring, None).await
    }

    /// The same on the core that keeps the metadata, with the openings of the disks that there are.
    ///
    /// # Errors
    /// That the pool has fewer rings.
    pub async fn share(core: &Core, pool: &Rc<Pool>, ring: u16) -> Result<Rc<Self>, PoolError> {
        Self::begin(core, pool.handle(), ring, Some(Rc::downgrade(pool))).await
    }

    async fn begin(
        core: &Core,
        handle: PoolHandle,
        ring: u16,
        shares: Option<Weak<Pool>>,
    ) -> Result<Rc<Self>, PoolError> {
        let (sender, events) = mpsc::unbounded_channel();
        let info = handle.ask(|answer| Ask::Join { ring, events: sender, answer }).await?;
        let seat = Self::sit(core, handle.clone(), (ring, info), shares, events).await;
        if seat.is_err() {
            // It has written nothing.
            handle.tell(Ask::Rise { ring }).await;
        }
        seat
    }

    async fn sit(
        core: &Core,
        handle: PoolHandle,
        (ring, info): (u16, PoolInfo),
        shares: Option<Weak<Pool>>,
        events: mpsc::UnboundedReceiver<Event>,
    ) -> Result<Rc<Self>, PoolError> {
        let opens = match shares {
            Some(pool) => Opens::Shares(pool),
            None => Opens::Beside { core: core.clone(), buffered: info.buffered },
        };
        let keeper = Rc::new(SeatKeeper {
            handle: handle.clone(),
            extents: RefCell::default(),
            changed: RefCell::default(),
            visits: RefCell::default(),
            pool: info.name,
            serials: RefCell::default(),
            names: RefCell::default(),
            damage: DamageLog::default(),
        });
        let kept: Rc<dyn Keeper> = Rc::<SeatKeeper>::clone(&keeper);
        let array = Array::new(info.era, kept, core.pool()).await;
        let layouts = || info.members.iter().map(|member| member.layout);
        let array = array.map_err(|_| {
            let wanted = Array::MEMORY + checksums_memory(layouts());
            too_little_memory(&core.pool().account(), wanted)
        })?;
        let array = array.numbered_from(info.first);
        let seat = Rc::new(Self {
            core: core.clone(),
            opens,
            handle,
            pool: info.pool,
            ring: (ring, info.era),
            array: Rc::new(array),
            memory: core.pool().account(),
            disks: RefCell::default(),
            keeper,
            volumes: RefCell::default(),
            called: RefCell::default(),
            leaving: Cell::new(info.leaving),
            moving: RefCell::default(),
            scrubs: Cell::new(false),
            look: Rc::default(),
            comings: Cell::new(0),
            stops: Cell::new(false),
            stopped: Rc::default(),
            tasks: RefCell::default(),
        });
        holds_checksums(&seat.memory, layouts()).await?;
        seat.take_in(&info.members).await?;
        seat.begin_tasks(events);
        if info.members.iter().any(|member| member.layout.lists_at.is_some()) {
            seat.begin_settling();
        }
        Ok(seat)
    }

    /// Takes in all that there are, each as it answers, and puts out those that cannot be used.
    async fn take_in(&self, members: &[MemberInfo]) -> Result<(), PoolError> {
        let mut disks = Vec::new();
        for member in members {
            disks.push(self.opens.open(member).await?);
        }
        let silent = Silent::default();
        members.iter().for_each(|member| silent.asks(member.id));
        let each = members.iter().zip(disks).map(|(member, disk)| async {
            let used = self.prepared_in_time(member, disk, &silent).await;
            silent.answers(member.id);
            let Err(why) = used.and_then(|used| self.put(member, used)) else { return Ok(()) };
            tracing::error!(error = %why, "a disk of the pool cannot be used here");
            let MemberInfo { id: member, visit, .. } = *member;
            self.handle.ask(|answer| Ask::Out { member, visit, answer }).await
        });
        // All of them: nothing may be under way to a place that is given back.
        join_all(each).await.into_iter().collect()
    }

    /// What the array is to use of a member, by way of `disk`.
    fn prepared(
        &self,
        member: &MemberInfo,
        disk: Disk,
    ) -> impl Future<Output = Result<(Member, Rc<Raw>), PoolError>> + use<> {
        let (of, errors) = ((member.uuid, member.layout), Arc::clone(&member.errors));
        let gate = member.lease.clone().map(|lease| Gate::new(self.core.clone(), lease));
        let disk = Rc::new(raw(disk).guarded(gate));
        let used = member_of(Dev::shared(Rc::clone(&disk)), self.pool, of, self.ring, errors);
        let (layout, path, memory) = (member.layout, member.path.clone(), self.memory.clone());
        async move { Ok((checked(used, layout, &memory, &path).await?, disk)) }
    }

    /// The same, unless the disk does not answer, and the pool can do without all that are `silent`: what is under way at it goes on
    /// then.
    async fn prepared_in_time(
        &self,
        member: &MemberInfo,
        disk: Disk,
        silent: &Silent,
    ) -> Result<(Member, Rc<Raw>), PoolError> {
        let mut prepared = tokio::task::spawn_local(self.prepared(member, disk));
        let is_given_up = async {
            loop {
                let silent = silent.outlast(PATIENCE, |_| true).await;
                let (id, visit) = (member.id, member.visit);
                let ask = |answer| Ask::GiveUp { member: id, visit, silent, answer };
                if self.handle.ask(ask).await? {
                    return Err(PoolError::at(&member.path, "it does not answer"));
                }
            }
        };
        // One that answers before it is given up is not.
        tokio::select! {
            biased;
            done = &mut prepared => {
                done.unwrap_or_else(|why| Err(PoolError::at(&member.path, why)))
            }
            given_up = is_given_up => given_up,
        }
    }

    /// A member is written from now on.
    fn put(&self, member: &MemberInfo, (used, disk): (Member, Rc<Raw>)) -> Result<(), PoolError> {
        self.keeper.visits.borrow_mut().insert(member.id, member.visit);
        self.keeper.serials.borrow_mut().insert(member.id, member.serial);
        let put = self.array.put(member.id.0, used);
        put.map_err(|why| PoolError::at(&member.path, why.to_string()))?;
        self.disks.borrow_mut().insert(member.id, disk);
        Ok(())
    }

    fn begin_tasks(self: &Rc<Self>, mut events: mpsc::UnboundedReceiver<Event>) {
        let (weak, stopped) = (Rc::downgrade(self), Rc::clone(&self.stopped));
        let hearing = tokio::task::spawn_local(async move {
            loop {
                let event = tokio::select! {
                    biased;
                    () = stopped.notified() => return,
                    event = events.recv() => event,
                };
                let (Some(event), Some(seat)) = (event, weak.upgrade()) else { return };
                seat.hear(event).await;
            }
        });
        let (weak, look) = (Rc::downgrade(self), Rc::clone(&self.look));
        let caring = tokio::task::spawn_local(async move {
            loop {
                look.notified().await;
                let Some(seat) = weak.upgrade().filter(|seat| !seat.stops.get()) else { return };
                seat.care().await;
                if seat.scrubs.take() {
                    seat.scrub().await;
                }
            }
        });
        self.tasks.borrow_mut().extend([hearing, caring]);
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(TOLD_EVERY).await;
                let Some(seat) = weak.upgrade().filter(|seat| !seat.stops.get()) else { return };
                seat.keeper.tell_damage();
            }
        });
    }

    /// Now and then writes the checksums of what nobody writes any more.
    fn begin_settling(self: &Rc<Self>) {
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            loop {
                tokio::time::sleep(SETTLING).await;
                let Some(seat) = weak.upgrade().filter(|seat| !seat.stops.get()) else { return };
                if let Err(why) = seat.array.settle_quiet().await {
                    tracing::error!(error = %why, "checksums are not written");
                }
            }
        });
    }

    async fn hear(self: &Rc<Self>, event: Event) {
        match event {
            Event::Out(member) => {
                if let Err(why) = self.array.is_told_out(member.0).await {
                    tracing::error!(member = member.0, error = %why, "what a disk lacks cannot be told");
                }
                // Others may use it, and it may be found again.
                self.disks.borrow().get(&member).into_iter().for_each(|disk| disk.let_go());
            }
            Event::In(comes) => self.comes(*comes).await,
            Event::Leaving(members) => self.leaving.set(members),
            Event::Look => {}
            Event::Leave(volume, done) => {
                let seat = Rc::clone(self);
                let leaving = tokio::task::spawn_local(async move {
                    if seat.leave(volume).await {
                        let _ = done.send(());
                    }
                });
                let mut tasks = self.tasks.borrow_mut();
                tasks.retain(|task| !task.is_finished());
                tasks.push(leaving);
            }
            Event::Scrub => self.scrubs.set(true),
            Event::Grown(volume, bytes) => {
                let raid = self.volumes.borrow().get(&volume).and_then(|open| open.raid.upgrade());
                raid.into_iter().for_each(|raid| raid.grow(bytes));
                self.comings.set(self.comings.get() + 1);
            }
        }
        self.look.notify_one();
    }

    async fn comes(&self, comes: Comes) {
        let Comes { member, behind, done } = comes;
        match self.let_in(&member, behind).await {
            // Who waits for it has gone with the pool.
            Ok(()) => drop(done.send(())),
            Err(why) => {
                tracing::error!(member = member.id.0, error = %why, "a disk of the pool cannot be used here");
            }
        }
    }

    /// A member is written from now on. What it lacks is what was told to others, and here.
    async fn let_in(
        &self,
        member: &MemberInfo,
        behind: Vec<(u64, u16, u32)>,
    ) -> Result<(), PoolError> {
        // What it has not answered yet would be written over what is written from now on.
        if self.disks.borrow().get(&member.id).is_some_and(|before| !before.is_idle()) {
            let what = "it has not ended what was under way when it went out";
            return Err(PoolError::at(&member.path, what));
        }
        let disk = self.opens.open(member).await?;
        let used = self.prepared_in_time(member, disk, &Silent::alone(member.id)).await?;
        // In one go: what is written as long as it is not used it would lack, and nobody would know.
        let behind: FxHashMap<(u64, u16), u32> = behind
            .into_iter()
            .map(|(extent, column, regions)| ((extent, column), regions))
            .collect();
        self.comings.set(self.comings.get() + 1);
        for raid in self.open_raids() {
            for extent in raid.indices().into_iter().filter_map(|index| raid.extent(index)) {
                let here = self.keeper.changed.borrow().get(&extent.number()).copied().unwrap_or(0);
                let on_it = (0u16..).zip(extent.columns()).filter(|(_, c)| c.member == member.id.0);
                for (column, _) in on_it {
                    let there = behind.get(&(extent.number(), column)).copied().unwrap_or(0);
                    extent.lacks_also(column, here | there);
                }
            }
        }
        self.put(member, used)
    }

    fn open_volumes(&self) -> Vec<Open> {
        let mut volumes = self.volumes.borrow_mut();
        volumes.retain(|_, open| open.raid.strong_count() > 0);
        volumes.values().cloned().collect()
    }

    fn open_raids(&self) -> Vec<Rc<Raid>> {
        self.open_volumes().into_iter().filter_map(|open| open.raid.upgrade()).collect()
    }

    /// Makes sure that nothing of a volume that was open here is written any more, nor looked for in the parity log. Says
    /// whether that is so.
    async fn leave(&self, volume: Uuid) -> bool {
        self.stop_tending(volume).await;
        let open = self.volumes.borrow().get(&volume).cloned();
        if let Some(raid) = open.as_ref().and_then(|open| open.raid.upgrade()) {
            tracing::error!(%volume, "a volume that is open here is to be open elsewhere, or deleted");
            raid.resume_maintenance();
            return false;
        }
        if let Some(open) = open
            && let Err(why) = self.cancel_moves(open.id).await
        {
            tracing::error!(%volume, error = %why, "pieces on their way to another disk cannot be given up");
            return false;
        }
        let settled = async {
            // The log may want maps saved, which lie in units of the volume: their checksums are written after that.
            self.array.pass().await?;
            self.array.release_idle().await
        };
        match settled.await {
            Ok(()) => true,
            Err(why) => {
                tracing::error!(%volume, error = %why, "checksums or the parity log cannot be settled");
                false
            }
        }
    }

    /// Ends when nothing of a volume is made whole or compared any more that was open here.
    async fn stop_tending(&self, volume: Uuid) {
        let open = self.volumes.borrow().get(&volume).cloned();
        let Some(open) = open else { return };
        open.raid.upgrade().into_iter().for_each(|raid| raid.stop_tending());
        drop(open.tended.lock().await);
    }

    /// A volume of the pool as a device: it holds zeroes where nothing was written. At most one core has one open; who opens one
    /// that is open here shares it.
    ///
    /// # Errors
    /// That the pool has no such volume, or cannot tell where it lies.
    pub async fn open(&self, volume: Uuid) -> Result<Dev, PoolError> {
        if let Some(raid) = self.in_use(volume) {
            let info = self.info_of(volume).await?;
            raid.grow(info.bytes);
            raid.resume_maintenance();
            self.look.notify_one();
            return Ok(Dev::shared(raid));
        }
        // An earlier opening of it here may still be rebuilt, by where it was.
        self.stop_tending(volume).await;
        loop {
            let comings = self.comings.get();
            let (id, raid) = self.load(volume).await?;
            if self.comings.get() != comings {
                continue;
            }
            // Another caller may have opened it meanwhile.
            if let Some(raid) = self.in_use(volume) {
                return Ok(Dev::shared(raid));
            }
            let open = Open { id, raid: Rc::downgrade(&raid), tended: Rc::default() };
            self.volumes.borrow_mut().insert(volume, open);
            self.look.notify_one();
            return Ok(Dev::shared(raid));
        }
    }

    /// Bytes that its volumes may still take.
    ///
    /// # Errors
    /// That the pool is closed.
    pub async fn free_bytes(&self) -> Result<u64, PoolError> {
        self.handle.ask(|answer| Ask::FreeBytes { answer }).await
    }

    /// The volume, if it is open here.
    fn in_use(&self, volume: Uuid) -> Option<Rc<Raid>> {
        self.volumes.borrow().get(&volume).and_then(|open| open.raid.upgrade())
    }

    /// What the pool knows of a volume, which is this core's from now on.
    async fn info_of(&self, volume: Uuid) -> Result<VolumeInfo, PoolError> {
        let ring = self.ring.0;
        let info = self.handle.ask(|answer| Ask::Volume { volume, ring, answer }).await?;
        self.array.begin_at(info.first);
        Ok(info)
    }

    /// What a volume is called in the log, from when it is opened next.
    pub fn call(&self, volume: Uuid, name: &str) {
        self.called.borrow_mut().insert(volume, name.to_owned());
    }

    async fn load(&self, volume: Uuid) -> Result<(VolumeId, Rc<Raid>), PoolError> {
        let info = self.info_of(volume).await?;
        let VolumeInfo { id, shape, bytes, block_size, thick, extents, .. } = info;
        let called = self.called.borrow().get(&volume).cloned();
        let named =
            (called.unwrap_or_else(|| volume.to_string()), shape.rows() * u64::from(ROW_BYTES));
        self.keeper.names.borrow_mut().insert(id, named);
        let failed = |why: Error| PoolError::new(format!("volume {volume}: {why}"));
        // Where its stripes lie may be known in memory only, from an earlier opening of it here.
        let numbers = extents.iter().map(|extent| extent.number).collect();
        self.array.save_maps_of(&numbers).await.map_err(failed)?;
        self.cancel_moves(id).await?;
        let room = Rc::new(VolumeRoom { keeper: Rc::clone(&self.keeper), volume: id, shape });
        let load = |info: ExtentInfo| {
            let extent = room.extent_of(&info);
            async move { Ok((info.index, extent.load(&self.array).await?)) }
        };
        let loaded = stream::iter(extents).map(load).buffer_unordered(LOADING);
        let loaded: Result<Vec<(u32, Extent)>, Error> = loaded.try_collect().await;
        let unknown =
            |why| PoolError::new(format!("volume {volume}: where it lies is not known: {why}"));
        let extents = loaded.map_err(unknown)?;
        let settings = Settings { shape, block_size, bytes, thick };
        let raid = Rc::new(Raid::new(Rc::clone(&self.array), settings, extents, room));
        Ok((id, raid))
    }

    /// Ends it, when no device of it is in use any more.
    ///
    /// # Errors
    /// That something that was written may not be durable.
    pub async fn close(&self) -> Result<(), PoolError> {
        // What is under way comes to its end, for nobody may give up an operation of a disk.
        let is_first = !self.stops.replace(true);
        self.open_raids().iter().for_each(|raid| raid.stop_tending());
        self.look.notify_one();
        self.stopped.notify_one();
        let tasks: Vec<_> = self.tasks.borrow_mut().drain(..).collect();
        for task in tasks {
            let _ = task.await;
        }
        self.array
            .close()
            .await
            .map_err(|why| PoolError::new(format!("the last flush failed: {why}")))?;
        if is_first {
            self.handle.tell(Ask::Rise { ring: self.ring.0 }).await;
        }
        Ok(())
    }

    /// Makes whole what is not: of columns whose disk is out, or leaves, or lacks something.
    async fn care(&self) {
        for open in self.open_volumes() {
            let _tended = open.tended.lock().await;
            let Some(raid) = open.raid.upgrade() else { continue };
            for index in raid.indices() {
                if raid.stops() {
                    break;
                }
                if let Err(why) = self.care_for(open.id, &raid, index).await {
                    tracing::warn!(volume = open.id.0, index, error = %why, "an extent is not made whole");
                    return;
                }
            }
        }
    }

    async fn care_for(&self, volume: VolumeId, raid: &Raid, index: u32) -> Result<(), PoolError> {
        // Nobody gives it back until what is found out of it has been told.
        let _tending = raid.tend(index).await;
        let Some(extent) = raid.extent(index) else { return Ok(()) };
        self.forget_moves(volume, index, extent.number()).await?;
        let leaving = self.leaving.get();
        for (column, at) in (0u16..).zip(extent.columns()) {
            let of = ColumnAt { volume, index, column };
            if self.array.is_out(at.member) {
                self.replace(of, raid).await?;
            } else if leaving.has(MemberId(at.member)) && !extent.is_lacking() {
                self.relocate(of, raid).await?;
            }
        }
        let Some(extent) = raid.extent(index) else { return Ok(()) };
        let failed = |why: Error| PoolError::new(why.to_string());
        let rebuilt = raid.rebuild(index, PACE).await.map_err(failed)?;
        for column in rebuilt.whole {
            let of = ColumnAt { volume, index, column };
            let to = self.moving.borrow().get(&of).map(|moving| moving.to);
            match to {
                Some(to) => {
                    if self.handle.ask(|answer| Ask::Moved { of, to, answer }).await? {
                        self.moving.borrow_mut().remove(&of);
                        extent.settled(column);
                    }
                }
                None => self.handle.ask(|answer| Ask::Caught { of, answer }).await?,
            }
        }
        Ok(())
    }

    /// Reads and compares all of the volumes here; what is not whole yet is made so first, and again.
    async fn scrub(&self) {
        let mut unread = Vec::new();
        for open in self.open_volumes() {
            let tended = open.tended.lock().await;
            let Some(raid) = open.raid.upgrade() else { continue };
            let volume = open.id;
            for index in raid.indices() {
                if raid.stops() {
                    break;
                }
                match raid.scrub(index, PACE).await {
                    Ok(found) => {
                        let bytes = raid.extent_bytes();
                        self.handle.tell(Ask::Scrubbed { bytes, found }).await;
                        if raid.has_unread(index) {
                            unread.push((open.clone(), index));
                        }
                    }
                    Err(why) => {
                        tracing::warn!(volume = volume.0, index, error = %why, "an extent is not scrubbed");
                    }
                }
            }
            drop((raid, tended));
            self.care().await;
        }
        self.scrub_again(unread).await;
        self.handle.tell(Ask::ScrubEnded).await;
    }

    /// What could not be read is tried again after a while: what fails for a moment is not lost.
    async fn scrub_again(&self, unread: Vec<(Open, u32)>) {
        let until = Instant::now() + FAILING;
        while !unread.is_empty() && Instant::now() <= until {
            if self.stops.get() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        for (open, index) in unread {
            let _tended = open.tended.lock().await;
            let Some(raid) = open.raid.upgrade().filter(|raid| !raid.stops()) else { continue };
            if let Err(why) = raid.scrub_again(index, PACE).await {
                tracing::warn!(volume = open.id.0, index, error = %why, "an extent is not scrubbed");
            }
        }
    }

    async fn place(&self, of: ColumnAt) -> Result<Option<(Piece, Column)>, PoolError> {
        let place = self.handle.ask(|answer| Ask::Place { of, answer }).await?;
        Ok(place.map(|(piece, at)| (piece, Column { member: piece.member.0, at })))
    }

    /// A column whose disk is out goes elsewhere, if there is room.
    async fn replace(&self, of: ColumnAt, raid: &Raid) -> Result<(), PoolError> {
        let before = self.moving.borrow_mut().remove(&of);
        if let Some(Moving { at, .. }) = before {
            self.stays(of, at).await?;
        }
        let Some((piece, to)) = self.place(of).await? else { return Ok(()) };
        let is_out = |extent: &Rc<Extent>| {
            let here = extent.columns().get(usize::from(of.column));
            here.is_some_and(|column| self.array.is_out(column.member))
        };
        // It may have come back meanwhile.
        match raid.extent(of.index).filter(is_out) {
            Some(extent) => {
                let moving = Moving { to: piece, at: to, extent: extent.number() };
                self.moving.borrow_mut().insert(of, moving);
                raid.replace(of.index, of.column, to);
            }
            None => self.stays(of, to).await?,
        }
        Ok(())
    }

    /// A column does not go to where it was to go. Nothing more is written there: others may have that place.
    async fn stays(&self, of: ColumnAt, at: Column) -> Result<(), PoolError> {
        let left = self.array.vacate(at).await;
        left.map_err(|why| PoolError::new(why.to_string()))?;
        self.handle.tell(Ask::NotMoved { of }).await;
        Ok(())
    }

    /// Columns of an extent that was at `index` before this one are nowhere any more.
    async fn forget_moves(
        &self,
        volume: VolumeId,
        index: u32,
        number: u64,
    ) -> Result<(), PoolError> {
        let is_gone = |of: &ColumnAt, moving: &mut Moving| {
            (of.volume, of.index) == (volume, index) && moving.extent != number
        };
        let gone: Vec<_> = self.moving.borrow_mut().extract_if(.., is_gone).collect();
        for (of, Moving { at, .. }) in gone {
            self.stays(of, at).await?;
        }
        Ok(())
    }

    /// No column of a volume that is not open here goes on to another disk.
    async fn cancel_moves(&self, volume: VolumeId) -> Result<(), PoolError> {
        let of_it = |of: &ColumnAt, _: &mut Moving| of.volume == volume;
        let moving: Vec<_> = self.moving.borrow_mut().extract_if(.., of_it).collect();
        for (of, Moving { at, .. }) in moving {
            self.stays(of, at).await?;
        }
        Ok(())
    }

    /// A column whose disk leaves goes elsewhere.
    async fn relocate(&self, of: ColumnAt, raid: &Raid) -> Result<(), PoolError> {
        let Some((piece, to)) = self.place(of).await? else { return Ok(()) };
        let stuck = |moved: &Result<bool, Error>| matches!(moved, Ok(false)) && !raid.stops();
        let commit = async || {
            let moved = self.handle.ask(|answer| Ask::Moved { of, to: piece, answer }).await;
            moved.map_err(|why| error_of(&why))
        };
        let moved = raid.relocate(of.index, of.column, to, commit).await;
        if !matches!(moved, Ok(true)) {
            self.stays(of, to).await?;
        }
        if stuck(&moved) {
            // What cannot be read of it is in the way, if it is all there.
            let mended = raid.mend_unreadable(of.index, PACE).await;
            mended.map_err(|why| PoolError::new(why.to_string()))?;
        }
        moved.map(drop).map_err(|why: Error| PoolError::new(why.to_string()))
    }
}
