//! Disks that were rolled back to an older state, beside others that were not.

use geometry::Redundancy;
use rt::sim::DiskImage;

use super::*;

/// The current contents of some disks.
fn copies(host: &Host, disks: &[usize]) -> Vec<(usize, DiskImage)> {
    disks.iter().map(|n| (*n, host.disk(path(*n)).unwrap().capture_image())).collect()
}

fn roll_back(host: &Host, copies: &[(usize, DiskImage)]) {
    copies.iter().for_each(|(n, copy)| host.disk(path(*n)).unwrap().restore_image(copy));
}

async fn opened(host: &Host, what: &OpenPool) -> Result<Bench, PoolError> {
    let core = core_of(host).await;
    let pool = Pool::open(&core, what).await?;
    Ok(Bench::served(host.clone(), &core, pool).await)
}

/// Closes the pool, and reopens it after more writes.
async fn written_again(bench: Bench, value: u8) -> Host {
    let host = bench.host.clone();
    bench.close().await;
    let bench = opened(&host, &opening(FEW)).await.unwrap();
    bench.write(0..256, value).await;
    bench.close().await;
    host
}

#[test]
fn rolled_back_disks_do_not_overwrite_newer_data() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        let (host, all) = (bench.host.clone(), [0, 1, 2, 3]);
        bench.close().await;
        let old = copies(&host, &all);
        let bench = opened(&host, &opening(FEW)).await.unwrap();
        let host = written_again(bench, 2).await;
        let new = copies(&host, &all);
        roll_back(&host, &old[..3]);
        let refused = opened(&host, &opening(FEW)).await.err().expect("it is refused").to_string();
        let says = |what: &str| assert!(refused.contains(what), "{what}: {refused}");
        says("disks /dev/d0, /dev/d1, /dev/d2 are older than disk /dev/d3");
        says("pool open tank --without /dev/d3");
        says("LOSES");
        // Nothing has been changed: with the right disks the pool is as before.
        roll_back(&host, &new);
        let bench = opened(&host, &opening(FEW)).await.unwrap();
        bench.holds(0..256, 2).await;
        bench.holds(256..bench.blocks, 1).await;
        bench.close().await;
        // The operator may choose the older state.
        roll_back(&host, &old[..3]);
        let older = OpenPool { missing_disks: vec!["/dev/d3".into()], ..opening(FEW) };
        let bench = opened(&host, &older).await.unwrap();
        bench.holds(0..bench.blocks, 1).await;
        assert_eq!(bench.state(3), PoolDiskState::Detached);
        bench.close().await;
    });
}

/// In a term of its own, or in the same one before it ended: then the metadata differ only by what
/// closing has written.
#[test]
fn a_rolled_back_disk_is_rebuilt() {
    for is_open in [false, true] {
        run_scenario(move |host| async move {
            let bench = Bench::checked(host, FEW).await;
            let (old, host) = match is_open {
                true => {
                    let old = copies(&bench.host, &[1]);
                    bench.write(0..256, 2).await;
                    let host = bench.host.clone();
                    bench.close().await;
                    (old, host)
                }
                false => {
                    let host = bench.host.clone();
                    bench.close().await;
                    let old = copies(&host, &[1]);
                    let bench = opened(&host, &opening(FEW)).await.unwrap();
                    (old, written_again(bench, 2).await)
                }
            };
            roll_back(&host, &old);
            is_made_again(&host).await;
        });
    }
}

/// Stale data are not read, and the disk is complete in the end.
async fn is_made_again(host: &Host) {
    let bench = opened(host, &opening(FEW)).await.unwrap();
    bench.holds(0..256, 2).await;
    while bench.state(1) == PoolDiskState::Detached {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    bench.whole().await;
    let scrub = bench.scrub().await;
    assert_eq!((scrub.repaired_rows, scrub.unrecoverable_rows), (0, 0));
    bench.disk(0).unplug();
    bench.holds(0..256, 2).await;
    bench.holds(256..bench.blocks, 1).await;
    bench.close().await;
}

/// Power fails, so closing has written nothing: the periodic versions tell. Its parity log and its
/// checksums are as old as its data.
#[test]
fn a_disk_rolled_back_before_a_power_failure_is_rebuilt() {
    for checksums in [false, true] {
        run_scenario(move |host| async move {
            let bench = Bench::made(host, (Redundancy::Parity, checksums), FEW).await;
            // Writing has ended, and so has the work that follows it.
            tokio::time::sleep(Duration::from_secs(60)).await;
            let old = copies(&bench.host, &[1]);
            bench.write(0..256, 2).await;
            tokio::time::sleep(Duration::from_secs(21)).await;
            let host = bench.host.clone();
            let permit = drop_permit::permit_drops();
            drop(bench);
            host.power_cut();
            drop(permit);
            roll_back(&host, &old);
            is_made_again(&host).await;
        });
    }
}

/// The others were rolled back and opened without it. It alone has what they have lost, so it is
/// not overwritten.
#[test]
fn a_newer_disk_found_while_the_pool_is_open_is_left_alone() {
    run_scenario(|host| async move {
        let bench = Bench::new(host, FEW).await;
        let host = bench.host.clone();
        bench.close().await;
        let old = copies(&host, &[0, 1, 2]);
        let bench = opened(&host, &opening(FEW)).await.unwrap();
        let host = written_again(bench, 2).await;
        roll_back(&host, &old);
        host.disk(path(3)).unwrap().unplug();
        let bench = opened(&host, &opening(FEW)).await.unwrap();
        bench.write(0..256, 3).await;
        bench.look().await;
        let before = format!("{:?}", host.disk(path(3)).unwrap().capture_image());
        bench.disk(3).plug();
        for _ in 0..3 {
            bench.look().await;
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        assert_eq!(bench.state(3), PoolDiskState::Detached);
        assert!(format!("{:?}", bench.disk(3).capture_image()) == before, "it was written");
        bench.close().await;
        // Both have continued, and neither wins over the other.
        let refused = opened(&host, &opening(FEW)).await.err().expect("it is refused").to_string();
        assert!(refused.contains("split brain"), "{refused}");
        // It is given up: replaced by another disk, or added as a new one.
        let without = OpenPool { missing_disks: vec!["/dev/d3".into()], ..opening(FEW) };
        let bench = opened(&host, &without).await.unwrap();
        let again = NewDisk { path: path(3), overwrite: vec!["/dev/d3".into()] };
        bench.pool.replace("3", &again).await.unwrap();
        while bench.report().disks.iter().any(|disk| disk.state == PoolDiskState::Detached) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        bench.whole().await;
        bench.close().await;
        let bench = opened(&host, &opening(FEW)).await.unwrap();
        bench.holds(0..256, 3).await;
        bench.close().await;
    });
}
