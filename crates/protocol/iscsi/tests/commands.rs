//! SCSI commands: numbering, reads, residuals, statuses (RFC 7143 4.2.2, 11.3, 11.4, 11.7).

use frame::Machine;
use iscsi::pdu::{Opcode, ScsiCommand, TaskFunction};
use iscsi::target::{Action, ArrivedCommand, CloseReason, CommandOutcome, Config, Direction, Tag};
use iscsi::testing::{BLOCK, Harness, Pdu};

const R: u8 = ScsiCommand::READ;
const W: u8 = ScsiCommand::WRITE;

fn read10(at: u32, blocks: u16) -> [u8; 10] {
    let [a, b, c, d] = at.to_be_bytes();
    let [e, f] = blocks.to_be_bytes();
    [0x28, 0, a, b, c, d, 0, e, f, 0]
}

fn lab() -> Harness {
    Harness::logged_in(Config { window: 8, ..Config::default() }, &[])
}

fn manual() -> Harness {
    Harness { manual: true, ..lab() }
}

fn arrived(lab: &mut Harness) -> ArrivedCommand {
    match lab.action() {
        Action::CommandArrived(a) => a,
        other => panic!("{other:?}"),
    }
}

/// A command that is admitted and running.
fn running(lab: &mut Harness, cdb: &[u8], flags: u8, len: u32) -> Tag {
    let command = lab.initiator.command(cdb, flags, len, &[]);
    assert!(lab.say(&command).is_empty());
    let tag = arrived(lab).tag;
    lab.target.admit(tag, 0);
    let Action::Run { tag: t, data } = lab.action() else { panic!("not running") };
    assert!(t == tag && data.is_empty());
    tag
}

fn numbers(pdu: &Pdu) -> (u32, u32) {
    (pdu.word(28), pdu.word(32))
}

/// RFC 7143 11.3 and 11.7: a read, byte by byte.
#[test]
fn clause_11_3_a_read_byte_by_byte() {
    let mut lab = Harness { manual: true, ..Harness::default() };
    lab.manual = false;
    lab.log_in(&[]);
    lab.manual = true;
    let command = [
        0x01, 0xc1, 0, 0, 0, 0, 0, 0, // command; F, R, simple
        0, 5, 0, 0, 0, 0, 0, 0, // LUN 5
        0xca, 0xfe, 0, 1, 0, 0, 2, 0, // ITT, 512 bytes
        0, 0, 0, 1, 0, 0, 0, 1, // CmdSN, ExpStatSN
        0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
    ];
    lab.say(&command);
    let a = arrived(&mut lab);
    assert_eq!((a.lun, a.attribute), ([0, 5, 0, 0, 0, 0, 0, 0], 1));
    assert_eq!((a.direction, a.expected_len), (Direction::Read, 512));
    assert_eq!((&a.cdb[..], &a.extended_cdb[..]), (&command[32..], &[][..]));
    lab.target.admit(a.tag, 0);
    assert!(matches!(lab.action(), Action::Run { .. }));
    let data = lab.driver.data(&[0x77; 512]);
    lab.target.complete(a.tag, &CommandOutcome::good(data));
    let got = lab.pump();
    let expect = [
        0x25, 0x81, 0, 0, 0, 0, 2, 0, // Data-In; F, S; GOOD; 512 bytes
        0, 0, 0, 0, 0, 0, 0, 0, // LUN
        0xca, 0xfe, 0, 1, 0xff, 0xff, 0xff, 0xff, // ITT, TTT
        0, 0, 0, 1, 0, 0, 0, 2, // StatSN, ExpCmdSN
        0, 0, 0, 0x81, 0, 0, 0, 0, // MaxCmdSN, DataSN
        0, 0, 0, 0, 0, 0, 0, 0, // offset, residual
    ];
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].header, expect);
    assert_eq!(got[0].data, [0x77; 512]);
}

/// RFC 7143 11.7: PDUs are as long as the initiator takes them, sequences as long as a burst.
#[test]
fn clause_11_7_reads_are_split() {
    let keys = [("MaxRecvDataSegmentLength", "4096"), ("MaxBurstLength", "10240")];
    let mut lab = Harness::logged_in(Config::default(), &keys);
    let command = lab.initiator.command(&read10(3, 50), R, 25_600, &[]);
    let got = lab.say(&command);
    let mut at = 0;
    for (i, pdu) in got.iter().enumerate() {
        assert_eq!(pdu.opcode(), Opcode::DataIn);
        assert_eq!((pdu.word(36), pdu.word(40)), (i as u32, at));
        let len = pdu.data.len() as u32;
        at += len;
        let last = at == 25_600;
        let final_in_burst = last || at % 10_240 == 0;
        assert_eq!(pdu.header[1], if final_in_burst { 0x80 } else { 0 } | u8::from(last));
        assert_eq!(pdu.word(24), if last { 1 } else { 0 }, "StatSN only with the status");
    }
    let lens: Vec<_> = got.iter().map(|p| p.data.len()).collect();
    assert_eq!(lens, [4096, 4096, 2048, 4096, 4096, 2048, 4096, 1024]);
    let all: Vec<u8> = got.into_iter().flat_map(|p| p.data).collect();
    assert_eq!(all, lab.driver.disk[3 * BLOCK..53 * BLOCK]);
}

/// RFC 7143 11.4.5: residuals of reads, with the status in Data-In and in a response.
#[test]
fn clause_11_4_5_residuals_of_reads() {
    for (expected, data, available, flags, residual) in [
        (512, 512, 0, 0x00, 0),
        (512, 36, 0, 0x02, 476),
        (36, 512, 0, 0x04, 476),
        (36, 36, 512, 0x04, 476),
        (0, 0, 512, 0x04, 512),
        (512, 0, 0, 0x02, 512),
    ] {
        let mut lab = manual();
        let tag = running(&mut lab, &[0x12], R, expected);
        let data = lab.driver.data(&vec![1; data]);
        lab.target
            .complete(tag, &CommandOutcome { available, ..CommandOutcome::good(data.clone()) });
        let got = lab.pump();
        assert_eq!(got.len(), 1);
        let len = data.len().min(expected as usize);
        assert_eq!(got[0].data.len(), len);
        let kind = if len > 0 { Opcode::DataIn } else { Opcode::ScsiResponse };
        assert_eq!(got[0].opcode(), kind);
        assert_eq!(got[0].header[1] & 0x06, flags, "{expected} expected");
        assert_eq!(got[0].word(44), residual);
    }
}

/// RFC 7143 11.4.7: sense data comes behind its length; data of a command that failed comes first.
#[test]
fn clause_11_4_7_sense_data_comes_in_a_response() {
    let mut lab = manual();
    let tag = running(&mut lab, &read10(0, 2), R, 1024);
    let data = lab.driver.data(&[9; 512]);
    let sense = [0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0];
    lab.target.complete(tag, &CommandOutcome { data, ..CommandOutcome::status(2, &sense) });
    let got = lab.pump();
    assert_eq!(got.len(), 2);
    assert_eq!((got[0].opcode(), got[0].header[1], got[0].header[3]), (Opcode::DataIn, 0x80, 0));
    assert_eq!(got[1].opcode(), Opcode::ScsiResponse);
    assert_eq!(got[1].header[..4], [0x21, 0x82, 0, 2]);
    assert_eq!((got[1].word(36), got[1].word(44)), (1, 512), "ExpDataSN, residual");
    assert_eq!(got[1].data[..2], [0, 17]);
    assert_eq!(got[1].data[2..], sense);
}

/// RFC 7143 11.4.2: a status without sense data.
#[test]
fn clause_11_4_2_a_status_alone() {
    let mut lab = manual();
    let tag = running(&mut lab, &[0], 0, 0);
    lab.target.complete(tag, &CommandOutcome::status(0x28, &[]));
    let got = lab.pump();
    assert_eq!((got[0].header[..4].to_vec(), got[0].data.len()), (vec![0x21, 0x80, 0, 0x28], 0));
}

/// RFC 7143 4.2.2.1: the window follows what is outstanding.
#[test]
fn clause_4_2_2_1_the_window_closes_and_opens() {
    let mut lab = manual();
    let tags: Vec<_> = (0..8).map(|_| running(&mut lab, &[0], 0, 0)).collect();
    let ninth = lab.initiator.command(&[0], 0, 0, &[]);
    assert!(lab.say(&ninth).is_empty() && lab.actions.is_empty(), "outside the window");
    lab.target.complete(tags[3], &CommandOutcome::default());
    let got = lab.pump();
    assert_eq!(numbers(&got[0]), (9, 9));
    lab.say(&ninth);
    assert_eq!(arrived(&mut lab).tag, tags[3], "tags are used again");
}

/// RFC 7143 4.2.2.1: old and duplicate numbers are ignored, with the data that comes with them.
#[test]
fn clause_4_2_2_1_commands_outside_the_window_are_ignored() {
    let mut lab = lab();
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    assert_eq!(lab.say(&command).len(), 1);
    assert!(lab.say(&command).is_empty(), "a duplicate");
    for sn in [0, 0x8000_0002, 2 + 8] {
        lab.initiator.cmd_sn = sn;
        let mut header = lab.initiator.command_header(&[0x2a], W, 1024);
        header.flags &= 0x7f;
        let command = lab.initiator.frame(header.as_bytes(), &[5; 512]);
        assert!(lab.say(&command).is_empty(), "CmdSN {sn}");
        let itt = header.itt.get();
        let data = lab.initiator.data_out(itt, u32::MAX, 0, 512, true, &[5; 512]);
        assert!(lab.say(&data).is_empty());
    }
    lab.initiator.cmd_sn = 2;
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    assert_eq!(numbers(&lab.say(&command)[0]), (3, 10));
}

/// RFC 7143 4.2.2.1: on one connection commands come in order.
#[test]
fn clause_4_2_2_1_a_gap_ends_the_connection() {
    let mut lab = lab();
    lab.initiator.cmd_sn += 1;
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    assert!(lab.say(&command).is_empty());
    assert_eq!(lab.closed, Some(CloseReason::Protocol("commands out of order")));
}

/// RFC 7143 4.2.2.1 and 11.17.1: immediate commands have no number, and are bounded.
#[test]
fn clause_4_2_2_1_immediate_commands_are_bounded() {
    let mut lab = manual();
    let mut header = lab.initiator.command_header(&[0], 0, 0);
    header.first |= 0x40;
    lab.initiator.cmd_sn -= 1;
    for itt in 0..16 {
        header.itt.set(itt);
        let command = lab.initiator.frame(header.as_bytes(), &[]);
        assert!(lab.say(&command).is_empty());
    }
    assert_eq!(lab.actions.len(), 16);
    header.itt.set(99);
    let command = lab.initiator.frame(header.as_bytes(), &[]);
    let got = lab.say(&command);
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x06));
    assert_eq!(numbers(&got[0]), (1, 8));
}

/// RFC 7143 11.17.1: what commands must not be.
#[test]
fn clause_11_17_1_impossible_commands_are_rejected() {
    let reject = |reason: u8, change: &dyn Fn(&mut ScsiCommand), data: &[u8]| {
        let mut lab = lab();
        let mut header = lab.initiator.command_header(&[0], 0, 0);
        change(&mut header);
        let command = lab.initiator.frame(header.as_bytes(), data);
        let got = lab.say(&command);
        assert_eq!(got.len(), 1, "{got:?}");
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, reason));
        assert_eq!(got[0].itt(), u32::MAX);
        assert_eq!(got[0].data, command[..48], "with the header that was wrong");
        assert_eq!(numbers(&got[0]), (2, 9), "its number is used up");
        let next = lab.initiator.command(&[0], 0, 0, &[]);
        assert_eq!(lab.say(&next)[0].opcode(), Opcode::ScsiResponse);
    };
    reject(0x09, &|h| h.itt.set(u32::MAX), &[]);
    reject(0x05, &|h| h.flags |= R | W, &[]);
    reject(0x09, &|h| h.flags &= 0x7f, &[]);
    reject(0x09, &|h| h.flags |= R, &[1; 100]);
}

/// RFC 7143 11.17.1: a task tag is not used twice at once.
#[test]
fn clause_11_17_1_a_tag_in_use_is_rejected() {
    let mut lab = manual();
    let tag = running(&mut lab, &[0], 0, 0);
    lab.initiator.itt -= 1;
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    let got = lab.say(&command);
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x07));
    assert!(lab.actions.is_empty());
    lab.target.complete(tag, &CommandOutcome::default());
    assert_eq!(lab.pump()[0].opcode(), Opcode::ScsiResponse);
}

/// RFC 7143 11.2.2: long command descriptor blocks; other segments are refused.
#[test]
fn clause_11_2_2_long_commands_arrive_whole() {
    let mut lab = manual();
    let header = lab.initiator.command_header(&[0x7f; 16], 0, 0);
    let ahs = [0, 9, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let command = lab.initiator.frame_with_ahs(header.as_bytes(), &ahs, &[]);
    lab.say(&command);
    assert_eq!(arrived(&mut lab).extended_cdb[..], [1, 2, 3, 4, 5, 6, 7, 8]);
    for (ahs, reason) in [([0, 5, 9, 0, 1, 2, 3, 4], 0x09), ([0, 5, 2, 0, 0, 0, 2, 0], 0x05)] {
        let header = lab.initiator.command_header(&[0x28], R, 512);
        let command = lab.initiator.frame_with_ahs(header.as_bytes(), &ahs, &[]);
        assert_eq!(lab.say(&command)[0].header[2], reason);
    }
    let longest = vec![0; 1020];
    let header = lab.initiator.command_header(&[0x28], R, 512);
    let command = lab.initiator.frame_with_ahs(header.as_bytes(), &longest, &[]);
    assert_eq!(lab.say(&command)[0].header[2], 0x09);
}

/// RFC 7143 11.17.1: PDUs that do not come from initiators, or not now.
#[test]
fn clause_11_17_1_unknown_and_misplaced_pdus_are_rejected() {
    for (opcode, reason) in [(0x10, 0x03), (0x43, 0x04), (0x07, 0x05), (0x1c, 0x05), (0x25, 0x05)] {
        let mut lab = lab();
        let mut header = [0; 48];
        header[0] = opcode;
        let bytes = lab.initiator.frame(&header, &[3; 33]);
        let got = lab.say(&bytes);
        assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, reason), "{opcode:#x}");
        let next = lab.initiator.command(&[0], 0, 0, &[]);
        assert_eq!(lab.say(&next).len(), 1);
    }
}

/// RFC 7143 13.12: nothing longer than declared is received.
#[test]
fn clause_13_12_too_long_a_segment_ends_the_connection() {
    let mut lab = lab();
    let header = lab.initiator.command_header(&[0x2a], W, 1 << 20);
    let bytes = lab.initiator.frame(header.as_bytes(), &vec![0; 262_145]);
    let got = lab.say(&bytes[..48]);
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, 0x04));
    assert!(matches!(lab.closed, Some(CloseReason::Protocol(_))));
}

/// RFC 7143 11.3: a length without R or W means nothing.
#[test]
fn clause_11_3_a_length_without_a_direction_is_ignored() {
    let mut lab = manual();
    let tag = running(&mut lab, &[0x16], 0, 4096);
    lab.target.complete(tag, &CommandOutcome::default());
    let got = lab.pump();
    assert_eq!((got[0].header[1], got[0].word(44)), (0x80, 0));
}

/// The driver may change the window at any time; the initiator is told of a wider one.
#[test]
fn clause_4_2_2_1_the_window_can_be_changed() {
    let mut lab = lab();
    lab.target.set_window(16);
    let got = lab.pump();
    assert_eq!(
        (got[0].opcode(), got[0].itt(), got[0].word(20)),
        (Opcode::NopIn, u32::MAX, u32::MAX)
    );
    assert_eq!(numbers(&got[0]), (1, 16));
    lab.target.set_window(4);
    assert!(lab.pump().is_empty());
    let command = lab.initiator.command(&[0], 0, 0, &[]);
    assert_eq!(numbers(&lab.say(&command)[0]), (2, 16), "what was announced stays");
}

/// Reads that the output has no room for wait as data, keep their place in the window, and can
/// be aborted; what is small overtakes them.
#[test]
fn clause_11_7_reads_wait_for_room() {
    let mut lab = Harness::logged_in(Config::default(), &[("MaxRecvDataSegmentLength", "512")]);
    lab.manual = true;
    let len = 1 << 20;
    let tags: Vec<_> = (0..4).map(|_| running(&mut lab, &[0x28], R, len)).collect();
    for (i, tag) in (0..).zip(&tags) {
        let data = lab.driver.data(&vec![i; len as usize]);
        lab.target.complete(*tag, &CommandOutcome::good(data));
        assert!(lab.target.output().len() <= (512 << 10) + 600);
    }
    assert_eq!(lab.target.outstanding(), 4);
    let ping = lab.initiator.ping(b"");
    assert_eq!(lab.feed(&ping), 0);
    let abort = lab.initiator.task(TaskFunction::AbortTask, 0x12, 3);
    assert_eq!(lab.feed(&abort), 0);
    assert_eq!(lab.target.outstanding(), 3, "it was waiting");
    let got = lab.pump();
    let of = |itt: u32| got.iter().filter(move |p| p.itt() == itt);
    for (itt, byte) in [(0x10, 0), (0x11, 1), (0x13, 3)] {
        assert_eq!(of(itt).map(|p| p.data.len()).sum::<usize>(), len as usize);
        assert!(of(itt).all(|p| p.data.iter().all(|&b| b == byte)));
        let last = of(itt).next_back().expect("a status");
        assert_eq!((last.header[1], last.header[3]), (0x81, 0));
    }
    assert_eq!(of(0x12).count(), 0);
    let place = |itt: u32| got.iter().position(|p| p.itt() == itt).expect("an answer");
    assert!(place(0x14) < place(0x11) && place(0x15) < place(0x11));
    assert_eq!(lab.target.outstanding(), 0);
}
