//! The arithmetic of one row of 4 KiB: what is lost of it, and the sums that its log and its parities hold.

use geometry::{ROW_BYTES, Role};
use parity::Parity;
use smallvec::SmallVec;

use super::row::{Strips, Way};

const ZERO: [u8; ROW_BYTES as usize] = [0; ROW_BYTES as usize];

/// A row, as far as it is known.
#[derive(Clone, Debug)]
pub(super) struct Row<'a> {
    data: SmallVec<[Option<&'a [u8]>; 16]>,
    p: Option<&'a [u8]>,
    q: Option<&'a [u8]>,
}

impl<'a> Row<'a> {
    /// A row of so many strips of data, of which nothing is known.
    pub(super) fn new(data: u16) -> Self {
        Self { data: SmallVec::from_elem(None, data.into()), p: None, q: None }
    }

    /// `role` holds this.
    pub(super) fn know(&mut self, role: Role, bytes: &'a [u8]) {
        let place = match role {
            Role::Data(n) => self.data.get_mut(usize::from(n)),
            Role::P => Some(&mut self.p),
            Role::Q => Some(&mut self.q),
        };
        place.into_iter().for_each(|place| *place = Some(bytes));
    }

    fn of(&self, strips: Strips) -> impl Iterator<Item = (u16, &'a [u8])> {
        strips.iter().filter_map(|n| Some((n, self.data.get(usize::from(n)).copied()??)))
    }

    fn known(&self) -> SmallVec<[&'a [u8]; 16]> {
        self.data.iter().flatten().copied().collect()
    }

    /// Makes the strips of data that are not known, in ascending order, into as many of `out`. False if too many are not, and
    /// then nothing is made.
    #[must_use]
    pub(super) fn restore(&self, parity: Parity, out: &mut [&mut [u8]]) -> bool {
        let lost: SmallVec<[usize; 2]> =
            (0..).zip(&self.data).filter(|(_, d)| d.is_none()).map(|(n, _)| n).collect();
        let others = self.known();
        match (&lost[..], out, self.p, self.q) {
            ([], [], ..) => {}
            ([_], [out], Some(p), _) => parity.data_by_p(&others, p, out),
            (&[n], [out], None, Some(q)) => parity.data_by_q(n, &others, q, out),
            (&[a, b], [first, second], Some(p), Some(q)) => {
                parity.two_data([a, b], &others, [p, q], [first, second]);
            }
            _ => return false,
        }
        true
    }

    /// The sum, as P or Q has it, of the strips that are not `changed`.
    ///
    /// # Panics
    /// If what that way needs is not known.
    pub(super) fn sum_of_kept(
        &self,
        parity: Parity,
        role: Role,
        way: Way,
        changed: Strips,
        out: &mut [u8],
    ) {
        const WANTS: &str = "a plan says what is read";
        let all = Strips::first(u16::try_from(self.data.len()).unwrap_or(0));
        match (role, way) {
            (Role::P, Way::Subtract) => {
                let old = self.of(changed).map(|(_, bytes)| bytes);
                let all: SmallVec<[&[u8]; 16]> = self.p.into_iter().chain(old).collect();
                assert_eq!(all.len(), 1 + changed.len() as usize, "{WANTS}");
                parity.xor(&all, out);
            }
            (Role::Q, Way::Subtract) => {
                out.copy_from_slice(self.q.expect(WANTS));
                let old = self.of(changed);
                old.for_each(|(n, old)| parity.update_q(n.into(), old, &ZERO, out));
            }
            _ => {
                let kept: SmallVec<[&[u8]; 16]> = (all.iter())
                    .map(|n| {
                        if changed.has(n) { &ZERO } else { self.data[usize::from(n)].expect(WANTS) }
                    })
                    .collect();
                sum(parity, role, &kept, out);
            }
        }
    }
}

/// The sum, as P or Q has it, of all strips: `kept` of those that stay, and what the others are to hold.
pub(super) fn sum_with(
    parity: Parity,
    role: Role,
    kept: &[u8],
    new: &[(u16, &[u8])],
    out: &mut [u8],
) {
    if role == Role::Q {
        out.copy_from_slice(kept);
        return new.iter().for_each(|(n, new)| parity.update_q((*n).into(), &ZERO, new, out));
    }
    let all: SmallVec<[&[u8]; 16]> =
        std::iter::once(kept).chain(new.iter().map(|(_, new)| *new)).collect();
    parity.xor(&all, out);
}

/// P or Q of all strips of data.
pub(super) fn sum(parity: Parity, role: Role, data: &[&[u8]], out: &mut [u8]) {
    match role {
        Role::Q => parity.q(data, out),
        _ => parity.xor(data, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(fill: u8) -> Vec<u8> {
        (0..ROW_BYTES as usize).map(|n| fill.wrapping_mul(31).wrapping_add(n as u8)).collect()
    }

    /// Both parities of `data`.
    fn parities(data: &[Vec<u8>]) -> [Vec<u8>; 2] {
        let all: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        [Role::P, Role::Q].map(|role| {
            let mut out = page(9);
            sum(Parity::best(), role, &all, &mut out);
            out
        })
    }

    /// Of four strips some change: both ways come to the parities of what is there afterwards.
    #[test]
    fn both_ways_come_to_the_same_parities() {
        let parity = Parity::best();
        let old: Vec<_> = (1..5).map(page).collect();
        let [p, q] = parities(&old);
        for bits in 1..16 {
            let changed = Strips::from_bits(bits);
            let mut new = old.clone();
            changed.iter().for_each(|n| new[usize::from(n)] = page(50 + n as u8));
            let wanted = parities(&new);
            let fresh: Vec<(u16, &[u8])> =
                changed.iter().map(|n| (n, new[usize::from(n)].as_slice())).collect();
            for (role, wanted) in [Role::P, Role::Q].into_iter().zip(&wanted) {
                for way in [Way::Subtract, Way::Add] {
                    let mut row = Row::new(4);
                    (0..)
                        .zip(&old)
                        .filter(|(n, _)| changed.has(*n) == (way == Way::Subtract))
                        .for_each(|(n, d)| row.know(Role::Data(n), d));
                    row.know(Role::P, &p);
                    row.know(Role::Q, &q);
                    let (mut kept, mut out) = (page(7), page(8));
                    row.sum_of_kept(parity, role, way, changed, &mut kept);
                    sum_with(parity, role, &kept, &fresh, &mut out);
                    assert!(&out == wanted, "{role:?} {way:?} {bits:b}");
                }
            }
        }
    }

    #[test]
    fn what_is_lost_is_made_of_the_rest_or_not_at_all() {
        let parity = Parity::best();
        let data: Vec<_> = (1..5).map(page).collect();
        let [p, q] = parities(&data);
        let of = |lost: &[usize], has_p: bool, has_q: bool| {
            let mut row = Row::new(4);
            let rest = data.iter().enumerate().filter(|(n, _)| !lost.contains(n));
            rest.for_each(|(n, d)| row.know(Role::Data(n as u16), d));
            if has_p {
                row.know(Role::P, &p);
            }
            if has_q {
                row.know(Role::Q, &q);
            }
            let mut out = vec![page(0); lost.len()];
            let mut parts: Vec<_> = out.iter_mut().map(Vec::as_mut_slice).collect();
            let made = row.restore(parity, &mut parts);
            made.then(|| lost.iter().zip(&out).all(|(n, o)| *o == data[*n]))
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
