//! Mirrored volumes as NVMe hosts see them, through both of their nodes.

use super::accidents;
use crate::{
    cluster::{A, B, Cluster, Mirrored},
    guest::{self, Kernel, Order, Signs},
    house::House,
    install,
    node::Profile,
};
use anyhow::Result;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

/// Name of the tier.
pub(super) const NAME: &str = "nvme";

const VOLUME: &str = "nvme";
const SIZE: &str = "256MiB";
const LIMIT: Duration = Duration::from_secs(400);

/// Steps of `nvme-reservations.sh` in which a node dies.
const STEPS: usize = 5;

/// Who writes while nodes are in trouble, and how often a second.
const WRITER: &str = "nqn.2026-01.net.example:host-5";
const RATE: u64 = 200;

/// The volumes of `nvme-namespaces.sh`, and how many steps of it a node dies in.
const FIRST: &str = "first";
const SECOND: &str = "second";
const THIRD: &str = "third";
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
/// Keys of TLS for him: the one that he is asked for, and another one.
const KEYS: [&str; 2] = [
    "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:",
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
    if house.wants("reservations") {
        reservations(house, &kernel, &mut cluster, &volume);
    }
    if house.wants("ana") {
        multipath(house, &kernel, &mut cluster, &volume);
    }
    house.check("both copies hold the same bytes", || cluster.copies_are_equal(&volume));
    if house.wants("namespaces") {
        let first = cluster.create(FIRST, SIZE)?;
        cluster.create(SECOND, SIZE)?;
        namespaces(house, &kernel, &mut cluster, &first);
    }
    if house.wants("secure") {
        secure(house, &kernel, &mut cluster)?;
    }
    house.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Hosts that prove who they are, and come by TLS.
fn secure(house: &House, kernel: &Kernel, cluster: &mut Cluster) -> Result<()> {
    if !kernel.has_secure_nvme() {
        house.skip("hosts that prove who they are, and come by TLS", "this kernel's cannot");
        return Ok(());
    }
    let guarded = cluster.create(GUARDED, SIZE)?;
    cluster.nodes[A].command(&["volume", "allow", GUARDED, HOST])?;
    cluster.nodes[A].command(&["volume", "deny", GUARDED, "any"])?;
    authentication(house, kernel, cluster, &guarded)?;
    tls(house, kernel, cluster, &guarded)?;
    house.check("a volume that was written under proofs is whole", || {
        cluster.copies_are_equal(&guarded)
    });
    Ok(())
}

/// The kernel's multipath, while nodes are in every kind of trouble.
fn multipath(house: &House, kernel: &Kernel, cluster: &mut Cluster, volume: &Mirrored) {
    let mut variables = host_of(cluster, volume, WRITER, 5);
    variables.extend([("TROUBLES", accidents::troubles()), ("RATE", RATE.to_string())]);
    let order = order("nvme-ana.sh", variables);
    play(house, kernel, cluster, ("the kernel's multipath", &order), |cluster, signs| {
        accidents::of_paths(cluster, signs, "nvme", WRITER)
    });
}

/// A subsystem that gets a second namespace and loses it again, while nodes die.
fn namespaces(house: &House, kernel: &Kernel, cluster: &mut Cluster, first: &Mirrored) {
    let mut variables = host_of(cluster, first, "nqn.2026-01.net.example:host-3", 3);
    variables.extend([
        ("DISCOVERY", guest::reaches(cluster.nodes[B].discovery).to_string()),
        ("NSID", NSID.to_owned()),
    ]);
    let order = order("nvme-namespaces.sh", variables);
    play(house, kernel, cluster, ("namespaces of a subsystem", &order), |cluster, signs| {
        asks(signs, "join-1", "joined-1", || {
            let words = ["volume", "target", SECOND, "--join", FIRST, "--lun", LUN];
            cluster.nodes[B].command(&words).map(drop)
        })?;
        accidents::of_nodes(cluster, signs, 1..=DEATHS)?;
        asks(signs, "part-1", "parted-1", || {
            let words = ["volume", "target", SECOND, "--own", "--force"];
            cluster.nodes[A].command(&words).map(drop)
        })?;
        signs.wait_for("create-1")?;
        let third = cluster.create(THIRD, SIZE)?;
        signs.tell_that("created-1", &format!("{}\n", third.exported.subsystem.nqn))?;
        asks(signs, "delete-1", "deleted-1", || {
            cluster.nodes[A].command(&["volume", "delete", THIRD, "--yes"]).map(drop)
        })
    });
}

/// A host that has to prove who it is, while nodes die and its secret changes.
fn authentication(
    house: &House,
    kernel: &Kernel,
    cluster: &mut Cluster,
    volume: &Mirrored,
) -> Result<()> {
    let mut variables = host_of(cluster, volume, HOST, 4);
    variables.extend([("SECRETS", SECRETS.join(" ")), ("CONTROLLER", CONTROLLER.to_owned())]);
    let order = order("nvme-authentication.sh", variables);
    let directory = house.directory("nvme-secrets")?;
    play(house, kernel, cluster, ("a host that proves who it is", &order), |cluster, signs| {
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
    Ok(())
}

/// A guest that runs this script.
fn order(script: &'static str, variables: Vec<(&'static str, String)>) -> Order<'static> {
    Order { script, variables, files: Vec::new(), kernel: &[], memory_mib: 512, limit: LIMIT }
}

/// Has a guest do `what` by this order, and what it asks for beside it.
fn play(
    house: &House,
    kernel: &Kernel,
    cluster: &mut Cluster,
    (what, order): (&str, &Order<'_>),
    beside: impl FnOnce(&mut Cluster, &Signs<'_>) -> Result<()> + Send,
) {
    house.display.working(&format!("{}: {what}", kernel.name()));
    let ran = guest::run_beside(house, kernel, order, |signs| beside(cluster, signs));
    let why = match ran {
        Ok((true, ())) => return,
        Ok((false, ())) => "the guest did not come to its end".to_owned(),
        Err(why) => format!("{why:#}"),
    };
    cluster.show_logs(house);
    house.fail(what, &why);
}

/// What a guest needs to know of a volume, and of the host that it is: its name and its number.
fn host_of(
    cluster: &Cluster,
    volume: &Mirrored,
    name: &str,
    number: u8,
) -> Vec<(&'static str, String)> {
    let portals = [A, B].map(|n| guest::reaches(cluster.nodes[n].nvme).to_string()).join(" ");
    vec![
        ("PORTALS", portals),
        ("SUBSYSTEM", volume.exported.subsystem.nqn.clone()),
        ("HOSTNQN", name.to_owned()),
        ("HOSTID", format!("00000000-0000-4000-8000-{number:012}")),
        ("MEGABYTES", MEGABYTES.to_string()),
    ]
}

/// A file that nobody else reads.
fn private(directory: &Path, name: &str, text: &str) -> Result<String> {
    let path = directory.join(name);
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path.display().to_string())
}

/// The host comes by TLS, while a node dies.
fn tls(house: &House, kernel: &Kernel, cluster: &mut Cluster, volume: &Mirrored) -> Result<()> {
    let tools = install::newer(house)?;
    let mut variables = host_of(cluster, volume, HOST, 4);
    variables.extend([("KEYS", KEYS.join(" ")), ("TOOLS", tools.display().to_string())]);
    let order = order("nvme-tls.sh", variables);
    let directory = house.directory("nvme-keys")?;
    play(house, kernel, cluster, ("a host that comes by TLS", &order), |cluster, signs| {
        asks(signs, "key-1", "wants-1", || {
            let key = private(&directory, "key", KEYS[0])?;
            let who = ["volume", "tls", GUARDED, "--host", HOST, "--key", &key];
            cluster.nodes[B].command(&who).map(drop)
        })?;
        accidents::of_nodes(cluster, signs, 1..=1)
    });
    cluster.nodes[A].command(&["volume", "tls", GUARDED, "--host", HOST, "--off"]).map(drop)
}

/// Has the host asked for its secret number `n`, or for none.
fn ask(cluster: &Cluster, directory: &Path, n: usize) -> Result<()> {
    let who = ["volume", "dhchap", GUARDED, "--host", HOST];
    let Some(secret) = n.checked_sub(1).and_then(|n| SECRETS.get(n)) else {
        return cluster.nodes[B].command(&[&who[..], &["--off"]].concat()).map(drop);
    };
    let file = |name: &str, secret: &str| private(directory, name, secret);
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
    // Two hosts in one kernel: it would join their paths.
    let order =
        Order { kernel: &["nvme_core.multipath=N"], ..order("nvme-reservations.sh", variables) };
    play(house, kernel, cluster, ("reservations of NVMe hosts", &order), |cluster, signs| {
        accidents::of_nodes(cluster, signs, 1..=STEPS)?;
        accidents::of_power(cluster, signs, 2)
    });
}
