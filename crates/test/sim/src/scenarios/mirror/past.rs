//! Images that are set back to copies of earlier moments, as when a virtual machine is restored from a
//! backup, or a disk from a snapshot (RFD 0032).

use std::rc::Rc;
use std::time::Duration;

use mirror::Mirror;

use super::{BYTES, Bench, Client, Image, Node};

/// How long others may take to go on without a node before its image is left as it is.
const OUT: Duration = Duration::from_secs(20);

/// After this long without writes no marks are left.
const CLEARED: Duration = Duration::from_secs(40);

/// What is copied, and put back, at once.
const PIECE: usize = 4096;

/// A copy of an image: its log and its data as they were at one moment.
pub(super) struct Copy {
    pub(super) image: Image,
    pub(super) bytes: Vec<u8>,
}

impl Copy {
    pub(super) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

impl Bench {
    pub(super) fn copy_of(&self, node: &Node) -> Option<Copy> {
        let (image, disk) = (node.image.get()?, node.disk()?);
        let len = usize::try_from(disk.size()).ok()?;
        self.world.note(format!("the image of node {} is copied", node.id));
        let cached = node.host.is_running() && self.world.rng().chance(0.5);
        let bytes = if cached { disk.peek(0, len) } else { disk.peek_durable(0, len) };
        Some(Copy { image, bytes })
    }

    /// Puts a copy in place of the image of a node that is down.
    fn put_back(&self, node: &Node, copy: &Copy) {
        let Some(disk) = node.disk().filter(|_| node.image.get() == Some(copy.image)) else {
            return;
        };
        self.world.note(format!("the image of node {} is set back", node.id));
        // What it held is lost.
        self.lose(node, true);
        for (n, piece) in copy.bytes.chunks(PIECE).enumerate() {
            let at = n * PIECE;
            if disk.peek(at as u64, piece.len()) != piece {
                disk.poke(at as u64, piece);
            }
        }
    }

    /// The image of a node is copied, and set back some time later, while others go on without it.
    pub(super) async fn set_back(&self, node: &Rc<Node>) {
        let Some(copy) = self.copy_of(node) else { return };
        self.pause(30_000).await;
        self.stop(node, self.world.rng().chance(0.5));
        let began = self.world.now();
        let out = || {
            let record = self.store.record();
            record.member(node.id).is_none()
        };
        while !out() && self.world.now() < began + OUT {
            self.pause(500).await;
        }
        if out() {
            self.put_back(node, &copy);
        }
        self.start(node);
    }

    /// Without any other fault: the image of a node is set back to a copy from before a write whose marks have
    /// gone since. It is brought in sync, and does not lead. With `all`, all nodes have been down.
    pub(super) async fn come_back_older(&self, all: bool) -> Result<(), String> {
        let replicas = self.replicas();
        let node = Rc::clone(self.world.rng().pick(&replicas));
        let Some(other) = replicas.iter().find(|n| n.id != node.id) else { return Ok(()) };
        let copy = self.copy_of(&node).ok_or("its disk is gone")?;
        let block = self.world.rng().between(1, BYTES / u64::from(self.block_size) - 1);
        let write = async move |_, client: Client| client.write_block(block).await;
        self.at(other, "a block is not written", write).await?;
        tokio::time::sleep(CLEARED).await;
        if all {
            replicas.iter().for_each(|n| self.stop(n, false));
        } else {
            self.without(&node, false).await?;
        }
        self.put_back(&node, &copy);
        for other in replicas.iter().filter(|n| n.id != node.id) {
            self.start(other);
        }
        // Sessions come up before any of them may lead alone.
        if self.lives.is_some() {
            // After a power cut a node has to wait until its last life has not answered.
            let others = || replicas.iter().filter(|n| n.id != node.id);
            self.until(|| others().all(|n| n.mirror.borrow().is_some())).await;
        }
        self.start(&node);
        self.in_sync().await?;
        self.equal_now().await?;
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
        if !self.store.record().history.set_back.contains(&node.id) && replicas.iter().all(serves) {
            return Err(format!("the record does not say that node {} was set back", node.id));
        }
        Ok(())
    }
}
