//! Attaches a volume to a device and serves it: each of its queue slots has a task, all on the
//! volume's core.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::io;
use std::rc::Rc;

use block::{Account, Blocks, Bufs, Lba, MemoryClass, Request, RequestError};
use rt::ublk::{Descriptor, Device};
use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use volume::{ReservationGate, Volume, VolumeClient};

use super::abi::{DeviceInfo, Parameters};
use super::device::{DeviceControl, ServeError, system};
use super::names;
use super::request::{Command, DeviceLimits, decode};
use crate::OutageSignal;
use crate::failure::errno;
use crate::request_split::part_blocks;

/// A slot for a request: queue and tag.
type QueueTag = (u16, u16);

/// How serving a device ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServeEnd {
    /// The device was removed.
    Removed,
    /// The device remains, and its requests wait for the next process.
    LeftForRecovery {
        /// Its user, if known; there may be none if the volume is unreachable.
        user: Option<String>,
    },
}

/// Why a request was not executed.
enum UblkError {
    Failed(RequestError),
    Errno(Errno),
}

impl From<RequestError> for UblkError {
    fn from(failure: RequestError) -> Self {
        Self::Failed(failure)
    }
}

impl From<io::Error> for UblkError {
    fn from(error: io::Error) -> Self {
        Self::Errno(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// State shared by all slots of a device.
struct UblkShared {
    control: DeviceControl,
    device: Device,
    volume: Rc<Volume>,
    caller: Rc<VolumeClient>,
    account: Account,
    outage: OutageSignal,
    /// Longest part of a request that is executed at once, in bytes.
    part_bytes: u32,
    info: DeviceInfo,
    /// The kernel is reading the partition table and has to finish: a process killed meanwhile
    /// never ends (RFD 0023, 11). So these reads are answered even if the volume is unreachable.
    starting: Cell<bool>,
    /// No new requests are started.
    closing: Cell<bool>,
    in_flight: Cell<usize>,
    idle: Notify,
    /// The driver's first error on a slot.
    driver_error: RefCell<Option<io::Error>>,
    driver_ended: Notify,
}

/// A served device.
pub struct UblkServer {
    shared: Rc<UblkShared>,
    tasks: JoinSet<()>,
}

impl fmt::Debug for UblkServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UblkServer").field("device", &self.device()).finish_non_exhaustive()
    }
}

impl UblkShared {
    fn new(
        door: DeviceControl,
        device: Device,
        (volume, absence): (&Rc<Volume>, &OutageSignal),
        part_bytes: u32,
        info: &DeviceInfo,
    ) -> Self {
        Self {
            account: door.core.buffer_pool().account(),
            starting: Cell::new(!door.has_existing()),
            control: door,
            device,
            volume: Rc::clone(volume),
            caller: ReservationGate::node_client(),
            outage: absence.clone(),
            part_bytes,
            info: *info,
            closing: Cell::new(false),
            in_flight: Cell::new(0),
            idle: Notify::new(),
            driver_error: RefCell::default(),
            driver_ended: Notify::new(),
        }
    }

    fn limits(&self) -> DeviceLimits {
        let info = self.volume.info();
        DeviceLimits {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: self.control.options.read_only || info.read_only,
            can_discard: info.unmap_granularity_blocks > 0,
            max_bytes: self.info.max_bytes,
        }
    }

    /// Serves one slot until the device is removed or no new requests are started.
    async fn serve(self: Rc<Self>, slot: QueueTag) {
        let mut next = self.device.answer_and_fetch(slot, None);
        loop {
            if let Err(error) = next.await {
                self.driver_error.borrow_mut().get_or_insert(error);
                self.driver_ended.notify_one();
                return;
            }
            // This request is reissued to the next process.
            if self.closing.get() {
                return;
            }
            let Some(descriptor) = self.device.descriptor(slot) else { return };
            self.in_flight.update(|n| n + 1);
            let answer = self.respond(slot, &descriptor).await;
            let answered = answer.map(|answer| self.device.answer_and_fetch(slot, Some(answer)));
            self.in_flight.update(|n| n - 1);
            if self.in_flight.get() == 0 {
                self.idle.notify_one();
            }
            match answered {
                Some(answered) => next = answered,
                // As above.
                None => return,
            }
        }
    }

    /// The result of a request: bytes, or a negative error number. `None` if the volume is
    /// unreachable.
    async fn respond(&self, slot: QueueTag, descriptor: &Descriptor) -> Option<i32> {
        let done = match decode(descriptor, &self.limits()) {
            Ok(command) => self.execute(slot, command).await,
            Err(errno) => Err(UblkError::Errno(errno)),
        };
        let errno = match done {
            Ok(bytes) => return Some(i32::try_from(bytes).unwrap_or(i32::MAX)),
            Err(UblkError::Failed(failure))
                if self.outage.set_if_cause(&failure) && !self.starting.get() =>
            {
                return None;
            }
            Err(UblkError::Failed(failure)) => {
                tracing::debug!(asked = ?descriptor, %failure, "a request has failed");
                errno(&failure)
            }
            Err(UblkError::Errno(errno)) => {
                tracing::debug!(asked = ?descriptor, %errno, "a request is refused");
                errno
            }
        };
        Some(-errno.raw_os_error())
    }

    /// Executes a request. Returns the bytes of data transferred.
    async fn execute(&self, slot: QueueTag, command: Command) -> Result<u64, UblkError> {
        match command {
            Command::Read(range) => self.read(slot, range).await,
            Command::Write { range, fua } => self.write(slot, range, fua).await,
            Command::Flush => self.submit(Request::Flush).await.map(|_| 0),
            Command::Discard(range) => {
                self.submit(Request::Unmap { ranges: vec![range] }).await.map(|_| 0)
            }
            Command::Zero { range, unmap, fua } => {
                self.submit(Request::Zero { range, unmap, fua }).await.map(|_| 0)
            }
        }
    }

    async fn read(&self, slot: QueueTag, range: Blocks) -> Result<u64, UblkError> {
        let mut done = 0;
        for part in self.parts(range) {
            let data = self.submit(Request::Read { range: part }).await?;
            for piece in data.iter() {
                self.device.write_request_data(slot, done, piece)?;
                done += piece.len() as u64;
            }
        }
        Ok(done)
    }

    async fn write(&self, slot: QueueTag, range: Blocks, fua: bool) -> Result<u64, UblkError> {
        let each = u64::from(self.volume.info().block_size);
        let mut done = 0;
        for part in self.parts(range) {
            let bytes = usize::try_from(part.count * each).unwrap_or(usize::MAX);
            // The request holds no memory yet, so it waits only for the pool.
            let credit = self.account.credit(bytes, MemoryClass::Read).await;
            let credit = credit.map_err(|_| UblkError::Errno(Errno::NOMEM))?;
            let mut copy = credit.alloc(bytes);
            for piece in &mut copy {
                self.device.read_request_data(slot, done, piece)?;
                done += piece.len() as u64;
            }
            drop(credit);
            self.submit(Request::Write { at: part.at, data: copy.into(), fua }).await?;
        }
        Ok(done)
    }

    fn parts(&self, range: Blocks) -> impl Iterator<Item = Blocks> + use<> {
        range.chunks(u64::from(self.part_bytes / self.volume.info().block_size))
    }

    async fn submit(&self, request: Request) -> Result<Bufs, UblkError> {
        Ok(self.volume.execute_for(&self.caller, request, &self.account).await?)
    }

    /// Waits until nothing is in flight.
    async fn wait_idle(&self) {
        while self.in_flight.get() > 0 {
            self.idle.notified().await;
        }
    }

    /// Waits until the driver has ended a slot.
    async fn wait_driver_ended(&self) -> io::Error {
        loop {
            if let Some(error) = self.driver_error.borrow_mut().take() {
                return error;
            }
            self.driver_ended.notified().await;
        }
    }
}

impl DeviceControl {
    /// Creates the device or takes it over; its users are served while the result
    /// [runs](UblkServer::run).
    ///
    /// # Errors
    /// [`ServeError`]; a device that was created is then removed.
    pub async fn attach(
        self,
        volume: &Rc<Volume>,
        absence: &OutageSignal,
    ) -> Result<UblkServer, ServeError> {
        let info = volume.info();
        let part = part_blocks(&info, self.core.buffer_pool());
        let part_bytes = u32::try_from(part).unwrap_or(1).saturating_mul(info.block_size);
        let wanted = Parameters::of(&info, self.options.read_only, part_bytes.max(4096));
        let (made, parameters) = match self.existing() {
            Some(left) => (*left, self.take_over(left, &wanted).await?),
            None => {
                // The kernel reads the partition table at once: check first that the volume
                // answers.
                let first = Request::Read { range: Blocks::new(Lba(0), 1) };
                let read = volume.execute(first, &self.core.buffer_pool().account()).await;
                read.map_err(|e| system("read the volume")(io::Error::other(e)))?;
                (self.create(&wanted, part_bytes.max(4096)).await?, wanted)
            }
        };
        let device = match self.open_char_device(&made).await {
            Ok(device) => device,
            Err(e) => return Err(self.abandon(&made, e).await),
        };
        tracing::debug!(?made, ?parameters, "a block device");
        let shared = UblkShared::new(self, device, (volume, absence), part_bytes, &made);
        UblkServer::start(shared, (made.queues, made.depth), parameters.bytes()).await
    }
}

impl UblkServer {
    /// Serves all slots and has the kernel start the device.
    async fn start(
        shared: UblkShared,
        (queues, depth): (u16, u16),
        bytes: u64,
    ) -> Result<Self, ServeError> {
        let shared = Rc::new(shared);
        let mut places = JoinSet::new();
        for queue in 0..queues {
            for tag in 0..depth {
                places.spawn_local(Rc::clone(&shared).serve((queue, tag)));
            }
        }
        let mut serving = Self { shared, tasks: places };
        let UblkShared { control: door, info, outage: absence, starting, .. } = &*serving.shared;
        let id = info.id;
        let started = tokio::select! {
            biased;
            started = door.start(id) => started,
            why = serving.shared.wait_driver_ended() => {
                Err(ServeError::System { what: "fetch requests of the block device", why })
            }
        };
        starting.set(starting.get() && absence.is_set());
        if let Err(e) = started {
            serving.tasks.shutdown().await;
            let Some(UblkShared { control: door, device, info, .. }) =
                Rc::into_inner(serving.shared)
            else {
                return Err(e);
            };
            drop(device);
            return Err(door.abandon(&info, e).await);
        }
        let again = door.has_existing();
        tracing::info!(device = %serving.device(), queues, depth, bytes, again, "created a block device");
        serving.link(names::link).await;
        Ok(serving)
    }

    /// Path of the device.
    #[must_use]
    pub fn device(&self) -> String {
        names::block_device(self.shared.info.id).display().to_string()
    }

    /// Serves the device until `stop` completes. Then starts no new requests, answers those in
    /// flight, and removes the device if it is unused, or else leaves it to the next process. Also
    /// leaves it, with unanswered requests, when the volume is [unreachable](OutageSignal). The
    /// caller closes the volume.
    ///
    /// # Errors
    /// [`ServeError`]: the device was removed from outside, or removing it failed.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<ServeEnd, ServeError> {
        let UblkShared { control: door, outage: absence, starting, .. } = &*self.shared;
        tokio::select! {
            biased;
            () = stop => {}
            // It has had no user yet.
            () = absence.wait(), if starting.get() => return self.remove(None).await,
            () = absence.wait() => return Ok(self.leave_for_recovery(None).await),
            why = self.shared.wait_driver_ended() => {
                let device = names::block_device(self.shared.info.id);
                self.leave_for_recovery(None).await;
                return Err(ServeError::TakenAway { device, why });
            }
            () = door.driver.run() => {}
        }
        let id = self.shared.info.id;
        let held = door.core.run_blocking(move || match names::open_exclusive(id) {
            Ok(held) => names::find_opener(id).map_or(Ok(held), |user| Err(Some(user))),
            Err(e) if e.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Err(Some(
                names::find_opener(id).unwrap_or_else(|| "the kernel (mounted?)".to_owned()),
            )),
            Err(error) => {
                tracing::warn!(%error, "cannot determine whether the block device is in use");
                Err(None)
            }
        });
        let held = tokio::select! {
            biased;
            held = held => held.unwrap_or(Err(None)),
            () = absence.wait() => Err(None),
            () = door.driver.run() => Err(None),
        };
        match held {
            Ok(held) => self.remove(Some(held)).await,
            Err(user) => Ok(self.leave_for_recovery(user).await),
        }
    }

    /// Leaves the device to the next process.
    async fn leave_for_recovery(mut self, user: Option<String>) -> ServeEnd {
        let UblkShared { control: door, outage: absence, closing, .. } = &*self.shared;
        closing.set(true);
        tokio::select! {
            biased;
            () = self.shared.wait_idle() => {}
            () = absence.wait() => {}
            () = door.driver.run() => {}
        }
        // Submits the answers already given.
        door.driver.submit_now();
        self.tasks.shutdown().await;
        ServeEnd::LeftForRecovery { user }
    }

    /// Removes the device, and its link first, as its number is free afterwards. While `held` is
    /// open, the device gets no new users.
    async fn remove(mut self, held: Option<File>) -> Result<ServeEnd, ServeError> {
        let id = self.shared.info.id;
        self.link(names::unlink).await;
        self.shared.control.stop(id).await?;
        // Closing would block on the core.
        self.shared.control.core.run_blocking(move || drop(held)).await;
        self.tasks.shutdown().await;
        if let Some(UblkShared { control: door, device, .. }) = Rc::into_inner(self.shared) {
            drop(device);
            door.delete(id).await?;
        }
        Ok(ServeEnd::Removed)
    }

    /// Creates or removes the link. The device works without it.
    async fn link(&self, how: fn(&std::path::Path, u32) -> io::Result<()>) {
        let UblkShared { control: door, info, .. } = &*self.shared;
        let (Some(at), id) = (door.options.link.clone(), info.id) else { return };
        let done = door.core.run_blocking(move || how(&at, id).map_err(|e| (at, e))).await;
        if let Some(Err((at, error))) = done {
            tracing::warn!(link = %at.display(), %error, "cannot set the name of the block device");
        }
    }
}
