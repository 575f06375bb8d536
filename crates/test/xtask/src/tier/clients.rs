//! Real clients against a volume: libiscsi's suite, the Linux kernel's initiators.

use super::{initiators, libiscsi};
use crate::{
    guest::{self, Kernel},
    house::House,
    install, namespace,
    node::{Exported, Node, Profile, Wishes},
    server::Tgt,
};
use anyhow::Result;
use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    time::Duration,
};

/// The tier of libiscsi's suite, and of our own initiator.
pub(super) const SUITE: &str = "libiscsi";

/// The program that takes a unit of any target for a disk: an example of the crate `initiator`.
pub(super) const OWN_INITIATOR: &str = "iscsi_unit";
const OWN_INITIATOR_LIMIT: Duration = Duration::from_secs(120);

/// Where a server listens that guests must reach: every address of the namespace, loopback without one.
fn listen_address() -> IpAddr {
    IpAddr::V4(if namespace::inside() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST })
}

/// libiscsi's suite.
pub(super) fn suite(house: &House) -> Result<()> {
    let (node, volume) = one_volume(house, "libiscsi")?;
    let guarded = node.create("guarded", "64MiB")?.unit;
    // CHAP guards iSCSI only: the product refuses it for what every NVMe host may reach.
    node.command(&["volume", "export", "guarded", "--via", "iscsi"])?;
    let guard = |user: &str| {
        const SECRET: &str = "a-secret-of-tests";
        node.ask_for_chap("guarded", user, SECRET)?;
        Ok(guarded.url_as(user, SECRET))
    };
    libiscsi::suite(house, &volume.unit, Some(&guard))?;
    own_initiator(house)
}

/// Our own initiator, with a target that is not ours: tgt, with digests and without.
fn own_initiator(house: &House) -> Result<()> {
    house.check("our initiator and tgt", || {
        let disk = house.scratch().join("initiator-disk");
        File::create(&disk)?.set_len(64 << 20)?;
        let portal = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 3264);
        let mut tgt = Tgt::start(house, portal, &[])?;
        let unit = tgt.offer(&disk, false)?;
        let program = Profile::Dev.example(house, OWN_INITIATOR);
        let mut command = Command::new(program);
        command.arg(unit.portal.to_string()).arg(&unit.target);
        house.run(OWN_INITIATOR, &mut command, OWN_INITIATOR_LIMIT)?.ok()?;
        Ok(())
    });
    Ok(())
}

/// The kernel's initiators at full length.
pub(super) fn initiators(house: &House) -> Result<()> {
    let kernel = Kernel::choose(house)?;
    house.display.line(&format!("  guests: {}", kernel.name()));
    let (node, volume) = one_volume(house, "initiators")?;
    initiators::iscsi(house, &kernel, &volume.unit, initiators::FULL)?;
    initiators::nvme(house, &kernel, &node, ("initiators", &volume), initiators::FULL)?;
    Ok(())
}

/// The kernel's initiators, a little of everything, on the kernel that is available everywhere.
pub(super) fn emulated(house: &House) -> Result<()> {
    let kernel = Kernel::qemu(house)?;
    let (node, volume) = one_volume(house, "emulated")?;
    initiators::iscsi(house, &kernel, &volume.unit, initiators::SMOKE)?;
    initiators::nvme(house, &kernel, &node, ("emulated", &volume), initiators::SMOKE)?;
    Ok(())
}

/// A running node with one volume.
fn one_volume(house: &House, name: &str) -> Result<(Node, Exported)> {
    let mut node = Node::new(house, house.scratch(), name, &Wishes::default())?;
    node.start()?;
    let volume = node.create(name, "1GiB")?;
    Ok((node, volume))
}

/// What must be installed for [`against_peers`].
pub(crate) fn peer_packages() -> Vec<&'static [install::Package]> {
    let clients = vec![install::TGT, install::LIBISCSI, install::NETWORK, install::GUEST_QEMU];
    [guest::packages(), clients].concat()
}

/// The same clients against Debian's tgt and Linux's own NVMe target. Not part of the tests: it shows whether
/// a client or its script, rather than the product, is at fault.
pub(crate) fn against_peers(house: &House) -> Result<()> {
    let disk = house.scratch().join("disk");
    File::create(&disk)?.set_len(512 << 20)?;
    let mut tgt = Tgt::start(house, SocketAddr::new(listen_address(), 3260), &[])?;
    let mut unit = tgt.offer(&disk, false)?;
    unit.portal.set_ip(Ipv4Addr::LOCALHOST.into());
    libiscsi::suite(house, &unit, None)?;
    let kernel = Kernel::choose(house)?;
    initiators::iscsi(house, &kernel, &unit, initiators::FULL)?;
    initiators::nvme_stand_in(house, &kernel, initiators::FULL)?;
    let kernel = Kernel::qemu(house)?;
    initiators::iscsi(house, &kernel, &unit, initiators::SMOKE)?;
    initiators::nvme_stand_in(house, &kernel, initiators::SMOKE)?;
    Ok(())
}
