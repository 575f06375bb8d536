//! SBC-3 5.4 GET LBA STATUS, 5.15 and 5.16 READ CAPACITY.

use block::{Error, Lba, RequestError};

use crate::harness::{BLOCK, BLOCKS, Harness, config, data, describe_reply, info, pointer};

fn sixteen(allocation: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[0x9e, 0x10]);
    cdb[13] = allocation;
    cdb
}

fn lba_status(at: u64, allocation: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[0x9e, 0x12]);
    cdb[2..10].copy_from_slice(&at.to_be_bytes());
    cdb[13] = allocation;
    cdb
}

/// SBC-3 5.15.
#[test]
fn read_capacity_10() {
    let (mut b, i) = Harness::new();
    let cdb = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(data(&b.data_in(i, &cdb)), [0, 0, 0x03, 0xe7, 0, 0, 2, 0]);
    for (blocks, last) in [(1 << 32, 0xffff_ffff_u32), ((1 << 32) - 1, 0xffff_fffe), (1 << 40, !0)]
    {
        let mut n = info();
        n.blocks = blocks;
        let (mut b, i) = Harness::with(config(), n);
        assert_eq!(data(&b.data_in(i, &cdb))[..4], last.to_be_bytes());
    }
}

/// SBC-3 5.16.
#[test]
fn read_capacity_16() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &sixteen(32)));
    assert_eq!(d.len(), 32);
    assert_eq!(d[..8], (BLOCKS - 1).to_be_bytes());
    assert_eq!(d[8..16], [0, 0, 2, 0, 0, 3, 0xc0, 0], "8 per physical block, LBPME, LBPRZ");
    for n in 0..32 {
        assert_eq!(data(&b.data_in(i, &sixteen(n))), d[..usize::from(n)]);
    }
}

/// SBC-3 5.16: 4Kn, thick, larger than 2^32 blocks.
#[test]
fn read_capacity_16_of_other_devices() {
    let mut n = info();
    (n.block_size, n.blocks, n.unmap_granularity_blocks) = (4096, 1 << 36, 0);
    let (mut b, i) = Harness::with(config(), n);
    let d = data(&b.data_in(i, &sixteen(32)));
    assert_eq!(d[..8], ((1u64 << 36) - 1).to_be_bytes());
    assert_eq!(d[8..16], [0, 0, 0x10, 0, 0, 0, 0, 0]);
}

/// SBC-3 5.4.
#[test]
fn get_lba_status() {
    let mut thick = info();
    thick.unmap_granularity_blocks = 0;
    let (mut b, i) = Harness::with(config(), thick);
    let d = data(&b.data_in(i, &lba_status(10, 24)));
    assert_eq!(d[..8], [0, 0, 0, 20, 0, 0, 0, 0]);
    assert_eq!(d[8..16], 10u64.to_be_bytes());
    assert_eq!(d[16..], [0, 0, 0x03, 0xde, 0, 0, 0, 0], "990 blocks, mapped");
    assert_eq!(data(&b.data_in(i, &lba_status(0, 7))).len(), 7);
    for at in [BLOCKS, BLOCKS + 1, 1 << 63, u64::MAX] {
        assert_eq!(describe_reply(&b.data_in(i, &lba_status(at, 24))), "05/21/00");
    }
    assert_eq!(describe_reply(&b.data_in(i, &lba_status(BLOCKS - 1, 24))), "Good");
}

/// SBC-3 5.4: mapped and unmapped extents, from the requested block on, as many as fit the
/// allocation length.
#[test]
fn get_lba_status_of_a_thin_unit() {
    let (mut b, i) = Harness::new();
    let descriptor = |at: u64, count: u32, status: u8| {
        [&at.to_be_bytes()[..], &count.to_be_bytes(), &[status, 0, 0, 0]].concat()
    };
    b.contents.fill(0);
    b.contents[(20 * BLOCK) as usize] = 1;
    let all = [descriptor(3, 13, 1), descriptor(16, 8, 0), descriptor(24, 976, 1)];
    for (allocation, told) in [(0, 1), (7, 1), (24, 1), (39, 1), (40, 2), (56, 3), (255, 3)] {
        let mut expected = vec![0, 0, 0, 4 + 16 * told as u8, 0, 0, 0, 0];
        expected.extend(all[..told].concat());
        expected.truncate(usize::from(allocation));
        let reply = b.data_in(i, &lba_status(3, allocation));
        assert_eq!((describe_reply(&reply).as_str(), data(&reply)), ("Good", expected));
        assert_eq!(
            reply.full_transfer.data_in,
            data(&reply).len() as u64,
            "the residual is of what there is"
        );
    }
    b.contents.fill(0xa5);
    assert_eq!(data(&b.data_in(i, &lba_status(8, 255)))[8..], descriptor(8, 992, 0));
    for at in [BLOCKS, u64::MAX] {
        assert_eq!(describe_reply(&b.data_in(i, &lba_status(at, 24))), "05/21/00");
    }
    b.fail = Some(RequestError::Device(Error::Unreadable { at: Lba(9) }));
    assert_eq!(describe_reply(&b.data_in(i, &lba_status(8, 24))), "03/11/00");
}

/// SPC-4 4.2.5.2: an unknown service action of a known operation code.
#[test]
fn unknown_service_action() {
    let (mut b, i) = Harness::new();
    let mut cdb = sixteen(32);
    cdb[1] = 0x13;
    let r = b.data_in(i, &cdb);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(4)))));
}
