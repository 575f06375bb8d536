//! Third-party copies: their operations, parameter lists, plans and tokens (SPC-4 5.17; RFD 0014,
//! 0018).
//!
//! | module | subject |
//! |---|---|
//! | `cscd` | a source or destination as a parameter list names it |
//! | `rod` | ROD tokens |
//! | `operation` | the state of a copy that initiators can query, while it runs and afterwards |
//! | `plan` | the plan of a copy for the driver, and its failures |
//! | `parameter_list` | parsing parameter lists of EXTENDED COPY, in both formats |
//! | `token` | operations on tokens for the driver, and their results |

mod cscd;
mod operation;
mod parameter_list;
mod plan;
mod rod;
mod token;

pub use cscd::Cscd;
pub(crate) use cscd::{IDENTIFICATION, MAX_CSCDS};
pub(crate) use operation::{
    CopyOperation, CopyOperations, CopyState, CurrentSegment, MAX_OPERATIONS,
};
pub(crate) use parameter_list::{
    BLOCK_TO_BLOCK, COUNT_FIELD, MAX_DESCRIPTORS, MAX_SEGMENTS, parse as parse_parameter_list,
};
pub use plan::{
    CopyFault, CopyHandle, CopyIoError, CopyOutcome, CopyPlan, CopyRange, CopySegment, CscdTarget,
    Side,
};
pub(crate) use rod::{
    ANY_POINT_IN_TIME, CHANGE_VULNERABLE, TokenParseError, ZEROES, parse as parse_token,
};
pub use rod::{PresentedToken, ROD_TOKEN_LEN, RodToken};
pub(crate) use token::{
    DEFAULT_INACTIVITY_S, MAX_BYTES, MAX_INACTIVITY_S, MAX_RANGES, max_token_blocks,
};
pub use token::{TOKEN_LIFETIME_S, TokenFault, TokenPlan, TokenRequest, TokenResult};
