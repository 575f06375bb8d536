//! Exports volumes: hands the catalog of those that this node knows to the engine.

use records::catalog;
use records::record::image_description::{DescriptionSource, ImageDescription};
use records::record::{StoredVolumeRecord, VolumeRecord};
use uuid::Uuid;

use super::VolumeControl;

impl VolumeControl {
    /// Exports a volume by its current records. One catalog serves all volumes that wait for one.
    pub(super) async fn publish_volume(&self, stored: Option<&StoredVolumeRecord>) {
        let Some(StoredVolumeRecord { record, revision }) = stored else { return };
        self.update_peers(record).await;
        if record.preferred_primary.is_some_and(|node| node != self.this_node()) {
            self.rebalance_primaries().await;
        }
        // Before initiators log in: otherwise the reported capacity changes under them.
        self.publish_space_of(record.id).await;
        self.write_description(record).await;
        self.0.context.volumes.mark_peers_set(record.id, *revision);
        let mut generation = self.0.catalog_generation.lock().await;
        if !self.0.context.volumes.is_published(record.id) {
            *generation += 1;
            self.publish_catalog(*generation).await;
        }
    }

    /// Writes the description of the volume to the image here.
    async fn write_description(&self, record: &VolumeRecord) {
        let text = {
            let cluster = self.joined_cluster().map(|m| m.cluster);
            let source = DescriptionSource {
                node: self.this_node(),
                cluster,
                node_name: &|node| self.node_name(node),
            };
            ImageDescription::of(record, source).to_text()
        };
        if let Err(error) = self.0.context.engine.write_description(record.id, text).await {
            tracing::debug!(volume = %record.name, %error, "cannot update the description in the \
                image");
        }
    }

    /// Builds the catalog anew and exports it.
    pub(crate) async fn republish_catalog(&self) {
        let mut generation = self.0.catalog_generation.lock().await;
        *generation += 1;
        self.publish_catalog(*generation).await;
    }

    /// Tells initiators the state of a volume that is not open.
    pub(super) async fn publish_unavailable(&self, id: Uuid) {
        if !self.0.context.volumes.is_announced(id, self.this_node()) {
            let mut generation = self.0.catalog_generation.lock().await;
            if !self.0.context.volumes.is_announced(id, self.this_node()) {
                *generation += 1;
                self.publish_catalog(*generation).await;
            }
        }
    }

    async fn publish_catalog(&self, generation: u64) {
        let all = self.0.context.volumes.ready_volumes(self.this_node());
        let portals = &self.0.context.settings.portals;
        let listed = all.iter().map(|l| (&l.stored.record, l.local_state));
        let keyring = self.0.secrets.keys_to_open(all.iter().map(|l| &l.stored.record)).await;
        let mut catalog =
            catalog::build_catalog(listed, &keyring, &portals.iscsi, &portals.nvme, generation);
        catalog.redirect = self.0.context.settings.redirect;
        catalog.is_incomplete = !self.0.context.volumes.damaged_records().is_empty();
        if let Some(joined) = self.joined_cluster() {
            // The sender refuses requests that are older than a lease (RFD 0010, 4.6).
            let lease_ms = self.0.context.settings.cluster.lease.as_millis();
            catalog.quiesce_ms = u16::try_from(lease_ms).unwrap_or(u16::MAX);
            let mirrors = all.iter().map(|l| (&l.stored.record, l.mirror.as_ref().map(|m| &m.0)));
            let nodes = joined.nodes.borrow();
            catalog::add_cluster_paths(&mut catalog, joined.node, &nodes, mirrors);
        }
        let exported = all.iter().map(|l| &l.stored.record).filter(|r| r.protocols.vhost_user);
        let exported = exported.map(|r| (r.id, r.name.clone())).collect();
        self.0.context.engine.publish(catalog, exported).await;
        self.0.context.volumes.mark_published(&all);
    }
}
