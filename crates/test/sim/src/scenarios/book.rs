//! What clients on other hosts ask of a volume, and what is remembered of it: by the register
//! checker, and by a tally that COMPARE AND WRITE raises.
//!
//! An operation whose answer is lost with its connection is unknown from then on: it may have
//! happened, or happen later, until the protocol promises that it cannot any more.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use block::testing::register::{Checker, Initially, Loss, Outcome, Ticket};
use block::{Account, Blocks, Class, Lba};
use rt::buf::{Credit, copy_in};
use rt::sim::{Rng, World};

/// Blocks at the start that hold the tally and nothing else.
const TALLY: u64 = 1;

/// Blocks that one read of the last audit covers.
const AUDIT: u64 = 16;

/// Something to be asked of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Read(Blocks),
    Write {
        range: Blocks,
        fua: bool,
    },
    Zero {
        range: Blocks,
        unmap: bool,
    },
    Unmap(Vec<Blocks>),
    Flush,
    ReadTally,
    /// Makes the tally one more than this, if it is this.
    Raise(u64),
}

/// What a client does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Ask(Op),
    /// Nothing for now: what happens next would only be more of the same.
    Rest,
    /// Nothing any more.
    Leave,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    /// It did not take effect, or did so before now, or in part.
    Failed(String),
    /// Something of no consequence was in the way: to be tried again.
    Again,
    Miscompare,
}

/// What the hosts of a world share.
pub(super) struct Book {
    pub(super) world: World,
    pub(super) rng: Rng,
    pub(super) block_size: u32,
    pub(super) blocks: u64,
    checker: RefCell<Checker>,
    /// Counts the power cuts of the node.
    life: Cell<u64>,
    /// What the tally was when it was raised, since the last power cut.
    raised: RefCell<BTreeSet<u64>>,
    /// Operations that may be begun before the next mishap, or before the end.
    left: Cell<u64>,
    /// Whether there are no faults any more.
    calm: Cell<bool>,
    audited: Cell<u64>,
    ended: Cell<u64>,
}

impl Book {
    pub(super) fn new(world: &World, block_size: u32, bytes: u64) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            rng: Rng::new(world.seed(), "clients"),
            block_size,
            blocks: bytes / u64::from(block_size),
            checker: RefCell::new(Checker::new(1, block_size, Initially::Zeroes)),
            life: Cell::new(0),
            raised: RefCell::default(),
            left: Cell::new(0),
            calm: Cell::new(false),
            audited: Cell::new(TALLY),
            ended: Cell::new(0),
        })
    }

    /// The node has crashed.
    pub(super) fn crash(&self, loss: Loss) {
        self.checker.borrow_mut().crash(loss);
        if loss == Loss::Unflushed {
            self.life.set(self.life.get() + 1);
            self.raised.borrow_mut().clear();
        }
    }

    /// So many operations more may be begun.
    pub(super) fn allow(&self, operations: u64) {
        self.left.set(operations);
    }

    /// From now on nothing may fail, and after what is allowed and an audit that is the end.
    pub(super) fn calm(&self) {
        self.calm.set(true);
    }

    pub(super) fn is_calm(&self) -> bool {
        self.calm.get()
    }

    /// Whether there is nothing left to be begun.
    pub(super) fn is_over(&self) -> bool {
        self.is_calm() && self.left.get() == 0 && self.audited.get() >= self.blocks
    }

    /// Operations that have succeeded.
    pub(super) fn successes(&self) -> u64 {
        self.ended.get()
    }

    /// What a client does next.
    pub(super) fn next(&self) -> Next {
        let Some(left) = self.left.get().checked_sub(1) else {
            return if self.is_calm() { self.next_audit() } else { Next::Rest };
        };
        self.left.set(left);
        let (rng, range) = (&self.rng, self.range());
        Next::Ask(match rng.below(20) {
            0..5 => Op::Read(range),
            5..11 => Op::Write { range, fua: rng.chance(0.2) },
            11 => Op::Zero { range, unmap: rng.chance(0.5) },
            12 | 13 => Op::Unmap(self.ranges()),
            14..17 => Op::ReadTally,
            _ => Op::Flush,
        })
    }

    fn next_audit(&self) -> Next {
        let at = self.audited.get();
        let count = AUDIT.min(self.blocks - at);
        if count == 0 {
            return Next::Leave;
        }
        self.audited.set(at + count);
        Next::Ask(Op::Read(Blocks::new(Lba(at), count)))
    }

    /// A range in which clients meet often.
    fn range(&self) -> Blocks {
        let rng = &self.rng;
        let count = if rng.chance(0.15) { rng.between(1, 40) } else { rng.between(1, 6) };
        let count = count.min(self.blocks - TALLY);
        Blocks::new(Lba(rng.between(TALLY, self.blocks - count)), count)
    }

    /// Ranges apart from each other: those that overlap are one change to the checker's eyes.
    fn ranges(&self) -> Vec<Blocks> {
        let mut ranges: Vec<Blocks> = Vec::new();
        for _ in 0..self.rng.between(1, 3) {
            let range = self.range();
            if ranges.iter().all(|r| !r.overlaps(&range)) {
                ranges.push(range);
            }
        }
        ranges
    }

    /// An operation begins; one that `must` end well may not fail.
    pub(super) fn begin(self: &Rc<Self>, op: Op, memory: &Account, must: bool) -> Pending {
        let mut checker = self.checker.borrow_mut();
        let tickets: Vec<Ticket> = match &op {
            Op::Read(range) => vec![checker.begin_read(*range)],
            Op::Write { range, fua } => vec![checker.begin_write(*range, 1, *fua)],
            Op::Zero { range, .. } => vec![checker.begin_zero(*range, false)],
            Op::Unmap(ranges) => ranges.iter().map(|&r| checker.begin_unmap(r, true)).collect(),
            Op::Flush => vec![checker.begin_flush()],
            Op::ReadTally | Op::Raise(_) => Vec::new(),
        };
        let data = match &op {
            Op::Write { range, .. } => {
                let credit = credit(memory, self.bytes(range.count));
                checker.data(tickets[0], &credit).to_vec()
            }
            _ => Vec::new(),
        };
        drop(checker);
        let life = self.life.get();
        Pending { book: Rc::clone(self), op, data, got: Vec::new(), tickets, life, must }
    }

    pub(super) fn bytes(&self, blocks: u64) -> usize {
        usize::try_from(blocks).expect("small") * self.block_size as usize
    }

    /// A block that holds a tally.
    pub(super) fn tally(&self, value: u64) -> Vec<u8> {
        value.to_le_bytes().repeat(self.block_size as usize / 8)
    }

    fn tally_of(&self, block: &[u8]) -> Option<u64> {
        let value = block.first_chunk().copied().map(u64::from_le_bytes)?;
        (self.tally(value) == block).then_some(value)
    }
}

fn credit(memory: &Account, bytes: usize) -> Credit {
    memory.try_credit(bytes, Class::Immediate).expect("a client has memory")
}

/// An operation in flight. Dropped without an end, its outcome is unknown.
pub(super) struct Pending {
    book: Rc<Book>,
    pub(super) op: Op,
    /// What a write brings.
    pub(super) data: Vec<u8>,
    /// What a read has got so far.
    pub(super) got: Vec<u8>,
    tickets: Vec<Ticket>,
    life: u64,
    must: bool,
}

impl Pending {
    /// Bytes that a read returns.
    pub(super) fn wanted(&self) -> usize {
        match &self.op {
            Op::Read(range) => self.book.bytes(range.count),
            Op::ReadTally => self.book.bytes(TALLY),
            _ => 0,
        }
    }

    /// The answer has come. Returns the tally where that was read.
    pub(super) fn end(mut self, how: &Ended, memory: &Account) -> Option<u64> {
        let book = Rc::clone(&self.book);
        if let (Ended::Failed(why), true) = (how, self.must) {
            book.world.fail(format!("without faults {:?} fails: {why}", self.op));
        }
        if *how == Ended::Miscompare && !matches!(self.op, Op::Raise(_)) {
            book.world.fail(format!("{:?} compares nothing", self.op));
        }
        let tickets = std::mem::take(&mut self.tickets);
        if *how != Ended::Done {
            let mut checker = book.checker.borrow_mut();
            tickets.iter().for_each(|&t| checker.end(t, Outcome::Failed));
            return None;
        }
        book.ended.set(book.ended.get() + 1);
        if self.got.len() != self.wanted() {
            let (got, wanted) = (self.got.len(), self.wanted());
            book.world.fail(format!("{:?} returns {got} bytes of {wanted}", self.op));
            return None;
        }
        match self.op {
            Op::ReadTally => {
                let tally = book.tally_of(&self.got);
                if tally.is_none() {
                    book.world.fail("the tally is torn");
                }
                return tally;
            }
            Op::Raise(from) => {
                if self.life == book.life.get() && !book.raised.borrow_mut().insert(from) {
                    book.world.fail(format!("the tally was raised from {from} twice"));
                }
            }
            Op::Read(_) => {
                let data = copy_in(&credit(memory, self.got.len()), &self.got);
                let judged = book.checker.borrow_mut().end_read(tickets[0], &data);
                if let Err(violation) = judged {
                    book.world.fail(violation.to_string());
                }
            }
            _ => {
                let mut checker = book.checker.borrow_mut();
                tickets.iter().for_each(|&t| checker.end(t, Outcome::Done));
            }
        }
        None
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut checker = self.book.checker.borrow_mut();
        for &ticket in &self.tickets {
            checker.end(ticket, Outcome::Unknown);
        }
    }
}
