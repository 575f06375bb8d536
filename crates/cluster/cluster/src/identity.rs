//! A node's identity: whether it is a member of a cluster, or is joining or leaving one. Stored in
//! `cluster.json` in the node's data directory (`docs/format/cluster.md`); a node without that file
//! is standalone.

mod secret;

use std::io;
use std::path::{Path, PathBuf};

use http::Uri;
use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::certificate_authority::CertificateAuthority;
use crate::record_file::{self, ReadError};

pub use secret::ClusterSecret;

/// Format of the file that this version reads and writes.
pub const IDENTITY_FORMAT: u64 = 4;

/// The name in the file's checksum.
const CHECKSUM_NAME: &str = "cluster.json";

/// Longest file accepted, in bytes.
const MAX_FILE_LEN: u64 = 64 << 10;

/// Most store endpoints in a file or a token.
pub const MAX_ENDPOINTS: usize = 64;

/// Longest URL, in bytes.
const MAX_URL_LEN: usize = 512;

/// Most nodes of a cluster.
pub const MAX_NODES: usize = 16;

/// A node's stage of membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MembershipStage {
    /// The first node of a new cluster; it copies its records there.
    #[serde(rename = "moving")]
    Creating,
    /// Joining; not a member yet.
    Joining,
    /// A member of the cluster.
    Member,
    /// Leaving the cluster.
    Leaving,
}

/// A node's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Stores replicas of volumes, and serves them.
    Data,
    /// Runs a store member, and stores no data.
    Witness,
}

/// Numbers a node's ports and controllers, 0 to 15. Free again when the node has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct NodeIndex(u8);

impl NodeIndex {
    /// All indexes, lowest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).take(MAX_NODES).map(Self)
    }

    /// `number` as an index, if it is in range.
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

/// A store member that a node runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalStoreMember {
    /// Its name, unique among the members.
    pub name: String,
    /// Where the other members reach it.
    pub peer_url: String,
    /// Where clients reach it.
    pub client_url: String,
}

/// What protects connections between a cluster's nodes and to its store (RFD 0038, 2.2); the same
/// at all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportSecurity {
    /// Certificates that each node signs with the cluster's own authority.
    #[serde(rename = "own")]
    ClusterAuthority(CertificateAuthority),
    /// Certificates that an administrator has made.
    #[serde(rename = "given")]
    AdministratorCertificates,
    /// No protection: plain text.
    #[serde(rename = "plain")]
    PlainText,
}

impl TransportSecurity {
    /// The scheme of the URLs of the store's members.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::ClusterAuthority(_) | Self::AdministratorCertificates => "https",
            Self::PlainText => "http",
        }
    }

    /// Checks that the value from an identity or a token is usable.
    pub(crate) fn validate(&self) -> Result<(), String> {
        match self {
            Self::ClusterAuthority(authority) => authority.validate().map_err(|e| e.to_string()),
            Self::AdministratorCertificates | Self::PlainText => Ok(()),
        }
    }
}

/// By what the nodes of a cluster authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterCredentials {
    /// The shared secret of the cluster's nodes.
    pub secret: ClusterSecret,
    /// What protects their connections.
    #[serde(rename = "protection")]
    pub transport_security: TransportSecurity,
}

/// A node's step in a credential rotation ([`crate::credential_rotation`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotationStep {
    /// It has the new credentials, presents the old ones, and accepts both.
    #[serde(rename = "has")]
    Received,
    /// It presents the new ones, and accepts both.
    #[serde(rename = "uses")]
    Active,
    /// It has dropped the old ones.
    Done,
}

/// A node's state in a credential rotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalRotation {
    /// The rotation.
    pub id: Uuid,
    /// The node's step.
    pub step: RotationStep,
    /// The credentials it accepts beside its own: first the new ones, then the old ones, finally
    /// none.
    #[serde(deserialize_with = "required_option")]
    #[serde(rename = "other")]
    pub other_credentials: Option<ClusterCredentials>,
}

impl LocalRotation {
    fn validate(&self) -> Result<(), String> {
        if (self.step == RotationStep::Done) != self.other_credentials.is_none() {
            return Err("the other credentials and the step of the rotation do not match".into());
        }
        self.other_credentials.as_ref().map_or(Ok(()), |other| other.transport_security.validate())
    }
}

/// A node's identity in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIdentity {
    /// Its stage of membership.
    pub stage: MembershipStage,
    /// The cluster.
    pub cluster: Uuid,
    /// Its number, never 0.
    pub node: NodeId,
    /// Its index; every full member has one.
    pub index: Option<NodeIndex>,
    /// Its role.
    pub role: Role,
    /// The shared secret of the cluster's nodes.
    pub secret: ClusterSecret,
    /// What protects its connections.
    pub transport_security: TransportSecurity,
    /// The credential rotation in progress.
    pub rotation: Option<LocalRotation>,
    /// Client URLs of the store's members, at least one.
    pub endpoints: Vec<String>,
    /// The store member that it runs.
    pub member: Option<LocalStoreMember>,
}

/// The file's layout.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdentityFile {
    format: u64,
    stage: MembershipStage,
    cluster: Uuid,
    node: u16,
    #[serde(deserialize_with = "required_option")]
    index: Option<NodeIndex>,
    role: Role,
    secret: ClusterSecret,
    protection: TransportSecurity,
    #[serde(deserialize_with = "required_option")]
    rotation: Option<LocalRotation>,
    endpoints: Vec<String>,
    #[serde(deserialize_with = "required_option")]
    member: Option<LocalStoreMember>,
}

/// Deserializes a mandatory field that may be `null`.
fn required_option<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(from)
}

/// The format field, read before the rest of the file.
#[derive(Deserialize)]
struct FormatHeader {
    format: u64,
}

/// What is wrong with a file's contents.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityFormatError {
    /// Another version of the program wrote it.
    #[error(
        "it has format {found}, this version supports format {IDENTITY_FORMAT}; run the version \
         that wrote it"
    )]
    UnsupportedFormat {
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

/// Why a node's identity file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Its contents are invalid.
    #[error("{}: {why}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: IdentityFormatError,
    },
    /// A system call failed.
    #[error("{}: {why}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
}

/// Whether `url` is a valid member URL: `http://HOST:PORT` or `https://…`.
#[must_use]
pub fn is_member_url(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
    let scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.host().is_some_and(|host| !host.is_empty()) && uri.port_u16().is_some();
    url.len() <= MAX_URL_LEN && scheme && host && plain
}

/// Checks that `urls` are valid endpoints of a store.
pub(crate) fn check_endpoints(urls: &[String]) -> Result<(), String> {
    if urls.is_empty() || urls.len() > MAX_ENDPOINTS {
        return Err(format!("it has {} endpoints, not 1 to {MAX_ENDPOINTS}", urls.len()));
    }
    match urls.iter().find(|url| !is_member_url(url)) {
        Some(bad) => Err(format!("{bad:?} is not an endpoint")),
        None => Ok(()),
    }
}

impl ClusterIdentity {
    /// Parses the contents of a file.
    ///
    /// # Errors
    /// [`IdentityFormatError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, IdentityFormatError> {
        let damaged = |why: String| IdentityFormatError::Damaged { why };
        let head: FormatHeader =
            serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        if head.format != IDENTITY_FORMAT {
            return Err(IdentityFormatError::UnsupportedFormat { found: head.format });
        }
        let written = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        let IdentityFile {
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
        if stage == MembershipStage::Member && index.is_none() {
            return Err(damaged("a member has an index".into()));
        }
        protection.validate().map_err(damaged)?;
        rotation.as_ref().map_or(Ok(()), LocalRotation::validate).map_err(damaged)?;
        check_endpoints(&endpoints).map_err(damaged)?;
        if let Some(LocalStoreMember { name, peer_url, client_url }) = &member {
            let named = (1..=MAX_URL_LEN).contains(&name.len()) && !name.contains([',', '=']);
            if !named || !is_member_url(peer_url) || !is_member_url(client_url) {
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
            transport_security: protection,
            rotation,
            endpoints,
            member,
        })
    }

    /// The credentials it presents now.
    #[must_use]
    pub fn credentials(&self) -> ClusterCredentials {
        ClusterCredentials {
            secret: self.secret.clone(),
            transport_security: self.transport_security.clone(),
        }
    }

    /// The further credentials it accepts.
    #[must_use]
    pub fn also_accepted_credentials(&self) -> Option<&ClusterCredentials> {
        self.rotation.as_ref().and_then(|rotation| rotation.other_credentials.as_ref())
    }

    /// The new credentials and the old secret, if it has both.
    #[must_use]
    pub fn new_credentials_and_old_secret(&self) -> Option<(ClusterCredentials, ClusterSecret)> {
        let LocalRotation { step, other_credentials: other, .. } = self.rotation.as_ref()?;
        let other = other.clone()?;
        Some(match step {
            RotationStep::Received => (other, self.secret.clone()),
            RotationStep::Active | RotationStep::Done => (self.credentials(), other.secret),
        })
    }

    /// Stores new credentials, received in the rotation `id`.
    pub fn receive_new_credentials(&mut self, id: Uuid, new: ClusterCredentials) {
        self.rotation =
            Some(LocalRotation { id, step: RotationStep::Received, other_credentials: Some(new) });
    }

    /// Presents the new credentials from now on, if it has them.
    pub fn activate_new_credentials(&mut self) {
        let old = self.credentials();
        let Some(rotation) =
            self.rotation.as_mut().filter(|own| own.step == RotationStep::Received)
        else {
            return;
        };
        let Some(new) = rotation.other_credentials.replace(old) else { return };
        rotation.step = RotationStep::Active;
        (self.secret, self.transport_security) = (new.secret, new.transport_security);
    }

    /// Drops the old credentials, if it presents the new ones.
    pub fn drop_old_credentials(&mut self) {
        if let Some(rotation) =
            self.rotation.as_mut().filter(|own| own.step == RotationStep::Active)
        {
            (rotation.step, rotation.other_credentials) = (RotationStep::Done, None);
        }
    }

    /// Encodes the identity; [`Self::parse`] decodes it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self {
            stage,
            cluster,
            node,
            index,
            role,
            secret,
            transport_security: protection,
            rotation,
            endpoints,
            member,
        } = self.clone();
        let written = IdentityFile {
            format: IDENTITY_FORMAT,
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

    /// Reads the identity file at `path`; `None` if there is no file.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn read(path: &Path) -> Result<Option<Self>, IdentityError> {
        let bad = |why| IdentityError::Invalid { path: path.to_owned(), why };
        match record_file::read(path, CHECKSUM_NAME, MAX_FILE_LEN) {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => Self::parse(&bytes).map(Some).map_err(bad),
            Err(ReadError::Damaged(why)) => Err(bad(IdentityFormatError::Damaged { why })),
            Err(ReadError::Io(why)) => Err(IdentityError::Io { path: path.to_owned(), why }),
        }
    }

    /// Writes the file at `path` atomically, durably, and readable by its owner only: readers see
    /// the old or the new file, also after a power cut.
    ///
    /// # Errors
    /// [`IdentityError::Io`]; the file is then either the old or the new one.
    pub fn write(&self, path: &Path) -> Result<(), IdentityError> {
        let written = record_file::write(path, CHECKSUM_NAME, &self.to_bytes());
        written.map_err(|why| IdentityError::Io { path: path.to_owned(), why })
    }

    /// Removes the file at `path`, durably: the node is standalone. The file may be gone already.
    ///
    /// # Errors
    /// [`IdentityError::Io`].
    pub fn remove(path: &Path) -> Result<(), IdentityError> {
        let refused = |why| IdentityError::Io { path: path.to_owned(), why };
        record_file::remove(path).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn identity() -> ClusterIdentity {
        ClusterIdentity {
            stage: MembershipStage::Creating,
            cluster: Uuid::from_u128(0x3d81_3cbb_47fb_32ba_91df_831e_1593_ac29),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret: ClusterSecret::new([0xa5; 32]),
            transport_security: TransportSecurity::PlainText,
            rotation: None,
            endpoints: vec!["http://192.0.2.1:2379".into()],
            member: Some(LocalStoreMember {
                name: "node-1".into(),
                peer_url: "http://192.0.2.1:2380".into(),
                client_url: "http://192.0.2.1:2379".into(),
            }),
        }
    }

    /// Later versions must be able to read what this version writes.
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
        assert_eq!(ClusterIdentity::parse(GOLDEN.as_bytes()), Ok(identity()));
        assert_eq!(String::from_utf8(identity().to_bytes()).unwrap(), GOLDEN);
        assert!(!format!("{:?}", identity()).contains("a5"), "secrets stay out of logs");
    }

    #[test]
    fn an_authority_is_kept_and_stays_out_of_logs() {
        let protection = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
        let own = ClusterIdentity { transport_security: protection, ..identity() };
        assert_eq!(ClusterIdentity::parse(&own.to_bytes()), Ok(own.clone()));
        assert!(!format!("{own:?}").contains("PRIVATE"));
    }

    #[test]
    fn new_credentials_take_the_place_of_the_old_ones_in_three_steps() {
        let new = |byte| {
            let secret = ClusterSecret::new([byte; 32]);
            ClusterCredentials {
                secret,
                transport_security: TransportSecurity::ClusterAuthority(
                    CertificateAuthority::new().unwrap(),
                ),
            }
        };
        let (old, new, id) = (new(1), new(2), Uuid::from_u128(9));
        let ClusterCredentials { secret, transport_security: protection } = old.clone();
        let mut node = ClusterIdentity { secret, transport_security: protection, ..identity() };
        // A step that is not due changes nothing.
        node.activate_new_credentials();
        node.drop_old_credentials();
        assert_eq!((node.credentials(), node.rotation.clone()), (old.clone(), None));
        let reads_back = |node: &ClusterIdentity| {
            assert_eq!(ClusterIdentity::parse(&node.to_bytes()).as_ref(), Ok(node));
            assert!(!format!("{node:?}").contains("PRIVATE"));
        };
        node.receive_new_credentials(id, new.clone());
        reads_back(&node);
        assert_eq!(
            (node.credentials(), node.also_accepted_credentials()),
            (old.clone(), Some(&new))
        );
        assert_eq!(node.new_credentials_and_old_secret(), Some((new.clone(), old.secret.clone())));
        node.activate_new_credentials();
        node.activate_new_credentials();
        reads_back(&node);
        assert_eq!(
            (node.credentials(), node.also_accepted_credentials()),
            (new.clone(), Some(&old))
        );
        assert_eq!(node.new_credentials_and_old_secret(), Some((new.clone(), old.secret)));
        node.drop_old_credentials();
        reads_back(&node);
        assert_eq!((node.credentials(), node.also_accepted_credentials()), (new, None));
        assert_eq!(node.new_credentials_and_old_secret(), None);
        let text = String::from_utf8(node.to_bytes()).unwrap();
        let odd = text.replace("\"step\":\"done\"", "\"step\":\"has\"");
        assert!(odd != text && ClusterIdentity::parse(odd.as_bytes()).is_err());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let refused = |from: &str, to: &str| {
            assert!(GOLDEN.contains(from), "{from}");
            ClusterIdentity::parse(GOLDEN.replace(from, to).as_bytes()).unwrap_err().to_string()
        };
        assert!(refused("\"format\":4", "\"format\":5,\"new\":[]").contains("has format 5"));
        assert!(refused("\"format\":4", "\"format\":3").contains("has format 3"));
        assert!(refused("\"node\":1", "\"node\":0").contains("number is 0"));
        assert!(refused("\"index\":0", "\"index\":16").contains("0 to 15"));
        assert!(refused("\"stage\":\"moving\"", "\"stage\":\"new\"").contains("unknown variant"));
        assert!(refused("\"plain\"", "\"none\"").contains("unknown variant"));
        let empty = "{\"own\":{\"id\":\"3d813cbb-47fb-32ba-91df-831e1593ac29\",\"certificate\":\"\",\"key\":\"\"}}";
        assert!(refused("\"plain\"", empty).contains("certificate authority"));
        assert!(refused("a5a5\"", "a5\"").contains("64 hex digits"));
        assert!(refused("a5a5\"", "a5zz\"").contains("64 hex digits"));
        assert!(refused("[\"http://192.0.2.1:2379\"]", "[]").contains("0 endpoints"));
        assert!(
            refused("[\"http://192.0.2.1:2379\"]", "[\"192.0.2.1\"]").contains("not an endpoint")
        );
        assert!(refused("node-1", "a=b").contains("member of the store"));
        assert!(refused("\"role\"", "\"rolle\"").contains("rolle"));
        let member = refused("\"stage\":\"moving\"", "\"stage\":\"member\"}");
        assert!(member.contains("damaged"), "{member}");
        let without = GOLDEN.replace("moving", "member").replace("\"index\":0,", "\"index\":null,");
        assert!(ClusterIdentity::parse(without.as_bytes()).is_err(), "a member has an index");
        for bytes in [&b""[..], b"{}", b"null", b"\xff"] {
            assert!(ClusterIdentity::parse(bytes).is_err());
        }
    }

    #[test]
    fn a_file_is_written_whole_and_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        assert_eq!(ClusterIdentity::read(&path).unwrap(), None);
        // As a crash may have left it.
        fs::write(dir.path().join("cluster.json.new"), "half").unwrap();
        identity().write(&path).unwrap();
        let member = ClusterIdentity { stage: MembershipStage::Member, ..identity() };
        member.write(&path).unwrap();
        assert_eq!(ClusterIdentity::read(&path).unwrap(), Some(member));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "{").unwrap();
        let refused = ClusterIdentity::read(&path).unwrap_err().to_string();
        assert!(refused.contains("cluster.json: it is damaged"), "{refused}");
        ClusterIdentity::remove(&path).unwrap();
        ClusterIdentity::remove(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
