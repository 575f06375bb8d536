//! The contents of a disk: the medium and the volatile cache in front of it. Pure: no time, no
//! errors.
//!
//! The medium is an array of *units*, which it writes atomically. Writes since the last sync are
//! kept as an ordered list of *changes* per unit. At power loss each change is kept or lost
//! independently, and the kept ones apply in order: so a unit ends in its old state, its latest, or
//! any state between, independently of all other units. A change to a part of a unit (a 512-byte
//! write to a 4 KiB unit) never tears that part.

use std::collections::BTreeMap;
use std::ops::Range;

use super::rng::Rng;

/// Changes kept separately per unit; older ones are merged.
const MAX_CHANGES_PER_UNIT: usize = 12;

/// What one power cut does to unsynced changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PowerLossRules {
    /// Probability that a change is kept.
    pub(crate) keep_probability: f64,
    /// Probability that a unit with changes is torn.
    pub(crate) torn_probability: f64,
    /// The damage of a torn unit.
    pub(crate) damage: TornDamage,
}

/// The state of a unit that was being written when the power failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TornDamage {
    /// Parts of old and new contents, cut at a multiple of this many bytes: the medium's real
    /// atomic unit is smaller than reported.
    Mixed {
        /// Granularity of the cut.
        bytes: u32,
    },
    /// Noise.
    #[default]
    Garbage,
    /// Reads fail until the unit is rewritten: the medium's own checksum is wrong.
    Unreadable,
}

/// The effect of a power cut, in units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PowerLossReport {
    /// Changes that reached the medium.
    pub(crate) kept: u64,
    /// Changes that did not.
    pub(crate) lost: u64,
    /// Units damaged.
    pub(crate) torn: u64,
    /// Units that cannot be read any more.
    pub(crate) unreadable: Vec<u64>,
}

/// Contents by number of the unit: those that are not all zeroes.
pub(crate) type Contents = BTreeMap<u64, Box<[u8]>>;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Medium {
    unit: usize,
    /// Units whose durable contents are not all zeroes.
    durable: Contents,
    unsynced: BTreeMap<u64, UnsyncedUnit>,
    /// Number of the latest change.
    sequence: u64,
}

#[derive(Debug)]
struct UnsyncedUnit {
    /// What a read returns.
    visible: Box<[u8]>,
    changes: Vec<Change>,
}

#[derive(Debug)]
struct Change {
    sequence: u64,
    /// Offset in the unit.
    at: usize,
    bytes: Box<[u8]>,
    /// A sync of this change failed: no later sync makes it durable.
    is_lost: bool,
}

impl Change {
    fn apply(&self, unit: &mut [u8]) {
        unit[self.at..self.at + self.bytes.len()].copy_from_slice(&self.bytes);
    }
}

impl Medium {
    /// All zeroes; `unit` in bytes.
    pub(crate) fn new(unit: u32) -> Self {
        Self {
            unit: unit as usize,
            durable: BTreeMap::new(),
            unsynced: BTreeMap::new(),
            sequence: 0,
        }
    }

    fn unit_bytes(&self) -> u64 {
        self.unit as u64
    }

    /// The units that `at..at + len` touches, with the part of each.
    fn pieces(&self, at: u64, len: u64) -> impl Iterator<Item = (u64, Range<usize>)> + use<> {
        let (size, unit, end) = (self.unit_bytes(), self.unit, at + len);
        let mut at = at;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let index = at / size;
            let start = usize::try_from(at % size).expect("inside a unit");
            let part = usize::try_from(end - at).unwrap_or(unit).min(unit - start);
            at += part as u64;
            Some((index, start..start + part))
        })
    }

    /// Copies what a read at `at` returns.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) {
        let mut done = 0;
        for (index, part) in self.pieces(at, into.len() as u64) {
            let to = &mut into[done..done + part.len()];
            done += part.len();
            match self.visible(index) {
                Some(unit) => to.copy_from_slice(&unit[part]),
                None => to.fill(0),
            }
        }
    }

    fn visible(&self, index: u64) -> Option<&[u8]> {
        let unsynced = self.unsynced.get(&index).map(|u| &*u.visible);
        unsynced.or_else(|| self.durable.get(&index).map(|u| &**u))
    }

    /// Copies the contents after a power cut now, if every change was lost.
    pub(crate) fn read_durable(&self, at: u64, into: &mut [u8]) {
        let mut done = 0;
        for (index, part) in self.pieces(at, into.len() as u64) {
            let to = &mut into[done..done + part.len()];
            done += part.len();
            match self.durable.get(&index) {
                Some(unit) => to.copy_from_slice(&unit[part]),
                None => to.fill(0),
            }
        }
    }

    /// Replaces contents, visibly but not yet durably.
    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) {
        let mut done = 0;
        for (index, part) in self.pieces(at, bytes.len() as u64) {
            let from = &bytes[done..done + part.len()];
            done += part.len();
            self.change(index, part.start, from.into());
        }
    }

    /// Makes a range read as zeroes, visibly but not yet durably. The cost depends on the contents
    /// of the range, not on its length.
    pub(crate) fn zero(&mut self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (at / self.unit_bytes(), (at + len - 1) / self.unit_bytes());
        let mut indices: Vec<u64> = self.durable.range(first..=last).map(|(&i, _)| i).collect();
        indices.extend(self.unsynced.range(first..=last).map(|(&i, _)| i));
        indices.sort_unstable();
        indices.dedup();
        for index in indices {
            let base = index * self.unit_bytes();
            let start = at.max(base) - base;
            let end = (at + len).min(base + self.unit_bytes()) - base;
            let zeroes = vec![0; usize::try_from(end - start).expect("inside a unit")];
            self.change(index, usize::try_from(start).expect("inside a unit"), zeroes.into());
        }
    }

    fn change(&mut self, index: u64, at: usize, bytes: Box<[u8]>) {
        self.sequence += 1;
        let change = Change { sequence: self.sequence, at, bytes, is_lost: false };
        let durable = &self.durable;
        let unsynced = self.unsynced.entry(index).or_insert_with(|| UnsyncedUnit {
            visible: durable.get(&index).cloned().unwrap_or_else(|| vec![0; self.unit].into()),
            changes: Vec::new(),
        });
        change.apply(&mut unsynced.visible);
        unsynced.changes.push(change);
        if unsynced.changes.len() > MAX_CHANGES_PER_UNIT {
            self.merge_oldest(index);
        }
    }

    /// Merges the two oldest changes, so that a unit written over and over does not keep all of
    /// them. The result counts as the older one: a sync that covers that covers both. A lost change
    /// (those come first) is dropped.
    fn merge_oldest(&mut self, index: u64) {
        let Some(unsynced) = self.unsynced.get_mut(&index) else { return };
        let first = unsynced.changes.remove(0);
        let second = &mut unsynced.changes[0];
        if first.is_lost {
            return;
        }
        let start = first.at.min(second.at);
        let end = (first.at + first.bytes.len()).max(second.at + second.bytes.len());
        let mut unit: Box<[u8]> =
            self.durable.get(&index).cloned().unwrap_or_else(|| vec![0; self.unit].into());
        first.apply(&mut unit);
        second.apply(&mut unit);
        second.sequence = first.sequence;
        second.at = start;
        second.bytes = unit[start..end].into();
    }

    /// Number of the latest change, up to which a sync submitted now must cover.
    pub(crate) fn sync_point(&self) -> u64 {
        self.sequence
    }

    /// Makes durable every change up to `mark`.
    pub(crate) fn sync(&mut self, mark: u64) {
        let (durable, size) = (&mut self.durable, self.unit);
        self.unsynced.retain(|&index, unsynced| {
            let ready = |c: &Change| c.sequence <= mark && !c.is_lost;
            if unsynced.changes.iter().any(ready) {
                let unit = durable.entry(index).or_insert_with(|| vec![0; size].into());
                unsynced.changes.iter().filter(|c| ready(c)).for_each(|c| c.apply(unit));
                if unit.iter().all(|&b| b == 0) {
                    durable.remove(&index);
                }
                unsynced.changes.retain(|c| !ready(c));
            }
            !unsynced.changes.is_empty()
        });
    }

    /// A sync failed: each change up to `mark` becomes durable with probability `keep`; the others
    /// are lost. They stay visible until [`Self::drop_lost_changes`] or a power cut, and no later
    /// sync makes them durable.
    pub(crate) fn fail_sync(&mut self, mark: u64, keep: f64, rng: &Rng) {
        let (durable, size) = (&mut self.durable, self.unit);
        self.unsynced.retain(|&index, unsynced| {
            unsynced.changes.retain_mut(|change| {
                if change.sequence > mark || change.is_lost {
                    return true;
                }
                change.is_lost = !rng.chance(keep);
                if !change.is_lost {
                    let unit = durable.entry(index).or_insert_with(|| vec![0; size].into());
                    change.apply(unit);
                }
                change.is_lost
            });
            !unsynced.changes.is_empty()
        });
    }

    /// Removes the visible changes that a failed sync has lost.
    pub(crate) fn drop_lost_changes(&mut self) {
        let (durable, size) = (&self.durable, self.unit);
        self.unsynced.retain(|index, unsynced| {
            if !unsynced.changes.iter().any(|c| c.is_lost) {
                return true;
            }
            unsynced.changes.retain(|c| !c.is_lost);
            unsynced.visible = durable.get(index).cloned().unwrap_or_else(|| vec![0; size].into());
            unsynced.changes.iter().for_each(|c| c.apply(&mut unsynced.visible));
            !unsynced.changes.is_empty()
        });
    }

    /// Applies a power cut.
    pub(crate) fn power_loss(&mut self, rules: PowerLossRules, rng: &Rng) -> PowerLossReport {
        let mut losses = PowerLossReport::default();
        for (index, unsynced) in std::mem::take(&mut self.unsynced) {
            let old = self.durable.get(&index).cloned();
            let mut unit = old.clone().unwrap_or_else(|| vec![0; self.unit].into());
            for change in &unsynced.changes {
                if !change.is_lost && rng.chance(rules.keep_probability) {
                    change.apply(&mut unit);
                    losses.kept += 1;
                } else {
                    losses.lost += 1;
                }
            }
            if rng.chance(rules.torn_probability) {
                losses.torn += 1;
                match rules.damage {
                    TornDamage::Mixed { bytes } => {
                        let step = (bytes as usize).max(1);
                        for (a, b) in unit.chunks_mut(step).zip(unsynced.visible.chunks(step)) {
                            if rng.chance(0.5) {
                                a.copy_from_slice(b);
                            }
                        }
                    }
                    TornDamage::Garbage => rng.fill(&mut unit),
                    TornDamage::Unreadable => losses.unreadable.push(index),
                }
            }
            self.set_durable(index, unit);
        }
        losses
    }

    fn set_durable(&mut self, index: u64, unit: Box<[u8]>) {
        if unit.iter().all(|&b| b == 0) {
            self.durable.remove(&index);
        } else {
            self.durable.insert(index, unit);
        }
    }

    /// Flips one bit of both the durable and the visible contents.
    pub(crate) fn flip_bit(&mut self, at: u64, bit: u8) {
        let index = at / self.unit_bytes();
        let byte = usize::try_from(at % self.unit_bytes()).expect("inside a unit");
        let mask = 1 << (bit % 8);
        let mut unit =
            self.durable.get(&index).cloned().unwrap_or_else(|| vec![0; self.unit].into());
        unit[byte] ^= mask;
        self.set_durable(index, unit);
        if let Some(unsynced) = self.unsynced.get_mut(&index) {
            unsynced.visible[byte] ^= mask;
        }
    }

    /// Replaces both durable and visible contents.
    pub(crate) fn write_durable(&mut self, at: u64, bytes: &[u8]) {
        let mut done = 0;
        for (index, part) in self.pieces(at, bytes.len() as u64) {
            let from = &bytes[done..done + part.len()];
            done += part.len();
            let mut unit =
                self.durable.get(&index).cloned().unwrap_or_else(|| vec![0; self.unit].into());
            unit[part.clone()].copy_from_slice(from);
            self.set_durable(index, unit);
            if let Some(unsynced) = self.unsynced.get_mut(&index) {
                unsynced.visible[part].copy_from_slice(from);
            }
        }
    }

    /// The visible contents.
    pub(crate) fn capture(&self) -> Contents {
        let mut contents = self.durable.clone();
        contents.extend(self.unsynced.iter().map(|(index, unit)| (*index, unit.visible.clone())));
        contents.retain(|_, unit| unit.iter().any(|b| *b != 0));
        contents
    }

    /// Replaces all contents durably by earlier ones.
    pub(crate) fn restore(&mut self, contents: Contents) {
        self.unsynced.clear();
        self.durable = contents;
    }

    /// Drops everything from byte `at` on, for a truncated file.
    pub(crate) fn truncate(&mut self, at: u64) {
        let first_gone = at.div_ceil(self.unit_bytes());
        self.durable.split_off(&first_gone);
        self.unsynced.split_off(&first_gone);
        if !at.is_multiple_of(self.unit_bytes()) {
            let index = at / self.unit_bytes();
            let cut = usize::try_from(at % self.unit_bytes()).expect("inside a unit");
            if let Some(unit) = self.durable.get_mut(&index) {
                unit[cut..].fill(0);
            }
            if let Some(unsynced) = self.unsynced.get_mut(&index) {
                unsynced.visible[cut..].fill(0);
                for c in &mut unsynced.changes {
                    let keep = cut.saturating_sub(c.at).min(c.bytes.len());
                    c.bytes[keep..].fill(0);
                }
            }
        }
    }

    /// Changes not yet durable.
    pub(crate) fn unsynced_changes(&self) -> usize {
        self.unsynced.values().map(|u| u.changes.len()).sum()
    }

    /// The ranges of bytes with contents, unit by unit.
    pub(crate) fn filled_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let size = self.unit_bytes();
        let mut all: Vec<u64> = self.durable.keys().chain(self.unsynced.keys()).copied().collect();
        all.sort_unstable();
        all.dedup();
        all.into_iter().map(move |i| i * size..(i + 1) * size)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_restored_medium_has_its_contents_at_the_copy() {
        let mut medium = Medium::new(4096);
        medium.write(0, &[1; 4096]);
        medium.sync(medium.sync_point());
        medium.write(4096, &[2; 4096]);
        let copy = medium.capture();
        medium.write(0, &[3; 8192]);
        medium.write(1 << 20, &[3; 4096]);
        medium.restore(copy);
        assert_eq!([0, 4096, 1 << 20].map(|at| byte(&medium, at)), [1, 2, 0]);
        assert_eq!(medium.unsynced_changes(), 0);
    }

    const KEEP: PowerLossRules = PowerLossRules {
        keep_probability: 1.0,
        torn_probability: 0.0,
        damage: TornDamage::Garbage,
    };
    const LOSE: PowerLossRules = PowerLossRules { keep_probability: 0.0, ..KEEP };
    const HALF: PowerLossRules = PowerLossRules { keep_probability: 0.5, ..KEEP };

    fn byte(m: &Medium, at: u64) -> u8 {
        let mut b = [0];
        m.read(at, &mut b);
        b[0]
    }

    #[test]
    fn unsynced_changes_are_seen_and_may_be_lost() {
        let rng = Rng::new(1, "");
        let mut m = Medium::new(512);
        m.write(100, &[1; 2000]);
        assert_eq!((byte(&m, 99), byte(&m, 100), byte(&m, 2099), byte(&m, 2100)), (0, 1, 1, 0));
        m.sync(m.sync_point());
        m.write(512, &[2; 512]);
        m.power_loss(LOSE, &rng);
        assert_eq!(byte(&m, 600), 1);
        m.write(512, &[2; 512]);
        m.power_loss(KEEP, &rng);
        assert_eq!(byte(&m, 600), 2);
    }

    #[test]
    fn a_sync_covers_what_completed_before_its_submission_only() {
        let rng = Rng::new(1, "");
        let mut m = Medium::new(512);
        m.write(0, &[1; 512]);
        let mark = m.sync_point();
        m.write(0, &[2; 256]);
        m.sync(mark);
        assert_eq!(m.unsynced_changes(), 1);
        m.power_loss(LOSE, &rng);
        assert_eq!((byte(&m, 0), byte(&m, 300)), (1, 1));
    }

    #[test]
    fn each_unsynced_outcome_occurs_and_no_other() {
        let mut seen = BTreeSet::new();
        for seed in 0..200 {
            let rng = Rng::new(seed, "");
            let mut m = Medium::new(512);
            for value in 1..=3u8 {
                m.write(0, &[value; 512]);
            }
            m.write(512, &[9; 512]);
            m.power_loss(HALF, &rng);
            let mut unit = [0; 512];
            m.read(0, &mut unit);
            assert!(unit.iter().all(|&b| b == unit[0]), "torn");
            seen.insert((unit[0], byte(&m, 512)));
        }
        let all: BTreeSet<_> = [0, 1, 2, 3].iter().flat_map(|&a| [(a, 0), (a, 9)]).collect();
        assert_eq!(seen, all);
    }

    #[test]
    fn a_hot_unit_stays_bounded_and_correct() {
        for seed in 0..50 {
            let rng = Rng::new(seed, "hot");
            let mut m = Medium::new(4096);
            for i in 0..200u64 {
                m.write(512 * (i % 8), &[u8::try_from(i).unwrap(); 512]);
            }
            assert!(m.unsynced_changes() <= MAX_CHANGES_PER_UNIT);
            assert_eq!((byte(&m, 0), byte(&m, 4095)), (192, 199));
            m.power_loss(if seed.is_multiple_of(2) { KEEP } else { HALF }, &rng);
            for sector in 0..8 {
                let v = u64::from(byte(&m, sector * 512));
                assert!(v == 0 || v % 8 == sector, "sector {sector} holds {v}");
            }
        }
    }

    #[test]
    fn after_a_failed_sync_the_next_one_proves_nothing() {
        let rng = Rng::new(1, "");
        let mut m = Medium::new(512);
        m.write(0, &[1; 512]);
        m.fail_sync(m.sync_point(), 0.0, &rng);
        assert_eq!(byte(&m, 0), 1, "still in view");
        m.sync(m.sync_point());
        m.power_loss(KEEP, &rng);
        assert_eq!(byte(&m, 0), 0, "and yet lost");

        m.write(0, &[2; 512]);
        m.fail_sync(m.sync_point(), 0.0, &rng);
        m.drop_lost_changes();
        assert_eq!(byte(&m, 0), 0, "out of view");
    }

    #[test]
    fn zeroes_over_a_large_range_cost_what_it_holds() {
        let mut m = Medium::new(4096);
        m.write(10_000, &[7; 5000]);
        m.sync(m.sync_point());
        m.zero(12_000, 1 << 48);
        assert_eq!((byte(&m, 11_999), byte(&m, 12_000), byte(&m, 14_999)), (7, 0, 0));
        m.sync(m.sync_point());
        assert_eq!(m.durable.len(), 1);
        m.power_loss(KEEP, &Rng::new(1, ""));
        assert_eq!((byte(&m, 11_999), byte(&m, 12_000)), (7, 0));
    }

    #[test]
    fn damage_stays_inside_units_with_changes() {
        for (seed, damage) in [
            (1, TornDamage::Garbage),
            (2, TornDamage::Mixed { bytes: 512 }),
            (3, TornDamage::Unreadable),
        ] {
            let rng = Rng::new(seed, "");
            let mut m = Medium::new(4096);
            m.write(0, &[1; 3 * 4096]);
            m.sync(m.sync_point());
            m.write(4096, &[2; 4096]);
            let losses = m.power_loss(
                PowerLossRules { keep_probability: 0.0, torn_probability: 1.0, damage },
                &rng,
            );
            assert_eq!(losses.torn, 1);
            assert_eq!((byte(&m, 0), byte(&m, 4095), byte(&m, 8192)), (1, 1, 1));
            let mut unit = [0; 4096];
            m.read(4096, &mut unit);
            match damage {
                TornDamage::Garbage => assert!(unit.iter().any(|&b| b > 2)),
                TornDamage::Mixed { .. } => assert!(unit.chunks(512).all(|c| c[0] == c[511])),
                TornDamage::Unreadable => assert_eq!(losses.unreadable, [1]),
            }
        }
    }

    #[test]
    fn truncated_data_does_not_return() {
        let mut m = Medium::new(4096);
        m.write(0, &[5; 8192]);
        m.sync(m.sync_point());
        m.write(4096, &[6; 4096]);
        m.truncate(4608);
        assert_eq!((byte(&m, 4607), byte(&m, 4608), byte(&m, 9000)), (6, 0, 0));
        m.power_loss(LOSE, &Rng::new(1, ""));
        assert_eq!((byte(&m, 4607), byte(&m, 4608)), (5, 0));
    }
}
