//! Buffers registered with a ring: the kernel pins them once instead of at every request.
#![allow(unsafe_code)]

use io_uring::IoUring;

use crate::buf::BufferPool;
use crate::sys;

/// Longest region that the kernel registers, in bytes. Buffer runs never cross a multiple of it,
/// because they are aligned to their size.
const MAX_REGION_BYTES: usize = 1 << 30;

/// Most memory of other cores that one ring registers, in bytes. Their buffers are rarely used
/// here, and pinning costs time and locked memory.
const MAX_FOREIGN_BYTES: usize = 4 << 30;

/// The registered memory, own core's first.
pub(super) struct RegisteredBuffers {
    registered: Vec<Region>,
    /// Keeps the pools alive, so that registered addresses are not reused.
    _pools: Vec<BufferPool>,
}

#[derive(Clone, Copy)]
struct Region {
    start: usize,
    bytes: usize,
}

impl RegisteredBuffers {
    /// The index of the region that contains all of a buffer.
    pub(super) fn find(&self, start: *const u8, len: u32) -> Option<u16> {
        let (start, len) = (start.addr(), len as usize);
        let inside = |r: &Region| start.wrapping_sub(r.start) <= r.bytes.saturating_sub(len);
        let index = self.registered.iter().position(|r| len <= r.bytes && inside(r))?;
        u16::try_from(index).ok()
    }
}

/// Registers the pools' memory: all of it, or else only this core's, or else none.
pub(super) fn register(uring: &IoUring, pools: &[BufferPool], own: usize) -> RegisteredBuffers {
    let own_regions = pool_regions(&pools[own]);
    let mut all = own_regions.clone();
    // If locked memory is limited, each core's own comes first.
    let mut room = if sys::can_lock_memory() { MAX_FOREIGN_BYTES } else { 0 };
    for pool in pools[..own].iter().chain(&pools[own + 1..]) {
        let bytes = pool.region().1;
        if bytes <= room {
            room -= bytes;
            all.extend(pool_regions(pool));
        }
    }
    let attempts =
        if all.len() > own_regions.len() { vec![all, own_regions] } else { vec![own_regions] };
    let mut refusal = None;
    for attempt in attempts {
        match register_regions(uring, &attempt) {
            Ok(()) => {
                let (count, bytes) = (attempt.len(), total_bytes(&attempt));
                tracing::debug!(core = own, count, bytes, "buffers registered with io_uring");
                return RegisteredBuffers { registered: attempt, _pools: pools.to_vec() };
            }
            Err(e) => refusal = Some(e),
        }
    }
    if let Some(e) = refusal {
        tracing::warn!(
            core = own,
            error = %e,
            "cannot register buffers with io_uring: each request costs more; \
             raise the limit of locked memory (LimitMEMLOCK, ulimit -l)"
        );
    }
    RegisteredBuffers { registered: Vec::new(), _pools: Vec::new() }
}

fn pool_regions(pool: &BufferPool) -> Vec<Region> {
    let (start, bytes) = pool.region();
    let start = start.as_ptr().expose_provenance();
    (0..bytes)
        .step_by(MAX_REGION_BYTES)
        .map(|at| Region { start: start + at, bytes: MAX_REGION_BYTES.min(bytes - at) })
        .collect()
}

fn total_bytes(regions: &[Region]) -> usize {
    regions.iter().map(|r| r.bytes).sum()
}

fn register_regions(uring: &IoUring, regions: &[Region]) -> std::io::Result<()> {
    let vectors: Vec<_> = regions
        .iter()
        .map(|r| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(r.start),
            iov_len: r.bytes,
        })
        .collect();
    // SAFETY: the kernel pins the pages themselves; the addresses remain those pages', because
    // `RegisteredBuffers` holds the pools, and lives as long as the ring.
    unsafe { uring.submitter().register_buffers(&vectors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fully_registered_memory_is_found() {
        let pool = BufferPool::new(1 << 20).unwrap();
        let registered = pool_regions(&pool);
        let (start, bytes) = pool.region();
        let start = start.as_ptr().cast_const();
        let regions = RegisteredBuffers { registered, _pools: vec![pool] };
        let len = u32::try_from(bytes).unwrap();
        assert_eq!(regions.find(start, len), Some(0));
        assert_eq!(regions.find(start.wrapping_add(4096), 512), Some(0));
        assert_eq!(regions.find(start.wrapping_add(bytes - 512), 512), Some(0));
        assert_eq!(regions.find(start.wrapping_add(bytes - 512), 1024), None, "ends behind it");
        assert_eq!(regions.find(start.wrapping_sub(512), 1024), None, "begins before it");
        assert_eq!(regions.find(start, len + 1), None);
    }
}
