//! Volumes in pools: they are retried when their pool is open, and adopted with an imported pool.

use std::future::Future;
use std::pin::Pin;
use std::sync::Weak;

use api::{AdoptImageRequest, ApiError, ImportPoolRequest, ImportedPool, PlannedVolume, PoolName};
use engine::ImageLocation;
use records::reconcile::Observed;

use super::{Inner, VolumeControl};
use crate::pools::PoolUser;

/// The volumes, as long as they exist.
pub(super) struct VolumesOfPools(pub(super) Weak<Inner>);

impl PoolUser for VolumesOfPools {
    fn pool_opened(&self, pool: PoolName) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let control = self.0.upgrade().map(VolumeControl);
        Box::pin(async move {
            if let Some(control) = control {
                control.retry_pool_volumes(&pool).await;
            }
        })
    }
}

impl VolumeControl {
    /// Imports a pool that this node does not know, and adopts its orphaned volumes.
    ///
    /// # Errors
    /// [`api::ErrorCode::NotFound`] without such a pool; [`api::ErrorCode::Conflict`] says why it
    /// cannot be opened: it is known from then on.
    pub async fn import_pool(&self, request: ImportPoolRequest) -> Result<ImportedPool, ApiError> {
        let control = self.clone();
        self.run_to_completion(async move {
            let name = control.0.pools.import_pool_now(request).await?;
            let volumes = control.adopt_pool_volumes(&name).await;
            Ok(ImportedPool { pool: control.0.pools.get_pool(&name).await?, volumes })
        })
        .await
    }

    /// Adopts the orphaned volumes of a pool; the result says why some are not adopted.
    async fn adopt_pool_volumes(&self, pool: &PoolName) -> Vec<PlannedVolume> {
        let unserved = self.scan_images(false).await;
        let mut volumes = Vec::new();
        for image in unserved.iter().filter(|h| !h.is_referenced) {
            match &image.location {
                ImageLocation::InPool(within, _) if within == pool => {}
                _ => continue,
            }
            let request = AdoptImageRequest {
                image: image.location.to_string(),
                name: None,
                without: Vec::new(),
                force: false,
                dry_run: false,
            };
            match self.adopt_image_now(request).await {
                Ok(adopted) => volumes.push(adopted.plan),
                Err(e) => volumes.push(self.not_adopted_plan(image, &e)),
            }
        }
        volumes
    }

    /// Retries the volumes that failed to open without their pool.
    async fn retry_pool_volumes(&self, name: &PoolName) {
        for (stored, observed) in self.0.context.volumes.all() {
            if !matches!(observed, Observed::OpenFailed { .. } | Observed::EraseFailed { .. })
                || self.0.pools.pool_name_of(&stored.record) != Some(name)
            {
                continue;
            }
            let id = stored.record.id;
            let lock = self.0.context.volumes.lock_of(id);
            let _held = lock.lock().await;
            self.0.context.volumes.clear_failure(id);
            self.reconcile_locked(id).await;
        }
    }
}
