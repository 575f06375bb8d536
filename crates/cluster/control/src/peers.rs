//! The other nodes, as the volumes here use them: their addresses, and whether this node is
//! drained.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{ApiError, Cluster};
use cluster::nodes::{self, NodeView, Nodes};
use engine::PeerAddresses;
use peer::NodeId;
use records::record::{PlacementStage, VolumeRecord};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::Control;
use super::cluster_control::{drain_incomplete, find_node};
use crate::errors::store_error;

/// Longest wait until other nodes take over from a drained node.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// How often the waits above check.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Control {
    /// Gives a volume here the addresses of the other replicas' nodes.
    pub(super) async fn update_peers(&self, record: &VolumeRecord) {
        let Some(joined) = self.joined_cluster() else { return };
        let peers = peer_addresses(&joined.nodes.borrow(), joined.node, record);
        if let Err(error) = self.0.context.engine.set_peers(record.id, peers).await {
            tracing::warn!(volume = %record.name, %error, "cannot update the addresses of the \
                other replicas");
        }
    }

    /// Passes every change of the node list on to volumes and initiators.
    pub(super) async fn watch_nodes(self, mut nodes: watch::Receiver<Nodes>) {
        let mut drained = self.0.context.is_drained();
        while nodes.changed().await.is_ok() {
            for volume in self.0.context.volumes.open_volumes(self.this_node()) {
                self.update_peers(&volume.stored.record).await;
            }
            self.republish_catalog().await;
            if std::mem::replace(&mut drained, self.0.context.is_drained()) != drained {
                self.apply_drain_to_all().await;
            }
        }
    }

    /// Takes a node out of service, or back into service.
    ///
    /// # Errors
    /// [`api::ErrorCode::NotFound`] says that there is no such node.
    pub async fn set_drained(
        &self,
        which: Option<String>,
        drained: bool,
    ) -> Result<Cluster, ApiError> {
        let membership = self.0.cluster.require_membership()?;
        let node = match which {
            None => membership.identity().node,
            Some(which) => {
                let (nodes, _) =
                    nodes::list_readable(membership.store()).await.map_err(|e| store_error(&e))?;
                find_node(&nodes, &which)?.record.node
            }
        };
        let changed = nodes::set_drained(membership.store(), node, drained).await;
        if changed.map_err(|e| store_error(&e))? {
            tracing::info!(%node, drained, "drain state of a node changed");
        }
        let is_so =
            |nodes: &Nodes| nodes.get(&node).is_none_or(|view| view.record.is_drained == drained);
        self.0.cluster.await_nodes(is_so).await;
        if drained {
            self.await_drain(node).await?;
        }
        Ok(self.0.cluster.get_cluster().await)
    }

    /// Waits until the other nodes no longer depend on the replicas of a node.
    async fn await_drain(&self, node: NodeId) -> Result<(), ApiError> {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let mirrors = self.0.context.volumes.mirrors();
            let affected = mirrors.iter().filter(|(_, mirror)| mirror.member(node).is_some());
            let (alone, leaving): (Vec<_>, Vec<_>) =
                affected.partition(|(_, mirror)| mirror.others(node).next().is_none());
            if leaving.is_empty() && alone.is_empty() {
                return Ok(());
            }
            if leaving.is_empty() || Instant::now() >= deadline {
                let needed = alone.iter().chain(&leaving).map(|(id, _)| self.volume_name(**id));
                let names: Vec<_> = needed.collect();
                let runs =
                    self.0.context.cluster_view(&[]).await.is_none_or(|cluster| cluster.runs(node));
                return Err(drain_incomplete(&self.node_name(node), runs, &names.join(", ")));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// [`Self::apply_drain`] for all open volumes.
    pub(super) async fn apply_drain_to_all(&self) {
        for volume in self.0.context.volumes.open_volumes(self.this_node()) {
            self.apply_drain(volume.stored.record.id).await;
        }
    }

    /// Takes an open volume out of service if this node is drained, and back into service if not.
    pub(super) async fn apply_drain(&self, id: Uuid) {
        if self.joined_cluster().is_none() {
            return;
        }
        let leaving = self.0.context.volumes.get(id).is_some_and(|(stored, _)| {
            let placement = stored.record.placement(self.this_node());
            placement
                .is_some_and(|p| matches!(p.stage, PlacementStage::Removing { replaced_by: None }))
        });
        let result = if self.0.context.is_drained() {
            self.0.context.engine.leave_mirror(id).await.map(drop)
        } else if leaving {
            Ok(())
        } else {
            self.0.context.engine.rejoin_mirror(id).await
        };
        if let Err(error) = result {
            tracing::warn!(volume = %id, %error, "leaving or rejoining the mirror failed");
        }
    }
}

/// Addresses of the nodes that keep the other replicas of a volume.
fn peer_addresses(
    nodes: &Nodes,
    me: NodeId,
    record: &VolumeRecord,
) -> BTreeMap<NodeId, PeerAddresses> {
    let others = record
        .placements
        .iter()
        .filter(|placement| placement.node != me && placement.stage.has_image());
    let reached = |NodeView { record, .. }: &NodeView| PeerAddresses {
        data: record.data_addresses.clone(),
        heartbeat: record.heartbeat_addresses.clone(),
    };
    others
        .filter_map(|placement| Some((placement.node, reached(nodes.get(&placement.node)?))))
        .collect()
}
