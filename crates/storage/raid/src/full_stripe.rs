//! Full-stripe writes: written to a free slot without reading; only the move of the stripe is
//! logged.

use std::rc::Rc;

use block::{Bufs, BufsMut, Error, run_mut};
use futures_util::future::join_all;
use geometry::{Column, ROW_BYTES, StripRole};
use smallvec::SmallVec;

use super::fragments::StripFragment;
use super::log_batch::EntryKind;
use super::mistake::Mistake;
use super::parity_log::LogPositions;
use super::stripe::{Stripe, StripeError, page_aligned};

const ROW: usize = ROW_BYTES as usize;

impl Stripe<'_> {
    /// Writes all of stripe `number`. The caller holds the stripe lock.
    pub(super) async fn write_full_stripe(
        &self,
        number: u32,
        fragments: &[StripFragment],
    ) -> Result<(), StripeError> {
        let extent = Rc::clone(&self.extent);
        let reservation = extent.stripe_map.reserve_slot().await;
        let new = Stripe { slot: reservation.slot, ..self.clone() };
        let strips = new.strip_contents(fragments);
        let copied = strips.iter().filter(|data| !data.is_aligned(ROW)).count();
        let columns = u32::from(self.geometry.redundancy().parity_strips())
            + u32::try_from(copied).unwrap_or(0);
        let scratch = self.array.memory.acquire_scratch(columns * self.geometry.strip_rows()).await;
        let region = self.geometry.region_bit(new.slot);
        self.array.mark_stale(&extent, region).await?;
        if self.array.makes_mistake(Mistake::RecordsMoveBeforeData) {
            let (_, positions) = new.log_stripe_move(number).await?;
            self.array.record_stripe_move(&extent, positions);
        }
        let changes = self.array.members.changes();
        new.write_all_strips(strips).await?;
        drop(scratch);
        // The data must be durable before the entry that refers to it.
        self.array.flush().await?;
        self.array.mark_stale(&extent, region).await?;
        if !self.array.makes_mistake(Mistake::SkipsMoveRecord) {
            let (entry, positions) = new.log_stripe_move(number).await?;
            self.array.record_stripe_move(&extent, positions);
            reservation.commit(self.array.log_generation(), entry, number);
        } else {
            reservation.commit(self.array.log_generation(), u64::MAX / 2, number);
        }
        self.array.mark_current(&extent, new.slot, changes);
        Ok(())
    }

    /// The new contents of each data strip.
    fn strip_contents(&self, fragments: &[StripFragment]) -> Vec<Bufs> {
        let mut all: Vec<&StripFragment> = fragments.iter().collect();
        all.sort_unstable_by_key(|fragment| (fragment.strip, fragment.byte_offset));
        let mut strips = vec![Bufs::new(); usize::from(self.data_strips())];
        for StripFragment { strip, data, .. } in all {
            strips[usize::from(*strip)].append(data.clone());
        }
        strips
    }

    /// Writes all strips and parities, also to stale columns.
    async fn write_all_strips(&self, strips: Vec<Bufs>) -> Result<(), StripeError> {
        let align = |data: Bufs| {
            let len = data.len();
            page_aligned(data, || self.array.memory.scratch.alloc(len))
        };
        let strips: Vec<Bufs> = strips.into_iter().map(align).collect();
        let parities = self.compute_parities(&strips);
        let all = (0..).map(StripRole::Data).zip(strips).chain(parities);
        let all: Vec<(StripRole, Bufs)> = all.collect();
        let each = all.into_iter().map(|(role, data)| async move {
            let column = self.column_of(role)?;
            self.write_at(column, 0, data, false).await
        });
        join_all(each).await.into_iter().collect::<Result<(), Error>>()?;
        let missing =
            self.geometry.roles().filter(|role| self.available_column(*role).is_none()).count();
        if missing > usize::from(self.geometry.redundancy().parity_strips()) {
            // No move is logged: the stripe is unchanged in its old slot.
            return Err(StripeError::Unrecoverable);
        }
        Ok(())
    }

    /// The parities of all data strips, which must be equally long.
    pub(super) fn compute_parities(&self, strips: &[Bufs]) -> SmallVec<[(StripRole, Bufs); 2]> {
        let len = strips.first().map_or(0, Bufs::len);
        let scratch = |_| self.array.memory.scratch.alloc(len);
        let mut parities: SmallVec<[BufsMut; 2]> =
            (0..self.geometry.redundancy().parity_strips()).map(scratch).collect();
        let parity = self.array.parity;
        for_contiguous_runs(strips, &mut parities, |data, parities| match parities {
            [p, q] => parity.pq(data, p, q),
            parities => parities.iter_mut().for_each(|p| parity.xor(data, p)),
        });
        [StripRole::P, StripRole::Q].into_iter().zip(parities.into_iter().map(Bufs::from)).collect()
    }

    /// The column of a strip, if its member is attached.
    fn available_column(&self, role: StripRole) -> Option<Column> {
        self.column_of(role).ok().filter(|column| !self.array.is_detached(column.member))
    }

    /// Logs durably that stripe `number` lies in this slot: on the parity members, whose older
    /// entries it supersedes, and on enough further members to survive as many losses as the
    /// redundancy tolerates.
    async fn log_stripe_move(&self, number: u32) -> Result<(u64, LogPositions), StripeError> {
        let needed = usize::from(self.geometry.redundancy().parity_strips()) + 1;
        let is_parity = |role: &StripRole| !matches!(role, StripRole::Data(_));
        let (parities, data): (Vec<StripRole>, Vec<StripRole>) =
            self.geometry.roles().partition(is_parity);
        let members =
            parities.into_iter().chain(data).filter_map(|role| self.available_column(role));
        let to = members.take(needed).map(|column| (column.member, Vec::new())).collect();
        let kind = EntryKind::StripeMoved { stripe: number };
        Ok(self.array.append_to_logs(self.slot_id(), kind, to).await?)
    }
}

/// Calls `compute` with runs of `data` and `parities`, all equally long, that are contiguous in
/// each of them.
///
/// # Panics
/// If they are not equally long.
pub fn for_contiguous_runs(
    data: &[Bufs],
    parities: &mut [BufsMut],
    mut compute: impl FnMut(&[&[u8]], &mut [&mut [u8]]),
) {
    let (len, mut at) = (data.first().map_or(0, Bufs::len), 0);
    while at < len {
        let mut data: SmallVec<[&[u8]; 16]> = data.iter().map(|data| data.run(at)).collect();
        let mut parities: SmallVec<[&mut [u8]; 2]> =
            parities.iter_mut().map(|parity| run_mut(parity, at)).collect();
        let lens =
            data.iter().map(|run| run.len()).chain(parities.iter().map(|parity| parity.len()));
        let run = lens.min().unwrap_or(0);
        assert!(run > 0, "strips have equal lengths");
        data.iter_mut().for_each(|data| *data = &data[..run]);
        parities.iter_mut().for_each(|parity| *parity = &mut std::mem::take(parity)[..run]);
        compute(&data, &mut parities);
        at += run;
    }
}

#[cfg(test)]
mod tests {
    use block::{BufferPool, Credit, MemoryClass};
    use proptest::prelude::*;

    use super::*;

    fn cut(credit: &Credit, mut len: usize, lengths: &[usize]) -> BufsMut {
        let mut all = BufsMut::new();
        for length in lengths.iter().copied().chain([len]) {
            let length = len.min(length);
            all.extend(credit.alloc(length));
            len -= length;
        }
        all
    }

    proptest! {
        #[test]
        fn checksums_do_not_depend_on_how_data_is_split(
            len in 1usize..20_000,
            lengths in prop::collection::vec(prop::collection::vec(1usize..9000, 0..6), 1..7),
        ) {
            let pool = BufferPool::new(4 << 20).unwrap();
            let credit = pool.account().try_credit(2 << 20, MemoryClass::LocalIo).unwrap();
            let mut all: Vec<BufsMut> =
                lengths.iter().map(|lengths| cut(&credit, len, lengths)).collect();
            for (n, data) in all.iter_mut().enumerate() {
                let mut at = n;
                for byte in data.iter_mut().flat_map(|part| part.iter_mut()) {
                    (*byte, at) = ((at * 7 + n) as u8, at + 1);
                }
            }
            let mut parities = vec![all.pop().unwrap()];
            let data: Vec<Bufs> = all.into_iter().map(Bufs::from).collect();
            for_contiguous_runs(&data, &mut parities, |data, parities| {
                for (at, parity) in parities[0].iter_mut().enumerate() {
                    *parity = data.iter().fold(0, |parity, data| parity ^ data[at]);
                }
            });
            let parity = Bufs::from(parities.remove(0)).to_vec();
            for (at, parity) in parity.into_iter().enumerate().filter(|_| !data.is_empty()) {
                let expected = (0..data.len()).fold(0, |parity, n| parity ^ ((at + n) * 7 + n) as u8);
                prop_assert_eq!(parity, expected, "byte {}", at);
            }
        }
    }
}
