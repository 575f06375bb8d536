//! A guest's memory as shared by its monitor: a table of regions that is replaced as a whole
//! whenever one changes. Requests in flight keep the table that was current when they were taken.

use std::fs::File;
use std::sync::Arc;

use smallvec::SmallVec;
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};

/// The guest's memory, by guest address.
pub type GuestMap = GuestMemoryMmap<()>;

/// Most regions. Monitors use a few, or one for each plugged-in memory module.
pub const MAX_REGIONS: usize = 512;

/// Why memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Mapping failed.
    #[error("a region of {bytes} bytes cannot be mapped: {cause}")]
    Map {
        /// Its length.
        bytes: u64,
        /// The system's error.
        cause: vm_memory::mmap::MmapRegionError,
    },
    /// The file is shorter than the region.
    #[error("the file of a region of {bytes} bytes is too short for it")]
    Short {
        /// Its length.
        bytes: u64,
    },
    /// The regions contradict each other.
    #[error("regions overlap, leave the address space, or are too many")]
    Table,
    /// No such region.
    #[error("there is no such region")]
    Missing,
}

/// The addresses of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPlacement {
    /// Guest address.
    pub guest: u64,
    /// Monitor address.
    pub monitor: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A mapped region.
#[derive(Clone, Debug)]
pub struct Region {
    placement: RegionPlacement,
    mapped: Arc<GuestRegionMmap<()>>,
}

impl Region {
    /// Maps `file` from `offset` on.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn map(placement: RegionPlacement, file: File, offset: u64) -> Result<Self, MemoryError> {
        let bytes = usize::try_from(placement.bytes).map_err(|_| MemoryError::Table)?;
        if !file_covers(&file, offset, placement.bytes) {
            return Err(MemoryError::Short { bytes: placement.bytes });
        }
        let mapped = MmapRegion::from_file(FileOffset::new(file, offset), bytes);
        let mapped = mapped.map_err(|cause| MemoryError::Map { bytes: placement.bytes, cause })?;
        let mapped = GuestRegionMmap::new(mapped, GuestAddress(placement.guest));
        Ok(Self { placement, mapped: Arc::new(mapped.ok_or(MemoryError::Table)?) })
    }
}

/// Whether a file has `bytes` bytes from `offset` on. Accessing a mapping beyond the end of its
/// file kills the process. (So does truncating it later; but then the monitor does that to its own
/// disk.)
pub(super) fn file_covers(file: &File, offset: u64, bytes: u64) -> bool {
    let end = offset.checked_add(bytes);
    let fits = |m: std::fs::Metadata| !m.is_file() || end.is_some_and(|end| end <= m.len());
    file.metadata().is_ok_and(fits)
}

/// The table of regions.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    regions: Vec<Region>,
    guest: Arc<GuestMap>,
}

impl Memory {
    /// Builds a table of these regions, in any order.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.len() > MAX_REGIONS {
            return Err(MemoryError::Table);
        }
        regions.sort_by_key(|r| r.placement.guest);
        let mapped: Vec<_> = regions.iter().map(|r| Arc::clone(&r.mapped)).collect();
        let guest = match mapped.is_empty() {
            true => GuestMap::new(),
            false => GuestMap::from_arc_regions(mapped).map_err(|_| MemoryError::Table)?,
        };
        Ok(Self { regions, guest: Arc::new(guest) })
    }

    /// A copy of the table with one more region.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn with(&self, region: Region) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(region);
        Self::new(regions)
    }

    /// A copy of the table without a region.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn without(&self, placement: RegionPlacement) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        let found =
            regions.iter().position(|r| r.placement == placement).ok_or(MemoryError::Missing)?;
        regions.remove(found);
        Self::new(regions)
    }

    /// The guest's memory.
    #[must_use]
    pub fn guest(&self) -> &Arc<GuestMap> {
        &self.guest
    }

    /// Translates a monitor address to a guest address.
    #[must_use]
    pub fn translate(&self, address: u64) -> Option<GuestAddress> {
        let inside =
            |p: &RegionPlacement| address.checked_sub(p.monitor).is_some_and(|at| at < p.bytes);
        let place = self.regions.iter().map(|r| r.placement).find(inside)?;
        place.guest.checked_add(address - place.monitor).map(GuestAddress)
    }
}

/// Pieces of guest memory, known to be inside the table that they came with.
#[derive(Clone, Debug, Default)]
pub struct GuestBuffers(SmallVec<[(GuestAddress, u32); 4]>);

impl GuestBuffers {
    /// Appends a piece, unless it is empty.
    pub fn push(&mut self, at: GuestAddress, bytes: u32) {
        if bytes > 0 {
            self.0.push((at, bytes));
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.iter().map(|(_, bytes)| u64::from(*bytes)).sum()
    }

    /// Splits off the first `bytes`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_front(&mut self, bytes: u64) -> Self {
        let mut front = Self::default();
        let mut left = bytes;
        while left > 0 {
            let (at, here) = *self.0.first().expect("as many bytes as the caller has counted");
            let taken = u32::try_from(left).unwrap_or(u32::MAX).min(here);
            front.push(at, taken);
            left -= u64::from(taken);
            if taken == here {
                self.0.remove(0);
            } else {
                self.0[0] = (GuestAddress(at.0 + u64::from(taken)), here - taken);
            }
        }
        front
    }

    /// Whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Splits off the last byte; `None` if there is none.
    pub fn pop_back(&mut self) -> Option<GuestAddress> {
        let (at, bytes) = self.0.pop()?;
        self.push(at, bytes - 1);
        Some(GuestAddress(at.0 + u64::from(bytes - 1)))
    }

    /// Reads the bytes from `skip` on into `to`.
    ///
    /// # Errors
    /// If there are not enough.
    pub fn read(
        &self,
        guest: &GuestMap,
        skip: u64,
        to: &mut [u8],
    ) -> Result<(), OutsideGuestMemory> {
        let mut done = 0;
        for (at, bytes) in self.from(skip) {
            let count = (bytes as usize).min(to.len() - done);
            guest.read_slice(&mut to[done..done + count], at).map_err(|_| OutsideGuestMemory)?;
            done += count;
        }
        if done == to.len() { Ok(()) } else { Err(OutsideGuestMemory) }
    }

    /// Writes `from` to the bytes from `skip` on.
    ///
    /// # Errors
    /// If there are not enough.
    pub fn write(
        &self,
        guest: &GuestMap,
        skip: u64,
        from: &[u8],
    ) -> Result<(), OutsideGuestMemory> {
        let mut done = 0;
        for (at, bytes) in self.from(skip) {
            let count = (bytes as usize).min(from.len() - done);
            guest.write_slice(&from[done..done + count], at).map_err(|_| OutsideGuestMemory)?;
            done += count;
        }
        if done == from.len() { Ok(()) } else { Err(OutsideGuestMemory) }
    }

    /// The pieces after the first `skip` bytes.
    fn from(&self, mut skip: u64) -> impl Iterator<Item = (GuestAddress, u32)> {
        self.0.iter().filter_map(move |&(at, bytes)| {
            let over = u32::try_from(skip).unwrap_or(u32::MAX).min(bytes);
            skip -= u64::from(over);
            (over < bytes).then(|| (at.unchecked_add(over.into()), bytes - over))
        })
    }
}

/// Error: bytes outside the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outside the guest's memory")]
pub struct OutsideGuestMemory;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use vm_memory::GuestMemoryBackend;

    use super::*;

    fn region(guest: u64, monitor: u64, bytes: u64) -> Region {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 0x4000]).unwrap();
        Region::map(RegionPlacement { guest, monitor, bytes }, file, 0).unwrap()
    }

    #[test]
    fn addresses_of_the_monitor_are_translated() {
        let table = Memory::new(vec![region(0x8000, 0x10000, 0x4000), region(0, 0x20000, 0x2000)]);
        let table = table.unwrap();
        for (monitor, guest) in [
            (0x10000, Some(0x8000)),
            (0x13fff, Some(0xbfff)),
            (0x14000, None),
            (0x20010, Some(0x10)),
            (0, None),
            (u64::MAX, None),
        ] {
            assert_eq!(table.translate(monitor).map(|a| a.0), guest, "{monitor:#x}");
        }
        let gone = RegionPlacement { guest: 0, monitor: 0x20000, bytes: 0x2000 };
        let less = table.without(gone).unwrap();
        assert_eq!(less.translate(0x20010), None);
        assert!(matches!(less.without(gone), Err(MemoryError::Missing)));
        assert!(matches!(table.with(region(0x1000, 0, 0x1000)), Err(MemoryError::Table)));
        assert!(less.with(region(0x1000, 0, 0x1000)).is_ok());
        assert!(Memory::new(Vec::new()).unwrap().guest().iter().next().is_none());
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let place = RegionPlacement { guest: 0, monitor: 0, bytes: 0x8000 };
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Region::map(place, file, 0), Err(MemoryError::Short { .. })));
    }

    #[test]
    fn pieces_are_cut_at_any_byte() {
        let table = Memory::new(vec![region(0, 0, 0x4000)]).unwrap();
        let mut all = GuestBuffers::default();
        for (at, bytes) in [(0, 3), (10, 0), (0x100, 5), (0x3ffe, 2)] {
            all.push(GuestAddress(at), bytes);
        }
        assert_eq!(all.len(), 10);
        all.write(table.guest(), 2, &[1, 2, 3, 4, 5, 6, 7]).unwrap();
        let mut read = [0; 10];
        all.read(table.guest(), 0, &mut read).unwrap();
        assert_eq!(read, [7, 7, 1, 2, 3, 4, 5, 6, 7, 7]);
        assert_eq!(all.write(table.guest(), 9, &[1, 2]), Err(OutsideGuestMemory));
        let front = all.split_front(4);
        assert_eq!((front.len(), all.len()), (4, 6));
        let mut rest = [0; 6];
        all.read(table.guest(), 0, &mut rest).unwrap();
        assert_eq!(rest, [3, 4, 5, 6, 7, 1]);
        assert_eq!(all.pop_back(), Some(GuestAddress(0x3fff)));
        assert_eq!(all.pop_back(), Some(GuestAddress(0x3ffe)));
        assert_eq!(all.len(), 4);
    }
}
