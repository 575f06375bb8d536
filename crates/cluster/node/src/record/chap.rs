//! What a record holds of CHAP: names as they are, secrets sealed (RFD 0016). Records of older versions hold secrets as they
//! are; they are read, and written sealed when they are next written.

use ::cluster::vault::{CannotOpen, NoRandom, Place, Ring, Whose};
use api::{Chap, ChapUser, MutualChap, Secret};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::VolumeRecord;
use super::secrets::Held;

/// A name and the secret that proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Credentials {
    user: ChapUser,
    held: Held<Secret>,
}

/// What iSCSI initiators of a volume must prove, and what it proves to them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "Text")]
pub struct StoredChap {
    initiator: Credentials,
    mutual: Option<Credentials>,
}

/// Whose proof it is: of all initiators of a volume, or of one.
#[derive(Clone, Copy, Debug)]
pub struct Of<'a> {
    /// The volume.
    pub volume: Uuid,
    /// The one initiator.
    pub initiator: Option<&'a str>,
}

impl From<Uuid> for Of<'_> {
    fn from(volume: Uuid) -> Self {
        Self { volume, initiator: None }
    }
}

impl Of<'_> {
    /// What binds a secret beside the volume: the user, and the initiator if it is one's own. No user has a comma.
    fn user(&self, user: &ChapUser) -> String {
        match self.initiator {
            None => user.as_str().to_owned(),
            Some(initiator) => format!("{},{initiator}", user.as_str()),
        }
    }
}

impl Credentials {
    fn seal(
        user: &ChapUser,
        secret: &Secret,
        to: (Of<'_>, Whose, &Ring),
    ) -> Result<Self, NoRandom> {
        let (of, whose, ring) = to;
        let place = Place { volume: of.volume, whose, user: &of.user(user) };
        Ok(Self { user: user.clone(), held: Held::seal(secret, place, ring)? })
    }

    fn open(&self, of: Of<'_>, whose: Whose, ring: &Ring) -> Result<Secret, CannotOpen> {
        let place = Place { volume: of.volume, whose, user: &of.user(&self.user) };
        self.held.open(place, ring)
    }
}

impl StoredChap {
    /// `chap` of a volume, sealed. A ring without keys leaves it as it is.
    ///
    /// # Errors
    /// [`NoRandom`].
    pub fn seal<'a>(chap: &Chap, of: impl Into<Of<'a>>, ring: &Ring) -> Result<Self, NoRandom> {
        let of = of.into();
        let Chap { user, secret, mutual } = chap;
        let initiator = Credentials::seal(user, secret, (of, Whose::Initiator, ring))?;
        let mutual = mutual.as_ref();
        let mutual = mutual
            .map(|m| Credentials::seal(&m.user, &m.secret, (of, Whose::Volume, ring)))
            .transpose()?;
        Ok(Self { initiator, mutual })
    }

    /// What was sealed for a volume.
    ///
    /// # Errors
    /// [`CannotOpen`].
    pub fn open<'a>(&self, of: impl Into<Of<'a>>, ring: &Ring) -> Result<Chap, CannotOpen> {
        let of = of.into();
        let secret = self.initiator.open(of, Whose::Initiator, ring)?;
        let open = |m: &Credentials| {
            let secret = m.open(of, Whose::Volume, ring)?;
            Ok(MutualChap { user: m.user.clone(), secret })
        };
        let mutual = self.mutual.as_ref().map(open).transpose()?;
        Chap::new(self.initiator.user.clone(), secret, mutual).map_err(|_| CannotOpen::Wrong)
    }

    /// Whether all of it is as `ring` would seal it now, or cannot be read.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Ring) -> bool {
        self.credentials().all(|c| c.held.is_sealed_by(ring))
    }

    /// Whether it is sealed by a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Ring) -> bool {
        self.credentials().any(|c| c.held.lacks_key(ring))
    }

    fn credentials(&self) -> impl Iterator<Item = &Credentials> {
        std::iter::once(&self.initiator).chain(&self.mutual)
    }

    /// The name that initiators prove.
    #[must_use]
    pub fn user(&self) -> &ChapUser {
        &self.initiator.user
    }

    /// The name that the volume proves, if it does.
    #[must_use]
    pub fn mutual_user(&self) -> Option<&ChapUser> {
        self.mutual.as_ref().map(|m| &m.user)
    }
}

impl VolumeRecord {
    /// Whether any initiator has to prove anything.
    #[must_use]
    pub fn has_chap(&self) -> bool {
        self.chap.is_some() || !self.proofs.is_empty()
    }

    /// What `initiator` has to prove: its own, else what all have to.
    #[must_use]
    pub fn proof_of<'a>(&'a self, initiator: Option<&'a str>) -> Option<(Of<'a>, &'a StoredChap)> {
        let own = initiator.and_then(|i| Some((Some(i), self.proofs.get(i)?)));
        let (initiator, held) = own.or_else(|| Some((None, self.chap.as_ref()?)))?;
        Some((Of { volume: self.id, initiator }, held))
    }

    /// All that is to be proved of it.
    pub fn all_proofs(&self) -> impl Iterator<Item = (Of<'_>, &StoredChap)> {
        let own = self.proofs.iter().map(|(initiator, held)| (Some(initiator.as_str()), held));
        let all = self.chap.iter().map(|held| (None, held)).chain(own);
        all.map(|(initiator, held)| (Of { volume: self.id, initiator }, held))
    }

    /// The same, to be changed.
    pub fn all_proofs_mut(&mut self) -> impl Iterator<Item = (Of<'_>, &mut StoredChap)> {
        let volume = self.id;
        let own = self.proofs.iter_mut().map(|(initiator, held)| (Some(initiator.as_str()), held));
        let all = self.chap.iter_mut().map(|held| (None, held)).chain(own);
        all.map(move |(initiator, held)| (Of { volume, initiator }, held))
    }
}

/// How it is written. Older versions refuse `sealed`, and with it the record, rather than believe that there is no CHAP.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    user: ChapUser,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secret: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealed: Option<String>,
    #[serde(deserialize_with = "super::text::present")]
    mutual: Option<MutualText>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MutualText {
    user: ChapUser,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secret: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealed: Option<String>,
}

fn credentials(
    user: ChapUser,
    secret: Option<Secret>,
    sealed: Option<String>,
) -> Result<Credentials, &'static str> {
    let held = match (secret, sealed) {
        (Some(secret), None) => Held::Clear(secret),
        (None, Some(text)) => Held::Sealed(text),
        _ => return Err("CHAP has one secret for each user, as it is or sealed"),
    };
    Ok(Credentials { user, held })
}

impl TryFrom<Text> for StoredChap {
    type Error = &'static str;

    fn try_from(text: Text) -> Result<Self, &'static str> {
        let initiator = credentials(text.user, text.secret, text.sealed)?;
        let mutual = text.mutual.map(|m| credentials(m.user, m.secret, m.sealed)).transpose()?;
        Ok(Self { initiator, mutual })
    }
}

impl From<StoredChap> for Text {
    fn from(chap: StoredChap) -> Self {
        let split = |held| match held {
            Held::Clear(secret) => (Some(secret), None),
            Held::Sealed(text) => (None, Some(text)),
        };
        let (secret, sealed) = split(chap.initiator.held);
        let mutual = chap.mutual.map(|m| {
            let (secret, sealed) = split(m.held);
            MutualText { user: m.user, secret, sealed }
        });
        Self { user: chap.initiator.user, secret, sealed, mutual }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use ::cluster::vault::Key;

    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(7);

    pub(crate) fn ring(byte: u8) -> Ring {
        Ring::new(vec![Key::new([byte; 32])]).unwrap()
    }

    pub(crate) fn chap() -> Chap {
        serde_json::from_str(
            r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"m","secret":"ba9876543210"}}"#,
        )
        .unwrap()
    }

    fn json(chap: &StoredChap) -> String {
        serde_json::to_string(chap).unwrap()
    }

    #[test]
    fn what_is_sealed_says_the_names_and_no_secret() {
        let sealed = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        let text = json(&sealed);
        assert!(text.contains(r#""user":"u""#) && text.contains(r#""user":"m""#), "{text}");
        assert!(!text.contains("0123456789ab") && !text.contains("\"secret\""), "{text}");
        assert_eq!(serde_json::from_str::<StoredChap>(&text).unwrap(), sealed);
        assert_eq!(sealed.open(VOLUME, &ring(1)), Ok(chap()));
        assert!(serde_json::from_str::<Chap>(&text).is_err(), "older versions refuse it");
    }

    #[test]
    fn both_directions_are_bound_to_their_volume_and_place() {
        let sealed = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        assert_eq!(sealed.open(Uuid::from_u128(8), &ring(1)), Err(CannotOpen::Wrong));
        let StoredChap { initiator, mutual } = sealed.clone();
        let mutual = mutual.unwrap();
        let swapped = StoredChap {
            initiator: Credentials { held: mutual.held.clone(), ..initiator.clone() },
            mutual: Some(Credentials { held: initiator.held, ..mutual.clone() }),
        };
        assert_eq!(swapped.open(VOLUME, &ring(1)), Err(CannotOpen::Wrong));
        assert!(matches!(sealed.open(VOLUME, &ring(2)), Err(CannotOpen::NoKey(_))));
        assert!(sealed.lacks_key(&ring(2)) && !sealed.lacks_key(&ring(1)));
    }

    /// RFD 0016, 1: a secret is one initiator's, and no other's.
    #[test]
    fn the_secret_of_one_initiator_opens_for_it_alone() {
        let of = |initiator| Of { volume: VOLUME, initiator };
        let own = StoredChap::seal(&chap(), of(Some("iqn.a")), &ring(1)).unwrap();
        assert_eq!(own.open(of(Some("iqn.a")), &ring(1)), Ok(chap()));
        for other in [Some("iqn.b"), None] {
            assert_eq!(own.open(of(other), &ring(1)), Err(CannotOpen::Wrong));
        }
        let everybodys = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        assert_eq!(everybodys.open(of(Some("iqn.a")), &ring(1)), Err(CannotOpen::Wrong));
    }

    #[test]
    fn a_record_of_an_older_version_reads_and_wants_to_be_sealed() {
        let old =
            r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"m","secret":"ba9876543210"}}"#;
        let old: StoredChap = serde_json::from_str(old).unwrap();
        assert_eq!(old.open(VOLUME, &Ring::default()), Ok(chap()), "no key is needed for it");
        assert!(!old.is_sealed_by(&ring(1)));
        let new = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        assert!(new.is_sealed_by(&ring(1)) && !new.is_sealed_by(&ring(2)));
    }

    #[test]
    fn a_damaged_secret_damages_nothing_else() {
        let text = r#"{"user":"u","sealed":"1.0000000000000001.AAAA","mutual":null}"#;
        let damaged: StoredChap = serde_json::from_str(text).unwrap();
        assert_eq!(damaged.open(VOLUME, &ring(1)), Err(CannotOpen::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is left as it is");
        assert!(!damaged.lacks_key(&ring(1)));
        for bad in [
            r#"{"user":"u","sealed":"1"}"#,
            r#"{"user":"u","mutual":null}"#,
            r#"{"user":"u","secret":"0123456789ab","sealed":"1","mutual":null}"#,
            r#"{"user":"u","sealed":"1","mutual":{"user":"m"}}"#,
            r#"{"user":"u","sealed":"1","mutual":null,"more":1}"#,
        ] {
            assert!(serde_json::from_str::<StoredChap>(bad).is_err(), "{bad}");
        }
    }
}
