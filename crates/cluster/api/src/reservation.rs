//! Reservations of a volume.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The reservations of a volume: what initiators have agreed among themselves, to keep each other
/// out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reservations {
    /// Type of the persistent reservation, if there is one, such as
    /// `write exclusive, registrants only`.
    pub reservation_type: Option<String>,
    /// Who has registered.
    pub registrations: Vec<Registration>,
    /// Whether registrations outlive a loss of power of all nodes (APTPL).
    pub aptpl: bool,
    /// Initiator that has reserved the volume by RESERVE (SPC-2).
    pub spc2_holder: Option<String>,
}

/// An initiator that has registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// iSCSI: name of the initiator and its session's ISID; NVMe: the host's identifier.
    pub initiator: String,
    /// Relative identifier of the target port, which is the node's number among those that serve
    /// the volume; 0 for NVMe.
    pub relative_port_id: u16,
    /// Its key, in hexadecimal digits.
    pub key: String,
    /// Whether it holds the reservation.
    pub holder: bool,
}
