//! The owner of a volume.
//!
//! A [`Volume`] lives on one core and owns every command from the moment it accepts it to its
//! completion: a connection that dies abandons the answer, never the I/O. It
//! * admits a command once its worst case of memory is promised ([`block::Credit`]),
//! * serialises overlapping commands of which one writes, in order of arrival ([`block::RangeLocks`]),
//! * composes what front ends ask ([`block::Request`]) from the six operations ([`compose`]),
//! * judges every command by the reservations of all nodes ([`Gate`], RFD 0013),
//! * shares flushes, aborts on request, counts and measures ([`stats`]).
//!
//! # Invariants
//! * Below a volume no two overlapping operations run at once if one of them writes.
//! * A change of the reservations is answered when nothing that it forbids is under way any more, at any node.
//! * COMPARE AND WRITE holds its range from the comparison to the end of the write, OR WRITE from the
//!   reading. Where other nodes use the device too, OR WRITE compares and writes what it has read.
//! * Every accepted command is answered exactly once, also when it was aborted.

mod command;
mod compose;
mod gate;
mod reservations;
mod stats;
mod volume;

pub use command::Command;
pub use gate::{Caller, Gate, Listener, Need, Source, Standing};
pub use reservations::Unaltered;
pub use stats::{Kind, KindStats, Snapshot};
pub use volume::{Begun, Volume};
