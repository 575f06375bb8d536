//! The search: every write of a small row, every part of it durable or not, everything lost that the level bears, before and
//! after; and the same again while it is being mended.

use geometry::{Level, Role, Shape};

use super::super::row::{Plan, Way, plan};
use super::*;

/// Times the generator in GF(2^8), polynomial 11Dh.
fn twice(a: u8) -> u8 {
    (a << 1) ^ if a & 0x80 == 0 { 0 } else { 0x1d }
}

fn times(a: u8, b: u8) -> u8 {
    let (mut product, mut power) = (0, a);
    for bit in 0..8 {
        if b >> bit & 1 == 1 {
            product ^= power;
        }
        power = twice(power);
    }
    product
}

fn weight(strip: u16) -> u8 {
    (0..strip).fold(1, |w, _| twice(w))
}

fn over(a: u8, b: u8) -> u8 {
    (0..=255).find(|q| times(*q, b) == a).unwrap()
}

/// One byte of each strip stands for its block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    data: Vec<u8>,
    p: u8,
    q: u8,
}

/// The sums that are P and Q of some strips.
fn sums(strips: impl Iterator<Item = (u16, u8)>) -> (u8, u8) {
    strips.fold((0, 0), |(p, q), (n, value)| (p ^ value, q ^ times(weight(n), value)))
}

impl Row {
    fn new(data: Vec<u8>) -> Self {
        let (p, q) = sums((0..).zip(data.iter().copied()));
        Self { data, p, q }
    }

    fn of(&self, strips: Strips) -> impl Iterator<Item = (u16, u8)> {
        strips.iter().map(|n| (n, self.data[usize::from(n)]))
    }

    /// All data, by what is there alone.
    fn read(&self, there: There) -> Option<Vec<u8>> {
        let all = Strips::first(self.data.len() as u16);
        let lost: Vec<_> = all.without(there.data).iter().collect();
        let (p, q) = sums(self.of(all.and(there.data)));
        let mut data = self.data.clone();
        match (&lost[..], there.p, there.q) {
            ([], ..) => {}
            (&[a], true, _) => data[usize::from(a)] = p ^ self.p,
            (&[a], false, true) => data[usize::from(a)] = over(q ^ self.q, weight(a)),
            (&[a, b], true, true) => {
                let (p, q) = (p ^ self.p, q ^ self.q);
                let second = over(q ^ times(weight(a), p), weight(a) ^ weight(b));
                data[usize::from(b)] = second;
                data[usize::from(a)] = p ^ second;
            }
            _ => return None,
        }
        Some(data)
    }

    fn set(&mut self, role: Role, value: u8) {
        match role {
            Role::Data(n) => self.data[usize::from(n)] = value,
            Role::P => self.p = value,
            Role::Q => self.q = value,
        }
    }
}

/// What an entry holds.
#[derive(Clone, Debug)]
struct Entry {
    changed: Strips,
    sums: (u8, u8),
    new: Vec<u8>,
    logs_data: bool,
}

/// A write as the layer does it: its entry, and what it writes where.
fn write(row: &Row, there: There, new: &[u8], changed: Strips) -> Option<(Entry, Vec<(Role, u8)>)> {
    let all = Strips::first(row.data.len() as u16);
    let Plan { way, reads, logs_data } =
        plan(all.len() as u16, changed, there, There::default()).ok()?;
    let kept = all.without(changed);
    let sums_kept = match way {
        Way::None => (0, 0),
        Way::Add => {
            assert_eq!(reads.data.and(kept), kept);
            sums(row.of(kept))
        }
        Way::Subtract => {
            assert_eq!((reads.data, reads.p, reads.q), (changed, there.p, there.q));
            let (p, q) = sums(row.of(changed));
            (row.p ^ p, row.q ^ q)
        }
        Way::Recover => {
            let data = row.read(reads).unwrap();
            sums(kept.iter().map(|n| (n, data[usize::from(n)])))
        }
    };
    let (p, q) = sums(changed.iter().map(|n| (n, new[usize::from(n)])));
    let mut writes: Vec<_> =
        changed.and(there.data).iter().map(|n| (Role::Data(n), new[usize::from(n)])).collect();
    writes.extend(there.p.then_some((Role::P, sums_kept.0 ^ p)));
    writes.extend(there.q.then_some((Role::Q, sums_kept.1 ^ q)));
    Some((Entry { changed, sums: sums_kept, new: new.to_vec(), logs_data }, writes))
}

fn mending(row: &Row, entry: &Entry, found: Found, there: There) -> Vec<(Role, u8)> {
    let follow = |changed: (u8, u8)| {
        let p = there.p.then_some((Role::P, entry.sums.0 ^ changed.0));
        let q = there.q.then_some((Role::Q, entry.sums.1 ^ changed.1));
        p.into_iter().chain(q).collect::<Vec<_>>()
    };
    match mend(found, there) {
        Mend::Nothing => Vec::new(),
        Mend::Follow(strip) => follow(sums(std::iter::once((strip, row.data[usize::from(strip)])))),
        Mend::Answer(strip) => {
            let value = row.p ^ entry.sums.0;
            vec![(Role::Q, entry.sums.1 ^ times(weight(strip), value))]
        }
        Mend::Redo => {
            assert!(entry.logs_data);
            let new = |n: u16| entry.new[usize::from(n)];
            let data = entry.changed.and(there.data).iter().map(|n| (Role::Data(n), new(n)));
            data.chain(follow(sums(entry.changed.iter().map(|n| (n, new(n)))))).collect()
        }
    }
}

/// Everything that `there` may still lose, and what is left then.
fn losses(shape: &Shape, there: There) -> Vec<There> {
    let bears = u32::from(shape.level().bears());
    let roles: Vec<_> = shape.roles().filter(|role| has(there, *role)).collect();
    let gone = u32::from(shape.columns()) - roles.len() as u32;
    (0..1u32 << roles.len())
        .filter(|left| roles.len() as u32 - left.count_ones() + gone <= bears)
        .map(|left| {
            There::of((0..).zip(&roles).filter(|(i, _)| left >> i & 1 == 1).map(|(_, r)| *r))
        })
        .collect()
}

fn has(there: There, role: Role) -> bool {
    match role {
        Role::Data(n) => there.data.has(n),
        Role::P => there.p,
        Role::Q => there.q,
    }
}

fn subsets<T: Copy>(of: &[T]) -> impl Iterator<Item = Vec<T>> + '_ {
    (0..1u32 << of.len()).map(move |chosen| {
        (0..).zip(of).filter(|(i, _)| chosen >> i & 1 == 1).map(|(_, x)| *x).collect()
    })
}

/// What may be read of the row now: of each strip the old or the new value, the same whatever else is lost.
fn judge(shape: &Shape, row: &Row, there: There, old: &[u8], new: &[u8]) -> bool {
    let Some(now) = row.read(there) else { return false };
    let permitted = now.iter().zip(old.iter().zip(new)).all(|(v, (a, b))| v == a || v == b);
    let steady = losses(shape, there).into_iter().all(|left| row.read(left).as_ref() == Some(&now));
    permitted && steady
}

/// What mending writes.
type Mending = fn(&Row, &Entry, Found, There) -> Vec<(Role, u8)>;

/// A search in which the layer does as it is told by these.
struct Search {
    /// How many it has looked at.
    cases: usize,
    mending: Mending,
    /// Whether the log is waited for.
    logs_first: bool,
}

impl Search {
    /// Whether no crash of any write has an end that nobody permits.
    fn finds_nothing(&mut self, shape: &Shape) -> bool {
        let data = shape.data();
        let old: Vec<u8> = (0..data).map(|n| 0x11 + 0x23 * n as u8).collect();
        let new: Vec<u8> = old.iter().map(|v| v.wrapping_mul(7) ^ 0xa5).collect();
        let whole = There::of(shape.roles());
        losses(shape, whole).into_iter().all(|before| {
            (1..1u64 << data).all(|changed| {
                let changed: Strips = (0..data).filter(|n| changed >> n & 1 == 1).collect();
                self.crashes(shape, &Row::new(old.clone()), before, (&old, &new), changed)
            })
        })
    }

    fn crashes(
        &mut self,
        shape: &Shape,
        row: &Row,
        before: There,
        (old, new): (&[u8], &[u8]),
        changed: Strips,
    ) -> bool {
        let mut after = old.to_vec();
        changed.iter().for_each(|n| after[usize::from(n)] = new[usize::from(n)]);
        let (entry, writes) = write(row, before, &after, changed).expect("the level bears it");
        let parities: Vec<_> = writes.iter().filter(|(r, _)| !matches!(r, Role::Data(_))).collect();
        let logs: Vec<Vec<Role>> =
            subsets(&parities).map(|l| l.iter().map(|(r, _)| *r).collect()).collect();
        logs.into_iter().all(|logged| {
            let complete = logged.len() == parities.len();
            // Nothing is written before all logs are durable.
            let done: Vec<Vec<_>> = if complete || !self.logs_first {
                subsets(&writes).collect()
            } else {
                vec![Vec::new()]
            };
            done.into_iter().all(|done| {
                let mut row = row.clone();
                done.into_iter().for_each(|(role, value)| row.set(role, value));
                let found = Found {
                    changed,
                    by_p: logged.contains(&Role::P),
                    by_q: logged.contains(&Role::Q),
                };
                losses(shape, before)
                    .into_iter()
                    .all(|left| self.mends(shape, &row, (&entry, found), left, (old, &after)))
            })
        })
    }

    /// It is mended, but for a second crash with another loss in the middle of it, and mended again.
    fn mends(
        &mut self,
        shape: &Shape,
        row: &Row,
        (entry, found): (&Entry, Found),
        there: There,
        (old, new): (&[u8], &[u8]),
    ) -> bool {
        let writes = (self.mending)(row, entry, found, there);
        subsets(&writes).all(|done| {
            let mut row = row.clone();
            done.iter().for_each(|(role, value)| row.set(*role, *value));
            let mut again = losses(shape, there);
            if done.len() == writes.len() {
                again.push(there);
            }
            again.into_iter().all(|left| {
                self.cases += 1;
                let mut row = row.clone();
                for (role, value) in (self.mending)(&row.clone(), entry, found, left) {
                    row.set(role, value);
                }
                judge(shape, &row, left, old, new)
            })
        })
    }
}

fn shapes() -> Vec<Shape> {
    let parity = [3, 4, 5].map(|columns| (Level::Parity, columns));
    let double = [4, 5, 6].map(|columns| (Level::DoubleParity, columns));
    let shape = |(level, columns)| Shape::new(level, columns, 1, 1).unwrap();
    parity.into_iter().chain(double).map(shape).collect()
}

#[test]
fn whatever_is_lost_each_block_is_the_old_or_the_new_one() {
    let mut cases = 0;
    for shape in shapes() {
        let mut search = Search { cases: 0, mending, logs_first: true };
        assert!(search.finds_nothing(&shape), "{shape:?}");
        cases += search.cases;
    }
    assert!(cases > 100_000, "{cases}");
}

/// The search bites: what is known to be wrong is found.
#[test]
fn planted_mistakes_are_found() {
    let found = |mending, logs_first| {
        shapes().iter().all(|shape| !Search { cases: 0, mending, logs_first }.finds_nothing(shape))
    };
    assert!(found(mending, false), "written before the log is durable");
    assert!(found(|_, _, _, _| Vec::new(), true), "nothing is done after a crash");
    assert!(
        found(reckons_anew, true),
        "parity is made of what is there, as an intent bitmap has it"
    );
    assert!(found(without_redo, true), "MD: where several strips change, they are garbage");
    assert!(
        !Search { cases: 0, mending: always_answers, logs_first: true }.finds_nothing(&shapes()[5]),
        "a wrong coefficient of Q"
    );
}

/// Parity of all data if that is there.
fn reckons_anew(row: &Row, _: &Entry, _: Found, there: There) -> Vec<(Role, u8)> {
    let all = Strips::first(row.data.len() as u16);
    if all.without(there.data).is_empty() {
        let (p, q) = sums(row.of(all));
        let (p, q) = (there.p.then_some((Role::P, p)), there.q.then_some((Role::Q, q)));
        return p.into_iter().chain(q).collect();
    }
    Vec::new()
}

/// Parity of what the changed strips hold, whether that is old or new; nothing where one of them is lost.
fn without_redo(row: &Row, entry: &Entry, found: Found, there: There) -> Vec<(Role, u8)> {
    if mend(found, there) != Mend::Redo {
        return mending(row, entry, found, there);
    }
    if !entry.changed.without(there.data).is_empty() {
        return Vec::new();
    }
    let (p, q) = sums(row.of(entry.changed));
    let p = there.p.then_some((Role::P, entry.sums.0 ^ p));
    let q = there.q.then_some((Role::Q, entry.sums.1 ^ q));
    p.into_iter().chain(q).collect()
}

/// Q is taken for a second P.
fn always_answers(row: &Row, entry: &Entry, found: Found, there: There) -> Vec<(Role, u8)> {
    let right = mending(row, entry, found, there);
    match mend(found, there) {
        Mend::Answer(_) => vec![(Role::Q, entry.sums.1 ^ row.p ^ entry.sums.0)],
        _ => right,
    }
}
