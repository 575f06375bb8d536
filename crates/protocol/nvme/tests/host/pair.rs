//! A host and our own controller, byte by byte.

use frame::Machine;
use nvme::entry::NvmOpcode;
use nvme::fabrics::Property;
use nvme::host::{Command, CompletedCommand, Config, Connection, LostCommand, Payload};
use nvme::{Completion, Digests, Sqe, Status, Tag};
use proptest::prelude::*;
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};
use zerocopy::IntoBytes;

use crate::common::driver::Target;
use crate::common::{BLOCKS, connect, pattern, rw};

/// One queue, both ends.
pub(crate) struct Pair {
    pub(crate) host: Connection,
    pub(crate) link: usize,
    pub(crate) done: Vec<CompletedCommand>,
}

impl Pair {
    pub(crate) fn new(target: &mut Target, host: Config, controller: nvme::Config) -> Self {
        let link = target.open_with(controller);
        Self { host: Connection::new(host), link, done: Vec::new() }
    }

    /// Carries bytes to and fro until neither end has something to say.
    pub(crate) fn pump(&mut self, target: &mut Target, portion: &mut dyn FnMut() -> usize) {
        loop {
            let sent = take(&mut self.host, portion);
            target.feed(self.link, &sent, portion);
            let back = target.take(self.link, portion);
            feed(&mut self.host, &back, portion);
            self.done.extend(std::iter::from_fn(|| self.host.poll_done()));
            if sent.is_empty() && back.is_empty() {
                return;
            }
        }
    }

    /// One command, to its end.
    pub(crate) fn call(
        &mut self,
        target: &mut Target,
        sqe: Sqe,
        payload: Payload,
    ) -> CompletedCommand {
        self.pump(target, &mut || usize::MAX);
        let tag = self.host.submit(Command { sqe, payload, timeout: None }).expect("there is room");
        self.pump(target, &mut || usize::MAX);
        let at = self.done.iter().position(|d| d.tag == tag).expect("it is answered");
        self.done.remove(at)
    }
}

fn ok(done: &CompletedCommand) -> Completion {
    let completion = done.outcome.expect("an answer");
    assert!(completion.status.is_success(), "{done:?}");
    completion
}

/// An association: admin queue and an I/O queue.
fn associate(
    target: &mut Target,
    memory: &PayloadMemory,
    host: Config,
    controller: nvme::Config,
    flow_control: bool,
) -> (Pair, Pair) {
    let mut pairs = Vec::new();
    let mut cntlid = 0;
    for qid in 0..2 {
        let mut pair = Pair::new(target, host, controller);
        let command = nvme::Connect { flow_control, ..connect(qid, cntlid) };
        let (sqe, data) = command.encode(0);
        let data = Payload::ToController(memory.holding(data.as_bytes()));
        cntlid = ok(&pair.call(target, sqe, data)).result as u16;
        if qid == 0 {
            let enable = Property::encode(0, 0x14, false, Some(0x0046_0001));
            ok(&pair.call(target, enable, Payload::None));
        }
        pairs.push(pair);
    }
    let io = pairs.pop().unwrap();
    (pairs.pop().unwrap(), io)
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, blocks: u32 },
    Read { at: u64, blocks: u32 },
    Compare { at: u64, blocks: u32, alike: bool },
    Zero { at: u64, blocks: u32 },
    Deallocate { at: u64, blocks: u32 },
    Verify { at: u64, blocks: u32 },
    Flush,
    Outside,
}

/// Blocks that each of the commands in flight at once has to itself.
const SHARE: u64 = BLOCKS / 8;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0u64..100, prop_oneof![4 => 1u32..24, 1 => 1u32..300]);
    prop_oneof![
        3 => range().prop_map(|(at, blocks)| Step::Write { at, blocks }),
        3 => range().prop_map(|(at, blocks)| Step::Read { at, blocks }),
        1 => (range(), any::<bool>())
            .prop_map(|((at, blocks), alike)| Step::Compare { at, blocks, alike }),
        1 => range().prop_map(|(at, blocks)| Step::Zero { at, blocks }),
        1 => range().prop_map(|(at, blocks)| Step::Deallocate { at, blocks }),
        1 => range().prop_map(|(at, blocks)| Step::Verify { at, blocks }),
        1 => Just(Step::Flush),
        1 => Just(Step::Outside),
    ]
}

/// What a command is to come to.
#[derive(Debug)]
struct Expected {
    status: Status,
    moved: u32,
    data: Option<Vec<u8>>,
}

fn of(status: Status) -> Expected {
    Expected { status, moved: 0, data: None }
}

/// The command of a step in the share of `place`, and what becomes of it and of `model`.
fn command(
    step: &Step,
    place: u64,
    model: &mut [u8],
    memory: &PayloadMemory,
) -> (Sqe, Payload, Expected) {
    let here = |at: u64| place * SHARE + at;
    let span = |at: u64, blocks: u32| {
        let start = here(at) as usize * 512;
        start..start + blocks as usize * 512
    };
    let without = |opcode, at, blocks| rw(opcode, 0, here(at), blocks);
    match *step {
        Step::Write { at, blocks } => {
            let data = pattern(at ^ u64::from(blocks), blocks as usize * 512);
            model[span(at, blocks)].copy_from_slice(&data);
            let expected = Expected { moved: blocks * 512, ..of(Status::SUCCESS) };
            let data = Payload::ToController(memory.holding(&data));
            (rw(NvmOpcode::Write, 0, here(at), blocks), data, expected)
        }
        Step::Read { at, blocks } => {
            let data = Some(model[span(at, blocks)].to_vec());
            let expected = Expected { status: Status::SUCCESS, moved: blocks * 512, data };
            let room = Payload::ToHost(memory.room(blocks as usize * 512));
            (rw(NvmOpcode::Read, 0, here(at), blocks), room, expected)
        }
        Step::Compare { at, blocks, alike } => {
            let mut data = model[span(at, blocks)].to_vec();
            data[0] ^= u8::from(!alike);
            let status = if alike { Status::SUCCESS } else { Status::COMPARE_FAILURE };
            let expected = Expected { moved: blocks * 512, ..of(status) };
            let data = Payload::ToController(memory.holding(&data));
            (rw(NvmOpcode::Compare, 0, here(at), blocks), data, expected)
        }
        Step::Zero { at, blocks } => {
            model[span(at, blocks)].fill(0);
            (without(NvmOpcode::WriteZeroes, at, blocks), Payload::None, of(Status::SUCCESS))
        }
        Step::Verify { at, blocks } => {
            (without(NvmOpcode::Verify, at, blocks), Payload::None, of(Status::SUCCESS))
        }
        Step::Deallocate { at, blocks } => {
            model[span(at, blocks)].fill(0);
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&blocks.to_le_bytes());
            range[8..].copy_from_slice(&here(at).to_le_bytes());
            let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, 1);
            sqe.cdw10[1] = 4.into();
            let expected = Expected { moved: 16, ..of(Status::SUCCESS) };
            (sqe, Payload::ToController(memory.holding(&range)), expected)
        }
        Step::Flush => (Sqe::new(NvmOpcode::Flush.0, 0, 1), Payload::None, of(Status::SUCCESS)),
        Step::Outside => {
            let room = Payload::ToHost(memory.room(4096));
            (rw(NvmOpcode::Read, 0, BLOCKS, 8), room, of(Status::LBA_OUT_OF_RANGE))
        }
    }
}

fn configs() -> impl Strategy<Value = (Config, nvme::Config, bool)> {
    let digests =
        (any::<bool>(), any::<bool>()).prop_map(|(header, data)| Digests { header, data });
    let host = (digests, prop::sample::select(vec![0u8, 3, 31]), 1u32..3);
    let host = (host, prop::sample::select(vec![0u32, 4096, 16384])).prop_map(
        |((digests, alignment, r2ts), in_capsule_bytes)| Config {
            max_in_flight: 8,
            digests,
            alignment,
            max_r2ts: r2ts,
            in_capsule_bytes,
            ..Config::default()
        },
    );
    let most = || prop::sample::select(vec![4096u32, 8192, 1 << 20]);
    let controller = (most(), most()).prop_map(|(max_h2c_data, max_c2h_data)| nvme::Config {
        max_h2c_data,
        max_c2h_data,
        ..nvme::Config::default()
    });
    (host, controller, any::<bool>())
}

/// Submits one command for each step, all at once, and sees them end as they are to.
fn batch(
    io: &mut Pair,
    target: &mut Target,
    steps: &[Step],
    model: &mut [u8],
    memory: &PayloadMemory,
    portion: &mut dyn FnMut() -> usize,
) {
    let mut expected: Vec<(Tag, Expected)> = Vec::new();
    for (place, step) in (0..).zip(steps) {
        let (sqe, payload, expect) = command(step, place, model, memory);
        let tag = io.host.submit(Command { sqe, payload, timeout: None }).unwrap();
        expected.push((tag, expect));
    }
    io.pump(target, portion);
    assert_eq!(
        (io.host.close_reason(), io.host.in_flight(), io.done.len()),
        (None, 0, expected.len())
    );
    for done in io.done.drain(..) {
        let at = expected.iter().position(|(tag, _)| *tag == done.tag).expect("answered once");
        let (_, expect) = expected.swap_remove(at);
        let status = done.outcome.expect("an answer").status.code();
        assert_eq!((status, done.transferred), (expect.status, expect.moved));
        if let Some(data) = expect.data {
            assert!(flat(&done.buffers) == data, "a read returns what was written");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_give_the_same_as_memory(
        (host, controller, flow_control) in configs(),
        batches in prop::collection::vec(prop::collection::vec(step(), 1..8), 1..5),
        cuts in prop::collection::vec(prop_oneof![1usize..90, 1usize..20_000], 1..40),
    ) {
        let (mut target, memory) = (Target::default(), PayloadMemory::new());
        let (_admin, mut io) = associate(&mut target, &memory, host, controller, flow_control);
        let mut model = vec![0; BLOCKS as usize * 512];
        let mut at = 0;
        let mut portion = || {
            at += 1;
            cuts[at % cuts.len()]
        };
        for steps in &batches {
            batch(&mut io, &mut target, steps, &mut model, &memory, &mut portion);
        }
        prop_assert!(target.disk == model, "what was written");
        let agreed = io.host.digests().unwrap();
        prop_assert_eq!(target.conn(io.link).digests(), (agreed.header, agreed.data));
    }

    /// Whenever a connection is cut, each command ends once; what was not sent has not been done.
    #[test]
    fn a_cut_at_any_byte_ends_each_command_once(
        (host, controller, flow_control) in configs(),
        steps in prop::collection::vec(step(), 1..8),
        bytes_out in 0usize..60_000,
        bytes_in in 0usize..60_000,
    ) {
        let (mut target, memory) = (Target::default(), PayloadMemory::new());
        let (_admin, mut io) = associate(&mut target, &memory, host, controller, flow_control);
        let mut model = vec![0; BLOCKS as usize * 512];
        let mut tags = Vec::new();
        for (place, step) in (0..).zip(&steps) {
            let (sqe, payload, _) = command(step, place, &mut model, &memory);
            tags.push(io.host.submit(Command { sqe, payload, timeout: None }).unwrap());
        }
        let (mut out, mut back) = (bytes_out, bytes_in);
        loop {
            let queue = io.host.output();
            let mut sent: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
            sent.truncate(out);
            out -= sent.len();
            queue.advance(sent.len());
            target.feed(io.link, &sent, &mut || usize::MAX);
            let mut answer = target.take(io.link, &mut || usize::MAX);
            answer.truncate(back);
            back -= answer.len();
            feed(&mut io.host, &answer, &mut || usize::MAX);
            if sent.is_empty() && answer.is_empty() {
                break;
            }
        }
        io.host.close();
        io.done.extend(std::iter::from_fn(|| io.host.poll_done()));
        prop_assert!(io.host.output().is_empty() && io.host.receive_space().is_none());
        prop_assert_eq!((io.done.len(), io.host.in_flight()), (tags.len(), 0));
        for (place, tag) in tags.into_iter().enumerate() {
            let of_tag: Vec<_> = io.done.iter().filter(|d| d.tag == tag).collect();
            prop_assert_eq!(of_tag.len(), 1);
            let share = place * SHARE as usize * 512..(place + 1) * SHARE as usize * 512;
            if of_tag[0].outcome == Err(LostCommand::Unsent) {
                prop_assert!(target.disk[share].iter().all(|b| *b == 0), "it was never sent");
            }
        }
    }
}
