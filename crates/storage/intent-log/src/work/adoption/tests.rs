use super::*;
use crate::{LogId, State};

const fn image(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

const A: Option<Uuid> = Some(image(1));
const B: Option<Uuid> = Some(image(2));
const C: Option<Uuid> = Some(image(3));

fn others(known: &[u128], new: &[u128]) -> Vec<Other> {
    let other = |new| move |n: &u128| Other { image: image(*n), new };
    known.iter().map(other(false)).chain(new.iter().map(other(true))).collect()
}

fn superblock(epoch: u64, config: u128) -> Superblock {
    Superblock {
        state: State::Active,
        generation: 1,
        log: LogId(1),
        image: image(9),
        region_shift: 16,
        cells: 1,
        epoch,
        config: Uuid::from_u128(config),
        boot: Uuid::nil(),
        opened: true,
        lineage: Lineage::default(),
        slots: [SlotEntry::default(); SLOTS],
        hint: [None; 3],
    }
}

fn adoption(epoch: u64, config: u128, others: Vec<Other>) -> Adoption {
    let (config, members, hint) = (Uuid::from_u128(config), Vec::new(), [None; 3]);
    let inherited = Vec::new();
    Adoption { epoch, config, others, members, inherited, hint, boot: None }
}

#[test]
fn images_keep_their_slots_and_others_take_the_first_that_is_free() {
    let begins = |begin: &[(usize, Beginning)]| -> Vec<(Slot, Beginning)> {
        begin.iter().map(|(slot, how)| (Slot::ALL[*slot], *how)).collect()
    };
    let from = |slot: usize| (2, Beginning::With(Slot::ALL[slot]));
    let (all, union) = (|slot| (slot, Beginning::All), |slot| (slot, Beginning::Union));
    let four = Some(image(4));
    let cases: &[(_, _, _, &[(usize, Beginning)])] = &[
        ([None; 3], others(&[1], &[2]), [A, B, None], &[union(0), all(1)]),
        ([A, B, None], others(&[2, 1], &[]), [A, B, None], &[]),
        // What somebody lacks who goes is kept for when he comes back, in the last slot.
        ([A, B, None], others(&[2], &[]), [None, B, None], &[from(0)]),
        ([A, B, None], others(&[3, 2], &[]), [C, B, None], &[from(0), union(0)]),
        ([A, B, None], others(&[1, 2, 3], &[]), [A, B, C], &[union(2)]),
        // While all slots were taken, marks that the fourth needs may have gone from all of them.
        ([A, B, C], others(&[1, 4, 3], &[]), [A, four, C], &[all(1)]),
        // The last slot is for everybody who is away, from now on.
        ([A, B, C], others(&[1, 2], &[]), [A, B, None], &[all(2)]),
        ([A, B, C], vec![], [None; 3], &[all(2)]),
        ([A, B, C], others(&[4, 1], &[]), [A, four, None], &[all(1), all(2)]),
    ];
    for (old, others, slots, begin) in cases {
        let dealt = deal(*old, others);
        assert_eq!(dealt, Deal { slots: *slots, begin: begins(begin) }, "{old:?}, {others:?}");
    }
}

#[test]
fn epochs_go_forwards() {
    let adopted = superblock(5, 50);
    let outdated = Err(AdoptError::Outdated { epoch: 5, config: Uuid::from_u128(50) });
    assert_eq!(adopted.check(&adoption(6, 60, vec![])), Ok(()));
    assert_eq!(adopted.check(&adoption(5, 50, vec![])), Ok(()), "once more");
    assert_eq!(adopted.check(&adoption(5, 51, vec![])), outdated);
    assert_eq!(adopted.check(&adoption(4, 50, vec![])), outdated);
    assert_eq!(superblock(0, 0).check(&adoption(0, 1, vec![])), Ok(()), "the first");
}

#[test]
fn senseless_configurations_are_refused() {
    let refused = |others| superblock(1, 1).check(&adoption(2, 2, others));
    let senseless = Err(AdoptError::Senseless("other images"));
    assert_eq!(refused(others(&[1, 2, 3, 4], &[])), Err(AdoptError::TooMany(4)));
    assert_eq!(refused(others(&[1, 9], &[])), senseless, "the image itself");
    assert_eq!(refused(others(&[1, 2], &[1])), senseless, "one twice");
    assert_eq!(refused(others(&[0], &[])), senseless, "nil");
    let nameless = superblock(1, 1).check(&adoption(2, 0, vec![]));
    assert_eq!(nameless, Err(AdoptError::Senseless("name")));
}

fn at(epoch: u64, count: u32) -> Lineage {
    Lineage { epoch: Epoch(epoch), count }
}

#[test]
fn lineages_go_forwards_and_only_for_those_that_are_named() {
    let mut old = superblock(5, 50);
    old.slots[0].image = A;
    old.slots[1].image = B;
    let both = Advance {
        reached: at(5, 2),
        together: vec![image(1), image(3)],
        cleared: Some((at(5, 1), vec![image(1), image(2)])),
    };
    let new = old.advanced(&both);
    assert_eq!(new.lineage, at(5, 2));
    assert_eq!(new.slots[0].shared, SharedLineage { reached: at(5, 2), cleared: at(5, 1) });
    assert_eq!(new.slots[1].shared, SharedLineage { reached: at(0, 0), cleared: at(5, 1) });
    assert_eq!(new.slots[2], SlotEntry::default(), "it is nobody's");
    let older = Advance { reached: at(4, 9), together: vec![image(1)], cleared: None };
    assert_eq!(new.advanced(&older), new, "what is older changes nothing");
}

/// Who was brought in sync holds what the source held: a third replica takes neither for older.
#[test]
fn what_the_source_has_reached_with_others_is_reached() {
    let shared = SharedLineage { reached: at(4, 0), cleared: at(4, 0) };
    let mut old = superblock(5, 50);
    old.slots[0] = SlotEntry { image: A, shared, forgotten: true, ..SlotEntry::default() };
    old.slots[1] = SlotEntry { image: B, shared, ..SlotEntry::default() };
    let new = old.inheriting(&[(image(1), at(5, 1)), (image(2), at(3, 9)), (image(3), at(7, 7))]);
    assert_eq!(new.slots[0].shared, SharedLineage { reached: at(5, 1), ..shared });
    assert!(new.slots[0].forgotten, "what was forgotten is not known again");
    assert_eq!(new.slots[1].shared, shared, "what is older changes nothing");
    assert_eq!((new.slots[2], new.lineage), (SlotEntry::default(), old.lineage));
}

#[test]
fn a_slot_that_is_dealt_to_another_image_knows_nothing_of_it() {
    let shared = SharedLineage { reached: at(5, 2), cleared: at(5, 1) };
    let known = SlotEntry { image: A, shared, ..SlotEntry::default() };
    assert_eq!(known.dealt(A, false), known);
    assert_eq!(known.dealt(B, false), SlotEntry { image: B, ..SlotEntry::default() });
    let lost = SlotEntry { forgotten: true, ..SlotEntry::default() };
    assert!(lost.dealt(A, false).forgotten, "more may have been recorded than is known");
    assert!(!lost.dealt(A, true).forgotten, "nothing was ever recorded about a new image");
}
