//! What initiators leave to the array, by what it comes to: the bytes that are there afterwards, the space that both copies take, and
//! what went over the client's network.

use super::order;
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Signs},
    house::House,
    process::Ended,
};
use anyhow::{Result, ensure};
use std::{process::Command, time::Duration};

/// Of both volumes; of so much EXTENDED COPY makes another, with so much data in it.
const SIZE: &str = "11GiB";
const COPIED_GIB: u64 = 10;
const EXTENTS: u64 = 64;
const EXTENT_MIB: u64 = 4;

const MIB: u64 = 1 << 20;
/// The file system below the images keeps whole blocks of its own, and how it lays them out is its business.
const SLACK: u64 = 2 * MIB;
const TOOL_LIMIT: Duration = Duration::from_secs(120);

pub(super) fn run(house: &House, kernel: &Kernel, cluster: &Cluster) -> Result<()> {
    let master = cluster.create("master", SIZE)?;
    let clone = cluster.create("clone", SIZE)?;
    let mut order = order("offload.sh", cluster, &master);
    order.variables.extend([
        ("CLONE", clone.exported.unit.target.clone()),
        ("COPIED_GIB", COPIED_GIB.to_string()),
        ("EXTENTS", EXTENTS.to_string()),
        ("EXTENT_MIB", EXTENT_MIB.to_string()),
        ("SLACK", SLACK.to_string()),
    ]);
    house.display.working(&format!("{}: offloads", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        tell_space(cluster, signs, [("master", &master), ("clone", &clone)])
    });
    match ran {
        Ok((true, ())) => {}
        Ok((false, ())) => cluster.show_logs(house),
        Err(error) => {
            cluster.show_logs(house);
            house.fail("offloads in a guest", &format!("{error:#}"));
        }
    }
    house.check("EXTENDED COPY: both volumes hold the same bytes, at both nodes", || {
        let (data, taken) = (EXTENTS * EXTENT_MIB * MIB, cluster.allocated(&clone)?);
        ensure!(taken.iter().all(|taken| (data..=data + SLACK).contains(taken)), "{taken:?}");
        cluster.volumes_are_equal(&master, &clone)
    });
    house
        .check("QEMU: what is discarded and zeroed reads as zeroes, and its space is free", || {
            qemu_frees(house, cluster, &clone)
        });
    house.check("QEMU: a copy offloaded (qemu-img convert -C)", || {
        let [from, to] = [&master, &clone].map(|volume| volume.exported.unit.qemu_url());
        tool(house, "qemu-img", &["convert", "-n", "-C", "-f", "raw", "-O", "raw", &from, &to])?;
        cluster.volumes_are_equal(&master, &clone)
    });
    for (name, volume) in [("master", &master), ("clone", &clone)] {
        house.check(&format!("both copies of the {name} hold the same bytes"), || {
            cluster.copies_are_equal(volume)
        });
    }
    Ok(())
}

/// Says how much space a volume takes at each node, whenever the guest asks: `space-N` names a volume.
fn tell_space(cluster: &Cluster, signs: &Signs<'_>, volumes: [(&str, &Mirrored); 2]) -> Result<()> {
    let mut asked = 1;
    loop {
        let mut any = false;
        for (name, volume) in volumes {
            // What it is about stands in the name: a file is there before what is in it.
            let question = format!("space-{asked}-{name}");
            if signs.has_come(&question) {
                let [a, b] = cluster.allocated(volume)?;
                signs.tell_that(&format!("told-{asked}"), &format!("{a} {b}\n"))?;
                asked += 1;
                any = true;
            }
        }
        if !any {
            if signs.is_over() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// QEMU's own initiator (libiscsi): UNMAP, WRITE SAME with and without it, at one node; read at the other.
fn qemu_frees(house: &House, cluster: &Cluster, volume: &Mirrored) -> Result<()> {
    let mut there = volume.exported.unit.clone();
    let here = there.qemu_url();
    there.portal = cluster.nodes[B].iscsi;
    ensure!(volume.exported.unit.portal == cluster.nodes[A].iscsi, "it is node b's");
    io(house, &here, &["discard 0 1G", "write -P 0xa5 0 64M", "flush"])?;
    let before = cluster.allocated(volume)?;
    let frees = ["discard 8M 8M", "write -z -u 24M 8M", "write -z 40M 1M", "flush"];
    io(house, &here, &frees)?;
    let after = cluster.allocated(volume)?;
    let reads = [
        "read -P 0xa5 0 8M",
        "read -P 0 8M 8M",
        "read -P 0xa5 16M 8M",
        "read -P 0 24M 8M",
        "read -P 0xa5 32M 8M",
        "read -P 0 40M 1M",
        "read -P 0xa5 41M 23M",
    ];
    io(house, &there.qemu_url(), &reads)?;
    for (before, after) in before.iter().zip(after) {
        ensure!(after + 16 * MIB <= before + SLACK, "{before} bytes before, {after} after");
    }
    Ok(())
}

pub(super) fn io(house: &House, url: &str, commands: &[&str]) -> Result<()> {
    let commands = commands.iter().flat_map(|command| ["-c", *command]);
    let words: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([url]).collect();
    let said = tool(house, "qemu-io", &words)?;
    // It ends with 0 also when a pattern is another.
    ensure!(!said.to_lowercase().contains("fail"), "{said}");
    Ok(())
}

pub(super) fn tool(house: &House, program: &str, words: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    house.run(program, command.args(words), TOOL_LIMIT).and_then(Ended::ok)
}
