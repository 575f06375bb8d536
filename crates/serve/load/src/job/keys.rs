//! Supported keys with their setters, and keys that only fio supports.

use std::time::Duration;

use super::{Amount, Job, Rw, Verify};
use crate::units::{bytes, flag, number, per_direction, time};

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// fio's name.
    pub name: &'static str,
    /// fio's other name for it, or ours.
    pub alias: Option<&'static str>,
    /// Form of its value, for help.
    pub value: &'static str,
    /// Its value when it is given without one.
    pub default_when_bare: Option<&'static str>,
    /// What it does.
    pub help: &'static str,
    pub(super) set: fn(&mut Job, &str) -> Result<(), String>,
}

/// Largest operation in bytes, so that its buffer fits in memory.
const MAX_BS: u64 = 1 << 30;
/// Most operations in flight of one job, and most jobs.
const MAX_DEPTH: u64 = 65_536;
const MAX_JOBS: u64 = 1024;
/// Longest pattern, in bytes.
const MAX_PATTERN: usize = 512;

const SECOND: Duration = Duration::from_secs(1);

macro_rules! keys {
    ($($name:literal $(or $alias:literal)? = $value:literal $([$bare:literal])?, $help:literal, $set:expr;)+) => {
        /// All supported keys.
        pub const KEYS: &[Key] = &[$(Key {
            name: $name,
            alias: keys!(@maybe $($alias)?),
            value: $value,
            default_when_bare: keys!(@maybe $($bare)?),
            help: $help,
            set: $set,
        }),+];
    };
    (@maybe $given:literal) => { Some($given) };
    (@maybe) => { None };
}

keys! {
    "filename" = "URI|PATH", "What is measured: nvme://, iscsi://, nbd://, or a file or block device",
        |j, v| { j.filename = Some(non_empty(v)?.to_owned()); Ok(()) };
    "rw" or "readwrite" = "KIND",
        "read, write, trim, randread, randwrite, randtrim, rw (or readwrite), randrw",
        |j, v| { j.rw = rw(v)?; Ok(()) };
    "rwmixread" = "PERCENT", "How much of a mixed load is reads [50]",
        |j, v| { j.rwmixread = percent(v)?; Ok(()) };
    "rwmixwrite" = "PERCENT", "How much of a mixed load is writes [50]",
        |j, v| { j.rwmixread = 100 - percent(v)?; Ok(()) };
    "bs" or "blocksize" = "SIZE[,SIZE[,SIZE]]", "Size of an operation, for reads, writes and trims [4k]",
        |j, v| { j.bs = per_direction(v, j.bs, |v| bs(v).map(|bs| (bs, bs)))?; Ok(()) };
    "bsrange" or "blocksize_range" = "MIN-MAX[,MIN-MAX]", "Sizes of operations, evenly between two",
        |j, v| { j.bs = per_direction(v, j.bs, range)?; Ok(()) };
    "size" = "SIZE|PERCENT%", "How much of the target is used; a file of this size is made if there is none [all]",
        |j, v| { j.size = Some(amount(v)?); Ok(()) };
    "offset" = "SIZE|PERCENT%", "Where that begins [0]",
        |j, v| { j.offset = amount(v)?; Ok(()) };
    "offset_increment" = "SIZE", "How much further it begins for each next job of numjobs [0]",
        |j, v| { j.offset_increment = bytes(v)?; Ok(()) };
    "io_size" = "SIZE", "How much is moved, if not the size",
        |j, v| { j.io_size = Some(above_zero(bytes(v)?)?); Ok(()) };
    "iodepth" = "NUMBER", "Operations kept in flight by each job [1]",
        |j, v| { j.iodepth = number(v, 1, MAX_DEPTH)? as u32; Ok(()) };
    "numjobs" = "NUMBER", "How many do the same at the same time, each on connections of its own [1]",
        |j, v| { j.numjobs = number(v, 1, MAX_JOBS)? as u32; Ok(()) };
    "runtime" = "TIME", "After how long it ends, the ramp not counted",
        |j, v| { j.runtime = Some(time(v, SECOND)?).filter(|t| !t.is_zero()); Ok(()) };
    "time_based" = "0|1" ["1"], "Go on until runtime is over, again and again over the size",
        |j, v| { j.time_based = flag(v)?; Ok(()) };
    "ramp_time" or "ramp" = "TIME", "How long it runs before anything counts [0]",
        |j, v| { j.ramp_time = time(v, SECOND)?; Ok(()) };
    "rate" = "SIZE[,SIZE[,SIZE]]", "Bytes per second at most, of each job",
        |j, v| { j.rate = per_direction(v, j.rate, |v| limit(bytes(v)?))?; Ok(()) };
    "rate_iops" = "NUMBER[,NUMBER[,NUMBER]]", "Operations per second at most, of each job",
        |j, v| { j.rate_iops = per_direction(v, j.rate_iops, |v| limit(bytes(v)?))?; Ok(()) };
    "fsync" = "NUMBER", "Flush after so many writes [never]",
        |j, v| { j.fsync = number(v, 0, u64::from(u32::MAX))? as u32; Ok(()) };
    "fdatasync" = "NUMBER", "The same",
        |j, v| { j.fsync = number(v, 0, u64::from(u32::MAX))? as u32; Ok(()) };
    "end_fsync" = "0|1" ["1"], "Flush at the end",
        |j, v| { j.end_fsync = flag(v)?; Ok(()) };
    "direct" = "0|1", "Files and devices: past the page cache (O_DIRECT), or through it [1]",
        |j, v| { j.direct = flag(v)?; Ok(()) };
    "buffered" = "0|1", "The opposite of direct [0]",
        |j, v| { j.direct = !flag(v)?; Ok(()) };
    "verify" = "METHOD" ["crc32c"], "Check what was written: crc32c, md5, meta (headers alone) or pattern",
        |j, v| { j.verify = verify(v)?; Ok(()) };
    "verify_pattern" = "PATTERN", "What verify=pattern writes: 0xHEX, \"text\" or a number",
        |j, v| { j.verify_pattern = pattern(v)?; Ok(()) };
    "do_verify" = "0|1" ["1"], "Read again at the end what was written [1]",
        |j, v| { j.do_verify = flag(v)?; Ok(()) };
    "norandommap" = "0|1" ["1"], "Draw random places without regard to those before [0]",
        |j, v| { j.norandommap = flag(v)?; Ok(()) };
    "randseed" = "NUMBER", "Where chance begins",
        |j, v| { j.randseed = Some(bytes(v)?); Ok(()) };
    "randrepeat" = "0|1" ["1"], "Each run does the same [1]",
        |j, v| { j.randrepeat = flag(v)?; Ok(()) };
    "group_reporting" = "0|1" ["1"], "Report the jobs of numjobs as one",
        |j, v| { j.group_reporting = flag(v)?; Ok(()) };
    "loops" = "NUMBER", "How often it is done [1]",
        |j, v| { j.loops = number(v, 1, u64::from(u32::MAX))?; Ok(()) };
    "stonewall" or "wait_for_previous" = "0|1" ["1"], "Begin when the sections before have ended",
        |j, v| { j.stonewall = flag(v)?; Ok(()) };
    "name" = "NAME", "What it is called in the report",
        |j, v| { j.name = non_empty(v)?.to_owned(); Ok(()) };
    "ioengine" = "ENGINE", "Without effect: io_uring and libaio are taken for what there is here",
        ioengine;
    "kb_base" = "1024", "1024 is what there is",
        |_, v| only(v, "1024");
    "thread" = "0|1" ["1"], "Without effect: jobs are threads",
        |j, v| { flag(v)?; note(j, "thread", "jobs share the threads of the cores"); Ok(()) };
    "random_distribution" = "random", "random is what there is",
        |_, v| only(v, "random");
    "random_generator" = "GENERATOR", "Without effect: places are drawn by a permutation of our own",
        |j, v| {
            note(j, &format!("random_generator={}", truncate(v)), "places are a permutation, which costs no memory");
            Ok(())
        };
    "description" = "TEXT", "Without effect",
        |_, _| Ok(());
    "create_on_open" = "0", "0 is what there is",
        |_, v| only(v, "0");
    "invalidate" = "0|1" ["1"], "Without effect: files and devices are opened with an empty cache when they are written",
        |j, v| { flag(v)?; note(j, "invalidate", "what is opened for writing is forgotten by the cache, what is read is not"); Ok(()) };
}

/// Finds a key by name or alias.
#[must_use]
pub fn key(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name || key.alias == Some(name))
}

fn note(job: &mut Job, what: &str, why: &str) {
    job.notes.push(format!("{what} has no effect: {why}"));
}

fn truncate(text: &str) -> String {
    text.chars().take(32).collect()
}

fn non_empty(text: &str) -> Result<&str, String> {
    if text.is_empty() { Err("is empty".to_owned()) } else { Ok(text) }
}

fn only(text: &str, known: &str) -> Result<(), String> {
    if text == known {
        Ok(())
    } else {
        Err(format!("{:?}: only {known} is supported", truncate(text)))
    }
}

fn above_zero(number: u64) -> Result<u64, String> {
    if number == 0 { Err("is 0".to_owned()) } else { Ok(number) }
}

fn limit(number: u64) -> Result<Option<u64>, String> {
    Ok(Some(number).filter(|n| *n > 0))
}

fn percent(text: &str) -> Result<u8, String> {
    number(text, 0, 100).map(|n| n as u8)
}

fn amount(text: &str) -> Result<Amount, String> {
    match text.strip_suffix('%') {
        Some(part) => percent(part).map(Amount::Percent),
        None => bytes(text).map(Amount::Bytes),
    }
}

fn bs(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        bytes @ 512..=MAX_BS => Ok(bytes),
        other => Err(format!("{other} bytes: between 512 and 1g can be moved at once")),
    }
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let (least, most) =
        text.split_once('-').ok_or_else(|| format!("{:?} is not a range", truncate(text)))?;
    let (least, most) = (bs(least)?, bs(most)?);
    if least > most {
        return Err(format!("{:?} ends before it begins", truncate(text)));
    }
    Ok((least, most))
}

fn rw(text: &str) -> Result<Rw, String> {
    let (random, kind) = match text.strip_prefix("rand") {
        Some(kind) => (true, kind),
        None => (false, text),
    };
    let (read, write, trim) = match kind {
        "read" => (true, false, false),
        "write" => (false, true, false),
        "trim" => (false, false, true),
        "rw" => (true, true, false),
        "readwrite" if !random => (true, true, false),
        "trimwrite" => {
            return Err(format!("{text}: fio supports it, but windrose bench does not"));
        }
        _ if kind.contains(':') => {
            return Err(format!("{:?}: skipping (read:8k) is not supported", truncate(text)));
        }
        _ => {
            return Err(format!(
                "{:?} is none of read, write, trim, rw, randread, randwrite, randtrim, randrw",
                truncate(text)
            ));
        }
    };
    Ok(Rw { read, write, trim, random })
}

fn verify(text: &str) -> Result<Option<Verify>, String> {
    Ok(Some(match text {
        "0" | "none" => return Ok(None),
        "crc32c" | "crc32c-intel" => Verify::Crc32c,
        "md5" => Verify::Md5,
        "meta" => Verify::Meta,
        "pattern" => Verify::Pattern,
        other => {
            return Err(format!("{:?} is none of crc32c, md5, meta, pattern", truncate(other)));
        }
    }))
}

fn pattern(text: &str) -> Result<Vec<u8>, String> {
    let bad = || format!("{:?} is not a pattern: use 0xHEX, \"text\" or a number", truncate(text));
    let bytes = if let Some(hex) = text.strip_prefix("0x") {
        let digits: Option<Vec<u8>> =
            hex.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect();
        let mut digits = digits.ok_or_else(bad)?;
        if digits.len() % 2 == 1 {
            digits.insert(0, 0);
        }
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    } else if let Some(inner) = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')) {
        inner.as_bytes().to_vec()
    } else {
        // fio writes a number in the machine's byte order, without trailing zeroes.
        let number: u32 = text.parse().map_err(|_| bad())?;
        let bytes = number.to_le_bytes();
        let used = 4 - (number.leading_zeros() / 8).min(3) as usize;
        bytes[..used].to_vec()
    };
    match bytes.len() {
        1..=MAX_PATTERN => Ok(bytes),
        _ => Err(bad()),
    }
}

fn ioengine(job: &mut Job, text: &str) -> Result<(), String> {
    match text {
        "io_uring" | "libaio" | "posixaio" | "windrose" => {
            let what = format!("ioengine={text}");
            note(
                job,
                &what,
                "what the target is decides how it is reached; iodepth is kept in flight",
            );
            Ok(())
        }
        "sync" | "psync" | "vsync" | "pvsync" | "pvsync2" => {
            Err(format!("{text} does one operation at a time; leave it out, and write iodepth=1"))
        }
        _ => Err(format!("{:?} is not supported: leave it out", truncate(text))),
    }
}

/// Further keys of fio 3.33, as listed by `fio --cmdhelp`.
pub const FIO_ONLY: &[&str] = &[
    "allow_file_create",
    "allow_mounted_write",
    "allrandrepeat",
    "atomic",
    "ba",
    "block_error_percentiles",
    "blockalign",
    "bs_unaligned",
    "bssplit",
    "buffer_compress_chunk",
    "buffer_compress_percentage",
    "buffer_pattern",
    "bwavgtime",
    "cgroup",
    "cgroup_nodelete",
    "cgroup_weight",
    "clat_percentiles",
    "clocksource",
    "continue_on_error",
    "cpumask",
    "cpus_allowed",
    "cpus_allowed_policy",
    "create_fsync",
    "create_only",
    "create_serialize",
    "dedupe_global",
    "dedupe_mode",
    "dedupe_percentage",
    "dedupe_working_set_percentage",
    "directory",
    "disable_bw_measurement",
    "disable_clat",
    "disable_lat",
    "disable_slat",
    "disk_util",
    "error_dump",
    "exec_postrun",
    "exec_prerun",
    "exit_what",
    "exitall",
    "exitall_on_error",
    "experimental_verify",
    "fadvise_hint",
    "fallocate",
    "file_append",
    "file_service_type",
    "filename_format",
    "filesize",
    "fill_device",
    "fixedbufs",
    "flow",
    "flow_id",
    "flow_sleep",
    "fsync_on_close",
    "gid",
    "gtod_cpu",
    "gtod_reduce",
    "hipri",
    "hugepage-size",
    "hugepage_size",
    "ignore_error",
    "ignore_zone_limits",
    "include",
    "io_limit",
    "io_submit_mode",
    "iodepth_batch",
    "iodepth_batch_complete_max",
    "iodepth_batch_complete_min",
    "iodepth_low",
    "iopsavgtime",
    "ioscheduler",
    "job_max_open_zones",
    "lat_percentiles",
    "latency_percentile",
    "latency_run",
    "latency_target",
    "latency_window",
    "lockfile",
    "lockmem",
    "log_alternate_epoch",
    "log_alternate_epoch_clock_id",
    "log_avg_msec",
    "log_compression",
    "log_compression_cpus",
    "log_entries",
    "log_hist_coarseness",
    "log_hist_msec",
    "log_max_value",
    "log_offset",
    "log_prio",
    "log_store_compressed",
    "log_unix_epoch",
    "max_latency",
    "max_open_zones",
    "mem",
    "merge_blktrace_file",
    "merge_blktrace_iters",
    "merge_blktrace_scalars",
    "new_group",
    "nice",
    "nonvectored",
    "nr_files",
    "nrfiles",
    "numa_cpu_nodes",
    "numa_mem_policy",
    "number_ios",
    "offset_align",
    "opendir",
    "openfiles",
    "overwrite",
    "per_job_logs",
    "percentage_random",
    "percentile_list",
    "pre_read",
    "prio",
    "prioclass",
    "profile",
    "random_map",
    "rate_cycle",
    "rate_ignore_thinktime",
    "rate_iops_min",
    "rate_min",
    "rate_process",
    "read_beyond_wp",
    "read_iolog",
    "read_iolog_chunked",
    "refill_buffers",
    "registerfiles",
    "replay_align",
    "replay_no_stall",
    "replay_redirect",
    "replay_scale",
    "replay_skip",
    "replay_time_scale",
    "rw_sequencer",
    "scramble_buffers",
    "serialize_overlap",
    "significant_figures",
    "size_percent",
    "slat_percentiles",
    "softrandommap",
    "sqthread_poll",
    "sqthread_poll_cpu",
    "start_delay",
    "startdelay",
    "stats",
    "steadystate",
    "steadystate_duration",
    "steadystate_ramp_time",
    "sync",
    "sync_file_range",
    "thinktime",
    "thinktime_blocks",
    "thinktime_blocks_type",
    "thinktime_iotime",
    "thinktime_spin",
    "trim_backlog",
    "trim_backlog_batch",
    "trim_percentage",
    "trim_verify_zero",
    "uid",
    "uncached",
    "unified_rw_reporting",
    "unique_filename",
    "unit_base",
    "unlink",
    "unlink_each_loop",
    "uri",
    "userspace_reap",
    "verify_async",
    "verify_backlog",
    "verify_backlog_batch",
    "verify_dump",
    "verify_fatal",
    "verify_interval",
    "verify_offset",
    "verify_only",
    "verify_state_load",
    "verify_state_save",
    "wait_for",
    "write_barrier",
    "write_bw_log",
    "write_hint",
    "write_hist_log",
    "write_iolog",
    "write_iops_log",
    "write_lat_log",
    "zero_buffers",
    "zone_reset_frequency",
    "zone_reset_threshold",
    "zonecapacity",
    "zonemode",
    "zonerange",
    "zonesize",
    "zoneskip",
];
