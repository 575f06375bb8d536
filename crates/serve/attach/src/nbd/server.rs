//! Accepts clients, and stops.

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
use ::nbd::{Address, Export, SizeConstraints};
use rt::Core;
use rt::net::{Listener, Stream};
use target::connection::{ConnectionDriver, Inbox, Staging};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use volume::Volume;

use super::options::Options;
use super::session::{Event, Session, SharedExport};
use crate::OutageSignal;

/// Delay after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Lower bound of the request limit, in bytes: even a small pool must allow what every client
/// sends.
const MIN_PAYLOAD: u32 = 64 << 10;

/// Why a volume cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Listening at the address failed.
    #[error("cannot listen at {at}: {why}")]
    Listen {
        /// The address.
        at: Address,
        /// The system's error.
        why: io::Error,
    },
    /// The name or description of the export is too long for the protocol.
    #[error("the name of an NBD export has at most 4096 bytes, as has its description")]
    Name,
}

/// A listening server.
pub struct Server {
    listener: Listener,
    shared: NbdShared,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("at", &self.shared.at).finish_non_exhaustive()
    }
}

/// What the connections of a server share.
struct NbdShared {
    core: Core,
    export: SharedExport,
    at: Address,
    options: Options,
    staging: Staging,
    connections: RefCell<BTreeMap<u64, ConnectionEntry>>,
}

/// The server's record of a connection.
struct ConnectionEntry {
    inbox: Inbox<Event>,
    /// Whether its client has chosen the export.
    export_chosen: Rc<Cell<bool>>,
}

impl Server {
    /// Listens at `at`; clients are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`ServeError::Listen`], [`ServeError::Name`].
    pub async fn bind(
        core: &Core,
        volume: &Rc<Volume>,
        at: &Address,
        options: Options,
    ) -> Result<Self, ServeError> {
        // Local disks may be built on it.
        rt::set_io_flusher();
        if options.export.len().max(options.description.len()) > ::nbd::message::MAX_STRING_BYTES {
            return Err(ServeError::Name);
        }
        let listener = match at {
            Address::Unix(path) => core.listen_unix(path).await,
            Address::Tcp(address) => core.listen(*address).await,
        };
        let listener = listener.map_err(|why| ServeError::Listen { at: at.clone(), why })?;
        let shared = NbdShared {
            core: core.clone(),
            export: SharedExport {
                volume: Rc::clone(volume),
                outage: OutageSignal::never(),
                multipart_read_lock: Rc::default(),
            },
            at: at.clone(),
            options,
            staging: Staging::default(),
            connections: RefCell::default(),
        };
        Ok(Self { listener, shared })
    }

    /// The same for a volume that may become unreachable.
    #[must_use]
    pub fn with_outage_signal(mut self, absence: &OutageSignal) -> Self {
        self.shared.export.outage = absence.clone();
        self
    }

    /// The TCP address it listens at, with the port chosen by the system.
    ///
    /// # Errors
    /// The system's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` completes; see [`serve`](super::serve). Ends also when the volume is
    /// [unreachable](OutageSignal): then clients are disconnected without an answer.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (listener, shared) = (self.listener, Rc::new(self.shared));
        let (mut stop, mut sessions) = (pin!(stop), JoinSet::new());
        tracing::info!(at = %shared.at, export = shared.options.export, "NBD is served");
        for number in 0.. {
            let accepted = tokio::select! {
                biased;
                () = &mut stop => break,
                () = shared.export.outage.wait() => break,
                Some(ended) = sessions.join_next(), if !sessions.is_empty() => {
                    report(ended);
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => shared.admit(number, stream, &mut sessions),
                Err(error) => {
                    tracing::warn!(at = %shared.at, %error, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(listener);
        shared.stop(sessions).await;
    }
}

/// A panic of a connection is a bug of ours; the others continue.
fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection of NBD has ended by a panic");
    }
}

impl NbdShared {
    /// Admits a client if there is a free connection.
    fn admit(self: &Rc<Self>, number: u64, stream: Stream, sessions: &mut JoinSet<()>) {
        if self.connections.borrow().len() >= self.options.connections.max(1) {
            let mut connections = self.connections.borrow_mut();
            let oldest =
                connections.iter().find(|(_, entry)| !entry.export_chosen.get()).map(|(n, _)| *n);
            let Some(evicted) = oldest.and_then(|n| connections.remove(&n)) else {
                tracing::warn!(at = %self.at, "an NBD client was refused: too many connections");
                return;
            };
            evicted.inbox.evict();
        }
        let (inbox, chosen) = (Inbox::default(), Rc::new(Cell::new(false)));
        let entry = ConnectionEntry { inbox: inbox.clone(), export_chosen: Rc::clone(&chosen) };
        self.connections.borrow_mut().insert(number, entry);
        let config = Config {
            max_in_flight: self.options.max_in_flight,
            handshake_timeout: self.options.handshake_timeout,
            receive_timeout: self.options.receive_timeout,
            ..Config::new(Arc::new([self.describe_export()]))
        };
        let line = match stream.hangup_monitor() {
            Ok(line) => line,
            Err(error) => {
                tracing::warn!(at = %self.at, %error, "a client of NBD cannot be served");
                self.connections.borrow_mut().remove(&number);
                return;
            }
        };
        let (export, account) = (self.export.clone(), self.core.buffer_pool().account());
        let machine = Connection::new(config);
        let session = Session::new(export, account, machine, (inbox.clone(), line), chosen);
        let mut conn = ConnectionDriver::new(
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
            shared.connections.borrow_mut().remove(&number);
        });
    }

    /// The export as it is now.
    fn describe_export(&self) -> Export {
        let (info, options) = (self.export.volume.info(), &self.options);
        let minimum = info.block_size;
        let preferred = info.physical_block_size.next_power_of_two().max(minimum);
        let share = u32::try_from(self.core.buffer_pool().usage().total / 8).unwrap_or(u32::MAX);
        let payload = options.payload_bytes.min(share).max(MIN_PAYLOAD).max(preferred);
        let granule = info.unmap_granularity_blocks.saturating_mul(info.block_size);
        Export {
            name: options.export.clone(),
            description: options.description.clone(),
            bytes: info.bytes(),
            size_constraints: SizeConstraints {
                minimum,
                preferred,
                payload: payload / minimum * minimum,
            },
            read_only: options.read_only || info.read_only,
            can_trim: granule > 0,
            // Zeroing is then merely freeing.
            fast_zero_bytes: Some(granule).filter(|g| *g > 0 && info.unmap_zeroes),
            // All connections use this volume through this core.
            multi_conn: true,
        }
    }

    /// Ends all connections.
    async fn stop(&self, mut sessions: JoinSet<()>) {
        let away = self.export.outage.is_set();
        for entry in self.connections.borrow().values() {
            // A client would take an orderly end for that of its disk.
            if away { entry.inbox.evict() } else { entry.inbox.push(Event::Stop) }
        }
        let all = async {
            while let Some(ended) = sessions.join_next().await {
                report(ended);
            }
        };
        if timeout(self.options.stop_timeout, all).await.is_err() {
            tracing::warn!(at = %self.at, "NBD clients do not disconnect: closing their connections");
            sessions.shutdown().await;
        }
    }
}
