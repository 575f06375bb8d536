//! Why a copy does not serve, in words that name who or what helps.

use std::sync::PoisonError;

use mirror::Loss;
use mirror::member::{SetBack, Why};
use peer::NodeId;
use uuid::Uuid;

use super::report::MissingCopy;

/// What nodes and volumes are called.
pub(super) trait Names {
    /// The node that says it.
    fn me(&self) -> String;
    /// A node.
    fn node(&self, node: NodeId) -> String;
    /// A volume.
    fn volume(&self, volume: Uuid) -> String;
    /// What becomes of a copy that a volume lacks.
    fn missing(&self, volume: Uuid) -> Option<MissingCopy>;
}

impl Names for super::Control {
    fn me(&self) -> String {
        self.0.settings.name.clone()
    }

    fn node(&self, node: NodeId) -> String {
        self.node_name(node)
    }

    fn volume(&self, volume: Uuid) -> String {
        self.volume_name(volume)
    }

    fn missing(&self, volume: Uuid) -> Option<MissingCopy> {
        let missing = self.0.missing.lock().unwrap_or_else(PoisonError::into_inner);
        missing.get(&volume).cloned()
    }
}

/// What ends by itself needs no step.
pub(super) const BY_ITSELF: &str = "wait: this ends by itself";

/// Why an image is used no more as it is open.
pub(super) fn loss(loss: Loss) -> &'static str {
    match loss {
        Loss::Failed => "its disk has failed a flush, or is gone",
        Loss::Silent => "its disk has not answered",
    }
}

/// The next step for a volume that does not serve at the node that says why; `None` for a lost image, of which the
/// whole cluster decides.
pub(super) fn next_step(why: &Why, names: &impl Names, volume: Uuid) -> Option<String> {
    let (me, name) = (names.me(), names.volume(volume));
    let start = |nodes: &[NodeId]| {
        let all: Vec<_> = nodes.iter().map(|n| names.node(*n)).collect();
        format!("start windrose on {}", all.join(", "))
    };
    let reach = |nodes: &[NodeId]| {
        let all: Vec<_> = nodes.iter().map(|n| names.node(*n)).collect();
        format!("look at the network between {me} and {}", all.join(", "))
    };
    Some(match why {
        Why::Unread { away: true } => format!(
            "look at the network of {me}, and see that a majority of the store's members runs: windrose cluster nodes"
        ),
        Why::Refused(_) => "windrose cluster recover --plan".into(),
        Why::LegDead => return None,
        Why::Returned(node) => {
            format!("if this stays, see what `windrose status` says at {}", names.node(*node))
        }
        Why::Blackout(nodes) => format!(
            "{}; only to lose what they alone hold: windrose volume force {name}, at {me}",
            start(nodes)
        ),
        Why::Mute(nodes) | Why::Lease(nodes) => reach(nodes),
        Why::SetBack { silent, .. } if !silent.is_empty() => start(silent),
        Why::SetBack { .. } => format!(
            "only to lose what is newer: switch the other nodes off, then windrose volume force {name}, at {me}"
        ),
        Why::Gathering(nodes) => format!("if this stays: {}", reach(nodes)),
        Why::Outside(node) => {
            format!("if this stays, see what `windrose status` says at {}", names.node(*node))
        }
        Why::Unread { away: false }
        | Why::LegFailed
        | Why::Leaving
        | Why::Yielded(_)
        | Why::Leads(_)
        | Why::Changing
        | Why::Draining
        | Why::Settling
        | Why::Open(_)
        | Why::Deciding(_) => BY_ITSELF.into(),
    })
}

/// The reason as a sentence; `names` tells what a node is called.
pub(super) fn sentence(why: &Why, names: &impl Fn(NodeId) -> String) -> String {
    let list = |nodes: &[NodeId]| nodes.iter().map(|n| names(*n)).collect::<Vec<_>>().join(", ");
    match why {
        Why::Unread { away: true } => {
            "this node cannot reach the metadata store, and without it does not know who has the newest data"
                .into()
        }
        Why::Unread { away: false } => "its record is being read".into(),
        Why::Refused(refusal) => {
            format!("{refusal} Which copy goes on: windrose cluster recover")
        }
        Why::LegDead => {
            "its disk has failed a flush here, is gone or has not answered: the image is used no more as it is open"
                .into()
        }
        Why::LegFailed => "its disk has failed here, and the others are about to go on".into(),
        Why::Leaving => "this copy is leaving it to the others".into(),
        Why::Yielded(primary) => {
            format!("{} goes on without this copy, which does not keep up", names(*primary))
        }
        Why::Outside(primary) => {
            format!("this copy is not in sync; {} brings it in sync", names(*primary))
        }
        Why::Returned(node) => {
            format!("the node was restarted; {} has to go on without it first", names(*node))
        }
        Why::Blackout(nodes) => format!(
            "all its nodes were down, and {} may have newer data: start {}, or lose that \
             (windrose volume force)",
            list(nodes),
            if nodes.len() == 1 { "it" } else { "them" },
        ),
        Why::Mute(nodes) => format!(
            "all its nodes were down, and {} cannot read the volume's record: see there whether the \
             cluster's store answers",
            list(nodes)
        ),
        Why::SetBack { by, silent } => set_back(*by, silent, names),
        Why::Leads(node) => format!("all its nodes were down; {} leads next", names(*node)),
        Why::Changing => "a change of its record is not answered yet".into(),
        Why::Draining => "what was begun before is being ended".into(),
        Why::Gathering(nodes) => format!("it is being opened; {} have yet to come", list(nodes)),
        Why::Settling => "it is being opened: copies are made equal".into(),
        Why::Open(primary) => format!("it is being opened by {}", names(*primary)),
        Why::Deciding(nodes) => {
            format!("{} cannot be heard; it goes on as soon as their leases are over", list(nodes))
        }
        Why::Lease(nodes) => {
            format!("{} cannot be heard, and may be serving it: look at the network", list(nodes))
        }
    }
}

/// The copy is older than it was.
fn set_back(by: SetBack, silent: &[NodeId], names: &impl Fn(NodeId) -> String) -> String {
    let by = match by {
        SetBack::Record => "the cluster's record knows a later state of it".into(),
        SetBack::Node(node) => format!("the copy on {} knows a later state of it", names(node)),
    };
    let others: Vec<_> = silent.iter().map(|node| names(*node)).collect();
    let start = match others.as_slice() {
        [] => "let a newer copy lead".to_owned(),
        others => format!("start {}, which may have the newest data", others.join(", ")),
    };
    format!(
        "the copy here was set back to an earlier state, as when a virtual machine or a disk is restored from a \
         backup or a snapshot: {by}. It does not lead by itself: {start}, or go on with this copy and lose what \
         is newer (switch the other nodes off, then windrose volume force)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_that_helps_is_named() {
        let name = |node: NodeId| format!("n{node}");
        let two = Why::Blackout(vec![NodeId(2), NodeId(3)]);
        assert!(sentence(&two, &name).contains("start them, or lose that (windrose volume force)"));
        assert!(sentence(&Why::Outside(NodeId(2)), &name).contains("n2 brings it in sync"));
        let silent = vec![NodeId(3)];
        let older = sentence(&Why::SetBack { by: SetBack::Node(NodeId(2)), silent }, &name);
        assert!(older.contains("n2 knows a later state") && older.contains("start n3"), "{older}");
        let mute = sentence(&Why::Mute(vec![NodeId(3)]), &name);
        assert!(mute.contains("n3 cannot read the volume's record"), "{mute}");
        assert!(sentence(&Why::Lease(vec![NodeId(3)]), &name).contains("n3 cannot be heard"));
    }
}
