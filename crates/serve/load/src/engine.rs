//! One job on one core: operations kept in flight, counted, checked.
//!
//! As many tasks as `iodepth` says take operations from the one [`Pattern`], one after the other. Each has its memory from the
//! beginning: what is written is filled in place, in buffers that come back; nothing is allocated for an operation here.
//!
//! Operations of a job that overlap, of which one changes something, do not run at once: `block` forbids it, and what
//! a verifying job found would depend on who came first. The later one waits, with its place in the order. The map of random
//! jobs makes this rare; it is looked for in jobs that change something. Jobs on the same range know nothing of each other: they
//! have connections or openings of their own, as in fio.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{Bufs, Class, Ctx, Dev, Epoch, Error, Lba, Op};
use rt::Core;
use rt::buf::{Buf, BufMut};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep_until};

use crate::chance::Dice;
use crate::job::Dir;
use crate::measured::{Failed, Measured};
use crate::pattern::{Io, Pattern};
use crate::spec::Spec;
use crate::verify::Blocks;

/// Operations that a task does until it lets others have the core: what never waits would keep it for ever.
const TURN: u32 = 64;

/// What a job shows while it runs, to other threads. One job writes, anybody reads.
#[derive(Debug, Default)]
pub struct Progress {
    ops: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
    verified: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// Asks the job to end now: what is in flight is awaited.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Operations and bytes of one direction so far, those of the ramp included.
    #[must_use]
    pub fn of(&self, dir: Dir) -> (u64, u64) {
        let n = dir.index();
        (self.ops[n].load(Ordering::Relaxed), self.bytes[n].load(Ordering::Relaxed))
    }

    /// Blocks that were checked at the end so far.
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

/// A job that is ready.
pub struct Runner {
    shared: Rc<Shared>,
    memories: Vec<Memory>,
}

/// What the tasks of a job have in common.
struct Shared {
    dev: Dev,
    spec: Spec,
    block: u64,
    state: RefCell<State>,
    over: Cell<bool>,
    freed: Notify,
    progress: std::sync::Arc<Progress>,
}

struct State {
    pattern: Pattern,
    blocks: Option<Blocks>,
    /// First byte and end of what is in flight, and whether it changes; kept for jobs that change something.
    in_flight: Vec<(u64, u64, bool)>,
    measured: Measured,
    clock: Clock,
    /// When the next operation of each direction may begin, where that is limited.
    due: [Instant; 3],
    unflushed: u32,
    /// Where the next block to be read again is looked for.
    cursor: u64,
}

/// When what begins.
#[derive(Clone, Copy)]
struct Clock {
    counts_from: Instant,
    ends: Option<Instant>,
}

impl Clock {
    fn new(spec: &Spec) -> Self {
        let counts_from = Instant::now() + spec.ramp_time;
        Self { counts_from, ends: spec.runtime.map(|runtime| counts_from + runtime) }
    }
}

impl Runner {
    /// Gets ready: takes all memory that the job is going to use.
    ///
    /// # Errors
    /// What is missing, for people.
    pub async fn new(
        core: &Core,
        dev: Dev,
        spec: Spec,
        progress: std::sync::Arc<Progress>,
    ) -> Result<Self, String> {
        let info = dev.info();
        let account = core.pool().account();
        let bytes = usize::try_from(spec.memory_each(&info)).map_err(|e| e.to_string())?;
        let mut memories = Vec::new();
        for _ in 0..spec.iodepth {
            let credit = account.try_credit(bytes, Class::Immediate);
            let credit = credit.ok_or("the core has too little memory for iodepth and bs")?;
            memories.push(Memory::new(Ctx::new(credit, Epoch::default()), &spec));
        }
        let blocks = Blocks::new(&spec);
        let now = Instant::now();
        let state = State {
            pattern: Pattern::new(&spec),
            blocks,
            in_flight: Vec::with_capacity(spec.iodepth as usize),
            measured: Measured::default(),
            clock: Clock { counts_from: now, ends: None },
            due: [now; 3],
            unflushed: 0,
            cursor: spec.start,
        };
        let shared = Shared {
            block: u64::from(info.block_size),
            dev,
            spec,
            state: RefCell::new(state),
            over: Cell::new(false),
            freed: Notify::new(),
            progress,
        };
        Ok(Self { shared: Rc::new(shared), memories })
    }

    /// Does what the job says.
    pub async fn run(&mut self) {
        {
            let mut state = self.shared.state.borrow_mut();
            state.clock = Clock::new(&self.shared.spec);
            state.due = [Instant::now(); 3];
        }
        self.everybody(work).await;
        if self.shared.spec.end_fsync
            && let Some(memory) = self.memories.first()
            && self.shared.is_well()
        {
            self.shared.flush(&memory.ctx).await;
        }
    }

    /// Reads again what was written, if the job says so and has come that far.
    pub async fn verify(&mut self) {
        let wanted = self.shared.spec.do_verify && self.shared.spec.rw.write;
        let blocks = self.shared.state.borrow().blocks.is_some();
        if wanted && blocks && self.shared.is_well() {
            self.everybody(read_again).await;
        }
    }

    /// What was measured.
    #[must_use]
    pub fn finish(self) -> Measured {
        std::mem::take(&mut self.shared.state.borrow_mut().measured)
    }

    async fn everybody<F: Future<Output = Memory> + 'static>(
        &mut self,
        task: impl Fn(Rc<Shared>, Memory) -> F,
    ) {
        let tasks: Vec<JoinHandle<Memory>> = self
            .memories
            .drain(..)
            .map(|m| spawn_local(task(Rc::clone(&self.shared), m)))
            .collect();
        for task in tasks {
            match task.await {
                Ok(memory) => self.memories.push(memory),
                // A mistake of ours: nothing that was measured is to be believed.
                Err(e) => std::panic::resume_unwind(e.into_panic()),
            }
        }
    }
}

/// One of the operations in flight, over and over.
async fn work(shared: Rc<Shared>, mut memory: Memory) -> Memory {
    let (mut now, mut turn) = (Instant::now(), 0);
    while let Some(io) = shared.next(now) {
        if let Some(due) = shared.due(&io, now) {
            sleep_until(due).await;
        }
        while !shared.claim(&io) {
            shared.freed.notified().await;
        }
        let op = memory.prepare(&shared, &io);
        // Not when the last one had completed: what counting that took is ours, and no target's.
        let begun = Instant::now();
        let outcome = shared.dev.submit(op, &memory.ctx).await;
        now = Instant::now();
        let wants_flush = shared.complete(&io, (begun, now), outcome);
        memory.take_back();
        if wants_flush {
            shared.flush(&memory.ctx).await;
            now = Instant::now();
        }
        turn += 1;
        if turn == TURN {
            turn = 0;
            rt::give_way().await;
            now = Instant::now();
        }
    }
    memory
}

/// Reads what was written, block by block.
async fn read_again(shared: Rc<Shared>, memory: Memory) -> Memory {
    let mut turn = 0;
    while let Some(io) = shared.next_written() {
        let op = Op::Read { at: shared.lba(io.at), blocks: shared.count(io.len) };
        let outcome = shared.dev.submit(op, &memory.ctx).await;
        shared.found(&io, outcome);
        turn += 1;
        if turn % TURN == 0 {
            rt::give_way().await;
        }
    }
    memory
}

impl Shared {
    fn lba(&self, at: u64) -> Lba {
        Lba(at / self.block)
    }

    fn count(&self, len: u64) -> u32 {
        u32::try_from(len / self.block).unwrap_or(u32::MAX)
    }

    fn is_well(&self) -> bool {
        self.state.borrow().measured.failed.is_none()
    }

    /// The next operation, if there is one.
    fn next(&self, now: Instant) -> Option<Io> {
        if self.over.get() || self.progress.stop.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state.borrow_mut();
        if state.clock.ends.is_some_and(|ends| now >= ends) {
            self.over.set(true);
            return None;
        }
        state.pattern.next()
    }

    /// Until when an operation has to wait, where the rate is limited. Rates are kept over the whole run, as in fio: who was
    /// slow catches up.
    fn due(&self, io: &Io, now: Instant) -> Option<Instant> {
        let dir = io.dir.index();
        let (rate, rate_iops) = (self.spec.rate[dir], self.spec.rate_iops[dir]);
        if rate.is_none() && rate_iops.is_none() {
            return None;
        }
        let seconds = |part: u64, whole: Option<u64>| match whole {
            #[expect(clippy::cast_precision_loss, reason = "a pause, exact enough")]
            Some(whole) => Duration::from_secs_f64(part as f64 / whole as f64),
            None => Duration::ZERO,
        };
        let mut state = self.state.borrow_mut();
        let due = state.due[dir];
        state.due[dir] = due + seconds(io.len, rate).max(seconds(1, rate_iops));
        let due = state.clock.ends.map_or(due, |ends| due.min(ends));
        Some(due).filter(|due| *due > now)
    }

    /// Takes an operation's range, unless one in flight is in its way.
    fn claim(&self, io: &Io) -> bool {
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

    /// Counts what has been done. True if a flush is due.
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
            self.freed.notify_waiters();
        }
        let failed = outcome.is_err();
        self.judge(&mut state, io, outcome);
        if failed {
            return false;
        }
        self.progress.count(io);
        if now >= state.clock.counts_from {
            let counts_from = state.clock.counts_from;
            let measured = &mut state.measured;
            measured.elapsed = now - counts_from;
            let moved = &mut measured.moved[io.dir.index()];
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

    /// What an operation has brought: an error, or data that has to be what was written.
    fn judge(&self, state: &mut State, io: &Io, outcome: Result<Bufs, Error>) {
        let failed = match outcome {
            Err(error) => Failed::Operation { doing: io.dir.name(), at: io.at, error },
            Ok(data) if io.dir == Dir::Read => match &mut state.blocks {
                None => return,
                Some(blocks) => match blocks.check(io, &data) {
                    Ok(checked) => {
                        state.measured.verified += checked;
                        return;
                    }
                    Err(mismatch) => Failed::Mismatch(mismatch),
                },
            },
            Ok(_) => return,
        };
        self.fail(state, failed);
    }

    /// What was read again.
    fn found(&self, io: &Io, outcome: Result<Bufs, Error>) {
        let mut state = self.state.borrow_mut();
        self.judge(&mut state, io, outcome);
        self.progress.verified.store(state.measured.verified, Ordering::Relaxed);
    }

    fn fail(&self, state: &mut State, failed: Failed) {
        self.over.set(true);
        state.measured.failed.get_or_insert(failed);
    }

    async fn flush(&self, ctx: &Ctx) {
        let begun = Instant::now();
        let outcome = self.dev.submit(Op::Flush, ctx).await;
        let now = Instant::now();
        let mut state = self.state.borrow_mut();
        match outcome {
            Ok(_) if now >= state.clock.counts_from => {
                state.measured.flushes.record(now - begun);
            }
            Ok(_) => {}
            Err(error) => {
                self.fail(&mut state, Failed::Operation { doing: "flush", at: 0, error });
            }
        }
    }

    /// The next block to be read again.
    fn next_written(&self) -> Option<Io> {
        let mut state = self.state.borrow_mut();
        if state.measured.failed.is_some() || self.progress.stop.load(Ordering::Relaxed) {
            return None;
        }
        let (blocks, from) = (state.blocks.as_ref()?, state.cursor);
        let at = blocks.written_from(from)?;
        state.cursor = at + self.spec.unit;
        Some(Io { dir: Dir::Read, at, len: self.spec.unit })
    }
}

/// What one operation in flight has of memory.
struct Memory {
    ctx: Ctx,
    /// As long as the largest write, or nothing.
    out: Vec<BufMut>,
    /// The same while it is being written.
    lent: Vec<Buf>,
    largest: usize,
    count: u64,
}

impl Memory {
    fn new(ctx: Ctx, spec: &Spec) -> Self {
        let largest = if spec.rw.write { usize::try_from(spec.largest()).unwrap_or(0) } else { 0 };
        let mut memory = Self { ctx, out: Vec::new(), lent: Vec::new(), largest, count: 0 };
        memory.fill();
        memory
    }

    /// Takes memory for what is written, and fills it with what does not compress.
    fn fill(&mut self) {
        self.out.clear();
        if self.largest == 0 {
            return;
        }
        self.out.extend(self.ctx.alloc(self.largest));
        let mut dice = Dice::new(self.out.as_ptr().addr() as u64);
        self.out.iter_mut().for_each(|piece| dice.fill(piece));
    }

    /// The operation, its data made.
    fn prepare(&mut self, shared: &Shared, io: &Io) -> Op {
        let (at, blocks) = (shared.lba(io.at), shared.count(io.len));
        match io.dir {
            Dir::Read => Op::Read { at, blocks },
            Dir::Trim => Op::Unmap { at, blocks },
            Dir::Write => {
                let mut state = shared.state.borrow_mut();
                match &mut state.blocks {
                    Some(verified) => verified.write(io, &mut self.out),
                    None => self.scramble(io),
                }
                drop(state);
                self.lent.extend(self.out.drain(..).map(BufMut::freeze));
                let all: Bufs = self.lent.iter().cloned().collect();
                let len = usize::try_from(io.len).unwrap_or(usize::MAX);
                Op::Write {
                    at,
                    data: if all.len() == len { all } else { all.slice(0..len) },
                    fua: false,
                }
            }
        }
    }

    /// Makes each sector other than all before it: what finds copies finds none.
    fn scramble(&mut self, io: &Io) {
        self.count += 1;
        let mark = (io.at ^ self.count.rotate_left(40)).to_le_bytes();
        let mut left = usize::try_from(io.len).unwrap_or(usize::MAX);
        for piece in &mut self.out {
            let used = left.min(piece.len());
            for sector in piece[..used].chunks_mut(512) {
                sector[..8].copy_from_slice(&mark);
            }
            left -= used;
        }
    }

    /// After a write, its memory comes back; what somebody still holds is replaced.
    fn take_back(&mut self) {
        if self.lent.is_empty() {
            return;
        }
        let mut whole = true;
        for buf in self.lent.drain(..) {
            match buf.try_into_mut() {
                Ok(buf) => self.out.push(buf),
                Err(_) => whole = false,
            }
        }
        if !whole {
            self.fill();
        }
    }
}
