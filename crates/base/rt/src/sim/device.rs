//! A simulated disk as a state machine: operations are submitted, and finished when their time has
//! come. Pure: virtual time and waiting belong to [`super::disk`].

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use super::faults::{BadDuration, BadRange, DiskSetup, FailingOps, UnsyncedFate};
use super::medium::{Medium, PowerLossReport, PowerLossRules};
use super::range_set::RangeSet;
use super::rng::Rng;
use super::trace::content_hash;
use crate::buf::{Bufs, BufsMut};
use crate::disk_file::{DiskError, DiskErrorKind, DiskKind, SparseRun};

/// Unit of space allocation for files, in bytes.
const SPACE_UNIT: u64 = 4096;

/// The space shared by the files of a host.
#[derive(Debug, Default)]
pub(crate) struct FileSystemSpace {
    /// Capacity in bytes; `None`: unlimited.
    pub(crate) capacity: Cell<Option<u64>>,
    /// Bytes used.
    pub(crate) used: Cell<u64>,
}

impl FileSystemSpace {
    fn free_bytes(&self) -> u64 {
        self.capacity.get().map_or(u64::MAX, |c| c.saturating_sub(self.used.get()))
    }
}

/// One operation.
#[derive(Debug)]
pub(crate) enum DeviceOp {
    Read { at: u64, into: BufsMut },
    Write { at: u64, data: Bufs },
    Zero { at: u64, bytes: u64 },
    Punch { at: u64, bytes: u64 },
    Allocate { at: u64, bytes: u64 },
    SetLen { bytes: u64 },
    Sync,
}

impl DeviceOp {
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

    /// The bytes that it accesses.
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

    fn is_change(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Zero { .. } | Self::Punch { .. })
    }
}

/// The result of a finished operation: a read's buffers, none for everything else.
pub(crate) type OpResult = Result<BufsMut, DiskError>;

/// The trace record of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceRecord {
    pub(crate) what: &'static str,
    pub(crate) numbers: [u64; 4],
}

/// A fault for the next operation of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptedFault {
    /// A read fails with a medium error.
    ReadError,
    /// A write fails with a medium error; each unit then holds old or new contents.
    WriteError,
    /// A sync fails and none of what it covers becomes durable.
    SyncError,
    /// A write is acknowledged and not done.
    LostWrite,
    /// A write goes to this byte address instead.
    MisdirectedWrite(u64),
    /// A read returns the data at this byte address.
    MisdirectedRead(u64),
}

#[derive(Debug)]
struct InFlight {
    op: DeviceOp,
    /// How often the disk had been unplugged when it was opened.
    open_generation: u64,
    /// What a sync makes durable: changes up to this one and this length.
    sync_point: u64,
    len: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Device {
    setup: DiskSetup,
    medium: Medium,
    len: u64,
    durable_len: u64,
    allocated: RangeSet,
    space: Rc<FileSystemSpace>,
    bad_ranges: Vec<BadRange>,
    scripted_faults: VecDeque<ScriptedFault>,
    in_flight: BTreeMap<u64, InFlight>,
    next_id: u64,
    is_present: bool,
    /// How often it was unplugged: earlier opens refer to a disk that is gone.
    unplug_count: u64,
    rng: Rng,
}

fn disk_error(kind: DiskErrorKind) -> DiskError {
    let errno = match kind {
        DiskErrorKind::Media => libc::EIO,
        DiskErrorKind::NoSpace => libc::ENOSPC,
        DiskErrorKind::Gone => libc::ENODEV,
        _ => 0,
    };
    DiskError { kind, errno }
}

impl Device {
    pub(crate) fn new(setup: DiskSetup, space: Rc<FileSystemSpace>, rng: Rng) -> Self {
        Self {
            medium: Medium::new(setup.physical_block),
            len: setup.bytes,
            durable_len: setup.bytes,
            allocated: RangeSet::default(),
            space,
            bad_ranges: Vec::new(),
            scripted_faults: VecDeque::new(),
            in_flight: BTreeMap::new(),
            next_id: 0,
            is_present: true,
            unplug_count: 0,
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

    /// Bytes of allocated space.
    pub(crate) fn allocated(&self) -> u64 {
        match self.setup.kind {
            DiskKind::BlockDevice => self.len,
            DiskKind::File => self.allocated.count(0..u64::MAX) * SPACE_UNIT,
        }
    }

    /// The status of the first run of a range of a file. Restored contents have no space before the
    /// next power cut, and count all the same.
    pub(crate) fn sparse_run(&self, at: u64, bytes: u64) -> Result<SparseRun, DiskError> {
        if !self.is_present {
            return Err(disk_error(DiskErrorKind::Gone));
        }
        let mut data = self.allocated.clone();
        for r in self.medium.filled_ranges() {
            data.insert(r.start / SPACE_UNIT..r.end.div_ceil(SPACE_UNIT));
        }
        let next = data.next(at / SPACE_UNIT).map(|r| r.start * SPACE_UNIT..r.end * SPACE_UNIT);
        Ok(match next {
            Some(next) if next.start <= at => {
                SparseRun { bytes: bytes.min(next.end - at), is_hole: false }
            }
            Some(next) => SparseRun { bytes: bytes.min(next.start - at), is_hole: true },
            None => SparseRun { bytes, is_hole: true },
        })
    }

    /// Operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Submits an operation of an open at unplug count `opened`: returns its number and its
    /// duration.
    pub(crate) fn submit(&mut self, op: DeviceOp, opened: u64) -> (u64, Duration, TraceRecord) {
        let id = self.next_id;
        self.next_id += 1;
        let range = op.range();
        let hash = if let DeviceOp::Write { data, .. } = &op {
            data.iter().fold(0, |h: u64, b| h.rotate_left(9) ^ content_hash(b))
        } else {
            0
        };
        let numbers = [id, range.start, range.end - range.start, hash];
        let report = TraceRecord { what: op.name(), numbers };
        let delay = self.latency();
        let in_flight = InFlight {
            op,
            open_generation: opened,
            sync_point: self.medium.sync_point(),
            len: self.len,
        };
        self.in_flight.insert(id, in_flight);
        (id, delay, report)
    }

    fn latency(&self) -> Duration {
        let faults = &self.setup.faults;
        let l = faults.latency;
        let mut delay = self.rng.duration_between(l.min, l.max);
        if l.outlier_every > 0 && self.rng.below(u64::from(l.outlier_every)) == 0 {
            delay = self.rng.duration_between(l.max, l.max * 10);
        }
        if self.rng.chance(faults.stall) {
            delay += faults.stall_for;
        }
        delay
    }

    /// Finishes an operation; `None` if a power cut has dropped it.
    pub(crate) fn finish(&mut self, id: u64) -> Option<(OpResult, TraceRecord)> {
        let InFlight { op, open_generation: opened, sync_point: mark, len } =
            self.in_flight.remove(&id)?;
        let answer = if self.is_present && opened == self.unplug_count {
            self.execute(op, mark, len)
        } else {
            Err(disk_error(DiskErrorKind::Gone))
        };
        let (code, hash) = match &answer {
            Ok(bufs) => (0, bufs.iter().fold(0, |h: u64, b| h.rotate_left(9) ^ content_hash(b))),
            Err(e) => (1 + e.kind as u64, 0),
        };
        Some((answer, TraceRecord { what: "done", numbers: [id, code, hash, 0] }))
    }

    fn execute(&mut self, op: DeviceOp, mark: u64, len: u64) -> OpResult {
        if let Some(kind) = self.take_fail_after() {
            match &op {
                DeviceOp::Write { at, data } => self.write_partially(*at, &data.to_vec()),
                DeviceOp::Sync => self.medium.fail_sync(mark, 0.0, &self.rng),
                _ => {}
            }
            return Err(disk_error(kind));
        }
        match op {
            DeviceOp::Read { at, into } => return self.read(at, into),
            DeviceOp::Write { at, data } => self.write(at, &data)?,
            DeviceOp::Zero { at, bytes } => self.zero(at, bytes)?,
            DeviceOp::Punch { at, bytes } => self.punch(at, bytes)?,
            DeviceOp::Allocate { at, bytes } => self.allocate(at, bytes)?,
            DeviceOp::SetLen { bytes } => self.set_len(bytes),
            DeviceOp::Sync => self.sync(mark, len)?,
        }
        Ok(BufsMut::new())
    }

    /// Whether this operation is the one that [`super::DiskFaults::fail_after`] means.
    fn take_fail_after(&mut self) -> Option<DiskErrorKind> {
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

    /// Takes the next scripted fault if `fits` accepts it.
    fn take_scripted_fault(
        &mut self,
        fits: impl Fn(ScriptedFault) -> bool,
    ) -> Option<ScriptedFault> {
        let first = self.scripted_faults.front().copied().filter(|&m| fits(m))?;
        self.scripted_faults.pop_front();
        Some(first)
    }

    /// Whether `range` touches a bad range for this kind of operation.
    fn hits_bad_range(&mut self, range: &Range<u64>, writes: bool) -> bool {
        let touches = |b: &BadRange| {
            b.ops.covers(writes) && b.bytes.start < range.end && range.start < b.bytes.end
        };
        let Some(bad) = self.bad_ranges.iter_mut().find(|b| touches(b)) else { return false };
        if let BadDuration::Times(times) = &mut bad.duration {
            *times = times.saturating_sub(1);
        }
        self.bad_ranges.retain(|b| b.duration != BadDuration::Times(0));
        true
    }

    fn misdirected_address(&self, at: u64, bytes: u64) -> u64 {
        let block = u64::from(self.setup.logical_block);
        let places = self.len.saturating_sub(bytes) / block;
        let to = self.rng.below(places + 1) * block;
        if to == at { (to + block).min(places * block) } else { to }
    }

    fn read(&mut self, at: u64, mut into: BufsMut) -> OpResult {
        let bytes: u64 = into.iter().map(|b| b.len() as u64).sum();
        let mut at = at;
        let scripted = self.take_scripted_fault(|m| {
            matches!(m, ScriptedFault::ReadError | ScriptedFault::MisdirectedRead(_))
        });
        if scripted == Some(ScriptedFault::ReadError)
            || self.rng.chance(self.setup.faults.read_error)
            || self.hits_bad_range(&(at..at + bytes), false)
        {
            return Err(disk_error(DiskErrorKind::Media));
        }
        if self.rng.chance(self.setup.faults.bit_rot) {
            let victim = at + self.rng.below(bytes);
            let bit = u8::try_from(self.rng.below(8)).expect("below 8");
            self.medium.flip_bit(victim, bit);
        }
        if let Some(ScriptedFault::MisdirectedRead(from)) = scripted {
            at = from;
        } else if self.rng.chance(self.setup.faults.misdirected_read) {
            at = self.misdirected_address(at, bytes);
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
        let scripted = self.take_scripted_fault(|m| {
            matches!(
                m,
                ScriptedFault::WriteError
                    | ScriptedFault::LostWrite
                    | ScriptedFault::MisdirectedWrite(_)
            )
        });
        if scripted == Some(ScriptedFault::WriteError)
            || self.rng.chance(self.setup.faults.write_error)
            || self.hits_bad_range(&range, true)
        {
            self.write_partially(at, &bytes);
            return Err(disk_error(DiskErrorKind::Media));
        }
        if scripted == Some(ScriptedFault::LostWrite)
            || self.rng.chance(self.setup.faults.lost_write)
        {
            return Ok(());
        }
        let to = match scripted {
            Some(ScriptedFault::MisdirectedWrite(to)) => to,
            _ if self.rng.chance(self.setup.faults.misdirected_write) => {
                self.misdirected_address(at, bytes.len() as u64)
            }
            _ => at,
        };
        let fits = self.allocate_space(to..to + bytes.len() as u64);
        let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(bytes.len());
        self.medium.write(to, &bytes[..fits]);
        if fits < bytes.len() {
            return Err(disk_error(DiskErrorKind::NoSpace));
        }
        self.clear_rewritten_bad_ranges(&range);
        Ok(())
    }

    /// A failed or interrupted write: each block keeps the old or gets the new contents.
    fn write_partially(&mut self, at: u64, bytes: &[u8]) {
        let unit = u64::from(self.setup.physical_block);
        let mut done = 0;
        while done < bytes.len() {
            let here = at + done as u64;
            let part = usize::try_from(unit - here % unit).expect("at most a unit");
            let part = part.min(bytes.len() - done);
            if self.rng.chance(0.5) {
                let fits = self.allocate_space(here..here + part as u64);
                let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(part);
                self.medium.write(here, &bytes[done..done + fits]);
            }
            done += part;
        }
    }

    /// Allocates space for a range of a file; returns how many bytes from its start have space now.
    fn allocate_space(&mut self, range: Range<u64>) -> u64 {
        let len = range.end - range.start;
        if self.setup.kind == DiskKind::BlockDevice || len == 0 {
            return len;
        }
        let (first, last) = (range.start / SPACE_UNIT, range.end.div_ceil(SPACE_UNIT));
        let missing = last - first - self.allocated.count(first..last);
        let affordable = self.space.free_bytes() / SPACE_UNIT;
        let end = if missing <= affordable {
            last
        } else {
            // As far as the space lasts, unit by unit.
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
        self.space.used.set(self.space.used.get() + taken * SPACE_UNIT);
        (end * SPACE_UNIT).min(range.end).saturating_sub(range.start)
    }

    fn clear_rewritten_bad_ranges(&mut self, range: &Range<u64>) {
        self.bad_ranges.retain(|b| {
            b.duration != BadDuration::Rewritten
                || b.bytes.start < range.start
                || b.bytes.end > range.end
        });
    }

    fn zero(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.hits_bad_range(&(at..at + bytes), true)
            || self.rng.chance(self.setup.faults.write_error)
        {
            return Err(disk_error(DiskErrorKind::Media));
        }
        let fits = self.allocate_space(at..at + bytes);
        self.medium.zero(at, fits);
        if fits < bytes {
            return Err(disk_error(DiskErrorKind::NoSpace));
        }
        self.clear_rewritten_bad_ranges(&(at..at + bytes));
        Ok(())
    }

    fn punch(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        if self.hits_bad_range(&(at..at + bytes), true)
            || self.rng.chance(self.setup.faults.write_error)
        {
            return Err(disk_error(DiskErrorKind::Media));
        }
        self.medium.zero(at, bytes);
        let (first, last) = (at.div_ceil(SPACE_UNIT), (at + bytes) / SPACE_UNIT);
        if first < last {
            self.free_space(first..last);
        }
        self.clear_rewritten_bad_ranges(&(at..at + bytes));
        Ok(())
    }

    fn free_space(&mut self, grains: Range<u64>) {
        let freed = self.allocated.remove(grains);
        self.space.used.set(self.space.used.get().saturating_sub(freed * SPACE_UNIT));
    }

    fn allocate(&mut self, at: u64, bytes: u64) -> Result<(), DiskError> {
        let missing_all = self.space.free_bytes();
        let (first, last) = (at / SPACE_UNIT, (at + bytes).div_ceil(SPACE_UNIT));
        let missing = last - first - self.allocated.count(first..last);
        if self.setup.kind == DiskKind::File && missing > missing_all / SPACE_UNIT {
            return Err(disk_error(DiskErrorKind::NoSpace));
        }
        self.allocate_space(at..at + bytes);
        Ok(())
    }

    fn set_len(&mut self, bytes: u64) {
        if bytes < self.len {
            self.medium.truncate(bytes);
            self.free_space(bytes.div_ceil(SPACE_UNIT)..u64::MAX);
            self.durable_len = self.durable_len.min(bytes);
            self.in_flight.values_mut().for_each(|f| f.len = f.len.min(bytes));
        }
        self.len = bytes;
    }

    /// Changes the size externally, durably.
    pub(crate) fn resize(&mut self, bytes: u64) {
        self.set_len(bytes);
        self.durable_len = bytes;
    }

    fn sync(&mut self, mark: u64, len: u64) -> Result<(), DiskError> {
        let scripted = self.take_scripted_fault(|m| m == ScriptedFault::SyncError).is_some();
        if scripted || self.rng.chance(self.setup.faults.sync_error) {
            let keep = if scripted { 0.0 } else { self.rng.unit() };
            self.medium.fail_sync(mark, keep, &self.rng);
            return Err(disk_error(DiskErrorKind::Media));
        }
        self.medium.sync(mark);
        // A sync that began later may have ended earlier.
        self.durable_len = self.durable_len.max(len);
        Ok(())
    }

    /// The power fails: operations in flight are interrupted, and the cache is lost.
    pub(crate) fn power_cut(&mut self) -> PowerLossReport {
        let cut: Vec<DeviceOp> =
            std::mem::take(&mut self.in_flight).into_values().map(|f| f.op).collect();
        let mut cut: Vec<DeviceOp> = cut.into_iter().filter(DeviceOp::is_change).collect();
        self.rng.shuffle(&mut cut);
        for op in cut {
            self.apply_interrupted(op);
        }
        let keep = match self.setup.faults.unsynced {
            UnsyncedFate::Kept => 1.0,
            UnsyncedFate::Lost => 0.0,
            UnsyncedFate::Random => match self.rng.below(4) {
                0 => 0.0,
                1 => 1.0,
                _ => self.rng.unit(),
            },
        };
        let (torn, damage) = (self.setup.faults.torn, self.setup.faults.torn_damage);
        let losses = self.medium.power_loss(
            PowerLossRules { keep_probability: keep, torn_probability: torn, damage },
            &self.rng,
        );
        let unit = u64::from(self.setup.physical_block);
        for &index in &losses.unreadable {
            self.bad_ranges.push(BadRange {
                bytes: index * unit..(index + 1) * unit,
                ops: FailingOps::Reads,
                duration: BadDuration::Rewritten,
            });
        }
        if self.len != self.durable_len && !self.rng.chance(keep) {
            self.len = self.durable_len;
            self.medium.truncate(self.len);
        }
        self.durable_len = self.len;
        self.recompute_space();
        losses
    }

    /// Applies an interrupted operation: nothing, all of it or some units.
    fn apply_interrupted(&mut self, op: DeviceOp) {
        let (all, some) = match self.rng.below(3) {
            0 => return,
            1 => (true, false),
            _ => (false, true),
        };
        match op {
            DeviceOp::Write { at, data } if some => {
                let bytes = data.to_vec();
                self.write_partially(at, &bytes);
            }
            DeviceOp::Write { at, data } if all => {
                let bytes = data.to_vec();
                let fits = self.allocate_space(at..at + bytes.len() as u64);
                let fits = usize::try_from(fits).unwrap_or(usize::MAX).min(bytes.len());
                self.medium.write(at, &bytes[..fits]);
            }
            DeviceOp::Zero { at, bytes } | DeviceOp::Punch { at, bytes } => {
                let block = u64::from(self.setup.physical_block);
                let blocks = bytes / block;
                let done = if all { bytes } else { self.rng.below(blocks + 1) * block };
                self.medium.zero(at, done);
            }
            _ => {}
        }
    }

    /// Recomputes the space after restoring contents.
    fn recompute_space(&mut self) {
        if self.setup.kind == DiskKind::File {
            let filled: Vec<_> = self.medium.filled_ranges().collect();
            for r in filled {
                let new = self.allocated.insert(r.start / SPACE_UNIT..r.end.div_ceil(SPACE_UNIT));
                self.space.used.set(self.space.used.get() + new * SPACE_UNIT);
            }
        }
    }

    /// A process opens the disk again: contents of a failed sync may vanish. Returns the unplug
    /// count.
    pub(crate) fn on_open(&mut self) -> u64 {
        if self.rng.chance(0.5) {
            self.medium.drop_lost_changes();
        }
        self.unplug_count
    }

    /// Unplugs the disk, which cuts its power, or plugs it in again.
    pub(crate) fn set_present(&mut self, present: bool) {
        if self.is_present && !present {
            let waiting = std::mem::take(&mut self.in_flight);
            self.power_cut();
            // Their callers still wait for answers.
            self.in_flight = waiting;
            self.unplug_count += 1;
        }
        self.is_present = present;
    }

    pub(crate) fn add_bad_range(&mut self, bad: BadRange) {
        self.bad_ranges.push(bad);
    }

    pub(crate) fn clear_faults(&mut self) {
        self.bad_ranges.clear();
        self.scripted_faults.clear();
    }

    pub(crate) fn add_scripted_fault(&mut self, fault: ScriptedFault) {
        self.scripted_faults.push_back(fault);
    }

    /// The file is deleted: frees its space.
    pub(crate) fn free_all_space(&mut self) {
        self.free_space(0..u64::MAX);
    }
}
