//! Mistakes that a mirror can be told to make, so that tests can show that they are detected.

/// One mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// Acknowledges a write when only the primary has applied it.
    AcknowledgesBeforeReplication,
    /// Writes regions without marking them dirty first.
    SkipsIntentLog,
    /// Serves without valid leases.
    IgnoresLeases,
    /// Does not send new writes to a joiner during a resync.
    SkipsNewWritesDuringResync,
    /// Does not wait for uncommitted writes before a read.
    ReadsUncommitted,
    /// Activates a view although its members differ.
    SkipsReconciliation,
    /// Reports prepared entries before all of them have reached the disk.
    ReportsBeforeDrain,
    /// Flushes without waiting until changes of metadata blocks have taken effect.
    FlushesBeforeMetadataApplied,
    /// Reports changes of metadata blocks on commit, not before.
    AppliesMetadataLate,
    /// Trusts the dirty bits of a joiner, whatever its image has recorded since it was last in
    /// sync.
    SkipsGenerationCheck,
    /// Clears dirty bits, and records the data generation only some time later.
    ClearsBeforeGeneration,
    /// Takes over after a total outage, whatever other replicas and the configuration know of its
    /// image.
    TakesOverWhenRolledBack,
    /// Takes a configuration for current although images have adopted one unknown to the store.
    TrustsRestoredStore,
    /// Rejects a write without space although the members differ in its range.
    SkipsNoSpaceReplacement,
    /// Reports a partly applied write as applied.
    ReportsPartialWrites,
    /// Hides changes of blocks from their watchers.
    HidesChangeNotices,
}
