//! Paths that no volume or pool may use: the node's own files, and images of other volumes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::{ask, create, files, refusal, start};
use api::client::Client;
use api::endpoint::*;
use api::{AddDisks, ApiError, CreatePoolRequest, ErrorCode, PoolName, ReplaceDisk};

async fn create_forced(client: &Client, path: &Path) -> ApiError {
    let json = format!(
        r#"{{"name":"evil","size_bytes":4194304,"force":true,"backing":{{"kind":"file","path":{path:?}}}}}"#
    );
    refusal(client.call::<CreateVolume>(&ask(&json)).await)
}

fn disk(path: PathBuf) -> PathBuf {
    fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    path
}

/// All files below `dir` with their contents, except files that change on their own.
fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && path.extension().is_none_or(|e| e != "redb") {
            all.push((path.clone(), fs::read(&path).unwrap()));
        }
    }
    all.sort();
    all
}

#[tokio::test]
async fn no_volume_takes_the_nodes_own_files_or_another_volumes_image() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "web").await;
    let at = |name: &str| dir.path().join(name);
    fs::write(at("data/secrets.key"), "the keys of all secrets").unwrap();
    let image = at("data/volumes").join(&files(dir.path())[0]);
    symlink(at("data/secrets.key"), at("link")).unwrap();
    fs::hard_link(at("data/secrets.key"), at("hard")).unwrap();
    fs::hard_link(&image, at("image-hard")).unwrap();
    symlink(&image, at("image-link")).unwrap();
    let before = contents(&at("data"));
    for name in [
        "data/secrets.key",
        "data/store.redb",
        "data/lock",
        "data/new.img",
        "data/volumes/../node-id",
        "link",
        "hard",
    ] {
        let refused = create_forced(&client, &at(name)).await;
        assert_eq!(refused.code, ErrorCode::Backing, "{name}: {refused}");
        assert!(refused.message.contains("the node's own files"), "{name}: {refused}");
    }
    for path in [image.clone(), at("image-hard"), at("image-link")] {
        let refused = create_forced(&client, &path).await;
        assert!(refused.message.contains("belongs to volume web"), "{refused}");
    }
    assert_eq!(contents(&at("data")), before);
    assert_eq!(files(dir.path()).len(), 1);
    // A file of neither the node nor a volume may be used.
    fs::write(at("old.img"), "something").unwrap();
    let json = format!(
        r#"{{"name":"mine","size_bytes":4194304,"force":true,"backing":{{"kind":"file","path":{:?}}}}}"#,
        at("old.img")
    );
    client.call::<CreateVolume>(&ask(&json)).await.unwrap();
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn no_pool_takes_the_nodes_own_files_or_a_volumes_image() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "web").await;
    let at = |name: &str| dir.path().join(name);
    let image = at("data/volumes").join(&files(dir.path())[0]);
    let [own, good, more] = [at("data/own"), at("a"), at("b")].map(disk);
    fs::hard_link(&own, at("hard")).unwrap();
    fs::hard_link(&image, at("image-hard")).unwrap();
    let new = |disks: Vec<PathBuf>| {
        let json = r#"{"name":"tank","raid":0,"disks":[]}"#;
        CreatePoolRequest { disks, ..serde_json::from_str(json).unwrap() }
    };
    let pool: PoolName = "tank".parse().unwrap();
    for (bad, why) in
        [(own.clone(), "own files"), (at("hard"), "own files"), (at("image-hard"), "volume web")]
    {
        let both = new(vec![good.clone(), bad.clone()]);
        let refused = refusal(client.call::<CreatePool>(&both).await);
        assert!(refused.message.contains(why), "{refused}");
    }
    client.call::<CreatePool>(&new(vec![good.clone(), more])).await.unwrap();
    let add = AddDisks { disks: vec![own.clone()], spare: false, overwrite: Vec::new() };
    let refused = refusal(client.call_on::<AddPoolDisks>(&pool, &[], &add).await);
    assert!(refused.message.contains("own files"), "{refused}");
    let disk = good.display().to_string();
    let replace = ReplaceDisk { disk, with: at("hard"), overwrite: Vec::new() };
    let refused = refusal(client.call_on::<ReplacePoolDisk>(&pool, &[], &replace).await);
    assert!(refused.message.contains("own files"), "{refused}");
    assert!(node.stop().await.clean);
}
