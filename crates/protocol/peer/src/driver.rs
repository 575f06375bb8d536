//! The driver: carries messages between a session's connections, its [`Outbox`] and its owner.
//!
//! Each connection has a task that reads and one that writes. The reading one takes headers and
//! short bodies through a staging buffer; data go where they belong, which is memory that was
//! granted before the first byte of them was read. While it waits for memory, or for the owner to
//! take a message, nothing more is read from this connection, and the others go on.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ::frame::SendQueue;
use arrayvec::ArrayVec;
use block::{Account, Class, Ctx};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadHalf, WriteHalf};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::frame::{self, Bad, Body, HEADER_BYTES, Head, Incoming, Needs, Outgoing, Rules};
use crate::{Expected, Lane, Line, Link, NodeId, Outbox, Received};

/// Largest size in bytes of a connection's staging buffer.
const STAGING_BYTES: usize = 32 * 1024;
/// The size where there is no data, and before more has come at once: a node has some connections
/// for each volume, and most volumes are idle.
const SMALL_STAGING_BYTES: usize = 4 * 1024;

/// With more than this many bytes waiting to be sent, no further message is taken.
const OUTPUT_HIGH_BYTES: usize = 256 * 1024;

/// Most pieces that one system call sends.
const GATHER: usize = 128;

/// The owner of a replica: what its sessions deliver to.
///
/// Calls come one after another for each lane, in the order in which the other side sent; messages
/// of different lanes are not ordered. Of one node there is one session at a time: between `up` and
/// `down` of a session, and only there, its messages are delivered.
pub trait Handler: 'static {
    /// A session is up. Nothing of an older one with this node is delivered any more: its `down` was
    /// called.
    fn up(&self, link: Link);

    /// The session `session` with `node` has ended. Whatever was being delivered is cancelled.
    fn down(&self, node: NodeId, session: u64);

    /// A message has arrived, in session `session`, or over a lease connection, where that is
    /// [`crate::NO_SESSION`].
    ///
    /// The lane reads no further before this returns: so a message that comes too early can wait.
    /// Cancel-safe: it is dropped, wherever it waits, when the session ends. What must happen to
    /// the end is a task of the owner's own.
    fn deliver(&self, node: NodeId, session: u64, received: Received) -> impl Future<Output = ()>;

    /// The account that memory for data comes from.
    fn memory(&self) -> &Account;

    /// Bytes of memory that applying a message needs beyond its data.
    fn overhead(&self) -> usize;
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// Its owner closed it, or a newer one took its place.
    #[error("it was closed")]
    Closed,
    /// The other side closed a connection.
    #[error("the other side closed it")]
    PeerClosed,
    /// A connection broke.
    #[error("a connection broke: {0}")]
    Broken(io::Error),
    /// The other side did not take what was to be sent.
    #[error("the other side takes nothing")]
    Stalled,
    /// The other side sent something that may not be.
    #[error("the other side sent {0}")]
    Bad(Bad),
    /// The owner left a message that may not be.
    #[error("to be sent was {0}")]
    Unsendable(Bad),
    /// A message is larger than the memory for its kind.
    #[error("{0}")]
    TooLarge(rt::buf::TooLarge),
    /// Data have come for which no memory, or too little, was laid ready.
    #[error("data came that nobody asked for, in answer to request {0}")]
    Unexpected(u64),
    /// The owner panicked.
    #[error("its task failed")]
    Failed,
}

/// A connection that is ready to carry messages.
pub(crate) struct Connection<S> {
    pub(crate) rules: Rules,
    pub(crate) stream: S,
    /// What is sent before any message.
    pub(crate) first: SendQueue,
}

/// Runs the connections of a session until one of them breaks, or the session is closed; when this
/// returns, none of them exists and nothing is being delivered. Calls neither `up` nor `down`.
pub(crate) async fn run<H, S>(
    handler: Rc<H>,
    session: u64,
    outbox: Outbox,
    connections: Vec<Connection<S>>,
    stall: Duration,
) -> End
where
    H: Handler,
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let outbox = Rc::new(outbox);
    let mut tasks = JoinSet::new();
    for Connection { rules, stream, first } in connections {
        let (from, to) = tokio::io::split(stream);
        let writer = Writer {
            to,
            queue: first,
            frames: Outgoing::new(rules),
            outbox: Rc::clone(&outbox),
            lane: rules.line.lane(),
            stall,
        };
        let reader = Reader {
            input: Input::new(from, rules.line),
            frames: Incoming::new(rules),
            handler: Rc::clone(&handler),
            outbox: Rc::clone(&outbox),
            session,
        };
        tasks.spawn_local(ended(writer.run(), Rc::clone(&outbox)));
        tasks.spawn_local(ended(reader.run(), Rc::clone(&outbox)));
    }
    let end = tokio::select! {
        biased;
        Some(end) = tasks.join_next() => end.unwrap_or(End::Failed),
        () = outbox.closed() => End::Closed,
    };
    outbox.close();
    tasks.shutdown().await;
    end
}

/// Ends the session at once where a connection does: nothing else of it is delivered.
async fn ended(work: impl Future<Output = Result<Infallible, End>>, outbox: Rc<Outbox>) -> End {
    match work.await {
        Ok(never) => match never {},
        Err(end) => {
            outbox.close();
            end
        }
    }
}

impl Line {
    /// Where the messages for it are taken from.
    fn lane(self) -> Lane {
        match self {
            Self::Lane(lane) => lane,
            Self::Lease => Lane::Control,
        }
    }
}

/// The sending side of a connection.
struct Writer<S> {
    to: WriteHalf<S>,
    queue: SendQueue,
    frames: Outgoing,
    outbox: Rc<Outbox>,
    lane: Lane,
    stall: Duration,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Writer<S> {
    async fn run(mut self) -> Result<Infallible, End> {
        loop {
            if self.queue.is_empty() {
                let to = &mut self.to;
                in_time(self.stall, poll_fn(|cx| Pin::new(&mut *to).poll_flush(cx))).await?;
                let message = self.outbox.next(self.lane).await.ok_or(End::Closed)?;
                self.frames.push(message, &mut self.queue).map_err(End::Unsendable)?;
                if self.lane == Lane::Control {
                    // Who is ready may have more to say, and a client's answer is more urgent than what is
                    // said of it.
                    rt::give_way().await;
                }
            }
            while self.queue.len() < OUTPUT_HIGH_BYTES
                && let Some(message) = self.outbox.take(self.lane)
            {
                self.frames.push(message, &mut self.queue).map_err(End::Unsendable)?;
            }
            self.send().await?;
        }
    }

    /// Sends something of what waits.
    async fn send(&mut self) -> Result<(), End> {
        let mut slices = ArrayVec::<_, GATHER>::new();
        slices.extend(self.queue.slices().take(GATHER));
        let to = &mut self.to;
        let write = poll_fn(|cx| Pin::new(&mut *to).poll_write_vectored(cx, &slices));
        let sent = match in_time(self.stall, write).await {
            Ok(0) => return Err(End::Broken(io::ErrorKind::WriteZero.into())),
            Ok(n) => n,
            Err(End::Broken(e)) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(end) => return Err(end),
        };
        drop(slices);
        self.queue.sent(sent);
        rt::fault::sent();
        Ok(())
    }
}

/// What `work` on a connection gives, unless it takes longer than `limit`. Nearly all of it is done at once: a timer is
/// for the rest.
async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> Result<T, End> {
    let mut work = pin!(work);
    let done = match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(done) => done,
        Poll::Pending => timeout(limit, work).await.map_err(|_| End::Stalled)?,
    };
    done.map_err(End::Broken)
}

/// The receiving side of a connection.
struct Reader<S, H> {
    input: Input<S>,
    frames: Incoming,
    handler: Rc<H>,
    outbox: Rc<Outbox>,
    session: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin, H: Handler> Reader<S, H> {
    async fn run(mut self) -> Result<Infallible, End> {
        loop {
            let received = self.next().await?;
            // Another connection may have ended the session while this message came.
            if self.outbox.is_closed() {
                return Err(End::Closed);
            }
            let Some(received) = received else { continue };
            self.handler.deliver(self.outbox.node(), self.session, received).await;
        }
    }

    /// The next message; nothing, if it answers what nobody waits for any more.
    async fn next(&mut self) -> Result<Option<Received>, End> {
        let mut header = [0; HEADER_BYTES];
        self.input.fill(&mut header).await?;
        let head = self.frames.head(&header).map_err(End::Bad)?;
        let bytes = head.body_bytes();
        let (body, ctx) = match self.room(&head).await? {
            Room::Ordinary => {
                // The header was checked: no type has more than a few hundred KiB.
                let mut body = vec![0; bytes];
                self.input.fill(&mut body).await?;
                (Body::Bytes(body), None)
            }
            Room::Pool(ctx) => {
                let mut data = ctx.alloc(bytes);
                for piece in &mut data {
                    self.input.fill(piece).await?;
                }
                (Body::Data(data.into()), Some(ctx))
            }
            Room::None => {
                self.input.skip(bytes + frame::padding(bytes)).await?;
                return Ok(None);
            }
        };
        let mut padding = [0; frame::ALIGN_BYTES];
        let padding = &mut padding[..frame::padding(bytes)];
        self.input.fill(padding).await?;
        frame::check_padding(head.kind(), padding).map_err(End::Bad)?;
        let message = head.message(body).map_err(End::Bad)?;
        Ok(Some(Received { message, ctx }))
    }

    /// Waits for the memory that a message needs. The caller reads nothing meanwhile.
    async fn room(&self, head: &Head) -> Result<Room, End> {
        let class = match head.needs() {
            Needs::Nothing => return Ok(Room::Ordinary),
            Needs::Expected(request) => return self.expected(request, head.body_bytes()),
            Needs::Copy => Class::Copy,
            Needs::Ordered => Class::Ordered,
        };
        let bytes = head.body_bytes() + self.handler.overhead();
        let credit = self.handler.memory().credit(bytes, class).await.map_err(End::TooLarge)?;
        Ok(Room::Pool(Ctx::new(credit, head.epoch())))
    }

    fn expected(&self, request: u64, bytes: usize) -> Result<Room, End> {
        match self.outbox.expected(request) {
            Some(Expected::Memory(ctx)) if ctx.credit().left() >= bytes => Ok(Room::Pool(ctx)),
            Some(Expected::Unwanted) => Ok(Room::None),
            _ => Err(End::Unexpected(request)),
        }
    }
}

/// Where a message's body goes.
enum Room {
    /// Short ones.
    Ordinary,
    /// Data.
    Pool(Ctx),
    /// Nowhere: nobody waits for it any more.
    None,
}

/// What has been read from a connection and not been used.
struct Input<S> {
    from: ReadHalf<S>,
    staging: Box<[u8]>,
    /// What the staging buffer may grow to.
    most: usize,
    at: usize,
    end: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Input<S> {
    fn new(from: ReadHalf<S>, line: Line) -> Self {
        let most = match line {
            Line::Lane(Lane::Down | Lane::Up) => STAGING_BYTES,
            Line::Lane(Lane::Control) | Line::Lease => SMALL_STAGING_BYTES,
        };
        Self { from, staging: vec![0; SMALL_STAGING_BYTES].into(), most, at: 0, end: 0 }
    }

    /// Reads what is there into the staging buffer, all of which has been used.
    async fn refill(&mut self) -> Result<(), End> {
        if self.end == self.staging.len() && self.end < self.most {
            self.staging = vec![0; self.most].into();
        }
        (self.at, self.end) = (0, 0);
        self.end = read(&mut self.from, &mut self.staging).await?;
        Ok(())
    }

    /// Throws away the next `bytes` bytes.
    async fn skip(&mut self, mut bytes: usize) -> Result<(), End> {
        while bytes > 0 {
            if self.at == self.end {
                self.refill().await?;
            }
            let n = bytes.min(self.end - self.at);
            self.at += n;
            bytes -= n;
        }
        Ok(())
    }

    /// Fills `into` with what comes next; what is long is read directly into it.
    async fn fill(&mut self, mut into: &mut [u8]) -> Result<(), End> {
        while !into.is_empty() {
            if self.at == self.end {
                if into.len() >= self.staging.len() {
                    let n = read(&mut self.from, into).await?;
                    into = &mut into[n..];
                    continue;
                }
                self.refill().await?;
            }
            let n = into.len().min(self.end - self.at);
            into[..n].copy_from_slice(&self.staging[self.at..self.at + n]);
            self.at += n;
            into = &mut into[n..];
        }
        Ok(())
    }
}

async fn read<S: AsyncRead + Unpin>(from: &mut S, into: &mut [u8]) -> Result<usize, End> {
    loop {
        match from.read(into).await {
            Ok(0) => return Err(End::PeerClosed),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(End::Broken(e)),
        }
    }
}
