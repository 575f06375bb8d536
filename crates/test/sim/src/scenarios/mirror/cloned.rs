//! Nodes that run twice: a second machine with the identity of a node and a copy of its image runs
//! beside the original, as when a virtual machine is cloned (RFD 0035, 5).

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use rt::sim::{DiskSetup, Rng, World};

use super::image_rollback::ImageSnapshot;
use super::{MirrorTestbed, Node, ScenarioConfig, initiators, new_machine, peer_network, set_up};

/// Of two processes that both reach the store, one has stopped after this time.
const CLONE_DETECTION_LIMIT: Duration = Duration::from_secs(15);

/// State of the original machine when its clone starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OriginalState {
    /// It keeps running.
    Running,
    /// It keeps running, and no other node does.
    OnlyNode,
    /// It reaches the other nodes but not the store.
    IsolatedFromStore,
    /// It is down, and restarts later.
    Down,
}

/// Runs only clone faults.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.start_all();
    bench.wait_in_sync().await?;
    for first in [OriginalState::OnlyNode, OriginalState::draw(world.rng())] {
        let node = Rc::clone(world.rng().pick(&bench.replicas()));
        bench.clone_node(&node, first).await?;
        bench.shared.expire_unknown_outcomes();
        bench.shared.first_violation()?;
    }
    bench.heal_and_wait_in_sync().await?;
    bench.load_enabled.set(false);
    bench.check_converged().await
}

impl OriginalState {
    fn draw(rng: &Rng) -> Self {
        *rng.pick(&[Self::Running, Self::OnlyNode, Self::IsolatedFromStore, Self::Down])
    }
}

impl MirrorTestbed {
    /// Runs a node twice for a while.
    pub(super) async fn inject_clone(&self, node: &Rc<Node>) -> Result<(), String> {
        self.clone_node(node, OriginalState::draw(self.world.rng())).await
    }

    async fn clone_node(&self, node: &Rc<Node>, first: OriginalState) -> Result<(), String> {
        let able = self.clones_enabled && !node.is_stopped_as_clone.get() && node.host.is_running();
        if !able || self.is_changing_replicas.replace(true) {
            return Ok(());
        }
        let ran = self.with_clone(node, first).await;
        self.is_changing_replicas.set(false);
        ran
    }

    async fn with_clone(&self, node: &Rc<Node>, first: OriginalState) -> Result<(), String> {
        let rng = self.world.rng();
        if first == OriginalState::OnlyNode {
            self.others(node).for_each(|other| self.stop(other, rng.chance(0.5)));
            self.wait_until(|| self.is_only_member(node)).await;
        }
        if let Some(copy) = self.snapshot_image(node) {
            self.pause(15_000).await;
            self.prepare_original(node, first).await;
            let clone = self.boot_clone(node, &copy);
            let long = Duration::from_secs(30);
            self.run_both(node, &clone, rng.duration_between(Duration::ZERO, long)).await?;
            self.start(node);
            self.run_both(node, &clone, rng.duration_between(Duration::ZERO, long / 3)).await?;
            self.store.set_cut(node.id, false);
            self.run_both(node, &clone, CLONE_DETECTION_LIMIT).await?;
            self.check_one_stopped(node, &clone)?;
            self.others(node).for_each(|other| self.start(other));
            self.stop_original_or_clone(node, &clone).await;
        }
        self.nodes.iter().for_each(|node| self.start(node));
        Ok(())
    }

    /// Brings the original machine into the state in which its clone starts.
    async fn prepare_original(&self, node: &Rc<Node>, first: OriginalState) {
        self.world.note(format!("node {} is cloned: {first:?}", node.id));
        match first {
            OriginalState::Running | OriginalState::OnlyNode => {}
            // A sole replica serves whether it reaches the store or not. A clone cannot know what
            // the original wrote alone (RFD 0035, attack 11).
            OriginalState::IsolatedFromStore => {
                self.store.set_cut(node.id, self.is_served_by_several());
            }
            OriginalState::Down => {
                self.stop(node, self.world.rng().chance(0.5));
                self.wait_until(|| self.is_not_member(node)).await;
                // The original keeps what it alone holds: it becomes the node again before its
                // clone can.
                if !self.is_not_member(node) {
                    self.start(node);
                    self.wait_until(|| node.mirror.borrow().is_some()).await;
                }
            }
        }
    }

    fn boot_clone(&self, node: &Node, copy: &ImageSnapshot) -> Rc<Node> {
        self.clone_count.update(|n| n + 1);
        let name = format!("clone{}", self.clone_count.get());
        let clone = new_machine(&self.world, node.id, &name, true);
        clone.image.set(Some(copy.image));
        let disk = clone.host.add_disk(copy.image.path(), DiskSetup::file(copy.len()));
        disk.write_durable(0, &copy.bytes);
        for other in self.others(node) {
            peer_network::draw_link(&self.world, self.world.rng(), &clone.host, &other.host);
            peer_network::draw_link(&self.world, self.world.rng(), &other.host, &clone.host);
        }
        self.paths.borrow_mut().push(initiators::portal(&clone));
        self.start(&clone);
        clone
    }

    /// Runs both machines for a while. Only one of them serves, whether both reach the store or
    /// not.
    async fn run_both(&self, node: &Node, clone: &Node, time: Duration) -> Result<(), String> {
        let until = self.world.now() + time;
        while self.world.now() < until {
            tokio::time::sleep(Duration::from_millis(500)).await;
            self.shared.first_violation()?;
            let serves = |n: &Node| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
            if serves(node) && serves(clone) && self.incarnations.is_some() {
                let names = (node.host.name(), clone.host.name());
                return Err(format!("{} and {} serve as node {}", names.0, names.1, node.id));
            }
        }
        Ok(())
    }

    /// Of two processes of one node that reach the store, one has stopped.
    fn check_one_stopped(&self, node: &Node, clone: &Node) -> Result<(), String> {
        let both = node.mirror.borrow().is_some() && clone.mirror.borrow().is_some();
        if both && self.incarnations.is_some() {
            return Err(format!(
                "{} and {} are both node {}",
                node.host.name(),
                clone.host.name(),
                node.id
            ));
        }
        Ok(())
    }

    /// An operator stops one of the two for good, and confirms that to the other.
    async fn stop_original_or_clone(&self, node: &Rc<Node>, clone: &Rc<Node>) {
        let goes_on = clone.mirror.borrow().is_some() && !node.host.is_running();
        self.stop(clone, self.world.rng().chance(0.5));
        // A stop request to an earlier process must not stop a later one.
        clone.is_stopped_as_clone.set(true);
        if goes_on {
            self.wait_until(|| self.is_not_member(node)).await;
            if self.is_not_member(node) {
                // The contents of the clone's disk are lost.
                self.record_data_loss(node, true);
            } else if let (Some(from), Some(to)) = (clone.disk(), node.disk()) {
                let len = usize::try_from(from.size()).expect("small");
                to.write_durable(0, &from.read_durable(0, len));
            }
        }
        self.paths.borrow_mut().retain(|path| *path != initiators::portal(clone));
        self.world.note(format!("{} is stopped for good", clone.host.name()));
        node.is_stopped_as_clone.set(false);
    }

    fn others(&self, node: &Node) -> impl Iterator<Item = &Rc<Node>> {
        let id = node.id;
        self.nodes.iter().filter(move |other| other.id != id)
    }

    fn is_not_member(&self, node: &Node) -> bool {
        self.store.record().member(node.id).is_none()
    }

    fn is_only_member(&self, node: &Node) -> bool {
        self.store.record().in_sync.iter().all(|m| m.node == node.id)
    }

    fn is_served_by_several(&self) -> bool {
        let members = self.store.record().in_sync;
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
        let serve =
            self.nodes.iter().filter(|n| serves(n) && members.iter().any(|m| m.node == n.id));
        members.len() > 1 && serve.count() == members.len()
    }
}
