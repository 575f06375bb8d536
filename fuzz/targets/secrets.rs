//! Arbitrary bytes in etcd, in a key file and as user-supplied keys: they are rejected or
//! round-trip, and a secret can be opened only in the context it was sealed for.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cluster::identity::ClusterSecret;
use cluster::secrets::{
    self, Keyring, SealedSecret, SealingKey, SecretContext, SecretOwner, key_file,
};
use crc_fast::{CrcAlgorithm, checksum};
use nvme::auth::Secret;
use nvme::tls::TlsKey;
use records::record::{HostSecretContext, StoredChap, StoredDhchap, StoredTls, VolumeRecord};
use serde::{Serialize, de::DeserializeOwned};

const VOLUME: uuid::Uuid = uuid::Uuid::from_u128(7);

/// Parses a record and checks that it round-trips.
fn held<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(input: &[u8]) -> Option<T> {
    let held: T = serde_json::from_slice(input).ok()?;
    let json = serde_json::to_vec(&held).expect("names and text always serialise");
    assert_eq!(serde_json::from_slice::<T>(&json).ok().as_ref(), Some(&held));
    Some(held)
}

/// Host keys as users exchange them: the raw input, and keys built from it.
fn handed_round(input: &[u8], text: &str) {
    if let Ok(secret) = Secret::parse(text) {
        assert_eq!(format!("{secret:?}"), "Secret", "it is not shown");
    }
    if let Ok(key) = TlsKey::parse(text) {
        assert_eq!(format!("{key:?}"), "TlsKey", "it is not shown");
    }
    let Some((&[kind, at, change], bytes)) = input.split_first_chunk() else { return };
    let Some(bytes) = [32, 48, 64].iter().find_map(|n| bytes.get(..*n)) else { return };
    let crc = checksum(CrcAlgorithm::Crc32IsoHdlc, bytes);
    let mut whole = [bytes, &crc.to_le_bytes()[..4]].concat();
    let write = |whole: &[u8]| format!("DHHC-1:0{}:{}:", kind % 4, STANDARD.encode(whole));
    assert!(Secret::parse(&write(&whole)).is_ok(), "any bytes are a secret");
    let keyed = |whole: &[u8]| format!("NVMeTLSkey-1:01:{}:", STANDARD.encode(whole));
    assert_eq!(TlsKey::parse(&keyed(&whole)).is_ok(), bytes.len() == 32);
    if change != 0 {
        let at = usize::from(at) % whole.len();
        whole[at] ^= change;
        assert!(Secret::parse(&write(&whole)).is_err(), "it was mistyped");
        assert!(TlsKey::parse(&keyed(&whole)).is_err(), "it was mistyped");
    }
}

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        if let Ok(ring) = key_file::parse(&text) {
            assert_eq!(key_file::parse(&key_file::to_text(&ring)), Ok(ring));
        }
        let ring = Keyring::new(vec![SealingKey::new([1; 32])]).expect("one key");
        if let Ok(sealed) = SealedSecret::parse(&text) {
            assert_eq!(SealedSecret::parse(&sealed.to_text()), Ok(sealed.clone()));
            let context =
                SecretContext { volume: VOLUME, owner: SecretOwner::Initiator, user: "u" };
            assert!(ring.open(context, &sealed).is_err(), "no ring has sealed it");
        }
        assert!(secrets::unwrap_keyring(input, VOLUME, &ClusterSecret::new([1; 32])).is_err());
        if let Some(chap) = held::<StoredChap>(input) {
            let _ = chap.open(VOLUME, &ring);
        }
        let of = HostSecretContext { volume: VOLUME, host: "nqn.2026-01.com.example:host" };
        if let Some(dhchap) = held::<StoredDhchap>(input) {
            let (opened, known) = (dhchap.open(of, &ring), dhchap.open_for_target(of, &ring));
            assert!(known.is_err() || opened.is_ok(), "what front ends are given was opened");
        }
        if let Some(tls) = held::<StoredTls>(input) {
            let (opened, known) = (tls.open(of, &ring), tls.open_for_target(of, &ring));
            assert!(known.is_err() || opened.is_ok(), "what front ends are given was opened");
        }
        let _ = held::<VolumeRecord>(input);
        handed_round(input, &text);
    });
}
