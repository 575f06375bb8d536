//! The tiers of `./run test`: each tests one kind of property, has a time budget and names what it
//! needs installed and built.

mod attach;
mod clients;
mod crash;
mod dependencies;
mod footprint;
mod fuzz;
mod hostile;
mod initiators;
mod libiscsi;
mod mirror;
mod node_faults;
mod nvme;
mod pools;
mod scsi;
mod simulation;
mod style;
mod ublk;
mod unit;

use crate::{
    demo, guest,
    install::{self, Package},
    namespace::{self, Launcher},
    node::Profile,
    run_context::RunContext,
};
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) use clients::{peer_packages, test_clients_against_other_targets};
pub(crate) use dependencies::audit;
pub(crate) use fuzz::{FuzzPlan, fuzz};
pub(crate) use mirror::{ChaosPlan, chaos};
pub(crate) use pools::many_volumes;
pub(crate) use simulation::simulate;
pub(crate) use style::lint;

/// A tier.
pub(crate) struct Tier {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// How long it may take on two cores, builds included. Exceeding it is reported but no failure:
    /// machines differ.
    budget: Duration,
    packages: fn() -> Vec<&'static [Package]>,
    place: Place,
    run: fn(&RunContext) -> Result<()>,
}

/// Where a tier runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In this process: it uses the processors fully.
    Here,
    /// In namespaces of its own, because it starts real nodes; beside other tiers.
    Namespace,
    /// In namespaces of its own, without other tiers beside it: it measures an idle machine.
    Alone,
}

impl Tier {
    /// The packages it needs.
    pub(crate) fn packages(&self) -> Vec<&'static [Package]> {
        (self.packages)()
    }
}

const fn minutes(n: u64) -> Duration {
    Duration::from_secs(n * 60)
}

/// The packages a cluster of real processes needs.
pub(crate) fn mirror_packages() -> Vec<&'static [Package]> {
    vec![install::ETCD, install::NETWORK, install::FILTER]
}

/// The tiers, in the order they run: those without processes, and those with.
pub(crate) const TIERS: &[Tier] = &[
    Tier {
        name: "style",
        about: "words and lines of prose, rustfmt, clippy, licences and sources of dependencies",
        budget: minutes(8),
        packages: Vec::new,
        place: Place::Here,
        run: style::run,
    },
    Tier {
        name: unit::NAME,
        about: "every crate's own tests: pure modules, transcripts, conformance, properties; a real etcd, a real iSNS server, other people's NBD, file systems on a volume as a file",
        budget: minutes(16),
        packages: || vec![install::ETCD, install::ISNS, install::FUSE, install::NBD, install::TLS],
        place: Place::Here,
        run: unit::run,
    },
    Tier {
        name: "sim",
        about: "the simulator's scenarios: crashes, lost and torn sectors, bad networks, seed by seed",
        budget: minutes(6),
        packages: Vec::new,
        place: Place::Here,
        run: simulation::run,
    },
    Tier {
        name: "fuzz",
        about: "every parser of outside bytes, a short while each",
        budget: minutes(8),
        packages: Vec::new,
        place: Place::Here,
        run: fuzz::run,
    },
    Tier {
        name: clients::SUITE,
        about: "libiscsi's conformance suite against a volume, our own initiator against Debian's tgt",
        budget: minutes(3),
        packages: || vec![install::LIBISCSI, install::TGT, install::NETWORK],
        place: Place::Namespace,
        run: clients::libiscsi_suite,
    },
    Tier {
        name: "scsi",
        about: "a mirrored volume through both nodes: libiscsi's suite, reservations and multipath while nodes die, offloads, pools of disks that lose some",
        budget: minutes(11),
        packages: || {
            let tools = [install::LIBISCSI, install::SG, install::MULTIPATH, install::QEMU_IMG];
            [guest::packages(), mirror_packages(), tools.to_vec(), vec![install::ETCDCTL]].concat()
        },
        place: Place::Namespace,
        run: scsi::run,
    },
    Tier {
        name: nvme::NAME,
        about: "a mirrored volume through both nodes: reservations of two NVMe hosts, access states, namespaces that come and go, hosts that prove who they are and come by TLS, while nodes die and are cut off",
        budget: minutes(5),
        packages: || {
            let tools = vec![install::MMDEBSTRAP, install::ETCDCTL];
            [guest::packages(), mirror_packages(), tools].concat()
        },
        place: Place::Namespace,
        run: nvme::run,
    },
    Tier {
        name: "initiators",
        about: "Linux's iSCSI and NVMe/TCP initiators in a guest: file systems, verified load, digests",
        budget: minutes(3),
        packages: || [guest::packages(), vec![install::NETWORK]].concat(),
        place: Place::Namespace,
        run: clients::kernel_initiators,
    },
    Tier {
        name: "emulated",
        about: "the same, shorter, with Debian's kernel under QEMU: what a machine without User Mode Linux runs",
        budget: minutes(2),
        packages: || vec![install::GUEST, install::GUEST_QEMU, install::NETWORK],
        place: Place::Namespace,
        run: clients::kernel_initiators_emulated,
    },
    Tier {
        name: "attach",
        about: "a mirrored volume as a disk of a virtual machine (vhost-user), which boots from it, and a volume as a block device (ublk): file systems, verified load, kill -9 of what serves it, process or node",
        budget: minutes(9),
        packages: || {
            let guest = [install::GUEST, install::GUEST_QEMU, install::BOOT_DISK, install::TLS];
            [mirror_packages(), guest.to_vec(), vec![install::NETWORK]].concat()
        },
        place: Place::Namespace,
        run: attach::run,
    },
    Tier {
        name: "crash",
        about: "kill -9 of the node under a verified write load",
        budget: minutes(1),
        packages: || vec![install::NETWORK],
        place: Place::Namespace,
        run: crash::run,
    },
    Tier {
        name: "mirror",
        about: "a volume on two nodes, a witness, real etcd: nodes killed at every phase of a write, stopped, cut off and drained under load",
        budget: minutes(12),
        packages: || [mirror_packages(), vec![install::CLOCK]].concat(),
        place: Place::Namespace,
        run: mirror::run,
    },
    Tier {
        name: "pools",
        about: "pools of every level with 1, 2 and 4 cores and mirrored, ten volumes each, disks lost and replaced, nodes killed; many mirrored volumes (`./run crowd`: a thousand)",
        budget: minutes(5),
        packages: mirror_packages,
        place: Place::Namespace,
        run: pools::run,
    },
    Tier {
        name: "hostile",
        about: "clients that send garbage, stop half way, log in ten thousand times or never read",
        budget: minutes(3),
        packages: || vec![install::NETWORK],
        place: Place::Namespace,
        run: hostile::run,
    },
    Tier {
        name: "footprint",
        about: "memory, idleness and start-up with many volumes",
        budget: minutes(2),
        packages: || vec![install::NETWORK],
        place: Place::Alone,
        run: footprint::run,
    },
    Tier {
        name: "demo",
        about: "what ./run demo shows, with the tests' build",
        budget: minutes(4),
        packages: demo::packages,
        place: Place::Namespace,
        run: |context| demo::run_demo(context, Profile::Dev),
    },
];

/// How much this process yields to tiers with real processes: their clients measure pauses, its
/// tests only compute.
const NICE: i32 = 5;

/// Runs `tiers`. Those with real processes run in namespaces of their own, while this process runs
/// the others.
pub(crate) fn run_all(context: &RunContext, tiers: &[&Tier]) -> Result<()> {
    if namespace::is_inside() {
        tiers.iter().for_each(|tier| run(context, tier));
        return Ok(());
    }
    let installed = |tier: &&&Tier| match install::packages(context, &tier.packages()) {
        Ok(()) => true,
        Err(error) => {
            context.record_error(tier.name, &error);
            false
        }
    };
    let ready: Vec<&Tier> = tiers.iter().filter(installed).copied().collect();
    let (computing, with_processes): (Vec<&Tier>, Vec<&Tier>) =
        ready.into_iter().partition(|tier| tier.place == Place::Here);
    if let Err(error) = build(context, &computing, &with_processes) {
        context.record_error("build", &error);
        return Ok(());
    }
    let run_computing = || computing.iter().for_each(|tier| run(context, tier));
    let run_behind = || {
        if let Err(error) = rustix::process::nice(NICE) {
            context.display.line(&format!("  cannot lower the priority: {error}"));
        }
        run_computing();
    };
    if with_processes.is_empty() {
        run_computing();
        return Ok(());
    }
    let Some(launcher) = Launcher::new(context)? else {
        run_computing();
        with_processes.iter().for_each(|tier| run(context, tier));
        return Ok(());
    };
    let (alone, beside): (Vec<&Tier>, Vec<&Tier>) =
        with_processes.into_iter().partition(|tier| tier.place == Place::Alone);
    run_in_namespaces(context, &launcher, &beside, run_behind);
    run_in_namespaces(context, &launcher, &alone, || ());
    Ok(())
}

/// Builds what several tiers need, while the network is available: all tests, which include the
/// product, or the product alone.
fn build(context: &RunContext, computing: &[&Tier], with_processes: &[&Tier]) -> Result<()> {
    if computing.iter().any(|tier| tier.name == unit::NAME) {
        unit::build(context)?;
    } else if !with_processes.is_empty() {
        Profile::Dev.build_product(context)?;
    }
    for tier in with_processes {
        if tier.name == nvme::NAME {
            install::newer_debian_root(context)?;
        }
        if tier.name == clients::SUITE {
            let example = ["--example", clients::OWN_INITIATOR];
            Profile::Dev.build(context, &[&unit::FEATURES[..], &example].concat())?;
        }
    }
    Ok(())
}

/// Runs each tier in namespaces of its own, one after the other, and `meanwhile` in this process.
/// Two tiers with emulated guests at a time, and the tests of the workspace, are more than two
/// cores can do.
fn run_in_namespaces(
    context: &RunContext,
    launcher: &Launcher,
    tiers: &[&Tier],
    meanwhile: impl FnOnce(),
) {
    let (display, scratch) = (&context.display, context.scratch());
    let report = |tier: &Tier| scratch.join(format!("report-{}", tier.name));
    let selection = context.selection.arguments();
    let only = ["--only", &context.name_filter];
    let work = |tier: &&Tier| {
        let words = ["test", "--tier", tier.name].into_iter().chain(only);
        let words: Vec<&str> = words.chain(selection.iter().map(String::as_str)).collect();
        launcher.run_labelled(display, tier.name, &words, &report(tier))
    };
    let ended = std::thread::scope(|scope| {
        let ended = scope.spawn(|| tiers.iter().map(work).collect::<Vec<_>>());
        meanwhile();
        ended.join()
    });
    let Ok(ended) = ended else {
        context.fail("tiers in namespaces", "the thread that runs them has panicked");
        return;
    };
    for (tier, status) in tiers.iter().zip(ended) {
        let merged =
            status.and_then(|status| namespace::merge_report(context, &report(tier), status));
        if let Err(error) = merged {
            context.record_error(tier.name, &error);
        }
    }
}

/// Runs one tier and prints its duration.
fn run(context: &RunContext, tier: &Tier) {
    context.display.line(&format!("{}: {}", tier.name, tier.about));
    let begun = Instant::now();
    if let Err(error) = (tier.run)(context) {
        context.record_error(tier.name, &error);
    }
    let took = begun.elapsed();
    let over = if took > tier.budget {
        format!(", over its budget of {} s", tier.budget.as_secs())
    } else {
        String::new()
    };
    let free = free_gib(&context.root);
    context.display.line(&format!("  {} took {} s{over}; {free}", tier.name, took.as_secs()));
}

/// Free space on the disk: a full one makes tests fail for no stated reason.
fn free_gib(path: &Path) -> String {
    rustix::fs::statvfs(path).map_or_else(
        |error| format!("the free space cannot be read: {error}"),
        |space| format!("{} GiB free", space.f_frsize.saturating_mul(space.f_bavail) >> 30),
    )
}
