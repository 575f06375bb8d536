//! Unix sockets: who may connect, replacing a listener, leftover files.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use common::config;
use rt::{Core, Cores, DiskEngine};
use testkit::{TestDir, wait};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn on_core<Fut: Future<Output = ()> + 'static>(f: impl FnOnce(Core) -> Fut + Send + 'static) {
    common::on_core(DiskEngine::Threads, f);
}

#[test]
fn bytes_are_exchanged_and_the_socket_file_is_removed_with_the_listener() {
    let dir = TestDir::in_memory();
    let at = dir.file("socket");
    let path = at.clone();
    on_core(async move |core| {
        let listener = core.listen_unix(&path).await.unwrap();
        let mut client = core.dial_unix(&path).await.unwrap();
        let (mut server, from) = listener.accept().await.unwrap();
        assert!(from.ip().is_unspecified() && client.peer_addr().unwrap().ip().is_unspecified());
        client.write_all(b"there").await.unwrap();
        let mut got = [0; 5];
        server.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"there");
        server.write_all(b"back").await.unwrap();
        drop((server, listener));
        let mut got = Vec::new();
        client.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"back");
        let refused = core.dial_unix(&path).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound);
    });
    assert!(!at.exists());
}

#[test]
fn a_connection_moves_to_another_core() {
    let dir = TestDir::in_memory();
    let path = dir.file("socket");
    let cores = Cores::start(&config(2)).unwrap();
    let served = cores.handles()[0].run(|core| async move {
        let listener = core.listen_unix(&path).await.unwrap();
        let mut client = core.dial_unix(&path).await.unwrap();
        let moved = listener.accept().await.unwrap().0.detach().unwrap();
        let serve = move |core: Core| async move {
            core.attach(moved).unwrap().write_all(&[core.id() as u8]).await.unwrap();
        };
        core.peers()[1].post(serve).await.unwrap();
        client.read_u8().await.unwrap()
    });
    assert_eq!(wait(served).unwrap(), 1);
    cores.stop_now();
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = TestDir::in_memory();
    let at = dir.file("socket");
    drop(UnixListener::bind(&at).unwrap());
    assert!(at.exists(), "the file outlives its listener");
    let path = at.clone();
    on_core(async move |core| {
        let listener = core.listen_unix(&path).await.unwrap();
        let (dialled, accepted) = tokio::join!(core.dial_unix(&path), listener.accept());
        assert!(dialled.is_ok() && accepted.is_ok());
    });
    assert!(!at.exists());
    assert_eq!(fs::read_dir(at.parent().unwrap()).unwrap().count(), 0, "nothing is left beside it");
}

#[test]
fn a_live_listener_is_left_alone_and_reported() {
    let dir = TestDir::in_memory();
    let (at, file) = (dir.file("socket"), dir.file("file"));
    let living = UnixListener::bind(&at).unwrap();
    fs::write(&file, "precious").unwrap();
    let (path, other) = (at.clone(), file.clone());
    on_core(async move |core| {
        let refused = core.listen_unix(&path).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        let refused = core.listen_unix(&other).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        let missing = core.listen_unix(&other.join("below")).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotADirectory);
    });
    assert!(at.exists() && living.local_addr().is_ok());
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_successors_socket_file_is_kept() {
    let dir = TestDir::in_memory();
    let at = dir.file("socket");
    let path = at.clone();
    on_core(async move |core| {
        let first = core.listen_unix(&path).await.unwrap();
        fs::rename(&path, path.with_extension("old")).unwrap();
        let second = core.listen_unix(&path).await.unwrap();
        drop(first);
        assert!(core.dial_unix(&path).await.is_ok(), "the second one still listens there");
        drop(second);
        assert!(!path.exists());
    });
}

/// A connection that is closed is seen to be, whatever waits in it; one that says no more is not.
#[test]
fn a_closed_peer_is_detected_before_queued_data_is_read() {
    let dir = TestDir::in_memory();
    let path = dir.file("socket");
    on_core(async move |core| {
        let unix = core.listen_unix(&path).await.unwrap();
        let tcp = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = tcp.local_addr().unwrap();
        for by_unix in [true, false] {
            let (dialled, accepted) = match by_unix {
                true => tokio::join!(core.dial_unix(&path), unix.accept()),
                false => tokio::join!(core.dial(at), tcp.accept()),
            };
            let (mut client, (mut server, _)) = (dialled.unwrap(), accepted.unwrap());
            let line = server.hangup_monitor().unwrap();
            client.write_all(b"last words").await.unwrap();
            assert!(!line.is_hung_up());
            client.shutdown().await.unwrap();
            server.write_all(b"an answer").await.unwrap();
            assert!(!line.is_hung_up(), "it waits for answers");
            client.reset_on_drop().unwrap();
            drop(client);
            tokio::time::timeout(Duration::from_secs(10), async {
                while !line.is_hung_up() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await
            .expect("it has gone");
        }
    });
}

#[test]
fn a_socket_has_its_configured_mode() {
    let dir = TestDir::in_memory();
    let at = dir.file("socket");
    let path = at.clone();
    on_core(async move |core| {
        for mode in [0o660, 0o606] {
            let listener = core.listen_unix_for(&path, mode).await.unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
            core.dial_unix(&path).await.unwrap();
            drop(listener);
        }
    });
}
