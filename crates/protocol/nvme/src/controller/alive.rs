//! The keep alive timer (NVMe Base 2.0, 3.9).
//!
//! Traffic based: any command on any queue shows that the host lives. It only sets a flag; the
//! timer looks at it when it ends, so a host is missed after one to two timeouts. Never later, by whatever
//! clock the timer was called: who has slept through a whole timeout cannot tell what came in it from what
//! the host has given up since, and sent again elsewhere.

use std::time::Duration;

/// Granularity that the controller announces (KAS), in units of 100 ms.
pub(super) const KAS: u16 = 10;

/// A discovery controller without keep alive is kept for so long without commands.
const DISCOVERY_INACTIVITY: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(super) struct Alive {
    /// As the host set it, in milliseconds.
    kato_ms: u32,
    discovery: bool,
    deadline: Option<Duration>,
    traffic: bool,
    /// The timeout is another one, and begins at the next look at the clock.
    is_new: bool,
}

impl Alive {
    pub(super) fn new(kato_ms: u32, discovery: bool, now: Duration) -> Self {
        let mut alive = Self { kato_ms, discovery, deadline: None, traffic: false, is_new: false };
        alive.restart(now);
        alive
    }

    pub(super) fn kato_ms(&self) -> u32 {
        self.kato_ms
    }

    /// Sets the timeout; it counts from the next look at the clock.
    pub(super) fn set_kato_ms(&mut self, kato_ms: u32) {
        self.kato_ms = kato_ms;
        self.is_new = true;
        self.deadline = self.timeout().map(|_| Duration::ZERO);
    }

    /// The host has shown that it lives.
    pub(super) fn touch(&mut self) {
        self.traffic = true;
    }

    pub(super) fn next_timer(&self) -> Option<Duration> {
        self.deadline
    }

    /// Whether the host has been silent for too long.
    pub(super) fn has_expired(&mut self, now: Duration) -> bool {
        let Some(at) = self.deadline.filter(|at| now >= *at) else { return false };
        if std::mem::take(&mut self.is_new) {
            self.restart(now);
            return false;
        }
        if self.is_overdue(now) {
            self.deadline = None;
            return true;
        }
        self.restart(at);
        false
    }

    /// The same, without taking note of it: nothing that comes from the host now is to be done.
    pub(super) fn is_overdue(&self, now: Duration) -> bool {
        let (Some(at), Some(timeout)) = (self.deadline, self.timeout()) else { return false };
        !self.is_new && now >= at && (!self.traffic || now >= at + timeout)
    }

    fn restart(&mut self, from: Duration) {
        self.traffic = false;
        self.deadline = self.timeout().map(|t| from + t);
    }

    fn timeout(&self) -> Option<Duration> {
        match self.kato_ms {
            0 => self.discovery.then_some(DISCOVERY_INACTIVITY),
            ms => {
                let unit = u64::from(KAS) * 100;
                Some(Duration::from_millis(u64::from(ms).next_multiple_of(unit)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// NVMe Base 2.0, 3.9.3 and 3.9.4.
    #[test]
    fn a_silent_host_is_missed_and_traffic_counts() {
        let mut a = Alive::new(4_500, false, S);
        assert_eq!(a.next_timer(), Some(6 * S), "rounded up to the granularity");
        assert!(!a.has_expired(5 * S));
        a.touch();
        assert!(!a.has_expired(7 * S));
        assert_eq!(a.next_timer(), Some(11 * S), "a timer that is late does not give time away");
        assert!(a.has_expired(11 * S));
        assert_eq!(a.next_timer(), None, "told once");
    }

    /// A host that has waited two timeouts and the quiesce time may send a command again elsewhere: a node that
    /// has slept meanwhile must not do it once more, be it the first thing that it reads.
    #[test]
    fn who_has_slept_through_a_timeout_takes_nothing_any_more() {
        let mut a = Alive::new(5_000, false, S);
        a.touch();
        assert!(!a.is_overdue(10 * S), "late, by less than a timeout");
        assert!(a.is_overdue(11 * S), "though there was traffic before");
        assert!(a.has_expired(11 * S));
        let mut a = Alive::new(5_000, false, S);
        assert!(!a.is_overdue(5 * S) && a.is_overdue(6 * S), "nothing was heard");
        a.set_kato_ms(3_000);
        assert!(!a.is_overdue(100 * S), "it begins anew");
        assert!(!a.has_expired(100 * S));
        assert_eq!(a.next_timer(), Some(103 * S));
    }

    /// NVMe Base 2.0, 5.27.1.12: KATO may be changed, and 0 turns the timer off.
    #[test]
    fn the_timeout_can_be_set_later() {
        let mut a = Alive::new(0, false, S);
        assert_eq!(a.next_timer(), None);
        a.set_kato_ms(1_000);
        assert!(!a.has_expired(100 * S), "the first look starts it");
        assert_eq!(a.next_timer(), Some(101 * S));
        a.set_kato_ms(0);
        assert_eq!(a.next_timer(), None);
    }

    /// NVMe Base 2.0, 3.1.2.3: a discovery controller may leave an inactive host after 2 minutes.
    #[test]
    fn a_discovery_controller_is_not_kept_for_ever() {
        let mut a = Alive::new(0, true, S);
        assert_eq!(a.next_timer(), Some(121 * S));
        assert!(a.has_expired(121 * S));
    }
}
