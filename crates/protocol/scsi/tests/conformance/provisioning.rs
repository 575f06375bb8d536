//! SBC-3 4.7, 5.28 UNMAP, 5.43 and 5.44 WRITE SAME.

use scsi::TransferLengths;

use crate::harness::{BLOCKS, Harness, blocks, cdb, config, describe_reply, info, pointer};

fn unmap(list: &[u8]) -> [u8; 10] {
    let [high, low] = (list.len() as u16).to_be_bytes();
    [0x42, 0, 0, 0, 0, 0, 0, high, low, 0]
}

fn list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let len = ranges.len() as u16 * 16;
    let mut out = (len + 6).to_be_bytes().to_vec();
    out.extend(len.to_be_bytes());
    out.extend([0; 4]);
    for (at, count) in ranges {
        out.extend(at.to_be_bytes());
        out.extend(count.to_be_bytes());
        out.extend([0; 4]);
    }
    out
}

fn no_unmap() -> block::Info {
    let mut n = info();
    n.unmap_granularity_blocks = 0;
    n
}

/// SBC-3 5.43, 5.44: other data is written, zeroes are the cheapest way to zeroes, and UNMAP
/// applies to zeroes only.
#[test]
fn write_same() {
    let (mut b, i) = Harness::new();
    for opcode in [0x41, 0x93] {
        for (flags, fill, expect) in [
            (0, 7, "same 5+20"),
            (0, 0, "zero 5+20"),
            (8, 0, "zero 5+20 unmap"),
            (8, 7, "same 5+20"),
        ] {
            let r = b.data_out(i, &cdb(opcode, flags, 5, 20), &blocks(1, fill));
            assert_eq!(
                (describe_reply(&r).as_str(), r.full_transfer),
                ("Good", TransferLengths::from_initiator(512))
            );
            assert_eq!(b.take_requests(), [expect]);
            assert!(b.contents[5 * 512..25 * 512].iter().all(|&x| x == fill));
        }
    }
    let mut last_byte = blocks(1, 0);
    last_byte[511] = 1;
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x41, 8, 0, 1), &last_byte)), "Good");
    assert_eq!(b.take_requests(), ["same 0+1"]);
}

/// SBC-3 5.44: NDOB.
#[test]
fn write_same_without_data() {
    let (mut b, i) = Harness::new();
    b.contents.fill(1);
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x93, 0x09, 1, 7), &[])), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x93, 0x01, 8, 7), &[])), "Good");
    assert_eq!(b.take_requests(), ["zero 1+7 unmap", "zero 8+7"]);
    assert_eq!(
        describe_reply(&b.data_out(i, &cdb(0x41, 0x01, 1, 7), &[])),
        "05/24/00",
        "not in ten bytes"
    );
}

/// SBC-3 5.43: ANCHOR is refused with and without UNMAP (ANC_SUP is zero).
#[test]
fn write_same_anchor() {
    let (mut b, i) = Harness::new();
    for opcode in [0x41, 0x93] {
        for flags in [0x10, 0x18] {
            let r = b.data_out(i, &cdb(opcode, flags, 0, 1), &blocks(1, 0));
            assert_eq!(
                (describe_reply(&r).as_str(), pointer(&r)),
                ("05/24/00", Some((true, 1, Some(4))))
            );
        }
    }
}

/// SBC-3 6.5: WSNZ and MAXIMUM WRITE SAME LENGTH; 4.5 ranges; exactly one block of data.
#[test]
fn write_same_limits() {
    let mut n = info();
    n.blocks = 1 << 20;
    let (mut b, i) = Harness::with(config(), n);
    for (opcode, field) in [(0x41, 7), (0x93, 10)] {
        let r = b.data_out(i, &cdb(opcode, 0, 0, 0), &blocks(1, 0));
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, field, None)))
        );
        let r = b.data_out(i, &cdb(opcode, 0, 0, (1 << 15) + 1), &blocks(1, 0));
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, field, None)))
        );
        let r = b.data_out(i, &cdb(opcode, 0, (1 << 20) - 1, 2), &blocks(1, 0));
        assert_eq!(describe_reply(&r), "05/21/00");
        for brought in [&[][..], &[0; 256], &[0; 1024]] {
            let r = b.data_out(i, &cdb(opcode, 8, 0, 1), brought);
            assert_eq!((describe_reply(&r).as_str(), r.full_transfer.data_out), ("05/0e/03", 512));
        }
    }
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 5.28: any alignment, any order, nothing at all.
#[test]
fn unmap_ranges() {
    let (mut b, i) = Harness::new();
    b.contents.fill(1);
    let l = list(&[(9, 3), (0, 1), (5, 0), (BLOCKS, 0), (BLOCKS - 1, 1)]);
    assert_eq!(describe_reply(&b.data_out(i, &unmap(&l), &l)), "Good");
    assert_eq!(b.take_requests(), ["unmap 9+3,0+1,999+1"]);
    for l in [list(&[]), list(&[(7, 0)]), Vec::new()] {
        assert_eq!(describe_reply(&b.data_out(i, &unmap(&l), &l)), "Good");
    }
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 5.28: lists that are cut off, contradict themselves or ask for too much.
#[test]
fn unmap_lists_that_are_wrong() {
    let mut n = info();
    n.blocks = 1 << 30;
    let (mut b, i) = Harness::with(config(), n);
    let check = |b: &mut Harness, l: &[u8]| {
        let r = b.data_out(i, &unmap(l), l);
        (describe_reply(&r), pointer(&r).map(|p| (p.0, p.1)))
    };
    assert_eq!(check(&mut b, &[0; 7]).0, "05/1a/00");
    let mut cut = list(&[(0, 1), (8, 1)]);
    cut.truncate(39);
    assert_eq!(check(&mut b, &cut).0, "05/1a/00", "shorter than it says");
    cut[3] = 31;
    assert_eq!(check(&mut b, &cut).0, "Good", "half a descriptor is ignored");
    assert_eq!(b.take_requests(), ["unmap 0+1"]);
    assert_eq!(check(&mut b, &list(&[(1 << 30, 1)])).0, "05/21/00");
    assert_eq!(check(&mut b, &list(&[(u64::MAX, 2)])).0, "05/21/00");
    let whole = list(&[(0, 1 << 19), (1 << 20, 1 << 19)]);
    assert_eq!(check(&mut b, &whole).0, "Good");
    let more = list(&[(0, 1 << 19), (1 << 20, (1 << 19) + 1)]);
    assert_eq!(check(&mut b, &more), ("05/26/00".into(), Some((false, 32))));
    let many: Vec<_> = (0..255).map(|n| (n * 8, 1)).collect();
    assert_eq!(check(&mut b, &list(&many)).0, "Good");
    let too_many: Vec<_> = (0..256).map(|n| (n * 8, 1)).collect();
    assert_eq!(check(&mut b, &list(&too_many)).0, "05/1a/00", "longer than any list");
}

/// SBC-3 5.28: the transport must bring the whole list; ANCHOR is refused.
#[test]
fn unmap_window_and_anchor() {
    let (mut b, i) = Harness::new();
    let l = list(&[(0, 1)]);
    assert_eq!(describe_reply(&b.data_out(i, &unmap(&l), &l[..20])), "05/0e/03");
    let mut anchored = unmap(&l);
    anchored[1] = 1;
    let r = b.data_out(i, &anchored, &l);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(0)))));
}

/// SBC-3 4.7: a unit without provisioning management knows neither.
#[test]
fn without_provisioning_management() {
    let (mut b, i) = Harness::with(config(), no_unmap());
    let l = list(&[(0, 1)]);
    assert_eq!(describe_reply(&b.data_out(i, &unmap(&l), &l)), "05/20/00");
    for opcode in [0x41, 0x93] {
        let r = b.data_out(i, &cdb(opcode, 8, 0, 1), &blocks(1, 0));
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, 1, Some(3))))
        );
        assert_eq!(describe_reply(&b.data_out(i, &cdb(opcode, 0, 0, 1), &blocks(1, 0))), "Good");
    }
}
