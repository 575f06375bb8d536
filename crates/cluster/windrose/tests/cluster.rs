//! The real program, several times: nodes that become a cluster, lose one of them, and leave it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::common::{TestNode, cli, now, pause, texts};
use crate::recovery;
use cluster::join_token::{JoinToken, TokenSecret};
use cluster::store::MetadataStore;
use cluster::store::etcd::{EtcdSettings, EtcdStore, EtcdTls};
use probe::iscsi::Session;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::Value;

/// How long a cluster may take to notice something; the machine may be busy.
pub(crate) const CLUSTER_TIMEOUT: Duration = Duration::from_secs(60);

/// Whether `etcd` is installed; reports a skip if not.
pub(crate) fn has_etcd() -> bool {
    testkit::installed(&["etcd"])
}

/// A node's own loopback address, so that every store member can use the usual ports.
pub(crate) fn address(number: u8) -> String {
    let pid = std::process::id();
    format!("127.{}.{}.{number}", 64 + (pid >> 8) % 64, pid % 256)
}

fn cluster_node(number: u8) -> TestNode {
    TestNode::new(&listens(number))
}

/// The addresses section of a cluster node's configuration.
fn listens(number: u8) -> String {
    format!("[cluster]\nlisten = [\"{}:7480\"]\n", address(number))
}

/// A CA that signs a cluster's certificates, in a directory of its own.
struct TestCa {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl TestCa {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let root = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), root.pem()).unwrap();
        Self { dir, issuer: Issuer::new(params, key) }
    }

    /// A test node of a cluster that uses TLS.
    fn node(&self, number: u8) -> TestNode {
        let key = KeyPair::generate().unwrap();
        // Store members also check the address a connection comes from.
        let params = CertificateParams::new(vec![address(number), "127.0.0.1".into()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let (cert_path, key_path) = (format!("cert{number}.pem"), format!("key{number}.pem"));
        let (cert_path, key_path) = (path(&cert_path), path(&key_path));
        std::fs::write(&cert_path, cert.pem()).unwrap();
        std::fs::write(&key_path, key.serialize_pem()).unwrap();
        std::fs::set_permissions(&key_path, Permissions::from_mode(0o600)).unwrap();
        TestNode::new(&format!(
            "[cluster]\nlisten = [\"{}:7480\"]\ntls_ca = \"{}\"\ntls_cert = \"{cert_path}\"\n\
             tls_key = \"{key_path}\"\n",
            address(number),
            path("ca.pem"),
        ))
    }
}

/// The nodes that `node` sees, once they are as `wanted`.
pub(crate) fn wait_nodes(node: &TestNode, wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let cluster = node.json(&["cluster", "nodes"]);
        let nodes = cluster["nodes"].as_array().unwrap();
        if wanted(nodes) {
            return nodes.clone();
        }
        assert!(now() < deadline, "still {cluster}: {}", node.log());
        pause(100);
    }
}

/// Waits until a node serves all of its volumes: mirrors open once leases of an earlier incarnation
/// have expired.
pub(crate) fn wait_all_online(node: &TestNode, count: usize) {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let list = node.json(&["volume", "list"]);
        let volumes = list["volumes"].as_array().unwrap();
        assert_eq!(volumes.len(), count, "{list}");
        if volumes.iter().all(|v| v["state"]["kind"] == "online") {
            return;
        }
        assert!(now() < deadline, "still {list}: {}", node.log());
        pause(100);
    }
}

pub(crate) fn alive(nodes: &[Value]) -> Vec<u64> {
    let alive = nodes.iter().filter(|n| n["alive"] == true);
    alive.map(|n| n["node"].as_u64().unwrap()).collect()
}

#[test]
fn nodes_become_a_cluster_lose_one_and_leave() {
    if !has_etcd() {
        return;
    }
    let (a, b, w) = (cluster_node(1), cluster_node(2), cluster_node(3));
    let (_a, node_b, _w) = (a.start(), b.start(), w.start());
    for name in ["web", "mail"] {
        a.ok(&["volume", "create", name, "--size", "4M"]);
    }
    assert!(a.fails(1, &["cluster", "token"]).contains("in no cluster"));
    a.ok(&["cluster", "init"]);
    wait_all_online(&a, 2);
    assert!(a.path().join("data/store.redb.before-cluster").exists());
    assert!(a.fails(1, &["cluster", "init"]).contains("in cluster"));

    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    let token = token.trim();
    let half = &token[..token.len() / 2];
    assert!(b.fails(1, &["cluster", "join", "--token", half]).contains("incomplete or invalid"));
    assert!(a.fails(1, &["cluster", "join", "--token", token]).contains("in cluster"));
    b.ok(&["cluster", "join", "--token", token]);
    let file = w.path().join("token");
    std::fs::write(&file, token).unwrap();
    w.ok(&["cluster", "witness", "--cluster-token-file", file.to_str().unwrap()]);
    for node in [&a, &b, &w] {
        wait_nodes(node, |nodes| alive(nodes) == [1, 2, 3]);
    }
    let cluster = a.json(&["cluster", "nodes"]);
    let store = cluster["store"].as_array().unwrap();
    assert!(store.len() == 3 && store.iter().all(|m| m["voter"] == true), "{cluster}");
    assert_eq!(cluster["nodes"][2]["role"], "witness");
    let refused = w.fails(1, &["volume", "create", "x", "--size", "4M"]);
    assert!(refused.contains("is a witness"), "{refused}");

    what_is_answered_is_how_it_is_then(&a, &b);
    assert!(a.fails(4, &["node", "drain", "9"]).contains("no node 9"));
    assert!(a.fails(1, &["cluster", "leave"]).contains("has a replica of volume"));
    assert!(
        a.fails(1, &["cluster", "leave", "--node", "2", "--force", "--yes"]).contains("is running")
    );

    node_b.kill();
    for node in [&a, &w] {
        wait_nodes(node, |nodes| alive(nodes) == [1, 3]);
    }
    [&a, &w].into_iter().for_each(tells_that_the_second_member_is_down);
    assert_eq!(a.json(&["volume", "list"])["volumes"].as_array().unwrap().len(), 2);
    assert!(a.fails(1, &["cluster", "leave", "--node", "2"]).contains("--force"));
    let leave = ["cluster", "leave", "--node", "2", "--force"];
    assert!(a.fails(2, &leave).contains("--confirm 2"), "it was not confirmed");
    let wrong = [&leave[..], &["--confirm", "3"]].concat();
    assert!(a.fails(2, &wrong).contains("the confirmation names 3"));
    let left = a.json(&[&leave[..], &["--confirm", "2"]].concat());
    assert_eq!(left["nodes"].as_array().unwrap().len(), 2, "{left}");
    wait_nodes(&w, |nodes| nodes.len() == 2);

    // The old disk returns under its old number, and is reported.
    let _b = b.spawn_node();
    let deadline = now() + CLUSTER_TIMEOUT;
    while !b.log().contains("this node was removed from the cluster") {
        assert!(now() < deadline, "{}", b.log());
        pause(100);
    }
    let refused = b.fails(2, &["cluster", "leave", "--force"]);
    assert!(refused.contains("node test was not removed") && refused.contains("--confirm test"));
    b.ok(&["cluster", "leave", "--force", "--confirm", "test"]);
    assert_eq!(b.json(&["cluster", "nodes"])["stage"], "standalone");
    w.ok(&["cluster", "leave"]);
    wait_nodes(&a, |nodes| nodes.len() == 1);
    assert!(a.fails(1, &["cluster", "leave"]).contains("the last one of its cluster"));
    assert_eq!(a.json(&["cluster", "nodes"])["store"].as_array().unwrap().len(), 1);
}

/// The second node is drained at itself, and resumed at the first.
fn what_is_answered_is_how_it_is_then(a: &TestNode, b: &TestNode) {
    for _ in 0..5 {
        let drained = b.json(&["node", "drain"]);
        assert_eq!(drained["nodes"][1]["drained"], true, "{drained}");
        wait_nodes(a, |nodes| nodes[1]["drained"] == true);
        let resumed = a.json(&["node", "resume", "2"]);
        assert_eq!(resumed["nodes"][1]["drained"], false, "{resumed}");
        wait_nodes(b, |nodes| nodes[1]["drained"] == false);
    }
}

fn tells_that_the_second_member_is_down(test_node: &TestNode) {
    let lost = finding(test_node, "metadata store", "member node-2 is down");
    let hint = "start windrose on node test, or fix its network; if it is lost for good: windrose \
        cluster leave --node 2 --force; one more loss stops changes (I/O continues)";
    assert_eq!((&lost["severity"], &lost["hint"]), (&"warning".into(), &hint.into()));
    let cluster = test_node.json(&["cluster", "nodes"]);
    let two = cluster["store"].as_array().unwrap().iter().find(|m| m["name"] == "node-2");
    let problem = two.unwrap()["problem"].as_str().unwrap();
    assert!(problem.contains("does not respond"), "{cluster}");
}

/// The status finding of `node` about `subject` that contains `words`, once it appears.
pub(crate) fn finding(node: &TestNode, subject: &str, words: &str) -> Value {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        // The exit code shows the verdict.
        let out = node.cli(&["status", "--json"]);
        let status: Value = serde_json::from_slice(&out.stdout).unwrap();
        let mut findings = status["findings"].as_array().unwrap().iter();
        let output =
            |f: &&Value| f["subject"] == subject && f["message"].as_str().unwrap().contains(words);
        if let Some(found) = findings.find(output) {
            return found.clone();
        }
        assert!(now() < deadline, "{words}: {status}");
        pause(200);
    }
}

/// A volume whose creation was acknowledged is usable: another node may die the next moment.
#[test]
fn a_created_volume_serves_when_that_is_told() {
    if !has_etcd() {
        return;
    }
    let ([a, _, _], _daemons) = &recovery::cluster(111);
    // The store's health is polled every few seconds.
    wait_safe(a);
    for name in ["v1", "v2", "v3", "v4", "v5", "v6"] {
        a.ok(&["volume", "create", name, "--size", "4M", "--replicas", "2"]);
        let volume = a.json(&["volume", "show", name]);
        assert_eq!(volume["state"]["kind"], "online", "{volume}\n{}", a.log());
        let copies = volume["replicas"].as_array().unwrap();
        assert!(copies.iter().all(|copy| copy["state"]["kind"] == "in_sync"), "{volume}");
        let status = a.cli(&["status"]);
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    }
}

#[test]
fn a_volume_that_is_used_at_another_node_is_not_deleted() {
    const INITIATOR: &str = "iqn.1993-08.org.debian:01:a";
    if !has_etcd() {
        return;
    }
    let (a, b, w) = (cluster_node(21), cluster_node(22), cluster_node(23));
    let (_a, node_b, _w) = (a.start(), b.start(), w.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    w.ok(&["cluster", "witness", "--token", token.trim()]);
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2, 3]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    a.ok(&["volume", "allow", "web", INITIATOR]);
    for node in [&a, &b] {
        wait_all_online(node, 1);
    }
    let volume = a.json(&["volume", "show", "web"]);
    let (target, portals) = (&volume["iscsi"]["target"], &volume["iscsi"]["portals"]);
    let at_b = portals[1].as_str().unwrap().parse().unwrap();
    let deadline = now() + CLUSTER_TIMEOUT;
    let session = loop {
        match Session::login(at_b, INITIATOR, target.as_str().unwrap(), 0, 1) {
            Ok(session) => break session,
            Err(error) => assert!(now() < deadline, "{error}: {}", b.log()),
        }
        pause(100);
    };
    let delete = ["volume", "delete", "web", "--yes"];
    // At once, and from either side: reports from before the login do not count.
    for node in [&a, &b] {
        let refused = node.fails(1, &delete);
        assert!(refused.contains("volume web is in use by"), "{refused}");
    }
    assert!(a.fails(1, &delete).contains("1 session at node test"));
    drop(session);
    node_b.kill();
    // It refuses, whether or not the node counts as alive.
    let refused = a.fails(1, &delete);
    assert!(refused.contains("may be in use at node test"), "{refused}");
    let _b = b.start();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2, 3]);
    let deadline = now() + CLUSTER_TIMEOUT;
    while !a.cli(&delete).status.success() {
        assert!(now() < deadline, "{}", a.fails(1, &delete));
        pause(200);
    }
}

/// The store of a cluster with members at the addresses `numbers`, as the node at `node` reaches
/// it.
pub(crate) fn store_of(node: &TestNode, numbers: impl IntoIterator<Item = u8>) -> EtcdStore {
    let endpoints = numbers.into_iter().map(|n| format!("https://{}:2379", address(n))).collect();
    let file = |name: &str| node.path().join("data/tls").join(name);
    let tls = EtcdTls { ca: file("ca.crt"), identity: Some((file("node.crt"), file("node.key"))) };
    EtcdStore::new(&EtcdSettings { endpoints, tls: Some(tls), ..EtcdSettings::default() }).unwrap()
}

/// Adds a learner at `peer_url` to the store of `node`, number `number`.
fn add_learner(node: &TestNode, number: u8, peer_url: &str) {
    let store = store_of(node, [number]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(store.add_member(peer_url, true)).unwrap();
}

#[test]
fn a_learner_that_never_came_is_named_and_removed() {
    if !has_etcd() {
        return;
    }
    let (a, b) = (cluster_node(31), cluster_node(32));
    let (_a, _b) = (a.start(), b.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    let never = format!("https://{}:2380", address(33));
    add_learner(&a, 31, &never);
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| b.ok(&["cluster", "join", "--token", token.trim()]));
        let found = finding(&a, "metadata store", &never);
        assert_eq!(found["severity"], "note");
        let remove = ["cluster", "leave", "--node", &never, "--force", "--yes"];
        let command = format!("windrose {}", remove[..5].join(" "));
        assert!(found["hint"].as_str().unwrap().contains(&command), "{found}");
        let deadline = now() + CLUSTER_TIMEOUT;
        while !b.log().contains(&format!("member {never} of the store is still catching up")) {
            assert!(now() < deadline, "{}", b.log());
            pause(100);
        }
        assert!(a.fails(4, &["cluster", "leave", "--node", "absent"]).contains("no node absent"));
        assert!(a.fails(1, &remove[..4]).contains("--force"));
        a.ok(&remove);
        joined.join().unwrap();
    });
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2]);
}

/// Waits until `node` reports that all data is safe.
pub(crate) fn wait_safe(node: &TestNode) {
    let deadline = now() + CLUSTER_TIMEOUT;
    while !node.cli(&["status"]).status.success() {
        assert!(now() < deadline, "{}\n{}", node.ok(&["volume", "list"]), node.log());
        pause(100);
    }
}

#[test]
fn nodes_of_one_authority_mirror_over_tls() {
    if !has_etcd() {
        return;
    }
    let authority = TestCa::new();
    let (a, b, w) = (authority.node(11), authority.node(12), authority.node(13));
    let (_a, node_b, _w) = (a.start(), b.start(), w.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    let token = token.trim();

    // A token without a certificate, or with that of another authority, is useless.
    let other = TestCa::new();
    for (stranger, why) in
        [(cluster_node(14), "set cluster.tls_ca"), (other.node(14), "certificate")]
    {
        let _stranger = stranger.start();
        let refused = stranger.fails(1, &["cluster", "join", "--token", token]);
        assert!(refused.contains(why), "{refused}");
    }

    b.ok(&["cluster", "join", "--token", token]);
    w.ok(&["cluster", "witness", "--token", token]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    for node in [&a, &b] {
        wait_safe(node);
        assert!(node.log().contains("a session is up"), "{}", node.log());
    }
    node_b.kill();
    let _b = b.start();
    wait_safe(&b);
}

/// A refused removal of a node removes its replicas of no volume.
#[test]
fn a_removal_that_is_refused_has_changed_no_volume() {
    if !has_etcd() {
        return;
    }
    let ([a, b, _w], [_a, node_b, _node_w]) = recovery::cluster(125);
    a.ok(&["volume", "create", "both", "--size", "4M", "--replicas", "2"]);
    b.ok(&["volume", "create", "only", "--size", "4M", "--on", "b"]);
    wait_safe(&a);
    node_b.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 3]);
    // Until the other replica continues alone.
    let _ = finding(&a, "volume both", "1 of 2 replicas");
    let refused = a.fails(1, &["cluster", "leave", "--node", "b", "--force", "--yes"]);
    assert!(
        refused.contains("volume only;") && refused.contains("no volume was changed"),
        "{refused}"
    );
    let copies =
        |name: &str| a.json(&["volume", "show", name])["replicas"].as_array().unwrap().len();
    assert_eq!((copies("both"), copies("only")), (2, 1));
    // The printed command works, and its warning is true.
    let give_up = "windrose volume delete only --discard --force";
    assert!(
        refused.contains(give_up) && !refused.contains("volume force-primary only"),
        "{refused}"
    );
    let unknown = a.fails(1, &["volume", "delete", "only", "--yes"]);
    assert!(unknown.contains(give_up), "{unknown}");
    let kept = a.fails(1, &["volume", "delete", "only", "--force", "--yes"]);
    assert!(kept.contains(give_up), "{kept}");
    let output = a.ok(&["volume", "delete", "only", "--discard", "--force", "--yes"]);
    assert!(
        output.contains("Volume only is being deleted: its replica on b is erased when"),
        "{output}"
    );
    let waits = finding(&a, "volume only", "it is being deleted: the replica on b is erased when");
    assert!(waits["hint"].as_str().unwrap().contains("cluster leave --node b --force"), "{waits}");
    a.ok(&["cluster", "leave", "--node", "b", "--force", "--yes"]);
    assert_eq!(copies("both"), 1);
    assert!(!texts(&a.cli(&["status"])).0.contains("volume only"));
}

/// RFD 0038, 2.1 and 2.5.
#[test]
fn a_cluster_is_closed_to_who_has_no_certificate_of_it() {
    if !has_etcd() {
        return;
    }
    let (a, b) = (cluster_node(121), cluster_node(122));
    let (_a, node_b) = (a.start(), b.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    wait_all_online(&b, 1);
    let status = a.cli(&["status", "--json"]).stdout;
    assert!(!String::from_utf8_lossy(&status).contains("plain text"));
    // Neither in plain text, nor with the right authority and no certificate, nor with that of
    // another cluster.
    let other = TestNode::new("");
    let authority = cluster::certificate_authority::CertificateAuthority::new().unwrap();
    let shown = authority.issue("stranger", [address(121).parse().unwrap()]).unwrap();
    std::fs::write(other.path().join("node.crt"), shown.certificate).unwrap();
    std::fs::write(other.path().join("node.key"), shown.key).unwrap();
    let identity = Some((other.path().join("node.crt"), other.path().join("node.key")));
    let ca = a.path().join("data/tls/ca.crt");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reads = |store: EtcdStore| runtime.block_on(async move { store.get("cluster").await });
    for (scheme, tls) in [
        ("http", None),
        ("https", Some(EtcdTls { ca: ca.clone(), identity: None })),
        ("https", Some(EtcdTls { ca, identity })),
    ] {
        for port in [2379, 2380] {
            let endpoints = vec![format!("{scheme}://{}:{port}", address(121))];
            let stranger = EtcdStore::new(&EtcdSettings {
                endpoints,
                tls: tls.clone(),
                ..EtcdSettings::default()
            });
            let read = reads(stranger.unwrap());
            assert!(read.is_err(), "{scheme} {port}: {read:?}");
        }
    }
    assert!(reads(store_of(&a, [121])).unwrap().is_some());
    // The join port presents a certificate, and requires a token.
    let join_url = format!("https://{}:7481", address(121));
    let ca = a.path().join("data/tls/ca.crt").display().to_string();
    for words in [&["status"][..], &["cluster", "init"], &["cluster", "token", "list"]] {
        let (_, refused) = texts(&cli(&join_url, &[words, &["--ca-cert", &ca]].concat()));
        assert!(refused.contains("which need a token"), "{words:?}: {refused}");
    }
    // A request of another version presents no token either, and does not learn the program's
    // version.
    let newer = std::process::Command::new("curl")
        .args(["-s", "-k", "-w", " %{http_code}", "-d", r#"{"format":9,"version":"x"}"#])
        .arg(format!("{join_url}/v1/join"))
        .output();
    if let Ok(newer) = newer {
        let output = String::from_utf8_lossy(&newer.stdout);
        assert!(output.ends_with(" 401") && output.contains("speaks version 1"), "{output}");
        assert!(!output.contains(env!("CARGO_PKG_VERSION")), "{output}");
    }
    // Certificates are signed again at each start, by this node and without expiry.
    let file = b.path().join("data/tls/node.crt");
    let first = std::fs::read(&file).unwrap();
    node_b.kill();
    let _b = b.start();
    wait_all_online(&b, 1);
    assert_ne!(std::fs::read(&file).unwrap(), first);
}

#[test]
fn a_cluster_in_plain_text_is_wanted_in_words_and_says_so() {
    if !has_etcd() {
        return;
    }
    let (a, b) = (cluster_node(123), cluster_node(124));
    let (_a, _b) = (a.start(), b.start());
    a.ok(&["cluster", "init", "--insecure"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    a.ok(&["volume", "create", "web", "--size", "4M", "--replicas", "2"]);
    for node in [&a, &b] {
        let found = finding(node, "cluster", "plain text");
        assert!(found["hint"].as_str().unwrap().contains("--insecure"), "{found}");
        wait_all_online(node, 1);
    }
}

/// The words of the command that a hint begins with, after the program's name.
fn first_command(hint: &str) -> Vec<&str> {
    hint.split(' ').skip(1).take(3).collect()
}

/// RFD 0038, 2.3.
#[test]
fn tokens_let_in_whom_they_are_for_and_a_human_decides_where_they_say_so() {
    if !has_etcd() {
        return;
    }
    let (a, b, c) = (cluster_node(141), cluster_node(142), TestNode::named("c", &listens(143)));
    let (_a, _b, _c) = (a.start(), b.start(), c.start());
    a.ok(&["cluster", "init"]);
    let create = |node: &TestNode, more: &[&str]| {
        let words = [&["cluster", "token", "create"], more].concat();
        node.ok(&words).trim().to_owned()
    };
    let refused =
        |node: &TestNode, token: &str| node.fails(1, &["cluster", "join", "--token", token]);
    // Occupying the port's connection slots locks no node out.
    let join_address = format!("{}:7481", address(141));
    let idle: Vec<_> =
        (0..40).map(|_| std::net::TcpStream::connect(&join_address).unwrap()).collect();
    let for_witness = create(&a, &["--witness"]);
    assert!(refused(&b, &for_witness).contains("for a witness only"));
    let short = create(&a, &["--expires", "1s"]);
    let token = a.ok(&["cluster", "token"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    assert!(refused(&c, token.trim()).contains("used up"));
    pause(1100);
    assert!(refused(&c, &short).contains("expired"));
    drop(idle);
    // Guesses of tokens are reported.
    let guess =
        JoinToken { secret: TokenSecret::new([0; 16]), ..JoinToken::parse(&short).unwrap() };
    for _ in 0..6 {
        assert!(refused(&c, &guess.to_text()).contains("does not know this token"));
    }
    let found = finding(&a, "joins", "failed to authenticate by a token to join");
    // Nodes have joined from this address before, so it is a known one.
    assert_eq!(found["severity"], "warning", "{found}");

    // On any node, also on one that has just joined.
    let taken = create(&b, &["--uses", "3"]);
    let list = b.json(&["cluster", "token", "list"]);
    let valid =
        list["tokens"].as_array().unwrap().iter().find(|t| t["remaining_uses"] == 3).unwrap();
    a.ok(&["cluster", "token", "revoke", valid["id"].as_str().unwrap()]);
    assert!(refused(&c, &taken).contains("revoked"));
    assert!(b.fails(4, &["cluster", "token", "revoke", "00000000"]).contains("no token 00000000"));

    let token = create(&b, &["--require-approval"]);
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| c.ok(&["cluster", "join", "--token", &token]));
        let found = finding(&a, "joins", "waits for approval");
        let output = found["message"].as_str().unwrap();
        assert!(output.contains("node c at ") && output.contains(&address(143)), "{found}");
        assert!(c.json(&["cluster", "nodes"])["stage"] == "standalone");
        let hint = found["hint"].as_str().unwrap();
        assert!(
            hint.starts_with("windrose cluster approve ")
                && hint.contains("windrose cluster refuse ")
        );
        a.ok(&first_command(hint));
        joined.join().unwrap();
    });
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2, 3]);
    let joins = b.json(&["cluster", "joins"]);
    let states: Vec<_> =
        joins["joins"].as_array().unwrap().iter().map(|j| j["state"].clone()).collect();
    assert_eq!(states, ["joined", "joined"], "{joins}");
}

#[test]
fn copies_lie_in_the_pools_of_their_nodes() {
    if !has_etcd() {
        return;
    }
    let (a, b, w) = (cluster_node(41), cluster_node(42), cluster_node(43));
    let (_a, node_b, _w) = (a.start(), b.start(), w.start());
    let pool = |node: &TestNode| {
        let disks = ["x", "y", "z"].map(|name| {
            let path = node.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
            path.display().to_string()
        });
        let [x, y, z] = &disks;
        node.ok(&["pool", "create", "tank", "--raid", "5", x, y, z]);
        disks
    };
    pool(&a);
    a.ok(&["cluster", "init"]);
    assert_eq!(a.json(&["pool", "show", "tank"])["state"]["kind"], "online");
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    w.ok(&["cluster", "witness", "--token", token.trim()]);
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2, 3]);
    let create = ["volume", "create", "web", "--size", "4M", "--replicas", "2", "--pool", "tank"];
    let refused = a.fails(1, &create);
    assert!(refused.contains("has no such pool"), "{refused}");
    let [x, y, _] = pool(&b);
    let deadline = now() + CLUSTER_TIMEOUT;
    while !a.cli(&create).status.success() {
        assert!(now() < deadline, "{}\n{}", a.fails(1, &create), a.log());
        pause(200);
    }
    for node in [&a, &b] {
        wait_safe(node);
        assert!(node.fails(1, &["pool", "delete", "tank", "--yes"]).contains("has volumes: web"));
    }
    // Without its pool a node serves none of its volumes; the other node does.
    node_b.kill();
    let away = [&x, &y].map(|path| {
        let away = format!("{path}.away");
        std::fs::rename(path, &away).unwrap();
        (away, path)
    });
    let _b = b.start();
    let offline = finding(&b, "pool tank", "it is offline");
    assert_eq!(offline["severity"], "warning");
    wait_all_online(&a, 1);
    away.iter().for_each(|(away, path)| std::fs::rename(away, path).unwrap());
    for node in [&a, &b] {
        wait_safe(node);
    }
    a.ok(&["volume", "delete", "web", "--yes"]);
    for node in [&a, &b] {
        node.ok(&["pool", "delete", "tank", "--yes"]);
    }
}

/// Waits until a node's status contains `wanted`; returns its output.
fn says(node: &TestNode, wanted: &str) -> String {
    let deadline = now() + CLUSTER_TIMEOUT;
    loop {
        let (output, _) = texts(&node.cli(&["status"]));
        if output.contains(wanted) {
            return output;
        }
        assert!(now() < deadline, "still {output}: {}", node.log());
        pause(200);
    }
}

/// RFD 0035, 5.
#[test]
fn a_cloned_node_serves_nothing_until_somebody_says_so_and_the_first_goes_on() {
    const COPY: &str = "is a duplicate of it";
    if !has_etcd() {
        return;
    }
    let (a, b, clone) = (cluster_node(11), cluster_node(12), cluster_node(13));
    let (_a, node_b) = (a.start(), b.start());
    a.ok(&["volume", "create", "web", "--size", "4M"]);
    a.ok(&["cluster", "init"]);
    wait_all_online(&a, 1);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    b.ok(&["cluster", "join", "--token", token.trim()]);
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2]);
    a.ok(&["volume", "mirror", "add", "web"]);
    wait_all_online(&b, 1);
    assert_eq!(node_b.stop(), Some(0));
    let copy = std::process::Command::new("cp")
        .arg("-a")
        .args([b.path().join("data"), clone.path().join("data")])
        .status();
    assert!(copy.unwrap().success());
    // After a restart it is the same node at once, and the clone is not.
    let node_b = b.start();
    wait_all_online(&b, 1);
    let copied = clone.spawn_node();
    let output = says(&clone, COPY);
    for test_node in [address(12), address(13)] {
        assert!(output.contains(&format!("{test_node}:7480")), "{output}");
    }
    assert!(says(&b, "a duplicate of this node was started").contains(&address(13)));
    assert!(b.log().lines().any(|line| line.contains("ERROR") && line.contains(&address(13))));
    wait_all_online(&b, 1);
    let seen = wait_nodes(&a, |nodes| alive(nodes) == [1, 2]);
    assert!(!seen.iter().any(|node| node.to_string().contains(&address(13))), "{seen:?}");
    // When the first ends for good, the clone does not replace it by itself.
    node_b.kill();
    pause(15_000);
    says(&clone, COPY);
    assert_eq!(copied.stop(), Some(0));
    let copied = clone.spawn_node();
    says(&clone, COPY);
    assert_eq!(copied.stop(), Some(0));
    let config = clone.config().to_str().unwrap().to_owned();
    let accept = ["node", "accept-data-dir", "--config", &config, "--confirm", "test"];
    assert!(cli("unix:/nowhere", &accept).status.success());
    let _clone = clone.start();
    wait_nodes(&clone, |nodes| alive(nodes) == [1, 2]);
}

/// A node dies and is replaced: the new one joins first, since there is room for a data node, and
/// then the dead one is removed.
#[test]
fn a_node_that_joins_before_the_dead_one_is_removed_takes_its_place_also_in_the_store() {
    if !has_etcd() {
        return;
    }
    let (a, b, w, c) = (cluster_node(121), cluster_node(122), cluster_node(123), cluster_node(124));
    let (_a, node_b, node_w, _c) = (a.start(), b.start(), w.start(), c.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    let token = token.trim();
    b.ok(&["cluster", "join", "--token", token]);
    w.ok(&["cluster", "witness", "--token", token]);
    node_b.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 3]);
    c.ok(&["cluster", "join", "--token", token]);
    let lost = finding(&a, "node test", "it does not respond: it is down, or cut off");
    let command = "windrose cluster leave --node 2 --force";
    assert!(lost["hint"].as_str().unwrap().contains(command), "{lost}");
    a.ok(&["cluster", "leave", "--node", "2", "--force", "--yes"]);
    let voters = |wanted: &[&str]| {
        let deadline = now() + CLUSTER_TIMEOUT;
        loop {
            let cluster = a.json(&["cluster", "nodes"]);
            let members = cluster["store"].as_array().unwrap();
            let voters = members.iter().filter(|m| m["voter"] == true);
            let mut names: Vec<_> = voters.map(|m| m["name"].as_str().unwrap()).collect();
            names.sort_unstable();
            if names == wanted {
                return;
            }
            assert!(now() < deadline, "still {cluster}: {}", c.log());
            pause(200);
        }
    };
    voters(&["node-1", "node-3", "node-4"]);
    assert_eq!(c.json(&["cluster", "nodes"])["stage"], "member");

    // The witness is reinstalled: it reports what blocks it, and the command that clears it.
    node_w.kill();
    let again = cluster_node(125);
    let _again = again.start();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 4]);
    let witness = ["cluster", "witness", "--token", token];
    let refused = again.fails(1, &witness);
    assert!(
        refused.contains("node-3") && refused.contains("windrose cluster leave --node 3 --force"),
        "{refused}"
    );
    a.ok(&["cluster", "leave", "--node", "3", "--force", "--yes"]);
    again.ok(&witness);
    voters(&["node-1", "node-4", "node-5"]);
}

/// A node that cannot run its store member (the port is in use) still serves, also after a restart;
/// once removed it does not return by itself, and leaves nothing in the store.
#[test]
fn a_node_that_cannot_run_a_member_of_the_store_serves_and_stays_out_once_removed() {
    if !has_etcd() {
        return;
    }
    let named = |number: u8| TestNode::named(&format!("n{number}"), &listens(number));
    let [a, b, c, d] = [161, 162, 163, 164].map(named);
    let (_a, _b, node_c, node_d) = (a.start(), b.start(), c.start(), d.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    for node in [&b, &c, &d] {
        node.ok(&["cluster", "join", "--token", token.trim()]);
    }
    let taken = std::net::TcpListener::bind(format!("{}:2380", address(164))).unwrap();
    a.ok(&[
        "volume",
        "create",
        "web",
        "--size",
        "4M",
        "--replicas",
        "2",
        "--on",
        "n161",
        "--on",
        "n164",
    ]);
    wait_all_online(&d, 1);
    node_c.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2, 4]);
    a.ok(&["cluster", "leave", "--node", "3", "--force", "--yes"]);
    let learners = || {
        let cluster = a.json(&["cluster", "nodes"]);
        let members = cluster["store"].as_array().unwrap();
        members.iter().filter(|m| m["voter"] == false).count()
    };
    let wait = |what: &str, is_so: &dyn Fn() -> bool| {
        let deadline = now() + CLUSTER_TIMEOUT;
        while !is_so() {
            assert!(now() < deadline, "{what}: {}", d.log());
            pause(200);
        }
    };
    wait("it begins to run a member", &|| learners() == 1);
    node_d.kill();
    let node_d = d.spawn_node();
    wait("it serves nevertheless", &|| {
        let out = d.cli(&["volume", "list", "--json"]).stdout;
        let list = serde_json::from_slice(&out).unwrap_or(Value::Null);
        list["volumes"][0]["state"]["kind"] == "online"
    });
    node_d.kill();
    wait_nodes(&a, |nodes| alive(nodes) == [1, 2]);
    a.ok(&["cluster", "leave", "--node", "4", "--force", "--yes"]);
    assert_eq!(learners(), 0, "others could not join");
    drop(taken);
    let _d = d.spawn_node();
    wait("it is told that it was removed", &|| {
        let output = texts(&d.cli(&["status"]));
        [output.0, output.1].concat().contains("removed from the cluster")
    });
    assert_eq!(alive(&wait_nodes(&a, |_| true)), [1, 2]);
}

#[test]
fn a_token_whose_nodes_have_gone_names_them_and_how_to_get_another() {
    if !has_etcd() {
        return;
    }
    let (a, b, other) = (cluster_node(131), cluster_node(132), cluster_node(133));
    let (node_a, _b, _other) = (a.start(), b.start(), other.start());
    a.ok(&["cluster", "init"]);
    let token = a.ok(&["cluster", "token", "create", "--unlimited"]);
    node_a.kill();
    let join = ["cluster", "join", "--token", token.trim()];
    let refused = b.fails(1, &join);
    let at = format!("{}:7481: ", address(131));
    assert!(refused.contains(&at) && refused.contains("windrose cluster token"), "{refused}");
    assert!(!refused.contains("when the store responds"), "{refused}");
}
