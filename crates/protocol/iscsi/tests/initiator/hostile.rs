//! A target that says what it must not, and an initiator that is not harmed by it. Each test names
//! the clause of RFC 7143 that is broken.

use std::sync::Arc;
use std::time::Duration;

use frame::Machine;
use iscsi::Digests;
use iscsi::initiator::{
    Answer, CloseReason, Command, CompletedRequest, Config, Connection, LostRequest, Payload,
    Request, Residual,
};
use iscsi::params::Limits;
use iscsi::pdu::{
    AsyncMessage, BHS_LEN, CONTINUE, DataIn, DataOut, FINAL, Header, LoginResponse, LogoutResponse,
    NO_TAG, NopIn, Opcode, R2t, Reject, RejectReason, ScsiResponse, TargetPdu, TaskResponse,
    TextResponse, padding, segment_len,
};
use iscsi::testing::ScriptedInitiator;

use super::pair::{completion, config, fresh, pattern, scsi};
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};

const S: Duration = Duration::from_secs(1);

/// An initiator, and what its target says to it.
struct Victim {
    conn: Connection,
    /// How PDUs are put together.
    form: ScriptedInitiator,
    memory: PayloadMemory,
    stat_sn: u32,
    /// What the initiator has sent and the script has not looked at.
    heard: Vec<u8>,
}

/// One PDU of the initiator: header and data.
type Pdu = ([u8; BHS_LEN], Vec<u8>);

impl Victim {
    /// Logged in, with digests or without.
    fn ready(digests: bool) -> Self {
        let limits = Limits { max_segment: 8192, max_burst: 16384, ..Limits::default() };
        Self::with(Config { limits, ..config() }, digests, "MaxBurstLength=16384\0")
    }

    fn with(config: Config, digests: bool, answers: &str) -> Self {
        let digests_wanted = Digests { header: digests, data: digests };
        let isid = config.isid;
        let config = Config { digests: digests_wanted, ..config };
        let mut victim = Self {
            conn: Connection::new(Arc::new(config), fresh()),
            form: ScriptedInitiator::default(),
            memory: PayloadMemory::new(),
            stat_sn: 1,
            heard: Vec::new(),
        };
        let digest = if digests { "HeaderDigest=CRC32C\0DataDigest=CRC32C\0" } else { "" };
        let answers = format!("{digest}{answers}");
        for (flags, text) in [(FINAL | 1, "AuthMethod=None\0"), (FINAL | 1 << 2 | 3, &answers)] {
            let mut pdu = LoginResponse::zeroed();
            (pdu.flags, pdu.isid, pdu.tsih) = (flags, isid, 1.into());
            victim.tell(pdu, text.as_bytes());
        }
        assert!(victim.conn.params().is_some(), "{:?}", victim.conn.close_reason());
        victim.pdus();
        victim.form.header_digest = digests;
        victim.form.data_digest = digests;
        victim
    }

    /// A PDU with the next status number.
    fn tell(&mut self, mut pdu: impl TargetPdu, data: &[u8]) {
        pdu.numbers().stat_sn = self.stat_sn.into();
        self.stat_sn += 1;
        self.say(pdu, data);
    }

    /// A PDU without a status of its own.
    fn say(&mut self, mut pdu: impl TargetPdu, data: &[u8]) {
        let numbers = pdu.numbers();
        (numbers.exp_cmd_sn, numbers.max_cmd_sn) = (1.into(), 64.into());
        *pdu.data_len() = segment_len(data.len());
        let bytes = self.form.frame(pdu.bytes(), data);
        feed(&mut self.conn, &bytes, &mut || 13);
    }

    /// What it has sent.
    fn pdus(&mut self) -> Vec<Pdu> {
        self.heard.extend(take(&mut self.conn, &mut || usize::MAX));
        let mut out = Vec::new();
        while let Some(header) = self.heard.first_chunk::<BHS_LEN>().copied() {
            let length = Header::of(&header).data_segment_len();
            let digest = |on: bool| if on { 4 } else { 0 };
            let at = BHS_LEN + digest(self.form.header_digest);
            let end = at + length + padding(length);
            let data = self.heard[at..at + length].to_vec();
            let trailer = if length > 0 { digest(self.form.data_digest) } else { 0 };
            self.heard.drain(..end + trailer);
            out.push((header, data));
        }
        out
    }

    fn submit(&mut self, cdb: [u8; 16], payload: Payload) -> u32 {
        let command = Command { timeout: Some(30 * S), ..scsi(cdb, payload) };
        self.conn.submit(command).expect("there is room");
        let (header, _) = self.pdus().remove(0);
        assert_eq!(Header::of(&header).opcode(), Opcode::ScsiCommand);
        Header::of(&header).itt.get()
    }

    fn read(&mut self, length: usize) -> u32 {
        let room = self.memory.room(length);
        self.submit([0x28; 16], Payload::ToHost(room))
    }

    /// A write of which nothing goes unasked.
    fn write(&mut self, data: &[u8]) -> u32 {
        let data = self.memory.holding(data);
        self.submit([0x2a; 16], Payload::ToTarget(data))
    }

    fn data_in(itt: u32, sn: u32, offset: u32, flags: u8) -> DataIn {
        let mut pdu = DataIn::zeroed();
        (pdu.itt, pdu.ttt, pdu.flags) = (itt.into(), NO_TAG.into(), flags);
        (pdu.data_sn, pdu.offset) = (sn.into(), offset.into());
        pdu
    }

    fn data(&mut self, itt: u32, sn: u32, offset: u32, bytes: &[u8], flags: u8) {
        let pdu = Self::data_in(itt, sn, offset, flags);
        if flags & DataIn::STATUS != 0 { self.tell(pdu, bytes) } else { self.say(pdu, bytes) }
    }

    fn r2t(&mut self, itt: u32, sn: u32, offset: u32, length: u32) {
        let mut pdu = R2t::zeroed();
        (pdu.itt, pdu.ttt, pdu.flags) = (itt.into(), (sn + 70).into(), FINAL);
        (pdu.r2t_sn, pdu.offset, pdu.desired_len) = (sn.into(), offset.into(), length.into());
        self.say(pdu, &[]);
    }

    fn response(itt: u32) -> ScsiResponse {
        let mut pdu = ScsiResponse::zeroed();
        (pdu.itt, pdu.flags) = (itt.into(), FINAL);
        pdu
    }

    fn done(&mut self) -> Option<CompletedRequest> {
        self.conn.poll_done()
    }

    /// It has found what was said last at fault, and every command that was in flight ends once, in
    /// doubt.
    #[track_caller]
    fn ends(&mut self, end: impl Fn(CloseReason) -> bool, in_doubt: usize) {
        let found = self.conn.close_reason().expect("the end");
        assert!(end(found), "{found}");
        assert_eq!(self.conn.in_flight(), 0, "nothing stays in flight");
        assert!(self.conn.is_closing() && self.conn.receive_space().is_none());
        assert!(self.conn.output().is_empty() && self.conn.next_timer().is_none());
        assert!(self.conn.submit(scsi([0; 16], Payload::None)).is_none());
        let ended: Vec<CompletedRequest> = std::iter::from_fn(|| self.done()).collect();
        assert!(ended.iter().all(|d| d.outcome == Err(LostRequest::InDoubt)), "{ended:?}");
        assert_eq!(ended.len(), in_doubt);
    }

    #[track_caller]
    fn refuses(&mut self, in_doubt: usize) {
        self.ends(|end| matches!(end, CloseReason::Violation(_)), in_doubt);
    }
}

/// A victim and what is done to it, as a test of one broken rule with one command in flight.
fn broken(digests: bool, harm: impl FnOnce(&mut Victim)) {
    let mut victim = Victim::ready(digests);
    harm(&mut victim);
    victim.refuses(1);
}

/// What is right, to show that the rest is wrong for no other reason.
#[test]
fn valid_pdus_are_accepted() {
    for digests in [false, true] {
        let mut v = Victim::ready(digests);
        let data = pattern(1, 9000);
        let itt = v.read(10_000);
        v.data(itt, 0, 0, &data[..8001], 0);
        let mut last = Victim::data_in(itt, 1, 8001, FINAL | 1 | ScsiResponse::UNDERFLOW);
        last.residual = 1000.into();
        v.tell(last, &data[8001..]);
        let done = v.done().unwrap();
        assert_eq!(completion(&done).residual, Residual::Under(1000));
        assert_eq!((done.transferred, &flat(&done.buffers)[..9000]), (9000, &data[..]));

        let itt = v.read(512);
        let mut check = Victim::response(itt);
        (check.status, check.flags) = (2, FINAL | ScsiResponse::UNDERFLOW);
        check.residual = 512.into();
        v.tell(check, &[0, 3, 0x70, 0, 5, 0xee, 0xee]);
        let done = v.done().unwrap();
        assert_eq!(
            (&completion(&done).sense[..], completion(&done).status),
            (&[0x70, 0, 5][..], 2)
        );
        assert_eq!(v.conn.close_reason(), None);
    }
}

/// 4.2.2.4: a write whose data goes as it is asked for, in order, no more than a segment at a time.
#[test]
fn clause_11_8_data_is_sent_as_asked() {
    let limits = Limits { initial_r2t: true, immediate_data: false, ..Limits::default() };
    let answers =
        "InitialR2T=Yes\0ImmediateData=No\0MaxOutstandingR2T=2\0MaxRecvDataSegmentLength=4096\0";
    for digests in [false, true] {
        let host = Config { limits: limits.clone(), ..config() };
        let mut v = Victim::with(host, digests, answers);
        let data = pattern(2, 10_001);
        let itt = v.write(&data);
        v.r2t(itt, 0, 0, 6000);
        v.r2t(itt, 1, 6000, 4001);
        let sent: Vec<_> = v
            .pdus()
            .into_iter()
            .map(|(header, data)| {
                let pdu = *DataOut::of(&header);
                let place = (pdu.ttt.get(), pdu.data_sn.get(), pdu.offset.get(), pdu.is_final());
                (place, data)
            })
            .collect();
        let expect = [
            ((70, 0, 0, false), &data[..4096]),
            ((70, 1, 4096, true), &data[4096..6000]),
            ((71, 0, 6000, true), &data[6000..]),
        ];
        assert!(sent.iter().map(|(p, d)| (*p, &d[..])).eq(expect));
        v.tell(Victim::response(itt), &[]);
        let done = v.done().unwrap();
        assert_eq!((done.transferred, v.conn.close_reason()), (10_001, None));
    }
}

/// 11.7: data beyond the buffer, out of order, of no length, of no command, of a write; a status
/// too early.
#[test]
fn clause_11_7_unrequested_data() {
    let piece = [9; 1000];
    broken(false, |v| {
        let itt = v.read(999);
        v.data(itt, 0, 0, &piece, FINAL);
    });
    broken(true, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, 4, &piece, FINAL);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, 0, &piece, 0);
        v.data(itt, 1, 0, &piece, 0);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, u32::MAX, &piece, 0);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, 0, &[], FINAL);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt ^ 0x1000, 0, 0, &piece, FINAL);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt + 1, 0, 0, &piece, FINAL);
    });
    broken(false, |v| {
        let itt = v.write(&piece);
        v.data(itt, 0, 0, &piece, FINAL);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, 0, &piece, DataIn::STATUS);
    });
    // Behind the status.
    let mut v = Victim::ready(false);
    let itt = v.read(2000);
    v.data(itt, 0, 0, &piece, FINAL | DataIn::STATUS);
    assert!(v.done().is_some());
    v.data(itt, 1, 1000, &piece, FINAL);
    v.refuses(0);
}

/// 4.2.2.4, 11.7.5: Data-In PDUs are numbered without holes.
#[test]
fn clause_11_7_5_a_data_in_is_missing() {
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 1, 0, &[1; 512], 0);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        v.data(itt, 0, 0, &[1; 512], 0);
        v.data(itt, 0, 512, &[1; 512], 0);
    });
    broken(false, |v| {
        let itt = v.read(4096);
        let mut response = Victim::response(itt);
        response.exp_data_sn = 1.into();
        v.tell(response, &[]);
    });
}

/// 13.12: segments are no longer than declared. Sequences that are longer than agreed on (13.13)
/// are harmless, and tgt sends them.
#[test]
fn clause_13_12_a_segment_longer_than_declared() {
    broken(false, |v| {
        let itt = v.read(20_000);
        v.data(itt, 0, 0, &[0; 8193], 0);
    });
    let mut v = Victim::ready(false);
    let itt = v.read(3 * 8192);
    for i in 0..3 {
        let flags = if i == 2 { FINAL | DataIn::STATUS } else { 0 };
        v.data(itt, i, i * 8192, &[0; 8192], flags);
    }
    assert_eq!((v.conn.close_reason(), v.done().unwrap().transferred), (None, 3 * 8192));
}

/// 11.8: R2Ts beyond the data, for a part again, with holes, without end, of reads, out of order.
#[test]
fn clause_11_8_r2ts_that_ask_for_too_much() {
    let answers = "InitialR2T=Yes\0ImmediateData=No\0MaxOutstandingR2T=1\0MaxBurstLength=4096\0";
    let broken = |harm: &dyn Fn(&mut Victim, u32)| {
        let mut v = Victim::with(config(), false, answers);
        let itt = v.write(&pattern(3, 9000));
        harm(&mut v, itt);
        v.refuses(1);
    };
    broken(&|v, itt| v.r2t(itt, 0, 0, 4097));
    broken(&|v, itt| v.r2t(itt, 0, 0, 0));
    broken(&|v, itt| v.r2t(itt, 1, 0, 512));
    broken(&|v, itt| v.r2t(itt, 0, 512, 512));
    broken(&|v, itt| v.r2t(itt, 0, u32::MAX, 512));
    broken(&|v, itt| v.r2t(itt ^ 0x5000, 0, 0, 512));
    broken(&|v, itt| {
        v.r2t(itt, 0, 0, 512);
        v.r2t(itt, 1, 512, 512);
    });
    broken(&|v, itt| {
        v.r2t(itt, 0, 0, 512);
        v.pdus();
        v.r2t(itt, 1, 0, 512);
    });
    broken(&|v, itt| {
        for i in 0..3 {
            v.r2t(itt, i, i * 4096, 4096);
            v.pdus();
        }
    });
    broken(&|v, itt| {
        let mut pdu = R2t::zeroed();
        (pdu.itt, pdu.ttt, pdu.desired_len) = (itt.into(), NO_TAG.into(), 512.into());
        v.say(pdu, &[]);
    });
    broken(&|v, itt| {
        let mut pdu = R2t::zeroed();
        (pdu.itt, pdu.desired_len) = (itt.into(), 512.into());
        v.say(pdu, &[0; 4]);
    });
    let mut v = Victim::ready(false);
    let itt = v.read(4096);
    v.r2t(itt, 0, 0, 512);
    v.refuses(1);
}

/// Answers to R2Ts are put together as the socket takes them.
#[test]
fn r2ts_cost_no_memory() {
    let answers = "InitialR2T=Yes\0ImmediateData=No\0MaxRecvDataSegmentLength=512\0";
    let mut v = Victim::with(config(), false, answers);
    let mut itts = Vec::new();
    for i in 0..16 {
        itts.push(v.write(&pattern(i, 262_144)));
    }
    for itt in itts {
        v.r2t(itt, 0, 0, 262_144);
        assert!(v.conn.output().len() < 300 << 10, "{}", v.conn.output().len());
    }
    let sent: usize = v.pdus().iter().map(|(_, data)| data.len()).sum();
    assert_eq!(sent, 16 * 262_144);
}

/// 11.4: answers to nothing, twice, with less sense data than its length, with residuals that
/// cannot be.
#[test]
fn clause_11_4_invalid_responses() {
    broken(false, |v| {
        let itt = v.read(512);
        v.tell(Victim::response(itt ^ 0x1000), &[]);
    });
    let mut v = Victim::ready(false);
    let itt = v.read(512);
    v.tell(Victim::response(itt), &[]);
    assert!(v.done().is_some());
    v.tell(Victim::response(itt), &[]);
    v.refuses(0);
    for data in [&[0][..], &[0, 1], &[0, 4, 1, 2, 3], &[0xff, 0xff, 1]] {
        broken(false, |v| {
            let itt = v.read(512);
            v.tell(Victim::response(itt), data);
        });
    }
    for (flags, count) in [(6, 5), (2, 513)] {
        broken(false, |v| {
            let itt = v.read(512);
            let mut response = Victim::response(itt);
            (response.flags, response.residual) = (FINAL | flags, u32::into(count));
            v.tell(response, &[]);
        });
    }
    // Much sense data is cut, not refused; a target that failed says so.
    let mut v = Victim::ready(false);
    let itt = v.read(512);
    let mut data = vec![0x1b, 0x58];
    data.resize(2 + 7000, 0x70);
    let mut response = Victim::response(itt);
    response.response = 1;
    v.tell(response, &data);
    let done = v.done().unwrap();
    assert_eq!((completion(&done).sense.len(), completion(&done).response), (252, 1));
}

/// A success for a read of which half has come says how much: the rest is data of an older command.
#[test]
fn a_partial_read_is_reported() {
    let mut v = Victim::ready(false);
    let itt = v.read(1024);
    v.data(itt, 0, 0, &[1; 512], FINAL);
    v.tell(Victim::response(itt), &[]);
    let done = v.done().unwrap();
    assert_eq!((done.transferred, completion(&done).status), (512, 0));
}

/// A success for a write of which the target has asked for all and cannot have all says how much it
/// can have.
#[test]
fn unsent_write_data_is_reported() {
    let answers = "InitialR2T=Yes\0ImmediateData=No\0MaxBurstLength=16384\0";
    let ready = || Victim::with(config(), false, answers);
    let (data, piece) = ([7; 16_384], BHS_LEN + 8192);
    for (sent, moved) in
        [(0, 0..=0), (piece, 8192 - BHS_LEN as u32..=8192), (piece + 100, 8192..=8292)]
    {
        let mut v = ready();
        let itt = v.write(&data);
        v.r2t(itt, 0, 0, 16_384);
        assert_eq!(v.conn.output().len(), 2 * piece);
        v.conn.output().advance(sent);
        v.tell(Victim::response(itt), &[]);
        let done = v.done().unwrap();
        assert_eq!((completion(&done).status, v.conn.close_reason()), (0, None));
        assert!(moved.contains(&done.transferred), "{sent}: {}", done.transferred);
    }
    let mut v = ready();
    let itt = v.write(&data);
    v.r2t(itt, 0, 0, 16_384);
    assert_eq!(v.pdus().len(), 2);
    v.tell(Victim::response(itt), &[]);
    assert_eq!(v.done().unwrap().transferred, 16_384);
    // More than is put together ahead.
    let mut v = ready();
    let itt = v.write(&[7; 1 << 20]);
    for n in 0..4 {
        v.r2t(itt, n, n << 14, 1 << 14);
        v.pdus();
    }
    v.r2t(itt, 4, 4 << 14, 1 << 14);
    v.tell(Victim::response(itt), &[]);
    assert_eq!(v.done().unwrap().transferred, 4 << 14);
}

/// 4.2.2.2: status numbers go on by one.
#[test]
fn clause_4_2_2_2_a_status_is_missing() {
    for jump in [1u32, u32::MAX, 1 << 31] {
        broken(false, |v| {
            let itt = v.read(512);
            v.stat_sn = v.stat_sn.wrapping_add(jump);
            v.tell(Victim::response(itt), &[]);
        });
    }
    broken(false, |v| {
        let itt = v.read(512);
        v.stat_sn += 1;
        v.data(itt, 0, 0, &[0; 512], FINAL | DataIn::STATUS);
    });
}

/// 4.2.2.1: windows of less than nothing say nothing, and none is taken back.
#[test]
fn clause_4_2_2_1_invalid_windows() {
    let mut v = Victim::ready(false);
    for (exp, max) in [(5u32, 3u32), (1, 0), (100, 1), (1, 1 << 31), (u32::MAX, 5)] {
        let mut pdu = NopIn::zeroed();
        (pdu.itt, pdu.ttt) = (NO_TAG.into(), NO_TAG.into());
        (pdu.numbers.exp_cmd_sn, pdu.numbers.max_cmd_sn) = (exp.into(), max.into());
        let bytes = v.form.frame(pdu.bytes(), &[]);
        feed(&mut v.conn, &bytes, &mut || 48);
    }
    assert_eq!(v.conn.close_reason(), None);
    for _ in 0..64 {
        v.conn.submit(scsi([0; 16], Payload::None)).unwrap();
    }
    assert_eq!(v.pdus().len(), 64, "what was announced at first holds");
}

/// 7.8: what is not as its digest says ends the connection; at error recovery level 0 nothing is
/// repeated.
#[test]
fn clause_7_8_wrong_digests() {
    let mut v = Victim::ready(true);
    let itt = v.read(512);
    let mut bytes = v.form.frame(Victim::data_in(itt, 0, 0, FINAL).bytes(), &[1; 512]);
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    bytes[6..8].copy_from_slice(&[2, 0]);
    feed(&mut v.conn, &bytes, &mut || 9);
    v.ends(|end| end == CloseReason::DataDigest, 1);
    let mut v = Victim::ready(true);
    v.read(512);
    let mut bytes = v.form.frame(NopIn::zeroed().bytes(), &[]);
    bytes[20] ^= 1;
    feed(&mut v.conn, &bytes, &mut || 9);
    v.ends(|end| end == CloseReason::HeaderDigest, 1);
}

/// 11.2.1: PDUs that no target sends, or not now; headers that go on; data where none belongs.
#[test]
fn clause_11_2_1_pdus_that_do_not_belong() {
    for opcode in
        (0..0x40u8).filter(|o| !matches!(o, 0x20..=0x22 | 0x24..=0x26 | 0x31 | 0x32 | 0x3f))
    {
        broken(false, |v| {
            v.read(512);
            let mut pdu = NopIn::zeroed();
            pdu.first = opcode;
            v.say(pdu, &[]);
        });
    }
    broken(false, |v| {
        v.read(512);
        let bytes = v.form.frame_with_ahs(NopIn::zeroed().bytes(), &[0; 8], &[]);
        feed(&mut v.conn, &bytes, &mut || 9);
    });
    broken(false, |v| {
        v.read(512);
        v.tell(TaskResponse::zeroed(), &[0; 4]);
    });
}

/// 11.19: answers to pings that were not sent; pings without end.
#[test]
fn clause_11_19_pings() {
    let ping = |ttt: u32| {
        let mut pdu = NopIn::zeroed();
        (pdu.itt, pdu.ttt, pdu.flags) = (NO_TAG.into(), ttt.into(), FINAL);
        pdu
    };
    broken(false, |v| {
        let itt = v.read(512);
        let mut pdu = ping(NO_TAG);
        pdu.itt = itt.into();
        v.tell(pdu, &[]);
    });
    let mut v = Victim::ready(false);
    for ttt in 0..64 {
        v.say(ping(ttt), &[]);
    }
    let answers: Vec<u32> = v
        .pdus()
        .iter()
        .map(|(header, data)| {
            let header = Header::of(header);
            assert_eq!((header.opcode(), header.itt.get()), (Opcode::NopOut, NO_TAG));
            assert!(data.is_empty() && header.is_immediate());
            u32::from_be_bytes(header.rest[..4].try_into().unwrap())
        })
        .collect();
    assert_eq!(answers, (0..64).collect::<Vec<_>>());
    v.read(512);
    for ttt in 0..65 {
        v.say(ping(ttt), &[]);
    }
    v.refuses(1);
}

/// 11.11: text that ends and goes on, that was not asked for, without end.
#[test]
fn clause_11_11_text() {
    let text = |itt: u32, flags: u8, ttt: u32| {
        let mut pdu = TextResponse::zeroed();
        (pdu.itt, pdu.ttt, pdu.flags) = (itt.into(), ttt.into(), flags);
        pdu
    };
    let asked = || {
        let mut v = Victim::ready(false);
        let request = Request::Text(b"SendTargets=\0".to_vec());
        v.conn.submit(Command { request, timeout: None }).unwrap();
        let (header, _) = v.pdus().remove(0);
        (v, Header::of(&header).itt.get())
    };
    for (flags, ttt) in [(FINAL | CONTINUE, NO_TAG), (FINAL, 5), (CONTINUE, NO_TAG), (0, NO_TAG)] {
        let (mut v, itt) = asked();
        v.tell(text(itt, flags, ttt), b"A=1\0");
        v.refuses(1);
    }
    let (mut v, itt) = asked();
    v.tell(text(itt ^ 0x1000, FINAL, NO_TAG), b"A=1\0");
    v.refuses(1);
    let (mut v, itt) = asked();
    let mut rounds = 0;
    while v.conn.close_reason().is_none() && rounds < 1000 {
        v.tell(text(itt, CONTINUE, 9), &[b'x'; 8192]);
        v.pdus();
        rounds += 1;
    }
    v.refuses(1);
    assert_eq!(rounds, 129, "a MiB is taken");
    let (mut v, itt) = asked();
    v.tell(text(itt, CONTINUE, 9), b"A=");
    let (header, data) = v.pdus().remove(0);
    let header = Header::of(&header);
    assert_eq!((header.opcode(), header.itt.get(), data.len()), (Opcode::TextRequest, itt, 0));
    v.tell(text(itt, FINAL, NO_TAG), b"1\0");
    assert_eq!(v.done().unwrap().outcome, Ok(Answer::Text(b"A=1\0".to_vec())));
}

/// 11.6, 11.15: answers to requests that were not sent.
#[test]
fn clause_11_6_responses_to_other_requests() {
    broken(false, |v| {
        let itt = v.read(512);
        let mut pdu = TaskResponse::zeroed();
        pdu.itt = itt.into();
        v.tell(pdu, &[]);
    });
    broken(false, |v| {
        let itt = v.read(512);
        let mut pdu = LogoutResponse::zeroed();
        pdu.itt = itt.into();
        v.tell(pdu, &[]);
    });
    let mut v = Victim::ready(false);
    v.conn.submit(Command { request: Request::Ping, timeout: None }).unwrap();
    let (header, _) = v.pdus().remove(0);
    v.tell(Victim::response(Header::of(&header).itt.get()), &[]);
    v.refuses(1);
}

/// 11.17: a rejected command ends the session, as its place in the order stays empty; a rejected
/// ping does not.
#[test]
fn clause_11_17_rejections() {
    let reject = || {
        let mut pdu = Reject::zeroed();
        (pdu.reason, pdu.itt) = (RejectReason::ProtocolError.0, NO_TAG.into());
        pdu
    };
    let mut v = Victim::ready(false);
    let command = scsi([0; 16], Payload::None);
    v.conn.submit(command).unwrap();
    let (header, _) = v.pdus().remove(0);
    v.tell(reject(), &header);
    v.ends(|end| end == CloseReason::Rejected(RejectReason::ProtocolError), 1);
    let mut v = Victim::ready(false);
    v.conn.submit(Command { request: Request::Ping, timeout: None }).unwrap();
    let (header, _) = v.pdus().remove(0);
    v.tell(reject(), &header);
    let rejected = Ok(Answer::Rejected(RejectReason::ProtocolError));
    assert_eq!((v.done().unwrap().outcome, v.conn.close_reason()), (rejected, None));
    let mut v = Victim::ready(false);
    v.tell(reject(), &[0; 47]);
    v.refuses(0);
}

/// 11.9: notices without end are not kept.
#[test]
fn clause_11_9_too_many_events() {
    let mut v = Victim::ready(false);
    for _ in 0..1000 {
        let mut pdu = AsyncMessage::zeroed();
        pdu.itt = NO_TAG.into();
        v.tell(pdu, &[0, 1, 0x70]);
    }
    assert_eq!(std::iter::from_fn(|| v.conn.poll_notification()).count(), 16);
    let mut pdu = AsyncMessage::zeroed();
    pdu.itt = NO_TAG.into();
    v.tell(pdu, &[9, 9, 9]);
    v.refuses(0);
}

/// Silence: during the login, in the middle of a PDU, instead of an answer.
#[test]
fn silence_ends_the_connection() {
    let mut conn = Connection::new(Arc::new(config()), fresh());
    conn.on_timer(14 * S);
    assert_eq!(conn.close_reason(), None);
    conn.on_timer(15 * S);
    assert_eq!(conn.close_reason(), Some(CloseReason::LoginTimeout));

    let quiet = || Config { ping_after: Duration::ZERO, ..config() };
    let mut v = Victim::with(quiet(), false, "");
    v.read(512);
    assert_eq!(v.conn.next_timer(), Some(30 * S));
    v.conn.on_timer(29 * S);
    assert_eq!(v.conn.close_reason(), None);
    v.conn.on_timer(30 * S);
    v.ends(|end| end == CloseReason::CommandTimeout, 1);

    let mut v = Victim::with(quiet(), false, "");
    v.conn.on_timer(S);
    feed(&mut v.conn, &[0x21], &mut || 1);
    v.conn.on_timer(30 * S);
    assert_eq!(v.conn.close_reason(), None);
    v.conn.on_timer(31 * S);
    v.ends(|end| end == CloseReason::ReceiveTimeout, 0);
}
