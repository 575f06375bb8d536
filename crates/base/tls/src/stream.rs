//! A session on the byte stream of its ciphertext: plaintext is read and written like that of any
//! stream.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Session, TlsError};

/// Reads in a row without plaintext before yielding to other tasks.
const MAX_READS_PER_POLL: usize = 4;

/// Why plaintext cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The session has failed.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The stream has failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<StreamError> for io::Error {
    fn from(fault: StreamError) -> Self {
        match fault {
            StreamError::Tls(why) => Self::new(io::ErrorKind::InvalidData, why),
            StreamError::Io(why) => why,
        }
    }
}

impl Session {
    /// Continues the handshake with what has arrived from `stream`, and sends the answers; returns
    /// whether it is complete. If not, it registers no wake-up: [`Self::poll_receive`] does.
    ///
    /// # Errors
    /// As [`Self::handshake`].
    pub fn drive_handshake(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Result<bool, TlsError> {
        let is_done = self.handshake();
        // What the stream does not accept now is sent with later writes.
        let _ = self.poll_send(stream, cx);
        is_done
    }

    /// Reads ciphertext from `stream` through `staging`, and its end.
    ///
    /// # Errors
    /// Errors of the stream; `InvalidData` if more arrives than fits a record.
    pub fn poll_receive(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        staging: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let room = self.input_capacity().min(staging.len());
        if room == 0 {
            // The session accepts input until it has more than one record: this peer violates the
            // protocol.
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let mut buf = ReadBuf::new(&mut staging[..room]);
        ready!(Pin::new(stream).poll_read(cx, &mut buf))?;
        match buf.filled() {
            [] => self.receive_end(),
            ciphertext => self.receive(ciphertext),
        }
        Poll::Ready(Ok(()))
    }

    /// Sends all ciphertext.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn poll_send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.output().is_empty() {
            match ready!(Pin::new(&mut *stream).poll_write(cx, self.output())) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => self.consume_output(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads plaintext, after completing the handshake; nothing at the end.
    ///
    /// # Errors
    /// Why the handshake, a record or the stream has failed.
    pub fn poll_read(
        &mut self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        staging: &mut [u8],
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), StreamError>> {
        for _ in 0..MAX_READS_PER_POLL {
            let read = match self.drive_handshake(stream, cx) {
                Ok(true) => self.read(buf.initialize_unfilled()),
                Ok(false) => Ok(None),
                Err(why) => Err(why),
            };
            match read {
                Ok(Some(n)) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Ok(None) => {}
                Err(TlsError::Closed) => return Poll::Ready(Ok(())),
                Err(why) => return Poll::Ready(Err(why.into())),
            }
            match self.poll_receive(stream, staging, cx) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    self.release_idle_memory();
                    return Poll::Pending;
                }
            }
        }
        // There may be more: records without plaintext, key updates.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Accepts plaintext, and sends as much as `stream` takes now. Accepts nothing before the
    /// handshake is complete; the reading task is woken then.
    ///
    /// # Errors
    /// Why the session or the stream has failed.
    pub fn poll_write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize, StreamError>> {
        let _ = self.poll_send(stream, cx)?;
        match self.write(bufs.iter().map(|buf| &**buf))? {
            // The stream wakes the task once it accepts waiting data, or the peer once it
            // continues.
            0 => Poll::Pending,
            n => {
                let _ = self.poll_send(stream, cx)?;
                Poll::Ready(Ok(n))
            }
        }
    }

    /// Tells the peer that the stream ends, as far as `stream` accepts it.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn send_close_notify(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> io::Result<()> {
        self.close();
        // A peer that does not read misses it; the end of the stream tells the same.
        match self.poll_send(stream, cx) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}
