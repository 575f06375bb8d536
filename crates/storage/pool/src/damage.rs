//! Damaged blocks, in few words: a disk that fails tells of thousands.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use geometry::DamageKind;
use tokio::time::Instant;

use super::metadata::{MemberId, VolumeId};

/// Damage of one kind, of one disk and one volume, is told at most so often.
pub(super) const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Of what damage is told together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Of {
    pub(super) kind: DamageKind,
    pub(super) member: Option<MemberId>,
    pub(super) volume: VolumeId,
}

/// What is told at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) of: Of,
    /// How many times something was damaged since it was told last.
    pub(super) times: u64,
    /// Bytes of the volume between which that was.
    pub(super) bytes: Range<u64>,
}

#[derive(Debug)]
struct Tally {
    told: Instant,
    times: u64,
    bytes: Range<u64>,
}

/// Damage that was told, and is to be.
#[derive(Debug, Default)]
pub(super) struct DamageLog(RefCell<BTreeMap<Of, Tally>>);

impl DamageLog {
    /// Bytes of a volume are damaged. What is to be told now: the first of its kind is at once.
    pub(super) fn note(&self, of: Of, bytes: Range<u64>) -> Option<Told> {
        let mut all = self.0.borrow_mut();
        let now = Instant::now();
        let Some(tally) = all.get_mut(&of) else {
            all.insert(of, Tally { told: now, times: 0, bytes: 0..0 });
            return Some(Told { of, times: 1, bytes });
        };
        let joined = tally.bytes.start.min(bytes.start)..tally.bytes.end.max(bytes.end);
        tally.bytes = if tally.times == 0 { bytes } else { joined };
        tally.times += 1;
        None
    }

    /// What is to be told by now. What has been quiet since it was told last is forgotten.
    pub(super) fn due(&self) -> Vec<Told> {
        let (mut due, now) = (Vec::new(), Instant::now());
        self.0.borrow_mut().retain(|of, tally| {
            if now.duration_since(tally.told) < TOLD_EVERY {
                return true;
            }
            let (times, bytes) = (std::mem::take(&mut tally.times), tally.bytes.clone());
            tally.told = now;
            if times > 0 {
                due.push(Told { of: *of, times, bytes });
            }
            times > 0
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(member: u16, volume: u32) -> Of {
        let (kind, member) = (DamageKind::Unreadable, Some(MemberId(member)));
        Of { kind, member, volume: VolumeId(volume) }
    }

    #[tokio::test(start_paused = true)]
    async fn ten_thousand_blocks_are_two_lines() {
        let log = DamageLog::default();
        let mut told = Vec::new();
        for n in 0..10_000u64 {
            let at = (n * 7 % 10_000) * 4096;
            told.extend(log.note(of(1, 1), at..at + 4096));
        }
        assert_eq!(told, [Told { of: of(1, 1), times: 1, bytes: 0..4096 }]);
        assert_eq!(log.due(), []);
        tokio::time::advance(TOLD_EVERY).await;
        assert_eq!(log.due(), [Told { of: of(1, 1), times: 9999, bytes: 4096..10_000 * 4096 }]);
        // Another disk, or another volume, is another line.
        assert!(log.note(of(1, 1), 0..1).is_none());
        assert!(log.note(of(2, 1), 0..1).is_some() && log.note(of(1, 2), 0..1).is_some());
        tokio::time::advance(TOLD_EVERY).await;
        assert_eq!(log.due(), [Told { of: of(1, 1), times: 1, bytes: 0..1 }]);
        tokio::time::advance(TOLD_EVERY).await;
        assert_eq!(log.due(), []);
        assert!(log.note(of(1, 1), 0..1).is_some(), "it was quiet for a while");
    }
}
