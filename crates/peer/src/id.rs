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
