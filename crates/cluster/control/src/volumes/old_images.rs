//! Excludes nodes that still keep an image of a volume whose record no longer names it, unless an
//! administrator says `--force`.

use api::{AddReplicaRequest, ApiError, ErrorCode, NewBacking};
use peer::NodeId;
use records::record::VolumeRecord;
use status::old_images::{HAS_OLD_IMAGE, OldImages, overwrite_hint};
use status::placement::{self, Candidate};
use uuid::Uuid;

use super::VolumeControl;
use super::replicas::FreeByNode;

impl VolumeControl {
    /// The images of a volume that no record names, by the last reports.
    pub(super) async fn old_images(&self, volume: Option<Uuid>) -> OldImages {
        let Some(volume) = volume else { return OldImages::default() };
        let reports = self.reports().await.unwrap_or_default();
        let (me, own) = (self.this_node(), self.unserved_images());
        let reported = reports.iter().filter(|(node, _)| **node != me);
        let reported =
            reported.flat_map(|(node, report)| report.images.iter().map(|image| (*node, image)));
        OldImages::of_volume(volume, reported.chain(own.iter().map(|image| (me, image))))
    }

    /// Excludes nodes that hold an old image of the volume where the replica would be.
    pub(super) fn exclude_old_images(
        &self,
        candidates: &mut [Candidate],
        record: &VolumeRecord,
        backing: &NewBacking,
        old: &OldImages,
    ) {
        for candidate in candidates {
            let placement =
                self.new_placement(record.id, &record.name, candidate.node, backing, false);
            if placement
                .is_ok_and(|placement| old.has_at(candidate.node, &placement.backing, record.id))
            {
                candidate.exclusion = candidate.exclusion.or(Some(HAS_OLD_IMAGE));
            }
        }
    }

    /// Chooses the node for a replica that an administrator adds.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] says why no node can have it, with the command that overwrites an
    /// old image.
    pub(super) fn choose_node_for(
        &self,
        record: &VolumeRecord,
        request: &AddReplicaRequest,
        free: &FreeByNode,
        old: &OldImages,
    ) -> Result<NodeId, ApiError> {
        let mut candidates = self.candidates_for(&request.backing, free);
        if !request.force {
            self.exclude_old_images(&mut candidates, record, &request.backing, old);
        }
        let named = match &request.node {
            Some(name) => match candidates.iter().find(|c| c.name == *name) {
                Some(candidate) => vec![candidate.node],
                None => vec![self.node_by_name(name)?],
            },
            None => Vec::new(),
        };
        let taken: Vec<_> = record.placements.iter().map(|placement| placement.node).collect();
        let chosen = placement::choose_nodes(&candidates, &taken, &named, 1);
        let hint = || {
            let only = named.first().copied();
            overwrite_hint(record, &request.backing, &candidates, &taken, only)
                .unwrap_or_else(|| "`windrose cluster nodes` shows the nodes".to_owned())
        };
        chosen
            .map_err(|why| ApiError::new(ErrorCode::Conflict, why).with_hint(hint()))
            .map(|nodes| nodes.first().copied().unwrap_or_default())
    }
}
