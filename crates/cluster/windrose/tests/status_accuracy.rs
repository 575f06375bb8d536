//! What nodes report when disks, replicas, nodes or the store fail, with real processes: the truth,
//! why, and what helps; the printed next step resolves it. The states that need no processes are in
//! `status::verdict::verdict_table`.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use probe::iscsi::Session;
use serde_json::Value;

use crate::cluster::{CLUSTER_TIMEOUT, finding, has_etcd, wait_safe};
use crate::common::{TestNode, now, pause, texts};
use crate::recovery::{self, INITIATOR, launch, session};

/// Where an image's data begins, and the range of metadata beside it.
const DATA: u64 = 1 << 20;
const METADATA_RANGE: std::ops::Range<u64> = 936 << 10..1 << 20;

/// A failed open of an image is retried every 30 s at first.
const REOPEN_LIMIT: Duration = Duration::from_secs(180);

/// The exit code of `windrose status`, and its output.
fn status(node: &TestNode) -> (i32, String, Value) {
    let out = node.cli(&["status"]);
    let (code, (text, _)) = (out.status.code().unwrap(), texts(&out));
    let json = node.cli(&["status", "--json"]);
    (code, text, serde_json::from_slice(&json.stdout).unwrap())
}

fn metric(node: &TestNode, line: &str) -> bool {
    let mut socket = UnixStream::connect(node.path().join("api.sock")).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    socket.read_to_string(&mut page).unwrap();
    page.lines().any(|l| l == line)
}

/// Asserts that nothing serves the volume `web`, in every report of `node`.
fn wait_no_server_finding(node: &TestNode) {
    let (code, text, json) = status(node);
    assert_eq!((code, &json["verdict"]), (6, &"unavailable".into()), "{text}");
    let first = text.lines().next().unwrap_or_default();
    assert!(first.contains("cannot be reached") && !first.contains("can be reached"), "{text}");
    assert_eq!(json["volumes"]["online"], 0, "{text}");
    assert!(metric(node, "windrose_volume_online{volume=\"web\"} 0"), "{text}");
    assert!(metric(node, "windrose_verdict 2"), "{text}");
    let list = node.ok(&["volume", "list"]);
    assert!(list.contains("OFFLINE") && !list.contains("online"), "{list}");
    for found in json["findings"].as_array().unwrap() {
        assert!(found["severity"] == "note" || !found["hint"].is_null(), "no next step: {found}");
    }
}

/// Waits until a node's status has this exit code.
fn wait_status(node: &TestNode, wanted: i32) {
    let deadline = now() + CLUSTER_TIMEOUT;
    while status(node).0 != wanted {
        assert!(now() < deadline, "{}\n{}", status(node).1, node.log());
        pause(200);
    }
}

#[test]
fn store_and_peer_that_are_lost_together_are_not_said_to_be_reached() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], [node_a, node_b, node_w]) = recovery::cluster(121);
    recovery::create_mirror(&a, &b, &[]);
    node_b.kill();
    node_w.kill();
    wait_status(&a, 6);
    wait_no_server_finding(&a);
    // Longer than a dead node counts as alive.
    pause(12_000);
    wait_no_server_finding(&a);
    let found = finding(&a, "node a", "it reaches neither the metadata store nor any other node");
    assert!(found["hint"].as_str().unwrap().contains("check the network of node a"), "{found}");
    // An isolated node does not blame other nodes.
    let (_, text, json) = status(&a);
    assert_eq!(json["isolated"], true);
    assert!(!text.contains("does not respond: it is down"), "{text}");
    assert!(text.contains("start windrose on nodes b, w where it does not run"), "{text}");
    let nodes = a.ok(&["cluster", "nodes"]);
    assert!(nodes.contains("unknown") && nodes.contains("is unknown here"), "{nodes}");

    // After a restart it has read no records: volumes may exist all the same.
    node_a.kill();
    let _a = launch(&a);
    let list = a.ok(&["volume", "list"]);
    assert!(list.contains("there may be some") && !list.contains("There are no volumes"), "{list}");
    let unknown = a.fails(1, &["volume", "show", "web"]);
    assert!(unknown.contains("cannot tell yet whether volume web exists"), "{unknown}");
    let unknown = a.fails(1, &["volume", "orphans"]);
    assert!(unknown.contains("has not read its records yet"), "{unknown}");
    assert_eq!(status(&a).0, 6);

    // The next step: start the node that is down.
    let _b = b.spawn_node();
    let _w = _w.spawn_node();
    for node in [&a, &b] {
        wait_safe(node);
    }
}

#[test]
fn a_node_that_has_just_died_with_the_only_copy_serves_nothing() {
    if !has_etcd() {
        return;
    }
    let ([a, b, w], [_a, node_b, _w]) = recovery::cluster(131);
    a.ok(&["volume", "create", "web", "--size", "4M", "--on", "b", "--allow", INITIATOR]);
    for node in [&a, &b, &w] {
        wait_status(node, 0);
    }
    node_b.kill();
    // At once, although the store still counts it as alive.
    for node in [&a, &w] {
        wait_no_server_finding(node);
    }
    let found = finding(&a, "volume web", "b: the node is down, or cut off");
    assert_eq!(found["hint"], "start windrose on node b, or fix its network");
    for node in [&a, &w] {
        wait_no_server_finding(node);
    }
    let _b = b.start();
    for node in [&a, &b, &w] {
        wait_status(node, 0);
    }
}

/// A node's image of the volume `web`, and its length.
fn image(node: &TestNode) -> (PathBuf, u64) {
    let volumes = std::fs::read_dir(node.path().join("data/volumes")).unwrap();
    let mut images = volumes.map(|entry| entry.unwrap().path());
    let image = images.find(|p| p.extension().is_some_and(|e| e == "img")).unwrap();
    let len = image.metadata().unwrap().len();
    (image, len)
}

fn write(session: &mut Session, byte: u8) {
    session.execute(&Session::cdb16(0x8a, 8, 16, 8), &[byte; 4096], &mut []).unwrap();
}

fn read(session: &mut Session) -> Option<u8> {
    let mut data = [0; 4096];
    session.execute(&Session::cdb16(0x88, 0, 16, 8), &[], &mut data).ok()?;
    Some(data[0])
}

/// To a node, a truncated file is a lost disk.
#[test]
fn a_copy_whose_disk_was_lost_is_told_with_its_reason_and_comes_back_by_itself() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], _daemons) = recovery::cluster(141);
    recovery::create_mirror(&a, &b, &[]);
    let mut at_b = session(&a, "web", 1);
    write(&mut at_b, 7);
    let (path, len) = image(&b);
    let disk = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut rest = vec![0; usize::try_from(len - DATA).unwrap()];
    disk.read_exact_at(&mut rest, DATA).unwrap();
    disk.set_len(DATA).unwrap();
    let deadline = now() + CLUSTER_TIMEOUT;
    while !a.json(&["volume", "show", "web"])["replicas"][1]["reason"].is_string() {
        // The other node answers, or redirects the initiator.
        let _ = read(&mut at_b);
        assert!(now() < deadline, "{}\n{}", status(&a).1, b.log());
        pause(200);
    }
    for node in [&a, &b] {
        let message = "1 of 2 replicas are in sync: the one on b is out of sync: ";
        loop {
            let found = finding(node, "volume web", message);
            let hint = found["hint"].as_str().unwrap();
            if hint.contains("reopens") || hint.contains("retries") {
                break;
            }
            // A node that has opened it again reports it a moment later.
            assert!(hint.contains("wait") && now() < deadline, "{found}");
            pause(200);
        }
        assert_eq!(status(node).0, 5, "{}", status(node).1);
    }
    let refused = a.fails(1, &["volume", "mirror", "verify", "web"]);
    assert!(
        refused.contains("nothing was compared: volume web has fewer than two replicas"),
        "{refused}"
    );

    // The next step: the disk answers again.
    write(&mut session(&a, "web", 0), 9);
    disk.write_all_at(&rest, DATA).unwrap();
    drop(disk);
    let deadline = now() + REOPEN_LIMIT;
    while !a.cli(&["status"]).status.success() {
        assert!(now() < deadline, "{}\n{}", status(&a).1, b.log());
        pause(500);
    }
    wait_safe(&b);
    assert_eq!(read(&mut session(&a, "web", 1)), Some(9));
    let primary = a.json(&["volume", "show", "web"]);
    let leads =
        primary["replicas"].as_array().unwrap().iter().find(|c| c["primary"] == true).unwrap();
    let node = if leads["node"] == "a" { &a } else { &b };
    let verified = node.ok(&["volume", "mirror", "verify", "web"]);
    assert!(verified.contains("are equal") && verified.contains("on "), "{verified}");
}

fn corrupt_reservations(node: &TestNode) {
    let (path, _) = image(node);
    let disk = OpenOptions::new().write(true).open(path).unwrap();
    let rotten = vec![0x5a; usize::try_from(METADATA_RANGE.end - METADATA_RANGE.start).unwrap()];
    disk.write_all_at(&rotten, METADATA_RANGE.start).unwrap();
    disk.sync_all().unwrap();
}

/// The command that a hint begins with.
fn command(hint: &str) -> Vec<&str> {
    let command = hint.split_once("windrose ").unwrap().1.split(';').next().unwrap();
    command.split(' ').take_while(|word| !["on", "puts"].contains(word)).collect()
}

#[test]
fn reservations_that_have_rotted_everywhere_are_not_safe_and_the_hint_mends_them() {
    if !has_etcd() {
        return;
    }
    let ([a, b, w], [node_a, node_b, _w]) = recovery::cluster(151);
    recovery::create_mirror(&a, &b, &[]);
    node_a.kill();
    node_b.kill();
    [&a, &b].into_iter().for_each(corrupt_reservations);
    let (_a, _b) = (a.start(), b.start());
    for node in [&a, &b, &w] {
        wait_status(node, 6);
        let found = finding(node, "volume web", "its reservations cannot be read");
        assert_eq!(found["severity"], "critical", "{found}");
    }
    wait_no_server_finding(&a);
    let found = finding(&a, "volume web", "on a its reservations cannot be read");
    a.ok(&command(found["hint"].as_str().unwrap()));
    for node in [&a, &b] {
        wait_safe(node);
    }
    assert_eq!(read(&mut session(&a, "web", 0)), Some(0));
}

#[test]
fn reservations_of_a_node_by_itself_that_have_rotted_are_not_safe_and_the_hint_mends_them() {
    let node = TestNode::new("");
    let daemon = node.start();
    node.ok(&["volume", "create", "web", "--size", "4M", "--allow", INITIATOR]);
    assert_eq!(daemon.stop(), Some(0));
    corrupt_reservations(&node);
    let _daemon = node.start();
    wait_status(&node, 6);
    wait_no_server_finding(&node);
    let found = finding(&node, "volume web", "its reservations cannot be read");
    node.ok(&command(found["hint"].as_str().unwrap()));
    wait_status(&node, 0);
}

/// A lost disk is not served from, and not reported as safe.
#[test]
fn a_volume_of_a_node_by_itself_whose_disk_is_gone_is_offline_until_the_node_is_restarted() {
    let node = TestNode::new("");
    let daemon = node.start();
    node.ok(&["volume", "create", "web", "--size", "4M", "--allow", INITIATOR]);
    let (path, len) = image(&node);
    File::options().write(true).open(&path).unwrap().set_len(DATA).unwrap();
    let mut session = session(&node, "web", 0);
    assert_eq!(read(&mut session), None);
    wait_no_server_finding(&node);
    let found = finding(&node, "volume web", "the volume is stopped");
    let hint = found["hint"].as_str().unwrap();
    assert!(hint.contains("systemctl restart windrose"), "{hint}");
    File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    drop(session);
    daemon.stop();
    let _daemon = node.start();
    wait_status(&node, 0);
}
