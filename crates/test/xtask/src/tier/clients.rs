//! Real clients against a volume: libiscsi's suite and the Linux kernel's initiators.

use super::{
    initiators::{self, FULL, GuestLoad},
    libiscsi,
};
use crate::{
    guest::{self, GuestKernel},
    install, namespace,
    node::{ExportedVolume, Node, NodeOptions, Profile},
    run_context::RunContext,
    server::Tgt,
    test_report::skip,
};
use anyhow::Result;
use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
    time::Duration,
};

/// The tier of libiscsi's suite and of our own initiator.
pub(super) const SUITE: &str = "libiscsi";

/// Our initiator's program for any target: an example of the crate `initiator`.
pub(super) const OWN_INITIATOR: &str = "iscsi_unit";
const OWN_INITIATOR_LIMIT: Duration = Duration::from_secs(120);

/// Where a server for guests listens: on every address of the namespace, or on loopback without
/// one.
fn listen_address() -> IpAddr {
    IpAddr::V4(if namespace::is_inside() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST })
}

/// Runs libiscsi's suite.
pub(super) fn libiscsi_suite(context: &RunContext) -> Result<()> {
    let (node, volume) = one_volume(context, "libiscsi")?;
    let guarded = node.create("guarded", "64MiB")?.unit;
    // CHAP guards iSCSI only: the product refuses it while every NVMe host has access.
    node.command(&["volume", "export", "guarded", "--protocols", "iscsi"])?;
    let guard = |user: &str| {
        const SECRET: &str = "a-secret-of-tests";
        node.ask_for_chap("guarded", user, SECRET)?;
        Ok(guarded.url_as(user, SECRET))
    };
    libiscsi::suite(context, &volume.unit, Some(&guard), None)?;
    own_initiator(context)
}

/// Our own initiator against tgt, with and without digests.
fn own_initiator(context: &RunContext) -> Result<()> {
    context.check("our initiator and tgt", || {
        let disk = context.scratch().join("initiator-disk");
        File::create(&disk)?.set_len(64 << 20)?;
        let portal = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 3264);
        let mut tgt = Tgt::start(context, portal, &[])?;
        let unit = tgt.export(&disk, false)?;
        let program = Profile::Dev.example(context, OWN_INITIATOR);
        let mut command = Command::new(program);
        command.arg(unit.portal.to_string()).arg(&unit.target);
        context.run(OWN_INITIATOR, &mut command, OWN_INITIATOR_LIMIT)?.success_output()?;
        Ok(())
    });
    Ok(())
}

/// Full runs of the kernel's initiators. A sample has one kind of file system for each protocol,
/// and on an emulated processor either digests or none.
pub(super) fn kernel_initiators(context: &RunContext) -> Result<()> {
    let kernel = GuestKernel::choose(context)?;
    context.display.line(&format!("  guests: {}", kernel.name()));
    let (node, volume) = one_volume(context, "initiators")?;
    let kinds = |what: &str| context.sample(what, FULL.kinds.split(' '), 2).join(" ");
    let parts = if kernel.is_emulated() { 2 } else { 1 };
    let digests = |what: &str| context.sample(what, FULL.digests.split(' '), parts).join(" ");
    let (kind, digest) = (kinds("file systems over iSCSI"), digests("digests over iSCSI"));
    let load = GuestLoad { kinds: &kind, digests: &digest, ..FULL };
    initiators::iscsi(context, &kernel, &volume.unit, load)?;
    let (kind, digest) = (kinds("file systems over NVMe"), digests("digests over NVMe"));
    let load = GuestLoad { kinds: &kind, digests: &digest, ..FULL };
    initiators::nvme(context, &kernel, &node, ("initiators", &volume), load)?;
    Ok(())
}

/// A short run of the kernel's initiators, on the kernel that is available everywhere.
pub(super) fn kernel_initiators_emulated(context: &RunContext) -> Result<()> {
    if GuestKernel::choose(context)?.is_emulated() {
        return skip("this machine's guests all run Debian's kernel under QEMU");
    }
    let kernel = GuestKernel::qemu(context)?;
    let (node, volume) = one_volume(context, "emulated")?;
    initiators::iscsi(context, &kernel, &volume.unit, initiators::SMOKE)?;
    initiators::nvme(context, &kernel, &node, ("emulated", &volume), initiators::SMOKE)?;
    Ok(())
}

/// A running node with one volume.
fn one_volume(context: &RunContext, name: &str) -> Result<(Node, ExportedVolume)> {
    let mut node = Node::new(context, context.scratch(), name, &NodeOptions::default())?;
    node.start()?;
    let volume = node.create(name, "1GiB")?;
    Ok((node, volume))
}

/// The packages [`test_clients_against_other_targets`] needs.
pub(crate) fn peer_packages() -> Vec<&'static [install::Package]> {
    let clients = vec![install::TGT, install::LIBISCSI, install::NETWORK, install::GUEST_QEMU];
    [guest::packages(), clients].concat()
}

/// The same clients against Debian's tgt and Linux's own NVMe target. Not part of the tests: it
/// shows whether a client or its script, rather than the product, is at fault.
pub(crate) fn test_clients_against_other_targets(context: &RunContext) -> Result<()> {
    let disk = context.scratch().join("disk");
    File::create(&disk)?.set_len(512 << 20)?;
    let mut tgt = Tgt::start(context, SocketAddr::new(listen_address(), 3260), &[])?;
    let mut unit = tgt.export(&disk, false)?;
    unit.portal.set_ip(Ipv4Addr::LOCALHOST.into());
    libiscsi::suite(context, &unit, None, None)?;
    let kernel = GuestKernel::choose(context)?;
    initiators::iscsi(context, &kernel, &unit, FULL)?;
    initiators::nvme_stand_in(context, &kernel, FULL)?;
    let kernel = GuestKernel::qemu(context)?;
    initiators::iscsi(context, &kernel, &unit, initiators::SMOKE)?;
    initiators::nvme_stand_in(context, &kernel, initiators::SMOKE)?;
    Ok(())
}
