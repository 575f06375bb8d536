//! How much of a request is done as one.

use block::Info;
use rt::buf::Pool;

/// Longest part in bytes. Longer requests are done part by part, for the memory is promised for one.
const PART_BYTES: u64 = 1 << 20;

/// Longest part of a request to a volume that is done as one, in blocks, with memory from this pool.
pub(crate) fn part_blocks(info: &Info, pool: &Pool) -> u64 {
    let bytes = PART_BYTES.min(pool.usage().total / 8);
    u64::from(info.max_transfer_blocks).min(bytes / u64::from(info.block_size)).max(1)
}
