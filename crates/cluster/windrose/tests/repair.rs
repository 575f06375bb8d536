//! The real program when a node is gone for good: volumes get their replicas back, and status
//! reports it.

use serde_json::Value;

use crate::cluster::{CLUSTER_TIMEOUT, address, alive, finding, has_etcd, wait_nodes, wait_safe};
use crate::common::{Daemon, TestNode, now, pause, texts};
use crate::recovery::{INITIATOR, session};
use probe::iscsi::Session;

/// A node that replaces missing replicas after so many seconds.
fn repair_node(name: &str, number: u8, after_s: &str) -> TestNode {
    let at = address(number);
    TestNode::named(
        name,
        &format!("[cluster]\nlisten = [\"{at}:7480\"]\nrepair_after_s = {after_s}\n"),
    )
}

/// Three data nodes.
fn cluster(first: u8, after_s: &str) -> ([TestNode; 3], [Daemon; 3]) {
    let places = [("a", first), ("b", first + 1), ("c", first + 2)];
    let places = places.map(|(name, number)| repair_node(name, number, after_s));
    let daemons = [places[0].start(), places[1].start(), places[2].start()];
    let [a, b, c] = &places;
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    for joiner in [b, c] {
        joiner.ok(&["cluster", "join", "--token", token.trim()]);
    }
    wait_nodes(a, |nodes| alive(nodes) == [1, 2, 3]);
    (places, daemons)
}

fn create(a: &TestNode) {
    let create = ["volume", "create", "web", "--size", "4M", "--on", "a", "--on", "b"];
    a.ok(&[&create[..], &["--allow", INITIATOR]].concat());
    wait_safe(a);
}

/// Also if a node without a replica acknowledges the creation: the other replica continues alone
/// when one dies the next moment.
#[test]
fn a_volume_that_a_node_without_a_copy_has_created_serves_when_that_is_told() {
    if !has_etcd() {
        return;
    }
    let ([a, b, c], [_a, node_b, _c]) = cluster(201, "\"off\"");
    wait_safe(&a);
    for name in ["v1", "v2", "v3", "v4", "v5", "v6"] {
        c.ok(&["volume", "create", name, "--size", "4M", "--on", "a", "--on", "b"]);
        let shown = [&a, &b].map(|node| node.json(&["volume", "show", name]));
        assert!(shown.iter().any(|volume| volume["state"]["kind"] == "online"), "{shown:?}");
        let copies = shown[0]["replicas"].as_array().unwrap();
        assert!(copies.iter().all(|copy| copy["state"]["kind"] == "in_sync"), "{shown:?}");
    }
    c.ok(&["volume", "create", "web", "--size", "4M", "--on", "a", "--on", "b"]);
    node_b.kill();
    volume(&a, |volume| volume["state"]["kind"] == "online");
}

/// The volume `web` as `node` shows it, once it is as `wanted`.
fn volume(node: &TestNode, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let shown = node.json(&["volume", "show", "web"]);
        if wanted(&shown) {
            return shown;
        }
        assert!(now() < deadline, "{shown}\n{}", node.log());
        pause(200);
    }
}

/// The nodes whose replicas are in sync.
fn in_sync(volume: &Value) -> Vec<&str> {
    let copies = volume["replicas"].as_array().unwrap().iter();
    let in_sync = copies.filter(|copy| copy["state"]["kind"] == "in_sync");
    in_sync.map(|copy| copy["node"].as_str().unwrap()).collect()
}

fn exit_code(node: &TestNode) -> Option<i32> {
    node.cli(&["status"]).status.code()
}

#[test]
fn the_copy_of_a_node_that_is_gone_is_made_on_another_one_and_the_node_that_comes_back_gives_up_its_own()
 {
    if !has_etcd() {
        return;
    }
    let ([a, b, c], [_a, node_b, _c]) = cluster(141, "6");
    create(&a);
    let write = Session::cdb16(0x8a, 8, 16, 8);
    session(&a, "web", 0).execute(&write, &[7; 4096], &mut []).unwrap();
    node_b.kill();
    let waits = finding(&a, "volume web", "a replacement is created automatically from 20");
    assert_eq!(waits["severity"], "warning");
    assert_eq!(exit_code(&a), Some(5));
    volume(&a, |v| in_sync(v) == ["a", "c"]);
    let log = a.log();
    assert!(log.contains("repair: creating a missing replica"), "{log}");
    // On every node, and nothing of the volume is at risk any more.
    for node in [&a, &c] {
        let shown = volume(node, |v| in_sync(v) == ["a", "c"]);
        assert_eq!(
            (&shown["replicas_wanted"], &shown["replicas"][1]["node"]),
            (&2.into(), &"b".into())
        );
        let note = finding(node, "volume web", "the replica on b is no longer needed");
        assert_eq!(note["severity"], "note", "{note}");
        let list = node.ok(&["volume", "list"]);
        assert!(list.contains("2 of 2"), "{list}");
    }
    let mut data = [0; 4096];
    let read = Session::cdb16(0x88, 0, 16, 8);
    session(&a, "web", 2).execute(&read, &[], &mut data).unwrap();
    assert_eq!(data[0], 7, "what node c has");

    // It is back: its replica is resynchronised, and removed.
    let _b = b.start();
    let shown = volume(&a, |v| v["replicas"].as_array().unwrap().len() == 2);
    assert_eq!(in_sync(&shown), ["a", "c"]);
    for node in [&a, &b, &c] {
        wait_safe(node);
    }
    let images = std::fs::read_dir(b.path().join("data/volumes")).unwrap();
    assert_eq!(images.count(), 0, "its image is erased");
}

#[test]
fn copies_that_a_volume_is_to_have_are_not_forgotten_with_a_node_and_fewer_have_to_be_said() {
    if !has_etcd() {
        return;
    }
    let ([a, _b, c], [_a, node_b, _c]) = cluster(151, "\"off\"");
    create(&a);
    node_b.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 3]);
    finding(
        &a,
        "volume web",
        "automatic repair is disabled (cluster.repair_after_s is \"off\" at node",
    );
    volume(&a, |v| in_sync(v) == ["a"]);
    a.ok(&["cluster", "leave", "--node", "b", "--force", "--yes"]);
    for node in [&a, &c] {
        let lacks = finding(node, "volume web", "it has 1 of 2 replicas");
        assert_eq!(lacks["severity"], "warning");
        let hint = lacks["hint"].as_str().unwrap();
        assert!(hint.contains("windrose volume mirror add web"), "{hint}");
        assert!(hint.contains("windrose volume mirror set web --replicas 1"), "{hint}");
        assert_eq!(exit_code(node), Some(5), "{}", texts(&node.cli(&["status"])).0);
    }
    // The next step, as printed.
    a.ok(&["volume", "mirror", "add", "web"]);
    let shown = volume(&a, |v| in_sync(v) == ["a", "c"]);
    assert_eq!(shown["replicas_wanted"], 2);

    // A replica that an administrator removes is not replaced.
    a.ok(&["volume", "mirror", "remove", "web", "--on", "c"]);
    let shown = volume(&a, |v| v["replicas"].as_array().unwrap().len() == 1);
    assert_eq!(shown["replicas_wanted"], 1);
    let is_told = |text: &str| text.contains("it has 1 of");
    assert!(!is_told(&texts(&a.cli(&["status"])).0));
    a.ok(&["volume", "mirror", "set", "web", "--replicas", "2"]);
    finding(&c, "volume web", "it has 1 of 2 replicas");
    assert!(a.fails(2, &["volume", "mirror", "set", "web", "--replicas", "4"]).contains("1..=3"));
    a.ok(&["volume", "mirror", "set", "web", "--replicas", "1"]);
    assert!(!is_told(&texts(&a.cli(&["status"])).0));
}

/// An old image is never overwritten automatically: its node is skipped, and the command that
/// overwrites it is printed, and works.
#[test]
fn a_node_that_joins_again_with_an_old_image_gets_a_copy_by_the_command_that_is_printed() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _c], [_a, node_b, _c_node]) = cluster(161, "1");
    a.ok(&["node", "drain", "c"]);
    create(&a);
    node_b.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 3]);
    // No automatic replica is announced if no node can keep one.
    let nowhere = finding(&a, "volume web", "no other node can take a replica now");
    assert!(!nowhere["message"].as_str().unwrap().contains("created automatically"), "{nowhere}");
    a.ok(&["cluster", "leave", "--node", "b", "--force", "--yes"]);
    let _b = b.spawn_node();
    let deadline = now() + CLUSTER_TIMEOUT;
    while !b.log().contains("this node was removed from the cluster") {
        assert!(now() < deadline, "{}", b.log());
        pause(100);
    }
    b.ok(&["cluster", "leave", "--force", "--yes"]);
    // The cluster runs: its image there is not unreachable data.
    let found = b.ok(&["volume", "orphans"]);
    assert!(found.contains("join this node to it first"), "{found}");
    let token = a.ok(&["cluster", "token", "create"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    wait_nodes(&a, |nodes| alive(nodes).len() == 3);

    let output = finding(&a, "volume web", "b has an old image of it");
    let command = "windrose volume mirror add web --on b --force";
    assert!(output["hint"].as_str().unwrap().contains(command), "{output}");
    for add in
        [&["volume", "mirror", "add", "web"][..], &["volume", "mirror", "add", "web", "--on", "b"]]
    {
        let refused = a.fails(1, add);
        assert!(refused.contains("b has an old image of it"), "{refused}");
        assert!(refused.contains(command), "{refused}");
    }
    a.ok(&command.split(' ').skip(1).collect::<Vec<_>>());
    volume(&a, |v| in_sync(v) == ["a", "b"]);
}
