//! What a core tells of itself, in a form that crosses threads.

use block::Access;
use mirror::Status;
use rt::buf::Usage;
use target::server::{Clients, Session};
use uuid::Uuid;
use volume::{Kind, KindStats, Snapshot};

use super::guests::GuestReport;

/// Upper bounds of the latency classes that are told, in microseconds.
pub const LATENCY_BOUNDS_US: [u64; 13] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000,
];

/// What is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// No volume.
    None,
    /// One volume.
    One(Uuid),
    /// All volumes.
    All,
    /// All volumes, with latencies.
    InFull,
}

impl Scope {
    pub(super) fn covers(self, id: Uuid) -> bool {
        match self {
            Self::None => false,
            Self::One(one) => one == id,
            Self::All | Self::InFull => true,
        }
    }
}

/// What a core does.
#[derive(Clone, Debug)]
pub struct CoreReport {
    /// Which core.
    pub core: usize,
    /// Its connections.
    pub sessions: Vec<Session>,
    /// Virtual machines that use its volumes.
    pub guests: Vec<GuestReport>,
    /// Connections it refused since the start.
    pub refused: u64,
    /// What is odd about its clients.
    pub clients: Clients,
    /// Its buffer pool.
    pub pool: Usage,
    /// Its volumes.
    pub volumes: Vec<VolumeReport>,
}

/// What an open volume has done.
#[derive(Clone, Debug)]
pub struct VolumeReport {
    /// Which volume.
    pub id: Uuid,
    /// By kind of command, in the order of [`Kind::ALL`].
    pub kinds: [KindReport; 4],
    /// Commands in flight.
    pub in_flight: u64,
    /// Commands that were asked to abort.
    pub aborts: u64,
    /// Commands that waited for an overlapping one.
    pub overlaps: u64,
    /// Commands that waited for buffer memory.
    pub memory_waits: u64,
    /// What its mirror says of itself, in a cluster.
    pub mirror: Option<MirrorReport>,
    /// Who has taken its image, and that it is used no more, if another machine has.
    pub lost: Option<String>,
    /// Whether a sync of its disk has failed, or that is gone: nothing is read or written any more before it is opened
    /// anew.
    pub is_dead: bool,
    /// Why its reservations cannot be read, if they cannot: its initiators' commands are refused.
    pub reservations: Option<block::Error>,
}

/// What the replica of a volume on this node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorReport {
    /// Its part in the volume.
    pub status: Status,
    /// How the volume is to be used through this node.
    pub access: Access,
}

/// What an open volume has done, of one kind.
#[derive(Clone, Debug, Default)]
pub struct KindReport {
    /// Commands completed, failed ones included.
    pub completed: u64,
    /// Commands that failed.
    pub failed: u64,
    /// Those of them that failed for want of space.
    pub without_space: u64,
    /// Payload in bytes.
    pub bytes: u64,
    /// Latencies, where they were asked for and there are any.
    pub latency: Option<Histogram>,
}

/// Latencies in classes.
#[derive(Clone, Copy, Debug)]
pub struct Histogram {
    /// Commands no slower than the bound of the same place in [`LATENCY_BOUNDS_US`]; those of
    /// lower bounds included.
    pub at_most: [u64; LATENCY_BOUNDS_US.len()],
    /// All commands.
    pub count: u64,
    /// Sum of their latencies in seconds.
    pub sum_s: f64,
}

impl VolumeReport {
    pub(super) fn new(
        id: Uuid,
        stats: &Snapshot,
        mirror: Option<MirrorReport>,
        scope: Scope,
    ) -> Self {
        let in_full = scope == Scope::InFull;
        Self {
            id,
            kinds: Kind::ALL.map(|kind| KindReport::new(&stats.kinds[kind as usize], in_full)),
            in_flight: stats.in_flight,
            aborts: stats.aborts,
            overlaps: stats.overlaps,
            memory_waits: stats.memory_waits,
            mirror,
            lost: None,
            is_dead: false,
            reservations: None,
        }
    }

    /// What it has done, of one kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> &KindReport {
        &self.kinds[kind as usize]
    }
}

impl KindReport {
    fn new(stats: &KindStats, in_full: bool) -> Self {
        Self {
            completed: stats.completed,
            failed: stats.failed,
            without_space: stats.without_space,
            bytes: stats.bytes,
            latency: stats.latency_us.as_ref().filter(|_| in_full).map(|h| Histogram {
                at_most: LATENCY_BOUNDS_US.map(|bound| h.count_between(0, bound)),
                count: h.len(),
                sum_s: stats.total.as_secs_f64(),
            }),
        }
    }
}
