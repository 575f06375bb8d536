//! Sessions between replicas in simulated worlds (RFD 0010, 8.1).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use block::{Account, Blocks, Bufs, Ctx, Epoch, Lba, MemoryClass};
use peer::frame::HandshakeRefusal;
use peer::{
    ClockStamp, Endpoint, Incarnation, IncomingConnection, Lane, Link, Message, NO_SESSION, NodeId,
    PeerAddresses, PeerIdentity, PeerSecret, ReceivedMessage, Seq, SessionHandler, Tls, View,
    WriteId, WriteKind, WriteOp, accept_connections,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rt::Core;
use rt::sim::{Host, HostSetup, World, WorldSetup, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use uuid::Uuid;

const PORTS: [u16; 2] = [7001, 7002];
const BLOCK: usize = 4096;
const POOL: usize = 1 << 20;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// What a replica has received.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Heard {
    Up(NodeId, u64),
    Down(NodeId, u64),
    Got(NodeId, u64, String),
}

/// The sender's count of its session, and the next number due on each lane.
type Due = (Option<u32>, [u64; 3]);

/// A replica that accepts everything, and checks what must hold in every session.
struct Replica {
    memory: Account,
    world: World,
    heard: RefCell<Vec<Heard>>,
    links: RefCell<BTreeMap<NodeId, Link>>,
    /// Of the present session with a node.
    due: RefCell<BTreeMap<NodeId, Due>>,
    /// The sender's count in the last session with a node.
    last: RefCell<BTreeMap<NodeId, u32>>,
    /// While set, messages with payload are not accepted.
    holds: Cell<bool>,
    let_go: Notify,
    dawdles: Cell<bool>,
    kept: RefCell<Vec<ReceivedMessage>>,
    keeps: Cell<bool>,
}

impl Replica {
    fn new(core: &Core, world: &World) -> Self {
        Self {
            memory: core.buffer_pool().account(),
            world: world.clone(),
            heard: RefCell::default(),
            links: RefCell::default(),
            due: RefCell::default(),
            last: RefCell::default(),
            holds: Cell::new(false),
            let_go: Notify::new(),
            dawdles: Cell::new(false),
            kept: RefCell::default(),
            keeps: Cell::new(false),
        }
    }

    fn link(&self, node: u16) -> Option<Link> {
        self.links.borrow().get(&NodeId(node)).cloned()
    }

    fn got(&self) -> Vec<String> {
        let heard = self.heard.borrow();
        let texts = heard.iter().filter_map(|h| match h {
            Heard::Got(_, _, text) => Some(text.clone()),
            _ => None,
        });
        texts.collect()
    }

    fn fail(&self, why: String) {
        self.world.fail(why);
    }

    /// Numbered messages arrive in order, from 0 in each session, and from no older session.
    fn check(&self, node: NodeId, message: &Message) {
        let (view, number, lane) = match message {
            Message::Applied { view, seq } => (view, seq.0, Lane::Control),
            Message::Write { view, seq, .. } => (view, seq.0, Lane::Replication),
            Message::WriteRequest { view, number, .. } => (view, *number, Lane::Requests),
            _ => return,
        };
        let mut due = self.due.borrow_mut();
        let (round, next) = due.entry(node).or_default();
        if *round.get_or_insert(view.round) != view.round {
            self.fail(format!("a message of session {} in {round:?} of {node}", view.round));
        }
        if self.last.borrow().get(&node).is_some_and(|&last| view.round < last) {
            self.fail(format!("a message of the old session {} of {node}", view.round));
        }
        self.last.borrow_mut().insert(node, view.round);
        let next = &mut next[lane as usize];
        if number != *next {
            self.fail(format!("{lane:?} of {node}: {number} where {next} is due"));
        }
        *next = number + 1;
        if let Message::Write { op, .. } | Message::WriteRequest { op, .. } = message {
            let expect = vec![number as u8; op.data.len()];
            if op.data.to_vec() != expect {
                self.fail(format!("{lane:?} of {node}: contents of {number}"));
            }
        }
    }
}

fn name(message: &Message) -> String {
    match message {
        Message::Applied { seq, .. } => format!("applied {}", seq.0),
        Message::Write { seq, .. } => format!("write {}", seq.0),
        Message::WriteRequest { number, .. } => format!("order {number}"),
        Message::LeaseRequest { stamp, .. } => format!("renew {}", stamp.0),
        Message::FetchResult { request, .. } => format!("data {request}"),
        other => format!("{other:?}"),
    }
}

impl SessionHandler for Replica {
    fn session_up(&self, link: Link) {
        let (node, session) = (link.node(), link.session());
        self.heard.borrow_mut().push(Heard::Up(node, session));
        if self.links.borrow_mut().insert(node, link).is_some() {
            self.fail(format!("two sessions with {node}"));
        }
        self.due.borrow_mut().remove(&node);
    }

    fn session_down(&self, node: NodeId, session: u64) {
        self.heard.borrow_mut().push(Heard::Down(node, session));
        let link = self.links.borrow_mut().remove(&node);
        if link.is_none_or(|link| link.session() != session || !link.is_closed()) {
            self.fail(format!("session {session} with {node} is down and was not up"));
        }
    }

    async fn deliver(&self, node: NodeId, session: u64, received: ReceivedMessage) {
        let up = self.links.borrow().get(&node).map(Link::session);
        if session != NO_SESSION && up != Some(session) {
            self.fail(format!("a message of session {session} while {up:?} is up"));
        }
        self.check(node, &received.message);
        let with_data = received.ctx.is_some();
        if self.dawdles.get() && self.world.rng().below(4) == 0 {
            tokio::time::sleep(self.world.rng().duration_between(ms(0), ms(20))).await;
        }
        while with_data && self.holds.get() {
            self.let_go.notified().await;
        }
        let text = name(&received.message);
        self.heard.borrow_mut().push(Heard::Got(node, session, text));
        if self.keeps.get() {
            self.kept.borrow_mut().push(received);
        }
    }

    fn account(&self) -> &Account {
        &self.memory
    }

    fn overhead_bytes(&self) -> usize {
        BLOCK
    }
}

#[derive(Clone)]
struct Node {
    id: u16,
    host: Host,
    core: Core,
    replica: Rc<Replica>,
    endpoint: Endpoint<Replica>,
}

fn volume() -> Uuid {
    Uuid::from_u128(0x77)
}

fn identity(id: u16) -> PeerIdentity {
    PeerIdentity::new(Uuid::from_u128(0x11), PeerSecret::new(&[9; 32]), NodeId(id), volume())
}

/// A node that listens at both ports and has no peers.
async fn node(world: &World, host: &Host, identity: PeerIdentity, ports: &'static [u16]) -> Node {
    let (id, world) = (identity.node.0, world.clone());
    let started = host.run(move |core| async move {
        let replica = Rc::new(Replica::new(&core, &world));
        let endpoint = Endpoint::new(core.clone(), identity, Rc::clone(&replica));
        for &port in ports {
            let at = SocketAddr::from(([0, 0, 0, 0], port));
            let listener = core.listen(at).await.expect("a free port");
            let (endpoint, core) = (endpoint.clone(), core.clone());
            tokio::task::spawn_local(async move {
                accept_connections(&listener, |connection| route(&core, &endpoint, connection))
                    .await;
            });
        }
        (core, replica, endpoint)
    });
    let (core, replica, endpoint) = started.join().await.expect("the host runs");
    Node { id, host: host.clone(), core, replica, endpoint }
}

/// As a node does it: the connection moves to the core of its volume, here by way of another one.
fn route(core: &Core, endpoint: &Endpoint<Replica>, connection: IncomingConnection) {
    let (core, endpoint) = (core.clone(), endpoint.clone());
    tokio::task::spawn_local(async move {
        if connection.volume() != volume() {
            return connection.refuse(HandshakeRefusal::UnknownVolume).await;
        }
        let Ok(detached) = connection.detach() else { return };
        let other = core.peers().last().expect("there is this one").clone();
        let moved = other.run(|core| async move { detached.attach(&core)?.detach() }).await;
        if let Ok(Ok(detached)) = moved
            && let Ok(connection) = detached.attach(&core)
        {
            endpoint.accept(connection);
        }
    });
}

/// The addresses of a node, by port.
fn at(ip: IpAddr, data: &[u16], heartbeat: &[u16]) -> PeerAddresses {
    let all = |ports: &[u16]| ports.iter().map(|&port| SocketAddr::new(ip, port)).collect();
    PeerAddresses { data: all(data), heartbeat: all(heartbeat) }
}

/// Adds each to the other.
async fn introduce(a: &Node, b: &Node) {
    for (one, other) in [(a, b), (b, a)] {
        let ip = other.host.address();
        let addresses = at(ip, &PORTS, &[]);
        let (endpoint, id) = (one.endpoint.clone(), NodeId(other.id));
        one.host.run(move |_| async move { endpoint.add(id, addresses) }).join().await;
    }
}

fn hosts(world: &World) -> [Host; 2] {
    let setup = || HostSetup { cores: 2, memory_bytes: POOL, ..HostSetup::default() };
    [world.add_host("one", setup()), world.add_host("two", setup())]
}

async fn until(what: &str, limit: Duration, done: impl Fn() -> bool) -> Result<(), String> {
    let waits = async {
        while !done() {
            tokio::time::sleep(ms(1)).await;
        }
    };
    tokio::time::timeout(limit, waits).await.map_err(|_| format!("waited in vain: {what}"))
}

async fn both_up(a: &Node, b: &Node) -> Result<(), String> {
    let up = || a.replica.link(b.id).is_some() && b.replica.link(a.id).is_some();
    until("both are up", Duration::from_secs(60), up).await
}

/// Stops both, and checks that nothing is left.
async fn stop(nodes: &[&Node]) -> Result<(), String> {
    for n in nodes {
        let endpoint = n.endpoint.clone();
        n.host.run(move |_| async move { endpoint.stop().await }).join().await;
        if !n.replica.links.borrow().is_empty() {
            return Err("a session outlived its end".to_owned());
        }
        n.replica.kept.take();
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    for n in nodes {
        let usage = n.core.buffer_pool().usage();
        if (usage.free, usage.waiting, usage.overdrafts) != (usage.total, 0, 0) {
            return Err(format!("node {}: {usage:?}", n.id));
        }
    }
    Ok(())
}

fn contents(number: u64, len: usize) -> Bufs {
    let pool = block::BufferPool::new(len).expect("memory");
    let credit = pool.account().try_credit(len, MemoryClass::LocalIo).expect("a fresh pool");
    rt::buf::copy_in(&credit, &vec![number as u8; len])
}

fn change(number: u64, len: usize) -> WriteOp {
    let range = Blocks::new(Lba(number), (len / BLOCK).max(1) as u64);
    WriteOp { range, kind: WriteKind::Data, fua: false, data: contents(number, len) }
}

fn write(round: u32, number: u64, len: usize) -> Message {
    let view = View { epoch: Epoch(1), round };
    let write_id = WriteId { origin: NodeId(1), number };
    Message::Write { view, seq: Seq(number), write_id, is_copy: false, op: change(number, len) }
}

fn order(round: u32, number: u64, len: usize) -> Message {
    let view = View { epoch: Epoch(1), round };
    Message::WriteRequest { view, number, stamp: ClockStamp(number), op: change(number, len) }
}

fn applied(round: u32, number: u64) -> Message {
    Message::Applied { view: View { epoch: Epoch(1), round }, seq: Seq(number) }
}

/// One numbered message on each lane.
fn send(link: &Link, round: u32, number: u64, len: usize) {
    link.send(write(round, number, len));
    link.send(order(round, number, len));
    link.send(applied(round, number));
}

fn run_scenario<Fut: Future<Output = Result<(), String>>>(
    seed: u64,
    scenario: impl FnOnce(World) -> Fut,
) {
    let outcome = run(WorldSetup::new(seed), scenario);
    if let Err(failure) = outcome.result {
        panic!("seed {seed}: {failure}");
    }
}

async fn pair(world: &World) -> Result<[Node; 2], String> {
    let [one, two] = hosts(world);
    let a = node(world, &one, identity(1), &PORTS).await;
    let b = node(world, &two, identity(2), &PORTS).await;
    introduce(&a, &b).await;
    both_up(&a, &b).await?;
    Ok([a, b])
}

#[test]
fn two_replicas_connect_and_each_lane_keeps_its_order() {
    for seed in 0..10 {
        run_scenario(seed, |world| async move {
            let [a, b] = pair(&world).await?;
            for (from, to) in [(&a, &b), (&b, &a)] {
                let link = from.replica.link(to.id).ok_or("no link")?;
                for number in 0..100 {
                    send(&link, 1, number, BLOCK * (1 + number as usize % 20));
                }
            }
            let all = || a.replica.got().len() == 300 && b.replica.got().len() == 300;
            until("all messages", Duration::from_secs(60), all).await?;
            stop(&[&a, &b]).await
        });
    }
}

/// Opens `count` connections from `host` to `to`, sends `words` on each, and holds them; replaces
/// those that end.
fn hold_many(host: &Host, to: SocketAddr, count: usize, words: Vec<u8>) {
    host.run(move |core| async move {
        let held = (0..count).map(|_| {
            let (core, words) = (core.clone(), words.clone());
            tokio::task::spawn_local(async move {
                loop {
                    if let Ok(mut stream) = core.dial(to).await {
                        let mut rest = [0; 64];
                        let _ = stream.write_all(&words).await;
                        while stream.read(&mut rest).await.is_ok_and(|n| n > 0) {}
                    }
                    tokio::time::sleep(ms(200)).await;
                }
            })
        });
        let held: Vec<_> = held.collect();
        for task in held {
            let _ = task.await;
        }
    });
}

/// A HELLO of node 1, as anyone who has seen one can replay it.
fn overheard_hello(core: &Core) -> Vec<u8> {
    let mut challenge = [0; 32];
    core.fill_random(&mut challenge);
    let purpose = peer::ConnectionPurpose::Lane(Lane::Control);
    identity(1).hello(NodeId(2), purpose, 7, challenge).to_frame()
}

/// RFD 0038, 2.5: from another machine, and from the very machine of a node.
#[test]
fn nine_hundred_idle_connections_do_not_block_a_node() {
    for (seed, from_node, says_hello) in
        [(0, false, false), (1, true, false), (2, false, true), (3, true, true)]
    {
        run_scenario(seed, |world| async move {
            let [one, two] = hosts(&world);
            let three = world.add_host(
                "three",
                HostSetup { cores: 1, memory_bytes: POOL, ..HostSetup::default() },
            );
            let b = node(&world, &two, identity(2), &PORTS).await;
            // It dials nodes with lower numbers, so the other accepts.
            let a = node(&world, &one, identity(3), &PORTS).await;
            let words = if says_hello { overheard_hello(&b.core) } else { Vec::new() };
            let attacker = if from_node { &one } else { &three };
            // The HELLO names a known node.
            let (endpoint, ip) = (b.endpoint.clone(), three.address());
            two.run(move |_| async move { endpoint.add(NodeId(1), at(ip, &PORTS, &[])) })
                .join()
                .await;
            for port in PORTS {
                hold_many(attacker, SocketAddr::new(two.address(), port), 450, words.clone());
            }
            tokio::time::sleep(Duration::from_secs(3)).await;
            introduce(&a, &b).await;
            let up = || a.replica.link(2).is_some() && b.replica.link(3).is_some();
            until("both are up", Duration::from_secs(4), up).await?;
            // And it stays up.
            tokio::time::sleep(Duration::from_secs(20)).await;
            if up() { Ok(()) } else { Err("the session is down again".to_owned()) }
        });
    }
}

/// Sends for ever in any session, counting sessions; survives them.
fn chatter(node: &Node, to: u16, rounds: Rc<Cell<u32>>) {
    let (replica, world) = (Rc::clone(&node.replica), node.replica.world.clone());
    node.host.run(move |_| async move {
        let mut now: Option<(Link, u32, u64)> = None;
        loop {
            tokio::time::sleep(world.rng().duration_between(ms(0), ms(100))).await;
            if now.as_ref().is_none_or(|(link, ..)| link.is_closed()) {
                rounds.set(rounds.get() + 1);
                now = replica.link(to).map(|link| (link, rounds.get(), 0));
            }
            let Some((link, round, number)) = &mut now else { continue };
            send(link, *round, *number, BLOCK * (1 + world.rng().index(3)));
            *number += 1;
        }
    });
}

/// RFD 0010, 8.1, and attack 41.
#[test]
fn messages_of_a_broken_session_are_never_delivered_in_the_next() {
    for seed in 0..12 {
        run_scenario(seed, |world| async move {
            let [one, two] = hosts(&world);
            for (x, y) in [(&one, &two), (&two, &one)] {
                world.set_link(x, y, |l| {
                    (l.retransmit_timeout, l.loss) = (Duration::from_secs(3), 0.02);
                });
            }
            let a = node(&world, &one, identity(1), &PORTS).await;
            let mut b = node(&world, &two, identity(2), &PORTS).await;
            introduce(&a, &b).await;
            let rounds = [Rc::new(Cell::new(0)), Rc::new(Cell::new(0))];
            chatter(&a, 2, Rc::clone(&rounds[0]));
            chatter(&b, 1, Rc::clone(&rounds[1]));
            a.replica.dawdles.set(true);
            b.replica.dawdles.set(true);
            for _ in 0..12 {
                tokio::time::sleep(world.rng().duration_between(ms(10), ms(4000))).await;
                match world.rng().below(5) {
                    0 => world.partition(&one, &two),
                    1 => world.set_link(&one, &two, |l| l.is_cut = !l.is_cut),
                    2 => world.set_link(&two, &one, |l| l.is_cut = !l.is_cut),
                    3 => {
                        let at = if world.rng().chance(0.5) { (&a, 2) } else { (&b, 1) };
                        at.0.replica.link(at.1).iter().for_each(Link::close);
                    }
                    _ => {
                        match world.rng().chance(0.5) {
                            true => two.kill(),
                            false => two.power_cut(),
                        }
                        tokio::time::sleep(world.rng().duration_between(ms(0), ms(500))).await;
                        b = node(&world, &two, identity(2), &PORTS).await;
                        introduce(&a, &b).await;
                        chatter(&b, 1, Rc::clone(&rounds[1]));
                    }
                }
                if world.rng().chance(0.5) {
                    world.heal(&one, &two);
                }
            }
            world.heal(&one, &two);
            // A session that was cut may seem alive until its sender gives up.
            tokio::time::sleep(Duration::from_secs(30)).await;
            both_up(&a, &b).await?;
            let before = a.replica.got().len();
            until("it goes on", Duration::from_secs(30), || a.replica.got().len() > before + 50)
                .await?;
            stop(&[&a, &b]).await
        });
    }
}

/// RFD 0010, 4.7 and 7.1.
#[test]
fn a_lane_that_waits_for_memory_does_not_block_the_others() {
    run_scenario(1, |world| async move {
        let [a, b] = pair(&world).await?;
        let hog = b.core.buffer_pool().account();
        b.core.buffer_pool().reserve_peer_shares().map_err(|e| e.to_string())?;
        // The share for write requests is used up; the rest has room for a write.
        let [orders, rest] = [36 * BLOCK, 40 * BLOCK];
        let orders =
            hog.try_credit(orders, MemoryClass::PeerRequest).ok_or("the share of orders")?;
        let most =
            hog.try_credit(POOL - 76 * BLOCK, MemoryClass::LocalIo).ok_or("the pool is free")?;
        let rest = hog.try_credit(rest, MemoryClass::LocalIo).ok_or("the pool is free")?;
        let link = a.replica.link(2).ok_or("no link")?;
        send(&link, 1, 0, 8 * BLOCK);
        (1..50).for_each(|number| link.send(applied(1, number)));
        until("control", Duration::from_secs(5), || b.replica.got().len() == 50).await?;
        tokio::time::sleep(Duration::from_secs(60)).await;
        if b.replica.got().iter().any(|text| !text.starts_with("applied")) {
            return Err("data came without memory".to_owned());
        }
        drop(rest);
        let got = |what: &str| b.replica.got().iter().any(|text| text == what);
        until("the write", Duration::from_secs(5), || got("write 0")).await?;
        tokio::time::sleep(Duration::from_secs(60)).await;
        if got("order 0") {
            return Err("an order got what is kept for writes".to_owned());
        }
        drop((most, orders));
        until("the order", Duration::from_secs(5), || got("order 0")).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn an_unprocessed_message_blocks_its_lane_only_and_is_dropped_with_the_session() {
    run_scenario(2, |world| async move {
        let [a, b] = pair(&world).await?;
        b.replica.holds.set(true);
        let link = a.replica.link(2).ok_or("no link")?;
        (0..5).for_each(|number| send(&link, 1, number, BLOCK));
        until("control", Duration::from_secs(5), || b.replica.got().len() == 5).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        if b.replica.got().len() != 5 {
            return Err("something else was taken".to_owned());
        }
        link.close();
        until("the end", Duration::from_secs(5), || b.replica.link(1).is_none()).await?;
        b.replica.holds.set(false);
        b.replica.let_go.notify_waiters();
        both_up(&a, &b).await?;
        let link = a.replica.link(2).ok_or("no link")?;
        send(&link, 2, 0, BLOCK);
        until("the next session", Duration::from_secs(5), || b.replica.got().len() == 8).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn fetched_data_arrives_in_the_posted_memory() {
    run_scenario(3, |world| async move {
        let [a, b] = pair(&world).await?;
        a.replica.keeps.set(true);
        let answer = |request| {
            let result = Ok(contents(5, 2 * BLOCK));
            Message::FetchResult { view: View::default(), request, result }
        };
        let credit = a
            .core
            .buffer_pool()
            .account()
            .try_credit(2 * BLOCK, MemoryClass::Read)
            .ok_or("free")?;
        let here = a.replica.link(2).ok_or("no link")?;
        let _seven = here.post_receive(7, Ctx::new(credit, Epoch(3)));
        b.replica.link(1).ok_or("no link")?.send(answer(7));
        until("data", Duration::from_secs(5), || a.replica.got() == ["data 7"]).await?;
        let kept = a.replica.kept.take().pop().ok_or("nothing kept")?;
        if kept.ctx.as_ref().is_none_or(|ctx| ctx.epoch() != Epoch(3)) {
            return Err("other memory".to_owned());
        }
        drop(kept);
        b.replica.link(1).ok_or("no link")?.send(answer(8));
        until("the end", Duration::from_secs(5), || here.is_closed()).await?;
        both_up(&a, &b).await?;
        let little =
            a.core.buffer_pool().account().try_credit(BLOCK, MemoryClass::Read).ok_or("free")?;
        let here = a.replica.link(2).ok_or("no link")?;
        let _nine = here.post_receive(9, Ctx::new(little, Epoch(3)));
        b.replica.link(1).ok_or("no link")?.send(answer(9));
        until("the end", Duration::from_secs(5), || here.is_closed()).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn data_of_cancelled_fetches_is_discarded() {
    run_scenario(5, |world| async move {
        let [a, b] = pair(&world).await?;
        let free = a.core.buffer_pool().usage().free;
        let here = a.replica.link(2).ok_or("no link")?;
        for request in [7, 8] {
            let credit = a
                .core
                .buffer_pool()
                .account()
                .try_credit(2 * BLOCK, MemoryClass::Read)
                .ok_or("full")?;
            drop(here.post_receive(request, Ctx::new(credit, Epoch(3))));
        }
        if a.core.buffer_pool().usage().free != free {
            return Err("the memory is kept".to_owned());
        }
        let there = b.replica.link(1).ok_or("no link")?;
        let view = View::default();
        there.send(Message::FetchResult { view, request: 7, result: Ok(contents(5, 2 * BLOCK)) });
        there.send(Message::FetchResult { view, request: 8, result: Err(block::Error::Fenced) });
        let credit = a
            .core
            .buffer_pool()
            .account()
            .try_credit(2 * BLOCK, MemoryClass::Read)
            .ok_or("full")?;
        let _nine = here.post_receive(9, Ctx::new(credit, Epoch(3)));
        there.send(Message::FetchResult { view, request: 9, result: Ok(contents(5, 2 * BLOCK)) });
        until("data", Duration::from_secs(5), || a.replica.got() == ["data 9"]).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn only_lease_messages_use_every_address() {
    run_scenario(4, |world| async move {
        let [a, b] = pair(&world).await?;
        let paths = |n: &Node, of: u16| n.endpoint.lease_paths(NodeId(of));
        let two = || paths(&a, 2).len() == 2 && paths(&b, 1).len() == 2;
        until("paths", Duration::from_secs(5), two).await?;
        for (from, to) in [(&a, &b), (&b, &a)] {
            for (stamp, path) in paths(from, to.id).into_iter().enumerate() {
                let (epoch, incarnation) = (Epoch(1), Incarnation(2));
                path.send(Message::LeaseRequest {
                    epoch,
                    incarnation,
                    stamp: ClockStamp(stamp as u64),
                });
            }
        }
        let heard = |n: &Node, of| {
            let heard = n.replica.heard.borrow();
            let on_path = |text: &str| Heard::Got(NodeId(of), NO_SESSION, text.to_owned());
            ["renew 0", "renew 1"].iter().all(|text| heard.contains(&on_path(text)))
        };
        let both = || heard(&a, 2) && heard(&b, 1);
        until("leases", Duration::from_secs(5), both).await?;
        let misused = paths(&a, 2).pop().ok_or("no path")?;
        misused.send(applied(1, 0));
        until("its end", Duration::from_secs(5), || misused.is_closed()).await?;
        until("another", Duration::from_secs(5), two).await?;
        if a.replica.link(2).is_none_or(|link| link.session() != 1) {
            return Err("the session ended with a lease connection".to_owned());
        }
        stop(&[&a, &b]).await
    });
}

/// A node that is reachable for leases only gets no session.
#[test]
fn sessions_go_to_addresses_for_data_alone() {
    run_scenario(8, |world| async move {
        let [one, two] = hosts(&world);
        let a = node(&world, &one, identity(1), &PORTS).await;
        let b = node(&world, &two, identity(2), &[]).await;
        let meet = async |data: &[u16], heartbeat: &[u16]| {
            let (dials, accepts) = (b.endpoint.clone(), a.endpoint.clone());
            let to = at(one.address(), data, heartbeat);
            let nowhere = PeerAddresses::default();
            one.run(move |_| async move { accepts.add(NodeId(2), nowhere) }).join().await;
            two.run(move |_| async move { dials.add(NodeId(1), to) }).join().await;
        };
        let paths = |n| b.endpoint.lease_paths(NodeId(1)).len() == n;
        meet(&[], &PORTS).await;
        until("paths", Duration::from_secs(5), || paths(2)).await?;
        tokio::time::sleep(Duration::from_secs(10)).await;
        if b.replica.link(1).is_some() {
            return Err("a session at an address for leases".to_owned());
        }
        let dialler = b.endpoint.clone();
        two.run(move |_| async move { dialler.remove(NodeId(1)).await }).join().await;
        meet(&PORTS[..1], &PORTS[1..]).await;
        both_up(&a, &b).await?;
        until("paths", Duration::from_secs(5), || paths(2)).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn the_next_address_is_tried() {
    run_scenario(5, |world| async move {
        let [one, two] = hosts(&world);
        let a = node(&world, &one, identity(1), &PORTS[1..]).await;
        let b = node(&world, &two, identity(2), &PORTS).await;
        introduce(&a, &b).await;
        both_up(&a, &b).await?;
        stop(&[&a, &b]).await
    });
}

/// RFD 0010, 8.2.
#[test]
fn unauthorised_peers_are_refused() {
    let strangers: [fn(&mut PeerIdentity); 4] = [
        |id| id.secret = PeerSecret::new(&[8; 32]),
        |id| id.cluster = Uuid::from_u128(0x12),
        |id| id.volume = Uuid::from_u128(0x78),
        |id| id.versions = (2, 3),
    ];
    for (seed, stranger) in (0..).zip(strangers) {
        run_scenario(seed, move |world| async move {
            let [one, two] = hosts(&world);
            let mut other = identity(2);
            stranger(&mut other);
            let a = node(&world, &one, identity(1), &PORTS).await;
            let b = node(&world, &two, other, &PORTS).await;
            introduce(&a, &b).await;
            tokio::time::sleep(Duration::from_secs(30)).await;
            for n in [&a, &b] {
                if !n.replica.heard.borrow().is_empty() {
                    return Err(format!("{:?}", n.replica.heard.borrow()));
                }
            }
            stop(&[&a, &b]).await
        });
    }
}

#[test]
fn a_node_gets_a_session_once_it_is_known() {
    run_scenario(6, |world| async move {
        let [one, two] = hosts(&world);
        let a = node(&world, &one, identity(1), &PORTS).await;
        let b = node(&world, &two, identity(2), &PORTS).await;
        let at = at(one.address(), &PORTS[..1], &[]);
        let dialler = b.endpoint.clone();
        two.run(move |_| async move { dialler.add(NodeId(1), at) }).join().await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        if b.replica.link(1).is_some() {
            return Err("a stranger came in".to_owned());
        }
        let acceptor = a.endpoint.clone();
        let nowhere = PeerAddresses::default();
        one.run(move |_| async move { acceptor.add(NodeId(2), nowhere) }).join().await;
        both_up(&a, &b).await?;
        stop(&[&a, &b]).await
    });
}

/// The certificates of a cluster.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    roots: rustls::RootCertStore,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let root = params.self_signed(&key).expect("a certificate");
        let mut roots = rustls::RootCertStore::empty();
        roots.add(root.der().clone()).expect("an authority");
        Self { issuer: Issuer::new(params, key), roots }
    }

    /// The replica of `node`, with a certificate for the address of `host`.
    fn identity(&self, node: u16, host: &Host) -> PeerIdentity {
        let identity = identity(node);
        let names = vec![host.address().to_string()];
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(names).expect("a name");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        let key = rustls::pki_types::PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let tls = Tls::new(self.roots.clone(), vec![cert.der().clone()], key);
        PeerIdentity { tls: Some(tls.expect("they fit")), ..identity }
    }
}

#[test]
fn a_session_works_over_tls() {
    run_scenario(7, |world| async move {
        let authority = Authority::new();
        let [one, two] = hosts(&world);
        let a = node(&world, &one, authority.identity(1, &one), &PORTS).await;
        let b = node(&world, &two, authority.identity(2, &two), &PORTS).await;
        introduce(&a, &b).await;
        both_up(&a, &b).await?;
        for (from, to) in [(&a, &b), (&b, &a)] {
            let link = from.replica.link(to.id).ok_or("no link")?;
            (0..50).for_each(|number| send(&link, 1, number, BLOCK * (1 + number as usize % 20)));
        }
        let all = || a.replica.got().len() == 150 && b.replica.got().len() == 150;
        until("all messages", Duration::from_secs(60), all).await?;
        stop(&[&a, &b]).await
    });
}

#[test]
fn wrong_or_missing_certificates_are_refused() {
    for case in 0..5 {
        run_scenario(case, |world| async move {
            let (ours, other) = (Authority::new(), Authority::new());
            let hosts = hosts(&world);
            let [first, second] = &hosts;
            let (one, two) = match case {
                0 => (ours.identity(1, second), ours.identity(2, second)),
                1 => (other.identity(1, first), ours.identity(2, second)),
                2 => (ours.identity(1, first), other.identity(2, second)),
                3 => (ours.identity(1, first), identity(2)),
                _ => (identity(1), ours.identity(2, second)),
            };
            let a = node(&world, &hosts[0], one, &PORTS).await;
            let b = node(&world, &hosts[1], two, &PORTS).await;
            introduce(&a, &b).await;
            tokio::time::sleep(Duration::from_secs(20)).await;
            if a.replica.link(2).is_some() || b.replica.link(1).is_some() {
                return Err("it came in".to_owned());
            }
            stop(&[&a, &b]).await
        });
    }
}
