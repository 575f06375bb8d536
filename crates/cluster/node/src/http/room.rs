//! A limit of connections: where there are too many, one ends that has not shown who it is.
//!
//! Else whoever opens enough of them, and says nothing, keeps the administrator out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rt::network;
use tokio::sync::Notify;

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// In all.
    pub most: usize,
    /// That have not shown who they are.
    pub unknown: usize,
    /// Of those, from one address, or one network of IPv6.
    pub of_one: usize,
    /// How long one of those may stay.
    pub patience: Option<Duration>,
}

impl Capacity {
    /// So many in all, whoever they are.
    #[must_use]
    pub fn of(most: usize) -> Self {
        Self { most, unknown: most, of_one: most, patience: None }
    }
}

/// Lets so many connections in.
#[derive(Debug)]
pub(super) struct ConnectionLimiter {
    capacity: Capacity,
    connections: Mutex<Connections>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    /// In the order in which they have come.
    tracked: BTreeMap<u64, TrackedConnection>,
}

#[derive(Debug)]
struct TrackedConnection {
    /// The network that it comes from; nobody makes room that comes by a Unix socket.
    from: Option<IpAddr>,
    known: Arc<AtomicBool>,
    leave: Arc<Notify>,
    leaves: bool,
}

/// What a connection is let in by; free again when it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    number: u64,
    known: Arc<AtomicBool>,
    leave: Arc<Notify>,
}

impl ConnectionLimiter {
    pub(super) fn new(capacity: Capacity) -> Arc<Self> {
        let (connections, freed) = (Mutex::default(), Notify::new());
        Arc::new(Self { capacity, connections, freed })
    }

    /// A permit for a connection; waits while all are held by others that are known.
    pub(super) async fn enter(self: &Arc<Self>, from: Option<IpAddr>) -> ConnectionPermit {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            if let Some(permit) = self.try_enter(from) {
                return permit;
            }
            freed.await;
        }
    }

    fn try_enter(self: &Arc<Self>, from: Option<IpAddr>) -> Option<ConnectionPermit> {
        let mut connections = self.connections();
        let from = from.map(network);
        if connections.is_full(&self.capacity, from) {
            return None;
        }
        let number = connections.next;
        connections.next += 1;
        let (known, leave) = (Arc::<AtomicBool>::default(), Arc::new(Notify::new()));
        let leaves = false;
        let one = TrackedConnection {
            from,
            known: Arc::clone(&known),
            leave: Arc::clone(&leave),
            leaves,
        };
        connections.tracked.insert(number, one);
        drop(connections);
        Some(ConnectionPermit { limiter: Arc::clone(self), number, known, leave })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connections {
    /// Whether there is no room for one from `from`; then one is asked to leave.
    fn is_full(&mut self, capacity: &Capacity, from: Option<IpAddr>) -> bool {
        let Capacity { most, unknown, of_one, .. } = *capacity;
        if self.tracked.len() < most.min(unknown).min(of_one) {
            return false;
        }
        let by_address = self.unknown();
        let own = from.and_then(|from| by_address.get(&from)).copied();
        let all_unknown: usize = by_address.values().map(|(count, _)| count).sum();
        let leaves = match own {
            Some((count, oldest)) if count >= of_one => Some(oldest),
            _ if self.tracked.len() < most && all_unknown < unknown => return false,
            // A flooding address loses its own connections first.
            _ => by_address
                .into_values()
                .max_by_key(|(count, oldest)| (*count, u64::MAX - oldest))
                .map(|(_, oldest)| oldest),
        };
        if !self.tracked.values().any(|one| one.leaves)
            && let Some(one) = leaves.and_then(|number| self.tracked.get_mut(&number))
        {
            one.leaves = true;
            one.leave.notify_one();
        }
        true
    }

    /// How many that are not known there are of each network, and the oldest of them.
    fn unknown(&self) -> HashMap<IpAddr, (usize, u64)> {
        let mut by_address: HashMap<IpAddr, (usize, u64)> = HashMap::new();
        for (number, one) in &self.tracked {
            if let (Some(from), false) = (one.from, one.known.load(Ordering::Relaxed)) {
                by_address.entry(from).or_insert((0, *number)).0 += 1;
            }
        }
        by_address
    }
}

impl ConnectionPermit {
    /// What is set once the connection is known.
    pub(super) fn known(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.known)
    }

    /// Waits until the connection has to make room for another one.
    pub(super) async fn is_wanted(&self) {
        self.leave.notified().await;
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.connections().tracked.remove(&self.number);
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
        timeout(Duration::from_millis(1), permit.is_wanted()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_floods_makes_room_and_nobody_else() {
        let limiter = ConnectionLimiter::new(Capacity::of(4));
        let known = limiter.enter(address(1)).await;
        known.known().store(true, Ordering::Relaxed);
        let other = limiter.enter(address(2)).await;
        let (first, second) = (limiter.enter(address(3)).await, limiter.enter(address(3)).await);
        let newcomer = tokio::spawn({
            let limiter = Arc::clone(&limiter);
            async move { limiter.enter(address(4)).await }
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
        let limiter = ConnectionLimiter::new(Capacity::of(1));
        let known = limiter.enter(address(1)).await;
        known.known().store(true, Ordering::Relaxed);
        assert!(timeout(Duration::from_secs(9), limiter.enter(address(2))).await.is_err());
        assert!(!is_wanted(&known).await);
        drop(known);
        let unix = limiter.enter(None).await;
        assert!(timeout(Duration::from_secs(9), limiter.enter(None)).await.is_err());
        assert!(!is_wanted(&unix).await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_has_few_permits_and_those_who_are_known_do_not_count() {
        let capacity = Capacity { most: 9, unknown: 4, of_one: 2, patience: None };
        let limiter = ConnectionLimiter::new(capacity);
        let known = [limiter.enter(address(1)).await, limiter.enter(address(1)).await];
        known.iter().for_each(|permit| permit.known().store(true, Ordering::Relaxed));
        let (first, second) = (limiter.enter(address(1)).await, limiter.enter(address(1)).await);
        let other = limiter.enter(address(2)).await;
        assert!(timeout(Duration::from_secs(9), limiter.enter(address(1))).await.is_err());
        assert!(is_wanted(&first).await && !is_wanted(&second).await && !is_wanted(&other).await);
        drop(first);
        let _more = (limiter.enter(address(3)).await, limiter.enter(address(4)).await);
        // Nobody has more than his share, and together they have all that there is.
        assert!(timeout(Duration::from_secs(9), limiter.enter(address(5))).await.is_err());
        assert!(is_wanted(&second).await);
        drop(second);
        limiter.enter(address(5)).await;
        for permit in &known {
            assert!(!is_wanted(permit).await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_addresses_of_one_network_of_ipv6_are_one() {
        let of_network = |n: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n]));
        let capacity = Capacity { most: 9, unknown: 4, of_one: 2, patience: None };
        let limiter = ConnectionLimiter::new(capacity);
        let first = limiter.enter(of_network(1)).await;
        let _second = limiter.enter(of_network(2)).await;
        let third = timeout(Duration::from_secs(9), limiter.enter(of_network(3)));
        assert!(third.await.is_err(), "it has as many as one address");
        assert!(is_wanted(&first).await);
        let other = IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, 1]);
        limiter.enter(Some(other)).await;
    }
}
