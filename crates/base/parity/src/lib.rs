//! Parity for RAID 5 and 6: P is the sum of the data members, Q the sum of each times its power of the generator.
//!
//! The field is GF(2^8) of polynomial 0x11d with generator 2, as Linux' md and ISA-L have it: what they have written is read
//! here, and the other way round. [`Parity`] computes over slices of any one length; whoever has members as lists of pages
//! calls it page by page. An [`Engine`] is a way to compute; this machine's [`engines`] give the same bytes and differ in speed. Why they
//! are made as they are, and what they reach: RFD 0028.
//!
//! ```
//! let data: [&[u8]; 3] = [b"some", b"data", b"here"];
//! let (mut p, mut q) = ([0; 4], [0; 4]);
//! let parity = parity::Parity::best();
//! parity.pq(&data, &mut p, &mut q);
//!
//! let (mut first, mut third) = ([0; 4], [0; 4]);
//! parity.two_data([0, 2], &[data[1]], [&p, &q], [&mut first, &mut third]);
//! assert_eq!((&first, &third), (b"some", b"here"));
//! ```
#![warn(clippy::undocumented_unsafe_blocks)]

mod arch;
mod engine;
pub mod field;
mod kernel;
mod lanes;
mod verdict;

pub use engine::{Engine, engines};
pub use verdict::Verdict;

/// How many data members Q can tell apart.
pub const MOST_MEMBERS: usize = field::ORDER;

/// Parity by an engine. Here contracts are asserted, once for all engines.
///
/// Data members are numbered from 0, their place; `others` are those that are not lost, in order. Outputs are written from end to
/// end, and what they held does not matter unless an operation says so.
///
/// # Panics
/// Every operation panics if its slices are not all of one length. Those that use Q panic if there are more than
/// [`MOST_MEMBERS`] data members, or places that no data member has.
#[derive(Clone, Copy, Debug)]
pub struct Parity(&'static dyn Engine);

impl Parity {
    /// By the best engine of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self(engine::best())
    }

    /// By this engine.
    #[must_use]
    pub fn by(engine: &'static dyn Engine) -> Self {
        Self(engine)
    }

    /// Its engine.
    #[must_use]
    pub fn engine(self) -> &'static dyn Engine {
        self.0
    }

    /// `out` becomes the sum of `sources`: P of data members, or any one of members and P by all others. The sum of nothing is 0.
    pub fn xor(self, sources: &[&[u8]], out: &mut [u8]) {
        alike(out.len(), sources);
        self.0.xor(sources, out);
    }

    /// `p` and `q` become those of `data`.
    pub fn pq(self, data: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
        alike(p.len(), data);
        alike(p.len(), &[q]);
        countable(data.len());
        self.0.pq(data, p, q);
    }

    /// `q` becomes that of `data`.
    pub fn q(self, data: &[&[u8]], q: &mut [u8]) {
        alike(q.len(), data);
        countable(data.len());
        self.0.q(data, q);
    }

    /// `p` goes, in place, from what `old` contents of any data member made of it to what its `new` contents make.
    pub fn update_p(self, old: &[u8], new: &[u8], p: &mut [u8]) {
        alike(p.len(), &[old, new]);
        self.0.update_p(old, new, p);
    }

    /// `q` goes, in place, from what `old` contents of the data member at `place` made of it to what its `new` contents make.
    pub fn update_q(self, place: usize, old: &[u8], new: &[u8], q: &mut [u8]) {
        alike(q.len(), &[old, new]);
        assert!(place < MOST_MEMBERS, "no data member has place {place}");
        self.0.update_q(place, old, new, q);
    }

    /// [`Parity::update_p`] and [`Parity::update_q`] in one pass.
    pub fn update_pq(self, place: usize, old: &[u8], new: &[u8], p: &mut [u8], q: &mut [u8]) {
        alike(p.len(), &[old, new, q]);
        assert!(place < MOST_MEMBERS, "no data member has place {place}");
        self.0.update_pq(place, old, new, p, q);
    }

    /// `out` becomes the data member that is not among `others`, by P.
    pub fn data_by_p(self, others: &[&[u8]], p: &[u8], out: &mut [u8]) {
        alike(out.len(), others);
        alike(out.len(), &[p]);
        self.0.data_by_p(others, p, out);
    }

    /// `out` becomes the data member of place `lost`, by Q: P is lost as well.
    pub fn data_by_q(self, lost: usize, others: &[&[u8]], q: &[u8], out: &mut [u8]) {
        alike(out.len(), others);
        alike(out.len(), &[q]);
        countable(others.len() + 1);
        assert!(lost <= others.len(), "no data member has place {lost}");
        self.0.data_by_q(lost, others, q, out);
    }

    /// `out` become the data members of the places `lost`, the lower one first, by P and Q.
    ///
    /// # Panics
    /// Also if the places do not ascend.
    pub fn two_data(self, lost: [usize; 2], others: &[&[u8]], pq: [&[u8]; 2], out: [&mut [u8]; 2]) {
        alike(pq[0].len(), others);
        alike(pq[0].len(), &[pq[1], out[0], out[1]]);
        countable(others.len() + 2);
        assert!(lost[0] < lost[1], "places {lost:?} do not ascend");
        assert!(lost[1] < others.len() + 2, "no data member has place {}", lost[1]);
        self.0.two_data(lost, others, pq, out);
    }

    /// Whether `p` is that of `data`.
    #[must_use]
    pub fn check_p(self, data: &[&[u8]], p: &[u8]) -> bool {
        alike(p.len(), data);
        self.0.check_p(data, p)
    }

    /// Whether `p` and `q` are those of `data`, and what is wrong if not. Two wrong members may look like a single third one in a
    /// few bytes; the more bytes are wrong, the less so.
    #[must_use]
    pub fn check_pq(self, data: &[&[u8]], p: &[u8], q: &[u8]) -> Verdict {
        alike(p.len(), data);
        alike(p.len(), &[q]);
        countable(data.len());
        self.0.check_pq(data, p, q)
    }
}

fn alike(bytes: usize, slices: &[&[u8]]) {
    let odd = slices.iter().find(|slice| slice.len() != bytes);
    assert!(odd.is_none(), "slices of {bytes} and {} bytes", odd.map_or(0, |slice| slice.len()));
}

fn countable(members: usize) {
    assert!(members <= MOST_MEMBERS, "{members} data members are more than Q tells apart");
}
