//! Sectors that hold their own address and version, on a disk that returns wrong data.

use std::path::Path;

use rt::Core;
use rt::disk::{Disk, OpenOptions};
use rt::sim::{DiskFaults, DiskSetup, HostSetup, World, content_hash};

use super::Variant;
use crate::bytes;

const DISK: &str = "/dev/liar";
const SECTORS: u64 = 64;
const SECTOR: usize = 512;

pub(super) async fn run(world: World, variant: Variant) -> Result<(), String> {
    let host = world.add_host("stamps", HostSetup::default());
    let faults = DiskFaults {
        bit_rot: 0.005,
        misdirected_read: 0.005,
        misdirected_write: 0.005,
        lost_write: 0.005,
        ..DiskFaults::default()
    };
    host.add_disk(DISK, DiskSetup::device(SECTORS * SECTOR as u64).faults(faults));
    let dice = world.clone();
    let work = host.run(move |core| async move {
        let disk = core.open_disk(Path::new(DISK), OpenOptions::new()).await;
        run_workload(&core, &disk.map_err(|e| e.to_string())?, &dice, variant).await
    });
    work.join().await.unwrap_or_else(|| Err("the host crashed by itself".into()))
}

/// A sector: its address, its version, noise, and a checksum of all that.
fn sector(at: u64, version: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(SECTOR);
    bytes.extend(at.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    while bytes.len() < SECTOR - 8 {
        bytes.push(u8::try_from((at + version + bytes.len() as u64) % 251).expect("below 251"));
    }
    bytes.extend(content_hash(&bytes).to_le_bytes());
    bytes
}

/// Whether a sector is the one asked for. The version comes from memory, which detects lost writes.
fn is_valid(bytes: &[u8], at: u64, version: u64) -> bool {
    let (body, sum) = bytes.split_at(SECTOR - 8);
    sum == content_hash(body).to_le_bytes()
        && body[..8] == at.to_le_bytes()
        && body[8..16] == version.to_le_bytes()
}

async fn run_workload(
    core: &Core,
    disk: &Disk,
    world: &World,
    variant: Variant,
) -> Result<(), String> {
    let mut versions = vec![0u64; usize::try_from(SECTORS).expect("few sectors")];
    for step in 1..600u64 {
        let at = world.rng().below(SECTORS);
        let version = &mut versions[usize::try_from(at).expect("few sectors")];
        if world.rng().chance(0.5) {
            *version = step;
            let bytes = sector(at, step);
            bytes::write(core, disk, at * SECTOR as u64, &bytes)
                .await
                .map_err(|e| e.to_string())?;
            continue;
        }
        if *version == 0 {
            continue;
        }
        let bytes =
            bytes::read(core, disk, at * SECTOR as u64, SECTOR).await.map_err(|e| e.to_string())?;
        // Detected damage is reported to the caller as an error; this store can do no better.
        let accepted = variant == Variant::Mistaken || is_valid(&bytes, at, *version);
        if accepted && bytes != sector(at, *version) {
            return Err(format!("sector {at} was handed out and is not version {version}"));
        }
    }
    Ok(())
}
