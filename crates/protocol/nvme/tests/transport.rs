//! NVMe/TCP Transport 1.0, as a transcript: what the host sends, what comes back.

use std::time::Duration;

use crate::common::driver::{Session, Target};
use crate::common::{connect, pattern, rw};
use frame::Machine;
use nvme::entry::{AdminOpcode, FLAG_SGL, NvmOpcode, Sgl};
use nvme::pdu::{CapsuleCmd, CommonHeader, DataPdu, FatalError, IcReq, PduType, TermReq};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{CloseReason, Config, Sqe, Status};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

const S: Duration = Duration::from_secs(1);

#[track_caller]
fn terminated(replies: &[Reply]) -> (FatalError, u32) {
    match replies {
        [.., Reply::Term { error, information, .. }] => (*error, *information),
        other => panic!("no C2HTermReq: {other:?}"),
    }
}

#[track_caller]
fn refused(replies: &[Reply]) -> Status {
    match replies {
        [Reply::Resp { status, .. }] => {
            assert!(status.is_do_not_retry());
            status.code()
        }
        other => panic!("no response: {other:?}"),
    }
}

/// NVMe/TCP 3.6.2.2, 3.6.2.3: ICReq is answered by ICResp with the digests asked for.
#[test]
fn ic_req_is_answered() {
    for digest in 0..4 {
        let host =
            ScriptedHost { header_digest: digest & 1 != 0, data_digest: digest & 2 != 0, hpda: 0 };
        let mut t = Target::default();
        let link = t.open();
        let replies = t.talk(link, &host, &host.ic_req());
        assert_eq!(replies, [Reply::IcResp { digest, max_h2c_data: 1 << 20 }]);
        assert_eq!(t.conn(link).digests(), (host.header_digest, host.data_digest));
    }
}

/// NVMe/TCP 3.6.2.2: unknown versions and impossible values end the connection.
#[test]
fn ic_req_that_cannot_be_met_is_fatal() {
    let good = IcReq::new(0, 0);
    for (req, expect) in [
        (IcReq { pfv: 1.into(), ..good }, (FatalError::UnsupportedParameter, 8)),
        (IcReq { hpda: 32, ..good }, (FatalError::InvalidHeaderField, 10)),
        (
            IcReq { common: CommonHeader { plen: 132.into(), ..good.common }, ..good },
            (FatalError::InvalidHeaderField, 4),
        ),
        (
            IcReq { common: CommonHeader { hlen: 127, ..good.common }, ..good },
            (FatalError::InvalidHeaderField, 2),
        ),
    ] {
        let mut t = Target::default();
        let link = t.open();
        let replies = t.talk(link, &ScriptedHost::default(), req.as_bytes());
        assert_eq!(terminated(&replies), expect);
    }
}

/// NVMe/TCP 3.6.1.3.1: PDUs of the other direction or of no known type, and their header shown.
#[test]
fn foreign_pdu_types_are_fatal() {
    let host = ScriptedHost::default();
    for kind in [1u8, 3, 5, 7, 8, 9, 10, 0xff] {
        let mut t = Target::default();
        let link = t.open();
        t.talk(link, &host, &host.ic_req());
        let pdu = [kind, 0, 24, 0, 24, 0, 0, 0];
        let replies = t.talk(link, &host, &pdu);
        assert_eq!(terminated(&replies), (FatalError::InvalidHeaderField, 0), "type {kind}");
        assert!(matches!(&replies[..], [Reply::Term { excerpt, .. }] if excerpt[..] == pdu));
    }
}

/// NVMe/TCP 3.6.1.3.1: PDU Sequence Error.
#[test]
fn pdus_out_of_sequence_are_fatal() {
    let host = ScriptedHost::default();
    let mut t = Target::default();
    let link = t.open();
    let replies = t.talk(link, &host, &host.command(Sqe::new(0, 1, 1)));
    assert_eq!(terminated(&replies), (FatalError::PduSequence, 0), "a command before ICReq");

    let link = t.open();
    t.talk(link, &host, &host.ic_req());
    let replies = t.talk(link, &host, &host.ic_req());
    assert_eq!(terminated(&replies), (FatalError::PduSequence, 0), "ICReq twice");
}

/// NVMe/TCP 3.6.1.3.1: after C2HTermReq nothing more is served; the host gets time to close.
#[test]
fn after_a_fatal_error_the_connection_lingers_and_closes() {
    let host = ScriptedHost::default();
    let mut s = Session::ready();
    let io = s.io.unwrap();
    s.target.tick(S);
    terminated(&s.target.talk(io, &host, &[0xff; 8]));
    let error = FatalError::InvalidHeaderField;
    assert_eq!(
        s.target.conn(io).close_reason(),
        Some(CloseReason::Violation { error, information: 0 })
    );
    assert_eq!(s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 1, 0, 8))), []);
    assert!(!s.target.conn(io).is_closing());
    assert_eq!(s.target.conn(io).next_timer(), Some(6 * S));
    s.target.tick(6 * S);
    assert!(s.target.conn(io).is_closing());
}

/// NVMe/TCP 3.6.2.4: H2CTermReq ends the connection at once.
#[test]
fn the_host_may_terminate() {
    let mut s = Session::ready();
    let io = s.io.unwrap();
    let error = FatalError::DataOutOfRange;
    let term = TermReq::new(PduType::H2CTermReq, error, 0, 0);
    assert_eq!(s.target.talk(io, &s.host.clone(), term.as_bytes()), []);
    assert!(s.target.conn(io).is_closing());
    assert_eq!(s.target.conn(io).close_reason(), Some(CloseReason::HostTerminated { error }));
}

/// NVMe/TCP 3.6.1.2: header fields that do not fit the PDU, and where they are.
#[test]
fn header_fields_are_checked() {
    let sqe = rw(NvmOpcode::Write, 5, 0, 8);
    let host = ScriptedHost::default();
    let good = host.capsule(sqe, &pattern(1, 4096));
    let spoil = |at: usize, value: u8| {
        let mut pdu = good.clone();
        pdu[at] = value;
        pdu
    };
    for (pdu, field) in [
        (spoil(1, 1), 1),  // HDGSTF without header digests
        (spoil(1, 2), 1),  // DDGSTF without data digests
        (spoil(2, 71), 2), // HLEN
        (spoil(3, 70), 3), // PDO inside the header
        (spoil(3, 73), 3), // PDO not aligned
        (spoil(4, 71), 4), // PLEN below HLEN: low byte of 72 + 4096
    ] {
        let mut s = Session::ready();
        let mut pdu = pdu;
        if field == 4 {
            pdu[4..8].copy_from_slice(&71u32.to_le_bytes());
        }
        let replies = s.target.talk(s.io.unwrap(), &host, &pdu);
        assert_eq!(terminated(&replies), (FatalError::InvalidHeaderField, field));
    }
}

/// NVMe/TCP 3.6.1.3.1: a wrong header digest is fatal, and FEI is the digest received.
#[test]
fn a_wrong_header_digest_is_fatal() {
    let host = ScriptedHost::with_digests();
    let mut s = Session::ready_with(Target::default(), host);
    let mut pdu = host.command(rw(NvmOpcode::Read, 5, 0, 8));
    pdu[20] ^= 1;
    let sent = u32::from_le_bytes(pdu[72..76].try_into().unwrap());
    let replies = s.target.talk(s.io.unwrap(), &host, &pdu);
    assert_eq!(terminated(&replies), (FatalError::HeaderDigest, sent));
}

/// NVMe/TCP 3.6.1.3.2: a wrong data digest fails the command, which may be tried again, and
/// nothing else.
#[test]
fn a_wrong_data_digest_fails_the_command_only() {
    let host = ScriptedHost::with_digests();
    let mut s = Session::ready_with(Target::default(), host);
    let io = s.io.unwrap();
    let mut pdu = host.capsule(rw(NvmOpcode::Write, 5, 0, 8), &pattern(1, 4096));
    pdu[200] ^= 1;
    let replies = s.target.talk(io, &host, &pdu);
    let Reply::Resp { cid: 5, status, .. } = replies[0] else { panic!("{replies:?}") };
    assert_eq!(status, Status::TRANSIENT_TRANSPORT);
    assert!(s.target.requests.is_empty());

    let data = pattern(2, 65536);
    let r2t = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Write, 6, 0, 128)));
    let mut pdus = host.answer(&r2t[0], &data, 16384);
    pdus[20000] ^= 1;
    let replies = s.target.talk(io, &host, &pdus);
    let Reply::Resp { cid: 6, status, .. } = replies[0] else { panic!("{replies:?}") };
    assert_eq!(status, Status::TRANSIENT_TRANSPORT);
    assert!(s.target.requests.is_empty());
    s.io(rw(NvmOpcode::Write, 0, 0, 128), &data).ok();
    assert_eq!(&s.target.disk[..65536], &data[..]);
}

/// NVMe/TCP 3.3: data in the capsule, up to 128 KiB, and PDO up to its alignment.
#[test]
fn in_capsule_data_is_taken_behind_its_padding() {
    let mut s = Session::ready();
    let data = pattern(3, 131_072);
    let mut sqe = rw(NvmOpcode::Write, 9, 16, 256);
    sqe.sgl = Sgl::in_capsule(131_072);
    for padding in [0, 4, 56, 180] {
        s.target.disk.fill(0);
        let pdu = s.host.pdu(CapsuleCmd::new(sqe).as_bytes(), &data, padding);
        let replies = s.target.talk(s.io.unwrap(), &s.host.clone(), &pdu);
        assert!(matches!(replies[..], [Reply::Resp { cid: 9, .. }]), "{replies:?}");
        assert_eq!(&s.target.disk[16 * 512..272 * 512], &data[..]);
    }
    let pdu = s.host.capsule(sqe, &pattern(3, 131_076));
    let replies = s.target.talk(s.io.unwrap(), &s.host.clone(), &pdu);
    assert_eq!(terminated(&replies), (FatalError::InvalidHeaderField, 4), "beyond IOCCSZ");
}

/// NVMe/TCP 3.2: SGLs that fabrics do not permit, or that do not fit the capsule.
#[test]
fn sgls_are_checked() {
    let mut s = Session::ready();
    let (io, host) = (s.io.unwrap(), s.host);
    let base = rw(NvmOpcode::Write, 9, 0, 8);
    let with = |change: fn(&mut Sqe), data: &[u8]| {
        let mut sqe = base;
        change(&mut sqe);
        host.pdu(CapsuleCmd::new(sqe).as_bytes(), data, 0)
    };
    let data = pattern(1, 4096);
    for (pdu, status) in [
        (with(|q| q.flags = 0, &[]), Status::INVALID_FIELD),
        (with(|q| q.flags = FLAG_SGL << 1, &[]), Status::INVALID_FIELD),
        (with(|q| q.sgl.id = 0x40, &[]), Status::SGL_DESCRIPTOR_TYPE_INVALID),
        (with(|q| q.sgl.id = 0x00, &[]), Status::SGL_DESCRIPTOR_TYPE_INVALID),
        (with(|q| q.sgl = Sgl::in_capsule(4096), &[]), Status::DATA_SGL_LENGTH_INVALID),
        (with(|q| q.sgl = Sgl::in_capsule(4092), &data), Status::DATA_SGL_LENGTH_INVALID),
        (
            with(|q| q.sgl = Sgl { address: 8.into(), ..Sgl::in_capsule(4096) }, &data),
            Status::SGL_OFFSET_INVALID,
        ),
        (with(|q| q.sgl = Sgl::transport(4096), &data), Status::SGL_DESCRIPTOR_TYPE_INVALID),
        (
            with(|q| (q.opcode, q.sgl) = (2, Sgl::in_capsule(4096)), &data),
            Status::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
    ] {
        assert_eq!(refused(&s.target.talk(io, &host, &pdu)), status);
    }
    assert!(s.target.requests.is_empty());
    s.io(base, &data).ok();
}

/// NVMe Base 2.0, 3.3.3.1: a command identifier that is in use.
#[test]
fn a_command_id_in_use_is_a_conflict() {
    let mut s = Session::ready();
    s.target.hold = true;
    let (io, host) = (s.io.unwrap(), s.host);
    assert_eq!(s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 7, 0, 8))), []);
    let again = host.capsule(rw(NvmOpcode::Write, 7, 0, 8), &pattern(1, 4096));
    assert_eq!(refused(&s.target.talk(io, &host, &again)), Status::COMMAND_ID_CONFLICT);
    s.target.finish_held();
    let replies = s.target.replies(io, &host);
    assert!(matches!(replies[..], [Reply::Data { cid: 7, .. }, Reply::Resp { cid: 7, .. }]));
}

/// NVMe Base 2.0, 6.3: Connect comes first and once.
#[test]
fn commands_before_connect_and_a_second_connect_are_out_of_sequence() {
    let mut s = Session::connected(Target::default(), ScriptedHost::default(), &connect(0, 0));
    let (sqe, data) = connect(0, 0).encode(77);
    let again = s.host.capsule(sqe, data.as_bytes());
    let replies = s.target.talk(s.admin, &s.host.clone(), &again);
    assert_eq!(refused(&replies), Status::COMMAND_SEQUENCE);
    let fresh = s.initialized();
    let mut identify = Sqe::new(AdminOpcode::Identify.0, 4, 0);
    identify.sgl = Sgl::transport(4096);
    let replies = s.target.talk(fresh, &s.host.clone(), &s.host.command(identify));
    assert_eq!(refused(&replies), Status::COMMAND_SEQUENCE);
}

/// NVMe/TCP 3.6.2.10, 3.6.2.8: several transfers at once, their data interleaved, in PDUs of any
/// size up to MAXH2CDATA.
#[test]
fn r2t_transfers_may_interleave() {
    for host in [ScriptedHost::default(), ScriptedHost::with_digests()] {
        let mut s = Session::ready_with(Target::default(), host);
        let io = s.io.unwrap();
        let n = 6u16;
        let data: Vec<Vec<u8>> = (0..n).map(|i| pattern(u64::from(i), 65536)).collect();
        let commands: Vec<u8> = (0..n)
            .flat_map(|i| host.command(rw(NvmOpcode::Write, i, u64::from(i) * 128, 128)))
            .collect();
        let r2ts = s.target.talk(io, &host, &commands);
        assert_eq!(r2ts.len(), usize::from(n), "{r2ts:?}");
        let mut streams: Vec<Vec<Vec<u8>>> = r2ts
            .iter()
            .enumerate()
            .map(|(i, r2t)| {
                let Reply::R2t { cid, ttag, offset: 0, length: 65536 } = *r2t else {
                    panic!("{r2t:?}")
                };
                assert_eq!(usize::from(cid), i);
                let size = 4096 * (i + 1);
                let pieces = data[i].chunks(size).enumerate();
                let pdu = |(k, piece): (usize, &[u8])| {
                    let last = k * size + piece.len() == 65536;
                    host.h2c(cid, ttag, (k * size) as u32, piece, last)
                };
                pieces.map(pdu).collect()
            })
            .collect();
        let mut done = Vec::new();
        while streams.iter().any(|s| !s.is_empty()) {
            for stream in streams.iter_mut().filter(|s| !s.is_empty()) {
                done.extend(s.target.talk(io, &host, &stream.remove(0)));
            }
        }
        assert_eq!(done.len(), usize::from(n));
        for (i, bytes) in data.iter().enumerate() {
            assert_eq!(&s.target.disk[i * 65536..][..65536], &bytes[..], "command {i}");
        }
    }
}

/// NVMe/TCP 3.6.2.8, 3.6.1.3.1: data that was not asked for, or not so.
#[test]
fn data_that_does_not_answer_an_r2t_is_fatal() {
    let host = ScriptedHost::default();
    let data = pattern(1, 65536);
    type Spoil = fn(&mut DataPdu, &mut Vec<u8>);
    let cases: [(Spoil, FatalError, u32); 8] = [
        (|d, _| d.transfer_tag = 9.into(), FatalError::InvalidHeaderField, 10),
        (|d, _| d.command_id = 9.into(), FatalError::InvalidHeaderField, 8),
        (|d, _| d.offset = 4096.into(), FatalError::DataOutOfRange, 0),
        (|d, _| d.length = 60.into(), FatalError::InvalidHeaderField, 4),
        (|_, b| b.clear(), FatalError::InvalidHeaderField, 4),
        (|d, b| (d.length, *b) = (40_000.into(), vec![0; 40_000]), FatalError::DataOutOfRange, 0),
        (|d, b| (d.length, *b) = (U32::new(1 << 17), vec![0; 1 << 17]), FatalError::DataLimit, 0),
        (|d, _| d.common.flags = 4, FatalError::PduSequence, 0),
    ];
    for (i, (spoil, error, information)) in cases.into_iter().enumerate() {
        let mut s = Session::enabled(Target::default(), host);
        let config = Config { max_h2c_data: 1 << 16, ..Config::default() };
        let io = s.target.open_with(config);
        s.target.talk(io, &host, &host.ic_req());
        s.connect(io, &connect(1, s.cntlid)).ok();
        let r2t = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Write, 1, 0, 64)));
        let Reply::R2t { cid, ttag, .. } = r2t[0] else { panic!("{r2t:?}") };
        let mut bytes = data[..4096].to_vec();
        let mut header = DataPdu::new(PduType::H2CData, cid, ttag, 0, 4096);
        spoil(&mut header, &mut bytes);
        let replies = s.target.talk(io, &host, &host.pdu(header.as_bytes(), &bytes, 0));
        assert_eq!(terminated(&replies), (error, information), "case {i}");
        assert!(s.target.requests.is_empty());
    }
}

/// NVMe/TCP 3.6.2.9: C2HData in pieces, aligned as HPDA asks, then the response.
#[test]
fn reads_come_in_pieces_and_aligned() {
    for hpda in [0, 1, 15, 31] {
        for (header_digest, data_digest) in [(false, false), (true, false), (true, true)] {
            let host = ScriptedHost { header_digest, data_digest, hpda };
            let mut s = Session::enabled(Target::default(), host);
            let config = Config { max_c2h_data: 20_000, ..Config::default() };
            let io = s.target.open_with(config);
            s.target.talk(io, &host, &host.ic_req());
            s.connect(io, &connect(1, s.cntlid)).ok();
            s.target.disk = pattern(5, s.target.disk.len());
            let replies = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 3, 8, 100)));
            let mut got = Vec::<u8>::new();
            let (resp, pieces) = replies.split_last().unwrap();
            for (i, piece) in pieces.iter().enumerate() {
                let Reply::Data { cid: 3, offset, bytes, last, success: false } = piece else {
                    panic!("{piece:?}")
                };
                assert_eq!(*offset as usize, got.len());
                assert_eq!(*last, i == pieces.len() - 1);
                got.extend(bytes);
            }
            assert_eq!(pieces.len(), 3);
            assert_eq!(got, &s.target.disk[8 * 512..108 * 512]);
            assert!(matches!(resp, Reply::Resp { cid: 3, .. }), "{resp:?}");
        }
    }
}

/// NVMe/TCP 3.6.2.9, NVMe Base 2.0, 6.3: without SQ flow control a read that succeeds ends with
/// its data; SQHD says FFFFh.
#[test]
fn without_flow_control_reads_end_with_the_success_flag() {
    let mut s = Session::enabled(Target::default(), ScriptedHost::default());
    let host = s.host;
    let io = s.initialized();
    let mut to = connect(1, s.cntlid);
    to.flow_control = false;
    let (sqe, data) = to.encode(1);
    let replies = s.target.talk(io, &host, &host.capsule(sqe, data.as_bytes()));
    assert!(matches!(replies[..], [Reply::Resp { sq_head: 0xffff, .. }]), "{replies:?}");
    let replies = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 3, 0, 8)));
    assert!(
        matches!(replies[..], [Reply::Data { cid: 3, last: true, success: true, .. }]),
        "{replies:?}"
    );
    let replies = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 3, 1 << 40, 8)));
    assert_eq!(refused(&replies), Status::LBA_OUT_OF_RANGE);
}

/// NVMe Base 2.0, 3.3.3.2: SQHD goes round the queue.
#[test]
fn sq_head_goes_round() {
    let mut s = Session::enabled(Target::default(), ScriptedHost::default());
    let (host, io) = (s.host, s.initialized());
    let mut to = connect(1, s.cntlid);
    to.sqsize = 3;
    s.connect(io, &to).ok();
    let heads: Vec<u16> = (0..6)
        .map(|cid| {
            let replies =
                s.target.talk(io, &host, &host.command(Sqe::new(NvmOpcode::Flush.0, cid, 1)));
            let Reply::Resp { sq_head, .. } = replies[0] else { panic!("{replies:?}") };
            sq_head
        })
        .collect();
    assert_eq!(heads, [2, 3, 0, 1, 2, 3], "Connect took the first");
}

/// NVMe Base 2.0, 3.3.1: a queue holds as many commands as it has entries, responses that wait
/// to be sent included; a host that sends more is cut off.
#[test]
fn a_host_cannot_overfill_its_queue() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    s.target.hold = true;
    let reads = |n: u16| -> Vec<u8> {
        (0..n).flat_map(|cid| host.command(rw(NvmOpcode::Read, cid, 0, 1))).collect()
    };
    assert_eq!(s.target.talk(io, &host, &reads(128)), []);
    assert_eq!(s.target.conn(io).in_flight(), 128);
    let one_more = host.command(rw(NvmOpcode::Read, 999, 0, 1));
    assert_eq!(terminated(&s.target.talk(io, &host, &one_more)), (FatalError::PduSequence, 0));

    let mut s = Session::ready();
    let io = s.io.unwrap();
    s.target.feed(io, &reads(128), &mut || usize::MAX);
    assert_eq!(s.target.conn(io).in_flight(), 0, "answered, and nothing sent");
    s.target.feed(io, &one_more, &mut || usize::MAX);
    assert!(s.target.conn(io).close_reason().is_some());
}

/// A host that takes what it asked for can go on for ever.
#[test]
fn slots_come_back_once_responses_are_sent() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    for round in 0..20u16 {
        let burst: Vec<u8> = (0..128)
            .flat_map(|i| host.command(rw(NvmOpcode::Read, round * 128 + i, 0, 1)))
            .collect();
        let replies = s.target.talk(io, &host, &burst);
        assert_eq!(replies.len(), 256, "data and response for each");
    }
}

/// The data of a command that fails early is thrown away, and what follows is understood.
#[test]
fn data_of_a_command_that_fails_early_is_skipped() {
    for host in [ScriptedHost::default(), ScriptedHost::with_digests()] {
        let mut s = Session::ready_with(Target::default(), host);
        let io = s.io.unwrap();
        let outside = host.capsule(rw(NvmOpcode::Write, 1, 1 << 40, 8), &pattern(1, 4096));
        let good = host.capsule(rw(NvmOpcode::Write, 2, 0, 8), &pattern(2, 4096));
        let replies = s.target.talk(io, &host, &[outside, good].concat());
        let [Reply::Resp { cid: 1, status: first, .. }, Reply::Resp { cid: 2, status, .. }] =
            replies[..]
        else {
            panic!("{replies:?}")
        };
        assert_eq!(first.code(), Status::LBA_OUT_OF_RANGE);
        assert!(status.is_success());
        assert_eq!(&s.target.disk[..4096], &pattern(2, 4096)[..]);
    }
}

/// RFD 0001 1: in-capsule data waits for memory and all behind it waits too; data by R2T does not
/// hold anything up.
#[test]
fn memory_stops_the_stream_only_for_data_in_capsules() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    s.target.withhold = true;
    let large = host.command(rw(NvmOpcode::Write, 1, 0, 64));
    let flush = host.command(Sqe::new(NvmOpcode::Flush.0, 2, 1));
    let replies = s.target.talk(io, &host, &[large, flush].concat());
    assert!(matches!(replies[..], [Reply::Resp { cid: 2, .. }]), "{replies:?}");

    let small = host.capsule(rw(NvmOpcode::Write, 3, 0, 8), &pattern(3, 4096));
    let flush = host.command(Sqe::new(NvmOpcode::Flush.0, 4, 1));
    assert_eq!(s.target.talk(io, &host, &[small, flush].concat()), []);
    assert!(s.target.unread(io) > 4096);
    s.target.withhold = false;
    s.target.give_memory();
    let replies = s.target.replies(io, &host);
    assert!(
        matches!(
            replies[..],
            [Reply::R2t { cid: 1, .. }, Reply::Resp { cid: 3, .. }, Reply::Resp { cid: 4, .. }]
        ),
        "{replies:?}"
    );
    let classes = s.target.requests.join(", ");
    assert_eq!(classes, "flush, write 0+4096 fua false, flush");
}

/// NVMe/TCP 3.6.2.10: a command whose data was asked for ends only once that data has come.
#[test]
fn an_abort_waits_for_data_that_was_asked_for() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    let r2t = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Write, 9, 0, 64)));
    let mut abort = Sqe::new(AdminOpcode::Abort.0, 0, 0);
    abort.cdw10[0] = (1 | 9 << 16).into();
    assert_eq!(s.admin(abort).ok().result, 0);
    assert_eq!(s.target.replies(io, &host), [], "the host is still sending");
    let pdus = host.answer(&r2t[0], &pattern(1, 32768), 5000);
    let replies = s.target.talk(io, &host, &pdus);
    let [Reply::Resp { cid: 9, status, .. }] = replies[..] else { panic!("{replies:?}") };
    assert_eq!(status, Status::ABORT_REQUESTED);
    assert!(s.target.requests.is_empty());
}

/// A host that does not get to the point, or stops in the middle, is let go.
#[test]
fn stalled_hosts_are_disconnected() {
    let host = ScriptedHost::default();
    let mut t = Target::default();
    let link = t.open();
    assert_eq!(t.conn(link).next_timer(), Some(10 * S));
    t.talk(link, &host, &host.ic_req());
    t.tick(9 * S);
    assert!(!t.conn(link).is_closing());
    t.tick(10 * S);
    assert_eq!(t.conn(link).close_reason(), Some(CloseReason::EstablishTimeout));
    assert!(t.conn(link).is_closing());

    let mut s = Session::ready();
    let io = s.io.unwrap();
    assert_eq!(s.target.conn(io).next_timer(), None, "an idle queue needs no timer");
    s.target.tick(100 * S);
    s.target.talk(io, &host, &[4, 0, 72]);
    assert_eq!(s.target.conn(io).next_timer(), Some(160 * S));
    s.target.tick(160 * S);
    assert_eq!(s.target.conn(io).close_reason(), Some(CloseReason::ReceiveTimeout), "half a PDU");

    let mut s = Session::ready();
    let io = s.io.unwrap();
    let mut no_keep_alive = Sqe::new(AdminOpcode::SetFeatures.0, 0, 0);
    no_keep_alive.cdw10[0] = 0x0f.into();
    s.admin(no_keep_alive).ok();
    s.target.talk(io, &host, &host.command(rw(NvmOpcode::Write, 1, 0, 64)));
    s.target.tick(30 * S);
    let second = s.target.talk(io, &host, &host.command(rw(NvmOpcode::Write, 2, 0, 64)));
    s.target.tick(59 * S);
    assert!(s.target.conn(io).close_reason().is_none());
    s.target.talk(io, &host, &host.answer(&second[0], &pattern(1, 32768), 4096));
    s.target.tick(60 * S);
    assert_eq!(
        s.target.conn(io).close_reason(),
        Some(CloseReason::ReceiveTimeout),
        "an R2T unanswered"
    );
}

/// Waiting for memory is not the host's fault.
#[test]
fn the_receive_timeout_spares_a_host_that_is_made_to_wait() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    s.target.withhold = true;
    let small = host.capsule(rw(NvmOpcode::Write, 3, 0, 8), &pattern(3, 4096));
    s.target.talk(io, &host, &small);
    assert_eq!(s.target.conn(io).next_timer(), None);
    s.target.tick(100 * S);
    s.target.give_memory();
    assert!(matches!(s.target.replies(io, &host)[..], [Reply::Resp { cid: 3, .. }]));
}
