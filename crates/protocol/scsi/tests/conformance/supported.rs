//! SPC-4 6.35 REPORT SUPPORTED OPERATION CODES, 6.36 TASK MANAGEMENT FUNCTIONS.

use crate::harness::{Harness, config, data, describe_reply, info, pointer};

fn codes(options: u8, opcode: u8, service_action: u16) -> [u8; 12] {
    let [high, low] = service_action.to_be_bytes();
    [0xa3, 0x0c, options, opcode, high, low, 0, 0, 0xff, 0xff, 0, 0]
}

/// Operation code, service action if there is one, length.
fn listed(d: &[u8]) -> Vec<(u8, Option<u16>, u8)> {
    assert_eq!(d[..4], (d.len() as u32 - 4).to_be_bytes());
    d[4..]
        .chunks(8)
        .map(|c| {
            let service_action = u16::from_be_bytes([c[2], c[3]]);
            assert!(c[5] & 1 == 1 || service_action == 0, "SERVACTV");
            (c[0], (c[5] & 1 == 1).then_some(service_action), c[7])
        })
        .collect()
}

/// SPC-4 6.35: each listed command can be queried in one way and not in the other.
#[test]
fn every_command_is_reported_alone_as_in_the_list() {
    let (mut b, i) = Harness::new();
    let list = listed(&data(&b.data_in(i, &codes(0, 0, 0))));
    assert_eq!(list.len(), 71);
    assert!(list.contains(&(0x9e, Some(0x10), 16)) && list.contains(&(0x28, None, 10)));
    for (opcode, service_action, len) in list {
        let (right, wrong) = if service_action.is_some() { (2, 1) } else { (1, 2) };
        let action = service_action.unwrap_or(0);
        let d = data(&b.data_in(i, &codes(right, opcode, action)));
        assert_eq!(d[..4], [0, 3, 0, len], "{opcode:x}");
        assert_eq!(d.len(), 4 + usize::from(len));
        assert_eq!(d[4], opcode);
        assert_eq!(data(&b.data_in(i, &codes(3, opcode, action))), d);
        let r = b.data_in(i, &codes(wrong, opcode, action));
        let field = if wrong == 1 { 3 } else { 4 };
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some((true, field, None)))
        );
    }
}

/// SPC-4 6.35: CDB USAGE DATA.
#[test]
fn usage_data() {
    let (mut b, i) = Harness::new();
    let usage = |b: &mut Harness, opcode| data(&b.data_in(i, &codes(1, opcode, 0)))[4..].to_vec();
    assert_eq!(usage(&mut b, 0x28), [0x28, 0x1a, 255, 255, 255, 255, 0x1f, 255, 255, 0]);
    assert_eq!(usage(&mut b, 0x2f)[1], 0x16);
    assert_eq!(usage(&mut b, 0x93)[1], 0x09);
    assert_eq!(usage(&mut b, 0x89)[10..], [0, 0, 0, 255, 0x1f, 0]);
    let d = data(&b.data_in(i, &codes(2, 0xa3, 0x0c)));
    assert_eq!(d[4..], [0xa3, 0x0c, 0x87, 255, 255, 255, 255, 255, 255, 255, 0, 0]);
}

/// SPC-4 6.35: RCTD asks for timeouts.
#[test]
fn timeouts_descriptors() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &codes(0x80, 0, 0)));
    for c in d[4..].chunks(20) {
        assert_eq!((c[5] & 2, &c[8..10]), (2, &[0, 10][..]));
    }
    let d = data(&b.data_in(i, &codes(0x81, 0x28, 0)));
    assert_eq!((d[1], d.len(), &d[14..16]), (0x83, 26, &[0, 10][..]));
}

/// SPC-4 6.35: unsupported commands, and reserved options.
#[test]
fn unsupported_commands_and_options() {
    let (mut b, i) = Harness::new();
    for cdb in [
        codes(1, 0x48, 0),
        codes(2, 0x9e, 0x11),
        codes(2, 0x5f, 8),
        codes(2, 0x9e, 0x110),
        codes(3, 0x28, 1),
        codes(3, 0x9e, 0),
    ] {
        assert_eq!(data(&b.data_in(i, &cdb)), [0, 1, 0, 0], "{cdb:x?}");
    }
    let r = b.data_in(i, &codes(4, 0, 0));
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 2, Some(2)))));
}

/// SPC-4 6.35, SBC-3 4.7: a unit that cannot unmap does not report that it can.
#[test]
fn what_depends_on_the_device() {
    let mut n = info();
    n.unmap_granularity_blocks = 0;
    let (mut b, i) = Harness::with(config(), n);
    assert!(listed(&data(&b.data_in(i, &codes(0, 0, 0)))).iter().all(|c| c.0 != 0x42));
    assert_eq!(data(&b.data_in(i, &codes(1, 0x42, 0))), [0, 1, 0, 0]);
    assert_eq!(data(&b.data_in(i, &codes(1, 0x41, 0)))[5], 0);
}

/// SPC-4 6.36.
#[test]
fn task_management_functions() {
    let (mut b, i) = Harness::new();
    let cdb = |flags, n| [0xa3, 0x0d, flags, 0, 0, 0, 0, 0, 0, n, 0, 0];
    assert_eq!(data(&b.data_in(i, &cdb(0, 16))), [0xda, 0, 0, 0]);
    let d = data(&b.data_in(i, &cdb(0x80, 16)));
    assert_eq!((d.len(), d[3]), (16, 12));
    assert_eq!(data(&b.data_in(i, &cdb(0x80, 2))), [0xda, 0]);
}
