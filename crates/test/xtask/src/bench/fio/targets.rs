//! What both generators measure: targets slower than either of them, and targets that are not.
//!
//! Two generators can agree on a common bottleneck. A disk is one, and so is a server with a fixed
//! time for each request (nbdkit's `delay`), over NBD and as a block device: a loop device on the
//! file of an NBD client's FUSE file system, all from Debian packages. Memory is none: there the
//! figures show what the generators cost.

use super::{Load, MIB, load};
use crate::{
    bench::SERVER_CPU,
    process::{self, Daemon, FinishedProcess},
    run_context::RunContext,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Requests a server processes in parallel: more than any load has in flight.
const THREADS: &str = "64";

/// How long a server may take to start.
const SERVER_START_TIMEOUT: Duration = Duration::from_secs(10);

/// Options that make fio do what we do: run as a thread of a process with other threads, for which
/// the kernel counts the users of a descriptor at each call, and register its buffers with the
/// ring.
const FIO_THREAD_OPTION: &str = "--thread";
const FIO_FIXED_BUFS_OPTION: &str = "--fixedbufs=1";

/// A target of both generators.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// As `windrose bench` names it.
    pub(super) windrose_target: String,
    /// The arguments that select it in fio.
    pub(super) fio_arguments: Vec<String>,
    pub(super) loads: &'static [Load],
    /// Whether it is the bottleneck of both generators, so that they have to agree.
    pub(super) is_bottleneck: bool,
}

const DISK: &[Load] = &[
    load("randread", "4k", 1),
    load("randread", "4k", 32),
    load("randwrite", "4k", 1),
    load("randwrite", "4k", 32),
    load("read", "128k", 8),
    load("write", "128k", 8),
];

/// Memory never has requests in flight: neither generator uses a depth above 1.
const MEMORY: &[Load] =
    &[load("randread", "4k", 1), load("randwrite", "4k", 1), load("read", "128k", 1)];

/// The targets and the servers behind them.
pub(super) struct Targets {
    pub(super) all: Vec<Target>,
    _device: Option<NbdLoopDevice>,
    _servers: [Daemon; 2],
}

impl Targets {
    /// Starts the servers and fills the files.
    pub(super) fn new(context: &RunContext) -> Result<Self> {
        let (disk, memory) = (context.build_directory()?, context.memory_directory()?);
        let (on_disk, in_memory) = (create_filled_file(&disk)?, create_filled_file(&memory)?);
        let (fast, slow) = (memory.join("nbd.sock"), memory.join("slow.sock"));
        let servers = [export(context, &fast, (&[], &[]))?, export(context, &slow, DELAY_FILTER)?];
        for socket in [&fast, &slow] {
            // Unwritten memory is not allocated, and reads of it skip the memory.
            let mut copy = Command::new("nbdcopy");
            copy.arg(&in_memory).arg(uri(socket));
            context
                .run("nbdcopy", &mut copy, 6 * SERVER_START_TIMEOUT)
                .and_then(FinishedProcess::success_output)?;
        }
        let device = match NbdLoopDevice::new(context, &slow) {
            Ok(device) => Some(device),
            Err(e) => {
                context.skip(DEVICE, &format!("no loop device on a file of FUSE here: {e:#}"));
                None
            }
        };
        let mut all = vec![file("file", &on_disk, "io_uring", DISK, true)];
        all.extend(device.as_ref().map(|d| file(DEVICE, &d.path, "io_uring", DISK, true)));
        all.push(nbd("NBD, 1 ms", &slow, true));
        // Files in memory complete at once: io_uring would hand each operation to a thread. We make
        // plain calls, like psync.
        all.push(file("RAM", &in_memory, "psync", MEMORY, false));
        all.push(nbd("NBD", &fast, false));
        Ok(Self { all, _device: device, _servers: servers })
    }
}

/// nbdkit arguments that slow memory down, by as much as the names say.
const DELAY_FILTER: (&[&str], &[&str]) = (&["--filter=delay"], &["rdelay=1ms", "wdelay=1ms"]);

/// Exports memory over NBD with nbdkit, pinned to the servers' processor, with these filters.
fn export(
    context: &RunContext,
    socket: &Path,
    (filters, terms): (&[&str], &[&str]),
) -> Result<Daemon> {
    let mut command = on_server("nbdkit");
    command.args(["--foreground", "--threads", THREADS, "--unix"]).arg(socket);
    command.args(filters);
    command.args(["memory", &format!("{MIB}M")]).args(terms);
    let mut nbdkit = Daemon::start(context.scratch(), "nbdkit", &mut command)?;
    nbdkit.wait_until(SERVER_START_TIMEOUT, || UnixStream::connect(socket).is_ok())?;
    Ok(nbdkit)
}

fn on_server(program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &SERVER_CPU.to_string(), program]);
    command
}

/// Creates a file of incompressible data.
fn create_filled_file(directory: &Path) -> Result<PathBuf> {
    let path = directory.join("target");
    let mut dice = probe::registers::SeededRng::new(1);
    let noise: Vec<u8> = (0..MIB << 17).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    fs::write(&path, noise).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn file(
    name: &'static str,
    path: &Path,
    engine: &str,
    loads: &'static [Load],
    limits: bool,
) -> Target {
    let ours = path.display().to_string();
    let mut theirs = vec![
        FIO_THREAD_OPTION.to_owned(),
        format!("--filename={ours}"),
        format!("--ioengine={engine}"),
    ];
    if engine == "io_uring" {
        // fio accepts an engine's options only after its name.
        theirs.push(FIO_FIXED_BUFS_OPTION.to_owned());
    }
    Target { name, windrose_target: ours, fio_arguments: theirs, loads, is_bottleneck: limits }
}

fn nbd(name: &'static str, socket: &Path, limits: bool) -> Target {
    let ours = uri(socket);
    let theirs =
        vec![FIO_THREAD_OPTION.to_owned(), "--ioengine=nbd".to_owned(), format!("--uri={ours}")];
    Target {
        name,
        windrose_target: ours,
        fio_arguments: theirs,
        loads: DISK,
        is_bottleneck: limits,
    }
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

const DEVICE: &str = "device, 1 ms";

/// An NBD export as a block device. The kernel releases it on last close, however this program
/// ends.
struct NbdLoopDevice {
    path: PathBuf,
    open: Option<File>,
    mount: PathBuf,
    _client: Daemon,
}

impl NbdLoopDevice {
    fn new(context: &RunContext, socket: &Path) -> Result<Self> {
        ensure!(Path::new("/dev/fuse").exists(), "there is no /dev/fuse");
        let mount = context.directory("nbdfuse")?;
        let file = mount.join("nbd");
        let mut command = on_server("nbdfuse");
        command.arg(&file).arg("--unix").arg(socket);
        let mut client = Daemon::start(context.scratch(), "nbdfuse", &mut command)?;
        let bytes = MIB << 20;
        client.wait_until(SERVER_START_TIMEOUT, || {
            fs::metadata(&file).is_ok_and(|m| m.len() == bytes)
        })?;
        // From here on, dropping the device unmounts it.
        let mut device = Self { path: PathBuf::new(), open: None, mount, _client: client };
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        let found = context
            .run("losetup", &mut losetup, SERVER_START_TIMEOUT)
            .and_then(FinishedProcess::success_output)?;
        device.path = PathBuf::from(found.trim());
        let open = File::open(&device.path);
        // An open device stays attached and is detached on last close.
        process::run_checked(Command::new("losetup").arg("--detach").arg(&device.path))?;
        device.open = Some(open.with_context(|| format!("cannot open {}", found.trim()))?);
        Ok(device)
    }
}

impl Drop for NbdLoopDevice {
    fn drop(&mut self) {
        self.open = None;
        // A lazy unmount: what is still in use goes with its last user.
        let _ = process::run_checked(Command::new("umount").arg("--lazy").arg(&self.mount));
    }
}
