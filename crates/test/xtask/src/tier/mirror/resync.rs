//! A node that was down gets what was written meanwhile, and little else (RFD 0010, 6).

use super::{is_usable, show};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    run_context::RunContext,
    server::IscsiLun,
};
use anyhow::{Context, Result, ensure};
use probe::{
    BlockClient,
    iscsi::{ScsiFailure, Session},
    registers::SeededRng,
};
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

const SIZE: &str = "10GiB";
const BYTES: u64 = 10 << 30;
/// How long node b is down.
const NODE_DOWN_TIME: Duration = Duration::from_secs(60);
/// Writes are clustered in pieces of this many bytes, like those of file systems and databases.
const WRITE_CHUNK: u64 = 1 << 20;
/// What is written meanwhile, and what may be copied, in percent of the volume.
const WRITTEN_PERCENT: u64 = 2;
const MAX_RESYNC_PERCENT: u64 = 3;
const BLOCK: usize = 64 << 10;
const METRIC: &str = "windrose_volume_resynced_bytes_total{volume=\"resync\"}";

/// Node b is down for a minute and has a replica of a larger volume.
pub(super) fn run(context: &RunContext, cluster: &mut Cluster, _: &MirroredVolume, _: u64) -> bool {
    let mut figures = String::new();
    let passed =
        context.check("a minute without node b brings it what was written, and no more", || {
            let volume = cluster.create("resync", SIZE)?;
            cluster.nodes[NODE_B].kill()?;
            let left = Instant::now();
            let written = write(&volume.exported.unit)?;
            std::thread::sleep((left + NODE_DOWN_TIME).saturating_duration_since(Instant::now()));
            let before = cluster.nodes[NODE_A].metric(METRIC)?;
            let (sent, returned) = (cluster.bytes_to(NODE_B)?, Instant::now());
            cluster.nodes[NODE_B].start()?;
            cluster.await_safe()?;
            let copied = cluster.nodes[NODE_A].metric(METRIC)? - before;
            figures = format!(
                "written {} MiB, copied {} MiB of {SIZE}; safe {:.1} s after its start",
                written >> 20,
                copied >> 20,
                returned.elapsed().as_secs_f64(),
            );
            ensure!(copied >= written, "{copied} bytes were copied, of {written} that it lacks");
            ensure!(copied * 100 < BYTES * MAX_RESYNC_PERCENT, "{copied} bytes were copied");
            if let Some((before, after)) = sent.zip(cluster.bytes_to(NODE_B)?) {
                ensure!(
                    (after - before) * 100 < BYTES * MAX_RESYNC_PERCENT,
                    "{} bytes went to it",
                    after - before
                );
            }
            cluster.check_replicas_equal(&volume)
        });
    show(context, &figures);
    is_usable(context, cluster, passed)
}

/// Writes [`WRITTEN_PERCENT`] percent of the volume; returns the number of bytes.
fn write(unit: &IscsiLun) -> Result<u64> {
    let lun = u8::try_from(unit.lun).context("an odd LUN")?;
    let mut session = Session::login(unit.portal, "iqn.2026-01.test:away", &unit.target, lun, 1)?;
    let mut dice = SeededRng::new(10);
    let mut data: Vec<u8> = (0..BLOCK / 8).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    let (mut pieces, wanted) = (BTreeSet::new(), BYTES / WRITE_CHUNK * WRITTEN_PERCENT / 100);
    while (pieces.len() as u64) < wanted {
        pieces.insert(dice.next_below(BYTES / WRITE_CHUNK) * WRITE_CHUNK);
    }
    let block = session.block_bytes() as u64;
    for at in pieces.iter().flat_map(|piece| (*piece..piece + WRITE_CHUNK).step_by(BLOCK)) {
        data[..8].copy_from_slice(&at.to_le_bytes());
        while let Err(error) = session.write(at / block, &data, false) {
            // The access state changed when node b went down: a unit attention reports this once.
            let told =
                ScsiFailure::from_io_error(&error).is_some_and(|refused| refused.sense[0] == 6);
            ensure!(told, error);
        }
    }
    session.logout().context("cannot log out")?;
    Ok(wanted * WRITE_CHUNK)
}
