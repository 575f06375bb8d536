//! The server's machine against clients of all kinds, rule by rule; and against anything.
//! `fuzz/targets/nbd_server.rs` runs the same scripts as `nothing_breaks` for longer.

use testkit::machine::feed;
#[path = "fuzz_input/server.rs"]
mod fuzz_input;

use std::time::Duration;

use crate::common::{BYTES, Served, config, export, go, option, queries, replies, request, string};
use frame::Machine;
use nbd::message::{Cmd, Info, Opt, Rep, command_flag, flag};
use nbd::server::{Action, Answer, CloseReason, Command, Config, MAX_OPTION_BYTES};
use nbd::{Errno, Export, SizeConstraints, TransmissionFlags};
use proptest::prelude::*;

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

/// One that has sent its flags.
fn greeted(exports: &[Export]) -> Served {
    let mut server = Served::new(config(exports));
    assert_eq!(server.exchange(&[0, 0, 0, 3]), GREETING);
    server
}

/// One that has entered the transmission phase.
fn ready(structured: bool) -> Served {
    ready_for(&[export("disk")], structured)
}

fn ready_for(exports: &[Export], structured: bool) -> Served {
    let mut server = greeted(exports);
    if structured {
        let replied = ask(&mut server, Opt::StructuredReply, &[]);
        assert_eq!(replied[0].1, Rep::Ack);
        ask(&mut server, Opt::SetMetaContext, &queries("disk", &["base:allocation"]));
    }
    let replied = ask(&mut server, Opt::Go, &go("disk", &[Info::BlockSize.0]));
    assert_eq!(replied.last().unwrap().1, Rep::Ack);
    server
}

fn ask(server: &mut Served, wanted: Opt, data: &[u8]) -> Vec<(Opt, Rep, Vec<u8>)> {
    let replied = replies(&server.exchange(&option(wanted, data)));
    assert!(replied.iter().all(|(option, ..)| *option == wanted));
    replied
}

/// The one reply to an option that is refused.
fn refusal(server: &mut Served, wanted: Opt, data: &[u8]) -> Rep {
    let replied = ask(server, wanted, data);
    assert_eq!(replied.len(), 1, "{replied:?}");
    replied[0].1
}

/// A simple reply's error; what is behind it.
fn simple(bytes: &[u8], cookie: u64) -> (u32, &[u8]) {
    assert_eq!(bytes[..4], 0x6744_6698u32.to_be_bytes());
    assert_eq!(bytes[8..16], cookie.to_be_bytes());
    (u32::from_be_bytes(bytes[4..8].try_into().unwrap()), &bytes[16..])
}

/// The one chunk of a structured reply: its type and its payload.
fn chunk(bytes: &[u8], cookie: u64) -> (u16, &[u8]) {
    assert_eq!(bytes[..6], [0x66, 0x8e, 0x33, 0xef, 0, 1], "the last chunk");
    assert_eq!(bytes[8..16], cookie.to_be_bytes());
    let length = u32::from_be_bytes(bytes[16..20].try_into().unwrap()) as usize;
    assert_eq!(bytes.len(), 20 + length);
    (u16::from_be_bytes([bytes[6], bytes[7]]), &bytes[20..])
}

/// How a request fails, if it does; nothing may be left behind its answer.
fn outcome(server: &mut Served, bytes: &[u8], cookie: u64) -> Result<(), Errno> {
    let back = server.exchange(bytes);
    if back.starts_with(&[0x66]) {
        let (kind, payload) = chunk(&back, cookie);
        if kind != 0x8001 {
            return Ok(());
        }
        let length = u16::from_be_bytes([payload[4], payload[5]]);
        assert_eq!(payload.len(), 6 + usize::from(length));
        return Err(Errno(u32::from_be_bytes(payload[..4].try_into().unwrap())));
    }
    match simple(&back, cookie) {
        (0, _) => Ok(()),
        (error, rest) => {
            assert!(rest.is_empty());
            Err(Errno(error))
        }
    }
}

/// That the place in the stream is not lost.
fn still_works(server: &mut Served) {
    let flush = request(Cmd::Flush.0, 0, 0xabcd, 0, 0);
    assert_eq!(outcome(server, &flush, 0xabcd), Ok(()));
}

#[test]
fn unknown_client_flags_are_fatal() {
    for flags in [4u32, 1 << 31, 0xffff_fffc] {
        let mut server = Served::new(config(&[export("disk")]));
        server.exchange(&flags.to_be_bytes());
        assert!(
            matches!(server.machine.close_reason(), Some(CloseReason::Violation(_))),
            "{flags:#x}"
        );
        assert!(server.machine.is_closing() && server.machine.receive_space().is_none());
    }
}

#[test]
fn an_option_without_its_magic_is_fatal() {
    let mut server = greeted(&[export("disk")]);
    let mut list = option(Opt::List, &[]);
    list[7] ^= 1;
    assert!(server.exchange(&list).is_empty());
    assert!(matches!(server.machine.close_reason(), Some(CloseReason::Violation(_))));
}

#[test]
fn exports_are_listed() {
    let mut server =
        greeted(&[export("one"), Export { description: String::new(), ..export("two") }]);
    let listed = ask(&mut server, Opt::List, &[]);
    let expected = [
        (Opt::List, Rep::Server, [&string("one")[..], b"an export of tests"].concat()),
        (Opt::List, Rep::Server, string("two")),
        (Opt::List, Rep::Ack, vec![]),
    ];
    assert_eq!(listed, expected);
    assert_eq!(refusal(&mut server, Opt::List, b"x"), Rep::ErrInvalid);
}

#[test]
fn options_that_are_not_known_are_refused_and_skipped() {
    let mut server = greeted(&[export("disk")]);
    let data = vec![7; MAX_OPTION_BYTES as usize + 99];
    for (wanted, data, why) in [
        (Opt(4), &data[..0], Rep::ErrUnsup),
        (Opt::ExtendedHeaders, &data[..0], Rep::ErrUnsup),
        (Opt(12345), &data[..99], Rep::ErrUnsup),
        (Opt(12345), &data[..], Rep::ErrUnsup),
        (Opt::StartTls, &data[..0], Rep::ErrUnsup),
        (Opt::StartTls, &data[..1], Rep::ErrInvalid),
        (Opt::SetMetaContext, &data[..], Rep::ErrTooBig),
        (Opt::Go, &data[..], Rep::ErrTooBig),
    ] {
        assert_eq!(refusal(&mut server, wanted, data), why, "{wanted:?} {}", data.len());
    }
    assert_eq!(ask(&mut server, Opt::List, &[]).len(), 2, "it goes on");
}

#[test]
fn an_aborting_client_is_answered() {
    for data in [&b""[..], b"ignored"] {
        let mut server = greeted(&[export("disk")]);
        assert_eq!(ask(&mut server, Opt::Abort, data), [(Opt::Abort, Rep::Ack, vec![])]);
        assert_eq!(server.machine.close_reason(), Some(CloseReason::Aborted));
        assert!(server.machine.is_closing());
    }
}

#[test]
fn an_export_is_described_and_chosen() {
    let mut server = greeted(&[export("other"), export("disk")]);
    let all = [Info::Export.0, Info::Name.0, Info::Description.0, Info::BlockSize.0, 999];
    let info = ask(&mut server, Opt::Info, &go("disk", &all));
    let kinds: Vec<_> = info.iter().map(|(_, rep, data)| (*rep, data.get(1).copied())).collect();
    let info_reply = |n| (Rep::Info, Some(n));
    assert_eq!(
        kinds,
        [info_reply(0), info_reply(3), info_reply(1), info_reply(2), (Rep::Ack, None)]
    );
    let flags = export("disk").transmission_flags(false).0;
    assert_eq!(info[0].2, [&[0, 0][..], &BYTES.to_be_bytes(), &flags.to_be_bytes()].concat());
    assert_eq!(info[1].2, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 0, 4, 0, 0]);
    assert_eq!((&info[2].2[2..], &info[3].2[2..]), (&b"disk"[..], &b"an export of tests"[..]));
    assert_eq!(server.machine.export(), None, "INFO chooses nothing");
    let chosen = ask(&mut server, Opt::Go, &go("disk", &all));
    assert_eq!(chosen.len(), info.len());
    assert_eq!(server.machine.export(), Some(1));
    still_works(&mut server);
}

#[test]
fn the_empty_name_is_the_first_export() {
    let mut server = greeted(&[export("one"), export("two")]);
    ask(&mut server, Opt::Go, &go("", &[]));
    assert_eq!(server.machine.export(), Some(0));
}

#[test]
fn malformed_choices_are_refused() {
    let mut server = greeted(&[export("disk")]);
    let good = go("disk", &[3]);
    let mut long_name = good.clone();
    long_name[3] = 200;
    let mut many = good.clone();
    many[9] = 2;
    let binary = [&4u32.to_be_bytes()[..], &[0xff; 4], &[0, 0]].concat();
    let nul = go("di\0k", &[]);
    let endless = go(&"x".repeat(4097), &[]);
    for data in [&[][..], &good[..9], &long_name, &many, &binary, &nul, &endless] {
        for wanted in [Opt::Info, Opt::Go] {
            assert_eq!(refusal(&mut server, wanted, data), Rep::ErrInvalid, "{data:?}");
        }
    }
    let trailing = [&good[..], &[0]].concat();
    assert_eq!(refusal(&mut server, Opt::Go, &trailing), Rep::ErrInvalid);
    assert_eq!(refusal(&mut server, Opt::Go, &go("dis", &[])), Rep::ErrUnknown);
    assert_eq!(ask(&mut server, Opt::Go, &good).last().unwrap().1, Rep::Ack);
}

/// Sectors are what every client aligns to; more than that it has to know.
#[test]
fn large_blocks_have_to_be_asked_for() {
    let large = Export {
        size_constraints: SizeConstraints { minimum: 4096, ..export("disk").size_constraints },
        ..export("disk")
    };
    let mut server = greeted(std::slice::from_ref(&large));
    let refused = ask(&mut server, Opt::Go, &go("disk", &[]));
    assert_eq!(refused[1].2[..2], [0, 3], "it is told nevertheless");
    assert_eq!(refused.last().unwrap().1, Rep::ErrBlockSizeReqd);
    assert_eq!(ask(&mut server, Opt::Go, &go("disk", &[3])).last().unwrap().1, Rep::Ack);
    let unaligned = request(Cmd::Read.0, 0, 1, 512, 4096);
    assert_eq!(outcome(&mut server, &unaligned, 1), Err(Errno::Inval));
    let mut server = greeted(&[large]);
    assert!(server.exchange(&option(Opt::ExportName, b"disk")).is_empty());
    assert_eq!(server.machine.close_reason(), Some(CloseReason::Refused));
}

#[test]
fn export_name_ends_the_handshake_one_way_or_the_other() {
    for (flags, padding) in [(1u8, 124), (3, 0)] {
        let mut server = Served::new(config(&[export("disk")]));
        server.exchange(&[0, 0, 0, flags]);
        let info_reply = server.exchange(&option(Opt::ExportName, b"disk"));
        assert_eq!(info_reply.len(), 10 + padding);
        assert_eq!(info_reply[..8], BYTES.to_be_bytes());
        let abilities = TransmissionFlags(u16::from_be_bytes([info_reply[8], info_reply[9]]));
        assert!(abilities.has(flag::HAS_FLAGS) && !abilities.has(flag::SEND_DF));
        still_works(&mut server);
    }
    let long = vec![b'x'; MAX_OPTION_BYTES as usize + 1];
    for name in [&b"other"[..], b"\xff", &long] {
        let mut server = greeted(&[export("disk")]);
        assert!(server.exchange(&option(Opt::ExportName, name)).is_empty());
        assert_eq!(server.machine.close_reason(), Some(CloseReason::Refused));
    }
}

#[test]
fn structured_replies_are_negotiated_once() {
    let mut server = greeted(&[export("disk")]);
    assert_eq!(refusal(&mut server, Opt::StructuredReply, b"x"), Rep::ErrInvalid);
    assert!(!server.machine.is_structured());
    assert_eq!(refusal(&mut server, Opt::StructuredReply, &[]), Rep::Ack);
    assert!(server.machine.is_structured());
    assert_eq!(refusal(&mut server, Opt::StructuredReply, &[]), Rep::ErrInvalid);
    let info_reply = ask(&mut server, Opt::Info, &go("disk", &[]));
    assert_eq!(info_reply[0].2[10..], export("disk").transmission_flags(true).0.to_be_bytes());
}

#[test]
fn contexts_are_listed_and_set() {
    let base = "base:allocation";
    let mut server = greeted(&[export("disk")]);
    for wanted in [Opt::ListMetaContext, Opt::SetMetaContext] {
        let early = refusal(&mut server, wanted, &queries("disk", &[base]));
        assert_eq!(early, Rep::ErrInvalid, "structured replies come first");
    }
    ask(&mut server, Opt::StructuredReply, &[]);
    for (wanted, asked, id) in [
        (Opt::ListMetaContext, vec![], Some(0)),
        (Opt::ListMetaContext, vec!["base:"], Some(0)),
        (Opt::ListMetaContext, vec!["qemu:dirty", base, base], Some(0)),
        (Opt::ListMetaContext, vec!["qemu:", "base:other", ""], None),
        (Opt::SetMetaContext, vec![], None),
        (Opt::SetMetaContext, vec!["base:"], None),
        (Opt::SetMetaContext, vec!["qemu:x", base], Some(1)),
    ] {
        let replied = ask(&mut server, wanted, &queries("disk", &asked));
        let mut expected = vec![(wanted, Rep::Ack, vec![])];
        if let Some(id) = id {
            let data = [&[0, 0, 0, id][..], base.as_bytes()].concat();
            expected.insert(0, (wanted, Rep::MetaContext, data));
        }
        assert_eq!(replied, expected, "{asked:?}");
    }
    let mut torn = queries("disk", &[base]);
    torn.pop();
    for data in [&torn[..], &[], &queries("disk", &[base])[..9]] {
        assert_eq!(refusal(&mut server, Opt::SetMetaContext, data), Rep::ErrInvalid);
    }
    let unknown = queries("other", &[base]);
    assert_eq!(refusal(&mut server, Opt::SetMetaContext, &unknown), Rep::ErrUnknown);
    ask(&mut server, Opt::Go, &go("disk", &[]));
    let status = request(Cmd::BlockStatus.0, 0, 1, 0, 512);
    assert_eq!(outcome(&mut server, &status, 1), Err(Errno::Inval), "the last one has failed");
}

/// The context belongs to the export that it was set for.
#[test]
fn a_context_of_another_export_is_ignored() {
    let mut server = greeted(&[export("one"), export("two")]);
    ask(&mut server, Opt::StructuredReply, &[]);
    ask(&mut server, Opt::SetMetaContext, &queries("one", &["base:allocation"]));
    ask(&mut server, Opt::Go, &go("two", &[]));
    let status = request(Cmd::BlockStatus.0, 0, 1, 0, 512);
    assert_eq!(outcome(&mut server, &status, 1), Err(Errno::Inval));
}

#[test]
fn a_request_without_its_magic_is_fatal() {
    let mut server = ready(true);
    let mut read = request(Cmd::Read.0, 0, 1, 0, 512);
    read[0] ^= 1;
    assert!(server.exchange(&read).is_empty());
    assert!(matches!(server.machine.close_reason(), Some(CloseReason::Violation(_))));
}

#[test]
fn reads_are_answered_as_negotiated() {
    let mut server = ready(false);
    server.disk[1024..1536].fill(5);
    let back = server.exchange(&request(Cmd::Read.0, 0, 77, 1024, 512));
    assert_eq!(simple(&back, 77), (0, &[5; 512][..]));
    let mut server = ready(true);
    server.disk[1024..1536].fill(5);
    for flags in [0, command_flag::DF, command_flag::FUA] {
        let back = server.exchange(&request(Cmd::Read.0, flags, 78, 1024, 512));
        let (kind, payload) = chunk(&back, 78);
        assert_eq!(
            (kind, &payload[..8], &payload[8..]),
            (1, &1024u64.to_be_bytes()[..], &[5; 512][..])
        );
    }
}

#[test]
fn errors_are_those_of_the_specification() {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
    let most = export("").size_constraints.payload;
    for structured in [false, true] {
        let mut server = ready(structured);
        let too_long = if structured { Errno::Overflow } else { Errno::Inval };
        for (kind, flags, at, len, expected) in [
            (Cmd::Read, 0, BYTES, 512, Errno::Inval),
            (Cmd::Read, 0, u64::MAX - 511, 512, Errno::Inval),
            (Cmd::Read, 0, 1, 512, Errno::Inval),
            (Cmd::Read, 0, 0, 513, Errno::Inval),
            (Cmd::Read, 0, 0, most + 512, too_long),
            (Cmd::Read, NO_HOLE, 0, 512, Errno::Inval),
            (Cmd::Read, 1 << 5, 0, 512, Errno::Inval),
            (Cmd::Flush, 0, 512, 0, Errno::Inval),
            (Cmd::Flush, 0, 0, 512, Errno::Inval),
            (Cmd::Flush, DF, 0, 0, Errno::Inval),
            (Cmd::Trim, 0, BYTES - 512, 1024, Errno::Inval),
            (Cmd::Trim, 0, 100, 512, Errno::Inval),
            (Cmd::Cache, 0, 0, 512, Errno::Inval),
            (Cmd(8), 0, 0, 512, Errno::Inval),
            (Cmd(999), 0, 0, u32::MAX, Errno::Inval),
            (Cmd::WriteZeroes, 0, BYTES - 512, 1024, Errno::NoSpc),
            (Cmd::WriteZeroes, 0, 0, 100, Errno::Inval),
            (Cmd::WriteZeroes, REQ_ONE, 0, 512, Errno::Inval),
            (Cmd::WriteZeroes, FAST_ZERO, 512, 4096, Errno::NotSup),
            (Cmd::WriteZeroes, FAST_ZERO | NO_HOLE, 0, 4096, Errno::NotSup),
            (Cmd::BlockStatus, 0, BYTES, 512, Errno::Inval),
            (Cmd::BlockStatus, 0, 0, 0, Errno::Inval),
        ] {
            let bytes = request(kind.0, flags, 9, at, len);
            let found = outcome(&mut server, &bytes, 9);
            assert_eq!(found, Err(expected), "{kind:?} {flags} {at} {len} {structured}");
        }
        if !structured {
            let df = request(Cmd::Read.0, DF, 9, 0, 512);
            assert_eq!(outcome(&mut server, &df, 9), Err(Errno::Inval), "not agreed on");
        }
        assert!(server.ran.is_empty());
        for (kind, flags, len) in [
            (Cmd::Flush, FUA, 0),
            (Cmd::Trim, FUA, 512),
            (Cmd::WriteZeroes, FUA | NO_HOLE, 512),
            (Cmd::WriteZeroes, FAST_ZERO, 8192),
            (Cmd::WriteZeroes, 0, BYTES as u32),
        ] {
            assert_eq!(outcome(&mut server, &request(kind.0, flags, 9, 0, len), 9), Ok(()));
        }
        assert_eq!(server.ran.len(), 5);
    }
}

/// What is refused of a write is read and thrown away: memory is neither asked for nor taken.
#[test]
fn refused_writes_keep_the_stream_in_step() {
    let most = export("").size_constraints.payload;
    for structured in [false, true] {
        let mut server = ready(structured);
        for (flags, at, len, expected) in [
            (0, 0, most + 512, Errno::Inval),
            (0, 0, 40 << 20, Errno::NoSpc),
            (0, 0, 777, Errno::Inval),
            (0, 1, 512, Errno::Inval),
            (0, BYTES, 512, Errno::NoSpc),
            (0, u64::MAX, 512, Errno::NoSpc),
            (command_flag::NO_HOLE, 0, 512, Errno::Inval),
        ] {
            let mut bytes = request(Cmd::Write.0, flags, 9, at, len);
            // Looks like a request, and is data.
            bytes.extend(request(Cmd::Disc.0, 0, 1, 0, 0).iter().cycle().take(len as usize));
            assert_eq!(outcome(&mut server, &bytes, 9), Err(expected), "{at} {len}");
            still_works(&mut server);
        }
        server.ran.retain(|c| matches!(c, Command::Write { .. }));
        assert!(server.ran.is_empty());
        assert!(server.disk.iter().all(|b| *b == 0));
    }
}

#[test]
fn a_read_only_export_is_not_changed() {
    let mut server = ready_for(&[Export { read_only: true, ..export("disk") }], true);
    let write = [request(Cmd::Write.0, 0, 9, 0, 512), vec![1; 512]].concat();
    assert_eq!(outcome(&mut server, &write, 9), Err(Errno::Perm));
    for kind in [Cmd::Trim, Cmd::WriteZeroes] {
        assert_eq!(outcome(&mut server, &request(kind.0, 0, 9, 0, 512), 9), Err(Errno::Perm));
    }
    still_works(&mut server);
}

#[test]
fn empty_requests_succeed() {
    for structured in [false, true] {
        let mut server = ready(structured);
        for kind in [Cmd::Read, Cmd::Write, Cmd::Trim, Cmd::WriteZeroes] {
            let bytes = request(kind.0, 0, 9, 512, 0);
            assert_eq!(outcome(&mut server, &bytes, 9), Ok(()), "{kind:?}");
        }
        assert!(server.ran.is_empty());
        still_works(&mut server);
    }
}

#[test]
fn a_block_status_stays_within_the_request() {
    let mut server = ready(true);
    let write = [request(Cmd::Write.0, 0, 9, 1024, 512), vec![1; 512]].concat();
    assert_eq!(outcome(&mut server, &write, 9), Ok(()));
    let descriptors = |bytes: &[u8]| -> Vec<(u32, u32)> {
        let (kind, payload) = chunk(bytes, 9);
        assert_eq!((kind, &payload[..4]), (5, &[0, 0, 0, 1][..]));
        let word = |b: &[u8]| u32::from_be_bytes(b.try_into().unwrap());
        payload[4..].chunks(8).map(|d| (word(&d[..4]), word(&d[4..]))).collect()
    };
    let all = server.exchange(&request(Cmd::BlockStatus.0, 0, 9, 0, 4096));
    assert_eq!(descriptors(&all), [(1024, 3), (512, 0), (2560, 3)]);
    let one = server.exchange(&request(Cmd::BlockStatus.0, command_flag::REQ_ONE, 9, 512, 512));
    assert_eq!(descriptors(&one), [(512, 3)]);
}

#[test]
fn answers_may_come_in_any_order() {
    let mut server = ready(false);
    let mut tags = Vec::new();
    for cookie in 0..3 {
        let bytes = request(Cmd::Flush.0, 0, cookie, 0, 0);
        feed(&mut server.machine, &bytes, &mut || usize::MAX);
        let Some(Action::Run { tag, .. }) = server.machine.poll_action() else { panic!() };
        tags.push(tag);
    }
    for cookie in [1, 2, 0] {
        server.machine.answer(tags[cookie], Answer::Done);
        let back = server.take(&mut || usize::MAX);
        assert_eq!(simple(&back, cookie as u64), (0, &[][..]));
        server.machine.answer(tags[cookie], Answer::Done);
        assert!(server.machine.output().is_empty(), "once");
    }
}

/// As many requests as were agreed on are taken; the others wait in the socket.
#[test]
fn requests_in_flight_are_bounded() {
    let mut server = ready(false);
    let bytes = request(Cmd::Flush.0, 0, 5, 0, 0).repeat(20);
    let n = feed(&mut server.machine, &bytes, &mut || usize::MAX);
    assert_eq!((n, server.machine.in_flight()), (8 * 28, 8));
    assert!(server.machine.receive_space().is_none());
    let Some(Action::Run { tag, .. }) = server.machine.poll_action() else { panic!() };
    server.machine.answer(tag, Answer::Done);
    assert!(server.machine.receive_space().is_some());
}

/// A client that does not read is not read from.
#[test]
fn output_is_bounded() {
    let mut server = ready(false);
    let read = request(Cmd::Read.0, 0, 5, 0, 256 << 10);
    let mut fed = 0;
    for _ in 0..100 {
        let n = feed(&mut server.machine, &read, &mut || usize::MAX);
        if n == 0 {
            break;
        }
        fed += 1;
        server.feed(&[], &mut || usize::MAX);
    }
    assert_eq!(fed, 4, "until more than a megabyte waits");
    assert!(server.machine.output().len() < 2 << 20);
    let mut server = greeted(&[export("disk")]);
    let list = option(Opt::List, &[]);
    while feed(&mut server.machine, &list, &mut || usize::MAX) > 0 {}
    assert!(server.machine.output().len() < 2 << 20);
}

#[test]
fn without_memory_a_write_fails_and_its_data_is_skipped() {
    let mut server = ready(false);
    let bytes = [request(Cmd::Write.0, 0, 5, 0, 1024), vec![1; 1024]].concat();
    let n = feed(&mut server.machine, &bytes, &mut || usize::MAX);
    assert_eq!(n, 28, "nothing is received before there is memory");
    let Some(Action::Grant { tag, bytes: 1024 }) = server.machine.poll_action() else { panic!() };
    server.machine.refuse(tag, Errno::NoMem);
    assert_eq!(outcome(&mut server, &bytes[n..], 5), Err(Errno::NoMem));
    still_works(&mut server);
}

#[test]
fn a_disconnecting_client_gets_its_pending_answers() {
    let mut server = ready(false);
    let bytes = [
        request(Cmd::Flush.0, 0, 5, 0, 0),
        request(Cmd::Disc.0, 0, 6, 0, 0),
        request(Cmd::Flush.0, 0, 7, 0, 0),
    ];
    let n = feed(&mut server.machine, &bytes.concat(), &mut || usize::MAX);
    assert_eq!(n, 56, "nothing is taken behind the leave");
    assert!(!server.machine.is_closing(), "something is in flight");
    let Some(Action::Run { tag, .. }) = server.machine.poll_action() else { panic!() };
    server.machine.answer(tag, Answer::Done);
    let back = server.take(&mut || usize::MAX);
    assert_eq!(simple(&back, 5), (0, &[][..]));
    assert!(server.machine.is_closing());
    assert_eq!(server.machine.close_reason(), Some(CloseReason::Disconnected));
}

#[test]
fn stalled_clients_are_disconnected_but_not_idle_ones() {
    let seconds = Duration::from_secs;
    let mut server = greeted(&[export("disk")]);
    server.machine.on_timer(seconds(9));
    assert!(!server.machine.is_closing());
    server.machine.on_timer(seconds(10));
    assert_eq!(server.machine.close_reason(), Some(CloseReason::HandshakeTimeout));

    let mut server = ready(true);
    server.machine.on_timer(seconds(100_000));
    assert_eq!((server.machine.close_reason(), server.machine.next_timer()), (None, None));
    // It waits for memory, not for the client.
    let write = [request(Cmd::Write.0, 0, 5, 0, 1024), vec![1; 100]].concat();
    let n = feed(&mut server.machine, &write, &mut || usize::MAX);
    server.machine.on_timer(seconds(100_100));
    assert_eq!(server.machine.close_reason(), None);
    let Some(Action::Grant { tag, .. }) = server.machine.poll_action() else { panic!() };
    server.machine.grant(tag, server.memory.room(1024));
    feed(&mut server.machine, &write[n..], &mut || usize::MAX);
    assert_eq!(server.machine.next_timer(), Some(seconds(100_160)));
    server.machine.on_timer(seconds(100_160));
    assert_eq!(server.machine.close_reason(), Some(CloseReason::ReceiveTimeout));
}

#[test]
fn a_server_that_stops_refuses_options_and_requests() {
    let mut server = greeted(&[export("disk")]);
    server.machine.shut_down();
    assert_eq!(refusal(&mut server, Opt::List, &[]), Rep::ErrShutdown);
    assert_eq!(refusal(&mut server, Opt::Go, &go("disk", &[])), Rep::ErrShutdown);
    assert_eq!(refusal(&mut server, Opt::Abort, &[]), Rep::Ack);

    let mut server = ready(true);
    let flush = request(Cmd::Flush.0, 0, 5, 0, 0);
    feed(&mut server.machine, &flush, &mut || usize::MAX);
    let Some(Action::Run { tag, .. }) = server.machine.poll_action() else { panic!() };
    server.machine.shut_down();
    let late = [request(Cmd::Write.0, 0, 6, 0, 512), vec![1; 512]].concat();
    assert_eq!(outcome(&mut server, &late, 6), Err(Errno::Shutdown));
    assert_eq!(server.machine.close_reason(), None, "something is in flight");
    server.machine.answer(tag, Answer::Done);
    assert_eq!(server.machine.close_reason(), Some(CloseReason::ShutDown));
}

/// A driver that makes no sense: better an error than a lie.
#[test]
fn answers_that_do_not_fit_are_errors() {
    let mut server = ready(false);
    for (kind, len) in [(Cmd::Read, 512), (Cmd::Read, 1024)] {
        let bytes = request(kind.0, 0, 5, 0, len);
        feed(&mut server.machine, &bytes, &mut || usize::MAX);
        let Some(Action::Run { tag, .. }) = server.machine.poll_action() else { panic!() };
        let short = Answer::Data(server.memory.holding(&[0; 256]));
        server.machine.answer(tag, short);
        let back = server.take(&mut || usize::MAX);
        assert_eq!(simple(&back, 5), (Errno::Io.0, &[][..]));
    }
}

#[test]
fn a_machine_without_exports_offers_none() {
    let mut server = Served::new(Config::new(Vec::new().into()));
    server.exchange(&[0, 0, 0, 3]);
    assert_eq!(ask(&mut server, Opt::List, &[]), [(Opt::List, Rep::Ack, vec![])]);
    assert_eq!(refusal(&mut server, Opt::Go, &go("", &[])), Rep::ErrUnknown);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks(script in prop::collection::vec(any::<u8>(), 0..1500)) {
        fuzz_input::run(&script);
    }

    /// With an export chosen first, so that what follows reaches the requests.
    #[test]
    fn nothing_breaks_behind_the_handshake(
        structured in any::<bool>(),
        script in prop::collection::vec(any::<u8>(), 0..1500),
    ) {
        let mut all = vec![0, 0];
        if structured {
            all.push(fuzz_input::STRUCTURED);
        }
        all.extend([fuzz_input::GO, 0]);
        all.extend(script);
        fuzz_input::run(&all);
    }
}
