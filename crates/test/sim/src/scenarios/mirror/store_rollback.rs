//! A metadata store rolled back to an earlier moment, as when its backup is restored, or that has
//! continued from there into a different history. Two ways to recover: the newer record returns, or
//! an operator builds a record from the images (RFD 0036).

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use intent_log::read_superblock;
use mirror::config::{ConfigReplica, MirrorConfig};
use mirror::recovery::{self, RecoveryCandidate};
use mirror::{Mirror, Mistake};
use peer::NodeId;
use rt::sim::World;
use uuid::Uuid;

use super::{MirrorTestbed, Node, ScenarioConfig, open, set_up};

/// After this time, no write of a dead node to the store can take effect.
const MAX_PUT_DELAY: Duration = Duration::from_secs(10);

/// Longest time for a node to open its image, or for nodes to serve again.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Long enough for a replica to become primary where it may.
const REFUSAL_TIME: Duration = Duration::from_secs(10);

/// Runs only store rollbacks.
pub(crate) async fn run(world: World, plan: ScenarioConfig) -> Result<(), String> {
    let bench = set_up(&world, plan, None).await?;
    bench.start_all();
    for _ in 0..2 {
        bench.wait_in_sync().await?;
        // Give the store a history: a stopped replica lacks what was written since.
        let node = Rc::clone(world.rng().pick(&bench.replicas()));
        bench.stop_and_wait_removed(&node, world.rng().chance(0.5)).await?;
        bench.pause(5_000).await;
        if world.rng().chance(0.3) {
            bench.start(&node);
            bench.wait_in_sync().await?;
        }
        bench.inject_store_rollback().await?;
        bench.shared.expire_unknown_outcomes();
        bench.shared.first_violation()?;
    }
    bench.heal_and_wait_in_sync().await?;
    bench.load_enabled.set(false);
    bench.check_converged().await
}

/// Whether an image that has adopted this epoch shows that `record` is not the current one.
fn is_newer_than(image: &RecoveryCandidate, record: &MirrorConfig) -> bool {
    image.epoch > record.epoch
        || image.epoch == record.epoch && image.config_id != Uuid::from_u128(record.config_id)
}

/// Whether some member of `record` shows that. If none does, no replica can detect it: only the
/// store knew of the later records.
fn is_detectable(record: &MirrorConfig, images: &[RecoveryCandidate]) -> bool {
    let known = |node: NodeId| images.iter().find(|image| image.node == node);
    record.in_sync.iter().any(|m| known(m.node).is_some_and(|image| is_newer_than(image, record)))
}

fn same_images(a: &MirrorConfig, b: &MirrorConfig) -> bool {
    let images =
        |r: &MirrorConfig| r.replicas.iter().map(|r| (r.node, r.image)).collect::<Vec<_>>();
    images(a) == images(b)
}

impl MirrorTestbed {
    /// Rolls the store back for a while.
    pub(super) async fn inject_store_rollback(&self) -> Result<(), String> {
        if self.is_changing_replicas.replace(true) {
            return Ok(());
        }
        let done = self.roll_back_store().await;
        self.is_changing_replicas.set(false);
        done
    }

    async fn roll_back_store(&self) -> Result<(), String> {
        let rng = self.world.rng();
        let mut images = self.stop_and_read_images().await;
        let running = rng.chance(0.5);
        if running {
            self.start_from(&images, None).await;
            self.wait_until(|| self.all_follow_record()).await;
            if !self.all_follow_record() {
                return Ok(());
            }
            // Every serving node has adopted the record.
            let record = self.store.record();
            for image in images.iter_mut().filter(|image| record.member(image.node).is_some()) {
                (image.epoch, image.config_id) = (record.epoch, Uuid::from_u128(record.config_id));
            }
        }
        let last = self.store.record();
        let Some(old) = self.pick_earlier_record(&last, &images) else {
            self.start_from(&images, None).await;
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
            self.start_from(&images, Some(&old)).await;
        }
        tokio::time::sleep(REFUSAL_TIME).await;
        self.check_rollback_refused(&old, running)?;
        // A replica that is not in sync may have noted another history by now. The other record of
        // that epoch cannot be used then.
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

    /// A record to roll the store back to: it lists the same images, and some image can tell it
    /// from the current record.
    fn pick_earlier_record(
        &self,
        last: &MirrorConfig,
        images: &[RecoveryCandidate],
    ) -> Option<MirrorConfig> {
        let rng = self.world.rng();
        let mut past: Vec<_> = self.store.past();
        past.retain(|old| same_images(old, last));
        if rng.chance(0.3) {
            // The mirror has continued without these images.
            past.iter_mut().for_each(|old| (old.epoch, old.config_id) = (last.epoch, draw(rng)));
        }
        past.retain(|old| is_detectable(old, images));
        (!past.is_empty()).then(|| rng.pick(&past).clone())
    }

    /// The current record is not read from the store.
    fn check_rollback_refused(&self, old: &MirrorConfig, running: bool) -> Result<(), String> {
        let serves = |n: &&Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
        let serves = self.nodes.iter().find(serves).filter(|_| !running);
        if self.mistake == Mistake::TrustsRestoredStore {
            return Ok(());
        }
        if let Some(node) = serves {
            return Err(format!("node {} serves by a rolled-back record", node.id));
        }
        let now = self.store.record();
        if now != *old {
            return Err(format!("a record replaced a rolled-back one: {now:?}"));
        }
        Ok(())
    }

    /// An operator builds a record from what the images know.
    async fn recover(&self, last: MirrorConfig, old: &MirrorConfig) -> Result<(), String> {
        let rng = self.world.rng();
        let copies = self.stop_and_read_images().await;
        let newest = recovery::choose_primary(&copies).map_err(|e| e.to_string())?;
        let known = copies.iter().map(|c| c.epoch).max().unwrap_or_default();
        let above = known.max(old.epoch).max(last.epoch);
        let replica = |r: &ConfigReplica| ConfigReplica { is_new: false, ..*r };
        let replicas = last.replicas.iter().map(replica).collect();
        // If the last primary's log is lost, no image names it, and the operator has to.
        let lead = newest.map_or(last.primary, |newest| copies[newest.primary].node);
        let record = recovery::recovered_config(lead, replicas, above, draw(rng));
        self.world
            .note(format!("the volume continues with node {lead}, record {}", record.epoch.0));
        if !self.intact_nodes.borrow().contains(&lead) {
            self.record_unflushed_loss();
        }
        self.store.recover(last, &record);
        self.start_from(&copies, None).await;
        Ok(())
    }

    /// Stops all nodes and reads what their images have adopted.
    async fn stop_and_read_images(&self) -> Vec<RecoveryCandidate> {
        let power = self.world.rng().chance(0.3);
        self.nodes.iter().for_each(|node| self.stop(node, power));
        tokio::time::sleep(MAX_PUT_DELAY).await;
        let mut images = Vec::new();
        for node in &self.nodes {
            images.extend(read_adopted(node).await);
        }
        images
    }

    /// Starts all nodes. Nodes whose images show that `record` is outdated start first, so that the
    /// others hear of it before they may become primary alone.
    async fn start_from(&self, images: &[RecoveryCandidate], record: Option<&MirrorConfig>) {
        let knows_of_rollback = |node: &&Rc<Node>| {
            let image = images.iter().find(|image| image.node == node.id);
            record.zip(image).is_some_and(|(record, image)| is_newer_than(image, record))
        };
        let first: Vec<_> = self.nodes.iter().filter(knows_of_rollback).collect();
        first.iter().for_each(|node| self.start(node));
        self.wait_until(|| first.iter().all(|node| node.mirror.borrow().is_some())).await;
        self.nodes.iter().for_each(|node| self.start(node));
    }

    /// Whether all members serve by the current record, and no replica that runs has yet to hear
    /// of it: one that has not could believe a rolled-back record before the others can object.
    fn all_follow_record(&self) -> bool {
        let record = self.store.record();
        let serves = |n: &Rc<Node>| n.mirror.borrow().as_ref().is_some_and(Mirror::is_serving);
        let knows = |n: &Rc<Node>| n.status().is_none_or(|s| s.config.as_ref() == Some(&record));
        self.nodes.iter().filter(|n| record.member(n.id).is_some()).all(serves)
            && self.nodes.iter().all(knows)
    }

    /// Waits for a condition, for a short time.
    pub(super) async fn wait_until(&self, is: impl Fn() -> bool) {
        let began = self.world.now();
        while !is() && self.world.now() < began + START_LIMIT {
            self.pause(500).await;
        }
    }
}

fn draw(rng: &rt::sim::Rng) -> u128 {
    (u128::from(rng.u64()) << 64) | u128::from(rng.u64())
}

/// What the image of a stopped node has adopted; `None` if it cannot be read.
async fn read_adopted(node: &Rc<Node>) -> Option<RecoveryCandidate> {
    let image = node.image.get()?;
    let look = node.host.run(move |core| async move {
        let file = open(&core, image).await.ok()?;
        let area = file.log_area().await.ok()?;
        read_superblock(&*area).await.ok()?.ok()
    });
    let found = tokio::time::timeout(START_LIMIT, look.join()).await.ok().flatten().flatten();
    node.host.kill();
    let found = found?;
    let node_of = |name: &Uuid| u16::try_from(name.as_u128()).ok().map(NodeId);
    Some(RecoveryCandidate {
        node: node.id,
        epoch: Epoch(found.adopted_epoch),
        config_id: found.config_id,
        in_sync: found.in_sync_hint.iter().flatten().filter_map(node_of).collect(),
    })
}
