use proptest::prelude::*;
use wire::Text;

use super::*;
use crate::metadata::tests::{ROOM, histories, pool, raid5};

const POOL: Uuid = Uuid::from_u128(1);

fn block(changes: Vec<Change>) -> Block {
    let stamp = Stamp { opening: 3, version: 70, id: Uuid::from_u128(2) };
    Block { stamp, previous: Uuid::from_u128(4), counted: 69, changes }
}

fn errors() -> ErrorCounts {
    let (reads, writes, checksums) = (1, 2, 3);
    ErrorCounts { reads, writes, checksums, repaired: 4, unrepairable: 5, since_s: 6 }
}

/// A change of every kind.
fn all() -> Vec<Change> {
    let (member, volume, to) = (MemberId(5), VolumeId(6), Piece { member: MemberId(7), unit: 8 });
    let (uuid, serial) = (Uuid::from_u128(9), Text::new("S3X9"));
    let (shape, bytes, block_size) = (raid5(5), 1 << 30, 4096);
    vec![
        Change::Opened { id: uuid, forced: true },
        Change::Recovered,
        Change::Add { member, uuid, serial, units: 10, room: ROOM, units_at: 1 << 21, spare: true },
        Change::Out(member),
        Change::Back { member, marked: true },
        Change::Stand { member, standing: Standing::Leaving },
        Change::Remove(member),
        Change::CreateVolume { volume, uuid, shape, bytes, block_size, thick: true },
        Change::GrowVolume { volume, bytes: 2 << 30 },
        Change::DeleteVolume(volume),
        Change::Allocate { volume, index: 11, pieces: vec![to, to, to] },
        Change::Free { volume, index: 11 },
        Change::Move { volume, index: 11, column: 2, to },
        Change::Mark { volume, index: 11, regions: 3 },
        Change::Caught { volume, index: 11, column: 2, regions: 3 },
        Change::Lost { volume, index: 11, row: 7, rows: 2 },
        Change::Rewritten { volume, index: 11, row: 7, rows: 1 },
        Change::Unrepaired { volume, index: 11, row: 9, rows: 3 },
        Change::Counted { member, errors: errors() },
        Change::Scrubbed(ScrubRecord { ended_s: 1, bytes: 2, repaired: 3, unrepairable: 4 }),
    ]
}

#[test]
fn a_block_is_read_as_it_was_written() {
    let block = block(all());
    assert_eq!(Block::parse(&block.to_bytes(POOL), POOL), Ok(block));
}

#[test]
fn the_widest_extent_fits_many_times() {
    let pieces = vec![Piece { member: MemberId(1), unit: 2 }; 64];
    let widest = Change::Allocate { volume: VolumeId(1), index: 2, pieces };
    assert_eq!((widest.record_bytes(), Block::room()), (528, 3984));
    let largest = all().iter().map(Change::record_bytes).max();
    assert_eq!(largest, Some(112), "one that adds a member");
}

#[test]
fn what_is_torn_and_what_is_not_ours_is_told() {
    let whole = block(all()).to_bytes(POOL);
    let parse = |bytes: &[u8; BLOCK_BYTES]| Block::parse(bytes, POOL).unwrap_err();
    assert_eq!(parse(&[0; BLOCK_BYTES]), NoBlock::Foreign);
    for sector in 0..8 {
        let mut torn = whole;
        torn[sector * 512 + 20..][..492].fill(0xee);
        assert_eq!(parse(&torn), NoBlock::Torn, "sector {sector}");
    }
    assert_eq!(Block::parse(&whole, Uuid::nil()), Err(NoBlock::Other));
    let changed = |at: usize, to: u8| {
        let mut bytes = whole;
        bytes[at] = to;
        seal(&mut bytes, CHECKSUM_AT);
        parse(&bytes)
    };
    assert_eq!(changed(16, 1), NoBlock::Version(1));
    assert_eq!(changed(18, 19), NoBlock::Contradiction, "a record that is not counted");
    assert_eq!(changed(28, 1), NoBlock::Contradiction, "a reserved byte");
    assert_eq!(changed(96, 70), NoBlock::Contradiction, "counts before it is made");
    assert_eq!(changed(4095, 1), NoBlock::Contradiction, "a byte behind the records");
    assert_eq!(changed(HEAD_BYTES, 99), NoBlock::Contradiction, "a kind that is not known");
    assert_eq!(changed(HEAD_BYTES + 2, 0), NoBlock::Contradiction, "a record of no length");
    assert_eq!(changed(HEAD_BYTES + 24, 2), NoBlock::Contradiction, "a flag that is neither");
}

/// The bytes are what the format's page says.
#[test]
fn golden() {
    let changes = vec![
        Change::Allocate {
            volume: VolumeId(6),
            index: 11,
            pieces: vec![Piece { member: MemberId(7), unit: 8 }],
        },
        Change::Out(MemberId(5)),
        Change::Lost { volume: VolumeId(6), index: 11, row: 300, rows: 2 },
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
fn what_does_not_follow_is_told_and_changes_nothing() {
    let mut known = pool(2);
    let (here, before) = (known.stamp(), known.clone());
    let next = Stamp { version: 2, ..here };
    let block = |stamp, previous| Block { stamp, previous, counted: 1, changes: vec![] };
    for stray in [
        block(here, here.id),
        block(Stamp { version: 3, ..here }, here.id),
        block(next, Uuid::nil()),
    ] {
        assert_eq!(known.replay(&stray), Err(NoSuccessor::Elsewhere));
        assert_eq!(known, before);
    }
    assert_eq!(known.replay(&block(next, here.id)), Ok(()));
    assert_eq!((known.stamp(), known.counted()), (next, 1));
}

proptest! {
    /// Whoever reads what a writer wrote knows what the writer knew.
    #[test]
    fn a_history_that_is_read_is_the_one_that_was_written(history in histories()) {
        let mut writer = pool(4);
        let mut reader = writer.clone();
        for (counts, changes) in history {
            let (before, counted) = (writer.stamp(), writer.counted());
            let counted = if counts { before.version } else { counted };
            prop_assume!(writer.start(counted).is_ok());
            let changes = changes.into_iter().filter(|change| writer.apply(change).is_ok()).collect();
            let block = Block { stamp: writer.stamp(), previous: before.id, counted, changes };
            let read = Block::parse(&block.to_bytes(POOL), POOL);
            prop_assert_eq!(read.as_ref(), Ok(&block));
            prop_assert_eq!(reader.replay(&block), Ok(()));
            prop_assert_eq!(&reader, &writer);
        }
    }

    #[test]
    fn any_bytes_are_a_block_or_are_refused(
        records in prop::collection::vec((1u16..22, 0u16..72, any::<[u8; 32]>()), 0..8),
        noise in prop::collection::vec((0..BLOCK_BYTES, any::<u8>()), 0..4),
    ) {
        let mut bytes = block(vec![]).to_bytes(POOL);
        let mut at = HEAD_BYTES;
        for (kind, length, body) in &records {
            bytes[at..at + 2].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 2..at + 4].copy_from_slice(&length.to_le_bytes());
            bytes[at + 4..at + 36].copy_from_slice(body);
            at += usize::from(*length);
        }
        bytes[18] = u8::try_from(records.len()).unwrap();
        bytes[20..24].copy_from_slice(&u32::try_from(at - HEAD_BYTES).unwrap().to_le_bytes());
        noise.iter().for_each(|(at, to)| bytes[*at] = *to);
        seal(&mut bytes, CHECKSUM_AT);
        if let Ok(block) = Block::parse(&bytes, POOL) {
            prop_assert_eq!(block.to_bytes(POOL), bytes);
        }
    }
}
