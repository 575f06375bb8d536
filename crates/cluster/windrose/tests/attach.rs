//! `windrose attach`: access, and how it ends.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Daemon, TestNode, now, pause};
use rustix::io::Errno;

const HOST: [&str; 4] = [
    "--host-nqn",
    "nqn.2026-01.net.example:host",
    "--host-id",
    "00000000-0000-4000-8000-000000000001",
];

fn attach(node: &TestNode, socket: &Path) -> Daemon {
    attach_at(node, socket, None)
}

fn attach_at(node: &TestNode, socket: &Path, nbd: Option<&Path>) -> Daemon {
    attach_as(node, socket, nbd, Stdio::null())
}

fn attach_as(node: &TestNode, socket: &Path, nbd: Option<&Path>, output: Stdio) -> Daemon {
    attach_with(node, socket, nbd, output, &[])
}

fn attach_with(
    node: &TestNode,
    socket: &Path,
    nbd: Option<&Path>,
    output: Stdio,
    more: &[&str],
) -> Daemon {
    let child = Command::new(env!("CARGO_BIN_EXE_windrose"))
        .env("WINDROSE_API", format!("unix:{}/api.sock", node.path().display()))
        .args(["attach", "web", "--queues", "2", "--no-path-timeout", "1", "--vhost-user"])
        .arg(socket)
        .args(nbd.map(|at| format!("--nbd={}", at.display())))
        .args(HOST)
        .args(more)
        .stdin(Stdio::null())
        .stderr(output)
        .spawn()
        .unwrap();
    let mut daemon = Daemon { child };
    let begun = now();
    while UnixStream::connect(socket).is_err() {
        assert!(begun.elapsed().as_secs() < 30, "it does not listen");
        assert!(daemon.child.try_wait().unwrap().is_none(), "it has ended");
        pause(20);
    }
    daemon
}

#[test]
fn a_volume_is_attached_by_whom_it_allows() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    let socket = test_node.path().join("web.sock");
    let at = socket.display().to_string();
    let words = [&["attach", "web", "--vhost-user", &at][..], &HOST].concat();
    let output = test_node.fails(4, &words);
    assert!(output.contains("there is no volume web"), "{output}");
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "iscsi"]);
    let output = test_node.fails(1, &words);
    assert!(output.contains("windrose volume export web"), "{output}");
    test_node.ok(&["volume", "export", "web", "--protocols", "iscsi,nvme"]);
    let output = test_node.fails(6, &words);
    assert!(output.contains("windrose volume allow web nqn.2026-01.net.example:host"), "{output}");
    assert!(!socket.exists());

    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let nbd = test_node.path().join("web.nbd");
    let serving = attach_at(&test_node, &socket, Some(&nbd));
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    let load = ["--rw=randrw", "--iodepth=8", "--size=4m", "--verify", "--yes"];
    let measured = test_node.ok(&[&["bench", &uri][..], &load].concat());
    assert!(measured.contains("verified"), "{measured}");
    let sessions = test_node.ok(&["sessions"]);
    assert!(sessions.contains(HOST[1]), "{sessions}");
    let second = test_node.fails(1, &words);
    assert!(second.contains("another process listens at"), "{second}");
    assert_eq!(serving.stop(), Some(0));
    assert!(!socket.exists() && !nbd.exists(), "its sockets go with it");
    // A killed process's leftovers do not block the next one.
    attach(&test_node, &socket).kill();
    assert!(socket.exists());
    let begun = now();
    let serving = attach(&test_node, &socket);
    assert_eq!(serving.stop(), Some(0));
    assert!(begun.elapsed().as_secs() >= 6, "the next process would not wait");
    assert_eq!(node.stop(), Some(0));
}

/// A process that finds leftovers and fails must not remove them: its successor would not wait.
#[test]
fn one_that_fails_waits_as_well() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let socket = test_node.path().join("web.sock");
    let at = socket.display().to_string();
    let words = ["attach", "web", "--vhost-user", &at, "--nbd", "/nowhere/web.nbd"];
    let words = [&words[..], &HOST].concat();
    let begun = now();
    let output = test_node.fails(1, &words);
    assert!(output.contains("/nowhere/web.nbd"), "{output}");
    assert!(begun.elapsed().as_secs() < 5, "no process was here before");
    attach(&test_node, &socket).kill();
    let begun = now();
    test_node.fails(1, &words);
    assert!(begun.elapsed().as_secs() >= 6, "the next one would not wait");
    assert_eq!(node.stop(), Some(0));
}

/// systemd removes a service's directory when the service ends, and with it the socket that tells
/// the next process of a kill, unless the unit says to preserve it.
#[test]
fn the_unit_in_the_guide_keeps_what_a_killed_process_leaves() {
    let guide = include_str!("../../../../docs/guides/attach.md");
    let unit = guide.split("```").find(|part| part.contains("[Service]")).unwrap();
    assert!(unit.contains("RuntimeDirectory=") && unit.contains("RuntimeDirectoryPreserve=yes"));
}

/// Missing prerequisites of a block device are reported before the volume is connected.
#[test]
fn a_block_device_wants_a_driver() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    let output = test_node.fails(2, &["attach", "web", "--nbd", "/nowhere", "--device-id", "3"]);
    assert!(output.contains("--ublk"), "{output}");
    if Path::new("/dev/ublk-control").exists() {
        // No host has access to the volume: no block device is created.
        let output = test_node.fails(6, &[&["attach", "web", "--ublk"][..], &HOST].concat());
        assert!(output.contains("windrose volume allow web"), "{output}");
    } else {
        let output = test_node.fails(1, &[&["attach", "web", "--ublk"][..], &HOST].concat());
        assert!(
            output.contains("no ublk driver") && output.contains("modprobe ublk_drv"),
            "{output}"
        );
    }
    assert_eq!(node.stop(), Some(0));
}

/// Users see no disk failure: the process ends, and restarting it resumes the waiting requests.
#[test]
fn a_volume_out_of_reach_ends_the_process() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let (socket, nbd) = (test_node.path().join("web.sock"), test_node.path().join("web.nbd"));
    let output = test_node.path().join("said");
    let log = File::create(&output).unwrap();
    let mut serving = attach_as(&test_node, &socket, Some(&nbd), log.into());
    node.kill();
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    let load = ["bench", &uri, "--rw=randread", "--size=4m", "--runtime=5", "--time_based"];
    test_node.fails(1, &load);
    assert_eq!(serving.wait(), Some(1));
    let output = std::fs::read_to_string(&output).unwrap();
    assert!(output.contains("volume web cannot be reached: "), "{output}");
    assert!(!socket.exists() && !nbd.exists(), "its sockets go with it");
    let node = test_node.start();
    let serving = attach_at(&test_node, &socket, Some(&nbd));
    test_node.ok(&load);
    assert_eq!(serving.stop(), Some(0));
    assert_eq!(node.stop(), Some(0));
}

/// A volume whose host must authenticate, and use TLS (RFD 0020, 0022).
#[test]
fn a_guarded_volume_is_attached_and_measured_with_its_keys() {
    const SECRET: &str = "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:";
    const OF_VOLUME: &str = "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:";
    const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const OTHER: &str = "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:";
    let test_node = TestNode::new("");
    let node = test_node.start();
    let file = |name: &str, text: &str| {
        let path = test_node.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (secret, of_volume) = (file("secret", SECRET), file("of-volume", OF_VOLUME));
    let (key, other) = (file("key", KEY), file("other", OTHER));
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let of_host = ["web", "--host", HOST[1]];
    let guards = ["--secret", &secret, "--ctrl-secret", &of_volume];
    test_node.ok(&[&["volume", "dhchap"][..], &of_host, &guards].concat());
    test_node.ok(&[&["volume", "tls"][..], &of_host, &["--key", &key]].concat());

    let socket = test_node.path().join("web.sock");
    let at = socket.display().to_string();
    let words =
        [&["attach", "web", "--vhost-user", &at, "--no-path-timeout", "1"][..], &HOST].concat();
    let output = test_node.fails(2, &[&words[..], &["--tls-key", &secret]].concat());
    assert!(output.contains("secret: a key has the form NVMeTLSkey-1:"), "{output}");
    test_node.fails(6, &words);
    let output = test_node.fails(6, &[&words[..], &["--tls-key", &other]].concat());
    assert!(output.contains("no TLS: the peer sent alert 51"), "{output}");
    let output = test_node.fails(6, &[&words[..], &["--tls-key", &key]].concat());
    assert!(output.contains("requires a secret"), "{output}");

    let keys = ["--tls-key", &key, "--dhchap-secret", &secret, "--dhchap-ctrl-secret", &of_volume];
    let nbd = test_node.path().join("web.nbd");
    let serving = attach_with(&test_node, &socket, Some(&nbd), Stdio::null(), &keys);
    let load = ["--rw=randrw", "--iodepth=8", "--size=4m", "--verify", "--yes"];
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    assert!(test_node.ok(&[&["bench", &uri][..], &load].concat()).contains("verified"));
    let sessions = test_node.ok(&["sessions"]);
    assert!(sessions.contains(HOST[1]) && sessions.contains("TLS"), "{sessions}");
    assert_eq!(serving.stop(), Some(0));

    let shown: serde_json::Value =
        serde_json::from_str(&test_node.ok(&["volume", "show", "web", "--json"])).unwrap();
    let text = |at: &str| shown.pointer(at).unwrap().as_str().unwrap();
    let (portal, subsystem) = (text("/nvme/portals/0"), text("/nvme/subsystem"));
    let uri = format!("nvme://{portal}/{subsystem}?hostnqn={}", HOST[1]);
    let output = test_node.fails(1, &[&["bench", &uri][..], &load].concat());
    assert!(output.contains("refused to connect"), "{output}");
    let measured = test_node.ok(&[&["bench", &uri][..], &load, &keys].concat());
    assert!(measured.contains("verified"), "{measured}");
    assert_eq!(node.stop(), Some(0));
}

/// Whether file systems can be mounted here; if not, reports a skip to `./run test`.
fn mounts() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let may = device.is_ok() && rustix::process::geteuid().is_root();
    if !may && let Some(file) = std::env::var_os("WINDROSE_SKIPPED_TESTS") {
        let mut file = File::options().create(true).append(true).open(file).unwrap();
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        writeln!(file, "{test}: no file system can be mounted").unwrap();
    }
    may
}

fn attach_file(node: &TestNode, more: &[&str]) -> Daemon {
    let child = Command::new(env!("CARGO_BIN_EXE_windrose"))
        .env("WINDROSE_API", format!("unix:{}/api.sock", node.path().display()))
        .args(["attach", "web", "--no-path-timeout", "1", "--fuse"])
        .arg(node.path().join("files"))
        .args(HOST)
        .args(more)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut daemon = Daemon { child };
    let begun = now();
    while std::fs::metadata(node.path().join("files/web")).is_err() {
        assert!(begun.elapsed().as_secs() < 30, "there is no file");
        assert!(daemon.child.try_wait().unwrap().is_none(), "it has ended");
        pause(20);
    }
    daemon
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[test]
fn a_volume_is_a_file_until_somebody_has_enough_of_it() {
    if !mounts() {
        return;
    }
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let dir = test_node.path().join("files");
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("web");
    let serving = attach_file(&test_node, &["--fuse-mode", "640"]);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let seen = file.metadata().unwrap();
    assert_eq!((seen.len(), seen.mode() & 0o7777), (10 << 20, 0o640));
    file.write_all_at(b"not a whole block", 12_345).unwrap();
    file.sync_all().unwrap();
    let at = dir.display().to_string();
    let output = test_node.fails(1, &[&["attach", "web", "--fuse", &at][..], &HOST].concat());
    assert!(output.contains("another process has mounted volume web there"), "{output}");
    // Killed: open files get errors; the next process takes over the mount, and delays writes.
    serving.kill();
    assert_eq!(errno(file.sync_all()), Some(Errno::NOTCONN.raw_os_error()));
    assert_eq!(errno(std::fs::metadata(&path)), Some(Errno::NOTCONN.raw_os_error()));
    drop(file);
    let serving = attach_file(&test_node, &[]);
    let begun = now();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut read = [0; 17];
    file.read_exact_at(&mut read, 12_345).unwrap();
    assert_eq!(&read, b"not a whole block");
    assert!(begun.elapsed().as_secs() < 3, "reads wait for nothing");
    file.write_all_at(b"again", 12_345).unwrap();
    assert!(begun.elapsed().as_secs() >= 4, "something of its predecessor's could come still");
    drop(file);
    assert_eq!(serving.stop(), Some(0));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    // Unmounted: no longer needed.
    let mut serving = attach_file(&test_node, &[]);
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    assert_eq!(serving.wait(), Some(0));
    assert_eq!(node.stop(), Some(0));
}

/// Users of the file see a lost connection, not a failed disk.
#[test]
fn a_file_goes_with_a_volume_out_of_reach() {
    if !mounts() {
        return;
    }
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "10M", "--protocols", "nvme"]);
    test_node.ok(&["volume", "allow", "web", HOST[1]]);
    let dir = test_node.path().join("files");
    std::fs::create_dir(&dir).unwrap();
    let mut serving = attach_file(&test_node, &[]);
    let file = File::options().read(true).write(true).open(dir.join("web")).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    node.kill();
    let output = errno(file.write_all_at(&[8; 4096], 8192));
    assert_eq!(output, Some(Errno::CONNABORTED.raw_os_error()));
    assert_eq!(serving.wait(), Some(1));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing to settle is left");
    let node = test_node.start();
    let serving = attach_file(&test_node, &[]);
    let mut read = [0; 4096];
    File::open(dir.join("web")).unwrap().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, [7; 4096]);
    assert_eq!(serving.stop(), Some(0));
    assert_eq!(node.stop(), Some(0));
}
