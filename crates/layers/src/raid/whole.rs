//! Whole stripes: written to a spare place, of which nothing is read and nothing logged but that the stripe lies there now.

use std::rc::Rc;

use block::{BufMut, Bufs, Error};
use futures_util::future::join_all;
use smallvec::SmallVec;

use super::Column;
use super::array::Array;
use super::batch::What;
use super::geometry::{ROW_BYTES, Role};
use super::mistake::Mistake;
use super::part::Fragment;
use super::stripe::{Failure, Pages, Stripe, in_pages, pages};

const ROW: usize = ROW_BYTES as usize;

impl Stripe<'_> {
    /// Whether `fragments`, no two of which have a byte in common, are all of a stripe that may be written out of place.
    pub(super) fn is_whole(&self, fragments: &[Fragment]) -> bool {
        let bytes: usize = fragments.iter().map(|fragment| fragment.data.len()).sum();
        let parities = u64::from(self.shape.level().parities());
        let all = self.shape.stripe_rows();
        let needed = parities * u64::from(self.shape.strip_rows()) + all;
        parities > 0
            && bytes as u64 == all * u64::from(ROW_BYTES)
            && needed <= u64::from(Array::MOST_PAGES)
    }

    /// Writes all of the stripe of this number. Whoever asks has its turn.
    pub(super) async fn write_whole(
        &self,
        number: u32,
        fragments: &[Fragment],
    ) -> Result<(), Failure> {
        let extent = Rc::clone(&self.extent);
        let spare = extent.placement.take().await;
        let new = Stripe { place: spare.place, ..self.clone() };
        let strips = new.strips(fragments);
        let copied = strips.iter().filter(|data| !data.is_aligned(ROW)).count();
        let columns = u32::from(self.shape.level().parities()) + u32::try_from(copied).unwrap_or(0);
        let room = self.array.room(columns * self.shape.strip_rows()).await;
        let region = self.shape.region(new.place);
        self.array.announce(&extent, region).await?;
        if self.array.makes(Mistake::RecordsBeforeData) {
            let (_, receipt) = new.record(number).await?;
            self.array.recorded(&extent, receipt);
        }
        let changes = self.array.changes();
        new.put_all(strips).await?;
        drop(room);
        // What the record says must be so whenever it is found.
        self.array.flush().await?;
        self.array.announce(&extent, region).await?;
        if !self.array.makes(Mistake::SkipsRecord) {
            let (entry, receipt) = new.record(number).await?;
            self.array.recorded(&extent, receipt);
            spare.moved(self.array.era(), entry, number);
        } else {
            spare.moved(self.array.era(), u64::MAX / 2, number);
        }
        extent.has_now(new.place, self.array, changes);
        Ok(())
    }

    /// What each strip of data is to hold.
    fn strips(&self, fragments: &[Fragment]) -> Vec<Bufs> {
        let mut all: Vec<&Fragment> = fragments.iter().collect();
        all.sort_unstable_by_key(|fragment| (fragment.strip, fragment.at));
        let mut strips = vec![Bufs::new(); usize::from(self.data())];
        for Fragment { strip, data, .. } in all {
            strips[usize::from(*strip)].append(data.clone());
        }
        strips
    }

    /// Writes all strips and parities, also where a column lacks what was there before.
    async fn put_all(&self, strips: Vec<Bufs>) -> Result<(), Failure> {
        let own = |data: Bufs| {
            let len = data.len();
            in_pages(data, || self.array.scratch.alloc(len))
        };
        let strips: Vec<Bufs> = strips.into_iter().map(own).collect();
        let rows: Vec<Pages> = strips.iter().map(pages).collect();
        let all = (0..).map(Role::Data).zip(strips).chain(self.parities_of(&rows));
        let all: Vec<(Role, Bufs)> = all.collect();
        let each = all.into_iter().map(|(role, data)| async move {
            let column = self.column(role)?;
            self.write_at(column, 0, data, false).await
        });
        join_all(each).await.into_iter().collect::<Result<(), Error>>()?;
        let lost = self.shape.roles().filter(|role| self.member_in(*role).is_none()).count();
        if lost > usize::from(self.shape.level().parities()) {
            // Nothing has been recorded: the stripe is where and what it was.
            return Err(Failure::Lost);
        }
        Ok(())
    }

    /// The parities of rows of all strips of data.
    pub(super) fn parities_of(&self, strips: &[Pages]) -> impl Iterator<Item = (Role, Bufs)> {
        let count = strips.first().map_or(0, Pages::len);
        let mut sums: SmallVec<[Vec<BufMut>; 2]> =
            (0..self.shape.level().parities()).map(|_| self.scratch_pages(count)).collect();
        for n in 0..count {
            let data: SmallVec<[&[u8]; 16]> = strips.iter().map(|pages| &pages[n][..]).collect();
            match &mut sums[..] {
                [p, q] => self.array.parity.pq(&data, &mut p[n], &mut q[n]),
                sums => sums.iter_mut().for_each(|p| self.array.parity.xor(&data, &mut p[n])),
            }
        }
        let frozen = |pages: Vec<BufMut>| pages.into_iter().map(BufMut::freeze).collect();
        [Role::P, Role::Q].into_iter().zip(sums.into_iter().map(frozen))
    }

    /// The column of a strip, if its member is not out.
    fn member_in(&self, role: Role) -> Option<Column> {
        self.column(role).ok().filter(|column| !self.array.is_out(column.member))
    }

    /// Makes durable that stripe `number` lies here: with the parities, whose older entries it ends, and on as many more members
    /// as make it outlive what the level bears.
    async fn record(&self, number: u32) -> Result<(u64, super::array::Receipt), Failure> {
        let wanted = usize::from(self.shape.level().parities()) + 1;
        let is_parity = |role: &Role| !matches!(role, Role::Data(_));
        let (parities, data): (Vec<Role>, Vec<Role>) = self.shape.roles().partition(is_parity);
        let members = parities.into_iter().chain(data).filter_map(|role| self.member_in(role));
        let to = members.take(wanted).map(|column| (column.member, Vec::new())).collect();
        let what = What::Whole { stripe: number };
        Ok(self.array.log(self.spot(), what, to).await?)
    }
}
