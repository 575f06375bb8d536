//! The driver of a session: carries messages between its connections, its [`Outbox`] and its
//! handler.
//!
//! Each connection has a reading and a writing task. The reader takes headers and short bodies
//! through a staging buffer; payload is read directly into memory that was granted before its first
//! byte was read. While the reader waits for memory, or for the handler to take a message, it reads
//! nothing more from this connection; other connections go on.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ::frame::SendQueue;
use arrayvec::ArrayVec;
use block::{Account, Ctx, MemoryClass};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadHalf, WriteHalf};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::frame::{
    self, BodyNeeds, ConnectionParams, FrameBody, FrameDecoder, FrameEncoder, FrameError,
    FrameHead, HEADER_BYTES,
};
use crate::{ConnectionPurpose, Lane, Link, NodeId, Outbox, PostedMemory, ReceivedMessage};

/// Largest size in bytes of a connection's staging buffer.
const STAGING_BYTES: usize = 32 * 1024;
/// The size on connections without payload, and before more has come at once: a node has several
/// connections per volume, and most volumes are idle.
const SMALL_STAGING_BYTES: usize = 4 * 1024;

/// No further message is encoded while more than this many bytes wait to be sent.
const OUTPUT_HIGH_BYTES: usize = 256 * 1024;

/// Most slices in one system call.
const MAX_IO_SLICES: usize = 128;

/// Handles the sessions of a replica.
///
/// Calls for each lane are made one after another, in the order in which the peer sent; messages of
/// different lanes are not ordered. There is one session per node at a time, and its messages are
/// delivered between its `session_up` and `session_down` only.
pub trait SessionHandler: 'static {
    /// A session is up. An older one with this node delivers nothing any more: its `session_down`
    /// was called.
    fn session_up(&self, link: Link);

    /// The session `session` with `node` has ended. Deliveries in progress are cancelled.
    fn session_down(&self, node: NodeId, session: u64);

    /// A message has arrived in session `session`, or on a lease connection if that is
    /// [`crate::NO_SESSION`].
    ///
    /// The lane reads no further until this returns, so a message that comes too early can wait.
    /// Cancel-safe: the future is dropped when the session ends. What must complete is for the
    /// handler to spawn.
    fn deliver(
        &self,
        node: NodeId,
        session: u64,
        received: ReceivedMessage,
    ) -> impl Future<Output = ()>;

    /// The account for payload memory.
    fn account(&self) -> &Account;

    /// Bytes of memory that applying a message needs beyond its data.
    fn overhead_bytes(&self) -> usize;
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum PeerSessionEnd {
    /// The handler closed it, or a newer session replaced it.
    #[error("it was closed")]
    Closed,
    /// The other side closed a connection.
    #[error("the peer closed it")]
    PeerClosed,
    /// A connection broke.
    #[error("a connection broke: {0}")]
    Broken(io::Error),
    /// The peer stopped receiving.
    #[error("the peer accepts no data")]
    Stalled,
    /// The peer sent an invalid frame.
    #[error("the peer sent {0}")]
    InvalidFrame(FrameError),
    /// The handler sent an invalid message.
    #[error("cannot send {0}")]
    InvalidMessage(FrameError),
    /// A message is larger than the memory for its kind.
    #[error("{0}")]
    TooLarge(rt::buf::CreditTooLarge),
    /// Data arrived for which no memory, or too little, was posted.
    #[error("received data for an unknown request {0}")]
    UnsolicitedData(u64),
    /// The handler panicked.
    #[error("its task failed")]
    Panicked,
}

/// A connection after its handshake.
pub(crate) struct ReadyConnection<S> {
    pub(crate) params: ConnectionParams,
    pub(crate) stream: S,
    /// Bytes to send before any message.
    pub(crate) preamble: SendQueue,
}

/// Runs the connections of a session until one breaks or the session is closed; when this returns,
/// all are gone and no delivery is in progress. Calls neither `session_up` nor `session_down`.
pub(crate) async fn run_session<H, S>(
    handler: Rc<H>,
    session: u64,
    outbox: Outbox,
    connections: Vec<ReadyConnection<S>>,
    stall_timeout: Duration,
) -> PeerSessionEnd
where
    H: SessionHandler,
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let outbox = Rc::new(outbox);
    let mut tasks = JoinSet::new();
    for ReadyConnection { params, stream, preamble } in connections {
        let (from, to) = tokio::io::split(stream);
        let writer = FrameWriter {
            to,
            queue: preamble,
            encoder: FrameEncoder::new(params),
            outbox: Rc::clone(&outbox),
            lane: params.purpose.lane(),
            stall_timeout,
        };
        let reader = FrameReader {
            input: StagedInput::new(from, params.purpose),
            decoder: FrameDecoder::new(params),
            handler: Rc::clone(&handler),
            outbox: Rc::clone(&outbox),
            session,
        };
        tasks.spawn_local(close_on_end(writer.run(), Rc::clone(&outbox)));
        tasks.spawn_local(close_on_end(reader.run(), Rc::clone(&outbox)));
    }
    let end = tokio::select! {
        biased;
        Some(end) = tasks.join_next() => end.unwrap_or(PeerSessionEnd::Panicked),
        () = outbox.wait_closed() => PeerSessionEnd::Closed,
    };
    outbox.close();
    tasks.shutdown().await;
    end
}

/// Ends the whole session when one connection ends: nothing else of it is delivered.
async fn close_on_end(
    work: impl Future<Output = Result<Infallible, PeerSessionEnd>>,
    outbox: Rc<Outbox>,
) -> PeerSessionEnd {
    match work.await {
        Ok(never) => match never {},
        Err(end) => {
            outbox.close();
            end
        }
    }
}

impl ConnectionPurpose {
    /// The outbox lane from which its messages are taken.
    fn lane(self) -> Lane {
        match self {
            Self::Lane(lane) => lane,
            Self::Lease => Lane::Control,
        }
    }
}

/// The sending side of a connection.
struct FrameWriter<S> {
    to: WriteHalf<S>,
    queue: SendQueue,
    encoder: FrameEncoder,
    outbox: Rc<Outbox>,
    lane: Lane,
    stall_timeout: Duration,
}

impl<S: AsyncRead + AsyncWrite + Unpin> FrameWriter<S> {
    async fn run(mut self) -> Result<Infallible, PeerSessionEnd> {
        loop {
            if self.queue.is_empty() {
                let to = &mut self.to;
                with_stall_timeout(
                    self.stall_timeout,
                    poll_fn(|cx| Pin::new(&mut *to).poll_flush(cx)),
                )
                .await?;
                let message = self.outbox.next(self.lane).await.ok_or(PeerSessionEnd::Closed)?;
                self.encoder
                    .encode(message, &mut self.queue)
                    .map_err(PeerSessionEnd::InvalidMessage)?;
                if self.lane == Lane::Control {
                    // Ready tasks may add messages to this batch; and the answer to a client is
                    // more urgent than messages about it.
                    rt::yield_to_ready_tasks().await;
                }
            }
            while self.queue.len() < OUTPUT_HIGH_BYTES
                && let Some(message) = self.outbox.take(self.lane)
            {
                self.encoder
                    .encode(message, &mut self.queue)
                    .map_err(PeerSessionEnd::InvalidMessage)?;
            }
            self.send().await?;
        }
    }

    /// Sends some of the queued bytes.
    async fn send(&mut self) -> Result<(), PeerSessionEnd> {
        let mut slices = ArrayVec::<_, MAX_IO_SLICES>::new();
        slices.extend(self.queue.slices().take(MAX_IO_SLICES));
        let to = &mut self.to;
        let write = poll_fn(|cx| Pin::new(&mut *to).poll_write_vectored(cx, &slices));
        let sent = match with_stall_timeout(self.stall_timeout, write).await {
            Ok(0) => return Err(PeerSessionEnd::Broken(io::ErrorKind::WriteZero.into())),
            Ok(n) => n,
            Err(PeerSessionEnd::Broken(e)) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(end) => return Err(end),
        };
        drop(slices);
        self.queue.advance(sent);
        rt::fault_point::note_sent();
        Ok(())
    }
}

/// The result of `work` on a connection, unless it takes longer than `limit`. Most work completes
/// at once, so the timer starts only if it does not.
async fn with_stall_timeout<T>(
    limit: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> Result<T, PeerSessionEnd> {
    let mut work = pin!(work);
    let result = match poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
        Poll::Ready(result) => result,
        Poll::Pending => timeout(limit, work).await.map_err(|_| PeerSessionEnd::Stalled)?,
    };
    result.map_err(PeerSessionEnd::Broken)
}

/// The receiving side of a connection.
struct FrameReader<S, H> {
    input: StagedInput<S>,
    decoder: FrameDecoder,
    handler: Rc<H>,
    outbox: Rc<Outbox>,
    session: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin, H: SessionHandler> FrameReader<S, H> {
    async fn run(mut self) -> Result<Infallible, PeerSessionEnd> {
        loop {
            let received = self.next().await?;
            // Another connection may have ended the session meanwhile.
            if self.outbox.is_closed() {
                return Err(PeerSessionEnd::Closed);
            }
            let Some(received) = received else { continue };
            self.handler.deliver(self.outbox.node(), self.session, received).await;
        }
    }

    /// The next message; `None` for an answer that no task waits for any more.
    async fn next(&mut self) -> Result<Option<ReceivedMessage>, PeerSessionEnd> {
        let mut header = [0; HEADER_BYTES];
        self.input.fill(&mut header).await?;
        let head = self.decoder.decode_header(&header).map_err(PeerSessionEnd::InvalidFrame)?;
        let bytes = head.body_bytes();
        let (body, ctx) = match self.body_memory(&head).await? {
            BodyMemory::Heap => {
                // The header was checked: no type has more than a few hundred KiB.
                let mut body = vec![0; bytes];
                self.input.fill(&mut body).await?;
                (FrameBody::Bytes(body), None)
            }
            BodyMemory::Pool(ctx) => {
                let mut data = ctx.alloc(bytes);
                for piece in &mut data {
                    self.input.fill(piece).await?;
                }
                (FrameBody::Data(data.into()), Some(ctx))
            }
            BodyMemory::Discard => {
                self.input.skip(bytes + frame::padding(bytes)).await?;
                return Ok(None);
            }
        };
        let mut padding = [0; frame::ALIGN_BYTES];
        let padding = &mut padding[..frame::padding(bytes)];
        self.input.fill(padding).await?;
        frame::check_padding(head.kind(), padding).map_err(PeerSessionEnd::InvalidFrame)?;
        let message = head.message(body).map_err(PeerSessionEnd::InvalidFrame)?;
        Ok(Some(ReceivedMessage { message, ctx }))
    }

    /// Waits for the memory that a message needs; the caller reads nothing meanwhile.
    async fn body_memory(&self, head: &FrameHead) -> Result<BodyMemory, PeerSessionEnd> {
        let class = match head.needs() {
            BodyNeeds::Heap => return Ok(BodyMemory::Heap),
            BodyNeeds::Posted(request) => return self.posted_memory(request, head.body_bytes()),
            BodyNeeds::Copy => MemoryClass::ReplicaWrite,
            BodyNeeds::Ordered => MemoryClass::PeerRequest,
        };
        let bytes = head.body_bytes() + self.handler.overhead_bytes();
        let credit =
            self.handler.account().credit(bytes, class).await.map_err(PeerSessionEnd::TooLarge)?;
        Ok(BodyMemory::Pool(Ctx::new(credit, head.epoch())))
    }

    fn posted_memory(&self, request: u64, bytes: usize) -> Result<BodyMemory, PeerSessionEnd> {
        match self.outbox.take_posted(request) {
            Some(PostedMemory::Memory(ctx)) if ctx.credit().left() >= bytes => {
                Ok(BodyMemory::Pool(ctx))
            }
            Some(PostedMemory::Cancelled) => Ok(BodyMemory::Discard),
            _ => Err(PeerSessionEnd::UnsolicitedData(request)),
        }
    }
}

/// Where the body of a message goes.
enum BodyMemory {
    /// Short bodies.
    Heap,
    /// Payload.
    Pool(Ctx),
    /// Dropped: no task waits for it any more.
    Discard,
}

/// Input of a connection that was read and not yet used.
struct StagedInput<S> {
    from: ReadHalf<S>,
    staging: Box<[u8]>,
    /// Largest size of the staging buffer.
    max_staging_bytes: usize,
    at: usize,
    end: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> StagedInput<S> {
    fn new(from: ReadHalf<S>, purpose: ConnectionPurpose) -> Self {
        let max_staging_bytes = match purpose {
            ConnectionPurpose::Lane(Lane::Replication | Lane::Requests) => STAGING_BYTES,
            ConnectionPurpose::Lane(Lane::Control) | ConnectionPurpose::Lease => {
                SMALL_STAGING_BYTES
            }
        };
        Self {
            from,
            staging: vec![0; SMALL_STAGING_BYTES].into(),
            max_staging_bytes,
            at: 0,
            end: 0,
        }
    }

    /// Reads available bytes into the staging buffer, which must be used up.
    async fn refill(&mut self) -> Result<(), PeerSessionEnd> {
        if self.end == self.staging.len() && self.end < self.max_staging_bytes {
            self.staging = vec![0; self.max_staging_bytes].into();
        }
        (self.at, self.end) = (0, 0);
        self.end = read(&mut self.from, &mut self.staging).await?;
        Ok(())
    }

    /// Discards the next `bytes` bytes.
    async fn skip(&mut self, mut bytes: usize) -> Result<(), PeerSessionEnd> {
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

    /// Fills `into` with the next bytes; a long read goes directly into it.
    async fn fill(&mut self, mut into: &mut [u8]) -> Result<(), PeerSessionEnd> {
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

async fn read<S: AsyncRead + Unpin>(
    from: &mut S,
    into: &mut [u8],
) -> Result<usize, PeerSessionEnd> {
    loop {
        match from.read(into).await {
            Ok(0) => return Err(PeerSessionEnd::PeerClosed),
            Ok(n) => return Ok(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(PeerSessionEnd::Broken(e)),
        }
    }
}
