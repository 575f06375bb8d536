//! The parity log of one core on one member. Entries that arrive while a batch is being written
//! form the next one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{Buf, Ctx, Error, Lba, Op};
use slab::Slab;
use smallvec::SmallVec;
use uuid::Uuid;

use super::health::{MemberIo, MonitoredDisk};
use super::log_batch::{BATCH_BLOCKS, BLOCK_BYTES, LogBatch, LogEntry, RING_BATCHES, RingId};

/// Blocks of 4 KiB in a ring.
pub const RING_BLOCKS: u64 = RING_BATCHES as u64 * BATCH_BLOCKS as u64;

/// Where an entry is in the logs: members, and the sequence number of its batch on each.
pub(super) type LogPositions = SmallVec<[(u16, u64); 2]>;

/// A ring in use. Before an [append](Self::append), the caller must [reserve](Self::reserve) space.
#[derive(Debug)]
pub(super) struct ParityLog {
    ring: RingId,
    disk: Rc<MonitoredDisk>,
    /// Where the ring begins.
    first_block: Lba,
    state: RefCell<RingState>,
}

#[derive(Debug, Default)]
struct RingState {
    /// Sequence number of the first batch,
    first_sequence: u64,
    /// and of the next one.
    next_sequence: u64,
    /// Appends in progress, until their result was fetched.
    pending_appends: Slab<PendingAppend>,
    /// Those that are in no batch yet, in order.
    unbatched: VecDeque<usize>,
    /// Whether a batch is being written.
    writing: bool,
    /// Number of unretired entries of each batch, from the tail on.
    unretired: VecDeque<u32>,
    /// Reservations that are not used yet.
    reserved: u32,
    /// Why writing failed; all further appends fail with this.
    failed: Option<Error>,
}

#[derive(Debug)]
struct PendingAppend {
    entry: LogEntry,
    blocks: Vec<Buf>,
    outcome: Option<Result<u64, Error>>,
    waker: Option<Waker>,
}

/// The next step of an append.
enum AppendStep {
    /// Write the next batch.
    WriteBatch,
    /// Done: the sequence number of the entry's batch, or an error.
    Done(Result<u64, Error>),
}

impl ParityLog {
    /// A ring that begins at block `at` of `disk`, unwritten in its generation. Its batches are
    /// numbered from `first` on.
    pub(super) fn new(ring: RingId, disk: Rc<MonitoredDisk>, at: Lba, first: u64) -> Self {
        let state =
            RingState { first_sequence: first, next_sequence: first, ..RingState::default() };
        Self { ring, disk, first_block: at, state: RefCell::new(state) }
    }

    /// The sequence number of the next batch.
    pub(super) fn next_sequence(&self) -> u64 {
        self.state.borrow().next_sequence
    }

    /// The first batch with an unretired entry; the next batch if there is none.
    pub(super) fn tail(&self) -> u64 {
        self.state.borrow().tail()
    }

    /// Whether no batch has been written.
    pub(super) fn is_unwritten(&self) -> bool {
        let s = self.state.borrow();
        s.first_sequence == s.next_sequence
    }

    /// The pool it belongs to.
    pub(super) fn pool_id(&self) -> Uuid {
        self.ring.pool
    }

    /// The member it is on.
    pub(super) fn member_id(&self) -> Uuid {
        self.ring.member
    }

    /// Whether space for one more entry can be reserved, each in a batch of its own in the worst
    /// case. A failed ring accepts every append and fails it.
    pub(super) fn has_space(&self) -> bool {
        let s = self.state.borrow();
        let batches = s.unretired.len() + s.reserved as usize + s.unbatched.len();
        s.failed.is_some() || batches < RING_BATCHES as usize
    }

    /// Reserves space for one entry, which [`Self::append`] then uses.
    pub(super) fn reserve(&self) {
        self.state.borrow_mut().reserved += 1;
    }

    /// Appends an entry with its blocks; durable on return. Returns the sequence number of its
    /// batch. The memory for the header comes from `ctx`.
    pub(super) async fn append(
        &self,
        entry: LogEntry,
        blocks: Vec<Buf>,
        ctx: &Ctx,
    ) -> Result<u64, Error> {
        let key = self.state.borrow_mut().enqueue(entry, blocks);
        loop {
            match poll_fn(|cx| self.state.borrow_mut().poll_append(key, cx)).await {
                AppendStep::WriteBatch => self.write_next_batch(ctx).await,
                AppendStep::Done(outcome) => return outcome,
            }
        }
    }

    /// Writes a batch of the waiting entries, and completes their appends.
    async fn write_next_batch(&self, ctx: &Ctx) {
        let started = self.state.borrow_mut().start_batch();
        let mut completion =
            BatchCompletion { log: self, keys: started.keys, outcome: Err(Error::Gone) };
        let begun = started.outcome.and_then(|batch| self.begin_batch(batch, ctx));
        let written = match begun {
            Ok(io) => io.await,
            Err(failed) => Err(failed),
        };
        completion.outcome = written.map(|_| started.sequence);
    }

    fn begin_batch(&self, batch: LogBatch, ctx: &Ctx) -> Result<MemberIo, Error> {
        let slot = u64::from(LogBatch::ring_index(batch.sequence)) * BATCH_BLOCKS as u64;
        let data = batch.into_bufs(&self.ring, ctx.credit().alloc_page(BLOCK_BYTES));
        let op = Op::Write { at: Lba(self.first_block.0 + slot), data, fua: true };
        self.disk.begin(op, ctx, 0)
    }

    /// Retires an entry of this batch.
    pub(super) fn retire_entry(&self, sequence: u64) {
        self.state.borrow_mut().retire_entry(sequence);
    }
}

/// A batch to be written, and the appends that it completes.
struct StartedBatch {
    sequence: u64,
    keys: Vec<usize>,
    outcome: Result<LogBatch, Error>,
}

/// Completes the appends of a batch when dropped, even in a crash.
struct BatchCompletion<'a> {
    log: &'a ParityLog,
    keys: Vec<usize>,
    outcome: Result<u64, Error>,
}

impl Drop for BatchCompletion<'_> {
    fn drop(&mut self) {
        self.log.state.borrow_mut().complete_batch(&self.keys, self.outcome);
    }
}

impl RingState {
    fn tail(&self) -> u64 {
        self.next_sequence - self.unretired.len() as u64
    }

    fn enqueue(&mut self, entry: LogEntry, blocks: Vec<Buf>) -> usize {
        self.reserved = self.reserved.saturating_sub(1);
        let key = self.pending_appends.insert(PendingAppend {
            entry,
            blocks,
            outcome: None,
            waker: None,
        });
        self.unbatched.push_back(key);
        key
    }

    fn poll_append(&mut self, key: usize, cx: &Context<'_>) -> Poll<AppendStep> {
        let append = &mut self.pending_appends[key];
        if let Some(outcome) = append.outcome {
            self.pending_appends.remove(key);
            return Poll::Ready(AppendStep::Done(outcome));
        }
        if self.writing {
            append.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        self.writing = true;
        Poll::Ready(AppendStep::WriteBatch)
    }

    fn start_batch(&mut self) -> StartedBatch {
        let sequence = self.next_sequence;
        if let Some(error) = self.failed {
            let keys = self.unbatched.drain(..).collect();
            return StartedBatch { sequence, keys, outcome: Err(error) };
        }
        let tail = self.tail();
        let mut batch = LogBatch { sequence, tail, entries: Vec::new(), blocks: Vec::new() };
        let mut keys = Vec::new();
        while let Some(&key) = self.unbatched.front() {
            let PendingAppend { entry, blocks, .. } = &mut self.pending_appends[key];
            if !batch.has_space(entry) {
                break;
            }
            batch.entries.push(*entry);
            batch.blocks.append(blocks);
            self.unbatched.pop_front();
            keys.push(key);
        }
        self.next_sequence += 1;
        self.unretired.push_back(u32::try_from(keys.len()).unwrap_or(u32::MAX));
        StartedBatch { sequence, keys, outcome: Ok(batch) }
    }

    fn complete_batch(&mut self, keys: &[usize], outcome: Result<u64, Error>) {
        self.writing = false;
        self.failed = self.failed.or(outcome.err());
        for key in keys {
            let append = &mut self.pending_appends[*key];
            append.outcome = Some(outcome);
            append.waker.take().into_iter().for_each(Waker::wake);
        }
        let next = self.unbatched.front().copied();
        let next = next.and_then(|key| self.pending_appends[key].waker.take());
        next.into_iter().for_each(Waker::wake);
    }

    fn retire_entry(&mut self, sequence: u64) {
        let tail = self.tail();
        let index = sequence.checked_sub(tail).and_then(|n| usize::try_from(n).ok());
        if let Some(count) = index.and_then(|n| self.unretired.get_mut(n)) {
            *count = count.saturating_sub(1);
        }
        while self.unretired.front() == Some(&0) {
            self.unretired.pop_front();
        }
    }
}
