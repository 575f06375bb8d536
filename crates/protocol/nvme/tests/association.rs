//! NVMe Base 2.0, fabrics: Connect, properties, keep alive, discovery, and the whole sequence by
//! which Linux brings a controller up.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::common::driver::{Session, Target};
use crate::common::{SUBNQN, connect, namespace, rw};
use block::{Error, RequestError};
use nvme::entry::{AdminOpcode, NSID_ALL, NvmOpcode, Sgl};
use nvme::fabrics::DISCOVERY_NQN;
use nvme::identify::{Cns, IdentifyController, IdentifyNamespace};
use nvme::log::{AnaState, LogId};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{
    Controller, DiscoveryEntry, DiscoveryKind, DiscoveryLog, Event, Namespace, Sqe, Status,
    TlsRequirement,
};
use zerocopy::FromBytes;

const S: Duration = Duration::from_secs(1);
const CAP: u32 = 0x00;
const VS: u32 = 0x08;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const CRTO: u32 = 0x68;

fn identify(cns: Cns, nsid: u32) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::Identify.0, 0, nsid);
    sqe.cdw10[0] = u32::from(cns.0).into();
    sqe.sgl = Sgl::transport(4096);
    sqe
}

fn get_log(log: LogId, specific: u32, offset: u64, bytes: u32) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::GetLogPage.0, 0, NSID_ALL);
    let dwords = bytes / 4 - 1;
    sqe.cdw10[0] = (u32::from(log.0) | specific << 8 | dwords << 16).into();
    sqe.cdw10[1] = (dwords >> 16).into();
    sqe.cdw10[2] = (offset as u32).into();
    sqe.cdw10[3] = ((offset >> 32) as u32).into();
    sqe.sgl = Sgl::transport(bytes);
    sqe
}

fn set_features(feature: u32, value: u32) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::SetFeatures.0, 0, 0);
    sqe.cdw10[0] = feature.into();
    sqe.cdw10[1] = value.into();
    sqe
}

fn event_request(cid: u16) -> Sqe {
    Sqe::new(AdminOpcode::AsyncEventRequest.0, cid, 0)
}

/// Linux 6.12, drivers/nvme/host: tcp.c, fabrics.c, core.c, multipath.c: what it sends to bring a
/// controller up, and what it insists on in the answers.
#[test]
fn linux_brings_a_controller_up() {
    for host in [ScriptedHost::default(), ScriptedHost::with_digests()] {
        // nvme_tcp_alloc_admin_queue, nvmf_connect_admin_queue
        let mut s = Session::connected(Target::default(), host, &connect(0, 0));
        assert_ne!(s.cntlid, 0);
        // nvme_enable_ctrl
        let cap = s.property(CAP, true).ok().result;
        assert_eq!(cap & 0xffff, 127, "MQES");
        assert_eq!(cap >> 48 & 0xf, 0, "MPSMIN: 4 KiB");
        assert_eq!(cap >> 37 & 0x41, 0x41, "CSS: NVM, by command set");
        assert_eq!(s.property(CSTS, false).ok().result & 1, 0);
        assert_eq!(cap >> 59 & 1, 1, "CRMS: CRTO is meant");
        assert!(s.property(CRTO, false).ok().result & 0xffff > 0);
        let cc = 0x0046_0060;
        s.set_property(CC, cc).ok();
        assert_eq!(s.property(CC, false).ok().result, cc);
        s.set_property(CC, cc | 1).ok();
        assert_eq!(s.property(CSTS, false).ok().result, 1, "ready");
        // nvme_init_ctrl_finish
        assert_eq!(s.property(VS, false).ok().result, 0x2_0000);
        let data = s.admin(identify(Cns::Controller, 0)).ok().data;
        let id = IdentifyController::read_from_bytes(&data).unwrap();
        assert_eq!(id.cntlid.get(), s.cntlid);
        assert_ne!(id.kas.get(), 0, "keep-alive support is mandatory for fabrics");
        assert_eq!(id.cqt.get(), 2000, "Base 2.1, 5.1.13.2.1");
        assert!(id.ioccsz.get() * 16 == 64 + 131_072 && id.iorcsz.get() >= 1);
        assert_eq!(id.icdoff.get(), 0, "icdoff is not supported");
        assert_ne!(id.sgls.get() & 0b11, 0, "mandatory sgls are not supported");
        assert!(id.maxcmd.get() >= 128);
        assert!(id.mnan.get() > 0 && id.mnan <= id.nn, "invalid MNAN value");
        assert_eq!(id.cmic & 0b1010, 0b1010, "multiple controllers, ANA");
        assert!(id.subnqn.starts_with(SUBNQN.as_bytes()));
        assert_eq!(id.cntrltype, 1);
        let ana_bytes = 16 + id.nanagrpid.get() * 32 + id.mnan.get() * 4;
        assert!(ana_bytes <= 4096 << id.mdts);
        s.admin(get_log(LogId::Effects, 0, 0, 4096)).ok();
        let ana = s.admin(get_log(LogId::Ana, 0, 0, ana_bytes)).ok().data;
        assert_eq!(ana[8..10], [1, 0], "one group");
        assert_eq!(ana[16..24], [1, 0, 0, 0, 1, 0, 0, 0], "group 1, one namespace");
        assert_eq!((ana[32], &ana[48..52]), (AnaState::Optimized.0, &[1, 0, 0, 0][..]));
        s.admin(identify(Cns::CommandSetController, 0)).ok();
        // nvme_set_queue_count
        let granted = s.admin(set_features(7, 15 | 15 << 16)).ok().result;
        assert_eq!(granted, 15 | 15 << 16);
        // nvme_tcp_start_io_queues, nvmf_connect_io_queue
        let links: Vec<usize> = (1..=16).map(|q| s.add_io(&connect(q, s.cntlid))).collect();
        // nvme_start_ctrl
        s.admin(set_features(0x0b, id.oaes.get() & 0x8000_0b00)).ok();
        let aer = host.command(event_request(30));
        assert_eq!(s.target.talk(s.admin, &host, &aer), []);
        s.admin(Sqe::new(AdminOpcode::KeepAlive.0, 0, 0)).ok();
        linux_scans_namespaces(&mut s);
        for link in links {
            let read = host.command(rw(NvmOpcode::Read, 1, 0, 8));
            let replies = s.target.talk(link, &host, &read);
            assert!(matches!(replies[..], [Reply::Data { .. }, Reply::Resp { .. }]));
        }
        // nvme_shutdown_ctrl
        s.set_property(CC, cc | 1 | 1 << 14).ok();
        assert_eq!(s.property(CSTS, false).ok().result >> 2 & 3, 1, "shutdown under way");
        assert_eq!(s.target.events.pop(), Some(Event::ShutDown));
        s.target.controllers.get_mut(s.cntlid).unwrap().shut_down();
        assert_eq!(s.property(CSTS, false).ok().result >> 2 & 3, 2, "shutdown complete");
        let late = s.target.talk(1, &host, &host.command(rw(NvmOpcode::Read, 2, 0, 8)));
        let Reply::Resp { status, .. } = late[0] else { panic!("{late:?}") };
        assert_eq!(status.code(), Status::COMMAND_SEQUENCE);
    }
}

/// nvme_scan_work: the list of namespaces, and what each is.
fn linux_scans_namespaces(s: &mut Session) {
    let list = s.admin(identify(Cns::ActiveNamespaces, 0)).ok().data;
    assert_eq!(list[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    let ids = s.admin(identify(Cns::Descriptors, 1)).ok().data;
    assert_eq!((ids[0], ids[1], &ids[4..12]), (1, 8, &[0x33; 8][..]), "EUI-64");
    assert_eq!((ids[12], ids[13], &ids[16..32]), (2, 16, &[0x22; 16][..]), "NGUID");
    assert_eq!((ids[32], ids[33], &ids[36..52]), (3, 16, &[0x11; 16][..]), "UUID");
    assert_eq!((ids[52], ids[53], ids[56], ids[57]), (4, 1, 0, 0), "CSI NVM, end");
    let independent = s.admin(identify(Cns::IndependentNamespace, 1)).ok().data;
    assert_eq!((independent[1], independent[4], independent[14]), (1, 1, 1), "shared, ready");
    let data = s.admin(identify(Cns::Namespace, 1)).ok().data;
    let ns = IdentifyNamespace::read_from_bytes(&data).unwrap();
    assert_eq!((ns.nsze.get(), ns.ncap.get(), ns.lbaf[0].lbads), (4096, 4096, 9));
    assert_eq!(ns.dlfeat, 0b1001, "deallocated reads zeroes, Write Zeroes deallocates");
}

/// NVMe Base 2.0, 6.3: what Connect refuses, and where it says the fault is (IPO, IATTR).
#[test]
fn connect_is_refused_with_its_reason() {
    let data = |offset: u64| offset | 1 << 16;
    let parameters = Status::CONNECT_INVALID_PARAMETERS;
    type Spoil = fn(&mut nvme::Connect);
    let admin: [(Spoil, Status, u64); 6] = [
        (|c| c.hostnqn = "nqn.2014-08.org.example:other".into(), Status::CONNECT_INVALID_HOST, 0),
        (|c| c.subnqn = "nqn.2014-08.org.example:none".into(), parameters, data(256)),
        (|c| c.subnqn = String::new(), parameters, data(256)),
        (|c| c.cntlid = 1, parameters, data(16)),
        (|c| c.sqsize = 0, parameters, 44),
        (|c| c.sqsize = 128, parameters, 44),
    ];
    let mut s = Session::enabled(Target::default(), ScriptedHost::default());
    for (spoil, status, result) in admin {
        let mut c = connect(0, 0);
        spoil(&mut c);
        let link = s.initialized();
        let refused = s.connect(link, &c);
        assert_eq!((refused.code(), refused.result), (status, result), "{c:?}");
        assert!(refused.status.is_do_not_retry());
        s.connect(link, &connect(0, 0)).ok();
    }
    let io: [(Spoil, Status, u64); 8] = [
        (|c| c.hostnqn = "nqn.2014-08.org.example:other".into(), parameters, data(16)),
        (|c| c.subnqn = "nqn.2014-08.org.example:none".into(), parameters, data(16)),
        (|c| c.cntlid = 999, parameters, data(16)),
        (|c| c.host_id = [8; 16], parameters, data(0)),
        (|c| c.qid = 65, parameters, 42),
        (|c| c.qid = 65535, parameters, 42),
        (|c| c.sqsize = 0, parameters, 44),
        (|c| c.sqsize = 128, parameters, 44),
    ];
    for (spoil, status, result) in io {
        let mut c = connect(1, s.cntlid);
        spoil(&mut c);
        let link = s.initialized();
        let refused = s.connect(link, &c);
        assert_eq!((refused.code(), refused.result), (status, result), "{c:?}");
    }
    s.add_io(&connect(1, s.cntlid));
    let link = s.initialized();
    let twice = s.connect(link, &connect(1, s.cntlid));
    assert_eq!(twice.code(), Status::COMMAND_SEQUENCE, "the queue exists");
}

/// NVMe Base 2.0, 6.3: I/O queues can be connected only while the controller is ready; a queue
/// whose connection has gone may be connected again.
#[test]
fn io_queues_need_a_ready_controller() {
    let mut s = Session::connected(Target::default(), ScriptedHost::default(), &connect(0, 0));
    let link = s.initialized();
    let early = s.connect(link, &connect(1, s.cntlid));
    assert_eq!(early.code(), Status::COMMAND_SEQUENCE);
    s.set_property(CC, 0x0046_0001).ok();
    s.connect(link, &connect(1, s.cntlid)).ok();
    let controller = s.target.controllers.get_mut(s.cntlid).unwrap();
    assert_eq!(controller.io_queues(), 1);
    controller.io_disconnected(1);
    s.add_io(&connect(1, s.cntlid));
}

/// Identifiers are unique among live controllers and not used again at once; when all are taken
/// the host is asked to try again.
#[test]
fn controller_identifiers_go_round() {
    let target = Target { controllers: nvme::Controllers::new(10..=12), ..Target::default() };
    let mut s = Session::connected(target, ScriptedHost::default(), &connect(0, 0));
    assert_eq!(s.cntlid, 10);
    let mut again = || {
        let link = s.initialized();
        let outcome = s.connect(link, &connect(0, 0));
        if outcome.status.is_success() { Ok(outcome.result) } else { Err(outcome.status) }
    };
    assert_eq!((again(), again()), (Ok(11), Ok(12)));
    assert_eq!(again(), Err(Status::CONNECT_BUSY), "not final");
    s.target.controllers.remove(11).unwrap();
    let link = s.initialized();
    assert_eq!(s.connect(link, &connect(0, 0)).ok().result, 11);
    s.target.controllers.set_ids(12..=13);
    let link = s.initialized();
    assert_eq!(s.connect(link, &connect(0, 0)).ok().result, 13, "12 lives");
}

/// NVMe Base 2.0, 3.1.3: properties that do not exist, or not in that size; CC that asks for what
/// CAP does not offer.
#[test]
fn properties_are_checked() {
    let mut s = Session::connected(Target::default(), ScriptedHost::default(), &connect(0, 0));
    for (offset, wide) in [(CAP, false), (VS, true), (CC, true), (0x24, false), (0x1000, true)] {
        let outcome = s.property(offset, wide);
        assert_eq!(outcome.code(), Status::INVALID_FIELD, "{offset:#x}");
    }
    assert_eq!(s.set_property(CAP, 1).code(), Status::INVALID_FIELD);
    assert_eq!(s.set_property(CSTS, 1).code(), Status::INVALID_FIELD);
    for cc in [0x0045_0001, 0x0036_0001, 0x0046_0081, 0x0046_0801, 0x0046_0011] {
        s.set_property(CC, cc).ok();
        assert_eq!(s.property(CSTS, false).ok().result, 2, "CC {cc:#x} is fatal (CFS)");
        s.set_property(CC, 0).ok();
        assert_eq!(s.property(CSTS, false).ok().result, 0);
    }
}

/// NVMe Base 2.0, 3.5.1: before CC.EN nothing but fabrics commands; CC.EN cleared resets.
#[test]
fn a_reset_ends_what_is_held_and_forgets_features() {
    let mut s = Session::connected(Target::default(), ScriptedHost::default(), &connect(0, 0));
    let early = s.admin(identify(Cns::Controller, 0));
    assert_eq!(early.code(), Status::COMMAND_SEQUENCE);
    s.set_property(CC, 0x0046_0001).ok();
    s.add_io(&connect(1, s.cntlid));
    s.admin(set_features(0x0b, 1 << 8)).ok();
    s.admin(set_features(1, 0x0702)).ok();
    let host = s.host;
    s.target.talk(s.admin, &host, &host.command(event_request(30)));
    let sqe = nvme::fabrics::Property::encode(99, CC, false, Some(0x0046_0000));
    let replies = s.target.talk(s.admin, &host, &host.command(sqe));
    assert!(matches!(replies[..], [Reply::Resp { cid: 99, .. }]), "{replies:?}");
    assert_eq!(s.target.conn(s.admin).in_flight(), 0, "the request's slot is free");
    assert_eq!(s.target.events[0], Event::Reset);
    assert_eq!(s.target.controllers.get(s.cntlid).unwrap().io_queues(), 0);
    s.set_property(CC, 0x0046_0001).ok();
    let mut get = set_features(1, 0);
    get.opcode = AdminOpcode::GetFeatures.0;
    assert_eq!(s.admin(get).ok().result, 0);
    assert_eq!(s.target.conn(s.admin).in_flight(), 0);
}

/// NVMe Base 2.0, 5.2 and 3.7.2: event requests outstanding at a reset are discarded without a
/// completion, and those after it are counted from none.
#[test]
fn event_requests_do_not_outlive_a_reset() {
    let mut s = Session::ready();
    let host = s.host;
    for round in 0..20 {
        for cid in 0..4 {
            let held = s.target.talk(s.admin, &host, &host.command(event_request(cid)));
            assert_eq!(held, [], "round {round}");
        }
        let fifth = s.target.talk(s.admin, &host, &host.command(event_request(4)));
        let Reply::Resp { cid: 4, status, .. } = fifth[0] else { panic!("{fifth:?}") };
        assert_eq!(status.code(), Status::EVENT_REQUEST_LIMIT);
        assert_eq!(s.target.conn(s.admin).in_flight(), 4);
        s.set_property(CC, 0x0046_0000).ok();
        assert_eq!(s.target.replies(s.admin, &host), []);
        assert_eq!(s.target.conn(s.admin).in_flight(), 0);
        s.set_property(CC, 0x0046_0001).ok();
    }
}

/// NVMe Base 2.0, 3.9: a silent host is missed; traffic on any queue keeps the association.
#[test]
fn keep_alive() {
    let mut s = Session::ready();
    s.target.tick(5 * S);
    assert!(s.target.events.is_empty());
    s.io(rw(NvmOpcode::Read, 0, 0, 8), &[]).ok();
    s.target.tick(10 * S);
    s.admin(Sqe::new(AdminOpcode::KeepAlive.0, 0, 0)).ok();
    s.target.tick(15 * S);
    assert!(s.target.events.is_empty());
    s.target.tick(20 * S);
    assert_eq!(s.target.events, [Event::KeepAliveExpired]);
    assert_eq!(s.property(CSTS, false).ok().result & 2, 2, "CFS");
}

/// NVMe Base 2.0, 3.9 and 5.27.1.12: no timeout unless asked for; it can be asked for later.
#[test]
fn keep_alive_can_be_set_and_turned_off() {
    let mut c = connect(0, 0);
    c.kato_ms = 0;
    let mut s = Session::connected(Target::default(), ScriptedHost::default(), &c);
    s.set_property(CC, 0x0046_0001).ok();
    s.target.tick(1000 * S);
    s.admin(set_features(0x0f, 2_500)).ok();
    let mut get = set_features(0x0f, 0);
    get.opcode = AdminOpcode::GetFeatures.0;
    s.target.tick(1001 * S);
    s.target.tick(1003 * S);
    assert_eq!(s.admin(get).ok().result, 2_500);
    assert!(s.target.events.is_empty());
    s.target.tick(1004 * S);
    assert!(s.target.events.is_empty(), "Get Features was traffic");
    s.target.tick(1007 * S);
    assert_eq!(s.target.events, [Event::KeepAliveExpired]);
}

fn discovery(n: u16) -> Rc<DiscoveryLog> {
    let entry = |i: u16| DiscoveryEntry {
        kind: if i == 0 { DiscoveryKind::Current } else { DiscoveryKind::Nvm },
        nqn: if i == 0 { DISCOVERY_NQN.into() } else { format!("nqn.2026-01.example:v{i}") },
        address: if i == 2 { "[fd00::7]:4420".parse() } else { "192.0.2.9:4420".parse() }.unwrap(),
        port_id: 1,
        tls: match i {
            1 => TlsRequirement::Required,
            2 => TlsRequirement::Possible,
            _ => TlsRequirement::None,
        },
    };
    Rc::new(DiscoveryLog { generation: n.into(), entries: (0..n).map(entry).collect() })
}

fn discovering(entries: u16) -> Session {
    let target = Target { discovery: discovery(entries), ..Target::default() };
    let mut c = connect(0, 0);
    c.subnqn = DISCOVERY_NQN.into();
    c.kato_ms = 0;
    let mut s = Session::connected(target, ScriptedHost::default(), &c);
    s.set_property(CC, 0x0046_0001).ok();
    s
}

/// NVMe Base 2.0, 3.1.2.3 and 5.16.1.23: nvme-cli reads the header, then all records, then the
/// header once more.
#[test]
fn a_host_discovers() {
    let mut s = discovering(5);
    let data = s.admin(identify(Cns::Controller, 0)).ok().data;
    let id = IdentifyController::read_from_bytes(&data).unwrap();
    assert_eq!((id.cntrltype, id.oaes.get()), (2, 1 << 31));
    assert!(id.subnqn.starts_with(DISCOVERY_NQN.as_bytes()));
    let header = s.admin(get_log(LogId::Discovery, 0, 0, 1024)).ok().data;
    assert_eq!(header[..8], 5u64.to_le_bytes(), "generation");
    assert_eq!(header[8..16], 5u64.to_le_bytes(), "records");
    let whole = s.admin(get_log(LogId::Discovery, 0, 0, 6 * 1024)).ok().data;
    assert_eq!(whole[..1024], header[..]);
    let text = |record: usize, at: usize, n: usize| {
        let at = (record + 1) * 1024 + at;
        String::from_utf8(whole[at..at + n].to_vec()).unwrap()
    };
    assert_eq!(whole[1024..1028], [3, 1, 3, 4], "TCP, IPv4, this subsystem, no flow control");
    assert_eq!(whole[1024 + 10], 0b10, "EPCSD");
    assert_eq!(whole[2048..2056], [3, 1, 2, 4 | 1, 1, 0, 0xff, 0xff], "a secure channel");
    let (treq, sectype) =
        ([1, 2, 3, 4].map(|n| n * 1024 + 3), [1, 2, 3, 4].map(|n| n * 1024 + 768));
    assert_eq!(treq.map(|at| whole[at]), [4, 5, 4, 4]);
    assert_eq!(sectype.map(|at| whole[at]), [0, 2, 2, 0], "TLS 1.3");
    assert_eq!(text(1, 32, 32).trim_end_matches(' '), "4420");
    assert_eq!(text(1, 512, 256).trim_end_matches(' '), "192.0.2.9");
    assert_eq!(text(1, 256, 256).trim_end_matches('\0'), "nqn.2026-01.example:v1");
    assert_eq!((whole[3072 + 1], text(2, 512, 256).trim_end_matches(' ')), (2, "fd00::7"));
    for (offset, bytes) in [(1024, 4096), (1020, 1032), (4, 8), (6 * 1024 - 4, 64)] {
        let part = s.admin(get_log(LogId::Discovery, 0, offset, bytes)).ok().data;
        let mut expect = whole[offset as usize..].to_vec();
        expect.resize(bytes as usize, 0);
        assert_eq!(part, expect, "{offset}+{bytes}");
    }
    let beyond = s.admin(get_log(LogId::Discovery, 0, 6 * 1024 + 4, 64));
    assert_eq!(beyond.code(), Status::INVALID_FIELD);
}

/// NVMe Base 2.0, 3.1.2.3: a discovery controller has no namespaces, no I/O queues, and few
/// commands.
#[test]
fn a_discovery_controller_is_only_that() {
    let mut s = discovering(1);
    assert_eq!(s.admin(identify(Cns::Namespace, 1)).code(), Status::INVALID_FIELD);
    assert_eq!(s.admin(get_log(LogId::Health, 0, 0, 512)).code(), Status::INVALID_LOG_PAGE);
    assert_eq!(s.admin(set_features(6, 1)).code(), Status::INVALID_FIELD);
    let link = s.initialized();
    let mut c = connect(1, s.cntlid);
    c.subnqn = DISCOVERY_NQN.into();
    let refused = s.connect(link, &c);
    assert_eq!((refused.code(), refused.result), (Status::CONNECT_INVALID_PARAMETERS, 42));
}

/// NVMe Base 2.0, 5.2: Discovery Log Page Change.
#[test]
fn a_persistent_discovery_host_hears_of_changes() {
    let mut s = discovering(2);
    let host = s.host;
    s.admin(set_features(0x0b, 1 << 31)).ok();
    s.target.talk(s.admin, &host, &host.command(event_request(30)));
    let cntlid = s.cntlid;
    s.target.controllers.get_mut(cntlid).unwrap().set_discovery(discovery(2));
    s.target.tick(S);
    assert_eq!(s.target.replies(s.admin, &host), [], "nothing has changed");
    let renumbered = DiscoveryLog { generation: 99, ..(*discovery(2)).clone() };
    s.target.controllers.get_mut(cntlid).unwrap().set_discovery(Rc::new(renumbered));
    s.target.tick(S);
    assert_eq!(s.target.replies(s.admin, &host), [], "the entries are the same");
    s.target.controllers.get_mut(cntlid).unwrap().set_discovery(discovery(3));
    s.target.tick(2 * S);
    let replies = s.target.replies(s.admin, &host);
    assert!(matches!(replies[..], [Reply::Resp { cid: 30, result: 0x0070_f002, .. }]));
    let header = s.admin(get_log(LogId::Discovery, 0, 0, 1024)).ok().data;
    assert_eq!(header[..8], 3u64.to_le_bytes());
}

/// NVMe Base 2.0, 5.2 and 5.16.1.5: one notice until the list is read; the list has everything
/// that changed meanwhile; masked notices wait.
#[test]
fn a_host_hears_of_namespaces_that_change() {
    let mut s = Session::enabled(Target::default(), ScriptedHost::default());
    let (host, cntlid) = (s.host, s.cntlid);
    let set = |s: &mut Session, nsids: &[u32], blocks: u64| {
        let mut ns = namespace();
        ns.info.blocks = blocks;
        let map: BTreeMap<_, _> = nsids.iter().map(|&n| (n, ns)).collect();
        s.target.controllers.get_mut(cntlid).unwrap().set_namespaces(map);
        s.target.tick(S);
        s.target.replies(s.admin, &host)
    };
    let ask =
        |s: &mut Session, cid| s.target.talk(s.admin, &host, &host.command(event_request(cid)));
    assert_eq!(ask(&mut s, 30), []);
    assert_eq!(set(&mut s, &[1], 5000), [], "masked");
    let enable = Sqe { cid: 99.into(), ..set_features(0x0b, 1 << 8 | 1 << 11) };
    let replies = s.target.talk(s.admin, &host, &host.command(enable));
    let notice = 0x0004_0002;
    assert!(
        matches!(
            replies[..],
            [Reply::Resp { cid: 99, .. }, Reply::Resp { cid: 30, result, .. }] if result == notice
        ),
        "{replies:?}"
    );
    assert_eq!(set(&mut s, &[1, 2], 5000), [], "no request to answer, and told already");
    assert_eq!(ask(&mut s, 31), []);
    assert_eq!(set(&mut s, &[2, 7], 5000), [], "told already");
    let mut retained = get_log(LogId::ChangedNamespaces, 0, 0, 4096);
    retained.cdw10[0] = (retained.cdw(0) | 1 << 15).into();
    let list = s.admin(retained).ok().data;
    assert_eq!(list[..16], [1, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(set(&mut s, &[7], 5000), [], "RAE keeps it masked");
    let list = s.admin(get_log(LogId::ChangedNamespaces, 0, 0, 4096)).ok().data;
    assert_eq!(list[..12], [1, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0]);
    let replies = set(&mut s, &[7], 6000);
    assert!(matches!(replies[..], [Reply::Resp { cid: 31, .. }]), "{replies:?}");
    let list = s.admin(get_log(LogId::ChangedNamespaces, 0, 0, 4096)).ok().data;
    assert_eq!(list[..8], [7, 0, 0, 0, 0, 0, 0, 0]);
    let many: Vec<u32> = (1..=1026).collect();
    set(&mut s, &many, 6000);
    let list = s.admin(get_log(LogId::ChangedNamespaces, 0, 0, 4096)).ok().data;
    assert_eq!(list[..8], [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], "too many to list");
}

/// NVMe Base 2.0, 8.1 and 5.16.1.11: access states: the notice, the log, and what I/O is told.
#[test]
fn access_states_change() {
    let mut s = Session::ready_with(two_groups(), ScriptedHost::default());
    s.admin(set_features(0x0b, 1 << 11)).ok();
    let host = s.host;
    s.target.talk(s.admin, &host, &host.command(event_request(30)));
    assert_eq!(set_ana(&mut s, AnaState::Optimized), [], "no change");
    let replies = set_ana(&mut s, AnaState::Inaccessible);
    assert!(matches!(replies[..], [Reply::Resp { cid: 30, result: 0x000c_0302, .. }]));
    let read = rw(NvmOpcode::Read, 0, 0, 8);
    let refused = s.io(read, &[]);
    assert_eq!(refused.code(), Status::ANA_INACCESSIBLE);
    assert!(!refused.status.is_do_not_retry(), "another path may do it");
    s.io(of_namespace(read, 2), &[]).ok();
    let log = s.admin(get_log(LogId::Ana, 1, 0, 80)).ok().data;
    assert_eq!((log[0], log[8]), (1, 2), "groups only: change count, groups");
    assert_eq!((log[16], log[20], log[24], log[32]), (1, 0, 1, 3), "inaccessible");
    assert_eq!((log[48], log[52], log[56], log[64]), (2, 0, 0, 1), "optimized");
    let log = s.admin(get_log(LogId::Ana, 0, 0, 88)).ok().data;
    assert_eq!((log[20], &log[48..52]), (1, &[1, 0, 0, 0][..]), "namespace 1");
    assert_eq!((log[52], log[56], &log[84..88]), (2, 1, &[2, 0, 0, 0][..]), "namespace 2");
    set_ana(&mut s, AnaState::PersistentLoss);
    assert_eq!(s.io(read, &[]).code(), Status::ANA_PERSISTENT_LOSS);
    set_ana(&mut s, AnaState::NonOptimized);
    s.io(read, &[]).ok();
    let unknown = s.admin(get_log(LogId::Ana, 1, 0, 80)).ok().data;
    let cntlid = s.cntlid;
    s.target.controllers.get_mut(cntlid).unwrap().set_ana(9, AnaState::Inaccessible);
    assert_eq!(s.admin(get_log(LogId::Ana, 1, 0, 80)).ok().data, unknown, "no such namespace");
}

/// NVMe Base 2.0, 8.1: in a change commands go to the volume, which holds them; those that it
/// gives back are told the state that the namespace is in by then. What others can do is never
/// told as a failure of the namespace.
#[test]
fn an_unavailable_volume_is_reported_as_a_path_error() {
    let mut s = Session::ready_with(two_groups(), ScriptedHost::default());
    let read = rw(NvmOpcode::Read, 0, 0, 8);
    for (state, failure, expect) in [
        (AnaState::Change, None, Status::SUCCESS),
        (AnaState::Change, Some(Error::Fenced), Status::ANA_TRANSITION),
        (AnaState::Change, Some(Error::Gone), Status::ANA_INACCESSIBLE),
        (AnaState::Optimized, Some(Error::Fenced), Status::ANA_TRANSITION),
        (AnaState::Optimized, Some(Error::NoSpace), Status::CAPACITY_EXCEEDED),
    ] {
        set_ana(&mut s, state);
        s.target.fail = failure.map(RequestError::Device);
        assert_eq!(s.io(read, &[]).code(), expect, "{state:?} {failure:?}");
    }
    s.target.fail = Some(Error::Gone.into());
    let other = s.io(of_namespace(read, 2), &[]);
    assert_eq!(other.code(), Status::INTERNAL_ERROR, "no other controller serves it");
    set_ana(&mut s, AnaState::Inaccessible);
    s.target.fail = Some(Error::Fenced.into());
    let flush = Sqe::new(NvmOpcode::Flush.0, 0, NSID_ALL);
    assert_eq!(s.io(flush, &[]).code(), Status::ANA_INACCESSIBLE, "a Flush of all");
}

/// NVM Command Set 1.0, 4.1.5.1: NUSE is what a thin namespace takes, NCAP at most, and no event
/// tells of it. Base 2.0, 8.1.3.3: it is 0 while the namespace is inaccessible.
#[test]
fn space_use_of_a_namespace_is_reported() {
    let thick = Namespace { thin: false, used_blocks: Some(5), ..namespace() };
    let namespaces = |first| [(1, first), (2, thick)].into();
    let all = Target { namespaces: namespaces(namespace()), ..Target::default() };
    let mut s = Session::enabled(all, ScriptedHost::default());
    let used = |s: &mut Session, nsid| {
        let bytes = s.admin(identify(Cns::Namespace, nsid)).ok().data;
        let (ns, _) = IdentifyNamespace::read_from_prefix(&bytes).unwrap();
        assert_eq!((ns.nsze.get(), ns.ncap.get()), (4096, 4096));
        ns.nuse.get()
    };
    assert_eq!((used(&mut s, 1), used(&mut s, 2)), (4096, 4096), "not measured; not thin");
    s.admin(set_features(0x0b, 1 << 8)).ok();
    let (host, cntlid) = (s.host, s.cntlid);
    s.target.talk(s.admin, &host, &host.command(event_request(30)));
    let events_after = |s: &mut Session, change: &dyn Fn(&mut Controller)| {
        change(s.target.controllers.get_mut(cntlid).unwrap());
        s.target.tick(S);
        s.target.replies(s.admin, &host)
    };
    for (blocks, nuse) in [(17, 17), (5000, 4096), (0, 0)] {
        assert_eq!(events_after(&mut s, &|c| c.set_used(1, blocks)), []);
        assert_eq!(used(&mut s, 1), nuse);
    }
    let measured = Namespace { used_blocks: Some(9), ..namespace() };
    assert_eq!(
        events_after(&mut s, &|c| c.set_namespaces(namespaces(measured))),
        [],
        "nothing else"
    );
    assert_eq!(used(&mut s, 1), 9);
    set_ana(&mut s, AnaState::Inaccessible);
    assert_eq!((used(&mut s, 1), used(&mut s, 2)), (0, 4096));
    let larger = Namespace { thin: false, ..measured };
    assert_eq!(
        events_after(&mut s, &|c| c.set_namespaces(namespaces(larger))).len(),
        1,
        "an event"
    );
}

/// Namespace 1, which other controllers serve too, and 2.
fn two_groups() -> Target {
    let namespaces = [(1, Namespace { is_shared: true, ..namespace() }), (2, namespace())].into();
    Target { namespaces, ..Target::default() }
}

fn of_namespace(mut sqe: Sqe, nsid: u32) -> Sqe {
    sqe.nsid = nsid.into();
    sqe
}

/// Sets the state of namespace 1; what the host then hears.
fn set_ana(s: &mut Session, state: AnaState) -> Vec<Reply> {
    let (host, cntlid) = (s.host, s.cntlid);
    s.target.controllers.get_mut(cntlid).unwrap().set_ana(1, state);
    s.target.tick(S);
    s.target.replies(s.admin, &host)
}
