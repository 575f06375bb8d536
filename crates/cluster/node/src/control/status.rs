//! One answer to "is my data safe?".

use std::collections::{BTreeSet, HashSet};
use std::sync::PoisonError;

use api::{
    Capacity, Finding, Health, Memory, NodeInfo, Severity, Size, Status, Verdict, VolumeCounts,
    VolumeName,
};

use target::Clients;
use tokio::time::Instant;
use uuid::Uuid;

use super::copy_state::lost_for_good;
use super::secrets::Locked;
use super::together::reservations_hint;
use super::view::sessions;
use super::waits::Waits;
use super::why::BY_ITSELF;
use super::{
    Control, FileSystem, PoolFacts, PoolSpace, Space, Together, clients, memory, pool_view,
};
use crate::engine::{CoreReport, Scope, VolumeReport};
use crate::meta::Trouble;
use crate::reconcile::Observed;
use crate::record::{Method, Stage, Stored};

/// What the status is made of.
#[derive(Debug)]
pub struct Facts {
    /// The node.
    pub node: NodeInfo,
    /// Whether it has opened its volumes and is not about to stop.
    pub serving: bool,
    /// What its start waits for, if anything.
    pub waits_for: Option<Waits>,
    /// Its volumes.
    pub volumes: Vec<(Stored, Observed)>,
    /// Records of the store that cannot be read, as errors tell of them.
    pub damaged: Vec<String>,
    /// What is wrong with the store itself.
    pub store: Option<Trouble>,
    /// Where a copy of this node runs that wants to be it, if one does.
    pub rival: Option<String>,
    /// Why the data directory has no anchor, if it has none.
    pub unanchored: Option<String>,
    /// Whether the nodes of its cluster speak in plain text.
    pub is_plain: bool,
    /// Secrets that cannot be read, and why not.
    pub locked: Vec<Locked>,
    /// What its cores do.
    pub cores: Vec<CoreReport>,
    /// What is odd about the clients of its API.
    pub api_clients: Clients,
    /// The space that volumes take and have.
    pub space: Space,
    /// Its pools of disks, by name.
    pub pools: Vec<PoolFacts>,
    /// Files of pools that cannot be read, as errors tell of them.
    pub damaged_pools: Vec<String>,
    /// Free space in a file system below which the status warns, in percent of its size.
    pub low_space_percent: u64,
    /// What there is to say of images that no record names.
    pub images: Vec<Finding>,
    /// What there is to say of nodes that want to join.
    pub joins: Vec<Finding>,
    /// The cluster, of a node in one.
    pub together: Option<Together>,
}

impl Control {
    /// Whether the node answers and serves.
    #[must_use]
    pub fn health(&self) -> Health {
        Health { version: env!("CARGO_PKG_VERSION").to_owned(), serving: self.is_serving() }
    }

    /// The node's state.
    pub async fn status(&self) -> Status {
        assess(&self.facts(Scope::All).await)
    }

    /// What status and metrics are made of.
    pub async fn facts(&self, scope: Scope) -> Facts {
        let settings = &self.0.settings;
        let volumes = self.0.state.all();
        let (report, look) = (self.0.engine.report(scope), self.space_of(&volumes));
        let (cores, space, pools) = tokio::join!(report, look, self.pool_facts());
        let damaged_pools = self.0.pools.damaged();
        let damaged_pools = damaged_pools.iter().map(ToString::to_string).collect();
        let together = self.together(&cores).await;
        let store_answers = together.as_ref().map(|together| together.store.error.is_none());
        let mut joins = match store_answers {
            Some(answers) => self.join_findings(answers).await,
            None => Vec::new(),
        };
        if store_answers == Some(true) {
            joins.extend(self.rotation_finding().await);
        }
        Facts {
            node: NodeInfo {
                name: settings.name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_s: self.0.started.elapsed().as_secs(),
                data_dir: settings.data_dir.clone(),
                cores: u32::try_from(self.0.engine.cores()).unwrap_or(u32::MAX),
                disk_backend: self.0.engine.disk_backend().to_owned(),
            },
            serving: self.is_serving(),
            waits_for: self.waiting(),
            volumes,
            damaged: self.0.state.damaged(),
            store: self.0.meta.trouble().await.ok().flatten(),
            rival: self.0.part.as_ref().and_then(|part| part.rival()).map(|life| life.place()),
            unanchored: settings.unanchored.clone(),
            is_plain: self.speaks_plain_text(),
            locked: self.locked().await,
            cores,
            api_clients: self.api_clients(),
            space,
            pools,
            damaged_pools,
            low_space_percent: settings.low_space_percent,
            images: self.image_findings(),
            joins,
            together,
        }
    }
}

impl Control {
    fn api_clients(&self) -> Clients {
        let guesses = self.0.guesses.lock().unwrap_or_else(PoisonError::into_inner);
        let failing = guesses.failing(Instant::now());
        let (proven, proofs) = (guesses.proven(), guesses.counts());
        Clients { failing, proven, proofs, ..Clients::default() }
    }
}

impl Facts {
    /// Tells whether a volume serves, at whichever node, as far as is known here: what nobody knows of does not.
    pub(crate) fn serving(&self) -> impl Fn(&(Stored, Observed)) -> bool {
        let unusable = self.reports().filter(|report| is_unusable(report)).map(|report| report.id);
        let stopped = self.pools.iter().filter(|pool| pool.has_stopped());
        let stopped = stopped.flat_map(|pool| pool.volumes.iter().map(|(id, _)| *id));
        let unusable: HashSet<_> = unusable.chain(stopped).collect();
        move |(stored, observed)| {
            let id = stored.record.id;
            let serves = match &self.together {
                Some(together) => !together.served_by(id).is_empty(),
                None => matches!(observed, Observed::Open { .. }) && !unusable.contains(&id),
            };
            stored.record.stage == Stage::Ready && serves
        }
    }

    fn reports(&self) -> impl Iterator<Item = &VolumeReport> {
        self.cores.iter().flat_map(|core| &core.volumes)
    }
}

/// Whether a volume that is open on this node serves nobody here.
fn is_unusable(report: &VolumeReport) -> bool {
    report.lost.is_some() || report.is_dead || report.reservations.is_some()
}

/// Why a volume of a node by itself serves nobody though it is open, and the next step.
pub(super) fn unusable(name: &VolumeName, report: &VolumeReport) -> Option<(String, String)> {
    if let Some(why) = &report.lost {
        return Some((
            format!("its image is used no more on this node: {why}"),
            "two machines use one disk: have one of them let go of it, then restart windrose on this node \
             (systemctl restart windrose)"
                .to_owned(),
        ));
    }
    if report.is_dead {
        let message = "its disk has failed a flush, or is gone: nothing is read or written any more, as what was written \
                       last may be lost";
        let hint = "look at that disk and at what uses the volume, then restart windrose on this node (systemctl restart \
                    windrose)";
        return Some((message.to_owned(), hint.to_owned()));
    }
    let why = report.reservations?;
    let message = format!("its reservations cannot be read ({why}): initiators are refused");
    Some((message, reservations_hint(name.as_str(), None)))
}

/// The status that `facts` are.
#[must_use]
pub fn assess(facts: &Facts) -> Status {
    let mut findings = Vec::new();
    volume_findings(facts, &mut findings);
    pool_findings(facts, &mut findings);
    failure_findings(facts, &mut findings);
    unusable_findings(facts, &mut findings);
    guest_findings(facts, &mut findings);
    clients::findings(facts, &mut findings);
    secret_findings(facts, &mut findings);
    space_findings(facts, &mut findings);
    memory::findings(facts, &mut findings);
    node_findings(facts, &mut findings);
    findings.extend(facts.images.iter().chain(&facts.joins).cloned());
    if let Some(together) = &facts.together {
        together.findings(&mut findings);
        let records = facts.volumes.iter().map(|(s, _)| &s.record);
        records.for_each(|record| {
            together.volume_findings(record, &mut findings);
            findings.extend(together.deletion_finding(record));
        });
    }
    findings.sort_by_key(|f: &Finding| std::cmp::Reverse(f.severity));
    let verdict = match findings.first().map(|f| f.severity) {
        Some(Severity::Critical) => Verdict::Unavailable,
        Some(Severity::Warning) => Verdict::AtRisk,
        Some(Severity::Note) | None => Verdict::Safe,
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let total = count(facts.volumes.len());
    let serves = facts.serving();
    let online = count(facts.volumes.iter().filter(|volume| serves(volume)).count());
    let (data_dir_bytes, data_dir_free_bytes) = facts.space.data_dir.unwrap_or_default();
    Status {
        verdict,
        cut_off: facts.together.as_ref().is_some_and(Together::is_cut_off),
        findings,
        node: facts.node.clone(),
        volumes: VolumeCounts { total, online, offline: total - online },
        sessions: count(sessions(&facts.volumes, &facts.cores).len()),
        capacity: Capacity {
            provisioned_bytes: facts.volumes.iter().map(|(s, _)| s.record.size_bytes).sum(),
            data_dir_bytes,
            data_dir_free_bytes,
        },
        memory: Memory {
            pool_bytes: facts.cores.iter().map(|c| c.pool.total).sum(),
            pool_free_bytes: facts.cores.iter().map(|c| c.pool.free).sum(),
            waiting: facts.cores.iter().map(|c| c.pool.waiting).sum(),
        },
    }
}

pub(super) fn finding(
    severity: Severity,
    subject: impl Into<String>,
    message: impl Into<String>,
    hint: Option<&str>,
) -> Finding {
    let (subject, message, hint) = (subject.into(), message.into(), hint.map(Into::into));
    Finding { severity, subject, message, hint }
}

/// Volumes that do not serve, or whom nobody may reach.
fn volume_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for (stored, observed) in &facts.volumes {
        let record = &stored.record;
        let subject = format!("volume {}", record.name);
        let found = match (record.stage, observed) {
            // Virtual machines are not asked for a name.
            (Stage::Ready, Observed::Open { .. })
                if record.allow.is_empty() && !record.protocols.vhost_user =>
            {
                let message = "no initiator is allowed to reach it";
                let hint = format!("windrose volume allow {} INITIATOR", record.name);
                finding(Severity::Note, subject, message, Some(&hint))
            }
            (Stage::Ready, Observed::Open { .. }) => continue,
            // In a cluster it is told with the other copies.
            (Stage::Ready, Observed::Broken { .. } | Observed::Stuck { .. })
                if facts.together.as_ref().is_some_and(|t| t.tells_of_own_copy(record)) =>
            {
                continue;
            }
            (Stage::Ready, Observed::Broken { reason } | Observed::Stuck { reason }) => {
                let lost = lost_for_good(&record.name);
                let hint =
                    format!("remove the obstacle: the node tries again every 30 seconds; {lost}");
                let elsewhere = facts.together.is_some();
                let severity = if elsewhere { Severity::Warning } else { Severity::Critical };
                finding(severity, subject, reason, Some(&hint))
            }
            // In a cluster, other nodes may have it.
            (Stage::Ready, Observed::Closed | Observed::Erased) if facts.together.is_none() => {
                finding(Severity::Critical, subject, "it is being opened", Some(BY_ITSELF))
            }
            (_, Observed::Stuck { reason }) => {
                let hint = format!(
                    "remove the obstacle and delete it again: windrose volume delete {}",
                    record.name
                );
                finding(Severity::Warning, subject, reason, Some(&hint))
            }
            _ => continue,
        };
        findings.push(found);
    }
}

/// Volumes whose initiators cannot prove who they are, because nobody knows what they have to prove.
fn secret_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for Locked { volume, method, why } in &facts.locked {
        let (message, hint) = match method {
            Method::Chap => (
                format!(
                    "its CHAP secrets cannot be read: {why}; no iSCSI initiator can log in to it"
                ),
                format!(
                    "restore the keys, or set CHAP again: windrose volume chap {volume} USER:SECRET-FILE"
                ),
            ),
            Method::Dhchap => (
                format!(
                    "its secrets of NVMe hosts cannot be read: {why}; no host that has one can connect to it"
                ),
                format!(
                    "restore the keys, or set the secrets again: windrose volume dhchap {volume} --host NQN \
                     --secret FILE"
                ),
            ),
            Method::Tls => (
                format!(
                    "its TLS keys of NVMe hosts cannot be read: {why}; no host can connect to it by TLS"
                ),
                format!(
                    "restore the keys, or set the hosts' again: windrose volume tls {volume} --host NQN --key FILE"
                ),
            ),
        };
        let subject = format!("volume {volume}");
        findings.push(finding(Severity::Critical, subject, message, Some(&hint)));
    }
}

/// Volumes whose disks fail commands.
fn failure_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for report in facts.cores.iter().flat_map(|c| &c.volumes) {
        let failed: u64 = report.kinds.iter().map(|k| k.failed - k.without_space).sum();
        let without_space: u64 = report.kinds.iter().map(|k| k.without_space).sum();
        let known = facts.volumes.iter().find(|(s, _)| s.record.id == report.id);
        let Some((Stored { record, .. }, _)) = known else { continue };
        let subject = || format!("volume {}", record.name);
        // While there is none, the finding about where it lies says so.
        if without_space > 0 && !facts.space.is_full(report.id) {
            let message = format!(
                "{} failed for want of space since it was opened",
                wire::count(without_space, "command")
            );
            let hint = "there is room now; this is counted anew when the volume is opened again";
            findings.push(finding(Severity::Note, subject(), message, Some(hint)));
        }
        if failed > 0 {
            let message = format!("{} failed since it was opened", wire::count(failed, "command"));
            let hint = "see the node's log (journalctl -u windrose), and look at the disk; this is counted anew when the \
                        volume is opened again";
            findings.push(finding(Severity::Warning, subject(), message, Some(hint)));
        }
    }
}

/// Volumes that are open on this node, and cannot be used here.
fn unusable_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for report in facts.reports().filter(|report| is_unusable(report)) {
        let known = facts.volumes.iter().find(|(s, _)| s.record.id == report.id);
        let Some((Stored { record, .. }, _)) = known else { continue };
        // In a cluster the copies tell of the rest.
        if facts.together.is_some() && report.lost.is_none() {
            continue;
        }
        if let Some((message, hint)) = unusable(&record.name, report) {
            let alone = facts.together.is_none();
            let severity = if alone { Severity::Critical } else { Severity::Warning };
            let subject = format!("volume {}", record.name);
            findings.push(finding(severity, subject, message, Some(&hint)));
        }
    }
}

/// Virtual machines that wait: they have this node alone.
fn guest_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for core in &facts.cores {
        let unserved = core
            .volumes
            .iter()
            .filter(|v| v.mirror.as_ref().is_some_and(|m| m.access == block::Access::Unavailable));
        let waits = |v: &VolumeReport| core.guests.iter().any(|guest| guest.volume == v.id);
        for report in unserved.filter(|v| waits(v)) {
            let Some((stored, _)) = facts.volumes.iter().find(|(s, _)| s.record.id == report.id)
            else {
                continue;
            };
            let subject = format!("volume {}", stored.record.name);
            let message =
                "a virtual machine on this node waits for it, as this node does not serve it now";
            let hint = format!(
                "it goes on when the node serves the volume again (windrose node resume {}, if it is drained)",
                facts.node.name
            );
            findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        }
    }
}

/// Pools that are not what they should be.
fn pool_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for damage in &facts.damaged_pools {
        let hint = "the pool is left alone; repair the file, and restart the node";
        findings.push(finding(Severity::Critical, "pools", damage, Some(hint)));
    }
    for pool in &facts.pools {
        pool_view::findings(pool, facts.together.is_some(), findings);
    }
}

/// Too little space for what has been promised.
fn space_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for FileSystem { path, bytes, free, volumes } in &facts.space.file_systems {
        let subject = format!("file system of {}", path.display());
        let hint = "make room in it: writes that need space fail when there is none";
        findings.extend(space_finding(facts, (subject, hint, FAIL), (*bytes, *free), volumes));
    }
    for PoolSpace { name, bytes, free, lacks_disk, volumes } in &facts.space.pools {
        let (add, when_full) = match lacks_disk {
            true => ("replace the disk that is out, or add disks", GO_ELSEWHERE),
            false => ("add disks", FAIL),
        };
        let hint = format!(
            "{add}: windrose pool add {name} DISK; or delete what is not needed: writes that need space fail when there \
             is none"
        );
        let subject = format!("pool {name}");
        let said = (subject, &*hint, when_full);
        findings.extend(space_finding(facts, said, (*bytes, *free), volumes));
    }
}

/// What becomes of writes that need space where there is none,
const FAIL: &str = "writes that need space fail";
/// and in a pool of which a disk is out.
const GO_ELSEWHERE: &str = "what needs space is kept without the disk that is out, or fails";

fn space_finding(
    facts: &Facts,
    (subject, hint, when_full): (String, &str, &str),
    (bytes, free): (u64, u64),
    volumes: &[Uuid],
) -> Option<Finding> {
    let promised = thin_promises(facts, volumes);
    if promised > 0 && free < super::space::FULL {
        let message =
            format!("it is full: thin volumes may still take {}, and {when_full}", Size(promised));
        return Some(finding(Severity::Warning, subject, message, Some(hint)));
    }
    if promised > 0 && free < bytes / 100 * facts.low_space_percent {
        let message = format!(
            "{} of {} are free, and thin volumes may still take {}",
            Size(free),
            Size(bytes),
            Size(promised)
        );
        return Some(finding(Severity::Warning, subject, message, Some(hint)));
    }
    let message =
        format!("thin volumes may still take {}, {} are free", Size(promised), Size(free));
    (promised > free).then(|| finding(Severity::Note, subject, message, Some("add space in time")))
}

/// What those of these volumes that are thin may still take, in bytes.
fn thin_promises(facts: &Facts, volumes: &[Uuid]) -> u64 {
    let taken = |id| facts.space.taken.get(&id).copied().unwrap_or(0);
    let volumes: BTreeSet<_> = volumes.iter().collect();
    let records = facts.volumes.iter().map(|(s, _)| &s.record);
    let thin = records.filter(|r| r.thin && volumes.contains(&r.id));
    thin.map(|r| r.size_bytes.saturating_sub(taken(r.id))).fold(0, u64::saturating_add)
}

fn node_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for damage in &facts.damaged {
        let hint = format!("what it is the record of is not served; {}", super::RESTORE);
        findings.push(finding(Severity::Critical, "store", damage, Some(&hint)));
    }
    store_findings(facts, findings);
    if facts.is_plain {
        let message = "its nodes and their store speak in plain text: whoever reaches the network between them can read \
            and change everything";
        let hint = "keep that network to the nodes alone; a cluster that is formed without --insecure has certificates";
        findings.push(finding(Severity::Note, "cluster", message, Some(hint)));
    }
    let subject = format!("node {}", facts.node.name);
    if let Some(place) = &facts.rival {
        let message = format!(
            "a copy of it was started on {place}: that serves nothing, and this node goes on"
        );
        let hint = "stop the copy; before it joins as a node of its own, set data_dir in its configuration to a new, empty \
            directory: images may lie in the old one";
        findings.push(finding(Severity::Warning, subject.clone(), message, Some(hint)));
    }
    if let Some(Waits { what, next, .. }) = &facts.waits_for {
        let message = format!("it serves nothing yet and waits for its cluster: {what}");
        findings.push(finding(Severity::Critical, subject.clone(), message, Some(next)));
    } else if !facts.serving {
        let message = "it is starting or stopping";
        // In a cluster others serve what is known of meanwhile.
        let elsewhere = facts.together.is_some() && !facts.volumes.is_empty();
        let severity = if elsewhere { Severity::Warning } else { Severity::Critical };
        findings.push(finding(severity, subject.clone(), message, Some(BY_ITSELF)));
    }
    if facts.node.disk_backend == "threads" {
        let message = "disks are reached through threads, which costs speed: io_uring is not to be had, or not wanted";
        let hint = "allow io_uring (sysctl kernel.io_uring_disabled=0, and the container's seccomp profile), and see \
                    disks.engine in the configuration";
        findings.push(finding(Severity::Note, subject.clone(), message, Some(hint)));
    }
    if !facts.volumes.is_empty() && facts.together.is_none() {
        let message = "each volume has one copy, on this node: keep backups";
        let hint = "for a second copy on another node: windrose cluster init";
        findings.push(finding(Severity::Note, subject, message, Some(hint)));
    }
}

/// What is wrong with the store itself, and with what it lies in.
fn store_findings(facts: &Facts, findings: &mut Vec<Finding>) {
    let dir = facts.node.data_dir.display();
    if let Some(why) = &facts.unanchored {
        let message = format!(
            "data_dir {dir} has no anchor outside of it ({why}): if it is not mounted one day, it looks \
            like an empty node"
        );
        let hint = "set anchor_dir to a directory that the node may write, on another file system";
        findings.push(finding(Severity::Note, "store", message, Some(hint)));
    }
    let (severity, message, hint) = match &facts.store {
        None => return,
        Some(Trouble::NoRoom(why)) => (
            Severity::Warning,
            format!(
                "there is no room ahead of the store in {dir} ({why}): volumes can be deleted, other changes may fail"
            ),
            "free space in the file system of data_dir; the node takes its room back by itself"
                .to_owned(),
        ),
        Some(Trouble::Failing(why)) => (
            Severity::Warning,
            format!("{why}: nothing can be changed; volumes that are open are served"),
            "look at the disk of data_dir; the node tries again by itself".to_owned(),
        ),
        Some(Trouble::Damaged(why)) => (
            Severity::Critical,
            format!(
                "{why}: nothing can be changed; volumes that are open are served until the node ends"
            ),
            super::RESTORE.to_owned(),
        ),
    };
    findings.push(finding(severity, "store", message, Some(&hint)));
}

#[cfg(test)]
mod truth;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::{GuestReport, KindReport, MirrorReport};
    use crate::meta::Revision;
    use crate::metrics::tests::mirror;
    use crate::record::tests::record;

    pub(in super::super) fn facts(volumes: Vec<(Stored, Observed)>) -> Facts {
        Facts {
            node: NodeInfo {
                name: "n".into(),
                version: "0".into(),
                pid: 1,
                uptime_s: 2,
                data_dir: "/v".into(),
                cores: 1,
                disk_backend: "io_uring".into(),
            },
            serving: true,
            waits_for: None,
            volumes,
            damaged: Vec::new(),
            store: None,
            rival: None,
            unanchored: None,
            is_plain: false,
            locked: Vec::new(),
            images: Vec::new(),
            joins: Vec::new(),
            together: None,
            cores: Vec::new(),
            api_clients: Clients::default(),
            space: Space { data_dir: Some((100 << 30, 50 << 30)), ..Space::default() },
            pools: Vec::new(),
            damaged_pools: Vec::new(),
            low_space_percent: 10,
        }
    }

    /// All volumes in one file system.
    pub(super) fn with_space(facts: &mut Facts, bytes: u64, free: u64) {
        let volumes = facts.volumes.iter().map(|(s, _)| s.record.id).collect();
        let home = FileSystem { path: "/srv".into(), bytes, free, volumes };
        facts.space.file_systems = vec![home];
    }

    pub(in super::super) fn volume(name: &str, observed: Observed) -> (Stored, Observed) {
        let mut record = record(name);
        record.allow.insert(api::Initiator::Any);
        (Stored { record, revision: Revision(1) }, observed)
    }

    pub(in super::super) fn open() -> Observed {
        let image = crate::engine::Image { image: Uuid::nil(), size_bytes: 1, generation: 2 };
        Observed::Open { core: 0, image, published: None }
    }

    fn verdict(facts: &Facts) -> (Verdict, String) {
        let status = assess(facts);
        (status.verdict, status.findings.first().map(|f| f.message.clone()).unwrap_or_default())
    }

    #[test]
    fn a_node_whose_volumes_serve_is_safe() {
        let status = assess(&facts(vec![volume("a", open()), volume("b", open())]));
        assert_eq!(status.verdict, Verdict::Safe);
        assert_eq!(status.volumes, VolumeCounts { total: 2, online: 2, offline: 0 });
        assert_eq!(status.capacity.provisioned_bytes, 2 << 30);
        assert!(status.findings.iter().any(|f| f.message.contains("one copy")));
    }

    #[test]
    fn an_offline_volume_decides() {
        let broken = Observed::Broken { reason: "/v/b: no such file".into() };
        let mut facts = facts(vec![volume("a", open()), volume("b", broken)]);
        facts.serving = false;
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::Unavailable);
        assert_eq!(status.findings[0].subject, "volume b");
        assert_eq!((status.volumes.online, status.volumes.offline), (1, 1));
    }

    #[test]
    fn thin_volumes_on_a_full_disk_are_at_risk() {
        let mut facts = facts(vec![volume("a", open())]);
        with_space(&mut facts, 100 << 30, 1 << 30);
        assert_eq!(verdict(&facts).0, Verdict::AtRisk);
        assert!(verdict(&facts).1.contains("1 GiB of 100 GiB are free"));
        facts.low_space_percent = 0;
        assert_eq!(verdict(&facts).0, Verdict::Safe, "nobody wants to be warned");
        facts.low_space_percent = 60;
        with_space(&mut facts, 100 << 30, 59 << 30);
        assert_eq!(verdict(&facts).0, Verdict::AtRisk, "somebody wants to be warned early");
        with_space(&mut facts, 1 << 30, 1 << 29);
        facts.low_space_percent = 10;
        assert_eq!(verdict(&facts).0, Verdict::Safe, "promised more than there is: a note");
        facts.volumes[0].0.record.thin = false;
        with_space(&mut facts, 100 << 30, 0);
        assert_eq!(verdict(&facts).0, Verdict::Safe, "all space is taken already");
    }

    #[test]
    fn pools_are_part_of_the_verdict() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.pools.push(pool_view::tests::facts("tank"));
        assert_eq!(verdict(&facts).0, Verdict::Safe);
        let report = facts.pools[0].report.as_mut().unwrap();
        report.bears = Some(0);
        report.disks[0].state = crate::engine::PoolDiskState::Out;
        assert_eq!(verdict(&facts).0, Verdict::AtRisk);
        assert!(verdict(&facts).1.contains("disk S0 at /dev/sd0 is out"));
        facts.damaged_pools.push("/v/pools/zoo.json: it has format 2".into());
        assert_eq!(verdict(&facts).0, Verdict::Unavailable);
    }

    #[test]
    fn a_pool_without_room_is_at_risk() {
        let mut facts = facts(vec![volume("a", open())]);
        let volumes = vec![facts.volumes[0].0.record.id];
        let (name, bytes, free) = ("tank".parse().unwrap(), 100 << 30, 0);
        facts.space.pools = vec![PoolSpace { name, bytes, free, lacks_disk: false, volumes }];
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::AtRisk);
        assert_eq!(status.findings[0].subject, "pool tank");
        assert!(status.findings[0].hint.as_ref().unwrap().contains("pool add tank"));
        facts.space.pools[0].free = 50 << 30;
        assert_eq!(verdict(&facts).0, Verdict::Safe);
    }

    /// A core with one volume.
    pub(in super::super) fn core(id: Uuid) -> CoreReport {
        let report = VolumeReport { mirror: None, ..crate::metrics::tests::volume_report(id) };
        CoreReport {
            core: 0,
            sessions: Vec::new(),
            guests: Vec::new(),
            refused: 0,
            clients: Clients::default(),
            pool: rt::buf::Pool::new(16 << 20).unwrap().usage(),
            volumes: vec![report],
        }
    }

    /// A node whose every command waits for memory was once called safe.
    #[test]
    fn memory_that_is_short_is_a_finding_with_the_core_and_the_setting() {
        let mut facts = facts(vec![volume("a", open())]);
        let id = facts.volumes[0].0.record.id;
        let mut core = core(id);
        core.core = 3;
        facts.cores = vec![core];
        assert_eq!(assess(&facts).verdict, Verdict::Safe);
        facts.cores[0].pool.short_for = Some(std::time::Duration::from_secs(75));
        (facts.cores[0].pool.waiting, facts.cores[0].pool.refused) = (7, 11);
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::AtRisk);
        let found = &status.findings[0];
        for part in ["core 3", "75 s", "7 commands waiting", "11 told"] {
            assert!(found.message.contains(part), "{}", found.message);
        }
        assert!(found.hint.as_ref().is_some_and(|hint| hint.contains("raise cores.pool")));
    }

    #[test]
    fn a_guest_that_waits_is_named() {
        let mut facts = facts(vec![volume("a", open())]);
        let id = facts.volumes[0].0.record.id;
        let waits = |facts: &Facts| {
            let found = assess(facts).findings;
            found.iter().any(|f| f.subject == "volume a" && f.message.contains("a virtual machine"))
        };
        let unserved = MirrorReport { access: block::Access::Unavailable, ..mirror() };
        facts.cores.push(core(id));
        facts.cores[0].volumes[0].mirror = Some(unserved);
        assert!(!waits(&facts), "nobody is there");
        let age = std::time::Duration::from_secs(1);
        facts.cores[0].guests.push(GuestReport { volume: id, at: "/v/a.sock".into(), age });
        assert!(waits(&facts));
        facts.cores[0].volumes[0].mirror = Some(mirror());
        assert!(!waits(&facts), "it is served");
    }

    #[test]
    fn failing_disks_are_a_risk() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.cores.push(core(facts.volumes[0].0.record.id));
        let failed =
            KindReport { completed: 3, failed: 2, without_space: 0, bytes: 0, latency: None };
        facts.cores[0].volumes[0].kinds[0] = failed;
        let (verdict, message) = verdict(&facts);
        assert_eq!(verdict, Verdict::AtRisk);
        assert!(message.contains("2 commands failed"), "{message}");
    }

    #[test]
    fn a_damaged_record_is_a_volume_that_cannot_be_reached() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.damaged.push("volumes/x failed: the record is damaged".into());
        let (verdict, message) = verdict(&facts);
        assert_eq!(verdict, Verdict::Unavailable);
        assert!(message.contains("volumes/x"), "{message}");
    }

    #[test]
    fn nobody_allowed_is_worth_a_note() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.volumes[0].0.record.allow.clear();
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::Safe);
        let told =
            |s: &Status| s.findings.iter().any(|f| f.message.contains("no initiator is allowed"));
        assert!(told(&status));
        facts.volumes[0].0.record.protocols.vhost_user = true;
        assert!(!told(&assess(&facts)), "virtual machines may");
    }
}
