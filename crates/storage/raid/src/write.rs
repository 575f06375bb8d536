//! Writes: whoever has a stripe's turn carries out what waits for it, band by band.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, Ctx, Error, Lba};
use futures_util::future::join_all;
use geometry::{Level, ROW_BYTES, Role};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Raid;
use super::array::{Array, Receipt, bit};
use super::at_once::all_of;
use super::band::{Band, bands};
use super::batch::What;
use super::marks::{Bits, Region};
use super::mistake::Mistake;
use super::part::Fragment;
use super::row::{Lost, Plan, Strips, There, Way, plan};
use super::stripe::{Failure, Had, Pages, Stripe, in_pages, pages};
use super::sums::sum_with;

const ROW: usize = ROW_BYTES as usize;

/// Most writes that one turn carries out.
const MOST_MERGED: usize = 32;

/// Rows of a strip's copies that one mark is for: 1 MiB.
const REGION_ROWS: u32 = 256;

/// Most bytes of zeroes that one write has, if stripes are no longer.
const ZERO_STEP: u64 = 1 << 20;

/// Such writes of one operation that are under way at once.
const ZEROES_AT_ONCE: usize = 8;

/// A write of one stripe that waits for its turn, or for somebody else's to carry it out.
#[derive(Debug)]
struct Job {
    fragments: Vec<Fragment>,
    fua: bool,
    outcome: Cell<Option<Result<(), Failure>>>,
}

/// A turn that is not over. Only a crash drops it, and then nobody knows what its stripe holds: nothing more is written.
struct Unfinished<'a>(Option<&'a Array>);

impl Unfinished<'_> {
    fn over(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|array| array.give_up(Error::Gone));
    }
}

/// What waits for its turn, by extent and stripe.
#[derive(Debug, Default)]
pub(super) struct Waiting(RefCell<FxHashMap<(u32, u32), Jobs>>);

type Jobs = Vec<Rc<Job>>;

impl Waiting {
    fn join(&self, key: (u32, u32), job: &Rc<Job>) {
        self.0.borrow_mut().entry(key).or_default().push(Rc::clone(job));
    }

    /// Those that one turn carries out, among which is whoever has it: the first ones.
    fn take(&self, key: (u32, u32)) -> Jobs {
        let mut all = self.0.borrow_mut();
        let Some(waiting) = all.get_mut(&key) else { return Jobs::new() };
        let count = waiting.len().min(MOST_MERGED);
        let taken = waiting.drain(..count).collect();
        if waiting.is_empty() {
            all.remove(&key);
        }
        taken
    }
}

impl Raid {
    /// Writes from byte `at` of the extents on; `lba` is the block to be named if that cannot be.
    pub(super) async fn write(
        &self,
        at: u64,
        data: Bufs,
        fua: bool,
        lba: Lba,
    ) -> Result<(), Error> {
        let mut stripes = self.fragments(at, &data).into_iter();
        let outcome = match (stripes.next(), stripes.len()) {
            (None, _) => Ok(()),
            (Some((key, only)), 0) => self.write_stripe(key, only, fua).await,
            (Some(first), _) => {
                let all = std::iter::once(first).chain(stripes);
                let each = all.map(|(key, fragments)| self.write_stripe(key, fragments, fua));
                // All of them to their end, whatever becomes of one.
                join_all(each).await.into_iter().collect()
            }
        };
        outcome.map_err(|failure| match failure {
            Failure::Lost => Error::Unwritable { at: lba },
            Failure::Array(error) => error,
        })
    }

    /// Makes bytes of the extents zero.
    pub(super) async fn zero(
        &self,
        bytes: Range<u64>,
        fua: bool,
        lba: Lba,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let each = self.mapped_steps(bytes).map(|step| async move {
            if ctx.is_aborted() {
                return Err(Error::Aborted);
            }
            let data = Bufs::zeroes(usize::try_from(step.end - step.start).unwrap_or(0));
            self.write(step.start, data, fua, lba).await
        });
        all_of(each, ZEROES_AT_ONCE).await
    }

    /// Where there are extents of these bytes, in steps that begin and end with stripes as far as these bytes do.
    fn mapped_steps(&self, bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let stripe = self.shape.stripe_rows() * u64::from(ROW_BYTES);
        let step = (ZERO_STEP / stripe).max(1) * stripe;
        let mut at = bytes.start;
        std::iter::from_fn(move || {
            while at < bytes.end {
                let (len, mapped) = self.run(&(at..bytes.end));
                let start = at;
                if mapped {
                    at = (start / step + 1).saturating_mul(step).min(start + len);
                    return Some(start..at);
                }
                at += len;
            }
            None
        })
    }

    /// `data` from byte `at` of the extents on, cut at strips, stripe by stripe.
    fn fragments(&self, at: u64, data: &Bufs) -> Vec<((u32, u32), Vec<Fragment>)> {
        let (row, end) = (u64::from(ROW_BYTES), at + data.len() as u64);
        let mut all: Vec<((u32, u32), Vec<Fragment>)> = Vec::new();
        let mut next = at;
        for (index, piece) in self.pieces(&(at / row..end.div_ceil(row))) {
            let skipped = usize::try_from(next % row).unwrap_or(0);
            let room = piece.rows.len() * ROW - skipped;
            let done = usize::try_from(next - at).unwrap_or(0);
            let len = room.min(data.len() - done);
            let fragment = Fragment {
                strip: piece.strip,
                at: piece.rows.start as usize * ROW + skipped,
                data: data.slice(done..done + len),
            };
            next += len as u64;
            let key = (index, piece.stripe);
            match all.last_mut() {
                Some((last, fragments)) if *last == key => fragments.push(fragment),
                _ => all.push((key, vec![fragment])),
            }
        }
        all
    }

    async fn write_stripe(
        &self,
        key: (u32, u32),
        fragments: Vec<Fragment>,
        fua: bool,
    ) -> Result<(), Failure> {
        self.ensure(key.0).await?;
        if self.is_part_of_lost(key, &fragments) {
            return Err(Failure::Lost);
        }
        let job = Rc::new(Job { fragments, fua, outcome: Cell::new(None) });
        self.waiting.join(key, &job);
        loop {
            let _turn = self.turn(key.0, key.1).await;
            if let Some(outcome) = job.outcome.get() {
                return outcome;
            }
            let jobs = self.waiting.take(key);
            let unfinished = Unfinished(Some(&self.array));
            let outcome = self.carry_out(key, &jobs).await;
            unfinished.over();
            jobs.iter().for_each(|job| job.outcome.set(Some(outcome)));
        }
    }

    async fn carry_out(&self, key: (u32, u32), jobs: &[Rc<Job>]) -> Result<(), Failure> {
        let stripe = self.stripe(key.0, key.1)?;
        let fua = jobs.iter().any(|job| job.fua);
        match jobs {
            [only] => stripe.change(key.1, &only.fragments, fua).await?,
            _ => {
                let all = jobs.iter().flat_map(|job| job.fragments.iter().cloned());
                stripe.change(key.1, &all.collect::<Vec<_>>(), fua).await?;
            }
        }
        if stripe.extent.lost.remembers_nothing() {
            return Ok(());
        }
        // What is rare is in a box.
        let written = jobs.iter().flat_map(|job| &job.fragments);
        Box::pin(self.regain(key, &stripe.extent, written)).await
    }
}

impl Stripe<'_> {
    /// Writes `fragments` of the stripe of this number. Whoever asks has its turn.
    async fn change(&self, number: u32, fragments: &[Fragment], fua: bool) -> Result<(), Failure> {
        if self.is_whole(fragments) {
            return self.write_whole(number, fragments).await;
        }
        let region = self.shape.region(self.place);
        self.array.announce(&self.extent, region).await?;
        let (parts, held) = self.whole_rows(fragments).await?;
        // Of a row that is written in part clients may read the rest.
        let _quiet = if held.is_some() { self.quiet().await } else { None };
        for turn in bands(&parts) {
            self.array.settle(self.spot()).await?;
            match &turn[..] {
                [only] => self.write_band(only, fua).await?,
                several => {
                    let each = several.iter().map(|band| self.write_band(band, fua));
                    join_all(each).await.into_iter().collect::<Result<(), _>>()?;
                }
            }
        }
        Ok(self.array.announce(&self.extent, region).await?)
    }

    async fn write_band(&self, band: &Band, fua: bool) -> Result<(), Failure> {
        self.write_band_by(band, There::default(), fua).await
    }

    /// Writes a band without looking at what is wrong of it, which is right then.
    pub(super) async fn write_band_without(
        &self,
        band: &Band,
        wrong: There,
    ) -> Result<(), Failure> {
        self.write_band_by(band, wrong, false).await
    }

    async fn write_band_by(
        &self,
        band: &Band,
        mut unreadable: There,
        fua: bool,
    ) -> Result<(), Failure> {
        let doubtful = self.doubtful_parities(&band.rows);
        loop {
            let (changed, there) = (band.changed(), self.there());
            // Without reading what is slow, if there is a way.
            let of = |unreadable| plan(self.data(), changed, there, unreadable);
            let sure = unreadable.or(doubtful);
            let how = of(sure.or(self.slow())).or_else(|Lost| of(sure));
            let how = how.or_else(|Lost| of(unreadable))?;
            let _room = self.array.room(self.pages_of(&how, band)).await;
            match self.gather(&band.rows, how.reads).await? {
                Ok(had) => return self.carry_out(band, &how, had, fua).await,
                Err(failed) => unreadable = unreadable.or(failed),
            }
        }
    }

    /// Parities that may not fit the data of these rows: they are not read, and made anew of all of it.
    fn doubtful_parities(&self, rows: &Range<u32>) -> There {
        let lost = &self.extent.lost;
        if lost.remembers_nothing() {
            return There::default();
        }
        let is_doubtful = |strip| lost.is_unrepaired(&self.data_of(strip, rows.clone()));
        let parities = self.shape.roles().filter(|role| !matches!(role, Role::Data(_)));
        match (0..self.data()).any(is_doubtful) {
            true => There::of(parities),
            false => There::default(),
        }
    }

    /// Scratch memory for a band, in pages: what is read and made, two sums for each parity, and the data if it has to be copied.
    fn pages_of(&self, how: &Plan, band: &Band) -> u32 {
        let parities = u32::from(self.shape.level().parities());
        let copied = band.data.iter().filter(|(_, data)| !data.is_aligned(ROW)).count();
        let made = if how.way == Way::Recover { parities } else { 0 };
        band.len() * (how.reads.len() + made + 2 * parities + u32::try_from(copied).unwrap_or(0))
    }

    async fn carry_out(&self, band: &Band, how: &Plan, had: Had, fua: bool) -> Result<(), Failure> {
        let had = match how.way {
            Way::Recover => {
                self.made(&band.rows, self.lost(how.reads), had, &self.array.scratch)?
            }
            _ => had,
        };
        let new = self.to_be(band);
        let parities = self.there().roles().filter(|role| !matches!(role, Role::Data(_)));
        let sums: SmallVec<[Sums; 2]> =
            parities.map(|role| self.sums(role, how.way, band, &had, &new)).collect();
        drop(had);
        if let Level::Copies(_) = self.shape.level() {
            return self.write_copies(band, &new, fua).await;
        }
        if self.array.makes(Mistake::WritesBeforeLog) {
            self.put(band, &new, &sums, fua).await?;
        }
        let receipt = self.log(band, how, &new, &sums).await?;
        self.tell_who_lacks_it().await?;
        let written = self.put(band, &new, &sums, fua).await;
        self.end(band.changed(), receipt, written, fua)
    }

    /// Writes strips that have no parity, wherever they have copies.
    async fn write_copies(&self, band: &Band, new: &[New], fua: bool) -> Result<(), Failure> {
        let is_single = self.shape.level().bears() == 0;
        let regions: SmallVec<[(Region, Bits); 2]> = if is_single
            || self.array.makes(Mistake::SkipsMarks)
        {
            SmallVec::new()
        } else {
            band.changed().iter().map(|strip| (self.region(strip), self.there_of(strip))).collect()
        };
        let what = |(_, first, strip): Region| {
            let stripes = self.region_stripes().min(self.shape.stripes() - first);
            What::Copies { stripes, changed: [strip].into_iter().collect() }
        };
        self.array.enter(&regions, what).await?;
        self.tell_who_lacks_it().await?;
        let written = self.put(band, new, &[], fua).await;
        let ended = self.end(band.changed(), Receipt::new(), written, fua);
        let regions: SmallVec<[Region; 2]> =
            regions.into_iter().map(|(region, _)| region).collect();
        self.array.leave(&regions, self.shape.region(self.place), fua).await?;
        ended
    }

    /// Somebody may have gone out since this was told before: the log of a parity that is out has no entry, and who believed
    /// that parity when its member is back would take it that nothing was begun.
    async fn tell_who_lacks_it(&self) -> Result<(), Error> {
        if self.array.makes(Mistake::TellsOnce) {
            return Ok(());
        }
        self.array.announce(&self.extent, self.shape.region(self.place)).await
    }

    /// Members that have a copy of a strip.
    fn there_of(&self, strip: u16) -> Bits {
        let there = self.columns_there(Role::Data(strip));
        there.fold(0, |all, column| all | bit(column.member))
    }

    /// Stripes of a region.
    fn region_stripes(&self) -> u32 {
        (REGION_ROWS / self.shape.strip_rows()).max(1)
    }

    fn region(&self, strip: u16) -> Region {
        let first = self.place / self.region_stripes() * self.region_stripes();
        (self.extent.number, first, strip)
    }

    /// Writes strips and parities.
    async fn put(&self, band: &Band, new: &[New], sums: &[Sums], fua: bool) -> Result<(), Error> {
        let data = new.iter().map(|new| (Role::Data(new.strip), new.data.clone()));
        let sums = sums.iter().map(|sums| (sums.role, sums.all.iter().cloned().collect()));
        let each = (data.chain(sums))
            .map(|(role, data): (_, Bufs)| self.write(role, band.rows.start, data, fua));
        join_all(each).await.into_iter().collect()
    }

    /// Strips of data that were not read.
    fn lost(&self, read: There) -> Strips {
        Strips::first(self.data()).without(read.data)
    }

    fn to_be(&self, band: &Band) -> SmallVec<[New; 2]> {
        let new = |(strip, data): &(u16, Bufs)| {
            let data = in_pages(data.clone(), || self.array.scratch.alloc(data.len()));
            New { strip: *strip, pages: pages(&data), data }
        };
        band.data.iter().map(new).collect()
    }

    fn sums(&self, role: Role, way: Way, band: &Band, had: &Had, new: &[New]) -> Sums {
        let (changed, count) = (band.changed(), band.rows.len());
        let parity = self.array.parity;
        let wrong = u16::from(self.array.makes(Mistake::WeighsQWrongly));
        let keeps_none = changed.len() == u32::from(self.data());
        let kept: Pages = if keeps_none {
            (0..count).map(|_| Buf::zeroes(ROW)).collect()
        } else {
            let mut pages = self.scratch_pages(count);
            for (n, page) in pages.iter_mut().enumerate() {
                had.row(self.data(), n).sum_of_kept(parity, role, way, changed, page);
            }
            pages.into_iter().map(BufMut::freeze).collect()
        };
        let mut all = self.scratch_pages(count);
        for (n, page) in all.iter_mut().enumerate() {
            let new: SmallVec<[(u16, &[u8]); 4]> =
                new.iter().map(|new| (new.strip + wrong, &new.pages[n][..])).collect();
            sum_with(parity, role, &kept[n], &new, page);
        }
        Sums { role, kept, all: all.into_iter().map(BufMut::freeze).collect() }
    }

    /// Puts an entry into the logs of the parities, if there are any.
    async fn log(
        &self,
        band: &Band,
        how: &Plan,
        new: &[New],
        sums: &[Sums],
    ) -> Result<Receipt, Failure> {
        if sums.is_empty() {
            return Ok(Receipt::new());
        }
        let logged = if how.logs_data { new } else { &[] };
        let each = sums.iter().map(|sums| {
            let blocks = |n: usize| {
                let data = logged.iter().map(move |new| new.pages[n].clone());
                std::iter::once(sums.kept[n].clone()).chain(data)
            };
            let member = self.column(sums.role)?.member;
            Ok((member, (0..band.rows.len()).flat_map(blocks).collect()))
        });
        let to = each.collect::<Result<SmallVec<[(u16, Vec<Buf>); 2]>, Error>>()?;
        let rows = u16::try_from(band.len()).unwrap_or(u16::MAX);
        let what = What::Rows { row: band.rows.start, rows, changed: band.changed() };
        Ok(self.array.log(self.spot(), what, to).await?.1)
    }

    /// A band has been written. Is it to be had, whatever has failed meanwhile?
    fn end(
        &self,
        changed: Strips,
        receipt: Receipt,
        written: Result<(), Error>,
        fua: bool,
    ) -> Result<(), Failure> {
        let there = self.there();
        let lost = self.lost(there);
        let is_held = changed.without(there.data).is_empty() || lost.len() <= there.parities();
        let failure = match written {
            Ok(()) if is_held => {
                if !receipt.is_empty() {
                    let region = self.shape.region(self.place);
                    self.array.completed(self.spot(), region, receipt, fua);
                }
                return Ok(());
            }
            Ok(()) => Failure::Lost,
            Err(error) => Failure::Array(error),
        };
        self.array.give_up(Error::Gone);
        Err(failure)
    }
}

/// What a strip is to hold.
struct New {
    strip: u16,
    data: Bufs,
    /// The same, row by row.
    pages: Pages,
}

/// What becomes of a parity.
struct Sums {
    role: Role,
    /// The sum of the strips that are kept, row by row,
    kept: Pages,
    /// and of all.
    all: Pages,
}
