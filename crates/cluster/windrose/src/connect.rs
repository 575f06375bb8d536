//! How to connect to a volume: lines to copy.

use std::collections::BTreeSet;
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
        text.push_str(&nvme_lines(&volume.access, &nvme.subsystem, host, port));
    }
    if let Some(socket) = volume.vhost_user.as_ref().and_then(|e| e.socket.as_ref()) {
        let (name, socket) = (&volume.name, socket.display());
        text.push_str(&format!(
            "\nQEMU on this node (its memory shared), vhost-user:\n  \
             -chardev socket,id={name},path={socket},reconnect=1 -device vhost-user-blk-pci,chardev={name}\n"
        ));
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

/// What a host has to prove when it connects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Proof {
    /// Nothing: its name will do.
    Name,
    /// That it has its secret.
    Secret,
    /// The same, and the volume can prove itself too.
    Mutual,
}

/// How a host connects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    /// What it proves.
    proof: Proof,
    /// Whether it has a key of TLS, which it uses.
    tls: bool,
}

impl Way {
    /// How `host` connects; whoever is not named does without everything.
    fn of(host: &Initiator, access: &Access) -> Self {
        let proof = |host: &DhchapHost| if host.mutual { Proof::Mutual } else { Proof::Secret };
        let secrets = access.dhchap_hosts.iter().find(|h| h.host == *host);
        let tls = access.tls_hosts.iter().any(|h| h.host == *host);
        Self { proof: secrets.map_or(Proof::Name, proof), tls }
    }

    /// Whose way it is, in front of which comes what the lines are for; nothing where all hosts have one.
    fn whose(self, access: &Access) -> String {
        let secret = match self.proof {
            _ if access.dhchap_hosts.is_empty() => None,
            Proof::Name => Some("without a secret"),
            Proof::Secret => Some("with a secret"),
            Proof::Mutual => Some("with a secret, mutual"),
        };
        let tls = match self.tls {
            _ if access.tls_hosts.is_empty() => None,
            true => Some("with a TLS key"),
            false => Some("without a TLS key"),
        };
        let words: Vec<_> = secret.into_iter().chain(tls).collect();
        if words.is_empty() { String::new() } else { format!(", hosts {}", words.join(", ")) }
    }
}

/// Lines for NVMe hosts, for each way in which some of them connect. Secrets and keys are for whoever copies the lines to fill
/// in.
fn nvme_lines(access: &Access, subsystem: &str, host: &str, port: u16) -> String {
    let mut text = String::new();
    for way in ways(access) {
        text.push_str(&format!("\nLinux, NVMe/TCP{}:\n", way.whose(access)));
        if way.tls {
            text.push_str(&format!(
                "  nvme check-tls-key --insert --subsysnqn {subsystem} --keydata KEY\n"
            ));
        }
        let tls = if way.tls { " --tls" } else { "" };
        let proof = match way.proof {
            Proof::Name => "",
            Proof::Secret => " --dhchap-secret SECRET",
            Proof::Mutual => " --dhchap-secret SECRET --dhchap-ctrl-secret MUTUAL-SECRET",
        };
        text.push_str(&format!(
            "  nvme connect -t tcp -a {host} -s {port} -n {subsystem}{tls}{proof}\n"
        ));
    }
    text
}

/// The ways in which hosts connect that may.
fn ways(access: &Access) -> BTreeSet<Way> {
    let secrets = access.dhchap_hosts.iter().map(|h| &h.host);
    let known = secrets.chain(access.tls_hosts.iter().map(|h| &h.host));
    let allowed = access.initiators.iter().filter(|i| i.covers_nvme());
    let way = |host| Way::of(host, access);
    // With nobody allowed yet, all that is known of hosts is shown; with everybody, also the rest.
    let ways: BTreeSet<_> = match access.initiators.as_slice() {
        [] => known.map(way).collect(),
        all if all.contains(&Initiator::Any) => known.chain(allowed).map(way).collect(),
        _ => allowed.map(way).collect(),
    };
    if ways.is_empty() { [Way { proof: Proof::Name, tls: false }].into() } else { ways }
}

fn obstacle(volume: &Volume) -> Option<String> {
    let name = &volume.name;
    let allowed = &volume.access.initiators;
    if volume.iscsi.is_none() && volume.nvme.is_none() {
        if volume.vhost_user.is_some() {
            return None;
        }
        return Some(format!(
            "\nIt is not exported. To export it:\n  windrose volume export {name} --via both\n"
        ));
    }
    let iscsi = volume.iscsi.is_some() && allowed.iter().any(Initiator::covers_iscsi);
    let nvme = volume.nvme.is_some() && allowed.iter().any(Initiator::covers_nvme);
    // Virtual machines do by its socket.
    let who = if volume.vhost_user.is_some() { "No initiator" } else { "Nobody" };
    (!iscsi && !nvme).then(|| {
        format!(
            "\n{who} may reach it yet. To allow an initiator by its name\n\
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
