//! A simulated TCP network.
//!
//! A connection is two pipes. Written data is sent in segments of any size, each with its own
//! delay, and arrives in order; a reader gets any portion of the received data. The faults are
//! those of TCP: delay (a lost segment is a delay), silence, an end of the stream and a reset. A
//! cut link delivers nothing and loses nothing: what TCP would retransmit arrives after the link is
//! healed, unless the sender has given up. A host without power does not answer; once it is up
//! again it resets the connections that it no longer knows.

mod connection;
mod link;
mod stream;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::event_queue::EventQueue;
use super::host_run::HostRun;
use super::rng::Rng;
use super::trace::Trace;
use crate::listen_options::ListenOptions;

use connection::{Connection, Endpoint};
pub use link::LinkSetup;
pub(crate) use stream::{DetachedSimStream, SimListener, SimStream};

/// First ephemeral port.
const FIRST_EPHEMERAL_PORT: u16 = 49_152;

/// Time between attempts to connect: doubled each time, six times (Linux `tcp_syn_retries`).
const SYN_RETRIES: u32 = 6;

/// Address of host number `index`.
pub(crate) fn address(index: usize) -> IpAddr {
    let n = u32::try_from(index).expect("fewer hosts than addresses");
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0001 + n))
}

/// How a host's software ends, as far as its connections matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostExit {
    /// Its power is cut: connections are not closed.
    PowerCut,
    /// Its process has died: the system closes them.
    ProcessKilled,
}

/// The network of a world. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Network(Rc<Inner>);

struct Inner {
    agenda: EventQueue,
    trace: Rc<Trace>,
    rng: Rng,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    hosts: Vec<NetworkHost>,
    links: BTreeMap<(usize, usize), LinkSetup>,
    conns: BTreeMap<u64, Connection>,
    next_conn: u64,
    next_listener: u64,
}

struct NetworkHost {
    name: Rc<str>,
    is_powered: bool,
    next_port: u16,
    listeners: BTreeMap<u64, ListenSocket>,
}

struct ListenSocket {
    at: SocketAddr,
    how: ListenOptions,
    /// Connections not yet accepted.
    accept_queue: VecDeque<SimStream>,
    arrived: Rc<Notify>,
}

thread_local! {
    /// The network of this thread's world, for streams that are dropped between two cores.
    static CURRENT: RefCell<Weak<Inner>> = const { RefCell::new(Weak::new()) };
}

impl State {
    fn link_setup(&self, from: usize, to: usize) -> LinkSetup {
        self.links.get(&(from, to)).copied().unwrap_or_default()
    }

    /// Whether data from `from` to `to` arrives now, on a connection made to `port`.
    fn passes(&self, from: usize, to: usize, port: u16) -> bool {
        let link = self.link_setup(from, to);
        let barred = link.is_cut || link.cut_port == Some(port);
        self.hosts[to].is_powered && (from == to || !barred)
    }
}

impl Network {
    pub(crate) fn new(seed: u64, agenda: EventQueue, trace: Rc<Trace>) -> Self {
        let rng = Rng::new(seed, "network");
        let inner = Rc::new(Inner { agenda, trace, rng, state: RefCell::default() });
        CURRENT.set(Rc::downgrade(&inner));
        Self(inner)
    }

    pub(crate) fn add_host(&self, name: &Rc<str>) {
        self.0.state.borrow_mut().hosts.push(NetworkHost {
            name: Rc::clone(name),
            is_powered: false,
            next_port: FIRST_EPHEMERAL_PORT,
            listeners: BTreeMap::new(),
        });
    }

    fn event(&self, what: &'static str, host: usize, numbers: &[u64]) {
        let name = Rc::clone(&self.0.state.borrow().hosts[host].name);
        self.0.trace.event(self.0.agenda.now(), what, &name, numbers);
    }

    /// Changes one direction of a link; blocked data is sent on.
    pub(crate) fn set_link(&self, from: usize, to: usize, change: impl FnOnce(&mut LinkSetup)) {
        let mut state = self.0.state.borrow_mut();
        let mut link = state.link_setup(from, to);
        change(&mut link);
        state.links.insert((from, to), link);
        drop(state);
        let cut = u64::from(link.cut_port.unwrap_or_default()) << 1 | u64::from(link.is_cut);
        self.event("link", from, &[to as u64, cut]);
        self.retry_blocked_pipes();
    }

    pub(crate) fn host_up(&self, host: usize) {
        self.0.state.borrow_mut().hosts[host].is_powered = true;
        self.retry_blocked_pipes();
    }

    /// The software of a host has ended.
    pub(crate) fn host_down(&self, host: usize, exit: HostExit) {
        let listeners = {
            let mut state = self.0.state.borrow_mut();
            let h = &mut state.hosts[host];
            h.is_powered = exit == HostExit::ProcessKilled;
            std::mem::take(&mut h.listeners)
        };
        match exit {
            HostExit::PowerCut => self.drop_host_endpoints(host),
            HostExit::ProcessKilled => self.close_all(host),
        }
        // Their streams belong to connections that are already gone.
        drop(listeners);
    }

    pub(crate) fn listen(
        &self,
        host: usize,
        boot: &Rc<HostRun>,
        at: SocketAddr,
        how: ListenOptions,
    ) -> io::Result<SimListener> {
        let mut state = self.0.state.borrow_mut();
        if !(at.ip().is_unspecified() || at.ip().is_loopback() || at.ip() == address(host)) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let id = state.next_listener;
        state.next_listener += 1;
        let h = &mut state.hosts[host];
        let port = if at.port() == 0 { h.free_port() } else { at.port() };
        let at = SocketAddr::new(at.ip(), port);
        let clash = |l: &ListenSocket| l.covers(at) && !(l.how.reuse_port && how.reuse_port);
        if h.listeners.values().any(clash) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let arrived = Rc::new(Notify::new());
        let queue = VecDeque::new();
        h.listeners.insert(
            id,
            ListenSocket { at, how, accept_queue: queue, arrived: Rc::clone(&arrived) },
        );
        drop(state);
        self.event("listen", host, &[u64::from(port)]);
        Ok(SimListener::new(self.clone(), host, id, at, arrived, Rc::clone(boot)))
    }

    /// Removes a listener; connections not yet accepted are reset.
    fn remove_listener(&self, host: usize, id: u64) {
        let gone = self.0.state.borrow_mut().hosts[host].listeners.remove(&id);
        drop(gone);
    }

    fn take_accepted(&self, host: usize, id: u64) -> Option<SimStream> {
        let mut state = self.0.state.borrow_mut();
        state.hosts[host].listeners.get_mut(&id)?.accept_queue.pop_front()
    }

    pub(crate) async fn dial(
        &self,
        from: usize,
        boot: &Rc<HostRun>,
        to: SocketAddr,
    ) -> io::Result<SimStream> {
        let target = if to.ip().is_loopback() { Some(from) } else { self.host_at(to.ip()) };
        self.event("dial", from, &[u64::from(to.port())]);
        let Some(target) = target else {
            tokio::time::sleep(Duration::from_secs(3)).await;
            return Err(io::ErrorKind::HostUnreachable.into());
        };
        for attempt in 0..=SYN_RETRIES {
            tokio::time::sleep(self.delay(from, target)).await;
            match self.send_syn(from, boot, target, to) {
                SynOutcome::Accepted(stream) => {
                    tokio::time::sleep(self.delay(target, from)).await;
                    return Ok(stream);
                }
                SynOutcome::Refused => {
                    tokio::time::sleep(self.delay(target, from)).await;
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                SynOutcome::Unanswered => {
                    tokio::time::sleep(Duration::from_secs(1 << attempt)).await;
                }
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn host_at(&self, ip: IpAddr) -> Option<usize> {
        (0..self.0.state.borrow().hosts.len()).find(|&i| address(i) == ip)
    }

    /// A delay of the link, for one segment.
    fn delay(&self, from: usize, to: usize) -> Duration {
        let link = self.0.state.borrow().link_setup(from, to);
        link.delay(from == to, &self.0.rng)
    }

    /// A SYN arrives, or is lost.
    fn send_syn(
        &self,
        from: usize,
        boot: &Rc<HostRun>,
        target: usize,
        to: SocketAddr,
    ) -> SynOutcome {
        let mut state = self.0.state.borrow_mut();
        let port = to.port();
        if !(state.passes(from, target, port) && state.passes(target, from, port)) {
            return SynOutcome::Unanswered;
        }
        let listening: Vec<u64> = state.hosts[target]
            .listeners
            .iter()
            .filter(|(_, l)| l.covers(to))
            .map(|(&id, _)| id)
            .collect();
        if listening.is_empty() {
            return SynOutcome::Refused;
        }
        let id = *self.0.rng.pick(&listening);
        let l = &state.hosts[target].listeners[&id];
        if l.accept_queue.len() >= l.how.backlog as usize {
            return SynOutcome::Unanswered;
        }
        let port = state.hosts[from].free_port();
        let local_ip = if to.ip().is_loopback() { to.ip() } else { address(from) };
        let local = SocketAddr::new(local_ip, port);
        let number = state.next_conn;
        state.next_conn += 1;
        let ends = [Endpoint::new(from, local), Endpoint::new(target, to)];
        state.conns.insert(number, Connection::new(ends));
        let ours = SimStream::new(self.clone(), number, 0, local, to, Rc::clone(boot));
        let listening = state.hosts[target].listeners.get_mut(&id).expect("chosen above");
        // The accepting listener replaces the run by its own.
        let remote = SimStream::new(self.clone(), number, 1, to, local, Rc::clone(boot));
        listening.accept_queue.push_back(remote);
        listening.arrived.notify_one();
        drop(state);
        self.event("connected", from, &[number, target as u64]);
        SynOutcome::Accepted(ours)
    }
}

enum SynOutcome {
    Accepted(SimStream),
    Refused,
    Unanswered,
}

impl NetworkHost {
    fn free_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = if port == u16::MAX { FIRST_EPHEMERAL_PORT } else { port + 1 };
        port
    }
}

impl ListenSocket {
    /// Whether the listener accepts connections to `to`.
    fn covers(&self, to: SocketAddr) -> bool {
        let any = self.at.ip().is_unspecified() || to.ip().is_unspecified();
        self.at.port() == to.port() && (any || self.at.ip() == to.ip())
    }
}
