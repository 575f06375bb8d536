//! Hedged reads: when a member is late, the read is also served from other members; nothing is
//! written back.
//!
//! These reads run on as orphans if the late member replies first. They may overlap a later write;
//! their result is then ignored.

use std::ops::Range;
use std::time::Duration;

use block::{Bufs, Ctx, Error};
use futures_util::future::join_all;
use geometry::{Column, ROW_BYTES, Redundancy, StripRole, StripRun};
use smallvec::SmallVec;

use super::health::{DeadlineExceeded, MemberIo};
use super::member_bits::member_bit;
use super::mistake::Mistake;
use super::read_locks::SharedReadLock;
use super::row_plan::{Available, StripSet};
use super::stripe::{MAX_RECONSTRUCT_ROWS, ReadFailure, ReadSet, Stripe, split_into_rows};
use super::stripe_locks::stripe_key;
use super::volume::RaidVolume;

/// Interval between attempts to read from other members.
const ALTERNATIVE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Why a read has no direct reply.
#[derive(Debug)]
pub(super) enum NoDirectReply {
    /// The read failed.
    Failed(ReadFailure),
    /// The member is late, or was skipped without an operation.
    Late(Column, Option<Box<MemberIo>>),
}

impl NoDirectReply {
    /// Whether an operation may still be in flight.
    pub(super) fn may_hold_memory(&self) -> bool {
        match self {
            Self::Failed(failure) => !failure.is_damage(),
            Self::Late(_, io) => io.is_some(),
        }
    }
}

impl From<ReadFailure> for NoDirectReply {
    fn from(failure: ReadFailure) -> Self {
        Self::Failed(failure)
    }
}

impl Stripe<'_> {
    /// Reads rows of a strip as [`Self::read`] does, until the member is late.
    pub(super) async fn read_with_deadline(
        &self,
        role: StripRole,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, NoDirectReply> {
        let probe = if self.array.members.slow() == 0 { None } else { self.probe_column(role) };
        let column = probe.or_else(|| self.least_busy_column(role)).ok_or(ReadFailure(None))?;
        if probe.is_none() && self.can_avoid(role, column.member) {
            return Err(NoDirectReply::Late(column, None));
        }
        let failed = |error| ReadFailure(Some((column, error)));
        let (at, count) = (self.member_row(column, rows.start), rows.end - rows.start);
        let mut io = self.array.begin_read(column.member, at, count, ctx).map_err(failed)?;
        if probe.is_some() {
            // Only a probe, so it is not waited for.
            return Err(NoDirectReply::Late(column, Some(Box::new(io))));
        }
        match io.reply_before_deadline().await {
            Ok(Ok(data)) => Ok(data),
            Ok(Err(error)) => {
                self.array.members.count_read_error(column.member);
                Err(failed(error).into())
            }
            Err(DeadlineExceeded) => Err(NoDirectReply::Late(column, Some(Box::new(io)))),
        }
    }

    /// A column on a slow member that is due for a probe.
    fn probe_column(&self, role: StripRole) -> Option<Column> {
        let slow = self.array.members.slow();
        let is_due = |c: &Column| {
            slow & member_bit(c.member) != 0
                && self.alternative_reads(role, c.member).is_some()
                && self.array.members.is_probe_due(c.member)
        };
        self.available_columns(role).find(is_due)
    }

    /// Whether `member` is slow, and the strip can be read from others.
    fn can_avoid(&self, role: StripRole, member: u16) -> bool {
        self.array.members.slow() & member_bit(member) != 0
            && self.alternative_reads(role, member).is_some()
    }

    /// The strips to read for `role` without `member` and without slow members; none if they are
    /// not enough.
    fn alternative_reads(&self, role: StripRole, member: u16) -> Option<Available> {
        let avoided = self.strips_only_on(self.array.members.slow() | member_bit(member));
        let available = self.available().difference(avoided);
        if available.contains(role) {
            return Some(Available::from_roles([role]));
        }
        let missing = StripSet::first(self.data_strips()).difference(available.data).len();
        let one_is_enough = available.p && missing < available.parity_count();
        (missing <= available.parity_count())
            .then_some(Available { q: available.q && !one_is_enough, ..available })
    }

    /// Reads rows of a strip without `member`. With parity, the caller holds the stripe lock.
    async fn read_alternative(
        &self,
        role: StripRole,
        rows: &Range<u32>,
        member: u16,
    ) -> Option<Bufs> {
        let strips = self.alternative_reads(role, member)?;
        let missing = StripSet::first(self.data_strips()).difference(strips.data);
        let is_direct = strips.contains(role);
        let pages_of_row = strips.len() + if is_direct { 0 } else { missing.len() };
        let ctx = self.array.memory.hedge_ctx(rows.len() * (pages_of_row * ROW_BYTES) as usize)?;
        let avoid = self.array.members.slow() | member_bit(member);
        let reads = strips.roles().map(|role| {
            let column =
                self.available_columns(role).find(|c| avoid & member_bit(c.member) == 0)?;
            let (at, count) = (self.member_row(column, rows.start), rows.end - rows.start);
            let io = self.array.begin_read(column.member, at, count, &ctx).ok()?;
            Some((role, io.spawn_orphaned()))
        });
        let reads: SmallVec<[_; 4]> = reads.collect::<Option<_>>()?;
        let mut read_set = ReadSet::default();
        let each = reads.into_iter().map(|(role, read)| async move { (role, read.await) });
        for (role, found) in join_all(each).await {
            read_set.insert(role, split_into_rows(&found.ok()?.ok()?));
        }
        let read_set = if is_direct {
            read_set
        } else {
            self.reconstruct_missing(rows, missing, read_set, &ctx).ok()?
        };
        Some(read_set.pages_of(role).iter().cloned().collect())
    }
}

impl RaidVolume {
    /// Reads a run without `member`; none if that fails. May be dropped at any time.
    async fn read_alternative(&self, index: u32, run: &StripRun, member: u16) -> Option<Bufs> {
        let copies = matches!(self.geometry.redundancy(), Redundancy::Copies(_));
        let _lock = match copies || self.array.makes_mistake(Mistake::HedgesWithoutStripeLock) {
            true => None,
            false => Some(self.lock_stripe((index, run.stripe)).await),
        };
        let stripe = self.stripe((index, run.stripe)).ok()?;
        let (mut data, mut start) = (Bufs::new(), run.rows.start);
        while start < run.rows.end {
            let rows = start..run.rows.end.min(start + MAX_RECONSTRUCT_ROWS);
            start = rows.end;
            data.append(stripe.read_alternative(StripRole::Data(run.strip), &rows, member).await?);
        }
        self.array.members.count_hedged_read(member);
        Some(data)
    }

    /// Reads a run whose member is late; the first reply wins.
    pub(super) async fn hedged_read(
        &self,
        (index, run): (u32, &StripRun),
        (column, io): (Column, Option<Box<MemberIo>>),
        read_lock: Option<SharedReadLock<'_>>,
        ctx: &Ctx,
    ) -> Result<Bufs, ReadFailure> {
        let member = column.member;
        if let Some(mut io) = io {
            let reply = self.first_reply((index, run), member, &mut io, read_lock).await;
            match reply {
                Some(Ok(data)) => return Ok(data),
                Some(Err(error)) => {
                    self.array.members.count_read_error(member);
                    return Err(ReadFailure(Some((column, error))));
                }
                None => io.orphan(),
            }
        } else {
            drop(read_lock);
        }
        match self.read_alternative(index, run, member).await {
            Some(data) => Ok(data),
            None => self.read_without_deadline(index, run, ctx).await,
        }
    }

    /// The first reply: of the late member, or from others. None if a writer wants to rewrite these
    /// blocks: then the late member's data must not be used any more.
    async fn first_reply(
        &self,
        (index, run): (u32, &StripRun),
        member: u16,
        io: &mut Box<MemberIo>,
        read_lock: Option<SharedReadLock<'_>>,
    ) -> Option<Result<Bufs, Error>> {
        let excluded = async {
            match &read_lock {
                Some(read_lock) => read_lock.exclusion_requested().await,
                None => std::future::pending().await,
            }
        };
        let alternative = async {
            loop {
                if let Some(data) = self.read_alternative(index, run, member).await {
                    return data;
                }
                tokio::time::sleep(ALTERNATIVE_RETRY_INTERVAL).await;
            }
        };
        tokio::select! {
            biased;
            reply = &mut **io => Some(reply),
            () = excluded => None,
            data = alternative => {
                io.orphan();
                Some(Ok(data))
            }
        }
    }

    /// Reads a run directly, without a deadline.
    async fn read_without_deadline(
        &self,
        index: u32,
        run: &StripRun,
        ctx: &Ctx,
    ) -> Result<Bufs, ReadFailure> {
        let (role, gone) = (StripRole::Data(run.strip), |_| ReadFailure(None));
        let stripe = self.stripe((index, run.stripe)).map_err(gone)?;
        match self.read_locks.try_lock_shared(stripe_key((index, run.stripe))) {
            Some(_read_lock) => stripe.read(role, &run.rows, ctx).await,
            None => {
                let _lock = self.lock_stripe((index, run.stripe)).await;
                let stripe = self.stripe((index, run.stripe)).map_err(gone)?;
                stripe.read(role, &run.rows, ctx).await
            }
        }
    }
}
