//! How a row of a stripe with parity is written: what is read for it, and what of it is logged.

use geometry::Role;

/// A set of strips of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Strips(u64);

impl Strips {
    /// The first `count` strips.
    #[must_use]
    pub fn first(count: u16) -> Self {
        (0..count).collect()
    }

    /// A bit for each, that of the first one being the lowest.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Those of these [`Self::bits`].
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// With `strip`.
    #[must_use]
    pub fn with(self, strip: u16) -> Self {
        Self(self.0 | 1u64.checked_shl(strip.into()).unwrap_or(0))
    }

    /// Whether `strip` is one of them.
    #[must_use]
    pub fn has(self, strip: u16) -> bool {
        self.0 & 1u64.checked_shl(strip.into()).unwrap_or(0) != 0
    }

    /// Those that `other` has as well.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those that `other` has not.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// How many.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// All of them, in order. It knows how many they are: what is done for few at once needs no memory of its own for each then.
    pub fn iter(self) -> impl Iterator<Item = u16> + use<> {
        let mut left = self.0;
        (0..self.len()).map(move |_| {
            let lowest = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            lowest as u16
        })
    }
}

impl FromIterator<u16> for Strips {
    fn from_iter<I: IntoIterator<Item = u16>>(strips: I) -> Self {
        strips.into_iter().fold(Self::default(), Self::with)
    }
}

/// What can be reached of a row: the strips of data, and parities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct There {
    /// Strips of data.
    pub data: Strips,
    /// Whether P is.
    pub p: bool,
    /// Whether Q is.
    pub q: bool,
}

impl There {
    /// What of these strips is.
    #[must_use]
    pub fn of(roles: impl IntoIterator<Item = Role>) -> Self {
        roles.into_iter().fold(Self::default(), |there, role| match role {
            Role::Data(n) => Self { data: there.data.with(n), ..there },
            Role::P => Self { p: true, ..there },
            Role::Q => Self { q: true, ..there },
        })
    }

    /// All of a row with so many strips of data and so many parities.
    #[must_use]
    pub fn all(data: u16, parities: u16) -> Self {
        Self { data: Strips::first(data), p: parities > 0, q: parities > 1 }
    }

    /// Whether `role` is.
    #[must_use]
    pub fn has(self, role: Role) -> bool {
        match role {
            Role::Data(n) => self.data.has(n),
            Role::P => self.p,
            Role::Q => self.q,
        }
    }

    /// These, and what of `other` is not among them.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            data: Strips(self.data.0 | other.data.0),
            p: self.p || other.p,
            q: self.q || other.q,
        }
    }

    /// What of these is not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self { data: self.data.without(other.data), p: self.p && !other.p, q: self.q && !other.q }
    }

    /// Whether it is nothing.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// How many strips.
    #[must_use]
    pub fn len(self) -> u32 {
        self.data.len() + self.parities()
    }

    /// All of them, data before parity.
    pub fn roles(self) -> impl Iterator<Item = Role> + use<> {
        let parity = [(Role::P, self.p), (Role::Q, self.q)];
        let there = parity.into_iter().filter(|(_, there)| *there).map(|(role, _)| role);
        self.data.iter().map(Role::Data).chain(there)
    }

    /// How many parities are.
    #[must_use]
    pub fn parities(self) -> u32 {
        u32::from(self.p) + u32::from(self.q)
    }
}

/// How the parity of the strips that are kept is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// Of none: there is no parity to be written.
    None,
    /// The parity that there is, less what the changed strips hold (read-modify-write).
    Subtract,
    /// Of the kept strips themselves (reconstruct-write).
    Add,
    /// Of the kept strips, of which those that are lost are made of everything else first.
    Recover,
}

/// What is read, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// How.
    pub way: Way,
    /// What is read.
    pub reads: There,
    /// Whether the new data is logged beside the parity of the kept strips.
    pub logs_data: bool,
}

/// More is lost than the level bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more is lost of a stripe than its level bears")]
pub struct Lost;

/// How to write `changed` strips of a row of `data` strips in all, of which so much is `there`, and all but `unreadable` can be
/// read. What cannot be read and is there is written again.
///
/// # Errors
/// If what is kept cannot be had, or nothing would hold what is written.
pub fn plan(data: u16, changed: Strips, there: There, unreadable: There) -> Result<Plan, Lost> {
    let (kept, readable) = (Strips::first(data).without(changed), there.without(unreadable));
    if there.parities() == 0 {
        let all_there = changed.without(there.data).is_empty();
        let plan = Plan { way: Way::None, reads: There::default(), logs_data: false };
        return if all_there { Ok(plan) } else { Err(Lost) };
    }
    let parity_is_readable = (there.p, there.q) == (readable.p, readable.q);
    let can_subtract = parity_is_readable && changed.without(readable.data).is_empty();
    let can_add = kept.without(readable.data).is_empty();
    let (subtracts, adds) = (changed.len() + there.parities(), kept.len());
    let adding = (Way::Add, There { data: kept, ..There::default() });
    let subtracting = (Way::Subtract, There { data: changed, ..readable });
    let (way, reads) = match (can_subtract, can_add) {
        (true, true) if adds <= subtracts => adding,
        (true, _) => subtracting,
        (false, true) => adding,
        (false, false) => {
            let lost = Strips::first(data).without(readable.data);
            if lost.len() > readable.parities() {
                return Err(Lost);
            }
            (Way::Recover, readable)
        }
    };
    Ok(Plan { way, reads, logs_data: changed.len() > 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where all that is there can be read.
    fn plan(data: u16, changed: Strips, there: There) -> Result<Plan, Lost> {
        super::plan(data, changed, there, There::default())
    }

    fn strips(of: &[u16]) -> Strips {
        of.iter().copied().collect()
    }

    fn there(data: &[u16], p: bool, q: bool) -> There {
        There { data: strips(data), p, q }
    }

    #[test]
    fn sets() {
        let set = strips(&[0, 5, 63]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 5, 63]);
        assert!(set.has(63) && !set.has(64) && !set.has(1));
        assert_eq!((set.len(), set.with(64)), (3, set), "there are 64 at most");
        assert_eq!(Strips::first(6).and(set), strips(&[0, 5]));
        assert_eq!(Strips::first(64).without(set).len(), 61);
    }

    #[test]
    fn the_cheaper_way_is_taken() {
        let all = there(&[0, 1, 2, 3], true, false);
        for (changed, way, reads) in [
            (&[2][..], Way::Subtract, there(&[2], true, false)),
            (&[1, 2], Way::Add, there(&[0, 3], false, false)),
            (&[0, 1, 2], Way::Add, there(&[3], false, false)),
            (&[0, 1, 2, 3], Way::Add, there(&[], false, false)),
        ] {
            let logs_data = changed.len() > 1;
            assert_eq!(plan(4, strips(changed), all), Ok(Plan { way, reads, logs_data }));
        }
        // Six operations at RAID 6: three of them reads.
        let all = There { data: Strips::first(8), p: true, q: true };
        let one = plan(8, strips(&[3]), all).unwrap();
        assert_eq!((one.way, one.reads), (Way::Subtract, there(&[3], true, true)));
    }

    #[test]
    fn with_strips_lost_there_is_often_but_one_way() {
        let of = |changed: &[u16], there| plan(4, strips(changed), there).map(|p| p.way);
        // The changed one is gone: only the kept ones tell. A kept one is gone: only the changed one.
        assert_eq!(of(&[0], there(&[1, 2, 3], true, false)), Ok(Way::Add));
        assert_eq!(of(&[0, 1, 2], there(&[0, 1, 2], true, false)), Ok(Way::Subtract));
        assert_eq!(of(&[0], there(&[2, 3], true, true)), Ok(Way::Recover));
        assert_eq!(of(&[0], there(&[0, 1, 2, 3], false, false)), Ok(Way::None));
        assert_eq!(of(&[0], there(&[1, 2, 3], false, false)), Err(Lost));
        assert_eq!(of(&[0], there(&[2, 3], true, false)), Err(Lost));
    }

    #[test]
    fn what_cannot_be_read_is_there_to_be_written() {
        let all = There::all(4, 1);
        let of = |changed: &[u16], bad| {
            super::plan(4, strips(changed), all, bad).map(|p| (p.way, p.reads))
        };
        let kept = there(&[1, 2, 3], false, false);
        assert_eq!(of(&[0], there(&[], true, false)), Ok((Way::Add, kept)));
        assert_eq!(of(&[0], there(&[0], false, false)), Ok((Way::Add, kept)));
        let subtracts = there(&[0], true, false);
        assert_eq!(of(&[0], there(&[1], false, false)), Ok((Way::Subtract, subtracts)));
        assert_eq!(of(&[0], there(&[1, 0], false, false)), Err(Lost));
    }
}
