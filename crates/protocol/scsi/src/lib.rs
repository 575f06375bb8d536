//! SCSI as a direct-access block device speaks it (SAM-5, SPC-4, SBC-3): commands, sense data,
//! VPD and mode pages. Pure: bytes in, decisions out; no I/O, no clock, no waiting.
//!
//! A [`LogicalUnit`] is what all initiators of one volume share. Its driver takes a command
//! through three steps:
//!
//! ```text
//! admit(nexus, arrival) -> Reply | Accept(command)      is it well-formed and allowed?
//!     get command.data_out() bytes from the initiator
//! start(nexus, command, data) -> Reply | Run(request)   what is to be done?
//!     have the volume do the request
//! finish(running, result) -> Reply | Run(request)       what is to be said?
//! ```
//!
//! What is no request of one volume (a change or a look at what all nodes know, a copy, a token) is a [`Step`] of its own,
//! which says what is to come back.
//!
//! Commands for addresses without a unit are answered by [`answer_absent`], those for a unit that is
//! not there for now by [`answer_away`]. Every command and
//! every bit it looks at stands in one table (`opcodes`), which parsing goes by and REPORT
//! SUPPORTED OPERATION CODES reports. `docs/conformance/scsi.md` says which clause is tested where.

mod absent;
mod capacity;
mod cdb;
mod copy;
mod defects;
mod diagnose;
mod failure;
mod format;
mod inquiry;
mod limits;
mod log;
mod lun;
mod mode;
mod nexus;
mod opcodes;
mod persistent;
mod ports;
mod power;
mod provisioning;
mod reply;
mod rw;
mod sense;
mod space;
mod supported;
mod unit;
mod verify;
mod vpd;

pub use absent::{Away, answer as answer_absent, answer_away};
pub use copy::{
    CopyEnd, CopyExtent, CopyFault, CopyHandle, CopyOutcome, CopyPlan, CopySegment, CopyTrouble,
    Presented, ROD_TOKEN_LEN, RodToken, Side, TOKEN_LIFETIME_S, TokenFault, TokenOutcome,
    TokenPlan, TokenWork, Whose,
};
pub use lun::{Address, Lun};
pub use nexus::{Attention, MAX_NEXUSES, Nexus, NexusId, TargetPort, TooMany, Whom};
pub use ports::PortGroup;
pub use reply::{Data, Reply, Status, Transfer};
pub use sense::{
    Code, CopyAnswer, CopyField, CopyPoint, FieldPointer, Format, Key, SENSE_MAX, Sense, SenseBytes,
};
pub use unit::{Admission, Arrival, Command, Known, LogicalUnit, LunConfig, Running, Step};

/// What the command that begins with these bytes is called, for logs and traces.
#[must_use]
pub fn command_name(cdb: &[u8]) -> &'static str {
    opcodes::of(cdb::Cdb::new(cdb)).map_or("unknown command", |entry| entry.name)
}
