//! What nodes say when disks, copies, nodes or the store fail, with real processes: the truth, why, and what helps; what
//! they print as the next step leads out. The states that need no processes are in `node::control::status::truth`.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use probe::iscsi::Session;
use serde_json::Value;

use crate::cluster::{PATIENCE, finding, has_etcd, safe};
use crate::common::{Place, now, pause, texts};
use crate::recovery::{self, INITIATOR, launch, session};

/// Where the data of an image begin, and what lies beside them.
const DATA: u64 = 1 << 20;
const BESIDE: std::ops::Range<u64> = 936 << 10..1 << 20;

/// What opens an image again is tried every 30 s at first.
const REOPENED: Duration = Duration::from_secs(180);

/// How `windrose status` ends, and what it says.
fn status(place: &Place) -> (i32, String, Value) {
    let out = place.cli(&["status"]);
    let (code, (text, _)) = (out.status.code().unwrap(), texts(&out));
    let json = place.cli(&["status", "--json"]);
    (code, text, serde_json::from_slice(&json.stdout).unwrap())
}

fn metric(place: &Place, line: &str) -> bool {
    let mut socket = UnixStream::connect(place.path().join("api.sock")).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    socket.read_to_string(&mut page).unwrap();
    page.lines().any(|l| l == line)
}

/// Asserts that nothing serves the volume `web`, as `place` tells it by every way.
fn tells_that_nobody_serves(place: &Place) {
    let (code, text, json) = status(place);
    assert_eq!((code, &json["verdict"]), (6, &"unavailable".into()), "{text}");
    assert!(text.contains("cannot be reached") && !text.contains("can be reached"), "{text}");
    assert_eq!(json["volumes"]["online"], 0, "{text}");
    assert!(metric(place, "windrose_volume_online{volume=\"web\"} 0"), "{text}");
    assert!(metric(place, "windrose_verdict 2"), "{text}");
    let list = place.ok(&["volume", "list"]);
    assert!(list.contains("OFFLINE") && !list.contains("online"), "{list}");
    for found in json["findings"].as_array().unwrap() {
        assert!(found["severity"] == "note" || !found["hint"].is_null(), "no next step: {found}");
    }
}

/// Waits until a node's status ends like this.
fn until_status(place: &Place, wanted: i32) {
    let deadline = now() + PATIENCE;
    while status(place).0 != wanted {
        assert!(now() < deadline, "{}\n{}", status(place).1, place.log());
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
    until_status(&a, 6);
    tells_that_nobody_serves(&a);
    // Longer than anybody is taken for alive.
    pause(12_000);
    tells_that_nobody_serves(&a);
    let found = finding(&a, "node a", "it reaches neither the metadata store nor any other node");
    assert!(found["hint"].as_str().unwrap().contains("look at the network of node a"), "{found}");
    // Others are not blamed for what cannot be known here.
    let (_, text, json) = status(&a);
    assert_eq!(json["cut_off"], true);
    assert!(!text.contains("no sign of life"), "{text}");
    assert!(text.contains("start windrose on nodes b, w where it does not run"), "{text}");
    let nodes = a.ok(&["cluster", "nodes"]);
    assert!(nodes.contains("unknown") && nodes.contains("is not known here"), "{nodes}");

    // Started anew it has read nothing: there may be volumes all the same.
    node_a.kill();
    let _a = launch(&a);
    let list = a.ok(&["volume", "list"]);
    assert!(list.contains("there may be some") && !list.contains("There are no volumes"), "{list}");
    let unknown = a.fails(1, &["volume", "show", "web"]);
    assert!(unknown.contains("whether there is a volume web is not known yet"), "{unknown}");
    let unknown = a.fails(1, &["volume", "orphans"]);
    assert!(unknown.contains("has not read its records yet"), "{unknown}");
    assert_eq!(status(&a).0, 6);

    // The next step: what is down is started.
    let _b = b.launch();
    let _w = _w.launch();
    for place in [&a, &b] {
        safe(place);
    }
}

#[test]
fn a_node_that_has_just_died_with_the_only_copy_serves_nothing() {
    if !has_etcd() {
        return;
    }
    let ([a, b, w], [_a, node_b, _w]) = recovery::cluster(131);
    a.ok(&["volume", "create", "web", "--size", "4M", "--on", "b", "--allow", INITIATOR]);
    for place in [&a, &b, &w] {
        until_status(place, 0);
    }
    node_b.kill();
    // At once: that the store takes it for alive is another thing.
    for place in [&a, &w] {
        tells_that_nobody_serves(place);
    }
    let found = finding(&a, "volume web", "b: the node is down, or cut off");
    assert_eq!(found["hint"], "start windrose on node b, or mend its network");
    for place in [&a, &w] {
        tells_that_nobody_serves(place);
    }
    let _b = b.start();
    for place in [&a, &b, &w] {
        until_status(place, 0);
    }
}

/// The image of the volume `web` at a place, and its length.
fn image(place: &Place) -> (PathBuf, u64) {
    let volumes = std::fs::read_dir(place.path().join("data/volumes")).unwrap();
    let mut images = volumes.map(|entry| entry.unwrap().path());
    let image = images.find(|p| p.extension().is_some_and(|e| e == "img")).unwrap();
    let len = image.metadata().unwrap().len();
    (image, len)
}

fn write(session: &mut Session, byte: u8) {
    session.good(&Session::cdb16(0x8a, 8, 16, 8), &[byte; 4096], &mut []).unwrap();
}

fn read(session: &mut Session) -> Option<u8> {
    let mut data = [0; 4096];
    session.good(&Session::cdb16(0x88, 0, 16, 8), &[], &mut data).ok()?;
    Some(data[0])
}

/// A file that has lost its end is a disk that is gone, as far as a node can tell.
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
    let deadline = now() + PATIENCE;
    while !a.json(&["volume", "show", "web"])["copies"][1]["reason"].is_string() {
        // The other node answers, or the initiator is sent there.
        let _ = read(&mut at_b);
        assert!(now() < deadline, "{}\n{}", status(&a).1, b.log());
        pause(200);
    }
    for place in [&a, &b] {
        let found =
            finding(place, "volume web", "1 of 2 copies are in sync: the one on b is outdated: ");
        let hint = found["hint"].as_str().unwrap();
        assert!(hint.contains("by itself") || hint.contains("tries again"), "{found}");
        assert_eq!(status(place).0, 5, "{}", status(place).1);
    }
    let refused = a.fails(1, &["volume", "mirror", "verify", "web"]);
    assert!(refused.contains("nothing was compared: volume web has not two copies"), "{refused}");

    // The next step: the disk answers again.
    write(&mut session(&a, "web", 0), 9);
    disk.write_all_at(&rest, DATA).unwrap();
    drop(disk);
    let deadline = now() + REOPENED;
    while !a.cli(&["status"]).status.success() {
        assert!(now() < deadline, "{}\n{}", status(&a).1, b.log());
        pause(500);
    }
    safe(&b);
    assert_eq!(read(&mut session(&a, "web", 1)), Some(9));
    let primary = a.json(&["volume", "show", "web"]);
    let leads =
        primary["copies"].as_array().unwrap().iter().find(|c| c["primary"] == true).unwrap();
    let place = if leads["node"] == "a" { &a } else { &b };
    let verified = place.ok(&["volume", "mirror", "verify", "web"]);
    assert!(verified.contains("are equal") && verified.contains("on "), "{verified}");
}

fn rot(place: &Place) {
    let (path, _) = image(place);
    let disk = OpenOptions::new().write(true).open(path).unwrap();
    let rotten = vec![0x5a; usize::try_from(BESIDE.end - BESIDE.start).unwrap()];
    disk.write_all_at(&rotten, BESIDE.start).unwrap();
    disk.sync_all().unwrap();
}

/// The command that a hint begins with.
fn command(hint: &str) -> Vec<&str> {
    let words = hint.split_once("windrose ").unwrap().1.split(' ');
    words.take_while(|word| !["on", "puts"].contains(word)).collect()
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
    [&a, &b].into_iter().for_each(rot);
    let (_a, _b) = (a.start(), b.start());
    for place in [&a, &b, &w] {
        until_status(place, 6);
        let found = finding(place, "volume web", "its reservations cannot be read");
        assert_eq!(found["severity"], "critical", "{found}");
    }
    tells_that_nobody_serves(&a);
    let found = finding(&a, "volume web", "on a its reservations cannot be read");
    a.ok(&command(found["hint"].as_str().unwrap()));
    for place in [&a, &b] {
        safe(place);
    }
    assert_eq!(read(&mut session(&a, "web", 0)), Some(0));
}

#[test]
fn reservations_of_a_node_by_itself_that_have_rotted_are_not_safe_and_the_hint_mends_them() {
    let place = Place::new("");
    let daemon = place.start();
    place.ok(&["volume", "create", "web", "--size", "4M", "--allow", INITIATOR]);
    assert_eq!(daemon.stop(), Some(0));
    rot(&place);
    let _daemon = place.start();
    until_status(&place, 6);
    tells_that_nobody_serves(&place);
    let found = finding(&place, "volume web", "its reservations cannot be read");
    place.ok(&command(found["hint"].as_str().unwrap()));
    until_status(&place, 0);
}

/// A disk that is gone is not served from, and not said to be safe.
#[test]
fn a_volume_of_a_node_by_itself_whose_disk_is_gone_is_offline_until_the_node_is_restarted() {
    let place = Place::new("");
    let daemon = place.start();
    place.ok(&["volume", "create", "web", "--size", "4M", "--allow", INITIATOR]);
    let (path, len) = image(&place);
    File::options().write(true).open(&path).unwrap().set_len(DATA).unwrap();
    let mut session = session(&place, "web", 0);
    assert_eq!(read(&mut session), None);
    tells_that_nobody_serves(&place);
    let found = finding(&place, "volume web", "nothing is read or written any more");
    let hint = found["hint"].as_str().unwrap();
    assert!(hint.contains("systemctl restart windrose"), "{hint}");
    File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    drop(session);
    daemon.stop();
    let _daemon = place.start();
    until_status(&place, 0);
}
