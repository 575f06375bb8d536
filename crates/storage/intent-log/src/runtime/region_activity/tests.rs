use proptest::prelude::*;

use super::*;

const R: Region = Region(7);
const R_ONLY: Range<u32> = 7..8;

#[test]
fn a_flush_covers_operations_that_ended_before_it_began() {
    let mut activity = RegionActivity::new(1000);
    let first = activity.begin_flush();
    assert!(activity.is_quiet_since(R, first), "never touched");
    activity.begin_op(R_ONLY);
    let during = activity.begin_flush();
    assert!(!activity.is_quiet_since(R, during), "in flight");
    activity.end_op(R_ONLY);
    assert!(!activity.is_quiet_since(R, during), "its end is a touch, too");
    assert!(!activity.is_quiet_since(R, first));
    let after = activity.begin_flush();
    assert!(activity.is_quiet_since(R, after));
    activity.begin_op(R_ONLY);
    activity.end_op(R_ONLY);
    assert!(!activity.is_quiet_since(R, after), "touched since");
    assert!(activity.is_quiet_since(Region(8), first), "its neighbour was not");
}

#[test]
fn flushes_without_operations_between_share_a_stamp() {
    let mut activity = RegionActivity::new(1);
    activity.begin_op(0..1);
    activity.end_op(0..1);
    let a = activity.begin_flush();
    assert_eq!(activity.begin_flush(), a);
    activity.begin_op(0..1);
    activity.end_op(0..1);
    assert!(activity.begin_flush() > a);
}

#[test]
fn operations_in_one_region_are_counted() {
    let mut activity = RegionActivity::new(1000);
    activity.begin_op(5..9);
    activity.begin_op(R_ONLY);
    assert_eq!(activity.in_flight(), 2);
    activity.end_op(5..9);
    assert_eq!((activity.idle(R), activity.in_flight()), (None, 1));
    assert!(activity.idle(Region(5)).is_some());
    activity.end_op(R_ONLY);
    assert!(activity.idle(R).is_some());
}

#[test]
fn a_region_is_idle_after_two_ticks() {
    let mut activity = RegionActivity::new(1000);
    let long = |activity: &RegionActivity| activity.idle(R).unwrap().1;
    activity.begin_op(R_ONLY);
    activity.end_op(R_ONLY);
    assert!(!long(&activity));
    activity.tick();
    assert!(!long(&activity));
    activity.tick();
    assert!(long(&activity));
    activity.begin_op(R_ONLY);
    activity.end_op(R_ONLY);
    assert!(!long(&activity));
    activity.tick();
    activity.tick();
    assert!(long(&activity));
}

#[test]
fn idle_regions_are_dropped_and_their_age_is_not_overstated() {
    let mut activity = RegionActivity::new(1 << 20);
    let early = activity.begin_flush();
    activity.begin_op(R_ONLY);
    activity.end_op(R_ONLY);
    let late = activity.begin_flush();
    let blocks = |a: &RegionActivity| a.blocks.iter().flatten().count();
    assert_eq!(blocks(&activity), 1);
    activity.tick();
    activity.tick();
    assert_eq!(blocks(&activity), 0);
    assert!(!activity.is_quiet_since(R, early), "a flush from before the touch");
    assert!(activity.is_quiet_since(R, late));
    assert!(activity.idle(R).unwrap().1);
}

#[test]
fn regions_with_operations_in_flight_are_kept() {
    let mut activity = RegionActivity::new(1000);
    activity.begin_op(R_ONLY);
    (0..5).for_each(|_| activity.tick());
    let flush = activity.begin_flush();
    assert!(!activity.is_quiet_since(R, flush));
    activity.end_op(R_ONLY);
    assert!(!activity.is_quiet_since(R, flush));
}

proptest! {
    /// Compared with a plain list of everything that happened.
    #[test]
    fn it_agrees_with_a_reference_model(steps in proptest::collection::vec((0u8..5, 0u32..600), 1..200)) {
        let mut activity = RegionActivity::new(600);
        let mut running: Vec<u32> = Vec::new();
        let mut touches = vec![0usize; 600];
        let mut flushes: Vec<(usize, FlushStamp)> = Vec::new();
        let mut ticks = vec![0, 0];
        for (now, (what, region)) in steps.into_iter().enumerate() {
            let now = now + 1;
            match what {
                0 | 1 => {
                    activity.begin_op(region..region + 1);
                    running.push(region);
                    touches[region as usize] = now;
                }
                2 => if let Some(region) = running.pop() {
                    activity.end_op(region..region + 1);
                    touches[region as usize] = now;
                },
                3 => flushes.push((now, activity.begin_flush())),
                _ => {
                    activity.tick();
                    ticks.push(now);
                }
            }
            let two_ago = ticks[ticks.len() - 2];
            for region in 0..600 {
                let last = touches[region as usize];
                let quiet = !running.contains(&region);
                let (says, region) = (activity.idle(Region(region)), Region(region));
                prop_assert_eq!(says.is_some(), quiet);
                prop_assert_eq!(says.is_some_and(|s| s.1), quiet && last < two_ago);
                for (began, flush) in &flushes {
                    // Forgotten activity may count as later than it was, never as earlier.
                    if activity.is_quiet_since(region, *flush) {
                        prop_assert!(quiet && last < *began);
                    }
                    let forgotten = activity.blocks[region.0 as usize / REGIONS_PER_BLOCK].is_none();
                    if quiet && last < *began && !forgotten {
                        let floor = activity.forgotten_interval >= flush.0;
                        prop_assert!(floor || activity.is_quiet_since(region, *flush));
                    }
                }
            }
        }
    }
}
