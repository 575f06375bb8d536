//! Throttles clients that fail to authenticate, and reports them.
//!
//! Pure: the caller passes the time. Memory is bounded, however many clients try however often.
//!
//! Each address is delayed by itself: the right secret from another address is not held up. It is
//! delayed separately for each target at which it fails, so one wrong secret of a host does not
//! hold up its other volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

use rt::{LogLimit, network_prefix};
use tokio::time::Instant;

/// Failed attempts after which an address is delayed.
const FREE_ATTEMPTS: u32 = 8;

/// The first delay between two attempts; each further attempt doubles it.
const INITIAL_BACKOFF: Duration = Duration::from_millis(250);

/// The longest delay. Shorter than initiators wait for an answer, and a corrected secret is
/// accepted that soon.
const MAX_BACKOFF: Duration = Duration::from_secs(4);

/// The longest time that an attempt waits; if it would wait longer it is refused.
const MAX_WAIT: Duration = Duration::from_secs(8);

/// After so long without an attempt an address is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Most pairs of address and target remembered, and most authenticated addresses.
const MAX_ENTRIES: usize = 1024;

/// How long after its last failure a client is reported, and after how many failures.
const REPORT_FOR: Duration = Duration::from_secs(300);
const REPORT_FROM: u64 = 5;

/// Most clients reported at a time: those with the most failures.
const MAX_REPORTED: usize = 16;

/// How often a client that keeps failing is logged. All clients together get as many lines as
/// [`LogLimit`] permits.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// How a client authenticates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AuthMethod {
    /// CHAP of iSCSI.
    Chap,
    /// DH-HMAC-CHAP of NVMe.
    Dhchap,
    /// A pre-shared key of TLS.
    Tls,
    /// A token of the API.
    Token,
    /// A token to join the cluster.
    Join,
}

impl AuthMethod {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Chap, Self::Dhchap, Self::Tls, Self::Token, Self::Join];

    /// Its label in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Chap => "chap",
            Self::Dhchap => "dhchap",
            Self::Tls => "tls",
            Self::Token => "token",
            Self::Join => "join",
        }
    }
}

impl std::fmt::Display for AuthMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Chap => "CHAP",
            Self::Dhchap => "DH-HMAC-CHAP",
            Self::Tls => "a TLS key",
            Self::Token => "a token",
            Self::Join => "a token to join",
        })
    }
}

/// The client's address, the authentication method and the requested target.
pub type AttemptSource<'a> = (IpAddr, AuthMethod, &'a str);

/// When an attempt may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptDecision {
    /// At once.
    Now,
    /// At that time.
    At(Instant),
    /// Not at all: too many attempts from that address are waiting.
    Refused,
}

/// A client that fails to authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailingClient {
    /// Its address.
    pub address: IpAddr,
    /// The method it was to use.
    pub method: AuthMethod,
    /// The name that it gives, if any.
    pub name: String,
    /// The requested target or subsystem, which may not exist; empty if it names none.
    pub target: String,
    /// Failures since it was last forgotten or admitted.
    pub times: u64,
    /// Time since the last failure.
    pub ago: Duration,
}

/// What to log of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureLogLine {
    /// How often the client has failed.
    pub times: u64,
    /// Failures of other clients that were not logged because there were too many.
    pub unlogged: u64,
}

#[derive(Debug)]
struct FailedAttempt {
    at: Instant,
    from: IpAddr,
    name: String,
    target: String,
}

#[derive(Debug)]
struct AttemptEntry {
    /// Failed attempts since the last success, and those without a result yet.
    attempts: u32,
    /// When the next attempt may be made.
    next_attempt: Instant,
    last_used: Instant,
    /// The last failure.
    last_failure: Option<FailedAttempt>,
    times: u64,
    logged: Option<Instant>,
}

/// Address, method and target of an attempt.
type ThrottleKey = (IpAddr, AuthMethod, ThrottledTarget);

/// The unit of delay: attempts at the same one wait for one another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ThrottledTarget {
    /// This target, which is known to exist.
    Target(String),
    /// All targets whose names hash to this number. A client with TLS names its target before it
    /// may know whether that exists: existing and unknown names must wait alike, or the delay would
    /// tell them apart.
    NameBucket(u64),
}

/// Number of [`ThrottledTarget::NameBucket`]s. A host with one wrong key is not held up at most of
/// its other volumes.
const NAME_BUCKETS: u64 = 64;

fn throttle_key((from, method, target): AttemptSource<'_>) -> ThrottleKey {
    let wanted = match method {
        AuthMethod::Tls => {
            let mut hasher = DefaultHasher::new();
            target.hash(&mut hasher);
            ThrottledTarget::NameBucket(hasher.finish() % NAME_BUCKETS)
        }
        AuthMethod::Chap | AuthMethod::Dhchap | AuthMethod::Token | AuthMethod::Join => {
            ThrottledTarget::Target(target.to_owned())
        }
    };
    (network_prefix(from), method, wanted)
}

/// Delays and failures of unauthenticated clients.
#[derive(Debug, Default)]
pub struct AuthThrottle {
    entries: BTreeMap<ThrottleKey, AttemptEntry>,
    /// Addresses that have authenticated, with the number of the last success.
    proven: BTreeMap<IpAddr, u64>,
    proofs: u64,
    failures: [u64; AuthMethod::ALL.len()],
    delayed: u64,
    refused: u64,
    log: LogLimit,
}

/// Counts of attempts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptCounts {
    /// Failures, in the order of [`AuthMethod::ALL`].
    pub failures: [u64; AuthMethod::ALL.len()],
    /// Attempts that had to wait.
    pub delayed: u64,
    /// Attempts that were refused without checking the secret.
    pub refused: u64,
}

impl AuthThrottle {
    /// When an attempt that begins now may be made. The caller reports the result by
    /// [`Self::record_failure`], [`Self::record_success`] or [`Self::record_abandoned`]; until then
    /// it counts as failed.
    pub fn begin_attempt(&mut self, now: Instant, source: AttemptSource<'_>) -> AttemptDecision {
        self.evict_oldest(now);
        let entry =
            self.entries.entry(throttle_key(source)).or_insert_with(|| AttemptEntry::new(now));
        entry.renew(now);
        let pause = backoff(entry.attempts);
        let start = entry.next_attempt.max(now);
        if start.duration_since(now) > MAX_WAIT {
            self.refused += 1;
            return AttemptDecision::Refused;
        }
        entry.attempts = entry.attempts.saturating_add(1);
        entry.next_attempt = start + pause;
        if start == now {
            return AttemptDecision::Now;
        }
        self.delayed += 1;
        AttemptDecision::At(start)
    }

    /// Records a failed attempt. Returns what to log, if anything.
    pub fn record_failure(
        &mut self,
        now: Instant,
        source: AttemptSource<'_>,
        name: &str,
    ) -> Option<FailureLogLine> {
        let (from, method, target) = source;
        self.failures[method as usize] += 1;
        self.evict_oldest(now);
        let entry =
            self.entries.entry(throttle_key(source)).or_insert_with(|| AttemptEntry::new(now));
        entry.renew(now);
        entry.times += 1;
        let (name, target) = (name.to_owned(), target.to_owned());
        entry.last_failure = Some(FailedAttempt { at: now, from, name, target });
        if entry.logged.is_some_and(|logged| now.duration_since(logged) < LOG_EVERY) {
            return None;
        }
        let unlogged = self.log.try_log(now)?;
        entry.logged = Some(now);
        Some(FailureLogLine { times: entry.times, unlogged })
    }

    /// Records a successful attempt.
    pub fn record_success(&mut self, source: AttemptSource<'_>) {
        if !self.entries.is_empty() {
            self.entries.remove(&throttle_key(source));
        }
        self.proofs += 1;
        self.proven.insert(source.0.to_canonical(), self.proofs);
        if self.proven.len() > MAX_ENTRIES
            && let Some(oldest) = self.proven.iter().min_by_key(|(_, number)| **number)
        {
            let oldest = *oldest.0;
            self.proven.remove(&oldest);
        }
    }

    /// Addresses that have authenticated: the last 1024 of them.
    #[must_use]
    pub fn proven(&self) -> BTreeSet<IpAddr> {
        self.proven.keys().copied().collect()
    }

    /// Records an attempt that ended before the client learned the result.
    pub fn record_abandoned(&mut self, source: AttemptSource<'_>) {
        if let Some(entry) = self.entries.get_mut(&throttle_key(source)) {
            entry.attempts = entry.attempts.saturating_sub(1);
        }
    }

    /// Whether there has been no recent failure from that source.
    #[must_use]
    pub fn has_no_recent_failure(&self, source: AttemptSource<'_>) -> bool {
        self.entries.is_empty() || !self.entries.contains_key(&throttle_key(source))
    }

    /// Clients that fail now, most failures first.
    #[must_use]
    pub fn failing(&self, now: Instant) -> Vec<FailingClient> {
        let failing = |((_, method, _), entry): (&ThrottleKey, &AttemptEntry)| {
            let FailedAttempt { at, from, name, target } = entry.last_failure.as_ref()?;
            let ago = now.saturating_duration_since(*at);
            (ago < REPORT_FOR && entry.times >= REPORT_FROM).then(|| FailingClient {
                address: *from,
                method: *method,
                name: name.clone(),
                target: target.clone(),
                times: entry.times,
                ago,
            })
        };
        let mut all: Vec<_> = self.entries.iter().filter_map(failing).collect();
        all.sort_by_key(|failing| std::cmp::Reverse(failing.times));
        all.truncate(MAX_REPORTED);
        all
    }

    /// Counts since the start.
    #[must_use]
    pub fn counts(&self) -> AttemptCounts {
        AttemptCounts { failures: self.failures, delayed: self.delayed, refused: self.refused }
    }

    /// Makes room for one more entry: removes expired ones, else the least recently used.
    fn evict_oldest(&mut self, now: Instant) {
        if self.entries.len() < MAX_ENTRIES {
            return;
        }
        self.entries
            .retain(|_, entry| now.saturating_duration_since(entry.last_used) < FORGET_AFTER);
        while self.entries.len() >= MAX_ENTRIES {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&oldest);
        }
    }
}

impl AttemptEntry {
    fn new(now: Instant) -> Self {
        Self {
            attempts: 0,
            next_attempt: now,
            last_used: now,
            last_failure: None,
            times: 0,
            logged: None,
        }
    }

    /// Marks the entry as used now; failures long ago are forgotten.
    fn renew(&mut self, now: Instant) {
        if now.saturating_duration_since(self.last_used) >= FORGET_AFTER {
            *self = Self::new(now);
        }
        self.last_used = now;
    }
}

/// The delay of the next attempt after `attempts` earlier ones.
fn backoff(attempts: u32) -> Duration {
    let Some(beyond) = attempts.checked_sub(FREE_ATTEMPTS - 1) else { return Duration::ZERO };
    INITIAL_BACKOFF.saturating_mul(1 << beyond.min(10)).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    fn chap(n: u8) -> AttemptSource<'static> {
        (address(n), AuthMethod::Chap, "t")
    }

    fn token(n: u32) -> AttemptSource<'static> {
        (IpAddr::V4(n.into()), AuthMethod::Token, "")
    }

    /// A client guesses secrets for `time`, as often as it is permitted; returns how often that
    /// was.
    fn guess(throttle: &mut AuthThrottle, mut now: Instant, time: Duration) -> u32 {
        let (end, mut judged) = (now + time, 0);
        while now < end {
            match throttle.begin_attempt(now, chap(1)) {
                AttemptDecision::Refused => now += Duration::from_millis(1),
                AttemptDecision::Now => {}
                AttemptDecision::At(at) => now = at,
            }
            judged += 1;
            throttle.record_failure(now, chap(1), "i");
            now += Duration::from_millis(1);
        }
        judged
    }

    #[tokio::test(start_paused = true)]
    async fn guesses_from_one_address_become_slower_and_slower() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        let minute = guess(&mut throttle, now, Duration::from_secs(60));
        assert!((10..40).contains(&minute), "{minute}");
        let hour = guess(&mut throttle, now + Duration::from_secs(60), Duration::from_secs(3600));
        assert!(hour <= 901, "{hour}");
    }

    #[tokio::test(start_paused = true)]
    async fn many_connections_at_once_do_not_guess_faster() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        let turns: Vec<_> = (0..1000).map(|_| throttle.begin_attempt(now, chap(1))).collect();
        let judged = turns.iter().filter(|turn| **turn != AttemptDecision::Refused).count();
        assert!(judged < 20, "{judged}");
        assert_eq!(throttle.counts().refused, 1000 - judged as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_that_are_no_guess_do_not_count() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        for _ in 0..1000 {
            assert_eq!(throttle.begin_attempt(now, chap(1)), AttemptDecision::Now);
            throttle.record_abandoned(chap(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn delays_apply_per_address_and_target() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        guess(&mut throttle, now, Duration::from_secs(100));
        let now = now + Duration::from_secs(100);
        assert_eq!(throttle.begin_attempt(now, chap(2)), AttemptDecision::Now);
        assert_eq!(
            throttle.begin_attempt(now, (address(1), AuthMethod::Chap, "other")),
            AttemptDecision::Now
        );
        assert_eq!(
            throttle.begin_attempt(now, (address(1), AuthMethod::Tls, "t")),
            AttemptDecision::Now
        );
        assert_ne!(throttle.begin_attempt(now, chap(1)), AttemptDecision::Now);
    }

    /// Regression: existing subsystems had separate delays while unknown names shared one, so the
    /// delay revealed whether a name exists.
    #[tokio::test(start_paused = true)]
    async fn how_long_a_tls_key_waits_does_not_tell_whether_its_subsystem_exists() {
        fn source(name: &str) -> AttemptSource<'_> {
            (address(1), AuthMethod::Tls, name)
        }
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        let names: Vec<_> = (0..1000).map(|n| format!("nqn.2026-01.com.example:{n}")).collect();
        let full = |throttle: &mut AuthThrottle, name| {
            while throttle.begin_attempt(now, source(name)) != AttemptDecision::Refused {
                throttle.record_failure(now, source(name), "");
            }
        };
        full(&mut throttle, "");
        assert_eq!(
            throttle.begin_attempt(now, source(&names[0])),
            AttemptDecision::Now,
            "others of its volumes go on"
        );
        full(&mut throttle, &names[0]);
        let alike = throttle_key(source(&names[0])).2;
        let shares = |name: &&String| throttle_key(source(name)).2 == alike;
        let other = names[1..].iter().find(shares).expect("64 waits for all names");
        assert_eq!(throttle.begin_attempt(now, source(other)), AttemptDecision::Refused);
        names.iter().for_each(|name| full(&mut throttle, name));
        assert!(throttle.entries.len() <= 64, "{}", throttle.entries.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_correct_secret_ends_the_delay_within_seconds() {
        let (mut throttle, mut now) = (AuthThrottle::default(), Instant::now());
        for _ in 0..1000 {
            // An initiator that tries every three seconds.
            if let AttemptDecision::At(at) = throttle.begin_attempt(now, chap(1)) {
                now = at;
            }
            throttle.record_failure(now, chap(1), "i");
            now += Duration::from_secs(3);
        }
        let AttemptDecision::At(at) = throttle.begin_attempt(now, chap(1)) else {
            panic!("it waits")
        };
        assert!(at - now <= MAX_BACKOFF, "{:?}", at - now);
        throttle.record_success(chap(1));
        for _ in 0..FREE_ATTEMPTS {
            assert_eq!(throttle.begin_attempt(at, chap(1)), AttemptDecision::Now);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_use_is_bounded() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        for n in 0..200_000_u32 {
            let now = now + Duration::from_millis(n.into());
            throttle.begin_attempt(now, token(n));
            throttle.record_failure(now, token(n), "");
        }
        assert!(throttle.entries.len() <= MAX_ENTRIES);
        assert_eq!(throttle.counts().failures, [0, 0, 0, 200_000, 0]);
        // An IPv6 host has as many addresses as it likes.
        let mut throttle = AuthThrottle::default();
        for n in 0..100 {
            let from = format!("2001:db8::{n:x}").parse().unwrap();
            throttle.begin_attempt(now, (from, AuthMethod::Chap, "t"));
        }
        assert_eq!(throttle.entries.len(), 1);
        let mapped = "::ffff:192.0.2.1".parse().unwrap();
        throttle.begin_attempt(now, (mapped, AuthMethod::Chap, "t"));
        assert!(!throttle.has_no_recent_failure(chap(1)));
    }

    #[test]
    fn the_last_authenticated_addresses_are_remembered() {
        let mut throttle = AuthThrottle::default();
        for n in 0..3000_u32 {
            throttle.record_success(chap(1));
            throttle.record_success(("::ffff:192.0.2.2".parse().unwrap(), AuthMethod::Tls, "t"));
            throttle.record_success(token(n));
        }
        let proven = throttle.proven();
        assert_eq!(proven.len(), MAX_ENTRIES);
        let last = IpAddr::V4(2999.into());
        for known in [address(1), address(2), last] {
            assert!(proven.contains(&known), "{known}");
        }
        assert!(!proven.contains(&IpAddr::V4(0.into())) && !proven.contains(&address(3)));
    }

    #[tokio::test(start_paused = true)]
    async fn failing_clients_are_logged_once_a_minute_and_ten_in_all() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        let mut lines = 0;
        for ms in (0..600_000).step_by(10) {
            let now = now + Duration::from_millis(ms);
            let line = throttle.record_failure(now, token(1), "");
            lines += u32::from(line.is_some());
        }
        assert_eq!(lines, 10, "ten minutes");
        let mut unlogged = 0;
        for n in 0..1000_u64 {
            let now = now + Duration::from_secs(700) + Duration::from_millis(n * 119);
            let line = throttle.record_failure(now, token(u32::try_from(n).unwrap() + 9), "");
            lines += u32::from(line.is_some());
            unlogged += line.map_or(0, |line| line.unlogged);
        }
        assert_eq!(lines, 10 + 2 * 10, "two minutes");
        assert!(unlogged > 400, "{unlogged}");
    }

    #[tokio::test(start_paused = true)]
    async fn failing_clients_are_reported_while_they_continue() {
        let (mut throttle, now) = (AuthThrottle::default(), Instant::now());
        for n in 0..REPORT_FROM {
            assert_eq!(throttle.failing(now), [], "{n} times");
            throttle.record_failure(now, (address(7), AuthMethod::Chap, "iqn.t"), "iqn.a");
        }
        let later = now + Duration::from_secs(9);
        let expected = FailingClient {
            address: address(7),
            method: AuthMethod::Chap,
            name: "iqn.a".into(),
            target: "iqn.t".into(),
            times: REPORT_FROM,
            ago: Duration::from_secs(9),
        };
        assert_eq!(throttle.failing(later), [expected]);
        assert_eq!(throttle.failing(now + REPORT_FOR), []);
    }
}
