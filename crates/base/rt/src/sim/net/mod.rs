//! A simulated TCP network.
//!
//! A connection is two pipes. What is written goes on the wire in pieces of any size, each with
//! its own delay, and arrives in order; a reader gets any portion of what has arrived. The faults
//! are those that TCP lets through: delay (a lost segment is a delay), silence, an end of the
//! stream and a reset. A cut link delivers nothing and forgets nothing: what TCP would send again
//! arrives after the link is healed, unless the sender has given up. A host without power answers
//! nothing; once it is up again it resets the connections that it no longer knows.

mod conn;
mod link;
mod stream;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use super::agenda::Agenda;
use super::host::{Boot, HostState};
use super::rng::Rng;
use super::trace::Trace;
use crate::net::ListenOptions;

use conn::{Conn, End};
pub use link::LinkSetup;
pub(crate) use stream::{DetachedSim, SimListener, SimStream};

/// First port given to those who ask for none.
const EPHEMERAL: u16 = 49_152;

/// Time between attempts to connect: doubled each time, six times (Linux `tcp_syn_retries`).
const SYN_RETRIES: u32 = 6;

/// Address of host number `index`.
pub(crate) fn address(index: usize) -> IpAddr {
    let n = u32::try_from(index).expect("fewer hosts than addresses");
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0001 + n))
}

/// How a host takes leave of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goodbye {
    /// It does not: its power is cut.
    Silent,
    /// Its system closes them: a process has died.
    Closed,
}

/// The network of a world. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Net(Rc<Inner>);

struct Inner {
    agenda: Agenda,
    trace: Rc<Trace>,
    rng: Rng,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    hosts: Vec<NetHost>,
    links: BTreeMap<(usize, usize), LinkSetup>,
    conns: BTreeMap<u64, Conn>,
    next_conn: u64,
    next_listener: u64,
}

struct NetHost {
    name: Rc<str>,
    powered: bool,
    next_port: u16,
    listeners: BTreeMap<u64, Listening>,
}

struct Listening {
    at: SocketAddr,
    how: ListenOptions,
    /// Connections not yet accepted.
    queue: VecDeque<SimStream>,
    arrived: Rc<Notify>,
}

thread_local! {
    /// The network of this thread's world, for streams that are dropped between two cores.
    static CURRENT: RefCell<Weak<Inner>> = const { RefCell::new(Weak::new()) };
}

impl State {
    fn link(&self, from: usize, to: usize) -> LinkSetup {
        self.links.get(&(from, to)).copied().unwrap_or_default()
    }

    /// Whether what `from` sends to `to` arrives now, of a connection that was made to `port`.
    fn passes(&self, from: usize, to: usize, port: u16) -> bool {
        let link = self.link(from, to);
        let barred = link.cut || link.cut_port == Some(port);
        self.hosts[to].powered && (from == to || !barred)
    }
}

impl Net {
    pub(crate) fn new(seed: u64, agenda: Agenda, trace: Rc<Trace>) -> Self {
        let rng = Rng::new(seed, "network");
        let inner = Rc::new(Inner { agenda, trace, rng, state: RefCell::default() });
        CURRENT.set(Rc::downgrade(&inner));
        Self(inner)
    }

    pub(crate) fn add_host(&self, name: &Rc<str>) {
        self.0.state.borrow_mut().hosts.push(NetHost {
            name: Rc::clone(name),
            powered: false,
            next_port: EPHEMERAL,
            listeners: BTreeMap::new(),
        });
    }

    fn event(&self, what: &'static str, host: usize, numbers: &[u64]) {
        let name = Rc::clone(&self.0.state.borrow().hosts[host].name);
        self.0.trace.event(self.0.agenda.now(), what, &name, numbers);
    }

    /// Changes one direction of a link; what waited for that goes on its way.
    pub(crate) fn set_link(&self, from: usize, to: usize, change: impl FnOnce(&mut LinkSetup)) {
        let mut state = self.0.state.borrow_mut();
        let mut link = state.link(from, to);
        change(&mut link);
        state.links.insert((from, to), link);
        drop(state);
        let cut = u64::from(link.cut_port.unwrap_or_default()) << 1 | u64::from(link.cut);
        self.event("link", from, &[to as u64, cut]);
        self.wake_pipes();
    }

    pub(crate) fn host_up(&self, host: usize) {
        self.0.state.borrow_mut().hosts[host].powered = true;
        self.wake_pipes();
    }

    /// The software of a host is gone.
    pub(crate) fn host_down(&self, host: usize, goodbye: Goodbye) {
        let listeners = {
            let mut state = self.0.state.borrow_mut();
            let h = &mut state.hosts[host];
            h.powered = goodbye == Goodbye::Closed;
            std::mem::take(&mut h.listeners)
        };
        match goodbye {
            Goodbye::Silent => self.vanish(host),
            Goodbye::Closed => self.close_all(host),
        }
        // Their streams belong to connections that are gone by now.
        drop(listeners);
    }

    pub(crate) fn listen(
        &self,
        host: &HostState,
        boot: &Rc<Boot>,
        at: SocketAddr,
        how: ListenOptions,
    ) -> io::Result<SimListener> {
        let mut state = self.0.state.borrow_mut();
        if !(at.ip().is_unspecified() || at.ip().is_loopback() || at.ip() == host.address) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let id = state.next_listener;
        state.next_listener += 1;
        let h = &mut state.hosts[host.index];
        let port = if at.port() == 0 { h.free_port() } else { at.port() };
        let at = SocketAddr::new(at.ip(), port);
        let clash = |l: &Listening| l.covers(at) && !(l.how.reuse_port && how.reuse_port);
        if h.listeners.values().any(clash) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let arrived = Rc::new(Notify::new());
        let queue = VecDeque::new();
        h.listeners.insert(id, Listening { at, how, queue, arrived: Rc::clone(&arrived) });
        drop(state);
        self.event("listen", host.index, &[u64::from(port)]);
        Ok(SimListener::new(self.clone(), host.index, id, at, arrived, Rc::clone(boot)))
    }

    /// Takes down a listener; connections that nobody accepted are reset.
    fn unlisten(&self, host: usize, id: u64) {
        let gone = self.0.state.borrow_mut().hosts[host].listeners.remove(&id);
        drop(gone);
    }

    fn take_arrived(&self, host: usize, id: u64) -> Option<SimStream> {
        let mut state = self.0.state.borrow_mut();
        state.hosts[host].listeners.get_mut(&id)?.queue.pop_front()
    }

    pub(crate) async fn dial(
        &self,
        host: &HostState,
        boot: &Rc<Boot>,
        to: SocketAddr,
    ) -> io::Result<SimStream> {
        let from = host.index;
        let target = if to.ip().is_loopback() { Some(from) } else { self.host_at(to.ip()) };
        self.event("dial", from, &[u64::from(to.port())]);
        let Some(target) = target else {
            tokio::time::sleep(Duration::from_secs(3)).await;
            return Err(io::ErrorKind::HostUnreachable.into());
        };
        for attempt in 0..=SYN_RETRIES {
            tokio::time::sleep(self.delay(from, target)).await;
            match self.knock(host, boot, target, to) {
                Knock::Accepted(stream) => {
                    tokio::time::sleep(self.delay(target, from)).await;
                    return Ok(stream);
                }
                Knock::Refused => {
                    tokio::time::sleep(self.delay(target, from)).await;
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                Knock::Unanswered => tokio::time::sleep(Duration::from_secs(1 << attempt)).await,
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn host_at(&self, ip: IpAddr) -> Option<usize> {
        (0..self.0.state.borrow().hosts.len()).find(|&i| address(i) == ip)
    }

    /// A delay of the link, for one segment.
    fn delay(&self, from: usize, to: usize) -> Duration {
        let link = self.0.state.borrow().link(from, to);
        link.delay(from == to, &self.0.rng)
    }

    /// One SYN arrives, or does not.
    fn knock(&self, host: &HostState, boot: &Rc<Boot>, target: usize, to: SocketAddr) -> Knock {
        let from = host.index;
        let mut state = self.0.state.borrow_mut();
        let port = to.port();
        if !(state.passes(from, target, port) && state.passes(target, from, port)) {
            return Knock::Unanswered;
        }
        let listening: Vec<u64> = state.hosts[target]
            .listeners
            .iter()
            .filter(|(_, l)| l.covers(to))
            .map(|(&id, _)| id)
            .collect();
        if listening.is_empty() {
            return Knock::Refused;
        }
        let id = *self.0.rng.pick(&listening);
        let l = &state.hosts[target].listeners[&id];
        if l.queue.len() >= l.how.backlog as usize {
            return Knock::Unanswered;
        }
        let port = state.hosts[from].free_port();
        let local_ip = if to.ip().is_loopback() { to.ip() } else { host.address };
        let local = SocketAddr::new(local_ip, port);
        let number = state.next_conn;
        state.next_conn += 1;
        let ends = [End::new(from, local), End::new(target, to)];
        state.conns.insert(number, Conn::new(ends));
        let ours = SimStream::new(self.clone(), number, 0, local, to, Rc::clone(boot));
        let listening = state.hosts[target].listeners.get_mut(&id).expect("chosen above");
        // Whoever accepts it puts its own boot in.
        let theirs = SimStream::new(self.clone(), number, 1, to, local, Rc::clone(boot));
        listening.queue.push_back(theirs);
        listening.arrived.notify_one();
        drop(state);
        self.event("connected", from, &[number, target as u64]);
        Knock::Accepted(ours)
    }
}

enum Knock {
    Accepted(SimStream),
    Refused,
    Unanswered,
}

impl NetHost {
    fn free_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = if port == u16::MAX { EPHEMERAL } else { port + 1 };
        port
    }
}

impl Listening {
    /// Whether a connection to `to` comes here.
    fn covers(&self, to: SocketAddr) -> bool {
        let any = self.at.ip().is_unspecified() || to.ip().is_unspecified();
        self.at.port() == to.port() && (any || self.at.ip() == to.ip())
    }
}
