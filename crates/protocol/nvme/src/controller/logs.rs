//! Get Log Page (NVMe Base 2.0, 5.16).

use std::net::{IpAddr, SocketAddr};

use block::BufsMut;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::Controller;
use super::admin::AdminAction;
use super::error_log::{CommandError, ENTRIES, field};
use super::events::EventKind;
use super::features::{DISCOVERY_FEATURES, Feature, IO_FEATURES};
use super::identify::pad;
use super::page_writer::PageWriter;
use crate::entry::{AdminOpcode, Completion, NSID_ALL, NvmOpcode, Sqe};
use crate::log::{
    AnaGroup, AnaHeader, DiscoveryHeader, DiscoveryRecord, EFFECTS_BYTES, ErrorEntry,
    FIRMWARE_BYTES, Health, LogId, MAX_CHANGED, ReservationEntry,
};
use crate::status::Status;

/// Effects: the command is supported.
const CSUPP: u32 = 1 << 0;
/// Effects: the command may change contents.
const LBCC: u32 = 1 << 1;
/// LSP bit 0 of the ANA log: groups only.
const RETURN_GROUPS_ONLY: u32 = 1 << 0;

/// The discovery log of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryLog {
    /// Changes with every change of the entries.
    pub generation: u64,
    /// Subsystems and their addresses.
    pub entries: Vec<DiscoveryEntry>,
}

/// A subsystem at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// Kind of the subsystem.
    pub kind: DiscoveryKind,
    /// Its NQN.
    pub nqn: String,
    /// Address of its controllers.
    pub address: SocketAddr,
    /// Number of the port, the same for entries with the same address.
    pub port_id: u16,
    /// Whether the requesting host uses TLS.
    pub tls: TlsRequirement,
}

/// Whether a host uses TLS
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsRequirement {
    /// It has no key.
    #[default]
    None,
    /// TLS is possible.
    Possible,
    /// TLS is required.
    Required,
}

impl TlsRequirement {
    /// TREQ: a secure channel is required (NVMe Base 2.0, 5.16.1.23).
    const TREQ_SECURE_CHANNEL: u8 = 1;
    /// Bits of TREQ for this.
    const TREQ_MASK: u8 = 0b11;
    /// TSAS of TCP: TLS 1.3.
    const SECTYPE_TLS13: u8 = 2;

    /// Parses the TLS requirement of a discovery log entry over TCP.
    #[must_use]
    pub fn from_record(record: &DiscoveryRecord) -> Self {
        match record.treq & Self::TREQ_MASK {
            Self::TREQ_SECURE_CHANNEL => Self::Required,
            _ if record.tsas[0] == Self::SECTYPE_TLS13 => Self::Possible,
            _ => Self::None,
        }
    }

    fn write_record(self, record: &mut DiscoveryRecord) {
        if self != Self::None {
            record.tsas[0] = Self::SECTYPE_TLS13;
        }
        // If TLS is merely possible, TREQ is left unspecified: "not required" makes Linux derive a
        // key from an authentication, for a TLS that is not supported here.
        if self == Self::Required {
            record.treq |= Self::TREQ_SECURE_CHANNEL;
        }
    }
}

/// Kind of a subsystem in the discovery log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscoveryKind {
    /// Another discovery subsystem.
    Referral,
    /// A subsystem with namespaces.
    Nvm,
    /// The discovery subsystem that is queried.
    Current,
}

/// A Get Log Page command.
struct LogRequest {
    log: LogId,
    offset: u64,
    bytes: u32,
    specific: u32,
    /// Retain Asynchronous Event.
    retain: bool,
}

impl Controller {
    /// A Get Log Page command has arrived.
    pub(super) fn get_log(&self, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        let request = self.log_request(sqe)?;
        Self::check_exact_length(sqe, request.bytes)?;
        Ok(AdminAction::Produce { bytes: request.bytes })
    }

    fn log_request(&self, sqe: &Sqe) -> Result<LogRequest, CommandError> {
        let (d10, d11) = (sqe.cdw(0), sqe.cdw(1));
        let [lid, ..] = d10.to_le_bytes();
        let dwords = u64::from(d10 >> 16) | u64::from(d11 & 0xffff) << 16;
        let bytes = u32::try_from((dwords + 1) * 4).unwrap_or(u32::MAX);
        if bytes > self.limits.max_transfer_bytes {
            return Err(CommandError::field(field::CDW10 + 2));
        }
        let offset = u64::from(sqe.cdw(2)) | u64::from(sqe.cdw(3)) << 32;
        const OFFSET_IS_INDEX: u32 = 1 << 23;
        if sqe.cdw(4) & OFFSET_IS_INDEX != 0 {
            return Err(CommandError::field(field::CDW14 + 2));
        }
        let log = LogId(lid);
        let length =
            self.log_bytes(log).ok_or(CommandError::at(Status::INVALID_LOG_PAGE, field::CDW10))?;
        if !offset.is_multiple_of(4) || offset > length {
            return Err(CommandError::field(field::CDW12));
        }
        // All logs are per controller, none per namespace.
        let nsid = sqe.nsid.get();
        if log == LogId::Health && nsid != 0 && nsid != NSID_ALL {
            return Err(CommandError::field(field::NSID));
        }
        let (specific, retain) = (d10 >> 8 & 0x7f, d10 & 1 << 15 != 0);
        Ok(LogRequest { log, offset, bytes, specific, retain })
    }

    /// Length of a log in bytes; `None` if this controller does not have it.
    fn log_bytes(&self, log: LogId) -> Option<u64> {
        match log {
            LogId::Supported => Some(1024),
            LogId::Errors => Some(ENTRIES as u64 * size_of::<ErrorEntry>() as u64),
            LogId::Discovery => {
                let entries = self.discovery.as_ref()?.entries.len() as u64;
                Some((entries + 1) * size_of::<DiscoveryRecord>() as u64)
            }
            _ if self.is_discovery() => None,
            LogId::Health => Some(size_of::<Health>() as u64),
            LogId::Firmware => Some(FIRMWARE_BYTES),
            LogId::ChangedNamespaces => Some(MAX_CHANGED as u64 * 4),
            LogId::Effects => Some(EFFECTS_BYTES),
            LogId::Ana => {
                // Hosts read the maximum length (nvme-cli), and namespaces come and go between two
                // reads: NANAGRPID and MNAN.
                let most = u64::from(self.limits.namespaces);
                let each = size_of::<AnaGroup>() as u64 + 4;
                Some(size_of::<AnaHeader>() as u64 + most * each)
            }
            LogId::FeatureEffects => Some(1024),
            LogId::ManagementEffects => Some(4096),
            LogId::Reservations => Some(size_of::<ReservationEntry>() as u64),
            _ => None,
        }
    }

    pub(super) fn produce_log(
        &mut self,
        sqe: &Sqe,
        buffers: &mut BufsMut,
    ) -> Result<Completion, CommandError> {
        let request = self.log_request(sqe)?;
        let mut window = PageWriter::new(request.offset, buffers);
        let mut shows = None;
        match request.log {
            LogId::Supported => self.write_supported(&mut window),
            LogId::Errors => self.error_log.write(&mut window),
            LogId::Health => window.put(0, self.health().as_bytes()),
            LogId::Firmware => {
                // AFI: slot 1 is active. FRS1: its revision.
                let mut revision = [0; 8];
                pad(&mut revision, &self.subsystem.firmware);
                window.put(0, &[1]);
                window.put(8, &revision);
            }
            LogId::ChangedNamespaces => {
                self.write_changed(&mut window);
                shows = Some(EventKind::Namespaces);
            }
            LogId::Effects => write_effects(&mut window),
            LogId::Ana => {
                self.write_ana(&mut window, request.specific & RETURN_GROUPS_ONLY != 0);
                shows = Some(EventKind::Ana);
            }
            LogId::FeatureEffects => self.write_feature_effects(&mut window),
            LogId::Discovery => {
                self.write_discovery(&mut window);
                shows = Some(EventKind::Discovery);
            }
            LogId::Reservations => {
                self.reservation_log.write(&mut window);
                shows = Some(EventKind::Reservations);
            }
            _ => {}
        }
        // A notification is one page: reading a part of it does not consume it.
        let whole = request.offset == 0 && request.bytes as usize >= size_of::<ReservationEntry>();
        let is_read =
            |kind: &EventKind| !request.retain && (whole || *kind != EventKind::Reservations);
        if let Some(kind) = shows.filter(is_read) {
            self.events.log_read(kind);
            // The next notification is an event of its own.
            if kind == EventKind::Reservations && self.reservation_log.pop_read() {
                self.events.notify(kind);
            }
        }
        Ok(Completion::OK)
    }

    fn write_supported(&self, window: &mut PageWriter<'_>) {
        const LSUPP: u32 = 1 << 0;
        for lid in 0..=u8::MAX {
            if self.log_bytes(LogId(lid)).is_some() {
                window.put(u64::from(lid) * 4, U32::new(LSUPP).as_bytes());
            }
        }
    }

    fn health(&self) -> Health {
        let mut log = Health::zeroed();
        let c = &self.counters;
        log.available_spare = 100;
        log.spare_threshold = 10;
        log.data_units_read[0] = c.read_sectors.div_ceil(1000).into();
        log.data_units_written[0] = c.written_sectors.div_ceil(1000).into();
        log.host_reads[0] = c.reads.into();
        log.host_writes[0] = c.writes.into();
        log.error_entries[0] = self.error_log.count().into();
        log
    }

    fn write_changed(&self, window: &mut PageWriter<'_>) {
        let Some(changed) = self.events.changed() else {
            return window.put(0, U32::new(NSID_ALL).as_bytes());
        };
        for (i, nsid) in (0u64..).zip(changed) {
            window.put(i * 4, U32::new(*nsid).as_bytes());
        }
    }

    /// Asymmetric Namespace Access (NVMe Base 2.0, 5.16.1.11): the groups that contain
    /// namespaces, each one of its own.
    fn write_ana(&self, window: &mut PageWriter<'_>, groups_only: bool) {
        let header = AnaHeader {
            change_count: self.ana.changes.into(),
            groups: u16::try_from(self.namespaces.len()).unwrap_or(u16::MAX).into(),
            reserved: [0; 6],
        };
        window.put(0, header.as_bytes());
        let mut at = size_of::<AnaHeader>() as u64;
        for &nsid in self.namespaces.keys() {
            let (state, change_count) = self.ana.state(nsid);
            let descriptor = AnaGroup {
                group: nsid.into(),
                namespaces: u32::from(!groups_only).into(),
                change_count: change_count.into(),
                state: state.0,
                reserved: [0; 15],
            };
            window.put(at, descriptor.as_bytes());
            at += size_of::<AnaGroup>() as u64;
            if !groups_only {
                window.put(at, U32::new(nsid).as_bytes());
                at += 4;
            }
        }
    }

    fn write_feature_effects(&self, window: &mut PageWriter<'_>) {
        const FSUPP: u32 = 1 << 0;
        const NAMESPACE_SCOPE: u32 = 1 << 20;
        const CONTROLLER_SCOPE: u32 = 1 << 21;
        let known: &[Feature] =
            if self.is_discovery() { &DISCOVERY_FEATURES } else { &IO_FEATURES };
        for feature in known {
            let scope = match *feature {
                Feature::ErrorRecovery
                | Feature::ReservationMask
                | Feature::ReservationPersistence => NAMESPACE_SCOPE,
                _ => CONTROLLER_SCOPE,
            };
            window.put(u64::from(feature.0) * 4, U32::new(FSUPP | scope).as_bytes());
        }
    }

    fn write_discovery(&self, window: &mut PageWriter<'_>) {
        let Some(log) = &self.discovery else { return };
        let header = DiscoveryHeader {
            generation: log.generation.into(),
            records: (log.entries.len() as u64).into(),
            format: 0.into(),
            reserved: [0; 1006],
        };
        window.put(0, header.as_bytes());
        let record_bytes = size_of::<DiscoveryRecord>() as u64;
        for (i, entry) in (1u64..).zip(&log.entries) {
            let at = i * record_bytes;
            if at < window.end() && at + record_bytes > window.offset() {
                window.put(at, self.record(entry).as_bytes());
            }
        }
    }

    fn record(&self, entry: &DiscoveryEntry) -> DiscoveryRecord {
        const TRTYPE_TCP: u8 = 3;
        /// TREQ: SQ flow control may be disabled.
        const TREQ_NO_FLOW_CONTROL: u8 = 1 << 2;
        /// EFLAGS: persistent connections to the discovery controller.
        const EPCSD: u16 = 1 << 1;
        let mut record = DiscoveryRecord::zeroed();
        record.trtype = TRTYPE_TCP;
        record.adrfam = match entry.address.ip() {
            IpAddr::V4(_) => 1,
            IpAddr::V6(_) => 2,
        };
        record.subtype = match entry.kind {
            DiscoveryKind::Referral => 1,
            DiscoveryKind::Nvm => 2,
            DiscoveryKind::Current => 3,
        };
        record.treq = TREQ_NO_FLOW_CONTROL;
        entry.tls.write_record(&mut record);
        record.portid = entry.port_id.into();
        record.cntlid = crate::fabrics::CNTLID_DYNAMIC.into();
        record.asqsz = self.limits.queue_entries.into();
        if entry.kind == DiscoveryKind::Current {
            record.eflags = EPCSD.into();
        }
        pad(&mut record.trsvcid, &entry.address.port().to_string());
        pad(&mut record.traddr, &entry.address.ip().to_string());
        let nqn = entry.nqn.as_bytes();
        let n = nqn.len().min(record.subnqn.len() - 1);
        record.subnqn[..n].copy_from_slice(&nqn[..n]);
        record
    }
}

/// Commands Supported and Effects: admin opcodes first, then I/O opcodes.
fn write_effects(window: &mut PageWriter<'_>) {
    const IO_AT: u64 = 1024;
    for opcode in [
        AdminOpcode::GetLogPage,
        AdminOpcode::Identify,
        AdminOpcode::Abort,
        AdminOpcode::SetFeatures,
        AdminOpcode::GetFeatures,
        AdminOpcode::AsyncEventRequest,
        AdminOpcode::KeepAlive,
    ] {
        window.put(u64::from(opcode.0) * 4, U32::new(CSUPP).as_bytes());
    }
    for (opcode, effects) in [
        (NvmOpcode::Flush, CSUPP),
        (NvmOpcode::Write, CSUPP | LBCC),
        (NvmOpcode::Read, CSUPP),
        (NvmOpcode::Compare, CSUPP),
        (NvmOpcode::WriteZeroes, CSUPP | LBCC),
        (NvmOpcode::DatasetManagement, CSUPP | LBCC),
        (NvmOpcode::Verify, CSUPP),
        (NvmOpcode::ReservationRegister, CSUPP),
        (NvmOpcode::ReservationReport, CSUPP),
        (NvmOpcode::ReservationAcquire, CSUPP),
        (NvmOpcode::ReservationRelease, CSUPP),
        (NvmOpcode::Copy, CSUPP | LBCC),
    ] {
        window.put(IO_AT + u64::from(opcode.0) * 4, U32::new(effects).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVMe Base 2.0, 5.16.1.23; entries are read back as written, and "not required" means no key.
    #[test]
    fn the_log_shows_which_portals_use_tls() {
        for tls in [TlsRequirement::None, TlsRequirement::Possible, TlsRequirement::Required] {
            let mut record = DiscoveryRecord::zeroed();
            record.treq = 1 << 2;
            tls.write_record(&mut record);
            assert_eq!((TlsRequirement::from_record(&record), record.treq >> 2), (tls, 1));
        }
        let mut record = DiscoveryRecord::zeroed();
        record.treq = 2;
        assert_eq!(TlsRequirement::from_record(&record), TlsRequirement::None);
    }
}
