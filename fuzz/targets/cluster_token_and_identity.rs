//! Arbitrary input to a node from an administrator, a disk, etcd or the network: tokens,
//! `cluster.json`, join requests and answers, records of tokens, requests and rotations. What is
//! accepted must round-trip.

use cluster::admission::{self, JOIN_KEY_PREFIX, JoinRequest, JoinResponse, TOKEN_KEY_PREFIX};
use cluster::credential_rotation;
use cluster::identity::ClusterIdentity;
use cluster::join_token::JoinToken;
use cluster::store::{Entry, Revision};

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        if let Ok(identity) = ClusterIdentity::parse(input) {
            assert_eq!(ClusterIdentity::parse(&identity.to_bytes()), Ok(identity));
        }
        if let Ok(token) = JoinToken::parse(&String::from_utf8_lossy(input)) {
            assert_eq!(JoinToken::parse(&token.to_text()), Ok(token));
        }
        if let Ok(request) = JoinRequest::parse(input) {
            assert_eq!(JoinRequest::parse(&request.to_bytes()), Ok(request));
        }
        if let Ok(answer) = JoinResponse::parse(input) {
            assert_eq!(JoinResponse::parse(&answer.to_bytes()), Ok(answer));
        }
        for prefix in [TOKEN_KEY_PREFIX, JOIN_KEY_PREFIX] {
            let entry = Entry::new(format!("{prefix}1a2b3c4d"), input, Revision(1));
            let _ = admission::validate_entry(&entry);
        }
        for key in [
            credential_rotation::ROTATION_KEY.to_owned(),
            format!("{}7", credential_rotation::PROGRESS_KEY_PREFIX),
        ] {
            let _ = credential_rotation::validate_entry(&Entry::new(key, input, Revision(1)));
        }
    });
}
