//! `windrose attach`: who is let in, and how it ends.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Daemon, Place, now, pause};
use rustix::io::Errno;

const HOST: [&str; 4] = [
    "--host-nqn",
    "nqn.2026-01.net.example:host",
    "--host-id",
    "00000000-0000-4000-8000-000000000001",
];

fn attach(place: &Place, socket: &Path) -> Daemon {
    attach_at(place, socket, None)
}

fn attach_at(place: &Place, socket: &Path, nbd: Option<&Path>) -> Daemon {
    attach_as(place, socket, nbd, Stdio::null())
}

fn attach_as(place: &Place, socket: &Path, nbd: Option<&Path>, said: Stdio) -> Daemon {
    attach_with(place, socket, nbd, said, &[])
}

fn attach_with(
    place: &Place,
    socket: &Path,
    nbd: Option<&Path>,
    said: Stdio,
    more: &[&str],
) -> Daemon {
    let child = Command::new(env!("CARGO_BIN_EXE_windrose"))
        .env("WINDROSE_API", format!("unix:{}/api.sock", place.path().display()))
        .args(["attach", "web", "--queues", "2", "--patience", "1", "--vhost-user"])
        .arg(socket)
        .args(nbd.map(|at| format!("--nbd={}", at.display())))
        .args(HOST)
        .args(more)
        .stdin(Stdio::null())
        .stderr(said)
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
    let place = Place::new("");
    let node = place.start();
    let socket = place.path().join("web.sock");
    let at = socket.display().to_string();
    let words = [&["attach", "web", "--vhost-user", &at][..], &HOST].concat();
    let said = place.fails(4, &words);
    assert!(said.contains("there is no volume web"), "{said}");
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "iscsi"]);
    let said = place.fails(1, &words);
    assert!(said.contains("windrose volume export web"), "{said}");
    place.ok(&["volume", "export", "web", "--via", "both"]);
    let said = place.fails(6, &words);
    assert!(said.contains("windrose volume allow web nqn.2026-01.net.example:host"), "{said}");
    assert!(!socket.exists());

    place.ok(&["volume", "allow", "web", HOST[1]]);
    let nbd = place.path().join("web.nbd");
    let serving = attach_at(&place, &socket, Some(&nbd));
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    let load = ["--rw=randrw", "--iodepth=8", "--size=4m", "--verify", "--yes"];
    let measured = place.ok(&[&["bench", &uri][..], &load].concat());
    assert!(measured.contains("verified"), "{measured}");
    let sessions = place.ok(&["sessions"]);
    assert!(sessions.contains(HOST[1]), "{sessions}");
    let second = place.fails(1, &words);
    assert!(second.contains("another process listens at"), "{second}");
    assert_eq!(serving.stop(), Some(0));
    assert!(!socket.exists() && !nbd.exists(), "its sockets go with it");
    // What a killed one leaves behind is in nobody's way.
    attach(&place, &socket).kill();
    assert!(socket.exists());
    let begun = now();
    let serving = attach(&place, &socket);
    assert_eq!(serving.stop(), Some(0));
    assert!(begun.elapsed().as_secs() >= 6, "whoever comes next would not wait");
    assert_eq!(node.stop(), Some(0));
}

/// Who finds what a killed process has left, and fails, does not take it along: whoever comes next would not wait.
#[test]
fn one_that_fails_waits_as_well() {
    let place = Place::new("");
    let node = place.start();
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    place.ok(&["volume", "allow", "web", HOST[1]]);
    let socket = place.path().join("web.sock");
    let at = socket.display().to_string();
    let words = ["attach", "web", "--vhost-user", &at, "--nbd", "/nowhere/web.nbd"];
    let words = [&words[..], &HOST].concat();
    let begun = now();
    let said = place.fails(1, &words);
    assert!(said.contains("/nowhere/web.nbd"), "{said}");
    assert!(begun.elapsed().as_secs() < 5, "nobody was here before");
    attach(&place, &socket).kill();
    let begun = now();
    place.fails(1, &words);
    assert!(begun.elapsed().as_secs() >= 6, "the next one would not wait");
    assert_eq!(node.stop(), Some(0));
}

/// systemd takes the directory of a service away when that ends, and with it the socket by which the next process knows that
/// one was killed: not where it is told to leave it.
#[test]
fn the_unit_in_the_guide_keeps_what_a_killed_process_leaves() {
    let guide = include_str!("../../../../docs/guides/attach.md");
    let unit = guide.split("```").find(|part| part.contains("[Service]")).unwrap();
    assert!(unit.contains("RuntimeDirectory=") && unit.contains("RuntimeDirectoryPreserve=yes"));
}

/// What a machine lacks for a block device is named before the volume is connected to.
#[test]
fn a_block_device_wants_a_driver() {
    let place = Place::new("");
    let node = place.start();
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    let said = place.fails(2, &["attach", "web", "--nbd", "/nowhere", "--device-id", "3"]);
    assert!(said.contains("--ublk"), "{said}");
    if Path::new("/dev/ublk-control").exists() {
        // Nobody is allowed to the volume: no device is made of it.
        let said = place.fails(6, &[&["attach", "web", "--ublk"][..], &HOST].concat());
        assert!(said.contains("windrose volume allow web"), "{said}");
    } else {
        let said = place.fails(1, &[&["attach", "web", "--ublk"][..], &HOST].concat());
        assert!(said.contains("no ublk driver") && said.contains("modprobe ublk_drv"), "{said}");
    }
    assert_eq!(node.stop(), Some(0));
}

/// Nobody is told that his disk has failed: the process ends, and who starts it anew lets its users go on.
#[test]
fn a_volume_out_of_reach_ends_the_process() {
    let place = Place::new("");
    let node = place.start();
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    place.ok(&["volume", "allow", "web", HOST[1]]);
    let (socket, nbd) = (place.path().join("web.sock"), place.path().join("web.nbd"));
    let said = place.path().join("said");
    let log = File::create(&said).unwrap();
    let mut serving = attach_as(&place, &socket, Some(&nbd), log.into());
    node.kill();
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    let load = ["bench", &uri, "--rw=randread", "--size=4m", "--runtime=5", "--time_based"];
    place.fails(1, &load);
    assert_eq!(serving.wait(), Some(1));
    let said = std::fs::read_to_string(&said).unwrap();
    assert!(said.contains("volume web is out of reach: "), "{said}");
    assert!(!socket.exists() && !nbd.exists(), "its sockets go with it");
    let node = place.start();
    let serving = attach_at(&place, &socket, Some(&nbd));
    place.ok(&load);
    assert_eq!(serving.stop(), Some(0));
    assert_eq!(node.stop(), Some(0));
}

/// A volume whose host has to prove who it is, and to come by TLS (RFD 0020, 0022).
#[test]
fn a_guarded_volume_is_attached_and_measured_with_its_keys() {
    const SECRET: &str = "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:";
    const OF_VOLUME: &str = "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:";
    const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const OTHER: &str = "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:";
    let place = Place::new("");
    let node = place.start();
    let file = |name: &str, text: &str| {
        let path = place.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (secret, of_volume) = (file("secret", SECRET), file("of-volume", OF_VOLUME));
    let (key, other) = (file("key", KEY), file("other", OTHER));
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    place.ok(&["volume", "allow", "web", HOST[1]]);
    let of_host = ["web", "--host", HOST[1]];
    let guards = ["--secret", &secret, "--ctrl-secret", &of_volume];
    place.ok(&[&["volume", "dhchap"][..], &of_host, &guards].concat());
    place.ok(&[&["volume", "tls"][..], &of_host, &["--key", &key]].concat());

    let socket = place.path().join("web.sock");
    let at = socket.display().to_string();
    let words = [&["attach", "web", "--vhost-user", &at, "--patience", "1"][..], &HOST].concat();
    let said = place.fails(2, &[&words[..], &["--tls-key", &secret]].concat());
    assert!(said.contains("secret: a key has the form NVMeTLSkey-1:"), "{said}");
    place.fails(6, &words);
    let said = place.fails(6, &[&words[..], &["--tls-key", &other]].concat());
    assert!(said.contains("no TLS: the other side has sent alert 51"), "{said}");
    let said = place.fails(6, &[&words[..], &["--tls-key", &key]].concat());
    assert!(said.contains("asks for a secret"), "{said}");

    let keys = ["--tls-key", &key, "--dhchap-secret", &secret, "--dhchap-ctrl-secret", &of_volume];
    let nbd = place.path().join("web.nbd");
    let serving = attach_with(&place, &socket, Some(&nbd), Stdio::null(), &keys);
    let load = ["--rw=randrw", "--iodepth=8", "--size=4m", "--verify", "--yes"];
    let uri = format!("nbd+unix:///web?socket={}", nbd.display());
    assert!(place.ok(&[&["bench", &uri][..], &load].concat()).contains("verified"));
    let sessions = place.ok(&["sessions"]);
    assert!(sessions.contains(HOST[1]) && sessions.contains("TLS"), "{sessions}");
    assert_eq!(serving.stop(), Some(0));

    let shown: serde_json::Value =
        serde_json::from_str(&place.ok(&["volume", "show", "web", "--json"])).unwrap();
    let text = |at: &str| shown.pointer(at).unwrap().as_str().unwrap();
    let (portal, subsystem) = (text("/nvme/portals/0"), text("/nvme/subsystem"));
    let uri = format!("nvme://{portal}/{subsystem}?hostnqn={}", HOST[1]);
    let said = place.fails(1, &[&["bench", &uri][..], &load].concat());
    assert!(said.contains("refused to connect"), "{said}");
    let measured = place.ok(&[&["bench", &uri][..], &load, &keys].concat());
    assert!(measured.contains("verified"), "{measured}");
    assert_eq!(node.stop(), Some(0));
}

/// Whether file systems can be mounted here; if not that is said where `./run test` looks.
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

fn attach_file(place: &Place, more: &[&str]) -> Daemon {
    let child = Command::new(env!("CARGO_BIN_EXE_windrose"))
        .env("WINDROSE_API", format!("unix:{}/api.sock", place.path().display()))
        .args(["attach", "web", "--patience", "1", "--fuse"])
        .arg(place.path().join("files"))
        .args(HOST)
        .args(more)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut daemon = Daemon { child };
    let begun = now();
    while std::fs::metadata(place.path().join("files/web")).is_err() {
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
    let place = Place::new("");
    let node = place.start();
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    place.ok(&["volume", "allow", "web", HOST[1]]);
    let dir = place.path().join("files");
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("web");
    let serving = attach_file(&place, &["--fuse-mode", "640"]);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let seen = file.metadata().unwrap();
    assert_eq!((seen.len(), seen.mode() & 0o7777), (10 << 20, 0o640));
    file.write_all_at(b"not a whole block", 12_345).unwrap();
    file.sync_all().unwrap();
    let at = dir.display().to_string();
    let said = place.fails(1, &[&["attach", "web", "--fuse", &at][..], &HOST].concat());
    assert!(said.contains("another process shows volume web there"), "{said}");
    // Killed: who has it open learns of it, and whoever comes next takes its place, and waits with changes.
    serving.kill();
    assert_eq!(errno(file.sync_all()), Some(Errno::NOTCONN.raw_os_error()));
    assert_eq!(errno(std::fs::metadata(&path)), Some(Errno::NOTCONN.raw_os_error()));
    drop(file);
    let serving = attach_file(&place, &[]);
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
    // Unmounted: nobody wants it any more.
    let mut serving = attach_file(&place, &[]);
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    assert_eq!(serving.wait(), Some(0));
    assert_eq!(node.stop(), Some(0));
}

/// Whoever uses the file learns that the connection is gone, and not that a disk has failed.
#[test]
fn a_file_goes_with_a_volume_out_of_reach() {
    if !mounts() {
        return;
    }
    let place = Place::new("");
    let node = place.start();
    place.ok(&["volume", "create", "web", "--size", "10M", "--via", "nvme"]);
    place.ok(&["volume", "allow", "web", HOST[1]]);
    let dir = place.path().join("files");
    std::fs::create_dir(&dir).unwrap();
    let mut serving = attach_file(&place, &[]);
    let file = File::options().read(true).write(true).open(dir.join("web")).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    node.kill();
    let told = errno(file.write_all_at(&[8; 4096], 8192));
    assert_eq!(told, Some(Errno::CONNABORTED.raw_os_error()));
    assert_eq!(serving.wait(), Some(1));
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing to settle is left");
    let node = place.start();
    let serving = attach_file(&place, &[]);
    let mut read = [0; 4096];
    File::open(dir.join("web")).unwrap().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, [7; 4096]);
    assert_eq!(serving.stop(), Some(0));
    assert_eq!(node.stop(), Some(0));
}
