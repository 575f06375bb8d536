//! The parity arithmetic of one row of 4 KiB: reconstruction, partial parity, complete parity.

use geometry::{ROW_BYTES, StripRole};
use parity::Parity;
use smallvec::SmallVec;

use super::row_plan::{StripSet, WriteMethod};

const ZERO: [u8; ROW_BYTES as usize] = [0; ROW_BYTES as usize];

/// The known strips of a row.
#[derive(Clone, Debug)]
pub(super) struct KnownRow<'a> {
    data: SmallVec<[Option<&'a [u8]>; 16]>,
    p: Option<&'a [u8]>,
    q: Option<&'a [u8]>,
}

impl<'a> KnownRow<'a> {
    /// A row of `data` data strips, none of them known.
    pub(super) fn new(data: u16) -> Self {
        Self { data: SmallVec::from_elem(None, data.into()), p: None, q: None }
    }

    /// Notes the contents of `role`.
    pub(super) fn set(&mut self, role: StripRole, bytes: &'a [u8]) {
        let strip = match role {
            StripRole::Data(n) => self.data.get_mut(usize::from(n)),
            StripRole::P => Some(&mut self.p),
            StripRole::Q => Some(&mut self.q),
        };
        strip.into_iter().for_each(|strip| *strip = Some(bytes));
    }

    fn strips_of(&self, strips: StripSet) -> impl Iterator<Item = (u16, &'a [u8])> {
        strips.iter().filter_map(|n| Some((n, self.data.get(usize::from(n)).copied()??)))
    }

    fn known_strips(&self) -> SmallVec<[&'a [u8]; 16]> {
        self.data.iter().flatten().copied().collect()
    }

    /// Reconstructs the unknown data strips, in ascending order, into `out`. Returns false and
    /// computes nothing if too many are unknown.
    #[must_use]
    pub(super) fn reconstruct(&self, parity: Parity, out: &mut [&mut [u8]]) -> bool {
        let missing: SmallVec<[usize; 2]> =
            (0..).zip(&self.data).filter(|(_, d)| d.is_none()).map(|(n, _)| n).collect();
        let others = self.known_strips();
        match (&missing[..], out, self.p, self.q) {
            ([], [], ..) => {}
            ([_], [out], Some(p), _) => parity.recover_data_from_p(&others, p, out),
            (&[n], [out], None, Some(q)) => parity.recover_data_from_q(n, &others, q, out),
            (&[a, b], [first, second], Some(p), Some(q)) => {
                parity.recover_two_data([a, b], &others, [p, q], [first, second]);
            }
            _ => return false,
        }
        true
    }

    /// The P or Q of the strips that are not `changed`.
    ///
    /// # Panics
    /// If a strip that `method` needs is not known.
    pub(super) fn partial_parity(
        &self,
        parity: Parity,
        role: StripRole,
        method: WriteMethod,
        changed: StripSet,
        out: &mut [u8],
    ) {
        const WANTS: &str = "the plan reads the strips that it needs";
        let all = StripSet::first(u16::try_from(self.data.len()).unwrap_or(0));
        match (role, method) {
            (StripRole::P, WriteMethod::ReadModifyWrite) => {
                let old = self.strips_of(changed).map(|(_, bytes)| bytes);
                let all: SmallVec<[&[u8]; 16]> = self.p.into_iter().chain(old).collect();
                assert_eq!(all.len(), 1 + changed.len() as usize, "{WANTS}");
                parity.xor(&all, out);
            }
            (StripRole::Q, WriteMethod::ReadModifyWrite) => {
                out.copy_from_slice(self.q.expect(WANTS));
                let old = self.strips_of(changed);
                old.for_each(|(n, old)| parity.update_q(n.into(), old, &ZERO, out));
            }
            _ => {
                let unchanged: SmallVec<[&[u8]; 16]> = (all.iter())
                    .map(|n| {
                        if changed.contains(n) {
                            &ZERO
                        } else {
                            self.data[usize::from(n)].expect(WANTS)
                        }
                    })
                    .collect();
                compute_parity(parity, role, &unchanged, out);
            }
        }
    }
}

/// The P or Q of all strips, from the partial parity and the new contents of the other strips.
pub(super) fn complete_parity(
    parity: Parity,
    role: StripRole,
    partial: &[u8],
    new: &[(u16, &[u8])],
    out: &mut [u8],
) {
    if role == StripRole::Q {
        out.copy_from_slice(partial);
        return new.iter().for_each(|(n, new)| parity.update_q((*n).into(), &ZERO, new, out));
    }
    let all: SmallVec<[&[u8]; 16]> =
        std::iter::once(partial).chain(new.iter().map(|(_, new)| *new)).collect();
    parity.xor(&all, out);
}

/// The P or Q of all data strips.
pub(super) fn compute_parity(parity: Parity, role: StripRole, data: &[&[u8]], out: &mut [u8]) {
    match role {
        StripRole::Q => parity.q(data, out),
        _ => parity.xor(data, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(fill: u8) -> Vec<u8> {
        (0..ROW_BYTES as usize).map(|n| fill.wrapping_mul(31).wrapping_add(n as u8)).collect()
    }

    /// The parities of `data`.
    fn parities(data: &[Vec<u8>]) -> [Vec<u8>; 2] {
        let all: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        [StripRole::P, StripRole::Q].map(|role| {
            let mut out = page(9);
            compute_parity(Parity::best(), role, &all, &mut out);
            out
        })
    }

    /// For all sets of changed strips: both methods give the parities of the new data.
    #[test]
    fn both_write_methods_compute_the_same_parity() {
        let parity = Parity::best();
        let old: Vec<_> = (1..5).map(page).collect();
        let [p, q] = parities(&old);
        for bits in 1..16 {
            let changed = StripSet::from_bits(bits);
            let mut new = old.clone();
            changed.iter().for_each(|n| new[usize::from(n)] = page(50 + n as u8));
            let expected = parities(&new);
            let changes: Vec<(u16, &[u8])> =
                changed.iter().map(|n| (n, new[usize::from(n)].as_slice())).collect();
            for (role, expected) in [StripRole::P, StripRole::Q].into_iter().zip(&expected) {
                for method in [WriteMethod::ReadModifyWrite, WriteMethod::ReconstructWrite] {
                    let mut row = KnownRow::new(4);
                    (0..)
                        .zip(&old)
                        .filter(|(n, _)| {
                            changed.contains(*n) == (method == WriteMethod::ReadModifyWrite)
                        })
                        .for_each(|(n, d)| row.set(StripRole::Data(n), d));
                    row.set(StripRole::P, &p);
                    row.set(StripRole::Q, &q);
                    let (mut partial, mut out) = (page(7), page(8));
                    row.partial_parity(parity, role, method, changed, &mut partial);
                    complete_parity(parity, role, &partial, &changes, &mut out);
                    assert!(&out == expected, "{role:?} {method:?} {bits:b}");
                }
            }
        }
    }

    #[test]
    fn lost_strips_are_reconstructed_or_reported_unrecoverable() {
        let parity = Parity::best();
        let data: Vec<_> = (1..5).map(page).collect();
        let [p, q] = parities(&data);
        let of = |lost: &[usize], has_p: bool, has_q: bool| {
            let mut row = KnownRow::new(4);
            let rest = data.iter().enumerate().filter(|(n, _)| !lost.contains(n));
            rest.for_each(|(n, d)| row.set(StripRole::Data(n as u16), d));
            if has_p {
                row.set(StripRole::P, &p);
            }
            if has_q {
                row.set(StripRole::Q, &q);
            }
            let mut out = vec![page(0); lost.len()];
            let mut parts: Vec<_> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let reconstructed = row.reconstruct(parity, &mut parts);
            reconstructed.then(|| lost.iter().zip(&out).all(|(n, o)| *o == data[*n]))
        };
        assert_eq!(of(&[], false, false), Some(true));
        assert_eq!(of(&[2], true, false), Some(true));
        assert_eq!(of(&[2], false, true), Some(true));
        assert_eq!(of(&[1, 3], true, true), Some(true));
        for (lost, p, q) in
            [(&[2][..], false, false), (&[1, 2], true, false), (&[0, 1, 2], true, true)]
        {
            assert_eq!(of(lost, p, q), None);
        }
    }
}
