//! Encoding of SPC-4 6.15 PERSISTENT RESERVE IN and 6.16 PERSISTENT RESERVE OUT. Their effect is
//! tested in the crate `reservation`.

use reservation::{Initiator, ItNexus};
use scsi::{NexusId, PortGroup, TransferLengths};

use crate::harness::{Harness, blocks, cdb, data, describe_reply, it_nexus, pointer};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;
const REGISTER_AND_MOVE: u8 = 7;

const KEYS: u8 = 0;
const RESERVATION: u8 = 1;
const CAPABILITIES: u8 = 2;
const FULL_STATUS: u8 = 3;

const READY: [u8; 6] = [0; 6];

fn reserve_in(action: u8) -> [u8; 10] {
    [0x5e, action, 0, 0, 0, 0, 0, 0x10, 0, 0]
}

fn reserve_out(action: u8, kind: u8, length: usize) -> [u8; 10] {
    let [a, b, c, d] = (length as u32).to_be_bytes();
    [0x5f, action, kind, 0, 0, a, b, c, d, 0]
}

fn list(key: u64, action_key: u64, flags: u8) -> Vec<u8> {
    let mut list = [key.to_be_bytes(), action_key.to_be_bytes()].concat();
    list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
    list
}

/// `NAME,i,0xISID` as SPC-4 7.6.4.6 has it.
fn transport_id(n: u32) -> Vec<u8> {
    let mut text = format!("iqn.2025-01.example:host,i,0x{n:012x}").into_bytes();
    text.push(0);
    text.resize(text.len().next_multiple_of(4), 0);
    [&[0x45, 0][..], &(text.len() as u16).to_be_bytes(), &text].concat()
}

impl Harness {
    fn out(&mut self, id: NexusId, action: u8, kind: u8, list: &[u8]) -> String {
        let r = self.data_out(id, &reserve_out(action, kind, list.len()), list);
        describe_reply(&r)
    }

    fn reads(&mut self, id: NexusId, action: u8) -> Vec<u8> {
        let r = self.data_in(id, &reserve_in(action));
        assert_eq!(describe_reply(&r), "Good");
        data(&r)
    }
}

/// SPC-4 6.15.2, 6.15.3, 6.16.2: a life in short.
#[test]
fn register_reserve_read_release_clear() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    assert_eq!(b.reads(i, KEYS), [0; 8]);
    assert_eq!(b.out(i, REGISTER, 0, &list(0, 0xabc, 0)), "Good");
    assert_eq!(b.out(other, REGISTER_AND_IGNORE, 0, &list(99, 0xdef, 0)), "Good");
    let keys = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &0xabcu64.to_be_bytes(), &0xdefu64.to_be_bytes()];
    assert_eq!(b.reads(i, KEYS), keys.concat());
    assert_eq!(b.reads(i, RESERVATION), [0, 0, 0, 2, 0, 0, 0, 0]);
    assert_eq!(b.out(i, RESERVE, 5, &list(0xabc, 0, 0)), "Good");
    let held = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &0xabcu64.to_be_bytes(), &[0, 0, 0, 0, 0, 5, 0, 0]];
    assert_eq!(b.reads(other, RESERVATION), held.concat());
    assert_eq!(b.out(other, RESERVE, 5, &list(0xdef, 0, 0)), "ReservationConflict");
    assert_eq!(b.out(i, RELEASE, 1, &list(0xabc, 0, 0)), "05/26/04");
    assert_eq!(b.out(i, RELEASE, 5, &list(0xabc, 0, 0)), "Good");
    assert_eq!(describe_reply(&b.data_in(other, &READY)), "06/2a/04");
    assert_eq!(b.out(other, CLEAR, 0, &list(0xdef, 0, 0)), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "06/2a/03");
    assert_eq!(b.reads(i, KEYS), [0, 0, 0, 3, 0, 0, 0, 0]);
}

/// SPC-4 5.12.1, SBC-3 4.17: what registered and other nexuses may do, for each type.
#[test]
fn access_by_type() {
    let read = cdb(0x28, 0, 0, 1);
    let write = cdb(0x2a, 0, 0, 1);
    for (kind, registered, stranger) in [
        (1, [true, false], [true, false]),
        (3, [false, false], [false, false]),
        (5, [true, true], [true, false]),
        (6, [true, true], [false, false]),
        (7, [true, true], [true, false]),
        (8, [true, true], [false, false]),
    ] {
        let (mut b, holder) = Harness::new();
        let (member, outside) = (b.join(2), b.join(3));
        assert_eq!(b.out(holder, REGISTER, 0, &list(0, 1, 0)), "Good");
        assert_eq!(b.out(member, REGISTER, 0, &list(0, 2, 0)), "Good");
        assert_eq!(b.out(holder, RESERVE, kind, &list(1, 0, 0)), "Good");
        for (id, [reads, writes]) in
            [(holder, [true, true]), (member, registered), (outside, stranger)]
        {
            let said = |may| if may { "Good" } else { "ReservationConflict" };
            assert_eq!(describe_reply(&b.data_in(id, &read)), said(reads), "type {kind}");
            assert_eq!(
                describe_reply(&b.data_out(id, &write, &blocks(1, 1))),
                said(writes),
                "type {kind}"
            );
            assert_eq!(describe_reply(&b.data_in(id, &[0x1a, 0, 0x3f, 0, 255, 0])), said(reads));
            assert_eq!(describe_reply(&b.data_in(id, &cdb(0x35, 0, 0, 0))), said(writes));
            for free in [&READY[..], &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[0x1b, 0, 0, 0, 1, 0]] {
                assert_eq!(describe_reply(&b.data_in(id, free)), "Good", "type {kind}");
            }
            b.reads(id, KEYS);
        }
    }
}

/// SPC-4 6.15.4.
#[test]
fn report_capabilities() {
    let (mut b, i) = Harness::new();
    assert_eq!(b.reads(i, CAPABILITIES), [0, 8, 0x1d, 0x80, 0xea, 0x01, 0, 0]);
}

/// SPC-4 6.15.5: each registrant, its port, and whether it holds the reservation.
#[test]
fn read_full_status() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    b.out(i, REGISTER, 0, &list(0, 0xa, 0));
    b.out(other, REGISTER, 0, &list(0, 0xb, 0));
    b.out(other, RESERVE, 1, &list(0xb, 0, 0));
    let d = b.reads(i, FULL_STATUS);
    let id = transport_id(1);
    let one = 24 + id.len();
    assert_eq!(d[4..8], (2 * one as u32).to_be_bytes());
    let (first, second) = d[8..].split_at(one);
    assert_eq!(first[..8], 0xau64.to_be_bytes());
    assert_eq!((first[12], first[13], &first[18..20]), (0, 0, &[0, 1][..]));
    assert_eq!(first[20..24], (id.len() as u32).to_be_bytes());
    assert_eq!(first[24..], id);
    assert_eq!((second[7], second[12], second[13]), (0xb, 0x01, 0x01), "it holds");
    assert_eq!(second[24..], transport_id(2));
}

/// SPC-4 4.2.5.6: data is truncated, but the length field is not.
#[test]
fn allocation_length() {
    let (mut b, i) = Harness::new();
    b.out(i, REGISTER, 0, &list(0, 0xa, 0));
    for (length, got) in [(0, 0), (4, 4), (12, 12), (100, 16)] {
        let r = b.data_in(i, &[0x5e, KEYS, 0, 0, 0, 0, 0, 0, length, 0]);
        assert_eq!((data(&r).len(), r.full_transfer.data_in), (got, got as u64));
    }
    let small = TransferLengths::to_initiator(5);
    assert_eq!(data(&b.run(i, &reserve_in(KEYS), small, &[])), [0, 0, 0, 1, 0]);
}

/// SPC-4 6.16.3: SPEC_I_PT registers other initiators along with the requesting one, all or none.
#[test]
fn register_for_others() {
    let (mut b, i) = Harness::new();
    let ids = [transport_id(7), transport_id(8)].concat();
    let mut out = list(0, 0xa, 0x08);
    out.extend((ids.len() as u32).to_be_bytes());
    out.extend(&ids);
    assert_eq!(b.out(i, REGISTER_AND_IGNORE, 0, &out), "05/26/00", "only REGISTER");
    let mut wrong = out.clone();
    wrong[28 + ids.len() / 2] = 0x05;
    let r = b.data_out(i, &reserve_out(REGISTER, 0, wrong.len()), &wrong);
    let at = 28 + ids.len() as u16 / 2;
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/26/00", Some((false, at, None))));
    assert!(b.table.registrants().is_empty(), "all or nothing");
    assert_eq!(b.out(i, REGISTER, 0, &out), "Good");
    let registered: Vec<_> = b.table.registrants().iter().map(|r| r.nexus.clone()).collect();
    assert_eq!(registered, [it_nexus(1), it_nexus(7), it_nexus(8)]);
    assert_eq!(b.out(i, REGISTER, 0, &out[..out.len() - 1]), "05/1a/00");
}

/// SPC-4 6.16.3: ALL_TG_PT registers through the ports of all nodes.
#[test]
fn register_through_all_ports() {
    let (mut b, i) = Harness::new();
    let (name, access) = (String::new(), block::Access::Optimized);
    let group = |n| PortGroup { id: n, port: n, name: name.clone(), access };
    b.unit.set_port_groups(group(1), &[group(2), group(5)]);
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "06/3f/03");
    assert_eq!(b.out(i, REGISTER, 0, &list(0, 0xa, 0x04)), "Good");
    let ports: Vec<_> = b.table.registrants().iter().map(|r| r.nexus.port).collect();
    assert_eq!(ports, [1, 2, 5]);
    assert_eq!(b.reads(i, FULL_STATUS)[8 + 12], 0x02, "ALL_TG_PT");
}

/// SPC-4 6.16.4, 5.12.8.
#[test]
fn register_and_move() {
    let (mut b, i) = Harness::new();
    let moving = |new_key: u64, unregister: bool, port: u16, n: u32| {
        let mut out = [0xau64.to_be_bytes(), new_key.to_be_bytes()].concat();
        out.extend([0, if unregister { 2 } else { 0 }]);
        out.extend(port.to_be_bytes());
        let id = transport_id(n);
        out.extend((id.len() as u32).to_be_bytes());
        out.extend(id);
        out
    };
    b.out(i, REGISTER, 0, &list(0, 0xa, 0));
    assert_eq!(b.out(i, REGISTER_AND_MOVE, 0, &moving(7, false, 1, 2)), "05/24/00");
    b.out(i, RESERVE, 1, &list(0xa, 0, 0));
    assert_eq!(b.out(i, REGISTER_AND_MOVE, 0, &moving(7, false, 9, 2)), "05/26/00", "no such port");
    assert_eq!(b.out(i, REGISTER_AND_MOVE, 0, &moving(7, true, 1, 2)), "Good");
    let [only] = b.table.registrants() else { panic!("{:?}", b.table) };
    assert_eq!((&only.nexus, only.key), (&it_nexus(2), 7));
    assert!(b.table.is_holder(&it_nexus(2)));
}

/// SPC-4 5.12.11.2.4, 5.12.11.2.6.
#[test]
fn preempt_is_reported() {
    for (action, told) in
        [(PREEMPT, vec!["06/2a/05"]), (PREEMPT_AND_ABORT, vec!["06/2f/00", "06/2a/05"])]
    {
        let (mut b, i) = Harness::new();
        let (loser, third) = (b.join(2), b.join(3));
        for (id, key) in [(i, 1), (loser, 2), (third, 3)] {
            b.out(id, REGISTER, 0, &list(0, key, 0));
        }
        b.out(loser, RESERVE, 5, &list(2, 0, 0));
        assert_eq!(b.out(i, action, 5, &list(1, 2, 0)), "Good");
        for told in told {
            assert_eq!(describe_reply(&b.data_in(loser, &READY)), told);
        }
        assert_eq!(describe_reply(&b.data_in(loser, &READY)), "Good");
        assert_eq!(
            describe_reply(&b.data_out(loser, &cdb(0x2a, 0, 0, 1), &blocks(1, 0))),
            "ReservationConflict"
        );
        assert_eq!(describe_reply(&b.data_in(third, &READY)), "Good", "the type is the same");
        assert_eq!(b.table.registrants().len(), 2);
    }
}

/// SPC-4 6.16.1, 6.16.2: scope, type, service action, length.
#[test]
fn wrong_commands() {
    let (mut b, i) = Harness::new();
    b.out(i, REGISTER, 0, &list(0, 1, 0));
    let out = list(1, 0, 0);
    for (action, kind, expect) in [
        (RESERVE, 0x15, (true, 2, Some(7))),
        (RESERVE, 0x02, (true, 2, Some(3))),
        (RELEASE, 0x0f, (true, 2, Some(3))),
        (PREEMPT, 0x10, (true, 2, Some(7))),
        (0x08, 0, (true, 1, Some(4))),
        (0x1f, 0, (true, 1, Some(4))),
    ] {
        let r = b.data_out(i, &reserve_out(action, kind, 24), &out);
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r)),
            ("05/24/00", Some(expect)),
            "{action}"
        );
    }
    for length in [0, 8, 23] {
        let r = b.data_out(i, &reserve_out(REGISTER, 0, length), &out[..length]);
        assert_eq!(describe_reply(&r), "05/1a/00", "{length}");
    }
    let long = [&out[..], &[0; 4]].concat();
    assert_eq!(b.out(i, RESERVE, 1, &long), "05/1a/00", "without SPEC_I_PT");
    assert_eq!(describe_reply(&b.data_in(i, &reserve_in(4))), "05/24/00");
}

/// SPC-2 5.5.1: RESERVE also excludes persistent reservations.
#[test]
fn reserve_and_persistent_reservations() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    let reserve = [0x16, 0, 0, 0, 0, 0];
    assert_eq!(describe_reply(&b.data_in(i, &reserve)), "Good");
    assert_eq!(describe_reply(&b.data_in(other, &reserve_in(KEYS))), "ReservationConflict");
    assert_eq!(b.out(other, REGISTER, 0, &list(0, 1, 0)), "ReservationConflict");
    assert_eq!(describe_reply(&b.data_in(i, &[0x17, 0, 0, 0, 0, 0])), "Good");
    assert_eq!(b.out(other, REGISTER, 0, &list(0, 1, 0)), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &reserve)), "ReservationConflict");
}

/// A host registered over NVMe is also reported in SCSI.
#[test]
fn hosts_of_nvme_are_shown() {
    let (mut b, i) = Harness::new();
    let host = ItNexus { initiator: Initiator::Host([0xab; 16]), port: 0 };
    let change = reservation::Change::Register {
        key: 0,
        new_key: 5,
        ignore_key: false,
        persist: false,
        ports: vec![],
        other_initiators: vec![],
    };
    b.table = b.table.with_change(&host, 1, &change).unwrap().unwrap();
    let d = b.reads(i, FULL_STATUS);
    assert_eq!((d[15], d[32]), (5, 0x05));
    assert!(d[36..].starts_with(b"nqn.2014-08.org.nvmexpress:uuid:abab"));
}
