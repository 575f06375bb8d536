//! Disk errors of a pool are still known after it was reopened: their counts, and the blocks that
//! could not be repaired.

use std::time::Duration;

use block::Error;
use geometry::Redundancy;
use pool::{DamagedRange, Pool, PoolDiskReport};
use rt::sim::{BadDuration, BadRange, DiskFaults, FailingOps};

use crate::common::{VOLUME, core_of};
use crate::pool::{Bench, FEW, opening, run_scenario};

/// Closes and reopens the pool.
async fn again(bench: Bench) -> Bench {
    let host = bench.host.clone();
    bench.close().await;
    let core = core_of(&host).await;
    let pool = Pool::open(&core, &opening(FEW)).await.unwrap();
    Bench::served(host, &core, pool).await
}

/// The counts of a disk: failed reads and writes, corrupt reads, blocks repaired and given up.
fn counts(disk: &PoolDiskReport) -> [u64; 5] {
    let (repaired, unrepairable) = (disk.repaired_blocks, disk.unrepairable_blocks);
    [disk.read_errors, disk.write_errors, disk.checksum_errors, repaired, unrepairable]
}

fn all(bench: &Bench) -> Vec<[u64; 5]> {
    bench.report().disks.iter().map(counts).collect()
}

fn errors_of(bench: &Bench, n: usize) -> PoolDiskReport {
    bench.report().disks[n].clone()
}

async fn minute() {
    tokio::time::sleep(Duration::from_secs(60)).await;
}

/// Writes `value` while a disk loses the write but acknowledges it.
async fn write_unheard(bench: &Bench, disk: usize, blocks: std::ops::Range<u64>, value: u8) {
    bench.disk(disk).set_faults(DiskFaults { lost_write: 1.0, ..DiskFaults::default() });
    bench.write(blocks, value).await;
    bench.disk(disk).set_faults(DiskFaults::default());
}

/// Makes blocks of a disk unreadable until they are rewritten.
fn spoil(bench: &Bench, disk: usize) {
    for n in 0..4 {
        let at = (28 << 20) + n * (64 << 10) + 4096;
        let bad = BadRange {
            bytes: at..at + 4096,
            ops: FailingOps::Reads,
            duration: BadDuration::Rewritten,
        };
        bench.disk(disk).add_bad_range(bad);
    }
}

async fn rewrite(bench: &Bench, ranges: &[DamagedRange], value: u8) {
    for range in ranges {
        assert_eq!(range.volume, VOLUME);
        for at in (range.offset_bytes / 4096)..(range.offset_bytes + range.len_bytes) / 4096 {
            bench.client.write(at, &[value; 4096], false).await.unwrap();
        }
    }
}

#[test]
fn disk_error_counts_survive_reopening_until_cleared() {
    run_scenario(|host| async move {
        let bench = Bench::checked(host, FEW).await;
        minute().await;
        let since = errors_of(&bench, 1).errors_since_s;
        assert!(since.is_some());
        bench.disk(1).set_faults(DiskFaults { bit_rot: 0.5, ..DiskFaults::default() });
        bench.holds(0..512, 1).await;
        bench.disk(1).set_faults(DiskFaults::default());
        let before = all(&bench);
        let [reads, _, checksums, repaired, _] = before[1];
        assert!(reads > 0 && checksums > 0 && repaired > 0, "{before:?}");
        let bench = again(bench).await;
        assert_eq!(all(&bench), before);
        assert_eq!(errors_of(&bench, 1).errors_since_s, since);
        // Counting continues from there, whether the disk was missing or not.
        bench.disk(1).unplug();
        bench.write(0..64, 1).await;
        bench.look().await;
        bench.disk(1).plug();
        bench.look().await;
        bench.whole().await;
        assert!(errors_of(&bench, 1).checksum_errors >= checksums);
        minute().await;
        bench.pool.clear_errors(Some("1")).await.unwrap();
        let cleared = errors_of(&bench, 1);
        assert_eq!(counts(&cleared), [0; 5]);
        assert!(cleared.errors_since_s > since);
        let bench = again(bench).await;
        assert_eq!(counts(&errors_of(&bench, 1)), [0; 5]);
        assert!(bench.pool.clear_errors(Some("nobody")).await.is_err());
        bench.close().await;
    });
}

#[test]
fn inconsistent_blocks_are_reported_until_rewritten() {
    for how in [(Redundancy::Parity, false), (Redundancy::Copies(2), false)] {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, how, FEW).await;
            write_unheard(&bench, 1, 0..256, 2).await;
            assert!(bench.scrub().await.unrecoverable_rows > 0);
            let unrepaired = bench.report().unrepaired_ranges;
            assert!(!unrepaired.is_empty() && bench.report().lost_ranges.is_empty());
            let bench = again(bench).await;
            assert_eq!(bench.report().unrepaired_ranges, unrepaired);
            let last = bench.report().scrub.unwrap();
            assert!(last.unrecoverable_rows > 0 && last.ended_s.is_some(), "{last:?}");
            // It reads as before; rewriting it block by block clears the record.
            bench.client.read(unrepaired[0].offset_bytes / 4096, 1).await.unwrap();
            rewrite(&bench, &unrepaired, 3).await;
            assert_eq!(bench.report().unrepaired_ranges, []);
            let scrub = bench.scrub().await;
            assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
            bench.disk(2).unplug();
            for range in &unrepaired {
                for at in (range.offset_bytes / 4096)..(range.offset_bytes + range.len_bytes) / 4096
                {
                    let data = bench.client.read(at, 1).await.unwrap().to_vec();
                    assert!(data == [3; 4096], "block {at}");
                }
            }
            bench.close().await;
        });
    }
}

#[test]
fn blocks_unreadable_in_a_scrub_are_reported_lost_until_rewritten() {
    for how in
        [(Redundancy::Parity, false), (Redundancy::Parity, true), (Redundancy::Copies(2), false)]
    {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, how, FEW).await;
            spoil(&bench, 0);
            spoil(&bench, 1);
            assert!(bench.scrub().await.unrecoverable_rows > 0);
            let lost = bench.report().lost_ranges;
            assert!(!lost.is_empty() && bench.report().unrepaired_ranges.is_empty());
            assert!(errors_of(&bench, 0).unrepairable_blocks > 0);
            let bench = again(bench).await;
            assert_eq!(bench.report().lost_ranges, lost);
            assert!(errors_of(&bench, 0).unrepairable_blocks > 0);
            let found = bench.client.read(lost[0].offset_bytes / 4096, 1).await;
            assert!(matches!(found, Err(Error::Unreadable { .. })), "{found:?}");
            rewrite(&bench, &lost, 1).await;
            assert_eq!(bench.report().lost_ranges, []);
            assert_eq!(bench.scrub().await.unrecoverable_rows, 0);
            bench.holds(0..bench.blocks, 1).await;
            bench.close().await;
        });
    }
}

/// Blocks are not given up while a missing disk may have them.
#[test]
fn blocks_unreadable_while_degraded_are_reported_but_not_lost() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        spoil(&bench, 0);
        bench.disk(2).unplug();
        bench.write(bench.blocks - 64..bench.blocks, 1).await;
        assert!(bench.scrub().await.unrecoverable_rows > 0);
        let report = bench.report();
        assert!(
            !report.unrepaired_ranges.is_empty() && report.lost_ranges.is_empty(),
            "{report:?}"
        );
        bench.look().await;
        bench.disk(2).plug();
        bench.look().await;
        bench.whole().await;
        bench.pool.clear_errors(None).await.unwrap();
        assert_eq!(bench.report().unrepaired_ranges, []);
        assert_eq!(bench.scrub().await.unrecoverable_rows, 0);
        assert_eq!(
            (bench.report().unrepaired_ranges, bench.report().lost_ranges),
            (vec![], vec![])
        );
        bench.holds(0..bench.blocks, 1).await;
        bench.close().await;
    });
}
