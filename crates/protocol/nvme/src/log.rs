//! Log pages (NVMe Base 2.0, 5.16.1).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

wire::open_enum! {
    /// LID: log identifier.
    pub enum LogId: u8 {
        /// Supported Log Pages.
        Supported = 0x00,
        /// Error Information.
        Errors = 0x01,
        /// SMART / Health Information.
        Health = 0x02,
        /// Firmware Slot Information.
        Firmware = 0x03,
        /// Changed Namespace List.
        ChangedNamespaces = 0x04,
        /// Commands Supported and Effects.
        Effects = 0x05,
        /// Asymmetric Namespace Access.
        Ana = 0x0c,
        /// Feature Identifiers Supported and Effects.
        FeatureEffects = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        ManagementEffects = 0x13,
        /// Discovery.
        Discovery = 0x70,
        /// Reservation Notification.
        Reservations = 0x80,
    }
}

/// One entry of the Error Information log (LID 01h).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ErrorEntry {
    /// Number of the error, from 1.
    pub count: U64,
    /// Queue of the command.
    pub sqid: U16,
    /// Its identifier.
    pub cid: U16,
    /// Its status field, shifted left by one.
    pub status: U16,
    /// Wrong byte (7:0) and bit (10:8) of the command; FFFFh: none.
    pub location: U16,
    /// First block concerned.
    pub lba: U64,
    /// Namespace concerned.
    pub nsid: U32,
    /// Vendor specific information available: none.
    pub vendor: u8,
    /// Transport: TCP.
    pub trtype: u8,
    /// Reserved.
    pub reserved: [u8; 2],
    /// Command and transport specific information.
    pub information: [u8; 32],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

/// SMART / Health Information (LID 02h)(the fields supported here).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Health {
    /// Critical warnings.
    pub critical_warning: u8,
    /// Composite temperature in kelvins; 0: not reported.
    pub temperature: U16,
    /// Spare capacity left, in percent.
    pub available_spare: u8,
    /// Threshold of that.
    pub spare_threshold: u8,
    /// Wear in percent.
    pub percentage_used: u8,
    /// Endurance group warnings.
    pub endurance_warnings: u8,
    /// Reserved.
    pub reserved: [u8; 25],
    /// Data read, in thousands of 512 bytes.
    pub data_units_read: [U64; 2],
    /// Data written, likewise.
    pub data_units_written: [U64; 2],
    /// Read and compare commands.
    pub host_reads: [U64; 2],
    /// Write commands.
    pub host_writes: [U64; 2],
    /// Busy time, power cycles, power on hours, unsafe shutdowns, media errors.
    pub not_reported: [[U64; 2]; 5],
    /// Entries ever made in the error log.
    pub error_entries: [U64; 2],
    /// Temperatures and times.
    pub reserved2: [u8; 320],
}
const _: () = assert!(size_of::<Health>() == 512);
const _: () = assert!(offset_of!(Health, data_units_read) == 32);
const _: () = assert!(offset_of!(Health, error_entries) == 176);

impl Health {
    /// A log of zeroes.
    #[must_use]
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

/// Length of the Firmware Slot Information log (LID 03h) in bytes.
pub const FIRMWARE_BYTES: u64 = 512;

/// Most namespaces in the Changed Namespace List (LID 04h).
pub const MAX_CHANGED: usize = 1024;

/// Length of the Commands Supported and Effects log (LID 05h) in bytes: 256 admin and 256 I/O
/// opcodes, then reserved space.
pub const EFFECTS_BYTES: u64 = 4096;

/// Header of the Asymmetric Namespace Access log (LID 0Ch).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AnaHeader {
    /// Number of changes so far.
    pub change_count: U64,
    /// Number of group descriptors.
    pub groups: U16,
    /// Reserved.
    pub reserved: [u8; 6],
}
const _: () = assert!(size_of::<AnaHeader>() == 16);

/// A group descriptor of that log; namespace identifiers follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AnaGroup {
    /// Group identifier.
    pub group: U32,
    /// Number of namespaces.
    pub namespaces: U32,
    /// Change count of the group's last change.
    pub change_count: U64,
    /// An [`AnaState`].
    pub state: u8,
    /// Reserved.
    pub reserved: [u8; 15],
}
const _: () = assert!(size_of::<AnaGroup>() == 32);

/// Reservation Notification (LID 80h).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReservationEntry {
    /// Counts the entries of the controller, from 1; 0 if there is none.
    pub count: U64,
    /// A [`ReservationNotificationType`].
    pub kind: u8,
    /// How many entries there are behind this one.
    pub available: u8,
    /// Reserved.
    pub reserved: [u8; 2],
    /// Namespace concerned.
    pub nsid: U32,
    /// Reserved.
    pub reserved16: [u8; 48],
}
const _: () = assert!(size_of::<ReservationEntry>() == 64);

wire::open_enum! {
    /// Change of a host's registration or reservation
    pub enum ReservationNotificationType: u8 {
        /// There is no entry.
        None = 0,
        /// Registration Preempted.
        RegistrationPreempted = 1,
        /// Reservation Released.
        ReservationReleased = 2,
        /// Reservation Preempted.
        ReservationPreempted = 3,
    }
}

wire::open_enum! {
    /// Access state of the namespaces of a group
    pub enum AnaState: u8 {
        /// Optimized path.
        Optimized = 0x1,
        /// Works, but another path is better.
        NonOptimized = 0x2,
        /// Currently inaccessible.
        Inaccessible = 0x3,
        /// Permanently inaccessible.
        PersistentLoss = 0x4,
        /// In transition to another state.
        Change = 0xf,
    }
}

/// Header of the Discovery log (LID 70h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DiscoveryHeader {
    /// Generation of the log.
    pub generation: U64,
    /// Number of records.
    pub records: U64,
    /// Format of the records.
    pub format: U16,
    /// Reserved.
    pub reserved: [u8; 1006],
}
const _: () = assert!(size_of::<DiscoveryHeader>() == 1024);

/// A record of the Discovery log.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DiscoveryRecord {
    /// Transport type; 3 is TCP.
    pub trtype: u8,
    /// Address family; 1 is IPv4, 2 is IPv6.
    pub adrfam: u8,
    /// Kind of the subsystem.
    pub subtype: u8,
    /// Transport requirements.
    pub treq: u8,
    /// Port identifier.
    pub portid: U16,
    /// Controller identifier; FFFFh for the dynamic controller model.
    pub cntlid: U16,
    /// Largest admin queue in entries.
    pub asqsz: U16,
    /// Flags of discovery subsystems.
    pub eflags: U16,
    /// Reserved.
    pub reserved12: [u8; 20],
    /// Port number, as text padded with spaces.
    pub trsvcid: [u8; 32],
    /// Reserved.
    pub reserved64: [u8; 192],
    /// NQN of the subsystem, NUL terminated.
    pub subnqn: [u8; 256],
    /// Address, as text padded with spaces.
    pub traddr: [u8; 256],
    /// Transport specific: the first byte is the security type, 0 is none.
    pub tsas: [u8; 256],
}
const _: () = assert!(size_of::<DiscoveryRecord>() == 1024);
const _: () = assert!(offset_of!(DiscoveryRecord, subnqn) == 256);

impl DiscoveryRecord {
    /// A record of zeroes.
    #[must_use]
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }
}
