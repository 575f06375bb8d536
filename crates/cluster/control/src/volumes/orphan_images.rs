//! Orphaned images, which no record names: finding, adopting and erasing them (RFD 0036).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Duration;

use api::{
    AdoptImageRequest, AdoptedImage, ApiError, Backing, DiscardImageRequest, ErrorCode,
    OrphanedImage, OrphanedImages, PlannedVolume, Severity, VolumeName,
};
use block::Epoch;
use cluster::identity::Role;
use cluster::mirror_records;
use mirror::config::{ConfigReplica, MirrorConfig};
use mirror::membership::NotServingReason;
use mirror::recovery;
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;
use wire::plural;

use super::{VolumeControl, reconciler};
use crate::context::now_s;
use crate::errors::store_error;
use engine::{BackingError, ImageLocation, ReportScope, ScannedIntentLog, VolumeReport};
use records::pool_records;
use records::reconcile::Observed;
use records::record::image_description::ImageDescription;
use records::record::{
    LunMapping, MAX_REPLICAS_WANTED, PlacementStage, ReplicaPlacement, VolumeRecord, VolumeStage,
};
use status::orphan_images::{
    OrphanContext, UnservedImage, name_unknown_error, old_image_age, orphan_finding, orphan_hint,
    rename_hint,
};
use status::recovery_choice::{
    Ambiguity, RecoveryChoice, ReplicaImage, choose_source, plan_volume, volume_name_of,
};
use status::{finding, old_images};

/// How often the node scans for orphaned images.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);

/// How long to wait for another node to report its images.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// How often that wait checks.
const ANSWER_POLL: Duration = Duration::from_millis(100);

/// Findings about single images; the rest is only counted.
const MAX_FINDINGS: usize = 20;

/// Most bytes of a node's report that describe images.
const MAX_REPORTED_BYTES: usize = 512 << 10;

/// The result of the last scan.
#[derive(Debug, Default)]
pub(super) struct UnservedImages {
    images: Vec<UnservedImage>,
}

/// A place that no record names, not scanned yet; whether it is a block device.
type UnreferencedLocation = (ImageLocation, bool);

impl VolumeControl {
    /// Scans for orphaned images, for as long as the node runs.
    pub(crate) async fn watch_images(self) {
        loop {
            self.scan_images(false).await;
            tokio::time::sleep(SCAN_INTERVAL).await;
        }
    }

    /// The images on this node that are not served: orphaned ones, and those of volumes that failed
    /// to open. Block devices, which other programs may use, are scanned only if `thorough`, for an
    /// administrator; the result is remembered.
    pub(crate) async fn scan_images(&self, thorough: bool) -> Vec<UnservedImage> {
        if !self.is_serving() || !self.is_data_node() {
            return Vec::new();
        }
        let mut unserved = Vec::new();
        for (location, device) in self.unreferenced_locations(thorough).await {
            if let Ok(found) = self.0.context.engine.scan_image(&location).await {
                unserved.push(UnservedImage {
                    location,
                    is_device: device,
                    is_referenced: false,
                    scan: found,
                });
            }
        }
        unserved.extend(self.refused_images().await);
        let used: BTreeSet<_> =
            self.0.pools.used_paths().into_iter().map(ImageLocation::Path).collect();
        let mut images = self.0.unserved_images.lock().unwrap_or_else(PoisonError::into_inner);
        if !thorough {
            let known =
                |h: &&UnservedImage| h.is_device && !h.is_referenced && !used.contains(&h.location);
            unserved.extend(images.images.iter().filter(known).cloned());
        }
        images.images.clone_from(&unserved);
        unserved
    }

    /// The images in this node's report: as many as fit.
    pub(crate) fn reported_images(&self) -> Vec<UnservedImage> {
        let (mut images, mut room) = (self.unserved_images(), MAX_REPORTED_BYTES);
        images.retain(|image| {
            let bytes = serde_json::to_vec(image).map_or(usize::MAX, |text| text.len());
            let fits = bytes <= room;
            room = room.saturating_sub(bytes);
            fits
        });
        images
    }

    /// The plan entry for an image that is not adopted.
    pub(super) fn not_adopted_plan(&self, image: &UnservedImage, why: &ApiError) -> PlannedVolume {
        let replicas = [self.local_replica_image(image)];
        let plan = plan_volume(&replicas, &Err(Ambiguity::NeverInSync(Vec::new())));
        let hint = why.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
        PlannedVolume { ambiguity: Some(format!("{}{hint}", why.message)), ..plan }
    }

    /// The result of the last scan.
    pub(super) fn unserved_images(&self) -> Vec<UnservedImage> {
        self.0.unserved_images.lock().unwrap_or_else(PoisonError::into_inner).images.clone()
    }

    /// Places that may hold an image and that no record names.
    async fn unreferenced_locations(&self, devices: bool) -> Vec<UnreferencedLocation> {
        let directory = self.0.context.settings.data_dir.join("volumes");
        // List files before reading the records: a volume created meanwhile is in the records.
        let found = tokio::task::spawn_blocking(move || image_paths(directory, devices)).await;
        let found = found.unwrap_or_default();
        let reports = self.0.context.engine.pool_reports().await;
        let used = self.0.pools.used_paths();
        let unlisted = tokio::task::spawn_blocking(move || filter_unused(found, &used)).await;
        let mut unlisted = unlisted.unwrap_or_default();
        for (pool, report) in reports {
            let listed: BTreeSet<_> =
                self.0.pools.volumes_in_pool(&pool).into_iter().map(|(id, _)| id).collect();
            let within = report.volumes.iter().map(|v| v.id).filter(|id| !listed.contains(id));
            unlisted.extend(within.map(|id| (ImageLocation::InPool(pool.clone(), id), false)));
        }
        unlisted
    }

    /// Images that records name and that failed to open here.
    async fn refused_images(&self) -> Vec<UnservedImage> {
        let cores = self.0.context.engine.report(ReportScope::All).await;
        let is_refused = |v: &&VolumeReport| {
            v.mirror
                .as_ref()
                .is_some_and(|m| matches!(m.status.not_serving, Some(NotServingReason::Refused(_))))
        };
        let reports = cores.iter().flat_map(|c| &c.volumes);
        let refused: BTreeSet<Uuid> = reports.filter(is_refused).map(|v| v.id).collect();
        let mut unserved = Vec::new();
        for (stored, observed) in self.0.context.volumes.all() {
            let record = &stored.record;
            let Some(placement) =
                record.placement(self.this_node()).filter(|p| p.stage.should_be_open())
            else {
                continue;
            };
            let at = match &placement.backing {
                Backing::File { path } | Backing::Device { path } => {
                    ImageLocation::Path(path.clone())
                }
                Backing::Pool { pool } => ImageLocation::InPool(pool.clone(), record.id),
            };
            let found = match observed {
                Observed::Open { .. } if refused.contains(&record.id) => {
                    self.0.context.engine.scan_open_image(record.id).await
                }
                Observed::Open { .. } | Observed::Erased | Observed::EraseFailed { .. } => continue,
                Observed::Closed if !self.is_mirror_record_lost(record) => continue,
                Observed::Closed | Observed::OpenFailed { .. } => {
                    let lock = self.0.context.volumes.lock_of(record.id);
                    let _held = lock.lock().await;
                    self.0.context.engine.scan_image(&at).await
                }
            };
            if let Ok(found) = found {
                let device = matches!(placement.backing, Backing::Device { .. });
                unserved.push(UnservedImage {
                    location: at,
                    is_device: device,
                    is_referenced: true,
                    scan: found,
                });
            }
        }
        unserved
    }

    /// Whether the mirror record of a volume is lost: its replicas are not opened.
    fn is_mirror_record_lost(&self, record: &VolumeRecord) -> bool {
        let alone = record.placements.len() == 1;
        self.joined_cluster().is_some()
            && !alone
            && self.0.context.volumes.mirror(record.id).is_none()
    }

    /// Lists orphaned images.
    ///
    /// # Errors
    /// [`ErrorCode::Unavailable`] before the node knows its records.
    pub async fn list_orphans(&self) -> Result<OrphanedImages, ApiError> {
        if !self.is_serving() {
            let message =
                "the node has not read its records yet, and cannot tell which images are unused";
            let hint = "try again when it serves (`windrose status` shows what it waits for)";
            return Err(ApiError::new(ErrorCode::Unavailable, message).with_hint(hint));
        }
        let unserved = self.scan_images(true).await;
        let orphans = unserved.iter().filter(|h| !h.is_referenced).map(|h| self.orphan_info(h));
        Ok(OrphanedImages { images: orphans.collect() })
    }

    fn orphan_info(&self, image: &UnservedImage) -> OrphanedImage {
        let found = &image.scan;
        let listed = self.0.context.volumes.get(found.volume).map(|(stored, _)| stored.record);
        let replica = self.local_replica_image(image);
        let name = volume_name_of(&replica);
        let own = self
            .0
            .context
            .cluster_membership
            .as_ref()
            .map(|membership| membership.identity().cluster);
        let of = found.description.as_ref().and_then(|d| d.cluster);
        let orphan = OrphanedImage {
            image: image.location.to_string(),
            volume: found.volume,
            size_bytes: found.size_bytes,
            existing_volume: listed.as_ref().map(|record| record.name.clone()),
            epoch: replica.to_api().epoch,
            problem: match &found.log {
                ScannedIntentLog::Unreadable(why) => Some(why.clone()),
                ScannedIntentLog::Absent | ScannedIntentLog::Present { .. } => {
                    found.description_error.clone()
                }
            },
            hint: String::new(),
            name,
        };
        let context = match &listed {
            Some(record) => OrphanContext::VolumeExists {
                may_be_added: own.is_some() && record.placement(self.this_node()).is_none(),
                at: old_images::backing_flags(&image.location.backing(image.is_device)),
                node: self.0.context.settings.name.clone(),
            },
            None => OrphanContext::NoVolume {
                foreign_cluster: of.filter(|of| own != Some(*of)).map(|_| own.is_some()),
                doubt: choose_source(std::slice::from_ref(&replica), &[]).err(),
                is_name_free: orphan
                    .name
                    .as_ref()
                    .is_some_and(|n| self.0.context.volumes.id_by_name(n).is_none()),
            },
        };
        OrphanedImage { hint: orphan_hint(&orphan, &context), ..orphan }
    }

    /// Whether a record names an image as the volume's replica here.
    fn is_referenced(&self, image: &UnservedImage) -> bool {
        let Some((stored, _)) = self.0.context.volumes.get(image.scan.volume) else { return false };
        let Some(placement) = stored.record.placement(self.this_node()) else { return false };
        match &image.location {
            ImageLocation::Path(path) => placement.backing.path() == Some(path.as_path()),
            ImageLocation::InPool(pool, _) => placement.backing.pool() == Some(pool),
        }
    }

    fn local_replica_image(&self, image: &UnservedImage) -> ReplicaImage {
        self.replica_image(self.this_node(), image)
    }

    fn replica_image(&self, node: NodeId, image: &UnservedImage) -> ReplicaImage {
        ReplicaImage {
            node,
            node_name: self.node_name(node),
            location: image.location.clone(),
            is_device: image.is_device,
            scan: image.scan.clone(),
        }
    }

    /// Findings about orphaned images.
    pub(crate) fn image_findings(&self) -> Vec<api::Finding> {
        let unserved = self.unserved_images();
        // It may have been adopted since the scan.
        let is_orphan = |h: &&UnservedImage| !h.is_referenced && !self.is_referenced(h);
        let orphans: Vec<_> =
            unserved.iter().filter(is_orphan).map(|h| self.orphan_info(h)).collect();
        let mut findings: Vec<_> = orphans.iter().take(MAX_FINDINGS).map(orphan_finding).collect();
        if let Some(more) = orphans.len().checked_sub(MAX_FINDINGS).filter(|more| *more > 0) {
            let message =
                format!("{}: no record references their volumes", plural(more, "more image"));
            let hint = "to list them: windrose volume orphans";
            findings.push(finding(Severity::Warning, "images", message, Some(hint)));
        }
        findings
    }

    /// All images that are not served, on all nodes that answer; and the names of the other nodes.
    pub(super) async fn collect_replica_images(
        &self,
    ) -> Result<(Vec<(ReplicaImage, bool)>, Vec<String>), ApiError> {
        let own = self.scan_images(true).await;
        let mut replicas: Vec<_> =
            own.iter().map(|h| (self.local_replica_image(h), h.is_referenced)).collect();
        let Some(joined) = self.joined_cluster() else { return Ok((replicas, Vec::new())) };
        let (others, down): (Vec<NodeId>, Vec<String>) = {
            let nodes = joined.nodes.borrow();
            let others = nodes.iter().filter(|(n, _)| **n != joined.node);
            let (alive, down): (Vec<_>, Vec<_>) = others.partition(|(_, view)| view.is_alive);
            let down = down.into_iter().filter(|(_, view)| view.record.role == Role::Data);
            let down = down.map(|(_, view)| view.record.name.clone());
            (alive.into_iter().map(|(n, _)| *n).collect(), down.collect())
        };
        if others.is_empty() {
            return Ok((replicas, down));
        }
        let revision =
            self.0.context.request_reports(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            let answers =
                |n: &&NodeId| reports.get(n).is_some_and(|r| r.answers_request >= revision.0);
            let (answered, unanswered): (Vec<_>, Vec<_>) = others.iter().partition(answers);
            if unanswered.is_empty() || Instant::now() >= deadline {
                for node in answered {
                    let images =
                        reports.get(&node).map(|r| r.images.as_slice()).unwrap_or_default();
                    replicas.extend(
                        images.iter().map(|h| (self.replica_image(node, h), h.is_referenced)),
                    );
                }
                let unanswered = unanswered.into_iter().map(|n| self.node_name(n));
                return Ok((replicas, unanswered.chain(down).collect()));
            }
            tokio::time::sleep(ANSWER_POLL).await;
        }
    }

    /// Adopts an orphaned image as a volume.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] says why it is not adopted, and what else to do with it.
    pub async fn adopt_image(&self, request: AdoptImageRequest) -> Result<AdoptedImage, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.adopt_image_now(request).await }).await
    }

    pub(super) async fn adopt_image_now(
        &self,
        request: AdoptImageRequest,
    ) -> Result<AdoptedImage, ApiError> {
        self.0.context.check_data_node()?;
        let replica = self.orphan_at(&request.image).await?;
        if let Some((stored, _)) = self.0.context.volumes.get(replica.scan.volume) {
            return Err(self.already_referenced_error(&replica, &stored.record.name));
        }
        let (replicas, _) = self.collect_replica_images().await?;
        let same = replicas.into_iter().map(|(c, _)| c).filter(|c| {
            c.scan.volume == replica.scan.volume
                && (c.node, &c.location) != (replica.node, &replica.location)
        });
        let same: Vec<_> = same.collect();
        let replicas: Vec<_> = std::iter::once(replica).chain(same).collect();
        let decided = match request.force {
            true => Ok(RecoveryChoice { source: 0, resync_targets: Vec::new() }),
            false => choose_source(&replicas, &request.without),
        };
        let mut plan = plan_volume(&replicas, &decided);
        plan.name = request.name.or(plan.name);
        if request.dry_run {
            return Ok(AdoptedImage { plan, volume: None });
        }
        let choice = decided.map_err(|doubt| {
            let message =
                format!("{} is not adopted: {}", replicas[0].location_text(), doubt.text());
            ApiError::new(ErrorCode::Conflict, message)
        })?;
        if choice.source != 0 {
            let message = format!(
                "{} is not adopted: {} is newer or equal",
                replicas[0].location_text(),
                replicas[choice.source].location_text()
            );
            return Err(ApiError::new(ErrorCode::Conflict, message).with_hint(
                "`windrose cluster recover` adopts all replicas, with that one as \
                    primary",
            ));
        }
        let name = plan.name.clone().ok_or_else(|| name_unknown_error(&replicas[0]))?;
        let id = self.adopt_volume(&name, &replicas, &choice).await?;
        self.reconcile_volume(id).await;
        let volume = self.await_open(id, &name).await?;
        self.scan_images(false).await;
        Ok(AdoptedImage { plan, volume: Some(volume) })
    }

    /// The orphaned image at a place.
    async fn orphan_at(&self, text: &str) -> Result<ReplicaImage, ApiError> {
        let location = ImageLocation::parse(text).ok_or_else(|| {
            let message = format!("{text} is neither an absolute path nor POOL/VOLUME");
            ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("`windrose volume orphans` lists the images that no record references")
        })?;
        match &location {
            ImageLocation::Path(path) => {
                self.0.pools.check_unused_paths(vec![path.clone()]).await?;
            }
            ImageLocation::InPool(pool, id) => {
                if let Some((_, name)) =
                    self.0.pools.volumes_in_pool(pool).into_iter().find(|(v, _)| v == id)
                {
                    let message = format!("{location} is already the replica of volume {name}");
                    return Err(ApiError::new(ErrorCode::Conflict, message));
                }
            }
        }
        let found =
            self.0.context.engine.scan_image(&location).await.map_err(|e| scan_error(&e))?;
        // A record that cannot be read may name the image.
        if let Err(e) = self.read_volume_record(found.volume).await {
            let message = format!(
                "{location} holds volume {}, whose record cannot be read: {e}",
                found.volume
            );
            return Err(ApiError::new(ErrorCode::Conflict, message)
                .with_hint("restore the store from a backup, or recover the record first"));
        }
        let device = match &location {
            ImageLocation::Path(path) => is_device(path.clone()).await,
            ImageLocation::InPool(..) => false,
        };
        let image =
            UnservedImage { location, is_device: device, is_referenced: false, scan: found };
        Ok(self.local_replica_image(&image))
    }

    /// The error for an image of a volume that exists: a replica must not become a second volume.
    fn already_referenced_error(&self, replica: &ReplicaImage, name: &VolumeName) -> ApiError {
        let (me, location) = (&self.0.context.settings.name, &replica.location);
        let message = format!(
            "{location} is a former replica of volume {name}, which has its replicas elsewhere"
        );
        let at = old_images::backing_flags(&location.backing(replica.is_device));
        let hint = match self.joined_cluster() {
            Some(_) => format!(
                "to overwrite it with a new replica: windrose volume mirror add {name} --on \
                 {me}{at} --force"
            ),
            None => format!("to erase it: windrose volume discard {location}"),
        };
        ApiError::new(ErrorCode::Conflict, message).with_hint(hint)
    }

    /// Creates a volume from its replicas. Initiators that had to authenticate are not allowed.
    pub(super) async fn adopt_volume(
        &self,
        name: &VolumeName,
        replicas: &[ReplicaImage],
        choice: &RecoveryChoice,
    ) -> Result<Uuid, ApiError> {
        if let Some(id) = self.0.context.volumes.id_by_name(name) {
            let message =
                format!("volume {name} is not adopted: another volume has that name ({id})");
            return Err(ApiError::new(ErrorCode::Exists, message).with_hint(rename_hint(replicas)));
        }
        if self.0.context.volumes.count() >= self.0.context.settings.max_volumes {
            let message = format!(
                "the node already has its limit of {}",
                plural(self.0.context.settings.max_volumes, "volume")
            );
            return Err(
                ApiError::new(ErrorCode::Conflict, message).with_hint("raise limits.volumes")
            );
        }
        let members: Vec<_> =
            std::iter::once(choice.source).chain(choice.resync_targets.iter().copied()).collect();
        let mut members: Vec<_> = members.into_iter().map(|n| replicas[n].clone()).collect();
        self.detach_from_mirror(&mut members).await?;
        let record = self.adopted_record(name, &members)?;
        let mut changes = record.insert_changes();
        if self.joined_cluster().is_some() {
            let above = replicas.iter().filter_map(|c| c.to_api().epoch).max().unwrap_or(0);
            changes.push(mirror_records::creation(
                record.id,
                &recovered_mirror_record(&members, above),
            ));
        }
        self.0.context.meta.commit(changes).await.map_err(|e| store_error(&e))?;
        tracing::warn!(volume = %name, id = %record.id, copies = members.len(), "volume adopted \
            from its images");
        Ok(record.id)
    }

    /// A standalone node tracks no dirty regions for other replicas. The image gets a new identity,
    /// so that mirrors that know the old one do not skip regions that it lacks.
    async fn detach_from_mirror(&self, members: &mut [ReplicaImage]) -> Result<(), ApiError> {
        if self.joined_cluster().is_some() {
            return Ok(());
        }
        for replica in members.iter_mut().filter(|c| c.scan.log != ScannedIntentLog::Absent) {
            let name = Uuid::new_v4();
            let renamed = self.0.context.engine.change_image_id(&replica.location, name).await;
            renamed.map_err(|e| ApiError::new(e.code(), e.to_string()))?;
            (replica.scan.id, replica.scan.generation) = (name, replica.scan.generation + 1);
        }
        Ok(())
    }

    fn adopted_record(
        &self,
        name: &VolumeName,
        members: &[ReplicaImage],
    ) -> Result<VolumeRecord, ApiError> {
        let source = members.first().ok_or_else(|| {
            ApiError::new(
                ErrorCode::Internal,
                "no replica was \
                chosen as primary",
            )
        })?;
        let (found, settings) = (&source.scan, &self.0.context.settings);
        let description = found.description.as_ref().filter(|d| d.name == *name);
        let placement = |c: &ReplicaImage| ReplicaPlacement {
            node: c.node,
            backing: c.location.backing(c.is_device),
            image: Some(c.scan.id),
            image_generation: c.scan.generation,
            stage: PlacementStage::Ready,
        };
        let mut placements: Vec<_> = members.iter().map(placement).collect();
        placements.sort_by_key(|p| p.node);
        let has_secrets = found.description.as_ref().is_some_and(|d| !d.secret_kinds.is_empty());
        let allow = found.description.as_ref().filter(|_| !has_secrets).map(|d| d.allow.clone());
        let record = VolumeRecord {
            id: found.volume,
            name: name.clone(),
            stage: VolumeStage::Ready,
            size_bytes: found.size_bytes,
            block_size: found.block_size,
            thin: found.thin,
            replicas_wanted: self.adopted_replicas_wanted(&placements, found.description.as_ref()),
            placements,
            repair: None,
            creator: None,
            preferred_primary: None,
            protocols: description.map(|d| d.protocols).unwrap_or_default(),
            iscsi_target: description.map_or_else(
                || format!("{}:{name}", settings.iscsi_authority),
                |d| d.iscsi_target.clone(),
            ),
            mapping: LunMapping::default(),
            nvme_subsystem: description.map_or_else(
                || format!("{}:{name}", settings.nvme_authority),
                |d| d.nvme_subsystem.clone(),
            ),
            allow: allow.unwrap_or_default(),
            chap: None,
            chap_by_initiator: BTreeMap::new(),
            dhchap_by_host: BTreeMap::new(),
            tls_by_host: BTreeMap::new(),
            created_s: found.description.as_ref().map_or_else(now_s, |d| d.created_s),
        };
        self.check_target_names(&record, members)?;
        Ok(record)
    }

    /// How many replicas an adopted volume is to have: as many as before, or one on a standalone
    /// node.
    fn adopted_replicas_wanted(
        &self,
        placements: &[ReplicaPlacement],
        wanted: Option<&ImageDescription>,
    ) -> u8 {
        let here = u8::try_from(placements.len())
            .unwrap_or(MAX_REPLICAS_WANTED)
            .clamp(1, MAX_REPLICAS_WANTED);
        let wanted =
            wanted.filter(|_| self.joined_cluster().is_some()).map_or(1, |d| d.replicas_wanted);
        here.max(wanted)
    }

    /// Refuses a volume whose target or subsystem belongs to another volume.
    fn check_target_names(
        &self,
        record: &VolumeRecord,
        replicas: &[ReplicaImage],
    ) -> Result<(), ApiError> {
        let all = self.0.context.volumes.all();
        let taken = all.iter().map(|(s, _)| &s.record).find(|r| {
            r.iscsi_target == record.iscsi_target || r.nvme_subsystem == record.nvme_subsystem
        });
        taken.map_or(Ok(()), |other| {
            let (name, target) = (&record.name, &record.iscsi_target);
            let message = format!(
                "volume {name} is not adopted: volume {} uses its target {target}",
                other.name
            );
            Err(ApiError::new(ErrorCode::Exists, message).with_hint(rename_hint(replicas)))
        })
    }

    /// Erases an orphaned image.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] without the volume's identity; [`ErrorCode::Conflict`] for an
    /// image that a record names.
    pub async fn discard_image(&self, request: DiscardImageRequest) -> Result<(), ApiError> {
        let control = self.clone();
        self.run_to_completion(async move {
            let replica = control.orphan_at(&request.image).await?;
            if replica.scan.volume != request.confirm {
                let message = format!(
                    "{} holds volume {}, but the confirmation names {}",
                    replica.location, replica.scan.volume, request.confirm
                );
                return Err(ApiError::new(ErrorCode::InvalidRequest, message).with_hint(
                    "confirm with the identity of the volume: this erases the data in \
                        the image",
                ));
            }
            let erased =
                control.0.context.engine.erase_image(&replica.location, replica.scan.volume).await;
            erased.map_err(|e| scan_error(&e))?;
            tracing::warn!(image = %replica.location, volume = %replica.scan.volume, "image erased \
                by an operator");
            control.scan_images(true).await;
            Ok(())
        })
        .await
    }

    /// Why a new replica must not be written over an existing image: it holds an older state of the
    /// volume, and is not the remainder of a failed attempt.
    pub(super) async fn old_image_error(&self, record: &VolumeRecord) -> Option<BackingError> {
        let placement = record.placement(self.this_node())?;
        if matches!(placement.stage, PlacementStage::Creating { force: true }) {
            return None;
        }
        let at = match &placement.backing {
            Backing::File { path } | Backing::Device { path } => ImageLocation::Path(path.clone()),
            Backing::Pool { pool } => ImageLocation::InPool(pool.clone(), record.id),
        };
        let message = match self.0.context.engine.scan_image(&at).await {
            Ok(found) => old_image_age(&found, record, placement.image)
                .map(|how_old| old_images::old_image_text(&at, record, &how_old))?,
            Err(why) if why.is_unreadable => {
                old_images::old_image_text(&at, record, &format!("it cannot be read: {why}"))
            }
            // There is no image, or an unfinished one.
            Err(_) => return None,
        };
        Some(BackingError::refused(message).with_hint(Some("--force overwrites it")))
    }
}

/// The mirror record of an adopted volume: the first replica is in sync, the others are resynced
/// from it.
pub(super) fn recovered_mirror_record(members: &[ReplicaImage], above: u64) -> MirrorConfig {
    let primary = members.first().map_or(NodeId(0), |c| c.node);
    let replica =
        |c: &ReplicaImage| ConfigReplica { node: c.node, image: c.scan.id, is_new: false };
    let replicas = members.iter().map(replica).collect();
    recovery::recovered_config(primary, replicas, Epoch(above), reconciler::random_config_id())
}

fn scan_error(e: &BackingError) -> ApiError {
    let error = ApiError::new(e.code(), e.to_string());
    match e.hint {
        Some(hint) => error.with_hint(hint),
        None => error.with_hint(
            "`windrose volume orphans` lists the images that no record \
            references",
        ),
    }
}

async fn is_device(path: PathBuf) -> bool {
    let is_device = move || std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device());
    tokio::task::spawn_blocking(is_device).await.unwrap_or(false)
}

/// Files in the directory of images, and block devices.
fn image_paths(directory: PathBuf, devices: bool) -> Vec<(PathBuf, bool)> {
    let entries = std::fs::read_dir(directory).map(Iterator::collect::<Vec<_>>);
    let files = entries.unwrap_or_default().into_iter().flatten();
    let files =
        files.filter(|e| e.file_type().is_ok_and(|t| t.is_file())).map(|e| (e.path(), false));
    let devices = if devices { pool_records::candidate_disk_paths(&[]) } else { Vec::new() };
    files.chain(devices.into_iter().map(|path| (path, true))).collect()
}

/// Those of them that are not in use.
fn filter_unused(found: Vec<(PathBuf, bool)>, used: &[PathBuf]) -> Vec<UnreferencedLocation> {
    let resolved = |path: &PathBuf| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let used: BTreeSet<_> = used.iter().map(resolved).collect();
    let mut free: Vec<_> =
        found.into_iter().filter(|(path, _)| !used.contains(&resolved(path))).collect();
    free.sort();
    free.into_iter().map(|(path, device)| (ImageLocation::Path(path), device)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_looked_for_where_nothing_is_known_to_be() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.img", "b.img"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir(dir.path().join("c")).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("a.img"), &link).unwrap();
        let found = filter_unused(image_paths(dir.path().to_owned(), false), &[link]);
        assert_eq!(found, [(ImageLocation::Path(dir.path().join("b.img")), false)]);
        assert!(image_paths(dir.path().join("nowhere"), false).is_empty());
    }
}
