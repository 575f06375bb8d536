//! What a replica knows and has decided, and every decision it takes: plain data and plain methods,
//! without tasks, input or output.
//!
//! A step is one call of a method that takes [`Effects`]: something has happened, the state
//! changes, and what the driver has to do about it is added to the effects.
//! [`Replica::step`](super::replica::Replica::step) makes a step and carries out its effects, in
//! order. Wakers and locks are values in here: waking a task decides nothing.
//!
//! * `write`: order, acknowledgement, commit and rejection of writes (RFD 0010, 4.2; RFD 0040);
//! * `view`: beginning and activation of views (5.7);
//! * `actions`: the actions of the membership, errors of the leg, joiners;
//! * `join`: the attempts of this replica to join;
//! * `reachability`: members that are alive but not reachable (4.8);
//! * `clearing`: which dirty bits may be cleared, and the data generations for that (6.3).

mod actions;
pub(super) mod clearing;
pub(super) mod effects;
#[cfg(test)]
mod fork;
pub(super) mod join;
pub(super) mod join_backoff;
pub(super) mod joiners;
pub(super) mod lease_messages;
pub(super) mod local_writes;
pub(super) mod prepared_list;
pub(super) mod reachability;
pub(super) mod sequencer;
mod view;
pub(super) mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Error, Info, METADATA_LBA, RangeLocks};
use intent_log::RegionGuard;
use peer::{DataGeneration, Incarnation, NodeId, Role, View};
use smallvec::SmallVec;
use uuid::Uuid;

use super::membership::{MirrorMembership, RecordedGenerations};
use super::{LegLoss, MirrorSettings, Mistake};
use clearing::PendingClear;
use join::{InheritedGenerations, JoinAttempt};
use join_backoff::JoinBackoff;
use joiners::Joiners;
use lease_messages::{LeaseDedup, RecentLeaseRequests};
use local_writes::LocalWrites;
use prepared_list::PreparedList;
use reachability::{LastHeard, UnreachablePairs};
use sequencer::Sequencer;
use view::{CollectedEntries, StartView};

/// Some nodes of a volume; three at most have a replica.
pub(super) type Nodes = SmallVec<[NodeId; 4]>;

/// Whether the range is of the metadata blocks.
pub(super) fn is_metadata(range: Blocks) -> bool {
    range.at >= METADATA_LBA
}

/// What the state asks of the image of its replica. Every answer is in memory.
pub(super) trait ReplicaImage: fmt::Debug {
    /// The properties of the device.
    fn info(&self) -> Info;
    /// The data generations that the image has recorded.
    fn recorded_generations(&self) -> RecordedGenerations;
    /// Keeps the regions of `bytes` in use until the guard is dropped.
    fn guard_regions(&self, bytes: Range<u64>) -> Option<RegionGuard>;
    /// A view has begun: the flushes of earlier primaries are named no more.
    fn forget_flushes(&self);
}

/// The state of one replica. Only [`Replica`](super::replica::Replica) has it, in one cell that is
/// never borrowed across an `await`.
pub(super) struct ReplicaState {
    pub(super) me: NodeId,
    settings: MirrorSettings,
    image: Rc<dyn ReplicaImage>,
    /// Locks on ranges of the leg (the second table of RFD 0010, 4.1). At the primary their order
    /// is the order of all writes.
    pub(super) range_locks: Rc<RangeLocks>,
    /// The time of this step.
    pub(super) now: Duration,
    pub(super) membership: MirrorMembership,
    pub(super) local_writes: LocalWrites,
    /// The view whose messages are accepted; set as soon as the membership enters it.
    pub(super) view: View,
    /// When the present view began here, by the awake clock.
    pub(super) view_began_at: Duration,
    /// The view that became active last, if it has not ended since.
    pub(super) active_view: Option<View>,
    /// The progress of the present view change, until the view is active.
    pub(super) start_view: Option<StartView>,
    pub(super) collected_entries: CollectedEntries,
    pub(super) prepared: PreparedList,
    pub(super) sequencer: Sequencer,
    pub(super) joiners: Joiners,
    /// The latest join attempt of each out-of-sync replica.
    pub(super) join_requests: BTreeMap<NodeId, Incarnation>,
    /// Replicas whose join is refused, because their copies are newer than this one.
    pub(super) newer_joiners: BTreeSet<NodeId>,
    /// The join attempt in progress.
    pub(super) join_attempt: Option<JoinAttempt>,
    pub(super) join_wanted: bool,
    /// Whether it asks to be resynced while it is out of sync.
    pub(super) join_allowed: bool,
    /// When it may ask to join again.
    pub(super) join_backoff: JoinBackoff,
    /// The last accepted join attempt, and the generations that the primary had recorded with other
    /// images.
    pub(super) inherited_generations: Option<InheritedGenerations>,
    /// By member: when its latest lease requests arrived, and their clock stamps.
    pub(super) lease_requests: BTreeMap<NodeId, RecentLeaseRequests>,
    /// The latest lease messages: they come over several paths, and are handled once.
    pub(super) lease_dedup: LeaseDedup,
    /// What was last heard of each other replica.
    pub(super) last_heard: BTreeMap<NodeId, LastHeard>,
    /// By node: since when, by the awake clock, there has been no session with it.
    pub(super) unlinked_since: BTreeMap<NodeId, Duration>,
    /// At the primary: pairs of members that do not reach each other.
    pub(super) unreachable_pairs: UnreachablePairs,
    /// At the primary: what other members have marked dirty, as byte ranges.
    pub(super) reported_dirty: Vec<(u64, u64)>,
    /// The last data generation that this primary has had recorded.
    pub(super) last_generation: DataGeneration,
    /// The regions to be cleared here with the next generation.
    pub(super) pending_clear: Option<PendingClear>,
    /// When the leg last had no space for a write, by the awake clock.
    pub(super) no_space_at: Option<Duration>,
    /// When free space was last checked, by the awake clock.
    pub(super) free_space_checked_at: Duration,
    /// Why the leg was given up, if it was.
    pub(super) leg_loss: Option<LegLoss>,
    /// The last error of the leg since a view was active here.
    pub(super) leg_error: Option<Error>,
    /// Whether it served at the last check.
    pub(super) was_serving: bool,
    /// Whether client commands wait while this replica does not serve.
    pub(super) holds_commands: bool,
    pub(super) is_closed: bool,
    /// How long this process has been awake since it started, in large steps. Timeouts for hung
    /// operations use it.
    pub(super) awake_clock: Duration,
    /// When it last read the store because it did not serve, by the awake clock.
    pub(super) config_polled_at: Duration,
    /// Counts the puts of configurations that were sent.
    pub(super) put_count: u64,
    /// When the oldest unanswered request to the store was sent.
    pub(super) store_silent_since: Option<Duration>,
    /// Counts the requests to leave that were declined.
    pub(super) declined_leaves: u64,
}

impl ReplicaState {
    /// The state of a replica whose image has just been opened.
    pub(super) fn new(
        me: NodeId,
        settings: MirrorSettings,
        image: Rc<dyn ReplicaImage>,
        membership: MirrorMembership,
        local_writes: LocalWrites,
    ) -> Self {
        Self {
            me,
            settings,
            image,
            range_locks: Rc::default(),
            now: Duration::ZERO,
            membership,
            local_writes,
            view: Default::default(),
            view_began_at: Default::default(),
            active_view: Default::default(),
            start_view: Default::default(),
            collected_entries: Default::default(),
            prepared: Default::default(),
            sequencer: Default::default(),
            joiners: Default::default(),
            join_requests: Default::default(),
            newer_joiners: Default::default(),
            join_attempt: Default::default(),
            join_wanted: false,
            join_allowed: true,
            join_backoff: Default::default(),
            inherited_generations: Default::default(),
            lease_requests: Default::default(),
            lease_dedup: Default::default(),
            last_heard: Default::default(),
            unlinked_since: Default::default(),
            unreachable_pairs: Default::default(),
            reported_dirty: Default::default(),
            last_generation: Default::default(),
            pending_clear: Default::default(),
            no_space_at: Default::default(),
            free_space_checked_at: Default::default(),
            leg_loss: Default::default(),
            leg_error: Default::default(),
            was_serving: false,
            holds_commands: true,
            is_closed: false,
            awake_clock: Default::default(),
            config_polled_at: Default::default(),
            put_count: Default::default(),
            store_silent_since: Default::default(),
            declined_leaves: Default::default(),
        }
    }
    /// Whether this mistake is to be made; never outside tests.
    fn has_mistake(&self, mistake: Mistake) -> bool {
        self.settings.has_mistake(mistake)
    }

    /// The other members.
    pub(super) fn others(&self) -> Nodes {
        let config = self.membership.config();
        config.into_iter().flat_map(|r| r.others(self.me)).map(|m| m.node).collect()
    }

    /// The other nodes that apply what this primary orders.
    pub(super) fn write_targets(&self) -> Nodes {
        let mut nodes = self.others();
        nodes.extend(self.joiners.attached());
        nodes
    }

    /// The node of the primary.
    pub(super) fn primary(&self) -> Option<NodeId> {
        self.membership.primary()
    }

    /// Whether this is the primary of the present view.
    pub(super) fn is_primary(&self) -> bool {
        self.membership.is_primary()
    }

    /// Whether this replica is known not to be a member.
    pub(super) fn is_out_of_sync(&self) -> bool {
        matches!(self.membership.role(), Role::OutOfSync | Role::Restarted)
    }

    /// The replicas that are not members.
    pub(super) fn out_of_sync_replicas(&self) -> Vec<NodeId> {
        let Some(config) = self.membership.config() else { return Vec::new() };
        let nodes = config.replicas.iter().map(|r| r.node);
        nodes.filter(|node| config.member(*node).is_none()).collect()
    }

    /// The image on `node`.
    pub(super) fn image_of(&self, node: NodeId) -> Option<Uuid> {
        self.membership.config().and_then(|r| r.image(node))
    }

    /// Whether writes in the present view wait for `node`.
    pub(super) fn is_required(&self, node: NodeId) -> bool {
        self.others().contains(&node) || self.joiners.current(node).is_some()
    }

    /// The present view, if this member serves in it now. Notes whether it does.
    pub(super) fn serving_view(&mut self) -> Option<View> {
        let is_serving = || {
            let view = self.membership.view()?;
            let has_lease =
                self.membership.may_serve(self.now) || self.has_mistake(Mistake::IgnoresLeases);
            let is_present = view == self.view && self.active_view == Some(view);
            (is_present && !self.is_closed && has_lease).then_some(view)
        };
        let view = is_serving();
        self.was_serving = view.is_some();
        view
    }

    /// The bytes of the volume for which the range is marked dirty. Metadata blocks are marked with
    /// the first block of the volume.
    pub(super) fn byte_range(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.image.info().block_size);
        if is_metadata(range) {
            return 0..block;
        }
        let end = range.at.0.saturating_add(range.count);
        range.at.0.saturating_mul(block)..end.saturating_mul(block)
    }

    /// Whether the range lies in the volume or its metadata blocks.
    pub(super) fn contains(&self, range: Blocks) -> bool {
        self.image.info().contains(range)
    }

    /// Keeps the regions of a range in use while an operation uses them.
    fn guard_regions(&self, range: Blocks) -> Option<RegionGuard> {
        self.image.guard_regions(self.byte_range(range))
    }
}
