//! Initiators that end each other's sessions: two hosts that have one name, as a clone and what it was cloned from do.
//!
//! A login ends the session that the same initiator port has with the target (RFC 7143 6.3.5), which is right after a
//! host has lost its connection. Hosts that do this in turns never come to rest.
//!
//! Pure: time is handed in, and what is kept is bounded.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

/// Time within which sessions that were ended count together.
const WINDOW: Duration = Duration::from_secs(60);

/// How many of them in that time no single host has a reason for: from one address to another, and from the same one.
const FROM_ANOTHER: u32 = 3;
const FROM_THE_SAME: u32 = 20;

/// How often it is logged while it goes on, and how long after the last time it is told.
const LOG_EVERY: Duration = Duration::from_secs(60);
const TOLD_FOR: Duration = Duration::from_secs(300);

/// Initiators and targets that are remembered.
const MOST: usize = 256;

/// An initiator's name that two hosts have, as far as can be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedName {
    /// The name.
    pub initiator: String,
    /// The target whose sessions they end.
    pub target: String,
    /// Where they are. The same twice: behind one address.
    pub addresses: [IpAddr; 2],
    /// How often one has ended a session of the other.
    pub times: u64,
    /// How long ago the last time was.
    pub ago: Duration,
}

/// What to log of a session that another login has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// As ever: it happens.
    Plainly,
    /// That two hosts have one name.
    Shared(SharedName),
    /// Nothing: it was said just now.
    Not,
}

#[derive(Debug)]
struct Entry {
    addresses: [IpAddr; 2],
    /// When the window has begun, and what has happened in it.
    since: Instant,
    moves: u32,
    repeats: u32,
    times: u64,
    last: Instant,
    /// When two hosts were last seen to have the name.
    seen: Option<Instant>,
    logged: Option<Instant>,
}

/// Sessions that were ended by logins, by initiator and target.
#[derive(Debug, Default)]
pub(crate) struct Clones {
    entries: BTreeMap<(String, String), Entry>,
    replaced: u64,
}

impl Clones {
    /// A login from `by` has ended a session that `from` had.
    pub(crate) fn replaced(
        &mut self,
        now: Instant,
        (initiator, target): (&str, &str),
        [from, by]: [IpAddr; 2],
    ) -> Told {
        self.replaced += 1;
        self.make_room(now);
        let [from, by] = [from.to_canonical(), by.to_canonical()];
        let key = (initiator.to_owned(), target.to_owned());
        let entry = self.entries.entry(key).or_insert_with(|| Entry {
            addresses: [from, by],
            since: now,
            moves: 0,
            repeats: 0,
            times: 0,
            last: now,
            seen: None,
            logged: None,
        });
        if now.duration_since(entry.since) >= WINDOW {
            (entry.since, entry.moves, entry.repeats) = (now, 0, 0);
        }
        if from == by {
            entry.repeats += 1;
        } else {
            (entry.addresses, entry.moves) = ([from, by], entry.moves + 1);
        }
        entry.times += 1;
        entry.last = now;
        if entry.moves >= FROM_ANOTHER || entry.repeats >= FROM_THE_SAME {
            entry.seen = Some(now);
        }
        if !entry.is_told(now) {
            return Told::Plainly;
        }
        if entry.logged.is_some_and(|logged| now.duration_since(logged) < LOG_EVERY) {
            return Told::Not;
        }
        entry.logged = Some(now);
        Told::Shared(entry.shown(initiator, target, now))
    }

    /// Whether two hosts are known to have this name.
    pub(crate) fn is_shared(&self, now: Instant, (initiator, target): (&str, &str)) -> bool {
        let key = (initiator.to_owned(), target.to_owned());
        self.entries.get(&key).is_some_and(|entry| entry.is_told(now))
    }

    /// Names that two hosts have now, as far as can be seen.
    pub(crate) fn shared(&self, now: Instant) -> Vec<SharedName> {
        let told = self.entries.iter().filter(|(_, entry)| entry.is_told(now));
        told.map(|((initiator, target), entry)| entry.shown(initiator, target, now)).collect()
    }

    /// Sessions that logins have ended since the start.
    pub(crate) fn count(&self) -> u64 {
        self.replaced
    }

    fn make_room(&mut self, now: Instant) {
        if self.entries.len() < MOST {
            return;
        }
        self.entries.retain(|_, entry| now.saturating_duration_since(entry.last) < TOLD_FOR);
        while self.entries.len() >= MOST {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&oldest);
        }
    }
}

impl Entry {
    fn is_told(&self, now: Instant) -> bool {
        self.seen.is_some_and(|seen| now.saturating_duration_since(seen) < TOLD_FOR)
    }

    fn shown(&self, initiator: &str, target: &str, now: Instant) -> SharedName {
        SharedName {
            initiator: initiator.to_owned(),
            target: target.to_owned(),
            addresses: self.addresses,
            times: self.times,
            ago: now.saturating_duration_since(self.last),
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
        let (mut clones, now) = (Clones::default(), Instant::now());
        let (mut plain, mut lines) = (0, Vec::new());
        for n in 0..6000_u32 {
            let now = now + Duration::from_millis(100) * n;
            let [from, by] = if n % 2 == 0 { [1, 2] } else { [2, 1] };
            match clones.replaced(now, WHO, [address(from), address(by)]) {
                Told::Plainly => plain += 1,
                Told::Shared(line) => lines.push(line),
                Told::Not => {}
            }
        }
        assert_eq!((plain, lines.len()), (2, 10));
        assert_eq!((lines[0].initiator.as_str(), lines[0].target.as_str()), WHO);
        let mut both = lines[0].addresses;
        both.sort();
        assert_eq!(both, [address(1), address(2)]);
        let end = now + Duration::from_secs(600);
        assert_eq!(clones.shared(end).len(), 1);
        assert_eq!(clones.shared(end + TOLD_FOR), []);
        assert_eq!(clones.count(), 6000);
    }

    #[tokio::test(start_paused = true)]
    async fn two_hosts_behind_one_address_are_seen_as_well() {
        let (mut clones, now) = (Clones::default(), Instant::now());
        let told = |n: u32, clones: &mut Clones| {
            let now = now + Duration::from_millis(100) * n;
            clones.replaced(now, WHO, [address(1), "::ffff:192.0.2.1".parse().unwrap()])
        };
        for n in 1..FROM_THE_SAME {
            assert_eq!(told(n, &mut clones), Told::Plainly);
        }
        let Told::Shared(line) = told(FROM_THE_SAME, &mut clones) else { panic!("it is seen") };
        assert_eq!(line.addresses, [address(1); 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_comes_again_is_no_clone() {
        let (mut clones, now) = (Clones::default(), Instant::now());
        // It loses a link now and then, and comes by its other one.
        for n in 0..100_u32 {
            let [from, by] = if n % 2 == 0 { [1, 2] } else { [2, 1] };
            let now = now + Duration::from_secs(31) * n;
            assert_eq!(clones.replaced(now, WHO, [address(from), address(by)]), Told::Plainly);
        }
        assert_eq!(clones.shared(now), []);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let (mut clones, now) = (Clones::default(), Instant::now());
        for n in 0..10_000 {
            let name = format!("iqn.2026-01.com.example:{n}");
            clones.replaced(now, (&name, WHO.1), [address(1), address(2)]);
        }
        assert!(clones.entries.len() <= MOST);
    }
}
