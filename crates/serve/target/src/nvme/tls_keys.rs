//! Hosts that use TLS (RFD 0022): finding their keys, and what they may connect to.

use std::net::SocketAddr;
use std::rc::Rc;

use nvme::Connect;
use nvme::tls::{CipherSuite, Identity, Psk};
use tls::ClientHello;
use tokio::time::Instant;

use super::HostConnection;
use crate::auth_throttle::AuthMethod;
use crate::catalog::{Catalog, HostKey};
use crate::channel::{BoxedPskLookup, PskLookup, TlsEndpoints};
use crate::server::{AuthAttempt, Server};

/// Most offered keys that are checked. A host has one for each subsystem.
const MAX_OFFERED_KEYS: usize = 4;

/// The keys in the current catalog.
struct CatalogKeys(Rc<Server>);

impl PskLookup for CatalogKeys {
    fn find(&self, hello: &ClientHello) -> Option<(tls::Psk, TlsEndpoints)> {
        find(&self.0.catalog(), hello)
    }

    fn attempt(
        &self,
        peer: SocketAddr,
        hello: Option<&ClientHello>,
    ) -> Option<(Option<Instant>, AuthAttempt)> {
        let first = hello.and_then(|hello| hello.offers().first());
        let named = first.and_then(|offer| Identity::parse(&offer.identity));
        // Existing and unknown subsystems are treated alike: otherwise the delay would tell the
        // client.
        self.0.begin_auth_attempt((
            peer.ip(),
            AuthMethod::Tls,
            named.map_or("", |named| named.subnqn),
        ))
    }
}

/// The keys of hosts.
pub(crate) fn psk_lookup(server: &Rc<Server>) -> BoxedPskLookup {
    Box::new(CatalogKeys(Rc::clone(server)))
}

/// The first offered key that exists, and its two parties.
fn find(catalog: &Catalog, hello: &ClientHello) -> Option<(tls::Psk, TlsEndpoints)> {
    hello.offers().iter().take(MAX_OFFERED_KEYS).find_map(|offer| {
        let identity = Identity::parse(&offer.identity)?;
        let (host, subsystem) = (identity.hostnqn, identity.subnqn);
        let HostKey::Known(key) = &catalog.subsystems.get(subsystem)?.tls.get(host)?.key else {
            return None;
        };
        let named = |psk: &Psk| psk.identity().as_bytes() == offer.identity;
        let mut psks = key.psks(host, subsystem).filter(named).map(|psk| for_tls(&psk));
        if identity.suite == key.suite() && !offer.binder_fits(suite(key.suite())) {
            // GnuTLS before 3.8.11 does this with each key of SHA-384.
            tracing::info!(host, subsystem, "a host's TLS takes its key for one of another hash");
            return None;
        }
        let psk = psks.find(|psk| hello.verify_binder(offer, psk))?;
        Some((psk, TlsEndpoints { host: host.into(), subsystem: subsystem.into() }))
    })
}

fn for_tls(psk: &Psk) -> tls::Psk {
    tls::Psk::new(psk.identity().as_bytes(), psk.key(), suite(psk.suite()))
}

fn suite(suite: CipherSuite) -> tls::CipherSuite {
    match suite {
        CipherSuite::Aes128Sha256 => tls::CipherSuite::Aes128Sha256,
        CipherSuite::Aes256Sha384 => tls::CipherSuite::Aes256Sha384,
    }
}

impl HostConnection {
    /// Whether the connection uses TLS.
    pub(super) fn is_protected(&self) -> bool {
        self.context.protection.get().is_some()
    }

    /// Whether a Connect names the two parties of the connection's key, if it has one.
    pub(super) fn matches_tls_endpoints(&self, connect: &Connect) -> bool {
        let is =
            |ends: &TlsEndpoints| ends.host == connect.hostnqn && ends.subsystem == connect.subnqn;
        self.context.protection.get().is_none_or(is)
    }
}
