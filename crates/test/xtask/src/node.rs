//! The product as a process: built, configured, started, stopped, killed; spoken to by its own command line.

use crate::{
    house::House,
    namespace,
    process::{Daemon, read_lossy, tail},
    server::{Subsystem, Unit},
};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    ffi::OsStr,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::{
        net::{UnixDatagram, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    time::{Duration, Instant},
};

/// How long a node may take until it answers; the start-up tier measures it, here it is only a limit.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Says where a node is to die.
const FAULT: &str = "WINDROSE_FAULT";
/// How long a command line may take.
const CALL_LIMIT_S: &str = "120";

/// How the product is built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// With debug assertions and overflow checks, and points at which it can be told to die (`rt::fault`): what tests want.
    Dev,
    /// As it is shipped: what measurements and the demo want.
    Release,
}

impl Profile {
    fn directory(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }

    /// Where the product's program lies once it is built.
    pub(crate) fn program(self, house: &House) -> PathBuf {
        self.sibling(house, "windrose")
    }

    /// Where another program of the workspace lies once it is built.
    pub(crate) fn sibling(self, house: &House, name: &str) -> PathBuf {
        house.target.join(self.directory()).join(name)
    }

    /// Where an example of a crate lies once it is built.
    pub(crate) fn example(self, house: &House, name: &str) -> PathBuf {
        self.sibling(house, "examples").join(name)
    }

    /// Builds what `what` (arguments of cargo build) names. Inside a namespace, which has no network, it has been built before.
    pub(crate) fn build(self, house: &House, what: &[&str]) -> Result<()> {
        if namespace::inside() {
            return Ok(());
        }
        let mut command = house.cargo();
        command.args(["build", "--locked"]).args(what);
        if self == Self::Release {
            command.arg("--release");
        }
        house.display.working(&format!("build {}", what.join(" ")));
        let begun = Instant::now();
        house.build("cargo build", &mut command)?.ok()?;
        house.display.line(&format!("  built {}  {} s", what.join(" "), begun.elapsed().as_secs()));
        Ok(())
    }

    /// Builds the product, as the tests of the workspace do, unless this run [has it already](House::has_product).
    pub(crate) fn build_product(self, house: &House) -> Result<()> {
        match self {
            Self::Dev if house.has_product.get() => Ok(()),
            Self::Dev => self.build(house, &["-p", "windrose", "--features", "fault-points"]),
            Self::Release => self.build(house, &["-p", "windrose"]),
        }
    }
}

/// What a test wants of a node.
pub(crate) struct Wishes<'a> {
    pub(crate) profile: Profile,
    pub(crate) cores: u32,
    /// Buffer memory of each core.
    pub(crate) pool_mib: u64,
    /// More lines for the configuration: whole sections.
    pub(crate) more: &'a str,
    /// Words before the program: to pin it to a processor, or to run it in another namespace.
    pub(crate) prefix: &'a [&'a str],
    /// Where it serves initiators, at the protocols' own ports; without it, on loopback at ports that are free.
    pub(crate) at: Option<IpAddr>,
}

impl Default for Wishes<'_> {
    fn default() -> Self {
        Self { profile: Profile::Dev, cores: 2, pool_mib: 64, more: "", prefix: &[], at: None }
    }
}

/// A node with a directory of its own, running or not.
pub(crate) struct Node {
    program: PathBuf,
    prefix: Vec<String>,
    /// What is added to its environment when it is started.
    environment: Vec<(String, String)>,
    pub(crate) directory: PathBuf,
    logs: PathBuf,
    /// Where this process reaches its listeners.
    pub(crate) iscsi: SocketAddr,
    pub(crate) nvme: SocketAddr,
    pub(crate) discovery: SocketAddr,
    daemon: Option<Daemon>,
    /// Where it says that it serves, as to a service manager (`sd_notify(3)`).
    manager: Option<UnixDatagram>,
}

/// A volume as both protocols name it.
#[derive(Clone, Debug)]
pub(crate) struct Exported {
    pub(crate) unit: Unit,
    pub(crate) subsystem: Subsystem,
}

/// An address nobody listens at; free again when this returns.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free")?;
    Ok(listener.local_addr()?.port())
}

/// Where a node listens for iSCSI, NVMe/TCP and NVMe discovery.
fn listeners(at: Option<IpAddr>) -> Result<[SocketAddr; 3]> {
    match at {
        Some(address) => Ok([3260, 4420, 8009].map(|port| SocketAddr::new(address, port))),
        None => {
            let here = |port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
            Ok([here(free_port()?), here(free_port()?), here(free_port()?)])
        }
    }
}

impl Node {
    /// Writes a configuration into a new directory called `name` below `parent`; starts nothing.
    pub(crate) fn new(
        house: &House,
        parent: &Path,
        name: &str,
        wishes: &Wishes<'_>,
    ) -> Result<Self> {
        let directory = parent.join(name);
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let [iscsi, nvme, discovery] = listeners(wishes.at)?;
        // Guests reach a node on loopback through a tap of the namespace, or through QEMU's user network, which ends there.
        let any = if namespace::inside() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        let any = wishes.at.unwrap_or(IpAddr::V4(any));
        let at = |address: SocketAddr| SocketAddr::new(any, address.port());
        let text = format!(
            "name = \"{name}\"\n\
             data_dir = \"{data}\"\n\
             shutdown_timeout_s = 20\n\
             [cores]\ncount = {cores}\npool = \"{pool}MiB\"\n\
             [disks]\nlow_space_percent = 0\n\
             [iscsi]\nportals = [\"{iscsi}\"]\n\
             [nvme]\nportals = [\"{nvme}\"]\ndiscovery = [\"{discovery}\"]\n\
             [vhost_user]\ndirectory = \"{guests}\"\n\
             [api]\nsocket = \"{socket}\"\n\
             {more}",
            data = directory.join("data").display(),
            cores = wishes.cores,
            pool = wishes.pool_mib,
            iscsi = at(iscsi),
            nvme = at(nvme),
            discovery = at(discovery),
            guests = directory.join("vhost").display(),
            socket = directory.join("api.sock").display(),
            more = wishes.more,
        );
        std::fs::create_dir_all(directory.join("data"))
            .context("cannot create the data directory")?;
        std::fs::write(directory.join("windrose.toml"), text)
            .context("cannot write the configuration")?;
        Ok(Self {
            program: wishes.profile.program(house),
            prefix: wishes.prefix.iter().map(|&word| word.to_owned()).collect(),
            environment: Vec::new(),
            directory,
            logs: house.scratch().to_owned(),
            iscsi,
            nvme,
            discovery,
            daemon: None,
            manager: None,
        })
    }

    /// Starts the node and waits until it says that it serves.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.launch()?;
        self.await_ready()
    }

    /// Starts the node.
    pub(crate) fn launch(&mut self) -> Result<()> {
        self.launch_with(None)
    }

    /// Starts the node, which ends as by `kill -9` when it passes a point for the count-th time (`rt::fault`).
    pub(crate) fn launch_to_die(&mut self, point: &str, count: u64) -> Result<()> {
        self.launch_with(Some(format!("{point}:{count}")))
    }

    fn launch_with(&mut self, fault: Option<String>) -> Result<()> {
        let socket = self.directory.join("notify.sock");
        let _ = std::fs::remove_file(&socket);
        let manager = UnixDatagram::bind(&socket).context("cannot make a notify socket")?;
        manager.set_nonblocking(true).context("cannot make a notify socket")?;
        self.manager = Some(manager);
        let mut words: Vec<&OsStr> = self.prefix.iter().map(OsStr::new).collect();
        words.push(self.program.as_os_str());
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .args(["node", "--config"])
            .arg(self.directory.join("windrose.toml"))
            .env("NOTIFY_SOCKET", &socket)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .envs(fault.map(|fault| (FAULT, fault)));
        self.daemon = Some(Daemon::start(&self.logs, "windrose node", &mut command)?);
        Ok(())
    }

    /// Waits until a node that was launched says that it serves.
    pub(crate) fn await_ready(&mut self) -> Result<()> {
        let manager = self.manager.as_ref().context("the node was never started")?;
        let daemon = self.daemon.as_mut().context("the node is not running")?;
        let said = &mut [0; 256];
        daemon.wait_until(START_LIMIT, || {
            std::iter::from_fn(|| manager.recv(said).ok().map(|n| said[..n].to_vec()))
                .any(|message| message.split(|&byte| byte == b'\n').any(|line| line == b"READY=1"))
        })
    }

    /// From its next start on, the node has `environment` beside this process's own.
    pub(crate) fn set_environment(&mut self, environment: Vec<(String, String)>) {
        self.environment = environment;
    }

    /// The points at which the node can be told to die, as the program itself lists them.
    pub(crate) fn points(&self) -> Result<Vec<String>> {
        let mut command = Command::new(&self.program);
        command.args(["node", "--check", "--config"]).arg(self.directory.join("windrose.toml"));
        let out = command.env(FAULT, "none:1").output().context("cannot run windrose")?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(!out.status.success(), "an unknown point is no error");
        let list = said.split_once("there is no point none; there are ");
        let (_, list) = list.with_context(|| format!("no list of points: {said}"))?;
        let list = list.lines().next().unwrap_or_default();
        Ok(list.split(", ").map(str::to_owned).collect())
    }

    /// Whether the node has died by itself, as by SIGKILL; any other end is an error.
    pub(crate) fn has_died(&mut self) -> Result<bool> {
        let daemon = self.daemon.as_mut().context("the node is not running")?;
        let Some(status) = daemon.ended()? else { return Ok(false) };
        ensure!(
            status.signal() == Some(Signal::KILL.as_raw()),
            "the node has ended: {status}\n{}",
            tail(&daemon.output()?)
        );
        // With its child, the member of the store.
        self.daemon = None;
        Ok(true)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("api.sock")
    }

    fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("the node is not running")
    }

    /// The process.
    pub(crate) fn process(&self) -> Result<u32> {
        Ok(self.daemon()?.id())
    }

    /// What the node has logged since it was started.
    pub(crate) fn log(&self) -> Result<String> {
        self.daemon()?.output()
    }

    /// Fails if the node has ended by itself.
    pub(crate) fn alive(&mut self) -> Result<()> {
        self.daemon.as_mut().context("the node is not running")?.alive()
    }

    /// An orderly end: SIGTERM.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        self.daemon.take().context("the node is not running")?.stop()
    }

    /// A crash: SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.daemon.take().context("the node is not running")?.kill()
    }

    /// A hang: SIGSTOP for the node and its children.
    pub(crate) fn freeze(&self) -> Result<()> {
        self.daemon()?.signal(Signal::STOP);
        Ok(())
    }

    /// The end of a hang.
    pub(crate) fn thaw(&self) -> Result<()> {
        self.daemon()?.signal(Signal::CONT);
        Ok(())
    }

    /// The product's command line against this node, run to its end whatever that is.
    pub(crate) fn call(&self, arguments: &[&str]) -> Result<Output> {
        self.command_line(arguments).output().context("cannot run windrose")
    }

    /// The product's command line against this node, while other things happen.
    pub(crate) fn begin(&self, arguments: &[&str]) -> Result<Daemon> {
        let what = format!("windrose {}", arguments[..arguments.len().min(2)].join(" "));
        Daemon::start(&self.logs, &what, &mut self.command_line(arguments))
    }

    /// A command that serves something of this node, until it is told to stop.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Result<Daemon> {
        let what = format!("windrose {}", arguments[..arguments.len().min(2)].join(" "));
        let mut command = Command::new(&self.program);
        command.arg("--api").arg(format!("unix:{}", self.socket().display())).args(arguments);
        Daemon::start(&self.logs, &what, &mut command)
    }

    fn command_line(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg(CALL_LIMIT_S).arg(&self.program);
        command.arg("--api").arg(format!("unix:{}", self.socket().display())).args(arguments);
        command
    }

    /// The product's command line against this node.
    pub(crate) fn command(&self, arguments: &[&str]) -> Result<String> {
        let out = self.call(arguments)?;
        ensure!(
            out.status.success(),
            "windrose {}: {}{}",
            arguments.join(" "),
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// The same, its answer parsed.
    pub(crate) fn query(&self, arguments: &[&str]) -> Result<Value> {
        let arguments = [arguments, &["--json"]].concat();
        let text = self.command(&arguments)?;
        serde_json::from_str(&text)
            .with_context(|| format!("windrose {}: {text}", arguments.join(" ")))
    }

    /// Creates a volume that every initiator may reach.
    pub(crate) fn create(&self, name: &str, size: &str) -> Result<Exported> {
        self.create_with(name, size, &[])
    }

    /// The same, with more words for the command line.
    pub(crate) fn create_with(&self, name: &str, size: &str, more: &[&str]) -> Result<Exported> {
        let words = ["volume", "create", name, "--size", size, "--allow", "any"];
        let volume = self.query(&[&words[..], more].concat())?;
        self.exported(&volume)
    }

    /// Has a volume ask its iSCSI initiators for CHAP.
    pub(crate) fn ask_for_chap(&self, volume: &str, user: &str, secret: &str) -> Result<()> {
        let file = self.directory.join("chap-secret");
        std::fs::write(&file, secret).context("cannot write a secret")?;
        let user = format!("{user}:{}", file.display());
        self.query(&["volume", "chap", volume, &user]).map(drop)
    }

    fn exported(&self, volume: &Value) -> Result<Exported> {
        let text = |path: &str| -> Result<String> {
            let value = volume.pointer(path).and_then(Value::as_str);
            Ok(value.with_context(|| format!("no {path} in {volume}"))?.to_owned())
        };
        let lun = volume.pointer("/iscsi/lun").and_then(Value::as_u64).context("no LUN")?;
        let unit = Unit {
            portal: self.iscsi,
            target: text("/iscsi/target")?,
            lun: u32::try_from(lun).context("an odd LUN")?,
        };
        let subsystem = Subsystem {
            nqn: text("/nvme/subsystem")?,
            io_port: self.nvme.port(),
            discovery_port: self.discovery.port(),
        };
        Ok(Exported { unit, subsystem })
    }

    /// A metric of this node, by its name and labels as they are written.
    pub(crate) fn metric(&self, name: &str) -> Result<u64> {
        let mut stream = UnixStream::connect(self.socket()).context("cannot reach the API")?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page).context("no metrics")?;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("no {name} in\n{page}"))?;
        value.trim().parse().with_context(|| format!("{name} is {value}"))
    }

    /// How many volumes are being served.
    pub(crate) fn volumes_online(&self) -> Result<usize> {
        let list = self.query(&["volume", "list"])?;
        let volumes = list.pointer("/volumes").or(Some(&list)).and_then(Value::as_array);
        let volumes = volumes.with_context(|| format!("no list of volumes: {list}"))?;
        Ok(volumes
            .iter()
            .filter(|v| v.pointer("/state/is").and_then(Value::as_str) == Some("online"))
            .count())
    }
}

/// Processor time a process has used so far, its threads included.
pub(crate) fn processor_time(process: u32) -> Result<Duration> {
    let stat = read_lossy(Path::new(&format!("/proc/{process}/stat")))?;
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    // A tick of these counters is a hundredth of a second on every Linux (USER_HZ).
    Ok(Duration::from_millis(ticks * 10))
}

/// The processes that a process has started and that have not ended.
pub(crate) fn children(process: u32) -> Result<Vec<u32>> {
    let directory = format!("/proc/{process}/task");
    let threads = std::fs::read_dir(&directory).with_context(|| format!("no {directory}"))?;
    let mut all = Vec::new();
    for thread in threads {
        let thread = thread.with_context(|| format!("cannot read {directory}"))?.path();
        // A thread may have ended by now.
        let children = std::fs::read_to_string(thread.join("children")).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(all)
}

/// Memory of a process in KiB: `VmRSS` now, `VmHWM` at its highest.
pub(crate) fn memory_kib(process: u32, field: &str) -> Result<u64> {
    let status = read_lossy(Path::new(&format!("/proc/{process}/status")))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value =
        line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok());
    value.with_context(|| format!("no {field} in /proc/{process}/status"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_time() {
        let own = std::process::id();
        assert!(memory_kib(own, "VmHWM").unwrap() >= memory_kib(own, "VmRSS").unwrap() / 2);
        assert!(memory_kib(own, "VmNothing").is_err());
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        assert!(processor_time(own).unwrap() >= Duration::from_millis(10));
    }
}
