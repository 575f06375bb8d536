//! Mistakes that RAID can be told to make, so that tests can show that they are found.

/// One mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    #[default]
    None,
    /// A stripe is written before its entry is in the logs.
    WritesBeforeLog,
    /// Copies are written without a mark.
    SkipsMarks,
    /// A mark is not put into the log of a member that is filled later.
    MarksOnce,
    /// Q counts a strip as if it were the next one.
    WeighsQWrongly,
    /// A stripe is written again before what its entry is about is durable.
    WritesUnsettled,
    /// A write that a member has failed is answered before the others know that it is out.
    AnswersBeforeMark,
    /// What is made of the rest does not wait for those who write the stripe.
    ReadsWithoutTurn,
    /// Nor does what goes around a member that lags.
    GoesAroundWithoutTurn,
    /// That a whole stripe lies elsewhere is recorded before it does.
    RecordsBeforeData,
    /// It is not recorded.
    SkipsRecord,
    /// A rebuild does not wait for those who write the stripe.
    FillsWithoutTurn,
    /// What is written while a member is out is not told.
    SkipsChanges,
    /// Nor what was written before, and may be lost on it.
    ForgetsUnflushed,
    /// What a write changes is told before and after it, and not when a member goes out in between.
    TellsOnce,
    /// A flush does not wait until all know that a member is out.
    FlushesBeforeMark,
}
