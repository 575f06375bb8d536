//! What may be agreed on.

use super::group::Group;
use super::hash::Hash;

/// The hashes and groups that are acceptable, the preferred ones first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    hashes: Vec<Hash>,
    groups: Vec<Group>,
}

/// Nothing would be acceptable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no hash or no Diffie-Hellman group is left that could be agreed on")]
pub struct EmptyPolicy;

impl Policy {
    /// These and no others, the preferred ones first; what stands there again is left out.
    ///
    /// # Errors
    /// [`EmptyPolicy`] when there is no hash or no group.
    pub fn new(hashes: &[Hash], groups: &[Group]) -> Result<Self, EmptyPolicy> {
        let policy = Self { hashes: distinct(hashes), groups: distinct(groups) };
        let usable = !policy.hashes.is_empty() && !policy.groups.is_empty();
        if usable { Ok(policy) } else { Err(EmptyPolicy) }
    }

    /// What of it is at least as strong as both of these.
    ///
    /// # Errors
    /// [`EmptyPolicy`] when nothing is.
    pub fn at_least(&self, hash: Hash, group: Group) -> Result<Self, EmptyPolicy> {
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
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The hash that `suits`, if that will do, or else the preferred one of those offered, by their
    /// identifiers. Hosts with Linux before 6.7 take no other than the one that their secret is made for.
    pub(super) fn hash(&self, offered: &[u8], suits: Option<Hash>) -> Option<Hash> {
        let suits = suits.filter(|hash| self.hashes.contains(hash));
        let all = suits.into_iter().chain(self.hashes.iter().copied());
        { all }.find(|hash| offered.contains(&hash.id()))
    }

    /// The preferred group of those offered, by their identifiers.
    pub(super) fn group(&self, offered: &[u8]) -> Option<Group> {
        self.groups.iter().copied().find(|group| offered.contains(&group.id()))
    }
}

impl Default for Policy {
    /// All hashes, and what is strong enough and quick, since every queue of every host does this. Not
    /// without a group: then the secret can be guessed at by who has listened, and as nothing protects
    /// the offer, whoever is in between can have it so. Not the largest groups: strangers may ask
    /// for their powers.
    fn default() -> Self {
        use Group::{Ffdhe2048, Ffdhe3072, Ffdhe4096};
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
    fn a_policy_has_something_to_agree_on() {
        assert_eq!(Policy::new(&[], &Group::ALL), Err(EmptyPolicy));
        assert_eq!(Policy::new(&Hash::ALL, &[]), Err(EmptyPolicy));
        let one = Policy::new(&[Hash::Sha256; 40], &[Group::Null; 40]).unwrap();
        assert_eq!((one.hashes(), one.groups()), (&[Hash::Sha256][..], &[Group::Null][..]));
        assert_eq!(one.at_least(Hash::Sha384, Group::Null), Err(EmptyPolicy));
        let strong = Policy::default().at_least(Hash::Sha384, Group::Ffdhe3072).unwrap();
        assert_eq!(strong.hashes(), [Hash::Sha384, Hash::Sha512]);
        assert_eq!(strong.groups(), [Group::Ffdhe3072, Group::Ffdhe4096]);
    }

    #[test]
    fn the_own_preference_decides() {
        let policy = Policy::default();
        assert_eq!(policy.hash(&[3, 2, 1], None), Some(Hash::Sha256));
        assert_eq!(policy.hash(&[3, 2, 1], Some(Hash::Sha512)), Some(Hash::Sha512));
        assert_eq!(policy.hash(&[2, 1], Some(Hash::Sha512)), Some(Hash::Sha256), "not offered");
        let one = Policy::new(&[Hash::Sha384], &[Group::Null]).unwrap();
        assert_eq!(one.hash(&[3, 2, 1], Some(Hash::Sha512)), Some(Hash::Sha384), "not acceptable");
        assert_eq!(policy.group(&[1, 3, 200]), Some(Group::Ffdhe4096));
        assert_eq!(policy.group(&[0, 4, 5]), None, "by choice only");
        assert_eq!((policy.hash(&[0, 4], None), policy.group(&[])), (None, None));
    }
}
