//! SCSI for direct-access block devices (SAM-5, SPC-4, SBC-3): commands, sense data, VPD and mode
//! pages. Pure: bytes in, decisions out; no I/O, no clock, no waiting.
//!
//! A [`LogicalUnit`] is the state shared by all initiators of one volume. Its driver processes a
//! command in three steps:
//!
//! ```text
//! admit(nexus, arrival) -> Reply | Accept(command)      checks whether it is valid and allowed
//!     get command.data_out() bytes from the initiator
//! start(nexus, command, data) -> Reply | Run(request)   makes the request to the volume
//!     have the volume execute the request
//! finish(running, result) -> Reply | Run(request)       makes the reply to the initiator
//! ```
//!
//! Anything but a request to one volume (changing or reading the shared state, a copy, a token) is
//! a [`Step`] of its own, which says how the driver must finish it.
//!
//! Commands for addresses without a unit are answered by [`answer_absent`], those for a unit that
//! is not available now by [`answer_unavailable`]. Every command and every bit that it uses is in
//! one table (`opcodes`), which drives both parsing and REPORT SUPPORTED OPERATION CODES.
//! `docs/conformance/scsi.md` says which clause is tested where.

mod absent;
mod alua;
mod capacity;
mod cdb;
mod command;
mod command_table;
mod copy;
mod copy_commands;
mod defects;
mod designator;
mod diagnostics;
mod failure;
mod format;
mod inquiry;
mod lifecycle;
mod limits;
mod log;
mod lun;
mod mode;
mod mode_parameters;
mod nexus;
mod opcodes;
mod persistent_reservations;
mod port_groups;
mod power;
mod provisioning;
mod reply;
mod reservation_encoding;
mod rw;
mod sense;
mod space;
mod status;
mod supported;
mod text;
mod unit;
mod verify;
mod vpd;

pub use absent::{Unavailability, answer as answer_absent, answer_unavailable};
pub use command::{
    Admission, AdmittedCommand, ReceivedCommand, RunningCommand, SharedUnitState, Step,
};
pub use copy::{
    CopyFault, CopyHandle, CopyIoError, CopyOutcome, CopyPlan, CopyRange, CopySegment, Cscd,
    CscdTarget, PresentedToken, ROD_TOKEN_LEN, RodToken, Side, TOKEN_LIFETIME_S, TokenFault,
    TokenPlan, TokenRequest, TokenResult,
};
pub use lun::{Address, Lun};
pub use nexus::{
    AttentionScope, MAX_NEXUSES, Nexus, NexusId, TargetPort, TooManyNexuses, UnitAttention,
};
pub use port_groups::PortGroup;
pub use reply::{DataIn, Reply, TransferLengths};
pub use sense::{
    CopyFailurePoint, CopyFieldPointer, CscdAnswer, FieldPointer, SENSE_MAX, Sense, SenseBytes,
    SenseCode, SenseFormat, SenseKey,
};
pub use status::Status;
pub use unit::{LogicalUnit, UnitConfig};

/// The name of the command that begins with these bytes, for logs and traces.
#[must_use]
pub fn command_name(cdb: &[u8]) -> &'static str {
    opcodes::TABLE.lookup(cdb::Cdb::new(cdb)).map_or("unknown command", |entry| entry.name)
}
