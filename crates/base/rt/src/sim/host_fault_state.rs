//! The random faults that a host is to have, and the random streams for them.

use std::cell::Cell;

use super::faults::HostFaults;
use super::rng::Rng;

/// The faults of a host, and the random stream for them.
#[derive(Debug)]
pub(crate) struct HostFaultState {
    pub(super) faults: Cell<HostFaults>,
    /// How often the faults were changed: scheduled events of older ones are void.
    pub(super) generation: Cell<u64>,
    pub(super) drift_rng: Rng,
    pub(super) pause_rng: Rng,
}

impl HostFaultState {
    pub(crate) fn new(seed: u64, host: &str) -> Self {
        Self {
            faults: Cell::default(),
            generation: Cell::new(0),
            drift_rng: Rng::new(seed, &format!("drifts of {host}")),
            pause_rng: Rng::new(seed, &format!("pauses of {host}")),
        }
    }

    /// A random rate within the limits: half of the time exactly a limit, where margins break.
    pub(super) fn draw_drift(&self) -> i32 {
        let most = self.faults.get().max_drift_ppm;
        let size = if self.drift_rng.chance(0.5) {
            most.into()
        } else {
            self.drift_rng.below(most.into())
        };
        let size = i32::try_from(size).expect("a clock's drift is at most a million");
        if self.drift_rng.chance(0.5) { size } else { -size }
    }
}
