//! Exhaustive search: every write of a small row, with each part of it durable or not, and with
//! every loss that the redundancy tolerates before and after; and the same again during recovery.

use geometry::{RaidGeometry, Redundancy, StripRole};

use super::super::row_plan::{RowPlan, WriteMethod, plan_row};
use super::*;

/// Times the generator in GF(2^8), polynomial 11Dh.
fn double(a: u8) -> u8 {
    (a << 1) ^ if a & 0x80 == 0 { 0 } else { 0x1d }
}

fn multiply(a: u8, b: u8) -> u8 {
    let (mut product, mut power) = (0, a);
    for bit in 0..8 {
        if b >> bit & 1 == 1 {
            product ^= power;
        }
        power = double(power);
    }
    product
}

fn coefficient(strip: u16) -> u8 {
    (0..strip).fold(1, |w, _| double(w))
}

fn divide(a: u8, b: u8) -> u8 {
    (0..=255).find(|q| multiply(*q, b) == a).unwrap()
}

/// A row; one byte of each strip stands for its block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    data: Vec<u8>,
    p: u8,
    q: u8,
}

/// P and Q of some strips.
fn parities(strips: impl Iterator<Item = (u16, u8)>) -> (u8, u8) {
    strips.fold((0, 0), |(p, q), (n, value)| (p ^ value, q ^ multiply(coefficient(n), value)))
}

impl Row {
    fn new(data: Vec<u8>) -> Self {
        let (p, q) = parities((0..).zip(data.iter().copied()));
        Self { data, p, q }
    }

    fn of(&self, strips: StripSet) -> impl Iterator<Item = (u16, u8)> {
        strips.iter().map(|n| (n, self.data[usize::from(n)]))
    }

    /// All data, computed from the available strips only.
    fn read(&self, available: Available) -> Option<Vec<u8>> {
        let all = StripSet::first(self.data.len() as u16);
        let missing: Vec<_> = all.difference(available.data).iter().collect();
        let (p, q) = parities(self.of(all.intersection(available.data)));
        let mut data = self.data.clone();
        match (&missing[..], available.p, available.q) {
            ([], ..) => {}
            (&[a], true, _) => data[usize::from(a)] = p ^ self.p,
            (&[a], false, true) => data[usize::from(a)] = divide(q ^ self.q, coefficient(a)),
            (&[a, b], true, true) => {
                let (p, q) = (p ^ self.p, q ^ self.q);
                let second =
                    divide(q ^ multiply(coefficient(a), p), coefficient(a) ^ coefficient(b));
                data[usize::from(b)] = second;
                data[usize::from(a)] = p ^ second;
            }
            _ => return None,
        }
        Some(data)
    }

    fn set(&mut self, role: StripRole, value: u8) {
        match role {
            StripRole::Data(n) => self.data[usize::from(n)] = value,
            StripRole::P => self.p = value,
            StripRole::Q => self.q = value,
        }
    }
}

/// The contents of a log entry.
#[derive(Clone, Debug)]
struct Entry {
    changed: StripSet,
    sums: (u8, u8),
    new: Vec<u8>,
    logs_data: bool,
}

/// A write as the layer does it: its log entry, and what it writes to each strip.
fn write(
    row: &Row,
    available: Available,
    new: &[u8],
    changed: StripSet,
) -> Option<(Entry, Vec<(StripRole, u8)>)> {
    let all = StripSet::first(row.data.len() as u16);
    let RowPlan { method, reads, logs_data } =
        plan_row(all.len() as u16, changed, available, Available::default()).ok()?;
    let unchanged = all.difference(changed);
    let partial = match method {
        WriteMethod::NoParity => (0, 0),
        WriteMethod::ReconstructWrite => {
            assert_eq!(reads.data.intersection(unchanged), unchanged);
            parities(row.of(unchanged))
        }
        WriteMethod::ReadModifyWrite => {
            assert_eq!((reads.data, reads.p, reads.q), (changed, available.p, available.q));
            let (p, q) = parities(row.of(changed));
            (row.p ^ p, row.q ^ q)
        }
        WriteMethod::ReconstructLost => {
            let data = row.read(reads).unwrap();
            parities(unchanged.iter().map(|n| (n, data[usize::from(n)])))
        }
    };
    let (p, q) = parities(changed.iter().map(|n| (n, new[usize::from(n)])));
    let mut writes: Vec<_> = changed
        .intersection(available.data)
        .iter()
        .map(|n| (StripRole::Data(n), new[usize::from(n)]))
        .collect();
    writes.extend(available.p.then_some((StripRole::P, partial.0 ^ p)));
    writes.extend(available.q.then_some((StripRole::Q, partial.1 ^ q)));
    Some((Entry { changed, sums: partial, new: new.to_vec(), logs_data }, writes))
}

fn recovery_writes(
    row: &Row,
    entry: &Entry,
    found: LoggedRow,
    available: Available,
) -> Vec<(StripRole, u8)> {
    let recompute = |changed: (u8, u8)| {
        let p = available.p.then_some((StripRole::P, entry.sums.0 ^ changed.0));
        let q = available.q.then_some((StripRole::Q, entry.sums.1 ^ changed.1));
        p.into_iter().chain(q).collect::<Vec<_>>()
    };
    match recovery_action(found, available) {
        RecoveryAction::Nothing => Vec::new(),
        RecoveryAction::UpdateParity(strip) => {
            recompute(parities(std::iter::once((strip, row.data[usize::from(strip)]))))
        }
        RecoveryAction::ReconstructFromP(strip) => {
            let value = row.p ^ entry.sums.0;
            vec![(StripRole::Q, entry.sums.1 ^ multiply(coefficient(strip), value))]
        }
        RecoveryAction::ReplayData => {
            assert!(entry.logs_data);
            let new = |n: u16| entry.new[usize::from(n)];
            let data = entry
                .changed
                .intersection(available.data)
                .iter()
                .map(|n| (StripRole::Data(n), new(n)));
            data.chain(recompute(parities(entry.changed.iter().map(|n| (n, new(n)))))).collect()
        }
    }
}

/// The sets of strips that remain after all tolerated further losses from `available`.
fn losses(geometry: &RaidGeometry, available: Available) -> Vec<Available> {
    let tolerance = u32::from(geometry.redundancy().fault_tolerance());
    let roles: Vec<_> = geometry.roles().filter(|role| has(available, *role)).collect();
    let lost = u32::from(geometry.columns()) - roles.len() as u32;
    (0..1u32 << roles.len())
        .filter(|left| roles.len() as u32 - left.count_ones() + lost <= tolerance)
        .map(|left| {
            Available::from_roles(
                (0..).zip(&roles).filter(|(i, _)| left >> i & 1 == 1).map(|(_, r)| *r),
            )
        })
        .collect()
}

fn has(available: Available, role: StripRole) -> bool {
    match role {
        StripRole::Data(n) => available.data.contains(n),
        StripRole::P => available.p,
        StripRole::Q => available.q,
    }
}

fn subsets<T: Copy>(of: &[T]) -> impl Iterator<Item = Vec<T>> + '_ {
    (0..1u32 << of.len()).map(move |chosen| {
        (0..).zip(of).filter(|(i, _)| chosen >> i & 1 == 1).map(|(_, x)| *x).collect()
    })
}

/// Whether each strip reads as its old or its new value, and reads the same after any further loss.
fn is_recovered(
    geometry: &RaidGeometry,
    row: &Row,
    available: Available,
    old: &[u8],
    new: &[u8],
) -> bool {
    let Some(now) = row.read(available) else { return false };
    let is_permitted = now.iter().zip(old.iter().zip(new)).all(|(v, (a, b))| v == a || v == b);
    let is_stable =
        losses(geometry, available).into_iter().all(|left| row.read(left).as_ref() == Some(&now));
    is_permitted && is_stable
}

/// The writes of a recovery.
type RecoveryWrites = fn(&Row, &Entry, LoggedRow, Available) -> Vec<(StripRole, u8)>;

/// A search over all crashes, with this implementation of recovery.
struct Search {
    /// Number of cases checked.
    cases: usize,
    recovery_writes: RecoveryWrites,
    /// Whether the log is durable before anything else is written.
    logs_first: bool,
}

impl Search {
    /// Whether no crash of any write has an invalid outcome.
    fn finds_nothing(&mut self, geometry: &RaidGeometry) -> bool {
        let data = geometry.data_strips();
        let old: Vec<u8> = (0..data).map(|n| 0x11 + 0x23 * n as u8).collect();
        let new: Vec<u8> = old.iter().map(|v| v.wrapping_mul(7) ^ 0xa5).collect();
        let all = Available::from_roles(geometry.roles());
        losses(geometry, all).into_iter().all(|before| {
            (1..1u64 << data).all(|changed| {
                let changed: StripSet = (0..data).filter(|n| changed >> n & 1 == 1).collect();
                self.crashes(geometry, &Row::new(old.clone()), before, (&old, &new), changed)
            })
        })
    }

    fn crashes(
        &mut self,
        geometry: &RaidGeometry,
        row: &Row,
        before: Available,
        (old, new): (&[u8], &[u8]),
        changed: StripSet,
    ) -> bool {
        let mut after = old.to_vec();
        changed.iter().for_each(|n| after[usize::from(n)] = new[usize::from(n)]);
        let (entry, writes) = write(row, before, &after, changed).expect("the level bears it");
        let parities: Vec<_> =
            writes.iter().filter(|(r, _)| !matches!(r, StripRole::Data(_))).collect();
        let logs: Vec<Vec<StripRole>> =
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
                let found = LoggedRow {
                    changed,
                    in_p_log: logged.contains(&StripRole::P),
                    in_q_log: logged.contains(&StripRole::Q),
                };
                losses(geometry, before).into_iter().all(|left| {
                    self.check_recovery(geometry, &row, (&entry, found), left, (old, &after))
                })
            })
        })
    }

    /// Recovers, with a second crash and a further loss in the middle, and recovers again.
    fn check_recovery(
        &mut self,
        geometry: &RaidGeometry,
        row: &Row,
        (entry, found): (&Entry, LoggedRow),
        available: Available,
        (old, new): (&[u8], &[u8]),
    ) -> bool {
        let writes = (self.recovery_writes)(row, entry, found, available);
        subsets(&writes).all(|done| {
            let mut row = row.clone();
            done.iter().for_each(|(role, value)| row.set(*role, *value));
            let mut again = losses(geometry, available);
            if done.len() == writes.len() {
                again.push(available);
            }
            again.into_iter().all(|left| {
                self.cases += 1;
                let mut row = row.clone();
                for (role, value) in (self.recovery_writes)(&row.clone(), entry, found, left) {
                    row.set(role, value);
                }
                is_recovered(geometry, &row, left, old, new)
            })
        })
    }
}

fn geometries() -> Vec<RaidGeometry> {
    let parity = [3, 4, 5].map(|columns| (Redundancy::Parity, columns));
    let double = [4, 5, 6].map(|columns| (Redundancy::DoubleParity, columns));
    let geometry = |(level, columns)| RaidGeometry::new(level, columns, 1, 1).unwrap();
    parity.into_iter().chain(double).map(geometry).collect()
}

#[test]
fn after_recovery_each_block_is_old_or_new() {
    let mut cases = 0;
    for geometry in geometries() {
        let mut search = Search { cases: 0, recovery_writes, logs_first: true };
        assert!(search.finds_nothing(&geometry), "{geometry:?}");
        cases += search.cases;
    }
    assert!(cases > 100_000, "{cases}");
}

/// The search is effective: it finds known mistakes.
#[test]
fn planted_mistakes_are_detected() {
    let found = |recovery, logs_first| {
        geometries().iter().all(|geometry| {
            !Search { cases: 0, recovery_writes: recovery, logs_first }.finds_nothing(geometry)
        })
    };
    assert!(found(recovery_writes, false), "written before the log is durable");
    assert!(found(|_, _, _, _| Vec::new(), true), "nothing is done after a crash");
    assert!(
        found(recompute_from_data, true),
        "parity is made of what is there, as an intent bitmap has it"
    );
    assert!(found(without_data_replay, true), "MD: where several strips change, they are garbage");
    assert!(
        !Search { cases: 0, recovery_writes: always_reconstruct, logs_first: true }
            .finds_nothing(&geometries()[5]),
        "a wrong coefficient of Q"
    );
}

/// Recomputes parity from all data, if that is available.
fn recompute_from_data(
    row: &Row,
    _: &Entry,
    _: LoggedRow,
    available: Available,
) -> Vec<(StripRole, u8)> {
    let all = StripSet::first(row.data.len() as u16);
    if all.difference(available.data).is_empty() {
        let (p, q) = parities(row.of(all));
        let (p, q) =
            (available.p.then_some((StripRole::P, p)), available.q.then_some((StripRole::Q, q)));
        return p.into_iter().chain(q).collect();
    }
    Vec::new()
}

/// Recomputes parity from the changed strips, old or new; does nothing if one of them is missing.
fn without_data_replay(
    row: &Row,
    entry: &Entry,
    found: LoggedRow,
    available: Available,
) -> Vec<(StripRole, u8)> {
    if recovery_action(found, available) != RecoveryAction::ReplayData {
        return recovery_writes(row, entry, found, available);
    }
    if !entry.changed.difference(available.data).is_empty() {
        return Vec::new();
    }
    let (p, q) = parities(row.of(entry.changed));
    let p = available.p.then_some((StripRole::P, entry.sums.0 ^ p));
    let q = available.q.then_some((StripRole::Q, entry.sums.1 ^ q));
    p.into_iter().chain(q).collect()
}

/// Treats Q as a second P.
fn always_reconstruct(
    row: &Row,
    entry: &Entry,
    found: LoggedRow,
    available: Available,
) -> Vec<(StripRole, u8)> {
    let right = recovery_writes(row, entry, found, available);
    match recovery_action(found, available) {
        RecoveryAction::ReconstructFromP(_) => {
            vec![(StripRole::Q, entry.sums.1 ^ row.p ^ entry.sums.0)]
        }
        _ => right,
    }
}
