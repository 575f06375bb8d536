//! The messages between replicas.

use block::{Blocks, Bufs, Ctx, Epoch, Error};

use uuid::Uuid;

use crate::{ClockStamp, DataGeneration, Incarnation, NodeId, PeerGenerations, Seq, View, WriteId};

/// The connection of a session on which a message travels: no message that has to wait for memory
/// blocks one that frees it (RFD 0010, 8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Messages without payload.
    Control,
    /// Ordered writes, and fetched contents.
    Replication,
    /// Requests that the primary has yet to order.
    Requests,
}

/// How a write changes its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteKind {
    /// New contents.
    Data,
    /// Zeroes; the space may be freed where `unmap`.
    Zero {
        /// Whether the space may be freed.
        unmap: bool,
    },
}

/// A change of a block range, with its payload.
#[derive(Clone, Debug)]
pub struct WriteOp {
    /// The range to change.
    pub range: Blocks,
    /// How it changes.
    pub kind: WriteKind,
    /// Durable when it completes.
    pub fua: bool,
    /// The contents: of the whole range for [`WriteKind::Data`], else empty.
    pub data: Bufs,
}

/// An ordered write that a member does not know to be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreparedEntry {
    /// The view in which it was ordered.
    pub view: View,
    /// Its sequence number.
    pub seq: Seq,
    /// The id of the write.
    pub write_id: WriteId,
    /// The range it changes.
    pub range: Blocks,
    /// How it changes.
    pub kind: WriteKind,
    /// Durable when it completes.
    pub fua: bool,
}

/// What a replica reports about itself when a session comes up, and whenever it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplicaReport {
    /// Its present incarnation.
    pub incarnation: Incarnation,
    /// The last epoch it has adopted.
    pub epoch: Epoch,
    /// The name of that configuration.
    pub config_id: u128,
    /// Its role.
    pub role: Role,
    /// Whether its log is intact and has no dirty bits for any other replica.
    pub is_clean: bool,
    /// Whether the machine has not been booted since the image was last opened.
    pub same_boot: bool,
    /// Whether its image is known to be an older copy (RFD 0032).
    pub is_rolled_back: bool,
    /// The generations that it has recorded with the receiver.
    pub generations: PeerGenerations,
}

/// The role of a replica, by its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Has not read the configuration yet, or cannot act on it.
    Unknown,
    /// Listed in the configuration under this incarnation.
    Member,
    /// Listed under another incarnation: restarted.
    Restarted,
    /// Not listed in `in_sync`, or its leg is lost.
    OutOfSync,
}

/// The outcome of a forwarded compare-and-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareAndWriteOutcome {
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

/// A message. RFD 0010, 8.4, tabulates their purposes and answers.
#[derive(Clone, Debug)]
pub enum Message {
    /// Sent both ways when a session comes up.
    ReplicaReport(ReplicaReport),
    /// Requests a lease in `epoch`.
    LeaseRequest {
        /// The epoch of the requester.
        epoch: Epoch,
        /// The incarnation of the requester.
        incarnation: Incarnation,
        /// The clock of the requester.
        stamp: ClockStamp,
    },
    /// Answers [`Message::LeaseRequest`].
    LeaseGrant {
        /// The epoch of the grant.
        epoch: Epoch,
        /// The incarnation of the holder.
        incarnation: Incarnation,
        /// The stamp of the request.
        stamp: ClockStamp,
    },
    /// There is a newer configuration: read it from the store.
    NewerEpoch {
        /// Its number.
        epoch: Epoch,
    },
    /// The primary goes on without a member that is alive: it must stop serving in this view.
    RevokeLease {
        /// The view of the primary.
        view: View,
        /// The incarnation that is to stop serving.
        incarnation: Incarnation,
    },
    /// Answers [`Message::RevokeLease`]: the member has stopped serving in this view and all before
    /// it.
    LeaseRevoked {
        /// The view of the request.
        view: View,
        /// The incarnation that has stopped serving.
        incarnation: Incarnation,
    },
    /// The primary begins a view.
    StartViewChange {
        /// The view.
        view: View,
        /// The configuration of its epoch, as stored.
        config: Vec<u8>,
    },
    /// A member has adopted the view, and reports its prepared entries.
    DoViewChange {
        /// The view.
        view: View,
        /// All its entries.
        entries: Vec<PreparedEntry>,
    },
    /// The members are equal: the view is active.
    StartView {
        /// The view.
        view: View,
        /// The last sequence number used by reconciliation: entries up to it are committed.
        last_seq: Seq,
        /// The writes of which any member had an entry: committed.
        committed: Vec<WriteId>,
    },
    /// To out-of-sync replicas: the view is active, join.
    Rejoin {
        /// The view.
        view: View,
    },
    /// A write that the primary is to order.
    WriteRequest {
        /// The view of the sender.
        view: View,
        /// The number of its write id; the origin is the sender.
        number: u64,
        /// The stamp of the sender's latest [`Message::LeaseRequest`] that was granted.
        stamp: ClockStamp,
        /// What to write.
        op: WriteOp,
    },
    /// The write request has got its sequence number.
    OpAssigned {
        /// The view.
        view: View,
        /// The number of its write id.
        number: u64,
        /// Its sequence number.
        seq: Seq,
    },
    /// All other members have applied the write.
    PeersApplied {
        /// The view.
        view: View,
        /// The number of its write id.
        number: u64,
    },
    /// The request came too late: send it again with a new stamp.
    RetryRequest {
        /// The view.
        view: View,
        /// The number of its write id.
        number: u64,
    },
    /// An ordered write, for a member to apply.
    Write {
        /// The view.
        view: View,
        /// Its sequence number.
        seq: Seq,
        /// The id of the write.
        write_id: WriteId,
        /// Whether it copies existing contents instead of writing new ones.
        is_copy: bool,
        /// The operation.
        op: WriteOp,
    },
    /// A member has applied a write.
    Applied {
        /// The view.
        view: View,
        /// Its sequence number.
        seq: Seq,
    },
    /// All members have applied these writes.
    Commit {
        /// The view.
        view: View,
        /// Their sequence numbers.
        seqs: Vec<Seq>,
    },
    /// To the primary: the leg of a member has no space for a write, and may have applied a part.
    /// From the primary to such a member: other members keep the write, so this member's leg has
    /// failed.
    NoSpace {
        /// The view.
        view: View,
        /// The sequence number of the write.
        seq: Seq,
    },
    /// Some members have no space for a write: asks another member for its contents there, and its
    /// free space.
    NoSpaceQuery {
        /// The view.
        view: View,
        /// The sender's number of the request.
        request: u64,
        /// The sequence number of the write.
        seq: Seq,
    },
    /// Answers [`Message::NoSpaceQuery`].
    NoSpaceReport {
        /// The view.
        view: View,
        /// The number of the request.
        request: u64,
        /// Bytes free for this replica; [`u64::MAX`] if unlimited or unknown.
        free_bytes: u64,
        /// The blocks of the write that read as zeroes (first block, count), if the leg has no
        /// space for it: at most [`MAX_REGIONS`](crate::frame::MAX_REGIONS) ranges. Or why they are
        /// unknown.
        zero_blocks: Result<Vec<(u64, u64)>, Error>,
    },
    /// A reader waits for the commit of this write.
    RequestCommit {
        /// The view.
        view: View,
        /// Its sequence number.
        seq: Seq,
    },
    /// A COMPARE AND WRITE that the primary is to execute.
    CompareAndWrite {
        /// The view of the sender.
        view: View,
        /// The number of its write id; the origin is the sender.
        number: u64,
        /// As in [`Message::WriteRequest`].
        stamp: ClockStamp,
        /// The range to compare and write.
        range: Blocks,
        /// Durable when it completes.
        fua: bool,
        /// The expected contents, followed by the new ones of the same length.
        data: Bufs,
    },
    /// Answers [`Message::CompareAndWrite`].
    CompareAndWriteResult {
        /// The view.
        view: View,
        /// The number of the request.
        number: u64,
        /// The outcome.
        outcome: CompareAndWriteOutcome,
    },
    /// Makes completed writes durable.
    Flush {
        /// The view.
        view: View,
        /// The sender's number of the request.
        request: u64,
        /// If not 0, the count of a [`DataGeneration`] of the view's epoch, which the receiver
        /// records durably after the flush and before it answers.
        generation: u32,
    },
    /// Answers [`Message::Flush`].
    Flushed {
        /// The view.
        view: View,
        /// The number of the request.
        request: u64,
    },
    /// Asks for the contents of a range.
    Fetch {
        /// The view.
        view: View,
        /// The sender's number of the request.
        request: u64,
        /// The range to read.
        range: Blocks,
    },
    /// Answers [`Message::Fetch`].
    FetchResult {
        /// The view.
        view: View,
        /// The number of the request.
        request: u64,
        /// The contents, or the error.
        result: Result<Bufs, Error>,
    },
    /// Asks the primary to write a good copy of the range to all members.
    RepairRange {
        /// The view.
        view: View,
        /// The range that could not be read.
        range: Blocks,
    },
    /// An out-of-sync replica asks to be resynced.
    Join {
        /// Identifies the attempt.
        incarnation: Incarnation,
        /// The epoch it has adopted.
        epoch: Epoch,
        /// Size of the volume at the joiner, in bytes.
        volume_bytes: u64,
        /// log2 of the region size of its log in bytes.
        region_shift: u32,
        /// The generations that it has recorded with the primary's image.
        generations: PeerGenerations,
        /// Its dirty bits for the primary's image, one bit per region, least significant first.
        dirty_bits: Vec<u8>,
    },
    /// The resync begins: every write goes to the joiner too from now on.
    JoinAccepted {
        /// The view.
        view: View,
        /// Identifies the attempt.
        incarnation: Incarnation,
        /// The last data generations that the primary has recorded with other images (RFD 0032):
        /// [`MAX_GENERATIONS`](crate::frame::MAX_GENERATIONS) at most.
        generations: Vec<(Uuid, DataGeneration)>,
    },
    /// The join attempt has ended.
    JoinAborted {
        /// Identifies the attempt.
        incarnation: Incarnation,
    },
    /// The dirty bits of these regions may be cleared, for all members.
    ClearRegions {
        /// The view.
        view: View,
        /// The flush, by the sender's number, that made the regions durable everywhere.
        request: u64,
        /// The regions: first byte and length in bytes.
        regions: Vec<(u64, u64)>,
    },
    /// These regions are dirty at a member, and idle: the primary may clear them.
    IdleDirtyRegions {
        /// The view.
        view: View,
        /// The regions: first byte and length in bytes.
        regions: Vec<(u64, u64)>,
    },
    /// To the primary: the sender has had no session with this member for a while.
    PeerUnreachable {
        /// The view.
        view: View,
        /// The member.
        node: NodeId,
    },
    /// Asks for the digest of a range.
    Digest {
        /// The view.
        view: View,
        /// The sender's number of the request.
        request: u64,
        /// The range to read.
        range: Blocks,
    },
    /// Answers [`Message::Digest`].
    DigestResult {
        /// The view.
        view: View,
        /// The number of the request.
        request: u64,
        /// SHA-256 of the contents, or the error.
        result: Result<[u8; 32], Error>,
    },
}

impl Message {
    /// The lane it travels on.
    #[must_use]
    pub fn lane(&self) -> Lane {
        match self {
            Self::Write { .. } | Self::FetchResult { .. } => Lane::Replication,
            Self::WriteRequest { .. } | Self::CompareAndWrite { .. } | Self::Join { .. } => {
                Lane::Requests
            }
            _ => Lane::Control,
        }
    }
}

/// A message that has arrived.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// The message.
    pub message: Message,
    /// Memory that the message needs beyond its payload: present for [`Message::Write`],
    /// [`Message::WriteRequest`] and [`Message::CompareAndWrite`]; for [`Message::FetchResult`] the
    /// posted memory ([`crate::Link::post_receive`]).
    pub ctx: Option<Ctx>,
}
