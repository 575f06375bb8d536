//! Acceptance, admission and completion of commands.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{
    Account, Blocks, Bufs, ChangeTracker, Ctx, Dev, Epoch, Error, FlushCoalescer, Info,
    MemoryClass, Op, RangeLocks, ReplicatedDevice, Request, RequestError, Submission,
};
use tokio::time::Instant;

use crate::command::Command;
use crate::reservation_gate::{DataAccess, InFlightGuard, ReservationGate, VolumeClient};
use crate::reservation_state::ReservationState;
use crate::stats::{CommandSample, Counters, VolumeStats};

/// Longest read or write that starts inline when accepted, in bytes. Longer ones need a task: the
/// other tasks of the core wait for the one that accepts.
const MAX_INLINE_BYTES: u64 = 64 * 1024;

/// One volume on its core.
pub struct Volume {
    pub(crate) dev: Dev,
    /// Executes COMPARE AND WRITE where a range lock is not enough.
    pub(crate) replicated: Option<Rc<dyn ReplicatedDevice>>,
    pub(crate) locks: Rc<RangeLocks>,
    pub(crate) flush_coalescer: FlushCoalescer,
    pub(crate) counters: Counters,
    /// Its reservations, if enabled.
    pub(crate) reservations: OnceCell<ReservationState>,
    epoch: Epoch,
    is_closed: Cell<bool>,
    /// Accepted commands whose task has not run yet.
    unstarted: Cell<usize>,
    close_waiters: RefCell<Vec<Waker>>,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("dev", &self.dev).field("epoch", &self.epoch).finish()
    }
}

impl Volume {
    /// A volume on `dev`.
    #[must_use]
    pub fn new(dev: Dev, epoch: Epoch) -> Rc<Self> {
        Self::build(dev, None, epoch)
    }

    /// This node's volume on a device that other nodes use as well.
    #[must_use]
    pub fn new_replicated(dev: Dev, compares: Rc<dyn ReplicatedDevice>, epoch: Epoch) -> Rc<Self> {
        Self::build(dev, Some(compares), epoch)
    }

    fn build(dev: Dev, compares: Option<Rc<dyn ReplicatedDevice>>, epoch: Epoch) -> Rc<Self> {
        Rc::new(Self {
            dev,
            replicated: compares,
            locks: Rc::default(),
            flush_coalescer: FlushCoalescer::default(),
            counters: Counters::default(),
            reservations: OnceCell::new(),
            epoch,
            is_closed: Cell::new(false),
            unstarted: Cell::new(0),
            close_waiters: RefCell::default(),
        })
    }

    /// The device's current properties.
    #[must_use]
    pub fn info(&self) -> Info {
        self.dev.info()
    }

    /// The tracker of changes of the device, made on any node: by the time a change is known to
    /// have happened, its watchers here have seen it.
    #[must_use]
    pub fn change_tracker(&self) -> ChangeTracker {
        self.replicated
            .as_ref()
            .map_or_else(|| self.dev.change_tracker(), |shared| shared.change_tracker())
    }

    /// The volume's statistics.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        self.counters.snapshot()
    }

    /// [`Self::start_for`] the node itself, to which no reservation applies.
    pub fn start<D>(self: &Rc<Self>, request: Request, account: &Account, done: D) -> Command
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        self.start_for(&ReservationGate::node_client(), request, account, done)
    }

    /// Accepts `request` of a caller: from here on the volume owns it, and answers through `done`
    /// exactly once. Memory beyond the request's own data is charged to `account`.
    ///
    /// Must be called in a `LocalSet`. A short read or write that need not wait may be answered
    /// before this returns.
    pub fn start_for<D>(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        request: Request,
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        let class = memory_class_of(&request);
        self.start_with(caller, (request, class), account, done)
    }

    /// [`Self::start_for`] callers that can handle an immediate answer: then `done` is not called.
    pub fn start_or_answer<D>(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        request: Request,
        account: &Account,
        done: D,
    ) -> StartOutcome
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        let class = memory_class_of(&request);
        match self.accept(caller, (request, class), account, done) {
            Ok(command) => StartOutcome::Running(command),
            Err((result, _)) => StartOutcome::Answered(result),
        }
    }

    fn start_with<D>(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        what: (Request, MemoryClass),
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        match self.accept(caller, what, account, done) {
            Ok(command) => command,
            Err((result, done)) => {
                done(result);
                Command::default()
            }
        }
    }

    /// The accepted command; or its answer together with `done`, which was not called.
    fn accept<D>(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        (request, class): (Request, MemoryClass),
        account: &Account,
        done: D,
    ) -> Result<Command, (Result<Bufs, RequestError>, D)>
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        let info = self.info();
        let measure = CommandSample::of_request(&request, info.block_size);
        let entered = inline_range(&request, &measure, info.block_size)
            .and_then(|range| self.try_enter(caller, (&request, class), range, &info, account));
        match (entered, request) {
            (Some(entered), Request::Read { range }) => {
                let blocks = u32::try_from(range.count).expect("it is short");
                self.run_inline(Op::Read { at: range.at, blocks }, entered, measure, done)
            }
            (Some(entered), Request::Write { at, data, fua }) => {
                self.run_inline(Op::Write { at, data, fua }, entered, measure, done)
            }
            (_, request) => Ok(self.run_in_task(caller, (request, class), measure, account, done)),
        }
    }

    /// Admits a request that need not wait: for earlier commands, its range lock, memory or its
    /// reservation check.
    fn try_enter(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        (request, class): (&Request, MemoryClass),
        range: Blocks,
        info: &Info,
        account: &Account,
    ) -> Option<InlineRequest> {
        let writes = matches!(request, Request::Write { .. });
        let begins = !self.is_closed.get() && self.unstarted.get() == 0;
        if !begins
            || self.check_request(request, info).is_err()
            || !self.locks.would_hold(range, writes)
        {
            return None;
        }
        let (command, guard) = match self.reservations.get() {
            None => (None, None),
            Some(state) => {
                let command = Command::default();
                let guard = caller.track(DataAccess::of_request(request), &command);
                state.gate.try_admit(&guard).then_some((Some(command), Some(guard)))?
            }
        };
        let credit = account.try_credit(self.memory_bytes_for(request, info), class)?;
        let ctx = Ctx::new(credit, self.epoch);
        Some(InlineRequest { range, ctx, guard, command })
    }

    /// Executes an admitted request inline: to its end where the device answers at once, which
    /// saves a task. It is not woken: the task that continues it polls it again first.
    fn run_inline<D>(
        self: &Rc<Self>,
        op: Op,
        entered: InlineRequest,
        measure: CommandSample,
        done: D,
    ) -> Result<Command, (Result<Bufs, RequestError>, D)>
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        let InlineRequest { range, ctx, guard, command } = entered;
        let (since, writes) = (Instant::now(), op.is_write());
        let running = match start_op(&self.dev, op, &ctx) {
            Ok(running) => running,
            Err(result) => {
                drop((guard, ctx));
                let result = result.map_err(RequestError::Device);
                return Err((self.record_end(command.as_ref(), measure, since, result), done));
            }
        };
        // Nothing has run since the range was seen to be free.
        let lock = self.locks.enter(range, writes);
        let command = command.unwrap_or_default();
        command.set_ctx(&ctx);
        let accepted = self.track_accepted(&command, done);
        tokio::task::spawn_local(async move {
            let result = running.await;
            drop((lock, guard, ctx));
            accepted.complete(measure, since, result.map_err(RequestError::Device));
        });
        Ok(command)
    }

    /// Spawns a task that executes a request, after all earlier ones.
    fn run_in_task<D>(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        what: (Request, MemoryClass),
        measure: CommandSample,
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, RequestError>) + 'static,
    {
        let command = Command::default();
        let accepted = self.track_accepted(&command, done);
        let account = account.clone();
        let guard = caller.track(DataAccess::of_request(&what.0), &command);
        self.unstarted.update(|n| n + 1);
        // Boxed: a future of more than a kilobyte would otherwise be moved six times before it
        // runs.
        let running = Box::pin(async move {
            let since = Instant::now();
            let AcceptedCommand { volume, command, .. } = &accepted;
            volume.unstarted.update(|n| n - 1);
            let result = volume.run(what, &account, &guard, command).await;
            drop((account, guard));
            accepted.complete(measure, since, result);
        });
        tokio::task::spawn_local(running);
        command
    }

    fn track_accepted<D>(self: &Rc<Self>, command: &Command, done: D) -> AcceptedCommand<D>
    where
        D: FnOnce(Result<Bufs, RequestError>),
    {
        self.counters.update(|s| s.in_flight += 1);
        AcceptedCommand { volume: Rc::clone(self), command: command.clone(), done: Some(done) }
    }

    /// Records the result of a command that began at `since`; returns the answer for its caller.
    fn record_end(
        &self,
        command: Option<&Command>,
        measure: CommandSample,
        since: Instant,
        result: Result<Bufs, RequestError>,
    ) -> Result<Bufs, RequestError> {
        let aborted = command.filter(|command| command.is_aborted());
        if aborted.is_some() {
            self.counters.update(|s| s.aborts += 1);
        }
        let revoked = aborted.is_some_and(Command::is_revoked);
        let result = match result {
            Err(RequestError::Device(Error::Aborted)) if revoked => {
                Err(RequestError::ReservationConflict)
            }
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
    ) -> Result<Bufs, RequestError> {
        self.execute_for(&ReservationGate::node_client(), request, account).await
    }

    /// [`Self::execute`] for a part of a command whose caller already holds memory, for example of
    /// class [`MemoryClass::Read`]: it must not wait for more of that class, which others who wait
    /// likewise may hold. Drop its answer before waiting for anything else.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn execute_nested(
        self: &Rc<Self>,
        request: Request,
        account: &Account,
    ) -> Result<Bufs, RequestError> {
        self.execute_with(&ReservationGate::node_client(), (request, MemoryClass::Command), account)
            .await
    }

    /// [`Self::start_for`] for callers that wait: runs to its end even if this future is dropped.
    ///
    /// # Errors
    /// Why the request failed.
    pub async fn execute_for(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        request: Request,
        account: &Account,
    ) -> Result<Bufs, RequestError> {
        let class = memory_class_of(&request);
        self.execute_with(caller, (request, class), account).await
    }

    async fn execute_with(
        self: &Rc<Self>,
        caller: &Rc<VolumeClient>,
        what: (Request, MemoryClass),
        account: &Account,
    ) -> Result<Bufs, RequestError> {
        let (answer, result) = tokio::sync::oneshot::channel();
        self.start_with(caller, what, account, move |r| {
            // The receiver is gone: the command was executed all the same.
            let _ = answer.send(r);
        });
        result.await.unwrap_or(Err(RequestError::Device(Error::Gone)))
    }

    /// Refuses new commands with [`Error::Gone`], waits for those in flight and makes their
    /// writes durable.
    ///
    /// # Errors
    /// What the last flush reports.
    pub async fn close(self: &Rc<Self>, account: &Account) -> Result<(), RequestError> {
        self.is_closed.set(true);
        poll_fn(|cx| {
            if self.counters.in_flight() == 0 {
                return Poll::Ready(());
            }
            self.close_waiters.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        if self.info().read_only {
            return Ok(());
        }
        let overhead = self.info().overhead_bytes as usize;
        let credit = account
            .credit(overhead.max(1), MemoryClass::Command)
            .await
            .map_err(|_| RequestError::Device(Error::Gone))?;
        let ctx = Ctx::new(credit, self.epoch);
        self.dev.submit(Op::Flush, &ctx).await.map_err(RequestError::Device)?;
        Ok(())
    }

    /// Rare cases are boxed, so that the future of a plain read or write, which is moved and
    /// allocated once per command, stays small.
    async fn run(
        &self,
        (request, class): (Request, MemoryClass),
        account: &Account,
        guard: &InFlightGuard,
        command: &Command,
    ) -> Result<Bufs, RequestError> {
        if self.is_closed.get() {
            return Err(Error::Gone.into());
        }
        self.check_request(&request, &self.info())?;
        if let Some(state) = self.reservations.get() {
            state.gate.admit(guard, command).await?;
        }
        let ctx = self.acquire_memory_for((&request, class), account, command).await?;
        match request {
            Request::Read { range } => {
                let Some(_lock) = self.lock(range, false, command).await? else {
                    return Ok(Bufs::new());
                };
                Ok(self.read(range, &ctx).await?)
            }
            Request::Write { at, data, fua } => {
                let range = self.blocks_of(at, &data);
                if let Some(_lock) = self.lock(range, true, command).await? {
                    self.dev.submit(Op::Write { at, data, fua }, &ctx).await?;
                }
                Ok(Bufs::new())
            }
            Request::BlockStatus { range, max_runs: most } => {
                Ok(Box::pin(self.block_status(range, most, &ctx)).await?)
            }
            rare => {
                Box::pin(self.compose(rare, &ctx, command)).await?;
                Ok(Bufs::new())
            }
        }
    }

    /// Waits for the command's worst-case memory.
    async fn acquire_memory_for(
        &self,
        (request, class): (&Request, MemoryClass),
        account: &Account,
        command: &Command,
    ) -> Result<Ctx, RequestError> {
        let bytes = self.memory_bytes_for(request, &self.info());
        let credit = match account.try_credit(bytes, class) {
            Some(credit) => credit,
            None => {
                self.counters.update(|s| s.memory_waits += 1);
                let credit = command.unless_aborted(credit_with_timeout(account, bytes, class));
                Box::pin(credit).await?.ok_or(RequestError::NoMemory)?.map_err(|too_large| {
                    tracing::error!(%too_large, "a command needs more memory than the pool has");
                    Error::OutOfRange
                })?
            }
        };
        let ctx = Ctx::new(credit, self.epoch);
        command.set_ctx(&ctx);
        Ok(ctx)
    }

    /// Whether it accepts no more commands.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.get()
    }

    pub(crate) fn wake_closers(&self) {
        if self.is_closed.get() && self.counters.in_flight() == 0 {
            self.close_waiters.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// Memory for a command, unless there is none within the client's time limit.
async fn credit_with_timeout(
    account: &Account,
    bytes: usize,
    class: MemoryClass,
) -> Option<Result<block::Credit, block::CreditTooLarge>> {
    let credit = account.credit(bytes, class);
    match account.max_wait() {
        Some(patience) => tokio::time::timeout(patience, credit).await.ok(),
        None => Some(credit.await),
    }
}

/// Starts `op`: returns it in flight, or its result. A panic ends it as it ends a task.
fn start_op(dev: &Dev, op: Op, ctx: &Ctx) -> Result<Submission, Result<Bufs, Error>> {
    let started = AssertUnwindSafe(|| {
        let mut running = dev.start(op, ctx).map_err(Err)?;
        match Pin::new(&mut running).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Err(result),
            Poll::Pending => Ok(running),
        }
    });
    catch_unwind(started).unwrap_or_else(|_| {
        tracing::error!("{PANIC_MESSAGE}");
        Err(Err(Error::Gone))
    })
}

/// Logged for a command in a layer that panicked.
const PANIC_MESSAGE: &str = "a command panicked: its effect is unknown";

/// The state of a request after an attempt to execute it inline.
#[derive(Debug)]
pub enum StartOutcome {
    /// It has ended with this answer.
    Answered(Result<Bufs, RequestError>),
    /// It is in flight, and will be answered.
    Running(Command),
}

/// A request that waits only for the device.
struct InlineRequest {
    /// Locked for it alone.
    range: Blocks,
    ctx: Ctx,
    /// For callers to which reservations apply.
    guard: Option<InFlightGuard>,
    command: Option<Command>,
}

/// The range of a short read or write.
fn inline_range(request: &Request, measure: &CommandSample, block_size: u32) -> Option<Blocks> {
    let is_short = (1..=MAX_INLINE_BYTES).contains(&measure.bytes);
    match request {
        Request::Read { range } if is_short => Some(*range),
        Request::Write { at, .. } if is_short => {
            Some(Blocks::new(*at, measure.bytes / u64::from(block_size)))
        }
        _ => None,
    }
}

/// An accepted command. It is in flight while this exists, and answered exactly once: if its task
/// ends early, by a panic in a layer or with its core, this answers on drop, because its client and
/// [`Volume::close`] wait for it.
struct AcceptedCommand<D: FnOnce(Result<Bufs, RequestError>)> {
    volume: Rc<Volume>,
    command: Command,
    done: Option<D>,
}

impl<D: FnOnce(Result<Bufs, RequestError>)> AcceptedCommand<D> {
    fn complete(
        mut self,
        measure: CommandSample,
        since: Instant,
        result: Result<Bufs, RequestError>,
    ) {
        let result = self.volume.record_end(Some(&self.command), measure, since, result);
        self.answer(result);
    }

    fn answer(&mut self, result: Result<Bufs, RequestError>) {
        let Some(done) = self.done.take() else { return };
        self.command.finish();
        self.volume.counters.update(|s| s.in_flight -= 1);
        done(result);
        self.volume.wake_closers();
    }
}

impl<D: FnOnce(Result<Bufs, RequestError>)> Drop for AcceptedCommand<D> {
    fn drop(&mut self) {
        if self.done.is_some() && std::thread::panicking() {
            tracing::error!("{PANIC_MESSAGE}");
        }
        self.answer(Err(RequestError::Device(Error::Gone)));
    }
}

/// The memory class of a request. One that brings data holds its client's memory while it waits, so
/// it must not wait for its client's share.
fn memory_class_of(request: &Request) -> MemoryClass {
    match request {
        Request::Read { .. }
        | Request::Verify { .. }
        | Request::BlockStatus { .. }
        | Request::WriteSame { .. } => MemoryClass::Read,
        Request::Write { .. }
        | Request::Zero { .. }
        | Request::Unmap { .. }
        | Request::Compare { .. }
        | Request::CompareAndWrite { .. }
        | Request::OrWrite { .. }
        | Request::DrainWrites { .. }
        | Request::Flush => MemoryClass::Command,
    }
}
