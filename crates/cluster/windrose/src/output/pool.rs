//! Formats disk pools for people.

use api::{
    DiskState, LostBlocks, Pool, PoolCapacity, PoolDisk, PoolList, PoolState, Rebuild, Scrub, Size,
};

use super::{format_duration, format_facts, table};
use wire::plural;

/// `windrose pool list`.
pub(crate) fn pools(list: &PoolList) -> String {
    let unread = list
        .unreadable_records
        .iter()
        .map(|why| format!("\n\nThe record of another pool cannot be read: {why}"));
    let unread: String = unread.collect();
    if list.pools.is_empty() && !unread.is_empty() {
        return unread.trim_start().to_owned();
    }
    if list.pools.is_empty() {
        return "There are no pools. To create one:\n  windrose pool create NAME --raid 5 DISK DISK DISK"
            .to_owned();
    }
    let head = ["NAME", "LEVEL", "STATE", "USABLE", "ALLOCATED", "FREE", "DISKS", "MAY FAIL"];
    let row = |p: &Pool| {
        let bytes = |of: fn(&PoolCapacity) -> u64| {
            p.capacity.as_ref().map_or("-".to_owned(), |c| Size(of(c)).to_string())
        };
        vec![
            p.name.to_string(),
            p.level.clone().unwrap_or_else(|| "-".to_owned()),
            state(&p.state).to_owned(),
            bytes(|c| c.usable_bytes),
            bytes(|c| c.allocated_bytes),
            bytes(|c| c.free_bytes),
            p.disks.len().to_string(),
            p.fault_tolerance.map_or("-".to_owned(), |n| n.to_string()),
        ]
    };
    format!("{}{unread}", table(&head, &[3, 4, 5, 6, 7], list.pools.iter().map(row)))
}

fn state(state: &PoolState) -> &'static str {
    match state {
        PoolState::Online => "online",
        PoolState::Degraded => "DEGRADED",
        PoolState::Rebuilding => "rebuilding",
        PoolState::Offline { .. } => "OFFLINE",
        PoolState::Creating => "creating",
        PoolState::Opening => "opening",
        PoolState::Deleting => "deleting",
    }
}

/// `windrose pool show`.
pub(crate) fn pool(p: &Pool) -> String {
    let mut facts = vec![("Pool", p.name.to_string()), ("State", state(&p.state).to_owned())];
    if let PoolState::Offline { reason } = &p.state {
        facts.push(("Reason", reason.clone()));
    }
    if let Some(level) = &p.level {
        facts.push(("Level", format!("{level}{}", layout_text(p))));
    }
    if let Some(capacity) = &p.capacity {
        facts.extend(capacity_facts(capacity));
        facts.push(("May fail", fault_tolerance(p)));
    }
    if !p.damaged_volumes.is_empty() {
        facts.push(("LOST DATA", p.damaged_volumes.join(", ")));
    }
    facts.extend(p.lost_blocks.iter().map(|lost| ("LOST BLOCKS", lost_text(lost))));
    let unrepaired = p.unrepaired_blocks.iter().map(|blocks| ("NOT REPAIRED", lost_text(blocks)));
    facts.extend(unrepaired);
    facts.extend(p.rebuild.as_ref().map(|rebuild| ("Rebuild", rebuild_text(rebuild))));
    facts.extend(p.scrub.as_ref().map(|scrub| ("Scrub", scrub_text(scrub))));
    let volumes = if p.volumes.is_empty() { "none".to_owned() } else { p.volumes.join(", ") };
    facts.push(("Volumes", volumes));
    facts.push(("Identity", p.id.to_string()));
    let mut text = format_facts(&facts);
    text.push_str(&format!("\n{}\n", disk_table(&p.disks)));
    for (disk, summary) in p.disks.iter().filter_map(|d| Some((d, error_summary(d)?))) {
        text.push_str(&format!("\nDisk {}: {summary}\n", disk_label(disk)));
    }
    for (disk, action) in p.disks.iter().filter_map(|d| Some((d, d.hint.as_ref()?))) {
        text.push_str(&format!("\nDisk {}:\n  {action}\n", disk_label(disk)));
    }
    text
}

fn lost_text(lost: &LostBlocks) -> String {
    let LostBlocks { volume, start_bytes, bytes } = lost;
    match start_bytes {
        Some(start) => format!("{volume}: bytes {start} to {}", start + bytes.saturating_sub(1)),
        None => format!("{volume}: its label"),
    }
}

fn layout_text(p: &Pool) -> String {
    let checksums = if p.checksums == Some(true) { ", checksums" } else { "" };
    match (p.columns, p.chunk_bytes) {
        (Some(1), _) => format!(", one disk in a stripe{checksums}"),
        (Some(columns), Some(chunk)) => {
            format!(", {columns} disks in a stripe, chunks of {}{checksums}", Size(chunk.into()))
        }
        _ => String::new(),
    }
}

fn capacity_facts(c: &PoolCapacity) -> [(&'static str, String); 2] {
    let (usable, raw) = (Size(c.usable_bytes), Size(c.raw_bytes));
    let usable = format!("{usable} for volumes, {}% of {raw}", c.efficiency_percent);
    let taken = format!("{} allocated, {} free", Size(c.allocated_bytes), Size(c.free_bytes));
    [("Capacity", usable), ("Space", taken)]
}

fn fault_tolerance(p: &Pool) -> String {
    match p.fault_tolerance {
        None => "none: data is already lost".to_owned(),
        Some(0) => "none: data is lost with the next disk".to_owned(),
        Some(1) => "1 disk".to_owned(),
        Some(n) => format!("{n} disks"),
    }
}

fn rebuild_text(r: &Rebuild) -> String {
    let eta = r.eta_s.map(|s| format!(", {} left", format_duration(s))).unwrap_or_default();
    format!(
        "{} of {} done{eta}",
        r.total_extents - r.remaining_extents.min(r.total_extents),
        plural(r.total_extents, "extent")
    )
}

fn scrub_text(s: &Scrub) -> String {
    let how_far = match s.running {
        true => format!("{} of {}", Size(s.done_bytes), Size(s.total_bytes)),
        false => {
            let ended =
                s.ended_s.map(|s| format!(" at {}", disk::format_utc(s))).unwrap_or_default();
            format!("done{ended}, {}", Size(s.total_bytes))
        }
    };
    format!("{how_far}; {} repaired, {} cannot be", s.repaired_rows, s.unrecoverable_rows)
}

fn disk_label(disk: &PoolDisk) -> String {
    let number = disk.member.map_or("?".to_owned(), |n| n.to_string());
    match disk.serial.as_deref() {
        None | Some("") => number,
        Some(serial) => format!("{number} ({serial})"),
    }
}

fn disk_table(all: &[PoolDisk]) -> String {
    let head = ["DISK", "SERIAL", "PATH", "STATE", "SIZE", "EXTENTS", "ERRORS"];
    let unknown = || "-".to_owned();
    let row = |d: &PoolDisk| {
        let stale = match d.stale_extents {
            0 => String::new(),
            n => format!(" ({n} stale)"),
        };
        vec![
            d.member.map_or_else(unknown, |n| n.to_string()),
            d.serial.clone().unwrap_or_else(unknown),
            d.path.as_ref().map_or_else(unknown, |path| path.display().to_string()),
            disk_state(d).to_owned(),
            d.size_bytes.map_or_else(unknown, |b| Size(b).to_string()),
            d.member.map_or_else(unknown, |_| {
                format!("{} of {}{stale}", d.allocated_extents, d.total_extents)
            }),
            d.member.map_or_else(unknown, |_| error_counts(d)),
        ]
    };
    table(&head, &[0, 4], all.iter().map(row))
}

/// Failed reads, reads with wrong data, and failed writes.
fn error_counts(disk: &PoolDisk) -> String {
    let wrong = match disk.checksum_errors {
        0 => String::new(),
        n => format!(" ({n} wrong)"),
    };
    format!("{}{wrong} / {}", disk.read_errors, disk.write_errors)
}

/// The errors of a disk that has had some: since when they are counted, and what became of them.
fn error_summary(disk: &PoolDisk) -> Option<String> {
    let errors = disk.read_errors + disk.write_errors + disk.checksum_errors;
    let (repaired, lost) = (disk.repaired_blocks, disk.unrepairable_blocks);
    let since = disk::format_utc(disk.errors_since_s.filter(|_| errors + repaired + lost > 0)?);
    Some(format!("errors since {since}; {} repaired, {lost} lost", plural(repaired, "block")))
}

fn disk_state(disk: &PoolDisk) -> &'static str {
    match disk.state {
        DiskState::Active | DiskState::Spare | DiskState::Draining if disk.slow => "SLOW",
        DiskState::Active => "active",
        DiskState::Spare => "spare",
        DiskState::Draining => "draining",
        DiskState::Detached => "DETACHED",
        DiskState::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(member: u16) -> PoolDisk {
        PoolDisk {
            member: Some(member),
            serial: Some(format!("WD-{member}")),
            path: Some(format!("/dev/disk/by-id/wd-{member}").into()),
            state: DiskState::Active,
            size_bytes: Some(4 << 40),
            allocated_extents: 1200,
            total_extents: 260_000,
            stale_extents: 0,
            errors_since_s: None,
            repaired_blocks: 0,
            unrepairable_blocks: 0,
            read_errors: 0,
            write_errors: 0,
            slow: false,
            checksum_errors: 0,
            slow_episodes: 0,
            redirected_reads: 0,
            hint: None,
        }
    }

    fn sample() -> Pool {
        Pool {
            name: "tank".parse().unwrap(),
            id: "6f9619ff-8b86-4011-b42d-00c04fc964ff".parse().unwrap(),
            state: PoolState::Online,
            level: Some("RAID 5".into()),
            columns: Some(3),
            chunk_bytes: Some(65536),
            checksums: Some(false),
            capacity: Some(PoolCapacity {
                raw_bytes: 12 << 40,
                usable_bytes: 8 << 40,
                allocated_bytes: 1 << 40,
                free_bytes: 7 << 40,
                efficiency_percent: 66,
            }),
            fault_tolerance: Some(1),
            disks: vec![disk(0), disk(1), disk(2)],
            volumes: vec!["vm1".into(), "vm2".into()],
            damaged_volumes: Vec::new(),
            lost_blocks: Vec::new(),
            unrepaired_blocks: Vec::new(),
            rebuild: None,
            scrub: None,
        }
    }

    fn offline() -> Pool {
        let seen = |member: u16| PoolDisk {
            member: None,
            state: DiskState::Unknown,
            size_bytes: None,
            ..disk(member)
        };
        Pool {
            name: "old".parse().unwrap(),
            state: PoolState::Offline { reason: "2 of its 3 disks are missing: WD-1, WD-2".into() },
            level: None,
            columns: None,
            chunk_bytes: None,
            checksums: None,
            capacity: None,
            fault_tolerance: None,
            disks: vec![seen(0), seen(1), seen(2)],
            ..sample()
        }
    }

    #[test]
    fn a_list_of_pools() {
        let list = PoolList { pools: vec![offline(), sample()], unreadable_records: Vec::new() };
        insta::assert_snapshot!(pools(&list));
        insta::assert_snapshot!(pools(&PoolList::default()));
        let unread = vec!["/v/pools/zoo.json: it has format 2".to_owned()];
        let text = pools(&PoolList { pools: Vec::new(), unreadable_records: unread.clone() });
        assert!(
            text.starts_with("The record of another pool cannot be read: /v/pools/zoo.json"),
            "{text}"
        );
        let text = pools(&PoolList { pools: vec![sample()], unreadable_records: unread });
        assert!(
            text.contains("\n\nThe record of another pool cannot be read: /v/pools/zoo.json"),
            "{text}"
        );
    }

    #[test]
    fn a_pool_that_is_well() {
        insta::assert_snapshot!(pool(&sample()));
    }

    #[test]
    fn a_pool_with_a_slow_disk() {
        let mut p = sample();
        let action = "look at it, and replace it if that goes on: windrose pool replace tank WD-1 --with DISK";
        p.disks[1] = PoolDisk {
            slow: true,
            slow_episodes: 3,
            redirected_reads: 700,
            hint: Some(action.into()),
            ..disk(1)
        };
        insta::assert_snapshot!(pool(&p));
    }

    #[test]
    fn a_pool_with_a_disk_that_lies() {
        let mut p = Pool { checksums: Some(true), ..sample() };
        p.disks[1] = PoolDisk { read_errors: 3, checksum_errors: 2, ..disk(1) };
        insta::assert_snapshot!(pool(&p));
    }

    #[test]
    fn a_pool_that_is_offline() {
        insta::assert_snapshot!(pool(&offline()));
    }

    #[test]
    fn lost_blocks_are_listed_by_volume_and_bytes() {
        let lost = |start_bytes| LostBlocks { volume: "vm1".into(), start_bytes, bytes: 4096 };
        let p = Pool { lost_blocks: vec![lost(Some(65536)), lost(None)], ..sample() };
        let shown = pool(&p);
        assert!(shown.contains("vm1: bytes 65536 to 69631"), "{shown}");
        assert!(shown.contains("vm1: its label"), "{shown}");
    }

    #[test]
    fn errors_say_since_when_they_are_counted() {
        let errors_since_s = Some(1_764_234_000);
        let mut p = sample();
        p.disks[1] = PoolDisk { errors_since_s, read_errors: 3, repaired_blocks: 2, ..disk(1) };
        p.disks[2] = PoolDisk { errors_since_s, ..disk(2) };
        let shown = pool(&p);
        let is = "Disk 1 (WD-1): errors since 2025-11-27 09:00:00 UTC; 2 blocks repaired, 0 lost\n";
        assert!(shown.contains(is), "{shown}");
        assert_eq!(shown.matches("errors since").count(), 1);
    }

    #[test]
    fn a_pool_that_is_rebuilt() {
        let mut p = sample();
        let out = PoolDisk {
            path: None,
            state: DiskState::Detached,
            stale_extents: 900,
            write_errors: 2,
            hint: Some("replace it: windrose pool replace tank WD-1 --with DISK".into()),
            ..disk(1)
        };
        p.disks[1] = out;
        p.disks.push(PoolDisk { state: DiskState::Spare, allocated_extents: 0, ..disk(3) });
        (p.state, p.fault_tolerance) = (PoolState::Rebuilding, Some(0));
        p.rebuild =
            Some(Rebuild { remaining_extents: 900, total_extents: 1200, eta_s: Some(4000) });
        p.scrub = Some(Scrub {
            running: true,
            done_bytes: 1 << 30,
            total_bytes: 1 << 40,
            repaired_rows: 3,
            unrecoverable_rows: 0,
            ended_s: None,
        });
        p.damaged_volumes = vec!["vm2".into()];
        insta::assert_snapshot!(pool(&p));
    }
}
