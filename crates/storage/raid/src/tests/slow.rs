//! Members that answer late, or not at all.

use block::testing::faulty::Faults;
use geometry::{Level, ROW_BYTES};

use super::*;

/// A volume on members that can be stopped.
struct Scene {
    disks: Disks,
    faults: Vec<Faults>,
    array: Rc<Array>,
    client: Client,
}

/// What block `n` holds.
fn block(n: u64, size: usize) -> Vec<u8> {
    vec![n as u8 | 1; size]
}

impl Scene {
    async fn new(make: fn(bool) -> Disks, pool: &Pool) -> Self {
        let disks = make(true);
        let faults: Vec<Faults> = (0..disks.count() as u64).map(Faults::new).collect();
        let wrap = |n: u16, dev: Dev| {
            let faults = faults[usize::from(n)].clone();
            Dev::new(Faulty::new(dev, faults))
        };
        let array = disks.array(0, wrap, Mistake::None).await;
        let raid = disks.serve_by(Rc::clone(&array)).await;
        let client = Client::new(&Dev::shared(raid), pool);
        let scene = Self { disks, faults, array, client };
        for n in 0..scene.blocks() {
            scene.client.write(n, &block(n, scene.size()), false).await.unwrap();
        }
        scene
    }

    fn size(&self) -> usize {
        self.disks.block_size as usize
    }

    /// Blocks that are read and written: two stripes at least.
    fn blocks(&self) -> u64 {
        3 * self.disks.shape.stripe_rows() * u64::from(ROW_BYTES / self.disks.block_size)
    }

    fn stop(&self, member: usize) {
        self.faults[member].add(Rule::new(Effect::Stall));
    }

    fn go_on(&self, member: usize) {
        self.faults[member].clear();
        self.faults[member].release();
    }

    /// Reads all, one block after the other, and tells the longest time that one took.
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

    fn out(&self) -> Vec<u16> {
        self.disks.book.out.borrow().clone()
    }

    fn turned(&self) -> Vec<(u16, bool)> {
        self.disks.book.turned.borrow().clone()
    }
}

const RAID_0: fn(bool) -> Disks = |volatile| small(Level::Copies(1), 3, 2, 4096)(volatile);

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn reads_go_around_one_that_has_stopped() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        play(async |pool| {
            let scene = Scene::new(make, &pool).await;
            scene.stop(0);
            let first = scene.read_all().await;
            assert!(first <= SECOND / 4, "{first:?}");
            // What has copies asks the idle one meanwhile, so that nobody else is late.
            tokio::time::sleep(2 * SECOND).await;
            assert_eq!(scene.turned(), [(0, true)]);
            let known = scene.read_all().await;
            assert!(known <= Duration::from_millis(5), "{known:?}");
            let around = scene.array.errors().next().unwrap().slow_reads.load(Relaxed);
            assert!(around > 0);
            assert!(scene.out().is_empty());
        });
    }
}

#[test]
fn one_that_answers_in_time_again_is_read_again() {
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        play(async |pool| {
            let scene = Scene::new(make, &pool).await;
            scene.stop(0);
            scene.read_all().await;
            tokio::time::sleep(2 * SECOND).await;
            scene.go_on(0);
            for _ in 0..40 {
                scene.read_all().await;
                tokio::time::sleep(SECOND / 4).await;
            }
            assert_eq!(scene.turned(), [(0, true), (0, false)]);
            let errors = scene.array.errors().next().unwrap();
            let around = errors.slow_reads.load(Relaxed);
            scene.read_all().await;
            assert_eq!(errors.slow_reads.load(Relaxed), around);
            assert_eq!((errors.slow_now.load(Relaxed), errors.astray.load(Relaxed)), (0, 0));
            assert!(scene.out().is_empty());
        });
    }
}

#[test]
fn one_that_is_late_now_and_then_does_not_flap() {
    play(async |pool| {
        let scene = Scene::new(RAID_5, &pool).await;
        let late = Effect::Delay(SECOND / 3, SECOND / 2);
        scene.faults[1].add(Rule::new(late).on(&[Kind::Read]).with_probability(0.3));
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < 120 * SECOND {
            let longest = scene.read_all().await;
            assert!(longest <= SECOND / 4, "{longest:?}");
            tokio::time::sleep(SECOND / 20).await;
        }
        assert!(scene.turned().len() <= 6, "{:?}", scene.turned());
    });
}

#[test]
fn a_write_that_one_does_not_answer_ends_without_it() {
    for make in [RAID_5, RAID_5_WIDE, RAID_6, RAID_1, RAID_10] {
        for kind in [Kind::Write, Kind::Flush] {
            play(async |pool| {
                let scene = Scene::new(make, &pool).await;
                scene.faults[1].add(Rule::new(Effect::Stall).on(&[kind]));
                let begun = tokio::time::Instant::now();
                for n in 0..scene.blocks() {
                    scene.client.write(n, &block(n, scene.size()), true).await.unwrap();
                }
                scene.client.flush().await.unwrap();
                let took = begun.elapsed();
                assert!((9 * SECOND..14 * SECOND).contains(&took), "{kind:?}: {took:?}");
                assert_eq!(scene.out(), [1], "{kind:?}");
                scene.read_all().await;
                let errors = scene.array.errors().nth(1).unwrap();
                assert!(errors.astray.load(Relaxed) > 0 && errors.slow_now.load(Relaxed) == 0);
                // It is late by far, and nobody looks at it.
                scene.go_on(1);
                tokio::time::sleep(SECOND).await;
                assert_eq!(errors.astray.load(Relaxed), 0);
                scene.read_all().await;
            });
        }
    }
}

#[test]
fn a_read_that_is_not_answered_puts_its_member_out() {
    play(async |pool| {
        let scene = Scene::new(RAID_5, &pool).await;
        scene.faults[1].add(Rule::new(Effect::Stall).on(&[Kind::Read]));
        scene.read_all().await;
        for _ in 0..60 {
            tokio::time::sleep(SECOND / 4).await;
            scene.read_all().await;
        }
        assert_eq!(scene.out(), [1]);
    });
}

#[test]
fn nobody_is_slow_where_all_have_stopped() {
    for make in [RAID_5, RAID_6, RAID_1, RAID_10] {
        play(async |pool| {
            let scene = Scene::new(make, &pool).await;
            scene.read_all().await;
            (0..scene.faults.len()).for_each(|member| scene.stop(member));
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
            let over = async {
                tokio::time::sleep(60 * SECOND).await;
                (0..scene.faults.len()).for_each(|member| scene.go_on(member));
            };
            tokio::join!(futures_util::future::join_all(each), over);
            scene.read_all().await;
            assert!(scene.out().is_empty() && scene.turned().is_empty(), "{:?}", scene.turned());
        });
    }
}

#[test]
fn one_that_nothing_is_there_instead_of_is_waited_for() {
    for make in [RAID_0, RAID_5] {
        play(async |pool| {
            let scene = Scene::new(make, &pool).await;
            if scene.disks.shape.level() == Level::Parity {
                scene.disks.book.out.borrow_mut().push(0);
                scene.array.is_told_out(0).await.unwrap();
            }
            let out = scene.out();
            scene.stop(1);
            let over = async {
                tokio::time::sleep(60 * SECOND).await;
                assert_eq!(scene.out(), out);
                scene.go_on(1);
            };
            let (longest, ()) = tokio::join!(scene.read_all(), over);
            assert!(longest >= 59 * SECOND, "{longest:?}");
            assert_eq!(scene.out(), out);
        });
    }
}

#[test]
fn of_two_that_have_stopped_none_is_given_up_where_one_may_be_lost() {
    play(async |pool| {
        let scene = Scene::new(RAID_5, &pool).await;
        (1..3).for_each(|member| scene.stop(member));
        let each = (0..scene.blocks()).map(async |n| {
            let found = scene.client.read(n, 1).await.unwrap().to_vec();
            assert_eq!(found, block(n, scene.size()));
        });
        let over = async {
            tokio::time::sleep(30 * SECOND).await;
            assert!(scene.out().is_empty());
            scene.go_on(1);
            // The other one is alone now.
            tokio::time::sleep(30 * SECOND).await;
            assert_eq!(scene.out(), [2]);
        };
        tokio::join!(futures_util::future::join_all(each), over);
    });
}

#[test]
fn one_with_something_under_way_does_not_come_back() {
    play(async |pool| {
        let scene = Scene::new(RAID_5, &pool).await;
        scene.faults[1].add(Rule::new(Effect::Stall).on(&[Kind::Write]));
        for n in 0..scene.blocks() {
            scene.client.write(n, &block(n, scene.size()), false).await.unwrap();
        }
        assert_eq!(scene.out(), [1]);
        let again = || {
            let dev = Dev::shared(Rc::clone(&scene.disks.mems.borrow()[1]));
            let (ring, errors) = (scene.disks.ring(1, 0), std::sync::Arc::default());
            Member { dev, ring, ring_at: Lba(0), is_out: false, errors, integrity: None }
        };
        assert_eq!(scene.array.put(1, again()), Err(StillBusy));
        assert!(scene.array.is_out(1));
        scene.go_on(1);
        tokio::time::sleep(SECOND).await;
        assert_eq!(scene.array.put(1, again()), Ok(()));
    });
}
