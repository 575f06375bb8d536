//! Sessions between the nodes: lanes that keep their order, each as late as it likes, and breaks.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::{Account, Bufs, Class, Ctx, Epoch};
use layers::mirror::Mirror;
use peer::{Change, Lane, Link, Message, NodeId, Outbox, Received};
use rt::Core;
use rt::buf::copy_in;
use rt::sim::{Rng, World};
use tokio::sync::Notify;

/// All of a world.
pub(super) struct Wires {
    world: World,
    rng: Rng,
    last: Cell<u64>,
    /// The life of each node that runs.
    lives: RefCell<BTreeMap<NodeId, Life>>,
    /// What is cut, from one node to another.
    cut: RefCell<Vec<(NodeId, NodeId)>>,
}

#[derive(Clone)]
struct Life {
    number: u64,
    mirror: Mirror,
    core: Core,
    /// The sessions that wait to be taken by the node.
    coming: Rc<RefCell<Vec<Session>>>,
    knocks: Rc<Notify>,
}

/// One end's view of a session.
#[derive(Clone)]
struct Session {
    number: u64,
    peer: NodeId,
    link: Link,
    /// What this end leaves for the other: here only for the memory it has laid ready.
    mine: Rc<Outbox>,
    /// What the other end leaves for this one.
    theirs: Rc<Outbox>,
}

impl Wires {
    pub(super) fn new(world: &World) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            rng: Rng::new(world.seed(), "wires"),
            last: Cell::new(0),
            lives: RefCell::default(),
            cut: RefCell::default(),
        })
    }

    pub(super) fn set_cut(&self, from: NodeId, to: NodeId, cut: bool) {
        self.world.note(format!("from node {from} to node {to} cut: {cut}"));
        let mut all = self.cut.borrow_mut();
        all.retain(|c| *c != (from, to));
        if cut {
            all.push((from, to));
        }
    }

    fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        self.cut.borrow().contains(&(from, to))
    }

    /// Breaks the session between two nodes, if there is one.
    pub(super) fn break_session(&self, a: NodeId, b: NodeId) {
        self.world.note(format!("the session of nodes {a} and {b} breaks"));
        let lives = self.lives.borrow();
        for (x, y) in [(a, b), (b, a)] {
            if let Some(life) = lives.get(&x) {
                life.mirror.break_link(y);
            }
        }
    }

    /// Joins a node that has begun to run with all others; everything runs on the node itself.
    pub(super) fn join(
        self: &Rc<Self>,
        node: NodeId,
        mirror: &Mirror,
        core: &Core,
        all: &[NodeId],
    ) {
        self.last.set(self.last.get() + 1);
        let life = Life {
            number: self.last.get(),
            mirror: mirror.clone(),
            core: core.clone(),
            coming: Rc::default(),
            knocks: Rc::default(),
        };
        self.lives.borrow_mut().insert(node, life.clone());
        for &peer in all.iter().filter(|&&p| p < node) {
            let (this, life) = (Rc::clone(self), life.clone());
            tokio::task::spawn_local(async move { this.dial(node, peer, life).await });
        }
        let this = Rc::clone(self);
        tokio::task::spawn_local(async move { this.accept(node, life).await });
    }

    /// The node runs no more. A killed process's connections are closed, those of a machine without
    /// power are not.
    pub(super) fn leave(&self, node: NodeId, closed: bool) {
        self.lives.borrow_mut().remove(&node);
        if closed {
            for life in self.lives.borrow().values() {
                life.mirror.break_link(node);
            }
        }
    }

    async fn pause(&self, most: Duration) {
        tokio::time::sleep(self.rng.time(Duration::ZERO, most)).await;
    }

    async fn dial(self: Rc<Self>, me: NodeId, peer: NodeId, life: Life) {
        loop {
            self.pause(Duration::from_millis(200)).await;
            let Some(other) = self.lives.borrow().get(&peer).cloned() else { continue };
            if self.is_cut(me, peer) || self.is_cut(peer, me) {
                continue;
            }
            self.last.set(self.last.get() + 1);
            let number = self.last.get();
            let (link, mine) = Link::new(peer, number);
            let (far_link, theirs) = Link::new(me, number);
            let (mine, theirs) = (Rc::new(mine), Rc::new(theirs));
            let far = Session {
                number,
                peer: me,
                link: far_link,
                mine: Rc::clone(&theirs),
                theirs: Rc::clone(&mine),
            };
            other.coming.borrow_mut().push(far);
            other.knocks.notify_one();
            self.pause(Duration::from_millis(3)).await;
            let session = Session { number, peer, link, mine, theirs };
            self.serve(me, session.clone(), &life);
            self.while_it_lasts(me, &session, other.number).await;
            life.mirror.down(peer, number);
        }
    }

    /// Until one end has closed it, or it has been cut for long, or the other end is another process.
    async fn while_it_lasts(&self, me: NodeId, session: &Session, life: u64) {
        let mut cut = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let same = self.lives.borrow().get(&session.peer).is_none_or(|l| l.number == life);
            if session.link.is_closed() || session.theirs.is_closed() || !same {
                self.pause(Duration::from_millis(30)).await;
                return;
            }
            let is_cut = self.is_cut(me, session.peer) || self.is_cut(session.peer, me);
            cut = if is_cut { cut + 1 } else { 0 };
            if cut > 200 {
                return;
            }
        }
    }

    async fn accept(self: Rc<Self>, me: NodeId, life: Life) {
        loop {
            life.knocks.notified().await;
            let coming = life.coming.take();
            for session in coming {
                self.serve(me, session, &life);
            }
        }
    }

    fn serve(self: &Rc<Self>, me: NodeId, session: Session, life: &Life) {
        life.mirror.up(session.link.clone());
        for lane in [Lane::Control, Lane::Down, Lane::Up] {
            let (this, session, life) = (Rc::clone(self), session.clone(), life.clone());
            tokio::task::spawn_local(async move {
                this.carry(me, &session, lane, &life).await;
                life.mirror.down(session.peer, session.number);
            });
        }
    }

    async fn carry(&self, me: NodeId, session: &Session, lane: Lane, life: &Life) {
        let account = life.core.pool().account();
        while let Some(message) = session.theirs.next(lane).await {
            let slow = self.rng.chance(0.01);
            self.pause(Duration::from_micros(if slow { 20_000 } else { 300 })).await;
            while self.is_cut(session.peer, me) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            if session.link.is_closed() {
                return;
            }
            self.world.note(format!("{me}<-{}: {}", session.peer, brief(&message)));
            let Some(received) = take(&account, session, message).await else { return };
            life.mirror.receive(session.peer, session.number, received).await;
        }
    }
}

/// A message without its data.
fn brief(message: &Message) -> String {
    match message {
        Message::Write { view, seq, tag, copy, change } => {
            format!(
                "Write {view} {} of {}:{} copy {copy} {:?}",
                seq.0, tag.node, tag.number, change.range
            )
        }
        Message::Order { view, number, change, .. } => {
            format!("Order {view} {number} {:?}", change.range)
        }
        Message::Forward { view, number, range, .. } => {
            format!("Forward {view} {number} {range:?}")
        }
        Message::Data { view, request, result } => {
            format!("Data {view} {request} {:?}", result.as_ref().map(Bufs::len))
        }
        Message::Join { incarnation, epoch, .. } => format!("Join {incarnation:?} {epoch:?}"),
        Message::Start { view, .. } => format!("Start {view}"),
        other => format!("{other:?}"),
    }
}

/// Brings a message into this node's memory, as its connection would have done.
async fn take(account: &Account, session: &Session, mut message: Message) -> Option<Received> {
    let ctx = match &mut message {
        Message::Write { change, .. } => Some(copy(account, change, Class::Immediate).await),
        Message::Order { change, .. } => Some(copy(account, change, Class::Arriving).await),
        Message::Forward { data, .. } => {
            let ctx = memory(account, data.len(), Class::Arriving).await;
            *data = copy_in(ctx.credit(), &data.to_vec());
            Some(ctx)
        }
        Message::Data { request, result, .. } => {
            let ctx = session.mine.expected(*request)?;
            if let Ok(data) = result {
                *data = copy_in(ctx.credit(), &data.to_vec());
            }
            Some(ctx)
        }
        _ => None,
    };
    Some(Received { message, ctx })
}

async fn copy(account: &Account, change: &mut Change, class: Class) -> Ctx {
    let ctx = memory(account, change.data.len(), class).await;
    let data = change.data.to_vec();
    change.data = if data.is_empty() { Bufs::new() } else { copy_in(ctx.credit(), &data) };
    ctx
}

async fn memory(account: &Account, bytes: usize, class: Class) -> Ctx {
    let credit = account.credit(bytes + 8192, class).await.expect("pools hold any message");
    Ctx::new(credit, Epoch::default())
}
