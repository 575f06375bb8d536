//! A volume as a block device of a machine: `windrose attach --ublk` in a guest, over the network, of a node here.

use crate::{
    guest::{self, Kernel, Order, Signs},
    house::House,
    node::{Node, Wishes},
};
use anyhow::{Context, Result};
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

const VOLUME: &str = "web";
/// XFS wants 300.
const MEGABYTES: u64 = 512;
/// How often the process is killed under load.
const DEATHS: usize = 2;
const LIMIT: Duration = Duration::from_secs(240);
/// How long the node stands still before a kill, and after it.
const STANDSTILL: Duration = Duration::from_millis(500);
const CERTIFICATE: &str = "api.pem";
const KEY: &str = "api.key";
const TOKEN: &str = "token";
const PORT: u16 = 4242;

pub(super) fn run(house: &House) -> Result<()> {
    let kernel = match Kernel::choose(house)? {
        kernel @ Kernel::UserMode(_) => kernel,
        // Debian's is older than what is needed of the driver (Linux 6.5).
        Kernel::Qemu { .. } | Kernel::OfDisk(_) => {
            house.skip("a block device of a machine (ublk)", "it wants a guest by WINDROSE_UML");
            return Ok(());
        }
    };
    let directory = house.directory("ublk")?;
    credentials(house, &directory)?;
    let at = |name: &str| directory.join(name);
    // These lines belong to the section `api`, which is the configuration's last.
    let more = format!(
        "tcp = \"0.0.0.0:{PORT}\"\ntls_cert = \"{}\"\ntls_key = \"{}\"\ntoken_file = \"{}\"\n",
        at(CERTIFICATE).display(),
        at(KEY).display(),
        at(TOKEN).display()
    );
    let wishes = Wishes { cores: 1, more: &more, ..Wishes::default() };
    let mut node = Node::new(house, &directory, "node", &wishes)?;
    node.start()?;
    node.create(VOLUME, &format!("{MEGABYTES}MiB"))?;
    let program = wishes.profile.program(house);
    let (certificate, token) = (at(CERTIFICATE), at(TOKEN));
    let order = Order {
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
            ("DEATHS", DEATHS.to_string()),
        ],
        files: vec![(CERTIFICATE, &certificate), (TOKEN, &token)],
        kernel: &[],
        memory_mib: 768,
        limit: LIMIT,
    };
    house.display.working("a block device of a machine");
    let ran = guest::run_beside(house, &kernel, &order, |signs| {
        (1..=DEATHS).try_for_each(|n| stands_still(&node, signs, n))?;
        goes(&mut node, signs)
    });
    if !ran.as_ref().is_ok_and(|(clean, ())| *clean) {
        let log = node.log().unwrap_or_default();
        house.fail("a block device of a machine", &format!("{:?}\n{log}", ran.err()));
    }
    house.check("the node of a block device ends in order", || node.stop().map(drop));
    Ok(())
}

/// Makes what the node's API over TCP needs.
fn credentials(house: &House, directory: &Path) -> Result<()> {
    let mut command = Command::new("openssl");
    command.current_dir(directory).args(["req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]);
    command.args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=node"]);
    command.args(["-addext", &format!("subjectAltName=IP:{}", guest::host_address())]);
    command.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    command.args(["-keyout", KEY, "-out", CERTIFICATE]);
    house.run("openssl", &mut command, Duration::from_secs(30))?.ok()?;
    let token = directory.join(TOKEN);
    fs::write(&token, "a-token-of-the-tests\n").context("cannot write the token")?;
    for name in [TOKEN, KEY] {
        fs::set_permissions(directory.join(name), fs::Permissions::from_mode(0o600))
            .context("cannot hide a secret")?;
    }
    Ok(())
}

/// The node stands still while the process that serves the device is killed: requests are in flight, and in its sockets.
fn stands_still(node: &Node, signs: &Signs<'_>, n: usize) -> Result<()> {
    signs.wait_for(&format!("loaded-{n}"))?;
    node.freeze()?;
    std::thread::sleep(STANDSTILL);
    let killed = signs.tell(&format!("frozen-{n}")).and_then(|()| {
        signs.wait_for(&format!("killed-{n}"))?;
        std::thread::sleep(STANDSTILL);
        Ok(())
    });
    node.thaw()?;
    killed?;
    signs.tell(&format!("thawed-{n}"))
}

/// The node is killed, and comes back when the process has given up.
fn goes(node: &mut Node, signs: &Signs<'_>) -> Result<()> {
    signs.wait_for("gone")?;
    node.kill()?;
    signs.tell("killed-node")?;
    signs.wait_for("left")?;
    node.start()?;
    signs.tell("back")
}
