//! One core's keeper: owns the core's server, the volumes on it and their backings.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use block::Epoch;
use futures_util::future::join_all;
use rt::Core;
use rt::net::{ListenOptions, Listener};
use target::server::{Door, Limits, Served, Server, Service};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;
use volume::Volume;

use super::backing::{self, Backed, BackingError, Image};
use super::report::{CoreReport, Scope, VolumeReport};
use crate::publish::volume_id;
use crate::record::{FIRST_NODE, Place, VolumeRecord};

/// Connections that the system takes ahead of us, per listener.
const BACKLOG: u32 = 4096;

pub(super) struct Keeper {
    core: Core,
    server: Rc<Server>,
    /// Whether file systems without direct I/O may be used.
    buffered: bool,
    open: RefCell<BTreeMap<Uuid, Kept>>,
    /// Listeners that nobody accepts from yet.
    waiting: RefCell<Vec<(Listener, Service)>>,
    accepting: RefCell<Vec<JoinHandle<()>>>,
    stopping: Cell<bool>,
}

/// Volumes that are reported on before others have their turn.
const REPORT_AT_ONCE: usize = 16;

/// An open volume.
#[derive(Clone)]
struct Kept {
    volume: Rc<Volume>,
    backed: Rc<Backed>,
}

impl Keeper {
    pub(super) fn new(core: Core, limits: Limits, door: Door, buffered: bool) -> Rc<Self> {
        Rc::new(Self {
            server: Server::new(core.clone(), limits, door),
            core,
            buffered,
            open: RefCell::default(),
            waiting: RefCell::default(),
            accepting: RefCell::default(),
            stopping: Cell::new(false),
        })
    }

    pub(super) fn server(&self) -> &Rc<Server> {
        &self.server
    }

    pub(super) async fn make(
        &self,
        record: &VolumeRecord,
        force: bool,
    ) -> Result<Image, BackingError> {
        backing::make(&self.core, record, place(record)?, self.buffered, force).await
    }

    pub(super) async fn erase(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        backing::erase(&self.core, record, place(record)?, self.buffered).await
    }

    /// Opens a volume and tells what its image is. It is not exported yet.
    pub(super) async fn open(&self, record: &VolumeRecord) -> Result<Image, BackingError> {
        if self.stopping.get() {
            return Err(BackingError::refused("the node is stopping"));
        }
        let backed =
            Rc::new(backing::open(&self.core, record, place(record)?, self.buffered).await?);
        let image = backed.image();
        let volume = Volume::new(backed.dev(), Epoch::default());
        self.server.add_volume(Served {
            id: volume_id(record.id),
            name: record.name.to_string(),
            volume: Rc::clone(&volume),
            thin: record.thin,
            access: None,
        });
        self.open.borrow_mut().insert(record.id, Kept { volume, backed });
        Ok(image)
    }

    pub(super) async fn close(&self, id: Uuid) -> Result<(), BackingError> {
        self.server.remove_volume(volume_id(id));
        let kept = self.open.borrow_mut().remove(&id);
        let Some(Kept { volume, .. }) = kept else { return Ok(()) };
        let account = self.core.pool().account();
        volume.close(&account).await.map_err(|e| {
            BackingError::refused(format!(
                "the last flush failed: {e}; its last writes may be lost"
            ))
        })
    }

    pub(super) async fn grow(&self, id: Uuid, size_bytes: u64) -> Result<Image, BackingError> {
        let kept = self.open.borrow().get(&id).cloned();
        let Some(kept) = kept else {
            return Err(BackingError::refused("the volume is not open"));
        };
        let image = kept.backed.grow(size_bytes).await?;
        self.server.volume_resized(volume_id(id));
        Ok(image)
    }

    /// Listens at `at` and gives the address, with the port the system chose. The `first` core
    /// to listen makes sure that no other program does.
    pub(super) async fn listen(
        &self,
        at: SocketAddr,
        service: Service,
        first: bool,
    ) -> io::Result<SocketAddr> {
        let at = if first { self.claim(at).await? } else { at };
        let how = ListenOptions { backlog: BACKLOG, reuse_port: true };
        let listener = self.core.listen_with(at, how).await?;
        let bound = listener.local_addr()?;
        self.waiting.borrow_mut().push((listener, service));
        Ok(bound)
    }

    /// Finds out whether `at` is free and which port the system chooses. Where there is no IPv6,
    /// "every address" is every address of IPv4.
    async fn claim(&self, at: SocketAddr) -> io::Result<SocketAddr> {
        let alone = |at| self.core.listen_with(at, ListenOptions { backlog: 1, reuse_port: false });
        let listener = match alone(at).await {
            Err(e) if at.is_ipv6() && at.ip().is_unspecified() && is_no_ipv6(&e) => {
                alone((Ipv4Addr::UNSPECIFIED, at.port()).into()).await?
            }
            other => other?,
        };
        listener.local_addr()
    }

    pub(super) fn accept(&self) {
        for (listener, service) in self.waiting.take() {
            let accept = Rc::clone(&self.server).serve(listener, service);
            self.accepting.borrow_mut().push(tokio::task::spawn_local(accept));
        }
    }

    pub(super) async fn report(&self, scope: Scope) -> CoreReport {
        let open: Vec<_> = (self.open.borrow().iter())
            .filter(|(id, _)| scope.covers(**id))
            .map(|(id, kept)| (*id, Rc::clone(&kept.volume)))
            .collect();
        let mut volumes = Vec::with_capacity(open.len());
        for (n, (id, volume)) in open.into_iter().enumerate() {
            if n > 0 && n.is_multiple_of(REPORT_AT_ONCE) {
                // Initiators are not to notice that somebody looks.
                tokio::task::yield_now().await;
            }
            volumes.push(VolumeReport::new(id, &volume.stats(), scope));
        }
        CoreReport {
            core: self.core.id(),
            sessions: self.server.sessions(),
            refused: self.server.refused(),
            pool: self.core.pool().usage(),
            volumes,
        }
    }

    /// Stops accepting clients and takes leave of those that are there.
    pub(super) async fn drain(&self, leave_by: Instant) {
        self.stopping.set(true);
        self.waiting.take();
        self.accepting.take().iter().for_each(JoinHandle::abort);
        self.server.drain(leave_by).await;
    }

    /// Closes all volumes; says whether all of them are durable.
    pub(super) async fn close_all(&self) -> bool {
        let ids: Vec<_> = self.open.borrow().keys().copied().collect();
        let closed = join_all(ids.into_iter().map(|id| async move {
            self.close(id)
                .await
                .inspect_err(|e| tracing::error!(volume = %id, error = %e, "closing"))
        }));
        closed.await.iter().all(Result::is_ok)
    }
}

/// The copy of a volume that this node keeps.
fn place(record: &VolumeRecord) -> Result<&Place, BackingError> {
    record.place(FIRST_NODE).ok_or_else(|| BackingError::refused("this node keeps no copy of it"))
}

/// Whether the system has no IPv6 (`EAFNOSUPPORT`, or `EADDRNOTAVAIL` where it is switched off).
fn is_no_ipv6(e: &io::Error) -> bool {
    let none = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
    e.raw_os_error() == Some(none) || e.kind() == io::ErrorKind::AddrNotAvailable
}
