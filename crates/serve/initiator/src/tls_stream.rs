//! A client connection with TLS (RFD 0022).

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rt::net::Stream;
use tls::{Psk, Session, StreamError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::connection::{Staging, Transport};

/// The plaintext stream.
pub(crate) struct TlsStream {
    stream: Stream,
    session: Box<Session>,
    /// Buffer for received ciphertext.
    staging: Staging,
}

impl TlsStream {
    /// Performs the handshake with a pre-shared key.
    ///
    /// # Errors
    /// Why the handshake failed.
    pub(crate) async fn new(
        stream: Stream,
        psk: &Psk,
        staging: Staging,
    ) -> Result<Self, StreamError> {
        let session = Box::new(Session::client(psk)?);
        let mut this = Self { stream, session, staging };
        poll_fn(|cx| this.poll_handshake(cx)).await?;
        Ok(this)
    }

    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StreamError>> {
        while !self.session.drive_handshake(&mut self.stream, cx)? {
            let staging = &mut self.staging.borrow_mut();
            ready!(self.session.poll_receive(&mut self.stream, staging, cx))?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, session, staging } = self.get_mut();
        let read = session.poll_read(stream, &mut staging.borrow_mut(), cx, buf);
        read.map_err(io::Error::from)
    }
}

impl AsyncWrite for TlsStream {
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
        let Self { stream, session, .. } = self.get_mut();
        session.poll_write(stream, cx, bufs).map_err(io::Error::from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, session, .. } = self.get_mut();
        ready!(session.poll_send(stream, cx))?;
        Pin::new(stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, session, .. } = self.get_mut();
        session.send_close_notify(stream, cx)?;
        Pin::new(stream).poll_shutdown(cx)
    }
}

impl Transport for TlsStream {
    fn abandon(&self) {
        self.stream.abandon();
    }
}
