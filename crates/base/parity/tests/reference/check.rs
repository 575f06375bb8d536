//! The results that every engine must give for a stripe.

use super::reference::Stripe;
use parity::{Parity, SyndromeVerdict};

/// A buffer that begins `skew` bytes after the allocation, with guard bytes around it.
struct Output {
    memory: Vec<u8>,
    skew: usize,
}

const UNTOUCHED: u8 = 0xa5;

impl Output {
    fn new(bytes: usize, skew: usize) -> Self {
        Self { memory: vec![UNTOUCHED; skew + bytes + 64], skew }
    }

    fn of(contents: &[u8], skew: usize) -> Self {
        let mut output = Self::new(contents.len(), skew);
        output.slice().copy_from_slice(contents);
        output
    }

    fn slice(&mut self) -> &mut [u8] {
        let end = self.memory.len() - 64;
        &mut self.memory[self.skew..end]
    }

    #[track_caller]
    fn holds(&mut self, expected: &[u8], what: &str) {
        assert!(self.slice() == expected, "{what}");
        let end = self.memory.len() - 64;
        let around = self.memory[..self.skew].iter().chain(&self.memory[end..]);
        assert!(around.copied().all(|byte| byte == UNTOUCHED), "{what} wrote beside its output");
    }
}

/// P and Q of all.
pub(crate) fn generation(parity: Parity, stripe: &Stripe, skew: usize) {
    let data = stripe.others(&[]);
    let [mut p, mut q] = [1, 2].map(|more| Output::new(stripe.bytes, skew + more));
    parity.pq(&data, p.slice(), q.slice());
    p.holds(&stripe.p, "P of both");
    q.holds(&stripe.q, "Q of both");
    let [mut p, mut q] = [2, 1].map(|more| Output::new(stripe.bytes, skew + more));
    parity.xor(&data, p.slice());
    parity.q(&data, q.slice());
    p.holds(&stripe.p, "P");
    q.holds(&stripe.q, "Q");
}

/// Replaces the member at `place` by `new`.
pub(crate) fn update(parity: Parity, stripe: &Stripe, place: usize, new: &[u8], skew: usize) {
    let old = &stripe.data[place];
    let mut data = stripe.data.clone();
    data[place] = new.to_vec();
    let expected =
        [super::reference::p(&data, stripe.bytes), super::reference::q(&data, stripe.bytes)];
    let [mut p, mut q] = [Output::of(&stripe.p, skew), Output::of(&stripe.q, skew + 3)];
    parity.update_pq(place, old, new, p.slice(), q.slice());
    p.holds(&expected[0], "P updated with Q");
    q.holds(&expected[1], "Q updated with P");
    let [mut p, mut q] = [Output::of(&stripe.p, skew), Output::of(&stripe.q, skew + 3)];
    parity.update_p(old, new, p.slice());
    parity.update_q(place, old, new, q.slice());
    p.holds(&expected[0], "P updated");
    q.holds(&expected[1], "Q updated");
}

/// One member, by P and by Q.
pub(crate) fn recover_one(parity: Parity, stripe: &Stripe, lost: usize, skew: usize) {
    let others = stripe.others(&[lost]);
    let [mut by_p, mut by_q] = [1, 5].map(|more| Output::new(stripe.bytes, skew + more));
    parity.recover_data_from_p(&others, &stripe.p, by_p.slice());
    parity.recover_data_from_q(lost, &others, &stripe.q, by_q.slice());
    by_p.holds(&stripe.data[lost], "a member by P");
    by_q.holds(&stripe.data[lost], "a member by Q");
}

/// Two members.
pub(crate) fn recover_two(parity: Parity, stripe: &Stripe, lost: [usize; 2], skew: usize) {
    let others = stripe.others(&lost);
    let [mut low, mut high] = [3, 4].map(|more| Output::new(stripe.bytes, skew + more));
    parity.recover_two_data(lost, &others, [&stripe.p, &stripe.q], [low.slice(), high.slice()]);
    low.holds(&stripe.data[lost[0]], "the lower of two members");
    high.holds(&stripe.data[lost[1]], "the higher of two members");
}

/// The expected results.
pub(crate) fn check(parity: Parity, stripe: &Stripe) {
    let data = stripe.others(&[]);
    assert!(parity.check_p(&data, &stripe.p), "P matches");
    assert_eq!(parity.check_pq(&data, &stripe.p, &stripe.q), SyndromeVerdict::Consistent);
}

/// One wrong byte, in every member, in P and in Q.
pub(crate) fn locate_error(parity: Parity, stripe: &mut Stripe, at: usize, error: u8) {
    let look = |stripe: &Stripe| parity.check_pq(&stripe.others(&[]), &stripe.p, &stripe.q);
    for place in 0..stripe.data.len() {
        stripe.data[place][at] ^= error;
        assert!(!parity.check_p(&stripe.others(&[]), &stripe.p), "P has seen it");
        assert_eq!(look(stripe), SyndromeVerdict::Data(place));
        stripe.data[place][at] ^= error;
    }
    stripe.p[at] ^= error;
    assert!(!parity.check_p(&stripe.others(&[]), &stripe.p), "P is wrong itself");
    assert_eq!(look(stripe), SyndromeVerdict::P);
    stripe.p[at] ^= error;
    stripe.q[at] ^= error;
    assert_eq!(look(stripe), SyndromeVerdict::Q);
    stripe.q[at] ^= error;
}
