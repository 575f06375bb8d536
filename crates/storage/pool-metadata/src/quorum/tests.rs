use proptest::prelude::*;
use wire::ShortText;

use super::*;
use crate::metadata::{Change, tests};
use crate::samples::{self, SNAPSHOT_BLOCKS, raid5};

fn m(n: u16) -> MemberId {
    MemberId(n)
}

fn uuid(n: u16) -> Uuid {
    Uuid::from_u128(100 + u128::from(n))
}

fn set(members: &[u16]) -> MemberSet {
    members.iter().copied().map(MemberId).collect()
}

/// Disks with this metadata.
fn known<'a>(disks: &[(u16, &'a Metadata)]) -> Vec<MemberMetadata<'a>> {
    let known = |(n, metadata): &(u16, &'a Metadata)| MemberMetadata {
        member: m(*n),
        uuid: uuid(*n),
        metadata,
    };
    disks.iter().map(known).collect()
}

/// The next version; it starts a term if there is an id for one.
fn next(before: &Metadata, committed: u64, term_id: Option<u128>, detached: &[u16]) -> Metadata {
    let mut next = before.clone();
    next.begin_version(committed).unwrap();
    let start_term =
        term_id.map(|n| Change::StartTerm { term_id: Uuid::from_u128(n), is_forced: false });
    start_term.iter().for_each(|change| next.apply(change).unwrap());
    detached.iter().for_each(|n| next.apply(&Change::Detach(m(*n))).unwrap());
    next
}

/// Version 2 of a pool of so many members, which knows that version 1 is committed.
fn pool(members: u16) -> Metadata {
    next(&samples::pool(members), 1, None, &[])
}

fn text(known: &[MemberMetadata<'_>], without: &[Uuid]) -> String {
    recover(known, &[], without).unwrap_err().to_string()
}

#[test]
fn a_pool_that_is_just_created_is_opened_by_its_members() {
    let pool = samples::pool(3);
    let recovered = recover(&known(&[(0, &pool), (2, &pool)]), &[], &[]).unwrap();
    assert_eq!((recovered.supporters, recovered.is_forced), (set(&[0, 2]), false));
    assert_eq!(recovered.stale, []);
    assert_eq!(recover(&[], &[], &[]), Err(RecoveryError::NoMetadata));
    let nothing = Metadata::new(Uuid::from_u128(1), ShortText::new("tank"), raid5(3), 16);
    assert_eq!(recover(&known(&[(0, &nothing)]), &[], &[]), Err(RecoveryError::NoMetadata));
}

#[test]
fn the_latest_descendant_is_recovered_and_stale_members_are_listed() {
    let old = pool(4);
    let new = next(&old, 2, Some(11), &[3]);
    let other = next(&old, 1, Some(9), &[]);
    let disks = known(&[(0, &new), (1, &old), (2, &other), (3, &old)]);
    let recovered_state = recover(&disks, &[], &[]).unwrap();
    assert_eq!(recovered_state.metadata.version_id(), new.version_id());
    assert_eq!(recovered_state.supporters, set(&[0, 1, 3]));
    let stale = |member, knows: &Metadata, led_here, out| StaleMember {
        member: m(member),
        known_version: knows.version_id(),
        is_ancestor: led_here,
        is_detached: out,
    };
    let all =
        [stale(1, &old, true, false), stale(2, &other, false, false), stale(3, &old, true, true)];
    assert_eq!(recovered_state.stale, all);
}

#[test]
fn half_is_no_quorum_and_missing_disks_are_named() {
    let pool = pool(4);
    let half = known(&[(1, &pool), (3, &pool)]);
    assert_eq!(
        text(&half, &[]),
        "disks S0, S2 are missing; 2 of 4 voters of version 1 support version 2, but more than half \
         must; if they are gone for good: pool open tank --without S0 --without S2"
    );
    let Err(RecoveryError::NoQuorum(few)) = recover(&half, &[], &[]) else { panic!("not half") };
    assert_eq!((few.missing[0].member, few.missing[0].uuid), (m(0), uuid(0)));
    let other = next(&pool, 1, Some(12), &[]);
    let new = next(&pool, 1, Some(11), &[]);
    assert_eq!(
        text(&known(&[(0, &new), (1, &other)]), &[]),
        "disks S2, S3 are missing; disk S0 has another history; 1 of 4 voters of version 1 supports \
         version 3, but more than half must; if they are gone for good: pool open tank --without S2 \
         --without S3"
    );
}

#[test]
fn declared_lost_must_name_all_missing_disks_and_no_present_one() {
    let pool = pool(4);
    let one = known(&[(1, &pool)]);
    let without = |members: &[u16]| members.iter().map(|n| uuid(*n)).collect::<Vec<_>>();
    assert_eq!(
        text(&one, &without(&[0, 3])),
        "disk S2 is missing as well; if gone for good, also give: pool open tank --without S2"
    );
    assert_eq!(
        text(&one, &without(&[0, 1, 2, 3])),
        "disk S1 is present and its metadata is good: it cannot be left out"
    );
    assert_eq!(
        text(&one, &without(&[9])),
        "the pool has no disk 00000000-0000-0000-0000-00000000006d"
    );
    let recovered_state = recover(&one, &[], &without(&[0, 2, 3])).unwrap();
    assert_eq!((recovered_state.declared_lost, recovered_state.is_forced), (set(&[0, 2, 3]), true));
    let three = known(&[(0, &pool), (1, &pool), (2, &pool)]);
    assert!(!recover(&three, &[], &without(&[3])).unwrap().is_forced, "nothing had to be said");
}

#[test]
fn a_false_declaration_causes_split_brain() {
    let before = pool(4);
    let forced = next(&before, 2, Some(11), &[1, 2, 3]);
    let forced = next(&forced, 3, None, &[]);
    let regular = next(&next(&before, 2, Some(12), &[0]), 3, None, &[]);
    let disks = known(&[(0, &forced), (1, &regular), (2, &regular), (3, &before)]);
    assert_eq!(
        text(&disks, &[]),
        "split brain: version 4 of term 2 on disks S1, S2, and version 4 of term 2 on disk S0; choose \
         the disks to leave out: pool open tank --without ..."
    );
    assert_eq!(
        recover(&disks, &[], &[uuid(0)]).unwrap().metadata.version_id(),
        regular.version_id()
    );
    let right = recover(&disks, &[], &[uuid(1), uuid(2)]).unwrap();
    assert_eq!((right.metadata.version_id(), right.is_forced), (forced.version_id(), true));
    let all = [uuid(1), uuid(2), uuid(3)];
    let right = recover(&disks, &[], &all).unwrap();
    assert_eq!(
        right.metadata.version_id(),
        forced.version_id(),
        "S3 has less than it knows to be committed"
    );
    // The disks that were declared lost have done nothing since: the false declaration lost
    // nothing.
    let disks = known(&[(0, &forced), (1, &before), (2, &before), (3, &before)]);
    assert_eq!(recover(&disks, &[], &[]).unwrap().metadata.version_id(), forced.version_id());
}

/// Declaring less must not open an older version than declaring more would.
#[test]
fn declared_lost_does_not_skip_a_later_version() {
    let before = pool(2);
    let mut later = next(&before, 2, None, &[]);
    let add = |n: u16| Change::AddMember {
        member: m(n),
        uuid: uuid(n),
        serial: ShortText::new(&format!("S{n}")),
        physical_extents: 6,
        snapshot_blocks: SNAPSHOT_BLOCKS,
        extents_at: 1 << 20,
        is_spare: false,
    };
    [2, 3].iter().for_each(|n| later.apply(&add(*n)).unwrap());
    let disks = known(&[(0, &later), (1, &before)]);
    assert!(matches!(
        recover(&disks[..1], &[], &[uuid(1)]),
        Err(RecoveryError::UndeclaredMissing { .. })
    ));
    assert!(recover(&disks[..1], &[], &[uuid(1), uuid(2), uuid(3)]).unwrap().is_forced);
}

#[test]
fn disks_with_the_same_identity_are_both_ignored() {
    let pool = pool(3);
    assert!(matches!(
        recover(&known(&[(0, &pool), (1, &pool), (1, &pool)]), &[], &[]),
        Err(RecoveryError::NoQuorum(_))
    ));
    let mut disks = known(&[(0, &pool), (1, &pool)]);
    disks[1].member = m(2);
    assert!(
        matches!(recover(&disks, &[], &[]), Err(RecoveryError::NoQuorum(_))),
        "a label with another's number"
    );
}

#[test]
fn write_quorum_violations_are_reported() {
    let before = pool(4);
    let all = set(&[0, 1, 2, 3]);
    let written = WriteTargets { following: all, current: all, ..WriteTargets::default() };
    assert_eq!(
        check_write_quorum(
            &VoterSet::from_metadata(&before),
            &next(&before, 2, None, &[0, 1]),
            &written
        ),
        Ok(())
    );
    let most = next(&before, 2, None, &[0, 1, 2]);
    let refused =
        check_write_quorum(&VoterSet::from_metadata(&before), &most, &written).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "version 1 has 4 voters, of which the next version may drop at most half, not 3"
    );
    let declared_lost = WriteTargets { declared_lost: set(&[1, 2]), ..written };
    assert_eq!(
        check_write_quorum(&VoterSet::from_metadata(&before), &most, &declared_lost),
        Ok(())
    );
    let absent = WriteTargets { following: set(&[0, 1, 2]), ..written };
    let same = next(&before, 2, None, &[]);
    assert_eq!(
        check_write_quorum(&VoterSet::from_metadata(&before), &same, &absent),
        Err(QuorumViolation::AbsentVoter(m(3)))
    );
    let mut removed = same.clone();
    removed.members.remove(&m(3));
    removed.record_voters();
    assert_eq!(
        check_write_quorum(&VoterSet::from_metadata(&before), &removed, &written),
        Err(QuorumViolation::VoterIdReleased(m(3)))
    );
    let detached = next(&before, 2, None, &[3]);
    let mut back = next(&detached, 3, None, &[]);
    back.apply(&Change::Reattach { member: m(3), only_stale_regions: true }).unwrap();
    let not_caught_up = WriteTargets { current: set(&[0, 1, 2]), ..written };
    assert_eq!(
        check_write_quorum(&VoterSet::from_metadata(&detached), &back, &not_caught_up),
        Err(QuorumViolation::VoterNotCaughtUp(m(3)))
    );
    assert_eq!(check_write_quorum(&VoterSet::from_metadata(&detached), &back, &written), Ok(()));
    let first = samples::pool(3);
    let nothing = Metadata::new(first.pool_id, first.name, first.geometry, first.log_rings);
    assert_eq!(
        check_write_quorum(&VoterSet::from_metadata(&nothing), &first, &WriteTargets::default()),
        Ok(()),
        "the first one of all"
    );
}

/// Versions of a pool: an `old` one, and a `new` one that knows of a later commit; all members are
/// voters of both.
fn rolled_back(members: u16) -> (Metadata, Metadata) {
    let old = next(&pool(members), 2, Some(11), &[]);
    let new = next(&next(&old, 3, Some(12), &[]), 4, None, &[]);
    (old, new)
}

#[test]
fn two_rolled_back_disks_of_three_do_not_overwrite_the_third() {
    let (old, new) = rolled_back(3);
    let disks = known(&[(0, &old), (1, &old), (2, &new)]);
    let Err(RecoveryError::RolledBackDisks(refused)) = recover(&disks, &[], &[]) else {
        panic!("it is opened")
    };
    let members = |disks: &[DiskName]| disks.iter().map(|d| d.member.0).collect::<Vec<_>>();
    assert_eq!((members(&refused.rolled_back), members(&refused.newer)), (vec![0, 1], vec![2]));
    assert_eq!(
        (refused.newest_rolled_back_version, refused.committed.version),
        (old.version_id(), 4)
    );
    assert_eq!(
        text(&disks, &[]),
        "disks S0, S1 are older than disk S2: they have version 3 of term 2, and disk S2 proves that \
         version 4 of term 3 was committed; they were rolled back (a snapshot or backup of a disk was \
         restored, or another disk was plugged in): nothing has been changed; reconnect the right \
         disks; or open the newer state: windrose pool open tank --without S0 --without S1; or open \
         the older state, which LOSES all later writes: windrose pool open tank --without S2"
    );
    // Without the disk that proves the commit it is unknown.
    assert_eq!(recover(&disks[..2], &[], &[]).unwrap().metadata.version_id(), old.version_id());
}

#[test]
fn the_operator_can_choose_the_state() {
    let (old, new) = rolled_back(3);
    let disks = known(&[(0, &old), (1, &old), (2, &new)]);
    let older = recover(&disks, &[], &[uuid(2)]).unwrap();
    assert_eq!((older.metadata.version_id(), older.supporters), (old.version_id(), set(&[0, 1])));
    assert_eq!((older.is_forced, older.declared_lost), (true, set(&[2])));
    let newer = recover(&disks, &[], &[uuid(0), uuid(1)]).unwrap();
    assert_eq!((newer.metadata.version_id(), newer.supporters), (new.version_id(), set(&[2])));
    assert!(newer.is_forced);
}

/// It is no supporter, so its data are not used: they are as old as its metadata.
#[test]
fn one_rolled_back_disk_of_three_is_stale() {
    let (old, new) = rolled_back(3);
    let disks = known(&[(0, &new), (1, &old), (2, &new)]);
    let recovered_state = recover(&disks, &[], &[]).unwrap();
    assert_eq!(
        (recovered_state.metadata.version_id(), recovered_state.supporters),
        (new.version_id(), set(&[0, 2]))
    );
    let stale = StaleMember {
        member: m(1),
        known_version: old.version_id(),
        is_ancestor: true,
        is_detached: false,
    };
    assert_eq!(recovered_state.stale, [stale]);
}

#[test]
fn the_operator_decides_between_a_pair_of_which_one_was_rolled_back() {
    let (old, new) = rolled_back(2);
    let disks = known(&[(0, &new), (1, &old)]);
    let said = text(&disks, &[]);
    assert!(said.starts_with("disk S1 is older than disk S0: it has version 3"), "{said}");
    assert!(said.contains("pool open tank --without S1;"), "{said}");
    assert_eq!(recover(&disks, &[], &[uuid(1)]).unwrap().metadata.version_id(), new.version_id());
    assert_eq!(recover(&disks, &[], &[uuid(0)]).unwrap().metadata.version_id(), old.version_id());
}

#[test]
fn missing_disks_are_named_beside_rolled_back_ones() {
    let (old, new) = rolled_back(5);
    let said = text(&known(&[(0, &new), (1, &new), (3, &old), (4, &old)]), &[]);
    assert!(said.starts_with("disks S3, S4 are older than disks S0, S1"), "{said}");
    assert!(said.contains("disk S2 is missing;"), "{said}");
    assert!(said.contains("--without S2 --without S3 --without S4;"), "{said}");
    // Detached disks have never had more.
    let detached = next(&next(&pool(4), 2, None, &[2, 3]), 3, None, &[]);
    let said = text(&known(&[(0, &detached), (2, &pool(4)), (3, &pool(4))]), &[]);
    assert!(said.starts_with("disk S1 is missing; 1 of 2 voters"), "{said}");
}

/// Its metadata is damaged, but its label is not.
#[test]
fn a_commit_proven_by_a_damaged_disks_label_counts() {
    let (old, new) = rolled_back(3);
    let disks = known(&[(0, &old), (1, &old)]);
    let witness = |committed| DamagedDisk {
        member: m(2),
        uuid: uuid(2),
        serial: ShortText::new("S2"),
        committed,
    };
    let refused = recover(&disks, &[witness(new.version_id_of(4).unwrap())], &[]).unwrap_err();
    let said = refused.to_string();
    assert!(said.starts_with("disks S0, S1 are older than disk S2"), "{said}");
    let same = recover(&disks, &[witness(old.version_id_of(2).unwrap())], &[]).unwrap();
    assert_eq!(same.supporters, set(&[0, 1]));
    let said = recover(&disks, &[witness(new.version_id())], &[uuid(2)]).unwrap();
    assert_eq!(said.metadata.version_id(), old.version_id());
}

/// The rolled-back disks were opened, and have continued: neither history wins over the other.
#[test]
fn a_history_of_rolled_back_disks_does_not_win_over_a_newer_one() {
    let (old, new) = rolled_back(3);
    let other = next(&next(&old, 3, Some(13), &[2]), 4, None, &[]);
    let two = |disks: &[MemberMetadata<'_>]| {
        let refused = recover(disks, &[], &[]);
        let Err(RecoveryError::SplitBrain(two)) = refused else { panic!("{refused:?}") };
        [two.one, two.other].map(|truth| truth.disks.iter().map(|d| d.member.0).collect::<Vec<_>>())
    };
    assert_eq!(two(&known(&[(0, &other), (1, &other), (2, &new)])), [vec![0, 1], vec![2]]);
    assert_eq!(two(&known(&[(0, &other), (1, &new), (2, &new)])), [vec![1, 2], vec![0]]);
    let pair = known(&[(0, &other), (2, &new)]);
    assert!(matches!(recover(&pair, &[], &[]), Err(RecoveryError::SplitBrain(_))));
    let disks = known(&[(0, &other), (1, &other), (2, &new)]);
    assert_eq!(recover(&disks, &[], &[uuid(2)]).unwrap().metadata.version_id(), other.version_id());
}

proptest! {
    #[test]
    fn any_set_of_disks_is_opened_or_refused(
        histories in prop::collection::vec(tests::histories(), 1..4),
        disks in prop::collection::vec((0u16..7, 0u16..7, any::<prop::sample::Index>()), 0..7),
        without in prop::collection::vec(0u16..7, 0..4),
    ) {
        let mut versions = vec![pool(4)];
        for history in histories {
            let mut metadata = versions[0].clone();
            for (counts, changes) in history {
                let committed = if counts { metadata.version_id().version } else { metadata.committed_version() };
                if metadata.begin_version(committed).is_err() {
                    break;
                }
                changes.iter().for_each(|change| { let _ = metadata.apply(change); });
                versions.push(metadata.clone());
            }
        }
        let known: Vec<_> = disks.iter().map(|(number, identity, version)| {
            // Mostly as in real labels.
            let number = if *number < 6 { *identity } else { *number };
            MemberMetadata { member: m(number), uuid: uuid(*identity), metadata: version.get(&versions) }
        }).collect();
        let without: Vec<_> = without.iter().map(|n| uuid(*n)).collect();
        match recover(&known, &[], &without) {
            Ok(recovered) => {
                prop_assert!(!recovered.supporters.intersection(recovered.metadata.voters()).is_empty());
                prop_assert!(!recovered.is_forced || !without.is_empty());
            }
            Err(refusal) => prop_assert!(!refusal.to_string().is_empty()),
        }
        for pair in versions.windows(2) {
            let all = MemberSet(u128::MAX);
            let _ = check_write_quorum(&VoterSet::from_metadata(&pair[0]), &pair[1], &WriteTargets { following: all, current: all, declared_lost: set(&[0]) });
        }
    }
}
