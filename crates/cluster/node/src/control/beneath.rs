//! What files and devices lie on: the file behind a loop device, the disk of a partition, what the device mapper or a
//! software RAID joins, and the device of a file system.
//!
//! The system keeps two users of one disk apart. It does not when one of them goes through a loop device.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};

/// Where the system describes its block devices, by their numbers.
const DEVICES: &str = "/sys/dev/block";

/// Most devices that one is looked for on.
const MAX_DEVICES: usize = 4096;

/// What a path leads to, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    /// A file or directory, by the device of its file system and its inode.
    File(u64, u64),
    /// A block device by its number: it may have several nodes.
    Device(u64),
}

impl Identity {
    pub(super) fn of(found: &Metadata) -> Self {
        match found.file_type().is_block_device() {
            true => Self::Device(found.rdev()),
            false => Self::File(found.dev(), found.ino()),
        }
    }
}

/// What a loop device is made of.
#[derive(Clone, Debug)]
pub(super) struct Backing {
    /// The number of the loop device.
    device: u64,
    /// Where its file is, as the system tells.
    pub(super) path: PathBuf,
    /// Which one it is; `None` if it is not there.
    pub(super) identity: Option<Identity>,
}

/// A file or device, and everything that it lies on, but for file systems.
#[derive(Clone, Debug, Default)]
pub(super) struct Beneath {
    itself: Option<Identity>,
    all: BTreeSet<Identity>,
    backings: Vec<Backing>,
    /// Devices of the file systems of the files among them.
    file_systems: Vec<u64>,
}

impl Beneath {
    /// Of what is at `path`. Looks at files.
    pub(super) fn of(path: &Path) -> Self {
        Self::look(path, Path::new(DEVICES))
    }

    fn look(path: &Path, devices: &Path) -> Self {
        let Ok(found) = fs::metadata(path) else { return Self::default() };
        let itself = Identity::of(&found);
        match itself {
            Identity::Device(number) => Self::of_device(number, devices),
            Identity::File(file_system, _) => Self {
                itself: Some(itself),
                all: BTreeSet::from([itself]),
                backings: Vec::new(),
                file_systems: vec![file_system],
            },
        }
    }

    fn of_device(number: u64, devices: &Path) -> Self {
        let mut beneath = Self { itself: Some(Identity::Device(number)), ..Self::default() };
        let mut todo = vec![number];
        while let Some(number) = todo.pop() {
            let is_new = beneath.all.insert(Identity::Device(number));
            if !is_new || beneath.all.len() > MAX_DEVICES {
                continue;
            }
            let described = devices.join(format!("{}:{}", major(number), minor(number)));
            todo.extend(disk_of_partition(&described));
            todo.extend(joined(&described));
            let Some(path) = loop_file(&described) else { continue };
            let identity = fs::metadata(&path).ok().map(|found| Identity::of(&found));
            beneath.backings.push(Backing { device: number, path, identity });
            match identity {
                Some(Identity::Device(number)) => todo.push(number),
                Some(file @ Identity::File(file_system, _)) => {
                    beneath.all.insert(file);
                    beneath.file_systems.push(file_system);
                }
                None => {}
            }
        }
        beneath
    }

    /// What the loop devices among them are made of.
    pub(super) fn backings(&self) -> &[Backing] {
        &self.backings
    }

    /// All of them, and itself.
    pub(super) fn all(&self) -> &BTreeSet<Identity> {
        &self.all
    }

    pub(super) fn is(&self, other: Identity) -> bool {
        self.itself == Some(other)
    }

    /// Whether one lies on the other, or both are loop devices on one file. Partitions of one disk share nothing.
    fn shares_with(&self, other: &Self) -> bool {
        let lies_on = |a: &Self, b: &Self| b.itself.is_some_and(|b| a.all.contains(&b));
        let one_file = |a: &Backing, b: &Backing| {
            a.device != b.device && a.identity.is_some() && a.identity == b.identity
        };
        lies_on(self, other)
            || lies_on(other, self)
            || self.backings.iter().any(|a| other.backings.iter().any(|b| one_file(a, b)))
    }
}

/// A path that is about to be used, beside those that are.
#[derive(Debug)]
pub(super) struct Candidate<'a> {
    path: &'a Path,
    beneath: Beneath,
    devices: PathBuf,
    /// File systems that share nothing with it.
    looked_at: BTreeSet<u64>,
}

impl<'a> Candidate<'a> {
    pub(super) fn new(path: &'a Path) -> Self {
        Self {
            path,
            beneath: Beneath::of(path),
            devices: DEVICES.into(),
            looked_at: BTreeSet::new(),
        }
    }

    /// Whether it is what is at `used`.
    pub(super) fn is(&self, used: &Path) -> bool {
        let found = || fs::metadata(used).ok().map(|found| Identity::of(&found));
        self.path == used || found().is_some_and(|used| self.beneath.is(used))
    }

    /// Whether what is written to it could end up in what is at `used`, or in the file system that has that.
    pub(super) fn shares_with(&mut self, used: &Path) -> bool {
        if self.path == used {
            return true;
        }
        let used = Beneath::look(used, &self.devices);
        let mut todo = used.file_systems.clone();
        if self.beneath.shares_with(&used) {
            return true;
        }
        while let Some(number) = todo.pop() {
            if self.looked_at.contains(&number) {
                continue;
            }
            let below = Beneath::of_device(number, &self.devices);
            if self.beneath.shares_with(&below) {
                return true;
            }
            self.looked_at.insert(number);
            todo.extend(below.file_systems);
        }
        false
    }
}

/// The file that a loop device is made of.
fn loop_file(described: &Path) -> Option<PathBuf> {
    let mut name = fs::read(described.join("loop/backing_file")).ok()?;
    if name.last() == Some(&b'\n') {
        name.pop();
    }
    Some(PathBuf::from(OsString::from_vec(name)))
}

fn disk_of_partition(described: &Path) -> Option<u64> {
    described.join("partition").exists().then(|| number_in(&described.join("../dev")))?
}

/// The devices that one is put together from.
fn joined(described: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(described.join("slaves")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| number_in(&entry.path().join("dev"))).collect()
}

/// A device's number in a file, as `7:0`.
fn number_in(file: &Path) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A description of devices as the system has it, and files.
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

        /// Describes a device below another one, if it is a partition.
        fn describe(&self, name: &str, number: (u32, u32)) -> PathBuf {
            let real = self.at("devices").join(name);
            fs::create_dir_all(&real).unwrap();
            fs::write(real.join("dev"), format!("{}:{}\n", number.0, number.1)).unwrap();
            symlink(&real, self.devices().join(format!("{}:{}", number.0, number.1))).unwrap();
            real
        }

        fn loop_on(&self, minor: u32, file: &Path) -> Beneath {
            let real = self.describe(&format!("loop{minor}"), (7, minor));
            fs::create_dir(real.join("loop")).unwrap();
            fs::write(real.join("loop/backing_file"), format!("{}\n", file.display())).unwrap();
            self.device(7, minor)
        }

        fn partition(&self, of: u32, number: u32) -> Beneath {
            let real = self.describe(&format!("loop{of}/loop{of}p{number}"), (259, number));
            fs::write(real.join("partition"), "1\n").unwrap();
            self.device(259, number)
        }

        /// A device of the device mapper on a device that is described.
        fn mapped(&self, minor: u32, on: &str) -> Beneath {
            let real = self.describe(&format!("dm-{minor}"), (253, minor));
            fs::create_dir(real.join("slaves")).unwrap();
            symlink(self.at("devices").join(on), real.join("slaves/on")).unwrap();
            self.device(253, minor)
        }

        fn device(&self, major: u32, minor: u32) -> Beneath {
            Beneath::of_device(makedev(major, minor), &self.devices())
        }

        fn candidate<'a>(&self, path: &'a Path, beneath: Beneath) -> Candidate<'a> {
            Candidate { path, beneath, devices: self.devices(), looked_at: BTreeSet::new() }
        }
    }

    #[test]
    fn a_loop_device_shares_with_its_file_through_partitions_and_mappings() {
        let system = System::new();
        let image = Beneath::look(&system.at("web.img"), &system.devices());
        let other = Beneath::look(&system.at("other.img"), &system.devices());
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
        let file = Beneath::look(&system.at("web.img"), &system.devices());
        let other = Beneath::look(&system.at("other.img"), &system.devices());
        assert!(!file.shares_with(&other), "one file system");
        let gone = Beneath::look(&system.at("gone"), &system.devices());
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
        let itself = Beneath::look(below.path(), &system.devices());
        assert!(system.candidate(below.path(), itself).shares_with(&image));
        let other = Beneath::look(&system.at("other.img"), &system.devices());
        let other_path = system.at("other.img");
        assert!(!system.candidate(&other_path, other).shares_with(&image));
    }

    #[test]
    fn a_loop_device_whose_file_is_gone_says_which_and_odd_descriptions_end() {
        let system = System::new();
        let gone = system.loop_on(3, &system.at("gone (deleted)"));
        assert_eq!(gone.backings()[0].path, system.at("gone (deleted)"));
        assert_eq!(gone.backings()[0].identity, None);
        let odd = system.describe("odd", (8, 1));
        fs::write(odd.join("partition"), "1").unwrap();
        fs::create_dir(odd.join("slaves")).unwrap();
        // On itself.
        symlink(&odd, odd.join("slaves/odd")).unwrap();
        symlink("/nowhere", odd.join("slaves/nowhere")).unwrap();
        assert_eq!(system.device(8, 1).all().len(), 1);
        fs::write(odd.join("dev"), "8:1:7 x").unwrap();
        assert_eq!(system.device(8, 1).all().len(), 1);
        assert_eq!(system.device(300, 300).all().len(), 1);
    }
}
