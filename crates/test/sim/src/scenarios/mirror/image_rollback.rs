//! Images rolled back to earlier copies, as when a virtual machine is restored from a backup or a
//! disk from a snapshot (RFD 0032).

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;

use super::{BYTES, Client, Image, MirrorTestbed, Node};

/// Longest wait for the others to continue without a node; after that its image is not rolled back.
const REMOVAL_LIMIT: Duration = Duration::from_secs(20);

/// Time without writes after which no marks are left.
const MARK_CLEAR_TIME: Duration = Duration::from_secs(40);

/// Size of one copy step.
const COPY_CHUNK: usize = 4096;

/// A copy of an image: its log and its data as they were at one moment.
pub(super) struct ImageSnapshot {
    pub(super) image: Image,
    pub(super) bytes: Vec<u8>,
}

impl ImageSnapshot {
    pub(super) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

impl MirrorTestbed {
    pub(super) fn snapshot_image(&self, node: &Node) -> Option<ImageSnapshot> {
        let (image, disk) = (node.image.get()?, node.disk()?);
        let len = usize::try_from(disk.size()).ok()?;
        self.world.note(format!("the image of node {} is copied", node.id));
        let cached = node.host.is_running() && self.world.rng().chance(0.5);
        let bytes = if cached { disk.read_visible(0, len) } else { disk.read_durable(0, len) };
        Some(ImageSnapshot { image, bytes })
    }

    /// Replaces the image of a stopped node with a copy.
    fn restore_image(&self, node: &Node, copy: &ImageSnapshot) {
        let Some(disk) = node.disk().filter(|_| node.image.get() == Some(copy.image)) else {
            return;
        };
        self.world.note(format!("the image of node {} is rolled back", node.id));
        // The previous contents of the image are lost.
        self.record_data_loss(node, true);
        for (n, piece) in copy.bytes.chunks(COPY_CHUNK).enumerate() {
            let at = n * COPY_CHUNK;
            if disk.read_visible(at as u64, piece.len()) != piece {
                disk.write_durable(at as u64, piece);
            }
        }
    }

    /// Copies the image of a node and rolls it back later, while the others continue without the
    /// node.
    pub(super) async fn roll_back_image(&self, node: &Rc<Node>) {
        let Some(copy) = self.snapshot_image(node) else { return };
        self.pause(30_000).await;
        self.stop(node, self.world.rng().chance(0.5));
        let began = self.world.now();
        let is_removed = || {
            let record = self.store.record();
            record.member(node.id).is_none()
        };
        while !is_removed() && self.world.now() < began + REMOVAL_LIMIT {
            self.pause(500).await;
        }
        if is_removed() {
            self.restore_image(node, &copy);
        }
        self.start(node);
    }

    /// Without any other fault, rolls the image of a node back to before a write whose marks have
    /// been cleared since. The node must resync and must not become primary. With `all`, all nodes
    /// are stopped first.
    pub(super) async fn check_rolled_back_rejoin(&self, all: bool) -> Result<(), String> {
        let replicas = self.replicas();
        let node = Rc::clone(self.world.rng().pick(&replicas));
        let Some(other) = replicas.iter().find(|n| n.id != node.id) else { return Ok(()) };
        let copy = self.snapshot_image(&node).ok_or("its disk is gone")?;
        let block = self.world.rng().between(1, BYTES / u64::from(self.block_size) - 1);
        let write = async move |_, client: Client| client.write_block(block).await;
        self.run_client_on(other, "a block is not written", write).await?;
        tokio::time::sleep(MARK_CLEAR_TIME).await;
        if all {
            replicas.iter().for_each(|n| self.stop(n, false));
        } else {
            self.stop_and_wait_removed(&node, false).await?;
        }
        self.restore_image(&node, &copy);
        for other in replicas.iter().filter(|n| n.id != node.id) {
            self.start(other);
        }
        // Wait for the sessions before any node may become primary alone.
        if self.incarnations.is_some() {
            // After a power loss a node must wait until its previous incarnation is known to be
            // dead.
            let others = || replicas.iter().filter(|n| n.id != node.id);
            self.wait_until(|| others().all(|n| n.mirror.borrow().is_some())).await;
        }
        self.start(&node);
        self.wait_in_sync().await?;
        self.check_equal_now().await?;
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
        if !self.store.record().history.rolled_back.contains(&node.id)
            && replicas.iter().all(serves)
        {
            return Err(format!("the record does not list node {} as rolled back", node.id));
        }
        Ok(())
    }
}
