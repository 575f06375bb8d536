//! How simulated TCP behaves, with and without faults.

use std::cell::RefCell;
use std::future::Future;
use std::io::{ErrorKind, Result as IoResult};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use rt::Core;
use rt::net::{ListenOptions, Stream};
use rt::sim::{Host, HostSetup, HostTask, World, WorldSetup, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

const PORT: u16 = 3260;
const SECOND: Duration = Duration::from_secs(1);

/// Runs a world of a client and a server for some seeds; any panic fails the test.
fn run_scenario<F, Fut>(seeds: u64, scenario: F)
where
    F: Fn(World, Host, Host) -> Fut,
    Fut: Future<Output = ()>,
{
    for seed in 0..seeds {
        let outcome = run(WorldSetup::new(seed), |world| {
            let client = world.add_host("client", HostSetup::default());
            let server = world.add_host("server", HostSetup::default());
            let scene = scenario(world, client, server);
            async move {
                scene.await;
                Ok(())
            }
        });
        outcome.result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

fn any(port: u16) -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], port))
}

/// A server that serves each connection with `serve`.
fn start<F, Fut>(server: &Host, serve: F) -> SocketAddr
where
    F: Fn(Stream) -> Fut + Clone + 'static,
    Fut: Future<Output = ()> + 'static,
{
    server.start(move |core| {
        let serve = serve.clone();
        async move {
            let listener = core.listen(any(PORT)).await.map_err(|e| e.to_string())?;
            loop {
                let (stream, _) = listener.accept().await.map_err(|e| e.to_string())?;
                tokio::task::spawn_local(serve(stream));
            }
        }
    });
    SocketAddr::new(server.address(), PORT)
}

async fn echo(mut stream: Stream) {
    let mut buf = [0; 1000];
    while let Ok(n) = stream.read(&mut buf).await {
        if n == 0 || stream.write_all(&buf[..n]).await.is_err() {
            return;
        }
    }
}

/// Connects once the server is listening.
async fn dial(core: &Core, to: SocketAddr) -> Stream {
    loop {
        match core.dial(to).await {
            Ok(stream) => return stream,
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionRefused),
        }
    }
}

async fn there_and_back(stream: &mut Stream, text: &[u8]) -> IoResult<()> {
    stream.write_all(text).await?;
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).await?;
    assert_eq!(back, text);
    Ok(())
}

async fn done<T>(task: HostTask<T>) -> T {
    task.join().await.expect("the host did not crash")
}

#[test]
fn bytes_arrive_in_order_and_in_portions_of_their_own() {
    let sizes = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&sizes);
    run_scenario(20, move |world, client, server| {
        let seen = Rc::clone(&seen);
        async move {
            let to = start(&server, move |mut stream| {
                let seen = Rc::clone(&seen);
                async move {
                    let mut buf = [0; 4096];
                    let mut next = 0u8;
                    loop {
                        let n = stream.read(&mut buf).await.unwrap();
                        if n == 0 {
                            break;
                        }
                        if n.is_multiple_of(2) {
                            tokio::time::sleep(SECOND / 100).await;
                        }
                        seen.borrow_mut().push(n);
                        for &b in &buf[..n] {
                            assert_eq!(b, next);
                            next = next.wrapping_add(1);
                        }
                    }
                    stream.write_all(b"all").await.unwrap();
                }
            });
            done(client.run(move |core| async move {
                let mut stream = dial(&core, to).await;
                let mut next = 0u8;
                for _ in 0..50 {
                    let text: Vec<u8> = (0..100).map(|i| next.wrapping_add(i)).collect();
                    next = next.wrapping_add(100);
                    stream.write_all(&text).await.unwrap();
                    tokio::time::sleep(world.rng().duration_between(Duration::ZERO, SECOND / 300))
                        .await;
                }
                stream.shutdown().await.unwrap();
                assert_eq!(
                    stream.write_all(b"x").await.unwrap_err().kind(),
                    ErrorKind::BrokenPipe,
                    "nothing after the end"
                );
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).await.unwrap();
                assert_eq!(answer, b"all", "the other half still works");
            }))
            .await;
        }
    });
    let sizes = sizes.borrow();
    assert!(sizes.iter().any(|&n| n < 100), "writes are split");
    assert!(sizes.iter().any(|&n| n > 100), "writes are joined");
}

#[test]
fn a_host_without_power_is_silent_and_loses_its_connections() {
    run_scenario(20, |_, client, server| async move {
        let to = start(&server, echo);
        let talk = client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            there_and_back(&mut stream, b"hello").await.unwrap();
            stream
        });
        let mut stream = done(talk).await;
        server.power_cut();
        let mut byte = [0];
        assert!(timeout(600 * SECOND, stream.read(&mut byte)).await.is_err(), "silence");
        stream.write_all(b"are you there?").await.expect("goes on the wire");
        assert!(timeout(60 * SECOND, stream.read(&mut byte)).await.is_err(), "still silence");
        server.restart();
        let read = timeout(5 * SECOND, stream.read(&mut byte)).await.expect("an answer");
        assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_killed_process_is_noticed_at_once() {
    run_scenario(20, |_, client, server| async move {
        let to = start(&server, echo);
        let talk = client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            there_and_back(&mut stream, b"hello").await.unwrap();
            stream
        });
        let mut stream = done(talk).await;
        server.kill();
        let mut byte = [0];
        let read = timeout(SECOND, stream.read(&mut byte)).await.expect("an end");
        assert_eq!(read.expect("an orderly one"), 0);
        // The peer's system answers later data with a reset.
        stream.write_all(b"x").await.expect("goes on the wire");
        tokio::time::sleep(SECOND).await;
        assert_eq!(stream.write_all(b"x").await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let refused = done(client.run(move |core| async move { core.dial(to).await })).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_connection_survives_a_partition_shorter_than_its_timeout() {
    run_scenario(20, |world, client, server| async move {
        let to = start(&server, echo);
        let both = (client.clone(), server.clone());
        done(client.run(move |core| async move {
            let (client, server) = both;
            let mut stream = dial(&core, to).await;
            there_and_back(&mut stream, b"before").await.unwrap();
            world.partition(&client, &server);
            let begun = Instant::now();
            let talk = timeout(100 * SECOND, there_and_back(&mut stream, b"within")).await;
            assert!(talk.is_err(), "nothing gets through");
            world.heal(&client, &server);
            let mut late = [0; 6];
            stream.read_exact(&mut late).await.unwrap();
            assert_eq!(&late, b"within", "and nothing was lost");
            assert!(begun.elapsed() < 102 * SECOND);
            there_and_back(&mut stream, b"after").await.unwrap();

            world.set_link(&server, &client, |l| l.is_cut = true);
            let talk = timeout(2000 * SECOND, there_and_back(&mut stream, b"one way")).await;
            assert!(talk.is_err(), "the answer never comes, and that is all one sees");
        }))
        .await;
    });
}

#[test]
fn a_sender_gives_up_in_the_end() {
    run_scenario(5, |world, client, server| async move {
        let to = start(&server, echo);
        let both = (client.clone(), server.clone());
        done(client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            world.partition(&both.0, &both.1);
            let begun = Instant::now();
            let error = there_and_back(&mut stream, b"hello?").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert!((900..910).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        }))
        .await;
    });
}

#[test]
fn dialling_is_refused_delayed_or_times_out() {
    run_scenario(5, |world, client, server| async move {
        server.start(|_| async { Ok(()) });
        let to = SocketAddr::new(server.address(), PORT);
        let attempt =
            |to: SocketAddr| client.run(move |core| async move { core.dial(to).await.map(drop) });
        let kind = |r: IoResult<()>| r.unwrap_err().kind();
        assert_eq!(kind(done(attempt(to)).await), ErrorKind::ConnectionRefused);
        let nowhere: IpAddr = [10, 9, 9, 9].into();
        let nowhere = SocketAddr::new(nowhere, PORT);
        assert_eq!(kind(done(attempt(nowhere)).await), ErrorKind::HostUnreachable);

        world.partition(&client, &server);
        let begun = Instant::now();
        assert_eq!(kind(done(attempt(to)).await), ErrorKind::TimedOut);
        assert!((120..140).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        let late = attempt(to);
        tokio::time::sleep(10 * SECOND).await;
        world.heal(&client, &server);
        assert_eq!(kind(done(late).await), ErrorKind::ConnectionRefused, "after the healing");
    });
}

#[test]
fn a_cut_port_cuts_its_connections_only() {
    run_scenario(5, |world, client, server| async move {
        let to = start(&server, echo);
        let cut = |port| {
            world.set_link(&client, &server, |l| l.cut_port = port);
        };
        cut(Some(PORT + 1));
        let talk = async move |core: Core| {
            let mut stream = dial(&core, to).await;
            let talk = there_and_back(&mut stream, b"hello?");
            timeout(60 * SECOND, talk).await.is_ok()
        };
        assert!(done(client.run(talk)).await, "another port is cut");
        cut(Some(PORT));
        let dialled = client.run(move |core| async move { core.dial(to).await.map(drop) });
        assert_eq!(done(dialled).await.unwrap_err().kind(), ErrorKind::TimedOut);
        cut(None);
        assert!(done(client.run(talk)).await, "it is healed");
    });
}

#[test]
fn a_reader_that_stops_stops_the_writer() {
    run_scenario(10, |world, client, server| async move {
        let to = start(&server, |mut stream: Stream| async move {
            tokio::time::sleep(100 * SECOND).await;
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            assert_eq!(all.len(), 1 << 20);
        });
        world.set_link(&client, &server, |l| l.window = 10_000);
        done(client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            let begun = Instant::now();
            let (text, mut sent) = (vec![0; 1 << 20], 0);
            while sent < text.len() {
                sent += stream.write(&text[sent..]).await.unwrap();
                assert!(sent <= 10_000 || begun.elapsed() > 99 * SECOND, "{sent} bytes");
            }
            stream.shutdown().await.unwrap();
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        }))
        .await;
    });
}

#[test]
fn a_thousand_dials_at_once_wait_for_the_backlog() {
    run_scenario(2, |_, client, server| async move {
        server.start(|core: Core| async move {
            let how = ListenOptions { backlog: 200, ..ListenOptions::default() };
            let listener = core.listen_with(any(PORT), how).await.map_err(|e| e.to_string())?;
            let mut streams = Vec::new();
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                streams.push(listener.accept().await.map_err(|e| e.to_string())?);
            }
        });
        let to = SocketAddr::new(server.address(), PORT);
        tokio::time::sleep(SECOND).await;
        let dials: Vec<_> =
            (0..1000).map(|_| client.run(move |core| async move { core.dial(to).await })).collect();
        let mut connected = Vec::new();
        for dial in dials {
            connected.push(done(dial).await.expect("there is room in the end"));
        }
    });
}

#[test]
fn listeners_keep_to_their_address() {
    run_scenario(5, |_, client, server| async move {
        let [ours, theirs] = [server.address(), client.address()];
        done(server.run(move |core| async move {
            let kind = |r: IoResult<rt::net::Listener>| r.unwrap_err().kind();
            let first = core.listen(SocketAddr::new(ours, PORT)).await.unwrap();
            assert_eq!(kind(core.listen(any(PORT)).await), ErrorKind::AddrInUse);
            let foreign = SocketAddr::new(theirs, PORT);
            assert_eq!(kind(core.listen(foreign).await), ErrorKind::AddrNotAvailable);
            let chosen = core.listen(any(0)).await.unwrap().local_addr().unwrap();
            assert!(chosen.port() >= 49_152);
            let shared = ListenOptions { reuse_port: true, ..ListenOptions::default() };
            let a = core.listen_with(any(99), shared).await.unwrap();
            let _b = core.listen_with(any(99), shared).await.unwrap();
            drop(a);
            drop(first);
            core.listen(any(PORT)).await.unwrap();
            let home = SocketAddr::from(([127, 0, 0, 1], 99));
            assert_eq!(core.dial(home).await.unwrap().peer_addr().unwrap(), home);
        }))
        .await;
    });
}

#[test]
fn closing_with_unread_bytes_resets() {
    run_scenario(10, |_, client, server| async move {
        let to = start(&server, |stream: Stream| async move {
            tokio::time::sleep(SECOND).await;
            drop(stream);
        });
        done(client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            stream.write_all(b"this is never read").await.unwrap();
            let error = stream.read(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }))
        .await;
    });
}

#[test]
fn connections_move_between_the_cores_of_a_host() {
    run_scenario(10, |_, client, server| async move {
        server.update_setup(|s| s.cores = 2);
        server.start(|core: Core| async move {
            let listener = core.listen(any(PORT)).await.map_err(|e| e.to_string())?;
            loop {
                let (mut stream, _) = listener.accept().await.map_err(|e| e.to_string())?;
                let mut first = [0; 3];
                stream.read_exact(&mut first).await.map_err(|e| e.to_string())?;
                let stream = stream.detach().map_err(|e| e.to_string())?;
                if &first == b"bye" {
                    continue;
                }
                let other_core = core.peers()[1].clone();
                let moved = other_core.run(move |core| async move {
                    assert_eq!(core.id(), 1);
                    let stream = core.attach(stream).unwrap();
                    tokio::task::spawn_local(echo(stream));
                });
                moved.await.map_err(|e| e.to_string())?;
            }
        });
        let to = SocketAddr::new(server.address(), PORT);
        done(client.run(move |core| async move {
            let mut stream = dial(&core, to).await;
            stream.write_all(b"abcdef").await.unwrap();
            let mut rest = [0; 3];
            stream.read_exact(&mut rest).await.unwrap();
            assert_eq!(&rest, b"def", "bytes that had arrived move along");
            there_and_back(&mut stream, b"more").await.unwrap();
            let mut stream = dial(&core, to).await;
            stream.write_all(b"bye").await.unwrap();
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "dropped on the way: closed");
        }))
        .await;
    });
}

#[test]
fn a_panic_in_any_task_and_endless_waiting_fail_the_world() {
    let outcome = run(WorldSetup::new(1), |world: World| async move {
        let host = world.add_host("host", HostSetup::default());
        host.run(|_| async {
            tokio::time::sleep(SECOND).await;
            tokio::task::spawn_local(async { panic!("this task is never joined") });
        });
        std::future::pending().await
    });
    assert!(outcome.result.unwrap_err().message.contains("this task is never joined"));
    let outcome = run(WorldSetup::new(1), |_| std::future::pending());
    assert!(outcome.result.unwrap_err().message.contains("still going"));
    let outcome = run(WorldSetup::new(1), |world: World| async move {
        let host = world.add_host("host", HostSetup::default());
        host.start(|_| async { Err("no disk".into()) });
        std::future::pending().await
    });
    assert_eq!(outcome.result.unwrap_err().message, "host: no disk");
}

#[test]
fn resources_are_freed_with_their_world() {
    let held = Rc::new(());
    let left = Rc::downgrade(&held);
    let outcome = run(WorldSetup::new(1), |world: World| async move {
        let host = world.add_host("a", HostSetup::default());
        // As a scenario's node does: holds the host, and what runs on it.
        let own = (host.clone(), held);
        host.start(move |_| {
            let _own = own.clone();
            std::future::pending()
        });
        Ok(())
    });
    assert_eq!(outcome.result, Ok(()));
    assert!(left.upgrade().is_none());
}
