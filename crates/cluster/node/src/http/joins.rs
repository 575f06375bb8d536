//! The port at which nodes are let into the cluster that show a token (RFD 0038, 2.3): one request, and 401 for all else.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::cluster::admission::{JoinAnswer, MAX_MESSAGE};
use api::{ApiError, Code};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http_body_util::{BodyExt, Limited};
use target::guesses::{Method, Turn};
use tokio::time::{Instant, sleep_until, timeout};

use super::Peer;
use super::auth::lock;
use super::room::Capacity;
use crate::control::Control;

/// Where a node asks.
pub(crate) const PATH: &str = "/v1/join";

/// Connections: 16 of strangers at a time, 4 of one address, each for as long as a wrong guess may have to wait.
pub(crate) const CAPACITY: Capacity =
    Capacity { most: 64, unknown: 16, of_one: 4, patience: Some(Duration::from_secs(15)) };

/// Time for a request to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// What is served there.
pub(crate) fn router(control: &Control) -> Router {
    let control = control.clone();
    let ask = move |request: Request| {
        let control = control.clone();
        async move { answer(&control, request).await }
    };
    let stranger = || async { super::refusal(&no_token()) };
    Router::new().route(PATH, post(ask)).fallback(stranger).method_not_allowed_fallback(stranger)
}

fn no_token() -> ApiError {
    ApiError::new(Code::Unauthorized, "nodes that join the cluster are let in here, with a token")
        .hint("windrose cluster token, at a node of the cluster, makes one")
}

async fn answer(control: &Control, request: Request) -> Response {
    let peer = request.extensions().get::<Peer>().cloned();
    let from = peer.as_ref().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.at.ip());
    let whence = (from, Method::Join, "");
    let guesses = control.guesses();
    // Before anything is read of what it sends.
    let turn = {
        let mut guesses = lock(&guesses);
        let blameless = guesses.is_blameless(whence);
        if blameless { Turn::Now } else { guesses.turn(Instant::now(), whence) }
    };
    match turn {
        Turn::Now => {}
        Turn::At(at) => sleep_until(at).await,
        Turn::Refused => {
            let message = "too many requests without a token have come from this address";
            return super::refusal(
                &ApiError::new(Code::Unauthorized, message).hint("try again in a few seconds"),
            );
        }
    }
    let body = Limited::new(request.into_body(), MAX_MESSAGE).collect();
    let Ok(Ok(body)) = timeout(BODY_TIMEOUT, body).await else {
        return super::refusal(&no_token());
    };
    match control.let_in(&body.to_bytes(), from).await {
        Ok(answer) => {
            lock(&guesses).succeeded(whence);
            if let Some(peer) = peer {
                peer.known.store(true, Ordering::Relaxed);
            }
            respond(&answer)
        }
        Err(error) => {
            if error.code == Code::Unauthorized {
                let line = lock(&guesses).failed(Instant::now(), whence, "");
                if let Some(line) = line {
                    tracing::warn!(
                        peer = %from, times = line.times, others_not_logged = line.unlogged,
                        "requests to join without a token of this cluster are refused; their address waits longer and \
                         longer between them"
                    );
                }
            } else {
                lock(&guesses).abandoned(whence);
            }
            super::refusal(&error)
        }
    }
}

fn respond(answer: &JoinAnswer) -> Response {
    let status = match answer {
        JoinAnswer::Granted(_) => StatusCode::OK,
        JoinAnswer::Waiting { .. } => StatusCode::ACCEPTED,
    };
    let body = Body::from(answer.to_bytes());
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
