//! The keys that seal the secrets in the store (RFD 0016). A standalone node keeps them in a file
//! of its data directory, a cluster in its store, wrapped by the cluster's secret.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cluster::identity::ClusterIdentity;
use cluster::secrets::key_file::{self, KeyFileError};
use cluster::secrets::{
    self, Keyring, KeyringError, RandomnessUnavailable, SealingKey, SecretUnsealError,
};
use tokio::sync::watch;

use cluster::store::{Change, Entry, MetadataStore, Precondition, StoreError};
use config::data_dir;
use records::record::VolumeRecord;
use status::node_facts::UnreadableSecret;

/// Why the keys are not available.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// Error of the key file.
    #[error(transparent)]
    File(#[from] KeyFileError),
    /// Error of the keyring in the store.
    #[error(transparent)]
    Ring(#[from] KeyringError),
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No randomness for a new key.
    #[error(transparent)]
    NoRandom(#[from] RandomnessUnavailable),
    /// The blocking task was cancelled.
    #[error("the task was cancelled")]
    Cancelled,
}

/// Where the keys are stored.
enum KeyLocation {
    File(PathBuf),
    Store(watch::Receiver<ClusterIdentity>),
}

/// The keys of a node, as last read.
pub struct SecretKeys {
    location: KeyLocation,
    cached: Mutex<Keyring>,
    /// Why the last read failed, if it did.
    last_error: Mutex<Option<String>>,
    /// Held while the first key is created.
    creation_lock: tokio::sync::Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn run_blocking<T, F>(work: F) -> Result<T, SecretsError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, KeyFileError> + Send + 'static,
{
    let result = tokio::task::spawn_blocking(work).await;
    Ok(result.map_err(|_| SecretsError::Cancelled)??)
}

impl SecretKeys {
    fn with_location(location: KeyLocation) -> Self {
        Self {
            location,
            cached: Mutex::default(),
            last_error: Mutex::default(),
            creation_lock: Default::default(),
        }
    }

    /// The keys of a standalone node, or of a member of a cluster.
    pub fn new(directory: &Path, identity: Option<watch::Receiver<ClusterIdentity>>) -> Self {
        Self::with_location(match identity {
            None => KeyLocation::File(data_dir::secrets_path(directory)),
            Some(identity) => KeyLocation::Store(identity),
        })
    }

    /// The keys as last read.
    pub fn cached(&self) -> Keyring {
        lock(&self.cached).clone()
    }

    /// Where the keys are, for people.
    fn location_text(&self) -> String {
        match &self.location {
            KeyLocation::File(path) => path.display().to_string(),
            KeyLocation::Store(_) => {
                format!("the key `{}` of the cluster's store", secrets::KEYRING_KEY)
            }
        }
    }

    /// Reads the keys.
    pub async fn read(&self, meta: &dyn MetadataStore) -> Result<Keyring, SecretsError> {
        let read = self.read_location(meta).await;
        let now = read.as_ref().err().map(ToString::to_string);
        let before = std::mem::replace(&mut *lock(&self.last_error), now.clone());
        if let Some(error) = now.filter(|now| before.as_ref() != Some(now)) {
            tracing::error!(error, "cannot read the keys that seal secrets");
        }
        let keyring = read?;
        lock(&self.cached).clone_from(&keyring);
        Ok(keyring)
    }

    async fn read_location(&self, meta: &dyn MetadataStore) -> Result<Keyring, SecretsError> {
        match &self.location {
            KeyLocation::File(path) => {
                let path = path.clone();
                run_blocking(move || key_file::read(&path)).await
            }
            KeyLocation::Store(identity) => match meta.get(secrets::KEYRING_KEY).await? {
                Some(entry) => Ok(unwrap_ring(entry.contents()?, &identity.borrow())?),
                None => Ok(Keyring::default()),
            },
        }
    }

    /// The keys, including one that seals: the first key is created when it is first needed.
    pub async fn sealing(&self, meta: &dyn MetadataStore) -> Result<Keyring, SecretsError> {
        let _one = self.creation_lock.lock().await;
        let keyring = self.read(meta).await?;
        if !keyring.is_empty() {
            return Ok(keyring);
        }
        let keyring = Keyring::new(vec![SealingKey::random()?]).unwrap_or_default();
        match &self.location {
            KeyLocation::File(path) => {
                let (path, keyring) = (path.clone(), keyring);
                run_blocking(move || key_file::create(&path, &keyring)).await?;
            }
            KeyLocation::Store(identity) => {
                let ClusterIdentity { cluster, secret, .. } = identity.borrow().clone();
                let value = Some(secrets::wrap_keyring(&keyring, cluster, &secret)?);
                let change = Change {
                    key: secrets::KEYRING_KEY.into(),
                    precondition: Precondition::Absent,
                    value,
                };
                match meta.commit(vec![change]).await {
                    // Another node was faster, or the outcome is unknown: read the keys again.
                    Ok(_) | Err(StoreError::Conflict { .. } | StoreError::Indeterminate { .. }) => {
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let keyring = self.read(meta).await?;
        if keyring.is_empty() { Err(SecretsError::Cancelled) } else { Ok(keyring) }
    }

    /// The unreadable secrets of a volume, with the reasons.
    pub fn unreadable_secrets(&self, record: &VolumeRecord) -> Vec<UnreadableSecret> {
        let found = record.unreadable_secrets(&self.cached()).into_iter();
        let unreadable = |(method, why)| {
            let (volume, why) = (record.name.clone(), self.open_error_text(why));
            UnreadableSecret { volume, method, why }
        };
        found.map(unreadable).collect()
    }

    /// The error as text.
    fn open_error_text(&self, why: SecretUnsealError) -> String {
        let mut text = why.to_string();
        if let SecretUnsealError::UnknownKey(_) = why {
            text.push_str(&format!(", which is not in {}", self.location_text()));
        }
        if let Some(error) = &*lock(&self.last_error) {
            text.push_str(&format!(" ({error})"));
        }
        text
    }
}

/// Unwraps the keyring in the store, by the cluster's secret or the one that replaces it.
fn unwrap_ring(wrapped: &[u8], identity: &ClusterIdentity) -> Result<Keyring, KeyringError> {
    let ClusterIdentity { cluster, secret, .. } = identity;
    let opened = secrets::unwrap_keyring(wrapped, *cluster, secret);
    match identity.also_accepted_credentials() {
        Some(other) if opened.is_err() => {
            secrets::unwrap_keyring(wrapped, *cluster, &other.secret).or(opened)
        }
        _ => opened,
    }
}

/// Moves the keys of a standalone node into the store of the cluster that it creates, unless they
/// are there.
pub(crate) async fn move_keys_to_cluster(
    from: &Path,
    to: &dyn MetadataStore,
    identity: &ClusterIdentity,
) -> Result<(), SecretsError> {
    let path = data_dir::secrets_path(from);
    let keyring = run_blocking(move || key_file::read(&path)).await?;
    if keyring.is_empty() {
        return Ok(());
    }
    let ClusterIdentity { cluster, secret, .. } = identity;
    let value = Some(secrets::wrap_keyring(&keyring, *cluster, secret)?);
    let change =
        Change { key: secrets::KEYRING_KEY.into(), precondition: Precondition::Absent, value };
    match to.commit(vec![change]).await {
        Ok(_) => Ok(()),
        Err(StoreError::Conflict { .. }) => {
            let wrapped = to.get(secrets::KEYRING_KEY).await?;
            let wrapped = wrapped.as_ref().map(Entry::contents).transpose()?.unwrap_or_default();
            // An earlier attempt of this node did it: the cluster has no other node yet.
            if secrets::unwrap_keyring(wrapped, *cluster, secret)? == keyring {
                Ok(())
            } else {
                Err(KeyringError::AuthenticationFailed.into())
            }
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use cluster::identity::{ClusterSecret, MembershipStage, NodeIndex, Role, TransportSecurity};
    use cluster::store::memory::{CallDelivery, MemoryStore};
    use peer::NodeId;
    use records::record::{
        HostSecretContext, StoredChap, StoredDhchap, StoredTls, VolumeAuthMethod,
    };
    use uuid::Uuid;

    use super::*;
    use records::samples::{HOST, KEYS, chap, dhchap, record, tls};

    fn store(model: &MemoryStore) -> impl MetadataStore + use<> {
        model.client(std::time::Duration::from_secs(1), Box::new(|_| CallDelivery::IMMEDIATE))
    }

    fn identity(secret: u8) -> ClusterIdentity {
        ClusterIdentity {
            stage: MembershipStage::Member,
            cluster: Uuid::from_u128(7),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret: ClusterSecret::new([secret; 32]),
            transport_security: TransportSecurity::PlainText,
            rotation: None,
            endpoints: vec!["http://192.0.2.1:2379".into()],
            member: None,
        }
    }

    fn member(secret: u8) -> SecretKeys {
        SecretKeys::new(Path::new("/nowhere"), Some(watch::channel(identity(secret)).1))
    }

    #[tokio::test]
    async fn nodes_of_a_cluster_seal_by_one_key() {
        let model = MemoryStore::default();
        let meta = store(&model);
        let (a, b) = (member(1), member(1));
        assert_eq!(a.read(&meta).await.unwrap(), Keyring::default());
        let both = tokio::join!(a.sealing(&meta), b.sealing(&meta));
        let ring = both.0.unwrap();
        assert_eq!(ring, both.1.unwrap(), "who comes second takes what is there");
        let held = meta.get(secrets::KEYRING_KEY).await.unwrap().unwrap().value;
        assert!(
            secrets::unwrap_keyring(&held, Uuid::from_u128(7), &ClusterSecret::new([1; 32]))
                .is_ok()
        );
        assert_eq!(member(1).read(&meta).await.unwrap(), ring, "and so does who joins");
        let stranger = member(2).read(&meta).await.unwrap_err().to_string();
        assert!(stranger.contains("key `secrets` of the store"), "{stranger}");
        let stranger = member(2);
        assert!(stranger.sealing(&meta).await.is_err(), "it puts no other key in its place");
        assert_eq!(meta.get(secrets::KEYRING_KEY).await.unwrap().unwrap().value, held);
    }

    #[tokio::test]
    async fn the_first_node_takes_its_keys_along_once() {
        let (model, dir) = (MemoryStore::default(), tempfile::tempdir().unwrap());
        let meta = store(&model);
        let alone = SecretKeys::new(dir.path(), None);
        move_keys_to_cluster(dir.path(), &meta, &identity(1)).await.unwrap();
        assert_eq!(meta.get(secrets::KEYRING_KEY).await.unwrap(), None, "there is nothing to take");
        let ring = alone.sealing(&meta).await.unwrap();
        let sealed = StoredChap::seal(&chap(), record("a").id, &ring).unwrap();
        move_keys_to_cluster(dir.path(), &meta, &identity(1)).await.unwrap();
        // As after a crash.
        move_keys_to_cluster(dir.path(), &meta, &identity(1)).await.unwrap();
        let joined = member(1);
        let ring = joined.read(&meta).await.unwrap();
        assert_eq!(sealed.open(record("a").id, &ring), Ok(chap()), "records go along as they are");
        std::fs::write(data_dir::secrets_path(dir.path()), "x").unwrap();
        let damaged =
            move_keys_to_cluster(dir.path(), &meta, &identity(1)).await.unwrap_err().to_string();
        assert!(damaged.contains("secrets.key: line 1"), "{damaged}");
    }

    #[tokio::test]
    async fn two_changes_at_once_make_one_key() {
        let (model, dir) = (MemoryStore::default(), tempfile::tempdir().unwrap());
        let meta = store(&model);
        let alone = SecretKeys::new(dir.path(), None);
        let both = tokio::join!(alone.sealing(&meta), alone.sealing(&meta));
        assert_eq!(both.0.unwrap(), both.1.unwrap());
        let mut locked = record("a");
        let other = Keyring::new(vec![SealingKey::new([9; 32])]).unwrap();
        locked.chap = Some(StoredChap::seal(&chap(), locked.id, &other).unwrap());
        let of = HostSecretContext { volume: locked.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &other).unwrap();
        locked.dhchap_by_host.insert(HOST.into(), sealed);
        let sealed = StoredTls::seal(&tls(KEYS[0], true), of, &other).unwrap();
        locked.tls_by_host.insert(HOST.into(), sealed);
        let found = alone.unreadable_secrets(&locked);
        let methods: Vec<_> = found.iter().map(|locked| locked.method).collect();
        assert_eq!(
            methods,
            [VolumeAuthMethod::Chap, VolumeAuthMethod::Dhchap, VolumeAuthMethod::Tls]
        );
        for UnreadableSecret { why, .. } in found {
            assert!(why.contains("secrets.key") && why.contains("sealed by key"), "{why}");
        }
    }
}
