//! The parity log of one core on one member: entries that come while a batch is being written make up the next one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{Buf, Ctx, Error, Lba, Op};
use slab::Slab;
use uuid::Uuid;

use super::batch::{BLOCK_BYTES, Batch, Entry, Ring, SLOT_BLOCKS, SLOTS};
use super::watch::Watched;

/// Blocks of 4 KiB that a ring takes of its member.
pub const RING_BLOCKS: u64 = SLOTS as u64 * SLOT_BLOCKS as u64;

/// A ring that is being written. Whoever [appends](Self::append) has a [promise](Self::promise) of room.
#[derive(Debug)]
pub(super) struct Log {
    ring: Ring,
    disk: Rc<Watched>,
    /// Where the ring begins.
    at: Lba,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the first batch,
    first: u64,
    /// and of the next.
    next: u64,
    /// Those who append, until they have been told.
    appending: Slab<Appending>,
    /// Those of them whose entries are in no batch yet, in order.
    waiting: VecDeque<usize>,
    /// Whether a batch is being written.
    writing: bool,
    /// How many entries are not retired of each batch from the tail on.
    live: VecDeque<u32>,
    /// Entries that have a promise of room and have not come.
    promised: u32,
    /// Why nothing more can be written.
    failed: Option<Error>,
}

#[derive(Debug)]
struct Appending {
    entry: Entry,
    blocks: Vec<Buf>,
    outcome: Option<Result<u64, Error>>,
    waker: Option<Waker>,
}

/// What whoever appends is to do next.
enum Turn {
    /// It is his to write the next batch.
    Write,
    /// His entry is durable, in the batch of this number, or not.
    Done(Result<u64, Error>),
}

impl Log {
    /// A ring that begins at block `at` of `disk`, whose era nothing has been written in. Its batches are numbered from `first` on.
    pub(super) fn new(ring: Ring, disk: Rc<Watched>, at: Lba, first: u64) -> Self {
        let state = State { first, next: first, ..State::default() };
        Self { ring, disk, at, state: RefCell::new(state) }
    }

    /// A number that no batch of it has had.
    pub(super) fn next(&self) -> u64 {
        self.state.borrow().next
    }

    /// The first batch that has an entry which is not retired; the next one if there is none.
    pub(super) fn tail(&self) -> u64 {
        self.state.borrow().tail()
    }

    /// Whether nothing has been written.
    pub(super) fn is_new(&self) -> bool {
        let s = self.state.borrow();
        s.first == s.next
    }

    /// The pool that it is of.
    pub(super) fn pool(&self) -> Uuid {
        self.ring.pool
    }

    /// The member that it is on.
    pub(super) fn member(&self) -> Uuid {
        self.ring.member
    }

    /// Whether one entry more can be promised room: each may have a batch to itself. A ring that has failed takes all, and
    /// tells each.
    pub(super) fn has_room(&self) -> bool {
        let s = self.state.borrow();
        let batches = s.live.len() + s.promised as usize + s.waiting.len();
        s.failed.is_some() || batches < SLOTS as usize
    }

    /// Promises room for one entry, which [`Self::append`] then takes.
    pub(super) fn promise(&self) {
        self.state.borrow_mut().promised += 1;
    }

    /// Makes an entry durable, with its blocks; tells the number of its batch. Memory for the batch's head comes from `ctx`.
    pub(super) async fn append(
        &self,
        entry: Entry,
        blocks: Vec<Buf>,
        ctx: &Ctx,
    ) -> Result<u64, Error> {
        let key = self.state.borrow_mut().join(entry, blocks);
        loop {
            match poll_fn(|cx| self.state.borrow_mut().turn(key, cx)).await {
                Turn::Write => self.write(ctx).await,
                Turn::Done(outcome) => return outcome,
            }
        }
    }

    /// Writes a batch of what waits, and tells those whose entries it has.
    async fn write(&self, ctx: &Ctx) {
        let begun = self.state.borrow_mut().collect();
        let mut end = End { log: self, keys: begun.keys, outcome: Err(Error::Gone) };
        end.outcome = match begun.outcome {
            Ok(batch) => self.put(batch, ctx).await.map(|()| begun.sequence),
            Err(failed) => Err(failed),
        };
    }

    async fn put(&self, batch: Batch, ctx: &Ctx) -> Result<(), Error> {
        let slot = u64::from(Batch::slot(batch.sequence)) * SLOT_BLOCKS as u64;
        let data = batch.into_bufs(&self.ring, ctx.credit().alloc_page(BLOCK_BYTES));
        let op = Op::Write { at: Lba(self.at.0 + slot), data, fua: true };
        self.disk.submit(op, ctx).await.map(drop)
    }

    /// An entry of the batch of this number counts no more.
    pub(super) fn retire(&self, sequence: u64) {
        self.state.borrow_mut().retire(sequence);
    }
}

/// A batch that is to be written, and those whose entries it has.
struct Begun {
    sequence: u64,
    keys: Vec<usize>,
    outcome: Result<Batch, Error>,
}

/// Tells those whose entries a batch has what has become of it, even if a crash has dropped it.
struct End<'a> {
    log: &'a Log,
    keys: Vec<usize>,
    outcome: Result<u64, Error>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.log.state.borrow_mut().finish(&self.keys, self.outcome);
    }
}

impl State {
    fn tail(&self) -> u64 {
        self.next - self.live.len() as u64
    }

    fn join(&mut self, entry: Entry, blocks: Vec<Buf>) -> usize {
        self.promised = self.promised.saturating_sub(1);
        let key = self.appending.insert(Appending { entry, blocks, outcome: None, waker: None });
        self.waiting.push_back(key);
        key
    }

    fn turn(&mut self, key: usize, cx: &Context<'_>) -> Poll<Turn> {
        let mine = &mut self.appending[key];
        if let Some(outcome) = mine.outcome {
            self.appending.remove(key);
            return Poll::Ready(Turn::Done(outcome));
        }
        if self.writing {
            mine.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        self.writing = true;
        Poll::Ready(Turn::Write)
    }

    fn collect(&mut self) -> Begun {
        let sequence = self.next;
        if let Some(failed) = self.failed {
            let keys = self.waiting.drain(..).collect();
            return Begun { sequence, keys, outcome: Err(failed) };
        }
        let tail = self.tail();
        let mut batch = Batch { sequence, tail, entries: Vec::new(), blocks: Vec::new() };
        let mut keys = Vec::new();
        while let Some(&key) = self.waiting.front() {
            let Appending { entry, blocks, .. } = &mut self.appending[key];
            if !batch.has_room(entry) {
                break;
            }
            batch.entries.push(*entry);
            batch.blocks.append(blocks);
            self.waiting.pop_front();
            keys.push(key);
        }
        self.next += 1;
        self.live.push_back(u32::try_from(keys.len()).unwrap_or(u32::MAX));
        Begun { sequence, keys, outcome: Ok(batch) }
    }

    fn finish(&mut self, keys: &[usize], outcome: Result<u64, Error>) {
        self.writing = false;
        self.failed = self.failed.or(outcome.err());
        for key in keys {
            let told = &mut self.appending[*key];
            told.outcome = Some(outcome);
            told.waker.take().into_iter().for_each(Waker::wake);
        }
        let next = self.waiting.front().copied();
        let next = next.and_then(|key| self.appending[key].waker.take());
        next.into_iter().for_each(Waker::wake);
    }

    fn retire(&mut self, sequence: u64) {
        let tail = self.tail();
        let place = sequence.checked_sub(tail).and_then(|n| usize::try_from(n).ok());
        if let Some(live) = place.and_then(|n| self.live.get_mut(n)) {
            *live = live.saturating_sub(1);
        }
        while self.live.front() == Some(&0) {
            self.live.pop_front();
        }
    }
}
