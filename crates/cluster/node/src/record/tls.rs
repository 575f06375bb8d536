//! What a record holds of TLS (RFD 0022, 3): keys of NVMe hosts, sealed as secrets are (RFD 0016), and whether they have to be
//! used.

use ::cluster::vault::{CannotOpen, NoRandom, Place, Ring, Whose};
use api::{Tls, TlsKey};
use serde::{Deserialize, Serialize};

use super::secrets::Held;
use super::{OfHost, VolumeRecord};

/// How one NVMe host comes by TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredTls {
    key: Held<TlsKey>,
    required: bool,
}

/// Has `work` done with what binds a key. What binds secrets of a host is a comma and its NQN, which begins with `nqn.`; and no
/// user of CHAP is empty.
fn at<T>(of: OfHost<'_>, work: impl FnOnce(Place<'_>) -> T) -> T {
    let user = format!(",tls,{}", of.host);
    work(Place { volume: of.volume, whose: Whose::Initiator, user: &user })
}

impl StoredTls {
    /// A key, sealed. A ring without keys leaves it as it is.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn seal(tls: &Tls, of: OfHost<'_>, ring: &Ring) -> Result<Self, NoRandom> {
        let key = at(of, |place| Held::seal(&tls.key, place, ring))?;
        Ok(Self { key, required: tls.required })
    }

    /// What was sealed for that host.
    ///
    /// # Errors
    /// [`CannotOpen`].
    pub fn open(&self, of: OfHost<'_>, ring: &Ring) -> Result<Tls, CannotOpen> {
        let key = at(of, |place| self.key.open(place, ring))?;
        Ok(Tls { key, required: self.required })
    }

    /// The key, for front ends.
    ///
    /// # Errors
    /// [`CannotOpen`], also where what was sealed is no key of a form that is known.
    pub fn known(&self, of: OfHost<'_>, ring: &Ring) -> Result<nvme::tls::TlsKey, CannotOpen> {
        let Tls { key, .. } = self.open(of, ring)?;
        nvme::tls::TlsKey::parse(key.expose()).map_err(|_| CannotOpen::Wrong)
    }

    /// Whether it is as `ring` would seal it now, or cannot be read.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Ring) -> bool {
        self.key.is_sealed_by(ring)
    }

    /// Whether it is sealed by a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Ring) -> bool {
        self.key.lacks_key(ring)
    }

    /// Whether the host has to come by TLS.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.required
    }
}

impl VolumeRecord {
    /// Whether any host has to come by TLS.
    #[must_use]
    pub fn requires_tls(&self) -> bool {
        self.tls.values().any(StoredTls::is_required)
    }

    /// The key of each host that has one.
    pub fn all_tls(&self) -> impl Iterator<Item = (OfHost<'_>, &StoredTls)> {
        self.tls.iter().map(|(host, held)| (OfHost { volume: self.id, host }, held))
    }

    /// The same, to be changed.
    pub fn all_tls_mut(&mut self) -> impl Iterator<Item = (OfHost<'_>, &mut StoredTls)> {
        let volume = self.id;
        self.tls.iter_mut().map(move |(host, held)| (OfHost { volume, host }, held))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use api::{ChapUser, Initiator};
    use serde_json::json;
    use uuid::Uuid;

    use super::super::tests::{HOST, SECRETS, chap, dhchap, dhchap_of, ring};
    use super::super::{Of, StoredChap, StoredDhchap};
    use super::*;

    const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:2";
    const VOLUME: Uuid = Uuid::from_u128(7);
    const OF: OfHost<'static> = OfHost { volume: VOLUME, host: HOST };

    /// As nvme-cli makes them.
    pub(crate) const KEYS: [&str; 2] = [
        "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
        "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:",
    ];

    pub(crate) fn tls(key: &str, required: bool) -> Tls {
        Tls { key: TlsKey::try_from(key.to_owned()).unwrap(), required }
    }

    #[test]
    fn what_is_sealed_shows_no_key_and_reads_back() {
        for required in [true, false] {
            let given = tls(KEYS[0], required);
            let sealed = StoredTls::seal(&given, OF, &ring(1)).unwrap();
            let text = serde_json::to_string(&sealed).unwrap();
            assert!(!text.contains("NVMeTLS") && !text.contains("\"secret\""), "{text}");
            let again: StoredTls = serde_json::from_str(&text).unwrap();
            assert_eq!((again.open(OF, &ring(1)), again.is_required()), (Ok(given), required));
            let known = again.known(OF, &ring(1)).unwrap();
            assert!(known == nvme::tls::TlsKey::parse(KEYS[0]).unwrap());
        }
    }

    #[test]
    fn a_key_opens_for_its_volume_and_host() {
        let sealed = StoredTls::seal(&tls(KEYS[0], true), OF, &ring(1)).unwrap();
        let opens = |of, by: &Ring| sealed.open(of, by).map(|_| ());
        assert_eq!(opens(OF, &ring(1)), Ok(()));
        let other = OfHost { host: OTHER, ..OF };
        assert_eq!(opens(other, &ring(1)), Err(CannotOpen::Wrong));
        let elsewhere = OfHost { volume: Uuid::from_u128(8), ..OF };
        assert_eq!(opens(elsewhere, &ring(1)), Err(CannotOpen::Wrong));
        assert!(matches!(opens(OF, &ring(2)), Err(CannotOpen::NoKey(_))));
    }

    /// The text of what is sealed, at `path` of its JSON.
    fn sealed_text(stored: impl Serialize, path: &str) -> serde_json::Value {
        let text = serde_json::to_value(stored).unwrap().pointer(path).unwrap().clone();
        assert!(text.as_str().unwrap().starts_with("1."));
        text
    }

    /// Whoever can write to the store has nothing used for what it was not given for.
    #[test]
    fn no_secret_opens_as_a_key_and_no_key_as_a_secret() {
        let ring = ring(1);
        let secrets = StoredDhchap::seal(&dhchap_of(SECRETS[0], Some(KEYS[0])), OF, &ring).unwrap();
        let own = Of { volume: VOLUME, initiator: Some(HOST) };
        let named = format!(r#"{{"user":"{HOST}","secret":"{}"}}"#, KEYS[0]);
        let named: api::Chap = serde_json::from_str(&named).unwrap();
        for sealed in [
            sealed_text(&secrets, "/host/sealed"),
            sealed_text(&secrets, "/controller/sealed"),
            sealed_text(StoredChap::seal(&chap(), VOLUME, &ring).unwrap(), "/sealed"),
            sealed_text(StoredChap::seal(&named, VOLUME, &ring).unwrap(), "/sealed"),
            sealed_text(StoredChap::seal(&named, own, &ring).unwrap(), "/sealed"),
        ] {
            let moved = json!({ "key": { "sealed": sealed }, "required": true });
            let moved: StoredTls = serde_json::from_value(moved).unwrap();
            assert_eq!(moved.open(OF, &ring), Err(CannotOpen::Wrong));
        }
        let key = StoredTls::seal(&tls(SECRETS[0], true), OF, &ring).unwrap();
        let key = sealed_text(&key, "/key/sealed");
        for moved in [
            json!({ "host": { "sealed": key }, "controller": null }),
            json!({ "host": { "sealed": sealed_text(
                StoredDhchap::seal(&dhchap(), OF, &ring).unwrap(), "/host/sealed"
            ) }, "controller": { "sealed": key } }),
        ] {
            let moved: StoredDhchap = serde_json::from_value(moved).unwrap();
            assert_eq!(moved.open(OF, &ring), Err(CannotOpen::Wrong));
        }
        let moved = json!({ "user": HOST, "sealed": key, "mutual": null });
        let moved: StoredChap = serde_json::from_value(moved).unwrap();
        assert_eq!(moved.open(VOLUME, &ring), Err(CannotOpen::Wrong));
        assert_eq!(moved.open(own, &ring), Err(CannotOpen::Wrong));
        // What keeps the places apart.
        assert!(ChapUser::try_from(format!(",tls,{HOST}")).is_err());
        assert!(format!("tls,{HOST}").parse::<Initiator>().is_err(), "no host has such a name");
    }

    #[test]
    fn what_is_no_key_is_as_unknown_as_what_does_not_open() {
        let bad = StoredTls::seal(&tls(SECRETS[0], true), OF, &ring(1)).unwrap();
        assert!(bad.open(OF, &ring(1)).is_ok());
        assert_eq!(bad.known(OF, &ring(1)).err(), Some(CannotOpen::Wrong));
        for bad in [
            r"{}",
            r#"{"key":{"sealed":"1"}}"#,
            r#"{"required":true}"#,
            r#"{"key":{"sealed":"1","secret":"1"},"required":true}"#,
            r#"{"key":"1","required":true}"#,
            r#"{"key":{"sealed":"1"},"required":true,"more":1}"#,
        ] {
            assert!(serde_json::from_str::<StoredTls>(bad).is_err(), "{bad}");
        }
        let damaged = r#"{"key":{"sealed":"1"},"required":true}"#;
        let damaged: StoredTls = serde_json::from_str(damaged).unwrap();
        assert_eq!(damaged.known(OF, &ring(1)).err(), Some(CannotOpen::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is left as it is");
    }
}
