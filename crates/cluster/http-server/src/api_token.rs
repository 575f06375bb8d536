//! The token by which clients of the API over TCP authenticate.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{ApiError, ErrorCode};
use axum::Router;
use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use subtle::ConstantTimeEq;
use target::auth_throttle::{AttemptDecision, AuthMethod, AuthThrottle};
use tokio::time::{Instant, sleep_until};

use crate::ApiClient;

/// Shortest token, in bytes.
const MIN_TOKEN_LEN: usize = 16;

/// Longest token, in bytes.
const MAX_TOKEN_LEN: usize = 1024;

/// A token. Its debug output hides it.
#[derive(Clone)]
pub struct Token(Arc<[u8]>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Why a token file was refused.
#[derive(Debug, thiserror::Error)]
#[error("api.token_file {}: {why}", path.display())]
pub struct TokenError {
    path: PathBuf,
    why: String,
}

impl Token {
    /// Reads the token in the file at `path`.
    ///
    /// # Errors
    /// [`TokenError`] if others may read the file, or its one line is not a valid token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let refused = |why: String| TokenError { path: path.to_owned(), why };
        let mode = std::fs::metadata(path).map_err(|e| refused(e.to_string()))?.mode();
        if mode & 0o077 != 0 {
            let why = format!(
                "users other than its owner have access to it (mode {:03o}); chmod 600 it",
                mode & 0o777
            );
            return Err(refused(why));
        }
        let text = std::fs::read_to_string(path).map_err(|e| refused(e.to_string()))?;
        Self::new(text.trim_end()).ok_or_else(|| {
            refused(format!("use one line of {MIN_TOKEN_LEN} to {MAX_TOKEN_LEN} printable characters without blanks"))
        })
    }

    /// `token`, if it is valid.
    #[must_use]
    pub fn new(token: &str) -> Option<Self> {
        let printable = token.bytes().all(|b| b.is_ascii_graphic());
        let fits = (MIN_TOKEN_LEN..=MAX_TOKEN_LEN).contains(&token.len());
        (printable && fits).then(|| Self(token.as_bytes().into()))
    }

    /// Whether the headers contain the token. Compares in constant time.
    fn matches_header(&self, headers: &HeaderMap) -> bool {
        let sent = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let sent = sent.and_then(|value| {
            let (scheme, token) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
        });
        sent.is_some_and(|token| bool::from(token.ct_eq(&self.0)))
    }

    /// The router for clients that send the token. Addresses that sent wrong tokens must wait
    /// before the next attempt; other addresses need not.
    pub fn require_token(self, router: Router, throttle: Arc<Mutex<AuthThrottle>>) -> Router {
        router.layer(from_fn(move |request: Request, next: Next| {
            let (token, throttle) = (self.clone(), Arc::clone(&throttle));
            async move {
                let from = request.extensions().get::<ApiClient>().cloned();
                let peer = from.as_ref().map(|peer| peer.address.ip());
                let peer = peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
                let source = (peer, AuthMethod::Token, "");
                let decision = {
                    let mut throttle = lock(&throttle);
                    let no_failures = throttle.has_no_recent_failure(source);
                    if no_failures { AttemptDecision::Now } else { throttle.begin_attempt(Instant::now(), source) }
                };
                match decision {
                    AttemptDecision::Now => {}
                    AttemptDecision::At(at) => sleep_until(at).await,
                    AttemptDecision::Refused => return unauthorized(TOO_MANY_ATTEMPTS),
                }
                if token.matches_header(request.headers()) {
                    lock(&throttle).record_success(source);
                    if let Some(from) = from {
                        from.is_authenticated.store(true, Ordering::Relaxed);
                    }
                    return next.run(request).await;
                }
                let line = lock(&throttle).record_failure(Instant::now(), source, "");
                if let Some(line) = line {
                    tracing::warn!(
                        %peer, path = request.uri().path(), times = line.times, others_not_logged = line.unlogged,
                        "API requests without a valid token refused; their address is throttled"
                    );
                }
                unauthorized("the token is missing or wrong")
            }
        }))
    }
}

/// The error for a client whose token is not even checked.
const TOO_MANY_ATTEMPTS: &str = "too many requests without a valid token from this address: try \
    again in a few seconds";

pub(crate) fn lock(throttle: &Mutex<AuthThrottle>) -> MutexGuard<'_, AuthThrottle> {
    throttle.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unauthorized(why: &str) -> Response {
    let mut response = crate::error_response(
        &ApiError::new(ErrorCode::Unauthorized, why)
            .with_hint("send Authorization: Bearer TOKEN (`windrose --token-file FILE`)"),
    );
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn token_files_are_private_and_hold_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Token::read(&path)
        };
        read("0123456789abcdef\n", 0o600).unwrap();
        read("0123456789abcdef", 0o400).unwrap();
        assert!(read("0123456789abcdef", 0o640).unwrap_err().to_string().contains("chmod 600"));
        for bad in ["", "short", "0123456789 abcdef", "0123456789abcdef\nmore"] {
            assert!(read(bad, 0o600).unwrap_err().to_string().contains("one line"), "{bad:?}");
        }
        assert!(Token::read(&dir.path().join("none")).is_err());
    }

    #[test]
    fn only_the_whole_token_opens() {
        let token = Token::new("0123456789abcdef").unwrap();
        let shown = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            token.matches_header(&headers)
        };
        assert!(shown("Bearer 0123456789abcdef") && shown("bearer 0123456789abcdef"));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcdef0",
            "Basic 0123456789abcdef",
        ] {
            assert!(!shown(wrong), "{wrong:?}");
        }
        assert!(!token.matches_header(&HeaderMap::new()));
        assert_eq!(format!("{token:?}"), "Token(…)");
    }
}
