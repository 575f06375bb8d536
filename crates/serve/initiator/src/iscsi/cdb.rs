//! Command descriptor blocks (SPC-4, SBC-3).

/// A command descriptor block, as the wire has it.
pub(super) type Cdb = [u8; 16];

/// FUA, of reads and writes; UNMAP, of WRITE SAME.
pub(super) const FUA: u8 = 1 << 3;
pub(super) const UNMAP_BIT: u8 = 1 << 3;
/// BYTCHK of VERIFY: compare with the data sent.
pub(super) const BYTE_CHECK: u8 = 1 << 1;

pub(super) const UNMAP: u8 = 0x42;
pub(super) const READ: u8 = 0x88;
pub(super) const COMPARE_AND_WRITE: u8 = 0x89;
pub(super) const WRITE: u8 = 0x8a;
pub(super) const VERIFY: u8 = 0x8f;
pub(super) const SYNCHRONIZE_CACHE: u8 = 0x91;
pub(super) const WRITE_SAME: u8 = 0x93;

/// TEST UNIT READY (SPC-4 6.47).
pub(super) const TEST_UNIT_READY: Cdb = [0; 16];

/// A 16-byte command for a range (SBC-3 5).
pub(super) fn ranged(opcode: u8, bits: u8, at: u64, blocks: u32) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, bits);
    cdb[2..10].copy_from_slice(&at.to_be_bytes());
    if opcode == COMPARE_AND_WRITE {
        cdb[13] = u8::try_from(blocks).unwrap_or(u8::MAX);
    } else {
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    }
    cdb
}

/// UNMAP with a parameter list of `list` bytes (SBC-3 5.28).
pub(super) fn unmap(list: u16) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = UNMAP;
    cdb[7..9].copy_from_slice(&list.to_be_bytes());
    cdb
}

/// The parameter list of an UNMAP of one range (SBC-3 5.28.2).
pub(super) fn unmap_list(at: u64, blocks: u32) -> [u8; 24] {
    let mut list = [0; 24];
    (list[1], list[3]) = (22, 16);
    list[8..16].copy_from_slice(&at.to_be_bytes());
    list[16..20].copy_from_slice(&blocks.to_be_bytes());
    list
}

/// INQUIRY of a vital product data page, or of the standard data (SPC-4 6.6).
pub(super) fn inquiry(page: Option<u8>, length: u16) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[2]) = (0x12, u8::from(page.is_some()), page.unwrap_or(0));
    cdb[3..5].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// READ CAPACITY (16) (SBC-3 5.16).
pub(super) fn read_capacity(length: u32) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (0x9e, 0x10);
    cdb[10..14].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// MODE SENSE (6) of one page without block descriptors (SPC-4 6.11).
pub(super) fn mode_sense(page: u8, length: u8) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[2], cdb[4]) = (0x1a, 1 << 3, page, length);
    cdb
}

/// REPORT LUNS (SPC-4 6.33).
pub(super) fn report_luns(length: u32) -> Cdb {
    let mut cdb = [0; 16];
    cdb[0] = 0xa0;
    cdb[6..10].copy_from_slice(&length.to_be_bytes());
    cdb
}
