//! Administration of disk pools.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{
    AddDisks, ApiError, ClearErrors, CreatePoolRequest, ErrorCode, OpenPoolRequest, Pool, PoolName,
    RaidLevel, RemoveDisk, ReplaceDisk, Size,
};
use peer::NodeId;
use uuid::Uuid;

use super::PoolControl;
use super::{KnownPool, candidate_paths, pool_not_found};
use crate::device_stack::{FileIdentity, PathCheck};
use engine::{self, BackingError, NewDisk, NewPool, PoolDiskState, PoolReport, Redundancy};
use records::pool_records::{KnownDisk, MAX_POOL_CORES, PoolRecord, PoolStage};
use records::record::VolumeRecord;
use status::pool_status::{self, PoolObserved, offline_pool_hint};

impl PoolControl {
    /// Creates a pool. A repeated request returns the existing pool.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] if the name belongs to another pool; errors of the request, or of a
    /// disk, by name.
    pub async fn create_pool(&self, request: CreatePoolRequest) -> Result<Pool, ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move { control.create_pool_now(request).await })
            .await
    }

    async fn create_pool_now(&self, request: CreatePoolRequest) -> Result<Pool, ApiError> {
        request.check()?;
        let paths: Vec<_> = request.disks.iter().chain(&request.spares).cloned().collect();
        check_paths(&paths)?;
        let name = request.name.clone();
        if self.has_pool(&name) {
            return self.existing_pool(&request).await;
        }
        let damaged = self.0.table.damaged();
        if let Some(damage) = damaged.iter().find(|d| d.name.as_ref().is_none_or(|n| *n == name)) {
            return Err(conflict(damage.to_string()).with_hint(
                "repair or remove that file and restart the node, or choose another name",
            ));
        }
        self.check_unused_paths(paths.clone()).await?;
        let cores = u16::try_from(self.0.context.engine.cores()).unwrap_or(MAX_POOL_CORES);
        let record = PoolRecord {
            id: Uuid::new_v4(),
            name: name.clone(),
            stage: PoolStage::Creating,
            max_cores: cores.clamp(1, MAX_POOL_CORES),
            disks: paths.into_iter().map(KnownDisk::new).collect(),
        };
        let known = KnownPool::new(record.clone());
        // Lock the pool before a concurrent request finds it half created.
        let _held = Arc::clone(&known.lock).lock_owned().await;
        if !self.0.table.insert(known) {
            return self.existing_pool(&request).await;
        }
        if let Err(error) = self.write_pool_record(&record).await {
            self.0.table.entries().remove(&name);
            return Err(record_write_error(&name, &error));
        }
        let made = self.0.context.engine.create_pool(&record, pool_spec(&request)).await;
        let report = match made {
            Ok(report) => report,
            Err(e) => {
                if let Err(error) = self.remove_pool_record(&name).await {
                    tracing::error!(pool = %name, %error, "cannot remove the pool record");
                }
                return Err(pool_error(&e));
            }
        };
        tracing::info!(pool = %name, id = %record.id, "created");
        self.on_pool_opened(&record, &report).await;
        self.get_pool(&name).await
    }

    /// The pool that has the name already, if it matches the request.
    async fn existing_pool(&self, request: &CreatePoolRequest) -> Result<Pool, ApiError> {
        let name = &request.name;
        // Waits until a concurrent creation ends.
        if let Some(lock) = self.0.table.lock_of(name) {
            drop(lock.lock().await);
        }
        let facts = self.pool_facts().await;
        let found = facts.iter().find(|p| p.record.name == *name);
        let Some(found) = found else {
            return Err(
                conflict(format!("pool {name} does not exist any more")).with_hint("try again")
            );
        };
        let Some(report) = &found.report else {
            let message = format!(
                "pool {name} exists but is not open: cannot check whether it is \
                the requested one"
            );
            return Err(conflict(message).with_hint(format!("see `windrose pool show {name}`")));
        };
        let (report, of) = (report.clone(), request.clone());
        let differences = tokio::task::spawn_blocking(move || differences(&report, &of)).await;
        let differences = differences.unwrap_or_else(|_| vec!["make".to_owned()]);
        if differences.is_empty() {
            return Ok(pool_status::pool_info(found));
        }
        let message = format!("pool {name} exists with another {}", differences.join(", another "));
        Err(ApiError::new(ErrorCode::Exists, message)
            .with_hint(format!("choose another name, or see `windrose pool show {name}`")))
    }

    /// Fails for the node's own files, and for files and devices in use by a volume of this node or
    /// another pool.
    pub(crate) async fn check_unused_paths(&self, paths: Vec<PathBuf>) -> Result<(), ApiError> {
        self.check_paths_unused_by(paths, self.path_users(|_| true)).await
    }

    /// The same, just before a replica is made here, whichever node got the request. The place of
    /// another volume that is not created yet counts as free.
    pub(crate) async fn check_backing_usable(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        let path = record
            .placement(self.0.context.this_node())
            .and_then(|placement| placement.backing.path());
        let Some(path) = path else { return Ok(()) };
        let has = |other: &VolumeRecord| {
            other.id != record.id && has_image_on(other, self.0.context.this_node())
        };
        self.check_paths_unused_by(vec![path.to_owned()], self.path_users(has)).await
    }

    async fn check_paths_unused_by(
        &self,
        paths: Vec<PathBuf>,
        users: Vec<(PathBuf, String)>,
    ) -> Result<(), ApiError> {
        let own = self.0.context.settings.reserved_paths.clone();
        let find = move || {
            paths.iter().enumerate().find_map(|(n, path)| {
                let refused = own.refusal_for_path(path).or_else(|| in_use_reason(path, &users));
                let refused = refused.or_else(|| own.refusal_for_device(path));
                refused.or_else(|| overlap_reason(path, &paths[..n]))
            })
        };
        let found = tokio::task::spawn_blocking(find).await.map_err(|e| {
            ApiError::new(ErrorCode::Internal, format!("cannot inspect the paths of the pool: {e}"))
        })?;
        found.map_or(Ok(()), |why| {
            Err(ApiError::new(ErrorCode::Backing, why).with_hint("choose another file or device"))
        })
    }

    /// Files and devices that records of this node name.
    pub(crate) fn used_paths(&self) -> Vec<PathBuf> {
        self.path_users(|_| true).into_iter().map(|(path, _)| path).collect()
    }

    /// The same, with their users: pools, and the volumes for which `counts` is true.
    fn path_users(&self, counts: impl Fn(&VolumeRecord) -> bool) -> Vec<(PathBuf, String)> {
        let me = self.0.context.this_node();
        let volumes = self.0.context.volumes.all();
        let volumes = volumes.iter().filter(|(s, _)| counts(&s.record)).filter_map(|(s, _)| {
            let path = s.record.placement(me)?.backing.path()?.to_owned();
            Some((path, format!("volume {}", s.record.name)))
        });
        let mut users: Vec<_> = volumes.collect();
        for known in self.0.table.entries().values() {
            let user = format!("pool {}", known.record.name);
            let disks = known.record.disks.iter().filter(|d| !d.is_out);
            users.extend(disks.map(|d| (d.path.clone(), user.clone())));
        }
        users
    }

    /// Deletes a pool without volumes; with `force` also forgets one that cannot be opened.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Conflict`] names its volumes, or says why it is
    /// offline.
    pub async fn delete_pool(&self, name: PoolName, force: bool) -> Result<(), ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move { control.delete_pool_now(&name, force).await })
            .await
    }

    async fn delete_pool_now(&self, name: &PoolName, force: bool) -> Result<(), ApiError> {
        let lock = self.0.table.lock_of(name).ok_or_else(|| pool_not_found(name))?;
        let _held = lock.lock().await;
        let (record, observed) = self.0.table.get(name).ok_or_else(|| pool_not_found(name))?;
        let mut users: Vec<_> =
            self.volumes_in_pool(name).into_iter().map(|(_, name)| name).collect();
        let reports = self.0.context.engine.pool_reports().await;
        let within = reports.get(name).map(|r| r.volumes.as_slice()).unwrap_or_default();
        let known = |id: Uuid| self.0.context.volumes.get(id).is_some();
        users.extend(within.iter().filter(|v| !known(v.id)).map(|v| v.id.to_string()));
        if !users.is_empty() {
            let message = format!("pool {name} has volumes: {}", users.join(", "));
            let known = self.volumes_in_pool(name).into_iter();
            let commands: Vec<_> =
                known.map(|(_, user)| format!("windrose volume delete {user}")).collect();
            let hint = match commands.as_slice() {
                [] => "to list the images in it: windrose volume orphans".to_owned(),
                commands => format!("delete them first: {}", commands.join("; ")),
            };
            return Err(conflict(message).with_hint(hint));
        }
        match observed {
            PoolObserved::Open => self.destroy_pool(&record).await?,
            PoolObserved::OpenFailed(_) | PoolObserved::Closed if force => {
                tracing::warn!(pool = %name, "pool record removed by an operator; its disks are \
                    not changed");
                self.remove_pool_record(name).await.map_err(|e| record_write_error(name, &e))?;
            }
            PoolObserved::OpenFailed(error) => {
                let why = error.message_without_pool(name);
                return Err(conflict(format!("pool {name} is offline: {why}")).with_hint(
                    "reconnect its disks and then delete it, or remove only its record with \
                     --force (`force=true`)",
                ));
            }
            PoolObserved::Closed => return Err(pool_opening_error(name)),
        }
        tracing::info!(pool = %name, id = %record.id, "deleted");
        self.request_own_report();
        Ok(())
    }

    async fn destroy_pool(&self, record: &PoolRecord) -> Result<(), ApiError> {
        let name = &record.name;
        let deleting = PoolRecord { stage: PoolStage::Deleting, ..record.clone() };
        self.write_pool_record(&deleting).await.map_err(|e| record_write_error(name, &e))?;
        if let Err(e) = self.0.context.engine.destroy_pool(name).await {
            // A new request retries the deletion.
            if let Err(error) = self.write_pool_record(record).await {
                tracing::error!(pool = %name, %error, "cannot clear the deletion mark of a pool");
            }
            return Err(pool_error(&e));
        }
        self.remove_pool_record(name).await.map_err(|e| record_write_error(name, &e))
    }

    /// Changes an open pool, records its disks, and shows it.
    async fn change_pool<F, Fut>(&self, name: PoolName, change: F) -> Result<Pool, ApiError>
    where
        F: FnOnce(Self, PoolRecord) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move {
                let lock = control.0.table.lock_of(&name).ok_or_else(|| pool_not_found(&name))?;
                let _held = lock.lock().await;
                let (record, observed) =
                    control.0.table.get(&name).ok_or_else(|| pool_not_found(&name))?;
                match observed {
                    PoolObserved::Open => {}
                    PoolObserved::Closed => return Err(pool_opening_error(&name)),
                    PoolObserved::OpenFailed(error) => {
                        let why = error.message_without_pool(&name);
                        let message = format!("pool {name} is offline: {why}");
                        return Err(conflict(message).with_hint(offline_pool_hint(&name, &error)));
                    }
                }
                let changed = change(control.clone(), record).await;
                control.record_pool_disks_now(&name).await;
                changed?;
                control.get_pool(&name).await
            })
            .await
    }

    async fn record_pool_disks_now(&self, name: &PoolName) {
        let reports = self.0.context.engine.pool_reports().await;
        if let (Some(report), Some((record, _))) = (reports.get(name), self.0.table.get(name))
            && let Err(error) = self.record_pool_disks(&record, report).await
        {
            tracing::warn!(pool = %name, %error, "cannot record the paths of the disks");
        }
    }

    /// Records the path of a disk before it is added to a pool.
    async fn record_expected_disk(&self, record: &PoolRecord, path: &Path) -> Result<(), ApiError> {
        let mut record = record.clone();
        record.disks.push(KnownDisk::new(path.to_owned()));
        self.write_pool_record(&record).await.map_err(|e| record_write_error(&record.name, &e))
    }

    /// Adds disks to a pool, one after the other.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Backing`] names the disk that is refused: those before
    /// it are added.
    pub async fn add_pool_disks(
        &self,
        name: PoolName,
        request: AddDisks,
    ) -> Result<Pool, ApiError> {
        let AddDisks { disks, spare, overwrite } = request;
        check_count(disks.len())?;
        check_paths(&disks)?;
        self.change_pool(name, move |control, record| async move {
            control.check_unused_paths(disks.clone()).await?;
            for path in disks {
                let record = control.0.table.get(&record.name).map_or(record.clone(), |(r, _)| r);
                control.record_expected_disk(&record, &path).await?;
                let disk = NewDisk { path, overwrite: overwrite.clone() };
                let added = control.0.context.engine.add_pool_disk(&record.name, disk, spare).await;
                added.map_err(|e| pool_error(&e))?;
            }
            Ok(())
        })
        .await
    }

    /// The pool's own name for a disk that the user named, possibly by another path.
    async fn pool_disk_argument(&self, record: &PoolRecord, named: String) -> String {
        let reports = self.0.context.engine.pool_reports().await;
        let disks = reports.get(&record.name).map(|r| r.disks.as_slice()).unwrap_or_default();
        let paths: Vec<_> = disks.iter().filter_map(|disk| disk.path.clone()).collect();
        let is_serial = disks.iter().any(|disk| disk.serial == named);
        if is_serial { named } else { resolve_disk_name(named, paths).await }
    }

    /// Starts to remove a disk from a pool, or cancels that.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; errors of the pool.
    pub async fn remove_pool_disk(
        &self,
        name: PoolName,
        request: RemoveDisk,
    ) -> Result<Pool, ApiError> {
        self.change_pool(name, move |control, record| async move {
            let RemoveDisk { disk, cancel } = request;
            let disk = control.pool_disk_argument(&record, disk).await;
            let engine = &control.0.context.engine;
            let removed = match cancel {
                true => engine.cancel_pool_disk_removal(&record.name, disk).await,
                false => engine.remove_pool_disk(&record.name, disk).await,
            };
            removed.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Starts to replace a disk by another one.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; errors of the pool.
    pub async fn replace_pool_disk(
        &self,
        name: PoolName,
        request: ReplaceDisk,
    ) -> Result<Pool, ApiError> {
        let ReplaceDisk { disk, with, overwrite } = request;
        check_paths([&with])?;
        self.change_pool(name, move |control, record| async move {
            control.check_unused_paths(vec![with.clone()]).await?;
            control.record_expected_disk(&record, &with).await?;
            let with = NewDisk { path: with, overwrite };
            let disk = control.pool_disk_argument(&record, disk).await;
            let replaced =
                control.0.context.engine.replace_pool_disk(&record.name, disk, with).await;
            replaced.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Starts to scrub a pool.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; errors of the pool.
    pub async fn scrub_pool(&self, name: PoolName) -> Result<Pool, ApiError> {
        self.change_pool(name, |control, record| async move {
            let started = control.0.context.engine.scrub_pool(&record.name).await;
            started.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Resets the error counters of a pool's disks.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; errors of the pool.
    pub async fn clear_pool_errors(
        &self,
        name: PoolName,
        request: ClearErrors,
    ) -> Result<Pool, ApiError> {
        self.change_pool(name, move |control, record| async move {
            let disk = match request.disk {
                Some(disk) => Some(control.pool_disk_argument(&record, disk).await),
                None => None,
            };
            let cleared = control.0.context.engine.clear_pool_errors(&record.name, disk).await;
            cleared.map_err(|e| pool_error(&e))
        })
        .await
    }

    /// Opens a pool without disks that are lost for good.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] without the pool's name; [`ErrorCode::Conflict`] if it is
    /// open; errors of the pool.
    pub async fn force_open_pool(
        &self,
        name: PoolName,
        request: OpenPoolRequest,
    ) -> Result<Pool, ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move { control.force_open_pool_now(&name, request).await })
            .await
    }

    /// Paths of a pool's disks: the last known ones if all exist, as other paths may be aliases.
    async fn pool_disk_paths(&self, record: &PoolRecord) -> Vec<PathBuf> {
        let paths = record.paths();
        let found = self.0.context.engine.count_pool_disks(record.id, paths.clone()).await;
        match found {
            Ok(found) if !paths.is_empty() && found >= paths.len() => paths,
            _ => candidate_paths(paths).await,
        }
    }

    async fn force_open_pool_now(
        &self,
        name: &PoolName,
        request: OpenPoolRequest,
    ) -> Result<Pool, ApiError> {
        let OpenPoolRequest { without, take_over, confirm } = request;
        if !(take_over && without.is_empty()) {
            check_count(without.len())?;
        }
        if confirm != *name {
            let message = format!("the confirmation names {confirm} instead of {name}");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message).with_hint(
                "confirm with the name of the pool: data that only those disks have is \
                    lost, and no other node may use the pool",
            ));
        }
        let lock = self.0.table.lock_of(name).ok_or_else(|| pool_not_found(name))?;
        let _held = lock.lock().await;
        let (record, observed) = self.0.table.get(name).ok_or_else(|| pool_not_found(name))?;
        if observed == PoolObserved::Open {
            return Err(conflict(format!("pool {name} is open")).with_hint(format!(
                "to replace a failed disk: windrose pool replace {name} SERIAL --with DISK"
            )));
        }
        tracing::warn!(pool = %name, ?without, take_over, "pool opened without some disks, or \
            taken over, by an operator");
        let paths = self.pool_disk_paths(&record).await;
        let without = resolve_missing_disks(without, &record, &paths).await;
        match self.0.context.engine.open_pool(&record, paths, (without, take_over)).await {
            Ok(report) => {
                self.on_pool_opened(&record, &report).await;
                self.get_pool(name).await
            }
            Err(error) => {
                self.0.table.observe(name, PoolObserved::OpenFailed(error.clone()));
                Err(pool_error(&error))
            }
        }
    }
}

fn check_count(count: usize) -> Result<(), ApiError> {
    if (1..=api::MAX_DISKS).contains(&count) {
        return Ok(());
    }
    let message = format!("{count} disks are given");
    Err(ApiError::new(ErrorCode::InvalidRequest, message).with_hint("give 1 to 128"))
}

fn pool_opening_error(name: &PoolName) -> ApiError {
    conflict(format!("pool {name} is being opened")).with_hint("try again in a moment")
}

fn pool_spec(request: &CreatePoolRequest) -> NewPool {
    let (level, columns) = raid_level(request);
    let disks = |paths: &[PathBuf]| {
        let disk =
            |path: &PathBuf| NewDisk { path: path.clone(), overwrite: request.overwrite.clone() };
        paths.iter().map(disk).collect()
    };
    let (strip_bytes, spares) = (request.chunk_bytes, disks(&request.spares));
    let checksums = request.checksums;
    NewPool { level, columns, strip_bytes, checksums, disks: disks(&request.disks), spares }
}

/// Resolves a disk that the user named by path: the one of `paths` that leads to the same file.
async fn resolve_disk_name(named: String, paths: Vec<PathBuf>) -> String {
    let typed = PathBuf::from(named.strip_prefix("path:").unwrap_or(&named));
    if typed.is_relative() || paths.contains(&typed) {
        return named;
    }
    let find = move || paths.into_iter().find(|path| is_same(path, &typed));
    let found = tokio::task::spawn_blocking(find).await.unwrap_or_default();
    found.map_or(named, |path| format!("path:{}", path.display()))
}

/// Resolves missing disks that the user named by path, or by serial number if they are gone.
async fn resolve_missing_disks(
    names: Vec<String>,
    record: &PoolRecord,
    paths: &[PathBuf],
) -> Vec<String> {
    let mut all = Vec::new();
    for named in names {
        let typed = PathBuf::from(named.strip_prefix("path:").unwrap_or(&named));
        let recorded = record.disks.iter().find(|disk| disk.path == typed);
        let serial = recorded.and_then(|disk| disk.serial.clone());
        // The path may hold another disk now.
        let is_there = move || std::fs::symlink_metadata(typed).is_ok();
        all.push(match serial {
            Some(serial) if !tokio::task::spawn_blocking(is_there).await.unwrap_or(true) => {
                format!("serial:{serial}")
            }
            _ => resolve_disk_name(named, paths.to_vec()).await,
        });
    }
    all
}

/// The differences between a pool and a creation request.
fn differences(pool: &PoolReport, request: &CreatePoolRequest) -> Vec<String> {
    let (level, columns) = raid_level(request);
    let paths = |is_spare: bool| {
        let is = move |d: &&engine::PoolDiskReport| (d.state == PoolDiskState::Spare) == is_spare;
        let known = pool.disks.iter().filter(is);
        known.filter_map(|d| d.path.clone()).collect::<Vec<PathBuf>>()
    };
    let same = |requested: &[PathBuf], known: &[PathBuf]| {
        requested.len() == known.len()
            && requested.iter().all(|a| known.iter().any(|k| is_same(a, k)))
    };
    let (data, spares) = (paths(false), paths(true));
    let list = |paths: &[PathBuf]| {
        let all: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    };
    let columns = columns.is_some_and(|columns| columns != pool.columns);
    let differences = [
        (level != pool.redundancy)
            .then(|| format!("level ({})", pool_status::level_text(pool.redundancy, pool.columns))),
        columns.then(|| format!("number of columns ({})", pool.columns)),
        (request.chunk_bytes != pool.strip_bytes)
            .then(|| format!("chunk size ({})", Size(pool.strip_bytes.into()))),
        (request.checksums != pool.has_checksums).then(|| {
            format!("choice of checksums ({})", if pool.has_checksums { "with" } else { "without" })
        }),
        (!same(&request.disks, &data)).then(|| format!("list of disks ({})", list(&data))),
        (!same(&request.spares, &spares)).then(|| format!("list of spares ({})", list(&spares))),
    ];
    differences.into_iter().flatten().collect()
}

/// Whether a volume has, or may have, an image on a node: a replica that is to be removed may be
/// the only one in sync until then.
fn has_image_on(record: &VolumeRecord, node: NodeId) -> bool {
    record.placement(node).is_some_and(|placement| placement.stage.has_image())
}

/// Why a path cannot be used beside the paths in use, if so.
fn in_use_reason(path: &Path, users: &[(PathBuf, String)]) -> Option<String> {
    let mut candidate = PathCheck::new(path);
    let (used, user) = users.iter().find(|(used, _)| candidate.shares_with(used))?;
    let shown = path.display();
    Some(match candidate.is_same_as(used) {
        true => format!("{shown} belongs to {user}"),
        false => {
            format!("{shown} shares its space with {}, which belongs to {user}", used.display())
        }
    })
}

/// Why a path cannot be used together with others, if so.
fn overlap_reason(path: &Path, others: &[PathBuf]) -> Option<String> {
    let mut candidate = PathCheck::new(path);
    let other = others.iter().find(|other| candidate.shares_with(other))?;
    Some(format!("{} shares its space with {}", path.display(), other.display()))
}

/// Whether two paths lead to one file, or one device.
fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path| std::fs::metadata(path).ok().map(|found| FileIdentity::of(&found));
    a == b || identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// The requested level, and the stripe width in disks if given.
fn raid_level(request: &CreatePoolRequest) -> (Redundancy, Option<u16>) {
    let copies = u16::from(request.mirror_copies());
    match request.raid {
        RaidLevel::Raid0 | RaidLevel::Raid10 => (Redundancy::Copies(copies), request.columns),
        RaidLevel::Raid1 => (Redundancy::Copies(copies), Some(copies)),
        RaidLevel::Raid5 => (Redundancy::Parity, request.columns),
        RaidLevel::Raid6 => (Redundancy::DoubleParity, request.columns),
    }
}

pub(super) fn conflict(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::Conflict, message)
}

/// Converts a pool error to an API error.
pub(super) fn pool_error(e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), e.to_string());
    match e.hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

/// Converts an error while writing a pool's record to an API error.
pub(super) fn record_write_error(name: &PoolName, error: &io::Error) -> ApiError {
    tracing::error!(pool = %name, %error, "cannot write a pool record");
    ApiError::new(ErrorCode::Internal, format!("pool {name}: cannot write its record: {error}"))
        .with_hint("see the node's log; the data directory may be full or read-only")
}

/// Fails for paths that depend on a working directory.
pub(super) fn check_paths<'a>(
    paths: impl IntoIterator<Item = &'a PathBuf>,
) -> Result<(), ApiError> {
    let odd = |p: &&PathBuf| p.is_relative() || p.as_os_str().as_encoded_bytes().contains(&0);
    paths.into_iter().find(odd).map_or(Ok(()), |path| {
        let message = format!("{} is not an absolute path", path.display());
        Err(ApiError::new(ErrorCode::InvalidRequest, message)
            .with_hint("give a path that begins with /"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use records::record::PlacementStage;

    #[test]
    fn a_copy_that_is_to_leave_has_its_file_until_it_is_gone() {
        let mut record = records::samples::record("web");
        let node = record.placements[0].node;
        let mut has_image = |stage| {
            record.placements[0].stage = stage;
            has_image_on(&record, node)
        };
        assert!(has_image(PlacementStage::Removing { replaced_by: Some(NodeId(9)) }));
        assert!(has_image(PlacementStage::Removing { replaced_by: None }));
        assert!(has_image(PlacementStage::Ready) && has_image(PlacementStage::Superseded));
        assert!(!has_image(PlacementStage::Creating { force: true }));
        assert!(!has_image(PlacementStage::Failed { reason: "full".to_owned() }));
        assert!(!has_image_on(&record, NodeId(9)));
    }

    #[test]
    fn a_level_is_what_was_asked_for() {
        let ask = |raid: u8, copies, columns| {
            let json = format!(r#"{{"name":"p","raid":{raid},"disks":[]}}"#);
            let ask: CreatePoolRequest = serde_json::from_str(&json).unwrap();
            raid_level(&CreatePoolRequest { copies, columns, ..ask })
        };
        assert_eq!(ask(0, None, None), (Redundancy::Copies(1), None));
        assert_eq!(ask(1, None, None), (Redundancy::Copies(2), Some(2)));
        assert_eq!(ask(1, Some(3), None), (Redundancy::Copies(3), Some(3)));
        assert_eq!(ask(10, Some(3), Some(6)), (Redundancy::Copies(3), Some(6)));
        assert_eq!(ask(5, None, Some(4)), (Redundancy::Parity, Some(4)));
        assert_eq!(ask(6, None, None), (Redundancy::DoubleParity, None));
    }
}
