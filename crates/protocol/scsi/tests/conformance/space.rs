//! SBC-3 4.7.3.7, 6.4, 6.5: space of a thin unit, and reported thresholds. The threshold set is 1
//! MiB; the unit has a thousand.

use block::Info;
use scsi::NexusId;

use crate::harness::{Harness, config, data, describe_reply, info};

/// A set of 2^11 blocks of 512 bytes.
const SET: u64 = 1 << 11;

/// A unit of 1000 sets that uses 100, with 500 available, and an initiator without pending
/// attentions.
fn bench() -> (Harness, NexusId) {
    let (mut b, i) = Harness::with(config(), Info { blocks: 1000 * SET, ..info() });
    b.unit.set_space(100 * SET, 500 * SET);
    assert_eq!(describe_reply(&b.data_in(i, &[0; 6])), "06/3f/03");
    (b, i)
}

fn told(b: &mut Harness, i: NexusId) -> String {
    describe_reply(&b.data_in(i, &[0; 6]))
}

fn sense(control: u8, page: u8, subpage: u8) -> [u8; 6] {
    [0x1a, 0x08, control << 6 | page, subpage, 255, 0]
}

/// The provisioning mode page with these thresholds: enabled, count.
fn page(low: (u8, u32), taken: (u8, u32)) -> Vec<u8> {
    let mut page = vec![0x5c, 2, 0, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    page.extend([low.0, 1, 0, 0]);
    page.extend(low.1.to_be_bytes());
    page.extend([taken.0 | 1, 2, 0, 0]);
    page.extend(taken.1.to_be_bytes());
    page
}

fn select(b: &mut Harness, i: NexusId, page: &[u8]) -> String {
    let list = [&[0; 4], page].concat();
    describe_reply(&b.data_out(i, &[0x15, 0x10, 0, 0, list.len() as u8, 0], &list))
}

/// SBC-3 6.5, 6.4: the exponent, and the page with its changeable and default values.
#[test]
fn provisioning_mode_page() {
    let (mut b, i) = bench();
    assert_eq!(data(&b.data_in(i, &[0x12, 1, 0xb2, 0, 255, 0]))[4], 11, "sets of 1 MiB");
    let default = page((0x80, 100), (0, 1000));
    for control in [0, 2] {
        assert_eq!(data(&b.data_in(i, &sense(control, 0x1c, 2)))[4..], default);
    }
    let mask = data(&b.data_in(i, &sense(1, 0x1c, 2)))[4..].to_vec();
    let all = u32::MAX.to_be_bytes();
    assert_eq!(mask[16..], [&[0x80, 0, 0, 0][..], &all, &[0x80, 0, 0, 0], &all].concat());
    assert_eq!(data(&b.data_in(i, &sense(0, 0x01, 0)))[4 + 7], 0x80, "LBPERE");
    assert_eq!(data(&b.data_in(i, &sense(1, 0x01, 0)))[4 + 7], 0x80, "it can be changed");
    assert_eq!(data(&b.data_in(i, &sense(0, 0x1c, 0xff))).len(), 4 + 12 + 32);
    let other = page((0x80, 7), (0x80, 900));
    assert_eq!(select(&mut b, i, &other), "Good");
    assert_eq!(data(&b.data_in(i, &sense(0, 0x1c, 2)))[4..], other);
    for (at, value) in [(4, 1), (17, 2), (24, 0x80), (18, 1)] {
        let mut wrong = other.clone();
        wrong[at] = value;
        assert_eq!(select(&mut b, i, &wrong), "05/26/00", "byte {at}");
    }
    b.change_shared(i, &reservation::Change::Reset { whole_target: false }).unwrap();
    assert_eq!(told(&mut b, i), "06/29/03");
    assert_eq!(data(&b.data_in(i, &sense(0, 0x1c, 2)))[4..], default);
}

/// SBC-3 4.7.3.7: every initiator gets one attention when a threshold is crossed, which says which
/// one.
#[test]
fn thresholds_are_reported_once() {
    let (mut b, i) = bench();
    let other = b.join(2);
    b.unit.set_space(200 * SET, 101 * SET);
    assert_eq!(told(&mut b, i), "Good");
    b.unit.set_space(201 * SET, 100 * SET);
    b.unit.set_space(250 * SET, 51 * SET);
    for id in [i, other] {
        let r = b.data_in(id, &[0; 6]);
        assert_eq!(
            (describe_reply(&r).as_str(), r.sense[3..7].to_vec()),
            ("06/38/07", vec![0, 0, 0, 16])
        );
        assert_eq!(told(&mut b, id), "Good");
    }
    b.unit.set_space(200 * SET, 101 * SET);
    b.unit.set_space(200 * SET, 99 * SET);
    assert_eq!(told(&mut b, i), "06/38/07", "there was more space meanwhile");
    assert_eq!(select(&mut b, i, &page((0, 100), (0x80, 300))), "Good");
    b.unit.set_space(200 * SET, 500 * SET);
    b.unit.set_space(300 * SET, 50 * SET);
    let r = b.data_in(i, &[0; 6]);
    assert_eq!((describe_reply(&r).as_str(), r.sense[6]), ("06/38/07", 24), "the other threshold");
    assert_eq!(told(&mut b, i), "Good", "the first one is disabled");
}

/// SBC-3 4.7.3.7, 6.5: a threshold reached already when it is set is not reported; LBPERE disables
/// all.
#[test]
fn thresholds_that_are_not_reported() {
    let (mut b, i) = bench();
    assert_eq!(select(&mut b, i, &page((0x80, 600), (0, 1000))), "Good");
    b.unit.set_space(100 * SET, 499 * SET);
    assert_eq!(told(&mut b, i), "Good");
    let silent = [0x01, 10, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(select(&mut b, i, &silent), "Good");
    b.unit.set_space(100 * SET, 700 * SET);
    b.unit.set_space(100 * SET, 400 * SET);
    assert_eq!(told(&mut b, i), "Good");
}

/// SBC-3 6.5: only of thin units.
#[test]
fn units_that_are_not_thin_have_no_space() {
    let mut c = config();
    c.thin = false;
    for (c, granularity) in [(c, 8), (config(), 0)] {
        let (mut b, i) = Harness::with(c, Info { unmap_granularity_blocks: granularity, ..info() });
        b.unit.set_space(1, 1);
        assert_eq!(told(&mut b, i), "Good");
        assert_eq!(data(&b.data_in(i, &[0x12, 1, 0xb2, 0, 255, 0]))[4], 0);
        assert_eq!(describe_reply(&b.data_in(i, &sense(0, 0x1c, 2))), "05/24/00");
        assert_eq!(data(&b.data_in(i, &sense(0, 0x01, 0)))[4 + 7], 0);
    }
}
