//! Two nodes, each with its own loop devices over the same files: what a shared LUN is to two machines.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Daemon, Place, now, pause, texts};

/// Files behind the disks: three of a pool, and one of an image.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 160 << 20;

/// How long a node may take to say what is so.
const PATIENCE_MS: u64 = 60_000;

/// Loop devices over the same files, those of each node by themselves, and the names by which nodes know their disks.
struct Luns {
    dir: tempfile::TempDir,
    devices: [Vec<PathBuf>; 2],
}

impl Luns {
    /// None where loop devices are not to be had.
    fn new() -> Option<Self> {
        let mut luns = Self { dir: tempfile::tempdir().unwrap(), devices: [vec![], vec![]] };
        for n in 0..DISKS {
            let file = luns.dir.path().join(format!("file{n}"));
            std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
            for node in 0..2 {
                let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
                let made = made.ok().filter(|made| made.status.success())?;
                luns.devices[node].push(texts(&made).0.trim().into());
            }
        }
        Some(luns)
    }

    fn name(&self, n: usize) -> String {
        self.dir.path().join(format!("lun{n}")).display().to_string()
    }

    /// From now on what is opened are the devices of this node. What is open stays open.
    fn point_at(&self, node: usize) {
        for (n, device) in self.devices[node].iter().enumerate() {
            let name = self.name(n);
            let _ = std::fs::remove_file(&name);
            symlink(device, name).unwrap();
        }
    }
}

impl Drop for Luns {
    fn drop(&mut self) {
        for device in self.devices.iter().flatten() {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

fn rename(place: &Place, name: &str) {
    let config = place.path().join("windrose.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(config, text.replace("name = \"test\"", &format!("name = \"{name}\""))).unwrap();
}

/// The second node knows the same volumes and pools, and is another node.
fn copy_data(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
    std::fs::remove_file(to.join("node-id")).unwrap();
}

fn pool_is(place: &Place) -> String {
    place.json(&["pool", "show", "tank"])["state"]["is"].as_str().unwrap().to_owned()
}

fn findings(place: &Place) -> String {
    // Its exit code says that not all is well.
    texts(&place.cli(&["status", "--json"])).0
}

fn wait_for(what: &str, place: &Place, is_so: impl Fn() -> bool) {
    let until = now() + std::time::Duration::from_millis(PATIENCE_MS);
    while !is_so() {
        assert!(now() < until, "{what}: {}\n{}", findings(place), place.log());
        pause(200);
    }
}

fn volume_is_served(place: &Place, name: &str) -> bool {
    place.json(&["volume", "show", name])["state"]["is"] == "online"
}

/// The second one is refused and told by whom, a statement changes nothing as long as the first one is alive, and takes over what
/// it has left when it is dead; it is the first one then that is refused.
#[test]
fn of_two_nodes_that_reach_the_same_disks_one_serves_them() {
    let Some(luns) = Luns::new() else {
        eprintln!("left out: there are no loop devices here");
        return;
    };
    let (a, b) = (Place::new(""), Place::new(""));
    rename(&a, "na");
    rename(&b, "nb");
    luns.point_at(0);
    let first = a.start();
    let names: Vec<String> = (0..DISKS).map(|n| luns.name(n)).collect();
    let pool = ["pool", "create", "tank", "--raid", "5", &names[0], &names[1], &names[2]];
    a.ok(&pool);
    a.ok(&["volume", "create", "vm1", "--size", "20M", "--pool", "tank"]);
    a.ok(&["volume", "create", "fast", "--device", &names[3]]);
    assert_eq!(first.stop(), Some(0));
    copy_data(&a.path().join("data"), &b.path().join("data"));
    let first = a.start();
    assert_eq!(pool_is(&a), "online", "a pool that was closed is opened: {}", a.log());

    luns.point_at(1);
    let second = b.start();
    let said = findings(&b);
    assert!(said.contains("node na on host"), "{said}");
    assert!(said.contains("windrose pool open tank --take-over"), "{said}");
    assert!(said.contains("windrose volume take-over fast"), "{said}");
    let open = ["pool", "open", "tank", "--take-over", "--confirm", "tank"];
    let take = ["volume", "take-over", "fast", "--confirm", "fast"];
    for statement in [&open[..], &take[..]] {
        let refused = b.fails(1, statement);
        assert!(refused.contains("its heartbeat moves"), "{refused}");
    }
    // The first one goes on.
    a.ok(&["volume", "create", "vm2", "--size", "20M", "--pool", "tank", "--thick"]);
    assert!(volume_is_served(&a, "fast") && volume_is_served(&a, "vm1"));

    first.kill();
    b.ok(&take);
    b.ok(&open);
    wait_for("the second node serves", &b, || {
        pool_is(&b) == "online" && volume_is_served(&b, "fast") && volume_is_served(&b, "vm1")
    });
    luns.point_at(0);
    let first = a.start();
    let said = findings(&a);
    assert!(said.contains("node nb on host"), "{said}");
    assert!(pool_is(&a) == "offline" && !volume_is_served(&a, "fast"), "{said}");
    stop_and_start(&a, first, second);
}

/// What is closed in order the other node opens by itself.
fn stop_and_start(a: &Place, _first: Daemon, second: Daemon) {
    assert_eq!(second.stop(), Some(0));
    wait_for("the first node has its pool back", a, || pool_is(a) == "online");
}

/// A process that was killed has its disks back without a wait.
#[test]
fn a_killed_node_serves_its_devices_again_at_once() {
    let Some(luns) = Luns::new() else {
        eprintln!("left out: there are no loop devices here");
        return;
    };
    let place = Place::new("");
    luns.point_at(0);
    let node = place.start();
    place.ok(&["volume", "create", "fast", "--device", &luns.name(3)]);
    node.kill();
    let _node = place.start();
    assert!(volume_is_served(&place, "fast"), "{}", place.log());
    assert!(!place.log().contains("watching"), "{}", place.log());
}
