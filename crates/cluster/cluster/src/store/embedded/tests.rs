use std::os::unix::fs::PermissionsExt;

use super::database::{StoreDatabase, is_catching_panics};
use super::*;
use crate::store::Precondition;

fn put(key: &str, expect: Precondition, value: &str) -> Change {
    Change { key: key.into(), precondition: expect, value: Some(value.into()) }
}

fn store() -> (tempfile::TempDir, EmbeddedStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&dir.path().join("store.redb")).unwrap();
    (dir, store)
}

#[tokio::test]
async fn commits_are_all_or_nothing_and_survive_reopening() {
    let (dir, store) = store();
    let first = vec![put("a/1", Precondition::Absent, "x"), put("a/2", Precondition::Absent, "y")];
    let one = store.commit(first).await.unwrap();
    let both =
        vec![put("a/1", Precondition::AtRevision(one), "z"), put("a/2", Precondition::Absent, "z")];
    let refused = store.commit(both).await.unwrap_err();
    assert_eq!(refused, StoreError::Conflict { key: "a/2".into() });
    assert_eq!(store.get("a/1").await.unwrap().unwrap().value, b"x");
    drop(store);
    let store = EmbeddedStore::open(&dir.path().join("store.redb")).unwrap();
    let (entries, revision) = store.list("a/").await.unwrap();
    assert_eq!(revision, one);
    let keys: Vec<_> = entries.iter().map(|e| e.key.as_str()).collect();
    assert_eq!(keys, ["a/1", "a/2"]);
    let gone =
        Change { key: "a/1".into(), precondition: Precondition::AtRevision(one), value: None };
    let two = store.commit(vec![gone]).await.unwrap();
    assert!(two > one);
    assert_eq!(store.get("a/1").await.unwrap(), None);
}

#[tokio::test]
async fn a_list_stops_at_the_end_of_its_prefix() {
    let (_dir, store) = store();
    let all = ["a", "a/1", "a/2", "a0", "b"];
    store.commit(all.iter().map(|k| put(k, Precondition::Absent, "")).collect()).await.unwrap();
    let (entries, _) = store.list("a/").await.unwrap();
    assert_eq!(entries.len(), 2);
}

#[tokio::test]
async fn followers_see_every_change_in_order() {
    let (_dir, store) = store();
    let one = store.commit(vec![put("v/1", Precondition::Absent, "")]).await.unwrap();
    let mut late = store.watch("v/", one);
    let mut early = store.watch("v/", Revision(0));
    store.commit(vec![put("other", Precondition::Absent, "")]).await.unwrap();
    let gone =
        Change { key: "v/1".into(), precondition: Precondition::AtRevision(one), value: None };
    let three = store.commit(vec![gone]).await.unwrap();
    assert_eq!(early.next_event().await.unwrap().revision, one);
    let removal = ChangeEvent { key: "v/1".into(), is_removal: true, revision: three };
    assert_eq!(early.next_event().await.unwrap(), removal);
    assert_eq!(late.next_event().await.unwrap(), removal);
    let waiting = tokio::spawn(async move { late.next_event().await });
    tokio::task::yield_now().await;
    store.commit(vec![put("v/2", Precondition::Absent, "")]).await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().key, "v/2");
}

#[tokio::test]
async fn a_follower_that_is_too_slow_is_told() {
    let (_dir, store) = store();
    let mut watch = store.watch("", Revision(0));
    let many = |from: usize| {
        (from..from + MAX_HISTORY_EVENTS).map(|i| put(&i.to_string(), Precondition::Absent, ""))
    };
    store.commit(many(0).collect()).await.unwrap();
    store.commit(many(MAX_HISTORY_EVENTS).collect()).await.unwrap();
    let refused = watch.next_event().await.unwrap_err();
    assert_eq!(refused, StoreError::Compacted { after: Revision(0) });
}

#[test]
fn only_the_owner_may_read_it() {
    let (dir, _store) = store();
    let meta = fs::metadata(dir.path().join("store.redb")).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_store_of_another_version_is_refused() {
    let (dir, store) = store();
    let path = dir.path().join("store.redb");
    drop(store);
    for format in [FORMAT - 1, FORMAT + 1] {
        StoreDatabase::open(&path).unwrap().set_format(format);
        let refused = EmbeddedStore::open(&path).unwrap_err();
        let expected = StoreError::UnsupportedFormat {
            path: path.display().to_string(),
            found: format,
            supported: FORMAT,
        };
        assert_eq!(refused, expected);
        assert!(refused.to_string().contains("this version supports format 3"), "{refused}");
    }
    StoreDatabase::open(&path).unwrap().set_format(FORMAT);
    EmbeddedStore::open(&path).unwrap();
}

#[test]
fn what_is_no_store_is_told_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    fs::write(path.with_extension("new"), b"half made").unwrap();
    EmbeddedStore::open(&path).unwrap();
    let good = fs::read(&path).unwrap();
    let cases: [(&[u8], &str); 6] = [
        (b"", "the file is empty"),
        (b"redb", "the file has 4 bytes, less than any store"),
        (&[0; 4096], "the file begins with zeroes"),
        (b"this is no store", "the file is not a store"),
        (&good[..4096], "store.redb is damaged: "),
        (&good[..320], "store.redb is damaged: "),
    ];
    for (contents, why) in cases {
        fs::write(&path, contents).unwrap();
        let refused = EmbeddedStore::open(&path).unwrap_err();
        assert!(matches!(refused, StoreError::Damaged { .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), contents, "it is left as it was");
    }
}

#[test]
fn a_store_that_cannot_be_looked_at_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("store.redb"), dir.path().join("not mounted/store"));
    std::os::unix::fs::symlink(&away, &path).unwrap();
    let refused = EmbeddedStore::open(&path).unwrap_err().to_string();
    assert!(refused.contains("store.redb failed:"), "{refused}");
    assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
}

const SECRET: &str = "chap of the volume";

/// What a damaged store reports: the whole last commit, or that it is damaged.
#[derive(Debug, PartialEq)]
enum Said {
    Everything,
    Damaged,
    /// Anything else, which must not happen.
    Other(String),
}

async fn ask(path: &Path) -> Said {
    let opened = {
        let path = path.to_owned();
        tokio::task::spawn_blocking(move || EmbeddedStore::open_existing(&path)).await
    };
    let store = match opened.expect("nothing panics out of the store") {
        Ok(store) => store,
        Err(StoreError::Damaged { .. } | StoreError::UnsupportedFormat { .. }) => {
            return Said::Damaged;
        }
        Err(other) => return Said::Other(other.to_string()),
    };
    match store.list("").await {
        Ok((entries, _)) if entries.iter().any(|e| e.checksum_error.is_some()) => Said::Damaged,
        Ok((entries, _)) => {
            let guarded = entries.iter().filter(|e| e.value == SECRET.as_bytes()).count();
            if (entries.len(), guarded) == (8, 8) {
                Said::Everything
            } else {
                Said::Other(format!("{} records, {guarded} with CHAP", entries.len()))
            }
        }
        Err(StoreError::Damaged { .. }) => Said::Damaged,
        Err(other) => Said::Other(other.to_string()),
    }
}

/// A store whose last commit has enabled CHAP on every volume, and its bytes.
async fn guarded() -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let (dir, store) = store();
    let path = dir.path().join("store.redb");
    let keys: Vec<_> = (0..8).map(|i| format!("volumes/{i}")).collect();
    let open = keys.iter().map(|key| put(key, Precondition::Absent, "no chap")).collect();
    let at = store.commit(open).await.unwrap();
    let guard = keys.iter().map(|key| put(key, Precondition::AtRevision(at), SECRET)).collect();
    store.commit(guard).await.unwrap();
    drop(store);
    let good = fs::read(&path).unwrap();
    (dir, path, good)
}

/// Offsets of the file's pages that are not empty.
fn pages(good: &[u8]) -> Vec<usize> {
    let used = |at: &usize| good[*at..(at + 4096).min(good.len())].iter().any(|b| *b != 0);
    (0..good.len()).step_by(4096).filter(used).collect()
}

/// Every bit of what the library reads first, and a sample of those of the header and of every
/// page.
#[tokio::test]
async fn no_flipped_bit_of_the_file_takes_chap_from_a_volume() {
    let (_dir, path, good) = guarded().await;
    let header = (0..16 * 8).chain((16 * 8..320 * 8).step_by(17));
    let sample = pages(&good)
        .into_iter()
        .flat_map(|at| (0..4096 * 8).step_by(4093).map(move |bit| at * 8 + bit));
    for bit in header.chain(sample).filter(|bit| *bit < good.len() * 8) {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bad).unwrap();
        let outcome = ask(&path).await;
        assert!(!matches!(outcome, Said::Other(_)), "bit {bit} of byte {}: {outcome:?}", bit / 8);
    }
}

#[tokio::test]
async fn random_bytes_in_a_page_are_an_error_and_no_panic() {
    let (_dir, path, good) = guarded().await;
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut damaged = 0;
    for at in pages(&good) {
        for len in [16, 512, 4096] {
            let mut bad = good.clone();
            let end = (at + len).min(bad.len());
            for byte in &mut bad[at..end] {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                *byte = random.to_le_bytes()[3];
            }
            fs::write(&path, &bad).unwrap();
            let outcome = ask(&path).await;
            assert!(!matches!(outcome, Said::Other(_)), "{len} bytes at {at}: {outcome:?}");
            damaged += usize::from(outcome == Said::Damaged);
        }
    }
    assert!(damaged > 3, "{damaged}");
    assert!(!is_catching_panics());
}

/// A record changed through the library, but without our checksum.
#[tokio::test]
async fn a_record_without_its_checksum_is_listed_as_damaged() {
    let (_dir, store) = store();
    let at = store.commit(vec![put("volumes/1", Precondition::Absent, "x")]).await.unwrap();
    {
        let entry = store.0.database.read().unwrap();
        entry.as_ref().unwrap().write_raw("volumes/1", b"{\"chap\":null}");
    }
    let (entries, _) = store.list("volumes/").await.unwrap();
    assert_eq!(entries[0].value, b"");
    let why = entries[0].contents().unwrap_err().to_string();
    assert!(why.starts_with("volumes/1 is damaged: it has no checksum"), "{why}");
    assert_eq!(store.get("volumes/1").await.unwrap().unwrap(), entries[0]);
    // A commit that expects its revision can replace it.
    store.commit(vec![put("volumes/1", Precondition::AtRevision(at), "y")]).await.unwrap();
    assert_eq!(store.get("volumes/1").await.unwrap().unwrap().value, b"y");
}

/// No space, and a failing disk: the error is reported, and the next call works again.
#[tokio::test]
async fn a_store_whose_disk_works_again_works_again() {
    const NO_SPACE: i32 = 28;
    const IO_ERROR: i32 = 5;
    let (_dir, store) = store();
    let mut followed = store.watch("", Revision(0));
    store.commit(vec![put("a", Precondition::Absent, "1")]).await.unwrap();
    assert_eq!(store.problem().await.unwrap(), None);
    for errno in [NO_SPACE, IO_ERROR] {
        break_writes(&store, Some(errno));
        // Reopening repairs the file, so the second attempt may succeed.
        let key = format!("b/{errno}");
        let told = store.commit(vec![put(&key, Precondition::Absent, "2")]).await;
        assert!(told.is_ok(), "{told:?}");
        assert_eq!(store.get(&key).await.unwrap().unwrap().value, b"2");
    }
    assert_eq!(store.get("a").await.unwrap().unwrap().value, b"1");
    let c = store.commit(vec![put("c", Precondition::Absent, "3")]).await.unwrap();
    assert_eq!(store.problem().await.unwrap(), None);
    // A watcher sees every change, or learns that it missed some.
    loop {
        match followed.next_event().await {
            Ok(event) if event.revision == c => break,
            Ok(_) => {}
            Err(StoreError::Compacted { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
}

fn break_writes(store: &EmbeddedStore, errno: Option<i32>) {
    let guard = store.0.database.read().unwrap();
    guard.as_ref().unwrap().file().break_writes(errno);
}

#[tokio::test]
async fn a_panic_in_the_library_closes_the_store_and_nothing_else() {
    let (_dir, store) = store();
    store.commit(vec![put("a", Precondition::Absent, "1")]).await.unwrap();
    let error = {
        let inner = Arc::clone(&store.0);
        let call = move || inner.with_database::<()>(StoreDatabase::panic);
        tokio::task::spawn_blocking(call).await.unwrap().unwrap_err()
    };
    assert!(matches!(&error, StoreError::Damaged { why, .. } if why.contains("page 7")), "{error}");
    assert_eq!(store.get("a").await.unwrap().unwrap().value, b"1");
}
