//! The owner record ([format](../../../../../docs/format/owner.md)). [`OwnerRecord::parse`] never
//! panics.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use wire::{SHORT_TEXT_BYTES, ShortText};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ClaimSubject;

/// Length in bytes of a record.
pub const OWNER_RECORD_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE OWNER\r\n";
const VERSION: u16 = 1;

/// Longest lease, in milliseconds: other nodes must wait longer than the lease before they use the
/// disk.
const MAX_LEASE_MS: u32 = 60_000;

wire::open_enum! {
    /// Whether a disk is owned, as stored.
    enum StoredState: u16 {
        Held = 1,
        Released = 2,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredRecord {
    magic: [u8; 16],
    version: U16,
    copy: U16,
    checksum: U32,
    claim_generation: U64,
    heartbeat: U64,
    nonce: U64,
    claim_id: [u8; 16],
    set_id: [u8; 16],
    part_id: [u8; 16],
    node: [u8; 16],
    boot_instance: [u8; 16],
    cluster: [u8; 16],
    name: [u8; SHORT_TEXT_BYTES],
    host: [u8; SHORT_TEXT_BYTES],
    written_wall_time: U64,
    heartbeat_interval_ms: U32,
    lease_ms: U32,
    node_number: U16,
    state: U16,
    reserved: U32,
}

const FIELD_BYTES: usize = 296;
const _: () = assert!(size_of::<StoredRecord>() == FIELD_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(StoredRecord, checksum);

/// The records of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerRecordKind {
    /// The first copy of the claim, which decides.
    Claim,
    /// The second copy, for when the first cannot be read.
    ClaimCopy,
    /// The heartbeat.
    Heartbeat,
}

impl OwnerRecordKind {
    fn number(self) -> u16 {
        match self {
            Self::Claim => 0,
            Self::ClaimCopy => 1,
            Self::Heartbeat => 2,
        }
    }
}

/// Whether a disk is owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    /// A node owns it.
    Held,
    /// Its owner has closed and released it.
    Released,
}

/// A node, for one boot of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The node: a random id, kept in its data directory.
    pub node_id: Uuid,
    /// This boot of this machine with this data directory: two processes with the same one cannot
    /// run at the same time.
    pub boot_instance: Uuid,
    /// Its cluster, if any.
    pub cluster_id: Option<Uuid>,
    /// Its number there, or 0.
    pub node_number: u16,
    /// Its name.
    pub name: ShortText,
    /// The name of its machine.
    pub host: ShortText,
}

impl fmt::Display for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node_id: node, name, host, .. } = self;
        if name.is_empty() || name == host {
            write!(f, "host {host} (node {node})")
        } else {
            write!(f, "node {name} on host {host} ({node})")
        }
    }
}

/// The owner of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerRecord {
    /// How often the disk has been claimed, this claim included.
    pub claim_generation: u64,
    /// How often the heartbeat was renewed under this claim.
    pub heartbeat: u64,
    /// Random for each record: copies of one machine's memory write different ones.
    pub nonce: u64,
    /// Random id of this claim.
    pub claim_id: Uuid,
    /// What the disk belongs to.
    pub subject: ClaimSubject,
    /// The owner.
    pub owner: NodeIdentity,
    /// When this was written, by the owner's wall clock, since the Unix epoch: for messages.
    pub written_wall_time: Duration,
    /// How often the heartbeat is renewed, in milliseconds; 0 without a heartbeat.
    pub heartbeat_interval_ms: u32,
    /// How long the owner uses the disk after it last read its claim, in milliseconds; 0 without a
    /// heartbeat.
    pub lease_ms: u32,
    /// Whether it is still owned.
    pub state: OwnerState,
}

/// Why an owner record is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnerRecordError {
    /// The bytes do not begin like one.
    #[error("no owner record")]
    NoMagic,
    /// The checksum is wrong: torn, damaged, or another of the records.
    #[error("a damaged owner record")]
    Damaged,
    /// Of a newer format version.
    #[error("an owner record of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum is right, but a field is invalid.
    #[error("an owner record with an invalid {0}")]
    InvalidField(&'static str),
}

fn uuid_or_nil(id: Option<Uuid>) -> [u8; 16] {
    id.unwrap_or_else(Uuid::nil).into_bytes()
}

fn required_uuid(bytes: [u8; 16], what: &'static str) -> Result<Uuid, OwnerRecordError> {
    let id = Uuid::from_bytes(bytes);
    if id.is_nil() { Err(OwnerRecordError::InvalidField(what)) } else { Ok(id) }
}

impl OwnerRecord {
    /// Parses the record of this kind.
    ///
    /// # Errors
    /// [`OwnerRecordError`].
    pub fn parse(
        bytes: &[u8; OWNER_RECORD_BYTES],
        kind: OwnerRecordKind,
    ) -> Result<Self, OwnerRecordError> {
        let (stored, rest) = StoredRecord::read_from_prefix(bytes)
            .map_err(|_| OwnerRecordError::InvalidField("length"))?;
        if stored.magic != MAGIC {
            return Err(OwnerRecordError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) || stored.copy.get() != kind.number() {
            return Err(OwnerRecordError::Damaged);
        }
        if stored.version.get() != VERSION {
            return Err(OwnerRecordError::Version(stored.version.get()));
        }
        if stored.reserved.get() != 0 || rest.iter().any(|b| *b != 0) {
            return Err(OwnerRecordError::InvalidField("rest"));
        }
        stored.parse_fields()
    }

    /// The bytes of the record as this kind.
    #[must_use]
    pub fn to_bytes(&self, kind: OwnerRecordKind) -> [u8; OWNER_RECORD_BYTES] {
        let owner = self.owner;
        let stored = StoredRecord {
            magic: MAGIC,
            version: VERSION.into(),
            copy: kind.number().into(),
            checksum: 0.into(),
            claim_generation: self.claim_generation.into(),
            heartbeat: self.heartbeat.into(),
            nonce: self.nonce.into(),
            claim_id: self.claim_id.into_bytes(),
            set_id: self.subject.set_id.into_bytes(),
            part_id: self.subject.part_id.into_bytes(),
            node: owner.node_id.into_bytes(),
            boot_instance: owner.boot_instance.into_bytes(),
            cluster: uuid_or_nil(owner.cluster_id),
            name: owner.name.to_bytes(),
            host: owner.host.to_bytes(),
            written_wall_time: u64::try_from(self.written_wall_time.as_nanos())
                .unwrap_or(u64::MAX)
                .into(),
            heartbeat_interval_ms: self.heartbeat_interval_ms.into(),
            lease_ms: self.lease_ms.into(),
            node_number: owner.node_number.into(),
            state: match self.state {
                OwnerState::Held => StoredState::Held.0.into(),
                OwnerState::Released => StoredState::Released.0.into(),
            },
            reserved: 0.into(),
        };
        let mut bytes = [0; OWNER_RECORD_BYTES];
        bytes[..FIELD_BYTES].copy_from_slice(stored.as_bytes());
        write_checksum(&mut bytes, CHECKSUM_AT);
        bytes
    }

    /// When it was written, by the owner's wall clock, for messages.
    #[must_use]
    pub fn written_at(&self) -> String {
        format_utc(self.written_wall_time.as_secs())
    }
}

impl StoredRecord {
    /// The record, if all fields are valid.
    fn parse_fields(&self) -> Result<OwnerRecord, OwnerRecordError> {
        let (interval_ms, lease_ms) = (self.heartbeat_interval_ms.get(), self.lease_ms.get());
        if self.claim_generation.get() == 0 {
            return Err(OwnerRecordError::InvalidField("claim"));
        }
        if lease_ms > MAX_LEASE_MS
            || interval_ms > lease_ms
            || (interval_ms == 0) != (lease_ms == 0)
        {
            return Err(OwnerRecordError::InvalidField("interval"));
        }
        let cluster = Uuid::from_bytes(self.cluster);
        Ok(OwnerRecord {
            claim_generation: self.claim_generation.get(),
            heartbeat: self.heartbeat.get(),
            nonce: self.nonce.get(),
            claim_id: required_uuid(self.claim_id, "life")?,
            subject: ClaimSubject {
                set_id: required_uuid(self.set_id, "set")?,
                part_id: required_uuid(self.part_id, "part")?,
            },
            owner: NodeIdentity {
                node_id: required_uuid(self.node, "node")?,
                boot_instance: required_uuid(self.boot_instance, "place")?,
                cluster_id: Some(cluster).filter(|id| !id.is_nil()),
                node_number: self.node_number.get(),
                name: ShortText::parse(&self.name).ok_or(OwnerRecordError::InvalidField("name"))?,
                host: ShortText::parse(&self.host).ok_or(OwnerRecordError::InvalidField("host"))?,
            },
            written_wall_time: Duration::from_nanos(self.written_wall_time.get()),
            heartbeat_interval_ms: interval_ms,
            lease_ms,
            state: match StoredState(self.state.get()) {
                StoredState::Held => OwnerState::Held,
                StoredState::Released => OwnerState::Released,
                _ => return Err(OwnerRecordError::InvalidField("state")),
            },
        })
    }
}

/// A time in seconds since the Unix epoch as text, in UTC.
#[must_use]
pub fn format_utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use wire::embedded_checksum::with_checksum;

    fn record() -> OwnerRecord {
        let id = |n: u128| Uuid::from_u128(0x0123_4567_89ab_4def_8123_0000_0000_0000 + n);
        OwnerRecord {
            claim_generation: 7,
            heartbeat: 0x1122,
            nonce: 0x99aa_bbcc_ddee_ff00,
            claim_id: id(1),
            subject: ClaimSubject { set_id: id(2), part_id: id(3) },
            owner: NodeIdentity {
                node_id: id(4),
                boot_instance: id(5),
                cluster_id: Some(id(6)),
                node_number: 2,
                name: ShortText::new("b"),
                host: ShortText::new("srv2"),
            },
            written_wall_time: Duration::from_nanos(1_700_000_000_123_456_789),
            heartbeat_interval_ms: 2000,
            lease_ms: 5000,
            state: OwnerState::Held,
        }
    }

    /// The bytes of the example in the format page.
    #[test]
    fn golden_owner_record() {
        let bytes = record().to_bytes(OwnerRecordKind::Claim);
        let hex = |range: std::ops::Range<usize>| -> String {
            bytes[range].iter().map(|b| format!("{b:02x}")).collect()
        };
        assert_eq!(hex(0..16), "57494e44524f5345204f574e45520d0a");
        assert_eq!(hex(16..20), "01000000", "version, copy");
        assert_eq!(hex(24..48), "07000000000000002211000000000000".to_owned() + "00ffeeddccbbaa99");
        assert_eq!(hex(48..64), "0123456789ab4def8123000000000001", "life");
        assert_eq!(hex(64..80), "0123456789ab4def8123000000000002", "set");
        assert_eq!(hex(80..96), "0123456789ab4def8123000000000003", "part");
        assert_eq!(hex(96..112), "0123456789ab4def8123000000000004", "node");
        assert_eq!(hex(112..128), "0123456789ab4def8123000000000005", "place");
        assert_eq!(hex(128..144), "0123456789ab4def8123000000000006", "cluster");
        assert_eq!(hex(144..146), "6200", "name");
        assert_eq!(hex(208..213), "7372763200", "host");
        assert_eq!(hex(272..280), "15cd853dfe9c9717", "written");
        assert_eq!(hex(280..296), "d0070000881300000200010000000000", "times, number, state");
        assert!(bytes[FIELD_BYTES..].iter().all(|b| *b == 0));
        assert_eq!(OwnerRecord::parse(&bytes, OwnerRecordKind::Claim), Ok(record()));
        assert_eq!(record().written_at(), "2023-11-14 22:13:20 UTC");
    }

    #[test]
    fn invalid_owner_records_are_refused_with_a_reason() {
        let bytes = record().to_bytes(OwnerRecordKind::Claim);
        assert_eq!(
            OwnerRecord::parse(&bytes, OwnerRecordKind::Heartbeat),
            Err(OwnerRecordError::Damaged),
            "elsewhere"
        );
        assert_eq!(
            OwnerRecord::parse(&[0; OWNER_RECORD_BYTES], OwnerRecordKind::Claim),
            Err(OwnerRecordError::NoMagic)
        );
        let mut torn = bytes;
        torn[300] = 1;
        assert_eq!(
            OwnerRecord::parse(&torn, OwnerRecordKind::Claim),
            Err(OwnerRecordError::Damaged)
        );
        let changed = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            OwnerRecord::parse(&with_checksum(bytes, CHECKSUM_AT), OwnerRecordKind::Claim)
        };
        assert_eq!(changed(16, 2), Err(OwnerRecordError::Version(2)));
        assert_eq!(changed(24, 0), Err(OwnerRecordError::InvalidField("claim")));
        assert_eq!(changed(283, 1), Err(OwnerRecordError::InvalidField("interval")));
        assert_eq!(changed(290, 3), Err(OwnerRecordError::InvalidField("state")));
        assert_eq!(changed(208, 0x1b), Err(OwnerRecordError::InvalidField("host")));
        assert_eq!(changed(300, 1), Err(OwnerRecordError::InvalidField("rest")));
    }

    proptest! {
        #[test]
        fn arbitrary_record_bytes_do_not_panic(at in 0usize..FIELD_BYTES, value in any::<u8>()) {
            let mut bytes = record().to_bytes(OwnerRecordKind::Heartbeat);
            bytes[at] = value;
            if let Ok(found) = OwnerRecord::parse(&with_checksum(bytes, CHECKSUM_AT), OwnerRecordKind::Heartbeat) {
                prop_assert_eq!(OwnerRecord::parse(&found.to_bytes(OwnerRecordKind::Heartbeat), OwnerRecordKind::Heartbeat), Ok(found));
            }
        }
    }
}
