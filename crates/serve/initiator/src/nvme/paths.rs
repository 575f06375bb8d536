//! The ways to a namespace: which of them lead to it, and which one the next command takes.

use std::cell::Cell;
use std::rc::Rc;

use ::nvme::Sqe;
use ::nvme::entry::NvmOpcode;
use ::nvme::log::AnaState;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::warn;

use super::controller::Controller;
use super::identity::Described;
use super::live::Live;
use super::namespace::FUA;

/// By what a command chooses among the paths that serve its namespace equally well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// A path that does not leave this machine, as long as there is one; of several, the one with the fewest
    /// commands under way.
    #[default]
    LocalFirst,
    /// The path with the fewest commands under way.
    QueueDepth,
    /// One after the other.
    RoundRobin,
}

/// What is known of the volume at the end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing, or nothing that still holds.
    Unknown,
    /// It is the volume that it has to be.
    Same,
    /// It is another one.
    Another(&'static str),
    /// It is not there, or not able to do what is asked of it, for now.
    NotNow(&'static str),
}

/// One of the ways.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) controller: Controller,
    seen: Cell<Seen>,
    /// The generation of the controller at which it was seen.
    at: Cell<u64>,
    /// Its group of access states.
    group: Cell<u32>,
    /// Its controller has a volatile cache, of which nobody was told who uses this: what is written is forced through
    /// it.
    forces: Cell<bool>,
    in_flight: Cell<usize>,
    /// Until when it rests, after a refusal that concerns the path.
    rests: Cell<Option<Instant>>,
    /// Counts the writes that have ended here; those of them that a flush has covered.
    written: Cell<u64>,
    flushed: Cell<u64>,
    /// Somebody wants the namespace looked at again.
    pub(super) doubted: Notify,
}

/// A path that carries a command, counted as such.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) path: Rc<Path>,
    pub(super) live: Rc<Live>,
}

impl Taken {
    /// Whether it still leads to the volume: what is sent next without a pause goes there.
    pub(super) fn is_still(&self) -> bool {
        self.path.seen() == Seen::Same && self.live.is_up()
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.path.in_flight.set(self.path.in_flight.get() - 1);
    }
}

/// How good a path is, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Optimized,
    NonOptimized,
    /// The controller says that it does not serve, or has just refused to. What it says may be old, so in
    /// want of anything better it is asked now and then.
    Doubtful,
}

/// What the choice is made by.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    index: usize,
    class: Class,
    is_local: bool,
    in_flight: usize,
}

impl Path {
    pub(super) fn new(controller: Controller) -> Self {
        Self {
            controller,
            seen: Cell::new(Seen::Unknown),
            at: Cell::new(0),
            group: Cell::new(0),
            forces: Cell::new(false),
            in_flight: Cell::new(0),
            rests: Cell::new(None),
            written: Cell::new(0),
            flushed: Cell::new(0),
            doubted: Notify::new(),
        }
    }

    /// What is at its end, as far as that still holds.
    pub(super) fn seen(&self) -> Seen {
        match self.seen.get() {
            Seen::Same if self.at.get() != self.controller.generation() => Seen::Unknown,
            seen => seen,
        }
    }

    /// Notes what was found by a look that began at `generation`.
    pub(super) fn found(&self, now: Option<&Described>, wanted: &Described, generation: u64) {
        let seen = now.map_or(Seen::NotNow("it is not there"), |now| wanted.compare(now));
        if let Some(now) = now {
            self.group.set(now.ana_group);
            self.forces.set(now.info.volatile_cache && !wanted.info.volatile_cache);
        }
        if let (Seen::Another(why) | Seen::NotNow(why), true) = (seen, self.seen.get() != seen) {
            warn!("{:?} is no path: {why}", self.controller);
        }
        self.seen.set(seen);
        self.at.set(generation);
    }

    /// Whether it does not lead to the volume, as far as anybody can know.
    pub(super) fn is_hopeless(&self) -> bool {
        self.controller.is_over() || self.is_known() && matches!(self.seen.get(), Seen::Another(_))
    }

    /// Whether another volume was seen at its end when it was looked at last.
    pub(super) fn leads_elsewhere(&self) -> bool {
        matches!(self.seen.get(), Seen::Another(_))
    }

    /// Whether it has been looked at since anything may have changed.
    pub(super) fn is_known(&self) -> bool {
        self.seen.get() != Seen::Unknown && self.at.get() == self.controller.generation()
    }

    /// Whether what is at its end may soon be what it has to be, though nobody says so.
    pub(super) fn is_not_now(&self) -> bool {
        matches!(self.seen.get(), Seen::NotNow(_))
    }

    /// It has to be looked at again before it is used.
    pub(super) fn doubt(&self) {
        self.seen.set(Seen::Unknown);
        self.doubted.notify_one();
    }

    /// The command as it is to be sent by this path.
    pub(super) fn forced(&self, mut sqe: Sqe) -> Sqe {
        let writes = [NvmOpcode::Write.0, NvmOpcode::WriteZeroes.0].contains(&sqe.opcode);
        if writes && self.forces.get() {
            sqe.cdw10[2] = (sqe.cdw10[2].get() | FUA).into();
        }
        sqe
    }

    /// It has refused a command for a reason that concerns the path: others come first until `then`.
    pub(super) fn rest(&self, then: Instant) {
        self.rests.set(Some(then));
    }

    /// A write that is not durable yet has ended here.
    pub(super) fn has_written(&self) {
        self.written.set(self.written.get() + 1);
    }

    /// How much was written here if not all of it is durable.
    pub(super) fn to_flush(&self) -> Option<u64> {
        (self.flushed.get() < self.written.get()).then(|| self.written.get())
    }

    /// What was written when `written` was asked for is durable.
    pub(super) fn has_flushed(&self, written: u64) {
        self.flushed.set(self.flushed.get().max(written));
    }

    /// Takes this path and no other one, if it leads to the volume, whatever was said of it of late.
    pub(super) fn take(self: &Rc<Self>) -> Option<Taken> {
        let (_, live) = self.candidate(0)?;
        Some(self.taken(live))
    }

    fn taken(self: &Rc<Self>, live: Rc<Live>) -> Taken {
        self.in_flight.set(self.in_flight.get() + 1);
        Taken { path: Rc::clone(self), live }
    }

    fn candidate(&self, index: usize) -> Option<(Candidate, Rc<Live>)> {
        if self.seen() != Seen::Same {
            return None;
        }
        let live = self.controller.live()?;
        let state = self.controller.access(self.group.get()).unwrap_or(AnaState::Optimized);
        let resting = self.rests.get().is_some_and(|until| {
            let rests = Instant::now() < until;
            self.rests.set(rests.then_some(until));
            rests
        });
        let class = match state {
            _ if resting => Class::Doubtful,
            AnaState::Optimized => Class::Optimized,
            AnaState::NonOptimized => Class::NonOptimized,
            _ => Class::Doubtful,
        };
        let (is_local, in_flight) = (live.is_local, self.in_flight.get());
        Some((Candidate { index, class, is_local, in_flight }, live))
    }
}

/// Takes the path for a command. Those that are doubtful only where `any` does, and there is no other one.
pub(super) fn take(
    paths: &[Rc<Path>],
    policy: Policy,
    last: &Cell<usize>,
    any: bool,
) -> Option<Taken> {
    let known = paths.iter().enumerate().filter_map(|(i, p)| p.candidate(i));
    let (mut best, turn) = (None::<((Class, bool, usize, usize), usize, Rc<Live>)>, last.get());
    for (candidate, live) in known {
        let rank = rank(policy, &candidate, turn, paths.len());
        if best.as_ref().is_none_or(|(best, ..)| rank < *best) {
            best = Some((rank, candidate.index, live));
        }
    }
    let ((class, ..), index, live) = best?;
    if class == Class::Doubtful && !any {
        return None;
    }
    last.set(index);
    Some(paths[index].taken(live))
}

/// What is smaller comes first; `last` is the path that was taken before, of `count`.
fn rank(
    policy: Policy,
    candidate: &Candidate,
    last: usize,
    count: usize,
) -> (Class, bool, usize, usize) {
    let Candidate { index, class, is_local, in_flight } = *candidate;
    // How many others have their turn before it.
    let turns = (index + count - 1 - last % count.max(1)) % count.max(1);
    match policy {
        Policy::LocalFirst => (class, !is_local, in_flight, turns),
        Policy::QueueDepth => (class, false, in_flight, turns),
        Policy::RoundRobin => (class, false, 0, turns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(policy: Policy, last: usize, candidates: &[(Class, bool, usize)]) -> usize {
        let candidates = candidates.iter().enumerate().map(|(index, &(class, is_local, depth))| {
            Candidate { index, class, is_local, in_flight: depth }
        });
        let count = candidates.len();
        candidates.min_by_key(|c| rank(policy, c, last, count)).unwrap().index
    }

    use Class::{Doubtful, NonOptimized, Optimized};

    #[test]
    fn the_access_state_comes_before_everything() {
        for policy in [Policy::LocalFirst, Policy::QueueDepth, Policy::RoundRobin] {
            let candidates = [(NonOptimized, true, 0), (Doubtful, true, 0), (Optimized, false, 90)];
            assert_eq!(chosen(policy, 1, &candidates), 2, "{policy:?}");
            assert_eq!(chosen(policy, 1, &candidates[..2]), 0, "{policy:?}");
        }
    }

    #[test]
    fn a_local_path_is_taken_as_long_as_there_is_one() {
        let candidates = [(Optimized, false, 0), (Optimized, true, 64), (Optimized, false, 1)];
        assert_eq!(chosen(Policy::LocalFirst, 1, &candidates), 1);
        assert_eq!(chosen(Policy::QueueDepth, 1, &candidates), 0);
    }

    #[test]
    fn the_shortest_queue_is_taken_and_of_equal_ones_the_next() {
        let even = [(Optimized, false, 4); 3];
        for last in 0..3 {
            assert_eq!(chosen(Policy::QueueDepth, last, &even), (last + 1) % 3);
            assert_eq!(chosen(Policy::RoundRobin, last, &even), (last + 1) % 3);
        }
        let uneven = [(Optimized, false, 4), (Optimized, false, 3), (Optimized, false, 5)];
        assert_eq!(chosen(Policy::QueueDepth, 0, &uneven), 1);
        assert_eq!(chosen(Policy::RoundRobin, 1, &uneven), 2);
    }
}
