//! Both machines, byte by byte, against an export in memory.

use crate::common::{BYTES, Served, config, export};
use frame::Machine;
use nbd::client::{CloseReason, CommandError, CompletedCommand, Config, Connection, Op, Reply};
use nbd::message::flag;
use nbd::{BlockStatusExtent, Errno, server};
use proptest::prelude::*;
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};

struct Pair {
    client: Connection,
    server: Served,
    done: Vec<CompletedCommand>,
}

impl Pair {
    fn new(client: Config, server: server::Config) -> Self {
        Self { client: Connection::new(client), server: Served::new(server), done: Vec::new() }
    }

    /// Carries bytes to and fro until neither end has something to say.
    fn pump(&mut self, portion: &mut dyn FnMut() -> usize) {
        loop {
            let sent = take(&mut self.client, portion);
            self.server.feed(&sent, portion);
            let back = self.server.take(portion);
            let n = feed(&mut self.client, &back, portion);
            assert!(n == back.len() || self.client.is_closing(), "a client takes all");
            self.done.extend(std::iter::from_fn(|| self.client.poll_done()));
            if sent.is_empty() && back.is_empty() {
                return;
            }
        }
    }

    fn call(&mut self, op: Op) -> Result<Reply, CommandError> {
        let tag = self.client.submit(op, None).expect("there is room");
        self.pump(&mut || usize::MAX);
        let at = self.done.iter().position(|d| d.tag == tag).expect("it is answered");
        self.done.remove(at).outcome
    }
}

fn done(outcome: &Result<Reply, CommandError>) {
    assert!(matches!(outcome, Ok(Reply::Done)), "{outcome:?}");
}

fn agreed(structured: bool) -> Pair {
    let client = Config { structured, ..Config::new("disk") };
    let mut pair = Pair::new(client, config(&[export("disk")]));
    pair.pump(&mut || usize::MAX);
    pair
}

#[test]
fn negotiated_parameters_match_the_server() {
    for structured in [false, true] {
        let pair = agreed(structured);
        let agreed = *pair.client.negotiated().unwrap();
        assert_eq!(
            (agreed.bytes, agreed.size_constraints),
            (BYTES, export("disk").size_constraints)
        );
        assert_eq!((agreed.structured, agreed.block_status), (structured, structured));
        assert_eq!(agreed.transmission_flags, export("disk").transmission_flags(structured));
        assert!(agreed.transmission_flags.has(flag::CAN_MULTI_CONN));
    }
}

#[test]
fn commands_do_what_they_say() {
    for structured in [false, true] {
        let mut pair = agreed(structured);
        let data = vec![7; 5 * 512];
        let written = pair.server.memory.holding(&data);
        done(&pair.call(Op::Write { at: 1024, data: written, fua: true }));
        done(&pair.call(Op::Flush));
        done(&pair.call(Op::WriteZeroes { at: 1024, len: 512, hole: false, fua: true }));
        done(&pair.call(Op::Trim { at: 1536, len: 512 }));
        let buffers = pair.server.memory.room(6 * 512);
        let Ok(Reply::Data(read)) = pair.call(Op::Read { at: 512, buffers }) else { panic!() };
        let expected = [vec![0; 1536], vec![7; 1536]].concat();
        assert_eq!(flat(&read), expected);
        if structured {
            let outcome = pair.call(Op::BlockStatus { at: 1024, len: 2048 });
            let extent = BlockStatusExtent { bytes: 512, hole: false, zero: false };
            assert!(matches!(outcome, Ok(Reply::Extent(e)) if e == extent), "{outcome:?}");
        }
        pair.server.fails = Some(Errno::NoSpc);
        assert_eq!(pair.call(Op::Flush).unwrap_err(), CommandError::Error(Errno::NoSpc));
        let buffers = pair.server.memory.room(512);
        let failed = pair.call(Op::Read { at: 0, buffers }).unwrap_err();
        assert_eq!(failed, CommandError::Error(Errno::NoSpc));
        pair.client.close();
        pair.pump(&mut || usize::MAX);
        assert_eq!(pair.server.machine.close_reason(), Some(server::CloseReason::Disconnected));
        assert!(pair.server.machine.is_closing() && pair.client.is_closing());
    }
}

#[test]
fn an_unknown_export_is_refused() {
    let mut pair = Pair::new(Config::new("other"), config(&[export("disk")]));
    pair.pump(&mut || usize::MAX);
    assert_eq!(
        pair.client.close_reason(),
        Some(CloseReason::Refused(nbd::message::Rep::ErrUnknown))
    );
    assert_eq!(pair.server.machine.close_reason(), Some(server::CloseReason::Aborted));
}

#[test]
fn a_server_that_shuts_down_answers_pending_requests_first() {
    let mut pair = agreed(true);
    pair.client.submit(Op::Flush, None).unwrap();
    pair.server.machine.shut_down();
    assert_eq!(
        pair.server.machine.close_reason(),
        Some(server::CloseReason::ShutDown),
        "it was idle"
    );
    let mut pair = agreed(true);
    let room = pair.server.memory.room(512);
    pair.client.submit(Op::Flush, None).unwrap();
    pair.client.submit(Op::Read { at: 0, buffers: room }, None).unwrap();
    let sent = take(&mut pair.client, &mut || usize::MAX);
    // The first half of a request is on its way.
    let n = feed(&mut pair.server.machine, &sent[..20], &mut || usize::MAX);
    pair.server.machine.shut_down();
    assert_eq!(pair.server.machine.close_reason(), None);
    pair.server.feed(&sent[n..], &mut || usize::MAX);
    let back = pair.server.take(&mut || usize::MAX);
    feed(&mut pair.client, &back, &mut || usize::MAX);
    let first = pair.client.poll_done().unwrap();
    assert_eq!(first.outcome.unwrap_err(), CommandError::Error(Errno::Shutdown));
    assert_eq!(pair.client.close_reason(), Some(CloseReason::ServerShutDown));
    assert_eq!(pair.client.poll_done().unwrap().outcome.unwrap_err(), CommandError::ConnectionLost);
}

/// Wherever the stream is cut, each command ends once.
#[test]
fn a_cut_at_any_byte_ends_each_command_once() {
    for cut in 0.. {
        let mut pair = agreed(true);
        let memory = PayloadMemory::new();
        let mut tags = Vec::new();
        for at in [0, 4096] {
            let data = memory.holding(&[3; 1024]);
            tags.push(pair.client.submit(Op::Write { at, data, fua: false }, None).unwrap());
            let buffers = memory.room(512);
            tags.push(pair.client.submit(Op::Read { at, buffers }, None).unwrap());
        }
        let sent = take(&mut pair.client, &mut || usize::MAX);
        let back = pair.server.exchange(&sent);
        let n = cut.min(back.len());
        feed(&mut pair.client, &back[..n], &mut || usize::MAX);
        pair.client.close();
        let ended: Vec<_> = std::iter::from_fn(|| pair.client.poll_done()).collect();
        for tag in &tags {
            assert_eq!(ended.iter().filter(|d| d.tag == *tag).count(), 1, "cut at {cut}");
        }
        assert_eq!(ended.len(), tags.len());
        if cut > back.len() {
            assert!(ended.iter().all(|d| d.outcome.is_ok()));
            return;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, blocks: usize, byte: u8, fua: bool },
    Read { at: u64, blocks: usize },
    Zero { at: u64, blocks: u32, hole: bool },
    Trim { at: u64, blocks: u32 },
    Status { at: u64, blocks: u32 },
    Flush,
    Pump,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0u64..64, 1usize..32);
    prop_oneof![
        3 => (range.clone(), any::<u8>(), any::<bool>())
            .prop_map(|((at, blocks), byte, fua)| Step::Write { at, blocks, byte, fua }),
        3 => range.clone().prop_map(|(at, blocks)| Step::Read { at, blocks }),
        1 => (range.clone(), any::<bool>())
            .prop_map(|((at, n), hole)| Step::Zero { at, blocks: n as u32, hole }),
        1 => range.clone().prop_map(|(at, n)| Step::Trim { at, blocks: n as u32 }),
        1 => range.prop_map(|(at, n)| Step::Status { at, blocks: n as u32 }),
        1 => Just(Step::Flush),
        2 => Just(Step::Pump),
    ]
}

/// What a command must have brought.
enum Expected {
    Done,
    Data(Vec<u8>),
    Mapped(bool),
}

/// Commands of one connection reach this server in order, so a model of what was submitted is
/// enough.
struct Model {
    disk: Vec<u8>,
    mapped: Vec<bool>,
    expected: Vec<(nbd::Tag, Expected)>,
}

impl Model {
    fn submit(&mut self, pair: &mut Pair, step: &Step, structured: bool) {
        if pair.client.free_slots() == 0 {
            return;
        }
        let span = |at: u64, blocks: usize| at as usize * 512..(at as usize + blocks) * 512;
        let (op, expected) = match *step {
            Step::Write { at, blocks, byte, fua } => {
                let data: Vec<u8> = (0..blocks * 512).map(|i| byte ^ (i % 251) as u8).collect();
                self.disk[span(at, blocks)].copy_from_slice(&data);
                self.mapped[at as usize..at as usize + blocks].fill(true);
                let data = pair.server.memory.holding(&data);
                (Op::Write { at: at * 512, data, fua }, Expected::Done)
            }
            Step::Read { at, blocks } => {
                let expected = self.disk[span(at, blocks)].to_vec();
                let buffers = pair.server.memory.room(blocks * 512);
                (Op::Read { at: at * 512, buffers }, Expected::Data(expected))
            }
            Step::Zero { at, blocks, hole } => {
                self.disk[span(at, blocks as usize)].fill(0);
                self.mapped[at as usize..at as usize + blocks as usize].fill(!hole);
                let len = blocks * 512;
                (Op::WriteZeroes { at: at * 512, len, hole, fua: false }, Expected::Done)
            }
            Step::Trim { at, blocks } => {
                self.disk[span(at, blocks as usize)].fill(0);
                self.mapped[at as usize..at as usize + blocks as usize].fill(false);
                (Op::Trim { at: at * 512, len: blocks * 512 }, Expected::Done)
            }
            Step::Status { at, blocks } if structured => {
                let op = Op::BlockStatus { at: at * 512, len: blocks * 512 };
                (op, Expected::Mapped(self.mapped[at as usize]))
            }
            Step::Status { .. } | Step::Flush => (Op::Flush, Expected::Done),
            Step::Pump => return,
        };
        let tag = pair.client.submit(op, None).expect("there is room");
        self.expected.push((tag, expected));
    }

    fn check(&mut self, pair: &mut Pair) {
        for ended in pair.done.drain(..) {
            let at = self.expected.iter().position(|(tag, _)| *tag == ended.tag).unwrap();
            let (_, expected) = self.expected.remove(at);
            match (expected, ended.outcome.unwrap()) {
                (Expected::Done, Reply::Done) => {}
                (Expected::Data(data), Reply::Data(read)) => assert_eq!(flat(&read), data),
                (Expected::Mapped(mapped), Reply::Extent(e)) => assert_eq!(e.hole, !mapped),
                (_, other) => panic!("{other:?}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_give_the_same_as_memory(
        structured in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
        portions in prop::collection::vec(1usize..3000, 1..20),
    ) {
        let mut portions = portions.into_iter().cycle();
        let mut portion = move || portions.next().unwrap();
        let client = Config { structured, ..Config::new("") };
        let mut pair = Pair::new(client, config(&[export("disk")]));
        pair.pump(&mut portion);
        let mut model = Model {
            disk: vec![0; BYTES as usize],
            mapped: vec![false; (BYTES / 512) as usize],
            expected: Vec::new(),
        };
        for step in &steps {
            model.submit(&mut pair, step, structured);
            if matches!(step, Step::Pump) {
                pair.pump(&mut portion);
                model.check(&mut pair);
            }
        }
        pair.pump(&mut portion);
        model.check(&mut pair);
        prop_assert!(model.expected.is_empty(), "each is answered");
        prop_assert_eq!(&pair.server.disk, &model.disk);
        prop_assert_eq!(pair.client.close_reason(), None);
    }
}
