//! How members answer: who lags far behind the others, so that reads go around him, and who is given up.
//!
//! A member is compared with the others, and time is what a task here has seen pass, tick by tick. It counts against a member only
//! while half of the others answer: where a whole machine stood still, or its controller, nobody has lagged.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use block::{Bufs, Ctx, Dev, Error, Lba, Op, Submission};
use futures_util::FutureExt;
use slab::Slab;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::array::{Keeper, bit};
use super::marks::Bits;

/// The unit of time here. What disks that are well take is less, so it is not measured: of what takes a tenth of a tick one in
/// ten ends with the next, and the mean is right.
const TICK: Duration = Duration::from_millis(10);

/// A member whose answer takes so many times what the others usually take lags,
const FACTOR: u64 = 8;

/// but not before so many ticks: 50 ms,
const LEAST: u64 = 5;

/// and in any case after so many: 1 s.
const MOST: u64 = 100;

/// So many reads that lag, none of them longer than [`HICCUP`] behind the one before, make a member slow.
const LATE_READS: u32 = 3;
const HICCUP: u64 = 1000;

/// How long one that was slow has to answer in time until it is read again, in ticks: 5 s, and twice as long each time that it is
/// slow again soon, up to 160 s; and so many answers.
const REST: u64 = 500;
const MOST_RESTS: u32 = 5;
const IN_TIME: u32 = 4;

/// How often one that is slow is asked, in ticks: each second.
const PROBE: u64 = 100;

/// A member that leaves something unanswered for so many ticks, while others answer, is out: 10 s.
pub(super) const GIVE_UP: u64 = 1000;

/// How long before the keeper is asked again whether the level bears that: 5 s.
const ASK_AGAIN: u64 = 500;

/// Somebody answers who has done so within so many ticks, and twice what he usually takes. It is less than what is called late, so
/// that nobody is late where all have stopped. While another waits, those who have nothing to do are asked for something.
const ANSWERING: u64 = 2;

/// The watch ends so many ticks after the last operation.
const LINGER: u32 = 100;

/// Errors of a member, and how it answers, as all cores have counted together.
#[derive(Debug, Default)]
pub struct Errors {
    /// Reads that failed.
    pub reads: AtomicU64,
    /// Writes and flushes that failed.
    pub writes: AtomicU64,
    /// Rows that were wrong or could not be read, and were written again.
    pub repaired: AtomicU64,
    /// Rows that could not be read, and were given up as lost.
    pub unrepairable: AtomicU64,
    /// Reads that others have answered, as this one lagged.
    pub slow_reads: AtomicU64,
    /// How often it became slow.
    pub slow_times: AtomicU64,
    /// For how many cores it is slow now.
    pub slow_now: AtomicU64,
    /// Operations that nobody waits for any more and that have not ended.
    pub astray: AtomicU64,
    /// Whether something has been written to it since that was last asked.
    pub written: AtomicBool,
    /// Reads that gave what was not written, where there are checksums, and batches of the parity log that are not given back.
    pub checksums: Arc<AtomicU64>,
}

/// Ticks, for all members of an array.
#[derive(Debug, Default)]
struct Clock {
    now: Cell<u64>,
    /// Whether somebody counts them.
    runs: Cell<bool>,
}

/// All members of an array.
#[derive(Debug)]
pub(super) struct Watch {
    clock: Rc<Clock>,
    members: RefCell<Vec<Option<Rc<Watched>>>>,
    keeper: Rc<dyn Keeper>,
    /// Those that are slow, a bit for each.
    slow: Rc<Cell<Bits>>,
    /// What counts the memory of the array.
    room: Arc<Semaphore>,
    scratch: Ctx,
}

/// A member's disk.
pub(super) struct Watched {
    number: u16,
    dev: Dev,
    /// A block of it that there is.
    some_block: Lba,
    pub(super) errors: Arc<Errors>,
    watch: Weak<Watch>,
    clock: Rc<Clock>,
    room: Arc<Semaphore>,
    all_slow: Rc<Cell<Bits>>,
    flights: RefCell<Slab<Flight>>,
    /// Ticks in which the others answered.
    compared: Cell<u64>,
    /// When it answered last.
    answered: Cell<u64>,
    /// What it usually takes for something, in ticks times 256.
    usual: Cell<u64>,
    late: Cell<Late>,
    is_out: Cell<bool>,
    /// Nothing is waited for any more.
    is_given_up: Cell<bool>,
    /// When the keeper may be asked whether that may be.
    asks_at: Cell<u64>,
    /// When it may be asked for something that nobody needs.
    probes_at: Cell<u64>,
}

/// How far behind a member is.
#[derive(Clone, Copy, Debug, Default)]
struct Late {
    is_slow: bool,
    /// Reads that lagged, and when the last one did.
    reads: u32,
    last: u64,
    /// Answers in time since.
    in_time: u32,
    /// How often it was slow, one soon after the other.
    times: u32,
}

/// An operation in flight.
#[derive(Debug)]
struct Flight {
    kind: Kind,
    begun: u64,
    /// What [`Watched::compared`] was.
    compared: u64,
    is_late: bool,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    /// Takes as long as it takes, up to [`GIVE_UP`].
    Flush,
}

/// An operation of a member's disk, to be polled to its end, or [let go](Self::let_go). It fails when the member is given up.
pub(super) struct Flying {
    member: Rc<Watched>,
    /// None when it has ended, or has gone astray.
    submission: Option<Submission>,
    kind: Kind,
    key: Option<usize>,
    /// Pages of the array's memory that it has.
    pages: u32,
    is_stray: bool,
}

/// An answer lags far behind those of others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lags;

impl Watch {
    pub(super) fn new(keeper: Rc<dyn Keeper>, room: Arc<Semaphore>, scratch: Ctx) -> Rc<Self> {
        Rc::new(Self {
            clock: Rc::default(),
            members: RefCell::default(),
            keeper,
            slow: Rc::default(),
            room,
            scratch,
        })
    }

    /// Those that are slow, a bit for each.
    pub(super) fn slow(&self) -> Bits {
        self.slow.get()
    }

    /// The member of this number, in the place of another that had it.
    pub(super) fn put(
        self: &Rc<Self>,
        number: u16,
        (dev, some_block): (Dev, Lba),
        errors: Arc<Errors>,
    ) -> Rc<Watched> {
        let member = Rc::new(Watched {
            number,
            dev,
            some_block,
            errors,
            watch: Rc::downgrade(self),
            clock: Rc::clone(&self.clock),
            room: Arc::clone(&self.room),
            all_slow: Rc::clone(&self.slow),
            flights: RefCell::default(),
            compared: Cell::new(0),
            answered: Cell::new(self.clock.now.get()),
            usual: Cell::new(0),
            late: Cell::default(),
            is_out: Cell::new(false),
            is_given_up: Cell::new(false),
            asks_at: Cell::new(0),
            probes_at: Cell::new(0),
        });
        let mut all = self.members.borrow_mut();
        let count = all.len().max(usize::from(number) + 1);
        all.resize_with(count, || None);
        if let Some(before) = all[usize::from(number)].replace(Rc::clone(&member)) {
            before.goes();
        }
        member
    }

    fn run(self: &Rc<Self>) {
        if self.clock.runs.replace(true) {
            return;
        }
        // Who answered before nobody counted may have stopped long since.
        self.clock.now.set(self.clock.now.get() + MOST);
        let weak = Rc::downgrade(self);
        tokio::task::spawn_local(async move {
            let mut idle = 0;
            while idle < LINGER {
                // However long it has really been: if all of the process stood still, it is one tick.
                tokio::time::sleep(TICK).await;
                let Some(watch) = weak.upgrade() else { return };
                idle = if watch.tick() { 0 } else { idle + 1 };
                if idle == LINGER {
                    watch.clock.runs.set(false);
                }
            }
        });
    }

    /// A tick has passed. Whether there is anything to be watched.
    fn tick(self: &Rc<Self>) -> bool {
        let now = self.clock.now.get() + 1;
        self.clock.now.set(now);
        let all: Vec<Rc<Watched>> = self.members.borrow().iter().flatten().cloned().collect();
        let there = || all.iter().filter(|member| !member.is_out.get());
        let (count, answer) = (there().count(), there().filter(|m| m.answers(now)).count());
        let bounds = Bounds::of(there());
        let (mut is_busy, mut lags) = (false, 0);
        for member in all.iter().filter(|member| !member.is_given_up.get()) {
            let (is_in, answers) = (!member.is_out.get(), member.answers(now));
            let others = count - usize::from(is_in);
            let answering = answer - usize::from(is_in && answers);
            // With half of the others it is the member that lags, else whatever they have in common.
            if others > 0 && answering * 2 >= others {
                member.compared.set(member.compared.get() + 1);
            }
            let found = member.look(now, bounds.without(member));
            is_busy |= found.in_flight;
            lags |= if is_in && found.waits_long { bit(member.number) } else { 0 };
            member.judge(now, &found, &*self.keeper);
        }
        if lags != 0 {
            let others = there().filter(|member| lags & !bit(member.number) != 0);
            others.for_each(|member| member.ask_idle(now, &self.scratch));
        }
        self.give_up(now, &all);
        // Who is slow is asked now and then, and is not slow for ever.
        is_busy || self.slow.get() != 0
    }

    /// Gives up members that leave something unanswered for too long, as far as that may be.
    fn give_up(self: &Rc<Self>, now: u64, all: &[Rc<Watched>]) {
        let silent = |member: &&Rc<Watched>| !member.is_out.get() && member.age() >= MOST;
        let all_silent = all.iter().filter(silent).fold(0, |bits, m| bits | bit(m.number));
        for member in all.iter().filter(|member| !member.is_given_up.get()) {
            if member.is_out.get() {
                // Of those all know already.
                if member.raw_age(now) >= GIVE_UP {
                    member.give_up();
                }
            } else if member.age() >= GIVE_UP && now >= member.asks_at.get() {
                member.asks_at.set(u64::MAX);
                let (watch, member) = (Rc::clone(self), Rc::clone(member));
                tokio::task::spawn_local(async move { watch.ask(&member, all_silent).await });
            }
        }
    }

    async fn ask(&self, member: &Watched, silent: Bits) {
        let number = member.number;
        let answers = async {
            while member.age() >= MOST {
                tokio::time::sleep(TICK).await;
            }
            Ok(false)
        };
        // One that answers before it is given up is not.
        let given_up = tokio::select! {
            biased;
            given_up = self.keeper.gives_up(number, silent) => given_up,
            given_up = answers => given_up,
        };
        match given_up {
            Ok(true) => member.give_up(),
            Ok(false) => member.asks_at.set(self.clock.now.get() + ASK_AGAIN),
            Err(error) => {
                tracing::warn!(member = number, %error, "a disk that does not answer cannot be put out");
                member.asks_at.set(self.clock.now.get() + ASK_AGAIN);
            }
        }
    }
}

/// What is usual, of all members that are not slow, in ticks times 256.
struct Bounds {
    sum: u64,
    count: u64,
}

impl Bounds {
    fn of<'a>(members: impl Iterator<Item = &'a Rc<Watched>>) -> Self {
        let well = members.filter(|member| !member.late.get().is_slow);
        let (sum, count) = well.fold((0, 0), |(sum, n), member| (sum + member.usual.get(), n + 1));
        Self { sum, count }
    }

    /// How long is far behind the others than `member`, in ticks.
    fn without(&self, member: &Watched) -> u64 {
        let is_in = !member.is_out.get() && !member.late.get().is_slow;
        let count = self.count - u64::from(is_in);
        let sum = if is_in { self.sum - member.usual.get() } else { self.sum };
        (sum * FACTOR / count.max(1) / 256).clamp(LEAST, MOST)
    }
}

/// What a member has in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    in_flight: bool,
    /// Something may lag soon.
    waits_long: bool,
    /// Reads that lag since this tick, and whether any does.
    new: u32,
    lags: bool,
    /// Something has been unanswered for a second.
    is_silent: bool,
}

impl Watched {
    /// The disk.
    pub(super) fn dev(&self) -> &Dev {
        &self.dev
    }

    /// Whether something is under way to it, for whomever.
    pub(super) fn is_busy(&self) -> bool {
        self.dev.stats().in_flight > 0
    }

    /// It is out, or not any more.
    pub(super) fn set_out(&self, is_out: bool) {
        self.is_out.set(is_out);
        if is_out {
            self.goes();
        }
    }

    /// Nobody asks any more whether it is slow.
    fn goes(&self) {
        let late = self.late.take();
        if late.is_slow {
            self.errors.slow_now.fetch_sub(1, Ordering::Relaxed);
            self.all_slow.set(self.all_slow.get() & !bit(self.number));
        }
    }

    fn answers(&self, now: u64) -> bool {
        now - self.answered.get() <= ANSWERING + 2 * self.usual.get() / 256
    }

    /// Looks through what is in flight, and tells reads that lag.
    fn look(&self, now: u64, bound: u64) -> Found {
        let (mut found, compared) = (Found::default(), self.compared.get());
        for (_, flight) in &mut *self.flights.borrow_mut() {
            let age = compared - flight.compared;
            found.in_flight = true;
            found.waits_long |= now - flight.begun > LEAST / 2;
            found.is_silent |= flight.kind != Kind::Flush && age >= MOST;
            if flight.kind == Kind::Read && age >= bound {
                found.lags = true;
                if !flight.is_late {
                    flight.is_late = true;
                    found.new += 1;
                    flight.waker.take().into_iter().for_each(Waker::wake);
                }
            }
        }
        found
    }

    /// Whether it is slow now.
    fn judge(&self, now: u64, found: &Found, keeper: &dyn Keeper) {
        let mut late = self.late.get();
        if self.is_out.get() {
            return;
        }
        if found.new > 0 {
            let goes_on = now - late.last <= HICCUP;
            late.reads = if goes_on { late.reads } else { 0 } + found.new;
        }
        if found.lags || found.is_silent {
            (late.last, late.in_time) = (now, 0);
        }
        let rest = REST << (late.times.clamp(1, MOST_RESTS + 1) - 1);
        if !late.is_slow && (late.reads >= LATE_READS || found.is_silent) {
            (late.is_slow, late.times) = (true, late.times.saturating_add(1));
            self.turn(true, keeper);
        } else if late.is_slow && now - late.last >= rest && late.in_time >= IN_TIME {
            (late.is_slow, late.reads) = (false, 0);
            self.turn(false, keeper);
        } else if !late.is_slow && late.times > 0 && now - late.last > rest * 4 {
            late.times = 0;
        }
        self.late.set(late);
    }

    fn turn(&self, is_slow: bool, keeper: &dyn Keeper) {
        let bits = self.all_slow.get();
        if is_slow {
            self.all_slow.set(bits | bit(self.number));
            self.errors.slow_times.fetch_add(1, Ordering::Relaxed);
            self.errors.slow_now.fetch_add(1, Ordering::Relaxed);
        } else {
            self.all_slow.set(bits & !bit(self.number));
            self.errors.slow_now.fetch_sub(1, Ordering::Relaxed);
        }
        keeper.slow(self.number, is_slow);
    }

    /// Whether it is time that somebody reads from it though it is slow, to see whether it still is. Says so once.
    pub(super) fn is_to_be_asked(&self) -> bool {
        let now = self.clock.now.get();
        let is_time = now >= self.probes_at.get() && self.flights.borrow().is_empty();
        if is_time {
            self.probes_at.set(now + PROBE);
        }
        is_time
    }

    /// For how long it has left something unanswered while others answered, in ticks.
    fn age(&self) -> u64 {
        let oldest = self.flights.borrow().iter().map(|(_, flight)| flight.compared).min();
        oldest.map_or(0, |oldest| self.compared.get() - oldest)
    }

    fn raw_age(&self, now: u64) -> u64 {
        self.flights.borrow().iter().map(|(_, flight)| now - flight.begun).max().unwrap_or(0)
    }

    /// Has one that does nothing show that it would.
    fn ask_idle(self: &Rc<Self>, now: u64, ctx: &Ctx) {
        if now - self.answered.get() < ANSWERING || self.is_busy() {
            return;
        }
        // What it says is not looked at: the block may be written meanwhile.
        if let Ok(flying) = self.begin(Op::Read { at: self.some_block, blocks: 1 }, ctx, 0) {
            flying.apart();
        }
    }

    /// Nothing is waited for any more.
    fn give_up(&self) {
        self.is_given_up.set(true);
        let mut flights = self.flights.borrow_mut();
        flights.iter_mut().filter_map(|(_, flight)| flight.waker.take()).for_each(Waker::wake);
    }

    /// Begins an operation, which has so many pages of the array's memory.
    pub(super) fn begin(self: &Rc<Self>, op: Op, ctx: &Ctx, pages: u32) -> Result<Flying, Error> {
        if self.is_given_up.get() {
            return Err(Error::Gone);
        }
        let kind = match op {
            Op::Read { .. } => Kind::Read,
            Op::Flush => Kind::Flush,
            _ => Kind::Write,
        };
        let submission = Some(self.dev.start(op, ctx)?);
        Ok(Flying { member: Rc::clone(self), submission, kind, key: None, pages, is_stray: false })
    }

    /// Does an operation, unless it is given up.
    pub(super) async fn submit(self: &Rc<Self>, op: Op, ctx: &Ctx) -> Result<Bufs, Error> {
        self.begin(op, ctx, 0)?.await
    }

    /// An operation is still in flight when it was polled.
    fn wait(&self, kind: Kind, key: Option<usize>, cx: &Context<'_>) -> usize {
        let mut flights = self.flights.borrow_mut();
        if let Some(key) = key {
            let waker = &mut flights[key].waker;
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            return key;
        }
        if !self.clock.runs.get() {
            self.watch.upgrade().into_iter().for_each(|watch| watch.run());
        }
        let (begun, compared) = (self.clock.now.get(), self.compared.get());
        let waker = Some(cx.waker().clone());
        flights.insert(Flight { kind, begun, compared, is_late: false, waker })
    }

    /// An operation has ended that was in flight when it was polled, or not.
    fn ended(&self, kind: Kind, flight: Option<Flight>, is_answer: bool) {
        let now = self.clock.now.get();
        if is_answer {
            self.answered.set(now);
        }
        // Nobody but who asks sets it back: mostly it is only read.
        if kind == Kind::Write && !self.errors.written.load(Ordering::Relaxed) {
            self.errors.written.store(true, Ordering::Relaxed);
        }
        if kind != Kind::Flush && is_answer {
            let took = flight.as_ref().map_or(0, |flight| now - flight.begun).min(MOST) * 256;
            let usual = self.usual.get();
            self.usual.set((usual * 15 + took) / 16);
            let mut late = self.late.get();
            if late.is_slow {
                let is_late = flight.is_some_and(|flight| flight.is_late);
                late.in_time = if is_late { 0 } else { late.in_time + 1 };
                self.late.set(late);
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.goes();
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("number", &self.number).field("dev", &self.dev).finish()
    }
}

impl Flying {
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bufs, Error>> {
        let Some(submission) = &mut self.submission else { return Poll::Ready(Err(Error::Gone)) };
        if let Poll::Ready(answer) = Pin::new(submission).poll(cx) {
            self.submission = None;
            let flight = self.land();
            self.member.ended(self.kind, flight, answer.is_ok());
            return Poll::Ready(answer);
        }
        if self.member.is_given_up.get() && !self.is_stray {
            self.astray().apart();
            return Poll::Ready(Err(Error::Gone));
        }
        self.key = Some(self.member.wait(self.kind, self.key, cx));
        Poll::Pending
    }

    fn land(&mut self) -> Option<Flight> {
        self.key.take().map(|key| self.member.flights.borrow_mut().remove(key))
    }

    /// What it comes to, unless that lags; then it is still to be polled.
    pub(super) async fn in_time(&mut self) -> Result<Result<Bufs, Error>, Lags> {
        poll_fn(|cx| {
            if let Poll::Ready(answer) = self.poll_answer(cx) {
                return Poll::Ready(Ok(answer));
            }
            match self.key.is_some_and(|key| self.member.flights.borrow()[key].is_late) {
                true => Poll::Ready(Err(Lags)),
                false => Poll::Pending,
            }
        })
        .await
    }

    /// Nobody waits for it any more. It goes on, with what memory it has.
    pub(super) fn let_go(&mut self) {
        self.astray().apart();
    }

    fn astray(&mut self) -> Self {
        let (submission, key) = (self.submission.take(), self.key.take());
        Self { member: Rc::clone(&self.member), submission, key, is_stray: true, ..*self }
    }

    /// Goes on by itself. Whoever asked may look what comes of it, or not; in that case its range may be written meanwhile.
    pub(super) fn apart(mut self) -> tokio::task::JoinHandle<Result<Bufs, Error>> {
        self.submission.iter_mut().for_each(Submission::forsake);
        let stray = Stray::new(&self);
        tokio::task::spawn_local(async move {
            let _stray = stray;
            self.await
        })
    }
}

impl Future for Flying {
    type Output = Result<Bufs, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_answer(cx)
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        self.land();
    }
}

impl fmt::Debug for Flying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flying").field("member", &self.member).finish_non_exhaustive()
    }
}

/// What an operation takes along that nobody waits for.
struct Stray {
    errors: Arc<Errors>,
    /// Its place among those who wait for memory of the array, or what it has got: whoever began it gives his back.
    _room: Option<Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>>>>>,
}

impl Stray {
    fn new(flying: &Flying) -> Self {
        let errors = Arc::clone(&flying.member.errors);
        errors.astray.fetch_add(1, Ordering::Relaxed);
        let (room, pages) = (Arc::clone(&flying.member.room), flying.pages);
        let mut room: Option<Pin<Box<dyn Future<Output = _>>>> = (pages > 0).then(|| {
            let held = room.acquire_many_owned(pages).map(Result::ok);
            Box::pin(held) as Pin<Box<dyn Future<Output = _>>>
        });
        if let Some(held) = &mut room {
            // It is the next one from now on.
            let _ = held.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        Self { errors, _room: room }
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        self.errors.astray.fetch_sub(1, Ordering::Relaxed);
    }
}
