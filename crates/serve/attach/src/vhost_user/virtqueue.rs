//! A running ring: takes requests off in batches, executes them on the volume, and returns the
//! answers with one notification per batch.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{Blocks, Bufs, Credit, Lba, MemoryClass, Request, RequestError};
use rt::event::{EventNotifier, EventReceiver};
use rt::{Core, yield_to_ready_tasks};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::disk::{Disk, FailureAction};
use super::inflight::QueueRecord;
use super::memory::GuestMap;
use super::request::{ChainRequest, Command, ID_BYTES, MalformedChain, Status, read_request};

/// Most requests taken before completed ones are answered and other tasks of the core run.
const BATCH: usize = 64;

/// Guest addresses of a ring's three parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VirtqueueAddresses {
    pub(super) table: GuestAddress,
    pub(super) available: GuestAddress,
    pub(super) used: GuestAddress,
}

impl VirtqueueAddresses {
    fn of(queue: &Queue) -> Self {
        Self {
            table: GuestAddress(queue.desc_table()),
            available: GuestAddress(queue.avail_ring()),
            used: GuestAddress(queue.used_ring()),
        }
    }
}

/// Parameters of a ring.
pub(super) struct VirtqueueSetup {
    pub(super) disk: Rc<Disk>,
    pub(super) index: u16,
    pub(super) guest: Arc<GuestMap>,
    pub(super) addresses: VirtqueueAddresses,
    pub(super) queue_size: u16,
    /// Where to continue if no record says so.
    pub(super) base: u16,
    pub(super) event_index: bool,
    pub(super) enabled: bool,
    pub(super) kick: OwnedFd,
    pub(super) call: Option<Rc<EventNotifier>>,
    pub(super) error: Option<Rc<EventNotifier>>,
    pub(super) record: Option<QueueRecord>,
    /// Whether each write must be durable on completion.
    pub(super) write_through: Rc<Cell<bool>>,
}

/// Why a ring cannot start, or is broken.
#[derive(Debug, thiserror::Error)]
pub(super) enum VirtqueueError {
    #[error("its parts are not in the guest's memory, or not aligned")]
    Misplaced,
    #[error("it has more requests than descriptors")]
    Overrun,
    #[error("descriptor {0} is submitted again before its completion")]
    DuplicateHead(u16),
    #[error("{0}")]
    Chain(#[from] MalformedChain),
    #[error("{0}")]
    Queue(#[from] virtio_queue::Error),
    #[error("its event cannot be waited for: {0}")]
    Event(#[from] std::io::Error),
}

/// A running ring.
#[derive(Debug)]
pub(super) struct Virtqueue {
    shared: Rc<VirtqueueShared>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// It takes requests.
    Open,
    /// It takes none until it is enabled.
    Disabled,
    /// It takes no more; it ends when none is in flight.
    Draining,
}

struct VirtqueueShared {
    disk: Rc<Disk>,
    index: u16,
    guest_queue: RefCell<GuestQueue>,
    completed: RefCell<Vec<CompletedRequest>>,
    /// Requests in flight that failed temporarily.
    waiting: RefCell<Vec<InFlightRequest>>,
    wake: Notify,
    mode: Cell<Mode>,
    broken: Cell<bool>,
    /// The ring is currently outside the guest's memory.
    memory_missing: Cell<bool>,
    /// Answers are suppressed: the monitor is gone, and the memory may be another guest's.
    muted: Cell<bool>,
    in_flight: Cell<usize>,
    write_through: Rc<Cell<bool>>,
}

/// The connection to the guest.
struct GuestQueue {
    queue: Queue,
    /// The memory table that contains the queue.
    guest: Arc<GuestMap>,
    call: Option<Rc<EventNotifier>>,
    error: Option<Rc<EventNotifier>>,
    record: Option<QueueRecord>,
    /// Which descriptors are heads of requests in flight.
    in_flight_heads: Vec<bool>,
    /// Whether answers were returned without a notification so far.
    needs_notify: bool,
}

impl fmt::Debug for VirtqueueShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtqueueShared")
            .field("index", &self.index)
            .field("mode", &self.mode)
            .field("broken", &self.broken)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

/// A request in flight, and the memory table it was taken with.
struct InFlightRequest {
    request: ChainRequest,
    guest: Arc<GuestMap>,
}

/// A completed request.
struct CompletedRequest {
    job: InFlightRequest,
    outcome: Result<ResponseData, NoResponse>,
}

/// Why a request returned no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoResponse {
    /// It failed with this status.
    Status(Status),
    /// It stays unanswered: the next process for the ring executes it.
    LeftUnanswered,
}

impl From<Status> for NoResponse {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// The result of a request.
enum ResponseData {
    Nothing,
    Data(Bufs),
    Name,
}

impl Virtqueue {
    /// Starts a ring, with the requests in flight of the record if there is one.
    pub(super) fn start(core: &Core, start: VirtqueueSetup) -> Result<Self, VirtqueueError> {
        let kick = core.event(start.kick)?;
        let mut queue = Queue::new(super::MAX_QUEUE_SIZE)?;
        queue.try_set_size(start.queue_size)?;
        queue.set_event_idx(start.event_index);
        set_queue_addresses(&mut queue, &start.guest, start.addresses)?;
        let used = queue.used_idx(&*start.guest, Ordering::Acquire)?.0;
        queue.set_next_used(used);
        queue.set_next_avail(start.base);
        let mut record = start.record;
        let before = record.as_mut().map(|record| record.resume(used));
        let queue_state = GuestQueue {
            queue,
            guest: start.guest,
            call: start.call,
            error: start.error,
            record,
            in_flight_heads: vec![false; start.queue_size.into()],
            needs_notify: false,
        };
        // An earlier process may have ended between an answer and its notification.
        if let Some(call) = &queue_state.call {
            call.notify();
        }
        let shared = Rc::new(VirtqueueShared {
            disk: start.disk,
            index: start.index,
            guest_queue: RefCell::new(queue_state),
            completed: RefCell::default(),
            waiting: RefCell::default(),
            wake: Notify::new(),
            mode: Cell::new(if start.enabled { Mode::Open } else { Mode::Disabled }),
            broken: Cell::new(false),
            memory_missing: Cell::new(false),
            muted: Cell::new(false),
            in_flight: Cell::new(0),
            write_through: start.write_through,
        });
        let again = before.map(|before| shared.resume_in_flight(&before, used)).unwrap_or_default();
        let task = spawn_local(Rc::clone(&shared).run(kick, again));
        Ok(Self { shared, task })
    }

    /// Enables or disables taking requests.
    pub(super) fn enable(&self, enable: bool) {
        if self.shared.mode.get() != Mode::Draining {
            self.shared.mode.set(if enable { Mode::Open } else { Mode::Disabled });
            self.shared.wake.notify_one();
        }
    }

    /// Sets the notifier. Notifies at once: earlier answers may not have been notified.
    pub(super) fn set_call(&self, call: Option<Rc<EventNotifier>>) {
        if let Some(call) = &call {
            call.notify();
        }
        self.shared.guest_queue.borrow_mut().call = call;
    }

    /// Sets the error notifier.
    pub(super) fn set_error(&self, error: Option<Rc<EventNotifier>>) {
        self.shared.guest_queue.borrow_mut().error = error;
    }

    /// Replaces the memory table. Requests in flight keep theirs, and a ring that is not completely
    /// inside the new table keeps the old one for its answers: monitors remove regions and add them
    /// again, split differently, while the guest runs. It takes no requests until a table contains
    /// all of it.
    pub(super) fn remap(&self, guest: &Arc<GuestMap>, addresses: Option<VirtqueueAddresses>) {
        let queue_state = &mut *self.shared.guest_queue.borrow_mut();
        let before = VirtqueueAddresses::of(&queue_state.queue);
        let placed = addresses.ok_or(VirtqueueError::Misplaced);
        let placed = placed.and_then(|at| set_queue_addresses(&mut queue_state.queue, guest, at));
        let was_away = self.shared.memory_missing.replace(placed.is_err());
        match placed {
            Ok(()) => queue_state.guest = Arc::clone(guest),
            Err(why) => {
                if !was_away {
                    tracing::info!(ring = self.shared.index, %why, "a ring waits for the guest's memory");
                }
                // The addresses were valid in that table.
                if let Err(why) =
                    set_queue_addresses(&mut queue_state.queue, &queue_state.guest, before)
                {
                    self.shared.mark_broken(queue_state, &why);
                }
            }
        }
        // The guest may have kicked meanwhile.
        self.shared.wake.notify_one();
    }

    /// Gives no more answers, whatever is in flight, and takes no more requests: the monitor is
    /// gone, and the memory may be another guest's by now.
    pub(super) fn mute(&self) {
        self.shared.muted.set(true);
        self.enable(false);
    }

    /// Takes no more requests, waits until all in flight are answered, and returns the ring's
    /// position.
    pub(super) async fn stop(self) -> u16 {
        self.shared.mode.set(Mode::Draining);
        self.shared.wake.notify_one();
        if self.task.await.is_err() {
            tracing::error!(ring = self.shared.index, "a ring ended by a panic");
        }
        self.shared.guest_queue.borrow().queue.next_avail()
    }
}

/// Sets the addresses of a queue's parts, if all are valid.
fn set_queue_addresses(
    queue: &mut Queue,
    guest: &GuestMap,
    at: VirtqueueAddresses,
) -> Result<(), VirtqueueError> {
    queue.set_ready(false);
    queue.try_set_desc_table_address(at.table)?;
    queue.try_set_avail_ring_address(at.available)?;
    queue.try_set_used_ring_address(at.used)?;
    queue.set_ready(true);
    if queue.is_valid(guest) { Ok(()) } else { Err(VirtqueueError::Misplaced) }
}

impl VirtqueueShared {
    async fn run(self: Rc<Self>, kick: EventReceiver, again: Vec<InFlightRequest>) {
        again.into_iter().for_each(|job| self.start_request(job));
        let mut kicks = true;
        loop {
            self.leave_waiting();
            let more = self.take_batch();
            self.answer_completed();
            self.notify();
            if self.mode.get() == Mode::Draining && self.in_flight.get() == 0 {
                return;
            }
            if more || self.has_more() {
                yield_to_ready_tasks().await;
                continue;
            }
            let kicked = async {
                match kicks {
                    true => kick.wait().await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.wake.notified() => {}
                () = self.disk.wait_retry(), if self.is_waiting() => self.retry_waiting(),
                kicked = kicked => if let Err(e) = kicked {
                    kicks = false;
                    self.mark_broken(&mut self.guest_queue.borrow_mut(), &VirtqueueError::Event(e));
                },
            }
        }
    }

    /// Whether the guest's memory must not be accessed any more.
    fn is_muted(&self) -> bool {
        self.muted.get() || self.disk.is_disconnected()
    }

    fn is_open(&self) -> bool {
        let taken = self.mode.get() == Mode::Open && !self.disk.is_ending();
        taken && !self.broken.get() && !self.memory_missing.get() && !self.is_waiting()
    }

    /// Whether requests wait for the volume.
    fn is_waiting(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// Retries the waiting requests in order.
    fn retry_waiting(self: &Rc<Self>) {
        self.leave_waiting();
        self.waiting.take().into_iter().for_each(|job| self.start_request(job));
    }

    /// Leaves waiting requests for the next process once waiting ends: they are not answered and
    /// stay in the record.
    fn leave_waiting(&self) {
        if self.muted.get() || self.disk.is_ending() {
            let left = self.waiting.take();
            self.in_flight.update(|n| n - left.len());
        }
    }

    /// Takes a batch of requests. Returns whether there may be more.
    fn take_batch(self: &Rc<Self>) -> bool {
        for _ in 0..BATCH {
            if !self.is_open() {
                return false;
            }
            let popped = self.pop(&mut self.guest_queue.borrow_mut());
            match popped {
                Ok(Some(job)) => self.start_request(job),
                Ok(None) => return false,
                Err(why) => self.mark_broken(&mut self.guest_queue.borrow_mut(), &why),
            }
        }
        true
    }

    /// Whether more requests have arrived. If not, the guest kicks when they do.
    fn has_more(&self) -> bool {
        if !self.is_open() {
            return false;
        }
        let queue_state = &mut *self.guest_queue.borrow_mut();
        let enabled = queue_state.queue.enable_notification(&*queue_state.guest);
        enabled.unwrap_or_else(|e| {
            self.mark_broken(queue_state, &e.into());
            false
        })
    }

    fn pop(&self, queue_state: &mut GuestQueue) -> Result<Option<InFlightRequest>, VirtqueueError> {
        let guest = Arc::clone(&queue_state.guest);
        let next = queue_state.queue.next_avail();
        if queue_state.queue.avail_idx(&*guest, Ordering::Acquire)?.0 == next {
            return Ok(None);
        }
        if self.in_flight.get() >= queue_state.in_flight_heads.len() {
            return Err(VirtqueueError::Overrun);
        }
        let mut available = queue_state.queue.iter(&*guest)?;
        let head = available.next().ok_or(VirtqueueError::Misplaced)?.head_index();
        let job = self.take_at(queue_state, head)?;
        if let Some(record) = &mut queue_state.record {
            record.mark_in_flight(head);
        }
        Ok(Some(job))
    }

    /// Takes the request that begins at `head`.
    fn take_at(
        &self,
        queue_state: &mut GuestQueue,
        head: u16,
    ) -> Result<InFlightRequest, VirtqueueError> {
        let taken = queue_state
            .in_flight_heads
            .get_mut(usize::from(head))
            .ok_or(MalformedChain::Index(head))?;
        if *taken {
            return Err(VirtqueueError::DuplicateHead(head));
        }
        let guest = Arc::clone(&queue_state.guest);
        let table = (GuestAddress(queue_state.queue.desc_table()), queue_state.queue.size());
        let request = read_request(&guest, table, head, &self.disk.limits())?;
        *taken = true;
        self.in_flight.update(|n| n + 1);
        Ok(InFlightRequest { request, guest })
    }

    /// Takes the requests again that an earlier process had in flight.
    fn resume_in_flight(&self, before: &[u16], used: u16) -> Vec<InFlightRequest> {
        let queue_state = &mut *self.guest_queue.borrow_mut();
        let count = u16::try_from(before.len()).unwrap_or(u16::MAX);
        queue_state.queue.set_next_avail(used.wrapping_add(count));
        if count > 0 {
            tracing::info!(
                ring = self.index,
                requests = count,
                "resubmitting requests that were not answered"
            );
        }
        let mut jobs = Vec::new();
        for &head in before {
            match self.take_at(queue_state, head) {
                Ok(job) => jobs.push(job),
                Err(why) => {
                    self.mark_broken(queue_state, &why);
                    break;
                }
            }
        }
        jobs
    }

    /// Marks the ring as broken: it takes no more requests until the driver resets it; those in
    /// flight are answered.
    fn mark_broken(&self, queue_state: &mut GuestQueue, why: &VirtqueueError) {
        if !self.broken.replace(true) {
            tracing::warn!(ring = self.index, %why, "the guest broke a ring; it is no longer served");
            if let Some(error) = &queue_state.error {
                error.notify();
            }
        }
    }

    /// Starts a request on the volume.
    fn start_request(self: &Rc<Self>, job: InFlightRequest) {
        let fua = self.write_through.get();
        let request = match &job.request.command {
            Err(status) => {
                let status = *status;
                return self.complete(job, Err(status.into()));
            }
            Ok(Command::Identify) => return self.complete(job, Ok(ResponseData::Name)),
            Ok(Command::Flush) => Request::Flush,
            Ok(Command::Discard(ranges)) => Request::Unmap { ranges: ranges.clone() },
            Ok(Command::Zero { range, unmap }) => {
                Request::Zero { range: *range, unmap: *unmap, fua }
            }
            Ok(Command::Read(range)) if range.count <= self.disk.part_blocks => {
                Request::Read { range: *range }
            }
            Ok(Command::Write(range)) if range.count <= self.disk.part_blocks => {
                let (at, bytes) = (range.at, job.request.data.len() as usize);
                let Some(credit) = self.disk.account.try_credit(bytes, MemoryClass::Read) else {
                    return self.start_multipart(job);
                };
                match copy_from_guest(&job, (0, bytes), &credit) {
                    Ok(data) => Request::Write { at, data, fua },
                    Err(status) => return self.complete(job, Err(status.into())),
                }
            }
            Ok(Command::Read(_) | Command::Write(_)) => return self.start_multipart(job),
        };
        let shared = Rc::clone(self);
        self.disk.start(request, move |result| {
            shared.on_volume_result(job, result.map(ResponseData::Data));
        });
    }

    fn start_multipart(self: &Rc<Self>, job: InFlightRequest) {
        let shared = Rc::clone(self);
        spawn_local(async move {
            match shared.run_multipart(&job).await {
                Ok(done) => shared.on_volume_result(job, done.map(|()| ResponseData::Nothing)),
                Err(status) => shared.complete(job, Err(status.into())),
            }
        });
    }

    /// Reads or writes part by part. Returns the volume's result, or `None` if it is not to be
    /// used.
    async fn run_multipart(
        &self,
        job: &InFlightRequest,
    ) -> Result<Result<(), RequestError>, Status> {
        let (range, writes) = match job.request.command {
            Ok(Command::Read(range)) => (range, false),
            Ok(Command::Write(range)) => (range, true),
            _ => return Err(Status::Unsupported),
        };
        let Disk { volume, account, part_blocks: most, .. } = &*self.disk;
        let each = u64::from(volume.info().block_size);
        let mut done = 0;
        while done < range.count {
            // Its memory may be another guest's by now: neither write to it nor copy from it.
            if self.is_muted() {
                return Err(Status::Failed);
            }
            let part = Blocks::new(Lba(range.at.0 + done), (*most).min(range.count - done));
            let (skip, bytes) = (done * each, (part.count * each) as usize);
            let result = if writes {
                let credit = account.credit(bytes, MemoryClass::Read).await;
                let credit = credit.map_err(|_| Status::Failed)?;
                if self.is_muted() {
                    return Err(Status::Failed);
                }
                let data = copy_from_guest(job, (skip, bytes), &credit)?;
                drop(credit);
                let write = Request::Write { at: part.at, data, fua: self.write_through.get() };
                self.disk.execute(write).await
            } else {
                self.disk.execute(Request::Read { range: part }).await
            };
            match result {
                Ok(data) if !writes && !self.is_muted() => copy_to_guest(job, skip, &data)?,
                Ok(_) => {}
                Err(why) => return Ok(Err(why)),
            }
            done += part.count;
        }
        Ok(Ok(()))
    }

    /// Handles the volume's result: success, or a temporary or permanent failure.
    fn on_volume_result(&self, job: InFlightRequest, result: Result<ResponseData, RequestError>) {
        let failure = match result {
            Ok(given) => return self.complete(job, Ok(given)),
            Err(failure) => failure,
        };
        // A guest learns only that a request failed (5.2.6).
        tracing::debug!(%failure, "a request of the guest has failed");
        match self.disk.failure_action(&failure) {
            FailureAction::Fail => self.complete(job, Err(Status::Failed.into())),
            FailureAction::LeaveUnanswered => self.complete(job, Err(NoResponse::LeftUnanswered)),
            FailureAction::Retry => {
                self.disk.schedule_retry();
                self.waiting.borrow_mut().push(job);
                self.wake.notify_one();
            }
        }
    }

    /// Completes a request: the ring's task answers all completed ones together.
    fn complete(&self, job: InFlightRequest, outcome: Result<ResponseData, NoResponse>) {
        self.completed.borrow_mut().push(CompletedRequest { job, outcome });
        self.wake.notify_one();
    }

    /// Answers completed requests.
    fn answer_completed(&self) {
        let done = self.completed.take();
        if done.is_empty() {
            return;
        }
        self.in_flight.update(|n| n - done.len());
        if self.is_muted() {
            return;
        }
        let queue_state = &mut *self.guest_queue.borrow_mut();
        for CompletedRequest { job, outcome } in done {
            let outcome = match outcome {
                Ok(given) => Ok(given),
                Err(NoResponse::Status(status)) => Err(status),
                Err(NoResponse::LeftUnanswered) => continue,
            };
            let answered = self.push_used(queue_state, &job, outcome);
            if let Err(why) = answered {
                self.mark_broken(queue_state, &why);
            }
        }
    }

    fn push_used(
        &self,
        queue_state: &mut GuestQueue,
        job: &InFlightRequest,
        outcome: Result<ResponseData, Status>,
    ) -> Result<(), VirtqueueError> {
        let ChainRequest { head, status: at, ref data, .. } = job.request;
        let copied = outcome.and_then(|given| match given {
            ResponseData::Nothing => Ok(()),
            ResponseData::Data(bytes) => copy_to_guest(job, 0, &bytes),
            ResponseData::Name => {
                let name = &self.disk.serial[..ID_BYTES.min(data.len() as usize)];
                data.write(&job.guest, 0, name).map_err(|_| Status::Failed)
            }
        });
        let (status, bytes) = match copied {
            Ok(()) => (Status::Ok, job.request.writable_bytes()),
            // How much was written is unknown: claim zero bytes.
            Err(status) => (status, 0),
        };
        let status_written = job.guest.write_obj(status as u8, at);
        status_written.map_err(|_| MalformedChain::Outside { at: at.0, bytes: 1 })?;
        if let Some(taken) = queue_state.in_flight_heads.get_mut(usize::from(head)) {
            *taken = false;
        }
        if let Some(record) = &queue_state.record {
            record.begin_completion(head);
        }
        queue_state.queue.add_used(&*queue_state.guest, head, bytes)?;
        if let Some(record) = &queue_state.record {
            record.end_completion(head, queue_state.queue.next_used());
        }
        queue_state.needs_notify = true;
        Ok(())
    }

    /// Notifies the guest of answers, if it wants that.
    fn notify(&self) {
        let queue_state = &mut *self.guest_queue.borrow_mut();
        if !std::mem::take(&mut queue_state.needs_notify) || self.is_muted() {
            return;
        }
        // One notification too many does no harm.
        let wanted = queue_state.queue.needs_notification(&*queue_state.guest).unwrap_or(true);
        if let Some(call) = queue_state.call.as_ref().filter(|_| wanted) {
            call.notify();
        }
    }
}

/// A copy of the guest's data from `skip` on.
fn copy_from_guest(
    job: &InFlightRequest,
    (skip, bytes): (u64, usize),
    credit: &Credit,
) -> Result<Bufs, Status> {
    let (mut copy, mut at) = (credit.alloc(bytes), skip);
    for piece in &mut copy {
        job.request.data.read(&job.guest, at, piece).map_err(|_| Status::Failed)?;
        at += piece.len() as u64;
    }
    Ok(copy.into())
}

/// Copies into the guest's data from `skip` on.
fn copy_to_guest(job: &InFlightRequest, skip: u64, data: &Bufs) -> Result<(), Status> {
    let mut at = skip;
    for piece in data.iter() {
        job.request.data.write(&job.guest, at, piece).map_err(|_| Status::Failed)?;
        at += piece.len() as u64;
    }
    Ok(())
}
