//! Members that respond late, or not at all.

use block::testing::faulty::Faults;
use geometry::{ROW_BYTES, Redundancy};

use super::*;

/// A volume on members that can be stalled.
struct SlowDiskTest {
    disks: TestDisks,
    faults: Vec<Faults>,
    array: Rc<Array>,
    client: TestClient,
}

/// The contents of block `n`.
fn block(n: u64, size: usize) -> Vec<u8> {
    vec![n as u8 | 1; size]
}

impl SlowDiskTest {
    async fn new(make: fn(bool) -> TestDisks, pool: &BufferPool) -> Self {
        let disks = make(true);
        let faults: Vec<Faults> = (0..disks.count() as u64).map(Faults::new).collect();
        let wrap = |n: u16, dev: Dev| {
            let faults = faults[usize::from(n)].clone();
            Dev::new(Faulty::new(dev, faults))
        };
        let array = disks.array(0, wrap, Mistake::None).await;
        let raid = disks.serve_by(Rc::clone(&array)).await;
        let client = TestClient::new(&Dev::shared(raid), pool);
        let scene = Self { disks, faults, array, client };
        for n in 0..scene.blocks() {
            scene.client.write(n, &block(n, scene.size()), false).await.unwrap();
        }
        scene
    }

    fn size(&self) -> usize {
        self.disks.block_size as usize
    }

    /// Number of blocks used: at least two stripes.
    fn blocks(&self) -> u64 {
        3 * self.disks.geometry.stripe_rows() * u64::from(ROW_BYTES / self.disks.block_size)
    }

    fn stall(&self, member: usize) {
        self.faults[member].add(Rule::new(Effect::Stall));
    }

    fn resume(&self, member: usize) {
        self.faults[member].clear();
        self.faults[member].release();
    }

    /// Reads all blocks one by one, and returns the longest time for one.
    async fn read_all(&self) -> Duration {
        let mut longest = Duration::ZERO;
        for n in 0..self.blocks() {
            let begun = tokio::time::Instant::now();
            let found = self.client.read(n, 1).await.unwrap().to_vec();
            assert_eq!(found, block(n, self.size()), "block {n}");
            longest = longest.max(begun.elapsed());
        }
        longest
    }

    fn detached_members(&self) -> Vec<u16> {
        self.disks.book.detached.borrow().clone()
    }

    fn slow_changes(&self) -> Vec<(u16, bool)> {
        self.disks.book.slow_changes.borrow().clone()
    }
}

const RAID_0: fn(bool) -> TestDisks = |volatile| small(Redundancy::Copies(1), 3, 2, 4096)(volatile);

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn reads_avoid_a_stalled_member() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        run_simulated(async |pool| {
            let scene = SlowDiskTest::new(make, &pool).await;
            scene.stall(0);
            let first = scene.read_all().await;
            assert!(first <= SECOND / 4, "{first:?}");
            // Idle copies are probed meanwhile, so that no other member is late.
            tokio::time::sleep(2 * SECOND).await;
            assert_eq!(scene.slow_changes(), [(0, true)]);
            let known = scene.read_all().await;
            assert!(known <= Duration::from_millis(5), "{known:?}");
            let hedged = scene.array.members.counters().next().unwrap().hedged_reads.load(Relaxed);
            assert!(hedged > 0);
            assert!(scene.detached_members().is_empty());
        });
    }
}

#[test]
fn a_member_that_recovers_is_read_again() {
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        run_simulated(async |pool| {
            let scene = SlowDiskTest::new(make, &pool).await;
            scene.stall(0);
            scene.read_all().await;
            tokio::time::sleep(2 * SECOND).await;
            scene.resume(0);
            for _ in 0..40 {
                scene.read_all().await;
                tokio::time::sleep(SECOND / 4).await;
            }
            assert_eq!(scene.slow_changes(), [(0, true), (0, false)]);
            let counters = scene.array.members.counters().next().unwrap();
            let hedged = counters.hedged_reads.load(Relaxed);
            scene.read_all().await;
            assert_eq!(counters.hedged_reads.load(Relaxed), hedged);
            assert_eq!(
                (counters.slow_on_cores.load(Relaxed), counters.orphaned_io.load(Relaxed)),
                (0, 0)
            );
            assert!(scene.detached_members().is_empty());
        });
    }
}

#[test]
fn an_occasionally_late_member_does_not_flap() {
    run_simulated(async |pool| {
        let scene = SlowDiskTest::new(RAID_5, &pool).await;
        let late = Effect::Delay(SECOND / 3, SECOND / 2);
        scene.faults[1].add(Rule::new(late).on(&[OpKind::Read]).with_probability(0.3));
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < 120 * SECOND {
            let longest = scene.read_all().await;
            assert!(longest <= SECOND / 4, "{longest:?}");
            tokio::time::sleep(SECOND / 20).await;
        }
        assert!(scene.slow_changes().len() <= 6, "{:?}", scene.slow_changes());
    });
}

#[test]
fn a_write_completes_without_an_unresponsive_member() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        for kind in [OpKind::Write, OpKind::Flush] {
            run_simulated(async |pool| {
                let scene = SlowDiskTest::new(make, &pool).await;
                scene.faults[1].add(Rule::new(Effect::Stall).on(&[kind]));
                let begun = tokio::time::Instant::now();
                for n in 0..scene.blocks() {
                    scene.client.write(n, &block(n, scene.size()), true).await.unwrap();
                }
                scene.client.flush().await.unwrap();
                let elapsed = begun.elapsed();
                assert!((9 * SECOND..14 * SECOND).contains(&elapsed), "{kind:?}: {elapsed:?}");
                assert_eq!(scene.detached_members(), [1], "{kind:?}");
                scene.read_all().await;
                let counters = scene.array.members.counters().nth(1).unwrap();
                assert!(
                    counters.orphaned_io.load(Relaxed) > 0
                        && counters.slow_on_cores.load(Relaxed) == 0
                );
                // The write lands very late, and its result is ignored.
                scene.resume(1);
                tokio::time::sleep(SECOND).await;
                assert_eq!(counters.orphaned_io.load(Relaxed), 0);
                scene.read_all().await;
            });
        }
    }
}

#[test]
fn an_unanswered_read_detaches_its_member() {
    run_simulated(async |pool| {
        let scene = SlowDiskTest::new(RAID_5, &pool).await;
        scene.faults[1].add(Rule::new(Effect::Stall).on(&[OpKind::Read]));
        scene.read_all().await;
        for _ in 0..60 {
            tokio::time::sleep(SECOND / 4).await;
            scene.read_all().await;
        }
        assert_eq!(scene.detached_members(), [1]);
    });
}

#[test]
fn no_member_is_slow_if_all_have_stopped() {
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        run_simulated(async |pool| {
            let scene = SlowDiskTest::new(make, &pool).await;
            scene.read_all().await;
            (0..scene.faults.len()).for_each(|member| scene.stall(member));
            let each = (0..scene.blocks()).map(async |n| {
                if n % 3 == 0 {
                    scene.client.write(n, &block(n, scene.size()), false).await.unwrap();
                } else {
                    assert_eq!(
                        scene.client.read(n, 1).await.unwrap().to_vec(),
                        block(n, scene.size())
                    );
                }
            });
            let resume = async {
                tokio::time::sleep(60 * SECOND).await;
                (0..scene.faults.len()).for_each(|member| scene.resume(member));
            };
            tokio::join!(futures_util::future::join_all(each), resume);
            scene.read_all().await;
            assert!(
                scene.detached_members().is_empty() && scene.slow_changes().is_empty(),
                "{:?}",
                scene.slow_changes()
            );
        });
    }
}

#[test]
fn a_member_without_redundancy_is_waited_for() {
    for make in [RAID_0, RAID_5] {
        run_simulated(async |pool| {
            let scene = SlowDiskTest::new(make, &pool).await;
            if scene.disks.geometry.redundancy() == Redundancy::Parity {
                scene.disks.book.detached.borrow_mut().push(0);
                scene.array.on_member_detached(0).await.unwrap();
            }
            let detached = scene.detached_members();
            scene.stall(1);
            let resume = async {
                tokio::time::sleep(60 * SECOND).await;
                assert_eq!(scene.detached_members(), detached);
                scene.resume(1);
            };
            let (longest, ()) = tokio::join!(scene.read_all(), resume);
            assert!(longest >= 59 * SECOND, "{longest:?}");
            assert_eq!(scene.detached_members(), detached);
        });
    }
}

#[test]
fn two_stalled_members_are_not_detached_where_one_may_fail() {
    run_simulated(async |pool| {
        let scene = SlowDiskTest::new(RAID_5, &pool).await;
        (1..3).for_each(|member| scene.stall(member));
        let each = (0..scene.blocks()).map(async |n| {
            let found = scene.client.read(n, 1).await.unwrap().to_vec();
            assert_eq!(found, block(n, scene.size()));
        });
        let resume = async {
            tokio::time::sleep(30 * SECOND).await;
            assert!(scene.detached_members().is_empty());
            scene.resume(1);
            // Now only one member is unresponsive.
            tokio::time::sleep(30 * SECOND).await;
            assert_eq!(scene.detached_members(), [2]);
        };
        tokio::join!(futures_util::future::join_all(each), resume);
    });
}

#[test]
fn a_member_with_io_in_flight_is_not_readmitted() {
    run_simulated(async |pool| {
        let scene = SlowDiskTest::new(RAID_5, &pool).await;
        scene.faults[1].add(Rule::new(Effect::Stall).on(&[OpKind::Write]));
        for n in 0..scene.blocks() {
            scene.client.write(n, &block(n, scene.size()), false).await.unwrap();
        }
        assert_eq!(scene.detached_members(), [1]);
        let again = || {
            let dev = Dev::shared(Rc::clone(&scene.disks.mems.borrow()[1]));
            let (ring, counters) = (scene.disks.ring(1, 0), std::sync::Arc::default());
            ArrayMember {
                dev,
                ring,
                ring_lba: Lba(0),
                is_detached: false,
                counters,
                checksums: None,
            }
        };
        assert_eq!(scene.array.set_member(1, again()), Err(MemberBusy));
        assert!(scene.array.is_detached(1));
        scene.resume(1);
        tokio::time::sleep(SECOND).await;
        assert_eq!(scene.array.set_member(1, again()), Ok(()));
    });
}
