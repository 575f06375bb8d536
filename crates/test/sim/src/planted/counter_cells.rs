//! Cells that count upwards: one sector each, on a bare disk.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::disk::{Disk, OpenOptions};
use rt::sim::{DiskFaults, DiskSetup, HostSetup, World};

use super::Variant;
use crate::bytes;

const DISK: &str = "/dev/ledger";
const CELLS: usize = 8;
const WRITERS: usize = 4;
const SECTOR: usize = 512;
const CRASH_ROUNDS: usize = 3;

/// What the clients know of each cell.
#[derive(Debug, Default)]
struct ClientState {
    issued: [u64; CELLS],
    acknowledged: [u64; CELLS],
}

/// One open of the store.
#[derive(Clone)]
struct CounterStore {
    core: Core,
    disk: Disk,
    known: Rc<RefCell<ClientState>>,
    mistake: Option<Mistake>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// Acknowledges a write that was not synced.
    AcknowledgesEarly,
    /// After a failed sync reopens the disk, syncs, and acknowledges.
    SyncAgain,
}

pub(super) async fn ack_early(world: World, variant: Variant) -> Result<(), String> {
    let mistake = (variant == Variant::Mistaken).then_some(Mistake::AcknowledgesEarly);
    run(world, mistake, DiskFaults::default()).await
}

pub(super) async fn sync_again(world: World, variant: Variant) -> Result<(), String> {
    let mistake = (variant == Variant::Mistaken).then_some(Mistake::SyncAgain);
    run(world, mistake, DiskFaults { sync_error: 0.05, ..DiskFaults::default() }).await
}

async fn run(world: World, mistake: Option<Mistake>, faults: DiskFaults) -> Result<(), String> {
    let host = world.add_host("ledger", HostSetup::default());
    let disk = host.add_disk(DISK, DiskSetup::device(1 << 20).faults(faults.clone()));
    let known = Rc::new(RefCell::new(ClientState::default()));
    for _ in 0..CRASH_ROUNDS {
        disk.set_faults(faults.clone());
        let clients = Rc::clone(&known);
        host.run(move |core| serve(core, mistake, clients));
        tokio::time::sleep(
            world.rng().duration_between(Duration::ZERO, Duration::from_millis(200)),
        )
        .await;
        host.power_cut();
        disk.set_faults(DiskFaults::default());
        let judged = Rc::clone(&known);
        let check = host.run(move |core| check(core, judged));
        check.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))?;
        host.power_cut();
    }
    Ok(())
}

async fn open(core: &Core) -> Result<Disk, String> {
    core.open_disk(Path::new(DISK), OpenOptions::new()).await.map_err(|e| e.to_string())
}

/// Opens the disk, again whenever it has failed, and runs the writers.
async fn serve(core: Core, mistake: Option<Mistake>, known: Rc<RefCell<ClientState>>) {
    loop {
        let Ok(disk) = open(&core).await else { continue };
        let ledger = CounterStore { core: core.clone(), disk, known: Rc::clone(&known), mistake };
        if ledger.recover().await.is_none() {
            continue;
        }
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let ledger = ledger.clone();
                tokio::task::spawn_local(async move { ledger.count(writer).await })
            })
            .collect();
        for writer in writers {
            // A writer that panics has ended the world already.
            let _ = writer.await;
        }
    }
}

impl CounterStore {
    /// Resolves the writes that were not acknowledged before the disk failed.
    async fn recover(&self) -> Option<()> {
        let issued = self.known.borrow().issued;
        if self.mistake != Some(Mistake::SyncAgain) {
            for (cell, &value) in issued.iter().enumerate() {
                self.write(cell, value).await?;
            }
        }
        self.disk.sync().await.ok()?;
        self.known.borrow_mut().acknowledged = issued;
        Some(())
    }

    async fn write(&self, cell: usize, value: u64) -> Option<()> {
        let mut sector = [0; SECTOR];
        sector[..8].copy_from_slice(&value.to_le_bytes());
        bytes::write(&self.core, &self.disk, (cell * SECTOR) as u64, &sector).await.ok()
    }

    /// One writer: writes its own cells in turn, until the disk fails.
    async fn count(&self, writer: usize) -> Option<()> {
        loop {
            for cell in (writer..CELLS).step_by(WRITERS) {
                let value = {
                    let mut known = self.known.borrow_mut();
                    known.issued[cell] += 1;
                    known.issued[cell]
                };
                self.write(cell, value).await?;
                if self.mistake != Some(Mistake::AcknowledgesEarly) {
                    self.disk.sync().await.ok()?;
                }
                self.known.borrow_mut().acknowledged[cell] = value;
            }
        }
    }
}

async fn check(core: Core, known: Rc<RefCell<ClientState>>) -> Result<(), String> {
    let disk = open(&core).await?;
    for cell in 0..CELLS {
        let sector = bytes::read(&core, &disk, (cell * SECTOR) as u64, SECTOR)
            .await
            .map_err(|e| format!("cell {cell}: {e}"))?;
        let found = u64::from_le_bytes(sector[..8].try_into().expect("eight bytes"));
        let known = known.borrow();
        let (low, high) = (known.acknowledged[cell], known.issued[cell]);
        if !(low..=high).contains(&found) {
            return Err(format!("cell {cell} holds {found}: {low} acknowledged, {high} issued"));
        }
    }
    Ok(())
}
