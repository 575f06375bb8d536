//! Breadth-first search through everything that may happen.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;

use super::world::{Budget, Mistake, Step, World};

struct Found {
    states: usize,
    error: Option<(String, Vec<Step>)>,
}

fn name(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Checks all states reachable from `root`, at most `most`; from one in `sample` of them also
/// checks that members serve once faults end.
fn search(root: World, most: usize, sample: u64) -> Found {
    let first = name(&root);
    let mut came = HashMap::from([(first, None)]);
    let mut queue = VecDeque::from([(first, root)]);
    let fail = |came: &HashMap<u64, Option<(u64, Step)>>, at, last: Option<Step>, why: String| {
        let mut steps: Vec<_> = last.into_iter().collect();
        let mut at = at;
        while let Some((before, step)) = came[&at] {
            steps.push(step);
            at = before;
        }
        steps.reverse();
        Found { states: came.len(), error: Some((why, steps)) }
    };
    while let Some((at, world)) = queue.pop_front() {
        if at % sample == 0
            && let Err(why) = world.lives()
        {
            return fail(&came, at, None, why);
        }
        for step in world.steps() {
            let mut next = world.clone();
            if let Err(why) = next.do_step(step) {
                return fail(&came, at, Some(step), why);
            }
            let hash = name(&next);
            if came.len() < most && !came.contains_key(&hash) {
                came.insert(hash, Some((at, step)));
                queue.push_back((hash, next));
            }
        }
    }
    Found { states: came.len(), error: None }
}

/// A scope: how many nodes, whether the last one is to join, where writes enter, which faults may
/// occur.
struct Scope {
    nodes: usize,
    apart: bool,
    set_back: bool,
    new_volume: bool,
    writes: &'static [usize],
    left: Budget,
}

impl Scope {
    fn new(nodes: usize, writes: &'static [usize], allow: fn(&mut Budget)) -> Self {
        let mut left = Budget { ticks: true, ..Budget::default() };
        allow(&mut left);
        Self { nodes, apart: false, set_back: false, new_volume: false, writes, left }
    }

    /// Starts at the moment when the volume has its first configuration.
    fn new_volume(mut self) -> Self {
        self.new_volume = true;
        self
    }

    /// The last node is down, and its image is rolled back.
    fn rolled_back(mut self) -> Self {
        (self.left.copies, self.left.rollbacks, self.left.flushes) = (1, 1, self.left.flushes + 1);
        self.set_back = true;
        self
    }

    fn apart(mut self) -> Self {
        self.apart = true;
        self
    }

    fn root(&self, mistake: Mistake) -> World {
        if self.new_volume {
            return World::of_new_volume(self.nodes, self.writes, self.left);
        }
        let mut root = World::new(self.nodes, self.writes, self.left, mistake);
        if self.apart {
            root.exclude_last().expect("an undisturbed start");
        }
        if self.set_back {
            root.roll_back_last().expect("an undisturbed start");
        }
        root
    }

    /// Finds no error in the first states, or in all if there are fewer. `WINDROSE_SEARCH` sets
    /// another limit. The number of states is part of the test: a guard that prevented most of them
    /// would be noticed.
    fn holds(&self, states: RangeInclusive<usize>) {
        let more = std::env::var("WINDROSE_SEARCH").ok().and_then(|m| m.parse().ok());
        let found = search(self.root(Mistake::None), more.unwrap_or(*states.end()), 64);
        println!("{} states", found.states);
        assert_eq!(found.error, None, "in {} states", found.states);
        assert!(found.states >= *states.start(), "only {} states", found.states);
    }

    fn finds(&self, mistake: Mistake) {
        let found = search(self.root(mistake), 300_000, u64::MAX);
        println!("{mistake:?}: {} states, {:?}", found.states, found.error);
        assert!(found.error.is_some(), "{mistake:?} is not found in {} states", found.states);
    }
}

mod sound {
    use super::*;

    #[test]
    fn two_nodes_one_killed() {
        Scope::new(2, &[1], |b| b.kills = 1).holds(20_000..=20_000);
    }

    #[test]
    fn two_nodes_power_lost_twice() {
        Scope::new(2, &[0], |b| (b.power_cuts, b.flushes) = (2, 1)).holds(20_000..=20_000);
    }

    #[test]
    fn two_nodes_session_lost() {
        Scope::new(2, &[1], |b| b.breaks = 1).holds(20_000..=20_000);
    }

    #[test]
    fn lost_and_late_puts() {
        Scope::new(2, &[1], |b| (b.lost_puts, b.kills) = (1, 1)).holds(20_000..=20_000);
    }

    #[test]
    fn planned() {
        Scope::new(2, &[1], |b| (b.switches, b.leaves) = (1, 1)).holds(20_000..=20_000);
    }

    #[test]
    fn joins() {
        Scope::new(2, &[0], |b| (b.breaks, b.joins) = (1, 1)).apart().holds(20_000..=20_000);
    }

    #[test]
    fn three_nodes_briefly() {
        Scope::new(3, &[1, 2], |b| (b.breaks, b.kills, b.ticks) = (1, 1, false))
            .holds(20_000..=20_000);
    }

    #[test]
    fn leaves_and_power_lost() {
        Scope::new(2, &[1], |b| {
            (b.leaves, b.power_cuts, b.sessions_outlive_power_cuts) = (1, 1, true);
        })
        .holds(20_000..=20_000);
    }

    #[test]
    fn legs_that_reject_writes() {
        Scope::new(2, &[1], |b| {
            (b.rejected_writes, b.power_cuts, b.sessions_outlive_power_cuts) = (1, 1, true);
        })
        .holds(20_000..=20_000);
    }

    #[test]
    fn joins_and_a_leg_rejects_a_write() {
        Scope::new(2, &[0], |b| (b.rejected_writes, b.joins) = (1, 1))
            .apart()
            .holds(10_000..=10_000);
    }

    #[test]
    fn leaves_and_the_store_is_away() {
        Scope::new(2, &[0], |b| {
            (b.leaves, b.power_cuts, b.sessions_outlive_power_cuts, b.failed_reads) =
                (2, 1, true, 1);
        })
        .holds(10_000..=10_000);
    }

    #[test]
    fn legs_that_are_lost() {
        Scope::new(2, &[1], |b| {
            (b.lost_legs, b.power_cuts, b.sessions_outlive_power_cuts) = (1, 1, true);
        })
        .holds(10_000..=10_000);
    }

    #[test]
    fn three_and_a_leg_that_rejects_a_write() {
        Scope::new(3, &[1], |b| (b.rejected_writes, b.breaks) = (1, 1)).holds(10_000..=10_000);
    }

    #[test]
    fn one_that_hangs_loses_its_lease() {
        Scope::new(2, &[1], |b| (b.stuck, b.revocations, b.breaks) = (1, 2, 1))
            .holds(20_000..=20_000);
    }

    #[test]
    fn one_that_hangs_loses_its_lease_and_the_store_is_away() {
        Scope::new(2, &[0], |b| (b.stuck, b.revocations, b.failed_reads) = (2, 2, 1))
            .holds(20_000..=20_000);
    }

    #[test]
    fn three_and_one_that_hangs_loses_its_lease() {
        Scope::new(3, &[1], |b| (b.stuck, b.revocations, b.kills) = (1, 1, 1))
            .holds(20_000..=20_000);
    }

    /// All scopes.
    #[test]
    fn three_and_a_session_lost() {
        Scope::new(3, &[1], |b| (b.breaks, b.ticks) = (1, false)).holds(700..=2_000);
    }

    #[test]
    fn a_rolled_back_image_joins() {
        Scope::new(2, &[0], |b| b.joins = 2).rolled_back().holds(1_000..=20_000);
    }

    #[test]
    fn a_rolled_back_image_and_all_were_down() {
        Scope::new(2, &[0], |b| (b.joins, b.kills) = (2, 1)).rolled_back().holds(1_000..=20_000);
    }

    #[test]
    fn three_and_a_rolled_back_image() {
        Scope::new(3, &[0], |b| (b.joins, b.kills) = (1, 1)).rolled_back().holds(1_000..=20_000);
    }

    #[test]
    fn three_join_one_after_the_other_and_one_was_rolled_back() {
        Scope::new(3, &[0], |b| (b.joins, b.kills, b.breaks) = (2, 1, 1))
            .rolled_back()
            .holds(20_000..=20_000);
    }

    #[test]
    fn images_are_copied_and_restored_at_any_moment() {
        Scope::new(2, &[0], |b| {
            (b.copies, b.rollbacks, b.kills, b.flushes, b.joins) = (1, 1, 1, 1, 1);
        })
        .holds(20_000..=20_000);
    }

    #[test]
    fn a_new_volume_and_one_killed() {
        Scope::new(2, &[0], |b| (b.kills, b.lost_puts) = (2, 1))
            .new_volume()
            .holds(20_000..=20_000);
    }

    #[test]
    fn a_new_volume_and_power_and_sessions_lost() {
        Scope::new(2, &[1], |b| (b.power_cuts, b.breaks, b.failed_reads) = (1, 1, 1))
            .new_volume()
            .holds(20_000..=20_000);
    }

    #[test]
    fn three_nodes_with_a_new_volume_briefly() {
        Scope::new(3, &[1], |b| (b.breaks, b.kills, b.ticks) = (1, 1, false))
            .new_volume()
            .holds(20_000..=20_000);
    }

    #[test]
    fn three_nodes_with_time() {
        Scope::new(3, &[], |b| b.kills = 1).holds(20_000..=20_000);
    }
}

mod mistakes {
    use super::*;

    #[test]
    fn ignores_the_lease() {
        Scope::new(2, &[], |b| b.breaks = 1).finds(Mistake::IgnoresLeases);
    }

    #[test]
    fn grants_leases_after_its_put() {
        Scope::new(2, &[], |_| {}).finds(Mistake::GrantsAfterPut);
    }

    #[test]
    fn serves_after_its_lease_was_revoked() {
        Scope::new(2, &[], |b| (b.stuck, b.revocations) = (1, 1))
            .finds(Mistake::ServesAfterRevocation);
    }

    #[test]
    fn serves_after_a_restart() {
        Scope::new(2, &[0], |b| b.power_cuts = 1).finds(Mistake::RestartedServes);
    }

    #[test]
    fn activates_a_view_without_reconciliation() {
        Scope::new(2, &[0], |b| b.breaks = 1).finds(Mistake::SkipsReconciliation);
    }

    #[test]
    fn hands_over_to_any_connected_member() {
        Scope::new(2, &[0], |b| {
            (b.leaves, b.power_cuts, b.sessions_outlive_power_cuts) = (1, 1, true);
        })
        .finds(Mistake::LeavesToLinkedPeers);
    }

    #[test]
    fn forgets_in_the_next_epoch_that_its_leg_has_failed() {
        Scope::new(2, &[0], |b| (b.rejected_writes, b.switches) = (1, 1))
            .finds(Mistake::ForgetsLegFailure);
    }

    #[test]
    fn treats_a_rejected_write_as_a_leave() {
        Scope::new(2, &[0], |b| (b.rejected_writes, b.breaks) = (1, 1))
            .finds(Mistake::TreatsLegFailureAsLeave);
    }

    #[test]
    fn begins_a_view_without_drain() {
        Scope::new(2, &[0, 1], |b| b.breaks = 1).finds(Mistake::BeginsViewWithoutDrain);
    }

    #[test]
    fn trusts_a_rolled_back_joiner() {
        Scope::new(2, &[0], |b| b.joins = 1).rolled_back().finds(Mistake::SkipsGenerationCheck);
    }

    #[test]
    fn takes_over_with_a_rolled_back_copy() {
        Scope::new(2, &[0], |b| b.kills = 1).rolled_back().finds(Mistake::TakesOverWhenRolledBack);
    }

    #[test]
    fn excludes_before_the_grace_is_over() {
        Scope::new(2, &[], |_| {}).finds(Mistake::NoGrace);
    }

    #[test]
    fn takes_over_without_acknowledged_writes() {
        Scope::new(2, &[0], |b| b.power_cuts = 1).finds(Mistake::RestartedTakesOver);
    }

    #[test]
    fn begins_a_round_after_asking_for_an_admission() {
        // At once: without ticks the leases stay valid.
        Scope::new(3, &[0], |b| (b.breaks, b.joins, b.ticks) = (1, 1, false))
            .apart()
            .finds(Mistake::BeginsRoundAfterAdmission);
    }
}
