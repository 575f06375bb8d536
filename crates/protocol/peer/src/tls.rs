//! TLS around the connections of a cluster that wants it: both sides show a certificate of the
//! cluster's own authority; that of the side that was dialled bears its address.
//!
//! Certificates are those that any authority makes for a server. That the other side is the node that it
//! claims to be is proven afterwards, by the cluster's secret.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use rt::net::Stream;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// A node's certificate and whom it believes. Cheap to clone; clones share what [`Tls::replace`] sets.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<Sides>>);

/// How connections begin on either side.
#[derive(Clone)]
struct Sides {
    accepts: TlsAcceptor,
    dials: TlsConnector,
}

/// Why a certificate or key was refused.
#[derive(Debug, thiserror::Error)]
pub enum BadTls {
    /// The certificate or the key.
    #[error("the certificate or its key: {0}")]
    Certificate(#[from] rustls::Error),
    /// The authority's certificates.
    #[error("the authority: {0}")]
    Authority(#[from] VerifierBuilderError),
}

impl Tls {
    /// TLS 1.3 with a certificate, its own first in the chain, and its key; believes whom
    /// `authority` has signed.
    ///
    /// # Errors
    /// [`BadTls`].
    pub fn new(
        authority: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, BadTls> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let authority = Arc::new(authority);
        let builder = WebPkiClientVerifier::builder_with_provider(
            Arc::clone(&authority),
            Arc::clone(&provider),
        );
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(builder.build()?)
            .with_single_cert(chain.clone(), key.clone_key())?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .with_root_certificates(authority)
            .with_client_auth_cert(chain, key)?;
        let (accepts, dials) = (Arc::new(server).into(), Arc::new(client).into());
        Ok(Self(Arc::new(RwLock::new(Sides { accepts, dials }))))
    }

    /// Has new connections show and believe what `next` does; those that are there go on.
    pub fn replace(&self, next: &Self) {
        let next = next.sides();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = next;
    }

    fn sides(&self) -> Sides {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The side that dialled.
    pub(crate) async fn dial(&self, stream: Stream) -> io::Result<Wire> {
        let name = ServerName::IpAddress(stream.peer_addr()?.ip().into());
        let stream = self.sides().dials.connect(name, stream).await?;
        Ok(Wire::Tls(Box::new(stream.into())))
    }

    /// The side that was dialled.
    pub(crate) async fn accept(&self, stream: Stream) -> io::Result<Wire> {
        let stream = self.sides().accepts.accept(stream).await?;
        Ok(Wire::Tls(Box::new(stream.into())))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

/// A connection as the session sees it.
#[derive(Debug)]
pub(crate) enum Wire {
    Plain(Stream),
    Tls(Box<TlsStream<Stream>>),
}

/// Calls a method of tokio's traits on whichever there is.
macro_rules! forward {
    ($self:expr, $s:ident => $call:expr) => {
        match $self.get_mut() {
            Wire::Plain(s) => {
                let $s = Pin::new(s);
                $call
            }
            Wire::Tls(s) => {
                let $s = Pin::new(&mut **s);
                $call
            }
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_read(cx, buf))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self, s => s.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        forward!(self, s => s.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_shutdown(cx))
    }
}
