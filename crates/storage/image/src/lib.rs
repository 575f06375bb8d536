//! A volume in one piece: a file, a block device, or a volume of a pool, with a label in front of the data.
//!
//! * [`File::create`], [`File::open`], [`File::grow`], [`delete`] and [`inspect`] manage images;
//!   whatever they refuse they name ([`FileError`]). [`File::create_on`], [`File::open_on`] and [`inspect_on`] do so on any [`Medium`].
//! * A [`File`] is a [`block::Layer`]: block `n` of the volume is at `data offset + n * block size`.
//!   Where the disk's blocks are larger than the volume's, parts of one are read, changed and
//!   written back under a lock.
//! * A thin image takes space when it is written and gives it back when it is unmapped; a full one
//!   has its space from the beginning and keeps it.
//! * FUA is a flush ([`block::Dev`] adds it), and flushes are shared. A failed flush ends the
//!   image: everything after it fails with [`block::Error::Gone`].
//! * The blocks [beside](block::ASIDE) the volume are the last before the data.
//! * [`File::describe`] has an image tell of its volume, for the day when nothing else does.
//! * A [`LogArea`] reaches the bytes before the data that are kept for the image's intent log.
//!
//! The label's layout is `docs/format/label.md`.

mod describe;
mod io;
mod log_area;
mod manage;

use std::cell::Cell;
use std::fmt;
use std::path::Path;

use block::{ASIDE_BYTES, Account, FlushGate, Info, UnitLocks};
use disk::{Hold, Label, Lost, Medium, Provisioning};
use rt::disk::DiskError;

pub use manage::{Create, Open, delete, inspect, inspect_on};

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER: u32 = 1 << 20;

/// What file systems allocate at once, and what is worth freeing, in bytes.
const PAGE: u64 = disk::PAGE;

/// A flat image in use. See the [module](self).
pub struct File {
    medium: Medium,
    /// What the label's own reads and writes take memory from.
    memory: Account,
    label: Cell<Label>,
    /// The highest generation that may be on the disk: above the label's after a failed change.
    generation: Cell<u64>,
    info: Cell<Info>,
    data_offset: u64,
    /// What the disk reads and writes at least, in bytes.
    unit: u64,
    /// What is worth freeing, in bytes.
    granule: u64,
    memory_align: u64,
    /// What pieces of data that it takes are multiples of, in bytes.
    piece: u64,
    /// Whether unmapping leaves the space in place.
    keeps_space: bool,
    /// Whether a flush has failed or the disk is lost.
    dead: Cell<bool>,
    flushes: FlushGate,
    units: UnitLocks,
    changing_label: tokio::sync::Mutex<()>,
    /// Keeps other machines from its disk.
    hold: Option<Hold>,
}

impl File {
    fn new(
        medium: Medium,
        memory: Account,
        label: Label,
        can_free: bool,
        hold: Option<Hold>,
    ) -> Self {
        let medium = medium.guarded(hold.as_ref());
        let found = medium.info();
        let block = label.block_size;
        if block > found.physical_block {
            let (disk, medium) = (medium.path().display(), found.physical_block);
            tracing::warn!(%disk, block, medium, "power loss may tear a block: the medium writes less");
        }
        let granule = PAGE.max(u64::from(found.physical_block));
        let keeps_space = label.provisioning == Provisioning::Full;
        let frees = can_free && !keeps_space;
        let freed_at_once = granule.max(medium.freed_at_once());
        let info = Info {
            block_size: block,
            blocks: label.data_bytes / u64::from(block),
            aside_blocks: if label.has_room_aside() { ASIDE_BYTES / block } else { 0 },
            physical_block_size: found.physical_block.max(block),
            max_transfer_blocks: MAX_TRANSFER / block,
            unmap_granularity_blocks: if frees { blocks_of(freed_at_once, block) } else { 0 },
            unmap_zeroes: true,
            volatile_cache: found.volatile_cache,
            native_fua: false,
            read_only: found.read_only,
            overhead: overhead(&medium, block),
        };
        let piece = u64::from(medium.piece());
        Self {
            medium,
            memory,
            label: Cell::new(label),
            generation: Cell::new(label.generation),
            info: Cell::new(info),
            data_offset: label.data_offset,
            unit: u64::from(found.logical_block),
            granule,
            memory_align: u64::from(found.memory_align),
            piece,
            keeps_space,
            dead: Cell::new(false),
            flushes: FlushGate::default(),
            units: UnitLocks::default(),
            changing_label: tokio::sync::Mutex::default(),
            hold,
        }
    }

    /// The machine that has taken its disk from this one, if one has: nothing is read or written any more.
    #[must_use]
    pub fn lost(&self) -> Option<Lost> {
        self.hold.as_ref().and_then(Hold::lost)
    }

    /// Whether its disk has failed a sync, or is gone: nothing is read or written any more.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.dead.get()
    }

    /// Gives its disk back when all is done: any node may open it from now on. Nothing is written afterwards.
    ///
    /// # Errors
    /// That this could not be written: it is this node's still.
    pub async fn release(&self) -> Result<(), DiskError> {
        match &self.hold {
            Some(hold) => hold.release().await,
            None => Ok(()),
        }
    }

    /// What its label says.
    #[must_use]
    pub fn label(&self) -> Label {
        self.label.get()
    }

    /// The file or device.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.medium.path()
    }

    /// Bytes of space it takes, labels included.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn allocated(&self) -> Result<u64, DiskError> {
        Ok(self.medium.allocated().await?)
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("medium", &self.medium).field("label", &self.label).finish()
    }
}

/// Memory in bytes that an operation takes beside that of its data.
fn overhead(medium: &Medium, block_size: u32) -> u32 {
    let (page, unit) = (PAGE as u32, medium.info().logical_block);
    let own = match medium.forbids_overlap() {
        // What lies around the ends of a read, or what is changed of a unit, or comes from memory that a disk does not take.
        false => page.max(unit),
        // The unit as it is, and as it will be.
        true if unit > block_size => 2 * page.max(unit),
        true => 0,
    };
    own + medium.overhead()
}

fn blocks_of(bytes: u64, block_size: u32) -> u32 {
    u32::try_from(bytes / u64::from(block_size)).unwrap_or(u32::MAX)
}
