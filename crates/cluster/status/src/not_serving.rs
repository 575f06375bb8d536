//! Why a replica does not serve, and the next step, as text.

use mirror::LegLoss;
use mirror::membership::{NotServingReason, RollbackWitness};
use peer::NodeId;
use uuid::Uuid;

use crate::WAIT_HINT;
use crate::report::MissingReplica;

/// Names of nodes and volumes.
pub trait NameLookup {
    /// The name of the node that reports.
    fn own_name(&self) -> String;
    /// The name of a node.
    fn name_of_node(&self, node: NodeId) -> String;
    /// The name of a volume.
    fn name_of_volume(&self, volume: Uuid) -> String;
    /// Why a replica that the volume lacks is not being made.
    fn missing_replica(&self, volume: Uuid) -> Option<MissingReplica>;
}

/// Why an open image is no longer used.
pub(crate) fn loss_text(loss: LegLoss) -> &'static str {
    match loss {
        LegLoss::DiskFailed => "its disk failed a flush, or is gone",
        LegLoss::DiskUnresponsive => "its disk does not respond",
    }
}

/// The next step for a volume that does not serve, at the node that gives the reason; `None` for a
/// lost image, which depends on the whole cluster.
pub(crate) fn next_step_hint(
    why: &NotServingReason,
    names: &impl NameLookup,
    volume: Uuid,
) -> Option<String> {
    let (me, name) = (names.own_name(), names.name_of_volume(volume));
    let start = |nodes: &[NodeId]| {
        let all: Vec<_> = nodes.iter().map(|n| names.name_of_node(*n)).collect();
        format!("start windrose on {}", all.join(", "))
    };
    let reach = |nodes: &[NodeId]| {
        let all: Vec<_> = nodes.iter().map(|n| names.name_of_node(*n)).collect();
        format!("check the network between {me} and {}", all.join(", "))
    };
    Some(match why {
        NotServingReason::ConfigUnread { store_unavailable: true } => format!(
            "check the network of {me}, and that a majority of the store's members runs: windrose \
             cluster nodes"
        ),
        NotServingReason::Refused(_) => "windrose cluster recover --dry-run".into(),
        NotServingReason::LegLost => return None,
        NotServingReason::AwaitingExclusion(node) => {
            format!("if this persists, run `windrose status` at {}", names.name_of_node(*node))
        }
        NotServingReason::AwaitingRestartedMembers(nodes) => format!(
            "{}; to give up the data that only they have: windrose volume force-primary {name}, at \
             {me}",
            start(nodes)
        ),
        NotServingReason::AwaitingConfigRead(nodes) | NotServingReason::LeasesExpired(nodes) => {
            reach(nodes)
        }
        NotServingReason::RolledBack { unheard, .. } if !unheard.is_empty() => start(unheard),
        NotServingReason::RolledBack { .. } => format!(
            "to give up the newer data: switch the other nodes off, then windrose volume \
             force-primary {name}, at {me}"
        ),
        NotServingReason::CollectingEntries(nodes) => format!("if this persists: {}", reach(nodes)),
        NotServingReason::OutOfSync(node) => {
            format!("if this persists, run `windrose status` at {}", names.name_of_node(*node))
        }
        NotServingReason::ConfigUnread { store_unavailable: false }
        | NotServingReason::LegFailed
        | NotServingReason::Leaving
        | NotServingReason::LeaseRevoked(_)
        | NotServingReason::TakeoverPending(_)
        | NotServingReason::Reconfiguring
        | NotServingReason::Draining
        | NotServingReason::Reconciling
        | NotServingReason::AwaitingPrimary(_)
        | NotServingReason::ExcludingMembers(_) => WAIT_HINT.into(),
    })
}

/// The reason as a sentence; `names` gives the names of nodes.
pub fn reason_text(why: &NotServingReason, names: &impl Fn(NodeId) -> String) -> String {
    let list = |nodes: &[NodeId]| nodes.iter().map(|n| names(*n)).collect::<Vec<_>>().join(", ");
    match why {
        NotServingReason::ConfigUnread { store_unavailable: true } => {
            "this node cannot reach the metadata store, which records which replica has the newest \
             data"
                .into()
        }
        NotServingReason::ConfigUnread { store_unavailable: false } => {
            "reading its configuration".into()
        }
        NotServingReason::Refused(refusal) => {
            format!("{refusal} (to choose the replica to keep: windrose cluster recover)")
        }
        NotServingReason::LegLost => {
            "its disk here failed a flush, is gone or does not respond: the open image is no \
             longer used"
                .into()
        }
        NotServingReason::LegFailed => "its disk here failed; another replica is about to take \
            over"
            .into(),
        NotServingReason::Leaving => "this replica is handing over to the others".into(),
        NotServingReason::LeaseRevoked(primary) => {
            format!("{} excludes this replica, which does not keep up", names(*primary))
        }
        NotServingReason::OutOfSync(primary) => {
            format!("this replica is not in sync; {} resyncs it", names(*primary))
        }
        NotServingReason::AwaitingExclusion(node) => {
            format!("the node restarted; {} must first exclude it", names(*node))
        }
        NotServingReason::AwaitingRestartedMembers(nodes) => format!(
            "all its nodes were down, and {} may have newer data: start {}, or give up that data \
             (windrose volume force-primary)",
            list(nodes),
            if nodes.len() == 1 { "it" } else { "them" },
        ),
        NotServingReason::AwaitingConfigRead(nodes) => format!(
            "all its nodes were down, and {} cannot read the volume's configuration: check there \
             whether the cluster's store responds",
            list(nodes)
        ),
        NotServingReason::RolledBack { witness: by, unheard } => set_back_text(*by, unheard, names),
        NotServingReason::TakeoverPending(node) => format!(
            "all its nodes were down; {} becomes \
            primary next",
            names(*node)
        ),
        NotServingReason::Reconfiguring => "a change of its configuration is in progress".into(),
        NotServingReason::Draining => "earlier requests are being completed".into(),
        NotServingReason::CollectingEntries(nodes) => {
            format!("it is being opened; waiting for {}", list(nodes))
        }
        NotServingReason::Reconciling => "it is being opened: reconciling the replicas".into(),
        NotServingReason::AwaitingPrimary(primary) => {
            format!("it is being opened by {}", names(*primary))
        }
        NotServingReason::ExcludingMembers(nodes) => {
            format!("{} not responding; it is served again when their leases expire", list(nodes))
        }
        NotServingReason::LeasesExpired(nodes) => {
            format!("{} not responding, and may be serving it: check the network", list(nodes))
        }
    }
}

/// The text for an image that was set back to an older state.
fn set_back_text(
    by: RollbackWitness,
    unheard: &[NodeId],
    names: &impl Fn(NodeId) -> String,
) -> String {
    let by = match by {
        RollbackWitness::Config => "the metadata store records a later state of it".into(),
        RollbackWitness::Node(node) => {
            format!("the replica on {} has seen a later state of it", names(node))
        }
    };
    let others: Vec<_> = unheard.iter().map(|node| names(*node)).collect();
    let start = match others.as_slice() {
        [] => "let a newer replica become primary".to_owned(),
        others => format!("start {}, which may have the newest data", others.join(", ")),
    };
    format!(
        "the replica here was rolled back to an earlier state (a virtual machine or a disk \
         restored from a backup or a snapshot): {by}. It does not become primary automatically: \
         {start}, or use this replica and give up the newer data (switch the other nodes off, then \
         windrose volume force-primary)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_that_helps_is_named() {
        let name = |node: NodeId| format!("n{node}");
        let two = NotServingReason::AwaitingRestartedMembers(vec![NodeId(2), NodeId(3)]);
        assert!(
            reason_text(&two, &name)
                .contains("start them, or give up that data (windrose volume force-primary)")
        );
        assert!(
            reason_text(&NotServingReason::OutOfSync(NodeId(2)), &name).contains("n2 resyncs it")
        );
        let silent = vec![NodeId(3)];
        let older = reason_text(
            &NotServingReason::RolledBack {
                witness: RollbackWitness::Node(NodeId(2)),
                unheard: silent,
            },
            &name,
        );
        assert!(
            older.contains("n2 has seen a later state") && older.contains("start n3"),
            "{older}"
        );
        let mute = reason_text(&NotServingReason::AwaitingConfigRead(vec![NodeId(3)]), &name);
        assert!(mute.contains("n3 cannot read the volume's configuration"), "{mute}");
        assert!(
            reason_text(&NotServingReason::LeasesExpired(vec![NodeId(3)]), &name)
                .contains("n3 not responding")
        );
    }
}
