//! Identifiers of replicas, moments and writes.

use std::fmt;

use block::Epoch;

/// A node of the cluster; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number that a replica draws whenever its leg may lack something that it has
/// acknowledged: when its process starts, and at every join attempt (RFD 0010, 3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// A period in which the members work under one primary: the epoch of the configuration, and the
/// primary's count of view changes within it (RFD 0010, 3). Later views compare greater.
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

    /// The next view of the same epoch.
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

/// A moment that the members of a configuration have recorded together before any of them cleared
/// dirty bits (RFD 0032). The primary of an epoch numbers them from 1; 0 is the beginning of the
/// epoch. Later ones compare greater; the default is before all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataGeneration {
    /// Number of the configuration.
    pub epoch: Epoch,
    /// The primary's count within the epoch.
    pub count: u32,
}

impl DataGeneration {
    /// The beginning of `epoch`.
    #[must_use]
    pub fn first(epoch: Epoch) -> Self {
        Self { epoch, count: 0 }
    }
}

impl fmt::Display for DataGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch.0, self.count)
    }
}

/// The data generations that one replica has recorded with another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PeerGenerations {
    /// The last one that both have recorded.
    pub common: DataGeneration,
    /// The last one under which it cleared dirty bits that it kept for the other.
    pub last_cleared: DataGeneration,
}

impl PeerGenerations {
    /// Whether `theirs`, recorded by the other replica about this one, is certainly from before
    /// dirty bits were cleared here: then the other is a rolled-back copy.
    #[must_use]
    pub fn is_ahead_of(&self, theirs: &Self) -> bool {
        self.last_cleared > theirs.common
    }
}

/// The sequence number of a write in its view, assigned by the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(pub u64);

/// The identity of a write, unchanged when it is sent again: its origin, and a number drawn there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId {
    /// The node where the write entered.
    pub origin: NodeId,
    /// Its number at that node.
    pub number: u64,
}

/// A moment on the sender's clock ([`rt::Core`]'s time since boot), in nanoseconds. Only the sender
/// can interpret it; receivers return it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClockStamp(pub u64);
