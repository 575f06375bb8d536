//! What a party may do with the volume.

/// What a party may do. Which commands read and write for this purpose is the protocol's to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Read the contents.
    pub reads: bool,
    /// Change the contents.
    pub writes: bool,
    /// It has registered.
    pub registered: bool,
    /// False: another has RESERVEd the unit.
    pub sole: bool,
}

impl Rights {
    /// Everything; it changes nothing that it meets.
    pub const ALL: Self = Self { reads: true, writes: true, registered: true, sole: true };

    /// Whether it may change anything now.
    #[must_use]
    pub const fn may_write(self) -> bool {
        self.sole && self.writes
    }

    /// What both allow.
    #[must_use]
    pub const fn meet(self, other: Self) -> Self {
        Self {
            reads: self.reads && other.reads,
            writes: self.writes && other.writes,
            registered: self.registered && other.registered,
            sole: self.sole && other.sole,
        }
    }
}
