//! Reservations (NVMe Base 2.0, 8.19): commands, what they change, and what hosts are told.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::driver::{Outcome, Session, Target, party};
use crate::common::{connect, namespace};
use nvme::entry::{AdminOpcode, NvmOpcode, Sgl};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{Namespace, Sqe, Status};
use reservation::{Change, NvmeRegisterAction, ReservationType};

const IEKEY: u32 = 1 << 3;
const CPTPL_SET: u32 = 0b11 << 30;
const CPTPL_CLEAR: u32 = 0b10 << 30;

/// Another host.
const OTHER: [u8; 16] = [8; 16];

/// A reservation command with this dword 10 and these keys.
fn reserving(s: &mut Session, opcode: NvmOpcode, dword: u32, keys: &[u64]) -> Outcome {
    let data: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
    let mut sqe = Sqe::new(opcode.0, 0, 1);
    sqe.cdw10[0] = dword.into();
    s.io(sqe, &data)
}

fn register(s: &mut Session, dword: u32, key: u64, new_key: u64) -> Status {
    reserving(s, NvmOpcode::ReservationRegister, dword, &[key, new_key]).code()
}

fn acquire(s: &mut Session, action: u32, kind: ReservationType, key: u64, victim: u64) -> Status {
    let dword = action | u32::from(kind.nvme()) << 8;
    reserving(s, NvmOpcode::ReservationAcquire, dword, &[key, victim]).code()
}

fn release(s: &mut Session, action: u32, kind: ReservationType, key: u64) -> Status {
    let dword = action | u32::from(kind.nvme()) << 8;
    reserving(s, NvmOpcode::ReservationRelease, dword, &[key]).code()
}

fn report(s: &mut Session, bytes: u32) -> Vec<u8> {
    let mut sqe = Sqe::new(NvmOpcode::ReservationReport.0, 0, 1);
    sqe.cdw10[0] = (bytes / 4 - 1).into();
    sqe.cdw10[1] = 1.into();
    sqe.sgl = Sgl::transport(bytes);
    s.io(sqe, &[]).ok().data
}

/// The other host registers, or does what else `change` says.
fn other(s: &mut Session, change: &Change) {
    s.target.alter(&party(OTHER), change).unwrap();
    s.target.tick(Duration::ZERO);
}

fn enlisted(s: &mut Session, key: u64) {
    let action = NvmeRegisterAction::Register { new_key: key };
    other(s, &Change::NvmeRegister { action, persist: None });
}

fn preempt(victim: u64) -> Change {
    let kind = Some(ReservationType::WriteExclusive);
    Change::Preempt { key: 9, preempt_key: victim, kind, abort: false }
}

fn feature(opcode: AdminOpcode, fid: u32, nsid: u32, value: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, 0, nsid);
    sqe.cdw10[0] = fid.into();
    sqe.cdw10[1] = value.into();
    sqe
}

/// The oldest notice: its number, its kind, how many there are behind it, its namespace.
fn notice(s: &mut Session, retain: bool) -> (u64, u8, u8, u32) {
    let mut sqe = Sqe::new(AdminOpcode::GetLogPage.0, 0, 0);
    sqe.cdw10[0] = (0x80 | u32::from(retain) << 15 | 15 << 16).into();
    sqe.sgl = Sgl::transport(64);
    let log = s.admin(sqe).ok().data;
    let nsid = u32::from_le_bytes(log[12..16].try_into().unwrap());
    (u64::from_le_bytes(log[..8].try_into().unwrap()), log[8], log[9], nsid)
}

/// 7.3: register, replace, unregister; the current key counts unless it is to be ignored.
#[test]
fn a_host_registers_replaces_and_unregisters() {
    let mut s = Session::ready();
    let own = |s: &Session| s.target.table.registrant(&party([7; 16])).map(|r| r.key);
    assert_eq!(register(&mut s, 1, 5, 0), Status::RESERVATION_CONFLICT);
    assert_eq!(register(&mut s, 2, 5, 6), Status::RESERVATION_CONFLICT);
    assert_eq!(register(&mut s, 0, 0xbad, 5), Status::SUCCESS);
    assert_eq!(register(&mut s, 0, 0, 5), Status::SUCCESS);
    assert_eq!(register(&mut s, 0, 0, 6), Status::RESERVATION_CONFLICT);
    assert_eq!(register(&mut s, 2, 4, 6), Status::RESERVATION_CONFLICT);
    assert_eq!(own(&s), Some(5));
    assert_eq!(register(&mut s, 2, 5, 6), Status::SUCCESS);
    assert_eq!(register(&mut s, 2 | IEKEY, 0, 7), Status::SUCCESS);
    assert_eq!(own(&s), Some(7));
    assert_eq!(register(&mut s, 1, 6, 0), Status::RESERVATION_CONFLICT);
    assert_eq!(register(&mut s, 1 | IEKEY, 0, 0), Status::SUCCESS);
    assert_eq!(own(&s), None);
    assert_eq!(register(&mut s, 0, 0, 0), Status::INVALID_FIELD, "no key is 0");
    // As Linux unregisters: Replace by nothing.
    assert_eq!(register(&mut s, 0, 0, 5), Status::SUCCESS);
    assert_eq!(register(&mut s, 2, 4, 0), Status::RESERVATION_CONFLICT);
    assert_eq!(register(&mut s, 2, 5, 0), Status::SUCCESS);
    assert_eq!(own(&s), None);
}

/// 7.3: CPTPL; 5.27.1.27: the same as a feature.
#[test]
fn registrations_outlive_a_loss_of_power_if_asked_to() {
    let mut s = Session::ready();
    let get = |s: &mut Session| s.admin(feature(AdminOpcode::GetFeatures, 0x83, 1, 0)).ok().result;
    assert_eq!(register(&mut s, CPTPL_SET, 0, 5), Status::SUCCESS);
    assert_eq!((get(&mut s), report(&mut s, 64)[9]), (1, 1));
    assert_eq!(register(&mut s, 0, 0, 5), Status::SUCCESS);
    assert_eq!(get(&mut s), 1, "not said, not changed");
    assert_eq!(register(&mut s, CPTPL_CLEAR, 0, 5), Status::SUCCESS);
    assert_eq!((get(&mut s), report(&mut s, 64)[9]), (0, 0));
    assert_eq!(register(&mut s, 1 << 30, 0, 5), Status::INVALID_FIELD);
    s.admin(feature(AdminOpcode::SetFeatures, 0x83, u32::MAX, 1)).ok();
    assert_eq!(get(&mut s), 1);
    s.admin(feature(AdminOpcode::SetFeatures, 0x83, 1, 0)).ok();
    assert_eq!(get(&mut s), 0);
    for (fid, nsid) in [(0x83, 2), (0x83, u32::MAX), (0x82, u32::MAX)] {
        let refused = s.admin(feature(AdminOpcode::GetFeatures, fid, nsid, 0));
        assert_eq!(refused.code(), Status::INVALID_FIELD, "{fid:#x} of {nsid:#x}");
    }
    let capabilities = s.admin(feature(AdminOpcode::GetFeatures, 0x83 | 3 << 8, 1, 0)).ok();
    assert_eq!(capabilities.result, 0b110);
}

/// 7.2: acquire, preempt; 7.4: release, clear.
#[test]
fn a_registrant_acquires_preempts_releases_and_clears() {
    let mut s = Session::ready();
    let kind = |s: &Session| s.target.table.reservation.as_ref().map(|r| r.kind);
    assert_eq!(
        acquire(&mut s, 0, ReservationType::WriteExclusive, 5, 0),
        Status::RESERVATION_CONFLICT
    );
    register(&mut s, 0, 0, 5);
    assert_eq!(
        acquire(&mut s, 0, ReservationType::WriteExclusive, 4, 0),
        Status::RESERVATION_CONFLICT
    );
    for wanted in ReservationType::ALL {
        assert_eq!(acquire(&mut s, 0, wanted, 5, 0), Status::SUCCESS);
        assert_eq!(acquire(&mut s, 0, wanted, 5, 0), Status::SUCCESS, "it holds it already");
        assert_eq!(kind(&s), Some(wanted));
        assert_eq!(report(&mut s, 64)[4], wanted.nvme());
        let another = ReservationType::ALL[usize::from(wanted == ReservationType::WriteExclusive)];
        assert_eq!(acquire(&mut s, 0, another, 5, 0), Status::RESERVATION_CONFLICT);
        assert_eq!(release(&mut s, 0, another, 5), Status::INVALID_FIELD, "another type");
        assert_eq!(release(&mut s, 0, wanted, 4), Status::RESERVATION_CONFLICT);
        if wanted == ReservationType::ExclusiveAccess {
            // Linux sends both keys with every command.
            let dword = u32::from(wanted.nvme()) << 8;
            let both = reserving(&mut s, NvmOpcode::ReservationRelease, dword, &[5, 0]);
            assert_eq!((both.code(), kind(&s)), (Status::SUCCESS, None));
            continue;
        }
        assert_eq!(release(&mut s, 0, wanted, 5), Status::SUCCESS);
        assert_eq!(release(&mut s, 0, wanted, 5), Status::SUCCESS, "it holds nothing");
        assert_eq!(kind(&s), None);
    }
    enlisted(&mut s, 9);
    other(&mut s, &Change::Reserve { key: 9, kind: ReservationType::ExclusiveAccess });
    assert_eq!(acquire(&mut s, 1, ReservationType::WriteExclusive, 5, 0), Status::INVALID_FIELD);
    assert_eq!(
        acquire(&mut s, 1, ReservationType::WriteExclusive, 5, 3),
        Status::RESERVATION_CONFLICT
    );
    assert_eq!(acquire(&mut s, 2, ReservationType::WriteExclusive, 5, 9), Status::SUCCESS);
    assert_eq!(kind(&s), Some(ReservationType::WriteExclusive));
    assert!(s.target.table.registrant(&party(OTHER)).is_none());
    assert_eq!(release(&mut s, 1, ReservationType::WriteExclusive, 5), Status::SUCCESS);
    assert_eq!((kind(&s), s.target.table.registrants().len()), (None, 0));
}

/// 7.2 to 7.5: fields that cannot be, before data is taken.
#[test]
fn fields_of_reservation_commands_are_checked() {
    let mut s = Session::ready();
    s.target.withhold = true;
    let (register, acquire) = (NvmOpcode::ReservationRegister, NvmOpcode::ReservationAcquire);
    let (release, report) = (NvmOpcode::ReservationRelease, NvmOpcode::ReservationReport);
    let field = Status::INVALID_FIELD;
    let length = Status::DATA_SGL_LENGTH_INVALID;
    for (opcode, dwords, bytes, expected) in [
        (register, [3, 0], 16, field),
        (register, [7, 0], 16, field),
        (register, [0, 0], 8, length),
        (register, [0, 0], 4096, length),
        (acquire, [3 | 1 << 8, 0], 16, field),
        (acquire, [0, 0], 16, field),
        (acquire, [7 << 8, 0], 16, field),
        (acquire, [IEKEY | 1 << 8, 0], 16, field),
        (acquire, [1 << 8, 0], 8, length),
        (release, [2 | 1 << 8, 0], 8, field),
        (release, [0, 0], 8, field),
        (release, [IEKEY | 1 << 8, 0], 8, field),
        (release, [1 << 8, 0], 4, length),
        (release, [1 << 8, 0], 4096, length),
        (report, [15, 0], 64, Status::HOST_ID_FORMAT),
        (report, [15, 1], 60, length),
        (report, [u32::MAX, 1], 64, field),
        (report, [1 << 20, 1], 64, field),
    ] {
        let mut sqe = Sqe::new(opcode.0, 0, 1);
        sqe.cdw10[0] = dwords[0].into();
        sqe.cdw10[1] = dwords[1].into();
        sqe.sgl = Sgl::transport(bytes);
        assert_eq!(s.io(sqe, &[]).code(), expected, "{opcode:?} {dwords:x?} {bytes}");
    }
    assert!(s.target.wanting.is_empty());
}

/// 7.5, 5.17: what tells of reservations, and namespaces that keep none.
#[test]
fn reservations_are_reported() {
    let mut s = Session::ready();
    register(&mut s, 0, 0, 5);
    enlisted(&mut s, 9);
    let nexus = reservation::ItNexus {
        initiator: reservation::Initiator::Iscsi {
            name: "iqn.2026-01.net.example:a".into(),
            isid: [1; 6],
        },
        port: 1,
    };
    let scsi = Change::Register {
        key: 0,
        new_key: 3,
        ignore_key: false,
        persist: false,
        ports: vec![],
        other_initiators: vec![],
    };
    s.target.alter(&nexus, &scsi).unwrap();
    acquire(&mut s, 0, ReservationType::WriteExclusiveRegistrantsOnly, 5, 0);
    let all = report(&mut s, 512);
    assert_eq!((&all[..4], all[4], &all[5..7]), (&3u32.to_le_bytes()[..], 3, &[3u8, 0][..]));
    let registrants: Vec<_> = all[64..256]
        .chunks(64)
        .map(|r| (r[..3] == [0xff, 0xff, 1], r[8], <[u8; 16]>::try_from(&r[16..32]).unwrap()))
        .collect();
    assert!(registrants.contains(&(true, 5, [7; 16])), "{registrants:?}");
    assert!(registrants.contains(&(false, 9, OTHER)), "{registrants:?}");
    assert!(registrants.iter().any(|(holds, key, id)| !holds && *key == 3 && *id != [0; 16]));
    assert!(all[256..].iter().all(|b| *b == 0));
    assert_eq!(report(&mut s, 96), all[..96], "as much as there is room for");

    let plain = Namespace { keeps_reservations: false, ..namespace() };
    let namespaces = BTreeMap::from([(1, namespace()), (2, plain)]);
    let mut s =
        Session::ready_with(Target { namespaces, ..Target::default() }, ScriptedHost::default());
    let rescap = |s: &mut Session, nsid| {
        let mut sqe = Sqe::new(AdminOpcode::Identify.0, 0, nsid);
        sqe.sgl = Sgl::transport(4096);
        s.admin(sqe).ok().data[31]
    };
    assert_eq!([rescap(&mut s, 1), rescap(&mut s, 2)], [0xff, 0]);
    for opcode in [NvmOpcode::ReservationRegister, NvmOpcode::ReservationReport] {
        let refused = s.io(Sqe { nsid: 2.into(), ..Sqe::new(opcode.0, 0, 2) }, &[]);
        assert_eq!(refused.code(), Status::INVALID_OPCODE);
    }
    for fid in [0x82, 0x83] {
        let refused = s.admin(feature(AdminOpcode::SetFeatures, fid, 2, 1));
        assert_eq!(refused.code(), Status::INVALID_FIELD);
    }
}

/// 8.19.1, 5.16.1.24, 5.27.1.26: notices are events, are read one by one, and can be masked.
#[test]
fn a_host_hears_of_its_reservations() {
    let mut s = Session::ready();
    let host = s.host;
    let ask = |s: &mut Session, cid| {
        let sqe = Sqe::new(AdminOpcode::AsyncEventRequest.0, cid, 0);
        s.target.talk(s.admin, &host, &host.command(sqe))
    };
    let heard = |replies: &[Reply], cid: u16| matches!(*replies, [Reply::Resp { cid: c, result: 0x0080_0006, .. }] if c == cid);
    enlisted(&mut s, 9);
    register(&mut s, 0, 0, 5);
    assert_eq!(ask(&mut s, 900), []);
    other(&mut s, &preempt(5));
    let replies = s.target.replies(s.admin, &host);
    assert!(heard(&replies, 900), "{replies:?}");
    assert_eq!(notice(&mut s, true), (1, 1, 0, 1));
    let mut part = Sqe::new(AdminOpcode::GetLogPage.0, 0, 0);
    part.cdw10[0] = (0x80 | 7 << 16).into();
    part.sgl = Sgl::transport(32);
    s.admin(part).ok();
    assert_eq!(notice(&mut s, true), (1, 1, 0, 1), "a part is not the notice");
    register(&mut s, 0, 0, 5);
    other(
        &mut s,
        &Change::Reserve { key: 9, kind: ReservationType::WriteExclusiveRegistrantsOnly },
    );
    other(
        &mut s,
        &Change::Release { key: 9, kind: ReservationType::WriteExclusiveRegistrantsOnly },
    );
    other(&mut s, &Change::Clear { key: 9 });
    s.target.tick(Duration::ZERO);
    assert_eq!(s.target.replies(s.admin, &host), [], "it was told, and has not read");
    assert_eq!(notice(&mut s, false), (1, 1, 2, 1));
    let replies = ask(&mut s, 901);
    assert!(heard(&replies, 901), "there is more: {replies:?}");
    assert_eq!(notice(&mut s, false), (2, 2, 1, 1));
    assert_eq!(notice(&mut s, false), (3, 3, 0, 1));
    assert_eq!(notice(&mut s, false), (0, 0, 0, 0));

    // Masked: nothing of that sort.
    s.admin(feature(AdminOpcode::SetFeatures, 0x82, 1, 0xffff)).ok();
    assert_eq!(s.admin(feature(AdminOpcode::GetFeatures, 0x82, 1, 0)).ok().result, 0b1110);
    register(&mut s, 0, 0, 5);
    enlisted(&mut s, 9);
    other(&mut s, &preempt(5));
    assert_eq!(notice(&mut s, false), (0, 0, 0, 0));
    s.admin(feature(AdminOpcode::SetFeatures, 0x82, u32::MAX, 0)).ok();
    register(&mut s, 0, 0, 5);
    other(&mut s, &preempt(5));
    assert_eq!(notice(&mut s, false), (4, 1, 0, 1));
}

/// What is not read is not kept for ever: the oldest notices go, and the count shows it.
#[test]
fn notices_are_bounded() {
    let mut s = Session::ready();
    enlisted(&mut s, 9);
    for _ in 0..100 {
        register(&mut s, 0, 0, 5);
        other(&mut s, &preempt(5));
    }
    assert_eq!(notice(&mut s, false), (37, 1, 63, 1));
}

/// 6.3: a host without an identifier could not be told from others.
#[test]
fn a_host_identifier_of_zero_is_refused() {
    let mut s = Session::ready();
    let link = s.initialized();
    let refused = s.connect(link, &nvme::Connect { host_id: [0; 16], ..connect(0, 0) });
    assert_eq!(refused.code(), Status::CONNECT_INVALID_PARAMETERS);
    assert_eq!(refused.result, 1 << 16, "byte 0 of the data");
}
