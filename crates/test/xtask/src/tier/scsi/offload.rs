//! Commands that initiators offload to the array, tested by their effects: the resulting bytes, the
//! allocated space of both replicas, and the traffic on the client's network.

use super::order;
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestKernel, GuestSignals},
    process::FinishedProcess,
    run_context::RunContext,
};
use anyhow::{Result, ensure};
use std::{process::Command, time::Duration};

/// The size of both volumes, how much of it EXTENDED COPY copies, and the data in that.
const SIZE: &str = "11GiB";
const COPIED_GIB: u64 = 10;
const EXTENTS: u64 = 64;
const EXTENT_MIB: u64 = 4;

const MIB: u64 = 1 << 20;
/// The file system below the images has metadata blocks and its own layout.
const SLACK: u64 = 2 * MIB;
const TOOL_LIMIT: Duration = Duration::from_secs(300);

pub(super) fn run(context: &RunContext, kernel: &GuestKernel, cluster: &Cluster) -> Result<()> {
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
    context.display.begin_step(&format!("{}: offloads", kernel.name()));
    let ran = guest::run_beside(context, kernel, &order, |signs| {
        tell_space(cluster, signs, [("master", &master), ("clone", &clone)])
    });
    match ran {
        Ok((true, ())) => {}
        Ok((false, ())) => cluster.show_logs(context),
        Err(error) => {
            cluster.show_logs(context);
            context.fail("offloads in a guest", &format!("{error:#}"));
        }
    }
    context.check("EXTENDED COPY: both volumes hold the same bytes, at both nodes", || {
        let (data, taken) = (EXTENTS * EXTENT_MIB * MIB, cluster.allocated(&clone)?);
        ensure!(taken.iter().all(|taken| (data..=data + SLACK).contains(taken)), "{taken:?}");
        cluster.check_volumes_equal(&master, &clone)
    });
    context
        .check("QEMU: what is discarded and zeroed reads as zeroes, and its space is free", || {
            qemu_frees(context, cluster, &clone)
        });
    context.check("QEMU: a copy offloaded (qemu-img convert -C)", || {
        let [from, to] = [&master, &clone].map(|volume| volume.exported.unit.qemu_url());
        tool(context, "qemu-img", &["convert", "-n", "-C", "-f", "raw", "-O", "raw", &from, &to])?;
        cluster.check_volumes_equal(&master, &clone)
    });
    for (name, volume) in [("master", &master), ("clone", &clone)] {
        context.check(&format!("both copies of the {name} hold the same bytes"), || {
            cluster.check_replicas_equal(volume)
        });
    }
    Ok(())
}

/// Tells the guest how much space a volume takes at each node, when it asks: `space-N` names a
/// volume.
fn tell_space(
    cluster: &Cluster,
    signs: &GuestSignals<'_>,
    volumes: [(&str, &MirroredVolume); 2],
) -> Result<()> {
    let mut asked = 1;
    loop {
        let mut any = false;
        for (name, volume) in volumes {
            // The question is in the file's name: a file appears before its contents.
            let question = format!("space-{asked}-{name}");
            if signs.has_signalled(&question) {
                let [a, b] = cluster.allocated(volume)?;
                signs.send_text(&format!("told-{asked}"), &format!("{a} {b}\n"))?;
                asked += 1;
                any = true;
            }
        }
        if !any {
            if signs.has_ended() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// QEMU's own initiator (libiscsi): UNMAP and WRITE SAME, with and without UNMAP, at one node; read
/// at the other.
fn qemu_frees(context: &RunContext, cluster: &Cluster, volume: &MirroredVolume) -> Result<()> {
    let mut there = volume.exported.unit.clone();
    let here = there.qemu_url();
    there.portal = cluster.nodes[NODE_B].iscsi;
    ensure!(volume.exported.unit.portal == cluster.nodes[NODE_A].iscsi, "it is node b's");
    io(context, &here, &["discard 0 1G", "write -P 0xa5 0 64M", "flush"])?;
    let before = cluster.allocated(volume)?;
    let frees = ["discard 8M 8M", "write -z -u 24M 8M", "write -z 40M 1M", "flush"];
    io(context, &here, &frees)?;
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
    io(context, &there.qemu_url(), &reads)?;
    for (before, after) in before.iter().zip(after) {
        ensure!(after + 16 * MIB <= before + SLACK, "{before} bytes before, {after} after");
    }
    Ok(())
}

pub(super) fn io(context: &RunContext, url: &str, commands: &[&str]) -> Result<()> {
    let commands = commands.iter().flat_map(|command| ["-c", *command]);
    let words: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([url]).collect();
    let said = tool(context, "qemu-io", &words)?;
    // It exits with 0 even if a pattern differs.
    ensure!(!said.to_lowercase().contains("fail"), "{said}");
    Ok(())
}

pub(super) fn tool(context: &RunContext, program: &str, words: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    context.run(program, command.args(words), TOOL_LIMIT).and_then(FinishedProcess::success_output)
}
