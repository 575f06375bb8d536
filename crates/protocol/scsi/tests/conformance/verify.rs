//! SBC-3 5.2 COMPARE AND WRITE, 5.29 to 5.31 VERIFY, 5.37 to 5.39 WRITE AND VERIFY.

use block::{Error, Lba, RequestError};
use scsi::TransferLengths;

use crate::harness::{
    BLOCKS, Harness, blocks, cdb, config, data, describe_reply, info, information, pointer,
};

fn compare_and_write(flags: u8, at: u64, count: u8) -> Vec<u8> {
    let mut out = cdb(0x89, flags, at, 0);
    out[13] = count;
    out
}

/// SBC-3 5.29: BYTCHK 00b, 01b, 11b; 10b is reserved.
#[test]
fn verify_with_every_bytchk() {
    let (mut b, i) = Harness::new();
    b.contents.fill(b'x');
    for opcode in [0x2f, 0xaf, 0x8f] {
        assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, 0, 1, 5))), "Good");
        assert_eq!(describe_reply(&b.data_out(i, &cdb(opcode, 2, 1, 5), &blocks(5, b'x'))), "Good");
        assert_eq!(describe_reply(&b.data_out(i, &cdb(opcode, 6, 1, 5), &blocks(1, b'x'))), "Good");
        assert_eq!(b.take_requests(), ["verify 1+5", "compare 1+5", "compare 1+5"]);
        let r = b.data_out(i, &cdb(opcode, 4, 1, 5), &blocks(5, b'x'));
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, 1, Some(2))))
        );
    }
}

/// SBC-3 5.29: a difference is reported with its offset.
#[test]
fn verify_finds_a_difference() {
    let (mut b, i) = Harness::new();
    for (count, offset) in [(1, 0), (1, 511), (3, 1024), (64, 32767)] {
        let mut out = blocks(count, 0);
        out[offset] = 1;
        let r = b.data_out(i, &cdb(0x8f, 2, 0, count), &out);
        assert_eq!(describe_reply(&r), "0e/1d/00");
        assert_eq!(information(&r), Some(offset as u32));
    }
    b.contents[3 * 512 + 9] = 1;
    let r = b.data_out(i, &cdb(0x2f, 6, 1, 5), &blocks(1, 0));
    assert_eq!((describe_reply(&r).as_str(), information(&r)), ("0e/1d/00", Some(2 * 512 + 9)));
    b.fail = Some(RequestError::Device(Error::Unreadable { at: Lba(4) }));
    let r = b.data_in(i, &cdb(0x2f, 0, 1, 5));
    assert_eq!((describe_reply(&r).as_str(), information(&r)), ("03/11/00", Some(4)));
}

/// SBC-3 5.29: with BYTCHK 00b data that comes all the same is left alone; a comparison needs all
/// of its data.
#[test]
fn verify_and_its_window() {
    let (mut b, i) = Harness::new();
    let r = b.data_out(i, &cdb(0x2f, 0, 0, 2), &blocks(2, 1));
    assert_eq!((describe_reply(&r).as_str(), r.full_transfer), ("Good", TransferLengths::NONE));
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2f, 2, 0, 2), &blocks(1, 0))), "05/0e/03");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2f, 6, 0, 2), &[])), "05/0e/03");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2f, 2, 0, 2), &blocks(3, 0))), "Good");
}

/// SBC-3 5.37: written durably, then read back or compared.
#[test]
fn write_and_verify() {
    let (mut b, i) = Harness::new();
    for opcode in [0x2e, 0xae, 0x8e] {
        assert_eq!(describe_reply(&b.data_out(i, &cdb(opcode, 0, 3, 2), &blocks(2, 5))), "Good");
        assert_eq!(b.take_requests(), ["write 3+2 fua", "verify 3+2"]);
        let r = b.data_out(i, &cdb(opcode, 0x12, 3, 2), &blocks(2, 6));
        assert_eq!(
            (describe_reply(&r).as_str(), r.full_transfer),
            ("Good", TransferLengths::from_initiator(1024))
        );
        assert_eq!(b.take_requests(), ["write 3+2 fua", "compare 3+2"]);
        assert_eq!(data(&b.data_in(i, &cdb(0x28, 0, 3, 2))), blocks(2, 6));
        b.take_requests();
        assert_eq!(
            describe_reply(&b.data_out(i, &cdb(opcode, 4, 3, 2), &blocks(2, 6))),
            "05/24/00"
        );
    }
    b.fail = Some(RequestError::Device(Error::Unwritable { at: Lba(3) }));
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2e, 2, 3, 2), &blocks(2, 6))), "03/0c/00");
    assert_eq!(b.take_requests(), ["write 3+2 fua"], "what was not written is not verified");
}

/// RFC 7143 11.4.5.1, as for WRITE.
#[test]
fn residuals_of_write_and_verify() {
    let (mut b, i) = Harness::new();
    for (count, window, expect, requests) in [
        (1, 0, "Good", &[][..]),
        (1, 10_000, "Good", &["write 0+1 fua", "compare 0+1"]),
        (1, 200, "05/0e/03", &[]),
        (2, 512, "Good", &["write 0+1 fua", "compare 0+1"]),
    ] {
        let window = TransferLengths::from_initiator(window);
        let r = b.run(i, &cdb(0x8e, 2, 0, count), window, &blocks(2, 9));
        assert_eq!(
            (describe_reply(&r).as_str(), b.take_requests()),
            (expect, requests.to_vec().iter().map(|s| (*s).to_owned()).collect())
        );
        assert_eq!(r.full_transfer, TransferLengths::from_initiator(u64::from(count) * 512));
    }
}

/// SBC-3 5.2.
#[test]
fn compare_and_write_swaps_or_tells_the_difference() {
    let (mut b, i) = Harness::new();
    let swap = |from, to| [blocks(2, from), blocks(2, to)].concat();
    assert_eq!(describe_reply(&b.data_out(i, &compare_and_write(0, 998, 2), &swap(0, 1))), "Good");
    assert_eq!(
        describe_reply(&b.data_out(i, &compare_and_write(0x18, 998, 2), &swap(1, 2))),
        "Good"
    );
    assert_eq!(b.take_requests(), ["cas 998+2", "cas 998+2 fua"]);
    let mut wrong = swap(2, 3);
    wrong[777] = 0;
    let r = b.data_out(i, &compare_and_write(0, 998, 2), &wrong);
    assert_eq!((describe_reply(&r).as_str(), information(&r)), ("0e/1d/00", Some(777)));
    assert_eq!(data(&b.data_in(i, &cdb(0x28, 0, 998, 2))), blocks(2, 2));
}

/// SBC-3 5.2 and 6.5: none, too many, beyond the end, too little and too much data.
#[test]
fn compare_and_write_limits() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&b.data_out(i, &compare_and_write(0, 0, 0), &[])), "Good");
    let r = b.data_out(i, &compare_and_write(0, 0, 33), &blocks(66, 0));
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 13, None))));
    assert_eq!(
        describe_reply(&b.data_out(i, &compare_and_write(0, 0, 32), &blocks(64, 0))),
        "Good"
    );
    assert_eq!(
        describe_reply(&b.data_out(i, &compare_and_write(0, BLOCKS, 1), &blocks(2, 0))),
        "05/21/00"
    );
    b.take_requests();
    for brought in [0, 1, 3, 4] {
        let r = b.data_out(i, &compare_and_write(0, 0, 1), &blocks(brought, 0));
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, 13, None)))
        );
        assert_eq!(r.full_transfer, TransferLengths::from_initiator(1024), "{brought}");
    }
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 6.5: the count is one byte however large transfers may be.
#[test]
fn compare_and_write_of_255_blocks() {
    let mut n = info();
    n.max_transfer_blocks = 4096;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(data(&b.data_in(i, &[0x12, 1, 0xb0, 0, 64, 0]))[5], 255);
    let r = b.data_out(i, &compare_and_write(0, 0, 255), &blocks(510, 0));
    assert_eq!(describe_reply(&r), "Good");
}
