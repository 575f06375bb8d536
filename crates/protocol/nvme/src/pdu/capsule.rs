//! CapsuleCmd and CapsuleResp: commands and completions (NVMe/TCP 3.6.2.6, 3.6.2.7).
//!
//! ```text
//!             byte   0 .. 7          8 .. 71                     [HDGST] [PAD] [data] [DDGST]
//!                  +---------------+---------------------------+
//! CapsuleCmd       | common header | submission queue entry    |
//!                  +---------------+---------------------------+
//!             byte   0 .. 7          8 .. 23                     [HDGST]
//!                  +---------------+---------------------------+
//! CapsuleResp      | common header | completion queue entry    |
//!                  +---------------+---------------------------+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, PduType};
use crate::entry::{Cqe, Sqe};

/// A command capsule's header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CapsuleCmd {
    /// The common header.
    pub common: CommonHeader,
    /// The command.
    pub sqe: Sqe,
}
const _: () = assert!(size_of::<CapsuleCmd>() == 72);

impl CapsuleCmd {
    /// A capsule of `sqe`, as yet without data or digests.
    #[must_use]
    pub fn new(sqe: Sqe) -> Self {
        Self { common: CommonHeader::new(PduType::CapsuleCmd, size_of::<Self>()), sqe }
    }
}

/// A response capsule.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CapsuleResp {
    /// The common header.
    pub common: CommonHeader,
    /// The completion.
    pub cqe: Cqe,
}
const _: () = assert!(size_of::<CapsuleResp>() == 24);

impl CapsuleResp {
    /// Byte offset of the command identifier within the header.
    pub const COMMAND_ID_AT: u32 = 20;

    /// A capsule of `cqe`, as yet without digest.
    #[must_use]
    pub fn new(cqe: Cqe) -> Self {
        Self { common: CommonHeader::new(PduType::CapsuleResp, size_of::<Self>()), cqe }
    }
}
