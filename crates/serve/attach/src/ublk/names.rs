//! Files by which a device is known on this machine. All of this may block: it runs beside the core.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Control of the driver.
pub(super) const CONTROL: &str = "/dev/ublk-control";

/// Where the driver lists its devices.
const CLASS: &str = "/sys/class/ublk-char";

/// The device by which requests come.
pub(super) fn character(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// The device that others use.
pub(super) fn block(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// Numbers of all devices that there are.
pub(super) fn devices() -> io::Result<Vec<u32>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(CLASS)? {
        let name = entry?.file_name();
        all.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
    }
    Ok(all)
}

/// Takes a device for oneself: nobody mounts it meanwhile, puts it under another device, or swaps to it. Refused as busy
/// where somebody does.
pub(super) fn hold(id: u32) -> io::Result<File> {
    let exclusive = OFlags::EXCL.bits() as i32;
    OpenOptions::new().read(true).custom_flags(exclusive).open(block(id))
}

/// A process that has a device open, or a partition of it: its name and number. Who holds it otherwise, or is not seen
/// from here, is not found.
pub(super) fn opener(id: u32) -> Option<String> {
    let device = block(id);
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let others = processes.filter(|p| {
        let number = p.file_name().to_str().and_then(|n| n.parse::<u32>().ok());
        number.is_some_and(|n| n != std::process::id())
    });
    let mut others = others.map(|p| p.path());
    let found = others.find(|process| {
        let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut targets = open.filter_map(|fd| fs::read_link(fd.path()).ok());
        targets.any(|target| is_part(&target, &device))
    })?;
    let name = fs::read_to_string(found.join("comm")).unwrap_or_default();
    let number = found.file_name().unwrap_or_default().display().to_string();
    Some(format!("{} ({number})", name.trim_end()))
}

/// Whether a process has not ended.
pub(super) fn lives(process: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name before it may have brackets of its own.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X' | 'x'))
}

/// Whether a path is that of a device or of one of its partitions.
fn is_part(path: &Path, device: &Path) -> bool {
    let (path, device) = (path.as_os_str().as_encoded_bytes(), device.as_os_str());
    let rest = path.strip_prefix(device.as_encoded_bytes());
    rest.is_some_and(|rest| {
        let partition = rest.strip_prefix(b"p");
        rest.is_empty()
            || partition.is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit))
    })
}

/// Gives a device a name that does not depend on its number.
pub(super) fn link(at: &Path, id: u32) -> io::Result<()> {
    if let Some(directory) = at.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = at.with_extension(format!("{id}.new"));
    let _ = fs::remove_file(&new);
    symlink(block(id), &new)?;
    fs::rename(&new, at)
}

/// Takes the name away, if it is still this device's.
pub(super) fn unlink(at: &Path, id: u32) -> io::Result<()> {
    if fs::read_link(at)? == block(id) { fs::remove_file(at) } else { Ok(()) }
}

/// Where it stands, beside the name of its device, that the process that left a volume's device had nothing in doubt.
pub(super) fn word(link: &Path, identity: u128) -> PathBuf {
    link.with_file_name(format!(".{identity:032x}"))
}

/// Says that nothing is in doubt.
pub(super) fn give_word(at: &Path) -> io::Result<()> {
    File::create(at).map(drop)
}

/// Whether that was said. It counts once.
pub(super) fn take_word(at: &Path) -> bool {
    fs::remove_file(at).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_parts() {
        let is_part = |path: &str| is_part(Path::new(path), &block(1));
        assert!(is_part("/dev/ublkb1") && is_part("/dev/ublkb1p3"));
        assert!(!is_part("/dev/ublkb10") && !is_part("/dev/ublkb1p") && !is_part("/dev/ublkb"));
        assert!(!is_part("/dev/ublkb1px"));
    }

    #[test]
    fn who_has_ended_does_not_live() {
        assert!(lives(i32::try_from(std::process::id()).unwrap()));
        assert!(!lives(-1) && !lives(0));
    }

    #[test]
    fn a_word_counts_once() {
        let place = tempfile::tempdir().unwrap();
        let of = |identity| word(&place.path().join("web"), identity);
        assert!(!take_word(&of(1)));
        give_word(&of(1)).unwrap();
        assert!(!take_word(&of(2)) && take_word(&of(1)) && !take_word(&of(1)));
    }

    #[test]
    fn a_name_follows_its_device_and_nobody_elses() {
        let place = tempfile::tempdir().unwrap();
        let at = place.path().join("disks/web.v1");
        link(&at, 3).unwrap();
        assert_eq!(fs::read_link(&at).unwrap(), block(3));
        link(&at, 4).unwrap();
        unlink(&at, 3).unwrap();
        assert_eq!(fs::read_link(&at).unwrap(), block(4));
        unlink(&at, 4).unwrap();
        assert!(fs::read_link(&at).is_err());
    }
}
