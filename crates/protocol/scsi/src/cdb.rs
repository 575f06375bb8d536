//! A command descriptor block as one number, so that fields and reserved bits are a shift and a
//! mask, and no access can be out of bounds (SPC-4 4.2.5).

use block::Lba;

use crate::sense::Sense;

/// Length of the longest supported command descriptor block.
pub(crate) const CDB_MAX: usize = 16;

/// Force unit access: the bit of byte 1 of READ, WRITE and the like.
pub(crate) const FUA: u8 = 0x08;

/// The UNMAP bit of byte 1 of WRITE SAME (SBC-3 5.43).
pub(crate) const UNMAP_BIT: u8 = 0x08;

/// The first 16 bytes of a command descriptor block, the first byte in the highest bits; missing
/// bytes are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cdb {
    bits: u128,
    len: usize,
}

impl Cdb {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut padded = [0; CDB_MAX];
        let len = bytes.len().min(CDB_MAX);
        padded[..len].copy_from_slice(&bytes[..len]);
        Self { bits: u128::from_be_bytes(padded), len }
    }

    /// Bytes that arrived, at most [`CDB_MAX`].
    pub(crate) fn len(self) -> usize {
        self.len
    }

    pub(crate) fn opcode(self) -> u8 {
        self.byte(0)
    }

    pub(crate) fn byte(self, at: u32) -> u8 {
        (self.bits >> (120 - 8 * at)) as u8
    }

    pub(crate) fn u16(self, at: u32) -> u16 {
        (self.bits >> (112 - 8 * at)) as u16
    }

    pub(crate) fn u32(self, at: u32) -> u32 {
        (self.bits >> (96 - 8 * at)) as u32
    }

    pub(crate) fn u64(self, at: u32) -> u64 {
        (self.bits >> (64 - 8 * at)) as u64
    }

    /// Whether any bit of `mask` is set in byte `at`.
    pub(crate) fn has(self, at: u32, mask: u8) -> bool {
        self.byte(at) & mask != 0
    }

    /// Rejects bits set outside `allowed`, with a pointer to the first one.
    pub(crate) fn check_reserved(self, allowed: u128) -> Result<(), Sense> {
        let wrong = self.bits & !allowed;
        if wrong == 0 {
            return Ok(());
        }
        let bit = wrong.leading_zeros() as u8;
        Err(Sense::field(u16::from(bit / 8), Some(7 - bit % 8)))
    }

    /// First block, count, and the byte of the count's field, of a command with a range. The
    /// operation code's group determines where the fields are (SPC-4 4.2.5.1).
    pub(crate) fn range(self) -> CdbRange {
        match self.opcode() >> 5 {
            0 => CdbRange {
                at: Lba(u64::from(self.u32(0) & 0x1f_ffff)),
                // SBC-2 5.5 and 5.24: six bytes have no other encoding of 256 blocks.
                count: if self.byte(4) == 0 { 256 } else { u32::from(self.byte(4)) },
                count_field: 4,
            },
            1 | 2 => CdbRange {
                at: Lba(u64::from(self.u32(2))),
                count: u32::from(self.u16(7)),
                count_field: 7,
            },
            5 => CdbRange { at: Lba(u64::from(self.u32(2))), count: self.u32(6), count_field: 6 },
            _ => CdbRange { at: Lba(self.u64(2)), count: self.u32(10), count_field: 10 },
        }
    }
}

/// A range in a command descriptor block; not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CdbRange {
    pub(crate) at: Lba,
    pub(crate) count: u32,
    /// Byte at which the field of `count` begins, for field pointers.
    pub(crate) count_field: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let cdb = Cdb::new(&[0x88, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!((cdb.opcode(), cdb.byte(15)), (0x88, 15));
        assert_eq!((cdb.u16(2), cdb.u16(14)), (0x0203, 0x0e0f));
        assert_eq!((cdb.u32(10), cdb.u32(12)), (0x0a0b_0c0d, 0x0c0d_0e0f));
        assert_eq!((cdb.u64(2), cdb.u64(8)), (0x0203_0405_0607_0809, 0x0809_0a0b_0c0d_0e0f));
        assert!(cdb.has(1, 0x01) && !cdb.has(1, 0xfe));
    }

    #[test]
    fn extents_follow_the_group_of_the_operation_code() {
        let extent = |bytes: &[u8]| {
            let e = Cdb::new(bytes).range();
            (e.at.0, e.count, e.count_field)
        };
        assert_eq!(extent(&[0x08, 0xff, 0xff, 0xfe, 7, 0]), (0x1f_fffe, 7, 4));
        assert_eq!(extent(&[0x08, 0, 0, 1, 0, 0]), (1, 256, 4), "zero means 256");
        assert_eq!(extent(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]), (0x0102_0304, 0x0506, 7));
        assert_eq!(extent(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]), (0x0102_0304, 0x0506_0708, 6));
        let sixteen = [0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0];
        assert_eq!(extent(&sixteen), (0x0102_0304_0506_0708, 0x090a_0b0c, 10));
    }

    #[test]
    fn reserved_bits_are_named_exactly() {
        let mut allowed = [0xff; 16];
        allowed[1] = 0x1a;
        let allowed = u128::from_be_bytes(allowed);
        assert_eq!(Cdb::new(&[0x28, 0x1a]).check_reserved(allowed), Ok(()));
        let e = Cdb::new(&[0x28, 0x20]).check_reserved(allowed).unwrap_err();
        assert_eq!(e, Sense::field(1, Some(5)));
    }

    #[test]
    fn short_and_long_blocks_are_padded_and_cut() {
        assert_eq!(Cdb::new(&[]).opcode(), 0);
        assert_eq!(Cdb::new(&[1; 40]).len(), 16);
        assert_eq!(Cdb::new(&[1, 2]).byte(2), 0);
    }
}
