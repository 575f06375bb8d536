//! The allocator of programs: mimalloc.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys::{
    mi_free, mi_malloc, mi_malloc_aligned, mi_realloc, mi_realloc_aligned, mi_zalloc,
    mi_zalloc_aligned,
};

/// mimalloc, for `#[global_allocator]`.
///
/// Allocations of natural alignment, which are nearly all, are requested without an alignment: that
/// takes a third of the instructions. The crate `mimalloc` always passes one.
#[derive(Debug)]
pub struct MiMalloc;

/// Whether memory of this layout is aligned anyway: mimalloc aligns 16 bytes or more to 16, all
/// else to 8.
fn is_naturally_aligned(layout: Layout) -> bool {
    layout.align() <= 8 || (layout.align() == 16 && layout.size() >= 16)
}

// SAFETY: mimalloc returns memory of the requested size, or null; aligned as `is_naturally_aligned`
// says, or as requested. It frees and resizes all memory it returned, however that was requested.
unsafe impl GlobalAlloc for MiMalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: these take any size, and any power of two as an alignment.
        unsafe {
            match is_naturally_aligned(layout) {
                true => mi_malloc(layout.size()),
                false => mi_malloc_aligned(layout.size(), layout.align()),
            }
        }
        .cast()
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as for `alloc`.
        unsafe {
            match is_naturally_aligned(layout) {
                true => mi_zalloc(layout.size()),
                false => mi_zalloc_aligned(layout.size(), layout.align()),
            }
        }
        .cast()
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        // SAFETY: by the contract of this trait the memory came from here.
        unsafe { mi_free(at.cast()) };
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        let natural =
            Layout::from_size_align(bytes, layout.align()).is_ok_and(is_naturally_aligned);
        // SAFETY: by the contract of this trait the memory came from here, and `bytes` is a size.
        unsafe {
            match natural {
                true => mi_realloc(at.cast(), bytes),
                false => mi_realloc_aligned(at.cast(), bytes, layout.align()),
            }
        }
        .cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of every size up to two pages, and some beyond, with every alignment.
    #[test]
    fn allocations_are_aligned_and_of_the_stated_size() {
        let sizes = (1..8200).chain([65_536, 1 << 20]);
        for (size, shift) in sizes.flat_map(|size| (0..13).map(move |shift| (size, shift))) {
            let layout = Layout::from_size_align(size, 1 << shift).unwrap();
            // SAFETY: the size is not zero, all that is written was asked for, and it is freed
            // once.
            unsafe {
                let at = MiMalloc.alloc_zeroed(layout);
                assert!(at.addr().is_multiple_of(layout.align()), "{layout:?}");
                assert_eq!((*at, *at.add(size - 1)), (0, 0));
                at.add(size - 1).write(7);
                let larger = MiMalloc.realloc(at, layout, size + 17);
                assert!(larger.addr().is_multiple_of(layout.align()), "{layout:?}");
                assert_eq!(*larger.add(size - 1), 7);
                larger.add(size + 16).write(8);
                MiMalloc.dealloc(larger, Layout::from_size_align(size + 17, 1 << shift).unwrap());
                let plain = MiMalloc.alloc(layout);
                assert!(plain.addr().is_multiple_of(layout.align()), "{layout:?}");
                plain.add(size - 1).write(9);
                MiMalloc.dealloc(plain, layout);
            }
        }
    }
}
