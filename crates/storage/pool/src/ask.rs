//! What cores that have volumes of a pool ask of the one that keeps its metadata, and what they are told.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use disk::Lease;
use geometry::{Column, RowSet, Scrubbed, Shape};
use raid::{self, Errors};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;
use wire::Text;

use super::error::PoolError;
use super::layout::Layout;
use super::metadata::{Extent, MemberId, Members, Metadata, Piece, Volume, VolumeId};

/// Asks that may wait; whoever asks waits beyond that.
const ASKS: usize = 256;

/// Where the answer goes.
pub(super) type Answer<T> = oneshot::Sender<Result<T, PoolError>>;

/// What a core needs to know of a member.
#[derive(Clone, Debug)]
pub(super) struct MemberInfo {
    pub(super) id: MemberId,
    /// How often one of this number has been let in in this opening: what is said of one that was let in before is not about it.
    pub(super) visit: u64,
    pub(super) uuid: Uuid,
    pub(super) serial: Text,
    pub(super) path: PathBuf,
    pub(super) layout: Layout,
    pub(super) errors: Arc<Errors>,
    /// Until when this machine may use it.
    pub(super) lease: Option<Arc<Lease>>,
}

/// What a core needs to know of a pool.
#[derive(Clone, Debug)]
pub(super) struct PoolInfo {
    pub(super) pool: Uuid,
    /// What it is called.
    pub(super) name: Text,
    /// The era of all rings.
    pub(super) era: u64,
    /// What batches and entries are numbered from that come now: nobody has had such numbers in this era.
    pub(super) first: u64,
    pub(super) buffered: bool,
    /// Those that get what is written.
    pub(super) members: Vec<MemberInfo>,
    pub(super) leaving: Members,
}

/// What a core needs to know of an extent.
#[derive(Clone, Debug)]
pub(super) struct ExtentInfo {
    pub(super) index: u32,
    pub(super) number: u64,
    /// Where its columns are, in rows, and what of each is behind.
    pub(super) columns: Vec<(Piece, u64, u32)>,
    /// Rows of its data that are lost,
    pub(super) lost: RowSet,
    /// and those that a scrub could not repair.
    pub(super) unrepaired: RowSet,
}

impl ExtentInfo {
    pub(super) fn of(metadata: &Metadata, volume: &Volume, index: u32, extent: &Extent) -> Self {
        let columns = (0u16..)
            .zip(&extent.pieces)
            .map(|(n, piece)| (*piece, metadata.row_of(*piece), volume.behind(index, n)));
        let (lost, unrepaired) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        Self { index, number: extent.number, columns: columns.collect(), lost, unrepaired }
    }

    /// The extent in use that is meant.
    pub(super) fn in_use(&self, shape: Shape) -> raid::Extent {
        let columns = self.columns.iter();
        let columns = columns.map(|(piece, at, _)| Column { member: piece.member.0, at: *at });
        let extent = raid::Extent::new(self.number, shape, columns).having_lost(self.lost.clone());
        let extent = extent.having_unrepaired(&self.unrepaired);
        let behind = (0u16..).zip(&self.columns);
        behind.fold(extent, |extent, (n, (_, _, behind))| extent.behind(n, *behind))
    }
}

/// What a core needs to know of a volume.
#[derive(Clone, Debug)]
pub(super) struct VolumeInfo {
    pub(super) id: VolumeId,
    pub(super) shape: Shape,
    pub(super) bytes: u64,
    pub(super) block_size: u32,
    pub(super) thick: bool,
    /// What entries about it are numbered from.
    pub(super) first: u64,
    pub(super) extents: Vec<ExtentInfo>,
}

/// A column of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ColumnAt {
    pub(super) volume: VolumeId,
    pub(super) index: u32,
    pub(super) column: u16,
}

/// What has become of rows of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowsAre {
    /// They are lost.
    Lost,
    /// They were lost, or not repaired, and have been written again.
    Rewritten,
    /// A scrub could not repair them.
    Unrepaired,
}

/// What is asked.
#[derive(Debug)]
pub(super) enum Ask {
    /// To be told of what happens, and what there is now.
    Join { ring: u16, events: mpsc::UnboundedSender<Event>, answer: Answer<PoolInfo> },
    /// Whoever had a ring has left it in order.
    Rise { ring: u16 },
    /// A volume, to be open where this ring is.
    Volume { volume: Uuid, ring: u16, answer: Answer<VolumeInfo> },
    /// A member is out that had been let in so often.
    Out { member: MemberId, visit: u64, answer: Answer<()> },
    /// A member does not answer, as others of these do not: it is to be out, if nothing is lost by that. Says whether it is.
    GiveUp { member: MemberId, visit: u64, silent: Members, answer: Answer<bool> },
    /// A member lags far behind the others, or does not any more.
    Slow { member: MemberId, is_slow: bool },
    /// What is written of an extent, members that are out lack.
    Changed { volume: VolumeId, index: u32, regions: u32, answer: Answer<()> },
    /// An extent, of which there was none.
    Extent { volume: VolumeId, index: u32, answer: Answer<ExtentInfo> },
    /// Bytes that new extents may still have.
    FreeBytes { answer: Answer<u64> },
    /// An extent is not used any more.
    Free { volume: VolumeId, index: u32, answer: Answer<()> },
    /// Another place for a column, with where that is in rows; none if there is none.
    Place { of: ColumnAt, answer: Answer<Option<(Piece, u64)>> },
    /// A column is whole in the place that was given to it. Says whether it counts as being there; with an error nobody knows.
    Moved { of: ColumnAt, to: Piece, answer: Answer<bool> },
    /// It will not be.
    NotMoved { of: ColumnAt },
    /// So many bytes of clients have been read and compared.
    Scrubbed { bytes: u64, found: Scrubbed },
    /// All volumes of a core have been.
    ScrubEnded,
    /// What has become of rows of the data of an extent.
    Rows { volume: VolumeId, index: u32, rows: Range<u32>, are: RowsAre, answer: Answer<()> },
    /// A column lacks nothing any more.
    Caught { of: ColumnAt, answer: Answer<()> },
}

/// What is told.
#[derive(Debug)]
pub(super) enum Event {
    /// A member is out.
    Out(MemberId),
    /// A member gets what is written from now on.
    In(Box<Comes>),
    /// These leave: what they have is to be moved.
    Leaving(Members),
    /// There may be something to be made whole.
    Look,
    /// All is to be read and compared.
    Scrub,
    /// A volume has another size in bytes.
    Grown(Uuid, u64),
    /// A volume that was open is to be open elsewhere, or to be deleted: nothing of it may be written any more, nor looked for
    /// in the parity log. Told when that is so; it is not if the volume is in use.
    Leave(Uuid, oneshot::Sender<()>),
}

/// A member that gets what is written from now on.
#[derive(Debug)]
pub(super) struct Comes {
    pub(super) member: MemberInfo,
    /// What columns on it lack, by number of the extent.
    pub(super) behind: Vec<(u64, u16, u32)>,
    /// Told when it does.
    pub(super) done: oneshot::Sender<()>,
}

/// How other cores reach a pool.
#[derive(Clone, Debug)]
pub struct PoolHandle {
    asks: mpsc::Sender<Ask>,
}

impl PoolHandle {
    /// One, and where what is asked by it arrives.
    pub(super) fn new() -> (Self, mpsc::Receiver<Ask>) {
        let (asks, receiver) = mpsc::channel(ASKS);
        (Self { asks }, receiver)
    }

    /// Asks, and waits for the answer.
    pub(super) async fn ask<T>(&self, ask: impl FnOnce(Answer<T>) -> Ask) -> Result<T, PoolError> {
        let closed = || PoolError::new("the pool is closed");
        let (answer, outcome) = oneshot::channel();
        self.asks.send(ask(answer)).await.map_err(|_| closed())?;
        outcome.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Says something that has no answer.
    pub(super) async fn tell(&self, ask: Ask) {
        // Whoever has closed the pool knows.
        let _ = self.asks.send(ask).await;
    }
}
