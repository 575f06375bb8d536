//! Plays a script of arbitrary bytes against the host's machine: what a controller may send, in any
//! portions, and what a caller may submit, in any order. Shared by the fuzz target and property
//! tests. What must hold is asserted on the way:
//!
//! * nothing panics, and the space for more bytes is never empty;
//! * each command ends once, and a success of a read has not moved more than there is room for;
//! * what goes out is a sequence of well-formed PDUs, and no longer than what is in flight allows.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use block::{Account, BufferPool, MemoryClass};
use frame::Machine;
use nvme::entry::{Cqe, NvmOpcode};
use nvme::host::{Command, Config, Connection, Payload};
use nvme::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, DIGEST_DATA, DIGEST_HEADER, DataPdu, FatalError, IcResp,
    PduType, R2t, TermReq,
};
use nvme::{Digests, Sqe};
use testkit::Script;
use zerocopy::{FromBytes, IntoBytes};

/// The step that sends ICResp.
pub(crate) const IC_RESP: u8 = 1;

/// A command in flight, as the controller knows it.
#[derive(Clone, Copy)]
struct Known {
    cid: u16,
    bytes: u32,
    reads: bool,
    /// Bytes that were sent, or asked for.
    moved: u32,
}

struct World {
    conn: Connection,
    account: Account,
    digests: u8,
    now: Duration,
    portion: usize,
    in_flight: BTreeSet<usize>,
    known: Vec<Known>,
    sent: Vec<u8>,
}

/// Plays `script`.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let (bits, alignment) = (script.byte() & 3, script.byte() % 32);
    let digests = Digests { header: bits & 1 != 0, data: bits & 2 != 0 };
    let config = Config {
        max_in_flight: 1 + u16::from(script.byte() % 16),
        digests,
        alignment,
        max_r2ts: 1 + u32::from(script.byte() % 4),
        ..Config::default()
    };
    let mut world = World {
        conn: Connection::new(config),
        account: BufferPool::new(16 << 20).unwrap().account(),
        digests: 0,
        now: Duration::ZERO,
        portion: usize::MAX,
        in_flight: BTreeSet::new(),
        known: Vec::new(),
        sent: Vec::new(),
    };
    for _ in 0..400 {
        if script.is_empty() {
            break;
        }
        world.step(&mut script);
        world.collect();
    }
    world.finish();
}

impl World {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() & 0x1f {
            0 if script.is_rare() => {
                let n = usize::from(script.byte());
                let bytes: Vec<u8> = (0..n).map(|_| script.byte()).collect();
                self.feed(&bytes);
            }
            IC_RESP if self.conn.digests().is_none() || script.is_rare() => self.ic_resp(script),
            2..=9 => self.submit(script),
            10..=15 => self.data(script),
            16..=19 => self.r2t(script),
            20..=24 => self.respond(script),
            25 => {
                self.now += Duration::from_millis(u64::from(script.byte()) * 20);
                self.conn.on_timer(self.now);
            }
            26 => self.portion = usize::from(script.byte()).max(1),
            27 => self.drain(usize::from(script.byte())),
            28 if script.is_rare() => {
                let term =
                    TermReq::new(PduType::C2HTermReq, FatalError(script.byte().into()), 0, 0);
                self.feed(term.as_bytes());
            }
            29 if script.is_rare() => self.conn.close(),
            _ => self.drain(usize::MAX),
        }
    }

    fn ic_resp(&mut self, script: &mut Script<'_>) {
        let (spoil, sizes, cpda) = (script.byte(), script.byte(), script.byte());
        let wanted = self.drain_ic_req();
        let digest = if spoil == 1 { 3 } else { wanted };
        let max_h2c_data = if spoil == 2 { script.word() } else { 4096 << (sizes % 9) };
        let resp = IcResp { cpda: cpda % 33, ..IcResp::new(digest, max_h2c_data) };
        self.feed(resp.as_bytes());
        self.digests = self.conn.digests().unwrap_or_default().bits();
    }

    /// What ICReq asks for, if it is still there.
    fn drain_ic_req(&mut self) -> u8 {
        let wanted = self.conn.output().slices().next().and_then(|s| s.get(11).copied());
        self.drain(usize::MAX);
        wanted.unwrap_or(0) & 3
    }

    fn submit(&mut self, script: &mut Script<'_>) {
        let (what, size) = (script.byte(), script.byte());
        let length = [0usize, 16, 512, 4096, 8192, 12_000, 65_536, 8][usize::from(size % 8)];
        let buffers = || {
            let credit = self.account.try_credit(length.max(1), MemoryClass::LocalIo);
            credit.expect("the pool is large").alloc(length)
        };
        let (opcode, payload) = match what % 3 {
            _ if length == 0 => (NvmOpcode::Flush, Payload::None),
            0 => (NvmOpcode::Write, Payload::ToController(buffers().into())),
            1 => (NvmOpcode::Read, Payload::ToHost(buffers())),
            _ => (NvmOpcode::Flush, Payload::None),
        };
        let timeout = (what & 8 == 0).then(|| Duration::from_secs(u64::from(what >> 4)));
        let room = self.conn.free_slots();
        let sqe = Sqe::new(opcode.0, 0, 1);
        match self.conn.submit(Command { sqe, payload, timeout }) {
            Some(tag) => assert!(room > 0 && self.in_flight.insert(tag.index()), "tag in use"),
            None => assert_eq!(room, 0),
        }
    }

    /// One of the commands that the controller has seen and that are as they are wanted, and once
    /// in a while one that there is not.
    fn pick(
        &mut self,
        script: &mut Script<'_>,
        wanted: fn(&Known) -> bool,
    ) -> Option<(usize, Known)> {
        self.drain(usize::MAX);
        let which = usize::from(script.byte());
        if script.is_rare() {
            let cid = u16::from(script.byte());
            return Some((usize::MAX, Known { cid, bytes: 512, reads: true, moved: 0 }));
        }
        let all: Vec<usize> = (0..self.known.len()).filter(|i| wanted(&self.known[*i])).collect();
        let index = *all.get(which % all.len().max(1))?;
        Some((index, self.known[index]))
    }

    fn data(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| k.reads && k.moved < k.bytes;
        let Some((index, Known { cid, bytes, moved, .. })) = self.pick(script, wanted) else {
            return self.submit(script);
        };
        let (spoil, flags) = (script.byte(), script.byte());
        let left = bytes.saturating_sub(moved);
        let length = left.min(1 + u32::from(script.byte()) * 90);
        let length = if spoil == 1 { length + 4 } else { length };
        let offset = if spoil == 2 { script.word() } else { moved };
        let last = if length == left { 4 } else { 0 };
        let flags = if spoil == 3 { flags } else { last | (flags & 8 & last << 1) };
        let mut header = DataPdu::new(PduType::C2HData, cid, 0, offset, length);
        header.common.flags = flags;
        self.send(header.as_bytes(), &vec![0x5a; length as usize], spoil, script);
        if let Some(k) = self.known.get_mut(index) {
            k.moved += length;
        }
        if flags & 8 != 0 && index < self.known.len() {
            self.known.remove(index);
        }
    }

    fn r2t(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| !k.reads && k.moved < k.bytes;
        let Some((index, Known { cid, bytes, moved, .. })) = self.pick(script, wanted) else {
            return self.submit(script);
        };
        let spoil = script.byte();
        let length = bytes.saturating_sub(moved).min(1 + u32::from(script.byte()) * 60);
        let offset = if spoil == 2 { script.word() } else { moved };
        let length = if spoil == 1 { script.word() } else { length };
        let r2t = R2t { offset: offset.into(), ..R2t::new(cid, script.byte().into(), length) };
        self.send(r2t.as_bytes(), &[], spoil, script);
        if let Some(k) = self.known.get_mut(index) {
            k.moved = k.moved.saturating_add(length);
        }
    }

    fn respond(&mut self, script: &mut Script<'_>) {
        let Some((index, Known { cid, .. })) = self.pick(script, |_| true) else {
            return self.submit(script);
        };
        let (spoil, status) = (script.byte(), script.byte());
        let status = u16::from(status) << 1 & if spoil & 1 == 0 { 0 } else { u16::MAX };
        let cid = if spoil == 2 { cid ^ 0x1000 } else { cid };
        let (result, sq_head, sq_id) = (1.into(), 0.into(), 0.into());
        let cqe = Cqe { result, sq_head, sq_id, cid: cid.into(), status: status.into() };
        self.send(CapsuleResp::new(cqe).as_bytes(), &[], spoil, script);
        if index < self.known.len() {
            self.known.remove(index);
        }
    }

    /// Sends a PDU with all lengths and digests in place, unless they are spoiled.
    fn send(&mut self, header: &[u8], data: &[u8], spoil: u8, script: &mut Script<'_>) {
        let mut header = header.to_vec();
        let after = header.len() + if self.digests & DIGEST_HEADER != 0 { 4 } else { 0 };
        let trailer = self.digests & DIGEST_DATA != 0 && !data.is_empty();
        let padding = if spoil & 0x40 != 0 { usize::from(spoil & 3) * 4 } else { 0 };
        let pdo = if data.is_empty() { after } else { after + padding };
        let plen = pdo + data.len() + if trailer { 4 } else { 0 };
        header[1] |= self.digests & DIGEST_HEADER | if trailer { 2 } else { 0 };
        header[3] = if data.is_empty() { 0 } else { u8::try_from(pdo).unwrap() };
        header[4..8].copy_from_slice(&u32::try_from(plen).unwrap().to_le_bytes());
        if spoil == 0xff {
            let at = usize::from(script.byte()) % 8;
            header[at] ^= script.byte();
        }
        let mut pdu = header.clone();
        if self.digests & DIGEST_HEADER != 0 {
            let wrong = u32::from(spoil == 0xfe);
            pdu.extend((wire::crc32c(&header) ^ wrong).to_le_bytes());
        }
        if !data.is_empty() {
            pdu.extend(vec![0xee; padding]);
            pdu.extend(data);
        }
        if trailer {
            pdu.extend((wire::crc32c(data) ^ u32::from(spoil == 0xfd)).to_le_bytes());
        }
        self.feed(&pdu);
    }

    fn feed(&mut self, bytes: &[u8]) {
        let portion = self.portion;
        testkit::machine::feed(&mut self.conn, bytes, &mut || portion);
    }

    fn collect(&mut self) {
        while let Some(done) = self.conn.poll_done() {
            assert!(self.in_flight.remove(&done.tag.index()), "{:?} ended twice", done.tag);
            let room: usize = done.buffers.iter().map(|b| b.len()).sum();
            assert!(done.buffers.is_empty() || done.transferred as usize <= room);
        }
        assert_eq!(self.conn.in_flight(), self.in_flight.len());
        assert_eq!(self.conn.close_reason().is_some(), self.conn.is_closing());
        if self.conn.is_closing() {
            assert!(self.conn.receive_space().is_none() && self.conn.next_timer().is_none());
            assert!(self.in_flight.is_empty(), "a command was forgotten");
        }
    }

    /// Takes up to `most` bytes of output, and checks the PDUs in it.
    fn drain(&mut self, most: usize) {
        let mut left = most;
        while left > 0 && !self.conn.output().is_empty() {
            let queue = self.conn.output();
            assert!(queue.len() < 16 * 8400 + (300 << 10), "{} bytes wait", queue.len());
            let flat: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
            let n = flat.len().min(left);
            queue.advance(n);
            self.sent.extend(&flat[..n]);
            left -= n;
        }
        while let Ok((common, _)) = CommonHeader::read_from_prefix(&self.sent) {
            let plen = common.plen.get() as usize;
            assert!(plen >= usize::from(common.hlen) && plen < 1 << 17, "{common:?}");
            if self.sent.len() < plen {
                break;
            }
            if common.kind() == PduType::CapsuleCmd {
                let (capsule, _) = CapsuleCmd::read_from_prefix(&self.sent).unwrap();
                let (cid, bytes) = (capsule.sqe.cid.get(), capsule.sqe.data_bytes());
                let moved = if common.pdo == 0 { 0 } else { bytes };
                let reads = capsule.sqe.opcode == NvmOpcode::Read.0;
                self.known.push(Known { cid, bytes, reads, moved });
            }
            assert!(matches!(common.pdu_type, 0 | 2 | 4 | 6), "{common:?}");
            self.sent.drain(..plen);
        }
    }

    fn finish(&mut self) {
        self.conn.close();
        self.collect();
        self.drain(usize::MAX);
    }
}
