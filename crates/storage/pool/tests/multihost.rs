//! Two machines that reach one disk: which of them has it, and what becomes of the other.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use block::Error;
use block::testing::Client;
use disk::claim::{Copy, State};
use disk::{
    BEAT_AT, CLAIM_AT, Claim, HeldBy, Hold, Holding, NodeIdentity, NotTaken, OWNER_BYTES,
    OwnerRecord, Reason, Refusal, SECOND_AT, STOP, Subject,
};
use geometry::Level;
use image::{Create, File, Open, delete};
use pool::{CreatePool, NewDisk, NewPoolVolume, OpenPool, Pool, PoolSeat};
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
    let b = world.add_host("other", HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() });
    let disk = a.add_disk(LUN, DiskSetup::device(16 * MIB));
    b.share_disk(LUN, &a);
    Pair { a, b, disk }
}

fn node(core: &Core, n: u128) -> NodeIdentity {
    let name = if n == 1 { "a" } else { "b" };
    NodeIdentity::on(core, Uuid::from_u128(n), name, &format!("srv{n}"))
}

fn claim(core: &Core, n: u128) -> Option<Claim> {
    Some(Claim::of(node(core, n)))
}

fn stated(core: &Core, n: u128) -> Option<Claim> {
    Some(Claim { take_over: true, ..Claim::of(node(core, n)) })
}

async fn take(core: &Core, claim: Option<Claim>) -> Result<Hold, NotTaken> {
    let disk = core.open_disk(Path::new(LUN), OpenOptions::new()).await.unwrap();
    let subject = Subject { set: Uuid::from_u128(70), part: Uuid::from_u128(71) };
    let memory = core.pool().account();
    Hold::take(core, &disk, &memory, (subject, &claim.unwrap()), None).await
}

async fn open(core: &Core, claim: Option<Claim>) -> Result<Rc<File>, HeldBy> {
    match File::open(core, Path::new(LUN), &Open { claim, ..existing() }).await {
        Ok(file) => Ok(Rc::new(file)),
        Err(e) => match e.reason {
            Reason::Held(by) => Err(by),
            other => panic!("{other}"),
        },
    }
}

async fn create(core: &Core, claim: Option<Claim>) -> Rc<File> {
    let how = Create { claim, ..thin(4 * MIB) };
    Rc::new(File::create(core, Path::new(LUN), &how).await.unwrap())
}

fn two_hosts<Fut: Future<Output = ()>>(scene: impl FnOnce(Pair, World) -> Fut) {
    let setup = HostSetup { pool_bytes: 48 << 20, ..HostSetup::default() };
    succeed(1, setup, |world, a| scene(pair(&world, a), world));
}

async fn passes(time: Duration) {
    tokio::time::sleep(time).await;
}

#[test]
fn a_disk_that_another_machine_uses_is_refused_and_that_one_goes_on() {
    two_hosts(|pair, _| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let file = create(&a, claim(&a, 1)).await;
        let client = client(&a, &file);
        client.write(0, &[7; 512], true).await.unwrap();
        let refused = open(&b, claim(&b, 2)).await.unwrap_err();
        assert_eq!((refused.how, refused.node), (Holding::Owned, Uuid::from_u128(1)));
        let text = refused.to_string();
        assert!(text.contains("node a on host srv1") && text.contains("last seen"), "{text}");
        // Even if a person says so: its heartbeat moves.
        let refused = open(&b, stated(&b, 2)).await.unwrap_err();
        assert_eq!(refused.how, Holding::InUse, "{refused}");
        // Nor is it overwritten or deleted.
        let forced = Create { force: true, claim: claim(&b, 2), ..thin(4 * MIB) };
        let forced = File::create(&b, Path::new(LUN), &forced).await.unwrap_err();
        assert!(
            matches!(forced.reason, Reason::Held(HeldBy { how: Holding::InUse, .. })),
            "{forced}"
        );
        let deleted = delete(&b, Path::new(LUN), VOLUME, (false, true), claim(&b, 2)).await;
        assert!(matches!(deleted.unwrap_err().reason, Reason::Held(_)));
        client.write(1, &[8; 512], true).await.unwrap();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [7; 512]);
        assert_eq!(file.lost(), None);
    });
}

#[test]
fn what_was_released_is_taken_without_a_statement() {
    two_hosts(|pair, world| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let file = create(&a, claim(&a, 1)).await;
        file.release().await.unwrap();
        let began = world.now();
        open(&b, claim(&b, 2)).await.unwrap();
        assert!(world.now() - began < 2 * SECOND, "{:?}", world.now() - began);
        // Now it is the other one's.
        drop(file);
        assert_eq!(open(&a, claim(&a, 1)).await.unwrap_err().node, Uuid::from_u128(2));
    });
}

#[test]
fn an_owner_that_is_gone_is_taken_over_by_a_statement_only() {
    two_hosts(|pair, world| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        drop(create(&a, claim(&a, 1)).await);
        pair.a.power_cut();
        passes(100 * SECOND).await;
        assert_eq!(open(&b, claim(&b, 2)).await.unwrap_err().how, Holding::Owned);
        let began = world.now();
        let file = open(&b, stated(&b, 2)).await.unwrap();
        let waited = world.now() - began;
        assert!(waited > 2 * STOP && waited < 13 * SECOND, "{waited:?}");
        client(&b, &file).write(0, &[9; 512], true).await.unwrap();
        // The one before comes back, and finds it taken.
        let a = core_of(&pair.a).await;
        assert_eq!(open(&a, claim(&a, 1)).await.unwrap_err().node, Uuid::from_u128(2));
    });
}

#[test]
fn a_killed_process_has_its_disk_back_at_once_and_a_booted_machine_after_watching_it() {
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
        assert!(waited > 2 * STOP && waited < 13 * SECOND, "{waited:?}");
    });
}

/// Whenever two machines open a disk that nobody has, one of them has it.
#[test]
fn of_two_that_take_a_disk_at_the_same_moment_one_has_it() {
    for seed in 0..60 {
        let setup = HostSetup { pool_bytes: 8 << 20, ..HostSetup::default() };
        succeed(seed, setup, |world, a| async move {
            let pair = pair(&world, a);
            let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
            let apart = world.rng().time(Duration::ZERO, Duration::from_millis(seed));
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
            assert_eq!(hold.lost(), None, "seed {seed}");
            assert!(hold.verify().await.is_ok());
        });
    }
}

/// A machine that was stopped while its disk was taken over writes nothing when it goes on.
#[test]
fn a_process_that_was_stopped_writes_nothing_to_a_disk_that_was_taken_over() {
    two_hosts(|pair, _| async move {
        let b = core_of(&pair.b).await;
        let written = Rc::new(Cell::new(0));
        let count = Rc::clone(&written);
        // Within the host, all of which is stopped.
        let load = pair.a.run(move |a| async move {
            let of = create(&a, claim(&a, 1)).await;
            let writes = client(&a, &of);
            loop {
                match writes.write(3, &[0xaa; 512], false).await {
                    Ok(()) => count.set(count.get() + 1),
                    Err(e) => return (e, of.lost().is_some()),
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
        // The one that was under way when it was stopped may have been answered.
        assert!(written.get() <= before + 1, "{} {before}", written.get());
        assert_eq!(client.read(3, 1).await.unwrap().to_vec(), [0xbb; 512]);
    });
}

/// As long as the heartbeat cannot be written nothing is, and then all goes on.
#[test]
fn writes_stop_when_the_heartbeat_cannot_be_written_and_go_on_with_it() {
    two_hosts(|pair, world| async move {
        let a = core_of(&pair.a).await;
        let file = create(&a, claim(&a, 1)).await;
        let client = client(&a, &file);
        client.write(0, &[1; 512], true).await.unwrap();
        let began = world.now();
        pair.disk.set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        passes(STOP + SECOND).await;
        // It would succeed at the disk.
        pair.disk.set_faults(DiskFaults::default());
        pair.disk.hold();
        let late = {
            let client = client.clone();
            pair.a.run(move |_| async move { client.write(1, &[2; 512], false).await })
        };
        passes(10 * SECOND).await;
        let in_flight = pair.disk.in_flight();
        assert!(in_flight <= 1, "only the heartbeat is under way: {in_flight}");
        pair.disk.release();
        assert_eq!(late.join().await, Some(Ok(())));
        assert!(world.now() - began > STOP);
        client.write(2, &[3; 512], true).await.unwrap();
        // For longer than an operation waits: it fails, and the image lives.
        pair.disk.set_faults(DiskFaults { write_error: 1.0, ..DiskFaults::default() });
        passes(STOP + SECOND).await;
        let failed = client.write(1, &[4; 512], false).await;
        assert!(matches!(failed, Err(Error::Unwritable { .. })), "{failed:?}");
        pair.disk.set_faults(DiskFaults::default());
        passes(SECOND).await;
        client.write(1, &[5; 512], true).await.unwrap();
    });
}

fn record_at(disk: &DiskControl, at: u64, copy: Copy) -> OwnerRecord {
    let bytes = disk.peek(at, OWNER_BYTES);
    OwnerRecord::parse(bytes.as_slice().try_into().unwrap(), copy).unwrap()
}

/// A virtual machine that was copied with its memory renews the heartbeat of the original.
#[test]
fn a_copy_of_a_machines_memory_is_found_by_its_heartbeat() {
    two_hosts(|pair, _| async move {
        let a = core_of(&pair.a).await;
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        passes(5 * SECOND).await;
        let beat = record_at(&pair.disk, BEAT_AT, Copy::Beat);
        let copys = OwnerRecord { beat: beat.beat + 1, nonce: 1, ..beat };
        pair.disk.poke(BEAT_AT, &copys.to_bytes(Copy::Beat));
        passes(3 * SECOND).await;
        assert!(hold.lost().is_some() && hold.lease().is_lost());
    });
}

#[test]
fn a_heartbeat_that_was_lost_with_power_is_no_other_machine() {
    two_hosts(|pair, _| async move {
        let a = core_of(&pair.a).await;
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        passes(5 * SECOND).await;
        let old = pair.disk.peek(BEAT_AT, OWNER_BYTES);
        passes(5 * SECOND).await;
        pair.disk.poke(BEAT_AT, &old);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost(), None);
        assert!(hold.lease().is_valid(&a));
    });
}

#[test]
fn one_damaged_copy_of_the_claim_is_written_again_and_two_are_somebody_elses() {
    two_hosts(|pair, _| async move {
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let hold = take(&a, claim(&a, 1)).await.unwrap();
        let life = record_at(&pair.disk, CLAIM_AT, Copy::First).life;
        pair.disk.flip_bit(CLAIM_AT + 60, 1);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost(), None);
        assert_eq!(record_at(&pair.disk, CLAIM_AT, Copy::First).life, life);
        pair.disk.poke(CLAIM_AT, &[0x5a; OWNER_BYTES]);
        pair.disk.poke(SECOND_AT, &[0x5a; OWNER_BYTES]);
        passes(5 * SECOND).await;
        assert_eq!(hold.lost().map(|lost| lost.to), Some(None));
        // Damaged, so that nobody knows whose it is.
        for (at, copy) in [(CLAIM_AT, Copy::First), (SECOND_AT, Copy::Second)] {
            pair.disk.poke(at, &record().to_bytes(copy));
            pair.disk.flip_bit(at + 60, 1);
        }
        let unclear = take(&b, claim(&b, 2)).await.unwrap_err();
        assert!(matches!(unclear, NotTaken::Refused(Refusal::Unclear(_))), "{unclear}");
        take(&b, stated(&b, 2)).await.unwrap();
    });
}

fn record() -> OwnerRecord {
    let id = Uuid::from_u128;
    OwnerRecord {
        claim: 1,
        beat: 0,
        nonce: 0,
        life: id(1),
        subject: Subject { set: id(2), part: id(3) },
        owner: NodeIdentity {
            node: id(4),
            place: id(5),
            cluster: None,
            number: 0,
            name: wire::Text::new(""),
            host: wire::Text::new("srv9"),
        },
        written: SECOND,
        interval_ms: 2000,
        stop_ms: 5000,
        state: State::Held,
    }
}

const POOL: Uuid = Uuid::from_u128(7);

fn disks() -> Vec<PathBuf> {
    (0..3).map(|n| PathBuf::from(format!("/dev/d{n}"))).collect()
}

fn creating(claim: Option<Claim>) -> CreatePool {
    let new = |path| NewDisk { path, overwrite: Vec::new() };
    CreatePool {
        id: POOL,
        name: "tank".into(),
        level: Level::Parity,
        columns: None,
        strip_bytes: 64 << 10,
        checksums: false,
        rings: 1,
        disks: disks().into_iter().map(new).collect(),
        spares: Vec::new(),
        buffered: false,
        claim,
    }
}

fn opening(paths: Vec<PathBuf>, claim: Option<Claim>) -> OpenPool {
    OpenPool { id: POOL, paths, without: Vec::new(), buffered: false, claim }
}

const IN_POOL: NewPoolVolume =
    NewPoolVolume { id: VOLUME, bytes: 8 << 20, block_size: 512, thick: false };

/// Three disks of both hosts.
fn pool_pair(pair: &Pair) {
    for path in disks() {
        pair.a.add_disk(&path, DiskSetup::device(64 * MIB));
        pair.b.share_disk(&path, &pair.a);
    }
}

async fn served(core: &Core, pool: &Rc<Pool>) -> (Rc<PoolSeat>, Client) {
    let seat = PoolSeat::share(core, pool, 0).await.unwrap();
    let dev = seat.open(VOLUME).await.unwrap();
    (seat, Client::new(&dev, core.pool()))
}

#[test]
fn a_pool_that_another_machine_has_is_refused_whichever_of_its_disks_are_seen() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
        pool.create_volume(&IN_POOL).await.unwrap();
        let (seat, client) = served(&a, &pool).await;
        client.write(0, &[1; 512], true).await.unwrap();
        for paths in [disks(), disks()[1..].to_vec(), disks()[..1].to_vec()] {
            let refused = Pool::open(&b, &opening(paths, claim(&b, 2))).await.unwrap_err();
            let text = refused.to_string();
            assert!(text.contains("node a on host srv1"), "{text}");
            assert!(text.contains("windrose pool open tank --take-over"), "{text}");
        }
        let refused = Pool::open(&b, &opening(disks(), stated(&b, 2))).await.unwrap_err();
        assert!(refused.to_string().contains("its heartbeat moves"), "{refused}");
        // Nor is one of its disks made a member of another pool.
        let overwrite: Vec<String> = disks().iter().map(|p| p.display().to_string()).collect();
        let new = |path| NewDisk { path, overwrite: overwrite.clone() };
        let taken = disks().into_iter().map(new).collect();
        let other = CreatePool { id: Uuid::from_u128(8), disks: taken, ..creating(claim(&b, 2)) };
        let refused = Pool::create(&b, &other).await.unwrap_err();
        assert!(refused.to_string().contains("its heartbeat moves"), "{refused}");
        client.write(1, &[2; 512], true).await.unwrap();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [1; 512]);
        assert_eq!(pool.report().broken, None);
        drop(client);
        seat.close().await.unwrap();
        pool.close().await.unwrap();
        // Closed in order, it is anybody's.
        let pool = Pool::open(&b, &opening(disks(), claim(&b, 2))).await.unwrap();
        let (_seat, client) = served(&b, &pool).await;
        assert_eq!(client.read(1, 1).await.unwrap().to_vec(), [2; 512]);
    });
}

/// The statement takes a pool from a machine that is stopped; when that one goes on it serves nothing.
#[test]
fn a_pool_that_was_taken_over_stops_where_it_was_open() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let created = pair.a.run(move |a| async move {
            let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
            pool.create_volume(&IN_POOL).await.unwrap();
            let (seat, client) = served(&a, &pool).await;
            client.write(0, &[1; 512], true).await.unwrap();
            (pool, seat, client)
        });
        let (pool, _seat, client) = created.join().await.unwrap();
        pair.a.pause(60 * SECOND);
        passes(SECOND).await;
        // What was not given back needs to be said, with all disks or two of them.
        assert!(Pool::open(&b, &opening(disks(), claim(&b, 2))).await.is_err());
        let others = Pool::open(&b, &opening(disks(), stated(&b, 2))).await.unwrap();
        let (_other_seat, others_client) = served(&b, &others).await;
        others_client.write(0, &[2; 512], true).await.unwrap();
        passes(60 * SECOND).await;
        let written = pair.a.run(move |_| async move { client.write(0, &[3; 512], true).await });
        assert!(written.join().await.unwrap().is_err());
        let report = pool.report();
        let broken = report.broken.unwrap();
        assert!(broken.contains("node b on host srv2"), "{broken}");
        let refused = pair.a.run(move |_| async move { pool.delete_volume(VOLUME).await });
        assert!(refused.join().await.unwrap().is_err(), "no version is written");
        assert_eq!(others_client.read(0, 1).await.unwrap().to_vec(), [2; 512]);
        assert_eq!(others.report().broken, None);
        drop(a);
    });
}

/// A disk that was out here and is another machine's now does not come back.
#[test]
fn a_disk_that_another_machine_has_taken_meanwhile_does_not_come_back() {
    two_hosts(|pair, _| async move {
        pool_pair(&pair);
        let (a, b) = (core_of(&pair.a).await, core_of(&pair.b).await);
        let pool = Pool::create(&a, &creating(claim(&a, 1))).await.unwrap();
        let lost = pair.a.disk(&disks()[2]).unwrap();
        lost.pull_out();
        pool.create_volume(&IN_POOL).await.unwrap();
        passes(SECOND).await;
        pool.bring_back(disks()).await;
        lost.plug_in();
        let disk = b.open_disk(&disks()[2], OpenOptions::new()).await.unwrap();
        let subject = Subject { set: Uuid::from_u128(70), part: Uuid::from_u128(71) };
        let memory = b.pool().account();
        let of = (subject, &stated(&b, 2).unwrap());
        let _hold = Hold::take(&b, &disk, &memory, of, None).await.unwrap();
        pool.bring_back(disks()).await;
        passes(20 * SECOND).await;
        let state = pool.report().disks[2].state;
        assert_eq!(state, pool::PoolDiskState::Out);
        pool.create_volume(&NewPoolVolume { id: Uuid::from_u128(9), ..IN_POOL }).await.unwrap();
    });
}
