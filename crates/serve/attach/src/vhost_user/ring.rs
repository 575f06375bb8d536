//! A ring that runs: requests are taken off it in batches, the volume does them, and what it has done is put back, for
//! which the guest is notified once a batch.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{Blocks, Bufs, Class, Credit, Failure, Lba, Request};
use rt::event::{Event, Signal};
use rt::{Core, give_way};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_local};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::disk::{Disk, Fate};
use super::inflight::RingRecord;
use super::memory::Guest;
use super::request::{Command, ID_BYTES, Malformed, Status, Taken, take};

/// Most requests taken before those that are done are answered, and others of the core have their turn.
const BATCH: usize = 64;

/// Where a ring's three parts are, for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) table: GuestAddress,
    pub(super) available: GuestAddress,
    pub(super) used: GuestAddress,
}

impl Addresses {
    fn of(queue: &Queue) -> Self {
        Self {
            table: GuestAddress(queue.desc_table()),
            available: GuestAddress(queue.avail_ring()),
            used: GuestAddress(queue.used_ring()),
        }
    }
}

/// What a ring is begun with.
pub(super) struct Start {
    pub(super) disk: Rc<Disk>,
    pub(super) index: u16,
    pub(super) guest: Arc<Guest>,
    pub(super) addresses: Addresses,
    pub(super) places: u16,
    /// Where to go on, if no record says so.
    pub(super) base: u16,
    pub(super) event_index: bool,
    pub(super) enabled: bool,
    pub(super) kick: OwnedFd,
    pub(super) call: Option<Rc<Signal>>,
    pub(super) error: Option<Rc<Signal>>,
    pub(super) record: Option<RingRecord>,
    /// Whether each write has to be durable when it is answered.
    pub(super) write_through: Rc<Cell<bool>>,
}

/// Why a ring cannot begin, or is not looked at any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("its parts are not in the guest's memory, or not aligned")]
    Misplaced,
    #[error("it has more requests than places")]
    Overrun,
    #[error("descriptor {0} is given again before it was answered")]
    Twice(u16),
    #[error("{0}")]
    Chain(#[from] Malformed),
    #[error("{0}")]
    Queue(#[from] virtio_queue::Error),
    #[error("its event cannot be waited for: {0}")]
    Event(#[from] std::io::Error),
}

/// A ring that runs.
#[derive(Debug)]
pub(super) struct Ring {
    shared: Rc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Requests are taken.
    Open,
    /// None are taken until it is enabled.
    Disabled,
    /// None are taken any more; it ends when none is in flight.
    Ending,
}

struct Shared {
    disk: Rc<Disk>,
    index: u16,
    wires: RefCell<Wires>,
    done: RefCell<Vec<Done>>,
    /// Requests in flight that the volume could not do for now.
    aside: RefCell<Vec<Job>>,
    wake: Notify,
    mode: Cell<Mode>,
    broken: Cell<bool>,
    /// The guest's memory is, for now, without the ring.
    away: Cell<bool>,
    /// Nobody is there any more to be answered, and the memory may be another guest's.
    deaf: Cell<bool>,
    in_flight: Cell<usize>,
    write_through: Rc<Cell<bool>>,
}

/// What joins us to the guest.
struct Wires {
    queue: Queue,
    /// The table that the queue was placed in last.
    guest: Arc<Guest>,
    call: Option<Rc<Signal>>,
    error: Option<Rc<Signal>>,
    record: Option<RingRecord>,
    /// Which descriptors begin requests in flight.
    taken: Vec<bool>,
    /// Whether something has been put back that the guest was not notified of.
    untold: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("index", &self.index)
            .field("mode", &self.mode)
            .field("broken", &self.broken)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

/// A request in flight, and the memory that it was taken from.
struct Job {
    taken: Taken,
    guest: Arc<Guest>,
}

/// A request that has been done.
struct Done {
    job: Job,
    outcome: Result<Given, Undone>,
}

/// Why a request has given nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undone {
    /// It has failed, and is answered so.
    Answered(Status),
    /// It is not answered: whoever serves the ring next does it.
    Left,
}

impl From<Status> for Undone {
    fn from(status: Status) -> Self {
        Self::Answered(status)
    }
}

/// What a request has given.
enum Given {
    Nothing,
    Data(Bufs),
    Name,
}

impl Ring {
    /// Begins a ring, with what was in flight before if there is a record of it.
    pub(super) fn start(core: &Core, start: Start) -> Result<Self, Broken> {
        let kick = core.event(start.kick)?;
        let mut queue = Queue::new(super::MAX_RING_SIZE)?;
        queue.try_set_size(start.places)?;
        queue.set_event_idx(start.event_index);
        place(&mut queue, &start.guest, start.addresses)?;
        let used = queue.used_idx(&*start.guest, Ordering::Acquire)?.0;
        queue.set_next_used(used);
        queue.set_next_avail(start.base);
        let mut record = start.record;
        let before = record.as_mut().map(|record| record.resume(used));
        let wires = Wires {
            queue,
            guest: start.guest,
            call: start.call,
            error: start.error,
            record,
            taken: vec![false; start.places.into()],
            untold: false,
        };
        // Whoever served this ring before may have ended between an answer and its notification.
        if let Some(call) = &wires.call {
            call.give();
        }
        let shared = Rc::new(Shared {
            disk: start.disk,
            index: start.index,
            wires: RefCell::new(wires),
            done: RefCell::default(),
            aside: RefCell::default(),
            wake: Notify::new(),
            mode: Cell::new(if start.enabled { Mode::Open } else { Mode::Disabled }),
            broken: Cell::new(false),
            away: Cell::new(false),
            deaf: Cell::new(false),
            in_flight: Cell::new(0),
            write_through: start.write_through,
        });
        let again = before.map(|before| shared.take_again(&before, used)).unwrap_or_default();
        let task = spawn_local(Rc::clone(&shared).run(kick, again));
        Ok(Self { shared, task })
    }

    /// Takes requests, or none for now.
    pub(super) fn enable(&self, enable: bool) {
        if self.shared.mode.get() != Mode::Ending {
            self.shared.mode.set(if enable { Mode::Open } else { Mode::Disabled });
            self.shared.wake.notify_one();
        }
    }

    /// Whom to notify from now on. He is notified at once: what came before may have been told to nobody.
    pub(super) fn set_call(&self, call: Option<Rc<Signal>>) {
        if let Some(call) = &call {
            call.give();
        }
        self.shared.wires.borrow_mut().call = call;
    }

    /// Whom to tell of errors from now on.
    pub(super) fn set_error(&self, error: Option<Rc<Signal>>) {
        self.shared.wires.borrow_mut().error = error;
    }

    /// The guest's memory is another table. What is in flight keeps the one that it was taken under, and a ring of which
    /// there is a part that the new one lacks keeps its own for the answers: monitors take regions away and add them again,
    /// in other pieces, while the guest runs. It takes nothing before a table has all of it.
    pub(super) fn remap(&self, guest: &Arc<Guest>, addresses: Option<Addresses>) {
        let wires = &mut *self.shared.wires.borrow_mut();
        let before = Addresses::of(&wires.queue);
        let placed = addresses.ok_or(Broken::Misplaced);
        let placed = placed.and_then(|at| place(&mut wires.queue, guest, at));
        let was_away = self.shared.away.replace(placed.is_err());
        match placed {
            Ok(()) => wires.guest = Arc::clone(guest),
            Err(why) => {
                if !was_away {
                    tracing::info!(ring = self.shared.index, %why, "a ring waits for its memory");
                }
                // It was valid there.
                if let Err(why) = place(&mut wires.queue, &wires.guest, before) {
                    self.shared.breaks(wires, &why);
                }
            }
        }
        // The guest may have kicked meanwhile.
        self.shared.wake.notify_one();
    }

    /// Answers nothing any more, whatever is in flight, and takes no more: nobody is there, and the memory may be
    /// somebody else's by now.
    pub(super) fn mute(&self) {
        self.shared.deaf.set(true);
        self.enable(false);
    }

    /// Takes no more, waits until all that is in flight has been answered, and says where the ring has come to.
    pub(super) async fn stop(self) -> u16 {
        self.shared.mode.set(Mode::Ending);
        self.shared.wake.notify_one();
        if self.task.await.is_err() {
            tracing::error!(ring = self.shared.index, "a ring ended by a panic");
        }
        self.shared.wires.borrow().queue.next_avail()
    }
}

/// Puts a queue's parts where they are, if they are all there.
fn place(queue: &mut Queue, guest: &Guest, at: Addresses) -> Result<(), Broken> {
    queue.set_ready(false);
    queue.try_set_desc_table_address(at.table)?;
    queue.try_set_avail_ring_address(at.available)?;
    queue.try_set_used_ring_address(at.used)?;
    queue.set_ready(true);
    if queue.is_valid(guest) { Ok(()) } else { Err(Broken::Misplaced) }
}

impl Shared {
    async fn run(self: Rc<Self>, kick: Event, again: Vec<Job>) {
        again.into_iter().for_each(|job| self.begin(job));
        let mut kicks = true;
        loop {
            self.leave_aside();
            let more = self.take_some();
            self.answer();
            self.notify();
            if self.mode.get() == Mode::Ending && self.in_flight.get() == 0 {
                return;
            }
            if more || self.has_more() {
                give_way().await;
                continue;
            }
            let kicked = async {
                match kicks {
                    true => kick.given().await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.wake.notified() => {}
                () = self.disk.may_try(), if self.is_waiting() => self.begin_again(),
                kicked = kicked => if let Err(e) = kicked {
                    kicks = false;
                    self.breaks(&mut self.wires.borrow_mut(), &Broken::Event(e));
                },
            }
        }
    }

    /// Whether nothing is to be written to the guest's memory any more, nor read from it.
    fn is_deaf(&self) -> bool {
        self.deaf.get() || self.disk.is_cut()
    }

    fn is_open(&self) -> bool {
        let taken = self.mode.get() == Mode::Open && !self.disk.is_ending();
        taken && !self.broken.get() && !self.away.get() && !self.is_waiting()
    }

    /// Whether requests wait for the volume to be there again.
    fn is_waiting(&self) -> bool {
        !self.aside.borrow().is_empty()
    }

    /// Begins what the volume could not do, in the order in which it said so.
    fn begin_again(self: &Rc<Self>) {
        self.leave_aside();
        self.aside.take().into_iter().for_each(|job| self.begin(job));
    }

    /// Leaves what waits to whoever serves the guest next, once nobody waits here: it is not answered, and stays in the
    /// record.
    fn leave_aside(&self) {
        if self.deaf.get() || self.disk.is_ending() {
            let left = self.aside.take();
            self.in_flight.update(|n| n - left.len());
        }
    }

    /// Takes requests; whether there may be more of them.
    fn take_some(self: &Rc<Self>) -> bool {
        for _ in 0..BATCH {
            if !self.is_open() {
                return false;
            }
            let popped = self.pop(&mut self.wires.borrow_mut());
            match popped {
                Ok(Some(job)) => self.begin(job),
                Ok(None) => return false,
                Err(why) => self.breaks(&mut self.wires.borrow_mut(), &why),
            }
        }
        true
    }

    /// Whether something has come since the last look. If not, the guest kicks when it does.
    fn has_more(&self) -> bool {
        if !self.is_open() {
            return false;
        }
        let wires = &mut *self.wires.borrow_mut();
        let enabled = wires.queue.enable_notification(&*wires.guest);
        enabled.unwrap_or_else(|e| {
            self.breaks(wires, &e.into());
            false
        })
    }

    fn pop(&self, wires: &mut Wires) -> Result<Option<Job>, Broken> {
        let guest = Arc::clone(&wires.guest);
        let next = wires.queue.next_avail();
        if wires.queue.avail_idx(&*guest, Ordering::Acquire)?.0 == next {
            return Ok(None);
        }
        if self.in_flight.get() >= wires.taken.len() {
            return Err(Broken::Overrun);
        }
        let mut available = wires.queue.iter(&*guest)?;
        let head = available.next().ok_or(Broken::Misplaced)?.head_index();
        let job = self.take_at(wires, head)?;
        if let Some(record) = &mut wires.record {
            record.take(head);
        }
        Ok(Some(job))
    }

    /// Takes the request that begins at `head`.
    fn take_at(&self, wires: &mut Wires, head: u16) -> Result<Job, Broken> {
        let taken = wires.taken.get_mut(usize::from(head)).ok_or(Malformed::Index(head))?;
        if *taken {
            return Err(Broken::Twice(head));
        }
        let guest = Arc::clone(&wires.guest);
        let table = (GuestAddress(wires.queue.desc_table()), wires.queue.size());
        let request = take(&guest, table, head, &self.disk.shape())?;
        *taken = true;
        self.in_flight.update(|n| n + 1);
        Ok(Job { taken: request, guest })
    }

    /// Takes again what was in flight when somebody else served this ring.
    fn take_again(&self, before: &[u16], used: u16) -> Vec<Job> {
        let wires = &mut *self.wires.borrow_mut();
        let count = u16::try_from(before.len()).unwrap_or(u16::MAX);
        wires.queue.set_next_avail(used.wrapping_add(count));
        if count > 0 {
            tracing::info!(
                ring = self.index,
                requests = count,
                "doing again what was not answered"
            );
        }
        let mut jobs = Vec::new();
        for &head in before {
            match self.take_at(wires, head) {
                Ok(job) => jobs.push(job),
                Err(why) => {
                    self.breaks(wires, &why);
                    break;
                }
            }
        }
        jobs
    }

    /// No more is taken. The guest's driver has to begin anew; what is in flight is answered.
    fn breaks(&self, wires: &mut Wires, why: &Broken) {
        if !self.broken.replace(true) {
            tracing::warn!(ring = self.index, %why, "the guest has broken a ring; it is not served any more");
            if let Some(error) = &wires.error {
                error.give();
            }
        }
    }

    /// Has the volume do a request.
    fn begin(self: &Rc<Self>, job: Job) {
        let fua = self.write_through.get();
        let request = match &job.taken.command {
            Err(status) => {
                let status = *status;
                return self.end(job, Err(status.into()));
            }
            Ok(Command::Identify) => return self.end(job, Ok(Given::Name)),
            Ok(Command::Flush) => Request::Flush,
            Ok(Command::Discard(ranges)) => Request::Unmap { ranges: ranges.clone() },
            Ok(Command::Zero { range, unmap }) => {
                Request::Zero { range: *range, unmap: *unmap, fua }
            }
            Ok(Command::Read(range)) if range.count <= self.disk.part_blocks => {
                Request::Read { range: *range }
            }
            Ok(Command::Write(range)) if range.count <= self.disk.part_blocks => {
                let (at, bytes) = (range.at, job.taken.data.len() as usize);
                let Some(credit) = self.disk.account.try_credit(bytes, Class::Read) else {
                    return self.begin_in_parts(job);
                };
                match fetch(&job, (0, bytes), &credit) {
                    Ok(data) => Request::Write { at, data, fua },
                    Err(status) => return self.end(job, Err(status.into())),
                }
            }
            Ok(Command::Read(_) | Command::Write(_)) => return self.begin_in_parts(job),
        };
        let shared = Rc::clone(self);
        self.disk.start(request, move |result| shared.ended(job, result.map(Given::Data)));
    }

    fn begin_in_parts(self: &Rc<Self>, job: Job) {
        let shared = Rc::clone(self);
        spawn_local(async move {
            match shared.do_in_parts(&job).await {
                Ok(done) => shared.ended(job, done.map(|()| Given::Nothing)),
                Err(status) => shared.end(job, Err(status.into())),
            }
        });
    }

    /// Reads or writes one part after the other: what the volume says, if it comes to that.
    async fn do_in_parts(&self, job: &Job) -> Result<Result<(), Failure>, Status> {
        let (range, writes) = match job.taken.command {
            Ok(Command::Read(range)) => (range, false),
            Ok(Command::Write(range)) => (range, true),
            _ => return Err(Status::Unsupported),
        };
        let Disk { volume, account, part_blocks: most, .. } = &*self.disk;
        let each = u64::from(volume.info().block_size);
        let mut done = 0;
        while done < range.count {
            // Its memory may be somebody else's by now: neither written to, nor to the disk.
            if self.is_deaf() {
                return Err(Status::Failed);
            }
            let part = Blocks::new(Lba(range.at.0 + done), (*most).min(range.count - done));
            let (skip, bytes) = (done * each, (part.count * each) as usize);
            let result = if writes {
                let credit = account.credit(bytes, Class::Read).await;
                let credit = credit.map_err(|_| Status::Failed)?;
                if self.is_deaf() {
                    return Err(Status::Failed);
                }
                let data = fetch(job, (skip, bytes), &credit)?;
                drop(credit);
                let write = Request::Write { at: part.at, data, fua: self.write_through.get() };
                self.disk.execute(write).await
            } else {
                self.disk.execute(Request::Read { range: part }).await
            };
            match result {
                Ok(data) if !writes && !self.is_deaf() => bring(job, skip, &data)?,
                Ok(_) => {}
                Err(why) => return Ok(Err(why)),
            }
            done += part.count;
        }
        Ok(Ok(()))
    }

    /// The volume has done a request, or cannot do it: for now, or at all.
    fn ended(&self, job: Job, result: Result<Given, Failure>) {
        let failure = match result {
            Ok(given) => return self.end(job, Ok(given)),
            Err(failure) => failure,
        };
        // A guest is told nothing of a failure but that it is one (5.2.6).
        tracing::debug!(%failure, "a request of the guest has failed");
        match self.disk.fate(&failure) {
            Fate::Fails => self.end(job, Err(Status::Failed.into())),
            Fate::Left => self.end(job, Err(Undone::Left)),
            Fate::Waits => {
                self.disk.wait_a_little();
                self.aside.borrow_mut().push(job);
                self.wake.notify_one();
            }
        }
    }

    /// A request has been done: it is answered when the ring's task has its turn, with all others.
    fn end(&self, job: Job, outcome: Result<Given, Undone>) {
        self.done.borrow_mut().push(Done { job, outcome });
        self.wake.notify_one();
    }

    /// Answers what has been done.
    fn answer(&self) {
        let done = self.done.take();
        if done.is_empty() {
            return;
        }
        self.in_flight.update(|n| n - done.len());
        if self.is_deaf() {
            return;
        }
        let wires = &mut *self.wires.borrow_mut();
        for Done { job, outcome } in done {
            let outcome = match outcome {
                Ok(given) => Ok(given),
                Err(Undone::Answered(status)) => Err(status),
                Err(Undone::Left) => continue,
            };
            let answered = self.put_back(wires, &job, outcome);
            if let Err(why) = answered {
                self.breaks(wires, &why);
            }
        }
    }

    fn put_back(
        &self,
        wires: &mut Wires,
        job: &Job,
        outcome: Result<Given, Status>,
    ) -> Result<(), Broken> {
        let Taken { head, status: at, ref data, .. } = job.taken;
        let brought = outcome.and_then(|given| match given {
            Given::Nothing => Ok(()),
            Given::Data(bytes) => bring(job, 0, &bytes),
            Given::Name => {
                let name = &self.disk.serial[..ID_BYTES.min(data.len() as usize)];
                data.write(&job.guest, 0, name).map_err(|_| Status::Failed)
            }
        });
        let (status, bytes) = match brought {
            Ok(()) => (Status::Ok, job.taken.writable_bytes()),
            // What of the data was written nobody can say: of the bytes from the start, none.
            Err(status) => (status, 0),
        };
        let told = job.guest.write_obj(status as u8, at);
        told.map_err(|_| Malformed::Outside { at: at.0, bytes: 1 })?;
        if let Some(taken) = wires.taken.get_mut(usize::from(head)) {
            *taken = false;
        }
        if let Some(record) = &wires.record {
            record.answering(head);
        }
        wires.queue.add_used(&*wires.guest, head, bytes)?;
        if let Some(record) = &wires.record {
            record.answered(head, wires.queue.next_used());
        }
        wires.untold = true;
        Ok(())
    }

    /// Notifies the guest of answers, if it wants that.
    fn notify(&self) {
        let wires = &mut *self.wires.borrow_mut();
        if !std::mem::take(&mut wires.untold) || self.is_deaf() {
            return;
        }
        // One notification too many does no harm.
        let wanted = wires.queue.needs_notification(&*wires.guest).unwrap_or(true);
        if let Some(call) = wires.call.as_ref().filter(|_| wanted) {
            call.give();
        }
    }
}

/// A copy of the guest's data from `skip` on.
fn fetch(job: &Job, (skip, bytes): (u64, usize), credit: &Credit) -> Result<Bufs, Status> {
    let (mut copy, mut at) = (credit.alloc(bytes), skip);
    for piece in &mut copy {
        job.taken.data.read(&job.guest, at, piece).map_err(|_| Status::Failed)?;
        at += piece.len() as u64;
    }
    Ok(copy.into())
}

/// Copies into the guest's data from `skip` on.
fn bring(job: &Job, skip: u64, data: &Bufs) -> Result<(), Status> {
    let mut at = skip;
    for piece in data.iter() {
        job.taken.data.write(&job.guest, at, piece).map_err(|_| Status::Failed)?;
        at += piece.len() as u64;
    }
    Ok(())
}
