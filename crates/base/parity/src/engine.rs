//! Engines: what computes, and which of them this machine has.

use crate::{
    Verdict, arch, field,
    kernel::{CheckP, CheckPq, DataByQ, Members, Pq, Q, TwoData, UpdateP, UpdatePq, UpdateQ, Xor},
    lanes::Lanes,
};
use std::{fmt, sync::LazyLock};

/// What computes parity: a kind of vectors of the processor, or an accelerator.
///
/// [`Parity`](crate::Parity) is the way to call it, and asserts what each operation there says: all slices of a call are equally
/// long, places are those of data members, of two lost ones the lower comes first. An engine takes that for granted. If it is
/// wrong, an engine may panic or compute nonsense, but touches nothing else.
pub trait Engine: Send + Sync {
    /// For people: in tests, figures and logs.
    fn name(&self) -> &'static str;

    /// [`Parity::xor`](crate::Parity::xor)
    fn xor(&self, sources: &[&[u8]], out: &mut [u8]);

    /// [`Parity::pq`](crate::Parity::pq)
    fn pq(&self, data: &[&[u8]], p: &mut [u8], q: &mut [u8]);

    /// [`Parity::q`](crate::Parity::q)
    fn q(&self, data: &[&[u8]], q: &mut [u8]);

    /// [`Parity::update_p`](crate::Parity::update_p)
    fn update_p(&self, old: &[u8], new: &[u8], p: &mut [u8]);

    /// [`Parity::update_q`](crate::Parity::update_q)
    fn update_q(&self, place: usize, old: &[u8], new: &[u8], q: &mut [u8]);

    /// [`Parity::update_pq`](crate::Parity::update_pq)
    fn update_pq(&self, place: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]);

    /// [`Parity::data_by_p`](crate::Parity::data_by_p)
    fn data_by_p(&self, others: &[&[u8]], p: &[u8], out: &mut [u8]);

    /// [`Parity::data_by_q`](crate::Parity::data_by_q)
    fn data_by_q(&self, lost: usize, others: &[&[u8]], q: &[u8], out: &mut [u8]);

    /// [`Parity::two_data`](crate::Parity::two_data)
    fn two_data(&self, lost: [usize; 2], others: &[&[u8]], pq: [&[u8]; 2], out: [&mut [u8]; 2]);

    /// [`Parity::check_p`](crate::Parity::check_p)
    fn check_p(&self, data: &[&[u8]], p: &[u8]) -> bool;

    /// [`Parity::check_pq`](crate::Parity::check_pq)
    fn check_pq(&self, data: &[&[u8]], p: &[u8], q: &[u8]) -> Verdict;
}

impl fmt::Debug for dyn Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The engines of this machine, the best one first. The last one is there on every machine.
pub fn engines() -> impl Iterator<Item = &'static dyn Engine> {
    arch::engines()
}

/// The best engine of this machine; found out once.
pub(crate) fn best() -> &'static dyn Engine {
    static BEST: LazyLock<&'static dyn Engine> = LazyLock::new(|| {
        let best = engines().next();
        best.expect("the portable one is there on every machine")
    });
    *BEST
}

impl<L: Lanes> Engine for L {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn xor(&self, sources: &[&[u8]], out: &mut [u8]) {
        self.enter(&mut Xor { sources, and: &[], out });
    }

    fn pq(&self, data: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
        self.enter(&mut Pq { data, p, q });
    }

    fn q(&self, data: &[&[u8]], q: &mut [u8]) {
        self.enter(&mut Q { data, q });
    }

    fn update_p(&self, old: &[u8], new: &[u8], p: &mut [u8]) {
        self.enter(&mut UpdateP { old, new, p });
    }

    fn update_q(&self, place: usize, old: &[u8], new: &[u8], q: &mut [u8]) {
        self.enter(&mut UpdateQ { factor: field::power(place), old, new, q });
    }

    fn update_pq(&self, place: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]) {
        self.enter(&mut UpdatePq { factor: field::power(place), old, new, p, q });
    }

    fn data_by_p(&self, others: &[&[u8]], p: &[u8], out: &mut [u8]) {
        self.enter(&mut Xor { sources: others, and: &[p], out });
    }

    fn data_by_q(&self, lost: usize, others: Members<'_>, q: &[u8], out: &mut [u8]) {
        self.enter(&mut DataByQ::new(lost, others, q, out));
    }

    fn two_data(&self, lost: [usize; 2], others: &[&[u8]], pq: [&[u8]; 2], out: [&mut [u8]; 2]) {
        self.enter(&mut TwoData::new(lost, others, pq, out));
    }

    fn check_p(&self, data: &[&[u8]], p: &[u8]) -> bool {
        let mut check = CheckP { data, p, matches: true };
        self.enter(&mut check);
        check.matches
    }

    fn check_pq(&self, data: &[&[u8]], p: &[u8], q: &[u8]) -> Verdict {
        let mut check = CheckPq { data, p, q, verdict: Verdict::Matches };
        self.enter(&mut check);
        check.verdict
    }
}
