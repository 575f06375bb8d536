//! A connection's byte stream as its protocol sees it: the socket's, or the plaintext of TLS on it (RFC 0022).
//!
//! Where both are possible the first byte decides. The state of TLS belongs to no core: a channel is
//! [taken apart](Channel::detach) and put together again with its socket.

use std::cell::OnceCell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rt::net::{DetachedStream, Stream};
use tls::{Acceptor, Error, Fault, Hello, Psk, Session};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::conn::{Staging, Wire};
use crate::server::Attempt;

/// How much of a name that nobody knows is logged, in bytes: all of one that could be known.
const NAME_BYTES: usize = 525;

/// Between whom a channel is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    /// The host's NQN.
    pub(crate) host: String,
    /// The subsystem's.
    pub(crate) subsystem: String,
}

/// Between whom a channel is protected, for its protocol to see: nothing until a handshake is done.
pub(crate) type Protection = Rc<OnceCell<Ends>>;

/// Knows the keys of clients, and which clients do not have theirs.
pub(crate) trait KnowsKeys {
    /// Finds the key for a client, among those that it says it has.
    fn find(&self, hello: &Hello) -> Option<(Psk, Ends)>;

    /// A client is to show that it has a key: when it may, or nothing if too many wait already.
    fn attempt(
        &self,
        peer: SocketAddr,
        hello: Option<&Hello>,
    ) -> Option<(Option<Instant>, Attempt)>;
}

/// What knows the keys of clients.
pub(crate) type Keys = Box<dyn KnowsKeys>;

/// A client that shows which key it has.
struct Tried {
    attempt: Attempt,
    /// What it calls its key.
    name: String,
    /// Until when it waits for its turn.
    wait: Option<Pin<Box<Sleep>>>,
}

/// The byte stream of a connection on this core.
pub(crate) struct Channel {
    stream: Stream,
    state: State,
    protection: Protection,
    keys: Option<Keys>,
    /// Who shows a key, once that is known.
    tried: Option<Tried>,
    /// Where ciphertext is read to.
    staging: Staging,
}

/// How far a connection has come with TLS.
enum State {
    /// It has none.
    Plain,
    /// Nothing has come.
    Undecided,
    /// The client has not said its hello to the end.
    Hello(Acceptor),
    /// It has; `Ends` are those that the handshake is about, until it is done.
    Tls(Box<Session>, Option<Ends>),
    /// The client was refused.
    Refused,
}

/// A channel between two cores.
pub(crate) struct DetachedChannel {
    stream: DetachedStream,
    state: State,
    ends: Option<Ends>,
}

const _: () = {
    const fn crosses_threads<T: Send>() {}
    crosses_threads::<DetachedChannel>();
};

impl Channel {
    /// A connection that has just been accepted. With `keys` it has TLS if its client begins with that.
    pub(crate) fn new(stream: Stream, keys: Option<Keys>, staging: Staging) -> Self {
        let state = if keys.is_some() { State::Undecided } else { State::Plain };
        Self { stream, state, protection: Protection::default(), keys, tried: None, staging }
    }

    /// One that comes from another core.
    pub(crate) fn attach(
        stream: Stream,
        (state, ends): (ChannelState, Option<Ends>),
        staging: Staging,
    ) -> Self {
        let protection = ends.map_or_else(Protection::default, |ends| Rc::new(ends.into()));
        // It was decided where it comes from which key it has, if any.
        Self { stream, state: state.0, protection, keys: None, tried: None, staging }
    }

    /// Takes it off this core.
    pub(crate) fn detach(self) -> io::Result<DetachedChannel> {
        let ends = self.protection.get().cloned();
        Ok(DetachedChannel { stream: self.stream.detach()?, state: self.state, ends })
    }

    /// Between whom it is protected.
    pub(crate) fn protection(&self) -> Protection {
        Rc::clone(&self.protection)
    }

    /// Reads from the socket what the client says first; has TLS begin when that is whole.
    fn poll_hello(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        while let State::Hello(acceptor) = &mut self.state {
            if let Some(hello) = acceptor.hello()? {
                let Some(keys) = &self.keys else {
                    return Poll::Ready(Err(Error::WrongKey.into()));
                };
                if self.tried.is_none() {
                    self.tried = Some(begin(keys, &hello, self.stream.peer_addr()?)?);
                }
                if let Some(wait) = self.tried.as_mut().and_then(|tried| tried.wait.as_mut()) {
                    ready!(wait.as_mut().poll(cx));
                }
                let (psk, ends) = keys.find(&hello).ok_or(Error::WrongKey)?;
                let session = std::mem::take(acceptor).accept(&psk)?;
                self.state = State::Tls(Box::new(session), Some(ends));
                break;
            }
            let mut staging = self.staging.borrow_mut();
            let mut buf = ReadBuf::new(&mut staging);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
            }
            acceptor.receive(buf.filled());
        }
        Poll::Ready(Ok(()))
    }

    /// Refuses the client: it is told why, as far as the socket takes that.
    fn refuse(&mut self, cx: &mut Context<'_>, why: Error) -> io::Error {
        let begun = match (self.tried.take(), &self.keys, self.stream.peer_addr()) {
            (Some(Tried { attempt, name, .. }), ..) => Some((attempt, name)),
            (None, Some(keys), Ok(peer)) if !self.is_established() => {
                keys.attempt(peer, None).map(|(_, attempt)| (attempt, String::new()))
            }
            _ => {
                tracing::info!(%why, "a connection by TLS has failed");
                None
            }
        };
        if let Some((attempt, name)) = begun {
            attempt.failed(&name, &why.to_string());
        }
        if let Some(alert) = why.alert_record() {
            let _ = Pin::new(&mut self.stream).poll_write(cx, &alert);
        }
        self.state = State::Refused;
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Reads the first bytes of a connection that may have TLS; whether they are plain, and for the protocol.
    fn poll_first(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<bool>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let first = buf.filled().get(before..).unwrap_or_default();
        if first.first() != Some(&tls::FIRST_BYTE) {
            if !first.is_empty() {
                self.state = State::Plain;
            }
            return Poll::Ready(Ok(true));
        }
        let mut acceptor = Acceptor::default();
        acceptor.receive(first);
        buf.set_filled(before);
        self.state = State::Hello(acceptor);
        Poll::Ready(Ok(false))
    }

    /// Reads plaintext from behind TLS.
    fn poll_read_tls(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), Fault>> {
        ready!(self.poll_hello(cx))?;
        let State::Tls(session, ends) = &mut self.state else { return Poll::Ready(Ok(())) };
        let read = session.poll_read(&mut self.stream, &mut self.staging.borrow_mut(), cx, buf);
        if session.is_established()
            && let Some(ends) = ends.take()
        {
            if let Some(tried) = self.tried.take() {
                tried.attempt.succeeded();
            }
            // There is one handshake in a connection's life.
            let _ = self.protection.set(ends);
        }
        read
    }

    /// Whether its client has come through the handshake.
    fn is_established(&self) -> bool {
        matches!(&self.state, State::Tls(session, _) if session.is_established())
    }
}

/// A client has said its hello: who it is, and when it has its turn.
fn begin(keys: &Keys, hello: &Hello, peer: SocketAddr) -> io::Result<Tried> {
    let named = hello.offers().first().map_or(&[][..], |offer| &offer.identity);
    let name = String::from_utf8_lossy(&named[..named.len().min(NAME_BYTES)]);
    // It is not worth an answer where too many from there wait already.
    let Some((at, attempt)) = keys.attempt(peer, Some(hello)) else {
        return Err(io::ErrorKind::ConnectionRefused.into());
    };
    let wait = at.map(|at| Box::pin(tokio::time::sleep_until(at)));
    Ok(Tried { attempt, name: name.escape_debug().to_string(), wait })
}

/// How far a channel between two cores has come with TLS.
pub(crate) struct ChannelState(State);

impl DetachedChannel {
    /// The socket, and what [`Channel::attach`] needs beside it.
    pub(crate) fn into_parts(self) -> (DetachedStream, (ChannelState, Option<Ends>)) {
        (self.stream, (ChannelState(self.state), self.ends))
    }
}

impl AsyncRead for Channel {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &this.state {
            State::Plain => return Pin::new(&mut this.stream).poll_read(cx, buf),
            State::Undecided => {
                if ready!(this.poll_first(cx, buf))? {
                    return Poll::Ready(Ok(()));
                }
            }
            State::Hello(_) | State::Tls(..) => {}
            State::Refused => return Poll::Ready(Ok(())),
        }
        match ready!(this.poll_read_tls(cx, buf)) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(Fault::Tls(why)) if !this.is_established() => {
                Poll::Ready(Err(this.refuse(cx, why)))
            }
            Err(why) => Poll::Ready(Err(why.into())),
        }
    }
}

impl AsyncWrite for Channel {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if matches!(this.state, State::Plain | State::Undecided) {
            return Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        }
        let State::Tls(session, _) = &mut this.state else { return Poll::Pending };
        session.poll_write(&mut this.stream, cx, bufs).map_err(io::Error::from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let State::Tls(session, _) = &mut this.state {
            ready!(session.poll_send(&mut this.stream, cx))?;
        }
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let State::Tls(session, _) = &mut this.state {
            session.farewell(&mut this.stream, cx)?;
        }
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

impl Wire for Channel {
    fn waiting(&self) -> usize {
        match &self.state {
            State::Tls(session, _) => session.output().len(),
            _ => 0,
        }
    }
}
