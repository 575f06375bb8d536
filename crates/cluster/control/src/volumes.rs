//! Volumes and their replicas: what administrators do with them, and the steps that make the engine
//! equal to their records.
//!
//! * `lifecycle`, `edit`, `target_mapping`, `reservations` and `replicas` change volumes; `usage`
//!   and `data_loss_guard` refuse changes that would interrupt clients or lose data; `info` shows
//!   volumes.
//! * `reconciler` takes the steps that the records ask for, one volume at a time; `publishing`
//!   exports the result, `peers` connects replicas.
//! * `repair`, `primaries`, `reopening`, `resealing` and `space` are periodic tasks of volumes.
//! * `orphan_images`, `old_images`, `recovery` and `pool_volumes` find images without a record, and
//!   make volumes of them.

mod data_loss_guard;
mod edit;
mod info;
mod lifecycle;
mod old_images;
mod orphan_images;
mod peers;
mod pool_volumes;
mod primaries;
mod publishing;
pub(crate) mod reconciler;
mod recovery;
pub(crate) mod reopening;
pub(crate) mod repair;
mod replicas;
mod resealing;
mod reservations;
pub(crate) mod space;
mod target_mapping;
mod usage;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use api::{ApiError, VolumeName};
use cluster::store::StoreError;
use engine::joined_cluster::JoinedCluster;
use orphan_images::UnservedImages;
use peer::NodeId;
use pool_volumes::VolumesOfPools;
use records::record::StoredVolumeRecord;
use status::report::NodeReport;
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::context::Context;
use crate::pools::PoolControl;
use crate::secrets::SecretControl;

/// The volumes of this node and their replicas. Cheap to clone.
#[derive(Clone)]
pub struct VolumeControl(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    pools: PoolControl,
    secrets: Arc<SecretControl>,
    /// Held while the catalog is built and handed to the cores; counts the catalogs.
    catalog_generation: Mutex<u64>,
    /// Images on this node that are not served.
    unserved_images: std::sync::Mutex<UnservedImages>,
}

impl std::fmt::Debug for VolumeControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeControl").finish_non_exhaustive()
    }
}

impl VolumeControl {
    /// The volumes of a node, and the pools that hold some of them. No volume is opened until it is
    /// reconciled.
    pub(crate) fn new(context: Arc<Context>, secrets: Arc<SecretControl>) -> Self {
        Self(Arc::new_cyclic(|inner: &Weak<Inner>| Inner {
            pools: PoolControl::new(
                Arc::clone(&context),
                Box::new(VolumesOfPools(Weak::clone(inner))),
            ),
            context,
            secrets,
            catalog_generation: Mutex::new(0),
            unserved_images: std::sync::Mutex::default(),
        }))
    }

    /// The pools of disks, which hold some of the volumes.
    pub(crate) fn pools(&self) -> &PoolControl {
        &self.0.pools
    }
}

/// Short cuts to the context.
impl VolumeControl {
    fn joined_cluster(&self) -> Option<&JoinedCluster> {
        self.0.context.joined_cluster()
    }

    fn is_serving(&self) -> bool {
        self.0.context.is_serving()
    }

    fn this_node(&self) -> NodeId {
        self.0.context.this_node()
    }

    fn is_data_node(&self) -> bool {
        self.0.context.is_data_node()
    }

    fn node_name(&self, node: NodeId) -> String {
        self.0.context.node_name(node)
    }

    fn volume_id(&self, name: &VolumeName) -> Result<Uuid, ApiError> {
        self.0.context.volume_id(name)
    }

    async fn read_volume_record(&self, id: Uuid) -> Result<Option<StoredVolumeRecord>, StoreError> {
        self.0.context.read_volume_record(id).await
    }

    async fn reports(&self) -> Result<BTreeMap<NodeId, NodeReport>, StoreError> {
        self.0.context.reports().await
    }

    async fn run_to_completion<T, F>(&self, change: F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>> + Send + 'static,
        T: Send + 'static,
    {
        self.0.context.run_to_completion(change).await
    }
}
