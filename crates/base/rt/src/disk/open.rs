//! Opening real files and block devices: held by nobody else, with direct I/O, and with what the
//! system knows about them. Everything here blocks and belongs on the blocking pool.

use std::fs::{self, File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::{DiskInfo, DiskKind, OpenError, OpenOptions, OpenReason, geometry};
use crate::sys;

/// How often a busy disk is looked at again, and how long after the last time.
const BUSY_LOOKS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(25);

/// An opened file or block device.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) file: File,
    pub(crate) info: DiskInfo,
    /// The serial number of the disk behind a block device.
    pub(crate) serial: String,
    /// Whether its file system keeps data in memory.
    pub(crate) on_memory: bool,
}

/// Opens `path`, creating it first when told to; what was created is removed again on failure.
pub(crate) fn open(path: &Path, how: OpenOptions) -> Result<Opened, OpenError> {
    let refuse = |reason| OpenError::new(path, reason);
    let Some(bytes) = how.create_bytes else {
        return open_when_free(path, how).map_err(refuse);
    };
    // What volumes hold is nobody else's to read.
    let created = File::options().write(true).create_new(true).mode(0o600).open(path);
    let created = OpenReason::of(created).map_err(refuse)?;
    // Held before it is touched: from the moment it exists another may open it, and fill it.
    let opened = hold(&created, true)
        .and_then(|()| OpenReason::of(created.set_len(bytes).and_then(|()| created.sync_all())))
        .and_then(|()| {
            // A process that is just being started has a copy of it until it runs its program.
            drop(created);
            open_when_free(path, how)
        })
        .and_then(|opened| OpenReason::of(sync_parent(path)).map(|()| opened));
    opened.map_err(|reason| {
        // A file that somebody holds is somebody's.
        if !matches!(reason, OpenReason::Busy)
            && let Err(e) = fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove a half-made file");
        }
        refuse(reason)
    })
}

/// Opens what exists. What a process has just been killed with stays held until the kernel is
/// through with its last requests, so a busy disk is given a moment.
fn open_when_free(path: &Path, how: OpenOptions) -> Result<Opened, OpenReason> {
    for _ in 0..BUSY_LOOKS {
        match open_existing(path, how) {
            Err(OpenReason::Busy) => pause(BUSY_PAUSE),
            result => return result,
        }
    }
    open_existing(path, how)
}

#[expect(clippy::disallowed_methods, reason = "on the blocking pool, not on a core")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn open_existing(path: &Path, how: OpenOptions) -> Result<Opened, OpenReason> {
    // Looked at before it is opened, because opening a pipe or a tape has effects.
    let kind = kind_of(&OpenReason::of(fs::metadata(path))?)?;
    let mut file = open_direct(path, kind, how)?;
    if kind_of(&OpenReason::of(file.metadata())?)? != kind {
        return Err(OpenReason::NotAFileOrBlockDevice);
    }
    if kind == DiskKind::File && !how.beside {
        hold(&file, !how.read_only)?;
    }
    let on_memory = kind == DiskKind::File && OpenReason::of(sys::on_memory(file.as_fd()))?;
    if how.buffered && kind == DiskKind::File && !how.read_only && !how.beside {
        // After a failed sync the kernel keeps pages that never reached the disk, and calls them clean. Whoever held
        // the file before may have ended with such pages: what is read from here on is what the disk has.
        OpenReason::of(file.sync_data())?;
        OpenReason::of(sys::drop_cache(file.as_fd()))?;
    }
    let size = OpenReason::of(file.seek(SeekFrom::End(0)))?;
    let info = geometry::describe(&file, kind, size, on_memory, how)?;
    let serial = geometry::serial(&file, kind);
    Ok(Opened { file, info, serial, on_memory })
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

/// Opens with direct I/O unless told otherwise. Memory file systems may go without: before 6.6
/// tmpfs refused the flag, and there is no cache that it would go around.
fn open_direct(path: &Path, kind: DiskKind, how: OpenOptions) -> Result<File, OpenReason> {
    // On a block device O_EXCL claims it: mounted or claimed ones are refused (`open(2)`).
    let claims = kind == DiskKind::BlockDevice && !how.beside;
    let exclusive = if claims { libc::O_EXCL } else { 0 };
    let open = |direct: i32| {
        File::options().read(true).write(!how.read_only).custom_flags(exclusive | direct).open(path)
    };
    // A block device may be shared with another machine, whose writes this machine's page cache would not see.
    if how.buffered && kind == DiskKind::File {
        return OpenReason::of(open(0));
    }
    match open(libc::O_DIRECT) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            if !OpenReason::of(sys::path_on_memory(path))? {
                return Err(OpenReason::NoDirectIo);
            }
            OpenReason::of(open(0))
        }
        result => OpenReason::of(result),
    }
}

/// Locks a file against every other open of it, ours included. The lock goes with the open file.
fn hold(file: &File, exclusive: bool) -> Result<(), OpenReason> {
    match sys::lock_file(file.as_fd(), exclusive) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Err(OpenReason::Busy)
        }
        result => OpenReason::of(result),
    }
}

/// Deletes a file; its absence is durable when this returns.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    sync_parent(path)
}

/// Renames a file, replacing what had the new name; durable when this returns.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_parent(to)?;
    if from.parent() == to.parent() { Ok(()) } else { sync_parent(from) }
}

/// Makes durable what names a directory holds.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => sync_dir(dir),
        _ => sync_dir(Path::new(".")),
    }
}
