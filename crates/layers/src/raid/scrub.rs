//! All of an extent is read and compared while clients use it; what is wrong is written again where it is known what is right.
//!
//! With two parities, or three copies, it is known which strip of a row is wrong; with one parity, or two copies, only that one is.
//! What a disk does not give back is made of the others at any level.

use std::ops::Range;

use block::{Bufs, Error};
use smallvec::{SmallVec, smallvec};

use parity::Verdict;

use super::band::Band;
use super::geometry::{Level, Role};
use super::rebuild::Pace;
use super::row::There;
use super::stripe::{Failure, Had, Pages, Stripe, Unread, pages};
use super::{Array, Column, Damage, DamageKind, Raid};

/// Most rows that are compared at once.
const MOST_ROWS: u32 = 16;

/// What has been found in an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Rows of strips that were wrong, or could not be read, and are right now.
    pub repaired: u64,
    /// Rows of which something is wrong, and nobody knows what; or that are lost.
    pub unrepairable: u64,
}

impl Raid {
    /// Reads and compares all of the extent at `index`. It yields to clients as a rebuild does.
    ///
    /// # Errors
    /// What stops the array.
    pub async fn scrub(&self, index: u32, pace: Pace) -> Result<Scrubbed, Error> {
        self.compare(index, pace, false).await
    }

    /// The same; what is lost may be given up.
    pub(super) async fn compare(
        &self,
        index: u32,
        pace: Pace,
        gives_up: bool,
    ) -> Result<Scrubbed, Error> {
        let mut all = Scrubbed::default();
        for number in 0..self.shape.stripes() {
            let (begun, busy) = (tokio::time::Instant::now(), self.operations());
            let turn = self.turn(index, number).await;
            if self.extent(index).is_none() || self.stops() {
                break;
            }
            let stripe = self.stripe(index, number)?;
            let mut lost = Vec::new();
            match stripe.scrub(&mut all, &mut lost).await {
                Ok(()) => {}
                Err(Failure::Lost) => all.unrepairable += 1,
                Err(Failure::Array(error)) => return Err(error),
            }
            for row in lost {
                let given_up = match gives_up {
                    true => self.give_up((index, number), &stripe, row).await,
                    false => Ok(false),
                };
                match given_up {
                    Ok(true) => {}
                    Ok(false) | Err(Failure::Lost) => all.unrepairable += 1,
                    Err(Failure::Array(error)) => return Err(error),
                }
            }
            drop(turn);
            self.rest(begun, busy, pace).await;
        }
        Ok(all)
    }
}

impl Stripe<'_> {
    /// Reads and compares it; tells of rows that cannot be read, nor made of the rest.
    async fn scrub(&self, all: &mut Scrubbed, lost: &mut Vec<u32>) -> Result<(), Failure> {
        let most = (Array::MOST_PAGES / self.scrubbing_pages()).clamp(1, MOST_ROWS);
        let end = self.shape.strip_rows();
        for start in (0..end).step_by(most as usize) {
            let rows = start..end.min(start + most);
            match self.shape.level() {
                Level::Copies(_) => self.compare_copies(&rows, all, lost).await?,
                _ => self.compare_parity(&rows, all, lost).await?,
            }
        }
        Ok(())
    }

    /// Scratch memory for each row, in pages: what is read, and what is made of it.
    fn scrubbing_pages(&self) -> u32 {
        u32::from(self.shape.columns()) + u32::from(self.shape.level().parities())
    }

    async fn compare_parity(
        &self,
        rows: &Range<u32>,
        all: &mut Scrubbed,
        lost: &mut Vec<u32>,
    ) -> Result<(), Failure> {
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
                    Box::pin(self.compare_parity(&(row..row + 1), all, lost)).await?;
                }
            }
            Err(failed) => {
                for role in failed.roles() {
                    match self.write_again(rows, role).await {
                        Ok(()) => all.repaired += 1,
                        Err(Failure::Lost) => {
                            lost.extend(rows.clone());
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
                            all.repaired += 1;
                        }
                        None => {
                            self.tell_wrong(None, row);
                            all.unrepairable += 1;
                        }
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
        Ok(())
    }

    /// What is stored of a row, of one strip if it has copies, does not fit together.
    fn tell_wrong(&self, strip: Option<u16>, row: u32) {
        let rows = match strip {
            Some(strip) => self.data_of(strip, row..row + 1),
            None => self.data_of(0, 0..u32::try_from(self.shape.stripe_rows()).unwrap_or(0)),
        };
        let (kind, extent) = (DamageKind::Inconsistent, self.extent.number);
        self.array.tell_damaged(Damage { kind, member: None, extent, rows });
    }

    async fn compare_copies(
        &self,
        rows: &Range<u32>,
        all: &mut Scrubbed,
        lost: &mut Vec<u32>,
    ) -> Result<(), Failure> {
        for strip in 0..self.data() {
            self.compare_strip(strip, rows, all, lost).await?;
        }
        lost.dedup();
        Ok(())
    }

    async fn compare_strip(
        &self,
        strip: u16,
        rows: &Range<u32>,
        all: &mut Scrubbed,
        lost: &mut Vec<u32>,
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
                    self.tell_wrong(Some(strip), row);
                    all.unrepairable += 1;
                } else {
                    lost.push(row);
                }
                continue;
            };
            let wrong =
                rows.iter().filter(|(_, page)| page.as_ref().is_none_or(|p| p[..] != right[..]));
            for (column, _) in wrong {
                let _quiet = self.quiet().await;
                self.write_at(*column, row, right.clone().into(), false).await?;
                all.repaired += 1;
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
