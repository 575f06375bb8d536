//! One record in two copies, larger than the disk's atomic write unit.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::disk::{Disk, OpenOptions};
use rt::sim::{DiskSetup, HostSetup, World};

use super::Variant;
use crate::bytes;

const DISK: &str = "/dev/record";
const RECORD: usize = 16 << 10;
const COPIES: [u64; 2] = [0, 64 << 10];

#[derive(Debug, Default)]
struct ClientState {
    issued: Cell<u64>,
    acknowledged: Cell<u64>,
}

pub(super) async fn run(world: World, variant: Variant) -> Result<(), String> {
    let host = world.add_host("record", HostSetup::default());
    host.add_disk(DISK, DiskSetup::device(1 << 20));
    let known = Rc::new(ClientState::default());
    for _ in 0..4 {
        let writer = Rc::clone(&known);
        host.run(move |core| write_records(core, variant, writer));
        tokio::time::sleep(
            world.rng().duration_between(Duration::ZERO, Duration::from_millis(150)),
        )
        .await;
        host.power_cut();
        let judged = Rc::clone(&known);
        let check = host.run(move |core| check(core, judged));
        check.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))?;
        host.power_cut();
    }
    Ok(())
}

async fn open(core: &Core) -> Disk {
    let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
    disk.expect("the disk has no other user")
}

/// Writes ever newer records.
async fn write_records(core: Core, variant: Variant, known: Rc<ClientState>) -> Option<()> {
    let disk = open(&core).await;
    // A crash may have left only one copy: restore the second.
    let (newest, _) = newest(&core, &disk).await?;
    let mut record = newest;
    loop {
        let bytes = record.to_le_bytes().repeat(RECORD / 8);
        match variant {
            Variant::Correct => {
                for at in COPIES {
                    bytes::write(&core, &disk, at, &bytes).await.ok()?;
                    disk.sync().await.ok()?;
                }
            }
            Variant::Mistaken => {
                let [a, b] = COPIES.map(|at| bytes::write(&core, &disk, at, &bytes));
                let (a, b) = tokio::join!(a, b);
                a.and(b).ok()?;
                disk.sync().await.ok()?;
            }
        }
        known.acknowledged.set(record);
        record = known.issued.get() + 1;
        known.issued.set(record);
    }
}

/// The newest intact record, and how many copies are intact.
async fn newest(core: &Core, disk: &Disk) -> Option<(u64, usize)> {
    let mut found = Vec::new();
    for at in COPIES {
        let bytes = bytes::read(core, disk, at, RECORD).await.ok()?;
        if bytes.chunks_exact(8).all(|w| w == &bytes[..8]) {
            found.push(u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")));
        }
    }
    Some((found.iter().copied().max()?, found.len()))
}

async fn check(core: Core, known: Rc<ClientState>) -> Result<(), String> {
    let disk = open(&core).await;
    let Some((record, _)) = newest(&core, &disk).await else {
        return Err("no copy is whole".into());
    };
    if record < known.acknowledged.get() || record > known.issued.get() {
        return Err(format!("record {record}, and {known:?}"));
    }
    Ok(())
}
