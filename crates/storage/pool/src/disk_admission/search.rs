//! Explores all orders of events for a disk whose number is used again, and random ones for two,
//! beside a disk that never fails. A model knows what each disk holds; the driver follows the
//! effects.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use super::*;

/// A voter that never fails, and is not explored.
const STEADY: MemberId = MemberId(9);

/// How often disks may return, and how often each may join.
const MAX_RETURNS: u64 = 3;
const MAX_JOINS: u64 = 3;

/// Random walks, and the events of each.
const WALKS: usize = 4000;
const WALK_STEPS: usize = 100;

/// A mistake of the driver, which the search must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// Commits the vote although a core does not write to the disk.
    VotesBeforeCoresWrite,
    /// Begins an admission before moves of columns have ended.
    JoinsWhileColumnsMove,
    /// Commits the vote of a learner that gets no versions any more.
    VotesForLostLearner,
    /// Takes the end of an earlier return for that of the present one.
    ConfusesReturns,
}

/// What may happen.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The pool has been opened.
    Opened,
    /// A version is written, which these fail to write.
    Write(MemberSet),
    /// Disks are looked for, and these are there.
    Look(MemberSet),
    /// A core reports a disk of this generation.
    Report(MemberId, u64),
    /// A core reports that a disk does not answer.
    Silence(MemberId),
    /// The writer stops waiting for a disk.
    Abandon(MemberId),
    FailSnapshot(MemberId),
    /// A column begins or ends to move away.
    SetMoving(MemberId, bool),
    Add(MemberId),
    Remove(MemberId),
    /// A task takes longer than a minute.
    BecomeSlow(MemberId, usize),
    /// A task takes its next step, which succeeds or fails.
    Step(MemberId, usize, bool),
}

/// What the metadata has of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Membership {
    #[default]
    None,
    Detached,
    Voter,
}

/// The task that returns or adds a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Task {
    /// Which disk it is for, of those that have had the number.
    disk: u8,
    return_id: Option<ReturnId>,
    step: TaskStep,
    may_become_slow: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum TaskStep {
    Examining,
    WaitingForMoves,
    CatchingUp,
    AskingCores,
    /// The change that makes it a voter is queued, or applied.
    Voting(Vote),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Vote {
    Queued,
    Applied,
    Ended { is_committed: bool },
}

/// What is true of a number and its disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Truth {
    membership: Membership,
    /// Counts the disks that have had the number.
    disk: u8,
    /// It holds every version that was written.
    is_current: bool,
    /// All cores write to it.
    is_written: bool,
    /// A column moves away from it.
    is_moving: bool,
    /// It has not answered since, and has requests in flight.
    is_silent: bool,
    is_detach_queued: bool,
    tasks: Vec<Task>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    admission: DiskAdmission,
    numbers: Vec<Truth>,
}

/// A rule that does not hold.
type Violation = &'static str;

fn ensure(holds: bool, rule: Violation) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(rule) }
}

impl World {
    /// So many attached disks.
    fn new(disks: u16) -> Self {
        let attached = Truth {
            membership: Membership::Voter,
            is_current: true,
            is_written: true,
            ..Truth::default()
        };
        let all: MemberSet = (0..disks).map(MemberId).chain([STEADY]).collect();
        Self {
            admission: DiskAdmission::new(
                all.iter().map(|id| (id, false)),
                all,
                MemberSet::default(),
            ),
            numbers: vec![attached; usize::from(disks)],
        }
    }

    fn ids(&self) -> impl Iterator<Item = MemberId> + use<> {
        (0u16..).zip(&self.numbers).map(|(n, _)| MemberId(n)).collect::<Vec<_>>().into_iter()
    }

    fn truth(&self, id: MemberId) -> &Truth {
        &self.numbers[usize::from(id.0)]
    }

    fn truth_mut(&mut self, id: MemberId) -> &mut Truth {
        &mut self.numbers[usize::from(id.0)]
    }

    fn is_lock_free(&self) -> bool {
        let holds_lock =
            |task: &Task| !matches!(task.step, TaskStep::Examining | TaskStep::WaitingForMoves);
        !self.numbers.iter().flat_map(|truth| &truth.tasks).any(holds_lock)
    }

    fn voters(&self) -> MemberSet {
        let voters = self.ids().filter(|id| self.truth(*id).membership == Membership::Voter);
        voters.chain([STEADY]).collect()
    }

    /// A version is written; the members in `failing` fail to write it.
    fn write_version(&mut self, failing: MemberSet, mistake: Mistake) -> Result<(), Violation> {
        let followers = self.admission.followers();
        for id in self.ids() {
            let truth = self.truth_mut(id);
            for task in &mut truth.tasks {
                let TaskStep::Voting(vote) = &mut task.step else { continue };
                if *vote != Vote::Queued {
                    continue;
                }
                let is_refused = !followers.contains(id) && mistake != Mistake::VotesForLostLearner;
                *vote =
                    if is_refused { Vote::Ended { is_committed: false } } else { Vote::Applied };
                if !is_refused {
                    ensure(truth.is_current, "a voter lacks a version")?;
                    // A core that fails meanwhile has it detached by the same version.
                    let is_safe = truth.is_written || truth.is_detach_queued;
                    ensure(is_safe, "a core does not write to a voter")?;
                    truth.membership = Membership::Voter;
                }
            }
            if std::mem::take(&mut truth.is_detach_queued) && truth.membership == Membership::Voter
            {
                (truth.membership, truth.is_written) = (Membership::Detached, false);
            }
        }
        let voters = self.voters();
        ensure(voters.difference(followers).is_empty(), "a voter gets no versions")?;
        let mut has_failed = false;
        for id in self.ids() {
            let is_target = voters.contains(id) || self.admission.learners().contains(id);
            let fails = is_target && (failing.contains(id) || self.truth(id).is_silent);
            self.truth_mut(id).is_current &= is_target && !fails;
            if fails {
                let is_voter = voters.contains(id);
                let effects =
                    self.admission.apply(AdmissionInput::WriteFailed { member: id, is_voter });
                ensure(effects.contains(&AdmissionEffect::StopVersions(id)), "it goes on")?;
                self.truth_mut(id).is_detach_queued |= is_voter;
                has_failed |= is_voter;
            }
        }
        let _ = self.admission.apply(AdmissionInput::VersionWritten { voters });
        for task in self.numbers.iter_mut().flat_map(|truth| &mut truth.tasks) {
            if task.step == TaskStep::Voting(Vote::Applied) && !has_failed {
                task.step = TaskStep::Voting(Vote::Ended { is_committed: true });
            }
        }
        Ok(())
    }

    /// A disk fails to write a snapshot, between two versions.
    fn fail_snapshot(&mut self, id: MemberId) -> Result<(), Violation> {
        let failed = AdmissionInput::WriteFailed { member: id, is_voter: true };
        let effects = self.admission.apply(failed);
        let truth = self.truth_mut(id);
        (truth.is_current, truth.is_detach_queued) = (false, true);
        ensure(effects.contains(&AdmissionEffect::StopVersions(id)), "it goes on")
    }

    /// A core reports a disk of this generation.
    fn report(&mut self, id: MemberId, generation: u64) -> Result<(), Violation> {
        let before = self.admission.clone();
        let is_current = generation == self.admission.join_generation(id);
        let report = AdmissionInput::ReportedFailed { member: id, join_generation: generation };
        match self.admission.apply(report).as_slice() {
            [AdmissionEffect::AwaitCommit] => {
                return ensure(!is_current && before == self.admission, "a late report acts");
            }
            [AdmissionEffect::Detach(_) | AdmissionEffect::DetachAfterVote(_)] => {}
            _ => return Err("a report has no answer"),
        }
        let truth = self.truth_mut(id);
        let is_voting = truth.tasks.iter().any(|task| matches!(task.step, TaskStep::Voting(_)));
        truth.is_written = false;
        truth.is_detach_queued |= truth.membership == Membership::Voter || is_voting;
        Ok(())
    }

    /// A disk does not answer any more.
    fn silence(&mut self, id: MemberId) {
        let generation = self.admission.join_generation(id);
        let report =
            AdmissionInput::ReportedUnresponsive { member: id, join_generation: generation };
        match self.admission.apply(report).as_slice() {
            [AdmissionEffect::ProbeOthers(_)] => {
                let _ = self.admission.apply(AdmissionInput::SilenceConfirmed(id));
                if self.admission.is_join_rejected(id) {
                    self.truth_mut(id).is_written = false;
                }
            }
            _ => {
                let _ = self.admission.apply(AdmissionInput::Abandoned(id));
                let truth = self.truth_mut(id);
                truth.is_silent = true;
                truth.is_detach_queued |= truth.membership == Membership::Voter;
            }
        }
    }

    /// Disks are looked for; those that are to return do.
    fn look(&mut self, present: MemberSet) -> Result<(), Violation> {
        let sought = self.admission.sought().difference(self.voters());
        for effect in self.admission.apply(AdmissionInput::LookedFor { sought, present }) {
            let AdmissionEffect::Identify(id) = effect else { return Err("a look does more") };
            let effects = self.admission.apply(AdmissionInput::Found(id));
            let [AdmissionEffect::Reattach(_, return_id)] = effects.as_slice() else {
                return Err("a disk that is to be examined does not return");
            };
            let truth = self.truth_mut(id);
            ensure(truth.membership == Membership::Detached, "what is no detached disk returns")?;
            ensure(!truth.is_silent, "an abandoned disk returns")?;
            truth.tasks.push(Task {
                disk: truth.disk,
                return_id: Some(*return_id),
                step: TaskStep::Examining,
                may_become_slow: true,
            });
        }
        Ok(())
    }

    /// Begins to add a disk with a free number.
    fn add(&mut self, id: MemberId) -> Result<(), Violation> {
        let effects = self.admission.apply(AdmissionInput::JoinBegan(id, JoinKind::New));
        ensure(effects == [AdmissionEffect::CatchUp(id)], "a free number is refused")?;
        let truth = self.truth_mut(id);
        truth.disk += 1;
        (truth.is_current, truth.is_written, truth.is_silent) = (false, false, false);
        let (disk, step) = (truth.disk, TaskStep::CatchingUp);
        truth.tasks.push(Task { disk, return_id: None, step, may_become_slow: false });
        Ok(())
    }

    /// Removes a detached disk.
    fn remove(&mut self, id: MemberId) {
        let _ = self.admission.apply(AdmissionInput::Removed(id));
        let truth = self.truth_mut(id);
        (truth.membership, truth.is_moving) = (Membership::None, false);
        truth.is_detach_queued = false;
    }

    /// A task takes its next step, which succeeds or fails. A task that has ended is dropped.
    fn step(
        &mut self,
        id: MemberId,
        at: usize,
        succeeds: bool,
        mistake: Mistake,
    ) -> Result<(), Violation> {
        let mut task = self.truth_mut(id).tasks.remove(at);
        let is_detached =
            task.disk == self.truth(id).disk && self.truth(id).membership == Membership::Detached;
        let next = match task.step {
            TaskStep::Examining if succeeds => {
                let return_id = task.return_id.unwrap_or_default();
                let _ = self.admission.apply(AdmissionInput::Examined(id, return_id));
                Some(TaskStep::WaitingForMoves)
            }
            TaskStep::WaitingForMoves if is_detached && succeeds => {
                let kind = task.return_id.map_or(JoinKind::New, JoinKind::Return);
                let effects = self.admission.apply(AdmissionInput::JoinBegan(id, kind));
                (effects == [AdmissionEffect::CatchUp(id)]).then_some(TaskStep::CatchingUp)
            }
            TaskStep::Examining | TaskStep::WaitingForMoves => None,
            TaskStep::CatchingUp if succeeds => {
                let truth = self.truth_mut(id);
                (truth.is_current, truth.is_silent) = (true, false);
                let effects = self.admission.apply(AdmissionInput::CaughtUp(id));
                (effects == [AdmissionEffect::AskCores(id)]).then_some(TaskStep::AskingCores)
            }
            TaskStep::AskingCores => {
                let is_rejected = self.admission.is_join_rejected(id);
                self.truth_mut(id).is_written = succeeds && !is_rejected;
                let answered = AdmissionInput::CoresAnswered { member: id, all_write: succeeds };
                let votes = self.admission.apply(answered) == [AdmissionEffect::CommitVote(id)]
                    || mistake == Mistake::VotesBeforeCoresWrite;
                votes.then_some(TaskStep::Voting(Vote::Queued))
            }
            TaskStep::CatchingUp | TaskStep::Voting(_) => None,
        };
        let Some(next) = next else { return self.end(id, task, mistake) };
        task.step = next;
        self.truth_mut(id).tasks.insert(at, task);
        Ok(())
    }

    fn end(&mut self, id: MemberId, task: Task, mistake: Mistake) -> Result<(), Violation> {
        if !matches!(task.step, TaskStep::Examining | TaskStep::WaitingForMoves) {
            let is_committed = task.step == TaskStep::Voting(Vote::Ended { is_committed: true });
            let membership = self.truth(id).membership;
            let (is_member, is_voter) =
                (membership != Membership::None, membership == Membership::Voter);
            let ended = AdmissionInput::JoinEnded { member: id, is_committed, is_member, is_voter };
            let _ = self.admission.apply(ended);
        }
        if let Some(return_id) = task.return_id {
            let before = self.admission.state(id);
            let return_id = match (mistake, before) {
                (Mistake::ConfusesReturns, AdmissionState::Returning(_, attempt)) => {
                    attempt.return_id.unwrap_or_default()
                }
                _ => return_id,
            };
            let _ = self.admission.apply(AdmissionInput::ReturnEnded(id, return_id));
            let is_other = task.disk != self.truth(id).disk;
            ensure(!is_other || before == self.admission.state(id), "an old return ends another")?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Violation> {
        let joining = |id| matches!(self.admission.state(id), AdmissionState::Joining(..));
        ensure(self.ids().filter(|id| joining(*id)).count() <= 1, "two disks join")?;
        for id in self.ids() {
            let truth = self.truth(id);
            let follows = self.admission.followers().contains(id);
            ensure(!follows || truth.is_current, "a disk gets versions and lacks one")?;
            ensure(!joining(id) || !truth.is_moving, "a column moves from a disk that joins")?;
            let is_safe = truth.is_written || truth.is_detach_queued || truth.is_silent;
            let is_voter = truth.membership == Membership::Voter;
            ensure(!is_voter || is_safe, "a core does not write to a voter")?;
            let is_free = self.admission.state(id) == AdmissionState::Unassigned;
            let is_member = truth.membership != Membership::None;
            ensure(
                is_free != (is_member || joining(id)),
                "a free number has a disk, or a disk none",
            )?;
            let is_attached = self.admission.state(id) == AdmissionState::Attached;
            ensure(!is_attached || !truth.is_silent, "an abandoned disk is attached")?;
        }
        Ok(())
    }

    /// The events that may happen now.
    fn events(&self, mistake: Mistake) -> Vec<Event> {
        let mut all = vec![Event::Opened];
        for set in (0..1 << self.numbers.len()).map(MemberSet) {
            all.push(Event::Write(set));
            if self.admission.last_return.0 < MAX_RETURNS {
                all.push(Event::Look(set));
            }
        }
        for id in self.ids() {
            all.extend(self.disk_events(id));
            for (at, task) in self.truth(id).tasks.iter().enumerate() {
                if task.may_become_slow {
                    all.push(Event::BecomeSlow(id, at));
                }
                if self.may_go_on(id, task, mistake) {
                    all.extend([Event::Step(id, at, true), Event::Step(id, at, false)]);
                }
            }
        }
        all
    }

    fn disk_events(&self, id: MemberId) -> Vec<Event> {
        let (truth, generation) = (self.truth(id), self.admission.join_generation(id));
        let is_detached = truth.membership == Membership::Detached;
        let may_add = truth.membership == Membership::None && generation < MAX_JOINS;
        let follows = self.admission.followers().contains(id);
        let may_move = is_detached && !self.admission.keeps_columns(id);
        [
            (true, Event::Report(id, generation)),
            (generation > 0, Event::Report(id, generation.saturating_sub(1))),
            (true, Event::Silence(id)),
            (true, Event::Abandon(id)),
            (follows, Event::FailSnapshot(id)),
            (truth.is_moving, Event::SetMoving(id, false)),
            (may_move && !truth.is_moving, Event::SetMoving(id, true)),
            (may_add && self.is_lock_free(), Event::Add(id)),
            (is_detached && !truth.is_moving && self.is_lock_free(), Event::Remove(id)),
        ]
        .into_iter()
        .filter_map(|(may_happen, event)| may_happen.then_some(event))
        .collect()
    }

    fn may_go_on(&self, id: MemberId, task: &Task, mistake: Mistake) -> bool {
        match task.step {
            TaskStep::WaitingForMoves => {
                let waits = self.truth(id).is_moving && mistake != Mistake::JoinsWhileColumnsMove;
                self.is_lock_free() && !waits && self.admission.join_generation(id) < MAX_JOINS
            }
            TaskStep::Voting(vote) => matches!(vote, Vote::Ended { .. }),
            TaskStep::Examining | TaskStep::CatchingUp | TaskStep::AskingCores => true,
        }
    }

    /// The world after an event.
    fn after(&self, event: Event, mistake: Mistake) -> Result<Self, Violation> {
        let mut next = self.clone();
        match event {
            Event::Opened => {
                let effects = next.admission.apply(AdmissionInput::Opened);
                ensure(effects.is_empty(), "opening does more")?;
            }
            Event::Write(failing) => next.write_version(failing, mistake)?,
            Event::Look(present) => next.look(present)?,
            Event::Report(id, generation) => next.report(id, generation)?,
            Event::Silence(id) => next.silence(id),
            Event::Abandon(id) => {
                let _ = next.admission.apply(AdmissionInput::Abandoned(id));
                ensure(next.admission.abandoned().contains(id), "a task waits for ever")?;
                next.truth_mut(id).is_silent = true;
            }
            Event::FailSnapshot(id) => next.fail_snapshot(id)?,
            Event::SetMoving(id, is_moving) => next.truth_mut(id).is_moving = is_moving,
            Event::Add(id) => next.add(id)?,
            Event::Remove(id) => next.remove(id),
            Event::BecomeSlow(id, at) => {
                let task = &mut next.truth_mut(id).tasks[at];
                task.may_become_slow = false;
                let return_id = task.return_id.unwrap_or_default();
                let _ = next.admission.apply(AdmissionInput::ReturnSlow(id, return_id));
            }
            Event::Step(id, at, succeeds) => next.step(id, at, succeeds, mistake)?,
        }
        next.check()?;
        Ok(next)
    }
}

/// Explores all worlds of one disk; returns how many there are, or a violation.
fn search(mistake: Mistake) -> Result<usize, Violation> {
    let mut seen = FxHashSet::from_iter([World::new(1)]);
    let mut open = VecDeque::from([World::new(1)]);
    while let Some(world) = open.pop_front() {
        for event in world.events(mistake) {
            let next = world.after(event, mistake)?;
            if !seen.contains(&next) {
                seen.insert(next.clone());
                open.push_back(next);
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn no_order_of_events_breaks_a_rule() {
    let worlds = search(Mistake::None).unwrap();
    assert!(worlds > 10_000, "{worlds} worlds");
}

#[test]
fn no_random_order_of_events_of_two_disks_breaks_a_rule() {
    // Knuth's MMIX generator: the same walks each time.
    let mut random = 1u64;
    for _ in 0..WALKS {
        let mut world = World::new(2);
        for _ in 0..WALK_STEPS {
            let events = world.events(Mistake::None);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let event = events[usize::try_from(random >> 33).unwrap() % events.len()];
            world = world.after(event, Mistake::None).unwrap();
        }
    }
}

#[test]
fn mistakes_of_the_driver_are_found() {
    for (mistake, violation) in [
        (Mistake::VotesBeforeCoresWrite, "a core does not write to a voter"),
        (Mistake::JoinsWhileColumnsMove, "a column moves from a disk that joins"),
        (Mistake::VotesForLostLearner, "a voter lacks a version"),
        (Mistake::ConfusesReturns, "an old return ends another"),
    ] {
        assert_eq!(search(mistake), Err(violation), "{mistake:?}");
    }
}
