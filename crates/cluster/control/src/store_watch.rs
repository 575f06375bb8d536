//! Follows the records in the store, and reconciles the volumes here with them.

use std::collections::BTreeMap;
use std::time::Duration;

use cluster::store::{Revision, StoreError};
use futures_util::StreamExt;
use uuid::Uuid;

use crate::volume_table::VolumeRecords;
use crate::{Control, store_audit};

/// How often volumes that failed to open are retried.
const FAILED_VOLUME_RETRY: Duration = Duration::from_secs(30);

/// How many volumes are reconciled at a time when all of them are.
const RECONCILE_CONCURRENCY: usize = 64;

impl Control {
    /// Reconciles every volume that the store or the node knows; returns the revision of the list
    /// that it began with.
    pub(crate) async fn reconcile_all(&self) -> Result<Revision, StoreError> {
        let (entries, revision) = self.0.context.meta.list("").await?;
        let store_audit::StoreAudit {
            volumes,
            mut mirrors,
            unreadable_mirrors: lost_mirrors,
            damaged,
        } = store_audit::audit(&entries);
        let mut listed = BTreeMap::new();
        volumes.iter().for_each(|stored| self.0.context.volumes.update_if_newer(stored.clone()));
        self.0.context.volumes.set_has_read_store();
        for stored in volumes {
            let id = stored.record.id;
            // A list may be outdated: volumes that are to be created or erased are read again.
            if stored.record.is_ready_on(self.0.context.this_node()) && !lost_mirrors.contains(&id)
            {
                let mirror = mirrors.remove(&id).filter(|_| self.joined_cluster().is_some());
                listed.insert(id, VolumeRecords { stored: Some(stored), mirror });
            }
        }
        let before = self.0.context.volumes.damaged_records();
        for damage in damaged.iter().filter(|damage| !before.contains(damage)) {
            tracing::error!(damage, "damaged record in the store; its object is not touched");
        }
        self.0.context.volumes.set_damaged_records(damaged);
        let known = self.0.context.volumes.ids().into_iter().map(|id| (id, listed.remove(&id)));
        let known: Vec<_> = known.collect();
        futures_util::stream::iter(known)
            .for_each_concurrent(RECONCILE_CONCURRENCY, |(id, records)| async move {
                match records {
                    Some(records) => self.0.volumes.reconcile_with(id, records).await,
                    None => self.0.volumes.reconcile_volume(id).await,
                }
            })
            .await;
        Ok(revision)
    }

    /// Follows changes of the records under `prefix`.
    pub(crate) async fn watch_records(
        self,
        prefix: &str,
        of: fn(&str) -> Option<Uuid>,
        mut from: Revision,
    ) {
        loop {
            let mut watch = self.0.context.meta.watch(prefix, from);
            loop {
                match watch.next_event().await {
                    Ok(event) => {
                        from = event.revision;
                        if let Some(id) = of(&event.key) {
                            self.0.context.volumes.notify_changed(id);
                            self.0.volumes.reconcile_in_background(id);
                        }
                    }
                    Err(StoreError::Compacted { .. }) => break,
                    Err(error) => {
                        tracing::debug!(%error, "store watch ended");
                        return;
                    }
                }
            }
            match self.reconcile_all().await {
                Ok(revision) => from = revision,
                Err(error) => {
                    tracing::error!(%error, "cannot list the store; retrying");
                    tokio::time::sleep(FAILED_VOLUME_RETRY).await;
                }
            }
        }
    }

    /// Retries volumes that failed to open, for as long as the node serves.
    pub(crate) async fn retry_failed_volumes(self) {
        loop {
            tokio::time::sleep(FAILED_VOLUME_RETRY).await;
            if !self.is_serving() {
                return;
            }
            if self.joined_cluster().is_some()
                && let Err(error) = self.reconcile_all().await
            {
                tracing::debug!(%error, "cannot list the store; retrying");
            }
            for id in self.0.context.volumes.failed_to_open() {
                let lock = self.0.context.volumes.lock_of(id);
                let _held = lock.lock().await;
                self.0.context.volumes.clear_failure(id);
                self.0.volumes.reconcile_locked(id).await;
            }
        }
    }
}
