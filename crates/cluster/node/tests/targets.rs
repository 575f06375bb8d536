//! What initiators see of a target while its volumes are created, changed and deleted (RFD 0017).

use std::net::SocketAddr;

use crate::common::{DHCHAP, KEYS, ask, name, show, start};
use api::client::{CallError, Client};
use api::endpoint::*;
use api::{ApiError, ErrorCode, MapVolume, Protocols, TargetLun, Volume};
use probe::iscsi::{ScsiFailure, Session};

const HOST: &str = "iqn.2026-01.com.example:host";
const NOT_SUPPORTED: [u8; 3] = [5, 0x25, 0];

fn target(volume: &str) -> String {
    format!("iqn.2026-01.io.windrose:{volume}")
}

async fn make(client: &Client, volume: &str) {
    let ask = ask(&format!(r#"{{"name":"{volume}","size_bytes":1048576,"allow":["{HOST}"]}}"#));
    client.call::<CreateVolume>(&ask).await.unwrap();
}

/// A session that can send TEST UNIT READY. The initiator blocks, so it runs on its own thread.
struct Host(Option<Session>);

impl Host {
    async fn log_in(at: SocketAddr, volume: &str, lun: u8) -> std::io::Result<Self> {
        let target = target(volume);
        let login = move || Session::login(at, HOST, &target, lun, u32::from(lun) + 1);
        Ok(Self(Some(tokio::task::spawn_blocking(login).await.unwrap()?)))
    }

    /// Sense key, code and qualifier; `None` if the unit is ready. Skips unit attentions.
    async fn ready(&mut self) -> Option<[u8; 3]> {
        let mut session = self.0.take().unwrap();
        let (session, sense) = tokio::task::spawn_blocking(move || {
            loop {
                let ended = session.execute(&[0; 16], &[], &mut []);
                let refused = ended
                    .err()
                    .map(|e| ScsiFailure::from_io_error(&e).expect("the session stands"));
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

/// RFD 0017, 2: however a volume goes away, its sessions learn of it.
#[tokio::test]
async fn sessions_hear_that_a_volume_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let at = node.portals().iscsi[0];
    make(&client, "a").await;
    let mut host = Host::log_in(at, "a", 0).await.unwrap();
    assert_eq!(host.ready().await, None);

    let (nvme, both) = (Protocols { iscsi: false, ..Protocols::default() }, Protocols::default());
    client.call_on::<SetProtocols>(&name("a"), &[], &nvme).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    assert!(Host::log_in(at, "a", 0).await.is_err(), "no new session begins");
    assert_eq!(show(&client, "a").await.unwrap().sessions, 0, "such a session is no use of it");
    client.call_on::<SetProtocols>(&name("a"), &[], &both).await.unwrap();
    assert_eq!(host.ready().await, None, "it is back");

    let initiators = api::InitiatorList { initiators: vec![HOST.parse().unwrap()] };
    client.call_on::<DenyInitiators>(&name("a"), &[], &initiators).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    client.call_on::<AllowInitiators>(&name("a"), &[], &initiators).await.unwrap();
    assert_eq!(host.ready().await, None);

    let refused = client.call_on::<DeleteVolume>(&name("a"), &[], &NoBody).await;
    assert!(refused.is_err(), "it is in use");
    client.call_on::<DeleteVolume>(&name("a"), &[DELETE_FORCE], &NoBody).await.unwrap();
    assert_eq!(host.ready().await, Some(NOT_SUPPORTED));
    assert!(Host::log_in(at, "a", 0).await.is_err());
    assert!(node.stop().await.clean);
}

async fn map(
    client: &Client,
    volume: &str,
    target: Option<&str>,
    lun: Option<u16>,
) -> Result<Volume, ApiError> {
    map_with(client, volume, target, lun, &[]).await
}

async fn map_with(
    client: &Client,
    volume: &str,
    target: Option<&str>,
    lun: Option<u16>,
    flags: &[QueryFlag],
) -> Result<Volume, ApiError> {
    let ask = MapVolume { target: target.map(str::to_owned), lun };
    match client.call_on::<MapTarget>(&name(volume), flags, &ask).await {
        Ok(volume) => Ok(volume),
        Err(CallError::Refused(e)) => Err(e),
        Err(e) => panic!("{e}"),
    }
}

/// RFD 0017, 3: volumes are mapped to a target in use and unmapped; initiators of both see what
/// they should.
#[tokio::test]
async fn volumes_share_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let at = node.portals().iscsi[0];
    for volume in ["a", "b", "c"] {
        make(&client, volume).await;
    }
    let mut a = Host::log_in(at, "a", 0).await.unwrap();
    let mut b = Host::log_in(at, "b", 0).await.unwrap();
    let refused = map(&client, "b", Some("a"), Some(1)).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::InUse, "{refused}");
    let joined = map_with(&client, "b", Some("a"), Some(1), &[MAP_FORCE]).await.unwrap();
    let iscsi = joined.iscsi.unwrap();
    assert_eq!((iscsi.target, iscsi.lun, iscsi.owner), (target("a"), 1, name("a")));
    assert_eq!(iscsi.other_luns, [TargetLun { lun: 0, volume: name("a") }]);
    assert_eq!(b.ready().await, Some(NOT_SUPPORTED), "it is gone where it was");
    assert_eq!(a.ready().await, None);
    let b = Host::log_in(at, "a", 1).await.unwrap();
    let sessions = client.call::<ListSessions>(&NoBody).await.unwrap().sessions;
    let both = sessions.iter().filter(|s| s.volumes == [name("a"), name("b")]);
    assert_eq!(both.count(), 1, "{sessions:?}");

    let taken = map(&client, "c", Some(&target("a")), Some(1)).await.unwrap_err();
    assert_eq!(
        (taken.code, taken.message.as_str()),
        (ErrorCode::Conflict, "LUN 1 of that target is volume b")
    );
    let beyond = map(&client, "c", Some("a"), Some(256)).await.unwrap_err();
    assert_eq!(beyond.code, ErrorCode::InvalidRequest);
    let nowhere = map(&client, "c", Some("x"), None).await.unwrap_err();
    assert_eq!(nowhere.code, ErrorCode::NotFound);
    // A volume that shares another target stands for that target.
    assert_eq!(map(&client, "c", Some("b"), None).await.unwrap().iscsi.unwrap().lun, 2);
    map_with(&client, "a", Some("c"), None, &[]).await.expect("there it is already");
    make(&client, "d").await;
    let owner = map_with(&client, "a", Some("d"), None, &[MAP_FORCE]).await.unwrap_err();
    assert!(owner.message.contains("other volumes use"), "{owner}");
    let deleted = client.call_on::<DeleteVolume>(&name("a"), &[DELETE_FORCE], &NoBody).await;
    assert!(deleted.unwrap_err().to_string().contains("b, c"));
    assert!(node.stop().await.clean);
    drop((a, b));

    let (node, client) = start(dir.path(), "").await;
    let at = node.portals().iscsi[0];
    let mut b = Host::log_in(at, "a", 1).await.unwrap();
    let mut c = Host::log_in(at, "a", 2).await.unwrap();
    assert_eq!(b.ready().await, None, "after a restart too");
    let own = map_with(&client, "b", Some("b"), None, &[MAP_FORCE]).await.unwrap();
    let iscsi = own.iscsi.unwrap();
    assert_eq!((iscsi.target, iscsi.lun, iscsi.other_luns), (target("b"), 0, vec![]));
    assert_eq!(b.ready().await, Some(NOT_SUPPORTED));
    assert_eq!(Host::log_in(at, "b", 0).await.unwrap().ready().await, None);
    client.call_on::<DeleteVolume>(&name("c"), &[DELETE_FORCE], &NoBody).await.unwrap();
    assert_eq!(c.ready().await, Some(NOT_SUPPORTED));
    drop((b, c));
    client.call_on::<DeleteVolume>(&name("a"), &[DELETE_FORCE], &NoBody).await.unwrap();
    assert!(node.stop().await.clean);
}

/// RFD 0017, 3: each volume has its own LUN mask.
#[tokio::test]
async fn an_initiator_sees_the_units_that_it_is_allowed_to() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let at = node.portals().iscsi[0];
    make(&client, "a").await;
    make(&client, "b").await;
    map(&client, "b", Some("a"), Some(1)).await.unwrap();
    let initiators = api::InitiatorList { initiators: vec![HOST.parse().unwrap()] };
    client.call_on::<DenyInitiators>(&name("a"), &[], &initiators).await.unwrap();
    let mut b = Host::log_in(at, "a", 1).await.expect("one of them is enough");
    assert_eq!(b.ready().await, None);
    assert!(Host::log_in(at, "a", 0).await.is_err());
    client.call_on::<DenyInitiators>(&name("b"), &[], &initiators).await.unwrap();
    assert_eq!(b.ready().await, Some(NOT_SUPPORTED));
    drop(b);
    let chap = r#"{"user":"u","secret":"0123456789ab"}"#;
    let chap: api::Chap = serde_json::from_str(chap).unwrap();
    let refused = client.call_on::<SetChap>(&name("b"), &[], &chap).await.unwrap_err();
    assert!(refused.to_string().contains("uses the target of volume a"), "{refused}");
    let guarded = client.call_on::<SetChap>(&name("a"), &[], &chap).await.unwrap();
    let user = guarded.access.chap_user;
    assert_eq!(show(&client, "b").await.unwrap().access.chap_user, user, "it is guarded too");
    let any = api::InitiatorList { initiators: vec!["any".parse().unwrap()] };
    let refused = client.call_on::<AllowInitiators>(&name("b"), &[], &any).await.unwrap_err();
    assert!(refused.to_string().contains("CHAP is for iSCSI only"), "{refused}");
    assert!(node.stop().await.clean);
}

/// RFD 0020, 2: the hosts' secrets of a subsystem are its owner's.
#[tokio::test]
async fn secrets_of_hosts_are_those_of_the_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    for volume in ["a", "b", "c"] {
        make(&client, volume).await;
    }
    map(&client, "b", Some("a"), Some(1)).await.unwrap();
    let host = "nqn.2014-08.org.nvmexpress:h";
    let ask = |secrets| -> api::HostDhchap {
        let ask = serde_json::json!({ "host": host, "secrets": secrets });
        serde_json::from_value(ask).unwrap()
    };
    let secret = ask(Some(serde_json::json!({ "secret": DHCHAP[0] })));
    let set = async |volume| client.call_on::<SetHostDhchap>(&name(volume), &[], &secret).await;
    let refused = set("b").await.unwrap_err().to_string();
    assert!(refused.contains("uses the subsystem of volume a"), "{refused}");
    client.call_on::<SetHostDhchap>(&name("b"), &[], &ask(None)).await.unwrap();

    let any = api::InitiatorList { initiators: vec!["any".parse().unwrap()] };
    client.call_on::<AllowInitiators>(&name("b"), &[], &any).await.unwrap();
    let refused = set("a").await.unwrap_err().to_string();
    assert!(
        refused.contains("volume b: ") && refused.contains("without authentication"),
        "{refused}"
    );
    client.call_on::<DenyInitiators>(&name("b"), &[], &any).await.unwrap();
    let guarded = set("a").await.unwrap().access.dhchap_hosts;
    assert_eq!(guarded.len(), 1);
    assert_eq!(show(&client, "b").await.unwrap().access.dhchap_hosts, guarded);
    let refused = client.call_on::<AllowInitiators>(&name("b"), &[], &any).await.unwrap_err();
    assert!(refused.to_string().contains("without authentication"), "{refused}");

    client.call_on::<AllowInitiators>(&name("c"), &[], &any).await.unwrap();
    let refused = map(&client, "c", Some("a"), None).await.unwrap_err();
    assert!(refused.message.contains("without authentication"), "{refused}");
    client.call_on::<DenyInitiators>(&name("c"), &[], &any).await.unwrap();
    set("c").await.unwrap();
    let refused = map(&client, "c", Some("a"), None).await.unwrap_err();
    assert!(refused.message.contains("has NVMe host secrets of its own"), "{refused}");
    assert!(refused.hint.unwrap().contains("windrose volume dhchap c"));
    client.call_on::<SetHostDhchap>(&name("c"), &[], &ask(None)).await.unwrap();
    map(&client, "c", Some("a"), None).await.unwrap();
    assert_eq!(show(&client, "c").await.unwrap().access.dhchap_hosts, guarded);
    assert!(node.stop().await.clean);
}

/// RFD 0022, 3: the TLS keys of a subsystem are its owner's.
#[tokio::test]
async fn keys_of_hosts_are_those_of_the_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    for volume in ["a", "b", "c"] {
        make(&client, volume).await;
    }
    map(&client, "b", Some("a"), Some(1)).await.unwrap();
    let host = "nqn.2014-08.org.nvmexpress:h";
    let set = async |volume, required: Option<bool>| {
        let key = required.map(|r| serde_json::json!({ "key": KEYS[0], "required": r }));
        let ask = serde_json::json!({ "host": host, "key": key });
        let ask: api::HostTls = serde_json::from_value(ask).unwrap();
        client.call_on::<SetHostTls>(&name(volume), &[], &ask).await
    };
    for required in [true, false] {
        let Err(CallError::Refused(refused)) = set("b", Some(required)).await else {
            panic!("it is refused")
        };
        let message = &refused.message;
        assert!(message.contains("uses the subsystem of volume a"), "{refused}");
        assert!(refused.hint.unwrap().contains("windrose volume tls a"));
    }
    set("b", None).await.unwrap();

    let any = api::InitiatorList { initiators: vec!["any".parse().unwrap()] };
    client.call_on::<AllowInitiators>(&name("b"), &[], &any).await.unwrap();
    let refused = set("a", Some(true)).await.unwrap_err().to_string();
    assert!(refused.contains("volume b: ") && refused.contains("must use TLS"), "{refused}");
    set("a", Some(false)).await.expect("a host with another name does not get more");
    client.call_on::<DenyInitiators>(&name("b"), &[], &any).await.unwrap();
    let keys = set("a", Some(true)).await.unwrap().access.tls_hosts;
    assert_eq!(keys.iter().map(|h| h.required).collect::<Vec<_>>(), [true]);
    assert_eq!(show(&client, "b").await.unwrap().access.tls_hosts, keys);
    let refused = client.call_on::<AllowInitiators>(&name("b"), &[], &any).await.unwrap_err();
    assert!(refused.to_string().contains("must use TLS"), "{refused}");

    client.call_on::<AllowInitiators>(&name("c"), &[], &any).await.unwrap();
    let refused = map(&client, "c", Some("a"), None).await.unwrap_err();
    assert!(refused.message.contains("must use TLS"), "{refused}");
    client.call_on::<DenyInitiators>(&name("c"), &[], &any).await.unwrap();
    set("c", Some(false)).await.unwrap();
    let refused = map(&client, "c", Some("a"), None).await.unwrap_err();
    assert!(refused.message.contains("has NVMe TLS keys of its own"), "{refused}");
    assert!(refused.hint.unwrap().contains("windrose volume tls c"));
    set("c", None).await.unwrap();
    map(&client, "c", Some("a"), None).await.unwrap();
    assert_eq!(show(&client, "c").await.unwrap().access.tls_hosts, keys);
    assert!(node.stop().await.clean);
}

/// Concurrent requests never get the same LUN.
#[tokio::test]
async fn two_volumes_do_not_get_one_number() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    for volume in ["a", "b", "c"] {
        make(&client, volume).await;
    }
    for lun in 1..5 {
        let (b, c) = tokio::join!(
            map(&client, "b", Some("a"), Some(lun)),
            map(&client, "c", Some("a"), Some(lun))
        );
        assert!(b.is_ok() != c.is_ok(), "{b:?} {c:?}");
        let others = show(&client, "a").await.unwrap().iscsi.unwrap().other_luns;
        assert_eq!(others.iter().filter(|unit| unit.lun == lun).count(), 1);
    }
    assert!(node.stop().await.clean);
}
