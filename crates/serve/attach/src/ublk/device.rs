//! The life of a device: found again or made, started, and taken away.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Lba, Request};
use rt::Core;
use rt::ublk::{About, Device, Driver, MAX_REQUESTS};
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout};
use volume::Volume;
use zerocopy::{FromBytes, IntoBytes};

use super::abi::{DeviceInfo, FEATURES, Parameters, State, command, tag_of};
use super::names;
use super::server::{Serving, Shared};
use crate::Absence;
use crate::parts::part_blocks;

/// Requests of a queue, where there are few queues.
const DEPTH: u16 = 128;

/// How long the kernel may take to see that a process has gone (it looks once in 5 s before Linux 6.7), to show a device,
/// and to forget one.
const GRACE: Duration = Duration::from_secs(10);

/// How long a process that lives may take to go, or to start its device.
const LEAVE: Duration = Duration::from_secs(2);

/// Pause between looks.
const PAUSE: Duration = Duration::from_millis(50);

/// No device.
const NONE: u32 = u32::MAX;

/// What is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The volume's identity: by it a device that was left is known again.
    pub identity: u128,
    /// How many queues the device has; the kernel makes no more than there are processors.
    pub queues: u16,
    /// Whether writes are refused, even where the volume takes them.
    pub read_only: bool,
    /// The device's number; the first that is free without.
    pub device: Option<u32>,
    /// A symbolic link to the device, if there is to be one.
    pub link: Option<PathBuf>,
}

impl Options {
    fn word(&self) -> Option<PathBuf> {
        self.link.as_ref().map(|link| names::word(link, self.identity))
    }

    /// Says to the next process that a device was [left](super::End::Left) with nothing in doubt: all that was sent for it
    /// has been answered, and the volume is closed. Without a link nobody is told.
    ///
    /// # Errors
    /// What the system reports. The next process waits then, as after one that was killed.
    pub async fn left_in_order(&self, core: &Core) -> io::Result<()> {
        let Some(at) = self.word() else { return Ok(()) };
        let given = core.offload(move || names::give_word(&at)).await;
        given.unwrap_or_else(|| Err(Errno::CANCELED.into()))
    }
}

/// Why there is no device, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// There is no driver.
    #[error("this machine's kernel has no ublk driver ({} is missing)", names::CONTROL)]
    NoDriver,
    /// Only root may.
    #[error("{} may not be opened: block devices are made by root", names::CONTROL)]
    NotAllowed,
    /// The driver, or io_uring, lacks what is needed.
    #[error(
        "this machine's kernel is too old: its ublk driver or io_uring lacks what Linux 6.5 has"
    )]
    TooOld,
    /// A process serves the volume as a device already.
    #[error("process {pid} serves the volume as {device} already", device = device.display())]
    Served {
        /// The device.
        device: PathBuf,
        /// Who.
        pid: i32,
    },
    /// The volume has a device that was left, with another number than is asked for.
    #[error("the volume is {} already, which waits for a process that serves it", device.display())]
    Elsewhere {
        /// The device.
        device: PathBuf,
    },
    /// The device that was left does not fit.
    #[error("{} was left by another process and cannot be gone on with: {why}", device.display())]
    Differs {
        /// The device.
        device: PathBuf,
        /// Why.
        why: &'static str,
    },
    /// Somebody has taken the device away.
    #[error("{} was taken away: {why}", device.display())]
    TakenAway {
        /// The device.
        device: PathBuf,
        /// What the driver reports.
        why: io::Error,
    },
    /// The system does not do something.
    #[error("cannot {what}: {why}")]
    System {
        /// What.
        what: &'static str,
        /// What it reports.
        why: io::Error,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |why| ServeError::System { what, why }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// The driver, for one volume, and what was left of it.
#[derive(Debug)]
pub struct Door {
    pub(super) core: Core,
    pub(super) driver: Driver,
    pub(super) options: Options,
    left: Option<DeviceInfo>,
    /// Whether who left it had ended in order.
    in_order: bool,
}

impl Door {
    /// Opens the driver, and looks for a device of this volume that a process has left.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn open(core: &Core, options: Options) -> Result<Self, ServeError> {
        let driver =
            Driver::open(core, names::CONTROL.as_ref()).map_err(|why| match why.kind() {
                io::ErrorKind::NotFound => ServeError::NoDriver,
                io::ErrorKind::PermissionDenied => ServeError::NotAllowed,
                // A ring of that kind, or its commands.
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => ServeError::TooOld,
                _ => ServeError::System { what: "open the ublk driver", why },
            })?;
        let mut door = Self { core: core.clone(), driver, options, left: None, in_order: false };
        let (asked, features) = door.ask(command::GET_FEATURES, (NONE, 0), vec![0; 8]).await;
        let features = features.as_chunks::<8>().0.first().map(u64_of);
        match asked {
            Err(e) if is(&e, Errno::PERM) || is(&e, Errno::ACCESS) => {
                return Err(ServeError::NotAllowed);
            }
            Ok(()) if features.is_some_and(|known| known & FEATURES == FEATURES) => {}
            _ => return Err(ServeError::TooOld),
        }
        door.left = door.find().await?;
        if let Some(at) = door.options.word() {
            let taken = core.offload(move || names::take_word(&at)).await;
            door.in_order = taken == Some(true);
        }
        if let (Some(left), Some(wanted)) = (&door.left, door.options.device)
            && left.id != wanted
        {
            return Err(ServeError::Elsewhere { device: names::block(left.id) });
        }
        Ok(door)
    }

    /// Whether a process was here before, and has left its device without having ended in order: what it had sent may still
    /// be carried out.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.is_left() && !self.in_order
    }

    /// Whether there is a device already.
    pub(super) fn is_left(&self) -> bool {
        self.left.is_some()
    }

    /// Makes the device, or takes it over: whoever uses it is served as long as the result
    /// [runs](Serving::run).
    ///
    /// # Errors
    /// [`ServeError`]; a device that was made is none any more then.
    pub async fn begin(
        self,
        volume: &Rc<Volume>,
        absence: &Absence,
    ) -> Result<Serving, ServeError> {
        let info = volume.info();
        let part = part_blocks(&info, self.core.pool());
        let part_bytes = u32::try_from(part).unwrap_or(1).saturating_mul(info.block_size);
        let wanted = Parameters::of(&info, self.options.read_only, part_bytes.max(4096));
        let (made, parameters) = match &self.left {
            Some(left) => (*left, self.take_over(left, &wanted).await?),
            None => {
                // The kernel reads the beginning at once: better a volume that answers.
                let first = Request::Read { range: Blocks::new(Lba(0), 1) };
                let read = volume.execute(first, &self.core.pool().account()).await;
                read.map_err(|e| system("read the volume")(io::Error::other(e)))?;
                (self.make(&wanted, part_bytes.max(4096)).await?, wanted)
            }
        };
        let device = match self.characters(&made).await {
            Ok(device) => device,
            Err(e) => return Err(self.give_up(&made, e).await),
        };
        tracing::debug!(?made, ?parameters, "a block device");
        let shared = Shared::new(self, device, (volume, absence), part_bytes, &made);
        Serving::begin(shared, (made.queues, made.depth), parameters.bytes()).await
    }

    /// Has the kernel show the device, or go on with it. All places have asked for requests, or are about to.
    pub(super) async fn start(&self, id: u32) -> Result<(), ServeError> {
        let (what, how) = match self.is_left() {
            true => ("go on with the block device", command::END_USER_RECOVERY),
            false => ("start the block device", command::START_DEV),
        };
        let (started, _) = self.ask(how, (id, std::process::id().into()), Vec::new()).await;
        started.map_err(system(what))
    }

    /// The end of a device that could not be served: one that was left stays so.
    pub(super) async fn give_up(&self, made: &DeviceInfo, error: ServeError) -> ServeError {
        if !self.is_left()
            && let Err(why) = self.delete(made.id).await
        {
            tracing::warn!(%why, "a block device that is none is still there");
        }
        error
    }

    /// Stops a device: it is none from now on, whoever has it open.
    pub(super) async fn stop(&self, id: u32) -> Result<(), ServeError> {
        let (stopped, _) = self.ask(command::STOP_DEV, (id, 0), Vec::new()).await;
        stopped.map_err(system("stop the block device"))
    }

    /// Forgets a device that is stopped and that nobody serves.
    pub(super) async fn delete(&self, id: u32) -> Result<(), ServeError> {
        let deleted = timeout(GRACE, self.ask(command::DEL_DEV, (id, 0), Vec::new())).await;
        let deleted = deleted.map_or(Err(Errno::TIMEDOUT.into()), |(deleted, _)| deleted);
        deleted.map_err(system("take the block device away"))
    }

    /// A command of control, with the ring driven meanwhile.
    async fn ask(
        &self,
        command: u32,
        (device, data): (u32, u64),
        memory: Vec<u8>,
    ) -> (io::Result<()>, Vec<u8>) {
        tokio::select! {
            biased;
            answer = self.driver.control(command, About { device, data }, memory) => answer,
            () = self.driver.drive() => (Err(Errno::CANCELED.into()), Vec::new()),
        }
    }

    async fn info(&self, id: u32) -> io::Result<DeviceInfo> {
        let question = DeviceInfo::default().as_bytes().to_vec();
        let (told, answer) = self.ask(command::GET_DEV_INFO, (id, 0), question).await;
        told?;
        DeviceInfo::read_from_bytes(&answer).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The device of this volume that a process has left.
    async fn find(&self) -> Result<Option<DeviceInfo>, ServeError> {
        let begun = Instant::now();
        loop {
            let Some(found) = self.look().await? else { return Ok(None) };
            let limit = match found.state() {
                State::Live if names::lives(found.pid) => LEAVE,
                State::Live | State::Dead => GRACE,
                State::Quiesced | State::Unknown(_) => Duration::ZERO,
            };
            match found.state() {
                State::Quiesced => return Ok(Some(found)),
                // Its process may be about to go, or to start it.
                _ if begun.elapsed() < limit => sleep(PAUSE).await,
                // Its process ended before it was started, or before it was forgotten.
                State::Dead => {
                    self.delete(found.id).await?;
                    return Ok(None);
                }
                State::Live | State::Unknown(_) => {
                    let device = names::block(found.id);
                    return Err(ServeError::Served { device, pid: found.pid });
                }
            }
        }
    }

    async fn look(&self) -> Result<Option<DeviceInfo>, ServeError> {
        let listed = self.core.offload(names::devices).await;
        let listed = listed.unwrap_or_else(|| Err(Errno::CANCELED.into()));
        let tag = tag_of(self.options.identity);
        for id in listed.map_err(system("list the block devices of ublk"))? {
            match self.info(id).await {
                Ok(info) if info.is_of(tag) => return Ok(Some(info)),
                Ok(_) => {}
                // Gone meanwhile; or somebody else's, who does not show it.
                Err(why) => tracing::debug!(id, %why, "a device of ublk says nothing"),
            }
        }
        Ok(None)
    }

    async fn make(
        &self,
        parameters: &Parameters,
        max_bytes: u32,
    ) -> Result<DeviceInfo, ServeError> {
        let queues = self.options.queues.clamp(1, MAX_REQUESTS);
        let wanted = DeviceInfo {
            queues,
            depth: DEPTH.min(MAX_REQUESTS / queues).max(1),
            max_bytes,
            id: self.options.device.unwrap_or(NONE),
            pid: -1,
            flags: FEATURES,
            tag: tag_of(self.options.identity),
            ..DeviceInfo::default()
        };
        let memory = wanted.as_bytes().to_vec();
        let (added, answer) = self.ask(command::ADD_DEV, (wanted.id, 0), memory).await;
        added.map_err(system("make a block device"))?;
        let invalid = |_| system("make a block device")(io::ErrorKind::InvalidData.into());
        let made = DeviceInfo::read_from_bytes(&answer).map_err(invalid)?;
        let (set, _) = self.ask(command::SET_PARAMS, (made.id, 0), parameters.encode()).await;
        match set.map_err(system("describe the block device")) {
            Ok(()) => Ok(made),
            Err(e) => Err(self.give_up(&made, e).await),
        }
    }

    /// Begins to go on with a device that was left.
    async fn take_over(
        &self,
        left: &DeviceInfo,
        wanted: &Parameters,
    ) -> Result<Parameters, ServeError> {
        let question = Parameters::question();
        let (told, answer) = self.ask(command::GET_PARAMS, (left.id, 0), question).await;
        told.map_err(system("ask what the block device is"))?;
        let differs = |why| ServeError::Differs { device: names::block(left.id), why };
        let parameters = Parameters::decode(&answer);
        let parameters = parameters.ok_or_else(|| differs("it is not what it was made as"))?;
        if let Some(why) = parameters.mismatch(wanted) {
            return Err(differs(why));
        }
        let begun = Instant::now();
        loop {
            let (begins, _) = self.ask(command::START_USER_RECOVERY, (left.id, 0), vec![]).await;
            match begins {
                Ok(()) => return Ok(parameters),
                // The process before has not quite gone.
                Err(e) if is(&e, Errno::BUSY) && begun.elapsed() < GRACE => sleep(PAUSE).await,
                // Somebody has begun here before, and has ended before there was anything to begin anew.
                Err(e) if is(&e, Errno::INVAL) => return Ok(parameters),
                Err(e) => return Err(system("take over the block device")(e)),
            }
        }
    }

    /// Opens the character device, which udev may have to make first.
    async fn characters(&self, made: &DeviceInfo) -> Result<Device, ServeError> {
        let (at, begun) = (names::character(made.id), Instant::now());
        loop {
            match self.driver.device(&at, (made.queues, made.depth)) {
                Ok(device) => return Ok(device),
                Err(e) if e.kind() == io::ErrorKind::NotFound && begun.elapsed() < GRACE => {
                    sleep(PAUSE).await;
                }
                Err(e) => return Err(system("open the block device's other end")(e)),
            }
        }
    }
}

#[expect(clippy::host_endian_bytes, reason = "the kernel writes it as the host reads it")]
fn u64_of(bytes: &[u8; 8]) -> u64 {
    u64::from_ne_bytes(*bytes)
}
