//! The one shape of a refusal.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Invalid;

/// What kind of refusal it is; programs decide by this. Each has one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request is not well-formed or a value in it is not allowed.
    InvalidRequest,
    /// The token is missing or wrong.
    Unauthorized,
    /// There is no such volume or no such path.
    NotFound,
    /// The path exists and does not know the method.
    MethodNotAllowed,
    /// A volume of that name exists and differs from what was asked for.
    Exists,
    /// The volume is in use by initiators.
    InUse,
    /// The volume is in a state that does not allow it, or changed at the same time.
    Conflict,
    /// The body of the request is too long.
    TooLarge,
    /// The file or device behind the volume was refused; the message names the reason.
    Backing,
    /// There is not enough space.
    NoSpace,
    /// The node is starting or stopping.
    Unavailable,
    /// Something failed that the request is not to blame for; the node's log says more.
    Internal,
}

impl Code {
    /// The HTTP status that carries it.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthorized => 401,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::Exists | Self::InUse | Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::Backing => 422,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::NoSpace => 507,
        }
    }
}

/// A refusal: what kind, what is wrong with what, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Kind of refusal.
    pub code: Code,
    /// What is wrong, naming the thing.
    pub message: String,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

impl ApiError {
    /// A refusal without a hint.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    /// The same refusal with the next step.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

impl From<Invalid> for ApiError {
    fn from(e: Invalid) -> Self {
        Self::new(Code::InvalidRequest, e.to_string())
    }
}
