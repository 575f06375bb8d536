//! Real clients against a volume: libiscsi's suite, the Linux kernel's initiators.

use super::{initiators, libiscsi};
use crate::{
    guest::{self, Kernel},
    house::House,
    install, namespace,
    server::Tgt,
};
use anyhow::Result;
use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

/// Where a server listens that guests must reach: every address of the namespace, loopback without one.
fn listen_address() -> IpAddr {
    IpAddr::V4(if namespace::inside() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST })
}

/// The same clients against Debian's tgt and Linux's own NVMe target. Not part of the tests: it shows whether
/// a client or its script, rather than the product, is at fault.
pub(crate) fn against_peers(house: &House) -> Result<()> {
    install::packages(house, &[install::TGT])?;
    let disk = house.scratch().join("disk");
    File::create(&disk)?.set_len(512 << 20)?;
    let mut tgt = Tgt::start(house, SocketAddr::new(listen_address(), 3260), &[])?;
    let mut unit = tgt.offer(&disk)?;
    unit.portal.set_ip(Ipv4Addr::LOCALHOST.into());
    libiscsi::suite(house, &unit)?;
    let kernel = Kernel::choose(house)?;
    initiators::iscsi(house, &kernel, &unit, initiators::FULL)?;
    initiators::nvme_stand_in(house, &kernel, initiators::FULL)?;
    let kernel = Kernel::qemu(house)?;
    initiators::iscsi(house, &kernel, &unit, initiators::SMOKE)?;
    initiators::nvme_stand_in(house, &kernel, initiators::SMOKE)?;
    Ok(())
}

/// What must be installed for the tier.
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    let mut packages = guest::packages();
    packages.extend([install::LIBISCSI, install::NETWORK, install::GUEST_QEMU]);
    packages
}
