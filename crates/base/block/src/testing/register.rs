//! The register checker: a block device is an array of independent registers.
//!
//! A [`Checker`] learns when every operation begins and how it ends, of crashes and of injected
//! damage, and judges for each read whether the history permits its result. Writes carry
//! [`Stamp`]s, so it recognises torn, misdirected, stale and lost blocks.
//!
//! # How it decides
//! Each block keeps its *candidates*: the writes whose value it may still hold. Each candidate has
//! two times: when it, or a read that returned it, first completed (`seen`), and when it, or a read
//! that returned it, last began (`begun`). Candidate `a` is before `b` if `a.seen < b.begun`. A
//! history of a register whose writes are all different is linearizable exactly when no two values
//! are each before the other (Gibbons and Korach, "Testing shared memories", 1997). A value of a
//! failed or unanswered write counts only once it was read.
//!
//! A candidate is forgotten when a durable one is after it. Durable is what FUA wrote, or what
//! completed before a successful flush began. A power cut leaves the remaining candidates as
//! alternatives; the first read of one of them rules out the rest.
//!
//! Time is the count of events: the checker is pure and its verdicts repeat.

use std::collections::BTreeSet;
use std::fmt;

use rt::buf::{Bufs, Credit};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{Contents, Stamp};
use crate::{Blocks, Lba};

/// Moment in the history.
type Time = u64;
const NEVER: Time = u64::MAX;

/// Before every event: the time of the initial contents and their durability.
const BEGINNING: Time = 0;

/// Initial contents of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialContents {
    /// Zeroes.
    Zeroes,
    /// Unknown contents.
    Anything,
}

/// How an operation that changes blocks, or a flush, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged.
    Done,
    /// Refused, failed or aborted: it took effect before this moment or never will.
    Failed,
    /// Never known: the answer was lost, and the operation may still run.
    Unknown,
}

/// What a crash loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKind {
    /// Power is lost: everything not yet durable may be gone, block by block.
    PowerLoss,
    /// A process dies: what was in flight may or may not have happened.
    ProcessDeath,
}

/// Names an operation that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(Time);

/// What a block may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Zeroes.
    Zero,
    /// The data of the write with this sequence number.
    Write(u64),
    /// Anything that was ever written to the block, or zeroes: unmapped.
    AnyWritten,
    /// Anything: damaged on purpose, or never known.
    Any,
}

/// A read returned what no permitted history explains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block {at}: {fault}; {history}")]
pub struct Violation {
    /// The block.
    pub at: Lba,
    /// What is wrong with it.
    pub fault: Fault,
    /// What the block might have held, for the reader of the report.
    pub history: String,
}

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It mixes two writes.
    #[error("torn at byte {offset}")]
    Torn {
        /// Offset in bytes where the second write begins.
        offset: usize,
    },
    /// It belongs to another block.
    #[error("holds {0}, which belongs to another block")]
    Misdirected(Stamp),
    /// It holds data that was never written.
    #[error("holds data that was never written")]
    NeverWritten,
    /// It holds replaced data: a lost write, a stale read, a resurrected value.
    #[error("holds {found}, which had been overwritten")]
    Stale {
        /// What the read returned.
        found: Value,
    },
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zeroes"),
            Self::Write(sequence) => write!(f, "write {sequence}"),
            Self::AnyWritten => f.write_str("any earlier write"),
            Self::Any => f.write_str("anything"),
        }
    }
}

/// One possible content of a block.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    value: Value,
    /// When its operation began: its identity.
    op_begun: Time,
    /// When it, or a read that returned it, last began.
    begun: Time,
    /// When it, or a read that returned it, first completed.
    seen: Time,
    /// When its operation completed successfully; `BEGINNING` if it was durable then.
    acknowledged: Time,
    /// Whether it certainly happened.
    is_certain: bool,
    /// Whether it is one of the alternatives that a power cut left.
    is_crash_alternative: bool,
}

impl Candidate {
    fn initial(value: Value) -> Self {
        Self {
            value,
            op_begun: BEGINNING,
            begun: BEGINNING,
            seen: BEGINNING,
            acknowledged: BEGINNING,
            is_certain: true,
            is_crash_alternative: false,
        }
    }

    fn is_before(&self, other: &Self) -> bool {
        self.seen < other.begun
    }

    fn contradicts(&self, other: &Self) -> bool {
        self.is_before(other) && other.is_before(self)
    }

    /// Whether it is durable, given `horizon`, the beginning of the latest successful flush.
    fn is_durable(&self, horizon: Time) -> bool {
        self.is_certain && self.acknowledged < horizon
    }

    /// The candidate after a read from `begun` to `now` returned it.
    fn observed_by(&self, begun: Time, now: Time) -> Self {
        let (begun, seen) = (self.begun.max(begun), self.seen.min(now));
        Self { begun, seen, is_certain: true, ..*self }
    }
}

/// One block.
#[derive(Clone, Debug)]
struct Register(Vec<Candidate>);

impl Register {
    /// Records a read; false if nothing explains what it found.
    fn observe(&mut self, found: Value, begun: Time, now: Time) -> bool {
        let mut explained = None;
        let mut count = 0;
        for (i, c) in self.0.iter().enumerate() {
            let fits = c.value == found || matches!(c.value, Value::Any | Value::AnyWritten);
            let then = c.observed_by(begun, now);
            let refuted =
                |(j, d): (usize, &Candidate)| i != j && d.is_certain && then.contradicts(d);
            if fits && !self.0.iter().enumerate().any(refuted) {
                count += 1;
                explained = Some((i, then));
            }
        }
        let Some((i, then)) = explained else { return false };
        if count == 1 && then.value == found {
            self.0[i] = then;
            if then.is_crash_alternative {
                self.0.retain(|c| !c.is_crash_alternative || c.op_begun == then.op_begun);
            }
        }
        true
    }

    /// Forgets candidates that neither a read nor a power cut can return any more, and those that
    /// reads have shown not to have happened. `reading` is when the oldest read in flight began.
    fn prune(&mut self, horizon: Time, reading: Time) {
        if self.0.len() > 1 {
            let all = std::mem::take(&mut self.0);
            // Only durable ones can replace: few among many unflushed ones, so this is not
            // quadratic.
            let replaces = |d: &&Candidate| d.is_durable(horizon) && d.seen < reading;
            let durable: SmallVec<[&Candidate; 4]> = all.iter().filter(replaces).collect();
            let gone = |c: &Candidate| {
                let replaced = durable.iter().any(|d| d.op_begun != c.op_begun && c.is_before(d));
                let refutes =
                    |d: &Candidate| d.is_certain && d.op_begun != c.op_begun && c.contradicts(d);
                replaced || !c.is_certain && all.iter().any(refutes)
            };
            self.0 = all.iter().filter(|c| !gone(c)).copied().collect();
        }
    }

    /// Power was lost at `now`: the remaining candidates are alternatives, and durable.
    fn after_power_loss(&mut self, now: Time) {
        let mut left: Vec<Candidate> = Vec::new();
        for c in &self.0 {
            if left.iter().all(|l| l.value != c.value) {
                left.push(Candidate {
                    begun: now,
                    seen: now,
                    acknowledged: BEGINNING,
                    is_certain: false,
                    is_crash_alternative: true,
                    ..*c
                });
            }
        }
        if let [only] = left.as_mut_slice() {
            only.is_certain = true;
        }
        self.0 = left;
    }
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
enum Op {
    Change { range: Blocks, stamp: Option<(u32, u64)>, durable: bool },
    Read { range: Blocks },
    Flush,
}

/// Judges the reads of one volume. See the [module](self).
#[derive(Clone, Debug)]
pub struct Checker {
    volume: u64,
    block_size: usize,
    initial_contents: InitialContents,
    write_through: bool,
    now: Time,
    /// Beginning of the latest successful flush.
    flushed_up_to: Time,
    sequence: u64,
    registers: FxHashMap<u64, Register>,
    ops: FxHashMap<Ticket, Op>,
    active_reads: BTreeSet<Time>,
}

impl Checker {
    /// A checker for volume number `volume` with blocks of `block_size` bytes.
    #[must_use]
    pub fn new(volume: u64, block_size: u32, initially: InitialContents) -> Self {
        Self {
            volume,
            block_size: block_size as usize,
            initial_contents: initially,
            write_through: false,
            now: BEGINNING + 1,
            flushed_up_to: BEGINNING + 1,
            sequence: 0,
            registers: FxHashMap::default(),
            ops: FxHashMap::default(),
            active_reads: BTreeSet::new(),
        }
    }

    /// Requires every acknowledged write to be durable, flushed or not.
    #[must_use]
    pub fn write_through(mut self) -> Self {
        self.write_through = true;
        self
    }

    /// A write of stamped blocks begins; [`Self::data`] gives its contents. `writer` is below 2^24.
    pub fn begin_write(&mut self, range: Blocks, writer: u32, fua: bool) -> Ticket {
        self.sequence += 1;
        let stamp = Some((writer, self.sequence));
        self.begin_change(range, Value::Write(self.sequence), stamp, fua)
    }

    /// Zeroing begins.
    pub fn begin_zero(&mut self, range: Blocks, fua: bool) -> Ticket {
        self.begin_change(range, Value::Zero, None, fua)
    }

    /// Unmapping begins; `zeroes` as [`crate::Info::unmap_zeroes`].
    pub fn begin_unmap(&mut self, range: Blocks, zeroes: bool) -> Ticket {
        let value = if zeroes { Value::Zero } else { Value::AnyWritten };
        self.begin_change(range, value, None, false)
    }

    /// A read begins.
    pub fn begin_read(&mut self, range: Blocks) -> Ticket {
        let ticket = self.begin(Op::Read { range });
        self.active_reads.insert(ticket.0);
        ticket
    }

    /// A flush begins.
    pub fn begin_flush(&mut self) -> Ticket {
        self.begin(Op::Flush)
    }

    /// The contents of a write that has begun, in memory of `credit`; nothing for other operations.
    #[must_use]
    pub fn data(&self, write: Ticket, credit: &Credit) -> Bufs {
        let Some(&Op::Change { range, stamp: Some((writer, sequence)), .. }) = self.ops.get(&write)
        else {
            return Bufs::new();
        };
        let len = usize::try_from(range.count).expect("a write fits memory") * self.block_size;
        let mut bufs = credit.alloc(len);
        let blocks = bufs.iter_mut().flat_map(|b| b.chunks_exact_mut(self.block_size));
        for (lba, block) in (range.at.0..).zip(blocks) {
            Stamp { volume: self.volume, at: Lba(lba), writer, sequence }.fill(block);
        }
        bufs.into()
    }

    /// A write, zeroing, unmapping or flush ends. Does nothing if a crash ended it already.
    pub fn end(&mut self, ticket: Ticket, outcome: Outcome) {
        let now = self.tick();
        match self.ops.remove(&ticket) {
            Some(Op::Change { range, durable, .. }) => {
                self.end_change(ticket, range, outcome, durable, now);
            }
            Some(Op::Flush) if outcome == Outcome::Done => {
                self.flushed_up_to = self.flushed_up_to.max(ticket.0);
            }
            Some(Op::Flush) | None => {}
            Some(Op::Read { .. }) => {
                self.active_reads.remove(&ticket.0);
            }
        }
    }

    /// A read ends with data.
    ///
    /// # Errors
    /// The first block that it should not have returned.
    ///
    /// # Panics
    /// If the data is not as long as the range, or the ticket is not a read's.
    pub fn end_read(&mut self, ticket: Ticket, data: &Bufs) -> Result<(), Violation> {
        let now = self.tick();
        let Some(op) = self.ops.remove(&ticket) else { return Ok(()) };
        let Op::Read { range } = op else { panic!("{op:?} is not a read") };
        self.active_reads.remove(&ticket.0);
        assert_eq!(data.len() as u64, range.count * self.block_size as u64, "length of a read");
        let mut lba = range.at.0;
        let mut scratch = Vec::new();
        for piece in data.iter() {
            let mut bytes: &[u8] = piece;
            while !bytes.is_empty() {
                if scratch.is_empty() && bytes.len() >= self.block_size {
                    let (block, rest) = bytes.split_at(self.block_size);
                    self.check_block(Lba(lba), block, ticket.0, now)?;
                    (lba, bytes) = (lba + 1, rest);
                    continue;
                }
                let (part, rest) = bytes.split_at(bytes.len().min(self.block_size - scratch.len()));
                scratch.extend_from_slice(part);
                bytes = rest;
                if scratch.len() == self.block_size {
                    self.check_block(Lba(lba), &scratch, ticket.0, now)?;
                    lba += 1;
                    scratch.clear();
                }
            }
        }
        Ok(())
    }

    /// Ends everything in flight, and loses what `loss` says.
    pub fn crash(&mut self, loss: CrashKind) {
        let now = self.tick();
        self.active_reads.clear();
        self.ops.clear();
        match loss {
            CrashKind::ProcessDeath => {
                for c in self.registers.values_mut().flat_map(|r| &mut r.0) {
                    c.seen = c.seen.min(now);
                }
            }
            CrashKind::PowerLoss => {
                let zeroes = self.initial_contents == InitialContents::Zeroes;
                let horizon = self.flushed_up_to;
                self.registers.retain(|_, r| {
                    r.prune(horizon, NEVER);
                    r.after_power_loss(now);
                    !(zeroes && matches!(r.0.as_slice(), [c] if c.value == Value::Zero))
                });
            }
        }
    }

    /// Records deliberate damage: until rewritten the range may hold anything.
    pub fn mark_damaged(&mut self, range: Blocks) {
        let now = self.tick();
        for lba in blocks_of(range) {
            let mut any = Candidate::initial(Value::Any);
            (any.op_begun, any.begun, any.seen, any.is_certain) = (now, now, now, false);
            self.register(lba).0.push(any);
        }
    }

    /// Number of possible values of all blocks beyond one each: the memory it costs.
    #[must_use]
    pub fn undecided_values(&self) -> usize {
        self.registers.values().map(|r| r.0.len() - 1).sum()
    }

    fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    fn begin(&mut self, op: Op) -> Ticket {
        let ticket = Ticket(self.tick());
        self.ops.insert(ticket, op);
        ticket
    }

    fn begin_change(
        &mut self,
        range: Blocks,
        value: Value,
        stamp: Option<(u32, u64)>,
        fua: bool,
    ) -> Ticket {
        let durable = fua || self.write_through;
        let ticket = self.begin(Op::Change { range, stamp, durable });
        let (horizon, reading) = (self.flushed_up_to, self.oldest_read());
        for lba in blocks_of(range) {
            let register = self.register(lba);
            register.prune(horizon, reading);
            register.0.push(Candidate {
                value,
                op_begun: ticket.0,
                begun: ticket.0,
                seen: NEVER,
                acknowledged: NEVER,
                is_certain: false,
                is_crash_alternative: false,
            });
        }
        ticket
    }

    fn end_change(
        &mut self,
        ticket: Ticket,
        range: Blocks,
        outcome: Outcome,
        durable: bool,
        now: Time,
    ) {
        if outcome == Outcome::Unknown {
            return;
        }
        let (horizon, reading) = (self.flushed_up_to, self.oldest_read());
        for lba in blocks_of(range) {
            let register = self.register(lba);
            if let Some(c) = register.0.iter_mut().find(|c| c.op_begun == ticket.0) {
                c.seen = c.seen.min(now);
                if outcome == Outcome::Done {
                    c.is_certain = true;
                    c.acknowledged = if durable { BEGINNING } else { now };
                }
            }
            register.prune(horizon, reading);
        }
    }

    fn oldest_read(&self) -> Time {
        self.active_reads.first().copied().unwrap_or(NEVER)
    }

    fn register(&mut self, lba: u64) -> &mut Register {
        let value = self.initial_value();
        self.registers.entry(lba).or_insert_with(|| Register(vec![Candidate::initial(value)]))
    }

    fn initial_value(&self) -> Value {
        match self.initial_contents {
            InitialContents::Zeroes => Value::Zero,
            InitialContents::Anything => Value::Any,
        }
    }

    fn check_block(
        &mut self,
        at: Lba,
        block: &[u8],
        begun: Time,
        now: Time,
    ) -> Result<(), Violation> {
        let (volume, issued) = (self.volume, self.sequence);
        let found = match Contents::parse(block) {
            Contents::Zero => Ok(Value::Zero),
            Contents::Torn { offset } => Err(Fault::Torn { offset }),
            Contents::Unknown => Err(Fault::NeverWritten),
            Contents::Stamped(s) if s.volume != volume || s.at != at => Err(Fault::Misdirected(s)),
            Contents::Stamped(s) if s.sequence > issued => Err(Fault::NeverWritten),
            Contents::Stamped(s) => Ok(Value::Write(s.sequence)),
        };
        let Some(register) = self.registers.get_mut(&at.0) else {
            let initial = self.initial_value();
            return match found {
                _ if initial == Value::Any => Ok(()),
                Ok(value) if value == initial => Ok(()),
                Ok(found) => Err(Fault::Stale { found }),
                Err(fault) => Err(fault),
            }
            .map_err(|fault| Violation { at, fault, history: "never written".into() });
        };
        let fault = match found {
            Ok(value) if register.observe(value, begun, now) => return Ok(()),
            Ok(found) => Fault::Stale { found },
            // Possible only where the block may hold anything.
            Err(fault) => {
                let mut wild = register.clone();
                wild.0.iter_mut().filter(|c| c.value == Value::AnyWritten).for_each(|c| {
                    c.value = Value::Zero;
                });
                if wild.observe(Value::Any, begun, now) {
                    return Ok(());
                }
                fault
            }
        };
        Err(Violation { at, fault, history: history(register, self.flushed_up_to, begun, now) })
    }
}

fn blocks_of(range: Blocks) -> std::ops::Range<u64> {
    range.at.0..range.at.0.saturating_add(range.count)
}

fn history(register: &Register, horizon: Time, begun: Time, now: Time) -> String {
    let mut out = format!("read from {begun} to {now}, flushed up to {horizon}, candidates:");
    for c in &register.0 {
        let how = match (c.is_certain, c.is_crash_alternative) {
            (true, _) => "certain",
            (false, true) => "possibly left by a crash",
            (false, false) => "perhaps",
        };
        let seen = if c.seen == NEVER { "-".into() } else { c.seen.to_string() };
        out += &format!(" [{}: {how}, begun {}, seen {seen}", c.value, c.begun);
        out += if c.is_durable(horizon) { ", durable]" } else { "]" };
    }
    out
}

#[cfg(test)]
mod tests;
