//! The driver: one task per connection that carries bytes between a socket and a machine.
//!
//! Each wake-up takes all completions that have come, then sends everything with as few system
//! calls as possible, then reads; so all commands that it serves share its cost. Small reads go
//! through a staging buffer shared by all connections of the core (one read brings many PDUs); the
//! rest of a large payload is read directly into its final buffer.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use arrayvec::ArrayVec;
use frame::Machine;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Size of the staging buffer in bytes.
const STAGING_BYTES: usize = 128 * 1024;

/// A payload whose remainder is at least this long is read directly into its buffer.
const DIRECT_BYTES: usize = 32 * 1024;

/// Bytes read into the staging buffer after such a payload: usually the header of the next one, and
/// data read along with it is copied once more.
const AFTER_PAYLOAD_BYTES: usize = 4 * 1024;

/// How long the peer may take to close its side after everything was sent. Closing a socket with
/// unread bytes resets the connection, and the peer loses data that it has not read yet: a refusal,
/// say.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Most buffers that one system call sends.
const MAX_IOVECS: usize = 128;

/// Rounds of reading and writing before yielding to the other tasks of the core.
const ROUNDS_PER_POLL: usize = 16;

/// What a protocol adds to its machine: decisions, and the execution of commands.
pub trait Protocol: 'static {
    /// The machine.
    type Machine: Machine;
    /// An event from elsewhere: a completion, memory, a notice.
    type Event: 'static;

    /// The machine.
    fn machine(&mut self) -> &mut Self::Machine;

    /// A wake-up begins at `now`. The task may have slept for any time, and data read next may be
    /// as old.
    fn on_wake(&mut self, now: Instant);

    /// Handles the machine's actions until there are none. Called after every event or input.
    fn act(&mut self);

    /// One event from the [`Inbox`].
    fn on_event(&mut self, event: Self::Event);

    /// The core to which the connection must move; asked after every [`Self::act`].
    fn wanted_core(&self) -> Option<usize> {
        None
    }
}

/// Where commands deliver events to their connection. Cheap to clone; events for a connection that
/// has ended are dropped.
#[derive(Debug)]
pub struct Inbox<E>(Rc<InboxState<E>>);

#[derive(Debug)]
struct InboxState<E> {
    events: RefCell<VecDeque<E>>,
    waker: RefCell<Option<Waker>>,
    /// Whether the connection's task is running, and will check the inbox before it sleeps.
    awake: Cell<bool>,
    closed: Cell<bool>,
    evicted: Cell<bool>,
}

impl<E> Clone for Inbox<E> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<E> Default for Inbox<E> {
    fn default() -> Self {
        Self(Rc::new(InboxState {
            events: RefCell::default(),
            waker: RefCell::default(),
            awake: Cell::new(false),
            closed: Cell::new(false),
            evicted: Cell::new(false),
        }))
    }
}

impl<E> Inbox<E> {
    /// Adds an event and wakes the connection.
    pub fn push(&self, event: E) {
        if self.0.closed.get() {
            return;
        }
        self.0.events.borrow_mut().push_back(event);
        self.wake();
    }

    /// Ends the connection now, without notice to its peer.
    pub fn evict(&self) {
        self.0.evicted.set(true);
        self.wake();
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.closed.get()
    }

    fn wake(&self) {
        if !self.0.awake.get()
            && let Some(waker) = &*self.0.waker.borrow()
        {
            waker.wake_by_ref();
        }
    }

    fn pop(&self) -> Option<E> {
        self.0.events.borrow_mut().pop_front()
    }

    /// Whether the inbox is empty.
    fn has_no_events(&self) -> bool {
        self.0.events.borrow().is_empty() && !self.0.evicted.get()
    }

    /// Registers the waker for new events.
    fn set_waker(&self, waker: &Waker) {
        match &mut *self.0.waker.borrow_mut() {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        self.0.awake.set(false);
    }

    fn close(&self) {
        self.0.closed.set(true);
        let events = self.0.events.take();
        drop(events);
    }
}

/// A byte stream that may buffer bytes before sending them.
pub trait BufferedStream: AsyncRead + AsyncWrite + Unpin {
    /// Buffered bytes that are not sent yet.
    fn unsent_bytes(&self) -> usize;
}

/// A plain connection: only the system buffers.
impl BufferedStream for rt::net::Stream {
    fn unsent_bytes(&self) -> usize {
        0
    }
}

/// A staging buffer of a core.
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

/// Why a connection ended.
#[derive(Debug)]
pub enum ConnectionEnd {
    /// The protocol closed it, and everything was sent.
    Closed,
    /// The peer closed it.
    PeerClosed,
    /// The peer accepted no data within the send timeout.
    SendStalled,
    /// The connection broke.
    Io(io::Error),
    /// Closed to make room for another connection.
    Evicted,
    /// It moves to another core.
    Move(usize),
}

/// One connection being driven.
#[derive(Debug)]
pub struct ConnectionDriver<S, P: Protocol> {
    /// The byte stream.
    pub stream: S,
    /// Protocol state.
    pub protocol: P,
    /// Bytes that were read and that the machine could not take yet.
    pub unread: VecDeque<u8>,
    /// When the connection began: the zero of its machine's clock.
    pub began: Instant,
    /// Bytes received and sent.
    pub traffic: (u64, u64),
    inbox: InboxGuard<P::Event>,
    staging: Staging,
    /// Whether large payloads are arriving one after another.
    expects_large_payload: bool,
    send_timeout: Duration,
    /// Since when the socket has accepted none of the waiting bytes.
    stalled_since: Option<Duration>,
    /// When the peer must have closed its side; set once this side is closed.
    close_deadline: Option<Duration>,
    timer: Timer,
}

/// An inbox that closes when its connection goes, even by a panic: other tasks may be waiting for
/// events left in it.
#[derive(Debug)]
struct InboxGuard<E>(Inbox<E>);

impl<E> Drop for InboxGuard<E> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug, Default)]
struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
    /// When `sleep` ends, as time since the connection began; `None` after it has ended.
    armed: Option<Duration>,
}

impl<S: BufferedStream, P: Protocol> ConnectionDriver<S, P> {
    /// A connection that began at `began`.
    pub fn new(
        stream: S,
        protocol: P,
        inbox: Inbox<P::Event>,
        staging: Staging,
        send_timeout: Duration,
        began: Instant,
    ) -> Self {
        Self {
            stream,
            protocol,
            unread: VecDeque::new(),
            began,
            traffic: (0, 0),
            inbox: InboxGuard(inbox),
            staging,
            expects_large_payload: false,
            send_timeout,
            stalled_since: None,
            close_deadline: None,
            timer: Timer::default(),
        }
    }

    /// Drives the connection until it ends or must move.
    pub async fn run(&mut self) -> ConnectionEnd {
        let end = std::future::poll_fn(|cx| self.poll(cx)).await;
        self.inbox.0.close();
        end
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        self.inbox.0.0.awake.set(true);
        let polled = self.poll_round(cx);
        self.inbox.0.set_waker(cx.waker());
        polled
    }

    fn poll_round(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let at = Instant::now();
        let now = at - self.began;
        self.protocol.on_wake(at);
        self.protocol.machine().on_timer(now);
        for _ in 0..ROUNDS_PER_POLL {
            if self.inbox.0.0.evicted.get() {
                return Poll::Ready(ConnectionEnd::Evicted);
            }
            let mut busy = self.act();
            // A connection whose time has run out does not move.
            if let Some(core) = self.protocol.wanted_core()
                && !self.protocol.machine().is_closing()
            {
                return Poll::Ready(ConnectionEnd::Move(core));
            }
            match self.write(cx, now) {
                Ok(progress) => busy |= progress,
                Err(e) => return Poll::Ready(ConnectionEnd::Io(e)),
            }
            let machine = self.protocol.machine();
            if machine.is_closing()
                && machine.output().is_empty()
                && self.stream.unsent_bytes() == 0
            {
                return self.finish(cx, now);
            }
            match self.read(cx) {
                Ok(ReadOutcome::Some) => busy = true,
                Ok(ReadOutcome::Nothing) => {}
                Ok(ReadOutcome::End) => return Poll::Ready(ConnectionEnd::PeerClosed),
                Err(e) => return Poll::Ready(ConnectionEnd::Io(e)),
            }
            if !busy && self.inbox.0.has_no_events() {
                if self.has_stalled(now) {
                    return Poll::Ready(ConnectionEnd::SendStalled);
                }
                if self.arm_timer(cx, now) {
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Handles the inbox's events and commands that are answered at once; returns whether there
    /// were any.
    fn act(&mut self) -> bool {
        let mut any = false;
        loop {
            while let Some(event) = self.inbox.0.pop() {
                self.protocol.on_event(event);
                any = true;
            }
            self.protocol.act();
            if self.inbox.0.has_no_events() || self.inbox.0.0.evicted.get() {
                return any;
            }
        }
    }

    /// Sends until nothing is left or the socket takes no more; returns whether anything was sent.
    fn write(&mut self, cx: &mut Context<'_>, now: Duration) -> io::Result<bool> {
        let mut any = false;
        loop {
            let before = self.stream.unsent_bytes();
            let output = self.protocol.machine().output();
            if output.is_empty() {
                return Ok(self.flush(cx, now)? || any);
            }
            let mut slices = ArrayVec::<_, MAX_IOVECS>::new();
            slices.extend(output.slices().take(MAX_IOVECS));
            match Pin::new(&mut self.stream).poll_write_vectored(cx, &slices) {
                Poll::Pending => {
                    drop(slices);
                    self.record_stall(before, now);
                    return Ok(any);
                }
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    drop(slices);
                    self.protocol.machine().output().advance(n);
                    self.traffic.1 += n as u64;
                    self.stalled_since = None;
                    any = true;
                }
                Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Poll::Ready(Err(e)) => return Err(e),
            }
        }
    }

    /// Flushes the stream's buffer; returns whether it sent anything.
    fn flush(&mut self, cx: &mut Context<'_>, now: Duration) -> io::Result<bool> {
        let before = self.stream.unsent_bytes();
        if before > 0 && Pin::new(&mut self.stream).poll_flush(cx)?.is_pending() {
            self.record_stall(before, now);
        } else {
            self.stalled_since = None;
        }
        Ok(self.stream.unsent_bytes() < before)
    }

    /// Records a stalled stream, with `before` bytes buffered the last time: if some were sent, the
    /// stall begins now.
    fn record_stall(&mut self, before: usize, now: Duration) {
        if self.stream.unsent_bytes() < before {
            self.stalled_since = None;
        }
        self.stalled_since.get_or_insert(now);
    }

    fn read(&mut self, cx: &mut Context<'_>) -> io::Result<ReadOutcome> {
        let machine = self.protocol.machine();
        if machine.is_closing() {
            return Ok(ReadOutcome::Nothing);
        }
        if !self.unread.is_empty() {
            return Ok(self.feed_unread());
        }
        let Some(space) = machine.receive_space() else { return Ok(ReadOutcome::Nothing) };
        if space.len() >= DIRECT_BYTES {
            let n = match poll_read(&mut self.stream, cx, space)? {
                Poll::Pending => return Ok(ReadOutcome::Nothing),
                Poll::Ready(0) => return Ok(ReadOutcome::End),
                Poll::Ready(n) => n,
            };
            machine.on_received(n);
            self.traffic.0 += n as u64;
            self.expects_large_payload = true;
            return Ok(ReadOutcome::Some);
        }
        let staging = self.staging.clone();
        let mut staging = staging.0.borrow_mut();
        let most = if self.expects_large_payload { AFTER_PAYLOAD_BYTES } else { staging.len() };
        match poll_read(&mut self.stream, cx, &mut staging[..most])? {
            Poll::Pending => Ok(ReadOutcome::Nothing),
            Poll::Ready(0) => Ok(ReadOutcome::End),
            Poll::Ready(n) => {
                self.traffic.0 += n as u64;
                let taken = self.feed(&staging[..n]);
                self.unread.extend(&staging[taken..n]);
                self.expects_large_payload &= n < most || self.awaits_large_payload();
                Ok(ReadOutcome::Some)
            }
        }
    }

    fn awaits_large_payload(&mut self) -> bool {
        let space = self.protocol.machine().receive_space();
        space.is_some_and(|space| space.len() >= DIRECT_BYTES)
    }

    /// Feeds as much of `bytes` to the machine as it takes; returns how much.
    fn feed(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let machine = self.protocol.machine();
            if machine.is_closing() {
                break;
            }
            let Some(space) = machine.receive_space() else {
                // Perhaps it waits for a decision that can be made now: ask the protocol, then look
                // again.
                self.protocol.act();
                let waits = self.protocol.machine().receive_space().is_none();
                if waits || self.protocol.wanted_core().is_some() {
                    break;
                }
                continue;
            };
            let n = space.len().min(bytes.len() - at);
            space[..n].copy_from_slice(&bytes[at..at + n]);
            machine.on_received(n);
            at += n;
        }
        at
    }

    fn feed_unread(&mut self) -> ReadOutcome {
        let mut bytes = std::mem::take(&mut self.unread);
        let taken = self.feed(bytes.make_contiguous());
        bytes.drain(..taken);
        if !bytes.is_empty() {
            // Otherwise free the memory: it is rarely needed, and as large as the staging buffer.
            self.unread = bytes;
        }
        if taken > 0 { ReadOutcome::Some } else { ReadOutcome::Nothing }
    }

    fn has_stalled(&self, now: Duration) -> bool {
        self.stalled_since.is_some_and(|since| now >= since + self.send_timeout)
    }

    /// Sets the timer to the next deadline; `false` if that has passed.
    ///
    /// Deadlines mostly move away, so the timer is left to expire early and then set again rather
    /// than being moved with every command.
    fn arm_timer(&mut self, cx: &mut Context<'_>, now: Duration) -> bool {
        let sends = self.stalled_since.map(|since| since + self.send_timeout);
        let next = [self.protocol.machine().next_timer(), sends].into_iter().flatten().min();
        next.is_none_or(|next| self.arm_timer_at(cx, now, next))
    }

    fn arm_timer_at(&mut self, cx: &mut Context<'_>, now: Duration, next: Duration) -> bool {
        let timer = &mut self.timer;
        if timer.armed.is_none_or(|armed| next < armed) {
            // A deadline in the past that the machine did not act on must not spin.
            let next = next.max(now + Duration::from_millis(1));
            let at = self.began + next;
            match &mut timer.sleep {
                Some(sleep) => sleep.as_mut().reset(at),
                None => timer.sleep = Some(Box::pin(tokio::time::sleep_until(at))),
            }
            timer.armed = Some(next);
        }
        let ended = timer.sleep.as_mut().is_some_and(|s| s.as_mut().poll(cx).is_ready());
        if ended {
            timer.armed = None;
        }
        !ended
    }

    /// Closes this side, and waits a moment for the peer to close its own; received bytes are
    /// discarded.
    fn finish(&mut self, cx: &mut Context<'_>, now: Duration) -> Poll<ConnectionEnd> {
        let until = match self.close_deadline {
            Some(until) => until,
            None => match ready!(Pin::new(&mut self.stream).poll_shutdown(cx)) {
                Ok(()) => *self.close_deadline.insert(now + CLOSE_TIMEOUT),
                Err(e) => return Poll::Ready(ConnectionEnd::Io(e)),
            },
        };
        let staging = self.staging.clone();
        let mut staging = staging.0.borrow_mut();
        for _ in 0..ROUNDS_PER_POLL {
            match poll_read(&mut self.stream, cx, &mut staging) {
                // Everything was sent: how the peer closes does not matter.
                Ok(Poll::Ready(0)) | Err(_) => return Poll::Ready(ConnectionEnd::Closed),
                Ok(_) if now >= until => return Poll::Ready(ConnectionEnd::Closed),
                Ok(Poll::Pending) if self.arm_timer_at(cx, now, until) => return Poll::Pending,
                Ok(_) => {}
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

enum ReadOutcome {
    Some,
    Nothing,
    End,
}

fn poll_read<S: AsyncRead + Unpin>(
    stream: &mut S,
    cx: &mut Context<'_>,
    into: &mut [u8],
) -> io::Result<Poll<usize>> {
    let mut buf = ReadBuf::new(into);
    match Pin::new(stream).poll_read(cx, &mut buf) {
        Poll::Pending => Ok(Poll::Pending),
        Poll::Ready(Ok(())) => Ok(Poll::Ready(buf.filled().len())),
        Poll::Ready(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {
            cx.waker().wake_by_ref();
            Ok(Poll::Pending)
        }
        Poll::Ready(Err(e)) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frame::SendQueue;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    /// A toy protocol: a length byte, then so many bytes; each message is answered by an event that
    /// echoes it. Length 0 closes; length 255 waits for a decision, which an event brings.
    #[derive(Default)]
    struct Toy {
        header: [u8; 1],
        body: Vec<u8>,
        filled: Option<usize>,
        arrived: Vec<Vec<u8>>,
        blocked: bool,
        closing: bool,
        deadline: Option<Duration>,
        expired: bool,
        out: SendQueue,
    }

    /// With more than this waiting to be sent, no further message is received.
    const OUTPUT_HIGH_BYTES: usize = 1024 * 1024;

    impl Machine for Toy {
        fn receive_space(&mut self) -> Option<&mut [u8]> {
            match self.filled {
                _ if self.blocked => None,
                None if self.out.len() > OUTPUT_HIGH_BYTES => None,
                None => Some(&mut self.header),
                Some(n) => Some(&mut self.body[n..]),
            }
        }
        fn on_received(&mut self, n: usize) {
            match self.filled.as_mut() {
                None => match self.header[0] {
                    0 => self.closing = true,
                    255 => self.blocked = true,
                    len => (self.body, self.filled) = (vec![0; len.into()], Some(0)),
                },
                Some(at) => {
                    *at += n;
                    if *at == self.body.len() {
                        self.arrived.push(std::mem::take(&mut self.body));
                        self.filled = None;
                    }
                }
            }
        }
        fn output(&mut self) -> &mut SendQueue {
            &mut self.out
        }
        fn next_timer(&self) -> Option<Duration> {
            self.deadline
        }
        fn on_timer(&mut self, now: Duration) {
            if self.deadline.is_some_and(|d| now >= d) {
                (self.deadline, self.expired, self.closing) = (None, true, true);
            }
        }
        fn is_closing(&self) -> bool {
            self.closing
        }
    }

    enum Event {
        Echo(Vec<u8>),
        Unblock,
    }

    #[derive(Default)]
    struct Echo {
        toy: Toy,
        inbox: Inbox<Event>,
        moves: bool,
    }

    impl Protocol for Echo {
        type Machine = Toy;
        type Event = Event;
        fn machine(&mut self) -> &mut Toy {
            &mut self.toy
        }
        fn on_wake(&mut self, _: Instant) {}
        fn act(&mut self) {
            for message in self.toy.arrived.drain(..) {
                self.inbox.push(Event::Echo(message));
            }
        }
        fn on_event(&mut self, event: Event) {
            match event {
                Event::Echo(bytes) => self.toy.out.push_bytes(&bytes),
                Event::Unblock => self.toy.blocked = false,
            }
        }
        fn wanted_core(&self) -> Option<usize> {
            (self.moves && self.toy.blocked).then_some(3)
        }
    }

    impl BufferedStream for DuplexStream {
        fn unsent_bytes(&self) -> usize {
            0
        }
    }

    fn conn(echo: Echo, stream: DuplexStream) -> ConnectionDriver<DuplexStream, Echo> {
        let inbox = echo.inbox.clone();
        let timeout = Duration::from_secs(30);
        ConnectionDriver::new(stream, echo, inbox, Staging::default(), timeout, Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn echoes_input_in_any_portions_and_closes_on_request() {
        for portion in [1, 2, 3, 7, 64, 4096] {
            let (mut client, server) = duplex(portion);
            let mut conn = conn(Echo::default(), server);
            let talk = async {
                let (mut sent, mut expect) = (Vec::new(), Vec::new());
                for len in 1..100u8 {
                    sent.push(len);
                    sent.extend(vec![len; len.into()]);
                    expect.extend(vec![len; len.into()]);
                }
                let (mut r, mut w) = tokio::io::split(&mut client);
                let mut got = vec![0; expect.len()];
                let (write, read) = tokio::join!(w.write_all(&sent), r.read_exact(&mut got));
                write.and(read.map(|_| ())).unwrap();
                assert!(got == expect, "portions of {portion}");
                w.write_all(&[0]).await.unwrap();
                assert_eq!(r.read(&mut got).await.unwrap(), 0, "closed");
            };
            let (end, ()) = tokio::join!(conn.run(), talk);
            assert!(matches!(end, ConnectionEnd::Closed), "{end:?}");
        }
    }

    /// Payloads of 100 KiB behind a byte of header each.
    #[derive(Default)]
    struct Bulk {
        header: [u8; 1],
        body: Vec<u8>,
        filled: Option<usize>,
        /// How much of each payload passed through the staging buffer.
        staged: Vec<usize>,
        out: SendQueue,
    }

    const BULK_BYTES: usize = 100 * 1024;

    impl Machine for Bulk {
        fn receive_space(&mut self) -> Option<&mut [u8]> {
            match self.filled {
                None => Some(&mut self.header),
                Some(n) => Some(&mut self.body[n..]),
            }
        }
        fn on_received(&mut self, n: usize) {
            let Some(filled) = &mut self.filled else {
                (self.body, self.filled) = (vec![0; BULK_BYTES], Some(0));
                return self.staged.push(0);
            };
            // What is staged comes behind its header; what is read directly, when at least this is
            // wanted.
            if *filled == 0 {
                *self.staged.last_mut().unwrap() = n;
            }
            *filled += n;
            if *filled == BULK_BYTES {
                assert!(self.body.iter().all(|b| *b == self.header[0]), "another's bytes");
                self.filled = None;
            }
        }
        fn output(&mut self) -> &mut SendQueue {
            &mut self.out
        }
        fn next_timer(&self) -> Option<Duration> {
            None
        }
        fn on_timer(&mut self, _: Duration) {}
        fn is_closing(&self) -> bool {
            false
        }
    }

    impl Protocol for Bulk {
        type Machine = Self;
        type Event = ();
        fn machine(&mut self) -> &mut Self {
            self
        }
        fn on_wake(&mut self, _: Instant) {}
        fn act(&mut self) {}
        fn on_event(&mut self, (): ()) {}
    }

    /// Otherwise each would be copied once more.
    #[tokio::test(start_paused = true)]
    async fn large_payloads_that_follow_one_another_are_not_staged() {
        let (mut client, server) = duplex(16 << 20);
        for k in 1..=9u8 {
            client.write_all(&[k]).await.unwrap();
            client.write_all(&vec![k; BULK_BYTES]).await.unwrap();
        }
        drop(client);
        let (inbox, staging) = (Inbox::default(), Staging::default());
        let timeout = Duration::from_secs(30);
        let mut conn =
            ConnectionDriver::new(server, Bulk::default(), inbox, staging, timeout, Instant::now());
        assert!(matches!(conn.run().await, ConnectionEnd::PeerClosed));
        let staged = &conn.protocol.staged;
        assert_eq!(staged.len(), 9);
        let plain = staged.iter().position(|&n| n < AFTER_PAYLOAD_BYTES).unwrap();
        assert!(
            plain < 3 && staged[plain..].iter().all(|&n| n < AFTER_PAYLOAD_BYTES),
            "{staged:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn input_during_a_wait_is_kept_in_order() {
        let (mut client, server) = duplex(4096);
        let echo = Echo::default();
        let inbox = echo.inbox.clone();
        let mut conn = conn(echo, server);
        let talk = async {
            client.write_all(&[1, b'a', 255, 1, b'b', 1, b'c']).await.unwrap();
            let mut first = [0; 1];
            client.read_exact(&mut first).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            inbox.push(Event::Unblock);
            let mut rest = [0; 2];
            client.read_exact(&mut rest).await.unwrap();
            drop(client);
            [first[0], rest[0], rest[1]]
        };
        let (end, got) = tokio::join!(conn.run(), talk);
        assert_eq!(&got, b"abc");
        assert!(matches!(end, ConnectionEnd::PeerClosed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_moves_with_its_unread_bytes() {
        let (mut client, server) = duplex(4096);
        let mut conn = conn(Echo { moves: true, ..Echo::default() }, server);
        client.write_all(&[255, 1, b'x']).await.unwrap();
        assert!(matches!(conn.run().await, ConnectionEnd::Move(3)));
        assert_eq!(conn.unread, [1, b'x']);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_disconnected() {
        let (mut client, server) = duplex(16);
        let mut conn = conn(Echo::default(), server);
        let flood = async {
            let message: Vec<u8> = std::iter::once(200).chain(vec![7; 200]).collect();
            while client.write_all(&message).await.is_ok() {}
        };
        let began = Instant::now();
        let (end, ()) = tokio::join!(
            async {
                let end = conn.run().await;
                let queued = conn.protocol.toy.out.len();
                assert!(queued <= OUTPUT_HIGH_BYTES + STAGING_BYTES, "{queued} bytes queued");
                drop(conn);
                end
            },
            flood
        );
        assert!(matches!(end, ConnectionEnd::SendStalled), "{end:?}");
        assert_eq!(began.elapsed().as_secs(), 30);
    }

    /// A stream that buffers up to 1000 bytes, and sends them when told to.
    struct Holding {
        stream: DuplexStream,
        held: Vec<u8>,
    }

    impl AsyncRead for Holding {
        fn poll_read(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Holding {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            let this = self.get_mut();
            if this.held.len() >= 1000 {
                ready!(Pin::new(&mut *this).poll_flush(cx))?;
            }
            let n = buf.len().min(1000 - this.held.len());
            this.held.extend_from_slice(&buf[..n]);
            Poll::Ready(Ok(n))
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let this = self.get_mut();
            while !this.held.is_empty() {
                let n = ready!(Pin::new(&mut this.stream).poll_write(cx, &this.held))?;
                this.held.drain(..n);
            }
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
        }
    }

    impl BufferedStream for Holding {
        fn unsent_bytes(&self) -> usize {
            self.held.len()
        }
    }

    fn holding(echo: Echo, stream: DuplexStream) -> ConnectionDriver<Holding, Echo> {
        let (inbox, held) = (echo.inbox.clone(), Vec::new());
        let (stream, timeout) = (Holding { stream, held }, Duration::from_secs(30));
        ConnectionDriver::new(stream, echo, inbox, Staging::default(), timeout, Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn buffered_data_is_sent_before_the_end() {
        let (mut client, server) = duplex(16);
        let mut conn = holding(Echo::default(), server);
        let talk = async {
            let message: Vec<u8> = std::iter::once(200).chain(vec![7; 200]).collect();
            let mut got = vec![0; 200];
            client.write_all(&message).await.unwrap();
            client.read_exact(&mut got).await.unwrap();
            client.write_all(&message).await.unwrap();
            client.write_all(&[0]).await.unwrap();
            client.read_exact(&mut got).await.unwrap();
            assert_eq!(client.read(&mut got).await.unwrap(), 0, "closed");
        };
        let (end, ()) = tokio::join!(conn.run(), talk);
        assert!(matches!(end, ConnectionEnd::Closed), "{end:?}");
    }

    /// A slow peer that keeps reading is not closed; the machine has nothing more to send
    /// meanwhile.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_buffered_data_is_disconnected() {
        let (mut client, server) = duplex(16);
        let mut echo = Echo::default();
        echo.toy.out.push_bytes(&[1; 500]);
        let mut conn = holding(echo, server);
        let began = Instant::now();
        let slow = async {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(20)).await;
                client.read_exact(&mut [0; 16]).await.unwrap();
            }
        };
        let (end, ()) = tokio::join!(conn.run(), slow);
        assert!(matches!(end, ConnectionEnd::SendStalled), "{end:?}");
        assert_eq!(began.elapsed().as_secs(), 5 * 20 + 30);
    }

    /// The machine's timer runs for the rest of a message, so that must be read.
    #[tokio::test(start_paused = true)]
    async fn the_rest_of_a_message_is_read_despite_pending_output() {
        let (mut client, server) = duplex(16);
        let mut echo = Echo::default();
        (echo.toy.body, echo.toy.filled) = (vec![0; 5], Some(0));
        echo.toy.out.push_bytes(&vec![0; 2 * OUTPUT_HIGH_BYTES]);
        let mut conn = conn(echo, server);
        client.write_all(b"hello").await.unwrap();
        let _ = tokio::time::timeout(Duration::from_secs(1), conn.run()).await;
        assert_eq!(conn.protocol.toy.filled, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_closes_does_not_move() {
        let (_client, server) = duplex(16);
        let mut echo = Echo { moves: true, ..Echo::default() };
        (echo.toy.blocked, echo.toy.closing) = (true, true);
        assert!(matches!(conn(echo, server).run().await, ConnectionEnd::Closed));
    }

    #[tokio::test(start_paused = true)]
    async fn an_inbox_is_closed_even_if_its_connection_is_dropped() {
        let (_client, server) = duplex(16);
        let echo = Echo::default();
        let inbox = echo.inbox.clone();
        drop(conn(echo, server));
        assert!(inbox.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn an_evicted_connection_ends_at_once() {
        let (_client, server) = duplex(16);
        let echo = Echo::default();
        let inbox = echo.inbox.clone();
        let mut conn = conn(echo, server);
        let began = Instant::now();
        let evict = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            inbox.evict();
        };
        let (end, ()) = tokio::join!(conn.run(), evict);
        assert!(matches!(end, ConnectionEnd::Evicted), "{end:?}");
        assert_eq!(began.elapsed().as_millis(), 1);
    }

    /// The rest of what the peer sends is read, so that closing does not reset the connection.
    #[tokio::test(start_paused = true)]
    async fn the_peer_may_finish_after_a_close_request() {
        let (mut client, server) = duplex(16);
        let mut conn = conn(Echo::default(), server);
        let began = Instant::now();
        let leave = async {
            client.write_all(&[0; 100_000]).await.expect("it is read to its end");
            drop(client);
        };
        let (end, ()) = tokio::join!(conn.run(), leave);
        assert!(matches!(end, ConnectionEnd::Closed), "{end:?}");
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_falls_silent_is_not_heard_for_ever() {
        let (mut client, server) = duplex(16);
        let mut conn = conn(Echo::default(), server);
        let began = Instant::now();
        let talk = async {
            while client.write_all(&[0; 16]).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let run = async {
            let end = conn.run().await;
            drop(conn);
            end
        };
        let (end, ()) = tokio::join!(run, talk);
        assert!(matches!(end, ConnectionEnd::Closed), "{end:?}");
        assert_eq!(began.elapsed().as_secs(), CLOSE_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn the_machine_gets_its_timer() {
        let (_client, server) = duplex(16);
        let mut echo = Echo::default();
        echo.toy.deadline = Some(Duration::from_secs(5));
        let mut conn = conn(echo, server);
        let began = Instant::now();
        assert!(matches!(conn.run().await, ConnectionEnd::Closed));
        assert!(conn.protocol.toy.expired);
        assert_eq!(began.elapsed(), Duration::from_secs(5) + CLOSE_TIMEOUT, "the peer stays");
    }
}
