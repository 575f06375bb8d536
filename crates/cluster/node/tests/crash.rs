//! The store fails in the middle of a change, before or after any of its commits. The next start
//! must find a consistent state: every volume has its file or neither exists, and acknowledged
//! changes are there.

use crate::common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use crate::common::{ask, config, create, files, name};
use api::client::Client;
use api::endpoint::{GetStatus, ListVolumes, NoBody};
use api::{ApiError, Initiator, Verdict, VolumeState};
use cluster::store::embedded::EmbeddedStore;
use cluster::store::{
    Change, Entry, MetadataStore, Revision, StoreError, StoreFuture, StoreProblem, Watcher,
};
use config::data_dir::DataDir;
use control::{Control, ControlSettings};
use engine::{Engine, NodeDiskOwner};
use tokio::time::Instant;

/// A store that fails at a commit, as if the process had ended there.
struct Dying {
    store: EmbeddedStore,
    /// Commits until it fails.
    left: AtomicI64,
    /// Whether the last one takes effect, without an acknowledgement.
    last_happens: bool,
}

impl Dying {
    fn dead<T>() -> StoreFuture<'static, T> {
        let dead = StoreError::Failed { path: "store".into(), why: "the process is dead".into() };
        Box::pin(async move { Err(dead) })
    }

    fn is_dead(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }
}

impl MetadataStore for Dying {
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>> {
        if self.is_dead() { Self::dead() } else { self.store.get(key) }
    }

    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)> {
        if self.is_dead() { Self::dead() } else { self.store.list(prefix) }
    }

    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision> {
        match self.left.fetch_sub(1, Ordering::SeqCst) {
            1 if self.last_happens => Box::pin(async move {
                self.store.commit(changes).await?;
                Self::dead().await
            }),
            ..=1 => Self::dead(),
            _ => self.store.commit(changes),
        }
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher> {
        self.store.watch(prefix, after)
    }

    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>> {
        self.store.problem()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Deed {
    Create,
    Grow,
    Allow,
    Delete,
}

impl Deed {
    async fn apply(self, control: &Control) -> Result<(), ApiError> {
        match self {
            Self::Create => {
                let json = r#"{"name":"new","size_bytes":4194304}"#;
                control.volumes().create_volume(ask(json)).await.map(drop)
            }
            Self::Grow => control.volumes().grow(name("old"), 8 << 20).await.map(drop),
            Self::Allow => {
                control.volumes().allow(name("old"), vec![Initiator::Any]).await.map(drop)
            }
            Self::Delete => control.volumes().delete_volume(name("old"), false, false).await,
        }
    }
}

/// Makes `change` with a store that fails at commit number `at`. Returns whether the change was
/// acknowledged.
async fn change_and_die(dir: &Path, change: Deed, at: i64, last_happens: bool) -> bool {
    let config = config(dir, "");
    let data_dir = DataDir::acquire(&config.data_dir).unwrap();
    let store = EmbeddedStore::open(&data_dir.store_path()).unwrap();
    let directory = u128::from(data_dir.lock_id().1);
    let owner = NodeDiskOwner { node: data_dir.node_id(), directory, cluster: None };
    let engine = Engine::start(&config, owner).await.unwrap();
    let mut settings = ControlSettings::new(&config, engine.listen(&config).await.unwrap());
    settings.data_dir = data_dir.path().to_owned();
    let dying = Dying { store, left: AtomicI64::new(at), last_happens };
    let control = Control::new(settings, Arc::new(dying), engine);
    control.start().await.unwrap();
    let done = change.apply(&control).await.is_ok();
    control.stop().await;
    assert!(control.engine().stop(Instant::now() + Duration::from_secs(10)).await);
    done
}

/// The state that the next start finds.
async fn check(dir: &Path, change: Deed, acknowledged: bool, context: &str) {
    let (node, client) = common::start(dir, "").await;
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    assert_eq!(status.verdict, Verdict::Safe, "{context}: {:?}", status.findings);
    let volumes = client.call::<ListVolumes>(&NoBody).await.unwrap().volumes;
    let mut expected: Vec<_> = volumes.iter().map(|v| format!("{}-{}.img", v.name, v.id)).collect();
    expected.sort();
    assert_eq!(files(dir), expected, "{context}: files without volumes, or the other way round");
    assert!(volumes.iter().all(|v| v.state == VolumeState::Online), "{context}");
    let find = |name: &str| volumes.iter().find(|v| v.name.as_str() == name);
    let (old, new) = (find("old"), find("new"));
    match change {
        Deed::Create => assert!(!acknowledged || new.is_some(), "{context}"),
        Deed::Delete => assert!(!acknowledged || old.is_none(), "{context}"),
        Deed::Grow => {
            let size = old.expect(context).size_bytes;
            assert!(size == 8 << 20 || (size == 4 << 20 && !acknowledged), "{context}: {size}");
        }
        Deed::Allow => {
            let allowed = old.expect(context).access.initiators.len();
            assert!(allowed == 1 || !acknowledged, "{context}");
        }
    }
    again(&client).await;
    assert!(node.stop().await.clean);
}

/// The same names are free or hold the same volumes: nothing is stuck.
async fn again(client: &Client) {
    create(client, "new").await;
    for volume in client.call::<ListVolumes>(&NoBody).await.unwrap().volumes {
        assert_eq!(volume.state, VolumeState::Online);
    }
}

#[tokio::test]
async fn every_commit_may_be_the_last() {
    for change in [Deed::Create, Deed::Grow, Deed::Allow, Deed::Delete] {
        let mut acknowledged = false;
        let mut at = 1;
        while !acknowledged {
            for last_happens in [false, true] {
                let context = format!("{change:?}, commit {at}, done: {last_happens}");
                let dir = tempfile::tempdir().unwrap();
                let (node, client) = common::start(dir.path(), "").await;
                create(&client, "old").await;
                assert!(node.stop().await.clean);
                acknowledged = change_and_die(dir.path(), change, at, last_happens).await;
                check(dir.path(), change, acknowledged, &context).await;
            }
            at += 1;
        }
        let commits = match change {
            Deed::Create => 3,
            Deed::Delete => 2,
            Deed::Grow | Deed::Allow => 1,
        };
        assert_eq!(at - 2, commits, "{change:?} has its commits tried one by one");
    }
}

/// A store that accepts no changes while this is set.
struct Refusing {
    store: EmbeddedStore,
    refuses: Arc<AtomicBool>,
}

impl MetadataStore for Refusing {
    fn get(&self, key: &str) -> StoreFuture<'_, Option<Entry>> {
        self.store.get(key)
    }

    fn list(&self, prefix: &str) -> StoreFuture<'_, (Vec<Entry>, Revision)> {
        self.store.list(prefix)
    }

    fn commit(&self, changes: Vec<Change>) -> StoreFuture<'_, Revision> {
        if self.refuses.load(Ordering::SeqCst) { Dying::dead() } else { self.store.commit(changes) }
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watcher> {
        self.store.watch(prefix, after)
    }

    fn problem(&self) -> StoreFuture<'_, Option<StoreProblem>> {
        self.store.problem()
    }
}

/// A refused change must have no effect: initiators see the size that it leaves.
#[tokio::test]
async fn a_grow_that_is_refused_has_changed_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let data_dir = DataDir::acquire(&config.data_dir).unwrap();
    let store = EmbeddedStore::open(&data_dir.store_path()).unwrap();
    let directory = u128::from(data_dir.lock_id().1);
    let owner = NodeDiskOwner { node: data_dir.node_id(), directory, cluster: None };
    let engine = Engine::start(&config, owner).await.unwrap();
    let mut settings = ControlSettings::new(&config, engine.listen(&config).await.unwrap());
    settings.data_dir = data_dir.path().to_owned();
    let refuses = Arc::new(AtomicBool::new(false));
    let store = Refusing { store, refuses: Arc::clone(&refuses) };
    let control = Control::new(settings, Arc::new(store), engine);
    control.start().await.unwrap();
    let made =
        control.volumes().create_volume(ask(r#"{"name":"v","size_bytes":4194304}"#)).await.unwrap();
    let served = async || {
        let image = control.engine().scan_open_image(made.id).await.unwrap();
        (image.size_bytes, control.volumes().get_volume(&name("v")).await.unwrap().size_bytes)
    };
    // The store refuses.
    refuses.store(true, Ordering::SeqCst);
    control.volumes().grow(name("v"), 8 << 20).await.unwrap_err();
    assert_eq!(served().await, (4 << 20, 4 << 20));
    refuses.store(false, Ordering::SeqCst);
    // The image refuses: no file can be that long.
    control.volumes().grow(name("v"), 1 << 62).await.unwrap_err();
    assert_eq!(served().await, (4 << 20, 4 << 20));
    control.volumes().grow(name("v"), 8 << 20).await.unwrap();
    assert_eq!(served().await, (8 << 20, 8 << 20));
    control.stop().await;
    assert!(control.engine().stop(Instant::now() + Duration::from_secs(10)).await);
}
