//! Whatever an initiator does and however its bytes are cut: data is right, and the target says
//! the same.

use iscsi::pdu::{NO_TAG, Opcode, ScsiCommand, TaskFunction};
use iscsi::target::Config;
use iscsi::testing::{BLOCK, Harness, Pdu, Portions};
use proptest::prelude::*;

/// Blocks of the disk that are used.
const BLOCKS: usize = 256;

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Blocks `at` and `count`, share of the first burst that is immediate, whether the rest of
    /// the first burst follows unasked, and the longest Data-Out.
    Write {
        at: usize,
        count: usize,
        immediate: usize,
        unsolicited: bool,
        segment: usize,
    },
    /// Blocks `at` and `count`, and by how much another length is expected.
    Read {
        at: usize,
        count: usize,
        more: i32,
    },
    Ping {
        len: usize,
    },
    Text,
    Abort,
    Unknown {
        opcode: u8,
        len: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let write = (0..BLOCKS, 1..64usize, 0..8192usize, any::<bool>(), 1..9000usize).prop_map(
        |(at, count, immediate, unsolicited, segment)| Op::Write {
            at,
            count: count.min(BLOCKS - at),
            immediate,
            unsolicited,
            segment,
        },
    );
    let read = (0..BLOCKS, 1..64usize, -2000..2000i32).prop_map(|(at, count, more)| Op::Read {
        at,
        count: count.min(BLOCKS - at),
        more,
    });
    prop_oneof![
        4 => write,
        4 => read,
        1 => (0..10_000usize).prop_map(|len| Op::Ping { len }),
        1 => Just(Op::Text),
        1 => Just(Op::Abort),
        1 => (7..16u8, 0..300usize).prop_map(|(opcode, len)| Op::Unknown { opcode, len }),
    ]
}

fn cdb(opcode: u8, at: usize, count: usize) -> [u8; 10] {
    let [a, b, c, d] = (at as u32).to_be_bytes();
    let [e, f] = (count as u16).to_be_bytes();
    [opcode, 0, a, b, c, d, 0, e, f, 0]
}

/// Sends what an R2T, or the first burst, asks for.
fn send(
    lab: &mut Harness,
    itt: u32,
    ttt: u32,
    at: usize,
    bytes: &[u8],
    segment: usize,
) -> Vec<Pdu> {
    let mut got = Vec::new();
    let pieces = bytes.chunks(segment).count();
    for (i, piece) in bytes.chunks(segment).enumerate() {
        let offset = (at + i * segment) as u32;
        let pdu = lab.initiator.data_out(itt, ttt, i as u32, offset, i + 1 == pieces, piece);
        got.extend(lab.say(&pdu));
    }
    got
}

fn write(lab: &mut Harness, model: &mut [u8], seed: usize, op: Op) {
    let Op::Write { at, count, immediate, unsolicited, segment } = op else { return };
    let bytes: Vec<u8> = (0..count * BLOCK).map(|i| (i * 31 + seed) as u8).collect();
    let len = bytes.len();
    let params = lab.target.params().clone();
    let burst = (params.first_burst as usize).min(len);
    let immediate = if params.immediate_data { immediate.min(burst) } else { 0 };
    let unsolicited = unsolicited && !params.initial_r2t && immediate < burst;
    let mut header =
        lab.initiator.command_header(&cdb(0x2a, at, count), ScsiCommand::WRITE, len as u32);
    if unsolicited {
        header.flags &= 0x7f;
    }
    let itt = header.itt.get();
    let command = lab.initiator.frame(header.as_bytes(), &bytes[..immediate]);
    let mut got = lab.say(&command);
    if unsolicited {
        let rest = &bytes[immediate..burst];
        got.extend(send(lab, itt, NO_TAG, immediate, rest, segment));
    }
    let mut answer = None;
    while let Some(pdu) = got.pop() {
        match pdu.opcode() {
            Opcode::R2t => {
                let (at, len) = (pdu.word(40) as usize, pdu.word(44) as usize);
                assert!(len <= params.max_burst as usize);
                got.extend(send(lab, itt, pdu.word(20), at, &bytes[at..at + len], segment));
            }
            Opcode::ScsiResponse => answer = Some(pdu),
            other => panic!("{other:?}"),
        }
    }
    let answer = answer.expect("every command is answered");
    assert_eq!((answer.itt(), answer.header[1], answer.header[3]), (itt, 0x80, 0));
    model[at * BLOCK..at * BLOCK + len].copy_from_slice(&bytes);
}

fn read(lab: &mut Harness, model: &[u8], op: Op) {
    let Op::Read { at, count, more } = op else { return };
    let len = count * BLOCK;
    let expected = u32::try_from(len as i32 + more).unwrap_or(0);
    let command = lab.initiator.command(&cdb(0x28, at, count), ScsiCommand::READ, expected, &[]);
    let got = lab.say(&command);
    let data: Vec<u8> =
        got.iter().filter(|p| p.opcode() == Opcode::DataIn).flat_map(|p| p.data.clone()).collect();
    let end = len.min(expected as usize);
    assert_eq!(data, model[at * BLOCK..at * BLOCK + end]);
    let last = got.last().expect("every command is answered");
    assert_eq!((last.header[3], last.word(44)), (0, expected.abs_diff(len as u32)));
}

fn run_ops(lab: &mut Harness, ops: &[Op]) {
    let mut model = lab.driver.disk.clone();
    for (seed, &op) in ops.iter().enumerate() {
        match op {
            Op::Write { .. } => write(lab, &mut model, seed, op),
            Op::Read { .. } => read(lab, &model, op),
            Op::Ping { len } => {
                let ping = lab.initiator.ping(&vec![seed as u8; len]);
                assert_eq!(lab.say(&ping)[0].data.len(), len.min(8192));
            }
            Op::Text => {
                let text = lab.initiator.text(NO_TAG, &[("X-key", "1")]);
                assert_eq!(lab.say(&text)[0].opcode(), Opcode::TextResponse);
            }
            Op::Abort => {
                let abort = lab.initiator.task(TaskFunction::AbortTask, 0xdead, 0);
                assert_eq!(lab.say(&abort)[0].opcode(), Opcode::TaskResponse);
            }
            Op::Unknown { opcode, len } => {
                let mut header = [0; 48];
                header[0] = opcode;
                let bytes = lab.initiator.frame(&header, &vec![1; len]);
                assert_eq!(lab.say(&bytes)[0].opcode(), Opcode::Reject);
            }
        }
    }
    assert_eq!(lab.driver.disk, model);
    assert_eq!((lab.target.outstanding(), lab.closed), (0, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_portions_give_the_same(
        ops in prop::collection::vec(op(), 1..24),
        keys in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), 1..4u16, 512..9000u32),
        seed in any::<u64>(),
    ) {
        let (header, data, r2t, immediate, outstanding, burst) = keys;
        let digest = |on| if on { "CRC32C" } else { "None" };
        let yes = |on| if on { "Yes" } else { "No" };
        let (outstanding, burst) = (outstanding.to_string(), burst.to_string());
        let keys = [
            ("HeaderDigest", digest(header)),
            ("DataDigest", digest(data)),
            ("InitialR2T", yes(r2t)),
            ("ImmediateData", yes(immediate)),
            ("MaxOutstandingR2T", &outstanding),
            ("FirstBurstLength", "4096"),
            ("MaxBurstLength", &burst),
        ];
        let mut lab = Harness::new(Config::default());
        lab.log_in(&keys);
        run_ops(&mut lab, &ops);
        for portions in [Portions::Bytes(1 + (seed % 60) as usize), Portions::Random(seed)] {
            let mut again = Harness::new(Config::default());
            again.portions = portions;
            (again.initiator.header_digest, again.initiator.data_digest) = (false, false);
            for piece in lab.bytes_sent.chunks(10_000) {
                prop_assert_eq!(again.feed(piece), 0);
                again.collect();
            }
            prop_assert!(again.bytes_received == lab.bytes_received, "portions {:?}", portions);
            prop_assert!(again.driver.disk == lab.driver.disk);
        }
    }
}
