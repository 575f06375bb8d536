//! Finds the disks of a pool, reads their metadata, and chooses the version to continue from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use disk::{ClaimError, ClaimRequest};
use futures_util::future::join_all;
use pool_metadata::quorum::{self, DamagedDisk, MemberMetadata, diverges_from_commit};
use pool_metadata::{MemberId, MemberSet, Metadata, PoolMemberState, VersionId};
use rt::Core;
use rt::disk::{Disk, OpenOptions, OpenReason};
use tokio::time::timeout;
use uuid::Uuid;
use wire::ShortText;

use super::Mistake;
use super::disk_claims::{
    acquire_all, acquire_with_timeout, check_unclaimed_or_taken_over, claim_error_text, release_all,
};
use super::disk_name::{self, DiskNames, disk_argument, matches_serial_or_path};
use super::error::PoolError;
use super::member_disk::{
    ClaimSettings, DISK_TIMEOUT, LONG_DISK_TIMEOUT, LoadError, MemberDisk, read_label,
};
use super::member_label::{LabelState, MemberLabel};

/// What the label of a disk says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInspection {
    /// The pool's identity.
    pub pool_id: Uuid,
    /// The pool's name.
    pub name: String,
    /// The member's number.
    pub member: u16,
    /// The serial number of the disk that the label was written to.
    pub serial: String,
    /// How many cores may use the pool.
    pub max_cores: u16,
}

/// The pool and member in the label of the disk at `path`; `None` if it is no member of a pool.
///
/// # Errors
/// It cannot be read, or not within a minute, or its label cannot be used.
pub async fn inspect(
    core: &Core,
    path: &Path,
    buffered: bool,
) -> Result<Option<DiskInspection>, PoolError> {
    let options = OpenOptions::new().buffered(buffered).read_only(true);
    let label = async {
        let disk = core.open_disk(path, options).await?;
        read_pool_label(core, &disk).await
    };
    // The same limit as for opening: an unresponsive disk stays in use until it answers.
    Ok(with_response_timeout(path, label).await?.map(|label| DiskInspection {
        pool_id: label.pool_id,
        name: label.pool_name.to_string(),
        member: label.member_id.0,
        serial: label.serial.to_string(),
        max_cores: label.log_rings,
    }))
}

/// The outcome of `work` at the disk at `path`, or an error if the disk does not answer within a
/// minute.
pub(super) async fn with_response_timeout<T>(
    path: &Path,
    work: impl Future<Output = Result<T, PoolError>>,
) -> Result<T, PoolError> {
    let silent =
        |_| Err(PoolError::on_disk(path, "it does not respond: check its cable and power"));
    timeout(LONG_DISK_TIMEOUT, work).await.unwrap_or_else(silent)
}

/// The label of a disk that is a member of a pool; `None` if it is not.
async fn read_pool_label(core: &Core, disk: &Disk) -> Result<Option<MemberLabel>, PoolError> {
    let path = disk.path();
    let found = read_label(disk, &core.buffer_pool().account()).await;
    let label = found.map_err(|why| PoolError::on_disk(path, why))?;
    let label = label.map_err(|why| PoolError::on_disk(path, format!("holds {why}")))?;
    Ok(label.filter(|label| label.state != LabelState::Removed))
}

/// What was found at a path.
#[derive(Debug)]
pub(super) enum PathContents {
    /// A member of a pool.
    Member { pool: Uuid, member: Uuid },
    /// A disk that is in use.
    Busy,
    /// Neither, or nothing.
    Nothing,
}

/// Looks at what is at `path` now; a disk that takes longer than ten seconds counts as nothing.
pub(super) async fn probe_path(core: &Core, path: &Path, buffered: bool) -> PathContents {
    timeout(DISK_TIMEOUT, read_path_contents(core, path, buffered))
        .await
        .unwrap_or(PathContents::Nothing)
}

async fn read_path_contents(core: &Core, path: &Path, buffered: bool) -> PathContents {
    let options = OpenOptions::new().buffered(buffered).read_only(true);
    let disk = match core.open_disk(path, options).await {
        Ok(disk) => disk,
        Err(why) if why.reason == OpenReason::Busy => return PathContents::Busy,
        Err(_) => return PathContents::Nothing,
    };
    match read_pool_label(core, &disk).await {
        Ok(Some(label)) => PathContents::Member { pool: label.pool_id, member: label.member_uuid },
        Ok(None) | Err(_) => PathContents::Nothing,
    }
}

/// The disk at `path`, if it is a member of the pool.
///
/// # Errors
/// Why a disk that may be a member is not used, as text.
async fn open_member_disk(
    core: &Core,
    pool: Uuid,
    path: &Path,
    buffered: bool,
) -> Result<Option<MemberDisk>, String> {
    let problem = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let options = OpenOptions::new().buffered(buffered);
    let disk = core.open_disk(path, options).await.map_err(|why| why.to_string())?;
    let memory = core.buffer_pool().account();
    let label = read_label(&disk, &memory).await.map_err(|why| problem(&why))?;
    let label = match label.map_err(|why| problem(&why))? {
        Some(label) if label.pool_id != pool => return Ok(None),
        Some(label) if label.state == LabelState::Removed => {
            return Err(problem(&"was removed from the pool"));
        }
        Some(label) => label,
        None => return Ok(None),
    };
    let (size, used_bytes, serial) = (disk.info().size, label.layout.used_bytes, label.serial);
    if size < used_bytes {
        return Err(problem(&format!(
            "disk {serial} has shrunk from {used_bytes} to {size} bytes: it is not used"
        )));
    }
    Ok(Some(MemberDisk::new(disk, memory, label)))
}

/// A disk of the pool, and its metadata.
#[derive(Debug)]
struct FoundDisk {
    disk: Rc<MemberDisk>,
    metadata: Option<Metadata>,
}

impl FoundDisk {
    /// The last version that it proves to be committed, by its metadata, or by its label if that is
    /// damaged.
    fn proven_commit(&self) -> Option<VersionId> {
        let label = self.disk.label();
        match &self.metadata {
            Some(known) => known.last_committed(),
            None => Some(label.term_start).filter(|_| label.state == LabelState::Ready),
        }
    }

    /// What its label proves if its metadata is damaged.
    fn damaged_disk(&self) -> Option<DamagedDisk> {
        let label = self.disk.label();
        let committed = self.proven_commit().filter(|_| self.metadata.is_none())?;
        let MemberLabel { member_id: member, member_uuid: uuid, serial, .. } = label;
        Some(DamagedDisk { member, uuid, serial, committed })
    }
}

/// The disks of a pool that were found.
#[derive(Debug, Default)]
pub(super) struct DiscoveredDisks {
    found: Vec<FoundDisk>,
    /// Problems of other disks, one line each.
    problems: Vec<String>,
}

/// The state that a pool continues from.
#[derive(Debug)]
pub(super) struct RecoveredPool {
    pub(super) metadata: Metadata,
    /// Supporters: they hold this version or an ancestor.
    pub(super) supporters: BTreeMap<MemberId, Rc<MemberDisk>>,
    /// Supporters that do not hold this version yet.
    pub(super) lagging: Vec<MemberId>,
    /// Members to be reattached: resynced in their stale regions and the writes in flight at their
    /// log generation, or fully.
    pub(super) returning: Vec<ReturningMember>,
    pub(super) declared_lost: MemberSet,
    pub(super) is_forced: bool,
}

impl DiscoveredDisks {
    /// Looks for the disks of `pool` at these paths, claims them, and reads their metadata.
    /// Anything else there is skipped.
    ///
    /// # Errors
    /// Which disks another machine has claimed, except those in `without`.
    pub(super) async fn discover(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        (buffered, without): (bool, &[String]),
        claim_settings: &ClaimSettings,
    ) -> Result<Self, PoolError> {
        let (all, disks) = Self::open_all(core, pool, paths, buffered).await;
        let is_declared_lost = |disk: &MemberDisk| {
            let (serial, path) = (disk.label().serial, disk.path());
            without.iter().any(|name| serial.as_str() == name || path == Path::new(name))
        };
        let (lost, disks): (Vec<_>, Vec<_>) = disks.into_iter().partition(is_declared_lost);
        let each: Vec<_> = disks.iter().collect();
        let claims = acquire_all(core, &each, claim_settings).await?;
        Ok(all.with_metadata(lost, disks, claims).await)
    }

    /// The same for detached disks: those that another machine has claimed are left alone.
    async fn discover_detached(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        buffered: bool,
        claim_settings: &ClaimSettings,
    ) -> Self {
        let (all, disks) = Self::open_all(core, pool, paths, buffered).await;
        let claims =
            join_all(disks.iter().map(|disk| acquire_with_timeout(core, disk, claim_settings)))
                .await;
        let claims = claims.into_iter().map(Result::err).collect();
        all.with_metadata(Vec::new(), disks, claims).await
    }

    /// Adds all disks that could be claimed, and those declared lost, each with its metadata.
    async fn with_metadata(
        mut self,
        lost: Vec<MemberDisk>,
        disks: Vec<MemberDisk>,
        claims: Vec<Option<ClaimError>>,
    ) -> Self {
        let mut present = lost;
        for (disk, claim_error) in disks.into_iter().zip(claims) {
            match claim_error {
                None => present.push(disk),
                Some(why) => self.problems.push(claim_error_text(&disk.label(), disk.path(), &why)),
            }
        }
        let known =
            join_all(present.iter().map(|disk| timeout(LONG_DISK_TIMEOUT, disk.load_metadata())))
                .await;
        for (disk, known) in present.into_iter().zip(known) {
            match known {
                Ok(known) => self.add(disk, known),
                Err(_) => self.add_problem(disk.path(), "it does not respond"),
            }
        }
        self
    }

    /// Releases the claims of all disks: the pool is not opened.
    pub(super) async fn release_claims(&self) {
        release_all(self.found.iter().map(|found| Rc::clone(&found.disk))).await;
    }

    async fn open_all(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        buffered: bool,
    ) -> (Self, Vec<MemberDisk>) {
        let (mut all, mut unique_paths) = (Self::default(), Vec::new());
        for path in paths {
            if !unique_paths.contains(&path) {
                unique_paths.push(path);
            }
        }
        // All at once, so that unresponsive disks delay this once and not one after the other.
        let probes = unique_paths.into_iter().map(|path| async move {
            let found =
                timeout(LONG_DISK_TIMEOUT, open_member_disk(core, pool, path, buffered)).await;
            found.unwrap_or_else(|_| Err(format!("{}: it does not respond", path.display())))
        });
        let mut disks = Vec::new();
        for found in join_all(probes).await {
            match found {
                Ok(Some(disk)) => disks.push(disk),
                Ok(None) => {}
                Err(problem) => all.problems.push(problem),
            }
        }
        all.reject_duplicates(&mut disks);
        (all, disks)
    }

    fn add_problem(&mut self, path: &Path, what: impl std::fmt::Display) {
        self.problems.push(format!("{}: {what}", path.display()));
    }

    fn add(&mut self, disk: MemberDisk, known: Result<Metadata, LoadError>) {
        // It can be rewritten from the other disks.
        if let Err(why) = &known {
            self.add_problem(disk.path(), format!("disk {}: {why}", disk.label().serial));
        }
        self.found.push(FoundDisk { disk: Rc::new(disk), metadata: known.ok() });
    }

    /// Two disks with the same identity are a disk and its copy, and nothing tells which is which.
    fn reject_duplicates(&mut self, disks: &mut Vec<MemberDisk>) {
        let uuids: Vec<Uuid> = disks.iter().map(|disk| disk.label().member_uuid).collect();
        let is_duplicate = |uuid: Uuid| uuids.iter().filter(|u| **u == uuid).count() > 1;
        let duplicates: Vec<_> =
            disks.extract_if(.., |disk| is_duplicate(disk.label().member_uuid)).collect();
        for disk in duplicates {
            let member = disk.label().member_uuid;
            let what = format!("there is another disk with its identity {member}: neither is used");
            self.add_problem(disk.path(), what);
        }
    }

    /// `what`, with the problems of other disks, for messages.
    fn with_problems(&self, what: impl std::fmt::Display) -> String {
        let mut message = what.to_string();
        self.problems.iter().for_each(|note| message.push_str(&format!("\n  {note}")));
        message
    }

    /// The member identities that the operator means by serial numbers, paths, member numbers or
    /// the identities themselves.
    fn resolve_names(&self, names: &[String]) -> Result<Vec<Uuid>, PoolError> {
        let known = || self.found.iter().filter_map(|found| found.metadata.as_ref());
        let labels: Vec<_> = self.found.iter().map(|f| (f.disk.label(), f.disk.path())).collect();
        let path_of =
            |uuid| labels.iter().find(|(l, _)| l.member_uuid == uuid).map(|(_, path)| *path);
        let mut all: Vec<DiskNames<'_, Uuid>> = Vec::new();
        let is_new = |all: &[DiskNames<'_, Uuid>], uuid| all.iter().all(|known| known.key != uuid);
        // Disks of a diverged history count as well: one of them may be the wrong one.
        for (id, m) in known().flat_map(Metadata::members) {
            if is_new(&all, m.uuid) {
                all.push(disk_name::disk_names(m.uuid, id, m, path_of(m.uuid)));
            }
        }
        // Damaged disks have no metadata.
        for (label, path) in &labels {
            let (key, number, serial) =
                (label.member_uuid, label.member_id.0, label.serial.as_str());
            if is_new(&all, key) {
                all.push(DiskNames { key, number, serial, path: Some(path), uuid: key });
            }
        }
        names.iter().map(|name| disk_name::resolve_disk_name(name, &all)).collect()
    }

    /// Chooses the version that the pool continues from, and sorts the disks by it.
    pub(super) fn recover_state(
        &self,
        without: &[String],
        mistake: Mistake,
    ) -> Result<RecoveredPool, PoolError> {
        for note in &self.problems {
            tracing::warn!("{note}");
        }
        let without = self.resolve_names(without)?;
        let known: Vec<MemberMetadata<'_>> = (self.found.iter())
            .filter_map(|found| {
                let (label, metadata) = (found.disk.label(), found.metadata.as_ref()?);
                let number =
                    metadata.find_member(label.member_uuid).map_or(label.member_id, |(id, _)| id);
                Some(MemberMetadata { member: number, uuid: label.member_uuid, metadata })
            })
            .collect();
        let damaged: Vec<DamagedDisk> =
            self.found.iter().filter_map(FoundDisk::damaged_disk).collect();
        let mistake = mistake.in_quorum_rules();
        let recovered = quorum::recover_with_mistake(mistake, &known, &damaged, &without);
        let recovered = recovered.map_err(|why| PoolError::new(self.with_problems(why)))?;
        let metadata = recovered.metadata.clone();
        let mut pool = RecoveredPool {
            supporters: BTreeMap::new(),
            lagging: Vec::new(),
            returning: Vec::new(),
            declared_lost: recovered.declared_lost,
            is_forced: recovered.is_forced,
            metadata,
        };
        for found in &self.found {
            pool.add_found(found, recovered.supporters);
        }
        pool.check_data_loss(self, &without)?;
        Ok(pool)
    }
}

/// Whether a disk that holds `version_id` had everything up to version `min_version` of this
/// history.
fn includes_version(metadata: &Metadata, version_id: VersionId, min_version: u64) -> bool {
    metadata.descends_from(version_id) && version_id.version >= min_version
}

/// The last log generation that a detached member knew, if it misses no more than its stale regions
/// and the writes in flight then; `min_version` is the version that it must have, and `known` its
/// metadata.
fn log_generation_if_resumable(
    pool: &Metadata,
    min_version: u64,
    state: LabelState,
    known: Option<&Metadata>,
) -> Option<u64> {
    // A member that was being resynced holds newer metadata than data.
    let known = known.filter(|known| {
        state == LabelState::Ready && includes_version(pool, known.version_id(), min_version)
    })?;
    Some(known.log_generation())
}

/// A detached member that was found again; without a log generation it must be resynced fully.
#[derive(Debug)]
pub(super) struct ReturningMember {
    pub(super) id: MemberId,
    pub(super) disk: Rc<MemberDisk>,
    pub(super) log_generation: Option<u64>,
}

/// A disk that proves a commit which the pool does not know of: the pool was opened from older
/// disks without it.
#[derive(Debug)]
pub(super) struct NewerDisk {
    pub(super) id: MemberId,
    pub(super) path: PathBuf,
    pub(super) serial: ShortText,
    pub(super) committed: VersionId,
}

/// Detached members of `pool` at these paths: those that may be reattached, and those that must not
/// be overwritten.
pub(super) async fn find_detached(
    core: &Core,
    pool: &Metadata,
    paths: &[PathBuf],
    buffered: bool,
    claim_settings: &ClaimSettings,
) -> (Vec<ReturningMember>, Vec<NewerDisk>) {
    let disks =
        DiscoveredDisks::discover_detached(core, pool.pool_id, paths, buffered, claim_settings)
            .await;
    let (mut absent, mut newer) = (Vec::new(), Vec::new());
    for found in &disks.found {
        let label = found.disk.label();
        let Some((id, member)) = pool.find_member(label.member_uuid) else { continue };
        let PoolMemberState::Detached { min_version, .. } = member.state else { continue };
        match found.proven_commit().filter(|committed| diverges_from_commit(pool, *committed)) {
            Some(committed) => {
                let path = found.disk.path().to_owned();
                newer.push(NewerDisk { id, path, serial: label.serial, committed });
            }
            None => {
                let log_generation = log_generation_if_resumable(
                    pool,
                    min_version,
                    label.state,
                    found.metadata.as_ref(),
                );
                absent.push(ReturningMember { id, disk: Rc::clone(&found.disk), log_generation });
            }
        }
    }
    (absent, newer)
}

/// Logs that a disk was rolled back, if its version is older than the one it must have had.
fn log_rollback(
    pool: &Metadata,
    disk: &MemberDisk,
    version_id: Option<VersionId>,
    min_version: u64,
) {
    let Some(version_id) = version_id.filter(|version_id| version_id.version < min_version) else {
        return;
    };
    let (path, serial) = (disk.path().display(), disk.label().serial);
    tracing::error!(
        pool = %pool.name, %path, %serial, version = version_id.version, had = min_version,
        "a disk of the pool was rolled back (a snapshot or backup of it was restored?): rebuilding all of it"
    );
}

impl RecoveredPool {
    fn add_found(&mut self, found: &FoundDisk, supporters: MemberSet) {
        let (disk, label) = (Rc::clone(&found.disk), found.disk.label());
        let Some((id, member)) = self.metadata.find_member(label.member_uuid) else {
            tracing::warn!(path = %disk.path().display(), "it is no longer a disk of the pool");
            return;
        };
        let version_id = found.metadata.as_ref().map(Metadata::version_id);
        if self.declared_lost.contains(id) {
            return;
        }
        match member.state {
            PoolMemberState::Detached { min_version, .. } => {
                let log_generation = log_generation_if_resumable(
                    &self.metadata,
                    min_version,
                    label.state,
                    found.metadata.as_ref(),
                );
                if version_id.is_some_and(|id| id.version < min_version) {
                    log_rollback(&self.metadata, &disk, version_id, min_version);
                }
                self.returning.push(ReturningMember { id, disk, log_generation });
            }
            _ if supporters.contains(id) => {
                if version_id != Some(self.metadata.version_id()) {
                    self.lagging.push(id);
                }
                self.supporters.insert(id, disk);
            }
            // It was rolled back, has diverged or is damaged: this term begins without it, and it
            // is reattached with a full resync. Its stale regions only say what was written since
            // it was detached, not what it has lost.
            _ => {
                log_rollback(&self.metadata, &disk, version_id, self.metadata.committed_version());
                self.returning.push(ReturningMember { id, disk, log_generation: None });
            }
        }
    }

    /// Writes this version to all supporters. One that fails to write it supports nothing.
    pub(super) async fn with_supporters_updated(mut self) -> Self {
        let (bytes, version) =
            (self.metadata.encode_snapshot(), self.metadata.version_id().version);
        for id in std::mem::take(&mut self.lagging) {
            let Some(disk) = self.supporters.get(&id) else { continue };
            if let Err(why) = disk.write_snapshot(&bytes, version).await {
                tracing::error!(path = %disk.path().display(), error = %why, "a disk of the pool is detached");
                self.supporters.remove(&id);
            }
        }
        self
    }

    /// Voters that are missing: this term begins without them.
    pub(super) fn missing_voters(&self) -> Vec<MemberId> {
        let voters = self.metadata.voters();
        voters.iter().filter(|id| !self.supporters.contains_key(id)).collect()
    }

    /// Refuses to open the pool if data would be lost, unless the operator has declared those disks
    /// lost.
    fn check_data_loss(&self, disks: &DiscoveredDisks, without: &[Uuid]) -> Result<(), PoolError> {
        let present: MemberSet = self.supporters.keys().copied().collect();
        let lost: Vec<_> = self.metadata.lost_volumes(present).collect();
        let undeclared = self.metadata.members().filter(|(id, m)| {
            !present.contains(*id) && m.allocated_count() > 0 && !without.contains(&m.uuid)
        });
        let undeclared: Vec<String> =
            undeclared.map(|(id, m)| format!("{} ({})", m.serial, id.0)).collect();
        if lost.is_empty() || undeclared.is_empty() {
            for volume in lost.iter().filter_map(|id| self.metadata.volume(*id)) {
                tracing::error!(volume = %volume.uuid, "blocks of the volume are lost");
            }
            return Ok(());
        }
        let volumes = lost.iter().filter_map(|id| self.metadata.volume(*id));
        let volumes: Vec<String> = volumes.map(|volume| volume.uuid.to_string()).collect();
        let what = format!(
            "blocks of volumes {} would be lost: disks {} are missing",
            volumes.join(", "),
            undeclared.join(", ")
        );
        Err(PoolError::new(disks.with_problems(what)).with_hint(
            "reconnect the disks; if they are gone for good: windrose pool open NAME --without DISK",
        ))
    }
}

/// A disk that is to become a member: a block device, or an existing file of the wanted size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Where it is.
    pub path: PathBuf,
    /// Identities of disks that may be overwritten, as the operator typed them: serial numbers, or
    /// paths of disks without one.
    pub overwrite: Vec<String>,
}

/// Opens a disk that is to become a member, if it is empty or may be overwritten. It must answer
/// within a minute.
pub(super) async fn open_new(
    core: &Core,
    new: &NewDisk,
    buffered: bool,
    claim: Option<ClaimRequest>,
) -> Result<Disk, PoolError> {
    with_response_timeout(&new.path, open_if_unused(core, new, buffered, claim)).await
}

async fn open_if_unused(
    core: &Core,
    new: &NewDisk,
    buffered: bool,
    claim: Option<ClaimRequest>,
) -> Result<Disk, PoolError> {
    let disk = core.open_disk(&new.path, OpenOptions::new().buffered(buffered)).await?;
    let (path, serial) = (new.path.display().to_string(), disk.serial().to_owned());
    let overwrites = matches_serial_or_path(&new.overwrite, &serial, &path);
    check_unclaimed_or_taken_over(core, &disk, claim, overwrites).await?;
    if overwrites {
        return Ok(disk);
    }
    let identity = disk_argument(if serial.is_empty() { &path } else { &serial });
    let memory = core.buffer_pool().account();
    let label =
        read_label(&disk, &memory).await.map_err(|why| PoolError::on_disk(&new.path, why))?;
    let holds = match label {
        Ok(None) => disk::check_unused(&disk, &memory).await.err().map(|why| why.to_string()),
        // What the pool left on it may be overwritten; what was put there since may not.
        Ok(Some(MemberLabel { state: LabelState::Removed, .. })) => {
            let known = disk::other_known_formats(&disk, &memory, disk::POOL_DISK).await;
            known.unwrap_or_else(Some).map(|why| why.to_string())
        }
        Ok(Some(label)) => Some(format!("belongs to pool {} ({})", label.pool_name, label.pool_id)),
        Err(why) => Some(format!("holds {why}")),
    };
    match holds {
        None => Ok(disk),
        Some(what) => {
            let what = what.trim_end_matches("; --force overwrites it");
            let message = format!("{path}: {what}; --overwrite {identity} overwrites it");
            Err(PoolError::new(message))
        }
    }
}
