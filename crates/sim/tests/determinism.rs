//! One seed, one world: the same events, twice.

use sim::planted;

#[test]
fn a_seed_replays_to_the_same_trace_and_another_does_not() {
    let mut busy = sim::scenarios::all();
    // The innocent mirrors are all the one that is in the list already.
    let others = planted::pairs().into_iter().map(|p| p.right);
    busy.extend(others.filter(|right| !right.name.starts_with("mirror-")));
    for scenario in busy {
        for seed in 0..3 {
            let digest = || scenario.seed(seed, false).digest;
            let (first, second) = (digest(), digest());
            assert_eq!(first, second, "{} seed {seed}", scenario.name);
            assert!(first.events > 50, "{}: {first:?}", scenario.name);
            let other = scenario.seed(seed + 1000, false).digest;
            assert_ne!(first.hash, other.hash, "{}: {seed} as {}", scenario.name, seed + 1000);
        }
    }
}
