//! An export, as a layer.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ::nbd::client::{self, Agreed, Config, Connection, Failed, Op as Command, Reply};
use ::nbd::message::flag;
use ::nbd::{Address, Errno};
use block::{Bufs, Ctx, Error, Info, Layer, Lba, Op, Run};
use rt::Core;
use tokio::task::spawn_local;
use tokio::time::timeout;
use tracing::warn;

use super::link::{End, Link};
use super::options::Options;
use crate::drive::Staging;

/// Largest transfer, whatever the server says, in bytes: what every server has to bear.
const MAX_TRANSFER_BYTES: u32 = 32 << 20;

/// Longest range of a command that carries no data, in bytes; less where the server does not take it.
const MAX_EFFECT_BYTES: u32 = 1 << 30;

/// Largest physical block that makes sense, in bytes.
const MAX_PHYSICAL_BYTES: u32 = 1 << 20;

/// Why a server's export cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// There is no connection.
    #[error("no connection: {0}")]
    Dial(io::ErrorKind),
    /// It took too long.
    #[error("it takes too long")]
    TimedOut,
    /// The connection ended.
    #[error("{0}")]
    Ended(End),
    /// Its blocks are of a size that is not used here.
    #[error("its blocks of {0} bytes are too large")]
    Blocks(u32),
    /// It is too small or too large.
    #[error("its size of {0} bytes cannot be used")]
    Size(u64),
    /// Another connection was told something else: it may be another export.
    #[error("two connections are told different things of the export")]
    Differs,
}

/// An export of an NBD server. Gone for ever once one of its connections has ended.
pub struct Disk {
    links: Vec<Link>,
    agreed: Agreed,
    info: Info,
    fate: Owned,
    /// Longest range of a command without data that the server is known to take, or not known not to.
    effect_bytes: Cell<u32>,
    command_timeout: Duration,
}

/// Whether the disk is gone, and why.
struct Fate {
    name: String,
    gone: Cell<bool>,
    /// Set while the disk is being opened, when what ends is told to who opens it, and when it is let go.
    quiet: Cell<bool>,
    /// Its connections: the end of one is the end of all.
    links: RefCell<Vec<Link>>,
}

impl Fate {
    /// From now on every operation fails.
    fn fail(&self, why: &dyn fmt::Display) -> Error {
        if !self.gone.replace(true) {
            if !self.quiet.get() {
                warn!("{} is gone: {why}", self.name);
            }
            self.close();
        }
        Error::Gone
    }

    /// Takes leave of the server; what is in flight is lost.
    fn close(&self) {
        self.links.borrow().iter().for_each(Link::close);
    }
}

/// Whoever holds this holds the connections, from the first attempt on.
struct Owned(Rc<Fate>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.quiet.set(true);
        self.0.close();
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { agreed, fate, links, .. } = self;
        let mut out = f.debug_struct("Disk");
        out.field("name", &fate.0.name).field("connections", &links.len()).field("agreed", agreed);
        out.field("gone", &fate.0.gone.get()).finish_non_exhaustive()
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
        let fate = Owned(Rc::new(Fate { name, gone, quiet, links: RefCell::default() }));
        let staging = Staging::default();
        let (first, agreed) = open(core, to, options, &staging, &fate.0).await?;
        let mut links = vec![first];
        let multi = agreed.abilities.has(flag::CAN_MULTI_CONN);
        for _ in 1..if multi { options.connections } else { 1 } {
            let (link, also) = open(core, to, options, &staging, &fate.0).await?;
            if also != agreed {
                return Err(ConnectError::Differs);
            }
            links.push(link);
        }
        let info = info(&agreed)?;
        if let Some(end) = links.iter().find_map(Link::end) {
            return Err(ConnectError::Ended(end));
        }
        fate.0.quiet.set(false);
        let effect_bytes = Cell::new(MAX_EFFECT_BYTES);
        let command_timeout = options.command_timeout;
        Ok(Rc::new(Self { links, agreed, info, fate, effect_bytes, command_timeout }))
    }

    /// What was agreed on with the server.
    #[must_use]
    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    /// Whether it is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.fate.0.gone.get()
    }

    fn has(&self, flags: u16) -> bool {
        self.agreed.abilities.has(flags)
    }

    fn fail(&self, why: &dyn fmt::Display) -> Error {
        self.fate.0.fail(why)
    }

    /// Sends a command by the connection that has the most room.
    async fn call(&self, command: Command) -> Result<Reply, Refused> {
        let link = self.links.iter().max_by_key(|link| link.room());
        let Some(link) = link.filter(|_| !self.is_gone()) else { return Err(Refused::Gone) };
        let outcome = link.submit((command, self.command_timeout)).await;
        match outcome {
            // Of two connections, one may have told of the end first.
            _ if self.is_gone() => Err(Refused::Gone),
            Some(Ok(reply)) => Ok(reply),
            Some(Err(Failed::Error(Errno::Shutdown))) => {
                self.fail(&"the server is being shut down");
                Err(Refused::Gone)
            }
            Some(Err(Failed::Error(error))) => Err(Refused::By(error)),
            Some(Err(Failed::Lost)) | None => {
                let end = link.end();
                self.fail(&end.unwrap_or(End::Machine(client::End::Closed)));
                Err(Refused::Gone)
            }
        }
    }
}

/// How a command has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    By(Errno),
    Gone,
}

impl Refused {
    /// What it is to the caller of an operation from `at` on.
    fn of(self, at: Lba, writes: bool) -> Error {
        match (self, writes) {
            (Self::Gone, _) => Error::Gone,
            (Self::By(Errno::NoSpc), true) => Error::NoSpace,
            (Self::By(Errno::Perm), true) => Error::ReadOnly,
            (Self::By(_), true) => Error::Unwritable { at },
            (Self::By(_), false) => Error::Unreadable { at },
        }
    }
}

/// One connection, and what was agreed on by it.
async fn open(
    core: &Core,
    to: &Address,
    options: &Options,
    staging: &Staging,
    fate: &Rc<Fate>,
) -> Result<(Link, Agreed), ConnectError> {
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
        in_flight: options.in_flight.clamp(1, client::MAX_IN_FLIGHT),
        handshake_timeout: options.connect_timeout,
        ..Config::new(&options.export)
    };
    let link = Link::start(stream, Connection::new(config), staging.clone(), options.send_timeout);
    fate.links.borrow_mut().push(link.clone());
    spawn_local(watch(link.clone(), Rc::clone(fate)));
    link.opened().await.map_err(ConnectError::Ended)?;
    let agreed = link.with(|machine| machine.agreed().copied());
    agreed.map(|agreed| (link, agreed)).ok_or(ConnectError::Ended(End::PeerClosed))
}

/// The end of one connection is the end of all.
async fn watch(link: Link, fate: Rc<Fate>) {
    let why = link.ended().await;
    fate.fail(&why);
}

/// What a layer is, by what a server says. Nothing of it is believed that would harm.
fn info(agreed: &Agreed) -> Result<Info, ConnectError> {
    let Agreed { bytes, abilities, sizes, .. } = *agreed;
    let block_size = match sizes.minimum {
        ..=512 => 512,
        513..=4096 => 4096,
        other => return Err(ConnectError::Blocks(other)),
    };
    let blocks = bytes / u64::from(block_size);
    let transfer = sizes.payload.min(MAX_TRANSFER_BYTES) / block_size;
    if blocks == 0 || blocks > block::ASIDE.0 {
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
        aside_blocks: 0,
        physical_block_size: preferred,
        max_transfer_blocks: transfer,
        unmap_granularity_blocks: if trims { preferred / block_size } else { 0 },
        // "A client MUST NOT make any assumptions about the contents."
        unmap_zeroes: false,
        volatile_cache: abilities.has(flag::SEND_FLUSH),
        native_fua: abilities.has(flag::SEND_FUA),
        read_only: abilities.has(flag::READ_ONLY),
        overhead: 0,
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
            Ok(_) => Err(self.fail(&"a read has brought no data")),
            Err(refused) => Err(refused.of(at, false)),
        }
    }

    async fn write(&self, at: Lba, data: Bufs, fua: bool) -> Result<(), Error> {
        let done = self.call(Command::Write { at: self.bytes_at(at), data, fua }).await;
        done.map(drop).map_err(|refused| refused.of(at, true))
    }

    /// Makes a command for each piece of a range, with its first byte and its length in bytes. A server that
    /// does not take a piece because it is long gets shorter ones.
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
            let most = self.effect_bytes.get();
            let bytes = ((end - next) * block_size).min(most.into());
            let length = u32::try_from(bytes).unwrap_or(most);
            let least = self.info.max_transfer_blocks * self.info.block_size;
            match self.call(make(next * block_size, length)).await {
                Ok(_) => next += bytes / block_size,
                Err(Refused::By(Errno::Inval | Errno::Overflow)) if length > least => {
                    self.effect_bytes.set(least);
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
        if self.has(flag::SEND_WRITE_ZEROES) {
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
        if !self.has(flag::SEND_TRIM) {
            return Ok(());
        }
        self.without_data((at, blocks), ctx, |at, len| Command::Trim { at, len }).await
    }

    async fn map(&self, at: Lba, blocks: u32) -> Result<Run, Error> {
        let all = Run { blocks, mapped: true };
        if !self.agreed.maps {
            return Ok(all);
        }
        let block_size = self.info.block_size;
        let blocks = blocks.min(MAX_EFFECT_BYTES / block_size);
        let (at, len) = (self.bytes_at(at), blocks * block_size);
        match self.call(Command::BlockStatus { at, len }).await {
            Ok(Reply::Extent(extent)) => Ok(match extent.bytes / block_size {
                // It ends within a block: that one is not empty.
                0 => Run { blocks: 1, mapped: true },
                blocks => Run { blocks, mapped: !(extent.hole && extent.zero) },
            }),
            Ok(_) => Err(self.fail(&"a status has brought no extent")),
            Err(Refused::By(_)) => Ok(all),
            Err(Refused::Gone) => Err(Error::Gone),
        }
    }

    /// A flush that fails is the end: it is never tried again and believed.
    async fn flush(&self) -> Result<(), Error> {
        if !self.has(flag::SEND_FLUSH) {
            return if self.is_gone() { Err(Error::Gone) } else { Ok(()) };
        }
        match self.call(Command::Flush).await {
            Ok(_) => Ok(()),
            Err(_) => Err(self.fail(&"a flush has failed")),
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
            Op::Map { at, blocks } => {
                return self.map(at, blocks).await.map(|run| run.into_bufs(ctx));
            }
            Op::Write { at, data, fua } => self.write(at, data, fua).await,
            Op::Zero { at, blocks, unmap, fua } => self.zero((at, blocks), (unmap, fua), ctx).await,
            Op::Unmap { at, blocks } => self.unmap(at, blocks, ctx).await,
            Op::Flush => self.flush().await,
        };
        done.map(|()| Bufs::new())
    }
}
