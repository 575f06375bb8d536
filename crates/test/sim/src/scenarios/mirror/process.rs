//! What runs on a node: the process that is the node, with its replica and the clients on it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::Loss;
use mirror::Mistake;
use peer::NodeId;
use rt::Core;
use rt::sim::World;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::lives::Lives;
use super::store::{Client, Sender, Store};
use super::wires::{self, Addresses, Apart, Ports};
use super::{Bench, Image, Node, Offer, Shared, load_up, open_mirror, serve};

/// A process that is not its node has to end.
pub(super) struct Over {
    node: Rc<Node>,
    life: Uuid,
    /// It never was the node: an operator has to decide which of the two goes on.
    is_copy: bool,
}

/// The software of a node.
#[derive(Clone)]
struct Process {
    world: World,
    node: Rc<Node>,
    image: Image,
    store: Rc<Store>,
    lives: Option<Rc<Lives>>,
    over: mpsc::UnboundedSender<Over>,
    mistake: Mistake,
    addresses: Rc<Addresses>,
    ports: Ports,
    apart: Apart,
    shared: Rc<Shared>,
    intact: Rc<RefCell<BTreeSet<NodeId>>>,
    load: Rc<Cell<bool>>,
    offer: Option<Offer>,
}

impl Process {
    async fn run(self, core: Core) -> Result<(), String> {
        if !self.become_node(&core).await {
            return std::future::pending().await;
        }
        let node = &self.node;
        let (caller, life, lives) = (node.caller(), node.life.get(), self.lives.clone());
        let store = Rc::clone(&self.store);
        let records = Client { store, sender: Sender { caller, life, lives } };
        match open_mirror(&core, node, self.image, records, self.mistake).await {
            Ok((mirror, gate)) => {
                let addresses = (Rc::clone(&self.addresses), self.ports);
                let (apart, store) = (Rc::clone(&self.apart), Rc::clone(&self.store));
                wires::join(&core, node.id, &mirror, addresses, apart, store).await?;
                let volume = serve(&core, node, mirror, gate);
                match &self.offer {
                    Some(offer) => offer(&core, node.id, &volume),
                    None => load_up(&core, node, &volume, &self.shared, &self.load),
                }
            }
            // Somebody starts it again.
            Err(e) => {
                self.world.note(format!("node {} does not open its image: {e}", node.id));
                node.broken.replace(Some(e));
            }
        }
        std::future::pending().await
    }

    /// Whether this process is the node; from then on until another one is.
    async fn become_node(&self, core: &Core) -> bool {
        let node = &self.node;
        if let Some(lives) = &self.lives {
            let claimed = Rc::clone(lives).claim(core, node).await;
            let (life, is_copy) = (node.life.get(), claimed.is_none());
            let over = Over { node: Rc::clone(node), life, is_copy };
            let Some(held) = claimed else {
                let _ = self.over.send(over);
                return false;
            };
            let tell = self.over.clone();
            tokio::task::spawn_local(async move {
                held.over().await;
                let _ = tell.send(over);
            });
        }
        if node.is_clone {
            self.take_place();
        }
        self.addresses.set(node.id, node.host.address());
        true
    }

    /// What the first machine's disk holds is not the node's any more.
    fn take_place(&self) {
        self.world.note(format!("a clone is node {}", self.node.id));
        let mut intact = self.intact.borrow_mut();
        if intact.remove(&self.node.id) && intact.is_empty() {
            self.shared.crash(Loss::Unflushed);
        }
    }
}

impl Bench {
    /// Starts a node that has an image, unless it runs, or is another process.
    pub(super) fn start(&self, node: &Rc<Node>) {
        let down = !node.host.is_running() && !node.told_apart.get();
        let Some(image) = node.image.get().filter(|_| down) else { return };
        let process = Process {
            world: self.world.clone(),
            node: Rc::clone(node),
            image,
            store: Rc::clone(&self.store),
            lives: self.lives.clone(),
            over: self.over.clone(),
            mistake: self.mistake,
            addresses: Rc::clone(&self.addresses),
            ports: self.ports,
            apart: Rc::clone(&self.apart),
            shared: Rc::clone(&self.shared),
            intact: Rc::clone(&self.intact),
            load: Rc::clone(&self.load),
            offer: self.offer.clone(),
        };
        node.host.start(move |core| process.clone().run(core));
    }

    /// Ends processes that are not their node. The service manager starts them again; one that was
    /// told that it is a copy stays down.
    pub(super) async fn end_lives(self: Rc<Self>, mut ends: mpsc::UnboundedReceiver<Over>) {
        while let Some(Over { node, life, is_copy }) = ends.recv().await {
            if node.life.get() != life {
                continue;
            }
            self.world.note(format!("{}: another process is node {}", node.host.name(), node.id));
            node.told_apart.set(is_copy);
            self.stop(&node, false);
            let this = Rc::clone(&self);
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_secs(2)).await;
                this.start(&node);
            });
        }
    }
}
