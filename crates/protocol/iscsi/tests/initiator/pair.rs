//! An initiator and our own target, byte by byte.

use std::sync::Arc;
use std::time::Duration;

use frame::Machine;
use iscsi::initiator::{
    Answer, CloseReason, Command, CompletedRequest, Completion, Config, Connection, LoginNonce,
    LostRequest, Payload, Request, Residual,
};
use iscsi::params::Limits;
use iscsi::testing::{BLOCK, Driver};
use iscsi::{Digests, Tag, target};
use proptest::prelude::*;
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};

pub(crate) fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 512 + seed * 7) as u8).collect()
}

pub(crate) fn fresh() -> LoginNonce {
    LoginNonce { challenge: [0x5c; 32], id: 9 }
}

pub(crate) fn config() -> Config {
    let [initiator, target] = ["host", "disk"].map(|n| format!("iqn.2026-01.com.example:{n}"));
    Config::new(initiator.parse().unwrap(), Some(target.parse().unwrap()), [0x80, 1, 2, 3, 0, 0])
}

/// READ (10) and WRITE (10), which is all that the driver knows.
pub(crate) fn cdb(opcode: u8, at: usize, blocks: usize) -> [u8; 16] {
    let [a, b, c, d] = u32::try_from(at).unwrap().to_be_bytes();
    let [e, f] = u16::try_from(blocks).unwrap().to_be_bytes();
    [opcode, 0, a, b, c, d, 0, e, f, 0, 0, 0, 0, 0, 0, 0]
}

pub(crate) fn scsi(cdb: [u8; 16], payload: Payload) -> Command {
    Command { request: Request::Scsi { lun: [0; 8], cdb, payload }, timeout: None }
}

pub(crate) fn completion(done: &CompletedRequest) -> &Completion {
    match done.outcome.as_ref().expect("an answer") {
        Answer::Scsi(completion) => completion,
        other => panic!("{other:?}"),
    }
}

/// Both ends of a connection.
pub(crate) struct Pair {
    pub(crate) host: Connection,
    pub(crate) target: target::Connection,
    pub(crate) driver: Driver,
    pub(crate) done: Vec<CompletedRequest>,
    /// The target's actions are left undone.
    pub(crate) manual: Vec<target::Action>,
    pub(crate) is_manual: bool,
}

impl Pair {
    pub(crate) fn new(host: Config, target: target::Config) -> Self {
        Self {
            host: Connection::new(Arc::new(host), fresh()),
            target: target::Connection::new(Arc::new(target)),
            driver: Driver::new(4096, 32 << 20),
            done: Vec::new(),
            manual: Vec::new(),
            is_manual: false,
        }
    }

    pub(crate) fn logged_in(host: Config, target: target::Config) -> Self {
        let mut pair = Self::new(host, target);
        pair.pump(&mut || usize::MAX);
        assert_eq!(pair.host.close_reason(), None);
        assert!(pair.host.params().is_some() && pair.host.free_command_slots() > 0);
        pair
    }

    /// Carries bytes to and fro until neither end has something to say.
    pub(crate) fn pump(&mut self, portion: &mut dyn FnMut() -> usize) {
        self.carry(usize::MAX, usize::MAX, portion);
    }

    /// The same, up to so many bytes each way.
    pub(crate) fn carry(
        &mut self,
        mut out: usize,
        mut back: usize,
        portion: &mut dyn FnMut() -> usize,
    ) {
        loop {
            let mut sent = take_up_to(&mut self.host, out, portion);
            out -= sent.len();
            let quiet = sent.is_empty();
            while !sent.is_empty() || self.act() {
                let Some(space) = self.target.receive_space() else {
                    if self.act() || take_all(&mut self.target, &mut self.host, &mut back, portion)
                    {
                        continue;
                    }
                    break;
                };
                let n = portion().clamp(1, space.len()).min(sent.len());
                if n == 0 {
                    break;
                }
                space[..n].copy_from_slice(&sent[..n]);
                self.target.on_received(n);
                sent.drain(..n);
            }
            self.act();
            let answered = take_all(&mut self.target, &mut self.host, &mut back, portion);
            self.done.extend(std::iter::from_fn(|| self.host.poll_done()));
            if quiet && !answered {
                return;
            }
        }
    }

    fn act(&mut self) -> bool {
        let mut any = false;
        while let Some(action) = self.target.poll_action() {
            any = true;
            if self.is_manual {
                self.manual.push(action);
            } else {
                self.driver.act(action, &mut self.target);
            }
        }
        any
    }

    /// One request, to its end.
    pub(crate) fn call(&mut self, command: Command) -> CompletedRequest {
        let tag = self.host.submit(command).expect("there is room");
        self.pump(&mut || usize::MAX);
        let at = self.done.iter().position(|d| d.tag == tag).expect("it is answered");
        self.done.remove(at)
    }
}

fn take_up_to(conn: &mut Connection, most: usize, portion: &mut dyn FnMut() -> usize) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < most && !conn.output().is_empty() {
        let queue = conn.output();
        let n = portion().clamp(1, queue.len()).min(most - out.len());
        let flat: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).take(n).collect();
        queue.advance(n);
        out.extend(flat);
    }
    out
}

fn take_all(
    target: &mut target::Connection,
    host: &mut Connection,
    most: &mut usize,
    portion: &mut dyn FnMut() -> usize,
) -> bool {
    let mut answer = take(target, portion);
    answer.truncate(*most);
    *most -= answer.len();
    feed(host, &answer, portion);
    !answer.is_empty()
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: usize, blocks: usize },
    Read { at: usize, blocks: usize, more: usize },
    Ready,
    Outside,
    Unknown,
}

/// Blocks that each of the commands in flight at once has to itself.
const SHARE: usize = 512;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0usize..200, prop_oneof![4 => 1usize..24, 1 => 1usize..300]);
    prop_oneof![
        4 => range().prop_map(|(at, blocks)| Step::Write { at, blocks }),
        4 => (range(), prop_oneof![3 => Just(0usize), 1 => 0usize..3000])
            .prop_map(|((at, blocks), more)| Step::Read { at, blocks, more }),
        1 => Just(Step::Ready),
        1 => Just(Step::Outside),
        1 => Just(Step::Unknown),
    ]
}

/// What a command is to come to: status, sense key, bytes moved, residual, data.
#[derive(Debug)]
struct Expected {
    status: u8,
    key: Option<u8>,
    moved: u32,
    residual: Residual,
    data: Option<Vec<u8>>,
}

const GOOD: Expected =
    Expected { status: 0, key: None, moved: 0, residual: Residual::None, data: None };

/// The command of a step in the share of `place`, and what becomes of it and of `model`.
fn command(
    step: &Step,
    place: usize,
    model: &mut [u8],
    memory: &PayloadMemory,
) -> (Command, Expected) {
    let here = |at: usize| place * SHARE + at;
    let span = |at: usize, blocks: usize| here(at) * BLOCK..(here(at) + blocks) * BLOCK;
    match *step {
        Step::Write { at, blocks } => {
            let data = pattern(at ^ blocks, blocks * BLOCK);
            model[span(at, blocks)].copy_from_slice(&data);
            let expected = Expected { moved: (blocks * BLOCK) as u32, ..GOOD };
            let data = Payload::ToTarget(memory.holding(&data));
            (scsi(cdb(0x2a, here(at), blocks), data), expected)
        }
        Step::Read { at, blocks, more } => {
            let data = Some(model[span(at, blocks)].to_vec());
            let moved = (blocks * BLOCK) as u32;
            let residual = if more > 0 { Residual::Under(more as u32) } else { Residual::None };
            let room = Payload::ToHost(memory.room(blocks * BLOCK + more));
            let expected = Expected { moved, residual, data, ..GOOD };
            (scsi(cdb(0x28, here(at), blocks), room), expected)
        }
        Step::Ready => (scsi([0; 16], Payload::None), GOOD),
        Step::Outside => {
            let room = Payload::ToHost(memory.room(4096));
            let expected =
                Expected { status: 2, key: Some(5), residual: Residual::Under(4096), ..GOOD };
            (scsi(cdb(0x28, 5000, 8), room), expected)
        }
        Step::Unknown => {
            let expected = Expected { status: 2, key: Some(5), ..GOOD };
            (scsi([0x99; 16], Payload::None), expected)
        }
    }
}

/// Limits of either side.
fn limits() -> impl Strategy<Value = Limits> {
    let length = || prop::sample::select(vec![512u32, 1000, 4096, 8192, 65_536, 1 << 20]);
    (length(), length(), length(), 1u16..4, any::<bool>(), any::<bool>()).prop_map(
        |(
            max_segment,
            max_burst,
            first_burst,
            max_outstanding_r2t,
            initial_r2t,
            immediate_data,
        )| {
            let first_burst = first_burst.min(max_burst);
            Limits {
                max_segment,
                max_burst,
                first_burst,
                max_outstanding_r2t,
                initial_r2t,
                immediate_data,
            }
        },
    )
}

fn configs() -> impl Strategy<Value = (Config, target::Config)> {
    let digests =
        (any::<bool>(), any::<bool>()).prop_map(|(header, data)| Digests { header, data });
    let host = (digests, limits()).prop_map(|(digests, limits)| Config {
        digests,
        limits,
        max_in_flight: 8,
        ..config()
    });
    let target = (limits(), 1u32..12).prop_map(|(limits, window)| target::Config {
        limits,
        window,
        ..target::Config::default()
    });
    (host, target)
}

/// Submits one command for each step, all at once, and sees them end as they are to.
fn batch(
    pair: &mut Pair,
    steps: &[Step],
    model: &mut [u8],
    memory: &PayloadMemory,
    portion: &mut dyn FnMut() -> usize,
) {
    let mut expected: Vec<(Tag, Expected)> = Vec::new();
    for (place, step) in steps.iter().enumerate() {
        let (command, expect) = command(step, place, model, memory);
        expected.push((pair.host.submit(command).unwrap(), expect));
    }
    pair.pump(portion);
    let state = (pair.host.close_reason(), pair.host.in_flight(), pair.done.len());
    assert_eq!(state, (None, 0, expected.len()));
    for done in pair.done.drain(..) {
        let at = expected.iter().position(|(tag, _)| *tag == done.tag).expect("answered once");
        let (_, expect) = expected.swap_remove(at);
        let got = completion(&done);
        let key = got.sense.get(2).copied();
        assert_eq!((got.response, got.status, key), (0, expect.status, expect.key));
        assert_eq!((done.transferred, got.residual), (expect.moved, expect.residual));
        if let Some(data) = expect.data {
            let read = flat(&done.buffers);
            assert!(read[..data.len()] == data, "a read returns what was written");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_give_the_same_as_memory(
        (host, target) in configs(),
        batches in prop::collection::vec(prop::collection::vec(step(), 1..8), 1..5),
        cuts in prop::collection::vec(prop_oneof![1usize..90, 1usize..20_000], 1..40),
    ) {
        let memory = PayloadMemory::new();
        let mut pair = Pair::logged_in(host, target);
        let mut model = pair.driver.disk.clone();
        let mut at = 0;
        let mut portion = || {
            at += 1;
            cuts[at % cuts.len()]
        };
        for steps in &batches {
            batch(&mut pair, steps, &mut model, &memory, &mut portion);
        }
        prop_assert!(pair.driver.disk == model, "what was written");
        let (mut ours, theirs) = (pair.host.params().unwrap().clone(), pair.target.params());
        // What each thinks of times is its own.
        (ours.time2wait, ours.time2retain) = (theirs.time2wait, theirs.time2retain);
        prop_assert_eq!(&ours, theirs, "both sides have agreed on the same");
    }

    /// Whenever a connection is cut, each command ends once; what was not sent has not been done.
    #[test]
    fn a_cut_at_any_byte_ends_each_command_once(
        (host, target) in configs(),
        steps in prop::collection::vec(step(), 1..8),
        out in 0usize..60_000,
        back in 0usize..60_000,
    ) {
        let memory = PayloadMemory::new();
        let mut pair = Pair::logged_in(host, target);
        let before = pair.driver.disk.clone();
        let mut model = before.clone();
        let mut tags = Vec::new();
        for (place, step) in steps.iter().enumerate() {
            let (command, _) = command(step, place, &mut model, &memory);
            tags.push(pair.host.submit(command).unwrap());
        }
        pair.carry(out, back, &mut || usize::MAX);
        pair.host.close();
        pair.done.extend(std::iter::from_fn(|| pair.host.poll_done()));
        prop_assert!(pair.host.output().is_empty() && pair.host.receive_space().is_none());
        prop_assert_eq!(pair.host.close_reason(), Some(CloseReason::Closed));
        prop_assert_eq!((pair.done.len(), pair.host.in_flight()), (tags.len(), 0));
        for (place, tag) in tags.into_iter().enumerate() {
            let ended: Vec<&CompletedRequest> = pair.done.iter().filter(|d| d.tag == tag).collect();
            prop_assert_eq!(ended.len(), 1, "each once");
            if matches!(ended[0].outcome, Err(LostRequest::Unsent)) {
                let share = place * SHARE * BLOCK..(place + 1) * SHARE * BLOCK;
                prop_assert!(pair.driver.disk[share.clone()] == before[share], "not done");
            }
        }
    }
}

/// RFC 7143 4.2.2.1: what the target's window has no room for waits, and goes when it has.
#[test]
fn clause_4_2_2_1_commands_wait_for_the_window() {
    let target = target::Config { window: 2, ..target::Config::default() };
    let mut pair = Pair::logged_in(config(), target);
    for _ in 0..20 {
        pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
    }
    pair.is_manual = true;
    pair.pump(&mut || usize::MAX);
    assert_eq!((pair.manual.len(), pair.target.outstanding()), (2, 2));
    pair.is_manual = false;
    for action in std::mem::take(&mut pair.manual) {
        pair.driver.act(action, &mut pair.target);
    }
    pair.pump(&mut || usize::MAX);
    assert_eq!((pair.done.len(), pair.host.in_flight()), (20, 0));
}

/// A tag is not another command's before the last one is over, and its task tag is new each time.
#[test]
fn task_tags_are_new_each_time() {
    let mut pair = Pair::logged_in(config(), target::Config::default());
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let tag = pair.host.submit(scsi([0; 16], Payload::None)).unwrap();
        let sent = take(&mut pair.host, &mut || usize::MAX);
        let itt = u32::from_be_bytes(sent[16..20].try_into().unwrap());
        assert!(seen.insert(itt) && itt != u32::MAX);
        let space = pair.target.receive_space().unwrap();
        space[..48].copy_from_slice(&sent);
        pair.target.on_received(48);
        pair.pump(&mut || usize::MAX);
        assert_eq!(pair.done.pop().unwrap().tag, tag);
    }
    assert_eq!(pair.host.next_timer(), Some(Duration::from_secs(5)), "it listens for silence");
}
