//! Accepts and executes the commands of a volume.
//!
//! A [`Volume`] belongs to one core and owns every command from acceptance to completion: a
//! connection that breaks abandons the answer, never the I/O. It
//! * admits a command once its worst-case memory is reserved ([`block::Credit`]),
//! * serialises overlapping commands of which one writes, in order of arrival
//!   ([`block::RangeLocks`]),
//! * composes front-end requests ([`block::Request`]) from device operations,
//! * checks every command against the reservations of all nodes ([`ReservationGate`], RFD 0013),
//!
//! # Invariants
//! * Below a volume no two overlapping operations run at once if one of them writes.
//! * A change of the reservations is answered once no command that it forbids is in flight on any
//!   node.
//! * COMPARE AND WRITE locks its range from the comparison to the end of the write, OR WRITE from
//!   the read. Where other nodes use the device too, OR WRITE compares before it writes.
//! * Every accepted command is answered exactly once, even if aborted.

mod command;
mod compose;
mod reservation_gate;
mod reservation_state;
mod reservations;
mod stats;
mod volume;

pub use command::Command;
pub use reservation_gate::{
    ContextSource, DataAccess, NotificationListener, ReservationContext, ReservationGate,
    VolumeClient,
};
pub use reservations::ReservationChangeError;
pub use stats::{CommandKind, CommandStats, VolumeStats};
pub use volume::{StartOutcome, Volume};
