//! The superblock of a log: whose it is and what its image has adopted, kept twice.

use block::Epoch;
use peer::{Lineage, SharedLineage};
use uuid::Uuid;
use wire::seal::{is_sealed, seal};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{LogId, SLOTS};
use crate::geometry::{Geometry, MAX_CELLS, SHIFTS};

/// Length in bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE INTENT\n";

/// The only version that this release knows. Version 1 had no lineages.
const VERSION: u16 = 2;

/// Flag of a slot: its regions are all marked until the cells say so.
const ALL_MARKED: u32 = 1;

/// Flag of a slot: what had been recorded about its image was lost with an earlier log.
const FORGOTTEN: u32 = 2;

wire::open_enum! {
    /// Where a log is in its life, as stored.
    enum StoredState: u32 {
        Empty = 1,
        Active = 2,
    }
}

/// A slot in its place.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredSlot {
    image: [u8; 16],
    flags: U32,
    reached_count: U32,
    reached_epoch: U64,
    cleared_epoch: U64,
    cleared_count: U32,
    reserved: [u8; 20],
}
const _: () = assert!(size_of::<StoredSlot>() == 64);

/// The fields in their places; the rest of the superblock is zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Stored {
    magic: [u8; 16],
    version: U16,
    copy: U16,
    length: U32,
    checksum: U32,
    state: U32,
    generation: U64,
    log: U64,
    image: [u8; 16],
    region_shift: U32,
    cells: U32,
    epoch: U64,
    config: [u8; 16],
    boot: [u8; 16],
    opened: u8,
    reserved: [u8; 3],
    lineage_count: U32,
    lineage_epoch: U64,
    slots: [StoredSlot; SLOTS],
    hint: [[u8; 16]; 3],
}

const FIELDS: usize = 368;
const _: () = assert!(size_of::<Stored>() == FIELDS);
const CHECKSUM_AT: usize = std::mem::offset_of!(Stored, checksum);

/// Where a log is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is being made or converted: no write is admitted, no region is marked, and the cells mean
    /// nothing.
    Empty,
    /// In use.
    Active,
}

/// What a slot is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotEntry {
    /// The image that the marks are kept for; `None` if the slot is free. The marks of free slots
    /// are kept as well.
    pub image: Option<Uuid>,
    /// Whether all regions are marked, whatever the cells say.
    pub all_marked: bool,
    /// What has been recorded about the image (RFD 0032).
    pub shared: SharedLineage,
    /// Whether more had been recorded about it, which was lost with an earlier log.
    pub forgotten: bool,
}

/// What a superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Where the log is in its life.
    pub state: State,
    /// Counts the changes of the superblock.
    pub generation: u64,
    /// The name of this making of the log, which its cells bear.
    pub log: LogId,
    /// The image that the log belongs to, as in the label.
    pub image: Uuid,
    /// Size of a region in bytes, as a power of two.
    pub region_shift: u32,
    /// How many cells are in use.
    pub cells: u32,
    /// The highest epoch that the image has adopted.
    pub epoch: u64,
    /// The name of the configuration that it has adopted.
    pub config: Uuid,
    /// [`LogArea::boot`](disk::LogArea::boot) in which the image was last in sync; nil if its disk may not
    /// have kept what it had completed then.
    pub boot: Uuid,
    /// Whether the image is in use; if not, it was closed after a flush.
    pub opened: bool,
    /// The last lineage that the image has reached, together with others or alone (RFD 0032).
    pub lineage: Lineage,
    /// What the slots are for.
    pub slots: [SlotEntry; SLOTS],
    /// The nodes that were in sync in the adopted configuration, for messages only.
    pub hint: [Option<Uuid>; 3],
}

/// Why bytes are not a usable superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSuperblock {
    /// The disk does not give them. No parser says so; who reads the disk does.
    #[error("an unreadable superblock")]
    Unreadable,
    /// They do not begin like one.
    #[error("no superblock")]
    NoMagic,
    /// They begin like one and the checksum does not fit: torn or damaged.
    #[error("a damaged superblock")]
    Damaged,
    /// A newer version's.
    #[error("a superblock of version {0}, which this release does not know")]
    Version(u16),
    /// A copy that strayed.
    #[error("copy {0} of a superblock in the place of another")]
    Copy(u16),
    /// That of another image's log.
    #[error("a superblock of image {0}")]
    Image(Uuid),
    /// The checksum fits and a field makes no sense.
    #[error("a superblock whose {0} makes no sense")]
    Field(&'static str),
}

/// Why no copy of a superblock counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSuperblocks {
    /// One is whole and not for this release: the log must be left alone, whatever the other says.
    #[error("{0}")]
    Strange(BadSuperblock),
    /// Both are bad: every region counts as marked for everybody, and what was adopted is unknown.
    #[error("no copy of the superblock is left: {} and {}", .0[0], .0[1])]
    Lost([BadSuperblock; 2]),
    /// Both are whole, have one generation, and say different things, which no crash explains. As
    /// if they were lost.
    #[error("two superblocks of generation {0} differ")]
    Differ(u64),
}

impl Superblock {
    /// The superblock's bytes for copy number `copy`.
    #[must_use]
    pub fn to_bytes(&self, copy: u16) -> [u8; SUPERBLOCK_BYTES] {
        let state = match self.state {
            State::Empty => StoredState::Empty,
            State::Active => StoredState::Active,
        };
        let fields = Stored {
            magic: MAGIC,
            version: U16::new(VERSION),
            copy: U16::new(copy),
            length: U32::new(SUPERBLOCK_BYTES as u32),
            checksum: U32::ZERO,
            state: U32::new(state.0),
            generation: U64::new(self.generation),
            log: U64::new(self.log.0),
            image: self.image.into_bytes(),
            region_shift: U32::new(self.region_shift),
            cells: U32::new(self.cells),
            epoch: U64::new(self.epoch),
            config: self.config.into_bytes(),
            boot: self.boot.into_bytes(),
            opened: u8::from(self.opened),
            reserved: [0; 3],
            lineage_count: U32::new(self.lineage.count),
            lineage_epoch: U64::new(self.lineage.epoch.0),
            slots: self.slots.map(SlotEntry::stored),
            hint: self.hint.map(|node| node.unwrap_or_default().into_bytes()),
        };
        let mut out = [0; SUPERBLOCK_BYTES];
        out[..FIELDS].copy_from_slice(fields.as_bytes());
        seal(&mut out, CHECKSUM_AT);
        out
    }

    /// Reads the superblock in the place of copy number `copy`.
    ///
    /// # Errors
    /// [`BadSuperblock`]; whatever the bytes are.
    pub fn parse(bytes: &[u8; SUPERBLOCK_BYTES], copy: u16) -> Result<Self, BadSuperblock> {
        let (fields, rest) =
            Stored::read_from_prefix(bytes).map_err(|_| BadSuperblock::Field("length"))?;
        if fields.magic != MAGIC {
            return Err(BadSuperblock::NoMagic);
        }
        if !is_sealed(bytes, CHECKSUM_AT) {
            return Err(BadSuperblock::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(BadSuperblock::Version(fields.version.get()));
        }
        if fields.copy.get() != copy {
            return Err(BadSuperblock::Copy(fields.copy.get()));
        }
        let reserved = fields.reserved == [0; 3] && rest.iter().all(|&b| b == 0);
        if !reserved || fields.slots.iter().any(|slot| slot.reserved != [0; 20]) {
            return Err(BadSuperblock::Field("reserved part"));
        }
        Self::of_fields(&fields).map_err(BadSuperblock::Field)
    }

    fn of_fields(fields: &Stored) -> Result<Self, &'static str> {
        let state = match StoredState(fields.state.get()) {
            StoredState::Empty => State::Empty,
            StoredState::Active => State::Active,
            _ => return Err("state"),
        };
        let opened = match fields.opened {
            0 => false,
            1 => true,
            _ => return Err("opened"),
        };
        if fields.slots.iter().any(|slot| slot.flags.get() & !(ALL_MARKED | FORGOTTEN) != 0) {
            return Err("slot flags");
        }
        let superblock = Self {
            state,
            generation: fields.generation.get(),
            log: LogId(fields.log.get()),
            image: Uuid::from_bytes(fields.image),
            region_shift: fields.region_shift.get(),
            cells: fields.cells.get(),
            epoch: fields.epoch.get(),
            config: Uuid::from_bytes(fields.config),
            boot: Uuid::from_bytes(fields.boot),
            opened,
            lineage: lineage(fields.lineage_epoch, fields.lineage_count),
            slots: fields.slots.map(SlotEntry::of_stored),
            hint: fields.hint.map(some),
        };
        match superblock.nonsense() {
            Some(field) => Err(field),
            None if fields.length.get() as usize != SUPERBLOCK_BYTES => Err("length"),
            None => Ok(superblock),
        }
    }

    /// The first field that no superblock may have so.
    fn nonsense(&self) -> Option<&'static str> {
        let [a, b, c] = self.slots.map(|slot| slot.image);
        let twice = |one: Option<Uuid>, other| one.is_some() && one == other;
        let own = [a, b, c].contains(&Some(self.image));
        if self.generation == 0 {
            Some("generation")
        } else if self.image.is_nil() {
            Some("image")
        } else if !SHIFTS.contains(&self.region_shift) {
            Some("region size")
        } else if !(1..=MAX_CELLS).contains(&self.cells) {
            Some("number of cells")
        } else if own || twice(a, b) || twice(b, c) || twice(a, c) {
            Some("slots")
        } else {
            None
        }
    }

    /// How the log cuts a volume of `bytes` bytes into regions. There may be more cells than these
    /// regions need: a log is made larger before its volume is.
    ///
    /// # Errors
    /// [`BadSuperblock::Field`] if the log does not suit such a volume.
    pub fn geometry(&self, bytes: u64) -> Result<Geometry, BadSuperblock> {
        let geometry = Geometry::with_shift(bytes, self.region_shift)
            .map_err(|_| BadSuperblock::Field("region size"))?;
        if geometry.cells() > self.cells {
            return Err(BadSuperblock::Field("number of cells"));
        }
        Ok(geometry)
    }
}

impl SlotEntry {
    fn stored(self) -> StoredSlot {
        let SharedLineage { reached, cleared } = self.shared;
        let flag = |flag, set: bool| if set { flag } else { 0 };
        StoredSlot {
            image: self.image.unwrap_or_default().into_bytes(),
            flags: U32::new(flag(ALL_MARKED, self.all_marked) | flag(FORGOTTEN, self.forgotten)),
            reached_count: U32::new(reached.count),
            reached_epoch: U64::new(reached.epoch.0),
            cleared_epoch: U64::new(cleared.epoch.0),
            cleared_count: U32::new(cleared.count),
            reserved: [0; 20],
        }
    }

    fn of_stored(stored: StoredSlot) -> Self {
        let has = |flag| stored.flags.get() & flag != 0;
        let shared = SharedLineage {
            reached: lineage(stored.reached_epoch, stored.reached_count),
            cleared: lineage(stored.cleared_epoch, stored.cleared_count),
        };
        let image = some(stored.image);
        Self { image, all_marked: has(ALL_MARKED), shared, forgotten: has(FORGOTTEN) }
    }
}

fn lineage(epoch: U64, count: U32) -> Lineage {
    Lineage { epoch: Epoch(epoch.get()), count: count.get() }
}

/// A stored name; zeroes are none.
fn some(bytes: [u8; 16]) -> Option<Uuid> {
    Some(Uuid::from_bytes(bytes)).filter(|name| !name.is_nil())
}

/// The superblock that counts in the log of `image`, of what its two places hold: the newest whole
/// one. The other place should then be written again if it holds anything else.
///
/// # Errors
/// [`BadSuperblocks`]
pub fn choose(
    copies: [Result<Superblock, BadSuperblock>; 2],
    image: Uuid,
) -> Result<Superblock, BadSuperblocks> {
    let strange = copies
        .iter()
        .filter_map(|copy| copy.as_ref().err())
        .find(|why| matches!(why, BadSuperblock::Version(_) | BadSuperblock::Field(_)));
    if let Some(strange) = strange {
        // A whole superblock that we do not understand may be newer than the one we do.
        return Err(BadSuperblocks::Strange(*strange));
    }
    let own = copies.map(|copy| match copy {
        Ok(found) if found.image != image => Err(BadSuperblock::Image(found.image)),
        other => other,
    });
    match own {
        [Ok(a), Ok(b)] if a.generation == b.generation && a != b => {
            Err(BadSuperblocks::Differ(a.generation))
        }
        [Ok(a), Ok(b)] => Ok(if b.generation > a.generation { b } else { a }),
        [Ok(found), Err(_)] | [Err(_), Ok(found)] => Ok(found),
        [Err(a), Err(b)] => Err(BadSuperblocks::Lost([a, b])),
    }
}

#[cfg(test)]
mod tests;
