//! Properties and faults of a simulated disk, and faults of a host.

use std::ops::Range;
use std::time::Duration;

use super::medium::TornDamage;
use crate::disk_file::{DiskErrorKind, DiskKind};

/// Properties of a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskSetup {
    /// Size in bytes.
    pub bytes: u64,
    /// Addresses and lengths are multiples of this many bytes: 512 or 4096.
    pub logical_block: u32,
    /// Atomic unit at a power cut, in bytes; a multiple of `logical_block`.
    pub physical_block: u32,
    /// File or block device.
    pub kind: DiskKind,
    /// Whether ranges can be freed.
    pub can_punch: bool,
    /// Whether ranges can be zeroed without writing.
    pub can_zero: bool,
    /// Whether it can be opened for direct I/O.
    pub direct_io: bool,
    /// Its serial number, if it has one.
    pub serial: String,
    /// Its faults.
    pub faults: DiskFaults,
}

impl DiskSetup {
    /// A faultless block device of `bytes` with 512-byte blocks on 4 KiB sectors.
    #[must_use]
    pub fn device(bytes: u64) -> Self {
        Self {
            bytes,
            logical_block: 512,
            physical_block: 4096,
            kind: DiskKind::BlockDevice,
            can_punch: true,
            can_zero: true,
            direct_io: true,
            serial: String::new(),
            faults: DiskFaults::default(),
        }
    }

    /// A faultless sparse file of `bytes`.
    #[must_use]
    pub fn file(bytes: u64) -> Self {
        Self { kind: DiskKind::File, ..Self::device(bytes) }
    }

    /// The same with these faults.
    #[must_use]
    pub fn faults(mut self, faults: DiskFaults) -> Self {
        self.faults = faults;
        self
    }

    /// The same with blocks of these sizes.
    #[must_use]
    pub fn blocks(mut self, logical: u32, physical: u32) -> Self {
        (self.logical_block, self.physical_block) = (logical, physical);
        self
    }
}

/// Random faults of a disk. Probabilities are per operation unless stated otherwise; all are 0 by
/// default, so that a disk only loses what it may lose: changes that were not synced when the power
/// failed.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskFaults {
    /// How long an operation takes.
    pub latency: Latency,
    /// What happens at power loss to changes that were not synced.
    pub unsynced: UnsyncedFate,
    /// Probability, per unit with unsynced changes, of being torn by a power cut. Damages whole
    /// physical blocks, which the contract of [`Core`](crate::Core)'s disks does not allow: for
    /// layers that promise to survive it.
    pub torn: f64,
    /// The damage of a torn unit.
    pub torn_damage: TornDamage,
    /// A read fails once with a medium error.
    pub read_error: f64,
    /// A write fails once with a medium error; each unit then holds old or new contents.
    pub write_error: f64,
    /// A sync fails; the changes that it covers may be lost, and no later sync makes them durable.
    pub sync_error: f64,
    /// A bit of the data read is flipped on the medium, permanently.
    pub bit_rot: f64,
    /// A read returns data from another address.
    pub misdirected_read: f64,
    /// A write goes to another address.
    pub misdirected_write: f64,
    /// A write is acknowledged and not done.
    pub lost_write: f64,
    /// An operation takes [`Self::stall_for`] longer.
    pub stall: f64,
    /// How long a stall is.
    pub stall_for: Duration,
    /// One operation, of any kind, fails like this after so many others: for tests that let every
    /// operation of a procedure fail in turn. `None` once it has happened.
    pub fail_after: Option<(u64, DiskErrorKind)>,
}

impl Default for DiskFaults {
    fn default() -> Self {
        Self {
            latency: Latency::default(),
            unsynced: UnsyncedFate::Random,
            torn: 0.0,
            torn_damage: TornDamage::Garbage,
            read_error: 0.0,
            write_error: 0.0,
            sync_error: 0.0,
            bit_rot: 0.0,
            misdirected_read: 0.0,
            misdirected_write: 0.0,
            lost_write: 0.0,
            stall: 0.0,
            stall_for: Duration::from_secs(30),
            fail_after: None,
        }
    }
}

/// How long operations take, in whole milliseconds of virtual time (the resolution of tokio's
/// timers; nothing in a simulation depends on real speed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// The fastest.
    pub min: Duration,
    /// The slowest, except for outliers.
    pub max: Duration,
    /// One in so many operations takes up to ten times `max`; 0: none.
    pub outlier_every: u32,
}

impl Default for Latency {
    fn default() -> Self {
        Self { min: Duration::from_millis(1), max: Duration::from_millis(8), outlier_every: 32 }
    }
}

/// What happens at power loss to changes that were not synced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnsyncedFate {
    /// The seed decides for each power cut how much is lost (nothing, everything, or a share), and
    /// then for each change.
    #[default]
    Random,
    /// All of it reached the medium.
    Kept,
    /// None of it did.
    Lost,
}

/// A bad range of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRange {
    /// The range; an operation that touches it fails.
    pub bytes: Range<u64>,
    /// Which operations.
    pub ops: FailingOps,
    /// For how long.
    pub duration: BadDuration,
}

/// Which operations fail on a bad range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailingOps {
    /// Reads.
    Reads,
    /// Writes, zeroes and punches.
    Writes,
    /// All of these.
    Both,
}

impl FailingOps {
    pub(crate) fn covers(self, writes: bool) -> bool {
        match self {
            Self::Reads => !writes,
            Self::Writes => writes,
            Self::Both => true,
        }
    }
}

/// How long a range stays bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadDuration {
    /// For ever.
    Forever,
    /// Until all of it is rewritten: the disk then uses spare sectors.
    Rewritten,
    /// For so many failures.
    Times(u32),
}

/// Random faults of a host; none by default. Each kind is drawn from a stream of its own, and
/// disabled kinds draw nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFaults {
    /// Most that its clock ([`crate::Core::now`]) runs fast or slow, in parts per million of true
    /// time, up to 1,000,000. 0: its rate is unchanged.
    pub max_drift_ppm: u32,
    /// Longest time until the clock's rate changes again; zero: the rate is constant.
    pub max_drift_duration: Duration,
    /// Longest time from one pause of its process ([`crate::sim::Host::pause`]) to the next; zero:
    /// no pauses.
    pub max_pause_interval: Duration,
    /// Longest pause.
    pub max_pause_duration: Duration,
}
