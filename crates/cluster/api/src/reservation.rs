//! Reservations of a volume.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The reservations of a volume: what initiators have agreed among themselves, to keep each other
/// out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reservations {
    /// What kind of persistent reservation there is, if there is one:
    /// `write exclusive, registrants only` and the like.
    pub kind: Option<String>,
    /// Who has registered.
    pub registrations: Vec<Registration>,
    /// Whether registrations outlive a loss of power of all nodes (APTPL).
    pub persists: bool,
    /// Who has the volume for himself by SCSI's older RESERVE.
    pub reserved_by: Option<String>,
}

/// An initiator that has registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// iSCSI: name of the initiator and its session's ISID; NVMe: the host's identifier.
    pub initiator: String,
    /// Relative identifier of the target port, which is the node's number among those that serve
    /// the volume; 0 for NVMe.
    pub port: u16,
    /// Its key, in hexadecimal digits.
    pub key: String,
    /// Whether it holds the reservation.
    pub holds: bool,
}
