//! Data of writes: immediate, unsolicited, solicited (RFC 7143 4.2.5.2, 11.4.7.2, 11.7, 11.8).

use iscsi::pdu::{NO_TAG, Opcode, RejectReason, ScsiCommand};
use iscsi::target::{Action, CommandOutcome, Config, Tag};
use iscsi::testing::{BLOCK, Harness, Pdu, Portions};
use rt::buf::{Bufs, MemoryClass};

const W: u8 = ScsiCommand::WRITE;

fn write10(blocks: u16) -> [u8; 10] {
    let [a, b] = blocks.to_be_bytes();
    [0x2a, 0, 0, 0, 0, 8, 0, a, b, 0]
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// R2Ts allowed, unsolicited data to 8 KiB.
const OPEN: [(&str, &str); 5] = [
    ("InitialR2T", "No"),
    ("ImmediateData", "Yes"),
    ("FirstBurstLength", "8192"),
    ("MaxBurstLength", "16384"),
    ("MaxOutstandingR2T", "2"),
];

fn lab(keys: &[(&str, &str)]) -> Harness {
    Harness::logged_in(Config::default(), keys)
}

fn manual(keys: &[(&str, &str)]) -> Harness {
    Harness { manual: true, ..lab(keys) }
}

/// A write with immediate data that goes on in Data-Out PDUs unless `last`; its tag.
fn write(lab: &mut Harness, len: u32, immediate: &[u8], last: bool) -> (u32, Vec<Pdu>) {
    let blocks = u16::try_from(len as usize / BLOCK).expect("a short write");
    let mut header = lab.initiator.command_header(&write10(blocks), W, len);
    if !last {
        header.flags &= 0x7f;
    }
    let command = lab.initiator.frame(header.as_bytes(), immediate);
    (header.itt.get(), lab.say(&command))
}

fn data(
    lab: &mut Harness,
    itt: u32,
    ttt: u32,
    sn: u32,
    at: usize,
    last: bool,
    d: &[u8],
) -> Vec<Pdu> {
    let pdu = lab.initiator.data_out(itt, ttt, sn, at as u32, last, d);
    lab.say(&pdu)
}

fn written(lab: &Harness, len: usize) -> &[u8] {
    &lab.driver.disk[8 * BLOCK..8 * BLOCK + len]
}

fn good(got: &[Pdu]) {
    assert_eq!(got.len(), 1, "{got:?}");
    assert_eq!(
        (got[0].opcode(), got[0].header[1..4].to_vec()),
        (Opcode::ScsiResponse, vec![0x80, 0, 0])
    );
}

/// One CHECK CONDITION, ABORTED COMMAND with this code and qualifier.
fn failed(got: &[Pdu], asc: u8, ascq: u8) {
    let last = got.last().expect("an answer");
    assert_eq!((last.opcode(), last.header[3]), (Opcode::ScsiResponse, 2), "{got:?}");
    assert_eq!((last.data[2 + 2], last.data[2 + 12], last.data[2 + 13]), (0x0b, asc, ascq));
}

fn r2t(pdu: &Pdu) -> (u32, u32, usize, usize) {
    assert_eq!(pdu.opcode(), Opcode::R2t);
    (pdu.word(20), pdu.word(36), pdu.word(40) as usize, pdu.word(44) as usize)
}

/// RFC 7143 11.3.4: all data with the command.
#[test]
fn clause_11_3_immediate_data() {
    for len in [512, 4096, 8192] {
        let mut lab = lab(&OPEN);
        let bytes = pattern(len);
        let (_, got) = write(&mut lab, len as u32, &bytes, true);
        good(&got);
        assert_eq!(written(&lab, len), bytes);
    }
}

/// RFC 7143 11.8: the rest is asked for; an R2T byte by byte.
#[test]
fn clause_11_8_an_r2t_byte_by_byte() {
    let mut lab = lab(&OPEN);
    let bytes = pattern(12_288);
    let (itt, got) = write(&mut lab, 12_288, &bytes[..4096], true);
    let expect = [
        0x31, 0x80, 0, 0, 0, 0, 0, 0, // R2T, F
        0, 1, 0, 0, 0, 0, 0, 0, // LUN
        0, 0, 0, 0x10, 0, 0, 0, 1, // ITT, TTT
        0, 0, 0, 1, 0, 0, 0, 2, // StatSN, ExpCmdSN
        0, 0, 0, 0x80, 0, 0, 0, 0, // MaxCmdSN, R2TSN
        0, 0, 0x10, 0, 0, 0, 0x20, 0, // offset, length
    ];
    assert_eq!((got.len(), got[0].header), (1, expect));
    let ttt = r2t(&got[0]).0;
    assert!(data(&mut lab, itt, ttt, 0, 4096, false, &bytes[4096..8192]).is_empty());
    let got = data(&mut lab, itt, ttt, 1, 8192, true, &bytes[8192..]);
    good(&got);
    assert_eq!(got[0].word(36), 1, "ExpDataSN counts R2Ts");
    assert_eq!(written(&lab, 12_288), bytes);
}

/// RFC 7143 13.10: unsolicited data in Data-Out PDUs, then R2Ts.
#[test]
fn clause_13_10_unsolicited_data() {
    let mut lab = lab(&OPEN);
    let bytes = pattern(10_240);
    let (itt, got) = write(&mut lab, 10_240, &bytes[..1024], false);
    assert!(got.is_empty());
    assert!(data(&mut lab, itt, NO_TAG, 0, 1024, false, &bytes[1024..4096]).is_empty());
    let got = data(&mut lab, itt, NO_TAG, 1, 4096, true, &bytes[4096..8192]);
    let (ttt, sn, at, len) = r2t(&got[0]);
    assert_eq!((sn, at, len), (0, 8192, 2048));
    good(&data(&mut lab, itt, ttt, 0, 8192, true, &bytes[8192..]));
    assert_eq!(written(&lab, 10_240), bytes);

    // Without immediate data, and with less than a first burst in all.
    let (itt, _) = write(&mut lab, 2048, &[], false);
    good(&data(&mut lab, itt, NO_TAG, 0, 0, true, &bytes[..2048]));
}

/// RFC 7143 13.13, 13.17: R2Ts ask for a burst each, and so many at once.
#[test]
fn clause_13_17_r2ts_are_bounded() {
    let mut lab = lab(&OPEN);
    let bytes = pattern(40_960);
    let (itt, got) = write(&mut lab, 40_960, &[], true);
    let asked: Vec<_> = got.iter().map(r2t).collect();
    assert_eq!(asked[0], (1, 0, 0, 16_384));
    assert_eq!(asked[1], (2, 1, 16_384, 16_384));
    assert_eq!(asked.len(), 2);
    // The second first.
    let got = data(&mut lab, itt, 2, 0, 16_384, true, &bytes[16_384..32_768]);
    assert_eq!(r2t(&got[0]), (3, 2, 32_768, 8192));
    assert!(data(&mut lab, itt, 1, 0, 0, true, &bytes[..16_384]).is_empty());
    good(&data(&mut lab, itt, 3, 0, 32_768, true, &bytes[32_768..]));
    assert_eq!(written(&lab, 40_960), bytes);
}

/// RFC 7143 11.7.1: a sequence ends with F, which may come in an empty PDU.
#[test]
fn clause_11_7_1_a_sequence_ends_with_f() {
    let mut lab = lab(&[]);
    let bytes = pattern(1024);
    let (itt, _) = write(&mut lab, 1024, &[], true);
    assert!(data(&mut lab, itt, 1, 0, 0, false, &bytes).is_empty());
    good(&data(&mut lab, itt, 1, 1, 1024, true, &[]));
}

/// RFC 7143 11.4.7.2: unsolicited data that must not be.
#[test]
fn clause_11_4_7_2_unexpected_unsolicited_data() {
    // Immediate data without ImmediateData.
    let mut lab1 = lab(&[("ImmediateData", "No"), ("InitialR2T", "No")]);
    let (_, got) = write(&mut lab1, 512, &pattern(512), true);
    failed(&got, 0x0c, 0x0c);
    // Data-Out PDUs announced in spite of InitialR2T: the answer waits for them.
    let mut lab2 = lab(&[("InitialR2T", "Yes")]);
    let (itt, got) = write(&mut lab2, 1024, &[], false);
    assert!(got.is_empty());
    failed(&data(&mut lab2, itt, NO_TAG, 0, 0, true, &pattern(1024)), 0x0c, 0x0c);
    // Not announced: while an R2T is outstanding, whose data is awaited too.
    let mut lab3 = lab(&OPEN);
    let (itt, _) = write(&mut lab3, 1024, &[], true);
    assert!(data(&mut lab3, itt, NO_TAG, 0, 0, true, &pattern(1024)).is_empty());
    failed(&data(&mut lab3, itt, 1, 0, 0, true, &pattern(1024)), 0x0c, 0x0c);
    // For a read.
    let mut lab4 = manual(&OPEN);
    let read = lab4.initiator.command(&[0x28], ScsiCommand::READ, 512, &[]);
    lab4.say(&read);
    data(&mut lab4, 0x10, NO_TAG, 0, 0, true, &pattern(512));
    let Some(Action::Abort { tag }) = lab4.actions.pop() else { panic!("not aborted") };
    lab4.target.complete(tag, &CommandOutcome::default());
    failed(&lab4.pump(), 0x0c, 0x0c);
}

/// RFC 7143 11.4.7.2: more or less data than was asked for or must be.
#[test]
fn clause_11_4_7_2_incorrect_amounts_of_data() {
    // Immediate data longer than the first burst, or than the command.
    for (len, immediate) in [(16_384, 8704), (512, 1024)] {
        let mut lab = lab(&OPEN);
        let (_, got) = write(&mut lab, len, &pattern(immediate), true);
        failed(&got, 0x0c, 0x0d);
    }
    // Unsolicited data that is not a first burst although there is more.
    let mut lab1 = lab(&OPEN);
    let (itt, _) = write(&mut lab1, 16_384, &[], false);
    failed(&data(&mut lab1, itt, NO_TAG, 0, 0, true, &pattern(4096)), 0x0c, 0x0d);
    // The rest of a shorter write is asked for.
    let (itt, _) = write(&mut lab1, 4096, &[], false);
    let got = data(&mut lab1, itt, NO_TAG, 0, 0, true, &pattern(1024));
    assert_eq!(r2t(&got[0]).2..r2t(&got[0]).3, 1024..3072);
    // An R2T answered with less, and with more.
    let (itt, got) = write(&mut lab1, 1024, &[], true);
    let ttt = r2t(&got[0]).0;
    failed(&data(&mut lab1, itt, ttt, 0, 0, true, &pattern(512)), 0x0c, 0x0d);
    let (itt, got) = write(&mut lab1, 1024, &[], true);
    let ttt = r2t(&got[0]).0;
    failed(&data(&mut lab1, itt, ttt, 0, 0, true, &pattern(1536)), 0x0c, 0x0d);
}

/// RFC 7143 7.9, 11.7.4, 13.18: data in the wrong order. The rest of it is awaited.
#[test]
fn clause_7_9_data_out_of_order() {
    let mut lab = lab(&OPEN);
    let (itt, got) = write(&mut lab, 2048, &[], true);
    let ttt = r2t(&got[0]).0;
    assert!(data(&mut lab, itt, ttt, 1, 0, false, &pattern(1024)).is_empty());
    failed(&data(&mut lab, itt, ttt, 2, 1024, true, &pattern(1024)), 0x47, 0x05);
    let (itt, got) = write(&mut lab, 2048, &[], true);
    let ttt = r2t(&got[0]).0;
    assert!(data(&mut lab, itt, ttt, 0, 1024, false, &pattern(1024)).is_empty());
    failed(&data(&mut lab, itt, ttt, 1, 0, true, &pattern(1024)), 0x4b, 0x05);
}

/// RFC 7143 11.17.1: a target transfer tag that was never given out.
#[test]
fn clause_11_17_1_wrong_transfer_tags() {
    let mut lab = lab(&OPEN);
    let (itt, got) = write(&mut lab, 1024, &[], true);
    let ttt = r2t(&got[0]).0;
    let got = data(&mut lab, itt, ttt + 7, 0, 0, true, &pattern(1024));
    assert_eq!((got[0].opcode(), got[0].header[2]), (Opcode::Reject, RejectReason::InvalidField.0));
    assert_eq!(got.len(), 1, "what was asked for is still awaited");
    failed(&data(&mut lab, itt, ttt, 0, 0, true, &pattern(1024)), 0x4b, 0x01);
}

/// RFC 7143 7.6: data for commands that are over, or never were, is dropped.
#[test]
fn data_for_no_command_is_dropped() {
    let mut lab = lab(&OPEN);
    assert!(data(&mut lab, 0x99, NO_TAG, 0, 0, true, &pattern(2000)).is_empty());
    let (itt, got) = write(&mut lab, 512, &pattern(512), true);
    good(&got);
    assert!(data(&mut lab, itt, 1, 0, 0, true, &pattern(512)).is_empty());
}

fn arrived(lab: &mut Harness) -> Tag {
    match lab.action() {
        Action::CommandArrived(a) => a.tag,
        other => panic!("{other:?}"),
    }
}

fn grant(lab: &mut Harness) -> (usize, MemoryClass) {
    let Action::Grant { tag, bytes, class } = lab.action() else { panic!("no grant") };
    let memory = lab.driver.memory(bytes);
    lab.target.grant(tag, memory);
    (bytes, class)
}

fn run(lab: &mut Harness) -> Bufs {
    match lab.action() {
        Action::Run { data, .. } => data,
        other => panic!("{other:?}"),
    }
}

/// Memory first: nothing is received that has no place, and data that is yet to be asked for
/// waits for memory of its own.
#[test]
fn memory_is_asked_for_in_two_classes() {
    let mut lab = manual(&OPEN);
    let bytes = pattern(20_480);
    let header = lab.initiator.command_header(&write10(40), W, 20_480);
    let command = lab.initiator.frame(header.as_bytes(), &bytes[..1000]);
    assert_eq!(lab.feed(&command), 1000, "nothing behind the header is taken");
    let tag = arrived(&mut lab);
    lab.target.admit(tag, 20_480);
    assert_eq!(lab.feed(&command[48..]), 1000);
    assert_eq!(
        grant(&mut lab),
        (4096, MemoryClass::UnsolicitedData),
        "the rest of the page comes with it"
    );
    assert_eq!(lab.feed(&command[48..]), 0);
    assert!(lab.pump().is_empty(), "no R2T without memory");
    let ping = lab.initiator.ping(b"hello");
    assert_eq!(lab.say(&ping)[0].opcode(), Opcode::NopIn, "others are not held up");
    let Action::Grant { bytes: 16_384, class: MemoryClass::SolicitedData, .. } = lab.actions[0]
    else {
        panic!("{:?}", lab.actions)
    };
    grant(&mut lab);
    let got = lab.pump();
    assert_eq!(
        got.iter().map(r2t).map(|r| (r.2, r.3)).collect::<Vec<_>>(),
        [(1000, 16_384), (17_384, 3096)]
    );
    let itt = header.itt.get();
    data(&mut lab, itt, 1, 0, 1000, true, &bytes[1000..17_384]);
    data(&mut lab, itt, 2, 0, 17_384, true, &bytes[17_384..]);
    let data = run(&mut lab);
    assert_eq!(data.to_vec(), bytes);
    assert!(data.iter().all(|b| b.as_ptr().addr() % 4096 == 0));
}

/// Data beyond what the command takes is dropped, and reported as residual.
#[test]
fn clause_11_4_5_residuals_of_writes() {
    for (expected, takes, flags, residual) in [
        (2048, 512, 0x02, 1536),
        (512, 2048, 0x04, 1536),
        (2048, 2048, 0, 0),
        (2048, 0, 0x02, 2048),
    ] {
        let mut lab = manual(&OPEN);
        let bytes = pattern(expected);
        let (_, got) = {
            let header = lab.initiator.command_header(&write10(1), W, expected as u32);
            let command = lab.initiator.frame(header.as_bytes(), &bytes);
            lab.feed(&command[..48]);
            let tag = arrived(&mut lab);
            lab.target.admit(tag, takes as u64);
            if takes > 0 {
                assert_eq!(grant(&mut lab).0, takes.min(expected));
            }
            assert_eq!(lab.feed(&command[48..]), 0);
            assert_eq!(run(&mut lab).to_vec(), bytes[..takes.min(expected)]);
            lab.target.complete(tag, &CommandOutcome::default());
            (tag, lab.pump())
        };
        assert_eq!(got[0].header[1], 0x80 | flags, "{expected} {takes}");
        assert_eq!(got[0].word(44), residual);
    }
}

/// A command that is refused at once: its data is dropped, then comes the answer.
#[test]
fn an_early_end_waits_for_data_in_flight() {
    let mut lab = manual(&OPEN);
    let bytes = pattern(8192);
    let (itt, _) = {
        let mut header = lab.initiator.command_header(&write10(16), W, 8192);
        header.flags &= 0x7f;
        let command = lab.initiator.frame(header.as_bytes(), &bytes[..2048]);
        lab.feed(&command[..48]);
        let tag = arrived(&mut lab);
        lab.target.complete(tag, &CommandOutcome::status(2, &[0x70; 18]));
        assert_eq!(lab.feed(&command[48..]), 0);
        (header.itt.get(), ())
    };
    assert!(lab.pump().is_empty());
    let got = data(&mut lab, itt, NO_TAG, 0, 2048, true, &bytes[2048..]);
    assert_eq!((got[0].header[3], got[0].data[2..].to_vec()), (2, vec![0x70; 18]));
    assert_eq!((got[0].header[1], got[0].word(44)), (0x82, 8192));
    assert_eq!(lab.target.outstanding(), 0);
}

/// The driver may end a command while its R2T is outstanding, or while its memory is awaited.
#[test]
fn a_driver_may_end_a_command_at_any_time() {
    for step in 0..4 {
        let mut lab = manual(&OPEN);
        let (itt, _) = write(&mut lab, 4096, &[], true);
        let tag = arrived(&mut lab);
        if step > 0 {
            lab.target.admit(tag, 4096);
        }
        if step > 1 {
            grant(&mut lab);
        }
        if step > 2 {
            data(&mut lab, itt, 1, 0, 0, true, &pattern(4096));
        }
        lab.target.complete(tag, &CommandOutcome::status(0x28, &[]));
        lab.act();
        assert!(lab.actions.len() <= 1, "nothing more comes about it: {:?}", lab.actions);
        let mut got = lab.pump();
        if step == 2 {
            assert_eq!(r2t(&got[0]).3, 4096);
            assert_eq!(got.len(), 1, "its data is awaited");
            got = data(&mut lab, itt, 1, 0, 0, true, &pattern(4096));
        }
        got.retain(|p| p.opcode() != Opcode::R2t);
        assert_eq!((got.len(), got[0].header[3]), (1, 0x28), "step {step}");
    }
}

/// RFC 7143 7: data that stays away. The initiator gets an answer, and late data is dropped.
#[test]
fn missing_data_fails_the_command() {
    let mut lab = lab(&OPEN);
    let (itt, got) = write(&mut lab, 2048, &[], true);
    let ttt = r2t(&got[0]).0;
    lab.wait(9);
    let alive = lab.initiator.pong(u32::MAX);
    for _ in 0..2 {
        lab.wait(9);
        lab.say(&alive);
    }
    data(&mut lab, itt, ttt, 0, 0, false, &pattern(1024));
    lab.wait(9);
    lab.say(&alive);
    lab.wait(9);
    lab.say(&alive);
    lab.wait(9);
    lab.say(&alive);
    assert!(lab.wait(2).is_empty());
    failed(&lab.wait(1), 0x4b, 0x06);
    assert!(data(&mut lab, itt, ttt, 1, 1024, true, &pattern(1024)).is_empty());
    assert_eq!(lab.closed, None);
}

/// What was written is what was sent, whatever the portions and the lengths.
#[test]
fn writes_in_any_portions() {
    for portions in [Portions::Bytes(1), Portions::Bytes(13), Portions::Random(5)] {
        let mut lab = Harness { portions, ..lab(&OPEN) };
        let bytes = pattern(10_240);
        let (itt, _) = write(&mut lab, 10_240, &bytes[..1001], false);
        data(&mut lab, itt, NO_TAG, 0, 1001, true, &bytes[1001..8192]);
        good(&data(&mut lab, itt, 1, 0, 8192, true, &bytes[8192..]));
        assert_eq!(written(&lab, 10_240), bytes);
    }
}
