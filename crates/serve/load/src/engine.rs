//! Runs one job on one core: keeps operations in flight, counts and verifies them.
//!
//! `iodepth` tasks take operations from one [`Pattern`]. Each owns its memory from the beginning:
//! data is generated in place, in buffers that are reused; no operation allocates here.
//!
//! Overlapping operations of a job, of which one changes data, do not run concurrently: `block`
//! forbids it, and verification would depend on their order. The later one waits and keeps its
//! position in the order. The map of random jobs makes this rare; only jobs that change data check
//! for it. Jobs on the same range know nothing of each other: each has its own connections or open
//! files, as in fio.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{Bufs, Ctx, Dev, Epoch, Error, Lba, MemoryClass, Op};
use rt::Core;
use rt::buf::{Buf, BufMut};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep_until};

use crate::job::Dir;
use crate::measurement::{JobFailure, Measurement};
use crate::pattern::{Io, Pattern};
use crate::random::SplitMix64;
use crate::spec::JobSpec;
use crate::verify::BlockVerifier;

/// Operations that a task runs before it yields: targets that never block would keep the core for
/// ever.
const OPS_PER_YIELD: u32 = 64;

/// Progress counters of a running job: one writer, readable from any thread.
#[derive(Debug, Default)]
pub struct Progress {
    ops: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
    verified: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// Asks the job to stop after what is in flight.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Operations and bytes of one direction so far, including the ramp.
    #[must_use]
    pub fn counts(&self, dir: Dir) -> (u64, u64) {
        let n = dir.index();
        (self.ops[n].load(Ordering::Relaxed), self.bytes[n].load(Ordering::Relaxed))
    }

    /// Blocks verified so far in the final pass.
    #[must_use]
    pub fn verified(&self) -> u64 {
        self.verified.load(Ordering::Relaxed)
    }

    fn count(&self, io: &Io) {
        let add = |to: &AtomicU64, n| to.store(to.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        add(&self.ops[io.dir.index()], 1);
        add(&self.bytes[io.dir.index()], io.len);
    }
}

/// A job ready to run.
pub struct JobRunner {
    shared: Rc<JobShared>,
    buffers: Vec<SlotBuffers>,
}

/// State shared by the tasks of a job.
struct JobShared {
    dev: Dev,
    spec: JobSpec,
    block: u64,
    state: RefCell<JobState>,
    stopped: Cell<bool>,
    range_released: Notify,
    progress: std::sync::Arc<Progress>,
}

struct JobState {
    pattern: Pattern,
    blocks: Option<BlockVerifier>,
    /// Start, end and whether it changes data, for each operation in flight; only in jobs that
    /// change data.
    in_flight: Vec<(u64, u64, bool)>,
    measurement: Measurement,
    schedule: Schedule,
    /// When the next operation of each direction may begin, if its rate is limited.
    next_allowed: [Instant; 3],
    unflushed: u32,
    /// Where the search for the next block to verify continues.
    verify_cursor: u64,
}

/// Times of the job's phases.
#[derive(Clone, Copy)]
struct Schedule {
    measure_from: Instant,
    ends_at: Option<Instant>,
}

impl Schedule {
    fn new(spec: &JobSpec) -> Self {
        let counts_from = Instant::now() + spec.ramp_time;
        Self {
            measure_from: counts_from,
            ends_at: spec.runtime.map(|runtime| counts_from + runtime),
        }
    }
}

impl JobRunner {
    /// Allocates all memory of the job.
    ///
    /// # Errors
    /// What is missing, as text.
    pub async fn new(
        core: &Core,
        dev: Dev,
        spec: JobSpec,
        progress: std::sync::Arc<Progress>,
    ) -> Result<Self, String> {
        let info = dev.info();
        let account = core.buffer_pool().account();
        let bytes = usize::try_from(spec.bytes_per_operation(&info)).map_err(|e| e.to_string())?;
        let mut memories = Vec::new();
        for _ in 0..spec.iodepth {
            let credit = account.try_credit(bytes, MemoryClass::LocalIo);
            let credit = credit.ok_or("the core has too little memory for iodepth and bs")?;
            memories.push(SlotBuffers::new(Ctx::new(credit, Epoch::default()), &spec));
        }
        let blocks = BlockVerifier::new(&spec);
        let now = Instant::now();
        let state = JobState {
            pattern: Pattern::new(&spec),
            blocks,
            in_flight: Vec::with_capacity(spec.iodepth as usize),
            measurement: Measurement::default(),
            schedule: Schedule { measure_from: now, ends_at: None },
            next_allowed: [now; 3],
            unflushed: 0,
            verify_cursor: spec.start,
        };
        let shared = JobShared {
            block: u64::from(info.block_size),
            dev,
            spec,
            state: RefCell::new(state),
            stopped: Cell::new(false),
            range_released: Notify::new(),
            progress,
        };
        Ok(Self { shared: Rc::new(shared), buffers: memories })
    }

    /// Runs the job's operations.
    pub async fn run(&mut self) {
        {
            let mut state = self.shared.state.borrow_mut();
            state.schedule = Schedule::new(&self.shared.spec);
            state.next_allowed = [Instant::now(); 3];
        }
        self.run_on_all_slots(run_slot).await;
        if self.shared.spec.end_fsync
            && let Some(memory) = self.buffers.first()
            && self.shared.is_ok()
        {
            self.shared.flush(&memory.ctx).await;
        }
    }

    /// Verifies all written blocks, if the job asks for it and did not fail.
    pub async fn verify(&mut self) {
        let wanted = self.shared.spec.do_verify && self.shared.spec.rw.write;
        let blocks = self.shared.state.borrow().blocks.is_some();
        if wanted && blocks && self.shared.is_ok() {
            self.run_on_all_slots(verify_slot).await;
        }
    }

    /// The measurement.
    #[must_use]
    pub fn finish(self) -> Measurement {
        std::mem::take(&mut self.shared.state.borrow_mut().measurement)
    }

    async fn run_on_all_slots<F: Future<Output = SlotBuffers> + 'static>(
        &mut self,
        task: impl Fn(Rc<JobShared>, SlotBuffers) -> F,
    ) {
        let tasks: Vec<JoinHandle<SlotBuffers>> =
            self.buffers.drain(..).map(|m| spawn_local(task(Rc::clone(&self.shared), m))).collect();
        for task in tasks {
            match task.await {
                Ok(memory) => self.buffers.push(memory),
                // A bug of ours: the measurement would be wrong.
                Err(e) => std::panic::resume_unwind(e.into_panic()),
            }
        }
    }
}

/// Runs operations one after the other: one of `iodepth` slots.
async fn run_slot(shared: Rc<JobShared>, mut memory: SlotBuffers) -> SlotBuffers {
    let (mut now, mut turn) = (Instant::now(), 0);
    while let Some(io) = shared.next(now) {
        if let Some(due) = shared.wait_until(&io, now) {
            sleep_until(due).await;
        }
        while !shared.try_lock_range(&io) {
            shared.range_released.notified().await;
        }
        let op = memory.prepare(&shared, &io);
        // Not the time of the last completion: our own overhead in between is not the target's
        // latency.
        let begun = Instant::now();
        let outcome = shared.dev.submit(op, &memory.ctx).await;
        now = Instant::now();
        let wants_flush = shared.complete(&io, (begun, now), outcome);
        memory.reclaim();
        if wants_flush {
            shared.flush(&memory.ctx).await;
            now = Instant::now();
        }
        turn += 1;
        if turn == OPS_PER_YIELD {
            turn = 0;
            rt::yield_to_ready_tasks().await;
            now = Instant::now();
        }
    }
    memory
}

/// Verifies written blocks one by one.
async fn verify_slot(shared: Rc<JobShared>, memory: SlotBuffers) -> SlotBuffers {
    let mut turn = 0;
    while let Some(io) = shared.next_written() {
        let op = Op::Read { at: shared.lba(io.at), blocks: shared.count(io.len) };
        let outcome = shared.dev.submit(op, &memory.ctx).await;
        shared.check_verify_read(&io, outcome);
        turn += 1;
        if turn % OPS_PER_YIELD == 0 {
            rt::yield_to_ready_tasks().await;
        }
    }
    memory
}

impl JobShared {
    fn lba(&self, at: u64) -> Lba {
        Lba(at / self.block)
    }

    fn count(&self, len: u64) -> u32 {
        u32::try_from(len / self.block).unwrap_or(u32::MAX)
    }

    fn is_ok(&self) -> bool {
        self.state.borrow().measurement.failure.is_none()
    }

    /// The next operation, if there is one.
    fn next(&self, now: Instant) -> Option<Io> {
        if self.stopped.get() || self.progress.stop.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state.borrow_mut();
        if state.schedule.ends_at.is_some_and(|ends| now >= ends) {
            self.stopped.set(true);
            return None;
        }
        state.pattern.next()
    }

    /// When an operation may begin, if the rate is limited. Rates hold over the whole run, as in
    /// fio: a slow job catches up.
    fn wait_until(&self, io: &Io, now: Instant) -> Option<Instant> {
        let dir = io.dir.index();
        let (rate, rate_iops) = (self.spec.rate[dir], self.spec.rate_iops[dir]);
        if rate.is_none() && rate_iops.is_none() {
            return None;
        }
        let seconds = |part: u64, whole: Option<u64>| match whole {
            #[expect(clippy::cast_precision_loss, reason = "the pause is precise enough")]
            Some(whole) => Duration::from_secs_f64(part as f64 / whole as f64),
            None => Duration::ZERO,
        };
        let mut state = self.state.borrow_mut();
        let due = state.next_allowed[dir];
        state.next_allowed[dir] = due + seconds(io.len, rate).max(seconds(1, rate_iops));
        let due = state.schedule.ends_at.map_or(due, |ends| due.min(ends));
        Some(due).filter(|due| *due > now)
    }

    /// Locks an operation's range unless it conflicts with one in flight.
    fn try_lock_range(&self, io: &Io) -> bool {
        if !self.spec.rw.changes() {
            return true;
        }
        let mut state = self.state.borrow_mut();
        let (at, end, changes) = (io.at, io.at + io.len, io.dir != Dir::Read);
        let clash = |(a, e, c): &(u64, u64, bool)| (changes || *c) && *a < end && at < *e;
        if state.in_flight.iter().any(clash) {
            return false;
        }
        state.in_flight.push((at, end, changes));
        true
    }

    /// Counts a completion. Returns true if a flush is due.
    fn complete(
        &self,
        io: &Io,
        (begun, now): (Instant, Instant),
        outcome: Result<Bufs, Error>,
    ) -> bool {
        let mut state = self.state.borrow_mut();
        if self.spec.rw.changes() {
            let place = state
                .in_flight
                .iter()
                .position(|(at, end, _)| (*at, *end) == (io.at, io.at + io.len));
            place.map(|place| state.in_flight.swap_remove(place));
            self.range_released.notify_waiters();
        }
        let failed = outcome.is_err();
        self.check_outcome(&mut state, io, outcome);
        if failed {
            return false;
        }
        self.progress.count(io);
        if now >= state.schedule.measure_from {
            let counts_from = state.schedule.measure_from;
            let measured = &mut state.measurement;
            measured.elapsed = now - counts_from;
            let moved = &mut measured.by_direction[io.dir.index()];
            moved.ops += 1;
            moved.bytes += io.len;
            moved.latency.record(now - begun);
        }
        if io.dir == Dir::Read || self.spec.fsync == 0 {
            return false;
        }
        state.unflushed += 1;
        let due = state.unflushed == self.spec.fsync;
        if due {
            state.unflushed = 0;
        }
        due
    }

    /// Checks an operation's outcome: an error, or data that must match what was written.
    fn check_outcome(&self, state: &mut JobState, io: &Io, outcome: Result<Bufs, Error>) {
        let failed = match outcome {
            Err(error) => JobFailure::Operation { doing: io.dir.name(), at: io.at, error },
            Ok(data) if io.dir == Dir::Read => match &mut state.blocks {
                None => return,
                Some(blocks) => match blocks.check(io, &data) {
                    Ok(checked) => {
                        state.measurement.verified += checked;
                        return;
                    }
                    Err(mismatch) => JobFailure::Mismatch(mismatch),
                },
            },
            Ok(_) => return,
        };
        self.fail(state, failed);
    }

    /// Checks a block read for verification.
    fn check_verify_read(&self, io: &Io, outcome: Result<Bufs, Error>) {
        let mut state = self.state.borrow_mut();
        self.check_outcome(&mut state, io, outcome);
        self.progress.verified.store(state.measurement.verified, Ordering::Relaxed);
    }

    fn fail(&self, state: &mut JobState, failed: JobFailure) {
        self.stopped.set(true);
        state.measurement.failure.get_or_insert(failed);
    }

    async fn flush(&self, ctx: &Ctx) {
        let begun = Instant::now();
        let outcome = self.dev.submit(Op::Flush, ctx).await;
        let now = Instant::now();
        let mut state = self.state.borrow_mut();
        match outcome {
            Ok(_) if now >= state.schedule.measure_from => {
                state.measurement.flushes.record(now - begun);
            }
            Ok(_) => {}
            Err(error) => {
                self.fail(&mut state, JobFailure::Operation { doing: "flush", at: 0, error });
            }
        }
    }

    /// The next block to verify.
    fn next_written(&self) -> Option<Io> {
        let mut state = self.state.borrow_mut();
        if state.measurement.failure.is_some() || self.progress.stop.load(Ordering::Relaxed) {
            return None;
        }
        let (blocks, from) = (state.blocks.as_ref()?, state.verify_cursor);
        let at = blocks.written_from(from)?;
        state.verify_cursor = at + self.spec.unit;
        Some(Io { dir: Dir::Read, at, len: self.spec.unit })
    }
}

/// Memory of one slot.
struct SlotBuffers {
    ctx: Ctx,
    /// As long as the largest write; empty without writes.
    write_bufs: Vec<BufMut>,
    /// The same buffers while they are being written.
    in_flight_bufs: Vec<Buf>,
    largest: usize,
    count: u64,
}

impl SlotBuffers {
    fn new(ctx: Ctx, spec: &JobSpec) -> Self {
        let largest = if spec.rw.write { usize::try_from(spec.largest()).unwrap_or(0) } else { 0 };
        let mut memory =
            Self { ctx, write_bufs: Vec::new(), in_flight_bufs: Vec::new(), largest, count: 0 };
        memory.fill();
        memory
    }

    /// Allocates write buffers and fills them with incompressible data.
    fn fill(&mut self) {
        self.write_bufs.clear();
        if self.largest == 0 {
            return;
        }
        self.write_bufs.extend(self.ctx.alloc(self.largest));
        let mut dice = SplitMix64::new(self.write_bufs.as_ptr().addr() as u64);
        self.write_bufs.iter_mut().for_each(|piece| dice.fill(piece));
    }

    /// Builds the operation with its data.
    fn prepare(&mut self, shared: &JobShared, io: &Io) -> Op {
        let (at, blocks) = (shared.lba(io.at), shared.count(io.len));
        match io.dir {
            Dir::Read => Op::Read { at, blocks },
            Dir::Trim => Op::Unmap { at, blocks },
            Dir::Write => {
                let mut state = shared.state.borrow_mut();
                match &mut state.blocks {
                    Some(verified) => verified.fill_write(io, &mut self.write_bufs),
                    None => self.scramble(io),
                }
                drop(state);
                self.in_flight_bufs.extend(self.write_bufs.drain(..).map(BufMut::freeze));
                let all: Bufs = self.in_flight_bufs.iter().cloned().collect();
                let len = usize::try_from(io.len).unwrap_or(usize::MAX);
                Op::Write {
                    at,
                    data: if all.len() == len { all } else { all.slice(0..len) },
                    fua: false,
                }
            }
        }
    }

    /// Makes every sector unique, against deduplication.
    fn scramble(&mut self, io: &Io) {
        self.count += 1;
        let mark = (io.at ^ self.count.rotate_left(40)).to_le_bytes();
        let mut left = usize::try_from(io.len).unwrap_or(usize::MAX);
        for piece in &mut self.write_bufs {
            let used = left.min(piece.len());
            for sector in piece[..used].chunks_mut(512) {
                sector[..8].copy_from_slice(&mark);
            }
            left -= used;
        }
    }

    /// Takes buffers back after a write; replaces those that are still referenced.
    fn reclaim(&mut self) {
        if self.in_flight_bufs.is_empty() {
            return;
        }
        let mut whole = true;
        for buf in self.in_flight_bufs.drain(..) {
            match buf.try_into_mut() {
                Ok(buf) => self.write_bufs.push(buf),
                Err(_) => whole = false,
            }
        }
        if !whole {
            self.fill();
        }
    }
}
