//! The same on hosts with little space: copies fill up, one alone or all of them, in the midst of everything else that
//! befalls them, and are given room again.
//!
//! Once nothing else befalls them all copies are full for a while: none of them leaves the volume for that.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use rt::sim::{Rng, World};

use super::{Bench, Plan, set_up};

/// How long all copies are full and nothing else happens.
const FULL_FOR: Duration = Duration::from_secs(20);

/// What is done about space while anything else may happen.
struct Squeeze {
    bench: Rc<Bench>,
    rng: Rng,
    goes_on: Cell<bool>,
}

impl Squeeze {
    /// Leaves hosts a few pages, or all that they like, and changes its mind every few seconds.
    async fn run(self: Rc<Self>) {
        while self.goes_on.get() {
            let all = self.rng.chance(0.7);
            for node in &self.bench.nodes {
                let short = all || self.rng.chance(0.3);
                let pages = short.then(|| self.rng.below(if all { 12 } else { 4 }));
                self.bench.fill(node, pages);
            }
            tokio::time::sleep(self.rng.time(Duration::ZERO, Duration::from_secs(6))).await;
        }
    }
}

/// Plays it.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.begin();
    let squeeze = Rc::new(Squeeze {
        bench: Rc::clone(&bench),
        rng: Rng::new(world.seed(), "space"),
        goes_on: Cell::new(true),
    });
    let squeezing = tokio::task::spawn_local(Rc::clone(&squeeze).run());
    for _ in 0..world.rng().between(2, 8) {
        bench.mischief().await?;
    }
    squeeze.goes_on.set(false);
    squeezing.await.map_err(|e| e.to_string())?;
    bench.nodes.iter().for_each(|node| bench.fill(node, None));
    bench.calm_down().await?;
    bench.all_are_full(&squeeze.rng).await?;
    bench.last_round().await
}

impl Bench {
    /// All copies are full, and clients go on: nobody leaves, and all are equal afterwards.
    async fn all_are_full(&self, rng: &Rng) -> Result<(), String> {
        self.nodes.iter().for_each(|node| self.fill(node, Some(rng.below(6))));
        let before = self.store.record();
        tokio::time::sleep(FULL_FOR).await;
        let after = self.store.record();
        let serves = |mirror: &Mirror| mirror.serves();
        let serve = self.replicas().iter().all(|n| n.mirror.borrow().as_ref().is_some_and(serves));
        self.shared.verdict()?;
        if before.epoch != after.epoch || !serve {
            return Err(format!("copies that were full: {before:?} became {after:?}"));
        }
        self.nodes.iter().for_each(|node| self.fill(node, None));
        Ok(())
    }
}
