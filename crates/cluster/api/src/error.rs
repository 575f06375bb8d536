//! The API's error responses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::InvalidValue;

/// What kind of refusal it is; programs decide by this. Each has one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is not well-formed or a value in it is not allowed.
    InvalidRequest,
    /// The token is missing or wrong.
    Unauthorized,
    /// There is no such volume or no such path.
    NotFound,
    /// The path exists and does not support the method.
    MethodNotAllowed,
    /// A volume of that name exists and differs from the requested one.
    Exists,
    /// Initiators use the volume.
    InUse,
    /// The volume's state does not allow it, or the volume was changed concurrently.
    Conflict,
    /// The body of the request is too long.
    TooLarge,
    /// The file or device behind the volume was refused; the message names the reason.
    Backing,
    /// There is not enough space.
    NoSpace,
    /// The node is starting or stopping.
    Unavailable,
    /// An internal failure; the node's log says more.
    Internal,
}

impl ErrorCode {
    /// The HTTP status of the code.
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
    pub code: ErrorCode,
    /// What is wrong, naming the thing.
    pub message: String,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

impl ApiError {
    /// Creates an error without a hint.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    /// Adds the next step.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

impl From<InvalidValue> for ApiError {
    fn from(e: InvalidValue) -> Self {
        Self::new(ErrorCode::InvalidRequest, e.to_string())
    }
}
