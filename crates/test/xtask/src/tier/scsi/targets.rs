//! Several volumes behind one target, at both nodes at once.

use super::offload::{io, tool};
use crate::{
    cluster::{Cluster, NODE_A, NODE_B},
    run_context::RunContext,
    server::IscsiLun,
};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

const SIZE: &str = "64MiB";
const LUN: u32 = 7;
/// How long nodes may take to follow a change in etcd.
const STORE_PROPAGATION_LIMIT: Duration = Duration::from_secs(20);

pub(super) fn run(context: &RunContext, cluster: &Cluster) {
    let mut host = None;
    context.check("a volume joins another's target: both nodes show it at its number", || {
        host = Some(check_shared_target(context, cluster)?);
        Ok(())
    });
    let Some(host) = host else { return };
    context.check("it is deleted: both nodes show the other one alone", || {
        cluster.nodes[NODE_B].command(&["volume", "delete", "guest", "--yes"])?;
        await_units(context, cluster, &host, &[0])
    });
}

/// Tests several volumes behind one target; returns the volume that owns the target.
fn check_shared_target(context: &RunContext, cluster: &Cluster) -> Result<IscsiLun> {
    let host = cluster.create("host", SIZE)?.exported.unit;
    let old = cluster.create("guest", SIZE)?.exported.unit.target;
    let lun = LUN.to_string();
    let words = ["volume", "target", "guest", "--join", "host", "--lun", &lun];
    cluster.nodes[NODE_B].command(&words)?;
    cluster.await_safe()?;
    await_units(context, cluster, &host, &[0, LUN])?;
    let mut unit = IscsiLun { lun: LUN, ..host.clone() };
    io(context, &unit.qemu_url(), &["write -P 0x5a 1M 1M", "flush"])?;
    unit.portal = cluster.nodes[NODE_B].iscsi;
    io(context, &unit.qemu_url(), &["read -P 0x5a 1M 1M", "read -P 0 0 1M"])?;
    let other = IscsiLun { lun: host.lun, ..unit };
    io(context, &other.qemu_url(), &["read -P 0 0 4M"])?;
    for node in [NODE_A, NODE_B] {
        let listed = list(context, cluster, node)?;
        ensure!(!listed.contains(&old), "node {node} has its old target still:\n{listed}");
    }
    Ok(host)
}

/// Waits until both nodes show exactly these units behind the target of `unit`.
fn await_units(
    context: &RunContext,
    cluster: &Cluster,
    unit: &IscsiLun,
    luns: &[u32],
) -> Result<()> {
    let begun = Instant::now();
    for node in [NODE_A, NODE_B] {
        loop {
            let listed = list(context, cluster, node)?;
            let found = luns_of(&listed, &unit.target);
            if found == luns {
                break;
            }
            ensure!(
                begun.elapsed() < STORE_PROPAGATION_LIMIT,
                "node {node} shows {found:?}:\n{listed}"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    Ok(())
}

fn list(context: &RunContext, cluster: &Cluster, node: usize) -> Result<String> {
    tool(context, "iscsi-ls", &["-s", &format!("iscsi://{}/", cluster.nodes[node].iscsi)])
}

/// The units of a target in the output of `iscsi-ls`, which names the target once for each of its
/// portals.
fn luns_of(listed: &str, target: &str) -> Vec<u32> {
    let mut luns = Vec::new();
    let mut within = false;
    for line in listed.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("Target:") {
            within = rest.split_whitespace().next() == Some(target);
        }
        let lun = line.strip_prefix("Lun:").and_then(|rest| rest.split_whitespace().next());
        if let Some(lun) = lun.filter(|_| within).and_then(|lun| lun.parse().ok()) {
            luns.push(lun);
        }
    }
    luns.sort_unstable();
    luns.dedup();
    luns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_those_of_the_target() {
        let listed = "Target:iqn.a Portal:1.1.1.1:3260,1\n  Lun:0    Type:DIRECT_ACCESS (Size:1G)\n\
            \x20 Lun:7    Type:DIRECT_ACCESS (Size:1G)\nTarget:iqn.ab Portal:1.1.1.1:3260,1\n  Lun:3 Type:D\n\
            Target:iqn.a Portal:1.1.1.2:3260,2\n  Lun:0    Type:DIRECT_ACCESS (Size:1G)\n";
        assert_eq!(luns_of(listed, "iqn.a"), [0, 7]);
        assert_eq!(luns_of(listed, "iqn.ab"), [3]);
        assert!(luns_of(listed, "iqn.b").is_empty());
    }
}
