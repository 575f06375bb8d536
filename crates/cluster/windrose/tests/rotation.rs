//! The real program, several times: a cluster whose secret and authority are replaced while it serves.

use cluster::identity::{Identity, Protection};
use cluster::meta::Meta;
use cluster::meta::etcd::{Etcd, Settings, Tls};

use crate::cluster::{PATIENCE, address, all_online, has_etcd, store_of};
use crate::common::{Place, now, pause};

fn place(number: u8) -> Place {
    Place::new(&format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number)))
}

fn identity(place: &Place) -> Identity {
    Identity::read(&place.path().join("data/cluster.json")).unwrap().unwrap()
}

fn authority(identity: &Identity) -> String {
    match &identity.protection {
        Protection::Own(authority) => authority.certificate().to_owned(),
        other => panic!("{other:?}"),
    }
}

/// The node's certificates as they are now, as somebody has them who has copied its disks.
fn stolen(place: &Place, into: &Place) -> Tls {
    let copied = |name: &str| {
        let to = into.path().join(name);
        std::fs::copy(place.path().join("data/tls").join(name), &to).unwrap();
        to
    };
    Tls { ca: copied("ca.crt"), identity: Some((copied("node.crt"), copied("node.key"))) }
}

/// Waits until `is_so`, and says what is otherwise there at the end.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = now() + PATIENCE;
    while !is_so() {
        assert!(now() < deadline, "not in time: {what}");
        pause(200);
    }
}

/// What status says of the rotation, if anything.
fn finding(place: &Place) -> Option<String> {
    let out = place.cli(&["status", "--json"]).stdout;
    let status: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let found = status["findings"].as_array().unwrap().iter().find(|f| f["subject"] == "rotation");
    found.map(ToString::to_string)
}

#[test]
fn a_cluster_gets_a_new_secret_and_authority_and_who_has_the_old_ones_is_out() {
    if !has_etcd() {
        return;
    }
    let (a, b, c, d) = (place(151), place(152), place(153), place(154));
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
        all_online(node, 1);
    }
    let thief = Place::new("");
    let tls = stolen(&b, &thief);
    let endpoints = || [151, 152, 153].map(|n| format!("https://{}:2379", address(n))).to_vec();
    let thieves =
        || Settings { endpoints: endpoints(), tls: Some(tls.clone()), ..Settings::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reads = |store: Etcd| runtime.block_on(async move { store.get("cluster").await });
    assert!(reads(Etcd::new(&thieves()).unwrap()).is_ok(), "before");
    let before = identity(&a);

    b.ok(&["cluster", "rotate"]);

    until("all nodes have forgotten the old ones", || {
        [&a, &b, &c].iter().all(|node| identity(node).rotation.is_none())
    });
    let after = identity(&a);
    assert!(after.secret != before.secret && authority(&after) != authority(&before));
    for node in [&b, &c] {
        let node = identity(node);
        assert_eq!((&node.secret, &node.protection), (&after.secret, &after.protection));
    }
    let refused = reads(Etcd::new(&thieves()).unwrap());
    assert!(refused.is_err(), "who has copied a node's disks comes in no more: {refused:?}");
    assert!(reads(store_of(&a, [151, 152, 153])).unwrap().is_some());
    let out = d.start();
    let refused = d.fails(1, &["cluster", "join", "--token", old_token.trim()]);
    assert!(refused.contains("windrose cluster token"), "{refused}");
    let token = c.ok(&["cluster", "token"]);
    until("a node with a new token comes in", || {
        d.cli(&["cluster", "join", "--token", token.trim()]).status.success()
    });

    // Nothing depends on what processes remember: all start again, from what their files say.
    for node in [node_a, node_b, node_c, out] {
        node.kill();
    }
    let _nodes = [&a, &b, &c, &d].map(Place::launch);
    let knows = |node: &&Place| {
        let list = node.cli(&["volume", "list", "--json"]).stdout;
        serde_json::from_slice(&list).is_ok_and(|list: serde_json::Value| {
            list["volumes"].as_array().is_some_and(|v| v.len() == 1)
        })
    };
    until("all have read the store", || [&a, &b, &c, &d].iter().all(knows));
    for node in [&a, &b] {
        all_online(node, 1);
        until("all is safe", || node.cli(&["status"]).status.success());
        assert_eq!(finding(node), None);
    }
}

#[test]
fn a_rotation_waits_for_a_node_that_is_down_and_goes_on_with_it() {
    if !has_etcd() {
        return;
    }
    let (a, b, c) = (place(155), place(156), place(157));
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
        until("the node is named", || {
            let found = finding(&b).unwrap_or_default();
            found.contains("waits for") && found.contains("without a sign of life")
        });
        let refused = b.fails(1, &["cluster", "rotate"]);
        assert!(refused.contains("already"), "{refused}");
        let refused = b.fails(1, &["cluster", "token"]);
        assert!(refused.contains("being replaced"), "{refused}");
        assert_eq!(
            identity(&a).secret,
            before.secret,
            "nobody shows what another one does not know"
        );
        let _c = c.start();
        let out = rotates.join().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        until("all use the new ones", || {
            let nodes = [&a, &b, &c].map(identity);
            nodes.iter().all(|node| node.rotation.is_none() && node.secret == nodes[0].secret)
        });
    });
    assert_ne!(identity(&a).secret, before.secret);
}
