//! The superblock of a log: its image and the configuration that this has adopted; kept twice.

use block::Epoch;
use peer::{DataGeneration, PeerGenerations};
use uuid::Uuid;
use wire::embedded_checksum::{verify_checksum, write_checksum};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{LogId, SLOTS};
use crate::geometry::{Geometry, MAX_CELLS, REGION_SHIFTS};

/// Length in bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"WINDROSE INTENT\n";

/// The only known version. Version 1 had no data generations.
const VERSION: u16 = 2;

/// Flag of a slot: all its regions are dirty, whatever the cells say.
const FLAG_ALL_DIRTY: u32 = 1;

/// Flag of a slot: the generations recorded about its image were lost with an earlier log.
const FLAG_HISTORY_LOST: u32 = 2;

wire::open_enum! {
    /// The state of a log, as stored.
    enum StoredLogState: u32 {
        Initializing = 1,
        Active = 2,
    }
}

/// The stored fields of a slot.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredSlot {
    image: [u8; 16],
    flags: U32,
    common_count: U32,
    common_epoch: U64,
    cleared_epoch: U64,
    cleared_count: U32,
    reserved: [u8; 20],
}
const _: () = assert!(size_of::<StoredSlot>() == 64);

/// The stored fields; the rest of the superblock is zeroes.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct StoredSuperblock {
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
    adopted_epoch: U64,
    config_id: [u8; 16],
    boot: [u8; 16],
    in_use: u8,
    reserved: [u8; 3],
    data_generation_count: U32,
    data_generation_epoch: U64,
    slots: [StoredSlot; SLOTS],
    in_sync_hint: [[u8; 16]; 3],
}

const FIELDS_BYTES: usize = 368;
const _: () = assert!(size_of::<StoredSuperblock>() == FIELDS_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(StoredSuperblock, checksum);

/// The state of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogState {
    /// It is being created or converted: no write is admitted, no region is dirty, and the cells
    /// are meaningless.
    Initializing,
    /// In use.
    Active,
}

/// The use of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotEntry {
    /// The image that the dirty bits are kept for; `None` if the slot is free. The bits of free
    /// slots are kept too.
    pub image: Option<Uuid>,
    /// Whether all regions are dirty, whatever the cells say.
    pub is_all_dirty: bool,
    /// The generations recorded about the image (RFD 0032).
    pub generations: PeerGenerations,
    /// Whether generations recorded about it were lost with an earlier log.
    pub history_lost: bool,
}

/// The contents of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The state of the log.
    pub state: LogState,
    /// Number of changes of the superblock.
    pub generation: u64,
    /// The id of this log, which its cells repeat.
    pub log_id: LogId,
    /// The image that the log belongs to, as in the label.
    pub image: Uuid,
    /// Size of a region in bytes, as a power of two.
    pub region_shift: u32,
    /// Number of cells in use.
    pub cells: u32,
    /// The highest epoch that the image has adopted.
    pub adopted_epoch: u64,
    /// The id of the configuration that it has adopted.
    pub config_id: Uuid,
    /// [`LogArea::disk_session`](disk::LogArea::disk_session) in which the image was last in sync;
    /// nil if its disk may have lost completed writes since.
    pub boot_id: Uuid,
    /// Whether the image is in use; if not, it was closed after a flush.
    pub in_use: bool,
    /// The latest data generation that the image has reached, with others or alone (RFD 0032).
    pub data_generation: DataGeneration,
    /// The slots.
    pub slots: [SlotEntry; SLOTS],
    /// The nodes that were in sync in the adopted configuration, for messages only.
    pub in_sync_hint: [Option<Uuid>; 3],
}

/// Why bytes are not a usable superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// The disk does not return them. Reported by the reader, not by the parser.
    #[error("an unreadable superblock")]
    Unreadable,
    /// They lack the magic.
    #[error("no superblock")]
    NoMagic,
    /// The checksum does not match: torn or damaged.
    #[error("a damaged superblock")]
    Damaged,
    /// A newer format version.
    #[error("a superblock of version {0}, which this release does not know")]
    Version(u16),
    /// A misplaced copy.
    #[error("copy {0} of a superblock at the position of another copy")]
    WrongCopy(u16),
    /// The superblock of another image's log.
    #[error("a superblock of image {0}")]
    OtherImage(Uuid),
    /// The checksum matches, but a field is invalid.
    #[error("a superblock with an invalid {0}")]
    InvalidField(&'static str),
}

/// Why no copy of a superblock is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoUsableSuperblock {
    /// One is intact but not supported: the log must not be changed, whatever the other copy is.
    #[error("{0}")]
    Unsupported(SuperblockError),
    /// Both are bad: every region counts as dirty in all slots, and the adopted configuration is
    /// unknown.
    #[error("no copy of the superblock is left: {} and {}", .0[0], .0[1])]
    Lost([SuperblockError; 2]),
    /// Both are intact and of the same generation but differ, which no crash explains. They count
    /// as lost.
    #[error("two superblocks of generation {0} differ")]
    Differ(u64),
}

impl Superblock {
    /// The superblock's bytes for copy number `copy`.
    #[must_use]
    pub fn to_bytes(&self, copy: u16) -> [u8; SUPERBLOCK_BYTES] {
        let state = match self.state {
            LogState::Initializing => StoredLogState::Initializing,
            LogState::Active => StoredLogState::Active,
        };
        let fields = StoredSuperblock {
            magic: MAGIC,
            version: U16::new(VERSION),
            copy: U16::new(copy),
            length: U32::new(SUPERBLOCK_BYTES as u32),
            checksum: U32::ZERO,
            state: U32::new(state.0),
            generation: U64::new(self.generation),
            log: U64::new(self.log_id.0),
            image: self.image.into_bytes(),
            region_shift: U32::new(self.region_shift),
            cells: U32::new(self.cells),
            adopted_epoch: U64::new(self.adopted_epoch),
            config_id: self.config_id.into_bytes(),
            boot: self.boot_id.into_bytes(),
            in_use: u8::from(self.in_use),
            reserved: [0; 3],
            data_generation_count: U32::new(self.data_generation.count),
            data_generation_epoch: U64::new(self.data_generation.epoch.0),
            slots: self.slots.map(SlotEntry::to_stored),
            in_sync_hint: self.in_sync_hint.map(|node| node.unwrap_or_default().into_bytes()),
        };
        let mut out = [0; SUPERBLOCK_BYTES];
        out[..FIELDS_BYTES].copy_from_slice(fields.as_bytes());
        write_checksum(&mut out, CHECKSUM_AT);
        out
    }

    /// Parses copy number `copy` of a superblock.
    ///
    /// # Errors
    /// [`SuperblockError`]; whatever the bytes are.
    pub fn parse(bytes: &[u8; SUPERBLOCK_BYTES], copy: u16) -> Result<Self, SuperblockError> {
        let (fields, rest) = StoredSuperblock::read_from_prefix(bytes)
            .map_err(|_| SuperblockError::InvalidField("length"))?;
        if fields.magic != MAGIC {
            return Err(SuperblockError::NoMagic);
        }
        if !verify_checksum(bytes, CHECKSUM_AT) {
            return Err(SuperblockError::Damaged);
        }
        if fields.version.get() != VERSION {
            return Err(SuperblockError::Version(fields.version.get()));
        }
        if fields.copy.get() != copy {
            return Err(SuperblockError::WrongCopy(fields.copy.get()));
        }
        let reserved = fields.reserved == [0; 3] && rest.iter().all(|&b| b == 0);
        if !reserved || fields.slots.iter().any(|slot| slot.reserved != [0; 20]) {
            return Err(SuperblockError::InvalidField("reserved part"));
        }
        Self::from_fields(&fields).map_err(SuperblockError::InvalidField)
    }

    fn from_fields(fields: &StoredSuperblock) -> Result<Self, &'static str> {
        let state = match StoredLogState(fields.state.get()) {
            StoredLogState::Initializing => LogState::Initializing,
            StoredLogState::Active => LogState::Active,
            _ => return Err("state"),
        };
        let in_use = match fields.in_use {
            0 => false,
            1 => true,
            _ => return Err("opened"),
        };
        if fields
            .slots
            .iter()
            .any(|slot| slot.flags.get() & !(FLAG_ALL_DIRTY | FLAG_HISTORY_LOST) != 0)
        {
            return Err("slot flags");
        }
        let superblock = Self {
            state,
            generation: fields.generation.get(),
            log_id: LogId(fields.log.get()),
            image: Uuid::from_bytes(fields.image),
            region_shift: fields.region_shift.get(),
            cells: fields.cells.get(),
            adopted_epoch: fields.adopted_epoch.get(),
            config_id: Uuid::from_bytes(fields.config_id),
            boot_id: Uuid::from_bytes(fields.boot),
            in_use,
            data_generation: to_generation(
                fields.data_generation_epoch,
                fields.data_generation_count,
            ),
            slots: fields.slots.map(SlotEntry::from_stored),
            in_sync_hint: fields.in_sync_hint.map(non_nil),
        };
        match superblock.invalid_field() {
            Some(field) => Err(field),
            None if fields.length.get() as usize != SUPERBLOCK_BYTES => Err("length"),
            None => Ok(superblock),
        }
    }

    /// The first field with an impossible value.
    fn invalid_field(&self) -> Option<&'static str> {
        let [a, b, c] = self.slots.map(|slot| slot.image);
        let twice = |one: Option<Uuid>, other| one.is_some() && one == other;
        let own = [a, b, c].contains(&Some(self.image));
        if self.generation == 0 {
            Some("generation")
        } else if self.image.is_nil() {
            Some("image")
        } else if !REGION_SHIFTS.contains(&self.region_shift) {
            Some("region size")
        } else if !(1..=MAX_CELLS).contains(&self.cells) {
            Some("number of cells")
        } else if own || twice(a, b) || twice(b, c) || twice(a, c) {
            Some("slots")
        } else {
            None
        }
    }

    /// The regions of a volume of `bytes` bytes. There may be more cells than these need: a log
    /// grows before its volume does.
    ///
    /// # Errors
    /// [`SuperblockError::InvalidField`] if the log does not suit such a volume.
    pub fn geometry(&self, bytes: u64) -> Result<Geometry, SuperblockError> {
        let geometry = Geometry::with_shift(bytes, self.region_shift)
            .map_err(|_| SuperblockError::InvalidField("region size"))?;
        if geometry.cell_count() > self.cells {
            return Err(SuperblockError::InvalidField("number of cells"));
        }
        Ok(geometry)
    }
}

impl SlotEntry {
    fn to_stored(self) -> StoredSlot {
        let PeerGenerations { common, last_cleared } = self.generations;
        let flag = |flag, set: bool| if set { flag } else { 0 };
        StoredSlot {
            image: self.image.unwrap_or_default().into_bytes(),
            flags: U32::new(
                flag(FLAG_ALL_DIRTY, self.is_all_dirty)
                    | flag(FLAG_HISTORY_LOST, self.history_lost),
            ),
            common_count: U32::new(common.count),
            common_epoch: U64::new(common.epoch.0),
            cleared_epoch: U64::new(last_cleared.epoch.0),
            cleared_count: U32::new(last_cleared.count),
            reserved: [0; 20],
        }
    }

    fn from_stored(stored: StoredSlot) -> Self {
        let has = |flag| stored.flags.get() & flag != 0;
        let generations = PeerGenerations {
            common: to_generation(stored.common_epoch, stored.common_count),
            last_cleared: to_generation(stored.cleared_epoch, stored.cleared_count),
        };
        let image = non_nil(stored.image);
        Self {
            image,
            is_all_dirty: has(FLAG_ALL_DIRTY),
            generations,
            history_lost: has(FLAG_HISTORY_LOST),
        }
    }
}

fn to_generation(epoch: U64, count: U32) -> DataGeneration {
    DataGeneration { epoch: Epoch(epoch.get()), count: count.get() }
}

/// A stored id; none if it is zero.
fn non_nil(bytes: [u8; 16]) -> Option<Uuid> {
    Some(Uuid::from_bytes(bytes)).filter(|name| !name.is_nil())
}

/// Selects the superblock of `image` from its two copies: the newest intact one. The other copy
/// should be rewritten if it differs.
///
/// # Errors
/// [`NoUsableSuperblock`]
pub fn choose_superblock(
    copies: [Result<Superblock, SuperblockError>; 2],
    image: Uuid,
) -> Result<Superblock, NoUsableSuperblock> {
    let unsupported = copies
        .iter()
        .filter_map(|copy| copy.as_ref().err())
        .find(|why| matches!(why, SuperblockError::Version(_) | SuperblockError::InvalidField(_)));
    if let Some(unsupported) = unsupported {
        // An intact superblock that is not understood may be newer than the other.
        return Err(NoUsableSuperblock::Unsupported(*unsupported));
    }
    let own = copies.map(|copy| match copy {
        Ok(found) if found.image != image => Err(SuperblockError::OtherImage(found.image)),
        other => other,
    });
    match own {
        [Ok(a), Ok(b)] if a.generation == b.generation && a != b => {
            Err(NoUsableSuperblock::Differ(a.generation))
        }
        [Ok(a), Ok(b)] => Ok(if b.generation > a.generation { b } else { a }),
        [Ok(found), Err(_)] | [Err(_), Ok(found)] => Ok(found),
        [Err(a), Err(b)] => Err(NoUsableSuperblock::Lost([a, b])),
    }
}

#[cfg(test)]
mod tests;
