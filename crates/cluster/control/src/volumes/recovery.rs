//! Recovers volumes from their images (RFD 0036, 5): those without a record, and those whose
//! records are older than their images.

use std::collections::BTreeMap;

use api::{ApiError, ErrorCode, PlannedVolume, RecoverClusterRequest, RecoveryPlan};
use cluster::store::StoreError;
use cluster::{mirror_records, nodes};
use mirror::config::ConfigReplica;
use records::record::StoredVolumeRecord;
use status::recovery_choice::{RecoveryChoice, ReplicaImage, choose_source, plan_volume};
use status::startup_wait::LOST_QUORUM_HINT;
use uuid::Uuid;

use super::VolumeControl;
use super::orphan_images::recovered_mirror_record;
use crate::errors::store_error;

impl VolumeControl {
    /// Recovers volumes without a record, and those whose records are older than their images.
    pub(crate) async fn recover_volumes(
        &self,
        request: &RecoverClusterRequest,
    ) -> Result<RecoveryPlan, ApiError> {
        if self.joined_cluster().is_some() {
            nodes::get_cluster(&*self.0.context.meta).await.map_err(|e| store_unreachable(&e))?;
        }
        let (replicas, silent) = self.collect_replica_images().await?;
        let mut by_volume = BTreeMap::<Uuid, Vec<(ReplicaImage, bool)>>::new();
        for (replica, listed) in replicas {
            by_volume.entry(replica.scan.volume).or_default().push((replica, listed));
        }
        let confirmed = request.confirm.is_some();
        let mut volumes = Vec::new();
        for (id, replicas) in by_volume {
            volumes.extend(self.recover_volume(id, replicas, &request.without, confirmed).await?);
        }
        let notes = silent.iter().map(|node| format!("node {node} did not report its images"));
        let notes: Vec<_> = notes.collect();
        volumes.iter_mut().for_each(|v| v.notes.extend(notes.iter().cloned()));
        if confirmed {
            self.scan_images(false).await;
        }
        Ok(RecoveryPlan {
            node: self.0.context.settings.name.clone(),
            store: None,
            volumes,
            unresponsive_nodes: silent,
            applied: confirmed,
        })
    }

    /// Recovers one volume, if necessary.
    async fn recover_volume(
        &self,
        id: Uuid,
        replicas: Vec<(ReplicaImage, bool)>,
        without: &[String],
        confirmed: bool,
    ) -> Result<Option<PlannedVolume>, ApiError> {
        let stored = self.read_volume_record(id).await.map_err(|e| store_error(&e))?;
        // For a volume with a record, only the replicas in the record count.
        let known = stored.is_some();
        let replicas: Vec<_> =
            replicas.into_iter().filter(|(_, listed)| *listed || !known).map(|(c, _)| c).collect();
        // A volume that a standalone node cannot open blocks nothing else.
        let alone = known && self.joined_cluster().is_none();
        if replicas.is_empty() || alone {
            return Ok(None);
        }
        if let Some(stored) = &stored
            && self.is_served(&stored.record).await?
        {
            return Ok(None);
        }
        let decided = choose_source(&replicas, without);
        let mut plan = plan_volume(&replicas, &decided);
        if let Some(stored) = &stored {
            plan.name = Some(stored.record.name.clone());
        }
        if let (true, Ok(choice)) = (confirmed, &decided)
            && let Err(why) = self.execute_plan(&plan, &replicas, choice, stored).await
        {
            plan.ambiguity = Some(why.message);
        }
        Ok(Some(plan))
    }

    async fn execute_plan(
        &self,
        plan: &PlannedVolume,
        replicas: &[ReplicaImage],
        choice: &RecoveryChoice,
        stored: Option<StoredVolumeRecord>,
    ) -> Result<(), ApiError> {
        match stored {
            Some(stored) => self.supersede_mirror_record(replicas, choice, stored).await?,
            None => {
                let name = plan.name.as_ref().ok_or_else(|| {
                    let image = replicas.first().map(|replica| replica.location.to_string()).unwrap_or_default();
                    let message = format!(
                        "its image does not contain its name: windrose volume adopt {image} --name NAME"
                    );
                    ApiError::new(ErrorCode::InvalidRequest, message)
                })?;
                self.adopt_volume(name, replicas, choice).await?;
            }
        }
        self.reconcile_volume(plan.volume).await;
        Ok(())
    }

    /// Replaces the mirror record by one above all epochs that the images know.
    async fn supersede_mirror_record(
        &self,
        replicas: &[ReplicaImage],
        choice: &RecoveryChoice,
        stored: StoredVolumeRecord,
    ) -> Result<(), ApiError> {
        let StoredVolumeRecord { mut record, revision } = stored;
        let current = mirror_records::get_record(&*self.0.context.meta, record.id)
            .await
            .map_err(|e| store_error(&e))?;
        let known = current.as_ref().map_or(0, |(mirror, _)| mirror.epoch.0);
        let above = replicas.iter().filter_map(|c| c.to_api().epoch).max().unwrap_or(0).max(known);
        let members: Vec<_> = std::iter::once(choice.source)
            .chain(choice.resync_targets.iter().copied())
            .map(|n| replicas[n].clone())
            .collect();
        let mut next = recovered_mirror_record(&members, above);
        for placement in &mut record.placements {
            if let Some(replica) = members.iter().find(|c| c.node == placement.node) {
                placement.image = Some(replica.scan.id);
                placement.image_generation = replica.scan.generation;
            } else if let (true, Some(image)) = (placement.stage.should_be_open(), placement.image)
            {
                // It is resynced when it returns.
                next.replicas.push(ConfigReplica { node: placement.node, image, is_new: false });
            }
        }
        next.replicas.sort_by_key(|r| r.node);
        let mut changes = record.replace_changes(revision);
        changes.push(match current {
            Some((_, at)) => mirror_records::replacement(record.id, at, &next),
            None => mirror_records::creation(record.id, &next),
        });
        self.0.context.meta.commit(changes).await.map_err(|e| store_error(&e))?;
        tracing::warn!(volume = %record.name, epoch = next.epoch.0, "mirror configuration replaced by an operator");
        Ok(())
    }
}

/// The error for a running member that does not reach the store. It creates no new one: a command
/// meant for volumes would otherwise create a second cluster during any short outage.
fn store_unreachable(error: &StoreError) -> ApiError {
    match error {
        StoreError::Unreachable { .. } => {
            let hint = format!(
                "nothing was changed; try again when the store responds; {LOST_QUORUM_HINT}"
            );
            ApiError::new(ErrorCode::Unavailable, error.to_string()).with_hint(hint)
        }
        error => store_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_runs_and_has_lost_its_store_is_told_to_restart_before_it_recovers() {
        let (store, why) = ("etcd".into(), "no leader".into());
        let refused = store_unreachable(&StoreError::Unreachable { store, why });
        let hint = refused.hint.unwrap_or_default();
        let restart = hint.find("systemctl restart windrose").unwrap();
        assert!(restart < hint.find("windrose cluster recover --dry-run").unwrap(), "{hint}");
        assert!(refused.message.contains("no leader"), "{}", refused.message);
    }
}
