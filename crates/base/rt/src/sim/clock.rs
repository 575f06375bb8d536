//! The clock of a simulated machine: it counts from the machine's boot, at its own rate.

use std::cell::Cell;
use std::time::Duration;

use tokio::sync::Notify;

use super::event_queue::EventQueue;

/// Unit of the rate: a clock that is this much fast counts two seconds in one.
const PARTS_PER_MILLION: u128 = 1_000_000;

/// A clock's reading as a linear function of virtual time; a change of the rate begins a new piece
/// at the current reading.
#[derive(Debug)]
pub(crate) struct Clock {
    line: Cell<ClockLine>,
    /// Wakes sleepers: the virtual time of their deadline has changed.
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct ClockLine {
    /// Virtual time at which it begins.
    since: Duration,
    /// The clock's reading at that time.
    reading: Duration,
    /// How much faster than virtual time it runs.
    drift_ppm: i32,
}

impl ClockLine {
    /// The reading at virtual time `now`, which is not before `since`.
    fn reading_at(&self, now: Duration) -> Duration {
        let passed = now.saturating_sub(self.since).as_nanos();
        self.reading + nanoseconds(passed * self.rate_ppm() / PARTS_PER_MILLION)
    }

    /// The virtual time of `reading`; `None` if the clock stops before.
    fn time_of_reading(&self, reading: Duration) -> Option<Duration> {
        let missing = reading.saturating_sub(self.reading).as_nanos();
        let passed = match (missing, self.rate_ppm()) {
            (0, _) => 0,
            (_, 0) => return None,
            (missing, rate) => (missing * PARTS_PER_MILLION).div_ceil(rate),
        };
        Some(self.since.saturating_add(nanoseconds(passed)))
    }

    /// Parts per million of virtual time that it counts.
    fn rate_ppm(&self) -> u128 {
        PARTS_PER_MILLION.saturating_add_signed(self.drift_ppm.into())
    }
}

fn nanoseconds(n: u128) -> Duration {
    Duration::from_nanos(u64::try_from(n).unwrap_or(u64::MAX))
}

impl Clock {
    /// A clock that reads `shown` at virtual time `now`.
    pub(crate) fn new(now: Duration, shown: Duration, drift_ppm: i32) -> Self {
        let clock = Self {
            line: Cell::new(ClockLine { since: now, reading: shown, drift_ppm: 0 }),
            changed: Notify::new(),
        };
        clock.set_drift(now, drift_ppm);
        clock
    }

    /// The reading at virtual time `now`.
    pub(crate) fn reading_at(&self, now: Duration) -> Duration {
        self.line.get().reading_at(now)
    }

    /// Changes its rate from virtual time `now` on.
    pub(crate) fn set_drift(&self, now: Duration, drift_ppm: i32) {
        assert!(
            u128::from(drift_ppm.unsigned_abs()) <= PARTS_PER_MILLION,
            "{drift_ppm} ppm: not a clock"
        );
        self.line.set(ClockLine { since: now, reading: self.reading_at(now), drift_ppm });
        self.changed.notify_waiters();
    }

    /// Boot: the clock reads `shown` at virtual time `now`, and keeps its rate.
    pub(crate) fn restart(&self, now: Duration, shown: Duration) {
        self.line.set(ClockLine { since: now, reading: shown, ..self.line.get() });
        self.changed.notify_waiters();
    }

    /// Waits until the clock reads `reading`.
    pub(crate) async fn sleep_until(&self, events: &EventQueue, reading: Duration) {
        loop {
            let changed = self.changed.notified();
            let now = events.now();
            let Some(at) = self.line.get().time_of_reading(reading) else {
                changed.await;
                continue;
            };
            if at <= now {
                return;
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = tokio::time::sleep(at - now) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::Core;
    use crate::sim::{Host, HostSetup, World, WorldSetup, run};

    const SECOND: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);

    /// Runs a world with one host whose clock is `drift_ppm` fast.
    fn run_scenario<Fut: Future<Output = ()>>(drift_ppm: i32, f: impl Fn(World, Host) -> Fut) {
        let outcome = run(WorldSetup::new(1), |world: World| {
            let setup = HostSetup { clock_drift_ppm: drift_ppm, ..HostSetup::default() };
            let host = world.add_host("host", setup);
            let scene = f(world, host);
            async move {
                scene.await;
                Ok(())
            }
        });
        outcome.result.unwrap_or_else(|e| panic!("{e}"));
    }

    /// The reading of the host's clock.
    async fn read(host: &Host) -> Duration {
        host.run(|core| async move { core.now() }).join().await.expect("the host runs")
    }

    #[test]
    fn clock_rates_are_exact() {
        for (drift_ppm, shown_ms) in [
            (0, 10_000),
            (100_000, 11_000),
            (-100_000, 9_000),
            (1, 10_000),
            (1_000_000, 20_000),
            (-1_000_000, 0),
        ] {
            run_scenario(drift_ppm, |_, host| async move {
                let begun = read(&host).await;
                tokio::time::sleep(10 * SECOND).await;
                let passed = read(&host).await - begun;
                let drift = Duration::from_micros(10 * u64::from(drift_ppm == 1));
                assert_eq!(passed, shown_ms * MS + drift, "{drift_ppm} ppm");
            });
        }
    }

    #[test]
    fn a_change_of_rate_does_not_jump_and_holds_from_then_on() {
        let clock = Clock::new(3 * SECOND, 100 * SECOND, 100_000);
        let odd = Duration::from_nanos(3_700_000_003);
        let before = clock.reading_at(odd);
        assert_eq!(before, 100 * SECOND + Duration::from_nanos(770_000_003));
        clock.set_drift(odd, -100_000);
        assert_eq!(clock.reading_at(odd), before);
        assert_eq!(clock.reading_at(odd + 10 * SECOND), before + 9 * SECOND);
        clock.restart(odd, 5 * SECOND);
        assert_eq!(
            clock.reading_at(odd + 10 * SECOND),
            14 * SECOND,
            "a boot does not change the crystal"
        );
    }

    #[test]
    fn an_instant_is_the_first_that_shows_its_reading() {
        for drift_ppm in [-999_999, -100_000, -7, 0, 3, 100_000, 1_000_000] {
            let line = ClockLine { since: 7 * SECOND, reading: 5 * SECOND, drift_ppm };
            for ns in [1, 999, 1_000_003, 77_777_777_777] {
                let reading = line.reading + Duration::from_nanos(ns);
                let at = line.time_of_reading(reading).expect("it runs");
                assert!(line.reading_at(at) >= reading, "{drift_ppm} {ns}");
                assert!(
                    line.reading_at(at - Duration::from_nanos(1)) < reading,
                    "{drift_ppm} {ns}"
                );
            }
            assert_eq!(line.time_of_reading(line.reading), Some(line.since));
        }
        let still = ClockLine { since: SECOND, reading: SECOND, drift_ppm: -1_000_000 };
        assert_eq!(still.time_of_reading(2 * SECOND), None);
    }

    #[test]
    fn sleepers_wake_by_their_own_clock() {
        run_scenario(100_000, |world, host| async move {
            let begun = world.now();
            let slept = host.run(|core: Core| async move {
                let begun = core.now();
                core.sleep(11 * SECOND).await;
                core.now() - begun
            });
            assert_eq!(slept.join().await, Some(11 * SECOND));
            assert_eq!(world.now() - begun, 10 * SECOND);
        });
    }

    #[test]
    fn sleepers_follow_a_change_of_the_rate() {
        run_scenario(0, |world, host| async move {
            let begun = world.now();
            let asleep = || host.run(|core: Core| async move { core.sleep(20 * SECOND).await });
            let (first, second) = (asleep(), asleep());
            tokio::time::sleep(10 * SECOND).await;
            host.set_clock_drift(1_000_000);
            first.join().await.expect("the host runs");
            assert_eq!(world.now() - begun, 15 * SECOND, "ten seconds more, counted in five");
            second.join().await.expect("the host runs");
            let third = asleep();
            host.set_clock_drift(-1_000_000);
            tokio::time::sleep(100 * SECOND).await;
            host.set_clock_drift(0);
            third.join().await.expect("the host runs");
            assert!(world.now() - begun >= 135 * SECOND, "a clock that stands still wakes no task");
        });
    }

    #[test]
    fn clocks_start_apart_and_the_rate_outlives_a_power_cut() {
        let outcome = run(WorldSetup::new(1), |world: World| async move {
            let hosts = ["a", "b"].map(|n| world.add_host(n, HostSetup::default()));
            assert_ne!(read(&hosts[0]).await, read(&hosts[1]).await);
            let shared = Rc::new(hosts);
            shared[0].set_clock_drift(100_000);
            shared[0].power_cut();
            let begun = read(&shared[0]).await;
            tokio::time::sleep(10 * SECOND).await;
            assert_eq!(read(&shared[0]).await - begun, 11 * SECOND);
            Ok(())
        });
        outcome.result.unwrap_or_else(|e| panic!("{e}"));
    }
}
