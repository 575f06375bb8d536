//! A replica that leaves and returns, again and again: it is in sync soon each time, because a
//! successful join does not count as a failure.

use std::rc::Rc;
use std::time::Duration;

use rt::sim::{World, WorldSetup, run};

use crate::mirrored::{Node, Store, node, prepare, record, start, wait_until};

/// Time limit for anything but a join.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a replica may be out of sync without faults: sessions are redialled, and a joining
/// replica checks once a second.
const REJOIN_LIMIT: Duration = Duration::from_secs(5);

/// Two nodes that serve one volume.
struct Pair {
    nodes: [Rc<Node>; 2],
    store: Store,
}

impl Pair {
    async fn new(world: &World) -> Result<Self, String> {
        let nodes = [1, 2].map(|number| node(world, number));
        for node in &nodes {
            prepare(node, 1).await?;
        }
        let store = record(0, &nodes);
        let stores = Rc::new(vec![store.clone()]);
        start(&nodes[0], &nodes[1], &stores);
        start(&nodes[1], &nodes[0], &stores);
        let pair = Self { nodes, store };
        wait_until("both serve", TEST_TIMEOUT, || pair.serves(0) && pair.serves(1)).await?;
        Ok(pair)
    }

    fn serves(&self, node: usize) -> bool {
        self.nodes[node].open.borrow().first().is_some_and(|(mirror, _)| mirror.is_serving())
    }

    fn in_sync(&self) -> usize {
        self.store.0.record.borrow().in_sync.len()
    }

    async fn wait_in_sync(&self) -> Result<(), String> {
        wait_until("it is back", REJOIN_LIMIT, || self.in_sync() == 2 && self.serves(1)).await
    }

    /// Makes the second node leave or return.
    async fn drain(&self, drained: bool) {
        let mirror = self.nodes[1].open.borrow()[0].0.clone();
        let host = self.nodes[1].host.clone();
        let change = host.run(move |_| async move {
            mirror.set_join_allowed(!drained);
            if drained {
                mirror.leave();
            }
        });
        change.join().await;
    }
}

async fn drained_and_resumed(world: World) -> Result<(), String> {
    let pair = Pair::new(&world).await?;
    for _ in 0..12 {
        pair.drain(true).await;
        wait_until("it is out", TEST_TIMEOUT, || pair.in_sync() == 1).await?;
        pair.drain(false).await;
        pair.wait_in_sync().await?;
    }
    Ok(())
}

async fn cut_off_now_and_then(world: World) -> Result<(), String> {
    let pair = Pair::new(&world).await?;
    for _ in 0..12 {
        world.partition(&pair.nodes[0].host, &pair.nodes[1].host);
        wait_until("one is out", TEST_TIMEOUT, || pair.in_sync() == 1).await?;
        world.heal(&pair.nodes[0].host, &pair.nodes[1].host);
        wait_until("both are back", REJOIN_LIMIT, || pair.in_sync() == 2).await?;
        tokio::time::sleep(Duration::from_secs(40)).await;
    }
    Ok(())
}

#[test]
fn a_node_that_is_drained_and_resumed_again_and_again_is_in_sync_soon_each_time() {
    let outcome = run(WorldSetup::new(22), drained_and_resumed);
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_node_that_was_cut_off_is_in_sync_soon_each_time_if_it_had_been_for_long() {
    let outcome = run(WorldSetup::new(23), cut_off_now_and_then);
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}
