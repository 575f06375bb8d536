//! An NVMe/TCP client: an association with one I/O queue.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use nvme::entry::{AdminOpcode, NvmOpcode, Sgl};
use nvme::fabrics::{CNTLID_DYNAMIC, Property};
use nvme::testing::{Reply, ScriptedHost};
use nvme::{Connect, IN_CAPSULE_BYTES, Sqe, Status};
use rt::Core;
use rt::net::Stream;
use rt::sim::World;
use target::{AccessList, Catalog, Service, Subsystem, VolumeId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use zerocopy::IntoBytes;

use super::file::FlushBehaviour;
use super::single_node::{self, InFlight, LogoutKind, ProtocolClient, ReceivedEvents};
use super::workload_model::{Completion, Op, PendingOperation, WorkloadModel};

const SUBSYSTEM: &str = "nqn.2026-01.com.example:volume";

/// The namespace.
const NSID: u32 = 1;

/// The I/O queue ID, and the queue size in entries, 0's based.
const QUEUE: u16 = 1;
const ENTRIES: u16 = 31;

/// Keep alive timeout in milliseconds.
const KATO_MS: u32 = 10_000;

/// Controller configuration and status.
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const ENABLE: u64 = 0x0046_0001;

/// Bits of command dword 12.
const FUA: u32 = 1 << 30;
const DEALLOCATE: u32 = 1 << 25;

/// Runs a node that exports over NVMe/TCP.
pub(crate) async fn run(world: World, flushes: FlushBehaviour) -> Result<(), String> {
    single_node::run::<NvmeClient>(world, flushes).await
}

/// An association; its admin queue runs in a separate task.
pub(super) struct NvmeClient {
    host: ScriptedHost,
    model: Rc<WorkloadModel>,
    received: Vec<u8>,
    cid: u16,
    /// Most data in one PDU, in bytes.
    max_pdu_data: usize,
    /// I/O commands to abort.
    aborts: mpsc::UnboundedSender<u16>,
    admin: AbortHandle,
}

impl Drop for NvmeClient {
    fn drop(&mut self) {
        self.admin.abort();
    }
}

/// A queue while it is being connected.
struct Queue {
    stream: Stream,
    host: ScriptedHost,
    received: Vec<u8>,
    max_pdu_data: usize,
}

impl Queue {
    async fn new(core: &Core, to: SocketAddr, mut host: ScriptedHost) -> Option<Self> {
        let wanted = host;
        (host.header_digest, host.data_digest) = (false, false);
        let stream = core.dial(to).await.ok()?;
        let mut queue = Self { stream, host, received: Vec::new(), max_pdu_data: 0 };
        queue.stream.write_all(&wanted.ic_req()).await.ok()?;
        let Reply::IcResp { digest, max_h2c_data } = queue.next_reply().await? else { return None };
        assert_eq!(digest, wanted.digest_bits(), "digests are supported");
        queue.host = wanted;
        queue.max_pdu_data = usize::try_from(max_h2c_data).ok()?;
        Some(queue)
    }

    async fn next_reply(&mut self) -> Option<Reply> {
        let mut bytes = [0; 4096];
        loop {
            if let Some(reply) = self.host.parse(&mut self.received).pop() {
                return Some(reply);
            }
            let n = self.stream.read(&mut bytes).await.ok().filter(|n| *n > 0)?;
            self.received.extend(&bytes[..n]);
        }
    }

    /// A command's result, if it succeeds.
    async fn call(&mut self, sqe: Sqe, data: &[u8]) -> Option<u64> {
        let out = match data {
            [] => self.host.command(sqe),
            data => self.host.capsule(sqe, data),
        };
        self.stream.write_all(&out).await.ok()?;
        match self.next_reply().await? {
            Reply::Resp { status, result, .. } if status.is_success() => Some(result),
            _ => None,
        }
    }

    /// Connects the queue to controller `cntlid`.
    async fn connect(&mut self, qid: u16, cntlid: u16, client: u8) -> Option<u16> {
        let connect = Connect {
            qid,
            sqsize: ENTRIES,
            flow_control: true,
            kato_ms: if qid == 0 { KATO_MS } else { 0 },
            host_id: [client + 1; 16],
            hostnqn: format!(
                "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-{client:012}"
            ),
            subnqn: SUBSYSTEM.into(),
            cntlid,
        };
        let (sqe, data) = connect.encode(0);
        u16::try_from(self.call(sqe, data.as_bytes()).await? & 0xffff).ok()
    }

    async fn enable(&mut self) -> Option<()> {
        self.call(Property::encode(1, CC, false, Some(ENABLE)), &[]).await?;
        while self.call(Property::encode(2, CSTS, false, None), &[]).await? & 1 == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        Some(())
    }

    /// Keeps the association alive, and aborts commands.
    async fn run_admin_queue(mut self, mut aborts: mpsc::UnboundedReceiver<u16>) {
        let (mut cid, mut bytes) = (2u16, [0; 4096]);
        loop {
            let sqe = tokio::select! {
                biased;
                read = self.stream.read(&mut bytes) => match read {
                    Ok(n) if n > 0 => {
                        self.received.extend(&bytes[..n]);
                        drop(self.host.parse(&mut self.received));
                        continue;
                    }
                    // The node closes the I/O queue, too.
                    _ => return,
                },
                abort = aborts.recv() => {
                    let Some(victim) = abort else { return };
                    let mut sqe = Sqe::new(AdminOpcode::Abort.0, 0, 0);
                    sqe.cdw10[0] = (u32::from(victim) << 16 | u32::from(QUEUE)).into();
                    sqe
                }
                () = sleep(Duration::from_millis(u64::from(KATO_MS) / 3)) => {
                    Sqe::new(AdminOpcode::KeepAlive.0, 0, 0)
                }
            };
            cid = cid.wrapping_add(1);
            let sqe = Sqe { cid: cid.into(), ..sqe };
            if self.stream.write_all(&self.host.command(sqe)).await.is_err() {
                return;
            }
        }
    }
}

impl ProtocolClient for NvmeClient {
    const SERVICE: Service = Service::Nvme;
    const HAS_COMPARE_AND_WRITE: bool = false;

    fn export(catalog: &mut Catalog, id: VolumeId) {
        let (namespaces, access) = ([(NSID, id)].into(), AccessList::open());
        let serial = "WR0001".into();
        let subsystem = Subsystem { namespaces, serial, access, ..Subsystem::default() };
        catalog.subsystems.insert(SUBSYSTEM.to_owned(), subsystem);
    }

    async fn connect(
        core: &Core,
        to: SocketAddr,
        client: u8,
        model: &Rc<WorkloadModel>,
    ) -> Option<(Self, Stream)> {
        let rng = &model.rng;
        let (header_digest, data_digest) = (rng.chance(0.5), rng.chance(0.5));
        let host = ScriptedHost { header_digest, data_digest, hpda: *rng.pick(&[0, 0, 7, 31]) };
        let mut admin = Queue::new(core, to, host).await?;
        let cntlid = admin.connect(0, CNTLID_DYNAMIC, client).await?;
        admin.enable().await?;
        let mut io = Queue::new(core, to, host).await?;
        io.connect(QUEUE, cntlid, client).await?;
        let (aborts, asked) = mpsc::unbounded_channel();
        let admin = tokio::task::spawn_local(admin.run_admin_queue(asked)).abort_handle();
        let Queue { stream, received, max_pdu_data: most, .. } = io;
        let nvme = Self {
            host,
            model: Rc::clone(model),
            received,
            cid: 0,
            max_pdu_data: most,
            aborts,
            admin,
        };
        Some((nvme, stream))
    }

    fn port(&self) -> Option<u8> {
        // Associations of one host coexist.
        None
    }

    fn send_operation(&mut self, pending: &PendingOperation, out: &mut Vec<u8>) -> u32 {
        self.cid = self.cid.wrapping_add(1);
        let (mut sqe, data) = command(pending);
        sqe.cid = self.cid.into();
        let fits = !data.is_empty() && length(data.len()) <= IN_CAPSULE_BYTES;
        if fits && self.model.rng.chance(0.7) {
            out.extend(self.host.capsule(sqe, &data));
        } else {
            sqe.sgl = Sgl::transport(length(data.len().max(pending.expected_len())));
            out.extend(self.host.command(sqe));
        }
        u32::from(self.cid)
    }

    fn receive(&mut self, bytes: &[u8], open: &mut InFlight, out: &mut Vec<u8>) -> ReceivedEvents {
        self.received.extend(bytes);
        let mut heard = ReceivedEvents::default();
        for reply in self.host.parse(&mut self.received) {
            self.handle_reply(&reply, open, out, &mut heard);
        }
        heard
    }

    fn issue_extra(&mut self, open: &InFlight, _out: &mut Vec<u8>) {
        let tags: Vec<u32> = open.keys().copied().collect();
        let victim = u16::try_from(*self.model.rng.pick(&tags)).expect("a command identifier");
        // The admin queue may be closed, and this one will be soon.
        let _ = self.aborts.send(victim);
    }

    fn begin_logout(&mut self, _out: &mut Vec<u8>) -> LogoutKind {
        LogoutKind::Close
    }
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a small command")
}

/// The command for an operation, and the data that goes with it.
fn command(pending: &PendingOperation) -> (Sqe, Vec<u8>) {
    let blocks = |opcode: NvmOpcode, range: &block::Blocks, flags: u32| {
        let mut sqe = Sqe::new(opcode.0, 0, NSID);
        let (at, count) = (range.at.0, u32::try_from(range.count).expect("small"));
        sqe.cdw10[0] = u32::try_from(at).expect("a small volume").into();
        sqe.cdw10[2] = ((count - 1) | flags).into();
        sqe
    };
    match &pending.op {
        Op::Read(range) => (blocks(NvmOpcode::Read, range, 0), Vec::new()),
        Op::Write { range, fua } => {
            let flags = if *fua { FUA } else { 0 };
            (blocks(NvmOpcode::Write, range, flags), pending.data.clone())
        }
        Op::Zero { range, unmap } => {
            let flags = if *unmap { DEALLOCATE } else { 0 };
            (blocks(NvmOpcode::WriteZeroes, range, flags), Vec::new())
        }
        Op::Unmap(ranges) => {
            let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, NSID);
            sqe.cdw10[0] = length(ranges.len() - 1).into();
            // Deallocate.
            sqe.cdw10[1] = 4.into();
            let mut list = Vec::new();
            for r in ranges {
                list.extend([0; 4]);
                list.extend(u32::try_from(r.count).expect("small").to_le_bytes());
                list.extend(r.at.0.to_le_bytes());
            }
            (sqe, list)
        }
        // There is no COMPARE AND WRITE here, so there is no counter.
        Op::Flush | Op::ReadCounter | Op::IncrementCounter(_) => {
            (Sqe::new(NvmOpcode::Flush.0, 0, NSID), Vec::new())
        }
    }
}

impl NvmeClient {
    fn handle_reply(
        &self,
        reply: &Reply,
        open: &mut InFlight,
        out: &mut Vec<u8>,
        heard: &mut ReceivedEvents,
    ) {
        match reply {
            Reply::Data { cid, offset, bytes, success, .. } => {
                let tag = u32::from(*cid);
                let Some(pending) = open.get_mut(&tag) else { return };
                if *offset as usize != pending.received.len() {
                    self.model.world.fail(format!("data out of order: {cid} at {offset}"));
                }
                pending.received.extend(bytes);
                if *success {
                    heard.completions.push((tag, Completion::Done));
                }
            }
            Reply::R2t { cid, .. } => {
                let Some(pending) = open.get(&u32::from(*cid)) else { return };
                let (_, data) = command(pending);
                let chunk = *self.model.rng.pick(&[512, 4096, self.max_pdu_data]);
                out.extend(self.host.answer(reply, &data, chunk.min(self.max_pdu_data)));
            }
            Reply::Resp { cid, status, .. } => {
                heard.completions.push((u32::from(*cid), completion_of(*status)));
            }
            Reply::Term { .. } => {
                self.model.world.fail(format!("the node finds fault: {reply:?}"));
            }
            Reply::IcResp { .. } => self.model.world.fail("a second ICResp"),
        }
    }
}

/// How a command ended.
fn completion_of(status: Status) -> Completion {
    if status.is_success() { Completion::Done } else { Completion::Failed(format!("{status:?}")) }
}
