//! Changes of the superblock: the adopted configuration, and the assignment of slots.

use std::rc::Rc;

use block::{Epoch, Error};
use peer::{DataGeneration, PeerGenerations};
use uuid::Uuid;

use super::super::{SLOTS, SUPERBLOCK_OFFSETS, Slot, SlotEntry, Superblock};
use super::LogShared;
use super::page_set::PageSet;

/// Another image of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherImage {
    /// Its id.
    pub image: Uuid,
    /// Whether it holds nothing of the volume yet: all regions are dirty for it.
    pub is_new: bool,
}

/// A configuration to be adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigAdoption {
    /// Its epoch.
    pub epoch: u64,
    /// Its id; not nil.
    pub config_id: Uuid,
    /// The images of the other replicas.
    pub other_images: Vec<OtherImage>,
    /// The other images in sync, if this one is in sync: together they reach the beginning of the
    /// epoch (RFD 0032).
    pub in_sync_images: Vec<Uuid>,
    /// If this image is in sync: the generations that its sync source has in common with other
    /// images; this image now holds the same (RFD 0032, 3.5).
    pub inherited_generations: Vec<(Uuid, DataGeneration)>,
    /// The nodes in sync, for messages.
    pub in_sync_hint: [Option<Uuid>; 3],
    /// [`LogArea::disk_session`](disk::LogArea::disk_session), if the image is in sync: while the
    /// session lasts, completed writes are not lost with the power.
    pub boot_id: Option<Uuid>,
}

/// Data generations to be recorded (RFD 0032).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationUpdate {
    /// The data generation that the image reaches.
    pub generation: DataGeneration,
    /// The images that reach it together with this one.
    pub shared_with: Vec<Uuid>,
    /// The data generation under which dirty bits for these images are about to be cleared here.
    pub cleared: Option<(DataGeneration, Vec<Uuid>)>,
}

/// A configuration that an image has adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdoptedConfig {
    /// The epoch.
    pub epoch: u64,
    /// The configuration's id.
    pub config_id: Uuid,
    /// The nodes that were in sync in it, for messages only.
    pub in_sync_hint: [Option<Uuid>; 3],
}

/// Why a configuration is not adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// A later one was adopted before, or another one of the same epoch.
    #[error("epoch {epoch} of configuration {config_id} was adopted before")]
    Outdated {
        /// The adopted epoch.
        epoch: u64,
        /// The adopted configuration.
        config_id: Uuid,
    },
    /// A log has slots for three other images only.
    #[error("{0} other images exceed the slots of a log")]
    TooManyImages(usize),
    /// The image itself is among the others, or an image is listed twice, or an id is nil.
    #[error("a configuration with an invalid {0}")]
    Invalid(&'static str),
    /// The log has failed or is closed.
    #[error("the intent log has failed or is closed")]
    Gone,
}

impl From<Error> for AdoptError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

/// The initial dirty bits of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitialBits {
    /// The union of all slots.
    UnionOfAll,
    /// All regions.
    AllDirty,
    /// Its own, and those of another slot.
    MergeFrom(Slot),
}

/// The slots of a new superblock, and which of them are initialized.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SlotAssignment {
    slots: [Option<Uuid>; SLOTS],
    initialize: Vec<(Slot, InitialBits)>,
}

/// The slot that is assigned last. While it is free, its bits are never cleared, so they cover what
/// any image without a slot lacks: all changes since that image left, and what it lacked then. The
/// other slots may have been reused and cleared since.
const OVERFLOW_SLOT: Slot = Slot::ALL[SLOTS - 1];

/// Assigns the slots of `old` to `others`.
fn assign_slots(old: [Option<Uuid>; SLOTS], others: &[OtherImage]) -> SlotAssignment {
    let is_kept = |image: &Uuid| others.iter().any(|other| other.image == *image);
    let mut assignment =
        SlotAssignment { slots: old.map(|image| image.filter(is_kept)), initialize: Vec::new() };
    let last_was_free = old[OVERFLOW_SLOT.index()].is_none();
    let is_freed =
        |slot: &Slot| assignment.slots[slot.index()] != old[slot.index()] && *slot != OVERFLOW_SLOT;
    let freed: Vec<Slot> = Slot::ALL.into_iter().filter(is_freed).collect();
    for other in others {
        if assignment.slots.contains(&Some(other.image)) {
            continue;
        }
        let Some(slot) = Slot::ALL.into_iter().find(|s| assignment.slots[s.index()].is_none())
        else {
            // There are no more images than slots, as the caller has checked.
            break;
        };
        assignment.slots[slot.index()] = Some(other.image);
        // If no slot was free, bits that this image needs may have been cleared in all of them.
        let union = last_was_free && !other.is_new;
        assignment
            .initialize
            .push((slot, if union { InitialBits::UnionOfAll } else { InitialBits::AllDirty }));
    }
    match (last_was_free, assignment.slots[OVERFLOW_SLOT.index()]) {
        (_, Some(_)) => {}
        (false, None) => assignment.initialize.push((OVERFLOW_SLOT, InitialBits::AllDirty)),
        (true, None) => {
            // Before these slots are initialized.
            let kept = freed.into_iter().map(|slot| (OVERFLOW_SLOT, InitialBits::MergeFrom(slot)));
            assignment.initialize.splice(0..0, kept);
        }
    }
    assignment
}

impl SlotEntry {
    /// This slot when it is assigned to `image`, which is `new` or not.
    fn assigned_to(self, image: Option<Uuid>, new: bool) -> Self {
        if self.image == image {
            return Self { is_all_dirty: false, ..self };
        }
        let history_lost = self.history_lost && !new;
        Self { image, is_all_dirty: false, generations: PeerGenerations::default(), history_lost }
    }

    fn reach(&mut self, generation: DataGeneration) {
        self.generations.common = self.generations.common.max(generation);
        // From here on it is known again what the other image may remember.
        self.history_lost = false;
    }
}

impl Superblock {
    /// The superblock after recording `next`.
    fn with_generation(mut self, next: &GenerationUpdate) -> Self {
        self.data_generation = self.data_generation.max(next.generation);
        for slot in &mut self.slots {
            let contains_image =
                |images: &[Uuid]| slot.image.is_some_and(|image| images.contains(&image));
            let cleared = next.cleared.as_ref().filter(|(_, images)| contains_image(images));
            let cleared =
                cleared.map_or(slot.generations.last_cleared, |(generation, _)| *generation);
            let is_shared = contains_image(&next.shared_with);
            slot.generations.last_cleared = slot.generations.last_cleared.max(cleared);
            if is_shared {
                slot.reach(next.generation);
            }
        }
        self
    }

    /// The superblock after the image got the data of one that has reached `inherited` with others.
    fn with_inherited(mut self, inherited: &[(Uuid, DataGeneration)]) -> Self {
        for slot in &mut self.slots {
            let of_slot = inherited.iter().filter(|(image, _)| slot.image == Some(*image));
            let common = of_slot.map(|(_, generation)| *generation).max().unwrap_or_default();
            slot.generations.common = slot.generations.common.max(common);
        }
        self
    }

    /// The adopted configuration; `None` if none yet, or if it is unknown.
    pub(super) fn adopted(&self) -> Option<AdoptedConfig> {
        let Self { adopted_epoch: epoch, config_id, in_sync_hint, .. } = *self;
        (!config_id.is_nil()).then_some(AdoptedConfig { epoch, config_id, in_sync_hint })
    }

    /// Checks whether `next` may be adopted.
    fn check_adoption(&self, next: &ConfigAdoption) -> Result<(), AdoptError> {
        let images = next.other_images.iter().map(|other| other.image);
        let mut sorted: Vec<Uuid> = images.collect();
        sorted.sort_unstable();
        if sorted.len() > SLOTS {
            return Err(AdoptError::TooManyImages(sorted.len()));
        }
        if next.config_id.is_nil() {
            return Err(AdoptError::Invalid("name"));
        }
        let is_invalid = |image: &Uuid| image.is_nil() || *image == self.image;
        if sorted.iter().any(is_invalid) || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(AdoptError::Invalid("other images"));
        }
        let (epoch, config_id) = (self.adopted_epoch, self.config_id);
        let is_same = next.epoch == epoch && next.config_id == config_id;
        if self.adopted().is_some() && next.epoch <= epoch && !is_same {
            return Err(AdoptError::Outdated { epoch, config_id });
        }
        Ok(())
    }
}

impl LogShared {
    /// Adopts a configuration, durably.
    pub(super) async fn adopt_config(
        self: Rc<Self>,
        next: ConfigAdoption,
    ) -> Result<(), AdoptError> {
        let _lock = self.superblock_lock.lock().await;
        self.check_open()?;
        let old = self.superblock.get();
        old.check_adoption(&next)?;
        let old_slots = old.slots;
        let assignment = assign_slots(old_slots.map(|slot| slot.image), &next.other_images);
        let changed = self.initialize_slots(&assignment);
        // Dirty bits first: a slot must not be assigned before it has all bits that its image
        // needs.
        self.persist(changed).await?;
        let ConfigAdoption { epoch, config_id, in_sync_hint, .. } = next;
        let is_new = |image| next.other_images.iter().any(|o| Some(o.image) == image && o.is_new);
        let mut slots = old_slots;
        for (slot, image) in slots.iter_mut().zip(assignment.slots) {
            *slot = slot.assigned_to(image, is_new(image));
        }
        let old = self.superblock.get();
        let boot = next.boot_id.unwrap_or(old.boot_id);
        let mut new = Superblock {
            adopted_epoch: epoch,
            config_id,
            in_sync_hint,
            slots,
            boot_id: boot,
            ..old
        };
        if next.boot_id.is_some() {
            let reached = DataGeneration::first(Epoch(epoch));
            new = new.with_inherited(&next.inherited_generations);
            new = new.with_generation(&GenerationUpdate {
                generation: reached,
                shared_with: next.in_sync_images,
                cleared: None,
            });
        }
        self.write_superblock(new, 0).await?;
        Ok(())
    }

    /// Records data generations, durably.
    pub(super) async fn record_generation(
        self: Rc<Self>,
        next: GenerationUpdate,
    ) -> Result<(), Error> {
        let _lock = self.superblock_lock.lock().await;
        self.check_open()?;
        let old = self.superblock.get();
        let new = old.with_generation(&next);
        if new != old {
            self.write_superblock(new, 0).await?;
        }
        Ok(())
    }

    /// Sets the initial dirty bits of slots; returns the pages to be written.
    fn initialize_slots(&self, assignment: &SlotAssignment) -> PageSet {
        // From now on nothing is cleared for images that lose their slots.
        let mut superblock = self.superblock.get();
        for (entry, image) in superblock.slots.iter_mut().zip(assignment.slots) {
            entry.image = entry.image.filter(|old| Some(*old) == image);
        }
        self.superblock.set(superblock);
        let mut changed = PageSet::NONE;
        let bitmap = &mut self.writer.borrow_mut().bitmap;
        for (slot, initial) in &assignment.initialize {
            // From now on nothing is cleared in it for its former image.
            superblock.slots[slot.index()].image = None;
            changed = bitmap.initialize_slot(*slot, |bitmaps, slot| match initial {
                InitialBits::UnionOfAll => bitmaps.union_of_all(slot),
                InitialBits::AllDirty => bitmaps.set_all(slot),
                InitialBits::MergeFrom(other) => bitmaps.union_of(slot, *other),
            });
        }
        changed
    }

    /// Makes `new` the superblock with the next generation, durably: copy number `first`, then the
    /// other. The caller holds `superblock_lock`, or owns the log alone.
    pub(super) async fn write_superblock(
        &self,
        new: Superblock,
        first: usize,
    ) -> Result<(), Error> {
        // A failure ends the log, so no generation is used twice.
        let generation = self.superblock.get().generation + 1;
        let new = Superblock { generation, ..new };
        for copy in [first, 1 - first] {
            let bytes = new.to_bytes(u16::try_from(copy).expect("0 or 1"));
            let written = self.area.write(SUPERBLOCK_OFFSETS[copy], &bytes).await;
            let written = written.map_err(|e| self.on_write_error(e));
            let durable = match written {
                Ok(()) => self.area.sync().await,
                failed => failed,
            };
            durable.inspect_err(|_| self.set_failed())?;
        }
        self.superblock.set(new);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
