//! Pools of disks. One core owns the metadata of a pool; every core that serves volumes of it
//! attaches to the pool.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::PoisonError;

use api::PoolName;
use disk::{ClaimRequest, LABEL_AREA_BYTES};
use futures_util::future::join_all;
use geometry::Redundancy;
use pool::{
    CorePool, CreatePool, DiskInspection, NewDisk, NewPoolVolume, OpenPool, Pool, PoolError,
    PoolHandle, PoolReport,
};
use rt::Core;
use uuid::Uuid;
use wire::plural;

use super::backing_error::BackingError;
use super::{Engine, least_loaded};
use records::pool_records::PoolRecord;
use records::record::{ImageInfo, VolumeRecord};

/// A pool to be created.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// Its RAID level.
    pub level: Redundancy,
    /// Columns of a stripe; `None` lets the pool choose.
    pub columns: Option<u16>,
    /// Bytes of a stripe on one disk.
    pub strip_bytes: u32,
    /// Whether its data has checksums.
    pub checksums: bool,
    /// Its disks.
    pub disks: Vec<NewDisk>,
    /// Its spares.
    pub spares: Vec<NewDisk>,
}

/// What a core needs to open volumes of a pool.
#[derive(Clone)]
pub(super) struct PoolAccess {
    id: Uuid,
    name: PoolName,
    /// Only cores below this number may serve volumes of it.
    pub(super) max_cores: u16,
    handle: PoolHandle,
}

/// An open pool.
#[derive(Clone)]
pub(super) struct PoolEntry {
    /// The core that owns its metadata.
    core: usize,
    pub(super) access: PoolAccess,
}

/// The pools of one core.
pub(super) struct CorePoolRegistry {
    core: Core,
    buffered: bool,
    /// The claim that it puts on disks.
    claim: ClaimRequest,
    owned_pools: RefCell<BTreeMap<Uuid, Rc<Pool>>>,
    attachments: RefCell<BTreeMap<Uuid, Rc<PoolAttachment>>>,
}

/// The attachment of this core to a pool.
#[derive(Default)]
struct PoolAttachment {
    /// Locked while the core attaches or detaches.
    core_pool: tokio::sync::Mutex<Option<Rc<CorePool>>>,
    /// Number of volumes that use it.
    users: Cell<usize>,
}

impl CorePoolRegistry {
    pub(super) fn new(core: Core, buffered: bool, claim: ClaimRequest) -> Self {
        Self {
            core,
            buffered,
            claim,
            owned_pools: RefCell::default(),
            attachments: RefCell::default(),
        }
    }

    async fn create(&self, what: CreatePool) -> Result<(PoolHandle, PoolReport), PoolError> {
        let what = CreatePool { buffered: self.buffered, claim: Some(self.claim), ..what };
        Ok(self.register(Pool::create(&self.core, &what).await?))
    }

    async fn open(
        &self,
        what: OpenPool,
        take_over: bool,
    ) -> Result<(PoolHandle, PoolReport), PoolError> {
        let claim = Some(ClaimRequest { take_over, ..self.claim });
        let what = OpenPool { buffered: self.buffered, claim, ..what };
        Ok(self.register(Pool::open(&self.core, &what).await?))
    }

    fn register(&self, pool: Rc<Pool>) -> (PoolHandle, PoolReport) {
        let (handle, report) = (pool.handle(), pool.report());
        self.owned_pools.borrow_mut().insert(report.id, pool);
        (handle, report)
    }

    fn get(&self, id: Uuid) -> Option<Rc<Pool>> {
        self.owned_pools.borrow().get(&id).cloned()
    }

    /// How many of these paths hold a disk of the pool `id`.
    async fn count_disks(&self, id: Uuid, paths: Vec<PathBuf>) -> usize {
        let each = paths.iter().map(|path| pool::inspect(&self.core, path, self.buffered));
        let all = join_all(each).await.into_iter();
        all.filter(|seen| matches!(seen, Ok(Some(disk)) if disk.pool_id == id)).count()
    }

    /// Those of these paths that hold a disk of some pool, or a damaged label of one.
    pub(super) async fn find_disks(
        &self,
        paths: Vec<PathBuf>,
    ) -> Vec<(PathBuf, Result<DiskInspection, PoolError>)> {
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
        self.owned_pools.borrow().values().map(|pool| pool.report()).collect()
    }

    /// Attaches this core to a pool, or shares its attachment. Pair every call with
    /// [`Self::detach`].
    pub(super) async fn attach(&self, access: &PoolAccess) -> Result<Rc<CorePool>, BackingError> {
        let PoolAccess { id, name, max_cores, handle } = access;
        let core = self.core.id();
        let index =
            u16::try_from(core).ok().filter(|index| index < max_cores).ok_or_else(|| {
                let why =
                    format!("this node serves its volumes on {} only", plural(*max_cores, "core"));
                BackingError::refused(format!("pool {name}: {why}, but this one is on core {core}"))
            })?;
        let attachment = Rc::clone(self.attachments.borrow_mut().entry(*id).or_default());
        attachment.users.update(|n| n + 1);
        let mut core_pool = attachment.core_pool.lock().await;
        if let Some(core_pool) = &*core_pool {
            return Ok(Rc::clone(core_pool));
        }
        match CorePool::attach(&self.core, handle.clone(), index).await {
            Ok(attached) => Ok(Rc::clone(core_pool.insert(attached))),
            Err(e) => {
                attachment.users.update(|n| n - 1);
                Err(BackingError::from_pool_error(name, &e))
            }
        }
    }

    /// Detaches from the pool after the last volume.
    pub(super) async fn detach(&self, id: Uuid) {
        let attachment = self.attachments.borrow().get(&id).cloned();
        let Some(attachment) = attachment else { return };
        attachment.users.update(|n| n.saturating_sub(1));
        let mut core_pool = attachment.core_pool.lock().await;
        if attachment.users.get() > 0 {
            return;
        }
        if let Some(core_pool) = core_pool.take()
            && let Err(error) = core_pool.close().await
        {
            tracing::error!(pool = %id, %error, "core did not detach from a pool cleanly");
        }
    }

    /// Closes the pools that this core owns, once no core uses a volume of them. Returns whether
    /// all are durable.
    pub(super) async fn close_all(&self) -> bool {
        let mut clean = true;
        for (id, pool) in self.owned_pools.take() {
            if let Err(error) = pool.close().await {
                tracing::error!(pool = %id, %error, "pool did not close cleanly");
                clean = false;
            }
        }
        clean
    }
}

impl PoolAccess {
    pub(super) fn id(&self) -> Uuid {
        self.id
    }

    /// The name of a volume of it in messages.
    pub(super) fn display_path(&self, record: &VolumeRecord) -> PathBuf {
        Path::new(self.name.as_str()).join(record.name.as_str())
    }
}

/// Bytes that a volume of `size_bytes` takes in its pool, labels included.
fn allocation_bytes(size_bytes: u64) -> u64 {
    size_bytes.saturating_add(LABEL_AREA_BYTES)
}

impl Engine {
    fn open_pools(&self) -> std::sync::MutexGuard<'_, BTreeMap<PoolName, PoolEntry>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pool_entry(&self, name: &PoolName) -> Result<PoolEntry, BackingError> {
        let entry = self.open_pools().get(name).cloned();
        entry.ok_or_else(|| BackingError::refused(format!("pool {name} is not open")))
    }

    /// The pool that holds the image of a volume on this node, if a pool does.
    pub(super) fn pool_of(&self, record: &VolumeRecord) -> Result<Option<PoolEntry>, BackingError> {
        let placement = record.placement(self.this_node());
        let name = placement.and_then(|placement| placement.backing.pool());
        name.map(|name| self.pool_entry(name)).transpose()
    }

    /// Creates a pool on the core that owns the fewest, and opens it.
    ///
    /// # Errors
    /// [`BackingError`]; nothing is left of a partly created pool.
    pub async fn create_pool(
        &self,
        record: &PoolRecord,
        new: NewPool,
    ) -> Result<PoolReport, BackingError> {
        let NewPool { level, columns, strip_bytes, checksums, disks, spares } = new;
        let (id, max_cores, name) = (record.id, record.max_cores, record.name.to_string());
        self.start_pool(record, move |k| async move {
            let buffered = false;
            let what = CreatePool {
                id,
                name,
                redundancy: level,
                columns,
                strip_bytes,
                max_cores,
                has_checksums: checksums,
                disks,
                spares,
                buffered,
                claim: None,
            };
            k.pools().create(what).await
        })
        .await
    }

    /// Opens a pool from those of its disks that are at these paths, without the disks that are
    /// gone for good. `take_over` takes the disks over from the node that had them last, unless it
    /// still uses them.
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
        self.start_pool(record, move |k| async move {
            let what = OpenPool { id, paths, missing_disks: without, buffered: false, claim: None };
            k.pools().open(what, take_over).await
        })
        .await
    }

    async fn start_pool<F, Fut>(
        &self,
        record: &PoolRecord,
        begin: F,
    ) -> Result<PoolReport, BackingError>
    where
        F: FnOnce(Rc<super::CoreEngine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(PoolHandle, PoolReport), PoolError>> + 'static,
    {
        let name = &record.name;
        let core = least_loaded(self.cores(), self.open_pools().values().map(|entry| entry.core));
        let (handle, report) = self
            .on_core(core, begin)
            .await?
            .map_err(|e| BackingError::from_pool_error(name, &e))?;
        let access =
            PoolAccess { id: record.id, name: name.clone(), max_cores: record.max_cores, handle };
        self.open_pools().insert(name.clone(), PoolEntry { core, access });
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
        Ok(self
            .on_core(core, move |k| async move { k.pools().count_disks(id, paths).await })
            .await?)
    }

    /// Destroys a pool without volumes: removes the labels from its disks.
    ///
    /// # Errors
    /// [`BackingError`]; the pool stays open.
    pub async fn destroy_pool(&self, name: &PoolName) -> Result<(), BackingError> {
        self.on_pool(name, |pool| async move { pool.destroy().await }).await?;
        let Some(PoolEntry { core, access }) = self.open_pools().remove(name) else {
            return Ok(());
        };
        let id = access.id;
        Ok(self
            .on_core(
                core,
                move |k| async move { drop(k.pools().owned_pools.borrow_mut().remove(&id)) },
            )
            .await?)
    }

    /// Adds a disk to a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn add_pool_disk(
        &self,
        name: &PoolName,
        disk: NewDisk,
        spare: bool,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.add(&disk, spare).await }).await
    }

    /// Starts to remove a disk from a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn remove_pool_disk(
        &self,
        name: &PoolName,
        disk: String,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.remove(&disk).await }).await
    }

    /// Cancels a removal that [`Self::remove_pool_disk`] started.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn cancel_pool_disk_removal(
        &self,
        name: &PoolName,
        disk: String,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.cancel_removal(&disk).await }).await
    }

    /// Starts to replace a disk by another one.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn replace_pool_disk(
        &self,
        name: &PoolName,
        disk: String,
        with: NewDisk,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.replace(&disk, &with).await }).await
    }

    /// Makes a pool search these paths for disks that were missing, and attach them again.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn reattach_pool_disks(
        &self,
        name: &PoolName,
        paths: Vec<PathBuf>,
    ) -> Result<(), BackingError> {
        let look = move |pool: Rc<Pool>| async move {
            pool.reattach_found(paths).await;
            Ok(())
        };
        self.on_pool(name, look).await
    }

    /// Starts a scrub of a pool.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn scrub_pool(&self, name: &PoolName) -> Result<(), BackingError> {
        self.on_pool(name, |pool| async move { pool.start_scrub() }).await
    }

    /// Resets the error counters of one disk of a pool, or of all.
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

    /// Reports of the open pools, by name.
    pub async fn pool_reports(&self) -> BTreeMap<PoolName, PoolReport> {
        let names: BTreeMap<_, _> =
            self.open_pools().iter().map(|(name, entry)| (entry.access.id, name.clone())).collect();
        let reports = self.on_all_cores(|k| async move { k.pools().report() }).await;
        let named =
            reports.into_iter().flatten().filter_map(|r| Some((names.get(&r.id)?.clone(), r)));
        named.collect()
    }

    /// Runs `f` on an open pool, on the core that owns it.
    async fn on_pool<F, Fut, T>(&self, name: &PoolName, f: F) -> Result<T, BackingError>
    where
        F: FnOnce(Rc<Pool>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, PoolError>> + 'static,
        T: Send + 'static,
    {
        let PoolEntry { core, access } = self.pool_entry(name)?;
        let done = self.on_core(core, move |k| async move {
            let none = || BackingError::refused(format!("pool {} is not open", access.name));
            let pool = k.pools().get(access.id).ok_or_else(none)?;
            f(pool).await.map_err(|e| BackingError::from_pool_error(&access.name, &e))
        });
        done.await.map_err(BackingError::from).flatten()
    }

    /// Allocates a new volume in a pool, and creates its image there.
    pub(super) async fn create_image_in_pool(
        &self,
        record: &VolumeRecord,
        pool: &PoolEntry,
    ) -> Result<ImageInfo, BackingError> {
        let name = &pool.access.name;
        let what = NewPoolVolume {
            id: record.id,
            bytes: allocation_bytes(record.size_bytes),
            block_size: record.block_size.bytes(),
            is_thick: !record.thin,
        };
        self.on_pool(name, move |pool| async move {
            // A thin volume needs space for its labels at once; without that they would be degraded
            // from the start.
            pool.check_space(if what.is_thick { what.bytes } else { LABEL_AREA_BYTES })?;
            pool.create_volume(&what).await
        })
        .await?;
        let (access, record_copy, core) =
            (pool.access.clone(), record.clone(), self.least_loaded_for_pool(pool));
        let created = self.on_core(core, move |k| async move {
            k.create_image(&record_copy, false, Some(access)).await
        });
        let created = created.await.map_err(BackingError::from).flatten();
        if created.is_err()
            && let Err(error) = self.delete_in_pool(name, record.id).await
        {
            tracing::warn!(volume = %record.name, %error, "cannot remove an incomplete volume from the pool");
        }
        created
    }

    /// Deletes a volume from its pool. Succeeds if the pool has none.
    pub(super) async fn delete_in_pool(
        &self,
        name: &PoolName,
        id: Uuid,
    ) -> Result<(), BackingError> {
        self.on_pool(name, move |pool| async move { pool.delete_volume(id).await }).await
    }

    /// Allocates space for a volume that is to grow.
    pub(super) async fn grow_in_pool(
        &self,
        pool: &PoolEntry,
        id: Uuid,
        size_bytes: u64,
    ) -> Result<(), BackingError> {
        let bytes = allocation_bytes(size_bytes);
        self.on_pool(
            &pool.access.name,
            move |pool| async move { pool.grow_volume(id, bytes).await },
        )
        .await
    }

    /// The least loaded of the cores that may serve volumes of a pool.
    pub(super) fn least_loaded_for_pool(&self, pool: &PoolEntry) -> usize {
        let cores = self.cores().min(pool.access.max_cores.into());
        least_loaded(cores, self.core_assignments.lock().values().map(|assignment| assignment.core))
    }
}

impl PoolEntry {
    pub(super) fn name(&self) -> &PoolName {
        &self.access.name
    }
}
