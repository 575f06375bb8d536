//! Random faults of a host: [`HostFaults`].

use std::time::Duration;

use super::faults::HostFaults;
use super::host::Host;
use super::rng::Rng;

impl Host {
    /// Changes the random faults of the host, from now on and across crashes. The current clock
    /// rate remains, and a pause in progress goes on to its end: see [`Self::set_clock_drift`],
    /// [`Self::resume`].
    pub fn set_faults(&self, faults: HostFaults) {
        let fault_state = &self.state.fault_state;
        fault_state.faults.set(faults);
        fault_state.generation.set(fault_state.generation.get() + 1);
        if faults.max_drift_ppm > 0 {
            self.apply_drift();
        }
        if !faults.max_pause_interval.is_zero() {
            self.schedule_pause(Duration::ZERO);
        }
    }

    /// The random faults of the host.
    #[must_use]
    pub fn faults(&self) -> HostFaults {
        self.state.fault_state.faults.get()
    }

    /// Draws a clock rate, and when to draw the next one.
    fn apply_drift(&self) {
        let fault_state = &self.state.fault_state;
        self.set_clock_drift(fault_state.draw_drift());
        let longest = fault_state.faults.get().max_drift_duration;
        if !longest.is_zero() {
            self.schedule_fault(draw_duration(&fault_state.drift_rng, longest), Self::apply_drift);
        }
    }

    /// Schedules a random pause after one of `previous`, and its successor.
    fn schedule_pause(&self, previous: Duration) {
        let fault_state = &self.state.fault_state;
        let faults = fault_state.faults.get();
        self.schedule_fault(
            previous + draw_duration(&fault_state.pause_rng, faults.max_pause_interval),
            move |host| {
                let length =
                    draw_duration(&host.state.fault_state.pause_rng, faults.max_pause_duration);
                host.pause(length);
                host.schedule_pause(length);
            },
        );
    }

    /// Schedules `fault` in `delay`, unless the faults are changed before.
    fn schedule_fault(&self, delay: Duration, fault: impl FnOnce(&Self) + 'static) {
        let (host, change) = (self.clone(), self.state.fault_state.generation.get());
        self.shared.agenda.schedule(delay, move || {
            if host.state.fault_state.generation.get() == change {
                fault(&host);
            }
        });
    }
}

/// A time up to `longest`; never zero, so that virtual time advances.
fn draw_duration(rng: &Rng, longest: Duration) -> Duration {
    let least = Duration::from_millis(1);
    rng.duration_between(least, longest.max(least))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::Core;
    use crate::sim::{HostSetup, TraceDigest, World, WorldSetup, run};

    const SECOND: Duration = Duration::from_secs(1);

    const FAULTS: HostFaults = HostFaults {
        max_drift_ppm: 100_000,
        max_drift_duration: SECOND.saturating_mul(5),
        max_pause_interval: SECOND.saturating_mul(3),
        max_pause_duration: SECOND.saturating_mul(2),
    };

    /// A host under `faults` for 100 s, then without for 100 s; returns the time its clock counted,
    /// how often its rate changed, and its ticks of 100 ms in each part.
    fn run_scenario(seed: u64, faults: HostFaults) -> (TraceDigest, [Duration; 2], [u64; 2]) {
        let seen = Rc::new(Cell::default());
        let result = Rc::clone(&seen);
        let outcome = run(WorldSetup::new(seed), |world: World| async move {
            let host = world.add_host("host", HostSetup::default());
            let clock = async |core: Core| core.now();
            let now = async || host.run(clock).join().await.expect("it runs");
            let ticks = Rc::new(Cell::new(0));
            let count = Rc::clone(&ticks);
            host.run(|_| async move {
                loop {
                    tokio::time::sleep(SECOND / 10).await;
                    count.set(count.get() + 1);
                }
            });
            let first = now().await;
            host.set_faults(faults);
            assert_eq!(host.faults(), faults);
            tokio::time::sleep(100 * SECOND).await;
            host.set_faults(HostFaults::default());
            host.set_clock_drift(0);
            host.resume();
            let (second, so_far) = (now().await, ticks.get());
            tokio::time::sleep(100 * SECOND).await;
            let counted = [second - first, now().await - second];
            result.set((counted, [so_far, ticks.get() - so_far]));
            Ok(())
        });
        outcome.result.unwrap_or_else(|e| panic!("{e}"));
        let (counted, ticks) = seen.get();
        (outcome.digest, counted, ticks)
    }

    #[test]
    fn random_faults_stay_within_their_bounds() {
        let mut sums = Vec::new();
        for seed in 0..20 {
            let (digest, [with, without], [fewer, all]) = run_scenario(seed, FAULTS);
            assert!((90 * SECOND..=110 * SECOND).contains(&with), "{with:?}");
            assert_ne!(with, 100 * SECOND);
            assert_eq!(without, 100 * SECOND);
            assert!((200..900).contains(&fewer), "{fewer} of 1000");
            assert!(all >= 990, "{all} of 1000");
            assert_eq!(digest, run_scenario(seed, FAULTS).0);
            sums.push(with);
        }
        let (slowest, fastest) = (sums.iter().min(), sums.iter().max());
        assert!(slowest < Some(&(100 * SECOND)) && fastest > Some(&(100 * SECOND)));
    }

    #[test]
    fn each_fault_can_be_disabled() {
        let still = HostFaults { max_pause_interval: Duration::ZERO, ..FAULTS };
        let (_, [with, _], [ticks, _]) = run_scenario(1, still);
        assert!(with != 100 * SECOND && ticks >= 990);
        let right = HostFaults { max_drift_ppm: 0, ..FAULTS };
        let (_, [with, _], [ticks, _]) = run_scenario(1, right);
        assert!(with == 100 * SECOND && ticks < 900);
        let one_rate = HostFaults { max_drift_duration: Duration::ZERO, ..still };
        let (_, [with, _], _) = run_scenario(1, one_rate);
        assert_ne!(with, 100 * SECOND);
    }
}
