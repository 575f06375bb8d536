//! A connection's byte stream as its protocol sees it: the socket's, or the plaintext of TLS on it (RFC 0022).
//!
//! Where both are possible the first byte decides. The state of TLS belongs to no core: a channel is
//! [taken apart](Channel::detach) and put together again with its socket.

use std::cell::OnceCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rt::net::{DetachedStream, Stream};
use tls::{Acceptor, Error, Hello, Psk, Session};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::conn::{Staging, Wire};

/// How much of a name that nobody knows is logged, in bytes: all of one that could be known.
const NAME_BYTES: usize = 525;

/// Looks at the socket in a row that bring no plaintext before the other tasks of the core get their turn.
const LOOKS: usize = 4;

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

/// Finds the key for a client, among those that it says it has.
pub(crate) type Keys = Box<dyn Fn(&Hello) -> Option<(Psk, Ends)>>;

/// The byte stream of a connection on this core.
pub(crate) struct Channel {
    stream: Stream,
    state: State,
    protection: Protection,
    keys: Option<Keys>,
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
        Self { stream, state, protection: Protection::default(), keys, staging }
    }

    /// One that comes from another core.
    pub(crate) fn attach(
        stream: Stream,
        (state, ends): (ChannelState, Option<Ends>),
        staging: Staging,
    ) -> Self {
        let protection = ends.map_or_else(Protection::default, |ends| Rc::new(ends.into()));
        // It was decided where it comes from which key it has, if any.
        Self { stream, state: state.0, protection, keys: None, staging }
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

    /// Reads the socket, and has TLS go on with what comes; whether there was anything.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let staging = self.staging.clone();
        let mut staging = staging.borrow_mut();
        let room = match &self.state {
            State::Tls(session, _) => session.room().min(staging.len()),
            _ => staging.len(),
        };
        if room == 0 {
            // It goes on as soon as it has a record, and has more than one: it is not what it should be.
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let mut buf = ReadBuf::new(&mut staging[..room]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf))?;
        match &mut self.state {
            State::Hello(acceptor) if !buf.filled().is_empty() => acceptor.receive(buf.filled()),
            State::Tls(session, _) if !buf.filled().is_empty() => session.receive(buf.filled()),
            State::Tls(session, _) => session.receive_end(),
            _ => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
        }
        Poll::Ready(Ok(()))
    }

    /// Goes on with the handshake, as far as it gets with what has come; whether it is done.
    fn shake_hands(&mut self, cx: &mut Context<'_>) -> Result<bool, Error> {
        if let State::Hello(acceptor) = &mut self.state {
            let Some(hello) = acceptor.hello()? else { return Ok(false) };
            let found = self.keys.as_ref().and_then(|keys| keys(&hello));
            let (psk, ends) = found.ok_or_else(|| {
                let named = hello.offers().first().map_or(&[][..], |offer| &offer.identity);
                let named = String::from_utf8_lossy(&named[..named.len().min(NAME_BYTES)]);
                tracing::info!(key = ?named, "a client of TLS does not have such a key");
                Error::WrongKey
            })?;
            let session = std::mem::take(acceptor).accept(&psk)?;
            self.state = State::Tls(Box::new(session), Some(ends));
        }
        let State::Tls(session, ends) = &mut self.state else { return Ok(false) };
        let is_done = session.handshake();
        if is_done == Ok(true)
            && let Some(ends) = ends.take()
        {
            // There is one handshake in a connection's life.
            let _ = self.protection.set(ends);
        }
        // A part of the answer may be ready; what the socket does not take now it takes when it is written to.
        let _ = self.poll_send(cx);
        is_done
    }

    /// Refuses the client: it is told why, as far as the socket takes that.
    fn refuse(&mut self, cx: &mut Context<'_>, why: Error) -> io::Error {
        tracing::info!(peer = ?self.stream.peer_addr().ok(), %why, "a handshake of TLS has failed");
        if let Some(alert) = why.alert_record() {
            let _ = Pin::new(&mut self.stream).poll_write(cx, &alert);
        }
        self.state = State::Refused;
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    /// Sends ciphertext until nothing is left.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let State::Tls(session, _) = &mut self.state else { return Poll::Ready(Ok(())) };
        while !session.output().is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, session.output())) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => session.sent(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        Poll::Ready(Ok(()))
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
    ) -> Poll<io::Result<()>> {
        for _ in 0..LOOKS {
            match self.shake_hands(cx) {
                Ok(true) => {}
                Ok(false) => {
                    ready!(self.poll_receive(cx))?;
                    continue;
                }
                Err(Error::Closed) => return Poll::Ready(Ok(())),
                Err(why) => return Poll::Ready(Err(self.refuse(cx, why))),
            }
            let State::Tls(session, _) = &mut self.state else { return Poll::Ready(Ok(())) };
            match session.read(buf.initialize_unfilled()) {
                Ok(Some(n)) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(None) => {}
                Err(Error::Closed) => return Poll::Ready(Ok(())),
                Err(why) => {
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)));
                }
            }
            match self.poll_receive(cx) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    if let State::Tls(session, _) = &mut self.state {
                        session.rest();
                    }
                    return Poll::Pending;
                }
            }
        }
        // There may be more where that came from: records without plaintext, changes of keys.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
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
        this.poll_read_tls(cx, buf)
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
        let _ = this.poll_send(cx)?;
        let State::Tls(session, _) = &mut this.state else { return Poll::Pending };
        let written = session.write(bufs.iter().map(|buf| &**buf));
        match written.map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))? {
            // The socket wakes the task once it takes some of what waits, or the client once it goes on.
            0 => Poll::Pending,
            n => {
                let _ = this.poll_send(cx)?;
                Poll::Ready(Ok(n))
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let State::Tls(session, _) = &mut this.state {
            session.close();
            // Whoever does not read will not hear it; the end of the stream says the same.
            let _ = this.poll_send(cx)?;
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
