//! Repairs volumes that have fewer replicas than wanted (RFD 0039).
//! [`decision`](status::repair::decision) decides; the primary of the volume acts, and commits only
//! against the very records from which it decided. So one node acts even if two believe that they
//! are primary.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::NewBacking;
use cluster::store::{Revision, StoreError};
use cluster::{mirror_records, nodes};
use disk::format_utc;
use engine::CoreReport;
use mirror::config::MirrorConfig;
use peer::NodeId;
use records::record::{ReplicaPlacement, StoredVolumeRecord, VolumeRecord};
use status::old_images::overwrite_hint_after_failure;
use status::placement::{self, Candidate};
use status::repair::decision::{
    AbortReason, RepairAction, RepairHistory, RepairPolicy, Timestamp, WaitReason, apply_action,
    decide_repair, start_repair,
};
use status::repair::{combine_wait_reason, no_node_for_repair, placement_nodes};
use status::report::MissingReplica;
use tokio::time::Instant;
use uuid::Uuid;

use super::VolumeControl;
use crate::context::now_s;
use crate::volume_table::ReadyVolume;

/// How often a node is searched again for a replica that has to wait or for which no node was
/// found.
const PLACEMENT_RETRY: Duration = Duration::from_secs(30);

/// What a node remembers about missing replicas.
#[derive(Debug, Default)]
pub(crate) struct RepairState {
    history: RepairHistory,
    /// Volumes for which a node was searched: until when the result holds, and why none was found.
    placement_attempts: BTreeMap<Uuid, (Instant, Option<MissingReplica>)>,
}

impl VolumeControl {
    /// Repairs the volumes whose primary is this node.
    pub(crate) async fn repair_replicas(&self, cores: &[CoreReport], repairs: &mut RepairState) {
        if !self.is_data_node() {
            return;
        }
        let now = Timestamp { at: Instant::now(), wall_s: now_s() };
        let volumes = self.0.context.volumes.ready_volumes(self.this_node());
        let down = self.down_nodes(&volumes).await;
        let RepairState { history, placement_attempts: attempts } = repairs;
        history.observe_nodes(now, down.as_ref().ok());
        if let Err(error) = down {
            tracing::debug!(%error, "cannot read which nodes are down");
            return;
        }
        attempts.retain(|_, (until, _)| now.at < *until);
        history.retain_volumes(&volumes.iter().map(|v| v.stored.record.id).collect());
        let mirrored =
            volumes.iter().filter_map(|v| Some((&v.stored.record, &v.mirror.as_ref()?.0)));
        let mirrored: Vec<_> = mirrored.collect();
        mirrored.iter().for_each(|(record, mirror)| history.observe_volume(record, mirror, now));
        let serving = serving_volumes(cores);
        let is_primary = |(record, mirror): &&(&VolumeRecord, &MirrorConfig)| {
            mirror.primary == self.this_node() && serving.contains(&record.id)
        };
        let led: Vec<_> = mirrored.iter().filter(is_primary).collect();
        let repaired = led.iter().filter_map(|(record, _)| record.repair.as_ref());
        let mut policy = RepairPolicy {
            delay: self.0.context.settings.cluster.repair_after,
            max_concurrent: self.0.context.settings.cluster.resyncs,
            // Repairs on nodes that are down do not count.
            running: repaired.filter(|repair| !history.is_down(repair.node)).count(),
        };
        let mut missing_replicas = BTreeMap::new();
        for (record, mirror) in led {
            let id = record.id;
            let known = attempts.get(&id).map(|(_, missing)| missing.clone());
            let missing = match (decide_repair((record, mirror), history, policy, now), known) {
                (RepairAction::Nothing, _) => None,
                (RepairAction::Wait(wait), known) => {
                    let no_node = match known {
                        Some(known) => known,
                        None => {
                            let replaces = history.node_to_replace(record, mirror);
                            let no_node = self.why_no_repair_node(record, replaces).await;
                            attempts.insert(id, (now.at + PLACEMENT_RETRY, no_node.clone()));
                            no_node
                        }
                    };
                    let waiting = self.repair_wait_text(record, &wait, history);
                    Some(combine_wait_reason(&wait, waiting, no_node))
                }
                (RepairAction::Start { .. }, Some(Some(missing))) => Some(missing),
                _ => self.repair_volume(id, history, &mut policy, now).await.inspect(|missing| {
                    attempts.insert(id, (now.at + PLACEMENT_RETRY, Some(missing.clone())));
                }),
            };
            missing_replicas.extend(missing.map(|missing| (id, missing)));
        }
        self.0.context.volumes.set_missing_replicas(missing_replicas);
    }

    /// The nodes that are down by the store, except for drained ones.
    async fn down_nodes(&self, volumes: &[ReadyVolume]) -> Result<BTreeSet<NodeId>, StoreError> {
        let alive = nodes::list_alive(&*self.0.context.meta).await?;
        let me = self.this_node();
        if !alive.contains(&me) {
            // A node that is down by the store must not judge others.
            return Err(StoreError::Conflict { key: nodes::alive_key(me) });
        }
        let known = self.joined_cluster().map(|m| m.nodes.borrow().clone()).unwrap_or_default();
        let named = volumes.iter().flat_map(|v| v.stored.record.placements.iter().map(|p| p.node));
        let all: BTreeSet<_> = known.keys().copied().chain(named).collect();
        let drained = |node: &NodeId| known.get(node).is_some_and(|view| view.record.is_drained);
        Ok(all.into_iter().filter(|node| !alive.contains(node) && !drained(node)).collect())
    }

    /// Decides by the current records, and acts. Returns why a repair waits.
    async fn repair_volume(
        &self,
        id: Uuid,
        history: &mut RepairHistory,
        policy: &mut RepairPolicy,
        now: Timestamp,
    ) -> Option<MissingReplica> {
        let lock = self.0.context.volumes.lock_of(id);
        // Another change is in progress: the next round retries.
        let Ok(_held) = lock.try_lock() else { return None };
        let StoredVolumeRecord { mut record, revision } =
            self.read_volume_record(id).await.ok()??;
        let (mirror, at) = mirror_records::get_record(&*self.0.context.meta, id).await.ok()??;
        if mirror.primary != self.this_node() {
            return None;
        }
        let action = decide_repair((&record, &mirror), history, *policy, now);
        match &action {
            RepairAction::Nothing | RepairAction::Wait(_) => return None,
            RepairAction::Start { replaces } => {
                match self.choose_repair_placement(&record, *replaces, history).await {
                    Ok(placement) => start_repair(&mut record, *replaces, placement, now),
                    Err(missing) => return Some(missing),
                }
            }
            _ => apply_action(&mut record, &action),
        }
        if let Err(error) = self.commit_repair(&record, revision, (&mirror, at)).await {
            tracing::info!(volume = %record.name, %error, "repair: commit failed; nothing was changed");
        } else {
            if matches!(action, RepairAction::Start { .. }) {
                policy.running += 1;
            }
            self.log_repair(&record, &action, history, now);
        }
        self.reconcile_locked(id).await;
        None
    }

    async fn commit_repair(
        &self,
        record: &VolumeRecord,
        revision: Revision,
        (mirror, at): (&MirrorConfig, Revision),
    ) -> Result<(), StoreError> {
        let mut changes = record.replace_changes(revision);
        // Unchanged: makes the commit fail if the mirror has changed since the decision.
        changes.push(mirror_records::replacement(record.id, at, mirror));
        self.0.context.meta.commit(changes).await.map(drop)
    }

    /// Logs the action, and records failures.
    fn log_repair(
        &self,
        record: &VolumeRecord,
        action: &RepairAction,
        history: &mut RepairHistory,
        now: Timestamp,
    ) {
        let volume = &record.name;
        let named = |node: &NodeId| self.node_name(*node);
        match action {
            RepairAction::Nothing | RepairAction::Wait(_) => {}
            RepairAction::Start { replaces } => {
                let node = record.repair.as_ref().map(|repair| named(&repair.node));
                let replaces = replaces.as_ref().map(named);
                tracing::warn!(%volume, node, instead_of = replaces, "repair: creating a missing replica");
            }
            RepairAction::Complete => {
                history.clear_failures(record.id);
                tracing::info!(%volume, "repair: completed");
            }
            RepairAction::Abort { node, why } => {
                let why = match why {
                    AbortReason::Failed(why) => {
                        history.record_failure(record.id, *node, why, now);
                        why.clone()
                    }
                    AbortReason::OriginalInSync(back) => {
                        format!("the one on {} is back in sync", named(back))
                    }
                    AbortReason::NodeDown => "its node is down".to_owned(),
                };
                let node = named(node);
                tracing::warn!(%volume, node, why, "repair: new replica abandoned");
            }
            RepairAction::RemoveSurplus(node) => {
                let node = named(node);
                tracing::info!(%volume, node, "repair: removing a surplus replica");
            }
            RepairAction::Reinstate { node, .. } => {
                let node = named(node);
                tracing::info!(%volume, node, "repair: original replica reinstated");
            }
        }
    }

    /// Why no replica is made yet, as text.
    fn repair_wait_text(
        &self,
        record: &VolumeRecord,
        wait: &WaitReason,
        history: &RepairHistory,
    ) -> MissingReplica {
        let why = match wait {
            WaitReason::Disabled => format!(
                "automatic repair is disabled (cluster.repair_after_s is \"off\" at node {})",
                self.0.context.settings.name
            ),
            WaitReason::NotDue(due) => {
                format!("a replacement is created automatically from {}", format_utc(due.wall_s))
            }
            WaitReason::Backoff { until, why } => {
                let failed = history.failed_nodes(record.id);
                let backing = self.repair_backing(record, None).unwrap_or_default();
                let next = overwrite_hint_after_failure(record, &backing, why, &failed, |node| {
                    self.node_name(node)
                });
                let until = format_utc(until.wall_s);
                let why = format!(
                    "a replacement could not be created ({why}); next attempt from {until}"
                );
                return MissingReplica { why, next_step: next };
            }
            WaitReason::ConcurrencyLimit => {
                "a replacement is created after those of other volumes".to_owned()
            }
            WaitReason::NoFreePlacement => {
                let why = "replicas on nodes that are down occupy all its placements";
                let next = "remove a node that is lost for good: windrose cluster leave --node \
                    NODE --force";
                return MissingReplica { why: why.to_owned(), next_step: Some(next.to_owned()) };
            }
        };
        MissingReplica { why, next_step: None }
    }

    /// The nodes that could keep the missing replica, space aside, and the backing it would have.
    async fn repair_candidates(
        &self,
        record: &VolumeRecord,
        replaces: Option<NodeId>,
    ) -> Result<(NewBacking, Vec<Candidate>), MissingReplica> {
        let name = &record.name;
        let Some(backing) = self.repair_backing(record, replaces) else {
            let why = "its replicas are on files or devices that an administrator chose, so none \
                is created automatically";
            let next = format!(
                "windrose volume mirror add {name} --on NODE --device DEVICE (or --path FILE, --pool POOL)"
            );
            return Err(MissingReplica { why: why.to_owned(), next_step: Some(next) });
        };
        let free = self.free_space_by_node(&backing).await;
        let mut candidates = self.candidates_for(&backing, &free);
        let old = self.old_images(Some(record.id)).await;
        self.exclude_old_images(&mut candidates, record, &backing, &old);
        Ok((backing, candidates))
    }

    /// Why no node can keep the missing replica whatever its free space, if so.
    async fn why_no_repair_node(
        &self,
        record: &VolumeRecord,
        replaces: Option<NodeId>,
    ) -> Option<MissingReplica> {
        let (backing, candidates) = match self.repair_candidates(record, replaces).await {
            Ok(found) => found,
            Err(missing) => return Some(missing),
        };
        let taken = placement_nodes(record);
        let has = candidates.iter().any(|c| c.exclusion.is_none() && !taken.contains(&c.node));
        (!has).then(|| no_node_for_repair(record, &backing, &candidates))
    }

    /// Chooses the placement of the new replica.
    async fn choose_repair_placement(
        &self,
        record: &VolumeRecord,
        replaces: Option<NodeId>,
        history: &RepairHistory,
    ) -> Result<ReplicaPlacement, MissingReplica> {
        let (backing, mut candidates) = self.repair_candidates(record, replaces).await?;
        let taken = placement_nodes(record);
        let is_fit = |c: &Candidate| c.exclusion.is_none() && !taken.contains(&c.node);
        let (need, promised) = match candidates.iter().any(is_fit) {
            true => self.space_needed(record).await,
            false => Default::default(),
        };
        for candidate in &mut candidates {
            let promised = promised.get(&candidate.node).copied().unwrap_or(0);
            if candidate.free_bytes.saturating_sub(promised) < need {
                candidate.exclusion = candidate.exclusion.or(Some("has not enough free space"));
            }
        }
        let failed = history.failed_nodes(record.id);
        if candidates.iter().any(|c| is_fit(c) && !failed.contains(&c.node)) {
            candidates.retain(|c| !failed.contains(&c.node));
        }
        let chosen = placement::choose_nodes(&candidates, &taken, &[], 1);
        let node = chosen.ok().and_then(|nodes| nodes.first().copied());
        let node = node.ok_or_else(|| no_node_for_repair(record, &backing, &candidates))?;
        let placement = self.new_placement(record.id, &record.name, node, &backing, false);
        placement.map_err(|e| MissingReplica { why: e.message, next_step: e.hint })
    }

    /// The backing for the new replica, like that of the missing one or of an existing one, if
    /// every node can have such a backing: the pool of that name, or the node's own directory.
    fn repair_backing(
        &self,
        record: &VolumeRecord,
        replaces: Option<NodeId>,
    ) -> Option<NewBacking> {
        let first = replaces.into_iter().chain([self.this_node()]);
        let all =
            first.filter_map(|node| record.placement(node)).chain(record.current_placements());
        let mut backings = all
            .filter_map(|placement| placement::equivalent_backing(&placement.backing, record.id));
        backings.next()
    }

    /// How many bytes a replica of a volume takes, and by node what replicas being made still need.
    async fn space_needed(&self, record: &VolumeRecord) -> (u64, BTreeMap<NodeId, u64>) {
        let volumes = self.0.context.volumes.all();
        let space = self.space_of(&volumes).await;
        let need = |record: &VolumeRecord| {
            let taken = space.allocated.get(&record.id).filter(|_| record.thin);
            taken.copied().unwrap_or(record.size_bytes)
        };
        let mut promised = BTreeMap::<NodeId, u64>::new();
        for (StoredVolumeRecord { record, .. }, _) in &volumes {
            if let Some(repair) = &record.repair {
                let of = promised.entry(repair.node).or_default();
                *of = of.saturating_add(need(record));
            }
        }
        (need(record), promised)
    }
}

/// The volumes that are served here.
fn serving_volumes(cores: &[CoreReport]) -> BTreeSet<Uuid> {
    let volumes = cores.iter().flat_map(|core| &core.volumes);
    let serves =
        volumes.filter(|v| v.mirror.as_ref().is_some_and(|m| m.status.not_serving.is_none()));
    serves.map(|volume| volume.id).collect()
}
