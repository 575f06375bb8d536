//! A replica that goes out and comes back, again and again: it is in sync soon each time, as an
//! attempt that succeeded is no failure.

use std::rc::Rc;
use std::time::Duration;

use rt::sim::{Setup, World, run};

use crate::mirrored::{Node, Store, node, prepare, record, start, until};

/// How long anything may take that is no attempt to join.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a replica may be out of sync once nothing is in its way: sessions are dialled again,
/// and a joiner looks, once a second.
const SOON: Duration = Duration::from_secs(5);

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
        until("both serve", PATIENCE, || pair.serves(0) && pair.serves(1)).await?;
        Ok(pair)
    }

    fn serves(&self, node: usize) -> bool {
        self.nodes[node].open.borrow().first().is_some_and(|(mirror, _)| mirror.serves())
    }

    fn in_sync(&self) -> usize {
        self.store.0.record.borrow().in_sync.len()
    }

    async fn back(&self) -> Result<(), String> {
        until("it is back", SOON, || self.in_sync() == 2 && self.serves(1)).await
    }

    /// Lets the second node leave, or come back.
    async fn drain(&self, drained: bool) {
        let mirror = self.nodes[1].open.borrow()[0].0.clone();
        let host = self.nodes[1].host.clone();
        let told = host.run(move |_| async move {
            mirror.set_may_join(!drained);
            if drained {
                mirror.leave();
            }
        });
        told.join().await;
    }
}

async fn drained_and_resumed(world: World) -> Result<(), String> {
    let pair = Pair::new(&world).await?;
    for _ in 0..12 {
        pair.drain(true).await;
        until("it is out", PATIENCE, || pair.in_sync() == 1).await?;
        pair.drain(false).await;
        pair.back().await?;
    }
    Ok(())
}

async fn cut_off_now_and_then(world: World) -> Result<(), String> {
    let pair = Pair::new(&world).await?;
    for _ in 0..12 {
        world.partition(&pair.nodes[0].host, &pair.nodes[1].host);
        until("one is out", PATIENCE, || pair.in_sync() == 1).await?;
        world.heal(&pair.nodes[0].host, &pair.nodes[1].host);
        until("both are back", SOON, || pair.in_sync() == 2).await?;
        tokio::time::sleep(Duration::from_secs(40)).await;
    }
    Ok(())
}

#[test]
fn a_node_that_is_drained_and_resumed_again_and_again_is_in_sync_soon_each_time() {
    let outcome = run(Setup::new(22), drained_and_resumed);
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_node_that_was_cut_off_is_in_sync_soon_each_time_if_it_had_been_for_long() {
    let outcome = run(Setup::new(23), cut_off_now_and_then);
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}
