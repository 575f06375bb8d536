//! What state the copies of a volume are in, why one is not in sync, and what helps.

use api::{Backing, CopyState, Finding, Severity, VolumeCopy, VolumeName};
use cluster::identity::Role;
use cluster::nodes::NodeView;
use disk::utc;
use mirror::record::Record;
use peer::NodeId;
use uuid::Uuid;

use super::cluster::called;
use super::old_images::make_again;
use super::placement::no_other_node;
use super::report::{MissingCopy, Resync, SeenMirror};
use super::status::finding;
use super::together::{NodeState, Together};
use super::why::BY_ITSELF;
use crate::record::{Place, PlaceStage, Stage, VolumeRecord};

/// Why a copy is not in sync, and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) why: String,
    pub(super) next: String,
}

impl Trouble {
    fn new(why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { why: why.into(), next: next.into() }
    }
}

impl Together {
    /// The copies of a volume.
    pub(super) fn copies(&self, record: &VolumeRecord) -> Vec<VolumeCopy> {
        let primary = self.mirrors.get(&record.id).map(|m| m.primary);
        let copy = |place: &Place| {
            let state = self.copy_state(record, place);
            let trouble = self.trouble(record, place, &state);
            let (reason, hint) = trouble.map(|t| (t.why, t.next)).unzip();
            VolumeCopy {
                node: self.name(place.node),
                backing: place.backing.clone(),
                state,
                reason,
                hint,
                primary: primary == Some(place.node),
            }
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
            PlaceStage::Made | PlaceStage::Superseded => {}
        }
        let Some(mirror) = self.mirrors.get(&record.id) else { return CopyState::Unknown };
        if mirror.member(place.node).is_some() {
            // What its node cannot open holds nothing, as far as anybody knows.
            return match self.broken(place.node, record.id) {
                Some(_) => CopyState::Outdated,
                None => CopyState::InSync,
            };
        }
        match self.resync(mirror, record.id, place.node) {
            Some(r) => CopyState::Resyncing {
                done_bytes: r.done_bytes,
                total_bytes: r.total_bytes,
                eta_s: r.eta_s,
                unreadable: r.unreadable.ranges.clone(),
            },
            // It goes once it is in sync, unless it is that before the one which is being made.
            None if place.stage == PlaceStage::Superseded && !is_repaired(record, place.node) => {
                CopyState::Leaving
            }
            None => CopyState::Outdated,
        }
    }

    fn resync(&self, mirror: &Record, volume: Uuid, node: NodeId) -> Option<&Resync> {
        self.seen(mirror.primary, volume)?.resyncs.iter().find(|r| r.node == node.0)
    }

    /// What is the matter with a copy, if it is not as good as it should be.
    fn trouble(&self, record: &VolumeRecord, place: &Place, state: &CopyState) -> Option<Trouble> {
        let node = self.name(place.node);
        match state {
            CopyState::InSync => {
                let full = self.seen(place.node, record.id).is_some_and(|seen| seen.full);
                self.failing_disk(record, place.node).or_else(|| full.then(|| self.full(place)))
            }
            CopyState::Leaving => self.going(record, place),
            CopyState::Resyncing { .. } => {
                let refused = self.seen(place.node, record.id).and_then(refusal);
                refused.map(|why| Trouble::new(why, BY_ITSELF))
            }
            CopyState::Outdated if place.stage == PlaceStage::Superseded => {
                self.going(record, place)
            }
            CopyState::Outdated => Some(self.outdated(record, place.node)),
            CopyState::BeingMade => match self.state_of(place.node) {
                NodeState::Runs => Some(Trouble::new("its node makes it", BY_ITSELF)),
                NodeState::Down | NodeState::Unknown => Some(self.without_node(place.node)),
            },
            CopyState::Failed { reason } => Some(Trouble::new(
                reason.clone(),
                make_again(record, &place.backing, &node, reason),
            )),
            CopyState::Unknown => Some(Trouble::new(
                "the record of the volume's mirror is not there",
                "windrose cluster recover --plan",
            )),
        }
    }

    /// A copy that is to go and waits for its node.
    fn going(&self, record: &VolumeRecord, place: &Place) -> Option<Trouble> {
        let (node, name) = (self.name(place.node), &record.name);
        let is_down = self.state_of(place.node) == NodeState::Down;
        let called = self.nodes.get(&place.node).map(|view| called(&self.nodes, view));
        let start = format!(
            "start windrose on node {node}, or mend its network; if it never comes back: windrose cluster leave --node {} --force",
            called.unwrap_or_else(|| place.node.to_string())
        );
        if place.stage != PlaceStage::Superseded {
            return is_down.then(|| Trouble::new("its node removes it when it runs again", start));
        }
        let why = match is_repaired(record, place.node) {
            true => {
                "another one is being made, as its node was gone: whichever is in sync first stays"
            }
            false => {
                "another one has taken its place, as its node was gone: it goes once its node is back and it is in sync"
            }
        };
        let go = format!(
            "wait; or have it go as it is: windrose volume mirror remove {name} --on {node}"
        );
        Some(Trouble::new(why, if is_down { start } else { go }))
    }

    /// A copy whose node is not there.
    fn without_node(&self, node: NodeId) -> Trouble {
        let name = self.name(node);
        match self.state_of(node) {
            NodeState::Down => Trouble::new(
                format!("node {name} is down, or cut off"),
                format!("start windrose on node {name}, or mend its network"),
            ),
            NodeState::Unknown | NodeState::Runs => Trouble::new(
                format!("how it is on node {name} is not known here"),
                format!("`windrose status` on node {name} says how it is"),
            ),
        }
    }

    /// Why nobody brings the copy on `node` in sync now.
    fn outdated(&self, record: &VolumeRecord, node: NodeId) -> Trouble {
        let (called, name) = (self.name(node), &record.name);
        if self.state_of(node) != NodeState::Runs {
            return self.without_node(node);
        }
        if self.nodes.get(&node).is_some_and(|view| view.record.drained) {
            return Trouble::new(
                format!("node {called} is drained"),
                format!("windrose node resume {called}"),
            );
        }
        if let Some(why) = self.broken(node, record.id) {
            return Trouble::new(why, broken_next(record, &called));
        }
        let Some(seen) = self.seen(node, record.id) else {
            return Trouble::new(format!("node {called} has not told of it yet"), BY_ITSELF);
        };
        let disk = format!(
            "look at that disk; if it is broken, replace it, then: windrose volume mirror replace {name} --on {called}"
        );
        if let Some(lost) = &seen.lost {
            return Trouble::new(
                lost,
                format!("node {called} opens it again by itself when the disk answers; {disk}"),
            );
        }
        if let Some(place) = record.place(node).filter(|_| seen.full) {
            let (full, room) = self.lacks_space(place);
            return Trouble::new(full, format!("{room}: it is tried again within a minute"));
        }
        if let Some(refused) = refusal(seen) {
            return Trouble::new(refused, format!("it is tried again within a minute; {disk}"));
        }
        self.not_brought_in_sync(record, node)
    }

    /// The copy on `node` is open and well: what its primary says of it.
    fn not_brought_in_sync(&self, record: &VolumeRecord, node: NodeId) -> Trouble {
        let called = self.name(node);
        let Some(primary) = self.mirrors.get(&record.id).map(|mirror| mirror.primary) else {
            return Trouble::new("nobody leads the volume", BY_ITSELF);
        };
        let (leads, name) = (self.name(primary), &record.name);
        let Some(seen) = self.seen(primary, record.id) else {
            let why = format!("it waits for node {leads}, which brings it in sync");
            return Trouble::new(why, self.without_node(primary).next);
        };
        if seen.newer.contains(&node.0) {
            let why =
                format!("it is newer than the copy on {leads}, with which the volume goes on");
            let next = format!(
                "to give it up: windrose volume mirror replace {name} --on {called}; to go on with it: switch {leads} off, \
                 then windrose volume force {name} at {called}"
            );
            return Trouble::new(why, next);
        }
        if !seen.linked.contains(&node.0) {
            return Trouble::new(
                format!("nodes {leads} and {called} do not reach each other"),
                format!(
                    "look at the network between {leads} and {called} (the addresses of cluster.listen, port 7480 unless set \
                     otherwise)"
                ),
            );
        }
        match seen.failed_resyncs.get(&node.0) {
            Some(why) => Trouble::new(
                format!("the last resync from {leads} has failed: {why}"),
                format!("it is tried again within a minute; the log of node {leads} says more"),
            ),
            None => Trouble::new(format!("{leads} is about to bring it in sync"), BY_ITSELF),
        }
    }

    /// That a copy which is in sync has no space for more.
    fn full(&self, place: &Place) -> Trouble {
        let (full, room) = self.lacks_space(place);
        let why = format!("{full}: writes that need more space are refused");
        let next = format!(
            "{room}, or free space in the volume (fstrim on its initiators): writes go on by themselves then"
        );
        Trouble::new(why, next)
    }

    /// That there is no space where a copy lies, and where to make some.
    fn lacks_space(&self, place: &Place) -> (String, String) {
        let node = self.name(place.node);
        match &place.backing {
            Backing::File { path } => (
                format!("the file system of {} is full (no space left)", path.display()),
                format!("make room in that file system on node {node}"),
            ),
            Backing::Device { path } => (
                format!("{} is full (no space left)", path.display()),
                format!("give that device more space on node {node}"),
            ),
            Backing::Pool { pool } => (
                format!("pool {pool} is full (no space left)"),
                format!("add disks on node {node}: windrose pool add {pool} DISK"),
            ),
        }
    }

    /// That the disk of a copy which is in sync fails reads.
    fn failing_disk(&self, record: &VolumeRecord, node: NodeId) -> Option<Trouble> {
        let failed = self.seen(node, record.id)?.failed_reads;
        if failed == 0 {
            return None;
        }
        let (called, name) = (self.name(node), &record.name);
        let others = record.places.iter().filter(|p| p.node != node && p.stage.is_kept());
        let (answered, next) = match others.count() {
            0 => ("", format!("look at that disk; for another copy: {}", self.add_another(record))),
            _ => (
                "; other copies answer them",
                format!(
                    "look at that disk. To replace it: windrose volume mirror remove {name} --on {called}, change the disk, \
                     then windrose volume mirror add {name} --on {called}. This ends an hour after the last failed read"
                ),
            ),
        };
        let why = format!("its disk has failed {failed} reads in the last hour{answered}");
        Some(Trouble::new(why, next))
    }

    /// What is the matter with the copies of a volume that serves; `None` if all are in sync.
    pub(super) fn copy_findings(&self, record: &VolumeRecord, findings: &mut Vec<Finding>) -> bool {
        let subject = format!("volume {}", record.name);
        let copies = self.copies(record);
        for copy in copies.iter().filter(|copy| copy.state == CopyState::InSync) {
            if let (Some(why), hint) = (&copy.reason, copy.hint.as_deref()) {
                let message = format!("the copy on {}: {why}", copy.node);
                findings.push(finding(Severity::Warning, &subject, message, hint));
            }
        }
        let places = record.places.iter().zip(&copies);
        let (superseded, counted): (Vec<_>, Vec<_>) =
            places.partition(|(place, _)| place.stage == PlaceStage::Superseded);
        let counted: Vec<_> = counted.into_iter().map(|(_, copy)| copy).collect();
        let mut lacking: Vec<_> = counted.iter().filter_map(|copy| lack(copy)).collect();
        if lacking.is_empty() {
            findings.extend(superseded.iter().map(|(_, copy)| needless(&subject, copy)));
            return true;
        }
        let mut next = Vec::new();
        for copy in counted.iter().filter(|copy| lack(copy).is_some()) {
            next.extend(copy.hint.as_deref().filter(|hint| !next.contains(hint)));
        }
        let missing = self.missing_copy(record).filter(|_| !lacks_copies(record));
        lacking.extend(self.repaired_since(record));
        lacking.extend(missing.map(|missing| missing.why.clone()));
        next.extend(missing.and_then(|missing| missing.next.as_deref()));
        let all = counted.iter().filter(|copy| copy.state != CopyState::Leaving).count();
        let good = copies.iter().filter(|copy| copy.state == CopyState::InSync).count().min(all);
        let message = format!("{good} of {all} copies are in sync: {}", lacking.join("; "));
        let hint = if next.is_empty() { BY_ITSELF.to_owned() } else { next.join("; ") };
        findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        false
    }

    /// That a volume which serves has fewer copies than it is to have; whether that is so. Those that were not made are
    /// told of one by one.
    pub(super) fn missing_copies(
        &self,
        record: &VolumeRecord,
        findings: &mut Vec<Finding>,
    ) -> bool {
        if !lacks_copies(record) {
            return false;
        }
        let (name, has) = (&record.name, record.standing().count().max(1));
        let missing = self.missing_copy(record);
        let why = missing.map(|missing| format!(": {}", missing.why)).unwrap_or_default();
        let wanted = record.copies_wanted;
        let message = format!("it has {has} of the {wanted} copies that it is to have{why}");
        let fewer = format!("to do with {has}: windrose volume mirror set {name} --replicas {has}");
        let hint = match missing {
            Some(MissingCopy { next: Some(next), .. }) => format!("{next}; {fewer}"),
            // Who says so has looked for a place.
            Some(MissingCopy { next: None, .. }) => {
                format!("windrose volume mirror add {name}; {fewer}")
            }
            None => format!("{}; {fewer}", self.add_another(record)),
        };
        let subject = format!("volume {name}");
        findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        true
    }

    /// Whether the findings about the copies of a volume tell why this node cannot open its own.
    pub(super) fn tells_of_own_copy(&self, record: &VolumeRecord) -> bool {
        let is_made = |place: &Place| place.stage == PlaceStage::Made;
        record.place(self.me).is_some_and(is_made)
            && !self.lacks_mirror(record)
            && self.broken(self.me, record.id).is_some()
    }

    /// That a volume is being deleted and waits for nodes that do not run.
    pub(super) fn deletion_finding(&self, record: &VolumeRecord) -> Option<Finding> {
        let is_away = |place: &&Place| self.state_of(place.node) == NodeState::Down;
        let away = record.places.iter().filter(is_away).filter(|_| record.stage == Stage::Deleting);
        let (names, called): (Vec<_>, Vec<_>) = away
            .map(|place| {
                let called = self.nodes.get(&place.node).map(|view| called(&self.nodes, view));
                (self.name(place.node), called.unwrap_or_else(|| place.node.to_string()))
            })
            .unzip();
        if names.is_empty() {
            return None;
        }
        let leave = |node: &String| format!("windrose cluster leave --node {node} --force");
        let leave: Vec<_> = called.iter().map(leave).collect();
        let names = names.join(", ");
        let message = format!(
            "it is being deleted: the copy on {names} is erased when that node runs again, and the name is taken until then"
        );
        let hint = format!(
            "start windrose on node {names}, or mend its network; if it never comes back: {}",
            leave.join("; ")
        );
        Some(finding(Severity::Warning, format!("volume {}", record.name), message, Some(&hint)))
    }

    /// What the primary says of a copy that a volume lacks.
    fn missing_copy(&self, record: &VolumeRecord) -> Option<&MissingCopy> {
        let mirror = self.mirrors.get(&record.id)?;
        self.seen(mirror.primary, record.id)?.missing.as_ref()
    }

    /// Since when a copy is being made in place of one that was missing.
    fn repaired_since(&self, record: &VolumeRecord) -> Option<String> {
        let repair = record.repair.as_ref()?;
        let (node, since) = (self.name(repair.node), utc(repair.since_s));
        let instead_of = repair.instead_of.map(|node| {
            format!(", in place of the one on {}, whose node is gone", self.name(node))
        });
        Some(format!(
            "a copy is being made on {node} since {since}{}",
            instead_of.unwrap_or_default()
        ))
    }

    /// The command that adds a copy, with what has to be done before where no node can keep one.
    pub(super) fn add_another(&self, record: &VolumeRecord) -> String {
        let add = format!("windrose volume mirror add {}", record.name);
        match self.nobody_for(record) {
            Some(why) => format!("{why}: add a node (windrose cluster join), then: {add}"),
            None => add,
        }
    }

    /// Why no node can keep another copy of a volume, if that is so.
    fn nobody_for(&self, record: &VolumeRecord) -> Option<String> {
        let others = self.nodes.iter().filter(|(node, _)| record.place(**node).is_none());
        let mut why = Vec::new();
        for (node, NodeView { record, .. }) in others {
            let name = &record.name;
            why.push(match self.state_of(*node) {
                _ if record.role == Role::Witness => format!("{name} is a witness"),
                NodeState::Down => format!("{name} is down, or cut off"),
                NodeState::Unknown => format!("{name} is not reached from here"),
                NodeState::Runs if record.drained => format!("{name} is drained"),
                NodeState::Runs => return None,
            });
        }
        Some(no_other_node(&why))
    }
}

/// What helps a node that cannot open its copy of a volume.
pub(super) fn broken_next(record: &VolumeRecord, node: &str) -> String {
    let (name, has_others) = (&record.name, record.places.len() > 1);
    let lost = match has_others {
        true => format!("if the disk is lost: windrose volume mirror replace {name} --on {node}"),
        false => lost_for_good(name),
    };
    format!("remove the obstacle: node {node} tries again every 30 seconds; {lost}")
}

/// What is left to do where the only image of a volume is lost.
pub(super) fn lost_for_good(name: &VolumeName) -> String {
    format!(
        "if the image is lost, restore it from a backup, or give it up: windrose volume delete {name} --discard"
    )
}

/// Whether a volume has fewer copies than it is to have, those included that were not made.
fn lacks_copies(record: &VolumeRecord) -> bool {
    let failed = record.places.iter().filter(|p| matches!(p.stage, PlaceStage::Failed { .. }));
    record.standing().count() + failed.count() < usize::from(record.copies_wanted)
}

/// Whether a copy is being made in place of the one on `node`.
fn is_repaired(record: &VolumeRecord, node: NodeId) -> bool {
    record.repair.as_ref().is_some_and(|repair| repair.instead_of == Some(node))
}

/// That a copy is one too many.
fn needless(subject: &str, copy: &VolumeCopy) -> Finding {
    let why = copy.reason.as_deref().unwrap_or("it is in sync, and about to go");
    let message = format!("the copy on {} is not needed any more: {why}", copy.node);
    finding(Severity::Note, subject, message, Some(copy.hint.as_deref().unwrap_or(BY_ITSELF)))
}

/// That the disk of a copy has refused something.
fn refusal(seen: &SeenMirror) -> Option<String> {
    let refused = seen.refused.as_ref()?;
    Some(format!("its disk has failed an operation ({refused})"))
}

/// What a copy lacks, if it does, and why.
fn lack(copy: &VolumeCopy) -> Option<String> {
    let node = &copy.node;
    let why = copy.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    match &copy.state {
        CopyState::InSync | CopyState::Leaving => None,
        CopyState::Resyncing { done_bytes, total_bytes, eta_s, unreadable } => {
            let left = api::Size(total_bytes.saturating_sub(*done_bytes));
            let eta = match eta_s {
                Some(s) => format!(", {s} s"),
                None if unreadable.is_empty() => String::new(),
                None => ", some of it can be read from no copy".to_owned(),
            };
            Some(format!("the one on {node} is being brought in sync ({left} left{eta}){why}"))
        }
        CopyState::Outdated => Some(format!("the one on {node} is outdated{why}")),
        CopyState::BeingMade => Some(format!("the one on {node} is being made{why}")),
        CopyState::Failed { reason } => Some(format!("the one on {node} was not made: {reason}")),
        CopyState::Unknown => Some(format!("the one on {node} is not known{why}")),
    }
}
