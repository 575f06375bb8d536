//! Pools as they are shown, and what is the matter with them.

use std::collections::BTreeMap;

use api::{
    DiskState, Finding, LostBlocks, Pool, PoolCapacity, PoolDisk, PoolName, PoolState, Rebuild,
    Scrub, Severity,
};
use tokio::time::Instant;
use uuid::Uuid;
use wire::count;

use super::pools::{PoolObserved, hint_for};
use super::status::finding;
use super::why::BY_ITSELF;
use crate::engine::{self, LABEL_AREA_BYTES, Level, PoolDiskState, PoolReport};
use crate::pools::{PoolRecord, PoolStage, SeenDisk};

/// Ranges of lost blocks of a volume that a finding names.
const LOST_NAMED: usize = 8;

/// What is known of a pool.
#[derive(Clone, Debug)]
pub struct PoolFacts {
    /// What was written down of it.
    pub record: PoolRecord,
    /// What the node does with it.
    pub observed: PoolObserved,
    /// What it says of itself, while it is open.
    pub report: Option<PoolReport>,
    /// How far a rebuild is.
    pub rebuild: Option<Rebuild>,
    /// The volumes that lie in it: their identities and names.
    pub volumes: Vec<(Uuid, String)>,
}

impl PoolFacts {
    /// Whether it has stopped though it was open.
    pub(super) fn has_stopped(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.broken.is_some())
    }
}

/// Since when a rebuild is known, and how many pieces there were then.
pub(super) type Progress = Option<(Instant, u64)>;

/// How far a rebuild is that has so many pieces left. Notes when it begins.
pub(super) fn rebuild(progress: &mut Progress, left: u64, now: Instant) -> Option<Rebuild> {
    if left == 0 {
        *progress = None;
        return None;
    }
    let (began, all) = match *progress {
        Some((began, all)) if all >= left => (began, all),
        // It has just begun, or there is more to do than there was.
        _ => *progress.insert((now, left)),
    };
    let (done, millis) = (u128::from(all - left), (now - began).as_millis());
    let rest = u128::from(left).checked_mul(millis).and_then(|n| n.checked_div(done));
    let eta_s = rest.and_then(|rest| u64::try_from(rest / 1000).ok()).filter(|_| millis > 0);
    Some(Rebuild { left_pieces: left, all_pieces: all, eta_s })
}

/// A level as people know it.
pub(super) fn level_text(level: Level, columns: u16) -> String {
    match level {
        Level::Copies(1) => "RAID 0".to_owned(),
        Level::Copies(2) if columns == 2 => "RAID 1".to_owned(),
        Level::Copies(2) => "RAID 10".to_owned(),
        Level::Copies(n) if columns == n => format!("RAID 1 with {n} copies"),
        Level::Copies(n) => format!("RAID 10 with {n} copies"),
        Level::Parity => "RAID 5".to_owned(),
        Level::DoubleParity => "RAID 6".to_owned(),
    }
}

/// How many disks may fail of a pool that is whole.
fn bears_at_best(level: Level) -> u32 {
    match level {
        Level::Copies(n) => u32::from(n).saturating_sub(1),
        Level::Parity => 1,
        Level::DoubleParity => 2,
    }
}

fn is_degraded(report: &PoolReport) -> bool {
    report.bears.is_none_or(|bears| bears < bears_at_best(report.level))
}

fn state(facts: &PoolFacts) -> PoolState {
    match (facts.record.stage, &facts.observed, &facts.report) {
        (PoolStage::Deleting, ..) => PoolState::Deleting,
        (_, PoolObserved::Broken(error), _) => {
            PoolState::Offline { reason: error.of_that_pool(&facts.record.name).to_owned() }
        }
        (_, PoolObserved::Open, Some(report)) => match &report.broken {
            Some(why) => PoolState::Offline { reason: why.clone() },
            None if report.behind_pieces > 0 => PoolState::Rebuilding,
            None if is_degraded(report) => PoolState::Degraded,
            None => PoolState::Online,
        },
        (PoolStage::Creating, ..) => PoolState::Creating,
        (PoolStage::Ready, ..) => PoolState::Opening,
    }
}

/// What to do about a disk that is out.
fn action(pool: &PoolName, disk: &engine::PoolDisk) -> Option<String> {
    let (name, called) = (pool, called(disk));
    let fails = disk.read_errors + disk.write_errors + disk.checksum_errors > 0 || disk.slow;
    match disk.state {
        PoolDiskState::Out => {
            Some(format!("replace it: windrose pool replace {name} {called} --with DISK"))
        }
        PoolDiskState::In | PoolDiskState::Spare if fails => Some(format!(
            "look at it and its cable, and replace it if that goes on (windrose pool replace {name} {called} \
             --with DISK); to count anew: windrose pool clear {name} {called}"
        )),
        PoolDiskState::Leaving => {
            Some(format!("to keep it: windrose pool remove {name} {called} --cancel"))
        }
        PoolDiskState::In | PoolDiskState::Spare => None,
    }
}

/// What a disk is called on a command line.
fn called(disk: &engine::PoolDisk) -> String {
    match disk.serial.as_str() {
        "" => disk.member.to_string(),
        serial => pool::disk_argument(serial),
    }
}

fn disk(pool: &PoolName, disk: &engine::PoolDisk) -> PoolDisk {
    PoolDisk {
        member: Some(disk.member),
        serial: Some(disk.serial.clone()),
        path: disk.path.clone(),
        state: match disk.state {
            PoolDiskState::In => DiskState::In,
            PoolDiskState::Spare => DiskState::Spare,
            PoolDiskState::Leaving => DiskState::Leaving,
            PoolDiskState::Out => DiskState::Out,
        },
        size_bytes: Some(disk.bytes),
        pieces: disk.pieces,
        room: disk.room,
        behind_pieces: disk.behind_pieces,
        errors_since_s: disk.errors_since_s,
        repaired_blocks: disk.repaired_blocks,
        unrepairable_blocks: disk.unrepairable_blocks,
        read_errors: disk.read_errors,
        write_errors: disk.write_errors,
        checksum_errors: disk.checksum_errors,
        slow: disk.slow,
        slow_times: disk.slow_times,
        slow_reads: disk.slow_reads,
        action: action(pool, disk),
    }
}

/// A disk of a pool that is not open, as it was seen last.
fn disk_seen(disk: &SeenDisk) -> PoolDisk {
    PoolDisk {
        member: None,
        serial: disk.serial.clone(),
        path: Some(disk.path.clone()),
        state: DiskState::Unknown,
        size_bytes: None,
        pieces: 0,
        room: 0,
        behind_pieces: 0,
        errors_since_s: None,
        repaired_blocks: 0,
        unrepairable_blocks: 0,
        read_errors: 0,
        write_errors: 0,
        checksum_errors: 0,
        slow: false,
        slow_times: 0,
        slow_reads: 0,
        action: None,
    }
}

fn capacity(report: &PoolReport) -> PoolCapacity {
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
fn damaged(facts: &PoolFacts) -> Vec<String> {
    let lost = facts.report.iter().flat_map(|r| &r.volumes).filter(|v| v.bears.is_none());
    let name = |id: Uuid| {
        let known = facts.volumes.iter().find(|(known, _)| *known == id);
        known.map_or_else(|| id.to_string(), |(_, name)| name.clone())
    };
    lost.map(|v| name(v.id)).collect()
}

/// Blocks of volumes by name: in a volume they are counted from where its image's label ends.
fn blocks_of(facts: &PoolFacts, of: fn(&PoolReport) -> &[engine::LostRange]) -> Vec<LostBlocks> {
    let Some(report) = &facts.report else { return Vec::new() };
    let shown = |range: &engine::LostRange| {
        let known = facts.volumes.iter().find(|(id, _)| *id == range.volume);
        let start_bytes = range.start.checked_sub(LABEL_AREA_BYTES);
        LostBlocks {
            volume: known.map_or_else(|| range.volume.to_string(), |(_, name)| name.clone()),
            start_bytes,
            bytes: range.bytes,
        }
    };
    of(report).iter().map(shown).collect()
}

/// Blocks of volumes that are lost.
fn lost(facts: &PoolFacts) -> Vec<LostBlocks> {
    blocks_of(facts, |report| &report.lost)
}

/// Blocks of volumes that a scrub could not repair.
fn unrepaired(facts: &PoolFacts) -> Vec<LostBlocks> {
    blocks_of(facts, |report| &report.unrepaired)
}

/// What `is` true of these blocks, in a sentence for each volume.
fn texts_of(blocks: Vec<LostBlocks>, is: &str) -> Vec<String> {
    let mut by_volume: BTreeMap<String, Vec<LostBlocks>> = BTreeMap::new();
    blocks.into_iter().for_each(|l| by_volume.entry(l.volume.clone()).or_default().push(l));
    let text = |(volume, ranges): (String, Vec<LostBlocks>)| {
        let bytes: u64 = ranges.iter().map(|range| range.bytes).sum();
        let range = |r: &LostBlocks| match r.start_bytes {
            Some(start) => format!("bytes {start} to {}", start + r.bytes - 1),
            None => "its label".to_owned(),
        };
        let named: Vec<String> = ranges.iter().take(LOST_NAMED).map(range).collect();
        let more = match ranges.len().saturating_sub(LOST_NAMED) {
            0 => String::new(),
            more => format!(" and {}", count(more, "more range")),
        };
        let (size, which) = (api::Size(bytes), named.join(", "));
        format!("{size} of volume {volume} {is}: {which}{more}")
    };
    by_volume.into_iter().map(text).collect()
}

/// A pool as the API shows it.
pub(super) fn pool(facts: &PoolFacts) -> Pool {
    let PoolFacts { record, report, .. } = facts;
    let report = report.as_ref();
    Pool {
        name: record.name.clone(),
        id: record.id,
        state: state(facts),
        level: report.map(|r| level_text(r.level, r.columns)),
        columns: report.map(|r| r.columns),
        strip_bytes: report.map(|r| r.strip_bytes),
        checksums: report.map(|r| r.checksums),
        capacity: report.map(capacity),
        survives: report.and_then(|r| r.bears),
        disks: match report {
            Some(report) => report.disks.iter().map(|d| disk(&record.name, d)).collect(),
            None => record.disks.iter().map(disk_seen).collect(),
        },
        volumes: facts.volumes.iter().map(|(_, name)| name.clone()).collect(),
        damaged: damaged(facts),
        lost: lost(facts),
        unrepaired: unrepaired(facts),
        rebuild: facts.rebuild,
        scrub: report.and_then(|r| r.scrub.as_ref()).map(|s| Scrub {
            running: s.running,
            done_bytes: s.done_bytes,
            all_bytes: s.all_bytes,
            repaired: s.repaired,
            unrepairable: s.unrepairable,
            ended_s: s.ended_s,
        }),
    }
}

/// What is the matter with a pool. Of one in a cluster volumes may be served by other nodes.
pub(super) fn findings(facts: &PoolFacts, in_cluster: bool, findings: &mut Vec<Finding>) {
    let name = &facts.record.name;
    let subject = format!("pool {name}");
    let cut_off = match (facts.volumes.is_empty(), in_cluster) {
        (false, false) => Severity::Critical,
        _ => Severity::Warning,
    };
    let mut found = |severity, message: String, hint: Option<String>| {
        findings.push(finding(severity, subject.clone(), message, hint.as_deref()));
    };
    if let PoolObserved::Broken(error) = &facts.observed {
        let why = error.of_that_pool(name);
        found(cut_off, format!("it is offline: {why}"), Some(hint_for(name, error)));
    }
    let Some(report) = &facts.report else { return };
    if let Some(why) = &report.broken {
        let hint = "see that its disks are there, then restart the node: it opens the pool anew";
        found(cut_off, format!("it has stopped: {why}"), Some(hint.to_owned()));
    }
    if report.bears.is_none() {
        let lost = damaged(facts);
        let which =
            if lost.is_empty() { String::new() } else { format!(" of {}", lost.join(", ")) };
        let hint = "bring back the disks that are out, or restore those volumes from a backup";
        found(Severity::Critical, format!("data{which} is lost"), Some(hint.to_owned()));
    }
    for message in texts_of(lost(facts), "are lost, as no disk gives them back") {
        let hint = format!(
            "they read as errors until they are written: restore them from a backup (windrose pool show {name} \
             lists all)"
        );
        found(Severity::Critical, message, Some(hint));
    }
    unrepaired_findings(facts, report, &mut found);
    for disk in &report.disks {
        if let Some((severity, message)) = disk_finding(disk, report) {
            found(severity, message, action(name, disk));
        }
    }
    if let Some(rebuild) = &facts.rebuild {
        found(Severity::Warning, rebuild_text(report, rebuild), Some(BY_ITSELF.to_owned()));
    }
}

/// What scrubs could not repair, until it is written.
fn unrepaired_findings(
    facts: &PoolFacts,
    report: &PoolReport,
    found: &mut impl FnMut(Severity, String, Option<String>),
) {
    let name = &facts.record.name;
    let is = "could not be repaired by a scrub, as their copies or parity do not fit, or no disk gives them back";
    for message in texts_of(unrepaired(facts), is) {
        let hint = format!(
            "nobody knows whether they are right: compare them with a backup, and write them again, which ends this \
             (windrose pool show {name} lists all); if they are right: windrose pool clear {name}, then windrose pool \
             scrub {name}"
        );
        found(Severity::Warning, message, Some(hint));
    }
    if report.forgets_unrepaired {
        let message = "scrubs could not repair more ranges than are remembered".to_owned();
        let hint = format!(
            "the node's log names them; when the volumes are restored: windrose pool clear {name}, then windrose pool \
             scrub {name}"
        );
        found(Severity::Warning, message, Some(hint));
    }
}

fn rebuild_text(report: &PoolReport, rebuild: &Rebuild) -> String {
    let Rebuild { left_pieces, all_pieces, eta_s } = rebuild;
    let eta = eta_s.map(|s| format!(", about {} min", s.div_ceil(60))).unwrap_or_default();
    let what = if is_degraded(report) { "it is being rebuilt" } else { "data is being moved" };
    let all = count(*all_pieces, "piece");
    format!("{what}: {left_pieces} of {all} left{eta}; {}", survives(report))
}

/// How many more disks may fail.
fn survives(report: &PoolReport) -> String {
    match report.bears {
        None => "more is lost with any further disk".to_owned(),
        Some(0) if bears_at_best(report.level) == 0 => {
            "data is lost with any disk that fails".to_owned()
        }
        Some(0) => "data is lost if another disk fails".to_owned(),
        Some(1) => "one more disk may fail".to_owned(),
        Some(n) => format!("{n} more disks may fail"),
    }
}

fn disk_finding(disk: &engine::PoolDisk, report: &PoolReport) -> Option<(Severity, String)> {
    stranded_finding(disk).or_else(|| error_finding(disk, report))
}

/// That a disk is to leave and cannot.
fn stranded_finding(disk: &engine::PoolDisk) -> Option<(Severity, String)> {
    if disk.state != PoolDiskState::Leaving || !disk.is_stranded {
        return None;
    }
    let (named, pieces) = (named(disk), count(disk.pieces, "piece"));
    let message = format!(
        "{named} is being removed, and there is no room on the others for {pieces} on it: add a disk, or cancel the removal"
    );
    Some((Severity::Warning, message))
}

/// A disk, for messages.
fn named(disk: &engine::PoolDisk) -> String {
    let at = disk.path.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default();
    let which = if disk.serial.is_empty() { disk.member.to_string() } else { disk.serial.clone() };
    format!("disk {which}{at}")
}

fn error_finding(disk: &engine::PoolDisk, report: &PoolReport) -> Option<(Severity, String)> {
    let errors = disk.read_errors + disk.write_errors + disk.checksum_errors;
    let named = named(disk);
    match disk.state {
        PoolDiskState::Out => {
            Some((Severity::Warning, format!("{named} is out; {}", survives(report))))
        }
        PoolDiskState::In | PoolDiskState::Spare | PoolDiskState::Leaving if errors > 0 => {
            let (reads, writes) =
                (count(disk.read_errors, "read"), count(disk.write_errors, "write"));
            let slow = if disk.slow { ", and is slow" } else { "" };
            let wrong = match disk.checksum_errors {
                0 => String::new(),
                n => format!(", and gave {} what was not written", count(n, "time")),
            };
            let since = disk.errors_since_s.map(|s| format!(" since {}", disk::utc(s)));
            let since = since.unwrap_or_default();
            let message = format!("{named} has failed {reads} and {writes}{wrong}{slow}{since}");
            Some((Severity::Warning, message))
        }
        PoolDiskState::In | PoolDiskState::Spare | PoolDiskState::Leaving if disk.slow => {
            let (times, reads) = (count(disk.slow_times, "time"), count(disk.slow_reads, "read"));
            let message = format!(
                "{named} is slow: {times} so far, and the others have answered {reads} in its place"
            );
            Some((Severity::Warning, message))
        }
        PoolDiskState::In | PoolDiskState::Spare | PoolDiskState::Leaving => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::{BackingError, PoolVolumeReport, ScrubReport};

    /// A RAID 5 over three disks, with one volume.
    pub(crate) fn report(name: &str) -> PoolReport {
        let disk = |member: u16| engine::PoolDisk {
            member,
            id: Uuid::from_u128(member.into()),
            serial: format!("S{member}"),
            path: Some(format!("/dev/sd{member}").into()),
            bytes: 1 << 40,
            pieces: 10,
            room: 100,
            state: PoolDiskState::In,
            behind_pieces: 0,
            is_stranded: false,
            errors_since_s: None,
            read_errors: 0,
            write_errors: 0,
            checksum_errors: 0,
            repaired_blocks: 0,
            unrepairable_blocks: 0,
            slow: false,
            slow_times: 0,
            slow_reads: 0,
        };
        let volume = PoolVolumeReport {
            id: Uuid::from_u128(9),
            bytes: 1 << 30,
            allocated_bytes: 1 << 29,
            bears: Some(1),
        };
        PoolReport {
            id: Uuid::from_u128(7),
            name: name.into(),
            level: Level::Parity,
            columns: 3,
            strip_bytes: 65536,
            checksums: false,
            raw_bytes: 3 << 40,
            usable_bytes: 2 << 40,
            allocated_bytes: 1 << 29,
            free_bytes: (2 << 40) - (1 << 29),
            bears: Some(1),
            disks: vec![disk(0), disk(1), disk(2)],
            volumes: vec![volume],
            lost: Vec::new(),
            unrepaired: Vec::new(),
            forgets_unrepaired: false,
            behind_pieces: 0,
            scrub: None,
            broken: None,
        }
    }

    /// A pool that is open and well.
    pub(crate) fn facts(name: &str) -> PoolFacts {
        PoolFacts {
            record: crate::pools::tests::record(name),
            observed: PoolObserved::Open,
            report: Some(report(name)),
            rebuild: None,
            volumes: vec![(Uuid::from_u128(9), "web".into())],
        }
    }

    fn told(facts: &PoolFacts) -> Vec<(Severity, String, Option<String>)> {
        let mut all = Vec::new();
        findings(facts, false, &mut all);
        assert!(all.iter().all(|f| f.subject == "pool tank"));
        all.into_iter().map(|f| (f.severity, f.message, f.hint)).collect()
    }

    #[test]
    fn a_pool_that_is_well_has_nothing_to_say() {
        let facts = facts("tank");
        assert_eq!(told(&facts), []);
        let shown = pool(&facts);
        assert_eq!((shown.state, shown.level.as_deref()), (PoolState::Online, Some("RAID 5")));
        assert_eq!((shown.survives, shown.volumes), (Some(1), vec!["web".to_owned()]));
        assert_eq!(shown.capacity.unwrap().efficiency_percent, 66);
        assert!(shown.disks.iter().all(|d| d.action.is_none()));
    }

    #[test]
    fn a_disk_that_is_out_is_named_with_what_to_do() {
        let mut facts = facts("tank");
        let report = facts.report.as_mut().unwrap();
        report.bears = Some(0);
        (report.disks[1].state, report.disks[1].path) = (PoolDiskState::Out, None);
        let replace = "replace it: windrose pool replace tank S1 --with DISK";
        let message = "disk S1 is out; data is lost if another disk fails";
        assert_eq!(told(&facts), [(Severity::Warning, message.into(), Some(replace.into()))]);
        let shown = pool(&facts);
        assert_eq!(shown.state, PoolState::Degraded);
        assert_eq!(shown.disks[1].action.as_deref(), Some(replace));
        // A name that a shell would take apart.
        facts.report.as_mut().unwrap().disks[1].serial = "A B".into();
        assert!(told(&facts)[0].2.as_ref().unwrap().contains("replace tank 'A B' --with"));
        // One without a name, as loop devices and files are.
        facts.report.as_mut().unwrap().disks[1].serial.clear();
        assert_eq!(told(&facts)[0].1, "disk 1 is out; data is lost if another disk fails");
    }

    #[test]
    fn a_disk_that_cannot_leave_is_named_with_both_ways_out() {
        let mut facts = facts("tank");
        let report = facts.report.as_mut().unwrap();
        (report.disks[1].state, report.disks[1].is_stranded) = (PoolDiskState::Leaving, true);
        let (_, message, hint) = &told(&facts)[0];
        assert!(message.contains("no room on the others for 10 pieces on it"), "{message}");
        assert!(hint.as_ref().unwrap().ends_with("windrose pool remove tank S1 --cancel"));
        facts.report.as_mut().unwrap().disks[1].is_stranded = false;
        assert_eq!(told(&facts), []);
        assert!(pool(&facts).disks[1].action.as_ref().unwrap().contains("--cancel"));
    }

    #[test]
    fn lost_data_is_named_by_its_volumes() {
        let mut facts = facts("tank");
        let report = facts.report.as_mut().unwrap();
        (report.bears, report.volumes[0].bears) = (None, None);
        let found = told(&facts);
        assert_eq!((found[0].0, found[0].1.as_str()), (Severity::Critical, "data of web is lost"));
        assert_eq!(pool(&facts).damaged, ["web"]);
        assert_eq!(pool(&facts).state, PoolState::Degraded);
    }

    #[test]
    fn lost_blocks_are_named_by_volume_and_range() {
        let mut facts = facts("tank");
        let range = |start: u64| engine::LostRange {
            volume: Uuid::from_u128(9),
            start: LABEL_AREA_BYTES + start,
            bytes: 4096,
        };
        facts.report.as_mut().unwrap().lost = vec![range(0), range(65536)];
        let (severity, message, hint) = &told(&facts)[0];
        assert_eq!(*severity, Severity::Critical);
        let is = "of volume web are lost, as no disk gives them back: bytes 0 to 4095, bytes 65536 to 69631";
        assert!(message.ends_with(is), "{message}");
        assert!(hint.as_ref().unwrap().contains("until they are written"));
        let shown = pool(&facts).lost;
        assert_eq!((shown[1].volume.as_str(), shown[1].start_bytes), ("web", Some(65536)));
        facts.report.as_mut().unwrap().lost = (0..20).map(|n| range(n * 8192)).collect();
        assert!(told(&facts)[0].1.ends_with("and 12 more ranges"));
    }

    #[test]
    fn blocks_that_could_not_be_repaired_are_named_until_they_are_written() {
        let mut facts = facts("tank");
        let (volume, start) = (Uuid::from_u128(9), LABEL_AREA_BYTES + 65536);
        let report = facts.report.as_mut().unwrap();
        report.unrepaired = vec![engine::LostRange { volume, start, bytes: 8192 }];
        let (severity, message, hint) = &told(&facts)[0];
        assert_eq!(*severity, Severity::Warning);
        assert!(message.starts_with("8 KiB of volume web could not be repaired"), "{message}");
        assert!(message.ends_with(": bytes 65536 to 73727"), "{message}");
        assert!(hint.as_ref().unwrap().contains("write them again"), "{hint:?}");
        assert_eq!(pool(&facts).unrepaired[0].start_bytes, Some(65536));
        facts.report.as_mut().unwrap().forgets_unrepaired = true;
        assert_eq!(told(&facts).len(), 2);
        let report = facts.report.as_mut().unwrap();
        (report.unrepaired, report.forgets_unrepaired) = (Vec::new(), false);
        assert_eq!(told(&facts), []);
    }

    #[test]
    fn a_pool_that_is_offline_says_why_and_what_helps() {
        let mut facts = facts("tank");
        facts.report = None;
        facts.observed =
            PoolObserved::Broken(BackingError::refused("pool tank: 2 disks are missing"));
        let found = told(&facts);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].0, found[0].1.as_str()),
            (Severity::Critical, "it is offline: 2 disks are missing")
        );
        assert!(found[0].2.as_ref().unwrap().contains("windrose pool open tank --without DISK"));
        let shown = pool(&facts);
        assert_eq!(shown.state, PoolState::Offline { reason: "2 disks are missing".into() });
        assert_eq!((shown.capacity, shown.disks[0].serial.as_deref()), (None, Some("S1")));
        facts.volumes.clear();
        assert_eq!(told(&facts)[0].0, Severity::Warning, "nobody misses it");
        facts.observed = PoolObserved::Closed;
        assert_eq!((told(&facts).len(), pool(&facts).state), (0, PoolState::Opening));
    }

    #[test]
    fn failing_disks_scrubs_and_stops_are_told() {
        let mut facts = facts("tank");
        let report = facts.report.as_mut().unwrap();
        report.disks[2].write_errors = 3;
        report.scrub = Some(ScrubReport {
            running: false,
            done_bytes: 1,
            all_bytes: 1,
            repaired: 4,
            unrepairable: 1,
            ended_s: Some(1),
        });
        let found = told(&facts);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].1, "disk S2 at /dev/sd2 has failed 0 reads and 3 writes");
        assert!(found[0].2.as_ref().unwrap().ends_with("windrose pool clear tank S2"));
        let disk = &mut facts.report.as_mut().unwrap().disks[2];
        (disk.read_errors, disk.checksum_errors) = (5, 4);
        let is = "disk S2 at /dev/sd2 has failed 5 reads and 3 writes, and gave 4 times what was not written";
        assert_eq!(told(&facts)[0].1, is);
        let disk = &mut facts.report.as_mut().unwrap().disks[2];
        (disk.read_errors, disk.checksum_errors) = (0, 0);
        (disk.write_errors, disk.slow, disk.slow_times, disk.slow_reads) = (0, true, 2, 70);
        let (_, message, hint) = &told(&facts)[0];
        let is = "disk S2 at /dev/sd2 is slow: 2 times so far, and the others have answered 70 reads in its place";
        assert_eq!(message, is);
        assert!(hint.as_ref().unwrap().contains("replace it if that goes on"), "{hint:?}");
        assert!(pool(&facts).disks[2].slow);
        facts.report.as_mut().unwrap().broken = Some("no quorum".into());
        assert_eq!(
            (told(&facts)[0].0, told(&facts)[0].1.as_str()),
            (Severity::Critical, "it has stopped: no quorum")
        );
        assert_eq!(pool(&facts).state, PoolState::Offline { reason: "no quorum".into() });
    }

    #[test]
    fn a_rebuild_is_told_by_how_far_it_was() {
        let mut progress = None;
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        let of = |left_pieces, all_pieces, eta_s| Some(Rebuild { left_pieces, all_pieces, eta_s });
        assert_eq!(rebuild(&mut progress, 0, at(0)), None);
        assert_eq!(rebuild(&mut progress, 100, at(0)), of(100, 100, None));
        assert_eq!(rebuild(&mut progress, 75, at(50)), of(75, 100, Some(150)));
        assert_eq!(rebuild(&mut progress, 120, at(60)), of(120, 120, None), "another disk failed");
        assert_eq!(rebuild(&mut progress, 0, at(70)), None);
        assert_eq!(progress, None);
        let mut facts = facts("tank");
        facts.report.as_mut().unwrap().behind_pieces = 75;
        facts.rebuild = of(75, 100, Some(150));
        assert_eq!(pool(&facts).state, PoolState::Rebuilding);
        let found = told(&facts);
        assert_eq!(
            found[0].1,
            "data is being moved: 75 of 100 pieces left, about 3 min; one more disk may fail"
        );
    }

    #[test]
    fn levels_are_called_what_people_call_them() {
        for (level, columns, text) in [
            (Level::Copies(1), 4, "RAID 0"),
            (Level::Copies(2), 2, "RAID 1"),
            (Level::Copies(3), 3, "RAID 1 with 3 copies"),
            (Level::Copies(2), 4, "RAID 10"),
            (Level::Copies(3), 6, "RAID 10 with 3 copies"),
            (Level::Parity, 5, "RAID 5"),
            (Level::DoubleParity, 6, "RAID 6"),
        ] {
            assert_eq!(level_text(level, columns), text);
        }
    }
}
