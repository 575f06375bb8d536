//! Pools of disks: each has its metadata on one core, and every core that has volumes of it a seat.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::PoisonError;

use api::PoolName;
use disk::{Claim, LABEL_AREA_BYTES};
use futures_util::future::join_all;
use geometry::Level;
use pool::{
    CreatePool, Inspected, NewDisk, NewPoolVolume, OpenPool, Pool, PoolError, PoolHandle,
    PoolReport, PoolSeat,
};
use rt::Core;
use uuid::Uuid;
use wire::count;

use super::backing::{BackingError, Image};
use super::{Engine, least_loaded};
use crate::pools::PoolRecord;
use crate::record::VolumeRecord;

/// A pool that is to be made.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// How it bears that disks fail.
    pub level: Level,
    /// Over how many disks a stripe goes, if that is to be said.
    pub columns: Option<u16>,
    /// Bytes of a stripe on one disk.
    pub strip_bytes: u32,
    /// Whether what lies in it has checksums.
    pub checksums: bool,
    /// Its disks.
    pub disks: Vec<NewDisk>,
    /// Its spares.
    pub spares: Vec<NewDisk>,
}

/// What a core needs to have volumes of a pool.
#[derive(Clone)]
pub(super) struct PoolDoor {
    id: Uuid,
    name: PoolName,
    /// So many cores may have volumes of it, the first ones.
    pub(super) rings: u16,
    handle: PoolHandle,
}

/// An open pool.
#[derive(Clone)]
pub(super) struct PoolHome {
    /// Where its metadata is.
    core: usize,
    pub(super) door: PoolDoor,
}

/// What one core has of pools.
pub(super) struct Pools {
    core: Core,
    buffered: bool,
    /// How it claims disks.
    claim: Claim,
    own: RefCell<BTreeMap<Uuid, Rc<Pool>>>,
    seats: RefCell<BTreeMap<Uuid, Rc<Seating>>>,
}

/// The seat of this core at a pool.
#[derive(Default)]
struct Seating {
    /// Held while it is taken or given back.
    seat: tokio::sync::Mutex<Option<Rc<PoolSeat>>>,
    /// Volumes that need it.
    users: Cell<usize>,
}

impl Pools {
    pub(super) fn new(core: Core, buffered: bool, claim: Claim) -> Self {
        Self { core, buffered, claim, own: RefCell::default(), seats: RefCell::default() }
    }

    async fn create(&self, what: CreatePool) -> Result<(PoolHandle, PoolReport), PoolError> {
        let what = CreatePool { buffered: self.buffered, claim: Some(self.claim), ..what };
        Ok(self.keep(Pool::create(&self.core, &what).await?))
    }

    async fn open(
        &self,
        what: OpenPool,
        take_over: bool,
    ) -> Result<(PoolHandle, PoolReport), PoolError> {
        let claim = Some(Claim { take_over, ..self.claim });
        let what = OpenPool { buffered: self.buffered, claim, ..what };
        Ok(self.keep(Pool::open(&self.core, &what).await?))
    }

    fn keep(&self, pool: Rc<Pool>) -> (PoolHandle, PoolReport) {
        let (handle, report) = (pool.handle(), pool.report());
        self.own.borrow_mut().insert(report.id, pool);
        (handle, report)
    }

    fn get(&self, id: Uuid) -> Option<Rc<Pool>> {
        self.own.borrow().get(&id).cloned()
    }

    /// How many of these hold a disk of the pool `id`.
    async fn count_disks(&self, id: Uuid, paths: Vec<PathBuf>) -> usize {
        let each = paths.iter().map(|path| pool::inspect(&self.core, path, self.buffered));
        let all = join_all(each).await.into_iter();
        all.filter(|seen| matches!(seen, Ok(Some(disk)) if disk.pool == id)).count()
    }

    /// Those of these that hold a disk of some pool, or what is left of one.
    pub(super) async fn find_disks(
        &self,
        paths: Vec<PathBuf>,
    ) -> Vec<(PathBuf, Result<Inspected, PoolError>)> {
        let each = paths.iter().map(|path| pool::inspect(&self.core, path, self.buffered));
        let all = join_all(each).await.into_iter();
        paths
            .iter()
            .cloned()
            .zip(all)
            .filter_map(|(path, seen)| Some((path, seen.transpose()?)))
            .collect()
    }

    fn report(&self) -> Vec<PoolReport> {
        self.own.borrow().values().map(|pool| pool.report()).collect()
    }

    /// Takes this core's seat at a pool, or shares it. [`Self::rise`] has to follow.
    pub(super) async fn sit(&self, door: &PoolDoor) -> Result<Rc<PoolSeat>, BackingError> {
        let PoolDoor { id, name, rings, handle } = door;
        let core = self.core.id();
        let ring = u16::try_from(core).ok().filter(|ring| ring < rings).ok_or_else(|| {
            let why = format!("this node serves volumes of it on {} only", count(*rings, "core"));
            BackingError::refused(format!("pool {name}: {why}, and this one is at core {core}"))
        })?;
        let seating = Rc::clone(self.seats.borrow_mut().entry(*id).or_default());
        seating.users.update(|n| n + 1);
        let mut seat = seating.seat.lock().await;
        if let Some(seat) = &*seat {
            return Ok(Rc::clone(seat));
        }
        match PoolSeat::take(&self.core, handle.clone(), ring).await {
            Ok(taken) => Ok(Rc::clone(seat.insert(taken))),
            Err(e) => {
                seating.users.update(|n| n - 1);
                Err(BackingError::of_pool(name, &e))
            }
        }
    }

    /// Gives the seat back after the last volume.
    pub(super) async fn rise(&self, id: Uuid) {
        let seating = self.seats.borrow().get(&id).cloned();
        let Some(seating) = seating else { return };
        seating.users.update(|n| n.saturating_sub(1));
        let mut seat = seating.seat.lock().await;
        if seating.users.get() > 0 {
            return;
        }
        if let Some(seat) = seat.take()
            && let Err(error) = seat.close().await
        {
            tracing::error!(pool = %id, %error, "a core has not left a pool in order");
        }
    }

    /// Closes the pools of this core, when no core has a volume of them any more; says whether all are durable.
    pub(super) async fn close_all(&self) -> bool {
        let mut clean = true;
        for (id, pool) in self.own.take() {
            if let Err(error) = pool.close().await {
                tracing::error!(pool = %id, %error, "a pool did not close cleanly");
                clean = false;
            }
        }
        clean
    }
}

impl PoolDoor {
    pub(super) fn id(&self) -> Uuid {
        self.id
    }

    /// What a volume of it is called in messages.
    pub(super) fn path_of(&self, record: &VolumeRecord) -> PathBuf {
        Path::new(self.name.as_str()).join(record.name.as_str())
    }
}

/// Bytes that a volume of `size_bytes` takes of its pool, labels included.
fn pool_bytes(size_bytes: u64) -> u64 {
    size_bytes.saturating_add(LABEL_AREA_BYTES)
}

impl Engine {
    fn pools(&self) -> std::sync::MutexGuard<'_, BTreeMap<PoolName, PoolHome>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pool_home(&self, name: &PoolName) -> Result<PoolHome, BackingError> {
        let home = self.pools().get(name).cloned();
        home.ok_or_else(|| BackingError::refused(format!("pool {name} is not open")))
    }

    /// The pool that the image of a volume on this node lies in, if it does.
    pub(super) fn pool_of(&self, record: &VolumeRecord) -> Result<Option<PoolHome>, BackingError> {
        let place = record.place(self.me());
        let name = place.and_then(|place| place.backing.pool());
        name.map(|name| self.pool_home(name)).transpose()
    }

    /// Makes a pool, on the core that has the fewest, and opens it.
    ///
    /// # Errors
    /// [`BackingError`]; nothing is left of what was begun.
    pub async fn create_pool(
        &self,
        record: &PoolRecord,
        new: NewPool,
    ) -> Result<PoolReport, BackingError> {
        let NewPool { level, columns, strip_bytes, checksums, disks, spares } = new;
        let (id, rings, name) = (record.id, record.rings, record.name.to_string());
        self.begin_pool(record, move |k| async move {
            let buffered = false;
            let what = CreatePool {
                id,
                name,
                level,
                columns,
                strip_bytes,
                rings,
                checksums,
                disks,
                spares,
                buffered,
                claim: None,
            };
            k.pools().create(what).await
        })
        .await
    }

    /// Opens a pool whose disks are at some of these paths, without those that are gone for good. With `take_over` they are taken
    /// from the node that had them last, unless that one still uses them.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn open_pool(
        &self,
        record: &PoolRecord,
        paths: Vec<PathBuf>,
        (without, take_over): (Vec<String>, bool),
    ) -> Result<PoolReport, BackingError> {
        let id = record.id;
        self.begin_pool(record, move |k| async move {
            let what = OpenPool { id, paths, without, buffered: false, claim: None };
            k.pools().open(what, take_over).await
        })
        .await
    }

    async fn begin_pool<F, Fut>(
        &self,
        record: &PoolRecord,
        begin: F,
    ) -> Result<PoolReport, BackingError>
    where
        F: FnOnce(Rc<super::Keeper>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(PoolHandle, PoolReport), PoolError>> + 'static,
    {
        let name = &record.name;
        let core = least_loaded(self.cores(), self.pools().values().map(|home| home.core));
        let (handle, report) =
            self.on(core, begin).await?.map_err(|e| BackingError::of_pool(name, &e))?;
        let door = PoolDoor { id: record.id, name: name.clone(), rings: record.rings, handle };
        self.pools().insert(name.clone(), PoolHome { core, door });
        Ok(report)
    }

    /// How many of these paths hold a disk of a pool that is not open.
    ///
    /// # Errors
    /// A core has stopped.
    pub async fn count_pool_disks(
        &self,
        id: Uuid,
        paths: Vec<PathBuf>,
    ) -> Result<usize, BackingError> {
        let core = self.least_loaded();
        Ok(self.on(core, move |k| async move { k.pools().count_disks(id, paths).await }).await?)
    }

    /// Takes the labels off the disks of a pool without volumes: it is no more.
    ///
    /// # Errors
    /// [`BackingError`]; the pool stays open.
    pub async fn destroy_pool(&self, name: &PoolName) -> Result<(), BackingError> {
        self.on_pool(name, |pool| async move { pool.destroy().await }).await?;
        let Some(PoolHome { core, door }) = self.pools().remove(name) else { return Ok(()) };
        let id = door.id;
        Ok(self
            .on(core, move |k| async move { drop(k.pools().own.borrow_mut().remove(&id)) })
            .await?)
    }

    /// Adds a disk to a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn add_to_pool(
        &self,
        name: &PoolName,
        disk: NewDisk,
        spare: bool,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.add(&disk, spare).await }).await
    }

    /// Begins to take a disk out of a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn remove_from_pool(
        &self,
        name: &PoolName,
        disk: String,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.remove(&disk).await }).await
    }

    /// Cancels what [`Self::remove_from_pool`] has begun.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn cancel_removal_from_pool(
        &self,
        name: &PoolName,
        disk: String,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.cancel_removal(&disk).await }).await
    }

    /// Begins to put a disk in the place of another one.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn replace_in_pool(
        &self,
        name: &PoolName,
        disk: String,
        with: NewDisk,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.replace(&disk, &with).await }).await
    }

    /// Has a pool look at these paths for disks that were away and are there again.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn look_for_disks(
        &self,
        name: &PoolName,
        paths: Vec<PathBuf>,
    ) -> Result<(), BackingError> {
        let look = move |pool: Rc<Pool>| async move {
            pool.bring_back(paths).await;
            Ok(())
        };
        self.on_pool(name, look).await
    }

    /// Begins to read and compare all of a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn scrub_pool(&self, name: &PoolName) -> Result<(), BackingError> {
        self.on_pool(name, |pool| async move { pool.scrub() }).await
    }

    /// Has errors of a disk of a pool counted anew, or of all.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn clear_pool_errors(
        &self,
        name: &PoolName,
        disk: Option<String>,
    ) -> Result<(), BackingError> {
        let clear = move |pool: Rc<Pool>| async move { pool.clear_errors(disk.as_deref()).await };
        self.on_pool(name, clear).await
    }

    /// What the open pools say of themselves, by name.
    pub async fn pool_reports(&self) -> BTreeMap<PoolName, PoolReport> {
        let names: BTreeMap<_, _> =
            self.pools().iter().map(|(name, home)| (home.door.id, name.clone())).collect();
        let reports = self.everywhere(|k| async move { k.pools().report() }).await;
        let named =
            reports.into_iter().flatten().filter_map(|r| Some((names.get(&r.id)?.clone(), r)));
        named.collect()
    }

    /// Does something with an open pool, at its core.
    async fn on_pool<F, Fut, T>(&self, name: &PoolName, f: F) -> Result<T, BackingError>
    where
        F: FnOnce(Rc<Pool>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, PoolError>> + 'static,
        T: Send + 'static,
    {
        let PoolHome { core, door } = self.pool_home(name)?;
        let done = self.on(core, move |k| async move {
            let none = || BackingError::refused(format!("pool {} is not open", door.name));
            let pool = k.pools().get(door.id).ok_or_else(none)?;
            f(pool).await.map_err(|e| BackingError::of_pool(&door.name, &e))
        });
        done.await.map_err(BackingError::from).flatten()
    }

    /// Gives a new volume its part of a pool, and makes its image there.
    pub(super) async fn make_in_pool(
        &self,
        record: &VolumeRecord,
        home: &PoolHome,
    ) -> Result<Image, BackingError> {
        let name = &home.door.name;
        let what = NewPoolVolume {
            id: record.id,
            bytes: pool_bytes(record.size_bytes),
            block_size: record.block_size.bytes(),
            thick: !record.thin,
        };
        self.on_pool(name, move |pool| async move {
            // What is written of a thin one at once would be degraded from the beginning as well.
            pool.has_room(if what.thick { what.bytes } else { LABEL_AREA_BYTES })?;
            pool.create_volume(&what).await
        })
        .await?;
        let (door, of, core) = (home.door.clone(), record.clone(), self.least_loaded_of(home));
        let made = self.on(core, move |k| async move { k.make(&of, false, Some(door)).await });
        let made = made.await.map_err(BackingError::from).flatten();
        if made.is_err()
            && let Err(error) = self.delete_in_pool(name, record.id).await
        {
            tracing::warn!(volume = %record.name, %error, "what was begun is not taken back yet");
        }
        made
    }

    /// Takes the part of a volume out of its pool. It may have none.
    pub(super) async fn delete_in_pool(
        &self,
        name: &PoolName,
        id: Uuid,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.delete_volume(id).await }).await
    }

    /// Makes room for a volume that is to become larger.
    pub(super) async fn grow_in_pool(
        &self,
        home: &PoolHome,
        id: Uuid,
        size_bytes: u64,
    ) -> Result<(), BackingError> {
        let bytes = pool_bytes(size_bytes);
        self.on_pool(&home.door.name, move |pool| async move { pool.grow_volume(id, bytes).await })
            .await
    }

    /// The core that has the fewest volumes, of those that may have some of a pool.
    pub(super) fn least_loaded_of(&self, home: &PoolHome) -> usize {
        let cores = self.cores().min(home.door.rings.into());
        least_loaded(cores, self.homes.lock().values().map(|home| home.core))
    }
}

impl PoolHome {
    pub(super) fn name(&self) -> &PoolName {
        &self.door.name
    }
}
