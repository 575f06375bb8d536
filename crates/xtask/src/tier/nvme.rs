//! Mirrored volumes as NVMe hosts see them, through both of their nodes.

use super::accidents;
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Order, Signs},
    house::House,
    node::Profile,
};
use anyhow::Result;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const VOLUME: &str = "nvme";
const SIZE: &str = "256MiB";
const LIMIT: Duration = Duration::from_secs(400);

/// Steps of `nvme-reservations.sh` in which a node dies.
const STEPS: usize = 5;

/// The volumes of `nvme-namespaces.sh`, and how many steps of it a node dies in.
const FIRST: &str = "first";
const SECOND: &str = "second";
const DEATHS: usize = 2;
/// The second one's LUN, and its namespace identifier.
const LUN: &str = "7";
const NSID: &str = "8";
const MEGABYTES: usize = 16;

/// The volume of `nvme-authentication.sh`, and who has to prove himself.
const GUARDED: &str = "guarded";
const HOST: &str = "nqn.2026-01.net.example:host-4";
/// His secrets, one after the other: for SHA-256, SHA-384, SHA-512, and for no hash (made by `nvme gen-dhchap-key`).
const SECRETS: [&str; 4] = [
    "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:",
    "DHHC-1:02:Zhz7nSBcJMcQTyeKff9vvda5vOigtsXngpFUgZn+95ZNn+EvsQopqV/0vlOVlXGuzR35Qw==:",
    "DHHC-1:03:Idk0Db/Az+H/qTpY2Vk4iqA4j5Ht2HprncXlYYaNpCpvrx0vMjidkh97hFrJ6xNN4Dvk8RWGrEwNXKVOpHFiFoLmQDw=:",
    "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
];
const CONTROLLER: &str = "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";

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
    let first = cluster.create(FIRST, SIZE)?;
    cluster.create(SECOND, SIZE)?;
    namespaces(house, &kernel, &mut cluster, &first);
    let guarded = cluster.create(GUARDED, SIZE)?;
    authentication(house, &kernel, &mut cluster, &guarded)?;
    house.check("a volume that was written under proofs is whole", || {
        cluster.copies_are_equal(&guarded)
    });
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// A subsystem that gets a second namespace and loses it again, while nodes die.
fn namespaces(house: &House, kernel: &Kernel, cluster: &mut Cluster, first: &Mirrored) {
    let portals = [A, B].map(|n| guest::reaches(cluster.nodes[n].nvme).to_string()).join(" ");
    let text = |text: &str| text.to_owned();
    let variables = vec![
        ("PORTALS", portals),
        ("DISCOVERY", guest::reaches(cluster.nodes[B].discovery).to_string()),
        ("SUBSYSTEM", first.exported.subsystem.nqn.clone()),
        ("HOSTNQN", text("nqn.2026-01.net.example:host-3")),
        ("HOSTID", text("00000000-0000-4000-8000-000000000003")),
        ("NSID", text(NSID)),
        ("MEGABYTES", MEGABYTES.to_string()),
    ];
    let order = Order {
        script: "nvme-namespaces.sh",
        variables,
        files: Vec::new(),
        kernel: &[],
        memory_mib: 512,
        limit: LIMIT,
    };
    house.display.working(&format!("{}: namespaces of a subsystem", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        asks(signs, "join-1", "joined-1", || {
            let words = ["volume", "target", SECOND, "--join", FIRST, "--lun", LUN];
            cluster.nodes[B].command(&words).map(drop)
        })?;
        accidents::of_nodes(cluster, signs, 1..=DEATHS)?;
        asks(signs, "part-1", "parted-1", || {
            let words = ["volume", "target", SECOND, "--own", "--force"];
            cluster.nodes[A].command(&words).map(drop)
        })
    });
    if !ran.is_ok_and(|(clean, ())| clean) {
        cluster.show_logs(house);
        house.fail("namespaces of a subsystem", "the guest did not come to its end");
    }
}

/// A host that has to prove who it is, while nodes die and its secret changes.
fn authentication(
    house: &House,
    kernel: &Kernel,
    cluster: &mut Cluster,
    volume: &Mirrored,
) -> Result<()> {
    let text = |text: &str| text.to_owned();
    let portals = [A, B].map(|n| guest::reaches(cluster.nodes[n].nvme).to_string()).join(" ");
    let variables = vec![
        ("PORTALS", portals),
        ("SUBSYSTEM", volume.exported.subsystem.nqn.clone()),
        ("HOSTNQN", text(HOST)),
        ("HOSTID", text("00000000-0000-4000-8000-000000000004")),
        ("SECRETS", SECRETS.join(" ")),
        ("CONTROLLER", text(CONTROLLER)),
        ("MEGABYTES", MEGABYTES.to_string()),
    ];
    let order = Order {
        script: "nvme-authentication.sh",
        variables,
        files: Vec::new(),
        kernel: &[],
        memory_mib: 512,
        limit: LIMIT,
    };
    cluster.nodes[A].command(&["volume", "allow", GUARDED, HOST])?;
    cluster.nodes[A].command(&["volume", "deny", GUARDED, "any"])?;
    let directory = house.directory("nvme-secrets")?;
    house.display.working(&format!("{}: a host that proves who it is", kernel.name()));
    let ran = guest::run_beside(house, kernel, &order, |signs| {
        let asks = |cluster: &Cluster, n: usize| {
            asks(signs, &format!("secret-{n}"), &format!("asks-{n}"), || {
                ask(cluster, &directory, n)
            })
        };
        for n in [1, 2, 3] {
            asks(cluster, n)?;
        }
        accidents::of_nodes(cluster, signs, 1..=1)?;
        asks(cluster, 4)?;
        accidents::of_nodes(cluster, signs, 2..=2)?;
        asks(cluster, 0)
    });
    if !ran.is_ok_and(|(clean, ())| clean) {
        cluster.show_logs(house);
        house.fail("a host that proves who it is", "the guest did not come to its end");
    }
    Ok(())
}

/// Has the host asked for its secret number `n`, or for none.
fn ask(cluster: &Cluster, directory: &Path, n: usize) -> Result<()> {
    let who = ["volume", "dhchap", GUARDED, "--host", HOST];
    let Some(secret) = n.checked_sub(1).and_then(|n| SECRETS.get(n)) else {
        return cluster.nodes[B].command(&[&who[..], &["--off"]].concat()).map(drop);
    };
    let file = |name: &str, secret: &str| -> Result<String> {
        let path = directory.join(name);
        fs::write(&path, secret)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path.display().to_string())
    };
    let (secret, controller) = (file("host", secret)?, file("controller", CONTROLLER)?);
    let proof = ["--secret", &secret, "--ctrl-secret", &controller];
    // Every node hears of it, whichever is told.
    cluster.nodes[n % 2].command(&[&who[..], &proof].concat()).map(drop)
}

/// Does something when the guest wants it.
fn asks(
    signs: &Signs<'_>,
    wants: &str,
    done: &str,
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    signs.wait_for(wants)?;
    act()?;
    signs.tell(done)
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
        accidents::of_nodes(cluster, signs, 1..=STEPS)?;
        accidents::of_power(cluster, signs, 2)
    });
    if !ran.is_ok_and(|(clean, ())| clean) {
        cluster.show_logs(house);
        house.fail("reservations of NVMe hosts", "the guest did not come to its end");
    }
}
