//! The store ends in the middle of a change, before or after any of its commits. What the next
//! start finds is whole: every volume is there with its file or gone with its file, and what was
//! acknowledged is there.

use crate::common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use crate::common::{ask, config, create, files, name};
use api::client::Client;
use api::endpoint::{GetStatus, ListVolumes, Nothing};
use api::{ApiError, Initiator, Verdict, VolumeState};
use node::control::{Control, Settings};
use node::data_dir::DataDir;
use node::engine::{Engine, Owner};
use node::meta::embedded::Embedded;
use node::meta::{Answer, Change, Entry, Meta, MetaError, Revision, Trouble, Watch};
use tokio::time::Instant;

/// A store that stops working at a commit, as if the process had ended there.
struct Dying {
    store: Embedded,
    /// Commits left.
    left: AtomicI64,
    /// Whether the last one still happens; nobody is told.
    last_happens: bool,
}

impl Dying {
    fn dead<T>() -> Answer<'static, T> {
        let dead = MetaError::Failed { path: "store".into(), why: "the process is dead".into() };
        Box::pin(async move { Err(dead) })
    }

    fn is_dead(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }
}

impl Meta for Dying {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        if self.is_dead() { Self::dead() } else { self.store.get(key) }
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        if self.is_dead() { Self::dead() } else { self.store.list(prefix) }
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        match self.left.fetch_sub(1, Ordering::SeqCst) {
            1 if self.last_happens => Box::pin(async move {
                self.store.commit(changes).await?;
                Self::dead().await
            }),
            ..=1 => Self::dead(),
            _ => self.store.commit(changes),
        }
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        self.store.watch(prefix, after)
    }

    fn trouble(&self) -> Answer<'_, Option<Trouble>> {
        self.store.trouble()
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
                control.create(ask(json)).await.map(drop)
            }
            Self::Grow => control.grow(name("old"), 8 << 20).await.map(drop),
            Self::Allow => control.allow(name("old"), vec![Initiator::Any]).await.map(drop),
            Self::Delete => control.delete(name("old"), false, false).await,
        }
    }
}

/// Makes `change`, with a store that dies at commit number `at`. Says whether the change was
/// acknowledged.
async fn change_and_die(dir: &Path, change: Deed, at: i64, last_happens: bool) -> bool {
    let config = config(dir, "");
    let data_dir = DataDir::hold(&config.data_dir).unwrap();
    let store = Embedded::open(&data_dir.store()).unwrap();
    let directory = u128::from(data_dir.lock_id().1);
    let owner = Owner { node: data_dir.node(), directory, cluster: None };
    let engine = Engine::start(&config, owner).await.unwrap();
    let mut settings = Settings::new(&config, engine.listen(&config).await.unwrap());
    settings.data_dir = data_dir.path().to_owned();
    let dying = Dying { store, left: AtomicI64::new(at), last_happens };
    let control = Control::new(settings, Arc::new(dying), engine);
    control.start().await.unwrap();
    let done = change.apply(&control).await.is_ok();
    control.stop().await;
    assert!(control.engine().stop(Instant::now() + Duration::from_secs(10)).await);
    done
}

/// What a fresh start finds.
async fn check(dir: &Path, change: Deed, acknowledged: bool, context: &str) {
    let (node, client) = common::start(dir, "").await;
    let status = client.call::<GetStatus>(&Nothing).await.unwrap();
    assert_eq!(status.verdict, Verdict::Safe, "{context}: {:?}", status.findings);
    let volumes = client.call::<ListVolumes>(&Nothing).await.unwrap().volumes;
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

/// The names are free or hold volumes that are the same: nothing is stuck.
async fn again(client: &Client) {
    create(client, "new").await;
    for volume in client.call::<ListVolumes>(&Nothing).await.unwrap().volumes {
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

/// A store that takes no changes while that is set.
struct Refusing {
    store: Embedded,
    refuses: Arc<AtomicBool>,
}

impl Meta for Refusing {
    fn get(&self, key: &str) -> Answer<'_, Option<Entry>> {
        self.store.get(key)
    }

    fn list(&self, prefix: &str) -> Answer<'_, (Vec<Entry>, Revision)> {
        self.store.list(prefix)
    }

    fn commit(&self, changes: Vec<Change>) -> Answer<'_, Revision> {
        if self.refuses.load(Ordering::SeqCst) { Dying::dead() } else { self.store.commit(changes) }
    }

    fn watch(&self, prefix: &str, after: Revision) -> Box<dyn Watch> {
        self.store.watch(prefix, after)
    }

    fn trouble(&self) -> Answer<'_, Option<Trouble>> {
        self.store.trouble()
    }
}

/// What is refused has not happened: initiators see the size that the refusal leaves.
#[tokio::test]
async fn a_grow_that_is_refused_has_changed_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let data_dir = DataDir::hold(&config.data_dir).unwrap();
    let store = Embedded::open(&data_dir.store()).unwrap();
    let directory = u128::from(data_dir.lock_id().1);
    let owner = Owner { node: data_dir.node(), directory, cluster: None };
    let engine = Engine::start(&config, owner).await.unwrap();
    let mut settings = Settings::new(&config, engine.listen(&config).await.unwrap());
    settings.data_dir = data_dir.path().to_owned();
    let refuses = Arc::new(AtomicBool::new(false));
    let store = Refusing { store, refuses: Arc::clone(&refuses) };
    let control = Control::new(settings, Arc::new(store), engine);
    control.start().await.unwrap();
    let made = control.create(ask(r#"{"name":"v","size_bytes":4194304}"#)).await.unwrap();
    let served = async || {
        let image = control.engine().find_open_image(made.id).await.unwrap();
        (image.size_bytes, control.show(&name("v")).await.unwrap().size_bytes)
    };
    // The store refuses.
    refuses.store(true, Ordering::SeqCst);
    control.grow(name("v"), 8 << 20).await.unwrap_err();
    assert_eq!(served().await, (4 << 20, 4 << 20));
    refuses.store(false, Ordering::SeqCst);
    // The image refuses: no file is that long.
    control.grow(name("v"), 1 << 62).await.unwrap_err();
    assert_eq!(served().await, (4 << 20, 4 << 20));
    control.grow(name("v"), 8 << 20).await.unwrap();
    assert_eq!(served().await, (8 << 20, 8 << 20));
    control.stop().await;
    assert!(control.engine().stop(Instant::now() + Duration::from_secs(10)).await);
}
