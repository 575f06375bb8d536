//! Identify data structures (NVMe Base 2.0, 5.17; NVM Command Set 1.0, 4.1.5).

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of every Identify data structure in bytes.
pub const IDENTIFY_BYTES: u32 = 4096;

wire::open_enum! {
    /// CNS: structure that Identify returns.
    pub enum Cns: u8 {
        /// A namespace, as the NVM command set sees it.
        Namespace = 0x00,
        /// The controller.
        Controller = 0x01,
        /// Active namespaces.
        ActiveNamespaces = 0x02,
        /// Identifiers of a namespace.
        Descriptors = 0x03,
        /// A namespace, what is specific to a command set.
        CommandSetNamespace = 0x05,
        /// The controller, what is specific to a command set.
        CommandSetController = 0x06,
        /// Active namespaces of a command set.
        CommandSetActiveNamespaces = 0x07,
        /// A namespace, what is common to all command sets.
        IndependentNamespace = 0x08,
        /// Combinations of command sets.
        CommandSets = 0x1c,
    }
}

/// Identify Controller (CNS 01h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)] // the names are those of the specification's figure 276
pub struct IdentifyController {
    pub vid: U16,
    pub ssvid: U16,
    pub sn: [u8; 20],
    pub mn: [u8; 40],
    pub fr: [u8; 8],
    pub rab: u8,
    pub ieee: [u8; 3],
    pub cmic: u8,
    pub mdts: u8,
    pub cntlid: U16,
    pub ver: U32,
    pub rtd3r: U32,
    pub rtd3e: U32,
    pub oaes: U32,
    pub ctratt: U32,
    pub reserved100: [u8; 11],
    pub cntrltype: u8,
    pub fguid: [u8; 16],
    pub crdt: [U16; 3],
    pub reserved134: [u8; 122],
    pub oacs: U16,
    pub acl: u8,
    pub aerl: u8,
    pub frmw: u8,
    pub lpa: u8,
    pub elpe: u8,
    pub npss: u8,
    pub avscc: u8,
    pub apsta: u8,
    pub wctemp: U16,
    pub cctemp: U16,
    pub reserved270: [u8; 50],
    pub kas: U16,
    pub reserved322: [u8; 20],
    pub anatt: u8,
    pub anacap: u8,
    pub anagrpmax: U32,
    pub nanagrpid: U32,
    pub reserved352: [u8; 34],
    /// NVMe Base 2.1.
    pub cqt: U16,
    pub reserved388: [u8; 124],
    pub sqes: u8,
    pub cqes: u8,
    pub maxcmd: U16,
    pub nn: U32,
    pub oncs: U16,
    pub fuses: U16,
    pub fna: u8,
    pub vwc: u8,
    pub awun: U16,
    pub awupf: U16,
    pub icsvscc: u8,
    pub nwpc: u8,
    pub acwu: U16,
    pub ocfs: U16,
    pub sgls: U32,
    pub mnan: U32,
    pub reserved544: [u8; 224],
    pub subnqn: [u8; 256],
    pub reserved1024: [u8; 768],
    pub ioccsz: U32,
    pub iorcsz: U32,
    pub icdoff: U16,
    pub fcatt: u8,
    pub msdbd: u8,
    pub ofcs: U16,
    pub dctype: u8,
    pub reserved1807: [u8; 241],
    pub psd0_mp: U16,
    pub reserved2050: [u8; 2046],
}
const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY_BYTES as usize);
const _: () = assert!(offset_of!(IdentifyController, cntrltype) == 111);
const _: () = assert!(offset_of!(IdentifyController, oacs) == 256);
const _: () = assert!(offset_of!(IdentifyController, kas) == 320);
const _: () = assert!(offset_of!(IdentifyController, anagrpmax) == 344);
const _: () = assert!(offset_of!(IdentifyController, cqt) == 386);
const _: () = assert!(offset_of!(IdentifyController, sqes) == 512);
const _: () = assert!(offset_of!(IdentifyController, sgls) == 536);
const _: () = assert!(offset_of!(IdentifyController, subnqn) == 768);
const _: () = assert!(offset_of!(IdentifyController, ioccsz) == 1792);
const _: () = assert!(offset_of!(IdentifyController, psd0_mp) == 2048);

/// Identify Namespace for the NVM command set (CNS 00h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)] // the names are those of NVM Command Set 1.0, figure 97
pub struct IdentifyNamespace {
    pub nsze: U64,
    pub ncap: U64,
    pub nuse: U64,
    pub nsfeat: u8,
    pub nlbaf: u8,
    pub flbas: u8,
    pub mc: u8,
    pub dpc: u8,
    pub dps: u8,
    pub nmic: u8,
    pub rescap: u8,
    pub fpi: u8,
    pub dlfeat: u8,
    pub nawun: U16,
    pub nawupf: U16,
    pub nacwu: U16,
    pub nabsn: U16,
    pub nabo: U16,
    pub nabspf: U16,
    pub noiob: U16,
    pub nvmcap: [u8; 16],
    pub npwg: U16,
    pub npwa: U16,
    pub npdg: U16,
    pub npda: U16,
    pub nows: U16,
    pub mssrl: U16,
    pub mcl: U32,
    pub msrc: u8,
    pub reserved81: [u8; 11],
    pub anagrpid: U32,
    pub reserved96: [u8; 3],
    pub nsattr: u8,
    pub nvmsetid: U16,
    pub endgid: U16,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub lbaf: [LbaFormat; 64],
    pub vendor: [u8; 3712],
}
const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_BYTES as usize);
const _: () = assert!(offset_of!(IdentifyNamespace, mssrl) == 74);
const _: () = assert!(offset_of!(IdentifyNamespace, anagrpid) == 92);
const _: () = assert!(offset_of!(IdentifyNamespace, nguid) == 104);
const _: () = assert!(offset_of!(IdentifyNamespace, lbaf) == 128);

/// An LBA format.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LbaFormat {
    /// Metadata bytes per block.
    pub ms: U16,
    /// Block size as a power of two.
    pub lbads: u8,
    /// Relative performance; 0 is best.
    pub rp: u8,
}

/// Identify Namespace, independent of the command set (CNS 08h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)] // the names are those of NVMe Base 2.0, figure 280
pub struct IndependentNamespace {
    pub nsfeat: u8,
    pub nmic: u8,
    pub rescap: u8,
    pub fpi: u8,
    pub anagrpid: U32,
    pub nsattr: u8,
    pub reserved9: u8,
    pub nvmsetid: U16,
    pub endgid: U16,
    pub nstat: u8,
    pub reserved15: u8,
}
const _: () = assert!(size_of::<IndependentNamespace>() == 16);

/// Identify Controller for the NVM command set (CNS 06h).
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs)] // the names are those of NVM Command Set 1.0, figure 102
pub struct NvmController {
    pub vsl: u8,
    pub wzsl: u8,
    pub wusl: u8,
    pub dmrl: u8,
    pub dmrsl: U32,
    pub dmsl: U64,
}
const _: () = assert!(size_of::<NvmController>() == 16);

impl IdentifyController {
    /// A structure of zeroes.
    #[must_use]
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }
}

impl IdentifyNamespace {
    /// A structure of zeroes: an inactive namespace.
    #[must_use]
    pub fn zeroed() -> Self {
        Self::new_zeroed()
    }
}
