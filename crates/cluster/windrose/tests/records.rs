//! A node whose own records are damaged, missing or another node's.

use std::fs;
use std::io::Write;
use std::process::Command;

use crate::common::{TestNode, cli, texts};

/// A node that has had a volume with CHAP, and was stopped.
fn with_volume() -> TestNode {
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "8M"]);
    let secret = test_node.path().join("secret");
    fs::write(&secret, "0123456789ab\n").unwrap();
    test_node.ok(&["volume", "chap", "web", &format!("u:{}", secret.display())]);
    assert_eq!(node.stop(), Some(0));
    test_node
}

fn accept(node: &TestNode) {
    let config = node.config().to_str().unwrap();
    let wrong = cli("unix:/nowhere", &["node", "accept-data-dir", "--config", config]);
    assert_eq!(wrong.status.code(), Some(2), "there is no terminal: {:?}", texts(&wrong));
    let args = ["node", "accept-data-dir", "--config", config, "--confirm", "test"];
    let out = cli("unix:/nowhere", &args);
    assert!(out.status.success(), "{:?}", texts(&out));
}

/// A permanent error ends the node with an exit code after which the service manager does not
/// restart it.
#[test]
fn a_damaged_store_ends_the_node_with_the_way_out_and_a_code_of_its_own() {
    let test_node = with_volume();
    let store = test_node.path().join("data/store.redb");
    let good = fs::read(&store).unwrap();
    let unit = include_str!("../../../../packaging/windrose.service");
    assert!(unit.lines().any(|line| line == "RestartPreventExitStatus=2 7"));
    let mut rotten = good.clone();
    for (at, byte) in rotten.iter_mut().enumerate().skip(4096) {
        *byte ^= u8::try_from(at * 37 % 251).unwrap();
    }
    for (bytes, why) in [(&b""[..], "the file is empty"), (&rotten, "is damaged")] {
        fs::write(&store, bytes).unwrap();
        assert_eq!(test_node.run_until_exit(), Some(7), "{}", test_node.log());
        let log = test_node.log();
        for part in [why, "Restore it from a backup", "When the store is damaged"] {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert!(!log.contains("panic: this is a bug"), "{log}");
    }
    fs::write(&store, &good).unwrap();
    let node = test_node.start();
    assert_eq!(test_node.json(&["volume", "list"])["volumes"].as_array().unwrap().len(), 1);
    assert_eq!(node.stop(), Some(0));
}

/// The unit forbids what the node does not need.
#[test]
fn the_unit_confines_the_node() {
    let unit = include_str!("../../../../packaging/windrose.service");
    for line in [
        "UMask=0077",
        "PrivateMounts=yes",
        "ProtectProc=invisible",
        "ProtectClock=yes",
        "DevicePolicy=closed",
        "DeviceAllow=block-* rw",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged @setuid @keyring @debug",
        "SystemCallErrorNumber=EPERM",
        "StateDirectoryMode=0700",
    ] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../packaging/windrose.service");
    let judged = Command::new("systemd-analyze")
        .args(["security", "--no-pager", "--offline=true", "--threshold=25", path])
        .output();
    // Without systemd-analyze, or before version 250, only the lines above are checked.
    if let Ok(judged) = judged
        && String::from_utf8_lossy(&judged.stdout).contains("Overall exposure level")
    {
        assert!(judged.status.success(), "{}", String::from_utf8_lossy(&judged.stdout));
    }
}

#[test]
fn a_data_directory_that_others_can_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let node = with_volume();
    let data = node.path().join("data");
    fs::set_permissions(&data, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(node.run_until_exit(), Some(1), "{}", node.log());
    let log = node.log();
    for part in ["can be changed by its group and all users", "mode 0777", "chmod go-w"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(node.start().stop(), Some(0));
}

#[test]
fn a_data_directory_that_is_missing_is_no_empty_node() {
    let test_node = with_volume();
    let (data, away) = (test_node.path().join("data"), test_node.path().join("away"));
    // As if its file system were not mounted.
    fs::rename(&data, &away).unwrap();
    for is_there in [false, true] {
        if is_there {
            fs::create_dir(&data).unwrap();
        }
        assert_eq!(test_node.run_until_exit(), Some(7), "{}", test_node.log());
        let log = test_node.log();
        assert!(log.contains("contains none of its records"), "{log}");
        assert!(log.contains("windrose node accept-data-dir"), "{log}");
        assert_eq!(data.exists(), is_there, "nothing is made");
    }
    assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "nothing is made");
    fs::remove_dir(&data).unwrap();
    fs::rename(&away, &data).unwrap();
    let node = test_node.start();
    assert_eq!(test_node.json(&["volume", "list"])["volumes"].as_array().unwrap().len(), 1);
    let config = test_node.config().to_str().unwrap();
    let args = ["node", "accept-data-dir", "--config", config, "--confirm", "test"];
    let used = cli("unix:/nowhere", &args);
    assert!(texts(&used).1.contains("a node uses it"), "{:?}", texts(&used));
    assert_eq!(node.stop(), Some(0));
    // Only the store is missing.
    fs::rename(data.join("store.redb"), &away).unwrap();
    assert_eq!(test_node.run_until_exit(), Some(7), "{}", test_node.log());
    assert!(test_node.log().contains("store.redb is missing"), "{}", test_node.log());
    accept(&test_node);
    let node = test_node.start();
    assert!(test_node.json(&["volume", "list"])["volumes"].as_array().unwrap().is_empty());
    assert_eq!(node.stop(), Some(0));
    // Another node's, or an older copy.
    fs::rename(&away, data.join("store.redb")).unwrap();
    let node = test_node.start();
    assert_eq!(node.stop(), Some(0));
}

/// A small file system, until it is dropped.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(done.is_ok_and(|status| status.success()), "{}", self.0.display());
    }
}

/// Writes until there is no space left.
fn fill(file: &std::path::Path) {
    let mut filler = fs::File::create(file).unwrap();
    for size in [1 << 16, 1 << 12, 1] {
        while filler.write_all(&vec![1; size]).is_ok() {}
    }
}

#[test]
fn on_a_full_file_system_volumes_can_be_deleted_and_the_store_works_again_by_itself() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can mount a file system");
    }
    let test_node = TestNode::new("");
    let data = test_node.path().join("data");
    fs::create_dir(&data).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=40m,mode=0700", "windrose-test"];
    assert!(Command::new("mount").args(mount).arg(&data).status().unwrap().success());
    let _mounted = Mounted(data.clone());
    let node = test_node.start();
    for name in ["a", "b", "c"] {
        test_node.ok(&["volume", "create", name, "--size", "4M"]);
    }
    let filler = data.join("filler");
    fill(&filler);
    // Until a change fails for lack of space, or many have succeeded without.
    let initiator = |n: u32| format!("iqn.2001-04.com.example:{}{n}", "x".repeat(180));
    let full = (0..400).find(|n| {
        let out = test_node.cli(&["volume", "allow", "a", &initiator(*n)]);
        !out.status.success()
    });
    test_node.ok(&["volume", "delete", "b", "--yes"]);
    let status = test_node.cli(&["status"]);
    let output = texts(&status).0;
    assert!(output.contains("the reserve of space for the store") || full.is_none(), "{output}");
    fill(&data.join("more"));
    test_node.ok(&["volume", "delete", "a", "--yes"]);
    fs::remove_file(&filler).unwrap();
    fs::remove_file(data.join("more")).unwrap();
    test_node.ok(&["volume", "create", "d", "--size", "4M"]);
    let status = texts(&test_node.cli(&["status"])).0;
    assert!(!status.contains("the reserve of space"), "{status}");
    let volumes = test_node.json(&["volume", "list"]);
    let names: Vec<_> =
        volumes["volumes"].as_array().unwrap().iter().map(|v| v["name"].clone()).collect();
    assert_eq!(names, ["c", "d"]);
    assert!(!test_node.log().contains("Previous I/O"), "{}", test_node.log());
    assert_eq!(node.stop(), Some(0));
}
