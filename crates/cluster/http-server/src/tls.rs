//! TLS for the API over TCP.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Why a certificate or key was refused.
#[derive(Debug, thiserror::Error)]
#[error("{setting} {}: {why}", path.display())]
pub struct TlsError {
    setting: &'static str,
    path: PathBuf,
    why: String,
}

/// A TLS acceptor with the certificate and key in two PEM files.
///
/// # Errors
/// [`TlsError`] names the setting and the file.
pub fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let refused = |setting, path: &Path, why: String| TlsError { setting, path: path.into(), why };
    let bad_cert = |why: String| refused("api.tls_cert", cert, why);
    let bad_key = |why: String| refused("api.tls_key", key, why);
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| bad_cert(e.to_string()))?;
    if chain.is_empty() {
        return Err(bad_cert("it contains no certificate".to_owned()));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|e| bad_key(e.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| bad_cert(e.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|e| bad_key(format!("it does not match the certificate: {e}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
