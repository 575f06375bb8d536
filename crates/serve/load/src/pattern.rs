//! Chooses the next operation. Pure: the same seed gives the same sequence.
//!
//! *Sequential*: each direction goes from the start of its region to the end and starts again, as
//! in fio. *Random*: positions are multiples of the smallest operation; a pass over them is a
//! permutation, so that each is used once per pass as with fio's map, without its memory. With
//! `norandommap` each position is drawn independently. An operation that would exceed the end is
//! shortened. With several sizes (`bsrange`, other sizes for reads than for writes), each start
//! position occurs once per pass, and passes count positions, not bytes.

use crate::job::Dir;
use crate::random::{Permutation, SplitMix64};
use crate::spec::JobSpec;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Direction.
    pub dir: Dir,
    /// First byte.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The sequence of operations of a job.
#[derive(Debug)]
pub struct Pattern {
    spec: JobSpec,
    rng: SplitMix64,
    /// Bytes left to transfer; `None`: unlimited.
    remaining_bytes: Option<u64>,
    /// Sequential: current offset of each direction.
    sequential_offsets: [u64; 3],
    /// Random: positions per pass, those used, and completed passes.
    position_count: u64,
    used_positions: u64,
    pass: u64,
    permutation: Permutation,
}

impl Pattern {
    /// Starts the sequence.
    #[must_use]
    pub fn new(spec: &JobSpec) -> Self {
        let places = spec.length / spec.unit;
        Self {
            rng: SplitMix64::new(spec.seed),
            remaining_bytes: spec.limit_bytes,
            sequential_offsets: [0; 3],
            position_count: places,
            used_positions: 0,
            pass: 0,
            permutation: Permutation::new(places, spec.seed),
            spec: spec.clone(),
        }
    }

    fn direction(&mut self) -> Dir {
        let rw = self.spec.rw;
        match (rw.read, rw.write) {
            (true, true) if self.rng.below(100) < u64::from(self.spec.rwmixread) => Dir::Read,
            (_, true) => Dir::Write,
            (true, false) => Dir::Read,
            (false, false) => Dir::Trim,
        }
    }

    fn random_position(&mut self) -> u64 {
        if !self.spec.random_map {
            return self.rng.below(self.position_count);
        }
        if self.used_positions == self.position_count {
            (self.used_positions, self.pass) = (0, self.pass + 1);
            let seed = crate::random::mix(self.spec.seed.wrapping_add(self.pass));
            self.permutation = Permutation::new(self.position_count, seed);
        }
        self.used_positions += 1;
        self.permutation.permute(self.used_positions - 1)
    }
}

impl Iterator for Pattern {
    type Item = Io;

    fn next(&mut self) -> Option<Io> {
        if self.remaining_bytes == Some(0) {
            return None;
        }
        let dir = self.direction();
        let (least, most) = self.spec.bs[dir.index()];
        let unit = self.spec.unit;
        let wanted = if least == most {
            least
        } else {
            least + self.rng.below((most - least) / unit + 1) * unit
        };
        let from = if self.spec.rw.random {
            self.random_position() * unit
        } else {
            let from = self.sequential_offsets[dir.index()];
            if from < self.spec.length { from } else { 0 }
        };
        let mut len = wanted.min(self.spec.length - from);
        if let Some(left) = &mut self.remaining_bytes {
            // The last operation is whole too, so slightly more than requested may be transferred.
            len = len.min(left.checked_next_multiple_of(unit).unwrap_or(u64::MAX));
            *left = left.saturating_sub(len);
        }
        self.sequential_offsets[dir.index()] = from + len;
        Some(Io { dir, at: self.spec.start + from, len })
    }
}
