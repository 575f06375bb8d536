//! The requests of clients on other hosts, and what is known of their results: by the register
//! checker, and by a counter that COMPARE AND WRITE raises.
//!
//! An operation whose answer is lost with its connection has an unknown outcome: it may have taken
//! effect, or may do so later, until the protocol guarantees that it cannot.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use block::testing::register::{Checker, CrashKind, InitialContents, Outcome, Ticket};
use block::{Account, Blocks, Lba, MemoryClass};
use rt::buf::{Credit, copy_in};
use rt::sim::{Rng, World};

/// Blocks at the start that hold the counter and nothing else.
const COUNTER_BLOCKS: u64 = 1;

/// Blocks that one read of the final audit covers.
const AUDIT_READ_BLOCKS: u64 = 16;

/// An operation on the volume.
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
    ReadCounter,
    /// Raises the counter by one if it has this value.
    IncrementCounter(u64),
}

/// What a client does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    Issue(Op),
    /// Nothing for now: waits for the next phase.
    Wait,
    /// Nothing more; the client is done.
    Finish,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Completion {
    Done,
    /// It did not take effect, or only before now, or in part.
    Failed(String),
    /// A transient condition: retry.
    Retry,
    Miscompare,
}

/// State shared by all hosts of a world.
pub(super) struct WorkloadModel {
    pub(super) world: World,
    pub(super) rng: Rng,
    pub(super) block_size: u32,
    pub(super) blocks: u64,
    checker: RefCell<Checker>,
    /// Number of power cuts of the node.
    power_cycles: Cell<u64>,
    /// Values of the counter when it was raised, since the last power cut.
    counter_increments: RefCell<BTreeSet<u64>>,
    /// Operations that may begin before the next fault, or before the end.
    remaining_operations: Cell<u64>,
    /// Whether faults are over.
    fault_free: Cell<bool>,
    audited_blocks: Cell<u64>,
    successful_operations: Cell<u64>,
}

impl WorkloadModel {
    pub(super) fn new(world: &World, block_size: u32, bytes: u64) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            rng: Rng::new(world.seed(), "clients"),
            block_size,
            blocks: bytes / u64::from(block_size),
            checker: RefCell::new(Checker::new(1, block_size, InitialContents::Zeroes)),
            power_cycles: Cell::new(0),
            counter_increments: RefCell::default(),
            remaining_operations: Cell::new(0),
            fault_free: Cell::new(false),
            audited_blocks: Cell::new(COUNTER_BLOCKS),
            successful_operations: Cell::new(0),
        })
    }

    /// The node has crashed.
    pub(super) fn crash(&self, loss: CrashKind) {
        self.checker.borrow_mut().crash(loss);
        if loss == CrashKind::PowerLoss {
            self.power_cycles.set(self.power_cycles.get() + 1);
            self.counter_increments.borrow_mut().clear();
        }
    }

    /// Permits this many more operations.
    pub(super) fn allow(&self, operations: u64) {
        self.remaining_operations.set(operations);
    }

    /// From now on nothing may fail; after the permitted operations and an audit, the run ends.
    pub(super) fn set_fault_free(&self) {
        self.fault_free.set(true);
    }

    pub(super) fn is_fault_free(&self) -> bool {
        self.fault_free.get()
    }

    /// Whether no operation is left to begin.
    pub(super) fn is_finished(&self) -> bool {
        self.is_fault_free()
            && self.remaining_operations.get() == 0
            && self.audited_blocks.get() >= self.blocks
    }

    /// Number of operations that succeeded.
    pub(super) fn successes(&self) -> u64 {
        self.successful_operations.get()
    }

    /// Chooses the next step of a client.
    pub(super) fn next(&self) -> NextStep {
        let Some(left) = self.remaining_operations.get().checked_sub(1) else {
            return if self.is_fault_free() { self.next_audit() } else { NextStep::Wait };
        };
        self.remaining_operations.set(left);
        let (rng, range) = (&self.rng, self.random_range());
        NextStep::Issue(match rng.below(20) {
            0..5 => Op::Read(range),
            5..11 => Op::Write { range, fua: rng.chance(0.2) },
            11 => Op::Zero { range, unmap: rng.chance(0.5) },
            12 | 13 => Op::Unmap(self.random_ranges()),
            14..17 => Op::ReadCounter,
            _ => Op::Flush,
        })
    }

    fn next_audit(&self) -> NextStep {
        let at = self.audited_blocks.get();
        let count = AUDIT_READ_BLOCKS.min(self.blocks - at);
        if count == 0 {
            return NextStep::Finish;
        }
        self.audited_blocks.set(at + count);
        NextStep::Issue(Op::Read(Blocks::new(Lba(at), count)))
    }

    /// A range that clients often share.
    fn random_range(&self) -> Blocks {
        let rng = &self.rng;
        let count = if rng.chance(0.15) { rng.between(1, 40) } else { rng.between(1, 6) };
        let count = count.min(self.blocks - COUNTER_BLOCKS);
        Blocks::new(Lba(rng.between(COUNTER_BLOCKS, self.blocks - count)), count)
    }

    /// Ranges that do not overlap: the checker treats overlapping ones as one change.
    fn random_ranges(&self) -> Vec<Blocks> {
        let mut ranges: Vec<Blocks> = Vec::new();
        for _ in 0..self.rng.between(1, 3) {
            let range = self.random_range();
            if ranges.iter().all(|r| !r.overlaps(&range)) {
                ranges.push(range);
            }
        }
        ranges
    }

    /// Begins an operation; if `must`, it may not fail.
    pub(super) fn begin(self: &Rc<Self>, op: Op, memory: &Account, must: bool) -> PendingOperation {
        let mut checker = self.checker.borrow_mut();
        let tickets: Vec<Ticket> = match &op {
            Op::Read(range) => vec![checker.begin_read(*range)],
            Op::Write { range, fua } => vec![checker.begin_write(*range, 1, *fua)],
            Op::Zero { range, .. } => vec![checker.begin_zero(*range, false)],
            Op::Unmap(ranges) => ranges.iter().map(|&r| checker.begin_unmap(r, true)).collect(),
            Op::Flush => vec![checker.begin_flush()],
            Op::ReadCounter | Op::IncrementCounter(_) => Vec::new(),
        };
        let data = match &op {
            Op::Write { range, .. } => {
                let credit = credit(memory, self.bytes(range.count));
                checker.data(tickets[0], &credit).to_vec()
            }
            _ => Vec::new(),
        };
        drop(checker);
        let power_cycle = self.power_cycles.get();
        PendingOperation {
            model: Rc::clone(self),
            op,
            data,
            received: Vec::new(),
            tickets,
            power_cycle,
            must_succeed: must,
        }
    }

    pub(super) fn bytes(&self, blocks: u64) -> usize {
        usize::try_from(blocks).expect("small") * self.block_size as usize
    }

    /// A block that holds a counter.
    pub(super) fn counter_block(&self, value: u64) -> Vec<u8> {
        value.to_le_bytes().repeat(self.block_size as usize / 8)
    }

    fn parse_counter(&self, block: &[u8]) -> Option<u64> {
        let value = block.first_chunk().copied().map(u64::from_le_bytes)?;
        (self.counter_block(value) == block).then_some(value)
    }
}

fn credit(memory: &Account, bytes: usize) -> Credit {
    memory.try_credit(bytes, MemoryClass::LocalIo).expect("a client has memory")
}

/// An operation in flight. If dropped before it ends, its outcome is unknown.
pub(super) struct PendingOperation {
    model: Rc<WorkloadModel>,
    pub(super) op: Op,
    /// Data to write.
    pub(super) data: Vec<u8>,
    /// Data read so far.
    pub(super) received: Vec<u8>,
    tickets: Vec<Ticket>,
    power_cycle: u64,
    must_succeed: bool,
}

impl PendingOperation {
    /// Number of bytes that the read returns.
    pub(super) fn expected_len(&self) -> usize {
        match &self.op {
            Op::Read(range) => self.model.bytes(range.count),
            Op::ReadCounter => self.model.bytes(COUNTER_BLOCKS),
            _ => 0,
        }
    }

    /// The answer has arrived. Returns the counter if it was read.
    pub(super) fn complete(mut self, how: &Completion, memory: &Account) -> Option<u64> {
        let model = Rc::clone(&self.model);
        if let (Completion::Failed(why), true) = (how, self.must_succeed) {
            model.world.fail(format!("without faults {:?} fails: {why}", self.op));
        }
        if *how == Completion::Miscompare && !matches!(self.op, Op::IncrementCounter(_)) {
            model.world.fail(format!("{:?} compares nothing", self.op));
        }
        let tickets = std::mem::take(&mut self.tickets);
        if *how != Completion::Done {
            let mut checker = model.checker.borrow_mut();
            tickets.iter().for_each(|&t| checker.end(t, Outcome::Failed));
            return None;
        }
        model.successful_operations.set(model.successful_operations.get() + 1);
        if self.received.len() != self.expected_len() {
            let (got, wanted) = (self.received.len(), self.expected_len());
            model.world.fail(format!("{:?} returns {got} bytes of {wanted}", self.op));
            return None;
        }
        match self.op {
            Op::ReadCounter => {
                let counter = model.parse_counter(&self.received);
                if counter.is_none() {
                    model.world.fail("the counter is torn");
                }
                return counter;
            }
            Op::IncrementCounter(from) => {
                if self.power_cycle == model.power_cycles.get()
                    && !model.counter_increments.borrow_mut().insert(from)
                {
                    model.world.fail(format!("the counter was incremented from {from} twice"));
                }
            }
            Op::Read(_) => {
                let data = copy_in(&credit(memory, self.received.len()), &self.received);
                let judged = model.checker.borrow_mut().end_read(tickets[0], &data);
                if let Err(violation) = judged {
                    model.world.fail(violation.to_string());
                }
            }
            _ => {
                let mut checker = model.checker.borrow_mut();
                tickets.iter().for_each(|&t| checker.end(t, Outcome::Done));
            }
        }
        None
    }
}

impl Drop for PendingOperation {
    fn drop(&mut self) {
        let mut checker = self.model.checker.borrow_mut();
        for &ticket in &self.tickets {
            checker.end(ticket, Outcome::Unknown);
        }
    }
}
