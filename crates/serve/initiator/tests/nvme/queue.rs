//! Queues by themselves, on a pipe whose other end is the test's.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use block::{BufsMut, MemoryClass};
use initiator::nvme::{Queue, QueueEnd, Transport};
use nvme::entry::{Cqe, NvmOpcode};
use nvme::host::{Command, Config, LostCommand, Payload};
use nvme::pdu::{CapsuleCmd, CapsuleResp, DataPdu, FLAG_LAST, FLAG_SUCCESS, IcResp, PduType};
use nvme::testing::ScriptedHost;
use nvme::{Sqe, Status};
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex,
};
use tokio::task::{LocalSet, spawn_local, yield_now};
use tokio::time::{Instant, sleep};
use zerocopy::{FromBytes, IntoBytes};

use super::*;

const S: Duration = Duration::from_secs(1);

fn command(opcode: NvmOpcode, payload: Payload) -> Command {
    Command { sqe: Sqe::new(opcode.0, 0, 1), payload, timeout: Some(30 * S) }
}

fn flush() -> Command {
    command(NvmOpcode::Flush, Payload::None)
}

/// A queue that may have this many commands in flight, and the other end.
async fn queue(in_flight: u16) -> (Queue, DuplexStream) {
    let (ours, mut theirs) = duplex(1 << 20);
    let config = Config { max_in_flight: in_flight, ..Config::default() };
    let queue = Queue::start(ours, config, Staging::default(), 30 * S);
    let mut req = [0; 128];
    theirs.read_exact(&mut req).await.unwrap();
    theirs.write_all(IcResp::new(0, 4096).as_bytes()).await.unwrap();
    (queue, theirs)
}

/// The identifiers of the next commands without data.
async fn cids(end: &mut DuplexStream, count: usize) -> Vec<u16> {
    let mut out = Vec::new();
    for _ in 0..count {
        let mut bytes = [0; size_of::<CapsuleCmd>()];
        end.read_exact(&mut bytes).await.unwrap();
        out.push(CapsuleCmd::read_from_bytes(&bytes).unwrap().sqe.cid.get());
    }
    out
}

/// A stream that has taken all, and lets none of it go: as one with TLS whose socket is full.
struct Keeps {
    stream: DuplexStream,
    /// Whether it is still there, and whether it was told that it need not send any more.
    seen: Rc<Cell<(bool, bool)>>,
}

impl AsyncRead for Keeps {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Keeps {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

impl Transport for Keeps {
    fn abandon(&self) {
        self.seen.update(|(lives, _)| (lives, true));
    }
}

impl Drop for Keeps {
    fn drop(&mut self) {
        self.seen.update(|(_, abandoned)| (false, abandoned));
    }
}

/// RFD 0027, 3: who hears that a command is in doubt counts from then on, so its connection is no
/// more, whatever the stream has kept back. A stream without such a command is waited for: it may
/// have a termination request to send.
#[tokio::test(start_paused = true)]
async fn nothing_is_in_doubt_before_its_connection_has_ended() {
    in_simulated_time(async {
        for with_command in [true, false] {
            let (ours, mut theirs) = duplex(1 << 20);
            let seen = Rc::new(Cell::new((true, false)));
            let stream = Keeps { stream: ours, seen: Rc::clone(&seen) };
            let queue = Queue::start(stream, Config::default(), Staging::default(), 30 * S);
            let mut req = [0; 128];
            theirs.read_exact(&mut req).await.unwrap();
            theirs.write_all(IcResp::new(0, 4096).as_bytes()).await.unwrap();
            let mut write = flush();
            write.timeout = Some(5 * S);
            let began = Instant::now();
            if with_command {
                assert_eq!(queue.submit(write).await.outcome.map(drop), Err(LostCommand::InDoubt));
                assert_eq!((seen.get(), began.elapsed()), ((false, true), 5 * S));
            } else {
                sleep(S).await;
                queue.close();
                sleep(S).await;
                assert_eq!(seen.get(), (true, false));
                queue.wait_end().await;
                assert!(began.elapsed() >= 30 * S);
            }
        }
    })
    .await;
}

async fn respond(end: &mut DuplexStream, cid: u16) {
    let (result, sq_head, sq_id) = (0.into(), 0.into(), 0.into());
    let status = (Status::SUCCESS.field() << 1).into();
    let resp = CapsuleResp::new(Cqe { result, sq_head, sq_id, cid: cid.into(), status });
    end.write_all(&ScriptedHost::default().pdu(resp.as_bytes(), &[], 0)).await.unwrap();
}

async fn in_simulated_time(f: impl Future<Output = ()>) {
    LocalSet::new().run_until(f).await;
}

/// Who finds the queue full waits in turn; who goes away takes nothing along.
#[tokio::test(start_paused = true)]
async fn a_full_queue_is_waited_for() {
    in_simulated_time(async {
        let (queue, mut end) = queue(2).await;
        let submit = |queue: &Queue| {
            let queue = queue.clone();
            spawn_local(async move { queue.submit(flush()).await.outcome })
        };
        let tasks: Vec<_> = (0..4).map(|_| submit(&queue)).collect();
        let first = cids(&mut end, 2).await;
        sleep(S).await;
        assert_eq!(queue.free_slots(), 0);
        // The first goes away; its place comes back with the answer, not before.
        tasks[0].abort();
        sleep(S).await;
        assert!(tasks[0].is_finished() && !tasks[2].is_finished());
        for cid in &first {
            respond(&mut end, *cid).await;
        }
        for cid in cids(&mut end, 2).await {
            assert!(!first.contains(&cid));
            respond(&mut end, cid).await;
        }
        for task in tasks.into_iter().skip(1) {
            assert!(task.await.unwrap().unwrap().status.is_success());
        }
        assert_eq!(queue.free_slots(), 2);
    })
    .await;
}

/// All that is submitted in one turn leaves together, and what was asked first is first.
#[tokio::test(start_paused = true)]
async fn submissions_of_a_turn_leave_together() {
    in_simulated_time(async {
        let (queue, mut end) = queue(31).await;
        while queue.free_slots() == 0 {
            yield_now().await;
        }
        for _ in 0..20 {
            let queue = queue.clone();
            spawn_local(async move { queue.submit(flush()).await.transferred });
        }
        let mut bytes = vec![0; 1 << 16];
        let n = end.read(&mut bytes).await.unwrap();
        assert_eq!(n, 20 * size_of::<CapsuleCmd>());
    })
    .await;
}

/// Data comes in whatever portions, and into the caller's buffers.
#[tokio::test(start_paused = true)]
async fn data_comes_in_any_portions() {
    in_simulated_time(async {
        let pool = BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(200_000, MemoryClass::LocalIo).unwrap();
        for length in [1u32, 512, 4096, 70_000, 200_000] {
            let (queue, mut end) = queue(31).await;
            let room: BufsMut = credit.alloc(length as usize);
            let read = spawn_local(async move {
                queue.submit(command(NvmOpcode::Read, Payload::ToHost(room))).await
            });
            let cid = cids(&mut end, 1).await[0];
            let mut header = DataPdu::new(PduType::C2HData, cid, 0, 0, length);
            header.common.flags = FLAG_LAST | FLAG_SUCCESS;
            let bytes: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            for piece in ScriptedHost::default().pdu(header.as_bytes(), &bytes, 0).chunks(997) {
                end.write_all(piece).await.unwrap();
                yield_now().await;
            }
            let reply = read.await.unwrap();
            assert_eq!(reply.transferred, length);
            let got: Vec<u8> = reply.buffers.iter().flat_map(|b| b.to_vec()).collect();
            assert!(got == bytes);
        }
    })
    .await;
}

/// However a connection ends, all waiting callers are told so, and why.
#[tokio::test(start_paused = true)]
async fn the_end_is_reported() {
    in_simulated_time(async {
        for way in 0..4 {
            let (queue, mut end) = queue(1).await;
            let submit = |queue: &Queue| {
                let queue = queue.clone();
                spawn_local(async move { queue.submit(flush()).await.outcome.map(drop) })
            };
            let (sent, waits) = (submit(&queue), submit(&queue));
            cids(&mut end, 1).await;
            let began = Instant::now();
            let expected = match way {
                0 => {
                    drop(end);
                    QueueEnd::PeerClosed
                }
                1 => {
                    queue.close();
                    QueueEnd::Machine(nvme::host::CloseReason::Closed)
                }
                2 => QueueEnd::Machine(nvme::host::CloseReason::CommandTimeout),
                _ => {
                    end.write_all(&[0xff; 8]).await.unwrap();
                    let (error, information) = (nvme::pdu::FatalError::InvalidHeaderField, 0);
                    QueueEnd::Machine(nvme::host::CloseReason::Violation { error, information })
                }
            };
            assert_eq!(queue.wait_end().await, expected);
            assert_eq!(sent.await.unwrap(), Err(LostCommand::InDoubt));
            assert_eq!(waits.await.unwrap(), Err(LostCommand::Unsent));
            assert_eq!(queue.submit(flush()).await.outcome.map(drop), Err(LostCommand::Unsent));
            assert_eq!(began.elapsed(), if way == 2 { 30 * S } else { Duration::ZERO });
            assert!(!queue.is_open());
        }
    })
    .await;
}

/// A command's time begins when it is submitted, however long the queue was idle.
#[tokio::test(start_paused = true)]
async fn time_begins_with_the_command() {
    in_simulated_time(async {
        let (queue, mut end) = queue(1).await;
        sleep(1000 * S).await;
        let flush = {
            let queue = queue.clone();
            spawn_local(async move { queue.submit(flush()).await.outcome })
        };
        let cid = cids(&mut end, 1).await[0];
        sleep(29 * S).await;
        respond(&mut end, cid).await;
        assert!(flush.await.unwrap().is_ok());
        drop(queue);
        assert_eq!(end.read(&mut [0; 8]).await.unwrap(), 0, "with the last handle it closes");
    })
    .await;
}

/// A controller that takes nothing is let go.
#[tokio::test(start_paused = true)]
async fn a_controller_that_does_not_read_is_disconnected() {
    in_simulated_time(async {
        let (ours, mut end) = duplex(256);
        let queue = Queue::start(ours, Config::default(), Staging::default(), 5 * S);
        let mut req = [0; 128];
        end.read_exact(&mut req).await.unwrap();
        end.write_all(IcResp::new(0, 4096).as_bytes()).await.unwrap();
        let pool = BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(8192, MemoryClass::LocalIo).unwrap();
        let data = Payload::ToController(credit.alloc(8192).into());
        let began = Instant::now();
        let reply = queue.submit(command(NvmOpcode::Write, data)).await;
        assert_eq!(reply.outcome.map(drop), Err(LostCommand::InDoubt));
        assert_eq!((queue.wait_end().await, began.elapsed()), (QueueEnd::SendStalled, 5 * S));
    })
    .await;
}
