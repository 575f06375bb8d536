//! Connections: segments in transit, and their effects.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::task::{Poll, Waker};
use std::time::Duration;

use super::{Network, State};
use crate::sim::trace::content_hash;

/// One in so many reads or writes is short.
const PARTIAL_IO_EVERY: u64 = 4;

/// One connection.
pub(super) struct Connection {
    pub(super) endpoints: [Endpoint; 2],
    /// `pipes[i]` carries the data of end `i`.
    pipes: [DirectionPipe; 2],
}

/// One end of a connection.
pub(super) struct Endpoint {
    host: usize,
    address: SocketAddr,
    /// Whether a socket is open at this end.
    is_open: bool,
    /// Whether it has shut down sending.
    sent_fin: bool,
    /// Received and unread data.
    inbox: VecDeque<u8>,
    /// Whether the peer has shut down sending.
    received_fin: bool,
    /// The error of all further calls.
    error: Option<io::ErrorKind>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Default)]
struct DirectionPipe {
    /// Segments in transit, with their arrival times.
    in_transit: VecDeque<(Duration, Segment)>,
    /// Whether the arrival of the first one is scheduled.
    is_scheduled: bool,
    /// Bytes in transit or unread.
    unacknowledged_bytes: usize,
    /// Bytes read while the reverse direction was cut: the sender does not know yet.
    unsent_acknowledgement: usize,
    /// Since when the sender has been blocked.
    blocked_since: Option<Duration>,
}

enum Segment {
    Data(Vec<u8>),
    Fin,
    Reset,
}

impl Endpoint {
    pub(super) fn new(host: usize, address: SocketAddr) -> Self {
        Self {
            host,
            address,
            is_open: true,
            sent_fin: false,
            inbox: VecDeque::new(),
            received_fin: false,
            error: None,
            reader: None,
            writer: None,
        }
    }

    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }

    fn fail(&mut self, why: io::ErrorKind) {
        self.error.get_or_insert(why);
        self.wake();
    }
}

impl Connection {
    pub(super) fn new(ends: [Endpoint; 2]) -> Self {
        Self { endpoints: ends, pipes: Default::default() }
    }

    /// Whether the connection can be forgotten.
    fn is_finished(&self) -> bool {
        self.endpoints.iter().all(|e| !e.is_open)
            && self.pipes.iter().all(|p| p.in_transit.is_empty())
    }

    fn hosts(&self, side: usize) -> (usize, usize) {
        (self.endpoints[side].host, self.endpoints[1 - side].host)
    }

    /// The port that it was made to.
    fn port(&self) -> u16 {
        self.endpoints[1].address.port()
    }
}

impl Network {
    /// Sends a segment from `side`.
    fn send(&self, state: &mut State, number: u64, side: usize, segment: Segment) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let (from, to) = conn.hosts(side);
        let link = state.links.get(&(from, to)).copied().unwrap_or_default();
        let due = self.0.agenda.now() + link.delay(from == to, &self.0.rng);
        let pipe = &mut conn.pipes[side];
        pipe.in_transit.push_back((due, segment));
        self.schedule_arrival(pipe, number, side);
    }

    /// Schedules the arrival of the first segment of a pipe.
    fn schedule_arrival(&self, pipe: &mut DirectionPipe, number: u64, side: usize) {
        let Some(&(due, _)) = pipe.in_transit.front() else { return };
        if !std::mem::replace(&mut pipe.is_scheduled, true) {
            let net = self.clone();
            let delay = due.saturating_sub(self.0.agenda.now());
            self.0.agenda.schedule(delay, move || net.arrive(number, side));
        }
    }

    /// The first segment of a pipe arrives.
    fn arrive(&self, number: u64, side: usize) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get(&number) else { return };
        let (from, to) = conn.hosts(side);
        let passes = state.passes(from, to, conn.port());
        let link = state.link_setup(from, to);
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let pipe = &mut conn.pipes[side];
        pipe.is_scheduled = false;
        if !passes {
            self.on_blocked(pipe, number, side, link.retransmit_timeout);
            return;
        }
        pipe.blocked_since = None;
        let Some((_, segment)) = pipe.in_transit.pop_front() else { return };
        self.schedule_arrival(pipe, number, side);
        let numbers = match &segment {
            Segment::Data(bytes) => [number, side as u64, bytes.len() as u64, content_hash(bytes)],
            Segment::Fin => [number, side as u64, 0, 1],
            Segment::Reset => [number, side as u64, 0, 2],
        };
        if deliver(conn, side, segment) {
            self.send(state, number, 1 - side, Segment::Reset);
        }
        self.remove_if_finished(state, number);
        drop(guard);
        self.event("arrived", to, &numbers);
    }

    /// A blocked pipe: the sender retries when the link changes, and gives up at last.
    fn on_blocked(&self, pipe: &mut DirectionPipe, number: u64, side: usize, give_up: Duration) {
        let now = self.0.agenda.now();
        if pipe.blocked_since.is_none() {
            pipe.blocked_since = Some(now);
            let net = self.clone();
            self.0.agenda.schedule(give_up, move || net.give_up(number, side, now));
        }
    }

    fn give_up(&self, number: u64, side: usize, since: Duration) {
        let mut state = self.0.state.borrow_mut();
        if let Some(conn) = state.conns.get_mut(&number)
            && conn.pipes[side].blocked_since == Some(since)
        {
            conn.pipes[side].in_transit.clear();
            conn.endpoints[side].fail(io::ErrorKind::TimedOut);
            self.remove_if_finished(&mut state, number);
        }
    }

    /// The network has changed: retries blocked pipes.
    pub(super) fn retry_blocked_pipes(&self) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let numbers: Vec<u64> = state.conns.keys().copied().collect();
        for number in numbers {
            for side in 0..2 {
                let Some(conn) = state.conns.get(&number) else { continue };
                let (from, to) = conn.hosts(side);
                let port = conn.port();
                let (forward, back) = (state.passes(from, to, port), state.passes(to, from, port));
                let again = self.0.agenda.now()
                    + state.link_setup(from, to).draw_retransmit_delay(&self.0.rng);
                let Some(conn) = state.conns.get_mut(&number) else { continue };
                let pipe = &mut conn.pipes[side];
                if forward
                    && !pipe.is_scheduled
                    && let Some((due, _)) = pipe.in_transit.front_mut()
                {
                    *due = again;
                    self.schedule_arrival(pipe, number, side);
                }
                if back && pipe.unsent_acknowledgement > 0 {
                    pipe.unacknowledged_bytes -= std::mem::take(&mut pipe.unsent_acknowledgement);
                    conn.endpoints[side].wake();
                }
            }
        }
    }

    fn remove_if_finished(&self, state: &mut State, number: u64) {
        if state.conns.get(&number).is_some_and(Connection::is_finished) {
            state.conns.remove(&number);
        }
    }

    /// This end of a connection is dropped.
    pub(super) fn close(&self, number: u64, side: usize) {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let end = &mut conn.endpoints[side];
        if !std::mem::replace(&mut end.is_open, false) {
            return;
        }
        let host = end.host;
        // As in real systems: closing a socket with unread data resets the connection.
        let unread = !end.inbox.is_empty();
        let last_word = match (unread, end.sent_fin, end.error) {
            (_, _, Some(_)) => None,
            (true, _, None) => Some(Segment::Reset),
            (false, false, None) => Some(Segment::Fin),
            (false, true, None) => None,
        };
        if let Some(word) = last_word {
            self.send(state, number, side, word);
        }
        self.remove_if_finished(state, number);
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
        let both = |(&n, c): (&u64, &Connection)| [0, 1].map(|s| (n, s, c.endpoints[s].host));
        let all = state.conns.iter().flat_map(both);
        all.filter(|&(_, _, h)| h == host).map(|(n, s, _)| (n, s)).collect()
    }

    /// A host loses power: its ends are gone, and so is a part of the data they had sent.
    pub(super) fn drop_host_endpoints(&self, host: usize) {
        for (number, side) in self.ends_of(host) {
            let mut guard = self.0.state.borrow_mut();
            let Some(conn) = guard.conns.get_mut(&number) else { continue };
            let end = &mut conn.endpoints[side];
            end.is_open = false;
            end.inbox.clear();
            let wire = &mut conn.pipes[side].in_transit;
            wire.truncate(self.0.rng.index(wire.len() + 1));
            if conn.endpoints[1 - side].host == host {
                conn.pipes.iter_mut().for_each(|p| p.in_transit.clear());
            }
            self.remove_if_finished(&mut guard, number);
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
        let end = &mut conn.endpoints[side];
        let available = end.inbox.len().min(room);
        if available == 0 {
            return match end.error {
                Some(why) => Poll::Ready(Err(why.into())),
                None if end.received_fin => Poll::Ready(Ok(Vec::new())),
                None => {
                    end.reader = Some(waker.clone());
                    Poll::Pending
                }
            };
        }
        let bytes: Vec<u8> = end.inbox.drain(..self.random_portion(available)).collect();
        let pipe = &mut conn.pipes[1 - side];
        if back {
            pipe.unacknowledged_bytes -= bytes.len();
            conn.endpoints[1 - side].writer.take().into_iter().for_each(Waker::wake);
        } else {
            pipe.unsent_acknowledgement += bytes.len();
        }
        Poll::Ready(Ok(bytes))
    }

    /// All of `len` (not 0), or sometimes only a part of it.
    fn random_portion(&self, len: usize) -> usize {
        if self.0.rng.below(PARTIAL_IO_EVERY) == 0 { 1 + self.0.rng.index(len) } else { len }
    }

    /// Writes some of `bytes`; returns how many.
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
        let window = state.link_setup(from, to).window;
        let Some(conn) = state.conns.get_mut(&number) else { return Poll::Pending };
        let (end, pipe) = (&mut conn.endpoints[side], &mut conn.pipes[side]);
        if let Some(why) = end.error {
            return Poll::Ready(Err(why.into()));
        }
        if end.sent_fin {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let room = window.saturating_sub(pipe.unacknowledged_bytes);
        // As in real systems: no tiny segments into an almost full window.
        if room < (window / 3).max(1) {
            end.writer = Some(waker.clone());
            return Poll::Pending;
        }
        let taken = self.random_portion(room.min(bytes.len()));
        pipe.unacknowledged_bytes += taken;
        let cut = self.random_portion(taken);
        for piece in [&bytes[..cut], &bytes[cut..taken]] {
            if !piece.is_empty() {
                self.send(state, number, side, Segment::Data(piece.to_vec()));
            }
        }
        drop(guard);
        let numbers = [number, side as u64, taken as u64, content_hash(&bytes[..taken])];
        self.event("sent", from, &numbers);
        Poll::Ready(Ok(taken))
    }

    /// Shuts down sending.
    pub(super) fn shut_down(&self, number: u64, side: usize) -> io::Result<()> {
        let mut guard = self.0.state.borrow_mut();
        let state = &mut *guard;
        let conn = state.conns.get_mut(&number).ok_or(io::ErrorKind::NotConnected)?;
        let end = &mut conn.endpoints[side];
        if end.error.is_some() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if !std::mem::replace(&mut end.sent_fin, true) {
            self.send(state, number, side, Segment::Fin);
        }
        Ok(())
    }

    /// Local and peer address of an end.
    pub(super) fn addresses(&self, number: u64, side: usize) -> Option<(SocketAddr, SocketAddr)> {
        let state = self.0.state.borrow();
        let conn = state.conns.get(&number)?;
        Some((conn.endpoints[side].address, conn.endpoints[1 - side].address))
    }
}

/// A segment of `side` reaches the other end; returns whether that answers with a reset.
fn deliver(conn: &mut Connection, side: usize, segment: Segment) -> bool {
    let end = &mut conn.endpoints[1 - side];
    let refused = !end.is_open;
    match segment {
        Segment::Data(_) if refused => {
            conn.pipes[side].in_transit.clear();
            return true;
        }
        Segment::Data(bytes) => end.inbox.extend(bytes),
        Segment::Fin if refused => {}
        Segment::Fin => end.received_fin = true,
        Segment::Reset => {
            end.fail(io::ErrorKind::ConnectionReset);
            // Its remaining data does not matter any more.
            conn.pipes[1 - side].in_transit.clear();
        }
    }
    conn.endpoints[1 - side].wake();
    false
}
