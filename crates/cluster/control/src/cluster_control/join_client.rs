//! The client with which a node asks the nodes of a cluster to admit it (RFD 0038, 2.3).

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use api::{ApiError, ErrorCode};
use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use cluster::admission::{JoinRequest, JoinResponse, MAX_MESSAGE_LEN};
use cluster::join_token::{JoinToken, TrustAnchor};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpSocket;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::errors::conflict;
use config;
use http_server::join_endpoint::PATH;
use membership::certificates;

/// Time limits for a connection and for an answer. The server delays answers after failed attempts.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a node gave no answer.
#[derive(Debug, thiserror::Error)]
enum JoinCallError {
    /// The node cannot be reached, or the connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The time limit passed.
    #[error("no response in time")]
    TimedOut,
    /// The node's certificate does not match the token.
    #[error("{0}")]
    WrongCluster(String),
    /// The response is not one of the join protocol.
    #[error("the response is not one of the join protocol: {0}")]
    Protocol(String),
    /// The node refused.
    #[error("{0}")]
    Refused(ApiError),
}

/// Asks the nodes that `token` names, one after the other, until one of them decides.
///
/// # Errors
/// The refusal of the node that decided; else the failure at each of them.
pub(crate) async fn request_join(
    token: &JoinToken,
    config: &config::Cluster,
    request: &JoinRequest,
) -> Result<JoinResponse, ApiError> {
    let connector = certificates::join_connector(token.trust_anchor, config);
    let connector = connector.map_err(|e| ApiError::new(ErrorCode::Conflict, e.to_string()))?;
    let mut failures = Vec::new();
    for &at in &token.addresses {
        let attempt = request_join_at(at, token.trust_anchor, connector.as_ref(), request);
        match timeout(ANSWER_TIMEOUT, attempt).await.unwrap_or(Err(JoinCallError::TimedOut)) {
            Ok(answer) => return Ok(answer),
            Err(JoinCallError::Refused(error)) if is_final(error.code) => return Err(error),
            Err(why) => failures.push((at, why)),
        }
    }
    Err(no_node_answered(token, &failures))
}

/// Whether every other node would give the same answer.
fn is_final(code: ErrorCode) -> bool {
    !matches!(code, ErrorCode::Unavailable | ErrorCode::Internal)
}

fn no_node_answered(token: &JoinToken, failures: &[(SocketAddr, JoinCallError)]) -> ApiError {
    let each: Vec<_> = failures.iter().map(|(at, why)| format!("{at}: {why}")).collect();
    let message = format!(
        "no node of the token's cluster {} could be reached to admit this node: {}",
        token.cluster,
        each.join("; ")
    );
    let is_stranger =
        |(_, why): &(SocketAddr, JoinCallError)| matches!(why, JoinCallError::WrongCluster(_));
    if failures.iter().any(is_stranger) {
        return conflict(
            message,
            match token.trust_anchor {
                TrustAnchor::PinnedAuthority(_) => {
                    "another cluster uses these addresses, or its store was recreated (windrose \
                     cluster recover), or the connection is intercepted: make a new token at a \
                     node of the cluster (windrose cluster token), and use it here"
                }
                TrustAnchor::AdministratorCa | TrustAnchor::PlainText => {
                    "set cluster.tls_ca, tls_cert and tls_key to certificates of the same \
                     authority as at the other nodes"
                }
            },
        );
    }
    ApiError::new(ErrorCode::Unavailable, message).with_hint(
        "check the firewall and that the nodes run. If they do, the addresses in the token may be \
         outdated: make a new token at a node of that cluster (windrose cluster token), and use it \
         here",
    )
}

async fn request_join_at(
    at: SocketAddr,
    trust: TrustAnchor,
    connector: Option<&TlsConnector>,
    request: &JoinRequest,
) -> Result<JoinResponse, JoinCallError> {
    let connect = async {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        socket?.connect(at).await
    };
    let stream = timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| JoinCallError::TimedOut)??;
    let (status, body) = match connector {
        None => exchange(stream, at, request).await?,
        Some(connector) => {
            let name = ServerName::IpAddress(at.ip().into());
            let stream = connector.connect(name, stream).await;
            exchange(stream.map_err(|e| tls_error(e, trust))?, at, request).await?
        }
    };
    if status.is_success() {
        return JoinResponse::parse(&body).map_err(JoinCallError::Protocol);
    }
    match serde_json::from_slice(&body) {
        Ok(error) => Err(JoinCallError::Refused(error)),
        Err(_) => Err(JoinCallError::Protocol(format!("HTTP status {status}"))),
    }
}

fn tls_error(error: io::Error, trust: TrustAnchor) -> JoinCallError {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match (inner, trust) {
        (Some(rustls::Error::InvalidCertificate(_)), TrustAnchor::PinnedAuthority(_)) => {
            JoinCallError::WrongCluster(
                "its certificate was issued by another authority than the token's".to_owned(),
            )
        }
        (Some(why @ rustls::Error::InvalidCertificate(_)), _) => {
            JoinCallError::WrongCluster(why.to_string())
        }
        _ => JoinCallError::Io(error),
    }
}

async fn exchange<S>(
    stream: S,
    at: SocketAddr,
    request: &JoinRequest,
) -> Result<(StatusCode, Bytes), JoinCallError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let protocol = |why: String| JoinCallError::Protocol(why);
    let request = Request::post(PATH)
        .header(header::HOST, at.to_string())
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONNECTION, "close")
        .body(Full::new(Bytes::from(request.to_bytes())))
        .map_err(|e| protocol(e.to_string()))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|e| protocol(e.to_string()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|e| e.to_string())?;
        let (head, body) = answer.into_parts();
        let body =
            Limited::new(body, MAX_MESSAGE_LEN).collect().await.map_err(|e| e.to_string())?;
        Ok((head.status, body.to_bytes()))
    };
    let mut exchange = std::pin::pin!(exchange);
    let answer: Result<_, String> = tokio::select! {
        answer = &mut exchange => answer,
        // The answer may have been complete before the connection ended.
        _ = connection => exchange.await,
    };
    answer.map_err(protocol)
}
