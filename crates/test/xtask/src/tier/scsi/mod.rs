//! A mirrored volume as SCSI initiators see it, through both of its nodes: libiscsi's suite, what cluster software and
//! dm-multipath do in a guest while nodes die, are cut off and are drained, what the array does by itself, and pools of disks under it.

mod offload;
mod pools;
mod targets;

use super::{INITIATOR, accidents, libiscsi};
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Order, Signs},
    house::House,
    node::Profile,
};
use anyhow::{Result, ensure};
use std::time::Duration;

const VOLUME: &str = "scsi";
const SIZE: &str = "1GiB";
const LIMIT: Duration = Duration::from_secs(400);

/// Steps of `reservations.sh` in which a node dies.
const STEPS: usize = 6;
/// Writes a second while paths come and go.
const RATE: u64 = 200;

pub(super) fn run(house: &House) -> Result<()> {
    let directory = house.directory("scsi")?;
    let mut cluster = Cluster::start(house, &directory, Profile::Dev)?;
    if !house.check("two data nodes and a witness form a cluster", || cluster.form()) {
        return Ok(());
    }
    let volume = cluster.create(VOLUME, SIZE)?;
    if house.wants("libiscsi") {
        suites(house, &cluster, &volume)?;
    }
    let kernel = Kernel::choose(house)?;
    if house.wants("reservations") {
        reservations(house, &kernel, &mut cluster, &volume)?;
    }
    if house.wants("multipath") {
        multipath(house, &kernel, &mut cluster, &volume)?;
    }
    if house.wants("offload") {
        offload::run(house, &kernel, &cluster)?;
    }
    if house.wants("targets") {
        targets::run(house, &cluster);
    }
    if house.wants("pools") {
        pools::run(house, &kernel, &mut cluster)?;
    }
    house.check("both copies hold the same bytes", || cluster.copies_are_equal(&volume));
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// libiscsi's suite through either node.
fn suites(house: &House, cluster: &Cluster, volume: &Mirrored) -> Result<()> {
    for node in [A, B] {
        let mut unit = volume.exported.unit.clone();
        unit.portal = cluster.nodes[node].iscsi;
        libiscsi::suite(house, &unit, None)?;
    }
    Ok(())
}

/// Persistent reservations by two hosts, while nodes die in the middle of each step.
fn reservations(
    house: &House,
    kernel: &Kernel,
    cluster: &mut Cluster,
    volume: &Mirrored,
) -> Result<()> {
    let order = order("reservations.sh", cluster, volume);
    house.display.working(&format!("{}: persistent reservations", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| accidents(cluster, signs));
    let clean = ran.is_ok_and(|(clean, ())| clean);
    if !clean {
        cluster.show_logs(house);
        house.fail("reservations in a guest", "it did not come to its end");
    }
    Ok(())
}

/// Kills a node at each step that the guest begins, and both where it wants that.
fn accidents(cluster: &mut Cluster, signs: &Signs<'_>) -> Result<()> {
    accidents::of_nodes(cluster, signs, 1..=STEPS)?;
    signs.wait_for("operator-wanted")?;
    let shown = cluster.nodes[B].command(&["volume", "reservations", VOLUME])?;
    ensure!(shown.contains("exclusive access"), "{shown}");
    cluster.nodes[A].command(&["volume", "reservations", VOLUME, "--clear", "--yes"])?;
    signs.tell("operator-done")?;
    accidents::of_power(cluster, signs, 2)
}

/// dm-multipath with both selectors, while nodes come and go.
fn multipath(
    house: &House,
    kernel: &Kernel,
    cluster: &mut Cluster,
    volume: &Mirrored,
) -> Result<()> {
    // Whatever was left before.
    cluster.nodes[A].command(&["volume", "reservations", VOLUME, "--clear", "--yes"])?;
    let mut order = order("alua.sh", cluster, volume);
    order.variables.extend([("TROUBLES", accidents::troubles()), ("RATE", RATE.to_string())]);
    house.display.working(&format!("{}: dm-multipath", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        let mut selectors = ["round-robin", "service-time"].into_iter();
        selectors.try_for_each(|selector| accidents::of_paths(cluster, signs, selector, INITIATOR))
    });
    let clean = ran.is_ok_and(|(clean, ())| clean);
    if !clean {
        cluster.show_logs(house);
        house.fail("dm-multipath in a guest", "it did not come to its end");
    }
    Ok(())
}

fn order<'a>(script: &'a str, cluster: &Cluster, volume: &Mirrored) -> Order<'a> {
    let portals = [A, B].map(|n| guest::reaches(cluster.nodes[n].iscsi).to_string()).join(" ");
    let variables = vec![
        ("PORTALS", portals),
        ("TARGET", volume.exported.unit.target.clone()),
        ("INITIATOR", INITIATOR.to_owned()),
    ];
    Order { script, variables, files: Vec::new(), kernel: &[], memory_mib: 512, limit: LIMIT }
}
