//! Connections: bounded in number, in time and in what they may send.

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

use super::Peer;
use super::listen::UnixSocket;
use super::room::{Capacity, ConnectionLimiter};

/// Time for the head of a request; also the longest pause between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for a TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// Wait after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Where connections come in.
#[derive(Debug)]
pub enum Door {
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

/// Everything that serves HTTP.
#[derive(Debug)]
pub struct Server {
    stop: watch::Sender<bool>,
    doors: JoinSet<()>,
}

impl Default for Server {
    fn default() -> Self {
        Self { stop: watch::Sender::new(false), doors: JoinSet::new() }
    }
}

impl Server {
    /// Serves `router` at `door`, to so many at a time.
    pub fn open(&mut self, door: Door, router: Router, capacity: Capacity) {
        let stop = self.stop.subscribe();
        self.doors.spawn(accept(door, router, capacity, stop));
    }

    /// Accepts nobody any more, and waits until what is being answered has been.
    pub async fn close(mut self) {
        self.stop.send_replace(true);
        while self.doors.join_next().await.is_some() {}
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The sender outlives the doors; without it there is nothing to wait for.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Waits until a connection has been there for as long as it may without showing who it is.
async fn is_out_of_patience(capacity: Capacity, known: Arc<AtomicBool>) {
    match capacity.patience {
        None => std::future::pending().await,
        Some(patience) => {
            tokio::time::sleep(patience).await;
            if known.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn accept(door: Door, router: Router, capacity: Capacity, mut stop: watch::Receiver<bool>) {
    let limiter = ConnectionLimiter::new(capacity);
    let failures = Failures::default();
    let mut serving = JoinSet::new();
    loop {
        let next = async {
            let stream = door.accept().await?;
            let permit = limiter.enter(stream.from()).await;
            Ok::<_, io::Error>((stream, permit))
        };
        let accepted = tokio::select! {
            accepted = next => accepted,
            () = stopped(&mut stop) => break,
        };
        while serving.try_join_next().is_some() {}
        match accepted {
            Ok((stream, permit)) => {
                let (router, stop) = (router.clone(), stop.clone());
                let (known, failures) = (permit.known(), Arc::clone(&failures));
                serving.spawn(async move {
                    tokio::select! {
                        () = stream.serve(router, stop, (Arc::clone(&known), failures)) => {}
                        () = permit.is_wanted() => {
                            tracing::debug!("a connection that has not shown who it is makes room");
                        }
                        () = is_out_of_patience(capacity, known) => {
                            tracing::debug!("a connection that has not shown who it is takes too long");
                        }
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(door);
    while serving.join_next().await.is_some() {}
}

/// A connection that has come in.
enum Accepted {
    Unix(tokio::net::UnixStream),
    Plain(tokio::net::TcpStream, SocketAddr),
    Tls(tokio::net::TcpStream, SocketAddr, TlsAcceptor),
}

impl Door {
    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Unix(socket) => Ok(Accepted::Unix(socket.listener.accept().await?.0)),
            Self::Plain(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok(Accepted::Plain(stream, canonical(peer)))
            }
            Self::Tls(listener, tls) => {
                let (stream, peer) = listener.accept().await?;
                Ok(Accepted::Tls(stream, canonical(peer), tls.0.clone()))
            }
        }
    }
}

/// Whoever comes by IPv4 is known by that.
fn canonical(peer: SocketAddr) -> SocketAddr {
    SocketAddr::new(peer.ip().to_canonical(), peer.port())
}

impl Accepted {
    /// Where it comes from, by TCP.
    fn from(&self) -> Option<IpAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Plain(_, peer) | Self::Tls(_, peer, _) => Some(peer.ip()),
        }
    }

    async fn serve(
        self,
        router: Router,
        stop: watch::Receiver<bool>,
        (known, failures): (Arc<AtomicBool>, Failures),
    ) {
        match self {
            Self::Unix(stream) => converse(stream, router, stop).await,
            Self::Plain(stream, at) => {
                converse(stream, router.layer(Extension(Peer { at, known })), stop).await;
            }
            Self::Tls(stream, at, tls) => {
                let router = router.layer(Extension(Peer { at, known }));
                let why = match tokio::time::timeout(TLS_TIMEOUT, tls.accept(stream)).await {
                    Ok(Ok(stream)) => return converse(stream, router, stop).await,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it took too long".to_owned(),
                };
                let line =
                    failures.lock().unwrap_or_else(PoisonError::into_inner).line(Instant::now());
                if let Some(left_out) = line {
                    tracing::warn!(peer = %at, why, others_not_logged = left_out, "a TLS handshake failed");
                }
            }
        }
    }
}

/// How many lines failed handshakes may have.
type Failures = Arc<Mutex<LogLimit>>;

fn converse<S>(
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
            () = stopped(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended");
        }
    }
}
