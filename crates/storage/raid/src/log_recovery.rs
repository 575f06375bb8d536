//! Log recovery: after a crash, replays the latest log entry of each row before the pool accepts
//! operations.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;

use block::{Buf, BufMut, Bufs, Error, Lba};
use futures_util::{Stream, StreamExt, stream};
use geometry::{Column, RaidGeometry, StripRole};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::array::Array;
use super::extent::Extent;
use super::log_batch::{
    BATCH_BLOCKS, BLOCK_BYTES, BatchError, EntryKind, LogBatch, LogEntry, RING_BATCHES, RingId,
};
use super::row_parity::{complete_parity, compute_parity};
use super::row_plan::{Available, StripSet};
use super::row_recovery::{LoggedRow, RecoveryAction, recovery_action};
use super::stripe::{ReadFailure, Stripe, StripeError, split_into_rows};

/// Rows that are recovered at a time.
const MAX_CONCURRENT_ROWS: usize = 16;

/// Rows of copies that are compared at a time.
const RESYNC_ROWS: u32 = 16;

/// A ring of the log generation that a crash ended.
#[derive(Clone, Copy, Debug)]
pub struct PreviousRing {
    /// Number of the member that it lies on.
    pub member: u16,
    /// Its identity.
    pub ring: RingId,
    /// Where it begins on the member.
    pub first_block: Lba,
}

/// The result of log recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Rows named by entries, and strips of copies, that were recovered.
    pub recovered: u64,
    /// Those that could not be made consistent: too much is missing.
    pub unrecoverable: u64,
}

/// A row: extent, slot, row in the strip.
type RowKey = (u64, u32, u32);

/// The latest entry of a row.
struct LatestEntry {
    number: u64,
    changed: StripSet,
    /// Whether it is certainly the latest: a log that has it lacks no later batch.
    is_known_latest: bool,
    /// What the logs of these members hold for the row.
    blocks: SmallVec<[(u16, Vec<Buf>); 2]>,
}

/// The contents of the rings of one core, on all members.
pub struct LogContents {
    log_generation: u64,
    latest_entries: BTreeMap<RowKey, LatestEntry>,
    copies: BTreeSet<CopyKey>,
    stripe_moves: StripeMoves,
    missing_batches: Vec<(u16, u64)>,
}

impl LogContents {
    /// Reads these rings, of this log generation. Members whose ring cannot be read are detached.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a ring is inconsistent or has an unknown format version; nothing has
    /// been changed then. Also errors that stop the array.
    pub async fn read(
        array: &Array,
        generation: u64,
        rings: &[PreviousRing],
    ) -> Result<Self, Error> {
        let (latest_entries, copies, stripe_moves) =
            (BTreeMap::new(), BTreeSet::new(), StripeMoves::new());
        let mut contents = Self {
            log_generation: generation,
            latest_entries,
            copies,
            stripe_moves,
            missing_batches: Vec::new(),
        };
        for ring in rings.iter().filter(|ring| !array.is_detached(ring.member)) {
            match read_ring(array, ring).await {
                Ok((batches, missing)) => {
                    let last_missing = missing.last().copied();
                    for batch in batches {
                        let is_certain =
                            last_missing.is_none_or(|missing| batch.sequence > missing);
                        contents.add_batch(ring.member, batch, is_certain);
                    }
                    let count = missing.len() as u64;
                    contents.missing_batches.extend((count > 0).then_some((ring.member, count)));
                }
                Err(error @ Error::Corrupt { .. }) => return Err(error),
                Err(error) => array.detach_member(ring.member, error).await?,
            }
        }
        Ok(contents)
    }

    fn add_batch(&mut self, member: u16, batch: LogBatch, is_certain: bool) {
        let moved = batch.entries.iter().filter_map(stripe_move_of);
        moved.for_each(|(slot, moved)| keep_latest_move(&mut self.stripe_moves, slot, moved));
        self.copies.extend(batch.entries.iter().filter_map(copies_of).flatten());
        collect_rows(&mut self.latest_entries, member, batch, is_certain);
    }

    /// The extents that the entries name. Some may have been freed since.
    #[must_use]
    pub fn extents(&self) -> BTreeSet<u64> {
        let rows = self.latest_entries.keys().map(|key| key.0);
        let copies = self.copies.iter().map(|key| key.0);
        rows.chain(copies).chain(self.stripe_moves.keys().map(|key| key.0)).collect()
    }

    /// The slots that the entries name, with their extents.
    pub fn slots(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let rows = self.latest_entries.keys().map(|key| (key.0, key.1));
        let copies = self.copies.iter().map(|key| (key.0, key.1));
        rows.chain(copies).chain(self.stripe_moves.keys().copied())
    }

    /// The members that lack batches which they once had, and how many: other rows may not match
    /// their parity.
    pub fn missing_batches(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.missing_batches.iter().copied()
    }

    /// Recovers the writes that were in progress in these extents, durably. `array` must have
    /// unwritten logs of a new generation.
    ///
    /// # Errors
    /// Errors that stop the array.
    pub async fn recover(
        mut self,
        array: &Array,
        extents: &[(RaidGeometry, Rc<Extent>)],
    ) -> Result<RecoveryReport, Error> {
        let by_number: FxHashMap<u64, &(RaidGeometry, Rc<Extent>)> =
            extents.iter().map(|known| (known.1.number, known)).collect();
        apply_stripe_moves(array, self.log_generation, &self.stripe_moves, &by_number).await?;
        // Row writes to a slot from before a full-stripe write to it are void.
        self.latest_entries.retain(|key: &RowKey, latest: &mut LatestEntry| {
            self.stripe_moves
                .get(&(key.0, key.1))
                .is_none_or(|found| found.entry_number < latest.number)
        });
        let rows = self.latest_entries.into_iter().filter_map(|(key, latest)| {
            // An extent freed since has no rows.
            let (geometry, extent) = by_number.get(&key.0)?;
            let extent = Rc::clone(extent);
            let stripe =
                Stripe { array, geometry: *geometry, extent, slot: key.1, read_locks: None };
            (key.1 < geometry.slots() && key.2 < geometry.strip_rows())
                .then_some((stripe, key.2, latest))
        });
        let mut report = RecoveryReport::default();
        let rows = stream::iter(rows)
            .map(|(stripe, row, latest)| async move { stripe.recover_row(row, &latest).await });
        report.count_outcomes(rows.buffer_unordered(MAX_CONCURRENT_ROWS)).await?;
        let regions = self.copies.into_iter().filter_map(|(number, slot, strip)| {
            let (geometry, extent) = by_number.get(&number)?;
            let (geometry, extent) = (*geometry, Rc::clone(extent));
            (slot < geometry.stripes())
                .then_some((Stripe { array, geometry, extent, slot, read_locks: None }, strip))
        });
        let regions = stream::iter(regions)
            .map(|(stripe, strip)| async move { stripe.resync_copies(strip).await });
        report.count_outcomes(regions.buffer_unordered(MAX_CONCURRENT_ROWS)).await?;
        array.flush().await?;
        Ok(report)
    }
}

impl fmt::Debug for LogContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogContents")
            .field("rows", &self.latest_entries.len())
            .finish_non_exhaustive()
    }
}

impl RecoveryReport {
    /// Counts the outcomes of rows, or of strips of copies.
    async fn count_outcomes(
        &mut self,
        outcomes: impl Stream<Item = Result<(), StripeError>>,
    ) -> Result<(), Error> {
        let mut outcomes = pin!(outcomes);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(()) => self.recovered += 1,
                Err(StripeError::Unrecoverable) => self.unrecoverable += 1,
                Err(StripeError::Array(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The latest full-stripe write to each slot, by extent and slot.
type StripeMoves = BTreeMap<(u64, u32), StripeMove>;

/// The move of a stripe to another slot.
struct StripeMove {
    entry_number: u64,
    stripe: u32,
}

fn stripe_move_of(entry: &LogEntry) -> Option<((u64, u32), StripeMove)> {
    let LogEntry { number, extent, slot, kind } = *entry;
    let EntryKind::StripeMoved { stripe } = kind else { return None };
    Some(((extent, slot), StripeMove { entry_number: number, stripe }))
}

fn keep_latest_move(moves: &mut StripeMoves, slot: (u64, u32), moved: StripeMove) {
    match moves.get(&slot) {
        Some(known) if known.entry_number >= moved.entry_number => {}
        _ => drop(moves.insert(slot, moved)),
    }
}

/// Applies moves to the stripe maps, and saves these.
async fn apply_stripe_moves(
    array: &Array,
    generation: u64,
    moves: &StripeMoves,
    by_number: &FxHashMap<u64, &(RaidGeometry, Rc<Extent>)>,
) -> Result<(), Error> {
    let mut sorted: Vec<_> = moves.iter().collect();
    sorted.sort_unstable_by_key(|(_, moved)| moved.entry_number);
    let mut changed = BTreeMap::new();
    for ((number, slot), moved) in sorted {
        let Some((geometry, extent)) = by_number.get(number) else { continue };
        let is_new = *slot < geometry.slots()
            && extent.stripe_map.apply_move(generation, moved.entry_number, moved.stripe, *slot);
        if is_new {
            changed.insert(*number, extent);
        }
    }
    for extent in changed.into_values() {
        array.save_stripe_map(extent).await?;
    }
    Ok(())
}

/// A strip: extent, slot, strip number.
type CopyKey = (u64, u32, u16);

/// The strips whose copies an entry names.
fn copies_of(entry: &LogEntry) -> Option<impl Iterator<Item = CopyKey> + use<>> {
    let LogEntry { extent, slot, kind, .. } = *entry;
    let EntryKind::WriteIntent { stripes, changed } = kind else { return None };
    let end = slot.saturating_add(stripes);
    Some((slot..end).flat_map(move |slot| changed.iter().map(move |n| (extent, slot, n))))
}

/// The batches of a ring from its tail on, and the sequence numbers of the
/// [missing](missing_sequences) ones.
async fn read_ring(array: &Array, ring: &PreviousRing) -> Result<(Vec<LogBatch>, Vec<u64>), Error> {
    let mut batches = Vec::new();
    let blocks = u32::try_from(BATCH_BLOCKS).unwrap_or(u32::MAX);
    for slot in 0..RING_BATCHES {
        let at = ring.first_block.0 + u64::from(slot * blocks);
        let _scratch = array.memory.acquire_scratch(blocks).await;
        let data = array.read_member(ring.member, at, blocks, &array.memory.scratch).await?;
        match LogBatch::parse(&data, &ring.ring) {
            Ok(batch) if LogBatch::ring_index(batch.sequence) == slot => {
                batches.push(with_own_blocks(batch));
            }
            // Misdirected write.
            Ok(_) => {}
            Err(BatchError::NoMagic | BatchError::Torn | BatchError::WrongRing) => {}
            Err(why @ (BatchError::Version(_) | BatchError::Inconsistent)) => {
                tracing::error!(member = ring.member, slot, error = %why, "the parity log cannot be read");
                return Err(Error::Corrupt { at: Lba(at) });
            }
        }
    }
    let newest = batches.iter().max_by_key(|batch| batch.sequence);
    let (tail, newest) = newest.map_or((1, 0), |batch| (batch.tail, batch.sequence));
    batches.retain(|batch| batch.sequence >= tail);
    batches.sort_unstable_by_key(|batch| batch.sequence);
    let missing = missing_sequences(tail, newest, &batches);
    Ok((batches, missing))
}

/// Sequence numbers of batches that must have been durable, since later ones exist, but are absent.
/// The batch in whose place the next one would be written may be torn by that, and does not count.
fn missing_sequences(tail: u64, newest: u64, batches: &[LogBatch]) -> Vec<u64> {
    let from = tail.max(newest.saturating_add(2).saturating_sub(RING_BATCHES.into()));
    let is_present =
        |sequence: &u64| batches.binary_search_by_key(sequence, |b| b.sequence).is_ok();
    (from..=newest).filter(|sequence| !is_present(sequence)).collect()
}

/// Copies the blocks of a batch: its read buffer is needed for the next one.
fn with_own_blocks(batch: LogBatch) -> LogBatch {
    let copy = |block: &Buf| {
        let mut page = BufMut::heap_page();
        page.copy_from_slice(block);
        page.freeze()
    };
    LogBatch { blocks: batch.blocks.iter().map(copy).collect(), ..batch }
}

/// Notes the rows of a batch, unless a later entry of a row is known.
fn collect_rows(
    latest: &mut BTreeMap<RowKey, LatestEntry>,
    member: u16,
    batch: LogBatch,
    is_certain: bool,
) {
    let mut blocks = batch.blocks.into_iter();
    for entry in batch.entries {
        let LogEntry { number, extent, slot, kind } = entry;
        let EntryKind::RowsWritten { row, rows, changed } = kind else { continue };
        let each = entry.payload_blocks() / usize::from(rows);
        for n in 0..u32::from(rows) {
            let row_blocks: Vec<Buf> = blocks.by_ref().take(each).collect();
            let key = (extent, slot, row.saturating_add(n));
            let new_entry =
                || LatestEntry { number, changed, is_known_latest: false, blocks: SmallVec::new() };
            let found = latest.entry(key).or_insert_with(new_entry);
            if found.number < number {
                *found = new_entry();
            }
            if found.number == number {
                found.blocks.push((member, row_blocks));
                found.is_known_latest |= is_certain;
            }
        }
    }
}

impl LatestEntry {
    fn blocks_of(&self, column: Column) -> Option<&[Buf]> {
        self.blocks.iter().find(|(m, _)| *m == column.member).map(|(_, blocks)| &blocks[..])
    }
}

impl Stripe<'_> {
    /// Recovers a row by its latest entry; detached columns become stale there.
    async fn recover_row(&self, row: u32, latest: &LatestEntry) -> Result<(), StripeError> {
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale(&self.extent, region).await?;
        let outcome = self.recover_by_entry(row, latest).await;
        self.array.mark_stale(&self.extent, region).await?;
        outcome
    }

    async fn recover_by_entry(&self, row: u32, latest: &LatestEntry) -> Result<(), StripeError> {
        if !latest.is_known_latest {
            return self.recompute_parity(row).await;
        }
        let logged =
            |role| self.column_of(role).is_ok_and(|column| latest.blocks_of(column).is_some());
        let row_entry = LoggedRow {
            changed: latest.changed,
            in_p_log: logged(StripRole::P),
            in_q_log: logged(StripRole::Q),
        };
        let (mut available, pages) = (self.available(), 2 * self.all_strips().len());
        let _scratch = self.array.memory.acquire_scratch(pages).await;
        loop {
            let unreadable = match recovery_action(row_entry, available) {
                RecoveryAction::Nothing => return Ok(()),
                RecoveryAction::UpdateParity(strip) => {
                    self.update_parity_from_strip(row, latest, strip).await?
                }
                RecoveryAction::ReconstructFromP(strip) => {
                    self.reconstruct_from_p(row, latest, strip).await?
                }
                RecoveryAction::ReplayData => return self.replay_data(row, latest).await,
            };
            match unreadable {
                None => return Ok(()),
                Some(StripRole::Data(strip)) => {
                    available.data = available.data.difference([strip].into_iter().collect());
                }
                Some(_) => return Err(StripeError::Unrecoverable),
            }
        }
    }

    /// Recomputes the parities from the data as it is: the logged data may be older, and must not
    /// come back.
    async fn recompute_parity(&self, row: u32) -> Result<(), StripeError> {
        let available = self.available();
        if available.data.len() < self.data_strips().into() {
            return Err(StripeError::Unrecoverable);
        }
        let _scratch = self.array.memory.acquire_scratch(2 * self.all_strips().len()).await;
        let data = Available { p: false, q: false, ..available };
        let Ok(read_set) = self.read_strips(&(row..row + 1), data).await? else {
            return Err(StripeError::Unrecoverable);
        };
        let data: SmallVec<[&[u8]; 16]> = (0..self.data_strips())
            .map(|n| &read_set.pages_of(StripRole::Data(n))[0][..])
            .collect();
        for role in (Available { data: StripSet::default(), ..available }).roles() {
            let mut page = self.array.memory.scratch.credit().alloc_page(BLOCK_BYTES);
            compute_parity(self.array.parity, role, &data, &mut page);
            self.write(role, row, page.into(), false).await?;
        }
        Ok(())
    }

    /// Makes the copies of a strip equal to the first readable one. Detached columns become stale
    /// there.
    async fn resync_copies(&self, strip: u16) -> Result<(), StripeError> {
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale(&self.extent, region).await?;
        self.resync_strip_copies(strip).await?;
        Ok(self.array.mark_stale(&self.extent, region).await?)
    }

    async fn resync_strip_copies(&self, strip: u16) -> Result<(), StripeError> {
        if self.available_columns(StripRole::Data(strip)).count() < 2 {
            return Ok(());
        }
        let rows = self.geometry.strip_rows();
        for start in (0..rows).step_by(RESYNC_ROWS as usize) {
            let rows = start..rows.min(start + RESYNC_ROWS);
            match self.resync_copy_rows(strip, &rows).await {
                // Different rows may be readable on different copies.
                Err(StripeError::Unrecoverable) => {
                    for row in rows {
                        self.resync_copy_rows(strip, &(row..row + 1)).await?;
                    }
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    async fn resync_copy_rows(&self, strip: u16, rows: &Range<u32>) -> Result<(), StripeError> {
        let columns: SmallVec<[Column; 4]> =
            self.available_columns(StripRole::Data(strip)).collect();
        let copies = u32::try_from(columns.len()).unwrap_or(u32::MAX);
        let _scratch =
            self.array.memory.acquire_scratch((rows.end - rows.start).saturating_mul(copies)).await;
        let mut known: Option<Bufs> = None;
        let mut others = SmallVec::<[Column; 4]>::new();
        for column in columns {
            match (self.read_at(column, rows, &self.array.memory.scratch).await, &known) {
                (Ok(data), None) => known = Some(data),
                (Ok(data), Some(first)) if data.same_bytes(first) => {}
                (Ok(_), Some(_)) => others.push(column),
                (Err(error), _) => {
                    self.handle_read_failure(ReadFailure(Some((column, error)))).await?;
                    others.push(column);
                }
            }
        }
        let known = known.ok_or(StripeError::Unrecoverable)?;
        for column in others {
            self.write_at(column, rows.start, known.clone(), false).await?;
        }
        Ok(())
    }

    /// Recomputes the parities with the contents of a strip. Returns the strip if it cannot be
    /// read.
    async fn update_parity_from_strip(
        &self,
        row: u32,
        latest: &LatestEntry,
        strip: u16,
    ) -> Result<Option<StripRole>, StripeError> {
        let role = StripRole::Data(strip);
        let Some(data) = self.read_row_of(role, row).await? else { return Ok(Some(role)) };
        self.write_parities(row, latest, &[(strip, &data)]).await?;
        Ok(None)
    }

    /// Reconstructs a missing strip from P, and recomputes Q with it. Returns P if it cannot be
    /// read.
    async fn reconstruct_from_p(
        &self,
        row: u32,
        latest: &LatestEntry,
        strip: u16,
    ) -> Result<Option<StripRole>, StripeError> {
        let Some(p) = self.read_row_of(StripRole::P, row).await? else {
            return Ok(Some(StripRole::P));
        };
        let mut page = self.array.memory.scratch.credit().alloc_page(BLOCK_BYTES);
        let partial = self.logged_partial_parity(latest, StripRole::P)?;
        self.array.parity.xor(&[&p, partial], &mut page);
        self.write_parities(row, latest, &[(strip, &page)]).await?;
        Ok(None)
    }

    /// Writes the logged new data, and recomputes the parities with it.
    async fn replay_data(&self, row: u32, latest: &LatestEntry) -> Result<(), StripeError> {
        let new = latest.blocks.first().map_or(&[][..], |(_, blocks)| &blocks[1..]);
        let new: SmallVec<[(u16, &Buf); 4]> = latest.changed.iter().zip(new).collect();
        for (strip, data) in &new {
            self.write(StripRole::Data(*strip), row, Bufs::from((*data).clone()), false).await?;
        }
        let new: SmallVec<[(u16, &[u8]); 4]> =
            new.iter().map(|(n, data)| (*n, &data[..])).collect();
        self.write_parities(row, latest, &new).await
    }

    async fn write_parities(
        &self,
        row: u32,
        latest: &LatestEntry,
        new: &[(u16, &[u8])],
    ) -> Result<(), StripeError> {
        let parities = Available { data: StripSet::default(), ..self.available() };
        for role in parities.roles() {
            let mut page = self.array.memory.scratch.credit().alloc_page(BLOCK_BYTES);
            complete_parity(
                self.array.parity,
                role,
                self.logged_partial_parity(latest, role)?,
                new,
                &mut page,
            );
            self.write(role, row, page.into(), false).await?;
        }
        Ok(())
    }

    /// The logged partial parity of a parity.
    fn logged_partial_parity<'a>(
        &self,
        latest: &'a LatestEntry,
        role: StripRole,
    ) -> Result<&'a [u8], StripeError> {
        let blocks = latest.blocks_of(self.column_of(role)?);
        blocks
            .and_then(<[Buf]>::first)
            .map(|partial| &partial[..])
            .ok_or(StripeError::Unrecoverable)
    }

    /// One row of a strip; none if it cannot be read.
    async fn read_row_of(&self, role: StripRole, row: u32) -> Result<Option<Buf>, StripeError> {
        match self.read(role, &(row..row + 1), &self.array.memory.scratch).await {
            Ok(data) => Ok(split_into_rows(&data).into_iter().next()),
            Err(failure) => {
                self.handle_read_failure(failure).await?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(sequences: impl Iterator<Item = u64>) -> Vec<LogBatch> {
        let none = LogBatch { sequence: 0, tail: 0, entries: Vec::new(), blocks: Vec::new() };
        sequences.map(|sequence| LogBatch { sequence, ..none.clone() }).collect()
    }

    #[test]
    fn a_missing_durable_batch_is_detected() {
        assert!(missing_sequences(1, 0, &[]).is_empty());
        assert!(missing_sequences(5, 9, &there(5..10)).is_empty());
        assert_eq!(missing_sequences(5, 9, &there([5, 7, 9].into_iter())), [6, 8]);
        // All slots are in use, and the next batch is torn in the slot of the first.
        assert!(missing_sequences(70, 133, &there(71..134)).is_empty());
        assert_eq!(missing_sequences(70, 133, &there(72..134)), [71]);
        assert!(missing_sequences(0, u64::MAX, &there(u64::MAX - 62..=u64::MAX)).len() < 64);
    }
}
