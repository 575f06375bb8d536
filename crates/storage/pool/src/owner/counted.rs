//! Errors of disks, which are counted from one opening of the pool to the next, until somebody clears them.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use raid::Errors;

use super::Pool;
use crate::error::PoolError;
use crate::metadata::{Change, ErrorCounts, Member, MemberId, Metadata};

/// What has been counted of a disk up to now. It knows what was counted in earlier openings ([`go_on`]).
pub(crate) fn counted(errors: &Errors, since_s: u64) -> ErrorCounts {
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    ErrorCounts {
        reads: count(&errors.reads),
        writes: count(&errors.writes),
        checksums: count(&errors.checksums),
        repaired: count(&errors.repaired),
        unrepairable: count(&errors.unrepairable),
        since_s,
    }
}

/// What was counted before is counted as well.
pub(crate) fn go_on(errors: &Errors, before: ErrorCounts) {
    let add = |count: &AtomicU64, more| count.fetch_add(more, Ordering::Relaxed);
    add(&errors.reads, before.reads);
    add(&errors.writes, before.writes);
    add(&errors.checksums, before.checksums);
    add(&errors.repaired, before.repaired);
    add(&errors.unrepairable, before.unrepairable);
}

/// Nothing has been counted.
fn begin_anew(errors: &Errors) {
    let Errors { reads, writes, checksums, repaired, unrepairable, .. } = errors;
    let all: [&AtomicU64; 5] = [reads, writes, checksums, repaired, unrepairable];
    all.iter().for_each(|count| count.store(0, Ordering::Relaxed));
}

impl Pool {
    /// Errors of a member in all openings.
    pub(crate) fn errors_of(&self, id: MemberId, member: &Member) -> ErrorCounts {
        let errors = self.writer.errors(id);
        errors.map_or(member.errors, |errors| counted(&errors, member.errors.since_s))
    }

    /// Seconds since the Unix epoch.
    pub(super) fn now_s(&self) -> u64 {
        self.core.wall_clock().as_secs().max(1)
    }

    /// Writes down what has been counted since the last time.
    pub(super) async fn note_errors(&self) {
        let changes: Vec<Change> = {
            let metadata = self.writer.metadata();
            let news = |(id, member): (MemberId, &Member)| {
                let mut errors = self.errors_of(id, member);
                if errors.since_s == 0 {
                    errors.since_s = self.now_s();
                }
                (errors != member.errors).then_some(Change::Counted { member: id, errors })
            };
            metadata.members().filter_map(news).collect()
        };
        for noted in join_all(changes.into_iter().map(|change| self.writer.commit(change))).await {
            if let Err(error) = noted {
                tracing::debug!(%error, "errors of a disk are not written down");
            }
        }
    }

    /// Forgets the errors that were counted of a disk, or of all; with all also which rows scrubs could not repair: the
    /// next one says whether that is still so.
    ///
    /// # Errors
    /// That there is no such disk, or nothing can be written.
    pub async fn clear_errors(&self, disk: Option<&str>) -> Result<(), PoolError> {
        let only = disk.map(|disk| self.named(disk)).transpose()?;
        let changes: Vec<Change> = {
            let metadata = self.writer.metadata();
            let members = metadata.members().filter(|(id, _)| only.is_none_or(|only| only == *id));
            let errors = ErrorCounts { since_s: self.now_s(), ..ErrorCounts::default() };
            let cleared = members.map(|(member, _)| {
                self.writer.errors(member).iter().for_each(|counts| begin_anew(counts));
                Change::Counted { member, errors }
            });
            let mut changes: Vec<Change> = cleared.collect();
            if only.is_none() {
                changes.extend(forgotten(&metadata));
            }
            changes
        };
        let all = join_all(changes.into_iter().map(|change| self.writer.commit(change))).await;
        all.into_iter().collect()
    }
}

/// What forgets all rows that were not repaired.
fn forgotten(metadata: &Metadata) -> Vec<Change> {
    let of_volume = |(volume, all): (_, &crate::metadata::Volume)| {
        let rows = all.all_unrepaired().map(move |(index, rows)| {
            let (row, rows) = (rows.start, rows.end - rows.start);
            Change::Rewritten { volume, index, row, rows }
        });
        rows.collect::<Vec<_>>()
    };
    metadata.volumes().flat_map(of_volume).collect()
}
