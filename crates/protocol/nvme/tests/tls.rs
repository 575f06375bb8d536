//! Keys of TLS and their names (NVMe/TCP Transport 1.0c, 3.6.1), from any text.

use nvme::tls::{CipherSuite, Identity, TlsKey};
use proptest::prelude::*;

const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

proptest! {
    /// Whatever a user types: a key of a suite, or a reason.
    #[test]
    fn arbitrary_key_text_does_not_panic(text in "(NVMeTLSkey-1:)?[0-9]{0,2}:?[A-Za-z0-9+/=:]{0,100}") {
        if let Ok(key) = TlsKey::parse(&text) {
            prop_assert!(CipherSuite::ALL.contains(&key.suite()));
        }
    }

    /// A letter typed wrong is found out: the checksum finds every error of so few bits.
    #[test]
    fn a_key_with_a_changed_letter_is_refused(at in 16usize..64, letter in "[A-Za-z0-9+/]") {
        let mut text = KEY.to_owned();
        text.replace_range(at..=at, &letter);
        prop_assert_eq!(TlsKey::parse(&text).is_ok(), text == KEY);
    }

    /// What a ClientHello may bring.
    #[test]
    fn arbitrary_identity_bytes_do_not_panic(bytes in any::<Vec<u8>>()) {
        if let Some(identity) = Identity::parse(&bytes) {
            prop_assert_eq!(identity.to_string().into_bytes(), bytes);
        }
    }

    /// Likewise, closer to what hosts send.
    #[test]
    fn identities_parse_to_their_parts(text in "NVMe[0-2][RG]0[0-3]( [a-z.]{0,4}){0,5}") {
        if let Some(identity) = Identity::parse(text.as_bytes()) {
            prop_assert_eq!(identity.to_string(), text);
        }
    }

    /// No name makes a derivation fail altogether, and no two hosts have a key in common.
    #[test]
    fn every_pair_of_names_has_keys(host in "[a-z.:]{1,223}", subsystem in "[a-z.:]{1,223}") {
        let key = TlsKey::parse(KEY).expect("a key");
        let psks: Vec<_> = key.psks(&host, &subsystem).collect();
        prop_assert!(psks.len() >= 3);
        let other = format!("{host}x");
        for psk in key.psks(&other, &subsystem) {
            prop_assert!(psks.iter().all(|known| known.key() != psk.key()));
        }
    }
}
