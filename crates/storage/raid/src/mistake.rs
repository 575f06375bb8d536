//! Mistakes that tests plant, to show that they are found.

/// A mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Writes a stripe before its log entry is durable.
    WritesBeforeLog,
    /// Writes copies without a write intent.
    SkipsWriteIntents,
    /// Does not log an intent on a member that is rebuilt later.
    SkipsIntentOfLaterCopies,
    /// Computes Q with the coefficient of the next strip.
    WrongQCoefficient,
    /// Rewrites a stripe before its earlier write is durable.
    RewritesBeforeFlush,
    /// Acknowledges a write that a member failed before the detach is recorded.
    AcksBeforeDetachRecorded,
    /// Reconstructs without the stripe lock.
    ReconstructsWithoutStripeLock,
    /// Serves a hedged read without the stripe lock.
    HedgesWithoutStripeLock,
    /// Logs the move of a stripe before its data is written.
    RecordsMoveBeforeData,
    /// Does not log the move.
    SkipsMoveRecord,
    /// Rebuilds without the stripe lock.
    RebuildsWithoutStripeLock,
    /// Does not record regions that become stale while a member is detached.
    SkipsStaleRegions,
    /// Does not record regions whose unflushed writes a detached member may have lost.
    SkipsUnflushedRegions,
    /// Records stale regions before and after a write only, not for a member detached in between.
    MarksStaleOnce,
    /// Flushes before a detach is recorded.
    FlushesBeforeDetachRecorded,
}
