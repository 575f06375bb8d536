//! Decides whether an idle core polls or sleeps. Pure.
//!
//! Polling costs processor time; a wake-up costs more and takes longer. So polling pays if work
//! arrives soon, which recent pauses predict: pauses slightly longer than the window, such as those
//! of a neighbour with a batch of work, would waste all of it and need a wake-up all the same. Each
//! window without work halves how often the next pauses are polled, and each successful one doubles
//! it.

use std::time::Duration;

/// Most unpolled pauses between two polled ones.
const MAX_SKIPPED_PAUSES: u32 = 63;

/// What a core did before the last call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollState {
    /// It had work.
    Busy,
    /// It has been polling since then.
    Polling(Duration),
    Sleeping,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct AdaptivePolling {
    window: Duration,
    state: PollState,
    /// Unpolled pauses between two polled ones.
    skipped_pauses: u32,
    /// Remaining unpolled pauses.
    pauses_to_skip: u32,
}

impl AdaptivePolling {
    /// Polls for at most `window` per pause; never, if that is zero.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, state: PollState::Sleeping, skipped_pauses: 0, pauses_to_skip: 0 }
    }

    /// Whether it never polls.
    pub(super) fn is_disabled(&self) -> bool {
        self.window.is_zero()
    }

    /// Whether the core should poll again instead of sleeping. `active`: work has arrived since the
    /// last call; `now`: the time of a steady clock, called only if needed.
    pub(super) fn should_poll(&mut self, active: bool, now: impl FnOnce() -> Duration) -> bool {
        if self.is_disabled() {
            return false;
        }
        if active {
            if matches!(self.state, PollState::Polling(_)) {
                self.skipped_pauses /= 2;
                self.pauses_to_skip = self.skipped_pauses;
            }
            self.state = PollState::Busy;
            return true;
        }
        self.state = match self.state {
            PollState::Busy if self.pauses_to_skip > 0 => {
                self.pauses_to_skip -= 1;
                PollState::Sleeping
            }
            PollState::Busy => PollState::Polling(now()),
            PollState::Polling(since) if now() >= since + self.window => {
                self.skipped_pauses = (2 * self.skipped_pauses + 1).min(MAX_SKIPPED_PAUSES);
                self.pauses_to_skip = self.skipped_pauses;
                PollState::Sleeping
            }
            state => state,
        };
        matches!(self.state, PollState::Polling(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A core that polls every microsecond while it does not sleep.
    struct Core {
        polling: AdaptivePolling,
        now: Duration,
    }

    impl Core {
        fn new(window: Duration) -> Self {
            Self { polling: AdaptivePolling::new(window), now: Duration::ZERO }
        }

        /// Work arrives after `pause`; returns how long the core polled until then.
        fn pause(&mut self, pause: Duration) -> Duration {
            let (begun, mut looked) = (self.now, Duration::ZERO);
            self.polling.should_poll(true, || unreachable!("what has come needs no clock"));
            while self.now < begun + pause && self.polling.should_poll(false, || self.now) {
                self.now += us(1);
                looked += us(1);
            }
            self.now = begun + pause;
            looked
        }
    }

    #[test]
    fn it_polls_for_events_within_the_window() {
        let mut core = Core::new(WINDOW);
        assert!((0..100).all(|_| core.pause(us(30)) == us(30)));
    }

    #[test]
    fn it_rarely_polls_if_events_come_later() {
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

    /// Long pauses, however they are mixed with short ones, cost no more than the short ones save.
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
    fn a_zero_window_disables_polling() {
        let mut core = Core::new(Duration::ZERO);
        assert!((0..10).all(|_| core.pause(us(1)).is_zero()));
    }
}
