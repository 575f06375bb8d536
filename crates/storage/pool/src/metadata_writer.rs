//! Writes metadata versions: queued changes become the next version, which is written to all of its
//! voters.
//!
//! A commit completes when its version is committed, or, for membership changes, once all voters
//! know of the commit ([RFD 0030](../../../../docs/rfd/0030-pools.md), 5). The next version
//! detaches a member that fails to write one.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use pool_metadata::quorum::may_drop_absent;
use pool_metadata::{Change, MemberId, MemberSet, Metadata, PoolMemberState, VersionId};
use raid::DiskCounters;
use rt::disk::{DiskError, DiskErrorKind};
use tokio::sync::{Mutex, Notify, mpsc, oneshot};
use tokio::time::timeout;

use super::disk_admission::{AdmissionEffect, AdmissionInput, DiskAdmission};
use super::disk_claims::pool_claim_lost;
use super::error::{PoolError, metadata_io_error};
use super::error_counts::{add_counts, total_counts};
use super::member_disk::{DISK_TIMEOUT, LONG_DISK_TIMEOUT, MemberDisk};
use super::member_label::MemberLabel;
use super::response_tracker::ResponseTracker;
use super::version_log::{Acknowledgement, CommitRequest, VersionLog};

/// How long the other disks may take to answer a probe before one is abandoned.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an abandoned disk is held at least.
const MIN_HOLD_TIME: Duration = Duration::from_secs(20);

/// Writes the versions of a pool's metadata to its members.
#[derive(Debug)]
pub(super) struct MetadataWriter {
    metadata: RefCell<Metadata>,
    state: RefCell<WriterState>,
    work_available: Notify,
    /// Held while a version is written or a learner added.
    write_lock: Mutex<()>,
    abandoned_changed: Notify,
    probe_answered: Notify,
    /// Gets members that failed to write a version or snapshot.
    failed_members: mpsc::UnboundedSender<MemberId>,
}

/// What the writer knows besides the metadata: plain data, never borrowed across an `await`.
#[derive(Debug, Default)]
struct WriterState {
    log: VersionLog,
    admission: DiskAdmission,
    /// The disks of the members that get every version: they hold the last one, or it is being
    /// written.
    disks: BTreeMap<MemberId, Rc<MemberDisk>>,
    /// Error counts of disks, detached ones included.
    counters: BTreeMap<MemberId, Arc<DiskCounters>>,
    /// Members that have been probed and have not answered.
    probed: MemberSet,
    fatal_error: Option<PoolError>,
    is_closed: bool,
    is_snapshotting: bool,
}

impl MetadataWriter {
    /// A writer that continues from `metadata`, which all these disks hold. [`Self::run`] writes.
    pub(super) fn new(
        metadata: Metadata,
        disks: BTreeMap<MemberId, Rc<MemberDisk>>,
        declared_lost: MemberSet,
        failed_members: mpsc::UnboundedSender<MemberId>,
    ) -> Rc<Self> {
        for (id, disk) in &disks {
            let before = metadata.member(*id).map(|member| member.error_counts);
            add_counts(&disk.counters(), before.unwrap_or_default());
        }
        let members = metadata.members().map(|(id, m)| (id, m.state == PoolMemberState::Draining));
        let supporters = disks.keys().copied().collect();
        let state = WriterState {
            log: VersionLog::new(metadata.committed_version()),
            admission: DiskAdmission::new(members, supporters, declared_lost),
            counters: disks.iter().map(|(id, disk)| (*id, disk.counters())).collect(),
            disks,
            ..WriterState::default()
        };
        Rc::new(Self {
            metadata: RefCell::new(metadata),
            state: RefCell::new(state),
            work_available: Notify::new(),
            write_lock: Mutex::new(()),
            abandoned_changed: Notify::new(),
            probe_answered: Notify::new(),
            failed_members,
        })
    }

    /// Another machine has claimed the pool: nothing is read or written any more.
    pub(super) fn fence(&self, why: &PoolError) {
        let leases = self.disks().into_iter().filter_map(|(_, disk)| disk.lease());
        leases.for_each(|lease| lease.revoke());
        self.fail(why);
        self.work_available.notify_one();
    }

    /// Checks that this machine still has the claims of all disks.
    ///
    /// # Errors
    /// That another machine has the pool.
    async fn verify_claims(&self) -> Result<(), PoolError> {
        let (disks, pool) = (self.disks(), self.metadata().pool_id);
        let all = join_all(disks.iter().map(|(_, disk)| disk.verify_claim())).await;
        let taken = all
            .into_iter()
            .filter_map(Result::err)
            .find(|lost| lost.new_owner.as_ref().is_some_and(|by| by.subject.set_id == pool));
        let Some(lost) = taken else { return Ok(()) };
        let why = pool_claim_lost(&lost);
        self.fence(&why);
        Err(why)
    }

    /// The metadata as of the last version, which may not be committed yet.
    pub(super) fn metadata(&self) -> Ref<'_, Metadata> {
        self.metadata.borrow()
    }

    /// The disk of a member that gets every version.
    pub(super) fn disk(&self, member: MemberId) -> Option<Rc<MemberDisk>> {
        self.state.borrow().disks.get(&member).cloned()
    }

    /// What is known of the disks. The guard must not be kept while anything else of the pool is
    /// called.
    pub(super) fn admission(&self) -> Ref<'_, DiskAdmission> {
        Ref::map(self.state.borrow(), |state| &state.admission)
    }

    /// Reports what has happened to a disk. Carries out the effects that concern the disks which
    /// get versions, and returns the others.
    pub(super) fn apply(&self, input: AdmissionInput) -> Vec<AdmissionEffect> {
        let mut effects = self.state.borrow_mut().admission.apply(input);
        effects.retain(|effect| !self.carry_out(*effect));
        effects
    }

    /// Whether the effect concerned the disks that get versions, and so has been carried out.
    fn carry_out(&self, effect: AdmissionEffect) -> bool {
        match effect {
            AdmissionEffect::StopVersions(id) => {
                let disk = self.state.borrow_mut().disks.remove(&id);
                drop(disk);
            }
            AdmissionEffect::HoldUntilIdle(id) => {
                self.disk(id).into_iter().for_each(hold_until_idle);
            }
            AdmissionEffect::StopWaiting(_) => self.abandoned_changed.notify_waiters(),
            AdmissionEffect::AnnounceFailure(id) => drop(self.failed_members.send(id)),
            AdmissionEffect::Identify(_)
            | AdmissionEffect::Reattach(..)
            | AdmissionEffect::RebuildColumns
            | AdmissionEffect::CatchUp(_)
            | AdmissionEffect::AskCores(_)
            | AdmissionEffect::CommitVote(_)
            | AdmissionEffect::CancelJoin(_)
            | AdmissionEffect::AnnounceDetached(_)
            | AdmissionEffect::Detach(_)
            | AdmissionEffect::DetachAfterVote(_)
            | AdmissionEffect::DetachIfPossible(_)
            | AdmissionEffect::ProbeOthers(_)
            | AdmissionEffect::AwaitCommit => return false,
        }
        true
    }

    /// Error counts of a disk that has been in use since the pool was opened.
    pub(super) fn counters(&self, member: MemberId) -> Option<Arc<DiskCounters>> {
        self.state.borrow().counters.get(&member).cloned()
    }

    /// All disks that get every version.
    pub(super) fn disks(&self) -> Vec<(MemberId, Rc<MemberDisk>)> {
        self.state.borrow().disks.iter().map(|(id, disk)| (*id, Rc::clone(disk))).collect()
    }

    /// Why nothing more is written, if so.
    pub(super) fn fatal_error(&self) -> Option<PoolError> {
        self.state.borrow().fatal_error.clone()
    }

    /// Makes a change, and completes when its version is committed; for membership changes, when
    /// all voters know.
    ///
    /// # Errors
    /// Why the change is refused, which has no effect then; or why the pool is not written any
    /// more.
    pub(super) async fn commit(&self, change: Change) -> Result<(), PoolError> {
        self.commit_all(vec![change]).await
    }

    /// The same with changes that are made in one version. Only the first of them may be refused.
    pub(super) async fn commit_all(&self, changes: Vec<Change>) -> Result<(), PoolError> {
        let (reply, outcome) = oneshot::channel();
        let waits_until_known = changes.iter().any(changes_voters);
        self.enqueue(CommitRequest::new(changes, waits_until_known, Some(reply)));
        outcome.await.unwrap_or_else(|_| Err(closed_error()))
    }

    /// Detaches a member that failed, and completes when all voters know. Returns whether it was
    /// attached before.
    ///
    /// # Errors
    /// Why it cannot be detached.
    pub(super) async fn detach(&self, id: MemberId) -> Result<bool, PoolError> {
        let since = || match self.metadata().member(id).map(|member| member.state) {
            Some(PoolMemberState::Detached { since, .. }) => Some(since),
            Some(_) => None,
            None => Some(0),
        };
        if since().is_none() {
            let committed = self.commit(Change::Detach(id)).await;
            // It may have been detached here as well meanwhile.
            if committed.is_ok() || since().is_none() {
                return committed.map(|()| true);
            }
        }
        match since() {
            // The detachment may not be committed yet: wait until it is.
            Some(since) if since > self.state.borrow().log.commit_known() => {
                self.await_commit().await.map(|()| false)
            }
            _ => Ok(false),
        }
    }

    /// The same for a member that queued requests admit: it is detached after that.
    ///
    /// # Errors
    /// Why it cannot be detached.
    pub(super) async fn detach_after_queued(&self, id: MemberId) -> Result<bool, PoolError> {
        match self.commit(Change::Detach(id)).await {
            Ok(()) => Ok(true),
            // It was not admitted, or another request has detached it.
            Err(_) => self.detach(id).await,
        }
    }

    /// Detaches a member that does not answer, like the others in `unresponsive`: if all of these
    /// may be abandoned, and if it is still unresponsive after the other disks have been probed.
    /// Completes when all voters know. Returns whether it was attached before; `None` if it must be
    /// waited for.
    ///
    /// # Errors
    /// Why it cannot be detached.
    pub(super) async fn detach_unresponsive(
        self: &Rc<Self>,
        id: MemberId,
        unresponsive: MemberSet,
        is_still_silent: impl Fn() -> bool,
    ) -> Result<Option<bool>, PoolError> {
        if !self.may_abandon(unresponsive.with(id)).await || !is_still_silent() {
            return Ok(None);
        }
        self.apply(AdmissionInput::Abandoned(id));
        self.detach(id).await.map(Some)
    }

    /// Members that do not answer: nothing waits for them any more.
    fn abandoned(&self) -> MemberSet {
        self.admission().abandoned()
    }

    fn probed(&self) -> MemberSet {
        self.state.borrow().probed
    }

    fn is_closed(&self) -> bool {
        self.state.borrow().is_closed
    }

    /// Whether all of these may be abandoned, given how the other disks answer now: what stopped
    /// these may since have stopped the others too.
    async fn may_abandon(self: &Rc<Self>, unresponsive: MemberSet) -> bool {
        self.may_run_without(unresponsive)
            && self
                .may_run_without(unresponsive.union(self.unresponsive_others(unresponsive).await))
    }

    /// Whether any other disk answers; true if there are none.
    pub(super) async fn others_respond(self: &Rc<Self>, id: MemberId) -> bool {
        let itself = MemberSet::default().with(id);
        let silent = self.unresponsive_others(itself).await;
        let mut others = self.other_disks(itself).map(|(id, _)| id).peekable();
        others.peek().is_none() || others.any(|id| !silent.contains(id))
    }

    /// All disks but `excluded` and those abandoned.
    fn other_disks(
        &self,
        excluded: MemberSet,
    ) -> impl Iterator<Item = (MemberId, Rc<MemberDisk>)> + use<> {
        let excluded = excluded.union(self.abandoned());
        self.disks().into_iter().filter(move |(id, _)| !excluded.contains(*id))
    }

    /// The disks among them that do not answer a probe within [`PROBE_TIMEOUT`].
    async fn unresponsive_others(self: &Rc<Self>, excluded: MemberSet) -> MemberSet {
        for (id, disk) in self.other_disks(excluded) {
            // A disk with a probe outstanding is not probed again.
            if self.probed().contains(id) {
                continue;
            }
            {
                let probed = &mut self.state.borrow_mut().probed;
                *probed = probed.with(id);
            }
            let this = Rc::clone(self);
            tokio::task::spawn_local(async move {
                disk.wait_response().await;
                {
                    let probed = &mut this.state.borrow_mut().probed;
                    *probed = probed.without_member(id);
                }
                this.probe_answered.notify_waiters();
            });
        }
        let others: MemberSet = self.other_disks(excluded).map(|(id, _)| id).collect();
        let all_answer = async {
            loop {
                let answered = self.probe_answered.notified();
                if self.probed().intersection(others).is_empty() {
                    return;
                }
                answered.await;
            }
        };
        let _ = timeout(PROBE_TIMEOUT, all_answer).await;
        self.probed().intersection(others)
    }

    /// Whether the pool can go on without these members and loses no data.
    fn may_run_without(&self, unresponsive: MemberSet) -> bool {
        let metadata = self.metadata();
        let present = metadata.voters().difference(unresponsive.union(self.abandoned()));
        let detached = metadata.members().filter(|(id, _)| !present.contains(*id)).count();
        let is_empty = metadata.volumes().all(|(_, volume)| volume.extents().next().is_none());
        let holds_nothing =
            |id| metadata.member(id).is_none_or(|member| member.allocated_count() == 0);
        let tolerates_loss = match is_empty {
            // New writes must be as redundant as the level allows.
            true => detached <= usize::from(metadata.geometry.redundancy().fault_tolerance()),
            // Members that hold nothing can be lost without losing data.
            false => {
                unresponsive.iter().all(holds_nothing)
                    || metadata
                        .volumes()
                        .all(|(_, v)| metadata.fault_tolerance(v, present).is_some())
            }
        };
        tolerates_loss && {
            let declared_lost = self.admission().declared_lost();
            may_drop_absent(metadata.voter_history(), present, declared_lost)
        }
    }

    /// Does work at each of these members, and waits for all but those that are abandoned. Members
    /// that do not answer for `patience` while others do are abandoned here, if that is allowed.
    pub(super) async fn for_each_member<T, F>(
        self: &Rc<Self>,
        patience: Duration,
        each: impl IntoIterator<Item = (MemberId, F)>,
    ) -> Vec<(MemberId, Result<T, DiskError>)>
    where
        F: Future<Output = Result<T, DiskError>>,
    {
        let tracker = ResponseTracker::default();
        let each = each.into_iter().map(|(id, work)| {
            tracker.sent(id);
            let (tracker, work) = (&tracker, self.unless_abandoned(id, work));
            async move {
                let outcome = work.await;
                match self.abandoned().contains(id) {
                    true => tracker.abandoned(id),
                    false => tracker.answered(id),
                }
                (id, outcome)
            }
        });
        let all = join_all(each);
        tokio::select! {
            biased;
            outcomes = all => outcomes,
            () = self.abandon_unresponsive(patience, &tracker) => Vec::new(),
        }
    }

    /// Does work with each disk, in a task of its own that continues if its disk is abandoned; see
    /// [`Self::for_each_member`].
    pub(super) async fn for_each_in_task<T: 'static, F>(
        self: &Rc<Self>,
        patience: Duration,
        work: impl Fn(Rc<MemberDisk>) -> F,
    ) -> Vec<(MemberId, Rc<MemberDisk>, Result<T, PoolError>)>
    where
        F: Future<Output = Result<T, PoolError>> + 'static,
    {
        let disks = self.disks();
        let each = disks.iter().map(|(id, disk)| {
            let task = tokio::task::spawn_local(work(Rc::clone(disk)));
            let ended = |_| DiskError { kind: DiskErrorKind::Other, errno: 0 };
            (*id, async move { task.await.map_err(ended) })
        });
        let done = self.for_each_member(patience, each).await.into_iter().zip(&disks);
        done.map(|((id, outcome), (_, disk))| {
            let outcome = outcome.unwrap_or_else(|why| Err(metadata_io_error(disk.path(), why)));
            (id, Rc::clone(disk), outcome)
        })
        .collect()
    }

    /// Abandons the members that have been silent for `patience` while others answered. Never ends.
    async fn abandon_unresponsive(self: &Rc<Self>, patience: Duration, tracker: &ResponseTracker) {
        loop {
            let unresponsive = tracker
                .wait_unresponsive(patience, |unresponsive| self.may_run_without(unresponsive))
                .await;
            // Some may have answered meanwhile.
            if self.may_abandon(unresponsive).await {
                for id in unresponsive.intersection(tracker.unanswered()).iter() {
                    self.apply(AdmissionInput::Abandoned(id));
                }
            }
        }
    }

    /// The outcome of `work`, unless the member is abandoned meanwhile.
    async fn unless_abandoned<T>(
        &self,
        id: MemberId,
        work: impl Future<Output = Result<T, DiskError>>,
    ) -> Result<T, DiskError> {
        let abandoned = async {
            loop {
                let changed = self.abandoned_changed.notified();
                if self.abandoned().contains(id) {
                    return;
                }
                changed.await;
            }
        };
        // Requests in flight go on, and keep their memory and the disk.
        tokio::select! {
            biased;
            done = work => done,
            () = abandoned => Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 }),
        }
    }

    /// The outcome of `work` at a learner's disk, unless it makes no progress for [`DISK_TIMEOUT`]
    /// while others answer, or the writer is closed.
    async fn unless_stuck<T>(
        self: &Rc<Self>,
        id: MemberId,
        disk: &MemberDisk,
        work: impl Future<Output = Result<T, DiskError>>,
    ) -> Result<T, DiskError> {
        let is_stuck = async {
            loop {
                let before = disk.completed_writes();
                ResponseTracker::single(id).wait_unresponsive(DISK_TIMEOUT, |_| true).await;
                let moves = || disk.completed_writes() != before;
                if self.is_closed() || (!moves() && self.others_respond(id).await && !moves()) {
                    return;
                }
            }
        };
        // Requests in flight go on, and keep the disk open.
        tokio::select! {
            biased;
            done = work => done,
            () = is_stuck => Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 }),
        }
    }

    /// The last version, and the disks that get every version; all of them hold it.
    ///
    /// # Errors
    /// Why nothing more is written: the last version may be on no disk then.
    pub(super) async fn durable_version(
        &self,
    ) -> Result<(VersionId, Vec<(MemberId, Rc<MemberDisk>)>), PoolError> {
        // A version that is being written is not on all disks yet.
        let _guard = self.write_lock.lock().await;
        self.check_running()?;
        Ok((self.metadata().version_id(), self.disks()))
    }

    fn check_running(&self) -> Result<(), PoolError> {
        match self.fatal_error() {
            Some(why) => Err(why),
            None if self.is_closed() => Err(closed_error()),
            None => Ok(()),
        }
    }

    /// Completes once all voters know that earlier changes are committed.
    pub(super) async fn await_commit(&self) -> Result<(), PoolError> {
        let (reply, outcome) = oneshot::channel();
        self.enqueue(CommitRequest::new(Vec::new(), true, Some(reply)));
        outcome.await.unwrap_or_else(|_| Err(closed_error()))
    }

    fn enqueue(&self, request: CommitRequest) {
        match self.check_running() {
            Err(why) => request.complete(Err(why)),
            Ok(()) => {
                self.state.borrow_mut().log.enqueue(request);
                self.work_available.notify_one();
            }
        }
    }

    /// Writes versions until [`Self::close`].
    pub(super) async fn run(self: Rc<Self>) {
        while !self.is_closed() && self.fatal_error().is_none() {
            let has_work = self.state.borrow().log.has_work();
            if has_work {
                let _guard = self.write_lock.lock().await;
                if let Err(why) = self.write_version().await {
                    self.fail(&why);
                }
                Self::snapshot_if_due(&self);
            } else {
                self.work_available.notified().await;
            }
        }
    }

    /// Ends writing, and fails the requests that wait. Its disks can then be reopened even if this
    /// object still exists, except those with requests in flight.
    pub(super) async fn close(&self) {
        self.state.borrow_mut().is_closed = true;
        self.work_available.notify_one();
        let _guard = self.write_lock.lock().await;
        self.fail_requests(&closed_error());
        let disks = std::mem::take(&mut self.state.borrow_mut().disks);
        drop(disks);
    }

    fn fail(&self, why: &PoolError) {
        tracing::error!(error = %why, "no more metadata is written to the pool");
        self.state.borrow_mut().fatal_error.get_or_insert_with(|| why.clone());
        self.fail_requests(why);
    }

    fn fail_requests(&self, why: &PoolError) {
        let requests = self.state.borrow_mut().log.take_requests();
        requests.into_iter().for_each(|request| request.complete(Err(why.clone())));
    }

    async fn write_version(self: &Rc<Self>) -> Result<(), PoolError> {
        self.verify_claims().await?;
        let disks = self.disks();
        let mut proposal = {
            let metadata = &mut *self.metadata.borrow_mut();
            let WriterState { log, admission, .. } = &mut *self.state.borrow_mut();
            log.propose(metadata, admission.followers(), admission.declared_lost())?
        };
        let voters = proposal.voters;
        let targets = voters.union(self.admission().learners());
        let targets = disks.iter().filter(|(id, _)| targets.contains(*id));
        let each = targets.map(|(id, disk)| (*id, disk.write_block(&proposal.block)));
        for (id, outcome) in self.for_each_member(DISK_TIMEOUT, each).await {
            let is_written = outcome.is_ok();
            let answer = self.state.borrow_mut().log.acknowledge(&mut proposal, id, is_written);
            match (answer, outcome) {
                (Acknowledgement::VoterFailed, Err(why)) => {
                    let path = self.disk(id).map(|disk| disk.path().to_owned()).unwrap_or_default();
                    self.drop_failed_voter(id, &metadata_io_error(&path, why));
                }
                // The task that adds it sees that it failed.
                (Acknowledgement::LearnerFailed, _) => {
                    self.apply(AdmissionInput::WriteFailed { member: id, is_voter: false });
                }
                _ => {}
            }
        }
        self.apply(AdmissionInput::VersionWritten { voters });
        let complete = self.state.borrow_mut().log.commit(&proposal);
        complete.into_iter().for_each(|request| request.complete(Ok(())));
        Ok(())
    }

    /// A voter has failed, and the next version detaches it.
    fn drop_failed_voter(&self, id: MemberId, why: &PoolError) {
        tracing::error!(member = id.0, error = %why, "a disk of the pool is detached: replace it");
        self.apply(AdmissionInput::WriteFailed { member: id, is_voter: true });
    }

    /// Starts a snapshot if half a journal has been used since the last one.
    fn snapshot_if_due(this: &Rc<Self>) {
        let version = this.metadata().version_id().version;
        let is_due = |disk: &MemberDisk| {
            let blocks = u64::from(disk.label().layout.journal_blocks);
            version.saturating_sub(disk.latest_snapshot_version()) >= blocks / 2
        };
        let due = this.disks().iter().any(|(_, disk)| is_due(disk));
        let is_running =
            due && std::mem::replace(&mut this.state.borrow_mut().is_snapshotting, true);
        if !due || is_running {
            return;
        }
        let bytes = this.metadata().encode_snapshot();
        let this = Rc::clone(this);
        tokio::task::spawn_local(async move {
            this.write_snapshots(&bytes, version).await;
            this.state.borrow_mut().is_snapshotting = false;
        });
    }

    async fn write_snapshots(self: &Rc<Self>, bytes: &[u8], version: u64) {
        let disks = self.disks();
        let each = disks.iter().map(|(id, disk)| (*id, disk.write_snapshot(bytes, version)));
        for (id, outcome) in self.for_each_member(LONG_DISK_TIMEOUT, each).await {
            if let Err(why) = outcome
                && let Some(disk) = self.disk(id)
            {
                self.state.borrow_mut().log.detach_failed(id);
                self.drop_failed_voter(id, &metadata_io_error(disk.path(), why));
                self.work_available.notify_one();
            }
        }
    }

    /// Adds a disk as a learner: it gets the current metadata and every later version, and may
    /// become a voter with the next one. Its rings are empty. No version is written meanwhile.
    ///
    /// # Errors
    /// What fails; the disk gets no versions then.
    pub(super) async fn add_learner(
        self: &Rc<Self>,
        id: MemberId,
        disk: &Rc<MemberDisk>,
    ) -> Result<(), PoolError> {
        let _guard = self.write_lock.lock().await;
        self.check_running()?;
        let (bytes, version_id) = (self.metadata().encode_snapshot(), self.metadata().version_id());
        // A label may only name a version that was committed.
        let committed = self.state.borrow().log.committed();
        let term_start =
            self.metadata().version_id_of(committed).unwrap_or(disk.label().term_start);
        let prepared = async {
            disk.write_snapshot(&bytes, version_id.version).await?;
            disk.erase_journal_and_logs().await?;
            disk.write_label(MemberLabel { term_start, member_id: id, ..disk.label() }).await
        };
        let prepared = self.unless_stuck(id, disk, prepared).await;
        prepared.map_err(|why| metadata_io_error(disk.path(), why))?;
        self.carry_counters_over(id, disk);
        if self.apply(AdmissionInput::CaughtUp(id)) == [AdmissionEffect::AskCores(id)] {
            self.state.borrow_mut().disks.insert(id, Rc::clone(disk));
        }
        Ok(())
    }

    /// Carries the counts of a returning member over to its new disk object; a new disk starts at
    /// zero.
    fn carry_counters_over(&self, id: MemberId, disk: &MemberDisk) {
        if self.counters(id).is_some_and(|known| Arc::ptr_eq(&known, &disk.counters())) {
            return;
        }
        let metadata = self.metadata();
        let member = metadata.member(id).filter(|member| member.uuid == disk.label().member_uuid);
        let before = member.map(|member| match self.counters(id) {
            Some(errors) => total_counts(&errors, member.error_counts.since_s),
            None => member.error_counts,
        });
        add_counts(&disk.counters(), before.unwrap_or_default());
        self.state.borrow_mut().counters.insert(id, disk.counters());
    }

    /// The admission of a disk has ended: it is a voter now, or gets no more versions. Returns what
    /// is to be done.
    pub(super) fn end_join(&self, id: MemberId, is_committed: bool) -> Vec<AdmissionEffect> {
        let (is_member, is_voter) = {
            let metadata = self.metadata();
            (metadata.member(id).is_some(), metadata.voters().contains(id))
        };
        self.apply(AdmissionInput::JoinEnded { member: id, is_committed, is_member, is_voter })
    }
}

/// Keeps an abandoned disk open while requests to it are in flight, so that no other opens it:
/// they would overwrite later writes. Other cores that have it open do not hold it this long.
pub(super) fn hold_until_idle(disk: Rc<MemberDisk>) {
    tokio::task::spawn_local(async move {
        let errors = disk.counters();
        // By then all cores have stopped waiting for it.
        tokio::time::sleep(MIN_HOLD_TIME).await;
        while errors.orphaned_io.load(Ordering::Relaxed) > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
}

fn changes_voters(change: &Change) -> bool {
    matches!(
        change,
        Change::StartTerm { .. }
            | Change::AddMember { .. }
            | Change::Detach(_)
            | Change::Reattach { .. }
            | Change::RemoveMember(_)
    )
}

fn closed_error() -> PoolError {
    PoolError::new("the pool is closed")
}
