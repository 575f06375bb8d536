//! A misbehaving controller on a socket: our own, except for what a test does to its I/O queue.

use crate::common;
#[path = "../../../protocol/nvme/tests/common/mod.rs"]
mod fake;

use std::cell::{Cell, RefCell};
use std::mem::offset_of;
use std::rc::Rc;
use std::time::Duration;

use crate::common::on_core;
use block::testing::TestClient;
use block::{BufferPool, Dev, Error, Lba};
use fake::driver::Target;
use initiator::nvme::{CompareError, Controller, Namespace, Options, Staging};
use nvme::entry::{AdminOpcode, Cqe, NvmOpcode};
use nvme::identify::{Cns, IdentifyController, IdentifyNamespace, NvmController};
use nvme::pdu::{CapsuleCmd, CapsuleResp, DataPdu, FLAG_LAST, FLAG_SUCCESS, PduType};
use nvme::testing::ScriptedHost;
use nvme::{Sqe, Status};
use rt::Core;
use rt::net::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};
use zerocopy::{FromBytes, IntoBytes};

/// How a command is falsified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// A read succeeds without any data.
    Nothing,
    /// A read succeeds with half of its data.
    Half,
    /// A flush fails, and the data to flush is dropped.
    Flush(Status),
    /// Both halves of a compare and write succeed, and the controller has not asked for their data.
    Fused,
    /// A request for events is answered at once: namespaces have changed.
    Events,
    /// The request is refused temporarily.
    NoEvent,
    /// Likewise as soon as the host asks what a namespace is, which it is told when the log of the
    /// event has been read.
    Changes,
}

impl Lie {
    /// Whether it applies to this command.
    fn is_about(self, sqe: &Sqe, is_io: bool) -> bool {
        const FUSED_SECOND: u8 = 0b10;
        let opcode = sqe.opcode;
        match self {
            Self::Nothing | Self::Half => is_io && opcode == NvmOpcode::Read.0,
            Self::Flush(_) => is_io && opcode == NvmOpcode::Flush.0,
            Self::Fused if is_io && opcode == NvmOpcode::Write.0 => sqe.flags & FUSED_SECOND != 0,
            Self::Fused => is_io && opcode == NvmOpcode::Compare.0,
            Self::Events | Self::NoEvent => !is_io && opcode == AdminOpcode::AsyncEventRequest.0,
            Self::Changes => {
                let asks = [AdminOpcode::AsyncEventRequest.0, AdminOpcode::GetLogPage.0];
                !is_io && (asks.contains(&opcode) || identifies(sqe, Cns::Namespace))
            }
        }
    }
}

/// Whether it is Identify of this structure.
fn identifies(sqe: &Sqe, cns: Cns) -> bool {
    sqe.opcode == AdminOpcode::Identify.0 && sqe.cdw10[0].get() & 0xff == u32::from(cns.0)
}

struct HostileController {
    target: RefCell<Target>,
    /// What it says of itself, in place of the truth: in which structure of Identify, where, and
    /// what.
    said: Cell<Option<(Cns, usize, u8)>>,
    /// How often it lies before it tells the truth, and how.
    lies: Cell<(usize, Lie)>,
    /// A request for events, and an answer that comes later.
    kept: RefCell<(Option<u16>, Vec<u8>)>,
    connections: Cell<usize>,
}

/// The completion of a command.
fn completion(cid: u16, status: Status, result: u64) -> Vec<u8> {
    let (result, sq_head, sq_id) = (result.into(), 0.into(), 0.into());
    let cqe = Cqe { result, sq_head, sq_id, cid: cid.into(), status: (status.field() << 1).into() };
    ScriptedHost::default().pdu(CapsuleResp::new(cqe).as_bytes(), &[], 0)
}

/// An event: a notice that namespaces have changed, of which log 04h tells.
fn event(cid: u16) -> Vec<u8> {
    completion(cid, Status::SUCCESS, 0x04_00_02)
}

/// Takes a PDU, once it is whole.
fn take_pdu(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = bytes.get(4..8)?.try_into().unwrap();
    let length = u32::from_le_bytes(length) as usize;
    (bytes.len() >= length).then(|| bytes.drain(..length).collect())
}

impl HostileController {
    async fn serve(self: Rc<Self>, mut stream: Stream) {
        let link = self.target.borrow_mut().open();
        self.connections.set(self.connections.get() + 1);
        let (mut bytes, mut received) = (vec![0; 1 << 16], Vec::new());
        while let Ok(n @ 1..) = stream.read(&mut bytes).await {
            received.extend_from_slice(&bytes[..n]);
            let mut answers = Vec::new();
            while let Some(pdu) = take_pdu(&mut received) {
                answers.extend(self.answer(link, &pdu));
            }
            if stream.write_all(&answers).await.is_err() {
                return;
            }
        }
    }

    fn answer(&self, link: usize, pdu: &[u8]) -> Vec<u8> {
        let is_io = self.target.borrow_mut().conn(link).queue().is_some_and(|queue| queue.id > 0);
        let capsule = CapsuleCmd::read_from_prefix(pdu).ok().map(|(capsule, _)| capsule);
        let sqe = capsule.filter(|c| c.common.kind() == PduType::CapsuleCmd).map(|c| c.sqe);
        let (left, how) = self.lies.get();
        if let Some(sqe) = sqe.filter(|sqe| left > 0 && how.is_about(sqe, is_io)) {
            self.lies.set((left - 1, how));
            return self.lie(link, pdu, &sqe);
        }
        let mut answer = self.truth(link, pdu);
        if let Some((cns, at, byte)) = self.said.get()
            && sqe.is_some_and(|sqe| identifies(&sqe, cns))
        {
            answer[size_of::<DataPdu>() + at] = byte;
        }
        answer
    }

    fn truth(&self, link: usize, pdu: &[u8]) -> Vec<u8> {
        let mut target = self.target.borrow_mut();
        target.feed(link, pdu, &mut || usize::MAX);
        target.take(link, &mut || usize::MAX)
    }

    fn lie(&self, link: usize, pdu: &[u8], sqe: &Sqe) -> Vec<u8> {
        let cid = sqe.cid.get();
        match self.lies.get().1 {
            Lie::Nothing | Lie::Fused => completion(cid, Status::SUCCESS, 0),
            Lie::Half => {
                let length = sqe.data_bytes() / 2;
                let mut header = DataPdu::new(PduType::C2HData, cid, 0, 0, length);
                header.common.flags = FLAG_LAST | FLAG_SUCCESS;
                ScriptedHost::default().pdu(header.as_bytes(), &vec![0x77; length as usize], 0)
            }
            Lie::Flush(status) => completion(cid, status, 0),
            Lie::Events => event(cid),
            Lie::NoEvent => completion(cid, Status::INTERRUPTED, 0),
            Lie::Changes => {
                let asks_for_events = sqe.opcode == AdminOpcode::AsyncEventRequest.0;
                let answer = if asks_for_events { Vec::new() } else { self.truth(link, pdu) };
                let mut kept = self.kept.borrow_mut();
                let (request, later) = &mut *kept;
                if sqe.opcode == AdminOpcode::GetLogPage.0 {
                    return [answer, std::mem::take(later)].concat();
                }
                if asks_for_events {
                    *request = Some(cid);
                }
                later.extend(answer);
                let with_fua = request.take_if(|_| !later.is_empty());
                with_fua.map(event).unwrap_or_default()
            }
        }
    }

    async fn start(core: &Core) -> (Rc<Self>, Options) {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let liar = Rc::new(Self {
            target: RefCell::default(),
            said: Cell::new(None),
            lies: Cell::new((0, Lie::Nothing)),
            kept: RefCell::default(),
            connections: Cell::new(0),
        });
        let server = Rc::clone(&liar);
        spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                spawn_local(Rc::clone(&server).serve(stream));
            }
        });
        let hostnqn = fake::HOSTNQN.to_owned();
        let options = Options { subnqn: fake::SUBNQN.to_owned(), hostnqn, ..common::options(at) };
        (liar, options)
    }
}

/// A read that succeeds without its data would expose old memory: the command is repeated on new
/// connections.
#[test]
fn a_read_without_its_data_fails() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        let options = Options { retry_timeout: Duration::from_secs(2), ..options };
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        client.write(0, &[5; 4096], false).await.unwrap();
        for how in [Lie::Nothing, Lie::Half] {
            let before = liar.connections.get();
            liar.lies.set((2, how));
            assert_eq!(client.read(0, 8).await.unwrap().to_vec(), [5; 4096], "{how:?}");
            assert_eq!(liar.connections.get(), before + 4, "two associations more");
        }
        liar.lies.set((usize::MAX, Lie::Half));
        assert_eq!(client.read(0, 8).await.map(drop), Err(Error::Gone), "in the end");
    });
}

/// A failed flush is not repeated: the second one would have nothing to do and succeed. One
/// reported as not executed is repeated.
#[test]
fn a_flush_that_has_failed_is_not_tried_again() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        let connect = || Controller::connect(&core, options.clone(), Staging::default());
        for (status, result) in [
            (Status::WRITE_FAULT, Err(Error::Gone)),
            (Status::INTERNAL_ERROR, Err(Error::Gone)),
            (Status::DATA_TRANSFER_ERROR, Err(Error::Gone)),
            (Status::NAMESPACE_NOT_READY, Ok(())),
            (Status::ANA_TRANSITION, Ok(())),
            (Status::TRANSIENT_TRANSPORT, Ok(())),
        ] {
            let controller = connect().await.unwrap();
            let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
            let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
            client.write(0, &[5; 4096], false).await.unwrap();
            liar.lies.set((1, Lie::Flush(status)));
            assert_eq!(client.flush().await, result, "{status:?}");
            assert_eq!(liar.lies.get().0, 0, "it was flushed");
            assert_eq!(client.read(0, 1).await.map(drop), result, "{status:?}, and for ever");
        }
    });
}

/// A compare and write whose data the controller did not fetch was not executed, whatever it says.
#[test]
fn a_compare_and_write_without_its_data_fails() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        // Capsules with nothing behind their entries: 0004h instead of 0404h.
        let ioccsz = offset_of!(IdentifyController, ioccsz);
        liar.said.set(Some((Cns::Controller, ioccsz + 1, 0)));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let namespace = Namespace::open(&controller, 1).await.unwrap();
        let client =
            TestClient::new(&Dev::shared(namespace.clone()), &BufferPool::new(1 << 20).unwrap());
        let ctx = client.ctx(1024).await;
        let [old, new] = [[0; 512], [1; 512]].map(|bytes| rt::buf::copy_in(ctx.credit(), &bytes));
        liar.lies.set((2, Lie::Fused));
        let sent = namespace.compare_and_write(Lba(0), (&old, &new), false, &ctx).await;
        assert_eq!((sent, liar.lies.get().0), (Err(CompareError::InDoubt), 0));
        assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [0; 512]);
    });
}

/// A flood of events does not occupy a core.
#[test]
fn event_requests_are_rate_limited() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        liar.lies.set((usize::MAX, Lie::Events));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        let began = Instant::now();
        let io = async {
            for byte in 0..10 {
                client.write(0, &[byte; 512], false).await.unwrap();
                assert_eq!(client.read(0, 1).await.unwrap().to_vec(), [byte; 512]);
            }
        };
        timeout(common::PATIENCE, io).await.expect("it gets on");
        sleep(Duration::from_millis(300)).await;
        let (events, ms) = (usize::MAX - liar.lies.get().0, began.elapsed().as_millis());
        assert!(events > 1 && events as u128 <= 2 + ms / 5, "{events} events in {ms} ms");
    });
}

/// A temporarily refused event request is repeated.
#[test]
fn refused_event_requests_are_repeated() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        liar.lies.set((2, Lie::NoEvent));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let asked = async {
            while liar.lies.get().0 > 0 {
                sleep(Duration::from_millis(10)).await;
            }
            // The next one is told what it asks for.
            let known = controller.generation();
            liar.lies.set((1, Lie::Events));
            controller.changed(known).await
        };
        assert!(timeout(common::PATIENCE, asked).await.expect("it is asked").is_some());
    });
}

/// A controller that reports a change at every verification is waited for no longer than any other
/// unusable one.
#[test]
fn endless_changes_are_bounded() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        let options = Options { retry_timeout: Duration::from_millis(300), ..options };
        liar.lies.set((usize::MAX, Lie::Changes));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        let end = async { while client.read(0, 1).await.is_ok() {} };
        timeout(common::PATIENCE, end).await.expect("it has an end");
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
    });
}

/// A controller that returns with a volatile cache: the namespace's user knows of none and does not
/// flush, so writes use FUA.
#[test]
fn writes_go_through_a_cache_that_was_not_there() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        liar.said.set(Some((Cns::Controller, offset_of!(IdentifyController, vwc), 0)));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        let namespace = Namespace::open(&controller, 1).await.unwrap();
        let client =
            TestClient::new(&Dev::shared(namespace.clone()), &BufferPool::new(1 << 20).unwrap());
        assert!(!client.dev().info().volatile_cache);
        let ctx = client.ctx(1024).await;
        let [old, new] = [[1; 512], [2; 512]].map(|bytes| rt::buf::copy_in(ctx.credit(), &bytes));
        for fua in [false, true] {
            client.write(0, &[1; 512], false).await.unwrap();
            namespace.compare_and_write(Lba(0), (&old, &new), false, &ctx).await.unwrap();
            client.zero(8, 8, false).await.unwrap();
            let requests = std::mem::take(&mut liar.target.borrow_mut().requests);
            let with_fua = |r: &&String| r.contains("fua");
            let with_fua: Vec<_> = requests.iter().filter(with_fua).collect();
            assert!(with_fua.len() >= 3, "{requests:?}");
            assert!(with_fua.iter().all(|r| r.ends_with(&format!("fua {fua}"))), "{requests:?}");
            liar.said.set(None);
            liar.lies.set((1, Lie::Half));
            client.read(0, 1).await.unwrap();
        }
    });
}

/// NVM Command Set 1.0, 4.1.5.1 (DLFEAT): blocks are freed in place of being zeroed only where that
/// is known to be the same.
#[test]
fn zeroes_are_not_freed_where_that_may_read_as_something_else() {
    const READS_ZEROES: u8 = 0b001;
    const READS_ONES: u8 = 0b010;
    const WRITE_ZEROES_FREES: u8 = 0b1000;
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        for (dlfeat, frees) in [
            (READS_ZEROES | WRITE_ZEROES_FREES, true),
            (READS_ZEROES, false),
            (WRITE_ZEROES_FREES, false),
            (READS_ONES | WRITE_ZEROES_FREES, false),
        ] {
            liar.said.set(Some((Cns::Namespace, offset_of!(IdentifyNamespace, dlfeat), dlfeat)));
            let connecting = Controller::connect(&core, options.clone(), Staging::default());
            let controller = connecting.await.unwrap();
            let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
            let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
            client.zero(8, 8, true).await.unwrap();
            let requests = std::mem::take(&mut liar.target.borrow_mut().requests);
            let expected = format!("zero 8+8 unmap {frees} fua false");
            assert!(requests.contains(&expected), "{dlfeat:#06b}: {requests:?}");
        }
    });
}

/// NVM Command Set 1.0, 4.1.5.2 (DMRSL): no range is longer than the controller takes.
#[test]
fn more_than_one_command_frees_is_freed_in_pieces() {
    on_core(async |core| {
        let (liar, options) = HostileController::start(&core).await;
        liar.said.set(Some((Cns::CommandSetController, offset_of!(NvmController, dmrsl), 7)));
        let controller = Controller::connect(&core, options, Staging::default()).await.unwrap();
        // Freed blocks may read as anything, so they are not zeroed in place of being freed.
        liar.said.set(Some((Cns::Namespace, offset_of!(IdentifyNamespace, dlfeat), 0)));
        let dev = Dev::shared(Namespace::open(&controller, 1).await.unwrap());
        let client = TestClient::new(&dev, &BufferPool::new(1 << 20).unwrap());
        client.unmap(8, 16).await.unwrap();
        let requests = std::mem::take(&mut liar.target.borrow_mut().requests);
        let freed: Vec<_> = requests.iter().filter(|r| r.contains("unmap")).collect();
        assert_eq!(freed, ["unmap 8+7", "unmap 15+7", "unmap 22+2"]);
    });
}
