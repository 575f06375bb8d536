//! The verdict table: for every state of disks, replicas, nodes, store, clocks, space, pools and
//! sessions, the status, the exit code of `windrose status`, and what `windrose volume list` and
//! the metrics show. Every problem comes with its reason and the next step.

mod clients;
mod members;
mod pools;

use std::time::Duration;

use api::{ByteRange, ReplicaState, VolumeState};
use block::{Epoch, Lba};
use cluster::store::StoreError;
use cluster::store::etcd::{MemberHealth, MemberInfo, MemberResponse};
use mirror::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig};
use peer::{Incarnation, NodeId};

use super::*;
use crate::report::{
    MissingReplica, NodeReport, ReportedMirror, ResyncReport, UnreadableEverywhere,
};
use crate::samples::{core, facts, open, volume, with_space};
use crate::store_view::StoreView;
use crate::volume_status::volume_state;
use engine::{GuestReport, PoolDiskState};
use records::record::PlacementStage;
use records::samples::place;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);
const W: NodeId = NodeId(3);

/// What `windrose volume list` shows, and the value of `windrose_volume_online`.
type ExpectedState = (&'static str, u8);

const ONLINE: ExpectedState = ("online", 1);
const REMOTE: ExpectedState = ("remote", 1);
const OFFLINE: ExpectedState = ("OFFLINE", 0);
const OPENING: ExpectedState = ("opening", 0);

const SAFE: (Verdict, u8) = (Verdict::Safe, 0);
const AT_RISK: (Verdict, u8) = (Verdict::AtRisk, 5);
const UNAVAILABLE: (Verdict, u8) = (Verdict::Unavailable, 6);

/// The hint for a volume whose only image is lost.
const GIVE_UP: &str = "retries every 30 seconds; if the image is lost, restore it from a backup, \
    or delete the volume: windrose volume delete v --discard";

/// A finding: part of its message, and of its hint.
type ExpectedFinding = (&'static str, &'static str);

/// A row of the table.
struct Row {
    case: &'static str,
    facts: fn() -> NodeFacts,
    verdict: (Verdict, u8),
    shown: ExpectedState,
    findings: &'static [ExpectedFinding],
}

// ---- a cluster: volume v has replicas on a and b, and w is the witness ----

/// As seen from node `me`; `reports` holds what nodes report about the volume.
fn seen(me: NodeId, in_sync: &[NodeId], reports: &[(NodeId, ReportedMirror)]) -> NodeFacts {
    let observed = if me == W { Observed::Closed } else { open() };
    let mut facts = facts(vec![volume("v", observed)]);
    let record = &mut facts.volumes[0].0.record;
    record.placements = vec![place(A, "v"), place(B, "v")];
    record.replicas_wanted = 2;
    let id = record.id;
    let replica =
        |node: NodeId| ConfigReplica { node, image: Uuid::from_u128(node.0.into()), is_new: false };
    let mirror = MirrorConfig {
        epoch: Epoch(1),
        config_id: 1,
        replicas: [A, B].map(replica).into(),
        in_sync: in_sync
            .iter()
            .map(|&node| InSyncMember { node, incarnation: Incarnation(1) })
            .collect(),
        primary: in_sync[0],
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    };
    let report = |(node, reported): &(NodeId, ReportedMirror)| {
        (*node, NodeReport { mirrors: [(id, reported.clone())].into(), ..NodeReport::default() })
    };
    let mut reports: std::collections::BTreeMap<_, _> = reports.iter().map(report).collect();
    reports.entry(me).or_default();
    let node = |id: NodeId, name| crate::samples::node(id.0, name, true);
    facts.cluster = Some(ClusterView {
        this_node: me,
        nodes: [node(A, "a"), node(B, "b"), node(W, "w")].into(),
        store: StoreView { runs_own_members: true, ..StoreView::default() },
        reports,
        mirrors: [(id, mirror)].into(),
        ..ClusterView::default()
    });
    facts
}

fn serves() -> ReportedMirror {
    ReportedMirror { serves: true, peers_with_session: vec![A.0, B.0], ..ReportedMirror::default() }
}

fn idle(why: &str) -> ReportedMirror {
    let (why, next) = (Some(why.to_owned()), Some("the next step".to_owned()));
    ReportedMirror { serves: false, not_serving_reason: why, next_step: next, ..serves() }
}

/// a serves alone; b reports this about its replica, which is out of sync.
fn without_b(b: ReportedMirror) -> NodeFacts {
    seen(A, &[A], &[(A, serves()), (B, b)])
}

fn both() -> NodeFacts {
    seen(A, &[A, B], &[(A, serves()), (B, serves())])
}

/// As a node sees it that does not reach the store.
fn storeless(me: NodeId, own: Option<ReportedMirror>) -> NodeFacts {
    let own: Vec<_> = own.map(|own| (me, own)).into_iter().collect();
    let mut facts = seen(me, &[A, B], &own);
    let (store, why) = ("etcd".into(), "no leader".into());
    cluster(&mut facts).store.error = Some(StoreError::Unreachable { store, why });
    facts
}

fn cluster(facts: &mut NodeFacts) -> &mut ClusterView {
    facts.cluster.as_mut().unwrap()
}

fn only_on_b(me: NodeId) -> NodeFacts {
    let mut facts = seen(me, &[B], &[(B, serves())]);
    remove_copy(&mut facts, A);
    if me == A {
        facts.volumes[0].1 = Observed::Closed;
    }
    facts
}

/// As after an administrator removed the replica.
fn remove_copy(facts: &mut NodeFacts, node: NodeId) {
    let record = &mut facts.volumes[0].0.record;
    record.remove_placement(node);
    record.lower_replicas_wanted();
}

/// Node b has left the cluster, and c has joined, but is down.
fn without_node_b() -> NodeFacts {
    let mut facts = seen(A, &[A], &[(A, serves())]);
    facts.volumes[0].0.record.remove_placement(B);
    cluster(&mut facts).nodes.remove(&B);
    let (c, mut view) = crate::samples::node(4, "c", false);
    view.record.is_drained = true;
    cluster(&mut facts).nodes.insert(c, view);
    cluster(&mut facts).nodes.get_mut(&W).unwrap().record.role = cluster::identity::Role::Witness;
    facts
}

/// What the primary reports about a replica that the volume lacks.
fn missing(facts: &mut NodeFacts, why: &str, next: Option<&str>) {
    let id = facts.volumes[0].0.record.id;
    let said = MissingReplica { why: why.to_owned(), next_step: next.map(str::to_owned) };
    let mirror = cluster(facts).reports.get_mut(&A).unwrap().mirrors.get_mut(&id).unwrap();
    mirror.missing_replica = Some(said);
}

/// Node b is down, and c has a replica in place of b's.
fn repaired() -> NodeFacts {
    let mut facts = seen(A, &[A], &[(A, serves())]);
    let c = NodeId(4);
    let record = &mut facts.volumes[0].0.record;
    record.placements[1].stage = PlacementStage::Superseded;
    record.add_placement(place(c, "v"));
    let (_, view) = crate::samples::node(4, "c", true);
    cluster(&mut facts).nodes.insert(c, view);
    set_alive(&mut facts, B, false);
    facts
}

fn set_alive(facts: &mut NodeFacts, node: NodeId, alive: bool) {
    cluster(facts).nodes.get_mut(&node).unwrap().is_alive = alive;
}

fn broken(facts: &mut NodeFacts, node: NodeId) {
    let id = facts.volumes[0].0.record.id;
    let report = cluster(facts).reports.entry(node).or_default();
    report.mirrors.clear();
    report.open_errors = [(id, "/v/v.img: no such file".to_owned())].into();
}

fn member(node: NodeId, answer: MemberResponse) -> MemberHealth {
    let member = MemberInfo {
        id: node.0.into(),
        name: format!("node-{node}"),
        peer_urls: Vec::new(),
        client_urls: Vec::new(),
        is_learner: false,
    };
    MemberHealth { member, response: answer }
}

fn runs() -> MemberResponse {
    MemberResponse::Running { leader: Some(1), alarms: Vec::new() }
}

fn leaderless() -> MemberResponse {
    MemberResponse::Running { leader: None, alarms: Vec::new() }
}

fn silent() -> MemberResponse {
    MemberResponse::Unreachable { why: "refused".into() }
}

const COPIES: &[Row] = &[
    Row { case: "both copies serve", facts: both, verdict: SAFE, shown: ONLINE, findings: &[] },
    Row {
        case: "both copies serve, seen from the witness",
        facts: || seen(W, &[A, B], &[(A, serves()), (B, serves())]),
        verdict: SAFE,
        shown: REMOTE,
        findings: &[],
    },
    Row {
        case: "the node of a copy does not run",
        facts: || {
            let mut facts = seen(A, &[A], &[(A, serves()), (B, serves())]);
            set_alive(&mut facts, B, false);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it does not respond", "start windrose on node b, or fix its network"),
            ("the one on b is out of sync: node b is down, or cut off", "start windrose on node b"),
        ],
    },
    Row {
        case: "the node of a copy is drained",
        facts: || {
            let mut facts = without_b(idle("this replica is not in sync"));
            cluster(&mut facts).nodes.get_mut(&B).unwrap().record.is_drained = true;
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("the one on b is out of sync: node b is drained", "windrose node resume b")],
    },
    Row {
        case: "a copy is out after a failed flush",
        facts: || {
            let lost = Some("its disk failed a flush, or is gone".to_owned());
            without_b(ReportedMirror { image_lost: lost, ..idle("lost") })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "the one on b is out of sync: its disk failed a flush",
            "node b reopens it when the disk responds",
        )],
    },
    Row {
        case: "a copy is out as its disk hung",
        facts: || {
            let lost = Some("its disk does not respond".to_owned());
            without_b(ReportedMirror { image_lost: lost, ..idle("lost") })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "the one on b is out of sync: its disk does not respond",
            "node b reopens it when the disk responds",
        )],
    },
    Row {
        case: "a copy is out as its disk refused a write",
        facts: || {
            let refused = Some("no space left".to_owned());
            without_b(ReportedMirror { disk_error: refused, ..idle("failed") })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("its disk failed an operation (no space left)", "retried within a minute")],
    },
    Row {
        case: "the image of a copy cannot be opened",
        facts: || {
            let mut facts = without_b(serves());
            broken(&mut facts, B);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("out of sync: /v/v.img: no such file", "node b retries every 30 seconds")],
    },
    Row {
        case: "a copy is brought in sync",
        facts: || {
            let (unreadable, eta_s) = (UnreadableEverywhere::default(), Some(9));
            let resync = ResyncReport { node: 2, done_bytes: 1, total_bytes: 2, eta_s, unreadable };
            let source = ReportedMirror { resyncs: vec![resync], ..serves() };
            seen(A, &[A], &[(A, source), (B, idle("not in sync"))])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("the one on b is resyncing", "resolves itself")],
    },
    Row {
        case: "a resync has failed",
        facts: || {
            let failed_resyncs = [(2, "the source's disk failed".to_owned())].into();
            let source = ReportedMirror { failed_resyncs, ..serves() };
            seen(A, &[A], &[(A, source), (B, idle("not in sync"))])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("the last resync from a failed: the source's disk failed", "within a minute")],
    },
    Row {
        case: "two nodes do not reach each other",
        facts: || {
            let alone = ReportedMirror { peers_with_session: Vec::new(), ..serves() };
            seen(A, &[A], &[(A, alone), (B, idle("not in sync"))])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("nodes a and b cannot reach each other", "the network between a and b")],
    },
    Row {
        case: "some blocks can be read from no copy",
        facts: || {
            let ranges = vec![ByteRange { start_bytes: 0, bytes: 4096 }];
            let unreadable = UnreadableEverywhere { ranges, bytes: 4096 };
            let resync =
                ResyncReport { node: 2, done_bytes: 1, total_bytes: 2, eta_s: None, unreadable };
            let source = ReportedMirror { resyncs: vec![resync], ..serves() };
            seen(A, &[A], &[(A, source), (B, idle("not in sync"))])
        },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[
            ("4 KiB cannot be read from any replica", "restore them from a backup"),
            ("some of it cannot be read from any replica", "resolves itself"),
        ],
    },
    Row {
        case: "a copy is out as its file system is full",
        facts: || {
            let refused = Some("no space left".to_owned());
            without_b(ReportedMirror { disk_error: refused, full: true, ..idle("failed") })
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "the one on b is out of sync: the file system of /v/v is full",
            "free space in that file system on node b: the resync is retried within a minute",
        )],
    },
    Row {
        case: "both copies are full",
        facts: || {
            let full = ReportedMirror { full: true, ..serves() };
            seen(A, &[A, B], &[(A, full.clone()), (B, full)])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            (
                "the replica on a: the file system of /v/v is full (no space left): writes that \
                 need more space are refused",
                "free space in that file system on node a, or free space in the volume",
            ),
            ("the replica on b: the file system of /v/v is full", "writes then succeed again"),
        ],
    },
    Row {
        case: "every read of a copy fails, and the other one answers",
        facts: || {
            let failing = ReportedMirror { failed_reads: 77, ..serves() };
            seen(A, &[A, B], &[(A, serves()), (B, failing)])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("the replica on b: its disk failed 77 reads", "check that disk")],
    },
    Row {
        case: "the reservations have rotted at both copies",
        facts: || {
            let reservations = Some("block 9 is corrupt".to_owned());
            let rotted =
                ReportedMirror { serves: false, reservations_error: reservations, ..serves() };
            seen(A, &[A, B], &[(A, rotted.clone()), (B, rotted)])
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            (
                "on a its reservations cannot be read",
                "windrose volume reservations v --clear --yes",
            ),
            (
                "on b its reservations cannot be read",
                "windrose volume reservations v --clear --yes",
            ),
            ("a: its reservations cannot be read", "--clear --yes on node a"),
        ],
    },
    Row {
        case: "the reservations have rotted at the other node alone",
        facts: || {
            let reservations = Some("block 9 is corrupt".to_owned());
            let rotted =
                ReportedMirror { serves: false, reservations_error: reservations, ..serves() };
            seen(A, &[A, B], &[(A, serves()), (B, rotted)])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("on b its reservations cannot be read", "--clear --yes on node b")],
    },
    Row {
        case: "this node does not serve, and the other does",
        facts: || seen(A, &[A, B], &[(A, idle("it is being opened by b")), (B, serves())]),
        verdict: AT_RISK,
        shown: REMOTE,
        findings: &[("not served by this node: it is being opened by b", "the next step")],
    },
    Row {
        case: "a newer copy is not overwritten",
        facts: || {
            let source = ReportedMirror { newer_replicas: vec![2], ..serves() };
            seen(A, &[A], &[(A, source), (B, idle("not in sync"))])
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("the replica on b is newer", "windrose volume force-primary v"),
            ("it is newer than the replica on a", "windrose volume force-primary v"),
        ],
    },
    Row {
        case: "copies differ",
        facts: || {
            let mut facts = both();
            let id = facts.volumes[0].0.record.id;
            let history = &mut cluster(&mut facts).mirrors.get_mut(&id).unwrap().history;
            let nodes = vec![B];
            let differing =
                mirror::config::ReplicaMismatch { offset_bytes: 0, bytes: 1, nodes, primary: A };
            history.mismatch = Some(differing);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "its replicas differ",
            "windrose volume mirror verify v --repair --source NODE",
        )],
    },
    Row {
        case: "a copy could not be made",
        facts: || {
            let mut facts = seen(A, &[A], &[(A, serves())]);
            let reason = "/dev/sdb: it is in use".to_owned();
            let stage = PlacementStage::Failed { reason };
            facts.volumes[0].0.record.placements[1].stage = stage;
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "the one on b was not created: /dev/sdb",
            "remove the cause, then: windrose volume mirror replace v --on b",
        )],
    },
    Row {
        case: "there is one copy",
        facts: || {
            let mut facts = seen(A, &[A], &[(A, serves())]);
            remove_copy(&mut facts, B);
            facts
        },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("it has one replica", "windrose volume mirror add v")],
    },
    Row {
        case: "the node of a copy was taken out for good, and another one can keep a copy",
        facts: || {
            let mut facts = without_node_b();
            let (c, view) = crate::samples::node(4, "c", true);
            cluster(&mut facts).nodes.insert(c, view);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "it has 1 of 2 replicas",
            "windrose volume mirror add v; to be content with 1: windrose volume mirror set v \
             --replicas 1",
        )],
    },
    Row {
        case: "the node of a copy was taken out for good, and no other one can keep a copy",
        facts: without_node_b,
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "it has 1 of 2 replicas",
            "no other node can take a replica now (w is a witness, c is down, or cut off): add a \
             node (windrose cluster join)",
        )],
    },
    Row {
        case: "the copy of a node that was taken out is made by itself, later",
        facts: || {
            let mut facts = without_node_b();
            missing(
                &mut facts,
                "a replacement is created automatically from 2026-11-27 22:15:03 UTC",
                None,
            );
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "it has 1 of 2 replicas: a replacement is created automatically from 2026-11-27 \
             22:15:03 UTC",
            "windrose volume mirror set v --replicas 1",
        )],
    },
    Row {
        case: "the node of a copy does not run, and its copy cannot be made elsewhere",
        facts: || {
            let mut facts = seen(A, &[A], &[(A, serves()), (B, serves())]);
            set_alive(&mut facts, B, false);
            let why = "no other node can take a replica now (w is a witness)";
            missing(
                &mut facts,
                why,
                Some("add a node (windrose cluster join), or free some space"),
            );
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it does not respond", "start windrose on node b"),
            (
                "node b is down, or cut off; no other node can take a replica now (w is a witness)",
                "start windrose on node b, or fix its network; add a node (windrose cluster join), \
                 or free some space",
            ),
        ],
    },
    Row {
        case: "a copy is being made in place of one whose node is gone",
        facts: || {
            let mut facts = repaired();
            let record = &mut facts.volumes[0].0.record;
            record.placements[2].stage = PlacementStage::Creating { force: false };
            let (node, replaces) = (NodeId(4), Some(B));
            record.repair =
                Some(records::record::PendingRepair { node, replaces, since_s: 1_795_817_703 });
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it does not respond", "start windrose on node b"),
            (
                "1 of 2 replicas are in sync: the one on c is being created: its node is creating \
                 it; a replica is being created on c since 2026-11-27 22:15:03 UTC, to replace the \
                 one on b, whose node is down",
                "resolves itself",
            ),
        ],
    },
    Row {
        case: "a copy was made in place of one whose node is gone",
        facts: || {
            let mut facts = repaired();
            let id = facts.volumes[0].0.record.id;
            let members = &mut cluster(&mut facts).mirrors.get_mut(&id).unwrap().in_sync;
            members.push(InSyncMember { node: NodeId(4), incarnation: Incarnation(1) });
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it does not respond", "start windrose on node b"),
            ("the replica on b is no longer needed", "windrose cluster leave --node b --force"),
        ],
    },
    Row {
        case: "nodes differ in when they make copies",
        facts: || {
            let mut facts = both();
            cluster(&mut facts).reports.get_mut(&A).unwrap().repair_after_s = 1800;
            facts
        },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("cluster.repair_after_s is 1800 at a, \"off\" at b", "the same value in the")],
    },
    Row {
        case: "it was just created",
        facts: || {
            let mut facts = seen(W, &[A, B], &[]);
            let id = facts.volumes[0].0.record.id;
            cluster(&mut facts).just_created = [id].into();
            facts
        },
        verdict: AT_RISK,
        shown: OPENING,
        findings: &[("it was just created", "resolves itself")],
    },
];

const NODES: &[Row] = &[
    Row {
        case: "all nodes are being started",
        facts: || seen(A, &[A, B], &[(A, idle("it is being opened; waiting for b"))]),
        verdict: UNAVAILABLE,
        shown: OPENING,
        findings: &[(
            "a: it is being opened; waiting for b; b: it is being opened",
            "the next step",
        )],
    },
    Row {
        case: "all were restarted, and the newest copy is missing",
        facts: || {
            let mut facts = seen(A, &[A, B], &[(A, idle("all its nodes were down"))]);
            set_alive(&mut facts, B, false);
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("it does not respond", "start windrose on node b, or fix its network"),
            (
                "a: all its nodes were down; b: the node is down, or cut off",
                "start windrose on node b",
            ),
        ],
    },
    Row {
        case: "the node of the only copy does not run",
        facts: || {
            let mut facts = only_on_b(A);
            set_alive(&mut facts, B, false);
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("it does not respond", "start windrose on node b, or fix its network"),
            ("b: the node is down, or cut off", "start windrose on node b"),
        ],
    },
    Row {
        case: "the node of the only copy has just died: the store does not know yet",
        facts: || {
            let mut facts = only_on_b(A);
            cluster(&mut facts).stopped_answering = [B].into();
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("it stopped responding", "check whether windrose runs on node b"),
            ("b: the node stopped responding", "start windrose on node b"),
        ],
    },
    Row {
        case: "the only copy is at another node, and serves",
        facts: || only_on_b(A),
        verdict: SAFE,
        shown: REMOTE,
        findings: &[("it has one replica", "windrose volume mirror add v")],
    },
    Row {
        case: "the only copy cannot be opened, seen from another node",
        facts: || {
            let mut facts = only_on_b(A);
            broken(&mut facts, B);
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("b: /v/v.img: no such file", GIVE_UP)],
    },
    Row {
        case: "the only copy cannot be opened, seen from its node",
        facts: || {
            let mut facts = only_on_b(B);
            broken(&mut facts, B);
            facts.volumes[0].1 = Observed::OpenFailed { reason: "/v/v.img: no such file".into() };
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("b: /v/v.img: no such file", GIVE_UP)],
    },
    Row {
        case: "a copy cannot be opened, and is in sync by the record",
        facts: || {
            let mut facts = both();
            broken(&mut facts, B);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "1 of 2 replicas are in sync: the one on b is out of sync: /v/v.img: no such file",
            "if the disk is lost: windrose volume mirror replace v --on b",
        )],
    },
    Row {
        case: "a volume is being deleted, and a node with a copy does not run",
        facts: || {
            let mut facts = only_on_b(A);
            facts.volumes[0].0.record.stage = VolumeStage::Deleting;
            set_alive(&mut facts, B, false);
            facts
        },
        verdict: AT_RISK,
        shown: ("deleting", 0),
        findings: &[
            ("it does not respond", "start windrose on node b"),
            (
                "it is being deleted: the replica on b is erased when that node runs again",
                "if it is lost for good: windrose cluster leave --node b --force",
            ),
        ],
    },
    Row {
        case: "there is one copy, and no other node can keep one",
        facts: || {
            let mut facts = without_node_b();
            facts.volumes[0].0.record.replicas_wanted = 1;
            set_alive(&mut facts, NodeId(4), true);
            facts
        },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[(
            "it has one replica",
            "no other node can take a replica now (w is a witness, c is drained): add a node \
             (windrose cluster join), then: windrose volume mirror add v",
        )],
    },
    Row {
        case: "the disk of the last copy has failed",
        facts: || {
            let lost = Some("its disk failed a flush, or is gone".to_owned());
            let mut facts =
                seen(A, &[A], &[(A, ReportedMirror { image_lost: lost, ..idle("lost") })]);
            remove_copy(&mut facts, B);
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("a: its disk failed a flush", "then restart windrose on node a")],
    },
    Row {
        case: "the disks of both copies have failed",
        facts: || {
            let lost =
                |why: &str| ReportedMirror { image_lost: Some(why.to_owned()), ..idle("lost") };
            seen(W, &[A], &[(A, lost("its disk does not respond")), (B, lost("its disk is gone"))])
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[(
            "a: its disk does not respond: the open image is no longer used; b: its disk is gone",
            "then restart windrose on node a",
        )],
    },
];

const STORE: &[Row] = &[
    Row {
        case: "a member of the store is down",
        facts: || {
            let mut facts = both();
            let all = vec![member(A, runs()), member(B, runs()), member(W, silent())];
            cluster(&mut facts).store.members = all;
            set_alive(&mut facts, W, false);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            (
                "member node-3 is down",
                "start windrose on node w, or fix its network; if it is lost for good",
            ),
            ("it does not respond", "start windrose on node w"),
        ],
    },
    Row {
        case: "the store has lost its majority, and both copies serve",
        facts: || {
            let mut facts = storeless(A, Some(serves()));
            cluster(&mut facts).heard = [B].into();
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "volumes that serve continue to, but nothing can be changed",
            "restore a majority",
        )],
    },
    Row {
        case: "the same, seen by a witness: it cannot know",
        facts: || {
            let mut facts = storeless(W, None);
            cluster(&mut facts).store.members = [A, B, W].map(|node| member(node, runs())).into();
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("volumes that serve continue to", "restore a majority"),
            (
                "a: unknown whether it serves there, as this node does not reach the metadata \
                 store; b: unknown",
                "`windrose status` on node a shows its state",
            ),
        ],
    },
    Row {
        case: "store and peer are lost together",
        facts: || {
            let mut facts = storeless(A, Some(idle("b not responding")));
            let members = vec![member(A, leaderless()), member(B, silent()), member(W, silent())];
            cluster(&mut facts).store.members = members;
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            (
                "it is cut off, or all other nodes are down",
                "start windrose on nodes b, w where it does not run",
            ),
            ("volumes that serve continue to", "restore a majority"),
            ("member node-2 is down", "check whether windrose runs on node b"),
            ("member node-3 is down", "check whether windrose runs on node w"),
            ("a: b not responding; b: unknown whether it serves there", "status` on node b"),
        ],
    },
    Row {
        case: "a node is cut off, and what it alone has goes on",
        facts: || {
            let mut facts = storeless(A, Some(serves()));
            remove_copy(&mut facts, B);
            let id = facts.volumes[0].0.record.id;
            cluster(&mut facts).mirrors.get_mut(&id).unwrap().in_sync.remove(1);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it is cut off, or all other nodes are down", "check the network of node a"),
            ("volumes that serve continue to", "restore a majority"),
        ],
    },
    Row {
        case: "a node without a copy is cut off",
        facts: || storeless(W, None),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[
            ("it is cut off, or all other nodes are down", "check the network of node w"),
            ("volumes that serve continue to", "windrose cluster recover --dry-run"),
            ("a: unknown whether it serves there", "`windrose status` on node a"),
        ],
    },
    Row {
        case: "the store is lost, and a node that shares nothing with this one answers",
        facts: || {
            let mut facts = storeless(A, Some(serves()));
            cluster(&mut facts).reachable = [W].into();
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "volumes that serve continue to, but nothing can be changed",
            "restore a majority",
        )],
    },
    Row {
        case: "the record of the mirror is lost",
        facts: || {
            let mut facts = both();
            cluster(&mut facts).mirrors.clear();
            facts
        },
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("its mirror configuration is lost", "windrose cluster recover")],
    },
    Row {
        case: "the node waits for its cluster",
        facts: || NodeFacts {
            serving: false,
            startup_wait: Some(StartupWait::transient("the store does not answer")),
            ..facts(Vec::new())
        },
        verdict: UNAVAILABLE,
        shown: ("", 0),
        findings: &[("waits for its cluster: the store does not answer", "windrose cluster nodes")],
    },
    Row {
        case: "a clock is ahead",
        facts: || {
            let mut facts = both();
            cluster(&mut facts).reports.get_mut(&A).unwrap().clocks_behind_s = [(2, 12)].into();
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("12 s ahead of that of node b", "the same time servers")],
    },
    Row {
        case: "the cluster has two nodes",
        facts: || {
            let mut facts = both();
            cluster(&mut facts).nodes.remove(&W);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("2 of the 3 nodes", "windrose cluster witness")],
    },
    Row {
        case: "the store of a node is damaged",
        facts: || {
            let mut facts = alone(open());
            facts.store_trouble = Some(StoreProblem::Damaged("page 7 is torn".into()));
            facts
        },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[("page 7 is torn: nothing can be changed", "restore the store from a backup")],
    },
    Row {
        case: "the store of a node fails",
        facts: || {
            let mut facts = alone(open());
            facts.store_trouble = Some(StoreProblem::Failing("input/output error".into()));
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "nothing can be changed; volumes that are open are served",
            "disk of data_dir",
        )],
    },
    Row {
        case: "there is no room for the store of a node",
        facts: || {
            let mut facts = alone(open());
            facts.store_trouble = Some(StoreProblem::NoSpace("no space left".into()));
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("volumes can be deleted, other changes may fail", "free some space")],
    },
    Row {
        case: "a record is damaged",
        facts: || NodeFacts { damaged_records: vec!["volumes/x: torn".into()], ..alone(open()) },
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[("volumes/x: torn", "restore the store from a backup")],
    },
];

// ---- a standalone node ----

fn alone(observed: Observed) -> NodeFacts {
    facts(vec![volume("v", observed)])
}

/// With a report of its volume.
fn reported(change: impl FnOnce(&mut VolumeReport)) -> NodeFacts {
    let mut facts = alone(open());
    facts.cores = vec![core(facts.volumes[0].0.record.id)];
    change(&mut facts.cores[0].volumes[0]);
    facts
}

/// With a pool that holds its volume.
fn pooled(change: impl FnOnce(&mut engine::PoolReport)) -> NodeFacts {
    let mut facts = alone(open());
    let record = &facts.volumes[0].0.record;
    let mut pool = crate::samples::pool_facts("tank");
    pool.volumes = vec![(record.id, record.name.to_string())];
    change(pool.report.as_mut().unwrap());
    facts.pools = vec![pool];
    facts
}

const DISKS: &[Row] = &[
    Row {
        case: "it is open",
        facts: || alone(open()),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("each volume has one replica", "windrose cluster init")],
    },
    Row {
        case: "the node is starting, and has not read its store",
        facts: || NodeFacts { serving: false, ..facts(Vec::new()) },
        verdict: UNAVAILABLE,
        shown: ("", 0),
        findings: &[("it is starting or stopping", "resolves itself")],
    },
    Row {
        case: "nobody is allowed",
        facts: || {
            let mut facts = alone(open());
            facts.volumes[0].0.record.allow.clear();
            facts
        },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("no initiator is allowed", "windrose volume allow v INITIATOR")],
    },
    Row {
        case: "it is being opened",
        facts: || alone(Observed::Closed),
        verdict: UNAVAILABLE,
        shown: OPENING,
        findings: &[("it is being opened", "resolves itself")],
    },
    Row {
        case: "it cannot be opened",
        facts: || alone(Observed::OpenFailed { reason: "/v: no such file".into() }),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("/v: no such file", GIVE_UP)],
    },
    Row {
        case: "a flush failed",
        facts: || reported(|report| report.is_dead = true),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("its disk failed a flush", "systemctl restart windrose")],
    },
    Row {
        case: "its reservations have rotted",
        facts: || reported(|v| v.reservations_error = Some(block::Error::Corrupt { at: Lba(9) })),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("its reservations cannot be read", "volume reservations v --clear --yes")],
    },
    Row {
        case: "another machine has taken its disk",
        facts: || reported(|report| report.claim_lost = Some("node 9 has it".into())),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[(
            "its image is no longer used on this node: node 9 has it",
            "systemctl restart",
        )],
    },
    Row {
        case: "commands fail",
        facts: || reported(|report| report.kinds[0].failed = 2),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("2 commands failed", "check the disk")],
    },
    Row {
        case: "thin volumes have little space left",
        facts: || {
            let mut facts = alone(open());
            with_space(&mut facts, 100 << 30, 1 << 30);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("1 GiB of 100 GiB are free", "free some space")],
    },
    Row {
        case: "thin volumes have no space left",
        facts: || {
            let mut facts = alone(open());
            facts.low_space_percent = 0;
            with_space(&mut facts, 100 << 30, 0);
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("it is full: thin volumes may still need", "free some space")],
    },
    Row {
        case: "its pool has stopped",
        facts: || pooled(|pool| pool.write_error = Some("too many disks are gone".into())),
        verdict: UNAVAILABLE,
        shown: OFFLINE,
        findings: &[("it has stopped: too many disks are gone", "restart the node")],
    },
    Row {
        case: "a disk of its pool is out",
        facts: || pooled(|pool| pool.disks[0].state = PoolDiskState::Detached),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("disk S0 at /dev/sd0 is out", "windrose pool replace tank S0 --with DISK")],
    },
    Row {
        case: "a disk of its pool gives what was not written",
        facts: || pooled(|pool| pool.disks[0].checksum_errors = 3),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("returned wrong data 3 times", "windrose pool replace tank S0")],
    },
    Row {
        case: "memory is short",
        facts: || {
            let mut facts = reported(|_| {});
            facts.cores[0].memory.shortage_duration = Some(Duration::from_secs(75));
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("75 s", "raise cores.memory")],
    },
    Row {
        case: "a virtual machine waits",
        facts: || {
            let mut facts = seen(A, &[A, B], &[(A, idle("it is drained")), (B, serves())]);
            let id = facts.volumes[0].0.record.id;
            let mut core = core(id);
            let unserved = block::Access::Unavailable;
            let mirror = crate::samples::mirror();
            core.volumes[0].mirror = Some(engine::MirrorReport { access: unserved, ..mirror });
            let age = Duration::from_secs(1);
            core.guests.push(GuestReport { volume: id, socket: "/v.sock".into(), age });
            facts.cores = vec![core];
            facts
        },
        verdict: AT_RISK,
        shown: REMOTE,
        findings: &[
            ("a virtual machine on this node waits for it", "windrose node resume"),
            ("not served by this node", "the next step"),
        ],
    },
];

/// What `windrose volume list` shows for the volume.
fn listed(facts: &NodeFacts) -> &'static str {
    let Some((stored, observed)) = facts.volumes.first() else { return "" };
    let is_open = matches!(observed, Observed::Open { .. });
    if facts.cluster.is_none() && is_open && !facts.served_filter()(&facts.volumes[0]) {
        return "OFFLINE";
    }
    match volume_state(&stored.record, observed, facts.cluster.as_ref()) {
        VolumeState::Online => "online",
        VolumeState::Remote { .. } => "remote",
        VolumeState::Offline { .. } => "OFFLINE",
        VolumeState::Opening => "opening",
        VolumeState::Creating => "creating",
        VolumeState::Deleting => "deleting",
    }
}

/// Checks all rows, and names those that are wrong; what is wrong with them is printed.
fn check_all(rows: &[Row]) {
    let is_wrong = |row: &&Row| std::panic::catch_unwind(|| check(row)).is_err();
    let wrong: Vec<&str> = rows.iter().filter(is_wrong).map(|row| row.case).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn check(row: &Row) {
    let (is, facts) = (row.case, (row.facts)());
    let status = assess(&facts);
    let all = format!("{is}: {:#?}", status.findings);
    assert_eq!((status.verdict, status.verdict.exit_code()), row.verdict, "{all}");
    assert_eq!((listed(&facts), u8::try_from(status.volumes.online).unwrap()), row.shown, "{all}");
    for (message, hint) in row.findings {
        let told = |f: &Finding| {
            let next = f.hint.as_deref().unwrap_or_default();
            f.message.contains(message) && next.contains(hint)
        };
        assert!(status.findings.iter().any(told), "{message:?} ({hint:?}) is not told: {all}");
    }
    for finding in &status.findings {
        let next = finding.hint.as_deref().unwrap_or_default();
        let needs = finding.severity > Severity::Note;
        assert!(!needs || !next.is_empty(), "without a next step: {finding:?}: {all}");
        assert!(!finding.message.is_empty(), "{all}");
    }
    let needless = status.findings.iter().filter(|f| f.severity > Severity::Note);
    assert!(needless.count() <= row.findings.len(), "more than what is the matter is told: {all}");
    let metrics = crate::metrics::render((row.facts)());
    let has =
        |line: String| assert!(metrics.lines().any(|l| l == line), "{line}: {all}\n{metrics}");
    has(format!("windrose_verdict {}", status.verdict as i64));
    if !facts.volumes.is_empty() {
        has(format!("windrose_volume_online{{volume=\"v\"}} {}", row.shown.1));
    }
}

#[test]
fn copies_of_a_volume() {
    check_all(COPIES);
}

#[test]
fn nodes_of_a_cluster() {
    check_all(NODES);
}

#[test]
fn the_store() {
    check_all(STORE);
}

#[test]
fn disks_pools_and_space_of_a_node_by_itself() {
    check_all(DISKS);
}

#[test]
fn pools_of_disks() {
    check_all(pools::POOLS);
}

#[test]
fn what_clients_prove() {
    check_all(clients::CLIENTS);
}

#[test]
fn members_of_the_store_and_their_nodes() {
    check_all(members::MEMBERS);
}

/// A replica that its node cannot open is not in sync, whatever the record says.
#[test]
fn a_copy_that_cannot_be_opened_does_not_count_as_in_sync() {
    let mut facts = only_on_b(A);
    broken(&mut facts, B);
    let replicas = facts.cluster.as_ref().unwrap().replicas(&facts.volumes[0].0.record);
    assert_eq!(replicas[0].state, ReplicaState::OutOfSync);
    assert_eq!(replicas[0].reason.as_deref(), Some("/v/v.img: no such file"));
    assert!(replicas[0].hint.as_ref().unwrap().contains(GIVE_UP), "{replicas:?}");
}

/// What a replica lacks is shown beside it, with the same reason.
#[test]
fn a_copy_that_is_out_is_shown_with_its_reason_and_the_next_step() {
    let lost = Some("its disk does not respond".to_owned());
    let facts = without_b(ReportedMirror { image_lost: lost, ..idle("lost") });
    let cluster = facts.cluster.as_ref().unwrap();
    let replicas = cluster.replicas(&facts.volumes[0].0.record);
    assert_eq!(
        (replicas[0].reason.as_deref(), replicas[1].state.clone()),
        (None, ReplicaState::OutOfSync)
    );
    assert_eq!(replicas[1].reason.as_deref(), Some("its disk does not respond"));
    assert!(replicas[1].hint.as_ref().unwrap().contains("windrose volume mirror replace v --on b"));
}

/// While its replacement is being made, a replica is not reported as leaving: it may be in sync
/// first.
#[test]
fn a_copy_whose_place_is_being_taken_is_shown_as_out_of_sync_and_then_as_leaving() {
    let mut facts = repaired();
    let shown = |facts: &NodeFacts| {
        let replicas = facts.cluster.as_ref().unwrap().replicas(&facts.volumes[0].0.record);
        (replicas[1].state.clone(), replicas[1].reason.clone().unwrap())
    };
    let (state, why) = shown(&facts);
    assert_eq!(state, ReplicaState::Removing);
    assert!(why.contains("it is removed once its node is back"), "{why}");
    let (node, replaces) = (NodeId(4), Some(B));
    let repair = records::record::PendingRepair { node, replaces, since_s: 0 };
    facts.volumes[0].0.record.repair = Some(repair);
    let (state, why) = shown(&facts);
    assert_eq!(state, ReplicaState::OutOfSync);
    assert!(why.contains("the one that is in sync first is kept"), "{why}");
}
