//! A mirrored volume on its core: image, intent log, mirror, sessions with the other replicas, and
//! the access state that initiators see.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{AccessState, Dev, Epoch};
use image::FlatImage;
use mirror::config::MirrorConfig;
use mirror::membership::NotServingReason;
use mirror::{Mirror, MirrorParts, MirrorStatus, VerifyReport};
use peer::{Endpoint, IncomingConnection, NodeId, PeerAddresses};
use rt::Core;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use uuid::Uuid;
use volume::{ReservationContext, ReservationGate, Volume};

use super::access_state::{NotServing, access_state};
use super::backing::BackingHandle;
use super::backing_error::BackingError;
use super::cluster_context::ClusterContext;
use super::image_log;
use super::report::MirrorReport;
use super::suspect_images::SuspectImages;

/// How long opening a mirror waits for its buffer memory.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long closing a volume waits for its commands, and then for its sessions and log: a disk that
/// does not answer must not block the close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a caller waits for a change of the configuration, beyond the grace time.
const CONFIG_CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before marking an image whose disk was lost is tried again.
const MARK_RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Poll interval of the access state while the mirror does not serve and may do so soon.
const ACCESS_POLL_FAST: Duration = Duration::from_millis(100);

/// Poll interval while initiators are directed to other nodes.
const ACCESS_POLL: Duration = Duration::from_secs(1);

/// Poll interval while the mirror serves; it reports every end of serving, a lapsed lease too.
const ACCESS_POLL_SLOW: Duration = Duration::from_secs(60);

/// An open mirrored volume.
pub(super) struct MirroredVolume {
    node: NodeId,
    grace: Duration,
    mirror: Mirror,
    /// Checks commands against the reservations.
    gate: Rc<ReservationGate>,
    endpoint: Endpoint<Mirror>,
    access: AccessState,
    peers: tokio::sync::Mutex<BTreeMap<NodeId, PeerAddresses>>,
    /// Where an image that lost its disk is marked, for the next open.
    suspect_images: SuspectImages,
    image: Uuid,
    background_task: RefCell<Option<JoinHandle<()>>>,
}

impl MirroredVolume {
    /// Opens the replica of `volume` in `file`. Does not wait until it serves.
    pub(super) async fn open(
        core: &Core,
        context: &ClusterContext,
        suspect_images: &SuspectImages,
        volume: Uuid,
        (file, handle): (&Rc<FlatImage>, &BackingHandle<'_>),
    ) -> Result<Self, BackingError> {
        let (log, found) = image_log::open(core, suspect_images, file).await?;
        let gate = Rc::new(ReservationGate::default());
        let parts = MirrorParts {
            node: context.node,
            core: core.clone(),
            account: core.buffer_pool().account(),
            leg: Dev::shared(Rc::clone(file)),
            log,
            log_report: found,
            metadata_observer: Rc::clone(&gate) as Rc<dyn block::MetadataObserver>,
            free_space: handle.free_space(core),
            config_store: context.mirrors.record_of(volume),
            settings: context.settings,
            resync_permits: Arc::clone(&context.resync_permits),
        };
        let opened = timeout(MEMORY_TIMEOUT, Mirror::open(parts)).await;
        let mirror = opened.ok().and_then(Result::ok).ok_or_else(|| {
            let least = core.buffer_pool().min_mib_for(0, true);
            BackingError::refused(format!(
                "disk pools occupy the buffer memory that mirrored volumes need on this core: set \
                 cores.memory to \"{least}MiB\" or more in the configuration, and restart the node"
            ))
        })?;
        let handler = Rc::new(mirror.clone());
        let endpoint = Endpoint::new(core.clone(), context.identity(volume), handler);
        mirror.set_lease_paths(endpoint.lease_paths_for_handler());
        let access = AccessState::new(block::Access::Transitioning);
        let publishing =
            publish_access_state(mirror.clone(), context.node, access.clone(), Rc::clone(&gate));
        let (suspect_images, image) = (suspect_images.clone(), file.label().image_id);
        let marking = mark_device_loss(mirror.clone(), suspect_images.clone(), image);
        let publishing = async move {
            tokio::join!(publishing, marking);
        };
        Ok(Self {
            node: context.node,
            grace: context.settings.leases.grace(),
            mirror,
            gate,
            endpoint,
            access,
            peers: tokio::sync::Mutex::default(),
            suspect_images,
            image,
            background_task: RefCell::new(Some(tokio::task::spawn_local(publishing))),
        })
    }

    /// The volume that executes its commands.
    pub(super) fn volume(&self, core: &Core) -> Rc<Volume> {
        let compares = Rc::new(self.mirror.clone());
        let volume =
            Volume::new_replicated(Dev::new(self.mirror.clone()), compares, Epoch::default());
        let (mirror, me) = (self.mirror.clone(), self.node);
        let record = move || mirror.status().config;
        self.gate.set_context_source(Box::new(move || {
            record().map(|record| reservation_standing(&record, me))
        }));
        volume.enable_reservations(Rc::clone(&self.gate), core.buffer_pool().account());
        volume
    }

    /// Its access state through this node.
    pub(super) fn access(&self) -> AccessState {
        self.access.clone()
    }

    /// Takes over a connection of another node.
    pub(super) fn accept(&self, greeting: IncomingConnection) {
        self.endpoint.accept(greeting);
    }

    /// Sets the nodes that hold the other replicas.
    pub(super) async fn set_peers(&self, peers: BTreeMap<NodeId, PeerAddresses>) {
        let mut known = self.peers.lock().await;
        let gone =
            |(node, at): (&NodeId, &PeerAddresses)| (peers.get(node) != Some(at)).then_some(*node);
        let gone: Vec<_> = known.iter().filter_map(gone).collect();
        for node in gone {
            self.endpoint.remove(node).await;
            known.remove(&node);
        }
        for (node, at) in peers {
            if node != self.node && !known.contains_key(&node) {
                self.endpoint.add(node, at.clone());
                known.insert(node, at);
            }
        }
    }

    /// Waits up to `limit` until it serves with `copies` replicas in sync. Returns whether it does.
    pub(super) async fn wait_serving_with(&self, copies: usize, limit: Duration) -> bool {
        let serves = || {
            let status = self.mirror.status();
            status.not_serving.is_none() && status.config.is_some_and(|r| r.in_sync.len() == copies)
        };
        let served = async {
            while !serves() {
                self.mirror.wait_status_change().await;
            }
        };
        timeout(limit, served).await.is_ok()
    }

    /// The state of this replica.
    pub(super) fn report(&self) -> MirrorReport {
        MirrorReport { status: self.mirror.status(), access: self.access.get() }
    }

    /// Hands the volume over to the other replicas, and stays out until [`Self::rejoin`]. Returns
    /// false if no other replica is in sync and able to take over.
    pub(super) async fn leave(&self) -> bool {
        self.mirror.set_join_allowed(false);
        let status = self.mirror.status();
        if let Some(record) = &status.config
            && record.others(self.node).next().is_none()
        {
            return record.member(self.node).is_none();
        }
        self.mirror.leave();
        // Replicas that do not answer are excluded first.
        timeout(self.grace * 2 + CONFIG_CHANGE_TIMEOUT, self.mirror.wait_left())
            .await
            .unwrap_or(false)
    }

    /// Allows this replica to be brought in sync again whenever it is out of sync.
    pub(super) fn rejoin(&self) {
        self.mirror.set_join_allowed(true);
    }

    /// Makes the replica on `node` the primary.
    pub(super) async fn switch_primary(&self, node: NodeId) -> Result<(), BackingError> {
        let leads =
            |status: &MirrorStatus, node| status.config.as_ref().is_some_and(|r| r.primary == node);
        if leads(&self.mirror.status(), node) {
            return Ok(());
        }
        self.wait_primary().await?;
        self.mirror.switch_primary(node);
        let switched = async {
            while !leads(&self.mirror.status(), node) {
                self.mirror.wait_status_change().await;
            }
        };
        let refused = || {
            let why = "it is not in sync, unreachable, or another change is in progress";
            BackingError::refused(format!("node {node} did not become primary: {why}"))
        };
        timeout(CONFIG_CHANGE_TIMEOUT, switched).await.map_err(|_| refused())
    }

    /// Continues alone, even if acknowledged writes are lost.
    pub(super) fn force_primary(&self) {
        self.mirror.force_primary();
    }

    /// Compares all replicas. If `keep` names a node, overwrites those that differ with its
    /// contents.
    pub(super) async fn verify(&self, keep: Option<NodeId>) -> Result<VerifyReport, BackingError> {
        self.wait_primary().await?;
        let record = self.mirror.status().config;
        let in_sync = |node| record.as_ref().is_some_and(|r| r.member(node).is_some());
        if let Some(node) = keep.filter(|node| !in_sync(*node)) {
            return Err(BackingError::refused(format!(
                "the replica on node {node} is not in sync"
            )));
        }
        let ended = |_| BackingError::refused("the configuration has changed meanwhile");
        let found = self.mirror.verify(keep).await.map_err(ended)?;
        match found.nodes.len() {
            // The other replicas went out of sync meanwhile.
            1 => Err(BackingError::refused("nothing was compared: only one replica is in sync")),
            _ => Ok(found),
        }
    }

    /// Waits until this replica is the primary and serves; a view change ends by itself.
    async fn wait_primary(&self) -> Result<(), BackingError> {
        let decided = async {
            loop {
                let status = self.mirror.status();
                match status.config.map(|r| r.primary) {
                    Some(node) if node != self.node => return Some(node),
                    Some(_) if status.not_serving.is_none() => return None,
                    _ => self.mirror.wait_status_change().await,
                }
            }
        };
        match timeout(CONFIG_CHANGE_TIMEOUT, decided).await {
            Ok(None) => Ok(()),
            Ok(Some(node)) => {
                Err(BackingError::refused(format!("node {node} is its primary: run this there")))
            }
            Err(_) => Err(BackingError::refused("the volume is not served here now")),
        }
    }

    /// Ends the commands of its volume, which initiators no longer see.
    ///
    /// # Errors
    /// The last flush failed, or the disk does not answer.
    pub(super) async fn close_volume(
        &self,
        volume: &Rc<Volume>,
        core: &Core,
    ) -> Result<(), String> {
        let account = core.buffer_pool().account();
        match self.with_close_timeout(volume.close(&account)).await {
            None => Err("a disk does not respond".to_owned()),
            Some(Err(_)) if self.has_nothing_to_flush() => Ok(()),
            Some(ended) => ended.map_err(|e| e.to_string()),
        }
    }

    /// Awaits `ending`, which waits for commands. If that takes too long, ends the commands as
    /// those of clients that were disconnected, and waits once more; `None` if that does not help.
    pub(super) async fn with_close_timeout<T>(&self, ending: impl Future<Output = T>) -> Option<T> {
        let mut ending = std::pin::pin!(ending);
        match timeout(CLOSE_TIMEOUT, &mut ending).await {
            Ok(ended) => Some(ended),
            Err(_) => {
                self.mirror.set_holds_commands(false);
                timeout(CLOSE_TIMEOUT, ending).await.ok()
            }
        }
    }

    /// Whether no acknowledged write has to be made durable here: the other replicas hold them all,
    /// or none was acknowledged yet.
    fn has_nothing_to_flush(&self) -> bool {
        let MirrorStatus { not_serving: why, leg_loss: lost, config: record, .. } =
            self.mirror.status();
        let is_out = record.is_some_and(|record| record.member(self.node).is_none());
        if lost.is_some() && is_out {
            return true;
        }
        why.is_some_and(|why| {
            matches!(
                why,
                NotServingReason::OutOfSync(_)
                    | NotServingReason::AwaitingExclusion(_)
                    | NotServingReason::AwaitingRestartedMembers(_)
                    | NotServingReason::RolledBack { .. }
                    | NotServingReason::AwaitingConfigRead(_)
                    | NotServingReason::TakeoverPending(_)
                    | NotServingReason::ConfigUnread { .. }
            )
        })
    }

    /// Ends the sessions and the mirror.
    pub(super) async fn close(&self) {
        if let Some(task) = self.background_task.take() {
            task.abort();
        }
        self.access.set(block::Access::Unavailable);
        let parts = async {
            self.endpoint.stop().await;
            self.mirror.close().await
        };
        let closed = timeout(CLOSE_TIMEOUT, parts).await.unwrap_or_else(|_| {
            tracing::error!("mirror not closed cleanly: its disk does not respond");
            false
        });
        if !closed {
            self.suspect_images.mark(self.image).await;
        }
    }
}

/// Waits until `mirror` loses its disk, then marks `image`, and retries until that succeeds.
async fn mark_device_loss(mirror: Mirror, suspect_images: SuspectImages, image: Uuid) {
    while !mirror.is_leg_lost() {
        mirror.wait_status_change().await;
    }
    while !suspect_images.mark(image).await {
        tokio::time::sleep(MARK_RETRY_PAUSE).await;
    }
}

/// The state on which reservations depend, by this configuration.
fn reservation_standing(record: &MirrorConfig, me: NodeId) -> ReservationContext {
    let serving_incarnations = record.in_sync.iter().map(|m| m.incarnation.0).collect();
    let incarnation = record.member(me).map_or(0, |m| m.incarnation.0);
    ReservationContext { power_epoch: record.cold_start_epoch.0, incarnation, serving_incarnations }
}

/// Publishes the access state of the volume through node `me`, for as long as the mirror exists.
async fn publish_access_state(
    mirror: Mirror,
    me: NodeId,
    state: AccessState,
    gate: Rc<ReservationGate>,
) {
    let (mut served, mut has_served) = (Instant::now(), false);
    loop {
        let status = mirror.status();
        if status.not_serving.is_none() {
            if !has_served {
                // Read reservations now: an error must show before an initiator comes.
                gate.request_read();
            }
            (served, has_served) = (Instant::now(), true);
        }
        let idle = status.not_serving.as_ref().map(|why| NotServing {
            why,
            not_serving_for: served.elapsed(),
            has_served,
            store_silent_for: status.store_silent_for,
        });
        let now = access_state(me, idle);
        if let Some(record) = &status.config {
            gate.set_context(reservation_standing(record, me));
        }
        // Publish first: initiators whose commands end then go to another node.
        state.set(now);
        mirror.set_holds_commands(now != block::Access::Unavailable);
        let soon = match now {
            _ if status.not_serving.is_none() => ACCESS_POLL_SLOW,
            block::Access::Unavailable => ACCESS_POLL,
            _ => ACCESS_POLL_FAST,
        };
        // A timeout has the same effect as a change.
        let _ = timeout(soon, mirror.wait_status_change()).await;
    }
}
