//! SBC-3 5.5 ORWRITE(16), and SBC-4 WRITE ATOMIC(16) with its limits in VPD page B0h.

use scsi::TransferLengths;

use crate::harness::{
    BLOCK, BLOCKS, Harness, MAX_TRANSFER, blocks, cdb, config, data, describe_reply, info, pointer,
};

/// WRITE ATOMIC(16): flags, first block, boundary, count.
fn atomic(flags: u8, at: u64, boundary: u16, count: u16) -> Vec<u8> {
    let mut cdb = vec![0x9c, flags];
    cdb.extend(at.to_be_bytes());
    cdb.extend(boundary.to_be_bytes());
    cdb.extend(count.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

/// SBC-3 5.5: bits are set and none is cleared; flags, ranges and lengths are WRITE's.
#[test]
fn orwrite_sets_bits() {
    let (mut b, i) = Harness::new();
    b.contents.fill(0x11);
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x8b, 0, 5, 3), &blocks(3, 0x22))), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x8b, 0x18, 7, 1), &blocks(1, 0x44))), "Good");
    assert_eq!(b.take_requests(), ["or 5+3", "or 7+1 fua"]);
    let at = |block: u64| b.contents[(block * BLOCK) as usize];
    assert_eq!((at(4), at(5), at(6), at(7), at(8)), (0x11, 0x33, 0x33, 0x77, 0x11));
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x8b, 0, BLOCKS, 0), &[])), "Good");
    for (cdb, expect, at) in [
        (cdb(0x8b, 0, BLOCKS, 1), "05/21/00", None),
        (cdb(0x8b, 0, u64::MAX, 0), "05/21/00", None),
        (cdb(0x8b, 0x20, 0, 1), "05/24/00", Some((true, 1, Some(5)))),
        (cdb(0x8b, 0, 0, MAX_TRANSFER + 1), "05/24/00", Some((true, 10, None))),
    ] {
        let r = b.data_out(i, &cdb, &blocks(1, 1));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), (expect, at), "{cdb:x?}");
    }
    let r = b.run(i, &cdb(0x8b, 0, 0, 2), TransferLengths::from_initiator(BLOCK), &blocks(1, 1));
    assert_eq!(
        (describe_reply(&r).as_str(), r.full_transfer.data_out),
        ("Good", 2 * BLOCK),
        "a residual"
    );
    assert_eq!(b.take_requests(), ["or 0+1"]);
}

/// SPC-4 7.5.8, SBC-3 4.18: neither command writes to a protected unit.
#[test]
fn write_protection() {
    let mut c = config();
    c.read_only = true;
    let (mut b, i) = Harness::with(c, info());
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x8b, 0, 0, 1), &blocks(1, 1))), "07/27/00");
    assert_eq!(describe_reply(&b.data_out(i, &atomic(0, 0, 0, 1), &blocks(1, 1))), "07/27/00");
}

/// SBC-4: a sector, all of it or nothing.
#[test]
fn write_atomic() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&b.data_out(i, &atomic(0, 9, 0, 1), &blocks(1, 5))), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &atomic(0x18, 0, 0, 1), &blocks(1, 5))), "Good");
    assert_eq!(b.take_requests(), ["write 9+1", "write 0+1 fua"]);
    assert_eq!(
        describe_reply(&b.data_out(i, &atomic(0, 16, 0, 0), &[])),
        "Good",
        "nothing is no error"
    );
    for (cdb, expect, at) in [
        (atomic(0, 8, 0, 2), "05/24/00", Some((true, 12, None))),
        (atomic(0, 8, 1, 1), "05/24/00", Some((true, 11, Some(0)))),
        (atomic(0x20, 8, 0, 1), "05/24/00", Some((true, 1, Some(5)))),
        (atomic(0, BLOCKS, 0, 1), "05/21/00", None),
        (atomic(0, BLOCKS + 1, 0, 0), "05/21/00", None),
    ] {
        let r = b.data_out(i, &cdb, &blocks(16, 1));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), (expect, at), "{cdb:x?}");
    }
    let less = TransferLengths::from_initiator(BLOCK - 1);
    assert_eq!(
        describe_reply(&b.run(i, &atomic(0, 8, 0, 1), less, &blocks(1, 1)[1..])),
        "05/0e/03"
    );
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-4 block limits: WRITE ATOMIC obeys them, whatever the medium reports; without atomic writes
/// of a whole block the command is not supported.
#[test]
fn atomic_limits() {
    let limits = |block_size, physical_block_size| {
        let (mut b, i) = Harness::with(config(), scsi_info(block_size, physical_block_size));
        let d = data(&b.data_in(i, &[0x12, 1, 0xb0, 0, 255, 0]));
        let fields: Vec<u32> = d[44..64]
            .chunks(4)
            .map(|f| u32::from_be_bytes(f.try_into().expect("four bytes")))
            .collect();
        (fields, describe_reply(&b.data_out(i, &atomic(0, 0, 0, 0), &[])))
    };
    assert_eq!(limits(512, 4096), (vec![1, 1, 1, 0, 0], "Good".into()));
    assert_eq!(limits(512, 512), (vec![1, 1, 1, 0, 0], "Good".into()));
    assert_eq!(limits(4096, 4096), (vec![0; 5], "05/20/00".into()), "a medium may write less");
}

fn scsi_info(block_size: u32, physical_block_size: u32) -> block::Info {
    block::Info { block_size, physical_block_size, ..info() }
}
