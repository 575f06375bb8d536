//! `./run bench iscsi`: our iSCSI target and Debian's tgt side by side, in one run, with the same neutral clients, and
//! the bare echo of this machine as the limit.
//!
//! The server has one processor, the load another.

use super::{
    DISK_MIB, Plan,
    echo::{Echo, EchoServer},
    fill,
    measure::{self, Load, Operation, Sample},
    report,
};
use crate::{
    house::House,
    install,
    node::{Node, Profile, Wishes},
    server::{Tgt, Unit},
};
use anyhow::{Context, Result};
use std::{
    fs::File,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

const POOL_MIB: u64 = 64;
/// The depths, and what is measured at each.
const LOADS: &[(u32, &[Operation])] = &[
    (1, &[Operation::LeanRead, Operation::RandomRead, Operation::Write]),
    (32, &[Operation::RandomRead, Operation::Write]),
];

/// What must be installed.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::TGT, install::LIBISCSI, install::QEMU_IMG, install::NETWORK]
}

/// A server with one disk that is full of data.
struct Contender {
    server: &'static str,
    backing: &'static str,
    process: u32,
    unit: Unit,
    /// Keeps it running.
    _running: Running,
}

#[expect(dead_code, reason = "held so that the server lives, never looked at")]
enum Running {
    Node(Node),
    Tgt(Tgt),
}

/// Measures and writes `bench/README.md` and `bench/results/iscsi.json`.
pub(super) fn run(house: &House, plan: Plan) -> Result<()> {
    let places = Places::new(house)?;
    let contenders = [
        windrose(house, &places, "RAM")?,
        tgt(house, &places, "RAM", false)?,
        windrose(house, &places, "file")?,
        tgt(house, &places, "file", false)?,
        tgt(house, &places, "file", true)?,
    ];
    let program = Profile::Release.example(house, "echo");
    let (echo, server) = (Echo::new(program.clone()), EchoServer::start(house, &program)?);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for (depth, operations) in LOADS {
            house.display.working(&format!("{turn}: bare echo, depth {depth}"));
            let echo = if *depth == 1 {
                server.measure(plan.seconds)
            } else {
                echo.measure(*depth, plan.seconds)
            };
            samples.push(echo?);
            for &operation in *operations {
                for contender in &contenders {
                    let (server, backing) = (contender.server, contender.backing);
                    house.display.working(&format!(
                        "{turn}: {server}, {backing}, {operation}, depth {depth}"
                    ));
                    let load = Load { operation, depth: *depth, seconds: plan.seconds };
                    samples.push(contender.measure(house, &load)?);
                }
            }
        }
        house.display.line(&format!("  {turn} done"));
    }
    report::write(house, plan, &samples)
}

impl Contender {
    fn measure(&self, house: &House, load: &Load) -> Result<Sample> {
        let (server, backing) = (self.server, self.backing);
        measure::run(house, self.process, &self.unit, load)
            .map(|figures| Sample::new(server, backing, load, figures))
            .with_context(|| {
                format!("{server}, {backing}, {}, depth {}", load.operation, load.depth)
            })
    }
}

/// Where disks lie.
struct Places {
    ram: PathBuf,
    file: PathBuf,
}

impl Places {
    /// A directory on a memory file system and one beside the build, on whatever disk that is.
    fn new(house: &House) -> Result<Self> {
        let ram = house.memory_directory()?;
        let file = house.build_directory()?;
        Ok(Self { ram, file })
    }

    fn of(&self, backing: &str) -> &Path {
        if backing == "RAM" { &self.ram } else { &self.file }
    }
}

fn windrose(house: &House, places: &Places, backing: &'static str) -> Result<Contender> {
    let pinned = ["taskset", "-c", "0"];
    let wishes = Wishes {
        profile: Profile::Release,
        cores: 1,
        pool_mib: POOL_MIB,
        more: "[log]\nlevel = \"warn\"\n",
        prefix: &pinned,
        ..Wishes::default()
    };
    let mut node = Node::new(house, places.of(backing), &format!("windrose-{backing}"), &wishes)?;
    node.start()?;
    let unit = node.create("bench", &format!("{DISK_MIB}MiB"))?.unit;
    fill(house, "windrose", &unit)?;
    let process = node.process()?;
    Ok(Contender { server: "windrose", backing, process, unit, _running: Running::Node(node) })
}

fn tgt(house: &House, places: &Places, backing: &'static str, direct: bool) -> Result<Contender> {
    let server = if direct { "tgt, direct" } else { "tgt" };
    let port = if direct {
        3263
    } else if backing == "RAM" {
        3261
    } else {
        3262
    };
    let disk = places.of(backing).join(format!("tgt-{port}"));
    let file = File::create(&disk).with_context(|| format!("cannot create {}", disk.display()))?;
    file.set_len(DISK_MIB << 20).context("cannot size the disk")?;
    let portal = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
    let mut tgt = Tgt::start(house, portal, &["taskset", "-c", "0"])?;
    let unit = tgt.offer(&disk, direct)?;
    fill(house, server, &unit)?;
    let process = tgt.process();
    Ok(Contender { server, backing, process, unit, _running: Running::Tgt(tgt) })
}
