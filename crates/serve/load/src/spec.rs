//! A job resolved against its target: numbers that fit the target and each other.

use std::time::Duration;

use block::Info;

use crate::job::{Dir, Job, Rw, Verify};
use crate::units::format_bytes;

/// Most blocks whose generation a verifying job tracks: 256 MiB of memory.
const MAX_TRACKED_BLOCKS: u64 = 64 << 20;

/// Most memory for one job's operations in flight, in bytes.
const MAX_JOB_MEMORY: u64 = 8 << 30;

/// One of `numjobs`, ready to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSpec {
    /// Kinds and order of operations.
    pub rw: Rw,
    /// Percentage of reads.
    pub rwmixread: u8,
    /// Smallest and largest operation of each direction, in bytes: multiples of [`Self::unit`].
    pub bs: [(u64, u64); 3],
    /// Operations begin on multiples of this many bytes from [`Self::start`]: the smallest
    /// operation.
    pub unit: u64,
    /// First byte of the region.
    pub start: u64,
    /// Length of the region in bytes: a multiple of [`Self::unit`].
    pub length: u64,
    /// Bytes to transfer; `None`: limited by time.
    pub limit_bytes: Option<u64>,
    /// Operations in flight.
    pub iodepth: u32,
    /// Time limit.
    pub runtime: Option<Duration>,
    /// Time before the measurement starts.
    pub ramp_time: Duration,
    /// Maximum bytes per second.
    pub rate: [Option<u64>; 3],
    /// Maximum operations per second.
    pub rate_iops: [Option<u64>; 3],
    /// Flush after this many writes.
    pub fsync: u32,
    /// Flush at the end.
    pub end_fsync: bool,
    /// Verification method.
    pub verify: Option<Verify>,
    /// What verify=pattern writes.
    pub verify_pattern: Vec<u8>,
    /// Whether written data is read again at the end.
    pub do_verify: bool,
    /// Whether each position is used once before any is used again.
    pub random_map: bool,
    /// Seed of the sequence of operations.
    pub seed: u64,
    /// Seed of the written data: differs in each run, so that a repeated run does not take an
    /// earlier run's data for its own.
    pub content_seed: u64,
}

impl JobSpec {
    /// Job number `clone` of `job.numjobs` on a target with `info`; `chance` is used where no seed
    /// is given.
    ///
    /// # Errors
    /// What does not fit, as text.
    pub fn new(job: &Job, clone: u32, info: &Info, chance: u64) -> Result<Self, String> {
        if job.rw.changes() && info.read_only {
            return Err("the target is read-only".to_owned());
        }
        if job.rw.trim && info.unmap_granularity_blocks == 0 {
            return Err("the target does not support unmapping: it cannot be trimmed".to_owned());
        }
        let unit = unit(job, info)?;
        let (start, length) = region(job, clone, info.bytes(), unit)?;
        let spec = Self {
            rw: job.rw,
            rwmixread: job.rwmixread,
            bs: job.bs.map(|(least, most)| (round_down(least, unit), round_down(most, unit))),
            unit,
            start,
            length,
            limit_bytes: limit(job, length)?,
            iodepth: job.iodepth,
            runtime: job.runtime,
            ramp_time: job.ramp_time,
            rate: job.rate,
            rate_iops: job.rate_iops,
            fsync: job.fsync,
            end_fsync: job.end_fsync,
            verify: job.verify,
            verify_pattern: job.verify_pattern.clone(),
            do_verify: job.do_verify,
            random_map: !job.norandommap,
            seed: job.randseed.unwrap_or(if job.randrepeat { DEFAULT_SEED } else { chance })
                ^ (u64::from(clone) << 32),
            content_seed: crate::random::mix(chance ^ (u64::from(clone) << 32)),
        };
        spec.check_verify()?;
        spec.check_memory(info)?;
        Ok(spec)
    }

    /// The largest operation, in bytes.
    #[must_use]
    pub fn largest(&self) -> u64 {
        let used = |dir: &Dir| self.rw.has(*dir) && *dir != Dir::Trim;
        let bs = Dir::ALL.into_iter().filter(used).map(|dir| self.bs[dir.index()].1);
        bs.max().unwrap_or(0).min(self.length)
    }

    /// Memory for one operation in flight, in bytes: read and write buffers, and the needs of the
    /// target's layers.
    #[must_use]
    pub fn bytes_per_operation(&self, info: &Info) -> u64 {
        let once = self.largest().next_multiple_of(4096);
        let copies = if self.rw.write { 2 } else { 1 };
        // A trim or flush needs a little memory of its own.
        copies * once + u64::from(info.overhead_bytes) + 4096
    }

    fn check_memory(&self, info: &Info) -> Result<(), String> {
        let all = self.bytes_per_operation(info) * u64::from(self.iodepth);
        if all > MAX_JOB_MEMORY {
            let (all, most) = (format_bytes(all), format_bytes(MAX_JOB_MEMORY));
            return Err(format!("iodepth and bs take {all} of memory; at most {most} are taken"));
        }
        Ok(())
    }

    fn check_verify(&self) -> Result<(), String> {
        let Some(verify) = self.verify else { return Ok(()) };
        if verify == Verify::Pattern && self.verify_pattern.is_empty() {
            return Err("verify=pattern needs verify_pattern".to_owned());
        }
        if self.rw.trim {
            return Err("verify: trimmed blocks cannot be distinguished from lost ones".to_owned());
        }
        if self.rw.write && self.length / self.unit > MAX_TRACKED_BLOCKS {
            let most = format_bytes(MAX_TRACKED_BLOCKS * self.unit);
            return Err(format!(
                "verify remembers each block that was written; with bs={} size={most} is the most",
                self.unit
            ));
        }
        Ok(())
    }
}

/// Seed if none is given; arbitrary.
const DEFAULT_SEED: u64 = 0x89;

/// The smallest operation.
fn unit(job: &Job, info: &Info) -> Result<u64, String> {
    let block = u64::from(info.block_size);
    let most = u64::from(info.max_transfer_blocks) * block;
    let used = || Dir::ALL.into_iter().filter(|dir| job.rw.has(*dir));
    let unit = used().map(|dir| job.bs[dir.index()].0).min().unwrap_or(block);
    for dir in used() {
        let (least, largest) = job.bs[dir.index()];
        if !least.is_multiple_of(block) {
            return Err(format!("bs={least}: the target has blocks of {block} bytes"));
        }
        if !least.is_multiple_of(unit) {
            return Err(format!("bs={least} is not a multiple of the smallest bs, {unit}"));
        }
        if dir != Dir::Trim && round_down(largest, unit) > most {
            let most = format_bytes(most);
            return Err(format!("bs={largest}: the target moves at most {most} at once"));
        }
        if dir == Dir::Trim && largest / block > u64::from(u32::MAX) {
            return Err(format!("bs={largest} is too large for a trim"));
        }
    }
    Ok(unit)
}

fn round_down(bytes: u64, unit: u64) -> u64 {
    bytes - bytes % unit
}

/// First byte and length.
fn region(job: &Job, clone: u32, all: u64, unit: u64) -> Result<(u64, u64), String> {
    let moved = job.offset_increment.checked_mul(u64::from(clone));
    let start = moved.and_then(|moved| job.offset.of(all).checked_add(moved));
    // A percentage may yield any byte.
    let start = start.map(|start| match job.offset {
        crate::job::Amount::Percent(_) => round_down(start, unit),
        crate::job::Amount::Bytes(_) => start,
    });
    let start = start.filter(|start| *start < all).ok_or_else(|| {
        format!("offset: it is past the end of the target, which has {}", format_bytes(all))
    })?;
    if !start.is_multiple_of(unit) {
        return Err(format!("offset={start}: it is not a multiple of the block size, {unit}"));
    }
    let length = match job.size {
        None => all - start,
        Some(size) => size.of(all),
    };
    if length > all - start {
        return Err(format!(
            "size={length}: the target has {} bytes, of which {} come behind the offset",
            all,
            all - start
        ));
    }
    match round_down(length, unit) {
        0 => Err(format!("size={length}: it is too small for one operation of {unit} bytes")),
        length => Ok((start, length)),
    }
}

fn limit(job: &Job, length: u64) -> Result<Option<u64>, String> {
    if job.time_based {
        return match job.runtime {
            Some(_) => Ok(None),
            None => Err("time_based needs runtime".to_owned()),
        };
    }
    let once = job.io_size.unwrap_or(length);
    Ok(Some(once.saturating_mul(job.loops)))
}
