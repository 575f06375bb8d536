//! What a node of a cluster knows of the volumes on all nodes, for people to see.

use std::collections::BTreeMap;

use api::{CopyState, Finding, Severity, UnreadableBytes, VolumeCopy};
use cluster::nodes::Nodes;
use layers::mirror::record::Record;
use peer::NodeId;
use uuid::Uuid;

use super::members::Store;
use super::report::{NodeReport, Resync, SeenMirror, Unread};
use super::status::finding;
use super::{Control, clocks};
use crate::engine::CoreReport;
use crate::record::{Place, PlaceStage, Stage, VolumeRecord};

/// The cluster as one node sees it.
#[derive(Clone, Debug, Default)]
pub struct Together {
    /// The node that looks.
    pub me: NodeId,
    /// All nodes.
    pub nodes: Nodes,
    /// The store.
    pub store: Store,
    /// What the nodes have told of themselves; of this one, as it is now.
    pub told: BTreeMap<NodeId, NodeReport>,
    /// The records of mirrors.
    pub mirrors: BTreeMap<Uuid, Record>,
}

impl Control {
    /// The cluster as this node sees it; `None` for one that is in none.
    pub(super) async fn together(&self, cores: &[CoreReport]) -> Option<Together> {
        let membership = self.membership()?;
        let me = membership.node;
        let (mut told, error) = match self.reports().await {
            Ok(told) => (told, None),
            Err(error) => (BTreeMap::new(), Some(error)),
        };
        let part = self.0.part.as_ref();
        let own_members = part.is_some_and(|part| part.own_members());
        let members = part.map(|part| part.health()).unwrap_or_default();
        let names = |node| self.node_name(node);
        let own = super::report::Progress::default().mirrors(cores, &names);
        let kept = told.entry(me).or_default();
        for (id, mut seen) in own {
            // Only the chores look often enough to know how long a resync takes.
            let before = kept.mirrors.get(&id).map(|m| m.resyncs.clone()).unwrap_or_default();
            for resync in &mut seen.resyncs {
                resync.eta_s = before.iter().find(|r| r.node == resync.node).and_then(|r| r.eta_s);
            }
            kept.mirrors.insert(id, seen);
        }
        kept.member_trouble = part.and_then(|part| part.member_trouble());
        let mirrors = self.0.state.mirrors();
        let nodes = membership.nodes.borrow().clone();
        let of_those_alive =
            told.iter().filter(|(node, _)| nodes.get(node).is_some_and(|view| view.alive));
        let troubles =
            of_those_alive.filter_map(|(node, r)| Some((*node, r.member_trouble.clone()?)));
        let store = Store { error, own_members, members, troubles: troubles.collect() };
        Some(Together { me, nodes, store, told, mirrors })
    }
}

impl Together {
    /// What a node is called.
    fn name(&self, node: NodeId) -> String {
        let known = self.nodes.get(&node);
        known.map_or_else(|| format!("number {node}"), |view| view.record.name.clone())
    }

    fn is_alive(&self, node: NodeId) -> bool {
        node == self.me || self.nodes.get(&node).is_some_and(|view| view.alive)
    }

    /// A volume as a node has told of it, if that runs.
    fn seen(&self, node: NodeId, volume: Uuid) -> Option<&SeenMirror> {
        self.told.get(&node).filter(|_| self.is_alive(node))?.mirrors.get(&volume)
    }

    /// The nodes through which a volume is served.
    pub(super) fn served_by(&self, volume: Uuid) -> Vec<NodeId> {
        let Some(mirror) = self.mirrors.get(&volume) else { return Vec::new() };
        let members = mirror.in_sync.iter().map(|m| m.node);
        members.filter(|n| self.seen(*n, volume).is_some_and(|s| s.serves)).collect()
    }

    /// Whether some node that could serve a volume has not told of it yet.
    pub(super) fn is_young(&self, volume: Uuid) -> bool {
        let Some(mirror) = self.mirrors.get(&volume) else { return true };
        let mut members = mirror.in_sync.iter().map(|m| m.node);
        members.any(|n| self.is_alive(n) && self.seen(n, volume).is_none())
    }

    /// Why a volume is not served by this node.
    pub(super) fn why_not(&self, record: &VolumeRecord) -> String {
        if record.place(self.me).is_none() {
            return format!("{} keeps no copy of it", self.name(self.me));
        }
        if self.nodes.get(&self.me).is_some_and(|view| view.record.drained) {
            let name = self.name(self.me);
            return format!("node {name} is drained (windrose node resume {name})");
        }
        let here = self.seen(self.me, record.id).and_then(|s| s.why.clone());
        here.unwrap_or_else(|| "it is being opened".into())
    }

    /// The copies of a volume.
    pub(super) fn copies(&self, record: &VolumeRecord) -> Vec<VolumeCopy> {
        let mirror = self.mirrors.get(&record.id);
        let primary = mirror.map(|m| m.primary);
        let copy = |place: &Place| VolumeCopy {
            node: self.name(place.node),
            backing: place.backing.clone(),
            state: self.copy_state(record, place),
            primary: primary == Some(place.node),
        };
        record.places.iter().map(copy).collect()
    }

    fn copy_state(&self, record: &VolumeRecord, place: &Place) -> CopyState {
        match &place.stage {
            PlaceStage::Wanted { .. } => return CopyState::BeingMade,
            PlaceStage::Failed { reason } => {
                return CopyState::Failed { reason: reason.clone() };
            }
            PlaceStage::Leaving { .. } => return CopyState::Leaving,
            PlaceStage::Made => {}
        }
        let Some(mirror) = self.mirrors.get(&record.id) else { return CopyState::Unknown };
        if mirror.member(place.node).is_some() {
            return CopyState::InSync;
        }
        match self.resync(mirror, record.id, place.node) {
            Some(r) => CopyState::Resyncing {
                done_bytes: r.done_bytes,
                total_bytes: r.total_bytes,
                eta_s: r.eta_s,
                unreadable: r.unreadable.ranges.clone(),
            },
            None => CopyState::Outdated,
        }
    }

    fn resync(&self, mirror: &Record, volume: Uuid, node: NodeId) -> Option<&Resync> {
        self.seen(mirror.primary, volume)?.resyncs.iter().find(|r| r.node == node.0)
    }

    /// What there is to say of the cluster itself.
    pub(super) fn findings(&self, findings: &mut Vec<Finding>) {
        self.store.findings(&self.nodes, findings);
        findings.extend(clocks::findings(&self.told, &self.nodes));
        for (node, view) in &self.nodes {
            let subject = format!("node {}", view.record.name);
            if view.record.drained {
                let hint = format!("windrose node resume {}", view.record.name);
                let message = "it is drained: it keeps out of service";
                findings.push(finding(Severity::Note, subject, message, Some(&hint)));
            } else if !self.is_alive(*node) {
                let hint = "start it, or take it out (windrose cluster leave --node, --force)";
                findings.push(finding(Severity::Warning, subject, "it does not run", Some(hint)));
            }
        }
    }

    /// What there is to say of a volume that exists.
    pub(super) fn volume_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        if record.stage != Stage::Ready {
            return;
        }
        let subject = format!("volume {}", record.name);
        self.history_findings(record, findings);
        self.unreadable_findings(record, findings);
        let serving = self.served_by(record.id);
        if !self.mirrors.contains_key(&record.id) && record.places.len() > 1 {
            let message = "the record of its mirror is lost: nobody knows which copy is the newest";
            let hint = "windrose cluster recover finds out";
            findings.push(finding(Severity::Critical, subject, message, Some(hint)));
            return;
        }
        if serving.is_empty() && self.is_young(record.id) {
            findings.push(finding(Severity::Warning, subject, "it is being opened", None));
            return;
        }
        if serving.is_empty() {
            let message = self.down(record);
            findings.push(finding(Severity::Critical, subject, message, None));
            return;
        }
        let copies = self.copies(record);
        let good = copies.iter().filter(|c| c.state == CopyState::InSync).count();
        let refused = |place: &Place| self.seen(place.node, record.id)?.refused.as_deref();
        let refused = record.places.iter().map(refused);
        let lacking: Vec<_> = copies.iter().zip(refused).filter_map(lack).collect();
        if !lacking.is_empty() {
            let message =
                format!("{good} of {} copies are in sync: {}", copies.len(), lacking.join("; "));
            findings.push(finding(Severity::Warning, subject, message, None));
        } else if good == 1 {
            let hint = format!("windrose volume mirror add {}", record.name);
            findings.push(finding(Severity::Note, subject, "it has one copy", Some(&hint)));
        } else if record.place(self.me).is_some() && !serving.contains(&self.me) {
            let message = format!("not served by this node: {}", self.why_not(record));
            findings.push(finding(Severity::Warning, subject, message, None));
        }
    }

    /// Blocks that no copy can read, which another copy waits for.
    fn unreadable_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let Some(seen) =
            self.mirrors.get(&record.id).and_then(|mirror| self.seen(mirror.primary, record.id))
        else {
            return;
        };
        for resync in seen.resyncs.iter().filter(|resync| resync.unreadable.bytes > 0) {
            let node = self.name(NodeId(resync.node));
            let Unread { ranges, bytes } = &resync.unreadable;
            let named: u64 = ranges.iter().map(|range| range.bytes).sum();
            let range = |r: &UnreadableBytes| {
                format!("bytes {} to {}", r.start_bytes, r.start_bytes + r.bytes - 1)
            };
            let which: Vec<String> = ranges.iter().map(range).collect();
            let more = if named < *bytes { ", and more" } else { "" };
            let message = format!(
                "{} can be read from no copy: {}{more}; the copy on {node} waits for that, and is not in sync before",
                api::Size(*bytes),
                which.join(", ")
            );
            let hint = "they read as errors until they are written: write them from a backup, or have the guest's file \
                        system write or discard them; the copy is in sync by itself then. See to the disk that does not give \
                        them back";
            let subject = format!("volume {}", record.name);
            findings.push(finding(Severity::Critical, subject, message, Some(hint)));
        }
    }

    /// What there is to say of the past of a volume's copies.
    fn history_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let Some(mirror) = self.mirrors.get(&record.id) else { return };
        let (subject, name) = (format!("volume {}", record.name), &record.name);
        if let Some(differing) = &mirror.history.differing {
            let nodes: Vec<_> = differing.nodes.iter().map(|node| self.name(*node)).collect();
            let message = format!(
                "its copies differ: on {} in {} in all from that on {}, first at byte {} (found by \
                 `windrose volume mirror verify`); reads depend on the node that is asked",
                nodes.join(", "),
                api::Size(differing.bytes),
                self.name(differing.from),
                differing.at_bytes,
            );
            let hint = format!(
                "find out which copy is right, then: windrose volume mirror verify {name} --repair --keep NODE"
            );
            findings.push(finding(Severity::Warning, &subject, message, Some(&hint)));
        }
        for node in mirror.history.set_back.iter().filter(|node| mirror.image(**node).is_some()) {
            let (node, in_sync) = (self.name(*node), mirror.member(*node).is_some());
            let severity = if in_sync { Severity::Note } else { Severity::Warning };
            let done =
                if in_sync { "all of it was copied anew" } else { "all of it is copied anew" };
            let message = format!(
                "the copy on {node} was set back to an earlier state, as when a virtual machine or a disk is \
                 restored from a backup or a storage snapshot: it was not believed, {done}"
            );
            let hint = format!(
                "keep copies of a volume out of backups and snapshots that are restored; this note ends with \
                 `windrose volume mirror verify {name}`, if that finds no differences"
            );
            findings.push(finding(severity, &subject, message, Some(&hint)));
        }
        let newer = self.seen(mirror.primary, record.id).map(|seen| seen.newer.as_slice());
        for node in newer.unwrap_or_default() {
            let (newer, primary) = (self.name(NodeId(*node)), self.name(mirror.primary));
            let message = format!(
                "the copy on {primary}, with which it goes on, was set back to an earlier state, as when a virtual \
                 machine or a disk is restored from a backup or a storage snapshot: the copy on {newer} knows a later \
                 one, and is not overwritten"
            );
            let hint = format!(
                "to go on with the copy on {newer}: switch {primary} off, then `windrose volume force {name}` at \
                 {newer}; to go on with that on {primary}: windrose volume mirror replace {name} --on {newer}"
            );
            findings.push(finding(Severity::Warning, &subject, message, Some(&hint)));
        }
    }

    /// Why a volume is served by nobody, as each node says.
    fn down(&self, record: &VolumeRecord) -> String {
        let says = |place: &Place| {
            let name = self.name(place.node);
            match self.seen(place.node, record.id) {
                Some(SeenMirror { why: Some(why), .. }) => format!("{name}: {why}"),
                Some(_) => format!("{name}: it is being opened"),
                None if self.is_alive(place.node) => format!("{name}: it is not open"),
                None => format!("{name}: the node does not run"),
            }
        };
        record.places.iter().map(says).collect::<Vec<_>>().join("; ")
    }
}

/// What a copy lacks, if it does; with it, what its disk has refused.
fn lack((copy, refused): (&VolumeCopy, Option<&str>)) -> Option<String> {
    let node = &copy.node;
    let refused = refused.map(|why| format!(": its disk has failed an operation ({why})"));
    let refused = refused.unwrap_or_default();
    match &copy.state {
        CopyState::InSync | CopyState::Leaving => None,
        CopyState::Resyncing { done_bytes, total_bytes, eta_s, unreadable } => {
            let left = api::Size(total_bytes.saturating_sub(*done_bytes));
            let eta = match eta_s {
                Some(s) => format!(", {s} s"),
                None if unreadable.is_empty() => String::new(),
                None => ", some of it can be read from no copy".to_owned(),
            };
            Some(format!("the one on {node} is being brought in sync ({left} left{eta}){refused}"))
        }
        CopyState::Outdated => Some(format!("the one on {node} is outdated{refused}")),
        CopyState::BeingMade => Some(format!("the one on {node} is being made")),
        CopyState::Failed { reason } => Some(format!("the one on {node} was not made: {reason}")),
        CopyState::Unknown => Some(format!("the one on {node} is not known")),
    }
}

#[cfg(test)]
mod tests {
    use block::Epoch;
    use cluster::meta::MetaError;
    use cluster::nodes::NodeView;
    use layers::mirror::record::{Differing, History, Member, Replica};
    use peer::Incarnation;

    use super::*;
    use crate::record::tests::{place, record};

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn node(id: NodeId, alive: bool) -> (NodeId, NodeView) {
        crate::control::members::tests::node(id.0, &format!("n{id}"), alive)
    }

    fn serves(why: Option<&str>) -> SeenMirror {
        let why: Option<String> = why.map(Into::into);
        SeenMirror { serves: why.is_none(), why, ..SeenMirror::default() }
    }

    /// Node 1 looks at a volume on nodes 1 and 2, of which `in_sync` are.
    fn look(in_sync: &[NodeId], told: &[(NodeId, SeenMirror)]) -> (Together, VolumeRecord) {
        let mut volume = record("v");
        volume.places = vec![place(A, "v"), place(B, "v")];
        let image = |node: NodeId| Uuid::from_u128(node.0.into());
        let replica = |&node: &NodeId| Replica { node, image: image(node), new: false };
        let mirror = Record {
            epoch: Epoch(1),
            config: 1,
            replicas: [A, B].iter().map(replica).collect(),
            in_sync: in_sync
                .iter()
                .map(|&node| Member { node, incarnation: Incarnation(1) })
                .collect(),
            primary: in_sync[0],
            born: Epoch::default(),
            history: History::default(),
        };
        let report = |(node, seen): &(NodeId, SeenMirror)| {
            let mirrors = [(volume.id, seen.clone())].into();
            (*node, NodeReport { mirrors, ..NodeReport::default() })
        };
        let together = Together {
            me: A,
            nodes: [node(A, true), node(B, true), node(NodeId(3), true)].into(),
            store: Store { own_members: true, ..Store::default() },
            told: told.iter().map(report).collect(),
            mirrors: [(volume.id, mirror)].into(),
        };
        (together, volume)
    }

    fn found(together: &Together, volume: &VolumeRecord) -> Vec<(Severity, String)> {
        let mut findings = Vec::new();
        together.findings(&mut findings);
        together.volume_findings(volume, &mut findings);
        findings.into_iter().map(|f| (f.severity, f.message)).collect()
    }

    #[test]
    fn all_is_well_when_both_serve() {
        let (together, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        assert_eq!(found(&together, &volume), []);
        assert_eq!(together.served_by(volume.id), [A, B]);
        let copies = together.copies(&volume);
        assert!(copies.iter().all(|c| c.state == CopyState::InSync));
        assert!(copies[0].primary && !copies[1].primary);
    }

    #[test]
    fn a_copy_that_is_brought_in_sync_says_how_long_that_takes() {
        let unreadable = Unread::default();
        let (done_bytes, eta_s) = (1 << 20, Some(9));
        let resync = Resync { node: 2, done_bytes, total_bytes: 3 << 20, eta_s, unreadable };
        let source = SeenMirror { resyncs: vec![resync], ..serves(None) };
        let (together, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let [(Severity::Warning, message)] = &found(&together, &volume)[..] else {
            panic!("one finding")
        };
        assert!(message.starts_with("1 of 2 copies are in sync"), "{message}");
        assert!(message.contains("n2") && message.contains("2 MiB left, 9 s"), "{message}");
        let unreadable = Vec::new();
        let state = CopyState::Resyncing { done_bytes, total_bytes: 3 << 20, eta_s, unreadable };
        assert_eq!(together.copies(&volume)[1].state, state);
    }

    #[test]
    fn blocks_that_no_copy_can_read_are_named_with_what_ends_the_wait() {
        let ranges = vec![UnreadableBytes { start_bytes: 65536, bytes: 4096 }];
        let unreadable = Unread { ranges, bytes: 12288 };
        let (done_bytes, total_bytes) = ((3 << 20) - 12288, 3 << 20);
        let resync = Resync { node: 2, done_bytes, total_bytes, eta_s: None, unreadable };
        let source = SeenMirror { resyncs: vec![resync], ..serves(None) };
        let (together, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let found = found(&together, &volume);
        let [(Severity::Critical, unread), (Severity::Warning, behind)] = &found[..] else {
            panic!("{found:?}")
        };
        let is = "12 KiB can be read from no copy: bytes 65536 to 69631, and more; the copy on n2 waits for that";
        assert!(unread.starts_with(is), "{unread}");
        assert!(behind.contains("12 KiB left, some of it can be read from no copy"), "{behind}");
    }

    #[test]
    fn what_the_disk_of_a_copy_has_refused_is_told_at_every_node() {
        let refused = Some("no space left".to_owned());
        let full = SeenMirror { refused, ..serves(Some("not in sync")) };
        let (together, volume) = look(&[A], &[(A, serves(None)), (B, full)]);
        let message = "1 of 2 copies are in sync: the one on n2 is outdated: its disk has failed an \
                       operation (no space left)";
        assert_eq!(found(&together, &volume), [(Severity::Warning, message.to_owned())]);
    }

    #[test]
    fn copies_that_differ_stay_a_finding_that_asks_which_is_right() {
        let (mut together, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        let history = &mut together.mirrors.get_mut(&volume.id).unwrap().history;
        history.differing = Some(Differing { at_bytes: 4096, bytes: 512, nodes: vec![B], from: A });
        let mut findings = Vec::new();
        together.volume_findings(&volume, &mut findings);
        let [Finding { severity: Severity::Warning, message, hint, .. }] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert!(message.contains("on n2") && message.contains("first at byte 4096"), "{message}");
        assert!(hint.as_ref().unwrap().contains("--repair --keep NODE"), "{hint:?}");
    }

    #[test]
    fn a_copy_that_was_set_back_is_told_with_what_may_have_done_it() {
        let (mut together, volume) = look(&[A], &[(A, serves(None)), (B, serves(Some("out")))]);
        let set_back = |together: &Together| {
            let found = found(together, &volume).into_iter();
            found.filter(|(_, m)| m.contains("the copy on n2 was set back")).collect::<Vec<_>>()
        };
        assert_eq!(set_back(&together), []);
        together.mirrors.get_mut(&volume.id).unwrap().history.set_back = vec![B];
        let [(Severity::Warning, message)] = &set_back(&together)[..] else { panic!("one") };
        assert!(message.contains("snapshot") && message.contains("is copied anew"), "{message}");
        let (mut together, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        together.mirrors.get_mut(&volume.id).unwrap().history.set_back = vec![B];
        assert!(matches!(&found(&together, &volume)[..], [(Severity::Note, _)]));
    }

    #[test]
    fn a_newer_copy_that_is_not_overwritten_is_told_with_both_ways_out() {
        let source = SeenMirror { newer: vec![2], ..serves(None) };
        let (together, volume) = look(&[A], &[(A, source), (B, serves(Some("not in sync")))]);
        let mut findings = Vec::new();
        together.volume_findings(&volume, &mut findings);
        let hint = findings.iter().find_map(|f| f.hint.as_ref().filter(|h| h.contains("force")));
        let hint = hint.expect("a hint");
        assert!(hint.contains("force v") && hint.contains("replace v --on n2"), "{hint}");
    }

    #[test]
    fn a_node_that_is_gone_tells_nothing() {
        let (mut together, volume) =
            look(&[A, B], &[(A, serves(Some("waiting for n2"))), (B, serves(None))]);
        together.nodes.get_mut(&B).unwrap().alive = false;
        let all = found(&together, &volume);
        assert!(all.contains(&(Severity::Warning, "it does not run".into())), "{all:?}");
        let down = "n1: waiting for n2; n2: the node does not run";
        assert!(all.contains(&(Severity::Critical, down.into())), "{all:?}");
    }

    #[test]
    fn who_has_not_told_yet_is_given_a_moment() {
        let (together, volume) = look(&[A, B], &[(A, serves(Some("it is being opened")))]);
        assert!(together.is_young(volume.id));
        let opening = (Severity::Warning, "it is being opened".to_owned());
        assert_eq!(found(&together, &volume), [opening]);
    }

    #[test]
    fn a_cluster_that_cannot_lose_a_node_says_so() {
        let (mut together, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        together.nodes.remove(&NodeId(3));
        let (store, why) = ("etcd".into(), "it does not answer".into());
        together.store.error = Some(MetaError::Unreachable { store, why });
        let all = found(&together, &volume);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].1.contains("volumes that serve go on"));
        assert!(all[1].1.contains("2 of the 3 nodes"));
    }
}
