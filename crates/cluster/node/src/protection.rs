//! The certificates by which a node speaks to the others of its cluster and to their store (RFD 0038).

use std::fs::{self, DirBuilder};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::cluster::authority::{Authority, AuthorityError, NodeCertificate};
use ::cluster::file;
use ::cluster::identity::{Identity, Protection};
use ::cluster::pin;
use ::cluster::token::Trust;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::config::{Cluster, ClusterTls};
use crate::data_dir;

/// Most addresses of each kind that a certificate bears beside those of the configuration.
const MAX_LOCAL: usize = 64;

/// Why a node has no certificates to speak to others by.
#[derive(Debug, thiserror::Error)]
pub enum ProtectionError {
    /// The cluster signs its certificates itself, and the configuration names others.
    #[error(
        "cluster.tls_ca is set, and this cluster signs its certificates itself: remove cluster.tls_ca, tls_cert and tls_key"
    )]
    OwnAuthority,
    /// The cluster speaks in plain text, and the configuration names certificates.
    #[error(
        "cluster.tls_ca is set, and this cluster was formed with --insecure: remove cluster.tls_ca, tls_cert and tls_key"
    )]
    Plain,
    /// The cluster's certificates are those of an administrator, and the configuration names none.
    #[error(
        "the nodes of this cluster have certificates of an authority of yours: set cluster.tls_ca, tls_cert and tls_key \
         as at the other nodes"
    )]
    NoneGiven,
    /// The authority of the cluster.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file cannot be written.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What the system said.
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

/// The authorities of the cluster's own that a node with this identity believes, in PEM; nothing where it has none.
pub(crate) fn believed(identity: &Identity) -> String {
    let other = identity.other_credentials().map(|other| &other.protection);
    authorities(&identity.protection, other)
}

fn authorities(own: &Protection, other: Option<&Protection>) -> String {
    let both = [Some(own), other].into_iter().flatten();
    let certificate = |protection: &Protection| match protection {
        Protection::Own(authority) => authority.certificate().to_owned(),
        Protection::Given | Protection::Plain => String::new(),
    };
    both.map(certificate).collect()
}

/// The files of the certificates of the node called `name`, in a cluster that is protected so; `None` if that speaks in plain
/// text. Those that the cluster signs itself are signed anew, for the addresses in `config`; who is protected as `other` says
/// is believed as well.
///
/// # Errors
/// [`ProtectionError`].
pub(crate) fn certificates(
    (protection, other): (&Protection, Option<&Protection>),
    name: &str,
    config: &Cluster,
    data_dir: &Path,
) -> Result<Option<ClusterTls>, ProtectionError> {
    match (protection, &config.tls) {
        (Protection::Own(authority), None) => {
            let believed = authorities(protection, other);
            sign((authority, &believed), name, config, &data_dir::tls(data_dir)).map(Some)
        }
        (Protection::Own(_), Some(_)) => Err(ProtectionError::OwnAuthority),
        (Protection::Given, Some(given)) => Ok(Some(given.clone())),
        (Protection::Given, None) => Err(ProtectionError::NoneGiven),
        (Protection::Plain, None) => Ok(None),
        (Protection::Plain, Some(_)) => Err(ProtectionError::Plain),
    }
}

/// Removes the certificates of a cluster that the node has left. Where that fails they are of no use, and are overwritten by
/// the next ones.
pub(crate) fn forget(data_dir: &Path) {
    let path = data_dir::tls(data_dir);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "certificates of a cluster are still there");
        }
        _ => {}
    }
}

/// Signs a certificate, and writes it into `directory`, with its key and the authorities that are believed.
fn sign(
    (authority, believed): (&Authority, &str),
    name: &str,
    config: &Cluster,
    directory: &Path,
) -> Result<ClusterTls, ProtectionError> {
    let refused = |path: &Path, why| ProtectionError::Refused { path: path.to_owned(), why };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.and_then(|()| fs::set_permissions(directory, fs::Permissions::from_mode(0o700)))
        .map_err(|why| refused(directory, why))?;
    let signed = authority.sign(name, addresses(config))?;
    let [ca, cert, key] = ["ca.crt", "node.crt", "node.key"].map(|name| directory.join(name));
    let files = ClusterTls { ca, cert, key };
    match write(&files, believed, &signed) {
        Ok(()) => Ok(files),
        // A full disk keeps no node from starting again. What may be missing in them is an address that is new.
        Err((path, error)) if is_of(believed, &files) => {
            tracing::warn!(
                path = %path.display(), %error,
                "a new certificate of this node cannot be written: it goes on with the last one"
            );
            Ok(files)
        }
        Err((path, why)) => Err(refused(&path, why)),
    }
}

/// Writes them as nearly at once as can be: nothing of what was there is touched before all are on the disk.
fn write(
    files: &ClusterTls,
    believed: &str,
    signed: &NodeCertificate,
) -> Result<(), (PathBuf, io::Error)> {
    let next = |path: &Path| path.with_added_extension("next");
    // The authorities last: where they are the new ones, so are certificate and key (`is_of`).
    let all =
        [(&files.cert, &*signed.certificate), (&files.key, &*signed.key), (&files.ca, believed)];
    for (path, text) in all {
        let path = next(path);
        file::write_raw(&path, text.as_bytes()).map_err(|why| (path, why))?;
    }
    for (path, _) in all {
        fs::rename(next(path), path).map_err(|why| (path.clone(), why))?;
    }
    Ok(())
}

/// Whether these are there, fit together, and believe these authorities.
fn is_of(believed: &str, files: &ClusterTls) -> bool {
    let ca = fs::read_to_string(&files.ca);
    ca.is_ok_and(|ca| ca == believed) && peer_tls(files).is_ok()
}

/// Where others reach this node and its member of the store, and what connections of it may come from: members of the store
/// believe no certificate that does not bear the address of its connection.
fn addresses(config: &Cluster) -> impl Iterator<Item = IpAddr> {
    let store = [config.store.client, config.store.peer].into_iter().flatten();
    let own = config.listen.iter().chain(&config.heartbeat).chain(&config.join).copied();
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let local = ipv4_of(&read("/proc/net/fib_trie")).into_iter().map(IpAddr::from);
    let local = local.chain(ipv6_of(&read("/proc/net/if_inet6")).into_iter().map(IpAddr::from));
    own.chain(store).map(|at| at.ip()).chain(local)
}

/// The addresses of this machine in the kernel's routing table, as `/proc/net/fib_trie` shows it.
fn ipv4_of(trie: &str) -> Vec<Ipv4Addr> {
    let mut last: Option<Ipv4Addr> = None;
    let mut found = Vec::new();
    for line in trie.lines().map(str::trim) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            last = leaf.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last);
        }
    }
    found.truncate(MAX_LOCAL);
    found
}

/// The addresses of this machine, as `/proc/net/if_inet6` shows them.
fn ipv6_of(list: &str) -> Vec<Ipv6Addr> {
    let digits = list.lines().filter_map(|line| line.split_whitespace().next());
    let address = |d: &str| u128::from_str_radix(d, 16).ok().filter(|_| d.len() == 32);
    digits.filter_map(address).map(Ipv6Addr::from_bits).take(MAX_LOCAL).collect()
}

/// TLS between nodes, by certificates in files.
///
/// # Errors
/// [`ProtectionError::Unusable`].
pub(crate) fn peer_tls(tls: &ClusterTls) -> Result<peer::Tls, ProtectionError> {
    let bad = |path: &Path, why: String| ProtectionError::Unusable { path: path.to_owned(), why };
    let mut authority = RootCertStore::empty();
    for certificate in pem_certificates(&tls.ca)? {
        authority.add(certificate).map_err(|e| bad(&tls.ca, e.to_string()))?;
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|e| bad(&tls.key, e.to_string()))?;
    let chain = pem_certificates(&tls.cert)?;
    peer::Tls::new(authority, chain, key).map_err(|e| bad(&tls.cert, e.to_string()))
}

/// What nodes that join are shown by this one, which has these certificates in a cluster that is protected so.
///
/// # Errors
/// [`ProtectionError::Unusable`].
pub(crate) fn join_acceptor(
    protection: &Protection,
    tls: &ClusterTls,
) -> Result<TlsAcceptor, ProtectionError> {
    let bad = |path: &Path, why: String| ProtectionError::Unusable { path: path.to_owned(), why };
    let mut chain = pem_certificates(&tls.cert)?;
    if let Protection::Own(authority) = protection {
        // Who joins knows the authority by the SHA-256 of its certificate, and has to see it for that.
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

/// What a node that joins believes of the nodes of the token's cluster; `None` if that speaks in plain text.
///
/// # Errors
/// [`ProtectionError`]: the cluster is of another kind than the configuration says, or a file cannot be used.
pub(crate) fn join_connector(
    trust: Trust,
    config: &Cluster,
) -> Result<Option<TlsConnector>, ProtectionError> {
    let client = match (trust, &config.tls) {
        (Trust::Own(_), Some(_)) => return Err(ProtectionError::OwnAuthority),
        (Trust::Plain, Some(_)) => return Err(ProtectionError::Plain),
        (Trust::Given, None) => return Err(ProtectionError::NoneGiven),
        (Trust::Plain, None) => return Ok(None),
        (Trust::Own(pin), None) => pin::client(pin).map_err(|e| AuthorityError::from(e).into()),
        (Trust::Given, Some(tls)) => trusting(tls),
    };
    client.map(|client| Some(TlsConnector::from(Arc::new(client))))
}

fn trusting(tls: &ClusterTls) -> Result<rustls::ClientConfig, ProtectionError> {
    let bad = |why: String| ProtectionError::Unusable { path: tls.ca.clone(), why };
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

fn pem_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ProtectionError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|e: rustls::pki_types::pem::Error| ProtectionError::Unusable {
        path: path.to_owned(),
        why: e.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn config(text: &str) -> Cluster {
        Config::parse(Path::new("test"), text).unwrap().cluster
    }

    #[test]
    fn a_cluster_that_signs_its_certificates_has_them_in_the_data_directory() {
        let dir = tempfile::tempdir().unwrap();
        let protection = Protection::Own(Authority::new().unwrap());
        let config = config("[cluster]\nlisten = [\"192.0.2.1:7480\"]\n");
        let made = || certificates((&protection, None), "a", &config, dir.path()).unwrap().unwrap();
        let files = made();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&files.key), mode(&dir.path().join("tls"))), (0o600, 0o700));
        peer_tls(&files).unwrap();
        let first = fs::read(&files.cert).unwrap();
        peer_tls(&made()).unwrap();
        let second = fs::read(&files.cert).unwrap();
        assert_ne!(second, first, "signed anew at each start");
        // What cannot be written does not keep it from starting, as long as there is one.
        fs::create_dir(dir.path().join("tls/node.key.next.new")).unwrap();
        assert_eq!((made(), fs::read(&files.cert).unwrap()), (files.clone(), second));
        peer_tls(&files).unwrap();
        let other = Protection::Own(Authority::new().unwrap());
        let refused =
            certificates((&other, None), "a", &config, dir.path()).unwrap_err().to_string();
        assert!(refused.contains("node.key.next"), "{refused}");
    }

    #[test]
    fn new_authorities_are_not_in_place_before_the_certificate_that_they_signed() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = [(); 2].map(|()| Protection::Own(Authority::new().unwrap()));
        let config = config("[cluster]\nlisten = [\"192.0.2.1:7480\"]\n");
        let made = |now, other| certificates((now, Some(other)), "a", &config, dir.path());
        let files = made(&old, &new).unwrap().unwrap();
        for kept in [&files.cert, &files.key] {
            let text = fs::read(kept).unwrap();
            fs::remove_file(kept).unwrap();
            fs::create_dir(kept).unwrap();
            fs::write(kept.join("in-the-way"), "").unwrap();
            let believed = fs::read(&files.ca).unwrap();
            let refused = made(&new, &old).unwrap_err().to_string();
            assert!(refused.contains(&kept.display().to_string()), "{refused}");
            assert_eq!(fs::read(&files.ca).unwrap(), believed);
            fs::remove_dir_all(kept).unwrap();
            fs::write(kept, text).unwrap();
            made(&new, &old).expect("nothing is in the way now");
            made(&old, &new).unwrap();
        }
    }

    #[test]
    fn a_certificate_bears_the_addresses_of_the_machine() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 192.0.2.7\n        \
                    /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n     |-- ?\n        /32 host LOCAL\n";
        assert_eq!(ipv4_of(trie), [Ipv4Addr::new(192, 0, 2, 7)]);
        let list =
            "20010db8000000000000000000000001 02 40 00 80 eth0\nx 01\n\n1 02 40 00 80 eth0\n";
        assert_eq!(ipv6_of(list), ["2001:db8::1".parse::<Ipv6Addr>().unwrap()]);
        assert!(addresses(&config("")).any(|address| address.is_loopback()));
    }

    #[test]
    fn certificates_of_another_kind_of_cluster_are_refused_and_named() {
        let given = config("[cluster]\ntls_ca = \"/c\"\ntls_cert = \"/x\"\ntls_key = \"/k\"\n");
        let none = config("");
        let own = Protection::Own(Authority::new().unwrap());
        let of = |protection: &Protection, config: &Cluster| {
            certificates((protection, None), "a", config, Path::new("/proc/nowhere"))
        };
        assert!(of(&own, &given).unwrap_err().to_string().contains("remove cluster.tls_ca"));
        assert!(of(&Protection::Plain, &given).unwrap_err().to_string().contains("--insecure"));
        assert!(of(&Protection::Given, &none).unwrap_err().to_string().contains("set cluster.tls"));
        assert_eq!(of(&Protection::Given, &given).unwrap(), given.tls);
        assert_eq!(of(&Protection::Plain, &none).unwrap(), None);
        let refused = of(&own, &none).unwrap_err().to_string();
        assert!(refused.contains("/proc/nowhere/tls"), "{refused}");
    }
}
