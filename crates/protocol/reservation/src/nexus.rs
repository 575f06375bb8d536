//! I_T nexuses, which register and reserve.

/// Longest name of an iSCSI initiator in bytes (RFC 7143 4.2.7.1).
pub const MAX_NAME: usize = 223;

/// An initiator port, or a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Initiator {
    /// An iSCSI initiator port: the initiator's name and ISID (RFC 7143 4.4.1).
    Iscsi {
        /// The name in its canonical form: lower case.
        name: String,
        /// The ISID of the session.
        isid: [u8; 6],
    },
    /// An NVMe host by its host identifier.
    Host([u8; 16]),
}

impl Initiator {
    /// Whether it can be stored in a table: a name has 1 to [`MAX_NAME`] bytes and no control
    /// characters. The transport checks whether it is a valid iSCSI name.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        match self {
            Self::Iscsi { name, .. } => {
                (1..=MAX_NAME).contains(&name.len()) && !name.contains(char::is_control)
            }
            Self::Host(_) => true,
        }
    }
}

/// What registers and reserves: in SCSI an I_T nexus, in NVMe a host, through any controller.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItNexus {
    /// The initiator port or the host.
    pub initiator: Initiator,
    /// Relative target port identifier of the target port; 0 for NVMe.
    pub port: u16,
}

impl ItNexus {
    /// The author of changes by an administrator; it is no initiator of any volume.
    pub const ADMINISTRATOR: Self = Self { initiator: Initiator::Host([0; 16]), port: 0 };

    /// Virtual machines on this node, which have no commands to register: no host has this
    /// identifier, nor a host such a port, so they never take part in a reservation.
    pub const GUEST: Self = Self { initiator: Initiator::Host([0; 16]), port: u16::MAX };
}
