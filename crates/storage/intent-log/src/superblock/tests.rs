use proptest::prelude::*;
use wire::embedded_checksum::with_checksum;

use super::*;

const IMAGE: Uuid = Uuid::from_u128(0xfedc_ba98_7654_4321_8fed_cba9_8765_4321);

fn at(epoch: u64, count: u32) -> DataGeneration {
    DataGeneration { epoch: Epoch(epoch), count }
}

fn superblock() -> Superblock {
    let peer = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);
    Superblock {
        state: LogState::Active,
        generation: 9,
        log_id: LogId(0x0123_4567_89ab_cdef),
        image: IMAGE,
        region_shift: 17,
        cells: 820,
        adopted_epoch: 0x0102_0304,
        config_id: Uuid::from_u128(0xc0c1_c2c3_c4c5_46c7_88c9_cacb_cccd_cecf),
        boot_id: Uuid::from_u128(0xb0b1_b2b3_b4b5_46b7_88b9_babb_bcbd_bebf),
        in_use: true,
        data_generation: at(0x0304, 6),
        slots: [
            SlotEntry {
                image: Some(peer),
                generations: PeerGenerations { common: at(0x0304, 5), last_cleared: at(0x0302, 4) },
                ..SlotEntry::default()
            },
            SlotEntry {
                image: Some(Uuid::from_u128(5)),
                is_all_dirty: true,
                history_lost: true,
                ..SlotEntry::default()
            },
            SlotEntry::default(),
        ],
        in_sync_hint: [Some(Uuid::from_u128(0xa)), Some(Uuid::from_u128(0xb)), None],
    }
}

/// The superblock as `docs/format/intent.md` shows it.
#[test]
fn the_golden_image() {
    let golden = concat!(
        "57494e44524f534520494e54454e540a", // magic
        "0200",
        "0100",
        "00100000",
        "ca1f0b3b",
        "02000000",                         // version, copy, length, checksum, state
        "0900000000000000",                 // generation
        "efcdab8967452301",                 // log id
        "fedcba98765443218fedcba987654321", // image
        "11000000",
        "34030000",                         // region shift, cells
        "0403020100000000",                 // epoch
        "c0c1c2c3c4c546c788c9cacbcccdcecf", // config
        "b0b1b2b3b4b546b788b9babbbcbdbebf", // boot
        "01",
        "000000",
        "06000000",                         // opened, reserved, lineage: count
        "0403000000000000",                 // lineage: epoch
        "11112222333344448555666677778888", // slot 0: image
        "00000000",
        "05000000",
        "0403000000000000", // flags, reached: count, epoch
        "0203000000000000",
        "0400000000000000", // cleared: epoch, count; reserved
        "00000000000000000000000000000000",
        "00000000000000000000000000000005", // slot 1
        "03000000000000000000000000000000",
        "00000000000000000000000000000000",
        "00000000000000000000000000000000",
        "00000000000000000000000000000000", // slot 2
        "00000000000000000000000000000000",
        "00000000000000000000000000000000",
        "00000000000000000000000000000000",
        "0000000000000000000000000000000a", // hint
        "0000000000000000000000000000000b",
        "00000000000000000000000000000000",
    );
    let bytes = superblock().to_bytes(1);
    let mut shown = String::new();
    for byte in &bytes[..FIELDS_BYTES] {
        shown += &format!("{byte:02x}");
    }
    assert_eq!(shown, golden);
    assert!(bytes[FIELDS_BYTES..].iter().all(|&b| b == 0));
    assert_eq!(Superblock::parse(&bytes, 1), Ok(superblock()));
}

#[test]
fn every_bit_counts() {
    let good = superblock().to_bytes(1);
    for bit in 0..SUPERBLOCK_BYTES * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 128 { SuperblockError::NoMagic } else { SuperblockError::Damaged };
        assert_eq!(Superblock::parse(&bad, 1), Err(expected), "bit {bit}");
    }
    assert_eq!(Superblock::parse(&good, 0), Err(SuperblockError::WrongCopy(1)));
    assert_eq!(Superblock::parse(&[0; SUPERBLOCK_BYTES], 0), Err(SuperblockError::NoMagic));
}

#[test]
fn a_torn_superblock_is_old_new_or_damaged() {
    let new = Superblock { generation: 10, adopted_epoch: 77, ..superblock() };
    let (before, after) = (superblock().to_bytes(0), new.to_bytes(0));
    for sectors in 0..=255u32 {
        let mut torn = before;
        for n in (0..8).filter(|n| sectors >> n & 1 == 1) {
            torn[n * 512..(n + 1) * 512].copy_from_slice(&after[n * 512..(n + 1) * 512]);
        }
        // All fields lie in the first sector.
        let expected = if sectors & 1 == 1 { new } else { superblock() };
        assert_eq!(Superblock::parse(&torn, 0), Ok(expected));
    }
    for cut in 25..=72 {
        let mut torn = before;
        torn[..cut].copy_from_slice(&after[..cut]);
        assert_eq!(Superblock::parse(&torn, 0), Err(SuperblockError::Damaged), "cut at {cut}");
    }
}

#[test]
fn unknown_versions_and_features_are_refused() {
    let field = SuperblockError::InvalidField;
    let own = IMAGE.into_bytes();
    let cases: [(usize, &[u8], SuperblockError); 24] = [
        (16, &[1, 0], SuperblockError::Version(1)),
        (18, &[1, 0], SuperblockError::WrongCopy(1)),
        (20, &[0, 8, 0, 0], field("length")),
        (28, &[0], field("state")),
        (28, &[3], field("state")),
        (31, &[1], field("state")),
        (32, &[0; 8], field("generation")),
        (48, &[0; 16], field("image")),
        (64, &[15], field("region size")),
        (64, &[29], field("region size")),
        (64, &[0xff; 4], field("region size")),
        (68, &[0; 4], field("number of cells")),
        (68, &[0x39, 3, 0, 0], field("number of cells")),
        (112, &[2], field("opened")),
        (113, &[1], field("reserved part")),
        (115, &[1], field("reserved part")),
        (128, &own, field("slots")),
        (256, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5], field("slots")),
        (144, &[4], field("slot flags")),
        (275, &[0x80], field("slot flags")),
        (172, &[1], field("reserved part")),
        (319, &[1], field("reserved part")),
        (368, &[1], field("reserved part")),
        (4095, &[1], field("reserved part")),
    ];
    for (at, bytes, expected) in cases {
        let mut strange = superblock().to_bytes(0);
        strange[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(Superblock::parse(&with_checksum(strange, 24), 0), Err(expected), "at {at}");
    }
    // The version is checked first: a newer superblock may look quite different.
    let mut newer = [0xff; SUPERBLOCK_BYTES];
    newer[..16].copy_from_slice(&MAGIC);
    let parsed = Superblock::parse(&with_checksum(newer, 24), 0);
    assert_eq!(parsed, Err(SuperblockError::Version(0xffff)));
}

#[test]
fn the_newest_intact_copy_is_chosen() {
    let old = superblock();
    let new = Superblock { generation: 10, adopted_epoch: 77, ..old };
    assert_eq!(choose_superblock([Ok(old), Ok(new)], IMAGE), Ok(new));
    assert_eq!(choose_superblock([Ok(new), Ok(old)], IMAGE), Ok(new));
    assert_eq!(choose_superblock([Ok(old), Ok(old)], IMAGE), Ok(old));
    let alien = Superblock { image: Uuid::from_u128(1), generation: 99, ..old };
    let bad = [
        SuperblockError::Unreadable,
        SuperblockError::NoMagic,
        SuperblockError::Damaged,
        SuperblockError::WrongCopy(1),
    ];
    let bad = bad.map(|why| (Err(why), why)).into_iter();
    let bad: Vec<_> = bad.chain([(Ok(alien), SuperblockError::OtherImage(alien.image))]).collect();
    for (place, why) in &bad {
        assert_eq!(choose_superblock([Ok(old), *place], IMAGE), Ok(old));
        assert_eq!(choose_superblock([*place, Ok(old)], IMAGE), Ok(old));
        for (other, also) in &bad {
            let lost = NoUsableSuperblock::Lost([*why, *also]);
            assert_eq!(choose_superblock([*place, *other], IMAGE), Err(lost));
        }
    }
    let differing = Superblock { adopted_epoch: 78, ..new };
    assert_eq!(
        choose_superblock([Ok(new), Ok(differing)], IMAGE),
        Err(NoUsableSuperblock::Differ(10))
    );
}

#[test]
fn a_copy_that_may_be_newer_is_not_passed_over() {
    let strange = [SuperblockError::Version(2), SuperblockError::InvalidField("state")];
    for why in strange {
        for other in
            [Ok(superblock()), Err(SuperblockError::Damaged), Err(SuperblockError::NoMagic)]
        {
            assert_eq!(
                choose_superblock([Err(why), other], IMAGE),
                Err(NoUsableSuperblock::Unsupported(why))
            );
            assert_eq!(
                choose_superblock([other, Err(why)], IMAGE),
                Err(NoUsableSuperblock::Unsupported(why))
            );
        }
    }
}

#[test]
fn it_fits_the_volumes_it_has_cells_for() {
    let with = |region_shift, cells| Superblock { region_shift, cells, ..superblock() };
    let (gib, field) = (1u64 << 30, SuperblockError::InvalidField);
    assert_eq!(with(16, 820).geometry(64 * gib), Ok(Geometry::new(64 * gib).unwrap()));
    assert_eq!(with(16, 819).geometry(64 * gib), Err(field("number of cells")));
    assert_eq!(with(16, 820).geometry(64 * gib + 512), Err(field("region size")));
    assert_eq!(with(17, 820).geometry(64 * gib).unwrap().cell_count(), 410, "before it grows");
    assert_eq!(with(28, 824).geometry(0), Err(field("region size")));
    assert_eq!(with(28, 824).geometry(u64::MAX), Err(field("region size")));
}

#[test]
fn both_reasons_are_named() {
    let lost = NoUsableSuperblock::Lost([SuperblockError::Damaged, SuperblockError::Unreadable]);
    let said =
        "no copy of the superblock is left: a damaged superblock and an unreadable superblock";
    assert_eq!(lost.to_string(), said);
}

fn lineages() -> impl Strategy<Value = DataGeneration> {
    (any::<u64>(), any::<u32>()).prop_map(|(epoch, count)| at(epoch, count))
}

/// Any valid superblock.
fn superblocks() -> impl Strategy<Value = Superblock> {
    let name = (1u128..).prop_map(Uuid::from_u128);
    let counts = (any::<bool>(), 1u64.., any::<u64>(), REGION_SHIFTS, 1..=MAX_CELLS, any::<u64>());
    // The first byte keeps the images of the slots apart.
    let slot = (any::<Option<[u8; 15]>>(), any::<bool>(), any::<bool>(), lineages(), lineages());
    let slots = proptest::array::uniform3(slot);
    let names = (any::<u128>(), any::<u128>(), any::<bool>());
    let hint = proptest::array::uniform3(proptest::option::of(name));
    let drawn = (counts, slots, names, hint, lineages());
    drawn.prop_map(|(counts, slots, (config, boot, opened), hint, lineage)| {
        let (empty, generation, log, region_shift, cells, epoch) = counts;
        let mut first = 0;
        Superblock {
            state: if empty { LogState::Initializing } else { LogState::Active },
            generation,
            log_id: LogId(log),
            image: IMAGE,
            region_shift,
            cells,
            adopted_epoch: epoch,
            config_id: Uuid::from_u128(config),
            boot_id: Uuid::from_u128(boot),
            in_use: opened,
            data_generation: lineage,
            slots: slots.map(|(rest, all_marked, forgotten, reached, cleared)| {
                first += 1;
                let image = rest.map(|rest| {
                    let mut bytes = [first; 16];
                    bytes[1..].copy_from_slice(&rest);
                    Uuid::from_bytes(bytes)
                });
                let shared = PeerGenerations { common: reached, last_cleared: cleared };
                SlotEntry {
                    image,
                    is_all_dirty: all_marked,
                    generations: shared,
                    history_lost: forgotten,
                }
            }),
            in_sync_hint: hint,
        }
    })
}

proptest! {
    #[test]
    fn it_round_trips(superblock in superblocks(), copy: u16) {
        prop_assert_eq!(Superblock::parse(&superblock.to_bytes(copy), copy), Ok(superblock));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        noise in proptest::collection::vec(any::<u8>(), FIELDS_BYTES),
        keep in 0usize..FIELDS_BYTES,
        sign: bool,
    ) {
        let mut bytes = superblock().to_bytes(0);
        bytes[keep..FIELDS_BYTES].copy_from_slice(&noise[keep..]);
        let bytes = if sign { with_checksum(bytes, 24) } else { bytes };
        if let Ok(parsed) = Superblock::parse(&bytes, 0) {
            prop_assert_eq!(parsed.to_bytes(0), bytes, "what is understood is written the same");
        }
    }
}
