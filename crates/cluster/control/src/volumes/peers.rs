//! The other nodes that keep replicas of the volumes here: their addresses, and leaving the mirrors
//! to them while this node is drained.

use std::collections::BTreeMap;

use cluster::nodes::{NodeView, Nodes};
use engine::PeerAddresses;
use peer::NodeId;
use records::record::{PlacementStage, VolumeRecord};
use uuid::Uuid;

use super::VolumeControl;

impl VolumeControl {
    /// Gives a volume here the addresses of the other replicas' nodes.
    pub(crate) async fn update_peers(&self, record: &VolumeRecord) {
        let Some(joined) = self.joined_cluster() else { return };
        let peers = peer_addresses(&joined.nodes.borrow(), joined.node, record);
        if let Err(error) = self.0.context.engine.set_peers(record.id, peers).await {
            tracing::warn!(volume = %record.name, %error, "cannot update the addresses of the \
                other replicas");
        }
    }

    /// [`Self::apply_drain`] for all open volumes.
    pub(crate) async fn apply_drain_to_all(&self) {
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
