//! The verdict on a node: one answer to "is my data safe?", with the findings that led to it.

use std::collections::BTreeSet;

use api::{Capacity, Finding, Memory, Severity, Size, Status, Verdict, VolumeCounts, VolumeName};
use cluster::store::StoreProblem;
use engine::VolumeReport;
use records::reconcile::Observed;
use records::record::{StoredVolumeRecord, VolumeAuthMethod, VolumeStage};
use uuid::Uuid;

use crate::cluster_view::ClusterView;
use crate::node_facts::{NodeFacts, UnreadableSecret, is_unusable};
use crate::replica_state::lost_image_hint;
use crate::space::{FileSystemSpace, MIN_FREE_BYTES, PoolSpace};
use crate::startup_wait::StartupWait;
use crate::unserved_volumes::reservations_hint;
use crate::volume_status::merge_sessions;
use crate::{RESTORE_HINT, WAIT_HINT, client_findings, finding, memory, pool_status};

/// Why an open volume of a standalone node does not serve, and the next step.
pub fn unusable_reason(name: &VolumeName, report: &VolumeReport) -> Option<(String, String)> {
    if let Some(why) = &report.claim_lost {
        return Some((
            format!("its image is no longer used on this node: {why}"),
            "two machines use the same disk: stop one of them from using it, then restart windrose \
             on this node (systemctl restart windrose)"
                .to_owned(),
        ));
    }
    if report.is_dead {
        let message = "its disk failed a flush, or is gone: the volume is stopped, as its last \
            writes may be lost";
        let hint = "check that disk and the users of the volume, then restart windrose on this \
            node (systemctl restart windrose)";
        return Some((message.to_owned(), hint.to_owned()));
    }
    let why = report.reservations_error?;
    let message = format!("its reservations cannot be read ({why}): initiators are refused");
    Some((message, reservations_hint(name.as_str(), None)))
}

/// Derives the status from the facts.
#[must_use]
pub fn assess(facts: &NodeFacts) -> Status {
    let mut findings = Vec::new();
    volume_findings(facts, &mut findings);
    pool_findings(facts, &mut findings);
    failure_findings(facts, &mut findings);
    unusable_findings(facts, &mut findings);
    guest_findings(facts, &mut findings);
    client_findings::findings(facts, &mut findings);
    secret_findings(facts, &mut findings);
    space_findings(facts, &mut findings);
    memory::findings(facts, &mut findings);
    node_findings(facts, &mut findings);
    findings.extend(facts.image_findings.iter().chain(&facts.join_findings).cloned());
    if let Some(cluster) = &facts.cluster {
        cluster.cluster_findings(&mut findings);
        let records = facts.volumes.iter().map(|(s, _)| &s.record);
        records.for_each(|record| {
            cluster.volume_findings(record, &mut findings);
            findings.extend(cluster.deletion_finding(record));
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
    let serves = facts.served_filter();
    let online = count(facts.volumes.iter().filter(|volume| serves(volume)).count());
    let (data_dir_bytes, data_dir_free_bytes) = facts.space.data_dir.unwrap_or_default();
    Status {
        verdict,
        isolated: facts.cluster.as_ref().is_some_and(ClusterView::is_isolated),
        findings,
        node: facts.node.clone(),
        volumes: VolumeCounts { total, online, offline: total - online },
        sessions: count(merge_sessions(&facts.volumes, &facts.cores).len()),
        capacity: Capacity {
            provisioned_bytes: facts.volumes.iter().map(|(s, _)| s.record.size_bytes).sum(),
            data_dir_bytes,
            data_dir_free_bytes,
        },
        memory: Memory {
            total_bytes: facts.cores.iter().map(|c| c.memory.total).sum(),
            free_bytes: facts.cores.iter().map(|c| c.memory.free).sum(),
            waiting_commands: facts.cores.iter().map(|c| c.memory.waiting).sum(),
        },
    }
}

/// Findings about volumes that do not serve, or that no initiator may access.
fn volume_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for (stored, observed) in &facts.volumes {
        let record = &stored.record;
        let subject = format!("volume {}", record.name);
        let found = match (record.stage, observed) {
            // Virtual machines do not identify themselves.
            (VolumeStage::Ready, Observed::Open { .. })
                if record.allow.is_empty() && !record.protocols.vhost_user =>
            {
                let message = "no initiator is allowed to access it";
                let hint = format!("windrose volume allow {} INITIATOR", record.name);
                finding(Severity::Note, subject, message, Some(&hint))
            }
            (VolumeStage::Ready, Observed::Open { .. }) => continue,
            // In a cluster, the findings about replicas cover it.
            (VolumeStage::Ready, Observed::OpenFailed { .. } | Observed::EraseFailed { .. })
                if facts.cluster.as_ref().is_some_and(|t| t.covers_local_replica(record)) =>
            {
                continue;
            }
            (
                VolumeStage::Ready,
                Observed::OpenFailed { reason } | Observed::EraseFailed { reason },
            ) => {
                let lost = lost_image_hint(&record.name);
                let hint = format!("remove the cause: the node retries every 30 seconds; {lost}");
                let elsewhere = facts.cluster.is_some();
                let severity = if elsewhere { Severity::Warning } else { Severity::Critical };
                finding(severity, subject, reason, Some(&hint))
            }
            // In a cluster, other nodes may have it.
            (VolumeStage::Ready, Observed::Closed | Observed::Erased)
                if facts.cluster.is_none() =>
            {
                finding(Severity::Critical, subject, "it is being opened", Some(WAIT_HINT))
            }
            (_, Observed::EraseFailed { reason }) => {
                let hint = format!(
                    "remove the cause and delete it again: windrose volume delete {}",
                    record.name
                );
                finding(Severity::Warning, subject, reason, Some(&hint))
            }
            _ => continue,
        };
        findings.push(found);
    }
}

/// Findings about volumes whose initiators cannot authenticate because the secrets are unreadable.
fn secret_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for UnreadableSecret { volume, method, why } in &facts.unreadable_secrets {
        let (message, hint) = match method {
            VolumeAuthMethod::Chap => (
                format!(
                    "its CHAP secrets cannot be read: {why}; no iSCSI initiator can log in to it"
                ),
                format!(
                    "restore the keys, or set CHAP again: windrose volume chap {volume} USER:SECRET-FILE"
                ),
            ),
            VolumeAuthMethod::Dhchap => (
                format!(
                    "its secrets of NVMe hosts cannot be read: {why}; no host that has one can connect to it"
                ),
                format!(
                    "restore the keys, or set the secrets again: windrose volume dhchap {volume} --host NQN \
                     --secret FILE"
                ),
            ),
            VolumeAuthMethod::Tls => (
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

/// Findings about volumes whose disks fail commands.
fn failure_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for report in facts.cores.iter().flat_map(|c| &c.volumes) {
        let failed: u64 = report.kinds.iter().map(|k| k.failed - k.without_space).sum();
        let without_space: u64 = report.kinds.iter().map(|k| k.without_space).sum();
        let known = facts.volumes.iter().find(|(s, _)| s.record.id == report.id);
        let Some((StoredVolumeRecord { record, .. }, _)) = known else { continue };
        let subject = || format!("volume {}", record.name);
        // While the file system or pool is full, its own finding covers this.
        if without_space > 0 && !facts.space.is_full(report.id) {
            let message = format!(
                "{} failed for lack of space since it was opened",
                wire::plural(without_space, "command")
            );
            let hint = "there is space now; the count restarts when the volume is next opened";
            findings.push(finding(Severity::Note, subject(), message, Some(hint)));
        }
        if failed > 0 {
            let message = format!("{} failed since it was opened", wire::plural(failed, "command"));
            let hint = "see the node's log (journalctl -u windrose), and check the disk; the count \
                restarts when the volume is next opened";
            findings.push(finding(Severity::Warning, subject(), message, Some(hint)));
        }
    }
}

/// Findings about volumes that are open on this node and not usable here.
fn unusable_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for report in facts.reports().filter(|report| is_unusable(report)) {
        let known = facts.volumes.iter().find(|(s, _)| s.record.id == report.id);
        let Some((StoredVolumeRecord { record, .. }, _)) = known else { continue };
        // In a cluster, the findings about replicas cover the rest.
        if facts.cluster.is_some() && report.claim_lost.is_none() {
            continue;
        }
        if let Some((message, hint)) = unusable_reason(&record.name, report) {
            let alone = facts.cluster.is_none();
            let severity = if alone { Severity::Critical } else { Severity::Warning };
            let subject = format!("volume {}", record.name);
            findings.push(finding(severity, subject, message, Some(&hint)));
        }
    }
}

/// Findings about virtual machines that wait: they depend on this node alone.
fn guest_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
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
            let message = "a virtual machine on this node waits for it, because this node does not serve it \
                 now";
            let hint = format!(
                "the virtual machine continues when the node serves the volume again (windrose \
                 node resume {}, if it is drained)",
                facts.node.name
            );
            findings.push(finding(Severity::Warning, subject, message, Some(&hint)));
        }
    }
}

/// Findings about pools.
fn pool_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for damage in &facts.damaged_pools {
        let hint = "the pool is not used; repair the file, and restart the node";
        findings.push(finding(Severity::Critical, "pools", damage, Some(hint)));
    }
    for pool in &facts.pools {
        pool_status::findings(pool, facts.cluster.is_some(), findings);
    }
}

/// Findings about short space.
fn space_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for FileSystemSpace { path, bytes, free, volumes } in &facts.space.file_systems {
        let subject = format!("file system of {}", path.display());
        let hint = "free some space: writes that need space fail when there is none";
        findings.extend(space_finding(
            facts,
            (subject, hint, WRITES_FAIL),
            (*bytes, *free),
            volumes,
        ));
    }
    for PoolSpace { name, bytes, free, lacks_disk, volumes } in &facts.space.pools {
        let (add, when_full) = match lacks_disk {
            true => ("replace the disk that is out, or add disks", WRITES_DEGRADED),
            false => ("add disks", WRITES_FAIL),
        };
        let hint = format!(
            "{add}: windrose pool add {name} DISK; or delete what is not needed: writes that need \
             space fail when there is none"
        );
        let subject = format!("pool {name}");
        let context = (subject, &*hint, when_full);
        findings.extend(space_finding(facts, context, (*bytes, *free), volumes));
    }
}

/// What happens to writes that need space when none is left,
const WRITES_FAIL: &str = "writes that need space fail";
/// and in a pool with a disk out.
const WRITES_DEGRADED: &str = "new extents are stored without the disk that is out, or writes that \
    need space fail";

fn space_finding(
    facts: &NodeFacts,
    (subject, hint, when_full): (String, &str, &str),
    (bytes, free): (u64, u64),
    volumes: &[Uuid],
) -> Option<Finding> {
    let promised = thin_overcommit(facts, volumes);
    if promised > 0 && free < MIN_FREE_BYTES {
        let message =
            format!("it is full: thin volumes may still need {}, and {when_full}", Size(promised));
        return Some(finding(Severity::Warning, subject, message, Some(hint)));
    }
    if promised > 0 && free < bytes / 100 * facts.low_space_percent {
        let message = format!(
            "{} of {} are free, and thin volumes may still need {}",
            Size(free),
            Size(bytes),
            Size(promised)
        );
        return Some(finding(Severity::Warning, subject, message, Some(hint)));
    }
    let message =
        format!("thin volumes may still need {}, and {} are free", Size(promised), Size(free));
    (promised > free).then(|| finding(Severity::Note, subject, message, Some("add space in time")))
}

/// How many bytes the thin ones of these volumes may still allocate.
fn thin_overcommit(facts: &NodeFacts, volumes: &[Uuid]) -> u64 {
    let taken = |id| facts.space.allocated.get(&id).copied().unwrap_or(0);
    let volumes: BTreeSet<_> = volumes.iter().collect();
    let records = facts.volumes.iter().map(|(s, _)| &s.record);
    let thin = records.filter(|r| r.thin && volumes.contains(&r.id));
    thin.map(|r| r.size_bytes.saturating_sub(taken(r.id))).fold(0, u64::saturating_add)
}

fn node_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for damage in &facts.damaged_records {
        let hint = format!("the volume or object that it describes is not served; {RESTORE_HINT}");
        findings.push(finding(Severity::Critical, "store", damage, Some(&hint)));
    }
    store_findings(facts, findings);
    if facts.is_plaintext {
        let message = "its nodes and their store communicate in plain text: anyone with access to \
            their network can read and change everything";
        let hint = "restrict that network to the nodes; a cluster that is formed without \
            --insecure has certificates";
        findings.push(finding(Severity::Note, "cluster", message, Some(hint)));
    }
    let subject = format!("node {}", facts.node.name);
    if let Some(location) = &facts.rival_process {
        let message = format!(
            "a duplicate of this node was started on {location}: the duplicate serves nothing, and \
             this node continues"
        );
        let hint = "stop the duplicate; before it joins as a separate node, set data_dir in its \
            configuration to a new, empty directory: the old one may contain images";
        findings.push(finding(Severity::Warning, subject.clone(), message, Some(hint)));
    }
    if let Some(StartupWait { reason: what, next_step: next, .. }) = &facts.startup_wait {
        let message = format!("it serves nothing yet and waits for its cluster: {what}");
        findings.push(finding(Severity::Critical, subject.clone(), message, Some(next)));
    } else if !facts.serving {
        let message = "it is starting or stopping";
        // In a cluster, other nodes serve the known volumes meanwhile.
        let elsewhere = facts.cluster.is_some() && !facts.volumes.is_empty();
        let severity = if elsewhere { Severity::Warning } else { Severity::Critical };
        findings.push(finding(severity, subject.clone(), message, Some(WAIT_HINT)));
    }
    if facts.node.disk_backend == "threads" {
        let message = "disks are accessed through threads, which is slower: io_uring is \
            unavailable or disabled";
        let hint = "allow io_uring (sysctl kernel.io_uring_disabled=0, and the container's seccomp profile), and see \
                    disks.engine in the configuration";
        findings.push(finding(Severity::Note, subject.clone(), message, Some(hint)));
    }
    if !facts.volumes.is_empty() && facts.cluster.is_none() {
        let message = "each volume has one replica, on this node: keep backups";
        let hint = "for a second replica on another node: windrose cluster init";
        findings.push(finding(Severity::Note, subject, message, Some(hint)));
    }
}

/// Findings about the store itself, and the directory that it lies in.
fn store_findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    let dir = facts.node.data_dir.display();
    if let Some(why) = &facts.anchor_error {
        let message = format!(
            "data_dir {dir} has no anchor outside of it ({why}): if it is ever not mounted, it \
             looks like an empty node"
        );
        let hint = "set anchor_dir to a directory on another file system that the node may write \
            to";
        findings.push(finding(Severity::Note, "store", message, Some(hint)));
    }
    let (severity, message, hint) = match &facts.store_trouble {
        None => return,
        Some(StoreProblem::NoSpace(why)) => (
            Severity::Warning,
            format!(
                "the reserve of space for the store in {dir} is used up ({why}): volumes can be \
                 deleted, other changes may fail"
            ),
            "free some space in the file system of data_dir; the node then restores the reserve"
                .to_owned(),
        ),
        Some(StoreProblem::Failing(why)) => (
            Severity::Warning,
            format!("{why}: nothing can be changed; volumes that are open are served"),
            "check the disk of data_dir; the node retries automatically".to_owned(),
        ),
        Some(StoreProblem::Damaged(why)) => (
            Severity::Critical,
            format!(
                "{why}: nothing can be changed; volumes that are open are served until the node ends"
            ),
            RESTORE_HINT.to_owned(),
        ),
    };
    findings.push(finding(severity, "store", message, Some(&hint)));
}

#[cfg(test)]
mod verdict_table;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{core, facts, mirror, open, volume, with_space};
    use engine::{CommandKindReport, GuestReport, MirrorReport};

    fn verdict(facts: &NodeFacts) -> (Verdict, String) {
        let status = assess(facts);
        (status.verdict, status.findings.first().map(|f| f.message.clone()).unwrap_or_default())
    }

    #[test]
    fn a_node_whose_volumes_serve_is_safe() {
        let status = assess(&facts(vec![volume("a", open()), volume("b", open())]));
        assert_eq!(status.verdict, Verdict::Safe);
        assert_eq!(status.volumes, VolumeCounts { total: 2, online: 2, offline: 0 });
        assert_eq!(status.capacity.provisioned_bytes, 2 << 30);
        assert!(status.findings.iter().any(|f| f.message.contains("one replica")));
    }

    #[test]
    fn an_offline_volume_decides() {
        let broken = Observed::OpenFailed { reason: "/v/b: no such file".into() };
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
        facts.pools.push(crate::samples::pool_facts("tank"));
        assert_eq!(verdict(&facts).0, Verdict::Safe);
        let report = facts.pools[0].report.as_mut().unwrap();
        report.fault_tolerance = Some(0);
        report.disks[0].state = engine::PoolDiskState::Detached;
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

    /// A node whose commands all waited for memory was once reported as safe.
    #[test]
    fn memory_that_is_short_is_a_finding_with_the_core_and_the_setting() {
        let mut facts = facts(vec![volume("a", open())]);
        let id = facts.volumes[0].0.record.id;
        let mut core = core(id);
        core.core = 3;
        facts.cores = vec![core];
        assert_eq!(assess(&facts).verdict, Verdict::Safe);
        facts.cores[0].memory.shortage_duration = Some(std::time::Duration::from_secs(75));
        (facts.cores[0].memory.waiting, facts.cores[0].memory.timed_out_waits) = (7, 11);
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::AtRisk);
        let found = &status.findings[0];
        for part in ["core 3", "75 s", "7 commands waiting", "11 rejected"] {
            assert!(found.message.contains(part), "{}", found.message);
        }
        assert!(found.hint.as_ref().is_some_and(|hint| hint.contains("raise cores.memory")));
    }

    #[test]
    fn a_guest_that_waits_is_named() {
        let mut facts = facts(vec![volume("a", open())]);
        let id = facts.volumes[0].0.record.id;
        let waits = |facts: &NodeFacts| {
            let found = assess(facts).findings;
            found.iter().any(|f| f.subject == "volume a" && f.message.contains("a virtual machine"))
        };
        let unserved = MirrorReport { access: block::Access::Unavailable, ..mirror() };
        facts.cores.push(core(id));
        facts.cores[0].volumes[0].mirror = Some(unserved);
        assert!(!waits(&facts), "nobody is there");
        let age = std::time::Duration::from_secs(1);
        facts.cores[0].guests.push(GuestReport { volume: id, socket: "/v/a.sock".into(), age });
        assert!(waits(&facts));
        facts.cores[0].volumes[0].mirror = Some(mirror());
        assert!(!waits(&facts), "it is served");
    }

    #[test]
    fn failing_disks_are_a_risk() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.cores.push(core(facts.volumes[0].0.record.id));
        let failed = CommandKindReport {
            completed: 3,
            failed: 2,
            without_space: 0,
            bytes: 0,
            latency: None,
        };
        facts.cores[0].volumes[0].kinds[0] = failed;
        let (verdict, message) = verdict(&facts);
        assert_eq!(verdict, Verdict::AtRisk);
        assert!(message.contains("2 commands failed"), "{message}");
    }

    #[test]
    fn a_damaged_record_is_a_volume_that_cannot_be_reached() {
        let mut facts = facts(vec![volume("a", open())]);
        facts.damaged_records.push("volumes/x failed: the record is damaged".into());
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
