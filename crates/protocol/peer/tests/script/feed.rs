//! Feeds a connection, and the parsers of the handshake, any bytes in any portions. Shared by the
//! property tests and the fuzz target.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use block::{Account, BufferPool, Ctx, Epoch, MemoryClass};
use frame::SendQueue;
use peer::frame::{ConnectionParams, FrameEncoder, HEADER_BYTES, HandshakeFrame, padding};
use peer::{
    ConnectionPurpose, Lane, Link, NodeId, PeerSessionEnd, ReceivedMessage, SessionHandler,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const POOL_BYTES: usize = 1 << 20;
const MAX_DATA_BYTES: u32 = 64 << 10;

/// The bytes to send, in portions of any length.
struct Feed {
    bytes: Vec<u8>,
    at: usize,
    portion: usize,
}

impl AsyncRead for Feed {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.portion = this.portion * 5 % 8191 + 1;
        if this.portion.is_multiple_of(7) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let n = this.portion.min(buf.remaining()).min(this.bytes.len() - this.at);
        buf.put_slice(&this.bytes[this.at..this.at + n]);
        this.at += n;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Feed {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, b: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(b.len()))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Accepts every message, and sends it again: what was decoded can be encoded.
struct Judge {
    memory: Account,
    rules: ConnectionParams,
    taken: Cell<usize>,
}

impl SessionHandler for Judge {
    fn session_up(&self, _: Link) {}
    fn session_down(&self, _: NodeId, _: u64) {}
    async fn deliver(&self, _: NodeId, _: u64, received: ReceivedMessage) {
        let ReceivedMessage { message, ctx } = received;
        let mut queue = SendQueue::default();
        FrameEncoder::new(self.rules)
            .encode(message, &mut queue)
            .expect("what is read can be sent");
        assert!(queue.len() >= HEADER_BYTES && queue.len().is_multiple_of(8));
        drop(ctx);
        self.taken.set(self.taken.get() + 1);
    }
    fn account(&self) -> &Account {
        &self.memory
    }
    fn overhead_bytes(&self) -> usize {
        4096
    }
}

/// Makes frames of `script` with right checksums and numbers: a length byte, 64 bytes of header,
/// and a body that repeats one byte.
fn frames(script: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, piece) in script.chunks(HEADER_BYTES + 2).enumerate() {
        let Some((&[scale, fill], rest)) = piece.split_first_chunk() else { break };
        let mut header = [0; HEADER_BYTES];
        header[..rest.len()].copy_from_slice(rest);
        let length = usize::from(scale >> 2) << (2 * (scale & 3) + 1);
        let body = vec![fill; length];
        header[..3].copy_from_slice(b"WP\x01");
        header[4..8].fill(0);
        header[8..12].copy_from_slice(&(length as u32).to_le_bytes());
        header[12..16].copy_from_slice(&wire::crc32c(&body).to_le_bytes());
        header[28..32].copy_from_slice(&(number as u32).to_le_bytes());
        let sum = wire::crc32c(&header);
        header[4..8].copy_from_slice(&sum.to_le_bytes());
        out.extend(header);
        out.extend(body);
        out.resize(out.len() + padding(length), 0);
    }
    out
}

/// Feeds `bytes`, or frames made of them; returns how many messages arrived.
pub(crate) fn feed(purpose: u8, made: bool, portion: u16, bytes: &[u8]) -> usize {
    handshake(bytes);
    let lanes = [Lane::Control, Lane::Replication, Lane::Requests].map(ConnectionPurpose::Lane);
    let purpose = lanes.get(usize::from(purpose % 4)).copied().unwrap_or(ConnectionPurpose::Lease);
    let bytes = if made { frames(bytes) } else { bytes.to_vec() };
    let rules = ConnectionParams { purpose, version: 1, max_data_bytes: MAX_DATA_BYTES };
    let pool = BufferPool::new(POOL_BYTES).expect("memory");
    let judge = Rc::new(Judge { memory: pool.account(), rules, taken: Cell::new(0) });
    let (link, outbox) = Link::new(NodeId(1), 1);
    let expect = |request| {
        let credit = pool.account().try_credit(8192, MemoryClass::Read).expect("room");
        link.post_receive(request, Ctx::new(credit, Epoch(0)))
    };
    let _wanted = [0, 1, 2, 3].map(expect);
    drop([4, 5].map(expect));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime without I/O");
    let stream = Feed { bytes, at: 0, portion: usize::from(portion) };
    let end = tokio::task::LocalSet::new()
        .block_on(&runtime, peer::testing::drive(Rc::clone(&judge), 1, outbox, rules, stream));
    let expected = matches!(
        end,
        PeerSessionEnd::PeerClosed
            | PeerSessionEnd::InvalidFrame(_)
            | PeerSessionEnd::UnsolicitedData(_)
    );
    assert!(expected, "{end:?}");
    assert!(link.is_closed());
    let usage = pool.usage();
    assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    judge.taken.get()
}

/// Parses handshake frames: each is refused or understood.
fn handshake(bytes: &[u8]) {
    let Some((header, rest)) = bytes.split_first_chunk() else { return };
    if let Ok(len) = HandshakeFrame::body_bytes(header) {
        assert!(len <= 512);
        let body = rest.get(..len).unwrap_or(rest);
        let _ = HandshakeFrame::parse(header, body);
    }
    let _ = peer::frame::Hello::parse(bytes);
}
