//! What an administrator, a disk, a store or the network hands to a node: tokens, `cluster.json`, requests to join and
//! answers, records of tokens, of requests and of rotations are anything; what is taken must read back as it is written.

use cluster::admission::{self, JOINS, JoinAnswer, JoinRequest, TOKENS};
use cluster::identity::Identity;
use cluster::meta::{Entry, Revision};
use cluster::rotation;
use cluster::token::Token;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        if let Ok(identity) = Identity::parse(input) {
            assert_eq!(Identity::parse(&identity.to_bytes()), Ok(identity));
        }
        if let Ok(token) = Token::parse(&String::from_utf8_lossy(input)) {
            assert_eq!(Token::parse(&token.to_text()), Ok(token));
        }
        if let Ok(request) = JoinRequest::parse(input) {
            assert_eq!(JoinRequest::parse(&request.to_bytes()), Ok(request));
        }
        if let Ok(answer) = JoinAnswer::parse(input) {
            assert_eq!(JoinAnswer::parse(&answer.to_bytes()), Ok(answer));
        }
        for prefix in [TOKENS, JOINS] {
            let entry = Entry::new(format!("{prefix}1a2b3c4d"), input, Revision(1));
            let _ = admission::check(&entry);
        }
        for key in [rotation::KEY.to_owned(), format!("{}7", rotation::NODES)] {
            let _ = rotation::check(&Entry::new(key, input, Revision(1)));
        }
    });
}
