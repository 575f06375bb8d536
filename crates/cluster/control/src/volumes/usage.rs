//! Whether initiators use a volume at other nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{ApiError, ErrorCode, VolumeName};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::VolumeControl;
use crate::errors::store_error;
use cluster::store::Revision;
use records::record::{PlacementStage, VolumeRecord, VolumeStage};
use status::report::NodeReport;

/// How long to wait for a node's report.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How often that wait checks.
const ANSWER_POLL: Duration = Duration::from_millis(100);

const FORCE_HINT: &str = "log out there first, or use --force (`force=true`)";

impl VolumeControl {
    /// Fails if initiators use a volume, or may use it, at other nodes.
    ///
    /// # Errors
    /// [`ErrorCode::InUse`] names the node; errors of the store.
    pub(super) async fn check_unused_on_peers(
        &self,
        id: Uuid,
        name: &VolumeName,
    ) -> Result<(), ApiError> {
        let Some(joined) = self.joined_cluster() else { return Ok(()) };
        // Read again: a replica that was just added counts.
        let stored = self.read_volume_record(id).await.map_err(|e| store_error(&e))?;
        let Some(stored) = stored else { return Ok(()) };
        let others = peers_with_replica(&stored.record, joined.node);
        let down = {
            let nodes = joined.nodes.borrow();
            let is_alive = |node: &NodeId| nodes.get(node).is_some_and(|view| view.is_alive);
            others.iter().find(|node| !is_alive(node)).copied()
        };
        if let Some(node) = down {
            // Otherwise the next check would fail because no replica serves.
            let is_served = self.is_served(&stored.record).await?;
            return Err(self.usage_unknown_error(name, node, is_served));
        }
        if others.is_empty() {
            return Ok(());
        }
        let request = self.0.context.request_reports(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            match peer_usage(&reports, &others, id, request) {
                PeerUsage::Unused => return Ok(()),
                PeerUsage::InUse(node, sessions) => {
                    return Err(self.in_use_error(name, node, sessions));
                }
                PeerUsage::Unknown(node) if Instant::now() >= deadline => {
                    return Err(self.usage_unknown_error(name, node, true));
                }
                PeerUsage::Unknown(_) => tokio::time::sleep(ANSWER_POLL).await,
            }
        }
    }

    fn in_use_error(&self, name: &VolumeName, node: NodeId, sessions: u32) -> ApiError {
        let node = self.node_name(node);
        let count = wire::plural(sessions, "session");
        let message = format!("volume {name} is in use by {count} at node {node}");
        ApiError::new(ErrorCode::InUse, message).with_hint(FORCE_HINT)
    }

    fn usage_unknown_error(&self, name: &VolumeName, node: NodeId, is_served: bool) -> ApiError {
        let node = self.node_name(node);
        let message = format!(
            "volume {name} may be in use at node {node}, which does not respond: it is down, or \
             cut off"
        );
        let hint = match is_served {
            true => {
                format!("bring node {node} back first, or use --force (`force=true`)")
            }
            false => format!(
                "bring node {node} back first. No reachable replica serves the volume; to delete \
                 it with all its data: windrose volume delete {name} --discard --force"
            ),
        };
        ApiError::new(ErrorCode::InUse, message).with_hint(hint)
    }
}

/// The nodes other than `me` through which initiators may use a volume.
fn peers_with_replica(record: &VolumeRecord, me: NodeId) -> Vec<NodeId> {
    // A volume that is not ready is not exported yet, or no longer.
    let placements = record.placements.iter().filter(|_| record.stage == VolumeStage::Ready);
    let open =
        placements.filter(|p| p.node != me && !matches!(p.stage, PlacementStage::Failed { .. }));
    open.map(|p| p.node).collect()
}

/// Who uses a volume at other nodes.
#[derive(Debug, PartialEq, Eq)]
enum PeerUsage {
    /// No initiator.
    Unused,
    /// So many sessions at this node, and maybe others elsewhere.
    InUse(NodeId, u32),
    /// This node has not answered yet, and the others report no session.
    Unknown(NodeId),
}

/// The sessions by reports that answer the request `request`; older reports do not count.
fn peer_usage(
    reports: &BTreeMap<NodeId, NodeReport>,
    nodes: &[NodeId],
    volume: Uuid,
    request: Revision,
) -> PeerUsage {
    let answer =
        |node: &NodeId| reports.get(node).filter(|report| report.answers_request >= request.0);
    let sessions = |node: &NodeId| answer(node)?.sessions.get(&volume).map(|n| (*node, *n));
    if let Some((node, count)) = nodes.iter().find_map(sessions) {
        return PeerUsage::InUse(node, count);
    }
    nodes
        .iter()
        .find(|node| answer(node).is_none())
        .map_or(PeerUsage::Unused, |n| PeerUsage::Unknown(*n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use records::samples::{place, record};

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn what_was_said_before_the_question_is_no_answer() {
        let volume = Uuid::from_u128(7);
        let report = |asked, count: Option<u32>| NodeReport {
            answers_request: asked,
            sessions: count.map(|n| (volume, n)).into_iter().collect(),
            ..NodeReport::default()
        };
        let look = |b, c| peer_usage(&[(B, b), (C, c)].into(), &[B, C], volume, Revision(5));
        assert_eq!(look(report(5, None), report(6, None)), PeerUsage::Unused);
        assert_eq!(look(report(5, None), report(4, None)), PeerUsage::Unknown(C));
        assert_eq!(look(report(4, Some(1)), report(5, None)), PeerUsage::Unknown(B));
        assert_eq!(look(report(4, None), report(5, Some(2))), PeerUsage::InUse(C, 2));
        assert_eq!(peer_usage(&BTreeMap::new(), &[B], volume, Revision(5)), PeerUsage::Unknown(B));
        assert_eq!(peer_usage(&BTreeMap::new(), &[], volume, Revision(5)), PeerUsage::Unused);
    }

    #[test]
    fn only_who_may_serve_a_volume_is_asked() {
        let mut volume = record("v");
        volume.stage = VolumeStage::Ready;
        volume.placements = vec![place(NodeId(1), "v"), place(B, "v"), place(C, "v")];
        assert_eq!(peers_with_replica(&volume, NodeId(1)), [B, C]);
        assert_eq!(
            peers_with_replica(&volume, NodeId(9)),
            [NodeId(1), B, C],
            "a witness was asked"
        );
        volume.placements[2].stage = PlacementStage::Failed { reason: "full".into() };
        assert_eq!(peers_with_replica(&volume, NodeId(1)), [B]);
        volume.stage = VolumeStage::Deleting;
        assert_eq!(peers_with_replica(&volume, NodeId(1)), []);
    }
}
