//! What a node of a cluster knows of the volumes on all nodes, for people to see.

use std::collections::{BTreeMap, BTreeSet};

use api::{Finding, Severity, UnreadableBytes};
use cluster::identity::Role;
use cluster::joining;
use cluster::meta::etcd::MemberHealth;
use cluster::nodes::{self, NodeView, Nodes};
use mirror::Status;
use mirror::record::Record;
use peer::NodeId;
use uuid::Uuid;

use super::cluster::member_name;
use super::copy_state::broken_next;
use super::members::Store;
use super::reach::{Reach, can_be_asked};
use super::report::{NodeReport, SeenMirror, Unread};
use super::status::finding;
use super::waits::MAJORITY_LOST;
use super::why::BY_ITSELF;
use super::{Control, clocks};
use crate::engine::CoreReport;
use crate::meta::MetaError;
use crate::record::{Place, PlaceStage, Stage, VolumeRecord};

/// How long the nodes of a volume that was created may take to tell others of it.
const JUST_CREATED_S: u64 = 15;

/// Why a volume of several copies without a mirror is not served.
pub(super) const NO_MIRROR: &str =
    "the record of its mirror is lost: nobody knows which copy is the newest";

/// The cluster as one node sees it.
#[derive(Clone, Debug, Default)]
pub struct Together {
    /// The node that looks.
    pub me: NodeId,
    /// All nodes. Who of them is alive is as old as the store's last answer.
    pub nodes: Nodes,
    /// The store.
    pub store: Store,
    /// What the nodes have told of themselves; of this one, as it is now. Only that, while the store does not answer.
    pub told: BTreeMap<NodeId, NodeReport>,
    /// The records of mirrors.
    pub mirrors: BTreeMap<Uuid, Record>,
    /// Nodes that mirrors here hear: they keep leases with them, or copy to them.
    pub linked: BTreeSet<NodeId>,
    /// Nodes that the store takes for alive and that have ceased to answer.
    pub silent: BTreeSet<NodeId>,
    /// Nodes that answered a moment ago, while the store does not. Those that keep data were all asked.
    pub reached: BTreeSet<NodeId>,
    /// Volumes that were created a moment ago: their nodes may not have told of them yet.
    pub created: BTreeSet<Uuid>,
}

/// What is known of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// It runs.
    Runs,
    /// It does not, as the store knows.
    Down,
    /// Nobody can tell from here.
    Unknown,
}

impl Control {
    /// The cluster as this node sees it; `None` for one that is in none.
    pub(super) async fn together(&self, cores: &[CoreReport]) -> Option<Together> {
        let membership = self.membership()?;
        let me = membership.node;
        let mut nodes = membership.nodes.borrow().clone();
        let linked = heard(cores);
        let (mut told, error) = match self.heard(&mut nodes).await {
            Ok(told) => (told, None),
            Err(error) => (BTreeMap::new(), Some(error)),
        };
        let (reach, reached) = match &error {
            None => {
                let reach = self.reach_alive(&nodes, &linked, &with_sessions(cores)).await;
                (reach, BTreeSet::new())
            }
            Some(_) => (Reach::default(), self.reach_any(&nodes, &linked).await),
        };
        let part = self.0.part.as_ref();
        let own_members = part.is_some_and(|part| part.own_members());
        let mut members = part.map(|part| part.health()).unwrap_or_default();
        if let Some(part) = part.filter(|_| own_members && error.is_none())
            && (lacks_member(&nodes, &members) || has_stranger(&nodes, &members))
        {
            // A node has come, or has been removed, since they were asked last.
            members = part.look_at_health().await;
        }
        let own = super::report::Progress::default().mirrors(cores, self);
        let kept = told.entry(me).or_default();
        let before = std::mem::take(&mut kept.mirrors);
        for (id, mut seen) in own {
            // Only the chores look often enough to know how long a resync takes.
            let before = before.get(&id).map(|m| m.resyncs.as_slice()).unwrap_or_default();
            for resync in &mut seen.resyncs {
                resync.eta_s = before.iter().find(|r| r.node == resync.node).and_then(|r| r.eta_s);
            }
            kept.mirrors.insert(id, seen);
        }
        kept.broken = self.broken_here();
        kept.member_trouble = part.and_then(|part| part.member_trouble());
        let mirrors = self.0.state.mirrors();
        let store = Store {
            error,
            own_members,
            members,
            troubles: BTreeMap::new(),
            silent: reach.unproven,
        };
        let (created, silent) = (self.just_created(), reach.silent);
        let mut together =
            Together { me, nodes, store, told, mirrors, linked, silent, reached, created };
        let runs = |node: &NodeId| together.state_of(*node) == NodeState::Runs;
        let of_those = together.told.iter().filter(|(node, _)| runs(node));
        let troubles = of_those.filter_map(|(n, r)| Some((*n, r.member_trouble.clone()?)));
        together.store.troubles = troubles.collect();
        Some(together)
    }

    fn just_created(&self) -> BTreeSet<Uuid> {
        let now = super::create::now_s();
        // Another node's clock has said when: it may be ahead.
        let moment = now.saturating_sub(JUST_CREATED_S)..=now + JUST_CREATED_S;
        let all = self.0.state.all().into_iter().map(|(stored, _)| stored.record);
        all.filter(|record| moment.contains(&record.created_s)).map(|record| record.id).collect()
    }

    /// What the nodes have told last; notes in `nodes` who of them is alive now.
    async fn heard(&self, nodes: &mut Nodes) -> Result<BTreeMap<NodeId, NodeReport>, MetaError> {
        let (told, alive) = tokio::join!(self.reports(), nodes::alive(&*self.0.meta));
        let alive = alive?;
        nodes.iter_mut().for_each(|(node, view)| view.alive = alive.contains(node));
        told
    }
}

/// Whether some of these are of no node, or were not.
fn has_stranger(nodes: &Nodes, members: &[MemberHealth]) -> bool {
    let of_nodes: BTreeSet<_> = nodes.keys().map(|node| member_name(*node)).collect();
    members.iter().any(|health| !of_nodes.contains(joining::called(&health.member)))
}

/// Whether the store's member of some node is not among these, or had no vote: a node has one before it is a node.
fn lacks_member(nodes: &Nodes, members: &[MemberHealth]) -> bool {
    let voters = members.iter().map(|h| &h.member).filter(|member| !member.is_learner);
    let called: BTreeSet<_> = voters.map(joining::called).collect();
    nodes.keys().any(|node| !called.contains(member_name(*node).as_str()))
}

fn mirrors(cores: &[CoreReport]) -> impl Iterator<Item = &Status> {
    let mirrors = cores.iter().flat_map(|core| &core.volumes).filter_map(|v| v.mirror.as_ref());
    mirrors.map(|mirror| &mirror.status)
}

/// The nodes that mirrors on these cores have sessions with. A session says little of how a node is: one that has
/// nothing to send outlasts a node that hangs, or is cut off.
fn with_sessions(cores: &[CoreReport]) -> BTreeSet<NodeId> {
    mirrors(cores).flat_map(|status| status.linked.iter().copied()).collect()
}

/// The nodes that mirrors on these cores hear: they keep leases with them, or copy to them.
fn heard(cores: &[CoreReport]) -> BTreeSet<NodeId> {
    let hears = |status: &Status, node: &NodeId| {
        let in_sync = status.record.as_ref().is_some_and(|r| r.member(*node).is_some());
        in_sync || status.resyncs.iter().any(|(other, ..)| other == node)
    };
    let of_each = |status: &Status| {
        let linked = status.linked.iter().copied();
        linked.filter(|node| hears(status, node)).collect::<Vec<_>>()
    };
    mirrors(cores).flat_map(of_each).collect()
}

impl Together {
    /// What a node is called.
    pub(super) fn name(&self, node: NodeId) -> String {
        let known = self.nodes.get(&node);
        known.map_or_else(|| format!("number {node}"), |view| view.record.name.clone())
    }

    /// What is known of a node. While the store does not answer, that is little.
    pub(super) fn state_of(&self, node: NodeId) -> NodeState {
        let Some(view) = self.nodes.get(&node).filter(|_| node != self.me) else {
            return if node == self.me { NodeState::Runs } else { NodeState::Down };
        };
        match (&self.store.error, view.alive) {
            _ if self.linked.contains(&node) => NodeState::Runs,
            (Some(_), _) => NodeState::Unknown,
            (None, true) if self.silent.contains(&node) => NodeState::Unknown,
            (None, true) => NodeState::Runs,
            (None, false) => NodeState::Down,
        }
    }

    /// Whether a node runs, as far as is known.
    pub(super) fn runs(&self, node: NodeId) -> bool {
        self.state_of(node) == NodeState::Runs
    }

    /// Whether this node reaches neither the store nor any node that it can ask: it is cut off, or they are down.
    pub(super) fn is_cut_off(&self) -> bool {
        self.store.error.is_some()
            && self.nodes.len() > 1
            && self.linked.is_empty()
            && self.reached.is_empty()
            && self.others().any(|view| !self.is_unasked(view))
            && self.store.nobody_answers(self.me)
    }

    fn others(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values().filter(|view| view.record.node != self.me)
    }

    /// Whether a node can be asked neither by itself nor by the member of the store that it runs.
    fn is_unasked(&self, view: &NodeView) -> bool {
        !can_be_asked(view) && !self.store.has_member_of(view.record.node)
    }

    /// That this node is cut off.
    fn cut_off(&self) -> Finding {
        let names = |unasked: bool| {
            let which = self.others().filter(|view| self.is_unasked(view) == unasked);
            which.map(|view| view.record.name.as_str()).collect::<Vec<_>>()
        };
        let (asked, unasked) = (names(false), names(true));
        let what = match &unasked[..] {
            [] => "it reaches neither the metadata store nor any other node: it is cut off, or all others are down"
                .to_owned(),
            unasked => format!(
                "it reaches neither the metadata store nor any node that it can ask ({}): it is cut off, or they are down. \
                 {} cannot be asked: a witness that runs no member of the store listens to nobody",
                asked.join(", "),
                unasked.join(", ")
            ),
        };
        let message = format!("{what}. How they and the volumes on them are is not known here");
        let name = self.name(self.me);
        let nodes = if asked.len() == 1 { "node" } else { "nodes" };
        let hint = format!(
            "look at the network of node {name}: its links, its firewall (ports 7480, 2379 and 2380 unless set \
             otherwise), and start windrose on {nodes} {} where it does not run. `windrose status` on another node says how \
             the volumes are. Of the metadata store: {MAJORITY_LOST}",
            asked.join(", ")
        );
        // What has its only copy here goes on.
        let serves = |volume: &Uuid| !self.served_by(*volume).is_empty();
        let all_serve = !self.mirrors.is_empty() && self.mirrors.keys().all(serves);
        let severity = if all_serve { Severity::Warning } else { Severity::Critical };
        finding(severity, format!("node {name}"), message, Some(&hint))
    }

    /// A volume as a node has told of it, if that runs.
    pub(super) fn seen(&self, node: NodeId, volume: Uuid) -> Option<&SeenMirror> {
        self.told_by(node)?.mirrors.get(&volume)
    }

    /// Why a node cannot open a volume, as it has told, if it runs.
    pub(super) fn broken(&self, node: NodeId, volume: Uuid) -> Option<&str> {
        self.told_by(node)?.broken.get(&volume).map(String::as_str)
    }

    fn told_by(&self, node: NodeId) -> Option<&NodeReport> {
        self.told.get(&node).filter(|_| self.state_of(node) == NodeState::Runs)
    }

    /// The nodes through which a volume is served.
    pub(super) fn served_by(&self, volume: Uuid) -> Vec<NodeId> {
        let Some(mirror) = self.mirrors.get(&volume) else { return Vec::new() };
        let members = mirror.in_sync.iter().map(|m| m.node);
        members.filter(|n| self.seen(*n, volume).is_some_and(|s| s.serves)).collect()
    }

    /// Whether the record of a volume's mirror is lost: one of several copies begins with the volume.
    pub(super) fn lacks_mirror(&self, record: &VolumeRecord) -> bool {
        !self.mirrors.contains_key(&record.id) && record.places.len() > 1
    }

    /// Whether some node that could serve a volume has not told of it yet.
    pub(super) fn is_young(&self, volume: Uuid) -> bool {
        let Some(mirror) = self.mirrors.get(&volume) else { return true };
        let mut members = mirror.in_sync.iter().map(|m| m.node);
        let silent = |n| self.seen(n, volume).is_none() && self.broken(n, volume).is_none();
        members.any(|n| self.state_of(n) == NodeState::Runs && silent(n))
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
        let seen = self.seen(self.me, record.id);
        let reservations = seen.and_then(unreadable_reservations);
        let here = reservations.or_else(|| seen.and_then(|s| s.why.clone()));
        here.unwrap_or_else(|| "it is being opened".into())
    }

    /// What there is to say of the cluster itself.
    pub(super) fn findings(&self, findings: &mut Vec<Finding>) {
        let subject = |name: &str| format!("node {name}");
        if self.is_cut_off() {
            findings.push(self.cut_off());
        }
        self.store.findings(&self.nodes, findings);
        findings.extend(clocks::findings(&self.told, &self.nodes));
        findings.extend(self.repair_settings());
        for (node, view) in &self.nodes {
            let name = &view.record.name;
            if view.record.drained {
                let hint = format!("windrose node resume {name}");
                let message = "it is drained: it keeps out of service";
                findings.push(finding(Severity::Note, subject(name), message, Some(&hint)));
            } else if self.state_of(*node) == NodeState::Down {
                let hint = format!(
                    "start windrose on node {name}, or mend its network; if it never comes back: windrose cluster leave --node {} \
                     --force",
                    super::cluster::called(&self.nodes, view)
                );
                let message = "it gives no sign of life: it is down, or cut off";
                findings.push(finding(Severity::Warning, subject(name), message, Some(&hint)));
            } else if self.silent.contains(node) {
                let hint = format!("if this stays, look whether windrose runs on node {name}");
                let message = "it does not answer any more: it has just ended, or is cut off";
                findings.push(finding(Severity::Warning, subject(name), message, Some(&hint)));
            }
        }
    }

    /// That nodes which keep data differ in when they make copies of nodes that are gone.
    fn repair_settings(&self) -> Option<Finding> {
        let is_data =
            |node: &NodeId| self.nodes.get(node).is_some_and(|view| view.record.role == Role::Data);
        let runs = |node: &NodeId| self.state_of(*node) == NodeState::Runs && is_data(node);
        let set = self.told.iter().filter(|(node, _)| runs(node));
        let set: Vec<_> = set.map(|(node, report)| (*node, report.repair_after_s)).collect();
        let (_, first) = set.first()?;
        if set.iter().all(|(_, after_s)| after_s == first) {
            return None;
        }
        let says = set.iter().map(|(node, after_s)| match after_s {
            0 => format!("\"off\" at {}", self.name(*node)),
            seconds => format!("{seconds} at {}", self.name(*node)),
        });
        let message = format!(
            "cluster.repair_after_s is {}: that of the node which leads a volume counts",
            says.collect::<Vec<_>>().join(", ")
        );
        let hint = "set it to the same in the configuration of all nodes, and restart them";
        Some(finding(Severity::Note, "cluster", message, Some(hint)))
    }

    /// What there is to say of a volume that exists.
    pub(super) fn volume_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        if record.stage != Stage::Ready {
            return;
        }
        let subject = format!("volume {}", record.name);
        self.history_findings(record, findings);
        self.unreadable_findings(record, findings);
        self.reservation_findings(record, findings);
        let serving = self.served_by(record.id);
        if self.lacks_mirror(record) {
            let hint = "windrose cluster recover finds out";
            findings.push(finding(Severity::Critical, subject, NO_MIRROR, Some(hint)));
            return;
        }
        if serving.is_empty() && self.created.contains(&record.id) && self.is_young(record.id) {
            let message = "it was created just now, and is being opened";
            findings.push(finding(Severity::Warning, subject, message, Some(BY_ITSELF)));
            return;
        }
        if serving.is_empty() {
            let (message, hint) = self.down(record);
            findings.push(finding(Severity::Critical, subject, message, Some(&hint)));
            return;
        }
        let all_good = self.copy_findings(record, findings);
        let has_all = !self.missing_copies(record, findings);
        if all_good && has_all && record.places.len() == 1 {
            let hint = self.add_another(record);
            findings.push(finding(Severity::Note, subject, "it has one copy", Some(&hint)));
        } else if all_good && record.place(self.me).is_some() && !serving.contains(&self.me) {
            let message = format!("not served by this node: {}", self.why_not(record));
            let seen = self.seen(self.me, record.id);
            let next = seen.map(|seen| self.next_at(record, self.me, seen));
            let next = next.unwrap_or_else(|| BY_ITSELF.to_owned());
            findings.push(finding(Severity::Warning, subject, message, Some(&next)));
        }
    }

    /// Reservations that cannot be read: nobody knows whom they shut out, so nobody is let in.
    fn reservation_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) {
        let name = &record.name;
        let is_served = !self.served_by(record.id).is_empty();
        let severity = if is_served { Severity::Warning } else { Severity::Critical };
        for place in &record.places {
            let Some(seen) = self.seen(place.node, record.id) else { continue };
            let Some(why) = unreadable_reservations(seen) else { continue };
            let node = self.name(place.node);
            let message = format!("on {node} {why}");
            let hint = reservations_hint(name.as_str(), Some(&node));
            let subject = format!("volume {name}");
            findings.push(finding(severity, subject, message, Some(&hint)));
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
                 `windrose volume mirror verify {name}`); reads depend on the node that is asked",
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

    /// Why a volume is served by nobody, as far as is known here, node by node; and what helps.
    pub(super) fn down(&self, record: &VolumeRecord) -> (String, String) {
        let all = record.places.iter().map(|place| self.down_at(record, place));
        let (mut says, mut next) = (Vec::new(), Vec::new());
        for (why, step) in all {
            says.push(why);
            if !next.contains(&step) {
                next.push(step);
            }
        }
        let passes = |step: &String| step == BY_ITSELF;
        if !next.iter().all(passes) {
            next.retain(|step| !passes(step));
        }
        (says.join("; "), next.join("; "))
    }

    /// Why the copy at one place does not serve, and the next step.
    fn down_at(&self, record: &VolumeRecord, place: &Place) -> (String, String) {
        let name = self.name(place.node);
        let start = format!("start windrose on node {name}, or mend its network");
        let retry = format!("remove the obstacle: node {name} tries again every 30 seconds");
        if let PlaceStage::Failed { reason } = &place.stage {
            return (format!("{name}: its copy was not made: {reason}"), retry);
        }
        let said = match (self.state_of(place.node), self.seen(place.node, record.id)) {
            (NodeState::Down, _) => ("the node is down, or cut off".to_owned(), start),
            (NodeState::Unknown, _) if self.store.error.is_some() => (
                "whether it serves there is not known, as this node does not reach the metadata store".to_owned(),
                format!("`windrose status` on node {name} says how it is"),
            ),
            (NodeState::Unknown, _) => ("the node does not answer any more".to_owned(), start),
            (NodeState::Runs, Some(seen)) if seen.lost.is_some() => {
                self.lost(record, place.node, seen)
            }
            (NodeState::Runs, Some(seen)) => {
                let why = unreadable_reservations(seen).or_else(|| seen.why.clone());
                let why = why.unwrap_or_else(|| "it is being opened".to_owned());
                (why, self.next_at(record, place.node, seen))
            }
            (NodeState::Runs, None) => match self.broken(place.node, record.id) {
                Some(why) => (why.to_owned(), broken_next(record, &name)),
                None if self.told_by(place.node).is_none() && self.store.error.is_some() => (
                    "whether it serves there is not known, as this node does not reach the metadata store"
                        .to_owned(),
                    format!("`windrose status` on node {name} says how it is"),
                ),
                None => ("it is being opened".to_owned(), BY_ITSELF.to_owned()),
            },
        };
        (format!("{name}: {}", said.0), said.1)
    }

    /// The next step for a copy that is open on `node` and does not serve.
    fn next_at(&self, record: &VolumeRecord, node: NodeId, seen: &SeenMirror) -> String {
        if seen.reservations.is_some() {
            return reservations_hint(record.name.as_str(), Some(&self.name(node)));
        }
        seen.next.clone().unwrap_or_else(|| BY_ITSELF.to_owned())
    }

    /// A lost image of a volume that nobody serves.
    fn lost(&self, record: &VolumeRecord, node: NodeId, seen: &SeenMirror) -> (String, String) {
        let (name, lost) = (self.name(node), seen.lost.clone().unwrap_or_default());
        let mirror = self.mirrors.get(&record.id);
        let is_member = mirror.is_some_and(|mirror| mirror.member(node).is_some());
        let next = if is_member {
            format!(
                "look at that disk, then restart windrose on node {name} (systemctl restart windrose): what was written \
                 last and not flushed may be lost"
            )
        } else {
            format!("node {name} opens it again by itself when the disk answers")
        };
        (format!("{lost}: the image is used no more as it is open"), next)
    }
}

/// That reservations cannot be read.
fn unreadable_reservations(seen: &SeenMirror) -> Option<String> {
    let why = seen.reservations.as_ref()?;
    Some(format!("its reservations cannot be read ({why}): initiators are refused"))
}

/// What to do about reservations that cannot be read.
pub(super) fn reservations_hint(volume: &str, node: Option<&str>) -> String {
    let at = node.map(|node| format!(" on node {node}")).unwrap_or_default();
    format!(
        "windrose volume reservations {volume} --clear --yes{at} puts empty ones in their place: stop hosts that keep each \
         other out by them first, and let them register again"
    )
}

#[cfg(test)]
mod tests {
    use api::CopyState;
    use block::Epoch;
    use cluster::nodes::NodeView;
    use mirror::record::{Differing, History, Member, Replica};
    use peer::Incarnation;

    use super::super::report::Resync;
    use super::*;
    use crate::record::tests::{place, record};

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn node(id: NodeId, alive: bool) -> (NodeId, NodeView) {
        crate::control::members::tests::node(id.0, &format!("n{id}"), alive)
    }

    fn serves(why: Option<&str>) -> SeenMirror {
        let why: Option<String> = why.map(Into::into);
        let linked = vec![A.0, B.0];
        SeenMirror { serves: why.is_none(), why, linked, ..SeenMirror::default() }
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
            ..Together::default()
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
        assert!(
            all.contains(&(
                Severity::Warning,
                "it gives no sign of life: it is down, or cut off".into()
            )),
            "{all:?}"
        );
        let down = "n1: waiting for n2; n2: the node is down, or cut off";
        assert!(all.contains(&(Severity::Critical, down.into())), "{all:?}");
    }

    #[test]
    fn a_volume_that_was_just_created_is_given_a_moment_and_another_is_not() {
        let (mut together, volume) = look(&[A, B], &[(A, serves(Some("it is being opened")))]);
        assert!(together.is_young(volume.id));
        let message = "n1: it is being opened; n2: it is being opened".to_owned();
        assert_eq!(found(&together, &volume), [(Severity::Critical, message)]);
        together.created = [volume.id].into();
        let message = "it was created just now, and is being opened".to_owned();
        assert_eq!(found(&together, &volume), [(Severity::Warning, message)]);
    }

    /// a is told by `change` how it sees the others, none of which its mirrors hear.
    fn without_store(change: impl FnOnce(&mut Together)) -> (bool, Vec<Finding>) {
        let (mut together, _) = look(&[A], &[(A, serves(None))]);
        let (store, why) = ("etcd".into(), "it does not answer".into());
        together.store.error = Some(MetaError::Unreachable { store, why });
        change(&mut together);
        let mut findings = Vec::new();
        together.findings(&mut findings);
        (together.is_cut_off(), findings)
    }

    #[test]
    fn a_node_that_another_one_answers_is_not_said_to_be_cut_off() {
        let (cut_off, found) = without_store(|together| together.reached = [NodeId(3)].into());
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
        for part in ["start windrose on nodes n2, n3", "systemctl restart", "recover --plan"] {
            assert!(hint.contains(part), "{hint}");
        }
        assert!(found.iter().any(|f| f.message.contains("the store etcd cannot be reached")));
    }

    #[test]
    fn of_a_node_that_cannot_be_asked_nothing_is_claimed() {
        let witness = |together: &mut Together, node: NodeId| {
            together.nodes.get_mut(&node).unwrap().record.role = Role::Witness;
        };
        let (cut_off, found) = without_store(|together| witness(together, NodeId(3)));
        let said = &found[0].message;
        assert!(cut_off && said.contains("nor any node that it can ask (n2)"), "{said}");
        assert!(said.contains("n3 cannot be asked") && !said.contains("any other node"), "{said}");
        // Nobody was asked at all.
        let (cut_off, found) = without_store(|together| {
            witness(together, B);
            witness(together, NodeId(3));
        });
        assert!(!cut_off, "{found:?}");
    }

    #[test]
    fn a_cluster_that_cannot_lose_a_node_says_so() {
        let (mut together, volume) = look(&[A, B], &[(A, serves(None)), (B, serves(None))]);
        together.nodes.remove(&NodeId(3));
        together.linked = [B].into();
        let (store, why) = ("etcd".into(), "it does not answer".into());
        together.store.error = Some(MetaError::Unreachable { store, why });
        let all = found(&together, &volume);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].1.contains("volumes that serve go on"));
        assert!(all[1].1.contains("2 of the 3 nodes"));
    }
}
