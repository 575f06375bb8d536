//! The certificates that a node uses with the other nodes of its cluster and their store (RFD
//! 0038).

use std::fs::{self, DirBuilder};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cluster::certificate_authority::{AuthorityError, CertificateAuthority, NodeCertificate};
use cluster::identity::{ClusterIdentity, TransportSecurity};
use cluster::join_token::TrustAnchor;
use cluster::pinned_tls;
use cluster::record_file;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use config::data_dir;
use config::{Cluster, ClusterTls};

/// Most local addresses of each kind in a certificate, besides those of the configuration.
const MAX_LOCAL_ADDRESSES: usize = 64;

/// Why a node has no usable certificates.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The cluster signs its own certificates, but the configuration names others.
    #[error(
        "cluster.tls_ca is set, but this cluster signs its own certificates: remove \
         cluster.tls_ca, tls_cert and tls_key"
    )]
    ClusterSignsItsOwn,
    /// The cluster uses plain text, but the configuration names certificates.
    #[error(
        "cluster.tls_ca is set, but this cluster was formed with --insecure: remove \
         cluster.tls_ca, tls_cert and tls_key"
    )]
    ClusterIsPlaintext,
    /// The cluster uses an administrator's certificates, but the configuration names none.
    #[error(
        "the nodes of this cluster have certificates of your own authority: set cluster.tls_ca, \
         tls_cert and tls_key as at the other nodes"
    )]
    CertificatesMissing,
    /// The cluster's authority failed to sign.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file cannot be written.
    #[error("{}: {why}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// A certificate or key cannot be used.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// Its file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// The cluster authorities that a node with this identity trusts, in PEM; empty if the cluster has
/// none.
pub(crate) fn trusted_authorities(identity: &ClusterIdentity) -> String {
    let other = identity.also_accepted_credentials().map(|other| &other.transport_security);
    concat_authorities(&identity.transport_security, other)
}

fn concat_authorities(own: &TransportSecurity, other: Option<&TransportSecurity>) -> String {
    let both = [Some(own), other].into_iter().flatten();
    let certificate = |protection: &TransportSecurity| match protection {
        TransportSecurity::ClusterAuthority(authority) => authority.certificate().to_owned(),
        TransportSecurity::AdministratorCertificates | TransportSecurity::PlainText => {
            String::new()
        }
    };
    both.map(certificate).collect()
}

/// The certificate files of the node called `name`, by the cluster's transport security; `None` for
/// plain text. Certificates of the cluster's own authority are issued anew for the addresses in
/// `config`. `other` is trusted too.
///
/// # Errors
/// [`CertificateError`].
pub fn prepare_certificates(
    (protection, other): (&TransportSecurity, Option<&TransportSecurity>),
    name: &str,
    config: &Cluster,
    data_dir: &Path,
) -> Result<Option<ClusterTls>, CertificateError> {
    match (protection, &config.tls) {
        (TransportSecurity::ClusterAuthority(authority), None) => {
            let trusted = concat_authorities(protection, other);
            sign_node_certificate((authority, &trusted), name, config, &data_dir::tls_dir(data_dir))
                .map(Some)
        }
        (TransportSecurity::ClusterAuthority(_), Some(_)) => {
            Err(CertificateError::ClusterSignsItsOwn)
        }
        (TransportSecurity::AdministratorCertificates, Some(given)) => Ok(Some(given.clone())),
        (TransportSecurity::AdministratorCertificates, None) => {
            Err(CertificateError::CertificatesMissing)
        }
        (TransportSecurity::PlainText, None) => Ok(None),
        (TransportSecurity::PlainText, Some(_)) => Err(CertificateError::ClusterIsPlaintext),
    }
}

/// Removes the certificates of a cluster that the node has left. If that fails, they are useless,
/// and the next ones overwrite them.
pub(crate) fn remove_certificates(data_dir: &Path) {
    let path = data_dir::tls_dir(data_dir);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove the certificates of the former cluster");
        }
        _ => {}
    }
}

/// Issues a certificate; writes it, its key and the trusted authorities into `directory`.
fn sign_node_certificate(
    (authority, trusted): (&CertificateAuthority, &str),
    name: &str,
    config: &Cluster,
    directory: &Path,
) -> Result<ClusterTls, CertificateError> {
    let refused = |path: &Path, why| CertificateError::Io { path: path.to_owned(), why };
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created
        .and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(0o700)))
        .map_err(|why| refused(directory, why))?;
    let signed = authority.issue(name, certificate_addresses(config))?;
    let [ca, cert, key] = ["ca.crt", "node.crt", "node.key"].map(|name| directory.join(name));
    let files = ClusterTls { ca, cert, key };
    match write_certificates(&files, trusted, &signed) {
        Ok(()) => Ok(files),
        // A full disk must not keep the node from starting. The old certificate may lack a new
        // address.
        Err((path, error)) if are_current(trusted, &files) => {
            tracing::warn!(
                path = %path.display(), %error,
                "cannot write a new certificate of this node; keeping the last one"
            );
            Ok(files)
        }
        Err((path, why)) => Err(refused(&path, why)),
    }
}

/// Replaces the files nearly at once: writes all new files before it renames the first.
fn write_certificates(
    files: &ClusterTls,
    trusted: &str,
    signed: &NodeCertificate,
) -> Result<(), (PathBuf, io::Error)> {
    let next = |path: &Path| path.with_added_extension("next");
    // The authorities last: once they are new, so are certificate and key (`are_current`).
    let all =
        [(&files.cert, &*signed.certificate), (&files.key, &*signed.key), (&files.ca, trusted)];
    for (path, text) in all {
        let path = next(path);
        record_file::write_unchecked(&path, text.as_bytes()).map_err(|why| (path, why))?;
    }
    for (path, _) in all {
        fs::rename(next(path), path).map_err(|why| (path.clone(), why))?;
    }
    Ok(())
}

/// Whether these files exist, fit together, and contain these authorities.
fn are_current(trusted: &str, files: &ClusterTls) -> bool {
    let ca = fs::read_to_string(&files.ca);
    ca.is_ok_and(|ca| ca == trusted) && peer_tls(files).is_ok()
}

/// The addresses of this node and its store member, and those from which it connects: a store
/// member accepts only a certificate that contains the address of the connection.
fn certificate_addresses(config: &Cluster) -> impl Iterator<Item = IpAddr> {
    let store = [config.store.client, config.store.peer].into_iter().flatten();
    let own = config.listen.iter().chain(&config.heartbeat).chain(&config.join).copied();
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let local = local_ipv4(&read("/proc/net/fib_trie")).into_iter().map(IpAddr::from);
    let local = local.chain(local_ipv6(&read("/proc/net/if_inet6")).into_iter().map(IpAddr::from));
    own.chain(store).map(|at| at.ip()).chain(local)
}

/// The local addresses in the kernel's routing table, in the format of `/proc/net/fib_trie`.
fn local_ipv4(trie: &str) -> Vec<Ipv4Addr> {
    let mut last: Option<Ipv4Addr> = None;
    let mut found = Vec::new();
    for line in trie.lines().map(str::trim) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            last = leaf.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last);
        }
    }
    found.truncate(MAX_LOCAL_ADDRESSES);
    found
}

/// The local addresses, in the format of `/proc/net/if_inet6`.
fn local_ipv6(list: &str) -> Vec<Ipv6Addr> {
    let digits = list.lines().filter_map(|line| line.split_whitespace().next());
    let address = |d: &str| u128::from_str_radix(d, 16).ok().filter(|_| d.len() == 32);
    digits.filter_map(address).map(Ipv6Addr::from_bits).take(MAX_LOCAL_ADDRESSES).collect()
}

/// TLS between nodes, with the certificates in these files.
///
/// # Errors
/// [`CertificateError::Unusable`].
pub(crate) fn peer_tls(tls: &ClusterTls) -> Result<peer::Tls, CertificateError> {
    let bad = |path: &Path, why: String| CertificateError::Unusable { path: path.to_owned(), why };
    let mut authority = RootCertStore::empty();
    for certificate in pem_certificates(&tls.ca)? {
        authority.add(certificate).map_err(|e| bad(&tls.ca, e.to_string()))?;
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|e| bad(&tls.key, e.to_string()))?;
    let chain = pem_certificates(&tls.cert)?;
    peer::Tls::new(authority, chain, key).map_err(|e| bad(&tls.cert, e.to_string()))
}

/// The TLS server for joining nodes, with these certificates, by the cluster's transport security.
///
/// # Errors
/// [`CertificateError::Unusable`].
pub fn join_acceptor(
    protection: &TransportSecurity,
    tls: &ClusterTls,
) -> Result<TlsAcceptor, CertificateError> {
    let bad = |path: &Path, why: String| CertificateError::Unusable { path: path.to_owned(), why };
    let mut chain = pem_certificates(&tls.cert)?;
    if let TransportSecurity::ClusterAuthority(authority) = protection {
        // A joining node knows the authority by the SHA-256 of its certificate: send it in the
        // chain.
        let certificate = CertificateDer::from_pem_slice(authority.certificate().as_bytes());
        chain.push(certificate.map_err(|e| bad(&tls.ca, e.to_string()))?);
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|e| bad(&tls.key, e.to_string()))?;
    let unusable = |e: rustls::Error| bad(&tls.cert, e.to_string());
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(TLS_13)
        .map_err(unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The TLS client with which a node joins the cluster of its token; `None` if that uses plain text.
///
/// # Errors
/// [`CertificateError`] if the configuration does not fit the cluster, or a file cannot be used.
pub fn join_connector(
    trust: TrustAnchor,
    config: &Cluster,
) -> Result<Option<TlsConnector>, CertificateError> {
    let client = match (trust, &config.tls) {
        (TrustAnchor::PinnedAuthority(_), Some(_)) => {
            return Err(CertificateError::ClusterSignsItsOwn);
        }
        (TrustAnchor::PlainText, Some(_)) => return Err(CertificateError::ClusterIsPlaintext),
        (TrustAnchor::AdministratorCa, None) => return Err(CertificateError::CertificatesMissing),
        (TrustAnchor::PlainText, None) => return Ok(None),
        (TrustAnchor::PinnedAuthority(pin), None) => {
            pinned_tls::pinned_client_config(pin).map_err(|e| AuthorityError::from(e).into())
        }
        (TrustAnchor::AdministratorCa, Some(tls)) => client_config(tls),
    };
    client.map(|client| Some(TlsConnector::from(Arc::new(client))))
}

fn client_config(tls: &ClusterTls) -> Result<rustls::ClientConfig, CertificateError> {
    let bad = |why: String| CertificateError::Unusable { path: tls.ca.clone(), why };
    let mut authority = RootCertStore::empty();
    for certificate in pem_certificates(&tls.ca)? {
        authority.add(certificate).map_err(|e| bad(e.to_string()))?;
    }
    let client = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(TLS_13)
        .map_err(|e| bad(e.to_string()))?;
    Ok(client.with_root_certificates(authority).with_no_client_auth())
}

const TLS_13: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn pem_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|e: rustls::pki_types::pem::Error| CertificateError::Unusable {
        path: path.to_owned(),
        why: e.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::Config;

    fn config(text: &str) -> Cluster {
        Config::parse(Path::new("test"), text).unwrap().cluster
    }

    #[test]
    fn a_cluster_that_signs_its_certificates_has_them_in_the_data_directory() {
        let dir = tempfile::tempdir().unwrap();
        let protection = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
        let config = config("[cluster]\nlisten = [\"192.0.2.1:7480\"]\n");
        let made = || {
            prepare_certificates((&protection, None), "a", &config, dir.path()).unwrap().unwrap()
        };
        let files = made();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&files.key), mode(&dir.path().join("tls"))), (0o600, 0o700));
        peer_tls(&files).unwrap();
        let first = fs::read(&files.cert).unwrap();
        peer_tls(&made()).unwrap();
        let second = fs::read(&files.cert).unwrap();
        assert_ne!(second, first, "signed anew at each start");
        // A failed write does not keep the node from starting while there is an older certificate.
        fs::create_dir(dir.path().join("tls/node.key.next.new")).unwrap();
        assert_eq!((made(), fs::read(&files.cert).unwrap()), (files.clone(), second));
        peer_tls(&files).unwrap();
        let other = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
        let refused =
            prepare_certificates((&other, None), "a", &config, dir.path()).unwrap_err().to_string();
        assert!(refused.contains("node.key.next"), "{refused}");
    }

    #[test]
    fn new_authorities_are_not_in_place_before_the_certificate_that_they_signed() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = [(); 2]
            .map(|()| TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap()));
        let config = config("[cluster]\nlisten = [\"192.0.2.1:7480\"]\n");
        let made = |now, other| prepare_certificates((now, Some(other)), "a", &config, dir.path());
        let files = made(&old, &new).unwrap().unwrap();
        for blocked in [&files.cert, &files.key] {
            let text = fs::read(blocked).unwrap();
            fs::remove_file(blocked).unwrap();
            fs::create_dir(blocked).unwrap();
            fs::write(blocked.join("in-the-way"), "").unwrap();
            let trusted = fs::read(&files.ca).unwrap();
            let refused = made(&new, &old).unwrap_err().to_string();
            assert!(refused.contains(&blocked.display().to_string()), "{refused}");
            assert_eq!(fs::read(&files.ca).unwrap(), trusted);
            fs::remove_dir_all(blocked).unwrap();
            fs::write(blocked, text).unwrap();
            made(&new, &old).expect("nothing is in the way now");
            made(&old, &new).unwrap();
        }
    }

    #[test]
    fn a_certificate_bears_the_addresses_of_the_machine() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 192.0.2.7\n        \
                    /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n     |-- ?\n        /32 host LOCAL\n";
        assert_eq!(local_ipv4(trie), [Ipv4Addr::new(192, 0, 2, 7)]);
        let list =
            "20010db8000000000000000000000001 02 40 00 80 eth0\nx 01\n\n1 02 40 00 80 eth0\n";
        assert_eq!(local_ipv6(list), ["2001:db8::1".parse::<Ipv6Addr>().unwrap()]);
        assert!(certificate_addresses(&config("")).any(|address| address.is_loopback()));
    }

    #[test]
    fn certificates_of_another_kind_of_cluster_are_refused_and_named() {
        let given = config("[cluster]\ntls_ca = \"/c\"\ntls_cert = \"/x\"\ntls_key = \"/k\"\n");
        let none = config("");
        let own = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
        let prepare = |protection: &TransportSecurity, config: &Cluster| {
            prepare_certificates((protection, None), "a", config, Path::new("/proc/nowhere"))
        };
        assert!(prepare(&own, &given).unwrap_err().to_string().contains("remove cluster.tls_ca"));
        assert!(
            prepare(&TransportSecurity::PlainText, &given)
                .unwrap_err()
                .to_string()
                .contains("--insecure")
        );
        assert!(
            prepare(&TransportSecurity::AdministratorCertificates, &none)
                .unwrap_err()
                .to_string()
                .contains("set cluster.tls")
        );
        assert_eq!(
            prepare(&TransportSecurity::AdministratorCertificates, &given).unwrap(),
            given.tls
        );
        assert_eq!(prepare(&TransportSecurity::PlainText, &none).unwrap(), None);
        let refused = prepare(&own, &none).unwrap_err().to_string();
        assert!(refused.contains("/proc/nowhere/tls"), "{refused}");
    }
}
