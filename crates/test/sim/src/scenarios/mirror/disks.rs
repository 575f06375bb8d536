//! What befalls the disks of replicas, and who gives a node another try.

use std::rc::Rc;
use std::time::Duration;

use block::Epoch;
use mirror::member::Why;
use mirror::{FreeBytes, FreeSpace};
use rt::sim::{Bad, BadOps, BadUntil, Damage, DiskControl, DiskFaults, Host};

use super::{BYTES, Bench, DATA, Node};

/// Where the two copies of the label are, and of the log's superblock, and its one page of cells.
const LABELS: [u64; 2] = [0, 512 << 10];
const SUPERBLOCKS: [u64; 2] = [516 << 10, 520 << 10];
const CELL: u64 = 524 << 10;

/// What a host has for files.
#[derive(Debug)]
pub(super) struct Space(pub(super) Host);

impl FreeSpace for Space {
    fn free_bytes(&self) -> FreeBytes<'_> {
        let left = self.0.space_limit().map(|limit| limit.saturating_sub(self.0.space_used()));
        Box::pin(std::future::ready(left))
    }
}

impl Bench {
    /// The disk of a node fails in one way for a while.
    pub(super) async fn ail(&self, node: &Rc<Node>) {
        let Some(disk) = node.disk() else { return };
        let rng = self.world.rng();
        let some = |most: f64| most * rng.unit();
        let mut faults = DiskFaults { stall_for: Duration::from_secs(9), ..DiskFaults::default() };
        match rng.below(6) {
            0 => faults.read_error = some(0.1),
            1 => faults.write_error = some(0.01),
            2 => faults.sync_error = some(0.02),
            3 => faults.stall = some(0.01),
            4 => self.fill(node, Some(rng.below(16))),
            _ => {
                disk.pull_out();
                node.pulled.set(true);
                // What it had not written is lost with its power.
                self.lose(node, true);
            }
        }
        self.world.note(format!("the disk of node {} ails: {faults:?}", node.id));
        node.unsynced.set(node.unsynced.get() || faults.sync_error > 0.0);
        disk.set_faults(faults);
        self.pause(10_000).await;
        self.world.note(format!("the disk of node {} is well", node.id));
        disk.set_faults(DiskFaults::default());
        disk.plug_in();
        self.fill(node, None);
    }

    /// Leaves room for so many pages on a node, or for any number.
    pub(super) fn fill(&self, node: &Node, pages: Option<u64>) {
        let space = pages.map(|pages| node.host.space_used() + pages * 4096);
        node.host.set_up(|setup| setup.space = space);
    }

    /// Some blocks of a replica cannot be read any more until they are written.
    pub(super) fn spoil(&self, node: &Node) {
        let Some(disk) = node.disk() else { return };
        let rng = self.world.rng();
        for _ in 0..rng.between(1, 4) {
            // Not the tally: a client that cannot read it cannot raise it either.
            self.spoil_block(&disk, rng.between(1, BYTES / u64::from(self.block_size) - 1));
        }
    }

    pub(super) fn spoil_block(&self, disk: &DiskControl, block: u64) {
        self.world.note(format!("block {block} on {disk:?} becomes unreadable"));
        spoil_bytes(disk, DATA + block * u64::from(self.block_size), self.block_size.into());
    }

    /// The medium of a node that is down changes: where the log is, or one copy of the label.
    pub(super) fn rot(&self, node: &Node) {
        let rng = self.world.rng();
        let Some(disk) = node.disk().filter(|_| rng.chance(0.3)) else { return };
        let mut places = match rng.below(4) {
            0 => vec![CELL],
            1 => SUPERBLOCKS.to_vec(),
            _ => vec![*rng.pick(&SUPERBLOCKS)],
        };
        if node.labelled.get() && rng.chance(0.3) {
            // With both copies gone it is no image any more.
            node.labelled.set(false);
            places = vec![*rng.pick(&LABELS)];
        }
        for at in places {
            self.world.note(format!("{disk:?} rots at {at}"));
            match rng.below(2) {
                0 => spoil_bytes(&disk, at, 512),
                _ => disk.flip_bit(at + rng.below(512), u8::try_from(rng.below(8)).expect("small")),
            }
        }
    }

    /// The power of a node fails, perhaps while its disk writes. What it tears are its own pages, and
    /// where blocks are as small as what it writes at once no block is torn.
    pub(super) fn cut_power(&self, node: &Node) {
        let rng = self.world.rng();
        let torn = self.block_size == 512 && rng.chance(0.5);
        let faults = node.disk().map(|disk| disk.faults()).unwrap_or_default();
        node.pulled.set(false);
        node.unsynced.set(faults.sync_error > 0.0);
        let Some(disk) = node.disk().filter(|_| torn) else { return node.host.power_cut() };
        let damage = Damage::Mixed { bytes: 512 };
        disk.set_faults(DiskFaults { torn: 0.5, damage, ..faults.clone() });
        node.host.power_cut();
        disk.set_faults(faults);
    }

    /// Gives nodes another try that could not open their image, or have lost their leg.
    pub(super) async fn mend_nodes(self: Rc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for node in &self.nodes {
                let lost = node.status().is_some_and(|s| s.why == Some(Why::LegDead));
                if lost || node.broken.borrow().is_some() {
                    self.world.note(format!("node {} is given another try", node.id));
                    self.stop(node, false);
                    self.pause(1000).await;
                    self.start(node);
                    if self.forced.get() == self.store.record().epoch {
                        // The order to go on has ended with it.
                        self.forced.set(Epoch(0));
                    }
                }
            }
        }
    }
}

fn spoil_bytes(disk: &DiskControl, at: u64, len: u64) {
    let (ops, until) = (BadOps::Reads, BadUntil::Rewritten);
    disk.add_bad(Bad { bytes: at..at + len, ops, until });
}
