//! What has to happen to a volume next: a pure function of what the store says and what the node
//! does. The control plane takes one step after another until there is nothing left to do; after
//! a crash it begins again from whatever is there.

use peer::NodeId;

use crate::engine::Image;
use crate::meta::Revision;
use crate::record::{Place, Stage, Stored};

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
        /// The record that initiators are served by.
        published: Option<Revision>,
    },
    /// The backing is gone.
    Erased,
    /// The backing cannot be erased. Tried again when somebody asks.
    Stuck {
        /// Why not.
        reason: String,
    },
}

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Open it and have it served.
    Open,
    /// Serve it by the record as it is now.
    Publish,
    /// Record what the image is: it was grown before a crash.
    Adopt(Image),
    /// Stop serving it and close it.
    Close,
    /// Erase its backing.
    Erase,
    /// Remove its record.
    Forget,
}

/// The next step for a volume whose record is `stored`.
///
/// Whoever creates a volume holds its gate until the record is ready: a record that is still
/// being created when somebody else gets here was left behind, and is taken back.
#[must_use]
pub fn next_step(stored: Option<&Stored>, me: NodeId, observed: &Observed) -> Step {
    let Some(Stored { record, revision }) = stored else {
        return match observed {
            Observed::Open { .. } => Step::Close,
            _ => Step::Rest,
        };
    };
    match (record.stage, observed) {
        (Stage::Ready, Observed::Closed) => Step::Open,
        (Stage::Ready, Observed::Open { image, .. })
            if record.place(me).is_some_and(|p| is_news(p, image)) =>
        {
            Step::Adopt(*image)
        }
        (Stage::Ready, Observed::Open { published, .. }) if *published != Some(*revision) => {
            Step::Publish
        }
        (Stage::Ready, _) => Step::Rest,
        (Stage::Creating | Stage::Deleting, Observed::Open { .. }) => Step::Close,
        (Stage::Creating | Stage::Deleting, Observed::Closed | Observed::Broken { .. }) => {
            Step::Erase
        }
        (Stage::Creating | Stage::Deleting, Observed::Erased) => Step::Forget,
        (Stage::Creating | Stage::Deleting, Observed::Stuck { .. }) => Step::Rest,
    }
}

/// Whether the record does not know the image as it was seen.
fn is_news(place: &Place, image: &Image) -> bool {
    image.generation > place.image_generation || place.image != Some(image.image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::FIRST_NODE;
    use crate::record::tests::record;

    /// A world in which steps work, until the budget of a crash is used up.
    struct World {
        stored: Option<Stored>,
        observed: Observed,
        image: Option<Image>,
    }

    impl World {
        fn take(&mut self, step: Step) {
            match step {
                Step::Rest => {}
                Step::Open => {
                    self.observed = match self.image {
                        Some(image) => Observed::Open { core: 0, image, published: None },
                        None => Observed::Broken { reason: "no file".into() },
                    }
                }
                Step::Publish => {
                    let at = self.stored.as_ref().map(|s| s.revision);
                    if let Observed::Open { published, .. } = &mut self.observed {
                        *published = at;
                    }
                }
                Step::Adopt(image) => {
                    let stored = self.stored.as_mut().unwrap();
                    stored.record.see(FIRST_NODE, image);
                    stored.revision.0 += 1;
                }
                Step::Close => self.observed = Observed::Closed,
                Step::Erase => {
                    self.image = None;
                    self.observed = Observed::Erased;
                }
                Step::Forget => {
                    self.stored = None;
                    self.observed = Observed::Closed;
                }
            }
        }

        fn settle(&mut self, steps: usize) -> usize {
            for taken in 0..steps {
                match next_step(self.stored.as_ref(), FIRST_NODE, &self.observed) {
                    Step::Rest => return taken,
                    step => self.take(step),
                }
            }
            steps
        }
    }

    /// From every stage and every state of the backing, with a crash after any number of steps,
    /// it ends where it should, and nothing of a deleted volume is left.
    #[test]
    fn it_converges_from_every_crash() {
        let record_of = record;
        let size_bytes = record("v").size_bytes;
        let place = record("v").places.remove(0);
        let image = place.image.unwrap();
        let same = Image { image, size_bytes, generation: place.image_generation };
        let grown = Image { size_bytes: 2 * size_bytes, generation: same.generation + 1, image };
        for stage in [Stage::Creating, Stage::Ready, Stage::Deleting] {
            for image in [None, Some(same), Some(grown)] {
                for crash_after in 0..6 {
                    let record = crate::record::VolumeRecord { stage, ..record_of("v") };
                    let stored = Some(Stored { record, revision: Revision(1) });
                    let mut world = World { stored, observed: Observed::Closed, image };
                    world.settle(crash_after);
                    world.observed = Observed::Closed;
                    assert!(world.settle(9) < 9, "{stage:?} {image:?} {crash_after}");
                    if stage == Stage::Ready {
                        let serves = matches!(world.observed, Observed::Open { .. });
                        assert_eq!(serves, image.is_some());
                        let record = &world.stored.as_ref().unwrap().record;
                        assert_eq!(record.size_bytes, image.unwrap_or(same).size_bytes);
                        assert_eq!(world.image, image, "data is never erased");
                    } else {
                        assert_eq!((world.stored, world.image), (None, None));
                    }
                }
            }
        }
    }

    #[test]
    fn a_volume_without_a_record_is_not_served() {
        let image = Image { image: uuid::Uuid::nil(), size_bytes: 1, generation: 2 };
        let open = Observed::Open { core: 0, image, published: None };
        assert_eq!(next_step(None, FIRST_NODE, &open), Step::Close);
        assert_eq!(next_step(None, FIRST_NODE, &Observed::Closed), Step::Rest);
    }
}
