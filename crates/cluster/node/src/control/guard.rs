//! What may be the last copy of a volume's data is not destroyed while no copy serves, unless whoever asks says that
//! it may be lost: nobody knows then which copy is the newest, or whether another one is any good.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{ApiError, Backing, Code, VolumeName};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::report::NodeReport;
use super::{Control, store_error};
use crate::engine::Scope;
use crate::meta::Revision;
use crate::reconcile::Observed;
use crate::record::{PlaceStage, Stage, VolumeRecord};

/// How long a volume that is being opened is waited for.
const OPENING: Duration = Duration::from_secs(5);

/// Longest time that a node is given to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often is looked whether it has: it does within some milliseconds.
const HEAR_AGAIN: Duration = Duration::from_millis(20);

/// How often is looked again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Control {
    /// Refuses to delete a volume that no copy serves, if something is there that would be erased.
    pub(super) async fn check_delete(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        if record.stage != Stage::Ready || !self.holds_something(record).await {
            return Ok(());
        }
        if self.await_served(record).await? {
            return Ok(());
        }
        let name = &record.name;
        let copies = self.copies_of(record);
        let message = format!(
            "no copy of volume {name} serves: deleting it would erase, unseen, what is left of it ({copies})"
        );
        let away = self.away_of(record).is_some();
        let (force, flag) = if away { (" --force", "&force=true") } else { ("", "") };
        Err(ApiError::new(Code::Conflict, message).hint(format!(
            "`windrose status` says why, and `windrose cluster recover` what can be done; to lose what it holds: windrose \
             volume delete {name} --discard{force} (`discard=true{flag}`)"
        )))
    }

    /// A node that keeps a copy of a volume, or is to erase one, and does not run.
    pub(super) fn away_of(&self, record: &VolumeRecord) -> Option<NodeId> {
        let membership = self.membership()?;
        let nodes = membership.nodes.borrow();
        let runs = |node: &NodeId| nodes.get(node).is_some_and(|view| view.alive);
        let mut others = record.places.iter().map(|place| place.node);
        others.find(|node| *node != membership.node && !runs(node))
    }

    /// Refuses to give up a copy of a volume that no copy serves.
    pub(super) async fn check_give_up(
        &self,
        record: &VolumeRecord,
        node: NodeId,
    ) -> Result<(), ApiError> {
        if self.await_served(record).await? {
            return Ok(());
        }
        Err(unserved(&record.name, &self.node_name(node)))
    }

    /// Whether some copy of a volume serves; one that is being opened is given a moment.
    async fn await_served(&self, record: &VolumeRecord) -> Result<bool, ApiError> {
        let deadline = Instant::now() + OPENING;
        loop {
            if self.is_served(record).await? {
                return Ok(true);
            }
            if Instant::now() >= deadline || self.is_broken(record.id) {
                return Ok(false);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Whether there is nothing to wait for: only this node has the volume, and cannot open it.
    fn is_broken(&self, id: Uuid) -> bool {
        let observed = self.0.state.observed(id);
        self.membership().is_none() && !matches!(observed, Observed::Closed)
    }

    /// Whether some copy of a volume serves now, as its nodes say when they are asked.
    pub(super) async fn is_served(&self, record: &VolumeRecord) -> Result<bool, ApiError> {
        let id = record.id;
        let Some(membership) = self.membership() else {
            return Ok(matches!(self.0.state.observed(id), Observed::Open { .. }));
        };
        let reports = self.0.engine.report(Scope::One(id)).await;
        let own = reports.iter().flat_map(|r| &r.volumes).find_map(|v| v.mirror.as_ref());
        if own.is_some_and(|mirror| mirror.status.why.is_none()) {
            return Ok(true);
        }
        let others: Vec<_> = {
            let nodes = membership.nodes.borrow();
            let alive = |n: &NodeId| nodes.get(n).is_some_and(|view| view.alive);
            let keepers = record.places.iter().map(|p| p.node);
            keepers.filter(|n| *n != membership.node && alive(n)).collect()
        };
        if others.is_empty() {
            return Ok(false);
        }
        let asked = self.ask(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            match served(&reports, &others, id, asked) {
                Some(served) => return Ok(served),
                None if Instant::now() >= deadline => return Ok(false),
                None => tokio::time::sleep(HEAR_AGAIN).await,
            }
        }
    }

    /// Whether a deletion would erase something: a copy on another node, or an image that is here.
    async fn holds_something(&self, record: &VolumeRecord) -> bool {
        let made = |stage: &PlaceStage| !matches!(stage, PlaceStage::Failed { .. });
        let mut made = record.places.iter().filter(|p| made(&p.stage));
        if made.clone().any(|p| p.node != self.me()) {
            return true;
        }
        let Some(here) = made.next() else { return false };
        match &here.backing {
            Backing::Pool { .. } => !self.lost_its_pool(record),
            Backing::File { path } | Backing::Device { path } => {
                let path = path.clone();
                let there = tokio::task::spawn_blocking(move || path.try_exists());
                // What cannot be looked at may be there.
                there.await.ok().and_then(Result::ok).unwrap_or(true)
            }
        }
    }

    fn copies_of(&self, record: &VolumeRecord) -> String {
        let copy =
            |p: &crate::record::Place| format!("{} on {}", p.backing, self.node_name(p.node));
        record.places.iter().map(copy).collect::<Vec<_>>().join(", ")
    }
}

/// What `reports` say to the question `asked`: whether one of these nodes serves the volume. `None` as long as a node
/// that might has not answered.
fn served(
    reports: &BTreeMap<NodeId, NodeReport>,
    nodes: &[NodeId],
    volume: Uuid,
    asked: Revision,
) -> Option<bool> {
    let answer = |node: &NodeId| reports.get(node).filter(|report| report.asked >= asked.0);
    let serves = |node: &NodeId| Some(answer(node)?.mirrors.get(&volume)?.serves);
    if nodes.iter().any(|node| serves(node) == Some(true)) {
        return Some(true);
    }
    nodes.iter().all(|node| answer(node).is_some()).then_some(false)
}

fn unserved(name: &VolumeName, node: &str) -> ApiError {
    let message = format!(
        "no copy of volume {name} serves: the one on {node} may be the newest, or the only good one, and is kept"
    );
    ApiError::new(Code::Conflict, message).hint(format!(
        "have a copy serve first: `windrose status` says what it waits for, `windrose cluster recover` decides where \
         records are lost or old, and `windrose volume force {name}` has the copy of a node go on alone"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::report::SeenMirror;
    use super::*;

    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn only_what_was_said_since_the_question_counts_as_served() {
        let volume = Uuid::from_u128(7);
        let report = |asked, serves: Option<bool>| NodeReport {
            asked,
            mirrors: serves
                .map(|serves| (volume, SeenMirror { serves, ..SeenMirror::default() }))
                .into_iter()
                .collect(),
            ..NodeReport::default()
        };
        let look = |b, c| served(&[(B, b), (C, c)].into(), &[B, C], volume, Revision(5));
        assert_eq!(look(report(5, Some(true)), report(4, None)), Some(true));
        assert_eq!(
            look(report(4, Some(true)), report(5, Some(false))),
            None,
            "B may serve no more"
        );
        assert_eq!(look(report(5, Some(false)), report(6, None)), Some(false));
        assert_eq!(served(&BTreeMap::new(), &[], volume, Revision(5)), Some(false));
    }
}
