//! Instructions for connecting to a volume, as lines to copy.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use api::client::ApiAddress;
use api::{Access, DhchapHost, Initiator, Volume};

/// Placeholder for the node's address if none is known that the reader can use.
const NODE_PLACEHOLDER: &str = "NODE";

/// Lines that connect to `volume`, and what is still missing for access.
pub(crate) fn instructions(volume: &Volume, api: &ApiAddress) -> String {
    let mut text = String::new();
    if let Some(missing) = missing_access(volume) {
        text.push_str(&missing);
    }
    // Without allowed initiators show both protocols; otherwise omit what would be refused.
    let allowed = &volume.access.initiators;
    let covers_any =
        |covers: fn(&Initiator) -> bool| allowed.is_empty() || allowed.iter().any(covers);
    let iscsi = volume.iscsi.as_ref().filter(|_| covers_any(Initiator::covers_iscsi));
    let nvme = volume.nvme.as_ref().filter(|_| covers_any(Initiator::covers_nvme));
    if let Some((iscsi, (host, port))) =
        iscsi.and_then(|e| Some((e, preferred_portal(&e.portals, api)?)))
    {
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
    if let Some((nvme, (host, port))) =
        nvme.and_then(|e| Some((e, preferred_portal(&e.portals, api)?)))
    {
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
    if text.contains(NODE_PLACEHOLDER) {
        text.push_str(&format!(
            "\n{NODE_PLACEHOLDER} stands for a name or address of this node.\n"
        ));
    }
    text
}

/// An initiator's CHAP settings, each as a line of the command `set`. The reader fills in the
/// secrets: two different ones for mutual CHAP.
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

/// How a host authenticates when it connects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum HostAuthentication {
    /// By its name only.
    NameOnly,
    /// With its secret.
    Secret,
    /// The same, and the volume can authenticate itself too.
    Mutual,
}

/// How a host connects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ConnectMethod {
    /// How it authenticates.
    authentication: HostAuthentication,
    /// Whether it uses TLS, having a key.
    tls: bool,
}

impl ConnectMethod {
    /// How `host` connects; a host without an entry connects without secret and key.
    fn for_host(host: &Initiator, access: &Access) -> Self {
        let authentication = |host: &DhchapHost| {
            if host.mutual { HostAuthentication::Mutual } else { HostAuthentication::Secret }
        };
        let secrets = access.dhchap_hosts.iter().find(|h| h.host == *host);
        let tls = access.tls_hosts.iter().any(|h| h.host == *host);
        Self { authentication: secrets.map_or(HostAuthentication::NameOnly, authentication), tls }
    }

    /// The part of a heading that says which hosts use this method; empty if all hosts use one.
    fn heading_suffix(self, access: &Access) -> String {
        let secret = match self.authentication {
            _ if access.dhchap_hosts.is_empty() => None,
            HostAuthentication::NameOnly => Some("without a secret"),
            HostAuthentication::Secret => Some("with a secret"),
            HostAuthentication::Mutual => Some("with a secret, mutual"),
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

/// Instructions for NVMe hosts, for each method that some of them use. The reader fills in secrets
/// and keys.
fn nvme_lines(access: &Access, subsystem: &str, host: &str, port: u16) -> String {
    let mut text = String::new();
    for method in connect_methods(access) {
        text.push_str(&format!("\nLinux, NVMe/TCP{}:\n", method.heading_suffix(access)));
        if method.tls {
            text.push_str(&format!(
                "  nvme check-tls-key --insert --subsysnqn {subsystem} --keydata KEY\n"
            ));
        }
        let tls = if method.tls { " --tls" } else { "" };
        let secrets = match method.authentication {
            HostAuthentication::NameOnly => "",
            HostAuthentication::Secret => " --dhchap-secret SECRET",
            HostAuthentication::Mutual => {
                " --dhchap-secret SECRET --dhchap-ctrl-secret MUTUAL-SECRET"
            }
        };
        text.push_str(&format!(
            "  nvme connect -t tcp -a {host} -s {port} -n {subsystem}{tls}{secrets}\n"
        ));
    }
    text
}

/// The methods of all allowed hosts.
fn connect_methods(access: &Access) -> BTreeSet<ConnectMethod> {
    let secrets = access.dhchap_hosts.iter().map(|h| &h.host);
    let configured = secrets.chain(access.tls_hosts.iter().map(|h| &h.host));
    let allowed = access.initiators.iter().filter(|i| i.covers_nvme());
    let method_of = |host| ConnectMethod::for_host(host, access);
    // Without allowed initiators show all configured hosts; with `any`, also a host without an
    // entry.
    let methods: BTreeSet<_> = match access.initiators.as_slice() {
        [] => configured.map(method_of).collect(),
        all if all.contains(&Initiator::Any) => configured.chain(allowed).map(method_of).collect(),
        _ => allowed.map(method_of).collect(),
    };
    if methods.is_empty() {
        [ConnectMethod { authentication: HostAuthentication::NameOnly, tls: false }].into()
    } else {
        methods
    }
}

fn missing_access(volume: &Volume) -> Option<String> {
    let name = &volume.name;
    let allowed = &volume.access.initiators;
    if volume.iscsi.is_none() && volume.nvme.is_none() {
        if volume.vhost_user.is_some() {
            return None;
        }
        return Some(format!(
            "\nIt is not exported. To export it:\n  windrose volume export {name} --protocols iscsi,nvme\n"
        ));
    }
    let iscsi = volume.iscsi.is_some() && allowed.iter().any(Initiator::covers_iscsi);
    let nvme = volume.nvme.is_some() && allowed.iter().any(Initiator::covers_nvme);
    (!iscsi && !nvme).then(|| {
        format!(
            "\nNo initiator is allowed to access it yet. To allow an initiator by its name\n\
             (/etc/iscsi/initiatorname.iscsi, /etc/nvme/hostnqn):\n  \
             windrose volume allow {name} INITIATOR\n"
        )
    })
}

/// The portal to name in instructions: one that other machines can reach, if there is one.
fn preferred_portal(portals: &[String], api: &ApiAddress) -> Option<(String, u16)> {
    let mut all: Vec<SocketAddr> = portals.iter().filter_map(|p| p.parse().ok()).collect();
    all.sort_by_key(|a| a.ip().is_loopback());
    let first = all.first()?;
    let host = match (first.ip().is_unspecified(), api) {
        (false, _) if first.is_ipv6() => format!("[{}]", first.ip()),
        (false, _) => first.ip().to_string(),
        (true, ApiAddress::Tls { host, .. }) if host.contains(':') => format!("[{host}]"),
        (true, ApiAddress::Tls { host, .. }) => host.clone(),
        (true, ApiAddress::Unix(_)) => NODE_PLACEHOLDER.to_owned(),
    };
    Some((host, first.port()))
}
