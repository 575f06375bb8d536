//! The cluster's own certificate authority, which signs its nodes' certificates (RFD 0038, 2.1).
//!
//! Every node holds the authority and signs a certificate for itself at each start. Certificates do
//! not expire: an attacker who can steal a node's key has the authority's as well, and a wrong
//! clock must not lock a node out.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use ring::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Longest PEM certificate or key accepted, in bytes.
const MAX_PEM_LEN: usize = 4096;

/// A certificate authority: its certificate and private key. Debug output never shows the key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CertificateAuthority {
    /// The name in its certificate, unique per authority.
    id: Uuid,
    /// Its certificate, in PEM.
    certificate: String,
    /// Its private key, PKCS #8 in PEM.
    key: String,
}

/// A certificate signed by the authority, and its key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct NodeCertificate {
    /// The certificate.
    pub certificate: String,
    /// Its private key, PKCS #8.
    pub key: String,
}

/// The authority cannot be created, or signing failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster's certificate authority: {0}")]
pub struct AuthorityError(String);

impl From<rustls::Error> for AuthorityError {
    fn from(e: rustls::Error) -> Self {
        Self(e.to_string())
    }
}

impl From<rcgen::Error> for AuthorityError {
    fn from(e: rcgen::Error) -> Self {
        Self(e.to_string())
    }
}

/// Parameters of an authority's own certificate.
fn authority_params(id: Uuid) -> CertificateParams {
    let mut params = never_expiring_params();
    params.distinguished_name.push(DnType::CommonName, format!("Windrose cluster authority {id}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

/// Parameters of a certificate without expiry (RFC 5280, 4.1.2.5).
fn never_expiring_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.not_before = date_time_ymd(1970, 1, 1);
    params.not_after = date_time_ymd(9999, 12, 31);
    params
}

impl CertificateAuthority {
    /// Creates a new authority.
    ///
    /// # Errors
    /// [`AuthorityError`] if the system provides no random bytes.
    pub fn new() -> Result<Self, AuthorityError> {
        let id = Uuid::new_v4();
        let key = KeyPair::generate()?;
        let certificate = authority_params(id).self_signed(&key)?.pem();
        Ok(Self { id, certificate, key: key.serialize_pem() })
    }

    /// Its certificate, in PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// SHA-256 of its certificate.
    ///
    /// # Errors
    /// [`AuthorityError`] if the PEM holds no certificate.
    pub fn fingerprint(&self) -> Result<[u8; 32], AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let certificate = certificate.map_err(|e| AuthorityError(e.to_string()))?;
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, &certificate).as_ref());
        Ok(bytes)
    }

    /// Checks that the authority can sign and that certificate and key match.
    ///
    /// # Errors
    /// [`AuthorityError`] says what is wrong.
    pub fn validate(&self) -> Result<(), AuthorityError> {
        if self.certificate.len() > MAX_PEM_LEN || self.key.len() > MAX_PEM_LEN {
            return Err(AuthorityError("its certificate or key is too long".to_owned()));
        }
        self.fingerprint()?;
        KeyPair::from_pem(&self.key)?;
        Ok(())
    }

    /// Issues a certificate for the node `name`, valid for server and client use at `addresses` and
    /// the loopback.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn issue(
        &self,
        name: &str,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> Result<NodeCertificate, AuthorityError> {
        let issuer = Issuer::new(authority_params(self.id), KeyPair::from_pem(&self.key)?);
        let mut params = never_expiring_params();
        params.distinguished_name.push(DnType::CommonName, name);
        let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        let mut all: Vec<IpAddr> = addresses.into_iter().chain(loopback).collect();
        all.sort_unstable();
        all.dedup();
        params.subject_alt_names = all.into_iter().map(SanType::IpAddress).collect();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?.pem();
        Ok(NodeCertificate { certificate, key: key.serialize_pem() })
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("id", &self.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for NodeCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeCertificate(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    /// Whether a client that trusts `authority` accepts `shown` from the server at `address`,
    /// `years` after 1970.
    fn believes(
        authority: &CertificateAuthority,
        shown: &NodeCertificate,
        address: &str,
        years: u64,
    ) -> bool {
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(der(authority.certificate())).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(years * 366 * 86_400));
        let name = ServerName::try_from(address.to_owned()).unwrap();
        let shown = der(&shown.certificate);
        verifier.build().unwrap().verify_server_cert(&shown, &[], &name, &[], now).is_ok()
    }

    #[test]
    fn a_node_is_believed_at_its_addresses_whatever_the_clock_says() {
        let (own, other) =
            (CertificateAuthority::new().unwrap(), CertificateAuthority::new().unwrap());
        own.validate().unwrap();
        let shown = own.issue("a", ["192.0.2.1".parse().unwrap()]).unwrap();
        for years in [0, 30, 56, 500] {
            for address in ["192.0.2.1", "127.0.0.1", "::1"] {
                assert!(believes(&own, &shown, address, years), "{address} after {years} years");
            }
        }
        assert!(!believes(&own, &shown, "192.0.2.2", 56), "an address that is not its own");
        assert!(!believes(&other, &shown, "192.0.2.1", 56), "an authority that did not sign it");
        assert_ne!(own.fingerprint(), other.fingerprint());
    }

    #[test]
    fn a_node_signs_for_itself_and_for_nobody_else() {
        let own = CertificateAuthority::new().unwrap();
        let node = own.issue("a", []).unwrap();
        // With only its own certificate's key, a node cannot sign certificates that others accept.
        let forger = CertificateAuthority { key: node.key, ..own.clone() };
        let forged = forger.issue("b", []).unwrap();
        assert!(!believes(&own, &forged, "127.0.0.1", 56));
    }

    #[test]
    fn an_authority_reads_back_and_shows_nothing_of_its_key() {
        let own = CertificateAuthority::new().unwrap();
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<CertificateAuthority>(&text).unwrap(), own);
        assert!(!format!("{own:?}").contains("PRIVATE"));
        let bad = [
            CertificateAuthority { key: "?".into(), ..own.clone() },
            CertificateAuthority { certificate: "?".into(), ..own.clone() },
            CertificateAuthority { key: " ".repeat(MAX_PEM_LEN + 1), ..own },
        ];
        assert!(bad.iter().all(|bad| bad.validate().is_err()));
    }
}
