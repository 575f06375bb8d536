//! Pools as the API shows them, and findings about them.

use std::collections::BTreeMap;

use api::{
    DiskState, Finding, LostBlocks, Pool, PoolCapacity, PoolDisk, PoolName, PoolState, Rebuild,
    Scrub, Severity,
};
use engine::{BackingError, LABEL_AREA_BYTES, PoolDiskState, PoolReport, Redundancy};
use records::pool_records::{KnownDisk, PoolRecord, PoolStage};
use tokio::time::Instant;
use uuid::Uuid;
use wire::plural;

use crate::{WAIT_HINT, finding};

/// Lost ranges of a volume that a finding names.
const MAX_NAMED_RANGES: usize = 8;

/// What is known of a pool.
#[derive(Clone, Debug)]
pub struct PoolFacts {
    /// Its record.
    pub record: PoolRecord,
    /// Its state on this node.
    pub observed: PoolObserved,
    /// Its report, while it is open.
    pub report: Option<PoolReport>,
    /// Progress of a rebuild.
    pub rebuild: Option<Rebuild>,
    /// The volumes in it: identities and names.
    pub volumes: Vec<(Uuid, String)>,
}

impl PoolFacts {
    /// Whether it has stopped after it was opened.
    pub(crate) fn has_stopped(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.write_error.is_some())
    }
}

/// When a rebuild was first seen, and how many extents were left then.
pub type RebuildProgress = Option<(Instant, u64)>;

/// Progress of a rebuild with so many extents left. Notes when it starts.
pub fn rebuild_progress(
    progress: &mut RebuildProgress,
    left: u64,
    now: Instant,
) -> Option<Rebuild> {
    if left == 0 {
        *progress = None;
        return None;
    }
    let (began, all) = match *progress {
        Some((began, all)) if all >= left => (began, all),
        // It has just started, or the work has grown.
        _ => *progress.insert((now, left)),
    };
    let (done, millis) = (u128::from(all - left), (now - began).as_millis());
    let rest = u128::from(left).checked_mul(millis).and_then(|n| n.checked_div(done));
    let eta_s = rest.and_then(|rest| u64::try_from(rest / 1000).ok()).filter(|_| millis > 0);
    Some(Rebuild { remaining_extents: left, total_extents: all, eta_s })
}

/// The common name of a RAID level.
pub fn level_text(level: Redundancy, columns: u16) -> String {
    match level {
        Redundancy::Copies(1) => "RAID 0".to_owned(),
        Redundancy::Copies(2) if columns == 2 => "RAID 1".to_owned(),
        Redundancy::Copies(2) => "RAID 10".to_owned(),
        Redundancy::Copies(n) if columns == n => format!("RAID 1 with {n} copies"),
        Redundancy::Copies(n) => format!("RAID 10 with {n} copies"),
        Redundancy::Parity => "RAID 5".to_owned(),
        Redundancy::DoubleParity => "RAID 6".to_owned(),
    }
}

/// How many disks of a healthy pool may fail.
fn max_fault_tolerance(level: Redundancy) -> u32 {
    match level {
        Redundancy::Copies(n) => u32::from(n).saturating_sub(1),
        Redundancy::Parity => 1,
        Redundancy::DoubleParity => 2,
    }
}

fn is_degraded(report: &PoolReport) -> bool {
    report
        .fault_tolerance
        .is_none_or(|tolerance| tolerance < max_fault_tolerance(report.redundancy))
}

fn pool_state(facts: &PoolFacts) -> PoolState {
    match (facts.record.stage, &facts.observed, &facts.report) {
        (PoolStage::Deleting, ..) => PoolState::Deleting,
        (_, PoolObserved::OpenFailed(error), _) => {
            PoolState::Offline { reason: error.message_without_pool(&facts.record.name).to_owned() }
        }
        (_, PoolObserved::Open, Some(report)) => match &report.write_error {
            Some(why) => PoolState::Offline { reason: why.clone() },
            None if report.stale_extents > 0 => PoolState::Rebuilding,
            None if is_degraded(report) => PoolState::Degraded,
            None => PoolState::Online,
        },
        (PoolStage::Creating, ..) => PoolState::Creating,
        (PoolStage::Ready, ..) => PoolState::Opening,
    }
}

/// The next step for a disk that is out of service.
fn disk_action(pool: &PoolName, disk: &engine::PoolDiskReport) -> Option<String> {
    let (name, called) = (pool, disk_argument(disk));
    let fails = disk.read_errors + disk.write_errors + disk.checksum_errors > 0 || disk.is_slow;
    match disk.state {
        PoolDiskState::Detached => {
            Some(format!("replace it: windrose pool replace {name} {called} --with DISK"))
        }
        PoolDiskState::Active | PoolDiskState::Spare if fails => Some(format!(
            "check the disk and its cable, and replace it if the errors continue (windrose pool \
             replace {name} {called} --with DISK); to reset the counters: windrose pool clear \
             {name} {called}"
        )),
        PoolDiskState::Draining => {
            Some(format!("to keep it: windrose pool remove {name} {called} --cancel"))
        }
        PoolDiskState::Active | PoolDiskState::Spare => None,
    }
}

/// How a command names a disk.
fn disk_argument(disk: &engine::PoolDiskReport) -> String {
    match disk.serial.as_str() {
        "" => disk.member_id.to_string(),
        serial => pool::disk_argument(serial),
    }
}

fn disk_info(pool: &PoolName, disk: &engine::PoolDiskReport) -> PoolDisk {
    PoolDisk {
        member: Some(disk.member_id),
        serial: Some(disk.serial.clone()),
        path: disk.path.clone(),
        state: match disk.state {
            PoolDiskState::Active => DiskState::Active,
            PoolDiskState::Spare => DiskState::Spare,
            PoolDiskState::Draining => DiskState::Draining,
            PoolDiskState::Detached => DiskState::Detached,
        },
        size_bytes: Some(disk.bytes),
        allocated_extents: disk.extents,
        total_extents: disk.extent_capacity,
        stale_extents: disk.stale_extents,
        errors_since_s: disk.errors_since_s,
        repaired_blocks: disk.repaired_blocks,
        unrepairable_blocks: disk.unrepairable_blocks,
        read_errors: disk.read_errors,
        write_errors: disk.write_errors,
        checksum_errors: disk.checksum_errors,
        slow: disk.is_slow,
        slow_episodes: disk.slow_episodes,
        redirected_reads: disk.redirected_reads,
        hint: disk_action(pool, disk),
    }
}

/// A disk of a closed pool, as last seen.
fn known_disk_info(disk: &KnownDisk) -> PoolDisk {
    PoolDisk {
        member: None,
        serial: disk.serial.clone(),
        path: Some(disk.path.clone()),
        state: DiskState::Unknown,
        size_bytes: None,
        allocated_extents: 0,
        total_extents: 0,
        stale_extents: 0,
        errors_since_s: None,
        repaired_blocks: 0,
        unrepairable_blocks: 0,
        read_errors: 0,
        write_errors: 0,
        checksum_errors: 0,
        slow: false,
        slow_episodes: 0,
        redirected_reads: 0,
        hint: None,
    }
}

fn pool_capacity(report: &PoolReport) -> PoolCapacity {
    let percent = u128::from(report.usable_bytes) * 100 / u128::from(report.raw_bytes.max(1));
    PoolCapacity {
        raw_bytes: report.raw_bytes,
        usable_bytes: report.usable_bytes,
        allocated_bytes: report.allocated_bytes,
        free_bytes: report.free_bytes,
        efficiency_percent: u8::try_from(percent.min(100)).unwrap_or(100),
    }
}

/// The volumes of a pool that have lost data, by name.
fn damaged_volumes(facts: &PoolFacts) -> Vec<String> {
    let lost = facts.report.iter().flat_map(|r| &r.volumes).filter(|v| v.fault_tolerance.is_none());
    let name = |id: Uuid| {
        let known = facts.volumes.iter().find(|(known, _)| *known == id);
        known.map_or_else(|| id.to_string(), |(_, name)| name.clone())
    };
    lost.map(|v| name(v.id)).collect()
}

/// Blocks by volume name, counted from the end of the image's label.
fn named_blocks(
    facts: &PoolFacts,
    of: fn(&PoolReport) -> &[engine::DamagedRange],
) -> Vec<LostBlocks> {
    let Some(report) = &facts.report else { return Vec::new() };
    let shown = |range: &engine::DamagedRange| {
        let known = facts.volumes.iter().find(|(id, _)| *id == range.volume);
        let start_bytes = range.offset_bytes.checked_sub(LABEL_AREA_BYTES);
        LostBlocks {
            volume: known.map_or_else(|| range.volume.to_string(), |(_, name)| name.clone()),
            start_bytes,
            bytes: range.len_bytes,
        }
    };
    of(report).iter().map(shown).collect()
}

/// Lost blocks of volumes.
fn lost_blocks(facts: &PoolFacts) -> Vec<LostBlocks> {
    named_blocks(facts, |report| &report.lost_ranges)
}

/// Blocks of volumes that a scrub could not repair.
fn unrepaired_blocks(facts: &PoolFacts) -> Vec<LostBlocks> {
    named_blocks(facts, |report| &report.unrepaired_ranges)
}

/// A sentence for each volume: these blocks, and what `is` true of them.
fn range_texts(blocks: Vec<LostBlocks>, is: &str) -> Vec<String> {
    let mut by_volume: BTreeMap<String, Vec<LostBlocks>> = BTreeMap::new();
    blocks.into_iter().for_each(|l| by_volume.entry(l.volume.clone()).or_default().push(l));
    let text = |(volume, ranges): (String, Vec<LostBlocks>)| {
        let bytes: u64 = ranges.iter().map(|range| range.bytes).sum();
        let range = |r: &LostBlocks| match r.start_bytes {
            Some(start) => format!("bytes {start} to {}", start + r.bytes - 1),
            None => "its label".to_owned(),
        };
        let named: Vec<String> = ranges.iter().take(MAX_NAMED_RANGES).map(range).collect();
        let more = match ranges.len().saturating_sub(MAX_NAMED_RANGES) {
            0 => String::new(),
            more => format!(" and {}", plural(more, "more range")),
        };
        let (size, which) = (api::Size(bytes), named.join(", "));
        format!("{size} of volume {volume} {is}: {which}{more}")
    };
    by_volume.into_iter().map(text).collect()
}

/// A pool as the API shows it.
pub fn pool_info(facts: &PoolFacts) -> Pool {
    let PoolFacts { record, report, .. } = facts;
    let report = report.as_ref();
    Pool {
        name: record.name.clone(),
        id: record.id,
        state: pool_state(facts),
        level: report.map(|r| level_text(r.redundancy, r.columns)),
        columns: report.map(|r| r.columns),
        chunk_bytes: report.map(|r| r.strip_bytes),
        checksums: report.map(|r| r.has_checksums),
        capacity: report.map(pool_capacity),
        fault_tolerance: report.and_then(|r| r.fault_tolerance),
        disks: match report {
            Some(report) => report.disks.iter().map(|d| disk_info(&record.name, d)).collect(),
            None => record.disks.iter().map(known_disk_info).collect(),
        },
        volumes: facts.volumes.iter().map(|(_, name)| name.clone()).collect(),
        damaged_volumes: damaged_volumes(facts),
        lost_blocks: lost_blocks(facts),
        unrepaired_blocks: unrepaired_blocks(facts),
        rebuild: facts.rebuild,
        scrub: report.and_then(|r| r.scrub.as_ref()).map(|s| Scrub {
            running: s.is_running,
            done_bytes: s.done_bytes,
            total_bytes: s.total_bytes,
            repaired_rows: s.repaired_rows,
            unrecoverable_rows: s.unrecoverable_rows,
            ended_s: s.ended_s,
        }),
    }
}

/// Findings about a pool. In a cluster, other nodes may serve its volumes.
pub fn findings(facts: &PoolFacts, in_cluster: bool, findings: &mut Vec<Finding>) {
    let name = &facts.record.name;
    let subject = format!("pool {name}");
    let cut_off = match (facts.volumes.is_empty(), in_cluster) {
        (false, false) => Severity::Critical,
        _ => Severity::Warning,
    };
    let mut found = |severity, message: String, hint: Option<String>| {
        findings.push(finding(severity, subject.clone(), message, hint.as_deref()));
    };
    if let PoolObserved::OpenFailed(error) = &facts.observed {
        let why = error.message_without_pool(name);
        found(cut_off, format!("it is offline: {why}"), Some(offline_pool_hint(name, error)));
    }
    let Some(report) = &facts.report else { return };
    if let Some(why) = &report.write_error {
        let hint = "check that its disks are connected, then restart the node: it reopens the pool";
        found(cut_off, format!("it has stopped: {why}"), Some(hint.to_owned()));
    }
    if report.fault_tolerance.is_none() {
        let lost = damaged_volumes(facts);
        let which =
            if lost.is_empty() { String::new() } else { format!(" of {}", lost.join(", ")) };
        let hint = "bring back the disks that are out, or restore those volumes from a backup";
        found(Severity::Critical, format!("data{which} is lost"), Some(hint.to_owned()));
    }
    for message in range_texts(lost_blocks(facts), "are lost: no disk can read them") {
        let hint = format!(
            "reading them fails until they are written: restore them from a backup (windrose pool \
             show {name} lists all)"
        );
        found(Severity::Critical, message, Some(hint));
    }
    unrepaired_findings(facts, report, &mut found);
    for disk in &report.disks {
        if let Some((severity, message)) = disk_finding(disk, report) {
            found(severity, message, disk_action(name, disk));
        }
    }
    if let Some(rebuild) = &facts.rebuild {
        found(Severity::Warning, rebuild_text(report, rebuild), Some(WAIT_HINT.to_owned()));
    }
}

/// Findings about blocks that scrubs could not repair, until they are rewritten.
fn unrepaired_findings(
    facts: &PoolFacts,
    report: &PoolReport,
    found: &mut impl FnMut(Severity, String, Option<String>),
) {
    let name = &facts.record.name;
    let is = "could not be repaired by a scrub: copies or parity do not match, or no disk can read \
        them";
    for message in range_texts(unrepaired_blocks(facts), is) {
        let hint = format!(
            "their contents may be wrong: compare them with a backup, and rewrite them to clear \
             this (windrose pool show {name} lists all); if they are right: windrose pool clear \
             {name}, then windrose pool scrub {name}"
        );
        found(Severity::Warning, message, Some(hint));
    }
    if report.unrepaired_truncated {
        let message = "scrubs found more unrepairable ranges than can be listed".to_owned();
        let hint = format!(
            "the node's log lists them; after restoring the volumes: windrose pool clear {name}, \
             then windrose pool scrub {name}"
        );
        found(Severity::Warning, message, Some(hint));
    }
}

fn rebuild_text(report: &PoolReport, rebuild: &Rebuild) -> String {
    let Rebuild { remaining_extents, total_extents, eta_s } = rebuild;
    let eta = eta_s.map(|s| format!(", about {} min", s.div_ceil(60))).unwrap_or_default();
    let what = if is_degraded(report) { "it is being rebuilt" } else { "data is being moved" };
    let all = plural(*total_extents, "piece");
    format!("{what}: {remaining_extents} of {all} left{eta}; {}", fault_tolerance_text(report))
}

/// How many more disks may fail.
fn fault_tolerance_text(report: &PoolReport) -> String {
    match report.fault_tolerance {
        None => "each further disk that fails loses more data".to_owned(),
        Some(0) if max_fault_tolerance(report.redundancy) == 0 => {
            "any disk that fails loses data".to_owned()
        }
        Some(0) => "data is lost if another disk fails".to_owned(),
        Some(1) => "one more disk may fail".to_owned(),
        Some(n) => format!("{n} more disks may fail"),
    }
}

fn disk_finding(disk: &engine::PoolDiskReport, report: &PoolReport) -> Option<(Severity, String)> {
    stranded_finding(disk).or_else(|| error_finding(disk, report))
}

/// The finding that a disk cannot leave the pool.
fn stranded_finding(disk: &engine::PoolDiskReport) -> Option<(Severity, String)> {
    if disk.state != PoolDiskState::Draining || !disk.has_no_target {
        return None;
    }
    let (named, pieces) = (disk_text(disk), plural(disk.extents, "piece"));
    let message = format!(
        "{named} is being removed, but the other disks have no room for {pieces} on it: add a \
         disk, or cancel the removal"
    );
    Some((Severity::Warning, message))
}

/// The name of a disk in messages.
fn disk_text(disk: &engine::PoolDiskReport) -> String {
    let at = disk.path.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default();
    let which =
        if disk.serial.is_empty() { disk.member_id.to_string() } else { disk.serial.clone() };
    format!("disk {which}{at}")
}

fn error_finding(disk: &engine::PoolDiskReport, report: &PoolReport) -> Option<(Severity, String)> {
    let errors = disk.read_errors + disk.write_errors + disk.checksum_errors;
    let named = disk_text(disk);
    match disk.state {
        PoolDiskState::Detached => {
            Some((Severity::Warning, format!("{named} is out; {}", fault_tolerance_text(report))))
        }
        PoolDiskState::Active | PoolDiskState::Spare | PoolDiskState::Draining if errors > 0 => {
            let (reads, writes) =
                (plural(disk.read_errors, "read"), plural(disk.write_errors, "write"));
            let slow = if disk.is_slow { ", and is slow" } else { "" };
            let wrong = match disk.checksum_errors {
                0 => String::new(),
                n => format!(", and returned wrong data {}", plural(n, "time")),
            };
            let since = disk.errors_since_s.map(|s| format!(" since {}", disk::format_utc(s)));
            let since = since.unwrap_or_default();
            let message = format!("{named} has failed {reads} and {writes}{wrong}{slow}{since}");
            Some((Severity::Warning, message))
        }
        PoolDiskState::Active | PoolDiskState::Spare | PoolDiskState::Draining if disk.is_slow => {
            let (times, reads) =
                (plural(disk.slow_episodes, "time"), plural(disk.redirected_reads, "read"));
            let message =
                format!("{named} is slow: {times} so far; other disks served {reads} in its place");
            Some((Severity::Warning, message))
        }
        PoolDiskState::Active | PoolDiskState::Spare | PoolDiskState::Draining => None,
    }
}

/// State of a pool on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PoolObserved {
    /// Not opened yet.
    #[default]
    Closed,
    /// Open.
    Open,
    /// It failed to open; retried every few seconds.
    OpenFailed(BackingError),
}

/// The hint for a pool that is offline.
pub fn offline_pool_hint(name: &PoolName, error: &BackingError) -> String {
    let own = error.hint.map(|hint| format!("{hint}; ")).unwrap_or_default();
    format!(
        "{own}the node searches for its disks every few seconds. If disks are lost for good: \
         windrose pool open {name} --without DISK"
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::samples::pool_facts;
    use engine::PoolScrubReport;

    fn told(facts: &PoolFacts) -> Vec<(Severity, String, Option<String>)> {
        let mut all = Vec::new();
        findings(facts, false, &mut all);
        assert!(all.iter().all(|f| f.subject == "pool tank"));
        all.into_iter().map(|f| (f.severity, f.message, f.hint)).collect()
    }

    #[test]
    fn a_pool_that_is_well_has_nothing_to_say() {
        let facts = pool_facts("tank");
        assert_eq!(told(&facts), []);
        let shown = pool_info(&facts);
        assert_eq!((shown.state, shown.level.as_deref()), (PoolState::Online, Some("RAID 5")));
        assert_eq!((shown.fault_tolerance, shown.volumes), (Some(1), vec!["web".to_owned()]));
        assert_eq!(shown.capacity.unwrap().efficiency_percent, 66);
        assert!(shown.disks.iter().all(|d| d.hint.is_none()));
    }

    #[test]
    fn a_disk_that_is_out_is_named_with_what_to_do() {
        let mut facts = pool_facts("tank");
        let report = facts.report.as_mut().unwrap();
        report.fault_tolerance = Some(0);
        (report.disks[1].state, report.disks[1].path) = (PoolDiskState::Detached, None);
        let replace = "replace it: windrose pool replace tank S1 --with DISK";
        let message = "disk S1 is out; data is lost if another disk fails";
        assert_eq!(told(&facts), [(Severity::Warning, message.into(), Some(replace.into()))]);
        let shown = pool_info(&facts);
        assert_eq!(shown.state, PoolState::Degraded);
        assert_eq!(shown.disks[1].hint.as_deref(), Some(replace));
        // A name that needs quotes in a shell.
        facts.report.as_mut().unwrap().disks[1].serial = "A B".into();
        assert!(told(&facts)[0].2.as_ref().unwrap().contains("replace tank 'A B' --with"));
        // No serial number, as with loop devices and files.
        facts.report.as_mut().unwrap().disks[1].serial.clear();
        assert_eq!(told(&facts)[0].1, "disk 1 is out; data is lost if another disk fails");
    }

    #[test]
    fn a_disk_that_cannot_leave_is_named_with_both_ways_out() {
        let mut facts = pool_facts("tank");
        let report = facts.report.as_mut().unwrap();
        (report.disks[1].state, report.disks[1].has_no_target) = (PoolDiskState::Draining, true);
        let (_, message, hint) = &told(&facts)[0];
        assert!(message.contains("the other disks have no room for 10 pieces on it"), "{message}");
        assert!(hint.as_ref().unwrap().ends_with("windrose pool remove tank S1 --cancel"));
        facts.report.as_mut().unwrap().disks[1].has_no_target = false;
        assert_eq!(told(&facts), []);
        assert!(pool_info(&facts).disks[1].hint.as_ref().unwrap().contains("--cancel"));
    }

    #[test]
    fn lost_data_is_named_by_its_volumes() {
        let mut facts = pool_facts("tank");
        let report = facts.report.as_mut().unwrap();
        (report.fault_tolerance, report.volumes[0].fault_tolerance) = (None, None);
        let found = told(&facts);
        assert_eq!((found[0].0, found[0].1.as_str()), (Severity::Critical, "data of web is lost"));
        assert_eq!(pool_info(&facts).damaged_volumes, ["web"]);
        assert_eq!(pool_info(&facts).state, PoolState::Degraded);
    }

    #[test]
    fn lost_blocks_are_named_by_volume_and_range() {
        let mut facts = pool_facts("tank");
        let range = |start: u64| engine::DamagedRange {
            volume: Uuid::from_u128(9),
            offset_bytes: LABEL_AREA_BYTES + start,
            len_bytes: 4096,
        };
        facts.report.as_mut().unwrap().lost_ranges = vec![range(0), range(65536)];
        let (severity, message, hint) = &told(&facts)[0];
        assert_eq!(*severity, Severity::Critical);
        let is = "of volume web are lost: no disk can read them: bytes 0 to 4095, bytes 65536 to \
            69631";
        assert!(message.ends_with(is), "{message}");
        assert!(hint.as_ref().unwrap().contains("until they are written"));
        let shown = pool_info(&facts).lost_blocks;
        assert_eq!((shown[1].volume.as_str(), shown[1].start_bytes), ("web", Some(65536)));
        facts.report.as_mut().unwrap().lost_ranges = (0..20).map(|n| range(n * 8192)).collect();
        assert!(told(&facts)[0].1.ends_with("and 12 more ranges"));
    }

    #[test]
    fn blocks_that_could_not_be_repaired_are_named_until_they_are_written() {
        let mut facts = pool_facts("tank");
        let (volume, start) = (Uuid::from_u128(9), LABEL_AREA_BYTES + 65536);
        let report = facts.report.as_mut().unwrap();
        report.unrepaired_ranges =
            vec![engine::DamagedRange { volume, offset_bytes: start, len_bytes: 8192 }];
        let (severity, message, hint) = &told(&facts)[0];
        assert_eq!(*severity, Severity::Warning);
        assert!(message.starts_with("8 KiB of volume web could not be repaired"), "{message}");
        assert!(message.ends_with(": bytes 65536 to 73727"), "{message}");
        assert!(hint.as_ref().unwrap().contains("rewrite them"), "{hint:?}");
        assert_eq!(pool_info(&facts).unrepaired_blocks[0].start_bytes, Some(65536));
        facts.report.as_mut().unwrap().unrepaired_truncated = true;
        assert_eq!(told(&facts).len(), 2);
        let report = facts.report.as_mut().unwrap();
        (report.unrepaired_ranges, report.unrepaired_truncated) = (Vec::new(), false);
        assert_eq!(told(&facts), []);
    }

    #[test]
    fn a_pool_that_is_offline_says_why_and_what_helps() {
        let mut facts = pool_facts("tank");
        facts.report = None;
        facts.observed =
            PoolObserved::OpenFailed(BackingError::refused("pool tank: 2 disks are missing"));
        let found = told(&facts);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].0, found[0].1.as_str()),
            (Severity::Critical, "it is offline: 2 disks are missing")
        );
        assert!(found[0].2.as_ref().unwrap().contains("windrose pool open tank --without DISK"));
        let shown = pool_info(&facts);
        assert_eq!(shown.state, PoolState::Offline { reason: "2 disks are missing".into() });
        assert_eq!((shown.capacity, shown.disks[0].serial.as_deref()), (None, Some("S1")));
        facts.volumes.clear();
        assert_eq!(told(&facts)[0].0, Severity::Warning, "nobody misses it");
        facts.observed = PoolObserved::Closed;
        assert_eq!((told(&facts).len(), pool_info(&facts).state), (0, PoolState::Opening));
    }

    #[test]
    fn failing_disks_scrubs_and_stops_are_told() {
        let mut facts = pool_facts("tank");
        let report = facts.report.as_mut().unwrap();
        report.disks[2].write_errors = 3;
        report.scrub = Some(PoolScrubReport {
            is_running: false,
            done_bytes: 1,
            total_bytes: 1,
            repaired_rows: 4,
            unrecoverable_rows: 1,
            ended_s: Some(1),
        });
        let found = told(&facts);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].1, "disk S2 at /dev/sd2 has failed 0 reads and 3 writes");
        assert!(found[0].2.as_ref().unwrap().ends_with("windrose pool clear tank S2"));
        let disk = &mut facts.report.as_mut().unwrap().disks[2];
        (disk.read_errors, disk.checksum_errors) = (5, 4);
        let is = "disk S2 at /dev/sd2 has failed 5 reads and 3 writes, and returned wrong data 4 \
            times";
        assert_eq!(told(&facts)[0].1, is);
        let disk = &mut facts.report.as_mut().unwrap().disks[2];
        (disk.read_errors, disk.checksum_errors) = (0, 0);
        (disk.write_errors, disk.is_slow, disk.slow_episodes, disk.redirected_reads) =
            (0, true, 2, 70);
        let (_, message, hint) = &told(&facts)[0];
        let is = "disk S2 at /dev/sd2 is slow: 2 times so far; other disks served 70 reads in its \
            place";
        assert_eq!(message, is);
        assert!(hint.as_ref().unwrap().contains("replace it if the errors continue"), "{hint:?}");
        assert!(pool_info(&facts).disks[2].slow);
        facts.report.as_mut().unwrap().write_error = Some("no quorum".into());
        assert_eq!(
            (told(&facts)[0].0, told(&facts)[0].1.as_str()),
            (Severity::Critical, "it has stopped: no quorum")
        );
        assert_eq!(pool_info(&facts).state, PoolState::Offline { reason: "no quorum".into() });
    }

    #[test]
    fn a_rebuild_is_told_by_how_far_it_was() {
        let mut progress = None;
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        let of = |remaining_extents, total_extents, eta_s| {
            Some(Rebuild { remaining_extents, total_extents, eta_s })
        };
        assert_eq!(rebuild_progress(&mut progress, 0, at(0)), None);
        assert_eq!(rebuild_progress(&mut progress, 100, at(0)), of(100, 100, None));
        assert_eq!(rebuild_progress(&mut progress, 75, at(50)), of(75, 100, Some(150)));
        assert_eq!(
            rebuild_progress(&mut progress, 120, at(60)),
            of(120, 120, None),
            "another disk failed"
        );
        assert_eq!(rebuild_progress(&mut progress, 0, at(70)), None);
        assert_eq!(progress, None);
        let mut facts = pool_facts("tank");
        facts.report.as_mut().unwrap().stale_extents = 75;
        facts.rebuild = of(75, 100, Some(150));
        assert_eq!(pool_info(&facts).state, PoolState::Rebuilding);
        let found = told(&facts);
        assert_eq!(
            found[0].1,
            "data is being moved: 75 of 100 pieces left, about 3 min; one more disk may fail"
        );
    }

    #[test]
    fn levels_are_called_what_people_call_them() {
        for (level, columns, text) in [
            (Redundancy::Copies(1), 4, "RAID 0"),
            (Redundancy::Copies(2), 2, "RAID 1"),
            (Redundancy::Copies(3), 3, "RAID 1 with 3 copies"),
            (Redundancy::Copies(2), 4, "RAID 10"),
            (Redundancy::Copies(3), 6, "RAID 10 with 3 copies"),
            (Redundancy::Parity, 5, "RAID 5"),
            (Redundancy::DoubleParity, 6, "RAID 6"),
        ] {
            assert_eq!(level_text(level, columns), text);
        }
    }
}
