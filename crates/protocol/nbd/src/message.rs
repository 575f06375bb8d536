//! Messages of the protocol ("Values"). All integers are big endian.
//!
//! ```text
//! server: greeting            MAGIC, OPTION_MAGIC, handshake flags
//! client: its flags
//! client: option header       OPTION_MAGIC, option, length, data     \  until the client has chosen
//! server: option reply header REPLY_MAGIC, option, type, length, data/  an export
//! client: request             REQUEST_MAGIC, flags, type, cookie, offset, length, data of a write
//! server: simple reply        SIMPLE_REPLY_MAGIC, error, cookie, data of a read
//!         or chunk            CHUNK_MAGIC, flags, type, cookie, length, payload
//! ```
#![allow(missing_docs, reason = "constants are named as in the specification")]

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `NBDMAGIC`, the first bytes of a server.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, of newstyle servers and of options.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Of replies to options.
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Of requests (`NBD_REQUEST_MAGIC`).
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Of simple replies (`NBD_SIMPLE_REPLY_MAGIC`).
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Of chunks of structured replies (`NBD_STRUCTURED_REPLY_MAGIC`).
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Longest string in bytes.
pub const MAX_STRING_BYTES: usize = 4096;
/// Zeroes after the answer to `NBD_OPT_EXPORT_NAME`, unless the client waived them.
pub const EXPORT_NAME_PADDING: usize = 124;
/// The only supported metadata context.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Handshake flags: fixed newstyle, and no zeroes after `NBD_OPT_EXPORT_NAME`; in both directions.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// See [`FIXED_NEWSTYLE`].
pub const NO_ZEROES: u16 = 1 << 1;

/// Transmission flags (`NBD_FLAG_*`).
pub mod flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Command flags (`NBD_CMD_FLAG_*`).
pub mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Flag of the last chunk of a structured reply (`NBD_REPLY_FLAG_DONE`).
pub const CHUNK_DONE: u16 = 1 << 0;
/// Set in all chunk types that are errors.
pub const CHUNK_ERROR: u16 = 1 << 15;
/// `NBD_STATE_HOLE`, `NBD_STATE_ZERO`.
pub const STATE_HOLE: u32 = 1 << 0;
/// See [`STATE_HOLE`].
pub const STATE_ZERO: u32 = 1 << 1;

wire::open_enum! {
    /// Option of the handshake (`NBD_OPT_*`).
    pub enum Opt: u32 {
        ExportName = 1,
        Abort = 2,
        List = 3,
        StartTls = 5,
        Info = 6,
        Go = 7,
        StructuredReply = 8,
        ListMetaContext = 9,
        SetMetaContext = 10,
        ExtendedHeaders = 11,
    }
}

wire::open_enum! {
    /// Type of a reply to an option (`NBD_REP_*`).
    pub enum Rep: u32 {
        Ack = 1,
        Server = 2,
        Info = 3,
        MetaContext = 4,
        ErrUnsup = 1 << 31 | 1,
        ErrPolicy = 1 << 31 | 2,
        ErrInvalid = 1 << 31 | 3,
        ErrPlatform = 1 << 31 | 4,
        ErrTlsReqd = 1 << 31 | 5,
        ErrUnknown = 1 << 31 | 6,
        ErrShutdown = 1 << 31 | 7,
        ErrBlockSizeReqd = 1 << 31 | 8,
        ErrTooBig = 1 << 31 | 9,
    }
}

impl Rep {
    /// Whether it refuses the option.
    #[must_use]
    pub fn is_error(self) -> bool {
        self.0 >> 31 == 1
    }
}

wire::open_enum! {
    /// Information about an export (`NBD_INFO_*`).
    pub enum Info: u16 {
        Export = 0,
        Name = 1,
        Description = 2,
        BlockSize = 3,
    }
}

wire::open_enum! {
    /// Type of a request (`NBD_CMD_*`).
    pub enum Cmd: u16 {
        Read = 0,
        Write = 1,
        Disc = 2,
        Flush = 3,
        Trim = 4,
        Cache = 5,
        WriteZeroes = 6,
        BlockStatus = 7,
    }
}

wire::open_enum! {
    /// Type of a chunk (`NBD_REPLY_TYPE_*`).
    pub enum ChunkType: u16 {
        None = 0,
        OffsetData = 1,
        OffsetHole = 2,
        BlockStatus = 5,
        Error = CHUNK_ERROR | 1,
        ErrorOffset = CHUNK_ERROR | 2,
    }
}

wire::open_enum! {
    /// Why a request has failed ("Error values").
    pub enum Errno: u32 {
        /// Operation not permitted.
        Perm = 1,
        /// Input or output error.
        Io = 5,
        /// Cannot allocate memory.
        NoMem = 12,
        /// Invalid argument.
        Inval = 22,
        /// No space left on device.
        NoSpc = 28,
        /// Value too large.
        Overflow = 75,
        /// Operation not supported.
        NotSup = 95,
        /// The server is in the process of being shut down.
        Shutdown = 108,
    }
}

impl Errno {
    /// Text for users.
    #[must_use]
    pub fn message(self) -> &'static str {
        match self {
            Self::Perm => "the export is read-only",
            Self::Io => "the device failed",
            Self::NoMem => "no memory",
            Self::Inval => "the request is invalid",
            Self::NoSpc => "no space left",
            Self::Overflow => "too long",
            Self::NotSup => "zeroing would not be faster than writing",
            Self::Shutdown => "the server is being shut down",
            Self(_) => "failed",
        }
    }

    /// Maps an error of a layer.
    #[must_use]
    pub fn from_block_error(error: block::Error) -> Self {
        use block::Error;
        match error {
            Error::Unreadable { .. } | Error::Corrupt { .. } | Error::Unwritable { .. } => Self::Io,
            Error::OutOfRange => Self::Inval,
            Error::NoSpace => Self::NoSpc,
            Error::ReadOnly => Self::Perm,
            // No command is aborted here, and epochs concern only layers.
            Error::Fenced | Error::Aborted | Error::Gone => Self::Io,
        }
    }
}

/// The server's first message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Greeting {
    /// [`MAGIC`].
    pub magic: U64,
    /// [`OPTION_MAGIC`].
    pub version: U64,
    /// Handshake flags.
    pub flags: U16,
}
const _: () = assert!(size_of::<Greeting>() == 18);

/// Header of an option.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    /// [`OPTION_MAGIC`].
    pub magic: U64,
    /// [`Opt`].
    pub option: U32,
    /// Length of the data in bytes.
    pub length: U32,
}
const _: () = assert!(size_of::<OptionHeader>() == 16);

/// Header of a reply to an option.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OptionReply {
    /// [`REPLY_MAGIC`].
    pub magic: U64,
    /// [`Opt`] that it answers.
    pub option: U32,
    /// [`Rep`].
    pub kind: U32,
    /// Length of the data in bytes.
    pub length: U32,
}
const _: () = assert!(size_of::<OptionReply>() == 20);

/// `NBD_INFO_EXPORT`, after its type; also the answer to `NBD_OPT_EXPORT_NAME`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InfoExport {
    /// Size in bytes.
    pub bytes: U64,
    /// Transmission flags.
    pub flags: U16,
}
const _: () = assert!(size_of::<InfoExport>() == 10);

/// `NBD_INFO_BLOCK_SIZE`, after its type.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InfoBlockSize {
    /// In bytes.
    pub minimum: U32,
    /// In bytes.
    pub preferred: U32,
    /// In bytes.
    pub payload: U32,
}
const _: () = assert!(size_of::<InfoBlockSize>() == 12);

/// A request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Request {
    /// [`REQUEST_MAGIC`].
    pub magic: U32,
    /// Command flags.
    pub flags: U16,
    /// [`Cmd`].
    pub kind: U16,
    /// The client's identifier of the request.
    pub cookie: U64,
    /// In bytes.
    pub offset: U64,
    /// In bytes.
    pub length: U32,
}
const _: () = assert!(size_of::<Request>() == 28);

/// A simple reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SimpleReply {
    /// [`SIMPLE_REPLY_MAGIC`].
    pub magic: U32,
    /// [`Errno`], or 0.
    pub error: U32,
    /// The request's cookie.
    pub cookie: U64,
}
const _: () = assert!(size_of::<SimpleReply>() == 16);

/// A chunk of a structured reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Chunk {
    /// [`CHUNK_MAGIC`].
    pub magic: U32,
    /// [`CHUNK_DONE`].
    pub flags: U16,
    /// [`ChunkType`].
    pub kind: U16,
    /// The request's cookie.
    pub cookie: U64,
    /// Length of the payload in bytes.
    pub length: U32,
}
const _: () = assert!(size_of::<Chunk>() == 20);

/// A descriptor of `NBD_REPLY_TYPE_BLOCK_STATUS`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    /// In bytes.
    pub length: U32,
    /// [`STATE_HOLE`], [`STATE_ZERO`].
    pub status: U32,
}
const _: () = assert!(size_of::<Descriptor>() == 8);

/// Parses consecutive fields; `None` once there are too few bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take(2).and_then(|b| b.try_into().ok()).map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take(8).and_then(|b| b.try_into().ok()).map(u64::from_be_bytes)
    }

    /// A string preceded by its length; `None` also if it is too long or not UTF-8.
    pub(crate) fn string(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        string(self.take(length)?)
    }
}

/// Checks a string: UTF-8, at most [`MAX_STRING_BYTES`], without NUL.
pub(crate) fn string(bytes: &[u8]) -> Option<&str> {
    let fine = bytes.len() <= MAX_STRING_BYTES && !bytes.contains(&0);
    std::str::from_utf8(bytes).ok().filter(|_| fine)
}
