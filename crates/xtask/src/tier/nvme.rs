//! A mirrored volume as NVMe hosts see it, through both of its nodes.

use super::accidents;
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Order},
    house::House,
    node::Profile,
};
use anyhow::Result;
use std::time::Duration;

const VOLUME: &str = "nvme";
const SIZE: &str = "256MiB";
const LIMIT: Duration = Duration::from_secs(400);

/// Steps of `nvme-reservations.sh` in which a node dies.
const STEPS: usize = 5;

pub(super) fn run(house: &House) -> Result<()> {
    let directory = house.directory("nvme")?;
    let mut cluster = Cluster::start(house, &directory, Profile::Dev)?;
    if !house.check("two data nodes and a witness form a cluster", || cluster.form()) {
        return Ok(());
    }
    let volume = cluster.create(VOLUME, SIZE)?;
    let kernel = Kernel::choose(house)?;
    reservations(house, &kernel, &mut cluster, &volume);
    house.check("both copies hold the same bytes", || cluster.copies_are_equal(&volume));
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Reservations of two hosts, while nodes die in the middle of each step.
fn reservations(house: &House, kernel: &Kernel, cluster: &mut Cluster, volume: &Mirrored) {
    let portals = [A, B].map(|n| guest::reaches(cluster.nodes[n].nvme).to_string()).join(" ");
    let variables =
        vec![("PORTALS", portals), ("SUBSYSTEM", volume.exported.subsystem.nqn.clone())];
    let order = Order {
        script: "nvme-reservations.sh",
        variables,
        files: Vec::new(),
        // Two hosts in one kernel: it would join their paths.
        kernel: &["nvme_core.multipath=N"],
        memory_mib: 512,
        limit: LIMIT,
    };
    house.display.working(&format!("{}: reservations of NVMe hosts", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        accidents::of_nodes(cluster, signs, STEPS)?;
        accidents::of_power(cluster, signs, 2)
    });
    if !ran.is_ok_and(|(clean, ())| clean) {
        cluster.show_logs(house);
        house.fail("reservations of NVMe hosts", "the guest did not come to its end");
    }
}
