//! What both generators reach: things that are slower than either of them, and things that are not.
//!
//! Two generators can agree on what limits both. A disk does, and so does a server that takes a known time for each request
//! (nbdkit's `delay`), by NBD itself and as a block device: a loop device on the one file of an NBD client's FUSE file system, all of
//! it programs and drivers that every Debian has. Memory does not: what is seen there is what the generators cost.

use super::{Load, MIB, load};
use crate::{
    bench::SERVER_CPU,
    house::House,
    process::{self, Daemon, Ended},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Requests that a server works on at a time: more than any load has in flight.
const THREADS: &str = "64";

/// How long a server may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options of fio where it does what we do: as a thread of a process that has others, in which the kernel counts the users of a
/// descriptor at each call, and with its memory made known to the ring.
const THREAD: &str = "--thread";
const FIXED: &str = "--fixedbufs=1";

/// What both reach.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// As `windrose bench` calls it.
    pub(super) ours: String,
    /// What tells fio of it.
    pub(super) theirs: Vec<String>,
    pub(super) loads: &'static [Load],
    /// Whether it is this that limits both, so that they have to agree.
    pub(super) limits: bool,
}

const DISK: &[Load] = &[
    load("randread", "4k", 1),
    load("randread", "4k", 32),
    load("randwrite", "4k", 1),
    load("randwrite", "4k", 32),
    load("read", "128k", 8),
    load("write", "128k", 8),
];

/// In memory nothing is ever in flight: neither asks for more than one thing at a time.
const MEMORY: &[Load] =
    &[load("randread", "4k", 1), load("randwrite", "4k", 1), load("read", "128k", 1)];

/// What is measured, and what serves it meanwhile.
pub(super) struct Targets {
    pub(super) all: Vec<Target>,
    _device: Option<Device>,
    _servers: [Daemon; 2],
}

impl Targets {
    /// Starts the servers and fills the files.
    pub(super) fn new(house: &House) -> Result<Self> {
        let (disk, memory) = (house.build_directory()?, house.memory_directory()?);
        let (on_disk, in_memory) = (filled(&disk)?, filled(&memory)?);
        let (fast, slow) = (memory.join("nbd.sock"), memory.join("slow.sock"));
        let servers = [export(house, &fast, (&[], &[]))?, export(house, &slow, SLOWLY)?];
        for socket in [&fast, &slow] {
            // What nobody has written is no memory yet, and read without a look at any.
            let mut copy = Command::new("nbdcopy");
            copy.arg(&in_memory).arg(uri(socket));
            house.run("nbdcopy", &mut copy, 6 * PATIENCE).and_then(Ended::ok)?;
        }
        let device = match Device::over(house, &slow) {
            Ok(device) => Some(device),
            Err(e) => {
                house.skip(DEVICE, &format!("no loop device on a file of FUSE here: {e:#}"));
                None
            }
        };
        let mut all = vec![file("file", &on_disk, "io_uring", DISK, true)];
        all.extend(device.as_ref().map(|d| file(DEVICE, &d.path, "io_uring", DISK, true)));
        all.push(nbd("NBD, 1 ms", &slow, true));
        // Files in memory cannot be waited for: io_uring hands each operation to a thread. We make plain calls, as psync does.
        all.push(file("RAM", &in_memory, "psync", MEMORY, false));
        all.push(nbd("NBD", &fast, false));
        Ok(Self { all, _device: device, _servers: servers })
    }
}

/// What makes memory slow behind nbdkit, by as much as the names say.
const SLOWLY: (&[&str], &[&str]) = (&["--filter=delay"], &["rdelay=1ms", "wdelay=1ms"]);

/// Has somebody else's server export memory by NBD, on the processor of servers, behind filters with these terms.
fn export(house: &House, socket: &Path, (filters, terms): (&[&str], &[&str])) -> Result<Daemon> {
    let mut command = on_server("nbdkit");
    command.args(["--foreground", "--threads", THREADS, "--unix"]).arg(socket);
    command.args(filters);
    command.args(["memory", &format!("{MIB}M")]).args(terms);
    let mut nbdkit = Daemon::start(house.scratch(), "nbdkit", &mut command)?;
    nbdkit.wait_until(PATIENCE, || UnixStream::connect(socket).is_ok())?;
    Ok(nbdkit)
}

fn on_server(program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &SERVER_CPU.to_string(), program]);
    command
}

/// A file of data that does not compress.
fn filled(directory: &Path) -> Result<PathBuf> {
    let path = directory.join("target");
    let mut dice = probe::registers::Dice::new(1);
    let noise: Vec<u8> = (0..MIB << 17).flat_map(|_| dice.roll().to_le_bytes()).collect();
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
    let mut theirs =
        vec![THREAD.to_owned(), format!("--filename={ours}"), format!("--ioengine={engine}")];
    if engine == "io_uring" {
        // fio knows an option of an engine only behind its name.
        theirs.push(FIXED.to_owned());
    }
    Target { name, ours, theirs, loads, limits }
}

fn nbd(name: &'static str, socket: &Path, limits: bool) -> Target {
    let ours = uri(socket);
    let theirs = vec![THREAD.to_owned(), "--ioengine=nbd".to_owned(), format!("--uri={ours}")];
    Target { name, ours, theirs, loads: DISK, limits }
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

const DEVICE: &str = "device, 1 ms";

/// A block device that is an NBD export. The kernel lets go of it when the last who has it open does, however this program
/// ends.
struct Device {
    path: PathBuf,
    open: Option<File>,
    mount: PathBuf,
    _client: Daemon,
}

impl Device {
    fn over(house: &House, socket: &Path) -> Result<Self> {
        ensure!(Path::new("/dev/fuse").exists(), "there is no /dev/fuse");
        let mount = house.directory("nbdfuse")?;
        let file = mount.join("nbd");
        let mut command = on_server("nbdfuse");
        command.arg(&file).arg("--unix").arg(socket);
        let mut client = Daemon::start(house.scratch(), "nbdfuse", &mut command)?;
        let bytes = MIB << 20;
        client.wait_until(PATIENCE, || fs::metadata(&file).is_ok_and(|m| m.len() == bytes))?;
        // From here on what is mounted is taken down again.
        let mut device = Self { path: PathBuf::new(), open: None, mount, _client: client };
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        let found = house.run("losetup", &mut losetup, PATIENCE).and_then(Ended::ok)?;
        device.path = PathBuf::from(found.trim());
        let open = File::open(&device.path);
        // While it is open it stays what it is, and is taken down behind the last one who closes it.
        process::must(Command::new("losetup").arg("--detach").arg(&device.path))?;
        device.open = Some(open.with_context(|| format!("cannot open {}", found.trim()))?);
        Ok(device)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.open = None;
        // What is still in use there goes with its last user.
        let _ = process::must(Command::new("umount").arg("--lazy").arg(&self.mount));
    }
}
