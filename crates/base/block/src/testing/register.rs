//! The register checker: a block device is an array of independent registers.
//!
//! A [`Checker`] is told when every operation begins and how it ends, about crashes and about
//! injected damage, and says of each read whether the history permits what it returned. Writes
//! carry [`Stamp`]s, so it knows a torn, strayed, stale or lost block when it sees one.
//!
//! # How it decides
//! Each block keeps its *candidates*: the writes whose value it may still hold. Of a candidate it
//! knows two moments: when it, or a read that returned it, first completed (`seen`), and when it,
//! or a read that returned it, last began (`begun`). Candidate `a` is before `b` if `a.seen <
//! b.begun`. A history of a register whose writes are all different is linearizable exactly when
//! no two values are each before the other (Gibbons and Korach, "Testing shared memories", 1997).
//! A value that failed or unanswered writes may have left counts only once it was read.
//!
//! A candidate is forgotten when a durable one is after it: durable is what a flush covered that
//! began after its completion, or FUA. A power cut leaves the remaining candidates as
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

/// Moments before every event: what the volume began with, and its durability.
const BEGINNING: Time = 0;

/// What a fresh volume holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initially {
    /// Zeroes.
    Zeroes,
    /// Whatever was there.
    Anything,
}

/// How an operation that changes blocks, or a flush, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged.
    Done,
    /// Refused, failed or aborted: it took effect before this moment or never will.
    Failed,
    /// Nobody will ever say: the answer was lost on the way, the operation may still run.
    Unknown,
}

/// What a crash takes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Power is lost: everything not yet durable may be gone, block by block.
    Unflushed,
    /// A process dies: what was in flight may or may not have happened.
    InFlight,
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
    AnyOwn,
    /// Anything at all: damaged on purpose, or never known.
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
    /// It belongs elsewhere.
    #[error("holds {0}, which belongs elsewhere")]
    Misdirected(Stamp),
    /// It holds what nobody wrote.
    #[error("holds what was never written")]
    Foreign,
    /// It holds what had been replaced: a lost write, a stale read, a resurrected value.
    #[error("holds {found}, which had been replaced")]
    Replaced {
        /// What the read returned.
        found: Value,
    },
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zeroes"),
            Self::Write(sequence) => write!(f, "write {sequence}"),
            Self::AnyOwn => f.write_str("anything once written"),
            Self::Any => f.write_str("anything"),
        }
    }
}

/// One thing that a block may hold.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    value: Value,
    /// When its operation began: its identity.
    born: Time,
    /// When it, or a read that returned it, last began.
    begun: Time,
    /// When it, or a read that returned it, first completed.
    seen: Time,
    /// When its operation completed successfully; `BEGINNING` if it was durable then.
    acknowledged: Time,
    /// Whether it happened for sure.
    certain: bool,
    /// Whether it is one of the alternatives that a power cut left.
    alternative: bool,
}

impl Candidate {
    fn initial(value: Value) -> Self {
        Self {
            value,
            born: BEGINNING,
            begun: BEGINNING,
            seen: BEGINNING,
            acknowledged: BEGINNING,
            certain: true,
            alternative: false,
        }
    }

    fn is_before(&self, other: &Self) -> bool {
        self.seen < other.begun
    }

    fn contradicts(&self, other: &Self) -> bool {
        self.is_before(other) && other.is_before(self)
    }

    /// Durable from `horizon` on, the beginning of the latest successful flush.
    fn is_durable(&self, horizon: Time) -> bool {
        self.certain && self.acknowledged < horizon
    }

    /// The candidate if a read from `begun` to `now` returned it.
    fn read(&self, begun: Time, now: Time) -> Self {
        let (begun, seen) = (self.begun.max(begun), self.seen.min(now));
        Self { begun, seen, certain: true, ..*self }
    }
}

/// One block.
#[derive(Clone, Debug)]
struct Register(Vec<Candidate>);

impl Register {
    /// Takes a read into account; false if nothing explains what it found.
    fn observe(&mut self, found: Value, begun: Time, now: Time) -> bool {
        let mut explained = None;
        let mut count = 0;
        for (i, c) in self.0.iter().enumerate() {
            let fits = c.value == found || matches!(c.value, Value::Any | Value::AnyOwn);
            let then = c.read(begun, now);
            let refuted = |(j, d): (usize, &Candidate)| i != j && d.certain && then.contradicts(d);
            if fits && !self.0.iter().enumerate().any(refuted) {
                count += 1;
                explained = Some((i, then));
            }
        }
        let Some((i, then)) = explained else { return false };
        if count == 1 && then.value == found {
            self.0[i] = then;
            if then.alternative {
                self.0.retain(|c| !c.alternative || c.born == then.born);
            }
        }
        true
    }

    /// Forgets what can be neither read nor left by a power cut any more, and what reads have
    /// shown not to have happened. `reading` is when the oldest read in flight began.
    fn prune(&mut self, horizon: Time, reading: Time) {
        if self.0.len() > 1 {
            let all = std::mem::take(&mut self.0);
            // Few of many, as long as nobody flushes: not every one is held against every other.
            let replaces = |d: &&Candidate| d.is_durable(horizon) && d.seen < reading;
            let durable: SmallVec<[&Candidate; 4]> = all.iter().filter(replaces).collect();
            let gone = |c: &Candidate| {
                let replaced = durable.iter().any(|d| d.born != c.born && c.is_before(d));
                let refutes = |d: &Candidate| d.certain && d.born != c.born && c.contradicts(d);
                replaced || !c.certain && all.iter().any(refutes)
            };
            self.0 = all.iter().filter(|c| !gone(c)).copied().collect();
        }
    }

    /// Power was lost at `now`: what is left are alternatives, and they are durable.
    fn restart(&mut self, now: Time) {
        let mut left: Vec<Candidate> = Vec::new();
        for c in &self.0 {
            if left.iter().all(|l| l.value != c.value) {
                left.push(Candidate {
                    begun: now,
                    seen: now,
                    acknowledged: BEGINNING,
                    certain: false,
                    alternative: true,
                    ..*c
                });
            }
        }
        if let [only] = left.as_mut_slice() {
            only.certain = true;
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
    initially: Initially,
    write_through: bool,
    now: Time,
    /// Beginning of the latest flush that succeeded.
    horizon: Time,
    sequence: u64,
    registers: FxHashMap<u64, Register>,
    ops: FxHashMap<Ticket, Op>,
    reading: BTreeSet<Time>,
}

impl Checker {
    /// A checker for volume number `volume` with blocks of `block_size` bytes.
    #[must_use]
    pub fn new(volume: u64, block_size: u32, initially: Initially) -> Self {
        Self {
            volume,
            block_size: block_size as usize,
            initially,
            write_through: false,
            now: BEGINNING + 1,
            horizon: BEGINNING + 1,
            sequence: 0,
            registers: FxHashMap::default(),
            ops: FxHashMap::default(),
            reading: BTreeSet::new(),
        }
    }

    /// Demands that every acknowledged write is durable, flush or not.
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
        let value = if zeroes { Value::Zero } else { Value::AnyOwn };
        self.begin_change(range, value, None, false)
    }

    /// A read begins.
    pub fn begin_read(&mut self, range: Blocks) -> Ticket {
        let ticket = self.begin(Op::Read { range });
        self.reading.insert(ticket.0);
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

    /// A write, zeroing, unmapping or flush ends. Nothing happens if a crash ended it already.
    pub fn end(&mut self, ticket: Ticket, outcome: Outcome) {
        let now = self.tick();
        match self.ops.remove(&ticket) {
            Some(Op::Change { range, durable, .. }) => {
                self.end_change(ticket, range, outcome, durable, now);
            }
            Some(Op::Flush) if outcome == Outcome::Done => {
                self.horizon = self.horizon.max(ticket.0);
            }
            Some(Op::Flush) | None => {}
            Some(Op::Read { .. }) => {
                self.reading.remove(&ticket.0);
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
        self.reading.remove(&ticket.0);
        assert_eq!(data.len() as u64, range.count * self.block_size as u64, "length of a read");
        let mut lba = range.at.0;
        let mut scratch = Vec::new();
        for piece in data.iter() {
            let mut bytes: &[u8] = piece;
            while !bytes.is_empty() {
                if scratch.is_empty() && bytes.len() >= self.block_size {
                    let (block, rest) = bytes.split_at(self.block_size);
                    self.judge(Lba(lba), block, ticket.0, now)?;
                    (lba, bytes) = (lba + 1, rest);
                    continue;
                }
                let (part, rest) = bytes.split_at(bytes.len().min(self.block_size - scratch.len()));
                scratch.extend_from_slice(part);
                bytes = rest;
                if scratch.len() == self.block_size {
                    self.judge(Lba(lba), &scratch, ticket.0, now)?;
                    lba += 1;
                    scratch.clear();
                }
            }
        }
        Ok(())
    }

    /// Everything in flight ends, and more may be lost.
    pub fn crash(&mut self, loss: Loss) {
        let now = self.tick();
        self.reading.clear();
        self.ops.clear();
        match loss {
            Loss::InFlight => {
                for c in self.registers.values_mut().flat_map(|r| &mut r.0) {
                    c.seen = c.seen.min(now);
                }
            }
            Loss::Unflushed => {
                let zeroes = self.initially == Initially::Zeroes;
                let horizon = self.horizon;
                self.registers.retain(|_, r| {
                    r.prune(horizon, NEVER);
                    r.restart(now);
                    !(zeroes && matches!(r.0.as_slice(), [c] if c.value == Value::Zero))
                });
            }
        }
    }

    /// The medium was damaged on purpose: until it is written again the range may hold anything.
    pub fn damaged(&mut self, range: Blocks) {
        let now = self.tick();
        for lba in blocks_of(range) {
            let mut any = Candidate::initial(Value::Any);
            (any.born, any.begun, any.seen, any.certain) = (now, now, now, false);
            self.register(lba).0.push(any);
        }
    }

    /// How many values the blocks of the volume may hold beyond one each: what it costs to remember.
    #[must_use]
    pub fn undecided(&self) -> usize {
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
        let (horizon, reading) = (self.horizon, self.oldest_read());
        for lba in blocks_of(range) {
            let register = self.register(lba);
            register.prune(horizon, reading);
            register.0.push(Candidate {
                value,
                born: ticket.0,
                begun: ticket.0,
                seen: NEVER,
                acknowledged: NEVER,
                certain: false,
                alternative: false,
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
        let (horizon, reading) = (self.horizon, self.oldest_read());
        for lba in blocks_of(range) {
            let register = self.register(lba);
            if let Some(c) = register.0.iter_mut().find(|c| c.born == ticket.0) {
                c.seen = c.seen.min(now);
                if outcome == Outcome::Done {
                    c.certain = true;
                    c.acknowledged = if durable { BEGINNING } else { now };
                }
            }
            register.prune(horizon, reading);
        }
    }

    fn oldest_read(&self) -> Time {
        self.reading.first().copied().unwrap_or(NEVER)
    }

    fn register(&mut self, lba: u64) -> &mut Register {
        let value = self.initial();
        self.registers.entry(lba).or_insert_with(|| Register(vec![Candidate::initial(value)]))
    }

    fn initial(&self) -> Value {
        match self.initially {
            Initially::Zeroes => Value::Zero,
            Initially::Anything => Value::Any,
        }
    }

    fn judge(&mut self, at: Lba, block: &[u8], begun: Time, now: Time) -> Result<(), Violation> {
        let (volume, issued) = (self.volume, self.sequence);
        let found = match Contents::of(block) {
            Contents::Zero => Ok(Value::Zero),
            Contents::Torn { offset } => Err(Fault::Torn { offset }),
            Contents::Unknown => Err(Fault::Foreign),
            Contents::Stamped(s) if s.volume != volume || s.at != at => Err(Fault::Misdirected(s)),
            Contents::Stamped(s) if s.sequence > issued => Err(Fault::Foreign),
            Contents::Stamped(s) => Ok(Value::Write(s.sequence)),
        };
        let Some(register) = self.registers.get_mut(&at.0) else {
            let initial = self.initial();
            return match found {
                _ if initial == Value::Any => Ok(()),
                Ok(value) if value == initial => Ok(()),
                Ok(found) => Err(Fault::Replaced { found }),
                Err(fault) => Err(fault),
            }
            .map_err(|fault| Violation { at, fault, history: "never written".into() });
        };
        let fault = match found {
            Ok(value) if register.observe(value, begun, now) => return Ok(()),
            Ok(found) => Fault::Replaced { found },
            // Only what may be anything may be this.
            Err(fault) => {
                let mut wild = register.clone();
                wild.0.iter_mut().filter(|c| c.value == Value::AnyOwn).for_each(|c| {
                    c.value = Value::Zero;
                });
                if wild.observe(Value::Any, begun, now) {
                    return Ok(());
                }
                fault
            }
        };
        Err(Violation { at, fault, history: history(register, self.horizon, begun, now) })
    }
}

fn blocks_of(range: Blocks) -> std::ops::Range<u64> {
    range.at.0..range.at.0.saturating_add(range.count)
}

fn history(register: &Register, horizon: Time, begun: Time, now: Time) -> String {
    let mut out = format!("read from {begun} to {now}, flushed up to {horizon}, candidates:");
    for c in &register.0 {
        let how = match (c.certain, c.alternative) {
            (true, _) => "certain",
            (false, true) => "perhaps left by a crash",
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
