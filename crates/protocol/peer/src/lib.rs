//! The link between the replicas of a volume (RFD 0010, 8).
//!
//! * [`Message`]: what replicas say to each other, as types.
//! * [`Link`]: where a replica leaves what it says to another one while their session lasts.
//! * [`Endpoint`]: a replica's end of its sessions; delivers to a [`Handler`].
//! * [`Greeting`]: a connection that came in, on its way to the replica that it asks for.
//! * [`frame`]: what goes over the wire, `docs/format/peer.md`.
//!
//! Nothing is sent twice: when a connection breaks its session ends, and the primary of the volume
//! begins a new [`View`] in the next one, in which everything unanswered is asked again.

mod driver;
mod endpoint;
pub mod frame;
mod greeting;
mod id;
mod line;
mod link;
mod message;
mod refused;
pub mod session;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;
mod unproven;

pub use driver::{End, Handler};
pub use endpoint::{Endpoint, PeerAddresses};
pub use greeting::{DetachedGreeting, Greeting, Unjoined, receive_greetings};
pub use id::{Incarnation, Lineage, NodeId, Seq, SharedLineage, Stamp, Tag, View};
pub use line::Line;
pub use link::{Expected, Expecting, Link, Outbox};
pub use message::{Change, Entry, Kind, Lane, Message, Outcome, Received, Role, Standing};
pub use session::{Identity, Secret};
pub use tls::{BadTls, Tls};

/// The number of no session: that of messages which came over a lease connection. Sessions count
/// from 1.
pub const NO_SESSION: u64 = 0;
