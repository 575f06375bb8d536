//! A disk at a socket, for one monitor at a time.

use std::cell::Cell;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::net::{Listener, Stream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use volume::Volume;

use super::MAX_QUEUES;
use super::control::converse;
use super::disk::{Disk, OutagePolicy};
use super::request::ID_BYTES;
use super::session::DiskSession;

/// Delay after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Options of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of rings, clamped to 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Whether writes are refused, even where the volume takes them.
    pub read_only: bool,
    /// The disk's serial number; truncated to 20 bytes.
    pub serial: String,
}

/// Serves a volume as a disk, on the volume's core.
#[derive(Debug)]
pub struct Server {
    core: Core,
    disk: Rc<Disk>,
    /// When the current monitor connected.
    connected: Cell<Option<Instant>>,
}

impl Server {
    /// A server of `volume`, with memory of `core`. With [`OutagePolicy::Wait`], requests that wait
    /// when it ends are not answered and stay in the monitor's record for the next process.
    #[must_use]
    pub fn new(core: &Core, volume: Rc<Volume>, outage: OutagePolicy, options: &Options) -> Self {
        let mut serial = [0; ID_BYTES];
        serial.iter_mut().zip(options.serial.bytes()).for_each(|(to, from)| *to = from);
        let shape = (options.queues.clamp(1, MAX_QUEUES), options.read_only);
        let disk = Disk::new((volume, outage), core.buffer_pool().account(), shape, serial);
        Self { core: core.clone(), disk: Rc::new(disk), connected: Cell::default() }
    }

    /// For how long a monitor has been connected, if one is.
    #[must_use]
    pub fn connected_for(&self) -> Option<Duration> {
        self.connected.get().map(|since| since.elapsed())
    }

    /// Serves monitors that connect to `listener`, one after the other, until `stop` completes;
    /// then takes no more requests, answers those in flight, and disconnects. The caller closes the
    /// volume.
    ///
    /// Ends also when the volume is [unreachable](crate::OutageSignal): then requests that failed
    /// because of it are not answered and stay in the monitor's record of requests in flight.
    pub async fn serve(&self, listener: &Listener, stop: impl Future<Output = ()>) {
        let mut stop = pin!(stop);
        self.disk.set_serving();
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => return,
                () = self.disk.wait_outage() => return,
                accepted = listener.accept() => accepted,
            };
            let stopped = match accepted {
                Ok((stream, _)) => {
                    self.connected.set(Some(Instant::now()));
                    let stopped = self.serve_one(stream, stop.as_mut()).await;
                    self.connected.set(None);
                    stopped
                }
                Err(error) => {
                    tracing::warn!(%error, "a monitor cannot connect");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    false
                }
            };
            if stopped {
                return;
            }
        }
    }

    /// Serves a monitor until it disconnects. Returns whether `stop`, or an outage of the volume,
    /// ended it.
    async fn serve_one(
        &self,
        stream: Stream,
        mut stop: Pin<&mut impl Future<Output = ()>>,
    ) -> bool {
        let (stream, line) = match both_ends(stream) {
            Ok(ends) => ends,
            Err(error) => {
                tracing::warn!(%error, "a monitor cannot be served");
                return false;
            }
        };
        tracing::info!("a monitor has connected");
        let (jobs, mut asked) = mpsc::channel(1);
        let conversation = self.core.run_blocking(move || converse(stream, jobs));
        let mut conversation = pin!(conversation);
        let mut session = DiskSession::new(&self.core, Rc::clone(&self.disk));
        let (stopped, why) = loop {
            tokio::select! {
                biased;
                () = &mut stop => {
                    self.disk.set_ending();
                    let mut stopped = pin!(session.stop_all());
                    tokio::select! {
                        biased;
                        () = &mut stopped => {}
                        Some(job) = asked.recv() => {
                            if job.waits_for_rings() {
                                self.disconnect(&line);
                            }
                            stopped.await;
                        }
                    }
                    break (true, None);
                }
                () = self.disk.wait_outage() => {
                    session.stop_all().await;
                    break (true, None);
                }
                why = &mut conversation => break (false, why),
                Some(job) = asked.recv() => {
                    let mut run = pin!(job.run(&mut session));
                    tokio::select! {
                        biased;
                        () = &mut run => {}
                        () = &mut stop => {
                            self.disconnect(&line);
                            run.await;
                            break (true, None);
                        }
                    }
                }
            }
        };
        match why {
            Some(why) => tracing::info!(%why, "the monitor has gone"),
            None => tracing::info!("hanging up"),
        }
        session.hang_up().await;
        // Ends a wait of the thread for the monitor or for us.
        drop(asked);
        // It may have disconnected itself.
        let _ = line.shutdown(Shutdown::Both);
        if stopped {
            let _ = conversation.await;
        }
        stopped
    }

    /// The monitor waits for a ring to stop, which may wait for the volume. It must not believe
    /// that nothing is in flight: it is disconnected first, so that unfinished requests stay in its
    /// record.
    fn disconnect(&self, line: &UnixStream) {
        self.disk.disconnect();
        let _ = line.shutdown(Shutdown::Both);
    }
}

/// The connection for the thread that talks to the monitor, and a clone for disconnecting.
fn both_ends(stream: Stream) -> io::Result<(UnixStream, UnixStream)> {
    let stream = stream.detach()?.into_unix()?;
    let line = stream.try_clone()?;
    Ok((stream, line))
}
