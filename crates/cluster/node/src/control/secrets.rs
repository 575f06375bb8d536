//! The keys of the secrets in the store (RFD 0016): of a node by itself in a file of its data directory, of a cluster in its
//! store, wrapped by what only its nodes know.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ::cluster::identity::Identity;
use ::cluster::vault::file::{self, FileError};
use ::cluster::vault::{self, BadRing, CannotOpen, Key, NoRandom, Ring};
use api::{ApiError, Code, VolumeName};
use tokio::sync::watch;
use uuid::Uuid;

use super::{Control, RETRY};
use crate::data_dir;
use crate::meta::{Change, Entry, Expect, Meta, MetaError};
use crate::record::{
    Method, Of, OfHost, Stored, StoredChap, StoredDhchap, StoredTls, VolumeRecord,
};

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The file with them.
    #[error(transparent)]
    File(#[from] FileError),
    /// What the store holds.
    #[error(transparent)]
    Ring(#[from] BadRing),
    /// The store.
    #[error(transparent)]
    Store(#[from] MetaError),
    /// None can be made.
    #[error(transparent)]
    Random(#[from] NoRandom),
    /// The work was not done.
    #[error("the work was given up")]
    GivenUp,
}

/// Secrets of a volume that cannot be read.
#[derive(Clone, Debug)]
pub struct Locked {
    /// The volume.
    pub volume: VolumeName,
    /// What they prove by.
    pub method: Method,
    /// Why not.
    pub why: String,
}

/// Where keys are kept.
enum Home {
    File(PathBuf),
    Store(watch::Receiver<Identity>),
}

/// The keys of a node, as last read.
pub(super) struct Vault {
    home: Home,
    known: Mutex<Ring>,
    /// Why they could not be read, if they could not.
    trouble: Mutex<Option<String>>,
    /// Held while the first key is made.
    making: tokio::sync::Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn on_files<T, F>(work: F) -> Result<T, SecretsError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, FileError> + Send + 'static,
{
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|_| SecretsError::GivenUp)??)
}

impl Vault {
    fn at(home: Home) -> Self {
        Self {
            home,
            known: Mutex::default(),
            trouble: Mutex::default(),
            making: Default::default(),
        }
    }

    /// That of a node by itself, or of one of a cluster.
    pub(super) fn new(directory: &Path, identity: Option<watch::Receiver<Identity>>) -> Self {
        Self::at(match identity {
            None => Home::File(data_dir::secrets(directory)),
            Some(identity) => Home::Store(identity),
        })
    }

    /// The keys as last read.
    pub(super) fn known(&self) -> Ring {
        lock(&self.known).clone()
    }

    /// Where they are, for people.
    fn place(&self) -> String {
        match &self.home {
            Home::File(path) => path.display().to_string(),
            Home::Store(_) => format!("the key `{}` of the cluster's store", vault::KEY),
        }
    }

    /// Reads the keys.
    pub(super) async fn read(&self, meta: &dyn Meta) -> Result<Ring, SecretsError> {
        let read = self.read_home(meta).await;
        let now = read.as_ref().err().map(ToString::to_string);
        let before = std::mem::replace(&mut *lock(&self.trouble), now.clone());
        if let Some(error) = now.filter(|now| before.as_ref() != Some(now)) {
            tracing::error!(error, "the keys of secrets cannot be read");
        }
        let ring = read?;
        lock(&self.known).clone_from(&ring);
        Ok(ring)
    }

    async fn read_home(&self, meta: &dyn Meta) -> Result<Ring, SecretsError> {
        match &self.home {
            Home::File(path) => {
                let path = path.clone();
                on_files(move || file::read(&path)).await
            }
            Home::Store(identity) => match meta.get(vault::KEY).await? {
                Some(entry) => Ok(unwrap(entry.contents()?, &identity.borrow())?),
                None => Ok(Ring::default()),
            },
        }
    }

    /// The keys, with one to seal by: the first is made when it is first needed.
    pub(super) async fn sealing(&self, meta: &dyn Meta) -> Result<Ring, SecretsError> {
        let _one = self.making.lock().await;
        let ring = self.read(meta).await?;
        if !ring.is_empty() {
            return Ok(ring);
        }
        let ring = Ring::new(vec![Key::random()?]).unwrap_or_default();
        match &self.home {
            Home::File(path) => {
                let (path, ring) = (path.clone(), ring);
                on_files(move || file::create(&path, &ring)).await?;
            }
            Home::Store(identity) => {
                let Identity { cluster, secret, .. } = identity.borrow().clone();
                let value = Some(vault::wrap(&ring, cluster, &secret)?);
                let change = Change { key: vault::KEY.into(), expect: Expect::Absent, value };
                match meta.commit(vec![change]).await {
                    // Another node was faster, or nobody knows: what is there now counts.
                    Ok(_) | Err(MetaError::Changed { .. } | MetaError::Unknown { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let ring = self.read(meta).await?;
        if ring.is_empty() { Err(SecretsError::GivenUp) } else { Ok(ring) }
    }

    /// What secrets of a volume cannot be read, and why not.
    fn obstacles(&self, record: &VolumeRecord) -> Vec<Locked> {
        let found = record.cannot_open(&self.known()).into_iter();
        let locked = |(method, why)| {
            let (volume, why) = (record.name.clone(), self.obstacle(why));
            Locked { volume, method, why }
        };
        found.map(locked).collect()
    }

    /// An obstacle, for people.
    fn obstacle(&self, why: CannotOpen) -> String {
        let mut text = why.to_string();
        if let CannotOpen::NoKey(_) = why {
            text.push_str(&format!(", which is not in {}", self.place()));
        }
        if let Some(trouble) = &*lock(&self.trouble) {
            text.push_str(&format!(" ({trouble})"));
        }
        text
    }
}

/// The ring that the store holds, wrapped by the cluster's secret or by the one that takes its place.
fn unwrap(held: &[u8], identity: &Identity) -> Result<Ring, BadRing> {
    let Identity { cluster, secret, .. } = identity;
    let opened = vault::unwrap(held, *cluster, secret);
    match identity.other_credentials() {
        Some(other) if opened.is_err() => vault::unwrap(held, *cluster, &other.secret).or(opened),
        _ => opened,
    }
}

/// Puts the keys of a node by itself into the store of the cluster that it begins, unless they are there.
pub(crate) async fn hand_over(
    from: &Path,
    to: &dyn Meta,
    identity: &Identity,
) -> Result<(), SecretsError> {
    let path = data_dir::secrets(from);
    let ring = on_files(move || file::read(&path)).await?;
    if ring.is_empty() {
        return Ok(());
    }
    let Identity { cluster, secret, .. } = identity;
    let value = Some(vault::wrap(&ring, *cluster, secret)?);
    let change = Change { key: vault::KEY.into(), expect: Expect::Absent, value };
    match to.commit(vec![change]).await {
        Ok(_) => Ok(()),
        Err(MetaError::Changed { .. }) => {
            let held = to.get(vault::KEY).await?;
            let held = held.as_ref().map(Entry::contents).transpose()?.unwrap_or_default();
            // Done already, by an earlier attempt of this node: nobody else is in the cluster yet.
            if vault::unwrap(held, *cluster, secret)? == ring {
                Ok(())
            } else {
                Err(BadRing::Wrong.into())
            }
        }
        Err(error) => Err(error.into()),
    }
}

pub(super) fn api_error(error: &SecretsError) -> ApiError {
    match error {
        SecretsError::Store(error) => super::store_error(error),
        error => ApiError::new(Code::Internal, format!("secrets cannot be sealed: {error}")).hint(
            "nothing was changed; the file or key that is named keeps what secrets are sealed by",
        ),
    }
}

/// What goes into a record: as it is there already, if that `is_good`.
fn kept<S: Clone>(
    held: Option<&S>,
    is_good: impl FnOnce(&S) -> bool,
    seal: impl FnOnce() -> Result<S, NoRandom>,
) -> Result<S, ApiError> {
    match held {
        Some(held) if is_good(held) => Ok(held.clone()),
        _ => seal().map_err(|error| api_error(&SecretsError::Random(error))),
    }
}

/// CHAP of a volume as it goes into a record: as it is there already, if it says the same.
pub(super) fn sealed(
    chap: &api::Chap,
    (of, held): (Of<'_>, Option<&StoredChap>),
    ring: &Ring,
) -> Result<StoredChap, ApiError> {
    let is_good =
        |held: &StoredChap| held.is_sealed_by(ring) && held.open(of, ring).as_ref() == Ok(chap);
    kept(held, is_good, || StoredChap::seal(chap, of, ring))
}

/// The same of secrets of a host.
pub(super) fn sealed_of_host(
    dhchap: &api::Dhchap,
    (of, held): (OfHost<'_>, Option<&StoredDhchap>),
    ring: &Ring,
) -> Result<StoredDhchap, ApiError> {
    let is_good =
        |held: &StoredDhchap| held.is_sealed_by(ring) && held.open(of, ring).as_ref() == Ok(dhchap);
    kept(held, is_good, || StoredDhchap::seal(dhchap, of, ring))
}

/// The same of the key of TLS of a host.
pub(super) fn sealed_tls(
    tls: &api::Tls,
    (of, held): (OfHost<'_>, Option<&StoredTls>),
    ring: &Ring,
) -> Result<StoredTls, ApiError> {
    let is_good =
        |held: &StoredTls| held.is_sealed_by(ring) && held.open(of, ring).as_ref() == Ok(tls);
    kept(held, is_good, || StoredTls::seal(tls, of, ring))
}

impl Control {
    /// Keys to seal by.
    pub(super) async fn sealing_keys(&self) -> Result<Ring, ApiError> {
        self.0.vault.sealing(&*self.0.meta).await.map_err(|e| api_error(&e))
    }

    /// Reads the keys again if a record of `records` needs one that is not known.
    pub(super) async fn keys_for<'a>(
        &self,
        records: impl Iterator<Item = &'a VolumeRecord>,
    ) -> Ring {
        let ring = self.0.vault.known();
        if { records }.any(|record| record.lacks_key(&ring)) {
            // What is wrong with them, if anything, is in the log and in the status.
            let _ = self.0.vault.read(&*self.0.meta).await;
        }
        self.0.vault.known()
    }

    /// The secrets that cannot be read, and why not.
    pub(super) async fn locked(&self) -> Vec<Locked> {
        let all = self.0.state.all();
        // A volume may have been created elsewhere by a key that is newer than what is known.
        self.keys_for(all.iter().map(|(stored, _)| &stored.record)).await;
        all.iter().flat_map(|(stored, _)| self.0.vault.obstacles(&stored.record)).collect()
    }

    /// Seals what older versions have left as it is, and what an older key has sealed, for as long as the node serves.
    pub(super) async fn keep_sealed(self) {
        while self.is_serving() {
            if let Err(error) = self.seal_all().await {
                tracing::warn!(%error, "secrets in the store are not sealed yet; trying again");
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn seal_all(&self) -> Result<(), SecretsError> {
        let all = self.0.state.all();
        if all.iter().all(|(s, _)| s.record.methods().next().is_none()) {
            return Ok(());
        }
        let ring = self.0.vault.read(&*self.0.meta).await?;
        // What cannot be read is for status to tell, and no reason to make a key.
        let stale = |(s, _): &(Stored, _)| s.record.wants_sealing(&ring).then_some(s.record.id);
        let stale: Vec<_> = all.iter().filter_map(stale).collect();
        if stale.is_empty() {
            return Ok(());
        }
        let ring = self.0.vault.sealing(&*self.0.meta).await?;
        for id in stale {
            let Ok(_change) = Arc::clone(&self.0.changing).try_read_owned() else { return Ok(()) };
            self.seal_one(id, &ring).await?;
        }
        Ok(())
    }

    async fn seal_one(&self, id: Uuid, ring: &Ring) -> Result<(), SecretsError> {
        let gate = self.0.state.gate(id);
        let _held = gate.lock().await;
        let Some(Stored { mut record, revision }) = self.stored(id).await? else { return Ok(()) };
        let before = record.clone();
        record.seal(ring)?;
        if record == before {
            return Ok(());
        }
        match self.0.meta.commit(record.replace(revision)).await {
            Ok(_) => tracing::info!(volume = %record.name, "its secrets are sealed now"),
            // Another node was faster.
            Err(MetaError::Changed { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.settle_held(id).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::{ClusterSecret, NodeIndex, Protection, Role, Stage};
    use ::cluster::meta::model::{Fate, Model};
    use api::Dhchap;
    use peer::NodeId;

    use super::*;
    use crate::record::tests::{HOST, KEYS, chap, dhchap, record, tls};

    fn store(model: &Model) -> impl Meta + use<> {
        model.client(std::time::Duration::from_secs(1), Box::new(|_| Fate::WELL))
    }

    fn identity(secret: u8) -> Identity {
        Identity {
            stage: Stage::Member,
            cluster: Uuid::from_u128(7),
            node: NodeId(1),
            index: NodeIndex::new(0),
            role: Role::Data,
            secret: ClusterSecret::new([secret; 32]),
            protection: Protection::Plain,
            rotation: None,
            endpoints: vec!["http://192.0.2.1:2379".into()],
            member: None,
        }
    }

    fn member(secret: u8) -> Vault {
        Vault::new(Path::new("/nowhere"), Some(watch::channel(identity(secret)).1))
    }

    #[tokio::test]
    async fn nodes_of_a_cluster_seal_by_one_key() {
        let model = Model::default();
        let meta = store(&model);
        let (a, b) = (member(1), member(1));
        assert_eq!(a.read(&meta).await.unwrap(), Ring::default());
        let both = tokio::join!(a.sealing(&meta), b.sealing(&meta));
        let ring = both.0.unwrap();
        assert_eq!(ring, both.1.unwrap(), "who comes second takes what is there");
        let held = meta.get(vault::KEY).await.unwrap().unwrap().value;
        assert!(vault::unwrap(&held, Uuid::from_u128(7), &ClusterSecret::new([1; 32])).is_ok());
        assert_eq!(member(1).read(&meta).await.unwrap(), ring, "and so does who joins");
        let stranger = member(2).read(&meta).await.unwrap_err().to_string();
        assert!(stranger.contains("key `secrets` of the store"), "{stranger}");
        let stranger = member(2);
        assert!(stranger.sealing(&meta).await.is_err(), "it puts no other key in its place");
        assert_eq!(meta.get(vault::KEY).await.unwrap().unwrap().value, held);
    }

    #[tokio::test]
    async fn the_first_node_takes_its_keys_along_once() {
        let (model, dir) = (Model::default(), tempfile::tempdir().unwrap());
        let meta = store(&model);
        let alone = Vault::new(dir.path(), None);
        hand_over(dir.path(), &meta, &identity(1)).await.unwrap();
        assert_eq!(meta.get(vault::KEY).await.unwrap(), None, "there is nothing to take");
        let ring = alone.sealing(&meta).await.unwrap();
        let sealed = StoredChap::seal(&chap(), record("a").id, &ring).unwrap();
        hand_over(dir.path(), &meta, &identity(1)).await.unwrap();
        // As after a crash.
        hand_over(dir.path(), &meta, &identity(1)).await.unwrap();
        let joined = member(1);
        let ring = joined.read(&meta).await.unwrap();
        assert_eq!(sealed.open(record("a").id, &ring), Ok(chap()), "records go along as they are");
        std::fs::write(data_dir::secrets(dir.path()), "x").unwrap();
        let damaged = hand_over(dir.path(), &meta, &identity(1)).await.unwrap_err().to_string();
        assert!(damaged.contains("secrets.key: line 1"), "{damaged}");
    }

    #[tokio::test]
    async fn two_changes_at_once_make_one_key() {
        let (model, dir) = (Model::default(), tempfile::tempdir().unwrap());
        let meta = store(&model);
        let alone = Vault::new(dir.path(), None);
        let both = tokio::join!(alone.sealing(&meta), alone.sealing(&meta));
        assert_eq!(both.0.unwrap(), both.1.unwrap());
        let mut locked = record("a");
        let other = Ring::new(vec![Key::new([9; 32])]).unwrap();
        locked.chap = Some(StoredChap::seal(&chap(), locked.id, &other).unwrap());
        let of = OfHost { volume: locked.id, host: HOST };
        let sealed = StoredDhchap::seal(&dhchap(), of, &other).unwrap();
        locked.hosts.insert(HOST.into(), sealed);
        let sealed = StoredTls::seal(&tls(KEYS[0], true), of, &other).unwrap();
        locked.tls.insert(HOST.into(), sealed);
        let found = alone.obstacles(&locked);
        let methods: Vec<_> = found.iter().map(|locked| locked.method).collect();
        assert_eq!(methods, [Method::Chap, Method::Dhchap, Method::Tls]);
        for Locked { why, .. } in found {
            assert!(why.contains("secrets.key") && why.contains("sealed by key"), "{why}");
        }
    }

    #[test]
    fn what_is_there_already_is_not_sealed_anew() {
        let (ring, volume) = (Ring::new(vec![Key::new([9; 32])]).unwrap(), record("a").id);
        let of = OfHost { volume, host: HOST };
        let first = sealed_of_host(&dhchap(), (of, None), &ring).unwrap();
        assert_eq!(sealed_of_host(&dhchap(), (of, Some(&first)), &ring).unwrap(), first);
        let newer = Ring::new(vec![Key::new([8; 32]), Key::new([9; 32])]).unwrap();
        assert_ne!(sealed_of_host(&dhchap(), (of, Some(&first)), &newer).unwrap(), first);
        let other = Dhchap::new(dhchap().secret, None).unwrap();
        let second = sealed_of_host(&other, (of, Some(&first)), &ring).unwrap();
        assert_eq!(second.open(of, &ring), Ok(other));
        let key = tls(KEYS[0], true);
        let first = sealed_tls(&key, (of, None), &ring).unwrap();
        assert_eq!(sealed_tls(&key, (of, Some(&first)), &ring).unwrap(), first);
        assert_ne!(sealed_tls(&key, (of, Some(&first)), &newer).unwrap(), first);
        for other in [tls(KEYS[0], false), tls(KEYS[1], true)] {
            let second = sealed_tls(&other, (of, Some(&first)), &ring).unwrap();
            assert_eq!(second.open(of, &ring), Ok(other));
        }
        let of = Of::from(volume);
        let first = sealed(&chap(), (of, None), &ring).unwrap();
        assert_eq!(sealed(&chap(), (of, Some(&first)), &ring).unwrap(), first);
        assert_ne!(sealed(&chap(), (of, Some(&first)), &newer).unwrap(), first);
    }
}
