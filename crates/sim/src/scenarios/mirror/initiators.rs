//! The mirrored volume as initiators see it: on hosts of their own, with a path to every node.
//!
//! They stay on a path as long as that answers, and go to another node when it does not, or when that says
//! that it cannot: so what one node has answered is read at another.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use rt::sim::{HostSetup, Rng, World};

use super::super::book::Book;
use super::super::iscsi::Iscsi;
use super::super::node::{self, LAST, PORT, Paths, ROUND, Talk};
use super::super::nvme::Nvme;
use super::{BYTES, Bench, Node, Offer, Plan, set_up};

/// Virtual time in which the last commands must end.
const PATIENCE: Duration = Duration::from_secs(300);

/// Plays it, with one of the protocols.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    match Rng::new(world.seed(), "protocol").chance(0.5) {
        true => with::<Iscsi>(world, plan).await,
        false => with::<Nvme>(world, plan).await,
    }
}

async fn with<T: Talk>(world: World, plan: Plan) -> Result<(), String> {
    let offer: Offer = Rc::new(|core, volume| {
        let (core, server) = (core.clone(), node::server::<T>(core, volume));
        tokio::task::spawn_local(async move { node::listen::<T>(&core, server).await });
    });
    let bench = set_up(&world, plan, Some(offer)).await?;
    let book = Book::new(&world, bench.block_size, BYTES);
    let told = Rc::clone(&book);
    bench.shared.on_crash(move |loss| told.crash(loss));
    bench.begin();
    let paths: Paths = Rc::new(RefCell::new(addresses(&bench.nodes)));
    let (over, rng) = (Rc::new(Cell::new(0)), world.rng());
    let clients = rng.between(1, 3);
    for number in 1..=u8::try_from(clients).expect("small") {
        let setup = HostSetup { pool_bytes: 4 << 20, ..HostSetup::default() };
        let host = world.add_host(&format!("client{number}"), setup);
        let (paths, book, over) = (Rc::clone(&paths), Rc::clone(&book), Rc::clone(&over));
        host.start(move |core| {
            node::client::<T>(core, Rc::clone(&paths), number, Rc::clone(&book), Rc::clone(&over))
        });
    }
    for _ in 0..rng.between(2, 8) {
        book.allow(ROUND);
        bench.mischief().await?;
    }
    bench.calm_down().await?;
    // Who has no replica any more has nothing to serve.
    paths.replace(addresses(&bench.replicas()));
    book.calm();
    book.allow(LAST);
    finish(&bench, &book, &over, clients).await
}

/// Where initiators reach the nodes.
fn addresses(nodes: &[Rc<Node>]) -> Vec<SocketAddr> {
    nodes.iter().map(|node| SocketAddr::new(node.host.address(), PORT)).collect()
}

/// Without faults: everything is carried out, read once more, and equal everywhere.
async fn finish(
    bench: &Rc<Bench>,
    book: &Book,
    over: &Cell<usize>,
    clients: u64,
) -> Result<(), String> {
    let all = async {
        while (over.get() as u64) < clients {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let end = tokio::time::timeout(PATIENCE, all).await;
    if end.is_err() || !book.is_over() {
        return Err(format!("{} of {clients} clients are through after {PATIENCE:?}", over.get()));
    }
    bench.world.note(format!("{} operations succeeded", book.successes()));
    bench.settled().await
}
