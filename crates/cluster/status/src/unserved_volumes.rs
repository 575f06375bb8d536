//! Why a volume of a cluster is not served, and the next step, as far as one node knows.

use peer::NodeId;
use records::record::{PlacementStage, ReplicaPlacement, VolumeRecord};

use crate::WAIT_HINT;
use crate::cluster_view::{ClusterView, NodeState};
use crate::replica_state::open_failed_hint;
use crate::report::ReportedMirror;

/// Why a volume with several replicas and no mirror record is not served.
pub(crate) const MIRROR_RECORD_LOST: &str =
    "its mirror configuration is lost: it is unknown which replica is the newest";

impl ClusterView {
    /// Why a volume is not served by this node.
    pub(crate) fn why_not_served_here(&self, record: &VolumeRecord) -> String {
        if record.placement(self.this_node).is_none() {
            return format!("{} has no replica of it", self.node_name(self.this_node));
        }
        if self.nodes.get(&self.this_node).is_some_and(|view| view.record.is_drained) {
            let name = self.node_name(self.this_node);
            return format!("node {name} is drained (windrose node resume {name})");
        }
        let reported = self.reported_mirror(self.this_node, record.id);
        let reservations = reported.and_then(unreadable_reservations_text);
        let here = reservations.or_else(|| reported.and_then(|s| s.not_serving_reason.clone()));
        here.unwrap_or_else(|| "it is being opened".into())
    }

    /// Why no node serves a volume, node by node, as far as is known here; and the next step.
    pub(crate) fn why_unserved(&self, record: &VolumeRecord) -> (String, String) {
        let all = record.placements.iter().map(|placement| self.why_unserved_on(record, placement));
        let (mut says, mut next) = (Vec::new(), Vec::new());
        for (why, step) in all {
            says.push(why);
            if !next.contains(&step) {
                next.push(step);
            }
        }
        let is_wait = |step: &String| step == WAIT_HINT;
        if !next.iter().all(is_wait) {
            next.retain(|step| !is_wait(step));
        }
        (says.join("; "), next.join("; "))
    }

    /// Why one replica does not serve, and the next step.
    fn why_unserved_on(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
    ) -> (String, String) {
        let name = self.node_name(placement.node);
        let start = format!("start windrose on node {name}, or fix its network");
        let retry = format!("remove the cause: node {name} retries every 30 seconds");
        if let PlacementStage::Failed { reason } = &placement.stage {
            return (format!("{name}: its replica was not created: {reason}"), retry);
        }
        let said = match (
            self.state_of(placement.node),
            self.reported_mirror(placement.node, record.id),
        ) {
            (NodeState::Down, _) => ("the node is down, or cut off".to_owned(), start),
            (NodeState::Unknown, _) if self.store.error.is_some() => (
                "unknown whether it serves there, as this node does not reach the metadata store"
                    .to_owned(),
                format!("`windrose status` on node {name} shows its state"),
            ),
            (NodeState::Unknown, _) => ("the node stopped responding".to_owned(), start),
            (NodeState::Running, Some(reported)) if reported.image_lost.is_some() => {
                self.image_lost_text(record, placement.node, reported)
            }
            (NodeState::Running, Some(reported)) => {
                let why = unreadable_reservations_text(reported)
                    .or_else(|| reported.not_serving_reason.clone());
                let why = why.unwrap_or_else(|| "it is being opened".to_owned());
                (why, self.next_step_on(record, placement.node, reported))
            }
            (NodeState::Running, None) => match self.open_error(placement.node, record.id) {
                Some(why) => (why.to_owned(), open_failed_hint(record, &name)),
                None if self.report_of(placement.node).is_none() && self.store.error.is_some() => (
                    "unknown whether it serves there, as this node does not reach the metadata \
                     store"
                        .to_owned(),
                    format!("`windrose status` on node {name} shows its state"),
                ),
                None => ("it is being opened".to_owned(), WAIT_HINT.to_owned()),
            },
        };
        (format!("{name}: {}", said.0), said.1)
    }

    /// The next step for a replica that is open on `node` and does not serve.
    pub(crate) fn next_step_on(
        &self,
        record: &VolumeRecord,
        node: NodeId,
        reported: &ReportedMirror,
    ) -> String {
        if reported.reservations_error.is_some() {
            return reservations_hint(record.name.as_str(), Some(&self.node_name(node)));
        }
        reported.next_step.clone().unwrap_or_else(|| WAIT_HINT.to_owned())
    }

    /// The text for a lost image of a volume that no node serves.
    fn image_lost_text(
        &self,
        record: &VolumeRecord,
        node: NodeId,
        reported: &ReportedMirror,
    ) -> (String, String) {
        let (name, lost) = (self.node_name(node), reported.image_lost.clone().unwrap_or_default());
        let mirror = self.mirrors.get(&record.id);
        let is_member = mirror.is_some_and(|mirror| mirror.member(node).is_some());
        let next = if is_member {
            format!(
                "check that disk, then restart windrose on node {name} (systemctl restart \
                 windrose): writes that were not flushed may be lost"
            )
        } else {
            format!("node {name} reopens it when the disk responds")
        };
        (format!("{lost}: the open image is no longer used"), next)
    }
}

/// The text for unreadable reservations.
pub(crate) fn unreadable_reservations_text(reported: &ReportedMirror) -> Option<String> {
    let why = reported.reservations_error.as_ref()?;
    Some(format!("its reservations cannot be read ({why}): initiators are refused"))
}

/// The hint for unreadable reservations.
pub(crate) fn reservations_hint(volume: &str, node: Option<&str>) -> String {
    let at = node.map(|node| format!(" on node {node}")).unwrap_or_default();
    format!(
        "to replace them with an empty set: windrose volume reservations {volume} --clear \
         --yes{at}; first stop hosts that rely on them for fencing, and have them register again \
         afterwards"
    )
}
