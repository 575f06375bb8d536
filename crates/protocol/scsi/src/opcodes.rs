//! The table of commands. It drives parsing (lengths, reserved bits, what a command needs of the
//! unit) and REPORT SUPPORTED OPERATION CODES (SPC-4 6.35), so the two cannot disagree.

use arrayvec::ArrayVec;

use crate::cdb::{CDB_MAX, Cdb};
use crate::reply::Refusal;
use crate::sense::{Code, Sense};
use crate::unit::{Incoming, LogicalUnit, Outcome};
use crate::{
    capacity, copy, defects, diagnose, format, inquiry, log, mode, persistent, ports, power,
    provisioning, rw, supported, verify,
};

/// What a command does with the unit, for those who have reserved it (SPC-2 5.5, SPC-4 5.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Asks about the unit, or the reservations judge it by themselves: never conflicts.
    Free,
    /// Conflicts with RESERVE alone.
    Alone,
    /// Reads contents or state.
    Reads,
    /// Changes contents or state.
    Writes,
}

pub(crate) type Handler = fn(&mut LogicalUnit, &Incoming<'_>) -> Result<Outcome, Refusal>;

/// One command.
pub(crate) struct Entry {
    /// The standard's name.
    pub(crate) name: &'static str,
    pub(crate) usage: Usage,
    pub(crate) access: Access,
    /// Whether it needs the unit to be started.
    pub(crate) on_medium: bool,
    /// Whether a waiting unit attention ends it (SAM-5 5.14).
    pub(crate) tells_attention: bool,
    pub(crate) needs: Needs,
    pub(crate) run: Handler,
}

/// What only some units have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// Logical block provisioning management, for the whole command.
    Unmap,
    /// The same for the UNMAP bit of byte 1.
    UnmapBit,
    /// Target port groups.
    Groups,
    /// Reservations that all nodes keep.
    Reservations,
    /// Writes that are all there or not at all.
    AtomicWrites,
}

/// What a unit has of what not all have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Logical block provisioning management.
    pub(crate) can_unmap: bool,
    /// Target port groups.
    pub(crate) has_groups: bool,
    /// Reservations that all nodes keep.
    pub(crate) keeps_reservations: bool,
    /// Writes that are all there or not at all.
    pub(crate) writes_atomically: bool,
}

/// The UNMAP bit of WRITE SAME (SBC-3 5.43).
pub(crate) const UNMAP_BIT: u8 = 0x08;

/// CDB USAGE DATA (SPC-4 6.35): the operation code, the service action where there is one, and
/// a one for every bit that is looked at. All other bits must be zero.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    bits: u128,
    len: u8,
    has_service_action: bool,
}

const SERVICE_ACTION: u8 = 0x1f;

impl Usage {
    const fn of(bytes: &[u8]) -> Self {
        let mut padded = [0; CDB_MAX];
        let mut i = 0;
        while i < bytes.len() {
            padded[i] = bytes[i];
            i += 1;
        }
        let bits = u128::from_be_bytes(padded);
        Self { bits, len: bytes.len() as u8, has_service_action: false }
    }

    const fn with_service_action(mut self) -> Self {
        self.has_service_action = true;
        self
    }

    /// Length of the command descriptor block.
    pub(crate) fn len(self) -> usize {
        usize::from(self.len)
    }

    pub(crate) const fn opcode(self) -> u8 {
        (self.bits >> 120) as u8
    }

    pub(crate) fn service_action(self) -> Option<u8> {
        self.has_service_action.then_some((self.bits >> 112) as u8 & SERVICE_ACTION)
    }

    fn without_unmap_bit(mut self) -> Self {
        self.bits &= !(u128::from(UNMAP_BIT) << 112);
        self
    }

    pub(crate) fn bytes(self) -> ArrayVec<u8, CDB_MAX> {
        self.bits.to_be_bytes().into_iter().take(self.len()).collect()
    }

    /// The bits that may be set, those behind the end of the command included.
    fn allowed(self) -> u128 {
        let service_action = if self.has_service_action { u128::from(SERVICE_ACTION) } else { 0 };
        let tail = u128::MAX.checked_shr(8 * u32::from(self.len)).unwrap_or(0);
        self.bits | 0xff << 120 | service_action << 112 | tail
    }
}

impl Entry {
    const fn new(name: &'static str, access: Access, usage: Usage, run: Handler) -> Self {
        Self {
            name,
            usage,
            access,
            on_medium: false,
            tells_attention: true,
            needs: Needs::Nothing,
            run,
        }
    }

    const fn on_medium(mut self) -> Self {
        self.on_medium = true;
        self
    }

    const fn despite_attention(mut self) -> Self {
        self.tells_attention = false;
        self
    }

    const fn needing(mut self, needs: Needs) -> Self {
        self.needs = needs;
        self
    }

    /// What a unit of these traits looks at.
    pub(crate) fn usage(&self, traits: Traits) -> Usage {
        if self.needs == Needs::UnmapBit && !traits.can_unmap {
            self.usage.without_unmap_bit()
        } else {
            self.usage
        }
    }

    pub(crate) fn is_supported(&self, traits: Traits) -> bool {
        match self.needs {
            Needs::Nothing | Needs::UnmapBit => true,
            Needs::Unmap => traits.can_unmap,
            Needs::Groups => traits.has_groups,
            Needs::Reservations => traits.keeps_reservations,
            Needs::AtomicWrites => traits.writes_atomically,
        }
    }

    /// The entry, or what is unknown about it to a unit that does not support it.
    pub(crate) fn supported(&'static self, traits: Traits) -> Result<&'static Self, Sense> {
        match self.usage.service_action() {
            _ if self.is_supported(traits) => Ok(self),
            Some(_) => Err(NO_SUCH_SERVICE_ACTION),
            None => Err(NO_SUCH_OPCODE),
        }
    }

    /// What this command of the kind does with the unit. To allow the removal of the medium and to start the unit takes
    /// nothing from anybody (SPC-4 5.12.1, SBC-3 4.17).
    pub(crate) fn access_of(&self, cdb: Cdb) -> Access {
        let harmless = match self.usage.opcode() {
            0x1e => cdb.byte(4) & 0x03 == 0,
            0x1b => cdb.byte(4) & 0xf1 == 0x01,
            _ => false,
        };
        if harmless { Alone } else { self.access }
    }

    /// Whether it needs a node through which the unit is to be used. What tells about the unit
    /// does not (SPC-4 5.15.2.4.5 has the least of it), the size included: an initiator that
    /// first meets the unit here knows then what it is once it comes back.
    pub(crate) fn needs_path(&self) -> bool {
        let on_medium = self.on_medium && matches!(self.access, Reads | Alone);
        self.access == Writes || on_medium || self.needs == Needs::Reservations
    }

    /// Checks the length and the reserved bits of a command of this kind.
    pub(crate) fn check(&self, cdb: Cdb, traits: Traits) -> Result<(), Sense> {
        if cdb.len() < self.usage.len() {
            return Err(Sense::illegal(Code::INVALID_FIELD_IN_CDB));
        }
        cdb.check_reserved(self.usage(traits).allowed())
    }
}

/// What a look-up found.
pub(crate) enum Found {
    Command(&'static Entry),
    /// The operation code exists, the service action does not.
    NoSuchServiceAction,
    NoSuchOpcode,
}

/// The entry of an operation code and, where it has them, a service action.
pub(crate) fn find(opcode: u8, service_action: u8) -> Found {
    let first = usize::from(FIRST[usize::from(opcode)]);
    let entries = TABLE.get(first..).unwrap_or_default();
    let mut found = Found::NoSuchOpcode;
    for entry in entries.iter().take_while(|e| e.usage.opcode() == opcode) {
        if entry.usage.service_action().is_none_or(|sa| sa == service_action) {
            return Found::Command(entry);
        }
        found = Found::NoSuchServiceAction;
    }
    found
}

/// The entry of a command, or the sense that says what is unknown about it.
pub(crate) fn of(cdb: Cdb) -> Result<&'static Entry, Sense> {
    match find(cdb.opcode(), cdb.byte(1) & SERVICE_ACTION) {
        Found::Command(entry) => Ok(entry),
        Found::NoSuchServiceAction => Err(NO_SUCH_SERVICE_ACTION),
        Found::NoSuchOpcode => Err(NO_SUCH_OPCODE),
    }
}

const NO_SUCH_SERVICE_ACTION: Sense = Sense::field(1, Some(4));
const NO_SUCH_OPCODE: Sense = Sense::illegal(Code::INVALID_OPERATION_CODE);

/// Index of the first entry of each operation code; beyond the table where there is none.
static FIRST: [u8; 256] = first_entries();

const fn first_entries() -> [u8; 256] {
    let mut first = [u8::MAX; 256];
    let mut i = TABLE.len();
    while i > 0 {
        i -= 1;
        first[TABLE[i].usage.opcode() as usize] = i as u8;
    }
    first
}

// Commands that name a range of blocks have byte 1 for flags, then address, count and group number
// (1Fh: not used but allowed, SBC-3 4.23), and end with the control byte, which is zero: NACA is
// not supported (SAM-5 5.2). Of the flags, RDPROTECT and its like (E0h) are zero: there is no
// protection information.

const DPO_FUA: u8 = 0x10 | FUA | 0x02; // 02h: FUA_NV of SBC-2, harmless and still sent
const DPO_BYTCHK: u8 = 0x10 | 0x06;
const DPO_BYTCHK_1: u8 = 0x10 | 0x02;
const IMMED: u8 = 0x02;
const SYNC_NV_IMMED: u8 = 0x04 | IMMED;

/// Force unit access.
pub(crate) const FUA: u8 = 0x08;

const fn six(opcode: u8) -> Usage {
    Usage::of(&[opcode, 0x1f, 0xff, 0xff, 0xff, 0])
}

const fn ten(opcode: u8, flags: u8) -> Usage {
    Usage::of(&[opcode, flags, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0])
}

const fn twelve(opcode: u8, flags: u8) -> Usage {
    Usage::of(&[opcode, flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f, 0])
}

const fn sixteen(opcode: u8, flags: u8) -> Usage {
    let mut usage = [0xff; CDB_MAX];
    usage[0] = opcode;
    usage[1] = flags;
    usage[14] = 0x1f;
    usage[15] = 0;
    Usage::of(&usage)
}

/// Six bytes of which only the operation code is looked at.
const fn plain_six(opcode: u8) -> Usage {
    Usage::of(&[opcode, 0, 0, 0, 0, 0])
}

/// Ten bytes of which only the operation code is looked at.
const fn plain_ten(opcode: u8) -> Usage {
    Usage::of(&[opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0])
}

/// Twelve bytes with `middle` behind the operation code, and then an allocation length.
const fn listing(opcode: u8, middle: [u8; 5]) -> Usage {
    let [a, b, c, d, e] = middle;
    Usage::of(&[opcode, a, b, c, d, e, 0xff, 0xff, 0xff, 0xff, 0, 0])
}

const fn reserve_in(service_action: u8) -> Usage {
    Usage::of(&[0x5e, service_action, 0, 0, 0, 0, 0, 0xff, 0xff, 0]).with_service_action()
}

const fn reserve_out(service_action: u8) -> Usage {
    Usage::of(&[0x5f, service_action, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]).with_service_action()
}

const FORMAT_UNIT: Usage = Usage::of(&[0x04, format::OPTIONS, 0, 0, 0, 0]);
const RECEIVE_DIAGNOSTIC: Usage = Usage::of(&[0x1c, diagnose::PCV, 0xff, 0xff, 0xff, 0]);
const SEND_DIAGNOSTIC: Usage =
    Usage::of(&[0x1d, diagnose::PF | diagnose::SELF_TEST | 0x03, 0, 0xff, 0xff, 0]);
const READ_DEFECTS_10: Usage = Usage::of(&[0x37, 0, defects::ASKED, 0, 0, 0, 0, 0xff, 0xff, 0]);
const READ_DEFECTS_12: Usage =
    Usage::of(&[0xb7, defects::ASKED, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
const LOG_SENSE: Usage = Usage::of(&[0x4d, 0, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 0xff, 0]);
const WRITE_ATOMIC: Usage = Usage::of(&[
    0x9c, DPO_FUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0xff, 0xff, 0x1f, 0,
]);
const REQUEST_SENSE: Usage = Usage::of(&[0x03, 0x01, 0, 0, 0xff, 0]);
const INQUIRY: Usage = Usage::of(&[0x12, 0x01, 0xff, 0xff, 0xff, 0]);
const MODE_SELECT_6: Usage = Usage::of(&[0x15, 0x10, 0, 0, 0xff, 0]);
const MODE_SENSE_6: Usage = Usage::of(&[0x1a, 0x08, 0xff, 0xff, 0xff, 0]);
const START_STOP: Usage = Usage::of(&[0x1b, 0x01, 0, 0, 0x05, 0]);
const PREVENT_ALLOW: Usage = Usage::of(&[0x1e, 0, 0, 0, 0x01, 0]);
const READ_CAPACITY_16: Usage =
    Usage::of(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action();
const GET_LBA_STATUS: Usage = Usage::of(&[
    0x9e, 0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0,
])
.with_service_action();
const COMPARE_AND_WRITE: Usage = Usage::of(&[
    0x89, DPO_FUA, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0xff, 0x1f, 0,
]);
/// Sixteen bytes with a service action, then `middle`, and a length from byte 10 on.
const fn third_party(opcode: u8, service_action: u8, middle: [u8; 4]) -> Usage {
    let [a, b, c, d] = middle;
    Usage::of(&[opcode, service_action, a, b, c, d, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action()
}

const COPY_LID1: Usage = third_party(0x83, copy::EXTENDED_COPY_LID1, [0; 4]);
const COPY_LID4: Usage = third_party(0x83, copy::EXTENDED_COPY_LID4, [0; 4]);
const COPY_ABORT: Usage = Usage::of(&[
    0x83,
    copy::COPY_OPERATION_ABORT,
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
/// Sixteen bytes with a service action, a list identifier, the length of a parameter list and a group number.
const fn token(service_action: u8) -> Usage {
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
    Usage::of(&usage).with_service_action()
}

const POPULATE_TOKEN: Usage = token(copy::POPULATE_TOKEN);
const WRITE_USING_TOKEN: Usage = token(copy::WRITE_USING_TOKEN);
const TOKEN_INFORMATION: Usage = third_party(0x84, copy::ROD_TOKEN_INFORMATION, [0xff; 4]);
const COPY_STATUS_LID1: Usage = third_party(0x84, copy::COPY_STATUS_LID1, [0xff, 0, 0, 0]);
const COPY_PARAMETERS: Usage = third_party(0x84, copy::OPERATING_PARAMETERS, [0; 4]);
const COPY_DETAILS: Usage = third_party(0x84, copy::FAILED_SEGMENT_DETAILS, [0xff, 0, 0, 0]);
const COPY_STATUS_LID4: Usage = third_party(0x84, copy::COPY_STATUS_LID4, [0xff; 4]);
const MODE_SENSE_10: Usage = Usage::of(&[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0]);
const MODE_SELECT_10: Usage = Usage::of(&[0x55, 0x10, 0, 0, 0, 0, 0, 0xff, 0xff, 0]);
const UNMAP: Usage = Usage::of(&[0x42, 0, 0, 0, 0, 0, 0x1f, 0xff, 0xff, 0]);
const TARGET_PORT_GROUPS: Usage =
    Usage::of(&[0xa3, 0x0a | ports::FORMAT, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .with_service_action();
const SUPPORTED_CODES: Usage = listing(0xa3, [0x0c, 0x87, 0xff, 0xff, 0xff]).with_service_action();
const SUPPORTED_TASK_MANAGEMENT: Usage = listing(0xa3, [0x0d, 0x80, 0, 0, 0]).with_service_action();

use Access::{Alone, Free, Reads, Writes};

/// All commands, by operation code and service action.
pub(crate) static TABLE: [Entry; 72] = [
    Entry::new("TEST UNIT READY", Alone, plain_six(0x00), power::test_unit_ready).on_medium(),
    Entry::new("REQUEST SENSE", Free, REQUEST_SENSE, power::request_sense).despite_attention(),
    Entry::new("FORMAT UNIT", Writes, FORMAT_UNIT, format::format).on_medium(),
    Entry::new("READ(6)", Reads, six(0x08), rw::read).on_medium(),
    Entry::new("WRITE(6)", Writes, six(0x0a), rw::write).on_medium(),
    Entry::new("INQUIRY", Free, INQUIRY, inquiry::inquiry).despite_attention(),
    Entry::new("MODE SELECT(6)", Writes, MODE_SELECT_6, mode::select),
    Entry::new("RESERVE(6)", Alone, plain_six(0x16), persistent::reserve)
        .needing(Needs::Reservations),
    Entry::new("RELEASE(6)", Free, plain_six(0x17), persistent::release)
        .needing(Needs::Reservations),
    Entry::new("MODE SENSE(6)", Reads, MODE_SENSE_6, mode::sense),
    Entry::new("START STOP UNIT", Writes, START_STOP, power::start_stop),
    Entry::new("RECEIVE DIAGNOSTIC RESULTS", Reads, RECEIVE_DIAGNOSTIC, diagnose::receive),
    Entry::new("SEND DIAGNOSTIC", Writes, SEND_DIAGNOSTIC, diagnose::send),
    Entry::new("PREVENT ALLOW MEDIUM REMOVAL", Writes, PREVENT_ALLOW, power::prevent_allow),
    Entry::new("READ CAPACITY(10)", Free, plain_ten(0x25), capacity::ten).on_medium(),
    Entry::new("READ(10)", Reads, ten(0x28, DPO_FUA), rw::read).on_medium(),
    Entry::new("WRITE(10)", Writes, ten(0x2a, DPO_FUA), rw::write).on_medium(),
    Entry::new("WRITE AND VERIFY(10)", Writes, ten(0x2e, DPO_BYTCHK_1), verify::write_and_verify)
        .on_medium(),
    Entry::new("VERIFY(10)", Reads, ten(0x2f, DPO_BYTCHK), verify::verify).on_medium(),
    Entry::new("PRE-FETCH(10)", Reads, ten(0x34, IMMED), rw::pre_fetch).on_medium(),
    Entry::new("SYNCHRONIZE CACHE(10)", Writes, ten(0x35, SYNC_NV_IMMED), rw::synchronize_cache)
        .on_medium(),
    Entry::new("READ DEFECT DATA(10)", Reads, READ_DEFECTS_10, defects::ten).on_medium(),
    Entry::new("WRITE SAME(10)", Writes, ten(0x41, UNMAP_BIT), provisioning::write_same)
        .on_medium()
        .needing(Needs::UnmapBit),
    Entry::new("UNMAP", Writes, UNMAP, provisioning::unmap).on_medium().needing(Needs::Unmap),
    Entry::new("LOG SENSE", Free, LOG_SENSE, log::sense),
    Entry::new("MODE SELECT(10)", Writes, MODE_SELECT_10, mode::select),
    Entry::new("RESERVE(10)", Alone, plain_ten(0x56), persistent::reserve)
        .needing(Needs::Reservations),
    Entry::new("RELEASE(10)", Free, plain_ten(0x57), persistent::release)
        .needing(Needs::Reservations),
    Entry::new("MODE SENSE(10)", Reads, MODE_SENSE_10, mode::sense),
    Entry::new("PERSISTENT RESERVE IN: READ KEYS", Alone, reserve_in(0), persistent::read_keys)
        .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE IN: READ RESERVATION",
        Alone,
        reserve_in(1),
        persistent::read_reservation,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE IN: REPORT CAPABILITIES",
        Alone,
        reserve_in(2),
        persistent::report_capabilities,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE IN: READ FULL STATUS",
        Alone,
        reserve_in(3),
        persistent::read_full_status,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: REGISTER",
        Alone,
        reserve_out(0),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: RESERVE",
        Alone,
        reserve_out(1),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: RELEASE",
        Alone,
        reserve_out(2),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: CLEAR",
        Alone,
        reserve_out(3),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: PREEMPT",
        Alone,
        reserve_out(4),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: PREEMPT AND ABORT",
        Alone,
        reserve_out(5),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: REGISTER AND IGNORE EXISTING KEY",
        Alone,
        reserve_out(6),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new(
        "PERSISTENT RESERVE OUT: REGISTER AND MOVE",
        Alone,
        reserve_out(7),
        persistent::persistent_reserve_out,
    )
    .needing(Needs::Reservations),
    Entry::new("EXTENDED COPY(LID1)", Writes, COPY_LID1, copy::extended_copy).on_medium(),
    Entry::new("EXTENDED COPY(LID4)", Writes, COPY_LID4, copy::extended_copy).on_medium(),
    Entry::new("POPULATE TOKEN", Reads, POPULATE_TOKEN, copy::populate_token).on_medium(),
    Entry::new("WRITE USING TOKEN", Writes, WRITE_USING_TOKEN, copy::write_using_token).on_medium(),
    Entry::new("COPY OPERATION ABORT", Writes, COPY_ABORT, copy::abort),
    Entry::new("RECEIVE COPY STATUS(LID1)", Reads, COPY_STATUS_LID1, copy::status_lid1),
    Entry::new(
        "RECEIVE COPY OPERATING PARAMETERS",
        Free,
        COPY_PARAMETERS,
        copy::operating_parameters,
    ),
    Entry::new("RECEIVE COPY FAILURE DETAILS", Reads, COPY_DETAILS, copy::failed_segment_details),
    Entry::new("RECEIVE COPY STATUS(LID4)", Reads, COPY_STATUS_LID4, copy::status_lid4),
    Entry::new(
        "RECEIVE ROD TOKEN INFORMATION",
        Reads,
        TOKEN_INFORMATION,
        copy::rod_token_information,
    ),
    Entry::new("READ(16)", Reads, sixteen(0x88, DPO_FUA), rw::read).on_medium(),
    Entry::new("COMPARE AND WRITE", Writes, COMPARE_AND_WRITE, verify::compare_and_write)
        .on_medium(),
    Entry::new("WRITE(16)", Writes, sixteen(0x8a, DPO_FUA), rw::write).on_medium(),
    Entry::new("ORWRITE(16)", Writes, sixteen(0x8b, DPO_FUA), rw::or_write).on_medium(),
    Entry::new(
        "WRITE AND VERIFY(16)",
        Writes,
        sixteen(0x8e, DPO_BYTCHK_1),
        verify::write_and_verify,
    )
    .on_medium(),
    Entry::new("VERIFY(16)", Reads, sixteen(0x8f, DPO_BYTCHK), verify::verify).on_medium(),
    Entry::new("PRE-FETCH(16)", Reads, sixteen(0x90, IMMED), rw::pre_fetch).on_medium(),
    Entry::new(
        "SYNCHRONIZE CACHE(16)",
        Writes,
        sixteen(0x91, SYNC_NV_IMMED),
        rw::synchronize_cache,
    )
    .on_medium(),
    Entry::new(
        "WRITE SAME(16)",
        Writes,
        sixteen(0x93, UNMAP_BIT | provisioning::NDOB),
        provisioning::write_same,
    )
    .on_medium()
    .needing(Needs::UnmapBit),
    Entry::new("WRITE ATOMIC(16)", Writes, WRITE_ATOMIC, rw::write_atomic)
        .on_medium()
        .needing(Needs::AtomicWrites),
    Entry::new("READ CAPACITY(16)", Free, READ_CAPACITY_16, capacity::sixteen).on_medium(),
    Entry::new("GET LBA STATUS", Reads, GET_LBA_STATUS, capacity::lba_status).on_medium(),
    Entry::new("REPORT LUNS", Free, listing(0xa0, [0, 0xff, 0, 0, 0]), inquiry::report_luns)
        .despite_attention(),
    Entry::new("REPORT TARGET PORT GROUPS", Free, TARGET_PORT_GROUPS, ports::report)
        .needing(Needs::Groups),
    Entry::new(
        "REPORT SUPPORTED OPERATION CODES",
        Reads,
        SUPPORTED_CODES,
        supported::operation_codes,
    ),
    Entry::new(
        "REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS",
        Reads,
        SUPPORTED_TASK_MANAGEMENT,
        supported::task_management,
    ),
    Entry::new("READ(12)", Reads, twelve(0xa8, DPO_FUA), rw::read).on_medium(),
    Entry::new("WRITE(12)", Writes, twelve(0xaa, DPO_FUA), rw::write).on_medium(),
    Entry::new(
        "WRITE AND VERIFY(12)",
        Writes,
        twelve(0xae, DPO_BYTCHK_1),
        verify::write_and_verify,
    )
    .on_medium(),
    Entry::new("VERIFY(12)", Reads, twelve(0xaf, DPO_BYTCHK), verify::verify).on_medium(),
    Entry::new("READ DEFECT DATA(12)", Reads, READ_DEFECTS_12, defects::twelve).on_medium(),
];

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Traits = Traits {
        can_unmap: true,
        has_groups: true,
        keeps_reservations: true,
        writes_atomically: true,
    };
    const NONE: Traits = Traits {
        can_unmap: false,
        has_groups: false,
        keeps_reservations: false,
        writes_atomically: false,
    };

    #[test]
    fn the_table_is_in_order_and_every_entry_can_be_found() {
        let order = |e: &Entry| (e.usage.opcode(), e.usage.service_action());
        assert!(TABLE.windows(2).all(|w| order(&w[0]) < order(&w[1])));
        for entry in &TABLE {
            let service_action = entry.usage.service_action().unwrap_or(0);
            let Found::Command(found) = find(entry.usage.opcode(), service_action) else {
                panic!("{} is not found", entry.name)
            };
            assert_eq!(found.name, entry.name);
        }
    }

    /// SPC-4 4.2.5.1: the operation code's group gives the length.
    #[test]
    fn lengths_follow_the_groups() {
        for entry in &TABLE {
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
        for entry in &TABLE {
            let mut bytes = entry.usage.bytes();
            let control = bytes.len() - 1;
            assert!(entry.check(Cdb::new(&bytes), ALL).is_ok(), "{}", entry.name);
            bytes[control] = 0x04;
            let expect = Sense::field(control as u16, Some(2));
            assert_eq!(entry.check(Cdb::new(&bytes), ALL), Err(expect), "{}", entry.name);
        }
    }

    #[test]
    fn what_cannot_unmap_knows_no_unmap() {
        let Ok(same) = of(Cdb::new(&[0x93])) else { panic!("WRITE SAME(16) exists") };
        let cdb = Cdb::new(&[0x93, UNMAP_BIT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(same.check(cdb, ALL), Ok(()));
        assert_eq!(same.check(cdb, NONE), Err(Sense::field(1, Some(3))));
        assert_eq!((same.usage(NONE).bytes()[1], same.usage(ALL).bytes()[1]), (0x01, 0x09));
        let others = TABLE.iter().filter(|e| !e.is_supported(NONE));
        let others = others.filter(|e| e.needs != Needs::Reservations).map(|e| e.name);
        assert!(others.eq(["UNMAP", "WRITE ATOMIC(16)", "REPORT TARGET PORT GROUPS"]));
    }

    #[test]
    fn a_short_block_is_refused() {
        let Ok(read) = of(Cdb::new(&[0x28])) else { panic!("READ(10) exists") };
        assert!(read.check(Cdb::new(&[0x28; 9]), ALL).is_err());
    }

    /// SPC-4 5.15.2.4.5: what a node must answer through which the unit is not to be used, and
    /// what it may; nothing else.
    #[test]
    fn what_tells_about_the_unit_needs_no_path() {
        let free = TABLE.iter().filter(|e| !e.needs_path()).map(|e| e.name);
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
