//! Operations on tokens for the driver, their results, and the limits of tokens (SBC-3 5.7, 5.49;
//! SPC-4 5.17.6; RFD 0018).

use std::rc::Rc;

use block::Blocks;

use super::operation::CopyOperation;
use super::plan::{CopyHandle, CopyIoError, Side};
use super::rod::{PresentedToken, RodToken};
use crate::sense::{Sense, SenseCode};

/// Most ranges of one list.
pub(crate) const MAX_RANGES: usize = 64;

/// Most bytes represented by one token.
pub(crate) const MAX_BYTES: u64 = 256 << 20;

/// Inactivity timeout of a token in seconds: default, and maximum.
pub(crate) const DEFAULT_INACTIVITY_S: u32 = 60;
pub(crate) const MAX_INACTIVITY_S: u32 = 600;

/// Maximum lifetime of a token in seconds.
pub const TOKEN_LIFETIME_S: u32 = 3600;

/// The operation on a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenRequest {
    /// Create one for the current contents of these blocks of the unit, valid for so many seconds
    /// after each use.
    Populate {
        /// The represented blocks, in this order.
        ranges: Vec<Blocks>,
        /// Inactivity timeout in seconds.
        inactivity_s: u32,
    },
    /// Write the data of a token to the unit.
    Write {
        /// The token.
        token: PresentedToken,
        /// First block of the token's data to be written.
        offset: u64,
        /// Destination, in this order.
        ranges: Vec<Blocks>,
        /// Whether to forget the token afterwards.
        delete_token: bool,
    },
}

/// The plan of one POPULATE TOKEN or WRITE USING TOKEN.
#[derive(Debug)]
pub struct TokenPlan {
    request: TokenRequest,
    operation: Rc<CopyOperation>,
}

/// Its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenResult {
    /// This token was created.
    Created(RodToken),
    /// Everything was written.
    Written,
    /// It was aborted on request.
    Aborted,
    /// The token is invalid.
    Invalid(TokenFault),
    /// A read or write failed, or was not allowed.
    Failed(Side, CopyIoError),
}

/// Why a token is invalid, or cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFault {
    /// It was not created here, has expired, or its volume is gone.
    Unknown,
    /// Its data has changed.
    Cancelled,
    /// Its data has a different block size.
    BlockSizeMismatch,
    /// Its data is too short.
    TooShort,
    /// The maximum number of tokens is reached.
    TooManyTokens,
}

/// OFFSET INTO ROD in the parameter list of WRITE USING TOKEN, for field pointers.
const OFFSET_FIELD: u16 = 8;

impl TokenFault {
    /// The sense data of a command that presents the token.
    pub(crate) fn sense(self) -> Sense {
        Sense::illegal(match self {
            Self::Unknown => SenseCode::TOKEN_UNKNOWN,
            Self::Cancelled => SenseCode::TOKEN_CANCELLED,
            Self::BlockSizeMismatch => SenseCode::INVALID_TOKEN_OPERATION,
            Self::TooShort => return Sense::parameter(OFFSET_FIELD, None),
            Self::TooManyTokens => SenseCode::INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN,
        })
    }
}

impl TokenPlan {
    pub(crate) fn new(request: TokenRequest, operation: Rc<CopyOperation>) -> Self {
        Self { request, operation }
    }

    /// The operation.
    #[must_use]
    pub fn request(&self) -> &TokenRequest {
        &self.request
    }

    /// A handle for aborting it, and for detecting that.
    #[must_use]
    pub fn handle(&self) -> CopyHandle {
        CopyHandle::new(Rc::clone(&self.operation))
    }

    /// Records `len` bytes written at byte `at` of all ranges.
    pub fn record_written(&self, at: u64, len: u64) {
        self.operation.record_written(at, len);
    }

    /// Records a command completed by a volume.
    pub fn record_command(&self) {
        self.operation.commands_completed.update(|n| n.wrapping_add(1));
    }
}

impl Drop for TokenPlan {
    /// The driver may end without reporting a result.
    fn drop(&mut self) {
        self.operation.abandon();
    }
}

/// Most blocks represented by one token.
pub(crate) fn max_token_blocks(block_size: u32) -> u64 {
    MAX_BYTES / u64::from(block_size.max(1))
}
