//! Opening what is named, and what has to be known before it is written to.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use block::Dev;
use initiator::nvme::{Controller, Namespace, Options, Staging};
use initiator::uri::{Authority, IscsiUri, NbdUri, NvmeUri, Target};
use layers::file::{Foreign, Reason, inspect};
use rt::Core;
use rt::disk::{Disk, DiskKind, OpenOptions, OpenReason};

use crate::raw::Raw;

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
    /// Who this machine is to NVMe controllers.
    pub host: Host,
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
        Target::Iscsi(uri) => iscsi(uri),
        Target::Nbd(uri) => nbd(uri),
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
    let nqn = uri.hostnqn.as_deref().unwrap_or(&how.host.nqn);
    // A queue holds one command less than it has entries, and 65535 entries at most (NVMe Base 2.0, 3.3.3.1).
    let queue_entries = u16::try_from(how.depth.saturating_add(1)).unwrap_or(u16::MAX).max(2);
    let mut last = "the name of the host leads nowhere".to_owned();
    for address in addresses(&uri.at).await.map_err(|e| e.to_string())? {
        let options =
            Options { queue_entries, ..Options::new(address, &uri.subnqn, nqn, how.host.id) };
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

fn iscsi(_: &IscsiUri) -> Result<Dev, String> {
    Err("this build has no iSCSI initiator yet; nvme:// and paths can be measured".to_owned())
}

fn nbd(_: &NbdUri) -> Result<Dev, String> {
    Err("this build has no NBD client yet; nvme:// and paths can be measured".to_owned())
}

/// Asks the system for a name.
async fn addresses(at: &Authority) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((at.host.as_str(), at.port)).await?.collect())
}

impl Host {
    /// What nvme-cli keeps in `/etc/nvme`; where there is nothing, a name for this run.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let line = |name: &str| {
            let text = std::fs::read_to_string(format!("/etc/nvme/{name}")).ok()?;
            Some(text.lines().next()?.trim().to_owned())
        };
        let id = line("hostid").and_then(|text| identifier(&text)).unwrap_or_else(|| {
            // Another for each process that measures: two of them do not take each other for one.
            let process = u128::from(std::process::id());
            (0x6d0a_3c1e_77a0_4b3c_8d52_0000_0000_0000 | process).to_be_bytes()
        });
        let nqn = line("hostnqn").filter(|nqn| nqn.starts_with("nqn.") && nqn.len() <= 223);
        let nqn = nqn.unwrap_or_else(|| {
            let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
            let [a, b, c, d, e] = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            format!("nqn.2014-08.org.nvmexpress:uuid:{a}-{b}-{c}-{d}-{e}")
        });
        Self { nqn, id }
    }
}

/// The bytes of a UUID that is not 0.
fn identifier(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|b| *b != b'-')
        .map(|b| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> =
        digits.chunks(2).filter_map(|p| Some(p.first()? << 4 | p.get(1)?)).collect();
    bytes.try_into().ok().filter(|id| *id != [0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_of_a_host_is_read() {
        let text = "6d0a3c1e-0000-4000-8000-000000000001";
        let id = identifier(text).unwrap();
        assert_eq!((id[0], id[1], id[15]), (0x6d, 0x0a, 1));
        for bad in ["", "6d", "00000000-0000-0000-0000-000000000000", &text[1..], "x"] {
            assert_eq!(identifier(bad), None, "{bad}");
        }
        let here = Host::of_this_machine();
        assert!(here.nqn.starts_with("nqn.") && here.id != [0; 16]);
    }
}
