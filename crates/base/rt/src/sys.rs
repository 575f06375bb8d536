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

/// Magic numbers of file systems on local disks and in memory: ext2 to ext4, XFS, Btrfs, F2FS, Bcachefs, ZFS, JFS, NTFS, FAT,
/// exFAT, tmpfs, ramfs, overlayfs (`statfs(2)`, `linux/magic.h`).
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

/// One `preadv` or `pwritev`, or what is the same with one piece of memory; gives the bytes moved.
///
/// # Safety
/// Every vector names memory that is valid for the call, and that nobody else touches (reads) or
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
    // SAFETY: the array is valid for `count` entries, what they name by our caller's promise.
    let n = unsafe {
        match (direction, vectors) {
            // A list of one costs the kernel a tenth of a transfer of 4 KiB in memory.
            (Direction::Read, [one]) => libc::pread(fd, one.iov_base, one.iov_len, at),
            (Direction::Write, [one]) => libc::pwrite(fd, one.iov_base, one.iov_len, at),
            (Direction::Read, _) => libc::preadv(fd, vectors.as_ptr(), count, at),
            (Direction::Write, _) => libc::pwritev(fd, vectors.as_ptr(), count, at),
        }
    };
    usize::try_from(check(n as i64)?).map_err(io::Error::other)
}

/// A file offset as the system wants it.
pub(crate) fn offset(at: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Whether a connection is closed in both directions (`POLLHUP`), whatever waits to be read of it.
pub(crate) fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut asked = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the one entry is ours and lives through the call, which does not wait.
    let n = unsafe { libc::poll(&raw mut asked, 1, 0) };
    n == 1 && asked.revents & libc::POLLHUP != 0
}

/// Whoever reads or writes by this description does not wait from now on (`O_NONBLOCK`).
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // SAFETY: plain system call on an open descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    check(flags.into())?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }.into()).map(drop)
}

/// Forgets what the page cache holds of a file: `posix_fadvise(POSIX_FADV_DONTNEED)`.
pub(crate) fn drop_cache(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: plain system call on an open descriptor; it gives its error in place of -1.
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

/// What to look for in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seeking {
    /// What may be other than zeroes.
    Data,
    /// What has nothing behind it; the end counts as such.
    Hole,
}

/// The first byte from `at` on that is `what`: `lseek`. `ENXIO` where there is no data up to the end.
pub(crate) fn seek(fd: BorrowedFd<'_>, what: Seeking, at: u64) -> io::Result<u64> {
    let (at, whence) = (
        offset(at)?,
        match what {
            Seeking::Data => libc::SEEK_DATA,
            Seeking::Hole => libc::SEEK_HOLE,
        },
    );
    // SAFETY: plain system call on an open descriptor, whose position nobody uses.
    let found = check(unsafe { libc::lseek(fd.as_raw_fd(), at, whence) })?;
    u64::try_from(found).map_err(io::Error::other)
}

/// Whether the file lies on a file system that keeps its data in memory.
pub(crate) fn on_memory(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::fstatfs(fd.as_raw_fd(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_memory(s.f_type))
}

/// Whether the file lies on a file system that only one machine can have mounted. Those that are not known may be shared.
pub(crate) fn on_local_fs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::fstatfs(fd.as_raw_fd(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_local(s.f_type))
}

/// Whether `path` lies on a file system that keeps its data in memory.
pub(crate) fn path_on_memory(path: &Path) -> io::Result<bool> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut s = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the path ends in NUL, the structure is ours; an all-zero one is valid.
    let s = unsafe {
        check(libc::statfs(path.as_ptr(), s.as_mut_ptr()).into())?;
        s.assume_init()
    };
    Ok(is_memory(s.f_type))
}

fn is_local(magic: impl Into<i64>) -> bool {
    LOCAL_FS.contains(&(magic.into() & 0xffff_ffff))
}

fn is_memory(magic: impl Into<i64>) -> bool {
    [TMPFS, RAMFS].contains(&magic.into())
}

/// Locks the whole file for this open of it, against everybody else's opens, until it is closed
/// (an open-file-description lock, `fcntl(2)`). Exclusive needs the file open for writing.
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

/// Alignment that direct I/O demands, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlign {
    /// Of buffers; 0 where the file has no direct I/O.
    pub(crate) memory: u32,
    /// Of addresses and lengths; 0 where the file has no direct I/O.
    pub(crate) offset: u32,
}

/// What `statx` says about direct I/O; `None` where kernel or file system do not tell.
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
    let told = s.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(told.then_some(DirectAlign { memory: s.stx_dio_mem_align, offset: s.stx_dio_offset_align }))
}

/// Fills `out` with random bytes fit for secrets.
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

/// Time since the machine booted, that which it was suspended included: `CLOCK_BOOTTIME`.
pub(crate) fn since_boot() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours and lives through the call.
    let r = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut t) };
    // A clock that fails silently would be a lease that never ends.
    check(r.into()).expect("every Linux since 2.6.39 has this clock");
    let nanoseconds = u32::try_from(t.tv_nsec).expect("less than a second");
    Duration::new(u64::try_from(t.tv_sec).expect("boot was in the past"), nanoseconds)
}

/// Processor time of this process, all its threads, since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorTime {
    /// In its own code.
    pub user: Duration,
    /// In the kernel, on its behalf.
    pub system: Duration,
    /// How often a thread of it gave its processor away, to wait.
    pub voluntary_switches: u64,
    /// How often a processor was taken from it.
    pub involuntary_switches: u64,
}

/// What this process has used so far: `getrusage(2)`.
#[must_use]
pub fn processor_time() -> ProcessorTime {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is ours; an all-zero one is valid, should the call fail, which it cannot for one's own process.
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
pub(crate) fn end_at_once() -> ! {
    // SAFETY: plain system calls about the process itself.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    // Nobody outlives that signal.
    std::process::abort()
}

/// Size of a page of memory in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: plain system call that looks up a constant.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// This thread serves a disk of this machine. Memory that it asks for is found without writing to disks
/// (`PR_SET_IO_FLUSHER`): it could be that very one. Where that is not allowed it is a thread like any other.
pub fn serves_disks() {
    if let Err(error) = flushes() {
        tracing::debug!(%error, "this thread may wait for its own disk when memory is short");
    }
}

fn flushes() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: plain system call about the thread itself.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, on, none, none, none) }.into()).map(drop)
}

/// Whether this thread may lock as much memory as it likes.
pub(crate) fn locks_freely() -> bool {
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

/// The processors a thread may run on.
#[derive(Clone, Copy)]
pub(crate) struct Processors(libc::cpu_set_t);

impl Processors {
    /// Those of the calling thread.
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        let mut set = Self::none();
        // SAFETY: the set is ours and lives through the call.
        let r = unsafe { libc::sched_getaffinity(0, size_of_val(&set.0), &raw mut set.0) };
        check(r.into()).map(|_| set)
    }

    /// One.
    pub(crate) fn one(cpu: usize) -> io::Result<Self> {
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut set = Self::none();
        // SAFETY: `cpu` lies inside the set, checked above.
        unsafe { libc::CPU_SET(cpu, &mut set.0) };
        Ok(set)
    }

    fn none() -> Self {
        // SAFETY: an all-zero set is valid and empty.
        Self(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    /// Binds the calling thread to them.
    pub(crate) fn bind_this_thread(&self) -> io::Result<()> {
        // SAFETY: the set lives through the call.
        let r = unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &raw const self.0) };
        check(r.into()).map(drop)
    }
}
