//! What replicas say to each other.

use block::{Blocks, Bufs, Ctx, Epoch, Error};

use uuid::Uuid;

use crate::{Incarnation, Lineage, NodeId, Seq, SharedLineage, Stamp, Tag, View};

/// Which of a session's connections a message travels on: nothing that has to wait for memory
/// stands in front of what frees it (RFD 0010, 8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Everything without data.
    Control,
    /// What the primary has put in order, and fetched contents.
    Down,
    /// What has yet to be put in order.
    Up,
}

/// What a change of the volume does to its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// New contents.
    Write,
    /// Zeroes; the space may be freed where `unmap`.
    Zero {
        /// Whether the space may be freed.
        unmap: bool,
    },
}

/// A change of the volume, and its contents where it has some.
#[derive(Clone, Debug)]
pub struct Change {
    /// What is changed.
    pub range: Blocks,
    /// How.
    pub kind: Kind,
    /// Durable when it completes.
    pub fua: bool,
    /// The contents: of the whole range for [`Kind::Write`], else empty.
    pub data: Bufs,
}

/// A change with a place in the order, which a member does not know to be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it got its place.
    pub view: View,
    /// The place.
    pub seq: Seq,
    /// The write it is.
    pub tag: Tag,
    /// What it changes.
    pub range: Blocks,
    /// How.
    pub kind: Kind,
    /// Durable when it completes.
    pub fua: bool,
}

/// What a replica says of itself when a session comes up, and when it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Standing {
    /// Its present incarnation.
    pub incarnation: Incarnation,
    /// The last epoch it has adopted.
    pub epoch: Epoch,
    /// That epoch's name.
    pub config: u128,
    /// What it is.
    pub role: Role,
    /// Whether its log is whole and marks nothing for any other replica.
    pub clean: bool,
    /// Whether the machine has not been booted since the image was last opened.
    pub same_boot: bool,
    /// Whether its image is known to be an older copy of what it was (RFD 0032).
    pub older: bool,
    /// What it has recorded about the replica that this is said to.
    pub shared: SharedLineage,
}

/// What a replica is, by its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Has not read the record yet, or cannot act on it.
    Unknown,
    /// In the record under this incarnation.
    Member,
    /// In the record under another incarnation, or its leg is lost: not continuous.
    Returned,
    /// Not in the record's `in_sync`.
    Outside,
}

/// What became of a forwarded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It compared equal and was written.
    Done,
    /// The contents differ.
    Miscompare {
        /// Offset in bytes of the first difference.
        offset: u64,
    },
    /// It failed.
    Failed(Error),
}

/// A message. What each is for, and who answers how, is the table of RFD 0010, 8.4.
#[derive(Clone, Debug)]
pub enum Message {
    /// Both ways when a session comes up.
    Standing(Standing),
    /// Asks for a promise in `epoch`.
    Renew {
        /// The asker's epoch.
        epoch: Epoch,
        /// The asker's incarnation.
        incarnation: Incarnation,
        /// The asker's clock.
        stamp: Stamp,
    },
    /// Answers [`Message::Renew`].
    Promise {
        /// The epoch it is given in.
        epoch: Epoch,
        /// Whom it is given to.
        incarnation: Incarnation,
        /// As asked.
        stamp: Stamp,
    },
    /// There is a configuration above the other's: read the record.
    Newer {
        /// Its number.
        epoch: Epoch,
    },
    /// The primary goes on without a member that lives: it is to serve no more in this view.
    Yield {
        /// The primary's view.
        view: View,
        /// Whom it is said to.
        incarnation: Incarnation,
    },
    /// Answers [`Message::Yield`]: the member serves no more in this view, nor in any before it.
    Yielded {
        /// As asked.
        view: View,
        /// The member's.
        incarnation: Incarnation,
    },
    /// The primary begins a view.
    Start {
        /// The view.
        view: View,
        /// The record of its epoch, as the store has it.
        record: Vec<u8>,
    },
    /// A member has adopted the view.
    Started {
        /// The view.
        view: View,
        /// All its entries.
        entries: Vec<Entry>,
    },
    /// The members are equal.
    Open {
        /// The view.
        view: View,
        /// The last place that was given out to make them so: entries up to it are committed.
        through: Seq,
        /// The writes that were found in anybody's entries: committed.
        settled: Vec<Tag>,
    },
    /// To replicas outside: the view is open, join.
    Rejoin {
        /// The view.
        view: View,
    },
    /// A write for the primary to put in order.
    Order {
        /// The sender's view.
        view: View,
        /// The number of its tag; its node is the sender.
        number: u64,
        /// The sender's latest [`Message::Renew`] that was answered.
        stamp: Stamp,
        /// What to write.
        change: Change,
    },
    /// The order has its place.
    Grant {
        /// The view.
        view: View,
        /// The order.
        number: u64,
        /// Its place.
        seq: Seq,
    },
    /// All other members have applied the order.
    Done {
        /// The view.
        view: View,
        /// The order.
        number: u64,
    },
    /// The order or request came too late: ask again under a new stamp.
    Late {
        /// The view.
        view: View,
        /// The order.
        number: u64,
    },
    /// A change with its place. A member applies it.
    Write {
        /// The view.
        view: View,
        /// Its place.
        seq: Seq,
        /// The write it is.
        tag: Tag,
        /// Whether it copies contents instead of bringing new ones.
        copy: bool,
        /// The change.
        change: Change,
    },
    /// A member has applied a change.
    Applied {
        /// The view.
        view: View,
        /// Its place.
        seq: Seq,
    },
    /// All members have applied these changes.
    Commit {
        /// The view.
        view: View,
        /// Their places.
        seqs: Vec<Seq>,
    },
    /// To the primary: a member's leg has no space for a change, of which it may have made a part. From the primary,
    /// to one that has said so: others have the change and keep it, and this member's leg has failed.
    NoSpace {
        /// The view.
        view: View,
        /// The change's place.
        seq: Seq,
    },
    /// A member has no space for a change: asks another one what it has there, and how much space is left.
    Assess {
        /// The view.
        view: View,
        /// The sender's number for it.
        request: u64,
        /// The change's place.
        seq: Seq,
    },
    /// Answers [`Message::Assess`].
    Assessed {
        /// The view.
        view: View,
        /// As asked.
        request: u64,
        /// Bytes of space that are left for this copy; [`u64::MAX`]: nobody knows of an end.
        free_bytes: u64,
        /// Which blocks of the change read as zeroes, each first block and count, if its leg has refused it: at most
        /// [`MAX_REGIONS`](crate::frame::MAX_REGIONS) ranges. Or why that cannot be told.
        zeroes: Result<Vec<(u64, u64)>, Error>,
    },
    /// A reader waits for the commit of this change.
    Want {
        /// The view.
        view: View,
        /// Its place.
        seq: Seq,
    },
    /// A COMPARE AND WRITE for the primary to do as a whole.
    Forward {
        /// The sender's view.
        view: View,
        /// The number of its tag; its node is the sender.
        number: u64,
        /// As in [`Message::Order`].
        stamp: Stamp,
        /// What is compared and written.
        range: Blocks,
        /// Durable when it completes.
        fua: bool,
        /// The expected contents and, as long, the new ones.
        data: Bufs,
    },
    /// Answers [`Message::Forward`].
    Outcome {
        /// The view.
        view: View,
        /// The request.
        number: u64,
        /// What became of it.
        outcome: Outcome,
    },
    /// Make durable what has completed.
    Flush {
        /// The view.
        view: View,
        /// The sender's number for it.
        request: u64,
        /// If not 0, the count of the [`Lineage`](crate::Lineage) of the view's epoch that the
        /// receiver records afterwards, durably, before it answers.
        lineage: u32,
    },
    /// Answers [`Message::Flush`].
    Flushed {
        /// The view.
        view: View,
        /// As asked.
        request: u64,
    },
    /// Asks for contents.
    Fetch {
        /// The view.
        view: View,
        /// The sender's number for it.
        request: u64,
        /// What to read.
        range: Blocks,
    },
    /// Answers [`Message::Fetch`].
    Data {
        /// The view.
        view: View,
        /// As asked.
        request: u64,
        /// The contents, or why there are none.
        result: Result<Bufs, Error>,
    },
    /// Asks the primary to write a good copy of the range to all members.
    Repair {
        /// The view.
        view: View,
        /// What could not be read.
        range: Blocks,
    },
    /// A replica outside asks to be brought in sync.
    Join {
        /// The attempt.
        incarnation: Incarnation,
        /// The epoch it has adopted.
        epoch: Epoch,
        /// Size of the volume as it has it, in bytes.
        volume_bytes: u64,
        /// log2 of the bytes of its log's regions.
        region_shift: u32,
        /// What it has recorded about the primary's image.
        shared: SharedLineage,
        /// Its marks for the primary's image, a bit a region, least significant first.
        marks: Vec<u8>,
    },
    /// The attempt is under way: every write goes to the joiner too from now on.
    Accept {
        /// The view.
        view: View,
        /// The attempt.
        incarnation: Incarnation,
        /// The last lineages that the primary has reached together with other images (RFD 0032):
        /// [`MAX_REACHED`](crate::MAX_REACHED) at most.
        reached: Vec<(Uuid, Lineage)>,
    },
    /// The attempt has ended.
    Detached {
        /// The attempt.
        incarnation: Incarnation,
    },
    /// The marks of these regions may go, for all members.
    Clear {
        /// The view.
        view: View,
        /// The flush, of the sender's numbers, that made them durable everywhere.
        request: u64,
        /// The regions, each first byte and length in bytes.
        regions: Vec<(u64, u64)>,
    },
    /// These regions are marked at a member, and idle: the primary may sweep them.
    Marked {
        /// The view.
        view: View,
        /// The regions, each first byte and length in bytes.
        regions: Vec<(u64, u64)>,
    },
    /// To the primary: there has been no session with this member for a while.
    Unreachable {
        /// The view.
        view: View,
        /// The member.
        node: NodeId,
    },
    /// Asks for the digest of a range.
    Sum {
        /// The view.
        view: View,
        /// The sender's number for it.
        request: u64,
        /// What to read.
        range: Blocks,
    },
    /// Answers [`Message::Sum`].
    Summed {
        /// The view.
        view: View,
        /// As asked.
        request: u64,
        /// SHA-256 of the contents, or why there is none.
        result: Result<[u8; 32], Error>,
    },
}

impl Message {
    /// The connection it travels on.
    #[must_use]
    pub fn lane(&self) -> Lane {
        match self {
            Self::Write { .. } | Self::Data { .. } => Lane::Down,
            Self::Order { .. } | Self::Forward { .. } | Self::Join { .. } => Lane::Up,
            _ => Lane::Control,
        }
    }
}

/// A message that has arrived.
#[derive(Debug)]
pub struct Received {
    /// The message.
    pub message: Message,
    /// Memory for what it asks for, beyond its data: there for [`Message::Write`],
    /// [`Message::Order`] and [`Message::Forward`], and what was laid ready ([`crate::Link::expect`])
    /// for [`Message::Data`].
    pub ctx: Option<Ctx>,
}
