//! The real program, several times: a cluster whose secret and authority are replaced while it
//! serves.

use cluster::identity::{ClusterIdentity, TransportSecurity};
use cluster::store::MetadataStore;
use cluster::store::etcd::{EtcdSettings, EtcdStore, EtcdTls};

use crate::cluster::{CLUSTER_TIMEOUT, address, has_etcd, store_of, wait_all_online};
use crate::common::{TestNode, now, pause};

fn rotation_node(number: u8) -> TestNode {
    TestNode::new(&format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number)))
}

fn identity(node: &TestNode) -> ClusterIdentity {
    ClusterIdentity::read(&node.path().join("data/cluster.json")).unwrap().unwrap()
}

fn authority(identity: &ClusterIdentity) -> String {
    match &identity.transport_security {
        TransportSecurity::ClusterAuthority(authority) => authority.certificate().to_owned(),
        other => panic!("{other:?}"),
    }
}

/// The node's current certificates, as a thief who copied its disks has them.
fn copy_credentials(node: &TestNode, into: &TestNode) -> EtcdTls {
    let copied = |name: &str| {
        let to = into.path().join(name);
        std::fs::copy(node.path().join("data/tls").join(name), &to).unwrap();
        to
    };
    EtcdTls { ca: copied("ca.crt"), identity: Some((copied("node.crt"), copied("node.key"))) }
}

/// Waits until `is_so`; at the timeout says what is there instead.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = now() + CLUSTER_TIMEOUT;
    while !is_so() {
        assert!(now() < deadline, "not in time: {what}");
        pause(200);
    }
}

/// The status finding about the rotation, if any.
fn finding(node: &TestNode) -> Option<String> {
    let out = node.cli(&["status", "--json"]).stdout;
    let status: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let found = status["findings"].as_array().unwrap().iter().find(|f| f["subject"] == "rotation");
    found.map(ToString::to_string)
}

#[test]
fn a_cluster_gets_a_new_secret_and_authority_and_who_has_the_old_ones_is_out() {
    if !has_etcd() {
        return;
    }
    let (a, b, c, d) =
        (rotation_node(151), rotation_node(152), rotation_node(153), rotation_node(154));
    let (node_a, node_b, node_c) = (a.start(), b.start(), c.start());
    a.ok(&["cluster", "init"]);
    let old_token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", old_token.trim()]);
    c.ok(&["cluster", "witness", "--token", old_token.trim()]);
    let secret = a.path().join("secret");
    std::fs::write(&secret, "a secret of CHAP").unwrap();
    let chap = format!("u:{}", secret.display());
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2", "--chap", &chap]);
    for node in [&a, &b] {
        wait_all_online(node, 1);
    }
    let thief = TestNode::new("");
    let tls = copy_credentials(&b, &thief);
    let endpoints = || [151, 152, 153].map(|n| format!("https://{}:2379", address(n))).to_vec();
    let thieves = || EtcdSettings {
        endpoints: endpoints(),
        tls: Some(tls.clone()),
        ..EtcdSettings::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reads = |store: EtcdStore| runtime.block_on(async move { store.get("cluster").await });
    assert!(reads(EtcdStore::new(&thieves()).unwrap()).is_ok(), "before");
    let before = identity(&a);

    b.ok(&["cluster", "rotate"]);

    wait_until("all nodes have forgotten the old ones", || {
        [&a, &b, &c].iter().all(|node| identity(node).rotation.is_none())
    });
    let after = identity(&a);
    assert!(after.secret != before.secret && authority(&after) != authority(&before));
    for node in [&b, &c] {
        let node = identity(node);
        assert_eq!(
            (&node.secret, &node.transport_security),
            (&after.secret, &after.transport_security)
        );
    }
    let refused = reads(EtcdStore::new(&thieves()).unwrap());
    assert!(refused.is_err(), "who has copied a node's disks comes in no more: {refused:?}");
    assert!(reads(store_of(&a, [151, 152, 153])).unwrap().is_some());
    let out = d.start();
    let refused = d.fails(1, &["cluster", "join", "--token", old_token.trim()]);
    assert!(refused.contains("windrose cluster token"), "{refused}");
    let token = c.ok(&["cluster", "token"]);
    wait_until("a node with a new token comes in", || {
        d.cli(&["cluster", "join", "--token", token.trim()]).status.success()
    });

    // Nothing depends on the memory of processes: all restart, from their files.
    for node in [node_a, node_b, node_c, out] {
        node.kill();
    }
    let _nodes = [&a, &b, &c, &d].map(TestNode::spawn_node);
    let knows = |node: &&TestNode| {
        let list = node.cli(&["volume", "list", "--json"]).stdout;
        serde_json::from_slice(&list).is_ok_and(|list: serde_json::Value| {
            list["volumes"].as_array().is_some_and(|v| v.len() == 1)
        })
    };
    wait_until("all have read the store", || [&a, &b, &c, &d].iter().all(knows));
    for node in [&a, &b] {
        wait_all_online(node, 1);
        wait_until("all is safe", || node.cli(&["status"]).status.success());
        assert_eq!(finding(node), None);
    }
}

#[test]
fn a_rotation_waits_for_a_node_that_is_down_and_goes_on_with_it() {
    if !has_etcd() {
        return;
    }
    let (a, b, c) = (rotation_node(155), rotation_node(156), rotation_node(157));
    let _nodes = [a.start(), b.start()];
    let node_c = c.start();
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    for node in [&b, &c] {
        node.ok(&["cluster", "join", "--token", token.trim()]);
    }
    let before = identity(&a);
    node_c.kill();
    std::thread::scope(|scope| {
        let rotates = scope.spawn(|| a.cli(&["cluster", "rotate"]));
        wait_until("the node is named", || {
            let found = finding(&b).unwrap_or_default();
            found.contains("waits for") && found.contains("not responding")
        });
        let refused = b.fails(1, &["cluster", "rotate"]);
        assert!(refused.contains("already"), "{refused}");
        let refused = b.fails(1, &["cluster", "token"]);
        assert!(refused.contains("being replaced"), "{refused}");
        assert_eq!(
            identity(&a).secret,
            before.secret,
            "no node shows what another one does not know"
        );
        let _c = c.start();
        let out = rotates.join().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        wait_until("all use the new ones", || {
            let nodes = [&a, &b, &c].map(identity);
            nodes.iter().all(|node| node.rotation.is_none() && node.secret == nodes[0].secret)
        });
    });
    assert_ne!(identity(&a).secret, before.secret);
}
