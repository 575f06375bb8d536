//! What processes of one machine have in common: sockets in the file system, and events (`eventfd(2)`).
//! Real cores only: who stands at the other end of these is no part of a simulated world.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixListener;

use crate::real::Pulse;
use crate::sys;

/// Waits for connections at a path. The socket's file goes with this.
#[derive(Debug)]
pub struct LocalListener {
    listener: UnixListener,
    path: PathBuf,
}

impl LocalListener {
    /// Listens at `path`. A socket that somebody has left there is replaced, one that somebody listens at is not.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let listener = match UnixListener::bind(path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse && is_left_over(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)
            }
            bound => bound,
        }?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// The next connection, for a thread that may block.
    ///
    /// # Errors
    /// What the system reports, which may be about one connection or about the process (no descriptors
    /// left): wait a little and go on.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept().await?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), error = %e, "the socket stays behind");
        }
    }
}

/// Whether there is a socket at which nobody listens.
fn is_left_over(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let refused =
        || UnixStream::connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused);
    is_socket && refused()
}

/// An event that somebody else gives, on this core.
pub struct Event {
    fd: AsyncFd<File>,
    pulse: Rc<Pulse>,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(self.fd.get_ref()).finish()
    }
}

impl Event {
    pub(crate) fn new(fd: OwnedFd, pulse: Rc<Pulse>) -> io::Result<Self> {
        sys::set_nonblocking(fd.as_fd())?;
        // SAFETY: a file has one descriptor, which is open until it is dropped.
        let fd = unsafe { AsyncFd::register_with_interest(File::from(fd), Interest::READABLE) };
        let fd = fd.map_err(io::Error::from)?;
        Ok(Self { fd, pulse })
    }

    /// Waits until it has been given since the last call. Given several times meanwhile, it is given once.
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    /// What the system reports; [`ErrorKind::UnexpectedEof`] where the descriptor is none of an event. It is of no
    /// use any more then.
    pub async fn given(&self) -> io::Result<()> {
        loop {
            let mut ready = self.fd.readable().await?;
            let mut count = [0; 8];
            match ready.try_io(|fd| fd.get_ref().read(&mut count)) {
                Ok(Ok(0)) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(Ok(_)) => {
                    self.pulse.active();
                    return Ok(());
                }
                Ok(Err(e)) if e.kind() != ErrorKind::Interrupted => return Err(e),
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }
}

/// An event that is given to somebody else.
#[derive(Debug)]
pub struct Signal(File);

impl Signal {
    /// The event behind a descriptor of `eventfd(2)`.
    ///
    /// # Errors
    /// What the system reports.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        sys::set_nonblocking(fd.as_fd())?;
        Ok(Self(File::from(fd)))
    }

    /// Gives it. Never waits: one that nobody has taken for 2^64 - 2 times has been given all the same.
    #[expect(clippy::host_endian_bytes, reason = "eventfd(2) counts as the host does")]
    pub fn give(&self) {
        if let Err(e) = (&self.0).write(&1u64.to_ne_bytes())
            && e.kind() != ErrorKind::WouldBlock
        {
            tracing::debug!(error = %e, "an event cannot be given");
        }
    }
}
