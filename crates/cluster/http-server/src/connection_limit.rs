//! Limits the number of connections: at the limit, evicts one that has not authenticated.
//!
//! Otherwise a client that opens many silent connections could keep the administrator out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// All connections.
    pub max_total: usize,
    /// Connections that have not authenticated.
    pub max_unauthenticated: usize,
    /// Those of them from one address, or one IPv6 network.
    pub max_unauthenticated_per_address: usize,
    /// How long one of them may stay.
    pub authentication_timeout: Option<Duration>,
}

impl ConnectionLimits {
    /// A limit of all connections only.
    #[must_use]
    pub fn total(most: usize) -> Self {
        Self {
            max_total: most,
            max_unauthenticated: most,
            max_unauthenticated_per_address: most,
            authentication_timeout: None,
        }
    }
}

/// Admits connections up to the limits.
#[derive(Debug)]
pub(crate) struct ConnectionLimiter {
    capacity: ConnectionLimits,
    connections: Mutex<Connections>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Connections {
    next_id: u64,
    /// In the order of arrival.
    tracked: BTreeMap<u64, TrackedConnection>,
}

#[derive(Debug)]
struct TrackedConnection {
    /// Its network; `None` for a Unix socket, whose connections are never evicted.
    network: Option<IpAddr>,
    is_authenticated: Arc<AtomicBool>,
    evict: Arc<Notify>,
    is_evicted: bool,
}

/// Admission of one connection, released on drop.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    id: u64,
    is_authenticated: Arc<AtomicBool>,
    evict: Arc<Notify>,
}

impl ConnectionLimiter {
    pub(crate) fn new(capacity: ConnectionLimits) -> Arc<Self> {
        let (connections, freed) = (Mutex::default(), Notify::new());
        Arc::new(Self { capacity, connections, freed })
    }

    /// Admits a connection; waits while the limit is reached by connections that cannot be evicted.
    pub(crate) async fn acquire(self: &Arc<Self>, from: Option<IpAddr>) -> ConnectionPermit {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some(permit) = self.try_acquire(from) {
                return permit;
            }
            freed.await;
        }
    }

    fn try_acquire(self: &Arc<Self>, from: Option<IpAddr>) -> Option<ConnectionPermit> {
        let mut connections = self.connections();
        let from = from.map(rt::network_prefix);
        if connections.evict_if_full(&self.capacity, from) {
            return None;
        }
        let id = connections.next_id;
        connections.next_id += 1;
        let (is_authenticated, evict) = (Arc::<AtomicBool>::default(), Arc::new(Notify::new()));
        let is_evicted = false;
        let connection = TrackedConnection {
            network: from,
            is_authenticated: Arc::clone(&is_authenticated),
            evict: Arc::clone(&evict),
            is_evicted,
        };
        connections.tracked.insert(id, connection);
        drop(connections);
        Some(ConnectionPermit { limiter: Arc::clone(self), id, is_authenticated, evict })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connections {
    /// Whether a limit is reached for a connection from `from`; if so, evicts a connection.
    fn evict_if_full(&mut self, capacity: &ConnectionLimits, from: Option<IpAddr>) -> bool {
        let ConnectionLimits {
            max_total,
            max_unauthenticated,
            max_unauthenticated_per_address: max_per_address,
            ..
        } = *capacity;
        if self.tracked.len() < max_total.min(max_unauthenticated).min(max_per_address) {
            return false;
        }
        let by_address = self.unauthenticated_by_network();
        let own = from.and_then(|from| by_address.get(&from)).copied();
        let total_unauthenticated: usize = by_address.values().map(|(count, _)| count).sum();
        let evicted = match own {
            Some((count, oldest)) if count >= max_per_address => Some(oldest),
            _ if self.tracked.len() < max_total && total_unauthenticated < max_unauthenticated => {
                return false;
            }
            // A flooding address loses its own connections first.
            _ => by_address
                .into_values()
                .max_by_key(|(count, oldest)| (*count, u64::MAX - oldest))
                .map(|(_, oldest)| oldest),
        };
        if !self.tracked.values().any(|connection| connection.is_evicted)
            && let Some(connection) = evicted.and_then(|id| self.tracked.get_mut(&id))
        {
            connection.is_evicted = true;
            connection.evict.notify_one();
        }
        true
    }

    /// The number of unauthenticated connections of each network, and the oldest of them.
    fn unauthenticated_by_network(&self) -> HashMap<IpAddr, (usize, u64)> {
        let mut by_address: HashMap<IpAddr, (usize, u64)> = HashMap::new();
        for (id, connection) in &self.tracked {
            if let (Some(from), false) =
                (connection.network, connection.is_authenticated.load(Ordering::Relaxed))
            {
                by_address.entry(from).or_insert((0, *id)).0 += 1;
            }
        }
        by_address
    }
}

impl ConnectionPermit {
    /// The flag to set once the connection has authenticated.
    pub(crate) fn authenticated_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_authenticated)
    }

    /// Waits until the connection is evicted.
    pub(crate) async fn wait_evicted(&self) {
        self.evict.notified().await;
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.connections().tracked.remove(&self.id);
        self.limiter.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    fn address(n: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, n]))
    }

    async fn is_wanted(permit: &ConnectionPermit) -> bool {
        timeout(Duration::from_millis(1), permit.wait_evicted()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_floods_makes_room_and_nobody_else() {
        let limiter = ConnectionLimiter::new(ConnectionLimits::total(4));
        let known = limiter.acquire(address(1)).await;
        known.authenticated_flag().store(true, Ordering::Relaxed);
        let other = limiter.acquire(address(2)).await;
        let (first, second) =
            (limiter.acquire(address(3)).await, limiter.acquire(address(3)).await);
        let newcomer = tokio::spawn({
            let limiter = Arc::clone(&limiter);
            async move { limiter.acquire(address(4)).await }
        });
        assert!(is_wanted(&first).await);
        for stays in [&known, &other, &second] {
            assert!(!is_wanted(stays).await);
        }
        drop(first);
        let newcomer = newcomer.await.unwrap();
        assert_eq!(limiter.connections().tracked.len(), 4);
        drop((newcomer, known, other, second));
        assert!(limiter.connections().tracked.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_are_known_are_waited_for() {
        let limiter = ConnectionLimiter::new(ConnectionLimits::total(1));
        let known = limiter.acquire(address(1)).await;
        known.authenticated_flag().store(true, Ordering::Relaxed);
        assert!(timeout(Duration::from_secs(9), limiter.acquire(address(2))).await.is_err());
        assert!(!is_wanted(&known).await);
        drop(known);
        let unix = limiter.acquire(None).await;
        assert!(timeout(Duration::from_secs(9), limiter.acquire(None)).await.is_err());
        assert!(!is_wanted(&unix).await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_has_few_permits_and_those_who_are_known_do_not_count() {
        let capacity = ConnectionLimits {
            max_total: 9,
            max_unauthenticated: 4,
            max_unauthenticated_per_address: 2,
            authentication_timeout: None,
        };
        let limiter = ConnectionLimiter::new(capacity);
        let known = [limiter.acquire(address(1)).await, limiter.acquire(address(1)).await];
        known.iter().for_each(|permit| permit.authenticated_flag().store(true, Ordering::Relaxed));
        let (first, second) =
            (limiter.acquire(address(1)).await, limiter.acquire(address(1)).await);
        let other = limiter.acquire(address(2)).await;
        assert!(timeout(Duration::from_secs(9), limiter.acquire(address(1))).await.is_err());
        assert!(is_wanted(&first).await && !is_wanted(&second).await && !is_wanted(&other).await);
        drop(first);
        let _more = (limiter.acquire(address(3)).await, limiter.acquire(address(4)).await);
        // No address exceeds its share, and together they have reached the limit.
        assert!(timeout(Duration::from_secs(9), limiter.acquire(address(5))).await.is_err());
        assert!(is_wanted(&second).await);
        drop(second);
        limiter.acquire(address(5)).await;
        for permit in &known {
            assert!(!is_wanted(permit).await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_addresses_of_one_network_of_ipv6_are_one() {
        let of_network = |n: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n]));
        let capacity = ConnectionLimits {
            max_total: 9,
            max_unauthenticated: 4,
            max_unauthenticated_per_address: 2,
            authentication_timeout: None,
        };
        let limiter = ConnectionLimiter::new(capacity);
        let first = limiter.acquire(of_network(1)).await;
        let _second = limiter.acquire(of_network(2)).await;
        let third = timeout(Duration::from_secs(9), limiter.acquire(of_network(3)));
        assert!(third.await.is_err(), "it has as many as one address");
        assert!(is_wanted(&first).await);
        let other = IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, 1]);
        limiter.acquire(Some(other)).await;
    }
}
