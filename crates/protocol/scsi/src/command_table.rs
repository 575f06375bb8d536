//! The form of the table of commands: what an entry says about a command, and how a command finds
//! its entry.

use arrayvec::ArrayVec;

use crate::cdb::{CDB_MAX, Cdb, UNMAP_BIT};
use crate::command::{Outcome, ParsedCommand};
use crate::reply::Refusal;
use crate::sense::{Sense, SenseCode};
use crate::unit::{LogicalUnit, UnitCapabilities};

/// How a command conflicts with reservations (SPC-2 5.5, SPC-4 5.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConflictClass {
    /// Queries the unit, or is checked by the reservation table itself: never conflicts.
    Never,
    /// Conflicts only with SPC-2 reservations.
    Spc2Only,
    /// Reads contents or state.
    Reads,
    /// Changes contents or state.
    Writes,
}

pub(crate) type Handler = fn(&mut LogicalUnit, &ParsedCommand<'_>) -> Result<Outcome, Refusal>;

/// One command.
pub(crate) struct CommandEntry {
    /// The standard's name.
    pub(crate) name: &'static str,
    pub(crate) usage: CdbUsage,
    pub(crate) conflict_class: ConflictClass,
    /// Whether the unit must be started.
    pub(crate) accesses_medium: bool,
    /// Whether a pending unit attention ends it (SAM-5 5.14).
    pub(crate) ends_with_attention: bool,
    pub(crate) requires: Requirement,
    pub(crate) handler: Handler,
}

/// Features that not all units have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requirement {
    Nothing,
    /// Logical block provisioning management, for the whole command.
    Unmap,
    /// The same for the UNMAP bit of byte 1.
    UnmapBit,
    /// Target port groups.
    PortGroups,
    /// Reservations shared by all nodes.
    Reservations,
    /// Atomic writes.
    AtomicWrites,
}

/// CDB USAGE DATA (SPC-4 6.35): the operation code, the service action if there is one, and a one
/// for every bit that is used. All other bits must be zero.
#[derive(Clone, Copy)]
pub(crate) struct CdbUsage {
    bits: u128,
    len: u8,
    has_service_action: bool,
}

const SERVICE_ACTION: u8 = 0x1f;

impl CdbUsage {
    pub(crate) const fn of(bytes: &[u8]) -> Self {
        let mut padded = [0; CDB_MAX];
        let mut i = 0;
        while i < bytes.len() {
            padded[i] = bytes[i];
            i += 1;
        }
        let bits = u128::from_be_bytes(padded);
        Self { bits, len: bytes.len() as u8, has_service_action: false }
    }

    pub(crate) const fn with_service_action(mut self) -> Self {
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

    /// The bits that may be set, including those after the end of the command.
    fn allowed(self) -> u128 {
        let service_action = if self.has_service_action { u128::from(SERVICE_ACTION) } else { 0 };
        let tail = u128::MAX.checked_shr(8 * u32::from(self.len)).unwrap_or(0);
        self.bits | 0xff << 120 | service_action << 112 | tail
    }
}

impl CommandEntry {
    /// A command that every unit supports, does not access the medium, and is ended by a unit
    /// attention.
    pub(crate) const fn new(
        name: &'static str,
        access: ConflictClass,
        usage: CdbUsage,
        run: Handler,
    ) -> Self {
        Self {
            name,
            usage,
            conflict_class: access,
            accesses_medium: false,
            ends_with_attention: true,
            requires: Requirement::Nothing,
            handler: run,
        }
    }

    pub(crate) const fn accessing_medium(mut self) -> Self {
        self.accesses_medium = true;
        self
    }

    pub(crate) const fn despite_attention(mut self) -> Self {
        self.ends_with_attention = false;
        self
    }

    pub(crate) const fn requiring(mut self, needs: Requirement) -> Self {
        self.requires = needs;
        self
    }

    /// The usage data for a unit with these capabilities.
    pub(crate) fn usage(&self, capabilities: UnitCapabilities) -> CdbUsage {
        if self.requires == Requirement::UnmapBit && !capabilities.can_unmap {
            self.usage.without_unmap_bit()
        } else {
            self.usage
        }
    }

    pub(crate) fn is_supported(&self, capabilities: UnitCapabilities) -> bool {
        match self.requires {
            Requirement::Nothing | Requirement::UnmapBit => true,
            Requirement::Unmap => capabilities.can_unmap,
            Requirement::PortGroups => capabilities.has_port_groups,
            Requirement::Reservations => capabilities.keeps_reservations,
            Requirement::AtomicWrites => capabilities.writes_atomically,
        }
    }

    /// The entry, or the error for a unit that does not support it.
    pub(crate) fn supported(
        &'static self,
        capabilities: UnitCapabilities,
    ) -> Result<&'static Self, Sense> {
        match self.usage.service_action() {
            _ if self.is_supported(capabilities) => Ok(self),
            Some(_) => Err(NO_SUCH_SERVICE_ACTION),
            None => Err(NO_SUCH_OPCODE),
        }
    }

    /// How this particular command conflicts. Allowing medium removal and starting the unit affect
    /// no other initiator (SPC-4 5.12.1, SBC-3 4.17).
    pub(crate) fn conflict_class_of(&self, cdb: Cdb) -> ConflictClass {
        let harmless = match self.usage.opcode() {
            0x1e => cdb.byte(4) & 0x03 == 0,
            0x1b => cdb.byte(4) & 0xf1 == 0x01,
            _ => false,
        };
        if harmless { ConflictClass::Spc2Only } else { self.conflict_class }
    }

    /// Whether it needs an available path. Commands that query the unit do not (SPC-4 5.15.2.4.5
    /// has the minimum), including those for the size: an initiator that first finds the unit on
    /// this node then knows its properties once it is available.
    pub(crate) fn needs_available_path(&self) -> bool {
        let on_medium = self.accesses_medium
            && matches!(self.conflict_class, ConflictClass::Reads | ConflictClass::Spc2Only);
        self.conflict_class == ConflictClass::Writes
            || on_medium
            || self.requires == Requirement::Reservations
    }

    /// Checks the length and the reserved bits of a command of this kind.
    pub(crate) fn check(&self, cdb: Cdb, capabilities: UnitCapabilities) -> Result<(), Sense> {
        if cdb.len() < self.usage.len() {
            return Err(Sense::illegal(SenseCode::INVALID_FIELD_IN_CDB));
        }
        cdb.check_reserved(self.usage(capabilities).allowed())
    }
}

/// The result of a lookup.
pub(crate) enum Lookup {
    Command(&'static CommandEntry),
    /// The operation code exists, the service action does not.
    NoSuchServiceAction,
    NoSuchOpcode,
}

/// Commands in the order of operation code and service action.
pub(crate) struct CommandTable {
    pub(crate) entries: &'static [CommandEntry],
    /// Index of the first entry of each operation code; beyond the table if there is none.
    first: [u8; 256],
}

impl CommandTable {
    /// The table of these commands, which are in order.
    pub(crate) const fn new(entries: &'static [CommandEntry]) -> Self {
        let mut first = [u8::MAX; 256];
        let mut i = entries.len();
        while i > 0 {
            i -= 1;
            first[entries[i].usage.opcode() as usize] = i as u8;
        }
        Self { entries, first }
    }

    /// The entry of an operation code and, if it has them, a service action.
    pub(crate) fn find(&self, opcode: u8, service_action: u8) -> Lookup {
        let first = usize::from(self.first[usize::from(opcode)]);
        let entries = self.entries.get(first..).unwrap_or_default();
        let mut found = Lookup::NoSuchOpcode;
        for entry in entries.iter().take_while(|e| e.usage.opcode() == opcode) {
            if entry.usage.service_action().is_none_or(|sa| sa == service_action) {
                return Lookup::Command(entry);
            }
            found = Lookup::NoSuchServiceAction;
        }
        found
    }

    /// The entry of a command, or the sense data for an unknown one.
    pub(crate) fn lookup(&self, cdb: Cdb) -> Result<&'static CommandEntry, Sense> {
        match self.find(cdb.opcode(), cdb.byte(1) & SERVICE_ACTION) {
            Lookup::Command(entry) => Ok(entry),
            Lookup::NoSuchServiceAction => Err(NO_SUCH_SERVICE_ACTION),
            Lookup::NoSuchOpcode => Err(NO_SUCH_OPCODE),
        }
    }
}

const NO_SUCH_SERVICE_ACTION: Sense = Sense::field(1, Some(4));
const NO_SUCH_OPCODE: Sense = Sense::illegal(SenseCode::INVALID_OPERATION_CODE);
