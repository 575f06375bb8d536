//! Who is let in, and the end.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::nbd::server::{Config, Connection};
use ::nbd::{Address, Export, Sizes};
use rt::Core;
use rt::net::{Listener, Stream};
use target::conn::{Conn, Inbox, Staging};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use volume::Volume;

use super::options::Options;
use super::session::{Event, Session};
use crate::Absence;

/// Pause after connections could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Least of the largest request, in bytes: a small pool is no reason to refuse what every client sends.
const LEAST_PAYLOAD: u32 = 64 << 10;

/// Why a device is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error("cannot listen at {at}: {why}")]
    Listen {
        /// The address.
        at: Address,
        /// What the system reports.
        why: io::Error,
    },
    /// Name or description of the export are longer than the protocol allows.
    #[error("the name of an NBD export has at most 4096 bytes, as has its description")]
    Name,
}

/// A server that listens.
pub struct Server {
    listener: Listener,
    shared: Shared,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("at", &self.shared.at).finish_non_exhaustive()
    }
}

/// What the connections of a server share.
pub(super) struct Shared {
    pub(super) core: Core,
    pub(super) volume: Rc<Volume>,
    at: Address,
    options: Options,
    /// When the volume is out of reach.
    pub(super) absence: Absence,
    staging: Staging,
    seats: RefCell<BTreeMap<u64, Seat>>,
    /// Held by a command that reads more than the volume takes at once.
    pub(super) one_by_one: Rc<Mutex<()>>,
}

/// A connection, as the server knows it.
struct Seat {
    inbox: Inbox<Event>,
    /// Whether its client has chosen the export.
    chosen: Rc<Cell<bool>>,
}

impl Server {
    /// Listens at `at`: who connects from now on is served once [`Self::run`] does.
    ///
    /// # Errors
    /// [`ServeError::Listen`], [`ServeError::Name`].
    pub async fn bind(
        core: &Core,
        volume: &Rc<Volume>,
        at: &Address,
        options: Options,
    ) -> Result<Self, ServeError> {
        // A disk of this machine may be made of it.
        rt::serves_disks();
        if options.export.len().max(options.description.len()) > ::nbd::message::MAX_STRING_BYTES {
            return Err(ServeError::Name);
        }
        let listener = match at {
            Address::Unix(path) => core.listen_unix(path).await,
            Address::Tcp(address) => core.listen(*address).await,
        };
        let listener = listener.map_err(|why| ServeError::Listen { at: at.clone(), why })?;
        let shared = Shared {
            core: core.clone(),
            volume: Rc::clone(volume),
            at: at.clone(),
            options,
            absence: Absence::never(),
            staging: Staging::default(),
            seats: RefCell::default(),
            one_by_one: Rc::default(),
        };
        Ok(Self { listener, shared })
    }

    /// The server of a volume that may come to be out of reach.
    #[must_use]
    pub fn with_absence(mut self, absence: &Absence) -> Self {
        self.shared.absence = absence.clone();
        self
    }

    /// The TCP address that is listened at, with the port that the system has chosen.
    ///
    /// # Errors
    /// What the system reports.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` comes to its end; see [`serve`](super::serve). Ends as well when the volume is
    /// [out of reach](Absence): then its clients are cut off without an answer.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (listener, shared) = (self.listener, Rc::new(self.shared));
        let (mut stop, mut sessions) = (pin!(stop), JoinSet::new());
        tracing::info!(at = %shared.at, export = shared.options.export, "NBD is served");
        for number in 0.. {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => break,
                () = shared.absence.certain() => break,
                Some(ended) = sessions.join_next(), if !sessions.is_empty() => {
                    report(ended);
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => shared.admit(number, stream, &mut sessions),
                Err(error) => {
                    tracing::warn!(at = %shared.at, %error, "no connection is accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        drop(listener);
        shared.stop(sessions).await;
    }
}

/// A connection that has panicked is a mistake of ours; the others go on.
fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection of NBD has ended by a panic");
    }
}

impl Shared {
    /// Lets a client in, if there is a place.
    fn admit(self: &Rc<Self>, number: u64, stream: Stream, sessions: &mut JoinSet<()>) {
        if self.seats.borrow().len() >= self.options.connections.max(1) {
            let mut seats = self.seats.borrow_mut();
            let oldest = seats.iter().find(|(_, seat)| !seat.chosen.get()).map(|(n, _)| *n);
            let Some(evicted) = oldest.and_then(|n| seats.remove(&n)) else {
                tracing::warn!(at = %self.at, "a client of NBD is refused: there are too many");
                return;
            };
            evicted.inbox.evict();
        }
        let (inbox, chosen) = (Inbox::default(), Rc::new(Cell::new(false)));
        let seat = Seat { inbox: inbox.clone(), chosen: Rc::clone(&chosen) };
        self.seats.borrow_mut().insert(number, seat);
        let config = Config {
            in_flight: self.options.in_flight,
            handshake_timeout: self.options.handshake_timeout,
            receive_timeout: self.options.receive_timeout,
            ..Config::new(Arc::new([self.export()]))
        };
        let line = match stream.line() {
            Ok(line) => line,
            Err(error) => {
                tracing::warn!(at = %self.at, %error, "a client of NBD cannot be served");
                self.seats.borrow_mut().remove(&number);
                return;
            }
        };
        let session = Session::new(self, Connection::new(config), (inbox.clone(), line), chosen);
        let mut conn = Conn::new(
            stream,
            session,
            inbox,
            self.staging.clone(),
            self.options.send_timeout,
            Instant::now(),
        );
        let shared = Rc::clone(self);
        sessions.spawn_local(async move {
            let end = conn.run().await;
            let why = conn.protocol.end();
            drop(conn);
            tracing::info!(at = %shared.at, ?end, why, "a connection of NBD has ended");
            shared.seats.borrow_mut().remove(&number);
        });
    }

    /// The export, as it is now.
    fn export(&self) -> Export {
        let (info, options) = (self.volume.info(), &self.options);
        let minimum = info.block_size;
        let preferred = info.physical_block_size.next_power_of_two().max(minimum);
        let share = u32::try_from(self.core.pool().usage().total / 8).unwrap_or(u32::MAX);
        let payload = options.payload_bytes.min(share).max(LEAST_PAYLOAD).max(preferred);
        let granule = info.unmap_granularity_blocks.saturating_mul(info.block_size);
        Export {
            name: options.export.clone(),
            description: options.description.clone(),
            bytes: info.bytes(),
            sizes: Sizes { minimum, preferred, payload: payload / minimum * minimum },
            read_only: options.read_only || info.read_only,
            trims: granule > 0,
            // Freeing is all that there is to do.
            fast_zero_bytes: Some(granule).filter(|g| *g > 0 && info.unmap_zeroes),
            // All of them use this volume, by way of this core.
            multi_conn: true,
        }
    }

    /// Sees everybody off.
    async fn stop(&self, mut sessions: JoinSet<()>) {
        let away = self.absence.is_certain();
        for seat in self.seats.borrow().values() {
            // Whoever is told of the end takes it for that of his disk.
            if away { seat.inbox.evict() } else { seat.inbox.push(Event::Stop) }
        }
        let all = async {
            while let Some(ended) = sessions.join_next().await {
                report(ended);
            }
        };
        if timeout(self.options.stop_timeout, all).await.is_err() {
            tracing::warn!(at = %self.at, "clients of NBD do not leave: they are cut off");
            sessions.shutdown().await;
        }
    }
}
