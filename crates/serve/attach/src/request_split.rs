//! Limits how much of a request is executed at once.

use block::Info;
use rt::buf::BufferPool;

/// Longest part in bytes. Longer requests are executed part by part, as memory is reserved for one
/// part.
const PART_BYTES: u64 = 1 << 20;

/// Longest part of a request that is executed at once, in blocks, with memory from this pool.
pub(crate) fn part_blocks(info: &Info, pool: &BufferPool) -> u64 {
    let bytes = PART_BYTES.min(pool.usage().total / 8);
    u64::from(info.max_transfer_blocks).min(bytes / u64::from(info.block_size)).max(1)
}
