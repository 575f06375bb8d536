//! Disks come into a pool, go out, come back and leave it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use disk::Claim;
use futures_util::future::join_all;
use geometry::ALL_REGIONS;
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::oneshot;
use tokio::time::timeout;
use uuid::Uuid;
use wire::{TEXT_BYTES, Text};

use super::{Coming, Pool, Stage};
use crate::ask::{ColumnAt, Comes, Event, MemberInfo};
use crate::called::{called, find};
use crate::disk::{MemberDisk, within};
use crate::error::{PoolError, failed};
use crate::label::{Label, State};
use crate::layout::Layout;
use crate::metadata::{Change, MemberId, Members, Metadata, Stamp, Standing};
use crate::multihost::{Ownership, take_in_time};
use crate::opening::{At, NewDisk, Newer, Returning, at, find_absent, if_it_answers, open_new};
use crate::recovery;
use crate::writer::{LONG_PATIENCE, hold_while_busy};

/// How often is looked whether pieces have moved.
const MOVING: Duration = Duration::from_millis(200);

impl Pool {
    /// What a member is called, and where it is, for messages.
    pub(super) fn identity(&self, id: MemberId) -> (String, String) {
        let serial = self.writer.metadata().member(id).map(|m| m.serial.to_string());
        let path = self.writer.disk(id).map(|disk| disk.path().display().to_string());
        (serial.unwrap_or_default(), path.unwrap_or_default())
    }

    pub(super) fn member_info(&self, id: MemberId) -> Option<MemberInfo> {
        let disk = self.writer.disk(id)?;
        let label = disk.label();
        let (uuid, layout, errors) = (label.member, label.layout, disk.errors());
        let (visit, path, lease) = (self.visit_of(id), disk.path().to_owned(), disk.lease());
        let serial = label.serial;
        Some(MemberInfo { id, visit, uuid, serial, path, layout, errors, lease })
    }

    pub(super) fn leaving(&self) -> Members {
        let metadata = self.writer.metadata();
        let leaving = metadata.members().filter(|(_, m)| m.standing == Standing::Leaving);
        leaving.map(|(id, _)| id).collect()
    }

    /// How often a member has been let in, or was to be.
    pub(super) fn visit_of(&self, id: MemberId) -> u64 {
        self.visits.borrow().get(&id).copied().unwrap_or(0)
    }

    /// A member is out that had been let in so often: ends when all others know. Nobody may be waited for here who waits for a core to
    /// let another one in: that core may be the one that waits for this.
    pub(super) async fn out(
        self: &Rc<Self>,
        member: MemberId,
        visit: u64,
    ) -> Result<(), PoolError> {
        if visit != self.visit_of(member) {
            // That one is out, or it could not have come again.
            return self.writer.settle().await;
        }
        let (serial, path) = self.identity(member);
        let is_news = match self.stage_of(member) {
            Some(Stage::Recorded) => self.writer.put_out_next(member).await?,
            Some(Stage::Begun | Stage::GivenUp) => {
                self.set_stage(member, Stage::GivenUp);
                self.writer.put_out(member).await?
            }
            None => self.writer.put_out(member).await?,
        };
        if is_news {
            tracing::error!(member = member.0, %serial, %path, "a disk of the pool is out: replace it (windrose pool replace)");
            self.is_out(member);
        }
        Ok(())
    }

    /// All hear that a member is out, and a spare takes its place.
    fn is_out(self: &Rc<Self>, member: MemberId) {
        self.tell(|| Event::Out(member));
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move { pool.call_spare(true).await });
    }

    /// A member does not answer, as others of these do not: it is out, if all of them may be and it still does not then. Whether it is.
    pub(super) async fn give_up(
        self: &Rc<Self>,
        member: MemberId,
        visit: u64,
        silent: Members,
        still: impl Fn() -> bool,
    ) -> Result<bool, PoolError> {
        if visit != self.visit_of(member) {
            return self.writer.settle().await.map(|()| true);
        }
        if self.stage_of(member).is_some() {
            return Ok(self.give_up_coming(member, still).await);
        }
        let (serial, path) = self.identity(member);
        let Some(is_news) = self.writer.give_up_on(member, silent, &still).await? else {
            if still() && self.awaited.borrow_mut().insert(member) {
                tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not answer, and without it data would be lost: it is waited for; see to its cable and power");
            }
            return Ok(false);
        };
        if is_news {
            tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not answer and is out: replace it (windrose pool replace)");
            self.is_out(member);
        }
        Ok(true)
    }

    /// How far a member is that is being let in.
    fn stage_of(&self, id: MemberId) -> Option<Stage> {
        self.coming.get().filter(|coming| coming.id == id).map(|coming| coming.stage)
    }

    fn set_stage(&self, id: MemberId, stage: Stage) {
        self.coming.set(Some(Coming { id, stage }));
    }

    /// Gives up a member that is being let in and does not answer, if others do and it is not being written down yet that it is in.
    /// Whether it is given up: nothing is lost, as it was out before.
    async fn give_up_coming(&self, id: MemberId, still: impl Fn() -> bool) -> bool {
        if !self.writer.others_answer(id).await || !still() {
            return false;
        }
        // That may have changed meanwhile.
        if self.stage_of(id) == Some(Stage::Begun) {
            self.set_stage(id, Stage::GivenUp);
        }
        self.stage_of(id) == Some(Stage::GivenUp)
    }

    /// A member lags behind the others for a core, or does not any more.
    pub(super) fn slow(&self, member: MemberId, is_slow: bool) {
        let (serial, path) = self.identity(member);
        let errors = self.writer.errors(member);
        let still = errors.is_some_and(|errors| errors.slow_now.load(Ordering::Relaxed) > 0);
        let is_slow = is_slow || still;
        let mut slow = self.slow.borrow_mut();
        if is_slow && slow.insert(member) {
            tracing::warn!(member = member.0, %serial, %path, "a disk of the pool is slow, and is read around: replace it if that goes on (windrose pool replace)");
        } else if !is_slow && slow.remove(&member) {
            self.awaited.borrow_mut().remove(&member);
            tracing::info!(member = member.0, %serial, %path, "a disk of the pool answers in time again");
        }
    }

    /// A spare takes its place beside the others, if one is out and pieces lie on it: one in which these have room, or else the
    /// largest, and one more. Unless a disk has just gone out, none while the others have room.
    pub(super) async fn call_spare(&self, news: bool) {
        let mut news = news;
        loop {
            let spare = self.writer.metadata().spare_to_call(news, &self.reserved());
            let Some(member) = spare else { break };
            let (serial, path) = self.identity(member);
            tracing::warn!(member = member.0, %serial, %path, "a spare disk takes the place of one that is out");
            let stand = Change::Stand { member, standing: Standing::In };
            if let Err(why) = self.writer.commit(stand).await {
                tracing::error!(member = member.0, %serial, error = %why, "the spare disk cannot be used");
                break;
            }
            news = false;
        }
        self.tell(|| Event::Look);
    }

    /// Adds a disk.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn add(&self, new: &NewDisk, spare: bool) -> Result<(), PoolError> {
        self.add_if(new, spare, |_| Ok(())).await
    }

    /// The same if `check` has nothing against the pool that comes of it. Before that nothing is written to the disk.
    async fn add_if(
        &self,
        new: &NewDisk,
        spare: bool,
        check: impl FnOnce(&Metadata) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let disk = open_new(&self.core, new, self.buffered, self.ownership.claim).await?;
        let number = || {
            let full = || PoolError::new("it has as many disks as it may have");
            self.writer.metadata().next_member().ok_or_else(full)
        };
        let disk = Rc::new(made(&self.core, disk, &self.writer.metadata(), number()?)?);
        let mut after = self.writer.metadata().clone();
        after.apply(&add_change(&disk.label(), spare))?;
        check(&after)?;
        // Before others have to wait: that takes as long as the disk does.
        within(LONG_PATIENCE, disk.relabel(disk.label()))
            .await
            .map_err(|why| failed(disk.path(), why))?;
        // What may be overwritten was looked at when it was opened.
        let claim = self.ownership.claim.map(|claim| Claim { take_over: true, ..claim });
        let ownership = Ownership { claim, ..self.ownership.clone() };
        let taken = disk.take(&self.core, &ownership);
        if_it_answers(disk.path(), async {
            taken.await.map_err(|why| PoolError::at(disk.path(), why))
        })
        .await?;
        let forgotten = disk.forget_snapshots();
        within(LONG_PATIENCE, forgotten).await.map_err(|why| failed(disk.path(), why))?;
        let alone = self.membership.write().await;
        // Another one may have come meanwhile.
        let label = Label { number: number()?, ..disk.label() };
        self.let_in(label.number, &disk, Vec::new(), add_change(&label, spare)).await?;
        drop(alone);
        say_made(&disk).await;
        // What is on one that is out may have had no room so far.
        self.call_spare(false).await;
        Ok(())
    }

    /// A disk gets every version and all that is written, and a vote by `change`. Whoever asks has the membership.
    async fn let_in(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        behind: Vec<(u64, u16, u32)>,
        change: Change,
    ) -> Result<(), PoolError> {
        *self.visits.borrow_mut().entry(id).or_default() += 1;
        self.set_stage(id, Stage::Begun);
        let is_in = self.try_in(id, disk, behind, change).await;
        self.coming.set(None);
        is_in
    }

    async fn try_in(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        behind: Vec<(u64, u16, u32)>,
        change: Change,
    ) -> Result<(), PoolError> {
        self.writer.bring_up(id, disk).await?;
        self.opened.borrow_mut().insert(id, disk.path().to_owned());
        let member = self.member_info(id);
        let member = member.ok_or_else(|| PoolError::at(disk.path(), "it failed at once"))?;
        // All write to it before it counts: none of what is written from then on is behind.
        let mut all = Vec::new();
        self.seats.borrow_mut().retain(|(_, seat)| {
            let (done, is_done) = oneshot::channel();
            let told = seat.clone();
            all.push(async move { (told, is_done.await) });
            let (member, behind) = (member.clone(), behind.clone());
            seat.send(Event::In(Box::new(Comes { member, behind, done }))).is_ok()
        });
        let all_do =
            join_all(all).await.into_iter().all(|(seat, done)| done.is_ok() || seat.is_closed());
        let is_given_up = self.stage_of(id) == Some(Stage::GivenUp);
        if is_given_up || !all_do {
            // Cores may have something under way at it.
            hold_while_busy(Rc::clone(disk));
        }
        let committed = if is_given_up {
            Err(PoolError::at(disk.path(), "it fails or does not answer, as the log says"))
        } else if all_do {
            self.set_stage(id, Stage::Recorded);
            self.writer.commit(change).await
        } else {
            Err(PoolError::at(disk.path(), "a core cannot use it, as the log says"))
        };
        self.writer.is_up(id);
        if committed.is_err() {
            self.tell(|| Event::Out(id));
        }
        committed
    }

    /// Looks at these paths for members that are out. One that was away when that was done before, or when the pool was opened,
    /// and is there now, comes back. One that has failed and never been away does not: it would fail again. Nor does one that was
    /// given up, before the pool is opened anew.
    pub async fn bring_back(self: &Rc<Self>, paths: Vec<PathBuf>) {
        let known = self.writer.metadata().clone();
        let returning = self.returning.borrow().clone();
        let out = known.members().filter(|(id, m)| {
            let stays_out = self.writer.is_excused(*id) || self.writer.is_given_up(*id);
            !m.standing.votes() && !returning.contains(id) && !stays_out
        });
        let out: BTreeSet<MemberId> = out.map(|(id, _)| id).collect();
        if out.is_empty() {
            self.away.borrow_mut().clear();
            return;
        }
        // Those that are in use are where they are.
        let used = self.writer.disks().into_iter().map(|(_, disk)| disk.path().to_owned());
        let used: BTreeSet<PathBuf> = used.collect();
        let paths = paths.into_iter().filter(|path| !used.contains(path)).collect();
        let there = self.places_of(&known, paths).await;
        let found = {
            let mut away = self.away.borrow_mut();
            away.retain(|id| out.contains(id));
            away.extend(out.iter().filter(|id| !there.contains_key(id)));
            let found = there.into_iter().filter(|(id, _)| away.contains(id));
            found.flat_map(|(_, paths)| paths).collect::<Vec<_>>()
        };
        let ownership = &self.ownership;
        let (absent, newer) =
            find_absent(&self.core, &known, &found, self.buffered, ownership).await;
        for Newer { id, path, serial, committed } in newer {
            // It is looked at again when it has been away.
            self.away.borrow_mut().remove(&id);
            let (path, Stamp { version, opening, .. }) = (path.display(), committed);
            tracing::error!(
                pool = %known.name, %path, %serial, version, opening,
                "a disk proves that a version of the pool was committed which the disks in use do not know: they were set back, or it is of another history. It is left alone: close the pool and put the right disks back, or give this one up (windrose pool replace)"
            );
        }
        for found in absent {
            // From now on nothing of it begins to move.
            if self.is_closed.get() || !self.returning.borrow_mut().insert(found.id) {
                continue;
            }
            self.away.borrow_mut().remove(&found.id);
            self.begin_return(found).await;
        }
    }

    /// Takes a member back in a task of its own, and waits a while for that: others are not to wait for one that does not answer.
    pub(super) async fn begin_return(self: &Rc<Self>, found: Returning) {
        let (id, pool, (ended, is_ended)) = (found.id, Rc::clone(self), oneshot::channel::<()>());
        let task = tokio::task::spawn_local(async move {
            // Dropped when this ends, or is aborted: that is the signal.
            let _ended = ended;
            pool.let_back(found).await;
            pool.returning.borrow_mut().remove(&id);
        });
        {
            let mut tasks = self.tasks.borrow_mut();
            tasks.retain(|task| !task.is_finished());
            tasks.push(task);
        }
        if timeout(LONG_PATIENCE, is_ended).await.is_err() {
            // What lies on it may be made elsewhere meanwhile.
            self.returning.borrow_mut().remove(&id);
            self.tell(|| Event::Look);
        }
    }

    /// Ends when no piece of a member is on its way to another one: what is written meanwhile is written there, and would not be
    /// marked for a member that is in.
    async fn moves_end(&self, id: MemberId) {
        while self.moves_from(id) && !self.is_closed.get() {
            tokio::time::sleep(MOVING).await;
        }
    }

    fn moves_from(&self, id: MemberId) -> bool {
        let metadata = self.writer.metadata();
        let piece = |of: &ColumnAt| {
            let extent = metadata.volume(of.volume)?.extent(of.index)?;
            extent.pieces.get(usize::from(of.column)).copied()
        };
        self.moving.borrow().keys().filter_map(piece).any(|piece| piece.member == id)
    }

    /// At which of these paths members are that are out. One that is open still is where it was.
    async fn places_of(
        &self,
        known: &Metadata,
        paths: Vec<PathBuf>,
    ) -> BTreeMap<MemberId, Vec<PathBuf>> {
        let looks = paths.into_iter().map(|path| async move {
            let at = at(&self.core, &path, self.buffered).await;
            (path, at)
        });
        let mut all: BTreeMap<MemberId, Vec<PathBuf>> = BTreeMap::new();
        for (path, at) in join_all(looks).await {
            let member = match at {
                At::Member { pool, member } if pool == known.pool => {
                    known.member_of(member).map(|(id, _)| id)
                }
                At::Busy => {
                    let opened = self.opened.borrow();
                    let was = opened.iter().find(|(id, was)| {
                        **was == path && known.member(**id).is_some_and(|m| !m.standing.votes())
                    });
                    was.map(|(id, _)| *id)
                }
                At::Member { .. } | At::Nothing => None,
            };
            member.into_iter().for_each(|id| all.entry(id).or_default().push(path.clone()));
        }
        all
    }

    /// A member that was out is there again. If it knew an era it lacks what is marked, and what was under way then.
    async fn let_back(&self, Returning { id, disk, era }: Returning) {
        let is_out = || {
            let metadata = self.writer.metadata();
            let known = metadata.member_of(disk.label().member);
            known.is_some_and(|(known, m)| known == id && !m.standing.votes())
        };
        if !is_out() {
            return;
        }
        // Before others have to wait: that takes as long as the disk does.
        self.moves_end(id).await;
        let marked = self.is_marked(id, &disk, era).await;
        // What a pool that is closed cannot write down says nothing of the disk.
        if self.is_closed.get() {
            return;
        }
        if !marked && let Err(why) = disk.set_state(State::Making).await {
            // It knows all when it is brought up, and has nothing: that is to be seen if it comes no further.
            tracing::error!(error = %why, "a disk of the pool cannot come back");
            return;
        }
        // It may have taken so long that pieces of it began to move.
        self.returning.borrow_mut().insert(id);
        self.moves_end(id).await;
        let alone = self.membership.write().await;
        if !is_out() || self.is_closed.get() {
            return;
        }
        let behind = behind_on(&self.writer.metadata(), id, marked);
        let path = disk.path().display().to_string();
        let change = Change::Back { member: id, marked };
        let is_in = self.let_in(id, &disk, behind, change).await;
        drop(alone);
        match is_in {
            Ok(()) => {
                say_made(&disk).await;
                tracing::info!(%path, marked, "a disk of the pool is back");
                self.tell(|| Event::Look);
            }
            Err(why) => {
                tracing::error!(%path, error = %why, "a disk of the pool cannot come back");
            }
        }
    }

    /// Whether what a member lacks is marked, with what was under way when it went out: all of it, if it knew an era.
    async fn is_marked(&self, id: MemberId, disk: &Rc<MemberDisk>, era: Option<u64>) -> bool {
        let Some(era) = era else { return false };
        let (core, writer, of) = (self.core.clone(), Rc::clone(&self.writer), Rc::clone(disk));
        // Goes on if the pool is closed meanwhile, and holds the disk.
        let mended = tokio::task::spawn_local(async move {
            recovery::mend_checksums(&core, &of).await?;
            recovery::mark_under_way(&core, &writer, id, &of, era).await
        });
        let mended = mended.await.map_err(|why| PoolError::at(disk.path(), why));
        let why_not = |why: &PoolError| tracing::warn!(error = %why, "what a disk of the pool lacks is not known: all of it is made again");
        mended.flatten().inspect_err(why_not).is_ok()
    }

    /// The member that a person means by a serial number, a path, or a number.
    pub(super) fn named(&self, name: &str) -> Result<MemberId, PoolError> {
        let metadata = self.writer.metadata();
        let disks: BTreeMap<_, _> = self.writer.disks().into_iter().collect();
        let all: Vec<_> = (metadata.members())
            .map(|(id, m)| called(id, id, m, disks.get(&id).map(|disk| disk.path())))
            .collect();
        find(name, &all)
    }

    /// Takes a disk out of the pool, once what lies on it is elsewhere. That begins now, and goes on.
    ///
    /// # Errors
    /// That there is no such disk, or no room for what lies on it.
    pub async fn remove(&self, disk: &str) -> Result<(), PoolError> {
        let id = self.named(disk)?;
        let (standing, spares) = {
            let metadata = self.writer.metadata();
            let member = metadata.member(id).ok_or_else(|| PoolError::new("it is gone"))?;
            let spares = metadata.may_leave(id, &self.reserved())?;
            (member.standing, spares)
        };
        if standing == Standing::Leaving {
            return Ok(());
        }
        let stand = |member, standing| Change::Stand { member, standing };
        let called = spares.iter().map(|spare| stand(spare, Standing::In));
        // From now on nothing new comes to lie on it.
        let leaves = standing == Standing::In;
        let leaving = leaves.then_some(stand(id, Standing::Leaving));
        let changes: Vec<Change> = leaving.into_iter().chain(called).collect();
        if !changes.is_empty() {
            self.writer.commit_all(changes).await?;
        }
        self.retiring.borrow_mut().insert(id);
        self.tell_leaving();
        self.call_spare(!standing.votes()).await;
        self.retire().await;
        Ok(())
    }

    /// A disk that was to be taken out of the pool stays. What has been moved off it already stays where it is.
    ///
    /// # Errors
    /// That there is no such disk, or it is not being removed.
    pub async fn cancel_removal(&self, disk: &str) -> Result<(), PoolError> {
        let id = self.named(disk)?;
        // Nothing of it is about to leave meanwhile.
        let _alone = self.membership.write().await;
        let standing = self.writer.metadata().member(id).map(|member| member.standing);
        let was_retiring = self.retiring.borrow_mut().remove(&id);
        match standing {
            Some(Standing::Leaving) => {
                let stays = Change::Stand { member: id, standing: Standing::In };
                self.writer.commit(stays).await?;
                self.tell_leaving();
                Ok(())
            }
            _ if was_retiring => Ok(()),
            _ => Err(PoolError::new(format!("disk {disk} is not being removed"))),
        }
    }

    fn tell_leaving(&self) {
        let all = self.leaving();
        self.tell(|| Event::Leaving(all));
    }

    /// Puts another disk in the place of one.
    ///
    /// # Errors
    /// Those of [`Self::add`] and [`Self::remove`]: nothing is changed then.
    pub async fn replace(&self, disk: &str, with: &NewDisk) -> Result<(), PoolError> {
        let id = self.named(disk)?;
        let fits = |after: &Metadata| after.may_leave(id, &self.reserved()).map(drop);
        self.add_if(with, false, fits).await?;
        self.remove(&id.0.to_string()).await
    }

    /// Members that leave and have nothing any more are none.
    pub(super) async fn retire(&self) {
        let empty: Vec<_> = {
            let metadata = self.writer.metadata();
            let empty = metadata.members().filter(|(id, _)| self.leaves_empty(&metadata, *id));
            empty.map(|(id, member)| (id, member.standing.votes())).collect()
        };
        for (id, votes) in empty {
            let disk = self.writer.disk(id);
            match self.remove_empty(id, votes).await {
                Ok(true) => {}
                // It was to leave, and is not any more.
                Ok(false) => continue,
                Err(why) => {
                    tracing::warn!(member = id.0, error = %why, "a disk cannot leave the pool yet");
                    continue;
                }
            }
            self.retiring.borrow_mut().remove(&id);
            if let Some(disk) = disk {
                match disk.set_state(State::Removed).await {
                    Ok(()) => disk.release().await,
                    Err(why) => {
                        tracing::warn!(error = %why, "its label says that it is of the pool");
                    }
                }
            }
        }
    }

    /// Whether a member is to leave, and nothing lies on it.
    fn leaves_empty(&self, metadata: &Metadata, id: MemberId) -> bool {
        let retires = self.retiring.borrow().contains(&id);
        metadata.member(id).is_some_and(|member| {
            member.taken() == 0 && (retires || member.standing == Standing::Leaving)
        })
    }

    /// Takes out a member that leaves and is empty, if it still is and does.
    async fn remove_empty(&self, id: MemberId, votes: bool) -> Result<bool, PoolError> {
        let _alone = self.membership.write().await;
        if !self.leaves_empty(&self.writer.metadata(), id) {
            return Ok(false);
        }
        if votes {
            self.writer.commit(Change::Out(id)).await?;
            self.tell(|| Event::Out(id));
        }
        self.writer.commit(Change::Remove(id)).await.map(|()| true)
    }
}

/// Has the label of a disk say that it is finished, which it is in any case if the pool knows it.
async fn say_made(disk: &MemberDisk) {
    if let Err(why) = disk.set_state(State::Made).await {
        tracing::warn!(error = %why, "its label says that it is still being made");
    }
}

/// What a disk is called when it is not there: its serial number, or where it was.
fn name_of(disk: &Disk) -> Text {
    let path = disk.path().display().to_string();
    let end = path.char_indices().map(|(at, _)| at).find(|at| path.len() - at <= TEXT_BYTES);
    match disk.serial() {
        "" => Text::new(&path[end.unwrap_or(0)..]),
        serial => Text::new(serial),
    }
}

/// A disk that is to be a member, of which nothing is written yet.
pub(super) fn made(
    core: &Core,
    disk: Disk,
    metadata: &Metadata,
    number: MemberId,
) -> Result<MemberDisk, PoolError> {
    let Metadata { shape, rings, checksums, .. } = *metadata;
    let size = disk.info().size;
    let small = || {
        let needed = Layout::least_bytes(&shape, rings, checksums);
        let what = format!("is too small: it has {size} bytes and needs {needed}");
        PoolError::at(disk.path(), what)
    };
    let label = Label {
        generation: 0,
        pool: metadata.pool,
        name: metadata.name,
        member: core.random_uuid(),
        number,
        serial: name_of(&disk),
        state: State::Making,
        shape,
        rings,
        layout: Layout::of(size, &shape, rings, checksums).ok_or_else(small)?,
        opened: Stamp { opening: 0, version: 0, id: Uuid::nil() },
    };
    Ok(MemberDisk::new(disk, core.pool().account(), label))
}

/// What comes of it, or that the disk is gone, as nothing that was written there has ended for a minute.
async fn while_it_answers<T>(
    disk: &MemberDisk,
    work: impl Future<Output = Result<T, DiskError>>,
) -> Result<T, DiskError> {
    let mut work = pin!(work);
    loop {
        let steps = disk.steps();
        if let Ok(ended) = timeout(LONG_PATIENCE, work.as_mut()).await {
            return ended;
        }
        if disk.steps() == steps {
            return Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
        }
    }
}

/// Writes what a member of a new pool holds, but for saying that it is finished.
pub(super) async fn make(
    core: &Core,
    disk: &MemberDisk,
    ownership: &Ownership,
    (snapshot, stamp): (&[u8], Stamp),
) -> Result<(), PoolError> {
    let labelled = while_it_answers(disk, disk.relabel(Label { opened: stamp, ..disk.label() }));
    labelled.await.map_err(|why| failed(disk.path(), why))?;
    // From here on another machine that does the same finds this claim, or this one finds the other's.
    let taken = take_in_time(core, disk, ownership).await;
    taken.map_err(|why| PoolError::at(disk.path(), why))?;
    let made = async {
        disk.forget_snapshots().await?;
        disk.forget_changes().await?;
        disk.put_snapshot(snapshot, stamp.version).await
    };
    while_it_answers(disk, made).await.map_err(|why| failed(disk.path(), why))
}

pub(super) fn add_change(label: &Label, spare: bool) -> Change {
    Change::Add {
        member: label.number,
        uuid: label.member,
        serial: label.serial,
        units: label.layout.units,
        room: label.layout.room,
        units_at: label.layout.units_at,
        spare,
    }
}

/// What columns on a member that comes back lack.
fn behind_on(metadata: &Metadata, id: MemberId, marked: bool) -> Vec<(u64, u16, u32)> {
    let mut all = Vec::new();
    for (_, volume) in metadata.volumes() {
        for (index, extent) in volume.extents() {
            let on_it = (0u16..).zip(&extent.pieces).filter(|(_, piece)| piece.member == id);
            for (column, _) in on_it {
                let regions = if marked { volume.behind(index, column) } else { ALL_REGIONS };
                if regions != 0 {
                    all.push((extent.number, column, regions));
                }
            }
        }
    }
    all
}
