//! What a nexus may do with the volume.

/// Access rights. The protocol defines which commands count as reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Read the contents.
    pub can_read: bool,
    /// Change the contents.
    pub can_write: bool,
    /// Whether it is registered.
    pub is_registered: bool,
    /// False if another nexus holds an SPC-2 reservation.
    pub passes_spc2: bool,
}

impl Rights {
    /// All rights; neutral in [`Rights::intersection`].
    pub const ALL: Self =
        Self { can_read: true, can_write: true, is_registered: true, passes_spc2: true };

    /// Whether it may write now.
    #[must_use]
    pub const fn may_write(self) -> bool {
        self.passes_spc2 && self.can_write
    }

    /// The rights that both grant.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self {
            can_read: self.can_read && other.can_read,
            can_write: self.can_write && other.can_write,
            is_registered: self.is_registered && other.is_registered,
            passes_spc2: self.passes_spc2 && other.passes_spc2,
        }
    }
}
