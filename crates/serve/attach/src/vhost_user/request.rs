//! A guest's requests: descriptor chains and headers (Virtio 1.2, 2.7.5 and 5.2.6), read from
//! memory that may hold anything and may change at any time. Each byte that matters is read once.
//!
//! An invalid *chain* (it loops, leaves memory, has writable before readable parts, or no room for
//! a status) breaks its ring, as it cannot be answered. An invalid *request* is answered with a
//! status.

use block::{Blocks, Lba};
use virtio_bindings::bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::config::{MAX_DISCARD_RANGES, MAX_RANGE_SECTORS, SECTOR_BYTES};
use super::memory::{GuestBuffers, GuestMap};

/// Most descriptors of a chain, including references to tables: twice what drivers are asked to
/// respect. It limits our memory for a request in flight, and how long a loop is followed.
pub const MAX_DESCRIPTORS: usize = 256;

/// Length of a request's header in bytes.
const HEADER_BYTES: usize = 16;

/// Length in bytes of a range of a discard or a write of zeroes.
const RANGE_BYTES: usize = 16;

/// Length of a disk's name in bytes.
pub const ID_BYTES: usize = 20;

/// Status of a request
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    /// Failure.
    Failed = blk::VIRTIO_BLK_S_IOERR as u8,
    /// Unsupported request.
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

/// Why a chain is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedChain {
    /// An index is beyond the table's size.
    #[error("descriptor {0} is not in its table")]
    Index(u16),
    /// It is longer than any driver needs, or endless.
    #[error("a chain has more than {MAX_DESCRIPTORS} descriptors")]
    TooLong,
    /// A descriptor, or its buffer, is outside the guest's memory.
    #[error("{bytes} bytes at {at:#x} are not in the guest's memory")]
    Outside {
        /// Its address.
        at: u64,
        /// Its length.
        bytes: u32,
    },
    /// A table of descriptors inside a table, with a successor, empty, or of an odd length
    /// (2.7.5.3.1).
    #[error("an indirect descriptor breaks the rules")]
    Indirect,
    /// A readable part follows a writable one (2.7.4.2).
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    /// There is no room for the status.
    #[error("a chain has no space for a status")]
    NoStatus,
}

/// Properties of a disk that limit its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Size of the disk in logical blocks.
    pub blocks: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether ranges can be freed.
    pub can_discard: bool,
}

/// A decoded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read these blocks into the request's data.
    Read(Blocks),
    /// Write the request's data to these blocks.
    Write(Blocks),
    /// Make completed writes durable.
    Flush,
    /// Free these ranges.
    Discard(Vec<Blocks>),
    /// Make these blocks read as zeroes.
    Zero {
        /// The blocks.
        range: Blocks,
        /// Whether their space may be freed.
        unmap: bool,
    },
    /// Put the disk's serial number
    Identify,
}

/// A request taken off a ring.
#[derive(Debug)]
pub struct ChainRequest {
    /// The head of its chain, which identifies it in the answer.
    pub head: u16,
    /// The command, or the status that answers an invalid one.
    pub command: Result<Command, Status>,
    /// The guest's data buffers: readable for a write, else writable.
    pub data: GuestBuffers,
    /// Address of the status byte.
    pub status: GuestAddress,
}

impl ChainRequest {
    /// Bytes of guest memory that the answer may change, including the status.
    #[must_use]
    pub fn writable_bytes(&self) -> u32 {
        let data = match self.command {
            Ok(Command::Read(_) | Command::Identify) => self.data.len(),
            _ => 0,
        };
        u32::try_from(data + 1).unwrap_or(u32::MAX)
    }
}

/// Reads the request whose chain begins at `head` of a table of `size` descriptors at `table`.
///
/// # Errors
/// [`MalformedChain`] if the chain is invalid.
pub fn read_request(
    guest: &GuestMap,
    (table, size): (GuestAddress, u16),
    head: u16,
    shape: &DiskLimits,
) -> Result<ChainRequest, MalformedChain> {
    let (mut readable, mut writable) = walk_chain(guest, (table, size), head)?;
    let status = writable.pop_back().ok_or(MalformedChain::NoStatus)?;
    if readable.len() < HEADER_BYTES as u64 {
        return Ok(ChainRequest { head, command: Err(Status::Failed), data: writable, status });
    }
    let mut header = [0; HEADER_BYTES];
    let front = readable.split_front(HEADER_BYTES as u64);
    // Already checked to be inside memory; the table of regions is the same.
    let read = front.read(guest, 0, &mut header);
    read.map_err(|_| MalformedChain::Outside { at: 0, bytes: HEADER_BYTES as u32 })?;
    let [kind @ .., _, _, _, _, _, _, _, _, _, _, _, _] = header;
    let [.., a, b, c, d, e, f, g, h] = header;
    let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    let request = Request { guest, limits: shape, sector };
    let kind = u32::from_le_bytes(kind);
    let (command, data) = match kind {
        blk::VIRTIO_BLK_T_IN => (request.data_blocks(&writable).map(Command::Read), writable),
        blk::VIRTIO_BLK_T_OUT => {
            let range = request.check_writable().and_then(|()| request.data_blocks(&readable));
            (range.map(Command::Write), readable)
        }
        blk::VIRTIO_BLK_T_FLUSH => (Ok(Command::Flush), readable),
        blk::VIRTIO_BLK_T_GET_ID => {
            let fits = (1..=ID_BYTES as u64).contains(&writable.len());
            (if fits { Ok(Command::Identify) } else { Err(Status::Failed) }, writable)
        }
        blk::VIRTIO_BLK_T_DISCARD => (request.discards(&readable), readable),
        blk::VIRTIO_BLK_T_WRITE_ZEROES => (request.zeroes(&readable), readable),
        _ => (Err(Status::Unsupported), readable),
    };
    Ok(ChainRequest { head, command, data, status })
}

/// Follows a chain. Returns its readable, then its writable parts.
fn walk_chain(
    guest: &GuestMap,
    (mut table, size): (GuestAddress, u16),
    head: u16,
) -> Result<(GuestBuffers, GuestBuffers), MalformedChain> {
    const EACH: u32 = size_of::<Descriptor>() as u32;
    let (mut readable, mut writable) = (GuestBuffers::default(), GuestBuffers::default());
    let (mut index, mut size, mut indirect) = (head, u32::from(size), false);
    for _ in 0..MAX_DESCRIPTORS {
        if u32::from(index) >= size {
            return Err(MalformedChain::Index(index));
        }
        let offset = u64::from(index) * u64::from(EACH);
        let at = table.0.checked_add(offset).map(GuestAddress);
        let outside = MalformedChain::Outside { at: table.0.saturating_add(offset), bytes: EACH };
        let descriptor: Descriptor = at.and_then(|at| guest.read_obj(at).ok()).ok_or(outside)?;
        let (at, bytes) = (descriptor.addr(), descriptor.len());
        if descriptor.refers_to_indirect_table() {
            let entries = bytes / EACH;
            let odd = bytes % EACH != 0 || !(1..=u32::from(u16::MAX)).contains(&entries);
            if indirect || descriptor.has_next() || odd {
                return Err(MalformedChain::Indirect);
            }
            (table, size, index, indirect) = (at, entries, 0, true);
            continue;
        }
        let (pieces, access) = match descriptor.is_write_only() {
            true => (&mut writable, Permissions::Write),
            false if !writable.is_empty() => return Err(MalformedChain::Order),
            false => (&mut readable, Permissions::Read),
        };
        if bytes > 0 && !guest.check_range(at, bytes as usize, access) {
            return Err(MalformedChain::Outside { at: at.0, bytes });
        }
        pieces.push(at, bytes);
        if !descriptor.has_next() {
            return Ok((readable, writable));
        }
        index = descriptor.next();
    }
    Err(MalformedChain::TooLong)
}

/// A request whose header was read.
struct Request<'a> {
    guest: &'a GuestMap,
    limits: &'a DiskLimits,
    sector: u64,
}

impl Request<'_> {
    fn check_writable(&self) -> Result<(), Status> {
        if self.limits.read_only { Err(Status::Failed) } else { Ok(()) }
    }

    /// The blocks that the data of a read or write covers.
    fn data_blocks(&self, data: &GuestBuffers) -> Result<Blocks, Status> {
        if !data.len().is_multiple_of(u64::from(self.limits.block_size)) {
            return Err(Status::Failed);
        }
        self.blocks(self.sector, data.len() / u64::from(SECTOR_BYTES))
    }

    /// Converts sectors to blocks: whole ones, inside the disk.
    fn blocks(&self, sector: u64, sectors: u64) -> Result<Blocks, Status> {
        let each = u64::from(self.limits.block_size / SECTOR_BYTES).max(1);
        if !sector.is_multiple_of(each) || !sectors.is_multiple_of(each) {
            return Err(Status::Failed);
        }
        let range = Blocks::new(Lba(sector / each), sectors / each);
        let inside = range.end().is_some_and(|end| end <= self.limits.blocks);
        if inside { Ok(range) } else { Err(Status::Failed) }
    }

    fn discards(&self, data: &GuestBuffers) -> Result<Command, Status> {
        if !self.limits.can_discard {
            return Err(Status::Unsupported);
        }
        let ranges = self.ranges(data, MAX_DISCARD_RANGES)?;
        // 5.2.6.2: the flag is for write-zeroes only.
        if ranges.iter().any(|(_, unmap)| *unmap) {
            return Err(Status::Unsupported);
        }
        let ranges = ranges.into_iter().map(|(range, _)| range);
        Ok(Command::Discard(ranges.filter(|range| range.count > 0).collect()))
    }

    fn zeroes(&self, data: &GuestBuffers) -> Result<Command, Status> {
        match self.ranges(data, 1)?[..] {
            [(range, unmap)] => {
                Ok(Command::Zero { range, unmap: unmap && self.limits.can_discard })
            }
            _ => Err(Status::Failed),
        }
    }

    /// The ranges in the data of a discard or write-zeroes, and whether each is to be unmapped
    /// (5.2.6).
    fn ranges(&self, data: &GuestBuffers, most: u32) -> Result<Vec<(Blocks, bool)>, Status> {
        /// `unmap`, the only flag.
        const UNMAP: u32 = 1;
        self.check_writable()?;
        let bytes = usize::try_from(data.len()).unwrap_or(usize::MAX);
        let longest = most as usize * RANGE_BYTES;
        if bytes == 0 || bytes > longest || !bytes.is_multiple_of(RANGE_BYTES) {
            return Err(Status::Failed);
        }
        let mut text = vec![0; bytes];
        data.read(self.guest, 0, &mut text).map_err(|_| Status::Failed)?;
        let (entries, _) = text.as_chunks::<RANGE_BYTES>();
        let range = |&[a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]: &[u8; RANGE_BYTES]| {
            let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            let sectors = u32::from_le_bytes([i, j, k, l]);
            let flags = u32::from_le_bytes([m, n, o, p]);
            if flags & !UNMAP != 0 {
                return Err(Status::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                return Err(Status::Failed);
            }
            Ok((self.blocks(sector, sectors.into())?, flags & UNMAP != 0))
        };
        entries.iter().map(range).collect()
    }
}
