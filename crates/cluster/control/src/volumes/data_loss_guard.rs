//! Guards the last replica of a volume's data: while no replica serves, none is destroyed unless
//! the request allows data loss. Which replica is the newest is unknown then, or whether another
//! one is usable.

use std::time::Duration;

use api::{ApiError, Backing, ErrorCode, VolumeName};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::VolumeControl;
use crate::errors::store_error;
use engine::ReportScope;
use records::reconcile::Observed;
use records::record::{PlacementStage, VolumeRecord, VolumeStage};
use status::report::served_by_reports;

/// How long to wait for a volume that is being opened.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for the report of a node.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the wait for a report checks; a report takes some milliseconds.
const ANSWER_POLL: Duration = Duration::from_millis(20);

/// How often the wait for an opening volume checks.
const OPEN_POLL: Duration = Duration::from_millis(100);

impl VolumeControl {
    /// Refuses to delete a volume that no replica serves, if that would erase data.
    pub(super) async fn check_delete(&self, record: &VolumeRecord) -> Result<(), ApiError> {
        if record.stage != VolumeStage::Ready || !self.has_data_to_erase(record).await {
            return Ok(());
        }
        if self.await_served(record).await? {
            return Ok(());
        }
        let name = &record.name;
        let replicas = self.replica_list_text(record);
        let message = format!(
            "no replica of volume {name} serves it: deleting it would erase the remaining data \
             unchecked ({replicas})"
        );
        let away = self.down_replica_node(record).is_some();
        let (force, flag) = if away { (" --force", "&force=true") } else { ("", "") };
        Err(ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
            "`windrose status` shows why, and `windrose cluster recover` what can be done; to \
             delete it with all its data: windrose volume delete {name} --discard{force} \
             (`discard=true{flag}`)"
        )))
    }

    /// A node that is down and keeps a replica of a volume, or is to erase one.
    pub(super) fn down_replica_node(&self, record: &VolumeRecord) -> Option<NodeId> {
        let joined = self.joined_cluster()?;
        let nodes = joined.nodes.borrow();
        let runs = |node: &NodeId| nodes.get(node).is_some_and(|view| view.is_alive);
        let mut others = record.placements.iter().map(|placement| placement.node);
        others.find(|node| *node != joined.node && !runs(node))
    }

    /// Refuses to drop a replica of a volume that no replica serves.
    pub(crate) async fn check_can_drop_replica(
        &self,
        record: &VolumeRecord,
        node: NodeId,
    ) -> Result<(), ApiError> {
        if self.await_served(record).await? {
            return Ok(());
        }
        Err(unserved_error(&record.name, &self.node_name(node)))
    }

    /// Whether some replica of a volume serves; waits briefly for one that is being opened.
    async fn await_served(&self, record: &VolumeRecord) -> Result<bool, ApiError> {
        let deadline = Instant::now() + OPEN_TIMEOUT;
        loop {
            if self.is_served(record).await? {
                return Ok(true);
            }
            if Instant::now() >= deadline || self.cannot_be_opened(record.id) {
                return Ok(false);
            }
            tokio::time::sleep(OPEN_POLL).await;
        }
    }

    /// Whether waiting is pointless: only this node has the volume, and it cannot open it.
    fn cannot_be_opened(&self, id: Uuid) -> bool {
        let observed = self.0.context.volumes.observed(id);
        self.joined_cluster().is_none() && !matches!(observed, Observed::Closed)
    }

    /// Whether some replica of a volume serves now, by fresh reports.
    pub(super) async fn is_served(&self, record: &VolumeRecord) -> Result<bool, ApiError> {
        let id = record.id;
        let Some(joined) = self.joined_cluster() else {
            return Ok(matches!(self.0.context.volumes.observed(id), Observed::Open { .. }));
        };
        let reports = self.0.context.engine.report(ReportScope::One(id)).await;
        let own = reports.iter().flat_map(|r| &r.volumes).find_map(|v| v.mirror.as_ref());
        if own.is_some_and(|mirror| mirror.status.not_serving.is_none()) {
            return Ok(true);
        }
        let others: Vec<_> = {
            let nodes = joined.nodes.borrow();
            let alive = |n: &NodeId| nodes.get(n).is_some_and(|view| view.is_alive);
            let holders = record.placements.iter().map(|p| p.node);
            holders.filter(|n| *n != joined.node && alive(n)).collect()
        };
        if others.is_empty() {
            return Ok(false);
        }
        let request = self.0.context.request_reports(&others).await.map_err(|e| store_error(&e))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let reports = self.reports().await.map_err(|e| store_error(&e))?;
            match served_by_reports(&reports, &others, id, request) {
                Some(served) => return Ok(served),
                None if Instant::now() >= deadline => return Ok(false),
                None => tokio::time::sleep(ANSWER_POLL).await,
            }
        }
    }

    /// Whether a deletion would erase data: a replica on another node, or an image here.
    async fn has_data_to_erase(&self, record: &VolumeRecord) -> bool {
        let made = |stage: &PlacementStage| !matches!(stage, PlacementStage::Failed { .. });
        let mut made = record.placements.iter().filter(|p| made(&p.stage));
        if made.clone().any(|p| p.node != self.this_node()) {
            return true;
        }
        let Some(here) = made.next() else { return false };
        match &here.backing {
            Backing::Pool { .. } => !self.0.pools.has_lost_pool(record),
            Backing::File { path } | Backing::Device { path } => {
                let path = path.clone();
                let exists = tokio::task::spawn_blocking(move || path.try_exists());
                // An image that cannot be examined counts as present.
                exists.await.ok().and_then(Result::ok).unwrap_or(true)
            }
        }
    }

    fn replica_list_text(&self, record: &VolumeRecord) -> String {
        let replica = |p: &records::record::ReplicaPlacement| {
            format!("{} on {}", p.backing, self.node_name(p.node))
        };
        record.placements.iter().map(replica).collect::<Vec<_>>().join(", ")
    }
}

fn unserved_error(name: &VolumeName, node: &str) -> ApiError {
    let message = format!(
        "no replica of volume {name} serves it: the one on {node} may be the newest, or the only \
         good one, and is kept"
    );
    ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
        "first make a replica serve: `windrose status` shows what it waits for, `windrose cluster \
         recover` recovers lost or outdated records, and `windrose volume force-primary {name}` \
         makes the replica of one node the primary"
    ))
}
