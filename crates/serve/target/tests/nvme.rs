//! NVMe/TCP hosts that misbehave, or behave well at a bad moment, against a server on real cores.

mod authentication;
#[path = "nvme/tls.rs"]
mod by_tls;
mod commands;
mod namespaces;
mod reservations;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{POOL, listen, on_core};
use block::testing::faulty::{Effect, Faults, Faulty, OpKind, Rule};
use block::{AccessState, Blocks, Dev, Epoch, Error, Lba, Mem, MemOptions, MemoryClass, Request};
use nvme::entry::{AdminOpcode, NvmOpcode, Sgl};
use nvme::fabrics::{CNTLID_DYNAMIC, DISCOVERY_NQN, Property};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{Connect, Sqe, Status};
use rt::Core;
use target::{
    AccessList, Catalog, Limits, NodeIndex, Portals, ServedVolume, Server, Service, ServingNode,
    Subsystem, VolumeId, core_links,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};
use volume::Volume;
use zerocopy::IntoBytes;

const SUBNQN: &str = "nqn.2026-01.com.example:disk";
const PATIENCE: Duration = Duration::from_secs(20);
const A: VolumeId = VolumeId([0xa; 16]);
const B: VolumeId = VolumeId([0xb; 16]);

/// Namespace 1 is this volume.
fn catalog(id: VolumeId) -> Arc<Catalog> {
    let access = AccessList::open();
    let namespaces = [(1, id)].into();
    of(Subsystem { namespaces, serial: "1".into(), access, ..Subsystem::default() })
}

/// The catalog of one subsystem.
fn of(subsystem: Subsystem) -> Arc<Catalog> {
    Arc::new(Catalog { subsystems: [(SUBNQN.to_owned(), subsystem)].into(), ..Catalog::default() })
}

/// A server whose namespace 1 is volume A, on a disk that can be faulty.
async fn serve(core: &Core, limits: Limits) -> (Rc<Server>, SocketAddr, Faults) {
    let server = Server::new(core.clone(), limits, core_links(1).remove(0));
    let (dev, faults) = Faulty::wrap(disk(), 1);
    add(&server, A, dev);
    server.set_catalog(catalog(A));
    let address = listen(core, &server, Service::Nvme).await;
    (server, address, faults)
}

fn disk() -> Dev {
    Dev::new(Mem::new(MemOptions::new(512, 1 << 14)))
}

fn add(server: &Rc<Server>, id: VolumeId, dev: Dev) -> Rc<Volume> {
    let volume = Volume::new(dev, Epoch::default());
    let served = Rc::clone(&volume);
    server.add_volume(ServedVolume {
        id,
        name: format!("{id:?}"),
        volume,
        thin: false,
        access: None,
    });
    served
}

/// The first byte of the volume.
async fn first_byte(core: &Core, volume: &Rc<Volume>) -> u8 {
    let range = Blocks::new(Lba(0), 1);
    let account = core.buffer_pool().account();
    let read = volume.execute(Request::Read { range }, &account);
    timeout(PATIENCE, read).await.unwrap().unwrap().to_vec()[0]
}

fn connect(qid: u16, cntlid: u16) -> Connect {
    Connect {
        qid,
        sqsize: 31,
        flow_control: true,
        kato_ms: 0,
        host_id: [7; 16],
        hostnqn: "nqn.2014-08.org.nvmexpress:uuid:6d0a3c1e-0000-4000-8000-000000000001".into(),
        subnqn: SUBNQN.into(),
        cntlid: if qid == 0 { CNTLID_DYNAMIC } else { cntlid },
    }
}

fn discovery() -> Connect {
    Connect { subnqn: DISCOVERY_NQN.into(), ..connect(0, 0) }
}

fn rw(opcode: NvmOpcode, cid: u16, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, cid, 1);
    sqe.cdw10[2] = (blocks - 1).into();
    sqe.sgl = Sgl::transport(blocks * 512);
    sqe
}

fn abort(cid: u16, sqid: u16, whom: u16) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::Abort.0, cid, 0);
    sqe.cdw10[0] = (u32::from(sqid) | u32::from(whom) << 16).into();
    sqe
}

/// A socket, or a stream on one.
trait Wire: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Wire for T {}

/// One queue of a host.
struct Queue {
    stream: Box<dyn Wire>,
    host: ScriptedHost,
    bytes: Vec<u8>,
    replies: VecDeque<Reply>,
    cntlid: u16,
    /// The result of Connect.
    connected: u64,
}

impl Queue {
    async fn dial(core: &Core, to: SocketAddr) -> Self {
        Self::on(core.dial(to).await.unwrap())
    }

    fn on(stream: impl Wire + 'static) -> Self {
        let (stream, bytes, replies) = (Box::new(stream), Vec::new(), VecDeque::new());
        Self { stream, host: ScriptedHost::default(), bytes, replies, cntlid: 0, connected: 0 }
    }

    async fn try_connect(core: &Core, to: SocketAddr, connect: &Connect) -> (Self, Status) {
        let mut queue = Self::dial(core, to).await;
        let status = queue.connects(connect).await;
        (queue, status)
    }

    /// How its Connect ends.
    async fn connects(&mut self, connect: &Connect) -> Status {
        self.send(&self.host.ic_req()).await;
        assert!(matches!(self.next().await, Reply::IcResp { .. }));
        let (sqe, data) = connect.encode(0);
        self.send(&self.host.capsule(sqe, data.as_bytes())).await;
        let Reply::Resp { status, result, .. } = self.next().await else { panic!("no response") };
        (self.cntlid, self.connected) = (result as u16, result);
        status
    }

    async fn connect(core: &Core, to: SocketAddr, connect: &Connect) -> Self {
        let (queue, status) = Self::try_connect(core, to, connect).await;
        assert!(status.is_success(), "{status:?}");
        queue
    }

    async fn send(&mut self, bytes: &[u8]) {
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("it reads").unwrap();
    }

    async fn command(&mut self, sqe: Sqe) {
        self.send(&self.host.command(sqe)).await;
    }

    async fn next(&mut self) -> Reply {
        timeout(PATIENCE, self.receive()).await.expect("an answer in time").expect("an answer")
    }

    /// `None` when the server has closed the connection.
    async fn receive(&mut self) -> Option<Reply> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            if let Some(reply) = self.replies.pop_front() {
                return Some(reply);
            }
            let n = self.stream.read(&mut bytes).await.ok().filter(|n| *n > 0)?;
            self.bytes.extend(&bytes[..n]);
            self.replies.extend(self.host.parse(&mut self.bytes));
        }
    }

    /// CSTS.SHST.
    async fn shutdown_status(&mut self) -> u64 {
        self.command(Property::encode(3, 0x1c, false, None)).await;
        self.status(3).await.1 >> 2 & 0b11
    }

    /// How the command ends.
    async fn status(&mut self, cid: u16) -> (Status, u64) {
        match self.next().await {
            Reply::Resp { cid: c, status, result, .. } if c == cid => (status, result),
            other => panic!("{other:?}"),
        }
    }
}

/// An admin queue whose controller is enabled, and an I/O queue.
async fn associate(core: &Core, to: SocketAddr) -> (Queue, Queue) {
    let mut admin = Queue::connect(core, to, &connect(0, 0)).await;
    admin.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
    assert!(admin.status(1).await.0.is_success());
    let io = Queue::connect(core, to, &connect(1, admin.cntlid)).await;
    (admin, io)
}

/// A namespace may become another volume's while a write's data is on its way: the data is for
/// the volume that the host meant, or for none.
#[test]
fn data_never_reaches_a_volume_that_took_over_the_namespace() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let a = Rc::clone(&server.volume(A).unwrap().volume);
        let (_admin, mut io) = associate(&core, at).await;
        io.command(rw(NvmOpcode::Write, 5, 64)).await;
        let r2t = io.next().await;
        let b = add(&server, B, disk());
        server.set_catalog(catalog(B));
        sleep(Duration::from_millis(20)).await;
        io.send(&io.host.answer(&r2t, &[0x55; 64 * 512], 1 << 16)).await;
        let (status, _) = io.status(5).await;
        assert_eq!(status.code(), Status::INVALID_NAMESPACE);
        assert_eq!((first_byte(&core, &a).await, first_byte(&core, &b).await), (0, 0));
    });
}

/// Likewise when the volume comes back under its identity, as another one on another disk.
#[test]
fn data_never_reaches_the_successor_of_a_volume_that_was_closed() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let (_admin, mut io) = associate(&core, at).await;
        io.command(rw(NvmOpcode::Write, 5, 64)).await;
        let r2t = io.next().await;
        let old = server.remove_volume(A).unwrap();
        old.volume.close(&core.buffer_pool().account()).await.unwrap();
        let new = add(&server, A, disk());
        io.send(&io.host.answer(&r2t, &[0x55; 64 * 512], 1 << 16)).await;
        assert!(!io.status(5).await.0.is_success());
        assert_eq!(first_byte(&core, &new).await, 0);
        io.command(rw(NvmOpcode::Write, 6, 64)).await;
        let r2t = io.next().await;
        io.send(&io.host.answer(&r2t, &[0x66; 64 * 512], 1 << 16)).await;
        assert!(io.status(6).await.0.is_success());
        assert_eq!(first_byte(&core, &new).await, 0x66);
    });
}

/// Waiting for memory ends with the connection: otherwise a host that reconnects leaves more behind
/// each time.
#[test]
fn a_closed_connection_leaves_no_memory_waiters() {
    on_core(async |core| {
        let (_server, at, _) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        let hog = core.buffer_pool().account();
        let _all = hog.try_credit(POOL, MemoryClass::LocalIo).unwrap();
        for cid in 0..4 {
            io.command(rw(NvmOpcode::Write, cid, 64)).await;
        }
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.buffer_pool().usage().waiting, 4);
        admin.command(abort(7, 1, 2)).await;
        assert_eq!(admin.status(7).await.1, 0, "aborted");
        assert_eq!(io.status(2).await.0.code(), Status::ABORT_REQUESTED);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.buffer_pool().usage().waiting, 3);
        drop(io);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.buffer_pool().usage().waiting, 0);
    });
}

/// Neither status says that the host may not try again (NVMe Base 2.0, 3.3.3.2.1); RFD 0037.
#[test]
fn commands_and_connections_without_memory_get_a_retry_status() {
    on_core(async |core| {
        let limits = Limits { memory_timeout: Duration::from_millis(600), ..Limits::default() };
        let (_server, at, _) = serve(&core, limits).await;
        let (admin, mut io) = associate(&core, at).await;
        let all = core.buffer_pool().account().try_credit(POOL, MemoryClass::LocalIo).unwrap();
        for opcode in [NvmOpcode::Read, NvmOpcode::Write] {
            io.command(rw(opcode, 5, 64)).await;
            let (status, _) = io.status(5).await;
            assert_eq!(
                (status.code().field(), status.is_do_not_retry()),
                (0x021, false),
                "Interrupted"
            );
        }
        for qid in [0, 2] {
            let (_, status) = Queue::try_connect(&core, at, &connect(qid, admin.cntlid)).await;
            assert_eq!((status.code().field(), status.is_do_not_retry()), (0x181, false), "Busy");
        }
        assert_eq!(core.buffer_pool().usage().waiting, 0);
        drop(all);
        io.command(rw(NvmOpcode::Read, 6, 1)).await;
        assert!(matches!(io.next().await, Reply::Data { .. }));
        Queue::connect(&core, at, &connect(2, admin.cntlid)).await;
    });
}

/// NVMe Base 2.0, 5.1: Abort is answered, also when the queue that it is aimed at goes meanwhile:
/// before it gets there, at the same time, or while the command is being aborted.
#[test]
fn an_abort_is_answered_though_its_queue_goes() {
    on_core(async |core| {
        let (_server, at, faults) = serve(&core, Limits::default()).await;
        faults.add(Rule::new(Effect::Stall));
        for pause_ms in [0, 0, 0, 1, 20] {
            for queue_first in [true, false] {
                let (mut admin, mut io) = associate(&core, at).await;
                io.command(rw(NvmOpcode::Read, 5, 8)).await;
                sleep(Duration::from_millis(20)).await;
                if queue_first {
                    drop(io);
                    sleep(Duration::from_millis(pause_ms)).await;
                    admin.command(abort(7, 1, 5)).await;
                } else {
                    admin.command(abort(7, 1, 5)).await;
                    sleep(Duration::from_millis(pause_ms)).await;
                    drop(io);
                }
                let (status, result) = admin.status(7).await;
                assert!(!status.is_success() || result == 1, "nothing was aborted: {result}");
            }
        }
        faults.clear();
        faults.release();
    });
}

/// NVMe Base 2.0, 3.6.1: CSTS.SHST says that a shutdown is complete once what was written is
/// durable, and not before.
#[test]
fn a_shutdown_is_complete_once_the_volumes_are_flushed() {
    on_core(async |core| {
        let (_server, at, faults) = serve(&core, Limits::default()).await;
        let (mut admin, _io) = associate(&core, at).await;
        faults.add(Rule::new(Effect::Stall).on(&[OpKind::Flush]));
        admin.command(Property::encode(2, 0x14, false, Some(0x0046_4001))).await;
        assert!(admin.status(2).await.0.is_success());
        sleep(Duration::from_millis(50)).await;
        assert_eq!(admin.shutdown_status().await, 0b01, "shutdown processing occurring");
        assert_eq!(faults.hits(), 1);
        faults.clear();
        faults.release();
        let began = Instant::now();
        while admin.shutdown_status().await != 0b10 {
            assert!(began.elapsed() < PATIENCE, "shutdown processing complete");
            sleep(Duration::from_millis(5)).await;
        }
    });
}

/// A host that disables the write cache relies on all data being durable once that is answered.
#[test]
fn the_write_cache_is_off_once_the_volumes_are_flushed() {
    on_core(async |core| {
        let (_server, at, faults) = serve(&core, Limits::default()).await;
        let (mut admin, _io) = associate(&core, at).await;
        faults.add(Rule::new(Effect::Stall).on(&[OpKind::Flush]));
        let mut off = Sqe::new(AdminOpcode::SetFeatures.0, 2, 0);
        off.cdw10[0] = 6.into();
        admin.command(off).await;
        assert!(timeout(Duration::from_millis(50), admin.receive()).await.is_err(), "it waits");
        assert_eq!(faults.hits(), 1);
        faults.clear();
        faults.release();
        assert!(admin.status(2).await.0.is_success());
    });
}

/// Connections without a connected queue do not lock out others.
#[test]
fn silent_connections_make_room() {
    on_core(async |core| {
        let limits = Limits { logins: 4, ..Limits::default() };
        let (server, at, _) = serve(&core, limits).await;
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(core.dial(at).await.unwrap());
        }
        let (_admin, mut io) = associate(&core, at).await;
        io.command(rw(NvmOpcode::Write, 5, 64)).await;
        assert!(matches!(io.next().await, Reply::R2t { .. }));
        assert!(server.sessions().len() <= 6, "{}", server.sessions().len());
    });
}

/// Discovery needs no authentication, and a host may disable its keep alive: discovery controllers
/// take no identifiers that I/O controllers need.
#[test]
fn discovery_controllers_make_room() {
    on_core(async |core| {
        let limits = Limits { discoveries: 8, ..Limits::default() };
        let (server, at, _) = serve(&core, limits).await;
        let (_admin, mut io) = associate(&core, at).await;
        let mut hosts = VecDeque::new();
        for _ in 0..1100 {
            hosts.push_back(Queue::connect(&core, at, &discovery()).await);
            if hosts.len() > 50 {
                let mut gone = hosts.pop_front().unwrap();
                assert_eq!(timeout(PATIENCE, gone.receive()).await.expect("it is closed"), None);
            }
        }
        assert_eq!(server.sessions().iter().filter(|s| s.target.is_none()).count(), 8);
        io.command(rw(NvmOpcode::Write, 5, 64)).await;
        assert!(matches!(io.next().await, Reply::R2t { .. }));
        let (_another, _) = associate(&core, at).await;
    });
}

/// A stopping node waits for a write whose data never comes no longer than usual, and not at all
/// after the shutdown timeout.
#[test]
fn a_write_without_its_data_does_not_hold_up_a_shutdown() {
    on_core(async |core| {
        for (receive_s, deadline_s) in [(1, 20), (20, 1)] {
            let receive_timeout = Duration::from_secs(receive_s);
            let limits = Limits { receive_timeout, ..Limits::default() };
            let (server, at, _) = serve(&core, limits).await;
            let (_admin, mut io) = associate(&core, at).await;
            io.command(rw(NvmOpcode::Write, 5, 64)).await;
            assert!(matches!(io.next().await, Reply::R2t { .. }));
            let began = Instant::now();
            server.drain(began + Duration::from_secs(deadline_s)).await;
            let took = began.elapsed();
            assert!(took < Duration::from_secs(5), "{took:?}");
            sleep(Duration::from_millis(1500)).await;
            assert_eq!(server.sessions().len(), 0);
        }
    });
}

/// A stopping node answers pending commands: the idle admin queue does not take the I/O queues with
/// it, and a command that fails before it reaches a volume does not delay the stop.
#[test]
fn commands_are_answered_while_the_node_stops() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let (mut admin, mut io) = associate(&core, at).await;
        let mut trim = Sqe::new(NvmOpcode::DatasetManagement.0, 5, 1);
        trim.cdw10[1] = 4u32.into();
        trim.sgl = Sgl::transport(16);
        io.command(trim).await;
        let r2t = io.next().await;
        let began = Instant::now();
        let finish = async {
            sleep(Duration::from_millis(50)).await;
            assert_eq!(server.sessions().len(), 2);
            io.send(&io.host.answer(&r2t, &[0xff; 16], 16)).await;
            assert_eq!(io.status(5).await.0.code(), Status::LBA_OUT_OF_RANGE);
            assert_eq!((io.receive().await, admin.receive().await), (None, None));
            drop((io, admin));
        };
        tokio::join!(server.drain(began + PATIENCE), finish);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

/// Namespace 1 is volume A, which this node, the second, and another serve.
fn shared() -> Arc<Catalog> {
    let access = block::Access::Optimized;
    let serving = |n| ServingNode { node: NodeIndex::new(n).unwrap(), access };
    let nodes = vec![serving(0), serving(1)];
    let node = serving(1).node;
    Arc::new(Catalog { node, shared: [(A, nodes)].into(), ..(*catalog(A)).clone() })
}

/// A server of that node, and where it listens; the volume's state and faults.
async fn serve_shared(core: &Core) -> (Rc<Server>, SocketAddr, AccessState, Faults) {
    let (server, at, _) = serve(core, Limits::default()).await;
    let (access, faults) = share(&server);
    server.set_catalog(shared());
    (server, at, access, faults)
}

/// Volume A is one from now on that others serve too.
fn share(server: &Rc<Server>) -> (AccessState, Faults) {
    let (dev, faults) = Faulty::wrap(disk(), 1);
    let (volume, access) = (Volume::new(dev, Epoch::default()), AccessState::default());
    let (id, name, own) = (A, "A".to_owned(), Some(access.clone()));
    server.add_volume(ServedVolume { id, name, volume, thin: false, access: own });
    (access, faults)
}

impl Queue {
    /// The data of an admin command.
    async fn fetch(&mut self, mut sqe: Sqe, bytes: u32) -> Vec<u8> {
        sqe.sgl = Sgl::transport(bytes);
        self.command(sqe).await;
        let mut data = Vec::new();
        loop {
            match self.next().await {
                Reply::Data { bytes, success, .. } => {
                    data.extend(bytes);
                    if success {
                        return data;
                    }
                }
                Reply::Resp { status, .. } if status.is_success() => return data,
                other => panic!("{other:?}"),
            }
        }
    }

    /// The ANA log.
    async fn ana(&mut self, bytes: u32) -> Vec<u8> {
        let mut sqe = Sqe::new(AdminOpcode::GetLogPage.0, 9, 0);
        sqe.cdw10[0] = (0x0c | (bytes / 4 - 1) << 16).into();
        self.fetch(sqe, bytes).await
    }

    async fn discovery_log(&mut self, bytes: u32) -> Vec<u8> {
        let mut page = Sqe::new(AdminOpcode::GetLogPage.0, 9, 0);
        page.cdw10[0] = (0x70 | (bytes / 4 - 1) << 16).into();
        self.fetch(page, bytes).await
    }

    /// Generation of the discovery log, and number of its records.
    async fn discovery_header(&mut self) -> (u32, u32) {
        let header = self.discovery_log(1024).await;
        (dword(&header, 0), dword(&header, 8))
    }

    async fn identify(&mut self, cns: u32, nsid: u32) -> Vec<u8> {
        let mut sqe = Sqe::new(AdminOpcode::Identify.0, 9, nsid);
        sqe.cdw10[0] = cns.into();
        self.fetch(sqe, 4096).await
    }

    /// How a read of a block ends.
    async fn read(&mut self) -> Status {
        self.command(rw(NvmOpcode::Read, 7, 1)).await;
        match self.next().await {
            Reply::Data { success: true, .. } => Status::SUCCESS,
            Reply::Data { .. } => self.status(7).await.0,
            Reply::Resp { status, .. } => status,
            other => panic!("{other:?}"),
        }
    }
}

fn dword(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// NVMe over Fabrics 1.1, 5.3: a record for each portal of each node that serves the subsystem, and
/// a port identifier for each.
#[test]
fn the_discovery_log_lists_the_portals_of_every_node_that_serves() {
    on_core(async |core| {
        let (server, at, ..) = serve_shared(&core).await;
        let portals = |nvme: &[&str]| {
            let nvme = nvme.iter().map(|text| text.parse().unwrap()).collect();
            Portals { nvme, ..Portals::default() }
        };
        let node = |n| NodeIndex::new(n).unwrap();
        let others = [
            (node(0), portals(&["192.0.2.1:4420", "198.51.100.1:4420"])),
            (node(2), portals(&["192.0.2.3:4420"])),
        ];
        let own = vec!["192.0.2.2:4420".parse().unwrap(), "[::]:4421".parse().unwrap()];
        let catalog =
            Catalog { peer_portals: others.into(), nvme_portals: own, ..(*shared()).clone() };
        server.set_catalog(Arc::new(catalog));
        let listed = discovered(&core, at).await;
        let listed: Vec<_> = listed.iter().map(|(_, port, at, _)| (*port, at.as_str())).collect();
        let here = at.ip().to_string();
        let own = [(257, "192.0.2.2"), (258, here.as_str())];
        assert_eq!(listed, [&own[..], &[(1, "192.0.2.1"), (2, "198.51.100.1")]].concat());
    });
}

/// RFD 0019, 5: a host may ask any node for all that it may use, and is referred to the others.
#[test]
fn the_discovery_log_lists_volumes_and_discovery_services_of_other_nodes() {
    on_core(async |core| {
        let (server, at, ..) = serve_shared(&core).await;
        let node = |n| NodeIndex::new(n).unwrap();
        let at_port = |text: &str| vec![text.parse().unwrap()];
        let third = Portals {
            nvme: at_port("192.0.2.3:4420"),
            // Who came to 127.0.0.1 is most likely to reach the second.
            discovery: ["192.0.2.3:8009", "127.1.2.3:8009", "[2001:db8::3]:8009"]
                .map(|at| at.parse().unwrap())
                .into(),
            ..Portals::default()
        };
        let mut catalog = (*shared()).clone();
        catalog.nvme_portals = at_port("192.0.2.2:4420");
        catalog.peer_portals = [(node(2), third)].into();
        let (far, access) = (VolumeId([21; 16]), catalog.subsystems[SUBNQN].access.clone());
        for (nqn, access) in [("nqn.x:far", access), ("nqn.x:hidden", AccessList::default())] {
            let namespaces = [(1, far)].into();
            let subsystem = Subsystem { namespaces, access, ..Subsystem::default() };
            catalog.remote.subsystems.insert(nqn.into(), subsystem);
        }
        let serving = ServingNode { node: node(2), access: block::Access::Optimized };
        catalog.shared.insert(far, vec![serving]);
        server.set_catalog(Arc::new(catalog.clone()));
        let listed = discovered(&core, at).await;
        let listed: Vec<_> =
            listed.iter().map(|(kind, port, at, nqn)| (*kind, *port, &**at, &**nqn)).collect();
        let (referral, nvm) = (1, 2);
        assert_eq!(
            listed,
            [
                (nvm, 257, "192.0.2.2", SUBNQN),
                (nvm, 513, "192.0.2.3", "nqn.x:far"),
                (referral, 641, "127.1.2.3", DISCOVERY_NQN),
            ]
        );
        // A host without access learns of no subsystem.
        catalog.subsystems.clear();
        catalog.remote.subsystems.remove("nqn.x:far");
        server.set_catalog(Arc::new(catalog));
        assert!(discovered(&core, at).await.is_empty());
    });
}

/// RFD 0019, 5; NVMe Base 2.0, 5.2: a host with a pending event request learns that the log has
/// changed, and finds the new one; changes that do not concern it are not reported.
#[test]
fn persistent_discovery_reports_changes() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let mut host = discoverer(&core, at).await;
        let mut events = Sqe::new(AdminOpcode::SetFeatures.0, 8, 0);
        (events.cdw10[0], events.cdw10[1]) = (0x0b.into(), (1 << 31).into());
        host.command(events).await;
        assert!(host.status(8).await.0.is_success());
        let publish = |generation, other: Option<Subsystem>| {
            let mut catalog = Catalog { generation, ..(*catalog(A)).clone() };
            catalog.subsystems.extend(other.map(|other| ("nqn.x:other".to_owned(), other)));
            server.set_catalog(Arc::new(catalog));
        };
        let hidden = Subsystem { namespaces: [(1, A)].into(), ..Subsystem::default() };
        assert_eq!(host.discovery_header().await, (0, 1));
        host.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0)).await;
        publish(1, Some(hidden.clone()));
        let early = timeout(Duration::from_millis(50), host.receive()).await;
        assert!(early.is_err(), "nothing that he may see: {early:?}");
        publish(2, Some(Subsystem { access: AccessList::open(), ..hidden }));
        assert_eq!(host.status(30).await, (Status::SUCCESS, 0x0070_f002));
        assert_eq!(host.discovery_header().await, (2, 2));
        host.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 31, 0)).await;
        publish(3, None);
        assert_eq!(host.status(31).await, (Status::SUCCESS, 0x0070_f002));
        assert_eq!(host.discovery_header().await, (3, 1));
    });
}

/// A host of the discovery service.
async fn discoverer(core: &Core, at: SocketAddr) -> Queue {
    let mut host = Queue::connect(core, at, &discovery()).await;
    host.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
    assert!(host.status(1).await.0.is_success());
    host
}

/// The discovery log: what each entry is, its port, its address and its subsystem.
async fn discovered(core: &Core, at: SocketAddr) -> Vec<(u8, u16, String, String)> {
    let mut host = discoverer(core, at).await;
    let (_, records) = host.discovery_header().await;
    let log = host.discovery_log(1024 * (records + 1)).await;
    let text = |bytes: &[u8]| {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        text.trim_end_matches(['\0', ' ']).to_owned()
    };
    let entry = |r: &[u8]| {
        let port = u16::from_le_bytes([r[4], r[5]]);
        (r[2], port, text(&r[512..768]), text(&r[256..512]))
    };
    log[1024..].chunks_exact(1024).map(entry).collect()
}

/// NVMe Base 2.0, 8.1: the host is notified of a change; the answers in each state.
#[test]
fn access_states_reach_the_host() {
    on_core(async |core| {
        let (_server, at, access, faults) = serve_shared(&core).await;
        access.set(block::Access::Unavailable);
        let (mut admin, mut io) = associate(&core, at).await;
        assert_eq!(admin.cntlid, 4097, "the second node's first");
        let id = admin.identify(1, 0).await;
        assert_eq!((id[76] & 1 << 3, dword(&id, 344), dword(&id, 348)), (8, 1024, 1024));
        let (log_bytes, mdts) = (16 + 1024 * 32 + 1024 * 4, id[77]);
        assert!(log_bytes <= 4096 << mdts, "else Linux goes without");
        assert_eq!(dword(&admin.identify(0, 1).await, 92), 1, "ANAGRPID");
        assert_eq!(io.read().await.field() & 0x7ff, 0x302);
        let log = admin.ana(52).await;
        assert_eq!((log[8], dword(&log, 16), log[32], dword(&log, 48)), (1, 1, 3, 1));
        let mut events = Sqe::new(AdminOpcode::SetFeatures.0, 8, 0);
        (events.cdw10[0], events.cdw10[1]) = (0x0b.into(), (1 << 11).into());
        admin.command(events).await;
        assert!(admin.status(8).await.0.is_success());
        for (to, fenced, state, status) in [
            (block::Access::Transitioning, true, 0xf, 0x303),
            (block::Access::Optimized, true, 1, 0x303),
            (block::Access::Unavailable, false, 3, 0x302),
            (block::Access::Optimized, false, 1, 0),
        ] {
            let request = Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0);
            admin.command(request).await;
            access.set(to);
            assert_eq!(admin.status(30).await.1, 0x000c_0302, "{to:?}");
            faults.clear();
            if fenced {
                faults.add(Rule::new(Effect::Fail(Error::Fenced)));
            }
            assert_eq!(io.read().await.field() & 0x7ff, status, "{to:?}");
            assert_eq!(admin.ana(52).await[32], state, "{to:?}");
        }
    });
}

/// No two nodes give out the same identifier for a subsystem: a controller that has one of another
/// node's goes once its namespace is shared, and the host finds another.
#[test]
fn a_controller_goes_when_its_identifier_is_another_nodes() {
    on_core(async |core| {
        let (server, at, _) = serve(&core, Limits::default()).await;
        let (mut admin, _io) = associate(&core, at).await;
        assert_eq!(admin.cntlid, 1, "as ever");
        share(&server);
        server.set_catalog(shared());
        assert!(timeout(PATIENCE, admin.receive()).await.expect("it is told").is_none());
        let (admin, _io) = associate(&core, at).await;
        assert_eq!(admin.cntlid, 4097);
    });
}
