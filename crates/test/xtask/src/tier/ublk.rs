//! A volume as a block device of a machine: `windrose attach --ublk` in a guest, over the network,
//! from a node here.

use crate::{
    guest::{self, GuestJob, GuestKernel, GuestSignals},
    node::{Node, NodeOptions},
    run_context::RunContext,
};
use anyhow::{Context, Result};
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

const VOLUME: &str = "web";
/// XFS needs 300.
const MEGABYTES: u64 = 512;
/// How often the process is killed under load.
const PROCESS_KILLS: usize = 2;
const LIMIT: Duration = Duration::from_secs(240);
/// How long the node is frozen before a kill, and after it.
const FREEZE_TIME: Duration = Duration::from_millis(500);
const CERTIFICATE: &str = "api.pem";
const KEY: &str = "api.key";
const TOKEN: &str = "token";
const PORT: u16 = 4242;

pub(super) fn run(context: &RunContext) -> Result<()> {
    let kernel = match GuestKernel::choose(context)? {
        kernel @ GuestKernel::UserMode(_) => kernel,
        // Debian's kernel is too old for the driver (needs Linux 6.5).
        GuestKernel::Qemu { .. } | GuestKernel::BootDisk(_) => {
            context.skip("a block device of a machine (ublk)", "it wants a guest by WINDROSE_UML");
            return Ok(());
        }
    };
    let directory = context.directory("ublk")?;
    credentials(context, &directory)?;
    let at = |name: &str| directory.join(name);
    // These lines belong to the section `api`, the last one of the configuration.
    let more = format!(
        "tcp = \"0.0.0.0:{PORT}\"\ntls_cert = \"{}\"\ntls_key = \"{}\"\ntoken_file = \"{}\"\n",
        at(CERTIFICATE).display(),
        at(KEY).display(),
        at(TOKEN).display()
    );
    let wishes = NodeOptions { cores: 1, extra_config: &more, ..NodeOptions::default() };
    let mut node = Node::new(context, &directory, "node", &wishes)?;
    node.start()?;
    node.create(VOLUME, &format!("{MEGABYTES}MiB"))?;
    let program = wishes.profile.program(context);
    let (certificate, token) = (at(CERTIFICATE), at(TOKEN));
    let order = GuestJob {
        script: "ublk.sh",
        variables: vec![
            ("PROGRAM", program.display().to_string()),
            ("API", format!("https://{}:{PORT}", guest::host_address())),
            ("CA_CERT", CERTIFICATE.to_owned()),
            ("TOKEN_FILE", TOKEN.to_owned()),
            ("VOLUME", VOLUME.to_owned()),
            ("BYTES", (MEGABYTES << 20).to_string()),
            ("MEGABYTES", "8".to_owned()),
            ("KINDS", "ext4 xfs".to_owned()),
            ("DEATHS", PROCESS_KILLS.to_string()),
        ],
        files: vec![(CERTIFICATE, &certificate), (TOKEN, &token)],
        kernel_options: &[],
        memory_mib: 768,
        limit: LIMIT,
    };
    context.display.begin_step("a block device of a machine");
    let ran = guest::run_beside(context, &kernel, &order, |signs| {
        (1..=PROCESS_KILLS).try_for_each(|n| pause_node_during_kill(&node, signs, n))?;
        kill_and_restart_node(&mut node, signs)
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        let log = node.log().unwrap_or_default();
        context.fail("a block device of a machine", &format!("{:?}\n{log}", ran.err()));
    }
    context.check("the node of a block device ends in order", || node.stop().map(drop));
    Ok(())
}

/// Creates the credentials of the node's API over TCP.
fn credentials(context: &RunContext, directory: &Path) -> Result<()> {
    let mut command = Command::new("openssl");
    command.current_dir(directory).args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]);
    command.args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=node"]);
    command.args(["-addext", &format!("subjectAltName=IP:{}", guest::host_address())]);
    command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    command.args(["-keyout", KEY, "-out", CERTIFICATE]);
    context.run("openssl", &mut command, Duration::from_secs(30))?.success_output()?;
    let token = directory.join(TOKEN);
    fs::write(&token, "a-token-of-the-tests\n").context("cannot write the token")?;
    for name in [TOKEN, KEY] {
        fs::set_permissions(directory.join(name), fs::Permissions::from_mode(0o600))
            .context("cannot hide a secret")?;
    }
    Ok(())
}

/// Freezes the node while the process that serves the device is killed, so that requests are in
/// flight and in its sockets.
fn pause_node_during_kill(node: &Node, signs: &GuestSignals<'_>, n: usize) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    node.freeze()?;
    std::thread::sleep(FREEZE_TIME);
    let killed = signs.send(&format!("frozen-{n}")).and_then(|()| {
        signs.wait_for(&format!("killed-{n}"))?;
        std::thread::sleep(FREEZE_TIME);
        Ok(())
    });
    node.thaw()?;
    killed?;
    signs.send(&format!("thawed-{n}"))
}

/// Kills the node and restarts it after the process has given up.
fn kill_and_restart_node(node: &mut Node, signs: &GuestSignals<'_>) -> Result<()> {
    signs.wait_for("gone")?;
    node.kill()?;
    signs.send("killed-node")?;
    signs.wait_for("left")?;
    node.start()?;
    signs.send("back")
}
