//! Mistakes that a mirror can be told to make, so that tests can show that they are found.

/// One mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// A write is answered when the primary has it.
    AcknowledgesAlone,
    /// Regions are not marked before they are written.
    SkipsIntentLog,
    /// A member serves whatever its leases say.
    IgnoresLease,
    /// What is written during a resync does not go to the joiner.
    ResyncsWithoutNewWrites,
    /// A read does not wait for writes that are not committed.
    ReadsThroughEntries,
    /// A view opens though its members differ.
    OpensUnequal,
    /// A member tells what it has before all of it has reached its disk.
    TellsUndrained,
    /// A flush does not wait until what has changed beside the volume is in force.
    FlushesUnsettled,
    /// What changes beside the volume is told when it is committed, not before.
    TellsAsideLate,
    /// A joiner is taken for what it was when it was last in sync, whatever its image has recorded.
    TrustsJoiners,
    /// Marks are cleared, and the lineage is recorded some time later.
    ClearsBeforeLineage,
    /// A replica leads after a blackout, whatever others and the record know of its image.
    LeadsWhenOlder,
    /// A replica takes a record for the present one though images have adopted what the store does
    /// not know.
    BelievesOlderStore,
    /// A write that no member has space for is refused though they differ in its range.
    RefusesUnequal,
    /// A member that has made a part of a write tells of it as if it had all.
    TellsRefused,
    /// Whoever watches blocks is not told of their changes.
    HidesChanges,
}
