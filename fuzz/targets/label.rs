//! Labels of flat images: any bytes parse or are rejected; what parses serialises to the same
//! bytes.

use disk::{ImageLabel, LABEL_BYTES};

/// Range of the checksum, which the fuzzer would not guess.
const CHECKSUM: std::ops::Range<usize> = 24..28;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u16, bool, &[u8])| {
        let (slot, sign, data) = input;
        let mut bytes = [0; LABEL_BYTES];
        let len = data.len().min(LABEL_BYTES);
        bytes[..len].copy_from_slice(&data[..len]);
        if sign {
            bytes[..16].copy_from_slice(b"WINDROSE LABEL\r\n");
            bytes[CHECKSUM].fill(0);
            let checksum = wire::crc32c(&bytes);
            bytes[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(label) = ImageLabel::parse(&bytes, slot) {
            assert_eq!(label.to_bytes(slot), bytes);
            assert!(label.end_offset() > label.data_offset);
        }
    });
}
