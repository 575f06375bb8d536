//! Sessions of initiators.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::VolumeName;

/// The protocol of a session.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// iSCSI.
    Iscsi,
    /// NVMe/TCP.
    Nvme,
    /// vhost-user: a virtual machine on the node's machine.
    VhostUser,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Iscsi => "iSCSI",
            Self::Nvme => "NVMe/TCP",
            Self::VhostUser => "vhost-user",
        })
    }
}

/// One initiator's session: an iSCSI session, an NVMe controller with its queues, or a virtual
/// machine at its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Its protocol.
    pub protocol: Protocol,
    /// Name of the initiator.
    pub initiator: String,
    /// Address of the initiator, `ip:port`; of a virtual machine the node's socket.
    pub peer: String,
    /// Name of the target or subsystem it is logged in to; of a virtual machine its volume.
    pub target: String,
    /// The volumes it reaches; none for a discovery session, and for one whose volumes were taken
    /// away.
    pub volumes: Vec<VolumeName>,
    /// Connections (iSCSI) or queues (NVMe/TCP) of the session.
    pub connections: u32,
    /// Whether it is protected by TLS.
    #[serde(default)]
    pub tls: bool,
    /// Core that serves it.
    pub core: u32,
    /// Age in seconds.
    pub age_s: u64,
}

/// All sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionList {
    /// The sessions.
    pub sessions: Vec<Session>,
}
