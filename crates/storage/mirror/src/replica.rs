//! One replica of a mirrored volume: what all parts of the mirror on this node share.

use std::cell::{Ref, RefCell, RefMut};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use block::{Account, Blocks, Ctx, Error, METADATA_LBA, MemoryClass, MetadataObserver, RangeLocks};
use intent_log::{FlushStamp, Region};
use peer::{ClockStamp, Link, NodeId, View};
use rt::Core;
use rt::fault_point;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::MirrorSettings;
use super::config::DynConfigStore;
use super::free_space::FreeSpace;
use super::leg::Leg;
use super::peer_requests::PeerRequests;
use super::sessions::Sessions;
use super::signal::Signal;
use super::state::effects::{Effect, Effects, Wakes};
use super::state::join::JoinAttempt;
use super::state::join_backoff::JoinBackoff;
use super::state::{Nodes, ReplicaState};

/// One replica on its core. The parts of the mirror are methods of this, one file each.
pub(super) struct Replica {
    pub(super) me: NodeId,
    pub(super) core: Core,
    pub(super) settings: MirrorSettings,
    pub(super) account: Account,
    pub(super) leg: Rc<Leg>,
    /// Is told of changes of the metadata blocks.
    pub(super) metadata_observer: Rc<dyn MetadataObserver>,
    /// Those of the state.
    pub(super) range_locks: Rc<RangeLocks>,
    pub(super) sessions: Sessions,
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
    pub(super) effects: RefCell<Effects>,
    /// Read with [`Self::state`], changed with [`Self::step`].
    pub(super) state: RefCell<ReplicaState>,
}

impl Replica {
    /// Reads the state. The guard must not be kept while anything else of the replica is called
    /// that may change it.
    pub(super) fn state(&self) -> Ref<'_, ReplicaState> {
        self.state.borrow()
    }

    /// Changes what decides nothing. The guard must not be kept while anything else of the replica
    /// is called.
    pub(super) fn state_mut(&self) -> RefMut<'_, ReplicaState> {
        self.state.borrow_mut()
    }

    /// Makes a step: changes the state, and carries out the effects of that. A step that is made
    /// while effects are carried out adds its own behind them.
    pub(super) fn step<T>(
        self: &Rc<Self>,
        change: impl FnOnce(&mut ReplicaState, &mut Effects) -> T,
    ) -> T {
        let now = self.core.now();
        let (result, wakes, runs) = {
            let (state, effects) = (&mut *self.state_mut(), &mut *self.effects.borrow_mut());
            state.now = now;
            let result = change(state, effects);
            (result, effects.take_wakes(), effects.begin())
        };
        self.wake(wakes);
        if runs {
            self.carry_out_effects();
        }
        result
    }

    /// Carries out the queue, which is not borrowed while an effect is carried out.
    fn carry_out_effects(self: &Rc<Self>) {
        loop {
            let next = self.effects.borrow_mut().next();
            let Some(effect) = next else { return };
            self.carry_out(effect);
        }
    }

    fn wake(&self, wakes: Wakes) {
        for (is_due, signal) in [
            (wakes.timer, &self.timer_signal),
            (wakes.lease, &self.lease_signal),
            (wakes.changed, &self.signal),
            (wakes.join, &self.join_signal),
        ] {
            if is_due {
                signal.raise();
            }
        }
    }

    fn carry_out(self: &Rc<Self>, effect: Effect) {
        match effect {
            Effect::Send(node, message) => self.sessions.send(node, message),
            Effect::SendLease(node, message) => self.sessions.send_lease(node, message),
            Effect::CloseSessions => self.sessions.close_all(),
            Effect::Apply(apply) => self.spawn_eager(Rc::clone(self).apply_prepared(apply)),
            Effect::Replace(apply) => self.spawn_eager(Rc::clone(self).apply_replacement(apply)),
            Effect::ReadConfig => self.spawn(Rc::clone(self).read_config()),
            Effect::PutConfig(put) => self.spawn(Rc::clone(self).put_config(put)),
            Effect::PrepareView(view, config) => {
                self.spawn(Rc::clone(self).prepare_view(view, config));
            }
            Effect::Reconcile(view) => self.spawn(Rc::clone(self).run_reconciliation(view)),
            Effect::SendCommitsLater(view) => {
                self.spawn(Rc::clone(self).send_commits_later(view));
            }
            Effect::Reach(point) => fault_point::reach(point),
            Effect::ReachWhenSent(point) => fault_point::reach_when_sent(point),
        }
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

    /// Whether it has been closed.
    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Whether client commands wait while this replica does not serve.
    pub(super) fn holds_commands(&self) -> bool {
        self.state().holds_commands
    }

    /// The bytes of the volume for which the range is marked dirty.
    pub(super) fn byte_range(&self, range: Blocks) -> Range<u64> {
        self.state().byte_range(range)
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
        self.sessions.link(node)
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
        self.state().others()
    }

    /// The node of the primary.
    pub(super) fn primary(&self) -> Option<NodeId> {
        self.state().primary()
    }

    /// Whether this is the primary of the present view.
    pub(super) fn is_primary(&self) -> bool {
        self.state().is_primary()
    }

    /// Whether this replica is known not to be a member.
    pub(super) fn is_out_of_sync(&self) -> bool {
        self.state().is_out_of_sync()
    }

    /// The image on `node`.
    pub(super) fn image_of(&self, node: NodeId) -> Option<Uuid> {
        self.state().image_of(node)
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
        let now = self.core.now();
        let state = &mut *self.state_mut();
        state.now = now;
        state.serving_view()
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
            if self.is_closed() || self.is_leg_lost() || self.is_out_of_sync() {
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

    /// Whether work begun in `view` cannot complete in it any more, or no client waits for it.
    pub(super) fn is_view_over(&self, view: View) -> bool {
        self.view() != view || self.rejects_clients()
    }

    /// Whether the leg was given up.
    pub(super) fn is_leg_lost(&self) -> bool {
        self.state().leg_loss.is_some()
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
            .field("own", &self.state().local_writes)
            .field("order", &self.state().sequencer)
            .field("requests", &self.peer_requests)
            .field("joiners", &self.state().joiners)
            .field("joining", &self.join_attempt())
            .field("ranges", &self.range_locks.len())
            .finish_non_exhaustive()
    }
}
