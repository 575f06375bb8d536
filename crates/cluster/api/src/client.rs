//! The client: one request, one connection, one answer.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::endpoint::{Endpoint, Flag, Payload};
use crate::{ApiError, Code, Invalid};

/// Longest answer that is read, in bytes: a list of every volume a node may have fits.
const MAX_ANSWER: usize = 64 << 20;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Certificates that a client of Debian and its relatives trusts.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Where a node's API is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket on this machine.
    Unix(PathBuf),
    /// A host name or IP address and a port, over TLS.
    Tls {
        /// Host name or IP address.
        host: String,
        /// TCP port.
        port: u16,
    },
}

impl Default for Address {
    fn default() -> Self {
        Self::Unix(PathBuf::from("/run/windrose/api.sock"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tls { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Self::Tls { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

impl FromStr for Address {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let refused =
            || Invalid::new("API address", s, "use unix:/path/to/socket or https://host:port");
        if let Some(path) = s.strip_prefix("unix:").or_else(|| s.starts_with('/').then_some(s)) {
            let absolute = Path::new(path).is_absolute();
            return absolute.then(|| Self::Unix(path.into())).ok_or_else(refused);
        }
        let uri: Uri = s.parse().map_err(|_| refused())?;
        let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
        match (uri.scheme_str(), uri.host(), uri.port_u16()) {
            (Some("https"), Some(host), Some(port)) if plain => {
                let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                Ok(Self::Tls { host, port })
            }
            _ => Err(refused()),
        }
    }
}

/// Why a call gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody answers at the address.
    #[error("no node answers at {address}: {why}")]
    Unreachable {
        /// Where it was tried.
        address: Address,
        /// What went wrong.
        why: String,
    },
    /// The node refused.
    #[error("{0}")]
    Refused(ApiError),
    /// What came back is not an answer of a node.
    #[error("{address} does not answer like a Windrose node: {why}")]
    Protocol {
        /// Where it came from.
        address: Address,
        /// What is wrong with it.
        why: String,
    },
}

/// A client of one node.
#[derive(Clone, Debug)]
pub struct Client {
    address: Address,
    token: Option<String>,
    roots: Option<PathBuf>,
}

impl Client {
    /// A client of the node at `address`.
    #[must_use]
    pub fn new(address: Address) -> Self {
        Self { address, token: None, roots: None }
    }

    /// The same client with a token, which a node asks for over TCP.
    #[must_use]
    pub fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    /// The same client, trusting the certificates of a PEM file instead of the system's.
    #[must_use]
    pub fn with_roots(self, roots: Option<PathBuf>) -> Self {
        Self { roots, ..self }
    }

    /// Where it calls.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Asks something that concerns no volume and no pool or, by its body, one that is to be.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call<E: Endpoint>(&self, body: &E::Body) -> Result<E::Answer, CallError> {
        self.ask::<E>(E::PATH.to_owned(), body).await
    }

    /// Asks something about a volume, or a pool.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call_on<E: Endpoint>(
        &self,
        name: &(impl AsRef<str> + ?Sized),
        flags: &[Flag],
        body: &E::Body,
    ) -> Result<E::Answer, CallError> {
        let mut path = E::PATH.replace("{name}", name.as_ref());
        for (i, flag) in flags.iter().enumerate() {
            path.push(if i == 0 { '?' } else { '&' });
            path.push_str(flag.name);
            path.push_str("=true");
        }
        self.ask::<E>(path, body).await
    }

    /// Fetches a page that is plain text, such as `/metrics`.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn text(&self, path: &str) -> Result<String, CallError> {
        let (status, bytes) = self.exchange(http::Method::GET, path.to_owned(), None).await?;
        if !status.is_success() {
            return Err(self.refusal(status, &bytes));
        }
        String::from_utf8(bytes.into()).map_err(|_| self.protocol("the answer is not UTF-8"))
    }

    async fn ask<E: Endpoint>(&self, path: String, body: &E::Body) -> Result<E::Answer, CallError> {
        let json = if E::Body::EMPTY {
            None
        } else {
            Some(serde_json::to_vec(body).map_err(|e| self.protocol(e))?)
        };
        let (status, bytes) = self.exchange(E::METHOD, path, json).await?;
        if !status.is_success() {
            return Err(self.refusal(status, &bytes));
        }
        let text: &[u8] = if E::Answer::EMPTY { b"null" } else { &bytes };
        serde_json::from_slice(text).map_err(|e| self.protocol(e))
    }

    fn refusal(&self, status: StatusCode, bytes: &[u8]) -> CallError {
        match serde_json::from_slice::<ApiError>(bytes) {
            Ok(e) => CallError::Refused(e),
            Err(_) => self.protocol(format_args!("HTTP status {status}")),
        }
    }

    fn protocol(&self, why: impl fmt::Display) -> CallError {
        CallError::Protocol { address: self.address.clone(), why: why.to_string() }
    }

    fn unreachable(&self, why: impl fmt::Display) -> CallError {
        CallError::Unreachable { address: self.address.clone(), why: why.to_string() }
    }

    async fn exchange(
        &self,
        method: http::Method,
        path: String,
        json: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), CallError> {
        let request = self.request(method, path, json)?;
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.connect()).await;
        match connected.map_err(|_| self.unreachable("the connection timed out"))?? {
            Connection::Unix(s) => self.send(s, request).await,
            Connection::Tls(s) => self.send(*s, request).await,
        }
    }

    fn request(
        &self,
        method: http::Method,
        path: String,
        json: Option<Vec<u8>>,
    ) -> Result<Request<Full<Bytes>>, CallError> {
        let host = match &self.address {
            Address::Unix(_) => "localhost".to_owned(),
            Address::Tls { .. } => self.address.to_string().split_off("https://".len()),
        };
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, host);
        if json.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = Full::new(Bytes::from(json.unwrap_or_default()));
        request.body(body).map_err(|e| self.unreachable(format_args!("the request: {e}")))
    }

    async fn connect(&self) -> Result<Connection, CallError> {
        match &self.address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(|e| self.unreachable(e))?;
                Ok(Connection::Unix(stream))
            }
            Address::Tls { host, port } => {
                let name = ServerName::try_from(host.clone()).map_err(|e| self.unreachable(e))?;
                let connector = tokio_rustls::TlsConnector::from(Arc::new(self.tls()?));
                #[expect(clippy::disallowed_methods, reason = "a client runs outside of cores")]
                let stream = TcpStream::connect((host.as_str(), *port))
                    .await
                    .map_err(|e| self.unreachable(e))?;
                let stream =
                    connector.connect(name, stream).await.map_err(|e| self.unreachable(e))?;
                Ok(Connection::Tls(Box::new(stream)))
            }
        }
    }

    fn tls(&self) -> Result<rustls::ClientConfig, CallError> {
        let path = self.roots.as_deref().unwrap_or(Path::new(SYSTEM_ROOTS));
        let bad = |why: String| {
            self.unreachable(format_args!("trusted certificates in {}: {why}", path.display()))
        };
        let mut roots = rustls::RootCertStore::empty();
        for cert in CertificateDer::pem_file_iter(path).map_err(|e| bad(e.to_string()))? {
            let cert = cert.map_err(|e| bad(e.to_string()))?;
            roots.add(cert).map_err(|e| bad(e.to_string()))?;
        }
        if roots.is_empty() {
            return Err(bad("there is none".to_owned()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| self.unreachable(e))?;
        Ok(config.with_root_certificates(roots).with_no_client_auth())
    }

    async fn send<S>(
        &self,
        stream: S,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), CallError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.unreachable(e))?;
        let exchange = async {
            let answer = sender.send_request(request).await.map_err(|e| self.protocol(e))?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_ANSWER);
            let bytes = body.collect().await.map_err(|e| self.protocol(e))?.to_bytes();
            Ok((head.status, bytes))
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            answer = &mut exchange => answer,
            ended = connection => {
                // The answer may have been complete before the connection ended.
                let answer = exchange.await;
                match (answer, ended) {
                    (Err(_), Err(e)) => Err(self.protocol(e)),
                    (answer, _) => answer,
                }
            }
        }
    }
}

enum Connection {
    Unix(UnixStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

impl CallError {
    /// The refusal's code, where the node refused.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(e) => Some(e.code),
            Self::Unreachable { .. } | Self::Protocol { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_print_the_same() {
        for text in ["unix:/run/windrose/api.sock", "https://node1:7443", "https://[::1]:7443"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("/x".parse::<Address>().unwrap(), Address::Unix("/x".into()));
        for text in [
            "",
            "http://node1:80",
            "https://node1",
            "unix:x",
            "node1:80",
            "https://a:1/x",
            "https://",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
