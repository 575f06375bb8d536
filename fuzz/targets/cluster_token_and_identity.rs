//! What an administrator or a disk hands to a node: tokens and `cluster.json` are anything; what is
//! taken must read back as it is written.

use cluster::identity::Identity;
use cluster::token::Token;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        if let Ok(identity) = Identity::parse(input) {
            assert_eq!(Identity::parse(&identity.to_bytes()), Ok(identity));
        }
        if let Ok(token) = Token::parse(&String::from_utf8_lossy(input)) {
            assert_eq!(Token::parse(&token.to_text()), Ok(token));
        }
    });
}
