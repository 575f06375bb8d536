//! What a column lacks is made of the others, stripe by stripe, while clients use the volume.
//!
//! Whoever has a stripe's turn and finds that a column lacks it writes as if its member were out. So a stripe may be filled at any
//! time that nobody else has its turn, and from then on it counts.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use block::{Bufs, Error};
use futures_util::future::join_all;
use geometry::{Level, Role};

use super::mistake::Mistake;
use super::row::There;
use super::stripe::{Failure, Stripe};
use super::{Array, Extent, Raid};

/// Most rows that are filled at once.
const MOST_FILLED: u32 = 16;

/// Stripes that are filled at once: what one of them waits for, another uses.
const STRIPES_AT_ONCE: usize = 4;

/// How a rebuild yields to clients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// So many times as long as a stripe has taken it rests before the next one, where clients have been busy meanwhile.
    pub rest: f64,
}

/// What a rebuild has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Stripes that were filled.
    pub stripes: u64,
    /// Those that cannot be: more is lost of them than their level bears, a member has failed, or it was stopped. They still lack
    /// what they lacked.
    pub failed: u64,
    /// Columns that lack nothing any more.
    pub whole: Vec<u16>,
}

impl Raid {
    /// Fills what columns of the extent at `index` lack whose members are in. Those that are `whole` then lack nothing any more, and
    /// that is durable.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn rebuild(&self, index: u32, pace: Pace) -> Result<Rebuilt, Error> {
        let mut rebuilt = Rebuilt::default();
        let Some(extent) = self.extent(index) else { return Ok(rebuilt) };
        let (columns, changes) = (extent.fillable(&self.array), self.array.changes());
        if columns.is_empty() {
            return Ok(rebuilt);
        }
        self.fill(index, &extent, &columns, pace, &mut rebuilt).await?;
        extent.lost.end_of_pass();
        if rebuilt.failed == 0 {
            self.array.save_map(&extent).await?;
            self.array.flush().await?;
            // Who went out meanwhile may have lost what was written to it, and who came in lacks something else.
            match self.array.changes() == changes {
                true => {
                    extent.have_all(&columns);
                    rebuilt.whole = columns;
                }
                false => rebuilt.failed += 1,
            }
        }
        Ok(rebuilt)
    }

    /// Fills what an extent lacks, again and again, as stripes may move to where something is lacking.
    async fn fill(
        &self,
        index: u32,
        extent: &Rc<Extent>,
        columns: &[u16],
        pace: Pace,
        rebuilt: &mut Rebuilt,
    ) -> Result<(), Error> {
        let (mut from, failed) = (0, rebuilt.failed);
        loop {
            // Another one that has come in its place lacks nothing.
            let is_it = self.extent(index).is_some_and(|now| Rc::ptr_eq(&now, extent));
            // Nor is one filled who has gone out meanwhile.
            let fillable = extent.fillable(&self.array);
            if self.stops() || !is_it || !columns.iter().all(|column| fillable.contains(column)) {
                rebuilt.failed += 1;
                return Ok(());
            }
            let stripes = extent.lacking_stripes(from, STRIPES_AT_ONCE, columns);
            let Some(last) = stripes.last().copied() else { break };
            let (begun, busy) = (tokio::time::Instant::now(), self.operations());
            let each = stripes.into_iter().map(|stripe| self.fill_stripe(index, stripe));
            for outcome in join_all(each).await {
                match outcome {
                    Ok(()) => rebuilt.stripes += 1,
                    Err(Failure::Lost) => rebuilt.failed += 1,
                    Err(Failure::Array(error)) => return Err(error),
                }
            }
            self.rest(begun, busy, pace).await;
            from = last + 1;
            if rebuilt.failed == failed && extent.lacking_stripes(from, 1, columns).is_empty() {
                from = 0;
            }
        }
        Ok(())
    }

    /// Rests if clients have been busy since something was begun, for as long as it has taken and they are to have.
    pub(super) async fn rest(&self, begun: tokio::time::Instant, busy: u64, pace: Pace) {
        if self.operations() != busy {
            tokio::time::sleep(begun.elapsed().mul_f64(pace.rest).min(LONGEST_REST)).await;
        }
    }

    async fn fill_stripe(&self, index: u32, number: u32) -> Result<(), Failure> {
        let _turn = match self.array.makes(Mistake::FillsWithoutTurn) {
            true => None,
            false => Some(self.turn(index, number).await),
        };
        if self.extent(index).is_none() {
            // It has been given back meanwhile.
            return Err(Failure::Lost);
        }
        let stripe = self.stripe(index, number)?;
        self.array.settle(stripe.spot()).await?;
        let changes = self.array.changes();
        let most = (Array::MOST_PAGES / stripe.filling_pages()).clamp(1, MOST_FILLED);
        let (key, rows, mut complete) = ((index, number), self.shape.strip_rows(), true);
        for start in (0..rows).step_by(most as usize) {
            let rows = start..rows.min(start + most);
            match stripe.fill(&rows).await {
                Err(Failure::Lost) => complete &= self.fill_singly(key, &stripe, &rows).await?,
                filled => filled?,
            }
        }
        if !complete {
            return Err(Failure::Lost);
        }
        match stripe.extent.has_now(stripe.place, &self.array, changes) {
            true => Ok(()),
            false => Err(Failure::Lost),
        }
    }
}

impl Raid {
    /// Fills row by row what cannot be filled at once; what is lost is given up in the end. Whether all is filled.
    async fn fill_singly(
        &self,
        key: (u32, u32),
        stripe: &Stripe<'_>,
        rows: &Range<u32>,
    ) -> Result<bool, Failure> {
        let mut complete = true;
        for row in rows.clone() {
            let filled = stripe.fill(&(row..row + 1)).await;
            match filled {
                Err(Failure::Lost) if self.give_up(key, stripe, row).await? => {
                    stripe.fill(&(row..row + 1)).await?;
                }
                Err(Failure::Lost) => complete = false,
                filled => filled?,
            }
        }
        Ok(complete)
    }
}

/// Longest rest between two stripes.
const LONGEST_REST: Duration = Duration::from_secs(1);

impl Stripe<'_> {
    fn filling_pages(&self) -> u32 {
        self.restoring_pages() + u32::from(self.shape.level().parities())
    }

    /// Fills rows of the columns that lack them.
    async fn fill(&self, rows: &Range<u32>) -> Result<(), Failure> {
        let _room = self.array.room((rows.end - rows.start) * self.filling_pages()).await;
        if let Level::Copies(_) = self.shape.level() {
            return self.fill_copies(rows).await;
        }
        let (had, _) = self.restore(rows, There::default()).await?;
        let lacking = There::of(self.lacking());
        let strip = |n| had.pages(Role::Data(n)).iter().cloned().collect();
        let strips: Vec<Bufs> = (0..self.data()).map(strip).collect();
        for strip in lacking.data.iter() {
            let data = strips[usize::from(strip)].clone();
            self.fill_role(Role::Data(strip), rows, data).await?;
        }
        if lacking.parities() > 0 {
            let parities = self.parities_of(&strips).into_iter();
            for (role, data) in parities.filter(|(role, _)| lacking.has(*role)) {
                self.fill_role(role, rows, data).await?;
            }
        }
        Ok(())
    }

    /// Strips that a member lacks which is not out.
    fn lacking(&self) -> impl Iterator<Item = Role> {
        self.shape.roles().filter(|role| {
            let mut lacking = self.lacking_columns(*role);
            lacking.next().is_some()
        })
    }

    async fn fill_copies(&self, rows: &Range<u32>) -> Result<(), Failure> {
        for strip in 0..self.data() {
            let role = Role::Data(strip);
            if self.lacking_columns(role).next().is_some() {
                let data = self.made_copy(strip, rows).await?;
                self.fill_role(role, rows, data.iter().cloned().collect()).await?;
            }
        }
        Ok(())
    }

    async fn fill_role(&self, role: Role, rows: &Range<u32>, data: Bufs) -> Result<(), Failure> {
        for column in self.lacking_columns(role).collect::<Vec<_>>() {
            self.write_at(column, rows.start, data.clone(), false).await?;
            if self.array.is_out(column.member) {
                return Err(Failure::Lost);
            }
        }
        Ok(())
    }
}
