//! The mirror: one volume on two or three nodes, served by all of them.
//!
//! Why it is as it is, and why it is right: `docs/rfd/0010-the-mirror.md`, whose sections the parts name.
//!
//! Pure modules that decide:
//! * [`record`]: who has the volume, who is in sync, who is primary (3.2);
//! * [`member`]: who serves, when, and how the record comes to change (5);
//! * [`settle`]: what a new view has to make equal (5.8);
//! * [`log`]: which regions of an image may differ from other images of the volume (6).
//!
//! And what carries it out, all methods of one [`Replica`](replica::Replica):
//! * `write`, `read`, `flush`, `compare`: what clients ask, at whichever member (4);
//! * `receive`: what other replicas say;
//! * `opening`: the beginning of a view (5.7);
//! * `space`: writes that members have no space for (RFD 0040);
//! * `resync`, `join`: bringing a replica in sync, at the primary and at the joiner (6.6);
//! * `sweep`: taking marks away (6.3); `lineage`: telling copies that were set back (RFD 0032);
//!   `verify`: comparing the members (9.5);
//! * `agent`: what the membership machine asks for, and watching what it cannot see; `reach`: members
//!   that do not reach each other.

mod agent;
mod compare;
mod entries;
mod flush;
mod join;
mod joiners;
mod leg;
mod lineage;
mod link;
pub mod member;
mod mistake;
mod opening;
mod order;
mod own;
mod reach;
mod read;
mod receive;
pub mod record;
pub mod recovery;
mod replica;
mod requests;
#[cfg(feature = "testing")]
mod rest;
mod resync;
mod settings;
pub mod settle;
mod signal;
mod space;
mod sweep;
mod verify;
mod write;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{
    Account, Aside, Blocks, Bufs, Changes, CompareAndWrite, Compared, Ctx, Dev, Epoch, Error, Info,
    Layer, Lba, Op, Settled,
};
use peer::{Change, Incarnation, Kind, Link, NodeId, View};
use rt::Core;
use tokio::sync::Semaphore;

pub use joiners::Unreadable;
pub use mistake::Mistake;
#[cfg(feature = "testing")]
pub use rest::{InFlight, Resynced};
pub use settings::Settings;
pub use space::{FreeBytes, FreeSpace};
pub use verify::{Difference, Verified};

use intent_log::{CloseError, Damage, Found, IntentLog};
use leg::Leg;
use member::{Event, Image, Member, Why};
use own::OwnWrites;
use record::{Record, Records};
use replica::Replica;

/// One replica of a mirrored volume, as a layer: what is written here is written to all members,
/// what is read here comes from the own leg.
#[derive(Clone)]
pub struct Mirror(Rc<Replica>);

/// What a mirror is made of.
#[derive(Debug)]
pub struct Parts<R> {
    /// This node.
    pub node: NodeId,
    /// The core it lives on.
    pub core: Core,
    /// What the mirror's own memory is taken from.
    pub account: Account,
    /// The member's own stack.
    pub leg: Dev,
    /// The leg's write-intent log.
    pub log: IntentLog,
    /// What was found when the log was opened.
    pub found: Found,
    /// Who keeps something beside the volume.
    pub keeper: Rc<dyn Aside>,
    /// Tells how much space there is for more of this copy.
    pub free_space: Rc<dyn FreeSpace>,
    /// Where the record is kept.
    pub records: R,
    /// How long things may take.
    pub settings: Settings,
    /// Whose permits let a primary copy to a replica outside: so many resyncs go on at once, of all mirrors
    /// that share them.
    pub turns: Arc<Semaphore>,
}

/// What a replica says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The record, if it has been read.
    pub record: Option<Record>,
    /// The view it is in.
    pub view: View,
    /// Why it does not serve; `None` if it does.
    pub why: Option<Why>,
    /// The nodes there is a session with.
    pub linked: Vec<NodeId>,
    /// Replicas that are being brought in sync from here: bytes copied, and in all.
    pub resyncs: Vec<(NodeId, u64, u64)>,
    /// What those lack that no replica can read: they wait until it is written.
    pub unreadable: Vec<(NodeId, Unreadable)>,
    /// Bytes that were copied from here to bring replicas in sync, since it was opened.
    pub resynced: u64,
    /// Regions that are marked for each other replica, and their size in bytes.
    pub marked: Vec<(NodeId, u32)>,
    /// Size of a region in bytes.
    pub region_bytes: u64,
    /// How long the store has left a question unanswered; `None` if it has answered the last one.
    pub unanswered: Option<Duration>,
    /// What its leg has refused, if it has not served since.
    pub refused: Option<Error>,
    /// Whether it has had no space for a write within the last minute, and has no room yet.
    pub full: bool,
    /// Why its leg was given up: nothing is read or written here any more before the image is opened anew.
    pub lost: Option<Loss>,
    /// Reads that its disk has failed in the last hour, or since it was opened; others have answered them, if
    /// they could.
    pub failed_reads: u64,
    /// Replicas outside whose last attempt to be brought in sync from here has failed, and why.
    pub failed_resyncs: Vec<(NodeId, &'static str)>,
    /// Replicas that are not brought in sync from here: what they have recorded shows that this image
    /// is an older copy, and theirs a newer one (RFD 0032).
    pub newer: Vec<NodeId>,
}

/// Why a leg was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The disk is gone, or has not kept what it had completed: a sync has failed.
    Failed,
    /// The disk has not answered for [`Settings::stuck`].
    Silent,
}

impl Mirror {
    /// A replica whose image and log have just been opened. It begins to act at once; must be
    /// called in a `LocalSet`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if pools of disks hold what mirrors need of the core's memory.
    pub async fn open<R: Records>(parts: Parts<R>) -> Result<Self, Error> {
        let Parts { node, core, account, leg, log, found, keeper, .. } = parts;
        let Parts { free_space, records, settings, turns, .. } = parts;
        serve_peers(&account)?;
        let image = image(&log, &found);
        let incarnation = Incarnation(core.random_u64());
        let member = Member::new(node, incarnation, settings.member, core.now(), image);
        let own = OwnWrites::new(node, core.random_u64());
        let replica = Rc::new(Replica {
            me: node,
            core,
            settings,
            account,
            leg: Leg::new(leg, log, Rc::clone(&keeper), settings),
            keeper,
            locks: Rc::default(),
            member: RefCell::new(member),
            links: RefCell::default(),
            view: Cell::default(),
            entries: RefCell::default(),
            own,
            order: RefCell::default(),
            gathered: RefCell::default(),
            joiners: RefCell::default(),
            requests: requests::Requests::default(),
            promises: signal::Signal::default(),
            asked: Cell::default(),
            leases: RefCell::default(),
            served: Cell::default(),
            stamps: RefCell::default(),
            opened: Cell::default(),
            tidings: RefCell::default(),
            joining: Cell::default(),
            inheritance: RefCell::default(),
            turns,
            store: Box::new(records),
            free_space,
            full_since: Cell::default(),
            looked_for_room: Cell::default(),
            timer: signal::Signal::default(),
            joins: signal::Signal::default(),
            join_wanted: Cell::default(),
            attempts: Cell::default(),
            pulse: Cell::default(),
            began: Cell::default(),
            lost: RefCell::default(),
            heard: RefCell::default(),
            gaps: RefCell::default(),
            reported: RefCell::default(),
            lineage: Cell::default(),
            clearing: RefCell::default(),
            newer: RefCell::default(),
            puts: Cell::default(),
            asked_to_join: RefCell::default(),
            paths: RefCell::default(),
            holds: Cell::new(true),
            may_join: Cell::new(true),
            stayed: Cell::default(),
            unanswered: Cell::default(),
            closed: Cell::default(),
            refused: Cell::default(),
            signal: signal::Signal::default(),
        });
        replica.run();
        Ok(Self(replica))
    }

    /// Where leases travel beside the sessions: the connections to a node that are up now.
    pub fn set_paths(&self, paths: impl Fn(NodeId) -> Vec<Link> + 'static) {
        self.0.paths.replace(Some(Box::new(paths)));
    }

    /// Ends the session with `node`, if there is one: its connections close, and another one may come
    /// up.
    pub fn break_link(&self, node: NodeId) {
        if let Some(link) = self.0.link(node) {
            link.close();
        }
    }

    /// Asks this member to leave: what it has begun ends, and the others go on.
    pub fn leave(&self) {
        self.0.event(Event::Leave);
    }

    /// Waits until a wish to leave has been granted or declined: whether this replica is outside.
    pub async fn has_left(&self) -> bool {
        let before = self.0.stayed.get();
        let outside = || self.0.is_outside();
        let decided = || (outside() || self.0.stayed.get() != before).then(outside);
        self.0.signal.until(decided).await
    }

    /// Whether this replica, when it is outside, asks to be brought in sync. It does unless told
    /// otherwise. One that is told so again asks at once, whatever came of earlier attempts.
    pub fn set_may_join(&self, may: bool) {
        if !self.0.may_join.replace(may) && may {
            self.0.attempts.take();
        }
        self.0.join_soon();
    }

    /// Whether what clients ask waits, for [`Settings::hold`] at most, while this replica does not
    /// serve, as it does at first. If not, clients are to go elsewhere: what they wait for ends with
    /// [`Error::Fenced`] now, and so does what they ask until it serves again.
    pub fn set_holds(&self, holds: bool) {
        if self.0.holds.replace(holds) && !holds {
            self.0.turn_away();
        }
    }

    /// Asks for `node` to put writes in order. Heeded by the primary.
    pub fn switch_to(&self, node: NodeId) {
        self.0.event(Event::Switch(node));
    }

    /// Makes this replica go on alone, whatever may be lost.
    pub fn force(&self) {
        self.0.event(Event::Force);
    }

    /// Compares all members, at the primary. Where any differ, all get the contents that the member on
    /// node `keep` has, if one is named: which of them is right is not known here.
    ///
    /// # Errors
    /// [`Error::Fenced`] if this is not the primary, or stops being it; if `keep` is no member.
    pub async fn verify(&self, keep: Option<NodeId>) -> Result<Verified, Error> {
        self.0.verify(keep).await
    }

    /// Whether it serves now.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.0.serves().is_some()
    }

    /// What it says of itself.
    #[must_use]
    pub fn status(&self) -> Status {
        let this = &self.0;
        let member = this.member.borrow();
        let now = this.core.now();
        let why = || member.waits_for(now).unwrap_or(Why::Draining);
        let others = member.record().into_iter().flat_map(|r| r.replicas.iter().copied());
        let others = others.filter(|r| r.node != this.me);
        let marked = |r: record::Replica| Some((r.node, this.leg.log.marked_count(r.image)?));
        Status {
            record: member.record().cloned(),
            view: this.view.get(),
            why: this.serves().is_none().then(why),
            linked: this.links.borrow().keys().copied().collect(),
            resyncs: this.joiners.borrow().iter().map(|(n, j)| (n, j.done, j.todo)).collect(),
            unreadable: this.joiners.borrow().unreadable(),
            resynced: this.joiners.borrow().totals().1,
            marked: others.filter_map(marked).collect(),
            region_bytes: this.leg.log.geometry().region_bytes(),
            unanswered: this.unanswered.get().map(|since| now.saturating_sub(since)),
            refused: this.refused.get(),
            full: this.is_full(),
            lost: this.leg.loss(),
            failed_reads: this.leg.failed_reads(this.pulse.get()),
            failed_resyncs: this.failed_resyncs(),
            newer: this.newer_copies(),
        }
    }

    /// Waits until [`Self::status`] may have changed.
    pub async fn changed(&self) {
        let mut looked = false;
        self.0.signal.until(|| std::mem::replace(&mut looked, true).then_some(())).await;
    }

    /// Whether its leg cannot be relied on any more: its disk may not have kept what it was given.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.leg.is_dead()
    }

    /// Ends it: no member any more from here on, whatever the record says. Its log is closed in order if
    /// nothing is in flight. Says whether its disk has kept what it was given, as far as is known.
    pub async fn close(&self) -> bool {
        self.0.closed.set(true);
        self.0.outside();
        let links = std::mem::take(&mut *self.0.links.borrow_mut());
        links.values().for_each(Link::close);
        self.0.paths.take();
        self.0.timer.raise();
        self.0.joins.raise();
        let drained = || {
            let ended = self.0.leg.is_dead() || self.0.entries.borrow().is_drained();
            ended.then_some(())
        };
        self.0.signal.until(drained).await;
        self.0.entries.borrow_mut().clear();
        let closed = self.0.leg.log.close().await;
        if let Err(error) = &closed {
            tracing::warn!(%error, "an intent log is not closed in order");
        }
        !self.is_lost() && closed != Err(CloseError::Gone)
    }

    async fn zero(
        &self,
        at: Lba,
        blocks: u32,
        unmap: bool,
        fua: bool,
        ctx: &Ctx,
    ) -> Result<(), Error> {
        let range = Blocks::new(at, u64::from(blocks));
        let change = Change { range, kind: Kind::Zero { unmap }, fua, data: Bufs::new() };
        self.0.write(change, ctx).await
    }
}

impl CompareAndWrite for Mirror {
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> Compared<'a> {
        Box::pin(self.0.compare_and_write(at, compare, write, fua, ctx))
    }

    fn changes(&self) -> Changes {
        if self.0.settings.makes(Mistake::HidesChanges) {
            return Changes::default();
        }
        // A change is committed once the leg of every member has it, so this leg as well.
        self.0.leg.dev.changes()
    }

    fn settle<'a>(&'a self, range: Blocks, ctx: &'a Ctx) -> Settled<'a> {
        Box::pin(self.0.settle_range(range, ctx))
    }
}

impl Layer for Mirror {
    fn name(&self) -> &'static str {
        "mirror"
    }

    fn info(&self) -> Info {
        let info = self.0.leg.dev.info();
        // What is freed reads as zeroes at every member, or they would differ.
        Info { native_fua: true, unmap_zeroes: true, ..info }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Read { at, blocks } => self.0.read(Blocks::new(at, u64::from(blocks)), &ctx).await,
            Op::Write { at, data, fua } => {
                let block = u64::from(self.0.leg.dev.info().block_size);
                let range = Blocks::new(at, data.len() as u64 / block);
                let change = Change { range, kind: Kind::Write, fua, data };
                self.0.write(change, &ctx).await.map(|()| Bufs::new())
            }
            Op::Zero { at, blocks, unmap, fua } => {
                self.zero(at, blocks, unmap, fua, &ctx).await.map(|()| Bufs::new())
            }
            Op::Unmap { at, blocks } => {
                self.zero(at, blocks, true, false, &ctx).await.map(|()| Bufs::new())
            }
            Op::Map { at, blocks } => {
                let run = self.0.map(Blocks::new(at, u64::from(blocks)), &ctx).await?;
                Ok(run.into_bufs(&ctx))
            }
            Op::Flush => self.0.flush(&ctx).await.map(|()| Bufs::new()),
        }
    }
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Mirror").field(&self.0).finish()
    }
}

/// Has the core's memory serve other nodes as well.
fn serve_peers(account: &Account) -> Result<(), Error> {
    account.pool().serve_peers().map_err(|full| {
        tracing::error!(
            held = full.wanted,
            most = full.pool,
            "pools of disks hold memory of this core that mirrored volumes need: raise cores.pool"
        );
        Error::OutOfRange
    })
}

/// What the image says of its past.
fn image(log: &IntentLog, found: &Found) -> Image {
    let adopted = found.adopted;
    Image {
        epoch: Epoch(adopted.map_or(0, |a| a.epoch)),
        config: adopted.map_or(0, |a| a.config.as_u128()),
        clean: found.damage == Damage::None && log.is_clean(&log.images()),
        same_boot: found.same_boot,
        lineage: log.lineage(),
        lost: log.was_lost(),
    }
}
