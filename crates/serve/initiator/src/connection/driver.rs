//! The task of a connection: carries bytes between a socket and the machine.
//!
//! Each wake-up sends what was submitted in as few system calls as possible, reads what has arrived
//! and delivers finished commands. Small reads go through a staging buffer that all connections of
//! the core share, so one read returns the answers to many commands; the rest of a large payload is
//! read directly into its buffer.

use std::cell::{RefCell, RefMut};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use arrayvec::ArrayVec;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::{ClientMachine, LinkEnd, LinkShared, LinkState, Transport};

/// Size of the staging buffer in bytes.
const STAGING_BYTES: usize = 128 * 1024;

/// Payloads with at least this much left are read directly into their buffer.
const DIRECT_BYTES: usize = 32 * 1024;

/// Most pieces that one system call sends.
const MAX_IOVECS: usize = 128;

/// Rounds of reading and writing before the task yields.
const ROUNDS_PER_POLL: usize = 16;

/// With more than this to send, in bytes, outcomes are delivered in batches: the first callers'
/// next commands are then on their way while the others still run, which keeps the peer busy.
const BURST_BYTES: usize = 32 * 1024;

/// Outcomes in such a batch.
const DELIVERIES_PER_BURST: usize = 8;

/// The staging buffer of a core: one for all of its connections. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Staging(Rc<RefCell<Box<[u8]>>>);

impl Staging {
    pub(crate) fn borrow_mut(&self) -> RefMut<'_, Box<[u8]>> {
        self.0.borrow_mut()
    }
}

impl Default for Staging {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(vec![0; STAGING_BYTES].into())))
    }
}

/// Drives one connection.
pub(super) struct Driver<S: Transport, C: ClientMachine> {
    stream: S,
    shared: Rc<LinkShared<C>>,
    staging: Staging,
    send_timeout: Duration,
    /// Since when the socket has accepted nothing although output waits.
    stalled_since: Option<Duration>,
    /// Whether the last send was a burst.
    sent_burst: bool,
    timer: Timer,
}

#[derive(Default)]
struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
    /// When `sleep` ends, as time since the connection began; `None` when it has ended.
    armed: Option<Duration>,
}

/// A dropped task, as when its core stops, leaves no caller waiting.
impl<S: Transport, C: ClientMachine> Drop for Driver<S, C> {
    fn drop(&mut self) {
        if self.shared.finish(LinkEnd::Io(io::ErrorKind::Interrupted)) {
            self.stream.abandon();
        }
    }
}

impl<S: Transport, C: ClientMachine> Driver<S, C> {
    pub(super) fn new(
        stream: S,
        shared: Rc<LinkShared<C>>,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        let timer = Timer::default();
        Self {
            stream,
            shared,
            staging,
            send_timeout,
            stalled_since: None,
            sent_burst: false,
            timer,
        }
    }

    /// Drives the connection to its end.
    pub(super) async fn run(mut self) {
        let end = poll_fn(|cx| self.poll(cx)).await;
        self.shared.finish(end);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LinkEnd<C::CloseReason>> {
        self.shared.state.borrow_mut().awake = true;
        let polled = self.poll_round(cx);
        let mut state = self.shared.state.borrow_mut();
        match &mut state.driver {
            Some(known) => known.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        state.awake = false;
        polled
    }

    fn poll_round(&mut self, cx: &mut Context<'_>) -> Poll<LinkEnd<C::CloseReason>> {
        let shared = Rc::clone(&self.shared);
        let now = shared.state.borrow().began.elapsed();
        shared.state.borrow_mut().machine.on_timer(now);
        for _ in 0..ROUNDS_PER_POLL {
            let mut state = shared.state.borrow_mut();
            let mut busy = match self.write(&mut state, cx, now) {
                Ok(progress) => progress,
                Err(e) => return Poll::Ready(LinkEnd::Io(e.kind())),
            };
            let is_sent = state.machine.output().is_empty() && self.stalled_since.is_none();
            // Callers of commands in doubt assume that nothing more of them is sent after they hear
            // of it.
            if state.machine.is_closing() && (is_sent || state.is_in_doubt()) {
                let end = state.machine.close_reason().unwrap_or(C::CLOSED);
                return Poll::Ready(LinkEnd::Machine(end));
            }
            match self.read(&mut state, cx) {
                Ok(ReadOutcome::Bytes(_)) => busy = true,
                Ok(ReadOutcome::Nothing) => {}
                Ok(ReadOutcome::End) => return Poll::Ready(LinkEnd::PeerClosed),
                Err(e) => return Poll::Ready(LinkEnd::Io(e.kind())),
            }
            if state.machine.is_closing() && state.is_in_doubt() {
                // The data just read ends the connection: send the answer to that first.
                continue;
            }
            drop(state);
            let portion = if self.sent_burst { DELIVERIES_PER_BURST } else { usize::MAX };
            if shared.deliver(portion) {
                break;
            }
            if !busy {
                if self.stalled_since.is_some_and(|since| now >= since + self.send_timeout) {
                    return Poll::Ready(LinkEnd::SendStalled);
                }
                if self.arm_timer(cx, now) {
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sends until nothing is left or the socket accepts no more. Returns whether anything was
    /// sent.
    fn write(
        &mut self,
        state: &mut LinkState<C>,
        cx: &mut Context<'_>,
        now: Duration,
    ) -> io::Result<bool> {
        let mut any = false;
        let waiting = state.machine.output().len();
        if waiting > 0 {
            self.sent_burst = waiting > BURST_BYTES;
        }
        loop {
            let output = state.machine.output();
            if output.is_empty() {
                // Flush what the stream itself buffers: TLS records that the socket had no space
                // for.
                match Pin::new(&mut self.stream).poll_flush(cx)? {
                    Poll::Ready(()) => self.stalled_since = None,
                    Poll::Pending => _ = self.stalled_since.get_or_insert(now),
                }
                return Ok(any);
            }
            let slices: ArrayVec<_, MAX_IOVECS> = output.slices().take(MAX_IOVECS).collect();
            match Pin::new(&mut self.stream).poll_write_vectored(cx, &slices) {
                Poll::Pending => {
                    self.stalled_since.get_or_insert(now);
                    return Ok(any);
                }
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    drop(slices);
                    output.advance(n);
                    self.stalled_since = None;
                    any = true;
                }
                Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Poll::Ready(Err(e)) => return Err(e),
            }
        }
    }

    fn read(&mut self, state: &mut LinkState<C>, cx: &mut Context<'_>) -> io::Result<ReadOutcome> {
        let machine = &mut state.machine;
        let Some(space) = machine.receive_space() else { return Ok(ReadOutcome::Nothing) };
        if space.len() >= DIRECT_BYTES {
            let read = poll_read(&mut self.stream, cx, space)?;
            if let ReadOutcome::Bytes(n) = read {
                machine.on_received(n);
            }
            return Ok(read);
        }
        let mut staging = self.staging.borrow_mut();
        let read = poll_read(&mut self.stream, cx, &mut staging)?;
        if let ReadOutcome::Bytes(n) = read {
            let mut bytes = &staging[..n];
            // A client machine never blocks its input unless it has ended, so it takes all.
            while !bytes.is_empty()
                && let Some(space) = machine.receive_space()
            {
                let n = space.len().min(bytes.len());
                let (now, later) = bytes.split_at(n);
                space[..n].copy_from_slice(now);
                machine.on_received(n);
                bytes = later;
            }
        }
        Ok(read)
    }

    /// Arms the timer for the next deadline; `false` if that has passed.
    ///
    /// Deadlines mostly move later, so the timer is left to fire early and armed again instead of
    /// being moved with every command.
    fn arm_timer(&mut self, cx: &mut Context<'_>, now: Duration) -> bool {
        let (machine, began) = {
            let state = self.shared.state.borrow();
            (state.machine.next_timer(), state.began)
        };
        let sends = self.stalled_since.map(|since| since + self.send_timeout);
        let next = [machine, sends].into_iter().flatten().min();
        next.is_none_or(|next| self.timer.arm_at(cx, began, now, next))
    }
}

impl Timer {
    fn arm_at(
        &mut self,
        cx: &mut Context<'_>,
        began: Instant,
        now: Duration,
        next: Duration,
    ) -> bool {
        if self.armed.is_none_or(|armed| next < armed) {
            // A past deadline that the machine ignores must not spin.
            let next = next.max(now + Duration::from_millis(1));
            let at = began + next;
            match &mut self.sleep {
                Some(sleep) => sleep.as_mut().reset(at),
                None => self.sleep = Some(Box::pin(tokio::time::sleep_until(at))),
            }
            self.armed = Some(next);
        }
        let ended = self.sleep.as_mut().is_some_and(|s| s.as_mut().poll(cx).is_ready());
        if ended {
            self.armed = None;
        }
        !ended
    }
}

/// Result of a read attempt.
#[derive(Clone, Copy)]
enum ReadOutcome {
    Nothing,
    Bytes(usize),
    End,
}

fn poll_read<S: AsyncRead + Unpin>(
    stream: &mut S,
    cx: &mut Context<'_>,
    into: &mut [u8],
) -> io::Result<ReadOutcome> {
    let mut buf = ReadBuf::new(into);
    match Pin::new(stream).poll_read(cx, &mut buf) {
        Poll::Pending => Ok(ReadOutcome::Nothing),
        Poll::Ready(Ok(())) if buf.filled().is_empty() => Ok(ReadOutcome::End),
        Poll::Ready(Ok(())) => Ok(ReadOutcome::Bytes(buf.filled().len())),
        Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {
            cx.waker().wake_by_ref();
            Ok(ReadOutcome::Nothing)
        }
        Poll::Ready(Err(e)) => Err(e),
    }
}
