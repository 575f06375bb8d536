//! Linux guests with real kernel initiators. A guest has no disk image: it runs on this machine's
//! files, read-only below a RAM overlay, so every program installed here is available.
//!
//! Two kernels are supported: a User Mode Linux binary named by `WINDROSE_UML` (near native speed),
//! or Debian's kernel under QEMU without hardware virtualisation (works everywhere, about twenty
//! times slower).

use crate::{
    install, kernel,
    namespace::{self, ip},
    process,
    run_context::RunContext,
    test_report::skip,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Names a User Mode Linux kernel with iSCSI and NVMe/TCP built in.
const UML_ENV: &str = "WINDROSE_UML";
const TAP_DEVICE: &str = "tap0";

/// The name of every guest's iSCSI initiator.
pub(crate) const INITIATOR: &str = "iqn.2026-01.test:guest";
/// The name of every guest's NVMe host.
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:8f5b4a52-5d1c-4f6e-9a53-0c7d7c6f2a11";
const HOST_ID: &str = "8f5b4a52-5d1c-4f6e-9a53-0c7d7c6f2a11";

/// The NVMe host identity of a guest.
pub(crate) fn nvme_host() -> [(&'static str, String); 2] {
    [("HOSTNQN", HOST_NQN.to_owned()), ("HOSTID", HOST_ID.to_owned())]
}

/// The kernel of a guest.
#[derive(Clone)]
pub(crate) enum GuestKernel {
    UserMode(PathBuf),
    Qemu {
        image: PathBuf,
        initramfs: PathBuf,
        disk: Option<Disk>,
    },
    /// The firmware of QEMU's machine boots whatever it finds on a disk.
    BootDisk(Disk),
}

/// A vhost-user-blk disk.
#[derive(Clone)]
pub(crate) struct Disk {
    socket: PathBuf,
    queues: u16,
}

impl GuestKernel {
    /// Chooses the fastest kernel available; installs what it needs.
    pub(crate) fn choose(context: &RunContext) -> Result<Self> {
        match std::env::var_os(UML_ENV).filter(|_| namespace::is_inside()) {
            Some(path) => {
                let path = PathBuf::from(path);
                ensure!(path.exists(), "{UML_ENV} names {}, which is not there", path.display());
                Ok(Self::UserMode(path))
            }
            None => Self::qemu(context),
        }
    }

    /// Chooses Debian's kernel under QEMU.
    pub(crate) fn qemu(context: &RunContext) -> Result<Self> {
        let (image, initramfs) = debian_kernel(context, "host")?;
        Ok(Self::Qemu { image, initramfs, disk: None })
    }

    /// Boots from the vhost-user-blk disk at `socket`: one made by [`boot_disk`].
    pub(crate) fn of_disk(socket: &Path, queues: u16) -> Self {
        Self::BootDisk(Disk { socket: socket.to_owned(), queues })
    }

    /// Adds the vhost-user-blk disk at `socket`. User Mode Linux does not support this.
    pub(crate) fn with_disk(self, socket: &Path, queues: u16) -> Self {
        match self {
            Self::Qemu { image, initramfs, .. } => {
                let disk = Some(Disk { socket: socket.to_owned(), queues });
                Self::Qemu { image, initramfs, disk }
            }
            other => other,
        }
    }

    /// Whether QEMU emulates its processor.
    pub(crate) fn is_emulated(&self) -> bool {
        !matches!(self, Self::UserMode(_))
    }

    /// How many parts a tier divides the work of its guests into, when a sample is run: on emulated
    /// processors it takes several times as long.
    pub(crate) fn sample_parts(&self) -> usize {
        if self.is_emulated() { 4 } else { 2 }
    }

    /// Whether its NVMe host supports authentication and TLS: Debian 12's kernel supports neither.
    pub(crate) fn has_secure_nvme(&self) -> bool {
        !self.is_emulated()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::UserMode(_) => "User Mode Linux",
            Self::Qemu { .. } => "Debian's kernel under QEMU",
            Self::BootDisk(_) => "a disk under QEMU",
        }
    }

    /// How much longer than on the real processor things may take.
    fn slowdown_factor(&self) -> u32 {
        match self {
            Self::UserMode(_) => 1,
            Self::Qemu { .. } | Self::BootDisk(_) => 8,
        }
    }

    fn command(&self, setup: &GuestSetup, options: &[&str]) -> Command {
        match self {
            Self::UserMode(kernel) => user_mode(kernel, setup, options),
            Self::Qemu { image, initramfs, disk } => {
                let mut command = qemu(setup);
                boot_from_host(&mut command, (image, initramfs), setup, options);
                if let Some(disk) = disk {
                    attach_disk(&mut command, setup, disk);
                }
                command
            }
            Self::BootDisk(disk) => {
                let mut command = qemu(setup);
                attach_disk(&mut command, setup, disk);
                command
            }
        }
    }
}

/// The packages [`GuestKernel::choose`] needs.
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    let mut packages = vec![install::GUEST];
    if std::env::var_os(UML_ENV).is_none() {
        packages.push(install::GUEST_QEMU);
    }
    packages
}

/// Debian's kernel and its initramfs (`mkinitramfs`). The guest's root is the host's, or on a disk.
fn debian_kernel(context: &RunContext, home: &str) -> Result<(PathBuf, PathBuf)> {
    let Some(kernel) = kernel::find(context) else {
        return skip("no kernel with its modules in /boot and /lib/modules");
    };
    let initramfs = context.scratch().join(format!("initramfs-{home}.gz"));
    let mut command = Command::new(context.root.join("tests/guest/mkinitramfs"));
    command.arg(&initramfs).arg(&kernel.version).arg(home).arg(&kernel.root);
    context.run("mkinitramfs", &mut command, Duration::from_secs(60))?.success_output()?;
    Ok((kernel.image, initramfs))
}

/// Makes a disk image of `mib` MiB from which QEMU's machine boots.
pub(crate) fn boot_disk(context: &RunContext, mib: u32) -> Result<PathBuf> {
    let (image, initramfs) = debian_kernel(context, "disk")?;
    let disk = context.scratch().join("boot-disk");
    let mut command = Command::new(context.root.join("tests/guest/mkbootdisk"));
    command.arg(&disk).arg(mib.to_string()).arg(image).arg(initramfs);
    context.run("mkbootdisk", &mut command, Duration::from_secs(120))?.success_output()?;
    Ok(disk)
}

/// The address under which a guest reaches this machine.
pub(crate) fn host_address() -> IpAddr {
    let address = if namespace::is_inside() {
        Ipv4Addr::new(10, 99, 0, 1)
    } else {
        Ipv4Addr::new(10, 0, 2, 2)
    };
    IpAddr::V4(address)
}

/// The address of a local listener as the guest sees it: behind QEMU's user network, this machine's
/// loopback has another address.
pub(crate) fn address_from_guest(address: SocketAddr) -> SocketAddr {
    if address.ip().is_loopback() {
        return SocketAddr::new(host_address(), address.port());
    }
    address
}

/// The resources of a guest: memory, share, network.
struct GuestSetup {
    memory_mib: u32,
    share: PathBuf,
    /// Whether it uses a tap in the namespace; otherwise QEMU's user network.
    tap: bool,
}

fn user_mode(kernel: &Path, setup: &GuestSetup, options: &[&str]) -> Command {
    let share = setup.share.display();
    let mut command = Command::new(kernel);
    command.args([
        &format!("mem={}M", setup.memory_mib),
        &format!("uml_dir={share}/"),
        "umid=guest",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "quiet",
        "con=null",
        "con0=null,fd:1",
        "ssl=null",
        "scsi_debug.add_host=0",
        "null_blk.nr_devices=0",
        &format!("vec0:transport=tap,ifname={TAP_DEVICE},depth=128,gro=1"),
        &format!("init={share}/init"),
        &format!("windrose.share={share}"),
    ]);
    command.args(options);
    command
}

/// The QEMU command with the options all guests share.
fn qemu(setup: &GuestSetup) -> Command {
    let share = setup.share.display();
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-M", "pc"]);
    command.args(["-m", &setup.memory_mib.to_string()]);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.args(["-serial", "stdio", "-monitor", "none", "-device", "virtio-rng-pci"]);
    command.arg("-fsdev").arg(format!("local,id=share,path={share},security_model=none"));
    command.args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
    if setup.tap {
        command
            .args(["-netdev", &format!("tap,id=net,ifname={TAP_DEVICE},script=no,downscript=no")]);
        command.args(["-device", "virtio-net-pci,netdev=net"]);
    } else {
        command.args(["-nic", "user,model=virtio-net-pci"]);
    }
    command
}

/// Boots a kernel with this machine's own files as the root.
fn boot_from_host(
    command: &mut Command,
    (image, initramfs): (&Path, &Path),
    setup: &GuestSetup,
    options: &[&str],
) {
    command.arg("-kernel").arg(image).arg("-initrd").arg(initramfs);
    command.arg("-append").arg(format!(
        "console=ttyS0 quiet no_timer_check panic=-1 mitigations=off nokaslr tsc=reliable audit=0 apparmor=0 \
         windrose.share={} {}",
        setup.share.display(),
        options.join(" ")
    ));
    command
        .args(["-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"]);
    command.args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
}

/// Gives a guest its memory and a disk, which shares that memory. QEMU reconnects a lost disk.
fn attach_disk(command: &mut Command, setup: &GuestSetup, disk: &Disk) {
    let memory = format!("memory-backend-memfd,id=ram,size={}M,share=on", setup.memory_mib);
    command.args(["-object", &memory, "-machine", "memory-backend=ram"]);
    let socket = format!("socket,id=disk,path={},reconnect=1", disk.socket.display());
    command.args(["-chardev", &socket]);
    let device = format!("vhost-user-blk-pci,chardev=disk,num-queues={},bootindex=1", disk.queues);
    command.args(["-device", &device]);
}

/// What a guest runs.
pub(crate) struct GuestJob<'a> {
    /// A script in `tests/guest`.
    pub(crate) script: &'a str,
    /// The script's environment.
    pub(crate) variables: Vec<(&'a str, String)>,
    /// Files in the guest's share.
    pub(crate) files: Vec<(&'a str, &'a Path)>,
    /// Extra kernel options.
    pub(crate) kernel_options: &'a [&'a str],
    pub(crate) memory_mib: u32,
    /// On the real processor; an emulated one gets more.
    pub(crate) limit: Duration,
}

/// Boots a guest, runs the script and records every check of its report. True if the guest finished
/// and no check failed.
pub(crate) fn run(
    context: &RunContext,
    kernel: &GuestKernel,
    order: &GuestJob<'_>,
) -> Result<bool> {
    run_beside(context, kernel, order, |_| Ok(())).map(|(clean, ())| clean)
}

/// Signals between a running guest and the code that runs beside it.
pub(crate) struct GuestSignals<'a> {
    share: &'a Path,
    over: &'a AtomicBool,
}

impl GuestSignals<'_> {
    /// Waits until the guest creates this file in its share; fails if the guest ends first.
    pub(crate) fn wait_for(&self, name: &str) -> Result<()> {
        while !self.has_signalled(name) {
            ensure!(!self.has_ended(), "the guest ended before it was {name}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Whether the guest has created this file in its share.
    pub(crate) fn has_signalled(&self, name: &str) -> bool {
        self.share.join(name).exists()
    }

    /// Whether the guest has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Creates this file in the guest's share, as a signal.
    pub(crate) fn send(&self, name: &str) -> Result<()> {
        self.send_text(name, "")
    }

    /// Atomically creates this file with `text` in the guest's share.
    pub(crate) fn send_text(&self, name: &str, text: &str) -> Result<()> {
        let at = self.share.join(name);
        let half = at.with_extension("half");
        std::fs::write(&half, text)
            .and_then(|()| std::fs::rename(&half, &at))
            .with_context(|| format!("cannot tell {name}"))
    }
}

/// Like [`run`], with `beside` running at the same time.
pub(crate) fn run_beside<T: Send>(
    context: &RunContext,
    kernel: &GuestKernel,
    order: &GuestJob<'_>,
    beside: impl FnOnce(&GuestSignals<'_>) -> Result<T> + Send,
) -> Result<(bool, T)> {
    let tap = namespace::is_inside();
    let share = prepare_share(context, order, tap)?;
    let setup = GuestSetup { memory_mib: order.memory_mib, share, tap };
    if tap {
        ip(&["tuntap", "add", "dev", TAP_DEVICE, "mode", "tap"])?;
    }
    let over = AtomicBool::new(false);
    let signs = GuestSignals { share: &setup.share, over: &over };
    let (outcome, beside) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| beside(&signs));
        let outcome = attach(tap).and_then(|()| {
            let limit = order.limit * kernel.slowdown_factor();
            context.run(order.script, &mut kernel.command(&setup, order.kernel_options), limit)
        });
        over.store(true, Ordering::Relaxed);
        let beside =
            beside.join().unwrap_or_else(|_| bail!("what went on beside the guest panicked"));
        (outcome, beside)
    });
    if tap {
        ip(&["link", "delete", TAP_DEVICE])?;
    }
    let clean = record_guest_report(context, &setup.share)?;
    let console = outcome?.output;
    let status = std::fs::read_to_string(setup.share.join("status")).unwrap_or_default();
    ensure!(!status.is_empty(), "the guest ended early\n{}", process::tail(&console));
    ensure!(!clean || status.trim() == "0", "{} ended with {}", order.script, status.trim());
    Ok((clean, beside?))
}

fn attach(tap: bool) -> Result<()> {
    if tap {
        ip(&["address", "add", &format!("{}/24", host_address()), "dev", TAP_DEVICE])?;
        ip(&["link", "set", TAP_DEVICE, "txqueuelen", "10000", "up"])?;
    }
    Ok(())
}

/// Prepares the guest's share: init, scripts, job, files.
fn prepare_share(context: &RunContext, order: &GuestJob<'_>, tap: bool) -> Result<PathBuf> {
    let share = context.directory("guest")?;
    let copy = |from: &Path, name: &str| -> Result<()> {
        let to = share.join(name);
        std::fs::copy(from, &to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        Ok(())
    };
    let scripts = context.root.join("tests/guest");
    for name in ["init", "lib.sh", order.script] {
        copy(&scripts.join(name), name)?;
    }
    for (name, from) in &order.files {
        copy(from, name)?;
    }
    let (address, gateway) =
        if tap { ("10.99.0.2", "10.99.0.1") } else { ("10.0.2.15", "10.0.2.2") };
    let mut text = String::new();
    let fixed =
        [("GUEST_SCRIPT", order.script), ("GUEST_ADDRESS", address), ("GUEST_GATEWAY", gateway)];
    let fixed = fixed.into_iter().map(|(name, value)| {
        (name, if name == "GUEST_ADDRESS" { format!("{value}/24") } else { value.to_owned() })
    });
    let modules = ("GUEST_KERNEL", kernel::unpacked(context).display().to_string());
    for (name, value) in fixed.chain([modules]).chain(order.variables.iter().cloned()) {
        writeln!(text, "export {name}='{}'", value.replace('\'', r"'\''"))
            .context("cannot write")?;
    }
    std::fs::write(share.join("order"), text).context("cannot write the guest's order")?;
    Ok(share)
}

/// Records the lines of a guest's report; true if no check failed.
fn record_guest_report(context: &RunContext, share: &Path) -> Result<bool> {
    let report = std::fs::read_to_string(share.join("report")).unwrap_or_default();
    let mut clean = true;
    for line in report.lines() {
        match line.split('\t').collect::<Vec<_>>()[..] {
            ["ok", name, seconds] => {
                context.record_time(name, seconds.parse().unwrap_or(0.0));
                context.pass(1, &format!("{name}  {seconds} s"));
            }
            ["note", text] => context.display.line(&format!("        {text}")),
            ["failed", name, log] => {
                clean = false;
                context.fail(name, &process::read_lossy(&share.join(log))?);
            }
            _ => {
                clean = false;
                context.fail("a guest's report", line);
            }
        }
    }
    Ok(clean && !report.is_empty())
}
