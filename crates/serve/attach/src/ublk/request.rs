//! Decodes the kernel's descriptors, which are validated like a guest's.

use block::{Blocks, Lba};
use rt::ublk::Descriptor;
use rustix::io::Errno;

/// Unit of addresses and lengths, whatever the device's blocks are.
pub(super) const SECTOR_BYTES: u32 = 512;

const OP_READ: u32 = 0;
const OP_WRITE: u32 = 1;
const OP_FLUSH: u32 = 2;
const OP_DISCARD: u32 = 3;
const OP_WRITE_ZEROES: u32 = 5;
const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;

/// Properties of a device that limit its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Size of the device in logical blocks.
    pub blocks: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether ranges can be freed.
    pub can_discard: bool,
    /// Longest request with data, in bytes.
    pub max_bytes: u32,
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read these blocks.
    Read(Blocks),
    /// Write them.
    Write {
        /// The blocks.
        range: Blocks,
        /// Whether it must be durable on completion.
        fua: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// Free these blocks.
    Discard(Blocks),
    /// Make these blocks read as zeroes.
    Zero {
        /// The blocks.
        range: Blocks,
        /// Whether their space may be freed.
        unmap: bool,
        /// Whether it must be durable on completion.
        fua: bool,
    },
}

/// Decodes a descriptor.
///
/// # Errors
/// The answer to an invalid request.
pub fn decode(descriptor: &Descriptor, limits: &DeviceLimits) -> Result<Command, Errno> {
    let fua = descriptor.op_flags & FUA != 0;
    let changes = || if limits.read_only { Err(Errno::ROFS) } else { Ok(()) };
    match descriptor.op_flags & 0xff {
        OP_READ => data_range(descriptor, limits).map(Command::Read),
        OP_WRITE => {
            changes()?;
            Ok(Command::Write { range: data_range(descriptor, limits)?, fua })
        }
        OP_FLUSH => Ok(Command::Flush),
        OP_DISCARD if !limits.can_discard => Err(Errno::OPNOTSUPP),
        OP_DISCARD => {
            changes()?;
            blocks(descriptor, limits).map(Command::Discard)
        }
        OP_WRITE_ZEROES => {
            changes()?;
            let unmap = descriptor.op_flags & NO_UNMAP == 0 && limits.can_discard;
            Ok(Command::Zero { range: blocks(descriptor, limits)?, unmap, fua })
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

fn data_range(descriptor: &Descriptor, limits: &DeviceLimits) -> Result<Blocks, Errno> {
    if descriptor.sectors > limits.max_bytes / SECTOR_BYTES {
        return Err(Errno::INVAL);
    }
    blocks(descriptor, limits)
}

/// Converts sectors to blocks: whole ones, at least one, inside the device.
fn blocks(descriptor: &Descriptor, limits: &DeviceLimits) -> Result<Blocks, Errno> {
    let each = u64::from(limits.block_size / SECTOR_BYTES).max(1);
    let (start, sectors) = (descriptor.start, u64::from(descriptor.sectors));
    if sectors == 0 || !start.is_multiple_of(each) || !sectors.is_multiple_of(each) {
        return Err(Errno::INVAL);
    }
    let range = Blocks::new(Lba(start / each), sectors / each);
    let inside = range.end().is_some_and(|end| end <= limits.blocks);
    if inside { Ok(range) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: DeviceLimits = DeviceLimits {
        block_size: 4096,
        blocks: 1024,
        read_only: false,
        can_discard: true,
        max_bytes: 1 << 20,
    };

    fn asked(op_flags: u32, start: u64, sectors: u32) -> Descriptor {
        Descriptor { op_flags, sectors, start, address: 0 }
    }

    #[test]
    fn requests_are_understood() {
        let range = Blocks::new(Lba(2), 1);
        let whole = |op| decode(&asked(op, 16, 8), &SHAPE);
        assert_eq!(whole(OP_READ), Ok(Command::Read(range)));
        assert_eq!(whole(OP_WRITE), Ok(Command::Write { range, fua: false }));
        assert_eq!(whole(OP_WRITE | FUA | 1 << 8), Ok(Command::Write { range, fua: true }));
        assert_eq!(decode(&asked(OP_FLUSH, 0, 0), &SHAPE), Ok(Command::Flush));
        assert_eq!(whole(OP_DISCARD), Ok(Command::Discard(range)));
        let zero = |unmap, fua| Ok(Command::Zero { range, unmap, fua });
        assert_eq!(whole(OP_WRITE_ZEROES), zero(true, false));
        assert_eq!(whole(OP_WRITE_ZEROES | NO_UNMAP | FUA), zero(false, true));
        assert_eq!(whole(4), Err(Errno::OPNOTSUPP));
        assert_eq!(whole(0xff), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn invalid_requests_are_refused() {
        let refused = |start, sectors| decode(&asked(OP_READ, start, sectors), &SHAPE);
        // Partial blocks, none, past the end, overflowing, more than a request may have.
        for (start, sectors) in [(1, 8), (8, 7), (8, 0), (8184, 16), (u64::MAX - 7, 8), (0, 2056)] {
            assert_eq!(refused(start, sectors), Err(Errno::INVAL), "{start} {sectors}");
        }
        let fixed = DeviceLimits { read_only: true, ..SHAPE };
        for op in [OP_WRITE, OP_DISCARD, OP_WRITE_ZEROES] {
            assert_eq!(decode(&asked(op, 0, 8), &fixed), Err(Errno::ROFS));
        }
        let thick = DeviceLimits { can_discard: false, ..SHAPE };
        assert_eq!(decode(&asked(OP_DISCARD, 0, 8), &thick), Err(Errno::OPNOTSUPP));
    }

    proptest! {
        /// Whatever a descriptor contains, requests lie inside the device and within the limits.
        #[test]
        fn nothing_leaves_the_device(
            (op_flags, sectors, start) in (any::<u32>(), any::<u32>(), any::<u64>()),
            small in any::<bool>(),
            wide in any::<bool>(),
            (read_only, discards) in (any::<bool>(), any::<bool>()),
        ) {
            let (op_flags, sectors, start) =
                if small { (op_flags & 0xe007, sectors % 4096, start % 16384) } else { (op_flags, sectors, start) };
            let block_size = if wide { 4096 } else { 512 };
            let limits = DeviceLimits { block_size, read_only, can_discard: discards, ..SHAPE };
            let decoded = decode(&asked(op_flags, start, sectors), &limits);
            let (range, data, changes) = match decoded {
                Err(_) | Ok(Command::Flush) => return Ok(()),
                Ok(Command::Read(range)) => (range, true, false),
                Ok(Command::Write { range, .. }) => (range, true, true),
                Ok(Command::Discard(range)) => {
                    prop_assert!(discards);
                    (range, false, true)
                }
                Ok(Command::Zero { range, unmap, .. }) => {
                    prop_assert!(discards || !unmap);
                    (range, false, true)
                }
            };
            prop_assert!(!(changes && read_only));
            prop_assert!(range.count > 0 && range.end().unwrap() <= limits.blocks);
            prop_assert_eq!(range.at.0 * u64::from(block_size), start * 512);
            prop_assert_eq!(range.count * u64::from(block_size), u64::from(sectors) * 512);
            prop_assert!(!data || range.count * u64::from(block_size) <= u64::from(limits.max_bytes));
        }
    }
}
