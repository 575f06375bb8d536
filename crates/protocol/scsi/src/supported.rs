//! REPORT SUPPORTED OPERATION CODES and TASK MANAGEMENT FUNCTIONS (SPC-4 6.35, 6.36), from the
//! table of commands.

use crate::command::{Outcome, ParsedCommand};
use crate::command_table::{CommandEntry, CommandTable, Lookup};
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::unit::{LogicalUnit, UnitCapabilities};

const OPTIONS_FIELD: u16 = 2;
const OPCODE_FIELD: u16 = 3;
const SERVICE_ACTION_FIELD: u16 = 4;
const RCTD: u8 = 0x80;

/// REPORT SUPPORTED OPERATION CODES: the commands of `table` that a unit with these capabilities
/// supports.
pub(crate) fn operation_codes(
    table: &CommandTable,
    capabilities: UnitCapabilities,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let timeouts = cmd.cdb.has(2, RCTD);
    let (opcode, service_action) = (cmd.cdb.byte(3), cmd.cdb.u16(4));
    let data = match cmd.cdb.byte(2) & 0x07 {
        0 => all(table, capabilities, timeouts),
        1 => {
            if service_actions(table, opcode) {
                return Err(Sense::field(OPCODE_FIELD, None).into());
            }
            one(look_up(table, opcode, 0, capabilities), capabilities, timeouts)
        }
        2 => {
            let exists = matches!(table.find(opcode, 0), Lookup::Command(_));
            if exists && !service_actions(table, opcode) {
                return Err(Sense::field(SERVICE_ACTION_FIELD, None).into());
            }
            one(look_up(table, opcode, service_action, capabilities), capabilities, timeouts)
        }
        // Either: a command without service actions is supported with service action zero only.
        3 => {
            let entry = look_up(table, opcode, service_action, capabilities)
                .filter(|_| service_action == 0 || service_actions(table, opcode));
            one(entry, capabilities, timeouts)
        }
        _ => return Err(Sense::field(OPTIONS_FIELD, Some(2)).into()),
    };
    Ok(Outcome::data(data, u64::from(cmd.cdb.u32(6))))
}

/// Whether the operation code has service actions.
fn service_actions(table: &CommandTable, opcode: u8) -> bool {
    table.entries.iter().any(|e| e.usage.opcode() == opcode && e.usage.service_action().is_some())
}

fn look_up(
    table: &CommandTable,
    opcode: u8,
    service_action: u16,
    capabilities: UnitCapabilities,
) -> Option<&'static CommandEntry> {
    let service_action = u8::try_from(service_action).ok()?;
    match table.find(opcode, service_action) {
        Lookup::Command(entry) => Some(entry).filter(|e| e.is_supported(capabilities)),
        Lookup::NoSuchServiceAction | Lookup::NoSuchOpcode => None,
    }
}

/// Command timeouts descriptor without timeouts: the unit recommends none (SPC-4 6.35).
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// All commands (SPC-4 6.35).
fn all(table: &CommandTable, capabilities: UnitCapabilities, timeouts: bool) -> Vec<u8> {
    const CTDP: u8 = 0x02;
    const SERVACTV: u8 = 0x01;
    let mut out = vec![0; 4];
    for entry in table.entries.iter().filter(|e| e.is_supported(capabilities)) {
        let service_action = entry.usage.service_action();
        let mut flags = if service_action.is_some() { SERVACTV } else { 0 };
        if timeouts {
            flags |= CTDP;
        }
        let len = entry.usage.len() as u8;
        out.extend([entry.usage.opcode(), 0, 0, service_action.unwrap_or(0), 0, flags, 0, len]);
        if timeouts {
            out.extend(TIMEOUTS);
        }
    }
    let length = u32::try_from(out.len() - 4).unwrap_or(u32::MAX);
    out[..4].copy_from_slice(&length.to_be_bytes());
    out
}

/// One command (SPC-4 6.35).
fn one(entry: Option<&CommandEntry>, capabilities: UnitCapabilities, timeouts: bool) -> Vec<u8> {
    const CTDP: u8 = 0x80;
    const NOT_SUPPORTED: u8 = 0x1;
    const AS_THE_STANDARD_HAS_IT: u8 = 0x3;
    let Some(entry) = entry else { return vec![0, NOT_SUPPORTED, 0, 0] };
    let usage = entry.usage(capabilities).bytes();
    let ctdp = if timeouts { CTDP } else { 0 };
    let mut out = vec![0, ctdp | AS_THE_STANDARD_HAS_IT, 0, usage.len() as u8];
    out.extend(usage);
    if timeouts {
        out.extend(TIMEOUTS);
    }
    out
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: those of RFC 7143 11.5.1, except CLEAR ACA and those
/// that need more than SAM-2.
pub(crate) fn task_management(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const REPD: u8 = 0x80;
    const ABORT_TASK: u8 = 0x80;
    const ABORT_TASK_SET: u8 = 0x40;
    const CLEAR_TASK_SET: u8 = 0x10;
    const UNIT_RESET: u8 = 0x08;
    const TARGET_RESET: u8 = 0x02;
    const SUPPORTED: u8 = ABORT_TASK | ABORT_TASK_SET | CLEAR_TASK_SET | UNIT_RESET | TARGET_RESET;
    let mut data = vec![SUPPORTED, 0, 0, 0];
    if cmd.cdb.has(2, REPD) {
        data[3] = 0x0c;
        data.extend([0; 12]);
    }
    Ok(Outcome::data(data, u64::from(cmd.cdb.u32(6))))
}
