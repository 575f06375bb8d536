//! Was every block one register, as far as its clients can tell? Clients record their requests and
//! when these were answered; [`check_history`] says whether some order explains all of it
//! (linearizability).
//!
//! No two writes of a block write the same value, so every read identifies its write, and the
//! question has a short exact answer (P. Gibbons, E. Korach, Testing shared memories, SIAM J.
//! Comput. 26, 1997, section 4.2). A value's write and reads form a *cluster*. If the first end of
//! its operations is before the last beginning, the register must hold the value for all of that
//! time (a *forward zone*). Otherwise all of them overlap, and one moment between the last
//! beginning and the first end is enough (a *backward zone*). An order exists if no read of a value
//! ends before its write begins, no two forward zones overlap, and no backward zone lies inside a
//! forward one.

use std::{collections::BTreeMap, fmt, time::Duration};

/// The value of a block that was never written.
pub const UNWRITTEN: u64 = 0;

/// A request on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// Writes the value to the block.
    Write,
    /// Read this value from the block.
    Read,
}

/// One operation on one block, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The client; named in reports.
    pub client: u64,
    /// The block number.
    pub lba: u64,
    /// Read or write.
    pub kind: OperationKind,
    /// The value written or seen. Writes of one block have different ones, and none is
    /// [`UNWRITTEN`].
    pub value: u64,
    /// When it was sent, on the clock that all clients share; later than zero, when everything was
    /// unwritten.
    pub invoked_at: Duration,
    /// When it was answered. A write without an answer is open: it may take effect at any time, or
    /// never.
    pub completed_at: Option<Duration>,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.kind {
            OperationKind::Write => "wrote",
            OperationKind::Read => "read",
        };
        let (client, value, from) = (self.client, self.value, self.invoked_at.as_secs_f64());
        write!(f, "client {client} {verb} {value} from {from:.6} s ")?;
        match self.completed_at {
            Some(end) => write!(f, "to {:.6} s", end.as_secs_f64()),
            None => write!(f, "without an answer"),
        }
    }
}

/// How much was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckSummary {
    /// Blocks with at least one operation.
    pub blocks: usize,
    /// Operations that were answered.
    pub completed: usize,
    /// Writes without an answer.
    pub pending: usize,
}

/// Checks that the blocks of `operations` were registers; the error names the operations that no
/// order explains.
pub fn check_history(operations: &[Operation]) -> Result<CheckSummary, String> {
    let mut registers: BTreeMap<u64, Vec<&Operation>> = BTreeMap::new();
    let mut checked = CheckSummary::default();
    for operation in operations {
        match (operation.completed_at, operation.kind) {
            (Some(_), _) => checked.completed += 1,
            (None, OperationKind::Write) => checked.pending += 1,
            // A read without an answer returned nothing known.
            (None, OperationKind::Read) => continue,
        }
        registers.entry(operation.lba).or_default().push(operation);
    }
    checked.blocks = registers.len();
    for (lba, operations) in registers {
        check_register(&operations).map_err(|why| format!("block {lba}: {why}"))?;
    }
    Ok(checked)
}

/// A value, and the times that say when the register must have held it.
struct ValueCluster<'a> {
    /// `None` for the initial value.
    write: Option<&'a Operation>,
    reads: usize,
    /// The operation that ended first; `None` if the write is the only one and open.
    first_end: (Duration, Option<&'a Operation>),
    /// The operation that began last.
    last_begin: (Duration, Option<&'a Operation>),
}

impl<'a> ValueCluster<'a> {
    fn new(write: Option<&'a Operation>) -> Self {
        let end = write.map_or(Duration::ZERO, |w| w.completed_at.unwrap_or(Duration::MAX));
        let begin = write.map_or(Duration::ZERO, |w| w.invoked_at);
        Self { write, reads: 0, first_end: (end, write), last_begin: (begin, write) }
    }

    fn add(&mut self, read: &'a Operation) -> Result<(), String> {
        let end = read.completed_at.unwrap_or(Duration::MAX);
        if let Some(write) = self.write.filter(|write| end < write.invoked_at) {
            return Err(format!("read before it was written: {read}; {write}"));
        }
        self.reads += 1;
        if end < self.first_end.0 {
            self.first_end = (end, Some(read));
        }
        if read.invoked_at > self.last_begin.0 {
            self.last_begin = (read.invoked_at, Some(read));
        }
        Ok(())
    }

    fn is_forward(&self) -> bool {
        self.first_end.0 < self.last_begin.0
    }

    /// An open write that no read returned explains and forbids nothing.
    fn constrains_order(&self) -> bool {
        self.reads > 0 || self.write.is_some_and(|write| write.completed_at.is_some())
    }
}

impl fmt::Display for ValueCluster<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.write {
            Some(write) => write!(f, "{write}")?,
            None => write!(f, "not written yet")?,
        }
        for seen in [self.first_end.1, self.last_begin.1].into_iter().flatten() {
            if seen.kind == OperationKind::Read {
                write!(f, ", {seen}")?;
            }
        }
        Ok(())
    }
}

fn check_register(operations: &[&Operation]) -> Result<(), String> {
    let clusters = build_clusters(operations)?;
    let (mut forward, backward): (Vec<&ValueCluster<'_>>, Vec<&ValueCluster<'_>>) =
        clusters.iter().filter(|cluster| cluster.constrains_order()).partition(|c| c.is_forward());
    forward.sort_by_key(|cluster| cluster.first_end.0);
    for pair in forward.windows(2) {
        if pair[1].first_end.0 < pair[0].last_begin.0 {
            return Err(format!("no order explains both: [{}] and [{}]", pair[0], pair[1]));
        }
    }
    for cluster in backward {
        // Forward zones are disjoint by now: only the last that begins before this one can enclose
        // it.
        let before = forward.partition_point(|zone| zone.first_end.0 < cluster.last_begin.0);
        let Some(zone) = before.checked_sub(1).map(|index| forward[index]) else { continue };
        if cluster.first_end.0 < zone.last_begin.0 {
            return Err(format!("no order explains both: [{zone}] and [{cluster}]"));
        }
    }
    Ok(())
}

fn build_clusters<'a>(operations: &[&'a Operation]) -> Result<Vec<ValueCluster<'a>>, String> {
    let mut clusters = BTreeMap::from([(UNWRITTEN, ValueCluster::new(None))]);
    for write in operations.iter().filter(|operation| operation.kind == OperationKind::Write) {
        if clusters.insert(write.value, ValueCluster::new(Some(write))).is_some() {
            return Err(format!("a test that writes one value twice proves nothing: {write}"));
        }
    }
    for read in operations.iter().filter(|operation| operation.kind == OperationKind::Read) {
        let cluster = clusters.get_mut(&read.value);
        cluster.ok_or_else(|| format!("a value that was never written: {read}"))?.add(read)?;
    }
    Ok(clusters.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers::SeededRng;

    fn operation(kind: OperationKind, value: u64, from: u64, to: Option<u64>) -> Operation {
        let at = Duration::from_millis;
        Operation { client: 1, lba: 7, kind, value, invoked_at: at(from), completed_at: to.map(at) }
    }

    fn write(value: u64, from: u64, to: u64) -> Operation {
        operation(OperationKind::Write, value, from, Some(to))
    }

    fn open_write(value: u64, from: u64) -> Operation {
        operation(OperationKind::Write, value, from, None)
    }

    fn read(value: u64, from: u64, to: u64) -> Operation {
        operation(OperationKind::Read, value, from, Some(to))
    }

    #[test]
    fn a_sequential_history_is_linearizable() {
        let history = [read(0, 1, 2), write(1, 3, 4), read(1, 5, 6), open_write(2, 7)];
        assert_eq!(
            check_history(&history),
            Ok(CheckSummary { blocks: 1, completed: 3, pending: 1 })
        );
    }

    #[test]
    fn a_lost_write_is_found() {
        assert!(check_history(&[write(1, 1, 2), read(0, 3, 4)]).is_err());
        assert!(check_history(&[write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)]).is_err());
    }

    #[test]
    fn overlapping_writes_may_end_either_way_but_only_one() {
        let both = [write(1, 1, 10), write(2, 2, 9)];
        assert!(check_history(&[&both[..], &[read(1, 11, 12)]].concat()).is_ok());
        assert!(check_history(&[&both[..], &[read(2, 11, 12)]].concat()).is_ok());
        assert!(check_history(&[&both[..], &[read(1, 11, 12), read(2, 13, 14)]].concat()).is_err());
    }

    #[test]
    fn a_read_never_returns_an_older_value_again() {
        let history = [write(1, 1, 2), write(2, 3, 10), read(2, 4, 5), read(1, 6, 7)];
        let why = check_history(&history).unwrap_err();
        assert!(why.starts_with("block 7: no order explains"), "{why}");
    }

    #[test]
    fn an_unanswered_write_may_take_effect_late_and_once() {
        let late = [open_write(1, 1), write(2, 2, 3), read(2, 4, 5), read(1, 6, 7)];
        assert!(check_history(&late).is_ok());
        assert!(check_history(&[&late[..], &[read(2, 8, 9)]].concat()).is_err());
        assert!(
            check_history(&[read(1, 1, 2), open_write(1, 3)]).is_err(),
            "seen before it was asked"
        );
    }

    #[test]
    fn an_unobserved_overwritten_write_still_needs_a_point_in_time() {
        let history = [write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)];
        assert!(check_history(&history).is_err());
        assert!(check_history(&[write(1, 1, 2), write(2, 3, 8), read(1, 5, 6)]).is_ok());
    }

    #[test]
    fn unwritten_and_repeated_values_are_reported() {
        assert!(check_history(&[read(9, 1, 2)]).unwrap_err().contains("never written"));
        assert!(check_history(&[write(1, 1, 2), write(1, 3, 4)]).unwrap_err().contains("twice"));
        assert!(
            check_history(&[operation(OperationKind::Read, 9, 1, None)]).is_ok(),
            "what it saw is unknown"
        );
    }

    #[test]
    fn blocks_are_independent() {
        let elsewhere = Operation { lba: 8, ..read(0, 3, 4) };
        assert!(check_history(&[write(1, 1, 2), elsewhere]).is_ok());
    }

    /// Tries every order: the definition itself. `value` is what the register holds after those
    /// that are `done`.
    fn some_order_explains(operations: &[Operation], done: u32, value: u64) -> bool {
        let waiting = |index: usize| done & 1 << index == 0;
        let required = |index: usize| operations[index].completed_at.is_some();
        if (0..operations.len()).all(|index| !waiting(index) || !required(index)) {
            return true;
        }
        (0..operations.len()).filter(|index| waiting(*index)).any(|index| {
            let next = &operations[index];
            let comes_too_early = (0..operations.len()).any(|other| {
                waiting(other)
                    && operations[other].completed_at.is_some_and(|end| end < next.invoked_at)
            });
            let after = match next.kind {
                OperationKind::Write => next.value,
                OperationKind::Read if next.value != value => return false,
                OperationKind::Read => value,
            };
            !comes_too_early && some_order_explains(operations, done | 1 << index, after)
        })
    }

    fn random_history(dice: &mut SeededRng) -> Vec<Operation> {
        let writes = 1 + dice.next_below(4);
        let mut history = Vec::new();
        for value in 1..=writes + dice.next_below(5) {
            let from = 1 + dice.next_below(20);
            let to = from + 1 + dice.next_below(8);
            history.push(match (value <= writes, dice.next_below(4)) {
                (true, 0) => open_write(value, from),
                (true, _) => write(value, from, to),
                (false, _) => read(dice.next_below(writes + 1), from, to),
            });
        }
        history
    }

    #[test]
    fn it_agrees_with_trying_every_order() {
        let mut dice = SeededRng::new(9);
        let (mut legal, mut illegal) = (0, 0);
        for _ in 0..20_000 {
            let history = random_history(&mut dice);
            let explained = some_order_explains(&history, 0, UNWRITTEN);
            assert_eq!(check_history(&history).is_ok(), explained, "{history:#?}");
            *if explained { &mut legal } else { &mut illegal } += 1;
        }
        assert!(legal > 2000 && illegal > 2000, "{legal} legal, {illegal} illegal");
    }
}
