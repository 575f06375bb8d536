//! The core's side: what the volume does for the users of its file, and the end.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use block::{Account, Bufs, Class, Credit, Error, Failure, Lba, Request, Run};
use fuser::{
    Config, Errno, FileAttr, FileType, Generation, INodeNo, ReplyAttr, ReplyData, ReplyWrite,
    Session, SessionACL,
};
use rt::Core;
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::spawn_local;
use tokio::time::timeout;
use volume::Volume;

use super::door::{CHANGE_BYTES, Door, FILE};
use super::job::{Answer, Job, Node, Sought, Write, Written, Zero};
use super::mount::{self, MountError, Mounted};
use super::span::{Part, Span, covering};
use crate::Absence;
use crate::failure::errno;
use crate::parts::part_blocks;

/// Jobs on their way to the core.
const JOBS: usize = 64;

/// How often a block is read and written again because somebody else has written it meanwhile.
const TRIES: usize = 1000;

/// Most runs of a look for holes.
const RUNS: u16 = 64;

/// How long the kernel may take to mount, or to let go.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long what is told of the file holds: it is asked for each time.
const TTL: Duration = Duration::ZERO;

/// What is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the file.
    pub name: String,
    /// Who may use it: permissions of the file's owner and group, who are those of the directory, and of others.
    pub mode: u32,
    /// Whether writes are refused, even where the volume takes them.
    pub read_only: bool,
}

/// How it has come to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was told to.
    Stopped,
    /// Somebody has unmounted it.
    Unmounted,
    /// The volume is out of reach.
    Away,
}

/// Whether a process that showed volume `name` at `at` has been killed, and nobody has come after it.
pub async fn is_left(core: &Core, at: &Path, name: &str) -> bool {
    let (at, name) = (at.to_owned(), name.to_owned());
    let look = core.offload(move || mount::is_left(&at, &name));
    timeout(PATIENCE, look).await.ok().flatten().unwrap_or(false)
}

/// A file system that is mounted.
pub struct Server {
    core: Core,
    shared: Shared,
    mounted: Arc<Mounted>,
    session: Session<Door>,
    jobs: mpsc::Receiver<Job>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("mounted", &self.mounted).finish_non_exhaustive()
    }
}

struct Shared {
    volume: Rc<Volume>,
    account: Account,
    absence: Absence,
    mode: u32,
    owner: (u32, u32),
    since: SystemTime,
    /// When it was written to last, by this door.
    changed: Cell<SystemTime>,
    core: Core,
    /// Longest part of a request that is done as one, in blocks.
    part_blocks: u64,
    /// Held by a read of several parts: those that have come are kept while others wait for memory, and two such reads
    /// could wait for each other.
    one_by_one: Mutex<()>,
    /// Nothing begins any more.
    closing: Cell<bool>,
    in_flight: Cell<usize>,
    idle: Notify,
    /// Answers that are not given.
    left: RefCell<Vec<Box<dyn Any>>>,
}

impl Server {
    /// Mounts the file system in the directory `at`, which is empty, or which a process that was killed has left so. Who
    /// uses it waits until [`Self::run`].
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
        let account = core.pool().account();
        let (ask, jobs) = mpsc::channel(JOBS);
        let part_blocks = part_blocks(&info, core.pool());
        let part_bytes = part_blocks.saturating_mul(info.block_size.into());
        let door = Door {
            jobs: ask,
            account: account.clone(),
            name: options.name.clone(),
            read_only: options.read_only || info.read_only,
            block_size: info.block_size,
            // Two blocks more than it has may be in memory.
            write_bytes: u32::try_from(part_bytes).unwrap_or(u32::MAX).max(4096),
        };
        let place = at.to_owned();
        let work = core.offload(move || enter(&place, door));
        let slow = || MountError::Place { at: at.to_owned(), why: io::ErrorKind::TimedOut.into() };
        let entered = timeout(PATIENCE, work).await.ok().flatten();
        let (mounted, session) = entered.ok_or_else(slow)??;
        let now = SystemTime::UNIX_EPOCH + core.wall_clock();
        let shared = Shared {
            volume: Rc::clone(volume),
            account,
            absence: Absence::never(),
            mode: options.mode & 0o777,
            owner: mounted.owner,
            since: now,
            changed: Cell::new(now),
            core: core.clone(),
            part_blocks,
            one_by_one: Mutex::default(),
            closing: Cell::new(false),
            in_flight: Cell::new(0),
            idle: Notify::new(),
            left: RefCell::default(),
        };
        Ok(Self { core: core.clone(), shared, mounted: Arc::new(mounted), session, jobs })
    }

    /// Whether it is in the place of one that a killed process had left: what that one had sent may still be carried out.
    #[must_use]
    pub fn has_replaced(&self) -> bool {
        self.mounted.replaced
    }

    /// The same, of a volume that may come to be out of reach.
    #[must_use]
    pub fn with_absence(mut self, absence: &Absence) -> Self {
        self.shared.absence = absence.clone();
        self
    }

    /// Serves until `stop` is over, until somebody unmounts the file system, or until the volume is
    /// [out of reach](Absence). Then takes no more requests, answers what is in flight, and takes the file system away:
    /// who has the file open still is told by the kernel that the connection has been aborted. What has failed because
    /// the volume is out of reach is not answered by us. The volume is the caller's to close.
    pub async fn run(self, stop: impl Future<Output = ()>) -> End {
        let Self { core, shared, mounted, session, mut jobs } = self;
        let shared = Rc::new(shared);
        tracing::info!(at = %mounted.at().display(), "the volume is shown as a file");
        // Disks of this machine may be made of the file.
        rt::serves_disks();
        let conversation = core.offload(move || {
            rt::serves_disks();
            session.run()
        });
        let mut conversation: Pin<&mut dyn Future<Output = _>> = pin!(conversation);
        let (mut stop, mut goes_on) = (pin!(stop), true);
        let end = loop {
            tokio::select! {
                biased;
                () = &mut stop => break End::Stopped,
                () = shared.absence.certain() => break End::Away,
                ended = &mut conversation => {
                    report(ended);
                    goes_on = false;
                    break End::Unmounted;
                }
                Some(job) = jobs.recv() => shared.take(job),
            }
        };
        shared.closing.set(true);
        let drained = shared.drained();
        let mut drained = pin!(drained);
        loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(job) = jobs.recv() => shared.take(job),
            }
        }
        if goes_on {
            let parting = part(&core, &mounted, conversation, shared.absence.is_certain());
            let mut parting = pin!(parting);
            loop {
                tokio::select! {
                    biased;
                    gone = &mut parting => {
                        if !gone {
                            // The kernel gives them their answer when this process has ended.
                            shared.left.take().leak();
                        }
                        break;
                    }
                    Some(job) = jobs.recv() => shared.take(job),
                }
            }
        }
        if shared.absence.is_certain() { End::Away } else { end }
    }
}

/// Mounts, and comes to terms with the kernel.
fn enter(at: &Path, door: Door) -> Result<(Mounted, Session<Door>), MountError> {
    let (mounted, device) = Mounted::new(at, &door.name, door.read_only)?;
    let mut config = Config::default();
    // The kernel judges by the file's mode, for all.
    config.acl = SessionACL::All;
    let session = Session::from_fd(door, device, SessionACL::All, config);
    Ok((mounted, session.map_err(MountError::Handshake)?))
}

/// The thread that speaks with the kernel has ended.
fn report(ended: Option<io::Result<()>>) {
    match ended {
        Some(Ok(())) => tracing::info!("the file system has been unmounted"),
        Some(Err(error)) => tracing::warn!(%error, "the kernel is not understood any more"),
        None => tracing::error!("the file system has ended by a panic"),
    }
}

/// Takes the file system away, and waits until the kernel asks for nothing any more; whether it does not.
async fn part(
    core: &Core,
    mounted: &Arc<Mounted>,
    conversation: Pin<&mut dyn Future<Output = Option<io::Result<()>>>>,
    away: bool,
) -> bool {
    let at = mounted.at().display();
    let leaving = Arc::clone(mounted);
    // With answers that are not given it is in use.
    let left = if away { Some(Ok(false)) } else { core.offload(move || leaving.leave()).await };
    if !matches!(left, Some(Ok(true))) {
        tracing::warn!(%at, "the file is in use: its users are cut off");
        let cutting = Arc::clone(mounted);
        if let Some(Err(error)) = core.offload(move || cutting.cut()).await {
            tracing::warn!(%at, %error, "the file system cannot be taken away");
        }
    }
    let mut conversation = conversation;
    if timeout(PATIENCE, &mut conversation).await.is_ok() {
        return true;
    }
    // Somebody has taken the mount away, and somebody uses the file still.
    let cutting = Arc::clone(mounted);
    core.offload(move || cutting.abort()).await;
    let gone = timeout(PATIENCE, conversation).await.is_ok();
    if !gone {
        tracing::warn!(%at, "users of the file stay until this process has ended");
    }
    gone
}

/// Something under way, and who waits for it.
struct Flight<A: Answer> {
    shared: Rc<Shared>,
    answer: Option<A>,
}

impl<A: Answer> Flight<A> {
    fn end(mut self, result: Result<A::Given, Failure>) {
        let Some(answer) = self.answer.take() else { return };
        match result {
            Ok(given) => answer.give(given),
            Err(failure) if self.shared.absence.explains(&failure) => self.shared.leave(answer),
            Err(failure) => {
                tracing::debug!(%failure, "a request has failed");
                answer.fail(Errno::from_i32(errno(&failure).raw_os_error()));
            }
        }
    }
}

impl<A: Answer<Given = ()>> Flight<A> {
    /// A change has ended.
    fn changed(self, result: Result<(), Failure>) {
        if result.is_ok() {
            self.shared.changed.set(SystemTime::UNIX_EPOCH + self.shared.core.wall_clock());
        }
        self.end(result);
    }
}

impl<A: Answer> Drop for Flight<A> {
    fn drop(&mut self) {
        // Before it is known that nothing is in flight.
        drop(self.answer.take());
        self.shared.in_flight.update(|n| n - 1);
        if self.shared.in_flight.get() == 0 {
            self.shared.idle.notify_waiters();
        }
    }
}

impl Shared {
    fn take(self: &Rc<Self>, job: Job) {
        match job {
            Job::Entry(node, reply) => reply.entry(&TTL, &self.attributes(node), Generation(0)),
            Job::Attributes(node, reply) => reply.attr(&TTL, &self.attributes(node)),
            Job::Resize(size, reply) => self.resize(size, reply),
            Job::Space(reply) => {
                let info = self.volume.info();
                let size = info.block_size;
                reply.statfs(info.blocks, 0, 0, 1, 0, size, 255, size);
            }
            Job::Memory(bytes, give) => {
                let account = self.account.clone();
                spawn_local(async move {
                    if let Ok(credit) = account.credit(bytes, Class::Read).await {
                        // Who has waited may have gone.
                        drop(give.send(credit));
                    }
                });
            }
            Job::Read(at, len, reply) => self.read(at, len, reply),
            Job::Write(write, reply) => self.write(write, reply),
            Job::Flush(reply) => {
                let Some(flight) = self.begin(reply) else { return };
                self.start(Request::Flush, move |done| flight.end(done.map(drop)));
            }
            Job::Zero(zero, reply) => self.zero(zero, reply),
            Job::Seek(from, sought, reply) => {
                let Some(flight) = self.begin(reply) else { return };
                let shared = Rc::clone(self);
                spawn_local(async move { flight.end(shared.seek(from, sought).await) });
            }
        }
    }

    /// It begins, unless nothing does any more: then it is not answered, but ends with the connection.
    fn begin<A: Answer>(self: &Rc<Self>, answer: A) -> Option<Flight<A>> {
        if self.closing.get() {
            self.leave(answer);
            return None;
        }
        self.in_flight.update(|n| n + 1);
        Some(Flight { shared: Rc::clone(self), answer: Some(answer) })
    }

    fn leave(&self, answer: impl Any) {
        self.left.borrow_mut().push(Box::new(answer));
    }

    /// Waits until nothing is in flight.
    async fn drained(&self) {
        loop {
            let idle = self.idle.notified();
            if self.in_flight.get() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn start(&self, request: Request, done: impl FnOnce(Result<Bufs, Failure>) + 'static) {
        self.volume.start(request, &self.account, done);
    }

    async fn execute(&self, request: Request) -> Result<Bufs, Failure> {
        self.volume.execute(request, &self.account).await
    }

    fn attributes(&self, node: Node) -> FileAttr {
        let info = self.volume.info();
        let bytes = info.bytes();
        let (ino, size, kind, mode, nlink, changed) = match node {
            Node::Root => (INodeNo::ROOT, 0, FileType::Directory, 0o555, 2, self.since),
            Node::File => (FILE, bytes, FileType::RegularFile, self.mode, 1, self.changed.get()),
        };
        FileAttr {
            ino,
            size,
            // What of it has space behind it is nothing that a volume counts.
            blocks: size.div_ceil(512),
            atime: self.since,
            mtime: changed,
            ctime: changed,
            crtime: self.since,
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

    /// The volume has the size that it has.
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
            return flight.end(Ok(Bufs::new()));
        }
        let (range, lead) = covering(at, len, info.block_size);
        let wanted = lead..lead + usize::try_from(len).unwrap_or(0);
        if range.count <= self.part_blocks {
            let done = move |read: Result<Bufs, _>| flight.end(read.map(|d| d.slice(wanted)));
            return self.start(Request::Read { range }, done);
        }
        let shared = Rc::clone(self);
        spawn_local(async move {
            let _turn = shared.one_by_one.lock().await;
            let mut all = Bufs::new();
            for range in range.pieces(shared.part_blocks) {
                match shared.execute(Request::Read { range }).await {
                    Ok(data) => all.append(data),
                    Err(failure) => return flight.end(Err(failure)),
                }
            }
            flight.end(Ok(all.slice(wanted)));
        });
    }

    fn write(self: &Rc<Self>, write: Write, reply: ReplyWrite) {
        let info = self.volume.info();
        let room = info.bytes().saturating_sub(write.at);
        let asked = (write.data.len() - write.lead) as u64;
        let len = asked.min(room);
        if len < asked && len == 0 {
            // As a disk says it.
            return reply.error(Errno::ENOSPC);
        }
        let written = Written(reply, u32::try_from(len).unwrap_or(0));
        let Some(flight) = self.begin(written) else { return };
        let span = Span::new(write.at, len, info.block_size);
        if span.is_whole() && span.body.count <= self.part_blocks {
            let data = write.data.slice(0..usize::try_from(len).unwrap_or(0));
            let request = Request::Write { at: span.body.at, data, fua: write.durable };
            return self.start(request, move |done| flight.changed(done.map(drop)));
        }
        let shared = Rc::clone(self);
        spawn_local(async move { flight.changed(shared.write_span(&span, &write).await) });
    }

    /// Writes what begins or ends within a block, or is more than one part. It is not done as one, but each block is.
    async fn write_span(&self, span: &Span, write: &Write) -> Result<(), Failure> {
        let each = self.volume.info().block_size as usize;
        let mut done = write.lead;
        if let Some(part) = span.head {
            let data = write.data.slice(done..done + part.bytes);
            self.change(part, Some(&data), &write.credit, write.durable).await?;
            done += part.bytes;
        }
        for piece in span.body.pieces(self.part_blocks) {
            let end = done + usize::try_from(piece.count).unwrap_or(0) * each;
            let data = write.data.slice(done..end);
            self.execute(Request::Write { at: piece.at, data, fua: write.durable }).await?;
            done = end;
        }
        if let Some(part) = span.tail {
            let data = write.data.slice(done..done + part.bytes);
            self.change(part, Some(&data), &write.credit, write.durable).await?;
        }
        Ok(())
    }

    /// Changes a part of a block, to `data` or to zeroes, and leaves the rest as it is: it is written if it is still what
    /// was read, in one step.
    async fn change(
        &self,
        part: Part,
        data: Option<&Bufs>,
        credit: &Credit,
        fua: bool,
    ) -> Result<(), Failure> {
        let range = block::Blocks::new(part.at, 1);
        for _ in 0..TRIES {
            let read = self.volume.execute_within(Request::Read { range }, &self.account).await?;
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
                // Somebody else has got on.
                Err(Failure::Miscompare { .. }) => {}
                done => return done.map(drop),
            }
        }
        tracing::warn!(block = %part.at, "a block is never what it was when it was read");
        Err(Error::Aborted.into())
    }

    fn zero(self: &Rc<Self>, zero: Zero, reply: fuser::ReplyEmpty) {
        let info = self.volume.info();
        let Some(end) = zero.at.checked_add(zero.len) else { return reply.error(Errno::EFBIG) };
        if zero.grows && end > info.bytes() {
            return reply.error(Errno::EFBIG);
        }
        let Some(flight) = self.begin(reply) else { return };
        let len = end.min(info.bytes()).saturating_sub(zero.at);
        let span = Span::new(zero.at, len, info.block_size);
        let request = Request::Zero { range: span.body, unmap: zero.unmap, fua: false };
        if span.is_whole() && len > 0 {
            return self.start(request, move |done| flight.changed(done.map(drop)));
        }
        let shared = Rc::clone(self);
        spawn_local(async move { flight.changed(shared.zero_span(&span, request).await) });
    }

    async fn zero_span(&self, span: &Span, body: Request) -> Result<(), Failure> {
        let credit = self.account.credit(CHANGE_BYTES, Class::Read).await;
        let credit = credit.map_err(|_| Failure::Device(Error::OutOfRange))?;
        if let Some(part) = span.head {
            self.change(part, None, &credit, false).await?;
        }
        if span.body.count > 0 {
            self.execute(body).await?;
        }
        if let Some(part) = span.tail {
            self.change(part, None, &credit, false).await?;
        }
        Ok(())
    }

    /// Where the next data is from byte `from` on, or the next hole; the end of the file is one. `None` where there is
    /// none, or nothing at all.
    async fn seek(&self, from: u64, sought: Sought) -> Result<Option<u64>, Failure> {
        let info = self.volume.info();
        let (each, bytes) = (u64::from(info.block_size), info.bytes());
        if from >= bytes {
            return Ok(None);
        }
        let mut at = from / each;
        while at < info.blocks {
            let range = block::Blocks::new(Lba(at), info.blocks - at);
            let found = self.execute(Request::Map { range, most: RUNS }).await?;
            let runs = Run::all_of(&found);
            // One that tells nothing has data, for all that is known.
            let unknown = [Run { blocks: u32::MAX, mapped: true }];
            let runs = if runs.is_empty() { &unknown[..] } else { &runs };
            for run in runs {
                if run.mapped == (sought == Sought::Data) {
                    return Ok(Some(from.max(at * each)));
                }
                at = at.saturating_add(run.blocks.into());
            }
        }
        Ok((sought == Sought::Hole).then_some(bytes))
    }
}
