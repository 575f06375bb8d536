//! Limits connections whose peer has not authenticated: they only evict each other, and a flooding
//! address loses its own connections first.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::network_prefix;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How many there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnauthenticatedLimits {
    /// In total. One more evicts the oldest of the address that has most.
    pub(crate) max: usize,
    /// That are older than [`Self::slow_after`].
    pub(crate) max_slow: usize,
    /// Of these, from one address.
    pub(crate) max_slow_per_address: usize,
    /// Age from which a connection counts as slow.
    pub(crate) slow_after: Duration,
}

/// A node completes each step at once; this allows for a busy machine.
const SLOW_AFTER: Duration = Duration::from_secs(2);

/// For connections of a listener before their HELLO. A node that has just started dials a thousand
/// mirrors at once, with several connections each: they say HELLO at once, whatever their address,
/// so only slow ones are counted by address.
pub(crate) const BEFORE_HELLO: UnauthenticatedLimits = UnauthenticatedLimits {
    max: 1024,
    max_slow: 64,
    max_slow_per_address: 8,
    slow_after: SLOW_AFTER,
};

/// For connections of a replica after their HELLO, before their proof. Anyone who has seen a HELLO
/// can send it.
pub(crate) const AFTER_HELLO: UnauthenticatedLimits = UnauthenticatedLimits {
    max: 64,
    max_slow: 64,
    max_slow_per_address: 8,
    slow_after: SLOW_AFTER,
};

/// The unauthenticated connections. Cheap to clone; stays on its core.
#[derive(Clone, Debug)]
pub(crate) struct UnauthenticatedConnections(Rc<RefCell<ConnectionTable>>);

#[derive(Debug)]
struct ConnectionTable {
    limits: UnauthenticatedLimits,
    next: u64,
    /// By number, in the order of arrival.
    connections: BTreeMap<u64, HeldConnection>,
    by_address: BTreeMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct HeldConnection {
    from: IpAddr,
    since: Instant,
    /// The connection ends when this is dropped.
    _end: oneshot::Sender<()>,
}

/// The slot of a connection; dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    table: UnauthenticatedConnections,
    number: u64,
    end: oneshot::Receiver<()>,
}

impl UnauthenticatedConnections {
    pub(crate) fn new(limits: UnauthenticatedLimits) -> Self {
        let (connections, by_address) = (BTreeMap::new(), BTreeMap::new());
        Self(Rc::new(RefCell::new(ConnectionTable { limits, next: 0, connections, by_address })))
    }

    /// A slot for a new connection from `from`; another one may be evicted for it.
    pub(crate) fn admit(&self, from: IpAddr, now: Instant) -> ConnectionSlot {
        let mut table = self.0.borrow_mut();
        table.evict_slow(now);
        while table.connections.len() >= table.limits.max {
            table.evict_one(None);
        }
        let (number, from) = (table.next, network_prefix(from));
        table.next += 1;
        let (end_sender, end) = oneshot::channel();
        table.connections.insert(number, HeldConnection { from, since: now, _end: end_sender });
        table.by_address.entry(from).or_default().insert(number);
        ConnectionSlot { table: self.clone(), number, end }
    }

    /// Evicts slow connections where there are too many of them.
    pub(crate) fn evict_slow(&self, now: Instant) {
        self.0.borrow_mut().evict_slow(now);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().connections.is_empty()
    }
}

impl ConnectionTable {
    /// The number of the first connection that is not slow.
    fn first_not_slow(&self, now: Instant) -> u64 {
        let is_slow = |connection: &&HeldConnection| {
            now.saturating_duration_since(connection.since) >= self.limits.slow_after
        };
        let first = self.connections.iter().find(|(_, connection)| !is_slow(connection));
        first.map_or(self.next, |(number, _)| *number)
    }

    fn evict_slow(&mut self, now: Instant) {
        let limit = self.first_not_slow(now);
        let UnauthenticatedLimits { max_slow, max_slow_per_address, .. } = self.limits;
        if self.connections.range(..limit).count() <= max_slow.min(max_slow_per_address) {
            return;
        }
        let slow_count = |numbers: &BTreeSet<u64>| numbers.range(..limit).count();
        loop {
            let max_count = self.by_address.values().map(slow_count).max().unwrap_or_default();
            let count = self.connections.range(..limit).count();
            if max_count <= max_slow_per_address && count <= max_slow {
                return;
            }
            self.evict_one(Some(limit));
        }
    }

    /// Evicts the oldest connection of the address that has most; if `limit` is given, considers
    /// only numbers below it.
    fn evict_one(&mut self, limit: Option<u64>) {
        let limit = limit.unwrap_or(self.next);
        let candidates = self.by_address.values().filter_map(|numbers| {
            let mut below = numbers.range(..limit);
            let oldest = *below.next()?;
            Some((below.count(), std::cmp::Reverse(oldest)))
        });
        if let Some((_, std::cmp::Reverse(number))) = candidates.max() {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(HeldConnection { from, .. }) = self.connections.remove(&number) else { return };
        if let Some(numbers) = self.by_address.get_mut(&from) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_address.remove(&from);
            }
        }
    }
}

impl ConnectionSlot {
    /// The result of `work`; `None` if the connection is evicted first.
    pub(crate) async fn unless_evicted<T>(mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            result = work => Some(result),
            _ = &mut self.end => None,
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.table.0.borrow_mut().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: UnauthenticatedLimits = UnauthenticatedLimits {
        max: 8,
        max_slow: 4,
        max_slow_per_address: 2,
        slow_after: Duration::from_secs(1),
    };

    fn at(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    async fn lives(slot: &mut ConnectionSlot) -> bool {
        // The connection is over once its sender is gone.
        slot.end.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    async fn living(slots: &mut [ConnectionSlot]) -> Vec<bool> {
        let mut all = Vec::new();
        for slot in slots {
            all.push(lives(slot).await);
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_connection_of_the_busiest_address_is_closed_first() {
        let (all, now) = (UnauthenticatedConnections::new(LIMITS), Instant::now());
        let mut quiet = all.admit(at(1), now);
        let mut flood: Vec<_> = (0..7).map(|_| all.admit(at(2), now)).collect();
        let mut more = [all.admit(at(3), now), all.admit(at(2), now)];
        assert_eq!(living(&mut flood).await, [false, false, true, true, true, true, true]);
        assert!(lives(&mut quiet).await && living(&mut more).await == [true, true]);
        drop((flood, more));
        assert!(!all.is_empty());
        drop(quiet);
        assert!(all.is_empty() && all.0.borrow().by_address.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn silent_connections_have_a_small_limit_and_new_ones_the_full_one() {
        let (all, now) = (UnauthenticatedConnections::new(LIMITS), Instant::now());
        let mut slow: Vec<_> = (0..4).map(|_| all.admit(at(1), now)).collect();
        let mut others: Vec<_> = (2..4).map(|n| all.admit(at(n), now)).collect();
        assert_eq!(living(&mut slow).await, [true; 4]);
        let later = now + LIMITS.slow_after;
        let mut fresh: Vec<_> = (0..2).map(|_| all.admit(at(1), later)).collect();
        assert_eq!(living(&mut slow).await, [false, false, true, true]);
        assert_eq!(living(&mut others).await, [true; 2]);
        assert_eq!(living(&mut fresh).await, [true; 2]);
        all.evict_slow(later + LIMITS.slow_after);
        assert_eq!(living(&mut fresh).await, [true; 2], "the youngest stay");
        assert_eq!(living(&mut slow).await, [false; 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn many_addresses_of_one_network_of_ipv6_count_as_one() {
        let (all, now) = (UnauthenticatedConnections::new(LIMITS), Instant::now());
        let mut other = all.admit(at(1), now);
        let of_network = |n: u16| IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n]);
        let mut flood: Vec<_> = (1..20).map(|n| all.admit(of_network(n), now)).collect();
        assert!(lives(&mut other).await, "the flood makes room for itself");
        all.evict_slow(now + LIMITS.slow_after);
        let left = living(&mut flood).await.into_iter().filter(|lives| *lives).count();
        assert_eq!((left, lives(&mut other).await), (LIMITS.max_slow_per_address, true));
    }
}
