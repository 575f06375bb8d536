//! Removal of disks, allowed or refused, and activation of spares; new volumes are allocated on
//! attached disks.

use std::time::Duration;

use geometry::Redundancy;
use pool::{NewPoolVolume, PoolDiskState, PoolError};
use uuid::Uuid;

use crate::pool::{Bench, FEW, MORE, disk_of, joining, path, run_scenario, thick};

const ANOTHER: Uuid = Uuid::from_u128(0xd);

/// A volume of so many extents of 48 MiB, each with a column on four disks.
fn of_extents(extents: u64) -> NewPoolVolume {
    NewPoolVolume { bytes: extents * (48 << 20), ..thick(ANOTHER) }
}

fn refused(result: Result<(), PoolError>) -> String {
    let why = result.unwrap_err();
    assert!(why.is_no_space() && why.hint().is_some(), "{why}");
    why.to_string()
}

#[test]
fn removing_a_needed_disk_is_refused_and_changes_nothing() {
    for (level, checksums) in [(Redundancy::Parity, false), (Redundancy::DoubleParity, true)] {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, (level, checksums), FEW).await;
            let before = bench.report();
            let why = refused(bench.pool.remove("0").await);
            assert!(why.contains("needs 4 different disks"), "{why}");
            assert_eq!(bench.report(), before);
            // A spare that is too small is not activated for it, and stays free.
            bench.pool.create_volume(&of_extents(5)).await.unwrap();
            bench.host.add_disk(path(FEW), disk_of(80 << 20));
            let why = refused(bench.pool.replace("0", &joining(path(FEW))).await);
            assert!(why.contains("the other disks have no space for"), "{why}");
            assert_eq!(bench.report().disks.len(), FEW);
            bench.close().await;
        });
    }
}

#[test]
fn a_removal_can_be_cancelled() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, MORE).await;
        bench.pool.create_volume(&of_extents(5)).await.unwrap();
        let gone = (0..MORE).find(|n| bench.report().disks[*n].extents > 3).unwrap();
        let name = gone.to_string();
        assert!(bench.pool.cancel_removal(&name).await.is_err(), "it is not being removed");
        bench.pool.remove(&name).await.unwrap();
        assert_eq!(bench.state(gone), PoolDiskState::Draining);
        let free = bench.report().free_bytes;
        bench.pool.cancel_removal(&name).await.unwrap();
        assert_eq!(bench.state(gone), PoolDiskState::Active);
        assert!(bench.report().free_bytes >= free);
        assert!(bench.pool.cancel_removal(&name).await.is_err(), "it is not any more");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(bench.state(gone), PoolDiskState::Active);
        assert_eq!(bench.report().stale_extents, 0);
        bench.holds(0..bench.blocks, 1).await;
        bench.close().await;
    });
}

/// Regression test: the disk was active again, and kept its columns.
#[test]
fn a_disk_that_fails_and_returns_while_it_is_removed_goes_on_leaving() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, MORE).await;
        // Its columns are not rebuilt before it is opened.
        bench.pool.create_volume(&of_extents(5)).await.unwrap();
        bench.disk(1).unplug();
        bench.write(0..64, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        bench.pool.remove("1").await.unwrap();
        bench.look().await;
        bench.disk(1).plug();
        bench.look().await;
        assert_eq!(bench.state(1), PoolDiskState::Draining);
        let open = bench.core_pool.open_volume(ANOTHER).await.unwrap();
        let gone = async {
            while bench.report().disks.iter().any(|disk| disk.member_id == 1) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let gone = tokio::time::timeout(Duration::from_secs(600), gone).await;
        assert!(gone.is_ok(), "{:?}", bench.report());
        drop(open);
        bench.holds(0..64, 2).await;
        bench.holds(64..bench.blocks, 1).await;
        bench.close().await;
    });
}

#[test]
fn the_smallest_sufficient_spare_replaces_a_disk() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        bench.pool.create_volume(&of_extents(6)).await.unwrap();
        let _seat = bench.core_pool.open_volume(ANOTHER).await.unwrap();
        for (n, bytes) in [(FEW, 80 << 20), (FEW + 1, 200 << 20)] {
            bench.host.add_disk(path(n), disk_of(bytes));
            bench.pool.add(&joining(path(n)), true).await.unwrap();
        }
        bench.disk(1).unplug();
        bench.write(0..64, 2).await;
        let whole = async {
            while bench.report().disks[1].extents > 0 {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let whole = tokio::time::timeout(Duration::from_secs(600), whole).await;
        assert!(whole.is_ok(), "{:?}", bench.report());
        let states = [bench.state(FEW), bench.state(FEW + 1)];
        assert_eq!(states, [PoolDiskState::Spare, PoolDiskState::Active], "the first is too small");
        drop(_seat);
        bench.close().await;
    });
}

#[test]
fn a_new_volume_avoids_a_detached_disk() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        assert!(bench.report().free_bytes > 0);
        bench.disk(1).unplug();
        bench.write(0..64, 2).await;
        assert_eq!(bench.state(1), PoolDiskState::Detached);
        assert_eq!(bench.report().free_bytes, 0, "three disks have no room for four columns");
        let why = refused(bench.pool.create_volume(&of_extents(1)).await);
        assert!(why.contains("space for 0 MiB") && why.contains("is detached"), "{why}");
        assert_eq!(bench.report().volumes.len(), 1, "nothing is left of it");
        assert!(bench.pool.check_space(1 << 20).is_err());
        // An existing thick volume cannot grow either; thin ones can.
        let why = refused(bench.pool.grow_volume(crate::common::VOLUME, 96 << 20).await);
        assert!(why.contains("is detached"), "{why}");
        bench.write(0..bench.blocks, 3).await;
        bench.close().await;
    });
}
