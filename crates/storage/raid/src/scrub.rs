//! All of an extent is read and compared while clients use it; what is wrong is written again where it is known what is right.
//!
//! With two parities, or three copies, it is known which strip of a row is wrong; with one parity, or two copies, only that one is.
//! What a disk does not give back is made of the others at any level.

use std::ops::Range;

use block::{Bufs, Error};
use geometry::{Column, DamageKind, Level, Role, Scrubbed};
use parity::Verdict;
use smallvec::{SmallVec, smallvec};

use super::band::Band;
use super::rebuild::Pace;
use super::row::There;
use super::stripe::{Failure, Had, Pages, Stripe, Unread, pages};
use super::{Array, Damage, Raid};

/// Most rows that are compared at once.
const MOST_ROWS: u32 = 16;

/// Which time it is that an extent is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// What cannot be read is tried again, and given up if that has been so for long.
    First,
    /// What can still not be read, and is not given up, is remembered.
    Last,
}

/// What is found as a stripe is compared.
#[derive(Debug, Default)]
struct Compared {
    all: Scrubbed,
    /// Rows of the stripe that cannot be read, nor made of the rest.
    lost: Vec<u32>,
    /// Rows of the data of the extent that do not fit together.
    wrong: Vec<Range<u32>>,
}

impl Raid {
    /// Reads and compares all of the extent at `index`. It yields to clients as a rebuild does. What does not fit
    /// together is remembered; of what cannot be read that is for [`Self::scrub_again`].
    ///
    /// # Errors
    /// What stops the array.
    pub async fn scrub(&self, index: u32, pace: Pace) -> Result<Scrubbed, Error> {
        let scrubbed = self.compare(index, pace, Pass::First).await?;
        self.extent(index).iter().for_each(|extent| extent.lost.end_of_pass());
        Ok(scrubbed)
    }

    /// Whether something of the extent at `index` could not be read when it was compared last.
    #[must_use]
    pub fn has_unread(&self, index: u32) -> bool {
        self.extent(index).is_some_and(|extent| extent.lost.unread.get())
    }

    /// Tries once more to read what could not be read of the extent at `index`, [`FAILING`](super::FAILING) after it
    /// was scrubbed. It is given up as lost then, or remembered if a disk is out that may have it.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn scrub_again(&self, index: u32, pace: Pace) -> Result<(), Error> {
        for pass in [Pass::First, Pass::Last] {
            let Some(extent) = self.extent(index).filter(|e| e.lost.unread.get()) else {
                return Ok(());
            };
            self.compare(index, pace, pass).await?;
            extent.lost.end_of_pass();
        }
        Ok(())
    }

    pub(super) async fn compare(
        &self,
        index: u32,
        pace: Pace,
        pass: Pass,
    ) -> Result<Scrubbed, Error> {
        let mut all = Scrubbed::default();
        self.extent(index).iter().for_each(|extent| extent.lost.unread.set(false));
        for number in 0..self.shape.stripes() {
            let (begun, busy) = (tokio::time::Instant::now(), self.operations());
            let turn = self.turn(index, number).await;
            if self.extent(index).is_none() || self.stops() {
                break;
            }
            match self.compare_stripe((index, number), pass, &mut all).await {
                Ok(()) => {}
                Err(Failure::Lost) => all.unrepairable += 1,
                Err(Failure::Array(error)) => return Err(error),
            }
            drop(turn);
            self.rest(begun, busy, pace).await;
        }
        Ok(all)
    }

    /// Compares a stripe, of which the caller has the turn.
    async fn compare_stripe(
        &self,
        key: (u32, u32),
        pass: Pass,
        all: &mut Scrubbed,
    ) -> Result<(), Failure> {
        let stripe = self.stripe(key.0, key.1)?;
        let mut found = Compared::default();
        let compared = stripe.scrub(&mut found).await;
        all.repaired += found.all.repaired;
        all.unrepairable += found.all.unrepairable + found.lost.len() as u64;
        for row in found.lost {
            let given_up = match self.give_up(key, &stripe, row).await {
                Err(Failure::Lost) => false,
                given_up => given_up?,
            };
            if given_up {
                continue;
            }
            stripe.extent.lost.unread.set(true);
            if pass == Pass::Last {
                found.wrong.extend(stripe.unreadable_data(row).await?);
            }
        }
        self.remember_unrepaired(key.0, &stripe.extent, found.wrong).await?;
        compared
    }
}

impl Stripe<'_> {
    /// Reads and compares it.
    async fn scrub(&self, found: &mut Compared) -> Result<(), Failure> {
        let most = (Array::MOST_PAGES / self.scrubbing_pages()).clamp(1, MOST_ROWS);
        let end = self.shape.strip_rows();
        for start in (0..end).step_by(most as usize) {
            let rows = start..end.min(start + most);
            match self.shape.level() {
                Level::Copies(_) => self.compare_copies(&rows, found).await?,
                _ => self.compare_parity(&rows, found).await?,
            }
        }
        Ok(())
    }

    /// Scratch memory for each row, in pages: what is read, and what is made of it.
    fn scrubbing_pages(&self) -> u32 {
        u32::from(self.shape.columns()) + u32::from(self.shape.level().parities())
    }

    async fn compare_parity(&self, rows: &Range<u32>, found: &mut Compared) -> Result<(), Failure> {
        let there = self.there();
        let gathered = {
            let _room = self.array.room((rows.end - rows.start) * self.scrubbing_pages()).await;
            match self.gather(rows, there).await? {
                Ok(had) => Ok(self.wrong_rows(&had, there, rows)),
                Err(failed) => Err(failed),
            }
        };
        match gathered {
            // Each row by itself: a disk that does not give one back gives others.
            Err(_) if rows.len() > 1 => {
                for row in rows.clone() {
                    Box::pin(self.compare_parity(&(row..row + 1), found)).await?;
                }
            }
            Err(failed) => {
                for role in failed.roles() {
                    match self.write_again(rows, role).await {
                        Ok(()) => found.all.repaired += 1,
                        Err(Failure::Lost) => {
                            found.lost.extend(rows.clone());
                            break;
                        }
                        Err(failure) => return Err(failure),
                    }
                }
            }
            Ok(wrong) => {
                for (row, role) in wrong {
                    match role {
                        Some(role) => {
                            self.write_again(&(row..row + 1), role).await?;
                            found.all.repaired += 1;
                        }
                        None => self.tell_wrong(None, row, found),
                    }
                }
            }
        }
        Ok(())
    }

    /// Rows whose parities do not fit, and which strip is wrong if that is known. Where something is missing nothing can be said.
    fn wrong_rows(&self, had: &Had, there: There, rows: &Range<u32>) -> Vec<(u32, Option<Role>)> {
        if there != self.all() {
            return Vec::new();
        }
        let strips: Vec<&[block::Buf]> =
            (0..self.data()).map(|n| had.pages(Role::Data(n))).collect();
        let (p, q) = (had.pages(Role::P), had.pages(Role::Q));
        let wrong = (0usize..).zip(rows.clone()).filter_map(|(n, row)| {
            let data: SmallVec<[&[u8]; 16]> = strips.iter().map(|pages| &pages[n][..]).collect();
            let verdict = match (p.get(n), q.get(n)) {
                (Some(p), Some(q)) => self.array.parity.check_pq(&data, p, q),
                (Some(p), None) if !self.array.parity.check_p(&data, p) => Verdict::Several,
                _ => Verdict::Matches,
            };
            match verdict {
                Verdict::Matches => None,
                Verdict::P => Some((row, Some(Role::P))),
                Verdict::Q => Some((row, Some(Role::Q))),
                Verdict::Data(n) => Some((row, u16::try_from(n).ok().map(Role::Data))),
                Verdict::Several => Some((row, None)),
            }
        });
        wrong.collect()
    }

    /// Writes rows of a strip again, made of the others, with all that a write has: an older entry of the log would else be
    /// believed after a crash.
    async fn write_again(&self, rows: &Range<u32>, role: Role) -> Result<(), Failure> {
        let wrong = There::of([role]);
        let strip = if let Role::Data(strip) = role { strip } else { 0 };
        let data: Bufs = {
            let _room = self.array.room((rows.end - rows.start) * self.restoring_pages()).await;
            let (had, _) = self.restore(rows, wrong).await?;
            let own = had.pages(Role::Data(strip)).iter().map(|page| {
                let mut copy = block::BufMut::lone_page();
                copy.copy_from_slice(page);
                copy.freeze()
            });
            own.collect()
        };
        self.array.settle(self.spot()).await?;
        let _quiet = self.quiet().await;
        let band = Band { rows: rows.clone(), data: smallvec![(strip, data)] };
        self.write_band_without(&band, wrong).await?;
        self.array.announce(&self.extent, self.shape.region(self.place)).await?;
        for column in self.columns_there(role) {
            self.array.count_repaired(column.member, rows.end - rows.start);
        }
        Ok(())
    }

    /// What is stored of a row, of one strip if it has copies, does not fit together.
    fn tell_wrong(&self, strip: Option<u16>, row: u32, found: &mut Compared) {
        found.all.unrepairable += 1;
        let strips = strip.map_or(0..self.data(), |strip| strip..strip + 1);
        found.wrong.extend(strips.map(|strip| self.data_of(strip, row..row + 1)));
        let rows = match strip {
            Some(strip) => self.data_of(strip, row..row + 1),
            None => self.data_of(0, 0..u32::try_from(self.shape.stripe_rows()).unwrap_or(0)),
        };
        let (kind, extent) = (DamageKind::Inconsistent, self.extent.number);
        self.array.tell_damaged(Damage { kind, member: None, extent, rows });
    }

    async fn compare_copies(&self, rows: &Range<u32>, found: &mut Compared) -> Result<(), Failure> {
        for strip in 0..self.data() {
            self.compare_strip(strip, rows, found).await?;
        }
        found.lost.dedup();
        Ok(())
    }

    async fn compare_strip(
        &self,
        strip: u16,
        rows: &Range<u32>,
        found: &mut Compared,
    ) -> Result<(), Failure> {
        let columns: SmallVec<[Column; 4]> = self.columns_there(Role::Data(strip)).collect();
        let count = rows.end - rows.start;
        let copies = u32::try_from(columns.len()).unwrap_or(u32::MAX);
        let _room = self.array.room(count.saturating_mul(copies)).await;
        let mut read: SmallVec<[(Column, Option<Pages>); 4]> = SmallVec::new();
        for column in columns {
            match self.read_at(column, rows, &self.array.scratch).await {
                Ok(data) => read.push((column, Some(pages(&data)))),
                Err(error) => {
                    self.unread(Unread(Some((column, error)))).await?;
                    read.push((column, None));
                }
            }
        }
        for (n, row) in (0usize..).zip(rows.clone()) {
            let of = |pages: &Option<Pages>| pages.as_ref().map(|pages| pages[n].clone());
            let rows: SmallVec<[_; 4]> = read.iter().map(|(c, pages)| (*c, of(pages))).collect();
            let Some(right) = most(&rows) else {
                if rows.iter().any(|(_, page)| page.is_some()) {
                    self.tell_wrong(Some(strip), row, found);
                } else {
                    found.lost.push(row);
                }
                continue;
            };
            let wrong =
                rows.iter().filter(|(_, page)| page.as_ref().is_none_or(|p| p[..] != right[..]));
            for (column, _) in wrong {
                let _quiet = self.quiet().await;
                self.write_at(*column, row, right.clone().into(), false).await?;
                self.array.count_repaired(column.member, 1);
                found.all.repaired += 1;
            }
        }
        Ok(())
    }
}

/// What more than half of those say that say anything; none if there is nothing of the kind.
fn most(rows: &[(Column, Option<block::Buf>)]) -> Option<block::Buf> {
    let said: SmallVec<[&block::Buf; 4]> =
        rows.iter().filter_map(|(_, page)| page.as_ref()).collect();
    let alike = |page: &block::Buf| said.iter().filter(|other| other[..] == page[..]).count();
    said.iter().find(|page| alike(page) * 2 > said.len()).map(|page| (*page).clone())
}
