//! Reports of a core, in a form that crosses threads.

use block::Access;
use mirror::MirrorStatus;
use rt::buf::PoolUsage;
use target::server::{ClientReport, SessionInfo};
use uuid::Uuid;
use volume::{CommandKind, CommandStats, VolumeStats};

use super::guests::GuestReport;

/// Upper bounds of the reported latency buckets, in microseconds.
pub const LATENCY_BOUNDS_US: [u64; 13] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000,
];

/// What to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportScope {
    /// No volume.
    None,
    /// One volume.
    One(Uuid),
    /// All volumes.
    All,
    /// All volumes, with latencies.
    AllWithLatency,
}

impl ReportScope {
    pub(super) fn includes(self, id: Uuid) -> bool {
        match self {
            Self::None => false,
            Self::One(one) => one == id,
            Self::All | Self::AllWithLatency => true,
        }
    }
}

/// What a core does.
#[derive(Clone, Debug)]
pub struct CoreReport {
    /// Which core.
    pub core: usize,
    /// Its connections.
    pub sessions: Vec<SessionInfo>,
    /// Virtual machines that use its volumes.
    pub guests: Vec<GuestReport>,
    /// Connections it refused since the start.
    pub refused_connections: u64,
    /// Anomalies of its clients.
    pub clients: ClientReport,
    /// Its buffer memory.
    pub memory: PoolUsage,
    /// Its volumes.
    pub volumes: Vec<VolumeReport>,
}

/// What an open volume has done.
#[derive(Clone, Debug)]
pub struct VolumeReport {
    /// Which volume.
    pub id: Uuid,
    /// By kind of command, in the order of [`CommandKind::ALL`].
    pub kinds: [CommandKindReport; 4],
    /// Commands in flight.
    pub in_flight: u64,
    /// Commands that were asked to abort.
    pub aborts: u64,
    /// Commands that waited for an overlapping one.
    pub overlaps: u64,
    /// Commands that waited for buffer memory.
    pub memory_waits: u64,
    /// The state of its mirror, in a cluster.
    pub mirror: Option<MirrorReport>,
    /// Set if another machine took over its image; says who, and that the image is no longer used.
    pub claim_lost: Option<String>,
    /// Whether a sync of its disk failed or the disk is gone: the volume does no I/O until it is
    /// reopened.
    pub is_dead: bool,
    /// Why its reservations cannot be read; initiators' commands are refused meanwhile.
    pub reservations_error: Option<block::Error>,
}

/// The state of a volume's replica on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorReport {
    /// Its mirror's status.
    pub status: MirrorStatus,
    /// The access state of the volume through this node.
    pub access: Access,
}

/// Statistics of an open volume, for one kind of command.
#[derive(Clone, Debug, Default)]
pub struct CommandKindReport {
    /// Commands completed, failed ones included.
    pub completed: u64,
    /// Commands that failed.
    pub failed: u64,
    /// Those of them that failed for lack of space.
    pub without_space: u64,
    /// Payload in bytes.
    pub bytes: u64,
    /// Latencies, if requested and there are any.
    pub latency: Option<LatencyHistogram>,
}

/// A cumulative latency histogram.
#[derive(Clone, Copy, Debug)]
pub struct LatencyHistogram {
    /// Commands no slower than the bound at the same index of [`LATENCY_BOUNDS_US`].
    pub cumulative: [u64; LATENCY_BOUNDS_US.len()],
    /// All commands.
    pub count: u64,
    /// Sum of their latencies, in seconds.
    pub sum_s: f64,
}

impl VolumeReport {
    pub(super) fn new(
        id: Uuid,
        stats: &VolumeStats,
        mirror: Option<MirrorReport>,
        scope: ReportScope,
    ) -> Self {
        let in_full = scope == ReportScope::AllWithLatency;
        Self {
            id,
            kinds: CommandKind::ALL
                .map(|kind| CommandKindReport::new(&stats.kinds[kind as usize], in_full)),
            in_flight: stats.in_flight,
            aborts: stats.aborts,
            overlaps: stats.range_waits,
            memory_waits: stats.memory_waits,
            mirror,
            claim_lost: None,
            is_dead: false,
            reservations_error: None,
        }
    }

    /// Statistics for one kind of command.
    #[must_use]
    pub fn kind(&self, kind: CommandKind) -> &CommandKindReport {
        &self.kinds[kind as usize]
    }
}

impl CommandKindReport {
    fn new(stats: &CommandStats, in_full: bool) -> Self {
        Self {
            completed: stats.completed,
            failed: stats.failed,
            without_space: stats.no_space_failures,
            bytes: stats.bytes,
            latency: stats.latency_us.as_ref().filter(|_| in_full).map(|h| LatencyHistogram {
                cumulative: LATENCY_BOUNDS_US.map(|bound| h.count_between(0, bound)),
                count: h.len(),
                sum_s: stats.total_latency.as_secs_f64(),
            }),
        }
    }
}
