//! The owner record ([format](../../../../../docs/format/owner.md)). [`OwnerRecord::parse`] is total.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use wire::{TEXT_BYTES, Text};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Subject;

/// Length in bytes of a record.
pub const OWNER_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE OWNER\r\n";
const VERSION: u16 = 1;

/// Longest time that an owner may go on without a look, in milliseconds: whoever wants the disk waits longer than that.
const MAX_STOP_MS: u32 = 60_000;

wire::open_enum! {
    /// Whether a disk is owned, as stored.
    enum StoredState: u16 {
        Held = 1,
        Released = 2,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
    magic: [u8; 16],
    version: U16,
    copy: U16,
    checksum: U32,
    claim: U64,
    beat: U64,
    nonce: U64,
    life: [u8; 16],
    set: [u8; 16],
    part: [u8; 16],
    node: [u8; 16],
    place: [u8; 16],
    cluster: [u8; 16],
    name: [u8; TEXT_BYTES],
    host: [u8; TEXT_BYTES],
    written: U64,
    interval_ms: U32,
    stop_ms: U32,
    number: U16,
    state: U16,
    reserved: U32,
}

const FIELDS: usize = 296;
const _: () = assert!(size_of::<Stored>() == FIELDS);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// Which record of a disk one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// The first copy of the claim: what decides.
    First,
    /// The second one, for when the first cannot be read.
    Second,
    /// The heartbeat.
    Beat,
}

impl Copy {
    fn number(self) -> u16 {
        match self {
            Self::First => 0,
            Self::Second => 1,
            Self::Beat => 2,
        }
    }
}

/// Whether a disk is owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    Held,
    /// Its owner has closed it and given it back.
    Released,
}

/// A node, for as long as its machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The node. Drawn once for its data directory, and lost with that.
    pub node: Uuid,
    /// This boot of this machine with this data directory: two processes with the same one cannot run at the same time.
    pub place: Uuid,
    /// The cluster that it is a node of, if any.
    pub cluster: Option<Uuid>,
    /// Its number there, or 0.
    pub number: u16,
    /// What it is called.
    pub name: Text,
    /// What its machine is called.
    pub host: Text,
}

impl fmt::Display for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, name, host, .. } = self;
        if name.is_empty() || name == host {
            write!(f, "host {host} (node {node})")
        } else {
            write!(f, "node {name} on host {host} ({node})")
        }
    }
}

/// Who has a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerRecord {
    /// How often the disk has been claimed, this time included.
    pub claim: u64,
    /// How often the heartbeat was renewed under this claim.
    pub beat: u64,
    /// Drawn for each record: copies of one machine's memory write different ones.
    pub nonce: u64,
    /// This claim, drawn for it.
    pub life: Uuid,
    /// What the disk is a part of.
    pub subject: Subject,
    /// Who has it.
    pub owner: NodeIdentity,
    /// When this was written, by the owner's wall clock, since the Unix epoch: for messages.
    pub written: Duration,
    /// How often the heartbeat is renewed, in milliseconds; 0 if it is not.
    pub interval_ms: u32,
    /// How long the owner goes on after a look, in milliseconds; 0 without a heartbeat.
    pub stop_ms: u32,
    /// Whether it still has it.
    pub state: State,
}

/// Why bytes are no usable owner record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// They do not begin like one.
    #[error("no owner record")]
    NoMagic,
    /// The checksum does not fit: torn, damaged, or in another one's place.
    #[error("a damaged owner record")]
    Damaged,
    /// A newer version's.
    #[error("an owner record of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum fits, and a field makes no sense.
    #[error("an owner record whose {0} makes no sense")]
    Field(&'static str),
}

fn uuid_or_nil(id: Option<Uuid>) -> [u8; 16] {
    id.unwrap_or_else(Uuid::nil).into_bytes()
}

fn given(bytes: [u8; 16], what: &'static str) -> Result<Uuid, BadRecord> {
    let id = Uuid::from_bytes(bytes);
    if id.is_nil() { Err(BadRecord::Field(what)) } else { Ok(id) }
}

impl OwnerRecord {
    /// What stands in the place of `copy`.
    ///
    /// # Errors
    /// [`BadRecord`].
    pub fn parse(bytes: &[u8; OWNER_BYTES], copy: Copy) -> Result<Self, BadRecord> {
        let (stored, rest) =
            Stored::read_from_prefix(bytes).map_err(|_| BadRecord::Field("length"))?;
        if stored.magic != MAGIC {
            return Err(BadRecord::NoMagic);
        }
        if !is_sealed(bytes, CHECKSUM_AT) || stored.copy.get() != copy.number() {
            return Err(BadRecord::Damaged);
        }
        if stored.version.get() != VERSION {
            return Err(BadRecord::Version(stored.version.get()));
        }
        if stored.reserved.get() != 0 || rest.iter().any(|b| *b != 0) {
            return Err(BadRecord::Field("rest"));
        }
        stored.record()
    }

    /// The bytes of it in the place of `copy`.
    #[must_use]
    pub fn to_bytes(&self, copy: Copy) -> [u8; OWNER_BYTES] {
        let owner = self.owner;
        let stored = Stored {
            magic: MAGIC,
            version: VERSION.into(),
            copy: copy.number().into(),
            checksum: 0.into(),
            claim: self.claim.into(),
            beat: self.beat.into(),
            nonce: self.nonce.into(),
            life: self.life.into_bytes(),
            set: self.subject.set.into_bytes(),
            part: self.subject.part.into_bytes(),
            node: owner.node.into_bytes(),
            place: owner.place.into_bytes(),
            cluster: uuid_or_nil(owner.cluster),
            name: owner.name.to_bytes(),
            host: owner.host.to_bytes(),
            written: u64::try_from(self.written.as_nanos()).unwrap_or(u64::MAX).into(),
            interval_ms: self.interval_ms.into(),
            stop_ms: self.stop_ms.into(),
            number: owner.number.into(),
            state: match self.state {
                State::Held => StoredState::Held.0.into(),
                State::Released => StoredState::Released.0.into(),
            },
            reserved: 0.into(),
        };
        let mut bytes = [0; OWNER_BYTES];
        bytes[..FIELDS].copy_from_slice(stored.as_bytes());
        seal(&mut bytes, CHECKSUM_AT);
        bytes
    }

    /// When it was written, by the owner's wall clock, for people.
    #[must_use]
    pub fn written_at(&self) -> String {
        utc(self.written.as_secs())
    }
}

impl Stored {
    /// What it says, if all of it makes sense.
    fn record(&self) -> Result<OwnerRecord, BadRecord> {
        let (interval_ms, stop_ms) = (self.interval_ms.get(), self.stop_ms.get());
        if self.claim.get() == 0 {
            return Err(BadRecord::Field("claim"));
        }
        if stop_ms > MAX_STOP_MS || interval_ms > stop_ms || (interval_ms == 0) != (stop_ms == 0) {
            return Err(BadRecord::Field("interval"));
        }
        let cluster = Uuid::from_bytes(self.cluster);
        Ok(OwnerRecord {
            claim: self.claim.get(),
            beat: self.beat.get(),
            nonce: self.nonce.get(),
            life: given(self.life, "life")?,
            subject: Subject { set: given(self.set, "set")?, part: given(self.part, "part")? },
            owner: NodeIdentity {
                node: given(self.node, "node")?,
                place: given(self.place, "place")?,
                cluster: Some(cluster).filter(|id| !id.is_nil()),
                number: self.number.get(),
                name: Text::parse(&self.name).ok_or(BadRecord::Field("name"))?,
                host: Text::parse(&self.host).ok_or(BadRecord::Field("host"))?,
            },
            written: Duration::from_nanos(self.written.get()),
            interval_ms,
            stop_ms,
            state: match StoredState(self.state.get()) {
                StoredState::Held => State::Held,
                StoredState::Released => State::Released,
                _ => return Err(BadRecord::Field("state")),
            },
        })
    }
}

/// Seconds since the Unix epoch as people write them, in UTC.
#[must_use]
pub fn utc(seconds: u64) -> String {
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
    use wire::seal::sealed;

    fn record() -> OwnerRecord {
        let id = |n: u128| Uuid::from_u128(0x0123_4567_89ab_4def_8123_0000_0000_0000 + n);
        OwnerRecord {
            claim: 7,
            beat: 0x1122,
            nonce: 0x99aa_bbcc_ddee_ff00,
            life: id(1),
            subject: Subject { set: id(2), part: id(3) },
            owner: NodeIdentity {
                node: id(4),
                place: id(5),
                cluster: Some(id(6)),
                number: 2,
                name: Text::new("b"),
                host: Text::new("srv2"),
            },
            written: Duration::from_nanos(1_700_000_000_123_456_789),
            interval_ms: 2000,
            stop_ms: 5000,
            state: State::Held,
        }
    }

    /// The bytes of the example in the format page.
    #[test]
    fn the_bytes_of_an_owner_record_stay_what_they_are() {
        let bytes = record().to_bytes(Copy::First);
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
        assert!(bytes[FIELDS..].iter().all(|b| *b == 0));
        assert_eq!(OwnerRecord::parse(&bytes, Copy::First), Ok(record()));
        assert_eq!(record().written_at(), "2023-11-14 22:13:20 UTC");
    }

    #[test]
    fn what_is_no_owner_record_is_refused_by_name() {
        let bytes = record().to_bytes(Copy::First);
        assert_eq!(OwnerRecord::parse(&bytes, Copy::Beat), Err(BadRecord::Damaged), "elsewhere");
        assert_eq!(OwnerRecord::parse(&[0; OWNER_BYTES], Copy::First), Err(BadRecord::NoMagic));
        let mut torn = bytes;
        torn[300] = 1;
        assert_eq!(OwnerRecord::parse(&torn, Copy::First), Err(BadRecord::Damaged));
        let changed = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            OwnerRecord::parse(&sealed(bytes, CHECKSUM_AT), Copy::First)
        };
        assert_eq!(changed(16, 2), Err(BadRecord::Version(2)));
        assert_eq!(changed(24, 0), Err(BadRecord::Field("claim")));
        assert_eq!(changed(283, 1), Err(BadRecord::Field("interval")));
        assert_eq!(changed(290, 3), Err(BadRecord::Field("state")));
        assert_eq!(changed(208, 0x1b), Err(BadRecord::Field("host")));
        assert_eq!(changed(300, 1), Err(BadRecord::Field("rest")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_none(at in 0usize..FIELDS, value in any::<u8>()) {
            let mut bytes = record().to_bytes(Copy::Beat);
            bytes[at] = value;
            if let Ok(found) = OwnerRecord::parse(&sealed(bytes, CHECKSUM_AT), Copy::Beat) {
                prop_assert_eq!(OwnerRecord::parse(&found.to_bytes(Copy::Beat), Copy::Beat), Ok(found));
            }
        }
    }
}
