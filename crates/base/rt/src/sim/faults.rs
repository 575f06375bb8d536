//! What a simulated disk is and how it misbehaves, and how a host does.

use std::ops::Range;
use std::time::Duration;

use super::medium::Damage;
use crate::disk::{DiskErrorKind, DiskKind};

/// A disk as the scenario builds it.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskSetup {
    /// Size in bytes.
    pub bytes: u64,
    /// Addresses and lengths are multiples of this many bytes: 512 or 4096.
    pub logical_block: u32,
    /// What survives a power cut whole, in bytes; a multiple of `logical_block`.
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
    /// How it misbehaves.
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

    /// A faultless file of `bytes` with nothing behind it.
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

/// How a disk misbehaves by itself. Probabilities are per operation unless it says otherwise; all
/// of them are 0 by default, so that a disk only loses what it is allowed to lose: changes that
/// were not synced when the power failed.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskFaults {
    /// How long an operation takes.
    pub latency: Latency,
    /// What happens at power loss to changes that were not synced.
    pub unsynced: Unsynced,
    /// Probability, per unit with unsynced changes, of being written at the moment of a power
    /// cut. Damages whole physical blocks, which the contract of the seam does not allow: for
    /// layers that promise to survive it.
    pub torn: f64,
    /// What being written at that moment does to a unit.
    pub damage: Damage,
    /// A read fails once with a medium error.
    pub read_error: f64,
    /// A write fails once with a medium error; each unit then holds old or new contents.
    pub write_error: f64,
    /// A sync fails; what it should have made durable may be lost, and no later sync brings it
    /// back.
    pub sync_error: f64,
    /// One bit of what is read is wrong on the medium, from then on.
    pub bit_rot: f64,
    /// A read returns data from another place.
    pub misdirected_read: f64,
    /// A write goes to another place.
    pub misdirected_write: f64,
    /// A write is acknowledged and never done.
    pub lost_write: f64,
    /// An operation takes [`Self::stall_for`] longer.
    pub stall: f64,
    /// How long a stall is.
    pub stall_for: Duration,
    /// One operation, whatever it is, fails like this after so many were spared: for tests that
    /// let every operation of a procedure fail in turn. `None` once it has struck.
    pub fail_after: Option<(u64, DiskErrorKind)>,
}

impl Default for DiskFaults {
    fn default() -> Self {
        Self {
            latency: Latency::default(),
            unsynced: Unsynced::Drawn,
            torn: 0.0,
            damage: Damage::Garbage,
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
    /// The slowest of the usual ones.
    pub max: Duration,
    /// One in so many takes up to ten times `max`; 0: none does.
    pub outlier_every: u32,
}

impl Default for Latency {
    fn default() -> Self {
        Self { min: Duration::from_millis(1), max: Duration::from_millis(8), outlier_every: 32 }
    }
}

/// What happens at power loss to changes that were not synced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unsynced {
    /// The seed decides for each power cut how much is lost (nothing, everything, or a share),
    /// and then change by change.
    #[default]
    Drawn,
    /// All of it reached the medium.
    Kept,
    /// None of it did.
    Lost,
}

/// A bad place on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bad {
    /// Which bytes; an operation that touches any of them fails.
    pub bytes: Range<u64>,
    /// Which operations.
    pub ops: BadOps,
    /// For how long.
    pub until: BadUntil,
}

/// Which operations fail on a bad place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadOps {
    /// Reads.
    Reads,
    /// Writes, zeroes and punches.
    Writes,
    /// All of these.
    Both,
}

impl BadOps {
    pub(crate) fn covers(self, writes: bool) -> bool {
        match self {
            Self::Reads => !writes,
            Self::Writes => writes,
            Self::Both => true,
        }
    }
}

/// How long a bad place stays bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadUntil {
    /// For ever.
    Forever,
    /// Until somebody writes to all of it: the disk then uses a spare sector.
    Rewritten,
    /// For so many failures.
    Times(u32),
}

/// How a host misbehaves by itself; not at all by default. Everything is drawn from streams of the
/// host's own, and what is off draws nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFaults {
    /// Most that its clock ([`crate::Core::now`]) is fast or slow, in parts per million of true
    /// time, up to 1,000,000. 0: its rate is left alone.
    pub drift_ppm: u32,
    /// Longest time until the clock's rate changes again; zero: one rate for ever.
    pub drift_for: Duration,
    /// Longest time from one pause of its process ([`crate::sim::Host::pause`]) to the next; zero:
    /// none.
    pub pause_every: Duration,
    /// Longest pause.
    pub pause_for: Duration,
}
