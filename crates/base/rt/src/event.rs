//! Events between processes of one machine (`eventfd(2)`). Real cores only: the other process is
//! not part of a simulated world.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::driver_waker::DriverWaker;
use crate::sys;

/// An event that another process signals to this core.
pub struct EventReceiver {
    fd: AsyncFd<File>,
    driver_waker: Rc<DriverWaker>,
}

impl fmt::Debug for EventReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EventReceiver").field(self.fd.get_ref()).finish()
    }
}

impl EventReceiver {
    pub(crate) fn new(fd: OwnedFd, pulse: Rc<DriverWaker>) -> io::Result<Self> {
        sys::set_nonblocking(fd.as_fd())?;
        // SAFETY: a file has one descriptor, which is open until it is dropped.
        let fd = unsafe { AsyncFd::register_with_interest(File::from(fd), Interest::READABLE) };
        let fd = fd.map_err(io::Error::from)?;
        Ok(Self { fd, driver_waker: pulse })
    }

    /// Waits until the event has been signalled since the last call. Several signals count once.
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    /// What the system reports; [`ErrorKind::UnexpectedEof`] if the descriptor is not an event. It
    /// cannot be used any more then.
    pub async fn wait(&self) -> io::Result<()> {
        loop {
            let mut ready = self.fd.readable().await?;
            let mut count = [0; 8];
            match ready.try_io(|fd| fd.get_ref().read(&mut count)) {
                Ok(Ok(0)) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(Ok(_)) => {
                    self.driver_waker.note_activity();
                    return Ok(());
                }
                Ok(Err(e)) if e.kind() != ErrorKind::Interrupted => return Err(e),
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }
}

/// An event that this process signals.
#[derive(Debug)]
pub struct EventNotifier(File);

impl EventNotifier {
    /// The event behind a descriptor of `eventfd(2)`.
    ///
    /// # Errors
    /// What the system reports.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        sys::set_nonblocking(fd.as_fd())?;
        Ok(Self(File::from(fd)))
    }

    /// Signals it. Never blocks: even if the counter is full it has been signalled.
    #[expect(clippy::host_endian_bytes, reason = "eventfd(2) counts as the host does")]
    pub fn notify(&self) {
        if let Err(e) = (&self.0).write(&1u64.to_ne_bytes())
            && e.kind() != ErrorKind::WouldBlock
        {
            tracing::debug!(error = %e, "signalling an event failed");
        }
    }
}
