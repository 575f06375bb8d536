//! A thousand mirrored volumes on the smallest memory pool (RFD 0037): idle ones hold no memory,
//! and when all of them are busy at once, at both nodes, every command ends.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Lba, MemoryClass, Request};
use rt::buf::copy_in;
use rt::sim::{World, WorldSetup, run};

use crate::mirrored::{BLOCK, Node, node, prepare, record, start, wait_until};

const VOLUMES: u16 = 1000;

/// One client of a volume at a node: concurrent writes and reads of several sizes.
fn load(node: &Node, volume: usize, left: &Rc<Cell<usize>>) {
    let core = node.core.borrow().clone().expect("the node runs");
    let owner = Rc::clone(&node.open.borrow()[volume].1);
    let account = core.buffer_pool().account();
    let sizes = [1, 1, 1, 1, 16, if volume.is_multiple_of(50) { 256 } else { 1 }];
    for (blocks, at) in sizes.into_iter().zip([0, 1, 2, 3, 16, 256]) {
        left.update(|n| n + 2);
        let (owner, account, done) = (Rc::clone(&owner), account.clone(), Rc::clone(left));
        node.host.run(move |_| async move {
            let bytes = vec![volume as u8; blocks * BLOCK];
            let credit =
                account.credit(bytes.len(), MemoryClass::UnsolicitedData).await.expect("it fits");
            let data = copy_in(&credit, &bytes);
            drop(credit);
            let write = Request::Write { at: Lba(at), data, fua: false };
            owner.execute(write, &account).await.expect("a write succeeds");
            done.update(|n| n - 1);
            let read = Request::Read { range: Blocks::new(Lba(at), blocks as u64) };
            let found = owner.execute(read, &account).await.expect("a read succeeds");
            assert_eq!(found.to_vec(), bytes);
            done.update(|n| n - 1);
        });
    }
}

fn is_memory_free(nodes: &[Rc<Node>]) -> bool {
    nodes.iter().all(|node| {
        let usage = node.core.borrow().as_ref().expect("the node runs").buffer_pool().usage();
        usage.free == usage.total && usage.overdrafts == 0
    })
}

async fn run_scenario(world: World, volumes: u16) -> Result<(), String> {
    let nodes = [1, 2].map(|number| node(&world, number));
    for node in &nodes {
        prepare(node, volumes).await?;
    }
    let stores = Rc::new((0..volumes).map(|v| record(v, &nodes)).collect::<Vec<_>>());
    for (node, other) in [(&nodes[0], &nodes[1]), (&nodes[1], &nodes[0])] {
        start(node, other, &stores);
    }
    let all = |node: &Rc<Node>| {
        let open = node.open.borrow();
        open.len() == usize::from(volumes) && open.iter().all(|(mirror, _)| mirror.is_serving())
    };
    wait_until("all volumes serve", Duration::from_secs(300), || nodes.iter().all(all)).await?;
    // Let the requests made by opening finish.
    wait_until("idle volumes hold nothing", Duration::from_secs(60), || is_memory_free(&nodes))
        .await?;
    let left = Rc::new(Cell::new(0));
    for volume in 0..usize::from(volumes) {
        // Only one node's clients at a time write the same blocks of a volume.
        load(&nodes[volume / 2 % 2], volume, &left);
    }
    wait_until("all commands end", Duration::from_secs(600), || left.get() == 0).await?;
    wait_until("all memory is back", Duration::from_secs(60), || is_memory_free(&nodes)).await
}

#[test]
fn a_thousand_mirrored_volumes_work_on_the_smallest_buffer_pool_and_hold_no_memory_when_idle() {
    let outcome = run(WorldSetup::new(37), |world| run_scenario(world, VOLUMES));
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}
