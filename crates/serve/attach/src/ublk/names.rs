//! Files of a device on this machine. All functions may block: they run off the core.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The driver's control device.
pub(super) const CONTROL: &str = "/dev/ublk-control";

/// Where the driver lists its devices.
const CLASS: &str = "/sys/class/ublk-char";

/// The character device for the server's requests.
pub(super) fn char_device(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// The block device for users.
pub(super) fn block_device(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// Numbers of all devices.
pub(super) fn devices() -> io::Result<Vec<u32>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(CLASS)? {
        let name = entry?.file_name();
        all.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
    }
    Ok(all)
}

/// Opens a device exclusively: it cannot be mounted, stacked or swapped to meanwhile. Busy if it
/// is.
pub(super) fn open_exclusive(id: u32) -> io::Result<File> {
    let exclusive = OFlags::EXCL.bits() as i32;
    OpenOptions::new().read(true).custom_flags(exclusive).open(block_device(id))
}

/// A process that has a device or a partition of it open: its name and number. Other holders, and
/// invisible processes, are not found.
pub(super) fn find_opener(id: u32) -> Option<String> {
    let device = block_device(id);
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let others = processes.filter(|p| {
        let number = p.file_name().to_str().and_then(|n| n.parse::<u32>().ok());
        number.is_some_and(|n| n != std::process::id())
    });
    let mut others = others.map(|p| p.path());
    let found = others.find(|process| {
        let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut targets = open.filter_map(|fd| fs::read_link(fd.path()).ok());
        targets.any(|target| is_device_or_partition(&target, &device))
    })?;
    let name = fs::read_to_string(found.join("comm")).unwrap_or_default();
    let number = found.file_name().unwrap_or_default().display().to_string();
    Some(format!("{} ({number})", name.trim_end()))
}

/// Whether a process is running.
pub(super) fn is_alive(process: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name before it may contain brackets.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X' | 'x'))
}

/// Whether a path is that of a device or of one of its partitions.
fn is_device_or_partition(path: &Path, device: &Path) -> bool {
    let (path, device) = (path.as_os_str().as_encoded_bytes(), device.as_os_str());
    let rest = path.strip_prefix(device.as_encoded_bytes());
    rest.is_some_and(|rest| {
        let partition = rest.strip_prefix(b"p");
        rest.is_empty()
            || partition.is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit))
    })
}

/// Creates a link to a device that does not depend on its number.
pub(super) fn link(at: &Path, id: u32) -> io::Result<()> {
    if let Some(directory) = at.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = at.with_extension(format!("{id}.new"));
    let _ = fs::remove_file(&new);
    symlink(block_device(id), &new)?;
    fs::rename(&new, at)
}

/// Removes the link if it still refers to this device.
pub(super) fn unlink(at: &Path, id: u32) -> io::Result<()> {
    if fs::read_link(at)? == block_device(id) { fs::remove_file(at) } else { Ok(()) }
}

/// Path of the marker, next to the link, that says that a volume's device was left with nothing in
/// doubt.
pub(super) fn clean_marker_path(link: &Path, identity: u128) -> PathBuf {
    link.with_file_name(format!(".{identity:032x}"))
}

/// Writes the marker.
pub(super) fn write_clean_marker(at: &Path) -> io::Result<()> {
    File::create(at).map(drop)
}

/// Whether the marker exists. Removes it.
pub(super) fn take_clean_marker(at: &Path) -> bool {
    fs::remove_file(at).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_parts() {
        let is_part = |path: &str| is_device_or_partition(Path::new(path), &block_device(1));
        assert!(is_part("/dev/ublkb1") && is_part("/dev/ublkb1p3"));
        assert!(!is_part("/dev/ublkb10") && !is_part("/dev/ublkb1p") && !is_part("/dev/ublkb"));
        assert!(!is_part("/dev/ublkb1px"));
    }

    #[test]
    fn an_ended_process_does_not_count_as_running() {
        assert!(is_alive(i32::try_from(std::process::id()).unwrap()));
        assert!(!is_alive(-1) && !is_alive(0));
    }

    #[test]
    fn a_word_counts_once() {
        let place = tempfile::tempdir().unwrap();
        let of = |identity| clean_marker_path(&place.path().join("web"), identity);
        assert!(!take_clean_marker(&of(1)));
        write_clean_marker(&of(1)).unwrap();
        assert!(
            !take_clean_marker(&of(2)) && take_clean_marker(&of(1)) && !take_clean_marker(&of(1))
        );
    }

    #[test]
    fn a_name_follows_its_own_device() {
        let place = tempfile::tempdir().unwrap();
        let at = place.path().join("disks/web.v1");
        link(&at, 3).unwrap();
        assert_eq!(fs::read_link(&at).unwrap(), block_device(3));
        link(&at, 4).unwrap();
        unlink(&at, 3).unwrap();
        assert_eq!(fs::read_link(&at).unwrap(), block_device(4));
        unlink(&at, 4).unwrap();
        assert!(fs::read_link(&at).is_err());
    }
}
