//! The store members and the nodes that run them; a node and its data directory.

use super::*;

/// Both replicas serve, and these are the store members.
fn with_members(members: Vec<MemberHealth>) -> NodeFacts {
    let mut facts = both();
    cluster(&mut facts).store.members = members;
    facts
}

fn all_run() -> Vec<MemberHealth> {
    [A, B, W].map(|node| member(node, runs())).into()
}

pub(super) const MEMBERS: &[Row] = &[
    Row {
        case: "all members run",
        facts: || with_members(all_run()),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[],
    },
    Row {
        case: "a member is down, and its node runs",
        facts: || with_members(vec![member(A, runs()), member(B, runs()), member(W, silent())]),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "member node-3 is down: it does not respond: refused",
            "windrose runs on node w",
        )],
    },
    Row {
        case: "a member does not keep running, and its node says why",
        facts: || {
            let mut facts = with_members(all_run());
            cluster(&mut facts).store.member_errors = [(W, "no space left".to_owned())].into();
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("member node-3 does not keep running: no space left", "windrose on node w")],
    },
    Row {
        case: "no node runs a member any more",
        facts: || {
            let mut members = all_run();
            members.push(member(NodeId(9), silent()));
            with_members(members)
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("member node-9 is down", "windrose cluster leave --node node-9 --force")],
    },
    Row {
        case: "a member has no vote, and does not get on",
        facts: || {
            let mut members = all_run();
            let mut learner = member(W, silent());
            learner.member.is_learner = true;
            members[2] = learner;
            with_members(members)
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it has 2 of the 3 members", "windrose cluster witness"),
            ("member node-3 has no vote yet", "windrose cluster leave --node node-3 --force"),
        ],
    },
    Row {
        case: "a member is cut off from the others",
        facts: || with_members(vec![member(A, runs()), member(B, runs()), member(W, leaderless())]),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "member node-3 runs but has no leader",
            "check the network between the members",
        )],
    },
    Row {
        case: "the members have no leader",
        facts: || with_members([A, B, W].map(|node| member(node, leaderless())).into()),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("its members have no leader", "restore a majority of the members")],
    },
    Row {
        case: "the store has an alarm",
        facts: || {
            let mut members = all_run();
            let alarms = vec!["NOSPACE".to_owned()];
            members[0].response = MemberResponse::Running { leader: Some(1), alarms };
            with_members(members)
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("etcd raises an alarm: NOSPACE", "etcdctl")],
    },
    Row {
        case: "the store shows a certificate that is not trusted",
        facts: || {
            let mut facts = both();
            let (store, why) = ("etcd".into(), "unknown issuer".into());
            cluster(&mut facts).heard = [B].into();
            cluster(&mut facts).store.error = Some(StoreError::TlsRejected { store, why });
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("unknown issuer; volumes that serve continue to", "cluster.tls_ca")],
    },
    Row {
        case: "a node has a session here, and is cut off: the store does not know yet",
        facts: || {
            let mut facts = without_b(serves());
            cluster(&mut facts).stopped_answering = [B].into();
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[
            ("it stopped responding", "check whether windrose runs on node b"),
            (
                "the one on b is out of sync: its state on node b is unknown here",
                "`windrose status` on node b shows its state",
            ),
        ],
    },
    Row {
        case: "a copy of this node was started elsewhere",
        facts: || NodeFacts { rival_process: Some("192.0.2.9".into()), ..both() },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "a duplicate of this node was started on 192.0.2.9",
            "set data_dir in its configuration to a new, empty directory",
        )],
    },
    Row {
        case: "the nodes speak in plain text",
        facts: || NodeFacts { is_plaintext: true, ..both() },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("its nodes and their store communicate in plain text", "without --insecure")],
    },
    Row {
        case: "the data directory has no anchor",
        facts: || NodeFacts { anchor_error: Some("read-only file system".into()), ..alone(open()) },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("has no anchor outside of it (read-only file system)", "set anchor_dir")],
    },
    Row {
        case: "disks are accessed through threads",
        facts: || {
            let mut facts = alone(open());
            facts.node.disk_backend = "threads".into();
            facts
        },
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("disks are accessed through threads", "sysctl kernel.io_uring_disabled=0")],
    },
    Row {
        case: "the image of a volume cannot be erased",
        facts: || {
            let mut facts =
                facts(vec![volume("v", Observed::EraseFailed { reason: "/v: busy".into() })]);
            facts.volumes[0].0.record.stage = VolumeStage::Deleting;
            facts
        },
        verdict: AT_RISK,
        shown: OFFLINE,
        findings: &[("/v: busy", "windrose volume delete v")],
    },
];
