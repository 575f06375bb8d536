//! Cryptographically secure random numbers, fetched from the system in batches.

use std::cell::RefCell;

use crate::sys;

/// Numbers fetched at once.
const BATCH: usize = 32;

pub(crate) struct SystemRandom(RefCell<Vec<u64>>);

impl SystemRandom {
    pub(crate) fn new() -> Self {
        Self(RefCell::new(Vec::with_capacity(BATCH)))
    }

    pub(crate) fn next(&self) -> u64 {
        let mut left = self.0.borrow_mut();
        if left.is_empty() {
            let mut bytes = [0; BATCH * 8];
            sys::random(&mut bytes).expect("the system gives random bytes");
            let (words, _) = bytes.as_chunks::<8>();
            left.extend(words.iter().map(|w| u64::from_le_bytes(*w)));
        }
        left.pop().expect("just filled")
    }
}
