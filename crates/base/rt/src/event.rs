//! Events that processes of one machine give each other (`eventfd(2)`). Real cores only: who stands at the other end of
//! these is no part of a simulated world.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::real::Pulse;
use crate::sys;

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
