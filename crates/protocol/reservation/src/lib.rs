//! Reservations: the persistent reservations of SCSI (SPC-4 5.12) and NVMe, and other state that
//! the initiators of one volume share across nodes.
//!
//! All nodes that serve a volume share one [`Table`]. A change is a pure function from the current
//! table to its successor, which is made durable before the command is answered:
//!
//! ```text
//! as_of(power_epoch, is_serving) -> Table           the part of a stored table that is valid now
//! with_change(by, incarnation, change) -> Table     the successor; nothing to do; or a refusal
//! encode() -> bytes, parse(bytes)                   on disk (docs/format/reservations.md)
//! rights(nexus) -> Rights                           what a nexus may do
//! notifications(old, new, nexus) -> Notifications   what it is notified of
//! ```
//!
//! Nothing here does I/O or knows a protocol's bytes. Clauses are those of SPC-4 r37 and, for
//! RESERVE and RELEASE, SPC-2 r20.

mod apply;
mod change;
mod format;
mod nexus;
mod notifications;
mod preempt;
mod register;
mod rights;
mod table;

pub use change::{Change, InvalidField, NvmeRegisterAction, ReservationError};
pub use format::{COPY_BYTES, MAX_REGISTRANTS, TableError};
pub use nexus::{Initiator, ItNexus, MAX_NAME};
pub use notifications::{Notification, Notifications};
pub use rights::Rights;
pub use table::{
    ChangeEffect, LastChange, Registrant, Reservation, ReservationType, Spc2Reservation, Table,
};
