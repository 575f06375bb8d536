//! Discovery of subsystems (NVMe Base 2.0, 5.16.1.23).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ::nvme::fabrics::DISCOVERY_NQN;
use ::nvme::log::{DiscoveryHeader, DiscoveryRecord, LogId};
use ::nvme::{DiscoveryEntry, DiscoveryKind, TlsRequirement};
use rt::Core;
use zerocopy::FromBytes;

use super::active_association::ActiveAssociation;
use super::admin::AdminError;
use super::connect::{ConnectError, Connector};
use super::options::{Options, Secrets};
use super::queue::Staging;

/// Most records that are read.
const MAX_RECORDS: u64 = 4096;

/// How often a log is read again because it changed meanwhile.
const MAX_TRIES: usize = 5;

/// TRTYPE: TCP.
const TRTYPE_TCP: u8 = 3;

/// Lists what the discovery controller at [`Options::address`] offers to this host. The subsystem
/// name, TLS key and secrets in the options are ignored. Records of other transports and invalid
/// records are left out.
///
/// # Errors
/// If the controller or its log is unreachable.
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
    let live = connector.establish().await?;
    let found = read(&live).await;
    live.close();
    Ok(found?)
}

/// Reads one generation of the log.
async fn read(live: &ActiveAssociation) -> Result<Vec<DiscoveryEntry>, AdminError> {
    for _ in 0..MAX_TRIES {
        let before = header(live).await?;
        let length = length(&before)?;
        let at = size_of::<DiscoveryHeader>() as u64;
        let records = live.admin.log((LogId::Discovery, 0), at, length).await?;
        if header(live).await?.generation == before.generation {
            return Ok(entries(&records));
        }
    }
    Err(AdminError::InvalidResponse("a discovery log that keeps changing"))
}

async fn header(live: &ActiveAssociation) -> Result<DiscoveryHeader, AdminError> {
    let bytes = live.admin.log((LogId::Discovery, 0), 0, size_of::<DiscoveryHeader>()).await?;
    DiscoveryHeader::read_from_bytes(&bytes)
        .map_err(|_| AdminError::InvalidResponse("a truncated log page"))
}

/// Length of the records after a header, in bytes.
pub(super) fn length(header: &DiscoveryHeader) -> Result<usize, AdminError> {
    let count = header.records.get();
    if count > MAX_RECORDS || header.format.get() != 0 {
        return Err(AdminError::InvalidResponse(
            "a discovery log with an unknown format or length",
        ));
    }
    Ok(usize::try_from(count).unwrap_or(0) * size_of::<DiscoveryRecord>())
}

/// Parses records; skips invalid ones.
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
    Some(DiscoveryEntry { kind, nqn, address, port_id, tls: TlsRequirement::from_record(record) })
}

/// The text of a field padded with spaces or zeroes.
fn text(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).ok()?.trim_end_matches(' ');
    (!text.is_empty() && !text.chars().any(char::is_control)).then_some(text)
}
