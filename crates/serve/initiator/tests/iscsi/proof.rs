//! Who is who (RFC 7143 12.1.3).

use std::sync::Arc;

use common::A;
use iscsi::chap::Secret;
use iscsi::initiator::{CloseReason as Why, Credentials};
use target::{AccessList, AccessRule, ChapCredentials};

use super::*;

fn credentials(own: &str, mutual: Option<&str>) -> Option<Arc<Credentials>> {
    let secret = |text: &str| Secret::new(text.as_bytes()).unwrap();
    let mutual = mutual.map(|text| ("disk".to_owned(), secret(text)));
    let (user, secret) = ("host".to_owned(), secret(own));
    Some(Arc::new(Credentials { user, secret, mutual }))
}

fn secret_of(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

const HOST: &str = "twelve bytes of it";
const DISK: &str = "other twelve bytes";

#[test]
fn both_sides_prove_who_they_are() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 14).await;
        let mutual = Some(("disk".to_owned(), secret_of(DISK)));
        let chap = ChapCredentials { user: "host".into(), secret: secret_of(HOST), mutual };
        let named = [(INITIATOR.to_owned(), AccessRule::Proof(chap))].into();
        site.serve_unit(TARGET, A, AccessList { any: None, named });
        let log_in = async |credentials| {
            let options = Options { credentials, ..options(site.at) };
            Session::connect(&core, options, Staging::default()).await
        };
        for mutual in [None, Some(DISK)] {
            let session = log_in(credentials(HOST, mutual)).await.unwrap();
            let (_, client) = open(&session).await;
            client.write(0, &[1; 512], false).await.unwrap();
        }
        let ended = |why| Err(ConnectError::Ended(SessionEnd::Machine(why)));
        let refused = ended(Why::LoginRefused(LoginStatus::AuthenticationFailure));
        let wrong = log_in(credentials("some other secret", None)).await.map(drop);
        assert_eq!(wrong, refused);
        assert_eq!(log_in(None).await.map(drop), refused);
        let impostor = log_in(credentials(HOST, Some("not that of disk"))).await.map(drop);
        assert_eq!(impostor, ended(Why::TargetAuthenticationFailed));
        assert!(impostor.unwrap_err().is_final());
    });
}
