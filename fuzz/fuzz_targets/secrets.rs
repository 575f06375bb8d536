//! What stands in a store and in a file of keys is anything: it is refused or reads back as it is written, and opens only where it
//! was sealed.
#![no_main]

use cluster::identity::ClusterSecret;
use cluster::vault::{self, Key, Place, Ring, Sealed, Whose, file};
use node::record::StoredChap;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let volume = uuid::Uuid::from_u128(7);
    if let Ok(ring) = file::parse(&text) {
        assert_eq!(file::parse(&file::to_text(&ring)), Ok(ring));
    }
    let ring = Ring::new(vec![Key::new([1; 32])]).expect("one key");
    if let Ok(sealed) = Sealed::parse(&text) {
        assert_eq!(Sealed::parse(&sealed.to_text()), Ok(sealed.clone()));
        let place = Place { volume, whose: Whose::Initiator, user: "u" };
        assert!(ring.open(place, &sealed).is_err(), "nobody has sealed it");
    }
    assert!(vault::unwrap(input, volume, &ClusterSecret::new([1; 32])).is_err());
    if let Ok(chap) = serde_json::from_slice::<StoredChap>(input) {
        let _ = chap.open(volume, &ring);
        let json = serde_json::to_vec(&chap).expect("names and text always serialise");
        assert_eq!(serde_json::from_slice::<StoredChap>(&json).ok(), Some(chap));
    }
});
