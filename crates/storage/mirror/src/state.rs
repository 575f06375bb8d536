//! What a replica knows and has decided: plain data, without tasks, wakers or input and output.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use block::Error;
use peer::{DataGeneration, Incarnation, Link, NodeId, View};

use super::bitmap_clearing::PendingClear;
use super::join::{InheritedGenerations, JoinAttempt, JoinBackoff};
use super::joiners::Joiners;
use super::membership::MirrorMembership;
use super::prepared_list::PreparedList;
use super::reachability::{LastHeard, UnreachablePairs};
use super::replica::{LeaseDedup, LeasePaths, RecentLeaseRequests};
use super::sequencer::Sequencer;
use super::view_change::{CollectedEntries, StartView};

/// The state of one replica. Only [`Replica`](super::replica::Replica) has it, in one cell that is
/// never borrowed across an `await`.
pub(super) struct ReplicaState {
    pub(super) membership: MirrorMembership,
    pub(super) links: BTreeMap<NodeId, Link>,
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
    /// The lease connections.
    pub(super) lease_paths: Option<LeasePaths>,
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
    pub(super) fn new(membership: MirrorMembership) -> Self {
        Self {
            membership,
            links: Default::default(),
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
            lease_paths: Default::default(),
            last_heard: Default::default(),
            unlinked_since: Default::default(),
            unreachable_pairs: Default::default(),
            reported_dirty: Default::default(),
            last_generation: Default::default(),
            pending_clear: Default::default(),
            no_space_at: Default::default(),
            free_space_checked_at: Default::default(),
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
}
