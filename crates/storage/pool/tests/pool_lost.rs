//! Blocks that no disk returns any more: what can be reconstructed is, the rest is reported as
//! lost. Nothing else is read in their place, and they can be rewritten.

use std::time::Duration;

use block::Error;
use geometry::Redundancy;
use pool::{DamagedRange, Pool};
use rt::sim::{BadDuration, BadRange, FailingOps};

use crate::common::{VOLUME, core_of};
use crate::pool::{Bench, MORE, opening, run_scenario};

/// Blocks of 4 KiB of each read in these tests.
const STEP: u64 = 16;

/// Makes single blocks of a disk unreadable until they are rewritten.
fn spoil(bench: &Bench, disk: usize) {
    for n in 0..16 {
        let at = (28 << 20) + n * (64 << 10) + 4096;
        let bytes = at..at + 4096;
        let bad = BadRange { bytes, ops: FailingOps::Reads, duration: BadDuration::Rewritten };
        bench.disk(disk).add_bad_range(bad);
    }
}

fn overlaps(lost: &DamagedRange, at: u64) -> bool {
    let (start, end) = (at * 4096, (at + STEP) * 4096);
    lost.volume == VOLUME && lost.offset_bytes < end && start < lost.offset_bytes + lost.len_bytes
}

/// Lost blocks read as errors, all others as they were written.
async fn only_lost_is_missing(bench: &Bench, lost: &[DamagedRange]) {
    for at in (0..bench.blocks).step_by(STEP as usize) {
        let found = bench.client.read(at, u32::try_from(STEP).unwrap()).await;
        if lost.iter().any(|lost| overlaps(lost, at)) {
            assert!(matches!(found, Err(Error::Unreadable { .. })), "block {at}");
        } else {
            assert!(found.unwrap().to_vec() == [1; 16 * 4096], "block {at}");
        }
    }
}

async fn until(what: &str, bench: &Bench, is: impl Fn(&Bench) -> bool) {
    let waits = async {
        while !is(bench) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let ends = tokio::time::timeout(Duration::from_secs(1200), waits).await;
    assert!(ends.is_ok(), "{what}: {:?}", bench.report());
}

#[test]
fn a_rebuild_over_unreadable_blocks_completes_and_reports_them_until_rewritten() {
    for how in
        [(Redundancy::Parity, false), (Redundancy::Parity, true), (Redundancy::Copies(2), false)]
    {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, how, MORE).await;
            spoil(&bench, 0);
            bench.disk(1).unplug();
            bench.write(bench.blocks - 64..bench.blocks, 1).await;
            until("it is never whole", &bench, |b| b.report().disks[1].extents == 0).await;
            assert_eq!(bench.report().stale_extents, 0);
            let lost = bench.report().lost_ranges;
            assert!(!lost.is_empty());
            only_lost_is_missing(&bench, &lost).await;
            assert_eq!(bench.scrub().await.unrecoverable_rows, 0, "it fits together");
            // That is still known after a reopening.
            let host = bench.host.clone();
            bench.close().await;
            let core = core_of(&host).await;
            let pool = Pool::open(&core, &opening(MORE)).await.unwrap();
            let bench = Bench::served(host, &core, pool).await;
            assert_eq!(bench.report().lost_ranges, lost);
            // The other blocks of these rows are protected again.
            bench.disk(2).unplug();
            only_lost_is_missing(&bench, &lost).await;
            // Rewriting them clears the record, block by block.
            for range in &lost {
                for at in (range.offset_bytes / 4096)..(range.offset_bytes + range.len_bytes) / 4096
                {
                    bench.client.write(at, &[1; 4096], false).await.unwrap();
                }
            }
            assert_eq!(bench.report().lost_ranges, []);
            only_lost_is_missing(&bench, &[]).await;
            bench.close().await;
        });
    }
}

#[test]
fn a_disk_with_unreadable_blocks_can_be_removed() {
    // These are reconstructed from the other disks; without redundancy they are lost.
    for (how, loses) in
        [((Redundancy::Parity, false), false), ((Redundancy::Copies(1), false), true)]
    {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, how, MORE).await;
            spoil(&bench, 0);
            bench.pool.remove("0").await.unwrap();
            let is_gone =
                |bench: &Bench| bench.report().disks.iter().all(|disk| disk.member_id != 0);
            until("it never leaves", &bench, is_gone).await;
            let lost = bench.report().lost_ranges;
            assert_eq!(!lost.is_empty(), loses, "{lost:?}");
            only_lost_is_missing(&bench, &lost).await;
            bench.close().await;
        });
    }
}
