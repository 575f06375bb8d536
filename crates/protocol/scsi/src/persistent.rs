//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16), RESERVE and RELEASE of the whole unit (SPC-2
//! 7.21, 7.17): what they look like. What they mean is the business of the crate `reservation`, and
//! who carries them out that of the driver, for all nodes that serve a volume keep one table.
//!
//! Of RESERVE and RELEASE third parties and extents are not supported; their fields are refused as
//! reserved bits.

use reservation::{
    Change, Field, Initiator, Kind, Notice, Notices, Party, Refusal, Registrant, Table,
};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cdb::Cdb;
use crate::nexus::{Attention, NexusId, Whom};
use crate::reply::{self, Status, Transfer};
use crate::sense::{Code, Sense};
use crate::unit::{Command, Incoming, LogicalUnit, Outcome, Todo};
use crate::vpd::hex;

/// What PERSISTENT RESERVE IN asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    Keys,
    Reservation,
    FullStatus,
}

/// What PERSISTENT RESERVE OUT is to do, as the command descriptor block has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    action: Action,
    /// TYPE, if it is known.
    kind: Option<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Register,
    Reserve,
    Release,
    Clear,
    Preempt,
    PreemptAndAbort,
    RegisterAndIgnore,
    RegisterAndMove,
}

/// READ KEYS.
pub(crate) fn read_keys(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    Ok(unit.ask(Question::Keys, cmd))
}

/// READ RESERVATION.
pub(crate) fn read_reservation(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    Ok(unit.ask(Question::Reservation, cmd))
}

/// READ FULL STATUS.
pub(crate) fn read_full_status(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    Ok(unit.ask(Question::FullStatus, cmd))
}

/// REPORT CAPABILITIES (SPC-4 6.15.4).
pub(crate) fn report_capabilities(
    _unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    const CRH: u8 = 0x10;
    const SIP_C: u8 = 0x08;
    const ATP_C: u8 = 0x04;
    const PTPL_C: u8 = 0x01;
    const TMV: u8 = 0x80;
    /// What the standard leaves open is: TEST UNIT READY is allowed, MODE SENSE as reads are.
    const ALLOW_COMMANDS: u8 = 0x00;
    /// All six types.
    const TYPES: [u8; 2] = [0xea, 0x01];
    let data =
        vec![0, 8, CRH | SIP_C | ATP_C | PTPL_C, TMV | ALLOW_COMMANDS, TYPES[0], TYPES[1], 0, 0];
    Ok(Outcome::data(data, u64::from(cmd.cdb.u16(7))))
}

/// PERSISTENT RESERVE OUT, whatever its service action.
pub(crate) fn persistent_reserve_out(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    let order = order(cmd.cdb)?;
    let length = cmd.cdb.u32(5);
    if length < size_of::<List>() as u32 {
        return Err(PARAMETER_LIST_LENGTH.into());
    }
    unit.accept_list(Todo::PersistentReserve(order), length, cmd)
}

const PARAMETER_LIST_LENGTH: Sense = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);

/// RESERVE(6), (10).
pub(crate) fn reserve(
    unit: &mut LogicalUnit,
    _cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    Ok(unit.accept(Todo::ReserveUnit))
}

/// RELEASE(6), (10): from anybody but the holder it does nothing, and that is no error.
pub(crate) fn release(
    unit: &mut LogicalUnit,
    _cmd: &Incoming<'_>,
) -> Result<Outcome, reply::Refusal> {
    Ok(unit.accept(Todo::ReleaseUnit))
}

/// SERVICE ACTION, SCOPE and TYPE (SPC-4 6.16.1). SCOPE and TYPE are looked at where they say
/// something.
fn order(cdb: Cdb) -> Result<Order, Sense> {
    const SERVICE_ACTION: u8 = 0x1f;
    let action = match cdb.byte(1) & SERVICE_ACTION {
        0 => Action::Register,
        1 => Action::Reserve,
        2 => Action::Release,
        3 => Action::Clear,
        4 => Action::Preempt,
        5 => Action::PreemptAndAbort,
        6 => Action::RegisterAndIgnore,
        7 => Action::RegisterAndMove,
        _ => return Err(Sense::field(1, Some(4))),
    };
    let (scope, kind) = (cdb.byte(2) >> 4, Kind::from_scsi(cdb.byte(2) & 0x0f));
    let scoped = matches!(
        action,
        Action::Reserve | Action::Release | Action::Preempt | Action::PreemptAndAbort
    );
    if scoped && scope != 0 {
        return Err(Sense::field(2, Some(7)));
    }
    if matches!(action, Action::Reserve | Action::Release) && kind.is_none() {
        return Err(Sense::field(2, Some(3)));
    }
    Ok(Order { action, kind })
}

/// The parameter list of all service actions but REGISTER AND MOVE (SPC-4 6.16.3).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct List {
    key: U64,
    action_key: U64,
    obsolete: U32,
    flags: u8,
    reserved: u8,
    obsolete_too: U16,
}

const _: () = assert!(size_of::<List>() == 24);

const SPEC_I_PT: u8 = 0x08;
const ALL_TG_PT: u8 = 0x04;
const APTPL: u8 = 0x01;

/// Where the TransportIDs begin.
const FIRST_TRANSPORT_ID: u16 = 28;

/// The parameter list of REGISTER AND MOVE (SPC-4 6.16.4).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MoveList {
    key: U64,
    action_key: U64,
    reserved: u8,
    flags: u8,
    port: U16,
    transport_id_length: U32,
}

const _: () = assert!(size_of::<MoveList>() == 24);

/// The change that a command with this parameter list asks for. `ports`: the relative target port
/// identifiers of the target.
pub(crate) fn change(order: Order, list: &[u8], ports: &[u16]) -> Result<Change, Sense> {
    if order.action == Action::RegisterAndMove {
        return moving(list, ports);
    }
    let (fields, rest) = List::ref_from_prefix(list).map_err(|_| PARAMETER_LIST_LENGTH)?;
    let also = if fields.flags & SPEC_I_PT != 0 {
        if order.action != Action::Register {
            return Err(Sense::parameter(20, Some(3)));
        }
        transport_ids(rest)?
    } else if rest.is_empty() {
        Vec::new()
    } else {
        return Err(PARAMETER_LIST_LENGTH);
    };
    let (key, new_key) = (fields.key.get(), fields.action_key.get());
    let kind = order.kind.ok_or(Sense::field(2, Some(3)));
    Ok(match order.action {
        Action::Register | Action::RegisterAndIgnore => Change::Register {
            key,
            new_key,
            ignore_key: order.action == Action::RegisterAndIgnore,
            persists: fields.flags & APTPL != 0,
            ports: if fields.flags & ALL_TG_PT != 0 { ports.to_vec() } else { Vec::new() },
            also,
        },
        Action::Reserve => Change::Reserve { key, kind: kind? },
        Action::Release => Change::Release { key, kind: kind? },
        Action::Clear => Change::Clear { key },
        Action::Preempt | Action::PreemptAndAbort => Change::Preempt {
            key,
            victim: new_key,
            kind: order.kind,
            abort: order.action == Action::PreemptAndAbort,
        },
        Action::RegisterAndMove => return moving(list, ports),
    })
}

fn moving(list: &[u8], ports: &[u16]) -> Result<Change, Sense> {
    const UNREG: u8 = 0x02;
    let (fields, rest) = MoveList::ref_from_prefix(list).map_err(|_| PARAMETER_LIST_LENGTH)?;
    let length = usize::try_from(fields.transport_id_length.get()).unwrap_or(usize::MAX);
    if length != rest.len() {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let port = fields.port.get();
    if !ports.contains(&port) {
        return Err(Sense::parameter(18, None));
    }
    let (initiator, behind) = transport_id(rest, 24)?;
    if !behind.is_empty() {
        return Err(Sense::parameter(20, None));
    }
    Ok(Change::Move {
        key: fields.key.get(),
        new_key: fields.action_key.get(),
        to: Party { initiator, port },
        unregister: fields.flags & UNREG != 0,
        persists: fields.flags & APTPL != 0,
    })
}

/// The list of TransportIDs behind a parameter list, with its length before it (SPC-4 6.16.3).
fn transport_ids(rest: &[u8]) -> Result<Vec<Initiator>, Sense> {
    let (length, mut rest) = U32::ref_from_prefix(rest).map_err(|_| PARAMETER_LIST_LENGTH)?;
    if usize::try_from(length.get()).ok() != Some(rest.len()) {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let mut all = Vec::new();
    let total = rest.len();
    while !rest.is_empty() {
        let at = FIRST_TRANSPORT_ID + u16::try_from(total - rest.len()).unwrap_or(u16::MAX - 32);
        let (initiator, behind) = transport_id(rest, at)?;
        all.push(initiator);
        rest = behind;
    }
    Ok(all)
}

/// TransportID of an iSCSI initiator port (SPC-4 7.6.4.6): only the form with the ISID names one.
const ISCSI_PORT: u8 = 0x45;

/// What stands between the name and the ISID.
const SEPARATOR: &str = ",i,0x";

/// Shortest TransportID of an iSCSI initiator, without its header.
const TRANSPORT_ID_MIN: usize = 20;

/// The initiator port that a TransportID names, and what stands behind it. `at`: where it begins in
/// the parameter list.
fn transport_id(bytes: &[u8], at: u16) -> Result<(Initiator, &[u8]), Sense> {
    let wrong = |offset| Sense::parameter(at + offset, None);
    let &[format, _, high, low, ref rest @ ..] = bytes else { return Err(wrong(0)) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if format != ISCSI_PORT {
        return Err(wrong(0));
    }
    if length < TRANSPORT_ID_MIN || !length.is_multiple_of(4) || length > rest.len() {
        return Err(wrong(2));
    }
    let (id, behind) = rest.split_at(length);
    let text = id.split(|b| *b == 0).next().unwrap_or_default();
    let initiator = std::str::from_utf8(text).ok().and_then(iscsi_port).ok_or(wrong(4))?;
    Ok((initiator, behind))
}

/// `NAME,i,0xISID`.
fn iscsi_port(text: &str) -> Option<Initiator> {
    let (name, isid) = text.split_once(SEPARATOR)?;
    let whole = isid.len() == 12 && isid.bytes().all(|b| b.is_ascii_hexdigit());
    let isid = u64::from_str_radix(isid, 16).ok().filter(|_| whole)?;
    let [_, _, isid @ ..] = isid.to_be_bytes();
    let initiator = Initiator::Iscsi { name: name.to_lowercase(), isid };
    initiator.is_valid().then_some(initiator)
}

/// As READ FULL STATUS tells it. An NVMe host has no form of its own in SCSI: it is told by its
/// name as an initiator without a port.
fn to_transport_id(initiator: &Initiator) -> Vec<u8> {
    const ISCSI_DEVICE: u8 = 0x05;
    let (format, mut text) = match initiator {
        Initiator::Iscsi { name, isid } => (ISCSI_PORT, format!("{name}{SEPARATOR}{}", hex(isid))),
        Initiator::Host(id) => {
            (ISCSI_DEVICE, format!("nqn.2014-08.org.nvmexpress:uuid:{}", hex(id)))
        }
    };
    text.push('\0');
    let length = text.len().next_multiple_of(4).max(TRANSPORT_ID_MIN);
    let mut out = vec![format, 0];
    out.extend(u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
    out.extend(text.into_bytes());
    out.resize(4 + length, 0);
    out
}

/// The answer to PERSISTENT RESERVE IN.
pub(crate) fn answer(question: Question, table: &Table) -> Vec<u8> {
    let body = match question {
        Question::Keys => {
            table.registrants().iter().flat_map(|r| r.key.to_be_bytes()).collect::<Vec<_>>()
        }
        Question::Reservation => reservation(table),
        Question::FullStatus => {
            table.registrants().iter().flat_map(|r| full_status(table, r)).collect()
        }
    };
    let mut out = table.pr_generation.to_be_bytes().to_vec();
    out.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(body);
    out
}

/// SPC-4 6.15.3.
fn reservation(table: &Table) -> Vec<u8> {
    let Some(held) = &table.reservation else { return Vec::new() };
    let mut out = table.holder_key().to_be_bytes().to_vec();
    out.extend([0, 0, 0, 0, 0, held.kind.scsi(), 0, 0]);
    out
}

/// Full status descriptor (SPC-4 6.15.5).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct FullStatus {
    key: U64,
    reserved: U32,
    flags: u8,
    scope_and_type: u8,
    reserved_too: U32,
    port: U16,
    transport_id_length: U32,
}

const _: () = assert!(size_of::<FullStatus>() == 24);

fn full_status(table: &Table, registrant: &Registrant) -> Vec<u8> {
    const ALL_PORTS: u8 = 0x02;
    const HOLDER: u8 = 0x01;
    let transport_id = to_transport_id(&registrant.party.initiator);
    let kind = table.reservation.as_ref().filter(|_| table.holds(&registrant.party));
    let descriptor = FullStatus {
        key: U64::new(registrant.key),
        reserved: U32::ZERO,
        flags: if registrant.all_ports { ALL_PORTS } else { 0 }
            | if kind.is_some() { HOLDER } else { 0 },
        scope_and_type: kind.map_or(0, |held| held.kind.scsi()),
        reserved_too: U32::ZERO,
        port: U16::new(registrant.party.port),
        transport_id_length: U32::new(u32::try_from(transport_id.len()).unwrap_or(u32::MAX)),
    };
    let mut out = descriptor.as_bytes().to_vec();
    out.extend(transport_id);
    out
}

/// How an initiator is told.
fn attention(notice: Notice) -> Attention {
    match notice {
        Notice::TargetReset => Attention::TargetReset,
        Notice::UnitReset => Attention::UnitReset,
        Notice::Modes => Attention::ModeChanged,
        Notice::ReservationsPreempted => Attention::ReservationsPreempted,
        Notice::ReservationsReleased => Attention::ReservationsReleased,
        Notice::RegistrationsPreempted => Attention::RegistrationsPreempted,
        Notice::Aborted => Attention::CommandsCleared,
    }
}

/// How a change ends that was refused.
pub(crate) fn refused(why: Refusal) -> reply::Refusal {
    match why {
        Refusal::Conflict => Status::ReservationConflict.into(),
        Refusal::InvalidRelease => {
            Sense::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into()
        }
        Refusal::Full => Sense::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES).into(),
        Refusal::Parameter(field) => match field {
            Field::NewKey => Sense::parameter(8, None),
            Field::Also => Sense::parameter(20, Some(3)),
            Field::Initiator => Sense::parameter(24, None),
            Field::Kind => Sense::field(2, Some(3)),
            Field::Action => Sense::field(1, Some(4)),
        }
        .into(),
    }
}

impl LogicalUnit {
    /// What all nodes know has changed, and this is what it means to an initiator; it is told. Whether the commands
    /// that it has under way are to be aborted.
    pub fn told(&mut self, nexus: NexusId, notices: Notices) -> bool {
        let is_reset = [Notice::UnitReset, Notice::TargetReset].map(|n| notices.contains(n));
        let is_reset = is_reset.contains(&true);
        if is_reset {
            self.reset();
        }
        notices.iter().for_each(|notice| self.attend(Whom::Only(nexus), attention(notice)));
        is_reset || notices.contains(Notice::Aborted)
    }

    /// Accepts a question about what all nodes know.
    fn ask(&self, question: Question, cmd: &Incoming<'_>) -> Outcome {
        let allocation = cmd.cdb.u16(7);
        let wanted = Transfer::to_initiator(u64::from(allocation));
        let command = Command {
            todo: Todo::Ask { question, allocation },
            data_out: 0,
            data_in: 0,
            read_back: 0,
            wanted,
            window_in: cmd.window.data_in,
        };
        Outcome::Accept(command)
    }
}
