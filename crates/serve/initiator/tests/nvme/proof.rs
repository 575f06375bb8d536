//! Who is who (RFD 0020), on every queue.

use std::sync::Arc;

use common::{A, guarded};
use initiator::nvme::Secrets;
use nvme::auth::{AuthFailure, AuthPolicy, FailureExplanation, Secret};
use target::HostSecrets;

use super::*;

pub(super) const HOST_SECRET: &str = "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:";
const OTHER_SECRET: &str = "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:";
const CONTROLLER_SECRET: &str = "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:";

pub(super) fn secret(text: &str) -> Secret {
    Secret::parse(text).unwrap()
}

pub(super) fn secrets(host: &str, controller: Option<&str>) -> Arc<Secrets> {
    let (host, controller) = (secret(host), controller.map(secret));
    Arc::new(Secrets { host, controller, policy: AuthPolicy::default() })
}

async fn connect(
    site: &Site,
    host: Option<&str>,
    controller: Option<&str>,
) -> Result<Controller, ConnectError> {
    let secrets = host.map(|host| secrets(host, controller));
    let options = Options { secrets, io_queues: 2, ..options(site.at) };
    Controller::connect(&site.core, options, Staging::default()).await
}

#[test]
fn both_sides_prove_who_they_are() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let of_controller = Some(secret(CONTROLLER_SECRET));
        let known = HostSecrets::Known { host: secret(HOST_SECRET), controller: of_controller };
        site.serve(SUBNQN, A, guarded(known));
        for controller in [None, Some(CONTROLLER_SECRET)] {
            let connected = connect(&site, Some(HOST_SECRET), controller).await.unwrap();
            assert_eq!(connected.queues().len(), 2);
            let (_, client) = open(&connected).await;
            client.write(0, &[1; 512], false).await.unwrap();
        }
        let refused = |end| Err(ConnectError::Authentication(end));
        let wrong = connect(&site, Some(OTHER_SECRET), None).await.map(drop);
        assert_eq!(
            wrong,
            refused(AuthFailure::RefusedByPeer(FailureExplanation::AuthenticationFailed))
        );
        let impostor = connect(&site, Some(HOST_SECRET), Some(OTHER_SECRET)).await.map(drop);
        assert_eq!(
            impostor,
            refused(AuthFailure::Refused(FailureExplanation::AuthenticationFailed))
        );
        let none = connect(&site, None, None).await.map(drop);
        assert_eq!(none, Err(ConnectError::SecretMissing));
    });
}

/// Who has a secret of the controller wants to see it proved.
#[test]
fn a_controller_that_proves_nothing_is_refused() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 14).await;
        let unproved = connect(&site, Some(HOST_SECRET), Some(CONTROLLER_SECRET)).await.map(drop);
        assert_eq!(unproved, Err(ConnectError::ControllerNotAuthenticated));
        assert!(ConnectError::ControllerNotAuthenticated.is_final());
        connect(&site, Some(HOST_SECRET), None).await.unwrap();
    });
}
