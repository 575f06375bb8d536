//! `./run bench`: what is measured side by side, in one run, and what limits it on this machine.
//!
//! Everything is measured once per repetition, in turn, so that a noisy minute hits all alike; figures are medians of the
//! repetitions. [`iscsi`] compares with another target, [`nvme`] with the bytes alone and with iSCSI, [`mirror`] a volume on two nodes
//! with one on a node by itself, [`vhost`] a volume by shared memory with NVMe/TCP, [`fio`] our load generator with fio,
//! [`parity`] our parity kernels with ISA-L, [`raid`] volumes with the disks below them.

mod echo;
mod fio;
mod generator;
mod iscsi;
mod lean;
mod limit;
mod machine;
mod measure;
mod mirror;
mod nvme;
mod page;
mod parity;
mod raid;
mod report;
mod verdict;
mod vhost;

use crate::{house::House, install, namespace, node::Profile, server::Unit, tier};
use anyhow::{Context, Result, ensure};
use probe::{Disk, iscsi::Session, registers::Dice};
use std::fs;

/// The processor of the server, and that of the load.
pub(crate) const SERVER_CPU: usize = 0;
pub(crate) const LOAD_CPU: usize = 1;
const DISK_MIB: u64 = 512;

/// How much to measure.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) repetitions: usize,
    pub(crate) seconds: u64,
}

/// What can be measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Subject {
    /// Our iSCSI target beside Debian's tgt
    Iscsi,
    /// NVMe/TCP beside the bare echo and our iSCSI
    Nvme,
    /// A volume on two nodes beside one on a node by itself
    Mirror,
    /// A node's volume by shared memory beside NVMe/TCP
    Vhost,
    /// Our load generator beside fio
    Fio,
    /// Our parity kernels beside ISA-L
    Parity,
    /// What RAID costs above disks in memory
    Raid,
}

impl Subject {
    /// As the command line, the page and the file of figures call it.
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

    /// What must be installed.
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

/// What must be installed to measure everything.
#[cfg(test)]
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    use clap::ValueEnum;
    Subject::value_variants().iter().flat_map(|subject| subject.packages()).collect()
}

/// Measures, inside the namespace if there can be one, and writes `bench/README.md` and the figures in `bench/results`.
pub(crate) fn start(house: &House, subject: Subject, plan: Plan) -> Result<()> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    ensure!(processors > LOAD_CPU, "two processors are needed: the load must not be in the way");
    if !namespace::inside() {
        install::packages(house, &subject.packages())?;
        build(house, subject)?;
        let (repetitions, seconds) = (plan.repetitions.to_string(), plan.seconds.to_string());
        let words = ["bench", subject.name(), "--repetitions", &repetitions, "--seconds", &seconds];
        if namespace::run_inside(house, &words)? {
            return Ok(());
        }
    }
    fs::create_dir_all(house.root.join("bench/results")).context("cannot create bench/results")?;
    match subject {
        Subject::Iscsi => iscsi::run(house, plan),
        Subject::Nvme => nvme::run(house, plan),
        Subject::Mirror => mirror::run(house, plan),
        Subject::Vhost => vhost::run(house, plan),
        Subject::Fio => fio::run(house, plan),
        Subject::Parity => parity::run(house, plan),
        Subject::Raid => raid::run(house, plan),
    }
}

/// Builds what is measured, and what measures.
fn build(house: &House, subject: Subject) -> Result<()> {
    let example = |package, name| {
        Profile::Release.build(house, &["-p", package, "--example", name]).map(drop)
    };
    match subject {
        Subject::Parity => return example("parity", parity::EXAMPLE),
        Subject::Raid => return example("raid", raid::EXAMPLE),
        _ => {}
    }
    Profile::Release.build_product(house)?;
    example("rt", "echo")?;
    match subject {
        Subject::Nvme => example("target", "memory"),
        Subject::Vhost => example("attach", vhost::EXAMPLE),
        _ => Ok(()),
    }
}

/// Writes the whole disk with data that does not compress: a file of holes would be read many times too fast.
fn fill(house: &House, server: &str, unit: &Unit) -> Result<()> {
    house.display.working(&format!("fill the disk of {server}"));
    let lun = u8::try_from(unit.lun).context("an odd LUN")?;
    let mut session = Session::login(unit.portal, "iqn.2026-01.test:fill", &unit.target, lun, 1)?;
    let mut dice = Dice::new(1);
    let mut data: Vec<u8> = (0..131_072).flat_map(|_| dice.roll().to_le_bytes()).collect();
    let blocks = data.len() / session.block_bytes();
    for lba in (0..session.blocks()).step_by(blocks) {
        data[..8].copy_from_slice(&lba.to_le_bytes());
        session.write(lba, &data, false)?;
    }
    session.flush()?;
    session.logout().context("cannot log out")
}
