//! Engines that compute parity, and which of them this machine has.

use crate::{
    SyndromeVerdict, arch, gf256,
    kernel::{
        CheckP, CheckPq, MemberSlices, Pq, Q, RecoverDataFromQ, RecoverTwoData, UpdateP, UpdatePq,
        UpdateQ, Xor,
    },
    lanes::Lanes,
};
use std::{fmt, sync::LazyLock};

/// An engine that computes parity: one kind of processor vectors, or an accelerator.
///
/// It is called through [`Parity`](crate::Parity), which asserts each operation's preconditions:
/// all slices of a call are equally long, indices are those of data members, and of two lost
/// members the lower comes first. If these do not hold, an engine may panic or compute nonsense,
/// but touches nothing else.
pub trait Engine: Send + Sync {
    /// Its name in tests, figures and logs.
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
    fn update_q(&self, index: usize, old: &[u8], new: &[u8], q: &mut [u8]);

    /// [`Parity::update_pq`](crate::Parity::update_pq)
    fn update_pq(&self, index: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]);

    /// [`Parity::recover_data_from_p`](crate::Parity::recover_data_from_p)
    fn recover_data_from_p(&self, others: &[&[u8]], p: &[u8], out: &mut [u8]);

    /// [`Parity::recover_data_from_q`](crate::Parity::recover_data_from_q)
    fn recover_data_from_q(&self, lost: usize, others: &[&[u8]], q: &[u8], out: &mut [u8]);

    /// [`Parity::recover_two_data`](crate::Parity::recover_two_data)
    fn recover_two_data(
        &self,
        lost: [usize; 2],
        others: &[&[u8]],
        pq: [&[u8]; 2],
        out: [&mut [u8]; 2],
    );

    /// [`Parity::check_p`](crate::Parity::check_p)
    fn check_p(&self, data: &[&[u8]], p: &[u8]) -> bool;

    /// [`Parity::check_pq`](crate::Parity::check_pq)
    fn check_pq(&self, data: &[&[u8]], p: &[u8], q: &[u8]) -> SyndromeVerdict;
}

impl fmt::Debug for dyn Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The engines of this machine, the best first. The last one exists on every machine.
pub fn engines() -> impl Iterator<Item = &'static dyn Engine> {
    arch::engines()
}

/// The best engine of this machine; determined once.
pub(crate) fn best() -> &'static dyn Engine {
    static BEST: LazyLock<&'static dyn Engine> = LazyLock::new(|| {
        let best = engines().next();
        best.expect("the portable engine exists on every machine")
    });
    *BEST
}

impl<L: Lanes> Engine for L {
    fn name(&self) -> &'static str {
        L::NAME
    }

    fn xor(&self, sources: &[&[u8]], out: &mut [u8]) {
        self.enter(&mut Xor { sources, more_sources: &[], out });
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

    fn update_q(&self, index: usize, old: &[u8], new: &[u8], q: &mut [u8]) {
        self.enter(&mut UpdateQ { factor: gf256::power(index), old, new, q });
    }

    fn update_pq(&self, index: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]) {
        self.enter(&mut UpdatePq { factor: gf256::power(index), old, new, p, q });
    }

    fn recover_data_from_p(&self, others: &[&[u8]], p: &[u8], out: &mut [u8]) {
        self.enter(&mut Xor { sources: others, more_sources: &[p], out });
    }

    fn recover_data_from_q(&self, lost: usize, others: MemberSlices<'_>, q: &[u8], out: &mut [u8]) {
        self.enter(&mut RecoverDataFromQ::new(lost, others, q, out));
    }

    fn recover_two_data(
        &self,
        lost: [usize; 2],
        others: &[&[u8]],
        pq: [&[u8]; 2],
        out: [&mut [u8]; 2],
    ) {
        self.enter(&mut RecoverTwoData::new(lost, others, pq, out));
    }

    fn check_p(&self, data: &[&[u8]], p: &[u8]) -> bool {
        let mut check = CheckP { data, p, matches: true };
        self.enter(&mut check);
        check.matches
    }

    fn check_pq(&self, data: &[&[u8]], p: &[u8], q: &[u8]) -> SyndromeVerdict {
        let mut check = CheckPq { data, p, q, verdict: SyndromeVerdict::Consistent };
        self.enter(&mut check);
        check.verdict
    }
}
