//! Two machines that reach one disk: which of them may use it, and what the other does then.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use block::Error;
use block::testing::TestClient;
use disk::claim::{OwnerRecordKind, OwnerState};
use disk::{
    CLAIM_COPY_OFFSET, CLAIM_OFFSET, ClaimError, ClaimRefusal, ClaimRequest, ClaimSubject,
    DiskClaim, DiskOwner, DiskOwnerState, HEARTBEAT_OFFSET, ImageErrorReason, LEASE_DURATION,
    NodeIdentity, OWNER_RECORD_BYTES, OwnerRecord,
};
use geometry::Redundancy;
use image::{CreateImageOptions, FlatImage, OpenImageOptions, delete};
use pool::{CorePool, CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool};
use rt::Core;
use rt::disk::OpenOptions;
use rt::sim::{DiskControl, DiskFaults, DiskSetup, Host, HostSetup, World};
use uuid::Uuid;

use crate::common::{VOLUME, client, core_of, existing, succeed, thin};

const LUN: &str = "/dev/lun";
const MIB: u64 = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// Two hosts with one disk.
struct Pair {
    a: Host,
    b: Host,
    disk: DiskControl,
}

fn pair(world: &World, a: Host) -> Pair {
    let b = world.add_host("other", HostSetup { memory_bytes: 48 << 20, ..HostSetup::default() });
    let disk = a.add_disk(LUN, DiskSetup::device(16 * MIB));
    b.share_disk(LUN, &a);
    Pair { a, b, disk }
}

fn node(core: &Core, n: u128) -> NodeIdentity {
    let name = if n == 1 { "a" } else { "b" };
    NodeIdentity::ephemeral(core, Uuid::from_u128(n), name, &format!("srv{n}"))
}

fn claim(core: &Core, n: u128) -> Option<ClaimRequest> {
    Some(ClaimRequest::for_node(node(core, n)))
}

fn stated(core: &Core, n: u128) -> Option<ClaimRequest> {
    Some(ClaimRequest { take_over: true, ..ClaimRequest::for_node(node(core, n)) })
}

async fn take(core: &Core, claim: Option<ClaimRequest>) -> Result<DiskClaim, ClaimError> {
    let disk = core.open_disk(Path::new(LUN), OpenOptions::new()).await.unwrap();
    let subject = ClaimSubject { set_id: Uuid::from_u128(70), part_id: Uuid::from_u128(71) };
    let memory = core.buffer_pool().account();
    DiskClaim::acquire(core, &disk, &memory, (subject, &claim.unwrap()), None).await
}

async fn open(core: &Core, claim: Option<ClaimRequest>) -> Result<Rc<FlatImage>, DiskOwner> {
    match FlatImage::open(core, Path::new(LUN), &OpenImageOptions { claim, ..existing() }).await {
        Ok(file) => Ok(Rc::new(file)),
        Err(e) => match e.reason {
            ImageErrorReason::ClaimedElsewhere(by) => Err(by),
            other => panic!("{other}"),
        },
    }
}

async fn create(core: &Core, claim: Option<ClaimRequest>) -> Rc<FlatImage> {
    let how = CreateImageOptions { claim, ..thin(4 * MIB) };
    Rc::new(FlatImage::create(core, Path::new(LUN), &how).await.unwrap())
}

fn two_hosts<Fut: Future<Output = ()>>(scene: impl FnOnce(Pair, World) -> Fut) {
    let setup = HostSetup { memory_bytes: 48 << 20, ..HostSetup::default() };
    succeed(1, setup, |world, a| scene(pair(&world, a), world));
}

async fn passes(time: Duration) {
    tokio::time::sleep(time).await;
}

#[test]
fn a_disk_in_use_elsewhere_is_refused_and_stays_in_use() {
    two_hosts(|pair, _| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let file = create(&a, claim(&a, 1)).await;
        let client = client(&a, &file);
        client.write(0, &[7; 512], true).await.unwrap();
        let refused = open(&b, claim(&b, 2)).await.unwrap_err();
        assert_eq!(
            (refused.state, refused.node),
            (DiskOwnerState::NotReleased, Uuid::from_u128(1))
        );
        let text = refused.to_string();
        assert!(text.contains("node a on host srv1") && text.contains("last seen"), "{text}");
        // Not even on the operator's request: its heartbeat moves.
        let refused = open(&b, stated(&b, 2)).await.unwrap_err();
        assert_eq!(refused.state, DiskOwnerState::InUse, "{refused}");
        // It is not overwritten or deleted either.
        let forced = CreateImageOptions { overwrite: true, claim: claim(&b, 2), ..thin(4 * MIB) };
        let forced = FlatImage::create(&b, Path::new(LUN), &forced).await.unwrap_err();
        assert!(
            matches!(
                forced.reason,
                ImageErrorReason::ClaimedElsewhere(DiskOwner { state: DiskOwnerState::InUse, .. })
            ),
            "{forced}"
        );
        let deleted = delete(&b, Path::new(LUN), VOLUME, (false, true), claim(&b, 2)).await;
        assert!(matches!(deleted.unwrap_err().reason, ImageErrorReason::ClaimedElsewhere(_)));
        client.write(1, &[8; 512], true).await.unwrap();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [7; 512]);
        assert_eq!(file.lost_claim(), None);
    });
}

#[test]
fn a_released_disk_is_claimed_without_take_over() {
    two_hosts(|pair, world| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let file = create(&a, claim(&a, 1)).await;
        file.release().await.unwrap();
        let began = world.now();
        open(&b, claim(&b, 2)).await.unwrap();
        assert!(world.now() - began < 2 * SECOND, "{:?}", world.now() - began);
        // Now it belongs to the other machine.
        drop(file);
        assert_eq!(open(&a, claim(&a, 1)).await.unwrap_err().node, Uuid::from_u128(2));
    });
}

#[test]
fn a_dead_owners_disk_needs_take_over() {
    two_hosts(|pair, world| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        drop(create(&a, claim(&a, 1)).await);
        pair.a.power_cut();
        passes(100 * SECOND).await;
        assert_eq!(open(&b, claim(&b, 2)).await.unwrap_err().state, DiskOwnerState::NotReleased);
        let began = world.now();
        let file = open(&b, stated(&b, 2)).await.unwrap();
        let waited = world.now() - began;
        assert!(waited > 2 * LEASE_DURATION && waited < 13 * SECOND, "{waited:?}");
        client(&b, &file).write(0, &[9; 512], true).await.unwrap();
        // The former owner comes back, and finds it taken.
        let a = core_of(&pair.a).await;
        assert_eq!(open(&a, claim(&a, 1)).await.unwrap_err().node, Uuid::from_u128(2));
    });
}

#[test]
fn a_killed_process_reclaims_its_disk_at_once_a_rebooted_machine_watches_first() {
    two_hosts(|pair, world| async move {
        let a = core_of(&pair.a).await;
        drop(create(&a, claim(&a, 1)).await);
        pair.a.kill();
        let a = core_of(&pair.a).await;
        let began = world.now();
        drop(open(&a, claim(&a, 1)).await.unwrap());
        assert!(world.now() - began < SECOND, "{:?}", world.now() - began);
        pair.a.power_cut();
        let a = core_of(&pair.a).await;
        let began = world.now();
        drop(open(&a, claim(&a, 1)).await.unwrap());
        let waited = world.now() - began;
        assert!(waited > 2 * LEASE_DURATION && waited < 13 * SECOND, "{waited:?}");
    });
}

/// Whenever two machines open a disk without an owner, one of them gets it.
#[test]
fn two_simultaneous_claims_have_one_winner() {
    for seed in 0..60 {
        let setup = HostSetup { memory_bytes: 8 << 20, ..HostSetup::default() };
        succeed(seed, setup, |world, a| async move {
            let pair = pair(&world, a);
            let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
            let apart = world.rng().duration_between(Duration::ZERO, Duration::from_millis(seed));
            let first = take(&a, claim(&a, 1));
            let second = async {
                passes(apart).await;
                take(&b, claim(&b, 2)).await
            };
            let (first, second) = tokio::join!(first, second);
            let held = [&first, &second].iter().filter(|taken| taken.is_ok()).count();
            assert_eq!(held, 1, "seed {seed}: {first:?} {second:?}");
            passes(10 * SECOND).await;
            let hold = first.or(second).unwrap();
            assert_eq!(hold.lost_claim(), None, "seed {seed}");
            assert!(hold.verify().await.is_ok());
        });
    }
}

/// A machine that was stopped while its disk was taken over writes nothing when it goes on.
#[test]
fn a_paused_process_writes_nothing_after_a_take_over() {
    two_hosts(|pair, _| async move {
        let b = core_of(&pair.b).await;
        let written = Rc::new(Cell::new(0));
        let count = Rc::clone(&written);
        // Runs within the host, all of which is stopped.
        let load = pair.a.run(move |a| async move {
            let of = create(&a, claim(&a, 1)).await;
            let writes = client(&a, &of);
            loop {
                match writes.write(3, &[0xaa; 512], false).await {
                    Ok(()) => count.set(count.get() + 1),
                    Err(e) => return (e, of.lost_claim().is_some()),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        passes(3 * SECOND).await;
        pair.a.pause(60 * SECOND);
        passes(SECOND).await;
        let before = written.get();
        assert!(before > 0);
        let other = open(&b, stated(&b, 2)).await.unwrap();
        let client = client(&b, &other);
        client.write(3, &[0xbb; 512], true).await.unwrap();
        passes(60 * SECOND).await;
        assert_eq!(load.join().await, Some((Error::Gone, true)));
        // The write that was in flight when it was stopped may have completed.
        assert!(written.get() <= before + 1, "{} {before}", written.get());
        assert_eq!(client.read(3, 1).await.unwrap().to_vec(), [0xbb; 512]);
    });
}

/// While the heartbeat cannot be written no data are written; afterwards writes go on.
#[test]
fn writes_pause_while_the_heartbeat_fails() {
    two_hosts(|pair, world| async move {
        let a = core_of(&pair.a).await;
        let file = create(&a, claim(&a, 1)).await;
        let client = client(&a, &file);
        client.write(0, &[1; 512], true).await.unwrap();
        let began = world.now();
        pair.disk.set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        passes(LEASE_DURATION + SECOND).await;
        // The disk would complete it.
        pair.disk.set_faults(DiskFaults::default());
        pair.disk.hold_completions();
        let late = {
            let client = client.clone();
            pair.a.run(move |_| async move { client.write(1, &[2; 512], false).await })
        };
        passes(10 * SECOND).await;
        let in_flight = pair.disk.in_flight();
        assert!(in_flight <= 1, "only the heartbeat is under way: {in_flight}");
        pair.disk.release_completions();
        assert_eq!(late.join().await, Some(Ok(())));
        assert!(world.now() - began > LEASE_DURATION);
        client.write(2, &[3; 512], true).await.unwrap();
        // For longer than an operation waits: it fails, but the image stays usable.
        pair.disk.set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        passes(LEASE_DURATION + SECOND).await;
        let failed = client.write(1, &[4; 512], false).await;
        assert!(matches!(failed, Err(Error::Unwritable { .. })), "{failed:?}");
        pair.disk.set_faults(DiskFaults::default());
        passes(SECOND).await;
        client.write(1, &[5; 512], true).await.unwrap();
    });
}

fn record_at(disk: &DiskControl, at: u64, copy: OwnerRecordKind) -> OwnerRecord {
    let bytes = disk.read_visible(at, OWNER_RECORD_BYTES);
    OwnerRecord::parse(bytes.as_slice().try_into().unwrap(), copy).unwrap()
}

/// A virtual machine that was copied with its memory renews the heartbeat of the original.
#[test]
fn a_cloned_machine_is_detected_by_its_heartbeat() {
    two_hosts(|pair, _| async move {
        let a = core_of(&pair.a).await;
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        passes(5 * SECOND).await;
        let beat = record_at(&pair.disk, HEARTBEAT_OFFSET, OwnerRecordKind::Heartbeat);
        let copys = OwnerRecord { heartbeat: beat.heartbeat + 1, nonce: 1, ..beat };
        pair.disk.write_durable(HEARTBEAT_OFFSET, &copys.to_bytes(OwnerRecordKind::Heartbeat));
        passes(3 * SECOND).await;
        assert!(hold.lost_claim().is_some() && hold.lease().is_revoked());
    });
}

#[test]
fn a_heartbeat_lost_with_power_is_not_another_machine() {
    two_hosts(|pair, _| async move {
        let a = core_of(&pair.a).await;
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        passes(5 * SECOND).await;
        let old = pair.disk.read_visible(HEARTBEAT_OFFSET, OWNER_RECORD_BYTES);
        passes(5 * SECOND).await;
        pair.disk.write_durable(HEARTBEAT_OFFSET, &old);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost_claim(), None);
        assert!(hold.lease().is_valid(&a));
    });
}

#[test]
fn one_damaged_claim_copy_is_rewritten_two_mean_a_foreign_disk() {
    two_hosts(|pair, _| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        let life = record_at(&pair.disk, CLAIM_OFFSET, OwnerRecordKind::Claim).claim_id;
        pair.disk.flip_bit(CLAIM_OFFSET + 60, 1);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost_claim(), None);
        assert_eq!(record_at(&pair.disk, CLAIM_OFFSET, OwnerRecordKind::Claim).claim_id, life);
        pair.disk.write_durable(CLAIM_OFFSET, &[0x5a; OWNER_RECORD_BYTES]);
        pair.disk.write_durable(CLAIM_COPY_OFFSET, &[0x5a; OWNER_RECORD_BYTES]);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost_claim().map(|lost| lost.new_owner), Some(None));
        // Damaged, so that its owner is unknown.
        for (at, copy) in [
            (CLAIM_OFFSET, OwnerRecordKind::Claim),
            (CLAIM_COPY_OFFSET, OwnerRecordKind::ClaimCopy),
        ] {
            pair.disk.write_durable(at, &record().to_bytes(copy));
            pair.disk.flip_bit(at + 60, 1);
        }
        let unclear = take(&b, claim(&b, 2)).await.unwrap_err();
        assert!(matches!(unclear, ClaimError::Refused(ClaimRefusal::OwnerUnknown(_))), "{unclear}");
        take(&b, stated(&b, 2)).await.unwrap();
    });
}

fn record() -> OwnerRecord {
    let id = Uuid::from_u128;
    OwnerRecord {
        claim_generation: 1,
        heartbeat: 0,
        nonce: 0,
        claim_id: id(1),
        subject: ClaimSubject { set_id: id(2), part_id: id(3) },
        owner: NodeIdentity {
            node_id: id(4),
            boot_instance: id(5),
            cluster_id: None,
            node_number: 0,
            name: wire::ShortText::new(""),
            host: wire::ShortText::new("srv9"),
        },
        written_wall_time: SECOND,
        heartbeat_interval_ms: 2000,
        lease_ms: 5000,
        state: OwnerState::Held,
    }
}

const POOL: Uuid = Uuid::from_u128(7);

fn disks() -> Vec<PathBuf> {
    (0..3).map(|n| PathBuf::from(format!("/dev/d{n}"))).collect()
}

fn creating(claim: Option<ClaimRequest>) -> CreatePool {
    let new = |path| NewDisk { path, overwrite: Vec::new() };
    CreatePool {
        id: POOL,
        name: "tank".into(),
        redundancy: Redundancy::Parity,
        columns: None,
        strip_bytes: 64 << 10,
        has_checksums: false,
        max_cores: 1,
        disks: disks().into_iter().map(new).collect(),
        spares: Vec::new(),
        buffered: false,
        claim,
    }
}

fn opening(paths: Vec<PathBuf>, claim: Option<ClaimRequest>) -> OpenPool {
    OpenPool { id: POOL, paths, missing_disks: Vec::new(), buffered: false, claim }
}

const IN_POOL: NewPoolVolume =
    NewPoolVolume { id: VOLUME, bytes: 8 << 20, block_size: 512, is_thick: false };

/// Three disks of both hosts.
fn pool_pair(pair: &Pair) {
    for path in disks() {
        pair.a.add_disk(&path, DiskSetup::device(64 * MIB));
        pair.b.share_disk(&path, &pair.a);
    }
}

async fn served(core: &Core, pool: &Rc<Pool>) -> (Rc<CorePool>, TestClient) {
    let core_pool = CorePool::attach_on_owner_core(core, pool, 0).await.unwrap();
    let dev = core_pool.open_volume(VOLUME).await.unwrap();
    (core_pool, TestClient::new(&dev, core.buffer_pool()))
}

#[test]
fn a_pool_in_use_elsewhere_is_refused_with_any_subset_of_its_disks() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
        pool.create_volume(&IN_POOL).await.unwrap();
        let (core_pool, client) = served(&a, &pool).await;
        client.write(0, &[1; 512], true).await.unwrap();
        for paths in [disks(), disks()[1..].to_vec(), disks()[..1].to_vec()] {
            let refused = Pool::open(&b, &opening(paths, claim(&b, 2))).await.unwrap_err();
            let text = refused.to_string();
            assert!(text.contains("node a on host srv1"), "{text}");
            assert!(text.contains("windrose pool open tank --take-over"), "{text}");
        }
        let refused = Pool::open(&b, &opening(disks(), stated(&b, 2))).await.unwrap_err();
        assert!(refused.to_string().contains("its heartbeat moves"), "{refused}");
        // Its disks cannot be made members of another pool either.
        let overwrite: Vec<String> = disks().iter().map(|p| p.display().to_string()).collect();
        let new = |path| NewDisk { path, overwrite: overwrite.clone() };
        let taken = disks().into_iter().map(new).collect();
        let other = CreatePool { id: Uuid::from_u128(8), disks: taken, ..creating(claim(&b, 2)) };
        let refused = Pool::create(&b, &other).await.unwrap_err();
        assert!(refused.to_string().contains("its heartbeat moves"), "{refused}");
        client.write(1, &[2; 512], true).await.unwrap();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [1; 512]);
        assert_eq!(pool.report().write_error, None);
        drop(client);
        core_pool.close().await.unwrap();
        pool.close().await.unwrap();
        // Closed in order, it can be opened by any machine.
        let pool = Pool::open(&b, &opening(disks(), claim(&b, 2))).await.unwrap();
        let (_seat, client) = served(&b, &pool).await;
        assert_eq!(client.read(1, 1).await.unwrap().to_vec(), [2; 512]);
    });
}

/// With `--take-over`, a pool is taken from a machine that is stopped; when that one goes on, it
/// serves nothing.
#[test]
fn a_taken_over_pool_stops_at_its_former_owner() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let created = pair.a.run(move |a| async move {
            let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
            pool.create_volume(&IN_POOL).await.unwrap();
            let (core_pool, client) = served(&a, &pool).await;
            client.write(0, &[1; 512], true).await.unwrap();
            (pool, core_pool, client)
        });
        let (pool, _seat, client) = created.join().await.unwrap();
        pair.a.pause(60 * SECOND);
        passes(SECOND).await;
        // A pool that was not released needs the option, with all of its disks or two of them.
        assert!(Pool::open(&b, &opening(disks(), claim(&b, 2))).await.is_err());
        let others = Pool::open(&b, &opening(disks(), stated(&b, 2))).await.unwrap();
        let (_other_seat, others_client) = served(&b, &others).await;
        others_client.write(0, &[2; 512], true).await.unwrap();
        passes(60 * SECOND).await;
        let written = pair.a.run(move |_| async move { client.write(0, &[3; 512], true).await });
        assert!(written.join().await.unwrap().is_err());
        let report = pool.report();
        let broken = report.write_error.unwrap();
        assert!(broken.contains("node b on host srv2"), "{broken}");
        let refused = pair.a.run(move |_| async move { pool.delete_volume(VOLUME).await });
        assert!(refused.join().await.unwrap().is_err(), "no version is written");
        assert_eq!(others_client.read(0, 1).await.unwrap().to_vec(), [2; 512]);
        assert_eq!(others.report().write_error, None);
        drop(a);
    });
}

/// A disk that was detached here and then claimed by another machine is not reattached.
#[test]
fn a_disk_claimed_elsewhere_is_not_reattached() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
        let lost = pair.a.disk(&disks()[2]).unwrap();
        lost.unplug();
        pool.create_volume(&IN_POOL).await.unwrap();
        passes(SECOND).await;
        pool.reattach_found(disks()).await;
        lost.plug();
        let disk = b.open_disk(&disks()[2], OpenOptions::new()).await.unwrap();
        let subject = ClaimSubject { set_id: Uuid::from_u128(70), part_id: Uuid::from_u128(71) };
        let memory = b.buffer_pool().account();
        let of = (subject, &stated(&b, 2).unwrap());
        let _hold = DiskClaim::acquire(&b, &disk, &memory, of, None).await.unwrap();
        pool.reattach_found(disks()).await;
        passes(20 * SECOND).await;
        let state = pool.report().disks[2].state;
        assert_eq!(state, pool::PoolDiskState::Detached);
        pool.create_volume(&NewPoolVolume { id: Uuid::from_u128(9), ..IN_POOL }).await.unwrap();
    });
}
