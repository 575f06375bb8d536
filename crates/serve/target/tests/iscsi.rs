//! iSCSI clients that misbehave, or behave well at a bad moment, against a server on real cores.

mod auth_throttle;
mod copy;
mod mapping;
mod token;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::common::client::Client;
use crate::common::{POOL, listen, on_core, on_cores};
use block::testing::faulty::{Effect, Faults, Faulty, Rule};
use block::{AccessState, Dev, Epoch, Error, Mem, MemOptions, MemoryClass};
use iscsi::pdu::{LoginStage, NO_TAG, Opcode, TaskFunction};
use iscsi::testing::Pdu;
use rt::Core;
use target::{
    AccessList, AccessRule, Catalog, IscsiTarget, Limits, NodeIndex, Portals, ServedVolume, Server,
    Service, ServingNode, VolumeId, VolumeSpace, core_links,
};
use tokio::time::{Instant, sleep, timeout};
use volume::{ReservationContext, ReservationGate, Volume};

const TARGET: &str = "iqn.2026-01.com.example:disk";
const BLOCK: usize = 512;
const WRITE: u8 = 0x20;
const PATIENCE: Duration = Duration::from_secs(20);

fn catalog(core: usize) -> Arc<Catalog> {
    let access = AccessList::open();
    let luns = [(1, VolumeId([7; 16]))].into();
    let targets =
        [(TARGET.to_owned(), IscsiTarget { core, luns, access, ..IscsiTarget::default() })].into();
    Arc::new(Catalog { targets, ..Catalog::default() })
}

/// A server with one volume, and where it listens.
async fn serve(core: &Core, limits: Limits) -> (Rc<Server>, SocketAddr) {
    let server = Server::new(core.clone(), limits, core_links(1).remove(0));
    add_volume(&server);
    server.set_catalog(catalog(0));
    let address = listen(core, &server, Service::Iscsi).await;
    (server, address)
}

fn add_volume(server: &Rc<Server>) {
    let mem = Mem::new(MemOptions::new(512, 1 << 17));
    let volume = volume_on(server, Dev::new(mem));
    let (id, name) = (VolumeId([7; 16]), "disk".to_owned());
    server.add_volume(ServedVolume { id, name, volume, thin: false, access: None });
}

/// A volume that only this node has.
fn volume_on(server: &Rc<Server>, dev: Dev) -> Rc<Volume> {
    let volume = Volume::new(dev, Epoch::default());
    let gate = Rc::new(ReservationGate::default());
    gate.set_context(ReservationContext {
        power_epoch: 1,
        incarnation: 1,
        serving_incarnations: vec![1],
    });
    volume.enable_reservations(gate, server.pool().account());
    volume
}

async fn until(what: impl Fn() -> bool) {
    let all = async {
        while !what() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, all).await.expect("it comes about");
}

impl Client {
    /// Asks for a session.
    async fn ask(&mut self, keys: &[(&str, &str)]) {
        self.ask_at(TARGET, keys).await;
    }

    /// Begins a discovery session.
    async fn discover(&mut self) {
        let keys =
            [("InitiatorName", "iqn.2026-01.com.example:host"), ("SessionType", "Discovery")];
        let login =
            self.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &keys);
        self.send(&login).await;
        let answer = self.next().await;
        assert_eq!(answer.header[36..38], [0, 0], "{answer:?}");
    }

    async fn log_in(core: &Core, to: SocketAddr, isid: u8, keys: &[(&str, &str)]) -> Self {
        Self::log_in_at(core, to, isid, TARGET, keys).await
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
        let hog = core.buffer_pool().account();
        for _ in 0..20 {
            let all = hog.try_credit(POOL, MemoryClass::LocalIo).unwrap();
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
        assert_eq!(core.buffer_pool().usage().waiting, 0);
    });
}

/// Waiting for memory ends with the command: otherwise a client that gives up and retries leaves
/// more behind each time.
#[test]
fn aborted_commands_leave_no_memory_waiters() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        let hog = core.buffer_pool().account();
        let _all = hog.try_credit(POOL, MemoryClass::LocalIo).unwrap();
        for _ in 0..20 {
            let itt = client.write(0, 64, &[]).await;
            sleep(Duration::from_millis(5)).await;
            let abort = client.initiator.task(TaskFunction::AbortTask, itt, 0);
            client.send(&abort).await;
            assert_eq!(client.next().await.opcode(), Opcode::TaskResponse);
        }
        client.write(0, 64, &[]).await;
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.buffer_pool().usage().waiting, 1);
        drop(client);
        sleep(Duration::from_millis(20)).await;
        assert_eq!(core.buffer_pool().usage().waiting, 0);
    });
}

/// SAM-5 5.3.1: initiators get this answer before they give the path up; RFD 0037.
#[test]
fn commands_without_memory_get_a_retry_status() {
    on_core(async |core| {
        let limits = Limits { memory_timeout: Duration::from_millis(600), ..Limits::default() };
        let (_server, at) = serve(&core, limits).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        let all = core.buffer_pool().account().try_credit(POOL, MemoryClass::LocalIo).unwrap();
        let write = client.write(0, 64, &[]).await;
        let status = client.next().await;
        assert_eq!((status.itt(), status.header[3]), (write, 0x28));
        let read = client.initiator.itt;
        let command = client.initiator.command(&cdb(0x28, 0, 8), 0x40, 8 * BLOCK as u32, &[]);
        client.send(&command).await;
        let status = client.next().await;
        assert_eq!((status.itt(), status.header[3]), (read, 0x28));
        assert!(core.buffer_pool().usage().shortage_duration.is_some());
        assert_eq!(
            (core.buffer_pool().usage().waiting, core.buffer_pool().usage().timed_out_waits),
            (0, 2)
        );
        drop(all);
        let again = client.write(0, 64, &[]).await;
        let r2t = client.next().await;
        client.answer(&r2t).await;
        let status = client.next().await;
        assert_eq!((status.itt(), status.header[3]), (again, 0));
    });
}

/// More concurrent writes than there is memory for, each with a part of its data in the command:
/// the data of those that have memory comes behind commands that have none yet.
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
        let usage = core.buffer_pool().usage();
        assert_eq!((usage.free, usage.waiting, usage.overdrafts), (usage.total, 0, 0));
    });
}

/// The core that accepts a connection which moves on has room for another at once.
#[test]
fn connections_that_come_from_another_core_count() {
    on_cores(2, async |core| {
        let limits = Limits { connections: 3, ..Limits::default() };
        let mut doors = core_links(2);
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
        let at = listen(&core, &server, Service::Iscsi).await;
        let mut clients = Vec::new();
        for isid in 0..3 {
            clients.push(Client::log_in(&core, at, isid, &[]).await);
        }
        let mut late = Client::dial(&core, at, 3).await;
        late.ask(&[]).await;
        assert_eq!(timeout(PATIENCE, late.receive()).await.expect("it is told"), None);
    });
}

/// RFC 7143 6.3.5: a login of the same initiator port ends the session that it had with the target,
/// and no other one.
#[test]
fn clause_6_3_5_a_port_that_logs_in_again_reinstates_its_session() {
    on_core(async |core| {
        let (server, at) = serve(&core, Limits::default()).await;
        let mut old = Client::log_in(&core, at, 1, &[]).await;
        let mut other = Client::log_in(&core, at, 2, &[]).await;
        let mut new = Client::log_in(&core, at, 1, &[]).await;
        let reply = old.next().await;
        assert_eq!((reply.opcode(), reply.header[36]), (Opcode::AsyncMessage, 3), "it is dropped");
        assert!(old.receive().await.is_none());
        for client in [&mut other, &mut new] {
            assert_eq!(client.ask_for(&READY, 0).await.0, 0);
        }
        drop(old);
        sleep(Duration::from_millis(50)).await;
        assert_eq!(server.sessions().len(), 2);
        // Discovery sessions do not replace sessions.
        let mut discovery = Client::dial(&core, at, 2).await;
        discovery.discover().await;
        assert_eq!(other.ask_for(&READY, 0).await.0, 0);
    });
}

/// RFC 7143 6.3.1, 11.13.5: a connection for a session that is not there, and one more for a
/// session that is.
#[test]
fn clause_6_3_1_connections_are_not_added_to_sessions() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut client = Client::dial(&core, at, 1).await;
        client.ask(&[]).await;
        let login = client.next().await;
        let tsih = u16::from_be_bytes([login.header[14], login.header[15]]);
        assert_ne!(tsih, 0);
        let cases = [(tsih, 1, 1, [2, 6]), (tsih + 1, 0, 1, [2, 10]), (tsih, 0, 2, [2, 10])];
        for (tsih, cid, isid, status) in cases {
            let mut more = Client::dial(&core, at, isid).await;
            (more.initiator.tsih, more.initiator.cid) = (tsih, cid);
            more.ask(&[]).await;
            assert_eq!(more.next().await.header[36..38], status, "TSIH {tsih}, CID {cid}");
        }
        // Its first command fetches the attention of a new initiator.
        assert_eq!(client.ask_for(&READY, 0).await.0, 2);
        assert_eq!(client.ask_for(&READY, 0).await.0, 0, "the session lives");
    });
}

/// RFC 7143 6.3.4: a connection replaces that of its session. The session and its nexuses remain;
/// tasks do not.
#[test]
fn clause_6_3_4_a_connection_is_reinstated() {
    on_core(async |core| {
        let (server, at) = serve(&core, Limits::default()).await;
        let mut old = Client::dial(&core, at, 1).await;
        old.ask(&[("InitialR2T", "No"), ("ImmediateData", "No")]).await;
        let login = old.next().await;
        assert_eq!(old.sense(&READY, 0).await.map(|[key, ..]| key), Some(6), "it is new");
        assert_eq!(old.ask_for(&[0x16, 0, 0, 0, 0, 0], 0).await.0, 0, "RESERVE");
        // A write whose data does not arrive.
        old.write(0, 8, &[]).await;
        assert_eq!(old.next().await.opcode(), Opcode::R2t);
        let mut new = Client::dial(&core, at, 1).await;
        new.initiator.tsih = u16::from_be_bytes([login.header[14], login.header[15]]);
        new.initiator.cmd_sn = old.initiator.cmd_sn;
        new.ask(&[]).await;
        let again = new.next().await;
        assert_eq!(again.header[36..38], [0, 0], "{again:?}");
        assert_eq!(again.header[8..16], login.header[8..16], "ISID and TSIH");
        assert_eq!(old.next().await.opcode(), Opcode::AsyncMessage);
        assert!(old.receive().await.is_none(), "it is closed");
        until(|| server.sessions().len() == 1).await;
        assert_eq!(new.ask_for(&READY, 0).await.0, 0, "no nexus was lost, nothing is told");
        let mut rival = Client::log_in(&core, at, 2, &[]).await;
        assert_eq!(rival.ask_for(&cdb(0x28, 0, 1), 512).await.0, 0x18, "it is RESERVEd still");
        // The negotiated parameters remain: data is sent unsolicited.
        let itt = new.initiator.itt;
        let mut write = new.initiator.command(&cdb(0x2a, 8, 1), WRITE, BLOCK as u32, &[]);
        write[1] &= 0x7f; // F: data follows
        new.send(&write).await;
        let data = new.initiator.data_out(itt, NO_TAG, 0, 0, true, &[7; BLOCK]);
        new.send(&data).await;
        let status = new.next().await;
        assert_eq!((status.opcode(), status.header[3]), (Opcode::ScsiResponse, 0), "{status:?}");
        assert_eq!(new.ask_for(&cdb(0x28, 8, 1), 512).await, (0, vec![7; BLOCK]));
        drop(new);
        until(|| server.sessions().len() == 1).await;
        // The conflict took precedence over the attention of a new initiator.
        assert_eq!(rival.sense(&READY, 0).await, Some([6, 0x29, 0]));
        assert_eq!(rival.ask_for(&cdb(0x28, 0, 1), 512).await.0, 0, "now it is lost");
    });
}

/// RFC 7143 4.2.3.2: a reset of the unit ends the commands of all sessions; the others get a unit
/// attention.
#[test]
fn clause_4_2_3_2_a_reset_ends_the_commands_of_other_sessions() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut one = Client::log_in(&core, at, 1, &[]).await;
        let mut other = Client::log_in(&core, at, 2, &[("ImmediateData", "No")]).await;
        other.write(0, 64, &[]).await;
        assert_eq!(other.next().await.opcode(), Opcode::R2t);
        let reset = one.initiator.task(TaskFunction::LogicalUnitReset, NO_TAG, 0);
        one.send(&reset).await;
        let answer = one.next().await;
        assert_eq!((answer.opcode(), answer.header[2]), (Opcode::TaskResponse, 0));
        // The write ends without an answer (TAS is zero); the next command reports why.
        let [key, asc, _] = other.sense(&READY, 0).await.expect("a unit attention");
        assert_eq!((key & 0xf, asc), (6, 0x29));
        assert_eq!(other.ask_for(&READY, 0).await.0, 0);
    });
}

/// SAM-5 7.5: CLEAR TASK SET ends the commands of other sessions, and notifies them.
#[test]
fn sam_5_clause_7_5_clear_task_set_ends_the_commands_of_other_sessions() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        let mut one = Client::log_in(&core, at, 1, &[]).await;
        let mut other = Client::log_in(&core, at, 2, &[("ImmediateData", "No")]).await;
        other.write(0, 64, &[]).await;
        assert_eq!(other.next().await.opcode(), Opcode::R2t);
        let clear = one.initiator.task(TaskFunction::ClearTaskSet, NO_TAG, 0);
        one.send(&clear).await;
        let answer = one.next().await;
        assert_eq!((answer.opcode(), answer.header[2]), (Opcode::TaskResponse, 0));
        assert_eq!(other.sense(&READY, 0).await, Some([6, 0x2f, 0]), "COMMANDS CLEARED");
        assert_eq!(other.ask_for(&READY, 0).await.0, 0);
        assert_eq!(one.ask_for(&READY, 0).await.0, 0, "who cleared is told nothing");
    });
}

/// Connections that never log in do not lock out others, whether they reach the limit of logins or
/// of all connections.
#[test]
fn silent_connections_make_room() {
    on_core(async |core| {
        for (connections, logins) in [(64, 4), (8, 8)] {
            let limits = Limits { connections, logins, ..Limits::default() };
            let (server, at) = serve(&core, limits).await;
            let mut silent = Vec::new();
            for _ in 0..100 {
                silent.push(core.dial(at).await.unwrap());
            }
            let client = Client::log_in(&core, at, 1, &[]).await;
            assert!(server.sessions().len() <= logins + 1, "{:?}", server.sessions().len());
            drop((silent, client));
            sleep(Duration::from_millis(50)).await;
            assert_eq!(server.sessions().len(), 0);
            let mut clients = Vec::new();
            for isid in 0..4 {
                clients.push(Client::log_in(&core, at, isid, &[]).await);
            }
        }
    });
}

/// Discovery needs no authentication, and a session that answers every ping never ends by itself:
/// the oldest is closed for the next, and those that serve volumes stay.
#[test]
fn discovery_sessions_make_room() {
    on_core(async |core| {
        let limits = Limits { discoveries: 3, ..Limits::default() };
        let (server, at) = serve(&core, limits).await;
        let _normal = Client::log_in(&core, at, 100, &[]).await;
        let mut clients = Vec::new();
        for isid in 0..10 {
            let mut client = Client::dial(&core, at, isid).await;
            client.discover().await;
            clients.push(client);
        }
        sleep(Duration::from_millis(50)).await;
        let sessions = server.sessions();
        assert_eq!(sessions.iter().filter(|s| s.target.is_none()).count(), 3);
        assert_eq!(sessions.iter().filter(|s| s.target.is_some()).count(), 1);
        for gone in &mut clients[..7] {
            assert_eq!(timeout(PATIENCE, gone.receive()).await.expect("it is closed"), None);
        }
    });
}

/// A client that has sent more than was read still learns why it is refused.
#[test]
fn a_refusal_reaches_a_client_that_went_on_sending() {
    on_core(async |core| {
        let (_server, at) = serve(&core, Limits::default()).await;
        for isid in 0..3 {
            let mut client = Client::dial(&core, at, isid).await;
            let keys = [
                ("InitiatorName", "iqn.2026-01.com.example:host"),
                ("TargetName", "iqn.2026-01.com.example:none"),
                ("SessionType", "Normal"),
            ];
            let stages = (LoginStage::Operational, Some(LoginStage::FullFeature));
            let mut bytes = client.initiator.login(stages.0, stages.1, &keys);
            bytes.extend(vec![0; 8 << 20]);
            client.send(&bytes).await;
            sleep(Duration::from_millis(5)).await;
            let answer = client.next().await;
            assert_eq!(answer.header[36..38], [2, 2], "authorization failure: {answer:?}");
        }
    });
}

/// A stopping node waits for a write whose data never comes no longer than usual.
#[test]
fn a_write_without_its_data_does_not_hold_up_a_shutdown() {
    on_core(async |core| {
        let receive_timeout = Duration::from_secs(1);
        let (server, at) = serve(&core, Limits { receive_timeout, ..Limits::default() }).await;
        let mut client = Client::log_in(&core, at, 1, &[("ImmediateData", "No")]).await;
        client.write(0, 64, &[]).await;
        assert_eq!(client.next().await.opcode(), Opcode::R2t);
        let began = Instant::now();
        server.drain(began + PATIENCE).await;
        assert!(began.elapsed() < 5 * receive_timeout, "{:?}", began.elapsed());
        assert_eq!(server.sessions().len(), 0);
    });
}

/// The second of three nodes that serve the volume; the third is in state `third`.
fn shared(third: block::Access) -> Arc<Catalog> {
    let node = |n| NodeIndex::new(n).unwrap();
    let serving = |n, access| ServingNode { node: node(n), access };
    let own = serving(1, block::Access::Optimized);
    let nodes = vec![serving(0, block::Access::Optimized), own, serving(2, third)];
    let shared = [(VolumeId([7; 16]), nodes)].into();
    Arc::new(Catalog { node: node(1), shared, ..(*catalog(0)).clone() })
}

/// A server of that node, and where it listens; the volume's state and faults.
async fn serve_shared(core: &Core) -> (Rc<Server>, SocketAddr, AccessState, Faults) {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    let (dev, faults) = Faulty::wrap(Dev::new(Mem::new(MemOptions::new(512, 1 << 17))), 1);
    let volume = Volume::new(dev, Epoch::default());
    let (id, name, access) = (VolumeId([7; 16]), "disk".to_owned(), AccessState::default());
    let served = ServedVolume { id, name, volume, thin: false, access: Some(access.clone()) };
    server.add_volume(served);
    server.set_catalog(shared(block::Access::Unavailable));
    let address = listen(core, &server, Service::Iscsi).await;
    (server, address, access, faults)
}

impl Client {
    /// The result of TEST UNIT READY, or of reading a block: success, or the sense data.
    async fn sense(&mut self, cdb: &[u8], bytes: u32) -> Option<[u8; 3]> {
        let (status, sense) = self.ask_for(cdb, bytes).await;
        (status == 2).then(|| [sense[2], sense[12], sense[13]])
    }
}

const READY: [u8; 6] = [0; 6];
const GROUPS: [u8; 12] = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0];

/// SPC-4 5.15.2, RFC 7143 4.4.1: a node of several is a portal group, a target port group and a
/// target port of its own.
#[test]
fn a_node_of_several_is_a_port_of_its_own() {
    on_core(async |core| {
        let (_server, at, ..) = serve_shared(&core).await;
        let mut client = Client::dial(&core, at, 1).await;
        client.ask(&[]).await;
        let login = client.next().await;
        let tag = b"TargetPortalGroupTag=2";
        assert!(login.data.windows(tag.len()).any(|w| w == tag), "{login:?}");
        let (_, page) = client.ask_for(&[0x12, 1, 0x83, 0, 255, 0], 255).await;
        let has = |d: &[u8]| page.windows(d.len()).any(|w| w == d);
        assert!(has(&[0x51, 0x94, 0, 4, 0, 0, 0, 2]), "relative target port");
        assert!(has(&[0x51, 0x95, 0, 4, 0, 0, 0, 2]), "target port group");
        assert!(has(b"disk,t,0x0002"), "name of the port");
        assert_eq!(client.ask_for(&[0x12, 0, 0, 0, 96, 0], 96).await.1[5], 0x18, "TPGS, 3PC");
        let (_, page) = client.ask_for(&[0x12, 1, 0x88, 0, 255, 0], 255).await;
        for name in [b"disk,t,0x0001", b"disk,t,0x0002", b"disk,t,0x0003"] {
            assert!(page.windows(name.len()).any(|w| w == name), "SCSI ports: all nodes'");
        }
    });
}

/// SBC-3 4.7.3.7: the space of a thin volume is reported to its initiators, even later ones.
#[test]
fn space_reaches_every_initiator() {
    on_core(async |core| {
        let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
        let mem = Mem::new(MemOptions::new(512, 1 << 17));
        let volume = Volume::new(Dev::new(mem), Epoch::default());
        let (id, name) = (VolumeId([7; 16]), "disk".to_owned());
        server.add_volume(ServedVolume { id, name, volume, thin: true, access: None });
        server.set_catalog(catalog(0));
        let at = listen(&core, &server, Service::Iscsi).await;
        let space = |used: u64, available: u64| VolumeSpace {
            used: used << 20,
            available: available << 20,
        };
        server.set_space(id, space(3, 40));
        let log = [0x4d, 0, 0x4c, 0, 0, 0, 0, 0, 255, 0];
        let mut first = Client::log_in(&core, at, 1, &[]).await;
        let (_, page) = first.ask_for(&log, 255).await;
        assert_eq!((page[3], page[11], page[23]), (24, 40, 3), "{page:?}");
        // A tenth of 64 MiB: 6 sets.
        server.set_space(id, space(60, 7));
        assert_eq!(first.sense(&READY, 0).await, None);
        server.set_space(id, space(62, 6));
        server.set_space(id, space(62, 5));
        assert_eq!(first.sense(&READY, 0).await, Some([6, 0x38, 0x07]));
        assert_eq!(first.sense(&READY, 0).await, None, "once");
        let mut late = Client::log_in(&core, at, 2, &[]).await;
        assert_eq!(late.ask_for(&log, 255).await.1[11], 5);
        assert_eq!(late.sense(&READY, 0).await, None);
    });
}

/// RFC 7143 11.13.5: a login at a node that is out of the replica set is redirected to one that
/// serves the volume, only if configured: multipathing wants its session here.
#[test]
fn clause_11_13_5_a_node_that_is_out_redirects_if_it_is_to() {
    on_core(async |core| {
        let (server, at, ..) = serve_shared(&core).await;
        let node = |n| NodeIndex::new(n).unwrap();
        let serving = |n, access| ServingNode { node: node(n), access };
        let catalog = |redirect, own, other| {
            let nodes = vec![serving(0, other), serving(1, own)];
            let portals = vec!["192.0.2.1:3260".parse().unwrap()];
            let others = [(node(0), Portals { iscsi: portals, ..Portals::default() })].into();
            let map = [(VolumeId([7; 16]), nodes)].into();
            Arc::new(Catalog {
                redirect,
                shared: map,
                peer_portals: others,
                ..(*shared(block::Access::Unavailable)).clone()
            })
        };
        let (yes, no) = (block::Access::Optimized, block::Access::Unavailable);
        for (redirect, own, other, moved) in [
            (true, no, yes, true),
            (false, no, yes, false),
            (true, yes, yes, false),
            (true, no, no, false),
        ] {
            server.set_catalog(catalog(redirect, own, other));
            let mut client = Client::dial(&core, at, 1).await;
            client.ask(&[]).await;
            let answer = client.next().await;
            let status = answer.header[36..38].to_vec();
            assert_eq!(status, [u8::from(moved); 2], "{redirect} {own:?} {other:?}");
            let address = answer.value("TargetAddress");
            assert_eq!(address.as_deref(), moved.then_some("192.0.2.1:3260"));
            if moved {
                assert!(client.receive().await.is_none(), "the connection ends");
            }
            let mut client = Client::dial(&core, at, 2).await;
            client.discover().await;
        }
    });
}

/// RFC 7143 appendix C: discovery reports all portals of a target, each with its node's group tag,
/// of the nodes that serve it.
#[test]
fn send_targets_lists_the_portals_of_every_node_that_serves() {
    on_core(async |core| {
        let (server, at, ..) = serve_shared(&core).await;
        let portals =
            |text: &str| Portals { iscsi: vec![text.parse().unwrap()], ..Portals::default() };
        let node = |n| NodeIndex::new(n).unwrap();
        let others = [
            (node(0), portals("192.0.2.1:3260")),
            (node(1), portals("192.0.2.2:3260")),
            (node(2), portals("[2001:db8::3]:3260")),
            (node(3), portals("192.0.2.4:3260")),
        ];
        // For the wildcard a client gets the address that it connected to.
        let own = vec!["192.0.2.9:3260".parse().unwrap(), "[::]:3261".parse().unwrap()];
        let here = format!("{}:3261,2", at.ip());
        let mut catalog = Catalog {
            peer_portals: others.into(),
            iscsi_portals: own,
            ..(*shared(block::Access::Unavailable)).clone()
        };
        // Volumes without a local replica: on the fourth node; on none for now; of other
        // initiators.
        let access = catalog.targets[TARGET].access.clone();
        for (name, id, access) in [
            ("iqn.2026-01.net.example:far", 21, access.clone()),
            ("iqn.2026-01.net.example:lost", 22, access),
            ("iqn.2026-01.net.example:hidden", 21, AccessList::default()),
        ] {
            let luns = [(0, VolumeId([id; 16])), (1, VolumeId([23; 16]))].into();
            let masks = [(1, BTreeSet::new())].into();
            let target = IscsiTarget { luns, masks, access, ..IscsiTarget::default() };
            catalog.remote.targets.insert(name.into(), target);
        }
        // The location of a unit that the initiator does not see is not reported.
        let masked = ServingNode { node: node(0), access: block::Access::Optimized };
        catalog.shared.insert(VolumeId([23; 16]), vec![masked]);
        let serving = ServingNode { node: node(3), access: block::Access::Optimized };
        catalog.shared.insert(VolumeId([21; 16]), vec![serving]);
        server.set_catalog(Arc::new(catalog));
        let mut client = Client::dial(&core, at, 1).await;
        client.discover().await;
        let ask = client.initiator.text(NO_TAG, &[("SendTargets", "All")]);
        client.send(&ask).await;
        let reply = client.next().await.text();
        let reply: Vec<_> =
            reply.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(
            reply,
            [
                ("TargetName", TARGET),
                ("TargetAddress", "192.0.2.9:3260,2"),
                ("TargetAddress", here.as_str()),
                ("TargetAddress", "192.0.2.1:3260,1"),
                ("TargetAddress", "[2001:db8::3]:3260,3"),
                ("TargetName", "iqn.2026-01.net.example:far"),
                ("TargetAddress", "192.0.2.4:3260,4"),
            ]
        );
    });
}

/// SPC-4 5.15.2.3: initiators get attentions for changes of any node; the answers in each state.
#[test]
fn access_states_reach_every_initiator() {
    on_core(async |core| {
        let (server, at, access, faults) = serve_shared(&core).await;
        let mut clients =
            [Client::log_in(&core, at, 1, &[]).await, Client::log_in(&core, at, 2, &[]).await];
        access.set(block::Access::Unavailable);
        sleep(Duration::from_millis(5)).await;
        for client in &mut clients {
            assert_eq!(client.sense(&READY, 0).await, Some([6, 0x2a, 0x06]));
            assert_eq!(client.sense(&cdb(0x28, 0, 1), 512).await, Some([2, 0x04, 0x0c]));
            let (_, groups) = client.ask_for(&GROUPS, 255).await;
            assert_eq!((groups[3], groups[4], groups[16], groups[28]), (36, 0, 3, 3));
        }
        access.set(block::Access::Transitioning);
        sleep(Duration::from_millis(5)).await;
        faults.add(Rule::new(Effect::Fail(Error::Fenced)).times(1));
        let [client, _] = &mut clients;
        assert_eq!(client.sense(&READY, 0).await, Some([6, 0x2a, 0x06]));
        assert_eq!(client.sense(&cdb(0x28, 0, 1), 512).await, Some([2, 0x04, 0x0a]));
        assert_eq!(client.sense(&cdb(0x28, 0, 1), 512).await, None);
        server.set_catalog(shared(block::Access::Optimized));
        access.set(block::Access::Optimized);
        sleep(Duration::from_millis(5)).await;
        for client in &mut clients {
            assert_eq!(client.sense(&READY, 0).await, Some([6, 0x2a, 0x06]), "once for all");
            assert_eq!(client.sense(&READY, 0).await, None);
            let (_, groups) = client.ask_for(&GROUPS, 255).await;
            assert_eq!((groups[4], groups[16], groups[28]), (0, 0, 0));
        }
    });
}
