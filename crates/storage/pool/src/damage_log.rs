//! Logs damaged blocks in few lines, because a failing disk reports thousands.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use geometry::DamageKind;
use pool_metadata::{MemberId, PoolVolumeId};
use tokio::time::Instant;

/// How often damage of one kind, disk and volume is logged at most.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Damage with the same key is logged together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DamageKey {
    pub(super) kind: DamageKind,
    pub(super) member: Option<MemberId>,
    pub(super) volume: PoolVolumeId,
}

/// A log line that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DamageReport {
    pub(super) key: DamageKey,
    /// How often damage was recorded since the last report.
    pub(super) count: u64,
    /// The range of bytes of the volume that contains it.
    pub(super) byte_range: Range<u64>,
}

#[derive(Debug)]
struct UnreportedDamage {
    last_report: Instant,
    count: u64,
    byte_range: Range<u64>,
}

/// Damage that was reported, and that is to be.
#[derive(Debug, Default)]
pub(super) struct DamageLog(RefCell<BTreeMap<DamageKey, UnreportedDamage>>);

impl DamageLog {
    /// Records damaged bytes of a volume. The first of its key is reported at once.
    pub(super) fn record(&self, key: DamageKey, bytes: Range<u64>) -> Option<DamageReport> {
        let mut all = self.0.borrow_mut();
        let now = Instant::now();
        let Some(tally) = all.get_mut(&key) else {
            all.insert(key, UnreportedDamage { last_report: now, count: 0, byte_range: 0..0 });
            return Some(DamageReport { key, count: 1, byte_range: bytes });
        };
        let joined = tally.byte_range.start.min(bytes.start)..tally.byte_range.end.max(bytes.end);
        tally.byte_range = if tally.count == 0 { bytes } else { joined };
        tally.count += 1;
        None
    }

    /// Reports that are due by now. Keys without damage since their last report are forgotten.
    pub(super) fn take_due(&self) -> Vec<DamageReport> {
        let (mut due, now) = (Vec::new(), Instant::now());
        self.0.borrow_mut().retain(|key, tally| {
            if now.duration_since(tally.last_report) < REPORT_INTERVAL {
                return true;
            }
            let (times, bytes) = (std::mem::take(&mut tally.count), tally.byte_range.clone());
            tally.last_report = now;
            if times > 0 {
                due.push(DamageReport { key: *key, count: times, byte_range: bytes });
            }
            times > 0
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(member: u16, volume: u32) -> DamageKey {
        let (kind, member) = (DamageKind::Unreadable, Some(MemberId(member)));
        DamageKey { kind, member, volume: PoolVolumeId(volume) }
    }

    #[tokio::test(start_paused = true)]
    async fn many_damaged_blocks_are_logged_in_two_lines() {
        let log = DamageLog::default();
        let mut reports = Vec::new();
        for n in 0..10_000u64 {
            let at = (n * 7 % 10_000) * 4096;
            reports.extend(log.record(of(1, 1), at..at + 4096));
        }
        assert_eq!(reports, [DamageReport { key: of(1, 1), count: 1, byte_range: 0..4096 }]);
        assert_eq!(log.take_due(), []);
        tokio::time::advance(REPORT_INTERVAL).await;
        assert_eq!(
            log.take_due(),
            [DamageReport { key: of(1, 1), count: 9999, byte_range: 4096..10_000 * 4096 }]
        );
        // Another disk, or another volume, is another line.
        assert!(log.record(of(1, 1), 0..1).is_none());
        assert!(log.record(of(2, 1), 0..1).is_some() && log.record(of(1, 2), 0..1).is_some());
        tokio::time::advance(REPORT_INTERVAL).await;
        assert_eq!(log.take_due(), [DamageReport { key: of(1, 1), count: 1, byte_range: 0..1 }]);
        tokio::time::advance(REPORT_INTERVAL).await;
        assert_eq!(log.take_due(), []);
        assert!(log.record(of(1, 1), 0..1).is_some(), "it was quiet for a while");
    }
}
