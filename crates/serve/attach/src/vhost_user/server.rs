//! A disk at a socket: one monitor after the other.

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

use super::MAX_RINGS;
use super::control::converse;
use super::disk::{Disk, Outage};
use super::request::ID_BYTES;
use super::session::Session;

/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// What a guest is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many rings it may use, 1 to [`MAX_RINGS`]; more or fewer are made so many.
    pub rings: u16,
    /// Whether writes are refused, even where the volume takes them.
    pub read_only: bool,
    /// The disk's name: the first 20 bytes of it.
    pub serial: String,
}

/// Serves a volume as a disk. It belongs to the volume's core.
#[derive(Debug)]
pub struct Server {
    core: Core,
    disk: Rc<Disk>,
    /// Since when a monitor is connected, if one is.
    connected: Cell<Option<Instant>>,
}

impl Server {
    /// A server of `volume`, with memory of `core`. With [`Outage::Waited`], what waits when it ends is not answered, and
    /// stays in the monitor's record for who comes next.
    #[must_use]
    pub fn new(core: &Core, volume: Rc<Volume>, outage: Outage, options: &Options) -> Self {
        let mut serial = [0; ID_BYTES];
        serial.iter_mut().zip(options.serial.bytes()).for_each(|(to, from)| *to = from);
        let shape = (options.rings.clamp(1, MAX_RINGS), options.read_only);
        let disk = Disk::new((volume, outage), core.pool().account(), shape, serial);
        Self { core: core.clone(), disk: Rc::new(disk), connected: Cell::default() }
    }

    /// For how long a monitor has been connected, if one is.
    #[must_use]
    pub fn connected_for(&self) -> Option<Duration> {
        self.connected.get().map(|since| since.elapsed())
    }

    /// Serves monitors that connect to `listener`, one after the other, until `stop` is over; then takes no more
    /// requests, answers all that are in flight, and hangs up. The volume is the caller's to close.
    ///
    /// Ends as well when the volume is [out of reach](Absence): then what has failed for that is not answered, and stays
    /// in the monitor's record of what is in flight.
    pub async fn serve(&self, listener: &Listener, stop: impl Future<Output = ()>) {
        let mut stop = pin!(stop);
        self.disk.serve();
        loop {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => return,
                () = self.disk.lost() => return,
                accepted = listener.accept() => accepted,
            };
            let told = match accepted {
                Ok((stream, _)) => {
                    self.connected.set(Some(Instant::now()));
                    let told = self.serve_one(stream, stop.as_mut()).await;
                    self.connected.set(None);
                    told
                }
                Err(error) => {
                    tracing::warn!(%error, "a monitor cannot connect");
                    tokio::time::sleep(PAUSE).await;
                    false
                }
            };
            if told {
                return;
            }
        }
    }

    /// Serves a monitor until it goes; whether it was `stop`, or the volume's absence, that ended it.
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
        let conversation = self.core.offload(move || converse(stream, jobs));
        let mut conversation = pin!(conversation);
        let mut session = Session::new(&self.core, Rc::clone(&self.disk));
        let (told, why) = loop {
            tokio::select! {
                biased;
                () = &mut stop => {
                    self.disk.end();
                    session.stop_all().await;
                    break (true, None);
                }
                () = self.disk.lost() => {
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
                            // The monitor waits for a ring to end, which may wait for the volume. It is not to believe
                            // that nothing is in flight: it is hung up on first, and what is not done stays in its record.
                            self.disk.cut();
                            let _ = line.shutdown(Shutdown::Both);
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
        // A thread that waits for the monitor, or for us, does so no longer.
        drop(asked);
        // It may have gone by itself.
        let _ = line.shutdown(Shutdown::Both);
        if told {
            let _ = conversation.await;
        }
        told
    }
}

/// The connection for the thread that talks to the monitor, and once more to hang up by.
fn both_ends(stream: Stream) -> io::Result<(UnixStream, UnixStream)> {
    let stream = stream.detach()?.into_unix()?;
    let line = stream.try_clone()?;
    Ok((stream, line))
}
