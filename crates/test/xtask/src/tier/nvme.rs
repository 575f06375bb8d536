//! Mirrored volumes as NVMe hosts see them, through both of their nodes.

use super::node_faults;
use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestJob, GuestKernel, GuestSignals},
    install,
    node::Profile,
    run_context::RunContext,
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

/// What guests do, by the names for `--only`.
const PARTS: [&str; 4] = ["reservations", "ana", "namespaces", SECURE];
const SECURE: &str = "secure";

/// Steps of `nvme-reservations.sh` in which a node dies.
const STEPS: usize = 5;

/// The host that writes during the faults, and its writes per second.
const WRITER: &str = "nqn.2026-01.net.example:host-5";
const RATE: u64 = 200;

/// The volumes of `nvme-namespaces.sh`, and how many of its steps kill a node.
const FIRST: &str = "first";
const SECOND: &str = "second";
const THIRD: &str = "third";
const NODE_KILLS: usize = 2;
/// The second volume's LUN and namespace identifier.
const LUN: &str = "7";
const NSID: &str = "8";
const MEGABYTES: usize = 16;

/// The volume of `nvme-authentication.sh`, and the host that has to authenticate.
const AUTHENTICATED_VOLUME: &str = "guarded";
const HOST: &str = "nqn.2026-01.net.example:host-4";
/// The host's secrets in turn: for SHA-256, SHA-384, SHA-512 and no hash (made by `nvme
/// gen-dhchap-key`).
const SECRETS: [&str; 4] = [
    "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:",
    "DHHC-1:02:Zhz7nSBcJMcQTyeKff9vvda5vOigtsXngpFUgZn+95ZNn+EvsQopqV/0vlOVlXGuzR35Qw==:",
    "DHHC-1:03:Idk0Db/Az+H/qTpY2Vk4iqA4j5Ht2HprncXlYYaNpCpvrx0vMjidkh97hFrJ6xNN4Dvk8RWGrEwNXKVOpHFiFoLmQDw=:",
    "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
];
/// TLS keys of the host: the required one and another one.
const KEYS: [&str; 2] = [
    "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
    "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:",
];
const CONTROLLER: &str = "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";

pub(super) fn run(context: &RunContext) -> Result<()> {
    let directory = context.directory("nvme")?;
    let mut cluster = Cluster::start(context, &directory, Profile::Dev)?;
    if !context.check("two data nodes and a witness form a cluster", || cluster.form_cluster()) {
        return Ok(());
    }
    let volume = cluster.create(VOLUME, SIZE)?;
    let kernel = GuestKernel::choose(context)?;
    let mut parts = PARTS.to_vec();
    parts.retain(|name| context.matches_filter(name));
    if !kernel.has_secure_nvme() && parts.contains(&SECURE) {
        context.skip("hosts that prove who they are, and come by TLS", "this kernel's cannot");
        parts.retain(|name| *name != SECURE);
    }
    let sample_parts = kernel.sample_parts().min(parts.len());
    let parts = context.sample("work of NVMe guests", parts, sample_parts);
    if parts.contains(&"reservations") {
        reservations(context, &kernel, &mut cluster, &volume);
    }
    if parts.contains(&"ana") {
        multipath(context, &kernel, &mut cluster, &volume);
    }
    context.check("both copies hold the same bytes", || cluster.check_replicas_equal(&volume));
    if parts.contains(&"namespaces") {
        let first = cluster.create(FIRST, SIZE)?;
        cluster.create(SECOND, SIZE)?;
        namespaces(context, &kernel, &mut cluster, &first);
    }
    if parts.contains(&SECURE) {
        secure(context, &kernel, &mut cluster)?;
    }
    context.check("all nodes end in order", || cluster.stop());
    Ok(())
}

/// Hosts that authenticate and use TLS.
fn secure(context: &RunContext, kernel: &GuestKernel, cluster: &mut Cluster) -> Result<()> {
    let guarded = cluster.create(AUTHENTICATED_VOLUME, SIZE)?;
    cluster.nodes[NODE_A].command(&["volume", "allow", AUTHENTICATED_VOLUME, HOST])?;
    cluster.nodes[NODE_A].command(&["volume", "deny", AUTHENTICATED_VOLUME, "any"])?;
    authentication(context, kernel, cluster, &guarded)?;
    tls(context, kernel, cluster, &guarded)?;
    context.check("a volume that was written under proofs is whole", || {
        cluster.check_replicas_equal(&guarded)
    });
    Ok(())
}

/// The kernel's multipath, under every kind of node fault.
fn multipath(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) {
    let mut variables = host_of(cluster, volume, WRITER, 5);
    variables.extend([("TROUBLES", node_faults::fault_names()), ("RATE", RATE.to_string())]);
    let order = order("nvme-ana.sh", variables);
    run_guest(context, kernel, cluster, ("the kernel's multipath", &order), |cluster, signs| {
        node_faults::inject_path_faults(cluster, signs, "nvme", WRITER)
    });
}

/// A subsystem that gains a second namespace and loses it again, while nodes die.
fn namespaces(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    first: &MirroredVolume,
) {
    let mut variables = host_of(cluster, first, "nqn.2026-01.net.example:host-3", 3);
    variables.extend([
        ("DISCOVERY", guest::address_from_guest(cluster.nodes[NODE_B].discovery).to_string()),
        ("NSID", NSID.to_owned()),
    ]);
    let order = order("nvme-namespaces.sh", variables);
    run_guest(context, kernel, cluster, ("namespaces of a subsystem", &order), |cluster, signs| {
        on_signal(signs, "join-1", "joined-1", || {
            let words = ["volume", "target", SECOND, "--join", FIRST, "--lun", LUN];
            cluster.nodes[NODE_B].command(&words).map(drop)
        })?;
        node_faults::kill_nodes(cluster, signs, 1..=NODE_KILLS)?;
        on_signal(signs, "part-1", "parted-1", || {
            let words = ["volume", "target", SECOND, "--own", "--force"];
            cluster.nodes[NODE_A].command(&words).map(drop)
        })?;
        signs.wait_for("create-1")?;
        let third = cluster.create(THIRD, SIZE)?;
        signs.send_text("created-1", &format!("{}\n", third.exported.subsystem.nqn))?;
        on_signal(signs, "delete-1", "deleted-1", || {
            cluster.nodes[NODE_A].command(&["volume", "delete", THIRD, "--yes"]).map(drop)
        })
    });
}

/// A host that has to authenticate, while nodes die and its secret changes.
fn authentication(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) -> Result<()> {
    let mut variables = host_of(cluster, volume, HOST, 4);
    variables.extend([("SECRETS", SECRETS.join(" ")), ("CONTROLLER", CONTROLLER.to_owned())]);
    let order = order("nvme-authentication.sh", variables);
    let directory = context.directory("nvme-secrets")?;
    run_guest(
        context,
        kernel,
        cluster,
        ("a host that proves who it is", &order),
        |cluster, signs| {
            let asks = |cluster: &Cluster, n: usize| {
                on_signal(signs, &format!("secret-{n}"), &format!("asks-{n}"), || {
                    set_host_secret(cluster, &directory, n)
                })
            };
            for n in [1, 2, 3] {
                asks(cluster, n)?;
            }
            node_faults::kill_nodes(cluster, signs, 1..=1)?;
            asks(cluster, 4)?;
            node_faults::kill_nodes(cluster, signs, 2..=2)?;
            asks(cluster, 0)
        },
    );
    Ok(())
}

/// A guest job with this script.
fn order(script: &'static str, variables: Vec<(&'static str, String)>) -> GuestJob<'static> {
    GuestJob {
        script,
        variables,
        files: Vec::new(),
        kernel_options: &[],
        memory_mib: 512,
        limit: LIMIT,
    }
}

/// Runs a guest job as the check `what`, with `beside` at the same time.
fn run_guest(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    (what, order): (&str, &GuestJob<'_>),
    beside: impl FnOnce(&mut Cluster, &GuestSignals<'_>) -> Result<()> + Send,
) {
    context.display.begin_step(&format!("{}: {what}", kernel.name()));
    let ran = guest::run_beside(context, kernel, order, |signs| beside(cluster, signs));
    let why = match ran {
        Ok((true, ())) => return,
        Ok((false, ())) => "the guest did not come to its end".to_owned(),
        Err(why) => format!("{why:#}"),
    };
    cluster.show_logs(context);
    context.fail(what, &why);
}

/// The guest's variables for a volume and its own host identity: host name and number.
fn host_of(
    cluster: &Cluster,
    volume: &MirroredVolume,
    name: &str,
    number: u8,
) -> Vec<(&'static str, String)> {
    let portals = [NODE_A, NODE_B]
        .map(|n| guest::address_from_guest(cluster.nodes[n].nvme).to_string())
        .join(" ");
    vec![
        ("PORTALS", portals),
        ("SUBSYSTEM", volume.exported.subsystem.nqn.clone()),
        ("HOSTNQN", name.to_owned()),
        ("HOSTID", format!("00000000-0000-4000-8000-{number:012}")),
        ("MEGABYTES", MEGABYTES.to_string()),
    ]
}

/// Writes a file that no other user can read.
fn private(directory: &Path, name: &str, text: &str) -> Result<String> {
    let path = directory.join(name);
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path.display().to_string())
}

/// The host uses TLS, while a node dies.
fn tls(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) -> Result<()> {
    let tools = install::newer_debian_root(context)?;
    let mut variables = host_of(cluster, volume, HOST, 4);
    variables.extend([("KEYS", KEYS.join(" ")), ("TOOLS", tools.display().to_string())]);
    let order = order("nvme-tls.sh", variables);
    let directory = context.directory("nvme-keys")?;
    run_guest(context, kernel, cluster, ("a host that comes by TLS", &order), |cluster, signs| {
        on_signal(signs, "key-1", "wants-1", || {
            let key = private(&directory, "key", KEYS[0])?;
            let who = ["volume", "tls", AUTHENTICATED_VOLUME, "--host", HOST, "--key", &key];
            cluster.nodes[NODE_B].command(&who).map(drop)
        })?;
        node_faults::kill_nodes(cluster, signs, 1..=1)
    });
    cluster.nodes[NODE_A]
        .command(&["volume", "tls", AUTHENTICATED_VOLUME, "--host", HOST, "--off"])
        .map(drop)
}

/// Requires secret number `n` from the host, or none.
fn set_host_secret(cluster: &Cluster, directory: &Path, n: usize) -> Result<()> {
    let who = ["volume", "dhchap", AUTHENTICATED_VOLUME, "--host", HOST];
    let Some(secret) = n.checked_sub(1).and_then(|n| SECRETS.get(n)) else {
        return cluster.nodes[NODE_B].command(&[&who[..], &["--off"]].concat()).map(drop);
    };
    let file = |name: &str, secret: &str| private(directory, name, secret);
    let (secret, controller) = (file("host", secret)?, file("controller", CONTROLLER)?);
    let proof = ["--secret", &secret, "--ctrl-secret", &controller];
    // A change at either node reaches both.
    cluster.nodes[n % 2].command(&[&who[..], &proof].concat()).map(drop)
}

/// Does something when the guest asks.
fn on_signal(
    signs: &GuestSignals<'_>,
    wants: &str,
    done: &str,
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    signs.wait_for(wants)?;
    act()?;
    signs.send(done)
}

/// Reservations of two hosts, while nodes die in the middle of each step.
fn reservations(
    context: &RunContext,
    kernel: &GuestKernel,
    cluster: &mut Cluster,
    volume: &MirroredVolume,
) {
    let portals = [NODE_A, NODE_B]
        .map(|n| guest::address_from_guest(cluster.nodes[n].nvme).to_string())
        .join(" ");
    let variables =
        vec![("PORTALS", portals), ("SUBSYSTEM", volume.exported.subsystem.nqn.clone())];
    // Two hosts in one kernel: native multipath would merge their paths.
    let order = GuestJob {
        kernel_options: &["nvme_core.multipath=N"],
        ..order("nvme-reservations.sh", variables)
    };
    run_guest(
        context,
        kernel,
        cluster,
        ("reservations of NVMe hosts", &order),
        |cluster, signs| {
            node_faults::kill_nodes(cluster, signs, 1..=STEPS)?;
            node_faults::power_cycle_all(cluster, signs, 2)
        },
    );
}
