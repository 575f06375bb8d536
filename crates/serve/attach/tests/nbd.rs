//! Our server and our client over sockets, on real cores.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "nbd/common.rs"]
mod common;
#[path = "common/threads.rs"]
mod threads;
#[path = "common/tools.rs"]
mod tools;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use attach::nbd::Options as Served;
use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::{Effect, Faults, OpKind, Rule};
use block::testing::{Rng, TestClient};
use block::{BufferPool, Dev, Error, MemOptions};
use common::{Site, on_core};
use initiator::nbd::{ConnectError, ConnectionEnd, Disk, Options};
use nbd::client;
use nbd::message::{Rep, flag};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Remote {
    dir: TempDir,
    core: rt::Core,
    pool: BufferPool,
    block_size: u32,
    connections: u16,
    last: RefCell<Option<Site>>,
}

impl Remote {
    fn faults(&self) -> Faults {
        self.last.borrow().as_ref().unwrap().faults.clone()
    }
}

impl Subject for Remote {
    fn pool(&self) -> BufferPool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        let mem = MemOptions::new(self.block_size, MIN_BYTES / u64::from(self.block_size));
        let mem = MemOptions { volatile_cache: true, ..mem };
        let site = Site::unix(&self.core, self.dir.path(), mem, Served::new("disk")).await;
        let options = Options { connections: self.connections, ..Options::new("disk") };
        let disk = site.connect(&options).await;
        assert_eq!(disk.connections(), usize::from(self.connections));
        self.last.replace(Some(site));
        Dev::shared(disk)
    }

    async fn grow(&self) -> bool {
        // NBD cannot tell of it.
        false
    }

    async fn space_used(&self) -> Option<u64> {
        Some(self.last.borrow().as_ref().unwrap().mem.space_used())
    }

    /// The server lives, and what its device has cached is lost: a client could not tell, so it
    /// connects anew.
    async fn cut_power(&self, seed: u64) -> Option<Dev> {
        let mut rng = Rng::new(seed);
        let site = self.last.take().unwrap();
        site.mem.cut_power(|n| rng.below(n as u64) as usize);
        let options = Options { connections: self.connections, ..Options::new("disk") };
        let disk = site.connect(&options).await;
        self.last.replace(Some(site));
        Some(Dev::shared(disk))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        self.faults().add(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
        true
    }
}

fn conforms(block_size: u32, connections: u16) {
    on_core(async move |core| {
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let dir = TempDir::new().unwrap();
        let last = RefCell::default();
        let subject = Remote { dir, core, pool, block_size, connections, last };
        conformance::check(&subject, 1).await;
    });
}

/// A disk of this machine may be made of it (`nbd-client`): the core does not wait for that when
/// memory is short.
#[test]
fn its_core_counts_as_that_of_a_disk() {
    if !threads::may_be_marked() {
        return;
    }
    on_core(async |core| {
        assert!(!threads::serves_disks(&threads::this()));
        let (dir, mem) = (TempDir::new().unwrap(), MemOptions::new(512, 64));
        let mut site = Site::unix(&core, dir.path(), mem, Served::new("disk")).await;
        assert!(threads::serves_disks(&threads::this()));
        site.stop().await.unwrap();
    });
}

#[test]
fn a_disk_conforms() {
    conforms(512, 1);
}

#[test]
fn a_disk_of_large_blocks_conforms() {
    conforms(4096, 1);
}

#[test]
fn a_disk_by_several_connections_conforms() {
    conforms(512, 3);
}

fn small() -> MemOptions {
    MemOptions::new(512, 1 << 14)
}

#[test]
fn reported_parameters_match_the_volume() {
    on_core(async |core| {
        let site = Site::tcp(&core, small(), Served::new("disk")).await;
        let disk = site.connect(&Options::new("")).await;
        let agreed = disk.negotiated();
        assert_eq!(
            (agreed.bytes, agreed.size_constraints.minimum, agreed.size_constraints.preferred),
            (1 << 23, 512, 4096)
        );
        assert!(
            agreed.structured
                && agreed.block_status
                && agreed.transmission_flags.has(flag::CAN_MULTI_CONN)
        );
        assert!(agreed.transmission_flags.has(flag::SEND_TRIM | flag::SEND_FUA | flag::SEND_FLUSH));
        let refused = Disk::connect(&core, &site.at, &Options::new("other")).await.unwrap_err();
        let unknown = ConnectionEnd::Machine(client::CloseReason::Refused(Rep::ErrUnknown));
        assert_eq!(refused, ConnectError::Ended(unknown));
        let read_only = Served { read_only: true, ..Served::new("disk") };
        let site = Site::tcp(&core, small(), read_only).await;
        let disk = site.connect(&Options::new("disk")).await;
        let client = TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap());
        assert!(client.dev().info().read_only);
        assert_eq!(client.write(0, &[1; 512], false).await, Err(Error::ReadOnly));
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [0; 512]);
    });
}

/// What is longer than the device takes at once is split, whatever its kind.
#[test]
fn long_requests_are_split() {
    on_core(async |core| {
        let site = Site::tcp(&core, MemOptions::new(512, 1 << 15), Served::new("disk")).await;
        let disk = Dev::shared(site.connect(&Options::new("disk")).await);
        // An eighth of the core's memory; the device takes 1 MiB.
        let most = disk.info().max_transfer_blocks;
        assert_eq!(u64::from(most) * 512, common::POOL as u64 / 8);
        let client = TestClient::new(&disk, &BufferPool::new(64 << 20).unwrap());
        let data: Vec<u8> = (0..most as usize * 512).map(|i| (i / 512 + i) as u8).collect();
        client.write(3, &data, true).await.unwrap();
        assert!(client.read(3, most).await.unwrap().to_vec() == data);
        client.zero(3, most, true).await.unwrap();
        assert!(client.read(3, most).await.unwrap().to_vec().iter().all(|b| *b == 0));
        assert_eq!(site.dev.stats().writes, 8);
    });
}

/// Many who write and read the same blocks: `Dev` panics if what overlaps runs at once.
#[test]
fn overlapping_operations_never_run_concurrently() {
    on_core(async |core| {
        let site = Site::tcp(&core, small(), Served::new("disk")).await;
        // Holds each operation back, so that others arrive meanwhile.
        let slow = Rule::new(Effect::Delay(Duration::ZERO, Duration::from_millis(2)))
            .with_probability(0.5);
        site.faults.add(slow);
        let tasks = (0..8u64).map(|n| {
            let (core, at) = (core.clone(), site.at.clone());
            tokio::task::spawn_local(async move {
                let disk = Disk::connect(&core, &at, &Options::new("")).await.unwrap();
                let client =
                    TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap());
                let mut rng = Rng::new(n);
                for _ in 0..60 {
                    let (at, blocks) = (rng.below(8), 1 + rng.below(8) as u32);
                    match rng.below(4) {
                        0 => drop(client.read(at, blocks).await.unwrap()),
                        1 => client.zero(at, blocks, rng.one_in(2)).await.unwrap(),
                        2 => client.flush().await.unwrap(),
                        _ => {
                            let data = vec![n as u8; blocks as usize * 512];
                            client.write(at, &data, rng.one_in(3)).await.unwrap();
                        }
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        assert!(site.faults.hits() > 50);
    });
}

#[test]
fn a_disk_whose_connection_is_lost_is_gone_for_ever() {
    on_core(async |core| {
        for connections in [1, 3] {
            let mut site = Site::tcp(&core, small(), Served::new("disk")).await;
            let options = Options { connections, ..Options::new("disk") };
            let disk = site.connect(&options).await;
            let client =
                TestClient::new(&Dev::shared(Rc::clone(&disk)), &BufferPool::new(1 << 20).unwrap());
            client.write(0, &[7; 512], false).await.unwrap();
            // It is told, but only to who asks: the server lets go of clients that owe nothing.
            site.stop().await.unwrap();
            assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
            assert_eq!(client.flush().await, Err(Error::Gone));
            assert!(disk.is_gone());
            let refused = Disk::connect(&core, &site.at, &options).await.unwrap_err();
            assert_eq!(refused, ConnectError::Dial(std::io::ErrorKind::ConnectionRefused));
        }
    });
}

/// What had begun when the server was told to stop is answered, and what was written is durable.
#[test]
fn a_server_that_stops_answers_what_has_begun_and_flushes() {
    on_core(async |core| {
        let mem = MemOptions { volatile_cache: true, ..small() };
        let mut site = Site::tcp(&core, mem, Served::new("disk")).await;
        let disk = site.connect(&Options::new("disk")).await;
        let client =
            Rc::new(TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap()));
        const HELD: Duration = Duration::from_millis(200);
        site.faults.add(Rule::new(Effect::Delay(HELD, HELD)).on(&[OpKind::Write]));
        let writes = Rc::clone(&client);
        let write =
            tokio::task::spawn_local(async move { writes.write(9, &[9; 512], false).await });
        while site.dev.stats().in_flight == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        site.stop().await.unwrap();
        assert_eq!(write.await.unwrap(), Ok(()));
        site.mem.cut_power(|_| 0);
        let reads = TestClient::new(&site.dev, &BufferPool::new(1 << 20).unwrap());
        assert_eq!(reads.read(9, 1).await.unwrap().to_vec(), [9; 512]);
    });
}

/// A write of several pieces does not go on behind the back of its client's next connection.
#[test]
fn unstarted_requests_of_a_lost_client_are_dropped() {
    on_core(async |core| {
        let site = Site::tcp(&core, MemOptions::new(512, 1 << 15), Served::new("disk")).await;
        let nbd::Address::Tcp(to) = site.at else { unreachable!("a port of the loopback") };
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = nbd::Address::Tcp(listener.local_addr().unwrap());
        let wire = tokio::task::spawn_local({
            let core = core.clone();
            async move {
                let (mut client, _) = listener.accept().await.unwrap();
                let mut server = core.dial(to).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            }
        });
        let first = Disk::connect(&core, &at, &Options::new("disk")).await.unwrap();
        site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(1));
        let client = TestClient::new(&Dev::shared(first), &BufferPool::new(64 << 20).unwrap());
        let cut = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            wire.abort();
        };
        let (lost, ()) = tokio::join!(client.write(0, &[1; 4 << 20], false), cut);
        assert_eq!(lost, Err(Error::Gone));
        tokio::time::sleep(Duration::from_millis(100)).await;
        let second = site.connect(&Options::new("disk")).await;
        let client = TestClient::new(&Dev::shared(second), &BufferPool::new(1 << 20).unwrap());
        client.write(8000, &[2; 512], false).await.unwrap();
        site.faults.release();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(client.read(8000, 1).await.unwrap().to_vec(), [2; 512]);
    });
}

/// A client that gets no answer may ask the next server of the volume; one that gets an error has
/// lost its disk.
#[test]
fn clients_of_a_volume_out_of_reach_are_cut_off() {
    on_core(async |core| {
        for long in [false, true] {
            let mut site =
                Site::tcp(&core, MemOptions::new(512, 1 << 15), Served::new("disk")).await;
            let disks = [
                site.connect(&Options::new("disk")).await,
                site.connect(&Options::new("disk")).await,
            ];
            let pool = BufferPool::new(64 << 20).unwrap();
            let [client, idle] = disks.map(|disk| TestClient::new(&Dev::shared(disk), &pool));
            site.faults.add(Rule::new(Effect::Fail(Error::Gone)));
            let data = vec![1; if long { 4 << 20 } else { 512 }];
            let result = client.write(0, &data, false).await;
            assert!(matches!(result, Err(Error::Unwritable { .. })), "it has failed: {result:?}");
            site.away.set(true);
            assert_eq!(client.write(0, &data, false).await, Err(Error::Gone), "no answer");
            site.ended().await;
            assert_eq!(idle.read(0, 1).await.map(drop), Err(Error::Gone));
        }
    });
}

/// What a client of old says to choose the only export, and a write.
fn hello() -> Vec<u8> {
    let mut said = 1u32.to_be_bytes().to_vec();
    said.extend(b"IHAVEOPT");
    said.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    said
}

fn write_request(block: u64, data: &[u8]) -> Vec<u8> {
    let mut said = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1];
    said.extend(block.to_be_bytes());
    said.extend((block * 512).to_be_bytes());
    said.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    said.extend(data);
    said
}

/// A request that is whole and waits for memory when its client goes is none; neither is the rest
/// of a long one, whose connection takes nothing meanwhile.
#[test]
fn unread_requests_of_a_dead_client_are_dropped() {
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        for (unix, long) in [(true, false), (true, true), (false, false), (false, true)] {
            let served = Served { max_in_flight: 1, ..Served::new("disk") };
            let mem = MemOptions::new(512, 1 << 15);
            let site = match unix {
                true => Site::unix(&core, dir.path(), mem, served).await,
                false => Site::tcp(&core, mem, served).await,
            };
            let mut dies = match &site.at {
                nbd::Address::Unix(at) => core.dial_unix(at).await.unwrap(),
                nbd::Address::Tcp(at) => core.dial(*at).await.unwrap(),
            };
            dies.write_all(&hello()).await.unwrap();
            dies.read_exact(&mut [0; 18 + 10 + 124]).await.unwrap();
            let taken = (!long).then(|| {
                let bytes = usize::try_from(core.buffer_pool().usage().free).unwrap() - (4 << 20);
                core.buffer_pool().account().try_credit(bytes, block::MemoryClass::LocalIo).unwrap()
            });
            site.faults.add(Rule::new(Effect::Stall).on(&[OpKind::Write]).times(long.into()));
            let (block, bytes) = if long { (0, 5 << 20) } else { (8000, 128 << 10) };
            dies.write_all(&write_request(block, &vec![1; bytes])).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            dies.reset_on_drop().unwrap();
            drop(dies);
            let comes = site.connect(&Options::new("disk")).await;
            let client = TestClient::new(&Dev::shared(comes), &BufferPool::new(1 << 20).unwrap());
            client.zero(8000, 8, false).await.unwrap();
            site.faults.release();
            drop(taken);
            tokio::time::sleep(Duration::from_millis(200)).await;
            let found = client.read(8000, 1).await.unwrap().to_vec();
            assert!(found == [0; 512], "unix: {unix}, long: {long}");
        }
    });
}

#[test]
fn a_failing_last_flush_is_reported() {
    on_core(async |core| {
        let mut site = Site::tcp(&core, small(), Served::new("disk")).await;
        site.faults.add(Rule::new(Effect::Fail(Error::Gone)).on(&[OpKind::Flush]));
        let failed = site.stop().await.unwrap_err();
        assert_eq!(failed, Error::Gone.into());
    });
}

/// Those who have chosen nothing make room; those who have are left alone.
#[test]
fn a_client_over_the_limit_is_refused_or_replaces_an_idle_one() {
    on_core(async |core| {
        let served = Served { connections: 2, ..Served::new("disk") };
        let site = Site::tcp(&core, small(), served).await;
        let nbd::Address::Tcp(at) = site.at else { panic!("TCP") };
        let mut idler = core.dial(at).await.unwrap();
        let first = site.connect(&Options::new("disk")).await;
        let second = site.connect(&Options::new("disk")).await;
        let mut greeting = Vec::new();
        idler.read_to_end(&mut greeting).await.unwrap();
        assert_eq!(greeting.len(), 18, "the idler has had its greeting, and had to go");
        let third = Disk::connect(&core, &site.at, &Options::new("disk")).await;
        assert!(matches!(third, Err(ConnectError::Ended(_))), "{third:?}");
        assert!(!first.is_gone() && !second.is_gone());
        drop(first);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(Disk::connect(&core, &site.at, &Options::new("disk")).await.is_ok());
    });
}

/// A write whose data does not come holds memory for so long and no longer; no other client waits
/// for it.
#[test]
fn a_stalled_client_is_disconnected_and_its_memory_freed() {
    on_core(async |core| {
        let served = Served { receive_timeout: Duration::from_millis(300), ..Served::new("disk") };
        let site = Site::tcp(&core, small(), served).await;
        let nbd::Address::Tcp(at) = site.at else { panic!("TCP") };
        let mut stalls = core.dial(at).await.unwrap();
        let mut sent = 1u32.to_be_bytes().to_vec();
        sent.extend(b"IHAVEOPT");
        sent.extend([0, 0, 0, 1, 0, 0, 0, 0]);
        sent.extend([0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        sent.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 7, 7]);
        stalls.write_all(&sent).await.unwrap();
        let free = || core.buffer_pool().usage().total - core.buffer_pool().usage().free;
        while free() < 1 << 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let disk = site.connect(&Options::new("disk")).await;
        let client = TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap());
        client.write(0, &[1; 512], false).await.unwrap();
        let mut greeting = Vec::new();
        stalls.read_to_end(&mut greeting).await.unwrap();
        assert_eq!(greeting.len(), 18 + 10 + 124);
        while free() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(core.buffer_pool().usage().overdrafts, 0);
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [1; 512]);
    });
}

/// A panic in the layer fails its command, and nothing else.
#[test]
fn a_panic_below_fails_its_command_alone() {
    struct Panics(Cell<bool>, block::Mem);
    impl block::Layer for Panics {
        fn name(&self) -> &'static str {
            "panics"
        }
        fn info(&self) -> block::Info {
            self.1.info()
        }
        async fn submit(&self, op: block::Op, ctx: block::Ctx) -> Result<block::Bufs, Error> {
            if let block::Op::Write { .. } = op {
                assert!(self.0.replace(true), "as planned");
            }
            block::Layer::submit(&self.1, op, ctx).await
        }
    }
    on_core(async |core| {
        let dev = common::dev(Panics(Cell::new(false), block::Mem::new(small())));
        let volume = volume::Volume::new(dev, block::Epoch::default());
        let at = nbd::Address::Tcp("127.0.0.1:0".parse().unwrap());
        let server =
            attach::nbd::Server::bind(&core, &volume, &at, Served::new("x")).await.unwrap();
        let at = nbd::Address::Tcp(server.local_addr().unwrap());
        tokio::task::spawn_local(server.run(std::future::pending()));
        let disk = Disk::connect(&core, &at, &Options::new("x")).await.unwrap();
        let client = TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap());
        let failed = client.write(0, &[1; 512], false).await.unwrap_err();
        assert!(matches!(failed, Error::Unwritable { .. }), "{failed}");
        client.write(0, &[2; 512], false).await.unwrap();
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [2; 512]);
    });
}

/// A process that speaks like a server: the handshake of each connection ends with an export of the
/// next size, and then nothing is answered any more.
async fn liar(core: &rt::Core, sizes: &'static [u64]) -> nbd::Address {
    let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let at = nbd::Address::Tcp(listener.local_addr().unwrap());
    let reply = |option: u8, kind: u8, data: &[u8]| {
        let header = [0x3_e889_0455_65a9u64.to_be_bytes()].concat();
        let numbers = [option.into(), kind.into(), data.len() as u32].map(u32::to_be_bytes);
        [&header[..], &numbers.concat(), data].concat()
    };
    tokio::task::spawn_local(async move {
        let mut open = Vec::new();
        for size in sizes {
            let (mut stream, _) = listener.accept().await.unwrap();
            let flags = flag::HAS_FLAGS | flag::CAN_MULTI_CONN | flag::SEND_FLUSH;
            let export = [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
            let said = [
                b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
                reply(8, 1, &[]),
                reply(10, 1, &[]),
                reply(7, 3, &export),
                reply(7, 1, &[]),
            ];
            if *size > 0 {
                stream.write_all(&said.concat()).await.unwrap();
            }
            open.push(stream);
        }
        std::future::pending::<()>().await;
    });
    at
}

#[test]
fn invalid_and_silent_servers_are_refused() {
    on_core(async |core| {
        let quick = Options {
            connections: 2,
            connect_timeout: Duration::from_millis(300),
            ..Options::new("disk")
        };
        let at = liar(&core, &[1 << 20, 1 << 21]).await;
        let refused = Disk::connect(&core, &at, &quick).await.unwrap_err();
        assert_eq!(refused, ConnectError::Inconsistent);
        let at = liar(&core, &[0]).await;
        let refused = Disk::connect(&core, &at, &quick).await.unwrap_err();
        assert_eq!(
            refused,
            ConnectError::Ended(ConnectionEnd::Machine(client::CloseReason::HandshakeTimeout))
        );
        let at = liar(&core, &[511, 511]).await;
        let refused = Disk::connect(&core, &at, &quick).await.unwrap_err();
        assert_eq!(refused, ConnectError::Size(511));
    });
}

#[test]
fn an_unresponsive_server_loses_its_disk() {
    on_core(async |core| {
        let at = liar(&core, &[1 << 20, 1 << 20]).await;
        let quick = Options {
            connections: 2,
            command_timeout: Duration::from_millis(300),
            ..Options::new("disk")
        };
        let disk = Disk::connect(&core, &at, &quick).await.unwrap();
        let client =
            TestClient::new(&Dev::shared(Rc::clone(&disk)), &BufferPool::new(1 << 20).unwrap());
        let (read, write) = tokio::join!(client.read(0, 1), client.write(8, &[1; 512], false));
        assert_eq!((read.map(drop), write), (Err(Error::Gone), Err(Error::Gone)));
        assert!(disk.is_gone());
        assert_eq!(client.flush().await, Err(Error::Gone));
    });
}
