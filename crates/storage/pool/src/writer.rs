//! Versions: changes that are ready become the next one, which is written to all that have a vote in it.
//!
//! Whoever commits a change is told when its version counts, or, where votes change, when it is known of it that it counts
//! ([RFD 0030](../../../../docs/rfd/0030-pools.md), 5). A member that does not take a version is out with the next one.

use std::cell::{Cell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use raid::Errors;
use rt::disk::{DiskError, DiskErrorKind};
use tokio::sync::{Mutex, Notify, mpsc, oneshot};
use tokio::time::timeout;

use super::disk::MemberDisk;
use super::error::{PoolError, failed};
use super::journal::Block;
use super::label::Label;
use super::metadata::{Change, MemberId, Members, Metadata, Stamp, Standing};
use super::multihost::pool_lost;
use super::owner::counted::{counted, go_on};
use super::silent::Silent;
use super::vote::{Roll, Written, may_count, may_do_without};

/// How long a member may leave a version unanswered that others have taken,
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// and what is longer than a block, or asked of a disk that may have to spin up first.
pub(super) const LONG_PATIENCE: Duration = Duration::from_secs(60);

/// How long others may take to answer once more before one is given up.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// How long a disk that was given up is held.
const HELD_AT_LEAST: Duration = Duration::from_secs(20);

/// What is written of a pool's metadata, and to whom.
#[derive(Debug)]
pub(super) struct Writer {
    metadata: RefCell<Metadata>,
    /// Those that get every version: what they hold is the last one, or it is being written.
    disks: RefCell<BTreeMap<MemberId, Rc<MemberDisk>>>,
    /// What is counted of disks, those that are out among them.
    errors: RefCell<BTreeMap<MemberId, Arc<Errors>>>,
    /// Those of them that have no vote yet.
    rising: RefCell<BTreeSet<MemberId>>,
    /// Members that a person has said are gone for good.
    excused: Members,
    /// The last version that is known to count,
    counted: Cell<u64>,
    /// and the last one of which all with a vote know it.
    known: Cell<u64>,
    waiting: RefCell<VecDeque<Waiting>>,
    /// Those whose version does not count yet, or not as they want it.
    pending: RefCell<Vec<(u64, Waiting)>>,
    wake: Notify,
    /// Whoever writes a version, or brings a member up.
    alone: Mutex<()>,
    broken: RefCell<Option<PoolError>>,
    /// Members that do not answer: nobody waits for them any more.
    given_up: Cell<Members>,
    gives_up: Notify,
    /// Members that are asked whether they answer, and have not.
    asked: Cell<Members>,
    answered: Notify,
    is_closed: Cell<bool>,
    is_snapshotting: Cell<bool>,
    /// Told of members that are out because they did not take a version.
    failing: mpsc::UnboundedSender<MemberId>,
}

#[derive(Debug)]
struct Waiting {
    changes: Vec<Change>,
    /// Whether it has to be known that it counts.
    settles: bool,
    answer: Option<oneshot::Sender<Result<(), PoolError>>>,
}

impl Waiting {
    fn end(&mut self, outcome: Result<(), PoolError>) {
        if let Some(answer) = self.answer.take() {
            // Nobody waits any more: it is done all the same.
            let _ = answer.send(outcome);
        }
    }
}

impl Writer {
    /// A writer that goes on from `metadata`, which all these disks hold. [`Self::run`] writes.
    pub(super) fn new(
        metadata: Metadata,
        disks: BTreeMap<MemberId, Rc<MemberDisk>>,
        excused: Members,
        failing: mpsc::UnboundedSender<MemberId>,
    ) -> Rc<Self> {
        for (id, disk) in &disks {
            let before = metadata.member(*id).map(|member| member.errors);
            go_on(&disk.errors(), before.unwrap_or_default());
        }
        Rc::new(Self {
            errors: RefCell::new(disks.iter().map(|(id, disk)| (*id, disk.errors())).collect()),
            counted: Cell::new(metadata.counted()),
            known: Cell::new(metadata.counted()),
            metadata: RefCell::new(metadata),
            disks: RefCell::new(disks),
            rising: RefCell::default(),
            excused,
            waiting: RefCell::default(),
            pending: RefCell::default(),
            wake: Notify::new(),
            alone: Mutex::new(()),
            broken: RefCell::default(),
            given_up: Cell::default(),
            gives_up: Notify::new(),
            asked: Cell::default(),
            answered: Notify::new(),
            is_closed: Cell::new(false),
            is_snapshotting: Cell::new(false),
            failing,
        })
    }

    /// Another machine has the pool: nothing is read or written any more.
    pub(super) fn lose(&self, why: &PoolError) {
        let leases = self.disks().into_iter().filter_map(|(_, disk)| disk.lease());
        leases.for_each(|lease| lease.lose());
        self.give_up(why);
        self.wake.notify_one();
    }

    /// Looks whether all disks are still this machine's.
    ///
    /// # Errors
    /// That another one has the pool.
    async fn verify(&self) -> Result<(), PoolError> {
        let (disks, pool) = (self.disks(), self.metadata().pool);
        let all = join_all(disks.iter().map(|(_, disk)| disk.verify())).await;
        let taken = all
            .into_iter()
            .filter_map(Result::err)
            .find(|lost| lost.to.as_ref().is_some_and(|by| by.subject.set == pool));
        let Some(lost) = taken else { return Ok(()) };
        let why = pool_lost(&lost);
        self.lose(&why);
        Err(why)
    }

    /// What is known, as of the last version, which may not count yet.
    pub(super) fn metadata(&self) -> Ref<'_, Metadata> {
        self.metadata.borrow()
    }

    /// The disk of a member that gets every version.
    pub(super) fn disk(&self, member: MemberId) -> Option<Rc<MemberDisk>> {
        self.disks.borrow().get(&member).cloned()
    }

    /// Whether a person has said with this opening that it is gone for good.
    pub(super) fn is_excused(&self, member: MemberId) -> bool {
        self.excused.has(member)
    }

    /// What is counted of a disk that has been there since the pool was opened.
    pub(super) fn errors(&self, member: MemberId) -> Option<Arc<Errors>> {
        self.errors.borrow().get(&member).cloned()
    }

    /// All of them.
    pub(super) fn disks(&self) -> Vec<(MemberId, Rc<MemberDisk>)> {
        self.disks.borrow().iter().map(|(id, disk)| (*id, Rc::clone(disk))).collect()
    }

    /// Why nothing more is written, if so.
    pub(super) fn broken(&self) -> Option<PoolError> {
        self.broken.borrow().clone()
    }

    /// Makes a change, and ends when its version counts; where it changes votes, when that is known.
    ///
    /// # Errors
    /// Why it cannot be made, and then nothing is changed; or why nothing more can be.
    pub(super) async fn commit(&self, change: Change) -> Result<(), PoolError> {
        self.commit_all(vec![change]).await
    }

    /// The same with changes that are made in one version. Only the first one of them may be refused.
    pub(super) async fn commit_all(&self, changes: Vec<Change>) -> Result<(), PoolError> {
        let (answer, outcome) = oneshot::channel();
        let settles = changes.iter().any(changes_votes);
        self.ask(Waiting { changes, settles, answer: Some(answer) });
        outcome.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// A member is out, as others have found. Ends when all others know. Whether it was not before.
    ///
    /// # Errors
    /// That it cannot be.
    pub(super) async fn put_out(&self, id: MemberId) -> Result<bool, PoolError> {
        let since = || match self.metadata().member(id).map(|member| member.standing) {
            Some(Standing::Out { since, .. }) => Some(since),
            Some(_) => None,
            None => Some(0),
        };
        if since().is_none() {
            let committed = self.commit(Change::Out(id)).await;
            // It may have been found here as well meanwhile.
            if committed.is_ok() || since().is_none() {
                return committed.map(|()| true);
            }
        }
        match since() {
            // That may not count yet: what comes next tells.
            Some(since) if since > self.known.get() => self.settle().await.map(|()| false),
            _ => Ok(false),
        }
    }

    /// The same of one that what is asked already lets in: it is out after that.
    ///
    /// # Errors
    /// That it cannot be.
    pub(super) async fn put_out_next(&self, id: MemberId) -> Result<bool, PoolError> {
        match self.commit(Change::Out(id)).await {
            Ok(()) => Ok(true),
            // It was not let in, or is out by what others have asked.
            Err(_) => self.put_out(id).await,
        }
    }

    /// A member does not answer, as others of these do not: it is out, if all of them may be, and if it still does not when others
    /// have been asked. Ends when all others know. Whether it was not out before; none if it is to be waited for.
    ///
    /// # Errors
    /// That it cannot be put out.
    pub(super) async fn give_up_on(
        self: &Rc<Self>,
        id: MemberId,
        silent: Members,
        still: impl Fn() -> bool,
    ) -> Result<Option<bool>, PoolError> {
        if !self.may_give_up(silent.with(id)).await || !still() {
            return Ok(None);
        }
        self.wait_no_more_for(id);
        self.put_out(id).await.map(Some)
    }

    /// Whether a member did not answer and is out for that: nothing is waited for there any more.
    pub(super) fn is_given_up(&self, id: MemberId) -> bool {
        self.given_up.get().has(id)
    }

    /// Whether all of these may be given up, as others answer now: what has stopped all of them may have begun after the last answer.
    async fn may_give_up(self: &Rc<Self>, silent: Members) -> bool {
        self.may_do_without(silent)
            && self.may_do_without(silent.or(self.silent_beside(silent).await))
    }

    /// Whether any disk beside this one answers, if there are any.
    pub(super) async fn others_answer(self: &Rc<Self>, id: MemberId) -> bool {
        let but = Members::default().with(id);
        let silent = self.silent_beside(but).await;
        let mut others = self.beside(but).map(|(id, _)| id).peekable();
        others.peek().is_none() || others.any(|id| !silent.has(id))
    }

    /// The disks but these, and but those that nobody waits for.
    fn beside(&self, but: Members) -> impl Iterator<Item = (MemberId, Rc<MemberDisk>)> + use<> {
        let but = but.or(self.given_up.get());
        self.disks().into_iter().filter(move |(id, _)| !but.has(*id))
    }

    /// Those of them that do not answer now, within [`ANSWERS_WITHIN`].
    async fn silent_beside(self: &Rc<Self>, but: Members) -> Members {
        for (id, disk) in self.beside(but) {
            // One that has not answered is not asked once more.
            if self.asked.get().has(id) {
                continue;
            }
            self.asked.set(self.asked.get().with(id));
            let this = Rc::clone(self);
            tokio::task::spawn_local(async move {
                disk.wait_for_answer().await;
                this.asked.set(this.asked.get().but(id));
                this.answered.notify_waiters();
            });
        }
        let others: Members = self.beside(but).map(|(id, _)| id).collect();
        let all_answer = async {
            loop {
                let answered = self.answered.notified();
                if self.asked.get().and(others).is_empty() {
                    return;
                }
                answered.await;
            }
        };
        let _ = timeout(ANSWERS_WITHIN, all_answer).await;
        self.asked.get().and(others)
    }

    /// Whether nothing is lost without these, and the pool can go on.
    fn may_do_without(&self, silent: Members) -> bool {
        let metadata = self.metadata();
        let there = metadata.voters().without(silent.or(self.given_up.get()));
        let out = metadata.members().filter(|(id, _)| !there.has(*id)).count();
        let is_empty = metadata.volumes().all(|(_, volume)| volume.extents().next().is_none());
        let holds_nothing = |id| metadata.member(id).is_none_or(|member| member.taken() == 0);
        let is_borne = match is_empty {
            // What would be written now.
            true => out <= usize::from(metadata.shape.level().bears()),
            // Without those that hold nothing no more is lost than was before.
            false => {
                silent.iter().all(holds_nothing)
                    || metadata.volumes().all(|(_, v)| metadata.bears(v, there).is_some())
            }
        };
        is_borne && may_do_without(metadata.window(), there, self.excused)
    }

    fn wait_no_more_for(&self, id: MemberId) {
        self.disk(id).into_iter().for_each(hold_while_busy);
        self.given_up.set(self.given_up.get().with(id));
        self.gives_up.notify_waiters();
    }

    /// Does all of this, each at a member, and waits for all but those that are given up. Those that are alone in not answering for
    /// so long are given up here, if that may be.
    pub(super) async fn at_each<T, F>(
        self: &Rc<Self>,
        patience: Duration,
        each: impl IntoIterator<Item = (MemberId, F)>,
    ) -> Vec<(MemberId, Result<T, DiskError>)>
    where
        F: Future<Output = Result<T, DiskError>>,
    {
        let silent = Silent::default();
        let each = each.into_iter().map(|(id, work)| {
            silent.asks(id);
            let (silent, work) = (&silent, self.unless_given_up(id, work));
            async move {
                let outcome = work.await;
                match self.is_given_up(id) {
                    true => silent.forgets(id),
                    false => silent.answers(id),
                }
                (id, outcome)
            }
        });
        let all = join_all(each);
        tokio::select! {
            biased;
            outcomes = all => outcomes,
            () = self.lose_patience(patience, &silent) => Vec::new(),
        }
    }

    /// Does this with each disk, in a task of its own, which goes on where its disk is given up; as [`Self::at_each`].
    pub(super) async fn in_tasks<T: 'static, F>(
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
        let done = self.at_each(patience, each).await.into_iter().zip(&disks);
        done.map(|((id, outcome), (_, disk))| {
            let outcome = outcome.unwrap_or_else(|why| Err(failed(disk.path(), why)));
            (id, Rc::clone(disk), outcome)
        })
        .collect()
    }

    /// Gives up those that are silent, when others have answered for so long. Never ends.
    async fn lose_patience(self: &Rc<Self>, patience: Duration, silent: &Silent) {
        loop {
            let left = silent.outlast(patience, |left| self.may_do_without(left)).await;
            // Some may have answered meanwhile.
            if self.may_give_up(left).await {
                left.and(silent.left()).iter().for_each(|id| self.wait_no_more_for(id));
            }
        }
    }

    /// What comes of it, unless the member is given up meanwhile.
    async fn unless_given_up<T>(
        &self,
        id: MemberId,
        work: impl Future<Output = Result<T, DiskError>>,
    ) -> Result<T, DiskError> {
        let given_up = async {
            loop {
                let gives_up = self.gives_up.notified();
                if self.given_up.get().has(id) {
                    return;
                }
                gives_up.await;
            }
        };
        // What is under way goes on, with its memory and the disk.
        tokio::select! {
            biased;
            done = work => done,
            () = given_up => Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 }),
        }
    }

    /// What comes of it at a disk that has no vote yet, unless it gets no further for so long while others answer, or this is closed.
    async fn unless_stuck<T>(
        self: &Rc<Self>,
        id: MemberId,
        disk: &MemberDisk,
        work: impl Future<Output = Result<T, DiskError>>,
    ) -> Result<T, DiskError> {
        let is_stuck = async {
            loop {
                let before = disk.steps();
                Silent::alone(id).outlast(PATIENCE, |_| true).await;
                let moves = || disk.steps() != before;
                if self.is_closed.get() || (!moves() && self.others_answer(id).await && !moves()) {
                    return;
                }
            }
        };
        // What is under way goes on, and holds the disk.
        tokio::select! {
            biased;
            done = work => done,
            () = is_stuck => Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 }),
        }
    }

    /// The last version, and the disks that get every one: all of them have this.
    ///
    /// # Errors
    /// Why nothing more is written: the last one may be nowhere then.
    pub(super) async fn held_by_all(
        &self,
    ) -> Result<(Stamp, Vec<(MemberId, Rc<MemberDisk>)>), PoolError> {
        // One that is being written is not on all of them yet.
        let _alone = self.alone.lock().await;
        self.goes_on()?;
        Ok((self.metadata().stamp(), self.disks()))
    }

    fn goes_on(&self) -> Result<(), PoolError> {
        match self.broken() {
            Some(why) => Err(why),
            None if self.is_closed.get() => Err(stopped()),
            None => Ok(()),
        }
    }

    /// Ends when it is known that what was changed before counts.
    pub(super) async fn settle(&self) -> Result<(), PoolError> {
        let (answer, outcome) = oneshot::channel();
        self.ask(Waiting { changes: Vec::new(), settles: true, answer: Some(answer) });
        outcome.await.unwrap_or_else(|_| Err(stopped()))
    }

    fn ask(&self, mut waiting: Waiting) {
        match self.goes_on() {
            Err(why) => waiting.end(Err(why)),
            Ok(()) => {
                self.waiting.borrow_mut().push_back(waiting);
                self.wake.notify_one();
            }
        }
    }

    /// Writes versions until [`Self::close`].
    pub(super) async fn run(self: Rc<Self>) {
        while !self.is_closed.get() && self.broken().is_none() {
            if self.has_work() {
                let _alone = self.alone.lock().await;
                if let Err(why) = self.write_version().await {
                    self.give_up(&why);
                }
                Self::snapshot_if_due(&self);
            } else {
                self.wake.notified().await;
            }
        }
    }

    /// Nothing more is written; what waits is told so. Its disks can be opened again though somebody still has this, but for those at
    /// which something is under way.
    pub(super) async fn close(&self) {
        self.is_closed.set(true);
        self.wake.notify_one();
        let _alone = self.alone.lock().await;
        self.tell_all(&stopped());
        self.disks.take();
    }

    fn has_work(&self) -> bool {
        // One that has to know that it counts needs one more version.
        !self.waiting.borrow().is_empty() || !self.pending.borrow().is_empty()
    }

    fn give_up(&self, why: &PoolError) {
        tracing::error!(error = %why, "nothing more is written to the pool");
        self.broken.borrow_mut().get_or_insert_with(|| why.clone());
        self.tell_all(why);
    }

    fn tell_all(&self, why: &PoolError) {
        let mut all: Vec<Waiting> = self.waiting.borrow_mut().drain(..).collect();
        all.extend(self.pending.borrow_mut().drain(..).map(|(_, waiting)| waiting));
        all.iter_mut().for_each(|waiting| waiting.end(Err(why.clone())));
    }

    async fn write_version(self: &Rc<Self>) -> Result<(), PoolError> {
        self.verify().await?;
        let before = Roll::of(&self.metadata());
        let (previous, counted) = (self.metadata().stamp().id, self.counted.get());
        self.metadata.borrow_mut().start(counted)?;
        let (changes, made) = self.take();
        let (stamp, voters) = (self.metadata().stamp(), self.metadata().voters());
        let disks = self.disks();
        let following: Members = disks.iter().map(|(id, _)| *id).collect();
        let written = Written { following, current: following, excused: self.excused };
        may_count(&before, &self.metadata(), &written)
            .map_err(|why| PoolError::new(why.to_string()))?;
        self.pending.borrow_mut().extend(made.into_iter().map(|w| (stamp.version, w)));
        let block = Block { stamp, previous, counted, changes };
        let gets = |id: &MemberId| voters.has(*id) || self.rising.borrow().contains(id);
        let to = disks.iter().filter(|(id, _)| gets(id));
        let each = to.map(|(id, disk)| (*id, disk.put(&block)));
        let mut all = true;
        for (id, outcome) in self.at_each(PATIENCE, each).await {
            match outcome {
                Err(why) if voters.has(id) => {
                    all = false;
                    let path = self.disk(id).map(|disk| disk.path().to_owned());
                    self.drop_out(id, &failed(&path.unwrap_or_default(), why));
                }
                // It gets no vote: whoever brings it up finds it gone.
                Err(_) => drop(self.disks.borrow_mut().remove(&id)),
                Ok(()) => {}
            }
        }
        // Those that have no vote any more get nothing more.
        self.disks.borrow_mut().retain(|id, _| gets(id));
        if all {
            self.counted.set(stamp.version);
            self.known.set(counted);
        }
        self.tell();
        Ok(())
    }

    /// A member did not take a version: it is out with the next one.
    fn drop_out(&self, id: MemberId, why: &PoolError) {
        tracing::error!(member = id.0, error = %why, "a disk of the pool is out: replace it");
        self.disks.borrow_mut().remove(&id);
        let waiting = Waiting { changes: vec![Change::Out(id)], settles: true, answer: None };
        self.waiting.borrow_mut().push_front(waiting);
        let _ = self.failing.send(id);
    }

    /// The member that a change would give a vote, if it has failed since it was brought up: no version may be written then.
    fn fallen(&self, change: &Change) -> Option<MemberId> {
        let (Change::Add { member, .. } | Change::Back { member, .. }) = change else {
            return None;
        };
        (!self.disks.borrow().contains_key(member)).then_some(*member)
    }

    /// Takes what waits and fits into a block, and makes it; whoever is refused is told.
    fn take(&self) -> (Vec<Change>, Vec<Waiting>) {
        let (mut changes, mut made, mut room) = (Vec::new(), Vec::new(), Block::room());
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            let Some(mut next) = next else { break };
            if let Some(id) = next.changes.iter().find_map(|change| self.fallen(change)) {
                next.end(Err(PoolError::new(format!("disk {} failed as it came in", id.0))));
                continue;
            }
            let bytes: usize = next.changes.iter().map(Change::record_bytes).sum();
            if bytes > room {
                if made.is_empty() && changes.is_empty() {
                    next.end(Err(PoolError::new("so many changes do not fit one version")));
                    continue;
                }
                self.waiting.borrow_mut().push_front(next);
                break;
            }
            let mut metadata = self.metadata.borrow_mut();
            let outcome = next.changes.iter().try_for_each(|change| metadata.apply(change));
            match outcome {
                Ok(()) => {
                    room -= bytes;
                    changes.extend(next.changes.iter().cloned());
                    made.push(next);
                }
                Err(why) => next.end(Err(why.into())),
            }
        }
        (changes, made)
    }

    /// Tells those whose versions count, and as all with a vote know, if they want that.
    fn tell(&self) {
        let mut pending = self.pending.borrow_mut();
        let is_over = |(version, waiting): &mut (u64, Waiting)| {
            *version <= if waiting.settles { self.known.get() } else { self.counted.get() }
        };
        let over: Vec<_> = pending.extract_if(.., is_over).collect();
        drop(pending);
        over.into_iter().for_each(|(_, mut waiting)| waiting.end(Ok(())));
    }

    /// Begins a snapshot if half a journal has been used since the last one.
    fn snapshot_if_due(this: &Rc<Self>) {
        let version = this.metadata().stamp().version;
        let is_due = |disk: &MemberDisk| {
            let blocks = u64::from(disk.label().layout.journal_blocks);
            version.saturating_sub(disk.snapshot()) >= blocks / 2
        };
        let due = this.disks().iter().any(|(_, disk)| is_due(disk));
        if !due || this.is_snapshotting.replace(true) {
            return;
        }
        let bytes = this.metadata().snapshot();
        let this = Rc::clone(this);
        tokio::task::spawn_local(async move {
            this.put_snapshots(&bytes, version).await;
            this.is_snapshotting.set(false);
        });
    }

    async fn put_snapshots(self: &Rc<Self>, bytes: &[u8], version: u64) {
        let disks = self.disks();
        let each = disks.iter().map(|(id, disk)| (*id, disk.put_snapshot(bytes, version)));
        for (id, outcome) in self.at_each(LONG_PATIENCE, each).await {
            if let Err(why) = outcome
                && let Some(disk) = self.disk(id)
            {
                self.drop_out(id, &failed(disk.path(), why));
                self.wake.notify_one();
            }
        }
    }

    /// Brings a disk up: it holds what all others hold, gets every version from then on, and may get a vote with the next one.
    /// Its rings are empty. Meanwhile no version is written.
    ///
    /// # Errors
    /// What fails; it gets nothing more then.
    pub(super) async fn bring_up(
        self: &Rc<Self>,
        id: MemberId,
        disk: &Rc<MemberDisk>,
    ) -> Result<(), PoolError> {
        let _alone = self.alone.lock().await;
        self.goes_on()?;
        let (bytes, stamp) = (self.metadata().snapshot(), self.metadata().stamp());
        // What a label names proves that it was committed.
        let opened = self.metadata().stamp_of(self.counted.get()).unwrap_or(disk.label().opened);
        let up = async {
            disk.put_snapshot(&bytes, stamp.version).await?;
            disk.forget_changes().await?;
            disk.relabel(Label { opened, number: id, ..disk.label() }).await
        };
        let up = self.unless_stuck(id, disk, up).await;
        up.map_err(|why| failed(disk.path(), why))?;
        self.given_up.set(self.given_up.get().but(id));
        self.rising.borrow_mut().insert(id);
        self.go_on_counting(id, disk);
        self.disks.borrow_mut().insert(id, Rc::clone(disk));
        Ok(())
    }

    /// What was counted of a member goes on where it comes back; of a disk that is new nothing was.
    fn go_on_counting(&self, id: MemberId, disk: &MemberDisk) {
        if self.errors(id).is_some_and(|known| Arc::ptr_eq(&known, &disk.errors())) {
            return;
        }
        let metadata = self.metadata();
        let member = metadata.member(id).filter(|member| member.uuid == disk.label().member);
        let before = member.map(|member| match self.errors(id) {
            Some(errors) => counted(&errors, member.errors.since_s),
            None => member.errors,
        });
        go_on(&disk.errors(), before.unwrap_or_default());
        self.errors.borrow_mut().insert(id, disk.errors());
    }

    /// A disk that was brought up has a vote now, or is not to get one.
    pub(super) fn is_up(&self, id: MemberId) {
        self.rising.borrow_mut().remove(&id);
        let voters = self.metadata().voters();
        self.disks.borrow_mut().retain(|id, _| voters.has(*id));
    }
}

/// Nobody else gets a disk that was given up as long as something is under way to it: it would be written later. Cores that have it
/// open beside this one hold it no longer.
pub(super) fn hold_while_busy(disk: Rc<MemberDisk>) {
    tokio::task::spawn_local(async move {
        let errors = disk.errors();
        // By then all cores have given up what they wait for.
        tokio::time::sleep(HELD_AT_LEAST).await;
        while errors.astray.load(Ordering::Relaxed) > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
}

fn changes_votes(change: &Change) -> bool {
    matches!(
        change,
        Change::Opened { .. }
            | Change::Add { .. }
            | Change::Out(_)
            | Change::Back { .. }
            | Change::Remove(_)
    )
}

fn stopped() -> PoolError {
    PoolError::new("the pool is closed")
}
