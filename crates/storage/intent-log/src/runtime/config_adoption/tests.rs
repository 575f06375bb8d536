use super::*;
use crate::{LogId, LogState};

const fn image(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

const A: Option<Uuid> = Some(image(1));
const B: Option<Uuid> = Some(image(2));
const C: Option<Uuid> = Some(image(3));

fn others(known: &[u128], new: &[u128]) -> Vec<OtherImage> {
    let other = |new| move |n: &u128| OtherImage { image: image(*n), is_new: new };
    known.iter().map(other(false)).chain(new.iter().map(other(true))).collect()
}

fn superblock(epoch: u64, config: u128) -> Superblock {
    Superblock {
        state: LogState::Active,
        generation: 1,
        log_id: LogId(1),
        image: image(9),
        region_shift: 16,
        cells: 1,
        adopted_epoch: epoch,
        config_id: Uuid::from_u128(config),
        boot_id: Uuid::nil(),
        in_use: true,
        data_generation: DataGeneration::default(),
        slots: [SlotEntry::default(); SLOTS],
        in_sync_hint: [None; 3],
    }
}

fn adoption(epoch: u64, config_id: u128, others: Vec<OtherImage>) -> ConfigAdoption {
    let (config_id, in_sync, in_sync_hint) = (Uuid::from_u128(config_id), Vec::new(), [None; 3]);
    let inherited = Vec::new();
    ConfigAdoption {
        epoch,
        config_id,
        other_images: others,
        in_sync_images: in_sync,
        inherited_generations: inherited,
        in_sync_hint,
        boot_id: None,
    }
}

#[test]
fn images_keep_their_slots_and_new_ones_take_the_first_free() {
    let initial_bits = |initial: &[(usize, InitialBits)]| -> Vec<(Slot, InitialBits)> {
        initial.iter().map(|(slot, bits)| (Slot::ALL[*slot], *bits)).collect()
    };
    let from = |slot: usize| (2, InitialBits::MergeFrom(Slot::ALL[slot]));
    let (all, union) =
        (|slot| (slot, InitialBits::AllDirty), |slot| (slot, InitialBits::UnionOfAll));
    let four = Some(image(4));
    let cases: &[(_, _, _, &[(usize, InitialBits)])] = &[
        ([None; 3], others(&[1], &[2]), [A, B, None], &[union(0), all(1)]),
        ([A, B, None], others(&[2, 1], &[]), [A, B, None], &[]),
        // What an image lacked when it left is kept in the last slot for its return.
        ([A, B, None], others(&[2], &[]), [None, B, None], &[from(0)]),
        ([A, B, None], others(&[3, 2], &[]), [C, B, None], &[from(0), union(0)]),
        ([A, B, None], others(&[1, 2, 3], &[]), [A, B, C], &[union(2)]),
        // While no slot was free, bits that the fourth image needs may have been cleared in all.
        ([A, B, C], others(&[1, 4, 3], &[]), [A, four, C], &[all(1)]),
        // From now on the last slot is for all images that left.
        ([A, B, C], others(&[1, 2], &[]), [A, B, None], &[all(2)]),
        ([A, B, C], vec![], [None; 3], &[all(2)]),
        ([A, B, C], others(&[4, 1], &[]), [A, four, None], &[all(1), all(2)]),
    ];
    for (old, others, slots, initial) in cases {
        let assigned = assign_slots(*old, others);
        assert_eq!(
            assigned,
            SlotAssignment { slots: *slots, initialize: initial_bits(initial) },
            "{old:?}, {others:?}"
        );
    }
}

#[test]
fn epochs_only_increase() {
    let adopted = superblock(5, 50);
    let outdated = Err(AdoptError::Outdated { epoch: 5, config_id: Uuid::from_u128(50) });
    assert_eq!(adopted.check_adoption(&adoption(6, 60, vec![])), Ok(()));
    assert_eq!(adopted.check_adoption(&adoption(5, 50, vec![])), Ok(()), "once more");
    assert_eq!(adopted.check_adoption(&adoption(5, 51, vec![])), outdated);
    assert_eq!(adopted.check_adoption(&adoption(4, 50, vec![])), outdated);
    assert_eq!(superblock(0, 0).check_adoption(&adoption(0, 1, vec![])), Ok(()), "the first");
}

#[test]
fn senseless_configurations_are_refused() {
    let refused = |others| superblock(1, 1).check_adoption(&adoption(2, 2, others));
    let senseless = Err(AdoptError::Invalid("other images"));
    assert_eq!(refused(others(&[1, 2, 3, 4], &[])), Err(AdoptError::TooManyImages(4)));
    assert_eq!(refused(others(&[1, 9], &[])), senseless, "the image itself");
    assert_eq!(refused(others(&[1, 2], &[1])), senseless, "one twice");
    assert_eq!(refused(others(&[0], &[])), senseless, "nil");
    let nameless = superblock(1, 1).check_adoption(&adoption(2, 0, vec![]));
    assert_eq!(nameless, Err(AdoptError::Invalid("name")));
}

fn at(epoch: u64, count: u32) -> DataGeneration {
    DataGeneration { epoch: Epoch(epoch), count }
}

#[test]
fn generations_only_increase_and_only_for_named_images() {
    let mut old = superblock(5, 50);
    old.slots[0].image = A;
    old.slots[1].image = B;
    let both = GenerationUpdate {
        generation: at(5, 2),
        shared_with: vec![image(1), image(3)],
        cleared: Some((at(5, 1), vec![image(1), image(2)])),
    };
    let new = old.with_generation(&both);
    assert_eq!(new.data_generation, at(5, 2));
    assert_eq!(
        new.slots[0].generations,
        PeerGenerations { common: at(5, 2), last_cleared: at(5, 1) }
    );
    assert_eq!(
        new.slots[1].generations,
        PeerGenerations { common: at(0, 0), last_cleared: at(5, 1) }
    );
    assert_eq!(new.slots[2], SlotEntry::default(), "it has no replica");
    let older =
        GenerationUpdate { generation: at(4, 9), shared_with: vec![image(1)], cleared: None };
    assert_eq!(new.with_generation(&older), new, "what is older changes nothing");
}

/// An image that was brought in sync holds what its source held: a third image takes neither for
/// older.
#[test]
fn generations_of_the_source_are_adopted() {
    let shared = PeerGenerations { common: at(4, 0), last_cleared: at(4, 0) };
    let mut old = superblock(5, 50);
    old.slots[0] =
        SlotEntry { image: A, generations: shared, history_lost: true, ..SlotEntry::default() };
    old.slots[1] = SlotEntry { image: B, generations: shared, ..SlotEntry::default() };
    let new =
        old.with_inherited(&[(image(1), at(5, 1)), (image(2), at(3, 9)), (image(3), at(7, 7))]);
    assert_eq!(new.slots[0].generations, PeerGenerations { common: at(5, 1), ..shared });
    assert!(new.slots[0].history_lost, "what was forgotten is not known again");
    assert_eq!(new.slots[1].generations, shared, "what is older changes nothing");
    assert_eq!((new.slots[2], new.data_generation), (SlotEntry::default(), old.data_generation));
}

#[test]
fn a_reassigned_slot_starts_without_generations() {
    let shared = PeerGenerations { common: at(5, 2), last_cleared: at(5, 1) };
    let known = SlotEntry { image: A, generations: shared, ..SlotEntry::default() };
    assert_eq!(known.assigned_to(A, false), known);
    assert_eq!(known.assigned_to(B, false), SlotEntry { image: B, ..SlotEntry::default() });
    let lost = SlotEntry { history_lost: true, ..SlotEntry::default() };
    assert!(lost.assigned_to(A, false).history_lost, "more may have been recorded than is known");
    assert!(!lost.assigned_to(A, true).history_lost, "nothing was ever recorded about a new image");
}
