//! TLS keys as users exchange them, their identities in a ClientHello, and the ClientHello itself:
//! any input is rejected or round-trips.

use nvme::tls::{Identity, TlsKey};
use tls::{Acceptor, CipherSuite, Psk};

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        if let Ok(key) = TlsKey::parse(&String::from_utf8_lossy(input)) {
            assert!(key.psks("nqn.host", "nqn.subsystem").count() == 4);
        }
        if let Some(identity) = Identity::parse(input) {
            assert_eq!(identity.to_string().as_bytes(), input);
        }
        let mut acceptor = Acceptor::default();
        acceptor.receive(input);
        if let Ok(Some(hello)) = acceptor.hello() {
            let psk = Psk::new(
                b"NVMe0R01 nqn.host nqn.subsystem",
                &[0x5a; 32],
                CipherSuite::Aes128Sha256,
            );
            assert!(!hello.offers().is_empty());
            assert!(
                !hello.offers().iter().any(|offer| hello.verify_binder(offer, &psk)),
                "the key is unknown"
            );
        }
    });
}
