//! How a node asks the nodes of a cluster to let it in (RFD 0038, 2.3).

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ::cluster::admission::{JoinAnswer, JoinRequest, MAX_MESSAGE};
use ::cluster::token::{Token, Trust};
use api::{ApiError, Code};
use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpSocket;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::cluster::conflict;
use crate::config;
use crate::http::joins::PATH;
use crate::protection;

/// How long a connection may take to come about, and an answer to come: who has guessed wrongly before waits for a while.
const CONNECT: Duration = Duration::from_secs(3);
const ANSWER: Duration = Duration::from_secs(20);

/// Why a node gave no answer.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    /// It is not reached, or the connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It took too long.
    #[error("no answer in time")]
    TimedOut,
    /// It is another one than the token says.
    #[error("{0}")]
    Stranger(String),
    /// What came back is no answer.
    #[error("what answers there lets no nodes in: {0}")]
    Protocol(String),
    /// It cannot now.
    #[error("{0}")]
    Refused(ApiError),
}

/// Asks the nodes that `token` names, one after the other, until one of them decides.
///
/// # Errors
/// What that one says; else what was seen at each of them.
pub(super) async fn ask(
    token: &Token,
    config: &config::Cluster,
    request: &JoinRequest,
) -> Result<JoinAnswer, ApiError> {
    let connector = protection::join_connector(token.trust, config);
    let connector = connector.map_err(|e| ApiError::new(Code::Conflict, e.to_string()))?;
    let mut seen = Vec::new();
    for &at in &token.addresses {
        let asked = ask_one(at, token.trust, connector.as_ref(), request);
        match timeout(ANSWER, asked).await.unwrap_or(Err(NoAnswer::TimedOut)) {
            Ok(answer) => return Ok(answer),
            Err(NoAnswer::Refused(error)) if is_final(error.code) => return Err(error),
            Err(why) => seen.push((at, why)),
        }
    }
    Err(unanswered(token, &seen))
}

/// Whether another node would say the same.
fn is_final(code: Code) -> bool {
    !matches!(code, Code::Unavailable | Code::Internal)
}

fn unanswered(token: &Token, seen: &[(SocketAddr, NoAnswer)]) -> ApiError {
    let each: Vec<_> = seen.iter().map(|(at, why)| format!("{at}: {why}")).collect();
    let message = format!(
        "no node of the token's cluster {} lets this one in: {}",
        token.cluster,
        each.join("; ")
    );
    let is_stranger = |(_, why): &(SocketAddr, NoAnswer)| matches!(why, NoAnswer::Stranger(_));
    if seen.iter().any(is_stranger) {
        return conflict(
            message,
            match token.trust {
                Trust::Own(_) => {
                    "another cluster is there, or its store was made anew (windrose cluster recover), or somebody stands \
                     between: make a new token at a node of the cluster (windrose cluster token), and use that here"
                }
                Trust::Given | Trust::Plain => {
                    "are cluster.tls_ca, tls_cert and tls_key of the same authority as at the other nodes?"
                }
            },
        );
    }
    ApiError::new(Code::Unavailable, message).hint(
        "if nothing else is in the way (a firewall, or nodes that are down): a token names where the nodes were when it \
         was made; make a new one at a node of that cluster (windrose cluster token), and use that here",
    )
}

async fn ask_one(
    at: SocketAddr,
    trust: Trust,
    connector: Option<&TlsConnector>,
    request: &JoinRequest,
) -> Result<JoinAnswer, NoAnswer> {
    let connect = async {
        let socket = if at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        socket?.connect(at).await
    };
    let stream = timeout(CONNECT, connect).await.map_err(|_| NoAnswer::TimedOut)??;
    let (status, body) = match connector {
        None => exchange(stream, at, request).await?,
        Some(connector) => {
            let name = ServerName::IpAddress(at.ip().into());
            let stream = connector.connect(name, stream).await;
            exchange(stream.map_err(|e| tls_error(e, trust))?, at, request).await?
        }
    };
    if status.is_success() {
        return JoinAnswer::parse(&body).map_err(NoAnswer::Protocol);
    }
    match serde_json::from_slice(&body) {
        Ok(error) => Err(NoAnswer::Refused(error)),
        Err(_) => Err(NoAnswer::Protocol(format!("HTTP status {status}"))),
    }
}

fn tls_error(error: io::Error, trust: Trust) -> NoAnswer {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match (inner, trust) {
        (Some(rustls::Error::InvalidCertificate(_)), Trust::Own(_)) => NoAnswer::Stranger(
            "it shows a certificate of another authority than the token's".to_owned(),
        ),
        (Some(why @ rustls::Error::InvalidCertificate(_)), _) => {
            NoAnswer::Stranger(why.to_string())
        }
        _ => NoAnswer::Io(error),
    }
}

async fn exchange<S>(
    stream: S,
    at: SocketAddr,
    request: &JoinRequest,
) -> Result<(StatusCode, Bytes), NoAnswer>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let protocol = |why: String| NoAnswer::Protocol(why);
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
        let body = Limited::new(body, MAX_MESSAGE).collect().await.map_err(|e| e.to_string())?;
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
