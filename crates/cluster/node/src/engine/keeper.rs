//! One core's keeper: owns the core's server, the volumes on it and their backings.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::Epoch;
use disk::Claim;
use futures_util::future::join_all;
use image::File;
use mirror::Verified;
use peer::frame::Refusal;
use peer::{DetachedGreeting, NodeId, PeerAddresses};
use reservation::{Change, Party, Table};
use rt::Core;
use rt::net::{ListenOptions, Listener};
use target::server::{Door, Limits, Served, Server, Service, Space};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;
use volume::{Gate, Standing, Unaltered, Volume};

use super::backing::{self, Backed, BackingError, Ground, Image, Making};
use super::distrust::Distrust;
use super::guests::{Exported, Guests, Offer};
use super::mirrored::Mirrored;
use super::pools::{PoolDoor, Pools};
use super::report::{CoreReport, Scope, VolumeReport};
use super::seat::{Router, Seat};
use crate::publish::volume_id;
use crate::record::{FIRST_NODE, Place, VolumeRecord};

/// Connections that the system takes ahead of us, per listener.
const BACKLOG: u32 = 4096;

pub(super) struct Keeper {
    core: Core,
    server: Rc<Server>,
    /// Whether file systems without direct I/O may be used.
    buffered: bool,
    /// How it claims the disks of images.
    claim: Claim,
    distrust: Distrust,
    /// Pools of disks.
    pools: Pools,
    guests: Guests,
    /// Its node's place in a cluster.
    seat: OnceCell<Seat>,
    open: RefCell<BTreeMap<Uuid, Kept>>,
    /// Listeners that nobody accepts from yet.
    waiting: RefCell<Vec<(Listener, Service)>>,
    accepting: RefCell<Vec<JoinHandle<()>>>,
    /// Listeners for other nodes.
    peers: RefCell<Vec<JoinHandle<()>>>,
    stopping: Cell<bool>,
}

/// How long what has been closed may go on using its image.
const LETTING_GO: Duration = Duration::from_secs(5);

/// How often is looked whether it still does.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Volumes that are reported on before others have their turn.
const REPORT_AT_ONCE: usize = 16;

/// An open volume.
#[derive(Clone)]
struct Kept {
    volume: Rc<Volume>,
    backed: Rc<Backed>,
    mirrored: Option<Rc<Mirrored>>,
    /// The pool that it lies in.
    pool: Option<Uuid>,
    /// What its image was last told to tell of it.
    told: Rc<RefCell<Vec<u8>>>,
}

impl Keeper {
    pub(super) fn new(
        core: Core,
        (limits, door): (Limits, Door),
        (buffered, distrust, claim): (bool, Distrust, Claim),
        guests: Guests,
    ) -> Rc<Self> {
        Rc::new(Self {
            server: Server::new(core.clone(), limits, door),
            pools: Pools::new(core.clone(), buffered, claim),
            core,
            buffered,
            claim,
            distrust,
            guests,
            seat: OnceCell::new(),
            open: RefCell::default(),
            waiting: RefCell::default(),
            accepting: RefCell::default(),
            peers: RefCell::default(),
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

    /// Who takes disks that other machines may reach.
    pub(super) fn disk_claim(&self) -> Claim {
        self.claim
    }

    /// The image of an open volume.
    pub(super) fn image_of(&self, id: Uuid) -> Result<Rc<File>, BackingError> {
        let open = self.open.borrow();
        let kept = open.get(&id).ok_or_else(|| BackingError::refused("the volume is not open"))?;
        Ok(Rc::clone(&kept.backed.file))
    }

    /// Has the image of an open volume tell `text` of it, if it does not yet. That is not waited for: a disk that does
    /// not answer holds up nobody.
    pub(super) fn describe(&self, id: Uuid, text: Vec<u8>) -> Result<(), BackingError> {
        let file = self.image_of(id)?;
        let told = self.open.borrow().get(&id).map(|kept| Rc::clone(&kept.told));
        let Some(told) = told.filter(|told| *told.borrow() != text) else { return Ok(()) };
        told.borrow_mut().clone_from(&text);
        tokio::task::spawn_local(async move {
            if let Err(error) = file.describe(&text).await {
                tracing::warn!(volume = %id, %error, "its image does not tell of it");
                told.borrow_mut().clear();
            }
        });
        Ok(())
    }

    pub(super) fn server(&self) -> &Rc<Server> {
        &self.server
    }

    /// This node is one of a cluster from now on, if it is not yet.
    pub(super) fn enter(&self, seat: Seat) {
        if self.seat.set(seat).is_err() {
            tracing::error!("the node has a place in a cluster already");
        }
    }

    pub(super) fn pools(&self) -> &Pools {
        &self.pools
    }

    pub(super) async fn make(
        &self,
        record: &VolumeRecord,
        force: bool,
        door: Option<PoolDoor>,
    ) -> Result<Image, BackingError> {
        let (place, mirrored) = (self.place(record)?, self.seat.get().is_some());
        let how = Making { buffered: self.buffered, force, mirrored, claim: self.claim };
        self.on_ground(record, door, async |ground| {
            backing::make(&self.core, record, place, ground, how).await
        })
        .await
    }

    pub(super) async fn erase(&self, record: &VolumeRecord) -> Result<(), BackingError> {
        let place = self.place(record)?;
        backing::erase(&self.core, record, place, (self.buffered, self.claim)).await?;
        if let Some(image) = place.image {
            // Nobody looks for the note of an image that is no more.
            let _ = self.distrust.forget(image).await;
        }
        Ok(())
    }

    pub(super) async fn inspect(
        &self,
        record: &VolumeRecord,
        door: Option<PoolDoor>,
    ) -> Result<Image, BackingError> {
        let (place, buffered) = (self.place(record)?, self.buffered);
        self.on_ground(record, door, async |ground| {
            backing::inspect(&self.core, record, place, ground, buffered).await
        })
        .await
    }

    /// Does something with the image of a volume, which is in nobody's use when that is done.
    async fn on_ground<T>(
        &self,
        record: &VolumeRecord,
        door: Option<PoolDoor>,
        f: impl AsyncFnOnce(&Ground<'_>) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        let place = self.place(record)?;
        match (place.backing.path(), door) {
            (Some(path), _) => f(&Ground::Path(path)).await,
            (None, Some(door)) => {
                let seat = self.pools.sit(&door).await?;
                let name = door.path_of(record);
                let done = f(&Ground::Pool { seat: &seat, name: &name }).await;
                drop(seat);
                self.pools.rise(door.id()).await;
                done
            }
            (None, None) => Err(BackingError::refused(format!("{} is not open", place.backing))),
        }
    }

    /// Opens a volume and tells what its image is. It is not exported yet.
    pub(super) async fn open(
        &self,
        record: &VolumeRecord,
        door: Option<PoolDoor>,
        takes_over: bool,
    ) -> Result<Image, BackingError> {
        if self.stopping.get() {
            return Err(BackingError::refused("the node is stopping"));
        }
        let place = self.place(record)?;
        if place.image.is_some_and(|image| self.distrust.is_at_work(image)) {
            return Err(BackingError::refused(format!(
                "{}: its disk has not ended what was begun before it was closed",
                place.backing
            )));
        }
        let pool = door.as_ref().map(PoolDoor::id);
        let claim = Claim { take_over: takes_over, ..self.claim };
        let opened = self.open_image(record, place, door, claim).await;
        if let (Err(BackingError { lost: true, .. }), Some(image)) = (&opened, place.image) {
            self.distrust.note(image).await;
        }
        let (backed, mirrored) = opened?;
        let image = backed.image();
        let volume = match &mirrored {
            None => self.volume_of(&backed),
            Some(mirrored) => mirrored.volume(&self.core),
        };
        self.server.add_volume(Served {
            id: volume_id(record.id),
            name: record.name.to_string(),
            volume: Rc::clone(&volume),
            thin: record.thin,
            access: mirrored.as_ref().map(|m| m.access()),
        });
        let told = Rc::default();
        self.open.borrow_mut().insert(record.id, Kept { volume, backed, mirrored, pool, told });
        Ok(image)
    }

    /// What owns the commands of a volume that only this node has. Power is lost, as far as initiators can tell,
    /// whenever it is closed.
    fn volume_of(&self, backed: &Backed) -> Rc<Volume> {
        let volume = Volume::new(backed.dev(), Epoch::default());
        let (gate, seat) = (Rc::new(Gate::default()), self.core.random_u64());
        gate.set_standing(Standing { era: seat, seat, seats: vec![seat] });
        volume.keep_reservations(Rc::clone(&gate), self.core.pool().account());
        gate.look();
        volume
    }

    /// Opens an image, and the mirror that it is a copy of. Keeps the seat at its pool, if it lies in one.
    async fn open_image(
        &self,
        record: &VolumeRecord,
        place: &Place,
        door: Option<PoolDoor>,
        claim: Claim,
    ) -> Result<(Rc<Backed>, Option<Rc<Mirrored>>), BackingError> {
        let (path, door) = match (place.backing.path(), door) {
            (Some(path), _) => {
                return self.open_on(record, place, &Ground::Path(path), claim).await;
            }
            (None, Some(door)) => (door.path_of(record), door),
            (None, None) => {
                return Err(BackingError::refused(format!("{} is not open", place.backing)));
            }
        };
        let seat = self.pools.sit(&door).await?;
        let ground = Ground::Pool { seat: &seat, name: &path };
        let opened = self.open_on(record, place, &ground, claim).await;
        drop(seat);
        if opened.is_err() {
            self.pools.rise(door.id()).await;
        }
        opened
    }

    async fn open_on(
        &self,
        record: &VolumeRecord,
        place: &Place,
        ground: &Ground<'_>,
        claim: Claim,
    ) -> Result<(Rc<Backed>, Option<Rc<Mirrored>>), BackingError> {
        let how = (self.buffered, claim);
        let backed = backing::open(&self.core, record, place, ground, how).await?;
        let backed = Rc::new(backed);
        let Some(seat) = self.seat.get() else { return Ok((backed, None)) };
        let distrust = &self.distrust;
        let image = (&backed.file, ground);
        match Mirrored::open(&self.core, seat, distrust, record.id, image).await {
            Ok(mirrored) => Ok((backed, Some(Rc::new(mirrored)))),
            Err(error) => {
                is_let_go(backed).await;
                Err(error)
            }
        }
    }

    /// Closes a volume. One that is to be erased waits neither for a last flush nor for other nodes, which
    /// close it, too.
    pub(super) async fn close(&self, id: Uuid, erased: bool) -> Result<(), BackingError> {
        self.server.remove_volume(volume_id(id));
        let kept = self.open.borrow_mut().remove(&id);
        let Some(Kept { volume, backed, mirrored, pool, told: _ }) = kept else { return Ok(()) };
        let guests = self.guests.end(id);
        let closed = match &mirrored {
            None => {
                guests.await;
                let account = self.core.pool().account();
                volume.close(&account).await.map_err(|e| e.to_string())
            }
            Some(mirrored) if erased => {
                // First: whatever of its commands waits for the other nodes ends with it.
                mirrored.close().await;
                mirrored.in_time(guests).await;
                let _ = mirrored.close_volume(&volume, &self.core).await;
                Ok(())
            }
            Some(mirrored) => {
                if mirrored.in_time(guests).await.is_none() {
                    tracing::warn!(volume = %id, "a virtual machine's requests do not end");
                }
                let closed = mirrored.close_volume(&volume, &self.core).await;
                mirrored.close().await;
                closed
            }
        };
        drop((volume, mirrored));
        let (file, image) = (Rc::downgrade(&backed.file), backed.image().image);
        let let_go = is_let_go(backed).await;
        if !let_go {
            self.wait_for_end(file, image);
        }
        if let Some(pool) = pool.filter(|_| let_go) {
            self.pools.rise(pool).await;
        }
        closed.map_err(|why| {
            BackingError::refused(format!(
                "the last flush failed: {why}; its last writes may be lost"
            ))
        })
    }

    /// An image is in use though it was closed, as its disk does not answer: until that has ended it is not opened again.
    fn wait_for_end(&self, file: Weak<File>, image: Uuid) {
        let distrust = self.distrust.clone();
        distrust.begins_work(image);
        tokio::task::spawn_local(async move {
            while file.strong_count() > 0 {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            distrust.ends_work(image);
        });
    }

    /// The copy of a volume that this node keeps.
    fn place<'a>(&self, record: &'a VolumeRecord) -> Result<&'a Place, BackingError> {
        let node = self.seat.get().map_or(FIRST_NODE, |seat| seat.node);
        let none = || BackingError::refused("this node keeps no copy of it");
        record.place(node).ok_or_else(none)
    }

    fn mirrored(&self, id: Uuid) -> Result<Rc<Mirrored>, BackingError> {
        let open = self.open.borrow();
        let Some(kept) = open.get(&id) else {
            return Err(BackingError::refused("the volume is not open"));
        };
        let none = || BackingError::refused("this node is in no cluster");
        kept.mirrored.clone().ok_or_else(none)
    }

    /// The nodes that have the other replicas of a volume, from now on.
    pub(super) async fn set_peers(
        &self,
        id: Uuid,
        peers: BTreeMap<NodeId, PeerAddresses>,
    ) -> Result<(), BackingError> {
        self.mirrored(id)?.set_peers(peers).await;
        Ok(())
    }

    /// Leaves a volume to the other nodes; says whether it has.
    pub(super) async fn leave(&self, id: Uuid) -> Result<bool, BackingError> {
        Ok(self.mirrored(id)?.leave().await)
    }

    pub(super) fn rejoin(&self, id: Uuid) -> Result<(), BackingError> {
        self.mirrored(id)?.rejoin();
        Ok(())
    }

    pub(super) async fn switch_to(&self, id: Uuid, node: NodeId) -> Result<(), BackingError> {
        self.mirrored(id)?.switch_to(node).await
    }

    pub(super) fn force(&self, id: Uuid) -> Result<(), BackingError> {
        self.mirrored(id)?.force();
        Ok(())
    }

    pub(super) async fn reservations(&self, id: Uuid) -> Result<Table, BackingError> {
        self.volume(id)?.reservations().await.map_err(|e| unreserved(&e))
    }

    pub(super) async fn clear_reservations(&self, id: Uuid) -> Result<(), BackingError> {
        let (done, answer) = oneshot::channel();
        self.volume(id)?.alter(
            Party::NOBODY,
            Change::Evict,
            || true,
            move |result| {
                // Nobody waits any more: it is done all the same.
                let _ = done.send(result);
            },
        );
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Unaltered::Failed(e))) => Err(unreserved(&e)),
            _ => Err(unreserved(&block::Error::Gone)),
        }
    }

    fn volume(&self, id: Uuid) -> Result<Rc<Volume>, BackingError> {
        let open = self.open.borrow();
        let kept = open.get(&id).ok_or_else(|| BackingError::refused("the volume is not open"))?;
        Ok(Rc::clone(&kept.volume))
    }

    pub(super) async fn verify(
        &self,
        id: Uuid,
        keep: Option<NodeId>,
    ) -> Result<Verified, BackingError> {
        self.mirrored(id)?.verify(keep).await
    }

    /// Leaves all volumes that others can go on with.
    pub(super) async fn leave_all(&self) {
        let open: Vec<_> = self.open.borrow().values().filter_map(|k| k.mirrored.clone()).collect();
        join_all(open.iter().map(|mirrored| mirrored.leave())).await;
    }

    /// A connection of another node asks for a volume of this core.
    pub(super) fn greet(&self, volume: Uuid, greeting: DetachedGreeting) {
        let greeting = match greeting.attach(&self.core) {
            Ok(greeting) => greeting,
            Err(error) => {
                tracing::warn!(%volume, %error, "a connection of another node was lost moving");
                return;
            }
        };
        match self.mirrored(volume) {
            Ok(mirrored) => mirrored.accept(greeting),
            // It is about to be opened, or has just been closed.
            Err(_) => drop(tokio::task::spawn_local(greeting.refuse(Refusal::Volume))),
        }
    }

    /// Listens to other nodes at `at` and gives the address, with the port the system chose.
    pub(super) async fn listen_to_peers(
        &self,
        at: SocketAddr,
        router: Router,
    ) -> io::Result<SocketAddr> {
        let how = ListenOptions { backlog: BACKLOG, reuse_port: false };
        let listener = self.core.listen_with(at, how).await?;
        let bound = listener.local_addr()?;
        let listening = async move {
            peer::receive_greetings(&listener, |greeting| router.route(greeting)).await;
        };
        self.peers.borrow_mut().push(tokio::task::spawn_local(listening));
        Ok(bound)
    }

    pub(super) async fn grow(&self, id: Uuid, size_bytes: u64) -> Result<Image, BackingError> {
        let kept = self.open.borrow().get(&id).cloned();
        let Some(kept) = kept else {
            return Err(BackingError::refused("the volume is not open"));
        };
        if kept.mirrored.is_some() {
            // All replicas and their logs have to grow together (RFD 0010, attack 39).
            return Err(BackingError::refused("a mirrored volume cannot be made larger yet"));
        }
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

    /// Serves these volumes to virtual machines, those of them that are open here, and no others.
    pub(super) fn serve_guests(&self, exported: &Exported) {
        if self.stopping.get() {
            return;
        }
        let open = self.open.borrow();
        self.guests.serve(open.iter().filter_map(|(id, kept)| {
            let access = kept.mirrored.as_ref().map(|m| m.access());
            let offer = Offer { volume: Rc::clone(&kept.volume), access };
            Some((*id, exported.get(id)?.clone(), offer))
        }));
    }

    /// Serves virtual machines no more: what is in flight is answered.
    pub(super) async fn dismiss_guests(&self) {
        self.stopping.set(true);
        self.guests.end_all().await;
    }

    pub(super) fn tell_space(&self, spaces: &HashMap<Uuid, Space>) {
        for (id, space) in spaces {
            self.server.set_space(volume_id(*id), *space);
        }
    }

    pub(super) fn accept(&self) {
        for (listener, service) in self.waiting.take() {
            let accept = Rc::clone(&self.server).serve(listener, service);
            self.accepting.borrow_mut().push(tokio::task::spawn_local(accept));
        }
    }

    pub(super) async fn serves_with(&self, id: Uuid, copies: usize, limit: Duration) -> bool {
        let mirrored = self.open.borrow().get(&id).and_then(|kept| kept.mirrored.clone());
        match mirrored {
            Some(mirrored) => mirrored.serves_with(copies, limit).await,
            None => true,
        }
    }

    pub(super) async fn report(&self, scope: Scope) -> CoreReport {
        let open: Vec<_> = (self.open.borrow().iter())
            .filter(|(id, _)| scope.covers(**id))
            .map(|(id, kept)| (*id, kept.clone()))
            .collect();
        let mut volumes = Vec::with_capacity(open.len());
        for (n, (id, kept)) in open.into_iter().enumerate() {
            if n > 0 && n.is_multiple_of(REPORT_AT_ONCE) {
                // Initiators are not to notice that somebody looks.
                tokio::task::yield_now().await;
            }
            let mirror = kept.mirrored.map(|m| m.report());
            let report = VolumeReport::new(id, &kept.volume.stats(), mirror, scope);
            let reservations = kept.volume.gate().and_then(|gate| gate.failure());
            let (lost, is_dead) = (kept.backed.lost(), kept.backed.file.is_dead());
            volumes.push(VolumeReport { lost, is_dead, reservations, ..report });
        }
        CoreReport {
            core: self.core.id(),
            sessions: self.server.sessions(),
            guests: self.guests.report(),
            refused: self.server.refused(),
            clients: self.server.clients(),
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
            self.close(id, false)
                .await
                .inspect_err(|e| tracing::error!(volume = %id, error = %e, "closing"))
        }));
        closed.await.iter().all(Result::is_ok)
    }
}

/// Waits until nobody uses the image any more: it is to be erased, or opened again. Says whether that is so.
async fn is_let_go(backed: Rc<Backed>) -> bool {
    let file = Rc::clone(&backed.file);
    drop(backed);
    let used = async {
        while Rc::strong_count(&file) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let let_go = tokio::time::timeout(LETTING_GO, used).await.is_ok();
    if !let_go {
        tracing::warn!("an image is still in use after its volume was closed");
        return false;
    }
    // Other nodes may have it from now on.
    match tokio::time::timeout(LETTING_GO, file.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            let path = file.path().display();
            tracing::warn!(%path, %error, "it is not noted that the image is closed: another node has to take it over");
        }
        Err(_) => tracing::warn!("the disk of an image that was closed does not answer"),
    }
    true
}

/// Whether the system has no IPv6 (`EAFNOSUPPORT`, or `EADDRNOTAVAIL` where it is switched off).
fn is_no_ipv6(e: &io::Error) -> bool {
    let none = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
    e.raw_os_error() == Some(none) || e.kind() == io::ErrorKind::AddrNotAvailable
}

/// Why reservations cannot be read or changed here now.
fn unreserved(e: &block::Error) -> BackingError {
    BackingError::refused(format!("its reservations cannot be reached here now: {e}"))
}
