//! NVMe Base 2.0: admin commands on a controller that is up.

use crate::common;

use crate::common::driver::{Session, Target};
use crate::common::{pattern, rw};
use block::{Error, Lba, RequestError};
use nvme::entry::{AdminOpcode, NSID_ALL, NvmOpcode, Sgl};
use nvme::identify::Cns;
use nvme::log::{ErrorEntry, LogId};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{Sqe, Status};
use zerocopy::FromBytes;

fn admin(opcode: AdminOpcode, nsid: u32, dwords: &[u32], bytes: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, 0, nsid);
    for (to, from) in sqe.cdw10.iter_mut().zip(dwords) {
        *to = (*from).into();
    }
    sqe.sgl = Sgl::transport(bytes);
    sqe
}

fn identify(cns: Cns, nsid: u32, csi: u32) -> Sqe {
    admin(AdminOpcode::Identify, nsid, &[cns.0.into(), csi << 24], 4096)
}

fn set(feature: u32, value: u32) -> Sqe {
    admin(AdminOpcode::SetFeatures, 0, &[feature, value], 0)
}

fn get(feature: u32, select: u32, value: u32) -> Sqe {
    admin(AdminOpcode::GetFeatures, 0, &[feature | select << 8, value], 0)
}

fn log(log: LogId, bytes: u32) -> Sqe {
    let dwords = bytes / 4 - 1;
    admin(
        AdminOpcode::GetLogPage,
        NSID_ALL,
        &[u32::from(log.0) | dwords << 16, dwords >> 16],
        bytes,
    )
}

fn session() -> Session {
    Session::enabled(Target::default(), ScriptedHost::default())
}

/// NVMe Base 2.0, 5: opcodes that are not supported.
#[test]
fn unknown_commands_are_refused() {
    let mut s = session();
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0d, 0x10, 0x14, 0x80, 0x81, 0x84, 0xc0, 0xff] {
        let refused = s.admin(Sqe::new(opcode, 0, 0));
        assert_eq!(refused.code(), Status::INVALID_OPCODE, "{opcode:#x}");
        assert!(refused.status.is_do_not_retry());
    }
    for kind in [0x02, 0x05, 0x06] {
        let refused = s.admin(Sqe::new(AdminOpcode::Fabrics.0, 0, kind));
        assert_eq!(refused.code(), Status::INVALID_OPCODE, "fabrics {kind:#x}");
    }
    let disconnect = s.admin(Sqe::new(AdminOpcode::Fabrics.0, 0, 0x08));
    assert_eq!(disconnect.code(), Status::INVALID_QUEUE_TYPE);
}

/// NVMe Base 2.0, 5.17: namespace identifiers that are invalid (zero, above NN) or inactive.
#[test]
fn identify_knows_invalid_from_inactive() {
    let mut s = session();
    let inactive = s.admin(identify(Cns::Namespace, 1024, 0)).ok();
    assert_eq!(inactive.data, vec![0; 4096]);
    let inactive = s.admin(identify(Cns::IndependentNamespace, 2, 0)).ok();
    assert_eq!(inactive.data, vec![0; 4096]);
    for nsid in [0, 1025, NSID_ALL] {
        for cns in [Cns::Namespace, Cns::IndependentNamespace, Cns::CommandSetNamespace] {
            let refused = s.admin(identify(cns, nsid, 0));
            assert_eq!(refused.code(), Status::INVALID_NAMESPACE, "{cns:?} {nsid}");
        }
    }
    assert_eq!(s.admin(identify(Cns::Descriptors, 2, 0)).code(), Status::INVALID_NAMESPACE);
}

/// NVMe Base 2.0, 5.17.2.2: identifiers above the one given, in order.
#[test]
fn active_namespaces_are_listed_in_pages() {
    let target = Target::default();
    let mut s = Session::enabled(target, ScriptedHost::default());
    let ns = common::namespace();
    let map = [3, 5, 700].map(|n| (n, ns)).into_iter().collect();
    let cntlid = s.cntlid;
    s.target.controllers.get_mut(cntlid).unwrap().set_namespaces(map);
    let list = |s: &mut Session, after| {
        let data = s.admin(identify(Cns::ActiveNamespaces, after, 0)).ok().data;
        let ids = data.chunks(4).map(|c| u32::from_le_bytes(c.try_into().unwrap()));
        ids.take_while(|&n| n != 0).collect::<Vec<u32>>()
    };
    assert_eq!(list(&mut s, 0), [3, 5, 700]);
    assert_eq!(list(&mut s, 3), [5, 700]);
    assert_eq!(list(&mut s, 700), []);
    let by_set = s.admin(identify(Cns::CommandSetActiveNamespaces, 5, 0)).ok().data;
    assert_eq!(by_set[..8], [188, 2, 0, 0, 0, 0, 0, 0]);
    for nsid in [NSID_ALL, NSID_ALL - 1] {
        let refused = s.admin(identify(Cns::ActiveNamespaces, nsid, 0));
        assert_eq!(refused.code(), Status::INVALID_NAMESPACE);
    }
}

/// NVMe Base 2.0, 5.17.2: command sets other than NVM, structures that are not there, buffers
/// that do not fit.
#[test]
fn identify_checks_its_fields() {
    let mut s = session();
    for cns in
        [Cns::CommandSetNamespace, Cns::CommandSetController, Cns::CommandSetActiveNamespaces]
    {
        assert_eq!(s.admin(identify(cns, 1, 2)).code(), Status::INVALID_FIELD, "{cns:?} ZNS");
        s.admin(identify(cns, 1, 0)).ok();
    }
    assert_eq!(
        s.admin(identify(Cns::CommandSets, 0, 0)).ok().data[..9],
        [1, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(s.admin(identify(Cns(0x13), 0, 0)).code(), Status::INVALID_FIELD);
    for bytes in [0, 4092, 8192] {
        let mut sqe = identify(Cns::Controller, 0, 0);
        sqe.sgl = Sgl::transport(bytes);
        assert_eq!(s.admin(sqe).code(), Status::DATA_SGL_LENGTH_INVALID);
    }
    let mut fused = identify(Cns::Controller, 0, 0);
    fused.flags |= 1;
    assert_eq!(s.admin(fused).code(), Status::INVALID_FIELD);
}

/// NVMe Base 2.0, 5.27.1: what is set is got back; defaults and capabilities are told apart.
#[test]
fn features_are_kept() {
    let mut s = session();
    for (feature, value, default) in
        [(0x01, 0x0102_0304, 0), (0x04, 350, 0xffff), (0x06, 0, 1), (0x0a, 1, 0), (0x0b, 0x900, 0)]
    {
        assert_eq!(s.admin(get(feature, 0, 0)).ok().result, default, "{feature:#x}");
        s.admin(set(feature, value)).ok();
        assert_eq!(s.admin(get(feature, 0, 0)).ok().result, value.into(), "{feature:#x}");
        assert_eq!(s.admin(get(feature, 1, 0)).ok().result, default);
        assert_eq!(s.admin(get(feature, 2, 0)).ok().result, default);
        assert_eq!(s.admin(get(feature, 3, 0)).ok().result, 0b100, "changeable");
    }
    assert_eq!(s.admin(get(0x04, 0, 1 << 20)).ok().result, 0, "under temperature threshold");
    s.admin(set(0x02, 0)).ok();
    assert_eq!(s.admin(get(0x02, 0, 0)).ok().result, 0);
    let recovery = |op, nsid, value| admin(op, nsid, &[0x05, value], 0);
    s.admin(recovery(AdminOpcode::SetFeatures, NSID_ALL, 7)).ok();
    assert_eq!(s.admin(recovery(AdminOpcode::GetFeatures, 1, 0)).ok().result, 7);
}

/// NVMe Base 2.0, 5.27: what cannot be set.
#[test]
fn features_that_cannot_be_set_are_refused() {
    let mut s = session();
    for (sqe, status) in [
        (set(0x03, 0), Status::INVALID_FIELD),
        (set(0x08, 0), Status::INVALID_FIELD),
        (set(0xc0, 0), Status::INVALID_FIELD),
        (set(0x01 | 1 << 31, 0), Status::FEATURE_NOT_SAVEABLE),
        (set(0x02, 1), Status::INVALID_FIELD),
        (set(0x04, 3 << 16), Status::INVALID_FIELD),
        (set(0x07, 0xffff), Status::INVALID_FIELD),
        (set(0x0b, 1 << 31), Status::INVALID_FIELD),
        (set(0x81, 1), Status::COMMAND_SEQUENCE),
        (admin(AdminOpcode::SetFeatures, 1, &[0x05, 1 << 16], 0), Status::INVALID_FIELD),
        (admin(AdminOpcode::SetFeatures, 2, &[0x05, 0], 0), Status::INVALID_FIELD),
        (get(0x03, 0, 0), Status::INVALID_FIELD),
        (get(0x01, 4, 0), Status::INVALID_FIELD),
    ] {
        assert_eq!(s.admin(sqe).code(), status, "{sqe:?}");
    }
}

/// NVMe Base 2.0, 5.27.1.5: the limit is told, and fixed once a queue is connected.
#[test]
fn the_number_of_queues_is_negotiated_once() {
    let mut s = session();
    assert_eq!(s.admin(get(7, 0, 0)).ok().result, 63 | 63 << 16);
    assert_eq!(s.admin(set(7, 999 | 999 << 16)).ok().result, 63 | 63 << 16);
    assert_eq!(s.admin(set(7, 3 | 3 << 16)).ok().result, 3 | 3 << 16);
    assert_eq!(s.admin(get(7, 0, 0)).ok().result, 3 | 3 << 16);
    s.add_io(&common::connect(1, s.cntlid));
    assert_eq!(s.admin(set(7, 3)).code(), Status::COMMAND_SEQUENCE);
}

/// NVMe Base 2.0, 5.27.1.18 and 5.27.1.25: features with data.
#[test]
fn features_with_data() {
    let mut s = session();
    let get_behavior = admin(AdminOpcode::GetFeatures, 0, &[0x16], 512);
    assert_eq!(s.admin(get_behavior).ok().data, vec![0; 512]);
    let mut behavior = vec![0; 512];
    behavior[0] = 1;
    let mut sqe = set(0x16, 0);
    sqe.cid = s.next_cid().into();
    s.call(s.admin, sqe, &behavior).ok();
    assert_eq!(s.admin(get_behavior).ok().data, behavior);
    behavior[2] = 1;
    sqe.cid = s.next_cid().into();
    assert_eq!(s.call(s.admin, sqe, &behavior).code(), Status::INVALID_FIELD, "LBAFEE");
    sqe.cid = s.next_cid().into();
    let short = s.call(s.admin, sqe, &behavior[..500]);
    assert_eq!(short.code(), Status::DATA_SGL_LENGTH_INVALID);

    let host_id = |extended| admin(AdminOpcode::GetFeatures, 0, &[0x81, extended], 16);
    assert_eq!(s.admin(host_id(1)).ok().data, vec![7; 16]);
    assert_eq!(s.admin(host_id(0)).code(), Status::INVALID_FIELD);
}

/// NVMe Base 2.0, 5.16: logs that are not there, offsets and lengths that cannot be.
#[test]
fn get_log_page_checks_its_fields() {
    let mut s = session();
    let with = |change: fn(&mut Sqe)| {
        let mut sqe = log(LogId::Errors, 64);
        change(&mut sqe);
        sqe
    };
    for (sqe, status) in [
        (log(LogId(0x06), 64), Status::INVALID_LOG_PAGE),
        (log(LogId::Discovery, 1024), Status::INVALID_LOG_PAGE),
        (log(LogId::Errors, (1 << 20) + 4), Status::INVALID_FIELD),
        (with(|q| q.cdw10[2] = 2.into()), Status::INVALID_FIELD),
        (with(|q| q.cdw10[2] = 4100.into()), Status::INVALID_FIELD),
        (with(|q| q.cdw10[3] = 1.into()), Status::INVALID_FIELD),
        (with(|q| q.cdw10[4] = (1 << 23).into()), Status::INVALID_FIELD),
        (with(|q| q.sgl = Sgl::transport(68)), Status::DATA_SGL_LENGTH_INVALID),
        (admin(AdminOpcode::GetLogPage, 1, &[2 | 127 << 16], 512), Status::INVALID_FIELD),
    ] {
        assert_eq!(s.admin(sqe).code(), status, "{sqe:?}");
    }
    s.admin(log(LogId::Errors, 1 << 20)).ok();
}

/// nvme-cli reads the ANA log as long as Identify says that it may become, page by page (NVMe Base
/// 2.0, 5.16.1.13).
#[test]
fn the_ana_log_is_as_long_as_it_may_become() {
    let mut s = session();
    let identify = s.admin(admin(AdminOpcode::Identify, 0, &[1], 4096)).ok().data;
    let number = |at: usize| u32::from_le_bytes(identify[at..at + 4].try_into().unwrap());
    let (groups, namespaces) = (number(344), number(540));
    let length = 16 + groups * 32 + namespaces * 4;
    let part = |offset: u32| {
        let mut sqe = log(LogId::Ana, 4096);
        sqe.cdw10[2] = offset.into();
        sqe
    };
    assert_ne!(s.admin(part(0)).ok().data, [0; 4096]);
    for offset in (4096..length).step_by(4096) {
        assert_eq!(s.admin(part(offset)).ok().data, [0; 4096], "nothing is at {offset}");
    }
    assert_eq!(s.admin(part(length + 4)).code(), Status::INVALID_FIELD);
}

/// NVMe Base 2.0, 5.16.1: the logs that say what there is.
#[test]
fn the_supported_logs_exist() {
    let mut s = session();
    let supported = s.admin(log(LogId::Supported, 1024)).ok().data;
    let listed: Vec<u8> = (0..=255u8).filter(|&i| supported[usize::from(i) * 4] & 1 != 0).collect();
    assert_eq!(listed, [0, 1, 2, 3, 4, 5, 0x0c, 0x12, 0x13, 0x80]);
    for lid in listed {
        s.admin(log(LogId(lid), 512)).ok();
    }
    let firmware = s.admin(log(LogId::Firmware, 512)).ok().data;
    assert_eq!((firmware[0], &firmware[8..16]), (1, &b"0.1.0   "[..]));
    let effects = s.admin(log(LogId::Effects, 4096)).ok().data;
    let io = |op: NvmOpcode| effects[1024 + usize::from(op.0) * 4];
    assert_eq!((io(NvmOpcode::Write), io(NvmOpcode::Read), io(NvmOpcode(4))), (3, 1, 0));
    let features = s.admin(log(LogId::FeatureEffects, 1024)).ok().data;
    assert_eq!(features[6 * 4..][..4], [1, 0, 0x20, 0]);
}

/// NVMe Base 2.0, 5.16.1.2 and 5.16.1.3: errors are logged, newest first, with the place of the
/// fault; the health log counts.
#[test]
fn errors_are_logged() {
    let mut s = Session::ready();
    let refused = s.admin(identify(Cns(0x13), 0, 0));
    assert_eq!(refused.status.field() & 1 << 13, 1 << 13, "More");
    s.io(rw(NvmOpcode::Write, 0, 0, 8), &pattern(1, 4096)).ok();
    s.target.fail = Some(RequestError::Device(Error::Unreadable { at: Lba(9) }));
    let failed = s.io(rw(NvmOpcode::Read, 0, 8, 16), &[]);
    assert_eq!(failed.code(), Status::UNRECOVERED_READ);
    let data = s.admin(log(LogId::Errors, 128)).ok().data;
    let entry = |i: usize| ErrorEntry::read_from_bytes(&data[i * 64..][..64]).unwrap();
    let (newest, older) = (entry(0), entry(1));
    assert_eq!((newest.count.get(), newest.sqid.get(), newest.lba.get()), (2, 1, 8));
    assert_eq!((newest.nsid.get(), newest.location.get()), (1, 0xffff));
    assert_eq!(newest.status.get() >> 1, failed.status.field());
    assert_eq!((older.count.get(), older.sqid.get(), older.location.get()), (1, 0, 40));
    let health = s.admin(log(LogId::Health, 512)).ok().data;
    let count = |at: usize| u64::from_le_bytes(health[at..at + 8].try_into().unwrap());
    assert_eq!((count(64), count(80), count(176)), (1, 1, 2), "reads, writes, errors");
    for _ in 0..100 {
        s.admin(identify(Cns(0x13), 0, 0));
    }
    let data = s.admin(log(LogId::Errors, 4096)).ok().data;
    assert_eq!(data[..8], 102u64.to_le_bytes());
    assert_eq!(data[63 * 64..][..8], 39u64.to_le_bytes(), "64 entries");
}

/// NVMe Base 2.0, 5.2: AERL bounds the requests that wait; Abort takes one back.
#[test]
fn event_requests_are_bounded_and_can_be_aborted() {
    let mut s = session();
    let host = s.host;
    for cid in 100..104 {
        let aer = host.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, cid, 0));
        assert_eq!(s.target.talk(s.admin, &host, &aer), []);
    }
    let refused = s.admin(Sqe::new(AdminOpcode::AsyncEventRequest.0, 0, 0));
    assert_eq!(refused.code(), Status::EVENT_REQUEST_LIMIT);
    let mut abort = admin(AdminOpcode::Abort, 0, &[102 << 16], 0);
    abort.cid = 999.into();
    let replies = s.target.talk(s.admin, &host, &host.command(abort));
    assert!(
        matches!(
            replies[..],
            [
                Reply::Resp { cid: 999, result: 0, .. },
                Reply::Resp { cid: 102, status: Status::ABORT_REQUESTED, .. }
            ]
        ),
        "{replies:?}"
    );
}

/// NVMe Base 2.0, 5.1: commands in flight are aborted, others are not, queues that do not exist
/// are refused.
#[test]
fn abort() {
    let mut s = Session::ready();
    let (host, io) = (s.host, s.io.unwrap());
    s.target.hold = true;
    s.target.talk(io, &host, &host.command(rw(NvmOpcode::Read, 55, 0, 8)));
    let abort = |sqid: u32, cid: u32| admin(AdminOpcode::Abort, 0, &[sqid | cid << 16], 0);
    assert_eq!(s.admin(abort(1, 56)).ok().result, 1, "not in flight");
    assert_eq!(s.admin(abort(0, 56)).ok().result, 1);
    assert_eq!(s.admin(abort(2, 55)).code(), Status::INVALID_FIELD);
    assert_eq!(s.admin(abort(65535, 55)).code(), Status::INVALID_FIELD);
    assert_eq!(s.admin(abort(1, 55)).ok().result, 0);
    let replies = s.target.replies(io, &host);
    assert!(matches!(replies[..], [Reply::Resp { cid: 55, status: Status::ABORT_REQUESTED, .. }]));
}
