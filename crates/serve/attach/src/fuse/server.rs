//! The core's side: executes requests, and stops.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use block::{Account, BlockStatus, Bufs, Credit, Error, Lba, MemoryClass, Request, RequestError};
use fuser::{
    Config, Errno, FileAttr, FileType, Generation, INodeNo, ReplyAttr, ReplyData, ReplyWrite,
    Session, SessionACL,
};
use rt::Core;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::spawn_local;
use tokio::time::timeout;
use volume::Volume;

use super::filesystem::{FILE_INODE, PARTIAL_BLOCK_BYTES, VolumeFilesystem};
use super::job::{FuseJob, FuseReply, Node, SeekKind, WriteJob, WriteReply, ZeroJob};
use super::mount::{self, MountError, Mounted};
use super::span::{BlockSpan, PartialBlock, covering};
use crate::OutageSignal;
use crate::failure::errno;
use crate::request_split::part_blocks;

/// Length of the queue of jobs to the core.
const JOB_QUEUE_LEN: usize = 64;

/// How often a read-modify-write is retried because another write came between.
const MAX_CAS_RETRIES: usize = 1000;

/// Most extents of one query for holes.
const MAX_SEEK_RUNS: u16 = 64;

/// Time limit of mounting and unmounting.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the kernel may cache attributes: not at all.
const TTL: Duration = Duration::ZERO;

/// Options of the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the file.
    pub name: String,
    /// Permissions of the file; its owner and group are the directory's.
    pub mode: u32,
    /// Whether writes are refused, even if the volume allows them.
    pub read_only: bool,
}

/// Why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeEnd {
    /// The caller stopped it.
    Stopped,
    /// It was unmounted from outside.
    Unmounted,
    /// The volume is unreachable.
    Unreachable,
}

/// Whether a process that had mounted volume `name` at `at` was killed and not replaced.
pub async fn is_stale(core: &Core, at: &Path, name: &str) -> bool {
    let (at, name) = (at.to_owned(), name.to_owned());
    let look = core.run_blocking(move || mount::is_stale(&at, &name));
    timeout(KERNEL_TIMEOUT, look).await.ok().flatten().unwrap_or(false)
}

/// A mounted file system.
pub struct Server {
    core: Core,
    shared: FuseShared,
    mounted: Arc<Mounted>,
    session: Session<VolumeFilesystem>,
    jobs: mpsc::Receiver<FuseJob>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("mounted", &self.mounted).finish_non_exhaustive()
    }
}

struct FuseShared {
    volume: Rc<Volume>,
    account: Account,
    outage: OutageSignal,
    mode: u32,
    owner: (u32, u32),
    mounted_at: SystemTime,
    /// When the file was last written through this server.
    modified_at: Cell<SystemTime>,
    core: Core,
    /// Longest part of a request that is executed at once, in blocks.
    part_blocks: u64,
    /// Held by a read of several parts: it keeps its first parts while it waits for memory, so two
    /// such reads could deadlock.
    multipart_read_lock: Mutex<()>,
    /// No new requests are started.
    closing: Cell<bool>,
    in_flight: Cell<usize>,
    idle: Notify,
    /// Answers withheld.
    unanswered: RefCell<Vec<Box<dyn Any>>>,
}

impl Server {
    /// Mounts the file system on the directory `at`, which is empty or was left mounted by a killed
    /// process. Its users wait until [`Self::run`].
    ///
    /// # Errors
    /// [`MountError`].
    pub async fn mount(
        core: &Core,
        volume: &Rc<Volume>,
        at: &Path,
        options: Options,
    ) -> Result<Self, MountError> {
        let info = volume.info();
        let account = core.buffer_pool().account();
        let (ask, jobs) = mpsc::channel(JOB_QUEUE_LEN);
        let part_blocks = part_blocks(&info, core.buffer_pool());
        let part_bytes = part_blocks.saturating_mul(info.block_size.into());
        let door = VolumeFilesystem {
            jobs: ask,
            account: account.clone(),
            name: options.name.clone(),
            read_only: options.read_only || info.read_only,
            block_size: info.block_size,
            // Up to two more blocks may be in memory.
            write_bytes: u32::try_from(part_bytes).unwrap_or(u32::MAX).max(4096),
        };
        let place = at.to_owned();
        let work = core.run_blocking(move || mount_and_handshake(&place, door));
        let slow =
            || MountError::Directory { at: at.to_owned(), why: io::ErrorKind::TimedOut.into() };
        let entered = timeout(KERNEL_TIMEOUT, work).await.ok().flatten();
        let (mounted, session) = entered.ok_or_else(slow)??;
        let now = SystemTime::UNIX_EPOCH + core.wall_clock();
        let shared = FuseShared {
            volume: Rc::clone(volume),
            account,
            outage: OutageSignal::never(),
            mode: options.mode & 0o777,
            owner: mounted.owner,
            mounted_at: now,
            modified_at: Cell::new(now),
            core: core.clone(),
            part_blocks,
            multipart_read_lock: Mutex::default(),
            closing: Cell::new(false),
            in_flight: Cell::new(0),
            idle: Notify::new(),
            unanswered: RefCell::default(),
        };
        Ok(Self { core: core.clone(), shared, mounted: Arc::new(mounted), session, jobs })
    }

    /// Whether it replaced a mount of a killed process, whose last writes may still take effect.
    #[must_use]
    pub fn replaced_stale(&self) -> bool {
        self.mounted.replaced
    }

    /// The same for a volume that may become unreachable.
    #[must_use]
    pub fn with_outage_signal(mut self, absence: &OutageSignal) -> Self {
        self.shared.outage = absence.clone();
        self
    }

    /// Serves until `stop` completes, the file system is unmounted, or the volume is
    /// [unreachable](OutageSignal). Then starts no new requests, answers those in flight, and
    /// unmounts: users with the file open get an aborted connection from the kernel. Requests that
    /// failed because the volume is unreachable are not answered. The caller closes the volume.
    pub async fn run(self, stop: impl Future<Output = ()>) -> ServeEnd {
        let Self { core, shared, mounted, session, mut jobs } = self;
        let shared = Rc::new(shared);
        tracing::info!(at = %mounted.at().display(), "the volume is mounted as a file");
        // Local disks may be built on the file.
        rt::set_io_flusher();
        let conversation = core.run_blocking(move || {
            rt::set_io_flusher();
            session.run()
        });
        let mut conversation: Pin<&mut dyn Future<Output = _>> = pin!(conversation);
        let (mut stop, mut goes_on) = (pin!(stop), true);
        let end = loop {
            tokio::select! {
                biased;
                () = &mut stop => break ServeEnd::Stopped,
                () = shared.outage.wait() => break ServeEnd::Unreachable,
                ended = &mut conversation => {
                    report(ended);
                    goes_on = false;
                    break ServeEnd::Unmounted;
                }
                Some(job) = jobs.recv() => shared.handle(job),
            }
        };
        shared.closing.set(true);
        let drained = shared.wait_idle();
        let mut drained = pin!(drained);
        loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(job) = jobs.recv() => shared.handle(job),
            }
        }
        if goes_on {
            let parting = unmount(&core, &mounted, conversation, shared.outage.is_set());
            let mut parting = pin!(parting);
            loop {
                tokio::select! {
                    biased;
                    gone = &mut parting => {
                        if !gone {
                            // The kernel answers them when this process exits.
                            shared.unanswered.take().leak();
                        }
                        break;
                    }
                    Some(job) = jobs.recv() => shared.handle(job),
                }
            }
        }
        if shared.outage.is_set() { ServeEnd::Unreachable } else { end }
    }
}

/// Mounts, and does the handshake with the kernel.
fn mount_and_handshake(
    at: &Path,
    door: VolumeFilesystem,
) -> Result<(Mounted, Session<VolumeFilesystem>), MountError> {
    let (mounted, device) = Mounted::new(at, &door.name, door.read_only)?;
    let mut config = Config::default();
    // The kernel checks the file's mode, for all users.
    config.acl = SessionACL::All;
    let session = Session::from_fd(door, device, SessionACL::All, config);
    Ok((mounted, session.map_err(MountError::Handshake)?))
}

/// Reports the end of the thread that handles the kernel's requests.
fn report(ended: Option<io::Result<()>>) {
    match ended {
        Some(Ok(())) => tracing::info!("the file system has been unmounted"),
        Some(Err(error)) => tracing::warn!(%error, "a request of the kernel is malformed"),
        None => tracing::error!("the file system has ended by a panic"),
    }
}

/// Unmounts, and waits for the kernel's last request. Returns whether requests may still come.
async fn unmount(
    core: &Core,
    mounted: &Arc<Mounted>,
    conversation: Pin<&mut dyn Future<Output = Option<io::Result<()>>>>,
    away: bool,
) -> bool {
    let at = mounted.at().display();
    let leaving = Arc::clone(mounted);
    // Withheld answers keep it in use.
    let left = if away {
        Some(Ok(false))
    } else {
        core.run_blocking(move || leaving.unmount_if_unused()).await
    };
    if !matches!(left, Some(Ok(true))) {
        tracing::warn!(%at, "the file is in use: disconnecting its users");
        let cutting = Arc::clone(mounted);
        if let Some(Err(error)) = core.run_blocking(move || cutting.unmount_forced()).await {
            tracing::warn!(%at, %error, "the file system cannot be unmounted");
        }
    }
    let mut conversation = conversation;
    if timeout(KERNEL_TIMEOUT, &mut conversation).await.is_ok() {
        return true;
    }
    // It was unmounted from outside while the file is still open.
    let cutting = Arc::clone(mounted);
    core.run_blocking(move || cutting.abort()).await;
    let gone = timeout(KERNEL_TIMEOUT, conversation).await.is_ok();
    if !gone {
        tracing::warn!(%at, "users of the file remain until this process ends");
    }
    gone
}

/// A request in flight, and its answer.
struct InFlightRequest<A: FuseReply> {
    shared: Rc<FuseShared>,
    answer: Option<A>,
}

impl<A: FuseReply> InFlightRequest<A> {
    fn complete(mut self, result: Result<A::Value, RequestError>) {
        let Some(answer) = self.answer.take() else { return };
        match result {
            Ok(given) => answer.reply(given),
            Err(failure) if self.shared.outage.set_if_cause(&failure) => {
                self.shared.keep_unanswered(answer);
            }
            Err(failure) => {
                tracing::debug!(%failure, "a request has failed");
                answer.fail(Errno::from_i32(errno(&failure).raw_os_error()));
            }
        }
    }
}

impl<A: FuseReply<Value = ()>> InFlightRequest<A> {
    /// Completes a change.
    fn complete_change(self, result: Result<(), RequestError>) {
        if result.is_ok() {
            self.shared.modified_at.set(SystemTime::UNIX_EPOCH + self.shared.core.wall_clock());
        }
        self.complete(result);
    }
}

impl<A: FuseReply> Drop for InFlightRequest<A> {
    fn drop(&mut self) {
        // Drop it before the request counts as finished.
        drop(self.answer.take());
        self.shared.in_flight.update(|n| n - 1);
        if self.shared.in_flight.get() == 0 {
            self.shared.idle.notify_waiters();
        }
    }
}

impl FuseShared {
    fn handle(self: &Rc<Self>, job: FuseJob) {
        match job {
            FuseJob::Lookup(node, reply) => {
                reply.entry(&TTL, &self.attributes(node), Generation(0));
            }
            FuseJob::Attributes(node, reply) => reply.attr(&TTL, &self.attributes(node)),
            FuseJob::Resize(size, reply) => self.resize(size, reply),
            FuseJob::StatFs(reply) => {
                let info = self.volume.info();
                let size = info.block_size;
                reply.statfs(info.blocks, 0, 0, 1, 0, size, 255, size);
            }
            FuseJob::Memory(bytes, give) => {
                let account = self.account.clone();
                spawn_local(async move {
                    if let Ok(credit) = account.credit(bytes, MemoryClass::Read).await {
                        // The waiting thread may have ended.
                        drop(give.send(credit));
                    }
                });
            }
            FuseJob::Read(at, len, reply) => self.read(at, len, reply),
            FuseJob::Write(write, reply) => self.write(write, reply),
            FuseJob::Flush(reply) => {
                let Some(flight) = self.begin(reply) else { return };
                self.start(Request::Flush, move |done| flight.complete(done.map(drop)));
            }
            FuseJob::Zero(zero, reply) => self.zero(zero, reply),
            FuseJob::Seek(from, sought, reply) => {
                let Some(flight) = self.begin(reply) else { return };
                let shared = Rc::clone(self);
                spawn_local(async move { flight.complete(shared.seek(from, sought).await) });
            }
        }
    }

    /// Starts a request; `None` while closing: then it is not answered but ends with the
    /// connection.
    fn begin<A: FuseReply>(self: &Rc<Self>, answer: A) -> Option<InFlightRequest<A>> {
        if self.closing.get() {
            self.keep_unanswered(answer);
            return None;
        }
        self.in_flight.update(|n| n + 1);
        Some(InFlightRequest { shared: Rc::clone(self), answer: Some(answer) })
    }

    fn keep_unanswered(&self, answer: impl Any) {
        self.unanswered.borrow_mut().push(Box::new(answer));
    }

    /// Waits until nothing is in flight.
    async fn wait_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.in_flight.get() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn start(&self, request: Request, done: impl FnOnce(Result<Bufs, RequestError>) + 'static) {
        self.volume.start(request, &self.account, done);
    }

    async fn execute(&self, request: Request) -> Result<Bufs, RequestError> {
        self.volume.execute(request, &self.account).await
    }

    fn attributes(&self, node: Node) -> FileAttr {
        let info = self.volume.info();
        let bytes = info.bytes();
        let (ino, size, kind, mode, nlink, changed) = match node {
            Node::Root => (INodeNo::ROOT, 0, FileType::Directory, 0o555, 2, self.mounted_at),
            Node::File => {
                (FILE_INODE, bytes, FileType::RegularFile, self.mode, 1, self.modified_at.get())
            }
        };
        FileAttr {
            ino,
            size,
            // Volumes do not count allocated space.
            blocks: size.div_ceil(512),
            atime: self.mounted_at,
            mtime: changed,
            ctime: changed,
            crtime: self.mounted_at,
            kind,
            perm: u16::try_from(mode).unwrap_or(0),
            nlink,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: info.physical_block_size.max(4096),
            flags: 0,
        }
    }

    /// Answers a resize: only the volume's size is allowed.
    fn resize(&self, size: u64, reply: ReplyAttr) {
        if size == self.volume.info().bytes() {
            reply.attr(&TTL, &self.attributes(Node::File));
        } else {
            reply.error(Errno::EPERM);
        }
    }

    fn read(self: &Rc<Self>, at: u64, len: u32, reply: ReplyData) {
        let Some(flight) = self.begin(reply) else { return };
        let info = self.volume.info();
        let len = u64::from(len).min(info.bytes().saturating_sub(at));
        if len == 0 {
            return flight.complete(Ok(Bufs::new()));
        }
        let (range, lead) = covering(at, len, info.block_size);
        let wanted = lead..lead + usize::try_from(len).unwrap_or(0);
        if range.count <= self.part_blocks {
            let done = move |read: Result<Bufs, _>| flight.complete(read.map(|d| d.slice(wanted)));
            return self.start(Request::Read { range }, done);
        }
        let shared = Rc::clone(self);
        spawn_local(async move {
            let _turn = shared.multipart_read_lock.lock().await;
            let mut all = Bufs::new();
            for range in range.chunks(shared.part_blocks) {
                match shared.execute(Request::Read { range }).await {
                    Ok(data) => all.append(data),
                    Err(failure) => return flight.complete(Err(failure)),
                }
            }
            flight.complete(Ok(all.slice(wanted)));
        });
    }

    fn write(self: &Rc<Self>, write: WriteJob, reply: ReplyWrite) {
        let info = self.volume.info();
        let room = info.bytes().saturating_sub(write.at);
        let asked = (write.data.len() - write.leading_bytes) as u64;
        let len = asked.min(room);
        if len < asked && len == 0 {
            // As a disk reports it.
            return reply.error(Errno::ENOSPC);
        }
        let written = WriteReply(reply, u32::try_from(len).unwrap_or(0));
        let Some(flight) = self.begin(written) else { return };
        let span = BlockSpan::new(write.at, len, info.block_size);
        if span.is_whole() && span.body.count <= self.part_blocks {
            let data = write.data.slice(0..usize::try_from(len).unwrap_or(0));
            let request = Request::Write { at: span.body.at, data, fua: write.durable };
            return self.start(request, move |done| flight.complete_change(done.map(drop)));
        }
        let shared = Rc::clone(self);
        spawn_local(async move { flight.complete_change(shared.write_span(&span, &write).await) });
    }

    /// Writes a range that begins or ends within a block, or has several parts. Not atomic as a
    /// whole, but each block is.
    async fn write_span(&self, span: &BlockSpan, write: &WriteJob) -> Result<(), RequestError> {
        let each = self.volume.info().block_size as usize;
        let mut done = write.leading_bytes;
        if let Some(part) = span.head {
            let data = write.data.slice(done..done + part.bytes);
            self.modify_block(part, Some(&data), &write.credit, write.durable).await?;
            done += part.bytes;
        }
        for piece in span.body.chunks(self.part_blocks) {
            let end = done + usize::try_from(piece.count).unwrap_or(0) * each;
            let data = write.data.slice(done..end);
            self.execute(Request::Write { at: piece.at, data, fua: write.durable }).await?;
            done = end;
        }
        if let Some(part) = span.tail {
            let data = write.data.slice(done..done + part.bytes);
            self.modify_block(part, Some(&data), &write.credit, write.durable).await?;
        }
        Ok(())
    }

    /// Changes a part of a block to `data` or to zeroes and leaves the rest: reads it, and writes
    /// it with compare-and-write.
    async fn modify_block(
        &self,
        part: PartialBlock,
        data: Option<&Bufs>,
        credit: &Credit,
        fua: bool,
    ) -> Result<(), RequestError> {
        let range = block::Blocks::new(part.at, 1);
        for _ in 0..MAX_CAS_RETRIES {
            let read = self.volume.execute_nested(Request::Read { range }, &self.account).await?;
            let [mut compare, mut block] = [(); 2].map(|()| credit.alloc_page(read.len()));
            read.copy_to(&mut compare);
            drop(read);
            block.copy_from_slice(&compare);
            let changed = &mut block[part.from..part.from + part.bytes];
            match data {
                Some(data) => data.copy_to(changed),
                None => changed.fill(0),
            }
            let (compare, write) = (Bufs::from(compare), Bufs::from(block));
            let request = Request::CompareAndWrite { at: part.at, compare, write, fua };
            match self.execute(request).await {
                // Another write came between.
                Err(RequestError::Miscompare { .. }) => {}
                done => return done.map(drop),
            }
        }
        tracing::warn!(block = %part.at, "a partial block write kept losing races");
        Err(Error::Aborted.into())
    }

    fn zero(self: &Rc<Self>, zero: ZeroJob, reply: fuser::ReplyEmpty) {
        let info = self.volume.info();
        let Some(end) = zero.at.checked_add(zero.len) else { return reply.error(Errno::EFBIG) };
        if zero.extends_file && end > info.bytes() {
            return reply.error(Errno::EFBIG);
        }
        let Some(flight) = self.begin(reply) else { return };
        let len = end.min(info.bytes()).saturating_sub(zero.at);
        let span = BlockSpan::new(zero.at, len, info.block_size);
        let request = Request::Zero { range: span.body, unmap: zero.unmap, fua: false };
        if span.is_whole() && len > 0 {
            return self.start(request, move |done| flight.complete_change(done.map(drop)));
        }
        let shared = Rc::clone(self);
        spawn_local(async move { flight.complete_change(shared.zero_span(&span, request).await) });
    }

    async fn zero_span(&self, span: &BlockSpan, body: Request) -> Result<(), RequestError> {
        let credit = self.account.credit(PARTIAL_BLOCK_BYTES, MemoryClass::Read).await;
        let credit = credit.map_err(|_| RequestError::Device(Error::OutOfRange))?;
        if let Some(part) = span.head {
            self.modify_block(part, None, &credit, false).await?;
        }
        if span.body.count > 0 {
            self.execute(body).await?;
        }
        if let Some(part) = span.tail {
            self.modify_block(part, None, &credit, false).await?;
        }
        Ok(())
    }

    /// The position of the next data or hole from byte `from` on; the end of the file counts as a
    /// hole. `None` if there is none or the position is past the end.
    async fn seek(&self, from: u64, sought: SeekKind) -> Result<Option<u64>, RequestError> {
        let info = self.volume.info();
        let (each, bytes) = (u64::from(info.block_size), info.bytes());
        if from >= bytes {
            return Ok(None);
        }
        let mut at = from / each;
        while at < info.blocks {
            let range = block::Blocks::new(Lba(at), info.blocks - at);
            let found =
                self.execute(Request::BlockStatus { range, max_runs: MAX_SEEK_RUNS }).await?;
            let runs = BlockStatus::from_bufs(&found);
            // Without an answer, assume data.
            let unknown = [BlockStatus { blocks: u32::MAX, mapped: true }];
            let runs = if runs.is_empty() { &unknown[..] } else { &runs };
            for run in runs {
                if run.mapped == (sought == SeekKind::Data) {
                    return Ok(Some(from.max(at * each)));
                }
                at = at.saturating_add(run.blocks.into());
            }
        }
        Ok((sought == SeekKind::Hole).then_some(bytes))
    }
}
