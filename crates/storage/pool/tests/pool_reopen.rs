//! A volume of a pool is reopened while the core goes on with other volumes: it holds what was
//! written, wherever that lies.

use std::rc::Rc;
use std::time::Duration;

use block::testing::TestClient;
use geometry::Redundancy;
use pool::{CorePool, NewPoolVolume};
use rt::Core;
use uuid::Uuid;

use crate::common::{VOLUME, core_of};
use crate::pool::{
    Bench, FEW, MORE, POOL_LEVELS, disk_of, joining, path, paths, run_scenario, thick,
};

/// Blocks of 4 KiB that are written with one operation: several whole stripes, which are written to
/// free slots.
const WHOLE: u64 = 256;

const ANOTHER: Uuid = Uuid::from_u128(0xb);

fn thin(id: Uuid) -> NewPoolVolume {
    NewPoolVolume { is_thick: false, ..thick(id) }
}

fn filled(value: u8) -> Vec<u8> {
    vec![value; usize::try_from(WHOLE * 4096).unwrap()]
}

/// A volume on a core that has others open as well.
struct Opened<'a> {
    core: &'a Core,
    core_pool: &'a Rc<CorePool>,
    volume: Uuid,
}

impl Opened<'_> {
    async fn client(&self) -> TestClient {
        TestClient::new(
            &self.core_pool.open_volume(self.volume).await.unwrap(),
            self.core.buffer_pool(),
        )
    }

    /// Opens it only for this, as the creation of an image does.
    async fn write(&self, values: std::ops::Range<u8>) {
        let client = self.client().await;
        for (at, value) in (0..).zip(values) {
            client.write(at * WHOLE, &filled(value), true).await.unwrap();
        }
    }

    async fn holds(&self, values: std::ops::Range<u8>) {
        let client = self.client().await;
        for (at, value) in (0..).zip(values) {
            let data = client.read(at * WHOLE, u32::try_from(WHOLE).unwrap()).await.unwrap();
            assert!(data.to_vec() == filled(value), "volume {} at {at}", self.volume);
        }
    }
}

/// Regression test: the second volume of a core was created, and then "holds no volume".
#[test]
fn volumes_keep_their_data_when_reopened_on_one_or_two_cores() {
    for (level, checksums) in POOL_LEVELS {
        run_scenario(move |host| async move {
            let core = core_of(&host).await;
            let bench = Bench::sized(host, (level, checksums), FEW, 400 << 20).await;
            let other = CorePool::attach_on_owner_core(&core, &bench.pool, 1).await.unwrap();
            let mut open = Vec::new();
            for n in 10u8..20 {
                let volume = Uuid::from_u128(n.into());
                let what = if n % 2 == 0 { thin(volume) } else { thick(volume) };
                bench.pool.create_volume(&what).await.unwrap();
                let core_pool = if n % 3 == 0 { &other } else { &bench.core_pool };
                let opened = Opened { core: &core, core_pool, volume };
                opened.write(n..n + 4).await;
                opened.holds(n..n + 4).await;
                opened.write(n + 1..n + 5).await;
                open.push((opened.client().await, opened));
            }
            for (n, (client, opened)) in (10u8..).zip(open) {
                drop(client);
                opened.holds(n + 1..n + 5).await;
            }
            bench.holds(0..bench.blocks, 1).await;
            other.close().await.unwrap();
            bench.close().await;
        });
    }
}

#[test]
fn a_volume_keeps_its_data_when_moved_between_cores() {
    for (level, checksums) in POOL_LEVELS {
        run_scenario(move |host| async move {
            let core = core_of(&host).await;
            let bench = Bench::made(host, (level, checksums), FEW).await;
            let other = CorePool::attach_on_owner_core(&core, &bench.pool, 1).await.unwrap();
            bench.pool.create_volume(&thin(ANOTHER)).await.unwrap();
            for round in 1u8..6 {
                let here = if round % 2 == 0 { &other } else { &bench.core_pool };
                let opened = Opened { core: &core, core_pool: here, volume: ANOTHER };
                opened.write(round..round + 4).await;
                opened.holds(round..round + 4).await;
                let there = if round % 2 == 0 { &bench.core_pool } else { &other };
                Opened { core_pool: there, ..opened }.holds(round..round + 4).await;
            }
            other.close().await.unwrap();
            bench.close().await;
        });
    }
}

/// A core whose last flush failed leaves without detaching: its volumes cannot be moved. Nothing
/// waits for it.
#[test]
fn a_volume_of_a_core_that_left_without_detaching_is_refused() {
    run_scenario(move |host| async move {
        let core = core_of(&host).await;
        let bench = Bench::made(host, (Redundancy::Parity, true), FEW).await;
        let other = CorePool::attach_on_owner_core(&core, &bench.pool, 1).await.unwrap();
        bench.pool.create_volume(&thin(ANOTHER)).await.unwrap();
        drop(other.open_volume(ANOTHER).await.unwrap());
        drop(other);
        // Its task ends when the next event arrives.
        bench.pool.grow_volume(VOLUME, 25 << 20).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let limit = Duration::from_secs(60);
        let opened = tokio::time::timeout(limit, bench.core_pool.open_volume(ANOTHER)).await;
        let why = opened.expect("it does not wait").unwrap_err().to_string();
        assert!(why.contains("core 1 still uses volume"), "{why}");
        let deleted = tokio::time::timeout(limit, bench.pool.delete_volume(ANOTHER)).await;
        assert!(deleted.expect("it does not wait").is_err());
        bench.close().await;
    });
}

#[test]
fn a_grown_volume_keeps_its_data_when_reopened() {
    for (level, checksums) in POOL_LEVELS {
        run_scenario(move |host| async move {
            let core = core_of(&host).await;
            let bench = Bench::made(host, (level, checksums), FEW).await;
            for what in [thin(ANOTHER), thick(Uuid::from_u128(0xc))] {
                bench.pool.create_volume(&what).await.unwrap();
                let opened = Opened { core: &core, core_pool: &bench.core_pool, volume: what.id };
                opened.write(1..5).await;
                let client = opened.client().await;
                bench.pool.grow_volume(what.id, 2 * what.bytes).await.unwrap();
                client.write(WHOLE, &filled(9), false).await.unwrap();
                drop(client);
                let grown = opened.client().await;
                let last = what.bytes / 4096 * 2 - WHOLE;
                grown.write(last, &filled(7), false).await.unwrap();
                drop(grown);
                let client = opened.client().await;
                let count = u32::try_from(WHOLE).unwrap();
                for (at, value) in [(0, 1), (WHOLE, 9), (2 * WHOLE, 3), (last, 7)] {
                    assert!(client.read(at, count).await.unwrap().to_vec() == filled(value));
                }
            }
            bench.close().await;
        });
    }
}

/// The columns of a detached disk are rebuilt elsewhere; or it is reattached and resynced. Whether
/// that has ended or not.
#[test]
fn a_volume_reopened_after_a_disk_was_detached_keeps_its_data() {
    for disks in [FEW, MORE] {
        for (level, wait) in [Redundancy::Parity, Redundancy::DoubleParity, Redundancy::Copies(2)]
            .into_iter()
            .flat_map(|level| [0, 300, 1200].map(|wait| (level, Duration::from_millis(wait))))
        {
            run_scenario(move |host| async move {
                let core = core_of(&host).await;
                let bench = Bench::made(host, (level, true), disks).await;
                bench.pool.create_volume(&thin(ANOTHER)).await.unwrap();
                let opened = Opened { core: &core, core_pool: &bench.core_pool, volume: ANOTHER };
                opened.write(1..5).await;
                bench.disk(1).unplug();
                opened.write(2..6).await;
                bench.look().await;
                tokio::time::sleep(wait).await;
                opened.holds(2..6).await;
                opened.write(3..7).await;
                bench.disk(1).plug();
                bench.look().await;
                tokio::time::sleep(wait).await;
                opened.holds(3..7).await;
                opened.write(4..8).await;
                let client = opened.client().await;
                let whole = tokio::time::timeout(Duration::from_secs(600), bench.whole()).await;
                assert!(whole.is_ok(), "{:?}", bench.report());
                drop(client);
                opened.holds(4..8).await;
                // Now its data are needed.
                bench.disk(0).unplug();
                opened.holds(4..8).await;
                bench.holds(0..bench.blocks, 1).await;
                bench.close().await;
            });
        }
    }
}

/// Opening a volume that is open here returns the same device, not a second one with its own state.
#[test]
fn two_opens_share_one_volume() {
    run_scenario(|host| async move {
        let core = core_of(&host).await;
        let bench = Bench::new(host, FEW).await;
        let first = Opened { core: &core, core_pool: &bench.core_pool, volume: VOLUME };
        let second = first.client().await;
        second.write(0, &filled(2), false).await.unwrap();
        bench.holds(0..WHOLE, 2).await;
        bench.write(0..WHOLE, 3).await;
        let data = second.read(0, u32::try_from(WHOLE).unwrap()).await.unwrap();
        assert!(data.to_vec() == filled(3));
        bench.host.add_disk(path(FEW), disk_of(200 << 20));
        bench.pool.add(&joining(path(FEW)), false).await.unwrap();
        assert_eq!(paths(MORE).len(), bench.report().disks.len());
        drop(second);
        bench.close().await;
    });
}
