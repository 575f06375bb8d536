//! The Linux kernel's initiators, in a guest, over both protocols: file systems, verified load, discards, digests.

use crate::{
    guest::{self, Kernel, Order},
    house::House,
    node::{Exported, Node},
    server::{Subsystem, Unit},
};
use anyhow::Result;
use std::{net::IpAddr, time::Duration};

/// The name of every guest's iSCSI initiator.
pub(crate) const INITIATOR: &str = "iqn.2026-01.test:guest";
/// The name of every guest's NVMe host.
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:8f5b4a52-5d1c-4f6e-9a53-0c7d7c6f2a11";
const HOST_ID: &str = "8f5b4a52-5d1c-4f6e-9a53-0c7d7c6f2a11";

/// What a volume grows to while a guest has it.
const GROWN_MIB: u32 = 1056;

/// How thoroughly a guest works on a disk.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) megabytes: u32,
    pub(crate) kinds: &'static str,
    /// With and without digests, or only without.
    pub(crate) digests: bool,
}

/// The usual one.
pub(crate) const FULL: Load = Load { megabytes: 24, kinds: "ext4 xfs", digests: true };
/// For a guest whose processor is emulated.
pub(crate) const SMOKE: Load = Load { megabytes: 4, kinds: "ext4", digests: false };

/// What a guest has to know to reach `unit`, as seen from inside.
fn iscsi_variables(unit: &Unit) -> Vec<(&'static str, String)> {
    let portal = format!("{}:{}", guest::host_address(), unit.portal.port());
    vec![("PORTAL", portal), ("TARGET", unit.target.clone()), ("INITIATOR", INITIATOR.to_owned())]
}

/// What a guest has to know to reach `subsystem` at `address`.
fn nvme_variables(subsystem: &Subsystem, address: IpAddr) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("ADDRESS", address.to_string()),
        ("DISCOVERY_PORT", subsystem.discovery_port.to_string()),
        ("IO_PORT", subsystem.io_port.to_string()),
        ("SUBSYSTEM", subsystem.nqn.clone()),
    ];
    variables.extend(nvme_host());
    variables
}

/// Who a guest is as an NVMe host.
pub(crate) fn nvme_host() -> [(&'static str, String); 2] {
    [("HOSTNQN", HOST_NQN.to_owned()), ("HOSTID", HOST_ID.to_owned())]
}

fn load_variables(load: Load, digests: &str) -> Vec<(&'static str, String)> {
    vec![
        ("MEGABYTES", load.megabytes.to_string()),
        ("KINDS", load.kinds.to_owned()),
        ("DIGESTS", digests.to_owned()),
    ]
}

/// The kernel's iSCSI initiator against `unit`, whose content it destroys.
pub(crate) fn iscsi(house: &House, kernel: &Kernel, unit: &Unit, load: Load) -> Result<bool> {
    let mut variables = iscsi_variables(unit);
    variables.extend(load_variables(load, if load.digests { "None CRC32C" } else { "None" }));
    house.display.working(&format!("{}: iSCSI initiator", kernel.name()));
    run(house, kernel, "iscsi.sh", variables)
}

/// The kernel's NVMe/TCP initiator against `volume` of `node`, whose content it destroys, and which it sees grow.
pub(crate) fn nvme(
    house: &House,
    kernel: &Kernel,
    node: &Node,
    (name, volume): (&str, &Exported),
    load: Load,
) -> Result<bool> {
    let mut variables = nvme_variables(&volume.subsystem, guest::host_address());
    variables.extend(load_variables(load, if load.digests { "off on" } else { "off" }));
    variables.push(("GROWN_MIB", GROWN_MIB.to_string()));
    house.display.working(&format!("{}: NVMe/TCP initiator", kernel.name()));
    let (clean, ()) = guest::run_beside(house, kernel, &order("nvme.sh", variables), |signs| {
        signs.wait_for("grow-1")?;
        node.command(&["volume", "grow", name, "--size", &format!("{GROWN_MIB}MiB")])?;
        signs.tell("grown-1")
    })?;
    Ok(clean)
}

/// The scripts against Linux's own NVMe/TCP target inside the guest: shows whether a failure is ours or theirs.
pub(crate) fn nvme_stand_in(house: &House, kernel: &Kernel, load: Load) -> Result<bool> {
    let port = 4420;
    let nqn = "nqn.2026-01.test:stand-in".to_owned();
    let subsystem = Subsystem { nqn, io_port: port, discovery_port: port };
    let mut variables = nvme_variables(&subsystem, IpAddr::from([127, 0, 0, 1]));
    variables.extend(load_variables(load, if load.digests { "off on" } else { "off" }));
    variables.push(("STAND_IN", "nvmet".to_owned()));
    run(house, kernel, "nvme.sh", variables)
}

fn run(
    house: &House,
    kernel: &Kernel,
    script: &str,
    variables: Vec<(&'static str, String)>,
) -> Result<bool> {
    guest::run(house, kernel, &order(script, variables))
}

fn order<'a>(script: &'a str, variables: Vec<(&'a str, String)>) -> Order<'a> {
    let limit = Duration::from_secs(180);
    Order { script, variables, files: Vec::new(), kernel: &[], memory_mib: 768, limit }
}
