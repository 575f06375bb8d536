//! Pools of disks: which there are, and opening them. What an administrator does with them is in `admin`.
//!
//! A pool belongs to this node alone, and the store knows nothing of it: its record is in the data directory
//! ([`crate::pools`]), written before its disks are touched.

mod admin;
mod import;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{ApiError, Code, Pool, PoolList, PoolName};
use futures_util::future::join_all;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::Control;
use super::pool_view::{self, PoolFacts, Progress};
use crate::engine::{BackingError, PoolDiskState, PoolReport};
use crate::pools::{self, DamagedPool, PoolRecord, PoolRecords, PoolStage, SeenDisk};
use crate::reconcile::Observed;
use crate::record::VolumeRecord;

/// How often pools that cannot be opened are tried again, and what has become of disks is written down.
const EVERY: Duration = Duration::from_secs(5);

/// How long a start waits for disks that were there last: the system may still be finding them, and a pool that is
/// opened without one has to bring it up to date.
const LATE: Duration = Duration::from_secs(5);

/// Pause between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How long the data directory may take for an answer. It may be on a disk that fails.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the node does with a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PoolObserved {
    /// Nothing yet.
    #[default]
    Closed,
    /// It is open.
    Open,
    /// It cannot be opened. Tried again every few seconds.
    Broken(BackingError),
}

/// The pools of this node.
pub(super) struct Pools {
    records: PoolRecords,
    known: Mutex<BTreeMap<PoolName, Known>>,
    /// Files of pools that cannot be read.
    damaged: Mutex<Vec<DamagedPool>>,
    /// One thread at a time waits for the directory's disk, so that what is written last stays.
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Clone)]
struct Known {
    record: PoolRecord,
    /// Whether its file may say something else: it was not written in time.
    doubtful: bool,
    observed: PoolObserved,
    progress: Progress,
    /// Held while something is done with it.
    gate: Arc<tokio::sync::Mutex<()>>,
}

impl Known {
    fn new(record: PoolRecord) -> Self {
        let (observed, gate) = (PoolObserved::Closed, Arc::default());
        Self { record, doubtful: false, observed, progress: None, gate }
    }
}

impl Pools {
    pub(super) fn of(data_dir: &Path) -> Self {
        let records = PoolRecords::of(data_dir);
        Self { records, known: Mutex::default(), damaged: Mutex::default(), turn: Arc::default() }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<PoolName, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn damaged(&self) -> Vec<DamagedPool> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn names(&self) -> Vec<PoolName> {
        self.known().keys().cloned().collect()
    }

    fn get(&self, name: &PoolName) -> Option<(PoolRecord, PoolObserved)> {
        self.known().get(name).map(|k| (k.record.clone(), k.observed.clone()))
    }

    fn gate(&self, name: &PoolName) -> Option<Arc<tokio::sync::Mutex<()>>> {
        self.known().get(name).map(|k| Arc::clone(&k.gate))
    }

    /// A pool that there was not; says whether its name was free.
    fn insert(&self, new: Known) -> bool {
        let mut known = self.known();
        let free = !known.contains_key(&new.record.name);
        if free {
            known.insert(new.record.name.clone(), new);
        }
        free
    }

    fn observe(&self, name: &PoolName, observed: PoolObserved) {
        if let Some(known) = self.known().get_mut(name) {
            known.observed = observed;
        }
    }

    /// A record that was written, or was to be.
    fn note(&self, record: PoolRecord, written: bool) {
        if let Some(known) = self.known().get_mut(&record.name) {
            known.doubtful = !written;
            if written {
                known.record = record;
            }
        }
    }

    fn is_doubtful(&self, name: &PoolName) -> bool {
        self.known().get(name).is_some_and(|known| known.doubtful)
    }

    /// What people are told of pools that there are.
    fn facts(&self, reports: &BTreeMap<PoolName, PoolReport>) -> Vec<PoolFacts> {
        let now = Instant::now();
        let fact = |(name, known): (&PoolName, &mut Known)| {
            let report = reports.get(name).cloned();
            let behind = report.as_ref().map_or(0, |r| r.behind_pieces);
            PoolFacts {
                rebuild: pool_view::rebuild(&mut known.progress, behind, now),
                record: known.record.clone(),
                observed: known.observed.clone(),
                report,
                volumes: Vec::new(),
            }
        };
        self.known().iter_mut().map(fact).collect()
    }
}

/// Where the disks of a pool are, by its report; those that are not there are where they were.
fn seen(report: &PoolReport, before: &[SeenDisk]) -> Vec<SeenDisk> {
    let disk = |d: &crate::engine::PoolDisk| {
        let serial = Some(d.serial.clone());
        let was = || before.iter().find(|b| b.serial == serial).map(|b| b.path.clone());
        let path = d.path.clone().or_else(was)?;
        Some(SeenDisk { path, serial, out: d.state == PoolDiskState::Out })
    };
    report.disks.iter().filter_map(disk).collect()
}

fn not_found(name: &PoolName) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no pool {name} on this node"))
        .hint("`windrose pool list` shows what there is")
}

impl Control {
    /// Opens the pools that there are. Those that cannot be opened are tried again by [`Self::follow_pools`].
    pub(super) async fn open_pools(&self) {
        let records = self.0.pools.records.clone();
        let read = tokio::task::spawn_blocking(move || records.read()).await;
        let (records, damaged) = match read.map_err(io::Error::other).flatten() {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(%error, "the records of pools cannot be read");
                let (path, why) = (self.0.settings.data_dir.join("pools"), error.to_string());
                (Vec::new(), vec![DamagedPool { path, name: None, why }])
            }
        };
        for damage in &damaged {
            tracing::error!(error = %damage, "a pool is left alone");
        }
        *self.0.pools.damaged.lock().unwrap_or_else(PoisonError::into_inner) = damaged;
        let opening = records.into_iter().map(|record| async move {
            self.0.pools.insert(Known::new(record.clone()));
            self.try_pool(&record.name, LATE).await;
        });
        join_all(opening).await;
    }

    /// Tries pools again that cannot be opened, and writes down what has become of disks, for as long as the node runs.
    pub(super) async fn follow_pools(self) {
        loop {
            tokio::time::sleep(EVERY).await;
            let reports = self.0.engine.pool_reports().await;
            for name in self.0.pools.names() {
                match reports.get(&name) {
                    Some(report) => {
                        self.follow_pool(&name, report).await;
                        self.look_for_disks(&name, report).await;
                    }
                    None => self.try_pool(&name, Duration::ZERO).await,
                }
            }
            // How far rebuilds are is told by how far they were.
            self.0.pools.facts(&reports);
        }
    }

    /// Looks for disks of a pool that are out, wherever there are block devices: they may be there again.
    async fn look_for_disks(&self, name: &PoolName, report: &PoolReport) {
        if report.disks.iter().all(|disk| disk.state != PoolDiskState::Out) {
            return;
        }
        let Some((record, _)) = self.0.pools.get(name) else { return };
        let paths = candidates(record.paths()).await;
        // A disk that does not answer is not waited for; the pool goes on with that by itself.
        let looked = timeout(PATIENCE, self.0.engine.look_for_disks(name, paths)).await;
        if let Ok(Err(error)) = looked {
            tracing::warn!(pool = %name, %error, "nobody looks for its disks");
        }
    }

    async fn follow_pool(&self, name: &PoolName, report: &PoolReport) {
        let Some(gate) = self.0.pools.gate(name) else { return };
        // Whoever changes it writes it down.
        let Ok(_held) = gate.try_lock() else { return };
        let Some((record, _)) = self.0.pools.get(name) else { return };
        if record.stage == PoolStage::Deleting {
            self.finish_deleting(&record).await;
        } else if let Err(error) = self.note_disks(&record, report).await {
            tracing::warn!(pool = %name, %error, "where its disks are is not written down");
        }
    }

    /// Writes down where the disks of a pool are, if that is news, and that it exists.
    async fn note_disks(&self, record: &PoolRecord, report: &PoolReport) -> io::Result<()> {
        let disks = seen(report, &record.disks);
        let next = PoolRecord { stage: PoolStage::Ready, disks, ..record.clone() };
        if next == *record && !self.0.pools.is_doubtful(&record.name) {
            return Ok(());
        }
        self.write_pool(&next).await
    }

    async fn write_pool(&self, record: &PoolRecord) -> io::Result<()> {
        let written = record.clone();
        let written = self.with_records(move |records| records.write(&written)).await;
        self.0.pools.note(record.clone(), written.is_ok());
        written
    }

    /// A pool is no more, or never was.
    async fn forget_pool(&self, name: &PoolName) -> io::Result<()> {
        let gone = name.clone();
        self.with_records(move |records| records.remove(&gone)).await?;
        self.0.pools.known().remove(name);
        Ok(())
    }

    /// Does something with the records of pools that waits for the disk of the data directory.
    async fn with_records(
        &self,
        what: impl FnOnce(&PoolRecords) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let done = async {
            let turn = Arc::clone(&self.0.pools.turn).lock_owned().await;
            let records = self.0.pools.records.clone();
            let doing = tokio::task::spawn_blocking(move || {
                let done = what(&records);
                drop(turn);
                done
            });
            doing.await.map_err(io::Error::other)?
        };
        timeout(PATIENCE, done).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Opens a pool that is not open, or finishes what a crash has left of it.
    async fn try_pool(&self, name: &PoolName, patience: Duration) {
        let Some(gate) = self.0.pools.gate(name) else { return };
        let Ok(_held) = gate.try_lock() else { return };
        let Some((record, observed)) = self.0.pools.get(name) else { return };
        if observed == PoolObserved::Open {
            return;
        }
        let opened = self.open_pool_there(&record, patience).await;
        match (record.stage, opened) {
            (PoolStage::Deleting, Ok(report)) if report.volumes.is_empty() => {
                self.finish_deleting(&record).await;
            }
            // Or it was not deleted after all, and has been used since.
            (_, Ok(report)) => {
                self.pool_opened(&record, &report).await;
            }
            (PoolStage::Ready, Err(error)) => {
                if observed != PoolObserved::Broken(error.clone()) {
                    tracing::error!(pool = %name, %error, "the pool is offline");
                }
                self.0.pools.observe(name, PoolObserved::Broken(error));
            }
            // Nobody was told that it exists, or somebody wanted that it does not.
            (PoolStage::Creating | PoolStage::Deleting, Err(error)) => {
                tracing::warn!(pool = %name, %error, "a pool is forgotten that was never finished, or half deleted");
                if let Err(error) = self.forget_pool(name).await {
                    tracing::error!(pool = %name, %error, "its record stays");
                }
            }
        }
    }

    /// Opens a pool: with the disks where they were, or wherever there are block devices.
    async fn open_pool_there(
        &self,
        record: &PoolRecord,
        patience: Duration,
    ) -> Result<PoolReport, BackingError> {
        let (engine, deadline) = (&self.0.engine, Instant::now() + patience);
        let wanted = record.disks.iter().filter(|d| !d.out).count();
        loop {
            let paths = record.paths();
            let there = engine.count_pool_disks(record.id, paths.clone()).await?;
            if !paths.is_empty() && there >= paths.len() {
                return engine.open_pool(record, paths, (Vec::new(), false)).await;
            }
            let paths = candidates(paths).await;
            let there = engine.count_pool_disks(record.id, paths.clone()).await?;
            if there >= wanted || Instant::now() >= deadline {
                return engine.open_pool(record, paths, (Vec::new(), false)).await;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// A pool is open: its volumes can be.
    async fn pool_opened(&self, record: &PoolRecord, report: &PoolReport) {
        let name = &record.name;
        tracing::info!(pool = %name, id = %record.id, disks = report.disks.len(), "open");
        self.0.pools.observe(name, PoolObserved::Open);
        if let Err(error) = self.note_disks(record, report).await {
            tracing::warn!(pool = %name, %error, "where its disks are is not written down");
        }
        self.pools_changed();
        if self.is_serving() {
            self.retry_volumes_of(name).await;
        }
    }

    /// Has other nodes hear at once of what pools there are here.
    fn pools_changed(&self) {
        self.0.asked.send_modify(|_| {});
    }

    /// Tries the volumes of a pool again that have failed without it.
    async fn retry_volumes_of(&self, name: &PoolName) {
        for (stored, observed) in self.0.state.all() {
            if !matches!(observed, Observed::Broken { .. } | Observed::Stuck { .. })
                || self.pool_name_of(&stored.record) != Some(name)
            {
                continue;
            }
            let id = stored.record.id;
            let gate = self.0.state.gate(id);
            let _held = gate.lock().await;
            self.0.state.forget_failure(id);
            self.settle_held(id).await;
        }
    }

    async fn finish_deleting(&self, record: &PoolRecord) {
        let name = &record.name;
        let destroyed = self.0.engine.destroy_pool(name).await;
        if let Err(error) = &destroyed {
            tracing::warn!(pool = %name, %error, "it is not deleted yet");
            self.0.pools.observe(name, PoolObserved::Open);
        } else if let Err(error) = self.forget_pool(name).await {
            tracing::error!(pool = %name, %error, "its record stays");
        }
    }

    /// The pool that a volume's copy on this node lies in.
    pub(super) fn pool_name_of<'a>(&self, record: &'a VolumeRecord) -> Option<&'a PoolName> {
        record.place(self.me())?.backing.pool()
    }

    /// Whether this node has a pool of this name.
    pub(super) fn has_pool(&self, name: &PoolName) -> bool {
        self.0.pools.get(name).is_some()
    }

    /// Whether a volume's copy on this node lies in a pool that there is no more: nothing is left of it.
    pub(super) fn lost_its_pool(&self, record: &VolumeRecord) -> bool {
        let Some(name) = self.pool_name_of(record) else { return false };
        let damaged = self.0.pools.damaged();
        !self.has_pool(name) && !damaged.iter().any(|d| d.name.as_ref().is_none_or(|n| n == name))
    }

    /// Refuses to touch the copy of a volume whose pool is not open.
    pub(super) fn check_pool_of(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        let Some(name) = self.pool_name_of(record) else { return Ok(()) };
        match self.0.pools.get(name) {
            Some((_, PoolObserved::Open)) => Ok(()),
            Some((_, PoolObserved::Closed)) => {
                Err(BackingError::refused(format!("pool {name} is not open yet")))
            }
            Some((_, PoolObserved::Broken(error))) => {
                let message = format!("pool {name} is offline: {}", error.of_that_pool(name));
                Err(BackingError::refused(message).hinted(error.hint))
            }
            None => {
                let damaged = self.0.pools.damaged();
                let why = damaged.iter().find(|d| d.name.as_ref().is_none_or(|n| n == name));
                Err(BackingError::refused(match why {
                    Some(damage) => format!("pool {name} is left alone: {damage}"),
                    None => format!("there is no pool {name} on this node"),
                }))
            }
        }
    }

    /// What is known of all pools.
    pub(super) async fn pool_facts(&self) -> Vec<PoolFacts> {
        let reports = self.0.engine.pool_reports().await;
        let mut facts = self.0.pools.facts(&reports);
        for pool in &mut facts {
            pool.volumes = self.volumes_in(&pool.record.name);
        }
        facts
    }

    /// The volumes whose copies on this node lie in a pool, by name.
    pub(super) fn volumes_in(&self, name: &PoolName) -> Vec<(Uuid, String)> {
        let all = self.0.state.all();
        let within = all.iter().filter(|(s, _)| self.pool_name_of(&s.record) == Some(name));
        within.map(|(s, _)| (s.record.id, s.record.name.to_string())).collect()
    }

    /// All pools, by name.
    pub async fn pools(&self) -> PoolList {
        let facts = self.pool_facts().await;
        let unread = self.0.pools.damaged().iter().map(ToString::to_string).collect();
        PoolList { pools: facts.iter().map(pool_view::pool).collect(), unread }
    }

    /// One pool.
    ///
    /// # Errors
    /// [`Code::NotFound`].
    pub async fn pool(&self, name: &PoolName) -> Result<Pool, ApiError> {
        let facts = self.pool_facts().await;
        let found = facts.iter().find(|pool| pool.record.name == *name);
        found.map(pool_view::pool).ok_or_else(|| not_found(name))
    }
}

/// What can be done about a pool that is offline.
pub(super) fn hint_for(name: &PoolName, error: &BackingError) -> String {
    let own = error.hint.map(|hint| format!("{hint}; ")).unwrap_or_default();
    format!(
        "{own}the node looks for its disks every few seconds. Disks that are gone for good: \
         windrose pool open {name} --without DISK"
    )
}

async fn candidates(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let known = paths.clone();
    tokio::task::spawn_blocking(move || pools::candidates(&known)).await.unwrap_or(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::pool_view::tests::report;

    #[test]
    fn a_disk_that_is_not_there_is_remembered_where_it_was() {
        let mut report = report("tank");
        let before = seen(&report, &[]);
        assert_eq!(before.len(), report.disks.len());
        let gone = report.disks[1].path.take().unwrap();
        report.disks[1].state = PoolDiskState::Out;
        let after = seen(&report, &before);
        assert_eq!((after[1].path.clone(), after[1].out), (gone, true));
        assert_eq!(seen(&report, &[]).len(), report.disks.len() - 1, "nobody knows where");
    }
}
