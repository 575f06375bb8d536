//! Secrets at rest (RFD 0016): what the disk holds, who can log in, and what the status says if a
//! key is lost.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::common::{DHCHAP, KEYS, ask, create, name, show, start};
use api::client::Client;
use api::endpoint::*;
use api::{HostDhchap, HostTls, InitiatorChap, Severity, Verdict, VolumeState};
use cluster::store::embedded::EmbeddedStore;
use cluster::store::{Change, MetadataStore, Precondition};
use probe::iscsi::{Pdu, connect_with_timeouts, login_request};
use sha2::{Digest, Sha256};

const INITIATOR: &str = "iqn.2001-04.com.example:x";
const PATIENCE: Duration = Duration::from_secs(10);
const SECRET: &str = "hush-hush-hush";

/// Status class and detail of a login (RFC 7143 11.13.5).
type Status = [u8; 2];

const IN: Status = [0, 0];
const NOT_PROVED: Status = [2, 1];
const TARGET_ERROR: Status = [3, 0];

/// Authenticates to a target by CHAP with SHA-256 and `secret`, as in RFC 7143 12.1.3.
fn prove(to: SocketAddr, target: &str, secret: &str) -> Status {
    prove_as(to, target, INITIATOR, ["u", secret]).0
}

/// The same for any initiator, user and secret; returns the connection too.
fn prove_as(
    to: SocketAddr,
    target: &str,
    initiator: &str,
    [user, secret]: [&str; 2],
) -> (Status, TcpStream) {
    let mut stream = connect_with_timeouts(to, PATIENCE).unwrap();
    let mut ask = |flags: u8, pairs: &[(&str, &str)]| {
        use std::io::Write;
        let text: Vec<u8> =
            pairs.iter().flat_map(|(k, v)| format!("{k}={v}\0").into_bytes()).collect();
        let mut request = login_request(&text, 1);
        request.header[1] = flags;
        stream.write_all(&request.to_bytes()).unwrap();
        Pdu::receive(&mut stream).unwrap()
    };
    let status = |answer: &Pdu| [answer.header[36], answer.header[37]];
    let names = [
        ("InitiatorName", initiator),
        ("SessionType", "Normal"),
        ("TargetName", target),
        ("AuthMethod", "CHAP"),
    ];
    let answer = ask(0, &names);
    if status(&answer) != IN {
        return (status(&answer), stream);
    }
    let answer = ask(0, &[("CHAP_A", "7")]);
    let text = String::from_utf8(answer.data).unwrap();
    let value = |key: &str| text.split('\0').find_map(|p| p.strip_prefix(key)).unwrap();
    let id: u8 = value("CHAP_I=").parse().unwrap();
    let hex = value("CHAP_C=0x");
    let challenge: Vec<u8> = (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
        .collect();
    let hash = Sha256::new().chain_update([id]).chain_update(secret).chain_update(challenge);
    let proof = hash.finalize().iter().fold("0x".to_owned(), |h, b| format!("{h}{b:02x}"));
    let status = status(&ask(0x83, &[("CHAP_N", user), ("CHAP_R", &proof)]));
    (status, stream)
}

async fn proves(client: &Client, volume: &str, secret: &'static str) -> Status {
    let shown = show(client, volume).await.unwrap();
    let iscsi = shown.iscsi.unwrap();
    let to = iscsi.portals[0].parse().unwrap();
    tokio::task::spawn_blocking(move || prove(to, &iscsi.target, secret)).await.unwrap()
}

async fn create_guarded(client: &Client, volume: &str) {
    let json = format!(
        r#"{{"name":"{volume}","size_bytes":4194304,"allow":["{INITIATOR}"],
            "chap":{{"user":"u","secret":"{SECRET}","mutual":{{"user":"m","secret":"hush-hush-back"}}}}}}"#
    );
    client.call::<CreateVolume>(&ask(&json)).await.unwrap();
}

async fn set_again(client: &Client, volume: &str) {
    let chap = format!(r#"{{"user":"u","secret":"{SECRET}"}}"#);
    let chap = serde_json::from_str(&chap).unwrap();
    client.call_on::<SetChap>(&name(volume), &[], &chap).await.unwrap();
}

/// The critical findings of the status.
async fn critical(client: &Client) -> Vec<(String, String)> {
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    let critical = status.findings.into_iter().filter(|f| f.severity == Severity::Critical);
    critical
        .map(|f| (f.subject, format!("{}; {}", f.message, f.hint.unwrap_or_default())))
        .collect()
}

/// The stored record of the only volume.
async fn record(dir: &Path) -> (EmbeddedStore, cluster::store::Entry) {
    let store = EmbeddedStore::open(&dir.join("data/store.redb")).unwrap();
    let (mut entries, _) = store.list("volumes/").await.unwrap();
    (store, entries.remove(0))
}

fn key_file(dir: &Path) -> std::path::PathBuf {
    dir.join("data/secrets.key")
}

/// RFD 0016, 6: an initiator with its own secret can log in with that secret only, all others with
/// the common one; changes to one's secret do not affect the others.
#[tokio::test]
async fn an_initiator_has_its_own_secret() {
    const OTHER: &str = "iqn.2001-04.com.example:y";
    const OWN: &str = "hush-hush-own";
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create_guarded(&client, "a").await;
    let initiators = api::InitiatorList { initiators: vec![OTHER.parse().unwrap()] };
    client.call_on::<AllowInitiators>(&name("a"), &[], &initiators).await.unwrap();
    let own = |chap: Option<&str>| InitiatorChap {
        initiator: INITIATOR.parse().unwrap(),
        chap: chap.map(|chap| serde_json::from_str(chap).unwrap()),
    };
    let set = own(Some(&format!(r#"{{"user":"one","secret":"{OWN}"}}"#)));
    let shown = client.call_on::<SetInitiatorChap>(&name("a"), &[], &set).await.unwrap();
    let [user] = &shown.access.chap_initiators[..] else { panic!("{shown:?}") };
    assert_eq!((user.initiator.to_string().as_str(), user.user.as_str()), (INITIATOR, "one"));
    assert!(node.stop().await.clean);
    let store = fs::read(dir.path().join("data/store.redb")).unwrap();
    assert!(!store.windows(9).any(|w| w == b"hush-hush"), "the store shows a secret");

    let (node, client) = start(dir.path(), "").await;
    let iscsi = show(&client, "a").await.unwrap().iscsi.unwrap();
    let to: SocketAddr = iscsi.portals[0].parse().unwrap();
    let log_in = async |who: &'static str, proof: [&'static str; 2]| {
        let target = iscsi.target.clone();
        let login = move || prove_as(to, &target, who, proof);
        tokio::task::spawn_blocking(login).await.unwrap()
    };
    assert_eq!(log_in(INITIATOR, ["u", SECRET]).await.0, NOT_PROVED, "the volume's is not its");
    assert_eq!(log_in(INITIATOR, ["one", SECRET]).await.0, NOT_PROVED);
    assert_eq!(log_in(OTHER, ["one", OWN]).await.0, NOT_PROVED, "nor is its secret another's");
    let (in_by_own, mut one) = log_in(INITIATOR, ["one", OWN]).await;
    let (in_by_all, mut other) = log_in(OTHER, ["u", SECRET]).await;
    assert_eq!((in_by_own, in_by_all), (IN, IN));

    let shown = client.call_on::<SetInitiatorChap>(&name("a"), &[], &own(None)).await.unwrap();
    assert!(shown.access.chap_initiators.is_empty() && shown.access.chap_user.is_some());
    let heard = move || {
        other.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        (Pdu::receive(&mut one).map(|pdu| pdu.opcode()), Pdu::receive(&mut other).is_err())
    };
    let (one, silent) = tokio::task::spawn_blocking(heard).await.unwrap();
    assert_eq!(one.unwrap(), 0x32, "its session is dropped");
    assert!(silent, "and no other");
    assert_eq!(log_in(INITIATOR, ["one", OWN]).await.0, NOT_PROVED);
    assert_eq!(log_in(INITIATOR, ["u", SECRET]).await.0, IN);
    let nvme =
        InitiatorChap { initiator: "nqn.2014-08.org.nvmexpress:h".parse().unwrap(), chap: None };
    let refused = client.call_on::<SetInitiatorChap>(&name("a"), &[], &nvme).await.unwrap_err();
    assert!(refused.to_string().contains("not the name of one iSCSI initiator"), "{refused}");
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn no_file_but_the_key_says_anything() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "plain").await;
    assert!(!key_file(dir.path()).exists(), "no key where there is no secret");
    create_guarded(&client, "a").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    assert_eq!(proves(&client, "a", "another-secret").await, NOT_PROVED);
    create_guarded(&client, "a").await;
    assert!(node.stop().await.clean);
    let mode = fs::metadata(key_file(dir.path())).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let store = fs::read(dir.path().join("data/store.redb")).unwrap();
    let shows = |what: &[u8]| store.windows(what.len()).any(|w| w == what);
    assert!(!shows(b"hush-hush"), "the store shows a secret");
    let key = fs::read_to_string(key_file(dir.path())).unwrap();
    let key = key.lines().last().unwrap();
    assert!(!shows(key.as_bytes()), "the store shows the key");
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN, "it opens after a restart");
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn records_of_older_versions_are_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    common_allow(&client).await;
    assert!(node.stop().await.clean);
    let (store, entry) = record(dir.path()).await;
    let old = String::from_utf8(entry.value).unwrap();
    let chap = format!(r#""chap":{{"user":"u","secret":"{SECRET}","mutual":null}}"#);
    assert!(old.contains(r#""chap":null"#), "{old}");
    let value = Some(old.replace(r#""chap":null"#, &chap).into_bytes());
    let change =
        Change { key: entry.key, precondition: Precondition::AtRevision(entry.revision), value };
    store.commit(vec![change]).await.unwrap();
    drop(store);
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN, "what is not sealed yet is good as well");
    let sealed = async {
        while !key_file(dir.path()).exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, sealed).await.expect("it is sealed soon after the start");
    // Changing the volume waits for the commit that seals.
    common_allow(&client).await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    assert!(node.stop().await.clean);
    let (_store, entry) = record(dir.path()).await;
    let now = String::from_utf8(entry.value).unwrap();
    assert!(now.contains(r#""sealed":"1."#) && !now.contains(SECRET), "{now}");
}

async fn common_allow(client: &Client) {
    let initiators = api::InitiatorList { initiators: vec![INITIATOR.parse().unwrap()] };
    client.call_on::<AllowInitiators>(&name("a"), &[], &initiators).await.unwrap();
}

#[tokio::test]
async fn a_lost_key_is_named_and_locks_nobody_else_out() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create_guarded(&client, "a").await;
    create(&client, "plain").await;
    assert!(node.stop().await.clean);
    let old_keys = fs::read(key_file(dir.path())).unwrap();
    fs::remove_file(key_file(dir.path())).unwrap();

    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, TARGET_ERROR);
    for volume in ["a", "plain"] {
        assert_eq!(show(&client, volume).await.unwrap().state, VolumeState::Online);
    }
    let found = critical(&client).await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, "volume a");
    for part in ["data/secrets.key", "sealed by key", "windrose volume chap a"] {
        assert!(found[0].1.contains(part), "{found:?}");
    }
    assert!(!key_file(dir.path()).exists(), "no other key comes in its place by itself");
    set_again(&client, "a").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN, "set again, it is good");
    let status = client.call::<GetStatus>(&NoBody).await.unwrap();
    assert_eq!(status.verdict, Verdict::Safe);
    assert!(node.stop().await.clean);

    // The old key was found: it follows the current key in the file.
    let mut both = fs::read(key_file(dir.path())).unwrap();
    both.extend(old_keys);
    fs::write(key_file(dir.path()), both).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_file_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create_guarded(&client, "a").await;
    assert!(node.stop().await.clean);
    let good = fs::read_to_string(key_file(dir.path())).unwrap();
    let set = |text: &str, mode: u32| {
        fs::write(key_file(dir.path()), text).unwrap();
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(key_file(dir.path()), mode).unwrap();
    };
    for (text, mode, why) in
        [(&*good, 0o644, "chmod 600"), ("garbage\n", 0o600, "line 1 is not a key")]
    {
        set(text, mode);
        let (node, client) = start(dir.path(), "").await;
        assert_eq!(proves(&client, "a", SECRET).await, TARGET_ERROR);
        let found = critical(&client).await;
        assert!(found[0].1.contains("secrets.key") && found[0].1.contains(why), "{found:?}");
        let chap = serde_json::from_str(r#"{"user":"u","secret":"0123456789ab"}"#).unwrap();
        let refused = client.call_on::<SetChap>(&name("a"), &[], &chap).await.unwrap_err();
        assert!(refused.to_string().contains(why), "nothing is sealed by a guess: {refused}");
        assert!(node.stop().await.clean);
        assert_eq!(fs::read_to_string(key_file(dir.path())).unwrap(), text, "it is left alone");
    }
    set(&good, 0o600);
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    assert!(node.stop().await.clean);
}

#[tokio::test]
async fn a_new_key_in_front_seals_everything_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create_guarded(&client, "a").await;
    assert!(node.stop().await.clean);
    let old = fs::read_to_string(key_file(dir.path())).unwrap();
    let (store, before) = record(dir.path()).await;
    drop(store);
    fs::write(key_file(dir.path()), format!("{}\n{old}", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    // The first round starts at once; the volume's lock is free when it has ended.
    tokio::time::sleep(Duration::from_millis(500)).await;
    common_allow(&client).await;
    assert_eq!(proves(&client, "a", SECRET).await, IN);
    assert!(node.stop().await.clean);
    let (store, after) = record(dir.path()).await;
    drop(store);
    let key = |entry: &cluster::store::Entry| {
        let text = String::from_utf8(entry.value.clone()).unwrap();
        text.split("\"sealed\":\"").nth(1).unwrap()[..18].to_owned()
    };
    assert_ne!(key(&before), key(&after));
    fs::write(key_file(dir.path()), format!("{}\n", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(proves(&client, "a", SECRET).await, IN, "the old key is not needed any more");
    assert!(node.stop().await.clean);
}

/// RFD 0020, 2: secrets of hosts are sealed like those of CHAP, with the same keyring.
#[tokio::test]
async fn secrets_of_hosts_are_sealed_as_all_are() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let [secret, controller] = DHCHAP;
    let set: HostDhchap = serde_json::from_str(&format!(
        r#"{{"host":"nqn.2014-08.org.nvmexpress:h",
            "secrets":{{"secret":"{secret}","controller_secret":"{controller}"}}}}"#
    ))
    .unwrap();
    let set = async |client: &Client| {
        client.call_on::<SetHostDhchap>(&name("a"), &[], &set).await.unwrap();
    };
    set(&client).await;
    assert_eq!(critical(&client).await, []);
    assert!(node.stop().await.clean);
    let store = fs::read(dir.path().join("data/store.redb")).unwrap();
    assert!(!store.windows(6).any(|w| w == b"DHHC-1"), "the store shows a secret");
    let (store, before) = record(dir.path()).await;
    drop(store);
    let text = String::from_utf8(before.value.clone()).unwrap();
    assert_eq!(text.matches(r#""sealed":"1."#).count(), 2, "{text}");

    // A new first key: all secrets are sealed with it.
    let old = fs::read_to_string(key_file(dir.path())).unwrap();
    fs::write(key_file(dir.path()), format!("{}\n{old}", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    // The first round starts at once; the volume's lock is free when it has ended.
    tokio::time::sleep(Duration::from_millis(500)).await;
    common_allow(&client).await;
    assert!(node.stop().await.clean);
    fs::write(key_file(dir.path()), format!("{}\n", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(critical(&client).await, [], "the old key is not needed any more");
    assert!(node.stop().await.clean);

    fs::remove_file(key_file(dir.path())).unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [(subject, found)] = &critical(&client).await[..] else { panic!("one finding") };
    assert_eq!(subject, "volume a");
    for part in
        ["secrets of NVMe hosts", "data/secrets.key", "sealed by key", "windrose volume dhchap a"]
    {
        assert!(found.contains(part), "{part}: {found}");
    }
    assert_eq!(show(&client, "a").await.unwrap().state, VolumeState::Online);
    set(&client).await;
    assert_eq!(critical(&client).await, [], "set again, they are good");
    assert!(node.stop().await.clean);
}

/// Whether the volume accepts that key in a TLS handshake with this host.
async fn takes(client: &Client, volume: &str, key: &str) -> bool {
    let nvme = show(client, volume).await.unwrap().nvme.unwrap();
    let to: SocketAddr = nvme.portals[0].parse().unwrap();
    let key = nvme::tls::TlsKey::parse(key).unwrap();
    let psk = key.psks(NVME_HOST, &nvme.subsystem).next().unwrap();
    let psk = tls::Psk::new(psk.identity().as_bytes(), psk.key(), tls::CipherSuite::Aes128Sha256);
    tokio::task::spawn_blocking(move || shake_hands(to, &psk)).await.unwrap()
}

fn shake_hands(to: SocketAddr, psk: &tls::Psk) -> bool {
    use std::io::{Read, Write};
    /// Alert `decrypt_error`: the key is refused.
    const REFUSED: tls::TlsError = tls::TlsError::Alert(51);
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut session = tls::Session::client(psk).unwrap();
    loop {
        let done = session.handshake();
        let sent = session.output().len();
        stream.write_all(session.output()).unwrap();
        session.consume_output(sent);
        match done {
            Ok(true) => return true,
            Ok(false) => {}
            Err(why) => {
                assert_eq!(why, REFUSED);
                return false;
            }
        }
        let mut bytes = vec![0; session.input_capacity()];
        match stream.read(&mut bytes).unwrap() {
            0 => session.receive_end(),
            n => session.receive(&bytes[..n]),
        }
    }
}

const NVME_HOST: &str = "nqn.2014-08.org.nvmexpress:h";

/// RFD 0022, 3: a key takes effect when it is set, and is sealed like all secrets; without the
/// sealing key no host's handshake succeeds.
#[tokio::test]
async fn keys_of_hosts_are_sealed_and_used() {
    let dir = tempfile::tempdir().unwrap();
    let (node, client) = start(dir.path(), "").await;
    create(&client, "a").await;
    let set = async |client: &Client, key: Option<&str>| {
        let key = key.map(|key| serde_json::json!({ "key": key, "required": false }));
        let ask = serde_json::json!({ "host": NVME_HOST, "key": key });
        let ask: HostTls = serde_json::from_value(ask).unwrap();
        client.call_on::<SetHostTls>(&name("a"), &[], &ask).await.unwrap();
    };
    let [first, second] = KEYS;
    assert!(!takes(&client, "a", first).await, "there is none");
    set(&client, Some(first)).await;
    assert!(takes(&client, "a", first).await && !takes(&client, "a", second).await);
    set(&client, Some(second)).await;
    assert!(takes(&client, "a", second).await && !takes(&client, "a", first).await);
    set(&client, None).await;
    assert!(!takes(&client, "a", second).await);
    set(&client, Some(first)).await;
    assert_eq!(critical(&client).await, []);
    assert!(node.stop().await.clean);
    let store = fs::read(dir.path().join("data/store.redb")).unwrap();
    assert!(!store.windows(10).any(|w| w == b"NVMeTLSkey"), "the store shows a key");
    let (store, before) = record(dir.path()).await;
    drop(store);
    let text = String::from_utf8(before.value.clone()).unwrap();
    assert_eq!(text.matches(r#""sealed":"1."#).count(), 1, "{text}");

    // A new first key: it seals this TLS key too, although TLS is not required.
    let old = fs::read_to_string(key_file(dir.path())).unwrap();
    fs::write(key_file(dir.path()), format!("{}\n{old}", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    // The first round starts at once; the volume's lock is free when it has ended.
    tokio::time::sleep(Duration::from_millis(500)).await;
    common_allow(&client).await;
    assert!(node.stop().await.clean);
    fs::write(key_file(dir.path()), format!("{}\n", "5a".repeat(32))).unwrap();
    let (node, client) = start(dir.path(), "").await;
    assert_eq!(critical(&client).await, [], "the old key is not needed any more");
    assert!(takes(&client, "a", first).await);
    assert!(node.stop().await.clean);

    fs::remove_file(key_file(dir.path())).unwrap();
    let (node, client) = start(dir.path(), "").await;
    let [(subject, found)] = &critical(&client).await[..] else { panic!("one finding") };
    assert_eq!(subject, "volume a");
    for part in
        ["TLS keys of NVMe hosts", "data/secrets.key", "sealed by key", "windrose volume tls a"]
    {
        assert!(found.contains(part), "{part}: {found}");
    }
    assert_eq!(show(&client, "a").await.unwrap().state, VolumeState::Online);
    assert!(!takes(&client, "a", first).await, "no key opens it");
    set(&client, Some(first)).await;
    assert_eq!(critical(&client).await, [], "set again, it is good");
    assert!(takes(&client, "a", first).await);
    assert!(node.stop().await.clean);
}
