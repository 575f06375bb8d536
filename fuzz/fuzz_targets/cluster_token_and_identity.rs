//! What an administrator or a disk hands to a node: tokens and `cluster.json` are anything; what is
//! taken must read back as it is written.
#![no_main]

use cluster::identity::Identity;
use cluster::token::Token;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Ok(identity) = Identity::parse(input) {
        assert_eq!(Identity::parse(&identity.to_bytes()), Ok(identity));
    }
    if let Ok(token) = Token::parse(&String::from_utf8_lossy(input)) {
        assert_eq!(Token::parse(&token.to_text()), Ok(token));
    }
});
