//! The real program after the loss of records or nodes: follows the guide word for word.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cluster::store::{Change, MetadataStore, Precondition};
use probe::iscsi::Session;
use serde_json::Value;

use crate::cluster::{
    CLUSTER_TIMEOUT, address, alive, finding, has_etcd, store_of, wait_all_online, wait_nodes,
    wait_safe,
};
use crate::common::{Daemon, TestNode, now, pause};

pub(crate) const INITIATOR: &str = "iqn.1993-08.org.debian:01:a";
const GUIDE: &str = include_str!("../../../../docs/guides/recovery.md");

fn recovery_node(name: &str, number: u8) -> TestNode {
    TestNode::named(name, &format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number)))
}

/// The guide's commands for a case, in order: at which node, and the command.
fn commands(case: &str) -> Vec<(&'static str, &'static str)> {
    let mark = format!("<!-- test: {case} -->\n```sh\n");
    let blocks = GUIDE.split(&mark).skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap().lines());
    let commands: Vec<_> = lines.map(|line| line.split_once("$ ").unwrap()).collect();
    assert!(!commands.is_empty(), "the guide has nothing for {case}");
    commands
}

/// Follows the guide for a case, at these nodes, with other disks.
fn follow_the_guide(case: &str, places: &[(&str, &TestNode)], disks: &[(&str, &Path)]) -> String {
    let shared = tempfile::tempdir().unwrap();
    let bin = shared.path().join("windrose");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_windrose"), &bin).unwrap();
    let path = format!("{}:{}", shared.path().display(), std::env::var("PATH").unwrap());
    let mut said = String::new();
    for (node, command) in commands(case) {
        let test_node = places.iter().find(|(name, _)| *name == node).unwrap().1;
        let mut command = command.to_owned();
        for (name, disk) in disks {
            command = command.replace(name, disk.to_str().unwrap());
        }
        let out = Command::new("sh")
            .args(["-ec", &command])
            .current_dir(shared.path())
            .env("PATH", &path)
            .env("WINDROSE_API", format!("unix:{}/api.sock", test_node.path().display()))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let (stdout, stderr) = crate::common::texts(&out);
        let status = out.status;
        // People type no faster, and other nodes notice a change a moment later.
        pause(1000);
        assert!(status.success(), "{node}$ {command}: {stdout}{stderr}\n{}", test_node.log());
        said.push_str(&format!("{node}$ {command}\n{stdout}{stderr}"));
    }
    said
}

/// A session with a volume through one of its portals.
pub(crate) fn session(node: &TestNode, volume: &str, portal: usize) -> Session {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let shown = node.json(&["volume", "show", volume]);
        let (target, portals) = (&shown["iscsi"]["target"], &shown["iscsi"]["portals"]);
        let at = portals[portal].as_str().and_then(|at| at.parse().ok());
        let login = at.map(|at| Session::login(at, INITIATOR, target.as_str().unwrap(), 0, 1));
        match login {
            Some(Ok(session)) => return session,
            other => {
                assert!(now() < deadline, "{:?} {shown}: {}", other.map(Result::err), node.log());
            }
        }
        pause(200);
    }
}

fn write(node: &TestNode, volume: &str, byte: u8) {
    let cdb = Session::cdb16(0x8a, 8, 16, 8);
    session(node, volume, 0).execute(&cdb, &[byte; 4096], &mut []).unwrap();
}

fn assert_holds(node: &TestNode, volume: &str, portal: usize, byte: u8) {
    let mut data = [0; 4096];
    let cdb = Session::cdb16(0x88, 0, 16, 8);
    session(node, volume, portal).execute(&cdb, &[], &mut data).unwrap();
    assert!(data.iter().all(|b| *b == byte), "{volume} holds {} and not {byte}", data[0]);
}

/// A cluster of two nodes and a witness.
pub(crate) fn cluster(first: u8) -> ([TestNode; 3], [Daemon; 3]) {
    let places =
        [recovery_node("a", first), recovery_node("b", first + 1), recovery_node("w", first + 2)];
    let daemons = [places[0].start(), places[1].start(), places[2].start()];
    let [a, b, w] = &places;
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    w.ok(&["cluster", "witness", "--token", token.trim()]);
    wait_nodes(a, |nodes| alive(nodes) == [1, 2, 3]);
    (places, daemons)
}

pub(crate) fn create_mirror(a: &TestNode, b: &TestNode, pool: &[&str]) -> Value {
    let create =
        ["volume", "create", "web", "--size", "4M", "--replicas", "2", "--on", "a", "--on", "b"];
    let create = [&create[..], &["--allow", INITIATOR], pool].concat();
    let deadline = now() + CLUSTER_TIMEOUT;
    while !a.cli(&create).status.success() {
        assert!(now() < deadline, "{}", a.fails(1, &create));
        pause(200);
    }
    for node in [a, b] {
        wait_safe(node);
    }
    a.json(&["volume", "show", "web"])
}

/// Starts a node that cannot serve, and waits until it answers.
pub(crate) fn launch(node: &TestNode) -> Daemon {
    let daemon = node.spawn_node();
    let deadline = now() + CLUSTER_TIMEOUT;
    while node.cli(&["status"]).status.code() == Some(3) {
        assert!(now() < deadline, "{}", node.log());
        pause(100);
    }
    daemon
}

/// Loses a node's boot disk: its data directory and the anchor of that.
fn lose_boot_disk(node: &TestNode) {
    std::fs::remove_dir_all(node.path().join("data")).unwrap();
    let anchor = node.path().join("data.anchor");
    if anchor.is_dir() {
        std::fs::remove_dir_all(anchor).unwrap();
    } else if anchor.exists() {
        std::fs::remove_file(anchor).unwrap();
    }
}

fn pool_disk(node: &TestNode, name: &str) -> PathBuf {
    let path = node.path().join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    path
}

/// Waits until a node counts as dead, and every volume continues without it.
fn wait_until_gone(test_node: &TestNode, node: u64) {
    wait_nodes(test_node, |nodes| !alive(nodes).contains(&node));
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let shown = test_node.json(&["volume", "show", "web"]);
        let copies = shown["replicas"].as_array().unwrap();
        if copies.iter().filter(|c| c["state"]["kind"] == "in_sync").count() == 1 {
            return;
        }
        assert!(now() < deadline, "{shown}");
        pause(200);
    }
}

#[test]
fn the_guide_recovers_a_cluster_whose_store_is_lost() {
    if !has_etcd() {
        return;
    }
    let ([a, b, w], daemons) = cluster(51);
    let before = create_mirror(&a, &b, &[]);
    write(&a, "web", 7);
    assert!(daemons.into_iter().all(|daemon| daemon.stop().is_some()));
    for node in [&a, &b, &w] {
        std::fs::remove_dir_all(node.path().join("data/etcd")).unwrap();
    }
    let _daemons = [&a, &b, &w].map(launch);
    finding(&a, "node a", "waits for its cluster");
    let refused = a.fails(2, &["cluster", "recover"]);
    assert!(
        refused.contains("there is no terminal for a confirmation")
            && refused.contains("--confirm a")
    );
    let output = follow_the_guide("store", &[("a", &a), ("b", &b), ("w", &w)], &[]);
    assert!(output.contains("must not run again"), "{output}");
    assert!(output.contains("resynced from it"), "{output}");
    for node in [&a, &b] {
        wait_safe(node);
    }
    let after = a.json(&["volume", "show", "web"]);
    for same in ["id", "name", "size_bytes", "access", "created_s"] {
        assert_eq!(after[same], before[same], "{same}");
    }
    assert_eq!(after["iscsi"]["target"], before["iscsi"]["target"]);
    assert_eq!(after["nvme"]["subsystem"], before["nvme"]["subsystem"]);
    for portal in [0, 1] {
        assert_holds(&a, "web", portal, 7);
    }
    // A volume that is not served for a moment, on a busy machine, is listed.
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let output = a.ok(&["cluster", "recover", "--dry-run"]);
        if output.contains("nothing to recover") {
            return;
        }
        assert!(now() < deadline, "{output}");
        pause(200);
    }
}

#[test]
fn a_store_that_was_set_back_destroys_nothing_and_is_recovered() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], [node_a, node_b, _node_w]) = cluster(61);
    let web = create_mirror(&a, &b, &[]);
    write(&a, "web", 1);
    let key = format!("mirrors/{}", web["id"].as_str().unwrap());
    let old = record(&a, 61, &key, None);
    // It continues without b, and then with it again, in later epochs.
    node_b.kill();
    wait_until_gone(&a, 2);
    write(&a, "web", 2);
    let node_b = b.start();
    for node in [&a, &b] {
        wait_safe(node);
    }
    node_a.kill();
    node_b.kill();
    let _nodes = [&a, &b].map(launch);
    record(&a, 61, &key, Some(&old));
    let _ = finding(&a, "volume web", "was it restored?");
    let _ = finding(&b, "volume web", "was it restored?");
    // Nothing that may be the last copy is removed.
    for command in [
        &["volume", "delete", "web", "--yes", "--force"][..],
        &["volume", "mirror", "replace", "web", "--on", "b"],
        &["volume", "mirror", "remove", "web", "--on", "b"],
    ] {
        let refused = a.fails(1, command);
        assert!(refused.contains("windrose cluster recover"), "{command:?}: {refused}");
    }
    let refused = a.fails(1, &["volume", "force-primary", "web", "--confirm", "web"]);
    assert!(refused.contains("cannot be forced"), "{refused}");
    assert!(refused.contains("windrose cluster recover"), "{refused}");
    let plan = a.ok(&["cluster", "recover", "--dry-run"]);
    assert!(plan.contains("Volume web") && plan.contains("resynced from it"), "{plan}");
    a.ok(&["cluster", "recover", "--confirm", "a"]);
    for node in [&a, &b] {
        wait_safe(node);
    }
    for portal in [0, 1] {
        assert_holds(&a, "web", portal, 2);
    }
}

/// Reads or writes a key in the store of `node`, the first of three nodes from number `number` on.
fn record(node: &TestNode, number: u8, key: &str, value: Option<&[u8]>) -> Vec<u8> {
    let store = store_of(node, number..number + 3);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let deadline = now() + CLUSTER_TIMEOUT;
    runtime.block_on(async {
        loop {
            match store.get(key).await {
                Ok(Some(entry)) => match value {
                    None => return entry.value,
                    Some(value) => {
                        let (key, expect) =
                            (key.to_owned(), Precondition::AtRevision(entry.revision));
                        let change =
                            Change { key, precondition: expect, value: Some(value.to_vec()) };
                        if store.commit(vec![change]).await.is_ok() {
                            return entry.value;
                        }
                    }
                },
                other => assert!(now() < deadline, "{other:?}"),
            }
            pause(100);
        }
    })
}

#[test]
fn the_guide_brings_a_node_back_whose_boot_disk_is_lost() {
    let a = recovery_node("a", 71);
    let images = tempfile::tempdir().unwrap();
    let mail = images.path().join("mail.img");
    let disks = ["x", "y"].map(|name| pool_disk(&a, name));
    let [x, y] = &disks;
    let node = a.start();
    a.ok(&["pool", "create", "tank", "--raid", "1", x.to_str().unwrap(), y.to_str().unwrap()]);
    a.ok(&["volume", "create", "vm1", "--size", "8M", "--pool", "tank", "--allow", INITIATOR]);
    a.ok(&["volume", "create", "vm2", "--size", "8M", "--pool", "tank", "--allow", INITIATOR]);
    let secret = a.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef\n").unwrap();
    a.ok(&["volume", "chap", "vm2", &format!("user:{}", secret.display())]);
    let at = mail.to_str().unwrap();
    a.ok(&["volume", "create", "mail", "--size", "4M", "--path", at, "--allow", INITIATOR]);
    write(&a, "vm1", 1);
    write(&a, "mail", 3);
    let before = ["vm1", "vm2", "mail"].map(|name| a.json(&["volume", "show", name]));
    assert_eq!(node.stop(), Some(0));
    lose_boot_disk(&a);
    let _node = a.start();
    assert_eq!(a.json(&["volume", "list"])["volumes"], serde_json::json!([]));
    let [disk_a, disk_b] = ["/dev/disk/by-id/ata-A", "/dev/disk/by-id/ata-B"];
    let others: [(&str, &Path); 3] = [(disk_a, x), (disk_b, y), ("/srv/images/mail.img", &mail)];
    let output = follow_the_guide("boot", &[("a", &a)], &others);
    assert!(output.contains("secrets, which images do not contain"), "{output}");
    let after = ["vm1", "vm2", "mail"].map(|name| a.json(&["volume", "show", name]));
    for (after, before) in after.iter().zip(&before) {
        for same in ["id", "name", "size_bytes", "replicas", "created_s"] {
            assert_eq!(after[same], before[same], "{same}");
        }
        assert_eq!(after["iscsi"]["target"], before["iscsi"]["target"]);
        assert_eq!(after["nvme"]["subsystem"], before["nvme"]["subsystem"]);
    }
    assert_eq!(after[0]["access"], before[0]["access"]);
    let none = serde_json::json!([]);
    assert_eq!(after[1]["access"]["initiators"], none, "its secret is lost: no access");
    assert_holds(&a, "vm1", 0, 1);
    assert_holds(&a, "mail", 0, 3);
}

#[test]
fn the_guide_brings_a_node_of_a_cluster_back_whose_boot_disk_is_lost() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], [_node_a, node_b, _node_w]) = cluster(81);
    let pool = |node: &TestNode| {
        let disks = ["x", "y"].map(|name| pool_disk(node, name));
        let [x, y] = [&disks[0], &disks[1]].map(|d| d.to_str().unwrap());
        node.ok(&["pool", "create", "tank", "--raid", "1", x, y]);
        disks
    };
    let ([_, _], [x, y]) = (pool(&a), pool(&b));
    create_mirror(&a, &b, &["--pool", "tank"]);
    write(&a, "web", 5);
    node_b.kill();
    lose_boot_disk(&b);
    let _node_b = b.start();
    wait_until_gone(&a, 2);
    let disks: [(&str, &Path); 2] = [("/dev/disk/by-id/ata-C", &x), ("/dev/disk/by-id/ata-D", &y)];
    let output = follow_the_guide("boot-cluster", &[("a", &a), ("b", &b)], &disks);
    assert!(
        output.contains("is a former replica of volume web, which has its replicas elsewhere"),
        "{output}"
    );
    for node in [&a, &b] {
        wait_safe(node);
    }
    for portal in [0, 1] {
        assert_holds(&a, "web", portal, 5);
    }
}

#[test]
fn the_guide_replaces_a_whole_node() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], [_node_a, node_b, _node_w]) = cluster(91);
    create_mirror(&a, &b, &[]);
    write(&a, "web", 9);
    node_b.kill();
    wait_until_gone(&a, 2);
    let c = recovery_node("c", 94);
    let _node_c = c.start();
    follow_the_guide("node", &[("a", &a), ("c", &c)], &[]);
    wait_all_online(&a, 1);
    for node in [&a, &c] {
        wait_safe(node);
    }
    for portal in [0, 1] {
        assert_holds(&a, "web", portal, 9);
    }
}

#[test]
fn an_image_without_a_record_is_told_taken_or_erased() {
    let a = recovery_node("a", 101);
    let node = a.start();
    for name in ["web", "old"] {
        a.ok(&["volume", "create", name, "--size", "4M", "--allow", INITIATOR]);
    }
    write(&a, "web", 4);
    let images = ["web", "old"].map(|name| {
        let shown = a.json(&["volume", "show", name]);
        let path = shown["replicas"][0]["backing"]["path"].as_str().unwrap().to_owned();
        (path, shown["id"].as_str().unwrap().to_owned())
    });
    assert_eq!(node.stop(), Some(0));
    // A directory of images from a lost machine.
    let kept = tempfile::tempdir().unwrap();
    let names = images.each_ref().map(|(path, _)| Path::new(path).file_name().unwrap());
    for ((path, _), name) in images.iter().zip(names) {
        std::fs::copy(path, kept.path().join(name)).unwrap();
    }
    lose_boot_disk(&a);
    std::fs::create_dir_all(a.path().join("data/volumes")).unwrap();
    let [web, old] = names.map(|name| {
        let path = a.path().join("data/volumes").join(name);
        std::fs::copy(kept.path().join(name), &path).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let _node = a.start();
    let output = finding(&a, &format!("image {web}"), "which no record references");
    assert_eq!(output["severity"], "warning");
    assert!(output["hint"].as_str().unwrap().contains(&format!("windrose volume adopt {web}")));
    assert!(a.ok(&["volume", "orphans"]).contains(&old));
    let plan = a.ok(&["volume", "adopt", &web, "--dry-run"]);
    assert!(plan.contains("Volume web"), "{plan}");
    assert_eq!(a.json(&["volume", "list"])["volumes"], serde_json::json!([]), "only a plan");
    a.ok(&["volume", "adopt", &web]);
    assert_holds(&a, "web", 0, 4);
    assert!(a.fails(1, &["volume", "adopt", &web]).contains("belongs to volume web"));
    // A second copy of it is not a second volume.
    let twin = kept.path().join(names[0]);
    let refused = a.fails(1, &["volume", "adopt", twin.to_str().unwrap()]);
    assert!(refused.contains("is a former replica of volume web"), "{refused}");
    assert!(a.fails(2, &["volume", "discard", &old]).contains("--confirm old"));
    assert!(
        a.fails(2, &["volume", "discard", &old, "--confirm", "web"])
            .contains("the confirmation names web")
    );
    a.ok(&["volume", "discard", &old, "--confirm", "old"]);
    assert!(!Path::new(&old).exists());
    assert!(a.fails(1, &["volume", "discard", &web, "--yes"]).contains("belongs to volume web"));
}
