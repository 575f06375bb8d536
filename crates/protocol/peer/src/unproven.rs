//! Connections that have not shown who they are: they make room for each other and for nobody else, so that a flooding
//! address loses its own connections first.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::network;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How many there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// In all. For one more the oldest ends, of the address that has most.
    pub(crate) most: usize,
    /// That are there for longer than [`Self::brief`].
    pub(crate) slow: usize,
    /// Of those, from one address.
    pub(crate) slow_of_one: usize,
    /// How long one may take for what a node does at once.
    pub(crate) brief: Duration,
}

/// How long a node may take at most for what it does at once, on a machine that has other things to do.
const BRIEF: Duration = Duration::from_secs(2);

/// Those of a listener that have not said HELLO. A node that has just come up dials a thousand mirrors at once, each by
/// several connections: those say HELLO at once, wherever they come from, and only who does not is counted by address.
pub(crate) const SILENT: Limits = Limits { most: 1024, slow: 64, slow_of_one: 8, brief: BRIEF };

/// Those of a replica that have said HELLO and proven nothing. A HELLO can be said by anybody who has heard one.
pub(crate) const GREETED: Limits = Limits { most: 64, slow: 64, slow_of_one: 8, brief: BRIEF };

/// The connections. Cheap to clone; stays on its core.
#[derive(Clone, Debug)]
pub(crate) struct UnprovenConnections(Rc<RefCell<Inside>>);

#[derive(Debug)]
struct Inside {
    limits: Limits,
    next: u64,
    /// In the order in which they have come.
    held: BTreeMap<u64, Held>,
    by_address: BTreeMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Held {
    from: IpAddr,
    since: Instant,
    /// The connection ends when this is dropped.
    _end: oneshot::Sender<()>,
}

/// The slot of a connection; free again when it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    of: UnprovenConnections,
    number: u64,
    end: oneshot::Receiver<()>,
}

impl UnprovenConnections {
    pub(crate) fn new(limits: Limits) -> Self {
        let (held, by_address) = (BTreeMap::new(), BTreeMap::new());
        Self(Rc::new(RefCell::new(Inside { limits, next: 0, held, by_address })))
    }

    /// A slot for a connection that comes from `from` now; another one may have to end for it.
    pub(crate) fn admit(&self, from: IpAddr, now: Instant) -> ConnectionSlot {
        let mut inside = self.0.borrow_mut();
        inside.evict_slow(now);
        while inside.held.len() >= inside.limits.most {
            inside.evict_one(None);
        }
        let (number, from) = (inside.next, network(from));
        inside.next += 1;
        let (hold, end) = oneshot::channel();
        inside.held.insert(number, Held { from, since: now, _end: hold });
        inside.by_address.entry(from).or_default().insert(number);
        ConnectionSlot { of: self.clone(), number, end }
    }

    /// Ends those that take too long, where there are too many of them.
    pub(crate) fn evict_slow(&self, now: Instant) {
        self.0.borrow_mut().evict_slow(now);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().held.is_empty()
    }
}

impl Inside {
    /// The number of the first that is not slow.
    fn first_brief(&self, now: Instant) -> u64 {
        let is_slow = |held: &&Held| now.saturating_duration_since(held.since) >= self.limits.brief;
        let slow = self.held.iter().find(|(_, held)| !is_slow(held));
        slow.map_or(self.next, |(number, _)| *number)
    }

    fn evict_slow(&mut self, now: Instant) {
        let limit = self.first_brief(now);
        let Limits { slow, slow_of_one, .. } = self.limits;
        if self.held.range(..limit).count() <= slow.min(slow_of_one) {
            return;
        }
        let of_one = |numbers: &BTreeSet<u64>| numbers.range(..limit).count();
        loop {
            let most = self.by_address.values().map(of_one).max().unwrap_or_default();
            let all = self.held.range(..limit).count();
            if most <= slow_of_one && all <= slow {
                return;
            }
            self.evict_one(Some(limit));
        }
    }

    /// Ends the oldest of the address that has most; of those only whose numbers are below `limit`, if there is one.
    fn evict_one(&mut self, limit: Option<u64>) {
        let limit = limit.unwrap_or(self.next);
        let counted = self.by_address.values().filter_map(|numbers| {
            let mut below = numbers.range(..limit);
            let oldest = *below.next()?;
            Some((below.count(), std::cmp::Reverse(oldest)))
        });
        if let Some((_, std::cmp::Reverse(number))) = counted.max() {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u64) {
        let Some(Held { from, .. }) = self.held.remove(&number) else { return };
        if let Some(numbers) = self.by_address.get_mut(&from) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_address.remove(&from);
            }
        }
    }
}

impl ConnectionSlot {
    /// What `work` gives; `None` if the connection has to make room for another one first.
    pub(crate) async fn unless_evicted<T>(mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            _ = &mut self.end => None,
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.of.0.borrow_mut().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { most: 8, slow: 4, slow_of_one: 2, brief: Duration::from_secs(1) };

    fn at(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    async fn lives(slot: &mut ConnectionSlot) -> bool {
        // Whose sender is gone is over.
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
    async fn for_one_more_the_oldest_ends_of_the_address_that_has_most() {
        let (all, now) = (UnprovenConnections::new(LIMITS), Instant::now());
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
    async fn who_says_nothing_for_a_while_has_few_places_and_who_has_just_come_has_all() {
        let (all, now) = (UnprovenConnections::new(LIMITS), Instant::now());
        let mut slow: Vec<_> = (0..4).map(|_| all.admit(at(1), now)).collect();
        let mut others: Vec<_> = (2..4).map(|n| all.admit(at(n), now)).collect();
        assert_eq!(living(&mut slow).await, [true; 4]);
        let later = now + LIMITS.brief;
        let mut fresh: Vec<_> = (0..2).map(|_| all.admit(at(1), later)).collect();
        assert_eq!(living(&mut slow).await, [false, false, true, true]);
        assert_eq!(living(&mut others).await, [true; 2]);
        assert_eq!(living(&mut fresh).await, [true; 2]);
        all.evict_slow(later + LIMITS.brief);
        assert_eq!(living(&mut fresh).await, [true; 2], "the youngest stay");
        assert_eq!(living(&mut slow).await, [false; 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn many_addresses_of_one_network_of_ipv6_count_as_one() {
        let (all, now) = (UnprovenConnections::new(LIMITS), Instant::now());
        let mut other = all.admit(at(1), now);
        let of_network = |n: u16| IpAddr::from([0x2001, 0xdb8, 0, 0, n, n, n, n]);
        let mut flood: Vec<_> = (1..20).map(|n| all.admit(of_network(n), now)).collect();
        assert!(lives(&mut other).await, "the flood makes room for itself");
        all.evict_slow(now + LIMITS.brief);
        let left = living(&mut flood).await.into_iter().filter(|lives| *lives).count();
        assert_eq!((left, lives(&mut other).await), (LIMITS.slow_of_one, true));
    }
}
