//! What a job is, once it is known of what: numbers that fit the target and each other.

use std::time::Duration;

use block::Info;

use crate::job::{Dir, Job, Rw, Verify};
use crate::units::shown;

/// Most blocks that a verifying job remembers the generation of: 256 MiB of memory.
const MOST_REMEMBERED: u64 = 64 << 20;

/// Most memory that one job's operations in flight may take, in bytes.
const MOST_MEMORY: u64 = 8 << 30;

/// One of `numjobs`, ready to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// What is done.
    pub rw: Rw,
    /// Of a hundred, so many are reads.
    pub rwmixread: u8,
    /// Smallest and largest operation of each direction, in bytes: multiples of [`Self::unit`].
    pub bs: [(u64, u64); 3],
    /// Operations begin on multiples of this many bytes from [`Self::start`]: the smallest operation.
    pub unit: u64,
    /// First byte that is used.
    pub start: u64,
    /// How many are: a multiple of [`Self::unit`].
    pub length: u64,
    /// How much is moved before it is over, in bytes; `None`: time decides.
    pub limit: Option<u64>,
    /// Operations in flight.
    pub iodepth: u32,
    /// When it is over.
    pub runtime: Option<Duration>,
    /// How long nothing counts.
    pub ramp_time: Duration,
    /// Bytes per second.
    pub rate: [Option<u64>; 3],
    /// Operations per second.
    pub rate_iops: [Option<u64>; 3],
    /// A flush behind so many writes.
    pub fsync: u32,
    /// A flush at the end.
    pub end_fsync: bool,
    /// How it is checked.
    pub verify: Option<Verify>,
    /// What verify=pattern writes.
    pub verify_pattern: Vec<u8>,
    /// What was written is read again.
    pub do_verify: bool,
    /// Each place is used once before any is used again.
    pub map: bool,
    /// Where chance begins: what is done, and where.
    pub seed: u64,
    /// What is written begins here: another one in each run, for a run that repeats another one must not take what that
    /// has left behind for its own.
    pub contents: u64,
}

impl Spec {
    /// Job number `clone` of those that `job` asks for, on a target that is `info`; `chance` where no seed is given.
    ///
    /// # Errors
    /// What does not fit, for people.
    pub fn new(job: &Job, clone: u32, info: &Info, chance: u64) -> Result<Self, String> {
        if job.rw.changes() && info.read_only {
            return Err("the target is read-only".to_owned());
        }
        if job.rw.trim && info.unmap_granularity_blocks == 0 {
            return Err("the target does not give space back: it cannot be trimmed".to_owned());
        }
        let unit = unit(job, info)?;
        let (start, length) = region(job, clone, info.bytes(), unit)?;
        let spec = Self {
            rw: job.rw,
            rwmixread: job.rwmixread,
            bs: job.bs.map(|(least, most)| (fit(least, unit), fit(most, unit))),
            unit,
            start,
            length,
            limit: limit(job, length)?,
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
            map: !job.norandommap,
            seed: job.randseed.unwrap_or(if job.randrepeat { FIRST } else { chance })
                ^ (u64::from(clone) << 32),
            contents: crate::chance::mix(chance ^ (u64::from(clone) << 32)),
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

    /// Memory that one operation in flight takes, in bytes: for what is read, what is written, and what the target's
    /// layers need beside.
    #[must_use]
    pub fn memory_each(&self, info: &Info) -> u64 {
        let once = self.largest().next_multiple_of(4096);
        let copies = if self.rw.write { 2 } else { 1 };
        // What a trim or a flush takes: some word of its own.
        copies * once + u64::from(info.overhead) + 4096
    }

    fn check_memory(&self, info: &Info) -> Result<(), String> {
        let all = self.memory_each(info) * u64::from(self.iodepth);
        if all > MOST_MEMORY {
            let (all, most) = (shown(all), shown(MOST_MEMORY));
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
            return Err("verify: what is trimmed cannot be told from what was lost".to_owned());
        }
        if self.rw.write && self.length / self.unit > MOST_REMEMBERED {
            let most = shown(MOST_REMEMBERED * self.unit);
            return Err(format!(
                "verify remembers each block that was written; with bs={} size={most} is the most",
                self.unit
            ));
        }
        Ok(())
    }
}

/// Where chance begins if nobody says where: any number will do.
const FIRST: u64 = 0x89;

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
            return Err(format!("bs={least} is no multiple of the smallest bs, {unit}"));
        }
        if dir != Dir::Trim && fit(largest, unit) > most {
            let most = shown(most);
            return Err(format!("bs={largest}: the target moves at most {most} at once"));
        }
        if dir == Dir::Trim && largest / block > u64::from(u32::MAX) {
            return Err(format!("bs={largest}: nothing trims as much at once"));
        }
    }
    Ok(unit)
}

fn fit(bytes: u64, unit: u64) -> u64 {
    bytes - bytes % unit
}

/// First byte and length.
fn region(job: &Job, clone: u32, all: u64, unit: u64) -> Result<(u64, u64), String> {
    let moved = job.offset_increment.checked_mul(u64::from(clone));
    let start = moved.and_then(|moved| job.offset.of(all).checked_add(moved));
    // A part in hundredths may end anywhere.
    let start = start.map(|start| match job.offset {
        crate::job::Amount::Percent(_) => fit(start, unit),
        crate::job::Amount::Bytes(_) => start,
    });
    let start = start.filter(|start| *start < all).ok_or_else(|| {
        format!("offset: it lies behind the end of the target, which has {}", shown(all))
    })?;
    if !start.is_multiple_of(unit) {
        return Err(format!("offset={start}: it is no multiple of the block size, {unit}"));
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
    match fit(length, unit) {
        0 => Err(format!("size={length}: it has no room for one operation of {unit} bytes")),
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
