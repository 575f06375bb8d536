//! Pools of disks through the API. The disks are files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{ask, config, name, refusal, show, start};
use api::client::{ApiAddress, Client};
use api::endpoint::*;
use api::{
    AddDisks, ClearErrors, CreatePoolRequest, DiskState, ErrorCode, GrowVolumeRequest,
    OpenPoolRequest, Pool, PoolName, PoolState, RemoveDisk, ReplaceDisk, Status, Verdict,
    VolumeState,
};
use node::node::Node;

/// Size of a disk, in bytes. The files are sparse.
const DISK: u64 = 1 << 30;

/// Time limit for background work of the node.
const PATIENCE: Duration = Duration::from_secs(60);

fn disk(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::File::create(&path).unwrap().set_len(DISK).unwrap();
    path
}

fn pool(name: &str) -> PoolName {
    name.parse().unwrap()
}

fn new(pool: &str, raid: u8, disks: &[&PathBuf], spares: &[&PathBuf]) -> CreatePoolRequest {
    let json = format!(r#"{{"name":"{pool}","raid":{raid},"disks":[]}}"#);
    let ask: CreatePoolRequest = serde_json::from_str(&json).unwrap();
    let all = |paths: &[&PathBuf]| paths.iter().map(|p| (*p).clone()).collect();
    CreatePoolRequest { disks: all(disks), spares: all(spares), ..ask }
}

async fn get(client: &Client, name: &str) -> Pool {
    client.call_on::<GetPool>(&pool(name), &[], &NoBody).await.unwrap()
}

async fn status(client: &Client) -> Status {
    client.call::<GetStatus>(&NoBody).await.unwrap()
}

async fn create_volume(client: &Client, volume: &str, in_pool: &str) -> api::Volume {
    let json = format!(
        r#"{{"name":"{volume}","size_bytes":67108864,"backing":{{"kind":"pool","pool":"{in_pool}"}},"allow":["any"]}}"#
    );
    client.call::<CreateVolume>(&ask(&json)).await.unwrap()
}

/// Waits until the result of `look` satisfies `is`.
async fn until<T: std::fmt::Debug>(look: impl AsyncFn() -> T, is: impl Fn(&T) -> bool) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let seen = look().await;
        if is(&seen) {
            return seen;
        }
        assert!(tokio::time::Instant::now() < deadline, "not yet: {seen:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn a_pool_and_its_volumes_live_their_lives() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let disks = ["a", "b", "c", "s"].map(|name| disk(dir.path(), name));
    let [a, b, c, s] = &disks;
    let create = new("tank", 5, &[a, b, c], &[s]);
    let made = client.call::<CreatePool>(&create).await.unwrap();
    assert_eq!((made.state.clone(), made.level.as_deref()), (PoolState::Online, Some("RAID 5")));
    assert_eq!((made.fault_tolerance, made.columns), (Some(1), Some(3)));
    let spares = made.disks.iter().filter(|d| d.state == DiskState::Spare).count();
    assert_eq!((made.disks.len(), spares), (4, 1));
    let capacity = made.capacity.unwrap();
    assert!(capacity.usable_bytes > DISK && capacity.usable_bytes < capacity.raw_bytes);
    assert!(dir.path().join("data/pools/tank.json").exists());
    assert_eq!(client.call::<CreatePool>(&create).await.unwrap().id, made.id, "asked twice");

    let volume = create_volume(&client, "web", "tank").await;
    assert_eq!(volume.state, VolumeState::Online);
    assert_eq!(volume.replicas[0].backing.to_string(), "pool tank");
    let grow = GrowVolumeRequest { size_bytes: 128 << 20 };
    let grown = client.call_on::<GrowVolume>(&name("web"), &[], &grow).await.unwrap();
    assert_eq!(grown.size_bytes, 128 << 20);
    assert_eq!(get(&client, "tank").await.volumes, ["web"]);
    assert!(node.stop().await.clean);

    let (node, client) = start(dir.path(), "").await;
    assert_eq!(show(&client, "web").await.unwrap().state, VolumeState::Online);
    assert_eq!(get(&client, "tank").await.state, PoolState::Online);
    assert_eq!(status(&client).await.verdict, Verdict::Safe);
    let refused = refusal(client.call_on::<DeletePool>(&pool("tank"), &[], &NoBody).await);
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (ErrorCode::Conflict, "pool tank has volumes: web")
    );
    client.call_on::<DeleteVolume>(&name("web"), &[], &NoBody).await.unwrap();
    client.call_on::<ScrubPool>(&pool("tank"), &[], &NoBody).await.unwrap();
    client.call_on::<DeletePool>(&pool("tank"), &[], &NoBody).await.unwrap();
    assert!(client.call::<ListPools>(&NoBody).await.unwrap().pools.is_empty());
    assert!(!dir.path().join("data/pools/tank.json").exists());
    // They hold no labels any more.
    client.call::<CreatePool>(&new("zoo", 1, &[a, b], &[])).await.unwrap();
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn what_belongs_to_others_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c] = &["a", "b", "c"].map(|name| disk(dir.path(), name));
    let image = dir.path().join("web.img");
    let json = format!(
        r#"{{"name":"web","size_bytes":4194304,"backing":{{"kind":"file","path":"{}"}}}}"#,
        image.display()
    );
    client.call::<CreateVolume>(&ask(&json)).await.unwrap();
    let create = |ask: CreatePoolRequest| {
        let client = client.clone();
        async move { refusal(client.call::<CreatePool>(&ask).await) }
    };
    let refused = create(new("tank", 5, &[a, b, &image], &[])).await;
    assert_eq!(refused.message, format!("{} belongs to volume web", image.display()));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    // Under another name too.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(a, &link).unwrap();
    let refused = create(new("zoo", 1, &[c, &link], &[])).await;
    assert_eq!(refused.message, format!("{} belongs to pool tank", link.display()));
    let refused = create(new("tank", 0, &[c], &[])).await;
    assert_eq!(refused.code, ErrorCode::Exists);
    let refused = create(new("zoo", 5, &[c], &[])).await;
    assert_eq!(refused.code, ErrorCode::InvalidRequest);
    let json =
        json.replace("\"web\"", "\"x\"").replace(&*image.to_string_lossy(), &a.to_string_lossy());
    let refused = refusal(client.call::<CreateVolume>(&ask(&json)).await);
    assert_eq!(refused.message, format!("{} belongs to pool tank", a.display()));
    let json = r#"{"name":"x","size_bytes":4194304,"backing":{"kind":"pool","pool":"zoo"}}"#;
    let refused = refusal(client.call::<CreateVolume>(&ask(json)).await);
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (ErrorCode::NotFound, "there is no pool zoo on this node")
    );
    // Data is not overwritten without force.
    fs::write(c, [7; 4096]).unwrap();
    fs::File::options().write(true).open(c).unwrap().set_len(DISK).unwrap();
    let refused = create(new("zoo", 0, &[c], &[])).await;
    assert!(refused.message.contains(&*c.to_string_lossy()), "{refused}");
    assert!(
        client
            .call::<ListPools>(&NoBody)
            .await
            .unwrap()
            .pools
            .iter()
            .all(|p| p.name.as_str() == "tank")
    );
    let overwrite = vec![c.display().to_string()];
    let zoo = CreatePoolRequest { overwrite, ..new("zoo", 0, &[c], &[]) };
    client.call::<CreatePool>(&zoo).await.unwrap();
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn disks_that_come_late_are_enough() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c] = &["a", "b", "c"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 5, &[a, b, c], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    assert!(node.stop().await.clean);
    let renamed = [a, b].map(|path| {
        let renamed = path.with_extension("away");
        fs::rename(path, &renamed).unwrap();
        (renamed, path)
    });
    let (node, client) = start(dir.path(), "").await;
    let VolumeState::Offline { reason } = show(&client, "web").await.unwrap().state else {
        panic!("two of three disks are missing")
    };
    assert!(reason.contains("pool tank is offline"), "{reason}");
    assert!(matches!(get(&client, "tank").await.state, PoolState::Offline { .. }));
    let found = status(&client).await;
    assert_eq!(found.verdict, Verdict::Unavailable);
    let finding = found.findings.iter().find(|f| f.subject == "pool tank").unwrap();
    assert!(finding.hint.as_ref().unwrap().contains("windrose pool open tank --without DISK"));
    let refused = refusal(client.call_on::<ScrubPool>(&pool("tank"), &[], &NoBody).await);
    assert_eq!(refused.code, ErrorCode::Conflict);
    renamed.iter().for_each(|(renamed, path)| fs::rename(renamed, path).unwrap());
    until(async || show(&client, "web").await.unwrap().state, |s| *s == VolumeState::Online).await;
    assert_eq!(get(&client, "tank").await.state, PoolState::Online);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_pool_goes_on_without_a_disk_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c, d] = &["a", "b", "c", "d"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    let disks = get(&client, "tank").await.disks;
    let lost = disks.iter().find(|d| d.path.as_ref() == Some(b)).unwrap();
    let lost = lost.serial.clone().unwrap();
    assert!(node.stop().await.clean);
    fs::remove_file(b).unwrap();
    let (node, client) = start(dir.path(), "").await;
    // One of two disks must not continue alone, because the other one may have continued.
    assert!(matches!(get(&client, "tank").await.state, PoolState::Offline { .. }));
    let open = |confirm| OpenPoolRequest { without: vec![lost.clone()], take_over: false, confirm };
    let refused = client.call_on::<OpenPool>(&pool("tank"), &[], &open(pool("zoo"))).await;
    assert_eq!(refusal(refused).code, ErrorCode::InvalidRequest);
    let opened = client.call_on::<OpenPool>(&pool("tank"), &[], &open(pool("tank"))).await;
    let opened = opened.unwrap();
    assert_eq!((opened.state, opened.fault_tolerance), (PoolState::Degraded, Some(0)));
    let out = opened.disks.iter().find(|d| d.state == DiskState::Detached).unwrap();
    assert_eq!(out.serial.as_ref(), Some(&lost));
    assert!(out.hint.as_ref().unwrap().starts_with("replace it: windrose pool replace tank "));
    assert_eq!(show(&client, "web").await.unwrap().state, VolumeState::Online);
    assert_eq!(status(&client).await.verdict, Verdict::AtRisk);

    let number = out.member.unwrap().to_string();
    let replace = ReplaceDisk { disk: number, with: c.clone(), overwrite: Vec::new() };
    client.call_on::<ReplacePoolDisk>(&pool("tank"), &[], &replace).await.unwrap();
    let whole = |p: &Pool| p.state == PoolState::Online && p.fault_tolerance == Some(1);
    until(async || get(&client, "tank").await, whole).await;
    let add = AddDisks { disks: vec![d.clone()], spare: true, overwrite: Vec::new() };
    let added = client.call_on::<AddPoolDisks>(&pool("tank"), &[], &add).await.unwrap();
    let spare = added.disks.iter().find(|d| d.state == DiskState::Spare).unwrap();
    let remove = RemoveDisk { disk: spare.serial.clone().unwrap(), cancel: false };
    client.call_on::<RemovePoolDisk>(&pool("tank"), &[], &remove).await.unwrap();
    let gone = |p: &Pool| p.disks.iter().all(|disk| disk.path.as_ref() != Some(d));
    until(async || get(&client, "tank").await, gone).await;
    assert!(node.stop().await.clean);
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(show(&client, "web").await.unwrap().state, VolumeState::Online);
    assert!(node.stop().await.clean);
}

/// A stripe needs as many disks as it has columns: without one of them the pool would have no
/// capacity.
#[tokio::test]
async fn a_disk_that_is_needed_is_not_removed_and_a_removal_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c, d] = &["a", "b", "c", "d"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 5, &[a, b, c], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    let remove = async |disk: &str, cancel| {
        let remove = RemoveDisk { disk: disk.to_owned(), cancel };
        client.call_on::<RemovePoolDisk>(&pool("tank"), &[], &remove).await
    };
    let before = get(&client, "tank").await.capacity;
    let refused = refusal(remove("1", false).await);
    assert_eq!(refused.code, ErrorCode::NoSpace, "{refused:?}");
    assert!(refused.hint.is_some(), "{refused:?}");
    let after = get(&client, "tank").await;
    assert_eq!((after.capacity, after.state), (before, PoolState::Online));
    let refused = refusal(remove("1", true).await);
    assert_eq!(refused.message, "pool tank: disk 1 is not being removed");
    // With one more disk its data fits.
    let add = AddDisks { disks: vec![d.clone()], spare: false, overwrite: Vec::new() };
    client.call_on::<AddPoolDisks>(&pool("tank"), &[], &add).await.unwrap();
    remove("1", false).await.unwrap();
    let cancelled = remove("1", true).await;
    let is_in = |pool: &Pool| pool.disks.iter().all(|disk| disk.state == DiskState::Active);
    match cancelled {
        Ok(pool) => assert!(pool.disks.len() == 4 && is_in(&pool), "{pool:?}"),
        // Some of its data may have been moved already.
        Err(_) => assert!(get(&client, "tank").await.disks.len() <= 4),
    }
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn errors_of_disks_are_counted_since_a_moment_that_survives_a_restart_and_can_be_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b] = &["a", "b"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    let clear = async |client: &Client, disk: Option<&str>| {
        let clear = ClearErrors { disk: disk.map(str::to_owned) };
        client.call_on::<ClearPoolErrors>(&pool("tank"), &[], &clear).await
    };
    let path = a.to_str().unwrap();
    let cleared = clear(&client, Some(path)).await.unwrap();
    let since = cleared.disks[0].errors_since_s;
    assert!(since.is_some(), "{cleared:?}");
    let none = refusal(clear(&client, Some("absent")).await);
    assert_eq!(none.message, "pool tank: it has no disk absent");
    assert!(node.stop().await.clean);
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(get(&client, "tank").await.disks[0].errors_since_s, since);
    let all = clear(&client, None).await.unwrap();
    assert!(all.disks.iter().all(|disk| disk.errors_since_s >= since), "{all:?}");
    assert!(node.stop().await.clean);
}

/// Several volumes on each core, at every RAID level.
#[tokio::test]
async fn ten_volumes_of_a_pool_are_created_grown_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    for (raid, count) in [(0, 2), (1, 2), (10, 4), (5, 3), (6, 4)] {
        let disks: Vec<_> = (0..count).map(|n| disk(dir.path(), &format!("{raid}-{n}"))).collect();
        let disks: Vec<&PathBuf> = disks.iter().collect();
        client.call::<CreatePool>(&new("tank", raid, &disks, &[])).await.unwrap();
        let called: Vec<String> = (0..10).map(|n| format!("v{n}")).collect();
        for volume in &called {
            let volume = create_volume(&client, volume, "tank").await;
            assert_eq!(volume.state, VolumeState::Online, "RAID {raid}: {volume:?}");
        }
        let grow = GrowVolumeRequest { size_bytes: 128 << 20 };
        client.call_on::<GrowVolume>(&name("v3"), &[], &grow).await.unwrap();
        client.call_on::<DeleteVolume>(&name("v4"), &[], &NoBody).await.unwrap();
        assert_eq!(create_volume(&client, "v4", "tank").await.state, VolumeState::Online);
        for volume in &called {
            client.call_on::<DeleteVolume>(&name(volume), &[], &NoBody).await.unwrap();
        }
        client.call_on::<DeletePool>(&pool("tank"), &[], &NoBody).await.unwrap();
    }
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_disk_that_is_put_back_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c] = &["a", "b", "c"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 5, &[a, b, c], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    assert!(node.stop().await.clean);
    let away = dir.path().join("away");
    fs::rename(b, &away).unwrap();
    let (node, client) = start(dir.path(), "").await;
    let degraded = |p: &Pool| p.state == PoolState::Degraded && p.fault_tolerance == Some(0);
    until(async || get(&client, "tank").await, degraded).await;
    fs::rename(&away, b).unwrap();
    let whole = |p: &Pool| p.state == PoolState::Online && p.fault_tolerance == Some(1);
    until(async || get(&client, "tank").await, whole).await;
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn checksums_are_chosen_with_a_pool_and_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c, d] = &["a", "b", "c", "d"].map(|name| disk(dir.path(), name));
    let ask = CreatePoolRequest { checksums: true, ..new("tank", 5, &[a, b, c], &[]) };
    client.call::<CreatePool>(&ask).await.unwrap();
    // A repeated request succeeds only with the same parameters.
    let other = refusal(client.call::<CreatePool>(&new("tank", 5, &[a, b, c], &[])).await);
    assert_eq!(other.code, ErrorCode::Exists);
    create_volume(&client, "web", "tank").await;
    assert!(node.stop().await.clean);
    let (node, client) = start(dir.path(), "").await;
    until(async || show(&client, "web").await.unwrap().state, |s| *s == VolumeState::Online).await;
    // A disk added later has memory for them too.
    let add = AddDisks { disks: vec![d.clone()], spare: false, overwrite: Vec::new() };
    let added = client.call_on::<AddPoolDisks>(&pool("tank"), &[], &add).await.unwrap();
    assert_eq!((added.checksums, added.disks.len()), (Some(true), 4));
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_left_alone_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b] = &["a", "b"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    assert!(node.stop().await.clean);
    let record = dir.path().join("data/pools/tank.json");
    let good = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    let (node, client) = start(dir.path(), "").await;
    let found = status(&client).await;
    assert!(
        found
            .findings
            .iter()
            .any(|f| f.subject == "pools" && f.message.contains("pools/tank.json"))
    );
    let refused = refusal(client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await);
    assert!(refused.message.contains("pools/tank.json"), "{refused}");
    let VolumeState::Offline { reason } = show(&client, "web").await.unwrap().state else {
        panic!("its pool is not known")
    };
    assert!(reason.contains("pools/tank.json"), "{reason}");
    assert!(node.stop().await.clean);
    fs::write(&record, good).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(show(&client, "web").await.unwrap().state, VolumeState::Online);
    assert!(node.stop().await.clean);
}

/// The state that a crash leaves in the middle of a creation or deletion.
#[tokio::test]
async fn what_a_crash_has_left_is_finished_or_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c] = &["a", "b", "c"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    assert!(node.stop().await.clean);
    let record = dir.path().join("data/pools/tank.json");
    let sealed_as = "pools/tank.json";
    let read = || {
        let contents = cluster::record_file::read(&record, sealed_as, 1 << 20).unwrap();
        String::from_utf8(contents.unwrap()).unwrap()
    };
    let ready = read();
    let stage = |stage: &str| {
        let changed = ready.replace("\"ready\"", &format!("\"{stage}\""));
        assert!(stage == "ready" || changed != ready);
        cluster::record_file::write(&record, sealed_as, changed.as_bytes()).unwrap();
    };
    // The pool was created completely: repeating the request finds it.
    stage("creating");
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(get(&client, "tank").await.state, PoolState::Online);
    assert!(node.stop().await.clean);
    assert_eq!(read(), ready);

    stage("deleting");
    let (node, client) = start(dir.path(), "").await;
    assert!(client.call::<ListPools>(&NoBody).await.unwrap().pools.is_empty());
    assert!(!record.exists());
    client.call::<CreatePool>(&new("zoo", 1, &[a, b], &[])).await.unwrap();
    client.call_on::<DeletePool>(&pool("zoo"), &[], &NoBody).await.unwrap();
    assert!(node.stop().await.clean);

    // No disk of it was written.
    for left in ["creating", "deleting"] {
        stage(left);
        let (node, client) = start(dir.path(), "").await;
        assert!(client.call::<ListPools>(&NoBody).await.unwrap().pools.is_empty(), "{left}");
        assert!(!record.exists());
        assert!(node.stop().await.clean);
    }
    // A pool that exists is never removed automatically.
    stage("ready");
    let (node, client) = start(dir.path(), "").await;
    assert!(matches!(get(&client, "tank").await.state, PoolState::Offline { .. }));
    let refused = refusal(client.call_on::<DeletePool>(&pool("tank"), &[], &NoBody).await);
    assert!(refused.hint.unwrap().contains("--force"));
    client.call_on::<DeletePool>(&pool("tank"), &[POOL_FORCE], &NoBody).await.unwrap();
    assert!(!record.exists());
    client.call::<CreatePool>(&new("tank", 1, &[a, c], &[])).await.unwrap();
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_volume_that_finds_no_room_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b] = &["a", "b"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    let json = r#"{"name":"web","size_bytes":107374182400,"thin":false,"backing":{"kind":"pool","pool":"tank"}}"#;
    let refused = refusal(client.call::<CreateVolume>(&ask(json)).await);
    assert_eq!(refused.code, ErrorCode::NoSpace, "{refused}");
    assert_eq!(show(&client, "web").await, None);
    // Thin volumes may exceed the capacity.
    let thin = json.replace("\"thin\":false", "\"thin\":true");
    client.call::<CreateVolume>(&ask(&thin)).await.unwrap();
    let promised = status(&client).await;
    let warned = promised
        .findings
        .iter()
        .any(|f| f.subject == "pool tank" && f.message.contains("may still need"));
    assert!(warned, "{promised:?}");
    client.call_on::<DeleteVolume>(&name("web"), &[], &NoBody).await.unwrap();
    client.call_on::<DeletePool>(&pool("tank"), &[], &NoBody).await.unwrap();
    assert!(node.stop().await.clean);
}

/// RFD 0037: a pool that a core lacks memory for is refused with the setting that suffices, also at
/// a start with too little memory, while all else is served.
#[tokio::test]
async fn a_pool_that_a_core_has_no_memory_for_is_named_with_the_setting_that_suffices() {
    let dir = tempfile::tempdir().unwrap();
    let node_with = async |mib: u64| {
        let mut config = config(dir.path(), "");
        (config.cores.count, config.cores.memory_bytes) = (Some(1), mib << 20);
        let node = Node::start(&config).await.unwrap();
        (node, Client::new(ApiAddress::Unix(dir.path().join("api.sock"))))
    };
    let (node, client) = node_with(16).await;
    let [a, b, c, d] = &["a", "b", "c", "d"].map(|name| disk(dir.path(), name));
    client.call::<CreatePool>(&new("tank", 1, &[a, b], &[])).await.unwrap();
    client.call::<CreatePool>(&new("zoo", 1, &[c, d], &[])).await.unwrap();
    create_volume(&client, "web", "tank").await;
    let json = r#"{"name":"db","size_bytes":67108864,"backing":{"kind":"pool","pool":"zoo"}}"#;
    let refused = refusal(client.call::<CreateVolume>(&ask(json)).await);
    assert!(refused.message.starts_with("volume db: "), "{refused}");
    assert!(refused.message.contains("set cores.memory to \"17MiB\" or more"), "{refused}");
    assert_eq!(show(&client, "db").await, None, "nothing is left of it");
    assert!(node.stop().await.clean);

    let (node, client) = node_with(17).await;
    create_volume(&client, "db", "zoo").await;
    assert!(node.stop().await.clean);

    let (node, client) = node_with(16).await;
    let mut offline = Vec::new();
    for name in ["web", "db"] {
        match show(&client, name).await.unwrap().state {
            VolumeState::Online => {}
            VolumeState::Offline { reason } => offline.push((name, reason)),
            state => panic!("{name} is {state:?}"),
        }
    }
    let [(name, reason)] = &offline[..] else { panic!("{offline:?}") };
    assert!(reason.contains("set cores.memory to \"17MiB\" or more"), "{reason}");
    let status = status(&client).await;
    assert_eq!(status.verdict, Verdict::Unavailable);
    let subject = format!("volume {name}");
    let found = status.findings.iter().find(|f| f.subject == subject);
    assert!(found.is_some_and(|f| f.message.contains("17MiB")), "{status:?}");
    assert!(node.stop().await.clean);
}

/// A file whose path is longer than the serial number that a pool keeps of it: its end, with
/// slashes.
fn far_disk(dir: &Path, name: &str) -> PathBuf {
    let far = dir.join("images of virtual machines/100% full?/#1/some more of a path that is long");
    fs::create_dir_all(&far).unwrap();
    disk(&far, name)
}

#[tokio::test]
async fn disks_are_named_by_serial_numbers_with_slashes_and_by_any_path_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c] = &["a", "b", "c"].map(|name| far_disk(dir.path(), name));
    let made = client.call::<CreatePool>(&new("tank", 1, &[a, b, c], &[])).await.unwrap();
    let serial_of = |pool: &Pool, path: &PathBuf| {
        let disk = pool.disks.iter().find(|d| d.path.as_ref() == Some(path)).unwrap();
        disk.serial.clone().unwrap()
    };
    let (lost, serial) = (serial_of(&made, b), serial_of(&made, c));
    assert!(serial.contains('/') && c.to_str().unwrap().ends_with(&serial), "{serial}");
    let remove = RemoveDisk { disk: serial, cancel: false };
    client.call_on::<RemovePoolDisk>(&pool("tank"), &[], &remove).await.unwrap();
    let gone = |p: &Pool| p.disks.len() == 2;
    until(async || get(&client, "tank").await, gone).await;
    let link = dir.path().join("by-id");
    std::os::unix::fs::symlink(b, &link).unwrap();
    let disk = link.to_str().unwrap().to_owned();
    let replace = ReplaceDisk { disk, with: c.clone(), overwrite: Vec::new() };
    client.call_on::<ReplacePoolDisk>(&pool("tank"), &[], &replace).await.unwrap();
    let moved = |p: &Pool| p.disks.len() == 2 && p.disks.iter().any(|d| d.path.as_ref() == Some(c));
    until(async || get(&client, "tank").await, moved).await;
    let none = RemoveDisk { disk: lost, cancel: false };
    let refused = refusal(client.call_on::<RemovePoolDisk>(&pool("tank"), &[], &none).await);
    assert!(refused.message.contains("has no disk"), "{refused:?}");
    assert!(node.stop().await.clean);

    // A missing disk can be named by its path too.
    fs::rename(c, c.with_extension("gone")).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert!(matches!(get(&client, "tank").await.state, PoolState::Offline { .. }));
    let without = vec![c.to_str().unwrap().to_owned()];
    let open = OpenPoolRequest { without, take_over: false, confirm: pool("tank") };
    client.call_on::<OpenPool>(&pool("tank"), &[], &open).await.unwrap();
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_pool_is_created_again_only_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [a, b, c, d] = &["a", "b", "c", "d"].map(|name| disk(dir.path(), name));
    let asked = new("tank", 5, &[a, b, c], &[]);
    let made = client.call::<CreatePool>(&asked).await.unwrap();
    assert_eq!(client.call::<CreatePool>(&asked).await.unwrap().id, made.id);
    let other = new("tank", 5, &[c, a, b], &[]);
    assert_eq!(client.call::<CreatePool>(&other).await.unwrap().id, made.id, "in another order");
    let chunk_bytes = 16 << 10;
    for (other, says) in [
        (new("tank", 0, &[a, b, c], &[]), "level (RAID 5)"),
        (new("tank", 5, &[a, b, c, d], &[]), "list of disks"),
        (new("tank", 5, &[a, b, d], &[]), "list of disks"),
        (new("tank", 5, &[a, b, c], &[d]), "list of spares (none)"),
        (CreatePoolRequest { chunk_bytes, ..asked.clone() }, "chunk size (64 KiB)"),
        (CreatePoolRequest { checksums: true, ..asked.clone() }, "choice of checksums (without)"),
        (new("tank", 1, &[a], &[]), "disks"),
    ] {
        let refused = refusal(client.call::<CreatePool>(&other).await);
        assert!(refused.message.contains(says), "{refused:?}");
    }
    let both = CreatePoolRequest { chunk_bytes, ..new("tank", 0, &[a, b], &[]) };
    let refused = refusal(client.call::<CreatePool>(&both).await).message;
    assert!(
        ["level", "chunk size", "list of disks"].iter().all(|s| refused.contains(s)),
        "{refused}"
    );
    // Volumes too: a request that names another pool is a different one.
    create_volume(&client, "web", "tank").await;
    create_volume(&client, "web", "tank").await;
    for backing in [r#"{"kind":"pool","pool":"nope"}"#, r#"{"kind":"file"}"#] {
        let json = format!(
            r#"{{"name":"web","size_bytes":67108864,"thin":false,"backing":{backing},"allow":["any"]}}"#
        );
        let refused = refusal(client.call::<CreateVolume>(&ask(&json)).await);
        let says = refused.message;
        assert!(
            says.contains("another provisioning (it is thin), another place (it is in pool tank"),
            "{says}"
        );
    }
    assert!(node.stop().await.clean);
}
