//! What one core runs: its server, the volumes on it and their images.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::Epoch;
use disk::ClaimRequest;
use futures_util::future::join_all;
use image::FlatImage;
use mirror::VerifyReport;
use peer::frame::HandshakeRefusal;
use peer::{DetachedConnection, NodeId, PeerAddresses};
use reservation::{Change, ItNexus, Table};
use rt::Core;
use rt::net::{ListenOptions, Listener};
use target::{CoreLink, Limits, ServedVolume, Server, Service, VolumeSpace};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;
use volume::{ReservationChangeError, ReservationContext, ReservationGate, Volume};

use super::backing::{self, BackingHandle, CreateOptions, OpenImage};
use super::backing_error::BackingError;
use super::cluster_context::{ClusterContext, PeerRouter};
use super::guests::{ExportedVolumes, GuestVolume, Guests};
use super::mirrored_volume::MirroredVolume;
use super::pools::{CorePoolRegistry, PoolAccess};
use super::report::{CoreReport, ReportScope, VolumeReport};
use super::suspect_images::SuspectImages;
use records::catalog::volume_id;
use records::record::{FIRST_NODE, ImageInfo, ReplicaPlacement, VolumeRecord};

/// Listen backlog of a listener.
const BACKLOG: u32 = 4096;

pub(super) struct CoreEngine {
    core: Core,
    server: Rc<Server>,
    /// Whether file systems without direct I/O may be used.
    buffered: bool,
    /// The claim that it puts on the disks of images.
    claim: ClaimRequest,
    suspect_images: SuspectImages,
    /// Pools of disks.
    pools: CorePoolRegistry,
    guests: Guests,
    /// The node's cluster, once it is in one.
    cluster: OnceCell<ClusterContext>,
    open_volumes: RefCell<BTreeMap<Uuid, OpenVolume>>,
    /// Listeners that do not accept connections yet.
    pending_listeners: RefCell<Vec<(Listener, Service)>>,
    accept_tasks: RefCell<Vec<JoinHandle<()>>>,
    /// Listeners for other nodes.
    peer_listener_tasks: RefCell<Vec<JoinHandle<()>>>,
    stopping: Cell<bool>,
}

/// How long a closed volume may keep its image in use.
const IMAGE_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of checks whether it still does.
const IMAGE_RELEASE_POLL: Duration = Duration::from_millis(100);

/// Volumes reported between two yields to other tasks.
const REPORT_BATCH: usize = 16;

/// An open volume.
#[derive(Clone)]
struct OpenVolume {
    volume: Rc<Volume>,
    image: Rc<OpenImage>,
    mirror: Option<Rc<MirroredVolume>>,
    /// The pool that it lies in.
    pool: Option<Uuid>,
    /// The description of it that was last written to its image.
    written_description: Rc<RefCell<Vec<u8>>>,
}

impl CoreEngine {
    pub(super) fn new(
        core: Core,
        (limits, link): (Limits, CoreLink),
        (buffered, suspect_images, claim): (bool, SuspectImages, ClaimRequest),
        guests: Guests,
    ) -> Rc<Self> {
        Rc::new(Self {
            server: Server::new(core.clone(), limits, link),
            pools: CorePoolRegistry::new(core.clone(), buffered, claim),
            core,
            buffered,
            claim,
            suspect_images,
            guests,
            cluster: OnceCell::new(),
            open_volumes: RefCell::default(),
            pending_listeners: RefCell::default(),
            accept_tasks: RefCell::default(),
            peer_listener_tasks: RefCell::default(),
            stopping: Cell::new(false),
        })
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// Whether file systems without direct I/O may be used.
    pub(super) fn is_buffered(&self) -> bool {
        self.buffered
    }

    /// The claim of this node on disks that other machines can reach.
    pub(super) fn disk_claim(&self) -> ClaimRequest {
        self.claim
    }

    /// The image of an open volume.
    pub(super) fn image_of(&self, id: Uuid) -> Result<Rc<FlatImage>, BackingError> {
        let open = self.open_volumes.borrow();
        let volume =
            open.get(&id).ok_or_else(|| BackingError::refused("the volume is not open"))?;
        Ok(Rc::clone(&volume.image.file))
    }

    /// Writes `text` to the image of an open volume as its description, unless it is there already.
    /// Does not wait: a disk may not answer.
    pub(super) fn write_description(&self, id: Uuid, text: Vec<u8>) -> Result<(), BackingError> {
        let file = self.image_of(id)?;
        let written = self
            .open_volumes
            .borrow()
            .get(&id)
            .map(|volume| Rc::clone(&volume.written_description));
        let Some(written) = written.filter(|written| *written.borrow() != text) else {
            return Ok(());
        };
        written.borrow_mut().clone_from(&text);
        tokio::task::spawn_local(async move {
            if let Err(error) = file.write_descriptor(&text).await {
                tracing::warn!(volume = %id, %error, "cannot write the description to the image");
                written.borrow_mut().clear();
            }
        });
        Ok(())
    }

    pub(super) fn server(&self) -> &Rc<Server> {
        &self.server
    }

    /// Makes this node a member of a cluster. At most once.
    pub(super) fn join_cluster(&self, context: ClusterContext) {
        if self.cluster.set(context).is_err() {
            tracing::error!("node already has a cluster context");
        }
    }

    pub(super) fn pools(&self) -> &CorePoolRegistry {
        &self.pools
    }

    pub(super) async fn create_image(
        &self,
        record: &VolumeRecord,
        force: bool,
        access: Option<PoolAccess>,
    ) -> Result<ImageInfo, BackingError> {
        let (placement, mirrored) = (self.local_placement(record)?, self.cluster.get().is_some());
        let how = CreateOptions { buffered: self.buffered, force, mirrored, claim: self.claim };
        self.with_backing(record, access, async |handle| {
            backing::create(&self.core, record, placement, handle, how).await
        })
        .await
    }

    pub(super) async fn erase(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        let placement = self.local_placement(record)?;
        backing::erase(&self.core, record, placement, (self.buffered, self.claim)).await?;
        if let Some(image) = placement.image {
            // The image no longer exists: a stale marker does no harm.
            let _ = self.suspect_images.clear(image).await;
        }
        Ok(())
    }

    pub(super) async fn inspect(
        &self,
        record: &VolumeRecord,
        access: Option<PoolAccess>,
    ) -> Result<ImageInfo, BackingError> {
        let (placement, buffered) = (self.local_placement(record)?, self.buffered);
        self.with_backing(record, access, async |handle| {
            backing::inspect(&self.core, record, placement, handle, buffered).await
        })
        .await
    }

    /// Runs `f` on the image of a volume, and closes the image before it returns.
    async fn with_backing<T>(
        &self,
        record: &VolumeRecord,
        access: Option<PoolAccess>,
        f: impl AsyncFnOnce(&BackingHandle<'_>) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        let placement = self.local_placement(record)?;
        match (placement.backing.path(), access) {
            (Some(path), _) => f(&BackingHandle::Path(path)).await,
            (None, Some(access)) => {
                let core_pool = self.pools.attach(&access).await?;
                let name = access.display_path(record);
                let done = f(&BackingHandle::Pool { core_pool: &core_pool, name: &name }).await;
                drop(core_pool);
                self.pools.detach(access.id()).await;
                done
            }
            (None, None) => {
                Err(BackingError::refused(format!("{} is not open", placement.backing)))
            }
        }
    }

    /// Opens a volume and returns what its image is. Does not export it yet.
    pub(super) async fn open(
        &self,
        record: &VolumeRecord,
        access: Option<PoolAccess>,
        takes_over: bool,
    ) -> Result<ImageInfo, BackingError> {
        if self.stopping.get() {
            return Err(BackingError::refused("the node is stopping"));
        }
        let placement = self.local_placement(record)?;
        if placement.image.is_some_and(|image| self.suspect_images.has_lingering_io(image)) {
            return Err(BackingError::refused(format!(
                "{}: its disk has not completed requests from before it was closed",
                placement.backing
            )));
        }
        let pool = access.as_ref().map(PoolAccess::id);
        let claim = ClaimRequest { take_over: takes_over, ..self.claim };
        let opened = self.open_image(record, placement, access, claim).await;
        if let (Err(BackingError { device_lost: true, .. }), Some(image)) =
            (&opened, placement.image)
        {
            self.suspect_images.mark(image).await;
        }
        let (open_image, mirror) = opened?;
        let image = open_image.info();
        let volume = match &mirror {
            None => self.standalone_volume(&open_image),
            Some(mirror) => mirror.volume(&self.core),
        };
        self.server.add_volume(ServedVolume {
            id: volume_id(record.id),
            name: record.name.to_string(),
            volume: Rc::clone(&volume),
            thin: record.thin,
            access: mirror.as_ref().map(|m| m.access()),
        });
        let written_description = Rc::default();
        self.open_volumes.borrow_mut().insert(
            record.id,
            OpenVolume { volume, image: open_image, mirror, pool, written_description },
        );
        Ok(image)
    }

    /// The volume that executes the commands of an image without a mirror. Initiators see every
    /// close as a power loss.
    fn standalone_volume(&self, image: &OpenImage) -> Rc<Volume> {
        let volume = Volume::new(image.dev(), Epoch::default());
        let (gate, incarnation) = (Rc::new(ReservationGate::default()), self.core.random_u64());
        gate.set_context(ReservationContext {
            power_epoch: incarnation,
            incarnation,
            serving_incarnations: vec![incarnation],
        });
        volume.enable_reservations(Rc::clone(&gate), self.core.buffer_pool().account());
        gate.request_read();
        volume
    }

    /// Opens an image and the mirror that it is a replica of. An image in a pool keeps the core
    /// attached to the pool.
    async fn open_image(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
        access: Option<PoolAccess>,
        claim: ClaimRequest,
    ) -> Result<(Rc<OpenImage>, Option<Rc<MirroredVolume>>), BackingError> {
        let (path, access) = match (placement.backing.path(), access) {
            (Some(path), _) => {
                return self.open_at(record, placement, &BackingHandle::Path(path), claim).await;
            }
            (None, Some(access)) => (access.display_path(record), access),
            (None, None) => {
                return Err(BackingError::refused(format!("{} is not open", placement.backing)));
            }
        };
        let core_pool = self.pools.attach(&access).await?;
        let handle = BackingHandle::Pool { core_pool: &core_pool, name: &path };
        let opened = self.open_at(record, placement, &handle, claim).await;
        drop(core_pool);
        if opened.is_err() {
            self.pools.detach(access.id()).await;
        }
        opened
    }

    async fn open_at(
        &self,
        record: &VolumeRecord,
        placement: &ReplicaPlacement,
        handle: &BackingHandle<'_>,
        claim: ClaimRequest,
    ) -> Result<(Rc<OpenImage>, Option<Rc<MirroredVolume>>), BackingError> {
        let how = (self.buffered, claim);
        let open_image = backing::open(&self.core, record, placement, handle, how).await?;
        let open_image = Rc::new(open_image);
        let Some(context) = self.cluster.get() else { return Ok((open_image, None)) };
        let suspect_images = &self.suspect_images;
        let image = (&open_image.file, handle);
        match MirroredVolume::open(&self.core, context, suspect_images, record.id, image).await {
            Ok(mirrored) => Ok((open_image, Some(Rc::new(mirrored)))),
            Err(error) => {
                release_image(open_image).await;
                Err(error)
            }
        }
    }

    /// Closes a volume. One that is to be erased waits neither for a last flush nor for the other
    /// nodes, which close it too.
    pub(super) async fn close(&self, id: Uuid, erased: bool) -> Result<(), BackingError> {
        self.server.remove_volume(volume_id(id));
        let removed = self.open_volumes.borrow_mut().remove(&id);
        let Some(OpenVolume {
            volume,
            image: open_image,
            mirror: mirrored,
            pool,
            written_description: _,
        }) = removed
        else {
            return Ok(());
        };
        let guests = self.guests.close_endpoint(id);
        let closed = match &mirrored {
            None => {
                guests.await;
                let account = self.core.buffer_pool().account();
                volume.close(&account).await.map_err(|e| e.to_string())
            }
            Some(mirrored) if erased => {
                // First, because this ends the commands that wait for other nodes.
                mirrored.close().await;
                mirrored.with_close_timeout(guests).await;
                let _ = mirrored.close_volume(&volume, &self.core).await;
                Ok(())
            }
            Some(mirrored) => {
                if mirrored.with_close_timeout(guests).await.is_none() {
                    tracing::warn!(volume = %id, "requests of a virtual machine do not complete");
                }
                let closed = mirrored.close_volume(&volume, &self.core).await;
                mirrored.close().await;
                closed
            }
        };
        drop((volume, mirrored));
        let (file, image) = (Rc::downgrade(&open_image.file), open_image.info().id);
        let released = release_image(open_image).await;
        if !released {
            self.track_lingering_io(file, image);
        }
        if let Some(pool) = pool.filter(|_| released) {
            self.pools.detach(pool).await;
        }
        closed.map_err(|why| {
            BackingError::refused(format!(
                "the last flush failed: {why}; the last writes may be lost"
            ))
        })
    }

    /// Blocks the image from being opened again until the I/O that its disk has not finished has
    /// ended.
    fn track_lingering_io(&self, file: Weak<FlatImage>, image: Uuid) {
        let suspect_images = self.suspect_images.clone();
        suspect_images.add_lingering_io(image);
        tokio::task::spawn_local(async move {
            while file.strong_count() > 0 {
                tokio::time::sleep(IMAGE_RELEASE_POLL).await;
            }
            suspect_images.remove_lingering_io(image);
        });
    }

    /// The placement of a volume's replica on this node.
    fn local_placement<'a>(
        &self,
        record: &'a VolumeRecord,
    ) -> Result<&'a ReplicaPlacement, BackingError> {
        let node = self.cluster.get().map_or(FIRST_NODE, |context| context.node);
        let none = || BackingError::refused("this node has no replica of it");
        record.placement(node).ok_or_else(none)
    }

    fn mirrored_volume(&self, id: Uuid) -> Result<Rc<MirroredVolume>, BackingError> {
        let open = self.open_volumes.borrow();
        let Some(volume) = open.get(&id) else {
            return Err(BackingError::refused("the volume is not open"));
        };
        let none = || BackingError::refused("this node is in no cluster");
        volume.mirror.clone().ok_or_else(none)
    }

    /// Sets the nodes that hold the other replicas of a volume.
    pub(super) async fn set_peers(
        &self,
        id: Uuid,
        peers: BTreeMap<NodeId, PeerAddresses>,
    ) -> Result<(), BackingError> {
        self.mirrored_volume(id)?.set_peers(peers).await;
        Ok(())
    }

    /// Hands a volume over to the other nodes; returns whether that is done.
    pub(super) async fn leave_mirror(&self, id: Uuid) -> Result<bool, BackingError> {
        Ok(self.mirrored_volume(id)?.leave().await)
    }

    pub(super) fn rejoin_mirror(&self, id: Uuid) -> Result<(), BackingError> {
        self.mirrored_volume(id)?.rejoin();
        Ok(())
    }

    pub(super) async fn switch_primary(&self, id: Uuid, node: NodeId) -> Result<(), BackingError> {
        self.mirrored_volume(id)?.switch_primary(node).await
    }

    pub(super) fn force_primary(&self, id: Uuid) -> Result<(), BackingError> {
        self.mirrored_volume(id)?.force_primary();
        Ok(())
    }

    pub(super) async fn reservations(&self, id: Uuid) -> Result<Table, BackingError> {
        self.volume(id)?.read_reservations().await.map_err(|e| reservation_error(&e))
    }

    pub(super) async fn clear_reservations(&self, id: Uuid) -> Result<(), BackingError> {
        let (done, answer) = oneshot::channel();
        self.volume(id)?.change_reservations(
            ItNexus::ADMINISTRATOR,
            Change::AdminClear,
            || true,
            move |result| {
                // The caller may have given up; the change is made all the same.
                let _ = done.send(result);
            },
        );
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(ReservationChangeError::DeviceError(e))) => Err(reservation_error(&e)),
            _ => Err(reservation_error(&block::Error::Gone)),
        }
    }

    fn volume(&self, id: Uuid) -> Result<Rc<Volume>, BackingError> {
        let open = self.open_volumes.borrow();
        let entry = open.get(&id).ok_or_else(|| BackingError::refused("the volume is not open"))?;
        Ok(Rc::clone(&entry.volume))
    }

    pub(super) async fn verify(
        &self,
        id: Uuid,
        keep: Option<NodeId>,
    ) -> Result<VerifyReport, BackingError> {
        self.mirrored_volume(id)?.verify(keep).await
    }

    /// Hands over all volumes that other nodes can continue.
    pub(super) async fn leave_all_mirrors(&self) {
        let open: Vec<_> =
            self.open_volumes.borrow().values().filter_map(|k| k.mirror.clone()).collect();
        join_all(open.iter().map(|mirrored| mirrored.leave())).await;
    }

    /// Takes over a connection on which another node asks for a volume of this core.
    pub(super) fn accept_peer_connection(&self, volume: Uuid, greeting: DetachedConnection) {
        let greeting = match greeting.attach(&self.core) {
            Ok(greeting) => greeting,
            Err(error) => {
                tracing::warn!(%volume, %error, "cannot attach a moved peer connection");
                return;
            }
        };
        match self.mirrored_volume(volume) {
            Ok(mirrored) => mirrored.accept(greeting),
            // The volume is about to be opened, or was just closed.
            Err(_) => {
                drop(tokio::task::spawn_local(greeting.refuse(HandshakeRefusal::UnknownVolume)));
            }
        }
    }

    /// Listens to other nodes at `at`; returns the address, with the port that the system chose.
    pub(super) async fn listen_to_peers(
        &self,
        at: SocketAddr,
        router: PeerRouter,
    ) -> io::Result<SocketAddr> {
        let how = ListenOptions { backlog: BACKLOG, reuse_port: false };
        let listener = self.core.listen_with(at, how).await?;
        let bound = listener.local_addr()?;
        let listening = async move {
            peer::accept_connections(&listener, |greeting| router.route(greeting)).await;
        };
        self.peer_listener_tasks.borrow_mut().push(tokio::task::spawn_local(listening));
        Ok(bound)
    }

    pub(super) async fn grow(&self, id: Uuid, size_bytes: u64) -> Result<ImageInfo, BackingError> {
        let entry = self.open_volumes.borrow().get(&id).cloned();
        let Some(entry) = entry else {
            return Err(BackingError::refused("the volume is not open"));
        };
        if entry.mirror.is_some() {
            // All replicas and their logs have to grow together (RFD 0010, attack 39).
            return Err(BackingError::refused("a mirrored volume cannot be made larger yet"));
        }
        let image = entry.image.grow(size_bytes).await?;
        self.server.volume_resized(volume_id(id));
        Ok(image)
    }

    /// Listens at `at`; returns the address, with the port that the system chose. The `first` core
    /// to listen checks that no other program uses the address.
    pub(super) async fn listen(
        &self,
        at: SocketAddr,
        service: Service,
        first: bool,
    ) -> io::Result<SocketAddr> {
        let at = if first { self.probe_address(at).await? } else { at };
        let how = ListenOptions { backlog: BACKLOG, reuse_port: true };
        let listener = self.core.listen_with(at, how).await?;
        let bound = listener.local_addr()?;
        self.pending_listeners.borrow_mut().push((listener, service));
        Ok(bound)
    }

    /// Checks that `at` is free and lets the system choose a port. Without IPv6, "every address"
    /// means every IPv4 address.
    async fn probe_address(&self, at: SocketAddr) -> io::Result<SocketAddr> {
        let alone = |at| self.core.listen_with(at, ListenOptions { backlog: 1, reuse_port: false });
        let listener = match alone(at).await {
            Err(e) if at.is_ipv6() && at.ip().is_unspecified() && ipv6_unavailable(&e) => {
                alone((Ipv4Addr::UNSPECIFIED, at.port()).into()).await?
            }
            other => other?,
        };
        listener.local_addr()
    }

    /// Serves those of these volumes that are open here, and no others, to virtual machines.
    pub(super) fn serve_guests(&self, exported: &ExportedVolumes) {
        if self.stopping.get() {
            return;
        }
        let open = self.open_volumes.borrow();
        self.guests.serve(open.iter().filter_map(|(id, entry)| {
            let access = entry.mirror.as_ref().map(|m| m.access());
            let offer = GuestVolume { volume: Rc::clone(&entry.volume), access };
            Some((*id, exported.get(id)?.clone(), offer))
        }));
    }

    /// Stops serving virtual machines, after answering the requests in flight.
    pub(super) async fn stop_guests(&self) {
        self.stopping.set(true);
        self.guests.close_all().await;
    }

    pub(super) fn set_space(&self, spaces: &HashMap<Uuid, VolumeSpace>) {
        for (id, space) in spaces {
            self.server.set_space(volume_id(*id), *space);
        }
    }

    pub(super) fn accept_clients(&self) {
        for (listener, service) in self.pending_listeners.take() {
            let accept = Rc::clone(&self.server).serve(listener, service);
            self.accept_tasks.borrow_mut().push(tokio::task::spawn_local(accept));
        }
    }

    pub(super) async fn wait_serving_with(&self, id: Uuid, copies: usize, limit: Duration) -> bool {
        let mirrored = self.open_volumes.borrow().get(&id).and_then(|entry| entry.mirror.clone());
        match mirrored {
            Some(mirrored) => mirrored.wait_serving_with(copies, limit).await,
            None => true,
        }
    }

    pub(super) async fn report(&self, scope: ReportScope) -> CoreReport {
        let open: Vec<_> = (self.open_volumes.borrow().iter())
            .filter(|(id, _)| scope.includes(**id))
            .map(|(id, entry)| (*id, entry.clone()))
            .collect();
        let mut volumes = Vec::with_capacity(open.len());
        for (n, (id, entry)) in open.into_iter().enumerate() {
            if n > 0 && n.is_multiple_of(REPORT_BATCH) {
                // A report must not delay initiators.
                tokio::task::yield_now().await;
            }
            let mirror = entry.mirror.map(|m| m.report());
            let report = VolumeReport::new(id, &entry.volume.stats(), mirror, scope);
            let reservations = entry.volume.reservation_gate().and_then(|gate| gate.failure());
            let (lost, is_dead) = (entry.image.claim_lost(), entry.image.file.is_failed());
            volumes.push(VolumeReport {
                claim_lost: lost,
                is_dead,
                reservations_error: reservations,
                ..report
            });
        }
        CoreReport {
            core: self.core.id(),
            sessions: self.server.sessions(),
            guests: self.guests.report(),
            refused_connections: self.server.refused(),
            clients: self.server.clients(),
            memory: self.core.buffer_pool().usage(),
            volumes,
        }
    }

    /// Stops accepting clients and logs out those that are connected.
    pub(super) async fn drain(&self, leave_by: Instant) {
        self.stopping.set(true);
        self.pending_listeners.take();
        self.accept_tasks.take().iter().for_each(JoinHandle::abort);
        self.server.drain(leave_by).await;
    }

    /// Closes all volumes; returns whether all of them are durable.
    pub(super) async fn close_all(&self) -> bool {
        let ids: Vec<_> = self.open_volumes.borrow().keys().copied().collect();
        let closed = join_all(ids.into_iter().map(|id| async move {
            self.close(id, false)
                .await
                .inspect_err(|e| tracing::error!(volume = %id, error = %e, "closing"))
        }));
        closed.await.iter().all(Result::is_ok)
    }
}

/// Waits until an image is no longer used, so that it can be erased or reopened. Returns whether
/// that is so.
async fn release_image(open_image: Rc<OpenImage>) -> bool {
    let file = Rc::clone(&open_image.file);
    drop(open_image);
    let used = async {
        while Rc::strong_count(&file) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let released = tokio::time::timeout(IMAGE_RELEASE_TIMEOUT, used).await.is_ok();
    if !released {
        tracing::warn!("image still in use after its volume was closed");
        return false;
    }
    // From now on another node may open it.
    match tokio::time::timeout(IMAGE_RELEASE_TIMEOUT, file.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            let path = file.path().display();
            tracing::warn!(%path, %error, "cannot mark the image as closed; another node must take it over to use it");
        }
        Err(_) => tracing::warn!("disk of a closed image does not respond"),
    }
    true
}

/// Whether the system has no IPv6 (`EAFNOSUPPORT`, or `EADDRNOTAVAIL` where it is switched off).
fn ipv6_unavailable(e: &io::Error) -> bool {
    let none = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
    e.raw_os_error() == Some(none) || e.kind() == io::ErrorKind::AddrNotAvailable
}

/// The error of reservations that cannot be read or changed here now.
fn reservation_error(e: &block::Error) -> BackingError {
    BackingError::refused(format!("its reservations are not available here now: {e}"))
}
