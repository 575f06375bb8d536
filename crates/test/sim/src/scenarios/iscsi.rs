//! An iSCSI client.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use iscsi::pdu::{FINAL, LoginStage, NO_TAG, Opcode, TaskFunction};
use iscsi::testing::{Pdu, ScriptedInitiator};
use rt::Core;
use rt::net::Stream;
use rt::sim::World;
use target::{AccessList, Catalog, IscsiTarget, Service, VolumeId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::file::FlushBehaviour;
use super::single_node::{self, InFlight, LogoutKind, ProtocolClient, ReceivedEvents};
use super::workload_model::{Completion, Op, PendingOperation, WorkloadModel};

const TARGET: &str = "iqn.2026-01.com.example:volume";

/// Bits of a command's second byte.
const READ: u8 = 0x40;
const WRITE: u8 = 0x20;

/// Statuses (SAM-5 5.3.1).
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;
const BUSY: u8 = 0x08;
const TASK_SET_FULL: u8 = 0x28;

/// Sense keys (SPC-4 4.5.6).
const UNIT_ATTENTION: u8 = 0x6;
const ABORTED_COMMAND: u8 = 0xb;
const MISCOMPARE: u8 = 0xe;

/// Runs a node that exports over iSCSI.
pub(crate) async fn run(world: World, flushes: FlushBehaviour) -> Result<(), String> {
    single_node::run::<IscsiClient>(world, flushes).await
}

/// The negotiated parameters.
#[derive(Clone, Copy, Debug)]
struct NegotiatedParameters {
    immediate: bool,
    initial_r2t: bool,
    first_burst: usize,
    /// Most data that the target takes in one PDU.
    segment: usize,
}

/// A task management request and the tasks that it aborts.
struct TaskManagementRequest {
    affected_tasks: Vec<u32>,
}

/// A session.
pub(super) struct IscsiClient {
    initiator: ScriptedInitiator,
    negotiated: NegotiatedParameters,
    model: Rc<WorkloadModel>,
    /// Command sequence numbers of tasks.
    command_numbers: BTreeMap<u32, u32>,
    requests: BTreeMap<u32, TaskManagementRequest>,
    logout: Option<u32>,
}

impl ProtocolClient for IscsiClient {
    const SERVICE: Service = Service::Iscsi;
    const HAS_COMPARE_AND_WRITE: bool = true;

    fn export(catalog: &mut Catalog, id: VolumeId) {
        let access = AccessList::open();
        let target = IscsiTarget { luns: [(1, id)].into(), access, ..IscsiTarget::default() };
        catalog.targets.insert(TARGET.to_owned(), target);
    }

    async fn connect(
        core: &Core,
        to: SocketAddr,
        client: u8,
        model: &Rc<WorkloadModel>,
    ) -> Option<(Self, Stream)> {
        let rng = &model.rng;
        let mut initiator = ScriptedInitiator::default();
        // Usually the same port as before; the login then takes over its session.
        initiator.isid[4] = u8::from(rng.chance(0.3));
        initiator.isid[5] = client;
        let yes_no = || if rng.chance(0.5) { "Yes" } else { "No" };
        let digest = || if rng.chance(0.5) { "CRC32C" } else { "None" };
        let first_burst = *rng.pick(&["512", "4096", "8192", "65536"]);
        let max_burst = *rng.pick(&["65536", "131072"]);
        let keys = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", TARGET),
            ("SessionType", "Normal"),
            ("HeaderDigest", digest()),
            ("DataDigest", digest()),
            ("ImmediateData", yes_no()),
            ("InitialR2T", yes_no()),
            ("MaxRecvDataSegmentLength", *rng.pick(&["512", "8192", "65536"])),
            ("FirstBurstLength", first_burst),
            ("MaxBurstLength", max_burst),
            ("MaxOutstandingR2T", *rng.pick(&["1", "4"])),
        ];
        let login = initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &keys);
        let mut stream = core.dial(to).await.ok()?;
        stream.write_all(&login).await.ok()?;
        let answer = first_pdu(&mut stream, &mut initiator).await?;
        if answer.opcode() != Opcode::LoginResponse || answer.header[36..38] != [0, 0] {
            return None;
        }
        let said = |key: &str| answer.value(key);
        let number = |key: &str, or: usize| said(key).and_then(|v| v.parse().ok()).unwrap_or(or);
        initiator.header_digest = said("HeaderDigest").is_some_and(|v| v == "CRC32C");
        initiator.data_digest = said("DataDigest").is_some_and(|v| v == "CRC32C");
        let agreed = NegotiatedParameters {
            immediate: said("ImmediateData").is_none_or(|v| v == "Yes"),
            initial_r2t: said("InitialR2T").is_none_or(|v| v == "Yes"),
            first_burst: number("FirstBurstLength", 65536),
            segment: number("MaxRecvDataSegmentLength", 8192),
        };
        let (numbers, requests) = (BTreeMap::new(), BTreeMap::new());
        let model = Rc::clone(model);
        Some((
            Self {
                initiator,
                negotiated: agreed,
                model,
                command_numbers: numbers,
                requests,
                logout: None,
            },
            stream,
        ))
    }

    fn port(&self) -> Option<u8> {
        // A session of the same port replaces the previous one (RFC 7143 6.3.5).
        Some(self.initiator.isid[4])
    }

    fn send_operation(&mut self, pending: &PendingOperation, out: &mut Vec<u8>) -> u32 {
        let (cdb, data) = self.command(pending);
        let tag = self.initiator.itt;
        self.command_numbers.insert(tag, self.initiator.cmd_sn);
        if pending.expected_len() > 0 || data.is_empty() {
            let (flags, len) =
                if pending.expected_len() > 0 { (READ, pending.expected_len()) } else { (0, 0) };
            out.extend(self.initiator.command(&cdb, flags, length(len), &[]));
        } else {
            self.write(tag, &cdb, &data, out);
        }
        tag
    }

    fn receive(&mut self, bytes: &[u8], open: &mut InFlight, out: &mut Vec<u8>) -> ReceivedEvents {
        let mut heard = ReceivedEvents::default();
        for pdu in self.initiator.receive(bytes) {
            self.handle_pdu(&pdu, open, out, &mut heard);
        }
        heard
    }

    fn issue_extra(&mut self, open: &InFlight, out: &mut Vec<u8>) {
        let rng = &Rc::clone(&self.model).rng;
        let tags: Vec<u32> = open.keys().copied().collect();
        let tag = *rng.pick(&tags);
        let (function, ends) = match rng.below(8) {
            0 => return out.extend(self.initiator.ping(b"are you there?")),
            1 => (TaskFunction::LogicalUnitReset, tags),
            2 => (TaskFunction::AbortTaskSet, tags),
            3 => (TaskFunction::ClearTaskSet, tags),
            _ => (TaskFunction::AbortTask, vec![tag]),
        };
        let (referenced, number) = match function {
            TaskFunction::AbortTask => (tag, self.command_numbers.get(&tag).copied().unwrap_or(0)),
            _ => (NO_TAG, 0),
        };
        self.requests.insert(self.initiator.itt, TaskManagementRequest { affected_tasks: ends });
        out.extend(self.initiator.task(function, referenced, number));
    }

    fn begin_logout(&mut self, out: &mut Vec<u8>) -> LogoutKind {
        self.logout = Some(self.initiator.itt);
        out.extend(self.initiator.logout(0, 0));
        LogoutKind::AwaitsResponse
    }
}

/// Receives the first PDU.
async fn first_pdu(stream: &mut Stream, initiator: &mut ScriptedInitiator) -> Option<Pdu> {
    let mut bytes = [0; 4096];
    loop {
        let n = stream.read(&mut bytes).await.ok().filter(|n| *n > 0)?;
        if let Some(pdu) = initiator.receive(&bytes[..n]).pop() {
            return Some(pdu);
        }
    }
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a small command")
}

/// READ(16), WRITE(16) and similar commands.
fn cdb16(opcode: u8, bits: u8, at: u64, blocks: u64) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, bits);
    cdb[2..10].copy_from_slice(&at.to_be_bytes());
    cdb[10..14].copy_from_slice(&length(usize::try_from(blocks).expect("small")).to_be_bytes());
    cdb
}

impl IscsiClient {
    /// The command for an operation, and its data.
    fn command(&self, pending: &PendingOperation) -> ([u8; 16], Vec<u8>) {
        const FUA: u8 = 0x08;
        const UNMAP: u8 = 0x08;
        const NDOB: u8 = 0x01;
        match &pending.op {
            Op::Read(r) => (cdb16(0x88, 0, r.at.0, r.count), Vec::new()),
            Op::ReadCounter => (cdb16(0x88, 0, 0, 1), Vec::new()),
            Op::Write { range: r, fua } => {
                let bits = if *fua { FUA } else { 0 };
                (cdb16(0x8a, bits, r.at.0, r.count), pending.data.clone())
            }
            Op::Zero { range: r, unmap } => {
                let bits = NDOB | if *unmap { UNMAP } else { 0 };
                (cdb16(0x93, bits, r.at.0, r.count), Vec::new())
            }
            Op::Unmap(ranges) => {
                let mut list = vec![0; 8];
                for r in ranges {
                    list.extend(r.at.0.to_be_bytes());
                    list.extend(u32::try_from(r.count).expect("small").to_be_bytes());
                    list.extend([0; 4]);
                }
                let total = u16::try_from(list.len()).expect("small");
                list[0..2].copy_from_slice(&(total - 2).to_be_bytes());
                list[2..4].copy_from_slice(&(total - 8).to_be_bytes());
                let mut cdb = [0; 16];
                cdb[0] = 0x42;
                cdb[7..9].copy_from_slice(&total.to_be_bytes());
                (cdb, list)
            }
            Op::Flush => (cdb16(0x91, 0, 0, 0), Vec::new()),
            Op::IncrementCounter(from) => {
                let mut cdb = cdb16(0x89, 0, 0, 0);
                cdb[13] = 1;
                (
                    cdb,
                    [self.model.counter_block(*from), self.model.counter_block(*from + 1)].concat(),
                )
            }
        }
    }

    /// A command with data for the target: immediate data if negotiated, the rest when the target
    /// asks for it.
    fn write(&mut self, tag: u32, cdb: &[u8], data: &[u8], out: &mut Vec<u8>) {
        let agreed = self.negotiated;
        let rng = &self.model.rng;
        let burst = agreed.first_burst.min(data.len());
        let most = if agreed.immediate { burst.min(agreed.segment) } else { 0 };
        let immediate = *rng.pick(&[0, most.min(512), most]);
        let unsolicited = !agreed.initial_r2t && immediate < burst && rng.chance(0.7);
        let mut header = self.initiator.command_header(cdb, WRITE, length(data.len()));
        if unsolicited {
            header.flags &= !FINAL;
        }
        out.extend(self.initiator.frame(header.as_bytes(), &data[..immediate]));
        if unsolicited {
            self.data_out(tag, NO_TAG, data, immediate..burst, out);
        }
    }

    /// A part of a command's data, in as many PDUs as it takes.
    fn data_out(
        &self,
        tag: u32,
        transfer: u32,
        data: &[u8],
        part: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) {
        let mut at = part.start;
        for number in 0.. {
            let most = self.negotiated.segment.min(part.end - at);
            let n = if self.model.rng.chance(0.3) { most.min(512) } else { most };
            let last = at + n == part.end;
            let piece = &data[at..at + n];
            out.extend(self.initiator.data_out(tag, transfer, number, length(at), last, piece));
            at += n;
            if last {
                return;
            }
        }
    }

    fn handle_pdu(
        &mut self,
        pdu: &Pdu,
        open: &mut InFlight,
        out: &mut Vec<u8>,
        heard: &mut ReceivedEvents,
    ) {
        let tag = pdu.itt();
        match pdu.opcode() {
            Opcode::R2t => {
                // An aborted task sends no more data.
                let Some(pending) = open.get(&tag) else { return };
                let (_, data) = self.command(pending);
                let at = pdu.word(40) as usize;
                let part = at..at + pdu.word(44) as usize;
                self.data_out(tag, pdu.word(20), &data, part, out);
            }
            Opcode::DataIn => {
                let Some(pending) = open.get_mut(&tag) else { return };
                if pdu.word(40) as usize != pending.received.len() {
                    self.model.world.fail(format!("data out of order: {pdu:?}"));
                }
                pending.received.extend(&pdu.data);
                if pdu.header[1] & 1 != 0 {
                    heard.completions.push((tag, Completion::Done));
                }
            }
            Opcode::ScsiResponse => heard.completions.push((tag, completion_of(pdu))),
            Opcode::TaskResponse => {
                let request = self.requests.remove(&tag);
                // A task that has not ended by now never takes effect.
                if pdu.header[2] == 0 {
                    let tags = request.map(|r| r.affected_tasks).unwrap_or_default();
                    heard.completions.extend(
                        tags.into_iter().map(|t| (t, Completion::Failed("aborted".into()))),
                    );
                }
            }
            Opcode::NopIn if tag == NO_TAG => out.extend(self.initiator.pong(pdu.word(20))),
            Opcode::NopIn => {}
            Opcode::LogoutResponse => heard.is_closing |= self.logout == Some(tag),
            Opcode::AsyncMessage => heard.is_closing = true,
            _ => self.model.world.fail(format!("unexpected: {pdu:?}")),
        }
    }
}

/// How a command ended.
fn completion_of(pdu: &Pdu) -> Completion {
    let (response, status) = (pdu.header[2], pdu.header[3]);
    // After the length, in fixed or descriptor format.
    let key = match pdu.data.get(2).map(|code| code & 0x7f) {
        Some(0x70 | 0x71) => pdu.data.get(4).map(|k| k & 0xf),
        Some(0x72 | 0x73) => pdu.data.get(3).map(|k| k & 0xf),
        _ => None,
    };
    match (response, status, key) {
        (0, GOOD, _) => Completion::Done,
        (0, BUSY | TASK_SET_FULL, _) => Completion::Retry,
        // Another initiator, at any node, asked for a reset and is gone.
        (0, CHECK_CONDITION, Some(UNIT_ATTENTION | ABORTED_COMMAND)) => Completion::Retry,
        (0, CHECK_CONDITION, Some(MISCOMPARE)) => Completion::Miscompare,
        _ => Completion::Failed(format!("{pdu:?} {:02x?}", pdu.data)),
    }
}
