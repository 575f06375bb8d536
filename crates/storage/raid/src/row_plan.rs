//! How a row of a stripe is written: what is read for it, and what is logged.

use geometry::StripRole;

/// A set of data strips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StripSet(u64);

impl StripSet {
    /// The first `count` strips.
    #[must_use]
    pub fn first(count: u16) -> Self {
        (0..count).collect()
    }

    /// One bit for each strip, the first one lowest.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The set with these [`Self::bits`].
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Adds `strip`.
    #[must_use]
    pub fn with(self, strip: u16) -> Self {
        Self(self.0 | 1u64.checked_shl(strip.into()).unwrap_or(0))
    }

    /// Whether `strip` is in the set.
    #[must_use]
    pub fn contains(self, strip: u16) -> bool {
        self.0 & 1u64.checked_shl(strip.into()).unwrap_or(0) != 0
    }

    /// The strips that are also in `other`.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The strips that are not in `other`.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Number of strips.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// All strips, in order. Its length is known, so that collecting a few needs no allocation.
    pub fn iter(self) -> impl Iterator<Item = u16> + use<> {
        let mut left = self.0;
        (0..self.len()).map(move |_| {
            let lowest = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            lowest as u16
        })
    }
}

impl FromIterator<u16> for StripSet {
    fn from_iter<I: IntoIterator<Item = u16>>(strips: I) -> Self {
        strips.into_iter().fold(Self::default(), Self::with)
    }
}

/// The available strips of a row: data and parities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Available {
    /// Data strips.
    pub data: StripSet,
    /// Whether P is available.
    pub p: bool,
    /// Whether Q is available.
    pub q: bool,
}

impl Available {
    /// The set of these strips.
    #[must_use]
    pub fn from_roles(roles: impl IntoIterator<Item = StripRole>) -> Self {
        roles.into_iter().fold(Self::default(), |set, role| match role {
            StripRole::Data(n) => Self { data: set.data.with(n), ..set },
            StripRole::P => Self { p: true, ..set },
            StripRole::Q => Self { q: true, ..set },
        })
    }

    /// All strips of a row with `data` data strips and `parities` parities.
    #[must_use]
    pub fn all(data: u16, parities: u16) -> Self {
        Self { data: StripSet::first(data), p: parities > 0, q: parities > 1 }
    }

    /// Whether `role` is in the set.
    #[must_use]
    pub fn contains(self, role: StripRole) -> bool {
        match role {
            StripRole::Data(n) => self.data.contains(n),
            StripRole::P => self.p,
            StripRole::Q => self.q,
        }
    }

    /// The strips that are in either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self {
            data: StripSet(self.data.0 | other.data.0),
            p: self.p || other.p,
            q: self.q || other.q,
        }
    }

    /// The strips that are not in `other`.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
        Self {
            data: self.data.difference(other.data),
            p: self.p && !other.p,
            q: self.q && !other.q,
        }
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Number of strips.
    #[must_use]
    pub fn len(self) -> u32 {
        self.data.len() + self.parity_count()
    }

    /// All strips, data before parity.
    pub fn roles(self) -> impl Iterator<Item = StripRole> + use<> {
        let parity = [(StripRole::P, self.p), (StripRole::Q, self.q)];
        let available =
            parity.into_iter().filter(|(_, available)| *available).map(|(role, _)| role);
        self.data.iter().map(StripRole::Data).chain(available)
    }

    /// Number of parities in the set.
    #[must_use]
    pub fn parity_count(self) -> u32 {
        u32::from(self.p) + u32::from(self.q)
    }
}

/// How the partial parity, of the unchanged strips, is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMethod {
    /// Not at all: no parity is available.
    NoParity,
    /// From the old parity and the old contents of the changed strips (read-modify-write).
    ReadModifyWrite,
    /// From the unchanged strips (reconstruct-write).
    ReconstructWrite,
    /// From the unchanged strips, after reconstructing those that are missing.
    ReconstructLost,
}

/// How to write a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowPlan {
    /// How the partial parity is computed.
    pub method: WriteMethod,
    /// The strips to read.
    pub reads: Available,
    /// Whether the new data is logged beside the partial parity.
    pub logs_data: bool,
}

impl RowPlan {
    /// Pages for a row at a level with this many parities: strips that are read and reconstructed,
    /// and two for each parity.
    pub(super) fn pages_per_row(&self, parities: u32) -> u32 {
        let is_reconstructed = self.method == WriteMethod::ReconstructLost;
        self.reads.len() + 2 * parities + if is_reconstructed { parities } else { 0 }
    }
}

/// More strips are missing than the redundancy tolerates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more strips of a stripe are lost than its redundancy tolerates")]
pub struct Unrecoverable;

/// Plans a write of the strips `changed` in a row of `data` data strips. `available` strips can be
/// written, and those of them that are not `unreadable` can be read. Unreadable available parities
/// are rewritten.
///
/// # Errors
/// If the unchanged strips cannot be had, or the new data could not be recovered.
pub fn plan_row(
    data: u16,
    changed: StripSet,
    available: Available,
    unreadable: Available,
) -> Result<RowPlan, Unrecoverable> {
    let (unchanged, readable) =
        (StripSet::first(data).difference(changed), available.difference(unreadable));
    if available.parity_count() == 0 {
        let all_available = changed.difference(available.data).is_empty();
        let plan = RowPlan {
            method: WriteMethod::NoParity,
            reads: Available::default(),
            logs_data: false,
        };
        return if all_available { Ok(plan) } else { Err(Unrecoverable) };
    }
    let parity_is_readable = (available.p, available.q) == (readable.p, readable.q);
    let can_modify = parity_is_readable && changed.difference(readable.data).is_empty();
    let can_reconstruct = unchanged.difference(readable.data).is_empty();
    let (modify_reads, reconstruct_reads) =
        (changed.len() + available.parity_count(), unchanged.len());
    let reconstruct =
        (WriteMethod::ReconstructWrite, Available { data: unchanged, ..Available::default() });
    let modify = (WriteMethod::ReadModifyWrite, Available { data: changed, ..readable });
    let (method, reads) = match (can_modify, can_reconstruct) {
        (true, true) if reconstruct_reads <= modify_reads => reconstruct,
        (true, _) => modify,
        (false, true) => reconstruct,
        (false, false) => {
            let missing = StripSet::first(data).difference(readable.data);
            if missing.len() > readable.parity_count() {
                return Err(Unrecoverable);
            }
            (WriteMethod::ReconstructLost, readable)
        }
    };
    Ok(RowPlan { method, reads, logs_data: changed.len() > 1 })
}

/// Strips that are not read where that can be avoided.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AvoidedReads {
    /// They cannot be read at all.
    pub(super) unreadable: Available,
    /// They may not match the rest of the row.
    pub(super) suspect: Available,
    /// They are on slow members.
    pub(super) slow: Available,
}

/// As [`plan_row`], without reading suspect strips and those on slow members if that is possible:
/// suspect ones are read last.
pub(super) fn plan_row_avoiding(
    data: u16,
    changed: StripSet,
    available: Available,
    avoided: AvoidedReads,
) -> Result<RowPlan, Unrecoverable> {
    let AvoidedReads { unreadable, suspect, slow } = avoided;
    let plan_without = |avoided| plan_row(data, changed, available, avoided);
    let distrusted = unreadable.union(suspect);
    plan_without(distrusted.union(slow))
        .or_else(|Unrecoverable| plan_without(distrusted))
        .or_else(|Unrecoverable| plan_without(unreadable))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With all available strips readable.
    fn plan_row(
        data: u16,
        changed: StripSet,
        available: Available,
    ) -> Result<RowPlan, Unrecoverable> {
        super::plan_row(data, changed, available, Available::default())
    }

    fn strips(of: &[u16]) -> StripSet {
        of.iter().copied().collect()
    }

    fn there(data: &[u16], p: bool, q: bool) -> Available {
        Available { data: strips(data), p, q }
    }

    #[test]
    fn sets() {
        let set = strips(&[0, 5, 63]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 5, 63]);
        assert!(set.contains(63) && !set.contains(64) && !set.contains(1));
        assert_eq!((set.len(), set.with(64)), (3, set), "there are 64 at most");
        assert_eq!(StripSet::first(6).intersection(set), strips(&[0, 5]));
        assert_eq!(StripSet::first(64).difference(set).len(), 61);
    }

    #[test]
    fn the_cheaper_write_method_is_chosen() {
        let all = there(&[0, 1, 2, 3], true, false);
        for (changed, method, reads) in [
            (&[2][..], WriteMethod::ReadModifyWrite, there(&[2], true, false)),
            (&[1, 2], WriteMethod::ReconstructWrite, there(&[0, 3], false, false)),
            (&[0, 1, 2], WriteMethod::ReconstructWrite, there(&[3], false, false)),
            (&[0, 1, 2, 3], WriteMethod::ReconstructWrite, there(&[], false, false)),
        ] {
            let logs_data = changed.len() > 1;
            assert_eq!(plan_row(4, strips(changed), all), Ok(RowPlan { method, reads, logs_data }));
        }
        // RAID 6 needs six operations, three of them reads.
        let all = Available { data: StripSet::first(8), p: true, q: true };
        let one = plan_row(8, strips(&[3]), all).unwrap();
        assert_eq!(
            (one.method, one.reads),
            (WriteMethod::ReadModifyWrite, there(&[3], true, true))
        );
    }

    #[test]
    fn lost_strips_may_leave_one_write_method() {
        let of =
            |changed: &[u16], available| plan_row(4, strips(changed), available).map(|p| p.method);
        // If a changed strip is missing, only the unchanged ones can be used, and the reverse.
        assert_eq!(of(&[0], there(&[1, 2, 3], true, false)), Ok(WriteMethod::ReconstructWrite));
        assert_eq!(
            of(&[0, 1, 2], there(&[0, 1, 2], true, false)),
            Ok(WriteMethod::ReadModifyWrite)
        );
        assert_eq!(of(&[0], there(&[2, 3], true, true)), Ok(WriteMethod::ReconstructLost));
        assert_eq!(of(&[0], there(&[0, 1, 2, 3], false, false)), Ok(WriteMethod::NoParity));
        assert_eq!(of(&[0], there(&[1, 2, 3], false, false)), Err(Unrecoverable));
        assert_eq!(of(&[0], there(&[2, 3], true, false)), Err(Unrecoverable));
    }

    #[test]
    fn unreadable_strips_are_still_written() {
        let all = Available::all(4, 1);
        let of = |changed: &[u16], bad| {
            super::plan_row(4, strips(changed), all, bad).map(|p| (p.method, p.reads))
        };
        let unchanged = there(&[1, 2, 3], false, false);
        assert_eq!(
            of(&[0], there(&[], true, false)),
            Ok((WriteMethod::ReconstructWrite, unchanged))
        );
        assert_eq!(
            of(&[0], there(&[0], false, false)),
            Ok((WriteMethod::ReconstructWrite, unchanged))
        );
        let modifies = there(&[0], true, false);
        assert_eq!(
            of(&[0], there(&[1], false, false)),
            Ok((WriteMethod::ReadModifyWrite, modifies))
        );
        assert_eq!(of(&[0], there(&[1, 0], false, false)), Err(Unrecoverable));
    }
}
