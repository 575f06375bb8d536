//! The endpoint where nodes with a token join the cluster (RFD 0038, 2.3); all else is answered by
//! 401.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::{ApiError, ErrorCode};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use cluster::admission::{JoinResponse, MAX_MESSAGE_LEN};
use http_body_util::{BodyExt, Limited};
use target::auth_throttle::{AttemptDecision, AuthMethod, AuthThrottle};
use tokio::time::{Instant, sleep_until, timeout};

use crate::ApiClient;
use crate::api_token::lock;
use crate::connection_limit::ConnectionLimits;

/// Path of a join request.
pub const PATH: &str = "/v1/join";

/// Limits: 16 unauthenticated connections, 4 of them from one address, each for as long as a wrong
/// token may have to wait.
pub const CAPACITY: ConnectionLimits = ConnectionLimits {
    max_total: 64,
    max_unauthenticated: 16,
    max_unauthenticated_per_address: 4,
    authentication_timeout: Some(Duration::from_secs(15)),
};

/// Time limit for the body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// The router of the endpoint. `admit` gets the body of a request and the address of the client,
/// and decides; `throttle` delays addresses that present no valid token.
pub fn router<F, Fut>(throttle: Arc<Mutex<AuthThrottle>>, admit: F) -> Router
where
    F: Fn(Bytes, IpAddr) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Result<JoinResponse, ApiError>> + Send + 'static,
{
    let join = move |request: Request| {
        let (throttle, admit) = (Arc::clone(&throttle), admit.clone());
        async move { handle_join(&throttle, admit, request).await }
    };
    let unauthorized = || async { crate::error_response(&token_required()) };
    Router::new()
        .route(PATH, post(join))
        .fallback(unauthorized)
        .method_not_allowed_fallback(unauthorized)
}

fn token_required() -> ApiError {
    ApiError::new(
        ErrorCode::Unauthorized,
        "this address accepts join requests of nodes, which need a token",
    )
    .with_hint("make a token at a node of the cluster: windrose cluster token")
}

async fn handle_join<F, Fut>(throttle: &Mutex<AuthThrottle>, admit: F, request: Request) -> Response
where
    F: Fn(Bytes, IpAddr) -> Fut,
    Fut: Future<Output = Result<JoinResponse, ApiError>>,
{
    let peer = request.extensions().get::<ApiClient>().cloned();
    let from = peer.as_ref().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.address.ip());
    let source = (from, AuthMethod::Join, "");
    // Decide before reading anything that the client sends.
    let decision = {
        let mut throttle = lock(throttle);
        let no_failures = throttle.has_no_recent_failure(source);
        if no_failures {
            AttemptDecision::Now
        } else {
            throttle.begin_attempt(Instant::now(), source)
        }
    };
    match decision {
        AttemptDecision::Now => {}
        AttemptDecision::At(at) => sleep_until(at).await,
        AttemptDecision::Refused => {
            let message = "too many requests without a valid token from this address";
            return crate::error_response(
                &ApiError::new(ErrorCode::Unauthorized, message)
                    .with_hint("try again in a few seconds"),
            );
        }
    }
    let body = Limited::new(request.into_body(), MAX_MESSAGE_LEN).collect();
    let Ok(Ok(body)) = timeout(BODY_TIMEOUT, body).await else {
        return crate::error_response(&token_required());
    };
    match admit(body.to_bytes(), from).await {
        Ok(answer) => {
            lock(throttle).record_success(source);
            if let Some(peer) = peer {
                peer.is_authenticated.store(true, Ordering::Relaxed);
            }
            respond(&answer)
        }
        Err(error) => {
            if error.code == ErrorCode::Unauthorized {
                let line = lock(throttle).record_failure(Instant::now(), source, "");
                if let Some(line) = line {
                    tracing::warn!(
                        peer = %from, times = line.times, others_not_logged = line.unlogged,
                        "join requests without a valid token refused; their address is throttled"
                    );
                }
            } else {
                lock(throttle).record_abandoned(source);
            }
            crate::error_response(&error)
        }
    }
}

fn respond(answer: &JoinResponse) -> Response {
    let status = match answer {
        JoinResponse::Granted(_) => StatusCode::OK,
        JoinResponse::Waiting { .. } => StatusCode::ACCEPTED,
    };
    let body = Body::from(answer.to_bytes());
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
