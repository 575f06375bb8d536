//! What a node is: a member of a cluster, or on the way into one or out of it. Stands in
//! `cluster.json` in the node's data directory, `docs/format/cluster.md`; a node without that file is
//! alone.

mod secret;

use std::io;
use std::path::{Path, PathBuf};

use http::Uri;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::authority::Authority;
use crate::file::{self, ReadError};

pub use secret::ClusterSecret;

/// Format of the file that this version writes and reads.
pub const FORMAT: u64 = 4;

/// What the file is sealed as.
const NAME: &str = "cluster.json";

/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 64 << 10;

/// Most endpoints of the store that are named in a file or a token.
pub const MAX_ENDPOINTS: usize = 64;

/// Longest URL, in bytes.
const MAX_URL: usize = 512;

/// Nodes of a cluster.
pub const MAX_NODES: usize = 16;

/// How far a node has come on its way into the cluster or out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It is the first of a new cluster, and takes its records there.
    Moving,
    /// It is being made room for.
    Joining,
    /// It is one of the nodes.
    Member,
    /// It takes its leave.
    Leaving,
}

/// What a node is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It keeps copies of volumes, and serves them.
    Data,
    /// It runs a member of the store, and keeps no data.
    Witness,
}

/// Number of a node's ports and controllers, 0 to 15. Free again when the node has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct NodeIndex(u8);

impl NodeIndex {
    /// Every index, from the lowest.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).take(MAX_NODES).map(Self)
    }

    /// `number` as an index, if it is one.
    #[must_use]
    pub fn new(number: u8) -> Option<Self> {
        (usize::from(number) < MAX_NODES).then_some(Self(number))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }
}

impl<'de> Deserialize<'de> for NodeIndex {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = u8::deserialize(from)?;
        Self::new(number).ok_or_else(|| serde::de::Error::custom("an index is 0 to 15"))
    }
}

/// A member of the store that a node runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnMember {
    /// Its name among the members.
    pub name: String,
    /// Where the other members reach it.
    pub peer_url: String,
    /// Where clients reach it.
    pub client_url: String,
}

/// What protects the connections between the nodes of a cluster and to its store (RFD 0038, 2.2); the same at all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protection {
    /// Certificates that the nodes sign by an authority of the cluster's own.
    Own(Authority),
    /// Certificates that an administrator has made.
    Given,
    /// Nothing: they speak in plain text.
    Plain,
}

impl Protection {
    /// The scheme of the URLs of the store's members.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::Own(_) | Self::Given => "https",
            Self::Plain => "http",
        }
    }

    /// Whether what an identity or a token says of it can be used.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::Own(authority) => authority.check().map_err(|e| e.to_string()),
            Self::Given | Self::Plain => Ok(()),
        }
    }
}

/// By what the nodes of a cluster know each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    /// What they know and nobody else.
    pub secret: ClusterSecret,
    /// What protects their connections.
    pub protection: Protection,
}

/// How far a node is with new credentials of its cluster ([`crate::rotation`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// It has them, shows the old ones, and accepts both.
    Has,
    /// It shows the new ones, and accepts both.
    Uses,
    /// It has forgotten the old ones.
    Done,
}

/// What a node has of new credentials of its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnRotation {
    /// In which rotation.
    pub id: Uuid,
    /// How far it is.
    pub step: Step,
    /// What it accepts beside its own: the new ones at first, the old ones then, at last none.
    #[serde(deserialize_with = "present")]
    pub other: Option<Credentials>,
}

impl OwnRotation {
    fn check(&self) -> Result<(), String> {
        if (self.step == Step::Done) != self.other.is_none() {
            return Err("the other credentials and the step of the rotation do not fit".into());
        }
        self.other.as_ref().map_or(Ok(()), |other| other.protection.check())
    }
}

/// What a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// How far it has come.
    pub stage: Stage,
    /// The cluster.
    pub cluster: Uuid,
    /// Its number, never 0.
    pub node: NodeId,
    /// Its index; every member has one.
    pub index: Option<NodeIndex>,
    /// What it is for.
    pub role: Role,
    /// What the cluster's nodes know and nobody else.
    pub secret: ClusterSecret,
    /// What protects its connections.
    pub protection: Protection,
    /// Where new ones take the place of both.
    pub rotation: Option<OwnRotation>,
    /// Client URLs of the store's members, at least one.
    pub endpoints: Vec<String>,
    /// The member of the store that it runs.
    pub member: Option<OwnMember>,
}

/// The file's shape.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    format: u64,
    stage: Stage,
    cluster: Uuid,
    node: u16,
    #[serde(deserialize_with = "present")]
    index: Option<NodeIndex>,
    role: Role,
    secret: ClusterSecret,
    protection: Protection,
    #[serde(deserialize_with = "present")]
    rotation: Option<OwnRotation>,
    endpoints: Vec<String>,
    #[serde(deserialize_with = "present")]
    member: Option<OwnMember>,
}

/// What a field that has to be there says: something, or `null`.
fn present<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(from)
}

/// What tells a newer file before the rest of it is read.
#[derive(Deserialize)]
struct Head {
    format: u64,
}

/// What is wrong with the contents of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadIdentity {
    /// Another version of the program wrote it.
    #[error(
        "it has format {found}, this version knows format {FORMAT}; run the version that wrote it"
    )]
    OtherFormat {
        /// Its format.
        found: u64,
    },
    /// It is damaged, or not ours.
    #[error("it is damaged: {why}; restore it from a backup")]
    Damaged {
        /// What is wrong.
        why: String,
    },
}

/// Why the file of a node's identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Its contents.
    #[error("{}: {why}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: BadIdentity,
    },
    /// The system refuses something.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What it said.
        why: io::Error,
    },
}

/// Whether `url` can be the URL of a member of the store: `http://HOST:PORT` or `https://…`.
#[must_use]
pub fn is_url(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
    let scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.host().is_some_and(|host| !host.is_empty()) && uri.port_u16().is_some();
    url.len() <= MAX_URL && scheme && host && plain
}

/// Whether `urls` can be the endpoints of a store.
pub(crate) fn check_endpoints(urls: &[String]) -> Result<(), String> {
    if urls.is_empty() || urls.len() > MAX_ENDPOINTS {
        return Err(format!("it has {} endpoints, not 1 to {MAX_ENDPOINTS}", urls.len()));
    }
    match urls.iter().find(|url| !is_url(url)) {
        Some(bad) => Err(format!("{bad:?} is no endpoint")),
        None => Ok(()),
    }
}

impl Identity {
    /// What `bytes` say.
    ///
    /// # Errors
    /// [`BadIdentity`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BadIdentity> {
        let damaged = |why: String| BadIdentity::Damaged { why };
        let head: Head = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        if head.format != FORMAT {
            return Err(BadIdentity::OtherFormat { found: head.format });
        }
        let written = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        let Written {
            format: _,
            stage,
            cluster,
            node,
            index,
            role,
            secret,
            protection,
            rotation,
            endpoints,
            member,
        } = written;
        if node == 0 {
            return Err(damaged("the node's number is 0".into()));
        }
        if stage == Stage::Member && index.is_none() {
            return Err(damaged("a member has an index".into()));
        }
        protection.check().map_err(damaged)?;
        rotation.as_ref().map_or(Ok(()), OwnRotation::check).map_err(damaged)?;
        check_endpoints(&endpoints).map_err(damaged)?;
        if let Some(OwnMember { name, peer_url, client_url }) = &member {
            let named = (1..=MAX_URL).contains(&name.len()) && !name.contains([',', '=']);
            if !named || !is_url(peer_url) || !is_url(client_url) {
                return Err(damaged("the member of the store has no name or no address".into()));
            }
        }
        Ok(Self {
            stage,
            cluster,
            node: NodeId(node),
            index,
            role,
            secret,
            protection,
            rotation,
            endpoints,
            member,
        })
    }

    /// By what it is known, and knows others, at present.
    #[must_use]
    pub fn credentials(&self) -> Credentials {
        Credentials { secret: self.secret.clone(), protection: self.protection.clone() }
    }

    /// What it accepts beside that.
    #[must_use]
    pub fn other_credentials(&self) -> Option<&Credentials> {
        self.rotation.as_ref().and_then(|rotation| rotation.other.as_ref())
    }

    /// The new credentials and the old secret, where it has both.
    #[must_use]
    pub fn new_and_old(&self) -> Option<(Credentials, ClusterSecret)> {
        let OwnRotation { step, other, .. } = self.rotation.as_ref()?;
        let other = other.clone()?;
        Some(match step {
            Step::Has => (other, self.secret.clone()),
            Step::Uses | Step::Done => (self.credentials(), other.secret),
        })
    }

    /// Takes new credentials, in the rotation `id`.
    pub fn take(&mut self, id: Uuid, new: Credentials) {
        self.rotation = Some(OwnRotation { id, step: Step::Has, other: Some(new) });
    }

    /// Shows the new ones from now on, if it has them.
    pub fn use_new(&mut self) {
        let old = self.credentials();
        let Some(rotation) = self.rotation.as_mut().filter(|own| own.step == Step::Has) else {
            return;
        };
        let Some(new) = rotation.other.replace(old) else { return };
        rotation.step = Step::Uses;
        (self.secret, self.protection) = (new.secret, new.protection);
    }

    /// Forgets the old ones, if it shows the new ones.
    pub fn forget_old(&mut self) {
        if let Some(rotation) = self.rotation.as_mut().filter(|own| own.step == Step::Uses) {
            (rotation.step, rotation.other) = (Step::Done, None);
        }
    }

    /// As [`Self::parse`] reads it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self {
            stage,
            cluster,
            node,
            index,
            role,
            secret,
            protection,
            rotation,
            endpoints,
            member,
        } = self.clone();
        let written = Written {
            format: FORMAT,
            stage,
            cluster,
            node: node.0,
            index,
            role,
            secret,
            protection,
            rotation,
            endpoints,
            member,
        };
        let mut text = serde_json::to_vec(&written).expect("names and numbers always serialise");
        text.push(b'\n');
        text
    }

    /// The identity in the file at `path`; `None` where there is no file.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn read(path: &Path) -> Result<Option<Self>, IdentityError> {
        let bad = |why| IdentityError::Bad { path: path.to_owned(), why };
        match file::read(path, NAME, MAX_FILE) {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => Self::parse(&bytes).map(Some).map_err(bad),
            Err(ReadError::Damaged(why)) => Err(bad(BadIdentity::Damaged { why })),
            Err(ReadError::Refused(why)) => {
                Err(IdentityError::Refused { path: path.to_owned(), why })
            }
        }
    }

    /// Writes the file at `path` whole, durably, and for its owner only: whoever reads it sees the
    /// old one or this one, also after a power cut.
    ///
    /// # Errors
    /// [`IdentityError::Refused`]; then it is one of the two.
    pub fn write(&self, path: &Path) -> Result<(), IdentityError> {
        let written = file::write(path, NAME, &self.to_bytes());
        written.map_err(|why| IdentityError::Refused { path: path.to_owned(), why })
    }

    /// Removes the file at `path`, durably: the node is alone. It may be gone already.
    ///
    /// # Errors
    /// [`IdentityError::Refused`].
    pub fn remove(path: &Path) -> Result<(), IdentityError> {
        let refused = |why| IdentityError::Refused { path: path.to_owned(), why };
        file::remove(path).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn identity() -> Identity {
        Identity {
            stage: Stage::Moving,
            cluster: Uuid::from_u128(0x3d81_3cbb_47fb_32ba_91df_831e_1593_ac29),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret: ClusterSecret::new([0xa5; 32]),
            protection: Protection::Plain,
            rotation: None,
            endpoints: vec!["http://192.0.2.1:2379".into()],
            member: Some(OwnMember {
                name: "node-1".into(),
                peer_url: "http://192.0.2.1:2380".into(),
                client_url: "http://192.0.2.1:2379".into(),
            }),
        }
    }

    /// What this version writes, every later one reads.
    const GOLDEN: &str = concat!(
        r#"{"format":4,"stage":"moving","cluster":"3d813cbb-47fb-32ba-91df-831e1593ac29","node":1,"#,
        r#""index":0,"role":"data","#,
        r#""secret":"a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5","#,
        r#""protection":"plain","rotation":null,"endpoints":["http://192.0.2.1:2379"],"member":{"name":"node-1","#,
        r#""peer_url":"http://192.0.2.1:2380","client_url":"http://192.0.2.1:2379"}}"#,
        "\n"
    );

    #[test]
    fn the_golden_file_reads_and_is_written() {
        assert_eq!(Identity::parse(GOLDEN.as_bytes()), Ok(identity()));
        assert_eq!(String::from_utf8(identity().to_bytes()).unwrap(), GOLDEN);
        assert!(!format!("{:?}", identity()).contains("a5"), "secrets stay out of logs");
    }

    #[test]
    fn an_authority_is_kept_and_stays_out_of_logs() {
        let protection = Protection::Own(Authority::new().unwrap());
        let own = Identity { protection, ..identity() };
        assert_eq!(Identity::parse(&own.to_bytes()), Ok(own.clone()));
        assert!(!format!("{own:?}").contains("PRIVATE"));
    }

    #[test]
    fn new_credentials_take_the_place_of_the_old_ones_in_three_steps() {
        let new = |byte| {
            let secret = ClusterSecret::new([byte; 32]);
            Credentials { secret, protection: Protection::Own(Authority::new().unwrap()) }
        };
        let (old, new, id) = (new(1), new(2), Uuid::from_u128(9));
        let Credentials { secret, protection } = old.clone();
        let mut node = Identity { secret, protection, ..identity() };
        // What is not due changes nothing.
        node.use_new();
        node.forget_old();
        assert_eq!((node.credentials(), node.rotation.clone()), (old.clone(), None));
        let reads_back = |node: &Identity| {
            assert_eq!(Identity::parse(&node.to_bytes()).as_ref(), Ok(node));
            assert!(!format!("{node:?}").contains("PRIVATE"));
        };
        node.take(id, new.clone());
        reads_back(&node);
        assert_eq!((node.credentials(), node.other_credentials()), (old.clone(), Some(&new)));
        assert_eq!(node.new_and_old(), Some((new.clone(), old.secret.clone())));
        node.use_new();
        node.use_new();
        reads_back(&node);
        assert_eq!((node.credentials(), node.other_credentials()), (new.clone(), Some(&old)));
        assert_eq!(node.new_and_old(), Some((new.clone(), old.secret)));
        node.forget_old();
        reads_back(&node);
        assert_eq!((node.credentials(), node.other_credentials()), (new, None));
        assert_eq!(node.new_and_old(), None);
        let text = String::from_utf8(node.to_bytes()).unwrap();
        let odd = text.replace("\"step\":\"done\"", "\"step\":\"has\"");
        assert!(odd != text && Identity::parse(odd.as_bytes()).is_err());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let refused = |from: &str, to: &str| {
            assert!(GOLDEN.contains(from), "{from}");
            Identity::parse(GOLDEN.replace(from, to).as_bytes()).unwrap_err().to_string()
        };
        assert!(refused("\"format\":4", "\"format\":5,\"new\":[]").contains("has format 5"));
        assert!(refused("\"format\":4", "\"format\":3").contains("has format 3"));
        assert!(refused("\"node\":1", "\"node\":0").contains("number is 0"));
        assert!(refused("\"index\":0", "\"index\":16").contains("0 to 15"));
        assert!(refused("\"stage\":\"moving\"", "\"stage\":\"new\"").contains("unknown variant"));
        assert!(refused("\"plain\"", "\"none\"").contains("unknown variant"));
        let empty = "{\"own\":{\"id\":\"3d813cbb-47fb-32ba-91df-831e1593ac29\",\"certificate\":\"\",\"key\":\"\"}}";
        assert!(refused("\"plain\"", empty).contains("the cluster's authority"));
        assert!(refused("a5a5\"", "a5\"").contains("64 hex digits"));
        assert!(refused("a5a5\"", "a5zz\"").contains("64 hex digits"));
        assert!(refused("[\"http://192.0.2.1:2379\"]", "[]").contains("0 endpoints"));
        assert!(refused("[\"http://192.0.2.1:2379\"]", "[\"192.0.2.1\"]").contains("no endpoint"));
        assert!(refused("node-1", "a=b").contains("member of the store"));
        assert!(refused("\"role\"", "\"rolle\"").contains("rolle"));
        let member = refused("\"stage\":\"moving\"", "\"stage\":\"member\"}");
        assert!(member.contains("damaged"), "{member}");
        let without = GOLDEN.replace("moving", "member").replace("\"index\":0,", "\"index\":null,");
        assert!(Identity::parse(without.as_bytes()).is_err(), "a member has an index");
        for bytes in [&b""[..], b"{}", b"null", b"\xff"] {
            assert!(Identity::parse(bytes).is_err());
        }
    }

    #[test]
    fn a_file_is_written_whole_and_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        assert_eq!(Identity::read(&path).unwrap(), None);
        // As a crash may have left it.
        fs::write(dir.path().join("cluster.json.new"), "half").unwrap();
        identity().write(&path).unwrap();
        let member = Identity { stage: Stage::Member, ..identity() };
        member.write(&path).unwrap();
        assert_eq!(Identity::read(&path).unwrap(), Some(member));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "{").unwrap();
        let refused = Identity::read(&path).unwrap_err().to_string();
        assert!(refused.contains("cluster.json: it is damaged"), "{refused}");
        Identity::remove(&path).unwrap();
        Identity::remove(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
