//! Opens targets, and inspects them before they are overwritten.

use std::fs::{self, File, Metadata};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::iscsi::chap::Secret;
use ::iscsi::initiator::Credentials;
use ::nbd::Address;
use ::nvme::tls::TlsKey;
use block::Dev;
use disk::{ExistingData, ImageError, ImageErrorReason, RawDevice};
use image::inspect;
use initiator::nvme::{Controller, Namespace, Options, Secrets, Staging};
use initiator::uri::{Authority, IscsiUri, NbdAddress, NbdUri, NvmeUri, Target};
use rt::Core;
use rt::disk::{Disk, DiskKind, OpenOptions, OpenReason};
use rustix::fs::{Mode, OFlags};

/// Error for a target whose host name resolves to no address.
const NO_ADDRESS: &str = "the host name resolves to no address";

/// How a target is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSpec {
    /// The target.
    pub target: Target,
    /// Whether it will be written.
    pub writes: bool,
    /// Bypass the page cache; files and devices only.
    pub direct: bool,
    /// Operations in flight.
    pub depth: u32,
    /// Identity of this machine towards NVMe controllers.
    pub host: Option<HostIdentity>,
    /// For a path: the [locked](lock_target) file or device, if known.
    pub pin: Option<PinnedFile>,
}

/// Identity of this machine towards NVMe controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// Host NQN.
    pub nqn: String,
    /// Host identifier; not 0.
    pub id: [u8; 16],
    /// Secrets, for controllers that require authentication.
    pub secrets: Option<Arc<Secrets>>,
    /// TLS pre-shared key, if connections use TLS.
    pub tls_key: Option<Arc<TlsKey>>,
}

/// What a file or device contains before it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExistingContents {
    /// It does not exist.
    Absent,
    /// It holds a Windrose volume, possibly damaged.
    Image,
    /// It holds other data, or cannot be inspected closely.
    Foreign(ExistingData),
    /// No data found: it is empty, or reads as zeroes at both ends.
    Empty,
}

/// A file or device opened by path, whatever the path refers to later. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PinnedFile {
    file: Arc<File>,
    identity: (u64, u64),
}

impl PartialEq for PinnedFile {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for PinnedFile {}

impl PinnedFile {
    /// Pins what a path refers to; `None` if nothing. Does not open it, as that may have effects.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => Self::to(fd.into()).map(Some),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn to(file: File) -> io::Result<Self> {
        let identity = identity(&file.metadata()?);
        Ok(Self { file: Arc::new(file), identity })
    }

    /// Creates a file of `bytes` bytes, which must not exist.
    fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        // The file may later hold private data.
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        if let Err(e) = file.set_len(bytes) {
            // If it cannot be removed, it stays empty.
            let _ = fs::remove_file(path);
            return Err(e);
        }
        Self::to(file)
    }

    /// Path for opening it (proc(5)): the original name may refer to another file at any time.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Whether a path refers to it.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|there| identity(&there) == self.identity)
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// What was found at a path. Consent to overwrite it does not extend to anything that appears there
/// later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathInspection {
    /// Its contents.
    pub contents: ExistingContents,
    pin: Option<PinnedFile>,
}

/// Determines what writing to a path would destroy.
///
/// # Errors
/// Why it cannot be inspected: it is in use, or access is denied.
pub async fn inspect_path(core: &Core, path: &Path) -> Result<PathInspection, String> {
    let pin = PinnedFile::of(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let before = match &pin {
        Some(pin) => inspect_file(core, path, pin).await?,
        None => ExistingContents::Absent,
    };
    Ok(PathInspection { contents: before, pin })
}

/// Inspects a pinned file or device.
async fn inspect_file(
    core: &Core,
    path: &Path,
    pin: &PinnedFile,
) -> Result<ExistingContents, String> {
    let looked = inspect(core, &pin.path(), true).await;
    let reason = match looked {
        Ok(_) => return Ok(ExistingContents::Image),
        Err(e) => ImageError { path: path.to_owned(), ..e },
    };
    match reason.reason {
        ImageErrorReason::NoLabel => Ok(ExistingContents::Empty),
        ImageErrorReason::NotAVolume(what) | ImageErrorReason::HoldsOtherData(what) => {
            Ok(ExistingContents::Foreign(what))
        }
        ImageErrorReason::Open(_) | ImageErrorReason::Disk(_) | ImageErrorReason::NotResponding => {
            Err(reason.to_string())
        }
        // Whatever its state, there is a label.
        _ => Ok(ExistingContents::Image),
    }
}

/// A file or device locked by this process while its cores use it.
#[derive(Debug)]
pub struct LockedTarget {
    disk: Disk,
    pin: PinnedFile,
    path: PathBuf,
}

/// Locks what was found at a path; if there was nothing, creates a file of `create` bytes.
///
/// # Errors
/// Why not, as text: it is in use, or something else is there by now.
pub async fn lock_target(
    core: &Core,
    path: &Path,
    how: &OpenSpec,
    (seen, create): (&PathInspection, Option<u64>),
) -> Result<LockedTarget, String> {
    let refused = |why: &str| format!("{}: {why}", path.display());
    let pin = match (&seen.pin, create) {
        (Some(pin), _) if !pin.is_at(path) => {
            return Err(refused("it has changed since it was inspected"));
        }
        (Some(pin), _)
            if how.writes && inspect_file(core, path, pin).await? == ExistingContents::Image =>
        {
            return Err(refused("it holds a Windrose volume: those are never overwritten"));
        }
        (Some(pin), _) => pin.clone(),
        (None, Some(bytes)) => match PinnedFile::create(path, bytes) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(refused("it did not exist when it was inspected"));
            }
            created => created.map_err(|e| refused(&e.to_string()))?,
        },
        (None, None) => return Err(refused("no such file or device")),
    };
    let options = OpenOptions::new().read_only(!how.writes).buffered(!how.direct);
    match core.open_disk(&pin.path(), options).await {
        Ok(disk) => Ok(LockedTarget { disk, pin, path: path.to_owned() }),
        Err(e) => {
            if seen.pin.is_none() && pin.is_at(path) {
                // If it cannot be removed, it stays empty.
                let _ = fs::remove_file(path);
            }
            let hint = if e.reason == OpenReason::NoDirectIo { ": --direct=0" } else { "" };
            Err(refused(&format!("{}{hint}", e.reason)))
        }
    }
}

impl LockedTarget {
    /// The locked file or device as a target.
    #[must_use]
    pub fn dev(&self) -> Dev {
        raw(self.disk.clone(), &self.path)
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.disk.info().kind == DiskKind::BlockDevice
    }

    /// For opening it again while it is locked.
    #[must_use]
    pub fn pin(&self) -> &PinnedFile {
        &self.pin
    }

    /// The inspection of its path from now on.
    #[must_use]
    pub fn inspection(&self, before: ExistingContents) -> PathInspection {
        PathInspection { contents: before, pin: Some(self.pin.clone()) }
    }
}

/// Opens a target on a core, with connections of its own. A path has to be [locked](lock_target)
/// meanwhile.
///
/// # Errors
/// Why not, as text.
pub async fn open(core: &Core, how: &OpenSpec) -> Result<Dev, String> {
    let opened = match &how.target {
        Target::Path(path) => self::path(core, path, how).await,
        Target::Nvme(uri) => nvme(core, uri, how).await,
        Target::Iscsi(uri) => iscsi(core, uri, how).await,
        Target::Nbd(uri) => nbd(core, uri, how).await,
    };
    opened.map_err(|why| match how.target {
        // The error already names the path.
        Target::Path(_) => why,
        _ => format!("{}: {why}", how.target),
    })
}

async fn path(core: &Core, path: &Path, how: &OpenSpec) -> Result<Dev, String> {
    let options = OpenOptions::new().read_only(!how.writes).buffered(!how.direct).shared(true);
    let pinned = how.pin.as_ref().map_or_else(|| path.to_owned(), PinnedFile::path);
    let disk = core.open_disk(&pinned, options).await;
    let disk = disk.map_err(|e| format!("{}: {}", path.display(), e.reason))?;
    Ok(raw(disk, path))
}

/// The whole disk, in its smallest blocks.
fn raw(disk: Disk, name: &Path) -> Dev {
    let block_size = disk.info().logical_block;
    Dev::new(RawDevice::new(disk, block_size).with_name(name))
}

async fn nvme(core: &Core, uri: &NvmeUri, how: &OpenSpec) -> Result<Dev, String> {
    let Some(host) = &how.host else {
        return Err("this machine has no host NQN: create one with `nvme gen-hostnqn`".to_owned());
    };
    let nqn = uri.hostnqn.as_deref().unwrap_or(&host.nqn);
    // A queue holds one command less than it has entries, and 65535 entries at most (NVMe Base 2.0,
    // 3.3.3.1).
    let queue_entries = u16::try_from(how.depth.saturating_add(1)).unwrap_or(u16::MAX).max(2);
    let mut last = NO_ADDRESS.to_owned();
    for address in addresses(&uri.authority).await.map_err(|e| e.to_string())? {
        let options = Options {
            queue_entries,
            secrets: host.secrets.clone(),
            tls_key: host.tls_key.clone(),
            ..Options::new(address, &uri.subnqn, nqn, host.id)
        };
        match Controller::connect(core, options, Staging::default()).await {
            Err(e) => last = format!("{address}: {e}"),
            Ok(controller) => {
                let opened = Namespace::open(&controller, uri.nsid).await;
                return opened.map(Dev::shared).map_err(|e| e.to_string());
            }
        }
    }
    Err(last)
}

async fn iscsi(core: &Core, uri: &IscsiUri, how: &OpenSpec) -> Result<Dev, String> {
    use initiator::iscsi::{Lun, Options, Session};
    let credentials = match &uri.user {
        None => None,
        Some((_, None)) => return Err("the secret is missing: USER%SECRET@".to_owned()),
        Some((user, Some(secret))) => {
            let secret = Secret::new(secret.as_bytes()).map_err(|e| e.to_string())?;
            Some(Arc::new(Credentials { user: user.clone(), secret, mutual: None }))
        }
    };
    let in_flight = u16::try_from(how.depth).unwrap_or(u16::MAX).max(1);
    let name = initiator_name();
    let mut last = NO_ADDRESS.to_owned();
    for address in addresses(&uri.authority).await.map_err(|e| e.to_string())? {
        let options = Options {
            max_in_flight: in_flight,
            credentials: credentials.clone(),
            ..Options::new(address, &uri.iqn, &name)
        };
        match Session::connect(core, options, Staging::default()).await {
            Err(e) => last = format!("{address}: {e}"),
            Ok(session) => {
                let opened = Lun::open(&session, uri.lun).await;
                return opened.map(Dev::shared).map_err(|e| e.to_string());
            }
        }
    }
    Err(last)
}

/// The initiator name of open-iscsi, else a name of our own.
fn initiator_name() -> String {
    let text = fs::read_to_string("/etc/iscsi/initiatorname.iscsi").unwrap_or_default();
    let name = text.lines().find_map(|line| line.trim().strip_prefix("InitiatorName="));
    name.unwrap_or("iqn.2026-01.io.windrose:bench").trim().to_owned()
}

async fn nbd(core: &Core, uri: &NbdUri, how: &OpenSpec) -> Result<Dev, String> {
    use initiator::nbd::{Disk, Options};
    let in_flight = u16::try_from(how.depth).unwrap_or(u16::MAX).max(1);
    let options = Options { max_in_flight: in_flight, ..Options::new(&uri.export) };
    let at = match &uri.address {
        NbdAddress::Unix(path) => vec![Address::Unix(path.clone())],
        NbdAddress::Tcp(at) => {
            let found = addresses(at).await.map_err(|e| e.to_string())?;
            found.into_iter().map(Address::Tcp).collect()
        }
    };
    let mut last = NO_ADDRESS.to_owned();
    for address in at {
        match Disk::connect(core, &address, &options).await {
            Ok(disk) => return Ok(Dev::shared(disk)),
            Err(e) => last = format!("{address}: {e}"),
        }
    }
    Err(last)
}

/// Resolves a host name.
async fn addresses(at: &Authority) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((at.host.as_str(), at.port)).await?.collect())
}
