//! Formats answers for people.

mod admission;
mod pool;
mod recovery;

use std::process::ExitCode;

use api::client::ApiAddress;
use api::endpoint::{GetStatus, ListSessions, NoBody};
use api::{
    Access, ApiError, Cluster, ClusterNode, ClusterStage, CreateVolumeResult, CreateVolumeResults,
    DhchapHost, InitiatorChapUser, IscsiExport, NodeRole, Protocol, ReplicaState, Reservations,
    Rotation, RotationStage, Session, SessionList, Severity, Size, Status, TlsHost, Verdict,
    Verification, Volume, VolumeList, VolumeName, VolumeReplica, VolumeState,
};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use crate::connect_help;
use crate::exit::CliError;
use crate::remote::NodeConnection;
pub(crate) use admission::{created_token, joins, tokens};
pub(crate) use pool::{pool, pools};
pub(crate) use recovery::{importable, orphans, planned, recovery};
use wire::plural;

/// `windrose status`.
pub(crate) async fn status(remote: NodeConnection) -> Result<ExitCode, CliError> {
    let status = remote.client.call::<GetStatus>(&NoBody).await?;
    remote.print(&status, status_text)?;
    Ok(ExitCode::from(status.verdict.exit_code()))
}

/// `windrose sessions`.
pub(crate) async fn sessions(remote: NodeConnection) -> Result<ExitCode, CliError> {
    let list = remote.client.call::<ListSessions>(&NoBody).await?;
    remote.print(&list, sessions_text)?;
    Ok(ExitCode::SUCCESS)
}

fn table(head: &[&str], right: &[usize], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head);
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<_> = table.lines().map(|l| l.trim_end().to_owned()).collect();
    lines.join("\n")
}

/// `windrose cluster nodes`.
pub(crate) fn cluster(cluster: &Cluster) -> String {
    let mut text = match (cluster.stage, cluster.id) {
        (ClusterStage::Standalone, _) | (_, None) => {
            return "This node is in no cluster. To begin one:\n  windrose cluster init".to_owned();
        }
        (ClusterStage::Member, Some(id)) => format!("Cluster {id}"),
        (ClusterStage::Creating, Some(id)) => format!("Cluster {id}: this node is creating it"),
        (ClusterStage::Joining, Some(id)) => format!("Cluster {id}: this node is joining it"),
        (ClusterStage::Leaving, Some(id)) => format!("Cluster {id}: this node is leaving it"),
    };
    if let Some(what) = &cluster.waits_for {
        text.push_str(&format!("\nThis node waits: {what}"));
    }
    if let Some(under_way) = &cluster.rotation {
        text.push_str(&format!("\nA credential rotation is in progress: {}", rotation(under_way)));
    }
    let local_mark =
        |node: &ClusterNode| if Some(node.node) == cluster.node { " (this node)" } else { "" };
    let rows = cluster.nodes.iter().map(|node| {
        let role = match node.role {
            NodeRole::Data => "data",
            NodeRole::Witness => "witness",
        };
        let is_known = cluster.stale_reason.is_none() || Some(node.node) == cluster.node;
        let state = match (node.alive, node.drained) {
            _ if !is_known => "unknown",
            (false, _) => "DOWN",
            (true, true) => "drained",
            (true, false) => "alive",
        };
        let addresses: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
        let name = format!("{}{}", node.name, local_mark(node));
        let (number, addresses) = (node.node.to_string(), addresses.join(", "));
        vec![number, name, role.to_owned(), state.to_owned(), addresses]
    });
    let head = ["NODE", "NAME", "ROLE", "STATE", "ADDRESSES"];
    text.push_str(&format!("\n\n{}", table(&head, &[0], rows)));
    if let Some(why) = &cluster.stale_reason {
        text.push_str(&format!("\n\nThe state of the other nodes is unknown here: {why}."));
    }
    let rows = cluster.store.iter().map(|member| {
        let vote = if member.voter { "voter" } else { "learner" };
        let state = member.problem.clone().unwrap_or_else(|| "healthy".to_owned());
        vec![member.name.clone(), vote.to_owned(), member.urls.join(", "), state]
    });
    let head = ["STORE MEMBER", "VOTE", "ADDRESSES", "STATE"];
    text.push_str(&format!("\n\n{}", table(&head, &[], rows)));
    text
}

/// A message if the node `node`, chosen as primary, is not primary yet, and what helps.
pub(crate) fn not_primary_yet(volume: &Volume, node: &str) -> Option<String> {
    let replica =
        volume.replicas.iter().find(|replica| replica.node == node && !replica.primary)?;
    let why = replica.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let next = replica.hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
    let name = &volume.name;
    Some(format!(
        "node {node} is not the primary of volume {name} yet{why}. It becomes primary once it runs \
         and its replica is in sync{next}"
    ))
}

/// The progress of a credential rotation.
pub(crate) fn rotation(rotation: &Rotation) -> String {
    let what = match rotation.stage {
        RotationStage::Distribute => "the nodes are receiving the new secret and authority",
        RotationStage::Activate => "the nodes are switching to the new secret and authority",
        RotationStage::DropOld => "the nodes are removing the old secret and authority",
    };
    match &rotation.waits_for[..] {
        [] => what.to_owned(),
        names => format!("{what}: waiting for {}", names.join(", ")),
    }
}

/// `windrose volume list`.
pub(crate) fn volumes(list: &VolumeList) -> String {
    match (&list.stale_reason, list.volumes.is_empty()) {
        (None, true) => {
            return "There are no volumes. To create one:\n  windrose volume create NAME --size 10G"
                .to_owned();
        }
        (Some(why), true) => {
            return format!("No volumes are known here, but there may be some: {why}.");
        }
        (_, false) => {}
    }
    let head = ["NAME", "SIZE", "USED", "STATE", "REPLICAS", "EXPORTED BY", "ALLOWED", "SESSIONS"];
    let rows = list.volumes.iter().map(|v| {
        vec![
            v.name.to_string(),
            Size(v.size_bytes).to_string(),
            v.allocated_bytes.map_or("-".to_owned(), |b| Size(b).to_string()),
            state(v).to_owned(),
            replica_counts(v),
            exports(v),
            allowed(v),
            v.sessions.to_string(),
        ]
    });
    let mut text = table(&head, &[1, 2, 7], rows);
    if let Some(why) = &list.stale_reason {
        text.push_str(&format!("\n\nThe list may be incomplete or out of date: {why}."));
    }
    text
}

/// How many replicas are in sync, and how many the volume should have.
fn replica_counts(volume: &Volume) -> String {
    let in_sync = volume.replicas.iter().filter(|replica| replica.state == ReplicaState::InSync);
    format!("{} of {}", in_sync.count(), volume.replicas_wanted)
}

/// `windrose volume create` for several volumes: a line for each.
pub(crate) fn created(created: &CreateVolumeResults) -> String {
    let line = |one: &CreateVolumeResult| match (&one.volume, &one.error) {
        (Some(volume), _) => {
            let (size, state) = (Size(volume.size_bytes), state(volume));
            format!("{}: created, {size}, {state}", one.name)
        }
        (None, Some(ApiError { message, hint: Some(hint), .. })) => {
            format!("{}: NOT created: {message} ({hint})", one.name)
        }
        (None, error) => {
            let why = error.as_ref().map_or("no reason was reported; see the log", |e| &e.message);
            format!("{}: NOT created: {why}", one.name)
        }
    };
    created.volumes.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn state(volume: &Volume) -> &'static str {
    match volume.state {
        VolumeState::Online => "online",
        VolumeState::Remote { .. } => "remote",
        VolumeState::Offline { .. } => "OFFLINE",
        VolumeState::Creating => "creating",
        VolumeState::Opening => "opening",
        VolumeState::Deleting => "deleting",
    }
}

fn exports(volume: &Volume) -> String {
    let iscsi = volume.iscsi.as_ref().map(|iscsi| match &iscsi.owner {
        owner if *owner == volume.name => Protocol::Iscsi.to_string(),
        owner => format!("{} (LUN {} of {owner})", Protocol::Iscsi, iscsi.lun),
    });
    let nvme = volume.nvme.as_ref().map(|_| Protocol::Nvme.to_string());
    let vhost_user = volume.vhost_user.as_ref().map(|_| Protocol::VhostUser.to_string());
    let all: Vec<_> = iscsi.into_iter().chain(nvme).chain(vhost_user).collect();
    if all.is_empty() { "nothing".to_owned() } else { all.join(", ") }
}

fn allowed(volume: &Volume) -> String {
    let access = &volume.access;
    let guarded = access.chap_user.is_some() || !access.chap_initiators.is_empty();
    let chap = if guarded { " + CHAP" } else { "" };
    let dhchap = if access.dhchap_hosts.is_empty() { "" } else { " + DH-HMAC-CHAP" };
    let tls = if access.tls_hosts.is_empty() { "" } else { " + TLS" };
    match volume.access.initiators.as_slice() {
        [] => "none".to_owned(),
        [one] => format!("{one}{chap}{dhchap}{tls}"),
        many => format!("{} initiators{chap}{dhchap}{tls}", many.len()),
    }
}

/// The replicas and their nodes: a line for each.
pub(crate) fn replicas(all: &[VolumeReplica]) -> String {
    let line = |replica: &VolumeReplica| {
        let (path, node) = (&replica.backing, &replica.node);
        let primary = if replica.primary { ", primary" } else { "" };
        let mut text = match (&replica.state, all.len()) {
            (ReplicaState::InSync, 1) => path.to_string(),
            (state, _) => format!("{node}: {path} ({}{primary})", replica_state(state)),
        };
        let shows_reason = matches!(replica.state, ReplicaState::Failed { .. });
        text.extend(
            replica.reason.iter().filter(|_| !shows_reason).map(|why| format!("\n  {why}")),
        );
        text.extend(replica.hint.iter().map(|hint| format!("\n  {hint}")));
        text
    };
    all.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// `windrose volume delete` for a volume with a replica on a node that does not run.
pub(crate) fn still_deleting(volume: &Volume) -> String {
    let nodes: Vec<_> = volume.replicas.iter().map(|replica| replica.node.as_str()).collect();
    format!(
        "Volume {} is being deleted: its replica on {} is erased when that node runs again; until \
         then its name cannot be reused (see `windrose status`).",
        volume.name,
        nodes.join(", ")
    )
}

/// `windrose volume mirror verify`.
pub(crate) fn verification(name: &VolumeName, found: &Verification) -> String {
    let compared = Size(found.compared_bytes);
    let copies = match found.replicas.as_slice() {
        [] => format!("The replicas of volume {name}"),
        copies => format!("The replicas of volume {name} on {}", copies.join(", ")),
    };
    let mut lines = vec![match (found.mismatches.len(), found.unreadable_ranges) {
        (0, _) if found.compared_bytes == 0 => {
            format!("Nothing of volume {name} was compared.")
        }
        (0, 0) => format!("{copies} are equal ({compared} compared)."),
        (0, _) => format!(
            "{copies} are equal as far as they could be read ({compared} compared); other ranges \
             were not compared."
        ),
        (n, _) => {
            format!("{copies} differ in {} ({compared} compared):", plural(n, "range"))
        }
    }];
    lines.extend(
        found
            .mismatches
            .iter()
            .map(|d| format!("  {} at {} on {}", plural(d.bytes, "byte"), d.start_bytes, d.node)),
    );
    if found.unreadable_ranges > 0 {
        lines.push(format!(
            "{} could not be read from some replica: see `windrose status`, and the log of its \
             node.",
            plural(found.unreadable_ranges, "range")
        ));
    }
    if !found.skipped.is_empty() {
        let nodes = found.skipped.join(", ");
        lines.push(format!("Not compared, as they are not in sync: the replicas on {nodes}."));
    }
    if found.repaired_bytes > 0 {
        lines.push(format!("{} were rewritten on all replicas.", Size(found.repaired_bytes)));
    }
    lines.join("\n")
}

/// `windrose volume reservations`.
pub(crate) fn reservations(name: &VolumeName, found: &Reservations) -> String {
    if let Some(initiator) = &found.spc2_holder {
        return format!("{initiator} holds an exclusive reservation of volume {name} (RESERVE).");
    }
    if found.registrations.is_empty() {
        return format!("Volume {name} has no reservations or registrations.");
    }
    let kind = found.reservation_type.as_deref().unwrap_or("none, only registrations");
    let ends = if found.aptpl { "outlives" } else { "ends with" };
    let rows = found.registrations.iter().map(|r| {
        let holds = if r.holder { "yes" } else { "" };
        vec![r.initiator.clone(), r.relative_port_id.to_string(), r.key.clone(), holds.to_owned()]
    });
    let table = table(&["INITIATOR", "PORT", "KEY", "HOLDER"], &[1], rows);
    format!("Reservation of volume {name}: {kind}; {ends} a loss of power of all nodes.\n{table}")
}

fn replica_state(state: &ReplicaState) -> String {
    match state {
        ReplicaState::InSync => "in sync".into(),
        ReplicaState::Resyncing { done_bytes, total_bytes, eta_s, unreadable } => {
            let eta = match (eta_s, unreadable.first()) {
                (Some(s), _) => format!(", {s} s left"),
                (None, Some(first)) => {
                    format!(
                        ", stopped at data that no replica can read, from byte {}",
                        first.start_bytes
                    )
                }
                (None, None) => String::new(),
            };
            format!("resyncing, {} of {}{eta}", Size(*done_bytes), Size(*total_bytes))
        }
        ReplicaState::OutOfSync => "out of sync".into(),
        ReplicaState::Creating => "being created".into(),
        ReplicaState::Removing => "being removed".into(),
        ReplicaState::Failed { reason } => format!("failed: {reason}"),
        ReplicaState::Unknown => "state unknown".into(),
    }
}

/// `windrose volume show`.
pub(crate) fn volume(v: &Volume, api: &ApiAddress) -> String {
    let mut facts = vec![
        ("Volume", v.name.to_string()),
        ("State", state(v).to_owned()),
        ("Size", format!("{} ({} bytes)", Size(v.size_bytes), v.size_bytes)),
        ("Used", v.allocated_bytes.map_or("unknown".to_owned(), |b| Size(b).to_string())),
        ("Space", if v.thin { "allocated when written" } else { "all allocated" }.to_owned()),
        ("Block size", v.block_size.bytes().to_string()),
        ("Stored in", replicas(&v.replicas)),
        ("Replicas", format!("{} in sync", replica_counts(v))),
        ("Identity", v.id.to_string()),
        ("Sessions", v.sessions.to_string()),
    ];
    if let VolumeState::Offline { reason } | VolumeState::Remote { reason } = &v.state {
        facts.insert(2, ("Reason", reason.clone()));
    }
    facts.extend(access(&v.access));
    if let Some(iscsi) = &v.iscsi {
        facts.push(("iSCSI", lun_text(v, iscsi)));
    }
    if let Some(nvme) = &v.nvme {
        facts.push(("NVMe/TCP", format!("{} namespace {}", nvme.subsystem, nvme.namespace)));
    }
    if let Some(vhost_user) = &v.vhost_user {
        let no_socket = || "not at this node".to_owned();
        let socket = vhost_user.socket.as_ref();
        facts
            .push(("vhost-user", socket.map_or_else(no_socket, |path| path.display().to_string())));
    }
    format!("{}{}", format_facts(&facts), connect_help::instructions(v, api))
}

/// Which initiators have access, how they authenticate, and which use TLS.
fn access(access: &Access) -> Vec<(&'static str, String)> {
    let names: Vec<_> = access.initiators.iter().map(ToString::to_string).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join("\n") };
    let mut facts = vec![("Allowed", names)];
    if let Some(user) = &access.chap_user {
        let mutual = access.chap_mutual_user.as_ref();
        let mutual = mutual.map(|m| format!(", mutual as {}", m.as_str())).unwrap_or_default();
        facts.push(("CHAP", format!("user {}{mutual}", user.as_str())));
    }
    let own = |o: &InitiatorChapUser| {
        let mutual = o.mutual_user.as_ref().map(|m| format!(", mutual as {}", m.as_str()));
        format!("{}: user {}{}", o.initiator, o.user.as_str(), mutual.unwrap_or_default())
    };
    if !access.chap_initiators.is_empty() {
        let all: Vec<_> = access.chap_initiators.iter().map(own).collect();
        facts.push(("Own CHAP", all.join("\n")));
    }
    let host = |h: &DhchapHost| format!("{}{}", h.host, if h.mutual { ", mutual" } else { "" });
    if !access.dhchap_hosts.is_empty() {
        let all: Vec<_> = access.dhchap_hosts.iter().map(host).collect();
        facts.push(("DH-HMAC-CHAP", all.join("\n")));
    }
    let host = |h: &TlsHost| format!("{}{}", h.host, if h.required { "" } else { ", optional" });
    if !access.tls_hosts.is_empty() {
        let all: Vec<_> = access.tls_hosts.iter().map(host).collect();
        facts.push(("TLS", all.join("\n")));
    }
    facts
}

/// The volume's LUN at its target, and the LUNs of other volumes there.
fn lun_text(v: &Volume, iscsi: &IscsiExport) -> String {
    let owner = match &iscsi.owner {
        owner if *owner == v.name => String::new(),
        owner => format!(", target of volume {owner}"),
    };
    let mut text = format!("{} LUN {}{owner}", iscsi.target, iscsi.lun);
    for other in &iscsi.other_luns {
        text.push_str(&format!("\nLUN {} there is volume {}", other.lun, other.volume));
    }
    text
}

/// Formats names and values, one per line; further lines of a value are indented below it.
fn format_facts(facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    let mut text = String::new();
    for (name, value) in facts {
        for (i, line) in value.lines().enumerate() {
            let name = if i == 0 { name } else { "" };
            text.push_str(format!("{name:width$}{line}").trim_end());
            text.push('\n');
        }
    }
    text
}

fn status_text(s: &Status) -> String {
    let headline = match s.verdict {
        Verdict::Unavailable if s.isolated => {
            "Some of your data cannot be reached, as far as this node knows, which is isolated \
             from all others."
        }
        Verdict::Safe => "Your data is safe.",
        Verdict::AtRisk => "Your data can be reached, but is at risk.",
        Verdict::Unavailable => "Some of your data cannot be reached.",
    };
    let mut text = format!("{headline}\n");
    for finding in &s.findings {
        let mark = match finding.severity {
            Severity::Critical => "!!",
            Severity::Warning => " !",
            Severity::Note => "  ",
        };
        text.push_str(&format!("{mark} {}: {}\n", finding.subject, finding.message));
        if let Some(hint) = &finding.hint {
            text.push_str(&format!("     {hint}\n"));
        }
    }
    let free = format!(
        "{} free of {} in {}",
        Size(s.capacity.data_dir_free_bytes),
        Size(s.capacity.data_dir_bytes),
        s.node.data_dir.display()
    );
    let memory = format!(
        "{} free of {}, {} waiting",
        Size(s.memory.free_bytes),
        Size(s.memory.total_bytes),
        plural(s.memory.waiting_commands, "command")
    );
    let node = format!(
        "{}, version {}, process {}, up {}",
        s.node.name,
        s.node.version,
        s.node.pid,
        format_duration(s.node.uptime_s)
    );
    let volumes = format!(
        "{} online, {} offline, {} provisioned",
        s.volumes.online,
        s.volumes.offline,
        Size(s.capacity.provisioned_bytes)
    );
    text.push('\n');
    text.push_str(&format_facts(&[
        ("Node", node),
        ("Volumes", volumes),
        ("Sessions", s.sessions.to_string()),
        ("Space", free),
        ("Memory", memory),
        ("Cores", format!("{}, disks through {}", s.node.cores, s.node.disk_backend)),
    ]));
    text
}

fn sessions_text(sessions: &SessionList) -> String {
    if sessions.sessions.is_empty() {
        return "No initiator is logged in.".to_owned();
    }
    let head = ["PROTOCOL", "INITIATOR", "FROM", "VOLUME", "CONNECTIONS", "CORE", "SINCE"];
    let row = |s: &Session| {
        vec![
            format!("{}{}", s.protocol, if s.tls { " + TLS" } else { "" }),
            s.initiator.clone(),
            s.peer.clone(),
            match s.volumes.as_slice() {
                [] if s.target.is_empty() => "(discovery)".to_owned(),
                [] => "(none any more)".to_owned(),
                volumes => volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            },
            s.connections.to_string(),
            s.core.to_string(),
            format_duration(s.age_s),
        ]
    };
    table(&head, &[4, 5], sessions.sessions.iter().map(row))
}

/// Formats seconds in the two largest non-zero units.
fn format_duration(seconds: u64) -> String {
    let (d, h, m, s) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    match (d, h, m) {
        (0, 0, 0) => format!("{s} s"),
        (0, 0, _) => format!("{m} min {s} s"),
        (0, _, _) => format!("{h} h {m} min"),
        _ => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests;
