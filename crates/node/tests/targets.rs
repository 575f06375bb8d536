//! What initiators find at a target while its volumes come, go and change (RFD 0017).

#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

mod common;

use std::net::SocketAddr;

use api::Protocols;
use api::client::Client;
use api::endpoint::*;
use common::{ask, name, show, start};
use probe::iscsi::{Refused, Session};

const HOST: &str = "iqn.2026-01.com.example:host";
const NOT_SUPPORTED: [u8; 3] = [5, 0x25, 0];

fn target(volume: &str) -> String {
    format!("iqn.2026-01.io.windrose:{volume}")
}

async fn make(client: &Client, volume: &str) {
    let ask = ask(&format!(r#"{{"name":"{volume}","size_bytes":1048576,"allow":["{HOST}"]}}"#));
    client.call::<PostVolume>(&ask).await.unwrap();
}

/// A session, and TEST UNIT READY through it. The initiator blocks: it has a thread of its own.
struct Host(Option<Session>);

impl Host {
    async fn log_in(at: SocketAddr, volume: &str, lun: u8) -> std::io::Result<Self> {
        let target = target(volume);
        let login = move || Session::login(at, HOST, &target, lun, u32::from(lun) + 1);
        Ok(Self(Some(tokio::task::spawn_blocking(login).await.unwrap()?)))
    }

    /// Sense key, code and qualifier, or none if the unit is ready. What changed is told first: that is skipped.
    async fn ready(&mut self) -> Option<[u8; 3]> {
        let mut session = self.0.take().unwrap();
        let (session, sense) = tokio::task::spawn_blocking(move || {
            loop {
                let ended = session.good(&[0; 16], &[], &mut []);
                let refused = ended.err().map(|e| Refused::of(&e).expect("the session stands"));
                if refused.is_none_or(|r| !r.is_unit_attention()) {
                    return (session, refused.map(|r| r.sense));
                }
            }
        })
        .await
        .unwrap();
        self.0 = Some(session);
        sense
    }
}

/// RFD 0017, 2: whichever way a volume is taken away, sessions hear that it is gone.
#[tokio::test]
async fn sessions_hear_that_a_volume_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let at = node.portals().iscsi[0];
    make(&client, "a").await;
    let mut host = Host::log_in(at, "a", 0).await.unwrap();
    assert_eq!(host.ready().await, None);

    let (nvme, both) = (Protocols { iscsi: false, nvme: true }, Protocols::default());
    client.call_on::<SetProtocols>(&name("a"), &[], &nvme).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    assert!(Host::log_in(at, "a", 0).await.is_err(), "nobody new comes in");
    assert_eq!(show(&client, "a").await.unwrap().sessions, 0, "such a session is no use of it");
    client.call_on::<SetProtocols>(&name("a"), &[], &both).await.unwrap();
    assert_eq!(host.ready().await, None, "it is back");

    let initiators = api::Initiators { initiators: vec![HOST.parse().unwrap()] };
    client.call_on::<DenyInitiators>(&name("a"), &[], &initiators).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    client.call_on::<AllowInitiators>(&name("a"), &[], &initiators).await.unwrap();
    assert_eq!(host.ready().await, None);

    let refused = client.call_on::<DeleteVolume>(&name("a"), &[], &Nothing).await;
    assert!(refused.is_err(), "it is in use");
    client.call_on::<DeleteVolume>(&name("a"), &[FORCE], &Nothing).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    assert!(Host::log_in(at, "a", 0).await.is_err());
    assert!(node.stop().await.clean);
}
