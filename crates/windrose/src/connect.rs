//! How to connect to a volume: lines to copy.

use std::net::SocketAddr;

use api::client::Address;
use api::{Access, DhchapHost, Initiator, Volume};

/// What stands for the node where nobody knows by which name the reader reaches it.
const NODE: &str = "NODE";

/// Lines that connect to `volume`, and what is in the way if something is.
pub(crate) fn how(volume: &Volume, api: &Address) -> String {
    let mut text = String::new();
    if let Some(obstacle) = obstacle(volume) {
        text.push_str(&obstacle);
    }
    // With nobody allowed yet both are shown; otherwise what would be refused is not.
    let allowed = &volume.access.initiators;
    let some_may =
        |covers: fn(&Initiator) -> bool| allowed.is_empty() || allowed.iter().any(covers);
    let iscsi = volume.iscsi.as_ref().filter(|_| some_may(Initiator::covers_iscsi));
    let nvme = volume.nvme.as_ref().filter(|_| some_may(Initiator::covers_nvme));
    if let Some((iscsi, (host, port))) = iscsi.and_then(|e| Some((e, portal(&e.portals, api)?))) {
        let (target, lun) = (&iscsi.target, iscsi.lun);
        let escaped = target.replace(':', "%3a");
        text.push_str(&format!(
            "\nLinux, iSCSI:\n  \
             iscsiadm -m discovery -t sendtargets -p {host}:{port}\n"
        ));
        let set = format!("  iscsiadm -m node -T {target} -p {host}:{port} -o update");
        text.push_str(&chap_lines(&volume.access, &set));
        text.push_str(&format!(
            "  iscsiadm -m node -T {target} -p {host}:{port} --login\n\
             \nQEMU, iSCSI:\n  \
             -drive file=iscsi://{host}:{port}/{escaped}/{lun},format=raw,if=virtio,cache=none\n"
        ));
    }
    if let Some((nvme, (host, port))) = nvme.and_then(|e| Some((e, portal(&e.portals, api)?))) {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        for (of, options) in host_proofs(&volume.access) {
            text.push_str(&format!(
                "\nLinux, NVMe/TCP{of}:\n  nvme connect -t tcp -a {host} -s {port} -n {}{options}\n",
                nvme.subsystem
            ));
        }
    }
    if text.contains(NODE) {
        text.push_str(&format!("\n{NODE} stands for a name or address of this node.\n"));
    }
    text
}

/// What an initiator has to be told of CHAP, each line by `set`. Secrets are for whoever copies the lines to fill in: two
/// different ones where both sides prove themselves.
fn chap_lines(access: &Access, set: &str) -> String {
    let Some(user) = &access.chap_user else { return String::new() };
    let auth = "node.session.auth";
    let mut lines = format!(
        "{set} -n {auth}.authmethod -v CHAP\n\
         {set} -n {auth}.username -v {}\n\
         {set} -n {auth}.password -v SECRET\n",
        user.as_str()
    );
    if let Some(mutual) = &access.chap_mutual_user {
        lines.push_str(&format!(
            "{set} -n {auth}.username_in -v {}\n{set} -n {auth}.password_in -v MUTUAL-SECRET\n",
            mutual.as_str()
        ));
    }
    lines
}

/// What NVMe hosts have to tell of secrets when they connect, and which hosts: by their name alone, by a secret, and where the
/// volume proves itself too. Secrets are for whoever copies the lines to fill in.
fn host_proofs(access: &Access) -> Vec<(&'static str, &'static str)> {
    const BY_NAME: (&str, &str) = (", hosts without a secret", "");
    const ONE: (&str, &str) = (", hosts with a secret", " --dhchap-secret SECRET");
    const MUTUAL: (&str, &str) = (
        ", hosts with a secret, mutual",
        " --dhchap-secret SECRET --dhchap-ctrl-secret MUTUAL-SECRET",
    );
    let proof = |host: &DhchapHost| if host.mutual { MUTUAL } else { ONE };
    let proof_of = |who: &Initiator| {
        access.dhchap_hosts.iter().find(|h| h.host == *who).map_or(BY_NAME, proof)
    };
    if access.dhchap_hosts.is_empty() {
        return vec![("", "")];
    }
    // With nobody allowed yet, all that is known of hosts is shown.
    let hosts = access.initiators.iter().filter(|i| i.covers_nvme());
    let asked: Vec<_> = match access.initiators.is_empty() {
        true => access.dhchap_hosts.iter().map(proof).collect(),
        false => hosts.map(proof_of).collect(),
    };
    let mut all = vec![BY_NAME, ONE, MUTUAL];
    all.retain(|proof| asked.contains(proof));
    all
}

fn obstacle(volume: &Volume) -> Option<String> {
    let name = &volume.name;
    let allowed = &volume.access.initiators;
    if volume.iscsi.is_none() && volume.nvme.is_none() {
        return Some(format!(
            "\nIt is not exported. To export it:\n  windrose volume export {name} --via both\n"
        ));
    }
    let iscsi = volume.iscsi.is_some() && allowed.iter().any(Initiator::covers_iscsi);
    let nvme = volume.nvme.is_some() && allowed.iter().any(Initiator::covers_nvme);
    (!iscsi && !nvme).then(|| {
        format!(
            "\nNobody may reach it yet. To allow an initiator by its name\n\
             (/etc/iscsi/initiatorname.iscsi, /etc/nvme/hostnqn):\n  \
             windrose volume allow {name} INITIATOR\n"
        )
    })
}

/// The portal to name: one that is not only for the node itself, if there is one.
fn portal(portals: &[String], api: &Address) -> Option<(String, u16)> {
    let mut all: Vec<SocketAddr> = portals.iter().filter_map(|p| p.parse().ok()).collect();
    all.sort_by_key(|a| a.ip().is_loopback());
    let first = all.first()?;
    let host = match (first.ip().is_unspecified(), api) {
        (false, _) if first.is_ipv6() => format!("[{}]", first.ip()),
        (false, _) => first.ip().to_string(),
        (true, Address::Tls { host, .. }) if host.contains(':') => format!("[{host}]"),
        (true, Address::Tls { host, .. }) => host.clone(),
        (true, Address::Unix(_)) => NODE.to_owned(),
    };
    Some((host, first.port()))
}
