//! On whose behalf third-party copies read and write, which volumes that initiator may use, and
//! until when.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use iscsi::name::Name;

use crate::catalog::{AccessRule, Catalog, ChapCredentials, IscsiTarget, VolumeId};

/// The initiator on whose behalf data is copied.
#[derive(Debug)]
pub(crate) struct Principal {
    /// The initiator's name.
    pub(crate) initiator: Name,
    /// With its name, the identity of its port.
    pub(crate) isid: [u8; 6],
    /// The rule by which its session was authenticated.
    pub(crate) rule: AccessRule<ChapCredentials>,
}

impl Principal {
    /// Whether it could log in to `target` with the credentials it has already proved.
    fn may_use(&self, target: &IscsiTarget) -> bool {
        let Some(asks) = target.access.rule_for(self.initiator.as_str()) else { return false };
        match (asks, &self.rule) {
            (AccessRule::NameOnly, _) => true,
            (AccessRule::Proof(asks), AccessRule::Proof(has)) => {
                (&asks.user, &asks.secret) == (&has.user, &has.secret)
            }
            (AccessRule::Proof(_), AccessRule::NameOnly) => false,
        }
    }

    /// Finds a volume that it may use.
    pub(crate) fn find(
        &self,
        catalog: &Catalog,
        wanted: impl Fn(VolumeId) -> bool,
    ) -> Option<VolumeLocation> {
        let usable = catalog.targets.iter().filter(|(_, t)| self.may_use(t));
        let initiator = self.initiator.as_str();
        let mut volumes = usable
            .flat_map(|(name, t)| t.visible_volumes(initiator).map(move |(_, id)| (id, name, t)));
        let (id, name, target) = volumes.find(|&(id, ..)| wanted(id))?;
        Some(VolumeLocation { id, core: target.core, target: name.as_str().into() })
    }

    /// Whether it may still use a volume that was found before; without a search.
    pub(crate) fn may_still_use(&self, catalog: &Catalog, location: &VolumeLocation) -> bool {
        catalog.targets.get(&*location.target).is_some_and(|t| {
            let mut maps = t.visible_volumes(self.initiator.as_str());
            let has = t.core == location.core && maps.any(|(_, id)| id == location.id);
            has && self.may_use(t)
        })
    }
}

/// A volume's core, and the target through which it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeLocation {
    pub(crate) id: VolumeId,
    pub(crate) core: usize,
    pub(crate) target: Arc<str>,
}

/// Whether a session has ended, readable by its work on any core. It is set before the initiator
/// can begin another session in its place: requests not started by then never are.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionEnded(Arc<AtomicBool>);

impl SessionEnded {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::catalog::AccessList;

    use super::*;

    fn chap(secret: &str) -> AccessRule<ChapCredentials> {
        AccessRule::Proof(ChapCredentials { user: "u".into(), secret: secret.into(), mutual: None })
    }

    fn target(core: usize, id: u8, admission: AccessRule<ChapCredentials>) -> IscsiTarget {
        let mut access = AccessList::default();
        access.named.insert("iqn.2026-01.com.example:a".into(), admission);
        let luns = [(0, VolumeId([id; 16]))].into();
        IscsiTarget { core, luns, access, ..IscsiTarget::default() }
    }

    /// RFD 0014, 5: a name alone is not sufficient where a secret is required.
    #[test]
    fn a_session_reaches_what_it_has_proved_itself_for() {
        let targets = [
            ("open".to_owned(), target(1, 1, AccessRule::NameOnly)),
            ("same".to_owned(), target(2, 2, chap("one"))),
            ("other".to_owned(), target(3, 3, chap("two"))),
        ];
        let catalog = Catalog { targets: targets.into(), ..Catalog::default() };
        let reached = |initiator: &str, admission| {
            let initiator = initiator.parse().unwrap();
            let principal = Principal { initiator, isid: [0; 6], rule: admission };
            let of = |n: u8| principal.find(&catalog, |id| id == VolumeId([n; 16]));
            [1, 2, 3].map(|n| {
                let location = of(n)?;
                assert!(principal.may_still_use(&catalog, &location));
                assert!(!principal.may_still_use(&Catalog::default(), &location));
                Some(location.core)
            })
        };
        assert_eq!(
            reached("iqn.2026-01.com.example:a", AccessRule::NameOnly),
            [Some(1), None, None]
        );
        assert_eq!(reached("iqn.2026-01.com.example:a", chap("one")), [Some(1), Some(2), None]);
        assert_eq!(reached("iqn.2026-01.com.example:b", chap("one")), [None; 3]);
    }

    /// RFD 0016, 6: one initiator's credentials do not count at a target that requires a secret of
    /// its own.
    #[test]
    fn a_session_reaches_nothing_by_another_secret_than_its_own() {
        let initiator = "iqn.2026-01.com.example:a";
        let mut own = target(1, 1, chap("own"));
        own.access.any = Some(chap("the volume's"));
        let targets = [("own".to_owned(), own)].into();
        let catalog = Catalog { targets, ..Catalog::default() };
        let reaches = |initiator: &str, secret| {
            let (initiator, isid) = (initiator.parse().unwrap(), [0; 6]);
            let principal = Principal { initiator, isid, rule: chap(secret) };
            principal.find(&catalog, |_| true).is_some()
        };
        assert!(reaches(initiator, "own") && !reaches(initiator, "the volume's"));
        let other = "iqn.2026-01.com.example:b";
        assert!(reaches(other, "the volume's") && !reaches(other, "own"));
    }

    /// RFD 0017, 3: an initiator cannot copy a unit masked from it, though it may log in to its
    /// target.
    #[test]
    fn a_session_reaches_no_unit_that_it_does_not_see() {
        let initiator = "iqn.2026-01.com.example:a";
        let mut both = target(1, 1, AccessRule::NameOnly);
        both.luns.insert(1, VolumeId([2; 16]));
        both.masks.insert(1, ["iqn.2026-01.com.example:b".to_owned()].into());
        let catalog = |both: &IscsiTarget| Catalog {
            targets: [("both".to_owned(), both.clone())].into(),
            ..Catalog::default()
        };
        let admission = AccessRule::NameOnly;
        let principal =
            Principal { initiator: initiator.parse().unwrap(), isid: [0; 6], rule: admission };
        let find = |catalog: &Catalog, n: u8| principal.find(catalog, |id| id == VolumeId([n; 16]));
        assert!(find(&catalog(&both), 1).is_some());
        assert_eq!(find(&catalog(&both), 2), None);
        both.masks.clear();
        let location = find(&catalog(&both), 2).unwrap();
        both.masks.insert(1, BTreeSet::new());
        assert!(!principal.may_still_use(&catalog(&both), &location));
    }
}
