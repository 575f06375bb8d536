//! Cores, their mailboxes, their connections and their end.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::{MIB, buffers, config, pattern};
use rt::disk::OpenOptions;
use rt::net::ListenOptions;
use rt::{Core, CoreStopped, Cores, CoresConfig, PostError, SubmissionMode};
use testkit::{TestDir, wait};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::{JoinSet, spawn_local};

fn anywhere() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn a_connection_moves_between_cores_with_its_unread_bytes() {
    let cores = Cores::start(&config(2)).unwrap();
    let served = cores.handles()[0].run(|core| async move {
        let listener = core.listen(anywhere()).await.unwrap();
        let mut client = core.dial(listener.local_addr().unwrap()).await.unwrap();
        let (server, from) = listener.accept().await.unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        client.write_all(b"early").await.unwrap();
        let moved = server.detach().unwrap();
        let serve = move |core: Core| async move {
            let mut server = core.attach(moved).unwrap();
            assert_eq!(server.peer_addr().unwrap(), from);
            let mut got = [0; 9];
            server.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"earlylate");
            server.write_all(&[u8::try_from(core.id()).unwrap()]).await.unwrap();
        };
        core.peers()[1].post(serve).await.unwrap();
        client.write_all(b"late").await.unwrap();
        client.read_u8().await.unwrap()
    });
    assert_eq!(wait(served).unwrap(), 1);
    cores.stop_now();
}

#[test]
fn cores_share_a_port_if_configured() {
    let cores = Cores::start(&config(2)).unwrap();
    let shared = ListenOptions { reuse_port: true, ..Default::default() };
    let [first, second] = cores.handles() else { panic!("two cores") };
    let at = wait(first.run(move |core| async move {
        let listener = core.listen_with(anywhere(), shared).await.unwrap();
        let at = listener.local_addr().unwrap();
        spawn_local(async move { listener.accept().await });
        at
    }))
    .unwrap();
    let second_one = move |core: Core| async move {
        let alone = core.listen(at).await.map(drop).map_err(|e| e.kind());
        (alone, core.listen_with(at, shared).await.map(drop).is_ok())
    };
    let (alone, together) = wait(second.run(second_one)).unwrap();
    assert_eq!(alone, Err(std::io::ErrorKind::AddrInUse));
    assert!(together);
    cores.stop_now();
}

#[test]
fn a_full_mailbox_makes_senders_wait() {
    const ROOM: usize = 8;
    let cores = Cores::start(&CoresConfig { mailbox_len: ROOM, ..config(1) }).unwrap();
    let core = &cores.handles()[0];
    let (go, blocked) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    core.try_post(move |_| async move {
        begun.send(()).unwrap();
        blocked.recv().unwrap();
    })
    .unwrap();
    has_begun.recv().unwrap();

    let ran = Arc::new(AtomicU64::new(0));
    let job = || {
        let ran = Arc::clone(&ran);
        move |_| async move {
            ran.fetch_add(1, Ordering::SeqCst);
        }
    };
    let taken = (0..100).filter(|_| core.try_post(job()).is_ok()).count();
    assert_eq!(taken, ROOM);
    assert_eq!(core.try_post(job()), Err(PostError::Full));
    wait(async {
        let mut late = Box::pin(core.post(job()));
        let timeout = tokio::time::timeout(Duration::from_millis(50), &mut late);
        assert!(timeout.await.is_err(), "waits while it is full");
        go.send(()).unwrap();
        late.await.unwrap();
        core.run(|_| async {}).await.unwrap();
    });
    assert_eq!(ran.load(Ordering::SeqCst), ROOM as u64 + 1);
    cores.stop_now();
}

#[test]
fn cores_work_for_each_other() {
    let cores = Cores::start(&CoresConfig { mailbox_len: 4, ..config(3) }).unwrap();
    let asked = |_| {
        cores.handles().iter().map(|core| {
            core.run(|core| async move {
                let mut sum = 0;
                for i in 0..200 {
                    let peer = &core.peers()[i % core.peers().len()];
                    sum += peer.run(|peer| async move { peer.id() }).await.unwrap();
                }
                sum
            })
        })
    };
    let sums = wait(async {
        let mut sums = Vec::new();
        for run in (0..4).flat_map(asked) {
            sums.push(run.await.unwrap());
        }
        sums
    });
    assert!(sums.iter().all(|&s| s == 199), "{sums:?}");
    cores.stop_now();
}

#[test]
fn cores_share_the_clock_and_the_boot_of_their_machine() {
    let cores = Cores::start(&config(2)).unwrap();
    let [first, second] = cores.handles() else { panic!("two cores") };
    let look = |core: Core| async move { (core.now(), core.boot_id()) };
    let ms = Duration::from_millis;
    wait(async {
        let (earlier, boot) = first.run(look).await.unwrap();
        let (later, same_boot) = second.run(look).await.unwrap();
        assert!(Duration::ZERO < earlier && earlier <= later && later < earlier + ms(60_000));
        assert_eq!(boot, same_boot);
        let woken = first.run(move |core: Core| async move {
            let begun = core.now();
            core.sleep(ms(30)).await;
            let slept = core.now() - begun;
            // Moments that have passed, the first of all included, are not waited for.
            tokio::time::timeout(ms(10_000), async {
                core.sleep_until(begun).await;
                core.sleep_until(Duration::ZERO).await;
            })
            .await
            .unwrap();
            let endless = tokio::time::timeout(ms(30), core.sleep(Duration::MAX)).await;
            assert!(endless.is_err(), "the end of time is not now");
            slept
        });
        assert!(woken.await.unwrap() >= ms(30), "not a moment early");
    });
    cores.stop_now();
}

#[test]
fn any_thread_can_wait_for_a_core() {
    fn crosses_threads<T: Send>(t: T) -> T {
        t
    }
    let cores = Cores::start(&config(1)).unwrap();
    let run = cores.handles()[0].run(|core| async move {
        let local = Rc::new(core.id());
        tokio::task::yield_now().await;
        *local
    });
    assert_eq!(wait(crosses_threads(run)), Ok(0));
}

#[test]
fn a_disk_takes_memory_of_another_core() {
    let cores = Cores::start(&config(2)).unwrap();
    let dir = TestDir::on_disk();
    let path = dir.file("disk");
    let written = cores.handles()[0].run(move |core| async move {
        let account = core.buffer_pool().account();
        let data = pattern(&account, 5, 3 * MIB).await;
        let into = buffers(&account, 3 * MIB).await;
        let sent = data.clone();
        let there = core.peers()[1].run(move |core| async move {
            let how = OpenOptions::new().create(4 * MIB as u64);
            let disk = core.open_disk(&path, how).await.unwrap();
            disk.write(0, sent).await.unwrap();
            disk.read(0, into).await.unwrap()
        });
        data.same_bytes(&there.await.unwrap().into())
    });
    assert_eq!(wait(written), Ok(true));
    cores.stop_now();
}

#[test]
fn a_panicking_job_ends_alone() {
    let cores = Cores::start(&config(1)).unwrap();
    let core = &cores.handles()[0];
    let result = wait(core.run(|_| async { assert_eq!(1, 2, "meant to fail") }));
    assert_eq!(result, Err(CoreStopped));
    wait(core.post(|core| {
        assert_eq!(core.id(), 1, "meant to fail");
        async {}
    }))
    .unwrap();
    assert_eq!(wait(core.run(|core| async move { core.id() })), Ok(0));
    cores.stop_now();
}

#[test]
fn cores_serve_each_other_until_the_last_ends() {
    let cores = Cores::start(&config(2)).unwrap();
    let handle = cores.handles()[0].clone();
    let through = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&through);
    cores.stop(move |core| {
        let through = Arc::clone(&through);
        async move {
            let other = core.peers()[1 - core.id()].clone();
            tokio::time::sleep(Duration::from_millis(20 * core.id() as u64)).await;
            let id = other.run(|core| async move { core.id() }).await.unwrap();
            assert_eq!(id, 1 - core.id());
            through.fetch_add(1, Ordering::SeqCst);
        }
    });
    assert_eq!(seen.load(Ordering::SeqCst), 2);
    assert_eq!(wait(handle.run(|_| async {})), Err(CoreStopped));
    assert_eq!(handle.try_post(|_| async {}), Err(PostError::Stopped));
}

#[test]
fn cores_end_with_requests_in_flight() {
    for _ in 0..10 {
        let cores = Cores::start(&config(1)).unwrap();
        let dir = TestDir::on_disk();
        let path = dir.file("disk");
        let begin = cores.handles()[0].run(move |core| async move {
            let how = OpenOptions::new().create(64 * MIB as u64);
            let disk = core.open_disk(&path, how).await.unwrap();
            let account = core.buffer_pool().account();
            for i in 0..16 {
                let (disk, data) = (disk.clone(), pattern(&account, i, MIB).await);
                spawn_local(async move { disk.write(i * MIB as u64, data).await });
            }
            tokio::task::yield_now().await;
        });
        wait(begin).unwrap();
        cores.stop_now();
    }
}

#[test]
fn timers_and_tasks_run_while_a_core_polls() {
    let cores =
        Cores::start(&CoresConfig { poll_window: Duration::from_secs(3600), ..config(1) }).unwrap();
    let ticks = wait(cores.handles()[0].run(|_| async {
        let ticks = Rc::new(Cell::new(0));
        let counted = Rc::clone(&ticks);
        let ticker = spawn_local(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                counted.set(counted.get() + 1);
            }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        ticker.abort();
        ticks.get()
    }))
    .unwrap();
    assert!(ticks > 5, "{ticks}");
    cores.stop_now();
}

#[test]
fn random_numbers_and_the_time_of_day() {
    let cores = Cores::start(&config(1)).unwrap();
    wait(cores.handles()[0].run(|core| async move {
        let numbers: std::collections::HashSet<u64> =
            (0..1000).map(|_| core.random_u64()).collect();
        assert_eq!(numbers.len(), 1000);
        let years = core.wall_clock().as_secs() / (365 * 24 * 3600);
        assert!((50..500).contains(&years), "{years} years after 1970");
    }))
    .unwrap();
    cores.stop_now();
}

#[test]
fn a_core_is_bound_to_its_processor_and_its_helpers_are_not() {
    fn allowed() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        list.unwrap().trim().to_owned()
    }
    let first = allowed().split([',', '-']).next().unwrap().parse().unwrap();
    let cores = Cores::start(&CoresConfig { cpus: vec![Some(first)], ..config(1) }).unwrap();
    let (core, helper) = wait(
        cores.handles()[0]
            .run(|_| async { (allowed(), tokio::task::spawn_blocking(allowed).await.unwrap()) }),
    )
    .unwrap();
    assert_eq!((core, helper), (first.to_string(), allowed()));
    cores.stop_now();
}

#[test]
fn a_missing_processor_is_ignored() {
    let cores = Cores::start(&CoresConfig { cpus: vec![Some(0), Some(100_000)], ..config(2) });
    assert_eq!(cores.unwrap().handles().len(), 2);
}

/// One after the other, when the core sleeps meanwhile; more at a time than the ring takes at once;
/// and out of the page cache, where a request is through before the call that submits it.
#[test]
fn disk_requests_complete_whenever_submitted() {
    for submission in [SubmissionMode::Batched, SubmissionMode::Immediate] {
        let dir = TestDir::on_disk();
        let cores = Cores::start(&CoresConfig { submission, ..config(1) }).unwrap();
        let done = cores.handles()[0].run(move |core| async move {
            let account = core.buffer_pool().account();
            let data = pattern(&account, 1, MIB).await;
            for buffered in [false, true] {
                let path = dir.file(if buffered { "buffered" } else { "direct" });
                let how = OpenOptions::new().buffered(buffered).create(MIB as u64);
                let disk = core.open_disk(&path, how).await.unwrap();
                disk.write(0, data.clone()).await.unwrap();
                let expected = data.slice(0..4096);
                for _ in 0..100 {
                    let page = buffers(&account, 4096).await;
                    let found = disk.read(0, page).await.unwrap();
                    assert!(expected.same_bytes(&found.into()));
                }
                let mut tasks = JoinSet::new();
                for n in 0..1000 {
                    let (disk, page) = (disk.clone(), buffers(&account, 4096).await);
                    tasks.spawn_local(async move { disk.read(n % 256 * 4096, page).await });
                }
                while let Some(read) = tasks.join_next().await {
                    read.unwrap().unwrap();
                }
            }
        });
        wait(done).unwrap();
        cores.stop_now();
    }
}

#[test]
fn an_ipv4_peer_of_an_ipv6_listener_has_its_ipv4_address() {
    let cores = Cores::start(&config(1)).unwrap();
    let served = cores.handles()[0].run(|core| async move {
        let Ok(listener) = core.listen("[::]:0".parse().unwrap()).await else {
            // No IPv6 here.
            return;
        };
        let port = listener.local_addr().unwrap().port();
        let client = core.dial(SocketAddr::from(([127, 0, 0, 1], port))).await.unwrap();
        let (server, from) = listener.accept().await.unwrap();
        assert_eq!(from, client.local_addr().unwrap());
        assert_eq!(server.peer_addr().unwrap(), from);
        assert_eq!(server.local_addr().unwrap(), client.peer_addr().unwrap());
        assert!(!from.to_string().contains("ffff"), "{from}");
    });
    wait(served).unwrap();
    cores.stop_now();
}
