//! Takes nodes out of service, and passes changes of the node list on to the volumes.

use std::time::Duration;

use api::{ApiError, Cluster};
use cluster::nodes::{self, Nodes};
use peer::NodeId;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::Control;
use crate::cluster_control::{drain_incomplete, find_node};
use crate::errors::store_error;

/// Longest wait until other nodes take over from a drained node.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);

/// How often the waits above check.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Control {
    /// Passes every change of the node list on to volumes and initiators.
    pub(crate) async fn watch_nodes(self, mut nodes: watch::Receiver<Nodes>) {
        let mut drained = self.0.context.is_drained();
        while nodes.changed().await.is_ok() {
            for volume in self.0.context.volumes.open_volumes(self.0.context.this_node()) {
                self.0.volumes.update_peers(&volume.stored.record).await;
            }
            self.0.volumes.republish_catalog().await;
            if std::mem::replace(&mut drained, self.0.context.is_drained()) != drained {
                self.0.volumes.apply_drain_to_all().await;
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
                let needed =
                    alone.iter().chain(&leaving).map(|(id, _)| self.0.context.volume_name(**id));
                let names: Vec<_> = needed.collect();
                let runs =
                    self.0.context.cluster_view(&[]).await.is_none_or(|cluster| cluster.runs(node));
                return Err(drain_incomplete(
                    &self.0.context.node_name(node),
                    runs,
                    &names.join(", "),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}
