//! Paths to a namespace: their state, and how one is chosen for a command.

use std::cell::Cell;
use std::rc::Rc;

use ::nvme::Sqe;
use ::nvme::entry::NvmOpcode;
use ::nvme::log::AnaState;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::warn;

use super::active_association::ActiveAssociation;
use super::controller::Controller;
use super::identity::{NamespaceDescription, PathIdentity};

/// Dword 12 of writes: force unit access.
pub(super) const FUA: u32 = 1 << 30;

/// How a command chooses among equally good paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathPolicy {
    /// A path to a controller on this machine, if there is one; of several, the one with the fewest
    /// commands in flight.
    #[default]
    LocalFirst,
    /// The path with the fewest commands in flight.
    QueueDepth,
    /// Paths take turns.
    RoundRobin,
}

/// A path to the namespace through one controller.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) controller: Controller,
    identity: Cell<PathIdentity>,
    /// The controller generation at which `identity` was verified.
    identity_generation: Cell<u64>,
    /// Its ANA group.
    group: Cell<u32>,
    /// Its controller has a volatile cache that the namespace's user does not know of: writes are
    /// sent with FUA.
    force_fua: Cell<bool>,
    in_flight: Cell<usize>,
    /// Until when it is avoided, after a path-related refusal.
    avoid_until: Cell<Option<Instant>>,
    /// Counts the writes completed on this path, and those of them that a flush has covered.
    writes_completed: Cell<u64>,
    writes_flushed: Cell<u64>,
    /// Requests a new verification.
    pub(super) recheck: Notify,
}

/// A path counted as carrying a command.
#[derive(Debug)]
pub(super) struct AcquiredPath {
    pub(super) path: Rc<Path>,
    pub(super) live: Rc<ActiveAssociation>,
}

impl AcquiredPath {
    /// Whether it still leads to the volume; a command sent now without awaiting goes there.
    pub(super) fn is_valid(&self) -> bool {
        self.path.identity() == PathIdentity::Same && self.live.is_up()
    }
}

impl Drop for AcquiredPath {
    fn drop(&mut self) {
        self.path.in_flight.set(self.path.in_flight.get() - 1);
    }
}

/// State of a path, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PathState {
    Optimized,
    NonOptimized,
    /// The controller reported that it does not serve the namespace, or just refused to. As this
    /// may be outdated, it is retried occasionally when there is no better path.
    Inaccessible,
}

/// A path with what its choice depends on.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    index: usize,
    state: PathState,
    is_local: bool,
    in_flight: usize,
}

impl Path {
    pub(super) fn new(controller: Controller) -> Self {
        Self {
            controller,
            identity: Cell::new(PathIdentity::Unknown),
            identity_generation: Cell::new(0),
            group: Cell::new(0),
            force_fua: Cell::new(false),
            in_flight: Cell::new(0),
            avoid_until: Cell::new(None),
            writes_completed: Cell::new(0),
            writes_flushed: Cell::new(0),
            recheck: Notify::new(),
        }
    }

    /// The verification result, if still valid.
    pub(super) fn identity(&self) -> PathIdentity {
        match self.identity.get() {
            PathIdentity::Same
                if self.identity_generation.get() != self.controller.generation() =>
            {
                PathIdentity::Unknown
            }
            seen => seen,
        }
    }

    /// Records the result of a verification that began at `generation`.
    pub(super) fn record_identity(
        &self,
        now: Option<&NamespaceDescription>,
        wanted: &NamespaceDescription,
        generation: u64,
    ) {
        let seen = now.map_or(PathIdentity::Unavailable("the namespace does not exist"), |now| {
            wanted.match_volume(now)
        });
        if let Some(now) = now {
            self.group.set(now.ana_group);
            self.force_fua.set(now.info.volatile_cache && !wanted.info.volatile_cache);
        }
        if let (PathIdentity::Different(why) | PathIdentity::Unavailable(why), true) =
            (seen, self.identity.get() != seen)
        {
            warn!("{:?} is not a path: {why}", self.controller);
        }
        self.identity.set(seen);
        self.identity_generation.set(generation);
    }

    /// Whether it is known not to lead to the volume.
    pub(super) fn is_unusable(&self) -> bool {
        self.controller.is_closed()
            || self.is_verified() && matches!(self.identity.get(), PathIdentity::Different(_))
    }

    /// Whether the last verification found another volume.
    pub(super) fn is_different(&self) -> bool {
        matches!(self.identity.get(), PathIdentity::Different(_))
    }

    /// Whether it was verified since its last change.
    pub(super) fn is_verified(&self) -> bool {
        self.identity.get() != PathIdentity::Unknown
            && self.identity_generation.get() == self.controller.generation()
    }

    /// Whether it may become usable without notification.
    pub(super) fn is_unavailable(&self) -> bool {
        matches!(self.identity.get(), PathIdentity::Unavailable(_))
    }

    /// Requires a verification before it is used again.
    pub(super) fn mark_unverified(&self) {
        self.identity.set(PathIdentity::Unknown);
        self.recheck.notify_one();
    }

    /// The command as this path has to send it.
    pub(super) fn with_fua(&self, mut sqe: Sqe) -> Sqe {
        let writes = [NvmOpcode::Write.0, NvmOpcode::WriteZeroes.0].contains(&sqe.opcode);
        if writes && self.force_fua.get() {
            sqe.cdw10[2] = (sqe.cdw10[2].get() | FUA).into();
        }
        sqe
    }

    /// Records a path-related refusal: other paths are preferred until `then`.
    pub(super) fn set_avoid_until(&self, then: Instant) {
        self.avoid_until.set(Some(then));
    }

    /// Records the completion of a write that is not durable yet.
    pub(super) fn record_write(&self) {
        self.writes_completed.set(self.writes_completed.get() + 1);
    }

    /// The count of writes, if some are not durable yet.
    pub(super) fn unflushed_writes(&self) -> Option<u64> {
        (self.writes_flushed.get() < self.writes_completed.get())
            .then(|| self.writes_completed.get())
    }

    /// Records a flush: the first `written` writes are durable.
    pub(super) fn record_flush(&self, written: u64) {
        self.writes_flushed.set(self.writes_flushed.get().max(written));
    }

    /// Acquires this path if it leads to the volume, regardless of recent refusals.
    pub(super) fn acquire(self: &Rc<Self>) -> Option<AcquiredPath> {
        let (_, live) = self.candidate(0)?;
        Some(self.acquire_with(live))
    }

    fn acquire_with(self: &Rc<Self>, live: Rc<ActiveAssociation>) -> AcquiredPath {
        self.in_flight.set(self.in_flight.get() + 1);
        AcquiredPath { path: Rc::clone(self), live }
    }

    fn candidate(&self, index: usize) -> Option<(Candidate, Rc<ActiveAssociation>)> {
        if self.identity() != PathIdentity::Same {
            return None;
        }
        let live = self.controller.active()?;
        let state = self.controller.ana_state(self.group.get()).unwrap_or(AnaState::Optimized);
        let resting = self.avoid_until.get().is_some_and(|until| {
            let rests = Instant::now() < until;
            self.avoid_until.set(rests.then_some(until));
            rests
        });
        let class = match state {
            _ if resting => PathState::Inaccessible,
            AnaState::Optimized => PathState::Optimized,
            AnaState::NonOptimized => PathState::NonOptimized,
            _ => PathState::Inaccessible,
        };
        let (is_local, in_flight) = (live.is_local, self.in_flight.get());
        Some((Candidate { index, state: class, is_local, in_flight }, live))
    }
}

/// Acquires the path for a command. Doubtful paths are used only if `any` is set and there is no
/// better one.
pub(super) fn select_path(
    paths: &[Rc<Path>],
    policy: PathPolicy,
    last: &Cell<usize>,
    any: bool,
) -> Option<AcquiredPath> {
    let known = paths.iter().enumerate().filter_map(|(i, p)| p.candidate(i));
    let (mut best, turn) =
        (None::<((PathState, bool, usize, usize), usize, Rc<ActiveAssociation>)>, last.get());
    for (candidate, live) in known {
        let rank = rank(policy, &candidate, turn, paths.len());
        if best.as_ref().is_none_or(|(best, ..)| rank < *best) {
            best = Some((rank, candidate.index, live));
        }
    }
    let ((class, ..), index, live) = best?;
    if class == PathState::Inaccessible && !any {
        return None;
    }
    last.set(index);
    Some(paths[index].acquire_with(live))
}

/// Sort key of a path, smallest first; `last` is the path used before, of `count`.
fn rank(
    policy: PathPolicy,
    candidate: &Candidate,
    last: usize,
    count: usize,
) -> (PathState, bool, usize, usize) {
    let Candidate { index, state: class, is_local, in_flight } = *candidate;
    // How many other paths come before it in round-robin order.
    let turns = (index + count - 1 - last % count.max(1)) % count.max(1);
    match policy {
        PathPolicy::LocalFirst => (class, !is_local, in_flight, turns),
        PathPolicy::QueueDepth => (class, false, in_flight, turns),
        PathPolicy::RoundRobin => (class, false, 0, turns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(policy: PathPolicy, last: usize, candidates: &[(PathState, bool, usize)]) -> usize {
        let candidates = candidates.iter().enumerate().map(|(index, &(class, is_local, depth))| {
            Candidate { index, state: class, is_local, in_flight: depth }
        });
        let count = candidates.len();
        candidates.min_by_key(|c| rank(policy, c, last, count)).unwrap().index
    }

    use PathState::{Inaccessible, NonOptimized, Optimized};

    #[test]
    fn the_access_state_comes_before_everything() {
        for policy in [PathPolicy::LocalFirst, PathPolicy::QueueDepth, PathPolicy::RoundRobin] {
            let candidates =
                [(NonOptimized, true, 0), (Inaccessible, true, 0), (Optimized, false, 90)];
            assert_eq!(chosen(policy, 1, &candidates), 2, "{policy:?}");
            assert_eq!(chosen(policy, 1, &candidates[..2]), 0, "{policy:?}");
        }
    }

    #[test]
    fn a_local_path_is_taken_as_long_as_there_is_one() {
        let candidates = [(Optimized, false, 0), (Optimized, true, 64), (Optimized, false, 1)];
        assert_eq!(chosen(PathPolicy::LocalFirst, 1, &candidates), 1);
        assert_eq!(chosen(PathPolicy::QueueDepth, 1, &candidates), 0);
    }

    #[test]
    fn the_shortest_queue_is_taken_and_of_equal_ones_the_next() {
        let even = [(Optimized, false, 4); 3];
        for last in 0..3 {
            assert_eq!(chosen(PathPolicy::QueueDepth, last, &even), (last + 1) % 3);
            assert_eq!(chosen(PathPolicy::RoundRobin, last, &even), (last + 1) % 3);
        }
        let uneven = [(Optimized, false, 4), (Optimized, false, 3), (Optimized, false, 5)];
        assert_eq!(chosen(PathPolicy::QueueDepth, 0, &uneven), 1);
        assert_eq!(chosen(PathPolicy::RoundRobin, 1, &uneven), 2);
    }
}
