//! Connections: what is on the wire, and what comes of it.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::task::{Poll, Waker};
use std::time::Duration;

use super::{Net, State};
use crate::sim::trace::content;

/// A short read or write happens once in so many.
const SHORT_EVERY: u64 = 4;

/// One connection.
pub(super) struct Conn {
    pub(super) ends: [End; 2],
    /// `pipes[i]` carries what end `i` sends.
    pipes: [Pipe; 2],
}

/// One end of a connection.
pub(super) struct End {
    host: usize,
    address: SocketAddr,
    /// Whether anybody holds the socket.
    open: bool,
    /// Whether it has said that it sends no more.
    finished: bool,
    /// What has arrived and was not read.
    inbox: VecDeque<u8>,
    /// The other side sends no more.
    ended: bool,
    /// Why nothing works any more.
    broken: Option<io::ErrorKind>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Default)]
struct Pipe {
    /// What is on its way, with the time it arrives.
    wire: VecDeque<(Duration, Segment)>,
    /// The agenda knows of the first one.
    armed: bool,
    /// Bytes on their way or unread.
    unread: usize,
    /// Bytes that were read while the way back was cut: the sender does not know yet.
    unacknowledged: usize,
    /// When the sender last got nowhere.
    stuck_since: Option<Duration>,
}

enum Segment {
    Data(Vec<u8>),
    Fin,
    Reset,
}

impl End {
    pub(super) fn new(host: usize, address: SocketAddr) -> Self {
        Self {
            host,
            address,
            open: true,
            finished: false,
            inbox: VecDeque::new(),
            ended: false,
            broken: None,
            reader: None,
            writer: None,
        }
    }

    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }

    fn break_off(&mut self, why: io::ErrorKind) {
        self.broken.get_or_insert(why);
        self.wake();
    }
}

impl Conn {
    pub(super) fn new(ends: [End; 2]) -> Self {
        Self { ends, pipes: Default::default() }
    }

    /// Whether nobody can tell any more that it existed.
    fn is_over(&self) -> bool {
        self.ends.iter().all(|e| !e.open) && self.pipes.iter().all(|p| p.wire.is_empty())
    }

    fn hosts(&self, side: usize) -> (usize, usize) {
        (self.ends[side].host, self.ends[1 - side].host)
    }

    /// The port that it was made to.
    fn port(&self) -> u16 {
        self.ends[1].address.port()
    }
}

impl Net {
    /// Puts something on the wire of `side`.
    fn send(&self, state: &mut State, number: u64, side: usize, segment: Segment) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let (from, to) = conn.hosts(side);
        let link = state.links.get(&(from, to)).copied().unwrap_or_default();
        let due = self.0.agenda.now() + link.delay(from == to, &self.0.rng);
        let pipe = &mut conn.pipes[side];
        pipe.wire.push_back((due, segment));
        self.arm(pipe, number, side);
    }

    /// Sees to it that the first segment of a pipe arrives when it is due.
    fn arm(&self, pipe: &mut Pipe, number: u64, side: usize) {
        let Some(&(due, _)) = pipe.wire.front() else { return };
        if !std::mem::replace(&mut pipe.armed, true) {
            let net = self.clone();
            let delay = due.saturating_sub(self.0.agenda.now());
            self.0.agenda.after(delay, move || net.arrive(number, side));
        }
    }

    /// The first segment of a pipe is due.
    fn arrive(&self, number: u64, side: usize) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get(&number) else { return };
        let (from, to) = conn.hosts(side);
        let passes = state.passes(from, to, conn.port());
        let link = state.link(from, to);
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let pipe = &mut conn.pipes[side];
        pipe.armed = false;
        if !passes {
            self.stuck(pipe, number, side, link.give_up);
            return;
        }
        pipe.stuck_since = None;
        let Some((_, segment)) = pipe.wire.pop_front() else { return };
        self.arm(pipe, number, side);
        let numbers = match &segment {
            Segment::Data(bytes) => [number, side as u64, bytes.len() as u64, content(bytes)],
            Segment::Fin => [number, side as u64, 0, 1],
            Segment::Reset => [number, side as u64, 0, 2],
        };
        if deliver(conn, side, segment) {
            self.send(state, number, 1 - side, Segment::Reset);
        }
        self.forget_if_over(state, number);
        drop(guard);
        self.event("arrived", to, &numbers);
    }

    /// A pipe whose way is barred: the sender tries again when that changes, and gives up at last.
    fn stuck(&self, pipe: &mut Pipe, number: u64, side: usize, give_up: Duration) {
        let now = self.0.agenda.now();
        if pipe.stuck_since.is_none() {
            pipe.stuck_since = Some(now);
            let net = self.clone();
            self.0.agenda.after(give_up, move || net.give_up(number, side, now));
        }
    }

    fn give_up(&self, number: u64, side: usize, since: Duration) {
        let mut state = self.0.state.borrow_mut();
        if let Some(conn) = state.conns.get_mut(&number)
            && conn.pipes[side].stuck_since == Some(since)
        {
            conn.pipes[side].wire.clear();
            conn.ends[side].break_off(io::ErrorKind::TimedOut);
            self.forget_if_over(&mut state, number);
        }
    }

    /// Something has changed that pipes may have waited for.
    pub(super) fn wake_pipes(&self) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let numbers: Vec<u64> = state.conns.keys().copied().collect();
        for number in numbers {
            for side in 0..2 {
                let Some(conn) = state.conns.get(&number) else { continue };
                let (from, to) = conn.hosts(side);
                let port = conn.port();
                let (there, back) = (state.passes(from, to, port), state.passes(to, from, port));
                let again = self.0.agenda.now() + state.link(from, to).resent(&self.0.rng);
                let Some(conn) = state.conns.get_mut(&number) else { continue };
                let pipe = &mut conn.pipes[side];
                if there
                    && !pipe.armed
                    && let Some((due, _)) = pipe.wire.front_mut()
                {
                    *due = again;
                    self.arm(pipe, number, side);
                }
                if back && pipe.unacknowledged > 0 {
                    pipe.unread -= std::mem::take(&mut pipe.unacknowledged);
                    conn.ends[side].wake();
                }
            }
        }
    }

    fn forget_if_over(&self, state: &mut State, number: u64) {
        if state.conns.get(&number).is_some_and(Conn::is_over) {
            state.conns.remove(&number);
        }
    }

    /// Whoever held this end of a connection lets it go.
    pub(super) fn close(&self, number: u64, side: usize) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let end = &mut conn.ends[side];
        if !std::mem::replace(&mut end.open, false) {
            return;
        }
        let host = end.host;
        // As real systems do: closing a socket with unread data resets the connection.
        let unread = !end.inbox.is_empty();
        let last_word = match (unread, end.finished, end.broken) {
            (_, _, Some(_)) => None,
            (true, _, None) => Some(Segment::Reset),
            (false, false, None) => Some(Segment::Fin),
            (false, true, None) => None,
        };
        if let Some(word) = last_word {
            self.send(state, number, side, word);
        }
        self.forget_if_over(state, number);
        drop(guard);
        self.event("close", host, &[number, side as u64, u64::from(unread)]);
    }

    /// Closes every connection of a host.
    pub(super) fn close_all(&self, host: usize) {
        for (number, side) in self.ends_of(host) {
            self.close(number, side);
        }
    }

    fn ends_of(&self, host: usize) -> Vec<(u64, usize)> {
        let state = self.0.state.borrow();
        let both = |(&n, c): (&u64, &Conn)| [0, 1].map(|s| (n, s, c.ends[s].host));
        let all = state.conns.iter().flat_map(both);
        all.filter(|&(_, _, h)| h == host).map(|(n, s, _)| (n, s)).collect()
    }

    /// A host loses power: its ends are gone, and so is some of what it had sent.
    pub(super) fn vanish(&self, host: usize) {
        for (number, side) in self.ends_of(host) {
            let mut guard = self.0.state.borrow_mut();
            let Some(conn) = guard.conns.get_mut(&number) else { continue };
            let end = &mut conn.ends[side];
            end.open = false;
            end.inbox.clear();
            let wire = &mut conn.pipes[side].wire;
            wire.truncate(self.0.rng.index(wire.len() + 1));
            if conn.ends[1 - side].host == host {
                conn.pipes.iter_mut().for_each(|p| p.wire.clear());
            }
            self.forget_if_over(&mut guard, number);
        }
    }

    pub(super) fn poll_read(
        &self,
        number: u64,
        side: usize,
        room: usize,
        waker: &Waker,
    ) -> Poll<io::Result<Vec<u8>>> {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get(&number) else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        let (us, them) = conn.hosts(side);
        let back = state.passes(us, them, conn.port());
        let Some(conn) = state.conns.get_mut(&number) else { return Poll::Pending };
        let end = &mut conn.ends[side];
        let available = end.inbox.len().min(room);
        if available == 0 {
            return match end.broken {
                Some(why) => Poll::Ready(Err(why.into())),
                None if end.ended => Poll::Ready(Ok(Vec::new())),
                None => {
                    end.reader = Some(waker.clone());
                    Poll::Pending
                }
            };
        }
        let bytes: Vec<u8> = end.inbox.drain(..self.portion(available)).collect();
        let pipe = &mut conn.pipes[1 - side];
        if back {
            pipe.unread -= bytes.len();
            conn.ends[1 - side].writer.take().into_iter().for_each(Waker::wake);
        } else {
            pipe.unacknowledged += bytes.len();
        }
        Poll::Ready(Ok(bytes))
    }

    /// All of `len` (not 0), or now and then only a part of it.
    fn portion(&self, len: usize) -> usize {
        if self.0.rng.below(SHORT_EVERY) == 0 { 1 + self.0.rng.index(len) } else { len }
    }

    /// Takes some of `bytes`; how many.
    pub(super) fn poll_write(
        &self,
        number: u64,
        side: usize,
        bytes: &[u8],
        waker: &Waker,
    ) -> Poll<io::Result<usize>> {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get(&number) else {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        };
        let (from, to) = conn.hosts(side);
        let window = state.link(from, to).window;
        let Some(conn) = state.conns.get_mut(&number) else { return Poll::Pending };
        let (end, pipe) = (&mut conn.ends[side], &mut conn.pipes[side]);
        if let Some(why) = end.broken {
            return Poll::Ready(Err(why.into()));
        }
        if end.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let room = window.saturating_sub(pipe.unread);
        // As real systems do: no dribble of bytes into a window that is all but full.
        if room < (window / 3).max(1) {
            end.writer = Some(waker.clone());
            return Poll::Pending;
        }
        let taken = self.portion(room.min(bytes.len()));
        pipe.unread += taken;
        let cut = self.portion(taken);
        for piece in [&bytes[..cut], &bytes[cut..taken]] {
            if !piece.is_empty() {
                self.send(state, number, side, Segment::Data(piece.to_vec()));
            }
        }
        drop(guard);
        let numbers = [number, side as u64, taken as u64, content(&bytes[..taken])];
        self.event("sent", from, &numbers);
        Poll::Ready(Ok(taken))
    }

    /// Says that nothing more will be sent.
    pub(super) fn shut_down(&self, number: u64, side: usize) -> io::Result<()> {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let conn = state.conns.get_mut(&number).ok_or(io::ErrorKind::NotConnected)?;
        let end = &mut conn.ends[side];
        if end.broken.is_some() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if !std::mem::replace(&mut end.finished, true) {
            self.send(state, number, side, Segment::Fin);
        }
        Ok(())
    }

    /// Addresses of an end and of the other one.
    pub(super) fn addresses(&self, number: u64, side: usize) -> Option<(SocketAddr, SocketAddr)> {
        let state = self.0.state.borrow();
        let conn = state.conns.get(&number)?;
        Some((conn.ends[side].address, conn.ends[1 - side].address))
    }
}

/// A segment of `side` reaches the other end; whether that answers with a reset.
fn deliver(conn: &mut Conn, side: usize, segment: Segment) -> bool {
    let end = &mut conn.ends[1 - side];
    let refused = !end.open;
    match segment {
        Segment::Data(_) if refused => {
            conn.pipes[side].wire.clear();
            return true;
        }
        Segment::Data(bytes) => end.inbox.extend(bytes),
        Segment::Fin if refused => {}
        Segment::Fin => end.ended = true,
        Segment::Reset => {
            end.break_off(io::ErrorKind::ConnectionReset);
            // Nothing that it still had to say matters any more.
            conn.pipes[1 - side].wire.clear();
        }
    }
    conn.ends[1 - side].wake();
    false
}
