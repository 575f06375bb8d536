//! Data of reservation commands (NVMe Base 2.0, 7.2 to 7.5).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

wire::open_enum! {
    /// RREGA of Reservation Register.
    pub enum RegisterAction: u8 {
        /// Register.
        Register = 0,
        /// Unregister.
        Unregister = 1,
        /// Replace.
        Replace = 2,
    }
}

wire::open_enum! {
    /// RACQA of Reservation Acquire.
    pub enum AcquireAction: u8 {
        /// Acquire.
        Acquire = 0,
        /// Preempt.
        Preempt = 1,
        /// Preempt and Abort.
        PreemptAndAbort = 2,
    }
}

wire::open_enum! {
    /// RRELA of Reservation Release.
    pub enum ReleaseAction: u8 {
        /// Release.
        Release = 0,
        /// Clear.
        Clear = 1,
    }
}

/// Data of Reservation Register and Reservation Acquire.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReservationKeys {
    /// CRKEY: the host's key.
    pub current: U64,
    /// NRKEY, the key that it takes; PRKEY, the key of those that it preempts.
    pub other: U64,
}

/// Header of Reservation Report (EDS set).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReportHeader {
    /// GEN: counts registrations, clears and preempts.
    pub generation: U32,
    /// RTYPE; 0 if there is no reservation.
    pub kind: u8,
    /// REGCTL: registrants that follow.
    pub registrants: U16,
    /// Reserved.
    pub reserved7: [u8; 2],
    /// PTPLS: 1 if registrations persist through power loss.
    pub persist: u8,
    /// Reserved.
    pub reserved10: [u8; 54],
}
const _: () = assert!(size_of::<ReportHeader>() == 64);

/// A registrant in Reservation Report (EDS set).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReportRegistrant {
    /// CNTLID; FFFFh where controllers are dynamic.
    pub cntlid: U16,
    /// RCSTS: bit 0 if it holds the reservation.
    pub status: u8,
    /// Reserved.
    pub reserved3: [u8; 5],
    /// RKEY.
    pub key: U64,
    /// HOSTID.
    pub host_id: [u8; 16],
    /// Reserved.
    pub reserved32: [u8; 32],
}
const _: () = assert!(size_of::<ReportRegistrant>() == 64);
