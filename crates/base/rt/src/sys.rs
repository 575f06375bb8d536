//! System calls that the standard library does not offer, each behind a safe function.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// File system magic numbers of memory file systems (`statfs(2)`).
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// Magic numbers of file systems on local disks and in memory: ext2 to ext4, XFS, Btrfs, F2FS,
/// Bcachefs, ZFS, JFS, NTFS, FAT, exFAT, tmpfs, ramfs, overlayfs (`statfs(2)`, `linux/magic.h`).
const LOCAL_FS: [i64; 13] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
    0x3153_464a,
    0x7366_746e,
    0x4d44,
    0x2011_bab0,
    TMPFS,
    RAMFS,
    0x794c_7630,
];

fn check(r: i64) -> io::Result<i64> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the disk into memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// One `preadv` or `pwritev`, or the single-buffer equivalent; returns the bytes moved.
///
/// # Safety
/// Every vector names memory that is valid for the call, and that nothing else accesses (reads) or
/// changes (writes) during it.
pub(crate) unsafe fn transfer(
    fd: BorrowedFd<'_>,
    direction: Direction,
    vectors: &[libc::iovec],
    at: u64,
) -> io::Result<usize> {
    let count = libc::c_int::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let at = offset(at)?;
    let fd = fd.as_raw_fd();
    // SAFETY: the array is valid for `count` entries; what they name is valid by our caller's
    // promise.
    let n = unsafe {
        match (direction, vectors) {
            // A vector of one costs the kernel a tenth of a transfer of 4 KiB in memory.
            (Direction::Read, [one]) => libc::pread(fd, one.iov_base, one.iov_len, at),
            (Direction::Write, [one]) => libc::pwrite(fd, one.iov_base, one.iov_len, at),
            (Direction::Read, _) => libc::preadv(fd, vectors.as_ptr(), count, at),
            (Direction::Write, _) => libc::pwritev(fd, vectors.as_ptr(), count, at),
        }
    };
    usize::try_from(check(n as i64)?).map_err(io::Error::other)
}

/// A file offset as the system's type.
pub(crate) fn offset(at: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Whether a connection is closed in both directions (`POLLHUP`), even with unread data.
pub(crate) fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut asked = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the one entry is ours and lives through the call, which does not wait.
    let n = unsafe { libc::poll(&raw mut asked, 1, 0) };
    n == 1 && asked.revents & libc::POLLHUP != 0
}

/// Makes reads and writes through this description non-blocking (`O_NONBLOCK`).
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // SAFETY: plain system call on an open descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    check(flags.into())?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }.into()).map(drop)
}

/// Drops a file from the page cache: `posix_fadvise(POSIX_FADV_DONTNEED)`.
pub(crate) fn drop_cache(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: plain system call on an open descriptor; it returns its error in place of -1.
    match unsafe { libc::posix_fadvise(fd.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// `fdatasync`.
pub(crate) fn datasync(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: plain system call on an open descriptor.
    check(unsafe { libc::fdatasync(fd.as_raw_fd()) }.into()).map(drop)
}

/// `fallocate` with `mode`.
pub(crate) fn fallocate(fd: BorrowedFd<'_>, mode: i32, at: u64, bytes: u64) -> io::Result<()> {
    let (at, bytes) = (offset(at)?, offset(bytes)?);
    // SAFETY: plain system call on an open descriptor.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, at, bytes) }.into()).map(drop)
}

/// What to search for in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeekTarget {
    /// Allocated data.
    Data,
    /// A hole; the end of the file counts as one.
    Hole,
}

/// The first byte of kind `what` from `at` on: `lseek`. `ENXIO` if no data follows.
pub(crate) fn seek(fd: BorrowedFd<'_>, what: SeekTarget, at: u64) -> io::Result<u64> {
    let (at, whence) = (
        offset(at)?,
        match what {
            SeekTarget::Data => libc::SEEK_DATA,
            SeekTarget::Hole => libc::SEEK_HOLE,
        },
    );
    // SAFETY: plain system call on an open descriptor, whose position is unused.
    let found = check(unsafe { libc::lseek(fd.as_raw_fd(), at, whence) })?;
    u64::try_from(found).map_err(io::Error::other)
}

/// Whether the file is on a file system that keeps its data in memory.
pub(crate) fn is_on_memory_fs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::fstatfs(fd.as_raw_fd(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_memory_fs(s.f_type))
}

/// Whether the file is on a file system that only one machine can mount. Unknown ones may be
/// shared.
pub(crate) fn is_on_local_fs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::fstatfs(fd.as_raw_fd(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_local_fs(s.f_type))
}

/// Whether `path` is on a file system that keeps its data in memory.
pub(crate) fn is_path_on_memory_fs(path: &Path) -> io::Result<bool> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the path ends in NUL, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::statfs(path.as_ptr(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_memory_fs(s.f_type))
}

fn is_local_fs(magic: impl Into<i64>) -> bool {
    LOCAL_FS.contains(&(magic.into() & 0xffff_ffff))
}

fn is_memory_fs(magic: impl Into<i64>) -> bool {
    [TMPFS, RAMFS].contains(&magic.into())
}

/// Locks the whole file for this open description, against all other opens, until it is closed (an
/// open-file-description lock, `fcntl(2)`). An exclusive lock needs the file open for writing.
pub(crate) fn lock_file(fd: BorrowedFd<'_>, exclusive: bool) -> io::Result<()> {
    // SAFETY: an all-zero `flock` is valid.
    let mut lock: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open and the structure lives through the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }.into())
        .map(drop)
}

/// Logical and physical block of a block device, in bytes.
pub(crate) fn block_sizes(fd: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let fd = fd.as_raw_fd();
    let (mut logical, mut physical) = (0 as libc::c_int, 0 as libc::c_uint);
    // SAFETY: each request writes one integer of the size of the variable given.
    unsafe {
        check(libc::ioctl(fd, libc::BLKSSZGET, &raw mut logical).into())?;
        check(libc::ioctl(fd, libc::BLKPBSZGET, &raw mut physical).into())?;
    }
    Ok((u32::try_from(logical).map_err(io::Error::other)?, physical))
}

/// Whether a block device is write-protected (`BLKROGET`, `linux/fs.h`).
pub(crate) fn is_read_only(fd: BorrowedFd<'_>) -> io::Result<bool> {
    const BLKROGET: libc::Ioctl = 0x125e;
    let mut read_only: libc::c_int = 0;
    // SAFETY: the request writes one integer of the size of the variable given.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), BLKROGET, &raw mut read_only) }.into())?;
    Ok(read_only != 0)
}

/// Alignment that direct I/O requires, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlign {
    /// Of buffers; 0 if the file has no direct I/O.
    pub(crate) memory: u32,
    /// Of addresses and lengths; 0 if the file has no direct I/O.
    pub(crate) offset: u32,
}

/// What `statx` reports about direct I/O; `None` if the kernel or file system does not report it.
pub(crate) fn direct_align(fd: BorrowedFd<'_>) -> io::Result<Option<DirectAlign>> {
    let mut s = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH;
    // SAFETY: the path is an empty C string, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        let r =
            libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_DIOALIGN, s.as_mut_ptr());
        check(r.into())?;
        s.assume_init()
    };
    let reported = s.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(reported
        .then_some(DirectAlign { memory: s.stx_dio_mem_align, offset: s.stx_dio_offset_align }))
}

/// Fills `out` with cryptographically secure random bytes.
pub(crate) fn random(out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        // SAFETY: the pointer and the length are those of one slice.
        let n = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match check(n as i64) {
            Ok(n) => done += usize::try_from(n).unwrap_or(0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Time since the machine booted, including suspended time: `CLOCK_BOOTTIME`.
pub(crate) fn since_boot() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours and lives through the call.
    let r = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut t) };
    // With a clock that failed silently a lease would never end.
    check(r.into()).expect("every Linux since 2.6.39 has this clock");
    let nanoseconds = u32::try_from(t.tv_nsec).expect("less than a second");
    Duration::new(u64::try_from(t.tv_sec).expect("boot was in the past"), nanoseconds)
}

/// Processor time of all threads of this process since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorTime {
    /// In user mode.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
    /// Number of voluntary context switches of its threads, for waiting.
    pub voluntary_switches: u64,
    /// Number of involuntary context switches.
    pub involuntary_switches: u64,
}

/// The resources used by this process so far: `getrusage(2)`.
#[must_use]
pub fn processor_time() -> ProcessorTime {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is ours; an all-zero one is valid, should the call fail, which it
    // cannot for the own process.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| {
        let micros = u64::try_from(t.tv_usec).unwrap_or(0);
        Duration::from_secs(u64::try_from(t.tv_sec).unwrap_or(0)) + Duration::from_micros(micros)
    };
    ProcessorTime {
        user: time(usage.ru_utime),
        system: time(usage.ru_stime),
        voluntary_switches: u64::try_from(usage.ru_nvcsw).unwrap_or(0),
        involuntary_switches: u64::try_from(usage.ru_nivcsw).unwrap_or(0),
    }
}

/// Ends this process as `kill -9` does.
#[cfg(feature = "fault-points")]
pub(crate) fn kill_self() -> ! {
    // SAFETY: plain system calls about the process itself.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    // The signal ends the process before this.
    std::process::abort()
}

/// Size of a page of memory in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: plain system call that looks up a constant.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Marks this thread as serving a disk of this machine (`PR_SET_IO_FLUSHER`): memory for it is
/// found without writing to disks, which could be that very one. Without the permission for it,
/// this has no effect.
pub fn set_io_flusher() {
    if let Err(error) = try_set_io_flusher() {
        tracing::debug!(%error, "cannot set the memory policy of an I/O thread: it may wait for its own disk when memory is short");
    }
}

fn try_set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: plain system call about the thread itself.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, on, none, none, none) }.into()).map(drop)
}

/// Whether this thread may lock unlimited memory.
pub(crate) fn can_lock_memory() -> bool {
    /// `CAP_IPC_LOCK` (`linux/capability.h`).
    const IPC_LOCK: u32 = 14;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is ours and lives through the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    if known && limit.rlim_cur == libc::RLIM_INFINITY {
        return true;
    }
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|set| set & (1 << IPC_LOCK) != 0)
}

/// A set of processors for a thread.
#[derive(Clone, Copy)]
pub(crate) struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// Those of the calling thread.
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        let mut set = Self::empty();
        // SAFETY: the set is ours and lives through the call.
        let r = unsafe { libc::sched_getaffinity(0, size_of_val(&set.0), &raw mut set.0) };
        check(r.into()).map(|_| set)
    }

    /// A set of one processor.
    pub(crate) fn single(cpu: usize) -> io::Result<Self> {
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut set = Self::empty();
        // SAFETY: `cpu` lies inside the set, checked above.
        unsafe { libc::CPU_SET(cpu, &mut set.0) };
        Ok(set)
    }

    fn empty() -> Self {
        // SAFETY: an all-zero set is valid and empty.
        Self(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    /// Binds the calling thread to the set.
    pub(crate) fn bind_this_thread(&self) -> io::Result<()> {
        // SAFETY: the set lives through the call.
        let r = unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &raw const self.0) };
        check(r.into()).map(drop)
    }
}
