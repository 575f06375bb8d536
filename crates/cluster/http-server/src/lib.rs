//! The HTTP server of a node: listeners, connections within limits, the API's token, requests and
//! responses of endpoints, and the endpoint where nodes join. What an endpoint answers is a closure
//! of the caller.

mod api_token;
mod connection_limit;
pub mod join_endpoint;
pub mod listen;
mod request;
mod server;
mod tls;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use api::endpoint::{Endpoint, Payload};
use api::{ApiError, ErrorCode};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};

pub use api_token::{Token, TokenError};
pub use connection_limit::ConnectionLimits;
pub use request::ApiRequest;
pub use server::{ApiListener, Server, TlsAcceptorDebug};
pub use tls::{TlsError, acceptor};

/// The client of a TCP connection: an extension of its requests.
#[derive(Clone, Debug)]
pub(crate) struct ApiClient {
    pub(crate) address: SocketAddr,
    /// Set once it has sent the token: from then on the limiter does not evict its connection.
    pub(crate) is_authenticated: Arc<AtomicBool>,
}

/// Adds the route of one endpoint, by the types and path of `E`. `answer` gets `state` and the
/// request.
///
/// # Panics
/// For a method that HTTP servers do not know.
pub fn add_endpoint<E, S, F, Fut>(router: Router, state: &S, answer: F) -> Router
where
    E: Endpoint + 'static,
    S: Clone + Send + Sync + 'static,
    F: Fn(S, ApiRequest<E>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Result<E::Response, ApiError>> + Send + 'static,
{
    let filter = MethodFilter::try_from(E::METHOD).expect("endpoints use common methods");
    let state = state.clone();
    let handler = move |request: Request| {
        let (state, answer) = (state.clone(), answer.clone());
        async move {
            let answered = match ApiRequest::<E>::read(request).await {
                Ok(ask) => answer(state, ask).await,
                Err(e) => Err(e),
            };
            answered.map_or_else(|e| error_response(&e), |a| success_response::<E>(&a))
        }
    };
    router.route(E::PATH, on(filter, handler))
}

fn success_response<E: Endpoint>(answer: &E::Response) -> Response {
    let status = StatusCode::from_u16(E::STATUS).unwrap_or(StatusCode::OK);
    if E::Response::IS_EMPTY {
        return status.into_response();
    }
    match serde_json::to_string(answer) {
        Ok(text) => json_response(status, text),
        Err(error) => {
            tracing::error!(%error, endpoint = E::OPERATION_ID, "cannot encode a response");
            error_response(&ApiError::new(ErrorCode::Internal, "cannot encode the response"))
        }
    }
}

/// A response with a JSON text.
pub fn json_response(status: StatusCode, text: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], Body::from(text)).into_response()
}

/// The response of an error.
#[must_use]
pub fn error_response(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.code.status());
    let text = serde_json::to_string(error).expect("three strings always serialise");
    json_response(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), text)
}
