//! The control plane: adds replicas, removes them, and replaces those whose disk is lost.
//!
//! It makes one change at a time while other faults happen.

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;
use mirror::config::{ConfigStore, MirrorConfig, PutOutcome, ReplicaChangeError};
use mirror::membership::NotServingReason;
use peer::NodeId;
use uuid::Uuid;

use super::{Image, MirrorTestbed, Node, create_image, outage, store};

/// Longest time for a replica to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(15);

/// After this time, no write of a dead node to the store can take effect.
const MAX_PUT_DELAY: Duration = Duration::from_secs(10);

/// The node id of the control plane, which has no replica.
const CONTROL: NodeId = NodeId(99);

/// How an image is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RemovalKind {
    /// Its replica leaves first.
    Orderly,
    /// Its disk is lost.
    DiskLost,
}

impl MirrorTestbed {
    /// Starts a replica change, unless one is in progress.
    pub(super) fn change_replicas(self: &Rc<Self>) {
        if self.is_changing_replicas.replace(true) {
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
            this.is_changing_replicas.set(false);
        });
    }

    /// The disk of a node is lost and replaced by a new one.
    async fn replace(&self, node: &Rc<Node>) {
        if self.remove_image(node, RemovalKind::DiskLost).await {
            self.add(node).await;
        }
    }

    /// Removes the replica of a node.
    async fn remove(&self, node: &Rc<Node>) {
        if self.remove_image(node, RemovalKind::Orderly).await {
            self.put(|record, config| record.without_replica(node.id, config)).await;
        }
    }

    /// Creates an image on a node and adds it as a replica.
    async fn add(&self, node: &Rc<Node>) {
        // Another fault may stop the node meanwhile, or fill its disk.
        let image = loop {
            node.images.update(|n| n + 1);
            match create_image(node, self.block_size, node.images.get()).await {
                Ok(image) => break image,
                Err(e) => self.world.note(format!("no image on node {}: {e}", node.id)),
            }
            self.pause(2000).await;
        };
        self.put(|record, config| record.with_replica(node.id, image.name, config)).await;
        node.image.set(Some(image));
        self.start(node);
    }

    /// Stops a node and erases its image, unless the image holds the only copy of some data.
    async fn remove_image(&self, node: &Rc<Node>, how: RemovalKind) -> bool {
        if how == RemovalKind::Orderly {
            self.leave(node).await;
        }
        let Some(image) = node.image.take() else { return false };
        // From here on nothing restarts the node.
        self.stop(node, self.world.rng().chance(0.5));
        tokio::time::sleep(MAX_PUT_DELAY).await;
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
        self.record_data_loss(node, true);
    }

    /// Removes a replica from the configuration, if allowed.
    async fn leave(&self, node: &Node) {
        let began = self.world.now();
        while self.store.record().member(node.id).is_some()
            && self.world.now() < began + LEAVE_TIMEOUT
        {
            if let Some(mirror) = &*node.mirror.borrow() {
                mirror.leave();
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// Writes the record that `next` derives from the current one, and retries until the store
    /// commits it.
    async fn put(
        &self,
        next: impl Fn(&MirrorConfig, u128) -> Result<MirrorConfig, ReplicaChangeError>,
    ) {
        let caller = outage::StoreClientId { node: CONTROL, is_clone: false };
        let sender = store::RecordWriter { caller, incarnation: Uuid::nil(), incarnations: None };
        let client = store::Client { store: Rc::clone(&self.store), sender };
        loop {
            let rng = self.world.rng();
            let config = (u128::from(rng.u64()) << 64) | u128::from(rng.u64());
            if let Ok(record) = client.read().await {
                match next(&record, config) {
                    Ok(next) => {
                        if client.put(record.epoch, record.config_id, &next).await
                            == PutOutcome::Committed
                        {
                            return;
                        }
                    }
                    // An earlier attempt has taken effect.
                    Err(
                        ReplicaChangeError::AlreadyListed(_) | ReplicaChangeError::NoReplica(_),
                    ) => return,
                    Err(ReplicaChangeError::InSync(_) | ReplicaChangeError::TooManyReplicas) => {}
                }
            }
            self.pause(2000).await;
        }
    }

    /// Acts as the operator when every remaining replica waits for a lost image.
    pub(super) fn force_primary(&self) {
        let lost = |n: &NodeId| self.nodes.iter().any(|o| o.id == *n && o.image.get().is_none());
        let waits = |n: &&Rc<Node>| {
            let why = n.status().and_then(|s| s.not_serving);
            matches!(why, Some(NotServingReason::AwaitingRestartedMembers(nodes) | NotServingReason::RolledBack { unheard: nodes, .. })
                if nodes.iter().any(lost))
        };
        let intact = |n: &Rc<Node>| self.intact_nodes.borrow().contains(&n.id);
        // All remaining replicas are waiting; the most complete one goes on.
        let able = self.nodes.iter().filter(waits).max_by_key(|n| intact(n));
        // Force only once per epoch: the first replica that obeys starts the next epoch.
        if let Some(node) = able
            && self.last_forced_epoch.replace(self.store.record().epoch)
                != self.store.record().epoch
            && let Some(mirror) = &*node.mirror.borrow()
        {
            self.world.note(format!("node {} is forced to be primary", node.id));
            if !intact(node) {
                self.record_unflushed_loss();
            }
            Mirror::force_primary(mirror);
        }
    }
}
