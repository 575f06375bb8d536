//! Virtual machines at a node's own sockets: the same volume as for initiators, without a network.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{ask, name, show, start};
use crate::guest::{self, DATA, Guest, WRITE};
use api::client::Client;
use api::endpoint::{
    AllowInitiators, CreateVolume, DELETE_FORCE, DeleteVolume, ListSessions, NoBody, SetProtocols,
};
use api::{ErrorCode, Initiator, InitiatorList, Protocol, Protocols};
use node::node::Node;
use probe::BlockClient;
use probe::iscsi::Session;
use tokio::time::{Instant, sleep};
use vhost::vhost_user::VhostUserFrontend;

const IN: u32 = 0;
const OUT: u32 = 1;

fn vhost_user() -> Protocols {
    Protocols { vhost_user: true, ..Protocols::default() }
}

async fn create(client: &Client, volume: &str) -> PathBuf {
    let protocols = r#"{"iscsi":true,"nvme":true,"vhost_user":true}"#;
    let json = format!(r#"{{"name":"{volume}","size_bytes":4194304,"protocols":{protocols}}}"#);
    let shown = client.call::<CreateVolume>(&ask(&json)).await.unwrap();
    shown.vhost_user.unwrap().socket.unwrap()
}

/// Runs blocking code, such as that of guests and hypervisors.
async fn with<T: Send + 'static>(
    mut guest: Guest,
    work: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Guest, T) {
    let run = move || {
        let done = work(&mut guest);
        (guest, done)
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

async fn boot(socket: &Path) -> Guest {
    until("listened at", || std::os::unix::net::UnixStream::connect(socket).is_ok()).await;
    let socket = socket.to_owned();
    tokio::task::spawn_blocking(move || Guest::boot(&socket, 1)).await.unwrap()
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < guest::PATIENCE, "{what}");
        sleep(Duration::from_millis(5)).await;
    }
}

fn write(guest: &mut Guest, byte: u8) -> u8 {
    guest.put(DATA + 0x1000, &[byte; 4096]);
    guest.plain(0, OUT, 8, (4096, 0)).0
}

fn read(guest: &mut Guest) -> u8 {
    assert_eq!(guest.plain(0, IN, 8, (4096, WRITE)).0, 0);
    guest.get(DATA + 0x1000, 1)[0]
}

async fn guests_of(client: &Client) -> Vec<api::Session> {
    let all = client.call::<ListSessions>(&NoBody).await.unwrap().sessions;
    all.into_iter().filter(|s| s.protocol == Protocol::VhostUser).collect()
}

/// Guests and initiators see each other's writes, and reservations of each exclude the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_and_an_initiator_have_one_volume() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let socket = create(&client, "web").await;
    assert_eq!(socket, dir.path().join("vhost/web.sock"));
    let any = InitiatorList { initiators: vec![Initiator::Any] };
    client.call_on::<AllowInitiators>(&name("web"), &[], &any).await.unwrap();
    let guest = boot(&socket).await;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o660, 0o750));

    let (guest, ()) = with(guest, |g| assert_eq!(write(g, 0x11), 0)).await;
    let portal = node.portals().iscsi[0];
    let initiator = tokio::task::spawn_blocking(move || {
        let target = "iqn.2026-01.io.windrose:web";
        let mut s = Session::login(portal, "iqn.1993-08.org.debian:01:a", target, 0, 1).unwrap();
        let mut into = vec![0; 4096];
        while s.read(8, &mut into).is_err() {}
        assert_eq!(into, [0x11; 4096]);
        s.write(8, &[0x22; 4096], false).unwrap();
        s
    });
    let initiator = initiator.await.unwrap();
    let (guest, found) = with(guest, read).await;
    assert_eq!(found, 0x22);

    let held = tokio::task::spawn_blocking(move || {
        let mut initiator = initiator;
        // RESERVE(6) excludes all others.
        let mut cdb = [0; 16];
        cdb[0] = 0x16;
        initiator.execute(&cdb, &[], &mut []).unwrap();
        initiator
    });
    let initiator = held.await.unwrap();
    let (guest, ()) = with(guest, |g| {
        assert_eq!(write(g, 0x33), 1);
        assert_eq!(g.plain(0, IN, 8, (4096, WRITE)).0, 1);
    })
    .await;
    drop(initiator);
    let (guest, ()) = with(guest, |g| while write(g, 0x33) != 0 {}).await;

    let io = show(&client, "web").await.unwrap().io.unwrap();
    assert!(io.writes >= 3 && io.reads >= 2, "{io:?}");
    assert!(node.stop().await.clean);
    assert!(!socket.exists());
    drop(guest);
}

/// Exports can be changed, and a volume in use by a guest cannot be deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_is_a_session() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let socket = create(&client, "web").await;
    let other = create(&client, "other").await;
    let (guest, ()) = with(boot(&socket).await, |g| assert_eq!(write(g, 1), 0)).await;
    let sessions = guests_of(&client).await;
    let [session] = &sessions[..] else { panic!("{sessions:?}") };
    assert_eq!(
        (&session.volumes[..], session.peer.as_str()),
        (&[name("web")][..], socket.to_str().unwrap())
    );
    assert_eq!(show(&client, "web").await.unwrap().sessions, 1);
    let refused = client.call_on::<DeleteVolume>(&name("web"), &[], &NoBody).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::InUse));
    assert!(refused.to_string().contains("a virtual machine"), "{refused}");

    // No longer exported: the guest loses it, and regains it later.
    let without = client.call_on::<SetProtocols>(&name("web"), &[], &Protocols::default()).await;
    assert_eq!(without.unwrap().vhost_user, None);
    until("it is gone", || !socket.exists()).await;
    let (guest, gone) = with(guest, |g| g.monitor.get_queue_num().is_err()).await;
    assert!(gone, "it was hung up on");
    assert_eq!(guests_of(&client).await, []);
    client.call_on::<SetProtocols>(&name("web"), &[], &vhost_user()).await.unwrap();
    until("it is back", || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
    let path = socket.clone();
    let (guest, found) = with(guest, move |g| {
        g.reconnect(&path);
        read(g)
    })
    .await;
    assert_eq!(found, 1);
    client.call_on::<DeleteVolume>(&name("web"), &[DELETE_FORCE], &NoBody).await.unwrap();
    assert!(!socket.exists() && other.exists());
    drop(guest);
    client.call_on::<DeleteVolume>(&name("other"), &[], &NoBody).await.unwrap();
    assert!(node.stop().await.clean);
}

/// Another file at the socket's path is reported and left alone; a socket of a dead process is
/// replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_are_taken_over_from_the_dead_alone() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("vhost");
    std::fs::create_dir(&directory).unwrap();
    drop(std::os::unix::net::UnixListener::bind(directory.join("web.sock")).unwrap());
    let living = std::os::unix::net::UnixListener::bind(directory.join("other.sock")).unwrap();
    let (node, client) = start(dir.path(), "").await;
    let (web, other) = (create(&client, "web").await, create(&client, "other").await);
    let (guest, ()) = with(boot(&web).await, |g| assert_eq!(write(g, 1), 0)).await;
    assert!(other.exists());
    drop(living);
    let (second, ()) = with(boot(&other).await, |g| assert_eq!(write(g, 2), 0)).await;
    drop((guest, second));
    assert!(node.stop().await.clean);
}

/// A restart is a pause: the next process completes requests in flight, and those that arrived
/// meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_outlives_its_node() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let socket = create(&client, "web").await;
    let (guest, ()) = with(boot(&socket).await, |g| assert_eq!(write(g, 7), 0)).await;
    assert!(node.stop().await.clean);
    let (guest, head) = with(guest, |g| {
        g.header(DATA, IN, 8);
        g.put(DATA + 0x1000, &[0; 4096]);
        let parts = [(DATA, 16, 0), (DATA + 0x1000, 4096, WRITE), (DATA + 16, 1, WRITE)];
        g.rings[0].send(&g.memory, &parts).unwrap()
    })
    .await;
    let (node, _client): (Node, Client) = start(dir.path(), "").await;
    until("it is back", || std::os::unix::net::UnixStream::connect(&socket).is_ok()).await;
    let (guest, ()) = with(guest, move |g| {
        g.reconnect(&socket);
        assert_eq!(g.rings[0].wait(&g.memory), [(head, 4097)]);
        assert_eq!(g.get(DATA + 0x1000, 4096), [7; 4096]);
    })
    .await;
    drop(guest);
    assert!(node.stop().await.clean);
}
