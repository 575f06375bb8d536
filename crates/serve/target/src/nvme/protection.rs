//! Hosts that come by TLS (RFD 0022): whose key it is, and what they may connect.

use std::net::SocketAddr;
use std::rc::Rc;

use nvme::Connect;
use nvme::tls::{Identity, Psk, Suite};
use tls::Hello;
use tokio::time::Instant;

use super::Host;
use crate::catalog::{Catalog, HostKey};
use crate::channel::{Ends, Keys, KnowsKeys};
use crate::guesses::Method;
use crate::server::{Attempt, Server};

/// Keys that are looked at, of those that a host says it has. It has one for each subsystem.
const OFFERS: usize = 4;

/// The keys in the catalog that is in force.
struct CatalogKeys(Rc<Server>);

impl KnowsKeys for CatalogKeys {
    fn find(&self, hello: &Hello) -> Option<(tls::Psk, Ends)> {
        find(&self.0.catalog(), hello)
    }

    fn attempt(
        &self,
        peer: SocketAddr,
        hello: Option<&Hello>,
    ) -> Option<(Option<Instant>, Attempt)> {
        let first = hello.and_then(|hello| hello.offers().first());
        let named = first.and_then(|offer| Identity::parse(&offer.identity));
        // Whether there is such a subsystem makes no difference: the wait would tell the client.
        self.0.attempt((peer.ip(), Method::Tls, named.map_or("", |named| named.subnqn)))
    }
}

/// The keys of hosts.
pub(crate) fn keys(server: &Rc<Server>) -> Keys {
    Box::new(CatalogKeys(Rc::clone(server)))
}

/// The first key of those that a host says it has that it does have, and between whom it is.
fn find(catalog: &Catalog, hello: &Hello) -> Option<(tls::Psk, Ends)> {
    hello.offers().iter().take(OFFERS).find_map(|offer| {
        let identity = Identity::parse(&offer.identity)?;
        let (host, subsystem) = (identity.hostnqn, identity.subnqn);
        let HostKey::Known(key) = &catalog.subsystems.get(subsystem)?.tls.get(host)?.key else {
            return None;
        };
        let named = |psk: &Psk| psk.identity().as_bytes() == offer.identity;
        let mut psks = key.psks(host, subsystem).filter(named).map(|psk| for_tls(&psk));
        if identity.suite == key.suite() && !offer.is_bound_for(suite(key.suite())) {
            // GnuTLS before 3.8.11 does this with each key of SHA-384.
            tracing::info!(host, subsystem, "a host's TLS takes its key for one of another hash");
            return None;
        }
        let psk = psks.find(|psk| hello.has(offer, psk))?;
        Some((psk, Ends { host: host.into(), subsystem: subsystem.into() }))
    })
}

fn for_tls(psk: &Psk) -> tls::Psk {
    tls::Psk::new(psk.identity().as_bytes(), psk.key(), suite(psk.suite()))
}

fn suite(suite: Suite) -> tls::Suite {
    match suite {
        Suite::Aes128Sha256 => tls::Suite::Aes128Sha256,
        Suite::Aes256Sha384 => tls::Suite::Aes256Sha384,
    }
}

impl Host {
    /// Whether the connection is protected by TLS.
    pub(super) fn is_protected(&self) -> bool {
        self.place.protection.get().is_some()
    }

    /// Whether a Connect names whom the connection's key is of, if it has one.
    pub(super) fn is_named_by(&self, connect: &Connect) -> bool {
        let is = |ends: &Ends| ends.host == connect.hostnqn && ends.subsystem == connect.subnqn;
        self.place.protection.get().is_none_or(is)
    }
}
