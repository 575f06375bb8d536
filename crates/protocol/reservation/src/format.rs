//! The on-disk format of the table: `docs/format/reservations.md`.

use std::collections::BTreeSet;

use wire::{Crc32c, crc32c};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nexus::{Initiator, ItNexus, MAX_NAME};
use crate::table::{
    ChangeEffect, LastChange, Registrant, Reservation, ReservationType, Spc2Reservation, Table,
};

/// Length in bytes of a copy of the table.
pub const COPY_BYTES: usize = 44 * 1024;

/// Most registrations of a volume. With long names the copy is full earlier.
pub const MAX_REGISTRANTS: usize = 1024;

const MAGIC: [u8; 16] = *b"WINDROSE RESERV\n";

/// The only version so far.
const VERSION: u16 = 1;

/// Flag of the table: registrations survive a loss of power.
const FLAG_PTPL: u8 = 1;
/// Flag of a registration: made at all target ports.
const FLAG_ALL_TG_PT: u8 = 1;
/// Flag of the last change, a PREEMPT: the type changed.
const FLAG_TYPE_CHANGED: u8 = 1;
/// Flag of the last change, a PREEMPT: commands are aborted.
const FLAG_ABORT: u8 = 2;

wire::open_enum! {
    /// The kind of the last change, as stored.
    enum StoredEffect: u8 {
        None = 0,
        Silent = 1,
        Released = 2,
        Cleared = 3,
        Preempted = 4,
        ModePagesChanged = 5,
        UnitReset = 6,
        TargetReset = 7,
        TasksCleared = 8,
    }
}

wire::open_enum! {
    /// The kind of a name, as stored.
    enum StoredNameKind: u8 {
        Iscsi = 1,
        Host = 2,
    }
}

/// A stored nexus: `name` is an index into the names after the registrations, from 0.
#[derive(Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct StoredParty {
    name: U16,
    port: U16,
    isid: [u8; 6],
    reserved: [u8; 2],
}

/// The index of no name.
const NO_NAME: u16 = u16::MAX;
const NO_PARTY: StoredParty =
    StoredParty { name: U16::MAX_VALUE, port: U16::ZERO, isid: [0; 6], reserved: [0; 2] };

/// A stored registration.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct StoredRegistrant {
    party: StoredParty,
    flags: u8,
    reserved: [u8; 3],
    key: U64,
}

const REGISTRANT_LEN: usize = 24;
const _: () = assert!(size_of::<StoredRegistrant>() == REGISTRANT_LEN);

/// The header fields. Registrations follow, then the names, then zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct StoredTable {
    magic: [u8; 16],
    version: U16,
    reserved: U16,
    length: U32,
    checksum: U32,
    pr_generation: U32,
    generation: U64,
    power_epoch: U64,
    abort_generation: U64,
    reserved2: U32,
    resets: U32,
    flags: u8,
    kind: u8,
    effect: u8,
    effect_flags: u8,
    registrants: U16,
    names: U16,
    preempt_key: U64,
    incarnation: U64,
    holder: StoredParty,
    spc2_holder: StoredParty,
    changed_by: StoredParty,
    reserved3: U32,
    mode_pages: U128,
}

const TABLE_HEADER_LEN: usize = 144;
const _: () = assert!(size_of::<StoredTable>() == TABLE_HEADER_LEN);
const CHECKSUM_OFFSET: usize = std::mem::offset_of!(StoredTable, checksum);
const AFTER_CHECKSUM: usize = CHECKSUM_OFFSET + size_of::<U32>();

/// Length of a name's header: its kind and length.
const NAME_HEADER: usize = 2;

/// Room reserved besides registrations: for the names of the author of the last change and of the
/// holder of an SPC-2 reservation, which may not be registered. So only a registration can find the
/// table full.
const RESERVED_NAME_BYTES: usize = 2 * (NAME_HEADER + MAX_NAME);

// 64 hosts with the longest names, with 16 paths each.
const _: () = assert!(
    TABLE_HEADER_LEN + 1024 * REGISTRANT_LEN + 64 * (NAME_HEADER + MAX_NAME) + RESERVED_NAME_BYTES
        <= COPY_BYTES
);

/// Why a stored table is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// They are not [`COPY_BYTES`].
    #[error("{0} bytes of reservations")]
    Length(usize),
    /// They have no magic number.
    #[error("no reservations")]
    NoMagic,
    /// The checksum is wrong: torn or damaged.
    #[error("damaged reservations")]
    Checksum,
    /// From a newer version.
    #[error("reservations of version {0}, which this release does not know")]
    Version(u16),
    /// The checksum is correct but a field is invalid.
    #[error("reservations with an invalid {0}")]
    Field(&'static str),
    /// One copy was never written and the other is damaged, which no crash explains.
    #[error("reservations of which one copy is damaged and the other is missing")]
    CopyMissing,
}

impl TableError {
    /// Whether the bytes are intact but not supported by this release.
    const fn is_unsupported(self) -> bool {
        matches!(self, Self::Version(_) | Self::Field(_))
    }
}

/// The kind and the bytes of an initiator's name. Several initiator ports may share a name.
fn name_of(initiator: &Initiator) -> (StoredNameKind, &[u8]) {
    match initiator {
        Initiator::Iscsi { name, .. } => (StoredNameKind::Iscsi, name.as_bytes()),
        Initiator::Host(id) => (StoredNameKind::Host, id),
    }
}

/// Whether these sorted registrations fit.
fn registrants_fit(registrants: &[Registrant]) -> bool {
    let mut bytes = TABLE_HEADER_LEN + registrants.len() * REGISTRANT_LEN + RESERVED_NAME_BYTES;
    let mut last = None;
    for registrant in registrants {
        let name = name_of(&registrant.nexus.initiator);
        if last != Some(name) {
            bytes += NAME_HEADER + name.1.len();
            last = Some(name);
        }
    }
    registrants.len() <= MAX_REGISTRANTS && bytes <= COPY_BYTES
}

/// The names of a table, each once, in the order in which they are stored.
struct Names<'a>(Vec<(StoredNameKind, &'a [u8])>);

impl<'a> Names<'a> {
    fn of(table: &'a Table) -> Self {
        let holder = table.reservation.as_ref().and_then(|held| held.holder.as_ref());
        let spc2 = table.spc2_reservation.as_ref().map(|spc2| &spc2.nexus);
        let author = table.last_change.as_ref().and_then(|last| last.by.as_ref());
        let registered = table.registrants.iter().map(|r| &r.nexus);
        let nexuses = registered.chain(holder).chain(spc2).chain(author);
        let names: BTreeSet<_> = nexuses.map(|party| name_of(&party.initiator)).collect();
        Self(names.into_iter().collect())
    }

    fn stored(&self, party: Option<&ItNexus>) -> StoredParty {
        let Some(party) = party else { return NO_PARTY };
        let at = self.0.binary_search(&name_of(&party.initiator)).expect("the length of all names");
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

impl ChangeEffect {
    /// Its code, flags and preempted key.
    fn stored(self) -> (StoredEffect, u8, u64) {
        match self {
            Self::Silent => (StoredEffect::Silent, 0, 0),
            Self::Released => (StoredEffect::Released, 0, 0),
            Self::Cleared => (StoredEffect::Cleared, 0, 0),
            Self::Preempted { preempt_key: victim, type_changed: changed, abort } => {
                let flags = if changed { FLAG_TYPE_CHANGED } else { 0 }
                    | if abort { FLAG_ABORT } else { 0 };
                (StoredEffect::Preempted, flags, victim)
            }
            Self::ModePagesChanged => (StoredEffect::ModePagesChanged, 0, 0),
            Self::TasksCleared => (StoredEffect::TasksCleared, 0, 0),
            Self::Reset { whole_target: false } => (StoredEffect::UnitReset, 0, 0),
            Self::Reset { whole_target: true } => (StoredEffect::TargetReset, 0, 0),
        }
    }

    fn of_stored(stored: &StoredTable) -> Result<Option<Self>, TableError> {
        Ok(Some(match StoredEffect(stored.effect) {
            StoredEffect::None => return Ok(None),
            StoredEffect::Silent => Self::Silent,
            StoredEffect::Released => Self::Released,
            StoredEffect::Cleared => Self::Cleared,
            StoredEffect::Preempted => Self::Preempted {
                preempt_key: stored.preempt_key.get(),
                type_changed: stored.effect_flags & FLAG_TYPE_CHANGED != 0,
                abort: stored.effect_flags & FLAG_ABORT != 0,
            },
            StoredEffect::ModePagesChanged => Self::ModePagesChanged,
            StoredEffect::TasksCleared => Self::TasksCleared,
            StoredEffect::UnitReset => Self::Reset { whole_target: false },
            StoredEffect::TargetReset => Self::Reset { whole_target: true },
            _ => return Err(TableError::Field("last change")),
        }))
    }
}

impl Table {
    /// Whether the registrations fit a copy.
    pub(crate) fn fits_one_copy(&self) -> bool {
        registrants_fit(&self.registrants)
    }

    /// Encodes one copy, of [`COPY_BYTES`]. A table that was never changed is all zeroes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(COPY_BYTES);
        if self.generation > 0 {
            let names = Names::of(self);
            out.extend_from_slice(self.fields(&names).as_bytes());
            for registrant in &self.registrants {
                let stored = StoredRegistrant {
                    party: names.stored(Some(&registrant.nexus)),
                    flags: if registrant.all_ports { FLAG_ALL_TG_PT } else { 0 },
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
        assert!(out.len() <= COPY_BYTES, "too many registrations");
        out.resize(COPY_BYTES, 0);
        if self.generation > 0 {
            let checksum = crc32c(&out);
            out[CHECKSUM_OFFSET..AFTER_CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        out
    }

    fn fields(&self, names: &Names<'_>) -> StoredTable {
        let holder = self.reservation.as_ref().and_then(|held| held.holder.as_ref());
        let (what, what_flags, victim) = self
            .last_change
            .as_ref()
            .map_or((StoredEffect::None, 0, 0), |last| last.effect.stored());
        StoredTable {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            length: U32::new(COPY_BYTES as u32),
            checksum: U32::ZERO,
            pr_generation: U32::new(self.pr_generation),
            generation: U64::new(self.generation),
            power_epoch: U64::new(self.power_epoch),
            abort_generation: U64::new(self.abort_generation),
            mode_pages: U128::new(self.mode_pages),
            resets: U32::new(self.reset_count),
            flags: if self.persist { FLAG_PTPL } else { 0 },
            kind: self.reservation.as_ref().map_or(0, |held| held.kind.scsi()),
            effect: what.0,
            effect_flags: what_flags,
            registrants: U16::new(self.registrants.len() as u16),
            names: U16::new(names.0.len() as u16),
            preempt_key: U64::new(victim),
            incarnation: U64::new(
                self.spc2_reservation.as_ref().map_or(0, |spc2| spc2.incarnation),
            ),
            holder: names.stored(holder),
            spc2_holder: names.stored(self.spc2_reservation.as_ref().map(|spc2| &spc2.nexus)),
            changed_by: names.stored(self.last_change.as_ref().and_then(|last| last.by.as_ref())),
            reserved2: U32::ZERO,
            reserved3: U32::ZERO,
        }
    }

    /// Parses one copy. All zeroes are the table that was never changed.
    ///
    /// # Errors
    /// [`TableError`]; for any bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        if bytes.len() != COPY_BYTES {
            return Err(TableError::Length(bytes.len()));
        }
        if is_blank(bytes) {
            return Ok(Self::default());
        }
        let (stored, rest) =
            StoredTable::read_from_prefix(bytes).map_err(|_| TableError::Length(bytes.len()))?;
        if stored.magic != MAGIC {
            return Err(TableError::NoMagic);
        }
        let (front, back) = (&bytes[..CHECKSUM_OFFSET], &bytes[AFTER_CHECKSUM..]);
        let checksum = Crc32c::new().update(front).update(&[0; 4]).update(back).value();
        if stored.checksum.get() != checksum {
            return Err(TableError::Checksum);
        }
        if stored.version.get() != VERSION {
            return Err(TableError::Version(stored.version.get()));
        }
        let table = Self::of_stored(&stored, rest)?;
        if let Some(field) = table.violated_invariant() {
            return Err(TableError::Field(field));
        }
        // There is one encoding of each table. Anything else (reserved bytes, flags, the order of
        // names, unused names) is from another release.
        if table.encode() != bytes {
            return Err(TableError::Field("filling"));
        }
        Ok(table)
    }

    /// The current table, given both copies, and which copy does not hold it, if any: that one must
    /// be rewritten, alone, before the table is changed.
    ///
    /// A change is written to copy 0 and made durable, then to copy 1, and only then answered. So a
    /// crash tears at most one copy, and:
    ///
    /// * if copy 0 is torn, its change was not answered, and copy 1 holds the table before it;
    /// * if copy 0 is intact, it holds every answered change; copy 1 holds the same, or the table
    ///   before, or is torn between them.
    ///
    /// Hence copy 0 is current if it is intact, else copy 1. Three states that no crash leaves are
    /// decided for safety: a newer copy 1 is current although copy 0 is intact; a copy 0 of zeroes,
    /// which means that there never was a change, is current only if copy 1 is zeroes too; and if
    /// either copy is intact but not supported by this release, neither is current.
    ///
    /// # Errors
    /// [`TableError`] if neither is current.
    pub fn recover(copy0: &[u8], copy1: &[u8]) -> Result<(Self, Option<usize>), TableError> {
        let both = [Self::parse(copy0), Self::parse(copy1)];
        let strange =
            both.iter().filter_map(|copy| copy.as_ref().err()).find(|e| e.is_unsupported());
        if let Some(strange) = strange {
            return Err(*strange);
        }
        match both {
            [Ok(a), Ok(b)] if b.generation > a.generation => Ok((b, Some(0))),
            [Ok(a), Ok(b)] if a == b => Ok((a, None)),
            [Ok(a), Err(_)] if a.generation == 0 => Err(TableError::CopyMissing),
            [Ok(a), _] => Ok((a, Some(1))),
            [Err(_), Ok(b)] => Ok((b, Some(0))),
            [Err(why), Err(_)] => Err(why),
        }
    }

    /// Decodes a table, which may violate invariants.
    fn of_stored(stored: &StoredTable, rest: &[u8]) -> Result<Self, TableError> {
        let count = usize::from(stored.registrants.get());
        let (registrants, names) = <[StoredRegistrant]>::ref_from_prefix_with_elems(rest, count)
            .map_err(|_| TableError::Field("number of registrations"))?;
        let names = parse_names(names, usize::from(stored.names.get()))?;
        let party = |stored: &StoredParty| parse_party(stored, &names);
        let reservation = match stored.kind {
            0 => None,
            code => {
                let kind = ReservationType::from_scsi(code)
                    .ok_or(TableError::Field("type of reservation"))?;
                Some(Reservation { kind, holder: party(&stored.holder)? })
            }
        };
        let incarnation = stored.incarnation.get();
        let author = party(&stored.changed_by)?;
        let registrants = registrants.iter().map(|r| {
            let party = party(&r.party)?.ok_or(TableError::Field("registration"))?;
            Ok(Registrant {
                nexus: party,
                key: r.key.get(),
                all_ports: r.flags & FLAG_ALL_TG_PT != 0,
            })
        });
        Ok(Self {
            generation: stored.generation.get(),
            power_epoch: stored.power_epoch.get(),
            persist: stored.flags & FLAG_PTPL != 0,
            pr_generation: stored.pr_generation.get(),
            reservation,
            spc2_reservation: party(&stored.spc2_holder)?
                .map(|party| Spc2Reservation { nexus: party, incarnation }),
            mode_pages: stored.mode_pages.get(),
            reset_count: stored.resets.get(),
            last_change: ChangeEffect::of_stored(stored)?
                .map(|what| LastChange { by: author, effect: what }),
            abort_generation: stored.abort_generation.get(),
            registrants: registrants.collect::<Result<_, _>>()?,
        })
    }

    /// The first invariant that this table violates.
    fn violated_invariant(&self) -> Option<&'static str> {
        let sorted = self.registrants.is_sorted_by(|a, b| a.nexus < b.nexus);
        let keyed = self.registrants.iter().all(|r| r.key != 0);
        let held = self.reservation.as_ref().is_none_or(|held| match &held.holder {
            Some(holder) => !held.kind.is_all_registrants() && self.registrant(holder).is_some(),
            None => held.kind.is_all_registrants() && !self.registrants.is_empty(),
        });
        if self.generation == 0 {
            Some("generation")
        } else if self.abort_generation > self.generation {
            Some("last abort")
        } else if !sorted {
            Some("order of registrations")
        } else if !keyed {
            Some("key")
        } else if !self.fits_one_copy() {
            Some("number of registrations")
        } else if !held {
            Some("holder")
        } else if self.spc2_reservation.is_some() && !self.registrants.is_empty() {
            Some("RESERVE")
        } else {
            None
        }
    }
}

fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b == 0)
}

/// Decodes the names, as initiators whose port is not known yet.
fn parse_names(mut bytes: &[u8], count: usize) -> Result<Vec<Initiator>, TableError> {
    const BAD: TableError = TableError::Field("name");
    let mut names = Vec::new();
    for _ in 0..count {
        let ([kind, len], rest) = bytes.split_first_chunk().ok_or(BAD)?;
        let (name, rest) = rest.split_at_checked(usize::from(*len)).ok_or(BAD)?;
        let initiator = match StoredNameKind(*kind) {
            StoredNameKind::Iscsi => {
                let name = std::str::from_utf8(name).map_err(|_| BAD)?.to_owned();
                Initiator::Iscsi { name, isid: [0; 6] }
            }
            StoredNameKind::Host => Initiator::Host(name.try_into().map_err(|_| BAD)?),
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

fn parse_party(stored: &StoredParty, names: &[Initiator]) -> Result<Option<ItNexus>, TableError> {
    if stored.name.get() == NO_NAME {
        return Ok(None);
    }
    let name = names.get(usize::from(stored.name.get()));
    let mut initiator = name.ok_or(TableError::Field("number of a name"))?.clone();
    if let Initiator::Iscsi { isid, .. } = &mut initiator {
        *isid = stored.isid;
    }
    Ok(Some(ItNexus { initiator, port: stored.port.get() }))
}

#[cfg(test)]
mod tests;
