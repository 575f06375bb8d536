//! Harm that befalls a host by itself: [`HostFaults`].

use std::cell::Cell;
use std::time::Duration;

use super::faults::HostFaults;
use super::host::Host;
use super::rng::Rng;

/// What is to befall a host, and what decides when.
#[derive(Debug)]
pub(crate) struct Harm {
    faults: Cell<HostFaults>,
    /// How often the faults were changed: what the agenda holds of older ones is void.
    changes: Cell<u64>,
    drifts: Rng,
    pauses: Rng,
}

impl Harm {
    pub(crate) fn new(seed: u64, host: &str) -> Self {
        Self {
            faults: Cell::default(),
            changes: Cell::new(0),
            drifts: Rng::new(seed, &format!("drifts of {host}")),
            pauses: Rng::new(seed, &format!("pauses of {host}")),
        }
    }

    /// A rate within the bounds: every other time on a bound, where margins break.
    fn draw_drift(&self) -> i32 {
        let most = self.faults.get().drift_ppm;
        let size =
            if self.drifts.chance(0.5) { most.into() } else { self.drifts.below(most.into()) };
        let size = i32::try_from(size).expect("a clock's drift is at most a million");
        if self.drifts.chance(0.5) { size } else { -size }
    }
}

impl Host {
    /// Changes how the host misbehaves by itself, from now on and through crashes. A rate that its clock has by now is
    /// kept, and a pause that it is in goes on to its end: [`Self::set_clock_drift`],
    /// [`Self::resume`].
    pub fn set_faults(&self, faults: HostFaults) {
        let harm = &self.state.harm;
        harm.faults.set(faults);
        harm.changes.set(harm.changes.get() + 1);
        if faults.drift_ppm > 0 {
            self.drift();
        }
        if !faults.pause_every.is_zero() {
            self.pause_later(Duration::ZERO);
        }
    }

    /// How it misbehaves.
    #[must_use]
    pub fn faults(&self) -> HostFaults {
        self.state.harm.faults.get()
    }

    /// Draws a rate, and when to draw the next one.
    fn drift(&self) {
        let harm = &self.state.harm;
        self.set_clock_drift(harm.draw_drift());
        let longest = harm.faults.get().drift_for;
        if !longest.is_zero() {
            self.harm_after(draw(&harm.drifts, longest), Self::drift);
        }
    }

    /// Draws a pause that begins some time after one of `previous`, and what follows it.
    fn pause_later(&self, previous: Duration) {
        let harm = &self.state.harm;
        let faults = harm.faults.get();
        self.harm_after(previous + draw(&harm.pauses, faults.pause_every), move |host| {
            let length = draw(&host.state.harm.pauses, faults.pause_for);
            host.pause(length);
            host.pause_later(length);
        });
    }

    /// Does `harm` in `delay`, unless the faults are changed before.
    fn harm_after(&self, delay: Duration, harm: impl FnOnce(&Self) + 'static) {
        let (host, change) = (self.clone(), self.state.harm.changes.get());
        self.shared.agenda.after(delay, move || {
            if host.state.harm.changes.get() == change {
                harm(&host);
            }
        });
    }
}

/// A time up to `longest`; never none at all, so that virtual time goes on.
fn draw(rng: &Rng, longest: Duration) -> Duration {
    let least = Duration::from_millis(1);
    rng.time(least, longest.max(least))
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::Core;
    use crate::sim::{Digest, HostSetup, Setup, World, run};

    const SECOND: Duration = Duration::from_secs(1);

    const FAULTS: HostFaults = HostFaults {
        drift_ppm: 100_000,
        drift_for: SECOND.saturating_mul(5),
        pause_every: SECOND.saturating_mul(3),
        pause_for: SECOND.saturating_mul(2),
    };

    /// A host under `faults` for 100 s, then without for 100 s; how much its clock counted, how
    /// often its rate changed, and its ticks of 100 ms in each part.
    fn play(seed: u64, faults: HostFaults) -> (Digest, [Duration; 2], [u64; 2]) {
        let seen = Rc::new(Cell::default());
        let told = Rc::clone(&seen);
        let outcome = run(Setup::new(seed), |world: World| async move {
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
            told.set((counted, [so_far, ticks.get() - so_far]));
            Ok(())
        });
        outcome.result.unwrap_or_else(|e| panic!("{e}"));
        let (counted, ticks) = seen.get();
        (outcome.digest, counted, ticks)
    }

    #[test]
    fn faults_come_by_themselves_within_their_bounds_and_go() {
        let mut sums = Vec::new();
        for seed in 0..20 {
            let (digest, [with, without], [fewer, all]) = play(seed, FAULTS);
            assert!((90 * SECOND..=110 * SECOND).contains(&with), "{with:?}");
            assert_ne!(with, 100 * SECOND);
            assert_eq!(without, 100 * SECOND);
            assert!((200..900).contains(&fewer), "{fewer} of 1000");
            assert!(all >= 990, "{all} of 1000");
            assert_eq!(digest, play(seed, FAULTS).0);
            sums.push(with);
        }
        let (slowest, fastest) = (sums.iter().min(), sums.iter().max());
        assert!(slowest < Some(&(100 * SECOND)) && fastest > Some(&(100 * SECOND)));
    }

    #[test]
    fn each_fault_is_off_by_itself() {
        let still = HostFaults { pause_every: Duration::ZERO, ..FAULTS };
        let (_, [with, _], [ticks, _]) = play(1, still);
        assert!(with != 100 * SECOND && ticks >= 990);
        let right = HostFaults { drift_ppm: 0, ..FAULTS };
        let (_, [with, _], [ticks, _]) = play(1, right);
        assert!(with == 100 * SECOND && ticks < 900);
        let one_rate = HostFaults { drift_for: Duration::ZERO, ..still };
        let (_, [with, _], _) = play(1, one_rate);
        assert_ne!(with, 100 * SECOND);
    }
}
