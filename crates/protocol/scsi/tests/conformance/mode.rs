//! SPC-4 6.11 to 6.14, 7.5 and SBC-3 6.4: mode pages.

use block::{Error, RequestError};

use crate::harness::{BLOCKS, Harness, blocks, cdb, config, data, describe_reply, info, pointer};

fn sense6(page: u8, subpage: u8) -> [u8; 6] {
    [0x1a, 0x08, page, subpage, 255, 0]
}

/// MODE SELECT(6) with a header, no block descriptor, and `pages`.
fn select6(b: &mut Harness, i: scsi::NexusId, pages: &[u8]) -> scsi::Reply {
    let list = [&[0, 0, 0, 0], pages].concat();
    b.data_out(i, &[0x15, 0x10, 0, 0, list.len() as u8, 0], &list)
}

/// The control page with other flags: byte 2 or-ed, byte 4, byte 5.
fn control(d_sense: u8, swp: u8, tas: u8) -> [u8; 12] {
    [0x0a, 10, 0x02 | d_sense, 0x10, swp, tas, 0, 0, 0xff, 0xff, 0, 0]
}

/// SPC-4 6.13, 7.5.
#[test]
fn headers_and_descriptors() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &[0x1a, 0, 0x0a, 0, 255, 0]));
    assert_eq!(d[..12], [23, 0, 0x10, 8, 0, 0, 0x03, 0xe8, 0, 0, 2, 0]);
    assert_eq!(d.len(), 24);
    let d = data(&b.data_in(i, &[0x1a, 8, 0x0a, 0, 255, 0]));
    assert_eq!((d.len(), d[..4].to_vec()), (16, vec![15, 0, 0x10, 0]));
    let d = data(&b.data_in(i, &[0x5a, 0, 0x0a, 0, 0, 0, 0, 0, 255, 0]));
    assert_eq!(d[..16], [0, 26, 0, 0x10, 0, 0, 0, 8, 0, 0, 0x03, 0xe8, 0, 0, 2, 0]);
    let d = data(&b.data_in(i, &[0x5a, 0x10, 0x0a, 0, 0, 0, 0, 0, 255, 0]));
    assert_eq!(d[..8], [0, 34, 0, 0x10, 1, 0, 0, 16]);
    assert_eq!(d[8..16], BLOCKS.to_be_bytes());
    assert_eq!(d[16..24], [0, 0, 0, 0, 0, 0, 2, 0]);
}

/// SBC-3 6.4: a count that does not fit says so.
#[test]
fn a_large_device_in_a_short_descriptor() {
    let mut n = info();
    n.blocks = 1 << 33;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(data(&b.data_in(i, &[0x1a, 0, 0x0a, 0, 255, 0]))[4..8], [0xff; 4]);
}

/// SPC-4 7.5: the pages, alone and together, in order.
#[test]
fn pages() {
    let (mut b, i) = Harness::new();
    let mut together = Vec::new();
    for (page, subpage, expect) in [
        (0x01, 0, vec![0x01, 10, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (0x02, 0, [&[0x02, 14][..], &[0; 14]].concat()),
        (0x08, 0, [&[0x08, 18, 0x04][..], &[0; 17]].concat()),
        (0x0a, 0, control(0, 0, 0).to_vec()),
        (0x0a, 1, [&[0x4a, 1, 0, 28][..], &[0; 28]].concat()),
        (0x1a, 0, [&[0x1a, 38][..], &[0; 38]].concat()),
        (0x1c, 0, vec![0x1c, 10, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        assert_eq!(data(&b.data_in(i, &sense6(page, subpage)))[4..], expect, "{page:x} {subpage}");
        together.push((subpage, expect));
    }
    let all: Vec<u8> = together.iter().flat_map(|(_, page)| page.clone()).collect();
    assert_eq!(data(&b.data_in(i, &sense6(0x3f, 0xff)))[4..], all);
    let plain: Vec<u8> =
        together.iter().filter(|(s, _)| *s == 0).flat_map(|(_, page)| page.clone()).collect();
    assert_eq!(data(&b.data_in(i, &sense6(0x3f, 0)))[4..], plain);
    assert_eq!(data(&b.data_in(i, &sense6(0x0a, 0xff)))[4..].len(), 12 + 32);
    for n in 0..40 {
        let mut cdb = sense6(0x3f, 0);
        cdb[4] = n;
        assert_eq!(data(&b.data_in(i, &cdb)).len(), usize::from(n));
    }
}

/// SPC-4 6.13: unsupported pages.
#[test]
fn unknown_pages() {
    let (mut b, i) = Harness::new();
    for (page, subpage, at) in
        [(0x03, 0, (2, Some(5))), (0x0a, 2, (3, None)), (0x3f, 1, (3, None)), (0, 0, (2, Some(5)))]
    {
        let r = b.data_in(i, &sense6(page, subpage));
        let expect = Some((true, at.0, at.1));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", expect));
    }
    assert_eq!(describe_reply(&b.data_in(i, &sense6(0xc0 | 0x0a, 0))), "05/39/00", "saved values");
}

/// SPC-4 6.13: changeable and default values.
#[test]
fn page_controls() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&select6(&mut b, i, &control(0x04, 0, 0x40))), "Good");
    let page = |b: &mut Harness, control: u8| data(&b.data_in(i, &sense6(control << 6 | 0x0a, 0)));
    assert_eq!(page(&mut b, 0)[4..], control(0x04, 0, 0x40));
    assert_eq!(page(&mut b, 1)[4..], [0x0a, 10, 0x04, 0, 0x08, 0x40, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page(&mut b, 2)[4..], control(0, 0, 0));
    assert_eq!(data(&b.data_in(i, &sense6(0x48, 0)))[6], 0x04, "WCE can be changed");
    let mut n = info();
    n.volatile_cache = false;
    let (mut b, i) = Harness::with(config(), n);
    assert_eq!(data(&b.data_in(i, &sense6(0x48, 0)))[6], 0x00, "without a cache it cannot");
    assert_eq!(data(&b.data_in(i, &sense6(0x08, 0)))[6], 0x00);
}

/// SPC-4 7.5.8: SWP.
#[test]
fn software_write_protect() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&select6(&mut b, i, &control(0, 0x08, 0))), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2a, 0, 0, 1), &blocks(1, 0))), "07/27/02");
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "Good");
    assert_eq!(data(&b.data_in(i, &sense6(0x0a, 0)))[2], 0x90);
    assert_eq!(describe_reply(&select6(&mut b, i, &control(0, 0, 0))), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2a, 0, 0, 1), &blocks(1, 0))), "Good");
}

/// SPC-4 7.5.8: D_SENSE, for every error from then on.
#[test]
fn descriptor_sense() {
    let (mut b, i) = Harness::new();
    assert_eq!(b.data_in(i, &cdb(0x88, 0, u64::MAX, 1)).sense[0], 0x70);
    select6(&mut b, i, &control(0x04, 0, 0));
    assert_eq!(b.data_in(i, &cdb(0x88, 0, u64::MAX, 1)).sense[0], 0x72);
    b.fail = Some(RequestError::Device(Error::Unreadable { at: block::Lba(1 << 40) }));
    let r = b.data_in(i, &cdb(0x88, 0, 0, 1));
    assert_eq!(r.sense[8..], [0, 10, 0x80, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
}

/// SPC-4 7.5.8: TAS.
#[test]
fn task_aborted_status() {
    let (mut b, i) = Harness::new();
    assert!(!b.unit.task_aborted_status());
    select6(&mut b, i, &control(0, 0, 0x40));
    assert!(b.unit.task_aborted_status());
    b.fail = Some(RequestError::Device(Error::Aborted));
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "TaskAborted");
}

/// SBC-3 6.4: WCE at zero makes every write durable.
#[test]
fn write_cache_disabled() {
    let (mut b, i) = Harness::new();
    let mut page = vec![0x08, 18];
    page.resize(20, 0);
    assert_eq!(describe_reply(&select6(&mut b, i, &page)), "Good");
    assert_eq!(b.take_requests(), ["flush"], "what was written before is durable, too");
    assert_eq!(describe_reply(&select6(&mut b, i, &page)), "Good");
    assert_eq!(b.take_requests(), ["flush"], "who knows whether the first one went well");
    b.data_out(i, &cdb(0x2a, 0, 0, 1), &blocks(1, 0));
    b.data_out(i, &cdb(0x41, 8, 0, 4), &blocks(1, 0));
    b.data_out(i, &cdb(0x41, 0, 0, 4), &blocks(1, 1));
    assert_eq!(b.take_requests(), ["write 0+1 fua", "zero 0+4 unmap fua", "same 0+4 fua"]);
    page[2] = 0x04;
    assert_eq!(describe_reply(&select6(&mut b, i, &page)), "Good");
    b.data_out(i, &cdb(0x2a, 0, 0, 1), &blocks(1, 0));
    assert_eq!(b.take_requests(), ["write 0+1"]);
}

/// SPC-4 6.11: all other initiators get one attention, and only for a change.
#[test]
fn other_nexuses_get_an_attention() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    select6(&mut b, i, &control(0, 0, 0));
    assert_eq!(describe_reply(&b.data_in(other, &[0; 6])), "Good", "nothing changed");
    select6(&mut b, i, &control(0x04, 0, 0));
    assert_eq!(describe_reply(&b.data_in(i, &[0; 6])), "Good");
    assert_eq!(describe_reply(&b.data_in(other, &[0; 6])), "06/2a/01");
    assert_eq!(describe_reply(&b.data_in(other, &[0; 6])), "Good");
}

/// SPC-4 6.11: lists that cannot be, and then nothing is changed.
#[test]
fn wrong_parameter_lists() {
    let (mut b, i) = Harness::new();
    let good = control(0x04, 0, 0);
    let with = |at: usize, value: u8| {
        let mut page = good;
        page[at] = value;
        page.to_vec()
    };
    for (pages, expect, at) in [
        (with(1, 11), "05/1a/00", None),
        (with(1, 9), "05/26/00", Some(5)),
        (with(3, 0), "05/26/00", Some(7)),
        (with(8, 0), "05/26/00", Some(12)),
        (with(0, 0x8a), "05/26/00", Some(4)),
        (with(0, 0x0b), "05/26/00", Some(4)),
        (vec![0x0a], "05/1a/00", None),
        (vec![0x4a, 1, 0], "05/1a/00", None),
        ([&good[..], &with(3, 0)].concat(), "05/26/00", Some(19)),
    ] {
        let r = select6(&mut b, i, &pages);
        assert_eq!(describe_reply(&r), expect, "{pages:x?}");
        assert_eq!(pointer(&r).map(|p| p.1), at, "{pages:x?}");
    }
    assert_eq!(data(&b.data_in(i, &sense6(0x0a, 0)))[4..], control(0, 0, 0));
}

/// SPC-4 6.11 and SBC-3 6.4: PF, SP, no list, block descriptors that repeat the current values.
#[test]
fn mode_select_forms() {
    let (mut b, i) = Harness::new();
    let list = [&[0, 0, 0, 0][..], &control(0x04, 0, 0)].concat();
    let r = b.data_out(i, &[0x15, 0, 0, 0, 16, 0], &list);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(4)))));
    let r = b.data_out(i, &[0x15, 0x11, 0, 0, 16, 0], &list);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(0)))));
    assert_eq!(describe_reply(&b.data_out(i, &[0x15, 0x10, 0, 0, 0, 0], &[])), "Good");
    assert_eq!(describe_reply(&b.data_out(i, &[0x15, 0x10, 0, 0, 16, 0], &list[..12])), "05/0e/03");
    assert_eq!(describe_reply(&b.data_out(i, &[0x15, 0x10, 0, 0, 3, 0], &list[..3])), "05/1a/00");
    assert_eq!(
        describe_reply(&b.data_out(i, &[0x55, 0x10, 0, 0, 0, 0, 0, 0x10, 1, 0], &[0; 4097])),
        "05/1a/00"
    );

    let select10 = |b: &mut Harness, descriptor: &[u8], long: u8| {
        let head = [0, 0, 0, 0, long, 0, 0, descriptor.len() as u8];
        let list = [&head, descriptor, &control(0x04, 0, 0)].concat();
        describe_reply(&b.data_out(i, &[0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list))
    };
    assert_eq!(select10(&mut b, &[0, 0, 0x03, 0xe8, 0, 0, 2, 0], 0), "Good");
    assert_eq!(select10(&mut b, &[0, 0, 0, 0, 0, 0, 2, 0], 0), "Good");
    assert_eq!(select10(&mut b, &[0, 0, 0x03, 0xe7, 0, 0, 2, 0], 0), "05/26/00");
    assert_eq!(select10(&mut b, &[0, 0, 0, 0, 0, 0, 0x10, 0], 0), "05/26/00");
    assert_eq!(select10(&mut b, &[0; 16], 1), "05/26/00");
    assert_eq!(select10(&mut b, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0], 1), "Good");
    assert_eq!(select10(&mut b, &[0; 9], 0), "05/26/00");
}
