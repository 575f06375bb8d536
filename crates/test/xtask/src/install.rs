//! Debian packages and cargo tools, installed when a step needs them. README.md lists them all.

use crate::{kernel, run_context::RunContext};
use anyhow::{Context, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// A Debian package and a file that shows it is installed.
pub(crate) struct Package {
    name: &'static str,
    probe_file: &'static str,
}

const fn package(name: &'static str, witness: &'static str) -> Package {
    Package { name, probe_file: witness }
}

/// `qemu-img` with iSCSI.
pub(crate) const QEMU_IMG: &[Package] =
    &[package("qemu-utils", "qemu-img"), package("qemu-block-extra", "qemu-img")];
/// libiscsi's suite and its load generator.
pub(crate) const LIBISCSI: &[Package] = &[package("libiscsi-bin", "iscsi-test-cu")];
/// Namespaces, taps, pinning.
pub(crate) const NETWORK: &[Package] =
    &[package("iproute2", "ip"), package("util-linux", "unshare")];
/// To cut a cluster's links.
pub(crate) const FILTER: &[Package] = &[package("nftables", "nft")];
/// etcd, for the tests of its client.
pub(crate) const ETCD: &[Package] = &[package("etcd-server", "etcd")];
/// To query and command etcd members.
pub(crate) const ETCDCTL: &[Package] = &[package("etcd-client", "etcdctl")];
/// An iSNS server and client.
pub(crate) const ISNS: &[Package] =
    &[package("open-isns-server", "isnsd"), package("open-isns-utils", "isnsadm")];
/// Other implementations of TLS with pre-shared keys.
pub(crate) const TLS: &[Package] =
    &[package("openssl", "openssl"), package("gnutls-bin", "gnutls-cli")];
/// Other NBD clients and servers.
pub(crate) const NBD: &[Package] = &[
    package("nbdkit", "nbdkit"),
    package("libnbd-bin", "nbdcopy"),
    package("qemu-utils", "qemu-nbd"),
    package("fio", "fio"),
];
/// File systems on a loop device over a volume's FUSE file; fio and qemu-img are in [`NBD`].
pub(crate) const FUSE: &[Package] = &[
    package("e2fsprogs", "mkfs.ext4"),
    package("mount", "losetup"),
    package("util-linux", "fstrim"),
    package("xfsprogs", "mkfs.xfs"),
];
/// A block device over a FUSE file.
pub(crate) const LOOP: &[Package] = &[package("fuse3", "fusermount3"), package("mount", "losetup")];
/// A different wall clock for a process.
pub(crate) const CLOCK: &[Package] = &[package("faketime", "faketime")];
/// The reference target of the benchmarks.
pub(crate) const TGT: &[Package] = &[package("tgt", "tgtd")];
/// Reference parity kernels.
pub(crate) const ISAL: &[Package] =
    &[package("libisal2", "/usr/lib/x86_64-linux-gnu/libisal.so.2")];
/// What the guests' scripts call; guests run on this machine's own files.
pub(crate) const GUEST: &[Package] = &[
    package("busybox-static", "busybox"),
    package("cpio", "cpio"),
    package("e2fsprogs", "mke2fs"),
    package("fio", "fio"),
    package("iproute2", "ip"),
    package("kmod", "modprobe"),
    package("nvme-cli", "nvme"),
    package("open-iscsi", "iscsiadm"),
    package("sg3-utils", "sg_xcopy"),
    package("udev", "udevadm"),
    package("util-linux", "unshare"),
    package("xfsprogs", "mkfs.xfs"),
];
/// Builds [`newer_debian_root`].
pub(crate) const MMDEBSTRAP: &[Package] = &[package("mmdebstrap", "mmdebstrap")];
/// SCSI commands of all kinds, in a guest.
pub(crate) const SG: &[Package] = &[package("sg3-utils", "sg_persist")];
/// Several paths to one iSCSI disk, in a guest.
pub(crate) const MULTIPATH: &[Package] = &[package("multipath-tools", "multipathd")];
/// The guest without a User Mode Linux kernel: Debian's kernel under QEMU.
pub(crate) const GUEST_QEMU: &[Package] =
    &[package(kernel::PACKAGE, "/boot/vmlinuz"), package("qemu-system-x86", "qemu-system-x86_64")];
/// What makes a bootable disk.
pub(crate) const BOOT_DISK: &[Package] = &[
    package("e2fsprogs", "mke2fs"),
    package("grub-common", "grub-mkimage"),
    package("grub-pc-bin", "/usr/lib/grub/i386-pc/boot.img"),
    package("qemu-utils", "qemu-img"),
];

const DIRECTORIES: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

fn on_debian() -> bool {
    Path::new("/etc/debian_version").exists()
}

/// Whether `program` is installed.
pub(crate) fn has_program(program: &str) -> bool {
    DIRECTORIES.iter().any(|directory| Path::new(directory).join(program).exists())
}

fn is_installed(package: &Package) -> bool {
    if !on_debian() {
        return Path::new(package.probe_file).is_absolute() || has_program(package.probe_file);
    }
    let status =
        Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package.name]).output();
    status.is_ok_and(|out| out.stdout == b"installed")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Installs the missing packages of `wanted`. A kernel is only unpacked, not installed.
pub(crate) fn packages(context: &RunContext, wanted: &[&[Package]]) -> Result<()> {
    let wanted = wanted.iter().flat_map(|group| group.iter());
    let (kernels, programs): (Vec<&Package>, Vec<&Package>) =
        wanted.partition(|p| p.name == kernel::PACKAGE);
    let mut missing: Vec<&str> =
        programs.into_iter().filter(|p| !is_installed(p)).map(|p| p.name).collect();
    missing.sort_unstable();
    missing.dedup();
    if !missing.is_empty() {
        install(context, &missing)?;
    }
    let unpacks = !kernels.is_empty() && on_debian() && kernel::find(context).is_none();
    if unpacks {
        kernel::unpack(context, || apt(context, "apt-get update", &["update"]))
    } else {
        Ok(())
    }
}

fn install(context: &RunContext, missing: &[&str]) -> Result<()> {
    let list = missing.join(" ");
    if !on_debian() {
        bail!("please install what Debian calls: {list}");
    }
    context.display.begin_step(&format!("install {list}"));
    let install: Vec<&str> =
        ["install", "--no-install-recommends"].into_iter().chain(missing.iter().copied()).collect();
    apt(context, "apt-get update", &["update"])?;
    apt(context, "apt-get install", &install)
        .with_context(|| format!("apt-get could not install {list}"))?;
    context.display.line(&format!("  installed {list}"));
    Ok(())
}

/// Runs apt-get as root.
fn apt(context: &RunContext, what: &str, arguments: &[&str]) -> Result<String> {
    if !is_root() && !has_program("sudo") {
        let words = arguments.join(" ");
        bail!("neither root nor sudo is there: run `apt-get {words}` as root, then this again");
    }
    let mut command = Command::new(if is_root() { "env" } else { "sudo" });
    if !is_root() {
        command.arg("env");
    }
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]).args(arguments);
    context.run(what, &mut command, Duration::from_secs(900))?.success_output()
}

/// The root of a newer Debian, with what this one lacks: the kernel's TLS handshake daemon and an
/// nvme-cli that supports TLS keys. Built while the network is available and kept with the build.
pub(crate) fn newer_debian_root(context: &RunContext) -> Result<PathBuf> {
    let root = context.target.join("newer-debian");
    if root.join("usr/sbin/tlshd").exists() {
        return Ok(root);
    }
    context.display.begin_step("unpack tools of a newer Debian");
    let unfinished = root.with_extension("new");
    let _ = std::fs::remove_dir_all(&unfinished);
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=extract", "--include=ktls-utils,nvme-cli,keyutils,bash,coreutils"]);
    command.arg("trixie").arg(&unfinished).arg("http://deb.debian.org/debian");
    context.run("mmdebstrap", &mut command, Duration::from_secs(300))?.success_output()?;
    std::fs::rename(&unfinished, &root).context("cannot rename the root of a newer Debian")?;
    context.display.line("  unpacked tools of Debian trixie");
    Ok(root)
}

/// Builds and installs a tool from crates.io with its own lock file, if missing.
pub(crate) fn cargo_tool(context: &RunContext, subcommand: &str, version: &str) -> Result<()> {
    let present = context
        .cargo()
        .args([subcommand, "--version"])
        .output()
        .is_ok_and(|out| out.status.success());
    if present {
        return Ok(());
    }
    let name = format!("cargo-{subcommand}");
    context.display.begin_step(&format!("install {name}"));
    let mut command = context.cargo();
    command.args(["install", "--locked", &name, "--version", version]);
    // These tools run for seconds: fast builds matter more than fast code.
    command.envs([
        ("CARGO_PROFILE_RELEASE_LTO", "off"),
        ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"),
        ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
        ("CARGO_PROFILE_RELEASE_DEBUG", "false"),
    ]);
    context.build(&format!("cargo install {name}"), &mut command)?.success_output()?;
    context.display.line(&format!("  installed {name} {version}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bench, demo, guest, tier};

    #[test]
    fn the_readme_names_every_package_that_is_installed_and_no_kernel_among_them() {
        let readme = include_str!("../../../../README.md");
        let tiers = tier::TIERS.iter().flat_map(tier::Tier::packages);
        let more = [demo::packages(), guest::packages(), tier::peer_packages(), bench::packages()];
        let wanted = tiers.chain(more.into_iter().flatten()).chain([GUEST_QEMU]);
        let all: Vec<&str> = wanted.flat_map(|group| group.iter().map(|p| p.name)).collect();
        assert!(all.contains(&"etcd-server") && all.contains(&"libisal2"));
        // Those of the script `run` itself.
        let all = all.into_iter().chain(["gcc", "libc6-dev", "ca-certificates"]);
        for name in all.filter(|name| *name != kernel::PACKAGE) {
            let named = [" ", ",", "\n", ";", "."].iter().any(|end| {
                [" ", "\n"].iter().any(|begin| readme.contains(&format!("{begin}{name}{end}")))
            });
            assert!(named, "README.md does not name {name}");
        }
        assert!(readme.contains("linux-image-amd64"), "and what is unpacked");
    }
}
