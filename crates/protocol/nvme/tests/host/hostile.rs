//! A controller that says what it must not, and a host that is not harmed by it. Each test names
//! the clause of NVMe/TCP 1.0 that is broken.

use std::time::Duration;

use frame::Machine;
use nvme::entry::{Cqe, NvmOpcode};
use nvme::host::{
    CloseReason, Command, CompletedCommand, Config, Connection, LostCommand, Payload,
};
use nvme::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, DataPdu, FLAG_LAST, FLAG_SUCCESS, FatalError, IcResp,
    PduType, R2t, TermReq,
};
use nvme::testing::ScriptedHost;
use nvme::{Digests, Sqe, Status};
use zerocopy::{FromBytes, IntoBytes};

use crate::common::pattern;
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};

const S: Duration = Duration::from_secs(1);
const FIELD: FatalError = FatalError::InvalidHeaderField;

/// A host, and what its controller says to it.
struct Victim {
    conn: Connection,
    /// How the controller puts PDUs together.
    form: ScriptedHost,
    memory: PayloadMemory,
    /// What the host has sent and the script has not looked at.
    heard: Vec<u8>,
}

impl Victim {
    /// Before ICResp.
    fn new(config: Config) -> Self {
        let mut conn = Connection::new(config);
        conn.on_timer(Duration::ZERO);
        let heard = take(&mut conn, &mut || usize::MAX);
        assert_eq!(heard.len(), 128, "ICReq");
        Self {
            conn,
            form: ScriptedHost::default(),
            memory: PayloadMemory::new(),
            heard: Vec::new(),
        }
    }

    /// With digests or without, ready for commands.
    fn ready(digests: bool) -> Self {
        let digests = Digests { header: digests, data: digests };
        let mut victim = Self::new(Config { digests, ..Config::default() });
        victim.say(IcResp::new(digests.bits(), 4096).as_bytes());
        victim.form =
            ScriptedHost { header_digest: digests.header, data_digest: digests.data, hpda: 0 };
        assert_eq!(victim.conn.digests(), Some(digests));
        victim
    }

    fn say(&mut self, bytes: &[u8]) {
        feed(&mut self.conn, bytes, &mut || 7);
    }

    fn listen(&mut self) {
        self.heard.extend(take(&mut self.conn, &mut || usize::MAX));
    }

    fn submit(&mut self, opcode: NvmOpcode, payload: Payload) -> u16 {
        let sqe = Sqe::new(opcode.0, 0, 1);
        self.conn.submit(Command { sqe, payload, timeout: Some(30 * S) }).expect("there is room");
        self.listen();
        let (capsule, _) = CapsuleCmd::read_from_prefix(&self.heard).expect("a capsule");
        let plen = capsule.common.plen.get() as usize;
        assert_eq!((capsule.common.kind(), plen), (PduType::CapsuleCmd, self.heard.len()));
        self.heard.clear();
        capsule.sqe.cid.get()
    }

    /// The identifier of a read of this length.
    fn read(&mut self, length: usize) -> u16 {
        let room = self.memory.room(length);
        self.submit(NvmOpcode::Read, Payload::ToHost(room))
    }

    fn write(&mut self, data: &[u8]) -> u16 {
        let data = self.memory.holding(data);
        self.submit(NvmOpcode::Write, Payload::ToController(data))
    }

    fn data(&mut self, cid: u16, offset: u32, bytes: &[u8], flags: u8) {
        let length = u32::try_from(bytes.len()).unwrap();
        let mut header = DataPdu::new(PduType::C2HData, cid, 0, offset, length);
        header.common.flags = flags;
        let pdu = self.form.pdu(header.as_bytes(), bytes, 0);
        self.say(&pdu);
    }

    fn r2t(&mut self, cid: u16, ttag: u16, offset: u32, length: u32) {
        let r2t = R2t { offset: offset.into(), ..R2t::new(cid, ttag, length) };
        let pdu = self.form.pdu(r2t.as_bytes(), &[], 0);
        self.say(&pdu);
    }

    fn respond(&mut self, cid: u16, status: Status) {
        let (result, sq_head, sq_id) = (5.into(), 0.into(), 0.into());
        let status = (status.field() << 1).into();
        let resp = CapsuleResp::new(Cqe { result, sq_head, sq_id, cid: cid.into(), status });
        let pdu = self.form.pdu(resp.as_bytes(), &[], 0);
        self.say(&pdu);
    }

    fn done(&mut self) -> Option<CompletedCommand> {
        self.conn.poll_done()
    }

    /// The PDUs of type H2CData that it has sent: tag, offset, data and whether it was the last.
    fn answers(&mut self) -> Vec<(u16, u32, Vec<u8>, bool)> {
        self.listen();
        let mut out = Vec::new();
        while let Ok((header, _)) = DataPdu::read_from_prefix(&self.heard) {
            assert_eq!(header.common.kind(), PduType::H2CData);
            let pdu: Vec<u8> = self.heard.drain(..header.common.plen.get() as usize).collect();
            let end = pdu.len() - if self.form.data_digest { 4 } else { 0 };
            let data = pdu[usize::from(header.common.pdo)..end].to_vec();
            let last = header.common.has(FLAG_LAST);
            out.push((header.transfer_tag.get(), header.offset.get(), data, last));
        }
        out
    }

    /// It has found what was said last at fault: H2CTermReq, and every command that was in flight
    /// ends once, in doubt.
    #[track_caller]
    fn refuses(&mut self, error: FatalError, information: u32) {
        let in_doubt = self.conn.in_flight();
        assert_eq!(in_doubt, 0, "nothing stays in flight");
        self.listen();
        assert_eq!(self.conn.close_reason(), Some(CloseReason::Violation { error, information }));
        let (term, excerpt) = TermReq::read_from_prefix(&self.heard).expect("H2CTermReq");
        assert_eq!(term.common.kind(), PduType::H2CTermReq);
        assert_eq!((term.status.get(), term.information.get()), (error.0, information));
        assert_eq!(term.common.plen.get() as usize, self.heard.len());
        assert!(excerpt.len() >= 8 && excerpt.len() <= 128, "the header in error");
        assert!(self.conn.is_closing() && self.conn.receive_space().is_none());
        assert!(self.conn.submit(flush()).is_none(), "it takes nothing any more");
        while let Some(done) = self.done() {
            assert_eq!(done.outcome, Err(LostCommand::InDoubt));
        }
    }
}

fn flush() -> Command {
    Command { sqe: Sqe::new(NvmOpcode::Flush.0, 0, 1), payload: Payload::None, timeout: Some(S) }
}

/// 3.6.2.3: what ICResp may say.
#[test]
fn ic_resp_is_checked() {
    let good = IcResp::new(0, 8192);
    let common = |plen: u32| CommonHeader { plen: plen.into(), ..good.common };
    for (resp, error, information) in [
        (IcResp { pfv: 1.into(), ..good }, FatalError::UnsupportedParameter, 8),
        (IcResp { cpda: 32, ..good }, FIELD, 10),
        (IcResp { digest: 1, ..good }, FIELD, 11),
        (IcResp { max_h2c_data: 4092.into(), ..good }, FIELD, 12),
        (IcResp { max_h2c_data: 4098.into(), ..good }, FIELD, 12),
        (IcResp { common: common(132), ..good }, FIELD, 4),
        (IcResp { common: common(120), ..good }, FIELD, 4),
        (IcResp { common: CommonHeader { hlen: 24, ..good.common }, ..good }, FIELD, 2),
    ] {
        let mut victim = Victim::new(Config::default());
        assert_eq!((victim.conn.free_slots(), victim.conn.digests()), (0, None));
        victim.say(resp.as_bytes());
        victim.refuses(error, information);
    }
}

/// 3.6.2.3: a controller may do without the digests that it is asked for.
#[test]
fn digests_may_be_declined() {
    let digests = Digests { header: true, data: true };
    let mut victim = Victim::new(Config { digests, ..Config::default() });
    victim.say(IcResp::new(0, 4096).as_bytes());
    assert_eq!(victim.conn.digests(), Some(Digests::default()));
    assert_eq!(victim.conn.free_slots(), usize::from(Config::default().max_in_flight));
}

/// 3.6.1.2: types, sequence and header fields.
#[test]
fn pdus_out_of_place_are_fatal() {
    let mut early = Victim::new(Config::default());
    early.respond(0, Status::SUCCESS);
    early.refuses(FatalError::PduSequence, 0);
    let mut again = Victim::ready(false);
    again.say(IcResp::new(0, 4096).as_bytes());
    again.refuses(FatalError::PduSequence, 0);
    for kind in [0x00, 0x02, 0x04, 0x06, 0x08, 0x0a, 0xff] {
        let mut victim = Victim::ready(false);
        victim.say(&[kind, 0, 24, 0, 24, 0, 0, 0]);
        victim.refuses(FIELD, 0);
    }
    for (header, at) in [
        ([0x05, 0, 23, 0, 24, 0, 0, 0], 2),
        ([0x05, 0, 24, 0, 23, 0, 0, 0], 4),
        ([0x05, 1, 24, 0, 28, 0, 0, 0], 1),
        ([0x09, 0, 24, 0, 0, 0, 0, 0], 4),
    ] {
        let mut victim = Victim::ready(false);
        victim.say(&header);
        victim.refuses(FIELD, at);
    }
    // Neither responses nor R2Ts bring data.
    for kind in [0x05, 0x09] {
        let mut victim = Victim::ready(false);
        let mut pdu = [0; 32];
        pdu[..8].copy_from_slice(&[kind, 0, 24, 24, 32, 0, 0, 0]);
        victim.say(&pdu);
        victim.refuses(FIELD, 4);
    }
}

/// 3.6.2.9: PDO and PLEN of data have to fit each other and the header.
#[test]
fn data_that_does_not_fit_its_pdu_is_fatal() {
    for (pdo, plen, length, at) in [
        (20u8, 24 + 512, 512u32, 3),
        (26, 26 + 512, 512, 3),
        (28, 28, 512, 4),
        (24, 24 + 512, 511, 4),
        (24, 24 + 512, 0, 4),
        (0, 24, 512, 4),
        (255, 24 + 512, 512, 3),
    ] {
        let mut victim = Victim::ready(false);
        let cid = victim.read(512);
        let mut header = DataPdu::new(PduType::C2HData, cid, 0, 0, length);
        (header.common.pdo, header.common.plen) = (pdo, (plen).into());
        victim.say(header.as_bytes());
        victim.refuses(FIELD, at);
    }
}

/// 3.6.2.9: data within what was asked for, in order and without holes; LAST is the last.
#[test]
fn data_beyond_the_buffer_is_fatal() {
    let too_far = |say: &dyn Fn(&mut Victim, u16)| {
        let mut victim = Victim::ready(true);
        let cid = victim.read(1024);
        say(&mut victim, cid);
        victim
    };
    let range = (FatalError::DataOutOfRange, 0);
    for (error, information, mut victim) in [
        (range.0, range.1, too_far(&|v, cid| v.data(cid, 0, &[1; 1028], FLAG_LAST))),
        (range.0, range.1, too_far(&|v, cid| v.data(cid, 512, &[1; 512], FLAG_LAST))),
        (range.0, range.1, too_far(&|v, cid| v.data(cid, u32::MAX - 3, &[1; 8], FLAG_LAST))),
        (
            range.0,
            range.1,
            too_far(&|v, cid| {
                v.data(cid, 0, &[1; 512], 0);
                v.data(cid, 0, &[1; 512], 0);
            }),
        ),
        (
            range.0,
            range.1,
            too_far(&|v, cid| {
                v.data(cid, 0, &[1; 1024], 0);
                v.data(cid, 1024, &[1; 4], 0);
            }),
        ),
        (
            FatalError::PduSequence,
            0,
            too_far(&|v, cid| {
                v.data(cid, 0, &[1; 512], FLAG_LAST);
                v.data(cid, 512, &[1; 512], FLAG_LAST);
            }),
        ),
        (FIELD, 1, too_far(&|v, cid| v.data(cid, 0, &[1; 512], FLAG_SUCCESS))),
    ] {
        victim.refuses(error, information);
    }
}

/// Identifiers of commands that are not in flight, or not any more (Base 2.0, 3.3.3.2).
#[test]
fn commands_that_are_not_in_flight_are_fatal() {
    let mut unknown = Victim::ready(false);
    unknown.respond(0, Status::SUCCESS);
    unknown.refuses(FIELD, 20);

    let mut twice = Victim::ready(false);
    let cid = twice.read(512);
    twice.respond(cid, Status::INVALID_FIELD);
    let done = twice.done().expect("it has ended");
    assert_eq!(done.outcome.unwrap().status, Status::INVALID_FIELD);
    assert_eq!((done.outcome.unwrap().result, done.transferred), (5, 0));
    // The slot is another command's by now.
    assert_ne!(twice.read(512), cid);
    twice.respond(cid, Status::SUCCESS);
    twice.refuses(FIELD, 20);

    let mut late = Victim::ready(true);
    let cid = late.read(512);
    late.data(cid, 0, &[7; 512], FLAG_LAST | FLAG_SUCCESS);
    assert!(late.done().unwrap().outcome.unwrap().status.is_success());
    late.respond(cid, Status::SUCCESS);
    late.refuses(FIELD, 20);

    let mut after = Victim::ready(false);
    let cid = after.read(512);
    after.respond(cid, Status::SUCCESS);
    assert_eq!(after.done().unwrap().transferred, 0);
    after.data(cid, 0, &[7; 512], FLAG_LAST);
    after.refuses(FIELD, 8);

    // One that has been submitted and of which nothing has been sent: no controller knows of it.
    let mut early = Victim::ready(false);
    early.conn.submit(flush()).unwrap();
    early.respond(0x1000, Status::SUCCESS);
    assert_eq!(
        early.conn.close_reason(),
        Some(CloseReason::Violation { error: FIELD, information: 20 })
    );
}

/// Data goes where the command says: none for a write, none asked for by a read.
#[test]
fn data_the_wrong_way_is_fatal() {
    let mut victim = Victim::ready(false);
    let cid = victim.write(&[1; 512]);
    victim.data(cid, 0, &[1; 512], FLAG_LAST);
    victim.refuses(FIELD, 8);
    for length in [512, 16] {
        let mut victim = Victim::ready(false);
        let cid = victim.read(length);
        victim.r2t(cid, 1, 0, 16);
        victim.refuses(FIELD, 8);
    }
    // The capsule has brought it.
    let mut victim = Victim::ready(false);
    let cid = victim.write(&[1; 512]);
    victim.r2t(cid, 1, 0, 512);
    victim.refuses(FIELD, 8);
}

/// 3.6.2.10: R2Ts for what there is, in order, once, and no more of them than MAXR2T.
#[test]
fn r2ts_beyond_the_data_are_fatal() {
    let data = pattern(1, 20_000);
    for (offset, length) in [(0, 20_001), (0, 0), (4, 4), (20_000, 4), (u32::MAX, 2), (0, u32::MAX)]
    {
        let mut victim = Victim::ready(false);
        let cid = victim.write(&data);
        victim.r2t(cid, 1, offset, length);
        victim.refuses(FatalError::DataOutOfRange, 0);
    }
    let mut again = Victim::ready(false);
    let cid = again.write(&data);
    again.r2t(cid, 1, 0, 8000);
    again.r2t(cid, 1, 0, 8000);
    again.refuses(FatalError::DataOutOfRange, 0);

    let mut many = Victim::ready(false);
    let cid = many.write(&data);
    for i in 0..4 {
        many.r2t(cid, 1, i * 4, 4);
    }
    assert_eq!(many.conn.close_reason(), None);
    many.r2t(cid, 1, 16, 4);
    many.refuses(FatalError::DataLimit, 0);
}

/// 3.6.2.8: data is sent as it is asked for, in pieces up to MAXH2CDATA; the last one says so.
#[test]
fn r2ts_are_answered() {
    for digests in [false, true] {
        let data = pattern(9, 20_000);
        let mut victim = Victim::ready(digests);
        let cid = victim.write(&data);
        victim.r2t(cid, 0x77, 0, 8192);
        victim.r2t(cid, 0x78, 8192, 11_808);
        let answers = victim.answers();
        let shape: Vec<_> = answers.iter().map(|a| (a.0, a.1, a.2.len(), a.3)).collect();
        let expected = [
            (0x77, 0, 4096, false),
            (0x77, 4096, 4096, true),
            (0x78, 8192, 4096, false),
            (0x78, 12_288, 4096, false),
            (0x78, 16_384, 3616, true),
        ];
        assert_eq!(shape, expected);
        assert!(answers.into_iter().flat_map(|a| a.2).eq(data));
        victim.respond(cid, Status::SUCCESS);
        assert_eq!(victim.done().unwrap().transferred, 20_000);
    }
}

/// 3.6.2.3: data begins where the controller wants it (CPDA).
#[test]
fn data_is_aligned_as_the_controller_wants_it() {
    let mut victim = Victim::new(Config::default());
    victim.say(IcResp { cpda: 31, ..IcResp::new(0, 4096) }.as_bytes());
    let data = victim.memory.holding(&[3; 512]);
    let sqe = Sqe::new(NvmOpcode::Write.0, 0, 1);
    let payload = Payload::ToController(data);
    victim.conn.submit(Command { sqe, payload, timeout: None }).unwrap();
    victim.listen();
    let (capsule, _) = CapsuleCmd::read_from_prefix(&victim.heard).unwrap();
    let length = u32::try_from(victim.heard.len()).unwrap();
    assert_eq!((capsule.common.pdo, capsule.common.plen.get()), (128, 128 + 512));
    assert_eq!(length, 128 + 512);
}

/// What a controller asks for piece by piece waits for the socket, however small the pieces are.
#[test]
fn small_r2ts_take_no_memory() {
    let mut victim = Victim::ready(false);
    let cid = victim.write(&vec![5; 1 << 20]);
    let mut sent = 0;
    for i in 0..40_000 {
        victim.r2t(cid, 1, i * 4, 4);
        // The socket takes a little, once in a while.
        if i % 4 == 3 {
            let queue = victim.conn.output();
            assert!(queue.len() <= 256 * 1024 + 28, "{} bytes wait", queue.len());
            let n = queue.len().min(4 * 28);
            queue.advance(n);
            sent += n;
        }
        assert_eq!(victim.conn.close_reason(), None, "R2T {i}");
    }
    assert_eq!(sent, 40_000 * 28);
}

/// A controller that ends a write early gets no more of its data.
#[test]
fn a_write_that_has_ended_sends_no_more() {
    let mut victim = Victim::ready(false);
    let data = pattern(3, 1 << 20);
    let cid = victim.write(&data);
    victim.r2t(cid, 1, 0, 1 << 20);
    let ahead = victim.conn.output().len();
    assert!(ahead < 300 * 1024);
    victim.respond(cid, Status::WRITE_FAULT);
    assert_eq!(victim.done().unwrap().outcome.unwrap().status, Status::WRITE_FAULT);
    assert_eq!(victim.conn.output().len(), ahead);
}

/// A controller that says that a write has succeeded does not have what has not been sent to it: in
/// the capsule, in answer to an R2T, or not even put together.
#[test]
fn data_that_was_not_sent_was_not_moved() {
    for digests in [false, true] {
        let mut capsule = Victim::ready(digests);
        let data = capsule.memory.holding(&[1; 4096]);
        let sqe = Sqe::new(NvmOpcode::Write.0, 0, 1);
        let write = Command { sqe, payload: Payload::ToController(data), timeout: None };
        capsule.conn.submit(write).unwrap();
        let length = capsule.conn.output().len();
        capsule.conn.output().advance(length - 1);
        capsule.respond(0x1000, Status::SUCCESS);
        assert!(capsule.done().unwrap().transferred < 4096);

        for length in [20_000u32, 1 << 20] {
            let mut victim = Victim::ready(digests);
            let cid = victim.write(&pattern(3, length as usize));
            victim.r2t(cid, 1, 0, 16_384);
            assert!(victim.conn.output().len() > 16_384);
            victim.r2t(cid, 2, 16_384, length - 16_384);
            victim.respond(cid, Status::SUCCESS);
            let done = victim.done().unwrap();
            assert!(done.outcome.unwrap().status.is_success() && done.transferred < 16_384);
        }
    }
}

/// 3.3: a wrong header digest is fatal.
#[test]
fn a_wrong_header_digest_is_fatal() {
    let mut victim = Victim::ready(true);
    let cid = victim.read(512);
    let header = DataPdu::new(PduType::C2HData, cid, 0, 0, 512);
    let mut pdu = victim.form.pdu(header.as_bytes(), &[1; 512], 0);
    pdu[24] ^= 1;
    let digest = u32::from_le_bytes(pdu[24..28].try_into().unwrap());
    victim.say(&pdu);
    victim.refuses(FatalError::HeaderDigest, digest);
}

/// 3.6.1.3.2: a wrong data digest fails its command, which may be tried again, and no other.
#[test]
fn a_wrong_data_digest_fails_the_command_only() {
    for flags in [FLAG_LAST | FLAG_SUCCESS, FLAG_LAST] {
        let mut victim = Victim::ready(true);
        let cid = victim.read(1024);
        let other = victim.read(512);
        let header = DataPdu::new(PduType::C2HData, cid, 0, 0, 512);
        let mut pdu = victim.form.pdu(header.as_bytes(), &[1; 512], 0);
        *pdu.last_mut().unwrap() ^= 1;
        victim.say(&pdu);
        victim.data(cid, 512, &[2; 512], flags);
        if flags & FLAG_SUCCESS == 0 {
            victim.respond(cid, Status::SUCCESS);
        }
        let done = victim.done().expect("it has ended");
        assert_eq!(done.outcome.unwrap().status, Status::TRANSIENT_TRANSPORT);
        victim.data(other, 0, &[3; 512], FLAG_LAST | FLAG_SUCCESS);
        let done = victim.done().expect("the other one as well");
        assert!(done.outcome.unwrap().status.is_success());
        assert_eq!((done.transferred, flat(&done.buffers)), (512, vec![3; 512]));
        assert_eq!(victim.conn.close_reason(), None);
    }
}

/// What a controller leaves out of a read is told.
#[test]
fn a_read_may_come_short() {
    let mut victim = Victim::ready(false);
    let cid = victim.read(1024);
    victim.data(cid, 0, &[1; 512], FLAG_LAST | FLAG_SUCCESS);
    let done = victim.done().unwrap();
    assert!(done.outcome.unwrap().status.is_success());
    assert_eq!((done.transferred, flat(&done.buffers)[..512].to_vec()), (512, vec![1; 512]));
}

/// 3.6.2.5: the controller may find this side at fault.
#[test]
fn the_controller_may_terminate() {
    let mut victim = Victim::ready(false);
    victim.read(512);
    let (error, information) = (FatalError::DataLimit, 9);
    let term = TermReq::new(PduType::C2HTermReq, error, information, 72);
    victim.say(term.as_bytes());
    assert_eq!(
        victim.conn.close_reason(),
        Some(CloseReason::ControllerTerminated { error, information })
    );
    assert_eq!(victim.done().unwrap().outcome, Err(LostCommand::InDoubt));
    assert!(victim.conn.is_closing() && victim.conn.output().is_empty());

    let mut long = Victim::new(Config::default());
    long.say(TermReq::new(PduType::C2HTermReq, error, information, 129).as_bytes());
    long.refuses(FIELD, 4);
}

/// Silence has an end: before ICResp, within a PDU, and where a command is not answered.
#[test]
fn stalled_controllers_are_disconnected() {
    let mut mute = Victim::new(Config::default());
    assert_eq!(mute.conn.next_timer(), Some(10 * S));
    mute.conn.on_timer(10 * S - Duration::from_millis(1));
    assert_eq!(mute.conn.close_reason(), None);
    mute.conn.on_timer(10 * S);
    assert_eq!(
        (mute.conn.close_reason(), mute.conn.digests()),
        (Some(CloseReason::EstablishTimeout), None)
    );

    let mut half = Victim::ready(false);
    half.conn.on_timer(20 * S);
    half.say(&[5, 0, 24]);
    assert_eq!(half.conn.next_timer(), Some(80 * S));
    half.conn.on_timer(80 * S);
    assert_eq!(half.conn.close_reason(), Some(CloseReason::ReceiveTimeout));

    let mut busy = Victim::ready(false);
    assert_eq!(busy.conn.next_timer(), None);
    busy.conn.on_timer(100 * S);
    let forgotten = busy.read(512);
    busy.conn.on_timer(110 * S);
    for second in 110..130 {
        busy.conn.on_timer(second * S);
        let cid = busy.read(512);
        assert_ne!(cid, forgotten);
        busy.data(cid, 0, &[1; 512], FLAG_LAST | FLAG_SUCCESS);
        assert!(busy.done().unwrap().outcome.is_ok());
        assert_eq!(busy.conn.close_reason(), None, "{second}");
    }
    assert_eq!(busy.conn.next_timer(), Some(130 * S));
    busy.conn.on_timer(130 * S);
    assert_eq!(busy.conn.close_reason(), Some(CloseReason::CommandTimeout));
    assert_eq!(busy.done().unwrap().outcome, Err(LostCommand::InDoubt));
    assert!(busy.done().is_none());
}

/// A command without a timeout may take for ever; those with one do not outlive theirs.
#[test]
fn deadlines_are_those_of_the_commands() {
    let mut victim = Victim::ready(false);
    let wait = |timeout| Command { timeout, ..flush() };
    victim.conn.submit(wait(None)).unwrap();
    assert_eq!(victim.conn.next_timer(), None);
    victim.conn.submit(wait(Some(9 * S))).unwrap();
    victim.conn.submit(wait(Some(3 * S))).unwrap();
    assert_eq!(victim.conn.next_timer(), Some(3 * S));
    victim.listen();
    let (capsule, _) =
        CapsuleCmd::read_from_prefix(&victim.heard[2 * size_of::<CapsuleCmd>()..]).unwrap();
    victim.respond(capsule.sqe.cid.get(), Status::SUCCESS);
    victim.conn.on_timer(4 * S);
    assert_eq!((victim.conn.close_reason(), victim.conn.next_timer()), (None, Some(9 * S)));
    victim.conn.close();
    let lost: Vec<_> = std::iter::from_fn(|| victim.done()).map(|d| d.outcome.is_err()).collect();
    assert_eq!(lost, [false, true, true]);
}

/// Commands of which nothing was sent are not in doubt, and nothing of them is sent any more.
#[test]
fn unsent_commands_are_not_in_doubt() {
    let mut victim = Victim::ready(false);
    for _ in 0..3 {
        victim.conn.submit(flush()).unwrap();
    }
    victim.conn.output().advance(73);
    victim.conn.close();
    assert!(victim.conn.output().is_empty());
    let lost: Vec<_> =
        std::iter::from_fn(|| victim.done()).map(|d| d.outcome.unwrap_err()).collect();
    assert_eq!(lost, [LostCommand::InDoubt, LostCommand::InDoubt, LostCommand::Unsent]);
    assert_eq!(victim.conn.close_reason(), Some(CloseReason::Closed));
}

/// As many commands as the queue has room for; identifiers are not used again at once.
#[test]
fn a_full_queue_takes_no_more() {
    let mut victim = Victim::ready(false);
    let cids: Vec<u16> = (0..31).map(|_| victim.read(512)).collect();
    assert_eq!((victim.conn.free_slots(), victim.conn.in_flight()), (0, 31));
    assert!(victim.conn.submit(flush()).is_none());
    victim.respond(cids[4], Status::SUCCESS);
    let mut seen = cids.clone();
    for _ in 0..15 {
        let cid = victim.read(512);
        assert!(!seen.contains(&cid));
        seen.push(cid);
        victim.respond(cid, Status::SUCCESS);
    }
}
