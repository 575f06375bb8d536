//! The machine of a simulated process: state that survives a kill but not a power cut.

use std::cell::Cell;
use std::time::Duration;

use super::clock::Clock;
use super::rng::Rng;

/// Longest uptime of a machine when its world begins.
const MAX_INITIAL_UPTIME: Duration = Duration::from_secs(10 * 24 * 3600);

/// Time from power-on to the start of the software.
const BOOT_TIME: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// A host's machine.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) clock: Clock,
    pub(crate) boot_id: Cell<u128>,
    /// Whether its power was cut and nothing has started on it since.
    is_off: Cell<bool>,
    rng: Rng,
}

impl Machine {
    /// A machine that has been up for some time, at virtual time `now`.
    pub(crate) fn new(seed: u64, host: &str, now: Duration, drift_ppm: i32) -> Self {
        let rng = Rng::new(seed, &format!("machine {host}"));
        let clock =
            Clock::new(now, rng.duration_between(Duration::ZERO, MAX_INITIAL_UPTIME), drift_ppm);
        let boot_id = Cell::new(draw_id(&rng));
        Self { clock, boot_id, is_off: Cell::new(false), rng }
    }

    /// Cuts its power.
    pub(crate) fn power_cut(&self) {
        self.is_off.set(true);
    }

    /// Starts software on it at virtual time `now`: boots it, if it is off.
    pub(crate) fn power_on(&self, now: Duration, drift_ppm: i32) {
        if self.is_off.replace(false) {
            self.boot_id.set(draw_id(&self.rng));
            let (low, high) = BOOT_TIME;
            self.clock.restart(now, self.rng.duration_between(low, high));
        }
        self.clock.set_drift(now, drift_ppm);
    }
}

fn draw_id(rng: &Rng) -> u128 {
    u128::from(rng.u64()) << 64 | u128::from(rng.u64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Host, HostSetup, World, WorldSetup, run};

    /// The boot id, and the clock's reading.
    async fn look(host: &Host) -> (u128, Duration) {
        let look = host.run(|core| async move { (core.boot_id(), core.now()) });
        look.join().await.expect("the host runs")
    }

    #[test]
    fn a_kill_leaves_the_machine_up_and_a_power_cut_boots_it_anew() {
        let outcome = run(WorldSetup::new(3), |world: World| async move {
            let [host, other] = ["host", "other"].map(|n| world.add_host(n, HostSetup::default()));
            let (first, shown) = look(&host).await;
            let (foreign, _) = look(&other).await;
            assert_ne!(first, foreign);
            assert!(shown > BOOT_TIME.1, "as this seed has it: {shown:?}");
            host.kill();
            tokio::time::sleep(Duration::from_secs(3)).await;
            let (kept, later) = look(&host).await;
            assert_eq!((kept, later), (first, shown + Duration::from_secs(3)));
            host.kill();
            host.power_cut();
            let (second, young) = look(&host).await;
            assert_ne!(
                second, first,
                "a power cut that finds the process dead is one all the same"
            );
            assert!((BOOT_TIME.0..=BOOT_TIME.1).contains(&young), "{young:?}");
            host.power_cut();
            assert_ne!(look(&host).await.0, second);
            assert_eq!(look(&other).await.0, foreign);
            Ok(())
        });
        outcome.result.unwrap_or_else(|e| panic!("{e}"));
    }
}
