//! Arithmetic on the error counts of a disk.

use std::sync::atomic::{AtomicU64, Ordering};

use pool_metadata::MemberErrorCounts;
use raid::DiskCounters;

/// Error counts of a disk up to now, including those of earlier terms that [`add_counts`] added.
pub(super) fn total_counts(counters: &DiskCounters, since_s: u64) -> MemberErrorCounts {
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    MemberErrorCounts {
        read_errors: count(&counters.read_errors),
        write_errors: count(&counters.write_errors),
        corrupt_reads: count(&counters.corrupt_reads),
        repaired_rows: count(&counters.repaired_rows),
        unrecoverable_rows: count(&counters.unrecoverable_rows),
        since_s,
    }
}

/// Adds the counts of earlier terms.
pub(super) fn add_counts(counters: &DiskCounters, before: MemberErrorCounts) {
    let add = |count: &AtomicU64, more| count.fetch_add(more, Ordering::Relaxed);
    add(&counters.read_errors, before.read_errors);
    add(&counters.write_errors, before.write_errors);
    add(&counters.corrupt_reads, before.corrupt_reads);
    add(&counters.repaired_rows, before.repaired_rows);
    add(&counters.unrecoverable_rows, before.unrecoverable_rows);
}

/// Resets all counts to zero.
pub(super) fn reset_counts(errors: &DiskCounters) {
    let DiskCounters {
        read_errors: reads,
        write_errors: writes,
        corrupt_reads: checksums,
        repaired_rows: repaired,
        unrecoverable_rows: unrepairable,
        ..
    } = errors;
    let all: [&AtomicU64; 5] = [reads, writes, checksums, repaired, unrepairable];
    all.iter().for_each(|count| count.store(0, Ordering::Relaxed));
}
