//! Volume descriptions in images: any bytes parse or are rejected; what parses serialises to the
//! same bytes.

use disk::Descriptor;
use records::record::image_description::ImageDescription;

/// Range of the checksum, which the fuzzer would not guess.
const CHECKSUM: std::ops::Range<usize> = 24..28;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u16, bool, &[u8])| {
        let (copy, sign, data) = input;
        let mut bytes = data.to_vec();
        bytes.resize(data.len().max(64).next_multiple_of(4096), 0);
        if sign {
            bytes[..16].copy_from_slice(b"WINDROSE VOLUME\n");
            bytes[CHECKSUM].fill(0);
            let checksum = wire::crc32c(&bytes);
            bytes[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(descriptor) = Descriptor::parse(&bytes, copy) {
            let again = descriptor.to_bytes(copy).expect("it had room");
            assert!(bytes.starts_with(&again));
        }
        if data.len() < 32 << 10
            && let Ok(description) = ImageDescription::parse(data)
        {
            let again = description.to_text();
            assert_eq!(ImageDescription::parse(&again), Ok(description));
        }
    });
}
