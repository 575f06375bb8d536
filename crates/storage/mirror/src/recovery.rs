//! Chooses the primary of a volume whose configuration is lost, and makes its new configuration:
//! pure functions of what the intent logs of its images tell (RFD 0036, 4).

use block::Epoch;
use peer::{Incarnation, NodeId};
use uuid::Uuid;

use super::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig};

/// How far above all known epochs the epoch of a recovered volume is: a replica not among the
/// candidates may have gone on.
const RECOVERY_EPOCH_GAP: u64 = 1000;

/// What an image last adopted, by the superblock of its intent log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryCandidate {
    /// The node that has the image now.
    pub node: NodeId,
    /// The adopted epoch; 0 if none, or if its log is lost.
    pub epoch: Epoch,
    /// The name of the adopted configuration.
    pub config_id: Uuid,
    /// The nodes in sync in that configuration, including its own; empty if it was not in sync
    /// itself.
    pub in_sync: Vec<NodeId>,
}

/// Chosen candidates, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrimaryChoice {
    /// Was in sync in the highest epoch in which any candidate was.
    pub primary: usize,
    /// Was not in sync, but knows of a later epoch: the members of that epoch are not among the
    /// candidates.
    pub newer_out_of_sync: Option<usize>,
}

/// Two candidates, by index, that were in sync in one epoch under different configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("copies {0} and {1} have different histories of one epoch")]
pub struct DivergentHistories(pub usize, pub usize);

/// Chooses the candidate that holds every write acknowledged in the highest epoch in which any was
/// in sync. `None` if none is known to have been in sync.
///
/// # Errors
/// [`DivergentHistories`]
pub fn choose_primary(
    candidates: &[RecoveryCandidate],
) -> Result<Option<PrimaryChoice>, DivergentHistories> {
    let in_sync = || (0..candidates.len()).filter(|n| !candidates[*n].in_sync.is_empty());
    let Some(top) = in_sync().map(|n| candidates[n].epoch).max() else { return Ok(None) };
    let mut newest = in_sync().filter(|n| candidates[*n].epoch == top);
    let Some(primary) = newest.clone().min_by_key(|n| candidates[*n].node) else { return Ok(None) };
    if let Some(other) = newest.find(|n| candidates[*n].config_id != candidates[primary].config_id)
    {
        return Err(DivergentHistories(primary, other));
    }
    let later = (0..candidates.len()).filter(|n| candidates[*n].epoch > top);
    Ok(Some(PrimaryChoice {
        primary,
        newer_out_of_sync: later.max_by_key(|n| candidates[*n].epoch),
    }))
}

/// The configuration with which a volume goes on: the replica on `primary` is in sync, and the
/// other `replicas` are resynced from it. `above` is the highest known epoch; the new epoch is
/// higher than any that other replicas may have adopted. State kept in memory only is gone.
/// `config_id` is a random number never used before.
#[must_use]
pub fn recovered_config(
    primary: NodeId,
    mut replicas: Vec<ConfigReplica>,
    above: Epoch,
    config_id: u128,
) -> MirrorConfig {
    let epoch = Epoch(if above == Epoch::default() { 1 } else { above.0 + RECOVERY_EPOCH_GAP });
    replicas.sort_by_key(|r| r.node);
    MirrorConfig {
        epoch,
        config_id,
        replicas,
        in_sync: vec![InSyncMember { node: primary, incarnation: Incarnation(0) }],
        primary,
        cold_start_epoch: epoch,
        history: CopyHistory { forced_epoch: epoch, ..CopyHistory::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adopted(node: u16, epoch: u64, in_sync: &[u16]) -> RecoveryCandidate {
        RecoveryCandidate {
            node: NodeId(node),
            epoch: Epoch(epoch),
            config_id: Uuid::from_u128(epoch.into()),
            in_sync: in_sync.iter().copied().map(NodeId).collect(),
        }
    }

    #[test]
    fn a_copy_in_sync_in_the_highest_epoch_becomes_primary() {
        let choose = |copies: &[RecoveryCandidate]| choose_primary(copies).unwrap();
        assert_eq!(choose(&[]), None);
        assert_eq!(choose(&[adopted(1, 7, &[]), adopted(2, 0, &[])]), None, "parts of it");
        let copies = [adopted(2, 7, &[1, 2]), adopted(1, 7, &[1, 2]), adopted(3, 6, &[1, 2, 3])];
        assert_eq!(choose(&copies), Some(PrimaryChoice { primary: 1, newer_out_of_sync: None }));
        let copies = [adopted(1, 6, &[1, 2]), adopted(2, 7, &[2]), adopted(3, 9, &[])];
        assert_eq!(choose(&copies), Some(PrimaryChoice { primary: 1, newer_out_of_sync: Some(2) }));
    }

    #[test]
    fn divergent_histories_of_one_epoch_are_refused() {
        let other = RecoveryCandidate { config_id: Uuid::from_u128(1), ..adopted(1, 7, &[1]) };
        let result = choose_primary(&[adopted(2, 7, &[2]), other]);
        assert_eq!(result, Err(DivergentHistories(1, 0)));
    }

    #[test]
    fn a_recovered_config_is_above_every_epoch_seen() {
        let replica = |n: u16| ConfigReplica {
            node: NodeId(n),
            image: Uuid::from_u128(n.into()),
            is_new: false,
        };
        let recovered = recovered_config(NodeId(2), vec![replica(2), replica(1)], Epoch(7), 5);
        assert_eq!((recovered.epoch, recovered.cold_start_epoch), (Epoch(1007), Epoch(1007)));
        assert_eq!(recovered.in_sync.len(), 1);
        assert_eq!(MirrorConfig::parse(&recovered.to_bytes()), Ok(recovered), "it is one");
        assert_eq!(recovered_config(NodeId(1), vec![replica(1)], Epoch(0), 5).epoch, Epoch(1));
    }
}
