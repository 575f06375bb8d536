//! Opening real files and block devices: exclusively, with direct I/O, and with their properties.
//! Everything here blocks and must run on the blocking pool.

use std::fs::{self, File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::info::{DiskInfo, DiskKind};
use super::options::{OpenError, OpenOptions, OpenReason};
use super::properties;
use crate::sys;

/// How often opening a busy disk is retried, and the delay in between.
const BUSY_RETRIES: u32 = 20;
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(25);

/// An opened file or block device.
#[derive(Debug)]
pub(crate) struct OpenedFile {
    pub(crate) file: File,
    pub(crate) info: DiskInfo,
    /// The serial number of the disk behind a block device.
    pub(crate) serial: String,
    /// Whether its file system keeps data in memory only.
    pub(crate) is_on_memory_fs: bool,
}

/// Opens `path`, creating it first if requested; a created file is removed on failure.
pub(crate) fn open(path: &Path, how: OpenOptions) -> Result<OpenedFile, OpenError> {
    let refuse = |reason| OpenError::new(path, reason);
    let Some(bytes) = how.create_bytes else {
        return open_with_retries(path, how).map_err(refuse);
    };
    // Other users must not read the contents of volumes.
    let created = File::options().write(true).create_new(true).mode(0o600).open(path);
    let created = OpenReason::from_result(created).map_err(refuse)?;
    // Locked first: as soon as it exists another process may open and fill it.
    let opened = acquire_lock(&created, true)
        .and_then(|()| {
            OpenReason::from_result(created.set_len(bytes).and_then(|()| created.sync_all()))
        })
        .and_then(|()| {
            // A process that is being started holds a copy of the descriptor until exec.
            drop(created);
            open_with_retries(path, how)
        })
        .and_then(|opened| OpenReason::from_result(sync_parent(path)).map(|()| opened));
    opened.map_err(|reason| {
        // A locked file belongs to its holder.
        if !matches!(reason, OpenReason::Busy)
            && let Err(e) = fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove an incomplete file");
        }
        refuse(reason)
    })
}

/// Opens an existing disk. A disk of a process that was just killed stays locked until the kernel
/// has completed its last requests, so a busy disk is retried.
fn open_with_retries(path: &Path, how: OpenOptions) -> Result<OpenedFile, OpenReason> {
    for _ in 0..BUSY_RETRIES {
        match open_existing(path, how) {
            Err(OpenReason::Busy) => pause(BUSY_RETRY_DELAY),
            result => return result,
        }
    }
    open_existing(path, how)
}

#[expect(clippy::disallowed_methods, reason = "on a blocking thread, not on a core")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn open_existing(path: &Path, how: OpenOptions) -> Result<OpenedFile, OpenReason> {
    // Checked before opening, because opening a pipe or a tape has effects.
    let kind = kind_of(&OpenReason::from_result(fs::metadata(path))?)?;
    let mut file = open_direct(path, kind, how)?;
    if kind_of(&OpenReason::from_result(file.metadata())?)? != kind {
        return Err(OpenReason::NotAFileOrBlockDevice);
    }
    if kind == DiskKind::File && !how.shared {
        acquire_lock(&file, !how.read_only)?;
    }
    let on_memory =
        kind == DiskKind::File && OpenReason::from_result(sys::is_on_memory_fs(file.as_fd()))?;
    if how.buffered && kind == DiskKind::File && !how.read_only && !how.shared {
        // After a failed sync the kernel keeps pages that never reached the disk, and marks them
        // clean. The previous user may have left such pages: drop them, so that reads return what
        // is on the disk.
        OpenReason::from_result(file.sync_data())?;
        OpenReason::from_result(sys::drop_cache(file.as_fd()))?;
    }
    let size = OpenReason::from_result(file.seek(SeekFrom::End(0)))?;
    let info = properties::read_disk_info(&file, kind, size, on_memory, how)?;
    let serial = properties::serial(&file, kind);
    Ok(OpenedFile { file, info, serial, is_on_memory_fs: on_memory })
}

fn kind_of(metadata: &Metadata) -> Result<DiskKind, OpenReason> {
    let kind = metadata.file_type();
    if kind.is_file() {
        Ok(DiskKind::File)
    } else if kind.is_block_device() {
        Ok(DiskKind::BlockDevice)
    } else {
        Err(OpenReason::NotAFileOrBlockDevice)
    }
}

/// Opens with direct I/O unless told otherwise. Not required on memory file systems: tmpfs before
/// Linux 6.6 refused the flag, and has no cache to bypass.
fn open_direct(path: &Path, kind: DiskKind, how: OpenOptions) -> Result<File, OpenReason> {
    // On a block device O_EXCL claims it: mounted or claimed ones are refused (`open(2)`).
    let claims = kind == DiskKind::BlockDevice && !how.shared;
    let exclusive = if claims { libc::O_EXCL } else { 0 };
    let open = |direct: i32| {
        File::options().read(true).write(!how.read_only).custom_flags(exclusive | direct).open(path)
    };
    // A block device may be shared with another machine, whose writes this machine's page cache
    // would not see.
    if how.buffered && kind == DiskKind::File {
        return OpenReason::from_result(open(0));
    }
    match open(libc::O_DIRECT) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            if !OpenReason::from_result(sys::is_path_on_memory_fs(path))? {
                return Err(OpenReason::NoDirectIo);
            }
            OpenReason::from_result(open(0))
        }
        result => OpenReason::from_result(result),
    }
}

/// Locks a file against every other open of it, including ours. Closing the file releases the lock.
fn acquire_lock(file: &File, exclusive: bool) -> Result<(), OpenReason> {
    match sys::lock_file(file.as_fd(), exclusive) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Err(OpenReason::Busy)
        }
        result => OpenReason::from_result(result),
    }
}

/// Deletes a file; the deletion is durable when this returns.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    sync_parent(path)
}

/// Renames a file, replacing any file of the new name; durable when this returns.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_parent(to)?;
    if from.parent() == to.parent() { Ok(()) } else { sync_parent(from) }
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => sync_dir(dir),
        _ => sync_dir(Path::new(".")),
    }
}
