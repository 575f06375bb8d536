//! Which copy of a volume goes on when no record says so, and the record that it goes on with: pure
//! functions of what the intent logs of its images tell (RFD 0036, 4).

use block::Epoch;
use peer::{Incarnation, NodeId};
use uuid::Uuid;

use super::record::{History, Member, Record, Replica};

/// How far above all epochs that are known a recovered volume begins: a copy that is given up may
/// have gone on.
const EPOCHS_AHEAD: u64 = 1000;

/// What a copy has adopted last, as the superblock of its intent log tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The node that has the copy now.
    pub node: NodeId,
    /// The epoch; 0 if none, or if its log is lost.
    pub epoch: Epoch,
    /// The name of that epoch's configuration.
    pub config: Uuid,
    /// The nodes that were in sync in it, its own among them; empty if it was not in sync itself.
    pub in_sync: Vec<NodeId>,
}

/// Copies, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// It was in sync in the highest epoch in which any of the copies was.
    pub leads: usize,
    /// It was not in sync, and knows of a later epoch: what was in sync in that one is not among
    /// the copies.
    pub later: Option<usize>,
}

/// These two copies, by their numbers, were in sync in one epoch of different histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("copies {0} and {1} have different histories of one epoch")]
pub struct DifferentHistories(pub usize, pub usize);

/// The copy that holds every write that was acknowledged in the highest epoch in which any was in
/// sync. `None` if none of them is known to have been in sync.
///
/// # Errors
/// [`DifferentHistories`]
pub fn newest(copies: &[Adopted]) -> Result<Option<Newest>, DifferentHistories> {
    let sound = || (0..copies.len()).filter(|n| !copies[*n].in_sync.is_empty());
    let Some(top) = sound().map(|n| copies[n].epoch).max() else { return Ok(None) };
    let mut first = sound().filter(|n| copies[*n].epoch == top);
    let Some(leads) = first.clone().min_by_key(|n| copies[*n].node) else { return Ok(None) };
    if let Some(other) = first.find(|n| copies[*n].config != copies[leads].config) {
        return Err(DifferentHistories(leads, other));
    }
    let later = (0..copies.len()).filter(|n| copies[*n].epoch > top);
    Ok(Some(Newest { leads, later: later.max_by_key(|n| copies[*n].epoch) }))
}

/// The record of a volume that goes on with the copy on `lead`: that one is in sync, the other
/// `replicas` are brought in sync with it. It is above all that any of them, or others, may have
/// seen, where `above` is the highest epoch that is known, and all that lived in memory alone is
/// gone. `config` is a random number that was never used before.
#[must_use]
pub fn record(lead: NodeId, mut replicas: Vec<Replica>, above: Epoch, config: u128) -> Record {
    let epoch = Epoch(if above == Epoch::default() { 1 } else { above.0 + EPOCHS_AHEAD });
    replicas.sort_by_key(|r| r.node);
    Record {
        epoch,
        config,
        replicas,
        in_sync: vec![Member { node: lead, incarnation: Incarnation(0) }],
        primary: lead,
        born: epoch,
        history: History { forced: epoch, ..History::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adopted(node: u16, epoch: u64, in_sync: &[u16]) -> Adopted {
        Adopted {
            node: NodeId(node),
            epoch: Epoch(epoch),
            config: Uuid::from_u128(epoch.into()),
            in_sync: in_sync.iter().copied().map(NodeId).collect(),
        }
    }

    #[test]
    fn a_copy_that_was_in_sync_in_the_highest_epoch_leads() {
        let newest = |copies: &[Adopted]| newest(copies).unwrap();
        assert_eq!(newest(&[]), None);
        assert_eq!(newest(&[adopted(1, 7, &[]), adopted(2, 0, &[])]), None, "parts of it");
        let copies = [adopted(2, 7, &[1, 2]), adopted(1, 7, &[1, 2]), adopted(3, 6, &[1, 2, 3])];
        assert_eq!(newest(&copies), Some(Newest { leads: 1, later: None }));
        let copies = [adopted(1, 6, &[1, 2]), adopted(2, 7, &[2]), adopted(3, 9, &[])];
        assert_eq!(newest(&copies), Some(Newest { leads: 1, later: Some(2) }));
    }

    #[test]
    fn nothing_is_decided_between_two_histories_of_one_epoch() {
        let other = Adopted { config: Uuid::from_u128(1), ..adopted(1, 7, &[1]) };
        let told = newest(&[adopted(2, 7, &[2]), other]);
        assert_eq!(told, Err(DifferentHistories(1, 0)));
    }

    #[test]
    fn a_recovered_record_is_above_all_that_any_copy_has_seen() {
        let replica =
            |n: u16| Replica { node: NodeId(n), image: Uuid::from_u128(n.into()), new: false };
        let recovered = record(NodeId(2), vec![replica(2), replica(1)], Epoch(7), 5);
        assert_eq!((recovered.epoch, recovered.born), (Epoch(1007), Epoch(1007)));
        assert_eq!(recovered.in_sync.len(), 1);
        assert_eq!(Record::parse(&recovered.to_bytes()), Ok(recovered), "it is one");
        assert_eq!(record(NodeId(1), vec![replica(1)], Epoch(0), 5).epoch, Epoch(1));
    }
}
