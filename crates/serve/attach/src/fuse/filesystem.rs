//! Handles the kernel's requests on the thread that reads them. What needs the volume goes to its
//! core, which answers the kernel itself.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use block::{Account, Bufs, BufsMut, Credit, MemoryClass};
use fuser::{
    BsdFileFlags, Errno, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{FallocateFlags, OFlags};
use tokio::sync::{mpsc, oneshot};

use super::job::{FuseJob, Node, SeekKind, WriteJob, ZeroJob};

/// The file's number.
pub(super) const FILE_INODE: INodeNo = INodeNo(2);

/// Most asynchronous requests (`io_submit` and the like) that the kernel has in flight.
const MAX_BACKGROUND: u16 = 64;

/// Allocation unit, in bytes.
const PAGE: usize = 4096;

/// Memory for changing part of a block: its old and its new contents.
pub(super) const PARTIAL_BLOCK_BYTES: usize = 2 * PAGE;

/// Values of lseek(2).
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// The file system, as the kernel sees it.
pub(super) struct VolumeFilesystem {
    pub(super) jobs: mpsc::Sender<FuseJob>,
    pub(super) account: Account,
    pub(super) name: String,
    pub(super) read_only: bool,
    pub(super) block_size: u32,
    /// Longest write.
    pub(super) write_bytes: u32,
}

impl VolumeFilesystem {
    /// Sends a job to the core. If the core has gone, the job is dropped, which answers it with an
    /// error.
    fn send_job(&self, job: FuseJob) {
        drop(self.jobs.blocking_send(job));
    }

    /// Memory for the data of a write. No other request is read meanwhile, just as an NBD server
    /// stops receiving. This thread holds no memory, so the wait ends.
    fn memory(&self, bytes: usize) -> Option<Credit> {
        if let Some(credit) = self.account.try_credit(bytes, MemoryClass::Read) {
            return Some(credit);
        }
        let (give, given) = oneshot::channel();
        self.send_job(FuseJob::Memory(bytes, give));
        given.blocking_recv().ok()
    }

    fn node(&self, parent: INodeNo, name: &OsStr) -> Option<Node> {
        (parent == INodeNo::ROOT && name == OsStr::new(&self.name)).then_some(Node::File)
    }
}

fn node(number: INodeNo) -> Node {
    if number == FILE_INODE { Node::File } else { Node::Root }
}

fn fill(to: &mut BufsMut, lead: usize, mut data: &[u8]) {
    let mut skip = lead;
    for run in to {
        let begin = skip.min(run.len());
        skip -= begin;
        let (now, later) = data.split_at((run.len() - begin).min(data.len()));
        run[begin..begin + now.len()].copy_from_slice(now);
        data = later;
    }
}

impl Filesystem for VolumeFilesystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let unfit = |_| io::Error::from(io::ErrorKind::Unsupported);
        config.set_max_write(self.write_bytes).map_err(unfit)?;
        config.set_max_background(MAX_BACKGROUND).map_err(|_| io::ErrorKind::Unsupported)?;
        // Without it, requests run one after the other.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.node(parent, name) {
            Some(node) => self.send_job(FuseJob::Lookup(node, reply)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.send_job(FuseJob::Attributes(node(ino), reply));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match size {
            _ if mode.or(uid).or(gid).is_some() => reply.error(Errno::EPERM),
            Some(size) => self.send_job(FuseJob::Resize(size, reply)),
            // Times cannot be set, but a tool that sets them must not fail.
            None => self.send_job(FuseJob::Attributes(node(ino), reply)),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Another node may write at any time: the kernel must not cache.
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.send_job(FuseJob::Read(offset, size, reply));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.read_only {
            return reply.error(Errno::EROFS);
        }
        let block = self.block_size as usize;
        let lead = usize::try_from(offset % u64::from(self.block_size)).unwrap_or(0);
        let bytes = lead + data.len();
        let is_whole = lead == 0 && bytes.is_multiple_of(block);
        // Memory is allocated in pages.
        let more = if is_whole { 0 } else { PARTIAL_BLOCK_BYTES };
        let Some(credit) = self.memory(bytes.next_multiple_of(PAGE) + more) else {
            return reply.error(Errno::ENOMEM);
        };
        let mut buffers = credit.alloc(bytes);
        fill(&mut buffers, lead, data);
        let durable = OFlags::from_bits_retain(flags.0.cast_unsigned()).contains(OFlags::DSYNC);
        let write = WriteJob {
            at: offset,
            data: Bufs::from(buffers),
            leading_bytes: lead,
            credit,
            durable,
        };
        self.send_job(FuseJob::Write(write, reply));
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.send_job(FuseJob::Flush(reply));
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        let keeps = FallocateFlags::KEEP_SIZE;
        let unmap = mode == FallocateFlags::PUNCH_HOLE | keeps;
        if self.read_only {
            reply.error(Errno::EROFS);
        } else if unmap || mode.difference(keeps) == FallocateFlags::ZERO_RANGE {
            let grows = !mode.contains(keeps);
            self.send_job(FuseJob::Zero(
                ZeroJob { at: offset, len: length, unmap, extends_file: grows },
                reply,
            ));
        } else {
            // A volume cannot allocate space without changing contents.
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let sought = match whence {
            SEEK_DATA => SeekKind::Data,
            SEEK_HOLE => SeekKind::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        match u64::try_from(offset) {
            Ok(from) => self.send_job(FuseJob::Seek(from, sought, reply)),
            Err(_) => reply.error(Errno::ENXIO),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let root = (INodeNo::ROOT, FileType::Directory);
        let file = (FILE_INODE, FileType::RegularFile);
        let all = [(root, "."), (root, ".."), (file, self.name.as_str())];
        for (((number, kind), name), next) in all.into_iter().zip(1..) {
            if next > offset && reply.add(number, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.send_job(FuseJob::StatFs(reply));
    }

    // The file cannot be removed, nor others created.

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }

    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    // The kernel does not repeat requests answered like this.

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
