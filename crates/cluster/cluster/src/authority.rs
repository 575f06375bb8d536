//! A cluster's own authority, which signs the certificates of its nodes (RFD 0038, 2.1).
//!
//! Every node has it, and signs a certificate for itself at each start. Nothing that is signed expires: whoever could steal
//! a node's key has the authority's as well, and a clock that is wrong must not keep a node out.

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

/// Longest certificate or key in PEM that is read, in bytes.
const MAX_PEM: usize = 4096;

/// An authority: its certificate, and the key that signs. Shows nothing of the key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Authority {
    /// What its certificate is named by; no two authorities have the same.
    id: Uuid,
    /// Its certificate, in PEM.
    certificate: String,
    /// Its private key, PKCS #8 in PEM.
    key: String,
}

/// A certificate that an authority has signed, and its key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct NodeCertificate {
    /// The certificate.
    pub certificate: String,
    /// Its private key, PKCS #8.
    pub key: String,
}

/// An authority cannot be made, or what it should sign cannot be signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster's authority: {0}")]
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

/// What an authority's certificate says.
fn authority_params(id: Uuid) -> CertificateParams {
    let mut params = valid_always();
    params.distinguished_name.push(DnType::CommonName, format!("Windrose cluster authority {id}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

/// A certificate that is valid whatever a clock says (RFC 5280, 4.1.2.5).
fn valid_always() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.not_before = date_time_ymd(1970, 1, 1);
    params.not_after = date_time_ymd(9999, 12, 31);
    params
}

impl Authority {
    /// A new one.
    ///
    /// # Errors
    /// [`AuthorityError`] if the system gives no random bytes.
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
    /// [`AuthorityError`] if there is no certificate in it.
    pub fn fingerprint(&self) -> Result<[u8; 32], AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let certificate = certificate.map_err(|e| AuthorityError(e.to_string()))?;
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, &certificate).as_ref());
        Ok(bytes)
    }

    /// Whether it can sign, and its certificate is that of its key.
    ///
    /// # Errors
    /// [`AuthorityError`] says what is wrong with it.
    pub fn check(&self) -> Result<(), AuthorityError> {
        if self.certificate.len() > MAX_PEM || self.key.len() > MAX_PEM {
            return Err(AuthorityError("its certificate or key is too long".to_owned()));
        }
        self.fingerprint()?;
        KeyPair::from_pem(&self.key)?;
        Ok(())
    }

    /// A certificate for the node called `name`, for servers and clients at these addresses and at the loopback.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn sign(
        &self,
        name: &str,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> Result<NodeCertificate, AuthorityError> {
        let issuer = Issuer::new(authority_params(self.id), KeyPair::from_pem(&self.key)?);
        let mut params = valid_always();
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

impl fmt::Debug for Authority {
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

    /// Whether a client that trusts `authority` believes `shown` to be the server at `address`, `years` after 1970.
    fn believes(authority: &Authority, shown: &NodeCertificate, address: &str, years: u64) -> bool {
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
        let (own, other) = (Authority::new().unwrap(), Authority::new().unwrap());
        own.check().unwrap();
        let shown = own.sign("a", ["192.0.2.1".parse().unwrap()]).unwrap();
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
        let own = Authority::new().unwrap();
        let node = own.sign("a", []).unwrap();
        // With its own certificate's key a node makes no certificates that others believe.
        let forger = Authority { key: node.key, ..own.clone() };
        let forged = forger.sign("b", []).unwrap();
        assert!(!believes(&own, &forged, "127.0.0.1", 56));
    }

    #[test]
    fn an_authority_reads_back_and_shows_nothing_of_its_key() {
        let own = Authority::new().unwrap();
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<Authority>(&text).unwrap(), own);
        assert!(!format!("{own:?}").contains("PRIVATE"));
        let bad = [
            Authority { key: "?".into(), ..own.clone() },
            Authority { certificate: "?".into(), ..own.clone() },
            Authority { key: " ".repeat(MAX_PEM + 1), ..own },
        ];
        assert!(bad.iter().all(|bad| bad.check().is_err()));
    }
}
