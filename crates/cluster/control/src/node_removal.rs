//! Removes the replicas of a dead node from all volumes.
//!
//! Nothing is changed while a volume needs such a replica. After that check volumes are changed one
//! by one. If a volume changes concurrently, its removal is decided again; a node that is alive
//! again keeps what it has.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use api::{ApiError, Cluster, LeaveClusterRequest, VolumeName};
use cluster::join_error::JoinError;
use cluster::mirror_records;
use cluster::node_membership::{self, store_member_name};
use cluster::nodes;
use cluster::store::{Change, MetadataStore, Precondition, StoreError};
use peer::NodeId;
use uuid::Uuid;

use super::Control;
use super::cluster_control::{find_node, join_error, member_not_removed};
use crate::errors::{conflict, store_error};
use crate::volumes::reconciler::random_config_id;
use records::record::{self, StoredVolumeRecord, VOLUMES, VolumeStage};

/// How often the removal of one replica is decided while its volume keeps changing.
const ATTEMPTS: u32 = 20;

/// Least pause before the next attempt; it grows with each attempt.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Most volumes that an error names.
const MAX_NAMED: usize = 40;

/// A replica that is to be removed.
struct PlannedRemoval {
    volume: Uuid,
    name: VolumeName,
    changes: Vec<Change>,
}

/// The decision about one volume.
enum RemovalDecision {
    /// These changes remove the replica.
    Remove(Vec<Change>),
    /// Only this replica may hold the newest data.
    Needed {
        /// Whether the volume has no other replica.
        is_only: bool,
    },
    /// The volume has no such replica any more.
    NoPlacement,
}

/// Why a replica was not removed.
#[derive(Debug)]
enum RemovalError {
    /// Its node is alive again.
    NodeAlive,
    /// Only this replica may hold the newest data now.
    Needed {
        /// Whether the volume has no other replica.
        is_only: bool,
    },
    /// The volume changed during each attempt.
    Busy,
    /// Any other error.
    Other(ApiError),
}

impl Control {
    /// Removes this node, or a dead one, from the cluster.
    ///
    /// # Errors
    /// [`api::ErrorCode::Conflict`] says what prevents it; [`api::ErrorCode::NotFound`] for an
    /// unknown node.
    pub async fn leave_cluster(&self, leave: LeaveClusterRequest) -> Result<Cluster, ApiError> {
        match leave.node {
            None if leave.force => self.0.cluster.force_leave(),
            None => self.0.cluster.leave_orderly().await,
            Some(node) => self.remove_node(&node, leave.force).await,
        }
    }

    async fn remove_node(&self, which: &str, force: bool) -> Result<Cluster, ApiError> {
        let cluster = &self.0.cluster;
        let membership = cluster.require_membership()?;
        let (nodes, _) =
            nodes::list_readable(membership.store()).await.map_err(|e| store_error(&e))?;
        let dead = match find_node(&nodes, which) {
            Ok(dead) => dead,
            Err(unknown) => {
                return cluster.remove_stray_store_member(&nodes, which, force, unknown).await;
            }
        };
        let (node, name) = (dead.record.node, &dead.record.name);
        if node == membership.identity().node {
            return Err(conflict(
                "that is the node that handles this request",
                "`windrose cluster leave` without --node removes it from the cluster",
            ));
        }
        if dead.is_alive {
            let message = format!("node {name} is running, or was 10 seconds ago");
            let hint = format!("to remove it: `windrose cluster leave` at node {name}");
            return Err(conflict(message, &hint));
        }
        if !force {
            let message = format!(
                "this would remove node {name} from the cluster for good, with \
                all its replicas"
            );
            let hint = format!("to remove it: windrose cluster leave --node {name} --force");
            return Err(conflict(message, &hint));
        }
        let emptied = self.remove_replicas_of_node(node, name).await?;
        cluster.check_has_no_replicas(node).await?;
        // A node that is alive again stays.
        node_membership::remove_dead_node(membership.store(), node).await.map_err(|e| match e {
            JoinError::StillAlive { .. } => node_alive_error(name, &emptied),
            e => join_error(&e),
        })?;
        let at: Vec<_> = dead.record.data_addresses.iter().map(SocketAddr::ip).collect();
        let removed =
            node_membership::remove_member(membership.store(), &store_member_name(node), &at).await;
        removed.map_err(|e| member_not_removed(name, node, &e))?;
        tracing::warn!(%node, name, "node removed from the cluster");
        cluster.await_nodes(|nodes| !nodes.contains_key(&node)).await;
        Ok(cluster.get_cluster().await)
    }

    /// Removes the replicas of a dead node from all volumes, or from none if one needs them.
    /// Returns the volumes.
    pub(super) async fn remove_replicas_of_node(
        &self,
        node: NodeId,
        name: &str,
    ) -> Result<Vec<VolumeName>, ApiError> {
        let (entries, _) = self.0.context.meta.list(VOLUMES).await.map_err(|e| store_error(&e))?;
        let mut removals = Vec::new();
        let mut needed = Vec::new();
        for entry in &entries {
            let stored = record::decode(entry).map_err(|e| store_error(&e))?;
            let (volume, name) = (stored.record.id, stored.record.name.clone());
            match self.decide_removal(stored, node).await? {
                RemovalDecision::Remove(changes) => {
                    removals.push(PlannedRemoval { volume, name, changes });
                }
                RemovalDecision::Needed { is_only } => needed.push((name, is_only)),
                RemovalDecision::NoPlacement => {}
            }
        }
        if !needed.is_empty() {
            return Err(newest_data_error(name, &needed, "no volume was changed"));
        }
        let mut removed = Vec::new();
        let mut removals = removals.into_iter();
        while let Some(PlannedRemoval { volume, name: of, changes }) = removals.next() {
            let decide_again = || self.decide_removal_again(volume, node);
            match remove_placement(&*self.0.context.meta, node, changes, decide_again).await {
                Ok(()) => {
                    tracing::warn!(volume = %of, node = name, "replica of a lost node removed");
                    removed.push(of);
                }
                Err(error) => {
                    let left: Vec<_> =
                        std::iter::once(of).chain(removals.map(|r| r.name)).collect();
                    return Err(partial_removal_error(name, &error, &removed, &left));
                }
            }
        }
        Ok(removed)
    }

    async fn decide_removal_again(
        &self,
        volume: Uuid,
        node: NodeId,
    ) -> Result<RemovalDecision, ApiError> {
        match self.0.context.read_volume_record(volume).await.map_err(|e| store_error(&e))? {
            Some(stored) => self.decide_removal(stored, node).await,
            None => Ok(RemovalDecision::NoPlacement),
        }
    }

    /// The changes that remove a node's replica from a volume.
    async fn decide_removal(
        &self,
        stored: StoredVolumeRecord,
        node: NodeId,
    ) -> Result<RemovalDecision, ApiError> {
        let StoredVolumeRecord { mut record, revision } = stored;
        if record.placement(node).is_none() {
            return Ok(RemovalDecision::NoPlacement);
        }
        let mirror = mirror_records::get_record(&*self.0.context.meta, record.id).await;
        let mirror = mirror.map_err(|e| store_error(&e))?;
        if record.stage == VolumeStage::Ready {
            let needed = mirror.as_ref().is_none_or(|(m, _)| m.member(node).is_some());
            let is_only = record.placements.len() == 1;
            if needed || is_only {
                return Ok(RemovalDecision::Needed { is_only });
            }
            self.0.volumes.check_can_drop_replica(&record, node).await?;
        }
        // The number of replicas wanted stays, so the missing one is reported.
        record.remove_placement(node);
        let mut changes = record.replace_changes(revision);
        if let Some((current, at)) = mirror {
            changes.push(match current.without_replica(node, random_config_id()) {
                Ok(next) => mirror_records::replacement(record.id, at, &next),
                // Fails if the record has changed since the decision.
                Err(_) => Change {
                    key: mirror_records::record_key(record.id),
                    precondition: Precondition::GuardAtRevision(at),
                    value: None,
                },
            });
        }
        Ok(RemovalDecision::Remove(changes))
    }
}

/// The error for a node that was alive again after its replicas were removed from these volumes.
pub(super) fn node_alive_error(node: &str, removed: &[VolumeName]) -> ApiError {
    partial_removal_error(node, &RemovalError::NodeAlive, removed, &[])
}

/// Removes a replica from one volume unless its node is alive again. Decides again after a
/// concurrent change.
async fn remove_placement<F, Fut>(
    meta: &dyn MetadataStore,
    node: NodeId,
    mut changes: Vec<Change>,
    mut decide_again: F,
) -> Result<(), RemovalError>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<RemovalDecision, ApiError>>,
{
    let stored = |e: &StoreError| RemovalError::Other(store_error(e));
    let alive = nodes::alive_key(node);
    for attempt in 1..=ATTEMPTS {
        changes.push(Change {
            key: alive.clone(),
            precondition: Precondition::Absent,
            value: None,
        });
        match meta.commit(changes).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(stored(&error)),
        }
        if meta.get(&alive).await.map_err(|e| stored(&e))?.is_some() {
            return Err(RemovalError::NodeAlive);
        }
        tokio::time::sleep(RETRY_PAUSE * attempt).await;
        changes = match decide_again().await.map_err(RemovalError::Other)? {
            RemovalDecision::Remove(changes) => changes,
            RemovalDecision::Needed { is_only } => return Err(RemovalError::Needed { is_only }),
            RemovalDecision::NoPlacement => return Ok(()),
        };
    }
    Err(RemovalError::Busy)
}

/// The error for a dead node that has the newest data of volumes, or all of it: each volume with
/// whether it has no other replica.
fn newest_data_error(node: &str, needed: &[(VolumeName, bool)], but: &str) -> ApiError {
    let names: Vec<_> = needed.iter().map(|(volume, _)| volume.clone()).collect();
    let what = if needed.len() == 1 { "volume" } else { "volumes" };
    let message =
        format!("node {node} has the newest data of {what} {}; {but}", join_names(&names));
    let helps = needed.iter().take(MAX_NAMED).map(|(volume, is_only)| {
        // The node is down: whether an initiator uses the volume there is unknown.
        let delete = format!("windrose volume delete {volume} --discard --force");
        match is_only {
            true => format!("to delete the volume with the data that only this node has: {delete}"),
            false => format!(
                "first make another replica the primary: windrose volume force-primary {volume}, \
                 at the node that has it; or: {delete}"
            ),
        }
    });
    let hint = format!("bring node {node} back; or {}", helps.collect::<Vec<_>>().join("; "));
    conflict(message, &hint)
}

/// The error for a removal that stopped half way, with the volumes done.
fn partial_removal_error(
    node: &str,
    error: &RemovalError,
    removed: &[VolumeName],
    left: &[VolumeName],
) -> ApiError {
    let so_far = match removed {
        [] => "no volume was changed".to_owned(),
        removed if left.is_empty() => {
            format!("its replicas of {} were already removed", join_names(removed))
        }
        removed => format!(
            "its replicas of {} were already removed, and it still has those of {}",
            join_names(removed),
            join_names(left)
        ),
    };
    let first = left.first().map(ToString::to_string).unwrap_or_default();
    let again = format!("to continue: `windrose cluster leave --node {node} --force`");
    match error {
        RemovalError::NodeAlive => conflict(
            format!("node {node} is running again and stays in the cluster; {so_far}"),
            &format!(
                "missing replicas are recreated (`windrose status`); to remove the node, run \
                 `windrose cluster leave` at node {node}"
            ),
        ),
        RemovalError::Needed { is_only } => {
            let first: Vec<_> =
                left.first().map(|volume| (volume.clone(), *is_only)).into_iter().collect();
            newest_data_error(node, &first, &so_far)
        }
        RemovalError::Busy => conflict(format!("volume {first} keeps changing; {so_far}"), &again),
        RemovalError::Other(error) => {
            let message = format!("volume {first}: {}; {so_far}", error.message);
            let hint = error.hint.iter().cloned().chain([again]).collect::<Vec<_>>().join("; ");
            ApiError::new(error.code, message).with_hint(hint)
        }
    }
}

/// Their names, up to a limit.
fn join_names(volumes: &[VolumeName]) -> String {
    let names: Vec<_> = volumes.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    match volumes.len() - names.len() {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use cluster::store::memory::{CallDelivery, MemoryStore, MemoryStoreClient};

    use super::*;

    const GONE: NodeId = NodeId(2);
    const KEY: &str = "volumes/x";

    fn store(model: &MemoryStore) -> MemoryStoreClient {
        model.client(Duration::from_secs(1), Box::new(|_| CallDelivery::IMMEDIATE))
    }

    async fn put(meta: &dyn MetadataStore, key: &str) {
        let held = meta.get(key).await.unwrap();
        let expect =
            held.map_or(Precondition::Absent, |held| Precondition::AtRevision(held.revision));
        let value = Some(b"changed".to_vec());
        meta.commit(vec![Change { key: key.to_owned(), precondition: expect, value }])
            .await
            .unwrap();
    }

    /// The changes that remove the replica from the volume as it is now.
    async fn removal(meta: &dyn MetadataStore) -> Vec<Change> {
        let at = meta.get(KEY).await.unwrap().unwrap().revision;
        vec![Change {
            key: KEY.to_owned(),
            precondition: Precondition::AtRevision(at),
            value: Some(b"taken".to_vec()),
        }]
    }

    async fn holds(meta: &dyn MetadataStore) -> Vec<u8> {
        meta.get(KEY).await.unwrap().unwrap().value
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_is_changed_meanwhile_is_decided_anew() {
        let model = MemoryStore::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let first = removal(&meta).await;
        put(&meta, KEY).await;
        let looks = Cell::new(0);
        let anew = async || {
            looks.set(looks.get() + 1);
            let changes = removal(&meta).await;
            if looks.get() < 3 {
                // A concurrent change during each of two attempts.
                put(&meta, KEY).await;
            }
            Ok(RemovalDecision::Remove(changes))
        };
        remove_placement(&meta, GONE, first, anew).await.unwrap();
        assert_eq!((looks.get(), holds(&meta).await), (3, b"taken".to_vec()));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_changed_all_the_time_is_given_up_in_the_end() {
        let model = MemoryStore::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let first = removal(&meta).await;
        put(&meta, KEY).await;
        let anew = async || {
            let changes = removal(&meta).await;
            put(&meta, KEY).await;
            Ok(RemovalDecision::Remove(changes))
        };
        assert!(matches!(
            remove_placement(&meta, GONE, first, anew).await,
            Err(RemovalError::Busy)
        ));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_that_is_needed_by_now_or_gone_is_left_alone() {
        let model = MemoryStore::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let old = removal(&meta).await;
        put(&meta, KEY).await;
        let needed = async || Ok(RemovalDecision::Needed { is_only: false });
        assert!(matches!(
            remove_placement(&meta, GONE, old.clone(), needed).await,
            Err(RemovalError::Needed { .. })
        ));
        remove_placement(&meta, GONE, old, async || Ok(RemovalDecision::NoPlacement))
            .await
            .unwrap();
        assert_eq!(holds(&meta).await, b"changed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_alive_again_keeps_its_copies() {
        let model = MemoryStore::default();
        let meta = store(&model);
        put(&meta, KEY).await;
        let changes = removal(&meta).await;
        put(&meta, &nodes::alive_key(GONE)).await;
        let never =
            async || -> Result<RemovalDecision, ApiError> { panic!("there is nothing to decide") };
        let kept = remove_placement(&meta, GONE, changes, never).await;
        assert!(matches!(kept, Err(RemovalError::NodeAlive)));
        assert_eq!(holds(&meta).await, b"changed");
    }

    #[test]
    fn an_early_end_says_what_was_done_and_what_is_left() {
        let names = |names: &[&str]| -> Vec<VolumeName> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let (done, left) = (names(&["v1", "v2"]), names(&["v3", "v4"]));
        let busy = partial_removal_error("b", &RemovalError::Busy, &done, &left);
        assert_eq!(
            busy.message,
            "volume v3 keeps changing; its replicas of v1, v2 were already removed, and it still \
             has those of v3, v4"
        );
        assert!(busy.hint.unwrap().contains("windrose cluster leave --node b --force"));
        let none = partial_removal_error("b", &RemovalError::NodeAlive, &[], &left).message;
        assert_eq!(none, "node b is running again and stays in the cluster; no volume was changed");
        let all = node_alive_error("b", &done).message;
        assert!(all.ends_with("; its replicas of v1, v2 were already removed"), "{all}");
        let needed =
            partial_removal_error("b", &RemovalError::Needed { is_only: false }, &done, &left)
                .message;
        assert!(needed.starts_with("node b has the newest data of volume v3; its replicas of v1"));
        let store =
            RemovalError::Other(ApiError::new(api::ErrorCode::Unavailable, "the store is away"));
        let store = partial_removal_error("b", &store, &done, &left);
        assert!(store.message.starts_with("volume v3: the store is away; its replicas of v1, v2"));
        let many: Vec<VolumeName> = (0..100).map(|n| format!("v{n}").parse().unwrap()).collect();
        assert!(join_names(&many).ends_with("v39 and 60 more"));
    }

    #[test]
    fn what_needs_a_dead_node_is_told_with_commands_that_are_not_refused() {
        let volume = |name: &str| name.parse::<VolumeName>().unwrap();
        let needed = [(volume("solo"), true), (volume("both"), false)];
        let refused = newest_data_error("b", &needed, "no volume was changed");
        assert!(refused.message.contains("volumes solo, both; no volume was changed"));
        let hint = refused.hint.unwrap();
        let solo = "to delete the volume with the data that only this node has: windrose volume \
            delete solo --discard --force;";
        assert!(hint.starts_with("bring node b back; or ") && hint.contains(solo), "{hint}");
        assert!(!hint.contains("volume force-primary solo"), "there is no other copy: {hint}");
        assert!(
            hint.contains("windrose volume force-primary both, at the node that has it"),
            "{hint}"
        );
        assert!(hint.ends_with("windrose volume delete both --discard --force"), "{hint}");
    }
}
