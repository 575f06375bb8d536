//! Detects initiators that end each other's sessions: two hosts with the same name, such as a clone
//! and its original.
//!
//! A login ends the session that the same initiator port has with the target (RFC 7143 6.3.5),
//! which is right after a host has lost its connection. Two hosts with the same name do this to
//! each other for ever.
//!
//! Pure: the caller passes the time; memory is bounded.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

/// Time within which replaced sessions are counted together.
const COUNT_WINDOW: Duration = Duration::from_secs(60);

/// Most replacements in that time that a single host may cause: from one address to another, and
/// from the same one.
const MAX_FROM_OTHER_ADDRESS: u32 = 3;
const MAX_FROM_SAME_ADDRESS: u32 = 20;

/// How often a duplicate is logged while it continues, and how long after the last time it is
/// reported.
const LOG_EVERY: Duration = Duration::from_secs(60);
const REPORT_FOR: Duration = Duration::from_secs(300);

/// Most pairs of initiator and target remembered.
const MAX_ENTRIES: usize = 256;

/// An initiator name that two hosts apparently share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DuplicateName {
    /// The name.
    pub initiator: String,
    /// The target whose sessions they replace.
    pub target: String,
    /// Their addresses. The same twice: both are behind one address.
    pub addresses: [IpAddr; 2],
    /// How often one has replaced a session of the other.
    pub times: u64,
    /// Time since the last replacement.
    pub ago: Duration,
}

/// What to log of a session that another login has replaced.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReplacementLog {
    /// A normal replacement.
    Normal,
    /// Two hosts share a name.
    Duplicate(DuplicateName),
    /// Nothing: it was logged just now.
    Suppressed,
}

#[derive(Debug)]
struct ReplacementEntry {
    addresses: [IpAddr; 2],
    /// When the window began, and the counts in it.
    window_start: Instant,
    from_other_address: u32,
    from_same_address: u32,
    times: u64,
    last_replaced: Instant,
    /// When a duplicate was last detected.
    last_duplicate: Option<Instant>,
    logged: Option<Instant>,
}

/// Sessions that logins have replaced, by initiator and target.
#[derive(Debug, Default)]
pub(crate) struct DuplicateNames {
    entries: BTreeMap<(String, String), ReplacementEntry>,
    replaced: u64,
}

impl DuplicateNames {
    /// Records that a login from `by` replaced a session from `from`.
    pub(crate) fn record_replaced(
        &mut self,
        now: Instant,
        (initiator, target): (&str, &str),
        [from, by]: [IpAddr; 2],
    ) -> ReplacementLog {
        self.replaced += 1;
        self.make_room(now);
        let [from, by] = [from.to_canonical(), by.to_canonical()];
        let key = (initiator.to_owned(), target.to_owned());
        let entry = self.entries.entry(key).or_insert_with(|| ReplacementEntry {
            addresses: [from, by],
            window_start: now,
            from_other_address: 0,
            from_same_address: 0,
            times: 0,
            last_replaced: now,
            last_duplicate: None,
            logged: None,
        });
        if now.duration_since(entry.window_start) >= COUNT_WINDOW {
            (entry.window_start, entry.from_other_address, entry.from_same_address) = (now, 0, 0);
        }
        if from == by {
            entry.from_same_address += 1;
        } else {
            (entry.addresses, entry.from_other_address) =
                ([from, by], entry.from_other_address + 1);
        }
        entry.times += 1;
        entry.last_replaced = now;
        if entry.from_other_address >= MAX_FROM_OTHER_ADDRESS
            || entry.from_same_address >= MAX_FROM_SAME_ADDRESS
        {
            entry.last_duplicate = Some(now);
        }
        if !entry.is_reported(now) {
            return ReplacementLog::Normal;
        }
        if entry.logged.is_some_and(|logged| now.duration_since(logged) < LOG_EVERY) {
            return ReplacementLog::Suppressed;
        }
        entry.logged = Some(now);
        ReplacementLog::Duplicate(entry.report(initiator, target, now))
    }

    /// Whether two hosts are known to share this name.
    pub(crate) fn is_duplicate(&self, now: Instant, (initiator, target): (&str, &str)) -> bool {
        let key = (initiator.to_owned(), target.to_owned());
        self.entries.get(&key).is_some_and(|entry| entry.is_reported(now))
    }

    /// Names that two hosts apparently share now.
    pub(crate) fn duplicates(&self, now: Instant) -> Vec<DuplicateName> {
        let reported = self.entries.iter().filter(|(_, entry)| entry.is_reported(now));
        reported.map(|((initiator, target), entry)| entry.report(initiator, target, now)).collect()
    }

    /// Sessions that logins have replaced since the start.
    pub(crate) fn replaced_count(&self) -> u64 {
        self.replaced
    }

    fn make_room(&mut self, now: Instant) {
        if self.entries.len() < MAX_ENTRIES {
            return;
        }
        self.entries
            .retain(|_, entry| now.saturating_duration_since(entry.last_replaced) < REPORT_FOR);
        while self.entries.len() >= MAX_ENTRIES {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_replaced);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&oldest);
        }
    }
}

impl ReplacementEntry {
    fn is_reported(&self, now: Instant) -> bool {
        self.last_duplicate.is_some_and(|seen| now.saturating_duration_since(seen) < REPORT_FOR)
    }

    fn report(&self, initiator: &str, target: &str, now: Instant) -> DuplicateName {
        DuplicateName {
            initiator: initiator.to_owned(),
            target: target.to_owned(),
            addresses: self.addresses,
            times: self.times,
            ago: now.saturating_duration_since(self.last_replaced),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: (&str, &str) = ("iqn.2026-01.com.example:clone", "iqn.2026-01.com.example:disk");

    fn address(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[tokio::test(start_paused = true)]
    async fn two_hosts_with_one_name_are_seen_and_logged_once_a_minute() {
        let (mut clones, now) = (DuplicateNames::default(), Instant::now());
        let (mut plain, mut lines) = (0, Vec::new());
        for n in 0..6000_u32 {
            let now = now + Duration::from_millis(100) * n;
            let [from, by] = if n % 2 == 0 { [1, 2] } else { [2, 1] };
            match clones.record_replaced(now, WHO, [address(from), address(by)]) {
                ReplacementLog::Normal => plain += 1,
                ReplacementLog::Duplicate(line) => lines.push(line),
                ReplacementLog::Suppressed => {}
            }
        }
        assert_eq!((plain, lines.len()), (2, 10));
        assert_eq!((lines[0].initiator.as_str(), lines[0].target.as_str()), WHO);
        let mut both = lines[0].addresses;
        both.sort();
        assert_eq!(both, [address(1), address(2)]);
        let end = now + Duration::from_secs(600);
        assert_eq!(clones.duplicates(end).len(), 1);
        assert_eq!(clones.duplicates(end + REPORT_FOR), []);
        assert_eq!(clones.replaced_count(), 6000);
    }

    #[tokio::test(start_paused = true)]
    async fn two_hosts_behind_one_address_are_seen_as_well() {
        let (mut clones, now) = (DuplicateNames::default(), Instant::now());
        let reported = |n: u32, clones: &mut DuplicateNames| {
            let now = now + Duration::from_millis(100) * n;
            clones.record_replaced(now, WHO, [address(1), "::ffff:192.0.2.1".parse().unwrap()])
        };
        for n in 1..MAX_FROM_SAME_ADDRESS {
            assert_eq!(reported(n, &mut clones), ReplacementLog::Normal);
        }
        let ReplacementLog::Duplicate(line) = reported(MAX_FROM_SAME_ADDRESS, &mut clones) else {
            panic!("it is seen")
        };
        assert_eq!(line.addresses, [address(1); 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_comes_again_is_no_clone() {
        let (mut clones, now) = (DuplicateNames::default(), Instant::now());
        // It loses a link now and then, and logs in through its other one.
        for n in 0..100_u32 {
            let [from, by] = if n % 2 == 0 { [1, 2] } else { [2, 1] };
            let now = now + Duration::from_secs(31) * n;
            assert_eq!(
                clones.record_replaced(now, WHO, [address(from), address(by)]),
                ReplacementLog::Normal
            );
        }
        assert_eq!(clones.duplicates(now), []);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_use_is_bounded() {
        let (mut clones, now) = (DuplicateNames::default(), Instant::now());
        for n in 0..10_000 {
            let name = format!("iqn.2026-01.com.example:{n}");
            clones.record_replaced(now, (&name, WHO.1), [address(1), address(2)]);
        }
        assert!(clones.entries.len() <= MAX_ENTRIES);
    }
}
