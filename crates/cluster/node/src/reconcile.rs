//! What has to happen to a volume next, at this node: a pure function of what the store says and
//! what the node does. The control plane takes one step after another until there is nothing left
//! to do; after a crash it begins again from whatever is there (RFD 0012, 2.4).
//!
//! A node acts for its own copy alone. Nodes that want different things meet in the store, which
//! takes a change only if what it was decided from is still so.

use mirror::record::Record;
use peer::NodeId;

use crate::engine::Image;
use crate::meta::Revision;
use crate::record::{Creator, Place, PlaceStage, Stage, Stored, VolumeRecord};

/// What this node does with a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Observed {
    /// Nothing.
    #[default]
    Closed,
    /// It cannot open it. Tried again now and then, and when somebody asks.
    Broken {
        /// Why not.
        reason: String,
    },
    /// It serves it.
    Open {
        /// The core it lives on.
        core: usize,
        /// What its image is.
        image: Image,
        /// The records that initiators are served by.
        published: Option<Published>,
    },
    /// The backing is gone.
    Erased,
    /// The backing cannot be erased. Tried again when somebody asks.
    Stuck {
        /// Why not.
        reason: String,
    },
}

/// The commits of a volume's record and its mirror's that initiators are served by.
pub type Published = (Revision, Option<Revision>);

/// The mirror's record of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirroring<'a> {
    /// The node is in no cluster: volumes have none.
    Alone,
    /// The store has none yet.
    Absent,
    /// The store has this one.
    Has(&'a Record, Revision),
}

impl Mirroring<'_> {
    /// The commit that wrote it.
    #[must_use]
    pub fn revision(self) -> Option<Revision> {
        match self {
            Self::Has(_, revision) => Some(revision),
            Self::Alone | Self::Absent => None,
        }
    }
}

/// Who asks: a node, and what its process drew when it started.
pub type Me = Creator;

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Make the image, over what an earlier attempt has left.
    Make,
    /// Record that every copy is made: the volume exists.
    Finish,
    /// Record that it is not to be created after all.
    GiveUp,
    /// Find out what the image is.
    Look,
    /// Begin a mirror of this one copy.
    Mirror,
    /// Add this copy to the mirror; it holds nothing yet.
    Enlist,
    /// Ask the mirror to go on without this copy.
    Leave,
    /// Take this copy out of the mirror.
    Delist,
    /// Open it and have it served.
    Open,
    /// Serve it by the records as they are now.
    Publish,
    /// Record what the image is: it was grown before a crash.
    Adopt(Image),
    /// Stop serving it and close it.
    Close,
    /// Erase its backing.
    Erase,
    /// Remove this copy from the record.
    Vacate,
    /// Remove the record.
    Forget,
}

/// The next step of `me` for a volume whose records are `stored` and `mirror`.
#[must_use]
pub fn next_step(
    stored: Option<&Stored>,
    mirror: Mirroring<'_>,
    me: Me,
    observed: &Observed,
) -> Step {
    let open = matches!(observed, Observed::Open { .. });
    let Some(Stored { record, revision }) = stored else {
        return if open { Step::Close } else { Step::Rest };
    };
    let place = record.place(me.node);
    match record.stage {
        Stage::Deleting if record.places.is_empty() => Step::Forget,
        _ if place.is_none() && open => Step::Close,
        Stage::Creating => creating(record, place, me),
        Stage::Ready => place.map_or(Step::Rest, |place| {
            let at = (*revision, mirror.revision());
            // A mirror of several copies begins with the volume: one that is missing later is lost. One
            // copy may begin a mirror, if it holds the volume.
            let holds = record.places.len() == 1 && place.stage.is_kept();
            let lost = mirror == Mirroring::Absent && !holds;
            match observed {
                _ if lost => Step::Rest,
                // It was to be grown, and that has come to nothing: its image has the last word.
                Observed::Open { image, .. }
                    if mirror == Mirroring::Alone && image.size_bytes != record.size_bytes =>
                {
                    Step::Adopt(*image)
                }
                observed => ready(place, mirror, at, observed),
            }
        }),
        Stage::Deleting => place.map_or(Step::Rest, |place| vacating(place, observed)),
    }
}

/// A volume of which every copy is being made. Who creates it under another life has died since,
/// and nobody was told that the volume exists.
fn creating(record: &VolumeRecord, place: Option<&Place>, me: Me) -> Step {
    let abandoned = record.creator.is_none_or(|c| c.node == me.node && c.life != me.life);
    let failed = record.places.iter().any(|p| matches!(p.stage, PlaceStage::Failed { .. }));
    let mine = record.creator == Some(me);
    if abandoned || (mine && failed) {
        return Step::GiveUp;
    }
    match place.map(|p| &p.stage) {
        Some(PlaceStage::Wanted { .. }) => Step::Make,
        _ if mine && is_made(record) => Step::Finish,
        _ => Step::Rest,
    }
}

fn is_made(record: &VolumeRecord) -> bool {
    !record.places.is_empty() && record.places.iter().all(|p| p.stage == PlaceStage::Made)
}

/// A volume that exists.
fn ready(place: &Place, mirror: Mirroring<'_>, at: Published, observed: &Observed) -> Step {
    match &place.stage {
        PlaceStage::Wanted { .. } => making_room(place, mirror, observed).unwrap_or(Step::Make),
        PlaceStage::Made | PlaceStage::Superseded => serving(place, mirror, at, observed),
        PlaceStage::Leaving { instead_of: Some(heir) } if !is_in_sync(mirror, *heir) => {
            serving(place, mirror, at, observed)
        }
        PlaceStage::Leaving { .. } => {
            let listed = making_room(place, mirror, observed);
            listed.unwrap_or_else(|| vacating(place, observed))
        }
        PlaceStage::Failed { .. } => Step::Rest,
    }
}

fn is_in_sync(mirror: Mirroring<'_>, node: NodeId) -> bool {
    matches!(mirror, Mirroring::Has(record, _) if record.member(node).is_some())
}

fn serving(place: &Place, mirror: Mirroring<'_>, at: Published, observed: &Observed) -> Step {
    let listed = match mirror {
        Mirroring::Alone => true,
        Mirroring::Absent => false,
        Mirroring::Has(record, _) => {
            place.image.is_some() && record.image(place.node) == place.image
        }
    };
    match observed {
        Observed::Closed if listed => Step::Open,
        Observed::Closed if place.image.is_none() => Step::Look,
        Observed::Closed if mirror == Mirroring::Absent => Step::Mirror,
        Observed::Closed => Step::Enlist,
        Observed::Open { image, .. } if is_news(place, image) => Step::Adopt(*image),
        // Somebody else's image is in its place: it was replaced.
        Observed::Open { .. } if !listed => Step::Close,
        Observed::Open { published, .. } if *published != Some(at) => Step::Publish,
        _ => Step::Rest,
    }
}

/// What has to be done until the mirror does not know this node any more; `None` if that is so.
fn making_room(place: &Place, mirror: Mirroring<'_>, observed: &Observed) -> Option<Step> {
    let Mirroring::Has(record, _) = mirror else { return None };
    let node = place.node;
    let member = record.member(node).is_some();
    record.image(node)?;
    Some(match observed {
        Observed::Open { .. } if member => Step::Leave,
        // To leave in order, it has to be there. An image that is to be replaced is gone: the
        // others go on without it by themselves.
        Observed::Closed if member && !matches!(place.stage, PlaceStage::Wanted { .. }) => {
            Step::Open
        }
        _ if member => Step::Rest,
        Observed::Open { .. } => Step::Close,
        _ => Step::Delist,
    })
}

/// A copy that is to vanish and that no mirror knows, or whose volume is to vanish.
fn vacating(place: &Place, observed: &Observed) -> Step {
    match observed {
        Observed::Open { .. } => Step::Close,
        // What could not be made has left nothing.
        _ if matches!(place.stage, PlaceStage::Failed { .. }) => Step::Vacate,
        Observed::Closed | Observed::Broken { .. } => Step::Erase,
        Observed::Erased => Step::Vacate,
        Observed::Stuck { .. } => Step::Rest,
    }
}

/// Whether the record does not know the image as it was seen.
fn is_news(place: &Place, image: &Image) -> bool {
    image.generation > place.image_generation || place.image != Some(image.image)
}

#[cfg(test)]
mod tests;
