//! TLS for the connections of a cluster that uses it: both sides show a certificate of the
//! cluster's own authority; that of the acceptor contains its address.
//!
//! Certificates are ordinary server certificates. That the peer is the node that it claims to be is
//! proved afterwards, by the cluster secret.

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

/// The certificate of a node and its trusted authority. Cheap to clone; clones share what
/// [`Tls::replace`] sets.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<TlsSides>>);

/// The TLS configurations of both sides.
#[derive(Clone)]
struct TlsSides {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

/// Why a certificate or key is invalid.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// The certificate or the key.
    #[error("the certificate or its key: {0}")]
    Certificate(#[from] rustls::Error),
    /// The authority's certificates.
    #[error("the authority: {0}")]
    Authority(#[from] VerifierBuilderError),
}

impl Tls {
    /// TLS 1.3 with a certificate chain, the own certificate first, and its key; trusts
    /// certificates that `authority` has signed.
    ///
    /// # Errors
    /// [`TlsConfigError`].
    pub fn new(
        authority: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, TlsConfigError> {
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
        let (acceptor, connector) = (Arc::new(server).into(), Arc::new(client).into());
        Ok(Self(Arc::new(RwLock::new(TlsSides { acceptor, connector }))))
    }

    /// Makes new connections use the configuration of `next`; existing ones go on.
    pub fn replace(&self, next: &Self) {
        let next = next.sides();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = next;
    }

    fn sides(&self) -> TlsSides {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins TLS as the dialler.
    pub(crate) async fn dial(&self, stream: Stream) -> io::Result<PeerStream> {
        let name = ServerName::IpAddress(stream.peer_addr()?.ip().into());
        let stream = self.sides().connector.connect(name, stream).await?;
        Ok(PeerStream::Tls(Box::new(stream.into())))
    }

    /// Begins TLS as the acceptor.
    pub(crate) async fn accept(&self, stream: Stream) -> io::Result<PeerStream> {
        let stream = self.sides().acceptor.accept(stream).await?;
        Ok(PeerStream::Tls(Box::new(stream.into())))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(..)")
    }
}

/// The stream of a connection.
#[derive(Debug)]
pub(crate) enum PeerStream {
    Plain(Stream),
    Tls(Box<TlsStream<Stream>>),
}

/// Calls a method of tokio's traits on the inner stream.
macro_rules! forward {
    ($self:expr, $s:ident => $call:expr) => {
        match $self.get_mut() {
            PeerStream::Plain(s) => {
                let $s = Pin::new(s);
                $call
            }
            PeerStream::Tls(s) => {
                let $s = Pin::new(&mut **s);
                $call
            }
        }
    };
}

impl AsyncRead for PeerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self, s => s.poll_read(cx, buf))
    }
}

impl AsyncWrite for PeerStream {
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
