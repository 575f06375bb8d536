//! Linux guests with real kernel initiators. A guest has no image: it runs on this machine's own files, seen read-only
//! below a RAM overlay, so that every program installed here is there too.
//!
//! Two kernels are known: a User Mode Linux binary named by `WINDROSE_UML` (near native speed), else Debian's kernel under
//! QEMU without hardware virtualisation (works everywhere, processor about twenty times slower).

use crate::{
    house::House,
    install, kernel,
    ledger::skip,
    namespace::{self, ip},
    process,
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
const UML: &str = "WINDROSE_UML";
const TAP: &str = "tap0";

/// What a guest runs on.
#[derive(Clone)]
pub(crate) enum Kernel {
    UserMode(PathBuf),
    Qemu {
        image: PathBuf,
        initramfs: PathBuf,
        disk: Option<Disk>,
    },
    /// Whatever the firmware of QEMU's machine finds on a disk.
    OfDisk(Disk),
}

/// A disk at a socket.
#[derive(Clone)]
pub(crate) struct Disk {
    socket: PathBuf,
    queues: u16,
}

impl Kernel {
    /// The fastest one there is; installs what it needs.
    pub(crate) fn choose(house: &House) -> Result<Self> {
        match std::env::var_os(UML).filter(|_| namespace::inside()) {
            Some(path) => {
                let path = PathBuf::from(path);
                ensure!(path.exists(), "{UML} names {}, which is not there", path.display());
                Ok(Self::UserMode(path))
            }
            None => Self::qemu(house),
        }
    }

    /// Debian's kernel under QEMU.
    pub(crate) fn qemu(house: &House) -> Result<Self> {
        let (image, initramfs) = debian(house, "host")?;
        Ok(Self::Qemu { image, initramfs, disk: None })
    }

    /// What is on a disk that is lent at a socket: one of [`boot_disk`]'s.
    pub(crate) fn of_disk(socket: &Path, queues: u16) -> Self {
        Self::OfDisk(Disk { socket: socket.to_owned(), queues })
    }

    /// The same, with a disk that is lent to it at a socket (vhost-user-blk). User Mode Linux takes none.
    pub(crate) fn with_disk(self, socket: &Path, queues: u16) -> Self {
        match self {
            Self::Qemu { image, initramfs, .. } => {
                let disk = Some(Disk { socket: socket.to_owned(), queues });
                Self::Qemu { image, initramfs, disk }
            }
            other => other,
        }
    }

    /// Whether its NVMe host proves who it is, and comes by TLS: Debian 12's kernel can do neither.
    pub(crate) fn has_secure_nvme(&self) -> bool {
        matches!(self, Self::UserMode(_))
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::UserMode(_) => "User Mode Linux",
            Self::Qemu { .. } => "Debian's kernel under QEMU",
            Self::OfDisk(_) => "a disk under QEMU",
        }
    }

    /// How much longer than on the processor itself things may take.
    fn patience(&self) -> u32 {
        match self {
            Self::UserMode(_) => 1,
            Self::Qemu { .. } | Self::OfDisk(_) => 4,
        }
    }

    fn command(&self, seat: &Seat, options: &[&str]) -> Command {
        match self {
            Self::UserMode(kernel) => user_mode(kernel, seat, options),
            Self::Qemu { image, initramfs, disk } => {
                let mut command = qemu(seat);
                of_host(&mut command, (image, initramfs), seat, options);
                if let Some(disk) = disk {
                    lend(&mut command, seat, disk);
                }
                command
            }
            Self::OfDisk(disk) => {
                let mut command = qemu(seat);
                lend(&mut command, seat, disk);
                command
            }
        }
    }
}

/// What has to be installed before [`Kernel::choose`] can succeed.
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    let mut packages = vec![install::GUEST];
    if std::env::var_os(UML).is_none() {
        packages.push(install::GUEST_QEMU);
    }
    packages
}

/// Debian's kernel, and the files that it needs until it has its root, which is the host's or on a disk (`mkinitramfs`).
fn debian(house: &House, home: &str) -> Result<(PathBuf, PathBuf)> {
    let Some(kernel) = kernel::find(house) else {
        return skip("no kernel with its modules in /boot and /lib/modules");
    };
    let initramfs = house.scratch().join(format!("initramfs-{home}.gz"));
    let mut command = Command::new(house.root.join("tests/guest/mkinitramfs"));
    command.arg(&initramfs).arg(&kernel.version).arg(home).arg(&kernel.root);
    house.run("mkinitramfs", &mut command, Duration::from_secs(60))?.ok()?;
    Ok((kernel.image, initramfs))
}

/// Makes a disk of so many MiB, as a file, from which QEMU's machine boots.
pub(crate) fn boot_disk(house: &House, mib: u32) -> Result<PathBuf> {
    let (image, initramfs) = debian(house, "disk")?;
    let disk = house.scratch().join("boot-disk");
    let mut command = Command::new(house.root.join("tests/guest/mkbootdisk"));
    command.arg(&disk).arg(mib.to_string()).arg(image).arg(initramfs);
    house.run("mkbootdisk", &mut command, Duration::from_secs(120))?.ok()?;
    Ok(disk)
}

/// The address under which a guest reaches this machine.
pub(crate) fn host_address() -> IpAddr {
    let address =
        if namespace::inside() { Ipv4Addr::new(10, 99, 0, 1) } else { Ipv4Addr::new(10, 0, 2, 2) };
    IpAddr::V4(address)
}

/// Where a guest finds what listens at `address`: behind QEMU's user network this machine's loopback has another one.
pub(crate) fn reaches(address: SocketAddr) -> SocketAddr {
    if address.ip().is_loopback() {
        return SocketAddr::new(host_address(), address.port());
    }
    address
}

/// A guest's place: memory, share, network.
struct Seat {
    memory_mib: u32,
    share: PathBuf,
    /// A tap in the namespace, else QEMU's user network.
    tap: bool,
}

fn user_mode(kernel: &Path, seat: &Seat, options: &[&str]) -> Command {
    let share = seat.share.display();
    let mut command = Command::new(kernel);
    command.args([
        &format!("mem={}M", seat.memory_mib),
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
        &format!("vec0:transport=tap,ifname={TAP},depth=128,gro=1"),
        &format!("init={share}/init"),
        &format!("windrose.share={share}"),
    ]);
    command.args(options);
    command
}

/// QEMU's machine, with what every guest of it has.
fn qemu(seat: &Seat) -> Command {
    let share = seat.share.display();
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-M", "pc"]);
    command.args(["-m", &seat.memory_mib.to_string()]);
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.args(["-serial", "stdio", "-monitor", "none", "-device", "virtio-rng-pci"]);
    command.arg("-fsdev").arg(format!("local,id=share,path={share},security_model=none"));
    command.args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
    if seat.tap {
        command.args(["-netdev", &format!("tap,id=net,ifname={TAP},script=no,downscript=no")]);
        command.args(["-device", "virtio-net-pci,netdev=net"]);
    } else {
        command.args(["-nic", "user,model=virtio-net-pci"]);
    }
    command
}

/// A kernel from this machine's own files, which are the guest's root.
fn of_host(
    command: &mut Command,
    (image, initramfs): (&Path, &Path),
    seat: &Seat,
    options: &[&str],
) {
    command.arg("-kernel").arg(image).arg("-initrd").arg(initramfs);
    command.arg("-append").arg(format!(
        "console=ttyS0 quiet no_timer_check panic=-1 mitigations=off nokaslr tsc=reliable audit=0 apparmor=0 \
         windrose.share={} {}",
        seat.share.display(),
        options.join(" ")
    ));
    command
        .args(["-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"]);
    command.args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
}

/// Gives a guest its memory, and a disk, which has to share it. A disk that is gone is connected again.
fn lend(command: &mut Command, seat: &Seat, disk: &Disk) {
    let memory = format!("memory-backend-memfd,id=ram,size={}M,share=on", seat.memory_mib);
    command.args(["-object", &memory, "-machine", "memory-backend=ram"]);
    let socket = format!("socket,id=disk,path={},reconnect=1", disk.socket.display());
    command.args(["-chardev", &socket]);
    let device = format!("vhost-user-blk-pci,chardev=disk,num-queues={},bootindex=1", disk.queues);
    command.args(["-device", &device]);
}

/// What a guest is to do.
pub(crate) struct Order<'a> {
    /// A script in `tests/guest`.
    pub(crate) script: &'a str,
    /// What the script finds in its environment.
    pub(crate) variables: Vec<(&'a str, String)>,
    /// Files the guest finds in its share.
    pub(crate) files: Vec<(&'a str, &'a Path)>,
    /// Options of the kernel, besides its own.
    pub(crate) kernel: &'a [&'a str],
    pub(crate) memory_mib: u32,
    /// On the processor itself; an emulated one gets more.
    pub(crate) limit: Duration,
}

/// Boots a guest, runs the script, enters every check of its report. True when the guest came to its end and nothing failed.
pub(crate) fn run(house: &House, kernel: &Kernel, order: &Order<'_>) -> Result<bool> {
    run_beside(house, kernel, order, |_| Ok(())).map(|(clean, ())| clean)
}

/// What a running guest has to say to whoever works beside it.
pub(crate) struct Signs<'a> {
    share: &'a Path,
    over: &'a AtomicBool,
}

impl Signs<'_> {
    /// Waits until the guest has made a file of that name in its share; an error when it ends without.
    pub(crate) fn wait_for(&self, name: &str) -> Result<()> {
        while !self.has_come(name) {
            ensure!(!self.is_over(), "the guest ended before it was {name}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Whether the guest has made a file of that name in its share.
    pub(crate) fn has_come(&self, name: &str) -> bool {
        self.share.join(name).exists()
    }

    /// Whether the guest has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Makes a file of that name in the guest's share, for the guest to see.
    pub(crate) fn tell(&self, name: &str) -> Result<()> {
        self.tell_that(name, "")
    }

    /// Makes a file of that name and text in the guest's share; it is whole when it appears.
    pub(crate) fn tell_that(&self, name: &str, text: &str) -> Result<()> {
        let at = self.share.join(name);
        let half = at.with_extension("half");
        std::fs::write(&half, text)
            .and_then(|()| std::fs::rename(&half, &at))
            .with_context(|| format!("cannot tell {name}"))
    }
}

/// The same, while `beside` does something else.
pub(crate) fn run_beside<T: Send>(
    house: &House,
    kernel: &Kernel,
    order: &Order<'_>,
    beside: impl FnOnce(&Signs<'_>) -> Result<T> + Send,
) -> Result<(bool, T)> {
    let tap = namespace::inside();
    let share = furnish(house, order, tap)?;
    let seat = Seat { memory_mib: order.memory_mib, share, tap };
    if tap {
        ip(&["tuntap", "add", "dev", TAP, "mode", "tap"])?;
    }
    let over = AtomicBool::new(false);
    let signs = Signs { share: &seat.share, over: &over };
    let (outcome, beside) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| beside(&signs));
        let outcome = attach(tap).and_then(|()| {
            let limit = order.limit * kernel.patience();
            house.run(order.script, &mut kernel.command(&seat, order.kernel), limit)
        });
        over.store(true, Ordering::Relaxed);
        let beside =
            beside.join().unwrap_or_else(|_| bail!("what went on beside the guest panicked"));
        (outcome, beside)
    });
    if tap {
        ip(&["link", "delete", TAP])?;
    }
    let clean = enter_report(house, &seat.share)?;
    let console = outcome?.output;
    let status = std::fs::read_to_string(seat.share.join("status")).unwrap_or_default();
    ensure!(!status.is_empty(), "the guest ended early\n{}", process::tail(&console));
    ensure!(!clean || status.trim() == "0", "{} ended with {}", order.script, status.trim());
    Ok((clean, beside?))
}

fn attach(tap: bool) -> Result<()> {
    if tap {
        ip(&["address", "add", &format!("{}/24", host_address()), "dev", TAP])?;
        ip(&["link", "set", TAP, "txqueuelen", "10000", "up"])?;
    }
    Ok(())
}

/// The guest's share: init, scripts, order, files.
fn furnish(house: &House, order: &Order<'_>, tap: bool) -> Result<PathBuf> {
    let share = house.directory("guest")?;
    let copy = |from: &Path, name: &str| -> Result<()> {
        let to = share.join(name);
        std::fs::copy(from, &to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        Ok(())
    };
    let scripts = house.root.join("tests/guest");
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
    let modules = ("GUEST_KERNEL", kernel::unpacked(house).display().to_string());
    for (name, value) in fixed.chain([modules]).chain(order.variables.iter().cloned()) {
        writeln!(text, "export {name}='{}'", value.replace('\'', r"'\''"))
            .context("cannot write")?;
    }
    std::fs::write(share.join("order"), text).context("cannot write the guest's order")?;
    Ok(share)
}

/// Enters the lines of a guest's report; true if none of them failed.
fn enter_report(house: &House, share: &Path) -> Result<bool> {
    let report = std::fs::read_to_string(share.join("report")).unwrap_or_default();
    let mut clean = true;
    for line in report.lines() {
        match line.split('\t').collect::<Vec<_>>()[..] {
            ["ok", name, seconds] => house.pass(1, &format!("{name}  {seconds} s")),
            ["note", text] => house.display.line(&format!("        {text}")),
            ["failed", name, log] => {
                clean = false;
                house.fail(name, &process::read_lossy(&share.join(log))?);
            }
            _ => {
                clean = false;
                house.fail("a guest's report", line);
            }
        }
    }
    Ok(clean && !report.is_empty())
}
