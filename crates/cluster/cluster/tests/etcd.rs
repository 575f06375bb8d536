//! A real etcd cluster that loses members, its leader, or all of them for a while.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{
    EtcdCluster, TEST_TIMEOUT, etcd, free_address, members, put_key, retry_unreachable, serves,
};
use cluster::etcd_member::{
    EtcdState, EtcdSupervisor, InitialClusterState, PermanentFailure, TlsFiles,
};
use cluster::identity::LocalStoreMember;
use cluster::join_error::JoinError;
use cluster::node_membership;
use cluster::store::etcd::{EtcdSettings, EtcdStore, EtcdTls, MemberHealth, MemberResponse};
use cluster::store::{MetadataStore, Precondition, Revision, StoreError, store_format};
use cluster::testing::{increment_once, put};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const WRITERS: u64 = 4;
const EACH: u64 = 80;

/// Watches the counter: every revision once, in order, as many as there are increments.
async fn follow(store: EtcdStore, begin: Revision) -> Revision {
    let mut watch = store.watch("n", begin);
    let mut last = begin;
    for seen in 0..WRITERS * EACH {
        let event = timeout(TEST_TIMEOUT, watch.next_event()).await;
        let event = event.unwrap_or_else(|_| panic!("no change after {seen}")).unwrap();
        assert!(event.revision > last && !event.is_removal, "{event:?} after {last}");
        last = event.revision;
    }
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_loses_and_doubles_nothing() {
    let Some(mut cluster) = EtcdCluster::start(3).await else { return };
    let store = cluster.store();
    let begin = put_key(&store, "n", "0").await;
    let follower = tokio::spawn(follow(cluster.store(), begin));
    let (done, unknown) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut writers = JoinSet::new();
    for writer in 1..=WRITERS {
        let (store, done, unknown) = (cluster.store(), Arc::clone(&done), Arc::clone(&unknown));
        writers.spawn(async move {
            for round in 0..EACH {
                let doubts = increment_once(&store, &format!("{writer} {round}")).await;
                unknown.fetch_add(doubts, Ordering::Relaxed);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    // A leader dies twice in the middle of the stream; the first one is back before the second
    // dies.
    let all = WRITERS * EACH;
    for part in [all / 4, all / 2] {
        while done.load(Ordering::Relaxed) < part {
            sleep(Duration::from_millis(5)).await;
        }
        let leader = cluster.leader().await;
        cluster.kill(leader);
        sleep(Duration::from_millis(300)).await;
        cluster.revive(leader);
    }
    timeout(TEST_TIMEOUT, writers.join_all()).await.expect("the writers end");
    let counter = retry_unreachable(async || store.get("n").await).await.unwrap();
    let text = String::from_utf8(counter.value).unwrap();
    assert_eq!(text, all.to_string());
    assert_eq!(follower.await.unwrap(), counter.revision);
    println!("{} commits were in doubt", unknown.load(Ordering::Relaxed));
}

#[tokio::test]
async fn an_outage_of_all_members_is_bounded_and_heals() {
    let Some(mut cluster) = EtcdCluster::start(3).await else { return };
    let store = cluster.store();
    let one = put_key(&store, "k", "x").await;
    let mut watch = store.watch("k", one);
    let announced = store.put_leased("alive", b"yes", Duration::from_secs(2));
    appears(&store, "alive").await;
    let (_, at) = retry_unreachable(async || store.list("").await).await;
    (0..3).for_each(|at| cluster.kill(at));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let call = Instant::now();
        let read = store.get("k").await;
        assert!(matches!(read, Err(StoreError::Unreachable { .. })), "{read:?}");
        let commit = store.commit(vec![put("k", Precondition::AtRevision(one), "y")]).await;
        let refused = matches!(
            commit,
            Err(StoreError::Unreachable { .. } | StoreError::Indeterminate { .. })
        );
        assert!(refused, "{commit:?}");
        // Two calls, three members, one second each at the most.
        assert!(call.elapsed() < Duration::from_secs(7), "{:?}", call.elapsed());
        let event = timeout(Duration::from_millis(50), watch.next_event()).await;
        assert!(event.is_err(), "{event:?}");
    }
    (0..3).for_each(|at| cluster.revive(at));
    serves(&store).await;
    // Only the store knows whether a commit of the outage took effect.
    let entry = retry_unreachable(async || store.get("k").await).await.unwrap();
    let change = || vec![put("k", Precondition::AtRevision(entry.revision), "z")];
    let two = retry_unreachable(async || store.commit(change()).await).await;
    let event = timeout(TEST_TIMEOUT, watch.next_event()).await.unwrap().unwrap();
    assert!(event.revision == two || event.revision == entry.revision);
    assert!(at < two);
    appears(&store, "alive").await;
    drop(announced);
    let begun = Instant::now();
    while retry_unreachable(async || store.get("alive").await).await.is_some() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the key outlives its owner");
        sleep(Duration::from_millis(100)).await;
    }
}

async fn appears(store: &EtcdStore, key: &str) {
    let begun = Instant::now();
    while !matches!(store.get(key).await, Ok(Some(_))) {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{key} does not appear");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_dead_member_costs_one_try_once() {
    let Some(cluster) = EtcdCluster::start(1).await else { return };
    // An address that swallows what is sent to it, as a host without power does: a listener whose
    // queue is full.
    #[allow(clippy::disallowed_methods, reason = "a test with real processes")]
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let mut settings = cluster.settings();
    settings.endpoints.insert(0, url);
    let store = EtcdStore::new(&settings).unwrap();
    let begun = Instant::now();
    store.commit(vec![put("k", Precondition::Absent, "")]).await.unwrap_err();
    let first = begun.elapsed();
    assert!(first >= settings.attempt_timeout, "{first:?}");
    let begun = Instant::now();
    for _ in 0..20 {
        store.get("k").await.unwrap();
    }
    assert!(begun.elapsed() < settings.attempt_timeout, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_new_store_gets_its_format_and_a_newer_one_is_refused() {
    let Some(cluster) = EtcdCluster::start(1).await else { return };
    let store = cluster.store();
    store_format::check_or_init(&store, store.name()).await.unwrap();
    store_format::check_or_init(&store, store.name()).await.unwrap();
    let entry = store.get(store_format::FORMAT_KEY).await.unwrap().unwrap();
    let newer = store
        .commit(vec![put(store_format::FORMAT_KEY, Precondition::AtRevision(entry.revision), "99")])
        .await
        .unwrap();
    let refused = store_format::check_or_init(&store, store.name()).await;
    assert!(matches!(refused, Err(StoreError::UnsupportedFormat { found: 99, .. })), "{refused:?}");
    store
        .commit(vec![put(store_format::FORMAT_KEY, Precondition::AtRevision(newer), "?")])
        .await
        .unwrap();
    let refused = store_format::check_or_init(&store, store.name()).await;
    assert!(matches!(refused, Err(StoreError::Failed { .. })), "{refused:?}");
}

/// An authority, and a certificate of it for the loopback.
fn certificates(dir: &Path) -> TlsFiles {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let ca = params.self_signed(&key).unwrap();
    let issuer = Issuer::new(params, key);
    let own = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    let cert = cert.signed_by(&own, &issuer).unwrap();
    let write = |name: &str, pem: String| {
        let path = dir.join(name);
        std::fs::write(&path, pem).unwrap();
        path
    };
    TlsFiles {
        ca: write("ca.pem", ca.pem()),
        cert: write("cert.pem", cert.pem()),
        key: write("key.pem", own.serialize_pem()),
    }
}

/// Waits until the supervisor reports what is `wanted`.
async fn reports(supervisor: &EtcdSupervisor, wanted: impl Fn(&EtcdState) -> bool) -> EtcdState {
    let mut state = supervisor.state();
    let found = timeout(TEST_TIMEOUT, state.wait_for(|s| wanted(s))).await;
    found.unwrap_or_else(|_| panic!("still {:?}", supervisor.state().borrow())).unwrap().clone()
}

#[tokio::test]
async fn a_supervised_member_serves_over_tls_and_comes_back_when_killed() {
    let Some(program) = etcd() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut member = members(1, dir.path()).remove(0);
    let tls = certificates(dir.path());
    for url in [&mut member.peer_url, &mut member.client_url, &mut member.initial_cluster[0].1] {
        *url = url.replace("http:", "https:");
    }
    member.tls = Some(tls.clone());
    let supervisor = EtcdSupervisor::start(program, member.clone());
    let identity = Some((tls.cert, tls.key));
    let settings = EtcdSettings {
        endpoints: vec![member.client_url.clone()],
        tls: Some(EtcdTls { ca: tls.ca.clone(), identity }),
        ..EtcdSettings::default()
    };
    let store = EtcdStore::new(&settings).unwrap();
    reports(&supervisor, |s| *s == EtcdState::Running).await;
    serves(&store).await;
    put_key(&store, "k", "x").await;
    // Without a certificate access is refused.
    let stranger = EtcdTls { ca: tls.ca, identity: None };
    let stranger =
        EtcdStore::new(&EtcdSettings { tls: Some(stranger), ..settings.clone() }).unwrap();
    let refused = stranger.get("k").await;
    // The connection may be gone before the reason has been read.
    let expected =
        matches!(refused, Err(StoreError::TlsRejected { .. } | StoreError::Unreachable { .. }));
    assert!(expected, "{refused:?}");
    // A client that trusts another authority gets a certificate error.
    let elsewhere = tempfile::tempdir().unwrap();
    let other = EtcdTls { ca: certificates(elsewhere.path()).ca, identity: None };
    let other = EtcdStore::new(&EtcdSettings { tls: Some(other), ..settings }).unwrap();
    let refused = other.get("k").await;
    let Err(StoreError::TlsRejected { why, .. }) = refused else { panic!("{refused:?}") };
    assert!(why.contains("invalid peer certificate"), "{why}");
    // `exec` keeps the process id: etcd itself is killed.
    kill(&member.data_dir);
    reports(&supervisor, |s| matches!(s, EtcdState::Restarting { .. })).await;
    reports(&supervisor, |s| *s == EtcdState::Running).await;
    serves(&store).await;
    let entry = retry_unreachable(async || store.get("k").await).await.unwrap();
    assert_eq!(entry.value, b"x");
    let state = supervisor.state();
    assert!(supervisor.stop(Duration::from_secs(20)).await);
    assert_eq!(*state.borrow(), EtcdState::Stopped);
}

/// Kills the etcd whose data is in `data_dir`.
fn kill(data_dir: &Path) {
    let wanted = format!("--data-dir={}", data_dir.display());
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.split(|b| *b == 0).any(|argument| argument == wanted.as_bytes()) {
            let pid = entry.file_name().to_str().unwrap().parse().unwrap();
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            return;
        }
    }
    panic!("no etcd runs in {}", data_dir.display());
}

#[tokio::test]
async fn a_member_joins_is_removed_and_what_is_wrong_is_named() {
    let Some(mut cluster) = EtcdCluster::start(2).await else { return };
    let store = cluster.store();
    let mut third = cluster.members[0].clone();
    third.name = "third".into();
    third.data_dir = cluster.dir.path().join("third");
    third.peer_url = format!("http://{}", free_address());
    third.client_url = format!("http://{}", free_address());
    third.initial_cluster_state = InitialClusterState::Existing;
    third.initial_cluster.push((third.name.clone(), third.peer_url.clone()));
    // A cluster refuses membership changes in its first seconds.
    let begun = Instant::now();
    let added = loop {
        match store.add_member(&third.peer_url, false).await {
            Ok(added) => break added,
            Err(e) => assert!(begun.elapsed() < TEST_TIMEOUT, "{e}"),
        }
        sleep(Duration::from_millis(200)).await;
    };
    let supervisor = EtcdSupervisor::start(etcd().unwrap(), third.clone());
    reports(&supervisor, |s| *s == EtcdState::Running).await;
    // It reports its name once it serves, and the asked member may be behind.
    let begun = Instant::now();
    let members = async || store.members().await;
    while !retry_unreachable(members).await.iter().any(|m| m.name == "third" && !m.is_learner) {
        assert!(begun.elapsed() < TEST_TIMEOUT, "the third member is not known");
        sleep(Duration::from_millis(50)).await;
    }
    // Its data is lost, and it starts as if the cluster were new.
    let lost = cluster.members[1].clone();
    cluster.kill(1);
    std::fs::remove_dir_all(&lost.data_dir).unwrap();
    let without = EtcdSupervisor::start(etcd().unwrap(), lost.clone());
    let down = reports(&without, |s| matches!(s, EtcdState::PermanentlyDown(_))).await;
    assert_eq!(down, EtcdState::PermanentlyDown(PermanentFailure::DataLost));
    let known = retry_unreachable(members).await;
    let id = known.iter().find(|m| m.name == lost.name).unwrap().id;
    remove(&store, id).await;
    remove(&store, added.id).await;
    let down = reports(&supervisor, |s| matches!(s, EtcdState::PermanentlyDown(_))).await;
    assert_eq!(down, EtcdState::PermanentlyDown(PermanentFailure::Removed));
}

/// Removes a member, with retries: one may be down, and the others without a leader.
async fn remove(store: &EtcdStore, id: u64) {
    let begun = Instant::now();
    while let Err(e) = store.remove_member(id).await {
        // An unanswered attempt took effect.
        if e.to_string().contains("member not found") {
            return;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "{e}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// The members as `store` sees them, once they are as `wanted`.
async fn health(store: &EtcdStore, wanted: impl Fn(&[MemberHealth]) -> bool) -> Vec<MemberHealth> {
    let (begun, mut seen) = (Instant::now(), Vec::new());
    loop {
        seen = store.health(&seen, true).await;
        if wanted(&seen) {
            return seen;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "still {seen:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn members_that_are_down_and_the_want_of_a_leader_are_seen() {
    let Some(mut cluster) = EtcdCluster::start(3).await else { return };
    let store = cluster.store();
    let leads =
        |h: &MemberHealth| matches!(&h.response, MemberResponse::Running { leader: Some(_), .. });
    let silent = |h: &MemberHealth| matches!(&h.response, MemberResponse::Unreachable { .. });
    health(&store, |all| all.len() == 3 && all.iter().all(leads)).await;
    // A client limited to one address knows the other members, and does not report them as down.
    let endpoints = vec![cluster.members[0].client_url.clone()];
    let one = EtcdStore::new(&EtcdSettings { endpoints, ..cluster.settings() }).unwrap();
    let seen = one.health(&[], false).await;
    let asked: Vec<_> = seen.iter().filter(|h| h.response != MemberResponse::NotQueried).collect();
    assert!(seen.len() == 3 && asked.len() == 1 && leads(asked[0]), "{seen:?}");
    cluster.kill(1);
    let all = health(&store, |all| all.iter().filter(|h| leads(h)).count() == 2).await;
    let down = all.iter().find(|h| silent(h)).unwrap();
    assert_eq!(down.member.name, cluster.members[1].name);
    cluster.kill(2);
    // The store as a whole does not answer; the member that is left still reports its status.
    let alone =
        |h: &MemberHealth| matches!(&h.response, MemberResponse::Running { leader: None, .. });
    let all = health(&store, |all| all.iter().any(alone)).await;
    assert_eq!(all.iter().filter(|h| silent(h)).count(), 2, "{all:?}");
    cluster.kill(0);
    let begun = Instant::now();
    let dead = store.health(&all, true).await;
    assert!(dead.len() == 3 && dead.iter().all(silent), "{dead:?}");
    // An attempt of a second per member for the list, and one for all statuses.
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_learner_that_never_started_is_named_and_removed() {
    let Some(cluster) = EtcdCluster::start(1).await else { return };
    let store = cluster.store();
    let own = |at: String| LocalStoreMember {
        name: "node-9".into(),
        peer_url: format!("http://{at}"),
        client_url: format!("http://{}", free_address()),
    };
    let (never, late) = (own(free_address()), own(free_address()));
    node_membership::add_learner(&store, &never).await.unwrap();
    // The call is idempotent.
    node_membership::add_learner(&store, &never).await.unwrap();
    let refused = node_membership::add_learner(&store, &late).await.unwrap_err();
    assert_eq!(refused, JoinError::LearnerPending { member: never.peer_url.clone() });
    assert!(refused.to_string().contains(&format!("--node {}", never.peer_url)), "{refused}");
    let members = store.members().await.unwrap();
    let found = node_membership::find_member(&members, &never.peer_url).unwrap();
    store.remove_member(found.id).await.unwrap();
    node_membership::add_learner(&store, &late).await.unwrap();
}

#[tokio::test]
async fn a_damaged_member_stays_down() {
    let Some(mut cluster) = EtcdCluster::start(1).await else { return };
    cluster.kill(0);
    let member = cluster.members[0].clone();
    for file in std::fs::read_dir(member.data_dir.join("member/wal")).unwrap().flatten() {
        if file.file_name().to_str().unwrap().starts_with("0000") {
            let mut bytes = std::fs::read(file.path()).unwrap();
            bytes[200..230].fill(0xff);
            std::fs::write(file.path(), bytes).unwrap();
        }
    }
    let damaged = EtcdSupervisor::start(etcd().unwrap(), member);
    let down = reports(&damaged, |s| matches!(s, EtcdState::PermanentlyDown(_))).await;
    let corrupt = matches!(down, EtcdState::PermanentlyDown(PermanentFailure::Corrupt { .. }));
    assert!(corrupt, "{down:?}");
    assert!(damaged.last_failure().unwrap().contains("its data is damaged"));
}
