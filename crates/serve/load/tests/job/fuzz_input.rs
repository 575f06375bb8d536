//! Any text as a job file: it is read or refused, and what is read can be made ready for a target,
//! or that is refused.

use block::Info;
use load::job::{Dir, parse};
use load::pattern::Pattern;
use load::spec::JobSpec;

/// A target of 16 MiB.
const INFO: Info = Info {
    block_size: 512,
    blocks: 1 << 15,
    metadata_blocks: 0,
    physical_block_size: 4096,
    max_transfer_blocks: 2048,
    unmap_granularity_blocks: 1,
    unmap_zeroes: true,
    volatile_cache: true,
    native_fua: false,
    read_only: false,
    overhead_bytes: 0,
};

/// Reads `text`; what must hold is asserted. Shared by the property test and the fuzz target.
pub(crate) fn run(text: &str) {
    let jobs = match parse(text) {
        Ok(jobs) => jobs,
        Err(e) => {
            assert!(!e.to_string().is_empty());
            return;
        }
    };
    for job in jobs {
        // What a job remembers of its blocks is not made here: it is as large as its part of the
        // target.
        let Ok(spec) = JobSpec::new(&job, job.numjobs - 1, &INFO, 7) else { continue };
        assert!(spec.start + spec.length <= INFO.bytes(), "{spec:?}");
        for io in Pattern::new(&spec).take(64) {
            assert!(
                io.len > 0 && io.len.is_multiple_of(512) && io.at.is_multiple_of(512),
                "{io:?}"
            );
            assert!(io.at >= spec.start && io.at + io.len <= spec.start + spec.length, "{io:?}");
            assert!(job.rw.has(io.dir), "{io:?}");
            assert!(io.dir == Dir::Trim || io.len <= spec.largest(), "{io:?}");
        }
    }
}
