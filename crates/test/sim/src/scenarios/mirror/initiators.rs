//! The mirrored volume as initiators see it: on hosts of their own, with a path to every node.
//!
//! They stay on a path as long as that answers, and go to another node when it does not, or when that says
//! that it cannot: so what one node has answered is read at another.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::sim::{Rng, World};

use super::super::book::Book;
use super::super::iscsi::Iscsi;
use super::super::node::{self, LAST, PORT, ROUND, Talk};
use super::super::nvme::Nvme;
use super::{BYTES, Node, Offer, Plan, set_up};

/// In this time what clients have asked for comes to its end.
const QUIET: Duration = Duration::from_secs(5);

/// Plays it, with one of the protocols.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    match Rng::new(world.seed(), "protocol").chance(0.5) {
        true => with::<Iscsi>(world, plan).await,
        false => with::<Nvme>(world, plan).await,
    }
}

async fn with<T: Talk>(world: World, plan: Plan) -> Result<(), String> {
    let offer: Offer = Rc::new(|core, _, volume| {
        let (core, server) = (core.clone(), node::server::<T>(core, volume));
        tokio::task::spawn_local(async move { node::listen::<T>(&core, server).await });
    });
    let bench = set_up(&world, plan, Some(offer)).await?;
    let book = Book::new(&world, bench.block_size, BYTES);
    let told = Rc::clone(&book);
    bench.shared.on_crash(move |loss| told.crash(loss));
    bench.begin();
    let (over, rng) = (Rc::new(Cell::new(0)), world.rng());
    let clients = node::clients::<T>(&bench.paths, &book, &over);
    for _ in 0..rng.between(2, 8) {
        book.allow(ROUND);
        bench.mischief().await?;
    }
    book.allow(ROUND);
    bench.believe_neither().await?;
    // Who has lost a disk learns it when that is used.
    book.allow(ROUND);
    bench.calm_down().await?;
    // Resets abort what others have begun: the last of them are over before nothing may fail.
    book.allow(0);
    tokio::time::sleep(QUIET).await;
    // Who has no replica any more has nothing to serve.
    bench.paths.replace(bench.replicas().iter().map(|node| portal(node)).collect());
    book.calm();
    book.allow(LAST);
    // Without faults: everything is carried out, read once more, and equal everywhere.
    node::all_through(&book, &over, clients.len()).await?;
    bench.settled().await?;
    bench.come_back_older(bench.world.rng().chance(0.5)).await?;
    bench.settled().await
}

/// Where initiators reach a machine that is a node.
pub(super) fn portal(node: &Node) -> SocketAddr {
    SocketAddr::new(node.host.address(), PORT)
}
