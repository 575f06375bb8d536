//! Flat images: a volume in one file, block device or volume of a pool, with a label before the
//! data.
//!
//! * [`FlatImage::create`], [`FlatImage::open`], [`FlatImage::grow`], [`delete`] and [`inspect`]
//!   manage images; [`ImageError`](disk::ImageError) says what is in the way.
//!   [`FlatImage::create_on`], [`FlatImage::open_on`] and [`inspect_on`] do so on any [`Medium`].
//! * A [`FlatImage`] is a [`block::Layer`]: block `n` of the volume is at
//!   `data offset + n * block size`. Where the disk's blocks are larger than the volume's, a
//!   partial write is a read-modify-write under a lock.
//! * A thin image allocates space on write and frees it on unmap; a thick one has all its space
//!   allocated from the beginning and keeps it.
//! * FUA is a flush ([`block::Dev`] adds it), and flushes are shared. A failed flush fails the
//!   image: every later operation returns [`block::Error::Gone`].
//! * The volume's [metadata blocks](block::METADATA_LBA) lie just before the data.
//! * [`FlatImage::write_descriptor`] keeps a description of the volume in the image, for when the
//!   cluster's record of it is lost.
//! * A [`LogArea`](disk::LogArea) gives access to the bytes before the data that hold the image's
//!   intent log.
//!
//! The label's layout is `docs/format/label.md`.

mod describe;
mod io;
mod log_area;
mod manage;

use std::cell::Cell;
use std::fmt;
use std::path::Path;

use block::{Account, FlushCoalescer, Info, KeyedLocks, METADATA_BYTES};
use disk::{DiskClaim, ImageLabel, LostClaim, Medium, Provisioning};
use rt::disk::DiskError;

pub use manage::{CreateImageOptions, OpenImageOptions, delete, inspect, inspect_on};

/// Largest operation that carries data, in bytes.
const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// The allocation unit of file systems, and the smallest unit worth freeing, in bytes.
const PAGE_BYTES: u64 = disk::PAGE;

/// A flat image in use. See the [module](self).
pub struct FlatImage {
    medium: Medium,
    /// Memory for reads and writes of the label.
    memory: Account,
    label: Cell<ImageLabel>,
    /// The highest generation that may be on the disk: above the label's after a failed change.
    highest_generation: Cell<u64>,
    info: Cell<Info>,
    data_offset: u64,
    /// The smallest unit that the disk reads and writes, in bytes.
    io_unit: u64,
    /// The smallest unit worth freeing, in bytes.
    discard_unit: u64,
    memory_align: u64,
    /// Pieces of data that the disk takes are multiples of this, in bytes.
    transfer_unit: u64,
    /// Whether unmapping keeps the space allocated.
    is_thick: bool,
    /// Whether a flush has failed or the disk is lost.
    is_failed: Cell<bool>,
    flushes: FlushCoalescer,
    keyed_locks: KeyedLocks,
    label_lock: tokio::sync::Mutex<()>,
    /// The claim that keeps other machines from its disk.
    claim: Option<DiskClaim>,
}

impl FlatImage {
    fn new(
        medium: Medium,
        memory: Account,
        label: ImageLabel,
        can_free: bool,
        claim: Option<DiskClaim>,
    ) -> Self {
        let medium = medium.with_claim(claim.as_ref());
        let disk_info = medium.info();
        let block = label.block_size;
        if block > disk_info.physical_block {
            let (disk, medium) = (medium.path().display(), disk_info.physical_block);
            tracing::warn!(%disk, block, medium, "power loss may tear a block: the medium writes less");
        }
        let granule = PAGE_BYTES.max(u64::from(disk_info.physical_block));
        let is_thick = label.provisioning == Provisioning::Thick;
        let frees = can_free && !is_thick;
        let freed_at_once = granule.max(medium.discard_unit());
        let info = Info {
            block_size: block,
            blocks: label.data_bytes / u64::from(block),
            metadata_blocks: if label.has_metadata_area() { METADATA_BYTES / block } else { 0 },
            physical_block_size: disk_info.physical_block.max(block),
            max_transfer_blocks: MAX_TRANSFER_BYTES / block,
            unmap_granularity_blocks: if frees { blocks_of(freed_at_once, block) } else { 0 },
            unmap_zeroes: true,
            volatile_cache: disk_info.has_volatile_cache,
            native_fua: false,
            read_only: disk_info.read_only,
            overhead_bytes: overhead_bytes(&medium, block),
        };
        let transfer_unit = u64::from(medium.transfer_unit());
        Self {
            medium,
            memory,
            label: Cell::new(label),
            highest_generation: Cell::new(label.generation),
            info: Cell::new(info),
            data_offset: label.data_offset,
            io_unit: u64::from(disk_info.logical_block),
            discard_unit: granule,
            memory_align: u64::from(disk_info.memory_align),
            transfer_unit,
            is_thick,
            is_failed: Cell::new(false),
            flushes: FlushCoalescer::default(),
            keyed_locks: KeyedLocks::default(),
            label_lock: tokio::sync::Mutex::default(),
            claim,
        }
    }

    /// The machine that has claimed its disk from this one, if any: nothing is read or written any
    /// more.
    #[must_use]
    pub fn lost_claim(&self) -> Option<LostClaim> {
        self.claim.as_ref().and_then(DiskClaim::lost_claim)
    }

    /// Whether its disk has failed a sync or is lost: nothing is read or written any more.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.is_failed.get()
    }

    /// Releases the claim of its disk: any node may open it from now on. Nothing may be written
    /// afterwards.
    ///
    /// # Errors
    /// The release could not be written: the disk still belongs to this node.
    pub async fn release(&self) -> Result<(), DiskError> {
        match &self.claim {
            Some(claim) => claim.release().await,
            None => Ok(()),
        }
    }

    /// Its label.
    #[must_use]
    pub fn label(&self) -> ImageLabel {
        self.label.get()
    }

    /// The file or device.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.medium.path()
    }

    /// Bytes of space that it takes, labels included.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn allocated(&self) -> Result<u64, DiskError> {
        Ok(self.medium.allocated().await?)
    }
}

impl fmt::Debug for FlatImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlatImage")
            .field("medium", &self.medium)
            .field("label", &self.label)
            .finish()
    }
}

/// Most bytes of memory that an operation takes besides its data.
fn overhead_bytes(medium: &Medium, block_size: u32) -> u32 {
    let (page, unit) = (PAGE_BYTES as u32, medium.info().logical_block);
    let own = match medium.forbids_overlap() {
        // For the units at the ends of a read, for the unit of a partial write, or for a copy of
        // data in memory that the disk does not take.
        false => page.max(unit),
        // The unit before and after the change.
        true if unit > block_size => 2 * page.max(unit),
        true => 0,
    };
    own + medium.overhead_bytes()
}

fn blocks_of(bytes: u64, block_size: u32) -> u32 {
    u32::try_from(bytes / u64::from(block_size)).unwrap_or(u32::MAX)
}
