//! Opening what is named, and what has to be known before it is written to.

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
use disk::{FileError, Foreign, Raw, Reason};
use image::inspect;
use initiator::nvme::{Controller, Namespace, Options, Secrets, Staging};
use initiator::uri::{Authority, IscsiUri, NbdAt, NbdUri, NvmeUri, Target};
use rt::Core;
use rt::disk::{Disk, DiskKind, OpenOptions, OpenReason};
use rustix::fs::{Mode, OFlags};

/// Why a target is not reached whose host has no address.
const NOWHERE: &str = "the name of the host leads nowhere";

/// How a target is to be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct How {
    /// What.
    pub target: Target,
    /// Whether it is going to be written.
    pub writes: bool,
    /// Past the page cache; files and devices only.
    pub direct: bool,
    /// Operations that one opening is going to have in flight.
    pub depth: u32,
    /// Who this machine is to NVMe controllers, if it has a name.
    pub host: Option<Host>,
    /// Of a path: the file or device that is [held](hold), if that is known.
    pub pin: Option<Pin>,
}

/// Who this machine is to NVMe controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub nqn: String,
    /// Its identifier; not 0.
    pub id: [u8; 16],
    /// How it proves who it is, where a controller asks.
    pub secrets: Option<Arc<Secrets>>,
    /// The key by which its connections are protected by TLS, if they are to be.
    pub tls_key: Option<Arc<TlsKey>>,
}

/// What a file or device is before it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Before {
    /// There is none of this name.
    Absent,
    /// It holds a volume of Windrose, or what may be one that is damaged.
    Image,
    /// It holds something, or cannot be looked at closely.
    Holds(Foreign),
    /// Nothing is seen in it: it is empty, or reads as zeroes at both ends.
    Nothing,
}

/// What a path has led to, whatever it leads to by now. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pin {
    file: Arc<File>,
    identity: (u64, u64),
}

impl PartialEq for Pin {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for Pin {}

impl Pin {
    /// What a path leads to, unless that is nothing. It is not opened: that may have effects.
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

    /// Makes a file of `bytes` bytes, which must not exist.
    fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        // What is measured may be anybody's data.
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        if let Err(e) = file.set_len(bytes) {
            // What cannot be removed is empty.
            let _ = fs::remove_file(path);
            return Err(e);
        }
        Self::to(file)
    }

    /// By this it is opened (proc(5)): a name can be given to another file at any time.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Whether a path leads to it.
    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|there| identity(&there) == self.identity)
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// What was seen at a path. Who agrees to lose it agrees to lose this, and nothing that comes there later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// What it was.
    pub before: Before,
    pin: Option<Pin>,
}

/// Looks at what writing to a path would destroy.
///
/// # Errors
/// Why it cannot be looked at: it is in use, or may not be opened.
pub async fn look(core: &Core, path: &Path) -> Result<Sighting, String> {
    let pin = Pin::of(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let before = match &pin {
        Some(pin) => look_at(core, path, pin).await?,
        None => Before::Absent,
    };
    Ok(Sighting { before, pin })
}

/// Looks at what was found at a path.
async fn look_at(core: &Core, path: &Path, pin: &Pin) -> Result<Before, String> {
    let looked = inspect(core, &pin.path(), true).await;
    let reason = match looked {
        Ok(_) => return Ok(Before::Image),
        Err(e) => FileError { path: path.to_owned(), ..e },
    };
    match reason.reason {
        Reason::NoLabel => Ok(Before::Nothing),
        Reason::NotAVolume(what) | Reason::Foreign(what) => Ok(Before::Holds(what)),
        Reason::Open(_) | Reason::Disk(_) | Reason::Silent => Err(reason.to_string()),
        // Whatever else can be said of a label, there is one.
        _ => Ok(Before::Image),
    }
}

/// A file or device that this process keeps to itself while its cores use it.
#[derive(Debug)]
pub struct Held {
    disk: Disk,
    pin: Pin,
    path: PathBuf,
}

/// Takes hold of what was seen at a path; where that was nothing, makes a file of `create` bytes.
///
/// # Errors
/// Why not, for people: it is in use, or something else is there by now.
pub async fn hold(
    core: &Core,
    path: &Path,
    how: &How,
    (seen, create): (&Sighting, Option<u64>),
) -> Result<Held, String> {
    let refused = |why: &str| format!("{}: {why}", path.display());
    let pin = match (&seen.pin, create) {
        (Some(pin), _) if !pin.is_at(path) => {
            return Err(refused("it is not what it was when it was looked at"));
        }
        (Some(pin), _) if how.writes && look_at(core, path, pin).await? == Before::Image => {
            return Err(refused("it holds a volume of Windrose, which is never written to"));
        }
        (Some(pin), _) => pin.clone(),
        (None, Some(bytes)) => match Pin::create(path, bytes) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(refused("it was not there when it was looked at"));
            }
            created => created.map_err(|e| refused(&e.to_string()))?,
        },
        (None, None) => return Err(refused("no such file or device")),
    };
    let options = OpenOptions::new().read_only(!how.writes).buffered(!how.direct);
    match core.open_disk(&pin.path(), options).await {
        Ok(disk) => Ok(Held { disk, pin, path: path.to_owned() }),
        Err(e) => {
            if seen.pin.is_none() && pin.is_at(path) {
                // What cannot be removed is empty.
                let _ = fs::remove_file(path);
            }
            let hint = if e.reason == OpenReason::NoDirectIo { ": --direct=0" } else { "" };
            Err(refused(&format!("{}{hint}", e.reason)))
        }
    }
}

impl Held {
    /// What was taken hold of, as a target.
    #[must_use]
    pub fn dev(&self) -> Dev {
        raw(self.disk.clone(), &self.path)
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.disk.info().kind == DiskKind::BlockDevice
    }

    /// By which others open it beside this.
    #[must_use]
    pub fn pin(&self) -> &Pin {
        &self.pin
    }

    /// What is seen at its path from now on.
    #[must_use]
    pub fn sighting(&self, before: Before) -> Sighting {
        Sighting { before, pin: Some(self.pin.clone()) }
    }
}

/// Opens a target on a core, with connections of its own. A path has to be [held](hold) by somebody meanwhile.
///
/// # Errors
/// Why not, for people.
pub async fn open(core: &Core, how: &How) -> Result<Dev, String> {
    let opened = match &how.target {
        Target::Path(path) => self::path(core, path, how).await,
        Target::Nvme(uri) => nvme(core, uri, how).await,
        Target::Iscsi(uri) => iscsi(core, uri, how).await,
        Target::Nbd(uri) => nbd(core, uri, how).await,
    };
    opened.map_err(|why| match how.target {
        // It is named already.
        Target::Path(_) => why,
        _ => format!("{}: {why}", how.target),
    })
}

async fn path(core: &Core, path: &Path, how: &How) -> Result<Dev, String> {
    let options = OpenOptions::new().read_only(!how.writes).buffered(!how.direct).beside(true);
    let pinned = how.pin.as_ref().map_or_else(|| path.to_owned(), Pin::path);
    let disk = core.open_disk(&pinned, options).await;
    let disk = disk.map_err(|e| format!("{}: {}", path.display(), e.reason))?;
    Ok(raw(disk, path))
}

/// The whole of a disk, in the smallest blocks that it has.
fn raw(disk: Disk, name: &Path) -> Dev {
    let block_size = disk.info().logical_block;
    Dev::new(Raw::new(disk, block_size).called(name))
}

async fn nvme(core: &Core, uri: &NvmeUri, how: &How) -> Result<Dev, String> {
    let Some(host) = &how.host else {
        return Err("this machine has no name as a host: `nvme gen-hostnqn` makes one".to_owned());
    };
    let nqn = uri.hostnqn.as_deref().unwrap_or(&host.nqn);
    // A queue holds one command less than it has entries, and 65535 entries at most (NVMe Base 2.0, 3.3.3.1).
    let queue_entries = u16::try_from(how.depth.saturating_add(1)).unwrap_or(u16::MAX).max(2);
    let mut last = NOWHERE.to_owned();
    for address in addresses(&uri.at).await.map_err(|e| e.to_string())? {
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

async fn iscsi(core: &Core, uri: &IscsiUri, how: &How) -> Result<Dev, String> {
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
    let mut last = NOWHERE.to_owned();
    for address in addresses(&uri.at).await.map_err(|e| e.to_string())? {
        let options = Options {
            in_flight,
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

/// What open-iscsi calls this machine, else a name of our own.
fn initiator_name() -> String {
    let text = fs::read_to_string("/etc/iscsi/initiatorname.iscsi").unwrap_or_default();
    let name = text.lines().find_map(|line| line.trim().strip_prefix("InitiatorName="));
    name.unwrap_or("iqn.2026-01.io.windrose:bench").trim().to_owned()
}

async fn nbd(core: &Core, uri: &NbdUri, how: &How) -> Result<Dev, String> {
    use initiator::nbd::{Disk, Options};
    let in_flight = u16::try_from(how.depth).unwrap_or(u16::MAX).max(1);
    let options = Options { in_flight, ..Options::new(&uri.export) };
    let at = match &uri.at {
        NbdAt::Unix(path) => vec![Address::Unix(path.clone())],
        NbdAt::Tcp(at) => {
            let found = addresses(at).await.map_err(|e| e.to_string())?;
            found.into_iter().map(Address::Tcp).collect()
        }
    };
    let mut last = NOWHERE.to_owned();
    for address in at {
        match Disk::connect(core, &address, &options).await {
            Ok(disk) => return Ok(Dev::shared(disk)),
            Err(e) => last = format!("{address}: {e}"),
        }
    }
    Err(last)
}

/// Asks the system for a name.
async fn addresses(at: &Authority) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((at.host.as_str(), at.port)).await?.collect())
}
