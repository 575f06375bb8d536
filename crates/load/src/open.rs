//! Opening what is named, and what has to be known before it is written to.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use ::iscsi::chap::Secret;
use ::iscsi::initiator::Credentials;
use ::nbd::Address;
use block::Dev;
use initiator::nvme::{Controller, Namespace, Options, Staging};
use initiator::uri::{Authority, IscsiUri, NbdAt, NbdUri, NvmeUri, Target};
use layers::file::{Foreign, Reason, inspect};
use rt::Core;
use rt::disk::{Disk, DiskKind, OpenOptions, OpenReason};

use crate::raw::Raw;

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
}

/// Who this machine is to NVMe controllers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub nqn: String,
    /// Its identifier; not 0.
    pub id: [u8; 16],
}

/// What a file or device is before it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Looks at what writing to a path would destroy.
///
/// # Errors
/// Why it cannot be looked at: it is in use, or may not be opened.
pub async fn look(core: &Core, path: &Path) -> Result<Before, String> {
    let looked = inspect(core, path, true).await;
    let reason = match looked {
        Ok(_) => return Ok(Before::Image),
        Err(e) => e,
    };
    match reason.reason {
        Reason::Open(OpenReason::NotFound) => Ok(Before::Absent),
        Reason::NoLabel => Ok(Before::Nothing),
        Reason::NotAVolume(what) | Reason::Foreign(what) => Ok(Before::Holds(what)),
        Reason::Open(_) | Reason::Disk(_) => Err(reason.to_string()),
        // Whatever else can be said of a label, there is one.
        _ => Ok(Before::Image),
    }
}

/// A file or device that this process keeps to itself while its cores use it.
#[derive(Debug)]
pub struct Held(Disk);

/// Takes hold of a path; makes a file of `create` bytes first.
///
/// # Errors
/// Why not, for people.
pub async fn hold(
    core: &Core,
    path: &Path,
    how: &How,
    create: Option<u64>,
) -> Result<Held, String> {
    let options = OpenOptions::new().read_only(!how.writes).buffered(!how.direct);
    let options = create.map_or(options, |bytes| options.create(bytes));
    core.open_disk(path, options).await.map(Held).map_err(|e| match e.reason {
        OpenReason::NoDirectIo => format!("{e}: --direct=0"),
        _ => e.to_string(),
    })
}

impl Held {
    /// What was taken hold of, as a target.
    #[must_use]
    pub fn dev(&self) -> Dev {
        Dev::new(Raw::new(self.0.clone()))
    }

    /// Whether it is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.0.info().kind == DiskKind::BlockDevice
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
    let disk = core.open_disk(path, options).await.map_err(|e| e.to_string())?;
    Ok(Dev::new(Raw::new(disk)))
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
        let options = Options { queue_entries, ..Options::new(address, &uri.subnqn, nqn, host.id) };
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
    let text = std::fs::read_to_string("/etc/iscsi/initiatorname.iscsi").unwrap_or_default();
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
