//! TLS for a joining node, which recognises its token's cluster by the pinned SHA-256 of the
//! authority's certificate.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::join_token::Sha256Digest;

/// A client that accepts a server certificate signed by the authority with this SHA-256; the server
/// sends the authority's certificate after its own. The server's address is not checked: every node
/// with such a certificate may admit others.
///
/// # Errors
/// [`Error`]; no case is known.
pub fn pinned_client_config(pin: Sha256Digest) -> Result<ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let pinned = PinnedVerifier { pin, provider: Arc::clone(&provider) };
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pinned));
    Ok(config.with_no_client_auth())
}

#[derive(Debug)]
struct PinnedVerifier {
    pin: Sha256Digest,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let is_pinned = |shown: &&CertificateDer<'_>| Sha256Digest::of(shown) == self.pin;
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = intermediates.iter().find(is_pinned).ok_or(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let builder = WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::clone(&self.provider),
        );
        let verifier = builder.build().map_err(|e| Error::General(e.to_string()))?;
        let verified =
            verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now);
        match verified {
            // The name is checked last: everything else is valid.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::certificate_authority::CertificateAuthority;

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    fn believes(
        pin: &CertificateAuthority,
        leaf: &str,
        shown: &CertificateAuthority,
        years: u64,
    ) -> bool {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let pinned = PinnedVerifier { pin: Sha256Digest(pin.fingerprint().unwrap()), provider };
        let name = ServerName::try_from("198.51.100.7").unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(years * 366 * 86_400));
        let chain = [der(shown.certificate())];
        pinned.verify_server_cert(&der(leaf), &chain, &name, &[], now).is_ok()
    }

    #[test]
    fn whom_the_authority_of_the_token_has_signed_is_believed_at_any_address_and_nobody_else() {
        let (own, other) =
            (CertificateAuthority::new().unwrap(), CertificateAuthority::new().unwrap());
        let node = own.issue("a", ["192.0.2.1".parse().unwrap()]).unwrap().certificate;
        let stranger = other.issue("a", ["198.51.100.7".parse().unwrap()]).unwrap().certificate;
        for years in [1, 56, 500] {
            assert!(believes(&own, &node, &own, years), "{years}");
        }
        assert!(!believes(&own, &stranger, &other, 56), "of another cluster");
        assert!(!believes(&own, &stranger, &own, 56), "which shows the right authority");
        assert!(!believes(&own, own.certificate(), &other, 56));
    }
}
