//! SPC-4 5.15.2 asymmetric logical unit access, 6.37 REPORT TARGET PORT GROUPS: a unit that three
//! nodes serve, seen through the second of them.

use block::{Access, Error};
use scsi::{NexusId, PortGroup};

use crate::harness::{Harness, blocks, cdb, config, data, describe_reply, info, nexus, pointer};

const READY: [u8; 6] = [0; 6];

fn group(n: u16, access: Access) -> PortGroup {
    PortGroup { id: n, port: n, name: format!("iqn.2025-01.example:disk,t,0x{n:04x}"), access }
}

fn others() -> [PortGroup; 2] {
    [group(3, Access::Unavailable), group(1, Access::Optimized)]
}

/// A unit in this state, and an initiator that has been told everything.
fn bench(access: Access) -> (Harness, NexusId) {
    let (mut b, _) = Harness::with(config(), info());
    b.unit.set_port_groups(group(2, access), &others());
    let mut through = nexus(9);
    through.target_port.relative_id = 2;
    let i = b.unit.add_nexus(through).expect("there is room");
    assert_eq!(describe_reply(&b.data_in(i, &[0x03, 0, 0, 0, 252, 0])), "Good");
    (b, i)
}

fn report(format: u8, allocation: u8) -> [u8; 12] {
    [0xa3, format | 0x0a, 0, 0, 0, 0, 0, 0, 0, allocation, 0, 0]
}

/// SPC-4 6.6 and 6.35: a unit of one node has no target port groups.
#[test]
fn a_unit_of_one_node_has_none() {
    let (mut b, i) = Harness::new();
    let r = b.data_in(i, &report(0, 255));
    let no_such_service_action = Some((true, 1, Some(4)));
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", no_such_service_action));
    assert_eq!(data(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0]))[5] & 0x30, 0, "TPGS");
    b.unit.set_access(Access::Unavailable);
    assert_eq!((describe_reply(&b.data_in(i, &READY)).as_str(), b.unit.access()), ("Good", None));
    b.fail = Some(Error::Fenced.into());
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "02/04/01");
}

/// SPC-4 6.37: both headers; each node is a group with one port.
#[test]
fn report_target_port_groups() {
    let (mut b, i) = bench(Access::Transitioning);
    let groups = [
        [0x00, 0x89, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1],
        [0x0f, 0x89, 0, 2, 0, 2, 0, 1, 0, 0, 0, 2],
        [0x03, 0x89, 0, 3, 0, 2, 0, 1, 0, 0, 0, 3],
    ]
    .concat();
    let plain = data(&b.data_in(i, &report(0x00, 255)));
    assert_eq!((&plain[..4], &plain[4..]), (&[0, 0, 0, 36][..], &groups[..]));
    let extended = data(&b.data_in(i, &report(0x20, 255)));
    assert_eq!(extended[..8], [0, 0, 0, 40, 0x10, 60, 0, 0]);
    assert_eq!(extended[8..], groups);
    assert_eq!(data(&b.data_in(i, &report(0x00, 10))), plain[..10], "allocation length");
    let r = b.data_in(i, &report(0x40, 255));
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(7)))));
}

/// SPC-4 6.6: implicit changes only. 7.8: the designators name the port and its group, and the
/// unit is the same through every node.
#[test]
fn inquiry_tells_the_port_and_its_group() {
    let (mut b, i) = bench(Access::Optimized);
    assert_eq!(data(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0]))[5] & 0x30, 0x10, "TPGS");
    let identification = [0x12, 1, 0x83, 0, 255, 0];
    let page = data(&b.data_in(i, &identification));
    let has = |d: &[u8]| page.windows(d.len()).any(|w| w == d);
    assert!(has(&[0x51, 0x94, 0, 4, 0, 0, 0, 2]), "relative target port");
    assert!(has(&[0x51, 0x95, 0, 4, 0, 0, 0, 2]), "target port group");
    let ports = data(&b.data_in(i, &[0x12, 1, 0x88, 0, 255, 0]));
    let ids: Vec<_> = ports[4..].chunks(52).map(|port| (port[3], port[16 + 32])).collect();
    assert_eq!(ids, [(1, b'1'), (2, b'2'), (3, b'3')], "SCSI ports: relative identifiers, names");
    assert_eq!(data(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0]))[6], 0x10, "MULTIP");
    let (mut alone, j) = Harness::new();
    let of_unit = |page: &[u8]| {
        page[4..page.windows(2).position(|w| w == [0x51, 0x94]).expect("it is there")].to_vec()
    };
    assert_eq!(of_unit(&page), of_unit(&data(&alone.data_in(j, &identification))));
}

/// SPC-4 5.15.2.4.5: unavailable: commands that query the unit are answered, no others.
#[test]
fn unavailable() {
    let (mut b, i) = bench(Access::Unavailable);
    for cdb in [
        &[0x12, 0, 0, 0, 96, 0][..],
        &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        &report(0x20, 255),
        &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x1a, 0, 0x3f, 0, 255, 0],
    ] {
        assert_eq!(describe_reply(&b.data_in(i, cdb)), "Good", "{cdb:x?}");
    }
    let sense = data(&b.data_in(i, &[0x03, 0, 0, 0, 252, 0]));
    assert_eq!((sense[2], sense[12], sense[13]), (0x02, 0x04, 0x0c), "REQUEST SENSE");
    for cdb in [&READY[..], &cdb(0x28, 0, 0, 1), &cdb(0x35, 0, 0, 0), &[0x16, 0, 0, 0, 0, 0]] {
        assert_eq!(describe_reply(&b.data_in(i, cdb)), "02/04/0c", "{cdb:x?}");
    }
    assert_eq!(describe_reply(&b.data_out(i, &cdb(0x2a, 0, 0, 1), &blocks(1, 1))), "02/04/0c");
    assert_eq!(
        describe_reply(&b.data_in(i, &[0xff; 6])),
        "05/20/00",
        "what is no command stays none"
    );
    assert_eq!(b.take_requests(), Vec::<String>::new(), "nothing reaches the volume");
}

/// SPC-4 5.15.2.4.7: in a transition commands go to the volume, which holds them; if it fails them,
/// the answer depends on the state at that time.
#[test]
fn transitioning() {
    let (mut b, i) = bench(Access::Transitioning);
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "Good");
    b.fail = Some(Error::Fenced.into());
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "02/04/0a");
    b.fail = Some(Error::Gone.into());
    assert_eq!(describe_reply(&b.data_in(i, &cdb(0x28, 0, 0, 1))), "02/04/0c");
}

/// SPC-4 5.15.2.3: every initiator gets one attention for a change of any node.
#[test]
fn changes_are_reported() {
    let (mut b, i) = bench(Access::Optimized);
    let other = b.join(10);
    let expect_once = |b: &mut Harness, expect: &str| {
        for id in [i, other] {
            assert_eq!(describe_reply(&b.data_in(id, &report(0, 255))), expect);
            assert_eq!(describe_reply(&b.data_in(id, &report(0, 255))), "Good");
        }
    };
    b.unit.set_access(Access::Optimized);
    b.unit.set_port_groups(group(2, Access::Optimized), &others());
    expect_once(&mut b, "Good");
    b.unit.set_access(Access::Transitioning);
    b.unit.set_access(Access::Unavailable);
    expect_once(&mut b, "06/2a/06");
    b.unit.set_access(Access::Optimized);
    expect_once(&mut b, "06/2a/06");
    let others = [group(1, Access::Optimized), group(3, Access::Optimized)];
    b.unit.set_port_groups(group(2, Access::Optimized), &others);
    expect_once(&mut b, "06/2a/06");
    assert_eq!(data(&b.data_in(i, &report(0, 255)))[28], 0x00, "the third is in sync again");
    b.unit.clear_port_groups();
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "06/3f/03");
    assert_eq!(data(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0]))[5] & 0x30, 0, "TPGS");
}
