//! The client's machine against servers of all kinds, rule by rule; and against anything.
//! `fuzz/targets/nbd_client.rs` runs the same scripts as `nothing_breaks` for longer.

use crate::common;
#[path = "fuzz_input/client.rs"]
mod fuzz_input;

use std::time::Duration;

use frame::Machine;
use nbd::client::{CloseReason, CommandError, Config, Connection, Op, Reply};
use nbd::message::{Opt, OptionReply, REPLY_MAGIC, Rep, flag};
use nbd::{BlockStatusExtent, Errno, SizeConstraints};
use proptest::prelude::{ProptestConfig, any, prop, proptest};
use testkit::machine::{feed, take};
use testkit::{PayloadMemory, flat};
use zerocopy::IntoBytes;

const FLAGS: u16 = flag::HAS_FLAGS
    | flag::SEND_FLUSH
    | flag::SEND_FUA
    | flag::SEND_TRIM
    | flag::SEND_WRITE_ZEROES
    | flag::SEND_DF;

fn whole() -> impl FnMut() -> usize {
    || usize::MAX
}

fn reply(option: Opt, kind: Rep, data: &[u8]) -> Vec<u8> {
    let header = OptionReply {
        magic: REPLY_MAGIC.into(),
        option: option.0.into(),
        kind: kind.0.into(),
        length: (data.len() as u32).into(),
    };
    [header.as_bytes(), data].concat()
}

fn info_export(bytes: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn info_sizes(minimum: u32, preferred: u32, payload: u32) -> Vec<u8> {
    let sizes = [minimum, preferred, payload].map(u32::to_be_bytes).concat();
    [&[0, 3][..], &sizes].concat()
}

struct Client {
    machine: Connection,
    memory: PayloadMemory,
}

impl Client {
    fn new(config: Config) -> Self {
        Self { machine: Connection::new(config), memory: PayloadMemory::new() }
    }

    /// One that has read the greeting.
    fn greeted(config: Config) -> Self {
        let mut client = Self::new(config);
        client.hear(b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// One that may send commands.
    fn ready(structured: bool) -> Self {
        let mut client = Self::greeted(Config { structured, ..Config::new("disk") });
        if structured {
            client.hear(&reply(Opt::StructuredReply, Rep::Ack, &[]));
            let context = [&[0, 0, 0, 7][..], b"base:allocation"].concat();
            client.hear(&reply(Opt::SetMetaContext, Rep::MetaContext, &context));
            client.hear(&reply(Opt::SetMetaContext, Rep::Ack, &[]));
        }
        client.hear(&reply(Opt::Go, Rep::Info, &info_export(1 << 20, FLAGS)));
        client.hear(&reply(Opt::Go, Rep::Info, &info_sizes(512, 4096, 1 << 20)));
        client.hear(&reply(Opt::Go, Rep::Ack, &[]));
        assert!(client.machine.negotiated().is_some());
        client.said();
        client
    }

    fn hear(&mut self, bytes: &[u8]) {
        feed(&mut self.machine, bytes, &mut whole());
    }

    fn said(&mut self) -> Vec<u8> {
        take(&mut self.machine, &mut whole())
    }

    /// Sends a command; its cookie.
    fn submit(&mut self, op: Op) -> [u8; 8] {
        self.machine.submit(op, Some(Duration::from_secs(30))).expect("there is room");
        self.said()[8..16].try_into().unwrap()
    }

    fn read(&mut self, at: u64, len: usize) -> [u8; 8] {
        let buffers = self.memory.room(len);
        self.submit(Op::Read { at, buffers })
    }

    /// The end of a command.
    fn outcome(&mut self) -> Result<Reply, CommandError> {
        self.machine.poll_done().expect("it has ended").outcome
    }

    fn assert_violation(&mut self, what: &str) {
        assert!(
            matches!(self.machine.close_reason(), Some(CloseReason::Violation(_))),
            "{what}: {:?}",
            self.machine.close_reason()
        );
        assert!(self.machine.is_closing() && self.machine.receive_space().is_none());
        assert!(self.said().is_empty(), "{what}: a hard disconnect");
        assert!(std::iter::from_fn(|| self.machine.poll_done()).all(|d| d.outcome.is_err()));
    }
}

fn simple(error: u32, cookie: [u8; 8]) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie].concat()
}

fn chunk(flags: u16, kind: u16, cookie: [u8; 8], payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let (flags, kind) = (flags.to_be_bytes(), kind.to_be_bytes());
    [&0x668e_33efu32.to_be_bytes()[..], &flags, &kind, &cookie, &length, payload].concat()
}

fn data(offset: u64, byte: u8, len: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &vec![byte; len]].concat()
}

fn hole(offset: u64, len: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat()
}

fn error(error: u32, message: &[u8]) -> Vec<u8> {
    [&error.to_be_bytes()[..], &(message.len() as u16).to_be_bytes(), message].concat()
}

#[test]
fn only_fixed_newstyle_is_spoken() {
    for (greeting, known) in [
        (&b"NBDMAGIX IHAVEOPT\0\x03"[..18], false),
        (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0", true),
        (b"NBDMAGICIHAVEOPT\0\0", true),
        (b"HTTP/1.1 400 Bad Request", false),
    ] {
        let mut client = Client::new(Config::new("disk"));
        client.hear(&greeting[..18]);
        let end = client.machine.close_reason().unwrap();
        assert_eq!(matches!(end, CloseReason::Unsupported(_)), known, "{end}");
        assert!(client.machine.is_closing() && client.said().is_empty());
    }
}

#[test]
fn options_are_asked_one_after_the_other() {
    let mut client = Client::greeted(Config::new("disk"));
    let said = client.said();
    assert_eq!(said[..4], [0, 0, 0, 3], "its flags");
    assert_eq!(said[4..], common::option(Opt::StructuredReply, &[]));
    client.hear(&reply(Opt::StructuredReply, Rep::Ack, &[]));
    let context = common::queries("disk", &["base:allocation"]);
    assert_eq!(client.said(), common::option(Opt::SetMetaContext, &context));
    client.hear(&reply(Opt::SetMetaContext, Rep::ErrUnsup, b"no"));
    assert_eq!(client.said(), common::option(Opt::Go, &common::go("disk", &[3])));
    client.hear(&reply(Opt::Go, Rep::Info, &info_export(4096, FLAGS)));
    client.hear(&reply(Opt::Go, Rep::Info, &[0, 99, 1, 2, 3]));
    client.hear(&reply(Opt::Go, Rep::Ack, &[]));
    let agreed = *client.machine.negotiated().unwrap();
    assert!(agreed.structured && !agreed.block_status);
    assert_eq!((agreed.bytes, agreed.size_constraints), (4096, SizeConstraints::DEFAULT));
}

#[test]
fn a_server_without_structured_replies_is_accepted() {
    let mut client = Client::greeted(Config::new(""));
    client.said();
    client.hear(&reply(Opt::StructuredReply, Rep::ErrUnsup, &[]));
    assert_eq!(client.said(), common::option(Opt::Go, &common::go("", &[3])));
}

/// And one that knows neither GO nor how to do without zeroes.
#[test]
fn an_old_server_is_accepted() {
    for (flags, padding) in [(1u8, 124), (3, 0)] {
        let mut client = Client::new(Config { structured: false, ..Config::new("disk") });
        client.hear(b"NBDMAGICIHAVEOPT\0");
        client.hear(&[flags]);
        assert_eq!(client.said()[..4], [0, 0, 0, flags], "no more than was offered");
        client.hear(&reply(Opt::Go, Rep::ErrUnsup, &[]));
        assert_eq!(client.said(), common::option(Opt::ExportName, b"disk"));
        client.hear(&info_export(8192, FLAGS)[2..]);
        client.hear(&vec![0; padding]);
        assert_eq!(client.machine.negotiated().unwrap().bytes, 8192);
        let cookie = client.submit(Op::Flush);
        client.hear(&simple(0, cookie));
        assert!(matches!(client.outcome(), Ok(Reply::Done)));
    }
}

#[test]
fn a_refused_client_disconnects_cleanly() {
    for (why, end) in [
        (Rep::ErrUnknown, CloseReason::Refused(Rep::ErrUnknown)),
        (Rep::ErrTlsReqd, CloseReason::Refused(Rep::ErrTlsReqd)),
        (Rep(1 << 31 | 999), CloseReason::Refused(Rep(1 << 31 | 999))),
        (Rep::ErrShutdown, CloseReason::ServerShutDown),
    ] {
        let mut client = Client::greeted(Config { structured: false, ..Config::new("disk") });
        client.said();
        client.hear(&reply(Opt::Go, why, b"because"));
        assert_eq!(client.machine.close_reason(), Some(end));
        assert_eq!(client.said(), common::option(Opt::Abort, &[]), "a soft disconnect");
        assert!(client.machine.is_closing());
    }
}

#[test]
fn replies_to_options_are_checked() {
    let context = [&[0, 0, 0, 7][..], b"base:other"].concat();
    let mut magic = reply(Opt::StructuredReply, Rep::Ack, &[]);
    magic[0] ^= 1;
    let mut endless = reply(Opt::StructuredReply, Rep::Ack, &[]);
    endless[16] = 0x7f;
    for (structured, heard, what) in [
        (true, magic, "magic"),
        (true, endless, "length"),
        (true, reply(Opt::Go, Rep::Ack, &[]), "another option"),
        (true, reply(Opt::StructuredReply, Rep::Info, &[]), "another kind"),
        (false, reply(Opt::Go, Rep::Ack, &[]), "no export"),
        (false, reply(Opt::Go, Rep::Info, &[0]), "no kind"),
        (false, reply(Opt::Go, Rep::Info, &[0, 0, 1]), "a short export"),
        (false, reply(Opt::Go, Rep::Info, &[0, 3, 1]), "short sizes"),
        (false, reply(Opt::Go, Rep::Server, b"x"), "a server"),
    ] {
        let mut client = Client::greeted(Config { structured, ..Config::new("disk") });
        client.hear(&heard);
        client.assert_violation(what);
    }
    let mut client = Client::greeted(Config::new("disk"));
    client.hear(&reply(Opt::StructuredReply, Rep::Ack, &[]));
    client.hear(&reply(Opt::SetMetaContext, Rep::MetaContext, &context));
    client.assert_violation("another context");
}

#[test]
fn exports_that_contradict_the_specification_are_refused() {
    for (flags, sizes, what) in [
        (0, info_sizes(512, 4096, 1 << 20), "no flags"),
        (FLAGS, info_sizes(0, 4096, 1 << 20), "a minimum of nothing"),
        (FLAGS, info_sizes(1000, 4096, 1 << 20), "no power of two"),
        (FLAGS, info_sizes(512, 256, 1 << 20), "less preferred than least"),
        (FLAGS, info_sizes(512, 4096, 100), "no payload"),
        (FLAGS, info_sizes(1 << 31, 1 << 31, 1 << 31), "endless blocks"),
    ] {
        let mut client = Client::greeted(Config { structured: false, ..Config::new("disk") });
        client.hear(&reply(Opt::Go, Rep::Info, &info_export(1 << 20, flags)));
        client.hear(&reply(Opt::Go, Rep::Info, &sizes));
        client.hear(&reply(Opt::Go, Rep::Ack, &[]));
        client.assert_violation(what);
    }
}

#[test]
fn endless_replies_are_cut_off() {
    let mut client = Client::greeted(Config { structured: false, ..Config::new("disk") });
    for _ in 0..65 {
        client.hear(&reply(Opt::Go, Rep::Info, &[0, 99]));
    }
    client.assert_violation("65 replies");
}

#[test]
fn a_read_may_come_in_pieces_in_any_order_and_with_holes() {
    let mut client = Client::ready(true);
    let cookie = client.read(4096, 2048);
    client.hear(&chunk(0, 1, cookie, &data(5120, 3, 1024)));
    client.hear(&chunk(0, 2, cookie, &hole(4096, 512)));
    assert!(client.machine.poll_done().is_none());
    client.hear(&chunk(1, 1, cookie, &data(4608, 2, 512)));
    let Ok(Reply::Data(read)) = client.outcome() else { panic!() };
    assert_eq!(flat(&read), [vec![0; 512], vec![2; 512], vec![3; 1024]].concat());
    let cookie = client.read(0, 512);
    client.hear(&chunk(0, 1, cookie, &data(0, 1, 512)));
    client.hear(&chunk(1, 0, cookie, &[]));
    assert!(matches!(client.outcome(), Ok(Reply::Data(_))));
}

#[test]
fn replies_of_several_commands_may_interleave() {
    let mut client = Client::ready(true);
    let (a, b) = (client.read(0, 1024), client.read(8192, 512));
    client.hear(&chunk(0, 1, a, &data(0, 1, 512)));
    client.hear(&chunk(1, 1, b, &data(8192, 9, 512)));
    let Ok(Reply::Data(read)) = client.outcome() else { panic!() };
    assert_eq!(flat(&read), [9; 512]);
    client.hear(&chunk(1, 1, a, &data(512, 2, 512)));
    let Ok(Reply::Data(read)) = client.outcome() else { panic!() };
    assert_eq!(flat(&read), [[1; 512], [2; 512]].concat());
}

#[test]
fn unexpected_data_is_fatal() {
    for (payload, kind, what) in [
        (data(4095, 1, 512), 1, "before the read"),
        (data(6144, 1, 512), 1, "behind the read"),
        (data(5633, 1, 512), 1, "beyond its end"),
        (data(u64::MAX, 1, 512), 1, "at the end of the world"),
        (data(4096, 1, 0), 1, "of no length"),
        (hole(6144, 1), 2, "a hole behind the read"),
        (hole(4096, u32::MAX), 2, "an endless hole"),
        (hole(4096, 0), 2, "a hole of no length"),
        (hole(4096, 512)[..11].to_vec(), 2, "half a hole"),
        (vec![0; 12], 5, "a status"),
        (vec![], 3, "an unknown chunk"),
        (vec![1], 0, "an end with a payload"),
    ] {
        let mut client = Client::ready(true);
        let cookie = client.read(4096, 2048);
        client.hear(&chunk(0, kind, cookie, &payload));
        client.assert_violation(what);
    }
}

#[test]
fn repeated_data_is_fatal() {
    for second in [chunk(0, 1, [0; 8], &data(4196, 1, 8)), chunk(0, 2, [0; 8], &hole(4096, 1))] {
        let mut client = Client::ready(true);
        let cookie = client.read(4096, 2048);
        client.hear(&chunk(0, 1, cookie, &data(4096, 1, 512)));
        let mut second = second;
        second[8..16].copy_from_slice(&cookie);
        client.hear(&second);
        client.assert_violation("twice");
    }
}

/// What is left of the buffer is data of an older command.
#[test]
fn a_success_without_all_of_its_data_is_fatal() {
    for (kind, payload) in [(1, data(4096, 1, 512)), (0, vec![])] {
        let mut client = Client::ready(true);
        let cookie = client.read(4096, 2048);
        client.hear(&chunk(1, kind, cookie, &payload));
        assert_eq!(client.outcome().unwrap_err(), CommandError::ConnectionLost);
        client.assert_violation("half a read");
    }
}

#[test]
fn replies_to_no_request_are_fatal() {
    for structured in [false, true] {
        let mut client = Client::ready(structured);
        let cookie = client.submit(Op::Flush);
        let mut other = cookie;
        other[7] ^= 1;
        client.hear(&simple(0, other));
        client.assert_violation("another cookie");
        let mut client = Client::ready(structured);
        let cookie = client.submit(Op::Flush);
        client.hear(&simple(0, cookie));
        client.submit(Op::Flush);
        client.hear(&simple(0, cookie));
        assert!(matches!(client.outcome(), Ok(Reply::Done)));
        client.assert_violation("twice: the slot is another command's by now");
    }
    let mut client = Client::ready(true);
    client.hear(&chunk(1, 0, [0; 8], &[]));
    client.assert_violation("a chunk of nothing");
    let mut client = Client::ready(true);
    client.hear(&[1, 2, 3, 4]);
    client.assert_violation("no magic");
}

#[test]
fn replies_have_the_negotiated_kind() {
    let mut client = Client::ready(true);
    let cookie = client.read(0, 512);
    client.hear(&simple(22, cookie));
    client.assert_violation("a simple reply to a read");
    let mut client = Client::ready(false);
    let cookie = client.submit(Op::Flush);
    client.hear(&chunk(1, 0, cookie, &[]));
    client.assert_violation("a structured reply");
    let mut client = Client::ready(true);
    let cookie = client.submit(Op::Trim { at: 0, len: 512 });
    client.hear(&chunk(0, 0x8001, cookie, &error(5, b"")));
    client.hear(&simple(0, cookie));
    client.assert_violation("first structured, then simple");
    let mut client = Client::ready(true);
    let cookie = client.submit(Op::Flush);
    client.hear(&chunk(0, 1, cookie, &data(0, 1, 512)));
    client.assert_violation("data of a flush");
    let mut client = Client::ready(true);
    let cookie = client.submit(Op::Flush);
    client.hear(&chunk(0, 0, cookie, &[]));
    client.assert_violation("an end that is none");
    let mut client = Client::ready(true);
    let cookie = client.submit(Op::BlockStatus { at: 0, len: 512 });
    client.hear(&simple(0, cookie));
    client.assert_violation("a block status without descriptors");
}

#[test]
fn errors_fail_their_command_alone() {
    let mut client = Client::ready(true);
    let offset = |at: u64| [error(5, b"a sector is bad"), at.to_be_bytes().to_vec()].concat();
    for (kind, payload) in [
        (0x8001, error(5, b"the medium failed")),
        (0x8002, offset(4608)),
        (0xffff, error(5, b"something new, with more behind it, of any kind")),
    ] {
        let cookie = client.read(4096, 2048);
        client.hear(&chunk(0, 1, cookie, &data(4096, 1, 1024)));
        client.hear(&chunk(0, kind, cookie, &payload));
        assert!(client.machine.poll_done().is_none(), "more may come");
        client.hear(&chunk(1, 0, cookie, &[]));
        assert_eq!(client.outcome().unwrap_err(), CommandError::Error(Errno::Io));
    }
    let cookie = client.submit(Op::Trim { at: 0, len: 512 });
    client.hear(&simple(95, cookie));
    assert_eq!(client.outcome().unwrap_err(), CommandError::Error(Errno::NotSup));
    assert_eq!(client.machine.close_reason(), None);
}

#[test]
fn error_chunks_are_checked() {
    let outside = [error(5, b""), 99u64.to_be_bytes().to_vec()].concat();
    let mut long = error(5, b"short");
    long[5] = 200;
    for (kind, payload, what) in [
        (0x8001, error(0, b""), "no error"),
        (0x8001, long, "a message beyond its end"),
        (0x8001, vec![0; 5], "too short"),
        (0x8002, error(5, b""), "no offset"),
        (0x8002, outside, "an offset outside of the read"),
        (0x8001, vec![1; 1 << 16], "an endless message"),
    ] {
        let mut client = Client::ready(true);
        let cookie = client.read(4096, 2048);
        client.hear(&chunk(1, kind, cookie, &payload));
        client.assert_violation(what);
    }
}

#[test]
fn a_block_status_has_one_extent_within_the_request() {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<u8>>();
    let ask = |client: &mut Client| client.submit(Op::BlockStatus { at: 512, len: 4096 });
    let mut client = Client::ready(true);
    let cookie = ask(&mut client);
    client.hear(&chunk(0, 5, cookie, &words(&[7, 1024, 0xffff_ff03])));
    client.hear(&chunk(1, 0, cookie, &[]));
    let Ok(Reply::Extent(extent)) = client.outcome() else { panic!() };
    assert_eq!(extent, BlockStatusExtent { bytes: 1024, hole: true, zero: true });
    for (payload, what) in [
        (words(&[8, 1024, 0]), "another context"),
        (words(&[7, 0, 0]), "of nothing"),
        (words(&[7, 4097, 0]), "more than was asked for"),
        (words(&[7, 512, 0, 512, 0]), "two extents"),
        (words(&[7]), "none"),
    ] {
        let mut client = Client::ready(true);
        let cookie = ask(&mut client);
        client.hear(&chunk(1, 5, cookie, &payload));
        client.assert_violation(what);
    }
    let mut client = Client::ready(true);
    let cookie = ask(&mut client);
    client.hear(&chunk(1, 0, cookie, &[]));
    assert_eq!(client.outcome().unwrap_err(), CommandError::ConnectionLost);
    client.assert_violation("a success without a status");
}

#[test]
fn a_server_that_shuts_down_is_disconnected_cleanly() {
    let mut client = Client::ready(true);
    let (first, _) = (client.submit(Op::Flush), client.submit(Op::Flush));
    client.hear(&chunk(1, 0x8001, first, &error(108, b"bye")));
    assert_eq!(client.outcome().unwrap_err(), CommandError::Error(Errno::Shutdown));
    assert_eq!(client.outcome().unwrap_err(), CommandError::ConnectionLost);
    assert_eq!(client.machine.close_reason(), Some(CloseReason::ServerShutDown));
    assert_eq!(client.said(), common::request(2, 0, 0, 0, 0), "NBD_CMD_DISC");
}

#[test]
fn stalled_servers_are_disconnected() {
    let seconds = Duration::from_secs;
    let mut client = Client::new(Config::new("disk"));
    client.machine.on_timer(seconds(10));
    assert_eq!(client.machine.close_reason(), Some(CloseReason::HandshakeTimeout));

    let mut client = Client::ready(true);
    client.machine.on_timer(seconds(9999));
    assert_eq!((client.machine.close_reason(), client.machine.next_timer()), (None, None));
    let cookie = client.read(0, 512);
    assert_eq!(client.machine.next_timer(), Some(seconds(10_029)));
    client.hear(&chunk(1, 1, cookie, &data(0, 1, 512))[..100]);
    client.machine.on_timer(seconds(10_029));
    assert_eq!(client.machine.close_reason(), Some(CloseReason::CommandTimeout));
    assert_eq!(client.outcome().unwrap_err(), CommandError::ConnectionLost);

    let mut client = Client::ready(true);
    client.machine.submit(Op::Flush, None).unwrap();
    client.hear(&[0x66]);
    client.machine.on_timer(seconds(60));
    assert_eq!(client.machine.close_reason(), Some(CloseReason::ReceiveTimeout));
}

#[test]
fn commands_in_flight_are_bounded() {
    let config = Config { structured: false, max_in_flight: 3, ..Config::new("disk") };
    let mut client = Client::greeted(config);
    assert!(client.machine.submit(Op::Flush, None).is_none(), "nothing is agreed on");
    client.hear(&reply(Opt::Go, Rep::Info, &info_export(1 << 20, FLAGS)));
    client.hear(&reply(Opt::Go, Rep::Ack, &[]));
    client.said();
    let cookie = client.submit(Op::Flush);
    client.submit(Op::Flush);
    client.submit(Op::Flush);
    assert!(client.machine.submit(Op::Flush, None).is_none());
    client.hear(&simple(0, cookie));
    assert_eq!(client.machine.free_slots(), 1);
    assert!(client.machine.submit(Op::Flush, None).is_some());
}

#[test]
#[should_panic(expected = "is beyond")]
fn features_not_offered_are_not_used() {
    let mut client = Client::greeted(Config { structured: false, ..Config::new("disk") });
    client.hear(&reply(Opt::Go, Rep::Info, &info_export(1 << 20, flag::HAS_FLAGS)));
    client.hear(&reply(Opt::Go, Rep::Ack, &[]));
    client.submit(Op::Flush);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..1500)) {
        fuzz_input::run(&script);
    }

    /// With an export agreed on first, so that what follows reaches the commands.
    #[test]
    fn nothing_breaks_behind_the_handshake(
        structured in any::<bool>(),
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut all = vec![u8::from(structured), fuzz_input::AGREE];
        all.extend(script);
        fuzz_input::run(&all);
    }
}
