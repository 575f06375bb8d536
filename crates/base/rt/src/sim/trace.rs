//! The trace of a world, as a hash: two runs of one seed must end with the same one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use smallvec::SmallVec;

use super::rng::splitmix64_mix;

/// Events kept for the report of a failure.
const TAIL_EVENTS: usize = 32;

/// The digest of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceDigest {
    /// Hash over all events with their times and contents.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
}

/// Collects events.
#[derive(Debug, Default)]
pub struct Trace {
    hash: Cell<u64>,
    events: Cell<u64>,
    verbose: bool,
    tail: RefCell<VecDeque<TraceEvent>>,
}

/// A recorded event; formatted only on request.
#[derive(Debug)]
struct TraceEvent {
    now: Duration,
    kind: TraceEventKind,
}

#[derive(Debug)]
enum TraceEventKind {
    Event { what: &'static str, place: Rc<str>, numbers: SmallVec<[u64; 4]> },
    Note(String),
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9.3} s ", self.now.as_secs_f64())?;
        match &self.kind {
            TraceEventKind::Event { what, place, numbers } => {
                write!(f, "{place} {what} {numbers:?}")
            }
            TraceEventKind::Note(text) => f.write_str(text),
        }
    }
}

impl Trace {
    /// A trace that also prints every event to standard error when `verbose`.
    #[must_use]
    pub fn new(verbose: bool) -> Self {
        Self { verbose, ..Self::default() }
    }

    /// Adds an event: its kind, its place, and the numbers that identify it.
    pub fn event(&self, now: Duration, what: &'static str, place: &Rc<str>, numbers: &[u64]) {
        let mut h = self.hash_time(now);
        for text in [what, place] {
            h = splitmix64_mix(h ^ content_hash(text.as_bytes()));
        }
        for &n in numbers {
            h = splitmix64_mix(h ^ n).wrapping_add(1);
        }
        self.hash.set(h);
        let (place, numbers) = (Rc::clone(place), SmallVec::from_slice(numbers));
        self.remember(TraceEvent { now, kind: TraceEventKind::Event { what, place, numbers } });
    }

    /// Adds an event of the scenario, as text.
    pub fn note(&self, now: Duration, text: String) {
        self.hash.set(splitmix64_mix(self.hash_time(now) ^ content_hash(text.as_bytes())));
        self.remember(TraceEvent { now, kind: TraceEventKind::Note(text) });
    }

    fn hash_time(&self, now: Duration) -> u64 {
        splitmix64_mix(self.hash.get() ^ u64::try_from(now.as_micros()).unwrap_or(u64::MAX))
    }

    fn remember(&self, line: TraceEvent) {
        self.events.set(self.events.get() + 1);
        if self.verbose {
            eprintln!("{line}");
        }
        let mut tail = self.tail.borrow_mut();
        if tail.len() == TAIL_EVENTS {
            tail.pop_front();
        }
        tail.push_back(line);
    }

    /// The digest so far.
    #[must_use]
    pub fn digest(&self) -> TraceDigest {
        TraceDigest { hash: self.hash.get(), events: self.events.get() }
    }

    /// The last events as text, oldest first.
    #[must_use]
    pub fn tail(&self) -> Vec<String> {
        self.tail.borrow().iter().map(ToString::to_string).collect()
    }
}

/// A hash of contents, for events that carry data.
#[must_use]
pub fn content_hash(bytes: &[u8]) -> u64 {
    let mut h = bytes.len() as u64;
    let mut words = bytes.chunks_exact(8);
    for w in &mut words {
        h = (h.rotate_left(5) ^ u64::from_le_bytes(w.try_into().expect("eight bytes")))
            .wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    for &b in words.remainder() {
        h = (h.rotate_left(5) ^ u64::from(b)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    splitmix64_mix(h)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_time_place_and_numbers_all_count() {
        let ms = Duration::from_millis;
        let run = |events: &[(u64, &str, &[u64])]| {
            let t = Trace::new(false);
            events.iter().for_each(|&(at, place, n)| t.event(ms(at), "write", &place.into(), n));
            t.digest().hash
        };
        let base = run(&[(1, "a", &[1]), (1, "a", &[2])]);
        assert_eq!(base, run(&[(1, "a", &[1]), (1, "a", &[2])]));
        for other in [
            run(&[(1, "a", &[2]), (1, "a", &[1])]),
            run(&[(1, "a", &[1]), (2, "a", &[2])]),
            run(&[(1, "a", &[1]), (1, "b", &[2])]),
            run(&[(1, "a", &[1]), (1, "a", &[2, 0])]),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_tail_keeps_the_last_events() {
        let t = Trace::new(false);
        (0..100).for_each(|i| t.note(Duration::ZERO, format!("event {i}")));
        assert_eq!(t.tail().len(), TAIL_EVENTS);
        assert!(t.tail().last().unwrap().ends_with("event 99"));
    }
}
