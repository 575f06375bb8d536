//! Plays a script of arbitrary bytes against the initiator's machine: what a target may send, in
//! any portions, and what a caller may submit, in any order. Shared by the fuzz target and property
//! tests. What must hold is asserted on the way:
//!
//! * nothing panics, and the space for more bytes is never empty;
//! * each request ends once, and a read has not moved more than there is room for;
//! * what goes out is a sequence of well-formed PDUs, and no longer than what is in flight allows.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use frame::Machine;
use iscsi::chap::Secret;
use iscsi::initiator::{Command, Config, Connection, Credentials, LoginNonce, Payload, Request};
use iscsi::params::{Limits, Params};
use iscsi::pdu::{
    AsyncMessage, BHS_LEN, DataIn, FINAL, Header, LoginResponse, LogoutResponse, NO_TAG, NopIn,
    Opcode, R2t, Reject, ScsiCommand, ScsiResponse, TargetPdu, TaskResponse, TextResponse, padding,
    segment_len,
};
use iscsi::{Digests, Tag};
use rt::buf::{Account, BufferPool, MemoryClass};
use testkit::Script;

/// The step that answers a login.
pub(crate) const LOGIN: u8 = 1;

/// A command in flight, as the target knows it.
#[derive(Clone, Copy)]
struct Known {
    itt: u32,
    opcode: Opcode,
    bytes: u32,
    reads: bool,
    /// Bytes that were sent, or asked for, and in how many PDUs.
    moved: u32,
    pdus: u32,
}

struct World {
    conn: Connection,
    account: Account,
    isid: [u8; 6],
    digests: Digests,
    now: Duration,
    portion: usize,
    stat_sn: u32,
    max_cmd_sn: u32,
    in_flight: BTreeSet<u32>,
    known: Vec<Known>,
    sent: Vec<u8>,
}

/// Plays `script`.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let (bits, sizes) = (script.byte(), script.byte());
    let limits = Limits {
        max_segment: [512, 4096, 8192, 65_536][usize::from(sizes & 3)],
        max_burst: [512, 8192, 65_536, 262_144][usize::from(sizes >> 2 & 3)],
        first_burst: [512, 4096, 65_536, 262_144][usize::from(sizes >> 4 & 3)],
        max_outstanding_r2t: 1 + u16::from(sizes >> 6),
        initial_r2t: bits & 4 != 0,
        immediate_data: bits & 8 != 0,
    };
    let digests = Digests { header: bits & 1 != 0, data: bits & 2 != 0 };
    let [initiator, target] = ["host", "disk"].map(|n| format!("iqn.2026-01.com.example:{n}"));
    let target = (bits & 16 == 0).then(|| target.parse().unwrap());
    let secret = |text: &[u8]| Secret::new(text).unwrap();
    let credentials = (bits & 32 != 0).then(|| Credentials {
        user: "host".into(),
        secret: secret(b"twelve bytes of it"),
        mutual: (bits & 64 != 0).then(|| ("disk".into(), secret(b"other twelve bytes"))),
    });
    let isid = [0x80, 0, 0, 1, 0, 0];
    let in_flight = 1 + u16::from(script.byte() % 16);
    let config = Config {
        credentials,
        digests,
        limits,
        max_in_flight: in_flight,
        ..Config::new(initiator.parse().unwrap(), target, isid)
    };
    let mut world = World {
        conn: Connection::new(Arc::new(config), LoginNonce { challenge: [5; 32], id: 1 }),
        account: BufferPool::new(16 << 20).unwrap().account(),
        isid,
        digests: Digests::default(),
        now: Duration::ZERO,
        portion: usize::MAX,
        stat_sn: 1,
        max_cmd_sn: 4,
        in_flight: BTreeSet::new(),
        known: Vec::new(),
        sent: Vec::new(),
    };
    script.byte();
    for _ in 0..400 {
        if script.is_empty() {
            break;
        }
        world.step(&mut script);
        world.collect();
    }
    world.finish();
}

const TEXTS: [&str; 12] = [
    "AuthMethod=None\0",
    "AuthMethod=CHAP\0",
    "CHAP_A=5\0CHAP_I=3\0CHAP_C=0x0102030405\0",
    "CHAP_N=disk\0CHAP_R=0x00112233445566778899aabbccddeeff\0",
    "MaxRecvDataSegmentLength=512\0MaxBurstLength=512\0",
    "InitialR2T=Yes\0ImmediateData=No\0MaxOutstandingR2T=1\0",
    "X-com.example.key=value\0TargetAlias=disk\0",
    "TargetAddress=192.0.2.1:3260,1\0",
    "FirstBurstLength=512\0ErrorRecoveryLevel=0\0MaxConnections=1\0",
    "HeaderDigest=None\0DataDigest=None\0",
    "no text",
    "",
];

impl World {
    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() & 0x1f {
            0 if script.is_rare() => {
                let n = usize::from(script.byte());
                let bytes: Vec<u8> = (0..n).map(|_| script.byte()).collect();
                self.feed(&bytes);
            }
            LOGIN if self.conn.params().is_none() => self.log_in(script),
            2..=9 => self.submit(script),
            10..=14 => self.data(script),
            15..=17 => self.r2t(script),
            18..=22 => self.respond(script),
            23..=24 => self.other(script),
            25 => {
                self.now += Duration::from_millis(u64::from(script.byte()) * 20);
                self.conn.on_timer(self.now);
            }
            26 => self.portion = usize::from(script.byte()).max(1),
            27 => self.drain(usize::from(script.byte())),
            28 => self.login_response(script),
            29 if script.is_rare() => self.conn.close(),
            30 => self.max_cmd_sn = self.max_cmd_sn.wrapping_add(script.byte().into()),
            _ => self.drain(usize::MAX),
        }
    }

    /// A login without a hitch, where no proof is wanted; with what digests the script wants.
    fn log_in(&mut self, script: &mut Script<'_>) {
        self.drain(usize::MAX);
        let bits = script.byte();
        let on = |bit: u8| if bits & bit != 0 { "CRC32C" } else { "None" };
        let digests = format!("HeaderDigest={}\0DataDigest={}\0", on(1), on(2));
        let texts = ["AuthMethod=None\0".to_owned(), digests];
        for (flags, text) in [FINAL | 1, FINAL | 1 << 2 | 3].into_iter().zip(texts) {
            let mut pdu = LoginResponse::zeroed();
            (pdu.flags, pdu.isid, pdu.tsih) = (flags, self.isid, 1.into());
            self.tell(pdu, text.as_bytes(), 0, script);
            self.drain(usize::MAX);
        }
        if self.conn.params().is_some() {
            self.digests = Digests { header: bits & 1 != 0, data: bits & 2 != 0 };
        }
    }

    /// Any response to a login.
    fn login_response(&mut self, script: &mut Script<'_>) {
        let mut pdu = LoginResponse::zeroed();
        (pdu.flags, pdu.isid, pdu.tsih) = (script.byte(), self.isid, 1.into());
        if script.is_rare() {
            pdu.status = [0x0101, 0x0102, 0x0201, 0x0300][usize::from(script.byte() & 3)].into();
        }
        let text: String =
            (0..script.byte() % 4).map(|_| TEXTS[usize::from(script.byte() % 12)]).collect();
        let (text, spoil) = (text.into_bytes(), script.byte());
        self.drain(usize::MAX);
        self.tell(pdu, &text, spoil, script);
        if let Some(params) = self.conn.params() {
            self.digests = params.digests();
        }
    }

    fn submit(&mut self, script: &mut Script<'_>) {
        let (what, size) = (script.byte(), script.byte());
        let length = [0usize, 16, 512, 4096, 8192, 12_001, 65_536, 8][usize::from(size % 8)];
        let buffers = || {
            let credit = self.account.try_credit(length.max(1), MemoryClass::LocalIo);
            credit.expect("the pool is large").alloc(length)
        };
        let is_scsi = what & 0xf0 != 0xf0;
        let request = match what {
            0xff => Request::Logout,
            0xfe => Request::Ping,
            0xfd => Request::Text(b"SendTargets=\0".to_vec()),
            0xfc => Request::ResetUnit([0; 8]),
            0xf0..=0xfb => Request::Abort(Tag(u32::from(size % 20))),
            _ => {
                let payload = match what % 3 {
                    _ if length == 0 => Payload::None,
                    0 => Payload::ToTarget(buffers().into()),
                    1 => Payload::ToHost(buffers()),
                    _ => Payload::None,
                };
                Request::Scsi { lun: [0; 8], cdb: [what; 16], payload }
            }
        };
        let timeout = (what & 8 == 0).then(|| Duration::from_secs(u64::from(what >> 4)));
        let room = self.conn.free_command_slots();
        match self.conn.submit(Command { request, timeout }) {
            Some(tag) => {
                assert!(!is_scsi || room > 0);
                assert!(self.in_flight.insert(tag.0), "a tag in use");
            }
            None => assert!(!is_scsi || room == 0),
        }
    }

    /// One of the requests that the target has seen and that are as they are wanted, and once in a
    /// while one that there is not.
    fn pick(
        &mut self,
        script: &mut Script<'_>,
        wanted: fn(&Known) -> bool,
    ) -> Option<(usize, Known)> {
        self.drain(usize::MAX);
        let which = usize::from(script.byte());
        if script.is_rare() {
            let (itt, opcode) = (script.byte().into(), Opcode::ScsiCommand);
            let unknown = Known { itt, opcode, bytes: 512, reads: true, moved: 0, pdus: 0 };
            return Some((usize::MAX, unknown));
        }
        let all: Vec<usize> = (0..self.known.len()).filter(|i| wanted(&self.known[*i])).collect();
        let index = *all.get(which % all.len().max(1))?;
        Some((index, self.known[index]))
    }

    fn data(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| k.reads && k.moved < k.bytes;
        let Some((index, known)) = self.pick(script, wanted) else { return self.submit(script) };
        let (spoil, flags) = (script.byte(), script.byte());
        let left = known.bytes.saturating_sub(known.moved);
        let length = left.min(1 + u32::from(script.byte()) * 30);
        let length = if spoil == 1 { length + 4 } else { length };
        let mut pdu = DataIn::zeroed();
        (pdu.itt, pdu.ttt) = (known.itt.into(), NO_TAG.into());
        pdu.flags = if flags & 3 == 3 { FINAL } else { 0 };
        if length == left {
            pdu.flags = FINAL | (flags & 1);
        }
        if spoil == 3 {
            pdu.flags = flags;
        }
        pdu.offset = if spoil == 2 { script.word() } else { known.moved }.into();
        pdu.data_sn = if spoil == 4 { script.word() } else { known.pdus }.into();
        let data = vec![0x5a; length as usize];
        let over = pdu.flags & DataIn::STATUS != 0;
        if over {
            self.tell(pdu, &data, spoil, script);
        } else {
            self.say(pdu, &data, spoil, script);
        }
        if let Some(k) = self.known.get_mut(index) {
            (k.moved, k.pdus) = (k.moved + length, k.pdus + 1);
        }
        if over && index < self.known.len() {
            self.known.remove(index);
        }
    }

    fn r2t(&mut self, script: &mut Script<'_>) {
        let wanted = |k: &Known| !k.reads && k.moved < k.bytes;
        let Some((index, known)) = self.pick(script, wanted) else { return self.submit(script) };
        let spoil = script.byte();
        let length = known.bytes.saturating_sub(known.moved).min(1 + u32::from(script.byte()) * 60);
        let length = if spoil == 1 { script.word() } else { length };
        let mut pdu = R2t::zeroed();
        (pdu.itt, pdu.ttt) = (known.itt.into(), u32::from(script.byte()).into());
        pdu.offset = if spoil == 2 { script.word() } else { known.moved }.into();
        pdu.r2t_sn = if spoil == 4 { script.word() } else { known.pdus }.into();
        pdu.desired_len = length.into();
        self.say(pdu, &[], spoil, script);
        if let Some(k) = self.known.get_mut(index) {
            (k.moved, k.pdus) = (k.moved.saturating_add(length), k.pdus + 1);
        }
    }

    /// The end of any request.
    fn respond(&mut self, script: &mut Script<'_>) {
        let Some((index, Known { itt, opcode, .. })) = self.pick(script, |_| true) else {
            return self.submit(script);
        };
        let (spoil, status) = (script.byte(), script.byte());
        let itt = if spoil == 2 { itt ^ 0x1000 } else { itt }.into();
        match opcode {
            Opcode::ScsiCommand => {
                let mut pdu = ScsiResponse::zeroed();
                (pdu.itt, pdu.status, pdu.flags) = (itt, status & 0x3a, FINAL | status & 6);
                pdu.residual = u32::from(status).into();
                let data: &[u8] = if status & 2 == 0 { &[] } else { &[0, 3, 0x70, 0, 5] };
                self.tell(pdu, data, spoil, script);
            }
            Opcode::TaskRequest => {
                let mut pdu = TaskResponse::zeroed();
                (pdu.itt, pdu.response) = (itt, status & 3);
                self.tell(pdu, &[], spoil, script);
            }
            Opcode::TextRequest => {
                let mut pdu = TextResponse::zeroed();
                (pdu.itt, pdu.flags, pdu.ttt) = (itt, FINAL, NO_TAG.into());
                if status & 3 == 3 {
                    (pdu.flags, pdu.ttt) = (0, 8.into());
                }
                self.tell(pdu, b"TargetName=x\0", spoil, script);
            }
            Opcode::LogoutRequest => {
                let mut pdu = LogoutResponse::zeroed();
                (pdu.itt, pdu.response) = (itt, status & 3);
                self.tell(pdu, &[], spoil, script);
            }
            _ => {
                let mut pdu = NopIn::zeroed();
                (pdu.itt, pdu.ttt) = (itt, NO_TAG.into());
                self.tell(pdu, &[], spoil, script);
            }
        }
        if index < self.known.len() {
            self.known.remove(index);
        }
    }

    /// What answers nothing.
    fn other(&mut self, script: &mut Script<'_>) {
        self.drain(usize::MAX);
        let (what, spoil) = (script.byte(), script.byte());
        match what % 8 {
            0 => {
                let mut pdu = AsyncMessage::zeroed();
                pdu.itt = NO_TAG.into();
                pdu.event = if script.is_rare() { script.byte() % 6 } else { 0 };
                pdu.parameter3 = 2.into();
                self.tell(pdu, &[0, 1, 0x70], spoil, script);
            }
            1 if script.is_rare() => {
                let mut pdu = Reject::zeroed();
                (pdu.itt, pdu.reason) = (NO_TAG.into(), what);
                let mut header = [0; BHS_LEN];
                header[0] = script.byte();
                header[16..20].copy_from_slice(&u32::from(script.byte()).to_be_bytes());
                self.tell(pdu, &header, spoil, script);
            }
            _ => {
                let mut pdu = NopIn::zeroed();
                (pdu.itt, pdu.ttt) = (NO_TAG.into(), u32::from(what).into());
                self.say(pdu, &[], spoil, script);
            }
        }
    }

    fn tell(&mut self, mut pdu: impl TargetPdu, data: &[u8], spoil: u8, script: &mut Script<'_>) {
        pdu.numbers().stat_sn = self.stat_sn.into();
        self.stat_sn = self.stat_sn.wrapping_add(1);
        self.say(pdu, data, spoil, script);
    }

    /// Sends a PDU with all lengths and digests in place, unless they are spoiled.
    fn say(&mut self, mut pdu: impl TargetPdu, data: &[u8], spoil: u8, script: &mut Script<'_>) {
        let numbers = pdu.numbers();
        numbers.max_cmd_sn = self.max_cmd_sn.into();
        numbers.exp_cmd_sn = 1.into();
        *pdu.data_len() = segment_len(data.len());
        let mut header = *pdu.bytes();
        if spoil == 0xff {
            let at = usize::from(script.byte()) % BHS_LEN;
            header[at] ^= script.byte();
        }
        let mut bytes = header.to_vec();
        if self.digests.header {
            bytes.extend((wire::crc32c(&header) ^ u32::from(spoil == 0xfe)).to_le_bytes());
        }
        let mut tail = data.to_vec();
        tail.resize(data.len() + padding(data.len()), 0);
        bytes.extend(&tail);
        if self.digests.data && !data.is_empty() {
            bytes.extend((wire::crc32c(&tail) ^ u32::from(spoil == 0xfd)).to_le_bytes());
        }
        self.feed(&bytes);
    }

    fn feed(&mut self, bytes: &[u8]) {
        let portion = self.portion;
        let at = testkit::machine::feed(&mut self.conn, bytes, &mut || portion);
        assert!(at == bytes.len() || self.conn.is_closing(), "it takes all that comes");
    }

    fn collect(&mut self) {
        while let Some(done) = self.conn.poll_done() {
            assert!(self.in_flight.remove(&done.tag.0), "{:?} ended twice", done.tag);
            let room: usize = done.buffers.iter().map(|b| b.len()).sum();
            assert!(done.buffers.is_empty() || done.transferred as usize <= room);
        }
        assert_eq!(self.conn.in_flight(), self.in_flight.len());
        assert_eq!(self.conn.close_reason().is_some(), self.conn.is_closing());
        while self.conn.poll_notification().is_some() {}
        if self.conn.is_closing() {
            assert!(self.conn.receive_space().is_none() && self.conn.next_timer().is_none());
            assert!(self.in_flight.is_empty(), "a request was forgotten");
            self.sent.clear();
        }
    }

    /// Takes up to `most` bytes of output, and checks the PDUs in it.
    fn drain(&mut self, most: usize) {
        let mut left = most;
        while left > 0 && !self.conn.output().is_empty() {
            let queue = self.conn.output();
            assert!(queue.len() < 17 * (1 << 17) + (300 << 10), "{} bytes wait", queue.len());
            let flat: Vec<u8> = queue.slices().flat_map(|s| s.to_vec()).collect();
            let n = flat.len().min(left);
            queue.advance(n);
            self.sent.extend(&flat[..n]);
            left -= n;
        }
        while let Some(header) = self.sent.first_chunk::<BHS_LEN>().copied() {
            let digests = self.conn.params().map_or(Digests::default(), Params::digests);
            let basic = Header::of(&header);
            // The answer to a login is the last without digests.
            let is_login = basic.opcode() == Opcode::LoginRequest;
            let digest = |on: bool| if on && !is_login { 4 } else { 0 };
            let (length, head) = (basic.data_segment_len(), BHS_LEN + digest(digests.header));
            let tail = if length > 0 { padding(length) + digest(digests.data) } else { 0 };
            assert!(basic.ahs_words == 0 && length < 1 << 18, "{basic:?}");
            if self.sent.len() < head + length + tail {
                break;
            }
            assert!(matches!(basic.opcode().0, 0..=6), "{basic:?}");
            self.learn(&header);
            self.sent.drain(..head + length + tail);
        }
    }

    fn learn(&mut self, header: &[u8; BHS_LEN]) {
        let (opcode, itt) = (Header::of(header).opcode(), Header::of(header).itt.get());
        let mut new = Known { itt, opcode, bytes: 0, reads: false, moved: 0, pdus: 0 };
        match opcode {
            Opcode::LoginRequest | Opcode::DataOut => return,
            Opcode::NopOut if itt == NO_TAG => return,
            Opcode::ScsiCommand => {
                let pdu = ScsiCommand::of(header);
                (new.bytes, new.reads) = (pdu.expected_len.get(), pdu.reads());
                if pdu.writes() {
                    let all = self.conn.params().map_or(0, |p| p.first_burst);
                    let immediate = u32::try_from(Header::of(header).data_segment_len()).unwrap();
                    new.moved = if pdu.is_final() { immediate } else { all.min(new.bytes) };
                }
            }
            _ => {}
        }
        self.known.push(new);
    }

    fn finish(&mut self) {
        self.conn.close();
        self.collect();
        self.drain(usize::MAX);
    }
}
