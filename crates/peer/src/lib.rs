//! The link between the replicas of a volume (RFD 0010, 8).
//!
//! * [`Message`]: what replicas say to each other, as types.
//! * [`Link`]: where a replica leaves what it says to another one while their session lasts.
//!
//! Nothing is sent twice: when a connection breaks its session ends, and the primary of the volume
//! begins a new [`View`] in the next one, in which everything unanswered is asked again.

mod id;
mod link;
mod message;

pub use id::{Incarnation, NodeId, Seq, Stamp, Tag, View};
pub use link::{Link, Outbox};
pub use message::{Change, Entry, Kind, Lane, Message, Outcome, Received, Role, Standing};
