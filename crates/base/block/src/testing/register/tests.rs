use rt::buf::{Account, BufferPool, MemoryClass, copy_in};

use super::*;
use crate::testing::Rng;

const BLOCK: Blocks = Blocks { at: Lba(5), count: 1 };

/// A checker with the bytes of every write so far.
struct World {
    checker: Checker,
    account: Account,
    written: Vec<Bufs>,
}

impl World {
    fn new() -> Self {
        Self::with(Checker::new(1, 512, InitialContents::Zeroes))
    }

    fn with(checker: Checker) -> Self {
        let account = BufferPool::new(1 << 22).unwrap().account();
        Self { checker, account, written: vec![Bufs::zeroes(512)] }
    }

    fn bytes(&self, bytes: &[u8]) -> Bufs {
        copy_in(&self.account.try_credit(bytes.len(), MemoryClass::LocalIo).unwrap(), bytes)
    }

    fn begin_write(&mut self, fua: bool) -> Ticket {
        let ticket = self.checker.begin_write(BLOCK, 1, fua);
        let credit = self.account.try_credit(512, MemoryClass::LocalIo).unwrap();
        self.written.push(self.checker.data(ticket, &credit));
        ticket
    }

    fn write(&mut self) {
        let ticket = self.begin_write(false);
        self.checker.end(ticket, Outcome::Done);
    }

    fn flush(&mut self) {
        let ticket = self.checker.begin_flush();
        self.checker.end(ticket, Outcome::Done);
    }

    /// A read that returns what write number `n` (0: nothing yet) wrote.
    fn read(&mut self, n: usize) -> Result<(), Violation> {
        let ticket = self.checker.begin_read(BLOCK);
        self.checker.end_read(ticket, &self.written[n].clone())
    }

    fn is_replaced(&mut self, n: usize) -> bool {
        matches!(self.read(n), Err(Violation { fault: Fault::Stale { .. }, .. }))
    }
}

#[test]
fn the_latest_write_is_read() {
    let mut w = World::new();
    w.read(0).unwrap();
    w.write();
    w.write();
    assert!(w.is_replaced(0));
    assert!(w.is_replaced(1), "a stale read");
    w.read(2).unwrap();
    assert_eq!(w.checker.registers[&5].0.len(), 3, "nothing was flushed");
    w.flush();
    w.write();
    assert_eq!(w.checker.registers[&5].0.len(), 2);
}

#[test]
fn concurrent_writes_leave_either_but_no_flip_flop() {
    let mut w = World::new();
    let (a, b) = (w.begin_write(false), w.begin_write(false));
    w.read(0).unwrap();
    w.checker.end(a, Outcome::Done);
    assert!(w.is_replaced(0));
    w.checker.end(b, Outcome::Done);
    let mut other = World { written: w.written.clone(), ..World::with(w.checker.clone()) };
    w.read(1).unwrap();
    assert!(w.is_replaced(2), "it was read to be the first of the two");
    w.read(1).unwrap();
    other.read(2).unwrap();
    assert!(other.is_replaced(1));
}

#[test]
fn a_read_that_overlaps_a_write_may_see_either_and_later_ones_not_less() {
    let mut w = World::new();
    let a = w.begin_write(false);
    let early = w.checker.begin_read(BLOCK);
    let (old, new) = (w.written[0].clone(), w.written[1].clone());
    w.read(1).unwrap();
    assert!(w.is_replaced(0), "once seen, a write has happened");
    w.checker.end(a, Outcome::Done);
    w.checker.clone().end_read(early, &old).unwrap();
    w.checker.end_read(early, &new).unwrap();
}

#[test]
fn an_unflushed_write_may_be_lost_with_power_only() {
    let mut w = World::new();
    w.write();
    w.flush();
    w.write();
    w.write();
    w.checker.crash(CrashKind::ProcessDeath);
    assert!(w.is_replaced(1) && w.is_replaced(2));
    for survivor in [1, 2, 3] {
        let mut after = World { written: w.written.clone(), ..World::with(w.checker.clone()) };
        after.checker.crash(CrashKind::PowerLoss);
        assert!(after.is_replaced(0), "write 1 was flushed");
        after.read(survivor).unwrap();
        for other in [1, 2, 3] {
            assert_eq!(after.is_replaced(other), other != survivor, "what was read stays");
        }
        after.checker.crash(CrashKind::PowerLoss);
        assert!(after.is_replaced(survivor % 3 + 1), "across another crash too");
        after.read(survivor).unwrap();
    }
}

#[test]
fn fua_and_write_through_survive_without_a_flush() {
    let mut w = World::new();
    let a = w.begin_write(true);
    w.checker.end(a, Outcome::Done);
    w.checker.crash(CrashKind::PowerLoss);
    assert!(w.is_replaced(0));
    w.read(1).unwrap();

    let mut w = World::with(Checker::new(1, 512, InitialContents::Zeroes).write_through());
    w.write();
    w.checker.crash(CrashKind::PowerLoss);
    assert!(w.is_replaced(0));
    assert_eq!(w.checker.undecided_values(), 0);
}

#[test]
fn a_flush_covers_only_what_completed_before_it_began() {
    let mut w = World::new();
    let a = w.begin_write(false);
    let flush = w.checker.begin_flush();
    w.checker.end(a, Outcome::Done);
    w.checker.end(flush, Outcome::Done);
    w.checker.crash(CrashKind::PowerLoss);
    w.checker.clone().registers.get_mut(&5).unwrap();
    w.read(0).unwrap();

    let mut w = World::new();
    w.write();
    let failed = w.checker.begin_flush();
    w.checker.end(failed, Outcome::Failed);
    let cut_short = w.checker.begin_flush();
    w.checker.crash(CrashKind::PowerLoss);
    w.checker.end(cut_short, Outcome::Done);
    w.read(0).unwrap();
}

#[test]
fn an_unacknowledged_write_may_or_may_not_have_happened() {
    for (outcome, then_old) in [(Outcome::Failed, true), (Outcome::Unknown, false)] {
        let mut w = World::new();
        let a = w.begin_write(false);
        w.checker.end(a, outcome);
        w.read(0).unwrap();
        assert_eq!(w.is_replaced(1), then_old, "a failed write has no effect later");
        let mut w = World::new();
        let a = w.begin_write(false);
        w.checker.end(a, outcome);
        w.read(1).unwrap();
        assert!(w.is_replaced(0));
    }
    let mut w = World::new();
    w.write();
    w.flush();
    w.begin_write(true);
    w.checker.crash(CrashKind::PowerLoss);
    w.read(2).unwrap();
    assert!(w.is_replaced(1) && w.is_replaced(0));
}

#[test]
fn an_unknown_outcome_ends_with_the_process() {
    let mut w = World::new();
    w.write();
    let a = w.begin_write(false);
    w.checker.end(a, Outcome::Unknown);
    w.checker.crash(CrashKind::ProcessDeath);
    w.read(1).unwrap();
    assert!(w.is_replaced(2));
}

#[test]
fn zeroed_and_unmapped_blocks() {
    let mut w = World::new();
    w.write();
    let zero = w.checker.begin_zero(BLOCK, true);
    w.checker.end(zero, Outcome::Done);
    assert!(w.is_replaced(1));
    w.read(0).unwrap();
    w.checker.crash(CrashKind::PowerLoss);
    assert!(w.is_replaced(1));
    assert!(w.checker.registers.is_empty(), "a block known to be zero costs nothing");
    w.write();
    let unmap = w.checker.begin_unmap(BLOCK, true);
    w.checker.end(unmap, Outcome::Done);
    assert!(w.is_replaced(2));
    w.write();
    let unmap = w.checker.begin_unmap(BLOCK, false);
    w.checker.end(unmap, Outcome::Done);
    for old in [0, 3, 1, 0, 2] {
        w.read(old).unwrap();
    }
    let garbage = w.bytes(&[7; 512]);
    let read = w.checker.begin_read(BLOCK);
    assert_eq!(w.checker.end_read(read, &garbage).unwrap_err().fault, Fault::NeverWritten);
    w.write();
    assert!(w.is_replaced(3) && w.is_replaced(0));
    w.read(4).unwrap();
}

#[test]
fn torn_strayed_and_foreign_blocks_are_named() {
    let mut w = World::new();
    w.write();
    w.write();
    let mut torn = w.written[2].to_vec();
    torn[256..].copy_from_slice(&w.written[1].to_vec()[256..]);
    let mut strayed = vec![0; 512];
    let elsewhere = Stamp { volume: 1, at: Lba(6), writer: 1, sequence: 1 };
    elsewhere.fill(&mut strayed);
    let mut early = vec![0; 512];
    Stamp { at: Lba(5), sequence: 99, ..elsewhere }.fill(&mut early);
    let faults = [
        (torn, Fault::Torn { offset: 256 }),
        (strayed, Fault::Misdirected(elsewhere)),
        (early, Fault::NeverWritten),
        (vec![1; 512], Fault::NeverWritten),
    ];
    for (bytes, fault) in faults {
        let bytes = w.bytes(&bytes);
        let read = w.checker.begin_read(BLOCK);
        let violation = w.checker.end_read(read, &bytes).unwrap_err();
        assert_eq!((violation.at, violation.fault), (Lba(5), fault));
        w.checker.mark_damaged(BLOCK);
        let read = w.checker.begin_read(BLOCK);
        w.checker.end_read(read, &bytes).expect("damaged on purpose");
        w.write();
        let read = w.checker.begin_read(BLOCK);
        w.checker.end_read(read, &bytes).expect_err("written again");
    }
}

#[test]
fn damage_outlives_an_unflushed_write_but_not_a_flushed_one() {
    let mut w = World::new();
    w.checker.mark_damaged(BLOCK);
    w.write();
    w.checker.crash(CrashKind::PowerLoss);
    let garbage = w.bytes(&[9; 512]);
    let read = w.checker.begin_read(BLOCK);
    w.checker.end_read(read, &garbage).unwrap();
    w.write();
    w.flush();
    w.checker.crash(CrashKind::PowerLoss);
    let read = w.checker.begin_read(BLOCK);
    w.checker.end_read(read, &garbage).unwrap_err();
    w.read(2).unwrap();
}

#[test]
fn blocks_are_found_in_any_buffer_layout() {
    let mut checker = Checker::new(1, 512, InitialContents::Zeroes);
    let account = BufferPool::new(1 << 20).unwrap().account();
    let range = Blocks::new(Lba(3), 9);
    let write = checker.begin_write(range, 2, false);
    let data = checker.data(write, &account.try_credit(8192, MemoryClass::LocalIo).unwrap());
    checker.end(write, Outcome::Done);
    for cut in [1, 100, 511, 512, 513, 4096] {
        let mut pieces = data.slice(0..cut);
        pieces.append(data.slice(cut..cut + 7));
        pieces.append(data.slice(cut + 7..data.len()));
        let read = checker.begin_read(range);
        checker.end_read(read, &pieces).unwrap();
    }
    let read = checker.begin_read(Blocks::new(Lba(4), 9));
    assert_eq!(checker.end_read(read, &data).unwrap_err().at, Lba(4));
}

#[test]
fn an_unknown_volume_may_hold_anything_until_written() {
    let mut w = World::with(Checker::new(1, 512, InitialContents::Anything));
    let garbage = w.bytes(&[3; 512]);
    let read = w.checker.begin_read(BLOCK);
    w.checker.end_read(read, &garbage).unwrap();
    w.write();
    let read = w.checker.begin_read(BLOCK);
    w.checker.end_read(read, &garbage).unwrap_err();
}

/// Brute force over single-register histories: is there an order of events that explains it?
mod brute {
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Event {
        pub(super) begun: usize,
        pub(super) ended: usize,
        /// The value written or read.
        pub(super) value: usize,
        pub(super) kind: Kind,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(super) enum Kind {
        Read,
        /// Acknowledged, and durable in the end.
        Durable,
        /// Acknowledged.
        Done,
        /// Perhaps.
        Perhaps,
    }

    /// The values that a register may hold after `events`, if power is (not) lost then. None
    /// means that no order explains the events.
    pub(super) fn outcomes(events: &[Event], initial: usize, power_cut: bool) -> Vec<usize> {
        let mut found = Vec::new();
        order(events, &mut vec![initial], 0, power_cut, &mut found);
        found.sort_unstable();
        found.dedup();
        found
    }

    fn order(
        left: &[Event],
        values: &mut Vec<usize>,
        durable_from: usize,
        power_cut: bool,
        found: &mut Vec<usize>,
    ) {
        if left.iter().all(|e| e.kind == Kind::Perhaps) {
            let from = if power_cut { durable_from } else { values.len() - 1 };
            found.extend_from_slice(&values[from..]);
        }
        for i in 0..left.len() {
            let event = left[i];
            // An event cannot come next if a mandatory one that is left ended before it began.
            let late = left.iter().any(|e| e.kind != Kind::Perhaps && e.ended < event.begun);
            if late || event.kind == Kind::Read && values.last() != Some(&event.value) {
                continue;
            }
            // A `Perhaps` that ended before this one began cannot come later: it never happened.
            let rest: Vec<Event> = left
                .iter()
                .enumerate()
                .filter(|&(j, e)| j != i && e.ended >= event.begun)
                .map(|(_, e)| *e)
                .collect();
            if event.kind == Kind::Read {
                order(&rest, values, durable_from, power_cut, found);
            } else {
                values.push(event.value);
                let durable =
                    if event.kind == Kind::Durable { values.len() - 1 } else { durable_from };
                order(&rest, values, durable, power_cut, found);
                values.pop();
            }
        }
    }
}

/// One random era, reported to the checker and, as events, to brute force. Returns the events and
/// whether the checker objected.
fn random_era(w: &mut World, rng: &mut Rng, clock: &mut usize) -> (Vec<brute::Event>, bool) {
    use brute::{Event, Kind};
    let mut events: Vec<Event> = Vec::new();
    let mut open: Vec<(usize, Ticket)> = Vec::new();
    let mut objected = false;
    let mut acknowledged: Vec<(usize, usize)> = Vec::new();
    for _ in 0..rng.within(1, 12) {
        *clock += 1;
        if rng.one_in(12) {
            w.checker.crash(CrashKind::ProcessDeath);
            for (i, _) in open.drain(..) {
                if events[i].kind == Kind::Perhaps {
                    events[i].ended = *clock;
                }
            }
            *clock += 1;
        }
        if open.is_empty() || open.len() < 4 && rng.one_in(2) {
            let (kind, value, ticket) = match rng.below(5) {
                0 | 1 => (Kind::Read, 0, w.checker.begin_read(BLOCK)),
                2 => (Kind::Durable, usize::MAX, w.checker.begin_flush()),
                _ => (Kind::Perhaps, w.written.len(), w.begin_write(false)),
            };
            events.push(Event { begun: *clock, ended: usize::MAX, value, kind });
            open.push((events.len() - 1, ticket));
            continue;
        }
        let (i, ticket) = open.swap_remove(usize::try_from(rng.below(open.len() as u64)).unwrap());
        events[i].ended = *clock;
        match (events[i].kind, events[i].value) {
            (Kind::Read, _) => {
                let n = usize::try_from(rng.below(w.written.len() as u64)).unwrap();
                events[i].value = n;
                let data = w.written[n].clone();
                objected |= w.checker.end_read(ticket, &data).is_err();
            }
            (_, usize::MAX) => {
                w.checker.end(ticket, Outcome::Done);
                for &(write, at) in &acknowledged {
                    if at < events[i].begun {
                        events[write].kind = Kind::Durable;
                    }
                }
            }
            _ if rng.one_in(4) => w.checker.end(ticket, Outcome::Failed),
            _ => {
                w.checker.end(ticket, Outcome::Done);
                events[i].kind = Kind::Done;
                acknowledged.push((i, *clock));
            }
        }
    }
    let unanswered = |e: &Event| e.kind == Kind::Read && e.ended == usize::MAX;
    events.retain(|e| e.value != usize::MAX && !unanswered(e));
    (events, objected)
}

#[test]
fn it_agrees_with_brute_force_on_random_histories() {
    let mut verdicts = [0u32; 2];
    for seed in 0..20_000 {
        let mut rng = Rng::new(seed);
        let mut w = World::new();
        let (mut initial, mut clock, mut objected) = (vec![0], 0, false);
        let eras = rng.within(1, 3);
        let mut story = Vec::new();
        for era in 0..eras {
            let (events, now) = random_era(&mut w, &mut rng, &mut clock);
            objected |= now;
            let cut = era + 1 < eras;
            if cut {
                w.checker.crash(CrashKind::PowerLoss);
            }
            let mut next: Vec<usize> =
                initial.iter().flat_map(|&i| brute::outcomes(&events, i, cut)).collect();
            next.sort_unstable();
            next.dedup();
            story.push((events, initial));
            initial = next;
            if objected || initial.is_empty() {
                break;
            }
        }
        assert_eq!(objected, initial.is_empty(), "seed {seed}: {story:#?}");
        verdicts[usize::from(objected)] += 1;
    }
    assert!(verdicts.iter().all(|&n| n > 2_000), "both verdicts were tried: {verdicts:?}");
}
