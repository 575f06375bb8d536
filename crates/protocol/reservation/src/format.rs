//! The table as it lies on disk: `docs/format/reservations.md`.

use std::collections::BTreeSet;

use wire::{Crc32c, crc32c};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::party::{Initiator, MAX_NAME, Party};
use crate::table::{Kind, Last, Registrant, Reservation, Sole, Table, What};

/// Length in bytes of a copy of the table.
pub const COPY_BYTES: usize = 44 * 1024;

/// Most registrations of a volume. With long names the copy is full before.
pub const MAX_REGISTRANTS: usize = 1024;

const MAGIC: [u8; 16] = *b"WINDROSE RESERV\n";

/// The only version so far.
const VERSION: u16 = 1;

/// Flag of the table: registrations outlive a loss of power.
const PERSISTS: u8 = 1;
/// Flag of a registration: made at all target ports.
const ALL_PORTS: u8 = 1;
/// Flag of the last change, a PREEMPT: the type changed.
const CHANGED: u8 = 1;
/// Flag of the last change, a PREEMPT: commands are aborted.
const ABORT: u8 = 2;

wire::open_enum! {
    /// What the last change was, as stored.
    enum StoredWhat: u8 {
        None = 0,
        Quiet = 1,
        Released = 2,
        Cleared = 3,
        Preempted = 4,
        Modes = 5,
        UnitReset = 6,
        TargetReset = 7,
        TasksCleared = 8,
    }
}

wire::open_enum! {
    /// What a name is, as stored.
    enum StoredName: u8 {
        Iscsi = 1,
        Host = 2,
    }
}

/// A party in its place: `name` counts the names behind the registrations, from 0.
#[derive(Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct StoredParty {
    name: U16,
    port: U16,
    isid: [u8; 6],
    reserved: [u8; 2],
}

/// The number of no name.
const NO_NAME: u16 = u16::MAX;
const NO_PARTY: StoredParty =
    StoredParty { name: U16::MAX_VALUE, port: U16::ZERO, isid: [0; 6], reserved: [0; 2] };

/// A registration in its place.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct StoredRegistrant {
    party: StoredParty,
    flags: u8,
    reserved: [u8; 3],
    key: U64,
}

const REGISTRANT: usize = 24;
const _: () = assert!(size_of::<StoredRegistrant>() == REGISTRANT);

/// The fields in their places. Registrations follow, then the names, then zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Stored {
    magic: [u8; 16],
    version: U16,
    reserved: U16,
    length: U32,
    checksum: U32,
    pr_generation: U32,
    generation: U64,
    era: U64,
    aborted: U64,
    reserved2: U32,
    resets: U32,
    flags: u8,
    kind: u8,
    what: u8,
    what_flags: u8,
    registrants: U16,
    names: U16,
    victim: U64,
    seat: U64,
    holder: StoredParty,
    sole: StoredParty,
    author: StoredParty,
    reserved3: U32,
    modes: U128,
}

const FIELDS: usize = 144;
const _: () = assert!(size_of::<Stored>() == FIELDS);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);
const BEHIND_CHECKSUM: usize = CHECKSUM_AT + size_of::<U32>();

/// What a name has before its bytes: what it is, and its length.
const NAME_HEADER: usize = 2;

/// Room that registrations leave: for the names of the author of the last change and of who
/// RESERVEd the unit, who may have registered nothing. So only registering can find the table full.
const SPARE: usize = 2 * (NAME_HEADER + MAX_NAME);

// 64 hosts with the longest names, with 16 paths each.
const _: () =
    assert!(FIELDS + 1024 * REGISTRANT + 64 * (NAME_HEADER + MAX_NAME) + SPARE <= COPY_BYTES);

/// Why bytes are no table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// They are not [`COPY_BYTES`].
    #[error("{0} bytes of reservations")]
    Length(usize),
    /// They do not begin like one.
    #[error("no reservations")]
    NoMagic,
    /// They begin like one and the checksum does not fit: torn or damaged.
    #[error("damaged reservations")]
    Checksum,
    /// A newer version's.
    #[error("reservations of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum fits and a field makes no sense.
    #[error("reservations whose {0} makes no sense")]
    Field(&'static str),
    /// One copy was never written and the other is not whole, which no crash explains.
    #[error("reservations of which one copy is damaged and the other is missing")]
    Missing,
}

impl Damaged {
    /// Whether the bytes are whole and not for this release.
    const fn is_strange(self) -> bool {
        matches!(self, Self::Version(_) | Self::Field(_))
    }
}

/// The name in an initiator: what it is and its bytes. Two initiator ports may have one name.
fn name_of(initiator: &Initiator) -> (StoredName, &[u8]) {
    match initiator {
        Initiator::Iscsi { name, .. } => (StoredName::Iscsi, name.as_bytes()),
        Initiator::Host(id) => (StoredName::Host, id),
    }
}

/// Whether there is room for these registrations, which are sorted.
pub(crate) fn fits(registrants: &[Registrant]) -> bool {
    let mut bytes = FIELDS + registrants.len() * REGISTRANT + SPARE;
    let mut last = None;
    for registrant in registrants {
        let name = name_of(&registrant.party.initiator);
        if last != Some(name) {
            bytes += NAME_HEADER + name.1.len();
            last = Some(name);
        }
    }
    registrants.len() <= MAX_REGISTRANTS && bytes <= COPY_BYTES
}

/// The names of a table, each once, in the order in which they are stored.
struct Names<'a>(Vec<(StoredName, &'a [u8])>);

impl<'a> Names<'a> {
    fn of(table: &'a Table) -> Self {
        let holder = table.reservation.as_ref().and_then(|held| held.holder.as_ref());
        let sole = table.sole.as_ref().map(|sole| &sole.party);
        let author = table.last.as_ref().and_then(|last| last.by.as_ref());
        let registered = table.registrants.iter().map(|r| &r.party);
        let parties = registered.chain(holder).chain(sole).chain(author);
        let names: BTreeSet<_> = parties.map(|party| name_of(&party.initiator)).collect();
        Self(names.into_iter().collect())
    }

    fn stored(&self, party: Option<&Party>) -> StoredParty {
        let Some(party) = party else { return NO_PARTY };
        let at =
            self.0.binary_search(&name_of(&party.initiator)).expect("the names of all parties");
        let isid = match party.initiator {
            Initiator::Iscsi { isid, .. } => isid,
            Initiator::Host(_) => [0; 6],
        };
        StoredParty {
            name: U16::new(at as u16),
            port: U16::new(party.port),
            isid,
            reserved: [0; 2],
        }
    }
}

impl What {
    /// Its code, flags and victim.
    fn stored(self) -> (StoredWhat, u8, u64) {
        match self {
            Self::Quiet => (StoredWhat::Quiet, 0, 0),
            Self::Released => (StoredWhat::Released, 0, 0),
            Self::Cleared => (StoredWhat::Cleared, 0, 0),
            Self::Preempted { victim, changed, abort } => {
                let flags = if changed { CHANGED } else { 0 } | if abort { ABORT } else { 0 };
                (StoredWhat::Preempted, flags, victim)
            }
            Self::Modes => (StoredWhat::Modes, 0, 0),
            Self::TasksCleared => (StoredWhat::TasksCleared, 0, 0),
            Self::Reset { target: false } => (StoredWhat::UnitReset, 0, 0),
            Self::Reset { target: true } => (StoredWhat::TargetReset, 0, 0),
        }
    }

    fn of_stored(stored: &Stored) -> Result<Option<Self>, Damaged> {
        Ok(Some(match StoredWhat(stored.what) {
            StoredWhat::None => return Ok(None),
            StoredWhat::Quiet => Self::Quiet,
            StoredWhat::Released => Self::Released,
            StoredWhat::Cleared => Self::Cleared,
            StoredWhat::Preempted => Self::Preempted {
                victim: stored.victim.get(),
                changed: stored.what_flags & CHANGED != 0,
                abort: stored.what_flags & ABORT != 0,
            },
            StoredWhat::Modes => Self::Modes,
            StoredWhat::TasksCleared => Self::TasksCleared,
            StoredWhat::UnitReset => Self::Reset { target: false },
            StoredWhat::TargetReset => Self::Reset { target: true },
            _ => return Err(Damaged::Field("last change")),
        }))
    }
}

impl Table {
    /// The bytes of one copy, [`COPY_BYTES`] of them. A table that was never changed is zeroes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(COPY_BYTES);
        if self.generation > 0 {
            let names = Names::of(self);
            out.extend_from_slice(self.fields(&names).as_bytes());
            for registrant in &self.registrants {
                let stored = StoredRegistrant {
                    party: names.stored(Some(&registrant.party)),
                    flags: if registrant.all_ports { ALL_PORTS } else { 0 },
                    reserved: [0; 3],
                    key: U64::new(registrant.key),
                };
                out.extend_from_slice(stored.as_bytes());
            }
            for (kind, name) in &names.0 {
                out.extend([kind.0, name.len() as u8]);
                out.extend_from_slice(name);
            }
        }
        assert!(out.len() <= COPY_BYTES, "a table with more than fits");
        out.resize(COPY_BYTES, 0);
        if self.generation > 0 {
            let checksum = crc32c(&out);
            out[CHECKSUM_AT..BEHIND_CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        out
    }

    fn fields(&self, names: &Names<'_>) -> Stored {
        let holder = self.reservation.as_ref().and_then(|held| held.holder.as_ref());
        let (what, what_flags, victim) =
            self.last.as_ref().map_or((StoredWhat::None, 0, 0), |last| last.what.stored());
        Stored {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            length: U32::new(COPY_BYTES as u32),
            checksum: U32::ZERO,
            pr_generation: U32::new(self.pr_generation),
            generation: U64::new(self.generation),
            era: U64::new(self.era),
            aborted: U64::new(self.aborted),
            modes: U128::new(self.modes),
            resets: U32::new(self.resets),
            flags: if self.persists { PERSISTS } else { 0 },
            kind: self.reservation.as_ref().map_or(0, |held| held.kind.scsi()),
            what: what.0,
            what_flags,
            registrants: U16::new(self.registrants.len() as u16),
            names: U16::new(names.0.len() as u16),
            victim: U64::new(victim),
            seat: U64::new(self.sole.as_ref().map_or(0, |sole| sole.seat)),
            holder: names.stored(holder),
            sole: names.stored(self.sole.as_ref().map(|sole| &sole.party)),
            author: names.stored(self.last.as_ref().and_then(|last| last.by.as_ref())),
            reserved2: U32::ZERO,
            reserved3: U32::ZERO,
        }
    }

    /// Reads one copy. Zeroes are the table that was never changed.
    ///
    /// # Errors
    /// [`Damaged`]; whatever the bytes are.
    pub fn parse(bytes: &[u8]) -> Result<Self, Damaged> {
        if bytes.len() != COPY_BYTES {
            return Err(Damaged::Length(bytes.len()));
        }
        if is_blank(bytes) {
            return Ok(Self::default());
        }
        let (stored, rest) =
            Stored::read_from_prefix(bytes).map_err(|_| Damaged::Length(bytes.len()))?;
        if stored.magic != MAGIC {
            return Err(Damaged::NoMagic);
        }
        let (front, back) = (&bytes[..CHECKSUM_AT], &bytes[BEHIND_CHECKSUM..]);
        let checksum = Crc32c::new().update(front).update(&[0; 4]).update(back).value();
        if stored.checksum.get() != checksum {
            return Err(Damaged::Checksum);
        }
        if stored.version.get() != VERSION {
            return Err(Damaged::Version(stored.version.get()));
        }
        let table = Self::of_stored(&stored, rest)?;
        if let Some(field) = table.nonsense() {
            return Err(Damaged::Field(field));
        }
        // There is one way to write a table. What differs from it (reserved bytes, flags, the order
        // of names, names that nobody has) is not for this release.
        if table.encode() != bytes {
            return Err(Damaged::Field("filling"));
        }
        Ok(table)
    }

    /// The table that counts, of what its two places hold, and which of them does not hold it, if
    /// one does not: that one must be written again, alone, before the table is changed.
    ///
    /// A change is written to copy 0 and made durable, then the same bytes to copy 1, and only then
    /// is it answered. So a crash tears at most one copy, and:
    ///
    /// * if copy 0 is torn, its change was not answered, and copy 1 holds what was before it;
    /// * if copy 0 is whole, it holds every change that was answered; copy 1 holds the same, or
    ///   what was before, or is torn between them.
    ///
    /// Hence copy 0 counts if it is whole, else copy 1. Three things that no crash leaves are
    /// decided for safety: a newer copy 1 counts although copy 0 is whole; a copy 0 of zeroes,
    /// which says that there never was a change, counts only if copy 1 says so too; and where
    /// either copy is whole and not for this release, neither counts.
    ///
    /// # Errors
    /// [`Damaged`] if none counts.
    pub fn choose(copy0: &[u8], copy1: &[u8]) -> Result<(Self, Option<usize>), Damaged> {
        let both = [Self::parse(copy0), Self::parse(copy1)];
        let strange = both.iter().filter_map(|copy| copy.as_ref().err()).find(|e| e.is_strange());
        if let Some(strange) = strange {
            return Err(*strange);
        }
        match both {
            [Ok(a), Ok(b)] if b.generation > a.generation => Ok((b, Some(0))),
            [Ok(a), Ok(b)] if a == b => Ok((a, None)),
            [Ok(a), Err(_)] if a.generation == 0 => Err(Damaged::Missing),
            [Ok(a), _] => Ok((a, Some(1))),
            [Err(_), Ok(b)] => Ok((b, Some(0))),
            [Err(why), Err(_)] => Err(why),
        }
    }

    /// The table that bytes tell, which may break every rule.
    fn of_stored(stored: &Stored, rest: &[u8]) -> Result<Self, Damaged> {
        let count = usize::from(stored.registrants.get());
        let (registrants, names) = <[StoredRegistrant]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| Damaged::Field("number of registrations"))?;
        let names = parse_names(names, usize::from(stored.names.get()))?;
        let party = |stored: &StoredParty| parse_party(stored, &names);
        let reservation = match stored.kind {
            0 => None,
            code => {
                let kind = Kind::from_scsi(code).ok_or(Damaged::Field("type of reservation"))?;
                Some(Reservation { kind, holder: party(&stored.holder)? })
            }
        };
        let seat = stored.seat.get();
        let author = party(&stored.author)?;
        let registrants = registrants.iter().map(|r| {
            let party = party(&r.party)?.ok_or(Damaged::Field("registration"))?;
            Ok(Registrant { party, key: r.key.get(), all_ports: r.flags & ALL_PORTS != 0 })
        });
        Ok(Self {
            generation: stored.generation.get(),
            era: stored.era.get(),
            persists: stored.flags & PERSISTS != 0,
            pr_generation: stored.pr_generation.get(),
            reservation,
            sole: party(&stored.sole)?.map(|party| Sole { party, seat }),
            modes: stored.modes.get(),
            resets: stored.resets.get(),
            last: What::of_stored(stored)?.map(|what| Last { by: author, what }),
            aborted: stored.aborted.get(),
            registrants: registrants.collect::<Result<_, _>>()?,
        })
    }

    /// The first rule of tables that this one breaks.
    fn nonsense(&self) -> Option<&'static str> {
        let sorted = self.registrants.is_sorted_by(|a, b| a.party < b.party);
        let keyed = self.registrants.iter().all(|r| r.key != 0);
        let held = self.reservation.as_ref().is_none_or(|held| match &held.holder {
            Some(holder) => !held.kind.is_all_registrants() && self.registrant(holder).is_some(),
            None => held.kind.is_all_registrants() && !self.registrants.is_empty(),
        });
        if self.generation == 0 {
            Some("generation")
        } else if self.aborted > self.generation {
            Some("last abort")
        } else if !sorted {
            Some("order of registrations")
        } else if !keyed {
            Some("key")
        } else if !self.fits() {
            Some("number of registrations")
        } else if !held {
            Some("holder")
        } else if self.sole.is_some() && !self.registrants.is_empty() {
            Some("RESERVE")
        } else {
            None
        }
    }
}

fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b == 0)
}

/// A name as bytes tell it, in an initiator whose port is not known yet.
fn parse_names(mut bytes: &[u8], count: usize) -> Result<Vec<Initiator>, Damaged> {
    const BAD: Damaged = Damaged::Field("name");
    let mut names = Vec::new();
    for _ in 0..count {
        let ([kind, len], rest) = bytes.split_first_chunk().ok_or(BAD)?;
        let (name, rest) = rest.split_at_checked(usize::from(*len)).ok_or(BAD)?;
        let initiator = match StoredName(*kind) {
            StoredName::Iscsi => {
                let name = std::str::from_utf8(name).map_err(|_| BAD)?.to_owned();
                Initiator::Iscsi { name, isid: [0; 6] }
            }
            StoredName::Host => Initiator::Host(name.try_into().map_err(|_| BAD)?),
            _ => return Err(BAD),
        };
        if !initiator.is_valid() {
            return Err(BAD);
        }
        names.push(initiator);
        bytes = rest;
    }
    Ok(names)
}

fn parse_party(stored: &StoredParty, names: &[Initiator]) -> Result<Option<Party>, Damaged> {
    if stored.name.get() == NO_NAME {
        return Ok(None);
    }
    let name = names.get(usize::from(stored.name.get()));
    let mut initiator = name.ok_or(Damaged::Field("number of a name"))?.clone();
    if let Initiator::Iscsi { isid, .. } = &mut initiator {
        *isid = stored.isid;
    }
    Ok(Some(Party { initiator, port: stored.port.get() }))
}

#[cfg(test)]
mod tests;
