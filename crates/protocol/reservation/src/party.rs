//! Who registers and reserves.

/// Longest name of an iSCSI initiator in bytes (RFC 7143 4.2.7.1).
pub const MAX_NAME: usize = 223;

/// An initiator port, or a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Initiator {
    /// An iSCSI initiator port: the initiator's name and its part of the session's identity (RFC
    /// 7143 4.4.1).
    Iscsi {
        /// The name in the form in which names are compared: lower case.
        name: String,
        /// The ISID of the session.
        isid: [u8; 6],
    },
    /// An NVMe host by its host identifier.
    Host([u8; 16]),
}

impl Initiator {
    /// Whether it can stand in a table: a name has 1 to [`MAX_NAME`] bytes and no control
    /// characters. What else makes a name an iSCSI name is the transport's to check.
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

/// One that registers and reserves: in SCSI an I_T nexus, in NVMe a host, whatever controller it
/// comes through.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party {
    /// The initiator port or the host.
    pub initiator: Initiator,
    /// Relative target port identifier of the target port; 0 for NVMe.
    pub port: u16,
}

impl Party {
    /// No party of any volume, for changes that an administrator makes.
    pub const NOBODY: Self = Self { initiator: Initiator::Host([0; 16]), port: 0 };

    /// The virtual machines beside a node, which have no commands to register by: as no host has this identifier, nor
    /// a host such a port, they never have a part in a reservation.
    pub const GUEST: Self = Self { initiator: Initiator::Host([0; 16]), port: u16::MAX };
}
