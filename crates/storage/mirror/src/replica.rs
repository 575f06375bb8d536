//! One replica of a mirrored volume: what all parts of the mirror on this node share.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use block::{
    Account, Blocks, Ctx, Epoch, Error, METADATA_LBA, MemoryClass, MetadataObserver, RangeLocks,
};
use intent_log::{FlushStamp, Region, RegionGuard};
use peer::{ClockStamp, Incarnation, Link, Message, NodeId, Role, View};
use rt::Core;
use smallvec::SmallVec;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::join::{JoinAttempt, JoinBackoff};
use super::leg::Leg;
use super::local_writes::LocalWrites;
use super::membership_driver::DynConfigStore;
use super::no_space::FreeSpace;
use super::peer_requests::PeerRequests;
use super::signal::Signal;
use super::state::ReplicaState;
use super::{MirrorSettings, Mistake};

/// One replica on its core. The parts of the mirror are methods of this, one file each.
pub(super) struct Replica {
    pub(super) me: NodeId,
    pub(super) core: Core,
    pub(super) settings: MirrorSettings,
    pub(super) account: Account,
    pub(super) leg: Leg,
    /// Is told of changes of the metadata blocks.
    pub(super) metadata_observer: Rc<dyn MetadataObserver>,
    /// Locks on ranges of the leg (the second table of RFD 0010, 4.1). At the primary their order
    /// is the order of all writes.
    pub(super) range_locks: Rc<RangeLocks>,
    pub(super) local_writes: Rc<LocalWrites>,
    pub(super) peer_requests: PeerRequests,
    /// Permits to resync, shared by the primaries of a node.
    pub(super) resync_permits: Arc<Semaphore>,
    pub(super) config_store: Box<dyn DynConfigStore>,
    /// Tells how much space is free for this replica.
    pub(super) free_space: Rc<dyn FreeSpace>,
    /// Raised when the membership state machine has a new timer.
    pub(super) timer_signal: Signal,
    /// Raised when a lease grant may have arrived.
    pub(super) lease_signal: Signal,
    /// Raised when this replica should check whether it may join.
    pub(super) join_signal: Signal,
    /// Raised when the view, the role, the lease or a link changes.
    pub(super) signal: Signal,
    /// Read with [`Self::state`], changed with [`Self::state_mut`].
    pub(super) state: RefCell<ReplicaState>,
}

/// Some nodes of a volume; three at most have a replica.
pub(super) type Nodes = SmallVec<[NodeId; 4]>;

/// The lease connections to a node, besides its session.
pub(super) type LeasePaths = Rc<dyn Fn(NodeId) -> Vec<Link>>;

/// When the latest lease requests of one member arrived.
#[derive(Debug, Default)]
pub(super) struct RecentLeaseRequests {
    /// The incarnation whose clock the stamps are of.
    incarnation: Incarnation,
    latest: [(ClockStamp, Duration); 8],
    count: usize,
}

impl RecentLeaseRequests {
    /// A lease request with this stamp has arrived.
    pub(super) fn record(&mut self, incarnation: Incarnation, stamp: ClockStamp, now: Duration) {
        if self.incarnation != incarnation {
            *self = Self { incarnation, ..Self::default() };
        }
        // The same request arrives over several paths; a late duplicate is not newer.
        if self.latest.iter().any(|(s, _)| *s >= stamp) {
            return;
        }
        self.latest[self.count % 8] = (stamp, now);
        self.count += 1;
    }

    /// Whether a message with `stamp` was sent less than `lease` ago, as far as can be told.
    pub(super) fn is_fresh(&self, stamp: ClockStamp, now: Duration, lease: Duration) -> bool {
        self.latest.iter().any(|(s, arrived_at)| *s == stamp && now < *arrived_at + lease)
    }
}

/// The latest lease messages from and to each node.
#[derive(Debug, Default)]
pub(super) struct LeaseDedup {
    /// The requests that were granted here.
    granted: BTreeMap<NodeId, LeaseRequestKey>,
    /// The grants that have arrived.
    received: BTreeMap<NodeId, LeaseRequestKey>,
}

/// Identifies a lease request: epoch, incarnation of the requester, its clock.
type LeaseRequestKey = (Epoch, Incarnation, ClockStamp);

impl LeaseDedup {
    /// Whether the same message has come over another path: the request was answered on all paths,
    /// or the grant was handled.
    pub(super) fn is_duplicate(&self, from: NodeId, message: &Message) -> bool {
        match *message {
            Message::LeaseRequest { epoch, incarnation, stamp } => {
                self.granted.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            Message::LeaseGrant { epoch, incarnation, stamp } => {
                self.received.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            _ => false,
        }
    }

    /// Notes a message from `node`.
    pub(super) fn note_received(&mut self, node: NodeId, message: &Message) {
        if let Message::LeaseGrant { epoch, incarnation, stamp } = *message {
            self.received.insert(node, (epoch, incarnation, stamp));
        }
    }

    /// Notes a message to `node`.
    pub(super) fn note_sent(&mut self, node: NodeId, message: &Message) {
        if let Message::LeaseGrant { epoch, incarnation, stamp } = *message {
            self.granted.insert(node, (epoch, incarnation, stamp));
        }
    }
}

/// Whether the range is of the metadata blocks.
pub(super) fn is_metadata(range: Blocks) -> bool {
    range.at >= METADATA_LBA
}

impl Replica {
    /// Reads the state. The guard must not be kept while anything else of the replica is called
    /// that may change it.
    pub(super) fn state(&self) -> Ref<'_, ReplicaState> {
        self.state.borrow()
    }

    /// Changes the state. The guard must not be kept while anything else of the replica is called.
    pub(super) fn state_mut(&self) -> RefMut<'_, ReplicaState> {
        self.state.borrow_mut()
    }

    /// The view whose messages are accepted.
    pub(super) fn view(&self) -> View {
        self.state().view
    }

    /// The view that became active last, if it has not ended since.
    pub(super) fn active_view(&self) -> Option<View> {
        self.state().active_view
    }

    /// How long this process has been awake since it started.
    pub(super) fn awake_now(&self) -> Duration {
        self.state().awake_clock
    }

    /// The join attempt in progress.
    pub(super) fn join_attempt(&self) -> Option<JoinAttempt> {
        self.state().join_attempt
    }

    /// When it may ask to join again.
    pub(super) fn join_backoff(&self) -> JoinBackoff {
        self.state().join_backoff
    }

    /// Replaces the state of its join attempts.
    pub(super) fn update_join_backoff(&self, update: impl FnOnce(JoinBackoff) -> JoinBackoff) {
        let state = &mut *self.state_mut();
        state.join_backoff = update(state.join_backoff);
    }

    /// Whether it has been closed.
    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Whether client commands wait while this replica does not serve.
    pub(super) fn holds_commands(&self) -> bool {
        self.state().holds_commands
    }

    /// The bytes of the volume for which the range is marked dirty. Metadata blocks are marked with
    /// the first block of the volume.
    pub(super) fn byte_range(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.leg.dev.info().block_size);
        if is_metadata(range) {
            return 0..block;
        }
        let end = range.at.0.saturating_add(range.count);
        range.at.0.saturating_mul(block)..end.saturating_mul(block)
    }

    /// Length of the range in bytes.
    pub(super) fn byte_len(&self, range: Blocks) -> usize {
        let block = u64::from(self.leg.dev.info().block_size);
        usize::try_from(range.count.saturating_mul(block)).unwrap_or(usize::MAX)
    }

    /// Whether the range lies in the volume or its metadata blocks.
    pub(super) fn contains(&self, range: Blocks) -> bool {
        self.leg.dev.info().contains(range)
    }

    /// The metadata blocks, if there are any.
    pub(super) fn metadata_range(&self) -> Option<Blocks> {
        let blocks = self.leg.dev.info().metadata_blocks;
        (blocks > 0).then(|| Blocks::new(METADATA_LBA, u64::from(blocks)))
    }

    /// The link to `node`, while there is a session.
    pub(super) fn link(&self, node: NodeId) -> Option<Link> {
        self.state().links.get(&node).filter(|link| !link.is_closed()).cloned()
    }

    /// The link to the primary, while there is a session.
    pub(super) fn primary_link(&self) -> Option<Link> {
        self.link(self.primary()?)
    }

    /// The links to those of `nodes` with which there is a session.
    pub(super) fn open_links(
        &self,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> impl Iterator<Item = Link> {
        nodes.into_iter().filter_map(|node| self.link(node))
    }

    /// The other members.
    pub(super) fn others(&self) -> Nodes {
        let state = self.state();
        let member = &state.membership;
        member.config().into_iter().flat_map(|r| r.others(self.me)).map(|m| m.node).collect()
    }

    /// The node of the primary.
    pub(super) fn primary(&self) -> Option<NodeId> {
        self.state().membership.primary()
    }

    /// Whether this is the primary of the present view.
    pub(super) fn is_primary(&self) -> bool {
        self.state().membership.is_primary()
    }

    /// Whether this replica is known not to be a member.
    pub(super) fn is_out_of_sync(&self) -> bool {
        matches!(self.state().membership.role(), Role::OutOfSync | Role::Restarted)
    }

    /// The replicas that are not members.
    pub(super) fn out_of_sync_replicas(&self) -> Vec<NodeId> {
        let state = self.state();
        let member = &state.membership;
        let Some(config) = member.config() else { return Vec::new() };
        let nodes = config.replicas.iter().map(|r| r.node);
        nodes.filter(|node| config.member(*node).is_none()).collect()
    }

    /// The image on `node`.
    pub(super) fn image_of(&self, node: NodeId) -> Option<Uuid> {
        self.state().membership.config().and_then(|r| r.image(node))
    }

    /// Whether writes in the present view wait for `node`.
    pub(super) fn is_required(&self, node: NodeId) -> bool {
        self.others().contains(&node) || self.state().joiners.current(node).is_some()
    }

    /// Largest operation with data, in bytes.
    pub(super) fn max_transfer(&self) -> usize {
        let info = self.leg.dev.info();
        info.max_transfer_blocks as usize * info.block_size as usize
    }

    /// Where regions lie, as messages give them: first byte and length.
    pub(super) fn region_extents(&self, regions: &[Region]) -> Vec<(u64, u64)> {
        let geometry = self.leg.log.geometry();
        let bytes = regions.iter().filter_map(|r| geometry.region_range(*r));
        bytes.map(|b| (b.start, b.end - b.start)).collect()
    }

    /// Those of `regions` that no operation has used since that flush began.
    pub(super) fn retain_quiet(&self, mut regions: Vec<Region>, flush: FlushStamp) -> Vec<Region> {
        regions.retain(|r| self.leg.log.is_quiet_since(*r, flush));
        regions
    }

    /// Guards the regions of a range while an operation uses them.
    pub(super) fn guard_regions(&self, range: Blocks) -> RegionGuard {
        self.leg.log.begin_op(self.byte_range(range))
    }

    /// The clock stamp of the latest lease request that `node` has granted.
    pub(super) fn granted_stamp(&self, node: NodeId) -> ClockStamp {
        self.state().membership.last_granted_stamp(node).unwrap_or_default()
    }

    /// Waits until the primary has granted another lease request, or `view` is over.
    pub(super) async fn wait_lease_renewed(&self, view: View) {
        let granted_stamp = || self.primary().map(|p| self.granted_stamp(p));
        let before = granted_stamp();
        let renewed = self.lease_signal.until(|| (granted_stamp() != before).then_some(()));
        self.signal.unless(|| self.view() != view, renewed).await;
    }

    /// The present view, if this member serves in it now.
    pub(super) fn serving_view(&self) -> Option<View> {
        let view = self.compute_serving_view();
        self.state_mut().was_serving = view.is_some();
        view
    }

    fn compute_serving_view(&self) -> Option<View> {
        let state = self.state();
        let member = &state.membership;
        let view = member.view().filter(|view| *view == self.view() && !self.is_closed())?;
        let has_lease =
            member.may_serve(self.core.now()) || self.settings.has_mistake(Mistake::IgnoresLeases);
        (self.active_view() == Some(view) && has_lease).then_some(view)
    }

    /// Waits until this member serves (RFD 0010, 4.9).
    ///
    /// # Errors
    /// [`Error::Fenced`] if it is out of sync, rejects clients, or after
    /// [`MirrorSettings::hold_timeout`]; [`Error::Aborted`].
    pub(super) async fn wait_serving(&self, ctx: &Ctx) -> Result<View, Error> {
        if let Some(view) = self.serving_view() {
            return Ok(view);
        }
        let check = || {
            if ctx.is_aborted() {
                return Some(Err(Error::Aborted));
            }
            if self.is_closed() || self.leg.is_lost() || self.is_out_of_sync() {
                return Some(Err(Error::Fenced));
            }
            let rejected = || (!self.holds_commands()).then_some(Err(Error::Fenced));
            self.serving_view().map(Ok).or_else(rejected)
        };
        let serving = tokio::time::timeout(self.settings.hold_timeout, self.signal.until(check));
        Box::pin(serving).await.unwrap_or(Err(Error::Fenced))
    }

    /// Whether clients should use another path instead of waiting.
    pub(super) fn rejects_clients(&self) -> bool {
        !self.holds_commands() && self.serving_view().is_none()
    }

    /// Ends the commands of waiting clients. Their writes may still be applied, so the sessions end
    /// too: the next view reconciles those writes, and no client repeats them. An out-of-sync
    /// replica has done so already, and needs its sessions to join.
    pub(super) fn reject_clients(&self) {
        if self.serving_view().is_none() {
            self.close_sessions();
        }
    }

    fn close_sessions(&self) {
        if !self.is_out_of_sync() {
            self.state().links.values().for_each(Link::close);
            self.local_writes.fence();
            self.state_mut().sequencer.abandon_writes();
            self.signal.raise();
        }
    }

    /// A write that holds a range was abandoned in `view` because clients were rejected. If the
    /// lease came back at once, the view would go on and the range would stay locked; so the
    /// sessions end all the same.
    pub(super) fn abandon_view(&self, view: View) {
        if self.view() == view {
            self.close_sessions();
        }
    }

    /// Notes that a request was sent to the store.
    pub(super) fn note_store_request(&self) {
        self.state_mut().store_silent_since.get_or_insert(self.core.now());
    }

    /// Waits for `wait`; `None` if `view` ends first.
    pub(super) async fn while_in_view<T>(
        &self,
        view: View,
        wait: impl Future<Output = T>,
    ) -> Option<T> {
        self.signal.unless(|| self.view() != view, wait).await
    }

    /// A context with memory for `bytes` beyond what the leg needs for an operation.
    pub(super) async fn reserve_memory(
        &self,
        bytes: usize,
        class: MemoryClass,
    ) -> Result<Ctx, Error> {
        let bytes = bytes.saturating_add(self.leg.dev.info().overhead_bytes as usize).max(1);
        let credit = self.account.credit(bytes, class).await.map_err(|_| Error::OutOfRange)?;
        Ok(Ctx::new(credit, self.view().epoch))
    }

    /// Waits for `time`, or until the replica is closed.
    pub(super) async fn sleep(&self, time: Duration) {
        self.signal.unless(|| self.is_closed(), tokio::time::sleep(time)).await;
    }

    /// Polls `task` once; spawns the rest if it is not complete.
    pub(super) fn spawn_eager(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        let mut task = Box::pin(task);
        // No waker is needed: the spawned task polls it again first.
        if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            tokio::task::spawn_local(task);
        }
    }

    /// Spawns `task`.
    pub(super) fn spawn(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        tokio::task::spawn_local(task);
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica")
            .field("me", &self.me)
            .field("view", &self.view())
            .field("opened", &self.active_view())
            .field("entries", &self.state().prepared.sorted_entries())
            .field("own", &self.local_writes)
            .field("order", &self.state().sequencer)
            .field("requests", &self.peer_requests)
            .field("joiners", &self.state().joiners)
            .field("joining", &self.join_attempt())
            .field("ranges", &self.range_locks.len())
            .finish_non_exhaustive()
    }
}
