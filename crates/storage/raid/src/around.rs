//! Reads that go around a member that lags: others answer them, and nothing is written back.
//!
//! What is read for that goes on by itself if the member answers first, and may be read while it is written: then nobody looks at it.

use std::ops::Range;
use std::time::Duration;

use block::{Bufs, Ctx, Error};
use futures_util::future::join_all;
use geometry::{Column, Level, Piece, ROW_BYTES, Role};
use smallvec::SmallVec;

use super::Raid;
use super::array::bit;
use super::mistake::Mistake;
use super::quiet::Reading;
use super::read::MOST_RESTORED;
use super::row::{Strips, There};
use super::stripe::{Had, Stripe, Unread, pages};
use super::watch::{Flying, Lags};

/// How long until is tried again whether others give what a member does not answer.
const AGAIN: Duration = Duration::from_secs(1);

/// Why a read has no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// It has failed.
    Unread(Unread),
    /// The member there lags. It may have been asked.
    Lags(Column, Option<Box<Flying>>),
}

impl Unanswered {
    /// Whether something may be under way still.
    pub(super) fn keeps_memory(&self) -> bool {
        match self {
            Self::Unread(unread) => !unread.is_damage(),
            Self::Lags(_, flying) => flying.is_some(),
        }
    }
}

impl From<Unread> for Unanswered {
    fn from(unread: Unread) -> Self {
        Self::Unread(unread)
    }
}

impl Stripe<'_> {
    /// What lies on members that are slow.
    pub(super) fn slow(&self) -> There {
        match self.array.slow() {
            0 => There::default(),
            slow => self.on(slow),
        }
    }

    /// What lies on these members and nowhere else.
    fn on(&self, members: u128) -> There {
        let is_elsewhere = |role: &Role| {
            let mut others = self.columns_there(*role).filter(|c| members & bit(c.member) == 0);
            others.next().is_some()
        };
        self.all().without(There::of(self.shape.roles().filter(is_elsewhere)))
    }

    /// Reads rows of one strip as [`Self::read`] does, unless the member lags.
    pub(super) async fn read_in_time(
        &self,
        role: Role,
        rows: &Range<u32>,
        ctx: &Ctx,
    ) -> Result<Bufs, Unanswered> {
        let asked = if self.array.slow() == 0 { None } else { self.to_be_asked(role) };
        let column = asked.or_else(|| self.idlest(role)).ok_or(Unread(None))?;
        if asked.is_none() && self.may_go_around(role, column.member) {
            return Err(Unanswered::Lags(column, None));
        }
        let failed = |error| Unread(Some((column, error)));
        let (at, count) = (self.at(column, rows.start), rows.end - rows.start);
        let mut flying = self.array.begin_read(column.member, at, count, ctx).map_err(failed)?;
        if asked.is_some() {
            // It is not waited for.
            return Err(Unanswered::Lags(column, Some(Box::new(flying))));
        }
        match flying.in_time().await {
            Ok(Ok(data)) => Ok(data),
            Ok(Err(error)) => {
                self.array.count_unread(column.member);
                Err(failed(error).into())
            }
            Err(Lags) => Err(Unanswered::Lags(column, Some(Box::new(flying)))),
        }
    }

    /// A member that is slow, and of which is to be seen whether it still is.
    fn to_be_asked(&self, role: Role) -> Option<Column> {
        let slow = self.array.slow();
        let is_it = |c: &Column| {
            slow & bit(c.member) != 0
                && self.of_others(role, c.member).is_some()
                && self.array.is_to_be_asked(c.member)
        };
        self.columns_there(role).find(is_it)
    }

    /// Whether `member` is slow, and others give a strip that lies on it.
    fn may_go_around(&self, role: Role, member: u16) -> bool {
        self.array.slow() & bit(member) != 0 && self.of_others(role, member).is_some()
    }

    /// What is to be read for a strip without asking `member`, and none of those that are slow; none if that is not enough.
    fn of_others(&self, role: Role, member: u16) -> Option<There> {
        let avoided = self.on(self.array.slow() | bit(member));
        let there = self.there().without(avoided);
        if there.has(role) {
            return Some(There::of([role]));
        }
        let lost = Strips::first(self.data()).without(there.data).len();
        let one_is_enough = there.p && lost < there.parities();
        (lost <= there.parities()).then_some(There { q: there.q && !one_is_enough, ..there })
    }

    /// Rows of a strip without asking `member`. Where there is parity, whoever asks has the stripe's turn.
    async fn made_of_others(&self, role: Role, rows: &Range<u32>, member: u16) -> Option<Bufs> {
        let what = self.of_others(role, member)?;
        let lost = Strips::first(self.data()).without(what.data);
        let is_there = what.has(role);
        let pages_of_row = what.len() + if is_there { 0 } else { lost.len() };
        let ctx = self.array.apart(rows.len() * (pages_of_row * ROW_BYTES) as usize)?;
        let avoided = self.array.slow() | bit(member);
        let begun = what.roles().map(|role| {
            let column = self.columns_there(role).find(|c| avoided & bit(c.member) == 0)?;
            let (at, count) = (self.at(column, rows.start), rows.end - rows.start);
            let flying = self.array.begin_read(column.member, at, count, &ctx).ok()?;
            Some((role, flying.apart()))
        });
        let begun: SmallVec<[_; 4]> = begun.collect::<Option<_>>()?;
        let mut had = Had::default();
        let each = begun.into_iter().map(|(role, read)| async move { (role, read.await) });
        for (role, found) in join_all(each).await {
            had.add(role, pages(&found.ok()?.ok()?));
        }
        let had = if is_there { had } else { self.made(rows, lost, had, &ctx).ok()? };
        Some(had.pages(role).iter().cloned().collect())
    }
}

impl Raid {
    /// What others give of a piece, without `member`; none if they do not. It may be dropped at any time.
    async fn made_of_others(&self, index: u32, piece: &Piece, member: u16) -> Option<Bufs> {
        let copies = matches!(self.shape.level(), Level::Copies(_));
        let _turn = match copies || self.array.makes(Mistake::GoesAroundWithoutTurn) {
            true => None,
            false => Some(self.turn(index, piece.stripe).await),
        };
        let stripe = self.stripe(index, piece.stripe).ok()?;
        let (mut data, mut start) = (Bufs::new(), piece.rows.start);
        while start < piece.rows.end {
            let rows = start..piece.rows.end.min(start + MOST_RESTORED);
            start = rows.end;
            data.append(stripe.made_of_others(Role::Data(piece.strip), &rows, member).await?);
        }
        self.array.went_around(member);
        Some(data)
    }

    /// Reads a piece of which a member lags: whoever answers first is believed.
    pub(super) async fn read_around(
        &self,
        (index, piece): (u32, &Piece),
        (column, flying): (Column, Option<Box<Flying>>),
        reading: Option<Reading<'_>>,
        ctx: &Ctx,
    ) -> Result<Bufs, Unread> {
        let member = column.member;
        if let Some(mut flying) = flying {
            let answer = self.first_answer((index, piece), member, &mut flying, reading).await;
            match answer {
                Some(Ok(data)) => return Ok(data),
                Some(Err(error)) => {
                    self.array.count_unread(member);
                    return Err(Unread(Some((column, error))));
                }
                None => flying.let_go(),
            }
        } else {
            drop(reading);
        }
        match self.made_of_others(index, piece, member).await {
            Some(data) => Ok(data),
            None => self.read_anyhow(index, piece, ctx).await,
        }
    }

    /// What comes first: the answer of a member that lags, or what others give. None if somebody wants to write what is read:
    /// then the member may not be believed any more.
    async fn first_answer(
        &self,
        (index, piece): (u32, &Piece),
        member: u16,
        flying: &mut Box<Flying>,
        reading: Option<Reading<'_>>,
    ) -> Option<Result<Bufs, Error>> {
        let waited_for = async {
            match &reading {
                Some(reading) => reading.is_waited_for().await,
                None => std::future::pending().await,
            }
        };
        let of_others = async {
            loop {
                if let Some(data) = self.made_of_others(index, piece, member).await {
                    return data;
                }
                tokio::time::sleep(AGAIN).await;
            }
        };
        tokio::select! {
            biased;
            answer = &mut **flying => Some(answer),
            () = waited_for => None,
            data = of_others => {
                flying.let_go();
                Some(Ok(data))
            }
        }
    }

    /// Reads a piece from where it is, however long that takes.
    async fn read_anyhow(&self, index: u32, piece: &Piece, ctx: &Ctx) -> Result<Bufs, Unread> {
        let (role, gone) = (Role::Data(piece.strip), |_| Unread(None));
        let stripe = self.stripe(index, piece.stripe).map_err(gone)?;
        match self.reads.begin(super::stripe::key(index, piece.stripe)) {
            Some(_reading) => stripe.read(role, &piece.rows, ctx).await,
            None => {
                let _turn = self.turn(index, piece.stripe).await;
                let stripe = self.stripe(index, piece.stripe).map_err(gone)?;
                stripe.read(role, &piece.rows, ctx).await
            }
        }
    }
}
