//! Administration of a volume's replicas.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{
    AddReplicaRequest, ApiError, Backing, BlockSize, ErrorCode, ForcePrimaryRequest, NewBacking,
    RemoveReplicaRequest, ReplaceReplicaRequest, SetReplicaCountRequest, SwitchPrimaryRequest,
    TakeOver, Verification, Volume, VolumeName,
};
use cluster::identity::Role;
use cluster::mirror_records;
use cluster::nodes::NodeView;
use mirror::VerifyReport;
use mirror::config::{MirrorConfig, ReplicaMismatch};
use mirror::membership::NotServingReason;
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::VolumeControl;
use super::lifecycle::require_absolute;
use super::reconciler::random_config_id;
use crate::errors::{backing_error, store_error};
use cluster::store::StoreError;
use engine::ReportScope;
use records::reconcile::Observed;
use records::record::{
    MAX_PLACEMENTS, MAX_REPLICAS_WANTED, PlacementStage, ReplicaPlacement, StoredVolumeRecord,
    VolumeRecord,
};
use status::cluster_view::{ClusterView, NodeState};
use status::not_serving::reason_text;
use status::placement::{self, Candidate};
use status::startup_wait::LOST_QUORUM_HINT;

/// Longest wait for a primary handover before the answer.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait until a forced replica serves, before the answer.
const FORCE_TIMEOUT: Duration = Duration::from_secs(20);

/// How often these waits check.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How often storing the result of a comparison is tried while the record changes.
const COMMIT_ATTEMPTS: usize = 5;

impl VolumeControl {
    /// Adds a replica to a volume.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Conflict`] names the node that cannot have one, and
    /// why.
    pub async fn add_replica(
        &self,
        name: VolumeName,
        request: AddReplicaRequest,
    ) -> Result<Volume, ApiError> {
        let new = (Some(request.backing.clone()), None);
        let old = self.old_images(self.volume_id(&name).ok()).await;
        self.change_placements(name, new, move |control, record, PlacementContext { free, .. }| {
            let taken: Vec<_> = record.placements.iter().map(|p| p.node).collect();
            if record.current_placements().count() >= usize::from(MAX_REPLICAS_WANTED)
                || taken.len() >= MAX_PLACEMENTS
            {
                return Err(conflict(format!("it already has {MAX_REPLICAS_WANTED} replicas")));
            }
            let node = control.choose_node_for(record, &request, free, &old)?;
            let placement = control.new_placement(
                record.id,
                &record.name,
                node,
                &request.backing,
                request.force,
            )?;
            record.add_placement(placement);
            record.raise_replicas_wanted();
            Ok(())
        })
        .await
    }

    /// Sets how many replicas a volume is to have.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::InvalidRequest`] for an invalid number;
    /// [`ErrorCode::Conflict`] for fewer than it has.
    pub async fn set_replicas_wanted(
        &self,
        name: VolumeName,
        request: SetReplicaCountRequest,
    ) -> Result<Volume, ApiError> {
        let wanted = request.replicas;
        if !(1..=MAX_REPLICAS_WANTED).contains(&wanted) {
            let message = format!("volume {name} cannot have {wanted} replicas");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint(format!("give replicas from 1 to {MAX_REPLICAS_WANTED}")));
        }
        self.change_placements(name, (None, None), move |_, record, _| {
            let has = record.current_placements().count();
            if has > usize::from(wanted) {
                let name = &record.name;
                return Err(conflict(format!("it has {has} replicas")).with_hint(format!(
                    "remove one, which also lowers the wanted number: windrose volume mirror \
                     remove {name} --on NODE"
                )));
            }
            record.replicas_wanted = wanted;
            Ok(())
        })
        .await
    }

    /// Removes a replica of a volume, once the others can go on without it.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Conflict`] if no replica would be left.
    pub async fn remove_replica(
        &self,
        name: VolumeName,
        request: RemoveReplicaRequest,
    ) -> Result<Volume, ApiError> {
        let dropped = (None, Some(request.node.clone()));
        self.change_placements(
            name,
            dropped,
            move |control, record, PlacementContext { mirror, .. }| {
                let node = control.replica_node(record, &request.node)?;
                let others = mirror.others(node).next().is_some();
                let replaced_stage = PlacementStage::Removing { replaced_by: Some(node) };
                let stays = |p: &ReplicaPlacement| {
                    p.node != node
                        && (p.stage == PlacementStage::Ready || p.stage == replaced_stage)
                };
                if !record.placements.iter().any(stays) || !others {
                    let name = &record.name;
                    return Err(conflict("no other replica is in sync".into()).with_hint(format!(
                        "wait until one is in sync, or add one first (windrose volume mirror add \
                     {name}); `windrose volume delete {name}` deletes the volume"
                    )));
                }
                record.mark_for_removal(node);
                record.lower_replicas_wanted();
                Ok(())
            },
        )
        .await
    }

    /// Replaces a replica of a volume.
    ///
    /// # Errors
    /// As [`Self::add_replica`]; [`ErrorCode::Conflict`] for an in-sync replica that would be
    /// replaced in place.
    pub async fn replace_replica(
        &self,
        name: VolumeName,
        request: ReplaceReplicaRequest,
    ) -> Result<Volume, ApiError> {
        let moves = request.with.as_ref().is_some_and(|with| *with != request.node);
        let dropped = (!moves).then(|| request.node.clone());
        self.change_placements(
            name,
            (Some(request.backing.clone()), dropped),
            move |control, record, PlacementContext { free, mirror }| {
                let old = control.replica_node(record, &request.node)?;
                let with = request.with.clone().filter(|with| *with != request.node);
                let Some(with) = with else {
                    if mirror.member(old).is_some() {
                        let message = format!("the replica on {} is in sync", request.node);
                        return Err(conflict(message)
                            .with_hint("replace it with one on another node: --with NODE"));
                    }
                    let (id, name) = (record.id, record.name.clone());
                    let mut placement =
                        control.new_placement(id, &name, old, &request.backing, request.force)?;
                    // The replaced image may be erased at its place.
                    placement.image = record.placement(old).and_then(|p| p.image);
                    record.placement_mut(old).into_iter().for_each(|p| p.clone_from(&placement));
                    record.raise_replicas_wanted();
                    return Ok(());
                };
                let taken: Vec<_> = record.placements.iter().map(|p| p.node).collect();
                if taken.len() >= MAX_PLACEMENTS {
                    return Err(conflict("another replica is being replaced".into()));
                }
                let new =
                    control.choose_nodes(&[with], 1, (&taken, &request.backing), free)?.remove(0);
                let placement = control.new_placement(
                    record.id,
                    &record.name,
                    new,
                    &request.backing,
                    request.force,
                )?;
                record.add_placement(placement);
                set_stage(record, old, PlacementStage::Removing { replaced_by: Some(new) });
                record.raise_replicas_wanted();
                Ok(())
            },
        )
        .await
    }

    /// Makes a node the preferred primary: it becomes primary whenever it is in sync.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`]; [`ErrorCode::Conflict`] for a node without a replica.
    pub async fn switch_primary(
        &self,
        name: VolumeName,
        request: SwitchPrimaryRequest,
    ) -> Result<Volume, ApiError> {
        let node = self.node_by_name(&request.node)?;
        self.change_placements(name.clone(), (None, None), move |control, record, _| {
            record.preferred_primary = Some(control.replica_node(record, &request.node)?);
            Ok(())
        })
        .await?;
        self.await_switch(&name, node).await;
        self.get_volume(&name).await
    }

    /// Waits briefly for the handover. A node that is out of sync now becomes primary later.
    async fn await_switch(&self, name: &VolumeName, node: NodeId) {
        let deadline = Instant::now() + SWITCH_TIMEOUT;
        let is_primary = || {
            let mirror = self.0.context.volumes.mirror(self.volume_id(name).ok()?)?;
            Some(mirror.primary == node || mirror.member(node).is_none())
        };
        while is_primary() == Some(false) && Instant::now() < deadline {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Claims the image of a volume from the node that used it last, and opens it.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] without the volume's name; [`ErrorCode::Conflict`] if it is
    /// open here; [`ErrorCode::Backing`] if it cannot be claimed.
    pub async fn take_over_image(
        &self,
        name: VolumeName,
        request: TakeOver,
    ) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.take_over_image_now(&name, &request).await })
            .await
    }

    async fn take_over_image_now(
        &self,
        name: &VolumeName,
        request: &TakeOver,
    ) -> Result<Volume, ApiError> {
        if request.confirm != *name {
            let message = format!("the confirmation names {} instead of {name}", request.confirm);
            return Err(ApiError::new(ErrorCode::InvalidRequest, message).with_hint(
                "confirm with the name of the volume: no other node may use its image any more",
            ));
        }
        let id = self.volume_id(name)?;
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        if matches!(self.0.context.volumes.observed(id), Observed::Open { .. }) {
            return Err(conflict(format!("volume {name} is open on this node"))
                .with_hint("there is nothing to take over"));
        }
        tracing::warn!(volume = %name, "image taken over by an operator");
        self.0.context.engine.take_over_at_next_open(id);
        self.0.context.volumes.clear_failure(id);
        self.reconcile_locked(id).await;
        match self.0.context.volumes.observed(id) {
            Observed::OpenFailed { reason } | Observed::EraseFailed { reason } => {
                Err(ApiError::new(ErrorCode::Backing, format!("volume {name}: {reason}")))
            }
            _ => self.volume_by_id(id).await,
        }
    }

    /// Makes this node's replica go on alone, even if other replicas have newer writes.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] without the volume's name; [`ErrorCode::Conflict`] if it
    /// serves, or a node that may have newer data is alive.
    pub async fn force_primary(
        &self,
        name: VolumeName,
        request: ForcePrimaryRequest,
    ) -> Result<Volume, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move { control.force_primary_now(&name, &request).await })
            .await
    }

    async fn force_primary_now(
        &self,
        name: &VolumeName,
        request: &ForcePrimaryRequest,
    ) -> Result<Volume, ApiError> {
        self.require_cluster()?;
        if request.confirm != *name {
            let message = format!("the confirmation names {} instead of {name}", request.confirm);
            return Err(ApiError::new(ErrorCode::InvalidRequest, message).with_hint(
                "confirm with the name of the volume: acknowledged writes may be lost",
            ));
        }
        let id = self.volume_id(name)?;
        let Some(mirror) = self.0.context.volumes.mirror(id) else {
            return Err(conflict(format!("volume {name} has no replicas yet")));
        };
        let (me, cluster) =
            (self.this_node(), self.0.context.cluster_view(&[]).await.unwrap_or_default());
        if !cluster.serving_nodes(id).is_empty() {
            return Err(conflict(format!("volume {name} is served"))
                .with_hint("a volume that is served need not be forced"));
        }
        if let Some(NotServingReason::Refused(refusal)) = self.local_not_serving_reason(id).await {
            return Err(conflict(format!("volume {name} cannot be forced: {refusal}")).with_hint(
                "its mirror configuration is older than its images: `windrose cluster recover` \
                 makes a new one, with the newest replica as primary",
            ));
        }
        if mirror.replicas.iter().any(|r| r.node == me && r.is_new) {
            return Err(conflict(format!(
                "the replica of {name} on node {} was never in sync: its data is incomplete",
                self.node_name(me)
            ))
            .with_hint("run this at the node of another replica"));
        }
        if mirror.image(me).is_none() {
            return Err(conflict(format!("node {} has no replica of {name}", self.node_name(me)))
                .with_hint("run this at the node of the replica to keep"));
        }
        let others: Vec<_> = mirror.others(me).map(|m| m.node).collect();
        check_not_running(&cluster, &others, name)?;
        tracing::warn!(volume = %name, "replica forced to become primary by an operator");
        let forced = self.0.context.engine.force_primary(id).await;
        forced.map_err(|e| backing_error(name, &e))?;
        self.await_forced(id, name).await?;
        self.volume_by_id(id).await
    }

    /// Waits until a forced replica serves; the error says why it does not.
    async fn await_forced(&self, id: Uuid, name: &VolumeName) -> Result<(), ApiError> {
        let deadline = Instant::now() + FORCE_TIMEOUT;
        loop {
            let Some(why) = self.local_not_serving_reason(id).await else { return Ok(()) };
            if Instant::now() >= deadline {
                let why = reason_text(&why, &|node| self.node_name(node));
                return Err(conflict(format!(
                    "volume {name} was forced, but is not served here yet: {why}"
                ))
                .with_hint("`windrose status` shows the progress"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Why the replica here does not serve; `None` if it does.
    async fn local_not_serving_reason(&self, id: Uuid) -> Option<NotServingReason> {
        let reports = self.0.context.engine.report(ReportScope::One(id)).await;
        let mirror = reports.iter().flat_map(|r| &r.volumes).find_map(|v| v.mirror.as_ref());
        mirror.map_or(Some(NotServingReason::ConfigUnread { store_unavailable: false }), |mirror| {
            mirror.status.not_serving.clone()
        })
    }

    /// Compares the replicas of a volume; with `keep`, overwrites differing blocks from the replica
    /// on that node. Differences stay a status finding until the replicas are equal again.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] names the primary if this node is not it; [`ErrorCode::NotFound`].
    pub async fn verify_replicas(
        &self,
        name: &VolumeName,
        source: Option<String>,
    ) -> Result<Verification, ApiError> {
        self.require_cluster()?;
        let id = self.volume_id(name)?;
        let source = source.map(|node| self.node_by_name(&node)).transpose()?;
        let Some((stored, _)) = self.0.context.volumes.get(id) else {
            return Err(ApiError::new(ErrorCode::NotFound, "the volume was deleted just now"));
        };
        let mirror = self.0.context.volumes.mirror(id);
        check_comparable(name, &stored.record, mirror.as_ref())?;
        let primary = mirror.map(|m| m.primary);
        if let Some(primary) = primary.filter(|p| *p != self.this_node()) {
            let node = self.node_name(primary);
            return Err(conflict(format!("the primary of {name} is node {node}")).with_hint(
                format!(
                    "run this there, or `windrose volume switch-primary {name} --to {}` first",
                    self.node_name(self.this_node())
                ),
            ));
        }
        let found = self.0.context.engine.verify(id, source).await;
        let found = found.map_err(|e| backing_error(name, &e))?;
        let left_out = stored.record.placements.iter().map(|p| p.node);
        let left_out: Vec<_> = left_out.filter(|node| !found.nodes.contains(node)).collect();
        self.record_comparison(name, (id, stored.record.block_size), &found).await?;
        let block = u64::from(stored.record.block_size.bytes());
        let differing = found.mismatches.iter().map(|d| api::MismatchRange {
            start_bytes: d.range.at.0.saturating_mul(block),
            bytes: d.range.count * block,
            node: self.node_name(d.node),
        });
        Ok(Verification {
            compared_bytes: found.compared_blocks * block,
            mismatched_bytes: found.mismatched_blocks * block,
            mismatches: differing.collect(),
            replicas: found.nodes.iter().map(|node| self.node_name(*node)).collect(),
            skipped: left_out.iter().map(|node| self.node_name(*node)).collect(),
            unreadable_ranges: found.unreadable_ranges,
            repaired_bytes: found.repaired_blocks * block,
        })
    }

    /// Stores the result of a comparison in the mirror record, if it changed.
    async fn record_comparison(
        &self,
        name: &VolumeName,
        (id, block_size): (Uuid, BlockSize),
        found: &VerifyReport,
    ) -> Result<(), ApiError> {
        let repaired = found.repaired_blocks == found.mismatched_blocks;
        if found.unreadable_ranges > 0 && repaired {
            // Blocks that could not be read are neither equal nor different.
            return Ok(());
        }
        let block = u64::from(block_size.bytes());
        let mut nodes: Vec<_> = found.mismatches.iter().map(|d| d.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let first = found.mismatches.first().filter(|_| !repaired);
        let differing = first.map(|first| ReplicaMismatch {
            offset_bytes: first.range.at.0.saturating_mul(block),
            bytes: (found.mismatched_blocks - found.repaired_blocks) * block,
            nodes,
            primary: self.this_node(),
        });
        for _ in 0..COMMIT_ATTEMPTS {
            let mirror = mirror_records::get_record(&*self.0.context.meta, id)
                .await
                .map_err(|e| store_error(&e))?;
            let Some((mirror, at)) = mirror else { return Ok(()) };
            // Earlier results stay for replicas that were not compared.
            let compared =
                |node: &NodeId| found.nodes.contains(node) || mirror.image(*node).is_none();
            let before = mirror.history.mismatch.clone();
            let before = before.filter(|before| !before.nodes.iter().all(compared));
            let Some(next) =
                mirror.with_comparison(differing.clone().or(before), random_config_id())
            else {
                return Ok(());
            };
            let put =
                self.0.context.meta.commit(vec![mirror_records::replacement(id, at, &next)]).await;
            match put {
                Err(StoreError::Conflict { .. }) => {}
                put => return put.map(drop).map_err(|e| store_error(&e)),
            }
        }
        Err(conflict(format!("the configuration of {name} keeps changing")).with_hint(
            "the replicas were compared, but the result could not be recorded: try \
                again in a moment",
        ))
    }

    /// Changes the placements of a volume, consistent with its current mirror record. A new replica
    /// is to lie in `new`. If the change drops the replica on node `dropped`, some replica has to
    /// serve.
    async fn change_placements<F>(
        &self,
        name: VolumeName,
        (new, dropped): (Option<NewBacking>, Option<String>),
        change: F,
    ) -> Result<Volume, ApiError>
    where
        F: Fn(&Self, &mut VolumeRecord, &PlacementContext) -> Result<(), ApiError> + Send + 'static,
    {
        self.require_cluster()?;
        let control = self.clone();
        self.run_to_completion(async move {
            let id = control.volume_id(&name)?;
            let free = control.free_space_by_node(&new.unwrap_or_default()).await;
            let lock = control.0.context.volumes.lock_of(id);
            let _held = lock.lock().await;
            let StoredVolumeRecord { mut record, revision } =
                control.ready_volume(id, &name).await?;
            if let Some(node) =
                dropped.and_then(|node| control.created_replica_node(&record, &node))
            {
                control.check_can_drop_replica(&record, node).await?;
            }
            let mirror = mirror_records::get_record(&*control.0.context.meta, id).await;
            let Some((mirror, at)) = mirror.map_err(|e| store_error(&e))? else {
                return Err(conflict(format!("volume {name} has no mirror yet"))
                    .with_hint("its node must open it first; see `windrose status`"));
            };
            let named = |e: ApiError| {
                let message = format!("volume {name}: {}", e.message);
                ApiError { message, ..e }
            };
            let context = PlacementContext { free, mirror };
            change(&control, &mut record, &context).map_err(named)?;
            let is_wanted =
                |p: &ReplicaPlacement| matches!(p.stage, PlacementStage::Creating { .. });
            if record.placement(control.this_node()).is_some_and(is_wanted) {
                control.0.pools.check_backing_usable(&record).await.map_err(named)?;
            }
            let mut changes = record.replace_changes(revision);
            // Unchanged: makes the commit fail if the mirror has changed since the decision.
            changes.push(mirror_records::replacement(id, at, &context.mirror));
            let committed = control.0.context.meta.commit(changes).await;
            control.reconcile_locked(id).await;
            committed.map_err(|e| store_error(&e))?;
            control.volume_by_id(id).await
        })
        .await
    }

    /// Free space by node for such a backing, by the last reports. Nodes that cannot have one are
    /// absent.
    pub(super) async fn free_space_by_node(&self, backing: &NewBacking) -> FreeByNode {
        let reports = self.reports().await.unwrap_or_default();
        let NewBacking::Pool { pool } = backing else {
            return reports
                .into_iter()
                .map(|(node, report)| (node, report.data_dir_free_bytes))
                .collect();
        };
        let own = self.0.context.engine.pool_reports().await;
        let here = own.get(pool).map(|report| (self.this_node(), report.free_bytes));
        let reported = reports.into_iter().filter(|(node, _)| *node != self.this_node());
        let reported = reported.filter_map(|(node, report)| Some((node, *report.pools.get(pool)?)));
        reported.chain(here).collect()
    }

    /// Chooses the nodes for `count` replicas of a volume that has some on `taken`: those named
    /// `on`, and others.
    pub(super) fn choose_nodes(
        &self,
        on: &[String],
        count: usize,
        (taken, backing): (&[NodeId], &NewBacking),
        free: &FreeByNode,
    ) -> Result<Vec<NodeId>, ApiError> {
        let candidates = self.candidates_for(backing, free);
        let find = |name: &String| candidates.iter().find(|c| c.name == *name).map(|c| c.node);
        let mut named = Vec::new();
        for name in on {
            named.push(find(name).map_or_else(|| self.node_by_name(name), Ok)?);
        }
        placement::choose_nodes(&candidates, taken, &named, count)
            .map_err(|why| conflict(why).with_hint("`windrose cluster nodes` shows the nodes"))
    }

    /// The nodes as candidates for a replica with such a backing, with the reasons that exclude
    /// some.
    pub(super) fn candidates_for(&self, backing: &NewBacking, free: &FreeByNode) -> Vec<Candidate> {
        let mut candidates = self.candidates(free);
        if matches!(backing, NewBacking::Pool { .. }) {
            let without = candidates.iter_mut().filter(|c| !free.contains_key(&c.node));
            without.for_each(|c| {
                c.exclusion = c.exclusion.or(Some("has no such pool, or it is offline"));
            });
        }
        candidates
    }

    fn candidates(&self, free: &FreeByNode) -> Vec<Candidate> {
        let Some(joined) = self.joined_cluster() else {
            return vec![Candidate {
                node: self.this_node(),
                name: self.0.context.settings.name.clone(),
                failure_domain: String::new(),
                exclusion: None,
                free_bytes: 0,
                replicas: 0,
            }];
        };
        let volumes = self.0.context.volumes.all();
        let copies = |node: NodeId| {
            volumes.iter().filter(|(s, _)| s.record.placement(node).is_some()).count()
        };
        let nodes = joined.nodes.borrow();
        let candidate = |(&node, view): (&NodeId, &NodeView)| Candidate {
            node,
            name: view.record.name.clone(),
            failure_domain: view.record.failure_domain.clone(),
            exclusion: exclusion_reason(view),
            free_bytes: free.get(&node).copied().unwrap_or(0),
            replicas: copies(node),
        };
        nodes.iter().map(candidate).collect()
    }

    /// The placement of a replica that `node` is to make.
    pub(super) fn new_placement(
        &self,
        volume: Uuid,
        name: &VolumeName,
        node: NodeId,
        backing: &NewBacking,
        force: bool,
    ) -> Result<ReplicaPlacement, ApiError> {
        let backing = match backing {
            NewBacking::File { path: Some(path) } => {
                Backing::File { path: require_absolute(path)?.to_owned() }
            }
            NewBacking::Device { path } => {
                Backing::Device { path: require_absolute(path)?.to_owned() }
            }
            NewBacking::Pool { pool }
                if node == self.this_node() && !self.0.pools.has_pool(pool) =>
            {
                let message = format!("there is no pool {pool} on this node");
                return Err(ApiError::new(ErrorCode::NotFound, message)
                    .with_hint("`windrose pool list` shows the pools"));
            }
            NewBacking::Pool { pool } => Backing::Pool { pool: pool.clone() },
            NewBacking::File { path: None } => {
                let file = format!("{name}-{volume}.img");
                Backing::File { path: self.data_dir_of(node)?.join("volumes").join(file) }
            }
        };
        let (image, stage) = (None, PlacementStage::Creating { force });
        Ok(ReplicaPlacement { node, backing, image, image_generation: 0, stage })
    }

    fn data_dir_of(&self, node: NodeId) -> Result<std::path::PathBuf, ApiError> {
        if node == self.this_node() {
            return Ok(self.0.context.settings.data_dir.clone());
        }
        let nodes = self.joined_cluster().map(|m| m.nodes.borrow());
        let record = nodes.as_ref().and_then(|nodes| nodes.get(&node));
        let found = record.map(|view| view.record.data_dir.clone());
        found.ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("there is no node {node}")))
    }

    /// The node called `name`, which keeps a replica of the volume.
    fn replica_node(&self, record: &VolumeRecord, name: &str) -> Result<NodeId, ApiError> {
        let holders = record.placements.iter().map(|p| p.node);
        holders.into_iter().find(|node| self.node_name(*node) == name).ok_or_else(|| {
            let all: Vec<_> = record.placements.iter().map(|p| self.node_name(p.node)).collect();
            conflict(format!("node {name} has no replica of it"))
                .with_hint(format!("its replicas are on {}", all.join(", ")))
        })
    }

    /// The node called `name`, if its replica was made.
    fn created_replica_node(&self, record: &VolumeRecord, name: &str) -> Option<NodeId> {
        let made = |p: &&ReplicaPlacement| !matches!(p.stage, PlacementStage::Failed { .. });
        let node = record.placements.iter().filter(made).map(|p| p.node);
        node.into_iter().find(|node| self.node_name(*node) == name)
    }

    /// The node called `name`.
    pub(super) fn node_by_name(&self, name: &str) -> Result<NodeId, ApiError> {
        let nodes = self.joined_cluster().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let found = nodes.iter().find(|(_, view)| view.record.name == name);
        found.map(|(node, _)| *node).ok_or_else(|| {
            ApiError::new(ErrorCode::NotFound, format!("there is no node {name}"))
                .with_hint("`windrose cluster nodes` shows the nodes")
        })
    }

    fn require_cluster(&self) -> Result<(), ApiError> {
        if self.joined_cluster().is_some() {
            return Ok(());
        }
        Err(conflict("this node is in no cluster".into()).with_hint(
            "to begin one: `windrose cluster init`; to join one: `windrose cluster join`",
        ))
    }
}

/// Fails unless all `others`, which may have newer data, are known not to run: only then may a
/// replica of `name` go on alone.
fn check_not_running(
    view: &ClusterView,
    others: &[NodeId],
    name: &VolumeName,
) -> Result<(), ApiError> {
    if let Some(error) = &view.store.error {
        let names: Vec<_> = others.iter().map(|node| view.node_name(*node)).collect();
        let message = match &names[..] {
            [] => format!("volume {name} cannot be forced without the metadata store: {error}"),
            names => format!(
                "cannot tell without the metadata store whether node {} runs and has newer \
                 data of {name}: {error}",
                names.join(" or ")
            ),
        };
        let hint = format!(
            "restore a majority of the store's members, or the network to them, then try \
             again; {LOST_QUORUM_HINT}"
        );
        return Err(ApiError::new(ErrorCode::Unavailable, message).with_hint(hint));
    }
    for node in others {
        let called = view.node_name(*node);
        match view.state_of(*node) {
            NodeState::Down => {}
            NodeState::Unknown => {
                return Err(conflict(format!(
                    "node {called} does not respond, but is not known to be down yet: it may \
                     have newer data of {name}"
                ))
                .with_hint(format!(
                    "try again in 10 seconds; if this persists, fix the network to node \
                     {called}, or switch it off"
                )));
            }
            NodeState::Running => {
                return Err(conflict(format!(
                    "node {called} is running and may have newer data of {name}"
                ))
                .with_hint(format!("let it serve, or switch node {called} off first")));
            }
        }
    }
    Ok(())
}

/// The records that decide a change of placements.
struct PlacementContext {
    free: FreeByNode,
    mirror: MirrorConfig,
}

/// Free space by node, in bytes.
pub(super) type FreeByNode = BTreeMap<NodeId, u64>;

/// Fails for a volume without two in-sync replicas: a comparison would say nothing about its data.
fn check_comparable(
    name: &VolumeName,
    record: &VolumeRecord,
    mirror: Option<&MirrorConfig>,
) -> Result<(), ApiError> {
    if mirror.is_some_and(|mirror| mirror.in_sync.len() > 1) {
        return Ok(());
    }
    let message =
        format!("nothing was compared: volume {name} has fewer than two replicas in sync");
    let hint = match record.placements.len() {
        1 => format!("it has one replica; for another: windrose volume mirror add {name}"),
        _ => "`windrose status` shows why the others are not in sync; compare when they are"
            .to_owned(),
    };
    Err(conflict(message).with_hint(hint))
}

fn conflict(message: String) -> ApiError {
    ApiError::new(ErrorCode::Conflict, message)
}

fn set_stage(record: &mut VolumeRecord, node: NodeId, stage: PlacementStage) {
    if let Some(placement) = record.placement_mut(node) {
        placement.stage = stage;
    }
}

/// Why a node gets no replica now.
fn exclusion_reason(node: &NodeView) -> Option<&'static str> {
    match () {
        () if node.record.role == Role::Witness => Some("is a witness"),
        () if !node.is_alive => Some("is down, or cut off"),
        () if node.record.is_drained => Some("is drained"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use status::samples::node;
    use status::store_view::StoreView;

    use super::*;

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn together(b_is_alive: bool) -> ClusterView {
        ClusterView {
            this_node: A,
            nodes: [node(1, "a", true), node(2, "b", b_is_alive), node(3, "c", true)].into(),
            ..ClusterView::default()
        }
    }

    fn refused(together: &ClusterView) -> ApiError {
        check_not_running(together, &[B], &"web".parse().unwrap()).unwrap_err()
    }

    #[test]
    fn whether_a_node_is_alive_is_not_claimed_without_the_store_when_a_copy_is_forced() {
        let mut together = together(true);
        let (store, why) = ("etcd".into(), "no leader".into());
        let error = Some(StoreError::Unreachable { store, why });
        together.store = StoreView { error, ..StoreView::default() };
        let error = refused(&together);
        assert!(error.message.contains("whether node b runs"), "{error}");
        assert!(error.message.contains("cannot tell") && !error.message.contains("is running"));
        let hint = error.hint.unwrap();
        for part in ["restore a majority", "systemctl restart", "cluster recover --dry-run"] {
            assert!(hint.contains(part), "{hint}");
        }
        // No other node is in sync: it still needs the store.
        let alone = check_not_running(&together, &[], &"web".parse().unwrap()).unwrap_err();
        assert!(alone.message.contains("without the metadata store"), "{alone}");
    }

    #[test]
    fn a_copy_is_forced_only_once_the_others_are_known_not_to_run() {
        let mut down = together(false);
        assert!(check_not_running(&down, &[B], &"web".parse().unwrap()).is_ok());
        down = together(true);
        assert!(refused(&down).message.contains("node b is running"));
        down.stopped_answering = [B].into();
        let silent = refused(&down);
        assert!(silent.message.contains("does not respond"), "{silent}");
        assert!(!silent.message.contains("alive"), "{silent}");
        assert!(silent.hint.unwrap().contains("try again in 10 seconds"));
    }
}
