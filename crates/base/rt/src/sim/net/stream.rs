//! The handles: streams and listeners.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use super::{CURRENT, Net};
use crate::sim::host::Boot;

/// Most bytes that one call of a write takes.
const MAX_WRITE: usize = 256 << 10;

/// A simulated listener.
pub(crate) struct SimListener {
    net: Net,
    host: usize,
    id: u64,
    at: SocketAddr,
    arrived: Rc<Notify>,
    boot: Rc<Boot>,
}

impl fmt::Debug for SimListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimListener").field(&self.at).finish()
    }
}

impl SimListener {
    pub(super) fn new(
        net: Net,
        host: usize,
        id: u64,
        at: SocketAddr,
        arrived: Rc<Notify>,
        boot: Rc<Boot>,
    ) -> Self {
        Self { net, host, id, at, arrived, boot }
    }

    pub(crate) async fn accept(&self) -> io::Result<(SimStream, SocketAddr)> {
        loop {
            if let Some(mut stream) = self.net.take_arrived(self.host, self.id) {
                stream.boot = Rc::clone(&self.boot);
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
        if self.boot.is_alive() {
            self.net.unlisten(self.host, self.id);
        }
    }
}

/// A simulated connection.
pub(crate) struct SimStream {
    net: Net,
    number: u64,
    side: usize,
    local: SocketAddr,
    peer: SocketAddr,
    boot: Rc<Boot>,
    /// It moved to another core.
    detached: bool,
}

impl fmt::Debug for SimStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimStream").field("local", &self.local).field("peer", &self.peer).finish()
    }
}

impl SimStream {
    pub(super) fn new(
        net: Net,
        number: u64,
        side: usize,
        local: SocketAddr,
        peer: SocketAddr,
        boot: Rc<Boot>,
    ) -> Self {
        Self { net, number, side, local, peer, boot, detached: false }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the same methods as the real stream")]
    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }

    #[expect(clippy::unnecessary_wraps, reason = "the same methods as the real stream")]
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    /// Takes the connection off its core.
    pub(crate) fn detach(mut self) -> DetachedSim {
        self.detached = true;
        DetachedSim { number: self.number, side: self.side, taken: false }
    }

    /// The other way round.
    pub(crate) fn attach(
        net: &Net,
        boot: &Rc<Boot>,
        mut detached: DetachedSim,
    ) -> io::Result<Self> {
        let (number, side) = (detached.number, detached.side);
        let (local, peer) = net.addresses(number, side).ok_or(io::ErrorKind::NotConnected)?;
        detached.taken = true;
        Ok(Self::new(net.clone(), number, side, local, peer, Rc::clone(boot)))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        // A host that crashed has taken leave in its own way.
        if !self.detached && self.boot.is_alive() {
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
pub(crate) struct DetachedSim {
    number: u64,
    side: usize,
    taken: bool,
}

impl Drop for DetachedSim {
    fn drop(&mut self) {
        if !self.taken
            && let Some(net) = CURRENT.with_borrow(std::rc::Weak::upgrade)
        {
            Net(net).close(self.number, self.side);
        }
    }
}
