//! The computations, once for all vectors: each is a [`Kernel`] over the slices of one call.
//!
//! Q is summed by Horner's rule, from the highest member down: double, add the next. Members that are lost are doubled
//! past. So every computation but an update needs no factor, or one for what comes out at the end.

use crate::{
    Verdict, field,
    lanes::{Kernel, Lanes},
};
use std::slice;

/// What kernels with a Q look at of a member at a time. Longer stretches are slower from memory on some processors, and shorter ones in
/// the caches on others (RFD 0028, 4).
const LINES: usize = 128;
/// What kernels with no Q look at of a member at a time: faster in the caches, and no slower from memory.
const MORE_LINES: usize = 256;

/// A list of slices.
pub(crate) type Members<'a> = &'a [&'a [u8]];

/// Vectors from byte `at` of `slice`.
#[inline(always)]
fn load<L: Lanes, const U: usize>(lanes: L, slice: &[u8], at: usize) -> [L::Vector; U] {
    let span = &slice[at..][..U * L::BYTES];
    let mut vectors = [lanes.zero(); U];
    for (u, vector) in vectors.iter_mut().enumerate() {
        *vector = lanes.load(&span[u * L::BYTES..]);
    }
    vectors
}

/// Vectors to byte `at` of `slice`.
#[inline(always)]
fn store<L: Lanes, const U: usize>(lanes: L, vectors: [L::Vector; U], slice: &mut [u8], at: usize) {
    let span = &mut slice[at..][..U * L::BYTES];
    for (u, vector) in vectors.into_iter().enumerate() {
        lanes.store(vector, &mut span[u * L::BYTES..]);
    }
}

#[inline(always)]
fn add<L: Lanes, const U: usize>(
    lanes: L,
    mut a: [L::Vector; U],
    b: [L::Vector; U],
) -> [L::Vector; U] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = lanes.xor(*a, b);
    }
    a
}

#[inline(always)]
fn double<L: Lanes, const U: usize>(lanes: L, mut a: [L::Vector; U]) -> [L::Vector; U] {
    for a in &mut a {
        *a = lanes.double(*a);
    }
    a
}

#[inline(always)]
fn next<L: Lanes, const U: usize>(
    lanes: L,
    mut q: [L::Vector; U],
    high: [L::Vector; U],
    low: [L::Vector; U],
) -> [L::Vector; U] {
    for ((q, high), low) in q.iter_mut().zip(high).zip(low) {
        *q = lanes.next(*q, high, low);
    }
    q
}

#[inline(always)]
fn times<L: Lanes, const U: usize>(
    lanes: L,
    factor: L::Factor,
    mut a: [L::Vector; U],
) -> [L::Vector; U] {
    for a in &mut a {
        *a = lanes.times(factor, *a);
    }
    a
}

/// The sum of `members`, by fours: with a turn of the loop for each, turns and not the caches are what is waited for.
#[inline(always)]
fn sum<L: Lanes, const U: usize>(lanes: L, members: Members<'_>, at: usize) -> [L::Vector; U] {
    let mut p = [lanes.zero(); U];
    let (fours, rest) = members.as_chunks::<4>();
    for four in fours {
        let [a, b, c, d] = four.map(|member| load(lanes, member, at));
        p = add(lanes, p, add(lanes, add(lanes, a, b), add(lanes, c, d)));
    }
    for member in rest {
        p = add(lanes, p, load(lanes, member, at));
    }
    p
}

/// P and Q, as far as the members of `runs` make them. Runs go from the highest member down, and between two of them is
/// one that is lost.
#[inline(always)]
fn sums<L: Lanes, const U: usize>(
    lanes: L,
    runs: &[Members<'_>],
    at: usize,
) -> ([L::Vector; U], [L::Vector; U]) {
    let (mut p, mut q) = ([lanes.zero(); U], [lanes.zero(); U]);
    for (number, run) in runs.iter().enumerate() {
        if number > 0 {
            q = double(lanes, q);
        }
        let (lowest, pairs) = run.as_rchunks::<2>();
        for [low, high] in pairs.iter().rev() {
            let [low, high] = [load(lanes, low, at), load(lanes, high, at)];
            p = add(lanes, add(lanes, p, high), low);
            q = next(lanes, q, high, low);
        }
        for member in lowest {
            let member = load(lanes, member, at);
            p = add(lanes, p, member);
            q = add(lanes, double(lanes, q), member);
        }
    }
    (p, q)
}

/// `others` around the member that is lost.
fn around<'a>(others: Members<'a>, lost: usize) -> [Members<'a>; 2] {
    let (low, high) = others.split_at(lost);
    [high, low]
}

/// `others` around the two members that are lost, the lower one first.
fn around_both<'a>(others: Members<'a>, lost: [usize; 2]) -> [Members<'a>; 3] {
    let (low, rest) = others.split_at(lost[0]);
    let (middle, high) = rest.split_at(lost[1] - lost[0] - 1);
    [high, middle, low]
}

/// `out` becomes the sum of `sources` and of what `and` has.
pub(crate) struct Xor<'a> {
    pub(crate) sources: Members<'a>,
    pub(crate) and: Members<'a>,
    pub(crate) out: &'a mut [u8],
}

impl Kernel for Xor<'_> {
    const VISIT: usize = MORE_LINES;

    fn bytes(&self) -> usize {
        self.out.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let mut p: [_; U] = sum(lanes, self.sources, at);
        for source in self.and {
            p = add(lanes, p, load(lanes, source, at));
        }
        store(lanes, p, self.out, at);
    }
}

/// `p` and `q` become those of `data`.
pub(crate) struct Pq<'a> {
    pub(crate) data: Members<'a>,
    pub(crate) p: &'a mut [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for Pq<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = sums(lanes, slice::from_ref(&self.data), at);
        store(lanes, p, self.p, at);
        store(lanes, q, self.q, at);
    }
}

/// `q` becomes that of `data`.
pub(crate) struct Q<'a> {
    pub(crate) data: Members<'a>,
    pub(crate) q: &'a mut [u8],
}

impl Kernel for Q<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.q.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (_, q): ([_; U], _) = sums(lanes, slice::from_ref(&self.data), at);
        store(lanes, q, self.q, at);
    }
}

/// `p` goes from what `old` made of it to what `new` makes.
pub(crate) struct UpdateP<'a> {
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) p: &'a mut [u8],
}

impl Kernel for UpdateP<'_> {
    const VISIT: usize = MORE_LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = sum(lanes, &[self.old, self.new], at);
        let p = add(lanes, load(lanes, self.p, at), change);
        store(lanes, p, self.p, at);
    }
}

/// `q` goes from what `old` made of it to what `new` makes.
pub(crate) struct UpdateQ<'a> {
    /// The member's coefficient.
    pub(crate) factor: u8,
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for UpdateQ<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.q.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = sum(lanes, &[self.old, self.new], at);
        let change = times(lanes, lanes.factor(self.factor), change);
        let q = add(lanes, load(lanes, self.q, at), change);
        store(lanes, q, self.q, at);
    }
}

/// `p` and `q` go from what `old` made of them to what `new` makes.
pub(crate) struct UpdatePq<'a> {
    /// The member's coefficient in `q`.
    pub(crate) factor: u8,
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) p: &'a mut [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for UpdatePq<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = sum(lanes, &[self.old, self.new], at);
        let p = add(lanes, load(lanes, self.p, at), change);
        let change = times(lanes, lanes.factor(self.factor), change);
        let q = add(lanes, load(lanes, self.q, at), change);
        store(lanes, p, self.p, at);
        store(lanes, q, self.q, at);
    }
}

/// `out` becomes the lost member.
pub(crate) struct DataByQ<'a> {
    runs: [Members<'a>; 2],
    factor: u8,
    q: &'a [u8],
    out: &'a mut [u8],
}

impl<'a> DataByQ<'a> {
    pub(crate) fn new(lost: usize, others: Members<'a>, q: &'a [u8], out: &'a mut [u8]) -> Self {
        let factor = field::inverse(field::power(lost));
        Self { runs: around(others, lost), factor, q, out }
    }
}

impl Kernel for DataByQ<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.out.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (_, q): ([_; U], _) = sums(lanes, &self.runs, at);
        let missing = add(lanes, q, load(lanes, self.q, at));
        let member = times(lanes, lanes.factor(self.factor), missing);
        store(lanes, member, self.out, at);
    }
}

/// `out` become the two lost members.
///
/// What P and Q lack is `x + y` and `g^i x + g^j y`. From these `y = (g^i (x + y) + (g^i x + g^j y)) / (g^i + g^j)`.
pub(crate) struct TwoData<'a> {
    runs: [Members<'a>; 3],
    of_p: u8,
    of_q: u8,
    p: &'a [u8],
    q: &'a [u8],
    out: [&'a mut [u8]; 2],
}

impl<'a> TwoData<'a> {
    pub(crate) fn new(
        lost: [usize; 2],
        others: Members<'a>,
        [p, q]: [&'a [u8]; 2],
        out: [&'a mut [u8]; 2],
    ) -> Self {
        let low = field::power(lost[0]);
        let of_q = field::inverse(low ^ field::power(lost[1]));
        let of_p = field::mul(low, of_q);
        Self { runs: around_both(others, lost), of_p, of_q, p, q, out }
    }
}

impl Kernel for TwoData<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = sums(lanes, &self.runs, at);
        let p = add(lanes, p, load(lanes, self.p, at));
        let q = add(lanes, q, load(lanes, self.q, at));
        let of_p = times(lanes, lanes.factor(self.of_p), p);
        let high = add(lanes, of_p, times(lanes, lanes.factor(self.of_q), q));
        store(lanes, add(lanes, p, high), self.out[0], at);
        store(lanes, high, self.out[1], at);
    }
}

/// Whether `p` is that of `data`.
pub(crate) struct CheckP<'a> {
    pub(crate) data: Members<'a>,
    pub(crate) p: &'a [u8],
    pub(crate) matches: bool,
}

impl Kernel for CheckP<'_> {
    const VISIT: usize = MORE_LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let p: [_; U] = sum(lanes, self.data, at);
        self.matches &= is_zero(lanes, add(lanes, p, load(lanes, self.p, at)));
    }
}

/// Whether `p` and `q` are those of `data`, and what is wrong if not.
pub(crate) struct CheckPq<'a> {
    pub(crate) data: Members<'a>,
    pub(crate) p: &'a [u8],
    pub(crate) q: &'a [u8],
    pub(crate) verdict: Verdict,
}

impl Kernel for CheckPq<'_> {
    const VISIT: usize = LINES;

    fn bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = sums(lanes, slice::from_ref(&self.data), at);
        let p = add(lanes, p, load(lanes, self.p, at));
        let q = add(lanes, q, load(lanes, self.q, at));
        if !is_zero(lanes, p) || !is_zero(lanes, q) {
            for (p, q) in p.into_iter().zip(q) {
                let (mut by_p, mut by_q) = ([0; WIDEST], [0; WIDEST]);
                lanes.store(p, &mut by_p);
                lanes.store(q, &mut by_q);
                self.blame(&by_p[..L::BYTES], &by_q[..L::BYTES]);
            }
        }
    }
}

/// No vector has more bytes.
const WIDEST: usize = 64;

impl CheckPq<'_> {
    /// Finds out what is wrong where P and Q differ by this from what they should be.
    #[cold]
    #[inline(never)]
    fn blame(&mut self, p: &[u8], q: &[u8]) {
        for (&p, &q) in p.iter().zip(q) {
            let found = Verdict::of_byte(p, q, self.data.len());
            self.verdict = self.verdict.and(found);
        }
    }
}

#[inline(always)]
fn is_zero<L: Lanes, const U: usize>(lanes: L, vectors: [L::Vector; U]) -> bool {
    let mut any = lanes.zero();
    for vector in vectors {
        any = lanes.or(any, vector);
    }
    lanes.is_zero(any)
}
