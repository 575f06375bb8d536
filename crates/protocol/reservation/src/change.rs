//! Changes of the reservation table that can be requested, and why one is refused.

use crate::nexus::{Initiator, ItNexus};
use crate::table::ReservationType;

/// A requested change of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// REGISTER, REGISTER AND IGNORE EXISTING KEY: register, replace the key, or unregister (SPC-4
    /// 5.12.7).
    Register {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY; 0 unregisters.
        new_key: u64,
        /// AND IGNORE EXISTING KEY: `key` is ignored.
        ignore_key: bool,
        /// APTPL.
        persist: bool,
        /// ALL_TG_PT: all target ports. Empty: only the one of the command.
        ports: Vec<u16>,
        /// SPEC_I_PT: further initiators to register. Empty: none.
        other_initiators: Vec<Initiator>,
    },
    /// Reservation Register of an NVMe host (NVMe Base 2.0, 7.3).
    NvmeRegister {
        /// RREGA with its keys.
        action: NvmeRegisterAction,
        /// CPTPL: whether registrations survive a loss of power from now on; `None` leaves it
        /// unchanged.
        persist: Option<bool>,
    },
    /// Whether registrations survive a loss of power (NVMe Base 2.0, 5.27.1.27).
    SetPersistence(bool),
    /// RESERVE (SPC-4 5.12.9).
    Reserve {
        /// RESERVATION KEY.
        key: u64,
        /// TYPE.
        kind: ReservationType,
    },
    /// RELEASE (SPC-4 5.12.11.2.2).
    Release {
        /// RESERVATION KEY.
        key: u64,
        /// TYPE.
        kind: ReservationType,
    },
    /// CLEAR (SPC-4 5.12.11.2.7).
    Clear {
        /// RESERVATION KEY.
        key: u64,
    },
    /// PREEMPT, PREEMPT AND ABORT (SPC-4 5.12.11.2.4 to 5.12.11.2.6).
    Preempt {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY.
        preempt_key: u64,
        /// TYPE; `None` if it is unknown, which matters only where a reservation is replaced.
        kind: Option<ReservationType>,
        /// AND ABORT.
        abort: bool,
    },
    /// REGISTER AND MOVE (SPC-4 5.12.8).
    RegisterAndMove {
        /// RESERVATION KEY.
        key: u64,
        /// SERVICE ACTION RESERVATION KEY.
        new_key: u64,
        /// The new holder of the reservation.
        to: ItNexus,
        /// UNREG.
        unregister: bool,
        /// APTPL.
        persist: bool,
    },
    /// RESERVE(6), (10) (SPC-2 7.20, 7.21).
    Spc2Reserve,
    /// RELEASE(6), (10) (SPC-2 7.16, 7.17).
    Spc2Release,
    /// The nexus is lost (SAM-5 6.3.4). Registrations survive that.
    NexusLoss,
    /// Sets the mode pages.
    SetModePages(u128),
    /// All commands of the unit are aborted (CLEAR TASK SET, SAM-5 7.5).
    ClearTaskSet,
    /// The unit was reset (SAM-5 6.3.2, 6.3.3). Registrations and the reservation survive that.
    Reset {
        /// With all units of its target.
        whole_target: bool,
    },
    /// An administrator removes all registrations and reservations of the volume; the requesting
    /// nexus does not matter.
    AdminClear,
}

/// The action of Reservation Register. A key that is `None` is ignored (IEKEY).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmeRegisterAction {
    /// Register: a registered host may repeat this with the same key.
    Register {
        /// NRKEY.
        new_key: u64,
    },
    /// Unregister.
    Unregister {
        /// CRKEY.
        key: Option<u64>,
    },
    /// Replace.
    Replace {
        /// CRKEY.
        key: Option<u64>,
        /// NRKEY.
        new_key: u64,
    },
}

/// Why nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationError {
    /// RESERVATION CONFLICT.
    #[error("a reservation conflict")]
    Conflict,
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    #[error("not the type of the reservation")]
    InvalidRelease,
    /// A field has a value that is not allowed here.
    #[error("an invalid field: {0:?}")]
    InvalidField(InvalidField),
    /// INSUFFICIENT REGISTRATION RESOURCES.
    #[error("no space for more registrations")]
    InsufficientResources,
}

/// An invalid field. All but the last two are in SCSI's parameter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InvalidField {
    /// SERVICE ACTION RESERVATION KEY.
    NewKey,
    /// SPEC_I_PT.
    SpecIPt,
    /// A TransportID.
    TransportId,
    /// TYPE, in the CDB.
    Type,
    /// SERVICE ACTION, in the CDB.
    ServiceAction,
}
