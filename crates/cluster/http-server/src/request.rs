//! Reading and checking requests.

use std::time::Duration;

use api::endpoint::{Endpoint, Payload, QueryFlag};
use api::{ApiError, ErrorCode, InvalidValue, PoolName, VolumeName};
use axum::RequestPartsExt;
use axum::body::Body;
use axum::extract::{Path, RawPathParams, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};

/// Largest body, in bytes: enough for a full list of initiators.
const MAX_BODY: usize = 512 << 10;

/// Time limit for a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A request to an endpoint.
#[derive(Debug)]
pub struct ApiRequest<E: Endpoint> {
    name: Option<String>,
    flags: Vec<QueryFlag>,
    /// The body.
    pub body: E::Body,
}

impl<E: Endpoint> ApiRequest<E> {
    /// Reads a request for `E`.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] or [`ErrorCode::TooLarge`], naming what is wrong.
    pub(crate) async fn read(request: Request) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let name = name(&mut parts).await?;
        let checked = match &name {
            Some(name) if E::PATH.starts_with("/v1/pools/") => name.parse::<PoolName>().map(drop),
            Some(name) => name.parse::<VolumeName>().map(drop),
            None => Ok(()),
        };
        checked.map_err(|e| in_path(&e))?;
        let flags = flags::<E>(parts.uri.query().unwrap_or_default())?;
        let text = if E::Body::IS_EMPTY { b"null".to_vec() } else { collect(body).await? };
        let mut json = serde_json::Deserializer::from_slice(&text);
        let body = serde_path_to_error::deserialize(&mut json).map_err(|e| in_body(&e))?;
        json.end().map_err(|e| invalid(format!("the body: {e}")))?;
        Ok(Self { name, flags, body })
    }

    /// The volume in the path.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] when the path names none.
    pub fn volume_name(&self) -> Result<VolumeName, ApiError> {
        let name = self.name.as_ref();
        let name = name.ok_or_else(|| invalid("the path contains no volume name".to_owned()))?;
        name.parse().map_err(|e| in_path(&e))
    }

    /// The pool in the path.
    ///
    /// # Errors
    /// [`ErrorCode::InvalidRequest`] when the path names none.
    pub fn pool_name(&self) -> Result<PoolName, ApiError> {
        let name = self.name.as_ref();
        let name = name.ok_or_else(|| invalid("the path contains no pool name".to_owned()))?;
        name.parse().map_err(|e| in_path(&e))
    }

    /// Whether a flag is set.
    pub fn flag(&self, flag: QueryFlag) -> bool {
        self.flags.iter().any(|f| f.name == flag.name)
    }
}

fn invalid(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

fn in_path(e: &InvalidValue) -> ApiError {
    invalid(format!("the path: {e}"))
}

/// The error for an invalid body, naming the field.
fn in_body(e: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let path = e.path().to_string();
    let field = if path == "." { "the body".to_owned() } else { path };
    invalid(format!("{field}: {}", e.inner())).with_hint("GET /v1/openapi.json describes the body")
}

async fn name(parts: &mut Parts) -> Result<Option<String>, ApiError> {
    let params = parts.extract::<RawPathParams>().await;
    let params = params.map_err(|e| invalid(format!("the path: {e}")))?;
    if params.iter().next().is_none() {
        return Ok(None);
    }
    let Path(name) = parts
        .extract::<Path<String>>()
        .await
        .map_err(|e| invalid(format!("the path: {}", e.body_text())))?;
    Ok(Some(name))
}

/// The flags that a query sets. Rejects unknown parameters, so that a misspelt one is not ignored.
fn flags<E: Endpoint>(query: &str) -> Result<Vec<QueryFlag>, ApiError> {
    let mut set = Vec::new();
    for pair in query.split('&').filter(|p| !p.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, "true"));
        let shown: String = name.chars().take(40).collect();
        let Some(flag) = E::FLAGS.iter().find(|f| f.name == name) else {
            return Err(invalid(format!("there is no parameter {shown:?}")));
        };
        match value {
            "true" => set.push(*flag),
            "false" => {}
            _ => return Err(invalid(format!("parameter {shown} must be true or false"))),
        }
    }
    Ok(set)
}

async fn collect(body: Body) -> Result<Vec<u8>, ApiError> {
    let all = Limited::new(body, MAX_BODY).collect();
    let all = tokio::time::timeout(BODY_TIMEOUT, all)
        .await
        .map_err(|_| invalid("the body did not arrive in time".to_owned()))?;
    match all {
        Ok(all) => Ok(all.to_bytes().into()),
        Err(e) if e.is::<LengthLimitError>() => {
            let message = format!("the body is longer than {MAX_BODY} bytes");
            Err(ApiError::new(ErrorCode::TooLarge, message))
        }
        Err(e) => Err(invalid(format!("cannot read the body: {e}"))),
    }
}
