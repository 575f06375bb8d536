//! The owner of a volume: range locks, composite commands, abort, statistics.
