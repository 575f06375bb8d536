use proptest::prelude::*;
use wire::ShortText;

use super::*;
use crate::metadata::tests::histories;
use crate::samples::{SNAPSHOT_BLOCKS, pool, raid5};

const POOL: Uuid = Uuid::from_u128(1);

fn block(changes: Vec<Change>) -> JournalBlock {
    let version_id = VersionId { term: 3, version: 70, term_id: Uuid::from_u128(2) };
    JournalBlock { version_id, previous_term: Uuid::from_u128(4), committed: 69, changes }
}

fn errors() -> MemberErrorCounts {
    let (reads, writes, checksums) = (1, 2, 3);
    MemberErrorCounts {
        read_errors: reads,
        write_errors: writes,
        corrupt_reads: checksums,
        repaired_rows: 4,
        unrecoverable_rows: 5,
        since_s: 6,
    }
}

/// A change of every kind.
fn all() -> Vec<Change> {
    let (member, volume, to) =
        (MemberId(5), PoolVolumeId(6), PhysicalExtent { member: MemberId(7), index: 8 });
    let (uuid, serial) = (Uuid::from_u128(9), ShortText::new("S3X9"));
    let (shape, bytes, block_size) = (raid5(5), 1 << 30, 4096);
    vec![
        Change::StartTerm { term_id: uuid, is_forced: true },
        Change::LogsRecovered,
        Change::AddMember {
            member,
            uuid,
            serial,
            physical_extents: 10,
            snapshot_blocks: SNAPSHOT_BLOCKS,
            extents_at: 1 << 21,
            is_spare: true,
        },
        Change::Detach(member),
        Change::Reattach { member, only_stale_regions: true },
        Change::SetMemberState { member, state: PoolMemberState::Draining },
        Change::RemoveMember(member),
        Change::CreateVolume { volume, uuid, geometry: shape, bytes, block_size, is_thick: true },
        Change::GrowVolume { volume, bytes: 2 << 30 },
        Change::DeleteVolume(volume),
        Change::AllocateExtent { volume, index: 11, columns: vec![to, to, to] },
        Change::FreeExtent { volume, index: 11 },
        Change::MoveColumn { volume, index: 11, column: 2, to },
        Change::MarkStale { volume, index: 11, regions: 3 },
        Change::ClearStale { volume, index: 11, column: 2, regions: 3 },
        Change::MarkLost { volume, index: 11, first_row: 7, row_count: 2 },
        Change::MarkRewritten { volume, index: 11, first_row: 7, row_count: 1 },
        Change::MarkUnrepaired { volume, index: 11, first_row: 9, row_count: 3 },
        Change::RecordErrors { member, errors: errors() },
        Change::RecordScrub(ScrubRecord {
            ended_s: 1,
            bytes: 2,
            repaired_rows: 3,
            unrecoverable_rows: 4,
        }),
    ]
}

#[test]
fn a_block_round_trips() {
    let block = block(all());
    assert_eq!(JournalBlock::parse(&block.to_bytes(POOL), POOL), Ok(block));
}

#[test]
fn a_block_holds_several_changes_of_the_widest_extent() {
    let columns = vec![PhysicalExtent { member: MemberId(1), index: 2 }; 64];
    let widest = Change::AllocateExtent { volume: PoolVolumeId(1), index: 2, columns };
    assert_eq!((widest.encoded_bytes(), JournalBlock::capacity_bytes()), (528, 3984));
    let largest = all().iter().map(Change::encoded_bytes).max();
    assert_eq!(largest, Some(112), "one that adds a member");
}

#[test]
fn torn_and_foreign_blocks_are_detected() {
    let whole = block(all()).to_bytes(POOL);
    let parse = |bytes: &[u8; BLOCK_BYTES]| JournalBlock::parse(bytes, POOL).unwrap_err();
    assert_eq!(parse(&[0; BLOCK_BYTES]), BlockError::NoMagic);
    for sector in 0..8 {
        let mut torn = whole;
        torn[sector * 512 + 20..][..492].fill(0xee);
        assert_eq!(parse(&torn), BlockError::Torn, "sector {sector}");
    }
    assert_eq!(JournalBlock::parse(&whole, Uuid::nil()), Err(BlockError::OtherPool));
    let changed = |at: usize, to: u8| {
        let mut bytes = whole;
        bytes[at] = to;
        write_checksum(&mut bytes, CHECKSUM_AT);
        parse(&bytes)
    };
    assert_eq!(changed(16, 1), BlockError::UnknownVersion(1));
    assert_eq!(changed(18, 19), BlockError::Inconsistent, "a record that is not counted");
    assert_eq!(changed(28, 1), BlockError::Inconsistent, "a reserved byte");
    assert_eq!(changed(96, 70), BlockError::Inconsistent, "counts before it is made");
    assert_eq!(changed(4095, 1), BlockError::Inconsistent, "a byte behind the records");
    assert_eq!(changed(HEADER_BYTES, 99), BlockError::Inconsistent, "a kind that is not known");
    assert_eq!(changed(HEADER_BYTES + 2, 0), BlockError::Inconsistent, "a record of no length");
    assert_eq!(changed(HEADER_BYTES + 24, 2), BlockError::Inconsistent, "a flag that is neither");
}

/// The bytes must be those of the format page.
#[test]
fn golden() {
    let changes = vec![
        Change::AllocateExtent {
            volume: PoolVolumeId(6),
            index: 11,
            columns: vec![PhysicalExtent { member: MemberId(7), index: 8 }],
        },
        Change::Detach(MemberId(5)),
        Change::MarkLost { volume: PoolVolumeId(6), index: 11, first_row: 300, row_count: 2 },
    ];
    let bytes = block(changes).to_bytes(POOL);
    assert_eq!(&bytes[..24], b"WINDROSE CHANGE\n\x02\x00\x03\x00\x38\x00\x00\x00");
    assert_eq!((bytes[47], bytes[63], bytes[79]), (1, 2, 4), "pool, opening, the one before");
    let numbers = [3u64, 70, 69, 0].map(u64::to_le_bytes).concat();
    assert_eq!(bytes[80..112], numbers);
    assert_eq!(
        bytes[112..168],
        [
            11, 0, 24, 0, 6, 0, 0, 0, 11, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 7, 0, 0, 0, 4, 0, 8, 0,
            5, 0, 0, 0, 16, 0, 24, 0, 6, 0, 0, 0, 11, 0, 0, 0, 44, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
        ]
    );
    assert!(bytes[168..].iter().all(|b| *b == 0));
}

#[test]
fn a_block_out_of_sequence_is_refused_and_changes_nothing() {
    let mut known = pool(2);
    let (here, before) = (known.version_id(), known.clone());
    let next = VersionId { version: 2, ..here };
    let block = |stamp, previous| JournalBlock {
        version_id: stamp,
        previous_term: previous,
        committed: 1,
        changes: vec![],
    };
    for stray in [
        block(here, here.term_id),
        block(VersionId { version: 3, ..here }, here.term_id),
        block(next, Uuid::nil()),
    ] {
        assert_eq!(known.replay(&stray), Err(ReplayError::NotSuccessor));
        assert_eq!(known, before);
    }
    assert_eq!(known.replay(&block(next, here.term_id)), Ok(()));
    assert_eq!((known.version_id(), known.committed_version()), (next, 1));
}

proptest! {
    /// Replaying what a writer wrote gives the writer's metadata.
    #[test]
    fn replay_yields_the_written_history(history in histories()) {
        let mut writer = pool(4);
        let mut reader = writer.clone();
        for (counts, changes) in history {
            let (before, committed) = (writer.version_id(), writer.committed_version());
            let committed = if counts { before.version } else { committed };
            prop_assume!(writer.begin_version(committed).is_ok());
            let changes = changes.into_iter().filter(|change| writer.apply(change).is_ok()).collect();
            let block = JournalBlock { version_id: writer.version_id(), previous_term: before.term_id, committed, changes };
            let read = JournalBlock::parse(&block.to_bytes(POOL), POOL);
            prop_assert_eq!(read.as_ref(), Ok(&block));
            prop_assert_eq!(reader.replay(&block), Ok(()));
            prop_assert_eq!(&reader, &writer);
        }
    }

    #[test]
    fn arbitrary_block_bytes_do_not_panic(
        records in prop::collection::vec((1u16..22, 0u16..72, any::<[u8; 32]>()), 0..8),
        noise in prop::collection::vec((0..BLOCK_BYTES, any::<u8>()), 0..4),
    ) {
        let mut bytes = block(vec![]).to_bytes(POOL);
        let mut at = HEADER_BYTES;
        for (kind, length, body) in &records {
            bytes[at..at + 2].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 2..at + 4].copy_from_slice(&length.to_le_bytes());
            bytes[at + 4..at + 36].copy_from_slice(body);
            at += usize::from(*length);
        }
        bytes[18] = u8::try_from(records.len()).unwrap();
        bytes[20..24].copy_from_slice(&u32::try_from(at - HEADER_BYTES).unwrap().to_le_bytes());
        noise.iter().for_each(|(at, to)| bytes[*at] = *to);
        write_checksum(&mut bytes, CHECKSUM_AT);
        if let Ok(block) = JournalBlock::parse(&bytes, POOL) {
            prop_assert_eq!(block.to_bytes(POOL), bytes);
        }
    }
}
