//! A replica resyncs while blocks that it needs are unreadable on all replicas: it reports what it
//! waits for, and is in sync once they have been written.

use std::rc::Rc;
use std::time::Duration;

use block::{Blocks, Lba, MemoryClass, Request};
use disk::LABEL_AREA_BYTES;
use rt::buf::copy_in;
use rt::sim::{BadDuration, BadRange, FailingOps, World, WorldSetup, run};

use crate::mirrored::{BLOCK, Node, node, path_of, prepare, record, start, wait_until};

/// Blocks that become unreadable.
const UNREADABLE_BLOCKS: std::ops::Range<u64> = 40..42;

const TEST_TIMEOUT: Duration = Duration::from_secs(120);

fn bytes(blocks: &std::ops::Range<u64>) -> std::ops::Range<u64> {
    blocks.start * BLOCK as u64..blocks.end * BLOCK as u64
}

/// The result of a request of a client of a node.
async fn execute(node: &Node, data: Option<Vec<u8>>, at: u64) -> Result<Vec<u8>, String> {
    let core = node.core.borrow().clone().ok_or("the node does not run")?;
    let owner = Rc::clone(&node.open.borrow()[0].1);
    let account = core.buffer_pool().account();
    let work = node.host.run(move |_| async move {
        let request = match data {
            Some(bytes) => {
                let credit = account.credit(bytes.len(), MemoryClass::UnsolicitedData).await;
                let data = copy_in(&credit.map_err(|e| format!("{e:?}"))?, &bytes);
                Request::Write { at: Lba(at), data, fua: false }
            }
            None => Request::Read { range: Blocks::new(Lba(at), 1) },
        };
        let done = owner.execute(request, &account).await;
        done.map(|found| found.to_vec()).map_err(|e| format!("{e:?}"))
    });
    work.join().await.ok_or("the node crashed")?
}

async fn run_scenario(world: World) -> Result<(), String> {
    let nodes = [1, 2].map(|number| node(&world, number));
    for node in &nodes {
        prepare(node, 1).await?;
    }
    let store = record(0, &nodes);
    let stores = Rc::new(vec![store.clone()]);
    let begin = |n: usize| start(&nodes[n], &nodes[1 - n], &stores);
    begin(0);
    begin(1);
    let serves = |n: usize| nodes[n].open.borrow().first().is_some_and(|(m, _)| m.is_serving());
    wait_until("both serve", TEST_TIMEOUT, || serves(0) && serves(1)).await?;
    execute(&nodes[0], Some(vec![1; 64 * BLOCK]), 0).await?;
    // One replica is down while all of that is written again, and loses none of its own data.
    nodes[1].host.kill();
    nodes[1].open.take();
    let in_sync = || store.0.record.borrow().in_sync.len();
    wait_until("the other goes on", TEST_TIMEOUT, || in_sync() == 1 && serves(0)).await?;
    execute(&nodes[0], Some(vec![2; 64 * BLOCK]), 0).await?;
    let spoiled = bytes(&UNREADABLE_BLOCKS);
    let disk = nodes[0].host.disk(path_of(0)).ok_or("there is no image")?;
    for block in UNREADABLE_BLOCKS {
        let at = LABEL_AREA_BYTES + block * BLOCK as u64;
        let bytes = at..at + BLOCK as u64;
        disk.add_bad_range(BadRange {
            bytes,
            ops: FailingOps::Reads,
            duration: BadDuration::Rewritten,
        });
    }
    begin(1);
    let unreadable = || {
        let open = nodes[0].open.borrow();
        open.first().map(|(mirror, _)| mirror.status().unreadable_data).unwrap_or_default()
    };
    let waits = || unreadable().first().is_some_and(|(_, what)| what.blocks_admission);
    wait_until("it says what it waits for", TEST_TIMEOUT, waits).await?;
    let (node, what) = unreadable().remove(0);
    assert_eq!((node, &what.ranges[..], what.bytes), (nodes[1].id, &[spoiled.clone()][..], 8192));
    tokio::time::sleep(TEST_TIMEOUT).await;
    assert!(in_sync() == 1 && waits(), "it waits for as long as that takes");
    assert!(
        execute(&nodes[0], None, UNREADABLE_BLOCKS.start).await.is_err(),
        "no zeroes are read there"
    );
    // Written in two steps, the resync ends without further help.
    execute(&nodes[0], Some(vec![3; BLOCK]), UNREADABLE_BLOCKS.start).await?;
    wait_until("less is waited for", TEST_TIMEOUT, || {
        unreadable().first().is_some_and(|(_, what)| what.bytes == BLOCK as u64)
    })
    .await?;
    execute(&nodes[0], Some(vec![3; BLOCK]), UNREADABLE_BLOCKS.start + 1).await?;
    wait_until("both are in sync", TEST_TIMEOUT, || in_sync() == 2 && serves(1)).await?;
    assert_eq!(unreadable(), []);
    for (block, value) in
        [(0, 2), (UNREADABLE_BLOCKS.start, 3), (UNREADABLE_BLOCKS.start + 1, 3), (63, 2)]
    {
        assert_eq!(execute(&nodes[1], None, block).await?, vec![value; BLOCK], "block {block}");
    }
    Ok(())
}

#[test]
fn a_resync_reports_unreadable_blocks_and_completes_once_they_are_rewritten() {
    let outcome = run(WorldSetup::new(15), run_scenario);
    outcome.result.unwrap_or_else(|e| panic!("{e}"));
}
