//! `windrose attach`: who is let in, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

mod common;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Daemon, Place, now, pause};

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
    let child = Command::new(env!("CARGO_BIN_EXE_windrose"))
        .env("WINDROSE_API", format!("unix:{}/api.sock", place.path().display()))
        .args(["attach", "web", "--queues", "2", "--patience", "1", "--vhost-user"])
        .arg(socket)
        .args(nbd.map(|at| format!("--nbd={}", at.display())))
        .args(HOST)
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
