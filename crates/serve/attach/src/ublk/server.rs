//! Requests of a device: each of its places has a task, all of them on the volume's core.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::io;
use std::rc::Rc;

use block::{Account, Blocks, Bufs, Class, Failure, Request};
use rt::ublk::{Descriptor, Device};
use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use volume::{Caller, Gate, Volume};

use super::abi::DeviceInfo;
use super::device::{Door, ServeError};
use super::names;
use super::request::{Command, Shape, decode};
use crate::Absence;
use crate::failure::errno;

/// A place for a request: queue and tag.
type Place = (u16, u16);

/// How it has ended with a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// There is no device any more.
    Removed,
    /// It is still there, and what is asked of it waits for the next process.
    Left {
        /// Who uses it, as far as that can be told; nobody need, where the volume is out of reach.
        user: Option<String>,
    },
}

/// Why a request is not done.
enum Undone {
    Failed(Failure),
    Told(Errno),
}

impl From<Failure> for Undone {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<io::Error> for Undone {
    fn from(error: io::Error) -> Self {
        Self::Told(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// What all places of a device share.
pub(super) struct Shared {
    door: Door,
    device: Device,
    volume: Rc<Volume>,
    caller: Rc<Caller>,
    account: Account,
    absence: Absence,
    /// Longest part of a request that is done as one, in bytes.
    part_bytes: u32,
    info: DeviceInfo,
    /// The kernel reads the partition table, and has to come to an end of it: whoever is killed meanwhile never ends (RFD
    /// 0023, 11). So that is answered also where the volume is out of reach.
    starting: Cell<bool>,
    /// Nothing more is begun.
    closing: Cell<bool>,
    in_flight: Cell<usize>,
    idle: Notify,
    /// Why the driver has ended a place first.
    ended: RefCell<Option<io::Error>>,
    told: Notify,
}

/// A device that is there.
pub struct Serving {
    shared: Rc<Shared>,
    places: JoinSet<()>,
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("device", &self.device()).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        door: Door,
        device: Device,
        (volume, absence): (&Rc<Volume>, &Absence),
        part_bytes: u32,
        info: &DeviceInfo,
    ) -> Self {
        Self {
            account: door.core.pool().account(),
            starting: Cell::new(!door.is_left()),
            door,
            device,
            volume: Rc::clone(volume),
            caller: Gate::node(),
            absence: absence.clone(),
            part_bytes,
            info: *info,
            closing: Cell::new(false),
            in_flight: Cell::new(0),
            idle: Notify::new(),
            ended: RefCell::default(),
            told: Notify::new(),
        }
    }

    fn shape(&self) -> Shape {
        let info = self.volume.info();
        Shape {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: self.door.options.read_only || info.read_only,
            discards: info.unmap_granularity_blocks > 0,
            max_bytes: self.info.max_bytes,
        }
    }

    /// Serves one place until the device goes, or nothing more is begun.
    async fn serve(self: Rc<Self>, place: Place) {
        let mut next = self.device.next(place, None);
        loop {
            if let Err(error) = next.await {
                self.ended.borrow_mut().get_or_insert(error);
                self.told.notify_one();
                return;
            }
            // What has come now is asked of the next process.
            if self.closing.get() {
                return;
            }
            let Some(asked) = self.device.descriptor(place) else { return };
            self.in_flight.update(|n| n + 1);
            let answer = self.carry_out(place, &asked).await;
            let answered = answer.map(|answer| self.device.next(place, Some(answer)));
            self.in_flight.update(|n| n - 1);
            if self.in_flight.get() == 0 {
                self.idle.notify_one();
            }
            match answered {
                Some(answered) => next = answered,
                // Likewise.
                None => return,
            }
        }
    }

    /// What a request is answered with: bytes, or an error's negative number. `None` where the volume is out of reach.
    async fn carry_out(&self, place: Place, asked: &Descriptor) -> Option<i32> {
        let done = match decode(asked, &self.shape()) {
            Ok(command) => self.execute(place, command).await,
            Err(errno) => Err(Undone::Told(errno)),
        };
        let errno = match done {
            Ok(bytes) => return Some(i32::try_from(bytes).unwrap_or(i32::MAX)),
            Err(Undone::Failed(failure))
                if self.absence.explains(&failure) && !self.starting.get() =>
            {
                return None;
            }
            Err(Undone::Failed(failure)) => {
                tracing::debug!(?asked, %failure, "a request has failed");
                errno(&failure)
            }
            Err(Undone::Told(errno)) => {
                tracing::debug!(?asked, %errno, "a request is refused");
                errno
            }
        };
        Some(-errno.raw_os_error())
    }

    /// Does a request; bytes of data that it has moved.
    async fn execute(&self, place: Place, command: Command) -> Result<u64, Undone> {
        match command {
            Command::Read(range) => self.read(place, range).await,
            Command::Write { range, fua } => self.write(place, range, fua).await,
            Command::Flush => self.ask(Request::Flush).await.map(|_| 0),
            Command::Discard(range) => {
                self.ask(Request::Unmap { ranges: vec![range] }).await.map(|_| 0)
            }
            Command::Zero { range, unmap, fua } => {
                self.ask(Request::Zero { range, unmap, fua }).await.map(|_| 0)
            }
        }
    }

    async fn read(&self, place: Place, range: Blocks) -> Result<u64, Undone> {
        let mut done = 0;
        for part in self.parts(range) {
            let data = self.ask(Request::Read { range: part }).await?;
            for piece in data.iter() {
                self.device.bring(place, done, piece)?;
                done += piece.len() as u64;
            }
        }
        Ok(done)
    }

    async fn write(&self, place: Place, range: Blocks, fua: bool) -> Result<u64, Undone> {
        let each = u64::from(self.volume.info().block_size);
        let mut done = 0;
        for part in self.parts(range) {
            let bytes = usize::try_from(part.count * each).unwrap_or(usize::MAX);
            // The request holds nothing yet, and waits for nobody but the pool.
            let credit = self.account.credit(bytes, Class::Read).await;
            let credit = credit.map_err(|_| Undone::Told(Errno::NOMEM))?;
            let mut copy = credit.alloc(bytes);
            for piece in &mut copy {
                self.device.fetch(place, done, piece)?;
                done += piece.len() as u64;
            }
            drop(credit);
            self.ask(Request::Write { at: part.at, data: copy.into(), fua }).await?;
        }
        Ok(done)
    }

    fn parts(&self, range: Blocks) -> impl Iterator<Item = Blocks> + use<> {
        range.pieces(u64::from(self.part_bytes / self.volume.info().block_size))
    }

    async fn ask(&self, request: Request) -> Result<Bufs, Undone> {
        Ok(self.volume.execute_for(&self.caller, request, &self.account).await?)
    }

    /// Waits until nothing is in flight.
    async fn is_idle(&self) {
        while self.in_flight.get() > 0 {
            self.idle.notified().await;
        }
    }

    /// Waits until the driver has ended a place.
    async fn ended(&self) -> io::Error {
        loop {
            if let Some(error) = self.ended.borrow_mut().take() {
                return error;
            }
            self.told.notified().await;
        }
    }
}

impl Serving {
    /// Serves all places, and has the kernel show the device.
    pub(super) async fn begin(
        shared: Shared,
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
        let mut serving = Self { shared, places };
        let Shared { door, info, absence, starting, .. } = &*serving.shared;
        let id = info.id;
        let started = tokio::select! {
            biased;
            started = door.start(id) => started,
            why = serving.shared.ended() => {
                Err(ServeError::System { what: "take requests of the block device", why })
            }
        };
        starting.set(starting.get() && absence.is_certain());
        if let Err(e) = started {
            serving.places.shutdown().await;
            let Some(Shared { door, device, info, .. }) = Rc::into_inner(serving.shared) else {
                return Err(e);
            };
            drop(device);
            return Err(door.give_up(&info, e).await);
        }
        let again = door.is_left();
        tracing::info!(device = %serving.device(), queues, depth, bytes, again, "a block device is there");
        serving.link(names::link).await;
        Ok(serving)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> String {
        names::block(self.shared.info.id).display().to_string()
    }

    /// Serves the device until `stop` comes to its end. Then nothing more is begun; what is in flight is answered; and the
    /// device is taken away if nobody uses it, or else left to the next process. It is left as well, with what was not
    /// answered, when the volume is [out of reach](Absence). The volume is the caller's to close.
    ///
    /// # Errors
    /// [`ServeError`]: somebody has taken the device away; it cannot be.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<End, ServeError> {
        let Shared { door, absence, starting, .. } = &*self.shared;
        tokio::select! {
            biased;
            () = stop => {}
            // Nobody has used it yet.
            () = absence.certain(), if starting.get() => return self.remove(None).await,
            () = absence.certain() => return Ok(self.leave(None).await),
            why = self.shared.ended() => {
                let device = names::block(self.shared.info.id);
                self.leave(None).await;
                return Err(ServeError::TakenAway { device, why });
            }
            () = door.driver.drive() => {}
        }
        let id = self.shared.info.id;
        let held = door.core.offload(move || match names::hold(id) {
            Ok(held) => names::opener(id).map_or(Ok(held), |user| Err(Some(user))),
            Err(e) if e.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                Err(Some(names::opener(id).unwrap_or_else(|| "the kernel (mounted?)".to_owned())))
            }
            Err(error) => {
                tracing::warn!(%error, "nobody can say whether the block device is in use");
                Err(None)
            }
        });
        let held = tokio::select! {
            biased;
            held = held => held.unwrap_or(Err(None)),
            () = absence.certain() => Err(None),
            () = door.driver.drive() => Err(None),
        };
        match held {
            Ok(held) => self.remove(Some(held)).await,
            Err(user) => Ok(self.leave(user).await),
        }
    }

    /// Leaves the device to the next process.
    async fn leave(mut self, user: Option<String>) -> End {
        let Shared { door, absence, closing, .. } = &*self.shared;
        closing.set(true);
        tokio::select! {
            biased;
            () = self.shared.is_idle() => {}
            () = absence.certain() => {}
            () = door.driver.drive() => {}
        }
        // With the answers that have been given.
        door.driver.turn();
        self.places.shutdown().await;
        End::Left { user }
    }

    /// Takes the device away, and its name first, as its number is free then. Nobody else begins to use it while it is held.
    async fn remove(mut self, held: Option<File>) -> Result<End, ServeError> {
        let id = self.shared.info.id;
        self.link(names::unlink).await;
        self.shared.door.stop(id).await?;
        // It would wait for the core, which need not wait for it.
        self.shared.door.core.offload(move || drop(held)).await;
        self.places.shutdown().await;
        if let Some(Shared { door, device, .. }) = Rc::into_inner(self.shared) {
            drop(device);
            door.delete(id).await?;
        }
        Ok(End::Removed)
    }

    /// Gives the device its name, or takes that away. A device is one without it.
    async fn link(&self, how: fn(&std::path::Path, u32) -> io::Result<()>) {
        let Shared { door, info, .. } = &*self.shared;
        let (Some(at), id) = (door.options.link.clone(), info.id) else { return };
        let done = door.core.offload(move || how(&at, id).map_err(|e| (at, e))).await;
        if let Some(Err((at, error))) = done {
            tracing::warn!(link = %at.display(), %error, "the name of the block device is not what it should be");
        }
    }
}
