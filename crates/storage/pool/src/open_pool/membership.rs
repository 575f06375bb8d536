//! Disks are added to a pool, detached, reattached and removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use disk::ClaimRequest;
use futures_util::future::join_all;
use geometry::ALL_REGIONS;
use pool_metadata::{Change, MemberId, MemberSet, Metadata, PoolMemberState, VersionId};
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::oneshot;
use tokio::time::timeout;
use uuid::Uuid;
use wire::{SHORT_TEXT_BYTES, ShortText};

use super::{Pool, PoolState};
use crate::crash_recovery;
use crate::discovery::{
    NewDisk, NewerDisk, PathContents, ReturningMember, find_detached, open_new, probe_path,
    with_response_timeout,
};
use crate::disk_admission::{AdmissionEffect, AdmissionInput, JoinKind, ReturnId};
use crate::disk_claims::acquire_with_timeout;
use crate::disk_name::{disk_names, resolve_disk_name};
use crate::error::{PoolError, metadata_io_error};
use crate::member_disk::{ClaimSettings, LONG_DISK_TIMEOUT, MemberDisk, with_disk_timeout};
use crate::member_label::{LabelState, MemberLabel};
use crate::member_layout::MemberLayout;
use crate::metadata_writer::{MetadataWriter, hold_until_idle};
use crate::requests::{Admission, ColumnId, MemberInfo, PoolEvent};

/// How often to check whether moves of columns have ended.
const MOVE_POLL_INTERVAL: Duration = Duration::from_millis(200);

impl Pool {
    /// Serial number and path of a member, for messages.
    pub(super) fn serial_and_path(&self, id: MemberId) -> (String, String) {
        let serial = self.writer.metadata().member(id).map(|m| m.serial.to_string());
        let path = self.writer.disk(id).map(|disk| disk.path().display().to_string());
        (serial.unwrap_or_default(), path.unwrap_or_default())
    }

    pub(super) fn member_info(&self, id: MemberId) -> Option<MemberInfo> {
        let disk = self.writer.disk(id)?;
        let label = disk.label();
        let (uuid, layout, counters) = (label.member_uuid, label.layout, disk.counters());
        let (join_generation, path, lease) =
            (self.join_generation(id), disk.path().to_owned(), disk.lease());
        let serial = label.serial;
        Some(MemberInfo { id, join_generation, uuid, serial, path, layout, counters, lease })
    }

    pub(super) fn draining_members(&self) -> MemberSet {
        let metadata = self.writer.metadata();
        let leaving = metadata.members().filter(|(_, m)| m.state == PoolMemberState::Draining);
        leaving.map(|(id, _)| id).collect()
    }

    /// How often admission of a member was attempted.
    pub(super) fn join_generation(&self, id: MemberId) -> u64 {
        self.writer.admission().join_generation(id)
    }

    /// Detaches a member of this join generation, and completes when all voters know. This must not
    /// wait for a caller that waits for a core to admit another member: that core may be the one
    /// that waits for this.
    pub(super) async fn detach_member(
        self: &Rc<Self>,
        member: MemberId,
        join_generation: u64,
    ) -> Result<(), PoolError> {
        let report = AdmissionInput::ReportedFailed { member, join_generation };
        let answer = self.writer.apply(report);
        let (serial, path) = self.serial_and_path(member);
        let was_attached = match answer.as_slice() {
            [AdmissionEffect::AwaitCommit] => return self.writer.await_commit().await,
            [AdmissionEffect::DetachAfterVote(id)] => self.writer.detach_after_queued(*id).await?,
            _ => self.writer.detach(member).await?,
        };
        if was_attached {
            tracing::error!(member = member.0, %serial, %path, "a disk of the pool is detached: replace it (windrose pool replace)");
            self.on_member_detached(member);
        }
        Ok(())
    }

    /// Tells all cores that a member is detached, and activates a spare.
    fn on_member_detached(self: &Rc<Self>, member: MemberId) {
        self.broadcast(|| PoolEvent::MemberDetached(member));
        let pool = Rc::clone(self);
        tokio::task::spawn_local(async move { pool.activate_spares(true).await });
    }

    /// Detaches a member that does not answer, like the others in `unresponsive`, if all of them
    /// may be abandoned and it is still unresponsive then. Returns whether it is detached.
    pub(super) async fn detach_unresponsive(
        self: &Rc<Self>,
        member: MemberId,
        join_generation: u64,
        unresponsive: MemberSet,
        is_still_silent: impl Fn() -> bool,
    ) -> Result<bool, PoolError> {
        let report = AdmissionInput::ReportedUnresponsive { member, join_generation };
        match self.writer.apply(report).as_slice() {
            [AdmissionEffect::AwaitCommit] => {
                return self.writer.await_commit().await.map(|()| true);
            }
            [AdmissionEffect::ProbeOthers(id)] => {
                return Ok(self.reject_silent_joiner(*id, is_still_silent).await);
            }
            _ => {}
        }
        let (serial, path) = self.serial_and_path(member);
        let Some(was_attached) =
            self.writer.detach_unresponsive(member, unresponsive, &is_still_silent).await?
        else {
            let is_news = is_still_silent() && self.state_mut().awaited_members.insert(member);
            if is_news {
                tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not respond, and data would be lost without it: waiting for it; check its cable and power");
            }
            return Ok(false);
        };
        if was_attached {
            tracing::error!(member = member.0, %serial, %path, "a disk of the pool does not respond and is detached: replace it (windrose pool replace)");
            self.on_member_detached(member);
        }
        Ok(true)
    }

    /// Rejects a joining member that does not answer, if others do and its vote is not being
    /// committed yet. Returns whether it is rejected.
    async fn reject_silent_joiner(&self, id: MemberId, is_still_silent: impl Fn() -> bool) -> bool {
        if !self.writer.others_respond(id).await || !is_still_silent() {
            return false;
        }
        self.writer.apply(AdmissionInput::SilenceConfirmed(id));
        self.writer.admission().is_join_rejected(id)
    }

    /// A core reports that a member lags behind the others, or does so no longer.
    pub(super) fn set_slow(&self, member: MemberId, is_slow: bool) {
        let (serial, path) = self.serial_and_path(member);
        let counters = self.writer.counters(member);
        let is_slow_elsewhere =
            counters.is_some_and(|counters| counters.slow_on_cores.load(Ordering::Relaxed) > 0);
        let is_slow = is_slow || is_slow_elsewhere;
        let PoolState { slow_members, awaited_members, .. } = &mut *self.state_mut();
        if is_slow && slow_members.insert(member) {
            tracing::warn!(member = member.0, %serial, %path, "a disk of the pool is slow: reads avoid it; replace it if it stays slow (windrose pool replace)");
        } else if !is_slow && slow_members.remove(&member) {
            awaited_members.remove(&member);
            tracing::info!(member = member.0, %serial, %path, "a disk of the pool is no longer slow");
        }
    }

    /// Activates spares while a detached member holds columns: the smallest spare with space for
    /// them, or else the largest, and then another. Unless a disk has just been detached, none is
    /// activated while the active members have space.
    pub(super) async fn activate_spares(&self, just_detached: bool) {
        let mut just_detached = just_detached;
        loop {
            let spare =
                self.writer.metadata().spare_to_activate(just_detached, &self.reserved_extents());
            let Some(member) = spare else { break };
            let (serial, path) = self.serial_and_path(member);
            tracing::warn!(member = member.0, %serial, %path, "a spare disk replaces a detached one");
            let activate = Change::SetMemberState { member, state: PoolMemberState::Active };
            if let Err(why) = self.writer.commit(activate).await {
                tracing::error!(member = member.0, %serial, error = %why, "the spare disk cannot be used");
                break;
            }
            just_detached = false;
        }
        self.broadcast(|| PoolEvent::MaintenanceDue);
    }

    /// Adds a disk to the pool.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub async fn add(&self, new: &NewDisk, is_spare: bool) -> Result<(), PoolError> {
        self.add_checked(new, is_spare, |_| Ok(())).await
    }

    /// The same if `check` accepts the pool that results. The disk is not written before that.
    async fn add_checked(
        &self,
        new: &NewDisk,
        is_spare: bool,
        check: impl FnOnce(&Metadata) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let disk = open_new(&self.core, new, self.buffered, self.claim_settings.claim).await?;
        let next_id = || {
            let full = || PoolError::new("it already has the largest number of disks");
            self.writer.metadata().next_member_id().ok_or_else(full)
        };
        let disk = Rc::new(new_member_disk(&self.core, disk, &self.writer.metadata(), next_id()?)?);
        let mut after = self.writer.metadata().clone();
        after.apply(&add_member_change(&disk.label(), is_spare))?;
        check(&after)?;
        // Before taking the lock: this takes as long as the disk needs.
        with_disk_timeout(LONG_DISK_TIMEOUT, disk.write_label(disk.label()))
            .await
            .map_err(|why| metadata_io_error(disk.path(), why))?;
        // Whether it may be overwritten was checked when it was opened.
        let claim =
            self.claim_settings.claim.map(|claim| ClaimRequest { take_over: true, ..claim });
        let claim_settings = ClaimSettings { claim, ..self.claim_settings.clone() };
        let claimed = disk.acquire_claim(&self.core, &claim_settings);
        with_response_timeout(disk.path(), async {
            claimed.await.map_err(|why| PoolError::on_disk(disk.path(), why))
        })
        .await?;
        let erased = disk.erase_snapshots();
        with_disk_timeout(LONG_DISK_TIMEOUT, erased)
            .await
            .map_err(|why| metadata_io_error(disk.path(), why))?;
        let guard = self.membership_lock.write().await;
        // Another disk may have been added meanwhile.
        let label = MemberLabel { member_id: next_id()?, ..disk.label() };
        let (joining, change) = (label.member_id, add_member_change(&label, is_spare));
        self.admit((joining, JoinKind::New), &disk, Vec::new(), vec![change]).await?;
        drop(guard);
        mark_label_ready(&disk).await;
        // Columns of a detached member may have had no space so far.
        self.activate_spares(false).await;
        Ok(())
    }

    /// Admits a disk: it gets every version and every write, and becomes a voter by the first of
    /// `changes`. The caller holds the membership lock.
    async fn admit(
        &self,
        (id, kind): (MemberId, JoinKind),
        disk: &Rc<MemberDisk>,
        stale_regions: Vec<(u64, u16, u32)>,
        changes: Vec<Change>,
    ) -> Result<(), PoolError> {
        if self.writer.apply(AdmissionInput::JoinBegan(id, kind)).is_empty() {
            return Err(PoolError::on_disk(disk.path(), "the pool does not admit it now"));
        }
        let admitted = self.try_admit(id, disk, stale_regions, changes).await;
        let effects = self.writer.end_join(id, admitted.is_ok());
        if effects.contains(&AdmissionEffect::AnnounceDetached(id)) {
            self.broadcast(|| PoolEvent::MemberDetached(id));
        }
        admitted
    }

    async fn try_admit(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        stale_regions: Vec<(u64, u16, u32)>,
        changes: Vec<Change>,
    ) -> Result<(), PoolError> {
        self.writer.add_learner(id, disk).await?;
        self.state_mut().last_paths.insert(id, disk.path().to_owned());
        let member = self.member_info(id);
        let member =
            member.ok_or_else(|| PoolError::on_disk(disk.path(), "the disk failed immediately"))?;
        // All cores write to it before it becomes a voter, so no later write is missing from it.
        let all_write = self.ask_cores(&member, &stale_regions).await;
        let is_rejected = self.writer.admission().is_join_rejected(id);
        let answered = AdmissionInput::CoresAnswered { member: id, all_write };
        if self.writer.apply(answered) == [AdmissionEffect::CommitVote(id)] {
            return self.writer.commit_all(changes).await;
        }
        // Cores may have requests in flight at it.
        hold_until_idle(Rc::clone(disk));
        let what = match is_rejected {
            true => "the disk failed or does not respond; see the log",
            false => "a core cannot use the disk; see the log",
        };
        Err(PoolError::on_disk(disk.path(), what))
    }

    /// Asks all cores to write to a member from now on. Returns whether all do that are still
    /// there.
    async fn ask_cores(&self, member: &MemberInfo, stale_regions: &[(u64, u16, u32)]) -> bool {
        let mut all = Vec::new();
        self.state_mut().core_events.retain(|(_, core)| {
            let (done, is_done) = oneshot::channel();
            let sender = core.clone();
            all.push(async move { (sender, is_done.await) });
            let (member, stale_regions) = (member.clone(), stale_regions.to_vec());
            core.send(PoolEvent::AdmitMember(Box::new(Admission { member, stale_regions, done })))
                .is_ok()
        });
        join_all(all).await.into_iter().all(|(core, done)| done.is_ok() || core.is_closed())
    }

    /// Looks for detached members at these paths. A member that was missing at the last look, or
    /// when the pool was opened, and is present now, is reattached. A member that failed and was
    /// never missing is not: it would fail again. Nor is one that was abandoned, until the pool is
    /// reopened.
    pub async fn reattach_found(self: &Rc<Self>, paths: Vec<PathBuf>) {
        let known = self.writer.metadata().clone();
        let sought = self.writer.admission().sought().difference(known.voters());
        if sought.is_empty() {
            return;
        }
        // Members in use have not moved.
        let used = self.writer.disks().into_iter().map(|(_, disk)| disk.path().to_owned());
        let used: BTreeSet<PathBuf> = used.collect();
        let paths = paths.into_iter().filter(|path| !used.contains(path)).collect();
        let present = self.find_detached_paths(&known, paths).await;
        let looked_for =
            AdmissionInput::LookedFor { sought, present: present.keys().copied().collect() };
        let effects = self.writer.apply(looked_for);
        let found =
            present.into_iter().filter(|(id, _)| effects.contains(&AdmissionEffect::Identify(*id)));
        let found: Vec<PathBuf> = found.flat_map(|(_, paths)| paths).collect();
        let claim_settings = &self.claim_settings;
        let (absent, newer) =
            find_detached(&self.core, &known, &found, self.buffered, claim_settings).await;
        for NewerDisk { id, path, serial, committed } in newer {
            self.writer.apply(AdmissionInput::NewerCommitProven(id));
            let (path, VersionId { version, term: opening, .. }) = (path.display(), committed);
            tracing::error!(
                pool = %known.name, %path, %serial, version, opening,
                "a disk proves a committed version of the pool that the disks in use lack: they were rolled back, or this disk has another history. It is left alone: close the pool and reconnect the right disks, or give this disk up (windrose pool replace)"
            );
        }
        for found in absent {
            // From now on no column on it is moved.
            let begun = if self.is_closed() { None } else { begin_return(&self.writer, found) };
            if let Some((found, return_id)) = begun {
                self.start_reattach(found, return_id).await;
            }
        }
    }

    /// Reattaches a member in a task of its own, and waits a while for that, so that an
    /// unresponsive disk does not delay others.
    pub(super) async fn start_reattach(
        self: &Rc<Self>,
        found: ReturningMember,
        return_id: ReturnId,
    ) {
        let (id, pool, (end_sender, end)) = (found.id, Rc::clone(self), oneshot::channel::<()>());
        let task = tokio::task::spawn_local(async move {
            // Dropping it when the task ends or is aborted is the signal.
            let _ended = end_sender;
            pool.reattach(found, return_id).await;
            pool.writer.apply(AdmissionInput::ReturnEnded(id, return_id));
        });
        {
            let tasks = &mut self.state_mut().tasks;
            tasks.retain(|task| !task.is_finished());
            tasks.push(task);
        }
        if timeout(LONG_DISK_TIMEOUT, end).await.is_err() {
            let effects = self.writer.apply(AdmissionInput::ReturnSlow(id, return_id));
            if effects.contains(&AdmissionEffect::RebuildColumns) {
                self.broadcast(|| PoolEvent::MaintenanceDue);
            }
        }
    }

    /// Waits until no column of a member is being moved: meanwhile writes go to the target, and
    /// would not be marked as stale for a member that is attached.
    async fn wait_moves_from(&self, id: MemberId) {
        while self.has_moves_from(id) && !self.is_closed() {
            tokio::time::sleep(MOVE_POLL_INTERVAL).await;
        }
    }

    fn has_moves_from(&self, id: MemberId) -> bool {
        let metadata = self.writer.metadata();
        let location = |of: &ColumnId| {
            let extent = metadata.volume(of.volume)?.extent(of.index)?;
            extent.columns.get(usize::from(of.column)).copied()
        };
        self.state().column_moves.keys().filter_map(location).any(|location| location.member == id)
    }

    /// The detached members found at these paths. One that is still open is where it was.
    async fn find_detached_paths(
        &self,
        known: &Metadata,
        paths: Vec<PathBuf>,
    ) -> BTreeMap<MemberId, Vec<PathBuf>> {
        let probes = paths.into_iter().map(|path| async move {
            let contents = probe_path(&self.core, &path, self.buffered).await;
            (path, contents)
        });
        let mut all: BTreeMap<MemberId, Vec<PathBuf>> = BTreeMap::new();
        for (path, contents) in join_all(probes).await {
            let member = match contents {
                PathContents::Member { pool, member } if pool == known.pool_id => {
                    known.find_member(member).map(|(id, _)| id)
                }
                PathContents::Busy => {
                    let state = self.state();
                    let last = state.last_paths.iter().find(|(id, last)| {
                        **last == path && known.member(**id).is_some_and(|m| !m.state.is_voter())
                    });
                    last.map(|(id, _)| *id)
                }
                PathContents::Member { .. } | PathContents::Nothing => None,
            };
            member.into_iter().for_each(|id| all.entry(id).or_default().push(path.clone()));
        }
        all
    }

    /// Reattaches a member that is present again. If it has a log generation, it misses only the
    /// stale regions and the writes in flight at that time.
    async fn reattach(
        &self,
        ReturningMember { id, disk, log_generation }: ReturningMember,
        return_id: ReturnId,
    ) {
        let is_detached = || {
            let metadata = self.writer.metadata();
            let known = metadata.find_member(disk.label().member_uuid);
            known.is_some_and(|(known, m)| known == id && !m.state.is_voter())
        };
        if !is_detached() {
            return;
        }
        // Before taking the lock: this takes as long as the disk needs.
        self.wait_moves_from(id).await;
        let only_stale_regions = self.mark_missed_writes(id, &disk, log_generation).await;
        // If the pool is closed, a failure to record the stale regions says nothing about the disk.
        if self.is_closed() {
            return;
        }
        if !only_stale_regions
            && let Err(why) = disk.set_label_state(LabelState::Initializing).await
        {
            // While it catches up it holds the metadata but no data: its label must say so in case
            // that fails.
            tracing::error!(error = %why, "reattaching a disk of the pool failed");
            return;
        }
        // It may have taken so long that columns of it began to move. No more do from now on.
        self.writer.apply(AdmissionInput::Examined(id, return_id));
        self.wait_moves_from(id).await;
        let guard = self.membership_lock.write().await;
        if !is_detached() || self.is_closed() {
            return;
        }
        let stale_regions = stale_regions_on(&self.writer.metadata(), id, only_stale_regions);
        let path = disk.path().display().to_string();
        let mut changes = vec![Change::Reattach { member: id, only_stale_regions }];
        if self.writer.admission().is_leaving(id) {
            // Its removal goes on.
            let state = PoolMemberState::Draining;
            changes.push(Change::SetMemberState { member: id, state });
        }
        let joining = (id, JoinKind::Return(return_id));
        let admitted = self.admit(joining, &disk, stale_regions, changes).await;
        drop(guard);
        match admitted {
            Ok(()) => {
                mark_label_ready(&disk).await;
                tracing::info!(%path, marked = only_stale_regions, "a disk of the pool is attached again");
                self.broadcast_draining();
            }
            Err(why) => {
                tracing::error!(%path, error = %why, "reattaching a disk of the pool failed");
            }
        }
    }

    /// Whether all that a member misses is marked as stale, writes in flight when it was detached
    /// included; never if it has no log generation.
    async fn mark_missed_writes(
        &self,
        id: MemberId,
        disk: &Rc<MemberDisk>,
        log_generation: Option<u64>,
    ) -> bool {
        let Some(log_generation) = log_generation else { return false };
        let (core, writer, disk_in_task) =
            (self.core.clone(), Rc::clone(&self.writer), Rc::clone(disk));
        // Goes on if the pool is closed meanwhile, and keeps the disk open.
        let marked = tokio::task::spawn_local(async move {
            crash_recovery::recover_checksums(&core, &disk_in_task).await?;
            crash_recovery::mark_in_flight_writes(&core, &writer, id, &disk_in_task, log_generation)
                .await
        });
        let marked = marked.await.map_err(|why| PoolError::on_disk(disk.path(), why));
        let why_not = |why: &PoolError| tracing::warn!(error = %why, "the stale regions of a disk are unknown: rebuilding all of it");
        marked.flatten().inspect_err(why_not).is_ok()
    }

    /// The member that the operator means by a serial number, path or member number.
    pub(super) fn resolve_member(&self, name: &str) -> Result<MemberId, PoolError> {
        let metadata = self.writer.metadata();
        let disks: BTreeMap<_, _> = self.writer.disks().into_iter().collect();
        let all: Vec<_> = (metadata.members())
            .map(|(id, m)| disk_names(id, id, m, disks.get(&id).map(|disk| disk.path())))
            .collect();
        resolve_disk_name(name, &all)
    }

    /// Removes a disk from the pool, once its columns are on other disks. Moving them starts now
    /// and goes on afterwards.
    ///
    /// # Errors
    /// There is no such disk, or no space for its columns.
    pub async fn remove(&self, disk: &str) -> Result<(), PoolError> {
        let id = self.resolve_member(disk)?;
        let (state, spares) = {
            let metadata = self.writer.metadata();
            let member = metadata.member(id).ok_or_else(|| PoolError::new("it is gone"))?;
            let spares = metadata.check_removal(id, &self.reserved_extents())?;
            (member.state, spares)
        };
        if state == PoolMemberState::Draining {
            return Ok(());
        }
        let set_state = |member, state| Change::SetMemberState { member, state };
        let activated = spares.iter().map(|spare| set_state(spare, PoolMemberState::Active));
        // From now on it gets no new columns.
        let is_active = state == PoolMemberState::Active;
        let draining = is_active.then_some(set_state(id, PoolMemberState::Draining));
        let changes: Vec<Change> = draining.into_iter().chain(activated).collect();
        if !changes.is_empty() {
            self.writer.commit_all(changes).await?;
        }
        self.writer.apply(AdmissionInput::RemovalBegan(id));
        self.broadcast_draining();
        self.activate_spares(!state.is_voter()).await;
        self.remove_drained().await;
        Ok(())
    }

    /// Cancels the removal of a disk. Columns that have been moved stay where they are.
    ///
    /// # Errors
    /// There is no such disk, or it is not being removed.
    pub async fn cancel_removal(&self, disk: &str) -> Result<(), PoolError> {
        let id = self.resolve_member(disk)?;
        // It is not removed meanwhile.
        let _guard = self.membership_lock.write().await;
        let state = self.writer.metadata().member(id).map(|member| member.state);
        if !self.writer.admission().is_leaving(id) {
            return Err(PoolError::new(format!("disk {disk} is not being removed")));
        }
        if state == Some(PoolMemberState::Draining) {
            let activate = Change::SetMemberState { member: id, state: PoolMemberState::Active };
            self.writer.commit(activate).await?;
        }
        self.writer.apply(AdmissionInput::RemovalCancelled(id));
        self.broadcast_draining();
        Ok(())
    }

    fn broadcast_draining(&self) {
        let all = self.draining_members();
        self.broadcast(|| PoolEvent::DrainingChanged(all));
    }

    /// Replaces a disk by another one.
    ///
    /// # Errors
    /// Those of [`Self::add`] and [`Self::remove`]; nothing is changed then.
    pub async fn replace(&self, disk: &str, with: &NewDisk) -> Result<(), PoolError> {
        let id = self.resolve_member(disk)?;
        let fits = |after: &Metadata| {
            after.check_removal(id, &self.reserved_extents())?;
            Ok(())
        };
        self.add_checked(with, false, fits).await?;
        self.remove(&id.0.to_string()).await
    }

    /// Removes the draining members that hold no columns any more.
    pub(super) async fn remove_drained(&self) {
        let drained: Vec<_> = {
            let metadata = self.writer.metadata();
            let drained = metadata.members().filter(|(id, _)| self.is_drained(&metadata, *id));
            drained.map(|(id, member)| (id, member.state.is_voter())).collect()
        };
        for (id, is_voter) in drained {
            let disk = self.writer.disk(id);
            match self.remove_if_drained(id, is_voter).await {
                Ok(true) => {}
                // Its removal was cancelled.
                Ok(false) => continue,
                Err(why) => {
                    tracing::warn!(member = id.0, error = %why, "removing a disk from the pool failed");
                    continue;
                }
            }
            if let Some(disk) = disk {
                match disk.set_label_state(LabelState::Removed).await {
                    Ok(()) => disk.release_claim().await,
                    Err(why) => {
                        tracing::warn!(error = %why, "writing its label failed: its label names the pool");
                    }
                }
            }
        }
    }

    /// Whether a member is being removed and holds no columns.
    fn is_drained(&self, metadata: &Metadata, id: MemberId) -> bool {
        let is_empty = metadata.member(id).is_some_and(|member| member.allocated_count() == 0);
        is_empty && self.writer.admission().is_leaving(id)
    }

    /// Removes a draining member, if it is still draining and holds no columns.
    async fn remove_if_drained(&self, id: MemberId, is_voter: bool) -> Result<bool, PoolError> {
        let _guard = self.membership_lock.write().await;
        if !self.is_drained(&self.writer.metadata(), id) {
            return Ok(false);
        }
        if is_voter {
            self.writer.commit(Change::Detach(id)).await?;
            self.broadcast(|| PoolEvent::MemberDetached(id));
        }
        self.writer.commit(Change::RemoveMember(id)).await?;
        self.writer.apply(AdmissionInput::Removed(id));
        Ok(true)
    }
}

/// Begins the return of a disk that was found; `None` if it must not return now.
pub(super) fn begin_return(
    writer: &MetadataWriter,
    found: ReturningMember,
) -> Option<(ReturningMember, ReturnId)> {
    match writer.apply(AdmissionInput::Found(found.id)).as_slice() {
        [AdmissionEffect::Reattach(_, return_id)] => Some((found, *return_id)),
        _ => None,
    }
}

/// Marks the label of a disk as ready; the pool knows the disk even if that fails.
async fn mark_label_ready(disk: &MemberDisk) {
    if let Err(why) = disk.set_label_state(LabelState::Ready).await {
        tracing::warn!(error = %why, "its label is still in state initializing");
    }
}

/// How to call a disk that is missing: its serial number, or where it was.
fn serial_or_path(disk: &Disk) -> ShortText {
    let path = disk.path().display().to_string();
    let end = path.char_indices().map(|(at, _)| at).find(|at| path.len() - at <= SHORT_TEXT_BYTES);
    match disk.serial() {
        "" => ShortText::new(&path[end.unwrap_or(0)..]),
        serial => ShortText::new(serial),
    }
}

/// A disk that is to be a member; nothing has been written to it yet.
pub(super) fn new_member_disk(
    core: &Core,
    disk: Disk,
    metadata: &Metadata,
    member_id: MemberId,
) -> Result<MemberDisk, PoolError> {
    let Metadata { geometry, log_rings, has_checksums, .. } = *metadata;
    let size = disk.info().size;
    let small = || {
        let needed = MemberLayout::min_bytes(&geometry, log_rings, has_checksums);
        let what = format!("is too small: it has {size} bytes and needs {needed}");
        PoolError::on_disk(disk.path(), what)
    };
    let label = MemberLabel {
        generation: 0,
        pool_id: metadata.pool_id,
        pool_name: metadata.name,
        member_uuid: core.random_uuid(),
        member_id,
        serial: serial_or_path(&disk),
        state: LabelState::Initializing,
        geometry,
        log_rings,
        layout: MemberLayout::compute(size, &geometry, log_rings, has_checksums)
            .ok_or_else(small)?,
        term_start: VersionId { term: 0, version: 0, term_id: Uuid::nil() },
    };
    Ok(MemberDisk::new(disk, core.buffer_pool().account(), label))
}

/// The outcome of `work`, or [`DiskErrorKind::Gone`] if no write to the disk has completed for a
/// minute.
async fn with_progress_timeout<T>(
    disk: &MemberDisk,
    work: impl Future<Output = Result<T, DiskError>>,
) -> Result<T, DiskError> {
    let mut work = pin!(work);
    loop {
        let completed = disk.completed_writes();
        if let Ok(ended) = timeout(LONG_DISK_TIMEOUT, work.as_mut()).await {
            return ended;
        }
        if disk.completed_writes() == completed {
            return Err(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
        }
    }
}

/// Writes what a member of a new pool holds; its label does not say yet that it is ready.
pub(super) async fn initialize_member(
    core: &Core,
    disk: &MemberDisk,
    claim_settings: &ClaimSettings,
    (snapshot, version_id): (&[u8], VersionId),
) -> Result<(), PoolError> {
    let labelled = with_progress_timeout(
        disk,
        disk.write_label(MemberLabel { term_start: version_id, ..disk.label() }),
    );
    labelled.await.map_err(|why| metadata_io_error(disk.path(), why))?;
    // From here on, if another machine does the same, one of the two finds the other's claim.
    let claimed = acquire_with_timeout(core, disk, claim_settings).await;
    claimed.map_err(|why| PoolError::on_disk(disk.path(), why))?;
    let written = async {
        disk.erase_snapshots().await?;
        disk.erase_journal_and_logs().await?;
        disk.write_snapshot(snapshot, version_id.version).await
    };
    with_progress_timeout(disk, written).await.map_err(|why| metadata_io_error(disk.path(), why))
}

pub(super) fn add_member_change(label: &MemberLabel, is_spare: bool) -> Change {
    Change::AddMember {
        member: label.member_id,
        uuid: label.member_uuid,
        serial: label.serial,
        physical_extents: label.layout.physical_extents,
        snapshot_blocks: label.layout.snapshot_blocks,
        extents_at: label.layout.extents_at,
        is_spare,
    }
}

/// Stale regions of the columns on a member that is reattached: extent number, column, regions.
fn stale_regions_on(
    metadata: &Metadata,
    id: MemberId,
    only_stale_regions: bool,
) -> Vec<(u64, u16, u32)> {
    let mut all = Vec::new();
    for (_, volume) in metadata.volumes() {
        for (index, extent) in volume.extents() {
            let on_member = (0u16..).zip(&extent.columns).filter(|(_, at)| at.member == id);
            for (column, _) in on_member {
                let regions = if only_stale_regions {
                    volume.stale_regions_of(index, column)
                } else {
                    ALL_REGIONS
                };
                if regions != 0 {
                    all.push((extent.number, column, regions));
                }
            }
        }
    }
    all
}
