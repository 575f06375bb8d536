use api::{Initiator, NvmeExport, VhostUserExport};

use super::*;

fn sample(name: &str) -> Volume {
    Volume {
        name: name.parse().unwrap(),
        id: "6f9619ff-8b86-4011-b42d-00c04fc964ff".parse().unwrap(),
        size_bytes: 10 << 30,
        block_size: api::BlockSize::B512,
        thin: true,
        replicas: vec![VolumeReplica {
            node: "n".into(),
            backing: api::Backing::File { path: "/var/lib/windrose/volumes/web.img".into() },
            state: ReplicaState::InSync,
            reason: None,
            hint: None,
            primary: true,
        }],
        replicas_wanted: 1,
        allocated_bytes: Some(3 << 29),
        state: VolumeState::Online,
        access: Access::default(),
        iscsi: Some(IscsiExport {
            target: format!("iqn.2026-01.io.windrose:{name}"),
            lun: 0,
            owner: name.parse().unwrap(),
            other_luns: Vec::new(),
            portals: vec!["[::]:3260".into()],
        }),
        nvme: Some(NvmeExport {
            subsystem: format!("nqn.2026-01.io.windrose:{name}"),
            namespace: 1,
            portals: vec!["127.0.0.1:4420".into(), "192.0.2.7:4420".into()],
        }),
        vhost_user: None,
        sessions: 0,
        created_s: 0,
        io: None,
    }
}

#[test]
fn a_list_of_volumes() {
    let mut busy = sample("database-1");
    busy.sessions = 12;
    busy.access.initiators = vec![Initiator::Any];
    busy.nvme = None;
    let mut broken = sample("web");
    broken.state = VolumeState::Offline { reason: "gone".into() };
    broken.allocated_bytes = None;
    let list = VolumeList { volumes: vec![busy, broken], ..VolumeList::default() };
    insta::assert_snapshot!(volumes(&list));
    insta::assert_snapshot!(volumes(&VolumeList::default()));
}

#[test]
fn a_volume_that_nobody_may_reach() {
    insta::assert_snapshot!(volume(&sample("web"), &ApiAddress::default()));
}

#[test]
fn a_volume_of_virtual_machines() {
    let mut v = sample("web");
    v.vhost_user = Some(VhostUserExport { socket: Some("/run/windrose/vhost/web.sock".into()) });
    insta::assert_snapshot!(volume(&v, &ApiAddress::default()));
    let (iscsi, nvme) = (v.iscsi.take(), v.nvme.take());
    let text = volume(&v, &ApiAddress::default());
    assert!(
        iscsi.is_some() && nvme.is_some() && !text.contains("is allowed to access it yet"),
        "{text}"
    );
    v.vhost_user = Some(VhostUserExport { socket: None });
    let text = volume(&v, &ApiAddress::default());
    assert!(text.contains("vhost-user  not at this node") && !text.contains("QEMU"), "{text}");
}

#[test]
fn a_volume_with_chap_seen_from_afar() {
    let mut v = sample("web");
    v.state = VolumeState::Offline { reason: "/dev/sdb: no such file or device".into() };
    v.access.initiators = ["iqn.1993-08.org.debian:01:a", "nqn.2014-08.org.nvmexpress:h"]
        .map(|s| s.parse().unwrap())
        .into();
    v.access.chap_user = Some("u".to_owned().try_into().unwrap());
    let api = ApiAddress::Tls { host: "san1.example.org".into(), port: 7443 };
    insta::assert_snapshot!(volume(&v, &api));
}

/// Both directions have lines: without the second the initiator would accept any target.
#[test]
fn a_volume_with_mutual_chap() {
    let mut v = sample("web");
    v.access.initiators = vec!["iqn.1993-08.org.debian:01:a".parse().unwrap()];
    v.access.chap_user = Some("u".to_owned().try_into().unwrap());
    v.access.chap_mutual_user = Some("web".to_owned().try_into().unwrap());
    insta::assert_snapshot!(volume(&v, &ApiAddress::default()));
}

/// A line for each kind of allowed host: without a secret, with one, and in both directions.
#[test]
fn a_volume_whose_nvme_hosts_have_secrets() {
    let (one, both) = ("nqn.2014-08.org.nvmexpress:one", "nqn.2014-08.org.nvmexpress:both");
    let by_name = "nqn.2014-08.org.nvmexpress:by-name";
    let asked = |host: &str, mutual| DhchapHost { host: host.parse().unwrap(), mutual };
    let mut v = sample("web");
    v.iscsi = None;
    v.access.initiators = [by_name, both, one].map(|s| s.parse().unwrap()).into();
    v.access.dhchap_hosts = vec![asked(both, true), asked(one, false)];
    insta::assert_snapshot!(volume(&v, &ApiAddress::default()));
    insta::assert_snapshot!(volumes(&VolumeList { volumes: vec![v.clone()], stale_reason: None }));
    let lines = |v: &Volume| -> Vec<_> {
        let text = volume(v, &ApiAddress::default());
        let lines = text.lines().filter_map(|l| l.split_once("nvme connect"));
        lines.map(|(_, line)| line.matches("SECRET").count()).collect()
    };
    assert_eq!(lines(&v), [0, 1, 2]);
    v.access.initiators = vec![one.parse().unwrap()];
    assert_eq!(lines(&v), [1], "what would be refused is not shown");
    v.access.initiators = vec![];
    assert_eq!(lines(&v), [1, 2], "no initiator is allowed yet");
    v.access.dhchap_hosts = vec![];
    assert_eq!(lines(&v), [0]);
}

/// With the line that gives the key to the kernel; the list says whether TLS is mandatory.
#[test]
fn a_volume_whose_nvme_hosts_have_keys_of_tls() {
    let [must, may, by_name] =
        ["must", "may", "by-name"].map(|h| format!("nqn.2014-08.org.nvmexpress:{h}"));
    let key = |host: &str, required| TlsHost { host: host.parse().unwrap(), required };
    let secret = |host: &str, mutual| DhchapHost { host: host.parse().unwrap(), mutual };
    let mut v = sample("web");
    v.iscsi = None;
    v.access.initiators = [&by_name, &may, &must].map(|s| s.parse().unwrap()).into();
    v.access.tls_hosts = vec![key(&may, false), key(&must, true)];
    insta::assert_snapshot!(volume(&v, &ApiAddress::default()));
    insta::assert_snapshot!(volumes(&VolumeList { volumes: vec![v.clone()], stale_reason: None }));
    // How many lines of each kind there are: of keys, of `--tls`, of secrets, and to connect at
    // all.
    let lines = |v: &Volume| {
        let text = volume(v, &ApiAddress::default());
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        ["--insert", " --tls", "SECRET", "nvme connect"].map(count)
    };
    assert_eq!(lines(&v), [1, 1, 0, 2]);
    v.access.initiators = vec![must.parse().unwrap()];
    assert_eq!(lines(&v), [1, 1, 0, 1], "what would be refused is not shown");
    v.access.initiators = vec![by_name.parse().unwrap()];
    assert_eq!(lines(&v), [0, 0, 0, 1]);
    v.access.initiators = vec![];
    assert_eq!(lines(&v), [1, 1, 0, 1], "no initiator is allowed yet");
    v.access.tls_hosts = vec![key(&may, false)];
    v.access.initiators = vec![Initiator::Any];
    assert_eq!(lines(&v), [1, 1, 0, 2], "the one with the key may come as well");
    v.access.tls_hosts = vec![key(&may, false), key(&must, true)];
    v.access.dhchap_hosts = vec![secret(&by_name, false), secret(&must, true)];
    v.access.initiators = [&by_name, &may, &must].map(|s| s.parse().unwrap()).into();
    assert_eq!(lines(&v), [2, 2, 2, 3]);
    let text = volume(&v, &ApiAddress::default());
    assert!(text.contains("hosts with a secret, mutual, with a TLS key:"), "{text}");
    assert!(text.contains("hosts without a secret, with a TLS key:"), "{text}");
    assert!(text.contains("hosts with a secret, without a TLS key:"), "{text}");
}

#[test]
fn sessions_in_a_table() {
    let session = Session {
        protocol: Protocol::Iscsi,
        initiator: "iqn.1993-08.org.debian:01:a".into(),
        peer: "192.0.2.9:51234".into(),
        target: "iqn.2026-01.io.windrose:web".into(),
        volumes: vec!["web".parse().unwrap()],
        connections: 1,
        tls: false,
        core: 0,
        age_s: 3_725,
    };
    let discovery = Session { volumes: vec![], target: String::new(), age_s: 3, ..session.clone() };
    let protected = Session {
        protocol: Protocol::Nvme,
        initiator: "nqn.2014-08.org.nvmexpress:h".into(),
        target: "nqn.2026-01.io.windrose:web".into(),
        connections: 5,
        tls: true,
        ..session.clone()
    };
    let plain = Session { tls: false, ..protected.clone() };
    let list = SessionList { sessions: vec![session, discovery, protected, plain] };
    insta::assert_snapshot!(sessions_text(&list));
}

#[test]
fn a_status_says_the_worst_first() {
    let status = Status {
        verdict: Verdict::Unavailable,
        isolated: false,
        findings: vec![
            api::Finding {
                severity: Severity::Critical,
                subject: "volume web".into(),
                message: "/dev/sdb: no such file or device".into(),
                hint: Some("remove the cause; the node retries every 30 seconds".into()),
            },
            api::Finding {
                severity: Severity::Note,
                subject: "node n1".into(),
                message: "each volume has one replica, on a disk of this node: keep backups".into(),
                hint: None,
            },
        ],
        node: api::NodeInfo {
            name: "n1".into(),
            version: "0.1.0".into(),
            pid: 42,
            uptime_s: 200_000,
            data_dir: "/var/lib/windrose".into(),
            cores: 4,
            disk_backend: "io_uring".into(),
        },
        volumes: api::VolumeCounts { total: 2, online: 1, offline: 1 },
        sessions: 3,
        capacity: api::Capacity {
            provisioned_bytes: 20 << 30,
            data_dir_bytes: 100 << 30,
            data_dir_free_bytes: 55 << 30,
        },
        memory: api::Memory { total_bytes: 1 << 30, free_bytes: 1 << 30, waiting_commands: 0 },
    };
    insta::assert_snapshot!(status_text(&status));
}

#[test]
fn durations_have_two_units() {
    for (seconds, text) in
        [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_725, "1 h 2 min"), (200_000, "2 d 7 h")]
    {
        assert_eq!(format_duration(seconds), text);
    }
}

/// Replicas that were not read are not reported as equal, and omissions are named.
#[test]
fn a_comparison_says_what_it_has_compared_and_what_not() {
    let found = |compared_bytes, unreadable, left_out: &[&str]| Verification {
        replicas: vec!["a".into(), "b".into()],
        skipped: left_out.iter().map(|node| (*node).to_owned()).collect(),
        compared_bytes,
        unreadable_ranges: unreadable,
        mismatched_bytes: 0,
        mismatches: Vec::new(),
        repaired_bytes: 0,
    };
    let text = |found: &Verification| verification(&"web".parse().unwrap(), found);
    let equal = text(&found(4 << 20, 0, &[]));
    assert_eq!(equal, "The replicas of volume web on a, b are equal (4 MiB compared).");
    let unread = text(&found(4 << 20, 3, &[]));
    assert!(unread.contains("equal as far as they could be read"), "{unread}");
    assert!(unread.contains("3 ranges could not be read"), "{unread}");
    let nothing = text(&found(0, 16, &[]));
    assert!(nothing.contains("Nothing of volume web was compared"), "{nothing}");
    assert!(!nothing.contains("equal"), "{nothing}");
    let without = text(&found(4 << 20, 0, &["c"]));
    assert!(
        without.contains("Not compared, as they are not in sync: the replicas on c"),
        "{without}"
    );
}

#[test]
fn there_are_no_volumes_only_where_the_store_was_read() {
    let mut list = VolumeList::default();
    assert!(volumes(&list).contains("There are no volumes"));
    list.stale_reason = Some("this node is starting".into());
    let unread = volumes(&list);
    assert!(unread.contains("there may be some: this node is starting"), "{unread}");
    assert!(!unread.contains("There are no volumes"), "{unread}");
    list.volumes = vec![sample("web")];
    let old = volumes(&list);
    assert!(old.contains("web") && old.contains("The list may be incomplete"), "{old}");
}

#[test]
fn a_copy_is_shown_with_what_is_the_matter_and_what_helps() {
    let mut v = sample("web");
    let mut other = v.replicas[0].clone();
    (other.node, other.primary, other.state) = ("b".into(), false, ReplicaState::OutOfSync);
    other.reason = Some("its disk does not respond".into());
    other.hint = Some("check that disk".into());
    v.replicas.push(other);
    let shown = replicas(&v.replicas);
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 4, "{shown}");
    assert!(lines[1].contains("b: ") && lines[1].contains("(out of sync)"), "{shown}");
    assert_eq!(lines[2..], ["  its disk does not respond", "  check that disk"]);
}

#[test]
fn a_switch_that_is_noted_and_not_done_says_so() {
    let mut v = sample("web");
    v.replicas[0].primary = true;
    let leads = v.replicas[0].node.clone();
    let mut other = v.replicas[0].clone();
    (other.node, other.primary) = ("b".into(), false);
    (other.reason, other.hint) = (Some("it does not run".into()), Some("start windrose".into()));
    v.replicas.push(other);
    assert_eq!(not_primary_yet(&v, &leads), None);
    let told = not_primary_yet(&v, "b").unwrap();
    assert!(
        told.contains("node b is not the primary of volume web yet: it does not run")
            && told.ends_with("; start windrose"),
        "{told}"
    );
}

/// An isolated node does not say what is reachable.
#[test]
fn a_node_that_is_cut_off_says_so_first() {
    let mut cluster = Cluster {
        stage: ClusterStage::Member,
        id: Some(uuid::Uuid::from_u128(1)),
        node: Some(1),
        role: Some(NodeRole::Data),
        waits_for: None,
        nodes: [1, 2].map(cluster_node).into(),
        stale_reason: None,
        store: Vec::new(),
        rotation: None,
    };
    assert!(
        super::cluster(&cluster).contains("alive") && !super::cluster(&cluster).contains("unknown")
    );
    cluster.stale_reason = Some("no leader".into());
    let shown = super::cluster(&cluster);
    let line = |name: &str| shown.lines().find(|line| line.contains(name)).unwrap().to_owned();
    assert!(line("n1 (this node)").contains("alive") && line(" n2").contains("unknown"), "{shown}");
    assert!(shown.contains("The state of the other nodes is unknown here: no leader."), "{shown}");
}

fn cluster_node(node: u16) -> ClusterNode {
    ClusterNode {
        node,
        name: format!("n{node}"),
        role: NodeRole::Data,
        alive: true,
        drained: false,
        addresses: Vec::new(),
        failure_domain: String::new(),
        version: String::new(),
    }
}
