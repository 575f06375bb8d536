//! SBC-3 5.8, 5.9, 5.11 to 5.13, 5.26, 5.27, 5.33 to 5.35: READ, WRITE, PRE-FETCH, SYNCHRONIZE
//! CACHE; SBC-2 5.5 and 5.24 for six bytes;
//! RFC 7143 11.4.5 residuals; SBC-3 4.18 sense data of failures.

use block::{Error, Lba, RequestError};
use scsi::{Admission, TransferLengths};

use crate::harness::{
    BLOCK, BLOCKS, Harness, MAX_TRANSFER, blocks, cdb, config, data, describe_reply, info,
    information, pointer,
};

const READS: [u8; 4] = [0x08, 0x28, 0xa8, 0x88];
const WRITES: [u8; 4] = [0x0a, 0x2a, 0xaa, 0x8a];

/// SBC-3 5.11 to 5.13, 5.33 to 5.35, SBC-2 5.5, 5.24.
#[test]
fn every_length_reads_what_every_length_wrote() {
    let (mut b, i) = Harness::new();
    for (n, write) in WRITES.into_iter().enumerate() {
        for (m, read) in READS.into_iter().enumerate() {
            let fill = (n * 16 + m + 1) as u8;
            let out = blocks(3, fill);
            assert_eq!(describe_reply(&b.data_out(i, &cdb(write, 0, 997, 3), &out)), "Good");
            let r = b.data_in(i, &cdb(read, 0, 997, 3));
            assert_eq!((describe_reply(&r).as_str(), data(&r)), ("Good", out));
            assert_eq!(b.take_requests(), ["write 997+3", "read 997+3"]);
        }
    }
}

/// SBC-2 5.5, SBC-3 5.11: a count of zero is 256 blocks in six bytes and none in more.
#[test]
fn a_count_of_zero() {
    let mut n = info();
    n.max_transfer_blocks = 256;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(data(&b.data_in(i, &cdb(0x08, 0, 0, 0))).len(), 256 * 512);
    assert_eq!(b.take_requests(), ["read 0+256"]);
    for opcode in [0x28, 0xa8, 0x88, 0x2a, 0xaa, 0x8a, 0x2f, 0x2e, 0x34] {
        assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, 0, 5, 0))), "Good", "{opcode:x}");
        assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, 0, BLOCKS, 0))), "Good", "{opcode:x}");
        assert_eq!(
            describe_reply(&b.data_in(i, &cdb(opcode, 0, BLOCKS + 1, 0))),
            "05/21/00",
            "{opcode:x}"
        );
    }
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 4.5: ranges that leave the device, by any road.
#[test]
fn blocks_beyond_the_end() {
    let (mut b, i) = Harness::new();
    let opcodes = [0x28, 0xa8, 0x88, 0x2a, 0xaa, 0x8a, 0x2f, 0x8f, 0x2e, 0x8e, 0x34, 0x90, 0x35];
    for opcode in opcodes {
        for (at, count) in
            [(BLOCKS, 1), (BLOCKS - 1, 2), (0x8000_0000, 1), (0xffff_ffff, 1), (0xffff_ffff, 64)]
        {
            let r = b.data_out(i, &cdb(opcode, 0, at, count), &blocks(count, 1));
            assert_eq!(describe_reply(&r), "05/21/00", "{opcode:x} {at}+{count}");
        }
    }
    for opcode in [0x88, 0x8a, 0x8f, 0x8e, 0x90, 0x91] {
        let r = b.data_out(i, &cdb(opcode, 0, u64::MAX, 64), &blocks(64, 1));
        assert_eq!(describe_reply(&r), "05/21/00", "{opcode:x}");
    }
    for at in [1000, 0x1f_ffff] {
        assert_eq!(describe_reply(&b.data_in(i, &cdb(0x08, 0, at, 1))), "05/21/00");
    }
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 6.5: MAXIMUM TRANSFER LENGTH, with a pointer to the count.
#[test]
fn more_than_the_maximum_transfer_length() {
    let (mut b, i) = Harness::new();
    for (opcode, field) in [(0x28, 7), (0x2a, 7), (0x2f, 7), (0xa8, 6), (0x88, 10), (0x8e, 10)] {
        let r = b.data_in(i, &cdb(opcode, 0, 0, MAX_TRANSFER + 1));
        let expect = ("05/24/00", Some((true, field, None)));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect, "{opcode:x}");
    }
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, MAX_TRANSFER))), "Good");
}

/// SBC-3 4.22: there is no protection information to check or to write.
#[test]
fn protection_information_is_refused() {
    let (mut b, i) = Harness::new();
    let opcodes =
        [0x28, 0xa8, 0x88, 0x2a, 0xaa, 0x8a, 0x2f, 0xaf, 0x8f, 0x2e, 0xae, 0x8e, 0x41, 0x93, 0x89];
    for opcode in opcodes {
        for protect in 1..8u8 {
            let r = b.data_out(i, &cdb(opcode, protect << 5, 0, 1), &blocks(1, 0));
            assert_eq!(describe_reply(&r), "05/24/00", "{opcode:x}");
            assert_eq!(pointer(&r).unwrap().1, 1);
        }
    }
}

/// SBC-3 5.11, 5.33: DPO, FUA, FUA_NV and the group number are understood.
#[test]
fn flags_and_group_number() {
    let (mut b, i) = Harness::new();
    for (flags, expect) in [(0x10, "write 0+1"), (0x08, "write 0+1 fua"), (0x1a, "write 0+1 fua")] {
        for write in [0x2a, 0xaa, 0x8a] {
            assert_eq!(
                describe_reply(&b.data_out(i, &cdb(write, flags, 0, 1), &blocks(1, 0))),
                "Good"
            );
            assert_eq!(b.take_requests(), [expect]);
        }
        for read in [0x28, 0xa8, 0x88] {
            assert_eq!(describe_reply(&b.data_in(i, &cdb(read, flags, 0, 1))), "Good");
            assert_eq!(b.take_requests(), ["read 0+1"]);
        }
    }
    let mut grouped = cdb(0x28, 0, 0, 1);
    grouped[6] = 3;
    assert_eq!(describe_reply(&b.data_in(i, &grouped)), "Good");
    assert_eq!(
        describe_reply(&b.data_out(i, &cdb(0x0a, 0, 0x08_0000, 1), &blocks(1, 0))),
        "05/21/00"
    );
    assert_eq!(b.take_requests(), ["read 0+1"], "an address bit of WRITE(6) is no FUA");
}

/// SPC-4 7.5.8 and SBC-3 4.18: write protection, by the device, the configuration or SWP.
#[test]
fn write_protection() {
    let mut n = info();
    n.read_only = true;
    let mut c = config();
    c.read_only = true;
    for (mut b, i) in [Harness::with(config(), n), Harness::with(c, info())] {
        for opcode in [0x2a, 0xaa, 0x8a, 0x2e, 0xae, 0x8e, 0x41, 0x93] {
            let r = b.data_out(i, &cdb(opcode, 0, 0, 1), &blocks(1, 0));
            assert_eq!(describe_reply(&r), "07/27/00", "{opcode:x}");
        }
        let r = b.data_out(i, &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0], &blocks(2, 0));
        assert_eq!(describe_reply(&r), "07/27/00");
        assert_eq!(
            describe_reply(&b.data_out(i, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24])),
            "07/27/00"
        );
        assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "Good");
        assert_eq!(data(&b.data_in(i, &[0x1a, 0, 0x3f, 0, 255, 0]))[2], 0x90, "WP and DPOFUA");
    }
}

/// RFC 7143 11.4.5.1: a read against a window that is smaller or larger.
#[test]
fn residuals_of_reads() {
    let (mut b, i) = Harness::new();
    b.contents.fill(7);
    for (count, window, expect, shape) in [
        (1, 0, 0, None),
        (1, 10_000, 512, Some("read 0+1")),
        (1, 200, 200, Some("read 0+1")),
        (2, 512, 512, Some("read 0+1")),
        (2, 513, 513, Some("read 0+2")),
    ] {
        for read in READS {
            let r = b.run(i, &cdb(read, 0, 0, count), TransferLengths::to_initiator(window), &[]);
            assert_eq!((describe_reply(&r).as_str(), r.data.len()), ("Good", expect));
            assert_eq!(r.full_transfer, TransferLengths::to_initiator(u64::from(count) * BLOCK));
            assert_eq!(b.take_requests(), shape.into_iter().collect::<Vec<_>>());
        }
    }
    // A read whose initiator expects to send data gets no data back.
    let r = b.run(i, &cdb(0x28, 0, 0, 1), TransferLengths::from_initiator(512), &[0; 512]);
    assert_eq!((describe_reply(&r).as_str(), r.data.len()), ("Good", 0));
}

/// RFC 7143 11.4.5.1: a write against a window that is smaller or larger. Whole blocks that come
/// are written; half a block is refused and nothing is written.
#[test]
fn residuals_of_writes() {
    let (mut b, i) = Harness::new();
    for (count, window, expect, shape) in [
        (1, 0, "Good", None),
        (1, 1024, "Good", Some("write 0+1")),
        (2, 512, "Good", Some("write 0+1")),
        (1, 10_000, "Good", Some("write 0+1")),
        (1, 200, "05/0e/03", None),
        (2, 700, "05/0e/03", None),
    ] {
        for write in WRITES {
            let window = TransferLengths::from_initiator(window);
            let r = b.run(i, &cdb(write, 0, 0, count), window, &blocks(2, 9));
            assert_eq!(describe_reply(&r), expect);
            assert_eq!(r.full_transfer, TransferLengths::from_initiator(u64::from(count) * BLOCK));
            assert_eq!(b.take_requests(), shape.into_iter().collect::<Vec<_>>());
        }
    }
    assert!(b.contents[512..].iter().all(|&byte| byte == 0), "the second block stays");
}

/// Accepted commands request the memory that they need.
#[test]
fn an_admitted_command_names_its_memory() {
    let (mut b, i) = Harness::new();
    let window = TransferLengths { data_out: 1 << 20, data_in: 1 << 20 };
    for (cdb, expect) in [
        (cdb(0x28, 0, 0, 4), (0, 2048, 0)),
        (cdb(0x2a, 0, 0, 4), (2048, 0, 0)),
        (cdb(0x2e, 0, 0, 4), (2048, 0, 2048)),
        (cdb(0x2f, 0, 0, 4), (0, 0, 2048)),
        (cdb(0x2f, 6, 0, 4), (512, 0, 2048)),
        (cdb(0x35, 0, 0, 4), (0, 0, 0)),
    ] {
        let Admission::Accept(c) = b.arrive(i, &cdb, window) else { panic!("{cdb:x?}") };
        assert_eq!((c.data_out(), c.data_in(), c.read_back()), expect, "{cdb:x?}");
    }
}

/// SBC-3 5.8: GOOD, and not CONDITION MET, for blocks that are not all cached.
#[test]
fn pre_fetch() {
    let (mut b, i) = Harness::new();
    for opcode in [0x34, 0x90] {
        for flags in [0, 2] {
            assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, flags, 0, 1000))), "Good");
        }
    }
    let mut grouped = cdb(0x34, 2, 0, 1);
    grouped[6] = 3;
    assert_eq!(describe_reply(&b.data_in(i, &grouped)), "Good");
    assert_eq!(b.take_requests(), [""; 0]);
}

/// SBC-3 5.26, 5.27.
#[test]
fn synchronize_cache() {
    let (mut b, i) = Harness::new();
    for opcode in [0x35, 0x91] {
        for (flags, at, count) in [(0, 0, 0), (2, 0, 0), (4, 5, 10), (6, BLOCKS, 0)] {
            assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, flags, at, count))), "Good");
            assert_eq!(b.take_requests(), ["flush"]);
        }
        assert_eq!(describe_reply(&b.data_in(i, &cdb(opcode, 0, BLOCKS, 1))), "05/21/00");
    }
}

/// SBC-3 4.18, SPC-4 4.5: failures of the volume, in either format.
#[test]
fn failures_become_sense_data() {
    let (mut b, i) = Harness::new();
    let at = Lba(0x1234);
    for (error, expect, info) in [
        (Error::Unreadable { at }, "03/11/00", Some(0x1234)),
        (Error::Corrupt { at }, "03/11/0a", Some(0x1234)),
        (Error::Unwritable { at }, "03/0c/00", Some(0x1234)),
        (Error::NoSpace, "07/27/07", None),
        (Error::Fenced, "02/04/01", None),
        (Error::Gone, "04/3e/01", None),
        (Error::Aborted, "0b/00/00", None),
    ] {
        b.fail = Some(RequestError::Device(error));
        let r = b.data_out(i, &cdb(0x2a, 0, 0, 2), &blocks(2, 1));
        assert_eq!((describe_reply(&r).as_str(), information(&r)), (expect, info));
        assert_eq!(r.full_transfer, TransferLengths::from_initiator(1024));
        b.fail = Some(RequestError::Device(error));
        let r = b.data_in(i, &cdb(0x28, 0, 0, 2));
        assert_eq!((describe_reply(&r).as_str(), r.data.len()), (expect, 0));
    }
}

/// A driver that loses data on the way does no harm.
#[test]
fn data_of_the_wrong_length_is_a_data_phase_error() {
    let (mut b, i) = Harness::new();
    let window = TransferLengths::from_initiator(512);
    let Admission::Accept(command) = b.arrive(i, &cdb(0x2a, 0, 0, 1), window) else {
        panic!("must be accepted")
    };
    let short = b.bufs(&[0; 511]);
    let scsi::Step::Reply(r) = b.unit.start(i, command, short) else { panic!("must end") };
    assert_eq!(describe_reply(&r), "0b/4b/00");
}
