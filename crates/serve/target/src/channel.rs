//! A connection's byte stream as its protocol sees it: the socket's, or the plaintext of TLS on it
//! (RFD 0022).
//!
//! Where both are possible the first byte decides. The TLS state belongs to no core: a channel is
//! [detached](Channel::detach) from one core and attached to another with its socket.

use std::cell::OnceCell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rt::net::{DetachedStream, Stream};
use tls::{Acceptor, ClientHello, Psk, Session, StreamError, TlsError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::connection::{BufferedStream, Staging};
use crate::server::AuthAttempt;

/// Most bytes of an unknown name that are logged: enough for any valid one.
const MAX_LOGGED_NAME_BYTES: usize = 525;

/// The two parties of a TLS connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsEndpoints {
    /// The host's NQN.
    pub(crate) host: String,
    /// The subsystem's.
    pub(crate) subsystem: String,
}

/// The two parties of the channel's TLS connection, for its protocol to read: empty until the
/// handshake is complete.
pub(crate) type SharedTlsEndpoints = Rc<OnceCell<TlsEndpoints>>;

/// Finds the keys of clients, and throttles clients that fail to prove theirs.
pub(crate) trait PskLookup {
    /// Finds the key of a client among those that it offers.
    fn find(&self, hello: &ClientHello) -> Option<(Psk, TlsEndpoints)>;

    /// A client begins to prove that it has a key: returns when it may, or nothing if too many are
    /// waiting.
    fn attempt(
        &self,
        peer: SocketAddr,
        hello: Option<&ClientHello>,
    ) -> Option<(Option<Instant>, AuthAttempt)>;
}

/// A boxed [`PskLookup`].
pub(crate) type BoxedPskLookup = Box<dyn PskLookup>;

/// A client's attempt to prove its key.
struct HandshakeAttempt {
    attempt: AuthAttempt,
    /// The identity of the key as the client gives it.
    name: String,
    /// The delay before the attempt.
    wait: Option<Pin<Box<Sleep>>>,
}

/// The byte stream of a connection on this core.
pub(crate) struct Channel {
    stream: Stream,
    state: State,
    protection: SharedTlsEndpoints,
    keys: Option<BoxedPskLookup>,
    /// The client's attempt, once it has offered a key.
    handshake: Option<HandshakeAttempt>,
    /// The buffer for received ciphertext.
    staging: Staging,
}

/// The TLS state of a connection.
enum State {
    /// No TLS.
    Plain,
    /// Nothing was received yet.
    Undecided,
    /// The ClientHello is incomplete.
    Hello(Acceptor),
    /// The handshake has begun; `TlsEndpoints` are its parties, until it is complete.
    Tls(Box<Session>, Option<TlsEndpoints>),
    /// The client was refused.
    Refused,
}

/// A channel between two cores.
pub(crate) struct DetachedChannel {
    stream: DetachedStream,
    state: State,
    ends: Option<TlsEndpoints>,
}

const _: () = {
    const fn crosses_threads<T: Send>() {}
    crosses_threads::<DetachedChannel>();
};

impl Channel {
    /// A connection that was just accepted. With `keys` it uses TLS if the client starts with a
    /// ClientHello.
    pub(crate) fn new(stream: Stream, keys: Option<BoxedPskLookup>, staging: Staging) -> Self {
        let state = if keys.is_some() { State::Undecided } else { State::Plain };
        Self {
            stream,
            state,
            protection: SharedTlsEndpoints::default(),
            keys,
            handshake: None,
            staging,
        }
    }

    /// A channel from another core.
    pub(crate) fn attach(
        stream: Stream,
        (state, ends): (ChannelState, Option<TlsEndpoints>),
        staging: Staging,
    ) -> Self {
        let protection = ends.map_or_else(SharedTlsEndpoints::default, |ends| Rc::new(ends.into()));
        // The other core has already chosen the key, if any.
        Self { stream, state: state.0, protection, keys: None, handshake: None, staging }
    }

    /// Detaches it from this core.
    pub(crate) fn detach(self) -> io::Result<DetachedChannel> {
        let ends = self.protection.get().cloned();
        Ok(DetachedChannel { stream: self.stream.detach()?, state: self.state, ends })
    }

    /// The parties of the TLS connection.
    pub(crate) fn protection(&self) -> SharedTlsEndpoints {
        Rc::clone(&self.protection)
    }

    /// Reads the ClientHello from the socket; starts TLS when it is complete.
    fn poll_hello(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        while let State::Hello(acceptor) = &mut self.state {
            if let Some(hello) = acceptor.hello()? {
                let Some(keys) = &self.keys else {
                    return Poll::Ready(Err(TlsError::UnknownPsk.into()));
                };
                if self.handshake.is_none() {
                    self.handshake = Some(begin_handshake(keys, &hello, self.stream.peer_addr()?)?);
                }
                if let Some(wait) = self.handshake.as_mut().and_then(|tried| tried.wait.as_mut()) {
                    ready!(wait.as_mut().poll(cx));
                }
                let (psk, ends) = keys.find(&hello).ok_or(TlsError::UnknownPsk)?;
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

    /// Refuses the client: sends an alert, as far as the socket takes it.
    fn refuse(&mut self, cx: &mut Context<'_>, why: TlsError) -> io::Error {
        let begun = match (self.handshake.take(), &self.keys, self.stream.peer_addr()) {
            (Some(HandshakeAttempt { attempt, name, .. }), ..) => Some((attempt, name)),
            (None, Some(keys), Ok(peer)) if !self.is_established() => {
                keys.attempt(peer, None).map(|(_, attempt)| (attempt, String::new()))
            }
            _ => {
                tracing::info!(%why, "a TLS connection failed");
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

    /// Reads the first bytes of a connection that may use TLS; returns whether they are plain, and
    /// thus for the protocol.
    fn poll_first_bytes(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<bool>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let first = buf.filled().get(before..).unwrap_or_default();
        if first.first() != Some(&tls::HANDSHAKE_RECORD) {
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

    /// Reads decrypted plaintext.
    fn poll_read_tls(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), StreamError>> {
        ready!(self.poll_hello(cx))?;
        let State::Tls(session, ends) = &mut self.state else { return Poll::Ready(Ok(())) };
        let read = session.poll_read(&mut self.stream, &mut self.staging.borrow_mut(), cx, buf);
        if session.is_established()
            && let Some(ends) = ends.take()
        {
            if let Some(tried) = self.handshake.take() {
                tried.attempt.succeeded();
            }
            // There is one handshake per connection.
            let _ = self.protection.set(ends);
        }
        read
    }

    /// Whether the handshake is complete.
    fn is_established(&self) -> bool {
        matches!(&self.state, State::Tls(session, _) if session.is_established())
    }
}

/// The ClientHello is complete: finds the client's key and when its attempt may be made.
fn begin_handshake(
    keys: &BoxedPskLookup,
    hello: &ClientHello,
    peer: SocketAddr,
) -> io::Result<HandshakeAttempt> {
    let named = hello.offers().first().map_or(&[][..], |offer| &offer.identity);
    let name = String::from_utf8_lossy(&named[..named.len().min(MAX_LOGGED_NAME_BYTES)]);
    // Not worth an answer if too many attempts from there are waiting.
    let Some((at, attempt)) = keys.attempt(peer, Some(hello)) else {
        return Err(io::ErrorKind::ConnectionRefused.into());
    };
    let wait = at.map(|at| Box::pin(tokio::time::sleep_until(at)));
    Ok(HandshakeAttempt { attempt, name: name.escape_debug().to_string(), wait })
}

/// The TLS state of a channel between two cores.
pub(crate) struct ChannelState(State);

impl DetachedChannel {
    /// The socket, and what else [`Channel::attach`] needs.
    pub(crate) fn into_parts(self) -> (DetachedStream, (ChannelState, Option<TlsEndpoints>)) {
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
                if ready!(this.poll_first_bytes(cx, buf))? {
                    return Poll::Ready(Ok(()));
                }
            }
            State::Hello(_) | State::Tls(..) => {}
            State::Refused => return Poll::Ready(Ok(())),
        }
        match ready!(this.poll_read_tls(cx, buf)) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(StreamError::Tls(why)) if !this.is_established() => {
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
            session.send_close_notify(&mut this.stream, cx)?;
        }
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

impl BufferedStream for Channel {
    fn unsent_bytes(&self) -> usize {
        match &self.state {
            State::Tls(session, _) => session.output().len(),
            _ => 0,
        }
    }
}
