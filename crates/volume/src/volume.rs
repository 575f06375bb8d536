//! Acceptance, admission and the end of commands.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use block::{
    Account, Bufs, Changes, Class, CompareAndWrite, Ctx, Dev, Epoch, Error, Failure, FlushGate,
    Info, Op, RangeLocks, Request,
};
use tokio::time::Instant;

use crate::command::Command;
use crate::gate::{Caller, Flight, Gate, Need};
use crate::reservations::Keeping;
use crate::stats::{Counters, Kind, Snapshot};

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

    fn start_with<D>(
        self: &Rc<Self>,
        caller: &Rc<Caller>,
        (request, class): (Request, Class),
        account: &Account,
        done: D,
    ) -> Command
    where
        D: FnOnce(Result<Bufs, Failure>) + 'static,
    {
        let command = Command::default();
        let handle = command.clone();
        self.counters.update(|s| s.in_flight += 1);
        let accepted = Accepted { volume: Rc::clone(self), command, done: Some(done) };
        let account = account.clone();
        let flight = caller.begins(Need::of(&request), &handle);
        let (kind, bytes) = (Kind::of(&request), request_bytes(&request, self.info().block_size));
        let moves_data = matches!(request, Request::Read { .. } | Request::Write { .. });
        let short = moves_data && bytes <= SHORT_BYTES;
        // Commands begin in the order in which they come.
        let at_once = short && self.unbegun.get() == 0;
        self.unbegun.update(|n| n + 1);
        // In a box, for a future of more than a kilobyte is otherwise moved six times before it runs.
        let mut running = Box::pin(async move {
            let since = Instant::now();
            let Accepted { volume, command, .. } = &accepted;
            volume.unbegun.update(|n| n - 1);
            let result = match volume.run((request, class), &account, &flight, command).await {
                Err(Failure::Device(Error::Aborted)) if command.is_revoked() => {
                    Err(Failure::Conflict)
                }
                result => result,
            };
            drop((account, flight));
            if command.is_aborted() {
                volume.counters.update(|s| s.aborts += 1);
            }
            volume.counters.completed(kind, bytes, result.as_ref().err().copied(), since.elapsed());
            accepted.answer(result);
        });
        if !at_once || begin(running.as_mut()).is_pending() {
            tokio::task::spawn_local(running);
        }
        handle
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
        self.execute_with(&Gate::node(), (request, Class::Immediate), account).await
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
            .credit(overhead.max(1), Class::Immediate)
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
        self.check(&request)?;
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
        let bytes = self.memory_for(request).max(1);
        let credit = match account.try_credit(bytes, class) {
            Some(credit) => credit,
            None => {
                self.counters.update(|s| s.memory_waits += 1);
                let credit = command.unless_aborted(account.credit(bytes, class));
                Box::pin(credit).await?.map_err(|too_large| {
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

/// Carries a command as far as it gets at once: to its end where memory answers, which saves it a
/// task. Nobody is woken for it: the task that goes on with it looks again first. A panic ends it
/// as it ends a task.
fn begin(command: Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
    let poll = AssertUnwindSafe(|| command.poll(&mut Context::from_waker(Waker::noop())));
    catch_unwind(poll).unwrap_or(Poll::Ready(()))
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
    fn answer(mut self, result: Result<Bufs, Failure>) {
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
            tracing::error!("a command ended by a panic: what it has done is unknown");
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
        | Request::Flush => Class::Immediate,
    }
}

/// Payload of a request in bytes, as statistics count it.
fn request_bytes(request: &Request, block_size: u32) -> u64 {
    match request {
        Request::Read { range } | Request::Verify { range } => {
            range.count.saturating_mul(u64::from(block_size))
        }
        Request::Write { data, .. }
        | Request::Compare { data, .. }
        | Request::OrWrite { data, .. } => data.len() as u64,
        Request::CompareAndWrite { write, .. } => write.len() as u64,
        Request::WriteSame { .. }
        | Request::Zero { .. }
        | Request::Unmap { .. }
        | Request::Map { .. }
        | Request::Settle { .. }
        | Request::Flush => 0,
    }
}
