//! The tiers of `./run test`: each proves one kind of thing, has a time budget and says what it needs installed and built.

mod accidents;
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
mod nvme;
mod pools;
mod scsi;
mod simulation;
mod style;
mod ublk;
mod unit;

use crate::{
    demo, guest,
    house::House,
    install::{self, Package},
    namespace,
    node::Profile,
};
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) use clients::{against_peers, peer_packages};
pub(crate) use dependencies::audit;
pub(crate) use fuzz::{Fuzz, fuzz};
pub(crate) use initiators::{INITIATOR, nvme_host};
pub(crate) use mirror::{Chaos, chaos};
pub(crate) use pools::crowd;
pub(crate) use simulation::simulate;
pub(crate) use style::lint;

/// One tier.
pub(crate) struct Tier {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// How long it may take on two cores, building included. Longer is said, not failed: machines differ.
    budget: Duration,
    packages: fn() -> Vec<&'static [Package]>,
    /// Whether it starts real nodes: these tiers share the product's build and run in a namespace.
    pub(crate) processes: bool,
    run: fn(&House) -> Result<()>,
}

impl Tier {
    /// What must be installed.
    pub(crate) fn packages(&self) -> Vec<&'static [Package]> {
        (self.packages)()
    }
}

const fn minutes(n: u64) -> Duration {
    Duration::from_secs(n * 60)
}

/// What must be installed for a cluster of real processes.
pub(crate) fn mirror_packages() -> Vec<&'static [Package]> {
    vec![install::ETCD, install::NETWORK, install::FILTER]
}

/// In the order in which they run: what fails fast comes first, what shares a build stands together.
pub(crate) const TIERS: &[Tier] = &[
    Tier {
        name: "style",
        about: "rustfmt, clippy, licences and sources of dependencies",
        budget: minutes(8),
        packages: Vec::new,
        processes: false,
        run: style::run,
    },
    Tier {
        name: "unit",
        about: "every crate's own tests: pure modules, transcripts, conformance, properties; a real etcd, a real iSNS server, other people's NBD, file systems on a volume as a file",
        budget: minutes(16),
        packages: || vec![install::ETCD, install::ISNS, install::FUSE, install::NBD, install::TLS],
        processes: false,
        run: unit::run,
    },
    Tier {
        name: "sim",
        about: "the simulator's scenarios: crashes, lost and torn sectors, bad networks, seed by seed",
        budget: minutes(6),
        packages: Vec::new,
        processes: false,
        run: simulation::run,
    },
    Tier {
        name: "fuzz",
        about: "every parser of outside bytes, a short while each",
        budget: minutes(8),
        packages: Vec::new,
        processes: false,
        run: fuzz::run,
    },
    Tier {
        name: clients::SUITE,
        about: "libiscsi's conformance suite against a volume, our own initiator against Debian's tgt",
        budget: minutes(3),
        packages: || vec![install::LIBISCSI, install::TGT, install::NETWORK],
        processes: true,
        run: clients::suite,
    },
    Tier {
        name: "scsi",
        about: "a mirrored volume through both nodes: libiscsi's suite, reservations and multipath while nodes die, offloads, pools of disks that lose some",
        budget: minutes(11),
        packages: || {
            let tools = [install::LIBISCSI, install::SG, install::MULTIPATH, install::QEMU_IMG];
            [guest::packages(), mirror_packages(), tools.to_vec(), vec![install::ETCDCTL]].concat()
        },
        processes: true,
        run: scsi::run,
    },
    Tier {
        name: nvme::NAME,
        about: "a mirrored volume through both nodes: reservations of two NVMe hosts, access states, namespaces that come and go, hosts that prove who they are and come by TLS, while nodes die and are cut off",
        budget: minutes(5),
        packages: || {
            let tools = vec![install::NEWER, install::ETCDCTL];
            [guest::packages(), mirror_packages(), tools].concat()
        },
        processes: true,
        run: nvme::run,
    },
    Tier {
        name: "initiators",
        about: "Linux's iSCSI and NVMe/TCP initiators in a guest: file systems, verified load, digests",
        budget: minutes(3),
        packages: || [guest::packages(), vec![install::NETWORK]].concat(),
        processes: true,
        run: clients::initiators,
    },
    Tier {
        name: "emulated",
        about: "the same, shorter, with Debian's kernel under QEMU: what a machine without User Mode Linux runs",
        budget: minutes(2),
        packages: || vec![install::GUEST, install::GUEST_QEMU, install::NETWORK],
        processes: true,
        run: clients::emulated,
    },
    Tier {
        name: "attach",
        about: "a mirrored volume as a disk of a virtual machine (vhost-user), which boots from it, and a volume as a block device (ublk): file systems, verified load, kill -9 of what serves it, process or node",
        budget: minutes(9),
        packages: || {
            let guest = [install::GUEST, install::GUEST_QEMU, install::BOOT_DISK, install::TLS];
            [mirror_packages(), guest.to_vec(), vec![install::NETWORK]].concat()
        },
        processes: true,
        run: attach::run,
    },
    Tier {
        name: "crash",
        about: "kill -9 of the node under a verified write load",
        budget: minutes(1),
        packages: || vec![install::NETWORK],
        processes: true,
        run: crash::run,
    },
    Tier {
        name: "mirror",
        about: "a volume on two nodes, a witness, real etcd: nodes killed at every phase of a write, stopped, cut off and drained under load",
        budget: minutes(12),
        packages: || [mirror_packages(), vec![install::CLOCK]].concat(),
        processes: true,
        run: mirror::run,
    },
    Tier {
        name: "pools",
        about: "pools of every level with 1, 2 and 4 cores and mirrored, ten volumes each, disks lost and replaced, nodes killed; many mirrored volumes (`./run crowd`: a thousand)",
        budget: minutes(5),
        packages: mirror_packages,
        processes: true,
        run: pools::run,
    },
    Tier {
        name: "hostile",
        about: "clients that send garbage, stop half way, log in ten thousand times or never read",
        budget: minutes(3),
        packages: || vec![install::NETWORK],
        processes: true,
        run: hostile::run,
    },
    Tier {
        name: "footprint",
        about: "memory, idleness and start-up with many volumes",
        budget: minutes(2),
        packages: || vec![install::NETWORK],
        processes: true,
        run: footprint::run,
    },
    Tier {
        name: "demo",
        about: "what ./run demo shows, with the tests' build",
        budget: minutes(4),
        packages: demo::packages,
        processes: true,
        run: |house| demo::show(house, Profile::Dev),
    },
];

/// Runs `tiers`; those with processes in one namespace.
pub(crate) fn run_all(house: &House, tiers: &[&Tier]) -> Result<()> {
    let (processes, others): (Vec<&Tier>, Vec<&Tier>) =
        tiers.iter().partition(|tier| tier.processes);
    for tier in others {
        match install::packages(house, &tier.packages()) {
            Ok(()) => run(house, tier),
            Err(error) => house.enter_error(tier.name, &error),
        }
    }
    let ready: Vec<&Tier> = processes
        .into_iter()
        .filter(|tier| match prepare(house, tier) {
            Ok(()) => true,
            Err(error) => {
                house.enter_error(tier.name, &error);
                false
            }
        })
        .collect();
    if ready.is_empty() {
        return Ok(());
    }
    if let Err(error) = Profile::Dev.build_product(house) {
        house.enter_error("build of windrose", &error);
        return Ok(());
    }
    let names: Vec<&str> = ready.iter().map(|tier| tier.name).collect();
    let names = names.join(",");
    let again = ["test", "--tier", &names, "--only", &house.only];
    if namespace::inside() || !namespace::run_inside(house, &again)? {
        for tier in ready {
            run(house, tier);
        }
    }
    Ok(())
}

/// Gets what a tier needs, while the network is there.
fn prepare(house: &House, tier: &Tier) -> Result<()> {
    install::packages(house, &tier.packages())?;
    if tier.name == nvme::NAME {
        install::newer(house)?;
    }
    if tier.name == clients::SUITE {
        let example = ["--example", clients::OWN_INITIATOR];
        Profile::Dev.build(house, &[&unit::FEATURES[..], &example].concat())?;
    }
    Ok(())
}

/// Runs one tier and says how long it took.
fn run(house: &House, tier: &Tier) {
    house.display.line(&format!("{}: {}", tier.name, tier.about));
    let begun = Instant::now();
    if let Err(error) = (tier.run)(house) {
        house.enter_error(tier.name, &error);
    }
    let took = begun.elapsed();
    let over = if took > tier.budget {
        format!(", over its budget of {} s", tier.budget.as_secs())
    } else {
        String::new()
    };
    let free = free_gib(&house.root);
    house.display.line(&format!("  {} took {} s{over}; {free}", tier.name, took.as_secs()));
}

/// What is left of the disk: a full one makes tests fail for no reason that they tell.
fn free_gib(path: &Path) -> String {
    rustix::fs::statvfs(path).map_or_else(
        |error| format!("the free space cannot be read: {error}"),
        |space| format!("{} GiB free", space.f_frsize.saturating_mul(space.f_bavail) >> 30),
    )
}
