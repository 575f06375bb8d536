//! SPC-4 5.17, 6.3 to 6.5 EXTENDED COPY and COPY OPERATION ABORT, 6.22 to 6.25 RECEIVE COPY
//! RESULTS, 7.8 third-party copy page; RFD 0014.

use block::{Error, RequestError};
use proptest::collection::vec;
use proptest::prelude::*;
use scsi::{
    Admission, CopyFault, CopyIoError, CopyOutcome, NexusId, Reply, Side, Step, TransferLengths,
};

use crate::copy_oracle;
use crate::harness::{BLOCK, BLOCKS, Harness, blocks, data, describe_reply, pointer};

/// The unit's NAA designator, out of page 83h.
fn naa(b: &mut Harness, i: NexusId) -> [u8; 16] {
    let page = data(&b.data_in(i, &[0x12, 1, 0x83, 0, 255, 0]));
    page[8..24].try_into().expect("the first designator")
}

/// Identification descriptor of an end with this NAA designator and blocks of 512 bytes.
fn end(naa: &[u8]) -> Vec<u8> {
    let mut end = vec![0xe4, 0, 0, 0, 1, 3, 0, naa.len() as u8];
    end.extend(naa);
    end.resize(28, 0);
    end.extend([0, 0, 2, 0]);
    end
}

/// Segment between two ends: count, from, to.
fn segment(ends: (u16, u16), count: u16, from: u64, to: u64) -> Vec<u8> {
    let mut out = vec![2, 0, 0, 24];
    out.extend(ends.0.to_be_bytes());
    out.extend(ends.1.to_be_bytes());
    out.extend([0, 0]);
    out.extend(count.to_be_bytes());
    out.extend(from.to_be_bytes());
    out.extend(to.to_be_bytes());
    out
}

/// A list of the short format, with list identifier 7.
fn short(usage: u8, ends: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let (ends, segments) = (ends.concat(), segments.concat());
    let mut list = vec![if usage == 3 { 0 } else { 7 }, usage << 3];
    list.extend((ends.len() as u16).to_be_bytes());
    list.extend([0; 4]);
    list.extend((segments.len() as u32).to_be_bytes());
    list.extend([0; 4]);
    [list, ends, segments].concat()
}

/// A list of the long format, with list identifier 70000.
fn long(ends: &[Vec<u8>], segments: &[Vec<u8>]) -> Vec<u8> {
    let (ends, segments) = (ends.concat(), segments.concat());
    let mut list = vec![1, 0, 0, 0x20];
    list.resize(15, 0);
    list.extend([0x01, 0xff, 0, 0, 0]);
    list.extend(70_000u32.to_be_bytes());
    list.resize(42, 0);
    list.extend((ends.len() as u16).to_be_bytes());
    list.extend((segments.len() as u16).to_be_bytes());
    list.extend([0; 2]);
    [list, ends, segments].concat()
}

fn copy(b: &mut Harness, i: NexusId, action: u8, list: &[u8]) -> Reply {
    let [x, y] = (list.len() as u16).to_be_bytes();
    b.data_out(i, &[0x83, action, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, x, y, 0, 0], list)
}

fn results(action: u8, id: [u8; 4]) -> [u8; 16] {
    let [a, b, c, d] = id;
    [0x84, action, a, b, c, d, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]
}

const ID: [u8; 4] = [7, 0, 0, 0];
const LONG_ID: [u8; 4] = 70_000u32.to_be_bytes();

/// SPC-4 6.4, 6.5: both formats copy, between named ends and the unit itself, in order.
#[test]
fn both_formats_copy() {
    let (mut b, i) = Harness::new();
    let naa = naa(&mut b, i);
    b.data_out(i, &crate::harness::cdb(0x2a, 0, 10, 4), &blocks(4, 9));
    b.take_requests();
    let segments = [segment((0, 0), 4, 10, 20), segment((0xffff, 0), 2, 20, 30)];
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &short(0, &[end(&naa)], &segments))), "Good");
    assert_eq!(b.take_requests(), ["copy 10+4 to 20", "copy 20+2 to 30"]);
    let at = |b: &Harness, block: u64| b.contents[(block * BLOCK) as usize];
    assert_eq!([19, 20, 23, 24, 31, 32].map(|n| at(&b, n)), [0, 9, 9, 0, 9, 0]);
    let list = long(&[end(&naa)], &[segment((0, 0xffff), 1, 10, BLOCKS - 1)]);
    assert_eq!(describe_reply(&copy(&mut b, i, 1, &list)), "Good");
    assert_eq!(at(&b, BLOCKS - 1), 9);
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &[])), "Good", "no list, nothing to do");
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &short(0, &[], &[]))), "Good");
}

/// SPC-4 5.17.7.3: errors found before anything is copied.
#[test]
fn lists_that_are_wrong() {
    let (mut b, i) = Harness::new();
    let one = end(&naa(&mut b, i));
    let good = |ends: &[Vec<u8>], segments: &[Vec<u8>]| short(0, ends, segments);
    let list = good(std::slice::from_ref(&one), &[segment((0, 0), 1, 0, 8)]);
    let with = |at: usize, value: u8| {
        let mut list = list.clone();
        list[at] = value;
        list
    };
    for (list, expect, at) in [
        (list[..15].to_vec(), "05/1a/00", None),
        (list[..16 + 31].to_vec(), "05/1a/00", None),
        (list[..list.len() - 1].to_vec(), "05/1a/00", None),
        (with(3, 31), "05/26/00", Some(2)),
        (with(15, 1), "05/26/0b", None),
        (with(1, 0x18), "05/26/00", Some(0)),
        (with(1, 0x08), "05/26/00", Some(1)),
        (with(16, 0xe0), "05/26/07", None),
        (with(21, 0x13), "05/26/00", Some(21)),
        (with(23, 0), "05/26/00", Some(23)),
        (with(23, 21), "05/26/00", Some(23)),
        (with(48, 3), "05/26/09", None),
        (with(51, 23), "05/26/00", Some(50)),
        (good(&vec![one.clone(); 9], &[]), "05/26/06", None),
        (good(&[], &vec![segment((0, 0), 0, 0, 0); 129]), "05/26/08", None),
        (good(&vec![one.clone(); 9], &vec![segment((0, 0), 0, 0, 0); 128]), "05/1a/00", None),
    ] {
        let r = copy(&mut b, i, 0, &list);
        let field = pointer(&r).map(|p| p.1);
        assert_eq!((describe_reply(&r).as_str(), field), (expect, at), "{list:x?}");
    }
    let list = long(&[one], &[segment((0, 0), 1, 0, 8)]);
    for (at, value, field) in [(0, 0, 0), (3, 0x1f, 2), (16, 0, 16), (43, 31, 42), (53, 0x23, 53)] {
        let mut list = list.clone();
        list[at] = value;
        let r = copy(&mut b, i, 1, &list);
        assert_eq!(
            (describe_reply(&r).as_str(), pointer(&r).map(|p| p.1)),
            ("05/26/00", Some(field))
        );
    }
    assert_eq!(describe_reply(&copy(&mut b, i, 1, &list[..47])), "05/1a/00");
    assert_eq!(b.take_requests(), [""; 0]);
}

/// The segment that a copy was given up at, and a byte of its descriptor (true) or of the list.
fn point(r: &Reply) -> (u16, bool, u16) {
    assert_eq!(r.sense[15] & !0x20, 0x80, "SKSV, and SD");
    let at = |n: usize| u16::from_be_bytes([r.sense[n], r.sense[n + 1]]);
    (at(10), r.sense[15] == 0xa0, at(16))
}

/// SPC-4 5.17.7.4: errors found while segments are processed; earlier segments stay copied.
#[test]
fn aborted_copies() {
    let (mut b, i) = Harness::new();
    let naa = naa(&mut b, i);
    let good = segment((0, 0), 1, 0, 8);
    for (ends, last, expect, in_segment, byte) in [
        (vec![end(&naa)], segment((0, 1), 1, 0, 8), "0a/08/04", true, 6),
        (vec![end(&naa)], segment((0x7ff, 0), 1, 0, 8), "0a/08/04", true, 4),
        (vec![end(&naa), end(&[9; 16])], segment((1, 0), 1, 0, 8), "0a/08/04", false, 48),
        (vec![end(&naa), end(&naa[..8])], segment((0, 1), 1, 0, 8), "0a/08/04", false, 48),
        (vec![end(&naa)], segment((0, 0), 2, BLOCKS - 1, 8), "0a/00/00", true, 12),
        (vec![end(&naa)], segment((0, 0), 2, 0, BLOCKS - 1), "0a/00/00", true, 20),
        (vec![end(&naa)], segment((0, 0), 1, u64::MAX, 0), "0a/00/00", true, 12),
    ] {
        let r = copy(&mut b, i, 0, &short(0, &ends, &[good.clone(), last]));
        assert_eq!((describe_reply(&r).as_str(), point(&r)), (expect, (1, in_segment, byte)));
        assert_eq!(r.sense[0], 0x70, "nothing of the segment is written");
        assert_eq!(b.take_requests(), ["copy 0+1 to 8"]);
    }
    let mut tape = end(&naa);
    tape[1] = 1;
    let mut large = end(&naa);
    large[30] = 0x10;
    for wrong in [tape, large] {
        let r = copy(&mut b, i, 0, &short(0, &[wrong], std::slice::from_ref(&good)));
        assert_eq!((describe_reply(&r).as_str(), point(&r)), ("0a/0d/03", (0, false, 16)));
    }
    let r = copy(&mut b, i, 1, &long(&[end(&[9; 16])], &[segment((0xffff, 0), 1, 0, 8)]));
    assert_eq!((describe_reply(&r).as_str(), point(&r)), ("0a/08/04", (0, false, 48)));
    let mut of_any_size = end(&naa);
    of_any_size[28..].fill(0);
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &short(0, &[of_any_size], &[good]))), "Good");
}

/// RFD 0014, 7: answers of the source or destination, and unavailable paths.
#[test]
fn ends_that_fail() {
    let (mut b, i) = Harness::new();
    let list = short(2, &[], &[segment((0xffff, 0xffff), 1, 0, 8)]);
    let mut end_with = |trouble, commanded| {
        let fault = CopyFault::Io(Side::Destination, trouble);
        b.copies = Some(CopyOutcome::Failed { segment: 0, fault, on_this_unit: commanded });
        let r = copy(&mut b, i, 0, &list);
        (describe_reply(&r), r.sense.get(18..).map(<[u8]>::to_vec).unwrap_or_default())
    };
    let failed = |e: Error| CopyIoError::Volume(RequestError::Device(e));
    let (said, sense) = end_with(failed(Error::NoSpace), false);
    assert_eq!((said.as_str(), sense[0]), ("0a/0d/01", 2));
    assert_eq!((sense[3], sense[13], sense[14]), (7, 0x27, 7));
    assert_eq!(end_with(CopyIoError::ReservationConflict, false), ("0a/0d/01".into(), vec![0x18]));
    for trouble in [failed(Error::Fenced), failed(Error::Gone), CopyIoError::PathUnavailable] {
        assert_eq!(end_with(trouble, false).0, "0a/0d/02", "{trouble:?}");
    }
    assert_eq!(end_with(failed(Error::Fenced), true).0, "02/04/01");
    assert_eq!(end_with(CopyIoError::PathUnavailable, true).0, "02/04/0c");
    b.copies = Some(CopyOutcome::Aborted);
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &list)), "0b/00/00");
}

/// SPC-4 6.25, 6.23: the result of a copy is reported once, to any nexus that may ask.
#[test]
fn results_are_reported() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    let good = [segment((0xffff, 0xffff), 3, 0, 8)];
    let (status, details) = (results(0, ID), results(4, ID));
    let unknown = |b: &mut Harness, i, cdb: &[u8]| {
        let r = b.data_in(i, cdb);
        assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/24/00", Some((true, 2, None))));
    };
    unknown(&mut b, i, &status);
    for usage in [0, 2] {
        copy(&mut b, i, 0, &short(usage, &[], &good));
        unknown(&mut b, other, &status);
        assert_eq!(data(&b.data_in(i, &details)), [0, 0, 0, 0], "nothing failed");
        assert_eq!(data(&b.data_in(i, &status)), [0, 0, 0, 8, 1, 0, 1, 0, 0, 0, 6, 0]);
        unknown(&mut b, i, &status);
    }
    b.unit.reset();
    b.data_in(i, &[0; 6]);
    unknown(&mut b, i, &details);
    copy(&mut b, i, 0, &short(3, &[], &good));
    unknown(&mut b, i, &status);
    let bad = [good[0].clone(), segment((0, 0), 1, 0, 0)];
    for told in [true, false] {
        let r = copy(&mut b, i, 0, &short(0, &[], &bad));
        assert_eq!(data(&b.data_in(i, &status)), [0, 0, 0, 8, 2, 0, 2, 0, 0, 0, 6, 0]);
        unknown(&mut b, i, &status);
        let mut nothing = details;
        nothing[12] = 0;
        if told {
            let d = data(&b.data_in(i, &details));
            assert_eq!(d[..4], (d.len() as u32 - 4).to_be_bytes());
            assert_eq!((d[56], d[59], &d[60..]), (2, 18, &r.sense[..]));
        } else {
            b.data_in(i, &nothing);
        }
        assert_eq!(data(&b.data_in(i, &details)), [0, 0, 0, 0]);
    }
}

/// SPC-4 6.24: the same for list identifiers of four bytes, as often as it is asked for.
#[test]
fn results_of_the_long_format() {
    let (mut b, i) = Harness::new();
    copy(&mut b, i, 1, &long(&[], &[segment((0xffff, 0xffff), 3, 0, 8)]));
    for _ in 0..2 {
        let d = data(&b.data_in(i, &results(5, LONG_ID)));
        assert_eq!((d.len(), d[3], &d[4..8]), (32, 28, &[1, 1, 0, 1][..]));
        assert_eq!((&d[8..13], d[15]), (&[0xff, 0xff, 0xff, 0xfe, 0][..], 0));
        assert_eq!((&d[16..24], &d[24..26]), (&[0, 0, 0, 0, 0, 0, 6, 0][..], &[0, 1][..]));
    }
    let r = copy(&mut b, i, 1, &long(&[], &[segment((0, 0), 1, 0, 0)]));
    let d = data(&b.data_in(i, &results(5, LONG_ID)));
    assert_eq!((d[3], d[5], &d[12..15]), (48, 2, &[2, 20, 18][..]), "in fours");
    assert_eq!((&d[32..50], &d[50..]), (&r.sense[..], &[0, 0][..]));
}

/// SPC-4 6.4.2: success is reported in sense data on request; then, and without an identifier, the
/// status cannot be sent first.
#[test]
fn success_is_reported_on_request() {
    let (mut b, i) = Harness::new();
    let mut list = long(&[], &vec![segment((0xffff, 0xffff), 1, 0, 8); 3]);
    list[15] = 0x02;
    let r = copy(&mut b, i, 1, &list);
    assert_eq!(r.status, scsi::Status::Good);
    assert_eq!((r.sense[2], &r.sense[8..14]), (0x0f, &[0, 0, 0, 3, 0x00, 0x20][..]));
    list[15] = 0x03;
    assert_eq!(describe_reply(&copy(&mut b, i, 1, &list)), "05/24/00");
    list[15] = 0x01;
    assert_eq!(describe_reply(&copy(&mut b, i, 1, &list)), "Good");
    list[1] = 0x18;
    list[20..24].fill(0);
    assert_eq!(describe_reply(&copy(&mut b, i, 1, &list)), "05/24/00");
}

/// A copy that runs: its driver has a plan and takes its time.
fn begin(b: &mut Harness, i: NexusId, list: &[u8]) -> Step {
    let cdb = [0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0, 0];
    let window = TransferLengths::from_initiator(list.len() as u64);
    let Admission::Accept(command) = b.arrive(i, &cdb, window) else { panic!("it is fine") };
    let data = b.bufs(list);
    b.unit.start(i, command, data)
}

/// SPC-4 5.17.4, 6.3: progress, one identifier at a time, and an end before time.
#[test]
fn a_copy_that_runs_can_be_asked_about_and_aborted() {
    let (mut b, i) = Harness::new();
    let segments = [segment((0xffff, 0xffff), 1, 0, 8), segment((0, 0), 1, 0, 8)];
    let list = short(0, &[], &segments);
    let Step::Copy(plan, running) = begin(&mut b, i, &list) else { panic!("a plan") };
    assert_eq!(data(&b.data_in(i, &results(0, ID)))[4..8], [0, 0, 0, 0]);
    plan.begin_segment(&plan.segments()[0]);
    plan.set_segment_size(8 << 30, 512);
    plan.record_written(6 << 30, 1 << 30);
    plan.record_written(0, 5 << 30);
    assert_eq!(data(&b.data_in(i, &results(0, ID))), [0, 0, 0, 8, 0, 0, 1, 2, 0, 0, 0x14, 0]);
    assert_eq!(describe_reply(&b.data_in(i, &results(4, ID))), "05/24/00", "it is not done");
    let r = copy(&mut b, i, 0, &list);
    assert_eq!(describe_reply(&r), "05/00/16", "OPERATION IN PROGRESS");
    let mut other_format = long(&[], &segments);
    other_format[20..24].copy_from_slice(&[0, 0, 0, 7]);
    let r = copy(&mut b, i, 1, &other_format);
    assert_eq!((describe_reply(&r).as_str(), pointer(&r)), ("05/26/00", Some((false, 20, None))));
    let id = [0, 0, 0, 7];
    let d = data(&b.data_in(i, &results(5, id)));
    assert_eq!((d[5], &d[8..12]), (0x11, &[0xff; 4][..]));
    let abort = |id: [u8; 4]| [&[0x83, 0x1c][..], &id, &[0; 10]].concat();
    assert_eq!(describe_reply(&b.data_in(i, &abort([0, 0, 0, 8]))), "05/24/00");
    assert!(!plan.handle().is_aborted());
    assert_eq!(describe_reply(&b.data_in(i, &abort(id))), "Good");
    assert!(plan.handle().is_aborted());
    drop(plan);
    assert_eq!(
        describe_reply(&b.data_in(i, &abort(id))),
        "05/24/00",
        "it is not carried out any more"
    );
    let reply = b.unit.finish_copy(running, CopyOutcome::Aborted);
    assert_eq!(describe_reply(&reply), "0a/2f/02", "COMMANDS CLEARED BY DEVICE SERVER");
    assert_eq!(data(&b.data_in(i, &results(5, id)))[5], 0x60);
    assert_eq!(data(&b.data_in(i, &results(0, ID)))[4], 2);
}

/// SPC-4 5.17.7.4: how much of a partly written segment is missing.
#[test]
fn the_residual_is_reported() {
    let (mut b, i) = Harness::new();
    let list = short(3, &[], &[segment((0xffff, 0xffff), 100, 0, 1000)]);
    let mut residual = |written: &[(u64, u64)]| {
        let Step::Copy(plan, running) = begin(&mut b, i, &list) else { panic!("a plan") };
        plan.begin_segment(&plan.segments()[0]);
        plan.set_segment_size(100 * 512, 512);
        written.iter().for_each(|(at, len)| plan.record_written(at * 512, len * 512));
        let fault = CopyFault::Io(Side::Source, CopyIoError::ReservationConflict);
        let outcome = CopyOutcome::Failed { segment: 0, fault, on_this_unit: true };
        let r = b.unit.finish_copy(running, outcome);
        (r.sense[0], r.sense[6])
    };
    assert_eq!(residual(&[]), (0x70, 0));
    assert_eq!(residual(&[(0, 30)]), (0xf0, 70));
    assert_eq!(residual(&[(40, 10), (0, 30)]), (0xf0, 70));
    assert_eq!(residual(&[(40, 10)]), (0xf0, 100));
}

/// SPC-4 5.17.5: a reset ends copies.
#[test]
fn a_reset_ends_copies() {
    let (mut b, i) = Harness::new();
    let list = short(0, &[], &[segment((0xffff, 0xffff), 1, 0, 8)]);
    let Step::Copy(plan, _running) = begin(&mut b, i, &list) else { panic!("a plan") };
    b.unit.reset();
    assert!(plan.handle().is_aborted());
    b.data_in(i, &[0; 6]);
    assert_eq!(describe_reply(&b.data_in(i, &results(0, ID))), "05/24/00");
}

/// RFD 0014, 1: the operations remembered per nexus are bounded.
#[test]
fn only_so_many_operations_are_known() {
    let (mut b, i) = Harness::new();
    let with_id = |id: u8| {
        let mut list = short(0, &[], &[segment((0xffff, 0xffff), 1, 0, 8)]);
        list[0] = id;
        list
    };
    let mut running: Vec<_> = (0..16).map(|id| begin(&mut b, i, &with_id(id))).collect();
    assert!(running.iter().all(|step| matches!(step, Step::Copy(..))));
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &with_id(99))), "Busy");
    drop(running.remove(3));
    assert_eq!(describe_reply(&copy(&mut b, i, 0, &with_id(99))), "Good");
    assert_eq!(
        describe_reply(&b.data_in(i, &results(0, [3, 0, 0, 0]))),
        "05/24/00",
        "forgotten for another"
    );
    assert_eq!(data(&b.data_in(i, &results(0, [4, 0, 0, 0])))[4], 0);
}

/// SPC-4 6.22, 7.8.17: limits are those that are kept.
#[test]
fn operating_parameters_and_page() {
    let (mut b, i) = Harness::new();
    let d = data(&b.data_in(i, &results(3, [0; 4])));
    assert_eq!((d.len(), d[3], d[4]), (46, 42, 1), "SNLID");
    assert_eq!((&d[8..12], &d[12..16]), (&[0, 8, 0, 128][..], &3840u32.to_be_bytes()[..]));
    assert_eq!(d[16..20], (65_535u32 * 4096).to_be_bytes());
    assert_eq!((d[36], &d[43..]), (16, &[2, 0x02, 0xe4][..]));
    let page = data(&b.data_in(i, &[0x12, 1, 0x8f, 2, 0, 0]));
    let mut rest = &page[4..];
    let mut kinds = Vec::new();
    while let [a, b, c, d, tail @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*c, *d]));
        assert!(length.is_multiple_of(4));
        kinds.push((u16::from_be_bytes([*a, *b]), tail[..length].to_vec()));
        rest = &tail[length..];
    }
    let mut limits = vec![0; 6];
    limits.extend([0, 64, 0, 0, 2, 0x58, 0, 0, 0, 60]);
    limits.extend([(256u64 << 20) / 512; 2].map(u64::to_be_bytes).concat());
    assert_eq!(kinds.remove(0), (0x0000, limits));
    let commands = [14, 0x83, 5, 0, 1, 0x10, 0x11, 0x1c, 0x84, 5, 0, 3, 4, 5, 7, 0];
    assert_eq!(kinds[0], (0x0001, commands.to_vec()));
    assert_eq!((kinds[1].0, &kinds[1].1[4..8]), (0x0004, &[0, 8, 0, 128][..]));
    assert_eq!(kinds[2], (0x0008, vec![2, 2, 0xe4, 0]));
    assert_eq!(kinds[3], (0x000c, vec![0, 2, 0xff, 0xff]));
    let (features, types) = (kinds.remove(4), kinds.remove(4));
    assert_eq!(
        (features.0, features.1.len(), &features.1[42..48]),
        (0x0106, 92, &[0, 48, 0, 0, 0, 0x2c][..])
    );
    assert_eq!(
        (types.0, types.1.len(), &types.1[..9]),
        (0x0108, 132, &[0, 0, 0, 128, 0, 0x80, 0, 1, 3][..])
    );
    assert_eq!(types.1[68..73], [0xff, 0xff, 0, 1, 2]);
    assert_eq!((kinds[4].0, kinds[4].1.len()), (0x8001, 32));
}

/// RFD 0014, 5: reads and writes of a copy are the initiator's.
#[test]
fn copies_are_admitted_like_reads_and_writes() {
    let (mut b, i) = Harness::new();
    let other = b.join(2);
    let admits = |b: &mut Harness, id, writes| {
        let known = b.shared_state(id);
        b.unit.check_copy_access(known, writes)
    };
    assert_eq!(admits(&mut b, i, true), Ok(false));
    assert_eq!(describe_reply(&b.data_in(i, &[0x16, 0, 0, 0, 0, 0])), "Good", "RESERVE");
    assert_eq!(admits(&mut b, i, true), Ok(false));
    assert_eq!(admits(&mut b, other, false), Err(CopyIoError::ReservationConflict));
    assert_eq!(describe_reply(&copy(&mut b, other, 0, &[])), "ReservationConflict");
    b.data_in(i, &[0x17, 0, 0, 0, 0, 0]);
    assert_eq!(admits(&mut b, other, false), Ok(false));
    let mut control = [0, 0, 0, 0, 0x0a, 10, 2, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0];
    b.data_out(i, &[0x15, 0x10, 0, 0, 16, 0], &control);
    assert!(
        matches!(admits(&mut b, i, true), Err(CopyIoError::CheckCondition(s)) if s.to_string() == "07/27/02")
    );
    assert_eq!(admits(&mut b, i, false), Ok(false));
    b.data_in(i, &[0x1b, 0, 0, 0, 0, 0]);
    assert!(
        matches!(admits(&mut b, i, false), Err(CopyIoError::CheckCondition(s)) if s.to_string() == "02/04/02")
    );
    b.data_in(i, &[0x1b, 0, 0, 0, 1, 0]);
    control[8] = 0;
    b.data_out(i, &[0x15, 0x10, 0, 0, 16, 0], &control);
    let mut no_cache = vec![0, 0, 0, 0, 0x08, 18];
    no_cache.resize(24, 0);
    b.data_out(i, &[0x15, 0x10, 0, 0, 24, 0], &no_cache);
    assert_eq!(admits(&mut b, i, true), Ok(true), "WCE is off");
}

proptest! {
    #[test]
    fn no_list_breaks_the_rules(list in vec(any::<u8>(), 0..300)) {
        copy_oracle::run(&list);
    }

    /// Lists that are nearly right.
    #[test]
    fn no_change_of_a_list_breaks_the_rules(
        long_format in any::<bool>(),
        sizes in any::<u8>(),
        counts in (0usize..10, 0usize..130),
        fields in vec((any::<u16>(), any::<u64>(), any::<u64>()), 1..5),
        changes in vec((any::<usize>(), any::<u8>()), 0..4),
    ) {
        let ends = vec![end(&[6; 16]); counts.0];
        let segments: Vec<_> = (0..counts.1)
            .map(|n| fields[n % fields.len()])
            .map(|(count, from, to)| segment((count % 10, 0xffff), count, from >> (count % 60), to >> 30))
            .collect();
        let mut list = if long_format { long(&ends, &segments) } else { short(0, &ends, &segments) };
        for (at, value) in changes {
            let at = at % list.len();
            list[at] = value;
        }
        copy_oracle::run(&[&[sizes][..], &list].concat());
    }
}
