//! Loop devices on files in use: the node must refuse to write to them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{TestNode, texts};

/// Devices to remove on drop, the last one first.
struct Devices(Vec<(&'static str, Vec<String>)>);

impl Devices {
    /// Creates a loop device on a file or device; `None` if loop devices are unavailable.
    fn loop_on(&mut self, file: &Path) -> Option<String> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let device = texts(&made).0.trim().to_owned();
        made.status.success().then(|| {
            self.0.push(("losetup", vec!["--detach".into(), device.clone()]));
            device
        })
    }

    /// Creates a device-mapper device on another; `None` if unavailable.
    fn map(&mut self, device: &str) -> Option<String> {
        let name = format!("windrose-test-{}", std::process::id());
        let table = format!("0 4096 linear {device} 0");
        let make = ["create", &name, "--table", &table];
        let made = Command::new("dmsetup").args(make).output().ok()?;
        made.status.success().then(|| {
            self.0.push(("dmsetup", vec!["remove".into(), "--retry".into(), name.clone()]));
            format!("/dev/mapper/{name}")
        })
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for (program, args) in self.0.drain(..).rev() {
            let _ = Command::new(program).args(args).status();
        }
    }
}

fn image_of(node: &TestNode, volume: &str) -> PathBuf {
    let shown = node.json(&["volume", "show", volume]);
    PathBuf::from(shown["replicas"][0]["backing"]["path"].as_str().unwrap())
}

#[test]
fn a_loop_device_on_an_image_or_disk_in_use_is_refused_however_it_is_hidden() {
    let node = TestNode::new("");
    let _node = node.start();
    node.ok(&["volume", "create", "web", "--size", "64M"]);
    let image = image_of(&node, "web");
    let mut devices = Devices(Vec::new());
    let Some(direct) = devices.loop_on(&image) else {
        eprintln!("left out: there are no loop devices here");
        return;
    };
    let again = devices.loop_on(&image).unwrap();
    let nested = devices.loop_on(Path::new(&direct)).unwrap();
    let mut hidden = vec![direct, nested.clone(), again];
    match devices.map(&nested) {
        Some(mapped) => hidden.push(mapped),
        None => eprintln!("left out: there is no device mapper here"),
    }
    let before = std::fs::read(&image).unwrap();
    for device in &hidden {
        let create = ["volume", "create", "evil", "--device", device, "--size", "16M", "--force"];
        let refused = node.fails(1, &create);
        assert!(refused.contains("which belongs to volume web"), "{device}: {refused}");
        let refused = node.fails(1, &["pool", "create", "tank", "--raid", "0", device]);
        assert!(refused.contains("which belongs to volume web"), "{device}: {refused}");
    }
    assert!(std::fs::read(&image).unwrap() == before, "nothing was written to it");

    // A pool disk, and an image without a volume.
    let disk = node.path().join("disk");
    let other = node.path().join("other");
    for file in [&disk, &other] {
        std::fs::File::create(file).unwrap().set_len(160 << 20).unwrap();
    }
    let disk_loop = devices.loop_on(&disk).unwrap();
    let second = devices.loop_on(&disk).unwrap();
    let other_loop = devices.loop_on(&other).unwrap();
    let twice = ["pool", "create", "tank", "--raid", "0", &disk_loop, &second];
    let refused = node.fails(1, &twice);
    assert!(refused.contains(&format!("{second} shares its space with {disk_loop}")), "{refused}");
    node.ok(&["pool", "create", "tank", "--raid", "0", &disk_loop]);
    let refused = node.fails(1, &["volume", "create", "evil", "--device", &second, "--force"]);
    assert!(refused.contains("which belongs to pool tank"), "{refused}");
    let refused = node.fails(1, &["pool", "add", "tank", &second]);
    assert!(refused.contains("which belongs to pool tank"), "{refused}");
    let orphan = image.with_file_name("orphan.img");
    std::fs::File::create(&orphan).unwrap().set_len(64 << 20).unwrap();
    let on_orphan = devices.loop_on(&orphan).unwrap();
    let refused = node.fails(1, &["volume", "create", "evil", "--device", &on_orphan, "--force"]);
    assert!(refused.contains("orphan.img"), "{refused}");
    std::fs::remove_file(&orphan).unwrap();
    let refused = node.fails(1, &["volume", "create", "evil", "--device", &on_orphan, "--force"]);
    assert!(refused.contains("deleted or is not visible"), "{refused}");
    // An unused loop device is accepted like any device.
    node.ok(&["volume", "create", "good", "--device", &other_loop]);
}
