//! Two nodes, each with its own loop devices over the same files, like two machines that share
//! LUNs.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use testkit::system::Loop;

use crate::common::{Daemon, TestNode, now, pause, texts};

/// Files behind the disks: three of a pool, and one of an image.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 160 << 20;

/// How long a node may take to report the expected state.
const TEST_TIMEOUT_MS: u64 = 60_000;

/// Loop devices over the same files, separate for each node, and the names by which nodes know
/// their disks.
struct Luns {
    devices: [Vec<Loop>; 2],
    dir: tempfile::TempDir,
}

impl Luns {
    /// `None` if loop devices are unavailable.
    fn new() -> Option<Self> {
        let mut luns = Self { devices: [vec![], vec![]], dir: tempfile::tempdir().unwrap() };
        for n in 0..DISKS {
            let file = luns.dir.path().join(format!("file{n}"));
            std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
            for node in 0..2 {
                luns.devices[node].push(Loop::new(&file, &[])?);
            }
        }
        Some(luns)
    }

    fn name(&self, n: usize) -> String {
        self.dir.path().join(format!("lun{n}")).display().to_string()
    }

    /// Makes newly opened disks those of this node. Open ones stay open.
    fn point_at(&self, node: usize) {
        for (n, device) in self.devices[node].iter().enumerate() {
            let name = self.name(n);
            let _ = std::fs::remove_file(&name);
            symlink(device.path(), name).unwrap();
        }
    }
}

fn rename(node: &TestNode, name: &str) {
    let config = node.path().join("windrose.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(config, text.replace("name = \"test\"", &format!("name = \"{name}\""))).unwrap();
}

/// Gives the second node the same volumes and pools, and another identity.
fn copy_data(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
    std::fs::remove_file(to.join("node-id")).unwrap();
}

fn pool_state(node: &TestNode) -> String {
    node.json(&["pool", "show", "tank"])["state"]["kind"].as_str().unwrap().to_owned()
}

fn findings(node: &TestNode) -> String {
    // The exit code may say that not all is well.
    texts(&node.cli(&["status", "--json"])).0
}

fn wait_for(what: &str, node: &TestNode, is_so: impl Fn() -> bool) {
    let until = now() + std::time::Duration::from_millis(TEST_TIMEOUT_MS);
    while !is_so() {
        assert!(now() < until, "{what}: {}\n{}", findings(node), node.log());
        pause(200);
    }
}

fn volume_is_served(node: &TestNode, name: &str) -> bool {
    node.json(&["volume", "show", name])["state"]["kind"] == "online"
}

/// The second node is refused and learns who owns the disks; a takeover is refused while the
/// first is alive, and works when it is dead. Then the first is refused.
#[test]
fn of_two_nodes_that_reach_the_same_disks_one_serves_them() {
    let Some(luns) = Luns::new() else {
        eprintln!("left out: there are no loop devices here");
        return;
    };
    let (a, b) = (TestNode::new(""), TestNode::new(""));
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
    assert_eq!(pool_state(&a), "online", "a pool that was closed is opened: {}", a.log());

    luns.point_at(1);
    let second = b.start();
    let output = findings(&b);
    assert!(output.contains("node na on host"), "{output}");
    assert!(output.contains("windrose pool open tank --take-over"), "{output}");
    assert!(output.contains("windrose volume take-over fast"), "{output}");
    let open = ["pool", "open", "tank", "--take-over", "--confirm", "tank"];
    let take = ["volume", "take-over", "fast", "--confirm", "fast"];
    for statement in [&open[..], &take[..]] {
        let refused = b.fails(1, statement);
        assert!(refused.contains("its heartbeat moves"), "{refused}");
    }
    // The first one continues.
    a.ok(&["volume", "create", "vm2", "--size", "20M", "--pool", "tank", "--thick"]);
    assert!(volume_is_served(&a, "fast") && volume_is_served(&a, "vm1"));

    first.kill();
    b.ok(&take);
    b.ok(&open);
    wait_for("the second node serves", &b, || {
        pool_state(&b) == "online" && volume_is_served(&b, "fast") && volume_is_served(&b, "vm1")
    });
    luns.point_at(0);
    let first = a.start();
    let output = findings(&a);
    assert!(output.contains("node nb on host"), "{output}");
    assert!(pool_state(&a) == "offline" && !volume_is_served(&a, "fast"), "{output}");
    stop_and_start(&a, first, second);
}

/// After an orderly close the other node opens the disks by itself.
fn stop_and_start(a: &TestNode, _first: Daemon, second: Daemon) {
    assert_eq!(second.stop(), Some(0));
    wait_for("the first node has its pool back", a, || pool_state(a) == "online");
}

/// A killed process's successor gets its disks back without a wait.
#[test]
fn a_killed_node_serves_its_devices_again_at_once() {
    let Some(luns) = Luns::new() else {
        eprintln!("left out: there are no loop devices here");
        return;
    };
    let test_node = TestNode::new("");
    luns.point_at(0);
    let node = test_node.start();
    test_node.ok(&["volume", "create", "fast", "--device", &luns.name(3)]);
    node.kill();
    let _node = test_node.start();
    assert!(volume_is_served(&test_node, "fast"), "{}", test_node.log());
    assert!(!test_node.log().contains("watching"), "{}", test_node.log());
}
