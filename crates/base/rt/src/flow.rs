//! Fair shares of a core for its clients (RFD 0043).
//!
//! A [`Flow`] is whose work counts together: that of a connection, of a peer, of a rebuild. Disks
//! and sockets charge what they move to the flow whose task is being polled ([`charge`]). A task
//! that is run by a [`Meter`] waits while its flow has had more than its share, until the core has
//! looked for events: so a small command never waits for more than one unit of other work.
//!
//! Tasks without a meter, and what they move, are free: leases, membership, metadata.

mod fair_queue;

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use pin_project_lite::pin_project;
use tokio::time::Instant;

use crate::yield_to_ready_tasks;
pub use fair_queue::FULL_WEIGHT;
use fair_queue::{FairQueue, FlowId, GroupId, WaiterId};

/// What an operation of a disk or a socket costs in addition to its bytes.
const OPERATION_BYTES: u64 = 4 << 10;

/// The flows of a core.
pub(crate) struct Flows {
    queue: RefCell<FairQueue>,
    /// Those of tasks that wait, by their number.
    wakers: RefCell<Vec<Option<Waker>>>,
    /// That of [`Self::run_passes`], and what it waits for.
    passes: RefCell<Option<(AwaitedChange, Waker)>>,
}

/// A change of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AwaitedChange {
    /// A task waits.
    Queued,
    /// The task that was woken has run, or is gone.
    Ended,
}

impl Flows {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Self {
            queue: RefCell::default(),
            wakers: RefCell::default(),
            passes: RefCell::default(),
        })
    }

    /// Lets tasks that wait go on, as many as a pass allows after each `look` for events.
    pub(crate) async fn run_passes<F: Future<Output = ()>>(&self, mut look: impl FnMut() -> F) {
        loop {
            self.wait_for(AwaitedChange::Queued, FairQueue::has_queued).await;
            if self.queue.borrow().is_pass_over() {
                look().await;
                self.queue.borrow_mut().begin_pass(Instant::now());
            } else {
                // A task that has just run is ready again behind this one.
                yield_to_ready_tasks().await;
            }
            let next = self.queue.borrow_mut().wake_next();
            self.wake(next);
            let mut has_run = pin!(self.wait_for(AwaitedChange::Ended, |queue| !queue.has_woken()));
            let mut looked = pin!(look());
            let is_late = poll_fn(|cx| match has_run.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(false),
                Poll::Pending => looked.as_mut().poll(cx).map(|()| true),
            });
            if is_late.await {
                self.queue.borrow_mut().begin_pass(Instant::now());
            }
        }
    }

    /// Waits for a change. Nothing else may wake this task, or a look for events would seem to be
    /// over.
    async fn wait_for(&self, change: AwaitedChange, has_come: impl Fn(&FairQueue) -> bool) {
        poll_fn(|cx| {
            let has_come = has_come(&self.queue.borrow());
            let waits = (!has_come).then(|| (change, cx.waker().clone()));
            let before = self.passes.replace(waits);
            drop(before);
            if has_come { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn note(&self, change: AwaitedChange) {
        let waker = self.passes.borrow_mut().take_if(|(awaited, _)| *awaited == change);
        if let Some((_, waker)) = waker {
            waker.wake();
        }
    }

    fn wake(&self, waiter: Option<WaiterId>) {
        if let Some(waker) = waiter.and_then(|waiter| self.take_waker(waiter)) {
            waker.wake();
        }
    }

    fn take_waker(&self, waiter: WaiterId) -> Option<Waker> {
        self.wakers.borrow_mut().get_mut(waiter).and_then(Option::take)
    }

    fn set_waker(&self, waiter: WaiterId, waker: &Waker) {
        let mut wakers = self.wakers.borrow_mut();
        if wakers.len() <= waiter {
            wakers.resize(waiter + 1, None);
        }
        match &mut wakers[waiter] {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    fn end_wait(&self, waiter: WaiterId) {
        self.queue.borrow_mut().end_wait(waiter);
        drop(self.take_waker(waiter));
        if !self.queue.borrow().has_woken() {
            self.note(AwaitedChange::Ended);
        }
    }
}

/// Flows that share one share of a core: those that use a volume, say. Cheap to clone. It gets its
/// share on the core where a flow first joins it.
#[derive(Clone, Debug, Default)]
pub struct FlowGroup(Rc<OnceCell<Rc<GroupHandle>>>);

struct GroupHandle {
    flows: Rc<Flows>,
    id: GroupId,
}

impl GroupHandle {
    fn new(flows: &Rc<Flows>, weight: u64) -> Rc<Self> {
        let id = flows.queue.borrow_mut().add_group(weight);
        Rc::new(Self { flows: Rc::clone(flows), id })
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.flows.queue.borrow_mut().remove_group(self.id);
    }
}

impl fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GroupHandle").field(&self.id).finish()
    }
}

/// Whose work counts together. Cheap to clone; stays on its core.
#[derive(Clone)]
pub struct Flow(Rc<FlowHandle>);

struct FlowHandle {
    flows: Rc<Flows>,
    id: FlowId,
    group: RefCell<Rc<GroupHandle>>,
}

impl Flow {
    /// A flow of a group of its own.
    pub(crate) fn new(flows: &Rc<Flows>, weight: u64) -> Self {
        let group = GroupHandle::new(flows, weight);
        let id = flows.queue.borrow_mut().add_flow(group.id);
        Self(Rc::new(FlowHandle { flows: Rc::clone(flows), id, group: RefCell::new(group) }))
    }

    /// Runs a future as this flow's work.
    pub fn run<F: Future>(&self, future: F) -> Metered<F> {
        Metered { meter: Some(Meter::new(self.clone())), future }
    }

    fn join(&self, group: &FlowGroup) {
        let FlowHandle { flows, id, group: mine } = &*self.0;
        let group = group.0.get_or_init(|| GroupHandle::new(flows, FULL_WEIGHT));
        let is_same = Rc::ptr_eq(&mine.borrow(), group);
        if !is_same && Rc::ptr_eq(flows, &group.flows) {
            flows.queue.borrow_mut().set_group(*id, group.id);
            let before = mine.replace(Rc::clone(group));
            drop(before);
        }
    }
}

impl Drop for FlowHandle {
    fn drop(&mut self) {
        self.flows.queue.borrow_mut().remove_flow(self.id);
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flow").field(&self.0.id).finish()
    }
}

thread_local! {
    /// The flow whose task is being polled.
    static CURRENT: RefCell<Option<Flow>> = const { RefCell::new(None) };
}

/// Charges the flow whose task is being polled, if any, with an operation that moves `bytes`.
pub fn charge(bytes: u64) {
    CURRENT.with_borrow(|current| {
        if let Some(flow) = current {
            let bytes = OPERATION_BYTES.saturating_add(bytes);
            flow.0.flows.queue.borrow_mut().charge(flow.0.id, bytes);
        }
    });
}

/// The bytes that the task that is being polled may still move in this poll; with none left, it is
/// to yield.
#[must_use]
pub fn poll_bytes_left() -> usize {
    CURRENT.with_borrow(|current| {
        let left = current.as_ref().map(|flow| flow.0.flows.queue.borrow().poll_bytes_left());
        left.and_then(|left| usize::try_from(left).ok()).unwrap_or(usize::MAX)
    })
}

/// The flow whose task is being polled, if any, joins a group, and leaves that which it was in.
pub fn join(group: &FlowGroup) {
    CURRENT.with_borrow(|current| current.iter().for_each(|flow| flow.join(group)));
}

/// Runs a future as work of the flow whose task is being polled, if any.
pub fn inherit<F: Future>(future: F) -> Metered<F> {
    let meter = CURRENT.with_borrow(Clone::clone).map(Meter::new);
    Metered { meter, future }
}

/// Polls on behalf of a flow, and holds back while that has had more than its share.
#[derive(Debug)]
pub struct Meter {
    flow: Flow,
    waiter: Option<WaiterId>,
}

impl Meter {
    /// A meter of a task that does not wait.
    #[must_use]
    pub fn new(flow: Flow) -> Self {
        Self { flow, waiter: None }
    }

    /// Polls, unless the task has to wait; it is woken when it may run.
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !self.may_run(cx) {
            return Poll::Pending;
        }
        let before = CURRENT.replace(Some(self.flow.clone()));
        let _turn = Turn { before, meter: self };
        poll(cx)
    }

    fn may_run(&mut self, cx: &Context<'_>) -> bool {
        let flows = &self.flow.0.flows;
        let may_run = match self.waiter {
            Some(waiter) => flows.queue.borrow_mut().try_resume(waiter, Instant::now),
            None => flows.queue.borrow_mut().try_begin(self.flow.0.id, Instant::now),
        };
        if may_run {
            return true;
        }
        let waiter = match self.waiter {
            Some(waiter) => waiter,
            None => *self.waiter.insert(flows.queue.borrow_mut().wait(self.flow.0.id)),
        };
        flows.set_waker(waiter, cx.waker());
        flows.note(AwaitedChange::Queued);
        false
    }

    fn end_wait(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            self.flow.0.flows.end_wait(waiter);
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.end_wait();
    }
}

/// A poll of a meter; it ends even by a panic.
struct Turn<'a> {
    before: Option<Flow>,
    meter: &'a mut Meter,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
        self.meter.end_wait();
    }
}

pin_project! {
    /// A future with a meter.
    #[derive(Debug)]
    pub struct Metered<F> {
        meter: Option<Meter>,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for Metered<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        match this.meter {
            Some(meter) => meter.poll(cx, |cx| this.future.poll(cx)),
            None => this.future.poll(cx),
        }
    }
}
