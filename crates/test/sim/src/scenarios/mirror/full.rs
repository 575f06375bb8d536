//! The mirror scenario on hosts with little space: one copy or all of them run out of space in the
//! middle of other faults, and get space again.
//!
//! When no other fault is active, all copies are full for a while; none of them may leave the
//! volume for that.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use rt::sim::{Rng, World};

use super::{MirrorTestbed, ScenarioConfig, set_up};

/// How long all copies stay full without any other fault.
const ALL_FULL_TIME: Duration = Duration::from_secs(20);

/// How space changes while other faults may happen.
struct SpaceLimiter {
    bench: Rc<MirrorTestbed>,
    rng: Rng,
    running: Cell<bool>,
}

impl SpaceLimiter {
    /// Limits the space of hosts to a few pages, or lifts the limit, and changes this every few
    /// seconds.
    async fn run(self: Rc<Self>) {
        while self.running.get() {
            let all = self.rng.chance(0.7);
            for node in &self.bench.nodes {
                let short = all || self.rng.chance(0.3);
                let pages = short.then(|| self.rng.below(if all { 12 } else { 4 }));
                self.bench.limit_space(node, pages);
            }
            tokio::time::sleep(self.rng.duration_between(Duration::ZERO, Duration::from_secs(6)))
                .await;
        }
    }
}

/// Runs the scenario.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.start_all();
    let squeeze = Rc::new(SpaceLimiter {
        bench: Rc::clone(&bench),
        rng: Rng::new(world.seed(), "space"),
        running: Cell::new(true),
    });
    let squeezing = tokio::task::spawn_local(Rc::clone(&squeeze).run());
    for _ in 0..world.rng().between(2, 8) {
        bench.inject_random_fault().await?;
    }
    squeeze.running.set(false);
    squeezing.await.map_err(|e| e.to_string())?;
    bench.nodes.iter().for_each(|node| bench.limit_space(node, None));
    bench.heal_and_wait_in_sync().await?;
    bench.check_all_full(&squeeze.rng).await?;
    bench.last_round().await
}

impl MirrorTestbed {
    /// All copies are full and clients continue: no replica leaves, and all copies are equal
    /// afterwards.
    async fn check_all_full(&self, rng: &Rng) -> Result<(), String> {
        self.nodes.iter().for_each(|node| self.limit_space(node, Some(rng.below(6))));
        let before = self.store.record();
        tokio::time::sleep(ALL_FULL_TIME).await;
        let after = self.store.record();
        let serves = |mirror: &Mirror| mirror.is_serving();
        let serve = self.replicas().iter().all(|n| n.mirror.borrow().as_ref().is_some_and(serves));
        self.shared.first_violation()?;
        if before.epoch != after.epoch || !serve {
            return Err(format!("copies that were full: {before:?} became {after:?}"));
        }
        self.nodes.iter().for_each(|node| self.limit_space(node, None));
        Ok(())
    }
}
