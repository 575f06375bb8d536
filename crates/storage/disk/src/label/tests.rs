use proptest::prelude::*;
use wire::embedded_checksum::with_checksum;

use super::*;

fn label() -> ImageLabel {
    ImageLabel {
        generation: 7,
        has_intent_log: false,
        optional_features: 0x8000_0001,
        volume_id: Uuid::from_u128(0x0123_4567_89ab_4def_8123_4567_89ab_cdef),
        image_id: Uuid::from_u128(0xfedc_ba98_7654_4321_8fed_cba9_8765_4321),
        block_size: 4096,
        state: ImageState::Active,
        provisioning: Provisioning::Thin,
        data_offset: DATA_OFFSET,
        data_bytes: 5 << 30,
        created: Duration::from_nanos(1_700_000_000_123_456_789),
    }
}

/// The label as `docs/format/label.md` shows it.
#[test]
fn the_golden_image() {
    let golden = concat!(
        "57494e44524f5345204c4142454c0d0a", // magic
        "0100",
        "0000",
        "00100000",
        "e4d1711f",
        "00000000", // version, slot, length, checksum
        "0700000000000000",
        "00000000",
        "01000080",                         // generation, required, optional
        "0123456789ab4def8123456789abcdef", // volume
        "fedcba98765443218fedcba987654321", // image
        "00100000",
        "02",
        "01",
        "0000", // block size, state, provisioning
        "0000100000000000",
        "0000004001000000", // data offset and size
        "15cd853dfe9c9717", // created
    );
    let bytes = label().to_bytes(0);
    let mut shown = String::new();
    for byte in &bytes[..FIELD_BYTES] {
        shown += &format!("{byte:02x}");
    }
    assert_eq!(shown, golden);
    assert!(bytes[FIELD_BYTES..].iter().all(|&b| b == 0));
    assert_eq!(ImageLabel::parse(&bytes, 0), Ok(label()));
}

/// `docs/format/label.md` describes the difference.
#[test]
fn an_intent_log_sets_required_feature_0() {
    let logged = ImageLabel { has_intent_log: true, ..label() };
    let (with, without) = (logged.to_bytes(0), label().to_bytes(0));
    let differing: Vec<usize> = (0..LABEL_BYTES).filter(|&at| with[at] != without[at]).collect();
    assert_eq!(differing, [24, 25, 26, 27, 40]);
    assert_eq!(with[24..28], [0xae, 0x8c, 0xdb, 0x5a]);
    assert_eq!(with[40..44], [1, 0, 0, 0]);
    assert_eq!(ImageLabel::parse(&with, 0), Ok(logged));
    // The error of a release that knows no feature at all: the bit must not be ignored.
    let mut strange = with;
    strange[40] = 3;
    assert_eq!(
        ImageLabel::parse(&with_checksum(strange, 24), 0),
        Err(ImageLabelError::UnsupportedFeatures(2))
    );
}

#[test]
fn the_data_never_lies_in_the_log() {
    let crowded = ImageLabel { data_offset: LOG_AREA.end - 4096, ..label() };
    assert!(!crowded.has_log_area());
    assert_eq!(ImageLabel::parse(&crowded.to_bytes(0), 0), Ok(crowded));
    let logged = ImageLabel { has_intent_log: true, ..crowded };
    let refused = Err(ImageLabelError::InvalidField("data offset (inside its intent log)"));
    assert_eq!(ImageLabel::parse(&logged.to_bytes(0), 0), refused);
    let tight = ImageLabel { data_offset: LOG_AREA.end, ..logged };
    assert_eq!(ImageLabel::parse(&tight.to_bytes(0), 0), Ok(tight));
}

#[test]
fn a_label_torn_at_any_sector_is_damaged() {
    let old = label().to_bytes(0);
    let new = ImageLabel { generation: 8, data_bytes: 6 << 30, ..label() }.to_bytes(0);
    for sector in 0..8 {
        for garbage in [false, true] {
            let mut torn = old;
            torn[sector * 512..].copy_from_slice(&new[sector * 512..]);
            if garbage {
                torn[sector * 512..(sector + 1) * 512].fill(0xa5);
            }
            let parsed = ImageLabel::parse(&torn, 0);
            // Only the first sector of a label differs: the rest is zeroes in both.
            match (sector, garbage) {
                (0, false) => assert_eq!(parsed.unwrap().generation, 8),
                (0, true) => assert_eq!(parsed, Err(ImageLabelError::NoMagic)),
                (_, true) => assert_eq!(parsed, Err(ImageLabelError::Damaged)),
                (_, false) => assert_eq!(parsed.unwrap().generation, 7),
            }
        }
    }
}

#[test]
fn every_bit_counts() {
    let good = label().to_bytes(1);
    for bit in 0..FIELD_BYTES * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 128 { ImageLabelError::NoMagic } else { ImageLabelError::Damaged };
        assert_eq!(ImageLabel::parse(&bad, 1), Err(expected), "bit {bit}");
    }
    assert_eq!(
        ImageLabel::parse(&good, 0),
        Err(ImageLabelError::Damaged),
        "it belongs in the other place"
    );
    assert_eq!(ImageLabel::parse(&[0; LABEL_BYTES], 0), Err(ImageLabelError::NoMagic));
}

#[test]
fn unknown_versions_and_features_are_refused() {
    let cases: [(usize, &[u8], ImageLabelError); 14] = [
        (16, &[2, 0], ImageLabelError::UnsupportedVersion(2)),
        (20, &[0, 8, 0, 0], ImageLabelError::InvalidField("length")),
        (28, &[1], ImageLabelError::InvalidField("reserved part")),
        (32, &[0; 8], ImageLabelError::InvalidField("generation")),
        (40, &[4, 0, 0, 0], ImageLabelError::UnsupportedFeatures(4)),
        (80, &[0, 4, 0, 0], ImageLabelError::InvalidField("block size")),
        (84, &[3], ImageLabelError::InvalidField("state")),
        (85, &[0], ImageLabelError::InvalidField("provisioning")),
        (87, &[1], ImageLabelError::InvalidField("reserved part")),
        (88, &[0; 8], ImageLabelError::InvalidField("data offset")),
        (88, &[0xff; 8], ImageLabelError::InvalidField("data offset")),
        (96, &[0; 8], ImageLabelError::InvalidField("data size")),
        (96, &[0xff; 8], ImageLabelError::InvalidField("data size")),
        (4095, &[1], ImageLabelError::InvalidField("reserved part")),
    ];
    for (at, bytes, expected) in cases {
        let mut strange = label().to_bytes(0);
        strange[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(ImageLabel::parse(&with_checksum(strange, 24), 0), Err(expected), "at {at}");
    }
    // The version comes before everything else: a newer label may look quite different.
    let mut newer = [0xff; LABEL_BYTES];
    newer[..16].copy_from_slice(&MAGIC);
    assert_eq!(
        ImageLabel::parse(&with_checksum(newer, 24), 0),
        Err(ImageLabelError::UnsupportedVersion(0xffff))
    );
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(
        noise in proptest::collection::vec(any::<u8>(), FIELD_BYTES),
        keep in 0usize..FIELD_BYTES,
        sign: bool,
    ) {
        let mut bytes = label().to_bytes(0);
        bytes[keep..FIELD_BYTES].copy_from_slice(&noise[keep..]);
        let bytes = if sign { with_checksum(bytes, 24) } else { bytes };
        if let Ok(parsed) = ImageLabel::parse(&bytes, 0) {
            prop_assert_eq!(parsed.to_bytes(0), bytes, "what is understood is written the same");
        }
    }
}
