//! One replica of a mirrored volume: what all parts of the mirror on this node share.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use block::{ASIDE, Account, Aside, Blocks, Class, Ctx, Epoch, Error, RangeLocks};
use intent_log::{FlushStamp, Region, Touch};
use peer::{Incarnation, Lineage, Link, Message, NodeId, Role, Stamp, View};
use rt::Core;
use smallvec::SmallVec;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::agent::Store;
use super::entries::Entries;
use super::join::{Attempts, Inheritance, Joining};
use super::joiners::Joiners;
use super::leg::Leg;
use super::member::Member;
use super::opening::{Gathered, Tidings};
use super::order::Order;
use super::own::OwnWrites;
use super::reach::{Gaps, Heard};
use super::requests::Requests;
use super::signal::Signal;
use super::space::FreeSpace;
use super::sweep::Clearing;
use super::{Mistake, Settings};

/// One replica on its core. All of the mirror's parts are methods of this, a file each.
pub(super) struct Replica {
    pub(super) me: NodeId,
    pub(super) core: Core,
    pub(super) settings: Settings,
    pub(super) account: Account,
    pub(super) leg: Leg,
    /// Who keeps something beside the volume.
    pub(super) keeper: Rc<dyn Aside>,
    /// The second table of RFD 0010, 4.1: who uses which range of the leg. The primary's is the
    /// order of all writes.
    pub(super) locks: Rc<RangeLocks>,
    pub(super) member: RefCell<Member>,
    pub(super) links: RefCell<BTreeMap<NodeId, Link>>,
    /// The view whose messages are taken: the member's, as soon as it begins.
    pub(super) view: Cell<View>,
    pub(super) entries: RefCell<Entries>,
    pub(super) own: Rc<OwnWrites>,
    pub(super) order: RefCell<Order>,
    pub(super) gathered: RefCell<Gathered>,
    pub(super) joiners: RefCell<Joiners>,
    pub(super) requests: Requests,
    /// By member: when its latest requests for a promise came, and what they were stamped with.
    pub(super) stamps: RefCell<BTreeMap<NodeId, Stamps>>,
    /// The view that has been opened last, if it was not ended since.
    pub(super) opened: Cell<Option<View>>,
    /// What is known of the present view's opening, until it is open.
    pub(super) tidings: RefCell<Option<Tidings>>,
    /// The attempt to join that is under way.
    pub(super) joining: Cell<Option<Joining>>,
    /// The last attempt that was accepted, and what the primary had reached with other images.
    pub(super) inheritance: RefCell<Option<Inheritance>>,
    /// Whose turn it is to copy, among this primary and others on its node.
    pub(super) turns: Arc<Semaphore>,
    pub(super) store: Box<dyn Store>,
    /// Tells how much space there is for more of the copy.
    pub(super) free_space: Rc<dyn FreeSpace>,
    /// When the leg last had no space for a write, by the pulse.
    pub(super) full_since: Cell<Option<Duration>>,
    /// When it was last looked, by the pulse, whether there is room again.
    pub(super) looked_for_room: Cell<Duration>,
    /// Raised when the membership machine has a new timer.
    pub(super) timer: Signal,
    /// Raised when a promise may have come.
    pub(super) promises: Signal,
    /// What was said of leases last: it is said by several ways, and answered and heard once.
    pub(super) leases: RefCell<Leases>,
    /// Whether it served when that was looked at last.
    pub(super) served: Cell<bool>,
    /// Raised when this replica should look whether it may join.
    pub(super) joins: Signal,
    pub(super) join_wanted: Cell<bool>,
    /// When it may ask again.
    pub(super) attempts: Cell<Attempts>,
    /// How long this process has been awake since it began, in large steps: what hangs is measured by
    /// it.
    pub(super) pulse: Cell<Duration>,
    /// When the present view was begun here, by the pulse.
    pub(super) began: Cell<Duration>,
    /// Since when, by the pulse, there has been no session with a node.
    pub(super) lost: RefCell<BTreeMap<NodeId, Duration>>,
    /// What was last heard of each other replica.
    pub(super) heard: RefCell<BTreeMap<NodeId, Heard>>,
    /// At the primary: which members do not reach each other.
    pub(super) gaps: RefCell<Gaps>,
    /// At the primary: what other members have marked, in bytes.
    pub(super) reported: RefCell<Vec<(u64, u64)>>,
    /// The last lineage that this primary has had recorded.
    pub(super) lineage: Cell<Lineage>,
    /// What is to be cleared here with the next lineage.
    pub(super) clearing: RefCell<Option<Clearing>>,
    /// Replicas whose join is not accepted: their copies are newer than this one.
    pub(super) newer: RefCell<BTreeSet<NodeId>>,
    /// Counts the puts of records that were sent.
    pub(super) puts: Cell<u64>,
    /// The latest attempt that each replica outside has asked for.
    pub(super) asked_to_join: RefCell<BTreeMap<NodeId, Incarnation>>,
    /// Other ways for leases.
    pub(super) paths: RefCell<Option<Paths>>,
    /// Whether clients' commands wait while this replica does not serve.
    pub(super) holds: Cell<bool>,
    /// Whether it asks to be brought in sync while it is outside.
    pub(super) may_join: Cell<bool>,
    /// When it last asked the store because it does not serve, by the pulse.
    pub(super) asked: Cell<Duration>,
    /// Counts the wishes to leave that could not be granted.
    pub(super) stayed: Cell<u64>,
    /// When the oldest question was asked that the store has not answered since.
    pub(super) unanswered: Cell<Option<Duration>>,
    pub(super) closed: Cell<bool>,
    /// What the leg has refused since a view was open here.
    pub(super) refused: Cell<Option<Error>>,
    /// Raised when the view, the role, the lease or a link changes.
    pub(super) signal: Signal,
}

/// Some nodes of a volume: three at most have it.
pub(super) type Nodes = SmallVec<[NodeId; 4]>;

/// The connections to a node on which leases travel beside its session.
pub(super) type Paths = Box<dyn Fn(NodeId) -> Vec<Link>>;

/// When the latest requests of one member came.
#[derive(Debug, Default)]
pub(super) struct Stamps {
    /// Whose stamps these are: another one's clock may have begun anew.
    of: Incarnation,
    latest: [(Stamp, Duration); 8],
    count: usize,
}

impl Stamps {
    /// A request with this stamp has come.
    pub(super) fn note(&mut self, of: Incarnation, stamp: Stamp, now: Duration) {
        if self.of != of {
            *self = Self { of, ..Self::default() };
        }
        // The same request comes by several ways; one that comes late is no newer for that.
        if self.latest.iter().any(|(s, _)| *s >= stamp) {
            return;
        }
        self.latest[self.count % 8] = (stamp, now);
        self.count += 1;
    }

    /// Whether what bears `stamp` was sent less than `lease` ago, as far as can be told.
    pub(super) fn is_fresh(&self, stamp: Stamp, now: Duration, lease: Duration) -> bool {
        self.latest.iter().any(|(s, came)| *s == stamp && now < *came + lease)
    }
}

/// What was said of leases last, from each and to each node.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// The requests that were answered here.
    answered: BTreeMap<NodeId, Asked>,
    /// The promises that have come.
    promised: BTreeMap<NodeId, Asked>,
}

/// A request for a promise: in which epoch, of whom, when.
type Asked = (Epoch, Incarnation, Stamp);

impl Leases {
    /// Whether the same has come by another way: the request was answered, by all ways, and the promise
    /// has been heard.
    pub(super) fn is_known(&self, from: NodeId, message: &Message) -> bool {
        match *message {
            Message::Renew { epoch, incarnation, stamp } => {
                self.answered.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            Message::Promise { epoch, incarnation, stamp } => {
                self.promised.get(&from) == Some(&(epoch, incarnation, stamp))
            }
            _ => false,
        }
    }

    /// This was heard from `node`.
    pub(super) fn hear(&mut self, node: NodeId, message: &Message) {
        if let Message::Promise { epoch, incarnation, stamp } = *message {
            self.promised.insert(node, (epoch, incarnation, stamp));
        }
    }

    /// This is said to `node`.
    pub(super) fn say(&mut self, node: NodeId, message: &Message) {
        if let Message::Promise { epoch, incarnation, stamp } = *message {
            self.answered.insert(node, (epoch, incarnation, stamp));
        }
    }
}

/// Whether the range lies beside the volume.
pub(super) fn is_aside(range: Blocks) -> bool {
    range.at >= ASIDE
}

impl Replica {
    /// The bytes of the volume that the range is marked by: its own. What lies beside the volume goes with
    /// its first block.
    pub(super) fn bytes(&self, range: Blocks) -> Range<u64> {
        let block = u64::from(self.leg.dev.info().block_size);
        if is_aside(range) {
            return 0..block;
        }
        let end = range.at.0.saturating_add(range.count);
        range.at.0.saturating_mul(block)..end.saturating_mul(block)
    }

    /// Length of the range in bytes.
    pub(super) fn len(&self, range: Blocks) -> usize {
        let block = u64::from(self.leg.dev.info().block_size);
        usize::try_from(range.count.saturating_mul(block)).unwrap_or(usize::MAX)
    }

    /// Whether the range lies in the volume or beside it.
    pub(super) fn is_inside(&self, range: Blocks) -> bool {
        self.leg.dev.info().has(range)
    }

    /// What lies beside the volume, if anything does.
    pub(super) fn aside(&self) -> Option<Blocks> {
        let blocks = self.leg.dev.info().aside_blocks;
        (blocks > 0).then(|| Blocks::new(ASIDE, u64::from(blocks)))
    }

    /// The link to `node`, while there is a session.
    pub(super) fn link(&self, node: NodeId) -> Option<Link> {
        self.links.borrow().get(&node).filter(|link| !link.is_closed()).cloned()
    }

    /// The link to the primary, while there is a session.
    pub(super) fn primary_link(&self) -> Option<Link> {
        self.link(self.primary()?)
    }

    /// The links to those of `nodes` that there is a session with.
    pub(super) fn links_to(
        &self,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> impl Iterator<Item = Link> {
        nodes.into_iter().filter_map(|node| self.link(node))
    }

    /// The members but this one.
    pub(super) fn others(&self) -> Nodes {
        let member = self.member.borrow();
        member.record().into_iter().flat_map(|r| r.others(self.me)).map(|m| m.node).collect()
    }

    /// Who puts writes in order.
    pub(super) fn primary(&self) -> Option<NodeId> {
        self.member.borrow().primary()
    }

    /// Whether this is the primary of the present view.
    pub(super) fn is_primary(&self) -> bool {
        self.member.borrow().is_primary()
    }

    /// Whether this replica is known not to be a member.
    pub(super) fn is_outside(&self) -> bool {
        matches!(self.member.borrow().role(), Role::Outside | Role::Returned)
    }

    /// The replicas that are no members.
    pub(super) fn outsiders(&self) -> Vec<NodeId> {
        let member = self.member.borrow();
        let Some(record) = member.record() else { return Vec::new() };
        let nodes = record.replicas.iter().map(|r| r.node);
        nodes.filter(|node| record.member(*node).is_none()).collect()
    }

    /// The image on `node`.
    pub(super) fn image(&self, node: NodeId) -> Option<Uuid> {
        self.member.borrow().record().and_then(|r| r.image(node))
    }

    /// Whether what happens in the present view waits for `node`.
    pub(super) fn is_required(&self, node: NodeId) -> bool {
        self.others().contains(&node) || self.joiners.borrow().of(node).is_some()
    }

    /// Largest operation with data, in bytes.
    pub(super) fn max_transfer(&self) -> usize {
        let info = self.leg.dev.info();
        info.max_transfer_blocks as usize * info.block_size as usize
    }

    /// Where regions lie, each first byte and length, as messages name them.
    pub(super) fn extents(&self, regions: &[Region]) -> Vec<(u64, u64)> {
        let geometry = self.leg.log.geometry();
        let bytes = regions.iter().filter_map(|r| geometry.bytes_of(*r));
        bytes.map(|b| (b.start, b.end - b.start)).collect()
    }

    /// Those of `regions` in which nothing has been in use since that flush began.
    pub(super) fn quiet(&self, mut regions: Vec<Region>, flush: FlushStamp) -> Vec<Region> {
        regions.retain(|r| self.leg.log.is_quiet_since(*r, flush));
        regions
    }

    /// The use of a range's regions begins.
    pub(super) fn touch(&self, range: Blocks) -> Touch {
        self.leg.log.begin(self.bytes(range))
    }

    /// The latest request for a promise that `node` has answered.
    pub(super) fn answered(&self, node: NodeId) -> Stamp {
        self.member.borrow().answered(node).unwrap_or_default()
    }

    /// Waits until the primary has answered another request for a promise, or `view` is over.
    pub(super) async fn renewed(&self, view: View) {
        let answered = || self.primary().map(|p| self.answered(p));
        let before = answered();
        let renewed = self.promises.until(|| (answered() != before).then_some(()));
        self.signal.unless(|| self.view.get() != view, renewed).await;
    }

    /// The present view, if this member serves in it now.
    pub(super) fn serves(&self) -> Option<View> {
        let serves = self.serves_now();
        self.served.set(serves.is_some());
        serves
    }

    fn serves_now(&self) -> Option<View> {
        let member = self.member.borrow();
        let view = member.view().filter(|view| *view == self.view.get() && !self.closed.get())?;
        let leases = member.serves(self.core.now()) || self.settings.makes(Mistake::IgnoresLease);
        (self.opened.get() == Some(view) && leases).then_some(view)
    }

    /// Waits until this member serves (RFD 0010, 4.9).
    ///
    /// # Errors
    /// [`Error::Fenced`] when it is outside, turns clients away, or after [`Settings::hold`];
    /// [`Error::Aborted`].
    pub(super) async fn serving(&self, ctx: &Ctx) -> Result<View, Error> {
        if let Some(view) = self.serves() {
            return Ok(view);
        }
        let look = || {
            if ctx.is_aborted() {
                return Some(Err(Error::Aborted));
            }
            if self.closed.get() || self.leg.is_dead() || self.is_outside() {
                return Some(Err(Error::Fenced));
            }
            let vain = || (!self.holds.get()).then_some(Err(Error::Fenced));
            self.serves().map(Ok).or_else(vain)
        };
        let held = tokio::time::timeout(self.settings.hold, self.signal.until(look));
        Box::pin(held).await.unwrap_or(Err(Error::Fenced))
    }

    /// Whether clients are to go elsewhere instead of waiting.
    pub(super) fn turns_away(&self) -> bool {
        !self.holds.get() && self.serves().is_none()
    }

    /// Ends what clients wait for. It may happen all the same, so the sessions end as well: what is
    /// under way is settled in the next view, and nobody asks for it again. One that is outside has
    /// done so already, and needs its sessions to join.
    pub(super) fn turn_away(&self) {
        if self.serves().is_none() {
            self.end_sessions();
        }
    }

    fn end_sessions(&self) {
        if !self.is_outside() {
            self.links.borrow().values().for_each(Link::close);
            self.own.fence();
            self.order.borrow_mut().abandon();
            self.signal.raise();
        }
    }

    /// What holds a range has been given up in `view`, as clients were turned away. If that was for a moment only, as a
    /// lease has come back before anybody noticed, the view would go on, and nobody would let go of the range: the
    /// sessions end all the same.
    pub(super) fn give_up_in(&self, view: View) {
        if self.view.get() == view {
            self.end_sessions();
        }
    }

    /// The store was asked.
    pub(super) fn store_asked(&self) {
        self.unanswered.set(self.unanswered.get().or(Some(self.core.now())));
    }

    /// Waits for `wait`; `None` once `view` is over.
    pub(super) async fn in_view<T>(&self, view: View, wait: impl Future<Output = T>) -> Option<T> {
        self.signal.unless(|| self.view.get() != view, wait).await
    }

    /// A context with memory for `bytes` beyond what the leg needs for any operation.
    pub(super) async fn memory(&self, bytes: usize, class: Class) -> Result<Ctx, Error> {
        let bytes = bytes.saturating_add(self.leg.dev.info().overhead as usize).max(1);
        let credit = self.account.credit(bytes, class).await.map_err(|_| Error::OutOfRange)?;
        Ok(Ctx::new(credit, self.view.get().epoch))
    }

    /// Waits so long, or until the replica is closed.
    pub(super) async fn pause(&self, time: Duration) {
        self.signal.unless(|| self.closed.get(), tokio::time::sleep(time)).await;
    }

    /// Runs `task` as far as it gets at once, which may be its end, and the rest beside everything else.
    pub(super) fn start(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        let mut task = Box::pin(task);
        // Nobody is woken for it: the task that goes on with it looks again first.
        if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            tokio::task::spawn_local(task);
        }
    }

    /// Runs `task` beside everything else, to its end.
    pub(super) fn spawn(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        tokio::task::spawn_local(task);
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica")
            .field("me", &self.me)
            .field("view", &self.view.get())
            .field("opened", &self.opened.get())
            .field("entries", &self.entries.borrow().list())
            .field("own", &self.own)
            .field("order", &self.order.borrow())
            .field("requests", &self.requests)
            .field("joiners", &self.joiners.borrow())
            .field("joining", &self.joining.get())
            .field("ranges", &self.locks.len())
            .finish_non_exhaustive()
    }
}
