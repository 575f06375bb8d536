//! `./run demo`: the product's main job from beginning to end. Two servers mirror a volume, a Linux
//! machine uses it through both, one server dies, and I/O only pauses.

use crate::{
    cluster::{Cluster, MirroredVolume, NODE_A, NODE_B},
    guest::{self, GuestJob, GuestKernel, INITIATOR, nvme_host},
    install,
    node::{Node, Profile},
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use probe::registers::SeededRng;
use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Files of the tree, and their least total size.
const FILES: usize = 1500;
const TREE_BYTES: u64 = 200_000_000;
/// The ext4 image lies at the start of the volume; the load writes behind it.
const IMAGE_MIB: u64 = 400;
/// What the load writes over each protocol, in 4 KiB writes, and the rate per second.
const LOAD_MIB: u64 = 32;
const LOAD_RATE: u64 = 250;
const GUEST_LIMIT: Duration = Duration::from_secs(180);
/// How long after its last write a region may stay dirty (RFD 0010, 6.3: unwritten for two rounds
/// of 5 s, cleared in the third). A node that dies earlier gets the region again.
const MARK_CLEAR_TIME: Duration = Duration::from_secs(16);
/// How long the killed node is down.
const NODE_DOWN_TIME: Duration = Duration::from_secs(6);
/// The promised longest pause is 4 s. It may be longer here: the guest shares two cores with the
/// cluster and detects a dead path itself.
const PAUSE_ALLOWED_S: u64 = 8;

/// The packages the demo needs.
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    let mut packages = guest::packages();
    packages.extend([install::QEMU_IMG, install::NETWORK, install::FILTER]);
    packages.extend([install::ETCD, install::MULTIPATH]);
    packages
}

/// Runs the demo, between the build and the closing words.
pub(crate) fn run_demo(context: &RunContext, profile: Profile) -> Result<()> {
    let directory = context.directory("demo")?;
    let stage = Demo { context, directory };
    stage.image()?;
    let mut cluster = stage.cluster(profile)?;
    let volume = stage.volume(&cluster)?;
    stage.copy_in(&volume)?;
    let rested = Instant::now() + MARK_CLEAR_TIME;
    stage.guest(&mut cluster, &volume, rested)?;
    stage.end(cluster, &volume)
}

/// Prints how to do the same by hand.
pub(crate) fn print_manual_steps(context: &RunContext) {
    let program = Profile::Release.program(context);
    let program = program.strip_prefix(&context.root).unwrap_or(&program).display();
    println!(
        "
On three machines of your own (two with disks, any third as the witness), with `[cluster] listen` in each configuration file:
    {program} node &                                   # on each of them
    {program} cluster init                             # on the first
    {program} cluster token                            # there too, for the second: a node that has it can join
    {program} cluster join --token TOKEN               # on the second
    {program} cluster token                            # on the first again, for the third: each lets one in
    {program} cluster witness --token TOKEN            # on the third
    {program} volume create mine --size 10GiB --replicas 2 --allow any
    {program} status                                   # is my data safe?

and on any Linux machine, through both:
    iscsiadm -m discovery -t sendtargets -p FIRST; iscsiadm -m node -T TARGET --login; multipath -ll
or
    nvme connect -t tcp -a FIRST -s 4420 -n SUBSYSTEM; nvme connect -t tcp -a SECOND -s 4420 -n SUBSYSTEM

`docs/guides/initiators.md` has the settings of the initiators. `--allow any` lets all initiators in; `--allow iqn…` or
`--allow nqn…` names who may.
"
    );
}

struct Demo<'a> {
    context: &'a RunContext,
    directory: PathBuf,
}

impl Demo<'_> {
    fn step<T>(&self, what: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut outcome = None;
        let passed = self.context.check(what, || {
            outcome = Some(body()?);
            Ok(())
        });
        outcome.filter(|_| passed).context("the demo ends here")
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.directory);
        self.context.run(program, &mut command, GUEST_LIMIT)?.success_output()?;
        Ok(())
    }

    /// Makes a directory tree, the checksums of its files and an ext4 image of it.
    fn image(&self) -> Result<()> {
        self.step(
            &format!("a directory tree: {FILES} files, {} MB", TREE_BYTES / 1_000_000),
            || {
                let written = write_tree(&self.directory.join("tree"))?;
                ensure!(written >= TREE_BYTES, "the tree has only {written} bytes");
                let sums =
                    "cd tree && find . -type f -print0 | sort -z | xargs -0 sha256sum > ../sums";
                self.tool("sh", &["-c", sums])
            },
        )?;
        self.step("an ext4 image of it", || {
            let size = format!("{IMAGE_MIB}M");
            self.tool("mke2fs", &["-q", "-t", "ext4", "-d", "tree", "tree.ext4", &size])?;
            fs::remove_dir_all(self.directory.join("tree")).context("cannot remove the tree")
        })
    }

    fn cluster(&self, profile: Profile) -> Result<Cluster> {
        let cluster = self.step("three nodes, each with networks of its own", || {
            Cluster::start(self.context, &self.directory, profile)
        })?;
        self.step("they form a cluster: init, join, witness", || cluster.form_cluster())?;
        Ok(cluster)
    }

    fn volume(&self, cluster: &Cluster) -> Result<MirroredVolume> {
        let size = format!("{}MiB", IMAGE_MIB + 2 * LOAD_MIB);
        self.step("a volume with a copy on both, for iSCSI and NVMe/TCP at once", || {
            cluster.create("demo", &size)
        })
    }

    fn copy_in(&self, volume: &MirroredVolume) -> Result<()> {
        let url = volume.exported.unit.qemu_url();
        self.step("the image copied in at node a over iSCSI (qemu-img convert)", || {
            self.tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "tree.ext4", &url])
        })
    }

    fn guest(&self, cluster: &mut Cluster, volume: &MirroredVolume, rested: Instant) -> Result<()> {
        let kernel = GuestKernel::choose(self.context)?;
        let sums = self.directory.join("sums");
        let order = GuestJob {
            script: "multipath.sh",
            variables: guest_variables(cluster, volume),
            files: vec![("sums", sums.as_path())],
            kernel_options: &[],
            memory_mib: 768,
            limit: GUEST_LIMIT,
        };
        self.context.display.line(&format!(
            "  a guest ({}) on dm-multipath and NVMe multipath; node b is killed in the middle:",
            kernel.name()
        ));
        self.context.display.begin_step(&format!("a guest on {}", kernel.name()));
        let run = guest::run_beside(self.context, &kernel, &order, |signs| {
            signs.wait_for("loaded")?;
            std::thread::sleep(rested.saturating_duration_since(Instant::now()));
            kill_node_under_load(cluster)
        });
        let (clean, resent) = run.inspect_err(|_| cluster.show_logs(self.context))?;
        if !clean {
            cluster.show_logs(self.context);
        }
        ensure!(clean, "the guest found faults");
        if let Some(bytes) = resent {
            self.step(
                &format!(
                    "while node b came back {} MiB went to it, of {} MiB that the volume holds",
                    bytes >> 20,
                    IMAGE_MIB + 2 * LOAD_MIB
                ),
                || {
                    // Changes since the kill, in-flight writes and etcd; a full resync would be the
                    // whole image.
                    ensure!(bytes < TREE_BYTES, "more than changed");
                    Ok(())
                },
            )?;
        }
        Ok(())
    }

    fn end(self, mut cluster: Cluster, volume: &MirroredVolume) -> Result<()> {
        self.step("both copies hold the same bytes", || cluster.check_replicas_equal(volume))?;
        self.step("all nodes end in order", || cluster.stop())
    }
}

/// Kills node b under the guest's load and restarts it later. Returns the bytes sent to it until
/// all data was safe, if they can be counted.
fn kill_node_under_load(cluster: &mut Cluster) -> Result<Option<u64>> {
    cluster.nodes[NODE_B].kill()?;
    std::thread::sleep(NODE_DOWN_TIME);
    let before = cluster.bytes_to(NODE_B)?;
    cluster.nodes[NODE_B].start()?;
    cluster.await_safe()?;
    let after = cluster.bytes_to(NODE_B)?;
    Ok(after.zip(before).map(|(after, before)| after - before))
}

/// The variables of the guest's script.
fn guest_variables(cluster: &Cluster, volume: &MirroredVolume) -> Vec<(&'static str, String)> {
    let portals = |of: fn(&Node) -> SocketAddr| {
        [NODE_A, NODE_B]
            .map(|node| guest::address_from_guest(of(&cluster.nodes[node])).to_string())
            .join(" ")
    };
    let translated = if cluster.network.is_separate() { "no" } else { "yes" };
    let mut variables = vec![
        ("PORTALS", portals(|node| node.iscsi)),
        ("NVME_PORTALS", portals(|node| node.nvme)),
        ("TRANSLATED", translated.to_owned()),
        ("TARGET", volume.exported.unit.target.clone()),
        ("INITIATOR", INITIATOR.to_owned()),
        ("SUBSYSTEM", volume.exported.subsystem.nqn.clone()),
        ("OFFSET", IMAGE_MIB.to_string()),
        ("MEGABYTES", LOAD_MIB.to_string()),
        ("RATE", LOAD_RATE.to_string()),
        ("SECONDS_ALLOWED", PAUSE_ALLOWED_S.to_string()),
        ("SUMS", "sums".to_owned()),
        ("FILES", FILES.to_string()),
    ];
    variables.extend(nvme_host());
    variables
}

/// Writes the tree, identical on every machine; returns its size in bytes.
fn write_tree(root: &Path) -> Result<u64> {
    let mut dice = SeededRng::new(2026);
    let mut written = 0;
    for number in 0..FILES {
        let directory = root.join(format!("d{}/e{}", dice.next_below(12), dice.next_below(8)));
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let content = file_content(&mut dice, number);
        written += content.len() as u64;
        let path = directory.join(format!("file {number}"));
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(written)
}

/// Small, large and empty files; compressible and incompressible bytes.
fn file_content(dice: &mut SeededRng, number: usize) -> Vec<u8> {
    let mean = 2 * TREE_BYTES / FILES as u64;
    let length = match number % 50 {
        0 => 0,
        1..=9 => dice.next_below(4096),
        _ => dice.next_below(mean) + mean / 5,
    };
    let length = usize::try_from(length).unwrap_or(0);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        let word = dice.next_u64();
        let word = if number.is_multiple_of(3) {
            word & 0x0707_0707_0707_0707 | 0x6060_6060_6060_6060
        } else {
            word
        };
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_large_enough_and_fits_the_image() {
        let mut dice = SeededRng::new(2026);
        let bytes: u64 = (0..FILES)
            .map(|number| {
                dice.next_below(12);
                dice.next_below(8);
                file_content(&mut dice, number).len() as u64
            })
            .sum();
        assert!((TREE_BYTES..350_000_000).contains(&bytes), "{bytes}");
    }
}
