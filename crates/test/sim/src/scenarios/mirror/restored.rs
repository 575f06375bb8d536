//! A store that is set back to an earlier moment, as when a backup of it is restored, or that has
//! gone on from there into another history; and the ways out: the newer record comes back, or a
//! record is made from what images know (RFD 0036).

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use intent_log::read_superblock;
use mirror::record::{Record, Replica};
use mirror::recovery::{self, Adopted};
use mirror::{Mirror, Mistake};
use peer::NodeId;
use rt::sim::World;
use uuid::Uuid;

use super::{Bench, Node, Plan, open, set_up};

/// After this nothing that a dead node has put takes effect any more.
const LATEST_PUT: Duration = Duration::from_secs(10);

/// Longest time that a node takes to open its image, or nodes to serve again.
const BEGIN: Duration = Duration::from_secs(30);

/// Long enough for a copy to lead where it may.
const REFUSED: Duration = Duration::from_secs(10);

/// Plays nothing but that.
pub(crate) async fn play(world: World, plan: Plan) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.begin();
    for _ in 0..2 {
        bench.in_sync().await?;
        // The store gets a past: one that is away lacks what was written since.
        let node = Rc::clone(world.rng().pick(&bench.replicas()));
        bench.without(&node, world.rng().chance(0.5)).await?;
        bench.pause(5_000).await;
        if world.rng().chance(0.3) {
            bench.start(&node);
            bench.in_sync().await?;
        }
        bench.restore_store().await?;
        bench.shared.settle_doubts();
        bench.shared.verdict()?;
    }
    bench.calm_down().await?;
    bench.load.set(false);
    bench.settled().await
}

/// Whether an image that has adopted this tells that `record` is not the present one.
fn is_ahead(image: &Adopted, record: &Record) -> bool {
    image.epoch > record.epoch
        || image.epoch == record.epoch && image.config != Uuid::from_u128(record.config)
}

/// Whether some member of `record` tells so. Where none does, nobody can: the store alone knows of
/// what came later.
fn is_told(record: &Record, images: &[Adopted]) -> bool {
    let known = |node: NodeId| images.iter().find(|image| image.node == node);
    record.in_sync.iter().any(|m| known(m.node).is_some_and(|image| is_ahead(image, record)))
}

fn same_images(a: &Record, b: &Record) -> bool {
    let images = |r: &Record| r.replicas.iter().map(|r| (r.node, r.image)).collect::<Vec<_>>();
    images(a) == images(b)
}

impl Bench {
    /// The store is set back for a while.
    pub(super) async fn restore_store(&self) -> Result<(), String> {
        if self.changing.replace(true) {
            return Ok(());
        }
        let done = self.set_store_back().await;
        self.changing.set(false);
        done
    }

    async fn set_store_back(&self) -> Result<(), String> {
        let rng = self.world.rng();
        let mut images = self.stop_and_look().await;
        let running = rng.chance(0.5);
        if running {
            self.start_all(&images, None).await;
            self.until(|| self.all_serve()).await;
            if !self.all_serve() {
                return Ok(());
            }
            // Whoever serves has adopted the record.
            let record = self.store.record();
            for image in images.iter_mut().filter(|image| record.member(image.node).is_some()) {
                (image.epoch, image.config) = (record.epoch, Uuid::from_u128(record.config));
            }
        }
        let last = self.store.record();
        let Some(old) = self.earlier(&last, &images) else {
            self.start_all(&images, None).await;
            return Ok(());
        };
        self.store.restore(&old);
        if running {
            self.pause(15_000).await;
            if rng.chance(0.5) {
                let node = self.any();
                self.stop(&node, false);
                self.start(&node);
            }
        } else {
            self.start_all(&images, Some(&old)).await;
        }
        tokio::time::sleep(REFUSED).await;
        self.none_believes(&old, running)?;
        // A copy that is not in sync may have noted another history by now. The other record of that
        // epoch is no way out then.
        if old.epoch < last.epoch && rng.chance(0.5) {
            self.store.restore(&last);
            if rng.chance(0.5) {
                self.nodes.iter().for_each(|node| self.stop(node, false));
            }
            self.nodes.iter().for_each(|node| self.start(node));
            return Ok(());
        }
        self.recover(last, &old).await
    }

    /// What the store may be set back to: a record of the same images that some image tells from
    /// the present one.
    fn earlier(&self, last: &Record, images: &[Adopted]) -> Option<Record> {
        let rng = self.world.rng();
        let mut past: Vec<_> = self.store.past();
        past.retain(|old| same_images(old, last));
        if rng.chance(0.3) {
            // It has gone on without these images, as far as they have.
            past.iter_mut().for_each(|old| (old.epoch, old.config) = (last.epoch, draw(rng)));
        }
        past.retain(|old| is_told(old, images));
        (!past.is_empty()).then(|| rng.pick(&past).clone())
    }

    /// The present record is not taken from the store.
    fn none_believes(&self, old: &Record, running: bool) -> Result<(), String> {
        let serves = |n: &&Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
        let serves = self.nodes.iter().find(serves).filter(|_| !running);
        if self.mistake == Mistake::BelievesOlderStore {
            return Ok(());
        }
        if let Some(node) = serves {
            return Err(format!("node {} serves by a record that was set back", node.id));
        }
        let now = self.store.record();
        if now != *old {
            return Err(format!("a record was put in place of one that was set back: {now:?}"));
        }
        Ok(())
    }

    /// An operator has a record made from what images know.
    async fn recover(&self, last: Record, old: &Record) -> Result<(), String> {
        let rng = self.world.rng();
        let copies = self.stop_and_look().await;
        let newest = recovery::newest(&copies).map_err(|e| e.to_string())?;
        let known = copies.iter().map(|c| c.epoch).max().unwrap_or_default();
        let above = known.max(old.epoch).max(last.epoch);
        let replica = |r: &Replica| Replica { new: false, ..*r };
        let replicas = last.replicas.iter().map(replica).collect();
        // Where the last one's log is lost no image tells, and the operator has to know.
        let lead = newest.map_or(last.primary, |newest| copies[newest.leads].node);
        let record = recovery::record(lead, replicas, above, draw(rng));
        self.world.note(format!("the volume goes on with node {lead}, record {}", record.epoch.0));
        if !self.intact.borrow().contains(&lead) {
            self.lose_unflushed();
        }
        self.store.recover(last, &record);
        self.start_all(&copies, None).await;
        Ok(())
    }

    /// Stops all nodes, and looks at what their images have adopted.
    async fn stop_and_look(&self) -> Vec<Adopted> {
        let power = self.world.rng().chance(0.3);
        self.nodes.iter().for_each(|node| self.stop(node, power));
        tokio::time::sleep(LATEST_PUT).await;
        let mut images = Vec::new();
        for node in &self.nodes {
            images.extend(adopted(node).await);
        }
        images
    }

    /// Starts all nodes; those first whose images tell that `record` is not the present one, so
    /// that others hear that before they may lead alone.
    async fn start_all(&self, images: &[Adopted], record: Option<&Record>) {
        let told = |node: &&Rc<Node>| {
            let image = images.iter().find(|image| image.node == node.id);
            record.zip(image).is_some_and(|(record, image)| is_ahead(image, record))
        };
        let first: Vec<_> = self.nodes.iter().filter(told).collect();
        first.iter().for_each(|node| self.start(node));
        self.until(|| first.iter().all(|node| node.mirror.borrow().is_some())).await;
        self.nodes.iter().for_each(|node| self.start(node));
    }

    fn all_serve(&self) -> bool {
        let record = self.store.record();
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::serves);
        self.nodes.iter().filter(|n| record.member(n.id).is_some()).all(serves)
    }

    /// Waits for something, not for long.
    pub(super) async fn until(&self, is: impl Fn() -> bool) {
        let began = self.world.now();
        while !is() && self.world.now() < began + BEGIN {
            self.pause(500).await;
        }
    }
}

fn draw(rng: &rt::sim::Rng) -> u128 {
    (u128::from(rng.u64()) << 64) | u128::from(rng.u64())
}

/// What the image of a node that is down has adopted; nothing if it does not tell.
async fn adopted(node: &Rc<Node>) -> Option<Adopted> {
    let image = node.image.get()?;
    let look = node.host.run(move |core| async move {
        let file = open(&core, image).await.ok()?;
        let area = file.log_area().await.ok()?;
        read_superblock(&*area).await.ok()?.ok()
    });
    let found = tokio::time::timeout(BEGIN, look.join()).await.ok().flatten().flatten();
    node.host.kill();
    let found = found?;
    let node_of = |name: &Uuid| u16::try_from(name.as_u128()).ok().map(NodeId);
    Some(Adopted {
        node: node.id,
        epoch: Epoch(found.epoch),
        config: found.config,
        in_sync: found.hint.iter().flatten().filter_map(node_of).collect(),
    })
}
