//! Pools of disks: which there are, opening them, and what an administrator does with them.
//!
//! A pool belongs to this node alone, and the store knows nothing of it: its record is in the data directory
//! ([`crate::pools`]), written before its disks are touched.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{
    AddDisks, ApiError, Code, CreatePool, OpenPool, Pool, PoolList, PoolName, Raid, RemoveDisk,
    ReplaceDisk,
};
use futures_util::future::join_all;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::Control;
use super::pool_view::{self, PoolFacts, Progress};
use crate::engine::{BackingError, JoiningDisk, Level, NewPool, PoolDiskState, PoolReport};
use crate::pools::{self, DamagedPool, MAX_RINGS, PoolRecord, PoolRecords, PoolStage, SeenDisk};
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
}

#[derive(Clone)]
struct Known {
    record: PoolRecord,
    observed: PoolObserved,
    progress: Progress,
    /// Held while something is done with it.
    gate: Arc<tokio::sync::Mutex<()>>,
}

impl Known {
    fn new(record: PoolRecord) -> Self {
        Self { record, observed: PoolObserved::Closed, progress: None, gate: Arc::default() }
    }
}

impl Pools {
    pub(super) fn of(data_dir: &Path) -> Self {
        let records = PoolRecords::of(data_dir);
        Self { records, known: Mutex::default(), damaged: Mutex::default() }
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

    fn note(&self, record: PoolRecord) {
        if let Some(known) = self.known().get_mut(&record.name) {
            known.record = record;
        }
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

/// The level that is asked for, and over how many disks a stripe goes if that is said.
fn level(ask: &CreatePool) -> (Level, Option<u16>) {
    let copies = u16::from(ask.copies());
    match ask.raid {
        Raid::Zero | Raid::Ten => (Level::Copies(copies), ask.columns),
        Raid::One => (Level::Copies(copies), Some(copies)),
        Raid::Five => (Level::Parity, ask.columns),
        Raid::Six => (Level::DoubleParity, ask.columns),
    }
}

fn conflict(message: impl Into<String>) -> ApiError {
    ApiError::new(Code::Conflict, message)
}

fn not_found(name: &PoolName) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no pool {name} on this node"))
        .hint("`windrose pool list` shows what there is")
}

/// What a pool refuses, as the API tells it.
fn pool_error(e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), e.to_string());
    match e.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// A pool's record that cannot be written, as the API tells it.
fn not_written(name: &PoolName, error: &io::Error) -> ApiError {
    tracing::error!(pool = %name, %error, "what the node knows of a pool cannot be written down");
    ApiError::new(Code::Internal, format!("pool {name}: its record cannot be written: {error}"))
        .hint("see the node's log; the data directory may be full or read-only")
}

/// Refuses paths that the node cannot know the meaning of.
fn check_paths<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), ApiError> {
    let odd = |p: &&PathBuf| p.is_relative() || p.as_os_str().as_encoded_bytes().contains(&0);
    paths.into_iter().find(odd).map_or(Ok(()), |path| {
        let message = format!("{} is not an absolute path", path.display());
        Err(ApiError::new(Code::InvalidRequest, message).hint("give a path from / on"))
    })
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
                    Some(report) => self.follow_pool(&name, report).await,
                    None => self.try_pool(&name, Duration::ZERO).await,
                }
            }
            // How far rebuilds are is told by how far they were.
            self.0.pools.facts(&reports);
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
        if next == *record {
            return Ok(());
        }
        self.write_pool(&next).await
    }

    async fn write_pool(&self, record: &PoolRecord) -> io::Result<()> {
        let (records, written) = (self.0.pools.records.clone(), record.clone());
        let write = tokio::task::spawn_blocking(move || records.write(&written));
        self.in_time(write).await?;
        self.0.pools.note(record.clone());
        Ok(())
    }

    /// A pool is no more, or never was.
    async fn forget_pool(&self, name: &PoolName) -> io::Result<()> {
        let (records, gone) = (self.0.pools.records.clone(), name.clone());
        self.in_time(tokio::task::spawn_blocking(move || records.remove(&gone))).await?;
        self.0.pools.known().remove(name);
        Ok(())
    }

    async fn in_time(&self, write: tokio::task::JoinHandle<io::Result<()>>) -> io::Result<()> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        timeout(PATIENCE, write).await.map_err(late)?.map_err(io::Error::other)?
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
            (PoolStage::Deleting, Ok(_)) => self.finish_deleting(&record).await,
            (PoolStage::Creating | PoolStage::Ready, Ok(report)) => {
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
                return engine.open_pool(record, paths, Vec::new()).await;
            }
            let paths = candidates(paths).await;
            let there = engine.count_pool_disks(record.id, paths.clone()).await?;
            if there >= wanted || Instant::now() >= deadline {
                return engine.open_pool(record, paths, Vec::new()).await;
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
                let message = format!("pool {name} is offline: {error}");
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
    fn volumes_in(&self, name: &PoolName) -> Vec<(Uuid, String)> {
        let all = self.0.state.all();
        let within = all.iter().filter(|(s, _)| self.pool_name_of(&s.record) == Some(name));
        within.map(|(s, _)| (s.record.id, s.record.name.to_string())).collect()
    }

    /// All pools, by name.
    pub async fn pools(&self) -> PoolList {
        let facts = self.pool_facts().await;
        PoolList { pools: facts.iter().map(pool_view::pool).collect() }
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

    /// Creates a pool. Asked for the same again, gives the pool that there is.
    ///
    /// # Errors
    /// [`Code::Exists`] if the name belongs to another pool; what is wrong with the request or a disk, by name.
    pub async fn create_pool(&self, ask: CreatePool) -> Result<Pool, ApiError> {
        let control = self.clone();
        self.detached(async move { control.create_pool_now(ask).await }).await
    }

    async fn create_pool_now(&self, ask: CreatePool) -> Result<Pool, ApiError> {
        ask.check()?;
        let paths: Vec<_> = ask.disks.iter().chain(&ask.spares).cloned().collect();
        check_paths(&paths)?;
        let name = ask.name.clone();
        if self.has_pool(&name) {
            return self.existing_pool(&ask).await;
        }
        let damaged = self.0.pools.damaged();
        if let Some(damage) = damaged.iter().find(|d| d.name.as_ref().is_none_or(|n| *n == name)) {
            return Err(conflict(damage.to_string())
                .hint("repair or remove that file and restart the node, or choose another name"));
        }
        self.check_unused_paths(paths.clone()).await?;
        let cores = u16::try_from(self.0.engine.cores()).unwrap_or(MAX_RINGS);
        let record = PoolRecord {
            id: Uuid::new_v4(),
            name: name.clone(),
            stage: PoolStage::Creating,
            rings: cores.clamp(1, MAX_RINGS),
            disks: paths.into_iter().map(SeenDisk::new).collect(),
        };
        let known = Known::new(record.clone());
        // Before anybody else finds it half made.
        let _held = Arc::clone(&known.gate).lock_owned().await;
        if !self.0.pools.insert(known) {
            return self.existing_pool(&ask).await;
        }
        if let Err(error) = self.write_pool(&record).await {
            self.0.pools.known().remove(&name);
            return Err(not_written(&name, &error));
        }
        let made = self.0.engine.create_pool(&record, new_pool(&ask)).await;
        let report = match made {
            Ok(report) => report,
            Err(e) => {
                if let Err(error) = self.forget_pool(&name).await {
                    tracing::error!(pool = %name, %error, "its record stays");
                }
                return Err(pool_error(&e));
            }
        };
        tracing::info!(pool = %name, id = %record.id, "created");
        self.pool_opened(&record, &report).await;
        self.pool(&name).await
    }

    /// The pool that has the name already, if it is what is asked for.
    async fn existing_pool(&self, ask: &CreatePool) -> Result<Pool, ApiError> {
        let name = &ask.name;
        // Waits for whoever is creating it.
        if let Some(gate) = self.0.pools.gate(name) {
            drop(gate.lock().await);
        }
        let facts = self.pool_facts().await;
        let found = facts.iter().find(|p| p.record.name == *name);
        let Some(found) = found else {
            return Err(conflict(format!("pool {name} was not made just now")).hint("try again"));
        };
        let (level, columns) = level(ask);
        let same = found.report.as_ref().is_some_and(|r| {
            let has = |path: &PathBuf| r.disks.iter().any(|d| d.path.as_ref() == Some(path));
            r.level == level
                && columns.is_none_or(|columns| columns == r.columns)
                && r.strip_bytes == ask.strip_bytes
                && ask.disks.iter().chain(&ask.spares).all(has)
        });
        if same {
            return Ok(pool_view::pool(found));
        }
        Err(ApiError::new(Code::Exists, format!("pool {name} exists, and is another one"))
            .hint(format!("choose another name, or see `windrose pool show {name}`")))
    }

    /// Refuses files and devices that a volume of this node lies on, or another pool has.
    pub(super) async fn check_unused_paths(&self, paths: Vec<PathBuf>) -> Result<(), ApiError> {
        let me = self.me();
        let volumes = self.0.state.all();
        let volumes = volumes.iter().filter_map(|(s, _)| {
            let path = s.record.place(me)?.backing.path()?.to_owned();
            Some((path, format!("volume {}", s.record.name)))
        });
        let mut users: Vec<_> = volumes.collect();
        for known in self.0.pools.known().values() {
            let user = format!("pool {}", known.record.name);
            let disks = known.record.disks.iter().filter(|d| !d.out);
            users.extend(disks.map(|d| (d.path.clone(), user.clone())));
        }
        let find = move || {
            paths.into_iter().find_map(|path| {
                let user = users.iter().find(|(used, _)| is_same(used, &path))?;
                Some((path, user.1.clone()))
            })
        };
        let found = tokio::task::spawn_blocking(find).await.unwrap_or_default();
        found.map_or(Ok(()), |(path, user)| {
            Err(ApiError::new(Code::Backing, format!("{} belongs to {user}", path.display()))
                .hint("choose another file or device"))
        })
    }

    /// Deletes a pool without volumes; with `force` also forgets one that cannot be opened.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Conflict`] names its volumes, or says why it is offline.
    pub async fn delete_pool(&self, name: PoolName, force: bool) -> Result<(), ApiError> {
        let control = self.clone();
        self.detached(async move { control.delete_pool_now(&name, force).await }).await
    }

    async fn delete_pool_now(&self, name: &PoolName, force: bool) -> Result<(), ApiError> {
        let gate = self.0.pools.gate(name).ok_or_else(|| not_found(name))?;
        let _held = gate.lock().await;
        let (record, observed) = self.0.pools.get(name).ok_or_else(|| not_found(name))?;
        let mut users: Vec<_> = self.volumes_in(name).into_iter().map(|(_, name)| name).collect();
        let reports = self.0.engine.pool_reports().await;
        let within = reports.get(name).map(|r| r.volumes.as_slice()).unwrap_or_default();
        let known = |id: Uuid| self.0.state.get(id).is_some();
        users.extend(within.iter().filter(|v| !known(v.id)).map(|v| v.id.to_string()));
        if !users.is_empty() {
            let message = format!("pool {name} has volumes: {}", users.join(", "));
            return Err(conflict(message).hint("delete them first (`windrose volume delete`)"));
        }
        match observed {
            PoolObserved::Open => self.destroy_pool(&record).await?,
            PoolObserved::Broken(_) | PoolObserved::Closed if force => {
                tracing::warn!(pool = %name, "an operator has it forgotten; its disks are left as they are");
                self.forget_pool(name).await.map_err(|e| not_written(name, &e))?;
            }
            PoolObserved::Broken(error) => {
                return Err(conflict(format!("pool {name} is offline: {error}")).hint(
                    "bring its disks back and delete it then, or have it forgotten with --force (`force=true`)",
                ));
            }
            PoolObserved::Closed => return Err(opening(name)),
        }
        tracing::info!(pool = %name, id = %record.id, "deleted");
        self.pools_changed();
        Ok(())
    }

    async fn destroy_pool(&self, record: &PoolRecord) -> Result<(), ApiError> {
        let name = &record.name;
        let deleting = PoolRecord { stage: PoolStage::Deleting, ..record.clone() };
        self.write_pool(&deleting).await.map_err(|e| not_written(name, &e))?;
        if let Err(e) = self.0.engine.destroy_pool(name).await {
            // Another attempt is for whoever wants it.
            if let Err(error) = self.write_pool(record).await {
                tracing::error!(pool = %name, %error, "it stays marked as being deleted");
            }
            return Err(pool_error(&e));
        }
        self.forget_pool(name).await.map_err(|e| not_written(name, &e))
    }

    /// Does something with an open pool, writes down what has become of its disks, and shows it.
    async fn change_pool<F, Fut>(&self, name: PoolName, change: F) -> Result<Pool, ApiError>
    where
        F: FnOnce(Self, PoolRecord) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let control = self.clone();
        self.detached(async move {
            let gate = control.0.pools.gate(&name).ok_or_else(|| not_found(&name))?;
            let _held = gate.lock().await;
            let (record, observed) = control.0.pools.get(&name).ok_or_else(|| not_found(&name))?;
            match observed {
                PoolObserved::Open => {}
                PoolObserved::Closed => return Err(opening(&name)),
                PoolObserved::Broken(error) => {
                    let message = format!("pool {name} is offline: {error}");
                    return Err(conflict(message).hint(hint_for(&name, &error)));
                }
            }
            let changed = change(control.clone(), record).await;
            control.note_now(&name).await;
            changed?;
            control.pool(&name).await
        })
        .await
    }

    async fn note_now(&self, name: &PoolName) {
        let reports = self.0.engine.pool_reports().await;
        if let (Some(report), Some((record, _))) = (reports.get(name), self.0.pools.get(name))
            && let Err(error) = self.note_disks(&record, report).await
        {
            tracing::warn!(pool = %name, %error, "where its disks are is not written down");
        }
    }

    /// Writes down where a disk is that is to come into a pool, before it does.
    async fn expect_disk(&self, record: &PoolRecord, path: &Path) -> Result<(), ApiError> {
        let mut record = record.clone();
        record.disks.push(SeenDisk::new(path.to_owned()));
        self.write_pool(&record).await.map_err(|e| not_written(&record.name, &e))
    }

    /// Adds disks to a pool, one after the other.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Backing`] names the disk that is refused: those before it are added.
    pub async fn add_disks(&self, name: PoolName, ask: AddDisks) -> Result<Pool, ApiError> {
        let AddDisks { disks, spare, overwrite } = ask;
        check_count(disks.len())?;
        check_paths(&disks)?;
        self.change_pool(name, move |control, record| async move {
            control.check_unused_paths(disks.clone()).await?;
            for path in disks {
                let record = control.0.pools.get(&record.name).map_or(record.clone(), |(r, _)| r);
                control.expect_disk(&record, &path).await?;
                let disk = JoiningDisk { path, overwrite: overwrite.clone() };
                let added = control.0.engine.add_to_pool(&record.name, disk, spare).await;
                added.map_err(|e| pool_error(&e))?;
            }
            Ok(())
        })
        .await
    }

    /// Begins to take a disk out of a pool.
    ///
    /// # Errors
    /// [`Code::NotFound`]; what the pool says.
    pub async fn remove_disk(&self, name: PoolName, ask: RemoveDisk) -> Result<Pool, ApiError> {
        self.change_pool(name, move |control, record| async move {
            let removed = control.0.engine.remove_from_pool(&record.name, ask.disk).await;
            removed.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Begins to put a disk in the place of another one.
    ///
    /// # Errors
    /// [`Code::NotFound`]; what the pool says.
    pub async fn replace_disk(&self, name: PoolName, ask: ReplaceDisk) -> Result<Pool, ApiError> {
        let ReplaceDisk { disk, with, overwrite } = ask;
        check_paths([&with])?;
        self.change_pool(name, move |control, record| async move {
            control.check_unused_paths(vec![with.clone()]).await?;
            control.expect_disk(&record, &with).await?;
            let with = JoiningDisk { path: with, overwrite };
            let replaced = control.0.engine.replace_in_pool(&record.name, disk, with).await;
            replaced.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Begins to read and compare all of a pool.
    ///
    /// # Errors
    /// [`Code::NotFound`]; what the pool says.
    pub async fn scrub_pool(&self, name: PoolName) -> Result<Pool, ApiError> {
        self.change_pool(name, |control, record| async move {
            let begun = control.0.engine.scrub_pool(&record.name).await;
            begun.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Opens a pool without disks that are gone for good.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] without the pool's name; [`Code::Conflict`] if it is open; what the pool says.
    pub async fn open_without(&self, name: PoolName, ask: OpenPool) -> Result<Pool, ApiError> {
        let control = self.clone();
        self.detached(async move { control.open_without_now(&name, ask).await }).await
    }

    async fn open_without_now(&self, name: &PoolName, ask: OpenPool) -> Result<Pool, ApiError> {
        let OpenPool { without, confirm } = ask;
        check_count(without.len())?;
        if confirm != *name {
            let message = format!("{confirm} is confirmed, and {name} is meant");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("repeat the name of the pool: what only those disks hold is lost"));
        }
        let gate = self.0.pools.gate(name).ok_or_else(|| not_found(name))?;
        let _held = gate.lock().await;
        let (record, observed) = self.0.pools.get(name).ok_or_else(|| not_found(name))?;
        if observed == PoolObserved::Open {
            return Err(conflict(format!("pool {name} is open")).hint(format!(
                "a disk that has failed is replaced: windrose pool replace {name} SERIAL --with DISK"
            )));
        }
        tracing::warn!(pool = %name, ?without, "an operator has it opened without these disks");
        let paths = candidates(record.paths()).await;
        match self.0.engine.open_pool(&record, paths, without).await {
            Ok(report) => {
                self.pool_opened(&record, &report).await;
                self.pool(name).await
            }
            Err(error) => {
                self.0.pools.observe(name, PoolObserved::Broken(error.clone()));
                Err(pool_error(&error))
            }
        }
    }
}

fn check_count(count: usize) -> Result<(), ApiError> {
    if (1..=api::MAX_DISKS).contains(&count) {
        return Ok(());
    }
    let message = format!("{count} disks are named");
    Err(ApiError::new(Code::InvalidRequest, message).hint("name 1 to 128"))
}

/// What can be done about a pool that is offline.
pub(super) fn hint_for(name: &PoolName, error: &BackingError) -> String {
    let own = error.hint.map(|hint| format!("{hint}; ")).unwrap_or_default();
    format!(
        "{own}the node looks for its disks every few seconds. Disks that are gone for good: \
         windrose pool open {name} --without DISK"
    )
}

fn opening(name: &PoolName) -> ApiError {
    conflict(format!("pool {name} is being opened")).hint("try again in a moment")
}

fn new_pool(ask: &CreatePool) -> NewPool {
    let (level, columns) = level(ask);
    let disks = |paths: &[PathBuf]| {
        let disk =
            |path: &PathBuf| JoiningDisk { path: path.clone(), overwrite: ask.overwrite.clone() };
        paths.iter().map(disk).collect()
    };
    let (strip_bytes, spares) = (ask.strip_bytes, disks(&ask.spares));
    NewPool { level, columns, strip_bytes, disks: disks(&ask.disks), spares }
}

/// Whether two paths lead to one file.
fn is_same(a: &Path, b: &Path) -> bool {
    let resolved = |path| std::fs::canonicalize(path).ok();
    a == b || resolved(a).is_some_and(|a| Some(a) == resolved(b))
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
    fn a_level_is_what_was_asked_for() {
        let ask = |raid: u8, copies, columns| {
            let json = format!(r#"{{"name":"p","raid":{raid},"disks":[]}}"#);
            let ask: CreatePool = serde_json::from_str(&json).unwrap();
            level(&CreatePool { copies, columns, ..ask })
        };
        assert_eq!(ask(0, None, None), (Level::Copies(1), None));
        assert_eq!(ask(1, None, None), (Level::Copies(2), Some(2)));
        assert_eq!(ask(1, Some(3), None), (Level::Copies(3), Some(3)));
        assert_eq!(ask(10, Some(3), Some(6)), (Level::Copies(3), Some(6)));
        assert_eq!(ask(5, None, Some(4)), (Level::Parity, Some(4)));
        assert_eq!(ask(6, None, None), (Level::DoubleParity, None));
    }

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
