//! What a [`Member`](super::Member) is told, what it asks for, and how it explains itself.

use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, Lineage, Message, NodeId, Stamp, Standing, View};

use super::super::record::{Member as Listed, Put, Record};

/// How long promises hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    lease: Duration,
    grace: Duration,
    /// A planted mistake: the store is believed, whatever images have adopted.
    #[cfg(feature = "testing")]
    believes_store: bool,
}

/// Settings under which two configurations could act at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a grace time of {} ms is too short for leases of {} ms: 9/10 of it must exceed 11/10 of them",
    grace.as_millis(), lease.as_millis()
)]
pub struct UnsafeSettings {
    /// What was asked for as lease.
    pub lease: Duration,
    /// What was asked for as grace.
    pub grace: Duration,
}

impl Settings {
    /// Promises are held for `lease` after they were asked for, and keep who gave them for `grace`.
    /// Clocks may differ by a tenth in rate.
    ///
    /// # Errors
    /// [`UnsafeSettings`] unless a holder's lease is over before its giver's grace is.
    pub fn new(lease: Duration, grace: Duration) -> Result<Self, UnsafeSettings> {
        let safe = grace * 9 > lease * 11 && !lease.is_zero();
        if safe { Ok(Self::of(lease, grace)) } else { Err(UnsafeSettings { lease, grace }) }
    }

    /// A planted mistake: whatever was asked for.
    #[cfg(test)]
    pub(super) fn unchecked(lease: Duration, grace: Duration) -> Self {
        Self::of(lease, grace)
    }

    fn of(lease: Duration, grace: Duration) -> Self {
        Self {
            lease,
            grace,
            #[cfg(feature = "testing")]
            believes_store: false,
        }
    }

    /// The same with a mistake: the store is believed, whatever images have adopted.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn believing_the_store(self) -> Self {
        Self { believes_store: true, ..self }
    }

    #[cfg(feature = "testing")]
    pub(super) fn believes_store(&self) -> bool {
        self.believes_store
    }

    #[cfg(not(feature = "testing"))]
    pub(super) fn believes_store(&self) -> bool {
        false
    }

    /// How long a promise is held, from when it was asked for.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// How long a promise keeps its giver, from when it was given.
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// How often promises are asked for; also the pace of other repetitions.
    #[must_use]
    pub fn renewal(&self) -> Duration {
        self.lease / 4
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::of(Duration::from_secs(2), Duration::from_secs(3))
    }
}

/// What the image says when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Image {
    /// The last epoch it adopted; 0 if none.
    pub epoch: Epoch,
    /// That epoch's name.
    pub config: u128,
    /// Whether its log is whole and marks nothing for any other replica.
    pub clean: bool,
    /// Whether the machine has not been booted since the image was last opened.
    pub same_boot: bool,
    /// The last lineage that it has reached (RFD 0032).
    pub lineage: Lineage,
    /// Whether what it had recorded was lost with its log.
    pub lost: bool,
}

impl Image {
    /// Whether it certainly holds whatever any replica holds (5.6 b). A clean log shows that of the
    /// image that was used last, and of a copy of it nothing; the copy of another machine, or of an
    /// earlier boot, cannot be told from it.
    #[must_use]
    pub fn holds_all(&self) -> bool {
        self.clean && self.same_boot
    }
}

/// Who knows that an image is an older copy of what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetBack {
    /// The record: all members had reached a later lineage.
    Record,
    /// The image on that node, which has cleared marks under a later lineage.
    Node(NodeId),
}

/// What one member says to another about membership. All of it but [`Say::Start`] may be lost,
/// doubled and reordered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Say {
    /// [`Message::Standing`].
    Standing(Standing),
    /// [`Message::Renew`]. May travel on any connection between the two.
    Renew {
        /// The asker's epoch.
        epoch: Epoch,
        /// The asker's incarnation.
        incarnation: Incarnation,
        /// The asker's clock.
        stamp: Stamp,
    },
    /// [`Message::Promise`]. May travel on any connection between the two.
    Promise {
        /// The epoch it is given in.
        epoch: Epoch,
        /// Whom it is given to.
        incarnation: Incarnation,
        /// As asked.
        stamp: Stamp,
    },
    /// [`Message::Newer`].
    Newer(Epoch),
    /// [`Message::Yield`]. May travel on any connection between the two.
    Yield {
        /// The primary's view.
        view: View,
        /// Whom it is said to.
        incarnation: Incarnation,
    },
    /// [`Message::Yielded`]. May travel on any connection between the two.
    Yielded {
        /// As asked.
        view: View,
        /// The member's.
        incarnation: Incarnation,
    },
    /// [`Message::Start`]. Only over the session.
    Start {
        /// The view.
        view: View,
        /// The record of its epoch.
        record: Record,
    },
}

impl From<Say> for Message {
    fn from(say: Say) -> Self {
        match say {
            Say::Standing(standing) => Self::Standing(standing),
            Say::Renew { epoch, incarnation, stamp } => Self::Renew { epoch, incarnation, stamp },
            Say::Promise { epoch, incarnation, stamp } => {
                Self::Promise { epoch, incarnation, stamp }
            }
            Say::Newer(epoch) => Self::Newer { epoch },
            Say::Yield { view, incarnation } => Self::Yield { view, incarnation },
            Say::Yielded { view, incarnation } => Self::Yielded { view, incarnation },
            Say::Start { view, record } => Self::Start { view, record: record.to_bytes() },
        }
    }
}

/// What happens to a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed: [`Member::next_timer`](super::Member::next_timer) is over.
    Tick,
    /// The record may have changed in the store ([`Records::changed`]).
    ///
    /// [`Records::changed`]: super::super::record::Records::changed
    Changed,
    /// Answers [`Action::ReadRecord`].
    Read {
        /// The record, as it was at some moment since it was asked for.
        record: Record,
        /// A random number that was never handed in before: the name of the next record, if
        /// reading this one leads to a put.
        fresh: u128,
    },
    /// Answers [`Action::ReadRecord`]: the store did not answer, or not sensibly.
    ReadFailed,
    /// Answers [`Action::Put`].
    Put(Put),
    /// A session with the node has come up, and nothing more is processed from an older one.
    LinkUp(NodeId),
    /// The session with the node has ended.
    LinkDown(NodeId),
    /// The node said this.
    Heard(NodeId, Say),
    /// Answers [`Action::Begin`]: nothing of older views is sent or accepted any more, every entry
    /// has been applied or the leg is dead, and the record, if one was named, is in the superblock.
    Began(View),
    /// [`Message::Started`] has come from the node. Its entries are the driver's.
    Started(NodeId, View),
    /// Answers [`Action::Settle`]: all members have applied all copies.
    Settled(View),
    /// [`Message::Open`] has come from the node. What it carries is the driver's.
    Open(NodeId, View),
    /// The node has not answered WRITE, FLUSH or START for too long, though its lease lives.
    Stuck(NodeId),
    /// The leg is lost, or does not answer: nothing more comes from it. This member stops serving
    /// and promising, and leaves; the last one stays listed, and down.
    LegDead,
    /// The leg has refused an operation, or cannot read what it has just written, and is not lost.
    /// From now on this replica takes part in no view beside others and promises nothing; it goes
    /// on asking to be taken out of every record that lists it with others. Forgotten when it turns
    /// out to be the last, and by [`Event::Joining`]. Also to be told of a joiner's leg: the record
    /// may list it already. Ignored by one that is alone and has not asked for an admission; its
    /// driver ends all attempts before anything is answered, for joiners may have what was refused.
    LegFailed,
    /// Somebody asks to take this member out. It stops serving, and goes once all that remain have
    /// shown since then that they live; it serves again if that is declined or the store is away.
    Leave,
    /// Somebody asks to make the node primary. Heeded by the primary.
    Switch(NodeId),
    /// The joiner's resync is at its barrier: take it in. Heeded by the primary.
    Admit(Listed),
    /// The attempt that was to be admitted has ended. Declined after [`Action::Put`] of a record
    /// that lists it ([`Member::admitting`](super::Member::admitting)): from then on the joiner
    /// stays required until the next [`Action::Begin`] or [`Action::Outside`].
    Withdraw(NodeId),
    /// The operator orders this replica to go on alone, whatever may be lost.
    Force,
    /// All members of the present record have recorded this lineage.
    Recorded(Lineage),
    /// This replica, outside, begins an attempt to join: its leg is drained, it has drawn this
    /// incarnation and adopted epoch and `config` of [`Member::record`](super::Member::record).
    Joining(Incarnation),
}

/// What a member asks its driver to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read the record by a quorum read and answer by [`Event::Read`] or [`Event::ReadFailed`],
    /// within a bounded time. One at a time.
    ReadRecord,
    /// Replace the record of this epoch and name, and answer by [`Event::Put`], within a bounded
    /// time. One at a time.
    Put {
        /// The epoch that is replaced.
        epoch: Epoch,
        /// Its name.
        config: u128,
        /// What takes its place.
        record: Record,
    },
    /// Say this to the node, if there is a connection to it.
    Send(NodeId, Say),
    /// Adopt the view (5.7): stop sending and accepting anything of older views, let what waits
    /// leave the queue, wait until every entry has been applied or the leg is dead, then write the
    /// record, if there is one, to the superblock; then [`Event::Began`]. Takes the place of an
    /// unanswered one before it; if that brought a record, so does this. Resyncs end here.
    Begin {
        /// The view.
        view: View,
        /// The record of its epoch, unless the image has it already.
        record: Option<Record>,
    },
    /// Send [`Message::Started`] with all entries to the primary.
    SendStarted(View),
    /// At the primary: STARTED has come from all others. Settle (5.8), and answer by
    /// [`Event::Settled`] when all copies have been applied.
    Settle(View),
    /// The view is open: entries up to the end of settling are dropped, own writes are answered or
    /// asked again. At the primary: send [`Message::Open`] to all others first, and
    /// [`Message::Rejoin`] to replicas outside.
    Opened(View),
    /// This replica has no part in the record: entries are dropped, commands end with `Fenced`.
    /// Join the primary of [`Member::record`](super::Member::record) if it is another node and the
    /// role is outside: a member whose leg has failed has yet to be taken out. Said again with every
    /// new record.
    Outside,
    /// This replica must not do anything (3.2). Entries are dropped, commands end.
    Refused(Refusal),
    /// A request that cannot be done.
    Declined(Change),
}

/// A change of the record that somebody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// [`Event::Leave`]: nobody would remain, or nobody who could be primary.
    Leave,
    /// [`Event::Switch`]: this is not the primary, or that one is no linked member.
    Switch(NodeId),
    /// [`Event::Admit`]: this is not the primary, the view has ended, it has no image here, or the
    /// leg has refused what the joiner may have got. The attempt has to end.
    Admit(NodeId),
    /// [`Event::Withdraw`]: the record may list the joiner already.
    Withdraw(NodeId),
    /// [`Event::Force`]: this replica is a member, or has no image in the record, or the record has changed
    /// since.
    Force,
}

/// Why a replica must not do anything: the store, or this image, was restored from the past, or
/// belongs to another history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The image has adopted a later epoch.
    #[error("this image has been in epoch {}, the store says {}: was it restored?", image.0, store.0)]
    ImageAhead {
        /// The image's epoch.
        image: Epoch,
        /// The record's.
        store: Epoch,
    },
    /// The image has adopted the same epoch under another name.
    #[error("this image and the store have different histories of epoch {}", epoch.0)]
    OtherConfig {
        /// The epoch.
        epoch: Epoch,
    },
    /// Another replica has adopted a later epoch, or the same under another name.
    #[error("the image on node {node} has been in another epoch {}: was the store restored?", epoch.0)]
    PeerAhead {
        /// Where it is.
        node: NodeId,
        /// The epoch it has adopted.
        epoch: Epoch,
        /// That epoch's name.
        config: u128,
    },
}

/// Why a replica does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The record has not been read yet.
    Unread {
        /// Whether the store did not answer the last time.
        away: bool,
    },
    /// It must not do anything.
    Refused(Refusal),
    /// Its leg is lost.
    LegDead,
    /// Its leg has failed: it waits to be taken out.
    LegFailed,
    /// It is about to leave, and waits for signs of life from the others.
    Leaving,
    /// It is not in sync; the node is the primary.
    Outside(NodeId),
    /// It was restarted and is still listed: the node, a member, has to put it out first.
    Returned(NodeId),
    /// All members were restarted. These may hold newer data and have not been heard.
    Blackout(Vec<NodeId>),
    /// All members were restarted, and this one could lead. These are connected and have not read the
    /// record: they may know this image to be an older copy, and cannot say so yet.
    Mute(Vec<NodeId>),
    /// All members were restarted, and this image is known to be an older copy of what it was. These may
    /// hold newer data and have not been heard.
    SetBack {
        /// Who knows.
        by: SetBack,
        /// Who has not been heard.
        silent: Vec<NodeId>,
    },
    /// All members were restarted and heard: this one leads next.
    Leads(NodeId),
    /// It has asked the store for a change and has not learned what became of it.
    Changing,
    /// It ends the older view: its own leg has yet to apply what was ordered, or to write the
    /// epoch down.
    Draining,
    /// At the primary: these have yet to come to the view.
    Gathering(Vec<NodeId>),
    /// At the primary: members are made equal.
    Settling,
    /// It waits for START or OPEN from the node, the primary.
    Open(NodeId),
    /// It goes on without these as soon as their leases are over.
    Deciding(Vec<NodeId>),
    /// The promises of these have run out.
    Lease(Vec<NodeId>),
    /// The node, the primary, goes on without this member, and has been told that it may.
    Yielded(NodeId),
}
