//! Nodes that run twice: a second machine with the identity of a node and a copy of its image, as
//! when a virtual machine is cloned, runs beside the first one (RFD 0035, 5).

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use rt::sim::{DiskSetup, Rng, World};

use super::past::Copy;
use super::{Bench, Node, Plan, initiators, machine, set_up, wires};

/// Of two processes that both reach the store one has ended after this time.
const TOLD_APART: Duration = Duration::from_secs(15);

/// How it is about the first machine when its clone begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    /// It goes on.
    Beside,
    /// It goes on, and no other node does.
    Alone,
    /// It reaches the other nodes, and not the store.
    CutOff,
    /// It is down, and starts again later.
    Down,
}

/// Plays nothing but that.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.begin();
    bench.in_sync().await?;
    for first in [First::Alone, First::draw(world.rng())] {
        let node = Rc::clone(world.rng().pick(&bench.replicas()));
        bench.clone_node(&node, first).await?;
        bench.shared.settle_doubts();
        bench.shared.verdict()?;
    }
    bench.calm_down().await?;
    bench.load.set(false);
    bench.settled().await
}

impl First {
    fn draw(rng: &Rng) -> Self {
        *rng.pick(&[Self::Beside, Self::Alone, Self::CutOff, Self::Down])
    }
}

impl Bench {
    /// A node runs twice for a while.
    pub(super) async fn run_twice(&self, node: &Rc<Node>) -> Result<(), String> {
        self.clone_node(node, First::draw(self.world.rng())).await
    }

    async fn clone_node(&self, node: &Rc<Node>, first: First) -> Result<(), String> {
        let able = self.clones && !node.told_apart.get() && node.host.is_running();
        if !able || self.changing.replace(true) {
            return Ok(());
        }
        let ran = self.with_clone(node, first).await;
        self.changing.set(false);
        ran
    }

    async fn with_clone(&self, node: &Rc<Node>, first: First) -> Result<(), String> {
        let rng = self.world.rng();
        if first == First::Alone {
            self.others(node).for_each(|other| self.stop(other, rng.chance(0.5)));
            self.until(|| self.is_alone(node)).await;
        }
        if let Some(copy) = self.copy_of(node) {
            self.pause(15_000).await;
            self.begin_beside(node, first).await;
            let clone = self.boot_clone(node, &copy);
            let long = Duration::from_secs(30);
            self.beside(node, &clone, rng.time(Duration::ZERO, long)).await?;
            self.start(node);
            self.beside(node, &clone, rng.time(Duration::ZERO, long / 3)).await?;
            self.store.set_cut(node.id, false);
            self.beside(node, &clone, TOLD_APART).await?;
            self.are_told_apart(node, &clone)?;
            self.others(node).for_each(|other| self.start(other));
            self.stop_one(node, &clone).await;
        }
        self.nodes.iter().for_each(|node| self.start(node));
        Ok(())
    }

    /// The first machine becomes what it is to be when its clone begins.
    async fn begin_beside(&self, node: &Rc<Node>, first: First) {
        self.world.note(format!("node {} is cloned: {first:?}", node.id));
        match first {
            First::Beside | First::Alone => {}
            // Who alone has the volume serves it whether it reaches the store or not, and what it
            // alone has no clone can know (RFD 0035, attack 11).
            First::CutOff => self.store.set_cut(node.id, self.is_served_by_several()),
            First::Down => {
                self.stop(node, self.world.rng().chance(0.5));
                self.until(|| self.is_out(node)).await;
                // What it alone has goes nowhere: it is the node again before its clone can be.
                if !self.is_out(node) {
                    self.start(node);
                    self.until(|| node.mirror.borrow().is_some()).await;
                }
            }
        }
    }

    fn boot_clone(&self, node: &Node, copy: &Copy) -> Rc<Node> {
        self.cloned.update(|n| n + 1);
        let name = format!("clone{}", self.cloned.get());
        let clone = machine(&self.world, node.id, &name, true);
        clone.image.set(Some(copy.image));
        let disk = clone.host.add_disk(copy.image.path(), DiskSetup::file(copy.len()));
        disk.poke(0, &copy.bytes);
        for other in self.others(node) {
            wires::draw(&self.world, self.world.rng(), &clone.host, &other.host);
            wires::draw(&self.world, self.world.rng(), &other.host, &clone.host);
        }
        self.paths.borrow_mut().push(initiators::portal(&clone));
        self.start(&clone);
        clone
    }

    /// Both machines run for a while. Only one of them serves, whether both reach the store or not.
    async fn beside(&self, node: &Node, clone: &Node, time: Duration) -> Result<(), String> {
        let until = self.world.now() + time;
        while self.world.now() < until {
            tokio::time::sleep(Duration::from_millis(500)).await;
            self.shared.verdict()?;
            let serves = |n: &Node| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
            if serves(node) && serves(clone) && self.lives.is_some() {
                let names = (node.host.name(), clone.host.name());
                return Err(format!("{} and {} serve as node {}", names.0, names.1, node.id));
            }
        }
        Ok(())
    }

    /// Of two processes of one node that reach the store one has ended.
    fn are_told_apart(&self, node: &Node, clone: &Node) -> Result<(), String> {
        let both = node.mirror.borrow().is_some() && clone.mirror.borrow().is_some();
        if both && self.lives.is_some() {
            return Err(format!(
                "{} and {} are both node {}",
                node.host.name(),
                clone.host.name(),
                node.id
            ));
        }
        Ok(())
    }

    /// An operator stops one of both for good, and says so where the other one is.
    async fn stop_one(&self, node: &Rc<Node>, clone: &Rc<Node>) {
        let goes_on = clone.mirror.borrow().is_some() && !node.host.is_running();
        self.stop(clone, self.world.rng().chance(0.5));
        // No message of an earlier process ends a later one.
        clone.told_apart.set(true);
        if goes_on {
            self.until(|| self.is_out(node)).await;
            if self.is_out(node) {
                // What the clone's disk held is lost.
                self.lose(node, true);
            } else if let (Some(from), Some(to)) = (clone.disk(), node.disk()) {
                let len = usize::try_from(from.size()).expect("small");
                to.poke(0, &from.peek_durable(0, len));
            }
        }
        self.paths.borrow_mut().retain(|path| *path != initiators::portal(clone));
        self.world.note(format!("{} is stopped for good", clone.host.name()));
        node.told_apart.set(false);
    }

    fn others(&self, node: &Node) -> impl Iterator<Item = &Rc<Node>> {
        let id = node.id;
        self.nodes.iter().filter(move |other| other.id != id)
    }

    fn is_out(&self, node: &Node) -> bool {
        self.store.record().member(node.id).is_none()
    }

    fn is_alone(&self, node: &Node) -> bool {
        self.store.record().in_sync.iter().all(|m| m.node == node.id)
    }

    fn is_served_by_several(&self) -> bool {
        let members = self.store.record().in_sync;
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
        let serve =
            self.nodes.iter().filter(|n| serves(n) && members.iter().any(|m| m.node == n.id));
        members.len() > 1 && serve.count() == members.len()
    }
}
