//! Which subsystems there are, and where (NVMe Base 2.0, 5.16.1.23).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ::nvme::fabrics::DISCOVERY_NQN;
use ::nvme::log::{DiscoveryHeader, DiscoveryRecord, LogId};
use ::nvme::{DiscoveryEntry, DiscoveryKind, Tls};
use rt::Core;
use zerocopy::FromBytes;

use super::admin::Failed;
use super::connect::{ConnectError, Connector};
use super::live::Live;
use super::options::{Options, Secrets};
use super::queue::Staging;

/// Most records that are read.
const MOST_RECORDS: u64 = 4096;

/// Times that a log is read again because it changed meanwhile.
const TRIES: usize = 5;

/// TRTYPE: TCP.
const TRTYPE_TCP: u8 = 3;

/// Asks the discovery controller at [`Options::address`] what there is for this host; which subsystem the
/// options name does not matter, nor does what it shares with the host: a key of TLS, or a secret of its own. Records of other transports, and those that cannot be read, are left out.
///
/// # Errors
/// Why the controller, or its log, is not reached.
pub async fn discover(
    core: &Core,
    options: Options,
    staging: Staging,
) -> Result<Vec<DiscoveryEntry>, ConnectError> {
    let subnqn = DISCOVERY_NQN.to_owned();
    let secrets = options.secrets.as_deref().cloned();
    let secrets = secrets.map(|secrets| Arc::new(Secrets { controller: None, ..secrets }));
    let options = Options { subnqn, secrets, tls_key: None, ..options };
    let connector = Connector::new(core, options, staging);
    let live = connector.bring_up().await?;
    let found = read(&live).await;
    live.close();
    Ok(found?)
}

/// The log, all of one generation.
async fn read(live: &Live) -> Result<Vec<DiscoveryEntry>, Failed> {
    for _ in 0..TRIES {
        let before = header(live).await?;
        let length = length(&before)?;
        let at = size_of::<DiscoveryHeader>() as u64;
        let records = live.admin.log((LogId::Discovery, 0), at, length).await?;
        if header(live).await?.generation == before.generation {
            return Ok(entries(&records));
        }
    }
    Err(Failed::Nonsense("a discovery log that never stands still"))
}

async fn header(live: &Live) -> Result<DiscoveryHeader, Failed> {
    let bytes = live.admin.log((LogId::Discovery, 0), 0, size_of::<DiscoveryHeader>()).await?;
    DiscoveryHeader::read_from_bytes(&bytes).map_err(|_| Failed::Nonsense("a part of a log"))
}

/// How long the records behind a header are, in bytes.
pub(super) fn length(header: &DiscoveryHeader) -> Result<usize, Failed> {
    let count = header.records.get();
    if count > MOST_RECORDS || header.format.get() != 0 {
        return Err(Failed::Nonsense("a discovery log of a format, or a length, of its own"));
    }
    Ok(usize::try_from(count).unwrap_or(0) * size_of::<DiscoveryRecord>())
}

/// What records tell, as far as they can be read.
pub(super) fn entries(records: &[u8]) -> Vec<DiscoveryEntry> {
    let records = records.chunks_exact(size_of::<DiscoveryRecord>());
    let records = records.filter_map(|r| DiscoveryRecord::read_from_bytes(r).ok());
    records.filter_map(|r| entry(&r)).collect()
}

fn entry(record: &DiscoveryRecord) -> Option<DiscoveryEntry> {
    if record.trtype != TRTYPE_TCP {
        return None;
    }
    let kind = match record.subtype {
        1 => DiscoveryKind::Referral,
        2 => DiscoveryKind::Nvm,
        3 => DiscoveryKind::Current,
        _ => return None,
    };
    let ip: IpAddr = text(&record.traddr)?.parse().ok()?;
    let port = text(&record.trsvcid)?.parse().ok()?;
    let nqn = text(&record.subnqn)?.to_owned();
    let (address, port_id) = (SocketAddr::new(ip, port), record.portid.get());
    Some(DiscoveryEntry { kind, nqn, address, port_id, tls: Tls::told(record) })
}

/// What stands in a field that is padded with spaces or zeroes.
fn text(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).ok()?.trim_end_matches(' ');
    (!text.is_empty() && !text.chars().any(char::is_control)).then_some(text)
}
