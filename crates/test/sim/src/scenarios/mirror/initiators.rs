//! The mirrored volume as seen by initiators on separate hosts, with a path to every node.
//!
//! An initiator stays on a path while that path answers. It moves to another node when the path
//! fails or the node reports that it cannot serve, so data written through one node is read through
//! another.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::sim::{Rng, World};

use super::super::iscsi::IscsiClient;
use super::super::nvme::NvmeClient;
use super::super::single_node::{
    self, FINAL_OPERATIONS, OPERATIONS_PER_ROUND, PORT, ProtocolClient,
};
use super::super::workload_model::WorkloadModel;
use super::{BYTES, ExportVolume, Node, ScenarioConfig, set_up};

/// Time limit for requests in flight.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// Runs the scenario with one of the protocols.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    match Rng::new(world.seed(), "protocol").chance(0.5) {
        true => play_protocol::<IscsiClient>(world, plan).await,
        false => play_protocol::<NvmeClient>(world, plan).await,
    }
}

async fn play_protocol<T: ProtocolClient>(
    world: World,
    plan: ScenarioConfig,
) -> Result<(), String> {
    let offer: ExportVolume = Rc::new(|core, _, volume| {
        let (core, server) = (core.clone(), single_node::new_server::<T>(core, volume));
        tokio::task::spawn_local(async move { single_node::listen::<T>(&core, server).await });
    });
    let bench = set_up(&world, plan, Some(offer)).await?;
    let book = WorkloadModel::new(&world, bench.block_size, BYTES);
    let on_crash = Rc::clone(&book);
    bench.shared.on_crash(move |loss| on_crash.crash(loss));
    bench.start_all();
    let (finished, rng) = (Rc::new(Cell::new(0)), world.rng());
    let clients = single_node::spawn_clients::<T>(&bench.paths, &book, &finished);
    for _ in 0..rng.between(2, 8) {
        book.allow(OPERATIONS_PER_ROUND);
        bench.inject_random_fault().await?;
    }
    book.allow(OPERATIONS_PER_ROUND);
    bench.inject_clone_or_store_rollback().await?;
    // A node notices a lost disk only when it uses the disk.
    book.allow(OPERATIONS_PER_ROUND);
    bench.heal_and_wait_in_sync().await?;
    // A reset aborts commands of other sessions. Wait until the last reset is over, because from
    // here on nothing may fail.
    book.allow(0);
    tokio::time::sleep(DRAIN_TIME).await;
    // A node without a replica has nothing to serve.
    bench.paths.replace(bench.replicas().iter().map(|node| portal(node)).collect());
    book.set_fault_free();
    book.allow(FINAL_OPERATIONS);
    // Without faults, every command succeeds, and a final read finds the same data on all replicas.
    single_node::wait_finished(&book, &finished, clients.len()).await?;
    bench.check_converged().await?;
    bench.check_rolled_back_rejoin(bench.world.rng().chance(0.5)).await?;
    bench.check_converged().await
}

/// Addresses at which initiators reach a machine that runs as a node.
pub(super) fn portal(node: &Node) -> SocketAddr {
    SocketAddr::new(node.host.address(), PORT)
}
