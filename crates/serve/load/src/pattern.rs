//! Where the next operation goes. Pure, and the same for the same seed.
//!
//! *Sequential*: each direction goes from the beginning of its part to the end, and begins again, as in fio. *Random*: places
//! are multiples of the smallest operation; a pass over them is a permutation, so that each is used once in a pass as fio's
//! map has it, and needs no memory. With `norandommap` each place is drawn by itself. An operation that would go beyond the
//! end is shortened. Where sizes differ (`bsrange`, other sizes for reads than for writes), it is the place where operations
//! begin that comes once in a pass, and the passes of a job count places, not bytes.

use crate::chance::{Dice, Permutation};
use crate::job::Dir;
use crate::spec::Spec;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Which way.
    pub dir: Dir,
    /// First byte.
    pub at: u64,
    /// How many bytes.
    pub len: u64,
}

/// The operations of a job, one after the other.
#[derive(Debug)]
pub struct Pattern {
    spec: Spec,
    dice: Dice,
    /// Bytes that are still to be moved; `None` without end.
    left: Option<u64>,
    /// Sequential: how far each direction is.
    done: [u64; 3],
    /// Random: places of a pass, those used, and how many passes there were.
    places: u64,
    used: u64,
    pass: u64,
    order: Permutation,
}

impl Pattern {
    /// Begins.
    #[must_use]
    pub fn new(spec: &Spec) -> Self {
        let places = spec.length / spec.unit;
        Self {
            dice: Dice::new(spec.seed),
            left: spec.limit,
            done: [0; 3],
            places,
            used: 0,
            pass: 0,
            order: Permutation::new(places, spec.seed),
            spec: spec.clone(),
        }
    }

    fn direction(&mut self) -> Dir {
        let rw = self.spec.rw;
        match (rw.read, rw.write) {
            (true, true) if self.dice.below(100) < u64::from(self.spec.rwmixread) => Dir::Read,
            (_, true) => Dir::Write,
            (true, false) => Dir::Read,
            (false, false) => Dir::Trim,
        }
    }

    fn random_place(&mut self) -> u64 {
        if !self.spec.map {
            return self.dice.below(self.places);
        }
        if self.used == self.places {
            (self.used, self.pass) = (0, self.pass + 1);
            let seed = crate::chance::mix(self.spec.seed.wrapping_add(self.pass));
            self.order = Permutation::new(self.places, seed);
        }
        self.used += 1;
        self.order.of(self.used - 1)
    }
}

impl Iterator for Pattern {
    type Item = Io;

    fn next(&mut self) -> Option<Io> {
        if self.left == Some(0) {
            return None;
        }
        let dir = self.direction();
        let (least, most) = self.spec.bs[dir.index()];
        let unit = self.spec.unit;
        let wanted = if least == most {
            least
        } else {
            least + self.dice.below((most - least) / unit + 1) * unit
        };
        let from = if self.spec.rw.random {
            self.random_place() * unit
        } else {
            let from = self.done[dir.index()];
            if from < self.spec.length { from } else { 0 }
        };
        let mut len = wanted.min(self.spec.length - from);
        if let Some(left) = &mut self.left {
            // The last one is whole, as all are: what is moved may be a little more than was asked for.
            len = len.min(left.checked_next_multiple_of(unit).unwrap_or(u64::MAX));
            *left = left.saturating_sub(len);
        }
        self.done[dir.index()] = from + len;
        Some(Io { dir, at: self.spec.start + from, len })
    }
}
