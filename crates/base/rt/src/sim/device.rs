//! A simulated disk as a machine: operations go in, and when their time has come they are done.
//! Pure: virtual time and waiting belong to [`super::disk`].

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use super::extents::Extents;
use super::faults::{Bad, BadOps, BadUntil, DiskSetup, Unsynced};
use super::medium::{Fate, Losses, Medium};
use super::rng::Rng;
use super::trace::content;
use crate::buf::{Bufs, BufsMut};
use crate::disk::{DiskError, DiskErrorKind, DiskKind, Stretch};

/// Space is given to files in pieces of this many bytes.
const GRAIN: u64 = 4096;

/// The space that the files of a host share.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Bytes there are; `None`: any number.
    pub(crate) capacity: Cell<Option<u64>>,
    /// Bytes taken.
    pub(crate) used: Cell<u64>,
}

impl Space {
    fn left(&self) -> u64 {
        self.capacity.get().map_or(u64::MAX, |c| c.saturating_sub(self.used.get()))
    }
}

/// One operation.
#[derive(Debug)]
pub(crate) enum Op {
    Read { at: u64, into: BufsMut },
    Write { at: u64, data: Bufs },
    Zero { at: u64, bytes: u64 },
    Punch { at: u64, bytes: u64 },
    Allocate { at: u64, bytes: u64 },
    SetLen { bytes: u64 },
    Sync,
}

impl Op {
    fn name(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Zero { .. } => "zero",
            Self::Punch { .. } => "punch",
            Self::Allocate { .. } => "allocate",
            Self::SetLen { .. } => "set_len",
            Self::Sync => "sync",
        }
    }

    /// The bytes it touches.
    fn range(&self) -> Range<u64> {
        match self {
            Self::Read { at, into } => *at..*at + into.iter().map(|b| b.len() as u64).sum::<u64>(),
            Self::Write { at, data } => *at..*at + data.len() as u64,
            Self::Zero { at, bytes } | Self::Punch { at, bytes } | Self::Allocate { at, bytes } => {
                *at..*at + bytes
            }
            Self::SetLen { bytes } => *bytes..*bytes,
            Self::Sync => 0..0,
        }
    }

    fn changes(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Zero { .. } | Self::Punch { .. })
    }
}

/// What a finished operation answers: a read its buffers, everything else none.
pub(crate) type Answer = Result<BufsMut, DiskError>;

/// What a trace records of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) what: &'static str,
    pub(crate) numbers: [u64; 4],
}

/// A mishap that befalls the next operation it fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// A read fails with a medium error.
    ReadError,
    /// A write fails with a medium error; each unit then holds old or new contents.
    WriteError,
    /// A sync fails and none of what it covers becomes durable.
    SyncError,
    /// A write is acknowledged and never done.
    LostWrite,
    /// A write goes to this byte address instead.
    MisdirectedWrite(u64),
    /// A read returns what lies at this byte address.
    MisdirectedRead(u64),
}

#[derive(Debug)]
struct InFlight {
    op: Op,
    /// How often the disk had been pulled out when its owner opened it.
    opened: u64,
    /// What a sync has to make durable: changes up to this one and this length.
    mark: u64,
    len: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Device {
    setup: DiskSetup,
    medium: Medium,
    len: u64,
    durable_len: u64,
    allocated: Extents,
    space: Rc<Space>,
    bad: Vec<Bad>,
    mishaps: VecDeque<Mishap>,
    in_flight: BTreeMap<u64, InFlight>,
    next_id: u64,
    present: bool,
    /// How often it was pulled out: what was opened before is another disk to the system from then on.
    pulled: u64,
    rng: Rng,
}

fn fail(kind: DiskErrorKind) -> DiskError {
    let errno = match kind {
        DiskErrorKind::Media => libc::EIO,
        DiskErrorKind::NoSpace => libc::ENOSPC,
        DiskErrorKind::Gone => libc::ENODEV,
        _ => 0,
    };
    DiskError { kind, errno }
}

impl Device {
    pub(crate) fn new(setup: DiskSetup, space: Rc<Space>, rng: Rng) -> Self {
        Self {
            medium: Medium::new(setup.physical_block),
            len: setup.bytes,
            durable_len: setup.bytes,
            allocated: Extents::default(),
            space,
            bad: Vec::new(),
            mishaps: VecDeque::new(),
            in_flight: BTreeMap::new(),
            next_id: 0,
            present: true,
            pulled: 0,
            rng,
            setup,
        }
    }

    pub(crate) fn setup(&self) -> &DiskSetup {
        &self.setup
    }

    pub(crate) fn setup_mut(&mut self) -> &mut DiskSetup {
        &mut self.setup
    }

    pub(crate) fn medium(&self) -> &Medium {
        &self.medium
    }

    pub(crate) fn medium_mut(&mut self) -> &mut Medium {
        &mut self.medium
    }

    /// Size in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of space behind the disk.
    pub(crate) fn allocated(&self) -> u64 {
        match self.setup.kind {
            DiskKind::BlockDevice => self.len,
            DiskKind::File => self.allocated.count(0..u64::MAX) * GRAIN,
        }
    }

    /// How a range of a file begins. Contents that came back have no space before the next power cut, and count all the same.
    pub(crate) fn stretch(&self, at: u64, bytes: u64) -> Result<Stretch, DiskError> {
        if !self.present {
            return Err(fail(DiskErrorKind::Gone));
        }
        let mut data = self.allocated.clone();
        for r in self.medium.filled() {
            data.insert(r.start / GRAIN..r.end.div_ceil(GRAIN));
        }
        let next = data.next(at / GRAIN).map(|r| r.start * GRAIN..r.end * GRAIN);
        Ok(match next {
            Some(next) if next.start <= at => {
                Stretch { bytes: bytes.min(next.end - at), hole: false }
            }
            Some(next) => Stretch { bytes: bytes.min(next.start - at), hole: true },
            None => Stretch { bytes, hole: true },
        })
    }

    /// Operations that are not finished.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes an operation of one who has opened it when it had been pulled out so often: its number and the time it will
    /// take.
    pub(crate) fn submit(&mut self, op: Op, opened: u64) -> (u64, Duration, Report) {
        let id = self.next_id;
        self.next_id += 1;
        let range = op.range();
        let hash = if let Op::Write { data, .. } = &op {
            data.iter().fold(0, |h: u64, b| h.rotate_left(9) ^ content(b))
        } else {
            0
        };
        let numbers = [id, range.start, range.end - range.start, hash];
        let report = Report { what: op.name(), numbers };
        let delay = self.latency();
        let in_flight = InFlight { op, opened, mark: self.medium.mark(), len: self.len };
        self.in_flight.insert(id, in_flight);
        (id, delay, report)
    }

    fn latency(&self) -> Duration {
        let faults = &self.setup.faults;
        let l = faults.latency;
        let mut delay = self.rng.time(l.min, l.max);
        if l.outlier_every > 0 && self.rng.below(u64::from(l.outlier_every)) == 0 {
            delay = self.rng.time(l.max, l.max * 10);
        }
        if self.rng.chance(faults.stall) {
            delay += faults.stall_for;
        }
        delay
    }

    /// Finishes an operation; `None` when a power cut has swallowed it.
    pub(crate) fn finish(&mut self, id: u64) -> Option<(Answer, Report)> {
        let InFlight { op, opened, mark, len } = self.in_flight.remove(&id)?;
        let answer = if self.present && opened == self.pulled {
            self.execute(op, mark, len)
        } else {
            Err(fail(DiskErrorKind::Gone))
        };
        let (code, hash) = match &answer {
            Ok(bufs) => (0, bufs.iter().fold(0, |h: u64, b| h.rotate_left(9) ^ content(b))),
            Err(e) => (1 + e.kind as u64, 0),
        };
        Some((answer, Report { what: "done", numbers: [id, code, hash, 0] }))
    }

    fn execute(&mut self, op: Op, mark: u64, len: u64) -> Answer {
        if let Some(kind) = self.is_singled_out() {
            match &op {
                Op::Write { at, data } => self.write_in_part(*at, &data.to_vec()),
                Op::Sync => self.medium.fail_sync(mark, 0.0, &self.rng),
                _ => {}
            }
            return Err(fail(kind));
        }
        match op {
            Op::Read { at, into } => return self.read(at, into),
            Op::Write { at, data } => self.write(at, &data)?,
            Op::Zero { at, bytes } => self.zero(at, bytes)?,
            Op::Punch { at, bytes } => self.punch(at, bytes)?,
            Op::Allocate { at, bytes } => self.allocate(at, bytes)?,
            Op::SetLen { bytes } => self.set_len(bytes),
            Op::Sync => self.sync(mark, len)?,
        }
        Ok(BufsMut::new())
    }

    /// Whether this operation is the one that [`super::DiskFaults::fail_after`] means.
    fn is_singled_out(&mut self) -> Option<DiskErrorKind> {
        match &mut self.setup.faults.fail_after {
            Some((0, kind)) => {
                let kind = *kind;
                self.setup.faults.fail_after = None;
                Some(kind)
            }
            Some((spared, _)) => {
                *spared -= 1;
                None
            }
            None => None,
        }
    }

    /// Takes the next scripted mishap if it is one of those that `fits`.
    fn mishap(&mut self, fits: impl Fn(Mishap) -> bool) -> Option<Mishap> {
        let first = self.mishaps.front().copied().filter(|&m| fits(m))?;
        self.mishaps.pop_front();
        Some(first)
    }

    /// Whether `range` touches a bad place for this kind of operation.
    fn hits_bad(&mut self, range: &Range<u64>, writes: bool) -> bool {
        let touches = |b: &Bad| {
            b.ops.covers(writes) && b.bytes.start < range.end && range.start < b.bytes.end
        };
        let Some(bad) = self.bad.iter_mut().find(|b| touches(b)) else { return false };
        if let BadUntil::Times(times) = &mut bad.until {
            *times = times.saturating_sub(1);
        }
        self.bad.retain(|b| b.until != BadUntil::Times(0));
        true
    }

    fn elsewhere(&self, at: u64, bytes: u64) -> u64 {
        let block = u64::from(self.setup.logical_block);
        let places = self.len.saturating_sub(bytes) / block;
        let to = self.rng.below(places + 1) * block;
        if to == at { (to + block).min(places * block) } else { to }
    }

    fn read(&mut self, at: u64, mut into: BufsMut) -> Answer {
        let bytes: u64 = into.iter().map(|b| b.len() as u64).sum();
        let mut at = at;
        let scripted = self.mishap(|m| matches!(m, Mishap::ReadError | Mishap::MisdirectedRead(_)));
        if scripted == Some(Mishap::ReadError)
            || self.rng.chance(self.setup.faults.read_error)
            || self.hits_bad(&(at..at + bytes), false)
        {
            return Err(fail(DiskErrorKind::Media));
        }
        if self.rng.chance(self.setup.faults.bit_rot) {
            let victim = at + self.rng.below(bytes);
            let bit = u8::try_from(self.rng.below(8)).expect("below 8");
            self.medium.flip(victim, bit);
        }
        if let Some(Mishap::MisdirectedRead(from)) = scripted {
            at = from;
        } else if self.rng.chance(self.setup.faults.misdirected_read) {
            at = self.elsewhere(at, bytes);
        }
        for buf in &mut into {
            self.medium.read(at, buf);
            at += buf.len() as u64;
        }
        Ok(into)
    }

    fn write(&mut self, at: u64, data: &Bufs) -> Result<(), DiskError> {
        let bytes = data.to_vec();
        let range = at..at + bytes.len() as u64;
        let scripted = self.mishap(|m| {
            matches!(m, Mishap::WriteError | Mishap::LostWrite | Mishap::MisdirectedWrite(_))
        });
        if scripted == Some(Mishap::WriteError)
            || self.rng.chance(self.setup.faults.write_error)
            || self.hits_bad(&range, true)
        {
            self.write_in_part(at, &bytes);
            return Err(fail(DiskErrorKind::Media));
        }
        if scripted == Some(Mishap::LostWrite) || self.rng.chance(self.setup.faults.lost_write) {
            return Ok(());
        }
        let to = match scripted {
            Some(Mishap::MisdirectedWrite(to)) => to,
            _ if self.rng.chance(self.setup.faults.misdirected_write) => {
                self.elsewhere(at, bytes.len() as u64)
            }
            _ => at,
        };
        let fits = self.take_space(to..to + bytes.len() as u64);
        let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(bytes.len());
        self.medium.write(to, &bytes[..fits]);
        if fits < bytes.len() {
            return Err(fail(DiskErrorKind::NoSpace));
        }
        self.rewritten(&range);
        Ok(())
    }

    /// A write that fails or is cut off: block by block, old or new.
    fn write_in_part(&mut self, at: u64, bytes: &[u8]) {
        let unit = u64::from(self.setup.physical_block);
        let mut done = 0;
        while done < bytes.len() {
            let here = at + done as u64;
            let part = usize::try_from(unit - here % unit).expect("at most a unit");
            let part = part.min(bytes.len() - done);
            if self.rng.chance(0.5) {
                let fits = self.take_space(here..here + part as u64);
                let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(part);
                self.medium.write(here, &bytes[done..done + fits]);
            }
            done += part;
        }
    }

    /// Takes space for a range of a file; returns how many bytes from its start have some now.
    fn take_space(&mut self, range: Range<u64>) -> u64 {
        let len = range.end - range.start;
        if self.setup.kind == DiskKind::BlockDevice || len == 0 {
            return len;
        }
        let (first, last) = (range.start / GRAIN, range.end.div_ceil(GRAIN));
        let missing = last - first - self.allocated.count(first..last);
        let affordable = self.space.left() / GRAIN;
        let end = if missing <= affordable {
            last
        } else {
            // As far as the space reaches, grain by grain.
            let mut left = affordable;
            (first..last)
                .find(|&g| {
                    let new = self.allocated.count(g..g + 1) == 0;
                    if new && left == 0 {
                        return true;
                    }
                    left -= u64::from(new);
                    false
                })
                .unwrap_or(last)
        };
        let taken = self.allocated.insert(first..end);
        self.space.used.set(self.space.used.get() + taken * GRAIN);
        (end * GRAIN).min(range.end).saturating_sub(range.start)
    }

    fn rewritten(&mut self, range: &Range<u64>) {
        self.bad.retain(|b| {
            b.until != BadUntil::Rewritten || b.bytes.start < range.start || b.bytes.end > range.end
        });
    }

    fn zero(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.hits_bad(&(at..at + bytes), true) || self.rng.chance(self.setup.faults.write_error)
        {
            return Err(fail(DiskErrorKind::Media));
        }
        let fits = self.take_space(at..at + bytes);
        self.medium.zero(at, fits);
        if fits < bytes {
            return Err(fail(DiskErrorKind::NoSpace));
        }
        self.rewritten(&(at..at + bytes));
        Ok(())
    }

    fn punch(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.hits_bad(&(at..at + bytes), true) || self.rng.chance(self.setup.faults.write_error)
        {
            return Err(fail(DiskErrorKind::Media));
        }
        self.medium.zero(at, bytes);
        let (first, last) = (at.div_ceil(GRAIN), (at + bytes) / GRAIN);
        if first < last {
            self.give_space(first..last);
        }
        self.rewritten(&(at..at + bytes));
        Ok(())
    }

    fn give_space(&mut self, grains: Range<u64>) {
        let freed = self.allocated.remove(grains);
        self.space.used.set(self.space.used.get().saturating_sub(freed * GRAIN));
    }

    fn allocate(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        let missing_all = self.space.left();
        let (first, last) = (at / GRAIN, (at + bytes).div_ceil(GRAIN));
        let missing = last - first - self.allocated.count(first..last);
        if self.setup.kind == DiskKind::File && missing > missing_all / GRAIN {
            return Err(fail(DiskErrorKind::NoSpace));
        }
        self.take_space(at..at + bytes);
        Ok(())
    }

    fn set_len(&mut self, bytes: u64) {
        if bytes < self.len {
            self.medium.truncate(bytes);
            self.give_space(bytes.div_ceil(GRAIN)..u64::MAX);
            self.durable_len = self.durable_len.min(bytes);
            self.in_flight.values_mut().for_each(|f| f.len = f.len.min(bytes));
        }
        self.len = bytes;
    }

    /// Changes the size from outside, durably.
    pub(crate) fn resize(&mut self, bytes: u64) {
        self.set_len(bytes);
        self.durable_len = bytes;
    }

    fn sync(&mut self, mark: u64, len: u64) -> Result<(), DiskError> {
        let scripted = self.mishap(|m| m == Mishap::SyncError).is_some();
        if scripted || self.rng.chance(self.setup.faults.sync_error) {
            let keep = if scripted { 0.0 } else { self.rng.unit() };
            self.medium.fail_sync(mark, keep, &self.rng);
            return Err(fail(DiskErrorKind::Media));
        }
        self.medium.sync(mark);
        // A sync that began later may have ended before.
        self.durable_len = self.durable_len.max(len);
        Ok(())
    }

    /// The power fails: operations in flight stop where they are, and the cache is lost.
    pub(crate) fn power_cut(&mut self) -> Losses {
        let cut: Vec<Op> =
            std::mem::take(&mut self.in_flight).into_values().map(|f| f.op).collect();
        let mut cut: Vec<Op> = cut.into_iter().filter(Op::changes).collect();
        self.rng.shuffle(&mut cut);
        for op in cut {
            self.cut_off(op);
        }
        let keep = match self.setup.faults.unsynced {
            Unsynced::Kept => 1.0,
            Unsynced::Lost => 0.0,
            Unsynced::Drawn => match self.rng.below(4) {
                0 => 0.0,
                1 => 1.0,
                _ => self.rng.unit(),
            },
        };
        let (torn, damage) = (self.setup.faults.torn, self.setup.faults.damage);
        let losses = self.medium.power_loss(Fate { keep, torn, damage }, &self.rng);
        let unit = u64::from(self.setup.physical_block);
        for &index in &losses.unreadable {
            self.bad.push(Bad {
                bytes: index * unit..(index + 1) * unit,
                ops: BadOps::Reads,
                until: BadUntil::Rewritten,
            });
        }
        if self.len != self.durable_len && !self.rng.chance(keep) {
            self.len = self.durable_len;
            self.medium.truncate(self.len);
        }
        self.durable_len = self.len;
        self.recount_space();
        losses
    }

    /// What an operation that was in flight has done by then: nothing, all of it or some units.
    fn cut_off(&mut self, op: Op) {
        let (all, some) = match self.rng.below(3) {
            0 => return,
            1 => (true, false),
            _ => (false, true),
        };
        match op {
            Op::Write { at, data } if some => {
                let bytes = data.to_vec();
                self.write_in_part(at, &bytes);
            }
            Op::Write { at, data } if all => {
                let bytes = data.to_vec();
                let fits = self.take_space(at..at + bytes.len() as u64);
                let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(bytes.len());
                self.medium.write(at, &bytes[..fits]);
            }
            Op::Zero { at, bytes } | Op::Punch { at, bytes } => {
                let block = u64::from(self.setup.physical_block);
                let blocks = bytes / block;
                let done = if all { bytes } else { self.rng.below(blocks + 1) * block };
                self.medium.zero(at, done);
            }
            _ => {}
        }
    }

    /// Contents that came back after a power cut have their space back too.
    fn recount_space(&mut self) {
        if self.setup.kind == DiskKind::File {
            let filled: Vec<_> = self.medium.filled().collect();
            for r in filled {
                let new = self.allocated.insert(r.start / GRAIN..r.end.div_ceil(GRAIN));
                self.space.used.set(self.space.used.get() + new * GRAIN);
            }
        }
    }

    /// A process opens the disk again: what a failed sync left in view may have gone. How often it has been pulled out.
    pub(crate) fn reopened(&mut self) -> u64 {
        if self.rng.chance(0.5) {
            self.medium.evict();
        }
        self.pulled
    }

    /// Pulls the disk out, which cuts its power, or plugs it in again.
    pub(crate) fn set_present(&mut self, present: bool) {
        if self.present && !present {
            let waiting = std::mem::take(&mut self.in_flight);
            self.power_cut();
            // Their owner still waits for an answer.
            self.in_flight = waiting;
            self.pulled += 1;
        }
        self.present = present;
    }

    pub(crate) fn add_bad(&mut self, bad: Bad) {
        self.bad.push(bad);
    }

    pub(crate) fn heal(&mut self) {
        self.bad.clear();
        self.mishaps.clear();
    }

    pub(crate) fn add_mishap(&mut self, mishap: Mishap) {
        self.mishaps.push_back(mishap);
    }

    /// The file is deleted: its space is free again.
    pub(crate) fn give_up_space(&mut self) {
        self.give_space(0..u64::MAX);
    }
}
