//! Silent corruption is reported as an error, and crashes cause no such errors.

use std::cell::RefCell;
use std::time::Duration;

use block::testing::faulty::{Effect, Faulty, OpKind, Rule};
use block::testing::register::{Checker, CrashKind, InitialContents};
use block::testing::workload::Workload;
use block::testing::{Rng, TestClient, seeds};
use block::{Blocks, BufferPool, Mem, MemOptions, MemoryClass};
use uuid::Uuid;

use super::*;

const UNITS: u32 = 12;
const PLACE: ChecksumLayout = ChecksumLayout { first_row: 10, unit_rows: 10, units: UNITS };
const LIST_AT: u64 = 2;
const WHOSE: ChecksumOwner =
    ChecksumOwner { pool: Uuid::from_u128(1), member: Uuid::from_u128(2 << 64), ring: 0 };

fn memory() -> BufferPool {
    BufferPool::new(16 << 20).unwrap()
}

fn mem(is_volatile: bool) -> Rc<Mem> {
    let blocks = PLACE.first_row + u64::from(UNITS * PLACE.unit_rows) + 3;
    let options = MemOptions { volatile_cache: is_volatile, ..MemOptions::new(4096, blocks) };
    Rc::new(Mem::new(options))
}

async fn over(below: Dev, pool: &BufferPool) -> ChecksumLayer {
    let corrupt_reads = Arc::default();
    ChecksumLayer::new(below, PLACE, (WHOSE, ""), LIST_AT, &pool.account(), corrupt_reads)
        .await
        .unwrap()
}

fn ctx(pool: &BufferPool) -> Ctx {
    Ctx::new(pool.account().try_credit(64 << 10, MemoryClass::LocalIo).unwrap(), Epoch::default())
}

fn filled(byte: u8, rows: usize) -> Bufs {
    (0..rows)
        .map(|_| {
            let mut page = BufMut::heap_page();
            page.fill(byte);
            page.freeze()
        })
        .collect()
}

async fn write(dev: &Dev, at: u64, data: Bufs, pool: &BufferPool) {
    dev.submit(Op::Write { at: Lba(at), data, fua: false }, &ctx(pool)).await.unwrap();
}

async fn read(dev: &Dev, at: u64, blocks: u32, pool: &BufferPool) -> Result<Vec<u8>, Error> {
    let read = dev.submit(Op::Read { at: Lba(at), blocks }, &ctx(pool)).await;
    read.map(|data| data.to_vec())
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

#[test]
fn a_row_that_was_not_written_is_an_error() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let checked = Rc::new(over(raw.clone(), &pool).await);
        let dev = Dev::shared(Rc::clone(&checked));
        let unit = |n: u64| PLACE.first_row + n * 10;
        assert_eq!(
            read(&dev, unit(0), 8, &pool).await,
            Ok(vec![0; 8 * 4096]),
            "zeroes from the start"
        );
        write(&dev, unit(0), filled(1, 8), &pool).await;
        write(&dev, unit(1) + 2, filled(2, 3), &pool).await;
        assert_eq!(read(&dev, unit(0), 8, &pool).await, Ok(vec![1; 8 * 4096]));
        // Bit rot, a misdirected write, and a lost write.
        write(&raw, unit(0) + 3, filled(9, 1), &pool).await;
        assert_eq!(
            read(&dev, unit(0), 8, &pool).await,
            Err(Error::Corrupt { at: Lba(unit(0) + 3) })
        );
        write(&raw, unit(1) + 1, filled(2, 1), &pool).await;
        assert_eq!(
            read(&dev, unit(1) + 1, 1, &pool).await,
            Err(Error::Corrupt { at: Lba(unit(1) + 1) })
        );
        assert_eq!(read(&dev, unit(1) + 2, 3, &pool).await, Ok(vec![2; 3 * 4096]));
        assert_eq!(checked.corrupt_reads.load(Ordering::Relaxed), 2);
        // A rewritten row is right, now and after a restart.
        write(&dev, unit(0) + 3, filled(4, 1), &pool).await;
        assert_eq!(read(&dev, unit(0) + 3, 1, &pool).await, Ok(vec![4; 4096]));
        checked.release_idle().await.unwrap();
        let dev = Dev::new(over(raw.clone(), &pool).await);
        assert_eq!(read(&dev, unit(0) + 3, 1, &pool).await, Ok(vec![4; 4096]));
        assert_eq!(
            read(&dev, unit(1) + 1, 1, &pool).await,
            Err(Error::Corrupt { at: Lba(unit(1) + 1) })
        );
        // Rows outside of the units are not checked, and rows with checksums are not accessible.
        write(&dev, 0, filled(7, 2), &pool).await;
        write(&raw, 1, filled(8, 1), &pool).await;
        assert_eq!(read(&dev, 1, 1, &pool).await, Ok(vec![8; 4096]));
        assert_eq!(read(&dev, unit(0) + 8, 1, &pool).await, Err(Error::OutOfRange));
    });
}

#[test]
fn zeroes_are_written_as_zeroes() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let dev = Dev::new(over(Dev::shared(Rc::clone(&mem)), &pool).await);
        let at = PLACE.first_row + 10;
        write(&dev, at, filled(1, 8), &pool).await;
        dev.submit(Op::Zero { at: Lba(at + 1), blocks: 2, unmap: false, fua: true }, &ctx(&pool))
            .await
            .unwrap();
        dev.submit(Op::Unmap { at: Lba(at + 5), blocks: 1 }, &ctx(&pool)).await.unwrap();
        let found = read(&dev, at, 8, &pool).await.unwrap();
        let expected: Vec<u8> =
            [1, 0, 0, 1, 1, 0, 1, 1].into_iter().flat_map(|b| vec![b; 4096]).collect();
        assert!(found == expected);
    });
}

/// It is unknown whether it is right, above all if a disk returns zeroes for what it has lost.
#[test]
fn rows_unreadable_during_recomputation_stay_unreadable() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        write(&Dev::new(over(raw.clone(), &pool).await), PLACE.first_row, filled(1, 8), &pool)
            .await;
        // Power fails; then a row is unreadable, and afterwards it reads as zeroes.
        let lost = Lba(PLACE.first_row + 3);
        let (bad, faults) = Faulty::wrap(raw.clone(), 1);
        let fails = Rule::new(Effect::Fail(Error::Unreadable { at: lost })).on(&[OpKind::Read]);
        faults.add(fails.within(Blocks::new(lost, 1)));
        let checked = Rc::new(over(bad, &pool).await);
        faults.clear();
        let dev = Dev::shared(Rc::clone(&checked));
        for byte in [0, 1] {
            write(&raw, lost.0, filled(byte, 1), &pool).await;
            assert_eq!(
                read(&dev, PLACE.first_row, 8, &pool).await,
                Err(Error::Unreadable { at: lost })
            );
        }
        assert_eq!(checked.corrupt_reads.load(Ordering::Relaxed), 0, "it did not lie");
        write(&dev, lost.0, filled(2, 1), &pool).await;
        assert_eq!(read(&dev, lost.0, 1, &pool).await, Ok(vec![2; 4096]));
    });
}

/// Power fails long after a write: corruption of it is detected.
#[test]
fn rows_of_abandoned_writes_are_unreadable_after_a_crash() {
    run(async {
        let (pool, mem) = (memory(), mem(true));
        let raw = Dev::shared(Rc::clone(&mem));
        let checked = Rc::new(over(raw.clone(), &pool).await);
        let dev = Dev::shared(Rc::clone(&checked));
        let (quiet, busy) = (PLACE.first_row, PLACE.first_row + 10);
        write(&dev, quiet, filled(1, 8), &pool).await;
        for byte in 1..4 {
            write(&dev, busy, filled(byte, 8), &pool).await;
            checked.write_back_cold().await.unwrap();
        }
        assert_eq!(checked.dirty_count.get(), 1, "the one that is being written");
        raw.submit(Op::Flush, &ctx(&pool)).await.unwrap();
        drop(dev);
        for at in [quiet, busy] {
            write(&raw, at, filled(9, 1), &pool).await;
        }
        let dev = Dev::new(over(raw, &pool).await);
        assert_eq!(read(&dev, quiet, 8, &pool).await, Err(Error::Corrupt { at: Lba(quiet) }));
        assert!(read(&dev, busy, 8, &pool).await.is_ok(), "no checksum says that it should be 3");
    });
}

#[test]
fn lost_checksums_make_rows_unreadable() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let checked = Rc::new(over(raw.clone(), &pool).await);
        let dev = Dev::shared(Rc::clone(&checked));
        let (one, both) = (PLACE.first_row, PLACE.first_row + 10);
        for at in [one, both] {
            write(&dev, at, filled(1, 8), &pool).await;
        }
        checked.release_idle().await.unwrap();
        drop(dev);
        // One copy reads as zeroes; of the other area, both copies are something else.
        write(&raw, one + 8, filled(0, 1), &pool).await;
        write(&raw, both + 8, filled(3, 2), &pool).await;
        let dev = Dev::new(over(raw.clone(), &pool).await);
        assert_eq!(read(&dev, one, 8, &pool).await, Ok(vec![1; 8 * 4096]));
        let at = Lba(both);
        assert_eq!(read(&dev, both, 8, &pool).await, Err(Error::Unreadable { at }));
        // A rewritten row is known again.
        write(&dev, both, filled(2, 1), &pool).await;
        assert_eq!(read(&dev, both, 1, &pool).await, Ok(vec![2; 4096]));
        let at = Lba(both + 1);
        assert_eq!(read(&dev, both, 8, &pool).await, Err(Error::Unreadable { at }));
    });
}

/// A read that is misdirected once, or fails for one of two blocks, does no harm.
#[test]
fn checksums_are_read_again_after_a_mismatch() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let checked = Rc::new(over(raw.clone(), &pool).await);
        write(&Dev::shared(Rc::clone(&checked)), PLACE.first_row, filled(1, 8), &pool).await;
        checked.release_idle().await.unwrap();
        let checksum_block = |n: u64| Blocks::new(Lba(PLACE.first_row + 8 + n), 1);
        let lost = Error::Unreadable { at: checksum_block(1).at };
        for rule in [
            Rule::new(Effect::Misdirect(3)).within(checksum_block(0)).times(1),
            Rule::new(Effect::Fail(lost)).within(checksum_block(0)),
            Rule::new(Effect::Fail(lost)).within(checksum_block(1)),
        ] {
            let (bad, faults) = Faulty::wrap(raw.clone(), 1);
            let dev = Dev::new(over(bad, &pool).await);
            faults.add(rule.on(&[OpKind::Read]));
            assert!(read(&dev, PLACE.first_row, 8, &pool).await == Ok(vec![1; 8 * 4096]));
            assert!(faults.hits() > 0);
        }
    });
}

/// Checksums survive a transient read failure: reads fail and may be retried, writes wait.
#[test]
fn temporarily_unreadable_checksums_are_not_lost() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let checked = Rc::new(over(raw.clone(), &pool).await);
        write(&Dev::shared(Rc::clone(&checked)), PLACE.first_row, filled(1, 8), &pool).await;
        checked.release_idle().await.unwrap();
        let checksum_blocks = Blocks::new(Lba(PLACE.first_row + 8), 2);
        let fails = || {
            Rule::new(Effect::Fail(Error::Unreadable { at: checksum_blocks.at }))
                .within(checksum_blocks)
        };
        let (bad, faults) = Faulty::wrap(raw.clone(), 1);
        let dev = Dev::new(over(bad, &pool).await);
        faults.add(fails().on(&[OpKind::Read]));
        let at = Lba(PLACE.first_row);
        assert_eq!(read(&dev, at.0, 8, &pool).await, Err(Error::Unreadable { at }));
        faults.clear();
        faults.add(fails().on(&[OpKind::Read]).times(6));
        write(&dev, PLACE.first_row, filled(2, 1), &pool).await;
        assert_eq!(read(&dev, PLACE.first_row + 1, 7, &pool).await, Ok(vec![1; 7 * 4096]));
        drop(dev);
        // The failure persists.
        let (bad, faults) = Faulty::wrap(raw.clone(), 1);
        let dev = Dev::new(over(bad, &pool).await);
        faults.add(fails().on(&[OpKind::Read]));
        write(&dev, PLACE.first_row, filled(3, 1), &pool).await;
        assert_eq!(read(&dev, PLACE.first_row, 1, &pool).await, Ok(vec![3; 4096]));
        let at = Lba(PLACE.first_row + 1);
        assert_eq!(read(&dev, at.0, 7, &pool).await, Err(Error::Unreadable { at }));
    });
}

/// Writers that wait for space on a list fail when it cannot be written any more.
#[test]
fn an_unwritable_dirty_list_blocks_no_write_forever() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let (below, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let checked = Rc::new(over(below, &pool).await.with_max_dirty(2));
        let dev = Dev::shared(Rc::clone(&checked));
        let lists = Blocks::new(Lba(LIST_AT), format::DIRTY_LIST_BLOCKS);
        let failure = Error::Unwritable { at: Lba(LIST_AT) };
        faults.add(Rule::new(Effect::Fail(failure)).on(&[OpKind::Write]).within(lists));
        let writes = (0..6).map(|n| {
            let (dev, context) = (dev.clone(), ctx(&pool));
            async move {
                let op =
                    Op::Write { at: Lba(PLACE.first_row + n * 10), data: filled(1, 1), fua: false };
                dev.submit(op, &context).await
            }
        });
        let ended = tokio::time::timeout(Duration::from_secs(60), join_all(writes)).await;
        assert!(ended.unwrap().iter().all(Result::is_err));
        let released =
            tokio::time::timeout(Duration::from_secs(60), checked.release_unit(PLACE.first_row));
        assert!(released.await.unwrap().is_err());
    });
}

/// One block of the list cannot be read; its other copy names the dirty areas.
#[test]
fn one_block_of_the_dirty_list_may_be_lost() {
    run(async {
        for lost in 0..format::DIRTY_LIST_BLOCKS {
            let (pool, mem) = (memory(), mem(false));
            let raw = Dev::shared(Rc::clone(&mem));
            write(&Dev::new(over(raw.clone(), &pool).await), PLACE.first_row, filled(1, 8), &pool)
                .await;
            let at = Lba(LIST_AT + lost);
            let (bad, faults) = Faulty::wrap(raw.clone(), 1);
            let fails = Rule::new(Effect::Fail(Error::Unreadable { at }));
            faults.add(fails.on(&[OpKind::Read]).within(Blocks::new(at, 1)));
            let dev = Dev::new(over(bad, &pool).await);
            assert!(read(&dev, PLACE.first_row, 8, &pool).await == Ok(vec![1; 8 * 4096]));
        }
    });
}

/// After a crash, checksums of areas on the list are recomputed, whatever they are.
#[test]
fn listed_areas_are_recomputed() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let dev = Dev::new(over(raw.clone(), &pool).await);
        write(&dev, PLACE.first_row, filled(1, 8), &pool).await;
        drop(dev);
        write(&raw, PLACE.first_row + 8, filled(3, 2), &pool).await;
        let dev = Dev::new(over(raw.clone(), &pool).await);
        assert_eq!(read(&dev, PLACE.first_row, 8, &pool).await, Ok(vec![1; 8 * 4096]));
        write(&raw, PLACE.first_row, filled(3, 1), &pool).await;
        let at = Lba(PLACE.first_row);
        assert_eq!(read(&dev, PLACE.first_row, 8, &pool).await, Err(Error::Corrupt { at }));
    });
}

#[test]
fn a_unit_moves_between_cores() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let raw = Dev::shared(Rc::clone(&mem));
        let other = ChecksumOwner { ring: 1, ..WHOSE };
        let one = Rc::new(over(raw.clone(), &pool).await);
        let two = ChecksumLayer::new(
            raw.clone(),
            PLACE,
            (other, ""),
            LIST_AT + format::DIRTY_LIST_BLOCKS,
            &pool.account(),
            Arc::default(),
        )
        .await;
        let two = Rc::new(two.unwrap());
        let devs = [Dev::shared(Rc::clone(&one)), Dev::shared(Rc::clone(&two))];
        write(&devs[0], PLACE.first_row, filled(1, 8), &pool).await;
        for round in 0u8..4 {
            let (from, to) = if round % 2 == 0 { (&one, 1) } else { (&two, 0) };
            // Checksums that were read too early are not used later.
            let _ = read(&devs[to], PLACE.first_row, 8, &pool).await;
            from.release_unit(PLACE.first_row).await.unwrap();
            [&one, &two][to].forget_unit(PLACE.first_row);
            assert_eq!(
                read(&devs[to], PLACE.first_row, 8, &pool).await.map(|b| b[0]),
                Ok(round + 1)
            );
            write(&devs[to], PLACE.first_row, filled(round + 2, 8), &pool).await;
        }
    });
}

#[test]
fn a_read_during_a_write_is_not_counted_as_corruption() {
    run(async {
        let (pool, mem) = (memory(), mem(false));
        let slow = Rule::new(Effect::Delay(Duration::from_millis(9), Duration::from_millis(10)));
        let (below, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        let checked = Rc::new(over(below, &pool).await);
        let dev = Dev::shared(Rc::clone(&checked));
        write(&dev, PLACE.first_row, filled(1, 8), &pool).await;
        let soon = Rule::new(Effect::Delay(Duration::from_millis(1), Duration::from_millis(2)));
        faults.add(slow.on(&[OpKind::Write]));
        faults.add(soon.on(&[OpKind::Read]));
        let context = ctx(&pool);
        let mut read =
            dev.start(Op::Read { at: Lba(PLACE.first_row), blocks: 8 }, &context).unwrap();
        read.detach();
        join(read, write(&dev, PLACE.first_row, filled(2, 8), &pool)).await.0.unwrap_err();
        assert_eq!(checked.corrupt_reads.load(Ordering::Relaxed), 0);
        assert_eq!(self::read(&dev, PLACE.first_row, 8, &pool).await, Ok(vec![2; 8 * 4096]));
    });
}

/// The checked rows, without the checksum rows between them.
struct Dense(Dev);

impl Layer for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn info(&self) -> Info {
        Info { blocks: u64::from(UNITS * PLACE.checked_rows()), ..self.0.info() }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let Some(range) = op.range(4096) else { return self.0.submit(op, &ctx).await };
        let lba = |n: u64| Lba(PLACE.first_row + n / 8 * 10 + n % 8);
        let mut all = Bufs::new();
        for (n, block) in (range.at.0..).take(range.count as usize).enumerate() {
            let at = lba(block);
            let op = match &op {
                Op::Read { .. } => Op::Read { at, blocks: 1 },
                Op::Write { data, fua, .. } => {
                    Op::Write { at, data: data.slice(n * 4096..(n + 1) * 4096), fua: *fua }
                }
                Op::Zero { unmap, fua, .. } => Op::Zero { at, blocks: 1, unmap: *unmap, fua: *fua },
                Op::Unmap { .. } => Op::Unmap { at, blocks: 1 },
                Op::BlockStatus { .. } | Op::Flush => return self.0.submit(op, &ctx).await,
            };
            all.append(self.0.submit(op, &ctx).await?);
        }
        Ok(all)
    }
}

/// Repeated power failures during writes.
async fn ordeal(seed: u64, mistake: Mistake) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let (is_volatile, pool) = (rng.one_in(2), memory());
    let mem = mem(is_volatile);
    let checker = Checker::new(1, 4096, InitialContents::Zeroes);
    let checker = RefCell::new(if is_volatile { checker } else { checker.write_through() });
    for n in 0..6 {
        let (below, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), rng.u64());
        faults.add(Rule::new(Effect::Delay(
            Duration::ZERO,
            Duration::from_micros(rng.within(1, 900)),
        )));
        let checked = over(below, &pool)
            .await
            .with_max_dirty(rng.within(2, 6) as usize)
            .with_mistake(mistake);
        let dev = Dev::new(Dense(Dev::new(checked)));
        let span = Blocks::new(Lba(rng.below(9)), 70);
        let client = TestClient::new(&dev, &pool);
        let workload = Workload::new(client, span, rng.within(1, 9) as usize, rng.u64());
        let checked = async {
            workload.audit(&checker).await?;
            workload.run_until_crash(&checker, rng.within(1, 80) as usize).await
        };
        checked.await.map_err(|v| format!("seed {seed}, round {n}: {v}"))?;
        let errors = workload.take_errors();
        if !errors.is_empty() {
            return Err(format!("seed {seed}, round {n}: {errors:?}"));
        }
        drop((workload, dev));
        mem.cut_power(|fates| rng.below(fates as u64) as usize);
        checker.borrow_mut().crash(CrashKind::PowerLoss);
    }
    Ok(())
}

fn ordeals(seeds: Range<u64>, mistake: Mistake) -> Result<(), String> {
    let permit = block::drop_permit::permit_drops();
    let outcome = seeds.into_iter().try_for_each(|seed| {
        let mut outcome = Ok(());
        run(async { outcome = ordeal(seed, mistake).await });
        outcome
    });
    drop(permit);
    outcome
}

#[test]
fn remains_of_a_crash_are_not_counted_as_corruption() {
    ordeals(seeds("CHECKSUM_SEEDS", 300), Mistake::None).unwrap();
}

#[test]
fn mistakes_are_found() {
    for mistake in [Mistake::SkipsDirtyList, Mistake::CleansBeforeFlush, Mistake::CleansDuringWrite]
    {
        assert!(ordeals(0..300, mistake).is_err(), "{mistake:?}");
    }
}
