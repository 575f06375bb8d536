//! `./run bench iscsi`: our iSCSI target against Debian's tgt, in one run with the same neutral
//! clients; this machine's bare echo is the limit.
//!
//! The server has one processor, the load another.

use super::{
    BenchPlan, DISK_MIB,
    echo::{EchoPair, EchoServer},
    figures::{Load, Operation, Sample},
    fill, measure, report,
};
use crate::{
    install,
    node::{Node, NodeOptions, Profile},
    run_context::RunContext,
    server::{IscsiLun, Tgt},
};
use anyhow::{Context, Result};
use std::{
    fs::File,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

const POOL_MIB: u64 = 64;
/// The depths, and the operations measured at each.
const LOADS: &[(u32, &[Operation])] = &[
    (1, &[Operation::MinimalClientRead, Operation::RandomRead, Operation::Write]),
    (32, &[Operation::RandomRead, Operation::Write]),
];

/// The packages this benchmark needs.
pub(super) fn packages() -> Vec<&'static [install::Package]> {
    vec![install::TGT, install::LIBISCSI, install::QEMU_IMG, install::NETWORK]
}

/// A server with one disk full of data.
struct Contender {
    server: &'static str,
    backing: &'static str,
    process: u32,
    unit: IscsiLun,
    /// Keeps the server running.
    _running: RunningServer,
}

#[expect(dead_code, reason = "held so that the server lives, never looked at")]
enum RunningServer {
    Node(Node),
    Tgt(Tgt),
}

/// Measures and writes `bench/README.md` and `bench/results/iscsi.json`.
pub(super) fn run(context: &RunContext, plan: BenchPlan) -> Result<()> {
    let places = BackingDirs::new(context)?;
    let contenders = [
        start_windrose(context, &places, "RAM")?,
        start_tgt(context, &places, "RAM", false)?,
        start_windrose(context, &places, "file")?,
        start_tgt(context, &places, "file", false)?,
        start_tgt(context, &places, "file", true)?,
    ];
    let program = Profile::Dist.example(context, "echo");
    let (echo, server) = (EchoPair::new(program.clone()), EchoServer::start(context, &program)?);
    let mut samples = Vec::new();
    for repetition in 1..=plan.repetitions {
        let turn = format!("repetition {repetition} of {}", plan.repetitions);
        for (depth, operations) in LOADS {
            context.display.begin_step(&format!("{turn}: bare echo, depth {depth}"));
            let echo = if *depth == 1 {
                server.measure(plan.seconds)
            } else {
                echo.measure(*depth, plan.seconds)
            };
            samples.push(echo?);
            for &operation in *operations {
                for contender in &contenders {
                    let (server, backing) = (contender.server, contender.backing);
                    context.display.begin_step(&format!(
                        "{turn}: {server}, {backing}, {operation}, depth {depth}"
                    ));
                    let load = Load { operation, depth: *depth, seconds: plan.seconds };
                    samples.push(contender.measure(context, &load)?);
                }
            }
        }
        context.display.line(&format!("  {turn} done"));
    }
    report::write(context, plan, &samples)
}

impl Contender {
    fn measure(&self, context: &RunContext, load: &Load) -> Result<Sample> {
        let (server, backing) = (self.server, self.backing);
        measure::run(context, self.process, &self.unit, load)
            .map(|figures| Sample::new(server, backing, load, figures))
            .with_context(|| {
                format!("{server}, {backing}, {}, depth {}", load.operation, load.depth)
            })
    }
}

/// The directories of the disks.
struct BackingDirs {
    ram: PathBuf,
    file: PathBuf,
}

impl BackingDirs {
    /// Creates a directory on tmpfs and one beside the build, on its disk.
    fn new(context: &RunContext) -> Result<Self> {
        let ram = context.memory_directory()?;
        let file = context.build_directory()?;
        Ok(Self { ram, file })
    }

    fn of(&self, backing: &str) -> &Path {
        if backing == "RAM" { &self.ram } else { &self.file }
    }
}

fn start_windrose(
    context: &RunContext,
    places: &BackingDirs,
    backing: &'static str,
) -> Result<Contender> {
    let pinned = ["taskset", "-c", "0"];
    let wishes = NodeOptions {
        profile: Profile::Dist,
        cores: 1,
        pool_mib: POOL_MIB,
        extra_config: "[log]\nlevel = \"warn\"\n",
        prefix: &pinned,
        ..NodeOptions::default()
    };
    let mut node = Node::new(context, places.of(backing), &format!("windrose-{backing}"), &wishes)?;
    node.start()?;
    let unit = node.create("bench", &format!("{DISK_MIB}MiB"))?.unit;
    fill(context, "windrose", &unit)?;
    let process = node.process()?;
    Ok(Contender {
        server: "windrose",
        backing,
        process,
        unit,
        _running: RunningServer::Node(node),
    })
}

fn start_tgt(
    context: &RunContext,
    places: &BackingDirs,
    backing: &'static str,
    direct: bool,
) -> Result<Contender> {
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
    let mut tgt = Tgt::start(context, portal, &["taskset", "-c", "0"])?;
    let unit = tgt.export(&disk, direct)?;
    fill(context, server, &unit)?;
    let process = tgt.process();
    Ok(Contender { server, backing, process, unit, _running: RunningServer::Tgt(tgt) })
}
