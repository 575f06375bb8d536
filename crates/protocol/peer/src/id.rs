//! Names that replicas use for each other, for time and for writes.

use std::fmt;

use block::Epoch;

/// A node of the cluster; 0 is nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number that a replica draws whenever it cannot vouch that its leg holds everything it
/// ever promised: when its process starts, and with every attempt to join (RFD 0010, 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// A state of the volume that its members agree on: the configuration's number, and the primary's
/// count of the attempts to make its members equal (RFD 0010, 3). Later views compare greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct View {
    /// Number of the configuration.
    pub epoch: Epoch,
    /// The primary's count within it, from 0.
    pub round: u32,
}

impl View {
    /// The first view of `epoch`.
    #[must_use]
    pub fn first(epoch: Epoch) -> Self {
        Self { epoch, round: 0 }
    }

    /// The next one of the same epoch.
    #[must_use]
    pub fn next_round(self) -> Self {
        Self { round: self.round.saturating_add(1), ..self }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch.0, self.round)
    }
}

/// A moment that the members of a configuration have recorded together, before any of them cleared
/// marks (RFD 0032). The primary of an epoch numbers them from 1; 0 is the beginning of the epoch
/// itself. Later ones compare greater; the default is before all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lineage {
    /// Number of the configuration.
    pub epoch: Epoch,
    /// The primary's count within it.
    pub count: u32,
}

impl Lineage {
    /// The beginning of `epoch`.
    #[must_use]
    pub fn first(epoch: Epoch) -> Self {
        Self { epoch, count: 0 }
    }
}

impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch.0, self.count)
    }
}

/// The lineages that one replica has recorded about another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SharedLineage {
    /// The last one that it has reached together with the other.
    pub reached: Lineage,
    /// The last one under which it cleared marks that it kept for the other.
    pub cleared: Lineage,
}

impl SharedLineage {
    /// Whether the replica that has recorded this knows for certain that `theirs`, what the other
    /// replica has recorded about it, was recorded before marks were cleared here: the other is an
    /// older copy of itself.
    #[must_use]
    pub fn is_ahead_of(&self, theirs: &Self) -> bool {
        self.cleared > theirs.reached
    }
}

/// A write's place in the order of its view, drawn by the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(pub u64);

/// A write's name from its first sending to its answer: where it entered, and a number drawn there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Where the write entered.
    pub node: NodeId,
    /// Its number there.
    pub number: u64,
}

/// A moment on the sender's clock ([`rt::Core`]'s time since boot), in nanoseconds. Only its
/// sender can read it; others give it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(pub u64);
