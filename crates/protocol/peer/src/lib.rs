//! The protocol between the replicas of a volume (RFD 0010, 8).
//!
//! * [`Message`]: the messages, as types.
//! * [`Link`]: sends messages to another replica while their session lasts.
//! * [`Endpoint`]: maintains the sessions of a replica; delivers to a [`SessionHandler`].
//! * [`IncomingConnection`]: an accepted connection, on its way to the replica that it asks for.
//! * [`frame`]: the wire format, `docs/format/peer.md`.
//!
//! No message is sent twice: when a connection breaks its session ends, and the primary of the
//! volume begins a new [`View`] in the next session, in which every unanswered request is sent
//! again.

mod connection_purpose;
mod endpoint;
pub mod frame;
mod handshake;
mod id;
mod link;
mod message;
mod refusal_log;
pub mod session;
mod session_driver;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;
mod unauthenticated;

pub use connection_purpose::ConnectionPurpose;
pub use endpoint::{Endpoint, PeerAddresses};
pub use handshake::{DetachedConnection, HandshakeError, IncomingConnection, accept_connections};
pub use id::{
    ClockStamp, DataGeneration, Incarnation, NodeId, PeerGenerations, Seq, View, WriteId,
};
pub use link::{Link, Outbox, PostedMemory, PostedReceive};
pub use message::{
    CompareAndWriteOutcome, Lane, Message, PreparedEntry, ReceivedMessage, ReplicaReport, Role,
    WriteKind, WriteOp,
};
pub use session::{PeerIdentity, PeerSecret};
pub use session_driver::{PeerSessionEnd, SessionHandler};
pub use tls::{Tls, TlsConfigError};

/// Stands for no session: messages of a lease connection have this number. Sessions count from 1.
pub const NO_SESSION: u64 = 0;
