//! The encoding of PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16): fields of their descriptor
//! blocks, parameter lists, parameter data, and the sense data of rejected changes.

use reservation::{
    Change, Initiator, InvalidField, ItNexus, Registrant, ReservationError, ReservationType, Table,
};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cdb::Cdb;
use crate::reply::Refusal;
use crate::sense::{Sense, SenseCode};
use crate::status::Status;
use crate::text::hex;

/// The service action of PERSISTENT RESERVE IN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveInAction {
    Keys,
    Reservation,
    FullStatus,
}

/// A PERSISTENT RESERVE OUT command, from its descriptor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReserveOutCommand {
    action: ReserveOutAction,
    /// TYPE, if it is known.
    kind: Option<ReservationType>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReserveOutAction {
    Register,
    Reserve,
    Release,
    Clear,
    Preempt,
    PreemptAndAbort,
    RegisterAndIgnore,
    RegisterAndMove,
}

pub(crate) const PARAMETER_LIST_LENGTH: Sense =
    Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);

/// SERVICE ACTION, SCOPE and TYPE (SPC-4 6.16.1). SCOPE and TYPE are checked where they matter.
pub(crate) fn parse_reserve_out(cdb: Cdb) -> Result<ReserveOutCommand, Sense> {
    const SERVICE_ACTION: u8 = 0x1f;
    let action = match cdb.byte(1) & SERVICE_ACTION {
        0 => ReserveOutAction::Register,
        1 => ReserveOutAction::Reserve,
        2 => ReserveOutAction::Release,
        3 => ReserveOutAction::Clear,
        4 => ReserveOutAction::Preempt,
        5 => ReserveOutAction::PreemptAndAbort,
        6 => ReserveOutAction::RegisterAndIgnore,
        7 => ReserveOutAction::RegisterAndMove,
        _ => return Err(Sense::field(1, Some(4))),
    };
    let (scope, kind) = (cdb.byte(2) >> 4, ReservationType::from_scsi(cdb.byte(2) & 0x0f));
    let scoped = matches!(
        action,
        ReserveOutAction::Reserve
            | ReserveOutAction::Release
            | ReserveOutAction::Preempt
            | ReserveOutAction::PreemptAndAbort
    );
    if scoped && scope != 0 {
        return Err(Sense::field(2, Some(7)));
    }
    if matches!(action, ReserveOutAction::Reserve | ReserveOutAction::Release) && kind.is_none() {
        return Err(Sense::field(2, Some(3)));
    }
    Ok(ReserveOutCommand { action, kind })
}

/// The parameter list of all service actions but REGISTER AND MOVE (SPC-4 6.16.3).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ReserveOutList {
    key: U64,
    action_key: U64,
    obsolete: U32,
    flags: u8,
    reserved: u8,
    obsolete_too: U16,
}

const _: () = assert!(size_of::<ReserveOutList>() == 24);

const SPEC_I_PT: u8 = 0x08;
const ALL_TG_PT: u8 = 0x04;
const APTPL: u8 = 0x01;

/// Offset of the TransportIDs.
const FIRST_TRANSPORT_ID: u16 = 28;

/// The parameter list of REGISTER AND MOVE (SPC-4 6.16.4).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RegisterAndMoveList {
    key: U64,
    action_key: U64,
    reserved: u8,
    flags: u8,
    port: U16,
    transport_id_length: U32,
}

const _: () = assert!(size_of::<RegisterAndMoveList>() == 24);

/// The change that a command with this parameter list requests. `ports`: the relative target port
/// identifiers of the target.
pub(crate) fn parse_change(
    order: ReserveOutCommand,
    list: &[u8],
    ports: &[u16],
) -> Result<Change, Sense> {
    if order.action == ReserveOutAction::RegisterAndMove {
        return parse_move_list(list, ports);
    }
    let (fields, rest) =
        ReserveOutList::ref_from_prefix(list).map_err(|_| PARAMETER_LIST_LENGTH)?;
    let also = if fields.flags & SPEC_I_PT != 0 {
        if order.action != ReserveOutAction::Register {
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
        ReserveOutAction::Register | ReserveOutAction::RegisterAndIgnore => Change::Register {
            key,
            new_key,
            ignore_key: order.action == ReserveOutAction::RegisterAndIgnore,
            persist: fields.flags & APTPL != 0,
            ports: if fields.flags & ALL_TG_PT != 0 { ports.to_vec() } else { Vec::new() },
            other_initiators: also,
        },
        ReserveOutAction::Reserve => Change::Reserve { key, kind: kind? },
        ReserveOutAction::Release => Change::Release { key, kind: kind? },
        ReserveOutAction::Clear => Change::Clear { key },
        ReserveOutAction::Preempt | ReserveOutAction::PreemptAndAbort => Change::Preempt {
            key,
            preempt_key: new_key,
            kind: order.kind,
            abort: order.action == ReserveOutAction::PreemptAndAbort,
        },
        ReserveOutAction::RegisterAndMove => return parse_move_list(list, ports),
    })
}

fn parse_move_list(list: &[u8], ports: &[u16]) -> Result<Change, Sense> {
    const UNREG: u8 = 0x02;
    let (fields, rest) =
        RegisterAndMoveList::ref_from_prefix(list).map_err(|_| PARAMETER_LIST_LENGTH)?;
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
    Ok(Change::RegisterAndMove {
        key: fields.key.get(),
        new_key: fields.action_key.get(),
        to: ItNexus { initiator, port },
        unregister: fields.flags & UNREG != 0,
        persist: fields.flags & APTPL != 0,
    })
}

/// The TransportIDs after a parameter list, preceded by their length (SPC-4 6.16.3).
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

/// The separator between name and ISID.
const SEPARATOR: &str = ",i,0x";

/// Shortest TransportID of an iSCSI initiator, without its header.
const TRANSPORT_ID_MIN: usize = 20;

/// The initiator port of a TransportID, and the rest of the bytes. `at`: its offset in the
/// parameter list.
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

/// As in READ FULL STATUS. SCSI has no form for an NVMe host: its name is reported as an initiator
/// without a port.
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
pub(crate) fn reserve_in_data(in_action: ReserveInAction, table: &Table) -> Vec<u8> {
    let body = match in_action {
        ReserveInAction::Keys => {
            table.registrants().iter().flat_map(|r| r.key.to_be_bytes()).collect::<Vec<_>>()
        }
        ReserveInAction::Reservation => reservation(table),
        ReserveInAction::FullStatus => {
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
    let transport_id = to_transport_id(&registrant.nexus.initiator);
    let kind = table.reservation.as_ref().filter(|_| table.is_holder(&registrant.nexus));
    let descriptor = FullStatus {
        key: U64::new(registrant.key),
        reserved: U32::ZERO,
        flags: if registrant.all_ports { ALL_PORTS } else { 0 }
            | if kind.is_some() { HOLDER } else { 0 },
        scope_and_type: kind.map_or(0, |held| held.kind.scsi()),
        reserved_too: U32::ZERO,
        port: U16::new(registrant.nexus.port),
        transport_id_length: U32::new(u32::try_from(transport_id.len()).unwrap_or(u32::MAX)),
    };
    let mut out = descriptor.as_bytes().to_vec();
    out.extend(transport_id);
    out
}

/// The answer to a rejected change.
pub(crate) fn refusal_of(why: ReservationError) -> Refusal {
    match why {
        ReservationError::Conflict => Status::ReservationConflict.into(),
        ReservationError::InvalidRelease => {
            Sense::illegal(SenseCode::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into()
        }
        ReservationError::InsufficientResources => {
            Sense::illegal(SenseCode::INSUFFICIENT_REGISTRATION_RESOURCES).into()
        }
        ReservationError::InvalidField(field) => match field {
            InvalidField::NewKey => Sense::parameter(8, None),
            InvalidField::SpecIPt => Sense::parameter(20, Some(3)),
            InvalidField::TransportId => Sense::parameter(24, None),
            InvalidField::Type => Sense::field(2, Some(3)),
            InvalidField::ServiceAction => Sense::field(1, Some(4)),
        }
        .into(),
    }
}
