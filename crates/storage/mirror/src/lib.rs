//! The mirror: one volume on two or three nodes, served by all of them.
//!
//! The design and its proof: `docs/rfd/0010-the-mirror.md`; the modules name its sections.
//!
//! Pure modules that decide:
//! * [`config`]: which nodes have replicas, which are in sync, which is primary (3.2);
//! * [`membership`]: which replica serves, when, and how the configuration changes (5);
//! * [`reconcile`]: what a new view has to make equal (5.8);
//! * [`intent_log`]: which regions of an image may differ from other images of the volume (6).
//!
//! [`ReplicaState`](state::ReplicaState) is what a replica knows, and decides what happens next:
//! its methods change it and return effects (RFD 0041). A [`Replica`](replica::Replica) has it,
//! carries the effects out, and runs what takes time:
//! * `write`, `read`, `flush`, `compare_and_write`: client commands, at any member (4);
//! * `receive`: messages of other replicas;
//! * `view_change`: draining the leg and copying in a view change (5.7, 5.8);
//! * `no_space`: writes for which members have no space (RFD 0040);
//! * `resync`, `join`: bringing a replica in sync, at the primary and at the joiner (6.6);
//! * `bitmap_clearing`: clearing dirty bits (6.3); `generations`: recognising rolled-back copies
//!   (RFD 0032); `verify`: comparing the members (9.5);
//! * `membership_driver`: what the membership asks of the store, and watching what it cannot see.

mod bitmap_clearing;
mod compare_and_write;
pub mod config;
mod flush;
mod free_space;
mod generations;
#[cfg(feature = "testing")]
mod in_flight;
mod join;
mod leg;
pub mod membership;
mod membership_driver;
mod mistake;
mod no_space;
mod peer_requests;
mod read;
mod receive;
pub mod reconcile;
pub mod recovery;
mod replica;
mod resync;
mod session_handler;
mod sessions;
mod settings;
mod signal;
mod state;
mod verify;
mod view_change;
mod write;
mod zeroes;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{
    Account, Blocks, Bufs, ChangeTracker, CommitFuture, CompareAndWriteFuture, Ctx, Dev, Epoch,
    Error, Info, Layer, Lba, MetadataObserver, Op, ReplicatedDevice,
};
use peer::{Incarnation, Link, NodeId, View, WriteKind, WriteOp};
use rt::Core;
use tokio::sync::Semaphore;

pub use free_space::{FreeBytesFuture, FreeSpace};
#[cfg(feature = "testing")]
pub use in_flight::{InFlightCounts, ResyncTotals};
pub use mistake::Mistake;
pub use settings::MirrorSettings;
pub use state::joiners::UnreadableData;
pub use verify::{VerifyMismatch, VerifyReport};

use config::{ConfigStore, MirrorConfig};
use intent_log::{CloseError, IntentLog, LogDamage, LogOpenReport};
use leg::Leg;
use membership::{Event, ImageSummary, MirrorMembership, NotServingReason};
use replica::Replica;
use state::join_backoff::JoinBackoff;
use state::local_writes::LocalWrites;
use state::{ReplicaImage, ReplicaState};

/// One replica of a mirrored volume, as a layer. A write here goes to all members; a read is served
/// from the local leg.
#[derive(Clone)]
pub struct Mirror(Rc<Replica>);

/// The parts of which a mirror is made.
#[derive(Debug)]
pub struct MirrorParts<R> {
    /// This node.
    pub node: NodeId,
    /// The core it runs on.
    pub core: Core,
    /// Accounts for the memory of the mirror itself.
    pub account: Account,
    /// The local device stack.
    pub leg: Dev,
    /// The leg's write-intent log.
    pub log: IntentLog,
    /// What was found when the log was opened.
    pub log_report: LogOpenReport,
    /// Is told of changes of the metadata blocks.
    pub metadata_observer: Rc<dyn MetadataObserver>,
    /// Tells how much space is free for this replica.
    pub free_space: Rc<dyn FreeSpace>,
    /// Where the configuration is stored.
    pub config_store: R,
    /// Time limits.
    pub settings: MirrorSettings,
    /// Permits to resync a replica. Mirrors that share them run at most that many resyncs at once.
    pub resync_permits: Arc<Semaphore>,
}

/// The state of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorStatus {
    /// The configuration, if it has been read.
    pub config: Option<MirrorConfig>,
    /// The view it is in.
    pub view: View,
    /// Why it does not serve; `None` if it does.
    pub not_serving: Option<NotServingReason>,
    /// The nodes with which there is a session.
    pub linked: Vec<NodeId>,
    /// Replicas that this primary is resyncing: bytes copied, bytes in total.
    pub resyncs: Vec<(NodeId, u64, u64)>,
    /// Data that these lack and no replica can read; they wait until it is rewritten.
    pub unreadable_data: Vec<(NodeId, UnreadableData)>,
    /// Bytes copied from here to resync replicas since it was opened.
    pub resynced_bytes: u64,
    /// Dirty regions for each other replica.
    pub dirty_regions: Vec<(NodeId, u32)>,
    /// Size of a region in bytes.
    pub region_bytes: u64,
    /// How long the store has not answered; `None` if it answered the last request.
    pub store_silent_for: Option<Duration>,
    /// The last error of the leg, if no view has been active since.
    pub leg_error: Option<Error>,
    /// Whether the leg lacked space for a write within the last minute, and still does.
    pub is_full: bool,
    /// Why the leg was given up. No reads or writes here until the image is opened again.
    pub leg_loss: Option<LegLoss>,
    /// Reads that the disk failed in the last hour, or since it was opened. Other members answered
    /// them where they could.
    pub read_errors: u64,
    /// Out-of-sync replicas whose last resync from here failed, and why.
    pub failed_resyncs: Vec<(NodeId, &'static str)>,
    /// Replicas that are not resynced from here: by their data generations their copies are newer
    /// than this one (RFD 0032).
    pub newer_replicas: Vec<NodeId>,
}

/// Why a leg was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegLoss {
    /// The disk is gone, or lost completed writes: a sync failed.
    DiskFailed,
    /// The disk has not answered for [`MirrorSettings::stuck_timeout`].
    DiskUnresponsive,
}

impl Mirror {
    /// A replica whose image and log have just been opened. It starts its tasks at once; must be
    /// called in a `LocalSet`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if disk pools hold the memory of the core that mirrors need.
    pub async fn open<R: ConfigStore>(parts: MirrorParts<R>) -> Result<Self, Error> {
        let MirrorParts { node, core, account, leg, log, log_report, metadata_observer, .. } =
            parts;
        let MirrorParts { free_space, config_store, settings, resync_permits, .. } = parts;
        reserve_peer_memory(&account)?;
        let image = image_summary(&log, &log_report);
        let incarnation = Incarnation(core.random_u64());
        let membership =
            MirrorMembership::new(node, incarnation, settings.leases, core.now(), image);
        let local_writes = LocalWrites::new(node, core.random_u64());
        let leg = Rc::new(Leg::new(leg, log, Rc::clone(&metadata_observer), settings));
        let image = Rc::clone(&leg) as Rc<dyn ReplicaImage>;
        let state = ReplicaState::new(node, settings, image, membership, local_writes);
        let replica = Rc::new(Replica {
            me: node,
            core,
            settings,
            account,
            leg,
            metadata_observer,
            range_locks: Rc::clone(&state.range_locks),
            sessions: sessions::Sessions::default(),
            peer_requests: peer_requests::PeerRequests::default(),
            resync_permits,
            config_store: Box::new(config_store),
            free_space,
            timer_signal: signal::Signal::default(),
            lease_signal: signal::Signal::default(),
            join_signal: signal::Signal::default(),
            signal: signal::Signal::default(),
            effects: RefCell::default(),
            state: RefCell::new(state),
        });
        replica.spawn_tasks();
        Ok(Self(replica))
    }

    /// Sets how to find the open lease connections to a node, besides its session.
    pub fn set_lease_paths(&self, paths: impl Fn(NodeId) -> Vec<Link> + 'static) {
        self.0.sessions.set_lease_paths(paths);
    }

    /// Closes the session with `node`, if there is one. A new one may be set up.
    pub fn close_session(&self, node: NodeId) {
        if let Some(link) = self.0.link(node) {
            link.close();
        }
    }

    /// Asks this member to leave: it finishes what it has begun, and the other members go on.
    pub fn leave(&self) {
        self.0.handle_event(Event::Leave);
    }

    /// Waits until a request to leave has been granted or declined; true if this replica is out of
    /// sync.
    pub async fn wait_left(&self) -> bool {
        let before = self.0.state().declined_leaves;
        let out_of_sync = || self.0.is_out_of_sync();
        let decided =
            || (out_of_sync() || self.0.state().declined_leaves != before).then(out_of_sync);
        self.0.signal.until(decided).await
    }

    /// Whether this replica asks to be resynced when it is out of sync, as it does by default.
    /// Setting it again to true retries at once, whatever came of earlier attempts.
    pub fn set_join_allowed(&self, allowed: bool) {
        self.0.step(|s, fx| {
            let before = std::mem::replace(&mut s.join_allowed, allowed);
            if !before && allowed {
                s.join_backoff = JoinBackoff::default();
            }
            s.request_join(fx);
        });
    }

    /// Whether client commands wait, at most [`MirrorSettings::hold_timeout`], while this replica
    /// does not serve, as they do by default. If not, waiting and new commands fail with
    /// [`Error::Fenced`] until it serves again, so that clients use another path.
    pub fn set_holds_commands(&self, holds: bool) {
        self.0.step(|s, fx| {
            let before = std::mem::replace(&mut s.holds_commands, holds);
            if before && !holds {
                s.reject_clients(fx);
            }
        });
    }

    /// Asks the primary to make `node` the primary. Ignored by other members.
    pub fn switch_primary(&self, node: NodeId) {
        self.0.handle_event(Event::SwitchPrimary(node));
    }

    /// Makes this replica the primary alone, although acknowledged writes may be lost.
    pub fn force_primary(&self) {
        self.0.handle_event(Event::ForcePrimary);
    }

    /// Compares all members, at the primary. If `keep` is given, ranges that differ are overwritten
    /// everywhere with the contents of that member; the mirror does not know which copy is right.
    ///
    /// # Errors
    /// [`Error::Fenced`] if this is not the primary or stops being it, or if `keep` is no member.
    pub async fn verify(&self, keep: Option<NodeId>) -> Result<VerifyReport, Error> {
        self.0.verify(keep).await
    }

    /// Whether it serves now.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.0.serving_view().is_some()
    }

    /// Its state.
    #[must_use]
    pub fn status(&self) -> MirrorStatus {
        let this = &self.0;
        let is_serving = this.serving_view().is_some();
        let state = this.state();
        let member = &state.membership;
        let now = this.core.now();
        let reason = || member.not_serving_reason(now).unwrap_or(NotServingReason::Draining);
        let others = member.config().into_iter().flat_map(|r| r.replicas.iter().copied());
        let others = others.filter(|r| r.node != this.me);
        let dirty = |r: config::ConfigReplica| Some((r.node, this.leg.log.dirty_count(r.image)?));
        MirrorStatus {
            config: member.config().cloned(),
            view: state.view,
            not_serving: (!is_serving).then(reason),
            linked: this.sessions.nodes(),
            resyncs: state
                .joiners
                .iter()
                .map(|(n, j)| (n, j.copied_bytes, j.total_bytes))
                .collect(),
            unreadable_data: state.joiners.unreadable_data(),
            resynced_bytes: state.joiners.totals().1,
            dirty_regions: others.filter_map(dirty).collect(),
            region_bytes: this.leg.log.geometry().region_bytes(),
            store_silent_for: state.store_silent_since.map(|since| now.saturating_sub(since)),
            leg_error: state.leg_error,
            is_full: state.is_full(),
            leg_loss: state.leg_loss,
            read_errors: this.leg.recent_read_errors(state.awake_clock),
            failed_resyncs: this.failed_resyncs(),
            newer_replicas: this.newer_replicas(),
        }
    }

    /// Waits until [`Self::status`] may have changed.
    pub async fn wait_status_change(&self) {
        let mut checked = false;
        self.0.signal.until(|| std::mem::replace(&mut checked, true).then_some(())).await;
    }

    /// Whether the leg cannot be relied on any more: its disk may have lost completed writes.
    #[must_use]
    pub fn is_leg_lost(&self) -> bool {
        self.0.is_leg_lost()
    }

    /// Closes the mirror: it is no member from here on, whatever the configuration says. Closes the
    /// log cleanly if nothing is in flight. Returns whether the disk has kept what was written, as
    /// far as is known.
    pub async fn close(&self) -> bool {
        self.0.step(|s, fx| {
            s.is_closed = true;
            s.on_out_of_sync(fx);
        });
        self.0.sessions.clear();
        self.0.timer_signal.raise();
        self.0.join_signal.raise();
        let drained = || {
            let ended = self.0.is_leg_lost() || self.0.state().prepared.is_drained();
            ended.then_some(())
        };
        self.0.signal.until(drained).await;
        self.0.step(|s, _| s.prepared.clear());
        let closed = self.0.leg.log.close().await;
        if let Err(error) = &closed {
            tracing::warn!(%error, "closing an intent log failed");
        }
        !self.is_leg_lost() && closed != Err(CloseError::Gone)
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
        let op = WriteOp { range, kind: WriteKind::Zero { unmap }, fua, data: Bufs::new() };
        self.0.write(op, ctx).await
    }
}

impl ReplicatedDevice for Mirror {
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> CompareAndWriteFuture<'a> {
        Box::pin(self.0.compare_and_write(at, compare, write, fua, ctx))
    }

    fn change_tracker(&self) -> ChangeTracker {
        if self.0.settings.has_mistake(Mistake::HidesChangeNotices) {
            return ChangeTracker::default();
        }
        // A change is committed once the leg of every member has it, so this leg as well.
        self.0.leg.dev.change_tracker()
    }

    fn await_commit<'a>(&'a self, range: Blocks, ctx: &'a Ctx) -> CommitFuture<'a> {
        Box::pin(self.0.await_commit(range, ctx))
    }
}

impl Layer for Mirror {
    fn name(&self) -> &'static str {
        "mirror"
    }

    fn info(&self) -> Info {
        let info = self.0.leg.dev.info();
        // Freed blocks must read as zeroes at every member, or the members would differ.
        Info { native_fua: true, unmap_zeroes: true, ..info }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Read { at, blocks } => self.0.read(Blocks::new(at, u64::from(blocks)), &ctx).await,
            Op::Write { at, data, fua } => {
                let block = u64::from(self.0.leg.dev.info().block_size);
                let range = Blocks::new(at, data.len() as u64 / block);
                let op = WriteOp { range, kind: WriteKind::Data, fua, data };
                self.0.write(op, &ctx).await.map(|()| Bufs::new())
            }
            Op::Zero { at, blocks, unmap, fua } => {
                self.zero(at, blocks, unmap, fua, &ctx).await.map(|()| Bufs::new())
            }
            Op::Unmap { at, blocks } => {
                self.zero(at, blocks, true, false, &ctx).await.map(|()| Bufs::new())
            }
            Op::BlockStatus { at, blocks } => {
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

/// Reserves memory of the core for requests of peers.
fn reserve_peer_memory(account: &Account) -> Result<(), Error> {
    account.buffer_pool().reserve_peer_shares().map_err(|full| {
        tracing::error!(
            held = full.wanted,
            most = full.available,
            "pools of disks hold memory of this core that mirrored volumes need: raise cores.memory"
        );
        Error::OutOfRange
    })
}

/// What the image tells of its past.
fn image_summary(log: &IntentLog, report: &LogOpenReport) -> ImageSummary {
    let adopted = report.adopted;
    ImageSummary {
        epoch: Epoch(adopted.map_or(0, |a| a.epoch)),
        config_id: adopted.map_or(0, |a| a.config_id.as_u128()),
        is_clean: report.damage == LogDamage::None && log.is_clean(&log.images()),
        same_boot: report.same_boot,
        generation: log.data_generation(),
        is_log_lost: log.was_lost(),
    }
}
