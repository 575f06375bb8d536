//! Whether a core that has nothing to do looks again or sleeps. Pure.
//!
//! To look costs processor time, to be woken costs more of it and takes longer: looking pays where something
//! comes soon. What the last pauses were like says whether it will: whoever waits a little longer than the window each
//! time, as for a neighbour that has a batch of work, would look through all of it and be woken all the same.
//! So each window in vain halves how often the next pauses are tried, and each that was not doubles it.

use std::time::Duration;

/// Most pauses that are slept through between two that are tried.
const MOST_SKIPPED: u32 = 63;

/// What a core did when it was last asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It had something to do.
    Busy,
    /// It has been looking since then.
    Looking(Duration),
    Sleeping,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Polling {
    window: Duration,
    state: State,
    /// How many pauses lie between two that are tried.
    skip: u32,
    /// How many of them are left.
    left: u32,
}

impl Polling {
    /// Looks for `window` in a pause at most; never, if that is zero.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, state: State::Sleeping, skip: 0, left: 0 }
    }

    /// Whether it ever looks.
    pub(super) fn is_off(&self) -> bool {
        self.window.is_zero()
    }

    /// Says whether the core is to look again instead of sleeping. `active`: something has come since the last
    /// call; `now`: the time of any clock that runs on, asked for only if it is needed.
    pub(super) fn goes_on(&mut self, active: bool, now: impl FnOnce() -> Duration) -> bool {
        if self.is_off() {
            return false;
        }
        if active {
            if matches!(self.state, State::Looking(_)) {
                self.skip /= 2;
                self.left = self.skip;
            }
            self.state = State::Busy;
            return true;
        }
        self.state = match self.state {
            State::Busy if self.left > 0 => {
                self.left -= 1;
                State::Sleeping
            }
            State::Busy => State::Looking(now()),
            State::Looking(since) if now() >= since + self.window => {
                self.skip = (2 * self.skip + 1).min(MOST_SKIPPED);
                self.left = self.skip;
                State::Sleeping
            }
            state => state,
        };
        matches!(self.state, State::Looking(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A core that looks every microsecond, if it does not sleep.
    struct Core {
        polling: Polling,
        now: Duration,
    }

    impl Core {
        fn new(window: Duration) -> Self {
            Self { polling: Polling::new(window), now: Duration::ZERO }
        }

        /// Something comes after `pause`; for how long the core has looked until then.
        fn pause(&mut self, pause: Duration) -> Duration {
            let (begun, mut looked) = (self.now, Duration::ZERO);
            self.polling.goes_on(true, || unreachable!("what has come needs no clock"));
            while self.now < begun + pause && self.polling.goes_on(false, || self.now) {
                self.now += us(1);
                looked += us(1);
            }
            self.now = begun + pause;
            looked
        }
    }

    #[test]
    fn what_comes_within_the_window_is_awaited() {
        let mut core = Core::new(WINDOW);
        assert!((0..100).all(|_| core.pause(us(30)) == us(30)));
    }

    #[test]
    fn what_never_comes_within_the_window_is_hardly_ever_awaited() {
        let mut core = Core::new(WINDOW);
        assert_eq!(core.pause(us(60)), WINDOW);
        let looked: Duration = (0..6400).map(|_| core.pause(us(60))).sum();
        assert!(looked <= 106 * WINDOW, "{looked:?}");
        assert!(looked >= 100 * WINDOW, "it is tried again all the same: {looked:?}");
    }

    #[test]
    fn it_learns_within_two_hundred_pauses() {
        let mut core = Core::new(WINDOW);
        (0..1000).for_each(|_| assert!(core.pause(us(500)) <= WINDOW));
        (0..200).for_each(|_| assert!(core.pause(us(10)) <= us(10)));
        assert!((0..100).all(|_| core.pause(us(10)) == us(10)));
    }

    /// Long pauses of a kind, however they lie between short ones, cost no more than the short ones save.
    #[test]
    fn the_majority_decides() {
        let of = |short: u64, all: u64| {
            let mut core = Core::new(WINDOW);
            let pause = |i: u64| if i * 7 % all < short { us(5) } else { us(900) };
            (0..10_000).map(|i| core.pause(pause(i))).filter(|looked| !looked.is_zero()).count()
        };
        assert!(of(9, 10) > 8000, "{}", of(9, 10));
        assert!(of(1, 10) < 1000, "{}", of(1, 10));
    }

    #[test]
    fn a_window_of_nothing_is_none() {
        let mut core = Core::new(Duration::ZERO);
        assert!((0..10).all(|_| core.pause(us(1)).is_zero()));
    }
}
