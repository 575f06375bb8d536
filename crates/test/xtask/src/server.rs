//! What initiators connect to: the product, or Debian's tgt as a stand-in or reference.

use crate::{process::Daemon, run_context::RunContext};
use anyhow::{Context, Result, bail};
use std::{
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// How long a server may take until it accepts connections.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A logical unit as an iSCSI initiator addresses it.
#[derive(Clone, Debug)]
pub(crate) struct IscsiLun {
    pub(crate) portal: SocketAddr,
    pub(crate) target: String,
    pub(crate) lun: u32,
}

impl IscsiLun {
    /// As libiscsi writes it.
    pub(crate) fn url(&self) -> String {
        format!("iscsi://{}/{}/{}", self.portal, self.target, self.lun)
    }

    /// As libiscsi writes it, with a user and a secret.
    pub(crate) fn url_as(&self, user: &str, secret: &str) -> String {
        format!("iscsi://{user}%{secret}@{}/{}/{}", self.portal, self.target, self.lun)
    }

    /// As QEMU's tools need it: colons of the target name escaped.
    pub(crate) fn qemu_url(&self) -> String {
        format!("iscsi://{}/{}/{}", self.portal, self.target.replace(':', "%3a"), self.lun)
    }
}

/// A subsystem as an NVMe/TCP host addresses it.
#[derive(Clone, Debug)]
pub(crate) struct NvmeSubsystem {
    pub(crate) nqn: String,
    pub(crate) io_port: u16,
    pub(crate) discovery_port: u16,
}

/// Debian's tgt in the foreground, separate from any tgt the machine runs itself.
pub(crate) struct Tgt {
    daemon: Daemon,
    socket: PathBuf,
    portal: SocketAddr,
    targets: u32,
}

/// tgt's control port: names its control socket.
const CONTROL: &str = "88";

impl Tgt {
    /// Starts tgt on `portal`; `prefix` goes before the command (for example to pin it).
    pub(crate) fn start(context: &RunContext, portal: SocketAddr, prefix: &[&str]) -> Result<Self> {
        let socket = context.directory(&format!("tgt-{}", portal.port()))?.join("control");
        let mut words = prefix.to_vec();
        words.push("tgtd");
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .args(["-f", "-C", CONTROL, "--iscsi"])
            .arg(format!("portal={portal}"));
        command.env("TGT_IPC_SOCKET", &socket);
        let mut daemon = Daemon::start(context.scratch(), "tgtd", &mut command)?;
        daemon.wait_until(START_LIMIT, || TcpStream::connect(portal).is_ok())?;
        Ok(Self { daemon, socket, portal, targets: 0 })
    }

    /// Exports `disk` to every initiator; with `direct`, past the page cache.
    pub(crate) fn export(&mut self, disk: &Path, direct: bool) -> Result<IscsiLun> {
        self.targets += 1;
        let id = self.targets.to_string();
        let target = format!("iqn.2026-01.test:t{id}");
        let disk = disk.to_str().context("a path tgt can take")?;
        self.admin(&["--op", "new", "--mode", "target", "--tid", &id, "-T", &target])?;
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", &id, "--lun", "1", "-b", disk];
        let flags: &[&str] = if direct { &["--bsoflags", "direct"] } else { &[] };
        self.admin(&[&unit[..], flags].concat())?;
        let thin = ["--op", "update", "--mode", "logicalunit", "--tid", &id, "--lun", "1"];
        self.admin(&[&thin[..], &["--params", "thin_provisioning=1"]].concat())?;
        for digest in ["HeaderDigest", "DataDigest"] {
            let update = ["--op", "update", "--mode", "target", "--tid", &id, "--name", digest];
            self.admin(&[&update[..], &["--value", "CRC32C,None"]].concat())?;
        }
        self.admin(&["--op", "bind", "--mode", "target", "--tid", &id, "-I", "ALL"])?;
        Ok(IscsiLun { portal: self.portal, target, lun: 1 })
    }

    pub(crate) fn process(&self) -> u32 {
        self.daemon.id()
    }

    fn admin(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("tgtadm");
        command
            .args(["-C", CONTROL, "--lld", "iscsi"])
            .args(arguments)
            .env("TGT_IPC_SOCKET", &self.socket);
        let out = command.output().context("cannot run tgtadm")?;
        if !out.status.success() {
            bail!(
                "tgtadm {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&out.stderr).trim()
            );
        }
        Ok(())
    }
}
