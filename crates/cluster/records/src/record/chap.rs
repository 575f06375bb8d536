//! CHAP credentials in a record: user names in clear text, secrets sealed (RFD 0016). Older
//! versions wrote clear-text secrets; these are read, and sealed when the record is next written.

use ::cluster::secrets::{
    Keyring, RandomnessUnavailable, SecretContext, SecretOwner, SecretUnsealError,
};
use api::{Chap, ChapUser, MutualChap, Secret};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::VolumeRecord;
use super::secrets::StoredSecret;

/// A user name and its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Credentials {
    user: ChapUser,
    stored: StoredSecret<Secret>,
}

/// The CHAP credentials of a volume's initiators, and those of the volume for mutual CHAP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ChapJson", into = "ChapJson")]
pub struct StoredChap {
    initiator: Credentials,
    mutual: Option<Credentials>,
}

/// The initiators that credentials belong to: all of a volume, or one.
#[derive(Clone, Copy, Debug)]
pub struct ChapContext<'a> {
    /// The volume.
    pub volume: Uuid,
    /// The one initiator; `None` for all.
    pub initiator: Option<&'a str>,
}

impl From<Uuid> for ChapContext<'_> {
    fn from(volume: Uuid) -> Self {
        Self { volume, initiator: None }
    }
}

impl ChapContext<'_> {
    /// What a secret is bound to besides the volume: the user, and the initiator if it is one's
    /// own. User names contain no comma.
    fn binding_user(&self, user: &ChapUser) -> String {
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
        to: (ChapContext<'_>, SecretOwner, &Keyring),
    ) -> Result<Self, RandomnessUnavailable> {
        let (context, owner, ring) = to;
        let secret_context =
            SecretContext { volume: context.volume, owner, user: &context.binding_user(user) };
        Ok(Self { user: user.clone(), stored: StoredSecret::seal(secret, secret_context, ring)? })
    }

    fn open(
        &self,
        context: ChapContext<'_>,
        owner: SecretOwner,
        ring: &Keyring,
    ) -> Result<Secret, SecretUnsealError> {
        let secret_context = SecretContext {
            volume: context.volume,
            owner,
            user: &context.binding_user(&self.user),
        };
        self.stored.open(secret_context, ring)
    }
}

impl StoredChap {
    /// Seals the credentials of a volume. A ring without keys leaves them in clear text.
    ///
    /// # Errors
    /// [`RandomnessUnavailable`].
    pub fn seal<'a>(
        chap: &Chap,
        context: impl Into<ChapContext<'a>>,
        ring: &Keyring,
    ) -> Result<Self, RandomnessUnavailable> {
        let context = context.into();
        let Chap { user, secret, mutual } = chap;
        let initiator = Credentials::seal(user, secret, (context, SecretOwner::Initiator, ring))?;
        let mutual = mutual.as_ref();
        let mutual = mutual
            .map(|m| Credentials::seal(&m.user, &m.secret, (context, SecretOwner::Volume, ring)))
            .transpose()?;
        Ok(Self { initiator, mutual })
    }

    /// Decrypts the credentials of a volume.
    ///
    /// # Errors
    /// [`SecretUnsealError`].
    pub fn open<'a>(
        &self,
        context: impl Into<ChapContext<'a>>,
        ring: &Keyring,
    ) -> Result<Chap, SecretUnsealError> {
        let context = context.into();
        let secret = self.initiator.open(context, SecretOwner::Initiator, ring)?;
        let open = |m: &Credentials| {
            let secret = m.open(context, SecretOwner::Volume, ring)?;
            Ok(MutualChap { user: m.user.clone(), secret })
        };
        let mutual = self.mutual.as_ref().map(open).transpose()?;
        Chap::new(self.initiator.user.clone(), secret, mutual)
            .map_err(|_| SecretUnsealError::AuthenticationFailed)
    }

    /// Whether every secret is sealed with the current key of `ring`, or is unreadable.
    #[must_use]
    pub fn is_sealed_by(&self, ring: &Keyring) -> bool {
        self.credentials().all(|c| c.stored.is_sealed_by(ring))
    }

    /// Whether a secret is sealed with a key that `ring` lacks.
    #[must_use]
    pub fn lacks_key(&self, ring: &Keyring) -> bool {
        self.credentials().any(|c| c.stored.lacks_key(ring))
    }

    fn credentials(&self) -> impl Iterator<Item = &Credentials> {
        std::iter::once(&self.initiator).chain(&self.mutual)
    }

    /// The user name of initiators.
    #[must_use]
    pub fn user(&self) -> &ChapUser {
        &self.initiator.user
    }

    /// The user name of the volume, for mutual CHAP.
    #[must_use]
    pub fn mutual_user(&self) -> Option<&ChapUser> {
        self.mutual.as_ref().map(|m| &m.user)
    }
}

impl VolumeRecord {
    /// Whether any initiator must authenticate by CHAP.
    #[must_use]
    pub fn has_chap(&self) -> bool {
        self.chap.is_some() || !self.chap_by_initiator.is_empty()
    }

    /// The credentials for `initiator`: its own, or else those of all.
    #[must_use]
    pub fn chap_for<'a>(
        &'a self,
        initiator: Option<&'a str>,
    ) -> Option<(ChapContext<'a>, &'a StoredChap)> {
        let own = initiator.and_then(|i| Some((Some(i), self.chap_by_initiator.get(i)?)));
        let (initiator, stored) = own.or_else(|| Some((None, self.chap.as_ref()?)))?;
        Some((ChapContext { volume: self.id, initiator }, stored))
    }

    /// All CHAP credentials of the volume.
    pub fn chap_secrets(&self) -> impl Iterator<Item = (ChapContext<'_>, &StoredChap)> {
        let own = self
            .chap_by_initiator
            .iter()
            .map(|(initiator, stored)| (Some(initiator.as_str()), stored));
        let all = self.chap.iter().map(|stored| (None, stored)).chain(own);
        all.map(|(initiator, stored)| (ChapContext { volume: self.id, initiator }, stored))
    }

    /// The same, mutable.
    pub fn chap_secrets_mut(&mut self) -> impl Iterator<Item = (ChapContext<'_>, &mut StoredChap)> {
        let volume = self.id;
        let own = self
            .chap_by_initiator
            .iter_mut()
            .map(|(initiator, stored)| (Some(initiator.as_str()), stored));
        let all = self.chap.iter_mut().map(|stored| (None, stored)).chain(own);
        all.map(move |(initiator, stored)| (ChapContext { volume, initiator }, stored))
    }
}

/// The JSON form. Older versions refuse `sealed`, and with it the record, rather than assume no
/// CHAP.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChapJson {
    user: ChapUser,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    secret: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealed: Option<String>,
    #[serde(deserialize_with = "super::json::required_option")]
    mutual: Option<MutualChapJson>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MutualChapJson {
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
    let stored = match (secret, sealed) {
        (Some(secret), None) => StoredSecret::Clear(secret),
        (None, Some(text)) => StoredSecret::Sealed(text),
        _ => return Err("CHAP has one secret for each user, as it is or sealed"),
    };
    Ok(Credentials { user, stored })
}

impl TryFrom<ChapJson> for StoredChap {
    type Error = &'static str;

    fn try_from(text: ChapJson) -> Result<Self, &'static str> {
        let initiator = credentials(text.user, text.secret, text.sealed)?;
        let mutual = text.mutual.map(|m| credentials(m.user, m.secret, m.sealed)).transpose()?;
        Ok(Self { initiator, mutual })
    }
}

impl From<StoredChap> for ChapJson {
    fn from(chap: StoredChap) -> Self {
        let split = |stored| match stored {
            StoredSecret::Clear(secret) => (Some(secret), None),
            StoredSecret::Sealed(text) => (None, Some(text)),
        };
        let (secret, sealed) = split(chap.initiator.stored);
        let mutual = chap.mutual.map(|m| {
            let (secret, sealed) = split(m.stored);
            MutualChapJson { user: m.user, secret, sealed }
        });
        Self { user: chap.initiator.user, secret, sealed, mutual }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{chap, ring};

    const VOLUME: Uuid = Uuid::from_u128(7);

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
        assert_eq!(
            sealed.open(Uuid::from_u128(8), &ring(1)),
            Err(SecretUnsealError::AuthenticationFailed)
        );
        let StoredChap { initiator, mutual } = sealed.clone();
        let mutual = mutual.unwrap();
        let swapped = StoredChap {
            initiator: Credentials { stored: mutual.stored.clone(), ..initiator.clone() },
            mutual: Some(Credentials { stored: initiator.stored, ..mutual.clone() }),
        };
        assert_eq!(swapped.open(VOLUME, &ring(1)), Err(SecretUnsealError::AuthenticationFailed));
        assert!(matches!(sealed.open(VOLUME, &ring(2)), Err(SecretUnsealError::UnknownKey(_))));
        assert!(sealed.lacks_key(&ring(2)) && !sealed.lacks_key(&ring(1)));
    }

    /// RFD 0016, 1: the secret of one initiator is useless to any other.
    #[test]
    fn the_secret_of_one_initiator_opens_for_it_alone() {
        let context = |initiator| ChapContext { volume: VOLUME, initiator };
        let own = StoredChap::seal(&chap(), context(Some("iqn.a")), &ring(1)).unwrap();
        assert_eq!(own.open(context(Some("iqn.a")), &ring(1)), Ok(chap()));
        for other in [Some("iqn.b"), None] {
            assert_eq!(
                own.open(context(other), &ring(1)),
                Err(SecretUnsealError::AuthenticationFailed)
            );
        }
        let everybodys = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        assert_eq!(
            everybodys.open(context(Some("iqn.a")), &ring(1)),
            Err(SecretUnsealError::AuthenticationFailed)
        );
    }

    #[test]
    fn a_record_of_an_older_version_reads_and_wants_to_be_sealed() {
        let old =
            r#"{"user":"u","secret":"0123456789ab","mutual":{"user":"m","secret":"ba9876543210"}}"#;
        let old: StoredChap = serde_json::from_str(old).unwrap();
        assert_eq!(old.open(VOLUME, &Keyring::default()), Ok(chap()), "no key is needed for it");
        assert!(!old.is_sealed_by(&ring(1)));
        let new = StoredChap::seal(&chap(), VOLUME, &ring(1)).unwrap();
        assert!(new.is_sealed_by(&ring(1)) && !new.is_sealed_by(&ring(2)));
    }

    #[test]
    fn a_damaged_secret_damages_nothing_else() {
        let text = r#"{"user":"u","sealed":"1.0000000000000001.AAAA","mutual":null}"#;
        let damaged: StoredChap = serde_json::from_str(text).unwrap();
        assert_eq!(damaged.open(VOLUME, &ring(1)), Err(SecretUnsealError::Damaged));
        assert!(damaged.is_sealed_by(&ring(1)), "it is not changed");
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
