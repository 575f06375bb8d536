//! The API client: one connection per request.

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

use crate::endpoint::{Endpoint, Payload, QueryFlag};
use crate::{ApiError, ErrorCode, InvalidValue};

/// Longest response accepted, in bytes: enough for the list of a node's most volumes.
const MAX_RESPONSE_LEN: usize = 64 << 20;

/// Longest time to establish a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The system's CA certificates, at Debian's path.
const SYSTEM_CA_FILE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The address of a node's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiAddress {
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

impl Default for ApiAddress {
    fn default() -> Self {
        Self::Unix(PathBuf::from("/run/windrose/api.sock"))
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tls { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Self::Tls { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

impl FromStr for ApiAddress {
    type Err = InvalidValue;

    fn from_str(s: &str) -> Result<Self, InvalidValue> {
        let refused =
            || InvalidValue::new("API address", s, "use unix:/path/to/socket or https://host:port");
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

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No connection to the address.
    #[error("no node responds at {address}: {why}")]
    Unreachable {
        /// The address.
        address: ApiAddress,
        /// What went wrong.
        why: String,
    },
    /// The node refused.
    #[error("{0}")]
    Refused(ApiError),
    /// The response is not one of a node.
    #[error("{address} does not respond like a Windrose node: {why}")]
    MalformedResponse {
        /// The address it came from.
        address: ApiAddress,
        /// What is wrong with it.
        why: String,
    },
}

/// A client of one node.
#[derive(Clone, Debug)]
pub struct Client {
    address: ApiAddress,
    token: Option<String>,
    ca_file: Option<PathBuf>,
}

impl Client {
    /// Creates a client of the node at `address`.
    #[must_use]
    pub fn new(address: ApiAddress) -> Self {
        Self { address, token: None, ca_file: None }
    }

    /// Adds the token that a node requires over TCP.
    #[must_use]
    pub fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    /// Trusts the certificates of a PEM file instead of the system's.
    #[must_use]
    pub fn with_ca_file(self, roots: Option<PathBuf>) -> Self {
        Self { ca_file: roots, ..self }
    }

    /// The node's address.
    #[must_use]
    pub fn address(&self) -> &ApiAddress {
        &self.address
    }

    /// Calls an endpoint whose path names no volume and no pool.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call<E: Endpoint>(&self, body: &E::Body) -> Result<E::Response, CallError> {
        self.send_json::<E>(E::PATH.to_owned(), body).await
    }

    /// Calls an endpoint on a volume or a pool.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call_on<E: Endpoint>(
        &self,
        name: &(impl AsRef<str> + ?Sized),
        flags: &[QueryFlag],
        body: &E::Body,
    ) -> Result<E::Response, CallError> {
        let mut path = E::PATH.replace("{name}", name.as_ref());
        for (i, flag) in flags.iter().enumerate() {
            path.push(if i == 0 { '?' } else { '&' });
            path.push_str(flag.name);
            path.push_str("=true");
        }
        self.send_json::<E>(path, body).await
    }

    /// Fetches a plain-text page, such as `/metrics`.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn text(&self, path: &str) -> Result<String, CallError> {
        let (status, bytes) = self.exchange(http::Method::GET, path.to_owned(), None).await?;
        if !status.is_success() {
            return Err(self.to_error(status, &bytes));
        }
        String::from_utf8(bytes.into())
            .map_err(|_| self.malformed_response("the response is not UTF-8"))
    }

    async fn send_json<E: Endpoint>(
        &self,
        path: String,
        body: &E::Body,
    ) -> Result<E::Response, CallError> {
        let json = if E::Body::IS_EMPTY {
            None
        } else {
            Some(serde_json::to_vec(body).map_err(|e| self.malformed_response(e))?)
        };
        let (status, bytes) = self.exchange(E::METHOD, path, json).await?;
        if !status.is_success() {
            return Err(self.to_error(status, &bytes));
        }
        let text: &[u8] = if E::Response::IS_EMPTY { b"null" } else { &bytes };
        serde_json::from_slice(text).map_err(|e| self.malformed_response(e))
    }

    fn to_error(&self, status: StatusCode, bytes: &[u8]) -> CallError {
        match serde_json::from_slice::<ApiError>(bytes) {
            Ok(e) => CallError::Refused(e),
            Err(_) => self.malformed_response(format_args!("HTTP status {status}")),
        }
    }

    fn malformed_response(&self, why: impl fmt::Display) -> CallError {
        CallError::MalformedResponse { address: self.address.clone(), why: why.to_string() }
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
            ClientConnection::Unix(s) => self.send(s, request).await,
            ClientConnection::Tls(s) => self.send(*s, request).await,
        }
    }

    fn request(
        &self,
        method: http::Method,
        path: String,
        json: Option<Vec<u8>>,
    ) -> Result<Request<Full<Bytes>>, CallError> {
        let host = match &self.address {
            ApiAddress::Unix(_) => "localhost".to_owned(),
            ApiAddress::Tls { .. } => self.address.to_string().split_off("https://".len()),
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

    async fn connect(&self) -> Result<ClientConnection, CallError> {
        match &self.address {
            ApiAddress::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(|e| self.unreachable(e))?;
                Ok(ClientConnection::Unix(stream))
            }
            ApiAddress::Tls { host, port } => {
                let name = ServerName::try_from(host.clone()).map_err(|e| self.unreachable(e))?;
                let connector = tokio_rustls::TlsConnector::from(Arc::new(self.tls()?));
                #[expect(clippy::disallowed_methods, reason = "a client runs outside of cores")]
                let stream = TcpStream::connect((host.as_str(), *port))
                    .await
                    .map_err(|e| self.unreachable(e))?;
                let stream =
                    connector.connect(name, stream).await.map_err(|e| self.unreachable(e))?;
                Ok(ClientConnection::Tls(Box::new(stream)))
            }
        }
    }

    fn tls(&self) -> Result<rustls::ClientConfig, CallError> {
        let path = self.ca_file.as_deref().unwrap_or(Path::new(SYSTEM_CA_FILE));
        let bad = |why: String| {
            self.unreachable(format_args!("trusted certificates in {}: {why}", path.display()))
        };
        let mut roots = rustls::RootCertStore::empty();
        for cert in CertificateDer::pem_file_iter(path).map_err(|e| bad(e.to_string()))? {
            let cert = cert.map_err(|e| bad(e.to_string()))?;
            roots.add(cert).map_err(|e| bad(e.to_string()))?;
        }
        if roots.is_empty() {
            return Err(bad("it contains none".to_owned()));
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
            let answer =
                sender.send_request(request).await.map_err(|e| self.malformed_response(e))?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_RESPONSE_LEN);
            let bytes = body.collect().await.map_err(|e| self.malformed_response(e))?.to_bytes();
            Ok((head.status, bytes))
        };
        let mut exchange = std::pin::pin!(exchange);
        tokio::select! {
            answer = &mut exchange => answer,
            ended = connection => {
                // The answer may have been complete before the connection ended.
                let answer = exchange.await;
                match (answer, ended) {
                    (Err(_), Err(e)) => Err(self.malformed_response(e)),
                    (answer, _) => answer,
                }
            }
        }
    }
}

enum ClientConnection {
    Unix(UnixStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

impl CallError {
    /// The error code, if the node refused.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(e) => Some(e.code),
            Self::Unreachable { .. } | Self::MalformedResponse { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_print_the_same() {
        for text in ["unix:/run/windrose/api.sock", "https://node1:7443", "https://[::1]:7443"] {
            assert_eq!(text.parse::<ApiAddress>().unwrap().to_string(), text);
        }
        assert_eq!("/x".parse::<ApiAddress>().unwrap(), ApiAddress::Unix("/x".into()));
        for text in [
            "",
            "http://node1:80",
            "https://node1",
            "unix:x",
            "node1:80",
            "https://a:1/x",
            "https://",
        ] {
            assert!(text.parse::<ApiAddress>().is_err(), "{text}");
        }
    }
}
