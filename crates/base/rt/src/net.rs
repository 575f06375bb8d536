//! TCP, real or simulated, and Unix sockets: listeners and streams under tokio's traits.

mod unix_listener;

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};

use crate::driver_waker::DriverWaker;
use crate::flow;
pub use crate::listen_options::ListenOptions;
#[cfg(feature = "sim")]
use crate::sim::net::{DetachedSimStream, SimListener, SimStream};
use crate::sys;
use unix_listener::UnixSocketListener;

/// Waits for connections on one address.
#[derive(Debug)]
pub struct Listener(ListenerKind);

#[derive(Debug)]
enum ListenerKind {
    Tcp(TcpListener, Rc<DriverWaker>),
    Unix(UnixSocketListener, Rc<DriverWaker>),
    #[cfg(feature = "sim")]
    Sim(SimListener),
}

/// The address reported for a Unix socket, which has none: `0.0.0.0:0`.
const UNIX_SOCKET_ADDR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl Listener {
    /// Listens on real TCP. The address may be reused right after an earlier process.
    pub(crate) fn tcp(
        at: SocketAddr,
        how: ListenOptions,
        pulse: Rc<DriverWaker>,
    ) -> io::Result<Self> {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        if how.reuse_port {
            socket.set_reuseport(true)?;
        }
        socket.bind(at)?;
        Ok(Self(ListenerKind::Tcp(socket.listen(how.backlog)?, pulse)))
    }

    /// Listens at a Unix socket, and sets its file's mode if given.
    pub(crate) async fn unix(
        at: &Path,
        (backlog, mode): (u32, Option<u32>),
        pulse: Rc<DriverWaker>,
    ) -> io::Result<Self> {
        Ok(Self(ListenerKind::Unix(UnixSocketListener::bind(at, backlog, mode).await?, pulse)))
    }

    #[cfg(feature = "sim")]
    pub(crate) fn sim(listener: SimListener) -> Self {
        Self(ListenerKind::Sim(listener))
    }

    /// The next connection and its peer address: the unspecified address for a Unix socket.
    ///
    /// # Errors
    /// What the system reports. Errors of one connection (closed before it was accepted) and of the
    /// process (no descriptors left) look alike: wait a little and retry.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match &self.0 {
            ListenerKind::Tcp(listener, pulse) => {
                let (stream, from) = listener.accept().await?;
                Ok((Stream::tcp(stream, Rc::clone(pulse))?, canonical(from)))
            }
            ListenerKind::Unix(listener, pulse) => {
                let stream = StreamKind::Unix(listener.accept().await?, Rc::clone(pulse));
                Ok((Stream(stream), UNIX_SOCKET_ADDR))
            }
            #[cfg(feature = "sim")]
            ListenerKind::Sim(listener) => {
                let (stream, from) = listener.accept().await?;
                Ok((Stream::sim(stream), from))
            }
        }
    }

    /// The local address, with the port that the system chose if none was given; the unspecified
    /// one for a Unix socket.
    ///
    /// # Errors
    /// What the system reports.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            ListenerKind::Tcp(listener, _) => listener.local_addr(),
            ListenerKind::Unix(..) => Ok(UNIX_SOCKET_ADDR),
            #[cfg(feature = "sim")]
            ListenerKind::Sim(listener) => listener.local_addr(),
        }
    }
}

/// The canonical form of an address: a socket that listens at `[::]` reports IPv4 addresses as
/// mapped ones.
fn canonical(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// A connection on this core, by TCP or a Unix socket. Small writes are sent at once (no Nagle
/// delay).
#[derive(Debug)]
pub struct Stream(StreamKind);

#[derive(Debug)]
enum StreamKind {
    Tcp(TcpStream, Rc<DriverWaker>),
    Unix(UnixStream, Rc<DriverWaker>),
    #[cfg(feature = "sim")]
    Sim(SimStream),
}

impl Stream {
    pub(crate) fn tcp(stream: TcpStream, pulse: Rc<DriverWaker>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(StreamKind::Tcp(stream, pulse)))
    }

    pub(crate) async fn dial_tcp(to: SocketAddr, pulse: Rc<DriverWaker>) -> io::Result<Self> {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        Self::tcp(socket.connect(to).await?, pulse)
    }

    pub(crate) async fn dial_unix(to: &Path, pulse: Rc<DriverWaker>) -> io::Result<Self> {
        Ok(Self(StreamKind::Unix(UnixStream::connect(to).await?, pulse)))
    }

    #[cfg(feature = "sim")]
    pub(crate) fn sim(stream: SimStream) -> Self {
        Self(StreamKind::Sim(stream))
    }

    /// The peer's address; the unspecified one for a Unix socket.
    ///
    /// # Errors
    /// What the system reports; the connection may be gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            StreamKind::Tcp(s, _) => s.peer_addr().map(canonical),
            StreamKind::Unix(..) => Ok(UNIX_SOCKET_ADDR),
            #[cfg(feature = "sim")]
            StreamKind::Sim(s) => s.peer_addr(),
        }
    }

    /// The local address; the unspecified one for a Unix socket.
    ///
    /// # Errors
    /// What the system reports.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            StreamKind::Tcp(s, _) => s.local_addr().map(canonical),
            StreamKind::Unix(..) => Ok(UNIX_SOCKET_ADDR),
            #[cfg(feature = "sim")]
            StreamKind::Sim(s) => s.local_addr(),
        }
    }

    /// A monitor that detects whether the peer has closed. While it exists the connection stays
    /// open.
    ///
    /// # Errors
    /// What the system reports.
    pub fn hangup_monitor(&self) -> io::Result<HangupMonitor> {
        let fd = match &self.0 {
            StreamKind::Tcp(s, _) => s.as_fd(),
            StreamKind::Unix(s, _) => s.as_fd(),
            #[cfg(feature = "sim")]
            StreamKind::Sim(_) => return Ok(HangupMonitor(None)),
        };
        fd.try_clone_to_owned().map(Some).map(HangupMonitor)
    }

    /// Resets the connection when this is dropped, and discards data not yet sent: for a peer that
    /// must receive nothing more. (A simulated connection is closed normally: what was written is
    /// in transit; likewise a Unix socket, where it has arrived.)
    ///
    /// # Errors
    /// What the system reports.
    pub fn reset_on_drop(&self) -> io::Result<()> {
        match &self.0 {
            StreamKind::Tcp(s, _) => s.set_zero_linger(),
            StreamKind::Unix(..) => Ok(()),
            #[cfg(feature = "sim")]
            StreamKind::Sim(_) => Ok(()),
        }
    }

    /// Detaches the connection from this core, so that another can [`crate::Core::attach`] it.
    /// Unread bytes stay in it.
    ///
    /// # Errors
    /// What the system reports.
    pub fn detach(self) -> io::Result<DetachedStream> {
        match self.0 {
            StreamKind::Tcp(s, _) => Ok(DetachedStream(DetachedKind::Tcp(s.into_std()?))),
            StreamKind::Unix(s, _) => Ok(DetachedStream(DetachedKind::Unix(s.into_std()?))),
            #[cfg(feature = "sim")]
            StreamKind::Sim(s) => Ok(DetachedStream(DetachedKind::Sim(s.detach()))),
        }
    }

    pub(crate) fn attach(detached: DetachedStream, pulse: &Rc<DriverWaker>) -> io::Result<Self> {
        match detached.0 {
            DetachedKind::Tcp(s) => {
                Ok(Self(StreamKind::Tcp(TcpStream::from_std(s)?, Rc::clone(pulse))))
            }
            DetachedKind::Unix(s) => {
                Ok(Self(StreamKind::Unix(UnixStream::from_std(s)?, Rc::clone(pulse))))
            }
            #[cfg(feature = "sim")]
            DetachedKind::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

#[cfg(feature = "sim")]
impl DetachedStream {
    /// The simulated connection, if it is one.
    pub(crate) fn into_sim(self) -> io::Result<DetachedSimStream> {
        match self.0 {
            DetachedKind::Sim(s) => Ok(s),
            DetachedKind::Tcp(_) | DetachedKind::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// Detects the end of a connection before the data ahead of it has been read.
#[derive(Debug)]
pub struct HangupMonitor(Option<OwnedFd>);

impl HangupMonitor {
    /// Whether the peer has closed a Unix socket, or has reset a TCP connection. An orderly close
    /// of TCP looks like a peer that has finished sending and waits for answers; a simulated
    /// connection never looks closed.
    #[must_use]
    pub fn is_hung_up(&self) -> bool {
        self.0.as_ref().is_some_and(|fd| sys::is_hung_up(fd.as_fd()))
    }
}

/// A connection between two cores.
pub struct DetachedStream(DetachedKind);

impl DetachedStream {
    /// The Unix socket, for a thread that may block.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for another kind of connection; what the system reports.
    pub fn into_unix(self) -> io::Result<std::os::unix::net::UnixStream> {
        match self.0 {
            DetachedKind::Unix(stream) => {
                stream.set_nonblocking(false)?;
                Ok(stream)
            }
            DetachedKind::Tcp(_) => Err(io::ErrorKind::Unsupported.into()),
            #[cfg(feature = "sim")]
            DetachedKind::Sim(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

enum DetachedKind {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
    #[cfg(feature = "sim")]
    Sim(DetachedSimStream),
}

const _: () = {
    const fn crosses_threads<T: Send>() {}
    crosses_threads::<DetachedStream>();
};

impl fmt::Debug for DetachedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DetachedStream")
    }
}

/// Calls a method of tokio's traits on any kind of stream.
macro_rules! forward {
    ($self:expr, $s:ident => $call:expr) => {
        match &mut $self.get_mut().0 {
            StreamKind::Tcp(s, _) => {
                let $s = Pin::new(s);
                $call
            }
            StreamKind::Unix(s, _) => {
                let $s = Pin::new(s);
                $call
            }
            #[cfg(feature = "sim")]
            StreamKind::Sim(s) => {
                let $s = Pin::new(s);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let (polled, pulse) = match &mut self.get_mut().0 {
            StreamKind::Tcp(s, pulse) => (Pin::new(s).poll_read(cx, buf), Some(pulse)),
            StreamKind::Unix(s, pulse) => (Pin::new(s).poll_read(cx, buf), Some(pulse)),
            #[cfg(feature = "sim")]
            StreamKind::Sim(s) => (Pin::new(s).poll_read(cx, buf), None),
        };
        let received = buf.filled().len() - before;
        if received > 0 {
            flow::charge(received as u64);
            pulse.iter().for_each(|pulse| pulse.note_activity());
        }
        polled
    }
}

fn charge_sent(sent: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
    if let Poll::Ready(Ok(bytes)) = &sent {
        flow::charge(*bytes as u64);
    }
    sent
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        charge_sent(forward!(self, s => s.poll_write(cx, buf)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        charge_sent(forward!(self, s => s.poll_write_vectored(cx, bufs)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_shutdown(cx))
    }
}
