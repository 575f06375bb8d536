//! The Linux kernel's initiators, in a guest, over both protocols: file systems, verified load,
//! discards, digests.

use crate::{
    guest::{self, GuestJob, GuestKernel, INITIATOR, nvme_host},
    node::{ExportedVolume, Node},
    run_context::RunContext,
    server::{IscsiLun, NvmeSubsystem},
};
use anyhow::Result;
use std::{net::IpAddr, time::Duration};

/// The size a volume grows to while a guest uses it.
const GROWN_MIB: u32 = 1056;

/// How thoroughly a guest works on a disk.
#[derive(Clone, Copy)]
pub(crate) struct GuestLoad<'a> {
    pub(crate) megabytes: u32,
    /// The kinds of file systems, separated by blanks.
    pub(crate) kinds: &'a str,
    /// Without digests (`off`) and with them (`on`), separated by blanks.
    pub(crate) digests: &'a str,
}

/// The default load.
pub(crate) const FULL: GuestLoad<'_> =
    GuestLoad { megabytes: 24, kinds: "ext4 xfs", digests: "off on" };
/// For a guest whose processor is emulated.
pub(crate) const SMOKE: GuestLoad<'_> = GuestLoad { megabytes: 4, kinds: "ext4", digests: "off" };

/// The guest's variables for `unit`.
fn iscsi_variables(unit: &IscsiLun) -> Vec<(&'static str, String)> {
    let portal = format!("{}:{}", guest::host_address(), unit.portal.port());
    vec![("PORTAL", portal), ("TARGET", unit.target.clone()), ("INITIATOR", INITIATOR.to_owned())]
}

/// The guest's variables for `subsystem` at `address`.
fn nvme_variables(subsystem: &NvmeSubsystem, address: IpAddr) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("ADDRESS", address.to_string()),
        ("DISCOVERY_PORT", subsystem.discovery_port.to_string()),
        ("IO_PORT", subsystem.io_port.to_string()),
        ("SUBSYSTEM", subsystem.nqn.clone()),
    ];
    variables.extend(nvme_host());
    variables
}

fn load_variables(load: GuestLoad<'_>, digests: String) -> Vec<(&'static str, String)> {
    vec![
        ("MEGABYTES", load.megabytes.to_string()),
        ("KINDS", load.kinds.to_owned()),
        ("DIGESTS", digests),
    ]
}

/// Runs the kernel's iSCSI initiator against `unit` and destroys its data.
pub(crate) fn iscsi(
    context: &RunContext,
    kernel: &GuestKernel,
    unit: &IscsiLun,
    load: GuestLoad<'_>,
) -> Result<bool> {
    let mut variables = iscsi_variables(unit);
    let digests = load.digests.split(' ').map(|on| if on == "on" { "CRC32C" } else { "None" });
    let digests = digests.collect::<Vec<_>>().join(" ");
    variables.extend(load_variables(load, digests));
    context.display.begin_step(&format!("{}: iSCSI initiator", kernel.name()));
    run(context, kernel, "iscsi.sh", variables)
}

/// Runs the kernel's NVMe/TCP initiator against `volume` of `node`, destroys its data and grows it.
pub(crate) fn nvme(
    context: &RunContext,
    kernel: &GuestKernel,
    node: &Node,
    (name, volume): (&str, &ExportedVolume),
    load: GuestLoad<'_>,
) -> Result<bool> {
    let mut variables = nvme_variables(&volume.subsystem, guest::host_address());
    variables.extend(load_variables(load, load.digests.to_owned()));
    variables.push(("GROWN_MIB", GROWN_MIB.to_string()));
    context.display.begin_step(&format!("{}: NVMe/TCP initiator", kernel.name()));
    let (clean, ()) = guest::run_beside(context, kernel, &order("nvme.sh", variables), |signs| {
        signs.wait_for("grow-1")?;
        node.command(&["volume", "grow", name, "--size", &format!("{GROWN_MIB}MiB")])?;
        signs.send("grown-1")
    })?;
    Ok(clean)
}

/// Runs the scripts against Linux's own NVMe/TCP target inside the guest, to see whether a failure
/// is ours.
pub(crate) fn nvme_stand_in(
    context: &RunContext,
    kernel: &GuestKernel,
    load: GuestLoad<'_>,
) -> Result<bool> {
    let port = 4420;
    let nqn = "nqn.2026-01.test:stand-in".to_owned();
    let subsystem = NvmeSubsystem { nqn, io_port: port, discovery_port: port };
    let mut variables = nvme_variables(&subsystem, IpAddr::from([127, 0, 0, 1]));
    variables.extend(load_variables(load, load.digests.to_owned()));
    variables.push(("STAND_IN", "nvmet".to_owned()));
    run(context, kernel, "nvme.sh", variables)
}

fn run(
    context: &RunContext,
    kernel: &GuestKernel,
    script: &str,
    variables: Vec<(&'static str, String)>,
) -> Result<bool> {
    guest::run(context, kernel, &order(script, variables))
}

fn order<'a>(script: &'a str, variables: Vec<(&'a str, String)>) -> GuestJob<'a> {
    let limit = Duration::from_secs(180);
    GuestJob { script, variables, files: Vec::new(), kernel_options: &[], memory_mib: 768, limit }
}
