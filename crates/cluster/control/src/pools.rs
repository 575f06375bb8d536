//! Pools of disks: the table of pools, and opening them. `admin` has what an administrator does
//! with them.
//!
//! A pool belongs to this node alone, and the store does not know it: its record is in the data
//! directory ([`records::pool_records`]), written before its disks are touched.

mod admin;
mod import;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{ApiError, ErrorCode, Pool, PoolList, PoolName};
use futures_util::future::join_all;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::context::Context;

use engine::{BackingError, PoolDiskState, PoolReport};
use records::pool_records::{
    self, DamagedPoolRecord, KnownDisk, PoolRecord, PoolRecordFiles, PoolStage,
};
use records::record::VolumeRecord;
use status::pool_status::{self, PoolFacts, PoolObserved, RebuildProgress};

/// How often failed pools are retried, and the records of open ones are updated.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// How long a start waits for the disks that a pool had last: the kernel may still be detecting
/// them, and a pool that is opened without a disk must rebuild it.
const LATE_DISK_WAIT: Duration = Duration::from_secs(5);

/// Pause between two scans for disks.
const DISK_POLL: Duration = Duration::from_millis(500);

/// Time limit for the data directory, which may be on a failing disk.
const DATA_DIR_TIMEOUT: Duration = Duration::from_secs(5);

/// The pools of this node.
struct PoolTable {
    records: PoolRecordFiles,
    entries: Mutex<BTreeMap<PoolName, KnownPool>>,
    /// Pool records that cannot be read.
    damaged: Mutex<Vec<DamagedPoolRecord>>,
    /// Serializes file access, so that the last write wins.
    io_lock: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Clone)]
struct KnownPool {
    record: PoolRecord,
    /// Whether the file may differ from the record: a write did not finish in time.
    is_file_stale: bool,
    observed: PoolObserved,
    rebuild_progress: RebuildProgress,
    /// Held while the pool is opened or changed.
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl KnownPool {
    fn new(record: PoolRecord) -> Self {
        let (observed, lock) = (PoolObserved::Closed, Arc::default());
        Self { record, is_file_stale: false, observed, rebuild_progress: None, lock }
    }
}

impl PoolTable {
    fn in_data_dir(data_dir: &Path) -> Self {
        let records = PoolRecordFiles::in_data_dir(data_dir);
        Self {
            records,
            entries: Mutex::default(),
            damaged: Mutex::default(),
            io_lock: Arc::default(),
        }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<PoolName, KnownPool>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn damaged(&self) -> Vec<DamagedPoolRecord> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn names(&self) -> Vec<PoolName> {
        self.entries().keys().cloned().collect()
    }

    fn get(&self, name: &PoolName) -> Option<(PoolRecord, PoolObserved)> {
        self.entries().get(name).map(|k| (k.record.clone(), k.observed.clone()))
    }

    fn lock_of(&self, name: &PoolName) -> Option<Arc<tokio::sync::Mutex<()>>> {
        self.entries().get(name).map(|k| Arc::clone(&k.lock))
    }

    /// Adds a new pool; returns whether its name was free.
    fn insert(&self, new: KnownPool) -> bool {
        let mut known = self.entries();
        let free = !known.contains_key(&new.record.name);
        if free {
            known.insert(new.record.name.clone(), new);
        }
        free
    }

    fn observe(&self, name: &PoolName, observed: PoolObserved) {
        if let Some(known) = self.entries().get_mut(name) {
            known.observed = observed;
        }
    }

    /// Takes over a record; `written` says whether its write finished in time.
    fn record_written(&self, record: PoolRecord, written: bool) {
        if let Some(known) = self.entries().get_mut(&record.name) {
            known.is_file_stale = !written;
            if written {
                known.record = record;
            }
        }
    }

    fn is_file_stale(&self, name: &PoolName) -> bool {
        self.entries().get(name).is_some_and(|known| known.is_file_stale)
    }

    /// The facts about all pools, for status.
    fn facts(&self, reports: &BTreeMap<PoolName, PoolReport>) -> Vec<PoolFacts> {
        let now = Instant::now();
        let fact = |(name, known): (&PoolName, &mut KnownPool)| {
            let report = reports.get(name).cloned();
            let behind = report.as_ref().map_or(0, |r| r.stale_extents);
            PoolFacts {
                rebuild: pool_status::rebuild_progress(&mut known.rebuild_progress, behind, now),
                record: known.record.clone(),
                observed: known.observed.clone(),
                report,
                volumes: Vec::new(),
            }
        };
        self.entries().iter_mut().map(fact).collect()
    }
}

/// What uses pools.
pub(crate) trait PoolUser: Send + Sync {
    /// Called when a pool is open while the node serves: retries the volumes that failed to open
    /// without it.
    fn pool_opened(&self, pool: PoolName) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The pools of disks of this node. Cheap to clone.
#[derive(Clone)]
pub struct PoolControl(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    table: PoolTable,
    user: Box<dyn PoolUser>,
}

impl std::fmt::Debug for PoolControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolControl").finish_non_exhaustive()
    }
}

/// Paths of a pool's disks by its report; missing disks keep their last path.
fn last_seen_disks(report: &PoolReport, before: &[KnownDisk]) -> Vec<KnownDisk> {
    let disk = |d: &engine::PoolDiskReport| {
        let serial = Some(d.serial.clone());
        let was = || before.iter().find(|b| b.serial == serial).map(|b| b.path.clone());
        let path = d.path.clone().or_else(was)?;
        Some(KnownDisk { path, serial, is_out: d.state == PoolDiskState::Detached })
    };
    report.disks.iter().filter_map(disk).collect()
}

fn pool_not_found(name: &PoolName) -> ApiError {
    ApiError::new(ErrorCode::NotFound, format!("there is no pool {name} on this node"))
        .with_hint("`windrose pool list` shows the pools")
}

impl PoolControl {
    /// The pools whose records are in the data directory. It does nothing until
    /// [`Self::open_pools`].
    pub(crate) fn new(context: Arc<Context>, user: Box<dyn PoolUser>) -> Self {
        let table = PoolTable::in_data_dir(&context.settings.data_dir);
        Self(Arc::new(Inner { context, table, user }))
    }

    /// Pool records that cannot be read.
    pub(crate) fn damaged(&self) -> Vec<DamagedPoolRecord> {
        self.0.table.damaged()
    }

    /// Opens the pools in the table. [`Self::maintain_pools`] retries those that fail.
    pub(super) async fn open_pools(&self) {
        let records = self.0.table.records.clone();
        let read = tokio::task::spawn_blocking(move || records.read()).await;
        let (records, damaged) = match read.map_err(io::Error::other).flatten() {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(%error, "cannot read pool records");
                let (path, why) =
                    (self.0.context.settings.data_dir.join("pools"), error.to_string());
                (Vec::new(), vec![DamagedPoolRecord { path, name: None, why }])
            }
        };
        for damage in &damaged {
            tracing::error!(error = %damage, "damaged pool record; the pool is not touched");
        }
        *self.0.table.damaged.lock().unwrap_or_else(PoisonError::into_inner) = damaged;
        let opening = records.into_iter().map(|record| async move {
            self.0.table.insert(KnownPool::new(record.clone()));
            self.try_open_pool(&record.name, LATE_DISK_WAIT).await;
        });
        join_all(opening).await;
    }

    /// Retries pools that failed to open, and updates the records of open ones, for as long as the
    /// node runs.
    pub(super) async fn maintain_pools(self) {
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL).await;
            let reports = self.0.context.engine.pool_reports().await;
            for name in self.0.table.names() {
                match reports.get(&name) {
                    Some(report) => {
                        self.maintain_pool(&name, report).await;
                        self.reattach_pool_disks(&name, report).await;
                    }
                    None => self.try_open_pool(&name, Duration::ZERO).await,
                }
            }
            // Samples the progress of rebuilds.
            self.0.table.facts(&reports);
        }
    }

    /// Searches all block devices for disks that are out of a pool: they may have returned.
    async fn reattach_pool_disks(&self, name: &PoolName, report: &PoolReport) {
        if report.disks.iter().all(|disk| disk.state != PoolDiskState::Detached) {
            return;
        }
        let Some((record, _)) = self.0.table.get(name) else { return };
        let paths = candidate_paths(record.paths()).await;
        // Does not wait for a disk that hangs; the pool handles it by itself.
        let search =
            timeout(DATA_DIR_TIMEOUT, self.0.context.engine.reattach_pool_disks(name, paths)).await;
        if let Ok(Err(error)) = search {
            tracing::warn!(pool = %name, %error, "search for the disks of a pool failed");
        }
    }

    async fn maintain_pool(&self, name: &PoolName, report: &PoolReport) {
        let Some(lock) = self.0.table.lock_of(name) else { return };
        // The holder of the lock updates the record.
        let Ok(_held) = lock.try_lock() else { return };
        let Some((record, _)) = self.0.table.get(name) else { return };
        if record.stage == PoolStage::Deleting {
            self.finish_pool_deletion(&record).await;
        } else if let Err(error) = self.record_pool_disks(&record, report).await {
            tracing::warn!(pool = %name, %error, "cannot record the paths of the disks");
        }
    }

    /// Records the paths of a pool's disks if they changed, and that the pool exists.
    async fn record_pool_disks(&self, record: &PoolRecord, report: &PoolReport) -> io::Result<()> {
        let disks = last_seen_disks(report, &record.disks);
        let next = PoolRecord { stage: PoolStage::Ready, disks, ..record.clone() };
        if next == *record && !self.0.table.is_file_stale(&record.name) {
            return Ok(());
        }
        self.write_pool_record(&next).await
    }

    async fn write_pool_record(&self, record: &PoolRecord) -> io::Result<()> {
        let written = record.clone();
        let written = self.with_pool_records(move |records| records.write(&written)).await;
        self.0.table.record_written(record.clone(), written.is_ok());
        written
    }

    /// Removes the record of a pool that was deleted or never created.
    async fn remove_pool_record(&self, name: &PoolName) -> io::Result<()> {
        let removed_name = name.clone();
        self.with_pool_records(move |records| records.remove(&removed_name)).await?;
        self.0.table.entries().remove(name);
        Ok(())
    }

    /// Does something with the pool records off the control thread, within a time limit.
    async fn with_pool_records(
        &self,
        what: impl FnOnce(&PoolRecordFiles) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let done = async {
            let guard = Arc::clone(&self.0.table.io_lock).lock_owned().await;
            let records = self.0.table.records.clone();
            let task = tokio::task::spawn_blocking(move || {
                let done = what(&records);
                drop(guard);
                done
            });
            task.await.map_err(io::Error::other)?
        };
        timeout(DATA_DIR_TIMEOUT, done)
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Opens a pool that is not open, or finishes what a crash interrupted.
    async fn try_open_pool(&self, name: &PoolName, patience: Duration) {
        let Some(lock) = self.0.table.lock_of(name) else { return };
        let Ok(_held) = lock.try_lock() else { return };
        let Some((record, observed)) = self.0.table.get(name) else { return };
        if observed == PoolObserved::Open {
            return;
        }
        let opened = self.open_pool_from_disks(&record, patience).await;
        match (record.stage, opened) {
            (PoolStage::Deleting, Ok(report)) if report.volumes.is_empty() => {
                self.finish_pool_deletion(&record).await;
            }
            // Open; or a deletion that failed, and the pool has been used since.
            (_, Ok(report)) => {
                self.on_pool_opened(&record, &report).await;
            }
            (PoolStage::Ready, Err(error)) => {
                if observed != PoolObserved::OpenFailed(error.clone()) {
                    tracing::error!(pool = %name, %error, "pool is offline");
                }
                self.0.table.observe(name, PoolObserved::OpenFailed(error));
            }
            // The creation was not acknowledged, or the deletion was requested.
            (PoolStage::Creating | PoolStage::Deleting, Err(error)) => {
                tracing::warn!(pool = %name, %error, "removing the record of an incomplete or \
                    half-deleted pool");
                if let Err(error) = self.remove_pool_record(name).await {
                    tracing::error!(pool = %name, %error, "cannot remove the pool record");
                }
            }
        }
    }

    /// Opens a pool with its disks at their last paths, or anywhere among the block devices.
    async fn open_pool_from_disks(
        &self,
        record: &PoolRecord,
        patience: Duration,
    ) -> Result<PoolReport, BackingError> {
        let (engine, deadline) = (&self.0.context.engine, Instant::now() + patience);
        let wanted = record.disks.iter().filter(|d| !d.is_out).count();
        loop {
            let paths = record.paths();
            let found = engine.count_pool_disks(record.id, paths.clone()).await?;
            if !paths.is_empty() && found >= paths.len() {
                return engine.open_pool(record, paths, (Vec::new(), false)).await;
            }
            let paths = candidate_paths(paths).await;
            let found = engine.count_pool_disks(record.id, paths.clone()).await?;
            if found >= wanted || Instant::now() >= deadline {
                return engine.open_pool(record, paths, (Vec::new(), false)).await;
            }
            tokio::time::sleep(DISK_POLL).await;
        }
    }

    /// A pool was opened: now its volumes can be.
    async fn on_pool_opened(&self, record: &PoolRecord, report: &PoolReport) {
        let name = &record.name;
        tracing::info!(pool = %name, id = %record.id, disks = report.disks.len(), "open");
        self.0.table.observe(name, PoolObserved::Open);
        if let Err(error) = self.record_pool_disks(record, report).await {
            tracing::warn!(pool = %name, %error, "cannot record the paths of the disks");
        }
        self.request_own_report();
        if self.0.context.is_serving() {
            self.0.user.pool_opened(name.clone()).await;
        }
    }

    /// Publishes this node's pools in a fresh report.
    fn request_own_report(&self) {
        self.0.context.last_report_request.send_modify(|_| {});
    }

    async fn finish_pool_deletion(&self, record: &PoolRecord) {
        let name = &record.name;
        let destroyed = self.0.context.engine.destroy_pool(name).await;
        if let Err(error) = &destroyed {
            tracing::warn!(pool = %name, %error, "cannot delete the pool yet");
            self.0.table.observe(name, PoolObserved::Open);
        } else if let Err(error) = self.remove_pool_record(name).await {
            tracing::error!(pool = %name, %error, "cannot remove the pool record");
        }
    }

    /// The pool of a volume's replica on this node.
    pub(super) fn pool_name_of<'a>(&self, record: &'a VolumeRecord) -> Option<&'a PoolName> {
        record.placement(self.0.context.this_node())?.backing.pool()
    }

    /// Whether this node has a pool of this name.
    pub(super) fn has_pool(&self, name: &PoolName) -> bool {
        self.0.table.get(name).is_some()
    }

    /// Whether a volume's replica here was in a pool that no longer exists: its data is gone.
    pub(super) fn has_lost_pool(&self, record: &VolumeRecord) -> bool {
        let Some(name) = self.pool_name_of(record) else { return false };
        let damaged = self.0.table.damaged();
        !self.has_pool(name) && !damaged.iter().any(|d| d.name.as_ref().is_none_or(|n| n == name))
    }

    /// Fails if the replica of a volume here is in a pool that is not open.
    pub(super) fn check_pool_of(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        let Some(name) = self.pool_name_of(record) else { return Ok(()) };
        match self.0.table.get(name) {
            Some((_, PoolObserved::Open)) => Ok(()),
            Some((_, PoolObserved::Closed)) => {
                Err(BackingError::refused(format!("pool {name} is not open yet")))
            }
            Some((_, PoolObserved::OpenFailed(error))) => {
                let message =
                    format!("pool {name} is offline: {}", error.message_without_pool(name));
                Err(BackingError::refused(message).with_hint(error.hint))
            }
            None => {
                let damaged = self.0.table.damaged();
                let why = damaged.iter().find(|d| d.name.as_ref().is_none_or(|n| n == name));
                Err(BackingError::refused(match why {
                    Some(damage) => format!(
                        "pool {name} has a damaged record and is not used: \
                        {damage}"
                    ),
                    None => format!("there is no pool {name} on this node"),
                }))
            }
        }
    }

    /// The facts about all pools.
    pub(super) async fn pool_facts(&self) -> Vec<PoolFacts> {
        let reports = self.0.context.engine.pool_reports().await;
        let mut facts = self.0.table.facts(&reports);
        for pool in &mut facts {
            pool.volumes = self.volumes_in_pool(&pool.record.name);
        }
        facts
    }

    /// The volumes with a replica in a pool of this node, by name.
    pub(super) fn volumes_in_pool(&self, name: &PoolName) -> Vec<(Uuid, String)> {
        let all = self.0.context.volumes.all();
        let within = all.iter().filter(|(s, _)| self.pool_name_of(&s.record) == Some(name));
        within.map(|(s, _)| (s.record.id, s.record.name.to_string())).collect()
    }

    /// Lists all pools, by name.
    pub async fn list_pools(&self) -> PoolList {
        let facts = self.pool_facts().await;
        let unreadable_records = self.0.table.damaged().iter().map(ToString::to_string).collect();
        PoolList { pools: facts.iter().map(pool_status::pool_info).collect(), unreadable_records }
    }

    /// Returns one pool.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub async fn get_pool(&self, name: &PoolName) -> Result<Pool, ApiError> {
        let facts = self.pool_facts().await;
        let found = facts.iter().find(|pool| pool.record.name == *name);
        found.map(pool_status::pool_info).ok_or_else(|| pool_not_found(name))
    }
}

async fn candidate_paths(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let known = paths.clone();
    tokio::task::spawn_blocking(move || pool_records::candidate_disk_paths(&known))
        .await
        .unwrap_or(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use status::samples::pool_report as report;

    #[test]
    fn a_disk_that_is_not_there_is_remembered_where_it_was() {
        let mut report = report("tank");
        let before = last_seen_disks(&report, &[]);
        assert_eq!(before.len(), report.disks.len());
        let gone = report.disks[1].path.take().unwrap();
        report.disks[1].state = PoolDiskState::Detached;
        let after = last_seen_disks(&report, &before);
        assert_eq!((after[1].path.clone(), after[1].is_out), (gone, true));
        assert_eq!(
            last_seen_disks(&report, &[]).len(),
            report.disks.len() - 1,
            "nobody knows where"
        );
    }
}
