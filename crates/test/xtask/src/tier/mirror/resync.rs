//! A node that was away gets what was written meanwhile, and next to nothing else (RFD 0010, 6).

use super::{is_fit, show};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    house::House,
    server::Unit,
};
use anyhow::{Context, Result, ensure};
use probe::{
    Disk,
    iscsi::{Refused, Session},
    registers::Dice,
};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

const SIZE: &str = "10GiB";
const BYTES: u64 = 10 << 30;
/// How long node b is away.
const AWAY: Duration = Duration::from_secs(60);
/// What is written lies together in pieces of so many bytes, as that of file systems and databases does.
const PIECE: u64 = 1 << 20;
/// What is written meanwhile, and what may be copied, in hundredths of the volume.
const WRITTEN: u64 = 2;
const COPIED: u64 = 3;
const BLOCK: usize = 64 << 10;
const METRIC: &str = "windrose_volume_resynced_bytes_total{volume=\"resync\"}";

/// Node b is away for a minute, and has a copy of a larger volume.
pub(super) fn run(house: &House, cluster: &mut Cluster, _: &Mirrored, _: u64) -> bool {
    let mut figures = String::new();
    let passed =
        house.check("a minute without node b brings it what was written, and no more", || {
            let volume = cluster.create("resync", SIZE)?;
            cluster.nodes[B].kill()?;
            let left = Instant::now();
            let written = write(&volume.exported.unit)?;
            std::thread::sleep((left + AWAY).saturating_duration_since(Instant::now()));
            let before = cluster.nodes[A].metric(METRIC)?;
            let (sent, returned) = (cluster.bytes_to(B)?, Instant::now());
            cluster.nodes[B].start()?;
            cluster.await_safe()?;
            let copied = cluster.nodes[A].metric(METRIC)? - before;
            figures = format!(
                "written {} MiB, copied {} MiB of {SIZE}; safe {:.1} s after its start",
                written >> 20,
                copied >> 20,
                returned.elapsed().as_secs_f64(),
            );
            ensure!(copied >= written, "{copied} bytes were copied, of {written} that it lacks");
            ensure!(copied * 100 < BYTES * COPIED, "{copied} bytes were copied");
            if let Some((before, after)) = sent.zip(cluster.bytes_to(B)?) {
                ensure!(
                    (after - before) * 100 < BYTES * COPIED,
                    "{} bytes went to it",
                    after - before
                );
            }
            cluster.copies_are_equal(&volume)
        });
    show(house, &figures);
    is_fit(house, cluster, passed)
}

/// Writes all of [`WRITTEN`] hundredths of the volume; returns how many bytes that are.
fn write(unit: &Unit) -> Result<u64> {
    let lun = u8::try_from(unit.lun).context("an odd LUN")?;
    let mut session = Session::login(unit.portal, "iqn.2026-01.test:away", &unit.target, lun, 1)?;
    let mut dice = Dice::new(10);
    let mut data: Vec<u8> = (0..BLOCK / 8).flat_map(|_| dice.roll().to_le_bytes()).collect();
    let (mut pieces, wanted) = (BTreeSet::new(), BYTES / PIECE * WRITTEN / 100);
    while (pieces.len() as u64) < wanted {
        pieces.insert(dice.below(BYTES / PIECE) * PIECE);
    }
    let block = session.block_bytes() as u64;
    for at in pieces.iter().flat_map(|piece| (*piece..piece + PIECE).step_by(BLOCK)) {
        data[..8].copy_from_slice(&at.to_le_bytes());
        while let Err(error) = session.write(at / block, &data, false) {
            // The access state has changed when node b was gone: that is said once.
            let told = Refused::of(&error).is_some_and(|refused| refused.sense[0] == 6);
            ensure!(told, error);
        }
    }
    session.logout().context("cannot log out")?;
    Ok(wanted * PIECE)
}
