//! Monitoring commands: SBC-3 5.17, 5.18 READ DEFECT DATA, SPC-4 6.42, 6.28 SEND DIAGNOSTIC and
//! RECEIVE DIAGNOSTIC RESULTS, SPC-4 6.8, 7.3 LOG SENSE; and SBC-3 5.3 FORMAT UNIT.

use block::{Error, Lba};
use scsi::{NexusId, Reply, TransferLengths};

use crate::harness::{Harness, config, data, describe_reply, info, pointer};

/// SBC-3 5.17, 5.18: empty lists, in the format that is asked for.
#[test]
fn defect_lists_are_empty() {
    let (mut b, i) = Harness::new();
    for asked in [0x00, 0x08, 0x10, 0x1d, 0x05] {
        let r = b.data_in(i, &[0x37, 0, asked, 0, 0, 0, 0, 0, 32, 0]);
        assert_eq!((describe_reply(&r).as_str(), data(&r)), ("Good", vec![0, asked, 0, 0]));
        let twelve = [0xb7, asked, 0, 0, 0, 9, 0, 0, 0, 32, 0, 0];
        assert_eq!(data(&b.data_in(i, &twelve)), [0, asked, 0, 0, 0, 0, 0, 0]);
    }
    assert_eq!(data(&b.data_in(i, &[0x37, 0, 0x08, 0, 0, 0, 0, 0, 2, 0])), [0, 0x08]);
    let r = b.data_in(i, &[0x37, 0, 0x0e, 0, 0, 0, 0, 0, 32, 0]);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 2, Some(2)))));
    let r = b.data_in(i, &[0xb7, 0x07, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(2)))));
}

/// SPC-4 6.42: the default self-test looks whether the medium answers.
#[test]
fn self_test() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&b.data_in(i, &[0x1d, 0x04, 0, 0, 0, 0])), "Good");
    assert_eq!(
        describe_reply(&b.data_in(i, &[0x1d, 0x07, 0, 0, 0, 0])),
        "Good",
        "DEVOFFL and UNITOFFL"
    );
    assert_eq!(b.take_requests(), ["verify 0+1", "verify 0+1"]);
    b.fail = Some(Error::Unreadable { at: Lba(0) }.into());
    assert_eq!(describe_reply(&b.data_in(i, &[0x1d, 0x04, 0, 0, 0, 0])), "04/3e/03");
    b.fail = Some(Error::Fenced.into());
    assert_eq!(
        describe_reply(&b.data_in(i, &[0x1d, 0x04, 0, 0, 0, 0])),
        "02/04/01",
        "no fault of the unit"
    );
    for (cdb, at) in [
        ([0x1d, 0x20, 0, 0, 0, 0], (1, Some(5))),
        ([0x1d, 0x80, 0, 0, 0, 0], (1, Some(7))),
        ([0x1d, 0x04, 0, 0, 4, 0], (3, None)),
        ([0x1d, 0x00, 0, 0, 4, 0], (1, Some(4))),
    ] {
        let r = b.data_out(i, &cdb, &[0; 4]);
        let expect = ("05/24/00", Some((true, at.0, at.1)));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect, "{cdb:x?}");
    }
    assert_eq!(describe_reply(&b.data_in(i, &[0x1d, 0, 0, 0, 0, 0])), "Good", "nothing to do");
    let (mut b, i) = Harness::with(config(), block::Info { blocks: 0, ..info() });
    assert_eq!(describe_reply(&b.data_in(i, &[0x1d, 0x04, 0, 0, 0, 0])), "Good");
}

/// SPC-4 6.42, 6.28, 7.2: the page that lists the pages is the only one.
#[test]
fn diagnostic_pages() {
    let (mut b, i) = Harness::new();
    let send = |b: &mut Harness, list: &[u8]| {
        b.data_out(i, &[0x1d, 0x10, 0, 0, list.len() as u8, 0], list)
    };
    assert_eq!(describe_reply(&send(&mut b, &[0, 0, 0, 0])), "Good");
    let r = send(&mut b, &[0x40, 0, 0, 0]);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/26/00", Some((false, 0, None))));
    for list in [&[0, 0, 0, 1, 0][..], &[0, 0, 0], &[0]] {
        assert_eq!(describe_reply(&send(&mut b, list)), "05/1a/00", "{list:x?}");
    }
    for cdb in [[0x1c, 1, 0, 0, 255, 0], [0x1c, 0, 0, 0, 255, 0], [0x1c, 0, 7, 0, 255, 0]] {
        assert_eq!(data(&b.data_in(i, &cdb)), [0, 0, 0, 1, 0], "{cdb:x?}");
    }
    assert_eq!(data(&b.data_in(i, &[0x1c, 1, 0, 0, 2, 0])), [0, 0]);
    let r = b.data_in(i, &[0x1c, 1, 0x40, 0, 255, 0]);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 2, None))));
}

fn format(b: &mut Harness, i: NexusId, options: u8, list: &[u8]) -> Reply {
    b.data_out(i, &[0x04, options, 0, 0, 0, 0], list)
}

/// SBC-3 5.3: the whole unit reads as zeroes, with and without a list; the lists that tools send.
#[test]
fn format_unit() {
    let (mut b, i) = Harness::new();
    for (options, list) in [
        (0x00, &[][..]),
        (0x10, &[0, 0, 0, 0]),                            // no list of defects
        (0x10, &[0, 0x02, 0, 0]),                         // sg_format: IMMED
        (0x18, &[0, 0xa2, 0, 0]),                         // and no certification, no grown defects
        (0x15, &[0, 0xf6, 0, 0]),                         // all options, another format of the list
        (0x10, &[0, 0x88, 0, 0, 0, 0, 0, 0]),             // the default pattern
        (0x10, &[0, 0x88, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0]), // zeroes as a pattern
        (0x30, &[0, 0x02, 0, 0, 0, 0, 0, 0]),             // a long header
    ] {
        b.contents.fill(0xee);
        assert_eq!(
            describe_reply(&format(&mut b, i, options, list)),
            "Good",
            "{options:x} {list:x?}"
        );
        assert_eq!(b.take_requests(), ["zero 0+1000 unmap"]);
        assert!(b.contents.iter().all(|&byte| byte == 0));
    }
    let mut n = info();
    n.unmap_granularity_blocks = 0;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(describe_reply(&format(&mut b, i, 0, &[])), "Good");
    assert_eq!(b.take_requests(), ["zero 0+1000"]);
}

/// SBC-3 5.3: other formats, defect lists, patterns and invalid lists.
#[test]
fn format_unit_of_what_is_not_there() {
    let (mut b, i) = Harness::new();
    for (options, at) in [(0x80, 7), (0x40, 6), (0x20, 5), (0x08, 3), (0x05, 2)] {
        let r = format(&mut b, i, options, &[]);
        let expect = ("05/24/00", Some((true, 1, Some(at))));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect, "{options:x}");
    }
    let r = b.data_out(i, &[0x04, 0, 0, 0, 1, 0], &[]);
    assert_eq!(pointer(&r), Some((true, 4, Some(0))), "a fast format");
    for (options, list, at) in [
        (0x10, &[1, 0, 0, 0][..], (0, Some(0))),
        (0x10, &[0, 0x01, 0, 0], (1, Some(0))),
        (0x10, &[0, 0x20, 0, 0], (1, Some(7))),
        (0x10, &[0, 0x08, 0, 0, 0, 0, 0, 0], (1, Some(7))),
        (0x10, &[0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1], (2, None)),
        (0x30, &[0, 0, 0, 1, 0, 0, 0, 0], (3, None)),
        (0x30, &[0, 0, 0, 0, 0, 0, 0, 8], (4, None)),
        (0x10, &[0, 0x88, 0, 0, 0x20, 0, 0, 0], (4, Some(5))),
        (0x10, &[0, 0x88, 0, 0, 0, 2, 0, 0], (5, None)),
        (0x10, &[0, 0x88, 0, 0, 0, 0, 0, 1, 0], (6, None)),
        (0x10, &[0, 0x88, 0, 0, 0, 1, 0, 0], (6, None)),
        (0x10, &[0, 0x88, 0, 0, 0, 1, 0x02, 0x01], (6, None)),
        (0x10, &[0, 0x88, 0, 0, 0, 1, 0, 1, 7], (8, None)),
    ] {
        let r = format(&mut b, i, options, list);
        let expect = ("05/26/00", Some((false, at.0, at.1)));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect, "{options:x} {list:x?}");
    }
    for (options, list, expect) in [
        (0x10, &[0, 0, 0][..], "05/0e/03"),
        (0x30, &[0, 0, 0, 0], "05/0e/03"),
        (0x10, &[0, 0x88, 0, 0], "05/1a/00"),
        (0x10, &[0, 0x88, 0, 0, 0, 1, 0, 4, 0, 0, 0], "05/1a/00"),
    ] {
        assert_eq!(describe_reply(&format(&mut b, i, options, list)), expect, "{list:x?}");
    }
    assert_eq!(b.take_requests(), [""; 0], "nothing was formatted");
    let mut c = config();
    c.read_only = true;
    let (mut b, i) = Harness::with(c, info());
    assert_eq!(describe_reply(&format(&mut b, i, 0, &[])), "07/27/00");
}

fn log(control: u8, page: u8, subpage: u8, pointer: u16, allocation: u8) -> [u8; 10] {
    let [high, low] = pointer.to_be_bytes();
    [0x4d, 0, control << 6 | page, subpage, 0, high, low, 0, allocation, 0]
}

/// SPC-4 6.8, 7.3: the pages, and those of a thin unit with known space.
#[test]
fn log_pages() {
    let (mut b, i) = Harness::new();
    let ask = |b: &mut Harness, page, subpage| data(&b.data_in(i, &log(1, page, subpage, 0, 255)));
    assert_eq!(ask(&mut b, 0, 0), [0, 0, 0, 2, 0x00, 0x2f]);
    assert_eq!(ask(&mut b, 0, 0xff), [0x40, 0xff, 0, 6, 0, 0, 0, 0xff, 0x2f, 0]);
    let exceptions = ask(&mut b, 0x2f, 0);
    assert_eq!(exceptions, [0xaf, 0, 0, 8, 0, 0, 3, 4, 0, 0, 0xff, 0], "no temperature");
    assert_eq!(data(&b.data_in(i, &log(1, 0x2f, 0, 0, 5))), exceptions[..5]);
    b.unit.set_space(3 << 11, 5 << 11);
    assert_eq!(describe_reply(&b.data_in(i, &[0; 6])), "06/3f/03", "there are other pages now");
    assert_eq!(ask(&mut b, 0, 0), [0, 0, 0, 3, 0x00, 0x0c, 0x2f]);
    let expect = [0, 1, 3, 8, 0, 0, 0, 5, 2, 0, 0, 0, 0, 2, 3, 8, 0, 0, 0, 3, 1, 0, 0, 0];
    let space = ask(&mut b, 0x0c, 0);
    assert_eq!((&space[..4], &space[4..]), (&[0x8c, 0, 0, 24][..], &expect[..]));
    let from_used = data(&b.data_in(i, &log(1, 0x0c, 0, 2, 255)));
    assert_eq!((&from_used[..4], &from_used[4..]), (&[0x8c, 0, 0, 12][..], &expect[12..]));
}

/// SPC-4 6.8: unsupported pages and values.
#[test]
fn log_sense_of_what_is_not_there() {
    let (mut b, i) = Harness::new();
    for (cdb, at) in [
        (log(1, 0x0c, 0, 0, 255), (2, Some(5))),
        (log(1, 0x0d, 0, 0, 255), (2, Some(5))),
        (log(1, 0x2f, 1, 0, 255), (3, None)),
        (log(0, 0x2f, 0, 0, 255), (2, Some(7))),
        (log(3, 0x2f, 0, 0, 255), (2, Some(7))),
        (log(1, 0x2f, 0, 1, 255), (5, None)),
        (log(1, 0x00, 0, 1, 255), (5, None)),
        ([0x4d, 1, 0x6f, 0, 0, 0, 0, 0, 255, 0], (1, Some(0))),
        ([0x4d, 2, 0x6f, 0, 0, 0, 0, 0, 255, 0], (1, Some(1))),
    ] {
        let r = b.data_in(i, &cdb);
        let expect = ("05/24/00", Some((true, at.0, at.1)));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect, "{cdb:x?}");
    }
    assert_eq!(
        describe_reply(&b.run(i, &log(1, 0x2f, 0, 0, 0), TransferLengths::NONE, &[])),
        "Good"
    );
}
