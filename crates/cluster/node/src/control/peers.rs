//! The other nodes of the cluster, as they matter to the volumes here: where they are reached, and
//! whether this one is to keep out of service.

use std::collections::BTreeMap;

use cluster::nodes::{NodeView, Nodes};
use peer::NodeId;
use tokio::sync::watch;
use uuid::Uuid;

use super::Control;
use crate::engine::PeerAddresses;
use crate::record::{PlaceStage, VolumeRecord};

impl Control {
    /// Has a volume here meet those of the other nodes.
    pub(super) async fn meet(&self, record: &VolumeRecord) {
        let Some(membership) = self.membership() else { return };
        let peers = addresses(&membership.nodes.borrow(), membership.node, record);
        if let Err(error) = self.0.engine.set_peers(record.id, peers).await {
            tracing::warn!(volume = %record.name, %error, "it does not meet the other nodes");
        }
    }

    /// Tells volumes and initiators of every change of the nodes.
    pub(super) async fn follow_nodes(self, mut nodes: watch::Receiver<Nodes>) {
        let mut drained = self.is_drained();
        while nodes.changed().await.is_ok() {
            for volume in self.0.state.open(self.me()) {
                self.meet(&volume.stored.record).await;
            }
            self.push_catalog().await;
            if std::mem::replace(&mut drained, self.is_drained()) != drained {
                self.heed_drain_everywhere().await;
            }
        }
    }

    /// Whether this node is to keep out of service.
    pub(super) fn is_drained(&self) -> bool {
        self.membership()
            .is_some_and(|m| m.nodes.borrow().get(&m.node).is_some_and(|node| node.record.drained))
    }

    /// [`Self::heed_drain`] for all open volumes.
    pub(super) async fn heed_drain_everywhere(&self) {
        for volume in self.0.state.open(self.me()) {
            self.heed_drain(volume.stored.record.id).await;
        }
    }

    /// Leaves an open volume to the others if this node is drained, and joins them again if not.
    pub(super) async fn heed_drain(&self, id: Uuid) {
        if self.membership().is_none() {
            return;
        }
        let leaving = self.0.state.get(id).is_some_and(|(stored, _)| {
            let place = stored.record.place(self.me());
            place.is_some_and(|p| matches!(p.stage, PlaceStage::Leaving { instead_of: None }))
        });
        let done = if self.is_drained() {
            self.0.engine.leave(id).await.map(drop)
        } else if leaving {
            Ok(())
        } else {
            self.0.engine.rejoin(id).await
        };
        if let Err(error) = done {
            tracing::warn!(volume = %id, %error, "a volume is neither left nor joined");
        }
    }
}

/// Where the nodes that keep the other copies of a volume are reached.
fn addresses(nodes: &Nodes, me: NodeId, record: &VolumeRecord) -> BTreeMap<NodeId, PeerAddresses> {
    let others = record.places.iter().filter(|place| place.node != me && place.stage.has_image());
    let reached = |NodeView { record, .. }: &NodeView| PeerAddresses {
        data: record.data.clone(),
        heartbeat: record.heartbeat.clone(),
    };
    others.filter_map(|place| Some((place.node, reached(nodes.get(&place.node)?)))).collect()
}
