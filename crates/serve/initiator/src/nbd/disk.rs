//! An export, as a layer.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ::nbd::client::{
    self, CommandError, Config, Connection, NegotiatedExport, Op as Command, Reply,
};
use ::nbd::message::flag;
use ::nbd::{Address, Errno};
use block::{BlockStatus, Bufs, Ctx, Error, Info, Layer, Lba, Op};
use rt::Core;
use tokio::task::spawn_local;
use tokio::time::timeout;
use tracing::warn;

use super::link::{ConnectionEnd, Link};
use super::options::Options;
use crate::connection::Staging;

/// Largest transfer, in bytes, even if the server allows more: what every server must support.
const MAX_TRANSFER_BYTES: u32 = 32 << 20;

/// Longest range of a command without data, in bytes; less if the server refuses it.
const MAX_DATALESS_BYTES: u32 = 1 << 30;

/// Largest physical block that makes sense, in bytes.
const MAX_PHYSICAL_BYTES: u32 = 1 << 20;

/// Why a server's export cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Dialling failed.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// It took too long.
    #[error("timed out")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(ConnectionEnd),
    /// Unsupported block size.
    #[error("its blocks of {0} bytes are too large")]
    Blocks(u32),
    /// It is too small or too large.
    #[error("its size of {0} bytes is unusable")]
    Size(u64),
    /// A further connection reported other properties: it may be another export.
    #[error("two connections get different parameters of the export")]
    Inconsistent,
}

/// An export of an NBD server. Fails permanently once one of its connections has ended.
pub struct Disk {
    links: Vec<Link>,
    negotiated: NegotiatedExport,
    info: Info,
    state: DiskHandle,
    /// Longest range of a command without data that the server has not refused.
    dataless_bytes: Cell<u32>,
    command_timeout: Duration,
}

/// Whether the disk has failed, and why.
struct DiskState {
    name: String,
    gone: Cell<bool>,
    /// Set while the disk is opened, when the opener gets the error, and while it is closed.
    suppress_log: Cell<bool>,
    /// Its connections: when one ends, all are closed.
    links: RefCell<Vec<Link>>,
}

impl DiskState {
    /// Fails every operation from now on.
    fn fail(&self, why: &dyn fmt::Display) -> Error {
        if !self.gone.replace(true) {
            if !self.suppress_log.get() {
                warn!("{} is gone: {why}", self.name);
            }
            self.close();
        }
        Error::Gone
    }

    /// Disconnects; what is in flight is lost.
    fn close(&self) {
        self.links.borrow().iter().for_each(Link::close);
    }
}

/// Owns the connections, from the first attempt on.
struct DiskHandle(Rc<DiskState>);

impl Drop for DiskHandle {
    fn drop(&mut self) {
        self.0.suppress_log.set(true);
        self.0.close();
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { negotiated, state, links, .. } = self;
        let mut out = f.debug_struct("Disk");
        out.field("name", &state.0.name)
            .field("connections", &links.len())
            .field("negotiated", negotiated);
        out.field("gone", &state.0.gone.get()).finish_non_exhaustive()
    }
}

impl Disk {
    /// Connects to an export.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect(
        core: &Core,
        to: &Address,
        options: &Options,
    ) -> Result<Rc<Self>, ConnectError> {
        let name = format!("NBD export {:?} of {to}", options.export);
        let (gone, quiet) = (Cell::new(false), Cell::new(true));
        let fate = DiskHandle(Rc::new(DiskState {
            name,
            gone,
            suppress_log: quiet,
            links: RefCell::default(),
        }));
        let staging = Staging::default();
        let (first, agreed) = open(core, to, options, &staging, &fate.0).await?;
        let mut links = vec![first];
        let multi = agreed.transmission_flags.has(flag::CAN_MULTI_CONN);
        for _ in 1..if multi { options.connections } else { 1 } {
            let (link, also) = open(core, to, options, &staging, &fate.0).await?;
            if also != agreed {
                return Err(ConnectError::Inconsistent);
            }
            links.push(link);
        }
        let info = info(&agreed)?;
        if let Some(end) = links.iter().find_map(Link::end) {
            return Err(ConnectError::Ended(end));
        }
        fate.0.suppress_log.set(false);
        let effect_bytes = Cell::new(MAX_DATALESS_BYTES);
        let command_timeout = options.command_timeout;
        Ok(Rc::new(Self {
            links,
            negotiated: agreed,
            info,
            state: fate,
            dataless_bytes: effect_bytes,
            command_timeout,
        }))
    }

    /// What was negotiated with the server.
    #[must_use]
    pub fn negotiated(&self) -> &NegotiatedExport {
        &self.negotiated
    }

    /// Number of connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    /// Whether the disk has failed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state.0.gone.get()
    }

    fn has_flags(&self, flags: u16) -> bool {
        self.negotiated.transmission_flags.has(flags)
    }

    fn fail(&self, why: &dyn fmt::Display) -> Error {
        self.state.0.fail(why)
    }

    /// Sends a command on the connection with the most free slots.
    async fn call(&self, command: Command) -> Result<Reply, DiskError> {
        let link = self.links.iter().max_by_key(|link| link.free_slots());
        let Some(link) = link.filter(|_| !self.is_gone()) else { return Err(DiskError::Gone) };
        let outcome = link.submit((command, self.command_timeout)).await;
        match outcome {
            // Another connection may have reported the end first.
            _ if self.is_gone() => Err(DiskError::Gone),
            Some(Ok(reply)) => Ok(reply),
            Some(Err(CommandError::Error(Errno::Shutdown))) => {
                self.fail(&"the server is being shut down");
                Err(DiskError::Gone)
            }
            Some(Err(CommandError::Error(error))) => Err(DiskError::Server(error)),
            Some(Err(CommandError::ConnectionLost)) | None => {
                let end = link.end();
                self.fail(&end.unwrap_or(ConnectionEnd::Machine(client::CloseReason::Closed)));
                Err(DiskError::Gone)
            }
        }
    }
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskError {
    Server(Errno),
    Gone,
}

impl DiskError {
    /// The error for the caller of an operation at `at`.
    fn of(self, at: Lba, writes: bool) -> Error {
        match (self, writes) {
            (Self::Gone, _) => Error::Gone,
            (Self::Server(Errno::NoSpc), true) => Error::NoSpace,
            (Self::Server(Errno::Perm), true) => Error::ReadOnly,
            (Self::Server(_), true) => Error::Unwritable { at },
            (Self::Server(_), false) => Error::Unreadable { at },
        }
    }
}

/// Opens one connection and negotiates the export.
async fn open(
    core: &Core,
    to: &Address,
    options: &Options,
    staging: &Staging,
    fate: &Rc<DiskState>,
) -> Result<(Link, NegotiatedExport), ConnectError> {
    let dial = async {
        match to {
            Address::Unix(path) => core.dial_unix(path).await,
            Address::Tcp(address) => core.dial(*address).await,
        }
    };
    let dialled = timeout(options.connect_timeout, dial).await;
    let stream = dialled.map_err(|_| ConnectError::TimedOut)?;
    let stream = stream.map_err(|e| ConnectError::Dial(e.kind()))?;
    let config = Config {
        max_in_flight: options.max_in_flight.clamp(1, client::MAX_IN_FLIGHT),
        handshake_timeout: options.connect_timeout,
        ..Config::new(&options.export)
    };
    let link = Link::start(stream, Connection::new(config), staging.clone(), options.send_timeout);
    fate.links.borrow_mut().push(link.clone());
    spawn_local(watch(link.clone(), Rc::clone(fate)));
    link.wait_open().await.map_err(ConnectError::Ended)?;
    let agreed = link.with(|machine| machine.negotiated().copied());
    agreed.map(|agreed| (link, agreed)).ok_or(ConnectError::Ended(ConnectionEnd::PeerClosed))
}

/// The end of one connection ends all.
async fn watch(link: Link, state: Rc<DiskState>) {
    let why = link.wait_end().await;
    state.fail(&why);
}

/// Derives the layer's properties from what the server reports, validated.
fn info(negotiated: &NegotiatedExport) -> Result<Info, ConnectError> {
    let NegotiatedExport { bytes, transmission_flags: abilities, size_constraints: sizes, .. } =
        *negotiated;
    let block_size = match sizes.minimum {
        ..=512 => 512,
        513..=4096 => 4096,
        other => return Err(ConnectError::Blocks(other)),
    };
    let blocks = bytes / u64::from(block_size);
    let transfer = sizes.payload.min(MAX_TRANSFER_BYTES) / block_size;
    if blocks == 0 || blocks > block::METADATA_LBA.0 {
        return Err(ConnectError::Size(bytes));
    }
    if transfer == 0 {
        return Err(ConnectError::Blocks(block_size));
    }
    let preferred = sizes.preferred.clamp(block_size, MAX_PHYSICAL_BYTES);
    let trims = abilities.has(flag::SEND_TRIM);
    Ok(Info {
        block_size,
        blocks,
        metadata_blocks: 0,
        physical_block_size: preferred,
        max_transfer_blocks: transfer,
        unmap_granularity_blocks: if trims { preferred / block_size } else { 0 },
        // "A client MUST NOT make any assumptions about the contents."
        unmap_zeroes: false,
        volatile_cache: abilities.has(flag::SEND_FLUSH),
        native_fua: abilities.has(flag::SEND_FUA),
        read_only: abilities.has(flag::READ_ONLY),
        overhead_bytes: 0,
    })
}

impl Disk {
    fn bytes_at(&self, at: Lba) -> u64 {
        at.0 * u64::from(self.info.block_size)
    }

    async fn read(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<Bufs, Error> {
        let buffers = ctx.alloc(blocks as usize * self.info.block_size as usize);
        match self.call(Command::Read { at: self.bytes_at(at), buffers }).await {
            Ok(Reply::Data(buffers)) => Ok(buffers.into()),
            Ok(_) => Err(self.fail(&"a read returned no data")),
            Err(refused) => Err(refused.of(at, false)),
        }
    }

    async fn write(&self, at: Lba, data: Bufs, fua: bool) -> Result<(), Error> {
        let done = self.call(Command::Write { at: self.bytes_at(at), data, fua }).await;
        done.map(drop).map_err(|refused| refused.of(at, true))
    }

    /// Sends the command that `f` makes for each piece of a range, given its first byte and its
    /// length in bytes. If the server refuses a piece as too long, shorter ones are sent.
    async fn without_data(
        &self,
        (at, blocks): (Lba, u32),
        ctx: &Ctx,
        make: impl Fn(u64, u32) -> Command,
    ) -> Result<(), Error> {
        let block_size = u64::from(self.info.block_size);
        let (mut next, end) = (at.0, at.0 + u64::from(blocks));
        while next < end {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let most = self.dataless_bytes.get();
            let bytes = ((end - next) * block_size).min(most.into());
            let length = u32::try_from(bytes).unwrap_or(most);
            let least = self.info.max_transfer_blocks * self.info.block_size;
            match self.call(make(next * block_size, length)).await {
                Ok(_) => next += bytes / block_size,
                Err(DiskError::Server(Errno::Inval | Errno::Overflow)) if length > least => {
                    self.dataless_bytes.set(least);
                }
                Err(refused) => return Err(refused.of(Lba(next), true)),
            }
        }
        Ok(())
    }

    async fn zero(
        &self,
        (at, blocks): (Lba, u32),
        (hole, fua): (bool, bool),
        ctx: &Ctx,
    ) -> Result<(), Error> {
        if self.has_flags(flag::SEND_WRITE_ZEROES) {
            let make = |at, len| Command::WriteZeroes { at, len, hole, fua };
            return self.without_data((at, blocks), ctx, make).await;
        }
        let most = self.info.max_transfer_blocks;
        for done in (0..blocks).step_by(most as usize) {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let piece = (blocks - done).min(most) as usize * self.info.block_size as usize;
            self.write(Lba(at.0 + u64::from(done)), Bufs::zeroes(piece), fua).await?;
        }
        Ok(())
    }

    async fn unmap(&self, at: Lba, blocks: u32, ctx: &Ctx) -> Result<(), Error> {
        if !self.has_flags(flag::SEND_TRIM) {
            return Ok(());
        }
        self.without_data((at, blocks), ctx, |at, len| Command::Trim { at, len }).await
    }

    async fn block_status(&self, at: Lba, blocks: u32) -> Result<BlockStatus, Error> {
        let all = BlockStatus { blocks, mapped: true };
        if !self.negotiated.block_status {
            return Ok(all);
        }
        let block_size = self.info.block_size;
        let blocks = blocks.min(MAX_DATALESS_BYTES / block_size);
        let (at, len) = (self.bytes_at(at), blocks * block_size);
        match self.call(Command::BlockStatus { at, len }).await {
            Ok(Reply::Extent(extent)) => Ok(match extent.bytes / block_size {
                // The extent ends within a block, which is therefore not empty.
                0 => BlockStatus { blocks: 1, mapped: true },
                blocks => BlockStatus { blocks, mapped: !(extent.hole && extent.zero) },
            }),
            Ok(_) => Err(self.fail(&"a block status returned no extent")),
            Err(DiskError::Server(_)) => Ok(all),
            Err(DiskError::Gone) => Err(Error::Gone),
        }
    }

    /// A failed flush fails the disk: a repeated one could falsely succeed.
    async fn flush(&self) -> Result<(), Error> {
        if !self.has_flags(flag::SEND_FLUSH) {
            return if self.is_gone() { Err(Error::Gone) } else { Ok(()) };
        }
        match self.call(Command::Flush).await {
            Ok(_) => Ok(()),
            Err(_) => Err(self.fail(&"a flush failed")),
        }
    }
}

impl Layer for Disk {
    fn name(&self) -> &'static str {
        "nbd"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let ctx = &ctx;
        let done = match op {
            Op::Read { at, blocks } => return self.read(at, blocks, ctx).await,
            Op::BlockStatus { at, blocks } => {
                return self.block_status(at, blocks).await.map(|run| run.into_bufs(ctx));
            }
            Op::Write { at, data, fua } => self.write(at, data, fua).await,
            Op::Zero { at, blocks, unmap, fua } => self.zero((at, blocks), (unmap, fua), ctx).await,
            Op::Unmap { at, blocks } => self.unmap(at, blocks, ctx).await,
            Op::Flush => self.flush().await,
        };
        done.map(|()| Bufs::new())
    }
}
