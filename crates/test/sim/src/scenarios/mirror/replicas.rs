//! The control plane's part: replicas are added, taken away, and replaced when their disk is lost.
//!
//! One thing at a time, beside everything else that happens.

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use mirror::member::Why;
use mirror::record::{BadChange, Put, Record, Records};
use peer::NodeId;
use uuid::Uuid;

use super::{Bench, Image, Node, prepare, store};

/// Longest time that a replica is given to leave.
const LEAVING: Duration = Duration::from_secs(15);

/// After this nothing that a dead node has put takes effect any more.
const LATEST_PUT: Duration = Duration::from_secs(10);

/// What the control plane is on a node of its own, which has no replica.
const CONTROL: NodeId = NodeId(99);

/// How an image goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Going {
    /// Its replica leaves first.
    InOrder,
    /// Its disk is lost.
    Lost,
}

impl Bench {
    /// Changes something about the replicas, unless something is being changed.
    pub(super) fn change_replicas(self: &Rc<Self>) {
        if self.changing.replace(true) {
            return;
        }
        let (this, node) = (Rc::clone(self), self.any());
        let spare = self.nodes.iter().find(|n| n.image.get().is_none()).cloned();
        let several = self.store.record().replicas.len() > 1;
        tokio::task::spawn_local(async move {
            match spare {
                Some(spare) => this.add(&spare).await,
                None if several && this.world.rng().chance(0.3) => this.remove(&node).await,
                None => this.replace(&node).await,
            }
            this.changing.set(false);
        });
    }

    /// The disk of a node is lost, and it gets another one.
    async fn replace(&self, node: &Rc<Node>) {
        if self.take_away(node, Going::Lost).await {
            self.add(node).await;
        }
    }

    /// A node has no replica any more.
    async fn remove(&self, node: &Rc<Node>) {
        if self.take_away(node, Going::InOrder).await {
            self.put(|record, config| record.without_replica(node.id, config)).await;
        }
    }

    /// A node gets an image, and it becomes a replica.
    async fn add(&self, node: &Rc<Node>) {
        // Somebody may end the node meanwhile, or fill its disk.
        let image = loop {
            node.images.update(|n| n + 1);
            match prepare(node, self.block_size, node.images.get()).await {
                Ok(image) => break image,
                Err(e) => self.world.note(format!("no image on node {}: {e}", node.id)),
            }
            self.pause(2000).await;
        };
        self.put(|record, config| record.with_replica(node.id, image.name, config)).await;
        node.image.set(Some(image));
        self.start(node);
    }

    /// Ends a node and erases its image, unless it has what nobody else has.
    async fn take_away(&self, node: &Rc<Node>, how: Going) -> bool {
        if how == Going::InOrder {
            self.leave(node).await;
        }
        let Some(image) = node.image.take() else { return false };
        // Nobody starts it now.
        self.stop(node, self.world.rng().chance(0.5));
        tokio::time::sleep(LATEST_PUT).await;
        if self.store.record().in_sync.iter().all(|m| m.node == node.id) {
            self.world.note(format!("the image of node {} is the last", node.id));
            node.image.set(Some(image));
            self.start(node);
            return false;
        }
        self.erase(node, image);
        true
    }

    fn erase(&self, node: &Node, image: Image) {
        self.world.note(format!("the image {image:?} of node {} is lost", node.id));
        self.lose(node, true);
    }

    /// Has a replica leave, if it can.
    async fn leave(&self, node: &Node) {
        let began = self.world.now();
        while self.store.record().member(node.id).is_some() && self.world.now() < began + LEAVING {
            if let Some(mirror) = &*node.mirror.borrow() {
                mirror.leave();
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// Puts what `next` makes of the record, as soon as that can be.
    async fn put(&self, next: impl Fn(&Record, u128) -> Result<Record, BadChange>) {
        let caller = store::Caller { node: CONTROL, is_clone: false };
        let sender = store::Sender { caller, life: Uuid::nil(), lives: None };
        let client = store::Client { store: Rc::clone(&self.store), sender };
        loop {
            let rng = self.world.rng();
            let config = (u128::from(rng.u64()) << 64) | u128::from(rng.u64());
            if let Ok(record) = client.read().await {
                match next(&record, config) {
                    Ok(next) => {
                        if client.put(record.epoch, record.config, &next).await == Put::Done {
                            return;
                        }
                    }
                    // An earlier attempt has got through.
                    Err(BadChange::Listed(_) | BadChange::Absent(_)) => return,
                    Err(BadChange::InSync(_) | BadChange::Full) => {}
                }
            }
            self.pause(2000).await;
        }
    }

    /// What an operator does when all that is left waits for an image that is lost.
    pub(super) fn force(&self) {
        let lost = |n: &NodeId| self.nodes.iter().any(|o| o.id == *n && o.image.get().is_none());
        let waits = |n: &&Rc<Node>| {
            let why = n.status().and_then(|s| s.why);
            matches!(why, Some(Why::Blackout(nodes) | Why::SetBack { silent: nodes, .. })
                if nodes.iter().any(lost))
        };
        let intact = |n: &Rc<Node>| self.intact.borrow().contains(&n.id);
        // Everybody is there by now: the best of them goes on.
        let able = self.nodes.iter().filter(waits).max_by_key(|n| intact(n));
        // One order for each configuration: the first to be obeyed begins another.
        if let Some(node) = able
            && self.forced.replace(self.store.record().epoch) != self.store.record().epoch
            && let Some(mirror) = &*node.mirror.borrow()
        {
            self.world.note(format!("node {} is made to go on", node.id));
            if !intact(node) {
                self.lose_unflushed();
            }
            Mirror::force(mirror);
        }
    }
}
