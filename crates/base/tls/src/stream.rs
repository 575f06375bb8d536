//! A session joined to the byte stream that its ciphertext goes by: plaintext is read and written like any stream's.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Error, Session};

/// Looks at the stream in a row that bring no plaintext before other tasks get their turn.
const LOOKS: usize = 4;

/// Why there is no plaintext.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The session's side of it.
    #[error("{0}")]
    Tls(#[from] Error),
    /// The stream's.
    #[error("{0}")]
    Stream(#[from] io::Error),
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Tls(why) => Self::new(io::ErrorKind::InvalidData, why),
            Fault::Stream(why) => why,
        }
    }
}

impl Session {
    /// Goes on with the handshake as far as it gets with what has come from `stream`, which is told whatever there is to
    /// say; whether it is done. If it is not, it waits for nothing: [`Self::poll_receive`] does.
    ///
    /// # Errors
    /// As [`Self::handshake`].
    pub fn shake_hands(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Result<bool, Error> {
        let is_done = self.handshake();
        // What the stream does not take now it takes when it is written to.
        let _ = self.poll_send(stream, cx);
        is_done
    }

    /// Reads ciphertext from `stream` by way of `staging`. Its end is received as well.
    ///
    /// # Errors
    /// What the stream says; `InvalidData` where more comes than belongs to a record.
    pub fn poll_receive(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        staging: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let room = self.room().min(staging.len());
        if room == 0 {
            // It goes on as soon as it has a record, and has more than one: it is not what it should be.
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

    /// Sends ciphertext until nothing is left.
    ///
    /// # Errors
    /// What the stream says.
    pub fn poll_send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while !self.output().is_empty() {
            match ready!(Pin::new(&mut *stream).poll_write(cx, self.output())) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(n) => self.sent(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads plaintext, shaking hands first where that is not done; nothing at the end.
    ///
    /// # Errors
    /// Why the handshake, a record or the stream has failed.
    pub fn poll_read(
        &mut self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        staging: &mut [u8],
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), Fault>> {
        for _ in 0..LOOKS {
            let read = match self.shake_hands(stream, cx) {
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
                Err(Error::Closed) => return Poll::Ready(Ok(())),
                Err(why) => return Poll::Ready(Err(why.into())),
            }
            match self.poll_receive(stream, staging, cx) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    self.rest();
                    return Poll::Pending;
                }
            }
        }
        // There may be more where that came from: records without plaintext, changes of keys.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes plaintext, and sends what of it `stream` takes now. Before the handshake is done nothing is taken: who reads
    /// is woken then.
    ///
    /// # Errors
    /// Why the session or the stream has failed.
    pub fn poll_write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize, Fault>> {
        let _ = self.poll_send(stream, cx)?;
        match self.write(bufs.iter().map(|buf| &**buf))? {
            // The stream wakes the task once it takes some of what waits, or the other side once it goes on.
            0 => Poll::Pending,
            n => {
                let _ = self.poll_send(stream, cx)?;
                Poll::Ready(Ok(n))
            }
        }
    }

    /// Tells the other side that nothing more comes, as far as `stream` takes that.
    ///
    /// # Errors
    /// What the stream says.
    pub fn farewell(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> io::Result<()> {
        self.close();
        // Whoever does not read will not hear it; the end of the stream says the same.
        match self.poll_send(stream, cx) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}
