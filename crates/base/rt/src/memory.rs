//! Page runs: a buddy allocator over one mapping of anonymous memory.
//!
//! Only this module knows addresses; [`crate::buf`] builds counted buffers on it.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

/// Smallest unit of allocation, and the alignment of every run, in bytes.
pub const PAGE: usize = 4096;

/// Largest run is `PAGE << MAX_ORDER` bytes (1 MiB).
pub const MAX_ORDER: u8 = 8;

/// One page on the heap.
#[repr(C, align(4096))]
pub(crate) struct HeapPageMemory([u8; PAGE]);

impl HeapPageMemory {
    /// A page of zeroes.
    pub(crate) fn zeroed() -> Box<Self> {
        // SAFETY: bytes may all be zero.
        unsafe { Box::new_zeroed().assume_init() }
    }
}

const NONE: u32 = u32::MAX;

/// Most single pages kept for the next command instead of being merged with their neighbours.
const MAX_SPARE_PAGES: usize = 32;

/// An anonymous, private mapping; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory owned by this value; access is governed by `crate::buf`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself hands out addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` (a non-zero multiple of [`PAGE`]) of zeroed memory, populated on first touch.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        assert!(bytes > 0 && bytes.is_multiple_of(PAGE), "mapping of {bytes} bytes");
        // SAFETY: a fresh anonymous mapping aliases nothing; the result is checked.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(p.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { base, bytes })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of page `index`.
    pub(crate) fn page(&self, index: u32) -> NonNull<u8> {
        let offset = index as usize * PAGE;
        assert!(offset < self.bytes);
        // SAFETY: `offset` lies inside the mapping.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of our own mmap; nothing refers to it any more, as
        // every buffer holds the pool that owns this mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Free lists over `pages` pages. Plain indices: no addresses, no unsafe.
#[derive(Debug)]
pub(crate) struct Buddy {
    heads: [u32; MAX_ORDER as usize + 1],
    links: Vec<Link>,
    /// Free pages in no list: most commands need one page, and splitting and merging runs for each
    /// of them is expensive. They are merged before a run is refused.
    spare_pages: Vec<u32>,
    free_pages: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    prev: u32,
    /// Order of the free run that starts here; `NOT_FREE` otherwise.
    order: u8,
}

const NOT_FREE: u8 = u8::MAX;

impl Buddy {
    pub(crate) fn new(pages: u32) -> Self {
        let mut buddy = Self {
            heads: [NONE; MAX_ORDER as usize + 1],
            links: vec![Link { next: NONE, prev: NONE, order: NOT_FREE }; pages as usize],
            spare_pages: Vec::with_capacity(MAX_SPARE_PAGES),
            free_pages: pages,
        };
        // Highest runs first, so that the lists start out in ascending order.
        let mut end = pages;
        while end > 0 {
            let order = (0..=MAX_ORDER)
                .rev()
                .find(|&o| {
                    let size = 1u32 << o;
                    size <= end && (end - size).is_multiple_of(size)
                })
                .expect("order 0 always fits");
            end -= 1 << order;
            buddy.push(end, order);
        }
        buddy
    }

    pub(crate) fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// A run of at most `pages` pages: the largest power of two that fits into them, or else the
    /// largest smaller run available. Returns its first page and order; `None` when nothing is
    /// free. Never more than requested, so that credits counted in pages always suffice.
    pub(crate) fn alloc(&mut self, pages: u32) -> Option<(u32, u8)> {
        let want = max_order_within(pages).min(MAX_ORDER);
        if want == 0
            && let Some(page) = self.spare_pages.pop()
        {
            self.free_pages -= 1;
            return Some((page, 0));
        }
        let fitting = |s: &Self| (want..=MAX_ORDER).find(|&o| s.heads[o as usize] != NONE);
        let found = fitting(self).or_else(|| {
            while let Some(page) = self.spare_pages.pop() {
                self.merge(page, 0);
            }
            fitting(self).or_else(|| (0..want).rev().find(|&o| self.heads[o as usize] != NONE))
        })?;
        let first = self.heads[found as usize];
        self.unlink(first);
        let order = found.min(want);
        for half in (order..found).rev() {
            self.push(first + (1 << half), half);
        }
        self.free_pages -= 1 << order;
        Some((first, order))
    }

    pub(crate) fn free(&mut self, first: u32, order: u8) {
        self.free_pages += 1 << order;
        if order == 0 && self.spare_pages.len() < MAX_SPARE_PAGES {
            self.spare_pages.push(first);
        } else {
            self.merge(first, order);
        }
    }

    fn merge(&mut self, mut first: u32, mut order: u8) {
        while order < MAX_ORDER {
            let buddy = first ^ (1 << order);
            if self.links.get(buddy as usize).is_none_or(|l| l.order != order) {
                break;
            }
            self.unlink(buddy);
            first = first.min(buddy);
            order += 1;
        }
        self.push(first, order);
    }

    fn push(&mut self, first: u32, order: u8) {
        let head = self.heads[order as usize];
        self.links[first as usize] = Link { next: head, prev: NONE, order };
        if head != NONE {
            self.links[head as usize].prev = first;
        }
        self.heads[order as usize] = first;
    }

    fn unlink(&mut self, first: u32) {
        let Link { next, prev, order } = self.links[first as usize];
        debug_assert_ne!(order, NOT_FREE);
        if prev == NONE {
            self.heads[order as usize] = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].prev = prev;
        }
        self.links[first as usize].order = NOT_FREE;
    }
}

/// Largest order whose run fits into `pages` pages.
fn max_order_within(pages: u32) -> u8 {
    u8::try_from(pages.max(1).ilog2()).expect("at most 31")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buddy_splits_and_merges_back_to_where_it_began() {
        let mut b = Buddy::new(1000);
        let mut held = Vec::new();
        let mut seed = 1u64;
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if (seed >> 33).is_multiple_of(2) {
                if let Some(run) = b.alloc(1 + (seed >> 40) as u32 % 300) {
                    held.push(run);
                }
            } else if !held.is_empty() {
                let (first, order) = held.swap_remove((seed >> 20) as usize % held.len());
                b.free(first, order);
            }
            let used: u32 = held.iter().map(|&(_, o)| 1u32 << o).sum();
            assert_eq!(used + b.free_pages(), 1000);
        }
        let mut owner = vec![false; 1000];
        for &(first, order) in &held {
            for page in first..first + (1 << order) {
                assert!(!std::mem::replace(&mut owner[page as usize], true), "page {page} twice");
            }
        }
        for (first, order) in held.drain(..) {
            b.free(first, order);
        }
        let largest = std::iter::from_fn(|| b.alloc(256)).filter(|&(_, order)| order == 8).count();
        assert_eq!(largest, 3, "1000 pages hold three aligned runs of 256");
        assert_eq!(b.free_pages(), 0);
    }

    #[test]
    fn a_fragmented_pool_still_allocates_every_page() {
        let mut b = Buddy::new(64);
        let all: Vec<_> = (0..64).map(|_| b.alloc(1).unwrap()).collect();
        for &(first, order) in all.iter().step_by(2) {
            b.free(first, order);
        }
        let mut got = 0;
        while let Some((_, order)) = b.alloc(16) {
            got += 1 << order;
        }
        assert_eq!(got, 32);
    }
}
