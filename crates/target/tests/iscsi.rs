//! iSCSI clients that misbehave, or behave well at a bad moment, against a server on real cores.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Class, Dev, Epoch, Mem, MemOptions};
use iscsi::pdu::{NO_TAG, Opcode, Stage, TaskFunction};
use iscsi::testing::{Initiator, Pdu};
use rt::net::{Listener, Stream};
use rt::{Core, Cores, CoresConfig};
use target::{
    Access, Admission, Catalog, IscsiTarget, Limits, Served, Server, Service, VolumeId, doors,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use volume::Volume;

const TARGET: &str = "iqn.2026-01.com.example:disk";
const BLOCK: usize = 512;
const POOL: usize = 8 << 20;
const WRITE: u8 = 0x20;
const PATIENCE: Duration = Duration::from_secs(20);

fn on_core<Fut: Future<Output = ()> + 'static>(f: impl FnOnce(Core) -> Fut + Send + 'static) {
    on_cores(1, f);
}

/// Runs `f` on the first of `cores` cores.
fn on_cores<Fut: Future<Output = ()> + 'static>(
    cores: usize,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let cpus = vec![None; cores];
    let config = CoresConfig { cpus, pool_bytes_per_core: POOL, ..CoresConfig::default() };
    let cores = Cores::start(&config).unwrap();
    let wait = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let result = wait.block_on(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

fn catalog(core: usize) -> Arc<Catalog> {
    let access = Access { any: Some(Admission::default()), ..Access::default() };
    let luns = [(1, VolumeId([7; 16]))].into();
    let targets = [(TARGET.to_owned(), IscsiTarget { core, luns, access })].into();
    Arc::new(Catalog { targets, ..Catalog::default() })
}

/// A server with one volume, and where it listens.
async fn serve(core: &Core, limits: Limits) -> (Rc<Server>, SocketAddr) {
    let server = Server::new(core.clone(), limits, doors(1).remove(0));
    add_volume(&server);
    server.set_catalog(catalog(0));
    let address = listen(core, &server).await;
    (server, address)
}

fn add_volume(server: &Server) {
    let mem = Mem::new(MemOptions::new(512, 1 << 17));
    let volume = Volume::new(Dev::new(mem), Epoch::default());
    let (id, name) = (VolumeId([7; 16]), "disk".to_owned());
    server.add_volume(Served { id, name, volume, thin: false });
}

async fn listen(core: &Core, server: &Rc<Server>) -> SocketAddr {
    let listener: Listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    spawn_local(Rc::clone(server).serve(listener, Service::Iscsi));
    address
}

struct Client {
    stream: Stream,
    initiator: Initiator,
    pdus: VecDeque<Pdu>,
}

impl Client {
    async fn dial(core: &Core, to: SocketAddr, isid: u8) -> Self {
        let mut initiator = Initiator::default();
        initiator.isid[5] = isid;
        let stream = core.dial(to).await.unwrap();
        Self { stream, initiator, pdus: VecDeque::new() }
    }

    /// Asks for a session.
    async fn ask(&mut self, keys: &[(&str, &str)]) {
        let names = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", TARGET),
            ("SessionType", "Normal"),
        ];
        let all: Vec<_> = names.iter().chain(keys).copied().collect();
        let login = self.initiator.login(Stage::Operational, Some(Stage::FullFeature), &all);
        self.send(&login).await;
    }

    async fn log_in(core: &Core, to: SocketAddr, isid: u8, keys: &[(&str, &str)]) -> Self {
        let mut client = Self::dial(core, to, isid).await;
        client.ask(keys).await;
        let answer = client.next().await;
        assert_eq!(answer.header[36..38], [0, 0], "{answer:?}");
        // TEST UNIT READY fetches what every new initiator is told.
        let ready = client.initiator.command(&[0; 6], 0, 0, &[]);
        client.send(&ready).await;
        client.next().await;
        client
    }

    async fn send(&mut self, bytes: &[u8]) {
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("it reads").unwrap();
    }

    async fn next(&mut self) -> Pdu {
        timeout(PATIENCE, self.receive()).await.expect("an answer in time").expect("an answer")
    }

    /// `None` when the server has closed the connection.
    async fn receive(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            if let Some(pdu) = self.pdus.pop_front() {
                return Some(pdu);
            }
            let n = self.stream.read(&mut bytes).await.ok().filter(|n| *n > 0)?;
            self.pdus.extend(self.initiator.receive(&bytes[..n]));
        }
    }

    /// WRITE (10) of so many blocks; its tag.
    async fn write(&mut self, at: u32, blocks: u16, immediate: &[u8]) -> u32 {
        let (itt, len) = (self.initiator.itt, u32::from(blocks) * BLOCK as u32);
        let command = self.initiator.command(&cdb(0x2a, at, blocks), WRITE, len, immediate);
        self.send(&command).await;
        itt
    }

    /// Answers an R2T with zeroes.
    async fn answer(&mut self, r2t: &Pdu) {
        assert_eq!(r2t.opcode(), Opcode::R2t, "{r2t:?}");
        let data = vec![0; r2t.word(44) as usize];
        let pdu = self.initiator.data_out(r2t.itt(), r2t.word(20), 0, r2t.word(40), true, &data);
        self.send(&pdu).await;
    }
}

fn cdb(opcode: u8, at: u32, blocks: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (at.to_be_bytes(), blocks.to_be_bytes());
    [opcode, 0, a, b, c, d, 0, e, f, 0]
}

/// Tags come again: memory for the first command must not reach the second.
#[test]
fn memory_that_comes_late_is_not_the_next_commands() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        let hog = core.pool().account();
        for _ in 0..20 {
            let all = hog.try_credit(POOL, Class::Immediate).unwrap();
            let first = client.write(0, 64, &[]).await;
            sleep(Duration::from_millis(5)).await;
            let abort = client.initiator.task(TaskFunction::AbortTask, first, 0);
            client.send(&abort).await;
            assert_eq!(client.next().await.opcode(), Opcode::TaskResponse);
            let second = client.write(0, 128, &[]).await;
            sleep(Duration::from_millis(5)).await;
            drop(all);
            let r2t = client.next().await;
            assert_eq!((r2t.itt(), r2t.word(44)), (second, 128 * BLOCK as u32));
            client.answer(&r2t).await;
            let status = client.next().await;
            assert_eq!((status.itt(), status.header[3]), (second, 0));
        }
        assert_eq!(core.pool().usage().waiting, 0);
    });
}

/// Waiting for memory ends with the command: else a client that gives up and tries again leaves
/// more behind each time.
#[test]
fn commands_that_are_aborted_leave_nobody_waiting_for_memory() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        let hog = core.pool().account();
        let _all = hog.try_credit(POOL, Class::Immediate).unwrap();
        for _ in 0..20 {
            let itt = client.write(0, 64, &[]).await;
            sleep(Duration::from_millis(5)).await;
            let abort = client.initiator.task(TaskFunction::AbortTask, itt, 0);
            client.send(&abort).await;
            assert_eq!(client.next().await.opcode(), Opcode::TaskResponse);
        }
        client.write(0, 64, &[]).await;
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.pool().usage().waiting, 1);
        drop(client);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.pool().usage().waiting, 0);
    });
}

/// More writes at once than there is memory for, each with a part of its data in the command: the
/// data of those that have memory comes behind commands that have none yet.
#[test]
fn writes_beyond_the_pool_all_end() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let keys = [("InitialR2T", "Yes"), ("ImmediateData", "Yes")];
        let mut client = Client::log_in(&core, at, 1, &keys).await;
        let (count, blocks) = (100, 512);
        for i in 0..count {
            client.write(i * u32::from(blocks), blocks, &[1; 8192]).await;
        }
        let mut ended = 0;
        while ended < count {
            let pdu = client.next().await;
            match pdu.opcode() {
                Opcode::R2t => client.answer(&pdu).await,
                Opcode::ScsiResponse => {
                    assert!([0x00, 0x28].contains(&pdu.header[3]), "{pdu:?}");
                    ended += 1;
                }
                Opcode::NopIn if pdu.itt() == NO_TAG => {}
                _ => panic!("{pdu:?}"),
            }
        }
        let usage = core.pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// The core that accepts a connection which moves on has room for another at once.
#[test]
fn connections_that_come_from_another_core_count() {
    on_cores(2, async |core| {
        let limits = Limits { connections: 3, ..Limits::default() };
        let mut doors = doors(2);
        let (there, here) = (doors.remove(1), doors.remove(0));
        let home = core.peers()[1].clone();
        home.post(move |core| async move {
            let server = Server::new(core.clone(), limits, there);
            add_volume(&server);
            server.set_catalog(catalog(1));
            std::future::pending::<()>().await;
        })
        .await
        .unwrap();
        let server = Server::new(core.clone(), limits, here);
        server.set_catalog(catalog(1));
        let at = listen(&core, &server).await;
        let mut clients = Vec::new();
        for isid in 0..3 {
            clients.push(Client::log_in(&core, at, isid, &[]).await);
        }
        let mut late = Client::dial(&core, at, 3).await;
        late.ask(&[]).await;
        assert_eq!(timeout(PATIENCE, late.receive()).await.expect("it is told"), None);
    });
}
