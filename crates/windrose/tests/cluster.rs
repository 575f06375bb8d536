//! The real program, several times: nodes that become a cluster, lose one of them, and leave it.

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

mod common;

use std::time::Duration;

use common::{Place, now, pause};
use serde_json::Value;

/// How long a cluster may take to notice something; the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether `etcd` is installed; says that this test could not test, if not.
fn has_etcd() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|dir| dir.join("etcd").is_file()) {
        return true;
    }
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let why = "etcd is not installed (Debian: etcd-server)";
    let Some(file) = std::env::var_os("WINDROSE_SKIPPED_TESTS") else {
        println!("skipped: {test}: {why}");
        return false;
    };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    std::io::Write::write_all(&mut file, format!("{test}: {why}\n").as_bytes()).unwrap();
    false
}

/// A place for a node with an address of its own on the loopback, so that every store's member has
/// the usual ports.
fn place(number: u8) -> Place {
    let pid = std::process::id();
    let ip = format!("127.{}.{}.{number}", 64 + (pid >> 8) % 64, pid % 256);
    Place::new(&format!("[cluster]\nlisten = [\"{ip}:7480\"]\n"))
}

/// The nodes that `place` sees, once they are as `wanted`.
fn nodes(place: &Place, wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let deadline = now() + PATIENCE;
    loop {
        let cluster = place.json(&["cluster", "nodes"]);
        let nodes = cluster["nodes"].as_array().unwrap();
        if wanted(nodes) {
            return nodes.clone();
        }
        assert!(now() < deadline, "still {cluster}: {}", place.log());
        pause(100);
    }
}

/// Waits until a node serves all of its volumes: mirrors are opened when leases of an earlier life are
/// over.
fn all_online(place: &Place, count: usize) {
    let deadline = now() + PATIENCE;
    loop {
        let list = place.json(&["volume", "list"]);
        let volumes = list["volumes"].as_array().unwrap();
        assert_eq!(volumes.len(), count, "{list}");
        if volumes.iter().all(|v| v["state"]["is"] == "online") {
            return;
        }
        assert!(now() < deadline, "still {list}: {}", place.log());
        pause(100);
    }
}

fn alive(nodes: &[Value]) -> Vec<u64> {
    let alive = nodes.iter().filter(|n| n["alive"] == true);
    alive.map(|n| n["node"].as_u64().unwrap()).collect()
}

#[test]
fn nodes_become_a_cluster_lose_one_and_leave() {
    if !has_etcd() {
        return;
    }
    let (a, b, w) = (place(1), place(2), place(3));
    let (_a, node_b, _w) = (a.start(), b.start(), w.start());
    for name in ["web", "mail"] {
        a.ok(&["volume", "create", name, "--size", "4M"]);
    }
    assert!(a.fails(1, &["cluster", "token"]).contains("in no cluster"));
    a.ok(&["cluster", "init"]);
    all_online(&a, 2);
    assert!(a.path().join("data/store.redb.before-cluster").exists());
    assert!(a.fails(1, &["cluster", "init"]).contains("in cluster"));

    let token = a.ok(&["cluster", "token"]);
    let token = token.trim();
    let half = &token[..token.len() / 2];
    assert!(b.fails(1, &["cluster", "join", "--token", half]).contains("not copied whole"));
    assert!(a.fails(1, &["cluster", "join", "--token", token]).contains("in cluster"));
    b.ok(&["cluster", "join", "--token", token]);
    let file = w.path().join("token");
    std::fs::write(&file, token).unwrap();
    w.ok(&["cluster", "witness", "--cluster-token-file", file.to_str().unwrap()]);
    for place in [&a, &b, &w] {
        nodes(place, |nodes| alive(nodes) == [1, 2, 3]);
    }
    let cluster = a.json(&["cluster", "nodes"]);
    let store = cluster["store"].as_array().unwrap();
    assert!(store.len() == 3 && store.iter().all(|m| m["votes"] == true), "{cluster}");
    assert_eq!(cluster["nodes"][2]["role"], "witness");
    let refused = w.fails(1, &["volume", "create", "x", "--size", "4M"]);
    assert!(refused.contains("is a witness"), "{refused}");

    b.ok(&["node", "drain"]);
    nodes(&a, |nodes| nodes[1]["drained"] == true);
    a.ok(&["node", "resume", "2"]);
    nodes(&b, |nodes| nodes[1]["drained"] == false);
    assert!(a.fails(4, &["node", "drain", "9"]).contains("no node 9"));
    assert!(a.fails(1, &["cluster", "leave"]).contains("keeps a copy of volume"));
    assert!(a.fails(1, &["cluster", "leave", "--node", "2", "--force"]).contains("is alive"));

    node_b.kill();
    for place in [&a, &w] {
        nodes(place, |nodes| alive(nodes) == [1, 3]);
    }
    assert_eq!(a.json(&["volume", "list"])["volumes"].as_array().unwrap().len(), 2);
    assert!(a.fails(1, &["cluster", "leave", "--node", "2"]).contains("--force"));
    a.ok(&["cluster", "leave", "--node", "2", "--force"]);
    nodes(&w, |nodes| nodes.len() == 2);

    // The old disk returns under its old number, and is told.
    let _b = b.launch();
    let deadline = now() + PATIENCE;
    while !b.log().contains("this node was removed from the cluster") {
        assert!(now() < deadline, "{}", b.log());
        pause(100);
    }
    b.ok(&["cluster", "leave", "--force"]);
    assert_eq!(b.json(&["cluster", "nodes"])["stage"], "alone");
    w.ok(&["cluster", "leave"]);
    nodes(&a, |nodes| nodes.len() == 1);
    assert!(a.fails(1, &["cluster", "leave"]).contains("the last of its cluster"));
    assert_eq!(a.json(&["cluster", "nodes"])["store"].as_array().unwrap().len(), 1);
}
