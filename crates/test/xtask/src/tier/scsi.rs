//! A mirrored volume as SCSI initiators see it, through both nodes: libiscsi's suite; cluster
//! software and dm-multipath in a guest while nodes die, are cut off and drained; offloaded copies;
//! and pools under the volume.

mod offload;
mod pools;
mod targets;

use super::{libiscsi, node_faults};
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestJob, GuestKernel, GuestSignals, INITIATOR},
    node::Profile,
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use std::time::Duration;

const VOLUME: &str = "scsi";
const SIZE: &str = "1GiB";
const LIMIT: Duration = Duration::from_secs(400);

/// What guests do, by the names for `--only`.
const GUEST_PARTS: [&str; 4] = ["reservations", "multipath", "offload", "pools"];

/// Steps of `reservations.sh` in which a node dies.
const STEPS: usize = 6;
/// dm-multipath's path selectors.
const SELECTORS: [&str; 2] = ["round-robin", "service-time"];
/// Writes per second while paths fail and recover.
const RATE: u64 = 200;

pub(super) fn run(context: &RunContext) -> Result<()> {
    let directory = context.directory("scsi")?;
    let mut cluster = Cluster::start(context, &directory, Profile::Dev)?;
    if !context.check("two data nodes and a witness form a cluster", || cluster.form_cluster()) {
        return Ok(());
    }
    let volume = cluster.create(VOLUME, SIZE)?;
    if context.matches_filter("libiscsi") {
        suites(context, &cluster, &volume)?;
    }
    let kernel = GuestKernel::choose(context)?;
    let parts = GUEST_PARTS.into_iter().filter(|name| context.matches_filter(name));
    let parts = context.sample("work of SCSI guests", parts, kernel.sample_parts());
    if parts.contains(&"reservations") {
        reservations(context, &kernel, &mut cluster, &volume)?;
    }
    if parts.contains(&"multipath") {
        multipath(context, &kernel, &mut cluster, &volume)?;
    }
    if parts.contains(&"offload") {
        offload::run(context, &kernel, &cluster)?;
    }
    if context.matches_filter("targets") {
        targets::run(context, &cluster);
    }
    if parts.contains(&"pools") {
        pools::run(context, &kernel, &mut cluster)?;
    }
    context.check("both copies hold the same bytes", || cluster.check_replicas_equal(&volume));
    context.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Runs libiscsi's suite through either node.
fn suites(context: &RunContext, cluster: &Cluster, volume: &MirroredVolume) -> Result<()> {
    for (node, what) in [(NODE_A, "libiscsi through node a"), (NODE_B, "libiscsi through node b")] {
        let mut unit = volume.exported.unit.clone();
        unit.portal = cluster.nodes[node].iscsi;
        libiscsi::suite(context, &unit, None, Some(what))?;
    }
    Ok(())
}

/// Persistent reservations by two hosts, while nodes die in the middle of each step.
fn reservations(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) -> Result<()> {
    let order = order("reservations.sh", cluster, volume);
    context.display.begin_step(&format!("{}: persistent reservations", kernel.name()));
    let ran = guest::run_beside(context, kernel, &order, |signs| inject_faults(cluster, signs));
    let clean = ran.is_ok_and(|(clean, ())| clean);
    if !clean {
        cluster.show_logs(context);
        context.fail("reservations in a guest", "it did not come to its end");
    }
    Ok(())
}

/// Kills a node at each step of the guest, and both when it asks.
fn inject_faults(cluster: &mut Cluster, signs: &GuestSignals<'_>) -> Result<()> {
    node_faults::kill_nodes(cluster, signs, 1..=STEPS)?;
    signs.wait_for("operator-wanted")?;
    let shown = cluster.nodes[NODE_B].command(&["volume", "reservations", VOLUME])?;
    ensure!(shown.contains("exclusive access"), "{shown}");
    cluster.nodes[NODE_A].command(&["volume", "reservations", VOLUME, "--clear", "--yes"])?;
    signs.send("operator-done")?;
    node_faults::power_cycle_all(cluster, signs, 2)
}

/// dm-multipath with both selectors, while nodes fail and recover.
fn multipath(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) -> Result<()> {
    // Clears reservations of earlier tests.
    cluster.nodes[NODE_A].command(&["volume", "reservations", VOLUME, "--clear", "--yes"])?;
    let mut order = order("alua.sh", cluster, volume);
    let selectors = context.sample("path selectors", SELECTORS, SELECTORS.len());
    order.variables.extend([
        ("SELECTORS", selectors.join(" ")),
        ("TROUBLES", node_faults::fault_names()),
        ("RATE", RATE.to_string()),
    ]);
    context.display.begin_step(&format!("{}: dm-multipath", kernel.name()));
    let ran = guest::run_beside(context, kernel, &order, |signs| {
        selectors.iter().try_for_each(|selector| {
            node_faults::inject_path_faults(cluster, signs, selector, INITIATOR)
        })
    });
    let clean = ran.is_ok_and(|(clean, ())| clean);
    if !clean {
        cluster.show_logs(context);
        context.fail("dm-multipath in a guest", "it did not come to its end");
    }
    Ok(())
}

fn order<'a>(script: &'a str, cluster: &Cluster, volume: &MirroredVolume) -> GuestJob<'a> {
    let portals = [NODE_A, NODE_B]
        .map(|n| guest::address_from_guest(cluster.nodes[n].iscsi).to_string())
        .join(" ");
    let variables = vec![
        ("PORTALS", portals),
        ("TARGET", volume.exported.unit.target.clone()),
        ("INITIATOR", INITIATOR.to_owned()),
    ];
    GuestJob {
        script,
        variables,
        files: Vec::new(),
        kernel_options: &[],
        memory_mib: 512,
        limit: LIMIT,
    }
}
