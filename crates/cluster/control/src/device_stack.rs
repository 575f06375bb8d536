//! The block devices beneath files and devices: the file behind a loop device, the disk of a
//! partition, the devices under the device mapper or a software RAID, and the device of a file
//! system.
//!
//! The kernel prevents two users of one disk, except when one of them goes through a loop device.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};

/// Where sysfs describes block devices, by device number.
const DEVICES: &str = "/sys/dev/block";

/// Most devices that are searched beneath one.
const MAX_DEVICES: usize = 4096;

/// Identity of a file or device, independent of the path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FileIdentity {
    /// A file or directory: the device of its file system, and its inode.
    File(u64, u64),
    /// A block device by its number: several device nodes may lead to it.
    Device(u64),
}

impl FileIdentity {
    pub(super) fn of(found: &Metadata) -> Self {
        match found.file_type().is_block_device() {
            true => Self::Device(found.rdev()),
            false => Self::File(found.dev(), found.ino()),
        }
    }
}

/// The file behind a loop device.
#[derive(Clone, Debug)]
pub(super) struct LoopBacking {
    /// The number of the loop device.
    device: u64,
    /// Path of the file, by sysfs.
    pub(super) path: PathBuf,
    /// Identity of the file; `None` if it does not exist.
    pub(super) identity: Option<FileIdentity>,
}

/// A file or device and everything beneath it, except for file systems.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceStack {
    top: Option<FileIdentity>,
    devices: BTreeSet<FileIdentity>,
    loop_backings: Vec<LoopBacking>,
    /// Devices of the file systems that hold files of the stack.
    file_systems: Vec<u64>,
}

impl DeviceStack {
    /// The stack of the file or device at `path`. Reads the file system.
    pub(super) fn of_path(path: &Path) -> Self {
        Self::resolve(path, Path::new(DEVICES))
    }

    fn resolve(path: &Path, devices: &Path) -> Self {
        let Ok(found) = fs::metadata(path) else { return Self::default() };
        let identity = FileIdentity::of(&found);
        match identity {
            FileIdentity::Device(number) => Self::of_device(number, devices),
            FileIdentity::File(file_system, _) => Self {
                top: Some(identity),
                devices: BTreeSet::from([identity]),
                loop_backings: Vec::new(),
                file_systems: vec![file_system],
            },
        }
    }

    fn of_device(number: u64, devices: &Path) -> Self {
        let mut stack = Self { top: Some(FileIdentity::Device(number)), ..Self::default() };
        let mut pending = vec![number];
        while let Some(number) = pending.pop() {
            let is_new = stack.devices.insert(FileIdentity::Device(number));
            if !is_new || stack.devices.len() > MAX_DEVICES {
                continue;
            }
            let described = devices.join(format!("{}:{}", major(number), minor(number)));
            pending.extend(disk_of_partition(&described));
            pending.extend(slave_devices(&described));
            let Some(path) = loop_backing_path(&described) else { continue };
            let identity = fs::metadata(&path).ok().map(|found| FileIdentity::of(&found));
            stack.loop_backings.push(LoopBacking { device: number, path, identity });
            match identity {
                Some(FileIdentity::Device(number)) => pending.push(number),
                Some(file @ FileIdentity::File(file_system, _)) => {
                    stack.devices.insert(file);
                    stack.file_systems.push(file_system);
                }
                None => {}
            }
        }
        stack
    }

    /// The files behind the loop devices of the stack.
    pub(super) fn loop_backings(&self) -> &[LoopBacking] {
        &self.loop_backings
    }

    /// The files and devices of the stack, the top one included.
    pub(super) fn devices(&self) -> &BTreeSet<FileIdentity> {
        &self.devices
    }

    pub(super) fn is_top(&self, other: FileIdentity) -> bool {
        self.top == Some(other)
    }

    /// Whether one stack lies on the other, or both are loop devices on one file. Partitions of one
    /// disk share nothing.
    fn shares_with(&self, other: &Self) -> bool {
        let lies_on = |a: &Self, b: &Self| b.top.is_some_and(|b| a.devices.contains(&b));
        let one_file = |a: &LoopBacking, b: &LoopBacking| {
            a.device != b.device && a.identity.is_some() && a.identity == b.identity
        };
        lies_on(self, other)
            || lies_on(other, self)
            || self.loop_backings.iter().any(|a| other.loop_backings.iter().any(|b| one_file(a, b)))
    }
}

/// Checks a path that is to be used against paths in use.
#[derive(Debug)]
pub(super) struct PathCheck<'a> {
    path: &'a Path,
    stack: DeviceStack,
    devices: PathBuf,
    /// File systems that share nothing with it.
    unrelated_file_systems: BTreeSet<u64>,
}

impl<'a> PathCheck<'a> {
    pub(super) fn new(path: &'a Path) -> Self {
        Self {
            path,
            stack: DeviceStack::of_path(path),
            devices: DEVICES.into(),
            unrelated_file_systems: BTreeSet::new(),
        }
    }

    /// Whether the path leads to the same file or device as `used`.
    pub(super) fn is_same_as(&self, used: &Path) -> bool {
        let found = || fs::metadata(used).ok().map(|found| FileIdentity::of(&found));
        self.path == used || found().is_some_and(|used| self.stack.is_top(used))
    }

    /// Whether writes to the path could reach `used`, or the file system of `used`.
    pub(super) fn shares_with(&mut self, used: &Path) -> bool {
        if self.path == used {
            return true;
        }
        let used = DeviceStack::resolve(used, &self.devices);
        let mut pending = used.file_systems.clone();
        if self.stack.shares_with(&used) {
            return true;
        }
        while let Some(number) = pending.pop() {
            if self.unrelated_file_systems.contains(&number) {
                continue;
            }
            let lower = DeviceStack::of_device(number, &self.devices);
            if self.stack.shares_with(&lower) {
                return true;
            }
            self.unrelated_file_systems.insert(number);
            pending.extend(lower.file_systems);
        }
        false
    }
}

/// The file behind a loop device.
fn loop_backing_path(described: &Path) -> Option<PathBuf> {
    let mut name = fs::read(described.join("loop/backing_file")).ok()?;
    if name.last() == Some(&b'\n') {
        name.pop();
    }
    Some(PathBuf::from(OsString::from_vec(name)))
}

fn disk_of_partition(described: &Path) -> Option<u64> {
    described.join("partition").exists().then(|| read_device_number(&described.join("../dev")))?
}

/// The devices beneath one.
fn slave_devices(described: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(described.join("slaves")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| read_device_number(&entry.path().join("dev"))).collect()
}

/// Reads a device number from a file, such as `7:0`.
fn read_device_number(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A fake sysfs description of devices, and files.
    struct System {
        dir: tempfile::TempDir,
    }

    impl System {
        fn new() -> Self {
            let system = Self { dir: tempfile::tempdir().unwrap() };
            fs::create_dir_all(system.devices()).unwrap();
            for file in ["web.img", "other.img"] {
                fs::write(system.at(file), file).unwrap();
            }
            system
        }

        fn at(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn devices(&self) -> PathBuf {
            self.at("dev/block")
        }

        /// Describes a device, beneath another one if it is a partition.
        fn describe(&self, name: &str, number: (u32, u32)) -> PathBuf {
            let real = self.at("devices").join(name);
            fs::create_dir_all(&real).unwrap();
            fs::write(real.join("dev"), format!("{}:{}\n", number.0, number.1)).unwrap();
            symlink(&real, self.devices().join(format!("{}:{}", number.0, number.1))).unwrap();
            real
        }

        fn loop_on(&self, minor: u32, file: &Path) -> DeviceStack {
            let real = self.describe(&format!("loop{minor}"), (7, minor));
            fs::create_dir(real.join("loop")).unwrap();
            fs::write(real.join("loop/backing_file"), format!("{}\n", file.display())).unwrap();
            self.device(7, minor)
        }

        fn partition(&self, of: u32, number: u32) -> DeviceStack {
            let real = self.describe(&format!("loop{of}/loop{of}p{number}"), (259, number));
            fs::write(real.join("partition"), "1\n").unwrap();
            self.device(259, number)
        }

        /// A device-mapper device on a described device.
        fn mapped(&self, minor: u32, on: &str) -> DeviceStack {
            let real = self.describe(&format!("dm-{minor}"), (253, minor));
            fs::create_dir(real.join("slaves")).unwrap();
            symlink(self.at("devices").join(on), real.join("slaves/on")).unwrap();
            self.device(253, minor)
        }

        fn device(&self, major: u32, minor: u32) -> DeviceStack {
            DeviceStack::of_device(makedev(major, minor), &self.devices())
        }

        fn candidate<'a>(&self, path: &'a Path, beneath: DeviceStack) -> PathCheck<'a> {
            PathCheck {
                path,
                stack: beneath,
                devices: self.devices(),
                unrelated_file_systems: BTreeSet::new(),
            }
        }
    }

    #[test]
    fn a_loop_device_shares_with_its_file_through_partitions_and_mappings() {
        let system = System::new();
        let image = DeviceStack::resolve(&system.at("web.img"), &system.devices());
        let other = DeviceStack::resolve(&system.at("other.img"), &system.devices());
        let whole = system.loop_on(0, &system.at("web.img"));
        let partition = system.partition(0, 1);
        let mapped = system.mapped(0, "loop0/loop0p1");
        let again = system.loop_on(1, &system.at("web.img"));
        for device in [&whole, &partition, &mapped, &again] {
            assert!(device.shares_with(&image) && image.shares_with(device), "{device:?}");
            assert!(!device.shares_with(&other) && !other.shares_with(device), "{device:?}");
        }
        // Two loop devices on one file, and one on the other.
        for (a, b) in [(&whole, &again), (&partition, &again), (&mapped, &whole)] {
            assert!(a.shares_with(b) && b.shares_with(a), "{a:?} {b:?}");
        }
    }

    #[test]
    fn what_lies_beside_another_on_one_disk_does_not_share_with_it() {
        let system = System::new();
        system.loop_on(0, &system.at("web.img"));
        let (first, second) = (system.partition(0, 1), system.partition(0, 2));
        assert!(!first.shares_with(&second));
        let (a, b) = (system.mapped(1, "loop0/loop0p1"), system.mapped(2, "loop0/loop0p1"));
        assert!(!a.shares_with(&b) && a.shares_with(&first) && !a.shares_with(&second));
        let file = DeviceStack::resolve(&system.at("web.img"), &system.devices());
        let other = DeviceStack::resolve(&system.at("other.img"), &system.devices());
        assert!(!file.shares_with(&other), "one file system");
        let gone = DeviceStack::resolve(&system.at("gone"), &system.devices());
        assert!(!gone.shares_with(&gone.clone()), "nobody knows what it is");
    }

    #[test]
    fn a_file_shares_with_what_the_file_system_lies_on_that_has_it() {
        let system = System::new();
        let image = system.at("web.img");
        let file_system = fs::metadata(&image).unwrap().dev();
        // Its file system lies on a loop device.
        let real = system.describe("fs", (major(file_system), minor(file_system)));
        fs::create_dir(real.join("loop")).unwrap();
        let below = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        fs::write(real.join("loop/backing_file"), format!("{}\n", below.path().display())).unwrap();
        let second = system.loop_on(5, below.path());
        let path = Path::new("/dev/loop5");
        assert!(system.candidate(path, second).shares_with(&image));
        let itself = DeviceStack::resolve(below.path(), &system.devices());
        assert!(system.candidate(below.path(), itself).shares_with(&image));
        let other = DeviceStack::resolve(&system.at("other.img"), &system.devices());
        let other_path = system.at("other.img");
        assert!(!system.candidate(&other_path, other).shares_with(&image));
    }

    #[test]
    fn a_loop_device_whose_file_is_gone_says_which_and_odd_descriptions_end() {
        let system = System::new();
        let gone = system.loop_on(3, &system.at("gone (deleted)"));
        assert_eq!(gone.loop_backings()[0].path, system.at("gone (deleted)"));
        assert_eq!(gone.loop_backings()[0].identity, None);
        let odd = system.describe("odd", (8, 1));
        fs::write(odd.join("partition"), "1").unwrap();
        fs::create_dir(odd.join("slaves")).unwrap();
        // On itself: a cycle.
        symlink(&odd, odd.join("slaves/odd")).unwrap();
        symlink("/nowhere", odd.join("slaves/nowhere")).unwrap();
        assert_eq!(system.device(8, 1).devices().len(), 1);
        fs::write(odd.join("dev"), "8:1:7 x").unwrap();
        assert_eq!(system.device(8, 1).devices().len(), 1);
        assert_eq!(system.device(300, 300).devices().len(), 1);
    }
}
