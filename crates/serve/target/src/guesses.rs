//! Clients that do not prove who they are: how long each waits before it may try again, and what is told of them.
//!
//! Pure: time is handed in. What is kept is bounded, whoever tries however often.
//!
//! An address waits for itself only: the right secret from another one is not held up. For each target that it fails at
//! it waits by itself, so one wrong secret of a host does not hold up its other volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

use rt::{LogLimit, network};
use tokio::time::Instant;

/// Attempts without success after which an address begins to wait.
const FREE: u32 = 8;

/// The first pause between two attempts; each further attempt doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// The longest pause. Initiators wait longer for an answer, and a secret that was mended is of use that soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// How long an attempt waits at most for its turn; it is refused where it would be longer.
const LONGEST_WAIT: Duration = Duration::from_secs(8);

/// After so long without an attempt an address is as any other.
const FORGET: Duration = Duration::from_secs(600);

/// Addresses with their targets that are remembered, and addresses that have proved who they are.
const MOST: usize = 1024;

/// How long after its last failure a client is told of, and after how many.
const TOLD_FOR: Duration = Duration::from_secs(300);
const TOLD_FROM: u64 = 5;

/// Clients that are told of at a time: those with the most failures.
const MOST_TOLD: usize = 16;

/// How often a client that goes on is logged. All clients together have as many lines as [`LogLimit`] lets through.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// How a client was to prove who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
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

impl Method {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Chap, Self::Dhchap, Self::Tls, Self::Token, Self::Join];

    /// What it is called in metrics.
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

impl std::fmt::Display for Method {
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

/// The address that an attempt comes from, how a proof is given, and which target is wanted.
pub type Whence<'a> = (IpAddr, Method, &'a str);

/// When an attempt may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// At once.
    Now,
    /// Then.
    At(Instant),
    /// Not at all: too many are waiting from there.
    Refused,
}

/// A client that fails to prove who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failing {
    /// Its address.
    pub address: IpAddr,
    /// How it was to prove who it is.
    pub method: Method,
    /// The name that it gives, if it gives one.
    pub name: String,
    /// The target or subsystem that it wants, which may not exist; empty where it names none.
    pub target: String,
    /// How often it has failed since it was last forgotten or let in.
    pub times: u64,
    /// How long ago the last time was.
    pub ago: Duration,
}

/// What is to be logged of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// How often the client has failed.
    pub times: u64,
    /// Failures of others that were not logged, for there were too many.
    pub unlogged: u64,
}

#[derive(Debug)]
struct Failure {
    at: Instant,
    from: IpAddr,
    name: String,
    target: String,
}

#[derive(Debug)]
struct Entry {
    /// Attempts since the last success that have failed, and those whose end is not known.
    attempts: u32,
    /// When the next one may be made.
    next: Instant,
    used: Instant,
    /// The last failure.
    failed: Option<Failure>,
    times: u64,
    logged: Option<Instant>,
}

/// Where an attempt comes from, how it is to be proved, and what for.
type Key = (IpAddr, Method, Wanted);

/// What those that try wait for together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wanted {
    /// This target, which is known to exist.
    Target(String),
    /// All whose names have this number. Who comes by a TLS key names what it wants before it is known whether that
    /// exists: names that exist and names that do not wait alike, or the wait would tell them apart.
    Names(u64),
}

/// Numbers of [`Wanted::Names`]. A host with one wrong key is not held up at most of its other volumes.
const NAMES: u64 = 64;

fn key((from, method, target): Whence<'_>) -> Key {
    let wanted = match method {
        Method::Tls => {
            let mut hasher = DefaultHasher::new();
            target.hash(&mut hasher);
            Wanted::Names(hasher.finish() % NAMES)
        }
        Method::Chap | Method::Dhchap | Method::Token | Method::Join => {
            Wanted::Target(target.to_owned())
        }
    };
    (network(from), method, wanted)
}

/// Clients that have not proved who they are.
#[derive(Debug, Default)]
pub struct Guesses {
    entries: BTreeMap<Key, Entry>,
    /// Addresses that have proved who they are, with the number of the last time.
    proven: BTreeMap<IpAddr, u64>,
    proofs: u64,
    failures: [u64; Method::ALL.len()],
    delayed: u64,
    refused: u64,
    log: LogLimit,
}

/// Counts of attempts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Failures, in the order of [`Method::ALL`].
    pub failures: [u64; Method::ALL.len()],
    /// Attempts that had to wait.
    pub delayed: u64,
    /// Attempts that were refused without checking the secret.
    pub refused: u64,
}

impl Guesses {
    /// When an attempt may be made that begins now. What it comes to is to be told by [`Self::failed`],
    /// [`Self::succeeded`] or [`Self::abandoned`]; until then it counts as one that has failed.
    pub fn turn(&mut self, now: Instant, whence: Whence<'_>) -> Turn {
        self.forget(now);
        let entry = self.entries.entry(key(whence)).or_insert_with(|| Entry::new(now));
        entry.renew(now);
        let pause = pause(entry.attempts);
        let start = entry.next.max(now);
        if start.duration_since(now) > LONGEST_WAIT {
            self.refused += 1;
            return Turn::Refused;
        }
        entry.attempts = entry.attempts.saturating_add(1);
        entry.next = start + pause;
        if start == now {
            return Turn::Now;
        }
        self.delayed += 1;
        Turn::At(start)
    }

    /// An attempt has failed. Gives what is to be logged, if anything.
    pub fn failed(&mut self, now: Instant, whence: Whence<'_>, name: &str) -> Option<Line> {
        let (from, method, target) = whence;
        self.failures[method as usize] += 1;
        self.forget(now);
        let entry = self.entries.entry(key(whence)).or_insert_with(|| Entry::new(now));
        entry.renew(now);
        entry.times += 1;
        let (name, target) = (name.to_owned(), target.to_owned());
        entry.failed = Some(Failure { at: now, from, name, target });
        if entry.logged.is_some_and(|logged| now.duration_since(logged) < LOG_EVERY) {
            return None;
        }
        let unlogged = self.log.line(now)?;
        entry.logged = Some(now);
        Some(Line { times: entry.times, unlogged })
    }

    /// An attempt has succeeded.
    pub fn succeeded(&mut self, whence: Whence<'_>) {
        if !self.entries.is_empty() {
            self.entries.remove(&key(whence));
        }
        self.proofs += 1;
        self.proven.insert(whence.0.to_canonical(), self.proofs);
        if self.proven.len() > MOST
            && let Some(oldest) = self.proven.iter().min_by_key(|(_, number)| **number)
        {
            let oldest = *oldest.0;
            self.proven.remove(&oldest);
        }
    }

    /// Addresses that have proved who they are: the last 1024 of them.
    #[must_use]
    pub fn proven(&self) -> BTreeSet<IpAddr> {
        self.proven.keys().copied().collect()
    }

    /// An attempt has ended before the client has learned what comes of it.
    pub fn abandoned(&mut self, whence: Whence<'_>) {
        if let Some(entry) = self.entries.get_mut(&key(whence)) {
            entry.attempts = entry.attempts.saturating_sub(1);
        }
    }

    /// Whether nothing has been tried in vain there for a while.
    #[must_use]
    pub fn is_blameless(&self, whence: Whence<'_>) -> bool {
        self.entries.is_empty() || !self.entries.contains_key(&key(whence))
    }

    /// Who fails now, those first that have failed most often.
    #[must_use]
    pub fn failing(&self, now: Instant) -> Vec<Failing> {
        let failing = |((_, method, _), entry): (&Key, &Entry)| {
            let Failure { at, from, name, target } = entry.failed.as_ref()?;
            let ago = now.saturating_duration_since(*at);
            (ago < TOLD_FOR && entry.times >= TOLD_FROM).then(|| Failing {
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
        all.truncate(MOST_TOLD);
        all
    }

    /// Counts since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { failures: self.failures, delayed: self.delayed, refused: self.refused }
    }

    /// Makes room for one more: what is old goes, else what has not been used for longest.
    fn forget(&mut self, now: Instant) {
        if self.entries.len() < MOST {
            return;
        }
        self.entries.retain(|_, entry| now.saturating_duration_since(entry.used) < FORGET);
        while self.entries.len() >= MOST {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&oldest);
        }
    }
}

impl Entry {
    fn new(now: Instant) -> Self {
        Self { attempts: 0, next: now, used: now, failed: None, times: 0, logged: None }
    }

    /// It is used now; what was long ago does not count.
    fn renew(&mut self, now: Instant) {
        if now.saturating_duration_since(self.used) >= FORGET {
            *self = Self::new(now);
        }
        self.used = now;
    }
}

/// How long the next attempt has to wait after one that comes after `attempts` others.
fn pause(attempts: u32) -> Duration {
    let Some(beyond) = attempts.checked_sub(FREE - 1) else { return Duration::ZERO };
    FIRST_PAUSE.saturating_mul(1 << beyond.min(10)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    fn chap(n: u8) -> Whence<'static> {
        (address(n), Method::Chap, "t")
    }

    fn token(n: u32) -> Whence<'static> {
        (IpAddr::V4(n.into()), Method::Token, "")
    }

    /// Has somebody guess for so long, as often as it is let; how often that was.
    fn guess(guesses: &mut Guesses, mut now: Instant, time: Duration) -> u32 {
        let (end, mut judged) = (now + time, 0);
        while now < end {
            match guesses.turn(now, chap(1)) {
                Turn::Refused => now += Duration::from_millis(1),
                Turn::Now => {}
                Turn::At(at) => now = at,
            }
            judged += 1;
            guesses.failed(now, chap(1), "i");
            now += Duration::from_millis(1);
        }
        judged
    }

    #[tokio::test(start_paused = true)]
    async fn guesses_from_one_address_become_slower_and_slower() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        let minute = guess(&mut guesses, now, Duration::from_secs(60));
        assert!((10..40).contains(&minute), "{minute}");
        let hour = guess(&mut guesses, now + Duration::from_secs(60), Duration::from_secs(3600));
        assert!(hour <= 901, "{hour}");
    }

    #[tokio::test(start_paused = true)]
    async fn many_connections_at_once_do_not_guess_faster() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        let turns: Vec<_> = (0..1000).map(|_| guesses.turn(now, chap(1))).collect();
        let judged = turns.iter().filter(|turn| **turn != Turn::Refused).count();
        assert!(judged < 20, "{judged}");
        assert_eq!(guesses.counts().refused, 1000 - judged as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_guess_does_not_count() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        for _ in 0..1000 {
            assert_eq!(guesses.turn(now, chap(1)), Turn::Now);
            guesses.abandoned(chap(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_another_address_or_another_target() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        guess(&mut guesses, now, Duration::from_secs(100));
        let now = now + Duration::from_secs(100);
        assert_eq!(guesses.turn(now, chap(2)), Turn::Now);
        assert_eq!(guesses.turn(now, (address(1), Method::Chap, "other")), Turn::Now);
        assert_eq!(guesses.turn(now, (address(1), Method::Tls, "t")), Turn::Now);
        assert_ne!(guesses.turn(now, chap(1)), Turn::Now);
    }

    /// A volume's subsystem once had a wait of its own and all names that do not exist had one together: how long one
    /// waited told whether the name exists.
    #[tokio::test(start_paused = true)]
    async fn how_long_a_tls_key_waits_does_not_tell_whether_its_subsystem_exists() {
        fn whence(name: &str) -> Whence<'_> {
            (address(1), Method::Tls, name)
        }
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        let names: Vec<_> = (0..1000).map(|n| format!("nqn.2026-01.com.example:{n}")).collect();
        let full = |guesses: &mut Guesses, name| {
            while guesses.turn(now, whence(name)) != Turn::Refused {
                guesses.failed(now, whence(name), "");
            }
        };
        full(&mut guesses, "");
        assert_eq!(guesses.turn(now, whence(&names[0])), Turn::Now, "others of its volumes go on");
        full(&mut guesses, &names[0]);
        let alike = key(whence(&names[0])).2;
        let shares = |name: &&String| key(whence(name)).2 == alike;
        let other = names[1..].iter().find(shares).expect("64 waits for all names");
        assert_eq!(guesses.turn(now, whence(other)), Turn::Refused);
        names.iter().for_each(|name| full(&mut guesses, name));
        assert!(guesses.entries.len() <= 64, "{}", guesses.entries.len());
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_the_right_secret_at_last_waits_for_seconds_and_then_no_more() {
        let (mut guesses, mut now) = (Guesses::default(), Instant::now());
        for _ in 0..1000 {
            // An initiator that tries every three seconds.
            if let Turn::At(at) = guesses.turn(now, chap(1)) {
                now = at;
            }
            guesses.failed(now, chap(1), "i");
            now += Duration::from_secs(3);
        }
        let Turn::At(at) = guesses.turn(now, chap(1)) else { panic!("it waits") };
        assert!(at - now <= LONGEST_PAUSE, "{:?}", at - now);
        guesses.succeeded(chap(1));
        for _ in 0..FREE {
            assert_eq!(guesses.turn(at, chap(1)), Turn::Now);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        for n in 0..200_000_u32 {
            let now = now + Duration::from_millis(n.into());
            guesses.turn(now, token(n));
            guesses.failed(now, token(n), "");
        }
        assert!(guesses.entries.len() <= MOST);
        assert_eq!(guesses.counts().failures, [0, 0, 0, 200_000, 0]);
        // An IPv6 host has as many addresses as it likes.
        let mut guesses = Guesses::default();
        for n in 0..100 {
            let from = format!("2001:db8::{n:x}").parse().unwrap();
            guesses.turn(now, (from, Method::Chap, "t"));
        }
        assert_eq!(guesses.entries.len(), 1);
        let mapped = "::ffff:192.0.2.1".parse().unwrap();
        guesses.turn(now, (mapped, Method::Chap, "t"));
        assert!(!guesses.is_blameless(chap(1)));
    }

    #[test]
    fn the_last_addresses_that_have_proved_who_they_are_are_known() {
        let mut guesses = Guesses::default();
        for n in 0..3000_u32 {
            guesses.succeeded(chap(1));
            guesses.succeeded(("::ffff:192.0.2.2".parse().unwrap(), Method::Tls, "t"));
            guesses.succeeded(token(n));
        }
        let proven = guesses.proven();
        assert_eq!(proven.len(), MOST);
        let last = IpAddr::V4(2999.into());
        for known in [address(1), address(2), last] {
            assert!(proven.contains(&known), "{known}");
        }
        assert!(!proven.contains(&IpAddr::V4(0.into())) && !proven.contains(&address(3)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_on_is_one_line_a_minute_and_all_of_them_ten() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        let mut lines = 0;
        for ms in (0..600_000).step_by(10) {
            let now = now + Duration::from_millis(ms);
            let line = guesses.failed(now, token(1), "");
            lines += u32::from(line.is_some());
        }
        assert_eq!(lines, 10, "ten minutes");
        let mut unlogged = 0;
        for n in 0..1000_u64 {
            let now = now + Duration::from_secs(700) + Duration::from_millis(n * 119);
            let line = guesses.failed(now, token(u32::try_from(n).unwrap() + 9), "");
            lines += u32::from(line.is_some());
            unlogged += line.map_or(0, |line| line.unlogged);
        }
        assert_eq!(lines, 10 + 2 * 10, "two minutes");
        assert!(unlogged > 400, "{unlogged}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_fails_is_told_of_while_it_goes_on() {
        let (mut guesses, now) = (Guesses::default(), Instant::now());
        for n in 0..TOLD_FROM {
            assert_eq!(guesses.failing(now), [], "{n} times");
            guesses.failed(now, (address(7), Method::Chap, "iqn.t"), "iqn.a");
        }
        let later = now + Duration::from_secs(9);
        let expected = Failing {
            address: address(7),
            method: Method::Chap,
            name: "iqn.a".into(),
            target: "iqn.t".into(),
            times: TOLD_FROM,
            ago: Duration::from_secs(9),
        };
        assert_eq!(guesses.failing(later), [expected]);
        assert_eq!(guesses.failing(now + TOLD_FOR), []);
    }
}
