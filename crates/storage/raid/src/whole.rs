//! Whole stripes: written to a spare place, of which nothing is read and nothing logged but that the stripe lies there now.

use std::rc::Rc;

use block::{Bufs, BufsMut, Error, run_mut};
use futures_util::future::join_all;
use geometry::{Column, ROW_BYTES, Role};
use smallvec::SmallVec;

use super::array::Array;
use super::batch::What;
use super::mistake::Mistake;
use super::part::Fragment;
use super::stripe::{Failure, Stripe, in_pages};

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
        let parities = self.parities_of(&strips);
        let all = (0..).map(Role::Data).zip(strips).chain(parities);
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

    /// The parities of all strips of data, which are equally long.
    pub(super) fn parities_of(&self, strips: &[Bufs]) -> SmallVec<[(Role, Bufs); 2]> {
        let len = strips.first().map_or(0, Bufs::len);
        let scratch = |_| self.array.scratch.alloc(len);
        let mut sums: SmallVec<[BufsMut; 2]> =
            (0..self.shape.level().parities()).map(scratch).collect();
        let parity = self.array.parity;
        by_runs(strips, &mut sums, |data, sums| match sums {
            [p, q] => parity.pq(data, p, q),
            sums => sums.iter_mut().for_each(|p| parity.xor(data, p)),
        });
        [Role::P, Role::Q].into_iter().zip(sums.into_iter().map(Bufs::from)).collect()
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

/// Makes `sums` of `data`, all of which are equally long: as much at once as is in one piece everywhere.
///
/// # Panics
/// If they are not.
pub fn by_runs(
    data: &[Bufs],
    sums: &mut [BufsMut],
    mut make: impl FnMut(&[&[u8]], &mut [&mut [u8]]),
) {
    let (len, mut at) = (data.first().map_or(0, Bufs::len), 0);
    while at < len {
        let mut data: SmallVec<[&[u8]; 16]> = data.iter().map(|data| data.run(at)).collect();
        let mut sums: SmallVec<[&mut [u8]; 2]> =
            sums.iter_mut().map(|sum| run_mut(sum, at)).collect();
        let lens = data.iter().map(|run| run.len()).chain(sums.iter().map(|sum| sum.len()));
        let run = lens.min().unwrap_or(0);
        assert!(run > 0, "strips are equally long");
        data.iter_mut().for_each(|data| *data = &data[..run]);
        sums.iter_mut().for_each(|sum| *sum = &mut std::mem::take(sum)[..run]);
        make(&data, &mut sums);
        at += run;
    }
}

#[cfg(test)]
mod tests {
    use block::{Class, Credit, Pool};
    use proptest::prelude::*;

    use super::*;

    fn cut(credit: &Credit, mut len: usize, pieces: &[usize]) -> BufsMut {
        let mut all = BufsMut::new();
        for piece in pieces.iter().copied().chain([len]) {
            let piece = len.min(piece);
            all.extend(credit.alloc(piece));
            len -= piece;
        }
        all
    }

    proptest! {
        #[test]
        fn pieces_do_not_change_sums(
            len in 1usize..20_000,
            pieces in prop::collection::vec(prop::collection::vec(1usize..9000, 0..6), 1..7),
        ) {
            let pool = Pool::new(4 << 20).unwrap();
            let credit = pool.account().try_credit(2 << 20, Class::Immediate).unwrap();
            let mut all: Vec<BufsMut> =
                pieces.iter().map(|pieces| cut(&credit, len, pieces)).collect();
            for (n, data) in all.iter_mut().enumerate() {
                let mut at = n;
                for byte in data.iter_mut().flat_map(|part| part.iter_mut()) {
                    (*byte, at) = ((at * 7 + n) as u8, at + 1);
                }
            }
            let mut sums = vec![all.pop().unwrap()];
            let data: Vec<Bufs> = all.into_iter().map(Bufs::from).collect();
            by_runs(&data, &mut sums, |data, sums| {
                for (at, sum) in sums[0].iter_mut().enumerate() {
                    *sum = data.iter().fold(0, |sum, data| sum ^ data[at]);
                }
            });
            let sum = Bufs::from(sums.remove(0)).to_vec();
            for (at, sum) in sum.into_iter().enumerate().filter(|_| !data.is_empty()) {
                let wanted = (0..data.len()).fold(0, |sum, n| sum ^ ((at + n) * 7 + n) as u8);
                prop_assert_eq!(sum, wanted, "byte {}", at);
            }
        }
    }
}
