//! Finds or creates a device, starts it and deletes it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rt::Core;
use rt::ublk::{ControlTarget, Device, Driver, MAX_REQUESTS};
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout};
use zerocopy::{FromBytes, IntoBytes};

use super::abi::{DeviceInfo, FEATURES, Parameters, State, command, tag_of};
use super::names;

/// Queue depth if there are few queues.
const DEPTH: u16 = 128;

/// Time limit for the kernel to notice that a process has ended (it checks every 5 s before Linux
/// 6.7), to show a device, and to delete one.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a live process to end, or to start its device.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of polling.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// No device number.
const NO_DEVICE: u32 = u32::MAX;

/// Options of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The volume's identity, by which its existing device is found.
    pub identity: u128,
    /// Number of queues; the kernel creates no more than there are processors.
    pub queues: u16,
    /// Whether writes are refused, even where the volume takes them.
    pub read_only: bool,
    /// The device's number; the first free one if `None`.
    pub device: Option<u32>,
    /// Path of a symbolic link to the device, if wanted.
    pub link: Option<PathBuf>,
}

impl Options {
    fn clean_marker(&self) -> Option<PathBuf> {
        self.link.as_ref().map(|link| names::clean_marker_path(link, self.identity))
    }

    /// Records for the next process that a device was [left](super::ServeEnd::LeftForRecovery) with
    /// nothing in doubt: all its requests have been answered, and the volume is closed. Without a
    /// link nothing is recorded.
    ///
    /// # Errors
    /// The system's error. The next process then waits, as after one that was killed.
    pub async fn mark_clean(&self, core: &Core) -> io::Result<()> {
        let Some(at) = self.clean_marker() else { return Ok(()) };
        let given = core.run_blocking(move || names::write_clean_marker(&at)).await;
        given.unwrap_or_else(|| Err(Errno::CANCELED.into()))
    }
}

/// Why a device cannot be served, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The driver is missing.
    #[error("this machine's kernel has no ublk driver ({} is missing)", names::CONTROL)]
    NoDriver,
    /// Root privileges are required.
    #[error("no permission to open {}: creating block devices needs root", names::CONTROL)]
    NotAllowed,
    /// The driver or io_uring lacks a feature.
    #[error(
        "this machine's kernel is too old: its ublk driver or io_uring lacks what Linux 6.5 has"
    )]
    TooOld,
    /// A process already serves the volume as a device.
    #[error("process {pid} already serves the volume as {device}", device = device.display())]
    AlreadyServed {
        /// The device.
        device: PathBuf,
        /// Its process ID.
        pid: i32,
    },
    /// The volume has an existing device with another number than requested.
    #[error("the volume already has the device {}, which waits for a server", device.display())]
    OtherDevice {
        /// The device.
        device: PathBuf,
    },
    /// The existing device does not fit the volume.
    #[error("{} was left by another process and cannot be recovered: {why}", device.display())]
    Incompatible {
        /// The device.
        device: PathBuf,
        /// Why.
        why: &'static str,
    },
    /// The device was removed from outside.
    #[error("{} was deleted: {why}", device.display())]
    TakenAway {
        /// The device.
        device: PathBuf,
        /// The driver's error.
        why: io::Error,
    },
    /// A system call failed.
    #[error("cannot {what}: {why}")]
    System {
        /// What.
        what: &'static str,
        /// The system's error.
        why: io::Error,
    },
}

/// The error of a failed system call.
pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |why| ServeError::System { what, why }
}

fn is_errno(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// The driver, and an existing device of one volume.
#[derive(Debug)]
pub struct DeviceControl {
    pub(super) core: Core,
    pub(super) driver: Driver,
    pub(super) options: Options,
    existing: Option<DeviceInfo>,
    /// Whether its last process had ended in order.
    left_clean: bool,
}

impl DeviceControl {
    /// Opens the driver and looks for an existing device of this volume.
    ///
    /// # Errors
    /// [`ServeError`].
    pub async fn open(core: &Core, options: Options) -> Result<Self, ServeError> {
        let driver =
            Driver::open(core, names::CONTROL.as_ref()).map_err(|why| match why.kind() {
                io::ErrorKind::NotFound => ServeError::NoDriver,
                io::ErrorKind::PermissionDenied => ServeError::NotAllowed,
                // This kind of ring, or its commands.
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => ServeError::TooOld,
                _ => ServeError::System { what: "open the ublk driver", why },
            })?;
        let mut door =
            Self { core: core.clone(), driver, options, existing: None, left_clean: false };
        let (asked, features) =
            door.control(command::GET_FEATURES, (NO_DEVICE, 0), vec![0; 8]).await;
        let features = features.as_chunks::<8>().0.first().map(u64_of);
        match asked {
            Err(e) if is_errno(&e, Errno::PERM) || is_errno(&e, Errno::ACCESS) => {
                return Err(ServeError::NotAllowed);
            }
            Ok(()) if features.is_some_and(|known| known & FEATURES == FEATURES) => {}
            _ => return Err(ServeError::TooOld),
        }
        door.existing = door.find().await?;
        if let Some(at) = door.options.clean_marker() {
            let taken = core.run_blocking(move || names::take_clean_marker(&at)).await;
            door.left_clean = taken == Some(true);
        }
        if let (Some(left), Some(wanted)) = (&door.existing, door.options.device)
            && left.id != wanted
        {
            return Err(ServeError::OtherDevice { device: names::block_device(left.id) });
        }
        Ok(door)
    }

    /// Whether an earlier process left its device without ending in order, so that its last
    /// requests may still take effect.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.has_existing() && !self.left_clean
    }

    /// The existing device.
    pub(super) fn existing(&self) -> Option<&DeviceInfo> {
        self.existing.as_ref()
    }

    /// Whether a device already exists.
    pub(super) fn has_existing(&self) -> bool {
        self.existing.is_some()
    }

    /// Has the kernel start or resume the device. All queue slots have requested commands, or are
    /// about to.
    pub(super) async fn start(&self, id: u32) -> Result<(), ServeError> {
        let (what, how) = match self.has_existing() {
            true => ("recover the block device", command::END_USER_RECOVERY),
            false => ("start the block device", command::START_DEV),
        };
        let (started, _) = self.control(how, (id, std::process::id().into()), Vec::new()).await;
        started.map_err(system(what))
    }

    /// Cleans up after a device could not be served: an existing one is left as it was.
    pub(super) async fn abandon(&self, made: &DeviceInfo, error: ServeError) -> ServeError {
        if !self.has_existing()
            && let Err(why) = self.delete(made.id).await
        {
            tracing::warn!(%why, "cannot delete an unusable ublk device");
        }
        error
    }

    /// Stops a device: it is removed at once, even if it is open.
    pub(super) async fn stop(&self, id: u32) -> Result<(), ServeError> {
        let (stopped, _) = self.control(command::STOP_DEV, (id, 0), Vec::new()).await;
        stopped.map_err(system("stop the block device"))
    }

    /// Deletes a stopped device that has no server.
    pub(super) async fn delete(&self, id: u32) -> Result<(), ServeError> {
        let deleted =
            timeout(KERNEL_TIMEOUT, self.control(command::DEL_DEV, (id, 0), Vec::new())).await;
        let deleted = deleted.map_or(Err(Errno::TIMEDOUT.into()), |(deleted, _)| deleted);
        deleted.map_err(system("delete the block device"))
    }

    /// Sends a control command, driving the ring meanwhile.
    async fn control(
        &self,
        command: u32,
        (device, data): (u32, u64),
        memory: Vec<u8>,
    ) -> (io::Result<()>, Vec<u8>) {
        tokio::select! {
            biased;
            answer = self.driver.control(command, ControlTarget { device, data }, memory) => answer,
            () = self.driver.run() => (Err(Errno::CANCELED.into()), Vec::new()),
        }
    }

    async fn info(&self, id: u32) -> io::Result<DeviceInfo> {
        let question = DeviceInfo::default().as_bytes().to_vec();
        let (sent, answer) = self.control(command::GET_DEV_INFO, (id, 0), question).await;
        sent?;
        DeviceInfo::read_from_bytes(&answer).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The existing device of this volume, if any.
    async fn find(&self) -> Result<Option<DeviceInfo>, ServeError> {
        let begun = Instant::now();
        loop {
            let Some(found) = self.find_once().await? else { return Ok(None) };
            let limit = match found.state() {
                State::Live if names::is_alive(found.pid) => PROCESS_TIMEOUT,
                State::Live | State::Dead => KERNEL_TIMEOUT,
                State::Quiesced | State::Unknown(_) => Duration::ZERO,
            };
            match found.state() {
                State::Quiesced => return Ok(Some(found)),
                // Its process may be about to end, or to start it.
                _ if begun.elapsed() < limit => sleep(POLL_INTERVAL).await,
                // Its process ended before it was started, or before it was deleted.
                State::Dead => {
                    self.delete(found.id).await?;
                    return Ok(None);
                }
                State::Live | State::Unknown(_) => {
                    let device = names::block_device(found.id);
                    return Err(ServeError::AlreadyServed { device, pid: found.pid });
                }
            }
        }
    }

    async fn find_once(&self) -> Result<Option<DeviceInfo>, ServeError> {
        let listed = self.core.run_blocking(names::devices).await;
        let listed = listed.unwrap_or_else(|| Err(Errno::CANCELED.into()));
        let tag = tag_of(self.options.identity);
        for id in listed.map_err(system("list the block devices of ublk"))? {
            match self.info(id).await {
                Ok(info) if info.belongs_to(tag) => return Ok(Some(info)),
                Ok(_) => {}
                // Deleted meanwhile, or another user's and not readable.
                Err(why) => tracing::debug!(id, %why, "a ublk device does not respond"),
            }
        }
        Ok(None)
    }

    pub(super) async fn create(
        &self,
        parameters: &Parameters,
        max_bytes: u32,
    ) -> Result<DeviceInfo, ServeError> {
        let queues = self.options.queues.clamp(1, MAX_REQUESTS);
        let wanted = DeviceInfo {
            queues,
            depth: DEPTH.min(MAX_REQUESTS / queues).max(1),
            max_bytes,
            id: self.options.device.unwrap_or(NO_DEVICE),
            pid: -1,
            flags: FEATURES,
            tag: tag_of(self.options.identity),
            ..DeviceInfo::default()
        };
        let memory = wanted.as_bytes().to_vec();
        let (added, answer) = self.control(command::ADD_DEV, (wanted.id, 0), memory).await;
        added.map_err(system("create a block device"))?;
        let invalid = |_| system("create a block device")(io::ErrorKind::InvalidData.into());
        let made = DeviceInfo::read_from_bytes(&answer).map_err(invalid)?;
        let (set, _) = self.control(command::SET_PARAMS, (made.id, 0), parameters.encode()).await;
        match set.map_err(system("set the parameters of the block device")) {
            Ok(()) => Ok(made),
            Err(e) => Err(self.abandon(&made, e).await),
        }
    }

    /// Begins the recovery of an existing device.
    pub(super) async fn take_over(
        &self,
        left: &DeviceInfo,
        wanted: &Parameters,
    ) -> Result<Parameters, ServeError> {
        let question = Parameters::get_request();
        let (sent, answer) = self.control(command::GET_PARAMS, (left.id, 0), question).await;
        sent.map_err(system("get the parameters of the block device"))?;
        let differs = |why| ServeError::Incompatible { device: names::block_device(left.id), why };
        let parameters = Parameters::decode(&answer);
        let parameters = parameters
            .ok_or_else(|| differs("its parameters differ from those it was created with"))?;
        if let Some(why) = parameters.mismatch(wanted) {
            return Err(differs(why));
        }
        let begun = Instant::now();
        loop {
            let (begins, _) =
                self.control(command::START_USER_RECOVERY, (left.id, 0), vec![]).await;
            match begins {
                Ok(()) => return Ok(parameters),
                // The earlier process has not fully ended.
                Err(e) if is_errno(&e, Errno::BUSY) && begun.elapsed() < KERNEL_TIMEOUT => {
                    sleep(POLL_INTERVAL).await;
                }
                // An earlier process began the recovery and ended before completing it.
                Err(e) if is_errno(&e, Errno::INVAL) => return Ok(parameters),
                Err(e) => return Err(system("start the recovery of the block device")(e)),
            }
        }
    }

    /// Opens the character device, which udev may have to create first.
    pub(super) async fn open_char_device(&self, made: &DeviceInfo) -> Result<Device, ServeError> {
        let (at, begun) = (names::char_device(made.id), Instant::now());
        loop {
            match self.driver.device(&at, (made.queues, made.depth)) {
                Ok(device) => return Ok(device),
                Err(e)
                    if e.kind() == io::ErrorKind::NotFound && begun.elapsed() < KERNEL_TIMEOUT =>
                {
                    sleep(POLL_INTERVAL).await;
                }
                Err(e) => return Err(system("open the ublk character device")(e)),
            }
        }
    }
}

#[expect(clippy::host_endian_bytes, reason = "the kernel writes it as the host reads it")]
fn u64_of(bytes: &[u8; 8]) -> u64 {
    u64::from_ne_bytes(*bytes)
}
