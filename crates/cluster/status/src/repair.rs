//! Repair of volumes that have fewer replicas than wanted (RFD 0039): [`decision`] decides when and
//! how; why a repair waits, as text.

pub mod decision;

use api::NewBacking;
use peer::NodeId;
use records::record::VolumeRecord;

use self::decision::WaitReason;
use crate::old_images::overwrite_hint;
use crate::placement::{self, Candidate};
use crate::report::MissingReplica;

/// Combines the reasons why a missing replica has to wait. If no node can keep it (`no_node`), the
/// text must not say that it comes by itself.
pub fn combine_wait_reason(
    wait: &WaitReason,
    waiting: MissingReplica,
    no_node: Option<MissingReplica>,
) -> MissingReplica {
    match (wait, no_node) {
        (_, None) | (WaitReason::NoFreePlacement, _) => waiting,
        (WaitReason::NotDue(_) | WaitReason::ConcurrencyLimit, Some(no_node)) => no_node,
        (WaitReason::Disabled | WaitReason::Backoff { .. }, Some(no_node)) => {
            let why = match wait {
                WaitReason::Backoff { why, .. } => {
                    format!("a replacement could not be created ({why})")
                }
                _ => waiting.why,
            };
            let why = format!("{why}; {}", no_node.why);
            MissingReplica { why, next_step: no_node.next_step.or(waiting.next_step) }
        }
    }
}

/// The error when no node can keep the missing replica, and the next step.
pub fn no_node_for_repair(
    record: &VolumeRecord,
    backing: &NewBacking,
    candidates: &[Candidate],
) -> MissingReplica {
    let taken = placement_nodes(record);
    let add = "add a node (windrose cluster join), or free some space";
    let next = match overwrite_hint(record, backing, candidates, &taken, None) {
        Some(over) => format!("{over}; or {add}"),
        None => add.to_owned(),
    };
    MissingReplica { why: placement::no_candidate_text(candidates, &taken), next_step: Some(next) }
}

/// The nodes in a volume's placements.
pub fn placement_nodes(record: &VolumeRecord) -> Vec<NodeId> {
    record.placements.iter().map(|placement| placement.node).collect()
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// A finding must not say both that a repair starts by itself and that no node can take it.
    #[test]
    fn a_copy_that_no_node_can_keep_is_not_said_to_come_by_itself() {
        let record = records::samples::record("web");
        let (node, unfit) = (NodeId(3), Some("is a witness"));
        let (name, domain) = ("w".to_owned(), "w".to_owned());
        let witness = Candidate {
            node,
            name,
            failure_domain: domain,
            exclusion: unfit,
            free_bytes: 0,
            replicas: 0,
        };
        let nowhere = no_node_for_repair(&record, &NewBacking::default(), &[witness]);
        assert!(nowhere.next_step.as_ref().unwrap().contains("add a node"), "{nowhere:?}");
        let moment = decision::Timestamp { at: Instant::now(), wall_s: 1 };
        let waits =
            MissingReplica { why: "created automatically from then".to_owned(), next_step: None };
        let until = WaitReason::NotDue(moment);
        let told = |wait: &WaitReason, nowhere| combine_wait_reason(wait, waits.clone(), nowhere);
        assert_eq!(told(&until, None), waits);
        assert_eq!(told(&until, Some(nowhere.clone())), nowhere);
        let paused = WaitReason::Backoff { until: moment, why: "no space".to_owned() };
        let both = told(&paused, Some(nowhere.clone()));
        assert_eq!(
            both.why,
            "a replacement could not be created (no space); no other node can take a replica now \
             (w is a witness)"
        );
        assert_eq!(both.next_step, nowhere.next_step);
    }
}
