//! Jobs in fio's terms, from the command line ([`Job::set`]) or from job files ([`parse`]).
//!
//! A key is supported with fio's meaning, known only to fio and refused by name, or unknown. None
//! is skipped silently. A fio key without effect here, such as the choice of a system call,
//! produces a note.

mod file;
mod keys;

use std::time::Duration;

pub use file::{JobFileError, parse};
pub use keys::{FIO_ONLY, KEYS, Key, key};

/// Direction of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dir {
    /// Read from the target.
    Read,
    /// Write to the target.
    Write,
    /// Free space.
    Trim,
}

impl Dir {
    /// All directions, in fio's order.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Trim];

    /// Its index in [`Self::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Trim => 2,
        }
    }

    /// fio's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["read", "write", "trim"][self.index()]
    }
}

/// Kinds and order of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rw {
    /// With reads.
    pub read: bool,
    /// With writes.
    pub write: bool,
    /// With trims.
    pub trim: bool,
    /// Random order instead of sequential.
    pub random: bool,
}

impl Rw {
    /// Whether there are operations of this direction.
    #[must_use]
    pub fn has(self, dir: Dir) -> bool {
        [self.read, self.write, self.trim][dir.index()]
    }

    /// Whether operations change data.
    #[must_use]
    pub fn changes(self) -> bool {
        self.write || self.trim
    }
}

/// How written data is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// A header, and a CRC-32C of the data behind it.
    Crc32c,
    /// A header, and an MD5 of the data behind it.
    Md5,
    /// A header alone.
    Meta,
    /// The repeated pattern and nothing else.
    Pattern,
}

/// A size, absolute or relative to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// In bytes.
    Bytes(u64),
    /// In hundredths of the target's size.
    Percent(u8),
}

impl Amount {
    /// In bytes, for a target of `size` bytes.
    #[must_use]
    pub fn of(self, size: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(part) => {
                u64::try_from(u128::from(size) * u128::from(part) / 100).unwrap_or(u64::MAX)
            }
        }
    }
}

/// A section of a job file, or the command line. Names are fio's; `[T; 3]` is for reads, writes and
/// trims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub name: String,
    /// URI or path of the target.
    pub filename: Option<String>,
    /// `rw`.
    pub rw: Rw,
    /// `rwmixread`: percentage of reads in a mixed load.
    pub rwmixread: u8,
    /// `bs`, `bsrange`: smallest and largest size of an operation in bytes.
    pub bs: [(u64, u64); 3],
    /// `size`: length of the region used.
    pub size: Option<Amount>,
    /// `offset`: start of that region.
    pub offset: Amount,
    /// `offset_increment`: added to the start for each further one of `numjobs`, in bytes.
    pub offset_increment: u64,
    /// `io_size`: bytes to transfer in all; `size` if not given.
    pub io_size: Option<u64>,
    /// `iodepth`: operations kept in flight.
    pub iodepth: u32,
    /// `numjobs`: how many copies run at the same time.
    pub numjobs: u32,
    /// `runtime`: when it ends, not counting [`Self::ramp_time`].
    pub runtime: Option<Duration>,
    /// `time_based`: run for the whole `runtime`, regardless of the size.
    pub time_based: bool,
    /// `ramp_time`: how long it runs before the measurement starts.
    pub ramp_time: Duration,
    /// `rate`: maximum bytes per second.
    pub rate: [Option<u64>; 3],
    /// `rate_iops`: maximum operations per second.
    pub rate_iops: [Option<u64>; 3],
    /// `fsync`, `fdatasync`: flush after this many writes; 0: never.
    pub fsync: u32,
    /// `end_fsync`: a flush at the end.
    pub end_fsync: bool,
    /// `direct`: bypass the page cache of this machine.
    pub direct: bool,
    /// `verify`.
    pub verify: Option<Verify>,
    /// `verify_pattern`.
    pub verify_pattern: Vec<u8>,
    /// `do_verify`: read all written data again at the end.
    pub do_verify: bool,
    /// `norandommap`: random offsets may repeat.
    pub norandommap: bool,
    /// `randseed`; with [`Self::randrepeat`] each run is the same.
    pub randseed: Option<u64>,
    /// `randrepeat`.
    pub randrepeat: bool,
    /// `group_reporting`: report all `numjobs` as one.
    pub group_reporting: bool,
    /// `loops`: how often it runs.
    pub loops: u64,
    /// `stonewall`: start after the jobs before it have ended.
    pub stonewall: bool,
    /// Keys that were set but have no effect here, and why.
    pub notes: Vec<String>,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            name: "bench".to_owned(),
            filename: None,
            rw: Rw { read: true, write: false, trim: false, random: false },
            rwmixread: 50,
            bs: [(4096, 4096); 3],
            size: None,
            offset: Amount::Bytes(0),
            offset_increment: 0,
            io_size: None,
            iodepth: 1,
            numjobs: 1,
            runtime: None,
            time_based: false,
            ramp_time: Duration::ZERO,
            rate: [None; 3],
            rate_iops: [None; 3],
            fsync: 0,
            end_fsync: false,
            direct: true,
            verify: None,
            verify_pattern: Vec::new(),
            do_verify: true,
            norandommap: false,
            randseed: None,
            randrepeat: true,
            group_reporting: false,
            loops: 1,
            stonewall: false,
            notes: Vec::new(),
        }
    }
}

/// Why a key cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Known only to fio.
    #[error("{0}: a key of fio that windrose bench does not support")]
    UnsupportedFioKey(String),
    /// Unknown.
    #[error("{0}: unknown key")]
    Unknown(String),
    /// Invalid value.
    #[error("{key}: {why}")]
    Value {
        /// Which key.
        key: &'static str,
        /// What is wrong.
        why: String,
    },
    /// It needs a value.
    #[error("{0} needs a value: {0}={1}")]
    MissingValue(&'static str, &'static str),
}

impl Job {
    /// Sets one key, named as in a job file or on the command line; `None` for one without a value.
    ///
    /// # Errors
    /// [`KeyError`]; nothing is set then.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> Result<(), KeyError> {
        let Some(key) = key(name) else {
            let known = FIO_ONLY.contains(&name);
            let name: String = name.chars().take(64).collect();
            return Err(if known {
                KeyError::UnsupportedFioKey(name)
            } else {
                KeyError::Unknown(name)
            });
        };
        let value =
            value.or(key.default_when_bare).ok_or(KeyError::MissingValue(key.name, key.value))?;
        (key.set)(self, value.trim()).map_err(|why| KeyError::Value { key: key.name, why })
    }
}

#[cfg(test)]
mod tests;
