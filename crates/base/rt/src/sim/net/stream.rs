//! Handles: streams and listeners.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use super::{CURRENT, Network};
use crate::sim::host_run::HostRun;

/// Most bytes of one write.
const MAX_WRITE: usize = 256 << 10;

/// A simulated listener.
pub(crate) struct SimListener {
    net: Network,
    host: usize,
    id: u64,
    at: SocketAddr,
    arrived: Rc<Notify>,
    run: Rc<HostRun>,
}

impl fmt::Debug for SimListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimListener").field(&self.at).finish()
    }
}

impl SimListener {
    pub(super) fn new(
        net: Network,
        host: usize,
        id: u64,
        at: SocketAddr,
        arrived: Rc<Notify>,
        boot: Rc<HostRun>,
    ) -> Self {
        Self { net, host, id, at, arrived, run: boot }
    }

    pub(crate) async fn accept(&self) -> io::Result<(SimStream, SocketAddr)> {
        loop {
            if let Some(mut stream) = self.net.take_accepted(self.host, self.id) {
                stream.run = Rc::clone(&self.run);
                let from = stream.peer;
                return Ok((stream, from));
            }
            self.arrived.notified().await;
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the same methods as the real listener")]
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.at)
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        if self.run.is_alive() {
            self.net.remove_listener(self.host, self.id);
        }
    }
}

/// A simulated connection.
pub(crate) struct SimStream {
    net: Network,
    number: u64,
    side: usize,
    local: SocketAddr,
    peer: SocketAddr,
    run: Rc<HostRun>,
    /// Whether it was detached to move to another core.
    detached: bool,
}

impl fmt::Debug for SimStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimStream").field("local", &self.local).field("peer", &self.peer).finish()
    }
}

impl SimStream {
    pub(super) fn new(
        net: Network,
        number: u64,
        side: usize,
        local: SocketAddr,
        peer: SocketAddr,
        boot: Rc<HostRun>,
    ) -> Self {
        Self { net, number, side, local, peer, run: boot, detached: false }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the same methods as the real stream")]
    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }

    #[expect(clippy::unnecessary_wraps, reason = "the same methods as the real stream")]
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    /// Detaches the connection from its core.
    pub(crate) fn detach(mut self) -> DetachedSimStream {
        self.detached = true;
        DetachedSimStream { number: self.number, side: self.side, taken: false }
    }

    /// Attaches it to a core.
    pub(crate) fn attach(
        net: &Network,
        boot: &Rc<HostRun>,
        mut detached: DetachedSimStream,
    ) -> io::Result<Self> {
        let (number, side) = (detached.number, detached.side);
        let (local, peer) = net.addresses(number, side).ok_or(io::ErrorKind::NotConnected)?;
        detached.taken = true;
        Ok(Self::new(net.clone(), number, side, local, peer, Rc::clone(boot)))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        // A crashed host has already closed it, or lost power.
        if !self.detached && self.run.is_alive() {
            self.net.close(self.number, self.side);
        }
    }
}

impl AsyncRead for SimStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let read = self.net.poll_read(self.number, self.side, buf.remaining(), cx.waker());
        read.map_ok(|bytes| buf.put_slice(&bytes))
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let some = &buf[..buf.len().min(MAX_WRITE)];
        self.net.poll_write(self.number, self.side, some, cx.waker())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut some = Vec::new();
        for b in bufs {
            some.extend_from_slice(&b[..b.len().min(MAX_WRITE - some.len())]);
        }
        self.net.poll_write(self.number, self.side, &some, cx.waker())
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.net.shut_down(self.number, self.side))
    }
}

/// A connection on its way from one core of a host to another.
pub(crate) struct DetachedSimStream {
    number: u64,
    side: usize,
    taken: bool,
}

impl Drop for DetachedSimStream {
    fn drop(&mut self) {
        if !self.taken
            && let Some(net) = CURRENT.with_borrow(std::rc::Weak::upgrade)
        {
            Network(net).close(self.number, self.side);
        }
    }
}
