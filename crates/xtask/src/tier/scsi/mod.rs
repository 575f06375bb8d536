//! A mirrored volume as SCSI initiators see it, through both of its nodes: libiscsi's suite, what cluster software and
//! dm-multipath do in a guest while nodes die, are cut off and are drained, and what the array does by itself.

mod offload;
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
/// Writes a second while paths come and go, and the longest that one may take: the guest shares two cores with the cluster,
/// and finds out by itself that a path is dead.
const RATE: u64 = 200;
const PAUSE_ALLOWED_S: u64 = 8;

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

/// What happens to a node, as the guest calls it, and how it is mended.
type Trouble = (&'static str, fn(&mut Cluster) -> Result<()>, fn(&mut Cluster) -> Result<()>);

const TROUBLES: [Trouble; 3] = [
    ("killed", |cluster| cluster.nodes[A].kill(), |cluster| cluster.nodes[A].start()),
    ("cut-off", |cluster| cluster.network.unplug(B), |cluster| cluster.network.heal()),
    (
        "drained",
        |cluster| cluster.nodes[B].command(&["node", "drain"]).map(drop),
        |cluster| cluster.nodes[B].command(&["node", "resume"]).map(drop),
    ),
];

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
    let names = TROUBLES.map(|(name, ..)| name).join(" ");
    order.variables.extend([
        ("TROUBLES", names),
        ("SECONDS_ALLOWED", PAUSE_ALLOWED_S.to_string()),
        ("RATE", RATE.to_string()),
    ]);
    house.display.working(&format!("{}: dm-multipath", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| troubles(cluster, signs));
    let clean = ran.is_ok_and(|(clean, ())| clean);
    if !clean {
        cluster.show_logs(house);
        house.fail("dm-multipath in a guest", "it did not come to its end");
    }
    Ok(())
}

fn troubles(cluster: &mut Cluster, signs: &Signs<'_>) -> Result<()> {
    for selector in ["round-robin", "service-time"] {
        for (name, begin, end) in TROUBLES {
            let sign = |what: &str| format!("{name}-{selector}-{what}");
            signs.wait_for(&sign("go"))?;
            begin(cluster)?;
            signs.tell(&sign("down"))?;
            signs.wait_for(&sign("seen"))?;
            end(cluster)?;
            cluster.await_safe()?;
            signs.tell(&sign("up"))?;
        }
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
