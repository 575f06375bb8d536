//! The computations, once for all vectors: each is a [`Kernel`] over the slices of one call.
//!
//! Q is summed by Horner's rule, from the highest member down: double, add the next. Lost members
//! are only doubled past. So every computation except an update needs at most one factor, for its
//! result.

use crate::{
    SyndromeVerdict, gf256,
    lanes::{Kernel, Lanes},
};
use std::slice;

/// How many bytes of a member kernels with Q read at a time. Larger values are slower from memory
/// on some processors, and smaller ones in the caches on others (RFD 0028, 4).
const VISIT_BYTES_PQ: usize = 128;
/// The same for kernels without Q: faster in the caches, and no slower from memory.
const VISIT_BYTES_P: usize = 256;

/// A list of slices.
pub(crate) type MemberSlices<'a> = &'a [&'a [u8]];

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
fn xor<L: Lanes, const U: usize>(
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
fn horner_step2<L: Lanes, const U: usize>(
    lanes: L,
    mut q: [L::Vector; U],
    high: [L::Vector; U],
    low: [L::Vector; U],
) -> [L::Vector; U] {
    for ((q, high), low) in q.iter_mut().zip(high).zip(low) {
        *q = lanes.horner_step2(*q, high, low);
    }
    q
}

#[inline(always)]
fn multiply<L: Lanes, const U: usize>(
    lanes: L,
    factor: L::Factor,
    mut a: [L::Vector; U],
) -> [L::Vector; U] {
    for a in &mut a {
        *a = lanes.multiply(factor, *a);
    }
    a
}

/// The sum of `members`, four at a time: with one per iteration, loop overhead and not the caches
/// would limit the speed.
#[inline(always)]
fn xor_sum<L: Lanes, const U: usize>(
    lanes: L,
    members: MemberSlices<'_>,
    at: usize,
) -> [L::Vector; U] {
    let mut p = [lanes.zero(); U];
    let (fours, rest) = members.as_chunks::<4>();
    for four in fours {
        let [a, b, c, d] = four.map(|member| load(lanes, member, at));
        p = xor(lanes, p, xor(lanes, xor(lanes, a, b), xor(lanes, c, d)));
    }
    for member in rest {
        p = xor(lanes, p, load(lanes, member, at));
    }
    p
}

/// P and Q of the members of `runs`. Runs go from the highest member down; between two of them one
/// member is lost.
#[inline(always)]
fn syndromes<L: Lanes, const U: usize>(
    lanes: L,
    runs: &[MemberSlices<'_>],
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
            p = xor(lanes, xor(lanes, p, high), low);
            q = horner_step2(lanes, q, high, low);
        }
        for member in lowest {
            let member = load(lanes, member, at);
            p = xor(lanes, p, member);
            q = xor(lanes, double(lanes, q), member);
        }
    }
    (p, q)
}

/// `others` before and after the lost member.
fn split_around<'a>(others: MemberSlices<'a>, lost: usize) -> [MemberSlices<'a>; 2] {
    let (low, high) = others.split_at(lost);
    [high, low]
}

/// `others` around the two lost members, the lower one first.
fn split_around_both<'a>(others: MemberSlices<'a>, lost: [usize; 2]) -> [MemberSlices<'a>; 3] {
    let (low, rest) = others.split_at(lost[0]);
    let (middle, high) = rest.split_at(lost[1] - lost[0] - 1);
    [high, middle, low]
}

/// `out` becomes the sum of `sources` and `and`.
pub(crate) struct Xor<'a> {
    pub(crate) sources: MemberSlices<'a>,
    pub(crate) more_sources: MemberSlices<'a>,
    pub(crate) out: &'a mut [u8],
}

impl Kernel for Xor<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_P;

    fn len_bytes(&self) -> usize {
        self.out.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let mut p: [_; U] = xor_sum(lanes, self.sources, at);
        for source in self.more_sources {
            p = xor(lanes, p, load(lanes, source, at));
        }
        store(lanes, p, self.out, at);
    }
}

/// Sets `p` and `q` to those of `data`.
pub(crate) struct Pq<'a> {
    pub(crate) data: MemberSlices<'a>,
    pub(crate) p: &'a mut [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for Pq<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = syndromes(lanes, slice::from_ref(&self.data), at);
        store(lanes, p, self.p, at);
        store(lanes, q, self.q, at);
    }
}

/// Sets `q` to that of `data`.
pub(crate) struct Q<'a> {
    pub(crate) data: MemberSlices<'a>,
    pub(crate) q: &'a mut [u8],
}

impl Kernel for Q<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.q.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (_, q): ([_; U], _) = syndromes(lanes, slice::from_ref(&self.data), at);
        store(lanes, q, self.q, at);
    }
}

/// Updates `p` for a member that changes from `old` to `new`.
pub(crate) struct UpdateP<'a> {
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) p: &'a mut [u8],
}

impl Kernel for UpdateP<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_P;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = xor_sum(lanes, &[self.old, self.new], at);
        let p = xor(lanes, load(lanes, self.p, at), change);
        store(lanes, p, self.p, at);
    }
}

/// Updates `q` for a member that changes from `old` to `new`.
pub(crate) struct UpdateQ<'a> {
    /// The member's coefficient.
    pub(crate) factor: u8,
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for UpdateQ<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.q.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = xor_sum(lanes, &[self.old, self.new], at);
        let change = multiply(lanes, lanes.factor(self.factor), change);
        let q = xor(lanes, load(lanes, self.q, at), change);
        store(lanes, q, self.q, at);
    }
}

/// Updates `p` and `q` for a member that changes from `old` to `new`.
pub(crate) struct UpdatePq<'a> {
    /// The member's coefficient in `q`.
    pub(crate) factor: u8,
    pub(crate) old: &'a [u8],
    pub(crate) new: &'a [u8],
    pub(crate) p: &'a mut [u8],
    pub(crate) q: &'a mut [u8],
}

impl Kernel for UpdatePq<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let change: [_; U] = xor_sum(lanes, &[self.old, self.new], at);
        let p = xor(lanes, load(lanes, self.p, at), change);
        let change = multiply(lanes, lanes.factor(self.factor), change);
        let q = xor(lanes, load(lanes, self.q, at), change);
        store(lanes, p, self.p, at);
        store(lanes, q, self.q, at);
    }
}

/// Sets `out` to the lost member.
pub(crate) struct RecoverDataFromQ<'a> {
    runs: [MemberSlices<'a>; 2],
    factor: u8,
    q: &'a [u8],
    out: &'a mut [u8],
}

impl<'a> RecoverDataFromQ<'a> {
    pub(crate) fn new(
        lost: usize,
        others: MemberSlices<'a>,
        q: &'a [u8],
        out: &'a mut [u8],
    ) -> Self {
        let factor = gf256::inverse(gf256::power(lost));
        Self { runs: split_around(others, lost), factor, q, out }
    }
}

impl Kernel for RecoverDataFromQ<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.out.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (_, q): ([_; U], _) = syndromes(lanes, &self.runs, at);
        let missing = xor(lanes, q, load(lanes, self.q, at));
        let member = multiply(lanes, lanes.factor(self.factor), missing);
        store(lanes, member, self.out, at);
    }
}

/// Sets `out` to the two lost members.
///
/// P and Q of the others differ from `p` and `q` by `x + y` and `g^i x + g^j y`. So `y = (g^i (x +
/// y) + (g^i x + g^j y)) / (g^i + g^j)`.
pub(crate) struct RecoverTwoData<'a> {
    runs: [MemberSlices<'a>; 3],
    p_factor: u8,
    q_factor: u8,
    p: &'a [u8],
    q: &'a [u8],
    out: [&'a mut [u8]; 2],
}

impl<'a> RecoverTwoData<'a> {
    pub(crate) fn new(
        lost: [usize; 2],
        others: MemberSlices<'a>,
        [p, q]: [&'a [u8]; 2],
        out: [&'a mut [u8]; 2],
    ) -> Self {
        let low = gf256::power(lost[0]);
        let of_q = gf256::inverse(low ^ gf256::power(lost[1]));
        let of_p = gf256::mul(low, of_q);
        Self { runs: split_around_both(others, lost), p_factor: of_p, q_factor: of_q, p, q, out }
    }
}

impl Kernel for RecoverTwoData<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = syndromes(lanes, &self.runs, at);
        let p = xor(lanes, p, load(lanes, self.p, at));
        let q = xor(lanes, q, load(lanes, self.q, at));
        let of_p = multiply(lanes, lanes.factor(self.p_factor), p);
        let high = xor(lanes, of_p, multiply(lanes, lanes.factor(self.q_factor), q));
        store(lanes, xor(lanes, p, high), self.out[0], at);
        store(lanes, high, self.out[1], at);
    }
}

/// Whether `p` is that of `data`.
pub(crate) struct CheckP<'a> {
    pub(crate) data: MemberSlices<'a>,
    pub(crate) p: &'a [u8],
    pub(crate) matches: bool,
}

impl Kernel for CheckP<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_P;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let p: [_; U] = xor_sum(lanes, self.data, at);
        self.matches &= is_zero(lanes, xor(lanes, p, load(lanes, self.p, at)));
    }
}

/// Whether `p` and `q` are those of `data`; if not, which member is wrong.
pub(crate) struct CheckPq<'a> {
    pub(crate) data: MemberSlices<'a>,
    pub(crate) p: &'a [u8],
    pub(crate) q: &'a [u8],
    pub(crate) verdict: SyndromeVerdict,
}

impl Kernel for CheckPq<'_> {
    const VISIT_BYTES: usize = VISIT_BYTES_PQ;

    fn len_bytes(&self) -> usize {
        self.p.len()
    }

    #[inline(always)]
    fn step<L: Lanes, const U: usize>(&mut self, lanes: L, at: usize) {
        let (p, q): ([_; U], _) = syndromes(lanes, slice::from_ref(&self.data), at);
        let p = xor(lanes, p, load(lanes, self.p, at));
        let q = xor(lanes, q, load(lanes, self.q, at));
        if !is_zero(lanes, p) || !is_zero(lanes, q) {
            for (p, q) in p.into_iter().zip(q) {
                let (mut by_p, mut by_q) = ([0; MAX_VECTOR_BYTES], [0; MAX_VECTOR_BYTES]);
                lanes.store(p, &mut by_p);
                lanes.store(q, &mut by_q);
                self.locate_errors(&by_p[..L::BYTES], &by_q[..L::BYTES]);
            }
        }
    }
}

/// The longest vector in bytes.
const MAX_VECTOR_BYTES: usize = 64;

impl CheckPq<'_> {
    /// Finds the wrong member from the differences of P and Q (the syndromes).
    #[cold]
    #[inline(never)]
    fn locate_errors(&mut self, p: &[u8], q: &[u8]) {
        for (&p, &q) in p.iter().zip(q) {
            let found = SyndromeVerdict::from_syndromes(p, q, self.data.len());
            self.verdict = self.verdict.merge(found);
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
