//! Blocks that no disk gives back any more: what can be is made whole without them, they are named, and they are no more
//! than lost: nothing else is read in their place, and they can be written again.

use std::time::Duration;

use block::Error;
use geometry::Level;
use pool::{LostRange, Pool};
use rt::sim::{Bad, BadOps, BadUntil};

use crate::common::{VOLUME, core_of};
use crate::pool::{Bench, MORE, opening, play};

/// Blocks of 4 KiB of each read that these tests make.
const STEP: u64 = 16;

/// Single blocks of a disk cannot be read until they are written.
fn spoil(bench: &Bench, disk: usize) {
    for n in 0..16 {
        let at = (28 << 20) + n * (64 << 10) + 4096;
        let bytes = at..at + 4096;
        let bad = Bad { bytes, ops: BadOps::Reads, until: BadUntil::Rewritten };
        bench.disk(disk).add_bad(bad);
    }
}

fn overlaps(lost: &LostRange, at: u64) -> bool {
    let (start, end) = (at * 4096, (at + STEP) * 4096);
    lost.volume == VOLUME && lost.start < end && start < lost.start + lost.bytes
}

/// What is lost reads as an error, and all else as it was written.
async fn only_lost_is_missing(bench: &Bench, lost: &[LostRange]) {
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
fn a_rebuild_over_blocks_that_cannot_be_read_ends_and_names_them_until_they_are_written() {
    for how in [(Level::Parity, false), (Level::Parity, true), (Level::Copies(2), false)] {
        play(move |host| async move {
            let bench = Bench::made(host, how, MORE).await;
            spoil(&bench, 0);
            bench.disk(1).pull_out();
            bench.write(bench.blocks - 64..bench.blocks, 1).await;
            until("it is never whole", &bench, |b| b.report().disks[1].pieces == 0).await;
            assert_eq!(bench.report().behind_pieces, 0);
            let lost = bench.report().lost;
            assert!(!lost.is_empty());
            only_lost_is_missing(&bench, &lost).await;
            assert_eq!(bench.scrub().await.unrepairable, 0, "it fits together");
            // That is known after an opening as well.
            let host = bench.host.clone();
            bench.close().await;
            let core = core_of(&host).await;
            let pool = Pool::open(&core, &opening(MORE)).await.unwrap();
            let bench = Bench::served(host, &core, pool).await;
            assert_eq!(bench.report().lost, lost);
            // What is left of these rows is protected again.
            bench.disk(2).pull_out();
            only_lost_is_missing(&bench, &lost).await;
            // It ends block by block.
            for range in &lost {
                for at in (range.start / 4096)..(range.start + range.bytes) / 4096 {
                    bench.client.write(at, &[1; 4096], false).await.unwrap();
                }
            }
            assert_eq!(bench.report().lost, []);
            only_lost_is_missing(&bench, &[]).await;
            bench.close().await;
        });
    }
}

#[test]
fn a_disk_with_blocks_that_cannot_be_read_leaves_all_the_same() {
    // Of the others these are made; where there is nothing else they are lost.
    for (how, loses) in [((Level::Parity, false), false), ((Level::Copies(1), false), true)] {
        play(move |host| async move {
            let bench = Bench::made(host, how, MORE).await;
            spoil(&bench, 0);
            bench.pool.remove("0").await.unwrap();
            let is_gone = |bench: &Bench| bench.report().disks.iter().all(|disk| disk.member != 0);
            until("it never leaves", &bench, is_gone).await;
            let lost = bench.report().lost;
            assert_eq!(!lost.is_empty(), loses, "{lost:?}");
            only_lost_is_missing(&bench, &lost).await;
            bench.close().await;
        });
    }
}
