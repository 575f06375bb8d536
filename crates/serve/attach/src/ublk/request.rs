//! What the kernel asks: descriptors, which are believed no more than those of a guest.

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

/// What of a device decides what may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Size of the device in logical blocks.
    pub blocks: u64,
    /// Whether it is only read.
    pub read_only: bool,
    /// Whether ranges can be freed.
    pub discards: bool,
    /// Longest request with data, in bytes.
    pub max_bytes: u32,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read these blocks.
    Read(Blocks),
    /// Write them.
    Write {
        /// Which.
        range: Blocks,
        /// Whether it is to be durable when it is done.
        fua: bool,
    },
    /// Make durable what has been written.
    Flush,
    /// Free these blocks.
    Discard(Blocks),
    /// Make them read as zeroes.
    Zero {
        /// Which.
        range: Blocks,
        /// Whether their space may be freed.
        unmap: bool,
        /// Whether it is to be durable when it is done.
        fua: bool,
    },
}

/// What a descriptor asks.
///
/// # Errors
/// The answer to what makes no sense.
pub fn decode(asked: &Descriptor, shape: &Shape) -> Result<Command, Errno> {
    let fua = asked.op_flags & FUA != 0;
    let changes = || if shape.read_only { Err(Errno::ROFS) } else { Ok(()) };
    match asked.op_flags & 0xff {
        OP_READ => with_data(asked, shape).map(Command::Read),
        OP_WRITE => {
            changes()?;
            Ok(Command::Write { range: with_data(asked, shape)?, fua })
        }
        OP_FLUSH => Ok(Command::Flush),
        OP_DISCARD if !shape.discards => Err(Errno::OPNOTSUPP),
        OP_DISCARD => {
            changes()?;
            blocks(asked, shape).map(Command::Discard)
        }
        OP_WRITE_ZEROES => {
            changes()?;
            let unmap = asked.op_flags & NO_UNMAP == 0 && shape.discards;
            Ok(Command::Zero { range: blocks(asked, shape)?, unmap, fua })
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

fn with_data(asked: &Descriptor, shape: &Shape) -> Result<Blocks, Errno> {
    if asked.sectors > shape.max_bytes / SECTOR_BYTES {
        return Err(Errno::INVAL);
    }
    blocks(asked, shape)
}

/// Sectors as blocks: whole ones, some, inside the device.
fn blocks(asked: &Descriptor, shape: &Shape) -> Result<Blocks, Errno> {
    let each = u64::from(shape.block_size / SECTOR_BYTES).max(1);
    let (start, sectors) = (asked.start, u64::from(asked.sectors));
    if sectors == 0 || !start.is_multiple_of(each) || !sectors.is_multiple_of(each) {
        return Err(Errno::INVAL);
    }
    let range = Blocks::new(Lba(start / each), sectors / each);
    let inside = range.end().is_some_and(|end| end <= shape.blocks);
    if inside { Ok(range) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Shape = Shape {
        block_size: 4096,
        blocks: 1024,
        read_only: false,
        discards: true,
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
    fn what_makes_no_sense_is_refused() {
        let refused = |start, sectors| decode(&asked(OP_READ, start, sectors), &SHAPE);
        // Parts of blocks, nothing, over the end, around it, more than a request may have.
        for (start, sectors) in [(1, 8), (8, 7), (8, 0), (8184, 16), (u64::MAX - 7, 8), (0, 2056)] {
            assert_eq!(refused(start, sectors), Err(Errno::INVAL), "{start} {sectors}");
        }
        let fixed = Shape { read_only: true, ..SHAPE };
        for op in [OP_WRITE, OP_DISCARD, OP_WRITE_ZEROES] {
            assert_eq!(decode(&asked(op, 0, 8), &fixed), Err(Errno::ROFS));
        }
        let thick = Shape { discards: false, ..SHAPE };
        assert_eq!(decode(&asked(OP_DISCARD, 0, 8), &thick), Err(Errno::OPNOTSUPP));
    }

    proptest! {
        /// Whatever the kernel writes there: what is done lies inside the device, and is not more than was promised.
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
            let shape = Shape { block_size, read_only, discards, ..SHAPE };
            let decoded = decode(&asked(op_flags, start, sectors), &shape);
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
            prop_assert!(range.count > 0 && range.end().unwrap() <= shape.blocks);
            prop_assert_eq!(range.at.0 * u64::from(block_size), start * 512);
            prop_assert_eq!(range.count * u64::from(block_size), u64::from(sectors) * 512);
            prop_assert!(!data || range.count * u64::from(block_size) <= u64::from(shape.max_bytes));
        }
    }
}
