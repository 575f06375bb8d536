//! The table of commands. It drives parsing (lengths, reserved bits, requirements on the unit) and
//! REPORT SUPPORTED OPERATION CODES (SPC-4 6.35), so the two cannot disagree.

use crate::cdb::{CDB_MAX, FUA, UNMAP_BIT};
use crate::command::{Outcome, ParsedCommand};
use crate::command_table::ConflictClass::{Never, Reads, Spc2Only, Writes};
use crate::command_table::{CdbUsage, CommandEntry, CommandTable, Requirement};
use crate::reply::Refusal;
use crate::unit::LogicalUnit;
use crate::{
    alua, capacity, copy_commands, defects, diagnostics, format, inquiry, log, mode,
    persistent_reservations, power, provisioning, rw, supported, verify,
};

// Commands that name a range of blocks have byte 1 for flags, then address, count and group number
// (1Fh: not used but allowed, SBC-3 4.23), and end with the control byte, which is zero: NACA is
// not supported (SAM-5 5.2). Of the flags, RDPROTECT and its like (E0h) are zero: there is no
// protection information.

const DPO_FUA: u8 = 0x10 | FUA | 0x02; // 02h: FUA_NV of SBC-2, harmless and still sent
const DPO_BYTCHK: u8 = 0x10 | 0x06;
const DPO_BYTCHK_1: u8 = 0x10 | 0x02;
const IMMED: u8 = 0x02;
const SYNC_NV_IMMED: u8 = 0x04 | IMMED;

const fn six(opcode: u8) -> CdbUsage {
    CdbUsage::of(&[opcode, 0x1f, 0xff, 0xff, 0xff, 0])
}

const fn ten(opcode: u8, flags: u8) -> CdbUsage {
    CdbUsage::of(&[opcode, flags, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0])
}

const fn twelve(opcode: u8, flags: u8) -> CdbUsage {
    CdbUsage::of(&[opcode, flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0])
}

const fn sixteen(opcode: u8, flags: u8) -> CdbUsage {
    let mut usage = [0xff; CDB_MAX];
    usage[0] = opcode;
    usage[1] = flags;
    usage[14] = 0x1f;
    usage[15] = 0;
    CdbUsage::of(&usage)
}

/// Six bytes of which only the operation code is used.
const fn plain_six(opcode: u8) -> CdbUsage {
    CdbUsage::of(&[opcode, 0, 0, 0, 0, 0])
}

/// Ten bytes of which only the operation code is used.
const fn plain_ten(opcode: u8) -> CdbUsage {
    CdbUsage::of(&[opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0])
}

/// Twelve bytes with `middle` after the operation code, and then an allocation length.
const fn listing(opcode: u8, middle: [u8; 5]) -> CdbUsage {
    let [a, b, c, d, e] = middle;
    CdbUsage::of(&[opcode, a, b, c, d, e, 0xff, 0xff, 0xff, 0xff, 0, 0])
}

const fn reserve_in(service_action: u8) -> CdbUsage {
    CdbUsage::of(&[0x5e, service_action, 0, 0, 0, 0, 0, 0xff, 0xff, 0]).with_service_action()
}

const fn reserve_out(service_action: u8) -> CdbUsage {
    CdbUsage::of(&[0x5f, service_action, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0])
        .with_service_action()
}

const FORMAT_UNIT: CdbUsage = CdbUsage::of(&[0x04, format::OPTIONS, 0, 0, 0, 0]);
const RECEIVE_DIAGNOSTIC: CdbUsage = CdbUsage::of(&[0x1c, diagnostics::PCV, 0xff, 0xff, 0xff, 0]);
const SEND_DIAGNOSTIC: CdbUsage =
    CdbUsage::of(&[0x1d, diagnostics::PF | diagnostics::SELF_TEST | 0x03, 0, 0xff, 0xff, 0]);
const READ_DEFECTS_10: CdbUsage =
    CdbUsage::of(&[0x37, 0, defects::REQUEST_BITS, 0, 0, 0, 0, 0xff, 0xff, 0]);
const READ_DEFECTS_12: CdbUsage = CdbUsage::of(&[
    0xb7,
    defects::REQUEST_BITS,
    0xff,
    0xff,
    0xff,
    0xff,
    0xff,
    0xff,
    0xff,
    0xff,
    0,
    0,
]);
const LOG_SENSE: CdbUsage = CdbUsage::of(&[0x4d, 0, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 0xff, 0]);
const WRITE_ATOMIC: CdbUsage = CdbUsage::of(&[
    0x9c, DPO_FUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff, 0x1f, 0,
]);
const REQUEST_SENSE: CdbUsage = CdbUsage::of(&[0x03, 0x01, 0, 0, 0xff, 0]);
const INQUIRY: CdbUsage = CdbUsage::of(&[0x12, 0x01, 0xff, 0xff, 0xff, 0]);
const MODE_SELECT_6: CdbUsage = CdbUsage::of(&[0x15, 0x10, 0, 0, 0xff, 0]);
const MODE_SENSE_6: CdbUsage = CdbUsage::of(&[0x1a, 0x08, 0xff, 0xff, 0xff, 0]);
const START_STOP: CdbUsage = CdbUsage::of(&[0x1b, 0x01, 0, 0, 0x05, 0]);
const PREVENT_ALLOW: CdbUsage = CdbUsage::of(&[0x1e, 0, 0, 0, 0x01, 0]);
const READ_CAPACITY_16: CdbUsage =
    CdbUsage::of(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action();
const GET_LBA_STATUS: CdbUsage = CdbUsage::of(&[
    0x9e, 0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0,
])
.with_service_action();
const COMPARE_AND_WRITE: CdbUsage = CdbUsage::of(&[
    0x89, DPO_FUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0xff, 0x1f, 0,
]);
/// Sixteen bytes with a service action, then `middle`, and a length from byte 10 on.
const fn third_party(opcode: u8, service_action: u8, middle: [u8; 4]) -> CdbUsage {
    let [a, b, c, d] = middle;
    CdbUsage::of(&[opcode, service_action, a, b, c, d, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action()
}

const COPY_LID1: CdbUsage = third_party(0x83, copy_commands::EXTENDED_COPY_LID1, [0; 4]);
const COPY_LID4: CdbUsage = third_party(0x83, copy_commands::EXTENDED_COPY_LID4, [0; 4]);
const COPY_ABORT: CdbUsage = CdbUsage::of(&[
    0x83,
    copy_commands::COPY_OPERATION_ABORT,
    0xff,
    0xff,
    0xff,
    0xff,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
])
.with_service_action();
/// Sixteen bytes with a service action, a list identifier, the length of a parameter list and a
/// group number.
const fn token(service_action: u8) -> CdbUsage {
    let mut usage = [0xff; CDB_MAX];
    usage[0] = 0x83;
    usage[1] = service_action;
    let mut reserved = 2;
    while reserved < 6 {
        usage[reserved] = 0;
        reserved += 1;
    }
    usage[14] = 0x1f;
    usage[15] = 0;
    CdbUsage::of(&usage).with_service_action()
}

const POPULATE_TOKEN: CdbUsage = token(copy_commands::POPULATE_TOKEN);
const WRITE_USING_TOKEN: CdbUsage = token(copy_commands::WRITE_USING_TOKEN);
const TOKEN_INFORMATION: CdbUsage =
    third_party(0x84, copy_commands::ROD_TOKEN_INFORMATION, [0xff; 4]);
const COPY_STATUS_LID1: CdbUsage =
    third_party(0x84, copy_commands::COPY_STATUS_LID1, [0xff, 0, 0, 0]);
const COPY_PARAMETERS: CdbUsage = third_party(0x84, copy_commands::OPERATING_PARAMETERS, [0; 4]);
const COPY_DETAILS: CdbUsage =
    third_party(0x84, copy_commands::FAILED_SEGMENT_DETAILS, [0xff, 0, 0, 0]);
const COPY_STATUS_LID4: CdbUsage = third_party(0x84, copy_commands::COPY_STATUS_LID4, [0xff; 4]);
const MODE_SENSE_10: CdbUsage = CdbUsage::of(&[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0]);
const MODE_SELECT_10: CdbUsage = CdbUsage::of(&[0x55, 0x10, 0, 0, 0, 0, 0, 0xff, 0xff, 0]);
const UNMAP: CdbUsage = CdbUsage::of(&[0x42, 0, 0, 0, 0, 0, 0x1f, 0xff, 0xff, 0]);
const TARGET_PORT_GROUPS: CdbUsage =
    CdbUsage::of(&[0xa3, 0x0a | alua::FORMAT, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action();
const SUPPORTED_CODES: CdbUsage =
    listing(0xa3, [0x0c, 0x87, 0xff, 0xff, 0xff]).with_service_action();
const SUPPORTED_TASK_MANAGEMENT: CdbUsage =
    listing(0xa3, [0x0d, 0x80, 0, 0, 0]).with_service_action();

/// The commands that this target supports.
pub(crate) static TABLE: CommandTable = CommandTable::new(&ENTRIES);

/// REPORT SUPPORTED OPERATION CODES, from this table.
fn supported_operation_codes(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    supported::operation_codes(&TABLE, unit.capabilities(), cmd)
}

/// All commands, by operation code and service action.
static ENTRIES: [CommandEntry; 72] = [
    CommandEntry::new("TEST UNIT READY", Spc2Only, plain_six(0x00), power::test_unit_ready)
        .accessing_medium(),
    CommandEntry::new("REQUEST SENSE", Never, REQUEST_SENSE, power::request_sense)
        .despite_attention(),
    CommandEntry::new("FORMAT UNIT", Writes, FORMAT_UNIT, format::format).accessing_medium(),
    CommandEntry::new("READ(6)", Reads, six(0x08), rw::read).accessing_medium(),
    CommandEntry::new("WRITE(6)", Writes, six(0x0a), rw::write).accessing_medium(),
    CommandEntry::new("INQUIRY", Never, INQUIRY, inquiry::inquiry).despite_attention(),
    CommandEntry::new("MODE SELECT(6)", Writes, MODE_SELECT_6, mode::select),
    CommandEntry::new("RESERVE(6)", Spc2Only, plain_six(0x16), persistent_reservations::reserve)
        .requiring(Requirement::Reservations),
    CommandEntry::new("RELEASE(6)", Never, plain_six(0x17), persistent_reservations::release)
        .requiring(Requirement::Reservations),
    CommandEntry::new("MODE SENSE(6)", Reads, MODE_SENSE_6, mode::sense),
    CommandEntry::new("START STOP UNIT", Writes, START_STOP, power::start_stop),
    CommandEntry::new(
        "RECEIVE DIAGNOSTIC RESULTS",
        Reads,
        RECEIVE_DIAGNOSTIC,
        diagnostics::receive,
    ),
    CommandEntry::new("SEND DIAGNOSTIC", Writes, SEND_DIAGNOSTIC, diagnostics::send),
    CommandEntry::new("PREVENT ALLOW MEDIUM REMOVAL", Writes, PREVENT_ALLOW, power::prevent_allow),
    CommandEntry::new("READ CAPACITY(10)", Never, plain_ten(0x25), capacity::read_capacity_10)
        .accessing_medium(),
    CommandEntry::new("READ(10)", Reads, ten(0x28, DPO_FUA), rw::read).accessing_medium(),
    CommandEntry::new("WRITE(10)", Writes, ten(0x2a, DPO_FUA), rw::write).accessing_medium(),
    CommandEntry::new(
        "WRITE AND VERIFY(10)",
        Writes,
        ten(0x2e, DPO_BYTCHK_1),
        verify::write_and_verify,
    )
    .accessing_medium(),
    CommandEntry::new("VERIFY(10)", Reads, ten(0x2f, DPO_BYTCHK), verify::verify)
        .accessing_medium(),
    CommandEntry::new("PRE-FETCH(10)", Reads, ten(0x34, IMMED), rw::pre_fetch).accessing_medium(),
    CommandEntry::new(
        "SYNCHRONIZE CACHE(10)",
        Writes,
        ten(0x35, SYNC_NV_IMMED),
        rw::synchronize_cache,
    )
    .accessing_medium(),
    CommandEntry::new("READ DEFECT DATA(10)", Reads, READ_DEFECTS_10, defects::read_defect_data_10)
        .accessing_medium(),
    CommandEntry::new("WRITE SAME(10)", Writes, ten(0x41, UNMAP_BIT), provisioning::write_same)
        .accessing_medium()
        .requiring(Requirement::UnmapBit),
    CommandEntry::new("UNMAP", Writes, UNMAP, provisioning::unmap)
        .accessing_medium()
        .requiring(Requirement::Unmap),
    CommandEntry::new("LOG SENSE", Never, LOG_SENSE, log::sense),
    CommandEntry::new("MODE SELECT(10)", Writes, MODE_SELECT_10, mode::select),
    CommandEntry::new("RESERVE(10)", Spc2Only, plain_ten(0x56), persistent_reservations::reserve)
        .requiring(Requirement::Reservations),
    CommandEntry::new("RELEASE(10)", Never, plain_ten(0x57), persistent_reservations::release)
        .requiring(Requirement::Reservations),
    CommandEntry::new("MODE SENSE(10)", Reads, MODE_SENSE_10, mode::sense),
    CommandEntry::new(
        "PERSISTENT RESERVE IN: READ KEYS",
        Spc2Only,
        reserve_in(0),
        persistent_reservations::read_keys,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE IN: READ RESERVATION",
        Spc2Only,
        reserve_in(1),
        persistent_reservations::read_reservation,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE IN: REPORT CAPABILITIES",
        Spc2Only,
        reserve_in(2),
        persistent_reservations::report_capabilities,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE IN: READ FULL STATUS",
        Spc2Only,
        reserve_in(3),
        persistent_reservations::read_full_status,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: REGISTER",
        Spc2Only,
        reserve_out(0),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: RESERVE",
        Spc2Only,
        reserve_out(1),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: RELEASE",
        Spc2Only,
        reserve_out(2),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: CLEAR",
        Spc2Only,
        reserve_out(3),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: PREEMPT",
        Spc2Only,
        reserve_out(4),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: PREEMPT AND ABORT",
        Spc2Only,
        reserve_out(5),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: REGISTER AND IGNORE EXISTING KEY",
        Spc2Only,
        reserve_out(6),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new(
        "PERSISTENT RESERVE OUT: REGISTER AND MOVE",
        Spc2Only,
        reserve_out(7),
        persistent_reservations::persistent_reserve_out,
    )
    .requiring(Requirement::Reservations),
    CommandEntry::new("EXTENDED COPY(LID1)", Writes, COPY_LID1, copy_commands::extended_copy)
        .accessing_medium(),
    CommandEntry::new("EXTENDED COPY(LID4)", Writes, COPY_LID4, copy_commands::extended_copy)
        .accessing_medium(),
    CommandEntry::new("POPULATE TOKEN", Reads, POPULATE_TOKEN, copy_commands::populate_token)
        .accessing_medium(),
    CommandEntry::new(
        "WRITE USING TOKEN",
        Writes,
        WRITE_USING_TOKEN,
        copy_commands::write_using_token,
    )
    .accessing_medium(),
    CommandEntry::new("COPY OPERATION ABORT", Writes, COPY_ABORT, copy_commands::abort),
    CommandEntry::new(
        "RECEIVE COPY STATUS(LID1)",
        Reads,
        COPY_STATUS_LID1,
        copy_commands::status_lid1,
    ),
    CommandEntry::new(
        "RECEIVE COPY OPERATING PARAMETERS",
        Never,
        COPY_PARAMETERS,
        copy_commands::operating_parameters,
    ),
    CommandEntry::new(
        "RECEIVE COPY FAILURE DETAILS",
        Reads,
        COPY_DETAILS,
        copy_commands::failed_segment_details,
    ),
    CommandEntry::new(
        "RECEIVE COPY STATUS(LID4)",
        Reads,
        COPY_STATUS_LID4,
        copy_commands::status_lid4,
    ),
    CommandEntry::new(
        "RECEIVE ROD TOKEN INFORMATION",
        Reads,
        TOKEN_INFORMATION,
        copy_commands::rod_token_information,
    ),
    CommandEntry::new("READ(16)", Reads, sixteen(0x88, DPO_FUA), rw::read).accessing_medium(),
    CommandEntry::new("COMPARE AND WRITE", Writes, COMPARE_AND_WRITE, verify::compare_and_write)
        .accessing_medium(),
    CommandEntry::new("WRITE(16)", Writes, sixteen(0x8a, DPO_FUA), rw::write).accessing_medium(),
    CommandEntry::new("ORWRITE(16)", Writes, sixteen(0x8b, DPO_FUA), rw::or_write)
        .accessing_medium(),
    CommandEntry::new(
        "WRITE AND VERIFY(16)",
        Writes,
        sixteen(0x8e, DPO_BYTCHK_1),
        verify::write_and_verify,
    )
    .accessing_medium(),
    CommandEntry::new("VERIFY(16)", Reads, sixteen(0x8f, DPO_BYTCHK), verify::verify)
        .accessing_medium(),
    CommandEntry::new("PRE-FETCH(16)", Reads, sixteen(0x90, IMMED), rw::pre_fetch)
        .accessing_medium(),
    CommandEntry::new(
        "SYNCHRONIZE CACHE(16)",
        Writes,
        sixteen(0x91, SYNC_NV_IMMED),
        rw::synchronize_cache,
    )
    .accessing_medium(),
    CommandEntry::new(
        "WRITE SAME(16)",
        Writes,
        sixteen(0x93, UNMAP_BIT | provisioning::NDOB),
        provisioning::write_same,
    )
    .accessing_medium()
    .requiring(Requirement::UnmapBit),
    CommandEntry::new("WRITE ATOMIC(16)", Writes, WRITE_ATOMIC, rw::write_atomic)
        .accessing_medium()
        .requiring(Requirement::AtomicWrites),
    CommandEntry::new("READ CAPACITY(16)", Never, READ_CAPACITY_16, capacity::read_capacity_16)
        .accessing_medium(),
    CommandEntry::new("GET LBA STATUS", Reads, GET_LBA_STATUS, capacity::lba_status)
        .accessing_medium(),
    CommandEntry::new(
        "REPORT LUNS",
        Never,
        listing(0xa0, [0, 0xff, 0, 0, 0]),
        inquiry::report_luns,
    )
    .despite_attention(),
    CommandEntry::new(
        "REPORT TARGET PORT GROUPS",
        Never,
        TARGET_PORT_GROUPS,
        alua::report_target_port_groups,
    )
    .requiring(Requirement::PortGroups),
    CommandEntry::new(
        "REPORT SUPPORTED OPERATION CODES",
        Reads,
        SUPPORTED_CODES,
        supported_operation_codes,
    ),
    CommandEntry::new(
        "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
        Reads,
        SUPPORTED_TASK_MANAGEMENT,
        supported::task_management,
    ),
    CommandEntry::new("READ(12)", Reads, twelve(0xa8, DPO_FUA), rw::read).accessing_medium(),
    CommandEntry::new("WRITE(12)", Writes, twelve(0xaa, DPO_FUA), rw::write).accessing_medium(),
    CommandEntry::new(
        "WRITE AND VERIFY(12)",
        Writes,
        twelve(0xae, DPO_BYTCHK_1),
        verify::write_and_verify,
    )
    .accessing_medium(),
    CommandEntry::new("VERIFY(12)", Reads, twelve(0xaf, DPO_BYTCHK), verify::verify)
        .accessing_medium(),
    CommandEntry::new("READ DEFECT DATA(12)", Reads, READ_DEFECTS_12, defects::read_defect_data_12)
        .accessing_medium(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdb::Cdb;
    use crate::command_table::Lookup;
    use crate::sense::Sense;
    use crate::unit::UnitCapabilities;

    const ALL: UnitCapabilities = UnitCapabilities {
        can_unmap: true,
        has_port_groups: true,
        keeps_reservations: true,
        writes_atomically: true,
    };
    const NONE: UnitCapabilities = UnitCapabilities {
        can_unmap: false,
        has_port_groups: false,
        keeps_reservations: false,
        writes_atomically: false,
    };

    #[test]
    fn the_table_is_in_order_and_every_entry_can_be_found() {
        let order = |e: &CommandEntry| (e.usage.opcode(), e.usage.service_action());
        assert!(ENTRIES.windows(2).all(|w| order(&w[0]) < order(&w[1])));
        for entry in &ENTRIES {
            let service_action = entry.usage.service_action().unwrap_or(0);
            let Lookup::Command(found) = TABLE.find(entry.usage.opcode(), service_action) else {
                panic!("{} is not found", entry.name)
            };
            assert_eq!(found.name, entry.name);
        }
    }

    /// SPC-4 4.2.5.1: the operation code's group gives the length.
    #[test]
    fn lengths_follow_the_groups() {
        for entry in &ENTRIES {
            let expect = match entry.usage.opcode() >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                5 => 12,
                other => panic!("{} is in group {other}", entry.name),
            };
            assert_eq!(entry.usage.len(), expect, "{}", entry.name);
        }
    }

    /// SAM-5 5.2: NACA is refused wherever the control byte is.
    #[test]
    fn naca_is_refused_by_every_command() {
        for entry in &ENTRIES {
            let mut bytes = entry.usage.bytes();
            let control = bytes.len() - 1;
            assert!(entry.check(Cdb::new(&bytes), ALL).is_ok(), "{}", entry.name);
            bytes[control] = 0x04;
            let expect = Sense::field(control as u16, Some(2));
            assert_eq!(entry.check(Cdb::new(&bytes), ALL), Err(expect), "{}", entry.name);
        }
    }

    #[test]
    fn without_unmap_the_commands_are_unsupported() {
        let Ok(same) = TABLE.lookup(Cdb::new(&[0x93])) else { panic!("WRITE SAME(16) exists") };
        let cdb = Cdb::new(&[0x93, UNMAP_BIT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(same.check(cdb, ALL), Ok(()));
        assert_eq!(same.check(cdb, NONE), Err(Sense::field(1, Some(3))));
        assert_eq!((same.usage(NONE).bytes()[1], same.usage(ALL).bytes()[1]), (0x01, 0x09));
        let others = ENTRIES.iter().filter(|e| !e.is_supported(NONE));
        let others = others.filter(|e| e.requires != Requirement::Reservations).map(|e| e.name);
        assert!(others.eq(["UNMAP", "WRITE ATOMIC(16)", "REPORT TARGET PORT GROUPS"]));
    }

    #[test]
    fn a_short_block_is_refused() {
        let Ok(read) = TABLE.lookup(Cdb::new(&[0x28])) else { panic!("READ(10) exists") };
        assert!(read.check(Cdb::new(&[0x28; 9]), ALL).is_err());
    }

    /// SPC-4 5.15.2.4.5: the commands that an unavailable node must answer, and those that it may;
    /// nothing else.
    #[test]
    fn informational_commands_need_no_access() {
        let free = ENTRIES.iter().filter(|e| !e.needs_available_path()).map(|e| e.name);
        assert_eq!(
            free.collect::<Vec<_>>(),
            [
                "REQUEST SENSE",
                "INQUIRY",
                "MODE SENSE(6)",
                "RECEIVE DIAGNOSTIC RESULTS",
                "READ CAPACITY(10)",
                "LOG SENSE",
                "MODE SENSE(10)",
                "RECEIVE COPY STATUS(LID1)",
                "RECEIVE COPY OPERATING PARAMETERS",
                "RECEIVE COPY FAILURE DETAILS",
                "RECEIVE COPY STATUS(LID4)",
                "RECEIVE ROD TOKEN INFORMATION",
                "READ CAPACITY(16)",
                "REPORT LUNS",
                "REPORT TARGET PORT GROUPS",
                "REPORT SUPPORTED OPERATION CODES",
                "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
            ]
        );
    }
}
