//! Hosts that fence each other (NVMe Base 2.0, 8.19), through one server and a volume that keeps
//! reservations.

use block::METADATA_LBA;
use reservation::ReservationType as Type;
use target::IscsiTarget;
use volume::{ReservationContext, ReservationGate};

use super::*;
use crate::common::client::Client;

/// Where the hosts write: elsewhere than the table lies.
const DATA: Blocks = Blocks { at: Lba(0), count: 64 };

/// A server whose namespace 1 keeps reservations, where it listens, and the faults of its disk.
async fn keeping(core: &Core) -> (Rc<Server>, SocketAddr, Faults) {
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    let (dev, faults) = Faulty::wrap(disk(), 1);
    let volume = add(&server, A, dev);
    let gate = Rc::new(ReservationGate::default());
    gate.set_context(ReservationContext {
        power_epoch: 1,
        incarnation: 1,
        serving_incarnations: vec![1],
    });
    volume.enable_reservations(gate, server.pool().account());
    server.set_catalog(catalog(A));
    let address = listen(core, &server, Service::Nvme).await;
    (server, address, faults)
}

/// A host: its key is its number.
struct Node {
    n: u8,
    admin: Queue,
    io: Queue,
}

impl Node {
    async fn new(core: &Core, to: SocketAddr, n: u8) -> Self {
        let own = |qid, cntlid| {
            let hostnqn = format!("nqn.2026-01.com.example:host-{n}");
            Connect { host_id: [n; 16], hostnqn, ..connect(qid, cntlid) }
        };
        let mut admin = Queue::connect(core, to, &own(0, 0)).await;
        admin.command(Property::encode(1, 0x14, false, Some(0x0046_0001))).await;
        assert!(admin.status(1).await.0.is_success());
        let io = Queue::connect(core, to, &own(1, admin.cntlid)).await;
        Self { n, admin, io }
    }

    /// Sends a reservation command.
    async fn send(&mut self, opcode: NvmOpcode, dword: u32, keys: &[u64]) {
        let data: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        let mut sqe = Sqe::new(opcode.0, 40, 1);
        sqe.cdw10[0] = dword.into();
        let capsule = self.io.host.capsule(sqe, &data);
        self.io.send(&capsule).await;
    }

    async fn ask(&mut self, opcode: NvmOpcode, dword: u32, keys: &[u64]) -> Status {
        self.send(opcode, dword, keys).await;
        self.io.status(40).await.0.code()
    }

    async fn register(&mut self) -> Status {
        let key = self.n.into();
        self.ask(NvmOpcode::ReservationRegister, 0, &[0, key]).await
    }

    async fn acquire(&mut self, kind: Type) -> Status {
        let dword = u32::from(kind.nvme()) << 8;
        self.ask(NvmOpcode::ReservationAcquire, dword, &[self.n.into(), 0]).await
    }

    /// Preempts, with Preempt and Abort.
    async fn preempt(&mut self, victim: u8) {
        let dword = 2 | u32::from(Type::WriteExclusive.nvme()) << 8;
        let keys = [self.n.into(), victim.into()];
        self.send(NvmOpcode::ReservationAcquire, dword, &keys).await;
    }

    /// How a write of 8 blocks ends.
    async fn write(&mut self) -> Status {
        let sqe = rw(NvmOpcode::Write, 41, 8);
        let capsule = self.io.host.capsule(sqe, &[self.n; 8 * 512]);
        self.io.send(&capsule).await;
        self.io.status(41).await.0.code()
    }

    /// Generation, type, whether registrations persist, and keys.
    async fn report(&mut self) -> (u8, u8, u8, Vec<u8>) {
        let mut sqe = Sqe::new(NvmOpcode::ReservationReport.0, 42, 1);
        (sqe.cdw10[0], sqe.cdw10[1]) = ((1024u32 / 4 - 1).into(), 1.into());
        let report_data = self.io.fetch(sqe, 1024).await;
        let count = usize::from(report_data[5]);
        let keys = report_data[64..].chunks(64).take(count).map(|r| r[8]).collect();
        (report_data[0], report_data[4], report_data[9], keys)
    }

    /// A feature with this value; the status, and the returned data.
    async fn feature(&mut self, opcode: AdminOpcode, fid: u32, value: u32) -> (Status, u64) {
        let mut sqe = Sqe::new(opcode.0, 43, 1);
        (sqe.cdw10[0], sqe.cdw10[1]) = (fid.into(), value.into());
        self.admin.command(sqe).await;
        self.admin.status(43).await
    }
}

/// 8.19, 7.2: a preempted host cannot write, is notified, and can read why.
#[test]
fn hosts_fence_each_other() {
    on_core(async |core| {
        let (_server, at, _) = keeping(&core).await;
        let (mut a, mut b) = (Node::new(&core, at, 1).await, Node::new(&core, at, 2).await);
        assert_eq!(a.acquire(Type::WriteExclusive).await, Status::RESERVATION_CONFLICT);
        assert_eq!(a.register().await, Status::SUCCESS);
        assert_eq!(a.acquire(Type::WriteExclusive).await, Status::SUCCESS);
        assert_eq!(
            (a.write().await, b.write().await),
            (Status::SUCCESS, Status::RESERVATION_CONFLICT)
        );
        assert_eq!(b.io.read().await, Status::SUCCESS);
        assert_eq!(b.acquire(Type::WriteExclusive).await, Status::RESERVATION_CONFLICT);
        assert_eq!(b.register().await, Status::SUCCESS);
        assert_eq!(b.report().await, (2, 1, 0, vec![1, 2]));
        a.admin.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0)).await;
        b.preempt(1).await;
        assert_eq!(b.io.status(40).await.0, Status::SUCCESS);
        assert_eq!(
            (b.write().await, a.write().await),
            (Status::SUCCESS, Status::RESERVATION_CONFLICT)
        );
        assert_eq!(b.report().await, (3, 1, 0, vec![2]));
        assert_eq!(a.admin.status(30).await.1, 0x0080_0006);
        let mut log = Sqe::new(AdminOpcode::GetLogPage.0, 9, 0);
        log.cdw10[0] = (0x80 | 15 << 16).into();
        let log = a.admin.fetch(log, 64).await;
        assert_eq!((log[0], log[8], dword(&log, 12)), (1, 1, 1), "registration preempted");
    });
}

/// 7.2: Preempt and Abort is answered when no write of the preempted host can reach the medium any
/// more; commands that wait for data end without a request to the volume, those at the disk when
/// the disk completes them.
#[test]
fn preempt_and_abort_waits_for_what_is_in_flight() {
    on_core(async |core| {
        let (_server, at, faults) = keeping(&core).await;
        let (mut a, mut b) = (Node::new(&core, at, 1).await, Node::new(&core, at, 2).await);
        assert_eq!((a.register().await, b.register().await), (Status::SUCCESS, Status::SUCCESS));
        assert_eq!(a.acquire(Type::WriteExclusiveRegistrantsOnly).await, Status::SUCCESS);
        faults.add(Rule::new(Effect::Stall).within(DATA));
        let stalled = a.io.host.capsule(rw(NvmOpcode::Write, 5, 8), &[1; 8 * 512]);
        a.io.send(&stalled).await;
        a.io.command(rw(NvmOpcode::Write, 6, 64)).await;
        let r2t = a.io.next().await;
        assert!(matches!(r2t, Reply::R2t { .. }), "{r2t:?}");
        b.preempt(1).await;
        sleep(Duration::from_millis(50)).await;
        a.io.send(&a.io.host.answer(&r2t, &[1; 64 * 512], 1 << 16)).await;
        let (status, _) = a.io.status(6).await;
        assert_eq!(status.code(), Status::PREEMPTED_AND_ABORTED);
        assert!(!status.is_do_not_retry(), "a host that has lost nothing may send it again");
        let early = timeout(Duration::from_millis(50), b.io.receive()).await;
        assert!(early.is_err(), "a write of the loser is at the disk: {early:?}");
        faults.clear();
        faults.release();
        // The disk has executed some; the others fail with a conflict.
        let (status, _) = a.io.status(5).await;
        let ends = [Status::SUCCESS, Status::PREEMPTED_AND_ABORTED, Status::RESERVATION_CONFLICT];
        assert!(ends.contains(&status.code()), "{status:?}");
        assert_eq!(b.io.status(40).await.0, Status::SUCCESS);
        assert_eq!(
            (b.write().await, a.write().await),
            (Status::SUCCESS, Status::RESERVATION_CONFLICT)
        );
    });
}

/// 5.27.1.27: the feature is the table's, for all controllers.
#[test]
fn persistence_is_the_namespaces() {
    on_core(async |core| {
        let (_server, at, _) = keeping(&core).await;
        let (mut a, mut b) = (Node::new(&core, at, 1).await, Node::new(&core, at, 2).await);
        assert_eq!(b.feature(AdminOpcode::GetFeatures, 0x83, 0).await, (Status::SUCCESS, 0));
        assert_eq!(a.feature(AdminOpcode::SetFeatures, 0x83, 1).await, (Status::SUCCESS, 0));
        assert_eq!(b.feature(AdminOpcode::GetFeatures, 0x83, 0).await, (Status::SUCCESS, 1));
        assert_eq!(b.report().await, (0, 0, 1, vec![]));
    });
}

/// A change that a host requested does not happen once its connection is gone: it may have
/// reconnected, and seen that it did not.
#[test]
fn a_change_does_not_outlive_its_connection() {
    on_core(async |core| {
        let (server, at, faults) = keeping(&core).await;
        let mut a = Node::new(&core, at, 1).await;
        assert_eq!(a.write().await, Status::SUCCESS, "the gate has read its table");
        faults.add(Rule::new(Effect::Stall).within(Blocks::new(METADATA_LBA, 176)));
        a.send(NvmOpcode::ReservationRegister, 0, &[0, 1]).await;
        let struck = async {
            while faults.hits() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, struck).await.expect("the table is being read");
        let Node { io, admin, .. } = a;
        drop(io);
        sleep(Duration::from_millis(100)).await;
        faults.clear();
        faults.release();
        // Changes are made one after the other: after this one, that one was made or never will be.
        let mut b = Node::new(&core, at, 2).await;
        assert_eq!(b.register().await, Status::SUCCESS);
        assert_eq!(b.report().await.3, [2]);
        drop((admin, server));
    });
}

/// RFD 0019: halves of a Compare and Write, and copies, are bound by reservations as all writes
/// are.
#[test]
fn fused_commands_and_copies_are_judged() {
    on_core(async |core| {
        let (_server, at, faults) = keeping(&core).await;
        let (mut a, mut b) = (Node::new(&core, at, 1).await, Node::new(&core, at, 2).await);
        assert_eq!((a.register().await, b.register().await), (Status::SUCCESS, Status::SUCCESS));
        assert_eq!(a.acquire(Type::WriteExclusiveRegistrantsOnly).await, Status::SUCCESS);
        assert_eq!(b.io.compare_and_write(0, 1).await, (Status::SUCCESS, Status::SUCCESS));
        // A half that waits for the other, and a copy that the disk holds up.
        faults.add(Rule::new(Effect::Stall).on(&[OpKind::Read]).within(DATA));
        b.io.send_copy(22, 32, &[(0, 8)]).await;
        b.io.with_data(commands::half(commands::FIRST, 11), &[1; 8 * 512]).await;
        // Both are in flight: the copy is at the disk, and the first command of a pair was sent
        // right after it.
        let began = Instant::now();
        while core.buffer_pool().usage().free == core.buffer_pool().usage().total
            || faults.hits() == 0
        {
            assert!(began.elapsed() < PATIENCE, "they come");
            sleep(Duration::from_millis(5)).await;
        }
        sleep(Duration::from_millis(20)).await;
        let dword = 2 | u32::from(Type::WriteExclusiveRegistrantsOnly.nvme()) << 8;
        a.send(NvmOpcode::ReservationAcquire, dword, &[1, 2]).await;
        assert_eq!(b.io.status(11).await.0.code(), Status::PREEMPTED_AND_ABORTED);
        assert!(
            b.io.is_silent().await && a.io.is_silent().await,
            "a read of the loser is at the disk"
        );
        faults.clear();
        faults.release();
        let (status, range) = b.io.status(22).await;
        let ends = [Status::PREEMPTED_AND_ABORTED, Status::RESERVATION_CONFLICT];
        assert!(ends.contains(&status.code()) && range == 0, "{status:?}");
        assert_eq!(a.io.status(40).await.0, Status::SUCCESS);
        b.io.with_data(commands::half(commands::SECOND, 12), &[2; 8 * 512]).await;
        assert_eq!(b.io.status(12).await.0.code(), Status::FAILED_FUSED);
        let refused = (Status::RESERVATION_CONFLICT, Status::FAILED_FUSED);
        assert_eq!(b.io.compare_and_write(1, 2).await, refused);
        assert_eq!(b.io.copy(32, &[(0, 8)]).await.0.code(), Status::RESERVATION_CONFLICT);
        assert_eq!(a.io.bytes(0, 8).await, [1; 8 * 512]);
        assert_eq!(a.io.bytes(32, 8).await, [0; 8 * 512]);
    });
}

const TARGET: &str = "iqn.2026-01.com.example:disk";
const WRITE_EXCLUSIVE: u8 = 1;
const GOOD: u8 = 0;
const CHECK: u8 = 2;
const CONFLICT: u8 = 0x18;

impl Client {
    /// PERSISTENT RESERVE OUT with these keys; its status.
    async fn reserve(&mut self, action: u8, key: u64, action_key: u64) -> u8 {
        let cdb = [0x5f, action, WRITE_EXCLUSIVE, 0, 0, 0, 0, 0, 24, 0];
        let list = [&key.to_be_bytes()[..], &action_key.to_be_bytes(), &[0; 8]].concat();
        self.tell(&cdb, &list).await
    }

    /// The status of a command with its data.
    async fn tell(&mut self, cdb: &[u8], data: &[u8]) -> u8 {
        let command = self.initiator.command(cdb, 0x20, data.len() as u32, data);
        self.send(&command).await;
        self.next().await.header[3]
    }

    /// How WRITE (10) of a block ends.
    async fn write_block(&mut self) -> u8 {
        self.tell(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[9; 512]).await
    }

    /// The keys that READ KEYS lists.
    async fn keys(&mut self) -> Vec<u8> {
        let (status, list) = self.ask_for(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], 255).await;
        assert_eq!(status, GOOD);
        list[8..].chunks(8).map(|key| key[7]).collect()
    }
}

/// RFD 0019, 2: one table for both protocols. Each fences the other, sees its key, and notifies its
/// own host of losses.
#[test]
fn hosts_of_both_protocols_fence_each_other() {
    on_core(async |core| {
        let (server, at, _) = keeping(&core).await;
        let luns = [(1, A)].into();
        let target = IscsiTarget { luns, access: AccessList::open(), ..IscsiTarget::default() };
        let targets = [(TARGET.to_owned(), target)].into();
        server.set_catalog(Arc::new(Catalog { targets, ..(*catalog(A)).clone() }));
        let iscsi_at = listen(&core, &server, Service::Iscsi).await;
        let mut host = Node::new(&core, at, 1).await;
        let mut initiator = Client::log_in_at(&core, iscsi_at, 1, TARGET, &[]).await;
        assert_eq!(host.register().await, Status::SUCCESS);
        assert_eq!(host.acquire(Type::WriteExclusive).await, Status::SUCCESS);
        assert_eq!(initiator.write_block().await, CONFLICT);
        assert_eq!(initiator.keys().await, [1]);
        // PREEMPT AND ABORT by the initiator, whose key is 2.
        assert_eq!(initiator.reserve(0, 0, 2).await, GOOD);
        host.admin.command(Sqe::new(AdminOpcode::AsyncEventRequest.0, 30, 0)).await;
        assert_eq!(initiator.reserve(5, 2, 1).await, GOOD);
        assert_eq!(host.admin.status(30).await.1, 0x0080_0006, "reservation log");
        assert_eq!(host.write().await, Status::RESERVATION_CONFLICT);
        assert_eq!(initiator.write_block().await, GOOD);
        assert_eq!(host.report().await, (3, WRITE_EXCLUSIVE, 0, vec![2]));
        // Preempt and Abort by the host.
        assert_eq!(host.register().await, Status::SUCCESS);
        host.preempt(2).await;
        assert_eq!(host.io.status(40).await.0, Status::SUCCESS);
        assert_eq!(host.write().await, Status::SUCCESS);
        assert_eq!(initiator.write_block().await, CONFLICT);
        for report_data in [[0x2f, 0x00], [0x2a, 0x05]] {
            let (status, sense) = initiator.ask_for(&[0; 6], 0).await;
            assert_eq!((status, &sense[12..14]), (CHECK, &report_data[..]), "cleared, preempted");
        }
        assert_eq!(initiator.keys().await, [1]);
    });
}
