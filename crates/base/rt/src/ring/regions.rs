//! Buffers registered with a ring: the kernel pins them once instead of at every request.
#![allow(unsafe_code)]

use io_uring::IoUring;

use crate::buf::Pool;
use crate::sys;

/// Longest piece the kernel registers as one, in bytes. Buffer runs never lie across a multiple
/// of it, because they are aligned to their size.
const PIECE: usize = 1 << 30;

/// Most memory of other cores that one ring registers, in bytes. Their buffers come here seldom,
/// and pinning takes time and page counts.
const FOREIGN: usize = 4 << 30;

/// What is registered, own core's memory first.
pub(super) struct Regions {
    registered: Vec<Region>,
    /// Held, so that no other memory comes to lie at registered addresses.
    _pools: Vec<Pool>,
}

#[derive(Clone, Copy)]
struct Region {
    start: usize,
    bytes: usize,
}

impl Regions {
    /// The number under which all of a piece of memory is registered.
    pub(super) fn find(&self, start: *const u8, len: u32) -> Option<u16> {
        let (start, len) = (start.addr(), len as usize);
        let inside = |r: &Region| start.wrapping_sub(r.start) <= r.bytes.saturating_sub(len);
        let index = self.registered.iter().position(|r| len <= r.bytes && inside(r))?;
        u16::try_from(index).ok()
    }
}

/// Registers the pools' memory: all of it, or else only this core's, or else none.
pub(super) fn register(uring: &IoUring, pools: &[Pool], own: usize) -> Regions {
    let mine = pieces(&pools[own]);
    let mut all = mine.clone();
    // Where memory to lock is limited, each core's own comes first.
    let mut room = if sys::locks_freely() { FOREIGN } else { 0 };
    for pool in pools[..own].iter().chain(&pools[own + 1..]) {
        let bytes = pool.region().1;
        if bytes <= room {
            room -= bytes;
            all.extend(pieces(pool));
        }
    }
    let attempts = if all.len() > mine.len() { vec![all, mine] } else { vec![mine] };
    let mut refusal = None;
    for attempt in attempts {
        match register_all(uring, &attempt) {
            Ok(()) => {
                let (count, bytes) = (attempt.len(), total(&attempt));
                tracing::debug!(core = own, count, bytes, "buffers registered with io_uring");
                return Regions { registered: attempt, _pools: pools.to_vec() };
            }
            Err(e) => refusal = Some(e),
        }
    }
    if let Some(e) = refusal {
        tracing::warn!(
            core = own,
            error = %e,
            "buffers are not registered with io_uring and every request costs more; \
             raise the limit of locked memory (LimitMEMLOCK, ulimit -l)"
        );
    }
    Regions { registered: Vec::new(), _pools: Vec::new() }
}

fn pieces(pool: &Pool) -> Vec<Region> {
    let (start, bytes) = pool.region();
    let start = start.as_ptr().expose_provenance();
    (0..bytes)
        .step_by(PIECE)
        .map(|at| Region { start: start + at, bytes: PIECE.min(bytes - at) })
        .collect()
}

fn total(regions: &[Region]) -> usize {
    regions.iter().map(|r| r.bytes).sum()
}

fn register_all(uring: &IoUring, regions: &[Region]) -> std::io::Result<()> {
    let vectors: Vec<_> = regions
        .iter()
        .map(|r| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(r.start),
            iov_len: r.bytes,
        })
        .collect();
    // SAFETY: the kernel holds on to the pages themselves; the addresses stay those pages',
    // because `Regions` holds the pools, and lives as long as the ring.
    unsafe { uring.submitter().register_buffers(&vectors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_where_all_of_it_is_registered() {
        let pool = Pool::new(1 << 20).unwrap();
        let registered = pieces(&pool);
        let (start, bytes) = pool.region();
        let start = start.as_ptr().cast_const();
        let regions = Regions { registered, _pools: vec![pool] };
        let len = u32::try_from(bytes).unwrap();
        assert_eq!(regions.find(start, len), Some(0));
        assert_eq!(regions.find(start.wrapping_add(4096), 512), Some(0));
        assert_eq!(regions.find(start.wrapping_add(bytes - 512), 512), Some(0));
        assert_eq!(regions.find(start.wrapping_add(bytes - 512), 1024), None, "ends behind it");
        assert_eq!(regions.find(start.wrapping_sub(512), 1024), None, "begins before it");
        assert_eq!(regions.find(start, len + 1), None);
    }
}
