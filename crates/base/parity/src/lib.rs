//! Parity for RAID 5 and 6: P is the sum of the data members, Q the sum of each times its power of
//! the generator.
//!
//! The field is GF(2^8) of polynomial 0x11d with generator 2, as in Linux' md and ISA-L: each can
//! read what the others have written. [`Parity`] computes over slices of equal length; callers with
//! lists of pages call it page by page. The [`engines`] of this machine give the same bytes and
//! differ in speed. Design and figures: RFD 0028.
//!
//! ```text
//! let data: [&[u8]; 3] = [b"some", b"data", b"here"];
//! let (mut p, mut q) = ([0; 4], [0; 4]);
//! let parity = parity::Parity::best();
//! parity.pq(&data, &mut p, &mut q);
//!
//! let (mut first, mut third) = ([0; 4], [0; 4]);
//! parity.recover_two_data([0, 2], &[data[1]], [&p, &q], [&mut first, &mut third]);
//! assert_eq!((&first, &third), (b"some", b"here"));
//! ```
#![warn(clippy::undocumented_unsafe_blocks)]

mod arch;
mod engine;
pub mod gf256;
mod kernel;
mod lanes;
mod syndrome_check;

pub use engine::{Engine, engines};
pub use syndrome_check::SyndromeVerdict;

/// Most data members that Q supports.
pub const MAX_DATA_MEMBERS: usize = gf256::GROUP_ORDER;

/// Parity by an engine. Asserts the preconditions, once for all engines.
///
/// Data members are numbered from 0; `others` are those that are not lost, in order. Outputs are
/// overwritten completely; their old contents do not matter unless an operation says so.
///
/// # Panics
/// Every operation panics if its slices differ in length. Those that use Q panic if there are more
/// than [`MAX_DATA_MEMBERS`] data members, or for the index of a member that does not exist.
#[derive(Clone, Copy, Debug)]
pub struct Parity(&'static dyn Engine);

impl Parity {
    /// With the best engine of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self(engine::best())
    }

    /// With this engine.
    #[must_use]
    pub fn with_engine(engine: &'static dyn Engine) -> Self {
        Self(engine)
    }

    /// Its engine.
    #[must_use]
    pub fn engine(self) -> &'static dyn Engine {
        self.0
    }

    /// Sets `out` to the sum of `sources`: P of data members, or any member from P and all others.
    /// The sum of nothing is 0.
    pub fn xor(self, sources: &[&[u8]], out: &mut [u8]) {
        assert_same_len(out.len(), sources);
        self.0.xor(sources, out);
    }

    /// Sets `p` and `q` to those of `data`.
    pub fn pq(self, data: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
        assert_same_len(p.len(), data);
        assert_same_len(p.len(), &[q]);
        assert_member_count(data.len());
        self.0.pq(data, p, q);
    }

    /// Sets `q` to that of `data`.
    pub fn q(self, data: &[&[u8]], q: &mut [u8]) {
        assert_same_len(q.len(), data);
        assert_member_count(data.len());
        self.0.q(data, q);
    }

    /// Updates `p` in place for any data member that changes from `old` to `new`.
    pub fn update_p(self, old: &[u8], new: &[u8], p: &mut [u8]) {
        assert_same_len(p.len(), &[old, new]);
        self.0.update_p(old, new, p);
    }

    /// Updates `q` in place for the data member `index` that changes from `old` to `new`.
    pub fn update_q(self, index: usize, old: &[u8], new: &[u8], q: &mut [u8]) {
        assert_same_len(q.len(), &[old, new]);
        assert!(index < MAX_DATA_MEMBERS, "no data member has index {index}");
        self.0.update_q(index, old, new, q);
    }

    /// [`Parity::update_p`] and [`Parity::update_q`] in one pass.
    pub fn update_pq(self, index: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]) {
        assert_same_len(p.len(), &[old, new, q]);
        assert!(index < MAX_DATA_MEMBERS, "no data member has index {index}");
        self.0.update_pq(index, old, new, p, q);
    }

    /// Sets `out` to the data member that is not among `others`, from P.
    pub fn recover_data_from_p(self, others: &[&[u8]], p: &[u8], out: &mut [u8]) {
        assert_same_len(out.len(), others);
        assert_same_len(out.len(), &[p]);
        self.0.recover_data_from_p(others, p, out);
    }

    /// Sets `out` to the data member `lost`, from Q: P is lost as well.
    pub fn recover_data_from_q(self, lost: usize, others: &[&[u8]], q: &[u8], out: &mut [u8]) {
        assert_same_len(out.len(), others);
        assert_same_len(out.len(), &[q]);
        assert_member_count(others.len() + 1);
        assert!(lost <= others.len(), "no data member has index {lost}");
        self.0.recover_data_from_q(lost, others, q, out);
    }

    /// Sets `out` to the data members `lost`, the lower one first, from P and Q.
    ///
    /// # Panics
    /// Also if the indices do not ascend.
    pub fn recover_two_data(
        self,
        lost: [usize; 2],
        others: &[&[u8]],
        pq: [&[u8]; 2],
        out: [&mut [u8]; 2],
    ) {
        assert_same_len(pq[0].len(), others);
        assert_same_len(pq[0].len(), &[pq[1], out[0], out[1]]);
        assert_member_count(others.len() + 2);
        assert!(lost[0] < lost[1], "indices {lost:?} are not ascending");
        assert!(lost[1] < others.len() + 2, "no data member has index {}", lost[1]);
        self.0.recover_two_data(lost, others, pq, out);
    }

    /// Whether `p` is that of `data`.
    #[must_use]
    pub fn check_p(self, data: &[&[u8]], p: &[u8]) -> bool {
        assert_same_len(p.len(), data);
        self.0.check_p(data, p)
    }

    /// Whether `p` and `q` are those of `data`; if not, which member is wrong. In a few bytes two
    /// wrong members may look like a third one; the more bytes are wrong, the less likely.
    #[must_use]
    pub fn check_pq(self, data: &[&[u8]], p: &[u8], q: &[u8]) -> SyndromeVerdict {
        assert_same_len(p.len(), data);
        assert_same_len(p.len(), &[q]);
        assert_member_count(data.len());
        self.0.check_pq(data, p, q)
    }
}

fn assert_same_len(bytes: usize, slices: &[&[u8]]) {
    let odd = slices.iter().find(|slice| slice.len() != bytes);
    assert!(odd.is_none(), "slices of {bytes} and {} bytes", odd.map_or(0, |slice| slice.len()));
}

fn assert_member_count(members: usize) {
    assert!(members <= MAX_DATA_MEMBERS, "{members} data members are more than Q can distinguish");
}
