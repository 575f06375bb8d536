//! What a node asks the others: how many initiators use a volume through them, now.
//!
//! A report is written when something has changed, so it does not tell how old it is. Who has to know
//! puts a question, `questions/ID`; the node looks then and says in its report which question it has
//! heard. What comes of it is as fresh as what a node knows of itself.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{ApiError, Code, VolumeName};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::report::{self, NodeReport};
use super::view::sessions;
use super::{Control, store_error};
use crate::engine::CoreReport;
use crate::meta::{Change, Expect, MetaError, Revision};
use crate::record::{PlaceStage, Stage, VolumeRecord};

/// Longest time that a node is given to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// How often is looked whether it has.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Pause before a store that does not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);

const ALL_THE_SAME: &str = "log out there first, or do it with --force (`force=true`)";

impl Control {
    /// Hears what this node is asked, for as long as it runs.
    pub(super) async fn hear_questions(self) {
        let key = report::question_key(self.me());
        let heard = |at: Revision| {
            self.0.asked.send_if_modified(|last| {
                let new = at.0 > *last;
                *last = at.0.max(*last);
                new
            });
        };
        loop {
            if let Ok((entries, revision)) = self.0.meta.list(&key).await {
                entries.iter().filter(|e| e.key == key).for_each(|e| heard(e.revision));
                let mut watch = self.0.meta.watch(&key, revision);
                while let Ok(event) = watch.next().await {
                    // Node 10's begins like node 1's.
                    if event.key == key {
                        heard(event.revision);
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// How many sessions of initiators the volumes have here.
    pub(super) fn session_counts(&self, cores: &[CoreReport]) -> BTreeMap<Uuid, u32> {
        let volumes = self.0.state.all();
        let ids: BTreeMap<_, _> =
            volumes.iter().map(|(s, _)| (&s.record.name, s.record.id)).collect();
        let mut counts = BTreeMap::new();
        for name in sessions(&volumes, cores).iter().flat_map(|s| &s.volumes) {
            if let Some(id) = ids.get(name) {
                *counts.entry(*id).or_default() += 1;
            }
        }
        counts
    }

    /// Refuses what nobody must do to a volume that initiators use, or may use, at other nodes.
    ///
    /// # Errors
    /// [`Code::InUse`] names the node; what the store says.
    pub(super) async fn check_unused_elsewhere(
        &self,
        id: Uuid,
        name: &VolumeName,
    ) -> Result<(), ApiError> {
        let Some(membership) = self.membership() else { return Ok(()) };
        // As it is now: a copy that was added just now counts.
        let stored = self.stored(id).await.map_err(|e| store_error(&e))?;
        let Some(stored) = stored else { return Ok(()) };
        let others = keepers(&stored.record, membership.node);
        let away = {
            let nodes = membership.nodes.borrow();
            let lives = |node: &NodeId| nodes.get(node).is_some_and(|view| view.alive);
            others.iter().find(|node| !lives(node)).copied()
        };
        if let Some(node) = away {
            // Else the next refusal would be that no copy serves.
            let is_served = self.is_served(&stored.record).await?;
            return Err(self.unknown(name, node, is_served));
        }
        if others.is_empty() {
            return Ok(());
        }
        let asked = self.ask(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            match usage(&reports, &others, id, asked) {
                Usage::None => return Ok(()),
                Usage::Some(node, sessions) => return Err(self.in_use(name, node, sessions)),
                Usage::Unknown(node) if Instant::now() >= deadline => {
                    return Err(self.unknown(name, node, true));
                }
                Usage::Unknown(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    /// Has nodes look and report; gives the commit that their reports have to name.
    pub(super) async fn ask(&self, nodes: &[NodeId]) -> Result<Revision, MetaError> {
        loop {
            let mut changes = Vec::new();
            for node in nodes {
                let key = report::question_key(*node);
                let held = self.0.meta.get(&key).await?;
                let expect = held.map_or(Expect::Absent, |e| Expect::At(e.revision));
                changes.push(Change { key, expect, value: Some(Vec::new()) });
            }
            match self.0.meta.commit(changes).await {
                // Somebody else asks at the same time.
                Err(MetaError::Changed { .. }) => {}
                asked => return asked,
            }
        }
    }

    fn in_use(&self, name: &VolumeName, node: NodeId, sessions: u32) -> ApiError {
        let node = self.node_name(node);
        let count = wire::count(sessions, "session");
        let message = format!("volume {name} is in use by {count} at node {node}");
        ApiError::new(Code::InUse, message).hint(ALL_THE_SAME)
    }

    fn unknown(&self, name: &VolumeName, node: NodeId, is_served: bool) -> ApiError {
        let node = self.node_name(node);
        let message = format!(
            "volume {name} may be in use at node {node}, which does not say: it does not run, or is cut off"
        );
        let hint = match is_served {
            true => {
                format!("bring node {node} back first, or do it with --force (`force=true`)")
            }
            false => format!(
                "bring node {node} back first; no copy that can be reached serves it: to lose what it holds: windrose volume \
                 delete {name} --discard --force"
            ),
        };
        ApiError::new(Code::InUse, message).hint(hint)
    }
}

/// The nodes but `me` through which initiators may use a volume.
fn keepers(record: &VolumeRecord, me: NodeId) -> Vec<NodeId> {
    // Nobody was told of a volume that is not ready, or has lost it already.
    let places = record.places.iter().filter(|_| record.stage == Stage::Ready);
    let open = places.filter(|p| p.node != me && !matches!(p.stage, PlaceStage::Failed { .. }));
    open.map(|p| p.node).collect()
}

/// Who uses a volume.
#[derive(Debug, PartialEq, Eq)]
enum Usage {
    /// Nobody.
    None,
    /// So many sessions at this node, and maybe others elsewhere.
    Some(NodeId, u32),
    /// This node has not answered yet, and the others tell of nobody.
    Unknown(NodeId),
}

/// What `reports` say to the question `asked`; what was said before it counts for nothing.
fn usage(
    reports: &BTreeMap<NodeId, NodeReport>,
    nodes: &[NodeId],
    volume: Uuid,
    asked: Revision,
) -> Usage {
    let answer = |node: &NodeId| reports.get(node).filter(|report| report.asked >= asked.0);
    let sessions = |node: &NodeId| answer(node)?.sessions.get(&volume).map(|n| (*node, *n));
    if let Some((node, count)) = nodes.iter().find_map(sessions) {
        return Usage::Some(node, count);
    }
    nodes.iter().find(|node| answer(node).is_none()).map_or(Usage::None, |n| Usage::Unknown(*n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{place, record};

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn what_was_said_before_the_question_is_no_answer() {
        let volume = Uuid::from_u128(7);
        let report = |asked, count: Option<u32>| NodeReport {
            asked,
            sessions: count.map(|n| (volume, n)).into_iter().collect(),
            ..NodeReport::default()
        };
        let look = |b, c| usage(&[(B, b), (C, c)].into(), &[B, C], volume, Revision(5));
        assert_eq!(look(report(5, None), report(6, None)), Usage::None);
        assert_eq!(look(report(5, None), report(4, None)), Usage::Unknown(C));
        assert_eq!(look(report(4, Some(1)), report(5, None)), Usage::Unknown(B));
        assert_eq!(look(report(4, None), report(5, Some(2))), Usage::Some(C, 2));
        assert_eq!(usage(&BTreeMap::new(), &[B], volume, Revision(5)), Usage::Unknown(B));
        assert_eq!(usage(&BTreeMap::new(), &[], volume, Revision(5)), Usage::None);
    }

    #[test]
    fn only_who_may_serve_a_volume_is_asked() {
        let mut volume = record("v");
        volume.stage = Stage::Ready;
        volume.places = vec![place(NodeId(1), "v"), place(B, "v"), place(C, "v")];
        assert_eq!(keepers(&volume, NodeId(1)), [B, C]);
        assert_eq!(keepers(&volume, NodeId(9)), [NodeId(1), B, C], "a witness was asked");
        volume.places[2].stage = PlaceStage::Failed { reason: "full".into() };
        assert_eq!(keepers(&volume, NodeId(1)), [B]);
        volume.stage = Stage::Deleting;
        assert_eq!(keepers(&volume, NodeId(1)), []);
    }
}
