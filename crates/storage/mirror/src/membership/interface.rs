//! The events and actions of [`MirrorMembership`](super::MirrorMembership), and its reasons.

use std::time::Duration;

use block::Epoch;
use peer::{ClockStamp, DataGeneration, Incarnation, Message, NodeId, ReplicaReport, View};

use super::super::config::{InSyncMember as Listed, MirrorConfig, PutOutcome};

/// Lease times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseSettings {
    lease: Duration,
    grace: Duration,
    /// A planted mistake: trusts the store, whatever images have adopted.
    #[cfg(feature = "testing")]
    trusts_store: bool,
}

/// Settings under which two configurations could act at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a grace time of {} ms is too short for leases of {} ms: 9/10 of it must exceed 11/10 of them",
    grace.as_millis(), lease.as_millis()
)]
pub struct UnsafeLeaseSettings {
    /// The requested lease.
    pub lease: Duration,
    /// The requested grace.
    pub grace: Duration,
}

impl LeaseSettings {
    /// A lease is held for `lease` after it was requested, and binds the grantor for `grace`.
    /// Clocks may differ by a tenth in rate.
    ///
    /// # Errors
    /// [`UnsafeLeaseSettings`] unless a lease ends at its holder before the grace time ends at its
    /// grantor.
    pub fn new(lease: Duration, grace: Duration) -> Result<Self, UnsafeLeaseSettings> {
        let is_safe = grace * 9 > lease * 11 && !lease.is_zero();
        if is_safe {
            Ok(Self::from_parts(lease, grace))
        } else {
            Err(UnsafeLeaseSettings { lease, grace })
        }
    }

    /// A planted mistake: settings that were not checked.
    #[cfg(test)]
    pub(super) fn unchecked(lease: Duration, grace: Duration) -> Self {
        Self::from_parts(lease, grace)
    }

    fn from_parts(lease: Duration, grace: Duration) -> Self {
        Self {
            lease,
            grace,
            #[cfg(feature = "testing")]
            trusts_store: false,
        }
    }

    /// The same with a planted mistake: trusts the store, whatever images have adopted.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn trusting_store(self) -> Self {
        Self { trusts_store: true, ..self }
    }

    #[cfg(feature = "testing")]
    pub(super) fn trusts_store(&self) -> bool {
        self.trusts_store
    }

    #[cfg(not(feature = "testing"))]
    pub(super) fn trusts_store(&self) -> bool {
        false
    }

    /// How long a lease is held, from its request.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// How long a grant binds its grantor.
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// How often leases are requested; also the interval of other repetitions.
    #[must_use]
    pub fn renewal_interval(&self) -> Duration {
        self.lease / 4
    }
}

impl Default for LeaseSettings {
    fn default() -> Self {
        Self::from_parts(Duration::from_secs(2), Duration::from_secs(3))
    }
}

/// The state of the image when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSummary {
    /// The last epoch it adopted; 0 if none.
    pub epoch: Epoch,
    /// The name of that configuration.
    pub config_id: u128,
    /// Whether its log is intact and has no dirty bits for any other replica.
    pub is_clean: bool,
    /// Whether the machine has not been booted since the image was last opened.
    pub same_boot: bool,
    /// The last data generation that it has recorded (RFD 0032).
    pub generation: DataGeneration,
    /// Whether its history was lost with its log.
    pub is_log_lost: bool,
}

impl ImageSummary {
    /// Whether it certainly holds everything that any replica holds (5.6 b). A clean log proves
    /// that only of the image that was used last; a copy made on another machine, or in an earlier
    /// boot, looks the same.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_clean && self.same_boot
    }
}

/// How it is known that an image is an older copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RollbackWitness {
    /// By the configuration: all members had recorded a later data generation.
    Config,
    /// By the image on that node, which has cleared dirty bits under a later data generation.
    Node(NodeId),
}

/// A membership message between replicas. All except [`MembershipMessage::StartViewChange`] may be
/// lost, duplicated and reordered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MembershipMessage {
    /// [`Message::ReplicaReport`].
    ReplicaReport(ReplicaReport),
    /// [`Message::LeaseRequest`]. May travel on any connection between the two.
    LeaseRequest {
        /// The epoch of the requester.
        epoch: Epoch,
        /// The incarnation of the requester.
        incarnation: Incarnation,
        /// The clock of the requester.
        stamp: ClockStamp,
    },
    /// [`Message::LeaseGrant`]. May travel on any connection between the two.
    LeaseGrant {
        /// The epoch of the grant.
        epoch: Epoch,
        /// The incarnation of the holder.
        incarnation: Incarnation,
        /// The stamp of the request.
        stamp: ClockStamp,
    },
    /// [`Message::NewerEpoch`].
    NewerEpoch(Epoch),
    /// [`Message::RevokeLease`]. May travel on any connection between the two.
    RevokeLease {
        /// The view of the primary.
        view: View,
        /// The incarnation that is to stop serving.
        incarnation: Incarnation,
    },
    /// [`Message::LeaseRevoked`]. May travel on any connection between the two.
    LeaseRevoked {
        /// The view of the request.
        view: View,
        /// The incarnation that has stopped serving.
        incarnation: Incarnation,
    },
    /// [`Message::StartViewChange`]. Only over the session.
    StartViewChange {
        /// The view.
        view: View,
        /// The configuration of its epoch.
        config: MirrorConfig,
    },
}

impl From<MembershipMessage> for Message {
    fn from(message: MembershipMessage) -> Self {
        match message {
            MembershipMessage::ReplicaReport(report) => Self::ReplicaReport(report),
            MembershipMessage::LeaseRequest { epoch, incarnation, stamp } => {
                Self::LeaseRequest { epoch, incarnation, stamp }
            }
            MembershipMessage::LeaseGrant { epoch, incarnation, stamp } => {
                Self::LeaseGrant { epoch, incarnation, stamp }
            }
            MembershipMessage::NewerEpoch(epoch) => Self::NewerEpoch { epoch },
            MembershipMessage::RevokeLease { view, incarnation } => {
                Self::RevokeLease { view, incarnation }
            }
            MembershipMessage::LeaseRevoked { view, incarnation } => {
                Self::LeaseRevoked { view, incarnation }
            }
            MembershipMessage::StartViewChange { view, config } => {
                Self::StartViewChange { view, config: config.to_bytes() }
            }
        }
    }
}

/// Input of the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed: [`MirrorMembership::next_timer`](super::MirrorMembership::next_timer) is
    /// due.
    Tick,
    /// The configuration may have changed in the store ([`ConfigStore::wait_changed`]).
    ///
    /// [`ConfigStore::wait_changed`]: super::super::config::ConfigStore::wait_changed
    ConfigChanged,
    /// Answers [`Action::ReadConfig`].
    ConfigRead {
        /// The configuration, as it was at some moment since the read began.
        config: MirrorConfig,
        /// A random number never passed in before: the name of the next configuration, if this read
        /// leads to a put.
        next_config_id: u128,
    },
    /// Answers [`Action::ReadConfig`]: the store did not answer, or its answer is invalid.
    ConfigReadFailed,
    /// Answers [`Action::PutConfig`].
    PutCompleted(PutOutcome),
    /// A session with the node is up; nothing more is processed from an older one.
    LinkUp(NodeId),
    /// The session with the node has ended.
    LinkDown(NodeId),
    /// The node sent this message.
    Received(NodeId, MembershipMessage),
    /// Answers [`Action::BeginView`]: nothing of older views is sent or accepted any more, every
    /// entry has been applied or the leg is lost, and the configuration, if one was given, is in
    /// the superblock.
    ViewBegun(View),
    /// The node has sent [`Message::DoViewChange`]. The driver keeps its entries.
    DoViewChange(NodeId, View),
    /// Answers [`Action::Reconcile`]: all members have applied all copies.
    Reconciled(View),
    /// The node has sent [`Message::StartView`]. The driver keeps its contents.
    StartView(NodeId, View),
    /// The node has not answered WRITE, FLUSH or START VIEW CHANGE for too long, although its lease
    /// is valid.
    PeerStuck(NodeId),
    /// The leg is lost, or does not answer. This member stops serving and granting leases, and
    /// leaves; the last member stays listed, and down.
    LegLost,
    /// The leg failed an operation, or cannot read what it has just written, and is not lost. From
    /// now on this replica takes part in no view with other members and grants no leases; it asks
    /// to be removed from every configuration that lists it with others. Forgotten when it turns
    /// out to be the last member, and by [`Event::JoinStarted`]. Also sent for the leg of a joiner:
    /// the configuration may list it already. Ignored by a sole member without a pending admission;
    /// its driver ends all resync attempts before it answers anything, because joiners may have
    /// applied what failed here.
    LegFailed,
    /// A request to remove this member. It stops serving, and leaves once all that remain have
    /// proved since then that they are alive; it serves again if the request is declined or the
    /// store is unavailable.
    Leave,
    /// A request to make the node primary. Ignored except at the primary.
    SwitchPrimary(NodeId),
    /// The resync of the joiner has passed its flush barrier: admit it. Ignored except at the
    /// primary.
    Admit(Listed),
    /// The attempt to be admitted has ended. Declined after [`Action::PutConfig`] of a
    /// configuration that lists it
    /// ([`pending_admission`](super::MirrorMembership::pending_admission)): then the joiner stays
    /// required until the next [`Action::BeginView`] or [`Action::BecomeOutOfSync`].
    CancelAdmission(NodeId),
    /// The operator makes this replica the sole member, although acknowledged writes may be lost.
    ForcePrimary,
    /// All members of the present configuration have recorded this data generation.
    GenerationRecorded(DataGeneration),
    /// This out-of-sync replica begins a join attempt: its leg is drained, it has drawn this
    /// incarnation and adopted [`MirrorMembership::config`](super::MirrorMembership::config).
    JoinStarted(Incarnation),
}

/// What the driver is to do, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read the configuration by a quorum read, and answer by [`Event::ConfigRead`] or
    /// [`Event::ConfigReadFailed`] within a bounded time. One at a time.
    ReadConfig,
    /// Replace the configuration of this epoch and name, and answer by [`Event::PutCompleted`]
    /// within a bounded time. One at a time.
    PutConfig {
        /// The epoch to replace.
        epoch: Epoch,
        /// The name of its configuration.
        config_id: u128,
        /// The new configuration.
        next: MirrorConfig,
    },
    /// Send this message to the node, if there is a connection to it.
    Send(NodeId, MembershipMessage),
    /// Adopt the view (5.7): stop sending and accepting anything of older views, wake the tasks
    /// that wait for locks, wait until every entry has been applied or the leg is lost, then write
    /// the configuration, if given, to the superblock; then answer by [`Event::ViewBegun`].
    /// Replaces an earlier unanswered one; if that had a configuration, so has this. Resyncs end
    /// here.
    BeginView {
        /// The view.
        view: View,
        /// The configuration of its epoch, unless the image has adopted it already.
        config: Option<MirrorConfig>,
    },
    /// Send [`Message::DoViewChange`] with all entries to the primary.
    SendDoViewChange(View),
    /// At the primary: all other members have sent DO VIEW CHANGE. Reconcile (5.8), and answer by
    /// [`Event::Reconciled`] when all copies have been applied.
    Reconcile(View),
    /// The view is active: drop entries up to the end of reconciliation; answer local writes or
    /// send them again. At the primary: first send [`Message::StartView`] to all other members, and
    /// [`Message::Rejoin`] to out-of-sync replicas.
    ActivateView(View),
    /// This replica is no member of the configuration: drop entries, end commands with `Fenced`.
    /// Join the primary of [`MirrorMembership::config`](super::MirrorMembership::config) if that is
    /// another node and the role is out of sync; a member whose leg has failed must be removed
    /// first. Repeated with every new configuration.
    BecomeOutOfSync,
    /// This replica must not act (3.2). Drop entries, end commands.
    Refuse(ConfigRefusal),
    /// A request cannot be fulfilled.
    Decline(ConfigChange),
}

/// A requested change of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigChange {
    /// [`Event::Leave`]: no member would remain, or none that could be primary.
    Leave,
    /// [`Event::SwitchPrimary`]: this is not the primary, or the node is not a linked member.
    SwitchPrimary(NodeId),
    /// [`Event::Admit`]: this is not the primary, the view has ended, the joiner has no image here,
    /// or the leg failed a write that the joiner may have applied. The attempt must end.
    Admit(NodeId),
    /// [`Event::CancelAdmission`]: the configuration may list the joiner already.
    CancelAdmission(NodeId),
    /// [`Event::ForcePrimary`]: this replica is a member, or has no image in the configuration, or
    /// the configuration has changed since.
    ForcePrimary,
}

/// Why a replica must not act: the store or this image was restored from the past, or they belong
/// to different histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ConfigRefusal {
    /// The image has adopted a later epoch.
    #[error("this image has been in epoch {}, the store says {}: was it restored?", image.0, store.0)]
    ImageAhead {
        /// The epoch of the image.
        image: Epoch,
        /// The epoch in the store.
        store: Epoch,
    },
    /// The image has adopted the same epoch under another name.
    #[error("this image and the store have different histories of epoch {}", epoch.0)]
    ConfigMismatch {
        /// The epoch.
        epoch: Epoch,
    },
    /// Another replica has adopted a later epoch, or the same under another name.
    #[error("the image on node {node} has been in another epoch {}: was the store restored?", epoch.0)]
    PeerAhead {
        /// The node of that replica.
        node: NodeId,
        /// The epoch it has adopted.
        epoch: Epoch,
        /// The name of that configuration.
        config_id: u128,
    },
}

/// Why a replica does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotServingReason {
    /// The configuration has not been read yet.
    ConfigUnread {
        /// Whether the store did not answer the last read.
        store_unavailable: bool,
    },
    /// It must not act.
    Refused(ConfigRefusal),
    /// Its leg is lost.
    LegLost,
    /// Its leg has failed: it waits to be removed.
    LegFailed,
    /// It is leaving, and waits for proof that the remaining members are alive.
    Leaving,
    /// It is not in sync; the node is the primary.
    OutOfSync(NodeId),
    /// It restarted and is still listed: the node, a member, must exclude it first.
    AwaitingExclusion(NodeId),
    /// All members restarted. These may hold newer data and have not reported.
    AwaitingRestartedMembers(Vec<NodeId>),
    /// All members restarted, and this one could take over. These are linked but have not read the
    /// configuration: they may know that this image is an older copy.
    AwaitingConfigRead(Vec<NodeId>),
    /// All members restarted, and this image is known to be an older copy. The members `unheard`
    /// may hold newer data.
    RolledBack {
        /// How it is known.
        witness: RollbackWitness,
        /// The members that have not reported.
        unheard: Vec<NodeId>,
    },
    /// All members restarted and reported: the node takes over.
    TakeoverPending(NodeId),
    /// It has put a configuration, and does not know the outcome.
    Reconfiguring,
    /// It ends the older view: its leg has yet to apply ordered writes, or to record the epoch.
    Draining,
    /// At the primary: these have not sent DO VIEW CHANGE.
    CollectingEntries(Vec<NodeId>),
    /// At the primary: reconciliation is in progress.
    Reconciling,
    /// It waits for START VIEW CHANGE or START VIEW from the node, the primary.
    AwaitingPrimary(NodeId),
    /// It excludes these as soon as their leases are over.
    ExcludingMembers(Vec<NodeId>),
    /// The leases from these have expired.
    LeasesExpired(Vec<NodeId>),
    /// The node, the primary, has revoked the lease of this member, and goes on without it.
    LeaseRevoked(NodeId),
}
