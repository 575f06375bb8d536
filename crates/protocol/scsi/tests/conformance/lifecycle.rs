//! SAM-5 5.14 unit attentions, 6.3 events; SPC-2 5.5 reservations; SBC-3 5.25 START STOP UNIT;
//! SPC-4 6.39 REQUEST SENSE, 6.47 TEST UNIT READY.

use block::{Error, RequestError};
use reservation::Change;
use scsi::{AttentionScope, TransferLengths, UnitAttention};

use crate::harness::{BLOCKS, Harness, blocks, cdb, data, describe_reply, info, nexus, pointer};

const READY: [u8; 6] = [0; 6];
const REQUEST_SENSE: [u8; 6] = [0x03, 0, 0, 0, 252, 0];
const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
const RELEASE: [u8; 6] = [0x17, 0, 0, 0, 0, 0];

fn start_stop(flags: u8) -> [u8; 6] {
    [0x1b, 0, 0, 0, flags, 0]
}

/// SAM-5 5.14: INQUIRY, REPORT LUNS and REQUEST SENSE go before an attention; everything else is
/// ended by it, known or not, and once.
#[test]
fn power_on_is_reported_once() {
    let (mut b, _) = Harness::new();
    let i = b.unit.add_nexus(nexus(2)).unwrap();
    assert_eq!(describe_reply(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0])), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &[0xff; 16])), "06/29/00");
    assert_eq!(describe_reply(&b.data_in(i, &[0xff; 16])), "05/20/00");
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good");
}

/// SPC-4 6.39: REQUEST SENSE returns an attention as data, in the requested format.
#[test]
fn request_sense() {
    let (mut b, _) = Harness::new();
    let i = b.unit.add_nexus(nexus(2)).unwrap();
    let r = b.data_in(i, &REQUEST_SENSE);
    let d = data(&r);
    assert_eq!((describe_reply(&r).as_str(), d.len(), d[2], d[12]), ("Good", 18, 6, 0x29));
    let d = data(&b.data_in(i, &REQUEST_SENSE));
    assert_eq!((d[0], d[2], d[12]), (0x70, 0, 0), "nothing more");
    assert_eq!(data(&b.data_in(i, &[0x03, 1, 0, 0, 252, 0])), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(data(&b.data_in(i, &[0x03, 0, 0, 0, 4, 0])).len(), 4);
}

/// SPC-4 annex F, CAPACITY DATA HAS CHANGED: growth is reported to all initiators, and takes
/// effect.
#[test]
fn capacity_data_has_changed() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    b.unit.set_info(info());
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good", "the same size is no news");
    let mut grown = info();
    grown.blocks = BLOCKS + 1;
    b.unit.set_info(grown);
    for id in [i, other] {
        assert_eq!(describe_reply(&b.data_in(id, &READY)), "06/2a/09");
        assert_eq!(describe_reply(&b.data_in(id, &cdb(0x2f, 0, BLOCKS + 1, 0))), "Good");
    }
    assert_eq!(data(&b.data_in(i, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]))[..4], [0, 0, 0x03, 0xe8]);
}

/// SPC-4 6.33: an initiator that lists the units needs no attention about changes.
#[test]
fn reported_luns_data_has_changed() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    b.unit.establish_attention(AttentionScope::All, UnitAttention::LunsChanged);
    b.data_in(i, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good");
    assert_eq!(describe_reply(&b.data_in(other, &READY)), "06/3f/0e");
}

/// SAM-5 6.3.3: a reset ends reservations, changed modes and a stop, and is reported.
#[test]
fn reset() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    let control = [0, 0, 0, 0, 0x0a, 10, 0x06, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
    assert_eq!(describe_reply(&b.data_out(i, &[0x15, 0x10, 0, 0, 16, 0], &control)), "Good");
    b.data_in(i, &RESERVE);
    b.data_in(i, &start_stop(0));
    b.change_shared(i, &Change::Reset { whole_target: false }).unwrap();
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "06/29/03");
    assert_eq!(
        describe_reply(&b.data_in(other, &READY)),
        "06/29/03",
        "not 2A/01, which it had waiting"
    );
    assert_eq!(describe_reply(&b.data_in(other, &READY)), "Good");
    assert_eq!(b.data_in(other, &[0xff]).sense[0], 0x70);
    b.change_shared(i, &Change::Reset { whole_target: true }).unwrap();
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "06/29/02");
}

/// SPC-2 5.5, 7.21, 7.17: the holder has exclusive access to the unit.
#[test]
fn reserve_and_release() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    for (reserve, release) in [
        (&RESERVE[..], &RELEASE[..]),
        (&[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        assert_eq!(describe_reply(&b.data_in(i, reserve)), "Good");
        assert_eq!(describe_reply(&b.data_in(i, reserve)), "Good", "again");
        let read = cdb(0x28, 0, 0, 1);
        for cdb in [reserve, &READY, &[0x1a, 0, 0x3f, 0, 255, 0], &start_stop(0), &read] {
            assert_eq!(describe_reply(&b.data_in(other, cdb)), "ReservationConflict", "{cdb:x?}");
        }
        assert_eq!(
            describe_reply(&b.data_out(other, &cdb(0x2a, 0, 0, 1), &blocks(1, 0))),
            "ReservationConflict"
        );
        for cdb in [release, &[0x12, 0, 0, 0, 96, 0], &REQUEST_SENSE] {
            assert_eq!(describe_reply(&b.data_in(other, cdb)), "Good", "{cdb:x?}");
        }
        assert_eq!(describe_reply(&b.data_in(other, reserve)), "ReservationConflict", "still");
        assert_eq!(describe_reply(&b.data_in(i, &read)), "Good");
        assert_eq!(describe_reply(&b.data_in(i, release)), "Good");
        assert_eq!(describe_reply(&b.data_in(other, reserve)), "Good");
        assert_eq!(describe_reply(&b.data_in(other, release)), "Good");
    }
    let r = b.data_in(i, &[0x16, 0x10, 0, 0, 0, 0]);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 1, Some(4)))));
}

/// SAM-5 6.3.4: with its nexus goes its reservation.
#[test]
fn nexus_loss_releases() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    b.data_in(i, &RESERVE);
    b.leave(other);
    let third = b.join_with_attention(3);
    assert_eq!(describe_reply(&b.data_in(third, &READY)), "ReservationConflict");
    b.leave(i);
    assert_eq!(
        describe_reply(&b.data_in(third, &READY)),
        "06/29/00",
        "kept for after the conflict"
    );
    assert_eq!(describe_reply(&b.data_in(third, &READY)), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "TaskAborted", "too late");
    assert_eq!(b.unit.nexus_count(), 1);
}

/// SBC-3 5.25.
#[test]
fn start_stop_unit() {
    let (mut b, i) = Harness::new();
    assert_eq!(describe_reply(&b.data_in(i, &start_stop(0))), "Good");
    assert_eq!(b.take_requests(), ["flush"], "what was written is safe before the stop");
    for cdb in [&READY[..], &cdb(0x28, 0, 0, 1), &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        assert_eq!(describe_reply(&b.data_in(i, cdb)), "02/04/02");
    }
    assert_eq!(describe_reply(&b.data_in(i, &[0x12, 0, 0, 0, 96, 0])), "Good");
    let d = data(&b.data_in(i, &REQUEST_SENSE));
    assert_eq!((d[2], d[12], d[13]), (2, 4, 2));
    assert_eq!(describe_reply(&b.data_in(i, &start_stop(1))), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good");
    assert_eq!(describe_reply(&b.data_in(i, &start_stop(4))), "Good");
    assert_eq!(
        (describe_reply(&b.data_in(i, &READY)).as_str(), b.take_requests().len()),
        ("02/04/02", 0),
        "NO_FLUSH"
    );
}

/// SBC-3 5.25: a flush that fails leaves the unit running and says so.
#[test]
fn a_stop_that_cannot_flush() {
    let (mut b, i) = Harness::new();
    b.fail = Some(RequestError::Device(Error::Gone));
    assert_eq!(describe_reply(&b.data_in(i, &start_stop(0))), "04/3e/01");
    assert_eq!(describe_reply(&b.data_in(i, &READY)), "Good");
}

/// SBC-3 5.25: nothing to eject, no power conditions.
#[test]
fn start_stop_unit_of_what_it_has_not() {
    let (mut b, i) = Harness::new();
    for (flags, bit) in [(0x02, 1), (0x03, 1), (0x10, 4), (0xa0, 7)] {
        let r = b.data_in(i, &start_stop(flags));
        let expect = ("05/24/00", Some((true, 4, Some(bit))));
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), expect);
    }
    assert_eq!(describe_reply(&b.data_in(i, &[0x1b, 1, 0, 0, 1, 0])), "Good", "IMMED");
}

/// SBC-3 5.10.
#[test]
fn prevent_allow_medium_removal() {
    let (mut b, i) = Harness::new();
    for prevent in [1, 0] {
        assert_eq!(describe_reply(&b.data_in(i, &[0x1e, 0, 0, 0, prevent, 0])), "Good");
    }
    assert_eq!(describe_reply(&b.data_in(i, &[0x1e, 0, 0, 0, 2, 0])), "05/24/00");
}

/// SPC-4 4.2.5.1: unknown operation codes, short blocks.
#[test]
fn unknown_and_short_commands() {
    let (mut b, i) = Harness::new();
    for opcode in [0x02, 0x48, 0x4c, 0x7f, 0xc0, 0xff] {
        assert_eq!(describe_reply(&b.data_in(i, &[opcode; 16])), "05/20/00", "{opcode:x}");
    }
    for short in [&[][..], &[0x28, 0], &[0x88; 15]] {
        assert_eq!(
            describe_reply(&b.run(i, short, TransferLengths::NONE, &[])),
            "05/24/00",
            "{short:x?}"
        );
    }
}
