//! Seals the secrets in the records anew (RFD 0016).

use std::sync::Arc;
use std::time::Duration;

use cluster::secrets::Keyring;
use cluster::store::StoreError;
use membership::secret_keys::SecretsError;
use records::record::StoredVolumeRecord;
use uuid::Uuid;

use super::VolumeControl;

/// How often the node looks for secrets to seal anew.
const RESEAL_INTERVAL: Duration = Duration::from_secs(30);

impl VolumeControl {
    /// Seals secrets that older versions stored in plain text or under an older key, for as long as
    /// the node serves.
    pub(crate) async fn reseal_periodically(self) {
        while self.is_serving() {
            if let Err(error) = self.reseal_all().await {
                tracing::warn!(%error, "cannot seal the secrets in the store yet; retrying");
            }
            tokio::time::sleep(RESEAL_INTERVAL).await;
        }
    }

    async fn reseal_all(&self) -> Result<(), SecretsError> {
        let all = self.0.context.volumes.all();
        if all.iter().all(|(s, _)| s.record.auth_methods().next().is_none()) {
            return Ok(());
        }
        let keyring = self.0.secrets.read_keys().await?;
        // Unreadable secrets are reported by the status, and are no reason to create a key.
        let stale = |(s, _): &(StoredVolumeRecord, _)| {
            s.record.needs_resealing(&keyring).then_some(s.record.id)
        };
        let stale: Vec<_> = all.iter().filter_map(stale).collect();
        if stale.is_empty() {
            return Ok(());
        }
        let keyring = self.0.secrets.try_sealing_keys().await?;
        for id in stale {
            let Ok(_change) = Arc::clone(&self.0.context.change_lock).try_read_owned() else {
                return Ok(());
            };
            self.reseal_volume(id, &keyring).await?;
        }
        Ok(())
    }

    async fn reseal_volume(&self, id: Uuid, keyring: &Keyring) -> Result<(), SecretsError> {
        let volume_lock = self.0.context.volumes.lock_of(id);
        let _held = volume_lock.lock().await;
        let Some(StoredVolumeRecord { mut record, revision }) = self.read_volume_record(id).await?
        else {
            return Ok(());
        };
        let before = record.clone();
        record.reseal_secrets(keyring)?;
        if record == before {
            return Ok(());
        }
        match self.0.context.meta.commit(record.replace_changes(revision)).await {
            Ok(_) => tracing::info!(volume = %record.name, "secrets sealed"),
            // Another node was faster.
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.reconcile_locked(id).await;
        Ok(())
    }
}
