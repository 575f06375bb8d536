//! One replica of a mirrored volume: what all parts of the mirror on this node share.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
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
use peer::{ClockStamp, DataGeneration, Incarnation, Link, Message, NodeId, Role, View};
use rt::Core;
use smallvec::SmallVec;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::bitmap_clearing::PendingClear;
use super::join::{InheritedGenerations, JoinAttempt, JoinBackoff};
use super::joiners::Joiners;
use super::leg::Leg;
use super::local_writes::LocalWrites;
use super::membership::MirrorMembership;
use super::membership_driver::DynConfigStore;
use super::no_space::FreeSpace;
use super::peer_requests::PeerRequests;
use super::prepared_list::PreparedList;
use super::reachability::{LastHeard, UnreachablePairs};
use super::sequencer::Sequencer;
use super::signal::Signal;
use super::view_change::{CollectedEntries, StartView};
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
    pub(super) membership: RefCell<MirrorMembership>,
    pub(super) links: RefCell<BTreeMap<NodeId, Link>>,
    /// The view whose messages are accepted; set as soon as the membership enters it.
    pub(super) view: Cell<View>,
    pub(super) prepared: RefCell<PreparedList>,
    pub(super) local_writes: Rc<LocalWrites>,
    pub(super) sequencer: RefCell<Sequencer>,
    pub(super) collected_entries: RefCell<CollectedEntries>,
    pub(super) joiners: RefCell<Joiners>,
    pub(super) peer_requests: PeerRequests,
    /// By member: when its latest lease requests arrived, and their clock stamps.
    pub(super) lease_requests: RefCell<BTreeMap<NodeId, RecentLeaseRequests>>,
    /// The view that became active last, if it has not ended since.
    pub(super) active_view: Cell<Option<View>>,
    /// The progress of the present view change, until the view is active.
    pub(super) start_view: RefCell<Option<StartView>>,
    /// The join attempt in progress.
    pub(super) join_attempt: Cell<Option<JoinAttempt>>,
    /// The last accepted join attempt, and the generations that the primary had recorded with other
    /// images.
    pub(super) inherited_generations: RefCell<Option<InheritedGenerations>>,
    /// Permits to resync, shared by the primaries of a node.
    pub(super) resync_permits: Arc<Semaphore>,
    pub(super) config_store: Box<dyn DynConfigStore>,
    /// Tells how much space is free for this replica.
    pub(super) free_space: Rc<dyn FreeSpace>,
    /// When the leg last had no space for a write, by the awake clock.
    pub(super) no_space_at: Cell<Option<Duration>>,
    /// When free space was last checked, by the awake clock.
    pub(super) free_space_checked_at: Cell<Duration>,
    /// Raised when the membership state machine has a new timer.
    pub(super) timer_signal: Signal,
    /// Raised when a lease grant may have arrived.
    pub(super) lease_signal: Signal,
    /// The latest lease messages: they come over several paths, and are handled once.
    pub(super) lease_dedup: RefCell<LeaseDedup>,
    /// Whether it served at the last check.
    pub(super) was_serving: Cell<bool>,
    /// Raised when this replica should check whether it may join.
    pub(super) join_signal: Signal,
    pub(super) join_wanted: Cell<bool>,
    /// When it may ask to join again.
    pub(super) join_backoff: Cell<JoinBackoff>,
    /// How long this process has been awake since it started, in large steps. Timeouts for hung
    /// operations use it.
    pub(super) awake_clock: Cell<Duration>,
    /// When the present view began here, by the awake clock.
    pub(super) view_began_at: Cell<Duration>,
    /// By node: since when, by the awake clock, there has been no session with it.
    pub(super) unlinked_since: RefCell<BTreeMap<NodeId, Duration>>,
    /// What was last heard of each other replica.
    pub(super) last_heard: RefCell<BTreeMap<NodeId, LastHeard>>,
    /// At the primary: pairs of members that do not reach each other.
    pub(super) unreachable_pairs: RefCell<UnreachablePairs>,
    /// At the primary: what other members have marked dirty, as byte ranges.
    pub(super) reported_dirty: RefCell<Vec<(u64, u64)>>,
    /// The last data generation that this primary has had recorded.
    pub(super) last_generation: Cell<DataGeneration>,
    /// The regions to be cleared here with the next generation.
    pub(super) pending_clear: RefCell<Option<PendingClear>>,
    /// Replicas whose join is refused, because their copies are newer than this one.
    pub(super) newer_joiners: RefCell<BTreeSet<NodeId>>,
    /// Counts the puts of configurations that were sent.
    pub(super) put_count: Cell<u64>,
    /// The latest join attempt of each out-of-sync replica.
    pub(super) join_requests: RefCell<BTreeMap<NodeId, Incarnation>>,
    /// The lease connections.
    pub(super) lease_paths: RefCell<Option<LeasePaths>>,
    /// Whether client commands wait while this replica does not serve.
    pub(super) holds_commands: Cell<bool>,
    /// Whether it asks to be resynced while it is out of sync.
    pub(super) join_allowed: Cell<bool>,
    /// When it last read the store because it did not serve, by the awake clock.
    pub(super) config_polled_at: Cell<Duration>,
    /// Counts the requests to leave that were declined.
    pub(super) declined_leaves: Cell<u64>,
    /// When the oldest unanswered request to the store was sent.
    pub(super) store_silent_since: Cell<Option<Duration>>,
    pub(super) is_closed: Cell<bool>,
    /// The last error of the leg since a view was active here.
    pub(super) leg_error: Cell<Option<Error>>,
    /// Raised when the view, the role, the lease or a link changes.
    pub(super) signal: Signal,
}

/// Some nodes of a volume; three at most have a replica.
pub(super) type Nodes = SmallVec<[NodeId; 4]>;

/// The lease connections to a node, besides its session.
pub(super) type LeasePaths = Box<dyn Fn(NodeId) -> Vec<Link>>;

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
        self.links.borrow().get(&node).filter(|link| !link.is_closed()).cloned()
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
        let member = self.membership.borrow();
        member.config().into_iter().flat_map(|r| r.others(self.me)).map(|m| m.node).collect()
    }

    /// The node of the primary.
    pub(super) fn primary(&self) -> Option<NodeId> {
        self.membership.borrow().primary()
    }

    /// Whether this is the primary of the present view.
    pub(super) fn is_primary(&self) -> bool {
        self.membership.borrow().is_primary()
    }

    /// Whether this replica is known not to be a member.
    pub(super) fn is_out_of_sync(&self) -> bool {
        matches!(self.membership.borrow().role(), Role::OutOfSync | Role::Restarted)
    }

    /// The replicas that are not members.
    pub(super) fn out_of_sync_replicas(&self) -> Vec<NodeId> {
        let member = self.membership.borrow();
        let Some(config) = member.config() else { return Vec::new() };
        let nodes = config.replicas.iter().map(|r| r.node);
        nodes.filter(|node| config.member(*node).is_none()).collect()
    }

    /// The image on `node`.
    pub(super) fn image_of(&self, node: NodeId) -> Option<Uuid> {
        self.membership.borrow().config().and_then(|r| r.image(node))
    }

    /// Whether writes in the present view wait for `node`.
    pub(super) fn is_required(&self, node: NodeId) -> bool {
        self.others().contains(&node) || self.joiners.borrow().current(node).is_some()
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
        self.membership.borrow().last_granted_stamp(node).unwrap_or_default()
    }

    /// Waits until the primary has granted another lease request, or `view` is over.
    pub(super) async fn wait_lease_renewed(&self, view: View) {
        let granted_stamp = || self.primary().map(|p| self.granted_stamp(p));
        let before = granted_stamp();
        let renewed = self.lease_signal.until(|| (granted_stamp() != before).then_some(()));
        self.signal.unless(|| self.view.get() != view, renewed).await;
    }

    /// The present view, if this member serves in it now.
    pub(super) fn serving_view(&self) -> Option<View> {
        let view = self.compute_serving_view();
        self.was_serving.set(view.is_some());
        view
    }

    fn compute_serving_view(&self) -> Option<View> {
        let member = self.membership.borrow();
        let view =
            member.view().filter(|view| *view == self.view.get() && !self.is_closed.get())?;
        let has_lease =
            member.may_serve(self.core.now()) || self.settings.has_mistake(Mistake::IgnoresLeases);
        (self.active_view.get() == Some(view) && has_lease).then_some(view)
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
            if self.is_closed.get() || self.leg.is_lost() || self.is_out_of_sync() {
                return Some(Err(Error::Fenced));
            }
            let rejected = || (!self.holds_commands.get()).then_some(Err(Error::Fenced));
            self.serving_view().map(Ok).or_else(rejected)
        };
        let serving = tokio::time::timeout(self.settings.hold_timeout, self.signal.until(check));
        Box::pin(serving).await.unwrap_or(Err(Error::Fenced))
    }

    /// Whether clients should use another path instead of waiting.
    pub(super) fn rejects_clients(&self) -> bool {
        !self.holds_commands.get() && self.serving_view().is_none()
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
            self.links.borrow().values().for_each(Link::close);
            self.local_writes.fence();
            self.sequencer.borrow_mut().abandon_writes();
            self.signal.raise();
        }
    }

    /// A write that holds a range was abandoned in `view` because clients were rejected. If the
    /// lease came back at once, the view would go on and the range would stay locked; so the
    /// sessions end all the same.
    pub(super) fn abandon_view(&self, view: View) {
        if self.view.get() == view {
            self.close_sessions();
        }
    }

    /// Notes that a request was sent to the store.
    pub(super) fn note_store_request(&self) {
        self.store_silent_since.set(self.store_silent_since.get().or(Some(self.core.now())));
    }

    /// Waits for `wait`; `None` if `view` ends first.
    pub(super) async fn while_in_view<T>(
        &self,
        view: View,
        wait: impl Future<Output = T>,
    ) -> Option<T> {
        self.signal.unless(|| self.view.get() != view, wait).await
    }

    /// A context with memory for `bytes` beyond what the leg needs for an operation.
    pub(super) async fn reserve_memory(
        &self,
        bytes: usize,
        class: MemoryClass,
    ) -> Result<Ctx, Error> {
        let bytes = bytes.saturating_add(self.leg.dev.info().overhead_bytes as usize).max(1);
        let credit = self.account.credit(bytes, class).await.map_err(|_| Error::OutOfRange)?;
        Ok(Ctx::new(credit, self.view.get().epoch))
    }

    /// Waits for `time`, or until the replica is closed.
    pub(super) async fn sleep(&self, time: Duration) {
        self.signal.unless(|| self.is_closed.get(), tokio::time::sleep(time)).await;
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
            .field("view", &self.view.get())
            .field("opened", &self.active_view.get())
            .field("entries", &self.prepared.borrow().sorted_entries())
            .field("own", &self.local_writes)
            .field("order", &self.sequencer.borrow())
            .field("requests", &self.peer_requests)
            .field("joiners", &self.joiners.borrow())
            .field("joining", &self.join_attempt.get())
            .field("ranges", &self.range_locks.len())
            .finish_non_exhaustive()
    }
}
