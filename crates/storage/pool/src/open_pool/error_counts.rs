//! Error counts of disks, kept across terms until the operator clears them.

use futures_util::future::join_all;
use pool_metadata::{Change, MemberErrorCounts, MemberId, Metadata, PoolMember};

use super::Pool;
use crate::error::PoolError;
use crate::error_counts::{reset_counts, total_counts};

impl Pool {
    /// Errors of a member over all terms.
    pub(crate) fn error_counts_of(&self, id: MemberId, member: &PoolMember) -> MemberErrorCounts {
        let counters = self.writer.counters(id);
        counters.map_or(member.error_counts, |counters| {
            total_counts(&counters, member.error_counts.since_s)
        })
    }

    /// Seconds since the Unix epoch.
    pub(super) fn now_s(&self) -> u64 {
        self.core.wall_clock().as_secs().max(1)
    }

    /// Records the error counts that changed since the last time.
    pub(super) async fn record_errors(&self) {
        let changes: Vec<Change> = {
            let metadata = self.writer.metadata();
            let change = |(id, member): (MemberId, &PoolMember)| {
                let mut errors = self.error_counts_of(id, member);
                if errors.since_s == 0 {
                    errors.since_s = self.now_s();
                }
                (errors != member.error_counts)
                    .then_some(Change::RecordErrors { member: id, errors })
            };
            metadata.members().filter_map(change).collect()
        };
        for recorded in join_all(changes.into_iter().map(|change| self.writer.commit(change))).await
        {
            if let Err(error) = recorded {
                tracing::debug!(%error, "recording the errors of a disk failed");
            }
        }
    }

    /// Clears the error counts of a disk, or of all disks; for all, also the record of unrepaired
    /// rows: the next scrub will find them again.
    ///
    /// # Errors
    /// There is no such disk, or nothing can be written.
    pub async fn clear_errors(&self, disk: Option<&str>) -> Result<(), PoolError> {
        let only = disk.map(|disk| self.resolve_member(disk)).transpose()?;
        let changes: Vec<Change> = {
            let metadata = self.writer.metadata();
            let members = metadata.members().filter(|(id, _)| only.is_none_or(|only| only == *id));
            let errors =
                MemberErrorCounts { since_s: self.now_s(), ..MemberErrorCounts::default() };
            let cleared = members.map(|(member, _)| {
                self.writer.counters(member).iter().for_each(|counts| reset_counts(counts));
                Change::RecordErrors { member, errors }
            });
            let mut changes: Vec<Change> = cleared.collect();
            if only.is_none() {
                changes.extend(unrepaired_clearing_changes(&metadata));
            }
            changes
        };
        let all = join_all(changes.into_iter().map(|change| self.writer.commit(change))).await;
        all.into_iter().collect()
    }
}

/// The changes that clear all unrepaired rows.
fn unrepaired_clearing_changes(metadata: &Metadata) -> Vec<Change> {
    let of_volume = |(volume, all): (_, &pool_metadata::PoolVolume)| {
        let rows = all.all_unrepaired().map(move |(index, rows)| {
            let (row, rows) = (rows.start, rows.end - rows.start);
            Change::MarkRewritten { volume, index, first_row: row, row_count: rows }
        });
        rows.collect::<Vec<_>>()
    };
    metadata.volumes().flat_map(of_volume).collect()
}
