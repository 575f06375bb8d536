//! A client of the iSCSI door.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use iscsi::pdu::{FINAL, NO_TAG, Opcode, Stage, TaskFunction};
use iscsi::testing::{Initiator, Pdu};
use rt::Core;
use rt::net::Stream;
use rt::sim::World;
use target::{Access, Catalog, IscsiTarget, Service, VolumeId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::book::{Book, Ended, Op, Pending};
use super::file::Flushes;
use super::node::{self, Farewell, Heard, InFlight, Talk};

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

/// Plays a node with the iSCSI door.
pub(crate) async fn play(world: World, flushes: Flushes) -> Result<(), String> {
    node::play::<Iscsi>(world, flushes).await
}

/// What both sides agreed on.
#[derive(Clone, Copy, Debug)]
struct Agreed {
    immediate: bool,
    initial_r2t: bool,
    first_burst: usize,
    /// Most data that the target takes in one PDU.
    segment: usize,
}

/// A task management request and the tasks that it ends.
struct Request {
    ends: Vec<u32>,
}

/// A session.
pub(super) struct Iscsi {
    initiator: Initiator,
    agreed: Agreed,
    book: Rc<Book>,
    /// Command numbers of tasks.
    numbers: BTreeMap<u32, u32>,
    requests: BTreeMap<u32, Request>,
    logout: Option<u32>,
}

impl Talk for Iscsi {
    const SERVICE: Service = Service::Iscsi;
    const COMPARES: bool = true;

    fn announce(catalog: &mut Catalog, id: VolumeId) {
        let access = Access::anybody();
        let target = IscsiTarget { luns: [(1, id)].into(), access, ..IscsiTarget::default() };
        catalog.targets.insert(TARGET.to_owned(), target);
    }

    async fn connect(
        core: &Core,
        to: SocketAddr,
        client: u8,
        book: &Rc<Book>,
    ) -> Option<(Self, Stream)> {
        let rng = &book.rng;
        let mut initiator = Initiator::default();
        // Mostly the port that it was before, whose session it takes over.
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
        let login = initiator.login(Stage::Operational, Some(Stage::FullFeature), &keys);
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
        let agreed = Agreed {
            immediate: said("ImmediateData").is_none_or(|v| v == "Yes"),
            initial_r2t: said("InitialR2T").is_none_or(|v| v == "Yes"),
            first_burst: number("FirstBurstLength", 65536),
            segment: number("MaxRecvDataSegmentLength", 8192),
        };
        let (numbers, requests) = (BTreeMap::new(), BTreeMap::new());
        let book = Rc::clone(book);
        Some((Self { initiator, agreed, book, numbers, requests, logout: None }, stream))
    }

    fn port(&self) -> Option<u8> {
        // A session of the same port replaces the last one (RFC 7143 6.3.5).
        Some(self.initiator.isid[4])
    }

    fn ask(&mut self, pending: &Pending, out: &mut Vec<u8>) -> u32 {
        let (cdb, data) = self.command(pending);
        let tag = self.initiator.itt;
        self.numbers.insert(tag, self.initiator.cmd_sn);
        if pending.wanted() > 0 || data.is_empty() {
            let (flags, len) = if pending.wanted() > 0 { (READ, pending.wanted()) } else { (0, 0) };
            out.extend(self.initiator.command(&cdb, flags, length(len), &[]));
        } else {
            self.write(tag, &cdb, &data, out);
        }
        tag
    }

    fn hear(&mut self, bytes: &[u8], open: &mut InFlight, out: &mut Vec<u8>) -> Heard {
        let mut heard = Heard::default();
        for pdu in self.initiator.receive(bytes) {
            self.take(&pdu, open, out, &mut heard);
        }
        heard
    }

    fn interject(&mut self, open: &InFlight, out: &mut Vec<u8>) {
        let rng = &Rc::clone(&self.book).rng;
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
            TaskFunction::AbortTask => (tag, self.numbers.get(&tag).copied().unwrap_or(0)),
            _ => (NO_TAG, 0),
        };
        self.requests.insert(self.initiator.itt, Request { ends });
        out.extend(self.initiator.task(function, referenced, number));
    }

    fn farewell(&mut self, out: &mut Vec<u8>) -> Farewell {
        self.logout = Some(self.initiator.itt);
        out.extend(self.initiator.logout(0, 0));
        Farewell::Answered
    }
}

/// The first PDU that comes.
async fn first_pdu(stream: &mut Stream, initiator: &mut Initiator) -> Option<Pdu> {
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

/// READ(16), WRITE(16) and their like.
fn sixteen(opcode: u8, bits: u8, at: u64, blocks: u64) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, bits);
    cdb[2..10].copy_from_slice(&at.to_be_bytes());
    cdb[10..14].copy_from_slice(&length(usize::try_from(blocks).expect("small")).to_be_bytes());
    cdb
}

impl Iscsi {
    /// The command for an operation, and the data that goes with it.
    fn command(&self, pending: &Pending) -> ([u8; 16], Vec<u8>) {
        const FUA: u8 = 0x08;
        const UNMAP: u8 = 0x08;
        const NDOB: u8 = 0x01;
        match &pending.op {
            Op::Read(r) => (sixteen(0x88, 0, r.at.0, r.count), Vec::new()),
            Op::ReadTally => (sixteen(0x88, 0, 0, 1), Vec::new()),
            Op::Write { range: r, fua } => {
                let bits = if *fua { FUA } else { 0 };
                (sixteen(0x8a, bits, r.at.0, r.count), pending.data.clone())
            }
            Op::Zero { range: r, unmap } => {
                let bits = NDOB | if *unmap { UNMAP } else { 0 };
                (sixteen(0x93, bits, r.at.0, r.count), Vec::new())
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
            Op::Flush => (sixteen(0x91, 0, 0, 0), Vec::new()),
            Op::Raise(from) => {
                let mut cdb = sixteen(0x89, 0, 0, 0);
                cdb[13] = 1;
                (cdb, [self.book.tally(*from), self.book.tally(*from + 1)].concat())
            }
        }
    }

    /// A command with data for the target: some at once if that was agreed on, the rest when asked
    /// for.
    fn write(&mut self, tag: u32, cdb: &[u8], data: &[u8], out: &mut Vec<u8>) {
        let agreed = self.agreed;
        let rng = &self.book.rng;
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
            let most = self.agreed.segment.min(part.end - at);
            let n = if self.book.rng.chance(0.3) { most.min(512) } else { most };
            let last = at + n == part.end;
            let piece = &data[at..at + n];
            out.extend(self.initiator.data_out(tag, transfer, number, length(at), last, piece));
            at += n;
            if last {
                return;
            }
        }
    }

    fn take(&mut self, pdu: &Pdu, open: &mut InFlight, out: &mut Vec<u8>, heard: &mut Heard) {
        let tag = pdu.itt();
        match pdu.opcode() {
            Opcode::R2t => {
                // What was aborted brings no more data.
                let Some(pending) = open.get(&tag) else { return };
                let (_, data) = self.command(pending);
                let at = pdu.word(40) as usize;
                let part = at..at + pdu.word(44) as usize;
                self.data_out(tag, pdu.word(20), &data, part, out);
            }
            Opcode::DataIn => {
                let Some(pending) = open.get_mut(&tag) else { return };
                if pdu.word(40) as usize != pending.got.len() {
                    self.book.world.fail(format!("data out of order: {pdu:?}"));
                }
                pending.got.extend(&pdu.data);
                if pdu.header[1] & 1 != 0 {
                    heard.ended.push((tag, Ended::Done));
                }
            }
            Opcode::ScsiResponse => heard.ended.push((tag, ended(pdu))),
            Opcode::TaskResponse => {
                let request = self.requests.remove(&tag);
                // Whatever has not ended by now never takes effect any more.
                if pdu.header[2] == 0 {
                    let tags = request.map(|r| r.ends).unwrap_or_default();
                    heard
                        .ended
                        .extend(tags.into_iter().map(|t| (t, Ended::Failed("aborted".into()))));
                }
            }
            Opcode::NopIn if tag == NO_TAG => out.extend(self.initiator.pong(pdu.word(20))),
            Opcode::NopIn => {}
            Opcode::LogoutResponse => heard.closes |= self.logout == Some(tag),
            Opcode::AsyncMessage => heard.closes = true,
            _ => self.book.world.fail(format!("unexpected: {pdu:?}")),
        }
    }
}

/// How a command ended.
fn ended(pdu: &Pdu) -> Ended {
    let (response, status) = (pdu.header[2], pdu.header[3]);
    // Behind its length, in the fixed format or that of descriptors.
    let key = match pdu.data.get(2).map(|code| code & 0x7f) {
        Some(0x70 | 0x71) => pdu.data.get(4).map(|k| k & 0xf),
        Some(0x72 | 0x73) => pdu.data.get(3).map(|k| k & 0xf),
        _ => None,
    };
    match (response, status, key) {
        (0, GOOD, _) => Ended::Done,
        (0, BUSY | TASK_SET_FULL, _) => Ended::Again,
        // A reset that another initiator asked for, at any node, when that one had gone.
        (0, CHECK_CONDITION, Some(UNIT_ATTENTION | ABORTED_COMMAND)) => Ended::Again,
        (0, CHECK_CONDITION, Some(MISCOMPARE)) => Ended::Miscompare,
        _ => Ended::Failed(format!("{pdu:?} {:02x?}", pdu.data)),
    }
}
