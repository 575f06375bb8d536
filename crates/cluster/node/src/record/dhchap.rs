//! What a record holds of DH-HMAC-CHAP (RFD 0020, 2): secrets of hosts and of the subsystem for them, sealed as those of CHAP
//! are (RFD 0016).

use ::cluster::vault::{CannotOpen, NoRandom, Place, Ring, Whose};
use api::{Dhchap, DhchapSecret};
use nvme::auth::{BadSecret, Secret};
use serde::{Deserialize, Serialize};
use target::catalog::HostSecrets;
use uuid::Uuid;

use super::VolumeRecord;
use super::secrets::Held;

/// What one NVMe host of a volume must prove, and what is proved to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredDhchap {
    host: Held<DhchapSecret>,
    #[serde(deserialize_with = "super::text::present")]
    controller: Option<Held<DhchapSecret>>,
}

/// Whose proof it is.
#[derive(Clone, Copy, Debug)]
pub struct OfHost<'a> {
    /// The volume.
    pub volume: Uuid,
    /// The host, by its NQN.
    pub host: &'a str,
}

impl OfHost<'_> {
    /// Has `work` done with what binds a secret. No user of CHAP is empty, so nothing of CHAP begins with a comma.
    fn at<T>(&self, whose: Whose, work: impl FnOnce(Place<'_>) -> T) -> T {
        let user = format!(",{}", self.host);
        work(Place { volume: self.volume, whose, user: &user })
    }
}

/// Which of two secrets is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDhchap {
    /// That of the host.
    #[error("the secret of the host is no good: {0}")]
    Host(BadSecret),
    /// That of the subsystem.
    #[error("the secret of the controller is no good: {0}")]
    Controller(BadSecret),
}

/// What these secrets are for front ends.
///
/// # Errors
/// [`BadDhchap`]; it does not tell what was given.
pub fn parse(dhchap: &Dhchap) -> Result<HostSecrets, BadDhchap> {
    let Dhchap { secret, controller_secret } = dhchap;
    let host = Secret::parse(secret.expose()).map_err(BadDhchap::Host)?;
    let controller = controller_secret.as_ref().map(|secret| Secret::parse(secret.expose()));
    let controller = controller.transpose().map_err(BadDhchap::Controller)?;
    Ok(HostSecrets::Known { host, controller })
}

impl StoredDhchap {
    /// Secrets, sealed. A ring without keys leaves them as they are.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn seal(dhchap: &Dhchap, of: OfHost<'_>, ring: &Ring) -> Result<Self, NoRandom> {
        let Dhchap { secret, controller_secret } = dhchap;
        let seal = |secret, whose| of.at(whose, |place| Held::seal(secret, place, ring));
        let host = seal(secret, Whose::Initiator)?;
        let controller = controller_secret.as_ref();
        let controller = controller.map(|secret| seal(secret, Whose::Volume)).transpose()?;
        Ok(Self { host, controller })
    }

    /// What was sealed for that host.
    ///
    /// # Errors
    /// [`CannotOpen`].
    pub fn open(&self, of: OfHost<'_>, ring: &Ring) -> Result<Dhchap, CannotOpen> {
        let open = |held: &Held<DhchapSecret>, whose| of.at(whose, |place| held.open(place, ring));
        let secret = open(&self.host, Whose::Initiator)?;
        let controller = self.controller.as_ref().map(|held| open(held, Whose::Volume));
        Dhchap::new(secret, controller.transpose()?).map_err(|_| CannotOpen::Wrong)
    }

    /// The same, for front ends.
    ///
    /// # Errors
    /// [`CannotOpen`], also where what was sealed is no secret of a form that is known.
    pub fn known(&self, of: OfHost<'_>, ring: &Ring) -> Result<HostSecrets, CannotOpen> {
        parse(&self.open(of, ring)?).map_err(|_| CannotOpen::Wrong)
    }

    /// Whether all of it is as `ring` would seal it now, or cannot be read.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Ring) -> bool {
        self.all().all(|held| held.is_sealed_by(ring))
    }

    /// Whether it is sealed by a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Ring) -> bool {
        self.all().any(|held| held.lacks_key(ring))
    }

    fn all(&self) -> impl Iterator<Item = &Held<DhchapSecret>> {
        std::iter::once(&self.host).chain(&self.controller)
    }

    /// Whether the subsystem can prove itself, too.
    #[must_use]
    pub fn is_mutual(&self) -> bool {
        self.controller.is_some()
    }
}

impl VolumeRecord {
    /// What `host` has to prove; `None` if its name will do.
    #[must_use]
    pub fn host_proof<'a>(&'a self, host: &'a str) -> Option<(OfHost<'a>, &'a StoredDhchap)> {
        Some((OfHost { volume: self.id, host }, self.hosts.get(host)?))
    }

    /// What each host has to prove that has to.
    pub fn all_hosts(&self) -> impl Iterator<Item = (OfHost<'_>, &StoredDhchap)> {
        self.hosts.iter().map(|(host, held)| (OfHost { volume: self.id, host }, held))
    }

    /// The same, to be changed.
    pub fn all_hosts_mut(&mut self) -> impl Iterator<Item = (OfHost<'_>, &mut StoredDhchap)> {
        let volume = self.id;
        self.hosts.iter_mut().map(move |(host, held)| (OfHost { volume, host }, held))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use api::ChapUser;

    use super::super::tests::{chap, ring};
    use super::super::{Of, StoredChap};
    use super::*;

    pub(crate) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:1";
    const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:2";
    const VOLUME: Uuid = Uuid::from_u128(7);
    const OF: OfHost<'static> = OfHost { volume: VOLUME, host: HOST };

    /// Two secrets as nvme-cli makes them.
    pub(crate) const SECRETS: [&str; 2] = [
        "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:",
        "DHHC-1:02:WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaBgfU4w==:",
    ];

    pub(crate) fn dhchap() -> Dhchap {
        let [secret, controller] = SECRETS;
        dhchap_of(secret, Some(controller))
    }

    pub(crate) fn dhchap_of(secret: &str, controller: Option<&str>) -> Dhchap {
        let secret_of = |text: &str| DhchapSecret::try_from(text.to_owned()).unwrap();
        Dhchap::new(secret_of(secret), controller.map(secret_of)).unwrap()
    }

    #[test]
    fn what_is_sealed_shows_no_secret_and_reads_back() {
        let sealed = StoredDhchap::seal(&dhchap(), OF, &ring(1)).unwrap();
        let text = serde_json::to_string(&sealed).unwrap();
        assert!(!text.contains("DHHC") && !text.contains("\"secret\""), "{text}");
        let again: StoredDhchap = serde_json::from_str(&text).unwrap();
        assert_eq!((again.open(OF, &ring(1)), again.is_mutual()), (Ok(dhchap()), true));
        let one = dhchap_of(SECRETS[0], None);
        let sealed = StoredDhchap::seal(&one, OF, &ring(1)).unwrap();
        assert_eq!((sealed.open(OF, &ring(1)), sealed.is_mutual()), (Ok(one), false));
        assert!(serde_json::to_string(&sealed).unwrap().contains(r#""controller":null"#));
    }

    #[test]
    fn a_secret_opens_for_its_volume_host_and_direction() {
        let sealed = StoredDhchap::seal(&dhchap(), OF, &ring(1)).unwrap();
        let opens = |sealed: &StoredDhchap, of| sealed.open(of, &ring(1));
        assert_eq!(opens(&sealed, OfHost { host: OTHER, ..OF }), Err(CannotOpen::Wrong));
        let elsewhere = OfHost { volume: Uuid::from_u128(8), ..OF };
        assert_eq!(opens(&sealed, elsewhere), Err(CannotOpen::Wrong));
        let turned = StoredDhchap {
            host: sealed.controller.clone().unwrap(),
            controller: Some(sealed.host.clone()),
        };
        assert_eq!(opens(&turned, OF), Err(CannotOpen::Wrong));
        let turned = StoredDhchap { host: sealed.host.clone(), controller: Some(sealed.host) };
        assert_eq!(opens(&turned, OF), Err(CannotOpen::Wrong), "nor both from one");
        assert!(matches!(turned.open(OF, &ring(2)), Err(CannotOpen::NoKey(_))));
    }

    /// What binds secrets of CHAP begins with a user, who has a name without commas.
    #[test]
    fn nothing_of_chap_opens_for_a_host() {
        for user in ["", ",", ",nqn.2014-08.org.nvmexpress:uuid:1", "a,b"] {
            assert!(ChapUser::try_from(user.to_owned()).is_err(), "{user:?}");
        }
        // A user of the host's name, and a host's name in the place of an initiator's.
        let json = chap_json(HOST);
        for initiator in [None, Some(HOST)] {
            let of = Of { volume: VOLUME, initiator };
            let sealed = StoredChap::seal(&chap(), of, &ring(1)).unwrap();
            let named: api::Chap = serde_json::from_str(&json).unwrap();
            let named = StoredChap::seal(&named, of, &ring(1)).unwrap();
            for sealed in [sealed, named] {
                let text = serde_json::to_value(&sealed).unwrap()["sealed"].clone();
                let moved = serde_json::json!({ "host": { "sealed": text }, "controller": null });
                let moved: StoredDhchap = serde_json::from_value(moved).unwrap();
                assert_eq!(moved.open(OF, &ring(1)), Err(CannotOpen::Wrong));
            }
        }
    }

    fn chap_json(user: &str) -> String {
        format!(r#"{{"user":"{user}","secret":"{}"}}"#, SECRETS[0])
    }

    #[test]
    fn what_is_no_secret_is_told_without_it() {
        let bad = "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoa:";
        let first = parse(&dhchap_of(bad, None)).unwrap_err();
        assert_eq!(first, BadDhchap::Host(BadSecret::Checksum));
        let second = parse(&dhchap_of(SECRETS[0], Some("hush"))).unwrap_err();
        assert_eq!(second, BadDhchap::Controller(BadSecret::Form));
        assert!(!first.to_string().contains("AAAA") && !second.to_string().contains("hush"));
        // Sealed all the same, it is as unknown as what does not open.
        let sealed = StoredDhchap::seal(&dhchap_of(bad, None), OF, &ring(1)).unwrap();
        assert!(sealed.open(OF, &ring(1)).is_ok());
        assert_eq!(sealed.known(OF, &ring(1)), Err(CannotOpen::Wrong));
    }

    #[test]
    fn a_record_has_one_secret_for_each_direction() {
        for bad in [
            r"{}",
            r#"{"controller":{"sealed":"1"}}"#,
            r#"{"host":{"sealed":"1"}}"#,
            r#"{"host":{"sealed":"1","secret":"1"},"controller":null}"#,
            r#"{"host":{},"controller":null}"#,
            r#"{"host":"1","controller":null}"#,
            r#"{"host":{"sealed":"1"},"controller":null,"more":1}"#,
            r#"{"host":{"sealed":"1"},"controller":{"more":"1"}}"#,
        ] {
            assert!(serde_json::from_str::<StoredDhchap>(bad).is_err(), "{bad}");
        }
        let damaged: StoredDhchap =
            serde_json::from_str(r#"{"host":{"sealed":"1"},"controller":null}"#).unwrap();
        assert_eq!(damaged.known(OF, &ring(1)), Err(CannotOpen::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is left as it is");
    }
}
