//! HTTP connections, limited in number, time and request size.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rt::LogLimit;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::ApiClient;
use crate::connection_limit::{ConnectionLimiter, ConnectionLimits};
use crate::listen::UnixSocket;

/// Time limit for the head of a request, and for the pause between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit of a TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listening socket of the API.
#[derive(Debug)]
pub enum ApiListener {
    /// A Unix socket.
    Unix(UnixSocket),
    /// Plain TCP.
    Plain(TcpListener),
    /// TCP with TLS.
    Tls(TcpListener, TlsAcceptorDebug),
}

/// A [`TlsAcceptor`] that prints as nothing.
#[derive(Clone)]
pub struct TlsAcceptorDebug(pub TlsAcceptor);

impl std::fmt::Debug for TlsAcceptorDebug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsAcceptor")
    }
}

/// All HTTP listeners.
#[derive(Debug)]
pub struct Server {
    stop: watch::Sender<bool>,
    listeners: JoinSet<()>,
}

impl Default for Server {
    fn default() -> Self {
        Self { stop: watch::Sender::new(false), listeners: JoinSet::new() }
    }
}

impl Server {
    /// Serves `router` on `listener`, within these limits.
    pub fn serve_on(&mut self, listener: ApiListener, router: Router, capacity: ConnectionLimits) {
        let stop = self.stop.subscribe();
        self.listeners.spawn(accept(listener, router, capacity, stop));
    }

    /// Stops accepting connections, and waits until requests in progress are answered.
    pub async fn close(mut self) {
        self.stop.send_replace(true);
        while self.listeners.join_next().await.is_some() {}
    }
}

async fn wait_stop(stop: &mut watch::Receiver<bool>) {
    // The sender outlives the listeners; without it there is nothing to wait for.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Completes when a connection has exceeded its time without authenticating.
async fn authentication_timed_out(capacity: ConnectionLimits, is_authenticated: Arc<AtomicBool>) {
    match capacity.authentication_timeout {
        None => std::future::pending().await,
        Some(limit) => {
            tokio::time::sleep(limit).await;
            if is_authenticated.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn accept(
    listener: ApiListener,
    router: Router,
    capacity: ConnectionLimits,
    mut stop: watch::Receiver<bool>,
) {
    let limiter = ConnectionLimiter::new(capacity);
    let failures = HandshakeFailureLog::default();
    let mut serving = JoinSet::new();
    loop {
        let next = async {
            let stream = listener.accept().await?;
            let permit = limiter.acquire(stream.source_ip()).await;
            Ok::<_, io::Error>((stream, permit))
        };
        let accepted = tokio::select! {
            accepted = next => accepted,
            () = wait_stop(&mut stop) => break,
        };
        while serving.try_join_next().is_some() {}
        match accepted {
            Ok((stream, permit)) => {
                let (router, stop) = (router.clone(), stop.clone());
                let (is_authenticated, failures) =
                    (permit.authenticated_flag(), Arc::clone(&failures));
                serving.spawn(async move {
                    tokio::select! {
                        () = stream.serve(router, stop, (Arc::clone(&is_authenticated), failures)) => {}
                        () = permit.wait_evicted() => {
                            tracing::debug!("unauthenticated connection evicted");
                        }
                        () = authentication_timed_out(capacity, is_authenticated) => {
                            tracing::debug!("unauthenticated connection timed out");
                        }
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while serving.join_next().await.is_some() {}
}

/// An accepted connection.
enum HttpConnection {
    Unix(tokio::net::UnixStream),
    Plain(tokio::net::TcpStream, SocketAddr),
    Tls(tokio::net::TcpStream, SocketAddr, TlsAcceptor),
}

impl ApiListener {
    async fn accept(&self) -> io::Result<HttpConnection> {
        match self {
            Self::Unix(socket) => Ok(HttpConnection::Unix(socket.listener.accept().await?.0)),
            Self::Plain(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok(HttpConnection::Plain(stream, canonical(peer)))
            }
            Self::Tls(listener, tls) => {
                let (stream, peer) = listener.accept().await?;
                Ok(HttpConnection::Tls(stream, canonical(peer), tls.0.clone()))
            }
        }
    }
}

/// The IPv4 address of an IPv4-mapped one.
fn canonical(peer: SocketAddr) -> SocketAddr {
    SocketAddr::new(peer.ip().to_canonical(), peer.port())
}

impl HttpConnection {
    /// The client's address, for TCP.
    fn source_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Plain(_, peer) | Self::Tls(_, peer, _) => Some(peer.ip()),
        }
    }

    async fn serve(
        self,
        router: Router,
        stop: watch::Receiver<bool>,
        (is_authenticated, failures): (Arc<AtomicBool>, HandshakeFailureLog),
    ) {
        match self {
            Self::Unix(stream) => serve_connection(stream, router, stop).await,
            Self::Plain(stream, at) => {
                serve_connection(
                    stream,
                    router.layer(Extension(ApiClient { address: at, is_authenticated })),
                    stop,
                )
                .await;
            }
            Self::Tls(stream, at, tls) => {
                let router = router.layer(Extension(ApiClient { address: at, is_authenticated }));
                let why = match tokio::time::timeout(TLS_TIMEOUT, tls.accept(stream)).await {
                    Ok(Ok(stream)) => return serve_connection(stream, router, stop).await,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it took too long".to_owned(),
                };
                let line =
                    failures.lock().unwrap_or_else(PoisonError::into_inner).try_log(Instant::now());
                if let Some(not_logged) = line {
                    tracing::warn!(peer = %at, why, others_not_logged = not_logged, "TLS handshake failed");
                }
            }
        }
    }
}

/// Limits log lines about failed handshakes.
type HandshakeFailureLog = Arc<Mutex<LogLimit>>;

fn serve_connection<S>(
    stream: S,
    router: Router,
    mut stop: watch::Receiver<bool>,
) -> impl Future<Output = ()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    async move {
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = wait_stop(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended");
        }
    }
}
