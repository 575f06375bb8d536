//! What an administrator does with pools of disks.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{
    AddDisks, ApiError, ClearErrors, Code, CreatePool, OpenPool, Pool, PoolName, Raid, RemoveDisk,
    ReplaceDisk, Size,
};
use peer::NodeId;
use uuid::Uuid;

use super::{Known, PoolObserved, candidates, hint_for, not_found};
use crate::control::beneath::{Candidate, Identity};
use crate::control::{Control, pool_view};
use crate::engine::{self, BackingError, Level, NewDisk, NewPool, PoolDiskState, PoolReport};
use crate::pools::{MAX_RINGS, PoolRecord, PoolStage, SeenDisk};
use crate::record::VolumeRecord;

impl Control {
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
        let Some(report) = &found.report else {
            let message = format!("pool {name} exists and is not open: it may be another one");
            return Err(conflict(message).hint(format!("see `windrose pool show {name}`")));
        };
        let (report, of) = (report.clone(), ask.clone());
        let differences = tokio::task::spawn_blocking(move || differences(&report, &of)).await;
        let differences = differences.unwrap_or_else(|_| vec!["make".to_owned()]);
        if differences.is_empty() {
            return Ok(pool_view::pool(found));
        }
        let message = format!("pool {name} exists with another {}", differences.join(", another "));
        Err(ApiError::new(Code::Exists, message)
            .hint(format!("choose another name, or see `windrose pool show {name}`")))
    }

    /// Refuses the node's own files, and files and devices that a volume of this node lies on or another pool has.
    pub(in crate::control) async fn check_unused_paths(
        &self,
        paths: Vec<PathBuf>,
    ) -> Result<(), ApiError> {
        self.check_paths_not_of(paths, self.users_of_paths(|_| true)).await
    }

    /// The same just before a copy of a volume is made here, whichever node was asked for it: what another volume is
    /// still to be made on is nobody's yet.
    pub(in crate::control) async fn check_makeable(
        &self,
        record: &VolumeRecord,
    ) -> Result<(), ApiError> {
        let path = record.place(self.me()).and_then(|place| place.backing.path());
        let Some(path) = path else { return Ok(()) };
        let has = |other: &VolumeRecord| other.id != record.id && has_image_on(other, self.me());
        self.check_paths_not_of(vec![path.to_owned()], self.users_of_paths(has)).await
    }

    async fn check_paths_not_of(
        &self,
        paths: Vec<PathBuf>,
        users: Vec<(PathBuf, String)>,
    ) -> Result<(), ApiError> {
        let own = self.0.settings.own_files.clone();
        let find = move || {
            paths.iter().enumerate().find_map(|(n, path)| {
                let refused = own.refusal(path).or_else(|| refusal_of_use(path, &users));
                let refused = refused.or_else(|| own.refusal_of_device(path));
                refused.or_else(|| refusal_of_twice(path, &paths[..n]))
            })
        };
        let found = tokio::task::spawn_blocking(find).await.map_err(|e| {
            ApiError::new(Code::Internal, format!("its paths cannot be looked at: {e}"))
        })?;
        found.map_or(Ok(()), |why| {
            Err(ApiError::new(Code::Backing, why).hint("choose another file or device"))
        })
    }

    /// Files and devices that records of this node name.
    pub(in crate::control) fn used_paths(&self) -> Vec<PathBuf> {
        self.users_of_paths(|_| true).into_iter().map(|(path, _)| path).collect()
    }

    /// The same, with what uses them: pools, and those volumes of which `counts` says so.
    fn users_of_paths(&self, counts: impl Fn(&VolumeRecord) -> bool) -> Vec<(PathBuf, String)> {
        let me = self.me();
        let volumes = self.0.state.all();
        let volumes = volumes.iter().filter(|(s, _)| counts(&s.record)).filter_map(|(s, _)| {
            let path = s.record.place(me)?.backing.path()?.to_owned();
            Some((path, format!("volume {}", s.record.name)))
        });
        let mut users: Vec<_> = volumes.collect();
        for known in self.0.pools.known().values() {
            let user = format!("pool {}", known.record.name);
            let disks = known.record.disks.iter().filter(|d| !d.out);
            users.extend(disks.map(|d| (d.path.clone(), user.clone())));
        }
        users
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
            let known = self.volumes_in(name).into_iter();
            let commands: Vec<_> =
                known.map(|(_, user)| format!("windrose volume delete {user}")).collect();
            let hint = match commands.as_slice() {
                [] => "windrose volume orphans lists the images in it".to_owned(),
                commands => format!("delete them first: {}", commands.join("; ")),
            };
            return Err(conflict(message).hint(hint));
        }
        match observed {
            PoolObserved::Open => self.destroy_pool(&record).await?,
            PoolObserved::Broken(_) | PoolObserved::Closed if force => {
                tracing::warn!(pool = %name, "an operator has it forgotten; its disks are left as they are");
                self.forget_pool(name).await.map_err(|e| not_written(name, &e))?;
            }
            PoolObserved::Broken(error) => {
                let why = error.of_that_pool(name);
                return Err(conflict(format!("pool {name} is offline: {why}")).hint(
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
                    let why = error.of_that_pool(&name);
                    let message = format!("pool {name} is offline: {why}");
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
                let disk = NewDisk { path, overwrite: overwrite.clone() };
                let added = control.0.engine.add_to_pool(&record.name, disk, spare).await;
                added.map_err(|e| pool_error(&e))?;
            }
            Ok(())
        })
        .await
    }

    /// What a disk of an open pool is called there that a person has named, maybe by another path to it.
    async fn disk_of(&self, record: &PoolRecord, named: String) -> String {
        let reports = self.0.engine.pool_reports().await;
        let disks = reports.get(&record.name).map(|r| r.disks.as_slice()).unwrap_or_default();
        let paths: Vec<_> = disks.iter().filter_map(|disk| disk.path.clone()).collect();
        let is_serial = disks.iter().any(|disk| disk.serial == named);
        if is_serial { named } else { by_path(named, paths).await }
    }

    /// Begins to take a disk out of a pool, or cancels that.
    ///
    /// # Errors
    /// [`Code::NotFound`]; what the pool says.
    pub async fn remove_disk(&self, name: PoolName, ask: RemoveDisk) -> Result<Pool, ApiError> {
        self.change_pool(name, move |control, record| async move {
            let RemoveDisk { disk, cancel } = ask;
            let disk = control.disk_of(&record, disk).await;
            let engine = &control.0.engine;
            let removed = match cancel {
                true => engine.cancel_removal_from_pool(&record.name, disk).await,
                false => engine.remove_from_pool(&record.name, disk).await,
            };
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
            let with = NewDisk { path: with, overwrite };
            let disk = control.disk_of(&record, disk).await;
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

    /// Has errors of a pool's disks counted anew.
    ///
    /// # Errors
    /// [`Code::NotFound`]; what the pool says.
    pub async fn clear_pool_errors(
        &self,
        name: PoolName,
        ask: ClearErrors,
    ) -> Result<Pool, ApiError> {
        self.change_pool(name, move |control, record| async move {
            let disk = match ask.disk {
                Some(disk) => Some(control.disk_of(&record, disk).await),
                None => None,
            };
            let cleared = control.0.engine.clear_pool_errors(&record.name, disk).await;
            cleared.map_err(|e| pool_error(&e))
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

    /// Where the disks of a pool are: where they were, if all are there. Elsewhere there may be second paths to them then.
    async fn places_of_disks(&self, record: &PoolRecord) -> Vec<PathBuf> {
        let paths = record.paths();
        let there = self.0.engine.count_pool_disks(record.id, paths.clone()).await;
        match there {
            Ok(there) if !paths.is_empty() && there >= paths.len() => paths,
            _ => candidates(paths).await,
        }
    }

    async fn open_without_now(&self, name: &PoolName, ask: OpenPool) -> Result<Pool, ApiError> {
        let OpenPool { without, take_over, confirm } = ask;
        if !(take_over && without.is_empty()) {
            check_count(without.len())?;
        }
        if confirm != *name {
            let message = format!("{confirm} is confirmed, and {name} is meant");
            return Err(ApiError::new(Code::InvalidRequest, message)
                .hint("repeat the name of the pool: what only those disks hold is lost, and no other node may use it"));
        }
        let gate = self.0.pools.gate(name).ok_or_else(|| not_found(name))?;
        let _held = gate.lock().await;
        let (record, observed) = self.0.pools.get(name).ok_or_else(|| not_found(name))?;
        if observed == PoolObserved::Open {
            return Err(conflict(format!("pool {name} is open")).hint(format!(
                "a disk that has failed is replaced: windrose pool replace {name} SERIAL --with DISK"
            )));
        }
        tracing::warn!(pool = %name, ?without, take_over, "an operator has it opened without these disks, or taken over");
        let paths = self.places_of_disks(&record).await;
        let without = without_paths(without, &record, &paths).await;
        match self.0.engine.open_pool(&record, paths, (without, take_over)).await {
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

fn opening(name: &PoolName) -> ApiError {
    conflict(format!("pool {name} is being opened")).hint("try again in a moment")
}

fn new_pool(ask: &CreatePool) -> NewPool {
    let (level, columns) = level(ask);
    let disks = |paths: &[PathBuf]| {
        let disk =
            |path: &PathBuf| NewDisk { path: path.clone(), overwrite: ask.overwrite.clone() };
        paths.iter().map(disk).collect()
    };
    let (strip_bytes, spares) = (ask.strip_bytes, disks(&ask.spares));
    let checksums = ask.checksums;
    NewPool { level, columns, strip_bytes, checksums, disks: disks(&ask.disks), spares }
}

/// A disk that a person has named, by the one of these paths that leads to the same file as its name, if it is a path.
async fn by_path(named: String, paths: Vec<PathBuf>) -> String {
    let typed = PathBuf::from(named.strip_prefix("path:").unwrap_or(&named));
    if typed.is_relative() || paths.contains(&typed) {
        return named;
    }
    let find = move || paths.into_iter().find(|path| is_same(path, &typed));
    let found = tokio::task::spawn_blocking(find).await.unwrap_or_default();
    found.map_or(named, |path| format!("path:{}", path.display()))
}

/// Disks that a person has named, by paths where they are, or by the serial numbers of those that are gone from there.
async fn without_paths(names: Vec<String>, record: &PoolRecord, paths: &[PathBuf]) -> Vec<String> {
    let mut all = Vec::new();
    for named in names {
        let typed = PathBuf::from(named.strip_prefix("path:").unwrap_or(&named));
        let seen = record.disks.iter().find(|disk| disk.path == typed);
        let serial = seen.and_then(|disk| disk.serial.clone());
        // What is there now may be another disk than the one that was.
        let is_there = move || std::fs::symlink_metadata(typed).is_ok();
        all.push(match serial {
            Some(serial) if !tokio::task::spawn_blocking(is_there).await.unwrap_or(true) => {
                format!("serial:{serial}")
            }
            _ => by_path(named, paths.to_vec()).await,
        });
    }
    all
}

/// In what a pool differs from what is asked for.
fn differences(pool: &PoolReport, ask: &CreatePool) -> Vec<String> {
    let (level, columns) = level(ask);
    let paths = |is_spare: bool| {
        let is = move |d: &&engine::PoolDisk| (d.state == PoolDiskState::Spare) == is_spare;
        let known = pool.disks.iter().filter(is);
        known.filter_map(|d| d.path.clone()).collect::<Vec<PathBuf>>()
    };
    let same = |asked: &[PathBuf], known: &[PathBuf]| {
        asked.len() == known.len() && asked.iter().all(|a| known.iter().any(|k| is_same(a, k)))
    };
    let (data, spares) = (paths(false), paths(true));
    let list = |paths: &[PathBuf]| {
        let all: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    };
    let columns = columns.is_some_and(|columns| columns != pool.columns);
    let differences = [
        (level != pool.level)
            .then(|| format!("level ({})", pool_view::level_text(pool.level, pool.columns))),
        columns.then(|| format!("number of columns ({})", pool.columns)),
        (ask.strip_bytes != pool.strip_bytes)
            .then(|| format!("strip ({})", Size(pool.strip_bytes.into()))),
        (ask.checksums != pool.checksums).then(|| {
            format!("choice of checksums ({})", if pool.checksums { "with" } else { "without" })
        }),
        (!same(&ask.disks, &data)).then(|| format!("list of disks ({})", list(&data))),
        (!same(&ask.spares, &spares)).then(|| format!("list of spares ({})", list(&spares))),
    ];
    differences.into_iter().flatten().collect()
}

/// Whether a volume has an image on a node, or may have: one that is to vanish may be the only one in sync until then.
fn has_image_on(record: &VolumeRecord, node: NodeId) -> bool {
    record.place(node).is_some_and(|place| place.stage.has_image())
}

/// Why a path cannot be used beside those that are, if so.
fn refusal_of_use(path: &Path, users: &[(PathBuf, String)]) -> Option<String> {
    let mut candidate = Candidate::new(path);
    let (used, user) = users.iter().find(|(used, _)| candidate.shares_with(used))?;
    let shown = path.display();
    Some(match candidate.is(used) {
        true => format!("{shown} belongs to {user}"),
        false => {
            format!("{shown} shares its space with {}, which belongs to {user}", used.display())
        }
    })
}

/// Why a path cannot be used together with others, if so.
fn refusal_of_twice(path: &Path, others: &[PathBuf]) -> Option<String> {
    let mut candidate = Candidate::new(path);
    let other = others.iter().find(|other| candidate.shares_with(other))?;
    Some(format!("{} shares its space with {}", path.display(), other.display()))
}

/// Whether two paths lead to one file, or one device.
fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path| std::fs::metadata(path).ok().map(|found| Identity::of(&found));
    a == b || identity(a).is_some_and(|a| Some(a) == identity(b))
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

pub(super) fn conflict(message: impl Into<String>) -> ApiError {
    ApiError::new(Code::Conflict, message)
}

/// What a pool refuses, as the API tells it.
pub(super) fn pool_error(e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), e.to_string());
    match e.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// A pool's record that cannot be written, as the API tells it.
pub(super) fn not_written(name: &PoolName, error: &io::Error) -> ApiError {
    tracing::error!(pool = %name, %error, "what the node knows of a pool cannot be written down");
    ApiError::new(Code::Internal, format!("pool {name}: its record cannot be written: {error}"))
        .hint("see the node's log; the data directory may be full or read-only")
}

/// Refuses paths that the node cannot know the meaning of.
pub(super) fn check_paths<'a>(
    paths: impl IntoIterator<Item = &'a PathBuf>,
) -> Result<(), ApiError> {
    let odd = |p: &&PathBuf| p.is_relative() || p.as_os_str().as_encoded_bytes().contains(&0);
    paths.into_iter().find(odd).map_or(Ok(()), |path| {
        let message = format!("{} is not an absolute path", path.display());
        Err(ApiError::new(Code::InvalidRequest, message).hint("give a path from / on"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::PlaceStage;

    #[test]
    fn a_copy_that_is_to_leave_has_its_file_until_it_is_gone() {
        let mut record = crate::record::tests::record("web");
        let node = record.places[0].node;
        let mut has_image = |stage| {
            record.places[0].stage = stage;
            has_image_on(&record, node)
        };
        assert!(has_image(PlaceStage::Leaving { instead_of: Some(NodeId(9)) }));
        assert!(has_image(PlaceStage::Leaving { instead_of: None }));
        assert!(has_image(PlaceStage::Made) && has_image(PlaceStage::Superseded));
        assert!(!has_image(PlaceStage::Wanted { force: true }));
        assert!(!has_image(PlaceStage::Failed { reason: "full".to_owned() }));
        assert!(!has_image_on(&record, NodeId(9)));
    }

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
}
