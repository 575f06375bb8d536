//! Acceptance, admission and the end of commands.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{
    Account, Blocks, Bufs, Changes, Class, CompareAndWrite, Ctx, Dev, Epoch, Error, Failure,
    FlushGate, Info, Op, RangeLocks, Request, Submission,
};
use tokio::time::Instant;

use crate::command::Command;
use crate::gate::{Caller, Flight, Gate, Need};
use crate::reservations::Keeping;
use crate::stats::{Counters, Measure, Snapshot};

/// Longest read or write that begins where it is accepted, in bytes. Whatever takes longer must be a
/// task: the other tasks of the core wait for the one that accepts.
const SHORT_BYTES: u64 = 64 * 1024;

/// One volume on its core.
pub struct Volume {
    pub(crate) dev: Dev,
    /// Does COMPARE AND WRITE where holding a range is not enough.
    pub(crate) compares: Option<Rc<dyn CompareAndWrite>>,
    pub(crate) locks: Rc<RangeLocks>,
    pub(crate) flushes: FlushGate,
    pub(crate) counters: Counters,
    /// Its reservations, if it keeps any.
    pub(crate) keeping: OnceCell<Keeping>,
    epoch: Epoch,
    closed: Cell<bool>,
    /// Commands that have been accepted and wait for the first turn of their task.
    unbegun: Cell<usize>,
    idle: RefCell<Vec<Waker>>,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("dev", &self.dev).field("epoch", &self.epoch).finish()
    }
}

impl Volume {
    /// The owner of `dev`.
    #[must_use]
    pub fn new(dev: Dev, epoch: Epoch) -> Rc<Self> {
        Self::make(dev, None, epoch)
    }

    /// The owner, on this node, of a device that other nodes use as well.
    #[must_use]
    pub fn shared(dev: Dev, compares: Rc<dyn CompareAndWrite>, epoch: Epoch) -> Rc<Self> {
        Self::make(dev, Some(compares), epoch)
    }

    fn make(dev: Dev, compares: Option<Rc<dyn CompareAndWrite>>, epoch: Epoch) -> Rc<Self> {
        Rc::new(Self {
            dev,
            compares,
            locks: Rc::default(),
            flushes: FlushGate::default(),
            counters: Counters::default(),
            keeping: OnceCell::new(),
            epoch,
            closed: Cell::new(false),
            unbegun: Cell::new(0),
            idle: RefCell::default(),
        })
    }

    /// What the device below is now.
    #[must_use]
    pub fn info(&self) -> Info {
        self.dev.info()
    }

    /// What is changed of it, whoever changes it, on this node or another one: by the time that a change is known to
    /// have happened, its watchers here have seen it.
    #[must_use]
    pub fn changes(&self) -> Changes {
        self.compares.as_ref().map_or_else(|| self.dev.changes(), |shared| shared.changes())
    }

    /// What the volume has done.
    #[must_use]
    pub fn stats(&self) -> Snapshot {
        self.counters.snapshot()
    }

    /// [`Self::start_for`] the node itself, which no reservation binds.
    pub fn start<D>(self: &Rc<Self>, request: Request, account: &Account, done: D) -> Command
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        self.start_for(&Gate::node(), request, account, done)
    }

    /// Accepts `request` of a caller: from here on the volume owns it, and answers through `done` exactly
    /// once. Memory beyond the request's own data is charged to `account`.
    ///
    /// Must be called in a `LocalSet`. A short read or write that need not wait for anything has
    /// been answered when this returns.
    pub fn start_for<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        request: Request,
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let class = class_for(&request);
        self.start_with(caller, (request, class), account, done)
    }

    /// [`Self::start_for`] callers who go on with an answer at once if there is one: `done` is told of nothing then.
    pub fn begin_for<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        request: Request,
        account: &Account,
        done: D,
    ) -> Begun
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let class = class_for(&request);
        match self.accept(caller, (request, class), account, done) {
            Ok(command) => Begun::Runs(command),
            Err((result, _)) => Begun::Answered(result),
        }
    }

    fn start_with<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        what: (Request, Class),
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        match self.accept(caller, what, account, done) {
            Ok(command) => command,
            Err((result, done)) => {
                done(result);
                Command::default()
            }
        }
    }

    /// The command that the request has become; or its answer, with who has not been told of it.
    fn accept<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        (request, class): (Request, Class),
        account: &Account,
        done: D,
    ) -> Result<Command, (Result<Bufs, Failure>, D)>
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let info = self.info();
        let measure = Measure::of(&request, info.block_size);
        let entered = short(&request, &measure, info.block_size)
            .and_then(|range| self.enter(caller, (&request, class), range, &info, account));
        match (entered, request) {
            (Some(entered), Request::Read { range }) => {
                let blocks = u32::try_from(range.count).expect("it is short");
                self.carry(Op::Read { at: range.at, blocks }, entered, measure, done)
            }
            (Some(entered), Request::Write { at, data, fua }) => {
                self.carry(Op::Write { at, data, fua }, entered, measure, done)
            }
            (_, request) => Ok(self.queue(caller, (request, class), measure, account, done)),
        }
    }

    /// Lets a request in that need not wait for anything: neither for those that came before it, nor for its turn at the
    /// range, nor for memory, nor for what its caller may do.
    fn enter(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        (request, class): (&Request, Class),
        range: Blocks,
        info: &Info,
        account: &Account,
    ) -> Option<Entered> {
        let writes = matches!(request, Request::Write { .. });
        let begins = !self.closed.get() && self.unbegun.get() == 0;
        if !begins || self.check(request, info).is_err() || !self.locks.is_open(range, writes) {
            return None;
        }
        let (command, flight) = match self.keeping.get() {
            None => (None, None),
            Some(keeping) => {
                let command = Command::default();
                let flight = caller.begins(Need::of(request), &command);
                keeping.gate.admits(&flight).then_some((Some(command), Some(flight)))?
            }
        };
        let credit = account.try_credit(self.memory_for(request, info), class)?;
        let ctx = Ctx::new(credit, self.epoch);
        Some(Entered { range, ctx, flight, command })
    }

    /// Carries a request out that was let in: to its end where memory answers, which saves it a task. Nobody is woken
    /// for it: the task that goes on with it looks again first.
    fn carry<D>(
        self: &Rc<Self>,
        op: Op,
        entered: Entered,
        measure: Measure,
        done: D,
    ) -> Result<Command, (Result<Bufs, Failure>, D)>
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let Entered { range, ctx, flight, command } = entered;
        let (since, writes) = (Instant::now(), op.writes());
        let running = match begin(&self.dev, op, &ctx) {
            Ok(running) => running,
            Err(result) => {
                drop((flight, ctx));
                let result = result.map_err(Failure::Device);
                return Err((self.ended(command.as_ref(), measure, since, result), done));
            }
        };
        // Nobody has been here since it was seen to be open.
        let lock = self.locks.enter(range, writes);
        let command = command.unwrap_or_default();
        command.set_ctx(&ctx);
        let accepted = self.accepted(&command, done);
        tokio::task::spawn_local(async move {
            let result = running.await;
            drop((lock, flight, ctx));
            accepted.ends(measure, since, result.map_err(Failure::Device));
        });
        Ok(command)
    }

    /// Has a task carry a request out, behind all that came before it.
    fn queue<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        what: (Request, Class),
        measure: Measure,
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let command = Command::default();
        let accepted = self.accepted(&command, done);
        let account = account.clone();
        let flight = caller.begins(Need::of(&what.0), &command);
        self.unbegun.update(|n| n + 1);
        // In a box, for a future of more than a kilobyte is otherwise moved six times before it runs.
        let running = Box::pin(async move {
            let since = Instant::now();
            let Accepted { volume, command, .. } = &accepted;
            volume.unbegun.update(|n| n - 1);
            let result = volume.run(what, &account, &flight, command).await;
            drop((account, flight));
            accepted.ends(measure, since, result);
        });
        tokio::task::spawn_local(running);
        command
    }

    fn accepted<D>(self: &Rc<Self>, command: &Command, done: D) -> Accepted<D>
    where
        D: FnOnce(Result<Bufs, Failure>),
    {
        self.counters.update(|s| s.in_flight += 1);
        Accepted { volume: Rc::clone(self), command: command.clone(), done: Some(done) }
    }

    /// Counts a command that began at `since` and has ended so; what its caller is told.
    fn ended(
        &self,
        command: Option<&Command>,
        measure: Measure,
        since: Instant,
        result: Result<Bufs, Failure>,
    ) -> Result<Bufs, Failure> {
        let aborted = command.filter(|command| command.is_aborted());
        if aborted.is_some() {
            self.counters.update(|s| s.aborts += 1);
        }
        let revoked = aborted.is_some_and(Command::is_revoked);
        let result = match result {
            Err(Failure::Device(Error::Aborted)) if revoked => Err(Failure::Conflict),
            result => result,
        };
        self.counters.completed(measure, result.as_ref().err().copied(), since.elapsed());
        result
    }

    /// [`Self::start`] for callers that wait: runs to its end even if this future is dropped.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn execute(
        self: &Rc<Self>,
        request: Request,
        account: &Account,
    ) -> Result<Bufs, Failure> {
        self.execute_for(&Gate::node(), request, account).await
    }

    /// [`Self::execute`] for a part of something whose caller holds memory already, of class [`Class::Read`] say: it must
    /// not wait for more of that, which may be held by others who wait likewise. Its answer is to be let go of before
    /// anything else is waited for.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn execute_within(
        self: &Rc<Self>,
        request: Request,
        account: &Account,
    ) -> Result<Bufs, Failure> {
        self.execute_with(&Gate::node(), (request, Class::Command), account).await
    }

    /// [`Self::start_for`] for callers that wait: runs to its end even if this future is dropped.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn execute_for(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        request: Request,
        account: &Account,
    ) -> Result<Bufs, Failure> {
        let class = class_for(&request);
        self.execute_with(caller, (request, class), account).await
    }

    async fn execute_with(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        what: (Request, Class),
        account: &Account,
    ) -> Result<Bufs, Failure> {
        let (answer, result) = tokio::sync::oneshot::channel();
        self.start_with(caller, what, account, move |r| {
            // Nobody waits any more: the command was carried out all the same.
            let _ = answer.send(r);
        });
        result.await.unwrap_or(Err(Failure::Device(Error::Gone)))
    }

    /// Refuses new commands with [`Error::Gone`], waits for those in flight and makes their
    /// writes durable.
    ///
    /// # Errors
    /// What the last flush reports.
    pub async fn close(self: &Rc<Self>, account: &Account) -> Result<(), Failure> {
        self.closed.set(true);
        poll_fn(|cx| {
            if self.counters.in_flight() == 0 {
                return Poll::Ready(());
            }
            self.idle.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        if self.info().read_only {
            return Ok(());
        }
        let overhead = self.info().overhead as usize;
        let credit = account
            .credit(overhead.max(1), Class::Command)
            .await
            .map_err(|_| Failure::Device(Error::Gone))?;
        let ctx = Ctx::new(credit, self.epoch);
        self.dev.submit(Op::Flush, &ctx).await.map_err(Failure::Device)?;
        Ok(())
    }

    /// What is rare is in a box, so that the future of a plain read or write, which is moved and
    /// allocated once per command, stays small.
    async fn run(
        &self,
        (request, class): (Request, Class),
        account: &Account,
        flight: &Flight,
        command: &Command,
    ) -> Result<Bufs, Failure> {
        if self.closed.get() {
            return Err(Error::Gone.into());
        }
        self.check(&request, &self.info())?;
        if let Some(keeping) = self.keeping.get() {
            keeping.gate.admit(flight, command).await?;
        }
        let ctx = self.admit((&request, class), account, command).await?;
        match request {
            Request::Read { range } => {
                let Some(_lock) = self.lock(range, false, command).await? else {
                    return Ok(Bufs::new());
                };
                Ok(self.read(range, &ctx).await?)
            }
            Request::Write { at, data, fua } => {
                let range = self.covered(at, &data);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.dev.submit(Op::Write { at, data, fua }, &ctx).await?;
                }
                Ok(Bufs::new())
            }
            Request::Map { range, most } => Ok(Box::pin(self.map(range, most, &ctx)).await?),
            rare => {
                Box::pin(self.compose(rare, &ctx, command)).await?;
                Ok(Bufs::new())
            }
        }
    }

    /// Waits for the memory that the command may need at worst.
    async fn admit(
        &self,
        (request, class): (&Request, Class),
        account: &Account,
        command: &Command,
    ) -> Result<Ctx, Failure> {
        let bytes = self.memory_for(request, &self.info());
        let credit = match account.try_credit(bytes, class) {
            Some(credit) => credit,
            None => {
                self.counters.update(|s| s.memory_waits += 1);
                let credit = command.unless_aborted(patiently(account, bytes, class));
                Box::pin(credit).await?.ok_or(Failure::Busy)?.map_err(|too_large| {
                    tracing::error!(%too_large, "a command can never be admitted");
                    Error::OutOfRange
                })?
            }
        };
        let ctx = Ctx::new(credit, self.epoch);
        command.set_ctx(&ctx);
        Ok(ctx)
    }

    /// Whether it takes no commands any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    pub(crate) fn wake_if_idle(&self) {
        if self.closed.get() && self.counters.in_flight() == 0 {
            self.idle.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// Memory for a command, unless there is none for as long as its client is ready to wait.
async fn patiently(
    account: &Account,
    bytes: usize,
    class: Class,
) -> Option<Result<block::Credit, block::TooLarge>> {
    let credit = account.credit(bytes, class);
    match account.patience() {
        Some(patience) => tokio::time::timeout(patience, credit).await.ok(),
        None => Some(credit.await),
    }
}

/// Begins `op`: what is under way, or its end. A panic ends it as it ends a task.
fn begin(dev: &Dev, op: Op, ctx: &Ctx) -> Result<Submission, Result<Bufs, Error>> {
    let begun = AssertUnwindSafe(|| {
        let mut running = dev.start(op, ctx).map_err(Err)?;
        match Pin::new(&mut running).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Err(result),
            Poll::Pending => Ok(running),
        }
    });
    catch_unwind(begun).unwrap_or_else(|_| {
        tracing::error!("{PANICKED}");
        Err(Err(Error::Gone))
    })
}

/// What became of a command in a layer that has a defect.
const PANICKED: &str = "a command ended by a panic: what it has done is unknown";

/// What came of a request.
#[derive(Debug)]
pub enum Begun {
    /// It has ended, and this is the answer.
    Answered(Result<Bufs, Failure>),
    /// It is under way, and will be answered.
    Runs(Command),
}

/// A request that waits for nothing but the device.
struct Entered {
    /// Which nobody else has.
    range: Blocks,
    ctx: Ctx,
    /// For callers that reservations bind.
    flight: Option<Flight>,
    command: Option<Command>,
}

/// What a short read or write covers.
fn short(request: &Request, measure: &Measure, block_size: u32) -> Option<Blocks> {
    let is_short = (1..=SHORT_BYTES).contains(&measure.bytes);
    match request {
        Request::Read { range } if is_short => Some(*range),
        Request::Write { at, .. } if is_short => {
            Some(Blocks::new(*at, measure.bytes / u64::from(block_size)))
        }
        _ => None,
    }
}

/// An accepted command. It is in flight as long as this exists, and answered exactly once: one
/// whose task ends otherwise, by a panic in a layer or with its core, is answered here, for its
/// client and [`Volume::close`] wait for that.
struct Accepted<D: FnOnce(Result<Bufs, Failure>)> {
    volume: Rc<Volume>,
    command: Command,
    done: Option<D>,
}

impl<D: FnOnce(Result<Bufs, Failure>)> Accepted<D> {
    fn ends(mut self, measure: Measure, since: Instant, result: Result<Bufs, Failure>) {
        let result = self.volume.ended(Some(&self.command), measure, since, result);
        self.end(result);
    }

    fn end(&mut self, result: Result<Bufs, Failure>) {
        let Some(done) = self.done.take() else { return };
        self.command.finish();
        self.volume.counters.update(|s| s.in_flight -= 1);
        done(result);
        self.volume.wake_if_idle();
    }
}

impl<D: FnOnce(Result<Bufs, Failure>)> Drop for Accepted<D> {
    fn drop(&mut self) {
        if self.done.is_some() && std::thread::panicking() {
            tracing::error!("{PANICKED}");
        }
        self.end(Err(Failure::Device(Error::Gone)));
    }
}

/// Which memory a request waits for. One that brings data holds its client's memory while it
/// waits, so it must not wait for its client's share.
fn class_for(request: &Request) -> Class {
    match request {
        Request::Read { .. }
        | Request::Verify { .. }
        | Request::Map { .. }
        | Request::WriteSame { .. } => Class::Read,
        Request::Write { .. }
        | Request::Zero { .. }
        | Request::Unmap { .. }
        | Request::Compare { .. }
        | Request::CompareAndWrite { .. }
        | Request::OrWrite { .. }
        | Request::Settle { .. }
        | Request::Flush => Class::Command,
    }
}
