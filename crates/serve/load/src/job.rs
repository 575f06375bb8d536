//! What is to be done, in fio's terms: from the command line ([`Job::set`]) or from job files ([`parse`]).
//!
//! A key is one of three: known here, with fio's meaning; known to fio, and refused by its name; or nobody's.
//! None is passed over. What of fio's has no effect here, such as which system call it uses, is told as a note.

mod file;
mod keys;

use std::time::Duration;

pub use file::{BadFile, parse};
pub use keys::{FIO_ONLY, KEYS, Key, key};

/// Which way an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dir {
    /// From the target.
    Read,
    /// To the target.
    Write,
    /// Space is given back.
    Trim,
}

impl Dir {
    /// All of them, in fio's order.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Trim];

    /// Its place in [`Self::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Trim => 2,
        }
    }

    /// As fio calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["read", "write", "trim"][self.index()]
    }
}

/// Which operations, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rw {
    /// Reads are among them.
    pub read: bool,
    /// Writes are among them.
    pub write: bool,
    /// Trims are among them.
    pub trim: bool,
    /// Anywhere, in place of one after the other.
    pub random: bool,
}

impl Rw {
    /// Whether there are operations of this direction.
    #[must_use]
    pub fn has(self, dir: Dir) -> bool {
        [self.read, self.write, self.trim][dir.index()]
    }

    /// Whether contents change.
    #[must_use]
    pub fn changes(self) -> bool {
        self.write || self.trim
    }
}

/// How what was written is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// A header, and a CRC-32C of the data behind it.
    Crc32c,
    /// A header, and an MD5 of the data behind it.
    Md5,
    /// A header alone.
    Meta,
    /// The pattern, again and again, and nothing else.
    Pattern,
}

/// An amount of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// In bytes.
    Bytes(u64),
    /// In hundredths of the target's size.
    Percent(u8),
}

impl Amount {
    /// Of a target of `size` bytes.
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

/// A section of a job file, or the command line. Names are fio's; `[T; 3]` is for reads, writes and trims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// What it is called.
    pub name: String,
    /// URI or path of the target.
    pub filename: Option<String>,
    /// `rw`.
    pub rw: Rw,
    /// `rwmixread`: of a hundred operations of a mixed load, so many are reads.
    pub rwmixread: u8,
    /// `bs`, `bsrange`: smallest and largest size of an operation in bytes.
    pub bs: [(u64, u64); 3],
    /// `size`: length of the part that is used.
    pub size: Option<Amount>,
    /// `offset`: where that part begins.
    pub offset: Amount,
    /// `offset_increment`: how much further it begins for each next one of `numjobs`, in bytes.
    pub offset_increment: u64,
    /// `io_size`: how much is moved in all; the size if not given.
    pub io_size: Option<u64>,
    /// `iodepth`: operations kept in flight.
    pub iodepth: u32,
    /// `numjobs`: how many do this at the same time.
    pub numjobs: u32,
    /// `runtime`: after how long it ends, [`Self::ramp_time`] not counted.
    pub runtime: Option<Duration>,
    /// `time_based`: it goes on until then, whatever the size is.
    pub time_based: bool,
    /// `ramp_time`: how long it runs before anything counts.
    pub ramp_time: Duration,
    /// `rate`: bytes per second at most.
    pub rate: [Option<u64>; 3],
    /// `rate_iops`: operations per second at most.
    pub rate_iops: [Option<u64>; 3],
    /// `fsync`, `fdatasync`: a flush behind so many writes; 0 for none.
    pub fsync: u32,
    /// `end_fsync`: a flush at the end.
    pub end_fsync: bool,
    /// `direct`: past the page cache of this machine.
    pub direct: bool,
    /// `verify`.
    pub verify: Option<Verify>,
    /// `verify_pattern`.
    pub verify_pattern: Vec<u8>,
    /// `do_verify`: what was written is read again at the end.
    pub do_verify: bool,
    /// `norandommap`: random places are drawn without regard to those before.
    pub norandommap: bool,
    /// `randseed`; with [`Self::randrepeat`] each run does the same.
    pub randseed: Option<u64>,
    /// `randrepeat`.
    pub randrepeat: bool,
    /// `group_reporting`: those of `numjobs` are reported as one.
    pub group_reporting: bool,
    /// `loops`: how often it is done.
    pub loops: u64,
    /// `stonewall`: it begins when those before it have ended.
    pub stonewall: bool,
    /// What was set that has no effect here, and why.
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
pub enum BadKey {
    /// fio knows it.
    #[error("{0}: fio knows this key, windrose bench does not support it")]
    FioOnly(String),
    /// Nobody does.
    #[error("{0}: neither fio nor windrose bench knows this key")]
    Unknown(String),
    /// Its value cannot be one.
    #[error("{key}: {why}")]
    Value {
        /// Which key.
        key: &'static str,
        /// What is wrong.
        why: String,
    },
    /// It needs a value.
    #[error("{0} needs a value: {0}={1}")]
    Missing(&'static str, &'static str),
}

impl Job {
    /// Sets one key as a job file or the command line names it; `None` for one without a value.
    ///
    /// # Errors
    /// [`BadKey`]; nothing is set then.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> Result<(), BadKey> {
        let Some(key) = key(name) else {
            let known = FIO_ONLY.contains(&name);
            let name: String = name.chars().take(64).collect();
            return Err(if known { BadKey::FioOnly(name) } else { BadKey::Unknown(name) });
        };
        let value = value.or(key.bare).ok_or(BadKey::Missing(key.name, key.value))?;
        (key.set)(self, value.trim()).map_err(|why| BadKey::Value { key: key.name, why })
    }
}

#[cfg(test)]
mod tests;
