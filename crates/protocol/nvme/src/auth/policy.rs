//! Which hashes and groups are accepted.

use super::group::DhGroup;
use super::hash::Hash;

/// The accepted hashes and groups, the preferred ones first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthPolicy {
    hashes: Vec<Hash>,
    groups: Vec<DhGroup>,
}

/// Error: no hash or no group is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no hash or no Diffie-Hellman group in common")]
pub struct EmptyPolicy;

impl AuthPolicy {
    /// A policy of these hashes and groups, the preferred ones first; duplicates are ignored.
    ///
    /// # Errors
    /// [`EmptyPolicy`] if there is no hash or no group.
    pub fn new(hashes: &[Hash], groups: &[DhGroup]) -> Result<Self, EmptyPolicy> {
        let policy = Self { hashes: distinct(hashes), groups: distinct(groups) };
        let usable = !policy.hashes.is_empty() && !policy.groups.is_empty();
        if usable { Ok(policy) } else { Err(EmptyPolicy) }
    }

    /// The part of it that is at least as strong as both of these.
    ///
    /// # Errors
    /// [`EmptyPolicy`] if nothing is left.
    pub fn at_least(&self, hash: Hash, group: DhGroup) -> Result<Self, EmptyPolicy> {
        let hashes: Vec<_> = self.hashes.iter().copied().filter(|h| *h >= hash).collect();
        let groups: Vec<_> = self.groups.iter().copied().filter(|g| *g >= group).collect();
        Self::new(&hashes, &groups)
    }

    /// The hashes.
    #[must_use]
    pub fn hashes(&self) -> &[Hash] {
        &self.hashes
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[DhGroup] {
        &self.groups
    }

    /// The hash that `suits`, if offered and accepted, or else the preferred one of those offered,
    /// by identifier. Linux hosts before 6.7 accept only the hash that their secret is made for.
    pub(super) fn choose_hash(&self, offered: &[u8], suits: Option<Hash>) -> Option<Hash> {
        let suits = suits.filter(|hash| self.hashes.contains(hash));
        let all = suits.into_iter().chain(self.hashes.iter().copied());
        { all }.find(|hash| offered.contains(&hash.id()))
    }

    /// The preferred group of those offered, by identifier.
    pub(super) fn choose_group(&self, offered: &[u8]) -> Option<DhGroup> {
        self.groups.iter().copied().find(|group| offered.contains(&group.id()))
    }
}

impl Default for AuthPolicy {
    /// All hashes, and the groups that are strong and fast enough, since every queue of every host
    /// authenticates. Not the null group: it lets an eavesdropper guess the secret offline, and as
    /// nothing protects the offer, an active attacker could force it. Not the largest groups:
    /// unauthenticated hosts can request the computation.
    fn default() -> Self {
        use DhGroup::{Ffdhe2048, Ffdhe3072, Ffdhe4096};
        Self { hashes: Hash::ALL.to_vec(), groups: vec![Ffdhe3072, Ffdhe4096, Ffdhe2048] }
    }
}

fn distinct<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut out = Vec::new();
    for item in items {
        if !out.contains(item) {
            out.push(*item);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_needs_one_algorithm_at_least() {
        assert_eq!(AuthPolicy::new(&[], &DhGroup::ALL), Err(EmptyPolicy));
        assert_eq!(AuthPolicy::new(&Hash::ALL, &[]), Err(EmptyPolicy));
        let one = AuthPolicy::new(&[Hash::Sha256; 40], &[DhGroup::Null; 40]).unwrap();
        assert_eq!((one.hashes(), one.groups()), (&[Hash::Sha256][..], &[DhGroup::Null][..]));
        assert_eq!(one.at_least(Hash::Sha384, DhGroup::Null), Err(EmptyPolicy));
        let strong = AuthPolicy::default().at_least(Hash::Sha384, DhGroup::Ffdhe3072).unwrap();
        assert_eq!(strong.hashes(), [Hash::Sha384, Hash::Sha512]);
        assert_eq!(strong.groups(), [DhGroup::Ffdhe3072, DhGroup::Ffdhe4096]);
    }

    #[test]
    fn the_own_preference_decides() {
        let policy = AuthPolicy::default();
        assert_eq!(policy.choose_hash(&[3, 2, 1], None), Some(Hash::Sha256));
        assert_eq!(policy.choose_hash(&[3, 2, 1], Some(Hash::Sha512)), Some(Hash::Sha512));
        assert_eq!(
            policy.choose_hash(&[2, 1], Some(Hash::Sha512)),
            Some(Hash::Sha256),
            "not offered"
        );
        let one = AuthPolicy::new(&[Hash::Sha384], &[DhGroup::Null]).unwrap();
        assert_eq!(
            one.choose_hash(&[3, 2, 1], Some(Hash::Sha512)),
            Some(Hash::Sha384),
            "not acceptable"
        );
        assert_eq!(policy.choose_group(&[1, 3, 200]), Some(DhGroup::Ffdhe4096));
        assert_eq!(policy.choose_group(&[0, 4, 5]), None, "by choice only");
        assert_eq!((policy.choose_hash(&[0, 4], None), policy.choose_group(&[])), (None, None));
    }
}
