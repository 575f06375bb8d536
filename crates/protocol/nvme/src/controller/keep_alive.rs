//! The keep alive timer (NVMe Base 2.0, 3.9).
//!
//! Traffic based: any command on any queue is a sign of life. It only sets a flag, which the timer
//! checks when it expires, so a silent host is detected after one to two timeouts. Never later,
//! however late the timer is called: a node that slept through a whole timeout cannot distinguish
//! new commands from those that the host has since given up and retried elsewhere.

use std::time::Duration;

/// Granularity that the controller announces (KAS), in units of 100 ms.
pub(super) const KAS: u16 = 10;

/// How long a discovery controller without keep-alive is kept without commands.
const DISCOVERY_INACTIVITY: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(super) struct KeepAlive {
    /// Timeout set by the host, in milliseconds.
    kato_ms: u32,
    discovery: bool,
    deadline: Option<Duration>,
    traffic: bool,
    /// The timeout has changed and starts at the next clock reading.
    restart_pending: bool,
}

impl KeepAlive {
    pub(super) fn new(kato_ms: u32, discovery: bool, now: Duration) -> Self {
        let mut alive =
            Self { kato_ms, discovery, deadline: None, traffic: false, restart_pending: false };
        alive.restart(now);
        alive
    }

    pub(super) fn kato_ms(&self) -> u32 {
        self.kato_ms
    }

    /// Sets the timeout, which starts at the next clock reading.
    pub(super) fn set_kato_ms(&mut self, kato_ms: u32) {
        self.kato_ms = kato_ms;
        self.restart_pending = true;
        self.deadline = self.timeout().map(|_| Duration::ZERO);
    }

    /// Records a sign of life of the host.
    pub(super) fn record_traffic(&mut self) {
        self.traffic = true;
    }

    pub(super) fn next_timer(&self) -> Option<Duration> {
        self.deadline
    }

    /// Whether the host has been silent for too long.
    pub(super) fn has_expired(&mut self, now: Duration) -> bool {
        let Some(at) = self.deadline.filter(|at| now >= *at) else { return false };
        if std::mem::take(&mut self.restart_pending) {
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

    /// The same without changing state: if true, commands from the host must not be executed.
    pub(super) fn is_overdue(&self, now: Duration) -> bool {
        let (Some(at), Some(timeout)) = (self.deadline, self.timeout()) else { return false };
        !self.restart_pending && now >= at && (!self.traffic || now >= at + timeout)
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
        let mut a = KeepAlive::new(4_500, false, S);
        assert_eq!(a.next_timer(), Some(6 * S), "rounded up to the granularity");
        assert!(!a.has_expired(5 * S));
        a.record_traffic();
        assert!(!a.has_expired(7 * S));
        assert_eq!(a.next_timer(), Some(11 * S), "a timer that is late does not give time away");
        assert!(a.has_expired(11 * S));
        assert_eq!(a.next_timer(), None, "told once");
    }

    /// A host that has waited two timeouts and the quiesce time may retry a command elsewhere: a
    /// node that slept meanwhile must not execute it again, even if it is the first thing that it
    /// reads.
    #[test]
    fn a_controller_that_slept_through_the_timeout_accepts_nothing() {
        let mut a = KeepAlive::new(5_000, false, S);
        a.record_traffic();
        assert!(!a.is_overdue(10 * S), "late, by less than a timeout");
        assert!(a.is_overdue(11 * S), "though there was traffic before");
        assert!(a.has_expired(11 * S));
        let mut a = KeepAlive::new(5_000, false, S);
        assert!(!a.is_overdue(5 * S) && a.is_overdue(6 * S), "nothing was heard");
        a.set_kato_ms(3_000);
        assert!(!a.is_overdue(100 * S), "it begins anew");
        assert!(!a.has_expired(100 * S));
        assert_eq!(a.next_timer(), Some(103 * S));
    }

    /// NVMe Base 2.0, 5.27.1.12: KATO may be changed, and 0 turns the timer off.
    #[test]
    fn the_timeout_can_be_set_later() {
        let mut a = KeepAlive::new(0, false, S);
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
        let mut a = KeepAlive::new(0, true, S);
        assert_eq!(a.next_timer(), Some(121 * S));
        assert!(a.has_expired(121 * S));
    }
}
