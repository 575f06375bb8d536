//! Requests that cores send to the owner core of a pool, and the events that it sends them.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use disk::DiskLease;
use geometry::{Column, RaidGeometry, RowSet, ScrubResult};
use pool_metadata::{
    MemberId, MemberSet, Metadata, PhysicalExtent, PoolExtent, PoolVolume, PoolVolumeId,
};
use raid::{self, DiskCounters};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;
use wire::ShortText;

use super::error::PoolError;
use super::member_layout::MemberLayout;

/// Length of the request queue; senders wait while it is full.
const REQUEST_QUEUE_DEPTH: usize = 256;

/// Where the reply goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, PoolError>>;

/// What a core needs to know of a member.
#[derive(Clone, Debug)]
pub(super) struct MemberInfo {
    pub(super) id: MemberId,
    /// How often admission of this member was attempted in this term: reports about an earlier
    /// admission are ignored.
    pub(super) join_generation: u64,
    pub(super) uuid: Uuid,
    pub(super) serial: ShortText,
    pub(super) path: PathBuf,
    pub(super) layout: MemberLayout,
    pub(super) counters: Arc<DiskCounters>,
    /// Until when this node may use it.
    pub(super) lease: Option<Arc<DiskLease>>,
}

/// What a core needs to know of a pool.
#[derive(Clone, Debug)]
pub(super) struct PoolInfo {
    pub(super) pool: Uuid,
    /// Its name.
    pub(super) name: ShortText,
    /// The log generation of all rings.
    pub(super) log_generation: u64,
    /// The first number for new batches and entries: neither it nor a higher one was used in this
    /// log generation.
    pub(super) first_number: u64,
    pub(super) buffered: bool,
    /// The attached members.
    pub(super) members: Vec<MemberInfo>,
    pub(super) draining: MemberSet,
}

/// What a core needs to know of an extent.
#[derive(Clone, Debug)]
pub(super) struct ExtentInfo {
    pub(super) index: u32,
    pub(super) extent_number: u64,
    /// The physical extent, first row and stale regions of each column.
    pub(super) columns: Vec<(PhysicalExtent, u64, u32)>,
    /// Lost rows of its data.
    pub(super) lost_rows: RowSet,
    /// Rows that a scrub could not repair.
    pub(super) unrepaired_rows: RowSet,
}

impl ExtentInfo {
    pub(super) fn from_metadata(
        metadata: &Metadata,
        volume: &PoolVolume,
        index: u32,
        extent: &PoolExtent,
    ) -> Self {
        let columns = (0u16..)
            .zip(&extent.columns)
            .map(|(n, at)| (*at, metadata.first_row_of(*at), volume.stale_regions_of(index, n)));
        let (lost, unrepaired) = (volume.lost_rows(index), volume.unrepaired_rows(index));
        Self {
            index,
            extent_number: extent.number,
            columns: columns.collect(),
            lost_rows: lost,
            unrepaired_rows: unrepaired,
        }
    }

    /// The extent as the array uses it.
    pub(super) fn to_raid_extent(&self, geometry: RaidGeometry) -> raid::Extent {
        let columns = self.columns.iter();
        let columns = columns.map(|(location, first_row, _)| Column {
            member: location.member.0,
            first_row: *first_row,
        });
        let extent = raid::Extent::new(self.extent_number, geometry, columns)
            .with_lost_rows(self.lost_rows.clone());
        let extent = extent.with_unrepaired_rows(&self.unrepaired_rows);
        let columns = (0u16..).zip(&self.columns);
        columns.fold(extent, |extent, (n, (_, _, stale_regions))| {
            extent.with_stale_regions(n, *stale_regions)
        })
    }
}

/// What a core needs to know of a volume.
#[derive(Clone, Debug)]
pub(super) struct VolumeInfo {
    pub(super) id: PoolVolumeId,
    pub(super) geometry: RaidGeometry,
    pub(super) size_bytes: u64,
    pub(super) block_size: u32,
    pub(super) is_thick: bool,
    /// The first number for entries about it.
    pub(super) first_number: u64,
    pub(super) extents: Vec<ExtentInfo>,
}

/// A column of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ColumnId {
    pub(super) volume: PoolVolumeId,
    pub(super) index: u32,
    pub(super) column: u16,
}

/// What has happened to rows of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowDamage {
    /// They are lost.
    Lost,
    /// They were lost, or not repaired, and have been rewritten.
    Rewritten,
    /// A scrub could not repair them.
    Unrepaired,
}

/// A request to the owner core.
#[derive(Debug)]
pub(super) enum PoolRequest {
    /// Attaches a core: it gets events from now on, and the pool as it is now.
    Attach { ring: u16, events: mpsc::UnboundedSender<PoolEvent>, reply: Reply<PoolInfo> },
    /// The core of this ring has detached in order.
    Detach { ring: u16 },
    /// Opens a volume on the core of this ring.
    OpenVolume { volume: Uuid, ring: u16, reply: Reply<VolumeInfo> },
    /// A member of this join generation failed: detach it.
    DetachMember { member: MemberId, join_generation: u64, reply: Reply<()> },
    /// A member does not answer, like these others: detach it, if no data are lost by that. Returns
    /// whether it is detached.
    DetachUnresponsive {
        member: MemberId,
        join_generation: u64,
        unresponsive: MemberSet,
        reply: Reply<bool>,
    },
    /// A member lags far behind the others, or does so no longer.
    SetSlow { member: MemberId, is_slow: bool },
    /// Regions of an extent are written that detached members miss.
    MarkStale { volume: PoolVolumeId, index: u32, regions: u32, reply: Reply<()> },
    /// Allocates an extent.
    AllocateExtent { volume: PoolVolumeId, index: u32, reply: Reply<ExtentInfo> },
    /// Bytes that can still be allocated.
    FreeBytes { reply: Reply<u64> },
    /// Frees an extent.
    FreeExtent { volume: PoolVolumeId, index: u32, reply: Reply<()> },
    /// Reserves a target for a column; returns it with its first row, or `None` if there is none.
    ReserveColumnTarget { column: ColumnId, reply: Reply<Option<(PhysicalExtent, u64)>> },
    /// The target holds a complete copy of the column. Returns whether the move is committed; on an
    /// error that is unknown.
    CommitMove { column: ColumnId, to: PhysicalExtent, reply: Reply<bool> },
    /// The column will not be moved.
    CancelMove { column: ColumnId },
    /// So many bytes of clients have been scrubbed.
    ScrubProgress { bytes: u64, found: ScrubResult },
    /// All volumes of a core have been scrubbed.
    ScrubEnded,
    /// Records what has happened to rows of an extent's data.
    RecordRows {
        volume: PoolVolumeId,
        index: u32,
        rows: Range<u32>,
        damage: RowDamage,
        reply: Reply<()>,
    },
    /// A column is up to date again.
    ClearStale { column: ColumnId, reply: Reply<()> },
}

/// An event for the cores of a pool.
#[derive(Debug)]
pub(super) enum PoolEvent {
    /// A member is detached.
    MemberDetached(MemberId),
    /// A member gets writes from now on.
    AdmitMember(Box<Admission>),
    /// These members are draining: move their columns.
    DrainingChanged(MemberSet),
    /// Columns may have to be rebuilt.
    MaintenanceDue,
    /// Scrub all volumes.
    StartScrub,
    /// A volume has another size in bytes.
    VolumeGrown(Uuid, u64),
    /// A volume that was open will be opened elsewhere or deleted: write nothing of it any more,
    /// and drain its entries from the parity log. Answered when that is done; not if the volume is
    /// in use.
    ReleaseVolume(Uuid, oneshot::Sender<()>),
}

/// A member that gets writes from now on.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) member: MemberInfo,
    /// Stale regions of its columns: extent number, column, regions.
    pub(super) stale_regions: Vec<(u64, u16, u32)>,
    /// Answered when this core writes to it.
    pub(super) done: oneshot::Sender<()>,
}

/// The handle by which cores send requests to a pool.
#[derive(Clone, Debug)]
pub struct PoolHandle {
    requests: mpsc::Sender<PoolRequest>,
}

impl PoolHandle {
    /// A handle, and the receiver of its requests.
    pub(super) fn new() -> (Self, mpsc::Receiver<PoolRequest>) {
        let (requests, receiver) = mpsc::channel(REQUEST_QUEUE_DEPTH);
        (Self { requests }, receiver)
    }

    /// Sends a request, and waits for the reply.
    pub(super) async fn request<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> PoolRequest,
    ) -> Result<T, PoolError> {
        let closed = || PoolError::new("the pool is closed");
        let (reply, outcome) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| closed())?;
        outcome.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Sends a request that has no reply.
    pub(super) async fn notify(&self, request: PoolRequest) {
        // If the pool is closed, the request is of no use.
        let _ = self.requests.send(request).await;
    }
}
