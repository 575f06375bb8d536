//! The product as a process: built, configured, started, stopped, killed; controlled by its command
//! line.

use crate::{
    namespace,
    process::{Daemon, read_lossy, tail},
    run_context::RunContext,
    server::{IscsiLun, NvmeSubsystem},
};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    collections::VecDeque,
    ffi::OsStr,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::{
        net::{UnixDatagram, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How many ports that were found are not found again: far more than a cluster has listeners.
const REMEMBERED_PORTS: usize = 256;
/// How long a node may take until it answers. The start-up tier measures this; here it is only a
/// limit.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Names the fault point at which a node dies.
const FAULT_ENV: &str = "WINDROSE_FAULT";
/// How long a command may take.
const CALL_LIMIT_S: &str = "120";

/// How the product is built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// With debug assertions, overflow checks and fault points (`rt::fault_point`): for tests.
    Dev,
    /// As users build it from source: for the demo.
    Release,
    /// As packages ship it, fully optimised: for benchmarks.
    Dist,
}

impl Profile {
    fn directory(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
            Self::Dist => "dist",
        }
    }

    /// The path of the product's program.
    pub(crate) fn program(self, context: &RunContext) -> PathBuf {
        self.workspace_program(context, "windrose")
    }

    /// The path of another program of the workspace.
    pub(crate) fn workspace_program(self, context: &RunContext, name: &str) -> PathBuf {
        context.target.join(self.directory()).join(name)
    }

    /// The path of a crate's example.
    pub(crate) fn example(self, context: &RunContext, name: &str) -> PathBuf {
        self.workspace_program(context, "examples").join(name)
    }

    /// Builds `what` (arguments of cargo build). Does nothing inside a namespace, which has no
    /// network: it is built before.
    pub(crate) fn build(self, context: &RunContext, what: &[&str]) -> Result<()> {
        if namespace::is_inside() {
            return Ok(());
        }
        let mut command = match self {
            Self::Dev => context.cargo_for_tests(),
            Self::Release | Self::Dist => context.cargo(),
        };
        command.args(["build", "--locked"]).args(what);
        match self {
            Self::Dev => {}
            Self::Release | Self::Dist => {
                command.args(["--profile", self.directory()]);
            }
        }
        context.display.begin_step(&format!("build {}", what.join(" ")));
        let begun = Instant::now();
        context.build("cargo build", &mut command)?.success_output()?;
        context.display.line(&format!(
            "  built {}  {} s",
            what.join(" "),
            begun.elapsed().as_secs()
        ));
        Ok(())
    }

    /// Builds the product like the workspace's tests, unless this run [has it
    /// already](RunContext::is_product_built).
    pub(crate) fn build_product(self, context: &RunContext) -> Result<()> {
        match self {
            Self::Dev if context.is_product_built.get() => Ok(()),
            Self::Dev => self.build(context, &["-p", "windrose", "--features", "fault-points"]),
            Self::Release | Self::Dist => self.build(context, &["-p", "windrose"]),
        }
    }
}

/// The options of a test node.
pub(crate) struct NodeOptions<'a> {
    pub(crate) profile: Profile,
    pub(crate) cores: u32,
    /// Buffer memory of each core.
    pub(crate) pool_mib: u64,
    /// Additional configuration: whole sections.
    pub(crate) extra_config: &'a str,
    /// Command prefix: pins the program to a processor or runs it in another namespace.
    pub(crate) prefix: &'a [&'a str],
    /// Where it serves initiators, at the protocols' standard ports; `None` means loopback with
    /// free ports.
    pub(crate) listen_address: Option<IpAddr>,
}

impl Default for NodeOptions<'_> {
    fn default() -> Self {
        Self {
            profile: Profile::Dev,
            cores: 2,
            pool_mib: 64,
            extra_config: "",
            prefix: &[],
            listen_address: None,
        }
    }
}

/// A node with its own directory, running or not.
pub(crate) struct Node {
    program: PathBuf,
    prefix: Vec<String>,
    /// Added to its environment when it starts.
    environment: Vec<(String, String)>,
    pub(crate) directory: PathBuf,
    logs: PathBuf,
    /// Where this process reaches its listeners.
    pub(crate) iscsi: SocketAddr,
    pub(crate) nvme: SocketAddr,
    pub(crate) discovery: SocketAddr,
    daemon: Option<Daemon>,
    /// The socket on which it reports readiness (`sd_notify(3)`).
    manager: Option<UnixDatagram>,
}

/// A volume as both protocols name it.
#[derive(Clone, Debug)]
pub(crate) struct ExportedVolume {
    pub(crate) unit: IscsiLun,
    pub(crate) subsystem: NvmeSubsystem,
}

/// Finds a port without a listener; it is free again when this returns. The system may offer it
/// again at once, so the last ones are remembered: the listeners of a node need different ports.
pub(crate) fn free_port() -> Result<u16> {
    static LAST: Mutex<VecDeque<u16>> = Mutex::new(VecDeque::new());
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free")?;
        let port = listener.local_addr()?.port();
        if !last.contains(&port) {
            last.push_back(port);
            if last.len() > REMEMBERED_PORTS {
                last.pop_front();
            }
            return Ok(port);
        }
    }
}

/// The node's listeners for iSCSI, NVMe/TCP and NVMe discovery.
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
    /// Writes a configuration into a new directory `name` below `parent`; starts nothing.
    pub(crate) fn new(
        context: &RunContext,
        parent: &Path,
        name: &str,
        wishes: &NodeOptions<'_>,
    ) -> Result<Self> {
        let directory = parent.join(name);
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let [iscsi, nvme, discovery] = listeners(wishes.listen_address)?;
        // Guests reach a node on loopback through a tap of the namespace, or through QEMU's user
        // network, which ends there.
        let any = if namespace::is_inside() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        let any = wishes.listen_address.unwrap_or(IpAddr::V4(any));
        let at = |address: SocketAddr| SocketAddr::new(any, address.port());
        let text = format!(
            "name = \"{name}\"\n\
             data_dir = \"{data}\"\n\
             shutdown_timeout_s = 20\n\
             [cores]\ncount = {cores}\nmemory = \"{pool}MiB\"\n\
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
            more = wishes.extra_config,
        );
        std::fs::create_dir_all(directory.join("data"))
            .context("cannot create the data directory")?;
        std::fs::write(directory.join("windrose.toml"), text)
            .context("cannot write the configuration")?;
        Ok(Self {
            program: wishes.profile.program(context),
            prefix: wishes.prefix.iter().map(|&word| word.to_owned()).collect(),
            environment: Vec::new(),
            directory,
            logs: context.scratch().to_owned(),
            iscsi,
            nvme,
            discovery,
            daemon: None,
            manager: None,
        })
    }

    /// Starts the node and waits until it reports that it serves.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.start_without_waiting()?;
        self.await_ready()
    }

    /// Starts the node.
    pub(crate) fn start_without_waiting(&mut self) -> Result<()> {
        self.launch_with(None)
    }

    /// Starts the node so that it dies, as by `kill -9`, the `count`-th time it passes `point`
    /// (`rt::fault_point`).
    pub(crate) fn start_with_fault_point(&mut self, point: &str, count: u64) -> Result<()> {
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
            .envs(fault.map(|fault| (FAULT_ENV, fault)));
        self.daemon = Some(Daemon::start(&self.logs, "windrose node", &mut command)?);
        Ok(())
    }

    /// Waits until a started node reports that it serves.
    pub(crate) fn await_ready(&mut self) -> Result<()> {
        let manager = self.manager.as_ref().context("the node was never started")?;
        let daemon = self.daemon.as_mut().context("the node is not running")?;
        let said = &mut [0; 256];
        daemon.wait_until(START_LIMIT, || {
            std::iter::from_fn(|| manager.recv(said).ok().map(|n| said[..n].to_vec()))
                .any(|message| message.split(|&byte| byte == b'\n').any(|line| line == b"READY=1"))
        })
    }

    /// Adds `environment` to the node's environment from its next start on.
    pub(crate) fn set_environment(&mut self, environment: Vec<(String, String)>) {
        self.environment = environment;
    }

    /// The fault points that the program itself lists.
    pub(crate) fn fault_points(&self) -> Result<Vec<String>> {
        let mut command = Command::new(&self.program);
        command.args(["node", "--check", "--config"]).arg(self.directory.join("windrose.toml"));
        let out = command.env(FAULT_ENV, "none:1").output().context("cannot run windrose")?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(!out.status.success(), "an unknown point is no error");
        let list = said.split_once("unknown fault point none; the fault points are ");
        let (_, list) = list.with_context(|| format!("no list of points: {said}"))?;
        let list = list.lines().next().unwrap_or_default();
        Ok(list.split(", ").map(str::to_owned).collect())
    }

    /// Whether the node has died at a fault point (SIGKILL); any other end is an error.
    pub(crate) fn was_killed_by_fault(&mut self) -> Result<bool> {
        let daemon = self.daemon.as_mut().context("the node is not running")?;
        let Some(status) = daemon.ended()? else { return Ok(false) };
        ensure!(
            status.signal() == Some(Signal::KILL.as_raw()),
            "the node has ended: {status}\n{}",
            tail(&daemon.output()?)
        );
        // Also ends its child, the etcd member.
        self.daemon = None;
        Ok(true)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("api.sock")
    }

    fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("the node is not running")
    }

    /// Its process id.
    pub(crate) fn process(&self) -> Result<u32> {
        Ok(self.daemon()?.id())
    }

    /// The node's log since its start.
    pub(crate) fn log(&self) -> Result<String> {
        self.daemon()?.output()
    }

    /// Fails if the node has ended by itself.
    pub(crate) fn alive(&mut self) -> Result<()> {
        self.daemon.as_mut().context("the node is not running")?.alive()
    }

    /// Stops the node in order: SIGTERM.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        self.daemon.take().context("the node is not running")?.stop()
    }

    /// Crashes the node: SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.daemon.take().context("the node is not running")?.kill()
    }

    /// Hangs the node and its children: SIGSTOP.
    pub(crate) fn freeze(&self) -> Result<()> {
        self.daemon()?.signal(Signal::STOP);
        Ok(())
    }

    /// Ends a hang: SIGCONT.
    pub(crate) fn thaw(&self) -> Result<()> {
        self.daemon()?.signal(Signal::CONT);
        Ok(())
    }

    /// Runs the product's command line against this node, whatever its exit status.
    pub(crate) fn call(&self, arguments: &[&str]) -> Result<Output> {
        self.command_line(arguments).output().context("cannot run windrose")
    }

    /// Starts the product's command line against this node and does not wait for it.
    pub(crate) fn begin_command(&self, arguments: &[&str]) -> Result<Daemon> {
        let what = format!("windrose {}", arguments[..arguments.len().min(2)].join(" "));
        Daemon::start(&self.logs, &what, &mut self.command_line(arguments))
    }

    /// Starts a command that serves something of this node until it is stopped.
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

    /// Runs the product's command line against this node; fails if the command fails.
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

    /// Like [`Self::command`], with the answer parsed as JSON.
    pub(crate) fn query(&self, arguments: &[&str]) -> Result<Value> {
        let arguments = [arguments, &["--json"]].concat();
        let text = self.command(&arguments)?;
        serde_json::from_str(&text)
            .with_context(|| format!("windrose {}: {text}", arguments.join(" ")))
    }

    /// Creates a volume that every initiator may access.
    pub(crate) fn create(&self, name: &str, size: &str) -> Result<ExportedVolume> {
        self.create_with(name, size, &[])
    }

    /// Like [`Self::create`], with further arguments.
    pub(crate) fn create_with(
        &self,
        name: &str,
        size: &str,
        more: &[&str],
    ) -> Result<ExportedVolume> {
        let words = ["volume", "create", name, "--size", size, "--allow", "any"];
        let volume = self.query(&[&words[..], more].concat())?;
        self.exported(&volume)
    }

    /// Requires CHAP from the volume's iSCSI initiators.
    pub(crate) fn ask_for_chap(&self, volume: &str, user: &str, secret: &str) -> Result<()> {
        let file = self.directory.join("chap-secret");
        std::fs::write(&file, secret).context("cannot write a secret")?;
        let user = format!("{user}:{}", file.display());
        self.query(&["volume", "chap", volume, &user]).map(drop)
    }

    fn exported(&self, volume: &Value) -> Result<ExportedVolume> {
        let text = |path: &str| -> Result<String> {
            let value = volume.pointer(path).and_then(Value::as_str);
            Ok(value.with_context(|| format!("no {path} in {volume}"))?.to_owned())
        };
        let lun = volume.pointer("/iscsi/lun").and_then(Value::as_u64).context("no LUN")?;
        let unit = IscsiLun {
            portal: self.iscsi,
            target: text("/iscsi/target")?,
            lun: u32::try_from(lun).context("an odd LUN")?,
        };
        let subsystem = NvmeSubsystem {
            nqn: text("/nvme/subsystem")?,
            io_port: self.nvme.port(),
            discovery_port: self.discovery.port(),
        };
        Ok(ExportedVolume { unit, subsystem })
    }

    /// The value of a metric of this node; `name` includes its labels.
    pub(crate) fn metric(&self, name: &str) -> Result<u64> {
        let mut stream = UnixStream::connect(self.socket()).context("cannot reach the API")?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page).context("no metrics")?;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("no {name} in\n{page}"))?;
        value.trim().parse().with_context(|| format!("{name} is {value}"))
    }

    /// How many volumes are online.
    pub(crate) fn volumes_online(&self) -> Result<usize> {
        let list = self.query(&["volume", "list"])?;
        let volumes = list.pointer("/volumes").or(Some(&list)).and_then(Value::as_array);
        let volumes = volumes.with_context(|| format!("no list of volumes: {list}"))?;
        Ok(volumes
            .iter()
            .filter(|v| v.pointer("/state/kind").and_then(Value::as_str) == Some("online"))
            .count())
    }
}

/// Processor time a process has used so far, all threads included.
pub(crate) fn processor_time(process: u32) -> Result<Duration> {
    let stat = read_lossy(Path::new(&format!("/proc/{process}/stat")))?;
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    // These counters tick every 10 ms on every Linux (USER_HZ).
    Ok(Duration::from_millis(ticks * 10))
}

/// The running child processes of a process.
pub(crate) fn children(process: u32) -> Result<Vec<u32>> {
    let directory = format!("/proc/{process}/task");
    let threads = std::fs::read_dir(&directory).with_context(|| format!("no {directory}"))?;
    let mut all = Vec::new();
    for thread in threads {
        let thread = thread.with_context(|| format!("cannot read {directory}"))?.path();
        // The thread may have ended since it was listed.
        let children = std::fs::read_to_string(thread.join("children")).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(all)
}

/// Memory of a process in KiB: `VmRSS` (now) or `VmHWM` (peak).
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
    fn ports_that_are_found_in_a_row_differ() {
        let found = (0..REMEMBERED_PORTS / 2).map(|_| free_port().unwrap());
        let different: std::collections::BTreeSet<_> = found.collect();
        assert_eq!(different.len(), REMEMBERED_PORTS / 2);
    }

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
