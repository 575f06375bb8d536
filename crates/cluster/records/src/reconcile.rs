//! Decides what this node does next for a volume: a pure function of the records in the store and
//! the state observed here. The control plane takes one step after another until none is left;
//! after a crash it starts again from the state that it finds (RFD 0012, 2.4).
//!
//! A node acts only for its own replica. Conflicting decisions of nodes meet in the store, which
//! accepts a change only if the record it was decided from is unchanged.

use mirror::config::MirrorConfig;
use peer::NodeId;

use crate::record::ImageInfo;
use crate::record::{
    NodeProcess, PlacementStage, ReplicaPlacement, StoredVolumeRecord, VolumeRecord, VolumeStage,
};
use cluster::store::Revision;

/// The state of a volume on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Observed {
    /// Not open.
    #[default]
    Closed,
    /// Opening it failed. Retried from time to time and on request.
    OpenFailed {
        /// Why not.
        reason: String,
    },
    /// Open.
    Open {
        /// The core that serves it.
        core: usize,
        /// Its image.
        image: ImageInfo,
        /// The revisions of the records that initiators are served by.
        published: Option<PublishedRevisions>,
    },
    /// Its image was erased.
    Erased,
    /// Erasing its image failed. Retried on request.
    EraseFailed {
        /// Why not.
        reason: String,
    },
}

/// The revisions of a volume's record and its mirror configuration that initiators are served by.
pub type PublishedRevisions = (Revision, Option<Revision>);

/// The mirror configuration of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorState<'a> {
    /// A standalone node: volumes have none.
    Standalone,
    /// The store has none yet.
    Absent,
    /// The store has this one.
    Present(&'a MirrorConfig, Revision),
}

impl MirrorState<'_> {
    /// The revision that wrote it.
    #[must_use]
    pub fn revision(self) -> Option<Revision> {
        match self {
            Self::Present(_, revision) => Some(revision),
            Self::Standalone | Self::Absent => None,
        }
    }
}

/// This node, and the id that its process chose when it started.
pub type ThisProcess = NodeProcess;

/// The next step for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Idle,
    /// Create the image, over what an earlier attempt left.
    CreateImage,
    /// Record that all replicas exist, and thereby the volume.
    MarkReady,
    /// Record that the creation is abandoned.
    AbortCreation,
    /// Read what the image is.
    InspectImage,
    /// Create the mirror, with this replica only.
    CreateMirror,
    /// Add this replica, which is empty, to the mirror.
    AddToMirror,
    /// Hand the mirror over to the other replicas.
    LeaveMirror,
    /// Remove this replica from the mirror.
    RemoveFromMirror,
    /// Open and serve it.
    Open,
    /// Serve it by the current records.
    Publish,
    /// Record the image's size and generation: it was grown before a crash.
    RecordImage(ImageInfo),
    /// Stop serving it and close it.
    Close,
    /// Erase its image.
    Erase,
    /// Remove this replica from the record.
    RemovePlacement,
    /// Remove the record.
    RemoveRecord,
}

/// The next step of `me` for a volume with the records `stored` and `mirror`.
#[must_use]
pub fn next_step(
    stored: Option<&StoredVolumeRecord>,
    mirror: MirrorState<'_>,
    me: ThisProcess,
    observed: &Observed,
) -> Step {
    let open = matches!(observed, Observed::Open { .. });
    let Some(StoredVolumeRecord { record, revision }) = stored else {
        return if open { Step::Close } else { Step::Idle };
    };
    let placement = record.placement(me.node);
    match record.stage {
        VolumeStage::Deleting if record.placements.is_empty() => Step::RemoveRecord,
        _ if placement.is_none() && open => Step::Close,
        VolumeStage::Creating => creation_step(record, placement, me),
        VolumeStage::Ready => placement.map_or(Step::Idle, |placement| {
            let at = (*revision, mirror.revision());
            // The mirror of several replicas is created with the volume: if it is missing later, it
            // was lost. A single replica that holds the volume may create a mirror.
            let holds_volume = record.placements.len() == 1 && placement.stage.should_be_open();
            let lost = mirror == MirrorState::Absent && !holds_volume;
            match observed {
                _ if lost => Step::Idle,
                // A grow changed the image but not the record: the image decides.
                Observed::Open { image, .. }
                    if mirror == MirrorState::Standalone
                        && image.size_bytes != record.size_bytes =>
                {
                    Step::RecordImage(*image)
                }
                observed => ready_step(placement, mirror, at, observed),
            }
        }),
        VolumeStage::Deleting => {
            placement.map_or(Step::Idle, |placement| removal_step(placement, observed))
        }
    }
}

/// The step for a volume that is being created. If another process of this node was its creator,
/// that process has ended without acknowledging the volume.
fn creation_step(
    record: &VolumeRecord,
    placement: Option<&ReplicaPlacement>,
    me: ThisProcess,
) -> Step {
    let abandoned = record.creator.is_none_or(|c| c.node == me.node && c.process != me.process);
    let failed = record.placements.iter().any(|p| matches!(p.stage, PlacementStage::Failed { .. }));
    let mine = record.creator == Some(me);
    if abandoned || (mine && failed) {
        return Step::AbortCreation;
    }
    match placement.map(|p| &p.stage) {
        Some(PlacementStage::Creating { .. }) => Step::CreateImage,
        _ if mine && all_placements_ready(record) => Step::MarkReady,
        _ => Step::Idle,
    }
}

fn all_placements_ready(record: &VolumeRecord) -> bool {
    !record.placements.is_empty()
        && record.placements.iter().all(|p| p.stage == PlacementStage::Ready)
}

/// The step for a volume that exists.
fn ready_step(
    placement: &ReplicaPlacement,
    mirror: MirrorState<'_>,
    at: PublishedRevisions,
    observed: &Observed,
) -> Step {
    match &placement.stage {
        PlacementStage::Creating { .. } => {
            mirror_removal_step(placement, mirror, observed).unwrap_or(Step::CreateImage)
        }
        PlacementStage::Ready | PlacementStage::Superseded => {
            serving_step(placement, mirror, at, observed)
        }
        PlacementStage::Removing { replaced_by: Some(successor) }
            if !is_in_sync(mirror, *successor) =>
        {
            serving_step(placement, mirror, at, observed)
        }
        PlacementStage::Removing { .. } => {
            let listed = mirror_removal_step(placement, mirror, observed);
            listed.unwrap_or_else(|| removal_step(placement, observed))
        }
        PlacementStage::Failed { .. } => Step::Idle,
    }
}

fn is_in_sync(mirror: MirrorState<'_>, node: NodeId) -> bool {
    matches!(mirror, MirrorState::Present(record, _) if record.member(node).is_some())
}

fn serving_step(
    placement: &ReplicaPlacement,
    mirror: MirrorState<'_>,
    at: PublishedRevisions,
    observed: &Observed,
) -> Step {
    let listed = match mirror {
        MirrorState::Standalone => true,
        MirrorState::Absent => false,
        MirrorState::Present(record, _) => {
            placement.image.is_some() && record.image(placement.node) == placement.image
        }
    };
    match observed {
        Observed::Closed if listed => Step::Open,
        Observed::Closed if placement.image.is_none() => Step::InspectImage,
        Observed::Closed if mirror == MirrorState::Absent => Step::CreateMirror,
        Observed::Closed => Step::AddToMirror,
        Observed::Open { image, .. } if image_changed(placement, image) => {
            Step::RecordImage(*image)
        }
        // The mirror lists another image here: this one was replaced.
        Observed::Open { .. } if !listed => Step::Close,
        Observed::Open { published, .. } if *published != Some(at) => Step::Publish,
        _ => Step::Idle,
    }
}

/// The step towards a mirror that does not list this node; `None` once that is so.
fn mirror_removal_step(
    placement: &ReplicaPlacement,
    mirror: MirrorState<'_>,
    observed: &Observed,
) -> Option<Step> {
    let MirrorState::Present(record, _) = mirror else { return None };
    let node = placement.node;
    let member = record.member(node).is_some();
    record.image(node)?;
    Some(match observed {
        Observed::Open { .. } if member => Step::LeaveMirror,
        // A replica must be open to leave in order. An image that is to be replaced is gone: the
        // other replicas exclude it themselves.
        Observed::Closed
            if member && !matches!(placement.stage, PlacementStage::Creating { .. }) =>
        {
            Step::Open
        }
        _ if member => Step::Idle,
        Observed::Open { .. } => Step::Close,
        _ => Step::RemoveFromMirror,
    })
}

/// The step for a replica that is being removed and no mirror lists, or whose volume is being
/// deleted.
fn removal_step(placement: &ReplicaPlacement, observed: &Observed) -> Step {
    match observed {
        Observed::Open { .. } => Step::Close,
        // A failed creation left no image.
        _ if matches!(placement.stage, PlacementStage::Failed { .. }) => Step::RemovePlacement,
        Observed::Closed | Observed::OpenFailed { .. } => Step::Erase,
        Observed::Erased => Step::RemovePlacement,
        Observed::EraseFailed { .. } => Step::Idle,
    }
}

/// Whether the image differs from what the record says of it.
fn image_changed(placement: &ReplicaPlacement, image: &ImageInfo) -> bool {
    image.generation > placement.image_generation || placement.image != Some(image.id)
}

#[cfg(test)]
mod tests;
