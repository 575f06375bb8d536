use proptest::prelude::*;
use wire::Text;

use super::super::metadata::{Change, tests};
use super::*;

fn m(n: u16) -> MemberId {
    MemberId(n)
}

fn uuid(n: u16) -> Uuid {
    Uuid::from_u128(100 + u128::from(n))
}

fn set(members: &[u16]) -> Members {
    members.iter().copied().map(MemberId).collect()
}

/// Disks that know so.
fn known<'a>(disks: &[(u16, &'a Metadata)]) -> Vec<Known<'a>> {
    let known =
        |(n, metadata): &(u16, &'a Metadata)| Known { member: m(*n), uuid: uuid(*n), metadata };
    disks.iter().map(known).collect()
}

/// The next version, of an opening of its own if that has a number.
fn next(before: &Metadata, counted: u64, opening: Option<u128>, out: &[u16]) -> Metadata {
    let mut next = before.clone();
    next.start(counted).unwrap();
    let opened = opening.map(|n| Change::Opened { id: Uuid::from_u128(n), forced: false });
    opened.iter().for_each(|change| next.apply(change).unwrap());
    out.iter().for_each(|n| next.apply(&Change::Out(m(*n))).unwrap());
    next
}

/// Version 2 of a pool of so many, which knows that 1 counts.
fn pool(members: u16) -> Metadata {
    next(&tests::pool(members), 1, None, &[])
}

fn text(known: &[Known<'_>], without: &[Uuid]) -> String {
    open(known, &[], without).unwrap_err().to_string()
}

#[test]
fn a_pool_that_is_just_created_is_opened_by_its_members() {
    let pool = tests::pool(3);
    let believed = open(&known(&[(0, &pool), (2, &pool)]), &[], &[]).unwrap();
    assert_eq!((believed.supporters, believed.forced), (set(&[0, 2]), false));
    assert_eq!(believed.stale, []);
    assert_eq!(open(&[], &[], &[]), Err(Refusal::Unknown));
    let nothing = Metadata::new(Uuid::from_u128(1), Text::new("tank"), tests::raid5(3), 16);
    assert_eq!(open(&known(&[(0, &nothing)]), &[], &[]), Err(Refusal::Unknown));
}

#[test]
fn the_later_one_of_a_line_is_taken_and_says_who_is_stale() {
    let old = pool(4);
    let new = next(&old, 2, Some(11), &[3]);
    let other = next(&old, 1, Some(9), &[]);
    let disks = known(&[(0, &new), (1, &old), (2, &other), (3, &old)]);
    let believed = open(&disks, &[], &[]).unwrap();
    assert_eq!(believed.metadata.stamp(), new.stamp());
    assert_eq!(believed.supporters, set(&[0, 1, 3]));
    let stale = |member, knows: &Metadata, led_here, out| Stale {
        member: m(member),
        knows: knows.stamp(),
        led_here,
        out,
    };
    let all =
        [stale(1, &old, true, false), stale(2, &other, false, false), stale(3, &old, true, true)];
    assert_eq!(believed.stale, all);
}

#[test]
fn half_is_not_enough_and_who_is_missing_is_named() {
    let pool = pool(4);
    let half = known(&[(1, &pool), (3, &pool)]);
    assert_eq!(
        text(&half, &[]),
        "disks S0, S2 are missing; of 4 disks with a vote in version 1 2 know what led to version 2, \
         and more than half are needed; if they are gone for good: pool open tank --without S0 \
         --without S2"
    );
    let Err(Refusal::Few(few)) = open(&half, &[], &[]) else { panic!("not half") };
    assert_eq!((few.missing[0].member, few.missing[0].uuid), (m(0), uuid(0)));
    let other = next(&pool, 1, Some(12), &[]);
    let new = next(&pool, 1, Some(11), &[]);
    assert_eq!(
        text(&known(&[(0, &new), (1, &other)]), &[]),
        "disks S2, S3 are missing; disk S0 knows of another history; of 4 disks with a vote in \
         version 1 1 knows what led to version 3, and more than half are needed; if they are gone for \
         good: pool open tank --without S2 --without S3"
    );
}

#[test]
fn a_statement_names_all_that_are_missing_and_none_that_is_right() {
    let pool = pool(4);
    let one = known(&[(1, &pool)]);
    let without = |members: &[u16]| members.iter().map(|n| uuid(*n)).collect::<Vec<_>>();
    assert_eq!(
        text(&one, &without(&[0, 3])),
        "disk S2 is missing as well; if gone for good: pool open tank --without S2, beside what was \
         said"
    );
    assert_eq!(
        text(&one, &without(&[0, 1, 2, 3])),
        "disk S1 is there, and nothing is wrong with what it knows: it cannot be left out"
    );
    assert_eq!(
        text(&one, &without(&[9])),
        "the pool has no disk 00000000-0000-0000-0000-00000000006d"
    );
    let believed = open(&one, &[], &without(&[0, 2, 3])).unwrap();
    assert_eq!((believed.excused, believed.forced), (set(&[0, 2, 3]), true));
    let three = known(&[(0, &pool), (1, &pool), (2, &pool)]);
    assert!(!open(&three, &[], &without(&[3])).unwrap().forced, "nothing had to be said");
}

#[test]
fn a_statement_that_was_false_makes_two_truths() {
    let before = pool(4);
    let forced = next(&before, 2, Some(11), &[1, 2, 3]);
    let forced = next(&forced, 3, None, &[]);
    let regular = next(&next(&before, 2, Some(12), &[0]), 3, None, &[]);
    let disks = known(&[(0, &forced), (1, &regular), (2, &regular), (3, &before)]);
    assert_eq!(
        text(&disks, &[]),
        "there are two truths: version 4 of opening 2 on disks S1, S2, and version 4 of opening 2 \
         on disk S0; which disks are wrong is to be said: pool open tank --without ..."
    );
    assert_eq!(open(&disks, &[], &[uuid(0)]).unwrap().metadata.stamp(), regular.stamp());
    let right = open(&disks, &[], &[uuid(1), uuid(2)]).unwrap();
    assert_eq!((right.metadata.stamp(), right.forced), (forced.stamp(), true));
    let all = [uuid(1), uuid(2), uuid(3)];
    let right = open(&disks, &[], &all).unwrap();
    assert_eq!(right.metadata.stamp(), forced.stamp(), "S3 has less than it knows to be committed");
    // Those that were named have done nothing since: what was said of them led to nothing that is lost.
    let disks = known(&[(0, &forced), (1, &before), (2, &before), (3, &before)]);
    assert_eq!(open(&disks, &[], &[]).unwrap().metadata.stamp(), forced.stamp());
}

/// Saying less must not open an older version than saying more would.
#[test]
fn a_later_version_is_not_passed_over_by_a_statement() {
    let before = pool(2);
    let mut later = next(&before, 2, None, &[]);
    let add = |n: u16| Change::Add {
        member: m(n),
        uuid: uuid(n),
        serial: Text::new(&format!("S{n}")),
        units: 6,
        room: tests::ROOM,
        units_at: 1 << 20,
        spare: false,
    };
    [2, 3].iter().for_each(|n| later.apply(&add(*n)).unwrap());
    let disks = known(&[(0, &later), (1, &before)]);
    assert!(matches!(open(&disks[..1], &[], &[uuid(1)]), Err(Refusal::Unnamed { .. })));
    assert!(open(&disks[..1], &[], &[uuid(1), uuid(2), uuid(3)]).unwrap().forced);
}

#[test]
fn of_two_with_one_identity_neither_is_asked() {
    let pool = pool(3);
    assert!(matches!(
        open(&known(&[(0, &pool), (1, &pool), (1, &pool)]), &[], &[]),
        Err(Refusal::Few(_))
    ));
    let mut disks = known(&[(0, &pool), (1, &pool)]);
    disks[1].member = m(2);
    assert!(
        matches!(open(&disks, &[], &[]), Err(Refusal::Few(_))),
        "a label with another's number"
    );
}

#[test]
fn what_may_not_be_written_is_said() {
    let before = pool(4);
    let all = set(&[0, 1, 2, 3]);
    let written = Written { following: all, current: all, ..Written::default() };
    assert_eq!(may_count(&Roll::of(&before), &next(&before, 2, None, &[0, 1]), &written), Ok(()));
    let most = next(&before, 2, None, &[0, 1, 2]);
    let refused = may_count(&Roll::of(&before), &most, &written).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "of 4 disks with a vote in version 1 at most half may have none in the next one, and 3 would"
    );
    let excused = Written { excused: set(&[1, 2]), ..written };
    assert_eq!(may_count(&Roll::of(&before), &most, &excused), Ok(()));
    let absent = Written { following: set(&[0, 1, 2]), ..written };
    let same = next(&before, 2, None, &[]);
    assert_eq!(may_count(&Roll::of(&before), &same, &absent), Err(MayNot::Absent(m(3))));
    let mut removed = same.clone();
    removed.members.remove(&m(3));
    removed.note_voters();
    assert_eq!(may_count(&Roll::of(&before), &removed, &written), Err(MayNot::Forget(m(3))));
    let out = next(&before, 2, None, &[3]);
    let mut back = next(&out, 3, None, &[]);
    back.apply(&Change::Back { member: m(3), marked: true }).unwrap();
    let behind = Written { current: set(&[0, 1, 2]), ..written };
    assert_eq!(may_count(&Roll::of(&out), &back, &behind), Err(MayNot::Early(m(3))));
    assert_eq!(may_count(&Roll::of(&out), &back, &written), Ok(()));
    let first = tests::pool(3);
    let nothing = Metadata::new(first.pool, first.name, first.shape, first.rings);
    assert_eq!(
        may_count(&Roll::of(&nothing), &first, &Written::default()),
        Ok(()),
        "the first one of all"
    );
}

/// Versions of a pool: `old` as it was once, and `new` that knows of one committed since, both with a vote for all.
fn set_back(members: u16) -> (Metadata, Metadata) {
    let old = next(&pool(members), 2, Some(11), &[]);
    let new = next(&next(&old, 3, Some(12), &[]), 4, None, &[]);
    (old, new)
}

#[test]
fn two_of_three_that_were_set_back_do_not_overwrite_the_third() {
    let (old, new) = set_back(3);
    let disks = known(&[(0, &old), (1, &old), (2, &new)]);
    let Err(Refusal::Older(refused)) = open(&disks, &[], &[]) else { panic!("it is opened") };
    let members = |disks: &[Disk]| disks.iter().map(|d| d.member.0).collect::<Vec<_>>();
    assert_eq!((members(&refused.older), members(&refused.newer)), (vec![0, 1], vec![2]));
    assert_eq!((refused.knows, refused.committed.version), (old.stamp(), 4));
    assert_eq!(
        text(&disks, &[]),
        "disks S0, S1 are older than disk S2: they know version 3 of opening 2, and disk S2 proves \
         that version 4 of opening 3 was committed; they were set back (a snapshot or a backup of a \
         disk was put back, or another disk was plugged in): nothing has been changed; put the right \
         disks back; or open what the newer have: windrose pool open tank --without S0 --without S1; \
         or open the older state, which LOSES all that was written since: windrose pool open tank \
         --without S2"
    );
    // Without the one that proves it nobody knows.
    assert_eq!(open(&disks[..2], &[], &[]).unwrap().metadata.stamp(), old.stamp());
}

#[test]
fn which_state_is_wanted_may_be_said() {
    let (old, new) = set_back(3);
    let disks = known(&[(0, &old), (1, &old), (2, &new)]);
    let older = open(&disks, &[], &[uuid(2)]).unwrap();
    assert_eq!((older.metadata.stamp(), older.supporters), (old.stamp(), set(&[0, 1])));
    assert_eq!((older.forced, older.excused), (true, set(&[2])));
    let newer = open(&disks, &[], &[uuid(0), uuid(1)]).unwrap();
    assert_eq!((newer.metadata.stamp(), newer.supporters), (new.stamp(), set(&[2])));
    assert!(newer.forced);
}

/// It supports nothing, so what lies on it is not believed: it is as old as what it knows.
#[test]
fn one_of_three_that_was_set_back_is_stale() {
    let (old, new) = set_back(3);
    let disks = known(&[(0, &new), (1, &old), (2, &new)]);
    let believed = open(&disks, &[], &[]).unwrap();
    assert_eq!((believed.metadata.stamp(), believed.supporters), (new.stamp(), set(&[0, 2])));
    let stale = Stale { member: m(1), knows: old.stamp(), led_here: true, out: false };
    assert_eq!(believed.stale, [stale]);
}

#[test]
fn of_a_pair_of_which_one_was_set_back_a_person_says_which_is_right() {
    let (old, new) = set_back(2);
    let disks = known(&[(0, &new), (1, &old)]);
    let said = text(&disks, &[]);
    assert!(said.starts_with("disk S1 is older than disk S0: it knows version 3"), "{said}");
    assert!(said.contains("pool open tank --without S1;"), "{said}");
    assert_eq!(open(&disks, &[], &[uuid(1)]).unwrap().metadata.stamp(), new.stamp());
    assert_eq!(open(&disks, &[], &[uuid(0)]).unwrap().metadata.stamp(), old.stamp());
}

#[test]
fn who_is_missing_is_named_beside_those_that_were_set_back() {
    let (old, new) = set_back(5);
    let said = text(&known(&[(0, &new), (1, &new), (3, &old), (4, &old)]), &[]);
    assert!(said.starts_with("disks S3, S4 are older than disks S0, S1"), "{said}");
    assert!(said.contains("disk S2 is missing;"), "{said}");
    assert!(said.contains("--without S2 --without S3 --without S4;"), "{said}");
    // Those that were out have never had more.
    let out = next(&next(&pool(4), 2, None, &[2, 3]), 3, None, &[]);
    let said = text(&known(&[(0, &out), (2, &pool(4)), (3, &pool(4))]), &[]);
    assert!(said.starts_with("disk S1 is missing; of 2 disks"), "{said}");
}

/// Its metadata is gone, and what its label says is not.
#[test]
fn what_the_label_of_a_damaged_disk_proves_is_heeded() {
    let (old, new) = set_back(3);
    let disks = known(&[(0, &old), (1, &old)]);
    let witness =
        |committed| Witness { member: m(2), uuid: uuid(2), serial: Text::new("S2"), committed };
    let refused = open(&disks, &[witness(new.stamp_of(4).unwrap())], &[]).unwrap_err();
    let said = refused.to_string();
    assert!(said.starts_with("disks S0, S1 are older than disk S2"), "{said}");
    let same = open(&disks, &[witness(old.stamp_of(2).unwrap())], &[]).unwrap();
    assert_eq!(same.supporters, set(&[0, 1]));
    let said = open(&disks, &[witness(new.stamp())], &[uuid(2)]).unwrap();
    assert_eq!(said.metadata.stamp(), old.stamp());
}

/// Disks that were set back were opened, and have gone on: neither history is believed against the other.
#[test]
fn a_history_of_disks_that_were_set_back_is_not_believed_against_a_newer_one() {
    let (old, new) = set_back(3);
    let other = next(&next(&old, 3, Some(13), &[2]), 4, None, &[]);
    let two = |disks: &[Known<'_>]| {
        let refused = open(disks, &[], &[]);
        let Err(Refusal::TwoTruths(two)) = refused else { panic!("{refused:?}") };
        [two.one, two.other].map(|truth| truth.disks.iter().map(|d| d.member.0).collect::<Vec<_>>())
    };
    assert_eq!(two(&known(&[(0, &other), (1, &other), (2, &new)])), [vec![0, 1], vec![2]]);
    assert_eq!(two(&known(&[(0, &other), (1, &new), (2, &new)])), [vec![1, 2], vec![0]]);
    let pair = known(&[(0, &other), (2, &new)]);
    assert!(matches!(open(&pair, &[], &[]), Err(Refusal::TwoTruths(_))));
    let disks = known(&[(0, &other), (1, &other), (2, &new)]);
    assert_eq!(open(&disks, &[], &[uuid(2)]).unwrap().metadata.stamp(), other.stamp());
}

proptest! {
    #[test]
    fn whatever_disks_know_is_opened_or_refused(
        histories in prop::collection::vec(tests::histories(), 1..4),
        disks in prop::collection::vec((0u16..7, 0u16..7, any::<prop::sample::Index>()), 0..7),
        without in prop::collection::vec(0u16..7, 0..4),
    ) {
        let mut versions = vec![pool(4)];
        for history in histories {
            let mut metadata = versions[0].clone();
            for (counts, changes) in history {
                let counted = if counts { metadata.stamp().version } else { metadata.counted() };
                if metadata.start(counted).is_err() {
                    break;
                }
                changes.iter().for_each(|change| { let _ = metadata.apply(change); });
                versions.push(metadata.clone());
            }
        }
        let known: Vec<_> = disks.iter().map(|(number, identity, version)| {
            // Mostly as labels have it.
            let number = if *number < 6 { *identity } else { *number };
            Known { member: m(number), uuid: uuid(*identity), metadata: version.get(&versions) }
        }).collect();
        let without: Vec<_> = without.iter().map(|n| uuid(*n)).collect();
        match open(&known, &[], &without) {
            Ok(believed) => {
                prop_assert!(!believed.supporters.and(believed.metadata.voters()).is_empty());
                prop_assert!(!believed.forced || !without.is_empty());
            }
            Err(refusal) => prop_assert!(!refusal.to_string().is_empty()),
        }
        for pair in versions.windows(2) {
            let all = Members(u128::MAX);
            let _ = may_count(&Roll::of(&pair[0]), &pair[1], &Written { following: all, current: all, excused: set(&[0]) });
        }
    }
}
