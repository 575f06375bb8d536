//! Submission and completion queue entries (NVMe Base 2.0, 3.3.3).

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Status;

wire::open_enum! {
    /// Opcodes of admin commands (NVMe Base 2.0, 5).
    pub enum AdminOpcode: u8 {
        /// Get Log Page.
        GetLogPage = 0x02,
        /// Identify.
        Identify = 0x06,
        /// Abort.
        Abort = 0x08,
        /// Set Features.
        SetFeatures = 0x09,
        /// Get Features.
        GetFeatures = 0x0a,
        /// Asynchronous Event Request.
        AsyncEventRequest = 0x0c,
        /// Keep Alive.
        KeepAlive = 0x18,
        /// A fabrics command; [`FabricsType`] says which.
        Fabrics = 0x7f,
    }
}

wire::open_enum! {
    /// Opcodes of the NVM command set (NVM Command Set 1.0, 3.2; NVMe Base 2.0, 7).
    pub enum NvmOpcode: u8 {
        /// Flush.
        Flush = 0x00,
        /// Write.
        Write = 0x01,
        /// Read.
        Read = 0x02,
        /// Compare.
        Compare = 0x05,
        /// Write Zeroes.
        WriteZeroes = 0x08,
        /// Dataset Management.
        DatasetManagement = 0x09,
        /// Verify.
        Verify = 0x0c,
        /// Reservation Register.
        ReservationRegister = 0x0d,
        /// Reservation Report.
        ReservationReport = 0x0e,
        /// Reservation Acquire.
        ReservationAcquire = 0x11,
        /// Reservation Release.
        ReservationRelease = 0x15,
        /// Copy.
        Copy = 0x19,
    }
}

wire::open_enum! {
    /// Types of fabrics commands (NVMe Base 2.0, 6).
    pub enum FabricsType: u8 {
        /// Property Set.
        PropertySet = 0x00,
        /// Connect.
        Connect = 0x01,
        /// Property Get.
        PropertyGet = 0x04,
        /// Authentication Send.
        AuthenticationSend = 0x05,
        /// Authentication Receive.
        AuthenticationReceive = 0x06,
        /// Disconnect.
        Disconnect = 0x08,
    }
}

/// NSID that means all namespaces.
pub const NSID_ALL: u32 = 0xffff_ffff;

/// A submission queue entry: a command.
///
/// ```text
///  byte   0       1                       2 .. 3   4 .. 7   8 .. 15   16 .. 23   24 .. 39   40 .. 63
///       +-------+-----------------------+--------+--------+---------+----------+----------+----------+
///       | opcode| FUSE(1:0) .. PSDT(7:6)| CID    | NSID   | CDW2,3  | MPTR     | SGL1     | CDW10-15 |
///       +-------+-----------------------+--------+--------+---------+----------+----------+----------+
/// ```
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Sqe {
    /// [`AdminOpcode`] or [`NvmOpcode`], by the queue.
    pub opcode: u8,
    /// FUSE in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// Command identifier.
    pub cid: U16,
    /// Namespace identifier; in fabrics commands the first byte is the [`FabricsType`].
    pub nsid: U32,
    /// Command dwords 2 and 3.
    pub cdw2: [U32; 2],
    /// Metadata pointer.
    pub mptr: U64,
    /// SGL entry 1: where the data is.
    pub sgl: Sgl,
    /// Command dwords 10 to 15.
    pub cdw10: [U32; 6],
}
const _: () = assert!(size_of::<Sqe>() == 64);

/// PSDT value 01b, in place: SGLs are used, MPTR is an address.
pub const FLAG_SGL: u8 = 0b01 << 6;

/// Which way a command's data goes (NVMe Base 2.0, figure 88: bits 1:0 of the opcode).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// No data.
    None,
    /// Host to controller.
    ToController,
    /// Controller to host.
    ToHost,
    /// Both ways: no supported command.
    Both,
}

/// Role of a command in a fused operation (NVMe Base 2.0, 3.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// Not fused.
    None,
    /// The first command.
    First,
    /// The second command, adjacent to the first.
    Second,
    /// Reserved value.
    Reserved,
}

/// Location of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLocation {
    /// In the capsule.
    InCapsule {
        /// Offset from the start of the in-capsule data, in bytes.
        offset: u64,
        /// Length in bytes.
        length: u32,
    },
    /// In data PDUs of its own.
    Transport {
        /// Length in bytes.
        length: u32,
    },
}

impl Sqe {
    /// An entry of zeroes except opcode, CID and NSID, with a transport SGL of length 0.
    #[must_use]
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        let mut sqe = Self::new_zeroed();
        sqe.opcode = opcode;
        sqe.flags = FLAG_SGL;
        sqe.cid = U16::new(cid);
        sqe.nsid = U32::new(nsid);
        sqe.sgl = Sgl::transport(0);
        sqe
    }

    /// Command dword `10 + index`, for `index` below 6; 0 for others.
    #[must_use]
    pub fn cdw(&self, index: usize) -> u32 {
        self.cdw10.get(index).map_or(0, |d| d.get())
    }

    /// Dwords 10 and 11 as one number: the starting LBA of I/O commands.
    #[must_use]
    pub fn slba(&self) -> u64 {
        u64::from(self.cdw(0)) | u64::from(self.cdw(1)) << 32
    }

    /// Which half of a fused operation this is, if any (FUSE).
    #[must_use]
    pub fn fuse(&self) -> Fuse {
        match self.flags & 0b11 {
            0b00 => Fuse::None,
            0b01 => Fuse::First,
            0b10 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// Type of a fabrics command; `None` for all others.
    #[must_use]
    pub fn fabrics(&self) -> Option<FabricsType> {
        let [first, ..] = self.nsid.get().to_le_bytes();
        (self.opcode == AdminOpcode::Fabrics.0).then_some(FabricsType(first))
    }

    /// Which way the data goes.
    #[must_use]
    pub fn direction(&self) -> Direction {
        let code = self.fabrics().map_or(self.opcode, |f| f.0);
        match code & 0b11 {
            0b00 => Direction::None,
            0b01 => Direction::ToController,
            0b10 => Direction::ToHost,
            _ => Direction::Both,
        }
    }

    /// Location of the data, if this transport permits the descriptor.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] unless PSDT says SGL (NVMe Base 2.0, 4.1.2: fabrics do not use
    /// PRPs); [`Status::SGL_DESCRIPTOR_TYPE_INVALID`] for other descriptors (NVMe/TCP 3.2).
    pub fn data_location(&self) -> Result<DataLocation, Status> {
        if self.flags & 0b1100_0000 != FLAG_SGL {
            return Err(Status::INVALID_FIELD);
        }
        let length = self.sgl.length.get();
        match self.sgl.id {
            Sgl::OFFSET => Ok(DataLocation::InCapsule { offset: self.sgl.address.get(), length }),
            Sgl::TRANSPORT => Ok(DataLocation::Transport { length }),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        }
    }

    /// Length in bytes of the buffer that the host describes.
    #[must_use]
    pub fn data_bytes(&self) -> u32 {
        self.sgl.length.get()
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sqe(opcode {:#04x} cid {:#06x}", self.opcode, self.cid.get())?;
        write!(f, " nsid {:#x} sgl {:?}", self.nsid.get(), self.sgl)?;
        f.write_str(" cdw10")?;
        self.cdw10.iter().try_for_each(|d| write!(f, " {:#x}", d.get()))?;
        f.write_str(")")
    }
}

/// An SGL descriptor (NVMe Base 2.0, 4.1.2).
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Sgl {
    /// Address or offset.
    pub address: U64,
    /// Length in bytes.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Descriptor type in bits 7:4, subtype in bits 3:0.
    pub id: u8,
}
const _: () = assert!(size_of::<Sgl>() == 16);

impl Sgl {
    /// SGL Data Block whose address is an offset into the capsule's data.
    pub const OFFSET: u8 = 0x01;
    /// Transport SGL Data Block, subtype NVMe transport specific A: data PDUs.
    pub const TRANSPORT: u8 = 0x5a;

    /// `length` bytes that travel in data PDUs.
    #[must_use]
    pub fn transport(length: u32) -> Self {
        Self {
            address: U64::new(0),
            length: U32::new(length),
            reserved: [0; 3],
            id: Self::TRANSPORT,
        }
    }

    /// `length` bytes that travel in the capsule.
    #[must_use]
    pub fn in_capsule(length: u32) -> Self {
        Self { id: Self::OFFSET, ..Self::transport(length) }
    }
}

impl fmt::Debug for Sgl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#04x}:{:#x}+{}", self.id, self.address.get(), self.length.get())
    }
}

/// A completion queue entry.
///
/// ```text
///  byte   0 .. 7                    8 .. 9   10 .. 11  12 .. 13   14 .. 15
///       +-------------------------+--------+---------+----------+---------------+
///       | command specific result | SQHD   | SQID    | CID      | P(0) SF(15:1) |
///       +-------------------------+--------+---------+----------+---------------+
/// ```
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// Dwords 0 and 1: the command's result.
    pub result: U64,
    /// Submission queue head pointer.
    pub sq_head: U16,
    /// Submission queue identifier.
    pub sq_id: U16,
    /// Command identifier.
    pub cid: U16,
    /// Phase tag (0 over fabrics) and status field.
    pub status: U16,
}
const _: () = assert!(size_of::<Cqe>() == 16);

impl Cqe {
    /// How the command ended.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::from_field(self.status.get() >> 1)
    }
}

/// Result and status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// Status.
    pub status: Status,
}

impl Completion {
    /// Success with nothing to return.
    pub const OK: Self = Self::ok(0);

    /// Success.
    #[must_use]
    pub const fn ok(result: u64) -> Self {
        Self { result, status: Status::SUCCESS }
    }

    /// Failure.
    #[must_use]
    pub const fn failed(status: Status) -> Self {
        Self { result: 0, status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVMe Base 2.0, figure 88; fabrics commands carry their direction in FCTYPE (6).
    #[test]
    fn the_opcode_gives_the_transfer_direction() {
        let nvm = |op: NvmOpcode| Sqe::new(op.0, 0, 1).direction();
        assert_eq!(nvm(NvmOpcode::Read), Direction::ToHost);
        assert_eq!(nvm(NvmOpcode::Compare), Direction::ToController);
        assert_eq!(nvm(NvmOpcode::Flush), Direction::None);
        let fabrics =
            |t: FabricsType| Sqe::new(AdminOpcode::Fabrics.0, 0, u32::from(t.0)).direction();
        assert_eq!(fabrics(FabricsType::Connect), Direction::ToController);
        assert_eq!(fabrics(FabricsType::PropertyGet), Direction::None);
        assert_eq!(fabrics(FabricsType::AuthenticationReceive), Direction::ToHost);
        assert_eq!(Sqe::new(0x03, 0, 0).direction(), Direction::Both);
    }

    /// NVMe/TCP 3.2: two kinds of SGL, no PRPs.
    #[test]
    fn only_the_transports_descriptors_are_taken() {
        let mut sqe = Sqe::new(NvmOpcode::Write.0, 0, 1);
        sqe.sgl = Sgl::in_capsule(512);
        assert_eq!(sqe.data_location(), Ok(DataLocation::InCapsule { offset: 0, length: 512 }));
        sqe.sgl = Sgl::transport(1 << 20);
        assert_eq!(sqe.data_location(), Ok(DataLocation::Transport { length: 1 << 20 }));
        sqe.sgl.id = 0x40;
        assert_eq!(sqe.data_location(), Err(Status::SGL_DESCRIPTOR_TYPE_INVALID));
        sqe.flags = 0;
        assert_eq!(sqe.data_location(), Err(Status::INVALID_FIELD));
    }
}
