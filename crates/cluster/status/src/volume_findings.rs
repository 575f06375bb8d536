//! Findings about the volumes of a cluster.

use api::{ByteRange, Finding, Severity};
use peer::NodeId;
use records::record::{VolumeRecord, VolumeStage};

use crate::cluster_view::ClusterView;
use crate::report::UnreadableEverywhere;
use crate::unserved_volumes::{
    MIRROR_RECORD_LOST, reservations_hint, unreadable_reservations_text,
};
use crate::{WAIT_HINT, finding};

impl ClusterView {
    /// Findings about a volume that is ready.
    pub(crate) fn volume_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        if record.stage != VolumeStage::Ready {
            return;
        }
        let subject = format!("volume {}", record.name);
        self.history_findings(record, findings);
        self.unreadable_findings(record, findings);
        self.reservation_findings(record, findings);
        let serving = self.serving_nodes(record.id);
        if self.is_mirror_record_lost(record) {
            let hint = "windrose cluster recover finds the newest replica";
            findings.push(finding(Severity::Critical, subject, MIRROR_RECORD_LOST, Some(hint)));
            return;
        }
        if serving.is_empty()
            && self.just_created.contains(&record.id)
            && self.awaits_first_report(record.id)
        {
            let message = "it was just created, and is being opened";
            findings.push(finding(Severity::Warning, subject, message, Some(WAIT_HINT)));
            return;
        }
        if serving.is_empty() {
            let (message, hint) = self.why_unserved(record);
            findings.push(finding(Severity::Critical, subject, message, Some(&hint)));
            return;
        }
        let all_good = self.replica_findings(record, findings);
        let has_all = !self.missing_replica_finding(record, findings);
        if all_good && has_all && record.placements.len() == 1 {
            let hint = self.add_replica_hint(record);
            findings.push(finding(Severity::Note, subject, "it has one replica", Some(&hint)));
        } else if all_good
            && record.placement(self.this_node).is_some()
            && !serving.contains(&self.this_node)
        {
            let message = format!("not served by this node: {}", self.why_not_served_here(record));
            let reported = self.reported_mirror(self.this_node, record.id);
            let next = reported.map(|reported| self.next_step_on(record, self.this_node, reported));
            let next = next.unwrap_or_else(|| WAIT_HINT.to_owned());
            findings.push(finding(Severity::Warning, subject, message, Some(&next)));
        }
    }

    /// Unreadable reservations: the excluded initiators are unknown, so none is served.
    fn reservation_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let name = &record.name;
        let is_served = !self.serving_nodes(record.id).is_empty();
        let severity = if is_served { Severity::Warning } else { Severity::Critical };
        for placement in &record.placements {
            let Some(reported) = self.reported_mirror(placement.node, record.id) else { continue };
            let Some(why) = unreadable_reservations_text(reported) else { continue };
            let node = self.node_name(placement.node);
            let message = format!("on {node} {why}");
            let hint = reservations_hint(name.as_str(), Some(&node));
            let subject = format!("volume {name}");
            findings.push(finding(severity, subject, message, Some(&hint)));
        }
    }

    /// Blocks that no replica can read and that a resync waits for.
    fn unreadable_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let Some(reported) = self
            .mirrors
            .get(&record.id)
            .and_then(|mirror| self.reported_mirror(mirror.primary, record.id))
        else {
            return;
        };
        for resync in reported.resyncs.iter().filter(|resync| resync.unreadable.bytes > 0) {
            let node = self.node_name(NodeId(resync.node));
            let UnreadableEverywhere { ranges, bytes } = &resync.unreadable;
            let named: u64 = ranges.iter().map(|range| range.bytes).sum();
            let range = |r: &ByteRange| {
                format!("bytes {} to {}", r.start_bytes, r.start_bytes + r.bytes - 1)
            };
            let which: Vec<String> = ranges.iter().map(range).collect();
            let more = if named < *bytes { ", and more" } else { "" };
            let message = format!(
                "{} cannot be read from any replica: {}{more}; the resync of the replica on {node} \
                 cannot complete",
                api::Size(*bytes),
                which.join(", ")
            );
            let hint = "reading these bytes fails until they are written: restore them from a \
                backup, or have the file system on the volume overwrite or discard them; the \
                resync then completes. Check the disk that cannot read them";
            let subject = format!("volume {}", record.name);
            findings.push(finding(Severity::Critical, subject, message, Some(hint)));
        }
    }

    /// Findings about the history of a volume's replicas.
    fn history_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let Some(mirror) = self.mirrors.get(&record.id) else { return };
        let (subject, name) = (format!("volume {}", record.name), &record.name);
        if let Some(differing) = &mirror.history.mismatch {
            let nodes: Vec<_> = differing.nodes.iter().map(|node| self.node_name(*node)).collect();
            let message = format!(
                "its replicas differ: on {} in {} in all from the one on {}, first at byte {} \
                 (found by `windrose volume mirror verify {name}`); reads return different data \
                 depending on the node",
                nodes.join(", "),
                api::Size(differing.bytes),
                self.node_name(differing.primary),
                differing.offset_bytes,
            );
            let hint = format!(
                "find out which replica is right, then run windrose volume mirror verify {name} \
                 --repair --source NODE"
            );
            findings.push(finding(Severity::Warning, &subject, message, Some(&hint)));
        }
        for node in mirror.history.rolled_back.iter().filter(|node| mirror.image(**node).is_some())
        {
            let (node, in_sync) = (self.node_name(*node), mirror.member(*node).is_some());
            let severity = if in_sync { Severity::Note } else { Severity::Warning };
            let done =
                if in_sync { "and was fully resynced" } else { "and is being fully resynced" };
            let message = format!(
                "the replica on {node} was rolled back to an earlier state (a virtual machine or a \
                 disk restored from a backup or a storage snapshot): it was rejected {done}"
            );
            let hint = format!(
                "exclude the images of volumes when you restore backups or snapshots of machines; \
                 to clear this note: `windrose volume mirror verify {name}` must find no \
                 differences"
            );
            findings.push(finding(severity, &subject, message, Some(&hint)));
        }
        let newer = self
            .reported_mirror(mirror.primary, record.id)
            .map(|reported| reported.newer_replicas.as_slice());
        for node in newer.unwrap_or_default() {
            let (newer, primary) = (self.node_name(NodeId(*node)), self.node_name(mirror.primary));
            let message = format!(
                "the replica on {primary}, the current primary, was rolled back to an earlier \
                 state (a virtual machine or a disk restored from a backup or a storage snapshot): \
                 the replica on {newer} is newer, and is not overwritten"
            );
            let hint = format!(
                "to keep the replica on {newer}: switch {primary} off, then `windrose volume \
                 force-primary {name}` at {newer}; to keep the one on {primary}: windrose volume \
                 mirror replace {name} --on {newer}"
            );
            findings.push(finding(Severity::Warning, &subject, message, Some(&hint)));
        }
    }
}

#[cfg(test)]
mod tests {
    use api::ReplicaState;
    use block::Epoch;
    use cluster::identity::Role;
    use cluster::nodes::NodeView;
    use cluster::store::StoreError;
    use mirror::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig, ReplicaMismatch};
    use peer::Incarnation;
    use uuid::Uuid;

    use super::*;
    use crate::report::{NodeReport, ReportedMirror, ResyncReport};
    use crate::store_view::StoreView;
    use records::samples::{place, record};

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn node(id: NodeId, alive: bool) -> (NodeId, NodeView) {
        crate::samples::node(id.0, &format!("n{id}"), alive)
    }

    fn serves(why: Option<&str>) -> ReportedMirror {
        let why: Option<String> = why.map(Into::into);
        let linked = vec![A.0, B.0];
        ReportedMirror {
            serves: why.is_none(),
            not_serving_reason: why,
            peers_with_session: linked,
            ..ReportedMirror::default()
        }
    }

    /// Node 1 views a volume on nodes 1 and 2, of which `in_sync` are in sync.
    fn look(
        in_sync: &[NodeId],
        reports: &[(NodeId, ReportedMirror)],
    ) -> (ClusterView, VolumeRecord) {
        let mut volume = record("v");
        volume.placements = vec![place(A, "v"), place(B, "v")];
        let image = |node: NodeId| Uuid::from_u128(node.0.into());
        let replica = |&node: &NodeId| ConfigReplica { node, image: image(node), is_new: false };
        let mirror = MirrorConfig {
            epoch: Epoch(1),
            config_id: 1,
            replicas: [A, B].iter().map(replica).collect(),
            in_sync: in_sync
                .iter()
                .map(|&node| InSyncMember { node, incarnation: Incarnation(1) })
                .collect(),
            primary: in_sync[0],
            cold_start_epoch: Epoch::default(),
            history: CopyHistory::default(),
        };
        let report = |(node, reported): &(NodeId, ReportedMirror)| {
            let mirrors = [(volume.id, reported.clone())].into();
            (*node, NodeReport { mirrors, ..NodeReport::default() })
        };
        let cluster = ClusterView {
            this_node: A,
            nodes: [node(A, true), node(B, true), node(NodeId(3), true)].into(),
            store: StoreView { runs_own_members: true, ..StoreView::default() },
            reports: reports.iter().map(report).collect(),
            mirrors: [(volume.id, mirror)].into(),
            ..ClusterView::default()
        };
        (cluster, volume)
    }

    fn found(cluster: &ClusterView, volume: &VolumeRecord) -> Vec<(Severity, String)> {
        let mut findings = Vec::new();
        cluster.cluster_findings(&mut findings);
        cluster.volume_findings(volume, &mut findings);
        findings.into_iter().map(|f| (f.severity, f.message)).collect()
    }

    #[test]
    fn all_is_well_when_both_serve() {
        let (cluster, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        assert_eq!(found(&cluster, &volume), []);
        assert_eq!(cluster.serving_nodes(volume.id), [A, B]);
        let copies = cluster.replicas(&volume);
        assert!(copies.iter().all(|c| c.state == ReplicaState::InSync));
        assert!(copies[0].primary && !copies[1].primary);
    }

    #[test]
    fn a_copy_that_is_brought_in_sync_says_how_long_that_takes() {
        let unreadable = UnreadableEverywhere::default();
        let (done_bytes, eta_s) = (1 << 20, Some(9));
        let resync = ResyncReport { node: 2, done_bytes, total_bytes: 3 << 20, eta_s, unreadable };
        let source = ReportedMirror { resyncs: vec![resync], ..serves(None) };
        let (cluster, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let [(Severity::Warning, message)] = &found(&cluster, &volume)[..] else {
            panic!("one finding")
        };
        assert!(message.starts_with("1 of 2 replicas are in sync"), "{message}");
        assert!(message.contains("n2") && message.contains("2 MiB left, 9 s"), "{message}");
        let unreadable = Vec::new();
        let state = ReplicaState::Resyncing { done_bytes, total_bytes: 3 << 20, eta_s, unreadable };
        assert_eq!(cluster.replicas(&volume)[1].state, state);
    }

    #[test]
    fn blocks_that_no_copy_can_read_are_named_with_what_ends_the_wait() {
        let ranges = vec![ByteRange { start_bytes: 65536, bytes: 4096 }];
        let unreadable = UnreadableEverywhere { ranges, bytes: 12288 };
        let (done_bytes, total_bytes) = ((3 << 20) - 12288, 3 << 20);
        let resync = ResyncReport { node: 2, done_bytes, total_bytes, eta_s: None, unreadable };
        let source = ReportedMirror { resyncs: vec![resync], ..serves(None) };
        let (cluster, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let found = found(&cluster, &volume);
        let [(Severity::Critical, unread), (Severity::Warning, behind)] = &found[..] else {
            panic!("{found:?}")
        };
        let is = "12 KiB cannot be read from any replica: bytes 65536 to 69631, and more; the \
            resync of the replica on n2 cannot complete";
        assert!(unread.starts_with(is), "{unread}");
        assert!(
            behind.contains("12 KiB left, some of it cannot be read from any replica"),
            "{behind}"
        );
    }

    #[test]
    fn what_the_disk_of_a_copy_has_refused_is_told_at_every_node() {
        let refused = Some("no space left".to_owned());
        let full = ReportedMirror { disk_error: refused, ..serves(Some("not in sync")) };
        let (cluster, volume) = look(&[A], &[(A, serves(None)), (B, full)]);
        let message = "1 of 2 replicas are in sync: the one on n2 is out of sync: its disk failed an \
            operation (no space left)";
        assert_eq!(found(&cluster, &volume), [(Severity::Warning, message.to_owned())]);
    }

    #[test]
    fn copies_that_differ_stay_a_finding_that_asks_which_is_right() {
        let (mut cluster, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        let history = &mut cluster.mirrors.get_mut(&volume.id).unwrap().history;
        history.mismatch =
            Some(ReplicaMismatch { offset_bytes: 4096, bytes: 512, nodes: vec![B], primary: A });
        let mut findings = Vec::new();
        cluster.volume_findings(&volume, &mut findings);
        let [Finding { severity: Severity::Warning, message, hint, .. }] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert!(message.contains("on n2") && message.contains("first at byte 4096"), "{message}");
        assert!(hint.as_ref().unwrap().contains("--repair --source NODE"), "{hint:?}");
    }

    #[test]
    fn a_copy_that_was_set_back_is_told_with_what_may_have_done_it() {
        let (mut cluster, volume) = look(&[A], &[(A, serves(None)), (B, serves(Some("out")))]);
        let set_back = |cluster: &ClusterView| {
            let found = found(cluster, &volume).into_iter();
            found
                .filter(|(_, m)| m.contains("the replica on n2 was rolled back"))
                .collect::<Vec<_>>()
        };
        assert_eq!(set_back(&cluster), []);
        cluster.mirrors.get_mut(&volume.id).unwrap().history.rolled_back = vec![B];
        let [(Severity::Warning, message)] = &set_back(&cluster)[..] else { panic!("one") };
        assert!(
            message.contains("snapshot") && message.contains("being fully resynced"),
            "{message}"
        );
        let (mut cluster, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        cluster.mirrors.get_mut(&volume.id).unwrap().history.rolled_back = vec![B];
        assert!(matches!(&found(&cluster, &volume)[..], [(Severity::Note, _)]));
    }

    #[test]
    fn a_newer_copy_that_is_not_overwritten_is_told_with_both_ways_out() {
        let source = ReportedMirror { newer_replicas: vec![2], ..serves(None) };
        let (cluster, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let mut findings = Vec::new();
        cluster.volume_findings(&volume, &mut findings);
        let hint = findings.iter().find_map(|f| f.hint.as_ref().filter(|h| h.contains("force")));
        let hint = hint.expect("a hint");
        assert!(hint.contains("force-primary v") && hint.contains("replace v --on n2"), "{hint}");
    }

    #[test]
    fn a_node_that_is_gone_tells_nothing() {
        let (mut cluster, volume) =
            look(&[A, B], &[(A, serves(Some("waiting for n2"))), (B, serves(None))]);
        cluster.nodes.get_mut(&B).unwrap().is_alive = false;
        let all = found(&cluster, &volume);
        assert!(
            all.contains(&(
                Severity::Warning,
                "it does not respond: it is down, or cut off".into()
            )),
            "{all:?}"
        );
        let down = "n1: waiting for n2; n2: the node is down, or cut off";
        assert!(all.contains(&(Severity::Critical, down.into())), "{all:?}");
    }

    #[test]
    fn a_volume_that_was_just_created_is_given_a_moment_and_another_is_not() {
        let (mut cluster, volume) = look(&[A, B], &[(A, serves(Some("it is being opened")))]);
        assert!(cluster.awaits_first_report(volume.id));
        let message = "n1: it is being opened; n2: it is being opened".to_owned();
        assert_eq!(found(&cluster, &volume), [(Severity::Critical, message)]);
        cluster.just_created = [volume.id].into();
        let message = "it was just created, and is being opened".to_owned();
        assert_eq!(found(&cluster, &volume), [(Severity::Warning, message)]);
    }

    /// The findings of node a without the store; `change` sets how it sees the others, none of
    /// which its mirrors hear.
    fn without_store(change: impl FnOnce(&mut ClusterView)) -> (bool, Vec<Finding>) {
        let (mut cluster, _) = look(&[A], &[(A, serves(None))]);
        let (store, why) = ("etcd".into(), "it does not answer".into());
        cluster.store.error = Some(StoreError::Unreachable { store, why });
        change(&mut cluster);
        let mut findings = Vec::new();
        cluster.cluster_findings(&mut findings);
        (cluster.is_isolated(), findings)
    }

    #[test]
    fn a_node_that_another_one_answers_is_not_said_to_be_cut_off() {
        let (cut_off, found) = without_store(|cluster| cluster.reachable = [NodeId(3)].into());
        assert!(!cut_off, "{found:?}");
        assert!(!found.iter().any(|f| f.message.contains("it reaches neither")), "{found:?}");
        assert!(found.iter().any(|f| f.message.contains("the store etcd cannot be reached")));
    }

    #[test]
    fn a_node_that_is_cut_off_tells_of_the_store_too_and_which_nodes_to_start() {
        let (cut_off, found) = without_store(|_| ());
        assert!(cut_off);
        let hint = found[0].hint.as_ref().unwrap();
        assert!(found[0].message.contains("nor any other node"), "{found:?}");
        for part in ["start windrose on nodes n2, n3", "systemctl restart", "recover --dry-run"] {
            assert!(hint.contains(part), "{hint}");
        }
        assert!(found.iter().any(|f| f.message.contains("the store etcd cannot be reached")));
    }

    #[test]
    fn of_a_node_that_cannot_be_asked_nothing_is_claimed() {
        let witness = |cluster: &mut ClusterView, node: NodeId| {
            cluster.nodes.get_mut(&node).unwrap().record.role = Role::Witness;
        };
        let (cut_off, found) = without_store(|cluster| witness(cluster, NodeId(3)));
        let said = &found[0].message;
        assert!(cut_off && said.contains("nor any node that it can probe (n2)"), "{said}");
        assert!(said.contains("n3 cannot be probed") && !said.contains("any other node"), "{said}");
        // No node was probed.
        let (cut_off, found) = without_store(|cluster| {
            witness(cluster, B);
            witness(cluster, NodeId(3));
        });
        assert!(!cut_off, "{found:?}");
    }

    #[test]
    fn a_cluster_that_cannot_lose_a_node_says_so() {
        let (mut cluster, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        cluster.nodes.remove(&NodeId(3));
        cluster.heard = [B].into();
        let (store, why) = ("etcd".into(), "it does not answer".into());
        cluster.store.error = Some(StoreError::Unreachable { store, why });
        let all = found(&cluster, &volume);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].1.contains("volumes that serve continue to"));
        assert!(all[1].1.contains("2 of the 3 nodes"));
    }
}
