//! `./run bench`: comparative benchmarks in one run, and their limits on this machine.
//!
//! Everything is measured once in each repetition, in turn, so a noisy minute affects all alike;
//! figures are medians over the repetitions. [`iscsi`] compares with another target, [`nvme`] with
//! a bare echo and iSCSI, [`mirror`] a volume on two nodes with one on a standalone node, [`vhost`]
//! shared memory with NVMe/TCP, [`fio`] our load generator with fio, [`parity`] our parity kernels
//! with ISA-L, [`raid`] volumes with the disks below them.

mod echo;
mod figures;
mod fio;
mod generator;
mod iscsi;
mod limit;
mod machine;
mod measure;
mod minimal_client;
mod mirror;
mod mirror_limits;
mod nvme;
mod parity;
mod raid;
mod report;
mod results_page;
mod vhost;

use crate::{install, namespace, node::Profile, run_context::RunContext, server::IscsiLun, tier};
use anyhow::{Context, Result, ensure};
use probe::{BlockClient, iscsi::Session, registers::SeededRng};
use std::fs;

/// The processors of the server and of the load.
pub(crate) const SERVER_CPU: usize = 0;
pub(crate) const LOAD_CPU: usize = 1;
const DISK_MIB: u64 = 512;

/// How much to measure.
#[derive(Clone, Copy)]
pub(crate) struct BenchPlan {
    pub(crate) repetitions: usize,
    pub(crate) seconds: u64,
}

/// A benchmark.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BenchSubject {
    /// Our iSCSI target against Debian's tgt
    Iscsi,
    /// NVMe/TCP against the bare echo and our iSCSI
    Nvme,
    /// A volume on two nodes against one on a standalone node
    Mirror,
    /// A node's volume over shared memory against NVMe/TCP
    Vhost,
    /// Our load generator against fio
    Fio,
    /// Our parity kernels against ISA-L
    Parity,
    /// The cost of RAID on top of disks in memory
    Raid,
}

impl BenchSubject {
    /// Its name on the command line, on the page and in the results file.
    fn name(self) -> &'static str {
        match self {
            Self::Iscsi => "iscsi",
            Self::Nvme => "nvme",
            Self::Mirror => "mirror",
            Self::Vhost => "vhost",
            Self::Fio => "fio",
            Self::Parity => "parity",
            Self::Raid => "raid",
        }
    }

    /// The packages it needs.
    fn packages(self) -> Vec<&'static [install::Package]> {
        match self {
            Self::Iscsi => iscsi::packages(),
            Self::Nvme => nvme::packages(),
            Self::Mirror => tier::mirror_packages(),
            Self::Vhost => vhost::packages(),
            Self::Fio => fio::packages(),
            Self::Parity => parity::packages(),
            Self::Raid => raid::packages(),
        }
    }
}

/// The packages all benchmarks need.
#[cfg(test)]
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    use clap::ValueEnum;
    BenchSubject::value_variants().iter().flat_map(|subject| subject.packages()).collect()
}

/// Runs a benchmark, in a namespace if possible, and writes `bench/README.md` and the figures in
/// `bench/results`.
pub(crate) fn run_benchmark(
    context: &RunContext,
    subject: BenchSubject,
    plan: BenchPlan,
) -> Result<()> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    ensure!(processors > LOAD_CPU, "two processors are needed: the load must not be in the way");
    if !namespace::is_inside() {
        install::packages(context, &subject.packages())?;
        build(context, subject)?;
        let (repetitions, seconds) = (plan.repetitions.to_string(), plan.seconds.to_string());
        let words = ["bench", subject.name(), "--repetitions", &repetitions, "--seconds", &seconds];
        if namespace::run_inside(context, &words)? {
            return Ok(());
        }
    }
    fs::create_dir_all(context.root.join("bench/results"))
        .context("cannot create bench/results")?;
    match subject {
        BenchSubject::Iscsi => iscsi::run(context, plan),
        BenchSubject::Nvme => nvme::run(context, plan),
        BenchSubject::Mirror => mirror::run(context, plan),
        BenchSubject::Vhost => vhost::run(context, plan),
        BenchSubject::Fio => fio::run(context, plan),
        BenchSubject::Parity => parity::run(context, plan),
        BenchSubject::Raid => raid::run(context, plan),
    }
}

/// Builds the measured programs and the measuring ones.
fn build(context: &RunContext, subject: BenchSubject) -> Result<()> {
    let example =
        |package, name| Profile::Dist.build(context, &["-p", package, "--example", name]).map(drop);
    match subject {
        BenchSubject::Parity => return example("parity", parity::EXAMPLE),
        BenchSubject::Raid => return example("raid", raid::EXAMPLE),
        _ => {}
    }
    Profile::Dist.build_product(context)?;
    example("rt", "echo")?;
    match subject {
        BenchSubject::Nvme => example("target", "memory"),
        BenchSubject::Vhost => example("attach", vhost::EXAMPLE),
        _ => Ok(()),
    }
}

/// Fills the disk with incompressible data: a sparse file would be read many times too fast.
fn fill(context: &RunContext, server: &str, unit: &IscsiLun) -> Result<()> {
    context.display.begin_step(&format!("fill the disk of {server}"));
    let lun = u8::try_from(unit.lun).context("an odd LUN")?;
    let mut session = Session::login(unit.portal, "iqn.2026-01.test:fill", &unit.target, lun, 1)?;
    let mut dice = SeededRng::new(1);
    let mut data: Vec<u8> = (0..131_072).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    let blocks = data.len() / session.block_bytes();
    for lba in (0..session.blocks()).step_by(blocks) {
        data[..8].copy_from_slice(&lba.to_le_bytes());
        session.write(lba, &data, false)?;
    }
    session.flush()?;
    session.logout().context("cannot log out")
}
