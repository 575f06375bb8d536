//! Disk faults of replicas, and retrying nodes that could not open their image.

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use mirror::membership::NotServingReason;
use mirror::{FreeBytesFuture, FreeSpace};
use rt::sim::{BadDuration, BadRange, DiskControl, DiskFaults, FailingOps, Host, TornDamage};

use super::{BYTES, DATA, MirrorTestbed, Node};

/// Locations of both label copies, of the log's superblock, and of its one page of cells.
const LABEL_OFFSETS: [u64; 2] = [0, 512 << 10];
const SUPERBLOCK_OFFSETS: [u64; 2] = [516 << 10, 520 << 10];
const CELL_PAGE_OFFSET: u64 = 524 << 10;

/// The file backend of a host.
#[derive(Debug)]
pub(super) struct HostSpace(pub(super) Host);

impl FreeSpace for HostSpace {
    fn free_bytes(&self) -> FreeBytesFuture<'_> {
        let left = self.0.space_limit().map(|limit| limit.saturating_sub(self.0.space_used()));
        Box::pin(std::future::ready(left))
    }
}

impl MirrorTestbed {
    /// The disk of a node fails in one way for a while.
    pub(super) async fn inject_disk_fault(&self, node: &Rc<Node>) {
        let Some(disk) = node.disk() else { return };
        let rng = self.world.rng();
        let some = |most: f64| most * rng.unit();
        let mut faults = DiskFaults { stall_for: Duration::from_secs(9), ..DiskFaults::default() };
        match rng.below(6) {
            0 => faults.read_error = some(0.1),
            1 => faults.write_error = some(0.01),
            2 => faults.sync_error = some(0.02),
            3 => faults.stall = some(0.01),
            4 => self.limit_space(node, Some(rng.below(16))),
            _ => {
                disk.unplug();
                node.was_unplugged.set(true);
                // Unsynced data is lost with the power.
                self.record_data_loss(node, true);
            }
        }
        self.world.note(format!("the disk of node {} gets faults: {faults:?}", node.id));
        node.sync_may_have_failed.set(node.sync_may_have_failed.get() || faults.sync_error > 0.0);
        disk.set_faults(faults);
        self.pause(10_000).await;
        self.world.note(format!("the disk of node {} is healthy", node.id));
        disk.set_faults(DiskFaults::default());
        disk.plug();
        self.limit_space(node, None);
    }

    /// Limits the space on a node to so many pages, or lifts the limit.
    pub(super) fn limit_space(&self, node: &Node, pages: Option<u64>) {
        let space = pages.map(|pages| node.host.space_used() + pages * 4096);
        node.host.update_setup(|setup| setup.space_bytes = space);
    }

    /// Makes some blocks of a replica unreadable until they are rewritten.
    pub(super) fn make_blocks_unreadable(&self, node: &Node) {
        let Some(disk) = node.disk() else { return };
        let rng = self.world.rng();
        for _ in 0..rng.between(1, 4) {
            // Spare the counter: a client that cannot read it cannot raise it either.
            self.make_block_unreadable(
                &disk,
                rng.between(1, BYTES / u64::from(self.block_size) - 1),
            );
        }
    }

    pub(super) fn make_block_unreadable(&self, disk: &DiskControl, block: u64) {
        self.world.note(format!("block {block} on {disk:?} becomes unreadable"));
        make_bytes_unreadable(
            disk,
            DATA + block * u64::from(self.block_size),
            self.block_size.into(),
        );
    }

    /// Corrupts the medium of a stopped node: the log, or one copy of the label.
    pub(super) fn inject_bit_rot(&self, node: &Node) {
        let rng = self.world.rng();
        let Some(disk) = node.disk().filter(|_| rng.chance(0.3)) else { return };
        let mut places = match rng.below(4) {
            0 => vec![CELL_PAGE_OFFSET],
            1 => SUPERBLOCK_OFFSETS.to_vec(),
            _ => vec![*rng.pick(&SUPERBLOCK_OFFSETS)],
        };
        if node.labels_intact.get() && rng.chance(0.3) {
            // With both copies corrupt, the image cannot be recognised.
            node.labels_intact.set(false);
            places = vec![*rng.pick(&LABEL_OFFSETS)];
        }
        for at in places {
            self.world.note(format!("{disk:?} is corrupted at {at}"));
            match rng.below(2) {
                0 => make_bytes_unreadable(&disk, at, 512),
                _ => disk.flip_bit(at + rng.below(512), u8::try_from(rng.below(8)).expect("small")),
            }
        }
    }

    /// Cuts the power of a node, perhaps during a write. The disk tears only whole pages of its
    /// own; where blocks are as small as its atomic write unit, no block is torn.
    pub(super) fn cut_power(&self, node: &Node) {
        let rng = self.world.rng();
        let torn = self.block_size == 512 && rng.chance(0.5);
        let faults = node.disk().map(|disk| disk.faults()).unwrap_or_default();
        node.was_unplugged.set(false);
        node.sync_may_have_failed.set(faults.sync_error > 0.0);
        let Some(disk) = node.disk().filter(|_| torn) else { return node.host.power_cut() };
        let damage = TornDamage::Mixed { bytes: 512 };
        disk.set_faults(DiskFaults { torn: 0.5, torn_damage: damage, ..faults.clone() });
        node.host.power_cut();
        disk.set_faults(faults);
    }

    /// Retries nodes that could not open their image or have lost their disk.
    pub(super) async fn restart_failed_nodes(self: Rc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for node in &self.nodes {
                let lost =
                    node.status().is_some_and(|s| s.not_serving == Some(NotServingReason::LegLost));
                if lost || node.open_error.borrow().is_some() {
                    self.world.note(format!("the leg of node {} is reset", node.id));
                    self.stop(node, false);
                    self.pause(1000).await;
                    self.start(node);
                    if self.last_forced_epoch.get() == self.store.record().epoch {
                        // The forced takeover ended with the process.
                        self.last_forced_epoch.set(Epoch(0));
                    }
                }
            }
        }
    }
}

fn make_bytes_unreadable(disk: &DiskControl, at: u64, len: u64) {
    let (ops, until) = (FailingOps::Reads, BadDuration::Rewritten);
    disk.add_bad_range(BadRange { bytes: at..at + len, ops, duration: until });
}
