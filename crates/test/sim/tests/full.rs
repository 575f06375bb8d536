//! Both copies of a thin volume are full: clients of either node get an error, and nothing else
//! changes.

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Error, Lba, MemoryClass, Request, RequestError};
use mirror::MirrorSettings;
use rt::buf::copy_in;
use rt::sim::{Rng, World, WorldSetup, run};

use crate::mirrored::{BLOCK, Node, Store, node, prepare, record, start, wait_until};

const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Longer than any step of a test: writes in flight have finished.
const SETTLE_TIME: Duration = Duration::from_secs(30);

/// Two nodes with a volume of 1024 blocks.
struct Pair {
    nodes: [Rc<Node>; 2],
    store: Store,
}

impl Pair {
    /// Both serve.
    async fn begin(world: &World) -> Result<Rc<Self>, String> {
        let nodes = [1, 2].map(|number| node(world, number));
        for node in &nodes {
            prepare(node, 1).await?;
        }
        let store = record(0, &nodes);
        let stores = Rc::new(vec![store.clone()]);
        start(&nodes[0], &nodes[1], &stores);
        start(&nodes[1], &nodes[0], &stores);
        let pair = Rc::new(Self { nodes, store });
        wait_until("both serve", TEST_TIMEOUT, || pair.is_in_sync()).await?;
        Ok(pair)
    }

    fn serves(&self, n: usize) -> bool {
        self.nodes[n].open.borrow().first().is_some_and(|(mirror, _)| mirror.is_serving())
    }

    /// Both are in sync, and serve.
    fn is_in_sync(&self) -> bool {
        self.store.0.record.borrow().in_sync.len() == 2 && self.serves(0) && self.serves(1)
    }

    fn epoch(&self) -> u64 {
        self.store.0.record.borrow().epoch.0
    }

    /// Limits the space on a node to so many blocks; `None`: no limit.
    fn limit_free_space(&self, n: usize, blocks: Option<u64>) {
        let host = &self.nodes[n].host;
        let space = blocks.map(|blocks| host.space_used() + blocks * BLOCK as u64);
        host.update_setup(|setup| setup.space_bytes = space);
    }

    async fn execute(&self, n: usize, request: Request) -> Result<Vec<u8>, RequestError> {
        let node = &self.nodes[n];
        let core = node.core.borrow().clone().expect("the node runs");
        let owner = Rc::clone(&node.open.borrow()[0].1);
        let account = core.buffer_pool().account();
        let work = node.host.run(move |_| async move {
            owner.execute(request, &account).await.map(|found| found.to_vec())
        });
        work.join().await.expect("the node runs")
    }

    async fn data(&self, n: usize, bytes: &[u8]) -> block::Bufs {
        let core = self.nodes[n].core.borrow().clone().expect("the node runs");
        let credit =
            core.buffer_pool().account().credit(bytes.len(), MemoryClass::UnsolicitedData).await;
        copy_in(&credit.expect("few bytes"), bytes)
    }

    async fn write(&self, n: usize, at: u64, blocks: usize, value: u8) -> Result<(), RequestError> {
        let data = self.data(n, &vec![value; blocks * BLOCK]).await;
        self.execute(n, Request::Write { at: Lba(at), data, fua: false }).await.map(drop)
    }

    async fn unmap(&self, n: usize, at: u64, blocks: u64) -> Result<(), RequestError> {
        let ranges = vec![Blocks::new(Lba(at), blocks)];
        self.execute(n, Request::Unmap { ranges }).await.map(drop)
    }

    async fn read(&self, n: usize, at: u64, blocks: u64) -> Result<Vec<u8>, RequestError> {
        self.execute(n, Request::Read { range: Blocks::new(Lba(at), blocks) }).await
    }

    /// What both nodes read, which must be equal.
    async fn reads(&self, at: u64, blocks: u64) -> Result<Vec<u8>, String> {
        let first = self.read(0, at, blocks).await.map_err(|e| format!("{e:?}"))?;
        let second = self.read(1, at, blocks).await.map_err(|e| format!("{e:?}"))?;
        if first == second { Ok(first) } else { Err(format!("blocks from {at} on differ")) }
    }

    /// Checks that all copies are equal.
    async fn equal(&self) -> Result<(), String> {
        let primary = self.store.0.record.borrow().primary;
        let node = self.nodes.iter().find(|n| n.id == primary).ok_or("no primary")?;
        let mirror = node.open.borrow()[0].0.clone();
        let work = node.host.run(move |_| async move { mirror.verify(None).await });
        let verified = work.join().await.ok_or("it crashed")?.map_err(|e| e.to_string())?;
        match verified.mismatches.is_empty() && verified.unreadable_ranges == 0 {
            true => Ok(()),
            false => Err(format!("{verified:?}")),
        }
    }
}

const FULL: RequestError = RequestError::Device(Error::NoSpace);

/// Blocks of a refused write: each holds its old value or the new one.
fn is_old_or_new(found: &[u8], new: u8) -> bool {
    let uniform = |block: &[u8]| block.iter().all(|b| *b == 0) || block.iter().all(|b| *b == new);
    found.chunks(BLOCK).all(uniform)
}

async fn refused_by_both(world: World) -> Result<(), String> {
    let pair = Pair::begin(&world).await?;
    pair.write(0, 0, 64, 1).await.map_err(|e| format!("{e:?}"))?;
    let epoch = pair.epoch();
    // The copies may differ: a write that one applied in part, the other applied in a smaller part.
    pair.limit_free_space(0, Some(3));
    pair.limit_free_space(1, Some(2));
    for (n, at, value) in [(1, 200, 2), (0, 300, 3), (1, 400, 4), (0, 500, 5)] {
        assert_eq!(pair.write(n, at, 8, value).await, Err(FULL), "at node {n}");
        let found = pair.reads(at, 8).await?;
        assert!(is_old_or_new(&found, value), "blocks from {at} on");
    }
    let compare = pair.data(1, &[0; BLOCK]).await;
    let write = pair.data(1, &[9; BLOCK]).await;
    let request = Request::CompareAndWrite { at: Lba(600), compare, write, fua: false };
    assert_eq!(pair.execute(1, request).await, Err(FULL));
    let range = Blocks::new(Lba(700), 64);
    let zeroes = Request::Zero { range, unmap: false, fua: false };
    assert_eq!(pair.execute(1, zeroes).await, Err(FULL));
    assert_eq!(pair.reads(700, 64).await?, vec![0; 64 * BLOCK]);
    // Operations that need no space continue.
    for n in [0, 1] {
        assert_eq!(pair.write(n, 10, 8, 6).await, Ok(()), "at node {n}");
        assert_eq!(pair.reads(10, 8).await?, vec![6; 8 * BLOCK]);
    }
    // Freed space can be written again, at either node, and no more than that.
    pair.unmap(1, 0, 8).await.map_err(|e| format!("{e:?}"))?;
    assert_eq!(pair.write(0, 800, 4, 7).await, Ok(()));
    assert_eq!(pair.write(1, 804, 4, 7).await, Ok(()));
    assert_eq!(pair.reads(800, 8).await?, vec![7; 8 * BLOCK]);
    assert_eq!(pair.write(1, 900, 8, 8).await, Err(FULL));
    tokio::time::sleep(SETTLE_TIME).await;
    assert!(pair.is_in_sync() && pair.epoch() == epoch, "neither copy has left");
    pair.equal().await
}

#[test]
fn a_write_without_space_on_any_copy_is_refused_and_all_stay_in_sync() {
    for seed in 0..10 {
        let outcome = run(WorldSetup::new(seed), refused_by_both);
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// Many concurrent writes: near the end of the space each copy accepts different ones.
async fn refused_by_each(world: World) -> Result<(), String> {
    let pair = Pair::begin(&world).await?;
    let epoch = pair.epoch();
    pair.limit_free_space(0, Some(40));
    pair.limit_free_space(1, Some(40));
    let mut clients = Vec::new();
    for client in 0..8_u64 {
        let pair = Rc::clone(&pair);
        clients.push(tokio::task::spawn_local(async move {
            let mut refused = 0;
            for turn in 0..10 {
                let at = 100 * client + 8 * turn;
                let node = usize::try_from((client + turn) % 2).expect("two nodes");
                match pair.write(node, at, 3, 1).await {
                    Ok(()) => {}
                    Err(e) if e == FULL => refused += 1,
                    Err(e) => return Err(format!("{e:?}")),
                }
                let found = pair.reads(at, 3).await?;
                assert!(is_old_or_new(&found, 1), "blocks from {at} on");
            }
            Ok(refused)
        }));
    }
    let mut refused = 0;
    for client in clients {
        refused += client.await.map_err(|e| e.to_string())??;
    }
    assert!(refused > 0, "there is room for half of it");
    tokio::time::sleep(SETTLE_TIME).await;
    assert!(pair.is_in_sync() && pair.epoch() == epoch, "neither copy has left");
    pair.equal().await
}

#[test]
fn copies_that_fill_up_under_many_writes_stay_in_sync() {
    for seed in 0..10 {
        let outcome = run(WorldSetup::new(seed), refused_by_each);
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// One copy is full, and the other has space: it continues, and the full one returns when it has
/// space again.
async fn full_at_one(world: World) -> Result<(), String> {
    let pair = Pair::begin(&world).await?;
    for full in [1, 0] {
        pair.limit_free_space(full, Some(2));
        let (other, at) = (1 - full, 100 + 200 * full as u64);
        assert_eq!(pair.write(other, at, 32, 3).await, Ok(()));
        wait_until("the full one is out", TEST_TIMEOUT, || {
            !pair.is_in_sync() && pair.serves(other)
        })
        .await?;
        assert_eq!(pair.write(other, at + 50, 32, 4).await, Ok(()));
        pair.limit_free_space(full, None);
        wait_until("it is back", TEST_TIMEOUT, || pair.is_in_sync()).await?;
        assert_eq!(pair.reads(at, 32).await?, vec![3; 32 * BLOCK]);
        assert_eq!(pair.reads(at + 50, 32).await?, vec![4; 32 * BLOCK]);
    }
    pair.equal().await
}

#[test]
fn a_full_copy_leaves_and_rejoins_once_it_has_space() {
    for seed in 0..3 {
        let outcome = run(WorldSetup::new(seed), full_at_one);
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// One copy is out of sync, and gets space; the other one is full now, and a client keeps retrying
/// writes there.
async fn hammered(world: World) -> Result<(), String> {
    let pair = Pair::begin(&world).await?;
    pair.limit_free_space(1, Some(2));
    assert_eq!(pair.write(0, 100, 32, 3).await, Ok(()));
    wait_until("the full one is out", TEST_TIMEOUT, || !pair.is_in_sync() && pair.serves(0))
        .await?;
    pair.limit_free_space(0, Some(0));
    pair.limit_free_space(1, None);
    let client = async {
        loop {
            match pair.write(0, 400, 8, 4).await {
                Err(e) if e == FULL => tokio::time::sleep(Duration::from_millis(5)).await,
                other => return other,
            }
        }
    };
    let ended = tokio::time::timeout(TEST_TIMEOUT, client).await;
    // It was resynced, and the volume continues with it.
    let ended = ended.map_err(|_| "the one with room does not come back")?;
    assert!(matches!(ended, Ok(()) | Err(RequestError::Device(Error::Fenced))), "{ended:?}");
    wait_until("the one with room goes on", TEST_TIMEOUT, || !pair.is_in_sync() && pair.serves(1))
        .await?;
    assert_eq!(pair.write(1, 500, 32, 5).await, Ok(()));
    pair.limit_free_space(0, None);
    wait_until("both are back", TEST_TIMEOUT, || pair.is_in_sync()).await?;
    assert_eq!(pair.reads(100, 32).await?, vec![3; 32 * BLOCK]);
    assert!(is_old_or_new(&pair.reads(400, 8).await?, 4));
    assert_eq!(pair.reads(500, 32).await?, vec![5; 32 * BLOCK]);
    pair.equal().await
}

#[test]
fn a_copy_with_space_rejoins_while_a_client_retries_at_a_full_one() {
    for seed in 0..5 {
        let outcome = run(WorldSetup::new(seed), hammered);
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// The lease of the primary lapses and returns, while clients are to be turned away and a write
/// waits for the outcome: no other node has noticed.
async fn turned_away_for_a_moment(world: World) -> Result<(), String> {
    let pair = Pair::begin(&world).await?;
    let primary = usize::from(pair.store.0.record.borrow().primary == pair.nodes[1].id);
    let [here, there] = [primary, 1 - primary].map(|n| pair.nodes[n].host.clone());
    let rng = Rng::new(world.seed(), "moments");
    let lease = MirrorSettings::default().leases.lease();
    pair.limit_free_space(0, Some(0));
    pair.limit_free_space(1, Some(0));
    tokio::time::sleep(rng.duration_between(Duration::ZERO, lease)).await;
    let mirror = pair.nodes[primary].open.borrow()[0].0.clone();
    // It serves: that changes nothing yet.
    mirror.set_holds_commands(false);
    let client = Rc::clone(&pair);
    let written = tokio::task::spawn_local(async move { client.write(primary, 200, 8, 2).await });
    tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(12))).await;
    world.set_link(&there, &here, |l| l.is_cut = true);
    // No replica is removed as soon as that.
    tokio::time::sleep(lease).await;
    world.heal(&there, &here);
    tokio::time::sleep(lease).await;
    mirror.set_holds_commands(true);
    let ended = tokio::time::timeout(TEST_TIMEOUT, written).await;
    let ended = ended.map_err(|_| "its client waits for ever")?.map_err(|e| e.to_string())?;
    assert!(matches!(ended, Err(FULL | RequestError::Device(Error::Fenced))), "{ended:?}");
    wait_until("both serve", TEST_TIMEOUT, || pair.is_in_sync()).await?;
    let found = tokio::time::timeout(TEST_TIMEOUT, pair.reads(200, 8)).await;
    let found = found.map_err(|_| "no process reads there any more")??;
    assert!(is_old_or_new(&found, 2));
    pair.equal().await
}

#[test]
fn a_refused_write_releases_its_range_after_clients_were_rejected() {
    for seed in 0..60 {
        let outcome = run(WorldSetup::new(seed), turned_away_for_a_moment);
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}
