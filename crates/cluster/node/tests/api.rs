//! The API as a client sees it: what it does, what it refuses and how it says so.

use std::time::Duration;

use crate::common::{DHCHAP, KEYS, ask, create, files, name, refusal, show, start};
use api::client::{CallError, Client};
use api::endpoint::*;
use api::{
    ApiError, DhchapHost, ErrorCode, GrowVolumeRequest, HostDhchap, HostTls, InitiatorList,
    JoinClusterRequest, NodeRole, Protocols, TlsHost, Verdict, VolumeState,
};
use cluster::join_token::{JoinToken, ShortId, TokenSecret, TrustAnchor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

async fn allow(client: &Client, volume: &str, who: &[&str]) -> Result<api::Volume, CallError> {
    let initiators = InitiatorList { initiators: who.iter().map(|s| s.parse().unwrap()).collect() };
    client.call_on::<AllowInitiators>(&name(volume), &[], &initiators).await
}

#[tokio::test]
async fn a_volume_lives_its_life() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let made = create(&client, "web").await;
    assert_eq!(made.state, VolumeState::Online);
    assert!(made.access.initiators.is_empty(), "no initiator may reach a new volume");
    let iscsi = made.iscsi.as_ref().unwrap();
    assert_eq!(iscsi.target, "iqn.2026-01.io.windrose:web");
    assert_eq!(iscsi.portals, [node.portals().iscsi[0].to_string()]);
    assert_eq!(files(dir.path()), [format!("web-{}.img", made.id)]);

    let host = "nqn.2014-08.org.nvmexpress:uuid:1";
    let allowed = allow(&client, "web", &["iqn.1993-08.org.debian:01:A", host]).await.unwrap();
    let shown: Vec<_> = allowed.access.initiators.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["iqn.1993-08.org.debian:01:a", host]);
    let catalog_volume = show(&client, "web").await.unwrap();
    assert_eq!(catalog_volume.access, allowed.access);
    let deny = InitiatorList { initiators: vec![host.parse().unwrap()] };
    let denied = client.call_on::<DenyInitiators>(&name("web"), &[], &deny).await.unwrap();
    assert_eq!(denied.access.initiators.len(), 1);

    let nvme_only = Protocols { iscsi: false, ..Protocols::default() };
    let changed = client.call_on::<SetProtocols>(&name("web"), &[], &nvme_only).await.unwrap();
    assert!(changed.iscsi.is_none() && changed.nvme.is_some());

    let grow = GrowVolumeRequest { size_bytes: 8 << 20 };
    let grown = client.call_on::<GrowVolume>(&name("web"), &[], &grow).await.unwrap();
    assert_eq!(grown.size_bytes, 8 << 20);
    let smaller = GrowVolumeRequest { size_bytes: 4 << 20 };
    let refused = refusal(client.call_on::<GrowVolume>(&name("web"), &[], &smaller).await);
    assert_eq!(refused.code, ErrorCode::InvalidRequest);
    assert!(refused.message.contains("cannot be made smaller"), "{refused}");

    client.call_on::<DeleteVolume>(&name("web"), &[], &NoBody).await.unwrap();
    assert!(files(dir.path()).is_empty());
    assert_eq!(show(&client, "web").await, None);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn everything_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let chap = r#"{"name":"a","size_bytes":1048576,"block_size":4096,"allow":["iqn.2001-04.com.example:x"],
        "chap":{"user":"u","secret":"0123456789ab","mutual":{"user":"m","secret":"ba9876543210"}}}"#;
    client.call::<CreateVolume>(&ask(chap)).await.unwrap();
    create(&client, "b").await;
    let grow = GrowVolumeRequest { size_bytes: 16 << 20 };
    client.call_on::<GrowVolume>(&name("b"), &[], &grow).await.unwrap();
    let before = [show(&client, "a").await, show(&client, "b").await];
    assert!(node.stop().await.clean);
    assert!(!dir.path().join("api.sock").exists());
    let (node, client) = start(dir.path(), "").await;
    for (before, volume) in before.into_iter().zip(["a", "b"]) {
        let mut after = show(&client, volume).await.unwrap();
        let before = before.unwrap();
        // The system chooses new ports each time.
        after.iscsi.as_mut().unwrap().portals = before.iscsi.as_ref().unwrap().portals.clone();
        after.nvme.as_mut().unwrap().portals = before.nvme.as_ref().unwrap().portals.clone();
        assert_eq!(after, before);
    }
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn creating_twice_is_creating_once() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let both = tokio::join!(create(&client, "a"), create(&client, "a"));
    assert_eq!(both.0.id, both.1.id);
    assert_eq!(create(&client, "a").await.id, both.0.id);
    let other = ask(r#"{"name":"a","size_bytes":4194304,"block_size":4096}"#);
    let refused = refusal(client.call::<CreateVolume>(&other).await);
    assert_eq!(refused.code, ErrorCode::Exists);
    assert_eq!(refused.message, "volume a exists with another block size (512 bytes)");
    assert_eq!(files(dir.path()).len(), 1);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn secrets_go_in_and_never_come_out() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let chap =
        r#"{"user":"u","secret":"hush-hush-hush","mutual":{"user":"m","secret":"hush-hush-back"}}"#;
    let chap = serde_json::from_str(chap).unwrap();
    let volume = client.call_on::<SetChap>(&name("a"), &[], &chap).await.unwrap();
    assert_eq!(volume.access.chap_user.unwrap().as_str(), "u");
    assert_eq!(volume.access.chap_mutual_user.unwrap().as_str(), "m");
    for path in ["/v1/volumes", "/v1/volumes/a", "/v1/status", "/v1/sessions", "/metrics"] {
        let text = client.text(path).await.unwrap();
        assert!(!text.contains("hush"), "{path}");
    }
    let refused = refusal(allow(&client, "a", &["any"]).await);
    assert!(refused.message.contains("CHAP is for iSCSI only"), "{refused}");
    let cleared = client.call_on::<ClearChap>(&name("a"), &[], &NoBody).await.unwrap();
    assert_eq!(cleared.access.chap_user, None);
    assert!(node.stop().await.clean);
}

async fn ask_host(client: &Client, volume: &str, ask: &str) -> Result<api::Volume, CallError> {
    let ask: HostDhchap = serde_json::from_str(ask).unwrap();
    client.call_on::<SetHostDhchap>(&name(volume), &[], &ask).await
}

/// RFD 0020, 2.
#[tokio::test]
async fn a_host_is_asked_for_a_secret() {
    const HOSTS: [&str; 2] = ["nqn.2014-08.org.nvmexpress:uuid:b", "nqn.2014-08.org.nvmexpress:a"];
    let [secret, back] = DHCHAP;
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let [b, a] = HOSTS;
    let both = format!(
        r#"{{"host":"{b}","secrets":{{"secret":"{secret}","controller_secret":"{back}"}}}}"#
    );
    let one = format!(r#"{{"host":"{a}","secrets":{{"secret":"{back}"}}}}"#);
    ask_host(&client, "a", &both).await.unwrap();
    let shown = ask_host(&client, "a", &one).await.unwrap();
    let host = |host: &str, mutual| DhchapHost { host: host.parse().unwrap(), mutual };
    assert_eq!(shown.access.dhchap_hosts, [host(a, false), host(b, true)], "by name");
    for path in ["/v1/volumes", "/v1/volumes/a", "/v1/status", "/v1/sessions", "/metrics"] {
        assert!(!client.text(path).await.unwrap().contains("DHHC"), "{path}");
    }
    let refused = refusal(allow(&client, "a", &["any"]).await);
    assert!(refused.message.contains("without authentication"), "{refused}");
    assert!(node.stop().await.clean);

    let (node, client) = start(dir.path(), "").await;
    assert_eq!(show(&client, "a").await.unwrap().access, shown.access, "after a restart, too");
    let shown = ask_host(&client, "a", &format!(r#"{{"host":"{b}"}}"#)).await.unwrap();
    assert_eq!(shown.access.dhchap_hosts, [host(a, false)]);
    let again = ask_host(&client, "a", &format!(r#"{{"host":"{b}","secrets":null}}"#)).await;
    assert_eq!(again.unwrap().access, shown.access, "nothing to turn off is no fault");
    ask_host(&client, "a", &format!(r#"{{"host":"{a}"}}"#)).await.unwrap();
    allow(&client, "a", &["any"]).await.unwrap();
    let refused = refusal(ask_host(&client, "a", &one).await);
    assert!(refused.message.contains("without authentication"), "{refused}");
    let iscsi_only = Protocols { nvme: false, ..Protocols::default() };
    client.call_on::<SetProtocols>(&name("a"), &[], &iscsi_only).await.unwrap();
    ask_host(&client, "a", &one).await.unwrap();
    let nvme = client.call_on::<SetProtocols>(&name("a"), &[], &Protocols::default()).await;
    assert!(refusal(nvme).message.contains("without authentication"));
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_secret_that_is_none_is_refused_without_showing_it() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let [good, other] = DHCHAP;
    let mistyped = good.replace("oZ:", "oa:");
    for (bad, why) in [
        ("hush-hush", "has the form DHHC-1:hh:BASE64:"),
        ("DHHC-1:04:hush:", "transformed by"),
        ("DHHC-1:01:hush-hush:", "not Base64"),
        ("DHHC-1:01:aHVzaA==:", "32, 48 or 64 bytes"),
        (&*mistyped, "mistyped"),
    ] {
        let host =
            format!(r#"{{"host":"nqn.2014-08.org.nvmexpress:h","secrets":{{"secret":"{bad}"}}}}"#);
        let refused = refusal(ask_host(&client, "a", &host).await);
        assert_eq!(refused.code, ErrorCode::InvalidRequest);
        assert!(refused.message.starts_with("the secret of the host is invalid"), "{refused}");
        assert!(refused.message.contains(why) && !refused.message.contains(bad), "{refused}");
        let controller = format!(
            r#"{{"host":"nqn.2014-08.org.nvmexpress:h",
                "secrets":{{"secret":"{other}","controller_secret":"{bad}"}}}}"#
        );
        let refused = refusal(ask_host(&client, "a", &controller).await);
        let whose = "the secret of the controller is invalid";
        assert!(refused.message.starts_with(whose) && !refused.message.contains(bad), "{refused}");
    }
    for other in ["any", "iqn.2001-04.com.example:x"] {
        let secret = format!(r#"{{"host":"{other}","secrets":{{"secret":"{good}"}}}}"#);
        for ask in [secret, format!(r#"{{"host":"{other}"}}"#)] {
            let refused = refusal(ask_host(&client, "a", &ask).await);
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert!(refused.message.contains("not the name of one NVMe host"), "{refused}");
        }
    }
    assert!(show(&client, "a").await.unwrap().access.dhchap_hosts.is_empty());
    assert!(node.stop().await.clean);
}

async fn ask_tls(client: &Client, volume: &str, ask: &str) -> Result<api::Volume, CallError> {
    let ask: HostTls = serde_json::from_str(ask).unwrap();
    client.call_on::<SetHostTls>(&name(volume), &[], &ask).await
}

/// RFD 0022, 3.
#[tokio::test]
async fn a_host_has_a_key_of_tls() {
    const HOSTS: [&str; 2] = ["nqn.2014-08.org.nvmexpress:uuid:b", "nqn.2014-08.org.nvmexpress:a"];
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let [b, a] = HOSTS;
    let key = |host: &str, key: &str, more: &str| {
        format!(r#"{{"host":"{host}","key":{{"key":"{key}"{more}}}}}"#)
    };
    let (must, may) = (key(b, KEYS[0], ""), key(a, KEYS[1], r#","required":false"#));
    ask_tls(&client, "a", &must).await.unwrap();
    let shown = ask_tls(&client, "a", &may).await.unwrap();
    let host = |host: &str, required| TlsHost { host: host.parse().unwrap(), required };
    assert_eq!(shown.access.tls_hosts, [host(a, false), host(b, true)], "by name");
    assert!(shown.access.dhchap_hosts.is_empty());
    for path in ["/v1/volumes", "/v1/volumes/a", "/v1/status", "/v1/sessions", "/metrics"] {
        assert!(!client.text(path).await.unwrap().contains("NVMeTLS"), "{path}");
    }
    let refused = refusal(allow(&client, "a", &["any"]).await);
    assert!(refused.message.contains("must use TLS"), "{refused}");
    assert!(node.stop().await.clean);

    let (node, client) = start(dir.path(), "").await;
    assert_eq!(show(&client, "a").await.unwrap().access, shown.access, "after a restart, too");
    let without = format!(r#"{{"host":"{b}"}}"#);
    let shown = ask_tls(&client, "a", &without).await.unwrap();
    assert_eq!(shown.access.tls_hosts, [host(a, false)]);
    let again = ask_tls(&client, "a", &format!(r#"{{"host":"{b}","key":null}}"#)).await;
    assert_eq!(again.unwrap().access, shown.access, "nothing to turn off is no fault");
    allow(&client, "a", &["any"]).await.expect("no host has to come by TLS");
    let refused = refusal(ask_tls(&client, "a", &must).await);
    assert!(refused.message.contains("must use TLS"), "{refused}");
    let refused = refusal(ask_tls(&client, "a", &key(a, KEYS[1], "")).await);
    assert!(refused.message.contains("must use TLS"), "{refused}");
    assert_eq!(show(&client, "a").await.unwrap().access.tls_hosts, [host(a, false)]);
    let iscsi_only = Protocols { nvme: false, ..Protocols::default() };
    client.call_on::<SetProtocols>(&name("a"), &[], &iscsi_only).await.unwrap();
    ask_tls(&client, "a", &must).await.unwrap();
    let nvme = client.call_on::<SetProtocols>(&name("a"), &[], &Protocols::default()).await;
    assert!(refusal(nvme).message.contains("must use TLS"));
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_key_that_is_none_is_refused_without_showing_it() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let mistyped = KEYS[0].replace("rZ:", "rA:");
    for (bad, why) in [
        ("hush-hush", "has the form NVMeTLSkey-1:hh:BASE64:"),
        (DHCHAP[0], "has the form NVMeTLSkey-1:hh:BASE64:"),
        ("NVMeTLSkey-1:04:hush:", "transformed by"),
        ("NVMeTLSkey-1:01:hush-hush:", "not Base64"),
        ("NVMeTLSkey-1:01:aHVzaA==:", "as many bytes as its hash"),
        (&*mistyped, "mistyped"),
    ] {
        let host = "nqn.2014-08.org.nvmexpress:h";
        let ask = format!(r#"{{"host":"{host}","key":{{"key":"{bad}","required":false}}}}"#);
        let refused = refusal(ask_tls(&client, "a", &ask).await);
        assert_eq!(refused.code, ErrorCode::InvalidRequest);
        assert!(refused.message.starts_with("the TLS key of the host is invalid"), "{refused}");
        assert!(refused.message.contains(why) && !refused.message.contains(bad), "{refused}");
    }
    for other in ["any", "iqn.2001-04.com.example:x"] {
        let key = format!(r#"{{"host":"{other}","key":{{"key":"{}"}}}}"#, KEYS[0]);
        for ask in [key, format!(r#"{{"host":"{other}"}}"#)] {
            let refused = refusal(ask_tls(&client, "a", &ask).await);
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert!(refused.message.contains("not the name of one NVMe host"), "{refused}");
            assert!(refused.hint.unwrap().contains("TLS is for NVMe only"));
        }
    }
    assert!(show(&client, "a").await.unwrap().access.tls_hosts.is_empty());
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_broken_volume_is_told_and_does_not_stop_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    assert_eq!(status.verdict, Verdict::Safe);
    let (a, b) = (create(&client, "a").await, create(&client, "b").await);
    assert!(node.stop().await.clean);
    std::fs::remove_file(a.replicas[0].backing.path().unwrap()).unwrap();
    let (node, client) = start(dir.path(), "").await;
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    assert_eq!(status.verdict, Verdict::Unavailable);
    assert_eq!(status.findings[0].subject, "volume a");
    assert!(status.findings[0].message.contains(&a.replicas[0].backing.to_string()));
    assert_eq!((status.volumes.online, status.volumes.offline), (1, 1));
    let VolumeState::Offline { reason } = show(&client, "a").await.unwrap().state else {
        panic!("a volume without a file is offline")
    };
    assert!(reason.contains("no such file"), "{reason}");
    assert_eq!(show(&client, "b").await.unwrap().state, VolumeState::Online);
    assert!(b.replicas[0].backing.path().unwrap().exists());
    // A broken volume can still be deleted.
    client.call_on::<DeleteVolume>(&name("a"), &[], &NoBody).await.unwrap();
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    assert_eq!(status.verdict, Verdict::Safe);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn files_of_others_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "data").unwrap();
    let json = |volume: &str| {
        let path = precious.display();
        format!(
            r#"{{"name":"{volume}","size_bytes":1048576,"backing":{{"kind":"file","path":"{path}"}}}}"#
        )
    };
    let refused = refusal(client.call::<CreateVolume>(&ask(&json("a"))).await);
    assert_eq!(refused.code, ErrorCode::Backing);
    assert!(refused.message.contains("precious"), "{refused}");
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "data");
    assert_eq!(show(&client, "a").await, None, "a refused volume leaves nothing behind");
    std::fs::remove_file(&precious).unwrap();
    client.call::<CreateVolume>(&ask(&json("a"))).await.unwrap();
    let refused = refusal(client.call::<CreateVolume>(&ask(&json("b"))).await);
    assert!(refused.message.contains("belongs to volume a"), "{refused}");
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn what_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "[limits]\nvolumes = 1").await;
    let missing = name("nosuch");
    let refused = refusal(client.call_on::<GetVolume>(&missing, &[], &NoBody).await);
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (ErrorCode::NotFound, "there is no volume nosuch")
    );
    assert!(refused.hint.is_some());
    let deleted = client.call_on::<DeleteVolume>(&missing, &[DELETE_FORCE], &NoBody).await;
    assert_eq!(refusal(deleted).code, ErrorCode::NotFound);
    create(&client, "a").await;
    let refused =
        refusal(client.call::<CreateVolume>(&ask(r#"{"name":"b","size_bytes":1048576}"#)).await);
    assert!(refused.hint.unwrap().contains("limits.volumes"));
    assert!(node.stop().await.clean);
}

/// Request line and body, status, code, text that the message must contain.
const BAD: &[(&str, &str, u16, &str, &str)] = &[
    ("GET /v1/nothing", "", 404, "not_found", "there is no /v1/nothing"),
    ("GET /", "", 404, "not_found", "there is no /"),
    ("PATCH /v1/volumes", "", 405, "method_not_allowed", "does not support PATCH"),
    ("GET /v1/volumes/NO", "", 400, "invalid_request", "not a valid volume name"),
    ("GET /v1/volumes/%ff", "", 400, "invalid_request", "the path"),
    ("GET /v1/volumes/a%2Fb", "", 400, "invalid_request", "not a valid volume name"),
    ("GET /v1/volumes?x=1", "", 400, "invalid_request", "there is no parameter \\\"x\\\""),
    ("DELETE /v1/volumes/a?force=maybe", "", 400, "invalid_request", "true or false"),
    ("POST /v1/volumes", "", 400, "invalid_request", "the body"),
    ("POST /v1/volumes", "{", 400, "invalid_request", "the body"),
    ("POST /v1/volumes", "[]", 400, "invalid_request", "the body"),
    ("POST /v1/volumes", "{} x", 400, "invalid_request", "missing field `name`"),
    ("POST /v1/volumes", r#"{"name":"a"}"#, 400, "invalid_request", "volume a needs a size"),
    (
        "POST /v1/volumes",
        r#"{"name":"a","size_bytes":1}"#,
        400,
        "invalid_request",
        "1 MiB to 256 TiB",
    ),
    ("POST /v1/volumes", r#"{"name":"a","size_bytes":-1}"#, 400, "invalid_request", "size_bytes:"),
    (
        "POST /v1/volumes",
        r#"{"name":"a","size_bytes":1048577}"#,
        400,
        "invalid_request",
        "multiple",
    ),
    ("POST /v1/volumes", r#"{"name":"a","nose":1}"#, 400, "invalid_request", "nose: unknown field"),
    (
        "POST /v1/volumes",
        r#"{"name":"a","size_bytes":1048576,"allow":["any","bob"]}"#,
        400,
        "invalid_request",
        "allow[1]: \\\"bob\\\" is not a valid initiator",
    ),
    (
        "POST /v1/volumes",
        r#"{"name":"a","size_bytes":1048576,"backing":{"kind":"file","path":"x"}}"#,
        400,
        "invalid_request",
        "x is not an absolute path",
    ),
    (
        "PUT /v1/volumes/a/chap",
        r#"{"user":"u","secret":"short"}"#,
        400,
        "invalid_request",
        "12 to 255",
    ),
    (
        "PUT /v1/volumes/a/dhchap",
        r#"{"host":"nqn.2014-08.org.nvmexpress:h","secrets":{"secret":"a b"}}"#,
        400,
        "invalid_request",
        "1 to 255",
    ),
    (
        "PUT /v1/volumes/a/dhchap",
        r#"{"host":"nqn.2014-08.org.nvmexpress:h","secrets":{"secret":"a:","controller_secret":"a"}}"#,
        400,
        "invalid_request",
        "different secrets",
    ),
    ("PUT /v1/volumes/a/dhchap", r#"{"secrets":null}"#, 400, "invalid_request", "host"),
    (
        "PUT /v1/volumes/a/tls",
        r#"{"host":"nqn.2014-08.org.nvmexpress:h","key":{"key":"a b"}}"#,
        400,
        "invalid_request",
        "1 to 255",
    ),
    ("PUT /v1/volumes/a/tls", r#"{"key":null}"#, 400, "invalid_request", "host"),
    (
        "PUT /v1/volumes/a/tls",
        r#"{"host":"nqn.2014-08.org.nvmexpress:h"}"#,
        404,
        "not_found",
        "no volume a",
    ),
    (
        "PUT /v1/volumes/a/dhchap",
        r#"{"host":"nqn.2014-08.org.nvmexpress:h"}"#,
        404,
        "not_found",
        "no volume a",
    ),
    ("POST /v1/volumes/a/grow", r#"{"size_bytes":1048576}"#, 404, "not_found", "no volume a"),
];

#[tokio::test]
async fn refusals_have_one_shape() {
    let dir = tempfile::tempdir().unwrap();
    let (node, _client) = start(dir.path(), "").await;
    for &(line, body, status, code, says) in BAD {
        let answer = raw(dir.path(), line, body).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line} {body}: {answer}");
        let json = answer.split("\r\n\r\n").nth(1).unwrap();
        let error: ApiError = serde_json::from_str(json).expect(json);
        assert_eq!(serde_json::to_value(error.code).unwrap(), code, "{line} {body}");
        assert!(json.contains(says), "{line} {body}: {json}");
    }
    let long = format!("{{\"name\":\"{}\"}}", "x".repeat(600 << 10));
    let answer = raw(dir.path(), "POST /v1/volumes", &long).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(node.stop().await.clean);
}

/// One request, as text.
async fn raw(dir: &std::path::Path, line: &str, body: &str) -> String {
    let mut socket = UnixStream::connect(dir.join("api.sock")).await.unwrap();
    let length = body.len();
    let head = format!(
        "{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    // The server may refuse the request before it has read all of it.
    let _ = socket.write_all(body.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn the_description_and_the_metrics_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "[metrics]\nlisten = \"127.0.0.1:0\"").await;
    assert_eq!(client.text("/v1/openapi.json").await.unwrap(), api::openapi::json());
    create(&client, "a").await;
    let metrics = client.text("/metrics").await.unwrap();
    for line in [
        "windrose_volume_online{volume=\"a\"} 1",
        "windrose_volume_size_bytes{volume=\"a\"} 4194304",
        "windrose_volume_commands_total{volume=\"a\",kind=\"read\"} 0",
        "windrose_memory_bytes{core=\"1\"} 16777216",
        "windrose_verdict 0",
        "# EOF",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
    let health = client.call::<GetHealth>(&NoBody).await.unwrap();
    assert!(health.serving);
    assert!(node.stop().await.clean);
}

/// A token of a cluster whose node accepts connections and soon closes them without an answer.
fn silent_cluster() -> JoinClusterRequest {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let token = JoinToken {
        cluster: uuid::Uuid::nil(),
        id: ShortId(1),
        secret: TokenSecret::new([7; 16]),
        trust_anchor: TrustAnchor::PlainText,
        addresses: vec![silent.local_addr().unwrap()],
    };
    #[expect(clippy::disallowed_methods, reason = "it is no core's")]
    std::thread::spawn(move || {
        for stream in silent.incoming() {
            let mut stream = stream.unwrap();
            // Longer than creating a volume takes.
            stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut rest = Vec::new();
            let _ = std::io::Read::read_to_end(&mut stream, &mut rest);
        }
    });
    JoinClusterRequest { token: token.to_text(), role: NodeRole::Data }
}

#[tokio::test]
async fn no_volume_is_created_while_a_node_joins() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "[cluster]\nlisten = [\"127.0.0.1:7480\"]").await;
    let join = silent_cluster();
    // At the same time, with the creation a little later in each round: before, at and after the
    // start of the join.
    for turn in 0..12_u64 {
        let request = ask(&format!(r#"{{"name":"v{turn}","size_bytes":4194304}}"#));
        let later = async {
            tokio::time::sleep(Duration::from_micros(turn * 700)).await;
            client.call::<CreateVolume>(&request).await
        };
        let (joined, created) = tokio::join!(client.call::<JoinCluster>(&join), later);
        let refused = refusal(joined);
        match created {
            // The join has seen the volume, created or being created.
            Ok(volume) => {
                assert_eq!(refused.code, ErrorCode::Conflict, "{turn}: {refused}");
                client.call_on::<DeleteVolume>(&volume.name, &[], &NoBody).await.unwrap();
            }
            Err(_) => {
                assert_eq!(refused.code, ErrorCode::Unavailable, "{turn}: {refused}");
                let created = refusal(created);
                assert_eq!(created.code, ErrorCode::Conflict, "{turn}: {created}");
                assert!(created.message.contains("join or leave a cluster"), "{created}");
            }
        }
    }
    // After a failed join the node can create volumes.
    create(&client, "web").await;
    assert!(node.stop().await.clean);
}
