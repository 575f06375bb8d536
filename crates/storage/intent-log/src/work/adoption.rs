//! Changes of the superblock: what the image adopts, and who has which slot.

use std::rc::Rc;

use block::{Epoch, Error};
use peer::{Lineage, SharedLineage};
use uuid::Uuid;

use super::super::{SLOTS, SUPERBLOCK_OFFSETS, Slot, SlotEntry, Superblock};
use super::Inner;
use super::pages::Pages;

/// Another image of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Other {
    /// Which.
    pub image: Uuid,
    /// Whether it holds nothing of the volume yet: all regions are marked for it.
    pub new: bool,
}

/// A configuration that an image adopts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adoption {
    /// Its epoch.
    pub epoch: u64,
    /// Its name; not nil.
    pub config: Uuid,
    /// The images of the other replicas.
    pub others: Vec<Other>,
    /// The images that are in sync in it beside this one, if this one is: with these it reaches the
    /// beginning of the epoch (RFD 0032).
    pub members: Vec<Uuid>,
    /// What was reached together with images by the one that has brought this one in sync, if this
    /// one is: it holds the same (RFD 0032, 3.5).
    pub inherited: Vec<(Uuid, Lineage)>,
    /// The nodes in sync, for messages.
    pub hint: [Option<Uuid>; 3],
    /// [`LogArea::boot`](disk::LogArea::boot), if the image is in sync in it: as long as it lasts, what the
    /// image is given is not lost with the power.
    pub boot: Option<Uuid>,
}

/// What an image records about lineages (RFD 0032).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advance {
    /// The lineage that it reaches.
    pub reached: Lineage,
    /// The images of those that it reaches this together with.
    pub together: Vec<Uuid>,
    /// The lineage under which marks for these images are about to be cleared here.
    pub cleared: Option<(Lineage, Vec<Uuid>)>,
}

/// What an image has adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The epoch.
    pub epoch: u64,
    /// The configuration's name.
    pub config: Uuid,
    /// The nodes that were in sync in it, for messages only.
    pub hint: [Option<Uuid>; 3],
}

/// Why a configuration is not adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// A later one was adopted before, or another one of that epoch.
    #[error("epoch {epoch} of configuration {config} was adopted before")]
    Outdated {
        /// The adopted epoch.
        epoch: u64,
        /// The adopted configuration.
        config: Uuid,
    },
    /// A log keeps marks for three other images.
    #[error("{0} other images are more than a log has slots for")]
    TooMany(usize),
    /// The image itself is among the others, or one is there twice, or a name is nil.
    #[error("a configuration whose {0} makes no sense")]
    Senseless(&'static str),
    /// The log is dead or closed.
    #[error("the intent log is gone")]
    Gone,
}

impl From<Error> for AdoptError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

/// The marks with which a slot begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    /// Those of all slots together.
    Union,
    /// All.
    All,
    /// Those that it has, and those of another slot.
    With(Slot),
}

/// The slots of a new superblock, and which of them begin anew.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Deal {
    slots: [Option<Uuid>; SLOTS],
    begin: Vec<(Slot, Beginning)>,
}

/// The slot that is taken last, and from which nothing is taken as long as it is free. Then it has what
/// any image lacks that has no slot: everything that changed since that went away, and what it lacked
/// when it went. Whoever has had the other slots meanwhile may have what that one lacks.
const LAST: Slot = Slot::ALL[SLOTS - 1];

/// Deals the slots of `old` to `others`.
fn deal(old: [Option<Uuid>; SLOTS], others: &[Other]) -> Deal {
    let stays = |image: &Uuid| others.iter().any(|other| other.image == *image);
    let mut deal = Deal { slots: old.map(|image| image.filter(stays)), begin: Vec::new() };
    let last_was_free = old[LAST.index()].is_none();
    let goes = |slot: &Slot| deal.slots[slot.index()] != old[slot.index()] && *slot != LAST;
    let gone: Vec<Slot> = Slot::ALL.into_iter().filter(goes).collect();
    for other in others {
        if deal.slots.contains(&Some(other.image)) {
            continue;
        }
        let Some(slot) = Slot::ALL.into_iter().find(|s| deal.slots[s.index()].is_none()) else {
            // There are no more images than slots: the caller has counted them.
            break;
        };
        deal.slots[slot.index()] = Some(other.image);
        // While no slot was free, marks that this image needs may have been taken from all of them.
        let union = last_was_free && !other.new;
        deal.begin.push((slot, if union { Beginning::Union } else { Beginning::All }));
    }
    match (last_was_free, deal.slots[LAST.index()]) {
        (_, Some(_)) => {}
        (false, None) => deal.begin.push((LAST, Beginning::All)),
        (true, None) => {
            // Before these slots begin anew.
            let kept = gone.into_iter().map(|slot| (LAST, Beginning::With(slot)));
            deal.begin.splice(0..0, kept);
        }
    }
    deal
}

impl SlotEntry {
    /// This slot when it is dealt to `image`, which is `new` or not.
    fn dealt(self, image: Option<Uuid>, new: bool) -> Self {
        if self.image == image {
            return Self { all_marked: false, ..self };
        }
        let forgotten = self.forgotten && !new;
        Self { image, all_marked: false, shared: SharedLineage::default(), forgotten }
    }

    fn reaches(&mut self, lineage: Lineage) {
        self.shared.reached = self.shared.reached.max(lineage);
        // From here on it is known again what the other may remember.
        self.forgotten = false;
    }
}

impl Superblock {
    /// As it is when the image has recorded that.
    fn advanced(mut self, next: &Advance) -> Self {
        self.lineage = self.lineage.max(next.reached);
        for slot in &mut self.slots {
            let is_in = |images: &[Uuid]| slot.image.is_some_and(|image| images.contains(&image));
            let cleared = next.cleared.as_ref().filter(|(_, images)| is_in(images));
            let cleared = cleared.map_or(slot.shared.cleared, |(lineage, _)| *lineage);
            let together = is_in(&next.together);
            slot.shared.cleared = slot.shared.cleared.max(cleared);
            if together {
                slot.reaches(next.reached);
            }
        }
        self
    }

    /// As it is when the image holds what one holds that has reached this with others.
    fn inheriting(mut self, inherited: &[(Uuid, Lineage)]) -> Self {
        for slot in &mut self.slots {
            let of_slot = inherited.iter().filter(|(image, _)| slot.image == Some(*image));
            let reached = of_slot.map(|(_, lineage)| *lineage).max().unwrap_or_default();
            slot.shared.reached = slot.shared.reached.max(reached);
        }
        self
    }

    /// What it says was adopted; `None` if nothing was yet, or nobody knows any more.
    pub(super) fn adopted(&self) -> Option<Adopted> {
        let Self { epoch, config, hint, .. } = *self;
        (!config.is_nil()).then_some(Adopted { epoch, config, hint })
    }

    /// Whether `next` may be adopted.
    fn check(&self, next: &Adoption) -> Result<(), AdoptError> {
        let images = next.others.iter().map(|other| other.image);
        let mut sorted: Vec<Uuid> = images.collect();
        sorted.sort_unstable();
        if sorted.len() > SLOTS {
            return Err(AdoptError::TooMany(sorted.len()));
        }
        if next.config.is_nil() {
            return Err(AdoptError::Senseless("name"));
        }
        let known = |image: &Uuid| image.is_nil() || *image == self.image;
        if sorted.iter().any(known) || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(AdoptError::Senseless("other images"));
        }
        let (epoch, config) = (self.epoch, self.config);
        let again = next.epoch == epoch && next.config == config;
        if self.adopted().is_some() && next.epoch <= epoch && !again {
            return Err(AdoptError::Outdated { epoch, config });
        }
        Ok(())
    }
}

impl Inner {
    /// Adopts a configuration, durably.
    pub(super) async fn adopt(self: Rc<Self>, next: Adoption) -> Result<(), AdoptError> {
        let _alone = self.changing.lock().await;
        self.check_open()?;
        let old = self.superblock.get();
        old.check(&next)?;
        let had = old.slots;
        let deal = deal(had.map(|slot| slot.image), &next.others);
        let changed = self.begin_slots(&deal);
        // The marks come first: a slot is nobody's until it has all that its image needs.
        self.persist(changed).await?;
        let Adoption { epoch, config, hint, .. } = next;
        let is_new = |image| next.others.iter().any(|o| Some(o.image) == image && o.new);
        let mut slots = had;
        for (slot, image) in slots.iter_mut().zip(deal.slots) {
            *slot = slot.dealt(image, is_new(image));
        }
        let old = self.superblock.get();
        let boot = next.boot.unwrap_or(old.boot);
        let mut new = Superblock { epoch, config, hint, slots, boot, ..old };
        if next.boot.is_some() {
            let reached = Lineage::first(Epoch(epoch));
            new = new.inheriting(&next.inherited);
            new = new.advanced(&Advance { reached, together: next.members, cleared: None });
        }
        self.replace(new, 0).await?;
        Ok(())
    }

    /// Records what is said about lineages, durably.
    pub(super) async fn advance(self: Rc<Self>, next: Advance) -> Result<(), Error> {
        let _alone = self.changing.lock().await;
        self.check_open()?;
        let old = self.superblock.get();
        let new = old.advanced(&next);
        if new != old {
            self.replace(new, 0).await?;
        }
        Ok(())
    }

    /// Gives slots that begin anew their marks; the pages that have to go out.
    fn begin_slots(&self, deal: &Deal) -> Pages {
        // From now on nothing is taken in the name of who goes.
        let mut superblock = self.superblock.get();
        for (entry, image) in superblock.slots.iter_mut().zip(deal.slots) {
            entry.image = entry.image.filter(|had| Some(*had) == image);
        }
        self.superblock.set(superblock);
        let mut changed = Pages::NONE;
        let book = &mut self.rounds.borrow_mut().book;
        for (slot, beginning) in &deal.begin {
            // From now on nothing is taken from it in the name of whoever had it.
            superblock.slots[slot.index()].image = None;
            changed = book.begin(*slot, |marks, slot| match beginning {
                Beginning::Union => marks.union_of_all(slot),
                Beginning::All => marks.set_all(slot),
                Beginning::With(other) => marks.union_of(slot, *other),
            });
        }
        changed
    }

    /// Makes `new` the superblock under the next generation, durably: copy number `first`, then the
    /// other. Who calls has `changing`, or the log for himself.
    pub(super) async fn replace(&self, new: Superblock, first: usize) -> Result<(), Error> {
        // A failure ends the log, so no generation is tried twice.
        let generation = self.superblock.get().generation + 1;
        let new = Superblock { generation, ..new };
        for copy in [first, 1 - first] {
            let bytes = new.to_bytes(u16::try_from(copy).expect("0 or 1"));
            let written = self.area.write(SUPERBLOCK_OFFSETS[copy], &bytes).await;
            let written = written.map_err(|e| self.failed(e));
            let durable = match written {
                Ok(()) => self.area.sync().await,
                failed => failed,
            };
            durable.inspect_err(|_| self.die())?;
        }
        self.superblock.set(new);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
