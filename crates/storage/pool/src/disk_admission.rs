//! Which disks an open pool uses, as a state machine ([RFD
//! 0042](../../../../docs/rfd/0042-admission-of-disks.md)): disks that arrive, return after an
//! absence, fail, are away, and leave. Plain data: `open_pool::membership` and
//! [`MetadataWriter`](super::metadata_writer) carry out the effects, and report what came of them.
//!
//! | state | input | next state | effects |
//! |---|---|---|---|
//! | `Unassigned` | `JoinBegan(New)` | `CatchingUp` | `CatchUp` |
//! | `Absent` | `LookedFor`, present | the same | `Identify` |
//! | | `Found` | `Returning(Examining)` | `Reattach` |
//! | | `NewerCommitProven` | `Failed` | |
//! | `Failed` | `LookedFor`, missing | `Absent` | |
//! | | `Opened` | `Absent` | |
//! | `Returning` | `ReturnSlow`, examining | `Returning(Slow)` | `RebuildColumns` |
//! | | `Examined` | `Returning(Ready)` | |
//! | | `JoinBegan(Return)`, ready | `CatchingUp` | `CatchUp` |
//! | | `ReturnEnded` | `Failed` | |
//! | `CatchingUp` | `CaughtUp` | `Learning` | `AskCores` |
//! | `Learning` | `CoresAnswered`, all write | `Committing` | `CommitVote` |
//! | | `ReportedFailed`, `SilenceConfirmed` | `Rejected` | `Detach` in answer to a report |
//! | | `CoresAnswered`, otherwise | `Rejected` | `CancelJoin` |
//! | `Rejected`, `Stopped` | `CoresAnswered`, `CaughtUp` | the same | `CancelJoin` |
//! | `Learning`, `Committing`, `Rejected` | `WriteFailed` | `Stopped` | `StopVersions` |
//! | `Committing` | `JoinEnded`, it is a voter | `Attached` | |
//! | any from `CatchingUp` on | `JoinEnded`, otherwise | `Failed` | `StopVersions`, `AnnounceDetached` |
//! | `Attached` | `WriteFailed` | `Failed` | `StopVersions`, `AnnounceFailure` |
//! | | `VersionWritten` without it | `Failed` | `StopVersions` |
//! | | `Abandoned` | `Unresponsive` | `HoldUntilIdle`, `StopWaiting` |
//! | `Unresponsive` | `WriteFailed`, `VersionWritten` as above | `Abandoned` | as above |
//! | any | `Removed` | `Unassigned` | |
//!
//! What the table leaves out:
//! * A disk that was abandoned during its return or admission is `Abandoned` where the table says
//!   `Failed`, unless it caught up since. One that was missing at a look during a slow return is
//!   `Absent` there. A new disk that is refused is `Unassigned` there.
//! * `ReportedFailed` and `ReportedUnresponsive` are answered by one effect, which says what to do
//!   with the report: see [`AdmissionEffect`].
//! * A free number whose disk was abandoned counts as abandoned until the next disk with the number
//!   has caught up, so that tasks that still wait for the removed disk end.
//! * `DeclaredLost` and `Abandoned` end only by `Removed`.
//! * `RemovalBegan` and `RemovalCancelled` set and clear a mark that all states keep.
//! * An input that does not fit the state changes nothing.

use std::collections::BTreeMap;

use pool_metadata::{MemberId, MemberSet};

#[cfg(test)]
mod search;
#[cfg(test)]
mod tests;

/// The number of a return, by which inputs about an earlier one are recognised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ReturnId(u64);

/// The state of the disk that has a member number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum AdmissionState {
    /// No disk has the number.
    #[default]
    Unassigned,
    /// It is a voter, gets every version, and all cores write to it.
    Attached,
    /// It is a voter that does not answer: nothing waits for it, and it is being detached.
    Unresponsive,
    /// It is detached, or the next version detaches it. It is not tried again until a look has
    /// found it missing: as it is, it would fail again.
    Failed,
    /// It is detached, and was missing at the last look: it returns when it is found.
    Absent,
    /// It did not answer and is detached. Requests may be in flight at it, so it stays detached
    /// until the pool is opened again.
    Abandoned,
    /// The operator declared it lost when the pool was opened; it too stays detached until the pool
    /// is opened again.
    DeclaredLost,
    /// It was found, and is being examined.
    Returning(ReturnStage, Attempt),
    /// It is being admitted.
    Joining(JoinStage, Attempt),
}

/// The stage of a return, up to the admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ReturnStage {
    /// What it holds is read. Its columns stay where they are.
    Examining,
    /// The same, but it takes long: its columns may be rebuilt elsewhere meanwhile.
    Slow,
    /// It is known what it misses. Its columns stay from now on.
    Ready,
}

/// The stage of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum JoinStage {
    /// It gets the metadata, and no versions yet.
    CatchingUp,
    /// It is a learner: it gets every version, and the cores start to write to it.
    Learning,
    /// It is a learner, all cores write to it, and its vote is being committed.
    Committing,
    /// It is a learner, but a core may have written without it: it will not get its vote.
    Rejected,
    /// It failed, or was reported before it had caught up: it gets no versions and no vote.
    Stopped,
}

/// What is to be known when a return or an admission ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Attempt {
    /// The return; `None` if the disk is new.
    return_id: Option<ReturnId>,
    /// A look did not find it during this attempt: if the attempt fails, it has to be found again.
    was_missing: bool,
    /// It did not answer meanwhile.
    was_abandoned: bool,
}

impl Attempt {
    /// The state after an attempt that has failed.
    fn failed_state(self) -> AdmissionState {
        match self {
            Self { was_abandoned: true, .. } => AdmissionState::Abandoned,
            Self { was_missing: true, .. } => AdmissionState::Absent,
            _ => AdmissionState::Failed,
        }
    }
}

/// How a disk comes to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum JoinKind {
    /// It is added to the pool.
    New,
    /// It returns.
    Return(ReturnId),
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AdmissionInput {
    /// The pool has been opened: disks that failed so far count as missing.
    Opened,
    /// These disks were looked for, and these were there.
    LookedFor { sought: MemberSet, present: MemberSet },
    /// A disk proves a commit that the pool does not know of. It is not tried again until a look
    /// has found it missing.
    NewerCommitProven(MemberId),
    /// A detached disk was found, and may return.
    Found(MemberId),
    /// A return takes long.
    ReturnSlow(MemberId, ReturnId),
    /// It is known what a returning disk misses.
    Examined(MemberId, ReturnId),
    /// A return has ended, in one way or another.
    ReturnEnded(MemberId, ReturnId),
    /// The admission of a disk has begun; the caller holds the membership lock.
    JoinBegan(MemberId, JoinKind),
    /// It holds the last version, and gets every version from now on.
    CaughtUp(MemberId),
    /// All cores have been asked to write to it.
    CoresAnswered { member: MemberId, all_write: bool },
    /// Its admission has ended. `is_committed`: so is the change that ended it. `is_member`,
    /// `is_voter`: what it is by the metadata.
    JoinEnded { member: MemberId, is_committed: bool, is_member: bool, is_voter: bool },
    /// It failed to write a version or snapshot.
    WriteFailed { member: MemberId, is_voter: bool },
    /// A version with these voters has been written.
    VersionWritten { voters: MemberSet },
    /// From now on nothing waits for it: it does not answer, and the pool can do without it.
    Abandoned(MemberId),
    /// A core reports that the disk of this join generation failed.
    ReportedFailed { member: MemberId, join_generation: u64 },
    /// A core reports that the disk of this join generation does not answer.
    ReportedUnresponsive { member: MemberId, join_generation: u64 },
    /// Other disks answer, and the joining disk still does not.
    SilenceConfirmed(MemberId),
    /// The operator removes it: it leaves when it holds no columns any more.
    RemovalBegan(MemberId),
    /// The operator keeps it after all.
    RemovalCancelled(MemberId),
    /// It has left the pool; its number is free.
    Removed(MemberId),
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AdmissionEffect {
    /// Read its label and metadata, and report [`AdmissionInput::Found`] or
    /// [`AdmissionInput::NewerCommitProven`].
    Identify(MemberId),
    /// Begin this return.
    Reattach(MemberId, ReturnId),
    /// Its columns may be rebuilt elsewhere: tell the cores.
    RebuildColumns,
    /// Write the current metadata to it.
    CatchUp(MemberId),
    /// Ask all cores to write to it.
    AskCores(MemberId),
    /// Commit the change that makes it a voter.
    CommitVote(MemberId),
    /// It does not get its vote. Keep it open while requests of cores are in flight at it.
    CancelJoin(MemberId),
    /// It gets no more versions: close it.
    StopVersions(MemberId),
    /// Keep it open while requests are in flight at it.
    HoldUntilIdle(MemberId),
    /// Nothing may wait for it any more.
    StopWaiting(MemberId),
    /// Tell the cores that it is detached.
    AnnounceDetached(MemberId),
    /// The same, and let a spare replace it.
    AnnounceFailure(MemberId),
    /// Answer to a report: detach it.
    Detach(MemberId),
    /// Answer to a report: detach it after the queued change that makes it a voter.
    DetachAfterVote(MemberId),
    /// Answer to a report: detach it if the pool can do without it.
    DetachIfPossible(MemberId),
    /// Answer to a report: probe the other disks, and report [`AdmissionInput::SilenceConfirmed`].
    ProbeOthers(MemberId),
    /// Answer to a report: it concerns an earlier admission. The disk was detached since; wait
    /// until that is committed.
    AwaitCommit,
}

/// What is known of a member number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct DiskRecord {
    state: AdmissionState,
    /// How often admission of a disk with this number was attempted in this term.
    join_generation: u64,
    /// Whether it leaves when it holds no columns any more.
    is_leaving: bool,
    /// The last disk with this number was abandoned and is no member: tasks that still wait for it
    /// end. The next disk with the number is waited for once it has caught up.
    was_abandoned: bool,
}

impl DiskRecord {
    /// Whether nothing waits for the disk.
    fn is_abandoned(&self) -> bool {
        match self.state {
            AdmissionState::Unassigned => self.was_abandoned,
            AdmissionState::Unresponsive | AdmissionState::Abandoned => true,
            AdmissionState::Returning(_, attempt) | AdmissionState::Joining(_, attempt) => {
                attempt.was_abandoned
            }
            AdmissionState::Attached
            | AdmissionState::Failed
            | AdmissionState::Absent
            | AdmissionState::DeclaredLost => false,
        }
    }

    /// The number is free from now on.
    fn release(&mut self) {
        self.was_abandoned = self.is_abandoned();
        (self.state, self.is_leaving) = (AdmissionState::Unassigned, false);
    }
}

/// The states of the disks of an open pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct DiskAdmission {
    disks: BTreeMap<MemberId, DiskRecord>,
    last_return: ReturnId,
}

impl DiskAdmission {
    /// The disks of a pool that is being opened: `members` and which of them leave, the supporters,
    /// and those that the operator declared lost.
    pub(super) fn new(
        members: impl IntoIterator<Item = (MemberId, bool)>,
        supporters: MemberSet,
        declared_lost: MemberSet,
    ) -> Self {
        let record = |(id, is_leaving)| {
            let state = match (supporters.contains(id), declared_lost.contains(id)) {
                (true, _) => AdmissionState::Attached,
                (false, true) => AdmissionState::DeclaredLost,
                (false, false) => AdmissionState::Absent,
            };
            (id, DiskRecord { state, is_leaving, ..DiskRecord::default() })
        };
        Self { disks: members.into_iter().map(record).collect(), ..Self::default() }
    }

    fn state(&self, id: MemberId) -> AdmissionState {
        self.disks.get(&id).map(|disk| disk.state).unwrap_or_default()
    }

    fn set(&mut self, id: MemberId, state: AdmissionState) {
        self.disks.entry(id).or_default().state = state;
    }

    fn members_with(&self, is_wanted: impl Fn(AdmissionState) -> bool) -> MemberSet {
        let wanted = self.disks.iter().filter(|(_, disk)| is_wanted(disk.state));
        wanted.map(|(id, _)| *id).collect()
    }

    /// Members that get every version.
    pub(super) fn followers(&self) -> MemberSet {
        let others =
            |state| matches!(state, AdmissionState::Attached | AdmissionState::Unresponsive);
        self.members_with(others).union(self.learners())
    }

    /// Members that get every version and are not known to be voters yet.
    pub(super) fn learners(&self) -> MemberSet {
        self.members_with(|state| match state {
            AdmissionState::Joining(stage, _) => stage.is_learner(),
            _ => false,
        })
    }

    /// Members that nothing waits for.
    pub(super) fn abandoned(&self) -> MemberSet {
        let abandoned = self.disks.iter().filter(|(_, disk)| disk.is_abandoned());
        abandoned.map(|(id, _)| *id).collect()
    }

    /// Members that the operator declared lost.
    pub(super) fn declared_lost(&self) -> MemberSet {
        self.members_with(|state| state == AdmissionState::DeclaredLost)
    }

    /// Detached members that are looked for.
    pub(super) fn sought(&self) -> MemberSet {
        self.members_with(|state| match state {
            AdmissionState::Failed | AdmissionState::Absent => true,
            AdmissionState::Returning(stage, _) => stage == ReturnStage::Slow,
            _ => false,
        })
    }

    /// How often admission of a disk with this number was attempted.
    pub(super) fn join_generation(&self, id: MemberId) -> u64 {
        self.disks.get(&id).map_or(0, |disk| disk.join_generation)
    }

    /// Whether no column may be moved away from the disk now.
    pub(super) fn keeps_columns(&self, id: MemberId) -> bool {
        match self.state(id) {
            AdmissionState::Returning(stage, _) => stage != ReturnStage::Slow,
            AdmissionState::Joining(..) => true,
            _ => false,
        }
    }

    /// Whether the disk leaves the pool when it holds no columns any more.
    pub(super) fn is_leaving(&self, id: MemberId) -> bool {
        self.disks.get(&id).is_some_and(|disk| disk.is_leaving)
    }

    /// Handles an input; returns what is to be done.
    #[must_use]
    pub(super) fn apply(&mut self, input: AdmissionInput) -> Vec<AdmissionEffect> {
        match input {
            AdmissionInput::Opened => self.on_opened(),
            AdmissionInput::LookedFor { sought, present } => self.on_looked_for(sought, present),
            AdmissionInput::NewerCommitProven(id) => {
                self.change(id, AdmissionState::Absent, AdmissionState::Failed)
            }
            AdmissionInput::Found(id) => self.on_found(id),
            AdmissionInput::ReturnSlow(id, return_id) => self.on_return_slow(id, return_id),
            AdmissionInput::Examined(id, return_id) => self.on_examined(id, return_id),
            AdmissionInput::ReturnEnded(id, return_id) => self.on_return_ended(id, return_id),
            AdmissionInput::JoinBegan(id, kind) => self.on_join_began(id, kind),
            AdmissionInput::CaughtUp(id) => self.on_caught_up(id),
            AdmissionInput::CoresAnswered { member, all_write } => {
                self.on_cores_answered(member, all_write)
            }
            AdmissionInput::JoinEnded { member, is_committed, is_member, is_voter } => {
                self.on_join_ended(member, is_committed, (is_member, is_voter))
            }
            AdmissionInput::WriteFailed { member, is_voter } => {
                self.on_write_failed(member, is_voter)
            }
            AdmissionInput::VersionWritten { voters } => self.on_version_written(voters),
            AdmissionInput::Abandoned(id) => self.on_abandoned(id),
            AdmissionInput::ReportedFailed { member, join_generation } => {
                self.on_reported_failed(member, join_generation)
            }
            AdmissionInput::ReportedUnresponsive { member, join_generation } => {
                self.on_reported_unresponsive(member, join_generation)
            }
            AdmissionInput::SilenceConfirmed(id) => self.on_silence_confirmed(id),
            AdmissionInput::RemovalBegan(id) => self.mark_leaving(id, true),
            AdmissionInput::RemovalCancelled(id) => self.mark_leaving(id, false),
            AdmissionInput::Removed(id) => self.on_removed(id),
        }
    }

    /// Changes a state, if it is `from`.
    fn change(
        &mut self,
        id: MemberId,
        from: AdmissionState,
        to: AdmissionState,
    ) -> Vec<AdmissionEffect> {
        if self.state(id) == from {
            self.set(id, to);
        }
        Vec::new()
    }

    fn on_opened(&mut self) -> Vec<AdmissionEffect> {
        for disk in self.disks.values_mut().filter(|disk| disk.state == AdmissionState::Failed) {
            disk.state = AdmissionState::Absent;
        }
        Vec::new()
    }

    fn on_looked_for(&mut self, sought: MemberSet, present: MemberSet) -> Vec<AdmissionEffect> {
        let mut effects = Vec::new();
        for id in sought.iter() {
            match (self.state(id), present.contains(id)) {
                (AdmissionState::Absent, true) => effects.push(AdmissionEffect::Identify(id)),
                (AdmissionState::Failed, false) => self.set(id, AdmissionState::Absent),
                (AdmissionState::Returning(ReturnStage::Slow, attempt), false) => {
                    let attempt = Attempt { was_missing: true, ..attempt };
                    self.set(id, AdmissionState::Returning(ReturnStage::Slow, attempt));
                }
                _ => {}
            }
        }
        effects
    }

    fn on_found(&mut self, id: MemberId) -> Vec<AdmissionEffect> {
        if self.state(id) != AdmissionState::Absent {
            return Vec::new();
        }
        self.last_return.0 += 1;
        let return_id = self.last_return;
        let attempt = Attempt { return_id: Some(return_id), ..Attempt::default() };
        self.set(id, AdmissionState::Returning(ReturnStage::Examining, attempt));
        vec![AdmissionEffect::Reattach(id, return_id)]
    }

    /// The stage of this return, and what is known of it; `None` if it has ended.
    fn current_return(&self, id: MemberId, return_id: ReturnId) -> Option<(ReturnStage, Attempt)> {
        match self.state(id) {
            AdmissionState::Returning(stage, attempt) if attempt.return_id == Some(return_id) => {
                Some((stage, attempt))
            }
            _ => None,
        }
    }

    fn on_return_slow(&mut self, id: MemberId, return_id: ReturnId) -> Vec<AdmissionEffect> {
        let Some((ReturnStage::Examining, attempt)) = self.current_return(id, return_id) else {
            return Vec::new();
        };
        self.set(id, AdmissionState::Returning(ReturnStage::Slow, attempt));
        vec![AdmissionEffect::RebuildColumns]
    }

    fn on_examined(&mut self, id: MemberId, return_id: ReturnId) -> Vec<AdmissionEffect> {
        if let Some((_, attempt)) = self.current_return(id, return_id) {
            self.set(id, AdmissionState::Returning(ReturnStage::Ready, attempt));
        }
        Vec::new()
    }

    fn on_return_ended(&mut self, id: MemberId, return_id: ReturnId) -> Vec<AdmissionEffect> {
        if let Some((_, attempt)) = self.current_return(id, return_id) {
            self.set(id, attempt.failed_state());
        }
        Vec::new()
    }

    fn on_join_began(&mut self, id: MemberId, kind: JoinKind) -> Vec<AdmissionEffect> {
        let is_joining = |state| matches!(state, AdmissionState::Joining(..));
        let attempt = match (self.state(id), kind) {
            (AdmissionState::Unassigned, JoinKind::New) => {
                let was_abandoned = self.disks.get(&id).is_some_and(|disk| disk.was_abandoned);
                Some(Attempt { was_abandoned, ..Attempt::default() })
            }
            (
                AdmissionState::Returning(ReturnStage::Ready, attempt),
                JoinKind::Return(return_id),
            ) => Some(attempt).filter(|attempt| attempt.return_id == Some(return_id)),
            _ => None,
        };
        let Some(attempt) = attempt.filter(|_| self.members_with(is_joining).is_empty()) else {
            return Vec::new();
        };
        let disk = self.disks.entry(id).or_default();
        disk.join_generation += 1;
        disk.state = AdmissionState::Joining(JoinStage::CatchingUp, attempt);
        vec![AdmissionEffect::CatchUp(id)]
    }

    fn on_caught_up(&mut self, id: MemberId) -> Vec<AdmissionEffect> {
        let AdmissionState::Joining(stage, attempt) = self.state(id) else { return Vec::new() };
        match stage {
            JoinStage::CatchingUp => {
                let attempt = Attempt { was_abandoned: false, ..attempt };
                self.set(id, AdmissionState::Joining(JoinStage::Learning, attempt));
                vec![AdmissionEffect::AskCores(id)]
            }
            JoinStage::Learning | JoinStage::Committing => Vec::new(),
            JoinStage::Rejected | JoinStage::Stopped => vec![AdmissionEffect::CancelJoin(id)],
        }
    }

    fn on_cores_answered(&mut self, id: MemberId, all_write: bool) -> Vec<AdmissionEffect> {
        let AdmissionState::Joining(stage, attempt) = self.state(id) else { return Vec::new() };
        match stage {
            JoinStage::Learning if all_write => {
                self.set(id, AdmissionState::Joining(JoinStage::Committing, attempt));
                vec![AdmissionEffect::CommitVote(id)]
            }
            JoinStage::Learning => {
                self.set(id, AdmissionState::Joining(JoinStage::Rejected, attempt));
                vec![AdmissionEffect::CancelJoin(id)]
            }
            JoinStage::CatchingUp | JoinStage::Committing => Vec::new(),
            JoinStage::Rejected | JoinStage::Stopped => vec![AdmissionEffect::CancelJoin(id)],
        }
    }

    fn on_join_ended(
        &mut self,
        id: MemberId,
        is_committed: bool,
        (is_member, is_voter): (bool, bool),
    ) -> Vec<AdmissionEffect> {
        let AdmissionState::Joining(stage, attempt) = self.state(id) else { return Vec::new() };
        let mut effects = Vec::new();
        if is_voter && stage == JoinStage::Committing {
            let next = match attempt.was_abandoned {
                true => AdmissionState::Unresponsive,
                false => AdmissionState::Attached,
            };
            self.set(id, next);
        } else {
            if stage.is_learner() {
                effects.push(AdmissionEffect::StopVersions(id));
            }
            match is_member {
                true => self.set(id, attempt.failed_state()),
                false => self.disks.entry(id).or_default().release(),
            }
        }
        // Before it had caught up, no core knew of it.
        if !is_committed && stage != JoinStage::CatchingUp {
            effects.push(AdmissionEffect::AnnounceDetached(id));
        }
        effects
    }

    fn on_write_failed(&mut self, id: MemberId, is_voter: bool) -> Vec<AdmissionEffect> {
        let next = match self.state(id) {
            AdmissionState::Attached => AdmissionState::Failed,
            AdmissionState::Unresponsive => AdmissionState::Abandoned,
            AdmissionState::Joining(stage, attempt) if stage.is_learner() => {
                AdmissionState::Joining(JoinStage::Stopped, attempt)
            }
            _ => return Vec::new(),
        };
        self.set(id, next);
        let announced = is_voter.then_some(AdmissionEffect::AnnounceFailure(id));
        [AdmissionEffect::StopVersions(id)].into_iter().chain(announced).collect()
    }

    fn on_version_written(&mut self, voters: MemberSet) -> Vec<AdmissionEffect> {
        let mut effects = Vec::new();
        for (id, disk) in self.disks.iter_mut().filter(|(id, _)| !voters.contains(**id)) {
            disk.state = match disk.state {
                AdmissionState::Attached => AdmissionState::Failed,
                AdmissionState::Unresponsive => AdmissionState::Abandoned,
                _ => continue,
            };
            effects.push(AdmissionEffect::StopVersions(*id));
        }
        effects
    }

    fn on_abandoned(&mut self, id: MemberId) -> Vec<AdmissionEffect> {
        let abandoned = |attempt| Attempt { was_abandoned: true, ..attempt };
        let next = match self.state(id) {
            AdmissionState::Attached => AdmissionState::Unresponsive,
            AdmissionState::Failed | AdmissionState::Absent => AdmissionState::Abandoned,
            AdmissionState::Returning(stage, attempt) => {
                AdmissionState::Returning(stage, abandoned(attempt))
            }
            AdmissionState::Joining(stage, attempt) => {
                AdmissionState::Joining(stage, abandoned(attempt))
            }
            AdmissionState::Unassigned => {
                self.disks.entry(id).or_default().was_abandoned = true;
                AdmissionState::Unassigned
            }
            AdmissionState::Unresponsive
            | AdmissionState::Abandoned
            | AdmissionState::DeclaredLost => return Vec::new(),
        };
        self.set(id, next);
        vec![AdmissionEffect::HoldUntilIdle(id), AdmissionEffect::StopWaiting(id)]
    }

    fn on_reported_failed(&mut self, id: MemberId, generation: u64) -> Vec<AdmissionEffect> {
        if generation != self.join_generation(id) {
            return vec![AdmissionEffect::AwaitCommit];
        }
        match self.state(id) {
            AdmissionState::Joining(JoinStage::Committing, _) => {
                vec![AdmissionEffect::DetachAfterVote(id)]
            }
            AdmissionState::Joining(stage, attempt) => {
                self.set(id, AdmissionState::Joining(stage.after_failure(), attempt));
                vec![AdmissionEffect::Detach(id)]
            }
            _ => vec![AdmissionEffect::Detach(id)],
        }
    }

    fn on_reported_unresponsive(&mut self, id: MemberId, generation: u64) -> Vec<AdmissionEffect> {
        if generation != self.join_generation(id) {
            return vec![AdmissionEffect::AwaitCommit];
        }
        match self.state(id) {
            AdmissionState::Joining(..) => vec![AdmissionEffect::ProbeOthers(id)],
            _ => vec![AdmissionEffect::DetachIfPossible(id)],
        }
    }

    /// Rejects a joining disk without a check of the redundancy: no data depend on it before its
    /// vote. While its vote is being committed, the commit waits for it.
    fn on_silence_confirmed(&mut self, id: MemberId) -> Vec<AdmissionEffect> {
        if let AdmissionState::Joining(stage, attempt) = self.state(id)
            && stage != JoinStage::Committing
        {
            self.set(id, AdmissionState::Joining(stage.after_failure(), attempt));
        }
        Vec::new()
    }

    /// Whether the admission of the disk has failed, or will.
    pub(super) fn is_join_rejected(&self, id: MemberId) -> bool {
        matches!(
            self.state(id),
            AdmissionState::Joining(JoinStage::Rejected | JoinStage::Stopped, _)
        )
    }

    fn mark_leaving(&mut self, id: MemberId, is_leaving: bool) -> Vec<AdmissionEffect> {
        if let Some(disk) = self.disks.get_mut(&id)
            && disk.state != AdmissionState::Unassigned
        {
            disk.is_leaving = is_leaving;
        }
        Vec::new()
    }

    fn on_removed(&mut self, id: MemberId) -> Vec<AdmissionEffect> {
        let followed = self.followers().contains(id);
        self.disks.entry(id).or_default().release();
        followed.then_some(AdmissionEffect::StopVersions(id)).into_iter().collect()
    }
}

impl JoinStage {
    /// Whether the disk gets every version.
    fn is_learner(self) -> bool {
        matches!(self, Self::Learning | Self::Committing | Self::Rejected)
    }

    /// The stage after a failure was reported.
    fn after_failure(self) -> Self {
        match self {
            Self::Learning | Self::Committing | Self::Rejected => Self::Rejected,
            // It gets no versions, and is to get none.
            Self::CatchingUp | Self::Stopped => Self::Stopped,
        }
    }
}
