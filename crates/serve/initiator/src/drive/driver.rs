//! The task of a connection: carries bytes between a socket and the machine.
//!
//! Each wake-up sends what was submitted with as few system calls as it takes, reads what is there, and
//! hands out what has ended. Small reads go through a staging buffer that all connections of the core share, so
//! that one read brings the answers to many commands; the rest of a large payload is read into its place.

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

use super::{Client, End, Shared, State, Transport};

/// Size of the staging buffer in bytes.
const STAGING_BYTES: usize = 128 * 1024;

/// Payload whose remainder is at least this long is read directly into its place.
const DIRECT_BYTES: usize = 32 * 1024;

/// Most pieces that one system call sends.
const GATHER: usize = 128;

/// Rounds of reading and writing before the other tasks of the core get their turn.
const ROUNDS: usize = 16;

/// With more than this to be sent at once, in bytes, callers hear of their answers in portions: what the first of them
/// ask for next is on its way while the others are at work, and the other side has something to do meanwhile.
const LOAD_BYTES: usize = 32 * 1024;

/// Answers of a portion.
const PORTION: usize = 8;

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
pub(super) struct Driver<S: Transport, C: Client> {
    stream: S,
    shared: Rc<Shared<C>>,
    staging: Staging,
    send_timeout: Duration,
    /// Since when the socket has taken nothing of what waits to be sent.
    stalled: Option<Duration>,
    /// Whether much was sent when anything was sent last.
    laden: bool,
    timer: Timer,
}

#[derive(Default)]
struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
    /// When `sleep` ends, as time since the connection began; `None` when it has ended.
    armed: Option<Duration>,
}

/// A task that is dropped, as when its core stops, leaves nobody waiting.
impl<S: Transport, C: Client> Drop for Driver<S, C> {
    fn drop(&mut self) {
        if self.shared.finish(End::Broken(io::ErrorKind::Interrupted)) {
            self.stream.abandon();
        }
    }
}

impl<S: Transport, C: Client> Driver<S, C> {
    pub(super) fn new(
        stream: S,
        shared: Rc<Shared<C>>,
        staging: Staging,
        send_timeout: Duration,
    ) -> Self {
        let timer = Timer::default();
        Self { stream, shared, staging, send_timeout, stalled: None, laden: false, timer }
    }

    /// Drives the connection to its end.
    pub(super) async fn run(mut self) {
        let end = poll_fn(|cx| self.poll(cx)).await;
        self.shared.finish(end);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End<C::End>> {
        self.shared.state.borrow_mut().awake = true;
        let polled = self.work(cx);
        let mut state = self.shared.state.borrow_mut();
        match &mut state.driver {
            Some(known) => known.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        state.awake = false;
        polled
    }

    fn work(&mut self, cx: &mut Context<'_>) -> Poll<End<C::End>> {
        let shared = Rc::clone(&self.shared);
        let now = shared.state.borrow().began.elapsed();
        shared.state.borrow_mut().machine.on_timer(now);
        for _ in 0..ROUNDS {
            let mut state = shared.state.borrow_mut();
            let mut busy = match self.write(&mut state, cx, now) {
                Ok(progress) => progress,
                Err(e) => return Poll::Ready(End::Broken(e.kind())),
            };
            let is_sent = state.machine.output().is_empty() && self.stalled.is_none();
            // Who hears of a command in doubt counts from then on: nothing of it may leave any more, whatever it is that has
            // not been sent.
            if state.machine.is_closing() && (is_sent || state.is_in_doubt()) {
                let end = state.machine.end().unwrap_or(C::CLOSED);
                return Poll::Ready(End::Machine(end));
            }
            match self.read(&mut state, cx) {
                Ok(Read::Bytes(_)) => busy = true,
                Ok(Read::Nothing) => {}
                Ok(Read::End) => return Poll::Ready(End::PeerClosed),
                Err(e) => return Poll::Ready(End::Broken(e.kind())),
            }
            if state.machine.is_closing() && state.is_in_doubt() {
                // What has been read ends it: what is to be said of that is, before anybody hears.
                continue;
            }
            drop(state);
            let portion = if self.laden { PORTION } else { usize::MAX };
            if shared.deliver(portion) {
                break;
            }
            if !busy {
                if self.stalled.is_some_and(|since| now >= since + self.send_timeout) {
                    return Poll::Ready(End::SendStalled);
                }
                if self.sleeps(cx, now) {
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sends until nothing is left or the socket takes no more; whether anything was sent.
    fn write(
        &mut self,
        state: &mut State<C>,
        cx: &mut Context<'_>,
        now: Duration,
    ) -> io::Result<bool> {
        let mut any = false;
        let waiting = state.machine.output().len();
        if waiting > 0 {
            self.laden = waiting > LOAD_BYTES;
        }
        loop {
            let output = state.machine.output();
            if output.is_empty() {
                // What the stream itself keeps back: records that the socket has no room for.
                match Pin::new(&mut self.stream).poll_flush(cx)? {
                    Poll::Ready(()) => self.stalled = None,
                    Poll::Pending => _ = self.stalled.get_or_insert(now),
                }
                return Ok(any);
            }
            let slices: ArrayVec<_, GATHER> = output.slices().take(GATHER).collect();
            match Pin::new(&mut self.stream).poll_write_vectored(cx, &slices) {
                Poll::Pending => {
                    self.stalled.get_or_insert(now);
                    return Ok(any);
                }
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    drop(slices);
                    output.sent(n);
                    self.stalled = None;
                    any = true;
                }
                Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Poll::Ready(Err(e)) => return Err(e),
            }
        }
    }

    fn read(&mut self, state: &mut State<C>, cx: &mut Context<'_>) -> io::Result<Read> {
        let machine = &mut state.machine;
        let Some(space) = machine.receive_space() else { return Ok(Read::Nothing) };
        if space.len() >= DIRECT_BYTES {
            let read = poll_read(&mut self.stream, cx, space)?;
            if let Read::Bytes(n) = read {
                machine.received(n);
            }
            return Ok(read);
        }
        let mut staging = self.staging.borrow_mut();
        let read = poll_read(&mut self.stream, cx, &mut staging)?;
        if let Read::Bytes(n) = read {
            let mut bytes = &staging[..n];
            // A host waits for nothing, so it takes all; but for one that has ended.
            while !bytes.is_empty()
                && let Some(space) = machine.receive_space()
            {
                let n = space.len().min(bytes.len());
                let (now, later) = bytes.split_at(n);
                space[..n].copy_from_slice(now);
                machine.received(n);
                bytes = later;
            }
        }
        Ok(read)
    }

    /// Makes sure that the next deadline wakes this task; `false` if it has come.
    ///
    /// Deadlines mostly move away, so the timer is left to end early and then set again rather than being
    /// moved with every command.
    fn sleeps(&mut self, cx: &mut Context<'_>, now: Duration) -> bool {
        let (machine, began) = {
            let state = self.shared.state.borrow();
            (state.machine.next_timer(), state.began)
        };
        let sends = self.stalled.map(|since| since + self.send_timeout);
        let next = [machine, sends].into_iter().flatten().min();
        next.is_none_or(|next| self.timer.sleeps_until(cx, began, now, next))
    }
}

impl Timer {
    fn sleeps_until(
        &mut self,
        cx: &mut Context<'_>,
        began: Instant,
        now: Duration,
        next: Duration,
    ) -> bool {
        if self.armed.is_none_or(|armed| next < armed) {
            // A deadline in the past that nobody acts on must not spin.
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

/// What a look at the socket has come to.
#[derive(Clone, Copy)]
enum Read {
    Nothing,
    Bytes(usize),
    End,
}

fn poll_read<S: AsyncRead + Unpin>(
    stream: &mut S,
    cx: &mut Context<'_>,
    into: &mut [u8],
) -> io::Result<Read> {
    let mut buf = ReadBuf::new(into);
    match Pin::new(stream).poll_read(cx, &mut buf) {
        Poll::Pending => Ok(Read::Nothing),
        Poll::Ready(Ok(())) if buf.filled().is_empty() => Ok(Read::End),
        Poll::Ready(Ok(())) => Ok(Read::Bytes(buf.filled().len())),
        Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {
            cx.waker().wake_by_ref();
            Ok(Read::Nothing)
        }
        Poll::Ready(Err(e)) => Err(e),
    }
}
